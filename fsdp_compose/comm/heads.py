"""Ranks tell each other what they are doing ahead of each exchange, on gloo.

A head is a small message that goes point to point before data, between ranks of one host through a
pipe (comm/mail.py). Where heads differ, the ranks run different units. The buffers behind them
never meet, since their tags are made of the heads, and the receiver says so instead of waiting for
ever or reading what is not meant for it. Collectives that no step issues (a state dict, a scope, a
norm) have heads too: a rank that calls one alone, while others run units, meets theirs.

Heads are numbered, so that data which a rank sent before Ctrl-C ended its wait never meets that of
the next try.
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from itertools import takewhile
from threading import get_ident
from typing import Any, Literal, NoReturn, Protocol

import torch
import torch.distributed as dist

from fsdp_compose.base.group import Group
from fsdp_compose.base.process import here
from fsdp_compose.comm.counts import counts_of, epoch_of, number_outside, set_counts
from fsdp_compose.comm.flags import Flags
from fsdp_compose.comm.mail import ROW, Letter
from fsdp_compose.comm.messages import WaitAside, is_point_to_point, post_pairs, wait_for
from fsdp_compose.comm.posted import begin_rounds, end_rounds, post
from fsdp_compose.comm.shared_memory import Offer, segments_of

Head = tuple[int, ...]
"""Eight integers that say what a rank is doing; as sent, ``ROW`` integers, see ``send_heads``."""

DATA, COMPARISON, MEETING = 0, 1, 2
KIND, NUMBER, FLAGS = 8, 9, 10  # what stands where; before FLAGS, ranks that do the same are equal
OFFER = 11

# Tags of data behind heads, of flags, and of data outside of steps. Those of heads are smaller.
_DATA_TAGS = 1 << 30
_FLAG_TAGS = 1 << 29
_CALL_TAGS = 1 << 27


class Caller(Protocol):
    """Issues collectives, and compares them between ranks; see core/guards/collective_log.py.

    Attributes:
        unread: by process group, exchanges whose heads were not read yet, or whose flags were not
            taken, in the order sent.
        unmet: groups in which others have ended a skippable step that this rank is inside.
    """

    unread: dict[Any, deque[Heads]]
    unmet: set[Group]

    def head(self) -> Head:
        """What this rank is doing, in eight integers; equal on ranks that do the same."""

    def alone(self, purpose: str, kind: str) -> AbstractContextManager[Head]:
        """Scope of a collective that no step issues; its head, which is equal for one ``kind``."""

    def disagree(self, group: Group, meets: int) -> NoReturn:
        """A rank of ``group`` does something else, as every rank of it knows; tell the others.

        Args:
            meets: the largest code with which one of them ends a skippable step, having told all of
                its groups; else 0.
        """


@dataclass(slots=True)
class Heads:
    """The heads of one exchange: what this rank sent, and what arrives from each peer.

    A rank that has not all of its ``flags`` sends them behind its head, to be united in ``check``.
    """

    caller: Caller
    group: Group
    sent: list[int]
    letters: Sequence[Letter]  # from ranks of this host
    received: dict[int, torch.Tensor]  # from the others
    works: Sequence[Any]
    peers: Sequence[int]
    purpose: str
    epoch: int  # of the group, when it was sent
    flags: Flags | None = None
    flag_works: Sequence[Any] = ()  # of sending them
    taken: list[torch.Tensor] | None = None  # flags of other ranks, if read before its own turn
    aside: WaitAside | None = None  # waits for those that arrive, where this rank looks meanwhile

    def rows(self) -> list[list[int]]:
        """The heads of the other ranks, once they have arrived, and those before them."""
        unread = self.caller.unread[self.group.pg]
        if unread and unread[0] is self:
            rows = self.wait()  # after Ctrl-C it is among those before the next
            unread.popleft()
            return rows
        for earlier in self._list_earlier() if self.taken is None else ():
            earlier.read()
        rows = self.wait()
        kept = [one for one in unread if one is not self and one.epoch == self.epoch]
        unread.clear()
        unread.extend(one for one in kept if one.taken is None)
        return rows

    def _list_earlier(self) -> list[Heads]:
        """Exchanges whose answers come before those to this one, and were not read.

        A rank that does something else in one of them may have nothing to send after it.
        """
        unread = self.caller.unread[self.group.pg]
        before = takewhile(lambda one: one is not self, tuple(unread))
        return [one for one in before if one.epoch == self.epoch]

    def read(self) -> None:
        """Read the heads of the other ranks before its turn; raises unless all do the same.

        Also take their flags: who sent some waits for that, and may be late for what comes next.
        """
        rows = self.wait()
        self.compare(rows)
        self.taken = self._take_flags(rows)

    def wait(self) -> list[list[int]]:
        """The heads of the other ranks, once they have arrived."""
        # What this thread looks at ends the wait, which may go on later, where it looks no more.
        if self.aside is not None or (here.looks and get_ident() in here.looks):
            if self.aside is None or self.aside.failure is not None:
                self.aside = WaitAside(self.works, self.peers, self.purpose)
            self.aside.wait()
            self.works = self.peers = ()
            return self.arrived()
        try:
            wait_for(self.works, self.peers, self.purpose)
        except BaseException:  # after Ctrl-C this rank may come back, for what has not come yet
            waits = zip(self.works, self.peers, strict=True)
            pairs = [(work, peer) for work, peer in waits if not work.is_completed()]
            self.works, self.peers = [work for work, _ in pairs], [peer for _, peer in pairs]
            raise
        self.works = self.peers = ()
        return self.arrived()

    def arrived(self) -> list[list[int]]:
        """The heads of the other ranks, in rank order, which were waited for."""
        if not self.received:
            return [letter.row for letter in self.letters]
        rows = {rank: tensor.tolist() for rank, tensor in self.received.items()}
        rows |= {letter.rank: letter.row for letter in self.letters}
        return [rows[rank] for rank in sorted(rows)]

    def check(self) -> bool:
        """Raise unless every peer does the same; False if ranks have disagreed since it was sent.

        Some of them may never have come to this exchange then, and nobody is to read its data.
        """
        if self.is_outdated():
            return False
        rows = self.rows()
        self.compare(rows)
        if self.flags is not None:
            self._unite(self.flags, rows)
        return True

    def is_outdated(self) -> bool:
        """Whether ranks have disagreed since these were sent."""
        return epoch_of(self.group) != self.epoch or self.group in self.caller.unmet

    def compare(self, rows: list[list[int]]) -> None:
        """Raise unless every peer does the same."""
        what = self.sent[:FLAGS]
        if any(row[:FLAGS] != what for row in rows):
            self.caller.disagree(self.group, _find_meeting((self.sent, *rows)))

    def tag_behind(self, kind: int = _DATA_TAGS) -> int:
        """The tag of what follows: the data, or the flags where ``kind`` says so."""
        return kind | hash((self.epoch, *self.sent[:FLAGS])) & (kind - 1)

    def are_apart(self) -> bool:
        """Whether a rank that met is in groups of which none has the ranks of the others."""
        return any(row[KIND] == MEETING and row[OFFER] for row in self.arrived())

    def offers(self) -> list[Offer]:
        """What each rank of the group offers in its memory, by rank; when the heads are there."""
        rows = self.arrived()
        rows.insert(self.group.rank, self.sent)
        return [Offer(*row[OFFER:]) for row in rows]

    def _unite(self, flags: Flags, rows: list[list[int]]) -> None:
        for part in self._take_flags(rows) if self.taken is None else self.taken:
            flags.add(part)
        wait_for(self.flag_works, (), self.purpose)
        if not all(row[FLAGS] for row in rows):
            flags.bits = (1 << flags.count) - 1

    def _take_flags(self, rows: list[list[int]]) -> list[torch.Tensor]:
        """Receive the flags behind the heads ``rows``; who sent them waits until they are taken."""
        pg: Any = self.group.pg
        received, works = [], []
        for index, row in enumerate(rows):
            if row[FLAGS]:
                peer = index + (index >= self.group.rank)
                received.append(torch.empty(row[FLAGS], dtype=torch.uint8, device="cpu"))
                works.append(post(pg.recv, received[-1], peer, self.tag_behind(_FLAG_TAGS), pg))
        wait_for(works, (), self.purpose)
        return received


def _find_meeting(rows: Sequence[Sequence[int]]) -> int:
    """The largest code of those that meet; 0 where none does."""
    return max((row[0] for row in rows if row[KIND] == MEETING), default=0)


def send_heads(
    caller: Caller,
    head: Head,
    group: Group,
    purpose: str,
    flags: Flags | None = None,
    kind: int = DATA,
    offer: Sequence[int] = (),
) -> Heads:
    """Tell every other rank of the group what this one does, and start hearing what they do.

    Behind ``head`` stand whether it is ahead of data, a comparison alone, or a meeting, how many
    were sent before it, and what may differ between ranks that do the same: how many bytes of flags
    follow, and what is offered.
    """
    assert group.pg is not None
    is_partial = flags is not None and not flags.is_full
    epoch, number = counts_of(group.pg)
    mine = [*head, kind, number, flags.nbytes if flags is not None and is_partial else 0]
    mine += offer or Offer()
    segments = segments_of(group)
    far = [(group.rank + step) % group.size for step in range(1, group.size)]
    letters: list[Letter] = []
    if segments is not None:
        letters = segments.mail.post(1 + epoch, mine, purpose)
        far = [rank for rank in far if rank not in segments.peers]
    works: list[Any] = [*letters]
    peers = [group.ranks[letter.rank] for letter in letters]
    received: dict[int, torch.Tensor] = {}
    if far:
        received = {
            rank: torch.empty(ROW, dtype=torch.int64, device="cpu") for rank in reversed(far)
        }
        outgoing = dict.fromkeys(far, torch.tensor(mine, device="cpu"))
        works += post_pairs(received, outgoing, group, 1 + epoch, purpose)
        peers += [group.ranks[rank] for rank in (*received, *far)]
    heads = Heads(caller, group, mine, letters, received, works, peers, purpose, epoch, flags)
    caller.unread.setdefault(group.pg, deque()).append(heads)
    set_counts(group.pg, epoch, number + 1)
    if flags is not None and is_partial:
        data, others = flags.to_bytes(), (r for r in range(group.size) if r != group.rank)
        tag, pg = heads.tag_behind(_FLAG_TAGS), group.pg
        heads.flag_works = [post(pg.send, data, r, tag, pg) for r in others]
    return heads


_callers: weakref.WeakKeyDictionary[Any, Callable[[], Any]] = weakref.WeakKeyDictionary()
"""By process group, who compares what the ranks of it run; ``_nobody`` where several do."""


_unanswered: weakref.WeakKeyDictionary[Any, Heads] = weakref.WeakKeyDictionary()
"""By process group, what this rank ceased to wait for when it met: it may come there again."""


def _nobody() -> Literal[False]:
    return False


def answer_for(caller: Caller, groups: Iterable[Group]) -> None:
    """Let ``caller`` also compare the collectives over ``groups`` that no step issues.

    Where another one answers for one of them, none does: they would tell other ranks of it.
    """
    for group in groups:
        known = _callers.get(group.pg, lambda: None)
        _callers[group.pg] = weakref.ref(caller) if known() is None else _nobody


@contextmanager
def hearing(caller: Caller, head: Head, group: Group, purpose: str) -> Iterator[Heads]:
    """Scope in which the others' answers to ``head`` are heard, which this rank sends.

    Where something ends it first, as Ctrl-C does, the others may find this rank's head, and go on:
    in the next scope for the same purpose their answers to that one are heard.
    """
    heads = _unanswered.pop(group.pg, None)
    if heads is None or heads.purpose != purpose or heads.is_outdated():
        heads = send_heads(caller, head, group, purpose)
    try:
        yield heads
    except BaseException:
        if not heads.is_outdated():
            _unanswered[group.pg] = heads
        raise


def meet_alone(group: Group, purpose: str, kind: str = "") -> None:
    """Before a collective that no step issues: raise unless every rank of the group calls it.

    On gloo, over groups that units are sharded over; elsewhere nothing is compared. Nor is it in a
    call that its ranks attend (``messages.attend_call``): they have met, and may leave it early.

    Args:
        purpose: what every rank does, in the infinitive.
        kind: ranks meet where this is the same, though their purposes differ, as the call that
            follows compares them; "": where the purpose is the same.

    Raises:
        RuntimeError: on every rank, where one does something else; says what each does.
    """
    if not is_point_to_point(group) or get_ident() in here.calls:
        return
    caller: Caller | None = _callers.get(group.pg, _nobody)() or None
    if caller is not None:
        with caller.alone(purpose, kind or purpose) as head:
            with hearing(caller, head, group, purpose) as heads:
                have_met = heads.check()
        if not have_met:
            raise RuntimeError(
                f"rank {dist.get_rank()} was to {purpose}, but the ranks have ended this step in "
                "different ways, and the error that said so was caught. Let it leave the step."
            )


def meet_to_call(what: str, groups: Iterable[Group]) -> None:
    """Meet, as ``meet_alone`` does, before a call whose ranks tell each other what they call."""
    for group in groups:
        meet_alone(group, f"call {what}", "a call of the library's")


def tag_outside(purpose: str, nbytes: int, group: Group) -> int:
    """A tag for tensors that go point to point outside of steps.

    Ranks that do different things never meet: their data would blend, or end the process where it
    has different sizes. Nor do those of a call and of an earlier one that was left.
    """
    return _CALL_TAGS | number_outside(group, f"{purpose} {nbytes}")


def compare_heads(both: list[int], groups: Sequence[Group], caller: Caller) -> list[int]:
    """The largest of each value over the ranks of ``groups``, in the form of heads.

    So a rank that compares the end of its step meets one that is about to send data.
    """
    for group in groups:
        head = (*both, *[0] * (KIND - len(both)))
        begin_rounds(group.pg)
        rows = send_heads(caller, head, group, "end a step", kind=COMPARISON).rows()
        end_rounds(group.pg)
        if any(row[KIND] != COMPARISON for row in rows):
            caller.disagree(group, _find_meeting(rows))
        both = [max(column) for column in zip(both, *rows, strict=False)]
    return both


def tell(caller: Caller, code: int, group: Group, is_apart: bool = False) -> Heads:
    """Tell every rank of ``group``, wherever it waits for data of this one, to meet with ``code``.

    A rank tells all of its groups before it hears any: ranks wait for each other across groups.

    Args:
        is_apart: for ``are_apart``; stands where nothing is offered.
    """
    head, offer = (code, *[0] * (KIND - 1)), Offer(int(is_apart))
    return send_heads(caller, head, group, "end a skippable step", kind=MEETING, offer=offer)


def hear(told: Heads) -> None:
    """Return when every rank of the group meets with the same code; else the ranks disagree.

    Where a peer went to meet first, its message is the answer to what this rank sent before.

    Args:
        told: what ``tell`` returned; nothing is heard if the ranks have disagreed since.
    """
    if epoch_of(told.group) != told.epoch:
        return
    told.compare(told.rows())
