"""What is communicated, as a report: counted in a scope, or planned for a step."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from operator import add
from typing import ClassVar

from fsdp_compose.base.process import Traffic, here
from fsdp_compose.report.text import size, table


@dataclass
class TrafficReport(Traffic):
    """Collectives of one rank, and the bytes it receives in them: counted, or planned.

    A gather or a reduce-scatter over W ranks brings ``(W - 1) / W`` of its buffer, an all-reduce
    twice that. A move takes matrices to the ranks that own them, or back, see ``owner_step``.
    ``control`` counts small messages outside the passes: checks, broadcasts, errors.
    """

    DERIVED: ClassVar = ("collectives", "total_bytes")

    def __add__(self, other: TrafficReport) -> TrafficReport:
        return TrafficReport(*map(add, vars(self).values(), vars(other).values()))

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


@contextmanager
def count_traffic() -> Iterator[TrafficReport]:
    """Count collectives inside the scope, and the bytes that this rank receives in them.

    The report is filled in when the scope ends; ``print`` it, or read its fields.

    Example:
        >>> model = fully_shard(nn.Linear(2, 2))
        >>> with count_traffic() as traffic:
        ...     model(torch.ones(1, 2)).sum().backward()
        >>> traffic.gathers, traffic.total_bytes  # in a world of one
        (0, 0)
    """
    report, before = TrafficReport(), asdict(here.traffic)
    try:
        yield report
    finally:
        for name, value in asdict(here.traffic).items():
            setattr(report, name, value - before[name])
