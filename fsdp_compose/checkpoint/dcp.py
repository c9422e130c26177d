"""``save_checkpoint`` and ``load_checkpoint``: model, optimizer and anything else, in shards.

On torch.distributed.checkpoint, so that its tools and other libraries read the files: the state is
``{"model": ..., "optim": ..., "extra": {rank: ...}, "comm_hooks": {rank: ...}}``, of models with
load hooks of their own the ``"versions"`` that these read, and containers.py says what else. A save
is one commit; a load checks every file and every name before it writes.
"""

from __future__ import annotations

import io
import logging
import os
import uuid
import warnings
from collections.abc import Mapping, Set
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from fsdp_compose.base.arguments import check_flags
from fsdp_compose.base.group import Group
from fsdp_compose.base.torch_private import IncompatibleKeys
from fsdp_compose.checkpoint.containers import OBJECTS, find_containers
from fsdp_compose.checkpoint.contents import (
    Contents,
    contents_to_load,
    loads_by_own_code,
    require_released,
)
from fsdp_compose.checkpoint.files import CommittingWriter, write_checkpoint
from fsdp_compose.checkpoint.load_hooks import write_from_files
from fsdp_compose.checkpoint.metadata import manifests, read_metadata, unless_replaced, verify
from fsdp_compose.checkpoint.model import state_dict
from fsdp_compose.checkpoint.optimizer.agree import agree_on_state
from fsdp_compose.checkpoint.optimizer.fit import is_elementwise
from fsdp_compose.checkpoint.optimizer.members import (
    OptimLike,
    Targets,
    list_members,
    unchanged_by_errors,
)
from fsdp_compose.checkpoint.optimizer.read import NamedState, read_optim
from fsdp_compose.checkpoint.optimizer.shapes import OwnedState
from fsdp_compose.checkpoint.optimizer.write import check_read, check_saved, parts_of, write_optim
from fsdp_compose.checkpoint.plain_data import is_constant, load_plain, warn_of_objects
from fsdp_compose.checkpoint.ranks import (
    attend_meeting,
    begin_checkpoint_call,
    check_names,
    claim_folder,
    describe_call,
    groups_of,
)
from fsdp_compose.checkpoint.saving import Saving, start_saving
from fsdp_compose.checkpoint.source import CheckpointSource
from fsdp_compose.checkpoint.stages import Stages, choose_stored, find_stages, join_states
from fsdp_compose.checkpoint.steady import watch_writes
from fsdp_compose.checkpoint.values import is_cut, require_readable
from fsdp_compose.comm.messages import SharedErrors, broadcast_object, to_bytes
from fsdp_compose.construct.names import clean_name, list_names
from fsdp_compose.core.guards.compared_records import compare_records
from fsdp_compose.core.guards.moved_parameters import require_all_written
from fsdp_compose.core.guards.units import units_holding
from fsdp_compose.scopes import comm_hooks
from fsdp_compose.sharded import ShardedWeightError

_logger = logging.getLogger("fsdp_compose")


def save_checkpoint(
    path: str | os.PathLike[str],
    module: nn.Module,
    optim: OptimLike | None = None,
    extra: object = None,
    *,
    asynchronous: bool = False,
    checksum: bool = True,
    process_group: dist.ProcessGroup | None = None,
    timeout: float | None = None,
) -> Saving:
    """Save model and optimizer into the folder ``path``; every rank must call it.

    Each rank writes its own slices, replicas share the work, and nothing is gathered. What was in
    ``path`` stays complete until the new checkpoint is, whenever the process is killed.

    Args:
        path: on a file system that all ranks see; a relative one is that of the call.
        optim: one optimizer or several over ``module``'s parameters.
        module: its communication hooks' state is saved too, each rank's own.
        extra: anything that pickles (step, scheduler, random state); each rank's own is kept.
        asynchronous: copy the state to the host and return; a thread writes it. The next save or
            load waits for it, and so does ``wait()`` of the result, which raises what went wrong
            (and is logged where nobody asks).
        checksum: read the files back and note their checksums, which ``load_checkpoint`` checks.
        process_group: the ranks that save; needed where the module lies on several groups that
            together are not all ranks.
        timeout: seconds to wait for ranks that have not called; None: as the process group does.

    Raises:
        RuntimeError: on every rank: the disk is full, the folder cannot be written; a rank did
            not come, which is named; ranks pass other options; ranks call different parameters
            by the same name; or another thread stepped meanwhile.
        ValueError: an optimizer holds tensors that are not ``module``'s, or two hold the same.

    Example:
        >>> model = fully_shard(nn.Linear(2, 2))
        >>> optim = torch.optim.AdamW(model.parameters())
        >>> save_checkpoint("latest", model, optim, {"step": 7}).done()
        True
    """
    check_flags("save_checkpoint", asynchronous=asynchronous, checksum=checksum)
    with begin_checkpoint_call("save_checkpoint", path, module, process_group, timeout) as group:
        return _save(Path(path).absolute(), module, optim, extra, group, asynchronous, checksum)


