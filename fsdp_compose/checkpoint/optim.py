"""Optimizer state by FQN: out of any optimizer over a sharded module, and into any other.

The format is that of a plain optimizer with names for numbers::

    {"state": {fqn: {"step": tensor, "exp_avg": tensor, ...}},
     "param_groups": [{"lr": ..., "params": [fqn, ...]}, ...]}

State that is cut as its parameter is a sharded value; so is, in its own way, what one rank has all
of (``owner_step``), which only that rank lists; everything else is the same on all ranks.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from fsdp_compose.bucket import Bucket
from fsdp_compose.checkpoint.consensus import device_of, groups_of, settle
from fsdp_compose.checkpoint.members import Member, OptimLike, Part, members_of, optimizers_of
from fsdp_compose.checkpoint.model import Kind, StateDictType, is_first
from fsdp_compose.checkpoint.names import clean, listing, parameter_names
from fsdp_compose.checkpoint.rekey import has_numbers, to_names
from fsdp_compose.checkpoint.stream import full_view, gather_bucket, own_copy
from fsdp_compose.checkpoint.structure import (
    block_spec,
    by_block,
    complete,
    fits,
    owned,
    restored,
    row_keys,
)
from fsdp_compose.checkpoint.transfer import broadcast_object, broadcast_state
from fsdp_compose.checkpoint.values import as_whole, fit, needs_gather, whole, whole_shape
from fsdp_compose.comm import gather_objects
from fsdp_compose.mesh import Group
from fsdp_compose.sharded import ShardSpec, as_own_file, is_sharded, tag, to_local
from fsdp_compose.state import owner_of
from fsdp_compose.torch_private import tree_map

SCALARS = frozenset(("step", "mu_product", "eta", "mu"))
"""State of torch.optim that is one number per parameter, also for a parameter of one number."""

ELEMENTWISE = frozenset(
    (
        *("exp_avg", "exp_avg_sq", "max_exp_avg_sq", "momentum_buffer", "square_avg", "grad_avg"),
        *("acc_delta", "sum", "exp_inf", "prev", "step_size", "ax"),
    )
)
"""State of torch.optim that has the parameter's shape."""

WORLD = "_fsdp_compose_local"


def optim_state_dict(
    module: nn.Module,
    optim: OptimLike,
    kind: Kind = "full",
    *,
    cpu_offload: bool = False,
    rank0_only: bool = False,
) -> dict[str, Any]:
    """The state of an optimizer over ``module``'s parameters, by FQN; nothing is changed.

    Args:
        optim: one optimizer, or several (one per layer, one per parameter) whose states are merged.
            They may hold the parameters, or plain tensors over pieces of the shards.
        kind: ``"full"``: plain tensors of the parameters' shapes, gathered bucket by bucket; every
            rank must call it. ``"sharded"``: no communication; live slices that know their place.
            ``"local"``: as sharded, and loads only into the same layout.
        cpu_offload, rank0_only: with ``"full"``, as in ``state_dict``.

    Raises:
        ValueError: the optimizer holds tensors that are not ``module``'s, or options that do not
            go together.
        TypeError: ``optim`` is not an optimizer.
    """
    wanted = StateDictType(kind, cpu_offload, rank0_only)
    state: dict[str, dict[str, Any]] = {}
    parts: dict[str, Part] = {}
    result: dict[str, Any] = {"state": state, "param_groups": []}
    for one in optimizers_of(optim):
        plain = one.state_dict()
        groups = members_of(module, one)
        numbers = [number for group in plain["param_groups"] for number in group["params"]]
        flat = [member for group in groups for member in group]
        held = [
            (member, plain["state"].get(n, {})) for n, member in zip(numbers, flat, strict=True)
        ]
        rows = row_keys(held)
        if kind == "full" and any(member.is_raw for member in flat):
            for group in groups_of(module):
                rows = set().union(*gather_objects(rows, group))
        for member, found in held:
            parts.update((part.name, part) for part in member.parts)
            for part, values in _split(member, found, rows):
                if values:
                    state[part.name] = values
        for group, members in zip(plain["param_groups"], groups, strict=True):
            hyper = {k: v for k, v in group.items() if k not in ("params", "param_names")}
            names = [part.name for member in members for part in member.parts]
            result["param_groups"].append({**hyper, "params": names})
        result.update((k, v) for k, v in plain.items() if k not in ("state", "param_groups"))
    if kind == "full":
        if any(part.owner is not None for part in parts.values()):
            result["state"] = complete(module, state, parts)
        return _full(module, result, parts, wanted)
    if kind == "local":
        result["state"] = tree_map(lambda v: as_own_file(v) if is_sharded(v) else v, state)
        result[WORLD] = _layout(parts)
    return result


