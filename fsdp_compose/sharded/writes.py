"""What is written into sharded parameters between steps is noted, for ranks to compare.

Each rank writes its own slice. Where one writes alone, or each with a number or a tensor of its
own, the parameter is a mixture that nobody asked for. Tensors on an accelerator are noted by their
shapes alone, as the host would wait for their numbers. Gradients that are scaled by a tensor of one
number, as torch's clipping does it, are not noted: a norm of all may differ in its last bits
between ranks that list parameters in other orders.
"""

from __future__ import annotations

import ctypes
import zlib
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from fsdp_compose.base.torch_private import transforms_active
from fsdp_compose.base.torch_stack import is_stepping
from fsdp_compose.sharded.spec import ShardSpec, Writes

__all__ = ["GRADIENT", "PARAMETER", "crc_of", "note_call", "note_lists", "note_write"]

PARAMETER, GRADIENT = "parameter", "gradient of parameter"
"""What writes are noted into, in words."""


def note_call(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Note what a function wrote that writes its first operand, or ``out=``."""
    target, *values = args if kwargs.get("out") is None else (kwargs["out"], *args)
    note_write(target, func.__name__, (*values, *kwargs.values()))


def note_write(target: Any, name: str, values: Sequence[Any], noted: str = "") -> None:
    """Note that ``target`` was written, if it is a parameter, a gradient or a view of one.

    Args:
        name: of the function.
        values: what it was given besides.
        noted: PARAMETER or GRADIENT; which of them ``target`` is where empty.
    """
    spec = _spec_of(target)
    if spec is None or not target._noted or transforms_active():
        return
    writes, noted = spec.residence.writes, noted or target._noted
    if writes is not None and _are_noted(writes) and not _are_factors(values, noted):
        text = f"{name}({', '.join([_describe(value) for value in values])})"
        where = "" if target._is_parameter else f"{spec.offset} {tuple(spec.shape)}"
        what = f"{noted} {spec.fqn!r}"
        number = zlib.crc32(f"{spec.unit} {what} {where} {text}".encode()) ** 2
        _add(writes, (spec.unit, what), number, (spec.unit, what, text))


def note_lists(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Note what a function over lists wrote, which does so to the first list.

    Ranks may list tensors in other orders, and in more or fewer calls: what is noted is a sum.
    """
    targets, *values = *args, *kwargs.values()
    first = next((t for t in targets if _spec_of(t) is not None), None)
    if first is None or not first._noted or _are_factors(values, first._noted):
        return
    shared = [_describe(value) for value in values if not _is_list(value)]
    lists = [value for value in values if _is_list(value)]
    totals: dict[int, int] = {}
    found: dict[int, tuple[Writes, ShardSpec]] = {}
    for index, target in enumerate(targets):
        spec = _spec_of(target)
        writes = None if spec is None else spec.residence.writes
        if spec is not None and writes is not None and _are_noted(writes):
            given = [_describe(each[index]) for each in lists]
            key = f"{spec.unit} {spec.fqn} {spec.offset} {func.__name__} {shared} {given}"
            totals[id(writes)] = totals.get(id(writes), 0) + zlib.crc32(key.encode()) ** 2
            found[id(writes)] = writes, spec
    for number, (writes, spec) in zip(totals.values(), found.values(), strict=True):
        what = f"{first._noted} {spec.fqn!r} in a list"
        _add(writes, ("", first._noted), number, (spec.unit, what, func.__name__))


def _are_noted(writes: Writes) -> bool:
    """Whether no optimizer is stepping; a step that raised has told nobody of its end."""
    return writes.are_noted or not is_stepping()


def _add(writes: Writes, place: tuple[str, str], number: int, last: tuple[str, str, str]) -> None:
    before = writes.found.get(place)
    writes.found[place] = number + (before[0] if before else 0), *last


def _describe(value: Any) -> str:
    """A value in words that are the same on every rank where it is."""
    if not isinstance(value, Tensor):
        return repr(value) if isinstance(value, _PLAIN) else type(value).__name__
    spec = _spec_of(value)
    if spec is not None:
        if not spec.partners:
            return spec.fqn
        return f"{spec.fqn} with a {' and a '.join([_describe(x) for x in spec.partners])}"
    text = f"{value.dtype} tensor of shape {tuple(value.shape)}"
    if value.device.type != "cpu" or type(value) not in (Tensor, torch.nn.Parameter):
        return text
    return f"{text} with checksum {crc_of(value):08x}"


_PLAIN = (int, float, complex, str, type(None), torch.dtype, torch.memory_format)


def _are_factors(values: Sequence[Any], noted: str) -> bool:
    """Whether a gradient is written with nothing but tensors of one real number."""
    if noted != GRADIENT or not values:
        return False
    return all(isinstance(x, Tensor) and not x.ndim and x.is_floating_point() for x in values)


def _is_list(value: Any) -> bool:
    return isinstance(value, list | tuple)


def _spec_of(value: Any) -> ShardSpec | None:
    return getattr(value, "_shard_spec", None)


def crc_of(tensor: Tensor) -> int:
    """A checksum of a tensor on the CPU, in the order of its elements."""
    dense = tensor.detach().to_dense().resolve_conj().resolve_neg().contiguous()
    return zlib.crc32((ctypes.c_char * dense.nbytes).from_address(dense.data_ptr() or 1))
