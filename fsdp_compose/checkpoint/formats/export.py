"""Files of a whole model on their way into a folder: written aside, committed by one atomic step.

::

    path/.saving-<token>/                  a save under way, or one that was killed
    path/model.safetensors                 one file: replacing it commits; it wins over an index
    path/model-00001-of-00003.safetensors  several, under names that no earlier save has used
    path/model.safetensors.index.json      names and checksums: replacing it commits several files

Whatever the moment at which a process is killed, a reader finds the old files or the new ones.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import re
import shutil
import zlib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from fsdp_compose.checkpoint.files import (
    METADATA,
    Sum,
    committing,
    describe_lost,
    json_of,
    sync_folder,
    tidying,
    write_durably,
)
from fsdp_compose.checkpoint.formats.format import Format, PlannedFile, Stored
from fsdp_compose.checkpoint.metadata import check_relative
from fsdp_compose.comm.messages import to_bytes

ASIDE = ".saving-"
_SAMPLED = 16
"""Elements of each tensor that tell two files without checksums apart."""


@dataclasses.dataclass(frozen=True)
class Export:
    """The files of one save, before they have their names in the folder ``root``."""

    root: Path
    format: Format
    files: Sequence[PlannedFile]
    token: str

    @property
    def aside(self) -> Path:
        return self.root / f"{ASIDE}{self.token}"

    def temporary(self, file: PlannedFile) -> Path:
        return self.aside / file.name

    def discard(self) -> None:
        """Remove what was written, if it was not committed."""
        with contextlib.suppress(OSError, RuntimeError):
            if self.aside.exists():
                with committing(self.root):
                    shutil.rmtree(self.aside, ignore_errors=True)

    def commit(self, sums: Mapping[str, Sum]) -> None:
        """Give the files, which are on the disk, their names; then remove what they replace.

        Args:
            sums: of every file, by its planned name.

        Raises:
            RuntimeError: another save to this folder has removed them, or they are elsewhere.
        """
        with committing(self.root):
            if lost := [f.name for f in self.files if not self.temporary(f).is_file()]:
                why = describe_lost(self.root, lost, len(self.files))
                raise RuntimeError(f"{self.root}: was not saved: {why}.")
            if len(self.files) == 1:
                self._commit_single(sums[self.files[0].name])
            else:
                self._commit_several(sums)
            sync_folder(self.root)
            with tidying(self.root):
                self._remove_replaced()

    def _commit_single(self, total: Sum) -> None:
        (file,) = self.files
        single = self.format.single
        target = self.root / single
        if target.is_file():  # the index first, which knows both files
            replaced = _sum_of_single(self.root, self.format)
            self._write_index({file.name: single}, {single: total}, replaced)
        os.replace(self.temporary(file), target)
        sync_folder(self.root)
        with tidying(self.root):  # an index that names both files is right as well
            self._write_index({file.name: single}, {single: total}, None)

    def _commit_several(self, sums: Mapping[str, Sum]) -> None:
        names = {file.name: file.name for file in self.files}
        if any((self.root / name).exists() for name in names):
            names = {n: n.replace("model-", f"model-{self.token}-", 1) for n in names}
        for file in self.files:
            os.replace(self.temporary(file), self.root / names[file.name])
        sync_folder(self.root)
        self._write_index(names, {names[name]: total for name, total in sums.items()}, None)
        sync_folder(self.root)
        remove(self.root / self.format.single)  # readers prefer it, so this commits where it was

    def _write_index(
        self, names: Mapping[str, str], sums: Mapping[str, Sum], replaced: Sum | None
    ) -> None:
        metadata: dict[str, Any] = {
            "total_size": sum(file.data_bytes for file in self.files),
            "checksums": {name: dataclasses.asdict(s) for name, s in sorted(sums.items())},
        }
        if replaced is not None:
            metadata["replaces"] = dataclasses.asdict(replaced)
        weight_map = {key: names[file.name] for file in self.files for key in file.tensors}
        prepared = self.aside / self.format.index
        index = {"metadata": metadata, "weight_map": weight_map}
        write_durably(prepared, json.dumps(index, indent=1).encode())
        os.replace(prepared, self.root / self.format.index)

    def _remove_replaced(self) -> None:
        """Remove what no reader finds: files of older saves, and of saves that were killed."""
        kept = {self.format.index, self.format.single}
        if not (self.root / self.format.single).is_file():
            index = json_of(self.root / self.format.index)
            kept.update(str(name) for name in index["weight_map"].values())
        for entry in leftovers(self.root, self.format, kept):
            with tidying(self.root):
                remove(entry)


@dataclasses.dataclass(frozen=True)
class StoredTensors:
    """The tensors that a folder, or a file, holds by name; nothing of them is read yet.

    Attributes:
        files: where each tensor lies.
        sums: what a file may have, where the index knows it.
    """

    tensors: dict[str, Stored]
    files: dict[str, Path]
    sums: dict[Path, list[Sum]]

    def check_sums(self, share: slice = slice(None)) -> None:
        """Compare the checksums of a share of the sorted files.

        Raises:
            RuntimeError: a file is none of what was saved.
        """
        for file in sorted(self.sums)[share]:
            found, wanted = Sum.of(file), self.sums[file]
            if all(found.bytes != known.bytes for known in wanted):
                how = "truncated" if found.bytes < wanted[0].bytes else "damaged"
                raise RuntimeError(f"{file}: {how}: {found.bytes} bytes, wanted {wanted[0].bytes}.")
            if found not in wanted:
                raise RuntimeError(f"{file}: damaged: its checksum is not what was saved.")

    def digest(self) -> int:
        """Sum the names, what the tensors are and some of their elements, which tell models apart.

        Raises:
            RuntimeError: a file cannot be read.
        """
        total = 0
        for name, stored in sorted(self.tensors.items(), key=lambda item: item[0]):
            first = stored.numel // 2
            picked = stored.read_part(first, min(first + _SAMPLED, stored.numel)).contiguous()
            total = zlib.crc32(f"{name} {stored.dtype} {stored.shape}".encode(), total)
            total = zlib.crc32(to_bytes(picked.view(torch.uint8)), total)
        known = sorted((file.name, *map(dataclasses.astuple, s)) for file, s in self.sums.items())
        return zlib.crc32(repr(known).encode(), total)


def find_stored(path: Path, file_format: Format) -> StoredTensors:
    """Every tensor below ``path``, a file or a folder with one file or an index.

    Raises:
        RuntimeError: there are no such files, or one is missing, truncated or damaged.
    """
    suffix = file_format.suffix
    if path.is_file():
        return _of_file(path, file_format)
    if not path.exists():
        raise RuntimeError(f"{path}: does not exist; wanted a file or a folder of {suffix} files.")
    indices = sorted(path.glob(f"*{suffix}.index.json"))
    if len(indices) > 1:
        raise RuntimeError(
            f"{path}: several indices, {[i.name for i in indices]}; name a folder with one, or a "
            "file."
        )
    if not indices:
        files = sorted(path.glob(f"*{suffix}"))
        if len(files) != 1:
            what = f"no {suffix} file" if not files else f"{len(files)} files and no index"
            is_sharded = (path / METADATA).is_file()
            raise RuntimeError(
                f"{path}: {what}; wanted a file, or a folder with {file_format.index}."
                + (" It is a sharded checkpoint, which load_checkpoint loads." * is_sharded)
            )
        return _of_file(files[0], file_format)
    (index,) = indices
    single = path / index.name.removesuffix(".index.json")
    # As Hugging Face's readers prefer it.
    found = _of_file(single, file_format) if single.is_file() else _of_index(index, file_format)
    inside = set(found.files.values()) | ({single} if single.is_file() else set())
    for name, known in known_sums(index, file_format).items():
        if path / name in inside:
            found.sums[path / name] = known
    return found


def _of_file(file: Path, file_format: Format) -> StoredTensors:
    tensors = dict(file_format.read(file))
    return StoredTensors(tensors, dict.fromkeys(tensors, file), {})


def _of_index(index: Path, file_format: Format) -> StoredTensors:
    weight_map = json_of(index).get("weight_map")
    if not isinstance(weight_map, dict):
        raise RuntimeError(f"{index}: damaged: it has no 'weight_map'.")
    for key, name in weight_map.items():
        try:
            check_relative(name)
        except ValueError as error:
            raise RuntimeError(f"{index}: damaged: where {key!r} lies, {error}.") from error
    found = StoredTensors({}, {}, {})
    for name in sorted(set(weight_map.values())):
        for key, stored in file_format.read(index.parent / name).items():
            if weight_map.get(key) == name:
                found.tensors[key] = stored
                found.files[key] = index.parent / name
    if lost := [key for key in weight_map if key not in found.tensors]:
        raise RuntimeError(f"{index.parent / weight_map[lost[0]]}: damaged: it lacks {lost[0]!r}.")
    return found


def _sum_of_single(root: Path, file_format: Format) -> Sum:
    """Get the sum of the single file that is there, from the index or else from the disk."""
    try:
        known = known_sums(root / file_format.index, file_format).get(file_format.single, [])
    except RuntimeError:
        known = []
    return known[0] if len(known) == 1 else Sum.of(root / file_format.single)


def known_sums(index: Path, file_format: Format) -> dict[str, list[Sum]]:
    """What each file may have, by name: one sum, or two while a save replaces it.

    Raises:
        RuntimeError: the index is damaged, or not there.
    """
    metadata = json_of(index).get("metadata", {})
    checksums = metadata.get("checksums", {}) if isinstance(metadata, dict) else None
    if not isinstance(checksums, dict):
        raise RuntimeError(f"{index}: damaged: its 'metadata' is not what save_full writes.")
    sums = {name: [Sum.from_json(entry, index)] for name, entry in checksums.items()}
    if "replaces" in metadata:
        replaced = Sum.from_json(metadata["replaces"], index)
        sums.setdefault(file_format.single, []).append(replaced)
    return sums


def leftovers(root: Path, file_format: Format, kept: set[str]) -> Iterator[Path]:
    """Files that saves made and that are not among ``kept``."""
    part = re.compile(rf"model-(?:[0-9a-f]+-)?\d{{5}}-of-\d{{5}}{re.escape(file_format.suffix)}")
    for entry in sorted(root.iterdir()):
        if entry.name.startswith(ASIDE) or (part.fullmatch(entry.name) and entry.name not in kept):
            yield entry


def remove(entry: Path) -> None:
    """Remove a file or a folder that may be gone already."""
    if entry.is_dir() and not entry.is_symlink():
        shutil.rmtree(entry, ignore_errors=True)
    else:
        entry.unlink(missing_ok=True)
