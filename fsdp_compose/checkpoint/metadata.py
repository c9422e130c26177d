"""What a checkpoint folder says of itself, read without trusting it.

``.metadata`` is a pickle, as torch.distributed.checkpoint wrote it; here it may build its own few
classes only, so that reading it runs no code. Then it is checked: names of files stay inside the
folder, the pieces of each tensor are all of it and lie in bytes of their own.
"""

from __future__ import annotations

import contextlib
import dataclasses
import io
import itertools
import math
import pickle
import zlib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path, PurePosixPath, PureWindowsPath
from typing import Any

import torch
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)

from fsdp_compose.base.torch_private import MemoryFormatCode, StorageInfo
from fsdp_compose.checkpoint.files import MANIFEST, METADATA, Sum, is_saved_folder, json_of

_KINDS: tuple[type, ...] = (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    MemoryFormatCode,
    Metadata,
    MetadataIndex,
    StorageInfo,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)


def _layout(name: object) -> torch.layout:
    if name != "torch.strided":
        raise pickle.UnpicklingError(f"it holds tensors of layout {name!r:.40}")
    return torch.strided


_CLASSES: Mapping[tuple[str, str], Any] = {
    **{(kind.__module__, kind.__qualname__): kind for kind in _KINDS},
    # Where torch had them before 2.3.
    ("torch.distributed._shard.sharded_tensor.metadata", "TensorProperties"): TensorProperties,
    ("torch.distributed._shard.sharded_tensor.metadata", "MEM_FORMAT_ENCODING"): MemoryFormatCode,
    ("torch", "Size"): torch.Size,
    ("torch.serialization", "_get_layout"): _layout,
    ("collections", "OrderedDict"): dict,
    ("pathlib", "PosixPath"): PurePosixPath,
    ("pathlib", "WindowsPath"): PureWindowsPath,
    ("pathlib._local", "PosixPath"): PurePosixPath,
    ("pathlib._local", "WindowsPath"): PureWindowsPath,
}
_MAX_DIMENSIONS = 64  # more dimensions than torch computes with
_MAX_NUMEL = 1 << 62


class _Unpickler(pickle.Unpickler):
    """Finds what a checkpoint's metadata is made of, and dtypes; nothing else."""

    def find_class(self, module: str, name: str) -> Any:
        found = _CLASSES.get((module, name))
        if found is not None:
            return found
        dtype = vars(torch).get(name) if module == "torch" else None
        if isinstance(dtype, torch.dtype):
            return dtype
        raise pickle.UnpicklingError(
            f"it asks for {module}.{name}, which no checkpoint's metadata holds, and which was "
            "not run"
        )


def _unpickle(data: bytes) -> object:
    """Unpickle bytes, which may use the classes of metadata alone and cannot change them."""
    before = {kind: dict(vars(kind)) for kind in _KINDS}
    try:
        return _Unpickler(io.BytesIO(data)).load()
    finally:
        for kind, names in before.items():
            if changed := [k for k, v in vars(kind).items() if names.get(k, before) is not v]:
                for name in changed:
                    setattr(kind, name, names[name]) if name in names else delattr(kind, name)
                raise pickle.UnpicklingError(f"it sets {changed} of the class {kind.__name__}")


class CheckedReader(FileSystemReader):
    """Reads tensors of a folder whose metadata was checked; never unpickles the metadata again."""

    def __init__(self, path: Path, metadata: Metadata) -> None:
        super().__init__(path)
        self.checked = metadata

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        return self.checked


def read_metadata(path: Path) -> tuple[Metadata, Sum]:
    """Read and check what a checkpoint folder says it holds; and the sum of what was read.

    Raises:
        RuntimeError: there is no checkpoint, only a half-written one, or its metadata is damaged,
            or asks for what no checkpoint needs.
    """
    file = path / METADATA
    if not file.is_file():
        half = path.is_dir() and any(is_saved_folder(e.name) for e in path.iterdir())
        raise RuntimeError(
            f"{path}: "
            + ("half-written: a first save to it was not finished" if half else "no checkpoint")
            + f" (there is no {METADATA} file)."
            + ("" if half else " load_full loads safetensors.")
        )
    data = file.read_bytes()
    total = Sum(len(data), zlib.crc32(data))
    try:
        metadata = _unpickle(data)
    except Exception as error:  # a damaged pickle raises anything
        raise RuntimeError(f"{file}: damaged or truncated ({error}).") from error
    if not isinstance(metadata, Metadata):
        raise RuntimeError(f"{file}: holds a {type(metadata).__name__}, not checkpoint metadata.")
    try:
        _check_entries(metadata)
        _check_places(metadata)
    except (AttributeError, TypeError, ValueError) as error:
        raise RuntimeError(f"{file}: damaged: {error}.") from error
    with unless_replaced(path, total):
        if any(manifest.metadata != total for manifest in manifests(path, metadata)):
            raise RuntimeError(f"{file}: damaged: its size or checksum is not what was saved.")
    return metadata, total


