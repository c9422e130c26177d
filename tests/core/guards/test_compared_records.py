"""Ranks that did other things to the weights save nothing: they would keep parts of each."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import fsdp_compose as fc

from harness import run_ranks, simulate_ranks
from models import Tower, by_block, data, mesh_of_replicas, seeded, sgd, square

Optimizer = torch.optim.Optimizer


def leave_out(model: Tower, optimizer: Optimizer, rank: int) -> None:
    if rank == 0:
        optimizer.step()


def write(model: Tower, optimizer: Optimizer, rank: int) -> None:
    if rank == 0:
        with torch.no_grad():
            model.head.weight.zero_()


def other_rate(model: Tower, optimizer: Optimizer, rank: int) -> None:
    optimizer.param_groups[0]["lr"] = 0.1 * (rank + 1)
    optimizer.step()


def clear_one(model: Tower, optimizer: Optimizer, rank: int) -> None:
    if rank == 0:
        model.first.weight.grad = None
    optimizer.step()


def scale_one(model: Tower, optimizer: Optimizer, rank: int) -> None:
    if rank == 0:
        model.head.weight.grad.mul_(2)
    optimizer.step()


DONE: dict[str, tuple[Callable[[Tower, Optimizer, int], None], str]] = {
    "leave out": (leave_out, "optimizer.step() was left out on rank 1"),
    "write": (write, "ranks wrote in their own ways"),
    "other rate": (other_rate, "had settings that differ between ranks"),
    "clear one": (clear_one, "had settings that differ between ranks"),
    "scale one": (scale_one, "ranks wrote in their own ways"),
}

CALLS: dict[str, Callable[[Tower, Optimizer, Path], Any]] = {
    "save_checkpoint": lambda m, o, path: fc.save_checkpoint(path / "a", m),
    "save_full": lambda m, o, path: fc.save_full(path / "b", m),
    "state_dict": lambda m, o, path: fc.state_dict(m),
    "iter_full": lambda m, o, path: deque(fc.iter_full(m)),
    "undo": lambda m, o, path: fc.undo(m),
}


def train(model: Tower, rank: int, step: Callable[[], object]) -> None:
    square(model, data(0, rank)).backward()
    step()


def ask(call: str, model: Tower, optimizer: Optimizer, path: Path) -> str:
    with pytest.raises(RuntimeError) as raised:
        CALLS[call](model, optimizer, path)
    return str(raised.value)


@pytest.mark.parametrize("done", DONE)
def test_no_weights_leave_that_ranks_made_differently(done: str, tmp_path: Path) -> None:
    """Every call says what was done, and so does the next step."""
    act, text = DONE[done]

    def ranks(rank: int) -> list[str]:
        model = by_block(seeded(Tower))
        optimizer = sgd(model.parameters())
        train(model, rank, optimizer.step)
        optimizer.zero_grad()
        model.head.bias.full_tensor()  # is in no step
        train(model, rank, lambda: act(model, optimizer, rank))
        model.head.bias.full_tensor()
        texts = [ask(call, model, optimizer, tmp_path) for call in CALLS]
        with pytest.raises(RuntimeError) as raised:
            square(model, data(0, rank)).backward()
        return [*texts, str(raised.value)]

    for texts in simulate_ranks(ranks):
        for call, found in zip(CALLS, texts, strict=False):
            assert f"{call}: " in found and text in found, (call, found)
        assert text in texts[-1] or "cleared on some ranks only" in texts[-1]
    assert not list(tmp_path.glob("*/*"))


def test_torchs_own_state_dict_compares_too() -> None:
    def ranks(rank: int) -> str:
        model = by_block(seeded(Tower))
        optimizer = sgd(model.parameters())
        train(model, rank, lambda: leave_out(model, optimizer, rank))
        with fc.state_dict_type(model, "full"), pytest.raises(RuntimeError) as raised:
            model.state_dict()
        return str(raised.value)

    for text in run_ranks(ranks, 2):
        assert text.startswith("state_dict: optimizer.step() was left out on rank 1"), text


@pytest.mark.parametrize("rank_alone", [1, 2])
def test_ranks_of_other_groups_save_nothing_either(rank_alone: int, tmp_path: Path) -> None:
    def ranks(rank: int) -> list[str]:
        strategy = fc.ShardingStrategy.HYBRID_SHARD
        model = by_block(seeded(Tower), mesh=mesh_of_replicas(2, 2), strategy=strategy)
        optimizer = sgd(model.parameters())
        train(model, rank, lambda: rank == rank_alone or optimizer.step())
        return [ask(call, model, optimizer, tmp_path) for call in CALLS]

    for texts in simulate_ranks(ranks, 4):
        assert all(f"left out on rank {rank_alone} before" in text for text in texts), texts


def test_units_over_other_groups_are_compared_too(tmp_path: Path) -> None:
    """Each of two meshes has a list of its own, and ranks that share one of them hear of either."""

    def ranks(rank: int) -> list[str]:
        model = seeded(Tower)
        for block in model.blocks:
            fc.fully_shard(block, mesh=mesh_of_replicas(2, 2)["shard"])  # of two ranks alone
            fc.set_gradient_divide_factor(block, 4)
        fc.fully_shard(model)
        optimizer = sgd(model.parameters())
        texts = []
        for part in (model.head, model.blocks[1].up):
            train(model, rank, optimizer.step)
            optimizer.zero_grad()
            if rank == 3:
                with torch.no_grad():
                    part.weight.zero_()
            texts.append(ask("state_dict", model, optimizer, tmp_path))
            with pytest.raises(RuntimeError):
                square(model, data(0, rank)).backward()
            optimizer.zero_grad()
        return texts

    for head, block in simulate_ranks(ranks, 4):
        assert "wrote in their own ways" in head and "head.weight" in head
        assert "wrote in their own ways" in block and "blocks.1.up.weight" in block


def test_what_all_ranks_did_alike_is_saved(tmp_path: Path) -> None:
    """Between steps, between a forward and its backward, and in the middle of accumulating."""

    def ranks(rank: int) -> list[Tensor]:
        model = by_block(seeded(Tower))
        optimizer = sgd(model.parameters())
        found = []
        for step in range(3):
            with fc.no_sync(model) if step == 1 else nullcontext():
                loss = square(model, data(step, rank))
                found.append(fc.state_dict(model)["head.weight"])
                loss.backward()
            fc.save_full(tmp_path / "saved", model)
            with torch.no_grad():
                model.first.bias.add_(1)
            if step != 1:
                optimizer.step()
            fc.verify_replicas(model)
            found.append(fc.state_dict(model)["head.weight"])
        deque(fc.iter_full(model))
        fc.undo(model)
        return [*found, model.head.weight.detach()]

    first, second = run_ranks(ranks, 2)
    for a, b in zip(first, second, strict=True):
        assert torch.equal(a, b)


def test_ranks_with_units_over_other_groups_too(tmp_path: Path) -> None:
    """A part over some ranks alone is compared among them, and all hear of it."""

    def ranks(rank: int) -> list[str]:
        found = []
        for call in CALLS:
            if call == "save_full":
                continue  # it refuses what some ranks alone hold
            model, some = nn.Module(), dist.new_group([0, 1])
            model.all = by_block(seeded(Tower))
            if rank < 2:
                model.some = by_block(seeded(Tower), mesh=some)
            found.append(type(CALLS[call](model, None, tmp_path / call)).__name__)
            if call == "undo":
                continue
            if rank == 1:
                with torch.no_grad():
                    model.some.head.weight.zero_()
            with pytest.raises(RuntimeError, match="wrote in their own ways"):
                CALLS[call](model, None, tmp_path / call)
        return found

    results = run_ranks(ranks, 3, timeout=40)
    assert results[0] == results[1] == results[2]


def test_an_error_in_between_hides_nothing(tmp_path: Path) -> None:
    """A call on one rank alone, whose error is caught, comes before the save."""

    def ranks(rank: int) -> list[str]:
        model = by_block(seeded(Tower))
        optimizer = sgd(model.parameters())
        train(model, rank, lambda: leave_out(model, optimizer, rank))
        optimizer.zero_grad()
        with pytest.raises(RuntimeError, match="at the same time"):
            model.head.weight.norm() if rank else square(model, data(0, rank))
        return [ask(call, model, optimizer, tmp_path) for call in CALLS]

    for texts in run_ranks(ranks, 2):
        assert all("left out on rank 1" in text for text in texts), texts


def test_gradients_of_a_skipped_step_are_forgotten(tmp_path: Path) -> None:
    """What one rank alone did to them is undone with the step."""

    def ranks(rank: int) -> None:
        model = by_block(seeded(Tower))
        optimizer = sgd(model.parameters())
        with fc.skippable_step(model) as step:
            square(model, data(0, rank)).backward()
            if rank == 0:
                model.first.weight.grad.fill_(torch.nan)
            step.check(model.first.weight.grad.sum())
        assert step.skipped
        train(model, rank, optimizer.step)
        fc.save_full(tmp_path, model)

    run_ranks(ranks, 2)
