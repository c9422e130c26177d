"""What the ranks must agree on before state is written: an error on one is raised on all."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from torch import nn

from fsdp_compose import comm
from fsdp_compose.mesh import Group
from fsdp_compose.state import iter_units

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
