"""``fsdp-compose checkpoint show|convert``: look into a checkpoint without a process group."""

from __future__ import annotations

import argparse
import math
import re
import sys
import uuid
from collections.abc import Mapping, Sequence
from itertools import chain, zip_longest
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from fsdp_compose.base.group import SELF
from fsdp_compose.checkpoint.files import (
    METADATA,
    CommittingWriter,
    Sum,
    is_saved_folder,
    sync_file,
    write_checkpoint,
)
from fsdp_compose.checkpoint.formats.export import ASIDE, Export, find_stored, leftovers, remove
from fsdp_compose.checkpoint.formats.format import PlannedFile, Stored, plan_files
from fsdp_compose.checkpoint.formats.safetensors import SAFETENSORS
from fsdp_compose.checkpoint.full import MAX_FILE_BYTES
from fsdp_compose.checkpoint.metadata import check_whole, manifests, read_metadata, verify
from fsdp_compose.checkpoint.source import CheckpointSource
from fsdp_compose.checkpoint.values import Outline
from fsdp_compose.cli.errors import UserError
from fsdp_compose.cli.progress import follow, say_all
from fsdp_compose.report.text import dtype_name, plural, table


def run(args: argparse.Namespace) -> int:
    """Do what ``checkpoint show`` or ``convert`` was asked for.

    What is wrong with the files is a line on stderr and 1; a wrong path is a ``UserError``.
    """
    try:
        (_show if args.action == "show" else _convert)(args)
    except BrokenPipeError:  # the reader of our output has closed it
        raise
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
    _check_exists(args.path)
    if is_sharded_checkpoint(args.path):
        _show_sharded(args.path, args.verify, args.all)
    else:
        _show_full(args.path, args.verify, args.all)


def _show_sharded(path: Path, check: bool, every: bool) -> None:
    metadata, _ = read_metadata(path)
    unknown = verify(path, metadata, slice(None), check)
    rows, numel, nbytes = [], 0, 0
    for key, entry in sorted(metadata.state_dict_metadata.items()):
        if isinstance(entry, TensorStorageMetadata):
            check_whole(path, key, entry)
            dtype, shape = entry.properties.dtype, tuple(entry.size)
            rows.append((key, dtype_name(dtype), str(shape), plural(len(entry.chunks), "piece")))
            numel += math.prod(shape)
            nbytes += math.prod(shape) * dtype.itemsize
        else:
            rows.append((key, "object", "", ""))
    _print_rows(rows, every)
    found = manifests(path, metadata)
    ranks = f", saved by {plural(found[0].world_size, 'rank')}" if found else ""
    checked = _say_checked(unknown) if check else ""
    print(f"{len(rows)} entries, {numel:,} elements, {nbytes:,} bytes{ranks}{checked}")


def _show_full(path: Path, check: bool, every: bool) -> None:
    found = find_stored(path, SAFETENSORS)
    if check:
        found.check_sums()
    rows = [
        (name, dtype_name(stored.dtype), str(stored.shape), found.files[name].name)
        for name, stored in found.tensors.items()
    ]
    _print_rows(rows, every)
    total = sum(stored.nbytes for stored in found.tensors.values())
    numel = sum(stored.numel for stored in found.tensors.values())
    unknown = sorted({file.name for file in found.files.values() if file not in found.sums})
    checked = _say_checked(unknown) if check else ""
    print(f"{len(found.tensors)} entries, {numel:,} elements, {total:,} bytes{checked}")


def _say_checked(unknown: Sequence[str]) -> str:
    """What ``--verify`` found, where some files have no checksum and nothing is wrong."""
    if not unknown:
        return ", every file as it was saved"
    more = f" and {plural(len(unknown) - 1, 'other file')}" if len(unknown) > 1 else ""
    return f", without a checksum of {unknown[0]}{more}"


def _print_rows(rows: Sequence[Sequence[str]], every: bool) -> None:
    """Print a table whose names may hold anything; names that differ by a number once."""
    text = table(rows if every else _fold(rows), left=range(4), indent="")
    say_all(text.split("\n") if text else ())


