"""A device with streams, played on the CPU: is all work ordered, and does the host never wait?

The engine asks a device for streams, events and a scope that makes a stream current, as
``torch.get_device_module`` gives them. Here that is a model of them with vector clocks. Every
operation, collective, allocation and free is noted on the stream that it was issued on; two that
touch one storage, of which one writes, must be ordered by what streams waited for.
"""

from __future__ import annotations

import inspect
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import checkpoint

import fsdp_compose as fc
from fsdp_compose import MixedPrecision, Prefetch, ShardingStrategy
from fsdp_compose.base import streams
from fsdp_compose.base.process import here
from fsdp_compose.buckets.gather import start_fills
from fsdp_compose.comm import collectives as comm
from fsdp_compose.comm import transports, waiting
from fsdp_compose.comm.transports import AT_ONCE, PAIRS
from fsdp_compose.core import gathering as residency
from fsdp_compose.core import reducing, state
from fsdp_compose.core.autograd import EngineWork
from fsdp_compose.core.state import Engine

from harness import rank_errors, run_ranks
from models import Tower, by_block, data, is_shared, mesh_of_replicas, seeded, sgd, square

Clock = dict[int, int]
"""By stream, the last of its operations that is known to be done before what comes next."""


class Stream:
    """As ``torch.cuda.Stream``, as far as the engine needs one."""

    count = 0

    def __init__(self, device: Any = None, priority: int = 0) -> None:
        Stream.count += 1
        self.key = Stream.count
        self.clock: Clock = {self.key: 0}

    def wait_stream(self, other: Stream) -> None:
        self.wait_event(other.record_event())

    def record_event(self, event: Event | None = None) -> Event:
        event = event or Event({})
        event.clock = dict(self.clock)
        return event

    def wait_event(self, event: Event) -> None:
        for key, tick in event.clock.items():
            self.clock[key] = max(self.clock.get(key, 0), tick)

    def synchronize(self) -> None:
        raise AssertionError("the host waits for a stream")


@dataclass
class Event:
    clock: Clock

    def synchronize(self) -> None:
        raise AssertionError("the host waits for an event")


class Device:
    """As ``torch.cuda``: what ``torch.get_device_module`` returns."""

    Stream = Stream

    def __init__(self) -> None:
        self.active = self.main = Stream()

    def current_stream(self, device: Any = None) -> Stream:
        return self.active

    def set_stream(self, stream: Stream) -> None:
        self.active = stream


@dataclass
class Use:
    stream: int
    tick: int
    what: str


@dataclass
class Memory:
    """What was done to one storage since it was last written."""

    write: Use | None = None
    reads: list[Use] = field(default_factory=list)
    allocated_on: int | None = None


class Races(TorchDispatchMode):
    """Notes every operation on the stream that is current, and what it is not ordered behind."""

    def __init__(self, device: Device) -> None:
        super().__init__()
        self.device = device
        self.memory: dict[int, Memory] = {}
        self.kept: list[Any] = []  # storages, so that no address is used twice
        self.found: list[str] = []
        self.seen: set[tuple[str, bool]] = set()  # (what, whether on the main stream)
        self.calls: list[int] = []  # of gathers through the group's collectives: their buffers

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func.namespace == "c10d":
            return result
        written = {id(t) for t in self._written(func, args, kwargs or {})}
        given = [t for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor)]
        made = [t for t in tree_leaves(result) if isinstance(t, Tensor)]
        is_view = any(a.alias_info is not None for a in func._schema.returns)
        name = func.name()
        if not is_view or written:
            for tensor in given:
                self.note(tensor.untyped_storage(), name, id(tensor) in written)
            for tensor in made if not is_view else ():
                self.note(tensor.untyped_storage(), name, True)
        return result

    @staticmethod
    def _written(func: Any, args: Any, kwargs: Any) -> list[Tensor]:
        written = []
        for i, argument in enumerate(func._schema.arguments):
            if argument.alias_info is not None and argument.alias_info.is_write:
                value = args[i] if i < len(args) else kwargs.get(argument.name)
                written += [t for t in tree_leaves(value) if isinstance(t, Tensor)]
        return written

    def note(self, storage: Any, what: str, writes: bool) -> None:
        stream = self.device.active
        stream.clock[stream.key] += 1
        use = Use(stream.key, stream.clock[stream.key], what)
        self.seen.add((what, stream is self.device.main))
        key = storage._cdata
        if not storage.resizable() and not is_shared(storage):
            key = -storage.data_ptr()  # static buffers, in which units have storages of their own
        if key not in self.memory:
            self.kept.append(storage)
        memory = self.memory.setdefault(key, Memory())
        before = [memory.write] if memory.write is not None else []
        for earlier in before + (memory.reads if writes else []):
            if stream.clock.get(earlier.stream, 0) < earlier.tick:
                self.found.append(f"{what} on {stream.key} races {earlier.what} on {earlier}")
        if writes:
            memory.write, memory.reads = use, []
        else:
            memory.reads.append(use)

    def resized(self, storage: Any, nbytes: int) -> None:
        """Memory is allocated and freed on one stream, whose pool it goes back to."""
        self.note(storage, f"resize to {nbytes}", True)
        memory, active = self.memory[storage._cdata], self.device.active.key
        if nbytes:
            memory.allocated_on = active
        elif memory.allocated_on not in (None, active):
            self.found.append(f"allocated on {memory.allocated_on}, freed on {active}")


