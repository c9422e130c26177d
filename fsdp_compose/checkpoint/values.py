"""Values of state dicts: gathered whole, cut as parameters are, checked, sent to other ranks."""

from __future__ import annotations

import math
import pickle
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from fsdp_compose.base.group import Group
from fsdp_compose.base.strides import as_bytes
from fsdp_compose.base.torch_private import is_opaque
from fsdp_compose.buckets.entries import entry_of
from fsdp_compose.comm import collectives as comm
from fsdp_compose.comm.messages import SharedErrors, broadcast_object, to_bytes
from fsdp_compose.sharded import (
    ShardSpec,
    gather_part,
    is_sharded,
    spec_of,
    tag,
    to_local,
    whole_slice,
)

_READY = "_fsdp_compose_ready"
"""Set on a value that was fitted to the parameter it is about to be loaded into."""


def unwrap(value: Any, current: Any) -> Any:
    """What a class around tensors keeps, where ``current`` was one that keeps the same."""
    is_around = isinstance(value, Tensor) and not is_sharded(value) and is_opaque(value)
    entry = entry_of(current) if is_around and is_sharded(current) else None
    if entry is None or entry.wrapper is None or not entry.wrapper.fits(value):
        return value
    return entry.wrapper.unwrap(value.detach())


def is_cut(value: Any) -> bool:
    """Whether ranks hold parts of it: a sharded value, or a DTensor."""
    return is_sharded(value) or isinstance(value, DTensor)


def needs_gather(value: Any, spec: ShardSpec | None) -> bool:
    """Whether fitting ``value`` to ``spec`` (None: to a plain tensor) is a collective."""
    if is_sharded(value):
        return spec is None or not spec.is_cut_like(value._shard_spec)
    return isinstance(value, DTensor)


def gather_whole(value: Tensor) -> Tensor:
    """Gather the full plain tensor behind a sharded value or a DTensor; a collective for those."""
    if is_sharded(value):
        parallel = spec_of(value).parallel
        return value.full_tensor() if parallel is None else parallel.assemble(gather_part(value))
    if isinstance(value, DTensor):
        return value.full_tensor()
    return value


def whole_shape(value: Tensor) -> torch.Size:
    """The shape of ``gather_whole(value)``; a parameter that was split by hand reads as less."""
    return spec_of(value).whole_shape if is_sharded(value) else value.shape


def show_whole(tensor: Tensor) -> Tensor:
    """Detach a slice for a state dict; that of a parameter split by hand then reads as the whole.

    What loads a state dict compares that shape with the one in the file.
    """
    spec = spec_of(tensor)
    if spec.parallel is None or spec.is_dtensor:
        return tensor.detach()
    shown = replace(spec, parallel=replace(spec.parallel, reads_whole=True))
    return tag(to_local(tensor), shown)


def fit(value: Tensor, spec: ShardSpec) -> Any:
    """Cut the slice of ``value`` that ``spec`` describes, as a sharded tensor of its own.

    The data is shared with ``value`` where it can be.

    Args:
        value: plain and of shape ``spec.whole_shape``, a sharded tensor of that global shape cut
            in any way, or a DTensor of it. What is cut differently is gathered: a collective.
    """
    if is_sharded(value) and spec.is_cut_like(value._shard_spec):
        local = to_local(value)
    elif needs_gather(value, spec):
        local = whole_slice(gather_whole(value).detach(), spec).clone()
    else:
        local = whole_slice(value.detach(), spec)
    return tag(local, spec)


def mark_ready(value: Tensor) -> Tensor:
    """Mark a value that was fitted to the parameter it is about to be loaded into."""
    value.__dict__[_READY] = True
    return value


def is_ready(value: object) -> bool:
    return isinstance(value, Tensor) and _READY in value.__dict__


_SAMPLED = 16
"""Elements of each value that ranks compare before they load it."""


