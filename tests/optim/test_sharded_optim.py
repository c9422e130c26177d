"""Every torch optimizer on sharded parameters is the plain optimizer on whole ones, or refuses."""

from __future__ import annotations

import copy
import io
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn

from fsdp_compose.base.group import Group
from fsdp_compose.sharded import (
    ShardedTensor,
    ShardedWeightError,
    as_own_file,
    is_sharded,
    spec_of,
)

from harness import run_ranks
from optimizers import EXACT, Make, O
from sharded_values import on_ranks, shard

SHAPES = [(4, 3), (3, 5), (7,), (1,), (2, 3, 2)]


def tensors(seed: int) -> list[torch.Tensor]:
    gen = torch.Generator().manual_seed(seed)
    values = [torch.randn(s, generator=gen) for s in SHAPES]
    return [values[0], values[1].t(), *values[2:]]


def gradients() -> Iterator[list[torch.Tensor]]:
    return (tensors(seed) for seed in range(1, 6))


def step(optimizer: torch.optim.Optimizer, params: list[Any], grads: list[torch.Tensor]) -> None:
    for p, g in zip(params, grads):
        p.grad = g.clone(memory_format=torch.preserve_format)
    optimizer.step()


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_optimizers_equal_plain(ranks: int) -> None:
    def body(group: Group) -> None:
        for name, make in EXACT.items():
            params, plain = shard(tensors(0), group), [nn.Parameter(w) for w in tensors(0)]
            sharded, reference = make(params), make(plain)
            for grads in gradients():
                step(sharded, params, grads)
                step(reference, plain, grads)
            for p, w in zip(params, plain):
                torch.testing.assert_close(
                    p.full_tensor(), w.detach(), rtol=2e-6, atol=1e-6, msg=lambda m: f"{name}: {m}"
                )
                states = zip(sharded.state[p].items(), reference.state[w].values())
                for (key, mine), theirs in states:
                    if isinstance(theirs, torch.Tensor) and theirs.shape == w.shape != ():
                        assert is_sharded(mine) and spec_of(mine) is spec_of(p), (name, key)
                        torch.testing.assert_close(mine.full_tensor(), theirs, rtol=2e-6, atol=1e-6)
            sharded.zero_grad(set_to_none=False)
            assert all(not p.grad.any() for p in params)
            sharded.zero_grad()
            assert all(p.grad is None for p in params)

    on_ranks(body, ranks)


REFUSING: dict[str, Make] = {
    "lbfgs": lambda p: O.LBFGS(p, max_iter=2),
    "adafactor": lambda p: O.Adafactor(p, foreach=False),
    "adafactor foreach": lambda p: O.Adafactor(p, foreach=True),
}
if hasattr(torch.optim, "Muon"):
    REFUSING["muon"] = lambda p: O.Muon(p[:1])


@pytest.mark.parametrize("ranks", [1, 2])
def test_optimizers_of_whole_tensors_name_parameters(ranks: int) -> None:
    """Optimizers that need whole tensors name the parameter."""

    def body(group: Group) -> None:
        for name, make in REFUSING.items():
            params = shard(tensors(0), group)
            before = [p.full_tensor() for p in params]
            optimizer = make(params)
            for p, g in zip(params, tensors(1)):
                p.grad = g
            closure = (lambda: torch.zeros(())) if name == "lbfgs" else None
            with pytest.raises(ShardedWeightError, match=r"'layer\.\d' \(unit 'layer'\)"):
                optimizer.step(closure)
            assert all(torch.equal(p, w) for p, w in zip(params, before)), name

    on_ranks(body, ranks)


@pytest.mark.parametrize("ranks", [1, 2])
def test_adafactor_on_vectors(ranks: int) -> None:
    """What has no rows and columns needs global norms only."""

    def body(group: Group) -> None:
        for foreach in (False, True):
            values = [torch.linspace(-1, 2, 11), torch.linspace(3, 1, 5)]
            params, plain = shard(values, group), [nn.Parameter(v.clone()) for v in values]
            pair = [O.Adafactor(x, 0.1, foreach=foreach) for x in (params, plain)]
            for seed in range(3):
                grads = [torch.cos(v * (seed + 1)) for v in values]
                step(pair[0], params, grads)
                step(pair[1], plain, grads)
            for p, w in zip(params, plain):
                torch.testing.assert_close(p.full_tensor(), w.detach())

    on_ranks(body, ranks)


@pytest.mark.parametrize("ranks", [1, 2])
def test_weight_decay_groups_by_dim(ranks: int) -> None:
    def body(group: Group) -> None:
        params = shard(tensors(0), group)
        decayed = [p for p in params if p.dim() >= 2]
        assert [tuple(p.shape) for p in decayed] == [(4, 3), (5, 3), (2, 3, 2)]

    on_ranks(body, ranks)