def _save(
    path: Path,
    module: nn.Module,
    optim: OptimLike | None,
    extra: object,
    group: Group,
    asynchronous: bool,
    checksum: bool,
) -> Saving:
    check_names("save_checkpoint", module, group, everywhere=False)
    stages = find_stages("save_checkpoint", module, group, saves=True)
    claim_folder("save_checkpoint", path, group)
    call = describe_call("save_checkpoint", path=path, asynchronous=asynchronous, checksum=checksum)
    stages.agree(describe_call("save_checkpoint", has_optim=optim is not None))
    with SharedErrors(group, facts=call):
        compare_records(units_holding(module), "save_checkpoint")
        require_all_written(units_holding(module))
        found = None if optim is None else read_optim(module, optim)
    with SharedErrors(group):
        if found is not None:
            agree_on_state("save_checkpoint", found.result, found.parts, groups_of(module))
        state = _collect_state(module, found, extra, stages)
        require_unwritten = watch_writes("save_checkpoint", module)
    groups = [] if found is None else found.result["param_groups"]
    state = join_states(state, groups, stages)
    with SharedErrors(group):
        containers = find_containers(state)
        state[OBJECTS] = {place: _pickle(value) for place, value in containers.items()}
        warn_of_objects(state)
    if asynchronous:
        with SharedErrors(group):
            state = _copy_to_host(state)
            require_unwritten()
    token = broadcast_object(uuid.uuid4().hex[:12], [group])
    writer = CommittingWriter(path, token, group.size, checksum, is_on_host=asynchronous)
    if not asynchronous:
        write_checkpoint(state, writer, group, require_unwritten)
        return Saving()

    def write_in_thread() -> None:
        with attend_meeting(group):
            write_checkpoint(state, writer, group)

    return start_saving(path, write_in_thread)


def _collect_state(
    module: nn.Module, found: NamedState | None, extra: object, stages: Stages
) -> dict[str, Any]:
    """Collect what this rank saves: its own slices, and on the first rank what all ranks share."""
    model: Any = state_dict(module, "sharded")
    require_readable("save_checkpoint", model)
    state: dict[str, Any] = {"model": dict(model)}
    if found is not None:
        state["optim"] = found.result
    if not stages.is_first:
        state = {"model": {}, **_keep_own(state, stages.leads)}
    hooks = comm_hooks.snapshot(module)
    own = {"extra": _pickle_extra(extra), "comm_hooks": None if hooks is None else _pickle(hooks)}
    if stages.is_first and loads_by_own_code(module):
        known = getattr(model, "_metadata", {})
        own["versions"] = _pickle({name: found.get("version") for name, found in known.items()})
    rank = str(stages.group.rank)
    state.update((key, {rank: value}) for key, value in own.items() if value is not None)
    return state


