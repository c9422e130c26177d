"""``save_full`` and ``load_full``: the plain model in safetensors files, as Hugging Face lays out.

Saving streams: one bucket is gathered at a time, and each file is written by one rank. Loading
reads only the bytes of this rank's slices. Neither holds the model, and nothing is unpickled.
"""

from __future__ import annotations

import os
import uuid
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor, nn

from fsdp_compose.base.mesh import Group
from fsdp_compose.checkpoint.consensus import (
    Shared,
    assemble,
    attending,
    check_names,
    claim,
    settle,
    several,
)
from fsdp_compose.checkpoint.export import INDEX, Export, known_sums
from fsdp_compose.checkpoint.files import Sum, json_of
from fsdp_compose.checkpoint.metadata import check_relative
from fsdp_compose.checkpoint.model import (
    IncompatibleKeys,
    buffer_dtypes,
    custom_load,
    match,
    write,
)
from fsdp_compose.checkpoint.names import names_of
from fsdp_compose.checkpoint.stages import Stages, find_stages
from fsdp_compose.checkpoint.stream import each_full
from fsdp_compose.checkpoint.tensorfile import (
    FilePlan,
    Item,
    plan_files_of_each,
    read_header,
    sync,
)
from fsdp_compose.checkpoint.transfer import broadcast_object
from fsdp_compose.checkpoint.values import storage_dims, whole, whole_shape
from fsdp_compose.comm import collectives as comm
from fsdp_compose.construct.names import clean_name
from fsdp_compose.sharded import is_sharded, own_slice, tag, whole_slice

PathLike = str | os.PathLike[str]
MAX_FILE_BYTES = 5 << 30
Outlines: TypeAlias = "dict[str, tuple[torch.dtype, tuple[int, ...]]]"


def save_full(
    path: PathLike,
    module: nn.Module,
    *,
    max_file_bytes: int = MAX_FILE_BYTES,
    dtype: torch.dtype | None = None,
    process_group: dist.ProcessGroup | None = None,
    timeout: float | None = None,
) -> None:
    """Save the model's full parameters and buffers as safetensors; every rank must call it.

    Files of up to ``max_file_bytes`` and an index with their checksums. What was in ``path`` stays
    complete until the new files are, whenever the process is killed, and what a killed save left is
    removed by the next. Tied parameters are written under each name.

    Args:
        path: a folder on a file system that all ranks see.
        dtype: of floating-point tensors in the files; None for that of the parameters.
        process_group, timeout: as for ``save_checkpoint``.

    Raises:
        RuntimeError: on every rank: the disk is full, the folder cannot be written; a rank did not
            come, which is named; or another job saved to the folder at the same time.
        ValueError: state that safetensors cannot hold.
    """
    group = assemble("save_full", module, process_group, timeout)
    with attending(group):
        _save(Path(path), module, max_file_bytes, dtype, group)


def _save(
    root: Path, module: nn.Module, max_file_bytes: int, dtype: torch.dtype | None, group: Group
) -> None:
    check_names("save_full", module, group, everywhere=True)
    stages = find_stages("save_full", module, group, saves=True)
    claim("save_full", root, group)
    values: dict[str, Any] = {}
    tensors: Outlines = {}
    plans: list[list[FilePlan]] = []
    with Shared(several(group)):
        values = {n: v for n, v in names_of(module).values.items() if n not in stages.earlier}
        tensors = _outlines(values, buffer_dtypes(module), dtype)
    with Shared(several(group)):
        plans = plan_files_of_each(stages.gather(tensors), max_file_bytes)
        root.mkdir(parents=True, exist_ok=True)
    token = broadcast_object(uuid.uuid4().hex[:8], several(group))
    export = Export(root, [plan for of_stage in plans for plan in of_stage], token)
    try:
        _write(values, _Saving(export, plans[stages.mine], stages))
    finally:
        export.discard()


def _write(values: Mapping[str, Any], saving: _Saving) -> None:
    """Gathers bucket by bucket, writes this rank's files and commits all."""
    saving.create()
    leaves: dict[int, list[str]] = {}
    for name, value in values.items():
        if is_sharded(value):
            leaves.setdefault(id(value), []).append(name)

    def put(leaf: nn.Parameter, full: Tensor) -> None:
        for name in leaves[id(leaf)]:
            saving.put(name, full)

    each_full([v for v in values.values() if is_sharded(v)], put)
    for name, value in values.items():
        if not is_sharded(value):
            saving.put(name, whole(value.detach()))
    saving.commit()


