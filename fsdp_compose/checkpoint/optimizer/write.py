"""Optimizer state by FQN into any optimizer over a sharded module; nothing is written on error.

The format is that of a plain optimizer with names for numbers::

    {"state": {fqn: {"step": tensor, "exp_avg": tensor, ...}},
     "param_groups": [{"lr": ..., "params": [fqn, ...]}, ...]}

State that is cut as its parameter is a sharded value; so is, in its own way, what one rank has all
of (``owner_step``), which only that rank lists; everything else is the same on all ranks.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from fsdp_compose.base.arguments import check_flags, check_module
from fsdp_compose.base.loops import parameters_of
from fsdp_compose.checkpoint.contents import require_released
from fsdp_compose.checkpoint.model import describe_lone_slice
from fsdp_compose.checkpoint.optimizer.agree import agree_on_given
from fsdp_compose.checkpoint.optimizer.fit import (
    NUMBERS,
    find_numbers,
    find_pieces,
    gather_state,
    is_elementwise,
)
from fsdp_compose.checkpoint.optimizer.members import (
    Member,
    OptimLike,
    Part,
    Targets,
    is_state,
    list_members,
    load_numbered,
    settings_of,
    unchanged_by_errors,
)
from fsdp_compose.checkpoint.optimizer.nested import (
    find_object,
    flatten_state,
    is_by_key,
    join_keys,
    list_differences,
    map_values,
    unflatten,
)
from fsdp_compose.checkpoint.optimizer.read import LAYOUTS, describe_object, layout_of
from fsdp_compose.checkpoint.optimizer.rekey import has_numbers, order_by_names, to_names
from fsdp_compose.checkpoint.optimizer.shapes import (
    OwnedState,
    add_state_of_others,
    describe_blocks,
    gather_owned,
    has_own_shape,
    is_one_number,
)
from fsdp_compose.checkpoint.optimizer.watch import ELEMENTWISE, watch_optimizer
from fsdp_compose.checkpoint.ranks import device_of, groups_of, meet_in, refuse_broadcast
from fsdp_compose.checkpoint.values import (
    broadcast_state,
    describe_unreadable,
    fit,
    gather_whole,
    list_problems,
    needs_gather,
    whole_shape,
)
from fsdp_compose.comm.messages import SharedErrors, broadcast_object
from fsdp_compose.construct.names import first_names, list_names, name_cleaner
from fsdp_compose.sharded import checked_state, is_sharded, to_local


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
        state_dict: of ``optim_state_dict`` in any kind, from any world size; flattened by torch
            (``flatten_optimizer_state_dict=True``); or of a plain optimizer. The numbers of that
            stand for its ``param_names``, where these are the names of what ``optim`` trains, and
            else follow the order of ``optim``'s groups (a group of flat parameters: the module's).
            Tensors may be plain and full, sharded and cut in any way, or DTensors. An empty state
            is that of an optimizer before its first step.
        broadcast_from_rank0: only rank 0's ``state_dict`` is read, with full tensors; one at a time
            is sent, and each rank keeps its slices.

    Raises:
        RuntimeError: parameters, groups, shapes or layouts do not fit, on any rank; two ranks were
            given different state; or ``module`` is gathered now.
        ValueError: an optimizer holds tensors that are not ``module``'s, or two hold the same; or
            flattened state lacks the settings of a parameter.
        TypeError: ``optim`` is not an optimizer, or ``state_dict`` not such a dictionary.

    Example:
        >>> model = fully_shard(nn.Linear(3, 2))
        >>> optim = torch.optim.SGD(model.parameters(), lr=0.1)
        >>> saved = optim_state_dict(model, optim)
        >>> other = torch.optim.SGD(model.parameters(), lr=0.2)
        >>> load_optim_state_dict(model, other, saved)
        >>> other.param_groups[0]["lr"]
        0.1
    """
    check_module("load_optim_state_dict", module)
    check_flags("load_optim_state_dict", broadcast_from_rank0=broadcast_from_rank0)
    groups = meet_in("load_optim_state_dict", module)
    with SharedErrors(*groups, what="load_optim_state_dict"):
        require_released("load_optim_state_dict", module)
        targets = list_members(module, optim)
    if broadcast_from_rank0:
        state_dict = _broadcast_state(module, state_dict, targets)
    with SharedErrors(*groups, what="load_optim_state_dict"):
        given = _name_parameters(module, targets, state_dict)
    parts, caller = parts_of(targets), "load_optim_state_dict"
    if any(part.owner is not None for part in parts.values()):
        given["state"] = add_state_of_others(caller, module, given["state"], parts)
    with SharedErrors(*groups, what="load_optim_state_dict") as shared:
        shared.facts = _check_fit(targets, given)
        _check_readable(targets, given)
    if LAYOUTS not in given:  # there each rank's file is its own
        agree_on_given(given, parts, groups)
    with unchanged_by_errors(targets), SharedErrors(*groups, what="load_optim_state_dict"):
        write_optim(targets, given)