def sample_bytes(value: Tensor) -> bytes:
    """The bytes of some elements of a plain tensor, which are spread over all of it."""
    if not value.numel() or value.device.type == "meta" or value.layout is not torch.strided:
        return b""
    last, count = value.numel() - 1, min(_SAMPLED, value.numel())
    spread = [index * last // max(1, count - 1) for index in range(count)]
    at = torch.tensor(spread, device="cpu")
    place = torch.unravel_index(at, value.shape) if value.ndim else ()
    picked = value.detach()[place].resolve_conj().resolve_neg().reshape(-1).cpu().contiguous()
    return to_bytes(picked.view(torch.uint8))


def describe_unreadable(value: Any) -> str | None:
    """Say why the numbers of a tensor cannot be cut or copied; None if they can, or it is none."""
    if not isinstance(value, Tensor):
        return None
    local = to_local(value) if is_sharded(value) else value
    if local.device.type == "meta":
        return "is on the meta device, where it has no numbers; give a tensor that has them"
    if local.layout is not torch.strided:
        return f"has layout {local.layout}; wanted a dense tensor, such as to_dense() gives"
    if local.is_quantized:
        return "is quantized; wanted its numbers, such as dequantize() gives"
    return None


def find_unnamed(values: Mapping[Any, Any]) -> str | None:
    """Say which key is no name; None where all are."""
    for key in values:
        if not isinstance(key, str):
            return f"key {key!r:.80} is a {type(key).__name__}; wanted FQNs, which are strings."
    return None


def require_readable(caller: str, values: Mapping[str, Any]) -> None:
    """Raise where a module has values that no load could read again.

    Raises:
        ValueError: naming them.
    """
    found = ((name, describe_unreadable(value)) for name, value in values.items())
    problems = [f"{name!r} {why}" for name, why in found if why is not None]
    if problems:
        raise ValueError(f"{caller}: the state cannot be saved:{list_problems(problems)}")


def list_problems(problems: list[str]) -> str:
    """Write problems for a message, each on a line of its own; the first eight of them."""
    more = [f"and {len(problems) - 8} more"] if len(problems) > 8 else []
    return "".join(f"\n  {problem}" for problem in [*problems[:8], *more])


def find_unwritable(values: Mapping[str, Any], current: Mapping[str, Any]) -> Exception | None:
    """The error where torch cannot copy ``values`` into what a module has, sharded values aside."""
    found = ((name, _describe_unwritable(v, current[name])) for name, v in values.items())
    problems = [f"{name!r} {why}" for name, why in found if why is not None]
    what = "load_state_dict: the state cannot be written, the module is unchanged:"
    return RuntimeError(f"{what}{list_problems(problems)}") if problems else None


def _describe_unwritable(value: Any, current: Any) -> str | None:
    if not isinstance(current, Tensor) or is_sharded(current) or current.is_meta:
        return None
    if current.is_inference() and not torch.is_inference_mode_enabled():
        return "of the module was made in inference mode, and cannot be written outside; clone() it"
    if current.layout is not torch.strided:
        is_alike = isinstance(value, Tensor) and value.layout is current.layout
        return None if is_alike else f"has layout {current.layout} in the module, unlike the value"
    sizes = zip(current.shape, current.stride(), strict=True) if current.numel() else ()
    if any(size > 1 and not stride for size, stride in sizes):
        return "of the module has elements that share memory (expand); register a clone() of it"
    return None


@dataclass(frozen=True)
class Outline:
    """A tensor to come: what it will be, without its numbers."""

    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


def broadcast_state(
    caller: str,
    state: Any,
    groups: Sequence[Group],
    target_of: Callable[[str], Any],
    device: torch.device,
) -> dict[str, Any]:
    """Send rank 0's plain state to all ranks, one tensor at a time.

    Args:
        caller: the function that every rank calls.
        target_of: what a name's value will be written into; where that is a sharded tensor of the
            same shape, only this rank's slice is kept.
        device: where the groups communicate.

    Raises:
        TypeError: rank 0's state is not a dictionary of plain tensors and picklable values.
    """
    versions = getattr(state, "_metadata", None)
    if not groups:
        return _with_versions(dict(state), versions)
    first = all(group.rank == 0 for group in groups)
    call, told = f"{caller}(broadcast_from_rank0=True)", None
    with SharedErrors(*groups, what=call):
        if first:
            _check_whole(state)
            state = {name: unwrap(value, target_of(name)) for name, value in state.items()}
            told = _outline(state), versions
    outline, versions = broadcast_object(told, groups, call)
    result: dict[str, Any] = {}
    for name, value in outline.items():
        if not isinstance(value, Outline):
            result[name] = value
            continue
        target = target_of(name)
        tensor = (
            state[name].detach().to(device).resolve_conj().resolve_neg().contiguous()
            if first
            else torch.empty(value.shape, dtype=value.dtype, device=device)
        )
        for group in groups:  # in turn, rows before columns
            comm.broadcast(as_bytes(tensor), group)  # whose dtype gloo may not know
        if is_sharded(target) and tuple(spec_of(target).whole_shape) == value.shape:
            spec = target._shard_spec
            tensor = tag(whole_slice(tensor, spec).clone(), spec)
        result[name] = tensor
    return _with_versions(result, versions)


def _with_versions(values: dict[str, Any], versions: Any) -> dict[str, Any]:
    """A state dict of ``values``, with the versions of modules that came with them, if any."""
    result = OrderedDict(values)
    if versions is not None:
        result._metadata = versions  # type: ignore[attr-defined]
    return result


def _check_whole(state: Any) -> None:
    """Raise unless it is a dictionary of values that other ranks can be sent, and cut."""
    if not isinstance(state, Mapping):
        raise TypeError(f"broadcast_from_rank0: rank 0 has a {type(state).__name__}")
    if (other := find_unnamed(state)) is not None:
        raise TypeError(f"broadcast_from_rank0: rank 0's {other}")
    for name, value in state.items():
        why = "is a slice; wanted full tensors" if is_cut(value) else describe_unreadable(value)
        if why is None and not isinstance(value, Tensor):
            why = _describe_unpicklable(value)
        if why is not None:
            shown = " ".join(name.split("\0"))  # of optimizer state, the parameter and the key
            raise TypeError(f"broadcast_from_rank0: rank 0's {shown!r} {why}.")


def _describe_unpicklable(value: object) -> str | None:
    try:
        pickle.dumps(value)
    except Exception as error:
        return f"does not pickle ({type(error).__name__}: {error}), so other ranks get none of it"
    return None


def _outline(state: Mapping[str, Any]) -> dict[str, Any]:
    return {
        name: Outline(value.dtype, tuple(value.shape)) if isinstance(value, Tensor) else value
        for name, value in state.items()
    }
