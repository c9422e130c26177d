"""A device with streams, played on the CPU, which tells what its streams do not order.

The engine asks a device for streams, events and a scope that makes a stream current, as
torch gives them. Here that is a model of them with vector clocks. Every
operation, collective, allocation and free is noted on the stream that it was issued on; two that
touch one storage, of which one writes, must be ordered by what streams waited for.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from fsdp_compose.base import streams
from fsdp_compose.base.process import here
from fsdp_compose.comm import collectives as comm
from fsdp_compose.comm import small_reduce, transports
from fsdp_compose.core import state
from fsdp_compose.core.autograd import EngineWork

from models import is_shared

Clock = dict[int, int]
"""By stream, the last of its operations that is known to be done before what comes next."""


class Stream:
    """As ``torch.cuda.Stream``, as far as the engine needs one."""

    count = 0
    made: ClassVar[weakref.WeakSet[Stream]] = weakref.WeakSet()

    def __init__(self, device: Any = None, priority: int = 0) -> None:
        Stream.made.add(self)
        Stream.count += 1
        self.key = self.stream_id = Stream.count
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
    device: ClassVar[torch.device] = torch.device("cpu")

    def query(self) -> bool:
        return False

    def synchronize(self) -> None:
        raise AssertionError("the host waits for an event")


def wait_for(event: Event) -> None:
    """The host waits: whatever it issues next, on any stream, is ordered behind."""
    for stream in Stream.made:
        stream.wait_event(event)


class Device:
    """The streams of a device, as the engine asks for them."""

    Stream = Stream

    def __init__(self) -> None:
        self.active = self.main = Stream()

    def make_event(self) -> Event:
        return Event({})

    def current_stream(self, device: Any = None) -> Stream:
        return self.active

    def set_stream(self, stream: Stream) -> None:
        self.active = stream


@dataclass
class Use:
    stream: int
    tick: int
    what: str
    reads: bool = True


@dataclass
class Memory:
    """What was done to one storage since it was last written."""

    write: Use | None = None
    reads: list[Use] = field(default_factory=list)
    allocated_on: int | None = None

    @property
    def uses(self) -> list[Use]:
        return [*([] if self.write is None else [self.write]), *self.reads]


class Races(TorchDispatchMode):
    """Notes every operation on the stream that is current, and what it is not ordered behind."""

    def __init__(self, device: Device) -> None:
        super().__init__()
        self.device = device
        self.memory: dict[int, Memory] = {}
        self.kept: list[Any] = []
        self.alive: dict[int, StorageWeakRef] = {}  # which keep addresses from being used twice
        self.dead: list[StorageWeakRef] = []
        self.freed: dict[int, list[Use]] = {}  # by stream, of memory that went back to its pool
        self.found: list[str] = []
        self.seen: set[tuple[str, bool]] = set()  # (what, whether on the main stream)
        self.host, self.hosted = Stream(), set[int]()  # which storages lie there
        self.now = Event({})  # what the host has done
        self.calls: list[int] = []  # of gathers through the group's collectives: their buffers
        self.reduce_calls: list[int] = []  # likewise of reductions

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.look_for_freed()
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
                storage = tensor.untyped_storage()
                if storage._cdata not in self.memory:
                    self.allocate(name)
                    self.memory[storage._cdata] = Memory(allocated_on=self.device.active.key)
                self.note(storage, name, True)
        return result

    def put_on_host(self, tensor: Tensor) -> Tensor:
        """From now on, what is done to its memory beside no other stream is done by the host."""
        self.hosted.add(tensor.untyped_storage()._cdata)
        self.kept.append(tensor.untyped_storage())
        return tensor

    def allocate(self, what: str) -> None:
        """The current stream's pool may hand out memory again that was freed before."""
        stream = self.device.active
        for use in self.freed.pop(stream.key, ()):
            if stream.clock.get(use.stream, 0) < use.tick:
                self.found.append(f"{what} on {stream.key} has freed memory in use: {use}")

    def look_for_freed(self) -> None:
        """Give memory that nobody refers to any more back to the pool that it is from."""
        for key, ref in list(self.alive.items()):
            if ref.expired():
                self.dead.append(self.alive.pop(key))
                memory = self.memory[key]
                if memory.allocated_on is not None:
                    self.freed.setdefault(memory.allocated_on, []).extend(memory.uses)

    @staticmethod
    def _written(func: Any, args: Any, kwargs: Any) -> list[Tensor]:
        written = []
        for i, argument in enumerate(func._schema.arguments):
            if argument.alias_info is not None and argument.alias_info.is_write:
                value = args[i] if i < len(args) else kwargs.get(argument.name)
                written += [t for t in tree_leaves(value) if isinstance(t, Tensor)]
        return written

    def note(self, storage: Any, what: str, writes: bool) -> None:
        stream, key = self.device.active, storage._cdata
        self.seen.add((what, stream is self.device.main))
        if key in self.hosted and stream is self.device.main:
            stream = self.host  # which is behind what it has waited for, and nothing else
        else:
            stream.wait_event(self.host.record_event(self.now))  # that is done when this is issued
        stream.clock[stream.key] += 1
        use = Use(stream.key, stream.clock[stream.key], what, not writes)
        if not storage.resizable() and not is_shared(storage):
            key = -storage.data_ptr()  # static buffers, in which units have storages of their own
        if key < 0:
            self.kept.append(storage)  # so that its address is not used twice
        elif key not in self.alive:
            self.alive[key] = StorageWeakRef(storage)
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
        """Memory is from the pool of the stream that it is allocated on, and goes back to it."""
        self.look_for_freed()
        memory = self.memory.get(storage._cdata)
        if nbytes:
            self.allocate("resize")
        elif memory is not None and memory.allocated_on is not None:
            self.freed.setdefault(memory.allocated_on, []).extend(memory.uses)
        self.memory[storage._cdata] = Memory(
            allocated_on=self.device.active.key if nbytes else None
        )
        if nbytes:
            self.note(storage, "resize", True)


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
    reduce_several = transports.reduce_scatter_several
    resize, post, add_up = torch.UntypedStorage.resize_, transports.post_pairs, comm.all_reduce
    start = comm.GatherPlan.start

    def note_gather(whole: Any, own: Any) -> None:
        races.note(own.untyped_storage(), "gather from", False)
        races.note(whole.untyped_storage(), "gather into", True)

    def noted_gather(whole: Any, parts: Any, own: Any, *rest: Any) -> Any:
        note_gather(whole, own)
        exchange = gather(whole, parts, own, *rest)
        exchange.wait()  # the host does not wait on a device; here the data must be there
        return exchange

    def noted_several(pg: Any, wholes: Any, owns: Any, options: Any) -> None:
        races.calls.append(len(wholes))
        list(map(note_gather, wholes, owns))
        several(pg, wholes, owns, options).wait()

    def noted_single(pg: Any, whole: Any, own: Any, options: Any) -> None:
        races.calls.append(1)
        note_gather(whole, own)
        single(pg, whole, own, options).wait()

    def note_reduce(total: Any, whole: Any) -> None:
        races.note(whole.untyped_storage(), "reduce", False)
        races.note(total.untyped_storage(), "reduce", True)

    def noted_reduce(pg: Any, total: Any, whole: Any, options: Any) -> None:
        races.reduce_calls.append(1)
        note_reduce(total, whole)
        reduce(pg, total, whole, options).wait()

    def noted_reduces(pg: Any, totals: Any, wholes: Any, options: Any) -> None:
        races.reduce_calls.append(len(wholes))
        list(map(note_reduce, totals, wholes))
        reduce_several(pg, totals, wholes, options).wait()

    def noted_scatter(whole: Any, *rest: Any, **options: Any) -> Any:
        races.note(whole.untyped_storage(), "reduce", True)
        return scatter(whole, *rest, **options)

    def noted_sum(grad: Any, *rest: Any) -> Any:
        races.note(grad.untyped_storage(), "all-reduce", True)
        return sum_all(grad, *rest)

    def noted_start(plan: Any, *given: Any) -> Any:
        exchange = start(plan, *given)
        exchange.wait()  # what is decoded on a device is in the order of its stream
        return exchange

    def noted_pairs(incoming: Any, outgoing: Any, *rest: Any) -> Any:
        """What pairs exchange; gathers and reductions over pairs are noted as such, too."""
        for tensor in outgoing.values():
            races.note(tensor.untyped_storage(), "send", False)
        for tensor in incoming.values():
            races.note(tensor.untyped_storage(), "receive", True)
        return post(incoming, outgoing, *rest)

    def noted_all_reduce(tensor: Any, *rest: Any, **options: Any) -> Any:
        races.note(tensor.untyped_storage(), "all-reduce", True)
        return add_up(tensor, *rest, **options)

    def noted_resize(storage: Any, nbytes: int) -> Any:
        races.resized(storage, nbytes)
        return resize(storage, nbytes)

    monkeypatch.setattr(comm, "gather_parts", noted_gather)
    monkeypatch.setattr(comm, "reduce_scatter_parts", noted_scatter)
    monkeypatch.setattr(comm, "sum_replicas", noted_sum)
    monkeypatch.setattr(comm.GatherPlan, "start", noted_start)
    monkeypatch.setattr(transports, "post_pairs", noted_pairs)
    for module in (comm, small_reduce):
        monkeypatch.setattr(module, "all_reduce", noted_all_reduce)
    monkeypatch.setattr(transports, "all_gather_several", noted_several)
    monkeypatch.setattr(transports, "all_gather_single", noted_single)
    monkeypatch.setattr(transports, "reduce_scatter_single", noted_reduce)
    monkeypatch.setattr(transports, "reduce_scatter_several", noted_reduces)
    monkeypatch.setattr(torch.UntypedStorage, "resize_", noted_resize)
    with races:
        yield races
