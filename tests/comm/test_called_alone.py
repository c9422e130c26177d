"""One rank calls alone what needs all ranks, while the others train: every rank raises at once."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import fsdp_compose as fc
from fsdp_compose.base.group import Group, Started, Transport
from fsdp_compose.comm import collectives as comm
from fsdp_compose.comm import heads, transports
from fsdp_compose.comm.transports import AT_ONCE, PAIRS

from harness import rank_errors, run_ranks, simulate_ranks
from models import Tower, by_block, data, mesh_of_replicas, seeded, sgd, square, units


def enter(model: Tower) -> None:
    with fc.gathered(model):
        pass


CALLS: dict[str, tuple[Callable[[Tower], object], str]] = {
    "full_tensor": (lambda m: m.head.weight.full_tensor(), "gather 'head.weight'"),
    "gradient": (lambda m: m.head.weight.grad.full_tensor(), "gather 'head.weight'"),
    "sum": (lambda m: m.head.weight.sum(), "take the sum of 'head.weight'"),
    "norm": (lambda m: m.head.weight.norm(), "take the norm of order 2 of 'head.weight'"),
    "clip": (lambda m: fc.clip_grad_norm_(m, 1.0), "take "),
    "gathered": (enter, "gather unit 'Tower' for gathered"),
    "state_dict": (lambda m: fc.state_dict(m, "full"), "call state_dict"),
    "rank 0": (lambda m: fc.state_dict(m, "full", rank0_only=True), "call state_dict"),
    "iter_full": (lambda m: deque(fc.iter_full(m)), "call iter_full"),
    "apply": (lambda m: fc.apply(m, lambda part: None), "draw random numbers in apply on cpu"),
    "undo": (lambda m: fc.undo(m), "call undo"),
    "refresh": (lambda m: fc.refresh(m), "call refresh"),
    "load": (lambda m: fc.load_state_dict(m, fc.state_dict(m, "sharded")), "call load_state_dict"),
    "load_": (lambda m: m.load_state_dict(m.state_dict()), "call load_state_dict"),
    "optimizer": (lambda m: fc.optim_state_dict(m, sgd(m.parameters())), "call optim_state_dict"),
    "load optimizer": (
        lambda m: fc.load_optim_state_dict(m, o := sgd(m.parameters()), o.state_dict()),
        "call load_optim_state_dict",
    ),
    "save": (lambda m: fc.save_checkpoint("unused", m), "call save_checkpoint"),
    "load_checkpoint": (lambda m: fc.load_checkpoint("unused", m), "call load_checkpoint"),
    "save_full": (lambda m: fc.save_full("unused", m), "call save_full"),
    "load_full": (lambda m: fc.load_full("unused", m), "call load_full"),
    "fully_shard": (lambda m: fc.fully_shard(nn.Linear(4, 4)), "call fully_shard"),
    "owner_step": (lambda m: fc.owner_step(m.parameters(), sgd), "call owner_step"),
}


def train(model: Tower, optimizer: torch.optim.Optimizer, rank: int) -> None:
    square(model, data(0, rank)).backward()
    optimizer.step()
    optimizer.zero_grad()


def run_alone(rank: int) -> list[str]:
    """What the ranks say, call by call; each is followed by steps that are right."""
    model = by_block(seeded(Tower))
    optimizer = sgd(model.parameters())
    texts = []
    for call, _ in CALLS.values():
        train(model, optimizer, rank)
        square(model, data(0, rank)).backward()
        with pytest.raises(RuntimeError) as raised:
            call(model) if rank == 1 else square(model, data(0, rank)).backward()
        texts.append(str(raised.value))
        optimizer.zero_grad()
    train(model, optimizer, rank)
    return texts


@pytest.mark.parametrize("run", [run_ranks, simulate_ranks])
def test_every_rank_says_what_each_does(run: Callable[..., list[list[str]]]) -> None:
    first, second = run(run_alone, 2)
    assert first == second
    for (name, (_, purpose)), text in zip(CALLS.items(), first, strict=True):
        assert text.startswith("ranks do different things at the same time: rank 0 gathers"), name
        assert purpose in text and "rank 1 wants to " in text, (name, text)
        assert "on every rank" in text, name


def test_different_calls_are_named() -> None:
    """Neither is part of a step, and one is of the other's kind."""

    def ranks(rank: int) -> None:
        model = by_block(seeded(Tower))
        with pytest.raises(RuntimeError, match=r"wants to gather 'head\.bias'"):
            (model.head.weight if rank else model.head.bias).full_tensor()
        enter(model) if rank else fc.state_dict(model, "full")

    for text in rank_errors(ranks, 2):
        assert "rank 0 wants to call state_dict" in str(text)
        assert "where rank 1 wants to gather unit 'Tower' for gathered" in str(text)


