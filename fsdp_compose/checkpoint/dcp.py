"""``save_checkpoint`` and ``load_checkpoint``: model, optimizer and anything else, in shards.

On torch.distributed.checkpoint, so that its tools and other libraries read the files: the state is
``{"model": ..., "optim": ..., "extra": {rank: ...}}``. A save is one commit; a load checks every
file and every name before it writes anything.
"""

from __future__ import annotations

import io
import os
import threading
import uuid
import warnings
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata

from fsdp_compose.checkpoint import optim as optimizers
from fsdp_compose.checkpoint.consensus import TIMEOUT, control_group, meet, settle
from fsdp_compose.checkpoint.files import (
    CommittingWriter,
    describe_failures,
    read_metadata,
    verify,
)
from fsdp_compose.checkpoint.members import OptimLike
from fsdp_compose.checkpoint.model import custom_load, match, state_dict, write
from fsdp_compose.checkpoint.names import Names, names_of
from fsdp_compose.checkpoint.transfer import broadcast_object
from fsdp_compose.mesh import Group
from fsdp_compose.sharded import ShardSpec, is_sharded, tag

PathLike = str | os.PathLike[str]


class Saving:
    """A save that may still be under way."""

    def __init__(self) -> None:
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None

    def done(self) -> bool:
        """Whether it has ended, well or not."""
        return self._thread is None or not self._thread.is_alive()

    def wait(self) -> None:
        """Return when the checkpoint is on disk and committed.

        Raises:
            RuntimeError: the save failed, on whatever rank; the previous checkpoint is untouched.
        """
        if self._thread is not None:
            self._thread.join()
        if self._error is not None:
            raise self._error


_pending: list[Saving] = []


def save_checkpoint(
    path: PathLike,
    module: nn.Module,
    optim: OptimLike | None = None,
    extra: object = None,
    *,
    asynchronous: bool = False,
    checksum: bool = True,
    process_group: dist.ProcessGroup | None = None,
    timeout: float = TIMEOUT,
) -> Saving:
    """Save model and optimizer into the folder ``path``; every rank must call it.

    Each rank writes its own slices, replicas share the work, and nothing is gathered. What was in
    ``path`` stays complete until the new checkpoint is, whenever the process is killed.

    Args:
        path: on a file system that all ranks see.
        optim: one optimizer or several over ``module``'s parameters.
        extra: anything that pickles (step, scheduler, random state); each rank's own is kept.
        asynchronous: copy the state to the host and return; a thread writes it. The next save or
            load waits for it, and so does ``wait()`` of the result, which raises what went wrong.
        checksum: read the files back and note their checksums, which ``load_checkpoint`` checks.
        process_group: the ranks that save; needed where the module lies on several groups that
            together are not all ranks.
        timeout: seconds to wait for ranks that have not called.

    Raises:
        RuntimeError: on every rank: the disk is full, the folder cannot be written; or a rank did
            not come, which is named.
        ValueError: the optimizer holds tensors that are not ``module``'s.
    """
    finish_pending()
    group = control_group(module, process_group)
    meet("save_checkpoint", group, timeout)
    problem: Exception | None = None
    state: dict[str, Any] = {}
    try:
        state = _state(module, optim, extra, group)
        if asynchronous:
            state = _staged(state)
    except Exception as error:
        problem = error
    settle(problem, _several(group), os.fspath(path))
    token = broadcast_object(uuid.uuid4().hex[:12], _several(group))
    writer = CommittingWriter(Path(path), token, group.size, checksum)
    saving = Saving()
    if not asynchronous:
        _write(state, writer, group)
        return saving

    def run() -> None:
        try:
            _write(state, writer, group)
        except BaseException as error:
            saving._error = error

    saving._thread = threading.Thread(target=run, name=f"save {path}")
    _pending.append(saving)
    saving._thread.start()
    return saving


def finish_pending() -> None:
    """Wait for saves under way; their errors are for whoever holds the handles."""
    while _pending:
        saving = _pending.pop()
        if saving._thread is not None:
            saving._thread.join()


def _several(group: Group) -> list[Group]:
    return [group] if group.size > 1 else []


