"""Files of a checkpoint: written beside the previous one, committed by one rename, checked on load.

::

    path/.metadata               what torch.distributed.checkpoint reads; replacing it is the commit
    path/data-<token>/*.distcp   one save's files, named by the metadata
    path/data-<token>/manifest.json    size and CRC-32 of each, and of the metadata
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import logging
import os
import re
import shutil
import time
import zlib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from fsdp_compose.base.group import Group
from fsdp_compose.comm.messages import SharedErrors, through_first

fcntl: Any
try:
    import fcntl
except ImportError:  # not on Windows
    fcntl = None

_logger = logging.getLogger("fsdp_compose")
METADATA = ".metadata"
MANIFEST = "manifest.json"
FOLDER = "data-"
PATIENCE = 60.0
"""Seconds that a commit waits for another process's to the same folder."""
_TORCH_FILE = re.compile(r"__\d+_\d+\.distcp")
_SAVED_FOLDER = re.compile(rf"{FOLDER}[0-9a-f]{{12}}")


def is_saved_folder(name: str) -> bool:
    """Whether a folder of this name is a save's, and not the user's, such as ``data-train``."""
    return _SAVED_FOLDER.fullmatch(name) is not None


def make_folder(folder: Path) -> None:
    """Make a folder, and those above it, where they are not there.

    Raises:
        OSError: it cannot be made, as below a link to a place that is gone, which is named.
    """
    for place in (folder, *folder.parents):
        if place.is_symlink() and not place.exists():
            raise FileNotFoundError(f"{place} is a link to {place.readlink()}, which is not there")
    folder.mkdir(parents=True, exist_ok=True)


@dataclasses.dataclass(frozen=True)
class Sum:
    """The size and the checksum that a file must have."""

    bytes: int
    crc32: int

    @classmethod
    def from_json(cls, value: Any, file: Path) -> Sum:
        """Read what ``file`` says of another file.

        Raises:
            RuntimeError: it is not what a save writes.
        """
        match value:
            case {"bytes": int(size), "crc32": int(crc)} if len(value) == 2:
                return cls(size, crc)
        raise RuntimeError(f"{file}: damaged: found {value!r:.80} where a checksum was wanted.")

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
    """Writes a save into a folder of its own; the previous checkpoint is whole until the commit.

    Args:
        is_on_host: what is saved is in host memory. Torch copies ahead from a device otherwise: in
            a thread from the first one, of which each rank would take half a gigabyte.
    """

    def __init__(
        self, path: Path, token: str, world_size: int, checksum: bool, is_on_host: bool = False
    ) -> None:
        if is_on_host:
            super().__init__(path, per_thread_copy_ahead=0)
        else:
            super().__init__(path)
        self.root, self.token = Path(path), token
        self.world_size, self.checksum = world_size, checksum

    @property
    def folder(self) -> Path:
        return self.root / f"{FOLDER}{self.token}"

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        make_folder(self.folder)
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        prepared = super().prepare_global_plan(plans)
        return [
            dataclasses.replace(plan, storage_data=_inside(plan.storage_data, self.folder.name))
            for plan in prepared
        ]

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        make_folder(self.folder)
        try:
            results = super().write_data(plan, planner).wait()
        except RuntimeError as error:
            if "inline_container" not in str(error):  # torch's archives, which do not say why
                raise
            raise RuntimeError(
                f"{self.root}: a file could not be written to its end; the disk may be full, or a "
                f"file may not grow so large. torch says: {error}"
            ) from error
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
        self.path = self.folder  # where metadata is prepared
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
        with committing(self.root):
            wanted = {result.storage_data.relative_path for of_rank in plain for result in of_rank}
            if lost := sorted(name for name in wanted if not (self.root / name).is_file()):
                raise RuntimeError(describe_lost(self.root, lost, len(wanted)))
            os.replace(prepared, self.root / METADATA)  # the commit: metadata takes its place
            sync_folder(self.root)
            self._remove_others()

    def _remove_others(self) -> None:
        with tidying(self.root):
            for entry in list(self.root.iterdir()):
                if is_saved_folder(entry.name) and entry != self.folder:
                    shutil.rmtree(entry, ignore_errors=True)
                elif _TORCH_FILE.fullmatch(entry.name):
                    with tidying(self.root):
                        entry.unlink(missing_ok=True)

    def discard(self) -> None:
        """Remove what a save that failed has written, unless it was committed after all."""
        with contextlib.suppress(OSError, RuntimeError), committing(self.root):
            if not _refers_to(self.root, self.folder.name):
                shutil.rmtree(self.folder, ignore_errors=True)