@pytest.mark.parametrize("alone", [0, 3])
def test_ranks_of_other_groups_are_told(alone: int) -> None:
    """Those that share no group with the rank that calls alone, too; then all can go on."""

    def ranks(rank: int) -> str:
        strategy = fc.ShardingStrategy.HYBRID_SHARD
        model = by_block(seeded(Tower), mesh=mesh_of_replicas(2, 2), strategy=strategy)
        optimizer = sgd(model.parameters())
        train(model, optimizer, rank)
        with pytest.raises(RuntimeError, match="at the same time") as raised:
            model.head.weight.sum() if rank == alone else train(model, optimizer, rank)
        optimizer.zero_grad()
        train(model, optimizer, rank)
        return str(raised.value)

    texts = simulate_ranks(ranks, 4)
    assert any(f"rank {alone} wants to take the sum" in text for text in texts)


def test_a_group_of_two_engines_is_not_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    """One engine would tell ranks of its other groups of what the other engine disagreed about."""
    met: list[str] = []
    hear = heads.hearing
    monkeypatch.setattr(heads, "hearing", lambda *call: met.append(call[-1]) or hear(*call))

    def ranks(rank: int) -> None:
        mesh, hybrid = mesh_of_replicas(2, 2), fc.ShardingStrategy.HYBRID_SHARD
        first = fc.fully_shard(nn.Linear(4, 4), init="broadcast", mesh=mesh["shard"])
        first.weight.sum()
        second = fc.fully_shard(nn.Linear(4, 4), init="broadcast", mesh=mesh, strategy=hybrid)
        for model in (first, second):
            model.weight.norm()

    simulate_ranks(ranks, 4)
    assert [purpose for purpose in met if "take" in purpose] == ["take the sum of 'weight'"] * 4


def test_a_scope_that_one_rank_enters_again() -> None:
    """Its forward failed there, and the others are in their backward."""

    def ranks(rank: int) -> str:
        model = by_block(seeded(Tower))
        optimizer = sgd(model.parameters())

        def run(x: torch.Tensor) -> None:
            with fc.gathered(model):
                loss = square(model, x)
            loss.backward()

        if rank == 1:
            with pytest.raises(RuntimeError, match="shapes"):
                run(data(0, rank)[:, :1])
        with pytest.raises(RuntimeError, match="at the same time") as raised:
            run(data(0, rank))
        optimizer.zero_grad()
        train(model, optimizer, rank)
        return str(raised.value)

    for text in simulate_ranks(ranks):
        assert "rank 1 wants to gather unit 'Tower' for gathered" in text


def test_calls_on_every_rank_are_right_in_a_step() -> None:
    """Between a forward and its backward, and in hooks inside both."""

    def ranks(rank: int) -> list[torch.Tensor]:
        model = by_block(seeded(Tower))
        bias, seen = model.head.bias, []
        model.blocks[1].register_forward_hook(lambda *_: seen.append(bias.full_tensor()))
        model.blocks[0].up.weight.register_post_accumulate_grad_hook(
            lambda p: seen.append(p.grad.norm())
        )
        for _ in range(2):
            loss = square(model, data(0, rank))
            seen.append(model.blocks[0].up.weight.detach().sum())
            loss.backward()
        seen.append(bias.full_tensor())
        assert not any(log.events for unit in units(model) for log in unit.links.logs)
        return [torch.as_tensor(value).clone() for value in seen]

    first, second = run_ranks(ranks, 2)
    assert len(first) == 7
    for a, b in zip(first, second, strict=True):
        assert torch.equal(a, b)


