"""When units are gathered, kept, released and reduced: the rules of a step, without a tensor.

The engine runs these rules over its units, ``plan`` over integers, and a test over every order of
events in small worlds. What they decide is carried out by a ``Work``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from enum import Enum
from functools import cached_property
from typing import Any, Generic, Literal, Protocol, TypeVar

from fsdp_compose.base.order import Change, Order

Backward = Literal["seen", "hidden", "none"]
"""Whether backward may reach a unit: through its outputs' hook, without one, or not at all."""


class Hold(Enum):
    """Why a unit must stay gathered, with the words in which errors say it."""

    __hash__ = object.__hash__  # looked up several times a pass; Enum's own is written in Python

    FORWARD = "forward"  # it is running
    BACKWARD = "backward"  # it is running, or a recomputation for it
    KEPT = "to keep it"  # from forward to backward, by strategy
    PREFETCH = "ahead of its use"
    RETAINED = "for a second backward"  # create_graph made a graph over its weights
    USER = "asked for by the caller"  # between the user's unshard and reshard


# A name is looked up in a quarter of the time that an attribute of a class takes.
FORWARD, BACKWARD, KEPT, PREFETCH, RETAINED, USER = Hold


class Ahead(Protocol):
    """How many units to gather ahead in each pass, and when in backward; see ``Prefetch``."""

    @property
    def forward(self) -> int: ...
    @property
    def backward(self) -> int: ...
    @property
    def backward_moment(self) -> Literal["pre", "post"] | None: ...
    @property
    def rule(self) -> Any: ...
    def count_ahead(self, upcoming: Sequence[tuple[str, int]], held: int) -> int: ...


class Keeping(Protocol):
    """When a unit stays gathered; see the ``set_*`` functions of the same names."""

    keep_after_forward: bool | None
    keep_over_microbatches: bool
    reshard_after_backward: bool
    sync: bool


@dataclass(eq=False)
class Expected:
    """What is expected of a unit: what runs after it, and whether its backward reads its weights.

    Attributes:
        forward_list, backward_list: given by the user, as weak references; None: by the order.
        eval_order: of forwards without gradients that this unit is the outermost of.
        is_read: its backward needs the unit gathered; if not, no backward gathers it ahead.
    """

    forward_list: Sequence[Callable[[], Any]] | None = None
    backward_list: Sequence[Callable[[], Any]] | None = None
    is_read: bool = True
    eval_order = cached_property(lambda _: Order())


class Scheduled(Protocol):
    """What the rules read of a unit; they store the reasons to hold it in ``holds``."""

    holds: set[Hold]

    @property
    def name(self) -> str: ...
    @property
    def prefetch(self) -> Ahead: ...
    @property
    def switches(self) -> Keeping: ...
    @property
    def expected(self) -> Expected: ...


U = TypeVar("U", bound=Scheduled)
P = TypeVar("P")
U_in = TypeVar("U_in", bound=Scheduled, contravariant=True)
P_in = TypeVar("P_in", contravariant=True)


class Work(Protocol[U_in, P_in]):
    """Carries out decisions about units, and about parts, which are gradients of a bucket."""

    def announce(self, unit: U_in, reason: Hold) -> None:
        """Say that the unit is about to be gathered; an error here leaves everything as it was."""

    def gather(self, unit: U_in) -> None:
        """Start gathering the unit's buckets that are released."""

    def gathered_nbytes(self, unit: U_in) -> int:
        """Bytes that gathering the unit allocates."""

    def held_nbytes(self) -> int:
        """Bytes of gathered parameters on the device now."""

    def has_room(self, unit: U_in) -> bool:
        """Whether the unit can be gathered ahead; where buffers are static, others may use its."""

    def wait(self, unit: U_in) -> None:
        """Make what was gathered readable."""

    def release(self, unit: U_in) -> None:
        """Free the unit's gathered parameters, since nobody holds it any more."""

    def note_kept(self, unit: U_in) -> None:
        """Note the version of the shards, since the unit stays gathered for another pass."""

    def reread(self, unit: U_in, in_backward: bool) -> None:
        """Gather again the buckets whose shards were written since they were kept."""

    def spread(self, unit: U_in) -> None:
        """Keep a part of the unit, so that backward gathers over fewer ranks."""

    def forget_spread(self, unit: U_in) -> None:
        """Free what ``spread`` kept."""

    def reads_gathered(self, unit: U_in, parts: Sequence[P_in]) -> bool:
        """Whether gradients of the parts lie in the unit's gathered parameters."""

    def pack(self, part: P_in) -> None:
        """Copy or add gradients into their flat buffer."""

    def is_complete(self, part: P_in) -> bool:
        """Whether this backward brings no further gradients of the same buffer."""

    def postpone(self, part: P_in) -> None:
        """Reduce the buffer later: when more has arrived, or at the end of this backward."""

    def reduce(self, parts: Sequence[P_in]) -> None:
        """Start reducing the flat buffers of one unit's parts, together where that can be."""

    def finish_reductions(self) -> None:
        """Wait for the reductions under way, free their buffers, and set the gradients."""