def _split(
    member: Member, values: Mapping[str, Any], rows: Collection[str]
) -> Iterable[tuple[Part, dict[str, Any]]]:
    """A member's state, for each of its parts."""
    for part in member.parts:
        if part.owner is not None and part.spec is not None:
            yield part, owned(part, values)
            continue
        yield part, {k: _piece(member, part, k, v, k in rows) for k, v in values.items()}


def _piece(member: Member, part: Part, key: str, value: Any, has_rows: bool) -> Any:
    if not isinstance(value, Tensor):
        return value
    if is_sharded(value):
        return as_whole(value)
    if part.spec is None:
        return value.detach()
    local = (part.spec.stop - part.spec.start,)
    if member.is_raw:
        if value.ndim and has_rows and len(member.parts) == 1:
            return by_block(part, key, value)
        if value.shape == member.param.shape and value.ndim:
            return as_whole(tag(value.detach()[part.span], part.spec))
    elif tuple(value.shape) == local and (local != tuple(part.shape) or part.spec.group.size > 1):
        return as_whole(tag(value.detach(), part.spec))  # an optimizer over p.to_local()
    return value.detach()


def _layout(parts: Mapping[str, Part]) -> dict[str, Any]:
    """What must be alike where ``kind="local"`` is loaded; not the rank, which the slices know."""
    return {
        name: (
            part.spec.group.size,
            part.spec.offset,
            part.spec.shard_numel,
            part.owner,
            *_place(part.spec),
        )
        for name, part in parts.items()
        if part.spec is not None
    }


def _place(spec: ShardSpec) -> tuple[object, ...]:
    return () if spec.parallel is None else spec.parallel.key


def _full(
    module: nn.Module, sharded: dict[str, Any], parts: Mapping[str, Part], wanted: StateDictType
) -> dict[str, Any]:
    """Gather one kind of state of one bucket at a time."""
    keep = not wanted.rank0_only or is_first(module)
    state: dict[str, dict[str, Any]] = {name: {} for name in sharded["state"]}
    runs: dict[tuple[int, str, torch.dtype], tuple[Bucket, dict[str, Tensor]]] = {}
    for name, values in sharded["state"].items():
        entry = parts[name].entry
        for key, value in values.items():
            if is_sharded(value) and entry is not None and value._shard_spec.key == entry.spec.key:
                bucket = owner_of(entry)
                run = runs.setdefault((id(bucket), key, value.dtype), (bucket, {}))
                run[1][name] = value
                state[name][key] = None  # keeps the order of keys
            elif isinstance(value, Tensor):
                state[name][key] = own_copy(whole(value), wanted.cpu_offload)
            else:
                state[name][key] = value
    for (_, key, dtype), (bucket, values) in runs.items():
        shard = bucket.shard.new_zeros(bucket.layout.shard_numel, dtype=dtype)
        slices = shard.split(bucket.splits)
        for name, value in values.items():
            entry = parts[name].entry
            assert entry is not None
            slices[bucket.pieces[entry.index]].copy_(to_local(value))
        flat = gather_bucket(bucket, shard)
        for name in values:
            entry = parts[name].entry
            assert entry is not None
            view = full_view(bucket, flat, entry.index)  # a collective where it was split
            if keep:
                state[name][key] = own_copy(view, wanted.cpu_offload)
            del view
        del flat
    return {**sharded, "state": state} if keep else {}


