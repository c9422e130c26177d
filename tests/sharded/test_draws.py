"""Random numbers of sharded tensors are those of the whole, on every mesh and for every seed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

import fsdp_compose as fc
from fsdp_compose.sharded import ShardedWeightError, is_sharded
from fsdp_compose.simulation import simulate

SIZES = ((5, 3), (40, 7), (3,), (), (2, 3, 2))
FILLS: dict[str, Callable[[Any], Any]] = {
    "normal_": lambda t: t.normal_(1.0, 2.0),
    "uniform_": lambda t: t.uniform_(-1, 1),
    "bernoulli_": lambda t: t.bernoulli_(0.3),
    "exponential_": lambda t: t.exponential_(0.5),
    "cauchy_": lambda t: t.cauchy_(),
    "log_normal_": lambda t: t.log_normal_(),
    "geometric_": lambda t: t.geometric_(0.4),
    "random_": lambda t: t.random_(0, 9),
    "data.normal_": lambda t: t.data.normal_(),
    "init.normal_": lambda t: nn.init.normal_(t, std=0.02),
    "init.uniform_": lambda t: nn.init.uniform_(tensor=t, a=-2.0),
    "init.trunc_normal_": lambda t: nn.init.trunc_normal_(t, std=0.5),
    "noise": lambda t: t.add_(torch.randn_like(t), alpha=0.1),
    "rand_like": lambda t: t.copy_(torch.rand_like(t)),
    "randint_like": lambda t: t.copy_(torch.randint_like(input=t, high=9)),
    "bernoulli": lambda t: t.copy_(torch.bernoulli(torch.full_like(t, 0.3))),
    "generator": lambda t: t.normal_(generator=torch.Generator().manual_seed(3)),
}
OF_MATRICES: dict[str, Callable[[Any], Any]] = {
    "kaiming_uniform_": lambda t: nn.init.kaiming_uniform_(t, a=5**0.5),
    "kaiming_normal_": nn.init.kaiming_normal_,
    "xavier_uniform_": nn.init.xavier_uniform_,
    "xavier_normal_": nn.init.xavier_normal_,
}


class Values(nn.Module):
    """A parameter of each shape, one of them stored by columns."""

    def __init__(self) -> None:
        super().__init__()
        self.values = nn.ParameterList(nn.Parameter(torch.zeros(size)) for size in SIZES)
        self.columns = nn.Parameter(torch.zeros(6, 5).t())

    def forward(self) -> Tensor:
        return torch.stack([value.sum() for value in self.parameters()]).sum()


def fill(module: nn.Module, call: Callable[[Any], Any], least: int = 0) -> None:
    with torch.no_grad():
        for param in module.parameters():
            if param.ndim >= least:
                call(param)


def wholes(module: nn.Module) -> dict[str, Tensor]:
    """Plain copies of all parameters."""
    return {
        name: (p.full_tensor() if is_sharded(p) else p).detach().clone()
        for name, p in module.named_parameters()
    }


@pytest.mark.parametrize("world", [1, 2, 3])
@pytest.mark.parametrize("seed", [0, 100])
def test_each_function_draws_what_one_process_would(world: int, seed: int) -> None:
    """With one seed on all ranks, and with one for each: then all draw what the first would."""

    def ranks(call: Callable[[Any], Any], least: int) -> dict[str, Tensor]:
        model = fc.fully_shard(Values())
        torch.manual_seed(seed * dist.get_rank())
        fill(model, call, least)
        return wholes(model)

    for name, call in (FILLS | OF_MATRICES).items():
        least = 2 if name in OF_MATRICES else 0
        plain = Values()
        torch.manual_seed(0)
        fill(plain, call, least)
        for found in simulate(ranks, world, call, least):
            for key, value in wholes(plain).items():
                assert torch.equal(found[key], value), (name, key)


def test_generators_go_on_as_in_one_process_or_apart() -> None:
    """Ranks seeded alike stay alike; ranks seeded apart keep the streams that they have."""

    def ranks(apart: bool) -> tuple[Tensor, Tensor]:
        model = fc.fully_shard(Values())
        torch.manual_seed(dist.get_rank() if apart else 0)
        fill(model, lambda t: t.normal_())
        like = torch.randn_like(next(model.parameters()))
        local = like.to_local()
        assert local.untyped_storage().nbytes() == local.nbytes  # not of the whole
        return torch.rand(3), torch.initial_seed()

    plain = Values()
    torch.manual_seed(0)
    fill(plain, lambda t: t.normal_())
    torch.randn_like(next(plain.parameters()))
    wanted = torch.rand(3)
    assert all(torch.equal(found, wanted) for found, _ in simulate(ranks, 3, False))
    first, *others = simulate(ranks, 3, True)
    assert torch.equal(first[0], wanted)
    for rank, (found, seed) in enumerate(others, 1):
        assert seed == rank
        assert torch.equal(found, torch.rand(3, generator=torch.Generator().manual_seed(rank)))


def test_replicas_and_parts_draw_the_same_whole() -> None:
    """On a hybrid mesh, and where tensor parallelism split parameters, with a seed for each."""

    def hybrid() -> dict[str, Tensor]:
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
        strategy = fc.ShardingStrategy.HYBRID_SHARD
        model = fc.fully_shard(Values(), mesh=mesh, strategy=strategy)
        torch.manual_seed(dist.get_rank())
        fill(model, lambda t: t.normal_())
        return wholes(model)

    def split() -> dict[str, Tensor]:
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        model = nn.Sequential(nn.Linear(6, 4), nn.LayerNorm(4))
        parallelize_module(model, mesh["tp"], {"0": ColwiseParallel()})
        fc.fully_shard(model, mesh=mesh["dp"])
        torch.manual_seed(dist.get_rank())
        fill(model, lambda t: t.normal_())
        return wholes(model)

    for ranks, plain in (
        (hybrid, Values()),
        (split, nn.Sequential(nn.Linear(6, 4), nn.LayerNorm(4))),
    ):
        torch.manual_seed(0)
        fill(plain, lambda t: t.normal_())
        for found in simulate(ranks, 4):
            for key, value in wholes(plain).items():
                assert torch.equal(found[key], value), key


def test_modules_are_reset_after_sharding() -> None:
    """``reset_parameters`` and ``init_weights`` after ``to_empty``, as scripts for FSDP2 do."""

    def build() -> nn.Module:
        return nn.Sequential(
            nn.Linear(6, 5), nn.LayerNorm(5), nn.Conv1d(4, 3, 2), nn.GRU(4, 5), nn.Embedding(9, 4)
        )

    def reset(model: nn.Module) -> None:
        for module in model.modules():
            if module is not model and hasattr(module, "reset_parameters"):
                module.reset_parameters()

    def ranks(on_meta: bool) -> dict[str, Tensor]:
        with torch.device("meta" if on_meta else "cpu"):
            model = build()
        fc.fully_shard(model, units=fc.wrap.by_class({nn.Linear, nn.GRU}))
        model.to_empty(device="cpu")
        torch.manual_seed(5)
        reset(model)
        return wholes(model)

    plain = build()
    torch.manual_seed(5)
    reset(plain)
    for on_meta in (False, True):
        for found in simulate(ranks, 2, on_meta):
            for key, value in wholes(plain).items():
                assert torch.equal(found[key], value), key


def test_what_is_drawn_reaches_training() -> None:
    """A kept unit reads what was drawn, and noise on gradients is added like any other."""

    def train(model: nn.Module, x: Tensor) -> None:
        model(x).square().mean().backward()
        for param in model.parameters():
            assert param.grad is not None
            param.grad.add_(torch.randn_like(param.grad), alpha=0.1)
        with torch.no_grad():
            for param in model.parameters():
                param.sub_(param.grad, alpha=0.1)

    def ranks() -> dict[str, Tensor]:
        model = nn.Linear(6, 5)
        fc.fully_shard(model, reshard_after_forward=False)
        fc.set_reshard_after_backward(model, False)
        torch.manual_seed(1)
        model(x)
        fill(model, lambda t: t.normal_())
        train(model, x)
        return wholes(model)

    x = torch.arange(12.0).view(2, 6)
    plain = nn.Linear(6, 5)
    torch.manual_seed(1)
    fill(plain, lambda t: t.normal_())
    train(plain, x)
    for found in simulate(ranks, 2):
        for key, value in wholes(plain).items():
            torch.testing.assert_close(found[key], value)


def test_what_cannot_be_drawn_is_refused() -> None:
    """Ranks that draw for different parameters, sharded numbers to draw with, another device."""

    def different() -> None:
        model = fc.fully_shard(Values())
        params = list(model.parameters())
        with torch.no_grad():
            params[dist.get_rank()].normal_()

    with pytest.raises(RuntimeError, match="draw normal_ for"):
        simulate(different, 2)

    def ranks() -> None:
        param = next(iter(fc.fully_shard(Values()).parameters()))
        with pytest.raises(RuntimeError, match="leaf Variable"):
            param.normal_()
        for call in (
            lambda: torch.zeros(5, 3).bernoulli_(param.detach()),
            lambda: param.detach().bernoulli_(param.detach()),
            lambda: torch.randn_like(param, device="meta"),
        ):
            with pytest.raises(ShardedWeightError):
                call()
        drawn = torch.randn_like(param, dtype=torch.float64, requires_grad=True)
        assert drawn.dtype == torch.float64 and drawn.requires_grad and is_sharded(drawn)

    simulate(ranks, 2)
