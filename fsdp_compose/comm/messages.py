"""Messages between the ranks of a group: waiting for them, and any picklable object as bytes.

For set-up, saving and errors. Objects go point to point on gloo, so that a rank that does not
answer is known by its number; nothing here needs NumPy, which torch does not depend on.
"""

from __future__ import annotations

import contextlib
import ctypes
import pickle
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from threading import get_ident
from typing import Any, TypeAlias

import torch
import torch.distributed as dist

from fsdp_compose.base.group import Group
from fsdp_compose.base.process import here
from fsdp_compose.base.torch_private import GATHER_OPTIONS, all_gather_single
from fsdp_compose.base.torch_stack import count_modes, refuse_fakes
from fsdp_compose.comm import waiting
from fsdp_compose.comm.calls_left import leave_call, raise_if_left
from fsdp_compose.comm.counts import epoch_of, number_outside
from fsdp_compose.comm.posted import be_patient, begin_rounds, end_rounds, forget, post


def is_point_to_point(group: Group) -> bool:
    """Whether buffers travel between pairs of ranks instead of through the group's collectives."""
    return group.backend == "gloo"


_UNITS = (
    "it has died, is stuck, has ended before this rank, as with fewer batches, or runs other "
    "units. Look at what it printed; every rank must run as many steps, and the same units in the "
    "same order."
)
_STUCK = "it has died or is stuck. Look at what it printed."


def wait_for(
    works: Sequence[Any], peers: Sequence[int], purpose: str, advice: str = _UNITS
) -> None:
    """Return when all of ``works`` are done.

    Args:
        peers: the rank that each of them is with; empty: with all at once.

    Raises:
        RuntimeError: one does not answer, and which.
    """
    if works:
        if count_modes():
            refuse_fakes(purpose)
        if here.calls and (group := here.calls.get(get_ident())) is not None:
            WaitAside(works, peers, purpose).wait(group)
            return
        begun, work = waiting.enter(purpose, peers), None
        try:
            for work in works:
                work.wait()
            if here.posted:
                forget(works)
        except RuntimeError as error:
            who = f"rank {peers[works.index(work)]}" if peers else "another rank"
            raise no_answer(purpose, who, advice, error) from error
        finally:
            begun.pop(get_ident(), None)


def no_answer(purpose: str, who: str, advice: str, error: object) -> RuntimeError:
    return RuntimeError(
        f"rank {dist.get_rank()} waits to {purpose}, and {who} does not answer: {advice} "
        f"The transport says: {error}"
    )


def no_receiver(purpose: str, rank: int, error: object) -> RuntimeError:
    """The error where a message could not be sent to ``rank``."""
    return no_answer(purpose, f"rank {rank}", _STUCK, error)


def post_pairs(
    incoming: Mapping[int, torch.Tensor],
    outgoing: Mapping[int, torch.Tensor],
    group: Group,
    tag: int,
    purpose: str,
) -> list[Any]:
    """Start receiving from some ranks and sending to others; the works, in that order.

    Where one has died, the others still get what they wait for, and find the dead one themselves.

    Raises:
        RuntimeError: one has died, or the mode that this thread is in fakes tensors.
    """
    if count_modes():
        refuse_fakes(purpose)
    pg: Any = group.pg
    works: list[Any] = []
    dead: tuple[int, RuntimeError] | None = None
    for start, tensors in ((pg.recv, incoming), (pg.send, outgoing)):
        for peer, tensor in tensors.items():
            try:
                works.append(post(start, tensor, peer, tag, pg))
            except RuntimeError as error:
                dead = dead or (group.ranks[peer], error)
    if dead is not None:
        raise no_receiver(purpose, *dead) from dead[1]
    return works


RUNNING, SKIPPING = "a forward or backward of its units", "skippable_step"
UNEVEN = (RUNNING, SKIPPING)
"""Calls by ranks that may have sent different numbers of heads, as only some told the others."""


class CallsDiffer(RuntimeError):
    """Raised on every rank of a group whose ranks wait for each other in different calls."""


