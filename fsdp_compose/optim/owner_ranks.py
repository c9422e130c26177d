"""What the ranks of an ``owner_step`` have in common, and how they hear that one of them failed.

When the optimizer is made the ranks compare what each was given. In a step, on gloo, they meet
before matrices travel and before they travel back, by a small message like those that go ahead of
gathers. A rank that raised sends another one in its place, so that whoever waits for it raises too,
here or in the forward of a closure.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from itertools import zip_longest
from typing import Any

import torch.distributed as dist

from fsdp_compose.base.group import Group
from fsdp_compose.comm.collectives import gather_objects, hear, is_point_to_point, tell
from fsdp_compose.comm.counts import epoch_of
from fsdp_compose.comm.heads import Heads, hearing, meet_to_call
from fsdp_compose.comm.messages import describe_error, first_error
from fsdp_compose.core.guards.collective_log import DISCARDED, Log, StepDiscarded, code_of
from fsdp_compose.optim.matrices import Matrix

GroupSettings = list[dict[str, str]]
"""The numbers of each parameter group by name, as text."""

_MISSING = 3  # where a head tells which gradients are missing


@dataclass(frozen=True)
class OwnerFacts:
    """What must be alike on all ranks of a group.

    Attributes:
        kind: class of the optimizer that does the steps.
        settings: of all its groups.
        params: of those that the ranks share: name, number of its group, what its update costs.
    """

    kind: str
    settings: GroupSettings
    params: list[tuple[str, int, float]]


@dataclass(frozen=True)
class Link:
    """A group whose ranks step matrices together.

    Attributes:
        log: compares what they communicate; None where that goes nowhere.
        members: numbers of the matrices.
    """

    log: Log | None
    group: Group
    members: list[int]

    def meet(self, purpose: str, missing: Sequence[str]) -> None:
        """Return when every rank is about to do the same and lacks the same gradients; on gloo.

        Raises:
            RuntimeError: on every rank, where they differ.
            StepDiscarded: a rank has failed.
        """
        log, group = self.log, self.group
        if log is None or not is_point_to_point(group):
            return
        code = code_of("owner_step", purpose)
        head = (code, 0, 0, code_of(*missing) if missing else 0, 0, 0, 0, 0)
        event = (code, "step", "owner_step", purpose)
        log.events.append(event)
        try:
            with hearing(log, head, group, purpose) as heads:
                rows = heads.rows()
                # Of missing gradients more is said below than that they differ.
                mine = heads.sent[_MISSING]
                same = [[*row[:_MISSING], mine, *row[_MISSING + 1 :]] for row in rows]
                heads.compare(same)
        finally:
            if log.events and log.events[-1] is event:  # ranks that differ forget all events
                log.events.pop()
        if any(row[_MISSING] != head[_MISSING] for row in rows):
            raise _missing_gradient(gather_objects(list(missing), group, "owner_step"), group.ranks)


@dataclass(frozen=True, eq=False)
class OwnerLinks:
    """All links, in one order on every rank; a copy of the optimizer has the same ones."""

    found: tuple[Link, ...]

    @classmethod
    def of(cls, matrices: Sequence[Matrix]) -> OwnerLinks:
        members: dict[tuple[int, Log | None, Group], list[int]] = {}
        for number, matrix in enumerate(matrices):
            for axis, group in enumerate(matrix.groups):
                members.setdefault((axis, matrix.log, group), []).append(number)
        # Axis by axis, so that after the last one every rank knows what any rank knew.
        order = sorted(members, key=lambda link: (link[0], link[2].size, link[2].ranks))
        return cls(tuple(Link(key[1], key[2], members[key]) for key in order))

    def __deepcopy__(self, memo: dict[int, Any]) -> OwnerLinks:
        return self

    def meet(self, purpose: str, matrices: Sequence[Matrix] = ()) -> None:
        """Return when every rank is about to do the same; of ``matrices`` compare gradients."""
        missing = {n: m.name for n, m in enumerate(matrices) if not m.has_gradient}
        for link in self.found:
            link.meet(purpose, [missing[n] for n in link.members if n in missing])

    @contextmanager
    def tell_failures(self, is_open: Callable[[], bool]) -> Iterator[None]:
        """Scope of a step: what one rank raises in it ends the step of the others too.

        Args:
            is_open: whether the step has not ended yet; after that, no other rank waits for it.

        Raises:
            RuntimeError: another rank raised; which, and what.
        """
        told = [(x.log, x.group) for x in self.found if x.log and is_point_to_point(x.group)]
        epochs = [epoch_of(group) for log, group in told]
        try:
            yield
        except Exception as error:
            if not is_open():  # a hook on its end raised
                raise
            if not any(log.skippable for log, _ in told):  # the end of that scope tells them
                left = [t for t, n in zip(told, epochs, strict=True) if epoch_of(t[1]) == n]
                _tell(error, left)
            if isinstance(error, StepDiscarded) and error.reasons:
                raise _failure(error) from None
            raise

    def compare_settings(self, kind: str, mine: GroupSettings) -> None:
        """Raise on every rank where a group of the optimizer has other numbers on another rank."""
        for link in self.found:
            link.meet("compare settings", ())
            ranks, found = link.group.ranks, gather_objects(mine, link.group, "owner_step")
            for rank, theirs in zip(ranks, found, strict=True):
                what = _describe_setting(found[0], theirs, ranks[0], rank)
                if what is not None:
                    raise RuntimeError(
                        f"owner_step: after a step {what}. If the program set it (a scheduler, "
                        f"param_groups), set the same on every rank. If {kind} did, it sums over "
                        "all parameters, and each rank has those it owns: give it the sharded "
                        "parameters themselves, whose sums are of all ranks. If its step cannot "
                        "take those, it needs a model that is not sharded."
                    )


def list_settings(groups: Sequence[dict[str, Any]]) -> GroupSettings:
    return [{k: repr(v) for k, v in g.items() if isinstance(v, int | float)} for g in groups]


def compare_matrices(
    matrices: Sequence[Matrix], facts: OwnerFacts, problem: Exception | None
) -> None:
    """Raise on every rank what any rank found wrong, or that they were given different things.

    Args:
        facts: of all the matrices, in order; of none where there is a problem.
        problem: what this rank found.
    """
    for link in OwnerLinks.of(matrices).found:
        meet_to_call("owner_step", (link.group,))
        params = [facts.params[n] for n in link.members] if problem is None else []
        mine = OwnerFacts(facts.kind, facts.settings, params)
        digest = hashlib.sha256(repr(mine).encode()).digest()
        found = gather_objects((describe_error(problem), digest), link.group, "owner_step")
        errors = [error for error, _ in found]
        problem = problem or first_error(zip(link.group.ranks, errors, strict=True))
        if not any(errors) and any(other != digest for _, other in found):
            problem = _difference(gather_objects(mine, link.group, "owner_step"), link.group.ranks)
    try:
        if problem is not None:
            raise problem
    finally:
        del problem


def _tell(error: Exception, links: Sequence[tuple[Log, Group]]) -> None:
    """Have the ranks of ``links``, wherever they wait, end the step, and wait until they do."""
    reason = f"rank {dist.get_rank()} raised {type(error).__name__}: {error}" if links else ""
    if isinstance(error, StepDiscarded):  # of another rank, which may not reach all of these
        reason = next(iter(error.reasons.values()), "")
    told: list[Heads | None] = []
    for log, group in links:
        told.append(None)
        with suppress(RuntimeError):  # what the caller has to see is the error of this rank
            told[-1] = tell(log, DISCARDED, group)
    met: dict[Log, list[Group]] = {log: [] for log, _ in links}
    for (log, group), heads in zip(links, told, strict=True):
        log.announce_discard(reason)
        if heads is not None:  # else a rank of the group has died
            with suppress(RuntimeError):
                hear(heads)
        if heads is None or epoch_of(group) == heads.epoch:
            met[log].append(group)
    for log, groups in met.items():
        log.start_over(groups)


def _failure(told: StepDiscarded) -> RuntimeError:
    _, reason = min(told.reasons.items())
    return RuntimeError(
        f"owner_step: {reason}. So this rank ends its step too. Matrices that are cut keep their "
        "values on every rank; those that lie whole on one, and the optimizer's state, may have "
        "been stepped where nothing failed. Look at what that rank printed. All ranks can go on "
        "with the next step; to go on from before this one, call load_checkpoint."
    )


def _missing_gradient(missing: Sequence[Sequence[str]], ranks: Sequence[int]) -> RuntimeError:
    """The error where some ranks lack gradients that others have; by rank, those it lacks."""
    everywhere = set.intersection(*map(set, missing))
    name = next(name for names in missing for name in names if name not in everywhere)
    found = ", ".join(
        f"{'None' if name in names else 'set'} on rank {rank}"
        for rank, names in zip(ranks, missing, strict=True)
    )
    return RuntimeError(
        f"owner_step: the gradient of {name} is {found}. Keep it or set it to None alike on every "
        "rank."
    )


def _difference(facts: Sequence[OwnerFacts], ranks: Sequence[int]) -> ValueError | None:
    """The first difference between the facts of the ranks, if any."""
    for rank, other in zip(ranks, facts, strict=True):
        if other != facts[0]:
            found = _describe_difference(facts[0], other, ranks[0], rank)
            return ValueError(
                f"owner_step: {found}. Give every rank the same parameters and groups in the same "
                "order, and the same optimizer: make lists of named_parameters(), not of a set."
            )
    return None


def _describe_difference(mine: OwnerFacts, theirs: OwnerFacts, first: int, rank: int) -> str:
    if mine.kind != theirs.kind:
        return f"the optimizer is {mine.kind} on rank {first} and {theirs.kind} on rank {rank}"
    for number, (a, b) in enumerate(zip_longest(mine.params, theirs.params)):
        if a is None or b is None or a[0] != b[0]:
            names = ["missing" if found is None else found[0] for found in (a, b)]
            return f"parameter {number} is {names[0]} on rank {first} and {names[1]} on rank {rank}"
        if a[1] != b[1]:
            return f"{a[0]} is in group {a[1]} on rank {first} and in group {b[1]} on rank {rank}"
        if a[2] != b[2]:
            return f"work= gives {a[2]} for {a[0]} on rank {first} and {b[2]} on rank {rank}"
    found = _describe_setting(mine.settings, theirs.settings, first, rank)
    return found or f"rank {first} has other groups than rank {rank}"


def _describe_setting(
    mine: GroupSettings, theirs: GroupSettings, first: int, rank: int
) -> str | None:
    for number, (a, b) in enumerate(zip(mine, theirs, strict=False)):
        key = next((k for k in a if k in b and a[k] != b[k]), None)
        if key is not None:
            values = f"{a[key]} on rank {first} and {b[key]} on rank {rank}"
            return f"{key!r} of group {number} is {values}"
    return None