def parts_of(targets: Targets) -> dict[str, Part]:
    """Everything the optimizers hold, by canonical name."""
    return {
        part.name: part
        for _, groups in targets
        for members in groups
        for member in members
        for part in member.parts
    }


def check_saved(module: nn.Module, targets: Targets, state_dict: Any) -> dict[str, Any]:
    """Check state, and give it by canonical names; tensors may be on the meta device."""
    given = _name_parameters(module, targets, state_dict)
    _check_fit(targets, given)
    return given


@torch.inference_mode(False)  # what is read for inference is for training too
def write_optim(targets: Targets, given: Mapping[str, Any]) -> None:
    """Write state that was checked."""
    given = {**given, "state": gather_state(parts_of(targets), given)}
    unused = iter([group for group in given["param_groups"] if not group["params"]])
    ready = [(one, _number_parameters(one, members, given, unused)) for one, members in targets]
    for one, plain in ready:
        watch_optimizer(one)
        with checked_state():
            load_numbered(one, plain)
        params = parameters_of(one)
        for number, values in plain["state"].items():
            own = one.state.get(params[number], {})
            own.update({k: _keep_text(v, own[k]) for k, v in values.items() if k in own})


def _keep_text(saved: Any, loaded: Any) -> Any:
    """Keep strings as they were saved, since torch casts them letter by letter."""
    if isinstance(saved, str | bytes):
        return saved
    if type(saved) is dict:
        return {key: _keep_text(value, loaded[key]) for key, value in saved.items()}
    if type(saved) in (list, tuple):
        return type(saved)(map(_keep_text, saved, loaded))
    return loaded


def _name_parameters(module: nn.Module, targets: Targets, state_dict: Any) -> dict[str, Any]:
    """Give state canonical names, whatever names or numbers it has."""
    if isinstance(state_dict, Mapping) and is_by_key(state_dict):
        state_dict = join_keys(state_dict)
    if not is_state(state_dict):
        raise TypeError(
            f"load_optim_state_dict: got a {type(state_dict).__name__}"
            + (f" with {sorted(map(str, state_dict))[:5]}" if isinstance(state_dict, dict) else "")
            + "; wanted a dictionary with 'state' and 'param_groups'."
        )
    if has_numbers(state_dict):
        state_dict = to_names(state_dict, order_by_names(state_dict, targets, module))
    canonical = first_names(module)
    clean = name_cleaner(module)
    state: dict[str, dict[str, Any]] = {}
    for n, v in state_dict["state"].items():
        name, flat = canonical.get(clean(n), clean(n)), flatten_state(v)
        state[name] = OwnedState(flat) if isinstance(v, OwnedState) else flat
    groups = [
        {**group, "params": [canonical.get(clean(n), clean(n)) for n in group["params"]]}
        for group in state_dict["param_groups"]
    ]
    unknown = [name for name in state if name not in canonical]
    unknown += [n for g in groups for n in g["params"] if n not in canonical and n not in state]
    if unknown:
        raise RuntimeError(
            "load_optim_state_dict: the module has no parameters "
            f"{list_names(dict.fromkeys(unknown), canonical)}."
        )
    numbers = find_numbers(parts_of(targets), state)
    return {**state_dict, "state": state, "param_groups": groups, NUMBERS: numbers}