def _outlines(
    values: Mapping[str, Any], before: Mapping[str, torch.dtype], dtype: torch.dtype | None
) -> Outlines:
    tensors: Outlines = {}
    for name, value in values.items():
        if not isinstance(value, Tensor):
            raise ValueError(
                f"save_full: {name!r} is a {type(value).__name__}; safetensors holds tensors only. "
                "Use save_checkpoint, or move it out of the module's state."
            )
        kept = before.get(name, value.dtype)
        kind = dtype if dtype and kept.is_floating_point else kept
        tensors[name] = (kind, tuple(whole_shape(value)))
    return tensors


class _Saving:
    """The files of one ``save_full``: this rank's are written here. An error waits for commit."""

    def __init__(self, export: Export, own: Sequence[FilePlan], stages: Stages) -> None:
        self.export, self.group = export, stages.group
        ranks = stages.members[stages.mine]  # of which each writes some of the stage's files
        turn = ranks.index(self.group.rank)
        self.mine = {p.name: p for i, p in enumerate(own) if i % len(ranks) == turn}
        self.place = {key: plan for plan in own for key in plan.starts}
        self.problem: Exception | None = None

    def create(self) -> None:
        self._try(lambda: self.export.aside.mkdir(exist_ok=True))
        for plan in self.mine.values():
            self._try(lambda plan=plan: plan.create(self.export.temporary(plan)))

    def put(self, key: str, tensor: Tensor) -> None:
        plan = self.place[key]
        if plan.name in self.mine:
            self._try(lambda: plan.put(self.export.temporary(plan), key, tensor))

    def _try(self, act: Any) -> None:
        """Ranks must keep gathering together, so that an error here must not leave the loop."""
        if self.problem is None:
            try:
                act()
            except (OSError, ValueError) as error:
                self.problem = RuntimeError(
                    f"save_full: {self.export.root} was not saved: {type(error).__name__}: {error}"
                )

    def commit(self) -> None:
        sums: dict[str, Sum] = {}

        def finish() -> None:
            for plan in self.mine.values():
                sync(self.export.temporary(plan))
                sums[plan.name] = Sum.of(self.export.temporary(plan))

        self._try(finish)
        settle(self.problem, several(self.group))
        all_sums: dict[str, Sum] = {}
        for found in comm.gather_objects(sums, self.group):
            all_sums.update(found)
        with Shared(several(self.group)):
            if self.group.rank == 0:
                self.export.commit(all_sums)


def load_full(
    path: PathLike,
    module: nn.Module,
    *,
    strict: bool = True,
    verify_files: bool = True,
    process_group: dist.ProcessGroup | None = None,
    timeout: float | None = None,
) -> IncompatibleKeys:
    """Load safetensors files into a sharded, or plain, module; every rank must call it.

    Each rank reads the bytes of its own slices, and nothing is written unless all was read and
    fits, on every rank.

    Args:
        path: a ``.safetensors`` file, or a folder with one or with several and their index.
        strict: raise for names that the files lack or the module does not have. A tied parameter
            may be given under any of its names.
        verify_files: compare checksums where the index has them, each rank a share of the files.
        process_group, timeout: as for ``load_checkpoint``.

    Raises:
        RuntimeError: on every rank: a file is missing, truncated or damaged, which is named; names
            or shapes do not fit; a rank did not come, which is named.
    """
    group = assemble("load_full", module, process_group, timeout)
    with attending(group):
        return _load(Path(path), module, strict, verify_files, group)


