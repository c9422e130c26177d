"""Files of a checkpoint: written beside the previous one, committed by one rename, checked on load.

::

    path/.metadata               what torch.distributed.checkpoint reads; replacing it is the commit
    path/data-<token>/*.distcp   one save's files, named by the metadata
    path/data-<token>/manifest.json    size and CRC-32 of each, and of the metadata
"""

from __future__ import annotations

import dataclasses
import json
import os
import pickle
import re
import shutil
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

METADATA = ".metadata"
MANIFEST = "manifest.json"
FOLDER = "data-"
_TORCH_FILE = re.compile(r"__\d+_\d+\.distcp")


@dataclasses.dataclass(frozen=True)
class Sum:
    """What a file must have."""

    bytes: int
    crc32: int

    @classmethod
    def of(cls, path: Path) -> Sum:
        crc, size = 0, 0
        with path.open("rb") as file:
            while block := file.read(1 << 20):
                crc, size = zlib.crc32(block, crc), size + len(block)
        return cls(size, crc)


@dataclasses.dataclass(frozen=True)
class _Written:
    """Where an item was written, and the sums of this rank's files; travels to the coordinator."""

    place: Any
    sums: dict[str, Sum]


class CommittingWriter(FileSystemWriter):
    """Writes a save into a folder of its own; the previous checkpoint is whole until the commit."""

    def __init__(self, path: Path, token: str, world_size: int, checksum: bool) -> None:
        super().__init__(path)
        self.root, self.token = Path(path), token
        self.world_size, self.checksum = world_size, checksum

    @property
    def folder(self) -> Path:
        return self.root / f"{FOLDER}{self.token}"

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        self.folder.mkdir(parents=True, exist_ok=True)
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        prepared = super().prepare_global_plan(plans)
        return [
            dataclasses.replace(plan, storage_data=_inside(plan.storage_data, self.folder.name))
            for plan in prepared
        ]

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        self.folder.mkdir(parents=True, exist_ok=True)
        results = super().write_data(plan, planner).wait()
        names = {result.storage_data.relative_path for result in results}
        sums = {name: Sum.of(self.root / name) for name in names} if self.checksum else {}
        for index, result in enumerate(results):
            written = _Written(result.storage_data, {} if index else sums)
            results[index] = dataclasses.replace(result, storage_data=written)
        future: Future[list[WriteResult]] = Future()
        future.set_result(results)
        return future

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        sums: dict[str, Sum] = {}
        plain: list[list[WriteResult]] = []
        for of_rank in results:
            for result in of_rank:
                sums.update(result.storage_data.sums)
            plain.append(
                [dataclasses.replace(r, storage_data=r.storage_data.place) for r in of_rank]
            )
        self.path = self.folder  # metadata is prepared there ...
        super().finish(metadata, plain)
        self.path = self.root
        prepared = self.folder / METADATA
        if self.checksum:
            manifest = {
                "format": 1,
                "world_size": self.world_size,
                "metadata": dataclasses.asdict(Sum.of(prepared)),
                "files": {name: dataclasses.asdict(s) for name, s in sorted(sums.items())},
            }
            write_durably(self.folder / MANIFEST, json.dumps(manifest, indent=1).encode())
        sync_folder(self.folder)
        os.replace(prepared, self.root / METADATA)  # ... and this is the commit
        sync_folder(self.root)
        self._remove_others()

    def _remove_others(self) -> None:
        for entry in self.root.iterdir():
            if entry.name.startswith(FOLDER) and entry != self.folder:
                shutil.rmtree(entry, ignore_errors=True)
            elif _TORCH_FILE.fullmatch(entry.name):
                entry.unlink(missing_ok=True)

    def discard(self) -> None:
        """Remove what a save that failed has written."""
        if not _refers_to(self.root, self.folder.name):
            shutil.rmtree(self.folder, ignore_errors=True)


def _refers_to(root: Path, folder: str) -> bool:
    try:
        return folder.encode() in (root / METADATA).read_bytes()
    except OSError:
        return False


