"""Ranks compare what a scope is about to write, as each keeps only its slice of its own tensors.

Where ranks drew other random numbers, or one edited what others did not, a parameter would be made
of parts of each. So checksums of all full tensors are compared before anything is written. A rank
that leaves the scope by an exception tells the others without waiting for them, and they write
nothing either. On an accelerator it cannot, and the group's timeout ends their wait.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import torch
import torch.distributed as dist

from fsdp_compose.comm import collectives as comm
from fsdp_compose.core.guards.collective_log import Log, code_of
from fsdp_compose.core.guards.rank_differences import EDIT, Event
from fsdp_compose.core.guards.replicas import sum_bytes
from fsdp_compose.core.state import Unit, log_of
from fsdp_compose.scopes.open_scope import Scope


class EditComparison:
    """One scope's comparison; made when the scope begins.

    Every rank ends a scope in one way as its logs see it: it compares, or tells that it failed, or
    was told inside the scope. So what ranks send after it meets again.
    """

    def __init__(self, units: Iterable[Unit], rank0_only: bool) -> None:
        logs = (log_of(unit.engine, bucket.mesh) for unit in units for bucket in unit.buckets)
        found = [log for log in logs if log is not None]
        if rank0_only:  # elsewhere rank 0 broadcasts whether it will write
            found = [log for log in found if all(map(comm.is_point_to_point, log.groups))]
        self._begun = {log: log.steps.failures for log in found}

    def tell_failure(self) -> None:
        """Tell the ranks that wait for this one, or will, that it writes nothing."""
        for log, begun in self._begun.items():
            if not self._was_told(log):
                log.announce_failure(dist.get_rank())
            log.steps.failures = begun

    def compare(self, scopes: Mapping[Unit, Scope], problem: str | None) -> None:
        """Raise on every rank that shares parameters with one that would write other values.

        Args:
            problem: why this rank writes nothing, which is told to the others, and raised by the
                caller.

        Raises:
            RuntimeError: ranks differ; names the first parameter, the ranks and their checksums.
        """
        found: dict[Log, list[Event]] = {log: [] for log in self._begun}
        for unit, scope in scopes.items():
            for log, events in _events_of(unit, scope, problem):
                if log in found:
                    found[log].extend(events)
        failure = RuntimeError(_CAUGHT) if any(map(self._was_told, found)) else None
        # Ranks that share one mesh of several learn in a second round what those of another found.
        for log, events in [*found.items()] * min(len(found), 2):
            if self._was_told(log):
                continue
            try:
                log.compare_now(
                    events if failure is None else _list_failure(events[0][2], str(failure))
                )
            except RuntimeError as error:
                failure = failure or error
        for log, begun in self._begun.items():
            log.steps.failures = begun
        if failure is not None and problem is None:
            try:
                raise failure
            finally:
                del failure  # whose traceback holds this frame, and with it the full tensors

    def _was_told(self, log: Log) -> bool:
        """Whether a rank that failed in this scope has said so to those of ``log``."""
        return log.steps.failures > self._begun[log]


_CAUGHT = (
    "gathered: inside this scope another rank failed, and the error that said so was caught there; "
    "nothing was written. Let it leave the scope."
)


def _events_of(
    unit: Unit, scope: Scope, problem: str | None
) -> Iterable[tuple[Log, Sequence[Event]]]:
    position = {entry: index for index, entry in enumerate(unit.entries)}
    for bucket in unit.buckets:
        log = log_of(unit.engine, bucket.mesh)
        if log is None:
            continue
        if problem is not None:
            yield log, _list_failure(unit.name, problem)
            continue
        if scope.options.rank0_only:
            yield log, [(code_of(EDIT, unit.name), EDIT, unit.name, "as rank 0 has it")]
            continue
        tensors = [scope.tensors[position[entry]] for entry in bucket.entries]
        grads = [tensor.grad if scope.options.with_grads else None for tensor in tensors]
        sums = [sum_bytes(t) for t in (*tensors, *(g for g in grads if g is not None))]
        totals = iter(torch.stack([total.cpu() for total in sums]).tolist() if sums else ())
        digests = [next(totals) for _ in tensors]
        for entry, digest, grad in zip(bucket.entries, digests, grads, strict=True):
            text = f"parameter {entry.spec.fqn!r}, values with checksum {_show(digest)}"
            if scope.options.with_grads:
                found = "no gradient" if grad is None else f"gradient with {_show(next(totals))}"
                text = f"{text}, {found}"
            yield log, [(code_of(EDIT, unit.name, text), EDIT, unit.name, text)]


def _show(total: int) -> str:
    return f"{total % (1 << 64):016x}"


def _list_failure(unit: str, problem: str) -> list[Event]:
    text = f"not at all, because of an error: {problem}"
    return [(code_of(EDIT, unit, text), EDIT, unit, text)]
