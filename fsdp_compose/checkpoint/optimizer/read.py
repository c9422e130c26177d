"""Optimizer state by FQN, out of any optimizer over a sharded module.

Ranks may list parameters in any order: state is matched by name, and gathered in the order of the
model. What cannot be resumed on other ranks is refused by name.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from fsdp_compose.base.arguments import check_module
from fsdp_compose.buckets.bucket import Bucket
from fsdp_compose.checkpoint.contents import copy_tensor, gather_bucket, view_parameter
from fsdp_compose.checkpoint.model import Kind, StateDictType, is_first
from fsdp_compose.checkpoint.optimizer.agree import agree_on_state
from fsdp_compose.checkpoint.optimizer.members import (
    Member,
    OptimLike,
    Part,
    list_members,
    names_of,
    settings_of,
)
from fsdp_compose.checkpoint.optimizer.nested import (
    copy_containers,
    find_object,
    flatten_state,
    has_tensor,
    is_name,
    map_values,
    unflatten,
    write_exactly,
)
from fsdp_compose.checkpoint.optimizer.shapes import (
    add_state_of_others,
    find_row_keys,
    is_one_number,
    tag_owned_state,
    tag_rows,
)
from fsdp_compose.checkpoint.optimizer.watch import drop_marks
from fsdp_compose.checkpoint.ranks import meet_in, refuse_left_out
from fsdp_compose.checkpoint.values import gather_whole, show_whole
from fsdp_compose.comm.messages import SharedErrors, gather_objects
from fsdp_compose.construct.names import parameter_names
from fsdp_compose.core.guards.moved_parameters import shard_of
from fsdp_compose.core.state import owner_of
from fsdp_compose.sharded import as_own_file, is_sharded, tag, to_local

LAYOUTS = "_fsdp_compose_local"
"""The entry of ``kind="local"`` with what must be alike where it is loaded."""


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
            They may hold the parameters, or plain tensors over pieces of the shards; ranks may list
            them in different orders.
        kind: ``"full"``: plain tensors of the parameters' shapes, gathered bucket by bucket; every
            rank must call it. ``"sharded"``: no communication; live slices that know their place.
            ``"local"``: as sharded, and loads only into the same layout.
        cpu_offload, rank0_only: with ``"full"``, as in ``state_dict``.

    Raises:
        RuntimeError: with ``"full"``, on every rank: the ranks' optimizers have other parameters,
            settings or numbers that are not cut, which is named; or ``rank0_only`` would leave out
            the state of experts that other ranks hold.
        ValueError: an optimizer holds tensors that are not ``module``'s, two optimizers hold the
            same parameter, or options do not
            go together.
        TypeError: ``optim`` is not an optimizer, or keeps an object, or state that belongs to no
            parameter, which is named. With ``"full"`` on every rank.

    Example:
        >>> model = fully_shard(nn.Linear(3, 2))
        >>> optim = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        >>> model(torch.ones(1, 3)).sum().backward()
        >>> optim.step()
        >>> optim_state_dict(model, optim)["state"]["bias"]
        {'momentum_buffer': tensor([1., 1.])}
    """
    check_module("optim_state_dict", module)
    wanted = StateDictType(kind, cpu_offload, rank0_only)
    refuse_left_out("optim_state_dict", module, rank0_only)
    if kind == "full":
        found = _collect_on_all(module, optim)
        return _restore_containers(_gather_full(module, found, wanted))
    found = read_optim(module, optim)
    result = found.result
    if kind == "local":
        result["state"] = {
            name: type(values)(
                (k, as_own_file(v) if is_sharded(v) else v) for k, v in values.items()
            )
            for name, values in result["state"].items()
        }
        result[LAYOUTS] = layout_of(found.parts)
    return _restore_containers(result)


def read_optim(module: nn.Module, optim: OptimLike) -> NamedState:
    """Read what ``kind="sharded"`` gives, with every tensor under a key of its own."""
    return _collect(_read_holdings(module, optim))


@dataclass
class _Holding:
    """What one optimizer has: its own state dict, and what its numbers stand for."""

    plain: dict[str, Any]
    names: list[list[str]]
    held: list[tuple[Member, dict[Any, Any]]]
    rows: set[str]


@dataclass
class NamedState:
    """State by name, and what the names stand for."""

    result: dict[str, Any]
    parts: dict[str, Part] = field(default_factory=dict)


def _read_holdings(module: nn.Module, optim: OptimLike) -> list[_Holding]:
    """Read what each optimizer holds, every tensor under a key of its own.

    Raises:
        TypeError, ValueError: as for ``optim_state_dict``.
    """
    found: list[_Holding] = []
    for one, groups in list_members(module, optim):
        plain = copy_containers(one.state_dict())
        _check_format(one, plain)
        drop_marks(plain["param_groups"])
        numbers = [number for group in plain["param_groups"] for number in group["params"]]
        flat = [member for group in groups for member in group]
        _check_keys(one, plain["state"], numbers)
        held: list[tuple[Member, dict[Any, Any]]] = []
        for member, number in zip(flat, numbers, strict=True):
            values = plain["state"].get(number, {})
            _check_values(one, member, values)
            held.append((member, flatten_state(values)))
        names = names_of(module, groups)
        found.append(_Holding(plain, names, held, find_row_keys(held)))
    return found


