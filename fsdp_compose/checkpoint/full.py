"""``save_full`` and ``load_full``: the plain model in safetensors files, or in a format you give.

Saving streams: one bucket is gathered at a time, and each file is written by one rank. Loading
reads only the bytes of this rank's slices. Neither holds the model, and nothing is unpickled.
"""

from __future__ import annotations

import contextlib
import os
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from fsdp_compose.base.arguments import check_flags, check_kind, check_positive
from fsdp_compose.base.group import Group
from fsdp_compose.base.torch_private import IncompatibleKeys
from fsdp_compose.checkpoint.contents import (
    Contents,
    contents_of,
    contents_to_load,
    require_released,
    visit_values,
)
from fsdp_compose.checkpoint.files import Sum, make_folder, sync_file
from fsdp_compose.checkpoint.formats.export import Export, find_stored
from fsdp_compose.checkpoint.formats.format import Format, PlannedFile, Put, Stored, plan_files
from fsdp_compose.checkpoint.formats.safetensors import SAFETENSORS
from fsdp_compose.checkpoint.load_hooks import write_from_files
from fsdp_compose.checkpoint.model import buffer_dtypes
from fsdp_compose.checkpoint.ranks import (
    begin_checkpoint_call,
    check_names,
    claim_folder,
    describe_call,
    groups_of,
)
from fsdp_compose.checkpoint.stages import Chosen, Stages, choose_stored, find_stages
from fsdp_compose.checkpoint.steady import watch_writes
from fsdp_compose.checkpoint.values import Outline, require_readable, whole_shape
from fsdp_compose.comm.messages import SharedErrors, broadcast_object, gather_objects, raise_on_all
from fsdp_compose.construct.names import clean_name
from fsdp_compose.core.guards.compared_records import compare_records
from fsdp_compose.core.guards.moved_parameters import require_all_written
from fsdp_compose.core.guards.units import units_holding
from fsdp_compose.sharded import is_sharded, own_slice, tag, whole_slice

MAX_FILE_BYTES = 5 << 30


def save_full(
    path: str | os.PathLike[str],
    module: nn.Module,
    *,
    format: Format = SAFETENSORS,
    max_file_bytes: int = MAX_FILE_BYTES,
    dtype: torch.dtype | None = None,
    process_group: dist.ProcessGroup | None = None,
    timeout: float | None = None,
) -> None:
    """Save the model's full parameters and buffers as plain files; every rank must call it.

    Files of up to ``max_file_bytes`` and an index with their checksums. What was in ``path`` stays
    complete until the new files are, whenever the process is killed, and what a killed save left is
    removed by the next. Tied parameters are written under each name.

    Args:
        path: a folder on a file system that all ranks see.
        format: how a file holds tensors; see ``fsdp_compose.Format``.
        dtype: of floating-point tensors in the files; None for that of the parameters.
        process_group, timeout: as for ``save_checkpoint``.

    Raises:
        RuntimeError: on every rank: the disk is full, the folder cannot be written; a rank did not
            come, which is named; ranks pass other options; or another job saved to the folder at
            the same time.
        ValueError: state that the format cannot hold; a dtype that is not of floating point;
            ``max_file_bytes`` is not positive.

    Example:
        >>> model = fully_shard(nn.Linear(2, 2))
        >>> save_full("whole", model, dtype=torch.bfloat16)
        >>> sorted(os.listdir("whole"))
        ['model.safetensors', 'model.safetensors.index.json']
    """
    _check_format("save_full", format)
    wanted = "a number of bytes, 1 or more"
    check_positive("save_full", "max_file_bytes", max_file_bytes, wanted)
    with begin_checkpoint_call("save_full", path, module, process_group, timeout) as group:
        with _saving(Path(path)):  # there may be no working directory any more
            root = Path(path).absolute()
        _save(root, module, format, max_file_bytes, dtype, group)


def _save(
    root: Path,
    module: nn.Module,
    file_format: Format,
    max_bytes: int,
    dtype: torch.dtype | None,
    group: Group,
) -> None:
    check_names("save_full", module, group, everywhere=True)
    stages = find_stages("save_full", module, group, saves=True)
    if stages.are_uneven:
        raise RuntimeError(
            f"save_full: {min(stages.of_fewer)!r} is in no unit, and not on every rank: a file of "
            "the whole model would lack what other ranks alone have. save_checkpoint saves all."
        )
    claim_folder("save_full", root, group)
    call = describe_call(
        "save_full", path=root, format=file_format.suffix, max_file_bytes=max_bytes, dtype=dtype
    )
    with SharedErrors(group, facts=call):
        compare_records(units_holding(module), "save_full")
        require_all_written(units_holding(module))
        _check_dtype(dtype)
        found = contents_of(module).values
        values = {name: value for name, value in found.items() if name not in stages.earlier}
        outlines = _outlines(values, buffer_dtypes(module), dtype)
    with SharedErrors(group):
        files = plan_files(stages.gather(outlines), max_bytes, file_format)
        with _saving(root):
            make_folder(root)
    token = broadcast_object(uuid.uuid4().hex[:8], [group])
    export = Export(root, file_format, [file for part in files for file in part], token)
    writer = _Writer(export, files[stages.mine], stages)
    require_unwritten = watch_writes("save_full", module)
    try:
        visit_values(values, writer.put)
        writer.commit(require_unwritten)
    finally:
        writer.close()
        export.discard()