def _inside(prefix: Any, folder: str) -> Any:
    return dataclasses.replace(prefix, prefix=f"{folder}/{prefix.prefix}")


def write_durably(path: Path, data: bytes) -> None:
    """Write a file that is on the disk when this returns."""
    with path.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def sync_folder(path: Path) -> None:
    """Make renames in a folder durable, where the system can."""
    try:
        descriptor = os.open(path, os.O_RDONLY)
    except OSError:
        return
    try:
        os.fsync(descriptor)
    except OSError:
        pass
    finally:
        os.close(descriptor)


def read_metadata(path: Path) -> Metadata:
    """What is in a checkpoint.

    Raises:
        RuntimeError: there is no checkpoint, only a half-written one, or its metadata is damaged.
    """
    file = path / METADATA
    if not file.is_file():
        half = path.is_dir() and any(e.name.startswith(FOLDER) for e in path.iterdir())
        raise RuntimeError(
            f"{path}: "
            + ("half-written: a first save to it was not finished" if half else "no checkpoint")
            + f" (there is no {METADATA} file)."
        )
    manifests = [json_of(found) for found in sorted(path.glob(f"{FOLDER}*/{MANIFEST}"))]
    wanted = [manifest.get("metadata") for manifest in manifests]
    if wanted and dataclasses.asdict(Sum.of(file)) not in wanted:
        raise RuntimeError(f"{file}: damaged: its size or checksum is not what was saved.")
    try:
        metadata = FileSystemReader(path).read_metadata()
    except (pickle.UnpicklingError, EOFError, AttributeError, ImportError, ValueError) as error:
        raise RuntimeError(f"{file}: damaged or truncated ({error}).") from error
    if not isinstance(metadata, Metadata):
        raise RuntimeError(f"{file}: holds a {type(metadata).__name__}, not checkpoint metadata.")
    return metadata


def json_of(path: Path) -> dict[str, Any]:
    """A JSON object from a file.

    Raises:
        RuntimeError: it is not one.
    """
    try:
        value = json.loads(path.read_bytes())
    except (ValueError, OSError) as error:
        raise RuntimeError(f"{path}: damaged or unreadable ({error}).") from error
    if not isinstance(value, dict):
        raise RuntimeError(f"{path}: holds a {type(value).__name__}; wanted a JSON object.")
    return value


def verify(path: Path, metadata: Metadata, share: slice, contents: bool = True) -> None:
    """Check a share of the checkpoint's files: there, of the right size, with the right checksum.

    Args:
        share: which of the sorted files.
        contents: read them, where the checkpoint has checksums; else look at sizes only.

    Raises:
        RuntimeError: names the file.
    """
    ends: dict[str, int] = {}
    for place in (metadata.storage_data or {}).values():
        end = place.offset + place.length
        ends[place.relative_path] = max(end, ends.get(place.relative_path, 0))
    sums: dict[str, dict[str, int]] = {}
    for folder in sorted({name.split("/")[0] for name in ends if "/" in name}):
        if (path / folder / MANIFEST).is_file():
            sums.update(json_of(path / folder / MANIFEST).get("files", {}))
    for name in sorted(ends)[share]:
        file = path / name
        if not file.is_file():
            raise RuntimeError(f"{file}: missing; the checkpoint's metadata names it.")
        size = file.stat().st_size
        wanted = sums.get(name)
        if size < ends[name] or (wanted is not None and size != wanted["bytes"]):
            expected = wanted["bytes"] if wanted else f"{ends[name]} or more"
            raise RuntimeError(f"{file}: truncated: {size} bytes, wanted {expected}.")
        if contents and wanted is not None and Sum.of(file).crc32 != wanted["crc32"]:
            raise RuntimeError(f"{file}: damaged: its checksum is not what was saved.")


def describe_failures(failures: Sequence[tuple[int, BaseException]]) -> str:
    """One line of what each rank met."""
    return "; ".join(f"rank {rank}: {type(e).__name__}: {e}" for rank, e in failures)
