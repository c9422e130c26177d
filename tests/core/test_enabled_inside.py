"""Gradients that are turned on inside a forward under ``no_grad`` train, as in a plain module."""

from __future__ import annotations

import copy
import gc
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor.parallel import loss_parallel
from torch.nn.functional import cross_entropy, linear
from torch.testing import assert_close
from torch.utils.checkpoint import checkpoint

from fsdp_compose import MixedPrecision, count_traffic, fully_shard, reshard, wrap

from harness import run_ranks, simulate_ranks
from models import WIDTH, Tower, assert_at_rest, data, seeded, sgd, units, units_by_name, whole
from tp_models import language_model, mean_cross_entropy, mesh_of, sharded_lm, tokens_of
from tp_models import whole as whole_of_both

RELEASED = {"reshard_after_forward": True}


class Probe(nn.Module):
    """Computes features as it is called, and trains what follows them with gradients."""

    def __init__(self, inside: bool = True) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(2))
        self.inside, self.kept, self.penalty = inside, [None], False

    def forward(self, x: Tensor) -> Tensor:
        features = self.blocks[0](torch.tanh(self.first(x)))
        with torch.enable_grad():
            inner = torch.tanh(self.first(features))
            loss = self.last(torch.tanh(self.blocks[1](inner))).square().mean()
            self.kept[0] = inner
            if self.penalty:
                (slope,) = torch.autograd.grad(loss, inner, create_graph=True)
                loss = loss + slope.square().sum()
            if self.inside:
                loss.backward()
        return loss


def shard(plain: nn.Module, **options: Any) -> nn.Module:
    kinds = wrap.by_fn(lambda name, module: "blocks." in name)
    return fully_shard(copy.deepcopy(plain), units=kinds, **options)


def assert_same(model: nn.Module, plain: nn.Module, ranks: int = 2, **tolerance: Any) -> None:
    for (name, found), wanted in zip(model.named_parameters(), plain.parameters(), strict=True):
        assert (found.grad is None) == (wanted.grad is None), name
        if wanted.grad is not None:
            assert_close(whole(found.grad), wanted.grad / ranks, **tolerance)


@pytest.mark.parametrize("inside", [True, False])
@pytest.mark.parametrize("options", [{}, RELEASED, {"static_buffers": True}], ids=str)
def test_backward_inside_and_after_the_forward(inside: bool, options: dict[str, Any]) -> None:
    def ranks(rank: int) -> None:
        plain = seeded(lambda: Probe(inside))
        model = shard(plain, **options)
        seen: list[Tensor] = []
        model.first.weight.register_hook(seen.append)
        for step in range(3):
            for parameter in (*model.parameters(), *plain.parameters()):
                parameter.grad = None
            for seed in (step, step + 5):
                with torch.no_grad():
                    found = model(data(seed, rank))
                    wanted = [plain(data(seed, r)) for r in range(2)]
                for loss in () if inside else (found, *wanted):
                    loss.backward()
                assert_close(found.detach(), wanted[rank].detach())
            assert_same(model, plain)
            with torch.no_grad():
                for parameter in (*model.parameters(), *plain.parameters()):
                    parameter.mul_(0.9)
        assert len(seen) == 6
        reshard(model)
        assert_at_rest(model)

    run_ranks(ranks)


@pytest.mark.parametrize("reentrant", [False, True])
def test_a_checkpointed_part_is_recomputed(reentrant: bool) -> None:
    """In a backward after the forward, which shows the unit's modules what that read."""

    class Part(Probe):
        def forward(self, x: Tensor) -> Tensor:
            features = self.blocks[0](torch.tanh(self.first(x)))
            with torch.enable_grad():
                features.requires_grad_()
                inner: Any = checkpoint(self.first, features, use_reentrant=reentrant)
                return self.last(torch.tanh(inner)).square().mean()

    def ranks(rank: int) -> None:
        plain = seeded(Part)
        model = shard(plain, **RELEASED)
        for step in range(3):
            for parameter in (*model.parameters(), *plain.parameters()):
                parameter.grad = None
            with torch.no_grad():
                losses = [model(data(step, rank)), *(plain(data(step, r)) for r in range(2))]
            for loss in losses:
                loss.backward()
            assert_same(model, plain)
            sgd(model.parameters()).step()
            for parameter in plain.parameters():
                if parameter.grad is not None:
                    parameter.grad /= 2
            sgd(plain.parameters()).step()

    simulate_ranks(ranks)


@pytest.mark.filterwarnings("ignore:Using backward")
@pytest.mark.parametrize("inside", [True, False])
def test_a_graph_over_its_gradients(inside: bool) -> None:
    def ranks(rank: int) -> None:
        plain = seeded(lambda: Probe(inside))
        plain.penalty = True
        model = shard(plain, **RELEASED)
        for step in range(2):
            with torch.no_grad():
                found = model(data(step, rank))
                wanted = [plain(data(step, r)) for r in range(2)]
            while wanted and not inside:
                wanted.pop().backward(create_graph=True)
            if not inside:
                found.backward(create_graph=True)
            assert_same(model, plain)
            for parameter in (*model.parameters(), *plain.parameters()):
                parameter.grad = None
        del found
        model.kept[0], model.penalty = None, False
        gc.collect()
        for seed in range(2):  # the first replaces what the inner unit computed with
            with torch.no_grad():
                model(data(seed, rank))
        reshard(model)
        assert_at_rest(model)

    simulate_ranks(ranks)