@contextlib.contextmanager
def _saving(root: Path, wanted: type[Exception] = OSError) -> Iterator[None]:
    """Scope whose errors say that nothing was saved, and are of the class that is documented."""
    try:
        yield
    except wanted as error:
        raise RuntimeError(
            f"save_full: {root} was not saved: {type(error).__name__}: {error}"
        ) from error


def _check_format(where: str, file_format: object) -> None:
    wanted = "a fsdp_compose.Format(suffix, write, read); leave it out for safetensors"
    check_kind(where, "format", file_format, Format, wanted)


def _check_dtype(dtype: object) -> None:
    if dtype is not None and not (isinstance(dtype, torch.dtype) and dtype.is_floating_point):
        raise ValueError(
            f"save_full: dtype is {dtype!r}; wanted a floating-point dtype, such as "
            "torch.bfloat16, or None for those of the parameters."
        )


def _outlines(
    values: Mapping[str, Any], before: Mapping[str, torch.dtype], dtype: torch.dtype | None
) -> dict[str, Outline]:
    outlines: dict[str, Outline] = {}
    for name, value in values.items():
        if not isinstance(value, Tensor):
            raise ValueError(
                f"save_full: {name!r} is a {type(value).__name__}; such files hold tensors only. "
                "Use save_checkpoint, or move it out of the module's state."
            )
        kept = before.get(name, value.dtype)
        kind = dtype if dtype and kept.is_floating_point else kept
        outlines[name] = Outline(kind, tuple(whole_shape(value)))
    require_readable("save_full", values)
    return outlines


class _Writer:
    """Writes this rank's files of one ``save_full``.

    Ranks must go on gathering together, so that an error waits until ``commit``.
    """

    def __init__(self, export: Export, files: Sequence[PlannedFile], stages: Stages) -> None:
        self.export, self.group = export, stages.group
        ranks = stages.members[stages.mine]  # each rank writes some of the stage's files
        turn = ranks.index(self.group.rank)
        self.mine = [file for i, file in enumerate(files) if i % len(ranks) == turn]
        self.place = {name: file for file in self.mine for name in file.tensors}
        self.missing = {file.name: set(file.tensors) for file in self.mine}
        self.opened: dict[str, tuple[contextlib.ExitStack, Put]] = {}
        self.problem: Exception | None = None
        self._try(lambda: self.export.aside.mkdir(exist_ok=True))
        for file in self.mine:
            if not file.tensors:
                self._try(partial(self._write_empty, file))

    def put(self, name: str, tensor: Tensor) -> None:
        """Write a tensor, if it belongs into one of this rank's files."""
        if name in self.place:
            self._try(lambda: self._put(self.place[name], name, tensor))

    def _put(self, file: PlannedFile, name: str, tensor: Tensor) -> None:
        _, put = self.opened.get(file.name) or self._open(file)
        plain = tensor.detach().resolve_conj().resolve_neg()  # else memory holds other numbers
        put(name, plain.to("cpu", file.tensors[name].dtype).contiguous())
        self.missing[file.name].remove(name)
        if not self.missing[file.name]:
            self._finish(file)

    def _open(self, file: PlannedFile) -> tuple[contextlib.ExitStack, Put]:
        scope = contextlib.ExitStack()
        written = self.export.format.write(self.export.temporary(file), file.tensors)
        self.opened[file.name] = scope, scope.enter_context(written)
        return self.opened[file.name]

    def _write_empty(self, file: PlannedFile) -> None:
        self._open(file)
        self._finish(file)

    def _finish(self, file: PlannedFile) -> None:
        scope, _ = self.opened.pop(file.name)
        scope.close()

    def _try(self, act: Callable[[], object]) -> None:
        if self.problem is None:
            try:
                with _saving(self.export.root, Exception):
                    act()
            except RuntimeError as error:
                self.problem = error

    def commit(self, check: Callable[[], None]) -> None:
        """Give all ranks' files their names in the folder, or raise what any rank met.

        Args:
            check: called first; what it raises fails the save.
        """
        sums: dict[str, Sum] = {}
        self._try(check)

        def finish() -> None:
            for file in self.mine:
                sync_file(self.export.temporary(file))
                sums[file.name] = Sum.of(self.export.temporary(file))

        self._try(finish)
        raise_on_all(self.problem, [self.group])
        all_sums: dict[str, Sum] = {}
        for found in gather_objects(sums, self.group):
            all_sums.update(found)
        with SharedErrors(self.group):
            if self.group.rank == 0:
                with _saving(self.export.root):
                    self.export.commit(all_sums)

    def close(self) -> None:
        """Leave the scopes of files that an error left half written."""
        error = self.problem or RuntimeError("the save ended early")
        for scope, _ in self.opened.values():
            with contextlib.suppress(Exception):
                scope.__exit__(type(error), error, None)


