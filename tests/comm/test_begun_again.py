"""After Ctrl-C on all ranks, what they begin again never meets what they had begun before."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist

import fsdp_compose as fc
from fsdp_compose.base.process import here
from fsdp_compose.comm import heads, messages, transports, uneven
from fsdp_compose.core.guards.collective_log import Log
from fsdp_compose.simulation.network import Network
from fsdp_compose.simulation.scheduler import SimulatedThread

from harness import run_ranks, simulate_ranks
from models import Tower, Twin, by_block, data, seeded, sgd, square, whole
from structured import matrices


class Interrupts:
    """Ctrl-C reaches rank 1 before its message number ``left``, then rank 0 where it waits."""

    def __init__(self, patch: pytest.MonkeyPatch, left: int) -> None:
        self.left, self.is_armed, self.came = left, False, set[int]()
        post, wait, join = messages.post_pairs, Network.wait, SimulatedThread.join

        def post_or_stop(*args: Any) -> Any:
            if self.is_armed and dist.get_rank() == 1 and 1 not in self.came:
                self.left -= 1
                if self.left < 0:
                    self.came.add(1)
                    raise KeyboardInterrupt
            return post(*args)

        def wait_or_stop(network: Network, exchange: Any, purpose: str, seconds: float) -> None:
            running: Any = network.scheduler.running
            if not running.name.startswith("wait to"):  # another thread would not hear Ctrl-C
                ready = lambda: exchange.is_complete or bool(exchange.error)  # noqa: E731
                self.stop_in(network.scheduler, ready, seconds)
            wait(network, exchange, purpose, seconds)

        def join_or_stop(thread: SimulatedThread, timeout: float | None = None) -> None:
            self.stop_in(thread.scheduler, lambda: thread.task.is_over, timeout)
            if timeout is None:
                join(thread)

        for module in (heads, messages):
            patch.setattr(module, "post_pairs", post_or_stop)
        patch.setattr(Network, "wait", wait_or_stop)
        patch.setattr(SimulatedThread, "join", join_or_stop)

    def stop_in(self, scheduler: Any, ready: Callable[[], bool], seconds: float | None) -> None:
        rank = dist.get_rank()
        scheduler.wait(lambda: ready() or self.is_due(rank), "", seconds)
        if self.is_due(rank) and not ready():
            self.came.add(rank)
            raise KeyboardInterrupt

    def is_due(self, rank: int) -> bool:
        return 1 in self.came and rank not in self.came


def step(model: Tower, rank: int) -> None:
    model.zero_grad()
    square(model, data(0, rank)).backward()


def discard_none(model: Tower, rank: int) -> None:
    with fc.skippable_step(model) as scope:
        step(model, rank)
    assert not scope.skipped


CALLS: dict[str, Callable[[Tower, int], object]] = {
    "step": step,
    "skippable": discard_none,
    "state_dict": lambda model, rank: fc.state_dict(model, "full"),
    "load": lambda model, rank: fc.load_state_dict(model, seeded(Tower).state_dict()),
    "norm": lambda model, rank: model.head.weight.norm(),
    "refresh": lambda model, rank: fc.refresh(model),
}


CASES = """
step 0, step 2, skippable 2, state_dict 1, load 1, load 2, load 3, norm 0, refresh 2
"""


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")  # torch's, of zero_grad
@pytest.mark.parametrize("case", [text.strip() for text in CASES.split(",")])
def test_a_call_begun_again(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is right, or an error on every rank at once and then right; no rank waits in vain."""
    name, left = case.split()
    interrupts = Interrupts(monkeypatch, int(left))

    def ranks(rank: int) -> list[str]:
        model, texts = by_block(seeded(Tower)), list[str]()
        fc.clip_grad_norm_(model, 1.0)  # all ranks are here
        interrupts.is_armed = True
        began = here.clock.now()
        for _ in range(4):
            try:
                CALLS[name](model, rank)
                break
            except KeyboardInterrupt:
                texts.append("Ctrl-C")
            except RuntimeError as error:
                texts.append(str(error))
        else:
            raise AssertionError(texts)
        interrupts.is_armed = False
        assert here.clock.now() - began < 5.0
        step(model, rank)
        plain = seeded(Tower)
        sum(square(plain, data(0, r)) / 2 for r in range(2)).backward()
        for found, wanted in zip(model.parameters(), plain.parameters(), strict=True):
            torch.testing.assert_close(whole(found), wanted)
            torch.testing.assert_close(whole(found.grad), wanted.grad)
        return texts

    first, second = simulate_ranks(ranks)
    assert first[0] == second[0] == "Ctrl-C" and first[1:] == second[1:] and len(first) < 3


