"""``fsdp-compose checkpoint show|convert``: look into a checkpoint without a process group."""

from __future__ import annotations

import argparse
import math
import sys
import uuid
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from fsdp_compose.base.mesh import SELF
from fsdp_compose.checkpoint.export import ASIDE, INDEX, SINGLE, Export, leftovers, remove
from fsdp_compose.checkpoint.files import FOLDER, METADATA, CommittingWriter, Sum
from fsdp_compose.checkpoint.full import MAX_FILE_BYTES, check_sum, find_items
from fsdp_compose.checkpoint.metadata import check_whole, manifests, read_metadata, verify
from fsdp_compose.checkpoint.source import Source
from fsdp_compose.checkpoint.tensorfile import FilePlan, Item, plan_files, sync
from fsdp_compose.checkpoint.write import write_checkpoint

Outlines = dict[str, tuple[torch.dtype, tuple[int, ...]]]


def run(args: argparse.Namespace) -> int:
    """Do what ``checkpoint show`` or ``convert`` was asked for; an error is a line on stderr."""
    try:
        (_show if args.action == "show" else _convert)(args)
    except (OSError, RuntimeError, ValueError) as error:
        print(f"fsdp-compose checkpoint: {error}", file=sys.stderr)
        return 1
    return 0


def is_sharded_checkpoint(path: Path) -> bool:
    """Whether ``path`` is one of torch.distributed.checkpoint's, finished or not."""
    if (path / METADATA).is_file():
        return True
    return path.is_dir() and not any(path.glob("*.safetensors"))


def _show(args: argparse.Namespace) -> None:
    if is_sharded_checkpoint(args.path):
        _show_sharded(args.path, args.verify)
    else:
        _show_full(args.path, args.verify)


def _show_sharded(path: Path, check: bool) -> None:
    metadata = read_metadata(path)
    verify(path, metadata, slice(None), check)
    rows, numbers = [], [0, 0]
    for key, entry in sorted(metadata.state_dict_metadata.items()):
        if isinstance(entry, TensorStorageMetadata):
            check_whole(path, key, entry)
            dtype, shape = entry.properties.dtype, tuple(entry.size)
            rows.append((key, _name(dtype), str(shape), f"{len(entry.chunks)} pieces"))
            numbers[0] += math.prod(shape)
            numbers[1] += math.prod(shape) * dtype.itemsize
        else:
            rows.append((key, "object", "", ""))
    _print(rows)
    found = manifests(path)
    ranks = f", saved by {found[0].world_size} ranks" if found else ""
    checked = ", every file as it was saved" if check and found else ""
    print(f"{len(rows)} entries, {numbers[0]:,} elements, {numbers[1]:,} bytes{ranks}{checked}")


def _show_full(path: Path, check: bool) -> None:
    items, sums = find_items(path)
    for file in sorted(sums) if check else ():
        check_sum(file, sums[file])
    _print([(k, _name(i.dtype), str(i.shape), i.file.name) for k, i in items.items()])
    total = sum(item.nbytes for item in items.values())
    numel = sum(item.numel for item in items.values())
    checked = ", every file as it was saved" if check and sums else ""
    print(f"{len(items)} entries, {numel:,} elements, {total:,} bytes{checked}")


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _print(rows: list[tuple[str, str, str, str]]) -> None:
    widths = [max((len(row[i]) for row in rows), default=0) for i in range(4)]
    for row in rows:
        line = "  ".join(cell.ljust(w) for cell, w in zip(row, widths, strict=True)).rstrip()
        print("".join(c if c.isprintable() else ascii(c)[1:-1] for c in line))


def _convert(args: argparse.Namespace) -> None:
    if args.target.exists() and not _is_free(args.target):
        raise ValueError(f"{args.target}: not empty; name a folder that is not there yet.")
    for left in args.target.iterdir() if args.target.exists() else ():
        remove(left)
    if is_sharded_checkpoint(args.source):
        to_full(args.source, args.target, args.prefix, args.max_file_bytes or MAX_FILE_BYTES)
    else:
        to_sharded(args.source, args.target, args.prefix)
    print(f"{args.source} -> {args.target}")


def _is_free(target: Path) -> bool:
    """Whether a folder holds nothing, or only what a conversion that was killed has left."""
    names = {entry.name for entry in target.iterdir()}
    if names & {METADATA, INDEX, SINGLE}:
        return False
    left = {entry.name for entry in leftovers(target, set())}
    if not any(name.startswith(ASIDE) for name in names):
        left = set()  # parts that lie there for another reason
    return all(name in left or name.startswith(FOLDER) for name in names)


def to_full(source: Path, target: Path, prefix: str, max_file_bytes: int = MAX_FILE_BYTES) -> None:
    """Write the model of a sharded checkpoint as safetensors files with an index.

    Raises:
        RuntimeError: the source is not whole, or has no model at ``prefix``.
        ValueError: the model holds what safetensors cannot.
    """
    metadata = read_metadata(source)
    verify(source, metadata, slice(None))
    reader = Source(source, metadata)
    place = tuple(prefix.split(".")) if prefix else ()
    keys = {str(path[-1]): key for path, key in reader.below(place).items()}
    if not keys:
        tops = sorted({str(path[0]) for path in reader.paths})
        raise RuntimeError(f"{source}: nothing below {prefix!r}; it has {tops[:8]}.")
    outlines: Outlines = {}
    for name, key in keys.items():
        entry = metadata.state_dict_metadata[key]
        if not isinstance(entry, TensorStorageMetadata):
            raise ValueError(f"{source}: {name!r} is not a tensor; safetensors holds only those.")
        outlines[name] = (entry.properties.dtype, tuple(entry.size))
    target.mkdir(parents=True, exist_ok=True)
    export = Export(target, plan_files(outlines, max_file_bytes), uuid.uuid4().hex[:8])
    try:
        export.commit({plan.name: _write(plan, export, reader, keys) for plan in export.plans})
    finally:
        export.discard()


def _write(plan: FilePlan, export: Export, reader: Source, keys: Mapping[str, str]) -> Sum:
    """Write one file, a tensor at a time."""
    export.aside.mkdir(exist_ok=True)
    temporary = export.temporary(plan)
    plan.create(temporary)
    for name in plan.starts:
        reader.want(keys[name], None)
        reader.read()
        plan.put(temporary, name, reader.values.pop(keys[name]))
    sync(temporary)
    return Sum.of(temporary)


def to_sharded(source: Path, target: Path, prefix: str) -> None:
    """Write safetensors files as a sharded checkpoint of one rank, model only.

    Raises:
        RuntimeError: the source is not whole.
    """
    items, sums = find_items(source)
    for file in sorted(sums):
        check_sum(file, sums[file])
    state: dict[str, Any] = {name: _mapped(item) for name, item in items.items()}
    for part in reversed(prefix.split(".") if prefix else []):
        state = {part: state}
    writer = CommittingWriter(target, uuid.uuid4().hex[:12], 1, checksum=True)
    write_checkpoint(state, writer, SELF)


def _mapped(item: Item) -> Tensor:
    """The tensor over the file's own pages, which are read as they are written out."""
    if item.start % item.dtype.itemsize:
        return item.read().view(item.shape)
    storage = torch.UntypedStorage.from_file(str(item.file), False, item.file.stat().st_size)
    flat = torch.empty(0, dtype=torch.uint8)
    flat.set_(storage, item.start, (item.numel * item.dtype.itemsize,))  # type: ignore[call-overload]
    return flat.view(item.dtype).view(item.shape)