def _pickle_extra(extra: object) -> Tensor | None:
    try:
        return None if extra is None else _pickle(extra)
    except ShardedWeightError as error:
        raise ShardedWeightError(
            f"save_checkpoint: extra is a {type(extra).__name__} that holds sharded parameters, or "
            "their state. Model and optimizer are saved beside it: leave them out, and give the "
            "state_dict() of a scheduler in place of the scheduler, which has its optimizer."
        ) from error
    except Exception as error:
        raise TypeError(
            f"save_checkpoint: extra is a {type(extra).__name__} that does not pickle "
            f"({type(error).__name__}: {error}); wanted data that torch.save takes, such as "
            "numbers, tensors and the state_dict() of a scheduler."
        ) from error


def _pickle(value: object) -> Tensor:
    file = io.BytesIO()
    torch.save(value, file)
    return torch.frombuffer(bytearray(file.getvalue()), dtype=torch.uint8)


def _keep_own(tree: Mapping[str, Any], leads: Set[str]) -> dict[str, Any]:
    """Keep what is cut, and all of the entries ``leads``, which the first rank does not have."""
    kept: dict[str, Any] = {}
    for key, value in tree.items():
        if isinstance(value, OwnedState):
            kept[key] = dict(value)
        elif is_cut(value) or clean_name(str(key)) in leads:
            kept[key] = value
        elif isinstance(value, Mapping) and (inner := _keep_own(value, leads)):
            kept[key] = inner
    return kept


def _copy_to_host(tree: Any) -> Any:
    """Copy state to host memory, where later steps do not change it."""
    if isinstance(tree, Tensor):
        return tree.detach().to("cpu", copy=True)
    if isinstance(tree, Mapping):
        return {key: _copy_to_host(value) for key, value in tree.items()}
    if isinstance(tree, list):
        return [_copy_to_host(value) for value in tree]
    return tree if is_constant(tree) else _unpickle(_pickle(tree))  # which may hold tensors


def load_checkpoint(
    path: str | os.PathLike[str],
    module: nn.Module,
    optim: OptimLike | None = None,
    *,
    strict: bool = True,
    verify_files: bool = True,
    process_group: dist.ProcessGroup | None = None,
    timeout: float | None = None,
) -> Any:
    """Load what ``save_checkpoint``, or torch.distributed.checkpoint, saved; every rank must call.

    The checkpoint may be from any number of ranks, any units, strategy or mesh. Each rank reads the
    parts that overlap its slices. Nothing is written unless all of it is there, fits and was read,
    on every rank; until then the slices are held in host memory. Names that are left over where a
    submodule has load hooks of its own raise after that, as they do in torch.

    Args:
        path: the folder; each rank may have a copy of its own.
        optim: one optimizer or several; None leaves optimizer state alone.
        strict: raise for names that the checkpoint lacks or the module does not have, which are
            logged otherwise; those of optimizer state must fit anyway.
        verify_files: read every file once more and compare checksums, each rank a share.
        process_group, timeout: as for ``save_checkpoint``.

    What communication hooks remember is restored where ranks and units are the same; else a warning
    says that it was not.

    Returns:
        This rank's ``extra``; that of rank 0, or of the first that saved one, where this rank saved
        none or the number of ranks has changed; None when no rank did. It is unpickled: load only
        files you trust.

    Raises:
        RuntimeError: on every rank: a file is missing, truncated or damaged, which is named; names
            or shapes do not fit; ranks pass other checkpoints or options; a rank did not come,
            which is named.

    Example:
        >>> model = fully_shard(nn.Linear(2, 2))
        >>> optim = torch.optim.AdamW(model.parameters())
        >>> _ = save_checkpoint("latest", model, optim, extra={"step": 7})
        >>> load_checkpoint("latest", model, optim)
        {'step': 7}
    """
    check_flags("load_checkpoint", strict=strict, verify_files=verify_files)
    with begin_checkpoint_call("load_checkpoint", path, module, process_group, timeout) as group:
        return _load(Path(path), module, optim, strict, verify_files, group)