def test_a_backward_from_what_the_forward_kept() -> None:
    def ranks(rank: int) -> None:
        plain = seeded(Probe)
        plain.inside = False
        model = shard(plain, **RELEASED)
        seen: list[Tensor] = []
        model.first.weight.register_hook(seen.append)
        for step in range(3):
            with torch.no_grad():
                model(data(step, rank))
            for r in range(2):
                with torch.no_grad():
                    plain(data(step, r))
                (plain.kept[0].sum() + plain.first.weight.square().sum()).backward()
            (model.kept[0].sum() + model.first.weight.square().sum()).backward()
            assert_same(model, plain)
            assert len(seen) == step + 1  # a hook gets the sum

    simulate_ranks(ranks)


class Field(nn.Module):
    """A force field: its forward differentiates an energy by positions, also in evaluation."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.energy = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 1)

    def forward(self, positions: Tensor) -> Tensor:
        with torch.enable_grad():
            positions = positions.detach().requires_grad_()
            energy = self.energy(torch.tanh(self.body(positions))).sum()
            return torch.autograd.grad(energy, positions)[0]


def test_forces_of_an_evaluation_reduce_nothing() -> None:
    def ranks(rank: int) -> None:
        plain = seeded(Field)
        model = fully_shard(copy.deepcopy(plain), units=wrap.by_class({nn.Linear}))
        with torch.no_grad():
            model(data(0, rank))
            with count_traffic() as traffic:
                forces = model(data(0, rank))
        assert_close(forces, plain(data(0, rank)))
        assert not traffic.reduces and not forces.requires_grad
        assert all(parameter.grad is None for parameter in model.parameters())

    simulate_ranks(ranks)


def test_weights_written_before_the_backward() -> None:
    def ranks(rank: int) -> None:
        model = shard(seeded(lambda: Probe(False)), **RELEASED)
        with torch.no_grad():
            loss = model(data(0, rank))
            for parameter in model.parameters():
                parameter.mul_(2)
            model(data(0, rank))
        with pytest.raises(RuntimeError, match="was written between the unit's forward"):
            loss.backward()

    simulate_ranks(ranks)


def test_in_stored_precision() -> None:
    """Where evaluation computes in the shards' own dtype."""

    def ranks(rank: int) -> None:
        plain = seeded(Probe).eval()
        mp = MixedPrecision(torch.float32, full_precision_in_eval=True)
        model = shard(plain, mp_policy=mp)
        with torch.no_grad():
            model(data(0, rank))
            for r in range(2):
                plain(data(0, r))
        assert_same(model, plain, atol=1e-6, rtol=1e-6)

    simulate_ranks(ranks)


def test_beside_tensor_parallelism() -> None:
    def ranks(rank: int) -> None:
        mesh = mesh_of(dp=2, tp=2)
        model = sharded_lm(mesh, units=False)
        model.forward = torch.enable_grad()(model.forward)  # type: ignore[method-assign]
        tokens, targets = tokens_of(0, mesh.get_local_rank("dp"))
        with torch.no_grad():
            logits = model(tokens)
        with loss_parallel():
            cross_entropy(logits.flatten(0, 1), targets.flatten()).backward()
        plain = language_model()
        mean_cross_entropy(plain, 0, 2).backward()
        for found, wanted in zip(model.parameters(), plain.parameters(), strict=True):
            assert_close(whole_of_both(found.grad), wanted.grad)

    run_ranks(ranks, 4)


def test_evaluations_share_their_views() -> None:
    """Until the weights change: an evaluation makes no node per batch, and keeps none of them."""

    def ranks(rank: int) -> None:
        model = shard(seeded(lambda: Probe(False)))
        outer = units_by_name(model)["Probe"]
        with torch.no_grad():
            model(data(0, rank))
            first = outer.links.standing
            assert first is not None
            model(data(1, rank))
            assert outer.links.standing is first
            for parameter in model.parameters():
                parameter.mul_(2)
            model(data(0, rank))
            assert outer.links.standing is not first
        assert not list(outer.graphs.nodes)

    simulate_ranks(ranks)


def test_frozen_parameters_have_none() -> None:
    """Nor do forwards in inference mode."""

    def ranks(rank: int) -> None:
        model = fully_shard(seeded(Tower))
        (unit,) = units(model)
        with torch.inference_mode():
            model(data(0, rank))
        assert unit.links.standing is None
        model.requires_grad_(False)
        with torch.no_grad():
            model(data(0, rank))
            assert unit.links.standing is None
            model.head.bias.requires_grad_(True)
            model(data(0, rank))
        assert unit.links.standing is not None
        assert unit.links.standing.trained == (len(unit.entries) - 1,)

    simulate_ranks(ranks)


def test_a_weight_kept_from_an_evaluation_is_guarded() -> None:
    class Keeper(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            kept.append(self.weight)
            self.attribute = (self.weight,)
            return super().forward(x)

    kept: list[Tensor] = []

    def ranks(rank: int) -> None:
        plain = seeded(lambda: Keeper(WIDTH, WIDTH))
        model = fully_shard(copy.deepcopy(plain), **RELEASED)
        for seed in range(3):
            with torch.no_grad():
                found = model(data(seed, rank))
            weight = kept.pop()
            reshard(model)
            assert_close(found, linear(data(seed, rank), *plain.parameters()))
            with pytest.raises(RuntimeError, match="was kept from a forward"):
                weight.sum()

    simulate_ranks(ranks, 1 + 1)
