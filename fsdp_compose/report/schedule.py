"""A training step played with integers: what is gathered, packed and received at every moment.

The same moves as the engine's, in the same order, over the same ``Order``: hold, drop, prefetch,
pack, reduce. So traffic and memory are those of a real step as far as the forward runs each module
once, in the order of registration, on one device, and gradients are synchronised.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, fields, replace
from enum import Enum, auto
from typing import ClassVar

from fsdp_compose.base.policy import Prefetch
from fsdp_compose.core.order import Order
from fsdp_compose.report.survey import Event, Record, Survey


@dataclass(frozen=True)
class Communication:
    """Collectives of one rank and the bytes it receives in them; counted as ``comm.Traffic`` is."""

    gathers: int = 0
    gather_bytes: int = 0
    reduces: int = 0
    reduce_bytes: int = 0
    all_reduces: int = 0
    all_reduce_bytes: int = 0

    DERIVED: ClassVar = ("collectives", "total_bytes")

    def __add__(self, other: Communication) -> Communication:
        names = [f.name for f in fields(self)]
        return Communication(**{n: getattr(self, n) + getattr(other, n) for n in names})

    @property
    def collectives(self) -> int:
        return self.gathers + self.reduces + self.all_reduces

    @property
    def total_bytes(self) -> int:
        return self.gather_bytes + self.reduce_bytes + self.all_reduce_bytes


@dataclass(frozen=True)
class Peak:
    """What is transient at the moment at which it is most, in bytes of one rank.

    Attributes:
        gathered: full parameters.
        spread: parts of them kept from forward to backward over fewer ranks.
        gradients: gradients as autograd made them, not yet packed.
        packed: flat buffers that gradients are packed into and reduced from.
        received: what reductions under way receive into.
        reduced: sharded gradients that have arrived; in device memory.
    """

    gathered: int = 0
    spread: int = 0
    gradients: int = 0
    packed: int = 0
    received: int = 0
    reduced: int = 0

    DERIVED: ClassVar = ("total",)

    @property
    def total(self) -> int:
        return (
            self.gathered
            + self.spread
            + self.gradients
            + self.packed
            + self.received
            + self.reduced
        )


class _Why(Enum):
    """As ``state.Hold``, as far as an ordinary step uses it."""

    FORWARD = auto()
    BACKWARD = auto()
    KEPT = auto()
    PREFETCH = auto()


@dataclass(eq=False)
class _Node:
    """A unit while the step is played."""

    record: Record
    routes: list[int]  # buckets whose gradients it makes
    why: set[_Why] = field(default_factory=set)
    opened: bool = False  # in backward
    is_stale: bool = False  # kept since the last step, and the optimizer has stepped
    gradients: dict[int, int] = field(default_factory=dict)


@dataclass
class Step:
    """What a steady-state step comes to."""

    forward: Peak
    backward: Peak
    traffic_forward: list[Communication]  # by bucket
    traffic_backward: list[Communication]


class _Player:
    def __init__(self, survey: Survey) -> None:
        self.buckets = survey.buckets
        self.events = survey.events
        self.nodes = {id(record): _Node(record, record.routes) for record in survey.records}
        self.holders = [0] * len(self.buckets)
        self.is_full = [False] * len(self.buckets)
        self.is_spread = [False] * len(self.buckets)
        self.is_packed = [False] * len(self.buckets)
        self.reducing: list[int] = []
        self.arrived: set[int] = set()  # buckets with a gradient
        self.refreshed: set[int] = set()  # fused buckets gathered over replicas since the last step
        self.prefetched: list[_Node] = []
        self.forward_order, self.backward_order = Order(), Order()
        self.now = self.peak = Peak()
        self.traffic = [Communication()] * len(self.buckets)

    def play(self) -> Step:
        """Three steps: the first records the order, the last is like every later one."""
        result = Step(Peak(), Peak(), [], [])
        for _ in range(3):
            forward, gathers = self._measure(self._forward)
            backward, reduces = self._measure(self._backward)
            result = Step(forward, backward, gathers, reduces)
            self.arrived.clear()
            self.refreshed.clear()
            self._change(reduced=-self.now.reduced)
        return result

    def _measure(self, phase: Callable[[], None]) -> tuple[Peak, list[Communication]]:
        self.peak = self.now
        self.traffic = [Communication()] * len(self.buckets)
        phase()
        return self.peak, self.traffic

    # Memory

    def _change(self, **amounts: int) -> None:
        self.now = replace(
            self.now, **{name: getattr(self.now, name) + n for name, n in amounts.items()}
        )
        if self.now.total > self.peak.total:
            self.peak = self.now

    # Gathering

    def _hold(self, node: _Node, why: _Why) -> None:
        if why not in node.why:
            node.why.add(why)
            for i in node.record.gathered:
                self.holders[i] += 1
        for i in node.record.gathered:
            if not self.is_full[i]:
                self.is_full[i] = True
                self._change(gathered=self.buckets[i].full_bytes)
                self._count_gather(i)

    def _drop(self, node: _Node, why: _Why) -> None:
        if why in node.why:
            node.why.remove(why)
            for i in node.record.gathered:
                self.holders[i] -= 1
                if not self.holders[i] and self.is_full[i]:
                    self.is_full[i] = False
                    self._change(gathered=-self.buckets[i].full_bytes)

    def _count_gather(self, i: int) -> None:
        bucket = self.buckets[i]
        if bucket.ranks == 1 or not bucket.full_bytes:
            return
        ranks = bucket.spread if self.is_spread[i] and bucket.spread else bucket.gather_ranks
        if bucket.fused > 1 and i not in self.refreshed:
            self.refreshed.add(i)
            copied = bucket.weight_copy_bytes
            moved = copied - copied // bucket.fused
            self.traffic[i] += Communication(gathers=1, gather_bytes=moved)
        if ranks == 1:
            return
        moved = bucket.full_bytes - bucket.full_bytes // ranks
        self.traffic[i] += Communication(gathers=1, gather_bytes=moved)

    def _prefetch(self, nodes: Iterable[_Node], limit: int, policy: Prefetch | None = None) -> None:
        self.prefetched = [n for n in self.prefetched if _Why.PREFETCH in n.why]
        room = max(0, limit - len(self.prefetched))
        upcoming = list(dict.fromkeys([node for node in nodes if not node.why]))[:room]
        if upcoming and policy is not None:
            sizes = [
                (n.record.name, sum(self.buckets[i].full_bytes for i in n.record.gathered))
                for n in upcoming
            ]
            del upcoming[policy.count_ahead(sizes, self.now.gathered) :]
        for node in upcoming:
            self._hold(node, _Why.PREFETCH)
            self.prefetched.append(node)

    def _prefetch_ahead(self, node: _Node, order: Order, depth: int, which: str) -> None:
        listed: list[Record] | None = getattr(node.record, which)
        if listed is not None:
            self._prefetch([self.nodes[id(r)] for r in listed], len(listed))
        elif depth:
            self._prefetch(order.ahead(depth), depth, node.record.prefetch)

    def _drop_prefetched(self) -> None:
        for node in self.prefetched:
            self._drop(node, _Why.PREFETCH)
        self.prefetched.clear()

    # Passes

    def _forward(self) -> None:
        order = self.forward_order
        is_watched = False  # something trained was read, so outputs lead backward to it
        for event in self.events:
            node = self.nodes[id(event.record)]
            if event.use is not None and event.use.grad_bytes:
                is_watched = True
            if event.enters:
                if node.is_stale:
                    for i in node.record.gathered:
                        self._count_gather(i)
                    node.is_stale = False
                self._hold(node, _Why.FORWARD)
                self._drop(node, _Why.PREFETCH)
                if event.outermost:
                    order.begin(node)
                else:
                    order.visit(node)
                self._prefetch_ahead(node, order, node.record.prefetch.forward, "forward_list")
            elif event.leaves:
                keep = node.record.keep
                if is_watched and (event.outermost if keep is None else keep):
                    self._hold(node, _Why.KEPT)
                elif is_watched:
                    self._set_spread(node, True)
                self._drop(node, _Why.FORWARD)
                if event.outermost:
                    order.end()

    def _set_spread(self, node: _Node, is_spread: bool) -> None:
        for i in node.record.held:
            bucket = self.buckets[i]
            if bucket.spread is not None and self.is_spread[i] != is_spread:
                self.is_spread[i] = is_spread
                self._change(spread=bucket.spread_bytes * (1 if is_spread else -1))

    def _backward(self) -> None:
        self._drop_prefetched()
        reached, bounded = _graph(self.events)
        for event in reversed(self.events):
            node = self.nodes[id(event.record)]
            if event.leaves and id(event) in reached:
                self._open_backward(node)
            elif event.use is not None:
                use = event.use
                if use.grad_bytes and use.param not in node.gradients:
                    node.gradients[use.param] = use.grad_bytes
                    self._change(gradients=use.grad_bytes)
            elif event.enters:
                if node.routes and node.gradients:
                    self._receive(node)
                elif node.opened and id(event) in bounded:
                    self._close_backward(node)
        self._end_task()

    def _open_backward(self, node: _Node) -> None:
        node.opened = True
        self._hold(node, _Why.BACKWARD)
        self._drop(node, _Why.PREFETCH)
        order = self.backward_order
        if order.is_open:
            order.visit(node)
        else:
            order.begin(node)
            if order.place is None:
                order.assume(self.forward_order.visited()[::-1])
        if node.record.prefetch.backward_moment == "pre":
            self._prefetch_backward(node)

    def _prefetch_backward(self, node: _Node) -> None:
        depth = node.record.prefetch.backward
        self._prefetch_ahead(node, self.backward_order, depth, "backward_list")

    def _receive(self, node: _Node) -> None:
        self._drain()
        for i in node.routes:
            self._pack(i)
        self._close_backward(node)
        for i in node.routes:
            if i in node.record.held:
                self._start_reduce(i)
        self._change(gradients=-sum(node.gradients.values()))
        node.gradients.clear()

    def _close_backward(self, node: _Node, ended: bool = False) -> None:
        node.opened = False
        self._set_spread(node, False)
        if node.record.reshard_after_backward:
            self._drop(node, _Why.KEPT)
        elif _Why.BACKWARD in node.why:
            self._hold(node, _Why.KEPT)
            node.is_stale = True
        self._drop(node, _Why.BACKWARD)
        if node.record.prefetch.backward_moment == "post" and not ended:
            self._prefetch_backward(node)

    def _end_task(self) -> None:
        for i, is_packed in enumerate(self.is_packed):
            if is_packed:
                self._drain()
                self._start_reduce(i)
        self._drain()
        for node in self.nodes.values():
            if node.opened:
                self._close_backward(node, ended=True)
        self._drop_prefetched()
        self.forward_order.close()
        self.backward_order.close()

    # Gradients

    def _pack(self, i: int) -> None:
        if not self.is_packed[i]:
            self.is_packed[i] = True
            self._change(packed=self.buckets[i].flat_bytes)

    def _start_reduce(self, i: int) -> None:
        bucket = self.buckets[i]
        self.is_packed[i] = False
        self.reducing.append(i)
        self._change(received=bucket.received_bytes)
        done = Communication()
        if bucket.gather_ranks > 1 and bucket.flat_bytes:
            moved = bucket.flat_bytes - bucket.flat_bytes // bucket.gather_ranks
            done += Communication(reduces=1, reduce_bytes=moved)
        if bucket.fused > 1 and bucket.flat_bytes:
            moved = bucket.grad_shard_bytes * (bucket.fused - 1)
            done += Communication(reduces=1, reduce_bytes=moved)
        if bucket.replicas > 1:
            moved = 2 * bucket.grad_shard_bytes * (bucket.replicas - 1) // bucket.replicas
            done += Communication(all_reduces=1, all_reduce_bytes=moved)
        self.traffic[i] += done

    def _drain(self) -> None:
        while self.reducing:
            i = self.reducing.pop(0)
            bucket = self.buckets[i]
            arrived = 0 if i in self.arrived or bucket.on_host else bucket.grad_shard_bytes
            self.arrived.add(i)
            freed = {"received": -bucket.received_bytes, "packed": -bucket.flat_bytes}
            summed = bucket.grad_shard_bytes * bucket.fused
            if bucket.fused > 1:
                sums = summed if bucket.converts_gradients else 0
                senders = bucket.fused - 1 if bucket.point_to_point else 1
                others = bucket.grad_shard_bytes * senders
                self._change(reduced=sums + others)
                self._change(reduced=arrived - sums - others, **freed)
            elif bucket.converts_gradients:
                self._change(reduced=summed)
                self._change(reduced=arrived - summed, **freed)
            else:
                self._change(reduced=arrived, **freed)


def _graph(events: Sequence[Event]) -> tuple[set[int], set[int]]:
    """Which exits backward reaches, and which entries tell the end of a unit without gradients.

    A tensor needs a gradient once a trained parameter was read before it.
    """
    needs = False
    reached: set[int] = set()
    bounded: set[int] = set()
    for event in events:
        if event.use is not None:
            needs = needs or event.use.grad_bytes > 0
        elif needs:
            (reached if event.leaves else bounded).add(id(event))
    return reached, bounded


def play(survey: Survey) -> Step:
    """A steady-state step: forward, backward, every gradient synchronised, optimizer, zeroed."""
    return _Player(survey).play()
