"""Messages that a rank ceases to wait for: gloo's threads still read and write their memory."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import fsdp_compose as fc
from fsdp_compose.base.group import SELF, Group
from fsdp_compose.base.mesh import group_of
from fsdp_compose.base.parts import cut_by_rank
from fsdp_compose.base.process import here
from fsdp_compose.base.torch_private import default_store
from fsdp_compose.comm import heads
from fsdp_compose.comm.collectives import gather_objects, gather_parts
from fsdp_compose.comm.transports import AT_ONCE, PAIRS

from harness import rank_errors, run_ranks, simulate_ranks
from models import Block, Tower, assert_at_rest, by_block, data, mesh_of_replicas, seeded, square

WIDTH = 96  # of a unit of 36 KiB, which malloc gives again at once


def test_a_late_message_harms_no_memory() -> None:
    """A rank dies inside a gather, and what another one sends for it comes after it was given up.

    What it comes to is not given to others, though the error still holds the gather's frames.
    """

    def ranks(rank: int) -> None:
        store, is_second = default_store(), False

        def gather(whole: torch.Tensor, parts: Any, own: torch.Tensor, call: Any) -> Any:
            if is_second and rank == 2:
                os.kill(os.getpid(), signal.SIGKILL)
            if is_second and rank == 1:
                store.wait(["freed"], timedelta(seconds=30))
            try:
                return PAIRS.gather(whole, parts, own, call)
            finally:  # it is sent to rank 0, though the other one has died
                if is_second:
                    store.set("sent", "")

        model = seeded(lambda: nn.Linear(WIDTH, WIDTH, bias=False))
        fc.fully_shard(model, transport=replace(PAIRS, gather=gather))
        data = torch.ones(1, WIDTH, dtype=torch.float64)
        model(data).sum().backward()
        is_second = True
        with pytest.raises(RuntimeError, match="does not answer") as raised:
            model(data)
        if rank == 0:
            with pytest.raises(RuntimeError):
                fc.unshard(model)  # clears what the forward left
            assert_at_rest(model)
            others = [torch.full((WIDTH, WIDTH), -5.0).double() for _ in range(64)]
            store.set("freed", "")
            store.wait(["sent"], timedelta(seconds=30))
            time.sleep(0.2)
            assert all(bool((other == -5.0).all()) for other in others)
        assert raised.tb is not None
        raise KeyError("unharmed")

    errors = rank_errors(ranks, 3)
    assert [error is not None and "unharmed" in error for error in errors[:2]] == [True] * 2, errors


def test_a_message_that_was_given_up_holds_up_no_other() -> None:
    """Once the ranks have heard each other in two rounds, nothing is kept for it any more."""

    def ranks(rank: int) -> None:
        pg: Any = dist.group.WORLD
        group, store = Group(pg, rank, 2, "gloo", (0, 1), purpose="a test"), default_store()
        parts = [torch.full((512,), 1 + r, dtype=torch.uint8) for r in range(2)]
        whole = torch.zeros(1024, dtype=torch.uint8)
        whole[512 * rank : 512 * (rank + 1)] = parts[rank]
        views = cut_by_rank(whole, 2)
        if rank == 0:
            exchange = gather_parts(whole, views, views[0], group)
            del exchange, views  # it was posted, and nobody waits
            store.set("given up", "")
        else:
            store.wait(["given up"], timedelta(seconds=30))
            gather_parts(whole, views, views[1], group).wait()
        assert len(here.posted) == 2 * (rank == 0)
        assert gather_objects("first", group) == ["first"] * 2
        assert not here.posted
        assert whole.tolist() == torch.cat(parts).tolist()  # it came where it was to

    run_ranks(ranks, 2)


def test_a_gather_that_began_by_half_keeps_its_memory() -> None:
    """A rank has died, which shows as this one sends to it, after it asked others for their parts.

    What they send may come after the error.
    """

    def ranks(rank: int) -> None:
        store = default_store()

        def gather(whole: torch.Tensor, parts: Any, own: torch.Tensor, call: Any) -> Any:
            if rank:
                store.wait(["freed"], timedelta(seconds=30))
            started = PAIRS.gather(whole, parts, own, call)
            store.set(f"begun by {rank}", "")
            if rank == 0:
                raise RuntimeError("another rank has died")
            return started

        model = seeded(lambda: nn.Linear(WIDTH, WIDTH, bias=False))
        fc.fully_shard(model, transport=replace(PAIRS, gather=gather))
        data = torch.ones(1, WIDTH, dtype=torch.float64)
        if rank:
            model(data)
            return
        with pytest.raises(RuntimeError, match="has died"):
            model(data)
        others = [torch.full((WIDTH, WIDTH), -5.0).double() for _ in range(64)]
        store.set("freed", "")
        store.wait(["begun by 1"], timedelta(seconds=30))
        time.sleep(0.2)
        assert all(bool((other == -5.0).all()) for other in others)

    run_ranks(ranks, 2)


WAYS: dict[str, Callable[[], dict[str, Any]]] = {
    "released": dict,
    "gathered again in pairs": lambda: {"reshard_after_forward": 2},
    "state over all": lambda: {
        "strategy": fc.ShardingStrategy.HYBRID_SHARD_OPTIMIZER,
        "mesh": mesh_of_replicas(2, 2),
    },
}


FAILURES = ("", False), ("", True), ("forward", True), ("backward", True), ("forward", False)


RAN = "ranks run different units"


class Fragile(nn.Sequential):
    """Fails on one rank, as ``fails`` says."""

    fails = ""

    def __init__(self) -> None:
        super().__init__(Block(), Block(), Block())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self:
            x = block(x)
            if block is self[0] and dist.get_rank() == 1:
                if self.fails == "backward":
                    x.register_hook(self.fail)
                elif self.fails:
                    self.fail()
        return x

    def fail(self, *_: object) -> None:
        self.fails = ""
        raise ValueError("on one rank")


@pytest.mark.parametrize("way", WAYS)
def test_steps_leave_no_message_behind(way: str) -> None:
    """Nor do those that fail on one rank and are run again, where ranks compare nothing."""

    def ranks(rank: int) -> None:
        model = by_block(seeded(Fragile), **WAYS[way]())
        x = data(0, rank)
        for model.fails, skips in FAILURES:
            texts: list[str] = []
            is_done = False
            while not is_done:
                skippable = fc.skippable_step(model) if skips else nullcontext()
                try:
                    with skippable as step:
                        square(model, x).backward()
                    is_done = step is None or not step.skipped
                except (ValueError, RuntimeError) as error:
                    texts.append(str(error))
            assert all("on one rank" in text or RAN in text for text in texts) and len(texts) < 3
            assert not here.posted

    simulate_ranks(ranks, 4)


def test_collectives_of_gloo_go_on_after_a_difference() -> None:
    """They meet in the order in which they are called: none begins before its ranks are there."""

    def ranks(rank: int) -> None:
        model = by_block(seeded(Tower), transport=AT_ONCE)
        for left_out in (-1, 1, -1):
            if rank == 1 and left_out >= 0:
                with pytest.raises(KeyError), failing(model.blocks[left_out]):
                    model(data(0, rank))
            differ = pytest.raises(RuntimeError, match="ranks run different units")
            with differ if left_out >= 0 else nullcontext():
                square(model, data(0, rank)).backward()
            model.zero_grad()

    run_ranks(ranks, timeout=30.0)


@contextmanager
def failing(module: nn.Module) -> Iterator[None]:
    """Scope in which a forward of ``module`` raises."""

    def fail(module: nn.Module, args: object) -> None:
        raise KeyError("on this rank alone")

    handle = module.register_forward_pre_hook(fail)
    try:
        yield
    finally:
        handle.remove()


def test_a_rank_that_never_comes_is_named() -> None:
    """Those that wait for it in a call say so when the timeout is over."""

    def wait(rank: int) -> str:
        group = group_of(dist.group.WORLD, torch.device("cpu"))
        if rank == 1:
            here.clock.sleep(4000.0)
            return ""
        with pytest.raises(RuntimeError) as raised:
            gather_objects(rank, group, "fully_shard")
        return str(raised.value)

    first, _, last = simulate_ranks(wait, 3)
    for text in (first, last):
        assert "waits to compare notes in fully_shard, and rank 1 does not answer" in text
        assert text.endswith("nothing has come or gone for 1800 s, the timeout")


def test_what_comes_while_it_is_looked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """A wait that was left keeps as many peers as messages, whatever comes in between."""

    class Coming:
        is_here = False

        def is_completed(self) -> bool:
            was_here, self.is_here = self.is_here, True
            return was_here

    def stop(*_: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(heads, "wait_for", stop)
    caller: Any = None
    told = heads.Heads(caller, SELF, [], [], {}, [Coming(), Coming()], [1, 2], "gather", 0)
    with pytest.raises(KeyboardInterrupt):
        told.wait()
    assert len(told.works) == len(told.peers) == 2
    with pytest.raises(KeyboardInterrupt):
        told.wait()
    assert told.works == told.peers == []
