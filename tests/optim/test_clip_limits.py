"""Ranks that clip to different limits raise, whoever clips: their weights would differ."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, distribute_tensor

import fsdp_compose as fc

from harness import simulate_ranks
from models import Tower, Twin, by_block, data, mesh_of_replicas, seeded, square, whole

Clip = Callable[[nn.Module, Any], torch.Tensor]


def clip_edited(model: nn.Module, limit: Any) -> torch.Tensor:
    """Torch's, after an edit, so that it takes the norms of gradients and not of buckets."""
    parameter = next(model.parameters())
    parameter.grad = torch.ones_like(parameter)
    return nn.utils.clip_grad_norm_(model.parameters(), limit)


WAYS: dict[str, Clip] = {
    "module": fc.clip_grad_norm_,
    "largest": lambda model, limit: fc.clip_grad_norm_(model.parameters(), limit, math.inf),
    "torch's": lambda model, limit: nn.utils.clip_grad_norm_(model.parameters(), limit),
    "edited": clip_edited,
    "one by one": lambda model, limit: nn.utils.clip_grad_norm_(
        model.parameters(), limit, foreach=False
    ),
}


def trained(rank: int, **options: Any) -> nn.Module:
    model = by_block(seeded(Tower), **options)
    square(model, data(0, rank)).backward()
    return model


@pytest.mark.parametrize("way", WAYS)
def test_ranks_clip_to_different_limits(way: str) -> None:
    """Each rank is told both limits, before any gradient is scaled."""

    def ranks(rank: int) -> None:
        model = trained(rank)
        text = rf"rank {rank} was to take .*to clip it to 0\.{rank + 1},.* of.* rank {1 - rank} .*"
        with pytest.raises(RuntimeError, match=text + rf"to clip it to 0\.{2 - rank},"):
            WAYS[way](model, 0.1 + rank / 10)

    simulate_ranks(ranks)


def test_limits_differ_with_deterministic() -> None:
    def ranks(rank: int) -> None:
        model = trained(rank, deterministic=2)
        with pytest.raises(RuntimeError, match="to clip it to 0"):
            fc.clip_grad_norm_(model, 0.1 + rank / 10)

    simulate_ranks(ranks)


def test_copies_beside_deterministic_have_a_norm_apart() -> None:
    """What tensor parallelism left whole would count once for each rank that has it."""

    def ranks(rank: int) -> None:
        model, mesh = trained(rank, deterministic=2), init_device_mesh("cpu", (2,))
        copied = nn.Parameter(distribute_tensor(torch.ones(4), mesh, [Replicate()]))
        copied.grad = torch.ones_like(copied)
        text = "parameter 0 of those that are not sharded is split .* take its norm apart"
        with pytest.raises(ValueError, match=text):
            fc.grad_norm([*model.parameters(), copied])
        assert fc.grad_norm([copied]) == 2

    simulate_ranks(ranks)


def test_one_rank_clips_and_another_measures() -> None:
    """``grad_norm`` on one rank does not answer ``clip_grad_norm_`` on another."""

    def ranks(rank: int) -> None:
        model = trained(rank)
        with pytest.raises(RuntimeError, match=r"of order 2, to clip it to 0\.1, of"):
            fc.grad_norm(model) if rank else fc.clip_grad_norm_(model, 0.1)

    simulate_ranks(ranks)


def test_one_rank_alone_clips_many_parameters() -> None:
    """The error says what the others do, and lists no 120 names before that."""

    def ranks(rank: int) -> None:
        torch.manual_seed(0)
        model = fc.fully_shard(nn.Sequential(*(nn.Linear(2, 2) for _ in range(60))))
        model(torch.ones(1, 2)).sum().backward()
        with pytest.raises(RuntimeError, match="where rank 1 gathers unit") as caught:
            model(torch.ones(1, 2)) if rank else fc.clip_grad_norm_(model, 1.0)
        assert len(str(caught.value)) < 1000

    simulate_ranks(ranks)


def test_text_on_one_rank_is_another_limit() -> None:
    """It reads like the number, and dividing it would raise on that rank alone."""

    def ranks(rank: int) -> None:
        model, limit = trained(rank), "0.1" if rank else 0.1
        with pytest.raises(RuntimeError, match=r"to clip it to '0\.1'"):
            fc.clip_grad_norm_(model, limit)  # type: ignore[arg-type]

    simulate_ranks(ranks)