def _check_fit(targets: Targets, given: Mapping[str, Any]) -> str:
    """Raise RuntimeError for what does not fit; return what all ranks must have alike."""
    problems = _find_other_layout(targets, given.get(LAYOUTS) or {})
    gathers = 0
    saved = {name for group in given["param_groups"] for name in group["params"]}
    for optim, groups in targets:
        for group, members in zip(optim.param_groups, groups, strict=True):
            parts = [part for member in members for part in member.parts]
            missing = [part.name for part in parts if part.name not in saved]
            if missing:
                problems.append(
                    f"no group has {list_names(missing, saved)}; load into an optimizer of what "
                    "was saved, and give it the others by add_param_group then"
                )
            else:
                chosen = _find_settings(given, [part.name for part in parts], problems)
                problems += _find_other_kind(optim, group, parts, chosen)
            for part in parts:
                values = given["state"].get(part.name, {})
                problems += _find_misfits(part, values, given)
                spec = None if part.owner is not None else part.spec
                gathers += sum(needs_gather(v, spec) for v in values.values())
    problems += _find_differences(targets, given)
    _raise_misfit(problems)
    return f"{len(given['state'])} parameters' state ({gathers} tensors to gather)"


def _find_other_layout(targets: Targets, saved: Mapping[str, Any]) -> list[str]:
    """Say which parameter's local state is the first that was saved in another layout."""
    for name, place in layout_of(parts_of(targets)).items():
        theirs = saved.get(name)
        if theirs is not None and tuple(theirs) != place:
            what = f"saved over {theirs[0]} ranks" if theirs[0] != place[0] else "cut elsewhere"
            return [
                f"local state of {name!r} was {what}, here it is cut over {place[0]}; save "
                "kind='sharded' or 'full' to load anywhere"
            ]
    return []


def _raise_misfit(problems: list[str]) -> None:
    if problems:
        raise RuntimeError(
            "load_optim_state_dict: the state does not fit, the optimizer is unchanged:"
            f"{list_problems(problems)}"
        )


def check_read(targets: Targets, given: Mapping[str, Any]) -> None:
    """Check values of state whose shapes were checked by ``check_saved``.

    Raises:
        RuntimeError: an optimizer has no place for what was saved.
    """
    _raise_misfit(_find_differences(targets, given))


def _find_differences(targets: Targets, given: Mapping[str, Any]) -> list[str]:
    """Say where parameters that are one to an optimizer were saved with different numbers."""
    members = (m for _, groups in targets for group in groups for m in group if m.is_raw)
    found: list[str] = []
    for member in members:
        first: dict[str, tuple[str, float]] = {}
        for part in sorted(member.parts, key=lambda part: not given["state"].get(part.name)):
            values = given["state"].get(part.name) or dict.fromkeys(first, 0)  # it begins at 0
            for key, value in values.items():
                if not _is_number(value) or is_elementwise(key, value, part, given):
                    continue
                number = float(value)
                name, known = first.setdefault(key, (part.name, number))
                if known != number and not (math.isnan(known) and math.isnan(number)):
                    found.append(
                        f"{key!r} is {known:g} of {name!r} and {number:g} of {part.name!r}, for "
                        "which flat_parameters has one number, as they lie in one buffer; build "
                        "the optimizer over local_parameters(module) or module.parameters()"
                    )
    return found


def _is_number(value: Any) -> bool:
    if not isinstance(value, Tensor):
        return isinstance(value, int | float)
    return value.numel() == 1 and not (value.is_meta or value.is_complex() or is_sharded(value))