class Schedule(Generic[U, P]):
    """The rules of a step, and what they remember between events.

    Attributes:
        work: carries out what is decided.
        active: units whose forward is running, outermost first.
        prefetched: units gathered ahead; once one is used, it is not held by ``PREFETCH``.
        forward_order, backward_order: in which units run in training.
        eval_order: that of the outermost unit, while a forward without gradients runs.
        gathers: whether a unit was gathered for the outermost forward; else one rank may run alone.
    """

    def __init__(self, work: Work[U, P]) -> None:
        self.work = work
        self.active: list[U] = []
        self.prefetched: list[U] = []
        self.forward_order, self.backward_order = Order(), Order()
        self.eval_order: Order | None = None
        self.gathers = False

    # Reasons to be gathered

    def hold(self, unit: U, reason: Hold) -> None:
        """Start gathering the unit, and keep it gathered until ``reason`` is dropped."""
        self.work.announce(unit, reason)
        unit.holds.add(reason)
        try:
            self.work.gather(unit)
        except BaseException:
            self.drop(unit, reason)
            raise

    def drop(self, unit: U, reason: Hold) -> None:
        """Withdraw a reason, and release a unit that is left without any."""
        if reason in unit.holds:
            unit.holds.remove(reason)
            if not unit.holds:
                self.work.release(unit)

    def keep(self, unit: U, reason: Hold) -> None:
        """Hold a unit for a later pass, which gathers it again if it was written meanwhile."""
        self.hold(unit, reason)
        self.work.note_kept(unit)

    # Forward

    @property
    def order(self) -> Order:
        """The order that the forward under way follows."""
        return self.forward_order if self.eval_order is None else self.eval_order

    def enter_forward(self, unit: U, recomputing: bool) -> None:
        """Before forward: gather the unit, unless it is gathered, and wait for it."""
        if not recomputing or BACKWARD not in unit.holds:
            self.work.reread(unit, in_backward=False)
        self.hold(unit, FORWARD)
        unit.holds.discard(PREFETCH)
        self.work.wait(unit)

    def look_ahead(self, unit: U) -> Change | None:
        """Gather ahead what is expected after the unit; return how the order changed, if it did."""
        order = self.forward_order if self.eval_order is None else self.eval_order
        change = None
        if len(self.active) == 1:
            order.begin(unit)
        else:
            change = order.visit(unit)
        if not self.gathers:
            self.gathers = unit.holds == {FORWARD} and self.work.gathered_nbytes(unit) > 0
            if not self.gathers:
                return None
        if change is not None:
            self.drop_prefetched()
        policy = unit.prefetch
        self._prefetch(policy, policy.forward, unit.expected.forward_list, order)
        return change

    def leave_forward(self, unit: U, backward: Backward, training: bool, recomputing: bool) -> None:
        """After forward: release the unit, unless it is kept for its backward."""
        try:
            kept, seen = unit.switches.keep_after_forward, backward == "seen"
            kept = (seen and not self.active) if kept is None else kept
            ends = training and unit.switches.reshard_after_backward
            if recomputing:
                self.hold(unit, BACKWARD)  # which is under way; its gradients release the unit
            elif backward == "hidden" or (kept and (seen or not ends)):
                self.keep(unit, KEPT)
            elif seen:
                self.work.spread(unit)
        finally:  # without memory for what it spreads, too
            self.drop(unit, FORWARD)

    def end_forward(self, complete: bool, training: bool) -> Change | None:
        """End the outermost forward; return a change where it was expected to go on."""
        gathers, self.gathers = self.gathers, False
        change = self.order.end(complete, quiet=not gathers)
        if not training:
            if gathers:
                self.drop_prefetched()
            self.order.close()
            return None
        if change is not None or not complete:
            self.drop_prefetched()
        for unit in self.prefetched:
            if PREFETCH in unit.holds:
                self.work.note_kept(unit)
        return change

    # Backward

    def enter_backward(self, unit: U) -> None:
        """Before the unit's backward: gather the unit and wait for it."""
        self.hold(unit, BACKWARD)
        unit.holds.discard(PREFETCH)
        self.work.reread(unit, in_backward=True)
        self.work.wait(unit)
        self.work.forget_spread(unit)

    def look_back(self, unit: U) -> None:
        """Gather ahead what is expected after the unit in backward."""
        order = self.backward_order
        if order.is_open:
            order.visit(unit)
        else:
            order.begin(unit)
            if order.place is None:
                order.assume(self.forward_order.visited(quiet=False))
        policy = unit.prefetch
        if policy.backward_moment == "pre":
            self._prefetch(policy, policy.backward, unit.expected.backward_list, order)

    def receive(self, unit: U, parts: Sequence[P], ends_backward: bool) -> None:
        """When gradients arrive: release their unit, pack them, and reduce complete buffers.

        The unit is released first, unless a gradient lies in its gathered parameters. Reductions
        under way are finished then, so that one flat buffer exists at a time.
        """
        last = ends_backward and self.work.reads_gathered(unit, parts)
        if ends_backward and not last:
            self.leave_backward(unit)
        else:
            self.work.finish_reductions()
        for part in parts:
            self.work.pack(part)
        if last:
            self.leave_backward(unit)
        complete: list[P] = []
        for part in parts:
            if self.work.is_complete(part):
                complete.append(part)
            else:
                self.work.postpone(part)
        if complete:
            self.work.reduce(complete)

    def leave_backward(self, unit: U, ended: bool = False) -> None:
        """Release the unit after its backward, or when all has ``ended``; finish reductions."""
        switches, policy, listed = unit.switches, unit.prefetch, unit.expected.backward_list
        stays = switches.keep_over_microbatches and not switches.sync
        if switches.reshard_after_backward and not stays:
            if KEPT in unit.holds:
                self.drop(unit, KEPT)
        elif BACKWARD in unit.holds:
            self.keep(unit, KEPT)
        self.drop(unit, BACKWARD)
        if policy.backward_moment == "post" and not ended:
            self._prefetch(policy, policy.backward, listed, self.backward_order)
        self.work.finish_reductions()

    def reduce_rest(self, parts: Iterable[P]) -> None:
        """End a backward: reduce what waited for more, and finish every reduction."""
        for part in parts:
            self.work.finish_reductions()
            self.work.reduce((part,))
        self.work.finish_reductions()

    def end_backward(self) -> None:
        """After the last backward: release what was gathered ahead, and end the orders."""
        self.drop_prefetched()
        self.forward_order.close()
        self.backward_order.close()

    # Gathering ahead

    def _prefetch(
        self, policy: Ahead, depth: int, listed: Sequence[Callable[[], Any]] | None, order: Order
    ) -> None:
        """Gather ahead ``depth`` units of the order, or those that the user listed."""
        limit, rule = (depth, policy) if listed is None else (len(listed), None)
        found = order.ahead(depth) if listed is None else [ref() for ref in listed]
        units: list[U] = [unit for unit in found if unit is not None]
        if order is self.backward_order:
            units = [unit for unit in units if unit.expected.is_read]
        self.prefetch(units, limit, rule)

    def prefetch(
        self, units: Iterable[U], limit: int | None = None, policy: Ahead | None = None
    ) -> None:
        """Start gathering ``units``, while fewer than ``limit`` wait; a rule may gather fewer."""
        if self.prefetched:
            self.prefetched = [unit for unit in self.prefetched if PREFETCH in unit.holds]
        if policy is not None and policy.rule is not None and limit is not None:
            room = max(0, limit - len(self.prefetched))
            ahead = list(dict.fromkeys([unit for unit in units if not unit.holds]))[:room]
            sizes = [(unit.name, self.work.gathered_nbytes(unit)) for unit in ahead]
            units = ahead[: policy.count_ahead(sizes, self.work.held_nbytes())] if ahead else ()
        for unit in units:
            if limit is not None and len(self.prefetched) >= limit:
                break
            if not unit.holds and self.work.has_room(unit):
                self.hold(unit, PREFETCH)
                self.prefetched.append(unit)

    def drop_prefetched(self) -> None:
        """Release units that were gathered ahead and not used."""
        while self.prefetched:
            self.drop(self.prefetched.pop(0), PREFETCH)

    # Failure

    def forget_orders(self, units: Iterable[U]) -> None:
        """Expect nothing more of what was recorded, by this machine or for ``units``."""
        self.forward_order, self.backward_order = Order(), Order()
        for unit in units:
            unit.expected.eval_order = Order()

    def fail(self, units: Iterable[U]) -> None:
        """After an exception: release every unit that the user does not hold."""
        self.active.clear()
        self.prefetched.clear()
        for order in (self.forward_order, self.backward_order, self.eval_order):
            if order is not None:
                order.forget()
        self.eval_order = None
        for unit in units:
            for reason in tuple(unit.holds - {Hold.USER}):
                self.drop(unit, reason)