def load_optim_state_dict(
    module: nn.Module,
    optim: OptimLike,
    state_dict: Mapping[str, Any],
    *,
    broadcast_from_rank0: bool = False,
) -> None:
    """Write optimizer state into ``optim``; every rank must call it.

    Nothing is written unless everything fits on every rank. What ``state_dict`` has for other
    parameters of ``module`` is left alone, since it may belong to another optimizer.

    Args:
        optim: one optimizer over ``module``'s parameters, or several.
        state_dict: of ``optim_state_dict`` in any kind, from any world size; or of a plain
            optimizer, whose numbers are read in the order of ``optim``'s groups. Tensors may be
            plain and full, sharded and cut in any way, or DTensors. An empty state is that of an
            optimizer before its first step.
        broadcast_from_rank0: only rank 0's ``state_dict`` is read, with full tensors; one at a time
            is sent, and each rank keeps its slices.

    Raises:
        RuntimeError: parameters, groups, shapes or layouts do not fit, on any rank.
        ValueError: the optimizer holds tensors that are not ``module``'s.
        TypeError: ``optim`` is not an optimizer, or ``state_dict`` not such a dictionary.
    """
    groups = groups_of(module)
    targets = _agreed_targets(module, optim, groups)
    if broadcast_from_rank0:
        state_dict = _broadcast(module, state_dict, targets)
    problem: Exception | None = None
    given: dict[str, Any] = {}
    facts: object = None
    try:
        given = _named(module, targets, state_dict)
    except (RuntimeError, TypeError, ValueError) as error:
        problem = error
    if any(part.owner is not None for part in parts_of(targets).values()):
        settle(problem, groups)
        given["state"] = complete(module, given["state"], parts_of(targets))
    try:
        facts = None if problem else _check(module, targets, given)
    except (RuntimeError, TypeError, ValueError) as error:
        problem = error
    settle(problem, groups, facts)
    commit(targets, given)


Targets: TypeAlias = "list[tuple[Optimizer, list[list[Member]]]]"


def _agreed_targets(module: nn.Module, optim: OptimLike, groups: list[Group]) -> Targets:
    problem: Exception | None = None
    targets: Targets = []
    try:
        targets = targets_of(module, optim)
    except (TypeError, ValueError) as error:
        problem = error
    settle(problem, groups)
    return targets


def targets_of(module: nn.Module, optim: OptimLike) -> Targets:
    """Each optimizer with what its parameters are."""
    return [(one, members_of(module, one)) for one in optimizers_of(optim)]


def parts_of(targets: Targets) -> dict[str, Part]:
    """Everything the optimizers hold, by canonical name."""
    return {
        part.name: part
        for _, groups in targets
        for members in groups
        for member in members
        for part in member.parts
    }


def checked(module: nn.Module, targets: Targets, state_dict: Any) -> dict[str, Any]:
    """``state_dict`` by canonical names, or an error; tensors may be on the meta device."""
    given = _named(module, targets, state_dict)
    _check(module, targets, given)
    return given


def commit(targets: Targets, given: Mapping[str, Any]) -> None:
    """Write state that was checked."""
    ready = [(one, _numbered(one, members, given)) for one, members in targets]
    for one, plain in ready:
        one.load_state_dict(plain)


def _named(module: nn.Module, targets: Targets, state_dict: Any) -> dict[str, Any]:
    """``state_dict`` by canonical names."""
    if not isinstance(state_dict, Mapping) or not {"state", "param_groups"} <= set(state_dict):
        raise TypeError(
            f"load_optim_state_dict: got a {type(state_dict).__name__}"
            + (f" with {sorted(map(str, state_dict))[:5]}" if isinstance(state_dict, dict) else "")
            + "; wanted a dictionary with 'state' and 'param_groups'."
        )
    if has_numbers(state_dict):
        order = [
            [part.name for member in group for part in member.parts]
            for _, groups in targets
            for group in groups
        ]
        state_dict = to_names(state_dict, order)
    canonical = {name: names[0] for names in parameter_names(module).values() for name in names}
    state = {canonical.get(clean(n), clean(n)): v for n, v in state_dict["state"].items()}
    groups = [
        {**group, "params": [canonical.get(clean(n), clean(n)) for n in group["params"]]}
        for group in state_dict["param_groups"]
    ]
    unknown = [name for name in state if name not in canonical]
    unknown += [n for g in groups for n in g["params"] if n not in canonical and n not in state]
    if unknown:
        raise RuntimeError(
            "load_optim_state_dict: the module has no parameters "
            f"{listing(dict.fromkeys(unknown), canonical)}."
        )
    return {**state_dict, "state": state, "param_groups": groups}


