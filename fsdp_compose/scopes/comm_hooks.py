"""Communication hooks: how a unit's packed gradients become this rank's averaged part of them.

A hook is ``hook(state, grads: GradBucket) -> Tensor``: it returns part ``grads.shard.rank`` of the
gradients, summed over ``grads.shard`` and ``grads.replicate`` and times ``grads.scale``, in any
floating-point dtype. ``grads.flat`` is the hook's to overwrite, and is freed afterwards.
"""

from __future__ import annotations

import gc
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from fsdp_compose.base.arguments import check_function, check_int, check_kind, describe_value
from fsdp_compose.base.parts import cut_by_rank
from fsdp_compose.comm import collectives as comm
from fsdp_compose.comm.codecs import decode_blocks, encode_blocks
from fsdp_compose.comm.grad_bucket import GradBucket, has_state
from fsdp_compose.core.guards.failed_steps import clear_failed_steps
from fsdp_compose.core.guards.microbatches import refuse_postponing
from fsdp_compose.core.guards.units import list_all_units, require_units
from fsdp_compose.core.state import Unit, iter_units

CommHook = Callable[[Any, GradBucket], torch.Tensor]


def register_comm_hook(module: nn.Module, state: Any, hook: CommHook | None) -> None:
    """Let ``hook`` reduce the gradients of every unit in ``module``; None restores the default.

    Args:
        state: passed to every call of ``hook``, None if it needs none. One with ``state_dict`` and
            ``load_state_dict`` methods is saved in checkpoints, each rank's own, and loaded where
            it is registered before; a copy of the model gets its own, and ``skippable_step`` puts
            it back. Any other state is shared by copies.
        hook: ``hook(state, grads)``: returns part ``grads.shard.rank`` of ``grads.flat``, summed
            over all ranks and times ``grads.scale``. It runs in backward, on the reduce stream of a
            device, may overwrite ``grads.flat``, and may keep what it returns, which is copied.
            Every rank needs one of the same name, or they raise when they reduce gradients.

    Raises:
        ValueError: nothing in ``module`` is sharded, or some of it with ``deterministic=``; or one
            ``Int8ErrorFeedback`` is given to units of the same name.
        TypeError: ``hook`` is no function of (state, grads), or one of torch's own; there is
            ``state`` for None, or another than an ``Int8ErrorFeedback`` for
            ``int8_error_feedback_hook``.

    Example:
        >>> model = fully_shard(nn.Linear(2, 2))
        >>> def clamp(state, grads):
        ...     return default_hook(state, grads).clamp(-0.5, 0.5)
        >>> register_comm_hook(model, None, clamp)
        >>> model(torch.ones(1, 2)).sum().backward()
        >>> model.bias.grad.full_tensor()
        tensor([0.5000, 0.5000])
    """
    if hook is not None:
        if str(getattr(hook, "__module__", "")).startswith("torch.distributed."):
            raise TypeError(
                f"register_comm_hook: hook is {hook.__module__}.{hook.__qualname__}, which takes "
                "gradients of DDP or FSDP1; wanted a hook of fsdp_compose, such as "
                "fsdp_compose.bf16_compress_hook, or a function of (state, grads: GradBucket)."
            )
        check_function("register_comm_hook", "hook", hook, "(state, grads)")
    elif state is not None:
        raise TypeError(
            f"register_comm_hook: hook is None, which restores the default, and state is "
            f"{describe_value(state)}; wanted register_comm_hook(module, state, hook)."
        )
    if hook is int8_error_feedback_hook:
        wanted = "Int8ErrorFeedback(), in which int8_error_feedback_hook keeps what rounding costs"
        check_kind("register_comm_hook", "state", state, Int8ErrorFeedback, wanted)
    units = require_units(module, "register_comm_hook")
    if hook is not None:
        refuse_postponing(units, "register_comm_hook")
    if isinstance(state, Int8ErrorFeedback):
        _check_names(units, state)
    clear_failed_steps(units)
    for unit in units:
        unit.switches.comm_hook, unit.switches.comm_state = hook, state
        unit.switches.hook_name = _name_hook(hook, state)


def _check_names(units: list[Unit], state: Int8ErrorFeedback) -> None:
    """Raise where units would take each other's rounding for theirs."""
    name, times = _find_commonest(units, state)
    if times > 1:
        gc.collect()  # a model that nobody has any more may not be gone yet
        name, times = _find_commonest(units, state)
    if times > 1:
        raise ValueError(
            f"register_comm_hook: {times} units are called {name!r}, and one Int8ErrorFeedback "
            "keeps what rounding has cost by their names. Call fully_shard on the module around "
            "them first, which names them apart, or give each an Int8ErrorFeedback of its own."
        )


