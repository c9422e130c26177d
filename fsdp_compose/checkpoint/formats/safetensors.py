"""The safetensors format, read and written in pieces: no pickle, no whole file in memory.

::

    8 bytes   length of the header, little-endian
    header    JSON: {"__metadata__": {...}, name: {"dtype", "shape", "data_offsets": [from, to]}}
    data      tensors in row-major order, back to back
"""

from __future__ import annotations

import ctypes
import json
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import IO, Any

import torch
from torch import Tensor

from fsdp_compose.checkpoint.formats.format import Format, Outlines, Put, Stored
from fsdp_compose.checkpoint.metadata import check_shape
from fsdp_compose.checkpoint.values import Outline

_DTYPES: dict[str, torch.dtype] = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E4M3FNUZ": torch.float8_e4m3fnuz,
    "F8_E5M2FNUZ": torch.float8_e5m2fnuz,
    "F8_E8M0": torch.float8_e8m0fnu,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U64": torch.uint64,
    "U32": torch.uint32,
    "U16": torch.uint16,
    "U8": torch.uint8,
    "BOOL": torch.bool,
    "C64": torch.complex64,
}
_NAMES = {dtype: name for name, dtype in _DTYPES.items()}
_TORCH_SAVE = b"PK\x03\x04"  # torch.save makes a zip file
_MAX_HEADER = 100_000_000  # what the format's own reader accepts


def check_tensor(name: str, outline: Outline) -> None:
    """Raise ValueError for what safetensors cannot hold."""
    if outline.dtype not in _NAMES:
        raise ValueError(f"{name!r} is {outline.dtype}, which the safetensors format cannot hold.")
    if name == "__metadata__":
        raise ValueError("'__metadata__' is no name of a tensor in the safetensors format.")


@contextmanager
def write_file(path: Path, outlines: Outlines) -> Iterator[Put]:
    """Make a file with its header and room for its data, and fill it in."""
    # Wide elements first, so that each tensor is aligned for its dtype.
    order = sorted(outlines, key=lambda name: -outlines[name].dtype.itemsize)
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    starts: dict[str, int] = {}
    end = 0
    for name in order:
        outline = outlines[name]
        start, end = end, end + outline.nbytes
        starts[name] = start
        header[name] = {
            "dtype": _NAMES[outline.dtype],
            "shape": list(outline.shape),
            "data_offsets": [start, end],
        }
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    head = len(text).to_bytes(8, "little") + text
    with path.open("wb", buffering=0) as file:
        write_at(file, 0, memoryview(head))
        file.truncate(len(head) + end)
        yield lambda name, tensor: write_at(file, len(head) + starts[name], view_bytes(tensor))


def write_at(file: IO[bytes], start: int, data: memoryview) -> None:
    """Write all of ``data`` at a byte of an unbuffered file."""
    file.seek(start)
    while data:
        data = data[file.write(data) :]


def view_bytes(tensor: Tensor) -> memoryview:
    """The bytes of a contiguous CPU tensor, writable, without a copy."""
    if not tensor.numel():
        return memoryview(bytearray())
    data = (ctypes.c_char * tensor.nbytes).from_address(tensor.data_ptr())
    return memoryview(data).cast("B")


def read_file(path: Path) -> dict[str, Stored]:
    """What a file holds, by name.

    Raises:
        RuntimeError: it is missing, truncated or damaged, or describes what no file can hold: its
            tensors must fill it, each with bytes of its own.
    """
    try:
        size = path.stat().st_size
        with path.open("rb") as file:
            begin = file.read(8)
            length = int.from_bytes(begin, "little")
            if begin.startswith(_TORCH_SAVE):
                raise RuntimeError(
                    f"{path}: a file of torch.save; wanted one of safetensors. Call "
                    "model.load_state_dict(torch.load(path)) on every rank."
                )
            if size < 8 or 8 + length > size or length > _MAX_HEADER:
                raise RuntimeError(f"{path}: truncated or not a safetensors file ({size} bytes).")
            header = json.loads(file.read(length), object_pairs_hook=_without_repeats)
    except FileNotFoundError:
        raise RuntimeError(f"{path}: missing.") from None
    except (OSError, ValueError, RecursionError) as error:
        raise RuntimeError(f"{path}: damaged or unreadable ({error}).") from error
    if not isinstance(header, dict):
        raise RuntimeError(f"{path}: damaged: its header is a {type(header).__name__}.")
    header.pop("__metadata__", None)
    try:
        found = {name: _entry(8 + length, name, entry) for name, entry in header.items()}
    except ValueError as error:
        raise RuntimeError(f"{path}: damaged: {error}.") from error
    _check_filled(path, found, 8 + length, size)
    return {
        name: Stored(
            outline.dtype, outline.shape, partial(_read, path, outline.dtype, start), start
        )
        for name, (outline, start) in found.items()
    }


def _check_filled(path: Path, found: dict[str, tuple[Outline, int]], start: int, size: int) -> None:
    """Raise RuntimeError unless the tensors fill the file from byte ``start`` on, without gaps."""
    end = start
    for name, (outline, at) in sorted(found.items(), key=lambda i: (i[1][1], i[1][0].nbytes)):
        if at != end:
            how = "lies over another tensor" if at < end else "comes after unused bytes"
            raise RuntimeError(f"{path}: damaged: {name!r} {how}.")
        end += outline.nbytes
    if end > size:
        raise RuntimeError(f"{path}: truncated: {size} bytes, wanted {end}.")
    if end < size:
        raise RuntimeError(f"{path}: damaged: {size - end} bytes belong to no tensor.")


def _without_repeats(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        raise ValueError("a name appears twice in its header")
    return found


def _entry(data: int, name: str, entry: object) -> tuple[Outline, int]:
    """One entry of the header of a file whose data starts at byte ``data``; and its first byte.

    Raises:
        ValueError: it is not one.
    """
    match entry:
        case {"dtype": str(dtype), "shape": shape, "data_offsets": [start, stop]}:
            pass
        case _:
            raise ValueError(f"{name!r} is described by {entry!r:.80}")
    if dtype not in _DTYPES:
        raise ValueError(f"{name!r} is {dtype}; known are {', '.join(_DTYPES)}")
    if type(start) is not int or type(stop) is not int or start < 0:
        raise ValueError(f"{name!r} lies at {start!r:.40}, {stop!r:.40}")
    outline = Outline(_DTYPES[dtype], check_shape(name, shape))
    if stop - start != outline.nbytes:
        raise ValueError(
            f"{name!r} has {stop - start} bytes; {dtype} of shape {outline.shape} has "
            f"{outline.nbytes}"
        )
    return outline, data + start


def _read(path: Path, dtype: torch.dtype, start: int, first: int, last: int) -> Tensor:
    """Elements ``[first, last)`` of the tensor at byte ``start`` of a file.

    Raises:
        RuntimeError: the file ends before.
    """
    tensor = torch.empty(last - first, dtype=dtype, device="cpu")
    with path.open("rb") as file:
        file.seek(start + first * dtype.itemsize)
        left = view_bytes(tensor)
        while left:
            count = file.readinto(left)
            if not count:
                raise RuntimeError(f"{path}: truncated while it was read.")
            left = left[count:]
    return tensor


SAFETENSORS = Format(".safetensors", write_file, read_file, check_tensor)
"""What ``save_full`` writes unless it is told another format."""