@pytest.mark.parametrize("way", ["ours", "torch's"])
def test_one_rank_asks_for_finite_norms(way: str) -> None:
    """It would raise where the others go on."""
    clip = fc.clip_grad_norm_ if way == "ours" else nn.utils.clip_grad_norm_

    def ranks(rank: int) -> None:
        model = trained(rank)
        with pytest.raises(
            RuntimeError, match=r"to clip it to 0\.1 or raise where it is not finite"
        ):
            clip(model.parameters(), 0.1, error_if_nonfinite=bool(rank))

    simulate_ranks(ranks)


LIMITS = {"int": 1, "float": 1.0, "tensor": torch.tensor(1.0)}


@pytest.mark.parametrize("kind", LIMITS)
def test_equal_limits_of_other_types_are_equal(kind: str) -> None:
    def ranks(rank: int) -> None:
        twin = Twin(rank, 2, Tower)
        twin.backward(square, 0)
        fc.clip_grad_norm_(twin.model, LIMITS[kind] if rank else 1.0)
        nn.utils.clip_grad_norm_(twin.reference.parameters(), 1.0)
        twin.step()
        twin.check()

    simulate_ranks(ranks)


@pytest.mark.parametrize("norm", [1.0, 2.0, math.inf])
def test_deterministic_norms_over_several_meshes(norm: float) -> None:
    """Units over different groups of the same ranks."""

    def ranks(rank: int) -> None:
        plain, model = seeded(lambda: Tower(2)), seeded(lambda: Tower(2))
        mesh, many = mesh_of_replicas(2, 2), {"deterministic": 4}
        fc.fully_shard(
            model.blocks[0], mesh=mesh, strategy=fc.ShardingStrategy.HYBRID_SHARD, **many
        )
        fc.fully_shard(
            model.blocks[1], mesh=mesh, strategy=fc.ShardingStrategy.HYBRID_SHARD_OPTIMIZER, **many
        )
        fc.fully_shard(model, **many)
        square(model, data(0, rank)).backward()
        for other in range(4):
            (square(plain, data(0, other)) / 4).backward()
        wanted = nn.utils.clip_grad_norm_(plain.parameters(), 0.1, norm)
        clip = fc.clip_grad_norm_ if norm == 1.0 else nn.utils.clip_grad_norm_
        torch.testing.assert_close(clip(list(model.parameters()), 0.1, norm), wanted)
        for p, q in zip(model.parameters(), plain.parameters(), strict=True):
            torch.testing.assert_close(whole(p.grad), q.grad)

    simulate_ranks(ranks, 4)


@pytest.mark.parametrize("options", [{}, {"deterministic": 1}], ids=["usual", "deterministic"])
def test_gradients_of_two_dtypes_and_no_number(options: dict[str, Any]) -> None:
    """Torch asks for the norm of each dtype's gradients: as many of one as of the other."""

    class Both(nn.Sequential):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self[1](self[0](x).double())

    plain, sharded = (seeded(lambda: Both(nn.Linear(4, 4), nn.Linear(4, 4))) for _ in range(2))
    for model in (plain, sharded):
        model[0].float()
    fc.fully_shard(sharded, **options)
    for model in (plain, sharded):
        model(torch.ones(2, 4)).square().sum().backward()
    params = list(sharded.parameters())
    norms = [nn.utils.clip_grad_norm_(m.parameters(), 1.0) for m in (plain, sharded)]
    torch.testing.assert_close(*norms, check_dtype=False)
    for one, other in zip(plain.parameters(), params, strict=True):
        torch.testing.assert_close(whole(other.grad), one.grad)
    for number in (math.inf, math.nan):
        params[0].grad.fill_(number)
        found = float(fc.grad_norm(params))
        assert found == number or (math.isnan(found) and math.isnan(number))


def test_a_parameter_that_is_listed_twice() -> None:
    """Counts twice, as torch counts it."""
    plain, sharded = (
        seeded(lambda: nn.Linear(4, 4)),
        fc.fully_shard(seeded(lambda: nn.Linear(4, 4))),
    )
    for model in (plain, sharded):
        model(torch.ones(1, 4, dtype=torch.float64)).square().sum().backward()
    wanted = nn.utils.get_total_norm([p.grad for p in [*plain.parameters(), plain.weight]])
    torch.testing.assert_close(fc.grad_norm([*sharded.parameters(), sharded.weight]), wanted)
