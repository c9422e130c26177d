"""A training step played with integers: what is gathered, packed and received at every moment.

The engine's own ``Schedule`` decides, and a ledger counts bytes where the engine moves them. So
traffic and memory are those of a real step as far as the forward runs each module once in the
order of registration, or as the last step ran them, on one device, and gradients are synchronised.
"""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import ClassVar, Literal

from fsdp_compose.base.policy import Prefetch
from fsdp_compose.core.schedule import Backward, Expected, Hold, Schedule
from fsdp_compose.report.arrange import Inner, arrange, find_inner, find_reached, reverse
from fsdp_compose.report.static_buffers import find_static_buffers
from fsdp_compose.report.survey import Record, Survey, Use
from fsdp_compose.report.traffic import TrafficReport


@dataclass(frozen=True)
class Peak:
    """What is transient at the moment at which it is most, in bytes of one rank.

    Attributes:
        gathered: full parameters, and shards from the host that are being cast.
        encoded: what gathers under way receive, as a codec encoded it.
        spread: parts of them kept from forward to backward over fewer ranks.
        gradients: gradients as autograd made them, not yet packed.
        packed: flat buffers that gradients are packed into and reduced from.
        received: what reductions under way receive into.
        reduced: sharded gradients that have arrived, or are copied to the host; in device memory.
    """

    gathered: int = 0
    encoded: int = 0
    spread: int = 0
    gradients: int = 0
    packed: int = 0
    received: int = 0
    reduced: int = 0

    DERIVED: ClassVar = ("total",)

    @property
    def total(self) -> int:
        return sum(vars(self).values())


@dataclass(frozen=True)
class PlannedMoment:
    """What is transient after each change in a step; ``unit`` is the one that runs."""

    phase: str
    unit: str
    peak: Peak


@dataclass
class _Keeping:
    """The switches of a unit in a step that synchronises gradients."""

    keep_after_forward: bool | None
    reshard_after_backward: bool
    keep_over_microbatches: bool = False
    sync: bool = True


@dataclass(eq=False)
class _Node:
    """A unit while the step is played."""

    record: Record
    name: str
    routes: list[int]  # buckets whose gradients it makes
    prefetch: Prefetch
    switches: _Keeping
    expected: Expected = field(default_factory=Expected)
    holds: set[Hold] = field(default_factory=set)
    opened: bool = False  # in backward
    inner: Inner = field(default_factory=Inner)  # what happens while it is
    gradients: dict[int, int] = field(default_factory=dict)
    transposed: set[int] = field(default_factory=set)  # parameters whose gradient so far is a view


_Call = Literal["first", "joined", "later"]
"""Of a unit in a forward: the gradients of one that is joined arrive with those of one before."""


@dataclass
class Step:
    """What a steady-state step comes to."""

    forward: Peak
    backward: Peak
    traffic_forward: list[TrafficReport]  # by bucket
    traffic_backward: list[TrafficReport]
    moments: list[PlannedMoment] = field(default_factory=list)