def describe_lost(root: Path, lost: Sequence[str], count: int) -> str:
    """Say why files are not there that ranks have written; a save removes all of another's."""
    if len(lost) < count:
        return (
            f"the rank that commits does not see {lost[0]}, which another rank wrote there. Save "
            "to a file system that all ranks see"
        )
    return (
        f"another save to {root}, which ended meanwhile, removed {lost[0]}. Save from one job at a "
        "time"
    )


@contextlib.contextmanager
def tidying(root: Path) -> Iterator[None]:
    """Scope after a commit: the save has succeeded, and what fails now is a warning in the log."""
    try:
        yield
    except (OSError, RuntimeError) as error:
        _logger.warning(
            "%s: the save is complete and its files are the ones that are read; what they replace "
            "could not be removed: %s: %s", root, type(error).__name__, error,
        )  # fmt: skip


def _refers_to(root: Path, folder: str) -> bool:
    try:
        return folder.encode() in (root / METADATA).read_bytes()
    except OSError:
        return False


def _inside(prefix: Any, folder: str) -> Any:
    return dataclasses.replace(prefix, prefix=f"{folder}/{prefix.prefix}")


@contextlib.contextmanager
def committing(root: Path) -> Iterator[None]:
    """Scope in which no other process commits to the folder; a killed one leaves no lock behind.

    Where the file system knows no locks, two jobs that save to one folder are not kept apart.

    Raises:
        RuntimeError: another process has been committing for ``PATIENCE`` seconds.
    """
    descriptor = os.open(root, os.O_RDONLY) if fcntl is not None else -1
    try:
        if descriptor >= 0:
            _lock(descriptor, root, time.monotonic() + PATIENCE)
        yield
    finally:
        if descriptor >= 0:
            os.close(descriptor)  # closing it unlocks


def _lock(descriptor: int, root: Path, deadline: float) -> None:
    while True:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        except BlockingIOError:
            if time.monotonic() > deadline:
                raise RuntimeError(
                    f"{root}: was not saved: another process has been saving to it for "
                    f"{PATIENCE:g} s. Wait until it has ended, or save to another folder."
                ) from None
            time.sleep(0.05)
        except OSError:
            return  # this file system has no locks


def write_durably(path: Path, data: bytes) -> None:
    """Write a file that is on the disk when this returns."""
    with path.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def sync_file(path: Path) -> None:
    """Return when a file is on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def sync_folder(path: Path) -> None:
    """Make renames in a folder durable, where the system can."""
    with contextlib.suppress(OSError):
        sync_file(path)


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


def write_checkpoint(
    state: dict[str, Any],
    writer: CommittingWriter,
    group: Group,
    check: Callable[[], None] | None = None,
) -> None:
    """Write what this rank has of ``state``; the first rank plans who writes what, and commits.

    Torch plans it, and the messages are ours: torch's need NumPy, wait half an hour whatever the
    group's timeout is, and turn Ctrl-C into an error.

    Args:
        check: called when all is written, before the commit; what it raises fails the save.

    Raises:
        RuntimeError: on every rank, when it failed on any; nothing was committed.
    """
    planner, first = DefaultSavePlanner(), group.rank == 0
    planned: list[Metadata] = []

    def plan(plans: list[SavePlan]) -> list[SavePlan]:
        plans, metadata = planner.create_global_plan(plans)
        planned.append(metadata)
        return writer.prepare_global_plan(plans)

    def finish(results: list[list[WriteResult]]) -> list[None]:
        writer.finish(planned[0], results)
        return [None] * len(results)

    try:
        with SharedErrors(group):
            planner.set_up_planner(state, writer.storage_meta(), first)
            writer.set_up_storage_writer(first)
            local = writer.prepare_local_plan(planner.create_local_plan())
        mine = through_first(local, plan, group)
        with SharedErrors(group):
            results = writer.write_data(planner.finish_plan(mine), planner).wait()
            if check is not None:
                check()
        through_first(results, finish, group)
    except Exception as error:
        writer.discard()
        raise RuntimeError(
            f"save_checkpoint: {writer.root} was not saved; what it held before is untouched: "
            f"{type(error).__name__}: {error}"
        ) from error
    except BaseException:
        writer.discard()
        raise