def _check(
    module: nn.Module,
    targets: Targets,
    given: Mapping[str, Any],
) -> str:
    """Raise RuntimeError for what does not fit; return what all ranks must have alike."""
    problems: list[str] = []
    gathers = 0
    if given.get(WORLD) is not None:
        mine = _layout(parts_of(targets))
        for name, place in mine.items():
            theirs = given[WORLD].get(name)
            if theirs is not None and tuple(theirs) != place:
                what = f"saved over {theirs[0]} ranks" if theirs[0] != place[0] else "cut elsewhere"
                problems.append(
                    f"local state of {name!r} was {what}, here it is cut over {place[0]}; save "
                    "kind='sharded' or 'full' to load anywhere"
                )
                break
    saved = {name for group in given["param_groups"] for name in group["params"]}
    for one, groups in targets:
        for members in groups:
            parts = [part for member in members for part in member.parts]
            missing = [part.name for part in parts if part.name not in saved]
            if missing:
                problems.append(f"no group has {listing(missing, saved)}")
            else:
                _hyper(given, [part.name for part in parts], problems)
            for part in parts:
                values = given["state"].get(part.name, {})
                problems += _misfits(part, values, given, one)
                spec = None if part.owner is not None else part.spec
                gathers += sum(
                    needs_gather(v, spec) for v in values.values() if isinstance(v, Tensor)
                )
    if problems:
        shown = "\n  ".join(problems[:8])
        more = f"\n  and {len(problems) - 8} more" if len(problems) > 8 else ""
        raise RuntimeError(
            f"load_optim_state_dict: the state does not fit, the optimizer is unchanged:\n  "
            f"{shown}{more}"
        )
    return f"{len(given['state'])} parameters' state ({gathers} tensors to gather)"


def _hyper(given: Mapping[str, Any], names: list[str], problems: list[str]) -> dict[str, Any]:
    """The hyper-parameters saved for ``names``, which must be the same for all of them."""
    chosen: dict[str, Any] | None = None
    wanted = set(names)
    for group in given["param_groups"]:
        if wanted.isdisjoint(group["params"]):
            continue
        hyper = {k: v for k, v in group.items() if k not in ("params", "param_names")}
        if chosen is None:
            chosen = hyper
        elif repr(hyper) != repr(chosen):
            different = sorted(k for k in hyper if repr(hyper[k]) != repr(chosen.get(k)))
            problems.append(
                f"the group of {names[0]!r} is several groups in the saved state, with different "
                f"{different}; group the parameters as they were"
            )
            break
    return chosen or {}


def _misfits(
    part: Part, values: Mapping[str, Any], given: Mapping[str, Any], optim: Optimizer
) -> list[str]:
    found: list[str] = []
    for key, value in values.items():
        if not isinstance(value, Tensor):
            continue
        shape, want = tuple(whole_shape(value)), tuple(part.shape)
        rows = _rows(part, key, value, given)
        if part.span is not None and shape != want and shape and rows is None:
            found.append(
                f"{key!r} of {part.name!r} has shape {shape}, which is neither its own {want} nor "
                f"a row for each of its blocks ({fits(part)}); shard with the granularity it was "
                "saved with"
            )
            continue
        if rows is not None:
            want = tuple(rows.shape)
        cut = is_sharded(value) and part.owner is None
        if shape != want and (cut or key in ELEMENTWISE):
            found.append(f"{key!r} of {part.name!r} has global shape {shape}; wanted {want}")
        elif is_sharded(value) and (part.owner is not None or needs_gather(value, part.spec)):
            spec = value._shard_spec
            if any(group.pg is None and group.size > 1 for group in spec.whole_groups):
                found.append(
                    f"{key!r} of {part.name!r} is the slice of rank {spec.group.rank} of "
                    f"{spec.group.size} ({spec.held}), loaded without the other ranks; save "
                    "kind='full' or use save_checkpoint to load it anywhere"
                )
    return found


def _rows(part: Part, key: str, value: Any, given: Mapping[str, Any]) -> ShardSpec | None:
    """How a value is cut that has a row for each block of a raw piece; None if it is not that."""
    if part.span is None or is_elementwise(key, value, part, given) or not value.ndim:
        return None
    spec = block_spec(part, key, tuple(value.shape[1:]))
    return spec if spec is not None and spec.shape == value.shape else None