@contextmanager
def watched(monkeypatch: pytest.MonkeyPatch) -> Iterator[Races]:
    """Inside, the CPU is a device with streams, and each use of memory is noted."""
    device = Device()
    monkeypatch.setattr(streams, "_module", lambda of: device)
    cpu = torch.device("cpu")
    engine = state.Engine(streams.Streams(cpu, Stream(), Stream(), Event({})), EngineWork)
    monkeypatch.setitem(here.engines, cpu, engine)
    races = Races(device)

    gather, scatter, sum_all = comm.gather_parts, comm.reduce_scatter_parts, comm.sum_replicas
    several, single = transports.all_gather_several, transports.all_gather_single
    reduce = transports.reduce_scatter_single
    resize = torch.UntypedStorage.resize_

    def noted_gather(whole: Any, parts: Any, own: Any, *rest: Any) -> Any:
        races.note(own.untyped_storage(), "gather from", False)
        races.note(whole.untyped_storage(), "gather into", True)
        exchange = gather(whole, parts, own, *rest)
        exchange.wait()  # the host does not wait on a device; here the data must be there
        return exchange

    def noted_several(pg: Any, wholes: Any, owns: Any, options: Any) -> None:
        races.calls.append(len(wholes))
        for whole, own in zip(wholes, owns, strict=True):
            races.note(own.untyped_storage(), "gather from", False)
            races.note(whole.untyped_storage(), "gather into", True)
        several(pg, wholes, owns, options).wait()

    def noted_single(pg: Any, whole: Any, own: Any, options: Any) -> None:
        races.calls.append(1)
        races.note(own.untyped_storage(), "gather from", False)
        races.note(whole.untyped_storage(), "gather into", True)
        single(pg, whole, own, options).wait()

    def noted_reduce(pg: Any, total: Any, whole: Any, options: Any) -> None:
        races.note(whole.untyped_storage(), "reduce", False)
        races.note(total.untyped_storage(), "reduce", True)
        reduce(pg, total, whole, options).wait()

    def noted_scatter(whole: Any, *rest: Any) -> Any:
        races.note(whole.untyped_storage(), "reduce", True)
        return scatter(whole, *rest)

    def noted_sum(grad: Any, *rest: Any) -> Any:
        races.note(grad.untyped_storage(), "all-reduce", True)
        return sum_all(grad, *rest)

    def noted_resize(storage: Any, nbytes: int) -> Any:
        races.resized(storage, nbytes)
        return resize(storage, nbytes)

    monkeypatch.setattr(comm, "gather_parts", noted_gather)
    monkeypatch.setattr(comm, "reduce_scatter_parts", noted_scatter)
    monkeypatch.setattr(comm, "sum_replicas", noted_sum)
    monkeypatch.setattr(transports, "all_gather_several", noted_several)
    monkeypatch.setattr(transports, "all_gather_single", noted_single)
    monkeypatch.setattr(transports, "reduce_scatter_single", noted_reduce)
    monkeypatch.setattr(torch.UntypedStorage, "resize_", noted_resize)
    with races:
        yield races


class Checkpointed(Tower):
    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False)
        return self.head(x)


class ThreeBuckets(Tower):
    """Blocks with a bucket of each kind: trained, of another dtype, frozen."""

    def double(self) -> ThreeBuckets:
        super().double()
        for block in self.blocks:
            block.norm.float()
            block.up.bias.requires_grad_(False)
        return self


TOGETHER = {"transport": AT_ONCE, "mp_policy": MixedPrecision(torch.float64, torch.float64)}


