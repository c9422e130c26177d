"""What the ranks must agree on before state is written: an error on one is raised on all.

Also who is there: ``assemble`` names the ranks that never call, instead of hanging in a collective.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import nn

from fsdp_compose import comm
from fsdp_compose.bucket import find_entry
from fsdp_compose.checkpoint.names import parameters_by_name
from fsdp_compose.mesh import SELF, Group, group_of, require_group
from fsdp_compose.sharded import is_sharded
from fsdp_compose.state import held_by_fewer, iter_units, owner_of
from fsdp_compose.torch_private import default_store

_KINDS: dict[str, type[Exception]] = {
    "RuntimeError": RuntimeError,
    "TypeError": TypeError,
    "ValueError": ValueError,
}


def groups_of(module: nn.Module) -> list[Group]:
    """The groups of more than one rank over which ``module``'s parameters are cut or copied.

    Those that tensor parallelism split them over come last.
    """
    found: dict[tuple[int, ...], Group] = {}
    buckets = [bucket for unit in iter_units(module) for bucket in unit.gathered]
    for bucket in buckets:
        for group in bucket.mesh.groups:
            found.setdefault(group.ranks, group)
    for bucket in buckets:
        for entry in bucket.entries:
            for group in () if entry.spec.parallel is None else entry.spec.parallel.groups:
                found.setdefault(group.ranks, group)
    return list(found.values())


def device_of(module: nn.Module) -> torch.device:
    """Where ``module``'s sharded parameters are communicated."""
    return next((unit.lane.streams.device for unit in iter_units(module)), torch.device("cpu"))


def settle(problem: Exception | None, groups: Iterable[Group], facts: object = None) -> None:
    """Raise on every rank what any rank found wrong, or that their ``facts`` differ.

    Args:
        problem: what this rank found; a kind other than RuntimeError, TypeError and ValueError
            arrives on the others as a RuntimeError.
        facts: picklable and small; ``repr`` of it is shown where two ranks differ.
    """
    for group in groups:
        mine = None if problem is None else (type(problem).__name__, str(problem))
        reports = comm.gather_objects((mine, facts), group)
        for rank, (text, _) in zip(group.ranks, reports, strict=True):
            if text is not None and problem is None:
                kind, message = text
                found_on = "" if "(found on rank" in message else f" (found on rank {rank})"
                problem = _KINDS.get(kind, RuntimeError)(f"{message}{found_on}")
        if problem is None:
            problem = _difference([f for _, f in reports], group.ranks)
    if problem is not None:
        raise problem


def _difference(facts: Sequence[object], ranks: Sequence[int]) -> Exception | None:
    for rank, fact in zip(ranks, facts, strict=True):
        if fact != facts[0]:
            return RuntimeError(
                f"the ranks were given different things: rank {ranks[0]} {facts[0]!s}, rank "
                f"{rank} {fact!s}. Every rank must pass the same; what only rank 0 has goes in "
                "with broadcast_from_rank0=True."
            )
    return None


TIMEOUT = 600.0
"""Seconds that ranks wait for each other before a save or load starts."""

_CPU = torch.device("cpu")
_control: dict[tuple[int, ...], dist.ProcessGroup] = {}
_meetings: dict[str, int] = {}


def assemble(
    what: str, module: nn.Module, process_group: dist.ProcessGroup | None, timeout: float
) -> Group:
    """Wait for all ranks that hold ``module``, and give a gloo group of its own over them.

    Args:
        what: the function they were to call.
        process_group: those ranks; None: the group the module is cut over, or all ranks when it is
            cut over several or none.

    Raises:
        RuntimeError: some did not come in ``timeout`` seconds; names them. This rank may try again.
    """
    if not dist.is_initialized():
        if what.startswith("save") and next(iter_units(module), None) is None:
            require_group(what)  # the ranks would write over each other's files
        return SELF
    if dist.get_backend() == "fake":
        return SELF
    groups = groups_of(module)
    if process_group is not None:
        ranks = tuple(dist.get_process_group_ranks(process_group))
    elif len(groups) == 1:
        ranks = groups[0].ranks
    else:
        ranks = tuple(range(dist.get_world_size()))
    if len(ranks) == 1:
        return SELF
    _meet(what, ranks, timeout)
    if ranks not in _control:
        _control[ranks] = dist.new_group(
            list(ranks), backend="gloo", use_local_synchronization=True
        )
    return group_of(_control[ranks], _CPU)


def _meet(what: str, ranks: tuple[int, ...], timeout: float) -> None:
    store, me = default_store(), dist.get_rank()
    place = f"fsdp_compose/{what}/{'.'.join(map(str, ranks))}"
    turn = _meetings.get(place, 0)
    here = f"{place}/{turn}"
    store.set(f"{here}/{me}", "here")
    if store.add(f"{here}/count", 1) == len(ranks):
        store.set(f"{here}/go", "go")
    try:
        store.wait([f"{here}/go"], timedelta(seconds=timeout))
    except RuntimeError:
        missing = [r for r in ranks if not store.check([f"{here}/{r}"])]
        store.add(f"{here}/count", -1)
        store.delete_key(f"{here}/{me}")
        raise RuntimeError(
            f"{what}: rank {me} waited {timeout:g} s for rank {', '.join(map(str, missing))}, "
            f"which did not call it. Every rank must call {what}, not rank 0 alone."
        ) from None
    _meetings[place] = turn + 1
    if turn:
        store.delete_key(f"{place}/{turn - 1}/{me}")


def check_names(what: str, module: nn.Module, group: Group, everywhere: bool) -> None:
    """Raise, on every rank, where ranks that hold other parameters call them by the same name.

    Experts on a mesh of their own do, unless something says that they are parts of one parameter.

    Args:
        what: the function that saves.
        everywhere: each rank must have every parameter.

    Raises:
        RuntimeError: naming the parameter.
    """
    entries = {n: find_entry(p) for n, p in parameters_by_name(module).items() if is_sharded(p)}
    if len({owner_of(entry).mesh.size for entry in entries.values()}) <= 1:
        return
    homes: dict[str, tuple[int, ...]] = {}
    fewer = set(held_by_fewer(entries.values()))
    for name, entry in entries.items():
        if entry in fewer:
            mesh = owner_of(entry).mesh
            homes[name] = tuple(sorted({*mesh.shard.ranks, *mesh.replicate.ranks}))
    known: dict[str, tuple[int, ...]] = {}
    for found in comm.gather_objects(homes, group):
        for name, home in found.items():
            if everywhere or known.setdefault(name, home) != home:
                others = "" if everywhere else f", and another by ranks {list(known[name])}"
                raise RuntimeError(
                    f"{what}: {name!r} is held by ranks {list(home)} alone{others}. Before "
                    "fully_shard, make experts DTensors over the ranks they differ on, or call "
                    "declare_tensor_parallel; save_checkpoint also takes names that are unlike, "
                    "such as their numbers in a ModuleDict. If the other ranks hold the same, say "
                    f"so with set_gradient_divide_factor(module, {len(home)})."
                )


def several(group: Group) -> list[Group]:
    """The group, as those functions take it that have nothing to do for one rank."""
    return [group] if group.size > 1 else []


class Shared:
    """Scope whose error, on any rank, is raised on all; every rank must leave it."""

    def __init__(self, groups: Sequence[Group]) -> None:
        self.groups = groups

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if error is None or isinstance(error, Exception):
            settle(error, self.groups)