def test_a_call_after_a_discard_waits_for_nothing() -> None:
    """In a step that another rank skips, until the error that said so leaves the step."""

    def ranks(rank: int) -> list[str]:
        model = by_block(seeded(Tower))
        errors: list[RuntimeError] = []
        with fc.skippable_step(model) as step:
            square(model, data(0, rank))
            if rank == 1:
                raise ValueError("a bad batch")
            for _ in range(2):
                try:
                    model.head.weight.norm()
                except RuntimeError as error:
                    errors.append(error)
            raise errors[0]
        assert step.skipped
        train(model, sgd(model.parameters()), rank)
        return [str(error) for error in errors]

    found = run_ranks(ranks, 2, timeout=20)[0]
    assert "discards this step" in found[0]
    assert "was to take the norm of order 2 of 'head.weight', but" in found[1]


@pytest.mark.parametrize("is_near", [True, False])
def test_a_call_is_made_again_after_an_interrupt(
    is_near: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It waits for the ranks that had not come, and for no message that came before Ctrl-C."""
    if not is_near:  # as between hosts
        for module in (heads, transports):
            monkeypatch.setattr(module, "segments_of", lambda group: None)

    def ranks(rank: int) -> Tensor:
        model = by_block(seeded(Tower))
        store = dist.distributed_c10d._get_default_store()
        if rank == 0:
            signal.signal(signal.SIGINT, signal.default_int_handler)
            threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGINT)).start()
            with pytest.raises(KeyboardInterrupt):
                model.head.weight.full_tensor()
            store.set("interrupted", "yes")
        elif is_near and rank == 2:  # rank 1 is there before the interrupt
            store.wait(["interrupted"])
        elif not is_near:  # gloo hears Ctrl-C when the first of its messages has come
            time.sleep(1.2 / rank)
        found = model.head.weight.full_tensor()
        train(model, sgd(model.parameters()), rank)
        return found

    wanted = seeded(Tower).head.weight
    for found in run_ranks(ranks, 3, timeout=20):
        assert torch.equal(found, wanted)


@pytest.mark.parametrize("dead", [1, 2])
def test_a_dead_rank_keeps_no_other_untold(dead: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A rank tells all its groups that it failed, also where it finds that one has lost a rank."""
    tell = comm.tell

    def tell_or_find(caller: Any, code: int, group: Group) -> Any:
        if dead in group.ranks:
            raise RuntimeError("has died")
        return tell(caller, code, group)

    def ranks(rank: int) -> None:
        mesh = mesh_of_replicas(2, 2)
        model = by_block(seeded(Tower), mesh=mesh, strategy=fc.ShardingStrategy.HYBRID_SHARD)
        if rank == 0:
            monkeypatch.setattr(comm, "tell", tell_or_find)
            units(model)[0].links.logs[0].announce_failure(0)
        elif rank != dead:  # rank 3 shares no group with rank 0
            text = "rank 0 failed inside" if rank < 3 else "rank 0 failed|does not answer"
            with pytest.raises(RuntimeError, match=text):
                square(model, data(0, rank)).backward()

    simulate_ranks(ranks, 4)


def test_a_transport_that_waits_begins_with_all_ranks() -> None:
    """A function of a user's own may wait for ranks that never come: they are heard before it."""

    def gather(whole: Tensor, parts: Any, own: Tensor, call: Any) -> Any:
        for work in AT_ONCE.gather(whole, parts, own, call).works:
            work.wait()
        return Started()

    def ranks(rank: int) -> None:
        mine = Transport(gather, PAIRS.reduce_scatter, PAIRS.all_reduce, PAIRS.exchange, True)
        model = by_block(seeded(Tower), transport=mine)
        square(model, data(0, rank)).backward()
        square(model, data(1, rank)) if rank else fc.state_dict(model, "full")

    for text in rank_errors(ranks, 2):
        assert text is not None and "rank 0 wants to call state_dict" in text, text
