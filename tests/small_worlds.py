"""Small worlds in which every order of the events of a step is tried on the schedule.

A ``World`` is a schedule over a few units and the program around it: what it may do next are its
``moves``. ``explore`` tries all of them from every state that can be reached, shortest histories
first. What it does to the schedule is carried out by a ``Checker``, which moves nothing and raises
where a rule of memory, of gradients or of communication is broken. ``explore_two_ranks`` lets a
second rank run the same program with every lag that its waits allow.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from fsdp_compose import Prefetch
from fsdp_compose.base.order import Order, Pass
from fsdp_compose.core.schedule import Expected, Hold, Schedule

State = tuple[Any, ...]
Move = tuple[str, str, int]
"""What may happen next: in words, the method of ``World``, its argument."""

Happened = tuple[str, str]
"""What a rank does that others take part in: ("start" or "wait", what)."""


class Broken(Exception):
    """An invariant does not hold; the message has the events that led there."""


class Refused(Exception):
    """A gather that fails, for want of memory or of an answer."""


@dataclass
class Switches:
    keep_after_forward: bool | None = None
    keep_over_microbatches: bool = False
    reshard_after_backward: bool = True
    sync: bool = True


@dataclass(eq=False)
class Member:
    """A unit of a small world, inside unit ``parent``."""

    name: str
    prefetch: Prefetch
    switches: Switches
    parent: int | None = None
    expected: Expected = field(default_factory=Expected)
    holds: set[Hold] = field(default_factory=set)
    gathers: int = 0  # in the pass under way, that were waited for
    calls: int = 1  # that a backward undoes, or in a forward


def _count_gathers(happened: Sequence[Happened]) -> int:
    return sum(kind == "start" and what.startswith("gather") for kind, what in happened)


@dataclass
class Checker:
    """Work that moves nothing and raises where a rule is broken.

    Attributes:
        full: "gathering", "refused" or "gathered", by the name of a unit that is held.
        packed: gradients that were packed and are in no reduction yet, by unit.
        reducing: units whose gradients are being reduced.
        known: units that have run, and so may be expected to.
        happened: what the other ranks take part in, in the move under way.
        refused: how many gathers go well before one fails; None: all do.
        aliased: the unit whose gradients lie in its parameters.
    """

    depth: int
    members: list[Member]
    full: dict[str, str] = field(default_factory=dict)
    packed: dict[str, int] = field(default_factory=dict)
    reducing: list[str] = field(default_factory=list)
    known: set[str] = field(default_factory=set)
    happened: list[Happened] = field(default_factory=list)
    is_late: bool = False  # what others send arrives after ``has_arrived`` asked for it
    was_asked: bool = False
    refused: int | None = None
    aliased: str = "1"

    def has_arrived(self) -> bool:
        """Whether a gather is over: no rule may ask, since it differs by rank."""
        self.was_asked = True
        return not self.is_late

    def announce(self, unit: Member, reason: Hold) -> None:
        pass

    def gather(self, unit: Member) -> None:
        if unit.name not in self.full:
            started = sum(
                what.startswith("gather") for when, what in self.happened if when == "start"
            )
            self.full[unit.name] = "refused"
            if started == self.refused:
                raise Refused
            self.full[unit.name] = "gathering"
            self.happened.append(("start", f"gather {unit.name}"))
        ahead = [member.name for member in self.members if member.holds == {Hold.PREFETCH}]
        if len(ahead) > self.depth:
            raise Broken(f"{len(ahead)} units are gathered ahead")
        if not self.known.issuperset(ahead):
            raise Broken(f"{unit.name} is gathered ahead, and has never run")

    def wait(self, unit: Member) -> None:
        if unit.name not in self.full:
            raise Broken(f"waits for {unit.name}, which nobody gathered")
        if self.full[unit.name] == "gathering":
            self.happened.append(("wait", f"gather {unit.name}"))
            unit.gathers += 1
        self.full[unit.name] = "gathered"

    def release(self, unit: Member) -> None:
        if unit.holds:
            raise Broken(f"{unit.name} is released while held by {unit.holds}")
        if self.full.pop(unit.name) == "gathering":
            self.happened.append(("wait", f"gather {unit.name}"))  # others may still be sending

    def gathered_nbytes(self, unit: Member) -> int:
        return 1

    def held_nbytes(self) -> int:
        return len(self.full)

    def has_room(self, unit: Member) -> bool:
        return True

    def note_kept(self, unit: Member) -> None:
        if unit.name not in self.full:
            raise Broken(f"{unit.name} is kept and not gathered")

    def reread(self, unit: Member, in_backward: bool) -> None:
        pass

    def spread(self, unit: Member) -> None:
        pass

    def forget_spread(self, unit: Member) -> None:
        pass

    def read(self, unit: Member) -> None:
        if self.full.get(unit.name) != "gathered":
            raise Broken(f"{unit.name} is read while {self.full.get(unit.name, 'released')}")

    def reads_gathered(self, unit: Member, parts: Any) -> bool:
        return unit.name == self.aliased

    def pack(self, part: str) -> None:
        member = self.members[int(part)]
        if (Hold.BACKWARD in member.holds) != (part == self.aliased):
            raise Broken(f"{part} is packed while {'released' if part == self.aliased else 'held'}")
        if self.reducing:
            raise Broken(f"{part} is packed while {self.reducing} is reduced")
        self.packed[part] = self.packed.get(part, 0) + 1

    def is_complete(self, part: str) -> bool:
        return self.members[int(part)].switches.sync

    def postpone(self, part: str) -> None:
        if self.members[int(part)].switches.sync:
            raise Broken(f"{part} is postponed, and no more will come")

    def reduce(self, parts: Any) -> None:
        for part in parts:
            if not self.packed.pop(part, 0):
                raise Broken(f"{part} is reduced twice")
            self.reducing.append(part)
            self.happened.append(("start", f"reduce {part}"))

    def finish_reductions(self) -> None:
        self.happened += [("wait", f"reduce {part}") for part in self.reducing]
        self.reducing.clear()


class World:
    """A schedule, its units, and where autograd and the caller's program are.

    Attributes:
        stack: units whose forward runs, outermost first.
        ran: what a backward is going to undo, the last first: (unit, whether it began or ended).
        begun: units that ran in the forward under way, each once.
        place: "rest", "forward" or "backward".
        passes: outermost forwards that may still begin.
        trains: whether the forward under way has gradients.
        unread: units whose backward reads no weight.
        held: units that the user may gather and release between any two events.
        accumulates: microbatches may leave their gradients for later ones.
        evaluates: forwards may run without gradients.
    """

    def __init__(
        self,
        parents: Sequence[int | None],
        *,
        depth: int = 1,
        switches: Switches | None = None,
        passes: int = 2,
        schedule: type[Schedule[Any, Any]] = Schedule,
        held: Sequence[int] = (0,),
        unread: Sequence[int] = (),
        accumulates: bool = False,
        evaluates: bool = False,
    ) -> None:
        self.switches, self.held = switches or Switches(), held
        self.members = [
            Member(
                str(i),
                Prefetch(depth, depth),
                self.switches,
                parent,
                expected=Expected(is_read=i not in unread),
            )
            for i, parent in enumerate(parents)
        ]
        self.indices = {id(member): i for i, member in enumerate(self.members)}
        self.known_passes: dict[State, Pass] = {}
        self.work = Checker(depth, self.members)
        self.schedule: Schedule[Any, Any] = schedule(self.work)
        self.accumulates, self.evaluates = accumulates, evaluates
        self.stack: list[int] = []
        self.ran: list[tuple[int, str]] = []
        self.begun: list[int] = []
        self.trains, self.place, self.passes = True, "rest", passes

    # A state is all that the future depends on, as tuples of numbers

    def state(self) -> State:
        schedule, work, number = self.schedule, self.work, self.indices
        orders = [member.expected.eval_order for member in self.members if self.evaluates]
        return (
            tuple((frozenset(m.holds), m.gathers, m.calls) for m in self.members),
            tuple(sorted(work.full.items())),
            tuple(sorted(work.packed.items())),
            (tuple(work.reducing), frozenset(work.known)),
            tuple(number[id(member)] for member in schedule.active),
            tuple(number[id(member)] for member in schedule.prefetched),
            schedule.gathers,
            None if schedule.eval_order is None else orders.index(schedule.eval_order),
            tuple(map(self._numbers, (schedule.forward_order, schedule.backward_order, *orders))),
            (tuple(self.stack), tuple(self.ran), tuple(self.begun)),
            (self.trains, self.place, self.passes, self.switches.sync),
        )

    def restore(self, state: State) -> None:
        schedule, work, members = self.schedule, self.work, self.members
        held, full, packed, reductions, active, prefetched, gathers, followed, orders, *rest = state
        for member, (holds, count, calls) in zip(members, held, strict=True):
            member.holds, member.gathers, member.calls = set(holds), count, calls
        work.full, work.packed, work.happened = dict(full), dict(packed), []
        work.reducing, work.known = list(reductions[0]), set(reductions[1])
        schedule.active = [members[i] for i in active]
        schedule.prefetched = [members[i] for i in prefetched]
        schedule.gathers = gathers
        schedule.forward_order, schedule.backward_order, *evaluated = map(self._order, orders)
        for member, order in zip(members, evaluated, strict=self.evaluates):
            member.expected.eval_order = order
        schedule.eval_order = None if followed is None else evaluated[followed]
        (stack, ran, begun), (self.trains, self.place, self.passes, self.switches.sync) = rest
        self.stack, self.ran, self.begun = list(stack), list(ran), list(begun)

    def _numbers(self, order: Order) -> State:
        def passes(found: Sequence[Pass]) -> State:
            return tuple((p.is_quiet, *(self.indices[id(ref())] for ref in p)) for p in found)

        lists = map(passes, (order.recorded, order.last, order.current))
        return (*lists, order.latest, order.known, order.place, order.cursor, order.before,
                order.is_open)  # fmt: skip

    def _order(self, numbers: State) -> Order:
        recorded, last = ([*map(self._pass, passes)] for passes in numbers[:2])
        current = [self._new_pass(*each) for each in numbers[2]]  # these grow
        latest, known, place, cursor, before, is_open = numbers[3:]
        return Order(recorded, latest, known, current, last, place, cursor, before, is_open)

    def _new_pass(self, is_quiet: bool, *visited: int) -> Pass:
        made = Pass([weakref.ref(self.members[i]) for i in visited])
        made.is_quiet = is_quiet
        return made

    def _pass(self, numbers: State) -> Pass:
        found = self.known_passes.get(numbers)
        if found is None:
            found = self.known_passes[numbers] = self._new_pass(*numbers)
        return found

    # What may happen next

    def moves(self) -> Iterator[Move]:
        every = range(len(self.members))
        for i in self.held:
            if Hold.USER in self.members[i].holds:
                yield f"user releases {i}", "drop", i
            else:
                yield f"user gathers {i}", "hold", i
        if self.place == "rest":
            if self.passes:
                yield from ((f"forward of {i} begins", "enter", i) for i in every)
            if self.passes and self.evaluates:
                yield from ((f"forward of {i} without gradients begins", "test", i) for i in every)
            if self.accumulates:
                yield "the next gradients " + ("wait" if self.switches.sync else "go"), "switch", 0
            if self.ran:
                yield "backward begins", "back", 0
        elif self.place == "forward":
            for i in every:
                if self.members[i].parent == self.stack[-1] and i not in self.begun:
                    yield f"forward of {i} begins", "enter", i
            yield f"forward of {self.stack[-1]} ends", "leave", 0
            yield "an exception ends the forward", "fail", 0
        elif not self.ran:
            yield "backward ends", "end", 0
        else:
            i, what = self.ran[-1]
            if what == "began":
                yield f"gradients of {i} arrive", "arrive", 0
            else:
                yield f"backward reaches {i}", "reach", 0
                for start in self._last_calls():
                    again = " and ".join(str(j) for j, what in self.ran[start:] if what == "began")
                    yield f"{again} are recomputed", "recompute", start
            yield "an exception ends the backward", "fail", 0

    def test(self, i: int) -> None:
        self.trains = False
        self.schedule.eval_order = self.members[i].expected.eval_order
        self.enter(i)

    def enter(self, i: int) -> None:
        member = self.members[i]
        if not self.stack:
            self.passes -= 1
            self.begun = []
            self._begin("forward")
        self.stack.append(i)
        self.begun.append(i)
        self.work.known.add(member.name)
        if self.trains:
            self.ran.append((i, "began"))
        self.schedule.active.append(member)
        self.schedule.enter_forward(member, recomputing=False)
        self.work.read(member)
        self.schedule.look_ahead(member)

    def leave(self, _: int) -> None:
        i = self.stack.pop()
        self.work.read(self.members[i])
        self.schedule.active.pop()
        if self.trains:
            self.ran.append((i, "ended"))
        backward = "seen" if self.trains and self.members[i].expected.is_read else "none"
        self.schedule.leave_forward(self.members[i], backward, self.trains, recomputing=False)
        if not self.stack:
            self.schedule.end_forward(complete=True, training=self.trains)
            self.schedule.eval_order = None
            self.place, self.trains = "rest", True

    def back(self, _: int) -> None:
        self._begin("backward")
        self.schedule.drop_prefetched()

    def reach(self, _: int) -> None:
        member = self.members[self.ran.pop()[0]]
        if member.expected.is_read or member.holds:
            self.schedule.enter_backward(member)
            self.work.read(member)
            self.schedule.look_back(member)

    def recompute(self, start: int) -> None:
        """The last calls, which one checkpoint is around, run again in the order they ran."""
        for i, what in self.ran[start:]:
            member = self.members[i]
            if what == "began":
                self.schedule.active.append(member)
                self.schedule.enter_forward(member, recomputing=True)
            self.work.read(member)
            if what == "ended":
                self.schedule.active.pop()
                self.schedule.leave_forward(member, "seen", training=True, recomputing=True)

    def _last_calls(self) -> Iterator[int]:
        """Where the last call begins in ``ran``, then where the one beside it does, and so on."""
        inside = 0
        for start in range(len(self.ran) - 1, -1, -1):
            inside += 1 if self.ran[start][1] == "ended" else -1
            if inside < 0:
                return  # the call around them
            if inside == 0:
                yield start

    def arrive(self, _: int) -> None:
        member = self.members[self.ran.pop()[0]]
        if member.expected.is_read:
            self.work.read(member)
        self.schedule.receive(member, [member.name], ends_backward=True)
        if self.switches.sync and member.name in self.work.packed:
            raise Broken(f"gradients of {member.name} are not reduced")

    def end(self, _: int) -> None:
        self.schedule.reduce_rest([])
        self.schedule.end_backward()
        self.place = "rest"

    def fail(self, _: int) -> None:
        self.work.finish_reductions()
        self.schedule.fail(self.members)
        if self.place == "backward":
            self.work.packed.clear()
        self.stack, self.ran, self.place, self.trains = [], [], "rest", True
        for member in self.members:
            if member.holds - {Hold.USER}:
                raise Broken(f"{member.name} is held by {member.holds} after a failure")

    def hold(self, i: int) -> None:
        counted = self.members[i].gathers  # what the user asks for is not the pass's
        self.schedule.keep(self.members[i], Hold.USER)
        self.work.wait(self.members[i])
        self.members[i].gathers = counted

    def drop(self, i: int) -> None:
        self.schedule.drop(self.members[i], Hold.USER)

    def switch(self, _: int) -> None:
        self.switches.sync = not self.switches.sync

    def _begin(self, place: str) -> None:
        self.place = place
        for i, member in enumerate(self.members):
            member.gathers = 0
            member.calls = 1 if place == "forward" else self.ran.count((i, "ended"))

    def check(self) -> None:
        """What holds between any two events."""
        for member in self.members:
            if bool(member.holds) != (member.name in self.work.full):
                raise Broken(f"{member.name} is held by {member.holds}: {self.work.full}")
            if member.gathers > member.calls:
                raise Broken(f"{member.name} is gathered more often than it is called in a pass")
            is_ahead = self.place == "backward" and Hold.PREFETCH in member.holds
            if is_ahead and not member.expected.is_read:
                raise Broken(f"{member.name} is gathered ahead of a backward that does not read it")
            if self.place == "rest" and member.holds - self._allowed_at_rest():
                raise Broken(f"{member.name} is held by {member.holds} at rest")
        if self.place == "rest" and self.work.reducing:
            raise Broken(f"{self.work.reducing} are still reduced at rest")

    def _allowed_at_rest(self) -> set[Hold]:
        switches = self.switches
        keeps = self.ran or switches.keep_over_microbatches
        keeps = keeps or (self.evaluates and switches.keep_after_forward)
        return {Hold.USER, Hold.PREFETCH} | ({Hold.KEPT} if keeps else set())


# Exploring


@dataclass
class Explored:
    """Every state, as it was reached first, and what follows it."""

    states: dict[State, int] = field(default_factory=dict)
    reached: list[tuple[int, str]] = field(default_factory=list)  # by the state before, in words
    follows: list[list[tuple[str, int, tuple[Happened, ...]]]] = field(default_factory=list)

    @property
    def transitions(self) -> int:
        return sum(map(len, self.follows))

    def history(self, index: int) -> list[str]:
        words: list[str] = []
        while index:
            index, word = self.reached[index]
            words.append(word)
        return words[::-1]


def explore(world: World) -> Explored:
    """Every state that can be reached.

    Raises:
        Broken: an invariant does not hold; the message has the shortest history that shows it.
    """
    found = Explored({world.state(): 0}, [(0, "")])
    states = [*found.states]
    for state in states:  # grows while it is walked: the nearest first
        world.restore(state)
        assert world.state() == state
        number, following = len(found.follows), []
        for move in list(world.moves()):
            try:
                ways = list(_try(world, state, move))
            except Broken as error:
                raise Broken("; ".join([*found.history(number), move[0], str(error)])) from None
            for words, after, happened in ways:
                if after not in found.states:
                    found.states[after] = len(states)
                    found.reached.append((number, words))
                    states.append(after)
                following.append((words, found.states[after], happened))
        found.follows.append(following)
    return found


def _try(world: World, state: State, move: Move) -> Iterator[tuple[str, State, Any]]:
    """What follows a move, in words: it goes well, or one of its gathers fails on all ranks."""
    after, happened = _run(world, state, move)
    yield move[0], after, happened
    for count in range(_count_gathers(happened)):
        world.work.refused = count
        after, happened = _run(world, state, move)
        world.work.refused = None
        yield f"{move[0]}, and gather number {count + 1} fails", after, happened


def _run(world: World, state: State, move: Move) -> tuple[State, tuple[Happened, ...]]:
    """The state after a move, and what other ranks take part in; the same on every rank."""
    work, ways = world.work, []
    for work.is_late in (False, True):
        world.restore(state)
        work.was_asked = False
        try:
            getattr(world, move[1])(move[2])
        except Refused:
            world.fail(0)
        world.check()
        ways.append((world.state(), tuple(work.happened)))
        if not work.was_asked:
            return ways[0]
    if ways[0] != ways[1]:
        raise Broken("ranks decide otherwise, by what has arrived so far")
    return ways[0]


def explore_two_ranks(found: Explored) -> int:
    """How many states two ranks have that run one program, each with its own lag.

    A rank waits until the other has started the same. The one behind has ``left`` to do, of which
    the one ahead has done the first ``ahead``; ``started`` is what each has started and the other
    has not waited for.

    Raises:
        Broken: both wait; the message has the events that led there.
    """
    first: _Pair = (0, (), 0, (), ())
    seen, pairs = {first}, [first]
    for pair in pairs:
        following = list(_follow(pair, found))
        if not following and (pair[1] or found.follows[pair[0]]):
            history = [*found.history(pair[0]), f"both ranks wait: {pair[1]}"]
            raise Broken("; ".join(history))
        for each in following:
            if each not in seen:
                seen.add(each)
                pairs.append(each)
    return len(pairs)


_Pair = tuple[int, tuple[Happened, ...], int, tuple[str, ...], tuple[str, ...]]


def _follow(pair: _Pair, found: Explored) -> Iterator[_Pair]:
    """What one of two ranks may do next: the one ahead, then the one behind."""
    state, left, ahead, by_ahead, by_behind = pair
    if ahead == len(left):
        for _, after, happened in found.follows[state]:
            yield after, left + happened, ahead, by_ahead, by_behind
    else:
        kind, what = left[ahead]
        if kind == "start":
            yield state, left, ahead + 1, (*by_ahead, what), by_behind
        elif what in by_behind:
            yield state, left, ahead + 1, by_ahead, _without(by_behind, what)
    if ahead:
        kind, what = left[0]
        if kind == "start":
            yield state, left[1:], ahead - 1, by_ahead, (*by_behind, what)
        elif what in by_ahead:
            yield state, left[1:], ahead - 1, _without(by_ahead, what), by_behind


def _without(started: tuple[str, ...], what: str) -> tuple[str, ...]:
    at = started.index(what)
    return started[:at] + started[at + 1 :]
