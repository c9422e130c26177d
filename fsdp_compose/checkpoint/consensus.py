"""What the ranks must agree on before state is written: an error on one is raised on all.

Also who is there: ``meet`` names the ranks that never call, instead of hanging in a collective.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import nn

from fsdp_compose import comm
from fsdp_compose.mesh import SELF, Group, group_of
from fsdp_compose.state import iter_units
from fsdp_compose.torch_private import default_store

_KINDS: dict[str, type[Exception]] = {
    "RuntimeError": RuntimeError,
    "TypeError": TypeError,
    "ValueError": ValueError,
}


def groups_of(module: nn.Module) -> list[Group]:
    """The groups of more than one rank over which ``module``'s parameters are cut or copied."""
    found: dict[tuple[int, ...], Group] = {}
    for unit in iter_units(module):
        for bucket in unit.gathered:
            for group in bucket.mesh.groups:
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


def control_group(module: nn.Module, process_group: dist.ProcessGroup | None) -> Group:
    """A gloo group of its own over the ranks that save ``module``, made once; SELF without ranks.

    Args:
        process_group: those ranks; None: the group the module is cut over, or all ranks when it is
            cut over several or none.
    """
    if not dist.is_initialized():
        return SELF
    groups = groups_of(module)
    if process_group is not None:
        ranks = tuple(dist.get_process_group_ranks(process_group))
    elif len(groups) == 1:
        ranks = groups[0].ranks
    else:
        ranks = tuple(range(dist.get_world_size()))
    if len(ranks) == 1 or dist.get_backend() == "fake":
        return SELF
    if ranks not in _control:
        _control[ranks] = dist.new_group(
            list(ranks), backend="gloo", use_local_synchronization=True
        )
    return group_of(_control[ranks], _CPU)


def meet(what: str, group: Group, timeout: float) -> None:
    """Wait until every rank of ``group`` has come to ``what``.

    Raises:
        RuntimeError: some did not in ``timeout`` seconds; names them. This rank may try again.
    """
    if group.size == 1:
        return
    store, me = default_store(), group.ranks[group.rank]
    place = f"fsdp_compose/{what}/{'.'.join(map(str, group.ranks))}"
    turn = _meetings.get(place, 0)
    here = f"{place}/{turn}"
    store.set(f"{here}/{me}", "here")
    if store.add(f"{here}/count", 1) == group.size:
        store.set(f"{here}/go", "go")
    try:
        store.wait([f"{here}/go"], timedelta(seconds=timeout))
    except RuntimeError:
        missing = [r for r in group.ranks if not store.check([f"{here}/{r}"])]
        store.add(f"{here}/count", -1)
        store.delete_key(f"{here}/{me}")
        raise RuntimeError(
            f"{what}: rank {me} waited {timeout:g} s for rank {', '.join(map(str, missing))}, "
            f"which did not call it. Every rank must call {what}, not rank 0 alone."
        ) from None
    _meetings[place] = turn + 1
    if turn:
        store.delete_key(f"{place}/{turn - 1}/{me}")
