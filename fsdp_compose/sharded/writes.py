"""What is written into sharded parameters between steps is noted, for ranks to compare.

Each rank writes its own slice. Where one writes alone, or each with a number or a tensor of its
own, the parameter is a mixture that nobody asked for. Tensors on an accelerator are noted by their
shapes alone, as the host would wait for their numbers.
"""

from __future__ import annotations

import ctypes
import zlib
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from fsdp_compose.base.torch_private import transforms_active
from fsdp_compose.sharded.spec import ShardSpec, Writes

__all__ = ["crc_of", "note_call", "note_lists", "note_write"]


def note_call(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Note what a function wrote that writes its first operand, or ``out=``."""
    target, *values = args if kwargs.get("out") is None else (kwargs["out"], *args)
    note_write(target, func.__name__, (*values, *kwargs.values()))


def note_write(target: Any, name: str, values: Iterable[Any], what: str = "") -> None:
    """Note that ``target`` was written, if it is a parameter, a gradient or a view of one.

    Args:
        name: of the function.
        values: what it was given besides.
        what: was written; what ``target`` is where empty.
    """
    spec = _spec_of(target)
    if spec is None or not target._noted or transforms_active():
        return
    writes = spec.residence.writes
    if writes is not None and writes.are_noted:
        text = f"{name}({', '.join([_describe(value) for value in values])})"
        where = "" if target._is_parameter else f"{spec.offset} {tuple(spec.shape)}"
        _add(writes, spec, what or target._noted, f"{where} {text}", text)


def note_lists(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Note what a function over lists wrote, which does so to the first list."""
    targets, *values = *args, *kwargs.values()
    specs = [spec for target in targets if (spec := _spec_of(target)) is not None]
    first = next((t for t in targets if _spec_of(t) is not None), None)
    if first is None or not first._noted:
        return
    notes = {id(w): (w, s) for s in specs if (w := s.residence.writes) and w.are_noted}
    if notes:
        names = " ".join([spec.fqn for spec in specs])
        found = [", ".join(map(_describe, v)) if _is_list(v) else _describe(v) for v in values]
        for writes, spec in notes.values():
            text = f"{func.__name__} over {len(specs)} tensors"
            _add(writes, spec, first._noted, f"{text} {names} {found}", text)


def _add(writes: Writes, spec: ShardSpec, what: str, key: str, text: str) -> None:
    place = spec.unit, f"{what} {spec.fqn!r}"
    number = zlib.crc32(f"{place} {key}".encode())
    before = writes.found.get(place)
    writes.found[place] = number * number + (before[0] if before else 0), text


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


def _is_list(value: Any) -> bool:
    return isinstance(value, list | tuple)


def _spec_of(value: Any) -> ShardSpec | None:
    spec: ShardSpec | None = getattr(value, "_shard_spec", None)
    return spec


def crc_of(tensor: Tensor) -> int:
    """A checksum of a tensor on the CPU, in the order of its elements."""
    dense = tensor.detach().to_dense().resolve_conj().resolve_neg().contiguous()
    return zlib.crc32((ctypes.c_char * dense.nbytes).from_address(dense.data_ptr() or 1))