def _load(
    path: Path, module: nn.Module, strict: bool, verify_files: bool, group: Group
) -> IncompatibleKeys:
    stages = find_stages("load_full", module, group, saves=False)
    with Shared(several(group)):
        items, sums = find_items(path)
    with Shared(several(group)):
        for file in sorted(sums)[group.rank :: group.size] if verify_files else ():
            check_sum(file, sums[file])
    names = names_of(module)
    staged: dict[str, Any] = {}
    with Shared(several(group)):
        items = stages.keep_own({clean_name(name): item for name, item in items.items()})
        outlines = {
            name: torch.empty(item.shape, dtype=item.dtype, device="meta")
            for name, item in items.items()
        }
        custom = custom_load(module)
        matched = match(module, names.values, outlines, strict and not custom, None)
        if matched.problem is not None:
            raise type(matched.problem)(
                f"{path}: {matched.problem}{stages.advise(matched.unexpected)}"
            )
        by_outline = {id(outline): items[name] for name, outline in outlines.items()}
        read: dict[tuple[int, int], Tensor] = {}
        for name, outline in matched.values.items():
            item, current = by_outline[id(outline)], names.values[name]
            key = (id(current), id(item))
            if key not in read:
                read[key] = read_for(item, current)
            staged[name] = read[key]
        extra = {n: read_for(items[n], None) for n in (matched.unexpected if custom else ())}
    write(module, names, staged, extra)
    return IncompatibleKeys(matched.missing, matched.unexpected)


def find_items(path: Path) -> tuple[dict[str, Item], dict[Path, list[Sum]]]:
    """Every tensor below ``path`` by name, and what files may have that the index knows.

    Raises:
        RuntimeError: there are no such files, or one is missing, truncated or damaged.
    """
    if path.is_file():
        return read_header(path)[0], {}
    indices = sorted(path.glob("*.safetensors.index.json"))
    if len(indices) > 1:
        raise RuntimeError(
            f"{path}: several indices, {[i.name for i in indices]}; name a folder "
            "with one, or a file."
        )
    if not indices:
        files = sorted(path.glob("*.safetensors"))
        if len(files) != 1:
            what = "no .safetensors file" if not files else f"{len(files)} files and no index"
            raise RuntimeError(f"{path}: {what}; wanted a file, or a folder with {INDEX}.")
        return read_header(files[0])[0], {}
    (index,) = indices
    single = path / index.name.removesuffix(".index.json")
    if single.is_file():  # as Hugging Face's readers prefer it
        items = read_header(single)[0]
        names = {single.name}
    else:
        items, names = _items_of_index(index)
    sums = {path / name: known for name, known in known_sums(index).items() if name in names}
    return items, sums


def _items_of_index(index: Path) -> tuple[dict[str, Item], set[str]]:
    """The tensors that an index names, and the files they lie in."""
    weight_map = json_of(index).get("weight_map")
    if not isinstance(weight_map, dict):
        raise RuntimeError(f"{index}: damaged: it has no 'weight_map'.")
    for key, name in weight_map.items():
        try:
            check_relative(name)
        except ValueError as error:
            raise RuntimeError(f"{index}: damaged: where {key!r} lies, {error}.") from error
    items: dict[str, Item] = {}
    for name in sorted(set(weight_map.values())):
        for key, item in read_header(index.parent / name)[0].items():
            if weight_map.get(key) == name:
                items[key] = item
    if lost := [key for key in weight_map if key not in items]:
        raise RuntimeError(f"{index.parent / weight_map[lost[0]]}: damaged: it lacks {lost[0]!r}.")
    return items, set(weight_map.values())


def check_sum(file: Path, wanted: Sequence[Sum]) -> None:
    """Raise RuntimeError when a file is none of what was saved."""
    found = Sum.of(file)
    if all(found.bytes != known.bytes for known in wanted):
        raise RuntimeError(f"{file}: truncated: {found.bytes} bytes, wanted {wanted[0].bytes}.")
    if found not in wanted:
        raise RuntimeError(f"{file}: damaged: its checksum is not what was saved.")


def read_for(item: Item, current: Any) -> Tensor:
    """What ``current`` needs of a tensor on disk: its slice when it is sharded, else all."""
    if not is_sharded(current) or tuple(whole_shape(current)) != item.shape:
        return item.read().view(item.shape)
    spec = current._shard_spec
    if spec.parallel is not None and spec.parallel.splits:
        return tag(whole_slice(item.read().view(item.shape), spec).clone(), spec)
    if storage_dims(spec) == list(range(len(spec.shape))):
        return tag(item.read(spec.start, spec.stop), spec)
    full = item.read().view(item.shape)
    return tag(own_slice(full, spec).clone(), spec)
