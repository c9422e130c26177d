"""Hooks on optimizers: what torch's own functions load into them fits, or is refused by name.

An optimizer gets them in its first step, or when its state is loaded here. They cut whole state
that ``set_optimizer_state_dict`` loads, refuse ``get_optimizer_state_dict`` where that would miss
state, and refuse state of other slices for plain parameters over slices. An optimizer's
``state_dict()`` says in each group which slices it is of, as it looks alike on every rank.
"""

from __future__ import annotations

import contextlib
import weakref
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from torch import Tensor
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from fsdp_compose.base.loops import parameters_of
from fsdp_compose.base.torch_stack import state_api_under_way
from fsdp_compose.buckets.bucket import Entry
from fsdp_compose.checkpoint.optimizer.shapes import is_one_number
from fsdp_compose.checkpoint.values import fit, whole_shape
from fsdp_compose.optim.mirror import source_of
from fsdp_compose.optim.owner_step import OwnerOptimizer
from fsdp_compose.sharded import is_sharded, is_sharded_parameter

ELEMENTWISE = frozenset(
    (
        *("exp_avg", "exp_avg_sq", "max_exp_avg_sq", "momentum_buffer", "square_avg", "grad_avg"),
        *("acc_delta", "sum", "exp_inf", "prev", "step_size", "ax"),
    )
)
"""State of torch.optim that has the parameter's shape."""

_SLICES = "fsdp_compose_slices"
"""The key of a group in a state dict that says of which slices its state is."""

_seen: weakref.WeakSet[Optimizer] = weakref.WeakSet()


def watch_optimizer(optimizer: Optimizer) -> None:
    """Put the hooks on an optimizer that holds parameters of ours, once."""
    if optimizer in _seen:
        return
    _seen.add(optimizer)
    params = parameters_of(optimizer)
    if any(is_sharded_parameter(param) or source_of(param) is not None for param in params):
        # A wrapper that never called Optimizer.__init__ has no place for hooks.
        with contextlib.suppress(AttributeError):
            optimizer.register_state_dict_pre_hook(_before_saving)
            optimizer.register_state_dict_post_hook(_mark_slices)
            optimizer.register_load_state_dict_pre_hook(_before_load)