def is_elementwise(key: str, value: Any, part: Part, given: Mapping[str, Any]) -> bool:
    """Whether a state value is cut as its parameter is."""
    if not isinstance(value, Tensor) or tuple(whole_shape(value)) != tuple(part.shape):
        return False
    if is_sharded(value) or part.shape or key in ELEMENTWISE:
        return True
    if key in SCALARS:
        return False
    # A parameter of one number: the same state of a larger parameter tells which it is.
    others = (v.get(key) for n, v in given["state"].items() if n != part.name)
    return any(isinstance(other, Tensor) and other.ndim for other in others)


def _numbered(
    optim: Optimizer, groups: list[list[Member]], given: Mapping[str, Any]
) -> dict[str, Any]:
    """What the optimizer's own ``load_state_dict`` takes."""
    state: dict[int, dict[str, Any]] = {}
    param_groups: list[dict[str, Any]] = []
    number = 0
    for group, members in zip(optim.param_groups, groups, strict=True):
        numbers = []
        for member in members:
            if values := _joined(optim, member, given):
                state[number] = values
            numbers.append(number)
            number += 1
        names = [part.name for member in members for part in member.parts]
        hyper = {k: v for k, v in group.items() if k not in ("params", "param_names")}
        saved = _hyper(given, names, [])
        copied = {k: v.clone() if isinstance(v, Tensor) else v for k, v in saved.items()}
        param_groups.append({**hyper, **copied, "params": numbers})
    extra = {k: v for k, v in given.items() if k not in ("state", "param_groups", WORLD)}
    return {**extra, "state": state, "param_groups": param_groups}


def _joined(optim: Optimizer, member: Member, given: Mapping[str, Any]) -> dict[str, Any]:
    """A member's state, from that of its parts."""
    before = optim.state.get(member.param, {})
    result: dict[str, Any] = {}
    for part in member.parts:
        if part.owner is not None and part.spec is not None:
            values = given["state"].get(part.name, {})
            whole_values = {key: restored(value, part) for key, value in values.items()}
            return {} if part.is_elsewhere else whole_values
        for key, value in given["state"].get(part.name, {}).items():
            if part.spec is None or not is_elementwise(key, value, part, given):
                if isinstance(value, Tensor) and (rows := _rows(part, key, value, given)):
                    local = to_local(fit(value, rows)).clone()
                    result[key] = local.view(-1, *rows.shape[1:])
                elif key not in result:
                    result[key] = whole(value).clone() if isinstance(value, Tensor) else value
                continue
            piece = fit(value, part.spec).clone()
            if not member.is_raw:
                plain = key in before and not is_sharded(before[key])
                result[key] = to_local(piece) if plain else piece
                continue
            if key not in result:
                local = to_local(piece)
                result[key] = local.new_zeros(member.param.shape, device=member.param.device)
            result[key][part.span].copy_(to_local(piece))
    return result


def _broadcast(module: nn.Module, state_dict: Any, targets: Targets) -> dict[str, Any]:
    groups = groups_of(module)
    if not groups:
        return dict(state_dict)
    first = all(group.rank == 0 for group in groups)
    given: Any = None
    problem: Exception | None = None
    try:
        given = _named(module, targets, state_dict) if first else None
    except (RuntimeError, TypeError, ValueError) as error:
        problem = error
    settle(problem, groups)
    frame = broadcast_object(
        {k: v for k, v in given.items() if k != "state"} if first else None, groups
    )
    parts = parts_of(targets)

    def target_of(name: str) -> Any:
        part = parts.get(name.split("\0")[0])
        if part is None or part.entry is None or not part.shape or part.owner is not None:
            return None
        return part.entry.param

    flat = (
        {f"{n}\0{k}": v for n, vs in given["state"].items() for k, v in vs.items()} if first else {}
    )
    state: dict[str, dict[str, Any]] = {}
    for path, value in broadcast_state(flat, groups, target_of, device_of(module)).items():
        name, key = path.split("\0")
        state.setdefault(name, {})[key] = value
    return {**frame, "state": state}