def gather_objects(value: Any, group: Group, what: str = "") -> list[Any]:
    """Every rank's picklable ``value``, in rank order; for set-up and errors, never in a step.

    Args:
        what: the function that every rank of ``group`` calls, which travels with the value; ``""``
            where the group is for one call, and has its name.

    Raises:
        CallsDiffer: other ranks call something else.
        TypeError: on every rank, where the value of one does not pickle.
    """
    if group.pg is None or group.backend == "fake":
        return [value] * group.size
    call = what or group.purpose
    assert call, "ranks that meet must say in which call"
    here.traffic.control += 1
    mine = pickle.dumps((call, *_pickle(value)))
    purpose = f"compare notes in {call}"
    if is_point_to_point(group):
        others = [r for r in range(group.size) if r != group.rank]
        number = epoch_of(group) if call in UNEVEN else number_outside(group, "")  # of any call
        begin_rounds(group.pg, 2)  # lengths, then bytes
        found = _swap_bytes(dict.fromkeys(others, mine), others, group, purpose, number)
        end_rounds(group.pg)
    else:
        found = _all_gather_bytes(mine, group, purpose)
    found[group.rank] = mine
    calls, values, errors = zip(*[pickle.loads(found[r]) for r in range(group.size)], strict=True)
    _compare_calls(calls, group.ranks)
    if (problem := first_error(zip(group.ranks, errors, strict=True))) is not None:
        problem.__dict__[ON_ALL_RANKS] = True
        raise problem
    return list(map(pickle.loads, values))


def _pickle(value: Any) -> tuple[bytes, ErrorReport]:
    """The bytes of ``value``, and why it has none."""
    try:
        return pickle.dumps(value), None
    except Exception as error:
        text = (
            f"a value that other ranks are sent does not pickle ({type(error).__name__}: {error})"
        )
        return b"", ("TypeError", text)


def gather_in_turn(value: Any, groups: Iterable[Group], what: str) -> list[Any]:
    """The ``value`` of every rank that ``groups`` span, gathered over one group after the other."""
    found = [value]
    for group in groups:  # rows before columns, in the same order on every rank
        found = [one for part in gather_objects(found, group, what) for one in part]
    return found


def end_messages(groups: Iterable[Group], what: str) -> None:
    """Let go of messages over ``groups`` that ranks have given up: two rounds, see ``posted``.

    Args:
        groups: gloo's. Every rank of each must call.
    """
    for group in sorted(groups, key=lambda group: (group.size, group.ranks)):  # alike on all
        if is_point_to_point(group):
            gather_objects(None, group, what)


def _compare_calls(calls: Sequence[str], ranks: Sequence[int]) -> None:
    for rank, call in zip(ranks, calls, strict=True):
        if call != calls[0]:
            problem = CallsDiffer(
                f"rank {ranks[0]} calls {calls[0]} and rank {rank} calls {call} at the same time, "
                "and each waits for the other. Call the same functions in the same order on every "
                "rank, also where only rank 0 uses the result."
            )
            problem.__dict__[ON_ALL_RANKS] = True
            raise problem


def through_first(value: Any, act: Callable[[list[Any]], list[Any]], group: Group) -> Any:
    """What ``act`` makes on the first rank of every rank's ``value``: each rank gets its own part.

    Args:
        value: picklable, and so are the parts.
        act: takes the values by rank and gives as many parts.
        group: point to point.

    Raises:
        RuntimeError: a rank does not answer, which is named.
        Exception: what ``act`` raised, on every rank.
    """
    if group.pg is None:
        return act([value])[0]
    here.traffic.control += 1
    if group.rank:
        _swap_bytes({0: pickle.dumps(value)}, [], group, group.purpose)
        error, part = pickle.loads(_swap_bytes({}, [0], group, group.purpose)[0])
    else:
        others = range(1, group.size)
        found = _swap_bytes({}, others, group, group.purpose)
        error, parts = None, [None] * group.size
        try:
            parts = act([value, *(pickle.loads(found[r]) for r in others)])
        except Exception as raised:
            error = raised
        sent = first_error([(group.ranks[0], describe_error(error))])
        answers = {r: pickle.dumps((sent, parts[r])) for r in others}
        _swap_bytes(answers, [], group, group.purpose)
        part = parts[0]
    if error is not None:
        error.__dict__[ON_ALL_RANKS] = True
        raise error
    return part


def broadcast_object(value: Any, groups: Iterable[Group], what: str = "") -> Any:
    """Rank 0's picklable ``value`` on every rank; ``what`` as for ``gather_objects``."""
    for group in groups:
        value = gather_objects(value if group.rank == 0 else None, group, what)[0]
    return value


ErrorReport: TypeAlias = "tuple[str, str] | None"
"""The class and the text of an error, or None where there was none."""


def describe_error(error: Exception | None) -> ErrorReport:
    """An error as plain data that other ranks can be sent."""
    return None if error is None else (type(error).__name__, str(error))