def _check_format(optim: Optimizer, plain: Any) -> None:
    if not isinstance(plain, Mapping) or not {"state", "param_groups"} <= set(plain):
        keys = sorted(map(str, plain)) if isinstance(plain, Mapping) else type(plain).__name__
        raise TypeError(
            f"optimizer state: {type(optim).__name__}.state_dict() has {keys}; wanted 'state' and "
            "'param_groups', as torch.optim has. If it wraps another optimizer, pass that one and "
            "save what the wrapper keeps yourself."
        )

    extra = {key: value for key, value in plain.items() if key not in ("state", "param_groups")}
    lost = next((k for k, v in extra.items() if has_tensor(v) or find_object(v) is not None), None)
    if lost is not None:
        raise TypeError(
            f"optimizer state: {type(optim).__name__}.state_dict() has {lost!r} beside 'state' and "
            "'param_groups', with tensors or objects in it that no parameter tells the place of. "
            "If it wraps another optimizer, pass that one and save what the wrapper keeps yourself."
        )


def _check_keys(optim: Optimizer, state: Mapping[Any, Any], numbers: list[Any]) -> None:
    known = set(numbers)
    strange = next((key for key in state if key not in known), None)
    if strange is not None:
        raise TypeError(
            f"optimizer state: {type(optim).__name__} keeps state under {strange!r}, which is no "
            "parameter of its groups, so nothing tells whether it is one rank's or alike on all; "
            "wanted state by parameter, and numbers for all of them in the parameter groups."
        )


def _check_values(optim: Optimizer, member: Member, values: Mapping[Any, Any]) -> None:
    strange = next((key for key in values if not is_name(key)), None)
    if strange is not None:
        raise TypeError(
            f"optimizer state: {type(optim).__name__} keeps state of {member.parts[0].name!r} "
            f"under {strange!r}; wanted a string that does not end in an index, such as 'momentum' "
            "or 'momentum_0': checkpoints keep strings, and items of lists by their index."
        )
    if all(part.spec is None for part in member.parts):
        return
    for key, value in values.items():
        strange = find_object(value)
        if strange is not None:
            raise TypeError(describe_object(type(optim).__name__, key, member.parts[0].name, value))


def describe_object(optim: str, key: Any, name: str, value: Any) -> str:
    """Say in a message why state of a sharded parameter is refused."""
    strange = find_object(value)
    where = "" if strange is value else f" that holds a {type(strange).__name__}"
    return (
        f"optimizer state: {key!r} of {name!r} in {optim} is a {type(value).__name__}{where}, in "
        "which nothing tells slices from whole tensors, so it would resume wrongly; wanted "
        "tensors, numbers, strings, and lists, tuples and dictionaries of them."
    )


def _collect(holdings: list[_Holding]) -> NamedState:
    """Merge the state of all optimizers by name; cut state is live slices."""
    state: dict[str, dict[str, Any]] = {}
    found = NamedState({"state": state, "param_groups": []})
    for holding in holdings:
        for member, values in holding.held:
            found.parts.update((part.name, part) for part in member.parts)
            for part, own in _split_member(member, values, holding.rows):
                if own:
                    state[part.name] = own
        for group, names in zip(holding.plain["param_groups"], holding.names, strict=True):
            found.result["param_groups"].append({**settings_of(group), "params": names})
        extra = {k: v for k, v in holding.plain.items() if k not in ("state", "param_groups")}
        _check_alone(extra, found.result)
        found.result.update(extra)
    return found


def _check_alone(extra: Mapping[str, Any], before: Mapping[str, Any]) -> None:
    for key, value in extra.items():
        if write_exactly(before.get(key, value)) != write_exactly(value):
            raise TypeError(
                f"optimizer state: {key!r}, beside 'state' and 'param_groups', is {before[key]!r} "
                f"of one optimizer and {value!r} of another, and there is room for one. Save and "
                "load each of the two with a call of its own, in a folder of its own."
            )


def _collect_on_all(module: nn.Module, optim: OptimLike) -> NamedState:
    """Read and merge state so that every rank has the same, or every rank raises; a collective."""
    groups = meet_in("optim_state_dict", module)
    with SharedErrors(*groups, what="optim_state_dict"):
        holdings = _read_holdings(module, optim)
    # Where a slice is short its shape does not tell of rows; then another rank's does.
    if any(member.is_raw for holding in holdings for member, _ in holding.held):
        for group in groups:
            rows_here = [holding.rows for holding in holdings]
            for theirs in gather_objects(rows_here, group, "optim_state_dict"):
                for holding, rows in zip(holdings, theirs, strict=False):
                    holding.rows |= rows
    with SharedErrors(*groups, what="optim_state_dict"):
        found = _collect(holdings)
    state, parts = found.result["state"], found.parts
    agree_on_state("optim_state_dict", found.result, parts, groups)
    if any(part.owner is not None for part in parts.values()):
        found.result["state"] = add_state_of_others("optim_state_dict", module, state, parts)
    return found