def train(rank: int, world: int, build: Callable[[], nn.Module], options: dict[str, Any]) -> None:
    if "mesh" in options:
        options = {**options, "mesh": mesh_of_replicas(*options["mesh"])}
    with pytest.MonkeyPatch.context() as monkeypatch, watched(monkeypatch) as races:
        if "transport" in options:
            monkeypatch.setattr(comm, "is_point_to_point", lambda group: False)
        model = by_block(seeded(build), **options)
        optim = sgd(model.parameters())
        for step in range(4):
            with fc.no_sync(model):
                square(model, data(step, rank)).backward()
            square(model, data(10 + step, rank)).backward()
            fc.clip_grad_norm_(model, 1.0)
            optim.step()
            optim.zero_grad()
        fc.set_requires_all_reduce(model, False)
        square(model, data(20, rank)).backward()
        fc.reduce_grads(model)  # where there are replicas, the sum over them alone
        optim.step()
        with torch.no_grad():
            model(data(0, rank))
    if options.get("strategy") is not ShardingStrategy.NO_SHARD:
        assert ("gather into", False) in races.seen and ("gather into", True) not in races.seen
        assert ("reduce", False) in races.seen and ("reduce", True) not in races.seen
    assert races.found == []
    assert ("transport" in options) == (3 in races.calls)  # blocks together, and the rest alone


CELLS: dict[str, tuple[int, dict[str, Any], Callable[[], nn.Module]]] = {
    "default": (2, {}, Tower),
    "checkpointed": (2, {}, Checkpointed),
    "kept": (2, {"strategy": ShardingStrategy.SHARD_GRAD_OP}, Tower),
    "no shard": (2, {"strategy": ShardingStrategy.NO_SHARD}, Tower),
    "hybrid": (4, {"strategy": ShardingStrategy.HYBRID_SHARD, "mesh": (2, 2)}, Tower),
    "fused": (4, {"strategy": ShardingStrategy.HYBRID_SHARD_OPTIMIZER, "mesh": (2, 2)}, Tower),
    "spread": (4, {"reshard_after_forward": 2}, Tower),
    "low precision": (2, {"mp_policy": MixedPrecision(torch.float32, torch.float32)}, Tower),
    "no prefetch": (2, {"prefetch": Prefetch(0, 0)}, Tower),
    "deep prefetch": (2, {"prefetch": Prefetch(3, 3, "post")}, Tower),
    "static": (2, {"static_buffers": True}, lambda: Tower(4)),
    "together": (2, TOGETHER, ThreeBuckets),
    "together, spread": (4, {**TOGETHER, "reshard_after_forward": 2}, ThreeBuckets),
    "together, static": (2, {**TOGETHER, "static_buffers": 4}, ThreeBuckets),
}


@pytest.mark.parametrize("cell", CELLS)
def test_streams_are_ordered_and_the_host_never_waits(cell: str) -> None:
    """Work on streams is ordered and the host never waits."""
    world, options, build = CELLS[cell]
    run_ranks(train, world, world, build, options)


class Partly(Tower):
    """Recomputes its head where asked for."""

    def forward(self, x: Tensor, again: bool) -> Tensor:
        x = torch.tanh(self.blocks[0](self.first(x)))
        return checkpoint(self.head, x, use_reentrant=True) if again else self.head(x)


def test_a_recomputed_part_waits_for_a_reduction() -> None:
    """The buffer that its gradients go to may still be read for those of another forward."""

    def ranks(rank: int) -> None:
        with pytest.MonkeyPatch.context() as monkeypatch, watched(monkeypatch) as races:
            model, x = by_block(seeded(lambda: Partly(1)), transport=PAIRS), data(0, rank)
            (model(x, True) + model(2 * x, False)).sum().backward()
        assert ("reduce", False) in races.seen and races.found == []

    run_ranks(ranks, 2)


def test_events_and_scopes_are_made_once() -> None:
    """From the third step on no event and no scope of a stream is made, only used again."""
    made: list[str] = []

    def counted(kind: type) -> Callable[..., None]:
        make = kind.__init__

        def init(self: Any, *args: Any) -> None:
            made.append(kind.__name__)
            make(self, *args)

        return init

    def ranks(rank: int) -> None:
        with pytest.MonkeyPatch.context() as patch, watched(patch):
            for kind in (Event, streams._Scope):
                patch.setattr(kind, "__init__", counted(kind))
            model = by_block(seeded(Tower), offload_policy=fc.Offload(grads=True))
            patch.setattr(Event, "synchronize", lambda event: None)
            for step in range(6):
                if step == 2:
                    assert {"Event", "_Scope"} <= set(made)
                    made.clear()
                square(model, data(step, rank)).backward()
        assert made == []

    run_ranks(ranks, 2)