def _load(
    root: Path,
    module: nn.Module,
    optim: OptimLike | None,
    strict: bool,
    verify_files: bool,
    group: Group,
) -> Any:
    stages = find_stages("load_checkpoint", module, group, saves=False)
    with SharedErrors(group):
        require_released("load_checkpoint", module)
        metadata, total = read_metadata(root)
        call = describe_call(
            "load_checkpoint",
            checkpoint=total,
            has_optim=optim is not None,
            strict=strict,
        )
    with unless_replaced(root, total):
        stages.agree(call if groups_of(module) else "")
    with SharedErrors(group), unless_replaced(root, total):
        verify(root, metadata, slice(group.rank, None, group.size), verify_files)
    contents = contents_to_load(module)
    with SharedErrors(group), unless_replaced(root, total):
        source = CheckpointSource(root, metadata)
        staged, unknown, left_out = _request_model(source, contents, strict, stages)
        targets = None if optim is None else list_members(module, optim)
        given = {} if targets is None else _request_optim(source, module, targets, stages)
        ranks = (manifest.world_size for manifest in manifests(root, metadata))
        key = _extra_key(source, group, next(ranks, None))
        hooks_key = _comm_hooks_key(source, module, group)
        version_keys = _request_versions(source, module)
        source.read()
        if targets is not None:
            given = {**given, "state": _fill_outlines(given["state"], source)}
            check_read(targets, given)
        extra = None if key is None else _unpickle(source.values[key])
        remembered = None if hooks_key is None else _unpickle(source.values[hooks_key])
        versions = _read_versions(source, version_keys)
    read = partial(_read_model, source, staged, unknown)
    with unchanged_by_errors(targets or []):
        with SharedErrors(group):
            if targets is not None:
                write_optim(targets, given)
        with SharedErrors(group):
            left_out = write_from_files(contents, read, left_out, strict, versions)
    if stages.is_first and any(left_out):
        _logger.warning("%s", _describe_left_out(root, left_out))
    problem = _restore_hooks(module, source, remembered)
    if problem is not None:
        warnings.warn(f"{root}: {problem}", stacklevel=3)
    return extra


def _restore_hooks(module: nn.Module, source: CheckpointSource, remembered: Any) -> str | None:
    """Give communication hooks what a checkpoint ``remembered``; says why they are not given it."""
    if comm_hooks.remembers(module):
        if remembered is None or not comm_hooks.restore(module, remembered):
            return (
                "it holds no state of communication hooks for the ranks and units of this model, "
                "so the hooks of this module keep the state that they have."
            )
    elif source.below(("comm_hooks",)):
        return (
            "it holds state of communication hooks, and no hook of this module takes it. To go on "
            "from it, call register_comm_hook before load_checkpoint."
        )
    return None


def _request_model(
    source: CheckpointSource, contents: Contents, strict: bool, stages: Stages
) -> tuple[dict[str, str], dict[str, str], IncompatibleKeys]:
    """Request what fits the module.

    Gives keys by name, those of names it does not have, and the names that are left out.

    Raises:
        RuntimeError: names or shapes do not fit.
    """
    prefix = source.model_prefix(contents.values)
    keys = {clean_name(path[-1]): key for path, key in source.below(prefix).items()}
    outlines = {name: source.outline(key) for name, key in keys.items()}
    chosen = choose_stored(source.path, contents, outlines, strict, stages)
    for name, stored in chosen.sources.items():
        current = contents.values[name]
        source.want(keys[stored], current if isinstance(current, Tensor) else None)
    for name in chosen.unknown:
        source.want(keys[name], None)
    known = {name: keys[stored] for name, stored in chosen.sources.items()}
    return known, {name: keys[name] for name in chosen.unknown}, chosen.left_out


def _read_model(
    source: CheckpointSource,
    staged: Mapping[str, str],
    unknown: Mapping[str, str],
    whole: Set[str],
) -> tuple[dict[str, Any], dict[str, Any]]:
    """What was read for the module; ``whole``: the names to read once more, all of each."""
    again = [staged[name] for name in staged if name in whole]
    for key in (*again, *unknown.values()) if whole else ():
        source.want(key, None)
    source.read()
    values, others = ({n: source.values[key] for n, key in of.items()} for of in (staged, unknown))
    return values, others