def _check_readable(targets: Targets, given: Mapping[str, Any]) -> None:
    """Raise RuntimeError for tensors without numbers that could be cut or copied."""
    problems = [
        f"{key!r} of {name!r} {why}"
        for name in parts_of(targets)
        for key, value in given["state"].get(name, {}).items()
        if (why := describe_unreadable(value)) is not None
    ]
    if problems:
        raise RuntimeError(
            "load_optim_state_dict: the state cannot be read, the optimizer is unchanged:"
            f"{list_problems(problems)}"
        )


_SHARED_SETTINGS = frozenset(
    (
        *("lr", "weight_decay", "maximize", "foreach", "capturable", "differentiable", "fused"),
        *("amsgrad", "nesterov", "decoupled_weight_decay"),
        *("initial_lr", "max_lr", "min_lr", "swa_lr", "base_momentum", "max_momentum"),
    )
)
"""Settings that tell no optimizer from another: many have them, or versions, or schedulers."""


def _find_other_kind(
    optim: Optimizer, group: Mapping[str, Any], parts: list[Part], saved: Mapping[str, Any]
) -> list[str]:
    """Say where the saved settings are those of another optimizer, which lack this one's.

    One that only has more settings than the other, or fewer, may load its state.
    """
    defaults: Mapping[str, Any] = getattr(optim, "defaults", {})  # a wrapper may have none
    strange = saved.keys() - defaults.keys() - group.keys() - _SHARED_SETTINGS
    lacking = defaults.keys() - saved.keys() - _SHARED_SETTINGS
    if not (parts and strange and lacking):
        return []
    return [
        f"the group of {parts[0].name!r} was saved by another kind of optimizer: it has "
        f"{sorted(strange)}, and lacks {sorted(lacking)} of {type(optim).__name__}; load it into "
        "the kind that saved it, or begin this one without state"
    ]


def _find_settings(
    given: Mapping[str, Any], names: list[str], problems: list[str]
) -> dict[str, Any]:
    """Find the settings saved for ``names``, which must be the same for all of them."""
    chosen: dict[str, Any] | None = None
    wanted = set(names)
    for group in given["param_groups"]:
        if wanted.isdisjoint(group["params"]):
            continue
        hyper = settings_of(group)
        if chosen is None:
            chosen = hyper
        elif different := list_differences(hyper, chosen):
            problems.append(
                f"the group of {names[0]!r} is several groups in the saved state, with different "
                f"{different}; group the parameters as they were"
            )
            break
    return chosen or {}


def _find_misfits(part: Part, values: Mapping[str, Any], given: Mapping[str, Any]) -> list[str]:
    if isinstance(values, OwnedState) and part.owner is None:
        return [
            f"{part.name!r} has state of an owner_step, which its owner alone holds, and this "
            "optimizer steps slices: kind='full' and save_checkpoint load into either"
        ]
    found: list[str] = []
    for key, value in values.items():
        if part.spec is not None and find_object(value) is not None:
            found.append(describe_object("the state given", key, part.name, value))
        if not isinstance(value, Tensor):
            continue
        shape, want = tuple(whole_shape(value)), tuple(part.shape)
        pieces = find_pieces(part, key, value, given)
        if is_one_number(key, value):
            continue
        if part.span is not None and shape != want and shape and pieces is None:
            found.append(
                f"{key!r} of {part.name!r} has shape {shape}, which is neither its own {want} nor "
                f"a row for each of its blocks ({describe_blocks(part)}); shard with the "
                "granularity it was saved with"
            )
            continue
        if pieces is not None:
            want = tuple(pieces.shape)
        cut = is_sharded(value) and part.owner is None
        if shape != want and (cut or (key in ELEMENTWISE and not has_own_shape(part, shape, want))):
            found.append(f"{key!r} of {part.name!r} has global shape {shape}; wanted {want}")
        elif is_sharded(value) and (part.owner is not None or needs_gather(value, part.spec)):
            lone = describe_lone_slice(value)
            found += [] if lone is None else [f"{key!r} of {part.name!r} {lone}"]
    return found