def test_a_step_of_owners_begun_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a rank had sent to owners is not taken for what it sends in the next try."""
    wait, transport, left = uneven.wait_for, uneven.transport_of, set[int]()

    def stop(rank: int) -> None:
        if rank == dist.get_rank() and rank in left:
            left.discard(rank)
            raise KeyboardInterrupt

    monkeypatch.setattr(uneven, "wait_for", lambda *args: (stop(0), wait(*args)))
    monkeypatch.setattr(uneven, "transport_of", lambda group: (stop(1), transport(group))[1])

    def ranks(rank: int) -> None:
        model, plain = by_block(seeded(Tower)), seeded(Tower)
        optim, wanted = fc.owner_step(matrices(model), sgd), sgd(matrices(plain))
        for number in range(2):
            step(model, rank) if number == 0 else square(model, data(number, rank)).backward()
            plain.zero_grad()
            sum(square(plain, data(number, r)) / 2 for r in range(2)).backward()
            if number == 0:
                left.add(rank)
                with pytest.raises(KeyboardInterrupt):
                    optim.step()
                model.zero_grad()
        optim.step()
        wanted.step()
        for found, value in zip(matrices(model), matrices(plain), strict=True):
            torch.testing.assert_close(whole(found), value)

    simulate_ranks(ranks)


@pytest.mark.parametrize("stopped", [{1}, {0, 1}])
def test_ctrl_c_as_ranks_say_what_differs(
    stopped: set[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The disagreement is over with it: what was sent before is not read in the next step."""
    exchange, left = Log._exchange, {*stopped}

    def exchange_and_stop(log: Log, *args: Any) -> Any:
        reports = exchange(log, *args)
        if dist.get_rank() in left:
            left.discard(dist.get_rank())
            raise KeyboardInterrupt
        return reports

    monkeypatch.setattr(Log, "_exchange", exchange_and_stop)

    def ranks(rank: int) -> None:
        twin = Twin(rank, 2, Tower)
        twin.train()
        with pytest.raises(KeyboardInterrupt if rank in stopped else RuntimeError):
            CALLS["norm" if rank else "state_dict"](twin.model, rank)
        for _ in range(3):
            twin.train()

    simulate_ranks(ranks)
    assert not left


@pytest.mark.parametrize("number", [0, 1, 3])
def test_one_owner_begins_its_step_again(number: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The others, which did not hear of Ctrl-C on one rank, go on when it comes back to them."""
    wait, left = heads.wait_for, set[int]()

    def wait_or_stop(works: Any, peers: Any, purpose: str, *rest: Any) -> None:
        if dist.get_rank() in left and purpose == "begin a step of owner_step":
            left.discard(1)
            raise KeyboardInterrupt
        wait(works, peers, purpose, *rest)

    monkeypatch.setattr(heads, "wait_for", wait_or_stop)

    def ranks(rank: int) -> None:
        model, plain = by_block(seeded(Tower)), seeded(Tower)
        optim, wanted = fc.owner_step(matrices(model), sgd), sgd(matrices(plain))
        began = here.clock.now()
        for current in range(6):
            step(model, rank)
            plain.zero_grad()
            sum(square(plain, data(0, r)) / 2 for r in range(2)).backward()
            if current == number and rank == 1:
                left.add(rank)
                with pytest.raises(KeyboardInterrupt):
                    optim.step()
            optim.step()
            wanted.step()
        assert here.clock.now() - began < 5.0
        for found, value in zip(matrices(model), matrices(plain), strict=True):
            torch.testing.assert_close(whole(found), value)

    simulate_ranks(ranks)


def test_a_gather_that_was_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """In a later step, whose heads are the same, ranks gather what the weights are by then."""
    pairs, left = transports.send_pairs, set[int]()

    def send_or_stop(outgoing: Any, incoming: Any, call: Any) -> Any:
        is_first = dist.get_rank() == 0  # rank 1 is interrupted before it sends
        started = pairs(outgoing, incoming, call) if is_first else None
        if dist.get_rank() in left and "blocks.1" in call.purpose:
            left.discard(dist.get_rank())
            raise KeyboardInterrupt
        return started or pairs(outgoing, incoming, call)

    monkeypatch.setattr(transports, "send_pairs", send_or_stop)

    def ranks(rank: int) -> None:
        twin = Twin(rank, 2, Tower)
        twin.train()
        left.add(rank)
        with pytest.raises(KeyboardInterrupt):
            twin.model(data(0, rank))
        for _ in range(3):
            twin.train()

    simulate_ranks(ranks)


def test_a_call_given_up_closes_no_connection() -> None:
    """Nobody waits for what Ctrl-C ended; so its timeout ends nothing of what comes later."""

    def ranks(rank: int) -> None:
        group = dist.new_group(timeout=timedelta(seconds=4))
        model = by_block(seeded(Tower), mesh=group)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        with pytest.MonkeyPatch.context() as patch:
            if rank == 1:
                patch.setattr(messages, "_swap_bytes", lambda *args: signal.raise_signal(2))
            else:
                threading.Timer(0.5, os.kill, (os.getpid(), signal.SIGINT)).start()
            with pytest.raises(KeyboardInterrupt):
                fc.refresh(model)
        time.sleep(4.0)
        fc.refresh(model)
        step(model, rank)

    run_ranks(ranks, 2, timeout=40)


def test_a_call_left_by_ctrl_c_is_heard() -> None:
    """A rank that leaves ``fully_shard`` by Ctrl-C, and trains, hears the others at once."""

    def ranks(rank: int) -> None:
        twin, began = Twin(rank, 2, Tower), time.monotonic()
        twin.train(steps=1)
        if rank == 0:
            signal.signal(signal.SIGINT, signal.default_int_handler)
            threading.Timer(0.5, os.kill, (os.getpid(), signal.SIGINT)).start()
            with pytest.raises(KeyboardInterrupt):
                by_block(seeded(Tower))
        else:
            time.sleep(1.0)
        with pytest.raises(RuntimeError, match="ranks were interrupted at different moments"):
            twin.train()
        assert time.monotonic() - began < 15.0
        twin.train()

    run_ranks(ranks, 2, timeout=30)
