"""What this process has communicated, as a report, and what happens inside a scope, counted."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, fields

from fsdp_compose.comm import collectives as comm
from fsdp_compose.report.text import size, table


@dataclass
class TrafficReport:
    """Collectives, and the bytes this rank received in them.

    A gather or a reduce-scatter over W ranks brings ``(W - 1) / W`` of its buffer, an all-reduce
    twice that. A move takes matrices to the ranks that own them, or back, see ``owner_step``.
    ``control`` counts small messages outside the passes: checks, broadcasts, errors.
    """

    gathers: int = 0
    gather_bytes: int = 0
    reduces: int = 0
    reduce_bytes: int = 0
    all_reduces: int = 0
    all_reduce_bytes: int = 0
    moves: int = 0
    move_bytes: int = 0
    control: int = 0

    @property
    def collectives(self) -> int:
        """Without ``control``."""
        return self.gathers + self.reduces + self.all_reduces + self.moves

    @property
    def total_bytes(self) -> int:
        return self.gather_bytes + self.reduce_bytes + self.all_reduce_bytes + self.move_bytes

    def __sub__(self, other: TrafficReport) -> TrafficReport:
        names = [f.name for f in fields(self)]
        return TrafficReport(**{name: getattr(self, name) - getattr(other, name) for name in names})

    def to_dict(self) -> dict[str, int]:
        return asdict(self)

    def __str__(self) -> str:
        rows = [
            ("collective", "count", "received"),
            ("gather", str(self.gathers), size(self.gather_bytes)),
            ("reduce-scatter", str(self.reduces), size(self.reduce_bytes)),
            ("all-reduce", str(self.all_reduces), size(self.all_reduce_bytes)),
            *([("move", str(self.moves), size(self.move_bytes))] if self.moves else []),
            ("all", str(self.collectives), size(self.total_bytes)),
        ]
        return f"{table(rows)}\n  and {self.control} control messages"


def traffic_report() -> TrafficReport:
    """What this process has communicated since it started."""
    return TrafficReport(**asdict(comm.traffic))


@contextmanager
def count_traffic() -> Iterator[TrafficReport]:
    """Count what is communicated inside the scope; the report is filled in when it ends.

    ::

        with count_traffic() as traffic:
            loss = model(x).sum()
            loss.backward()
        print(traffic)
    """
    report, before = TrafficReport(), traffic_report()
    try:
        yield report
    finally:
        change = traffic_report() - before
        for name, value in change.to_dict().items():
            setattr(report, name, value)
