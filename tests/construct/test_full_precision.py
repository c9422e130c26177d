"""Classes of modules that compute in full precision inside a unit of low precision."""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fsdp_compose import (
    MixedPrecision,
    fully_shard,
    get_state,
    undo,
    wrap,
)

from harness import run_ranks, single_process
from models import WIDTH, Block, Tower, assert_at_rest, data, seeded, units_by_name


class Mixed(nn.Module):
    """Norms with and without parameters and buffers, inside blocks and beside them."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(Inner() for _ in range(2))
        self.norm = nn.BatchNorm1d(WIDTH)
        self.seen: dict[str, tuple[torch.dtype, torch.dtype]] = {}

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        return self.norm(x)


class Inner(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.plain = nn.LayerNorm(WIDTH, elementwise_affine=False)
        self.norm = nn.LayerNorm(WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.norm(self.plain(self.linear(x)))


def dtypes_seen(model: nn.Module) -> dict[str, tuple[torch.dtype, torch.dtype]]:
    """By module: dtypes it computes on and that the next one receives."""
    seen: dict[str, Any] = {}

    def note(name: str) -> Any:
        def hook(module: nn.Module, args: Any) -> None:
            seen[name] = args[0].dtype

        return hook

    for name, module in model.named_modules():
        module.register_forward_pre_hook(note(name))
    return seen


NORMS = (nn.BatchNorm1d, nn.LayerNorm)


BF16 = MixedPrecision(torch.bfloat16, buffer_dtype=torch.bfloat16, full_precision_classes=NORMS)


@pytest.mark.parametrize(
    "units", [None, wrap.by_class(Inner), wrap.by_class({Inner, nn.LayerNorm})]
)
def test_classes_in_full_precision(units: wrap.Policy | None) -> None:
    def ranks(rank: int) -> None:
        model = Mixed()
        fully_shard(model, units=units, mp_policy=BF16)
        found = units_by_name(model)
        norms = {"norm", *(f"blocks.{i}.{n}" for i in range(2) for n in ("plain", "norm"))}
        blocks = set() if units is None else {"blocks.0", "blocks.1"}
        assert set(found) == {"Mixed"} | norms | blocks
        for name in norms:
            assert found[name].mp.param_dtype is torch.float32
            assert found[name].mp.output_dtype is torch.bfloat16
            for bucket in found[name].buckets:
                assert bucket.full.dtype is bucket.dtypes.reduce is torch.float32
        seen = dtypes_seen(model)
        for step in range(2):
            out = model(data(step, rank, dtype=torch.float32))
            assert out.dtype is torch.bfloat16
            out.float().square().mean().backward()
            assert_at_rest(model)
        assert all(seen[name] is torch.float32 for name in norms)
        others = {"first", "blocks.0", "blocks.1", "blocks.0.linear", "blocks.1.linear"}
        assert all(seen[name] is torch.bfloat16 for name in others)
        assert model.norm.running_mean.dtype is torch.float32
        assert model.norm.num_batches_tracked == 2
        assert all(p.grad is not None and p.grad.dtype is torch.float32 for p in model.parameters())
        if units is None:  # what comes out of the unit is nothing to the norms inside it
            told = fully_shard(Mixed(), mp_policy=replace(BF16, output_dtype=torch.float64))
            for name in norms:
                assert units_by_name(told)[name].mp.output_dtype is torch.bfloat16

    run_ranks(ranks)


def test_full_precision_equals_casts_written_by_hand() -> None:
    class Cast(nn.Module):
        def __init__(self, inner: nn.Module) -> None:
            super().__init__()
            self.inner = inner

        def forward(self, x: Tensor) -> Tensor:
            return self.inner(x.double()).float()

    def ranks(rank: int) -> None:
        model = seeded(Tower)
        plain = copy.deepcopy(model)
        for block in plain.blocks:
            block.norm = Cast(block.norm)
            block.up.float()
            block.down.float()
        plain.first.float()
        plain.head.float()
        mp = MixedPrecision(torch.float32, full_precision_classes=(nn.LayerNorm,))
        fully_shard(model, units=wrap.by_class(Block), mp_policy=mp)
        x = data(0, 0, dtype=torch.float32)  # the same on every rank
        ours, theirs = model(x), plain(x)
        torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=1e-6)
        ours.sum().backward()
        theirs.sum().backward()
        for p, q in zip(model.parameters(), plain.parameters()):
            torch.testing.assert_close(p.grad.full_tensor(), q.grad.double(), rtol=1e-4, atol=1e-4)

    run_ranks(ranks)


def test_full_precision_of_the_sharded_module_itself() -> None:
    """Full precision of the sharded module itself and of a few."""
    with single_process():
        norm = fully_shard(nn.LayerNorm(WIDTH), mp_policy=BF16)
        assert get_state(norm).unit.mp.param_dtype is torch.float32
        assert norm(torch.ones(2, WIDTH)).dtype is torch.bfloat16
        out = fully_shard(nn.LayerNorm(3), mp_policy=replace(BF16, output_dtype=torch.float64))
        assert out(torch.ones(2, 3)).dtype is torch.float64
        with pytest.raises(ValueError, match="some are to run in full precision"):
            fully_shard([nn.LayerNorm(3), nn.Linear(3, 3)], mp_policy=BF16)
        model = Tower(1)
        fully_shard([model.first, model.blocks[0]], mp_policy=BF16)
        fully_shard(model)
        assert set(units_by_name(model)) == {"Tower", "first", "blocks.0.norm"}
        model = Tower(1)
        fully_shard(model, mp_policy=MixedPrecision(full_precision_classes=NORMS))
        assert set(units_by_name(model)) == {"Tower"}  # there is no other precision
        chosen: list[Any] = [{"**": BF16}, lambda name, param: BF16]
        for by_parameter in chosen:  # which would leave them in low precision
            with pytest.raises(ValueError, match=r"'first\.weight' full_precision_classes, which"):
                fully_shard(Tower(1), mp_policy=by_parameter)
        with pytest.raises(ValueError, match="full_precision_classes is"):
            MixedPrecision(full_precision_classes=nn.LayerNorm)  # type: ignore[arg-type]


def test_full_precision_in_eval_reaches_them_too() -> None:
    with single_process():
        model, plain = seeded(Mixed).float(), seeded(Mixed).float()
        mp = MixedPrecision(
            torch.bfloat16, full_precision_classes=NORMS, full_precision_in_eval=True
        )
        fully_shard(model, units=wrap.by_class(Inner), mp_policy=mp)
        x = torch.randn(3, WIDTH)
        with torch.no_grad():
            torch.testing.assert_close(model.eval()(x), plain.eval()(x))
        assert model.train()(x).dtype is torch.bfloat16


def test_undo_of_full_precision_units() -> None:
    with single_process():
        model = Mixed()
        before = copy.deepcopy(model.state_dict())
        undo(fully_shard(model, mp_policy=BF16))
        for name, value in model.state_dict().items():
            torch.testing.assert_close(value, before[name], rtol=0, atol=0)