class _Ledger:
    """Carries out what a schedule decides, in bytes: memory and traffic of one rank."""

    def __init__(self, survey: Survey, makers: Sequence[_Node]) -> None:
        self.buckets, self.static = survey.buckets, find_static_buffers(survey)
        self.in_tree = survey.in_tree
        self.users: dict[tuple[int, int], _Node] = {}  # of static buffers, who was last there
        count = len(self.buckets)
        self.schedule: Schedule[_Node, tuple[int, _Node]] = Schedule(self)
        self.holders: list[set[int]] = [set() for _ in range(count)]  # nodes
        self.is_full = [False] * count
        self.is_spread = [False] * count
        self.is_encoded = [False] * count  # gathered, and not decoded yet
        self.is_packed = [False] * count
        self.kept_in: list[int | None] = [None] * count  # the step, of those that stay gathered
        self.makers = [[node for node in makers if i in node.routes] for i in range(count)]
        self.received: set[tuple[_Node, int]] = set()  # in the backward under way
        self.reducing: list[int] = []
        self.arrived: set[int] = set()  # buckets with a gradient
        self.copied = 0  # bytes of a gradient that stays while it is copied to the host
        self.refreshed: set[int] = set()  # buckets whose weight copies are of the last step
        self.step = 0
        self.now = self.peak = Peak()
        self.at = ("forward", "")  # phase and unit
        self.moments: list[PlannedMoment] = []
        self.traffic = [TrafficReport()] * count

    def end_step(self) -> None:
        """The optimizer has stepped, and gradients were cleared."""
        self.step += 1
        self.arrived.clear()
        self.refreshed = {i for i in self.refreshed if not self.buckets[i].trained_numel}
        self.change(reduced=-self.now.reduced)

    def change(self, **amounts: int) -> None:
        """Add to what is in memory now."""
        self.now = replace(
            self.now, **{name: getattr(self.now, name) + n for name, n in amounts.items()}
        )
        if self.now.total > self.peak.total:
            self.peak = self.now
        self.moments.append(PlannedMoment(*self.at, self.now))

    # Gathering

    def announce(self, node: _Node, reason: Hold) -> None:
        place = self.static.place.get(id(node.record))
        if place is None:
            return
        other = self.users.get(place)
        if other not in (None, node) and other.holds == {Hold.PREFETCH}:
            self.schedule.drop(other, Hold.PREFETCH)
        self.users[place] = node

    def has_room(self, node: _Node) -> bool:
        place = self.static.place.get(id(node.record))
        other = None if place is None else self.users.get(place)
        return other in (None, node) or not other.holds

    def gather(self, node: _Node) -> None:
        for i in node.record.gathered:
            self.holders[i].add(id(node))
            if not self.is_full[i]:
                self._gather_bucket(i)

    def _gather_bucket(self, i: int) -> None:
        bucket = self.buckets[i]
        self.is_full[i], self.kept_in[i] = True, None
        # A shard from the host is staged while it is cast, unless there is a copy of it.
        staged = 0 if i in self.refreshed else bucket.staged_bytes
        self.change(gathered=self._gathered_bytes(i) + staged)
        self.change(gathered=-staged)
        self._count_gather(i)
        if bucket.device_copy:
            self.refreshed.add(i)
        if self._is_encoded(i):
            self.is_encoded[i] = True
            own = bucket.encoded_bytes or 0  # before it is in its place
            self.change(encoded=bucket.encoded_buffer_bytes + own)
            self.change(encoded=-own)
            if not bucket.point_to_point:
                self._decode(i)  # at once, in the order of the stream

    def _gathered_bytes(self, i: int) -> int:
        """What gathering a bucket allocates."""
        return 0 if i in self.static.gathered else self.buckets[i].full_bytes

    def _packed_bytes(self, i: int) -> int:
        """What packing a bucket's gradients allocates."""
        return 0 if i in self.static.packed else self.buckets[i].flat_bytes

    def _is_encoded(self, i: int) -> bool:
        """Whether a gather reads what a codec makes of the shards, not what was kept of them."""
        bucket = self.buckets[i]
        return bucket.encoded_bytes is not None and not self.is_spread[i]

    def _decode(self, i: int) -> None:
        if self.is_encoded[i]:
            self.is_encoded[i] = False
            self.change(encoded=-self.buckets[i].encoded_buffer_bytes)

    def gathered_nbytes(self, node: _Node) -> int:
        return sum(self.buckets[i].full_bytes for i in node.record.gathered)

    def held_nbytes(self) -> int:
        return self.now.gathered

    def wait(self, node: _Node) -> None:
        for i in node.record.gathered:
            self._decode(i)

    def release(self, node: _Node) -> None:
        for i in node.record.gathered:
            self.holders[i].discard(id(node))
            if not self.holders[i] and self.is_full[i]:
                self.is_full[i] = False
                self._decode(i)
                self.change(gathered=-self._gathered_bytes(i))

    def note_kept(self, node: _Node) -> None:
        for i in node.record.gathered:
            self.kept_in[i] = self.step

    def reread(self, node: _Node, in_backward: bool) -> None:
        for i in node.record.gathered:
            is_stepped = self.buckets[i].trained_numel and self.kept_in[i] not in (None, self.step)
            if self.is_full[i] and is_stepped:
                self._count_gather(i)
                self.kept_in[i] = self.step

    def spread(self, node: _Node) -> None:
        self._set_spread(node, True)

    def forget_spread(self, node: _Node) -> None:
        self._set_spread(node, False)

    def _set_spread(self, node: _Node, is_spread: bool) -> None:
        for i in node.record.held:
            bucket = self.buckets[i]
            if bucket.spread is not None and self.is_spread[i] != is_spread:
                self.is_spread[i] = is_spread
                self.change(spread=bucket.spread_bytes * (1 if is_spread else -1))

    def _count_gather(self, i: int) -> None:
        bucket = self.buckets[i]
        if not bucket.full_bytes:
            return
        ranks = bucket.spread if self.is_spread[i] and bucket.spread else bucket.gather_ranks
        if bucket.fused > 1 and i not in self.refreshed:
            self.refreshed.add(i)
            copied = bucket.weight_copy_bytes
            moved = copied - copied // bucket.fused
            self.traffic[i] += TrafficReport(gathers=1, gather_bytes=moved)
        if ranks == 1:
            return
        moved = bucket.full_bytes - bucket.full_bytes // ranks
        if bucket.encoded_bytes is not None and self._is_encoded(i):
            moved = bucket.encoded_bytes * (ranks - 1)
        self.traffic[i] += TrafficReport(gathers=1, gather_bytes=moved)

    # Gradients; a part is a bucket and the unit that made its gradients

    def reads_gathered(self, node: _Node, parts: Sequence[tuple[int, _Node]]) -> bool:
        return False

    def pack(self, part: tuple[int, _Node]) -> None:
        i, node = part
        self.received.add((node, i))
        if not self.is_packed[i]:
            self.is_packed[i] = True
            self.change(packed=self._packed_bytes(i))

    def is_complete(self, part: tuple[int, _Node]) -> bool:
        (i, node), first = part, self.schedule.forward_order.first
        is_last = first is not None and first() is node  # autograd frees its gradients first
        return not is_last and all((maker, i) in self.received for maker in self.makers[i])

    def postpone(self, part: tuple[int, _Node]) -> None:
        pass

    def reduce(self, parts: Sequence[tuple[int, _Node]]) -> None:
        for i, _ in parts:
            self._reduce(i)

    def _reduce(self, i: int) -> None:
        bucket = self.buckets[i]
        self.is_packed[i] = False
        self.reducing.append(i)
        self.change(received=bucket.received_bytes)
        done = TrafficReport()
        if bucket.gather_ranks > 1 and bucket.flat_bytes:
            moved = bucket.flat_bytes - bucket.flat_bytes // bucket.gather_ranks
            done += TrafficReport(reduces=1, reduce_bytes=moved)
        if bucket.fused > 1 and bucket.flat_bytes:
            moved = bucket.summed_bytes * (bucket.fused - 1)
            done += TrafficReport(reduces=1, reduce_bytes=moved)
        if bucket.replicas > 1 and i in self.in_tree:
            # As parts of one size that are summed and gathered, in place of an all-reduce.
            part = -(-bucket.shard_numel // bucket.replicas)
            moved = part * (bucket.replicas - 1) * bucket.summed_itemsize
            done += TrafficReport(reduces=1, reduce_bytes=moved, gathers=1, gather_bytes=moved)
        elif bucket.replicas > 1:
            moved = 2 * bucket.summed_bytes * (bucket.replicas - 1) // bucket.replicas
            done += TrafficReport(all_reduces=1, all_reduce_bytes=moved)
        self.traffic[i] += done

    def end_copies(self) -> None:
        """The host has waited for the gradients that are copied to it."""
        if self.copied:
            self.change(reduced=-self.copied)
            self.copied = 0

    def finish_reductions(self) -> None:
        while self.reducing:
            i = self.reducing.pop(0)
            bucket = self.buckets[i]
            arrived = 0 if i in self.arrived or bucket.on_host else bucket.grad_shard_bytes
            self.arrived.add(i)
            if bucket.on_host and bucket.gather_ranks == 1:
                before, self.copied = self.copied, bucket.grad_shard_bytes
                arrived = self.copied - before
            freed = {"received": -bucket.received_bytes, "packed": -self._packed_bytes(i)}
            if bucket.fused > 1:
                sums = bucket.summed_bytes * bucket.fused * bucket.widens_gradients
                senders = bucket.fused - 1 if bucket.point_to_point else 1
                others = bucket.summed_bytes * senders
                self.change(reduced=sums)
                if sums:  # what it was received in is free before the replicas' sums come
                    self.change(received=freed.pop("received"))
                self.change(reduced=others)
                self.change(reduced=arrived - sums - others, **freed)
            elif bucket.converts_gradients:
                made = bucket.grad_shard_bytes
                self.change(reduced=made)
                self.change(reduced=arrived - made, **freed)
            else:
                self.change(reduced=arrived, **freed)


class _Player:
    """Tells a schedule the events of a step, as hooks and autograd tell the engine's."""

    def __init__(self, survey: Survey) -> None:
        self.events = arrange(survey)
        self.reached, self.bounded = find_reached(self.events)
        self.inner = find_inner(survey.turns)
        self.calls: dict[int, _Call] = {}  # by the id of the event that enters a unit
        self.nodes = {id(record): _node(record) for record in survey.records}
        for node in self.nodes.values():
            for name in ("forward_list", "backward_list"):
                listed: list[Record] | None = getattr(node.record, name)
                if listed is not None:
                    nodes = [self.nodes[id(record)] for record in listed]
                    setattr(node.expected, name, list(map(weakref.ref, nodes)))
        makers = {id(e.record) for e in survey.events if e.use is not None and e.use.grad_bytes}
        self.ledger = _Ledger(survey, [self.nodes[key] for key in makers])
        self.schedule = self.ledger.schedule

    def play(self) -> Step:
        """Three steps: the first records the order, the last is like every later one."""
        result = Step(Peak(), Peak(), [], [])
        for _ in range(3):
            self.ledger.moments = []
            forward, gathers = self._measure(self._forward)
            backward, reduces = self._measure(self._backward)
            result = Step(forward, backward, gathers, reduces, self.ledger.moments)
            self.ledger.end_step()
        return result

    def _measure(self, phase: Callable[[], None]) -> tuple[Peak, list[TrafficReport]]:
        self.ledger.peak = self.ledger.now
        self.ledger.traffic = [TrafficReport()] * len(self.ledger.buckets)
        phase()
        return self.ledger.peak, self.ledger.traffic

    def _forward(self) -> None:
        schedule, latest = self.schedule, None
        ran: set[_Node] = set()  # in the outermost forward under way
        for event in self.events:
            node = self.nodes[id(event.record)]
            self.ledger.at = ("forward", node.name)
            if event.use is not None:
                continue
            if event.enters:
                if not schedule.active:
                    latest = None
                    ran.clear()
                schedule.active.append(node)
                schedule.enter_forward(node, recomputing=False)
                is_current = len(node.holds) > 1 or latest is node
                call: _Call = "first" if node not in ran else "joined" if is_current else "later"
                self.calls[id(event)], latest = call, node
                ran.add(node)
                schedule.look_ahead(node)
            else:
                schedule.active.pop()
                is_read = id(event) in self.reached and node.expected.is_read
                backward: Backward = "seen" if is_read else "none"
                schedule.leave_forward(node, backward, training=True, recomputing=False)
                if not schedule.active:
                    schedule.end_forward(complete=True, training=True)

    def _backward(self) -> None:
        schedule, ledger = self.schedule, self.ledger
        schedule.drop_prefetched()
        times: Counter[_Node] = Counter()
        for event in reverse(self.events):
            node = self.nodes[id(event.record)]
            ledger.at = ("backward", node.name)
            call = self.calls[id(event)] if event.enters else "first"
            if event.use is not None:
                if event.use.grad_bytes:
                    self._make_gradient(node, event.use, event.in_product)
            elif event.leaves and id(event) in self.reached and node.opened:
                ledger.finish_reductions()  # before an earlier call
            elif event.leaves and id(event) in self.reached:
                node.opened = True
                if node.expected.is_read:
                    node.inner = self.inner.get((id(node.record), times[node]), Inner())
                    times[node] += 1
                    self._recompute(node.inner.before)
                    schedule.enter_backward(node)
                    schedule.look_back(node)
                    self._recompute(node.inner.within)
            elif call == "joined" and node.routes and not node.inner.is_apart:
                continue
            elif call == "later" and node.gradients and not node.inner.is_apart:
                node.opened = False
                schedule.receive(node, (), ends_backward=True)
            elif event.enters and node.routes and node.gradients:
                node.opened = False
                schedule.receive(node, [(i, node) for i in node.routes], ends_backward=True)
                ledger.change(gradients=-sum(node.gradients.values()))
                node.gradients.clear()
                node.transposed.clear()
            elif event.enters and node.opened and id(event) in self.bounded:
                node.opened = False
                schedule.leave_backward(node)
            if event.enters and node.inner.ends and not node.opened:
                ledger.finish_reductions()
        packed = [i for i, is_packed in enumerate(ledger.is_packed) if is_packed]
        schedule.reduce_rest([(i, ledger.makers[i][0]) for i in packed])
        for node in self.nodes.values():
            if node.opened or Hold.BACKWARD in node.holds:
                node.opened = False
                schedule.leave_backward(node, ended=True)
        schedule.end_backward()
        ledger.end_copies()
        ledger.received.clear()

    def _recompute(self, records: Sequence[Record]) -> None:
        for node in (self.nodes[id(record)] for record in records):
            self.schedule.enter_forward(node, recomputing=True)
            self.schedule.leave_forward(node, "seen", training=True, recomputing=True)

    def _make_gradient(self, node: _Node, use: Use, in_product: bool) -> None:
        """Autograd adds up what comes from several places that read one parameter."""
        if use.param not in node.gradients:
            node.gradients[use.param] = use.grad_bytes
            self.ledger.change(gradients=use.grad_bytes)
            if in_product:
                node.transposed.add(use.param)
            return
        # A product's gradient is a transposed view, which autograd does not add to in place.
        others = 2 if use.param in node.transposed else 1
        self.ledger.change(gradients=others * use.grad_bytes)
        self.ledger.change(gradients=-others * use.grad_bytes)


def _node(record: Record) -> _Node:
    keeping = _Keeping(record.keep, record.reshard_after_backward)
    expected = Expected(is_read=not (record.is_unread and record.routes))
    return _Node(record, record.name, record.routes, record.prefetch, keeping, expected)


def play(survey: Survey) -> Step:
    """A steady-state step: forward, backward, every gradient synchronised, optimizer, zeroed."""
    return _Player(survey).play()