@pytest.mark.parametrize("ranks", [1, 2])
def test_moving_averages(ranks: int) -> None:
    def body(group: Group) -> None:
        class Model(nn.Module):
            def __init__(self, params: list[Any]):
                super().__init__()
                self.params = nn.ParameterList()
                for i, p in enumerate(params):
                    self.params.register_parameter(str(i), p)

        sharded, plain = Model(shard(tensors(0), group)), Model(list(map(nn.Parameter, tensors(0))))
        for make in (
            lambda m: torch.optim.swa_utils.AveragedModel(m),
            lambda m: torch.optim.swa_utils.AveragedModel(
                m, multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(0.9)
            ),
            lambda m: torch.optim.swa_utils.AveragedModel(
                m, avg_fn=torch.optim.swa_utils.get_ema_avg_fn(0.9)
            ),
        ):
            averages = make(sharded), make(plain)
            for seed in (1, 2, 3):
                for average, model in zip(averages, (sharded, plain)):
                    with torch.no_grad():
                        for p, v in zip(model.parameters(), tensors(seed)):
                            p.copy_(v)
                    average.update_parameters(model)
            for a, b in zip(averages[0].parameters(), averages[1].parameters()):
                torch.testing.assert_close(a.full_tensor(), b.detach())
        mean = [p.detach().clone() for p in sharded.parameters()]
        with torch.no_grad():
            torch._foreach_lerp_(mean, list(sharded.parameters()), 0.1)
            for m, p in zip(mean, sharded.parameters()):
                m.lerp_(p, 0.1)
                m.mul_(0.5).add_(p, alpha=0.5)
                m.data.mul_(0.9).add_(p.data, alpha=0.1)
                assert type(m) is ShardedTensor

    on_ranks(body, ranks)


@pytest.mark.parametrize("ranks", [1, 2])
def test_grad_scaler_agrees_on_infinities(ranks: int) -> None:
    def body(group: Group) -> None:
        for fused in (False, True):
            params = shard(tensors(0), group)
            before = [p.full_tensor() for p in params]
            optimizer = torch.optim.AdamW(params, 0.1, fused=fused)
            scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
            scaler.scale(torch.ones(1))
            grads = tensors(1)
            grads[-1].view(-1)[-1] = float("inf")  # on one rank's slice only
            for p, g in zip(params, grads):
                p.grad = g
            scaler.step(optimizer)
            scaler.update()
            assert scaler.get_scale() == 2.0
            for p, w in zip(params, before):
                assert torch.equal(p, w)
            for p, g in zip(params, tensors(2)):
                p.grad = g * 2
            scaler.unscale_(optimizer)
            if not fused:
                assert torch.equal(params[0].grad, tensors(2)[0])
            scaler.step(optimizer)
            scaler.update()
            assert not torch.equal(params[0], before[0])

    on_ranks(body, ranks)


@pytest.mark.parametrize("ranks", [1, 2])
def test_state_dict_round_trip(ranks: int) -> None:
    def body(group: Group) -> None:
        params = shard(tensors(0), group)
        optimizer = torch.optim.AdamW(params, 0.1)
        step(optimizer, params, tensors(1))
        with pytest.raises(ShardedWeightError, match=r"layer\.0.*optim_state_dict"):
            torch.save(optimizer.state_dict(), io.BytesIO())
        saved = optimizer.state_dict()
        for values in saved["state"].values():
            values.update((k, as_own_file(v)) for k, v in values.items() if is_sharded(v))
        buffer = io.BytesIO()
        torch.save(saved, buffer)
        buffer.seek(0)
        twins = [copy.deepcopy(p) for p in params]
        resumed = torch.optim.AdamW(twins, 0.1)
        resumed.load_state_dict(torch.load(buffer, weights_only=True))
        for o, ps in ((optimizer, params), (resumed, twins)):
            step(o, ps, tensors(2))
        for p, q in zip(params, twins):
            assert torch.equal(p, q)
        buffer.seek(0)
        state = torch.load(buffer, weights_only=True)["state"][0]["exp_avg"]
        assert state.shape == (4, 3) and spec_of(state).fqn == "layer.0"

    on_ranks(body, ranks)


def test_state_made_before_sharding_is_refused() -> None:
    """Whole optimizer state under a sharded parameter never trains on a slice of itself."""

    def body(rank: int) -> None:
        from sharded_values import world

        for make in (EXACT["adamw foreach"], EXACT["adamw fused"], EXACT["adam"]):
            params = shard(tensors(0), world())
            optimizer = make(params)
            for p, w in zip(params, tensors(0)):
                optimizer.state[p] = {
                    "step": torch.ones(()),
                    "exp_avg": torch.zeros_like(w),
                    "exp_avg_sq": torch.zeros_like(w),
                    "max_exp_avg_sq": torch.zeros_like(w),
                }
            with pytest.raises(ShardedWeightError, match=r"layer\.0.*is whole, and the"):
                step(optimizer, params, tensors(1))
            assert all(optimizer.state[p]["step"] == 1 for p in params)

    run_ranks(body, 2)


def test_foreach_is_the_default_choice() -> None:
    from torch.optim import optimizer
    from torch.utils import _foreach_utils

    from fsdp_compose.sharded import ShardedParameter

    for known in (optimizer._foreach_supported_types, _foreach_utils._foreach_supported_types):
        assert ShardedParameter in known and ShardedTensor in known
