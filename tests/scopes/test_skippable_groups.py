"""A step that is discarded, where ranks are in other groups, or each has its own reason."""

from __future__ import annotations

import pytest
import torch.distributed as dist
from torch import nn

from fsdp_compose import fully_shard, set_gradient_divide_factor, skippable_step

from harness import simulate_ranks
from models import WIDTH, data, seeded, sgd

RANKS = 3


def run_steps(model: nn.Module, rank: int, failing: tuple[int, ...]) -> dict[int, str]:
    """A step that the ranks ``failing`` discard, then one that is kept; the reasons."""
    with skippable_step(model) as step:
        model(data(0, rank)).sum().backward()
        if rank in failing:
            step.discard(f"rank {rank} said so")
    with skippable_step(model) as kept:
        model(data(0, rank)).sum().backward()
    assert step.skipped == bool(failing) and not kept.skipped and not kept.reasons
    return step.reasons


@pytest.mark.parametrize("failing", [(), (0,), (2,), (0, 1, 2)])
@pytest.mark.parametrize("has_experts", [False, True])
def test_every_rank_knows_all_reasons(has_experts: bool, failing: tuple[int, ...]) -> None:
    """Also where experts are spread over two ranks, and whole on the third."""

    def ranks(rank: int) -> dict[int, str]:
        pair = dist.new_group([0, 1])
        dense, expert = (seeded(lambda: nn.Linear(WIDTH, WIDTH)) for _ in range(2))
        fully_shard(dense)
        if has_experts:
            fully_shard(expert, mesh=pair if rank < 2 else "self")
            set_gradient_divide_factor(expert, RANKS)
        return run_steps(nn.Sequential(dense, expert) if has_experts else dense, rank, failing)

    wanted = {rank: f"rank {rank} said so" for rank in failing}
    assert simulate_ranks(ranks, RANKS) == [wanted] * RANKS


def test_groups_are_met_in_one_order() -> None:
    """Whatever the order of a model's parts is on each rank."""

    def ranks(rank: int) -> dict[int, str]:
        pairs = [dist.new_group([0, 1]), dist.new_group([2, 3])]
        parts = {name: seeded(lambda: nn.Linear(WIDTH, WIDTH)) for name in ("dense", "expert")}
        fully_shard(parts["dense"])
        fully_shard(parts["expert"], mesh=pairs[rank // 2])
        set_gradient_divide_factor(parts["expert"], 4)
        model = nn.ModuleDict(dict(reversed(parts.items())) if rank % 2 else parts)
        with skippable_step(model) as step:
            parts["expert"](parts["dense"](data(0, rank))).sum().backward()
            if rank == 2:
                step.discard("rank 2 said so")
        return step.reasons

    assert simulate_ranks(ranks, 4) == [{2: "rank 2 said so"}] * 4


@pytest.mark.parametrize("how", ["raise", "nan", "late", "keep"])
@pytest.mark.parametrize("bad", [0, 1])
def test_groups_that_overlap(how: str, bad: int) -> None:
    """Of ranks 0 to 3 each but the first and the last is in two groups, and all skip alike."""

    def ranks(rank: int) -> list[list[int]]:
        pairs = [dist.new_group([first, first + 1]) for first in range(3)]
        parts = nn.ModuleList()
        for first in range(3):
            if rank in (first, first + 1):
                part = fully_shard(seeded(lambda: nn.Linear(WIDTH, WIDTH)), mesh=pairs[first])
                set_gradient_divide_factor(part, 4)
                parts.append(part)
        found: list[list[int]] = []
        for seed in range(3):
            fails = seed == 1 and rank == bad
            with skippable_step(parts, finite_gradients=True) as step:
                if fails and how == "raise":
                    raise ValueError(how)
                x = data(seed, rank) * (float("nan") if fails and how == "nan" else 1.0)
                sum(part(x).square().mean() for part in parts).backward()
                if fails and how == "late":
                    raise ValueError(how)
            found.append(sorted(step.reasons))
            parts.zero_grad()
        return found

    hears = {"keep": [], "nan": [r for r in range(4) if abs(r - bad) < 2]}.get(how, [bad])
    assert simulate_ranks(ranks, 4) == [[[], hears, []]] * 4


def test_a_step_inside_that_one_rank_left_out() -> None:
    """The scope puts no weights back: every rank raises in the next step, not where all stepped."""

    def ranks(rank: int, before: bool) -> None:
        model = fully_shard(seeded(lambda: nn.Linear(WIDTH, WIDTH)))
        optim = sgd(model.parameters())

        def run(fails: bool) -> bool:
            with skippable_step(model) as step:
                model(data(0, rank)).sum().backward()
                if fails and before:
                    raise ValueError("before the step")
                optim.step()
                if fails:
                    raise ValueError("after the step")
            return step.skipped

        assert [run(False), run(False), run(rank == 0)] == [False, False, True]
        if before:
            with pytest.raises(RuntimeError, match=r"step\(\) was left out on rank 0 before step"):
                run(False)
        else:
            assert not run(False)

    for before in (True, False):
        simulate_ranks(ranks, 2, before)