def first_error(reports: Iterable[tuple[int, ErrorReport]]) -> Exception | None:
    """The first error among ``(rank, report)``, as the other ranks raise it; None without any."""
    for rank, report in reports:
        if report is not None:
            kind, text = report
            found = "" if "(found on rank" in text else f" (found on rank {rank})"
            if kind in _RAISED_AS_IS:
                return _RAISED_AS_IS[kind](f"{text}{found}")
            return RuntimeError(f"{kind}: {text}{found}")
    return None


_RAISED_AS_IS: dict[str, type[Exception]] = {
    kind.__name__: kind for kind in (RuntimeError, TypeError, ValueError, CallsDiffer)
}


def raise_on_all(
    problem: Exception | None, groups: Iterable[Group], facts: object = None, what: str = ""
) -> None:
    """Raise on every rank what any rank found wrong, or that their ``facts`` or calls differ.

    Args:
        problem: what this rank found.
        what: as for ``gather_objects``.
        facts: picklable and small; its text is shown where two ranks differ. A function is called
            with each group.
    """
    for group in groups:
        fact = facts(group) if callable(facts) else facts
        try:
            reports = gather_objects((describe_error(problem), fact), group, what)
        except CallsDiffer as error:  # which ranks of the other groups are told as well
            problem = problem or error
            continue
        errors = [error for error, _ in reports]
        problem = problem or first_error(zip(group.ranks, errors, strict=True))
        problem = problem or difference([fact for _, fact in reports], group.ranks, what)
    if problem is not None:
        problem.__dict__[ON_ALL_RANKS] = True
        try:
            raise problem
        finally:
            del problem  # its traceback holds the frames that hold it, and so all their tensors


def difference(facts: Sequence[object], ranks: Sequence[int], what: str = "") -> Exception | None:
    """The error where not all of ``ranks`` have the same; None where they do."""
    for rank, fact in zip(ranks, facts, strict=True):
        if fact != facts[0]:
            lone = ", or what rank 0 alone has with broadcast_from_rank0=True"
            return RuntimeError(
                f"the ranks were given different things: rank {ranks[0]} has {facts[0]!s}, rank "
                f"{rank} has {fact!s}. Pass the same on every rank"
                f"{lone if what.startswith('load_') else ''}."
            )
    return None


class SharedErrors:
    """Scope whose error, on any rank, is raised on all ranks; every rank must leave it.

    Where no rank has an error, ``facts`` that differ between ranks are one, as in ``raise_on_all``;
    they may be set inside the scope. ``what`` is as for ``gather_objects``.
    """

    def __init__(self, *groups: Group, facts: object = None, what: str = "") -> None:
        self.groups, self.facts, self.what = groups, facts, what

    def __enter__(self) -> SharedErrors:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        try:
            if error is None or isinstance(error, Exception):
                raise_on_all(error, self.groups, self.facts, self.what)
        finally:
            del error, trace  # as in ``raise_on_all``


_OBJECT_TAGS = 1 << 28  # those of comm's heads are smaller, and those of its data larger

ON_ALL_RANKS = "_fsdp_compose_on_all_ranks"
"""Set on an error that every rank raises."""


def _swap_bytes(
    outgoing: Mapping[int, bytes],
    senders: Sequence[int],
    group: Group,
    purpose: str,
    number: int = 0,
) -> dict[int, bytes]:
    """Send bytes to some ranks and receive some from others, which do the same the other way.

    Args:
        number: of 26 bits; those of other numbers never meet.
    """
    lengths = {r: torch.tensor([len(data)], device="cpu") for r, data in outgoing.items()}
    arriving = {r: torch.empty(1, dtype=torch.int64, device="cpu") for r in senders}
    payloads = {r: torch.frombuffer(bytearray(d), dtype=torch.uint8) for r, d in outgoing.items()}
    for tag in (_OBJECT_TAGS + 2 * number, _OBJECT_TAGS + 2 * number + 1):
        works = post_pairs(arriving, lengths, group, tag, purpose)
        peers = [group.ranks[r] for r in (*arriving, *lengths)]
        WaitAside(works, peers, purpose).wait(group)
        if tag % 2 == 0:
            lengths = payloads
            arriving = {
                r: torch.empty(int(length), dtype=torch.uint8, device="cpu")
                for r, length in arriving.items()
            }
    return {r: to_bytes(tensor) for r, tensor in arriving.items()}