@contextlib.contextmanager
def unless_replaced(path: Path, total: Sum) -> Iterator[None]:
    """Scope of reading a checkpoint whose metadata has the sum ``total``.

    Raises:
        RuntimeError: reading failed because another save replaced the checkpoint meanwhile.
    """
    try:
        yield
    except (OSError, RuntimeError) as error:
        file = path / METADATA
        if not file.is_file() or Sum.of(file) == total:
            raise
        raise RuntimeError(
            f"{path}: another save replaced it while it was read; nothing was loaded. Load again."
        ) from error


@dataclasses.dataclass(frozen=True)
class Manifest:
    """What a save says of its files."""

    world_size: int
    metadata: Sum
    files: dict[str, Sum]


def manifests(path: Path, metadata: Metadata) -> list[Manifest]:
    """Read the manifests of the files that ``metadata`` names: one, or none without checksums.

    Those of saves that are under way, or were killed, may be half written, and are not looked at.

    Raises:
        RuntimeError: one is damaged.
    """
    places = metadata.storage_data.values()
    folders = {place.relative_path.split("/")[0] for place in places}
    files = [path / name / MANIFEST for name in sorted(folders) if is_saved_folder(name)]
    return [manifest_of(file) for file in files if file.is_file()]


def manifest_of(file: Path) -> Manifest:
    """Read one manifest.

    Raises:
        RuntimeError: it is damaged.
    """
    match json_of(file):
        case {"world_size": int(ranks), "metadata": total, "files": dict(files)}:
            sums = {name: Sum.from_json(entry, file) for name, entry in files.items()}
            return Manifest(ranks, Sum.from_json(total, file), sums)
    raise RuntimeError(f"{file}: damaged: it is not what save_checkpoint writes.")


def check_relative(name: object) -> str:
    """Check that a file lies below the folder that names it, and give its name.

    Raises:
        ValueError: it leads elsewhere, or is no name.
    """
    if not isinstance(name, str) or not name or "\0" in name:
        raise ValueError(f"found {name!r:.80} where the name of a file was wanted")
    kinds = PurePosixPath(name), PureWindowsPath(name)
    if any(".." in kind.parts or kind.is_absolute() or kind.drive for kind in kinds):
        raise ValueError(f"it names the file {name!r}, which is outside the folder")
    return name


def check_shape(name: object, shape: object) -> tuple[int, ...]:
    """Check the shape of a tensor, and give it.

    Raises:
        ValueError: it is none, or no tensor can have it.
    """
    if not isinstance(shape, (list, tuple)) or any(type(n) is not int or n < 0 for n in shape):
        raise ValueError(f"{name!r} has shape {shape!r:.80}")
    if len(shape) > _MAX_DIMENSIONS or math.prod(max(n, 1) for n in shape) > _MAX_NUMEL:
        raise ValueError(f"{name!r} has a shape that no tensor can have: {tuple(shape)!r:.80}")
    return tuple(shape)


def _check_entries(metadata: Metadata) -> None:
    """Raise ValueError or TypeError unless every entry is described as torch describes it."""
    if not isinstance(metadata.state_dict_metadata, dict):
        raise ValueError("it has no entries")
    for key, entry in metadata.state_dict_metadata.items():
        if type(key) is not str or type(entry) not in (TensorStorageMetadata, BytesStorageMetadata):
            raise ValueError(f"its entry {key!r:.80} is a {type(entry).__name__}")
        if isinstance(entry, TensorStorageMetadata):
            shape = check_shape(key, entry.size)
            if not isinstance(entry.properties.dtype, torch.dtype):
                raise ValueError(f"{key!r} has no dtype")
            for chunk in entry.chunks:
                triples = list(zip(chunk.offsets, chunk.sizes, shape, strict=True))
                if any(type(a) is not int or not 0 <= a <= a + n <= end for a, n, end in triples):
                    raise ValueError(f"{key!r}, of shape {shape}, has a piece {triples!r:.80}")
    paths = metadata.planner_data
    if paths is not None and not (
        isinstance(paths, dict)
        and all(type(path) is tuple for path in paths.values())
        and all(isinstance(step, (str, int)) for path in paths.values() for step in path)
    ):
        raise ValueError("its planner_data is not a path for each entry")