def _find_commonest(units: list[Unit], state: Int8ErrorFeedback) -> tuple[str, int]:
    """The commonest name of ``units`` and of others that have the state, and how many have it."""
    others = (unit for unit in list_all_units() if unit.switches.comm_state is state)
    given = dict.fromkeys([*units, *others])
    return Counter(unit.name for unit in given).most_common(1)[0]


def _name_hook(hook: CommHook | None, state: Any) -> str:
    """What ranks compare of a hook: its name, and how it encodes what it sends."""
    name = str(getattr(hook, "__qualname__", type(hook).__qualname__))
    is_coded = isinstance(state, Int8ErrorFeedback)
    return f"{name} in blocks of {state.block}" if is_coded else name


def register_post_reduce_hook(
    module: nn.Module, fn: Callable[[nn.Module, list[nn.Parameter]], None]
) -> RemovableHandle:
    """Call ``fn(unit's module, parameters)`` when the sharded gradients of a bucket are in place.

    It runs in backward, so an optimizer can step on those parameters and drop their gradients: as
    soon as they are reduced, or as the backward ends where a loss also reads a parameter outside of
    its unit's forward, and with ``create_graph=True``. It is not called for a bucket whose
    parameters a backward reaches outside of forwards alone.

    Returns:
        a handle whose ``remove()`` takes the hook back.

    Raises:
        ValueError: nothing in ``module`` is sharded.
        TypeError: ``fn`` is no function of (module, parameters).

    Example:
        >>> model = fully_shard(nn.Linear(2, 2))
        >>> def report(module, parameters):
        ...     print(len(parameters), "gradients are in place")
        >>> handle = register_post_reduce_hook(model, report)
        >>> model(torch.ones(1, 2)).sum().backward()
        2 gradients are in place
    """
    check_function("register_post_reduce_hook", "fn", fn, "(module, parameters)")
    units = require_units(module, "register_post_reduce_hook")
    handle = RemovableHandle(
        units[0].post_reduce_hooks, extra_dict=[unit.post_reduce_hooks for unit in units[1:]]
    )
    for unit in units:
        unit.post_reduce_hooks[handle.id] = fn
    return handle


def forget_rounding(unit: Unit) -> None:
    """Forget what rounding has cost a unit whose buckets change, and with them their keys."""
    state = unit.switches.comm_state
    if isinstance(state, Int8ErrorFeedback):
        for key in [key for key in state.errors if key.rpartition("/")[0] == unit.name]:
            del state.errors[key]


def snapshot(module: nn.Module) -> dict[str, Any] | None:
    """Take what the hooks remember, and its layout, for a checkpoint; None if there is nothing."""
    units = _by_place(module)
    found = {place: unit.switches.comm_state for place, unit in units.items()}
    states = {place: state.state_dict() for place, state in found.items() if has_state(state)}
    return {"layout": _describe_layout(units), "states": states} if states else None


def restore(module: nn.Module, saved: dict[str, Any]) -> bool:
    """Restore a ``snapshot`` of this rank; False where it is for another layout."""
    units = _by_place(module)
    if saved["layout"] != _describe_layout(units):
        return False
    for place, unit in units.items():
        if place in saved["states"] and has_state(unit.switches.comm_state):
            unit.switches.comm_state.load_state_dict(saved["states"][place])
    return True


def remembers(module: nn.Module) -> bool:
    """Whether a hook of ``module`` has state that a checkpoint keeps."""
    return any(has_state(unit.switches.comm_state) for unit in iter_units(module))


def _by_place(module: nn.Module) -> dict[str, Unit]:
    """The units by where they are in ``module``; names may be alike where none is around them."""
    places = {id(submodule): name for name, submodule in module.named_modules()}
    found = ((unit.modules[0](), unit) for unit in iter_units(module))
    return {places.get(id(submodule), unit.name): unit for submodule, unit in found}


def _describe_layout(units: dict[str, Unit]) -> dict[str, Any]:
    """What a rank's packed gradients are, by unit."""
    return {
        place: [
            (b.mesh.gather_axis.size, b.mesh.gather_axis.rank, b.layout.offsets)
            for b in unit.buckets
        ]
        for place, unit in units.items()
    }


def default_hook(state: object, grads: GradBucket) -> torch.Tensor:
    """What happens without a hook: sum over both groups, then scale.

    Example:
        >>> model = fully_shard(nn.Linear(2, 2))
        >>> register_comm_hook(model, None, default_hook)
    """
    real = grads.dtype.to_real() if grads.dtype.is_complex else grads.dtype
    part = comm.reduce_scatter_parts(
        grads.flat, grads.parts, grads.shard_axis, caller=grads.caller
    ).result(real, grads.scale)
    return comm.all_reduce(part, grads.replicate_axis, caller=grads.caller)


