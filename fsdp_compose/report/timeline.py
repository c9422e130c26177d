"""``trace``: when each unit was gathered, computed with and reduced, and what was in memory then.

Inside the scope the functions that carry out the schedule's decisions are timed; outside it nothing
of this is there. Times are the host's. On an accelerator the host runs ahead of the device: there
``torch.profiler`` shows the kernels, in ranges of the same names.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from os import PathLike
from pathlib import Path
from typing import Any, ClassVar, Literal

from torch import nn

from fsdp_compose.base.arguments import check_module, check_path
from fsdp_compose.base.group import get_global_rank
from fsdp_compose.base.process import here
from fsdp_compose.base.torch_private import graph_task_id
from fsdp_compose.buckets.bucket import Phase
from fsdp_compose.core.autograd import EngineWork
from fsdp_compose.core.guards.moved_parameters import shard_of
from fsdp_compose.core.state import Unit, iter_units, unit_of
from fsdp_compose.report.explain import held_gradients
from fsdp_compose.report.text import plain

Lane = Literal["compute", "wait", "gather", "reduce"]
LANES: tuple[Lane, ...] = ("compute", "wait", "gather", "reduce")
_TIMED = ("gather", "wait", "release", "pack", "reduce", "finish_reductions")


@dataclass(frozen=True)
class Span:
    """Something that took time, in seconds from the start of the recording.

    Attributes:
        lane: ``compute`` with a unit's weights; ``wait``, of compute for a gather or a reduction;
            ``gather`` and ``reduce``, from their start until they were waited for.
        unit: its name.
        phase: ``forward`` or ``backward``.
        nbytes: of the buffer that is gathered or reduced.
    """

    lane: Lane
    unit: str
    phase: str
    start: float
    end: float
    nbytes: int = 0


@dataclass(frozen=True)
class Moment:
    """What units had in this rank's memory at a time, in bytes, besides shards.

    Attributes:
        phase: ``forward`` or ``backward``; ``end`` of the last, when the recording was over.
        gathered: full parameters.
        packed: full gradients that are packed or being reduced.
        gradients: reduced gradients in ``.grad``.
    """

    time: float
    phase: str
    unit: str
    gathered: int
    packed: int
    gradients: int

    DERIVED: ClassVar = ("total",)

    @property
    def total(self) -> int:
        return self.gathered + self.packed + self.gradients


@dataclass
class Timeline:
    """What ``trace`` recorded on this rank; it is filled in while the scope runs.

    Example:
        >>> model = fully_shard(nn.Sequential(nn.Linear(2, 2)), units=wrap.by_class(nn.Linear))
        >>> with trace(model) as timeline:
        ...     model(torch.ones(1, 2)).sum().backward()
        >>> timeline.save("trace.json")  # open it in Perfetto
        >>> {span.lane for span in timeline.spans} <= {"compute", "wait", "gather", "reduce"}
        True
    """

    rank: int = 0
    shards: int = 0  # bytes of parameter shards
    spans: list[Span] = field(default_factory=list)
    moments: list[Moment] = field(default_factory=list)

    @property
    def seconds(self) -> float:
        return max((span.end for span in self.spans), default=0.0)

    def last_step(self) -> Timeline:
        """The last forward and backward that were recorded whole."""
        phases = [moment.phase for moment in self.moments]
        stop = max((i + 1 for i, name in enumerate(phases) if name == "backward"), default=None)
        phases = phases[:stop]
        begins = [i for i, name in enumerate(phases) if name == "forward" != phases[max(0, i - 1)]]
        first = begins[-1] if begins else 0
        # A moment is noted when a call ends. So the step's first gather began before its first
        # moment, and after the moment before that.
        start = self.moments[first - 1].time if first else 0.0
        end = self.moments[stop - 1].time if stop else self.seconds
        return replace(
            self,
            spans=[s for s in self.spans if start <= s.start <= end],
            moments=self.moments[first:stop],
        )

    def to_dict(self) -> dict[str, Any]:
        """Numbers, strings, lists and dictionaries only."""
        return plain(self)

    def to_chrome(self) -> dict[str, Any]:
        """The events as Chrome's trace format has them; a process per rank, a thread per lane."""
        of = {"ph": "M", "pid": self.rank}
        events: list[dict[str, Any]] = [
            {**of, "name": "process_name", "args": {"name": f"rank {self.rank}"}}
        ]
        for number, lane in enumerate(LANES):
            events.append({**of, "name": "thread_name", "tid": number, "args": {"name": lane}})
        for span in self.spans:
            # A gather ahead overlaps the one before, which slices of one thread must not.
            kind = {"ph": "X", "dur": 1e6 * (span.end - span.start)}
            at = {"pid": self.rank, "tid": LANES.index(span.lane), "ts": 1e6 * span.start}
            args = {"phase": span.phase, "bytes": span.nbytes}
            name = f"{span.lane} {span.unit}"
            if span.lane in ("gather", "reduce"):
                both = {"cat": span.lane, "id": len(events), "name": name, **at}
                events.append({"ph": "b", **both, "args": args})
                events.append({"ph": "e", **both, "ts": 1e6 * span.end})
            else:
                events.append({"name": name, **kind, **at, "args": args})
        for moment in self.moments:
            values = {n: getattr(moment, n) for n in ("gathered", "packed", "gradients")}
            at = {"pid": self.rank, "ts": 1e6 * moment.time}
            events.append({"ph": "C", "name": "bytes", **at, "args": values})
        return {"traceEvents": events, "displayTimeUnit": "ms"}

    def save(self, path: str | PathLike[str]) -> None:
        """Write the events as JSON that Perfetto (ui.perfetto.dev) and chrome://tracing open."""
        check_path("Timeline.save", path)
        Path(path).write_text(json.dumps(self.to_chrome()), "utf-8")