def test_a_scope_is_entered_again_and_on_threads() -> None:
    """What was current before is current again, on each thread by itself."""
    device = streams.Streams(torch.device("cpu"), Stream(), Stream())
    here, there = Device(), Device()
    with pytest.MonkeyPatch.context() as patch:
        get = threading.get_ident
        mine = get()
        patch.setattr(streams, "_module", lambda of: here if get() == mine else there)

        def other() -> None:
            scope.__enter__()
            entered.wait()
            scope.__exit__()
            found.append(there.active is there.main)

        found: list[bool] = []
        entered = threading.Event()
        scope = device.beside(device.gather)
        thread = threading.Thread(target=other)
        with scope, device.beside(device.reduce), scope:
            assert here.active is device.gather
            thread.start()
            while there.active is there.main:
                pass
        assert here.active is here.main
        entered.set()
        thread.join()
    assert found == [True]


def test_a_scope_leaves_the_current_device_alone() -> None:
    """Where a model is on another device than the current one, both keep their streams."""
    kept = {torch.device("cpu"): Stream(), torch.device("meta"): Stream()}
    module = SimpleNamespace(streams=dict(kept), current=torch.device("meta"))

    def set_stream(stream: Stream) -> None:
        module.current = next((d for d, s in kept.items() if s is stream), torch.device("cpu"))
        module.streams[module.current] = stream

    module.set_stream = set_stream
    module.current_stream = lambda device=None: module.streams[device or module.current]
    device = streams.Streams(torch.device("cpu"), Stream(), Stream())
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(streams, "_module", lambda of: module)
        with device.beside(device.gather):
            assert module.current_stream() is device.gather
    assert module.streams == kept and module.current == torch.device("meta")


def test_what_a_device_waits_for_is_noted() -> None:
    """Each gather and reduction with its ranks, for the error about a rank that does not answer."""

    def ranks(rank: int) -> None:
        noted: list[tuple[str, list[int], bool]] = []

        def note(purpose: str, ranks: Any, mark: Any) -> None:
            noted.append((purpose, list(ranks), isinstance(mark, streams.Mark)))

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(waiting, "watch_mark", note)
            model = by_block(seeded(Tower))
            square(model, data(0, rank)).backward()
            assert noted == []  # the host waits itself
            with watched(patch):
                model = by_block(seeded(Tower))
                square(model, data(0, rank)).backward()
        wanted = {f"{what} unit 'blocks.0'" for what in ("gather", "reduce gradients of")}
        assert wanted <= {purpose for purpose, _, _ in noted}
        assert all(given == [0, 1] and is_mark for _, given, is_mark in noted)

    run_ranks(ranks, 2)


def test_buckets_that_travel_together_are_one_wait() -> None:
    """The compute stream waits once for all buckets of a unit, which one call gathers."""

    def ranks(rank: int) -> None:
        waits: list[Any] = []
        with pytest.MonkeyPatch.context() as patch, watched(patch) as races:
            patch.setattr(comm, "is_point_to_point", lambda group: False)
            model = by_block(seeded(ThreeBuckets), **TOGETHER)
            handle = fc.unshard(model.blocks[0], async_op=True)
            unit = fc.get_state(model.blocks[0]).unit
            marks = {bucket.fill.mark for bucket in unit.gathered}
            patch.setattr(races.device.main, "wait_event", waits.append)
            handle.wait()
            assert races.calls == [3] and [mark.event for mark in marks] == waits

    run_ranks(ranks, 2)


def test_a_failed_backward_waits_for_its_reduction() -> None:
    """The buffer of a reduction that a failure left under way is not freed while it is read."""

    def ranks(rank: int) -> None:
        with pytest.MonkeyPatch.context() as patch, watched(patch) as races:
            model = by_block(seeded(Tower))
            engine = next(iter(here.engines.values()))
            fail = model.blocks[0].register_forward_hook(
                lambda module, args, out: out.register_hook(lambda grad: 1 / 0) and None
            )
            with pytest.raises(ZeroDivisionError):
                square(model, data(0, rank)).backward()
            fail.remove()
            left = [dict(reduction.done.event.clock) for reduction in engine.reductions]
            assert left
            with fc.no_sync(model):  # clears what the failed step left
                assert engine.reductions == []
            clock = races.device.main.clock
            assert all(clock.get(k, 0) >= tick for done in left for k, tick in done.items())

    run_ranks(ranks, 2)


OFFLOADS = {
    "params": fc.Offload(params=True),
    "params and grads": fc.Offload(params=True, grads=True),
    "grads": fc.Offload(grads=True),
}