def fp16_compress_hook(state: object, grads: GradBucket) -> torch.Tensor:
    """Gradients travel as float16, divided beforehand so that their sum does not overflow.

    Example:
        >>> model = fully_shard(nn.Linear(2, 2))
        >>> register_comm_hook(model, None, fp16_compress_hook)
    """
    return _reduce_compressed(grads, torch.float16)


def bf16_compress_hook(state: object, grads: GradBucket) -> torch.Tensor:
    """Gradients travel as bfloat16.

    Example:
        >>> model = fully_shard(nn.Linear(2, 2))
        >>> register_comm_hook(model, None, bf16_compress_hook)
    """
    return _reduce_compressed(grads, torch.bfloat16)


def _reduce_compressed(grads: GradBucket, dtype: torch.dtype) -> torch.Tensor:
    small = grads.flat.mul_(grads.scale).to(dtype)
    parts = cut_by_rank(small, grads.shard_axis.size)
    part = comm.reduce_scatter_parts(small, parts, grads.shard_axis, caller=grads.caller).result(
        torch.float32, 1.0
    )
    if grads.replicate_axis.size > 1:
        part = comm.all_reduce(part.to(dtype), grads.replicate_axis, caller=grads.caller).float()
    return part


@dataclass
class Int8ErrorFeedback:
    """State of ``int8_error_feedback_hook``: what rounding has cost each bucket so far.

    Args:
        block: elements that share a scale.

    Example:
        >>> Int8ErrorFeedback(block=64).state_dict()
        {'block': 64, 'errors': {}}
    """

    block: int = 256
    errors: dict[str, torch.Tensor] = field(default_factory=dict)
    _made: dict[str, int] = field(default_factory=dict, init=False, repr=False, compare=False)
    """The ids of those that the hook made."""
    _kept: dict[str, Any] = field(default_factory=dict, init=False, repr=False, compare=False)
    """What it read last and did not make."""

    def __post_init__(self) -> None:
        wanted = "a number of elements, an int >= 1"
        check_int("Int8ErrorFeedback", "block", self.block, 1, wanted)

    def state_dict(self) -> dict[str, Any]:
        return {"block": self.block, "errors": dict(self.errors)}

    def load_state_dict(self, saved: dict[str, Any]) -> None:
        self.block = saved["block"]
        self.errors = dict(saved["errors"])  # nothing writes them in place
        self._made.clear()

    def _replace(self, key: str, error: torch.Tensor) -> None:
        """Remember ``error``; keep until the next call what the hook read, if it did not make it.

        Where that was loaded or copied it is memory of the stream that did so, which would use it
        again while that of the hook still reads it.
        """
        read = self.errors.get(key)
        self._kept[key] = None if id(read) == self._made.get(key) else read
        self.errors[key], self._made[key] = error, id(error)


def int8_error_feedback_hook(state: Int8ErrorFeedback, grads: GradBucket) -> torch.Tensor:
    """Gradients travel as int8 with a float32 scale per block.

    A quarter of the bytes of float32, and 4 bytes for each block besides.
    What rounding takes away is added to the next step's gradient (error feedback: Seide et al.,
    "1-Bit Stochastic Gradient Descent", 2014; Karimireddy et al., "Error Feedback Fixes SignSGD",
    2019). Sums are formed in float32. Of gradients that are not finite nothing is added later.

    Example:
        >>> model = fully_shard(nn.Linear(2, 2))
        >>> register_comm_hook(model, Int8ErrorFeedback(), int8_error_feedback_hook)
    """
    wanted, ranks = grads.flat.float(), grads.shard_axis.size
    earlier = state.errors.get(grads.key)
    if earlier is None or earlier.numel() != wanted.numel():  # the unit was sharded otherwise since
        earlier = torch.zeros_like(wanted)
    earlier = earlier.to(wanted.device)
    wanted = wanted + earlier
    packed = [encode_blocks(part, torch.int8, state.block) for part in cut_by_rank(wanted, ranks)]
    decoded = torch.empty_like(wanted)
    for part, into in zip(packed, cut_by_rank(decoded, ranks), strict=True):
        decode_blocks(part, into, torch.int8, state.block)
    error = wanted - decoded
    # A gradient that is not finite ends its step, and would be in every later one.
    state._replace(grads.key, torch.where(error.isfinite().all(), error, earlier))
    received = comm.exchange_parts(packed, grads.shard_axis, grads.caller)
    one = cut_by_rank(decoded, ranks)[0]
    total = torch.zeros_like(one)
    for part in received:
        decode_blocks(part, one, torch.int8, state.block)
        total += one
    return comm.all_reduce(total * grads.scale, grads.replicate_axis, caller=grads.caller)