def _before_step(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    if optimizer not in _seen:
        watch_optimizer(optimizer)
        _check_raw(optimizer, {id(param): values for param, values in optimizer.state.items()})
        _check_slices(optimizer, optimizer.param_groups)
        drop_marks(optimizer.param_groups)


def _before_saving(optimizer: Optimizer) -> None:
    """Refuse torch's getter where other ranks' state, or names, would be missing."""
    caller = state_api_under_way()
    if caller is None:
        return
    if isinstance(optimizer, OwnerOptimizer):
        why = "holds state of the parameters that this rank owns alone (owner_step)"
    elif any(source_of(p) is not None for p in parameters_of(optimizer)):
        why = "holds plain parameters over slices, which have no names in the module"
    else:
        return
    ours = "optim_state_dict" if caller.startswith("get") else "load_optim_state_dict"
    raise RuntimeError(
        f"torch.distributed.checkpoint.state_dict.{caller}: {type(optimizer).__name__} {why}; call "
        f"fsdp_compose.{ours}(module, optimizer, ...), which knows them."
    )


def _before_load(optimizer: Optimizer, state_dict: dict[str, Any]) -> dict[str, Any]:
    """Cut whole state for torch's setter; refuse what does not fit plain parameters over slices."""
    given = {
        id(param): state_dict["state"][number]
        for param, number in _pair_numbers(optimizer, state_dict)
        if number in state_dict["state"]
    }
    _check_raw(optimizer, given)
    _check_slices(optimizer, state_dict["param_groups"])
    state_dict = {**state_dict, "param_groups": [{**g} for g in state_dict["param_groups"]]}
    drop_marks(state_dict["param_groups"])
    if state_api_under_way() is None:
        return state_dict
    state = {
        number: _cut_whole(optimizer.state.get(param, {}), state_dict["state"][number])
        for param, number in _pair_numbers(optimizer, state_dict)
        if number in state_dict["state"]
    }
    return {**state_dict, "state": {**state_dict["state"], **state}}


def _pair_numbers(optimizer: Optimizer, state_dict: Mapping[str, Any]) -> Iterator[tuple[Any, Any]]:
    """Parameters with the numbers, or names, that the state calls them by."""
    groups = zip(optimizer.param_groups, state_dict["param_groups"], strict=False)
    for mine, theirs in groups:
        yield from zip(mine["params"], theirs["params"], strict=False)


def _cut_whole(before: Mapping[str, Any], given: Mapping[str, Any]) -> dict[str, Any]:
    """State of one parameter with the slices of what is whole, where the optimizer has slices."""
    found = dict(given)
    for key, value in given.items():
        mine = before.get(key)
        is_whole = isinstance(value, Tensor) and not is_sharded(value)
        if is_whole and is_sharded(mine) and value.shape == whole_shape(mine):
            found[key] = fit(value.to(mine.device), mine._shard_spec).clone()
    return found


def _check_raw(optimizer: Optimizer, state: Mapping[int, Mapping[str, Any]]) -> None:
    """Raise for state of another layout under plain parameters over slices."""
    for param in parameters_of(optimizer):
        source = source_of(param)
        if source is None:
            continue
        entry = source.entry()
        whole = None if entry is None else entry.spec.whole_shape
        for key, value in state.get(id(param), {}).items():
            if not isinstance(value, Tensor) or not value.ndim or value.shape == param.shape:
                continue
            if is_one_number(key, value):
                continue
            cut = key in ELEMENTWISE and value.ndim == 1
            if is_sharded(value) or value.shape == whole or cut:
                name = "a bucket" if entry is None else repr(entry.spec.fqn)
                raise RuntimeError(
                    f"{type(optimizer).__name__}: state {key!r} of {name} has shape "
                    f"{tuple(value.shape)}, this rank's slice {tuple(param.shape)}: it is of "
                    "another layout. Call fsdp_compose.load_optim_state_dict(module, "
                    "optimizer, state_dict), which cuts state of any layout."
                )


def _mark_slices(optimizer: Optimizer, state_dict: dict[str, Any]) -> None:
    """Say in the groups of a state dict, which have no parameters of their own, what it is of."""
    for mine, theirs in zip(optimizer.param_groups, state_dict["param_groups"], strict=False):
        slices = _describe_slices(mine["params"])
        if slices is not None:
            theirs[_SLICES] = slices


def drop_marks(groups: Iterable[dict[str, Any]]) -> None:
    """Take out what ``state_dict()`` says of slices."""
    for group in groups:
        group.pop(_SLICES, None)


def _check_slices(optimizer: Optimizer, groups: Sequence[Mapping[str, Any]]) -> None:
    """Raise for state of plain parameters over other slices, as another rank saved it."""
    for mine, theirs in zip(optimizer.param_groups, groups, strict=False):
        if _SLICES in theirs and theirs[_SLICES] != _describe_slices(mine["params"]):
            raise RuntimeError(
                f"{type(optimizer).__name__}: the state that was loaded is of other slices than "
                "this rank's: state_dict() of an optimizer over flat_parameters or "
                "local_parameters holds those of one rank, in one layout. Save with "
                "save_checkpoint or fsdp_compose.optim_state_dict(module, optimizer) on every "
                "rank, and load with load_checkpoint or load_optim_state_dict."
            )


def _describe_slices(params: Iterable[Any]) -> str | None:
    """Which elements plain parameters stand for on this rank, as a checksum; None for no such."""
    found = []
    for param in params:
        source = source_of(param)
        bucket = None if source is None else source.bucket()
        if source is None or bucket is None:
            continue
        entry = source.entry()
        found.append([_place_of(one) for one in (bucket.entries if entry is None else (entry,))])
    return f"{zlib.crc32(repr(found).encode()):08x}" if found else None


def _place_of(entry: Entry) -> tuple[object, ...]:
    spec = entry.spec
    part = None if spec.parallel is None else spec.parallel.offsets
    return spec.start, spec.stop, tuple(spec.shape), part


def watch_steps() -> None:
    """Have torch call ``_before_step`` in every step of every optimizer of the process."""
    register_optimizer_step_pre_hook(_before_step)