def _describe_left_out(root: Path, left_out: IncompatibleKeys) -> str:
    """Say what ``strict=False`` left as it is, as ``load_checkpoint`` returns something else."""
    missing, unexpected = left_out
    parts = [
        f"{what}: {list_names(names, others)}"
        for what, names, others in (
            ("names that it lacks, which are as they were", missing, unexpected),
            ("names that the module does not have, which were left out", unexpected, ()),
        )
        if names
    ]
    return f"{root}: loaded with strict=False; {'; '.join(parts)}."


def _request_optim(
    source: CheckpointSource, module: nn.Module, targets: Targets, stages: Stages
) -> dict[str, Any]:
    """Request optimizer state; give what was saved by name, with outlines for its tensors.

    Raises:
        RuntimeError: there is none, or it does not fit.
    """
    saved = stages.keep_own_groups(source.optimizer())
    try:
        given = check_saved(module, targets, saved)
    except (RuntimeError, TypeError, ValueError) as error:
        raise type(error)(f"{source.path}: {error}") from error
    for name, part in parts_of(targets).items():
        if part.is_elsewhere:
            continue
        for state_name, value in given["state"].get(name, {}).items():
            if isinstance(value, Tensor):
                is_cut = part.owner is None and is_elementwise(state_name, value, part, given)
                leaf = part.entry.param if is_cut and part.entry is not None else None
                source.want(source.key_of(value), leaf, value.dtype)
    return given


def _fill_outlines(
    state: Mapping[str, Mapping[str, Any]], source: CheckpointSource
) -> dict[str, dict[str, Any]]:
    """Replace outlines by what was read, and drop what nobody asked for."""
    filled: dict[str, dict[str, Any]] = {}
    for name, values in state.items():
        filled[name] = {
            key: source.values[source.key_of(value)] if isinstance(value, Tensor) else value
            for key, value in values.items()
            if not isinstance(value, Tensor) or source.key_of(value) in source.values
        }
    return filled


def _extra_key(source: CheckpointSource, group: Group, ranks: int | None) -> str | None:
    """Request this rank's ``extra``, or rank 0's when the number of ranks has changed.

    Args:
        ranks: how many saved; None where the checkpoint does not say.
    """
    saved = _find_by_rank(source, "extra")
    if not saved:
        return None
    mine = saved.get(str(group.rank)) if (ranks or len(saved)) == group.size else None
    key = mine or saved.get("0") or next(iter(saved.values()))
    source.want(key, None)
    return key


def _find_by_rank(source: CheckpointSource, part: str) -> dict[str, str]:
    """Keys of what each rank pickled; other programs may have saved other things in that place."""
    outlines = {path[-1]: source.outline(key) for path, key in source.below((part,)).items()}
    return {
        rank: source.key_of(outline)
        for rank, outline in outlines.items()
        if str(rank).isdigit() and isinstance(outline, Tensor) and outline.dtype is torch.uint8
    }


def _comm_hooks_key(source: CheckpointSource, module: nn.Module, group: Group) -> str | None:
    """Request what this rank's communication hooks remembered, if as many ranks saved it."""
    saved = _find_by_rank(source, "comm_hooks")
    if len(saved) != group.size or not comm_hooks.remembers(module):
        return None
    key = saved.get(str(group.rank))
    if key is not None:
        source.want(key, None)
    return key


def _request_versions(source: CheckpointSource, module: nn.Module) -> list[str]:
    """Request each stage's versions, without which load hooks convert what needs no converting."""
    found = _find_by_rank(source, "versions") if loads_by_own_code(module) else {}
    for key in found.values():
        source.want(key, None)
    return list(found.values())


def _read_versions(source: CheckpointSource, keys: list[str]) -> dict[str, Any] | None:
    """What ``_request_versions`` asked for, as ``state_dict()._metadata``; None if it was none."""
    parts = [load_plain(key, io.BytesIO(to_bytes(source.values[key]))) for key in keys]
    return {name: {"version": n} for part in parts for name, n in part.items()} or None


def _unpickle(data: Tensor) -> Any:
    return torch.load(io.BytesIO(to_bytes(data)), map_location="cpu", weights_only=False)