def _state(
    module: nn.Module, optim: OptimLike | None, extra: object, group: Group
) -> dict[str, Any]:
    """What this rank saves: its slices, and on the first rank what is alike everywhere."""
    state: dict[str, Any] = {"model": dict(state_dict(module, "sharded"))}
    if optim is not None:
        state["optim"] = optimizers.optim_state_dict(module, optim, "sharded")
    if group.rank:
        state = _only_sharded(state)
    if extra is not None:
        file = io.BytesIO()
        torch.save(extra, file)
        data = torch.frombuffer(bytearray(file.getvalue()), dtype=torch.uint8)
        state["extra"] = {str(group.rank): data}
    return state


def _only_sharded(tree: Mapping[str, Any]) -> dict[str, Any]:
    kept: dict[str, Any] = {}
    for key, value in tree.items():
        if is_sharded(value):
            kept[key] = value
        elif isinstance(value, Mapping) and (inner := _only_sharded(value)):
            kept[key] = inner
    return kept


def _staged(tree: Any) -> Any:
    """Copies in host memory that later steps do not touch."""
    if isinstance(tree, Tensor):
        return tree.detach().to("cpu", copy=True)
    if isinstance(tree, Mapping):
        return {key: _staged(value) for key, value in tree.items()}
    if isinstance(tree, list):
        return [_staged(value) for value in tree]
    return tree


def _write(state: dict[str, Any], writer: CommittingWriter, group: Group) -> None:
    alone = group.pg is None
    try:
        with _quiet():
            dcp.save(
                state,
                storage_writer=writer,
                process_group=group.pg,
                no_dist=alone,
                planner=dcp.DefaultSavePlanner(),
            )
    except CheckpointException as error:
        failures = [(rank, wrapped[0]) for rank, wrapped in sorted(error.failures.items())]
        writer.discard()
        raise RuntimeError(
            f"save_checkpoint: {writer.root} was not saved; what it held before is untouched: "
            f"{describe_failures(failures)}"
        ) from error


def _quiet() -> Any:
    """torch warns of every save and load without a process group; here that is meant."""
    scope = warnings.catch_warnings()
    if threading.current_thread() is threading.main_thread():
        scope = warnings.catch_warnings(action="ignore", category=UserWarning)
    return scope


def load_checkpoint(
    path: PathLike,
    module: nn.Module,
    optim: OptimLike | None = None,
    *,
    strict: bool = True,
    verify_files: bool = True,
    process_group: dist.ProcessGroup | None = None,
    timeout: float = TIMEOUT,
) -> Any:
    """Load what ``save_checkpoint``, or torch.distributed.checkpoint, saved; every rank must call.

    The checkpoint may be from any number of ranks, any units, strategy or mesh. Each rank reads the
    parts that overlap its slices. Nothing is written unless all of it is there, fits and was read,
    on every rank; until then the slices are held in host memory.

    Args:
        path: the folder.
        optim: one optimizer or several; None leaves optimizer state alone.
        strict: raise for names that the checkpoint lacks or the module does not have.
        verify_files: read every file once more and compare checksums, each rank a share.
        process_group, timeout: as for ``save_checkpoint``.

    Returns:
        This rank's ``extra``; rank 0's when the number of ranks has changed; None when none was
        saved. It is unpickled: load only files you trust.

    Raises:
        RuntimeError: on every rank: a file is missing, truncated or damaged, which is named; names
            or shapes do not fit; a rank did not come, which is named.
    """
    finish_pending()
    group = control_group(module, process_group)
    meet("load_checkpoint", group, timeout)
    several = _several(group)
    root = Path(path)
    with _Shared(several):
        metadata = read_metadata(root)
    with _Shared(several):
        verify(root, metadata, slice(group.rank, None, group.size), verify_files)
    names = names_of(module)
    with _Shared(several):
        source = Source(root, metadata)
        staged, extra_names = _stage_model(source, module, names, strict)
        given, targets = None, None
        if optim is not None:
            targets = optimizers.targets_of(module, optim)
            given = _stage_optim(source, module, targets)
        extra = source.extra(group)
        source.read()
    write(module, names, {name: staged[name]() for name in staged}, extra_names)
    if targets is not None and given is not None:
        optimizers.commit(targets, given)
    return extra() if extra is not None else None


class _Shared:
    """Scope whose error, on any rank, is raised on all."""

    def __init__(self, groups: list[Group]) -> None:
        self.groups = groups

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        if error is None or isinstance(error, Exception):
            settle(error, self.groups)