@pytest.mark.parametrize("offload", OFFLOADS)
def test_the_host_waits_at_the_end_of_a_pass_alone(offload: str) -> None:
    """Gradients go to the host on the reduce stream; it may write its shards after each pass."""

    def ranks(rank: int) -> None:
        waits: list[str] = []
        copies: list[bool] = []
        back: list[Any] = []  # arguments of copies to the device
        move = Tensor.to

        def to_device(tensor: Tensor, *given: Any, **options: Any) -> Tensor:
            if inspect.stack()[1].function == "_deliver":
                back.append((given, options))
            return move(tensor, *given, **options)

        def to_host(grad: Tensor, pin_memory: bool) -> Tensor:
            copies.append(here.engines[grad.device].streams.reduce is races.device.active)
            return grad.clone()

        def synchronize(mark: streams.Mark) -> None:
            waits.append(inspect.stack()[1].function)
            races.device.active.wait_event(mark.event)  # and so does what the host issues then

        with pytest.MonkeyPatch.context() as patch, watched(patch) as races:
            patch.setattr(reducing, "copy_to_host", to_host)
            patch.setattr(Tensor, "to", to_device)
            patch.setattr(streams.Mark, "synchronize", synchronize)
            model = by_block(seeded(Tower), offload_policy=OFFLOADS[offload])
            plain, engine = seeded(Tower), next(iter(here.engines.values()))
            with fc.accumulate(model):
                for micro in range(3):
                    fc.set_is_last_backward(model, micro == 2)
                    loss = square(model, data(micro, rank))
                    assert engine.host_reads is None  # the caller may write shards here too
                    loss.backward()
                    for other in range(2):
                        (square(plain, data(micro, other)) / 2).backward()
            assert engine.host_reads is None
        assert races.found == [] and all(copies)
        assert set(waits) <= {"land", "wait_for_host_reads"}
        assert ("wait_for_host_reads" in waits) == ("params" in offload)
        assert bool(copies) and ("land" in waits)
        in_order = (torch.device("cpu"),), {"non_blocking": True}
        assert bool(back) == (offload == "grads") and all(given == in_order for given in back)
        for found, wanted in zip(model.parameters(), plain.parameters()):
            torch.testing.assert_close(found.grad.full_tensor(), wanted.grad)

    run_ranks(ranks, 2)


def test_a_captured_step_compares_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """A captured step asks no rank and no stream for anything, and computes the same."""

    def steps(rank: int, capture: bool) -> list[Tensor]:
        asked: list[Any] = []
        with pytest.MonkeyPatch.context() as patch, watched(patch):
            model = by_block(seeded(Tower))
            optim = sgd(model.parameters())
            for step in range(3):
                if capture and step == 2:
                    patch.setattr(torch.cuda, "is_initialized", lambda: True)
                    patch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
                    patch.setattr(comm, "span", lambda *args: asked.append(args))
                    newest = waiting.the_watch().newest
                square(model, data(step, rank)).backward()
                optim.step()
                optim.zero_grad()
            assert asked == [] and (not capture or waiting.the_watch().newest is newest)
        return [p.full_tensor() for p in model.parameters()]

    def ranks(rank: int) -> None:
        assert all(map(torch.equal, steps(rank, True), steps(rank, False)))

    run_ranks(ranks, 2)


def mark_ahead(device: streams.Streams, buckets: Any) -> None:
    with device.on(device.gather):
        mark = device.record(device.gather)
        start_fills(buckets)
    for bucket in buckets:
        bucket.fill.mark = mark


BREAKS: dict[str, tuple[Any, str, Any]] = {
    "what was read is freed at once": (
        streams.Streams,
        "on",
        lambda self, stream: self.beside(stream),
    ),
    "compute does not wait for a gather": (streams.Streams, "wait", lambda self, mark: None),
    "an event is recorded again before it was waited for": (
        streams.Streams,
        "record",
        lambda self, stream: streams.Mark(stream.record_event(self.behind), []),
    ),
    "freed on the compute stream": (
        residency,
        "_release",
        lambda engine, bucket: _release(
            Engine(streams.Streams(engine.streams.device, None, None), EngineWork), bucket
        ),
    ),
    "a mark ahead of what it is for": (residency, "start_fills_on", mark_ahead),
}
_release = residency._release


@pytest.mark.parametrize(
    ("what", "cell"),
    [(what, "default") for what in BREAKS]
    + [(what, "static") for what in [*BREAKS][:2]]
    + [(what, "together") for what in [*BREAKS][1:]],
)
def test_a_missing_wait_is_found(what: str, cell: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """In static buffers nothing is freed, and the next gather may not write what compute reads."""
    monkeypatch.setattr(*BREAKS[what])
    world, options, build = CELLS[cell]
    for error in rank_errors(train, world, world, build, options):
        assert error is not None and ("races" in error or "freed on" in error)