@contextmanager
def trace(module: nn.Module | None = None) -> Iterator[Timeline]:
    """Record what this rank does in the scope, as a ``Timeline``; see ``plot_timeline``.

    Each gather, wait, release and reduction takes some microseconds more inside the scope.

    Args:
        module: whose units are recorded; None: all units of the process.

    Example:
        >>> model = fully_shard(nn.Linear(2, 2))
        >>> with trace(model) as timeline:
        ...     model(torch.ones(1, 2)).sum().backward()
        >>> timeline.moments[-1].gathered  # bytes of full weights at the end
        0
    """
    if module is not None:
        check_module("trace", module)
    timeline = Timeline(get_global_rank())
    recorder = _Recorder(timeline, None if module is None else list(iter_units(module)))
    try:
        for name in _TIMED:
            setattr(EngineWork, name, recorder.timed(name))
        yield timeline
    finally:
        for name in recorder.below:
            _take_out(recorder, name)
        recorder.measure(recorder.now(), "end", None)


def _take_out(recorder: _Recorder, name: str) -> None:
    """Let nothing call the recorder's function any more.

    Scopes need not end in the order in which they began: ranks of a simulation share the functions.
    """
    above, found = None, vars(EngineWork)[name]
    while (timing := _function_of(found).__dict__["recorder"]) is not recorder:
        above, found = timing, timing.below[name]
    if above is None:
        setattr(EngineWork, name, recorder.below[name])
    else:
        above.below[name] = recorder.below[name]


def _function_of(found: Any) -> Callable[..., Any]:
    """The function of a method of ``EngineWork``, which may be a static one."""
    return found.__func__ if isinstance(found, staticmethod) else found


