"""The safetensors format, read and written in pieces: no pickle, no whole file in memory.

::

    8 bytes   length of the header, little-endian
    header    JSON: {"__metadata__": {...}, name: {"dtype", "shape", "data_offsets": [from, to]}}
    data      tensors in row-major order, back to back
"""

from __future__ import annotations

import ctypes
import json
import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fsdp_compose.checkpoint.metadata import check_shape

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
_MAX_HEADER = 100_000_000  # what the format's own reader accepts


@dataclass(frozen=True)
class Item:
    """Where a tensor lies in a file."""

    file: Path
    dtype: torch.dtype
    shape: tuple[int, ...]
    start: int  # bytes from the start of the file

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        return self.numel * self.dtype.itemsize

    def read(self, first: int = 0, last: int | None = None) -> Tensor:
        """Elements ``[first, last)`` of the flattened tensor, as a 1-D tensor on the CPU.

        Raises:
            RuntimeError: the file ends before.
        """
        last = self.numel if last is None else last
        tensor = torch.empty(last - first, dtype=self.dtype)
        with self.file.open("rb") as file:
            file.seek(self.start + first * self.dtype.itemsize)
            view = memory(tensor)
            done = 0
            while done < len(view):
                count = file.readinto(view[done:])
                if not count:
                    raise RuntimeError(f"{self.file}: truncated while it was read.")
                done += count
        return tensor


def memory(tensor: Tensor) -> memoryview:
    """The bytes of a contiguous CPU tensor, writable, without a copy."""
    if not tensor.numel():
        return memoryview(bytearray())
    data = (ctypes.c_char * tensor.nbytes).from_address(tensor.data_ptr())
    return memoryview(data).cast("B")


def check_dtype(name: str, dtype: torch.dtype) -> None:
    """Raise ValueError for what safetensors cannot hold."""
    if dtype not in _NAMES:
        raise ValueError(f"{name!r} is {dtype}, which the safetensors format cannot hold.")
    if name == "__metadata__":
        raise ValueError("'__metadata__' is no name of a tensor in the safetensors format.")


def read_header(path: Path) -> tuple[dict[str, Item], dict[str, str]]:
    """What a file holds, by name, and its ``__metadata__``.

    Raises:
        RuntimeError: it is missing, truncated or damaged, or describes what no file can hold: its
            tensors must fill it, each with bytes of its own.
    """
    try:
        size = path.stat().st_size
        with path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            if size < 8 or 8 + length > size or length > _MAX_HEADER:
                raise RuntimeError(f"{path}: truncated or not a safetensors file ({size} bytes).")
            header = json.loads(file.read(length), object_pairs_hook=_without_repeats)
    except FileNotFoundError:
        raise RuntimeError(f"{path}: missing.") from None
    except (OSError, ValueError, RecursionError) as error:
        raise RuntimeError(f"{path}: damaged or unreadable ({error}).") from error
    if not isinstance(header, dict):
        raise RuntimeError(f"{path}: damaged: its header is a {type(header).__name__}.")
    notes = header.pop("__metadata__", {})
    try:
        items = {name: _item(path, 8 + length, name, entry) for name, entry in header.items()}
    except ValueError as error:
        raise RuntimeError(f"{path}: damaged: {error}.") from error
    end = 8 + length
    for name, item in sorted(items.items(), key=lambda pair: (pair[1].start, pair[1].nbytes)):
        if item.start != end:
            how = "lies over another tensor" if item.start < end else "comes after unused bytes"
            raise RuntimeError(f"{path}: damaged: {name!r} {how}.")
        end += item.nbytes
    if end > size:
        raise RuntimeError(f"{path}: truncated: {size} bytes, wanted {end}.")
    if end < size:
        raise RuntimeError(f"{path}: damaged: {size - end} bytes belong to no tensor.")
    return items, notes if isinstance(notes, dict) else {}


def _without_repeats(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        raise ValueError("a name appears twice in its header")
    return found


def _item(path: Path, data: int, name: str, entry: object) -> Item:
    """One entry of the header of a file whose data starts at byte ``data``.

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
    item = Item(path, _DTYPES[dtype], check_shape(name, shape), data + start)
    if stop - start != item.nbytes:
        raise ValueError(
            f"{name!r} has {stop - start} bytes; {dtype} of shape {item.shape} has {item.nbytes}"
        )
    return item


class FilePlan:
    """One file to write: which tensors, and where in it each lies."""

    def __init__(
        self, name: str, tensors: Mapping[str, tuple[torch.dtype, tuple[int, ...]]]
    ) -> None:
        self.name = name
        # Wide elements first, so that each tensor is aligned for its dtype.
        order = sorted(tensors, key=lambda key: -tensors[key][0].itemsize)
        header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
        starts: dict[str, int] = {}
        end = 0
        for key in order:
            dtype, shape = tensors[key]
            check_dtype(key, dtype)
            start, end = end, end + math.prod(shape) * dtype.itemsize
            starts[key] = start
            header[key] = {
                "dtype": _NAMES[dtype],
                "shape": list(shape),
                "data_offsets": [start, end],
            }
        text = json.dumps(header, separators=(",", ":")).encode()
        text += b" " * (-len(text) % 8)
        self.head = len(text).to_bytes(8, "little") + text
        self.starts = {key: len(self.head) + start for key, start in starts.items()}
        self.dtypes = {key: dtype for key, (dtype, _) in tensors.items()}
        self.data_bytes = end
        self.bytes = len(self.head) + end

    def create(self, path: Path) -> None:
        """Make the file, with its header and room for its data."""
        with path.open("wb") as file:
            file.write(self.head)
            file.truncate(self.bytes)

    def put(self, path: Path, key: str, tensor: Tensor) -> None:
        """Write one tensor into the file that ``create`` made."""
        data = tensor.detach().to("cpu", self.dtypes[key]).contiguous()
        with path.open("r+b") as file:
            file.seek(self.starts[key])
            file.write(memory(data))


def plan_files(
    tensors: Mapping[str, tuple[torch.dtype, tuple[int, ...]]], max_bytes: int
) -> list[FilePlan]:
    """Cut ``tensors`` into files of at most ``max_bytes`` of data, or of one tensor, in order."""
    return [plan for plans in plan_files_of_each([tensors], max_bytes) for plan in plans]


def plan_files_of_each(
    several: Sequence[Mapping[str, tuple[torch.dtype, tuple[int, ...]]]], max_bytes: int
) -> list[list[FilePlan]]:
    """As ``plan_files``, for parts of a model that share no file."""
    parts = [_cut(tensors, max_bytes) for tensors in several]
    names = iter(file_names(sum(map(len, parts))))
    return [[FilePlan(next(names), part) for part in of_one] for of_one in parts]


def _cut(
    tensors: Mapping[str, tuple[torch.dtype, tuple[int, ...]]], max_bytes: int
) -> list[dict[str, tuple[torch.dtype, tuple[int, ...]]]]:
    parts: list[dict[str, tuple[torch.dtype, tuple[int, ...]]]] = [{}]
    size = 0
    for key, (dtype, shape) in tensors.items():
        numbytes = math.prod(shape) * dtype.itemsize
        if parts[-1] and size + numbytes > max_bytes:
            parts.append({})
            size = 0
        parts[-1][key] = (dtype, shape)
        size += numbytes
    return parts


def file_names(count: int) -> Sequence[str]:
    """Names as Hugging Face gives them."""
    if count == 1:
        return ["model.safetensors"]
    return [f"model-{i + 1:05d}-of-{count:05d}.safetensors" for i in range(count)]


def sync(path: Path) -> None:
    """Wait until a file is on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