def _restore_containers(result: dict[str, Any]) -> dict[str, Any]:
    """Give state the lists, tuples and dictionaries that the optimizer has."""
    if "state" not in result:
        return result
    state = {name: type(values)(unflatten(values)) for name, values in result["state"].items()}
    return {**result, "state": state}


def _split_member(
    member: Member, values: Mapping[str, Any], rows: Collection[str]
) -> Iterable[tuple[Part, dict[str, Any]]]:
    """Give each part of an optimizer's parameter its share of the state."""
    for part in member.parts:
        if part.owner is not None and part.spec is not None:
            yield part, tag_owned_state(part, values)
            continue
        yield part, {k: _tag_piece(member, part, k, v, k in rows) for k, v in values.items()}


def _tag_piece(member: Member, part: Part, key: str, value: Any, has_rows: bool) -> Any:
    if not isinstance(value, Tensor):
        return value
    if is_sharded(value):
        return show_whole(value)
    if part.spec is None:
        return value.detach()
    if is_one_number(key, value):
        return value.detach()
    local = (part.spec.stop - part.spec.start,)
    if member.is_raw:
        if value.ndim and has_rows and len(member.parts) == 1:
            return tag_rows(part, key, value)
        if value.shape == member.param.shape and value.ndim:
            return show_whole(tag(value.detach()[part.span], part.spec))
    elif tuple(value.shape) == local and part.spec.residence.is_taken:
        # Else it is a vector that happens to be as long, such as the last norms of the gradient.
        return show_whole(tag(value.detach(), part.spec))
    return value.detach()


def layout_of(parts: Mapping[str, Part]) -> dict[str, Any]:
    """Describe what must be alike where ``kind="local"`` is loaded; the slices know their rank."""
    return {
        name: (
            part.spec.group.size,
            part.spec.offset,
            part.spec.shard_numel,
            part.owner,
            *(() if part.spec.parallel is None else part.spec.parallel.key),
        )
        for name, part in parts.items()
        if part.spec is not None
    }


def _gather_full(module: nn.Module, found: NamedState, wanted: StateDictType) -> dict[str, Any]:
    """Gather one kind of state of one bucket at a time, in the order of the model."""
    keep = not wanted.rank0_only or is_first(module)
    sharded, parts = found.result["state"], found.parts
    position = {names[0]: i for i, names in enumerate(parameter_names(module).values())}
    ordered = sorted(sharded, key=lambda name: (position.get(name, len(position)), name))
    state = {name: dict.fromkeys(values) for name, values in sharded.items()}  # keeps the orders
    runs: dict[tuple[int, str, str], tuple[Bucket, dict[str, Tensor]]] = {}
    for name in ordered:
        entry = parts[name].entry
        for key in sorted(sharded[name], key=str):
            value = sharded[name][key]
            if is_sharded(value) and entry and entry.spec.is_cut_like(value._shard_spec):
                bucket = owner_of(entry)
                run = runs.setdefault((id(bucket), key, str(value.dtype)), (bucket, {}))
                run[1][name] = value
            elif isinstance(value, Tensor):
                full = gather_whole(value)
                state[name][key] = copy_tensor(full, wanted.cpu_offload) if keep else None
            else:
                state[name][key] = value
    for (_, key, _), (bucket, values) in runs.items():
        _gather_run(bucket, values, parts, key, state if keep else None, wanted.cpu_offload)
    copied = map_values(partial(copy_tensor, cpu=wanted.cpu_offload), found.result["param_groups"])
    return {**found.result, "state": state, "param_groups": copied} if keep else {}


def _gather_run(
    bucket: Bucket,
    values: Mapping[str, Tensor],
    parts: Mapping[str, Part],
    key: str,
    state: dict[str, dict[Any, Any]] | None,
    cpu_offload: bool,
) -> None:
    """Gather one kind of state of a bucket's parameters into ``state``, if it is kept here."""
    dtype = next(iter(values.values())).dtype
    shard = shard_of(bucket).new_zeros(bucket.layout.shard_numel, dtype=dtype)
    slices = shard.split(bucket.views.splits)
    entries = {name: parts[name].entry for name in values}
    for name, entry in entries.items():
        assert entry is not None
        slices[bucket.views.pieces[entry.index]].copy_(to_local(values[name]))
    flat = gather_bucket(bucket, shard)
    for name, entry in entries.items():
        assert entry is not None
        view = view_parameter(bucket, flat, entry.index)  # a collective where it was split
        if state is not None:
            state[name][key] = copy_tensor(view, cpu_offload)
        del view