class _Recorder:
    """Makes spans and moments of the calls that it times."""

    def __init__(self, timeline: Timeline, units: Sequence[Unit] | None) -> None:
        self.timeline = timeline
        self.known = None if units is None else {id(unit) for unit in units}
        self.process = vars(here)  # whose calls it records: a simulation has several
        self.below: dict[str, Any] = {}  # what each of its functions calls
        self.began = time.perf_counter()
        self.computing: list[tuple[Unit, str]] = []  # whose weights compute reads, innermost last
        self.since = 0.0  # when compute went on
        self.gathers: dict[int, tuple[Unit, str, float]] = {}  # under way, by unit
        self.reductions: list[tuple[Unit, str, float, int]] = []
        self.units: dict[int, Unit] = {}
        self.gradients = 0
        for unit in units or ():
            self.note_new(unit)

    def note_new(self, unit: Unit) -> None:
        if id(unit) not in self.units:
            self.units[id(unit)] = unit
            self.timeline.shards += sum(shard_of(bucket).nbytes for bucket in unit.buckets)

    def timed(self, name: str) -> Any:
        """A method of ``EngineWork`` as it is now, with what it does recorded."""
        self.below[name] = vars(EngineWork)[name]
        is_static = isinstance(self.below[name], staticmethod)

        def call(*args: Any) -> Any:
            function = _function_of(self.below[name])
            unit = _unit_in(args[0] if is_static else args[1:])
            is_known = unit is None or self.known is None or id(unit) in self.known
            if not is_known or vars(here) is not self.process:
                return function(*args)
            starts = name == "gather" and _is_sharded(unit)
            start = self.now()
            result = function(*args)
            if unit is not None and starts:
                self.gathers[id(unit)] = (unit, _phase(), start)
            self.note(name, unit, start, self.now(), args)
            return result

        call.__dict__["recorder"] = self
        return staticmethod(call) if is_static else call

    def now(self) -> float:
        return time.perf_counter() - self.began

    def note(self, name: str, unit: Unit | None, start: float, end: float, args: Any) -> None:
        phase = _phase()
        self.end_compute(start)
        if unit is None:
            waited = [(u, p, since) for u, p, since, _ in self.reductions]
            for reduced, of, since, nbytes in self.reductions:
                self.add("reduce", reduced, of, since, end, nbytes)
            if waited:
                self.add("wait", waited[-1][0], phase, start, end)
            self.reductions.clear()
        else:
            self.note_new(unit)
            self.note_unit(name, unit, phase, start, end, args)
        self.measure(end, phase, unit)
        self.since = self.now()

    def note_unit(
        self, name: str, unit: Unit, phase: str, start: float, end: float, args: Any
    ) -> None:
        if name == "wait":
            if id(unit) in self.gathers:
                gathered, of, since = self.gathers.pop(id(unit))
                nbytes = sum(bucket.views.nbytes for bucket in gathered.gathered)
                self.add("gather", gathered, of, since, end, nbytes)
                self.add("wait", unit, phase, start, end)
            self.computing.append((unit, phase))
        elif name == "release":
            self.gathers.pop(id(unit), None)
            self.computing = [found for found in self.computing if found[0] is not unit]
        elif name == "reduce":
            for part in args[1]:
                bucket = part.bucket
                numbers = bucket.layout.numel * (2 if bucket.stored.is_complex() else 1)
                nbytes = numbers * bucket.dtypes.reduce.itemsize
                self.reductions.append((unit, phase, start, nbytes))

    def end_compute(self, end: float) -> None:
        if not self.computing or end <= self.since:
            return
        unit, phase = self.computing[-1]
        spans = self.timeline.spans
        last = spans[-1] if spans else None
        if last and (last.lane, last.unit, last.phase) == ("compute", unit.name, phase):
            spans[-1] = replace(last, end=end)
        else:
            self.add("compute", unit, phase, self.since, end)

    def add(
        self, lane: Lane, unit: Unit, phase: str, start: float, end: float, nbytes: int = 0
    ) -> None:
        self.timeline.spans.append(Span(lane, unit.name, phase, start, end, nbytes))

    def measure(self, now: float, phase: str, unit: Unit | None) -> None:
        """Note the bytes that buckets hold."""
        gathered = packed = 0
        for bucket in [bucket for known in self.units.values() for bucket in known.buckets]:
            if not bucket.in_place and bucket.phase is not Phase.SHARDED:
                gathered += bucket.views.nbytes
            if bucket.grads is not None:
                packed += bucket.grads.flat.untyped_storage().nbytes()
        if unit is None or phase == "forward":  # reductions have arrived, or were cleared
            self.gradients = sum(map(held_gradients, self.units.values()))
        name = "" if unit is None else unit.name
        self.timeline.moments.append(Moment(now, phase, name, gathered, packed, self.gradients))


def _phase() -> str:
    return "forward" if graph_task_id() == -1 else "backward"


def _is_sharded(unit: Unit | None) -> bool:
    return unit is not None and any(b.phase is Phase.SHARDED for b in unit.gathered)


def _unit_in(args: Any) -> Unit | None:
    """The unit that a call is about; None of the call that finishes all reductions."""
    if isinstance(args, Unit):
        return args
    if not args:
        return None
    part = args[0][0] if isinstance(args[0], Sequence) else args[0]
    return unit_of(part.bucket)