def _all_gather_bytes(mine: bytes, group: Group, purpose: str) -> dict[int, bytes]:
    """Every rank's bytes, through collectives on the device that the group serves."""
    device = torch.device("cpu")
    if group.backend != "gloo" and torch.accelerator.is_available():
        accelerator = torch.accelerator.current_accelerator()
        assert accelerator is not None
        device = torch.device(accelerator.type, torch.accelerator.current_device_index())
    own = torch.frombuffer(bytearray(mine), dtype=torch.uint8).to(device)
    size = torch.tensor([own.numel()], device=device)
    sizes = size.new_empty(group.size)
    _gather_on_device(sizes, size, group, purpose)
    lengths = sizes.tolist()
    padded = own.new_zeros(max(lengths))
    padded[: own.numel()].copy_(own)
    whole = own.new_empty(group.size * padded.numel())
    _gather_on_device(whole, padded, group, purpose)
    host = whole.cpu().view(group.size, -1)
    return {r: to_bytes(host[r, :length]) for r, length in enumerate(lengths)}


def _gather_on_device(whole: torch.Tensor, own: torch.Tensor, group: Group, purpose: str) -> None:
    """Fill ``whole`` with every rank's ``own``; on NCCL in the order of the current stream."""
    work = all_gather_single(group.pg, whole, own, GATHER_OPTIONS)
    if work is not None:  # NCCL returns none for what runs on the caller's stream
        wait_for([work], (), purpose, _STUCK)


def to_bytes(tensor: torch.Tensor) -> bytes:
    """The bytes of a contiguous uint8 tensor; without NumPy, which torch does not depend on."""
    host = tensor.cpu()
    return ctypes.string_at(host.data_ptr(), host.numel()) if host.numel() else b""


@contextlib.contextmanager
def looking(look: Callable[[], None]) -> Iterator[None]:
    """Scope in which this thread calls ``look`` now and then while it waits for messages.

    What that raises ends the wait. The rank may come back to a meeting of ``heads.meet_alone``;
    over the group it must wait for nothing else then.
    """
    here.looks[get_ident()] = look
    try:
        yield
    finally:
        del here.looks[get_ident()]


@contextlib.contextmanager
def attend_call(group: Group) -> Iterator[None]:
    """Scope of a call over ``group``, in which this thread hears of ranks that leave the call.

    It hears of them also while it waits for tensors, which in the scope never meet those that an
    earlier call left behind.
    """
    if group.pg is not None:
        here.calls[get_ident()] = group
    try:
        yield
    except BaseException as error:
        if group.pg is not None and not is_on_all_ranks(error):
            leave_call(group, error)
        raise
    finally:
        here.calls.pop(get_ident(), None)


def is_on_all_ranks(error: BaseException | None) -> bool:
    """Whether every rank raises this error."""
    while error is not None:
        if ON_ALL_RANKS in error.__dict__:
            return True
        error = error.__cause__
    return False


class WaitAside:
    """A thread waits for ``works``, so that this one can cease to, and come back to it later."""

    def __init__(self, works: Sequence[Any], peers: Sequence[int], purpose: str) -> None:
        self.failure: BaseException | None = None
        self._is_over = False
        works, self._timeout = be_patient(works)
        self._waits = works, peers, purpose, _STUCK
        self._end = here.clock.now() + self._timeout
        name = f"wait to {purpose}"
        self._thread = here.clock.thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            wait_for(*self._waits)  # this thread attends no call
        except BaseException as error:
            self.failure = error
        finally:
            self._is_over = True

    def wait(self, group: Group | None = None) -> None:
        """Return when the works are done; meanwhile look, see ``looking``, and hear Ctrl-C.

        Args:
            group: of the call that ranks may leave.

        Raises:
            RuntimeError: a rank does not answer, or has left the call.
        """
        pause = 0.05
        while not self._have_come(pause):
            pause = min(2 * pause, 1.0)
            if group is not None:
                raise_if_left(group)
            if here.clock.now() > self._end:
                raise self._no_answer()
            look = here.looks.get(get_ident())
            if look is not None:
                look()
        if self.failure is not None:
            if group is not None:
                raise_if_left(group)
            raise self.failure

    def _no_answer(self) -> RuntimeError:
        works, peers, purpose, advice = self._waits
        late = [peer for work, peer in zip(works, peers, strict=True) if not work.is_completed()]
        found = f"nothing has come or gone for {self._timeout:g} s, the timeout"
        return no_answer(purpose, f"rank {late[0]}" if late else "another rank", advice, found)

    def _have_come(self, pause: float) -> bool:
        """Whether the works are done, within so many seconds."""
        self._thread.join(pause)
        if not self._thread.is_alive() and not self._is_over:
            here.clock.sleep(pause)  # after Ctrl-C in an earlier join Python takes it for ended
        return self._is_over
