"""Safetensors files on their way into a folder: written aside, committed by one atomic step.

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
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from fsdp_compose.checkpoint.files import Sum, committing, json_of, sync_folder, write_durably
from fsdp_compose.checkpoint.tensorfile import FilePlan

SINGLE = "model.safetensors"
INDEX = f"{SINGLE}.index.json"
ASIDE = ".saving-"
_PART = re.compile(r"model-(?:[0-9a-f]+-)?\d{5}-of-\d{5}\.safetensors")


@dataclasses.dataclass(frozen=True)
class Export:
    """The files of one save, before they have their names in the folder ``root``."""

    root: Path
    plans: Sequence[FilePlan]
    token: str

    @property
    def aside(self) -> Path:
        return self.root / f"{ASIDE}{self.token}"

    def temporary(self, plan: FilePlan) -> Path:
        return self.aside / plan.name

    def discard(self) -> None:
        """Removes what was written, if it was not committed."""
        if self.aside.exists():
            with contextlib.suppress(OSError, RuntimeError), committing(self.root):
                shutil.rmtree(self.aside, ignore_errors=True)

    def commit(self, sums: Mapping[str, Sum]) -> None:
        """Gives the files, which are on the disk, their names; then removes what they replace.

        Args:
            sums: of every file, by the name in its plan.

        Raises:
            RuntimeError: another save to this folder has removed them.
        """
        with committing(self.root):
            if lost := [p.name for p in self.plans if not self.temporary(p).is_file()]:
                raise RuntimeError(
                    f"{self.root}: was not saved: another save to it, which ended meanwhile, "
                    f"removed {lost[0]}. Save from one job at a time."
                )
            if len(self.plans) == 1:
                self._commit_single(sums[self.plans[0].name])
            else:
                self._commit_several(sums)
            sync_folder(self.root)
            clean_folder(self.root)

    def _commit_single(self, total: Sum) -> None:
        (plan,) = self.plans
        target = self.root / SINGLE
        if target.is_file():  # the index first, which knows both files
            replaced = _sum_of_single(self.root)
            self._write_index({plan.name: SINGLE}, {SINGLE: total}, replaced)
        os.replace(self.temporary(plan), target)
        sync_folder(self.root)
        self._write_index({plan.name: SINGLE}, {SINGLE: total}, None)

    def _commit_several(self, sums: Mapping[str, Sum]) -> None:
        names = {plan.name: plan.name for plan in self.plans}
        if any((self.root / name).exists() for name in names):
            names = {n: n.replace("model-", f"model-{self.token}-", 1) for n in names}
        for plan in self.plans:
            os.replace(self.temporary(plan), self.root / names[plan.name])
        sync_folder(self.root)
        self._write_index(names, {names[name]: total for name, total in sums.items()}, None)
        sync_folder(self.root)
        remove(self.root / SINGLE)  # readers prefer it, so that this commits where it was

    def _write_index(
        self, names: Mapping[str, str], sums: Mapping[str, Sum], replaced: Sum | None
    ) -> None:
        metadata: dict[str, Any] = {
            "total_size": sum(plan.data_bytes for plan in self.plans),
            "checksums": {name: dataclasses.asdict(s) for name, s in sorted(sums.items())},
        }
        if replaced is not None:
            metadata["replaces"] = dataclasses.asdict(replaced)
        weight_map = {key: names[plan.name] for plan in self.plans for key in plan.starts}
        prepared = self.aside / INDEX
        index = {"metadata": metadata, "weight_map": weight_map}
        write_durably(prepared, json.dumps(index, indent=1).encode())
        os.replace(prepared, self.root / INDEX)


def _sum_of_single(root: Path) -> Sum:
    """What the single file that is there has; read from the disk unless the index knows it."""
    try:
        known = known_sums(root / INDEX).get(SINGLE, [])
    except RuntimeError:
        known = []
    return known[0] if len(known) == 1 else Sum.of(root / SINGLE)


def known_sums(index: Path) -> dict[str, list[Sum]]:
    """What each file may have, by name: one sum, or two while a save replaces it.

    Raises:
        RuntimeError: the index is damaged.
    """
    if not index.is_file():
        return {}
    metadata = json_of(index).get("metadata", {})
    checksums = metadata.get("checksums", {}) if isinstance(metadata, dict) else None
    if not isinstance(checksums, dict):
        raise RuntimeError(f"{index}: damaged: its 'metadata' is not what save_full writes.")
    sums = {name: [Sum.from_json(entry, index)] for name, entry in checksums.items()}
    if "replaces" in metadata:
        sums.setdefault(SINGLE, []).append(Sum.from_json(metadata["replaces"], index))
    return sums


def clean_folder(root: Path) -> None:
    """Removes what no reader finds: files of older saves, and of saves that were killed."""
    kept = {INDEX, SINGLE}
    if not (root / SINGLE).is_file():
        kept.update(str(name) for name in json_of(root / INDEX)["weight_map"].values())
    for entry in leftovers(root, kept):
        remove(entry)


def leftovers(root: Path, kept: set[str]) -> Iterator[Path]:
    """Files that saves made and that are not among ``kept``."""
    for entry in sorted(root.iterdir()):
        if entry.name.startswith(ASIDE) or (_PART.fullmatch(entry.name) and entry.name not in kept):
            yield entry


def remove(entry: Path) -> None:
    """Removes a file or a folder that may be gone already."""
    if entry.is_dir() and not entry.is_symlink():
        shutil.rmtree(entry, ignore_errors=True)
    else:
        entry.unlink(missing_ok=True)