def load_full(
    path: str | os.PathLike[str],
    module: nn.Module,
    *,
    format: Format = SAFETENSORS,
    strict: bool = True,
    verify_files: bool = True,
    process_group: dist.ProcessGroup | None = None,
    timeout: float | None = None,
) -> IncompatibleKeys:
    """Load files of full tensors into a sharded, or plain, module; every rank must call it.

    Each rank reads the bytes of its own slices, and nothing is written unless all was read and
    fits, on every rank. Names that are left over where a submodule has load hooks of its own raise
    after that, as they do in torch.

    Args:
        path: a file, or a folder with one or with several and their index.
        format: what the files are; see ``fsdp_compose.Format``.
        strict: raise for names that the files lack or the module does not have. A tied parameter
            may be given under any of its names.
        verify_files: compare checksums where the index has them, each rank a share of the files.
        process_group, timeout: as for ``load_checkpoint``.

    Raises:
        RuntimeError: on every rank: a file is missing, truncated or damaged, which is named; names
            or shapes do not fit; ranks pass other files or options; a rank did not come, which is
            named.

    Example:
        >>> save_full("whole", nn.Linear(2, 2))
        >>> model = fully_shard(nn.Linear(2, 2))
        >>> load_full("whole", model)
        <All keys matched successfully>
    """
    _check_format("load_full", format)
    check_flags("load_full", strict=strict, verify_files=verify_files)
    with begin_checkpoint_call("load_full", path, module, process_group, timeout) as group:
        return _load(Path(path), module, format, strict, verify_files, group)


def _load(
    path: Path,
    module: nn.Module,
    file_format: Format,
    strict: bool,
    verify_files: bool,
    group: Group,
) -> IncompatibleKeys:
    stages = find_stages("load_full", module, group, saves=False)
    with SharedErrors(group):
        require_released("load_full", module)
        found = find_stored(path, file_format)
    with SharedErrors(group):
        if verify_files:
            found.check_sums(slice(group.rank, None, group.size))
        call = describe_call("load_full", content=f"{found.digest():08x}", strict=strict)
    stages.agree(call if groups_of(module) else "")
    contents = contents_to_load(module)
    with SharedErrors(group):
        stored = {clean_name(name): tensor for name, tensor in found.tensors.items()}
        outlines = {
            name: torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")
            for name, tensor in stored.items()
        }
        chosen = choose_stored(path, contents, outlines, strict, stages)
        first = _read_chosen(chosen, stored, contents, frozenset())

    def read(whole: frozenset[str]) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        return _read_chosen(chosen, stored, contents, whole) if whole else first

    with SharedErrors(group):
        return write_from_files(contents, read, chosen.left_out, strict)


def _read_chosen(
    chosen: Chosen, stored: Mapping[str, Stored], contents: Contents, whole: frozenset[str]
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """What a module wants, all of what has the names ``whole``; and what it has no place for."""
    all_of = {source for name, source in chosen.sources.items() if name in whole}
    read: dict[str, Tensor] = {}
    for name, source in chosen.sources.items():
        if source not in read:
            current = None if source in all_of else contents.values[name]
            read[source] = read_for(stored[source], current)
    values = {name: read[source] for name, source in chosen.sources.items()}
    return values, {name: stored[name].read_all() for name in chosen.unknown}


def read_for(stored: Stored, current: Any) -> Tensor:
    """What ``current`` needs of a tensor on disk: its slice when it is sharded, else all."""
    if not is_sharded(current) or tuple(whole_shape(current)) != stored.shape:
        return stored.read_all()
    spec = current._shard_spec
    if spec.parallel is not None and spec.parallel.splits:
        return tag(whole_slice(stored.read_all(), spec).clone(), spec)
    if spec.storage_dims == list(range(len(spec.shape))):
        return tag(stored.read_part(spec.start, spec.stop), spec)
    return tag(own_slice(stored.read_all(), spec).clone(), spec)