def _number_parameters(
    optim: Optimizer,
    groups: list[list[Member]],
    given: Mapping[str, Any],
    unused: Iterator[Mapping[str, Any]],
) -> dict[str, Any]:
    """Number state as the optimizer's own ``load_state_dict`` takes it.

    Args:
        unused: saved groups without parameters, which no names tell apart: one after the other.
    """
    state: dict[int, dict[str, Any]] = {}
    param_groups: list[dict[str, Any]] = []
    shared: dict[int, Tensor] = {}
    number = 0
    for group, members in zip(optim.param_groups, groups, strict=True):
        numbers = []
        for member in members:
            if values := _join_parts(optim, member, given):
                state[number] = unflatten(values)
            numbers.append(number)
            number += 1
        names = [part.name for member in members for part in member.parts]
        saved = _find_settings(given, names, []) if members else settings_of(next(unused, {}))
        copied = map_values(Tensor.clone, saved)
        for key in [k for k, v in copied.items() if isinstance(v, Tensor) and k in group]:
            first = shared.setdefault(id(group[key]), copied[key])  # one of several groups stays so
            copied[key] = first if torch.equal(first, copied[key]) else copied[key]
        param_groups.append({**settings_of(group), **copied, "params": numbers})
    extra = {k: v for k, v in given.items() if k not in ("state", "param_groups", LAYOUTS, NUMBERS)}
    return {**extra, "state": state, "param_groups": param_groups}


def _join_parts(optim: Optimizer, member: Member, given: Mapping[str, Any]) -> dict[str, Any]:
    """Join the state of an optimizer's parameter from that of its parts."""
    before = flatten_state(optim.state.get(member.param, {}))
    result: dict[str, Any] = {}
    for part in member.parts:
        values = given["state"].get(part.name, {})
        if part.owner is not None and part.spec is not None:
            whole_values = {key: gather_owned(value, part) for key, value in values.items()}
            return {} if part.is_elsewhere else whole_values
        for key, value in values.items():
            if part.spec is not None and is_elementwise(key, value, part, given):
                piece = fit(value, part.spec).clone()
                if member.is_raw:
                    if key not in result:
                        param = member.param
                        result[key] = to_local(piece).new_zeros(param.shape, device=param.device)
                    result[key][part.span].copy_(to_local(piece))
                else:
                    is_plain = key in before and not is_sharded(before[key])
                    result[key] = to_local(piece) if is_plain else piece
            elif (pieces := find_pieces(part, key, value, given)) is not None:
                cut = fit(value, pieces).clone()
                shape = (-1, *pieces.shape[1:])
                result[key] = to_local(cut).view(shape) if member.is_raw else cut
            elif key not in result:
                result[key] = gather_whole(value).clone() if isinstance(value, Tensor) else value
    return result


def _broadcast_state(module: nn.Module, state_dict: Any, targets: Targets) -> dict[str, Any]:
    groups = groups_of(module)
    if not groups:
        return dict(state_dict)
    first = all(group.rank == 0 for group in groups)
    call = "load_optim_state_dict(broadcast_from_rank0=True)"
    refuse_broadcast(call, module, groups)
    with SharedErrors(*groups, what=call):
        empty: dict[str, Any] = {"state": {}}
        given = _name_parameters(module, targets, state_dict) if first else empty
    frame = broadcast_object({k: v for k, v in given.items() if k != "state"}, groups, call)
    parts = parts_of(targets)

    def target_of(name: str) -> Any:
        part = parts.get(name.split("\0")[0])
        if part is None or part.entry is None or not part.shape or part.owner is not None:
            return None
        return part.entry.param

    flat = {f"{n}\0{k}": v for n, vs in given["state"].items() for k, v in vs.items()}
    state: dict[str, dict[str, Any]] = {}
    device, caller = device_of(module), "load_optim_state_dict"
    for path, value in broadcast_state(caller, flat, groups, target_of, device).items():
        name, key = path.split("\0")
        state.setdefault(name, {})[key] = value
    return {**frame, "state": state}