def _fold(rows: Sequence[Sequence[str]]) -> list[list[str]]:
    """Join rows that differ by one number in the name: ``blocks.{0..5}.weight``."""
    runs: dict[tuple[Any, ...], list[Sequence[str]]] = {}
    for row in rows:
        runs.setdefault((tuple(re.split(r"\d+", row[0])), *row[1:]), []).append(row)
    folded = []
    for (texts, *rest), run in runs.items():
        numbers = [[int(n) for n in re.findall(r"\d+", row[0])] for row in run]
        columns = [sorted(set(column)) for column in zip(*numbers, strict=True)]
        moving = [column for column in columns if len(column) > 1]
        is_range = len(moving) == 1 and moving[0][-1] - moving[0][0] + 1 == len(moving[0])
        if len(run) < 3 or not is_range:
            folded += [list(row) for row in run]
            continue
        shown = [f"{{{c[0]}..{c[-1]}}}" if len(c) > 1 else str(c[0]) for c in columns]
        folded.append(["".join(chain(*zip_longest(texts, shown, fillvalue=""))), *rest])
    return folded


def _check_exists(path: Path) -> None:
    if not path.exists():
        raise UserError(f"{path} does not exist.")


def _convert(args: argparse.Namespace) -> None:
    _check_exists(args.source)
    if args.target.exists() and not args.target.is_dir():
        raise UserError(f"{args.target} is a file; name a folder that is not there yet.")
    if args.target.exists() and not _is_free(args.target):
        raise UserError(f"{args.target}: not empty; name a folder that is not there yet.")
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
    left = {entry.name for entry in leftovers(target, SAFETENSORS, set())}
    if not any(name.startswith(ASIDE) for name in names):
        left = set()  # parts that lie there for another reason
    return all(name in left or is_saved_folder(name) for name in names)


def to_full(source: Path, target: Path, prefix: str, max_file_bytes: int = MAX_FILE_BYTES) -> None:
    """Write the model of a sharded checkpoint as safetensors files with an index.

    Raises:
        RuntimeError: the source is not whole.
        UserError: it has nothing at ``prefix``.
        ValueError: the model holds what safetensors cannot.
    """
    metadata, _ = read_metadata(source)
    verify(source, metadata, slice(None))
    reader = CheckpointSource(source, metadata)
    place = tuple(prefix.split(".")) if prefix else ()
    keys = {str(path[-1]): key for path, key in reader.below(place).items()}
    if not keys:
        tops = sorted({str(path[0]) for path in reader.paths})
        raise UserError(f"{source}: nothing below --prefix {prefix!r}; it has {tops[:8]}.")
    outlines: dict[str, Outline] = {}
    for name, key in keys.items():
        outline = reader.outline(key)
        if not isinstance(outline, Tensor):
            raise ValueError(f"{source}: {name!r} is not a tensor; safetensors holds only those.")
        outlines[name] = Outline(outline.dtype, tuple(outline.shape))
    target.mkdir(parents=True, exist_ok=True)
    (files,) = plan_files([outlines], max_file_bytes, SAFETENSORS)
    export = Export(target, SAFETENSORS, files, uuid.uuid4().hex[:8])
    try:
        export.commit({file.name: _write_file(file, export, reader, keys) for file in files})
    finally:
        export.discard()


def _write_file(
    file: PlannedFile, export: Export, reader: CheckpointSource, keys: Mapping[str, str]
) -> Sum:
    """Write one file, a tensor at a time."""
    export.aside.mkdir(exist_ok=True)
    temporary = export.temporary(file)
    with export.format.write(temporary, file.tensors) as put:
        for name in follow(list(file.tensors), f"writing {file.name}"):
            reader.want(keys[name], None)
            reader.read()
            put(name, reader.values.pop(keys[name]).contiguous())
    sync_file(temporary)
    return Sum.of(temporary)


def to_sharded(source: Path, target: Path, prefix: str) -> None:
    """Write safetensors files as a sharded checkpoint of one rank, model only.

    Raises:
        RuntimeError: the source is not whole.
    """
    found = find_stored(source, SAFETENSORS)
    found.check_sums()
    state: dict[str, Any] = {n: _map_tensor(found.files[n], s) for n, s in found.tensors.items()}
    for part in reversed(prefix.split(".") if prefix else []):
        state = {part: state}
    writer = CommittingWriter(target, uuid.uuid4().hex[:12], 1, checksum=True)
    write_checkpoint(state, writer, SELF)


def _map_tensor(file: Path, stored: Stored) -> Tensor:
    """Map a tensor onto the file's own pages, which are read as they are written out."""
    if stored.start is None or stored.start % stored.dtype.itemsize:
        return stored.read_all()
    storage = torch.UntypedStorage.from_file(str(file), False, file.stat().st_size)
    flat = torch.empty(0, dtype=torch.uint8, device="cpu")
    flat.set_(storage, stored.start, (stored.nbytes,))  # type: ignore[call-overload]
    return flat.view(stored.dtype).view(stored.shape)