def _check_places(metadata: Metadata) -> None:
    """Raise ValueError or TypeError unless every piece has bytes of its own inside the folder."""
    places = metadata.storage_data
    if not isinstance(places, dict):
        raise ValueError("it does not say where its entries lie")
    spans: dict[str, list[tuple[int, int, str]]] = {}
    for index, place in places.items():
        if type(index) is not MetadataIndex or type(place) is not StorageInfo:
            raise ValueError(f"found {index!r:.80} at {place!r:.80}")
        if not all(type(n) is int and n >= 0 for n in (place.offset, place.length)):
            raise ValueError(f"{index.fqn!r} lies at {place.offset!r:.40}, {place.length!r:.40}")
        file = check_relative(place.relative_path)
        spans.setdefault(file, []).append((place.offset, place.offset + place.length, index.fqn))
    for file, found in spans.items():
        found.sort()
        for (_, end, first), (start, _, second) in itertools.pairwise(found):
            if start < end:
                raise ValueError(f"{first!r} and {second!r} share bytes of {file}")
    known = set(places)
    for key, entry in metadata.state_dict_metadata.items():
        if isinstance(entry, TensorStorageMetadata):
            indices = [MetadataIndex(key, chunk.offsets) for chunk in entry.chunks]
        else:
            indices = [MetadataIndex(key)]
        if lost := [index for index in indices if index not in known]:
            raise ValueError(f"it does not say where {key!r} at {lost[0].offset} lies")


def check_whole(path: Path, key: str, entry: TensorStorageMetadata) -> None:
    """Raise RuntimeError unless the pieces of a tensor are all of it, each element once."""
    boxes = [
        tuple((start, start + size) for start, size in zip(c.offsets, c.sizes, strict=True))
        for c in entry.chunks
        if all(c.sizes)
    ]
    if math.prod(entry.size) and not _tile(boxes, entry.size):
        raise RuntimeError(
            f"{path / METADATA}: damaged: the {len(entry.chunks)} pieces of {key!r} are not the "
            f"whole of its shape {tuple(entry.size)}: some are missing, or lie over each other."
        )


def _tile(boxes: Sequence[tuple[tuple[int, int], ...]], shape: Sequence[int]) -> bool:
    """Whether ``boxes`` of (start, stop) by dimension cover ``shape`` without gap or overlap."""
    if not shape:
        return len(boxes) == 1
    if not boxes or sum(math.prod(b - a for a, b in box) for box in boxes) != math.prod(shape):
        return False
    edges = sorted({edge for box in boxes for edge in box[0]})
    waiting = sorted(boxes, key=lambda box: box[0], reverse=True)
    active: list[tuple[tuple[int, int], ...]] = []
    for edge in edges[:-1]:
        before = len(active)
        active = [box for box in active if box[0][1] > edge]
        changed = len(active) != before
        while waiting and waiting[-1][0][0] == edge:
            active.append(waiting.pop())
            changed = True
        if changed and not _tile([box[1:] for box in active], shape[1:]):
            return False
    return True


def verify(path: Path, metadata: Metadata, share: slice, contents: bool = True) -> list[str]:
    """Check a share of the checkpoint's files: there, of the right size, with the right checksum.

    Args:
        share: which of the sorted files.
        contents: read them, where the checkpoint has checksums; else look at sizes only.

    Returns:
        the names of those that the checkpoint has no checksum of.

    Raises:
        RuntimeError: names the file.
    """
    ends: dict[str, int] = {}
    for place in metadata.storage_data.values():
        end = place.offset + place.length
        ends[place.relative_path] = max(end, ends.get(place.relative_path, 0))
    sums: dict[str, Sum] = {}
    for manifest in manifests(path, metadata):
        sums.update(manifest.files)
    names = sorted(ends)[share]
    for name in names:
        file = path / name
        if not file.is_file():
            raise RuntimeError(f"{file}: missing; the checkpoint's metadata names it.")
        size, wanted = file.stat().st_size, sums.get(name)
        if size < ends[name] or (wanted is not None and size != wanted.bytes):
            least = wanted.bytes if wanted else ends[name]
            how = "truncated" if size < least else "damaged"
            expected = least if wanted else f"{least} or more"
            raise RuntimeError(f"{file}: {how}: {size} bytes, wanted {expected}.")
        if contents and wanted is not None and Sum.of(file) != wanted:
            raise RuntimeError(f"{file}: damaged: its checksum is not what was saved.")
    return [name for name in names if name not in sums]
