"""torchtitan's own Llama, made small: trained like one process, with tied weights too."""

from __future__ import annotations

import warnings
from types import ModuleType
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import fsdp_compose as fc
from fsdp_compose import MixedPrecision, wrap

from harness import run_ranks
from models import assert_at_rest, whole

pytestmark = pytest.mark.torchtitan

titan: ModuleType

STEPS = 5


@pytest.fixture(scope="module", autouse=True)
def _library() -> None:
    """Import torchtitan once, here: a rank that did it would take seconds."""
    global titan
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import titan_models

    titan = titan_models


def tokens(step: int) -> Tensor:
    generator = torch.Generator().manual_seed(step)
    return torch.randint(0, titan.VOCAB, (4, 10), generator=generator)


def loss_of(model: nn.Module, batch: Tensor) -> Tensor:
    logits = model(batch)[:, :-1].float()
    return F.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten())


def checkpoint_blocks(model: Any) -> None:
    """Recompute what is in each block's forward in its backward."""
    for block in model.layers.values():
        forward = block.forward
        block.forward = lambda *args, f=forward: checkpoint(f, *args, use_reentrant=False)


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("recompute", [False, True])
def test_training_equals_one_process(tied: bool, recompute: bool) -> None:
    def train(rank: int) -> None:
        model, plain = titan.build(tied=tied), titan.build(tied=tied)
        if recompute:
            checkpoint_blocks(model)
        fc.fully_shard(model, units=wrap.by_class({titan.Block}))
        optims = [torch.optim.SGD(m.parameters(), lr=0.1, momentum=0.9) for m in (model, plain)]
        for step in range(STEPS):
            batch = tokens(step)
            with fc.count_traffic() as traffic:
                loss_of(model, batch[2 * rank : 2 * rank + 2]).backward()
            assert traffic.gathers == 5
            loss_of(plain, batch).backward()
            assert_at_rest(model)
            for (name, param), theirs in zip(model.named_parameters(), plain.parameters()):
                torch.testing.assert_close(
                    whole(param.grad), theirs.grad, rtol=1e-4, atol=2e-6, msg=name
                )
            for optim in optims:
                optim.step()
                optim.zero_grad()
        for (name, param), theirs in zip(model.named_parameters(), plain.parameters()):
            torch.testing.assert_close(
                whole(param), theirs.detach(), rtol=1e-4, atol=2e-6, msg=name
            )

    run_ranks(train, 2)


def test_from_the_meta_device_in_mixed_precision() -> None:
    """As torchtitan does it: build on meta, shard, then initialise; the loss falls."""

    def train(rank: int) -> list[float]:
        torch.manual_seed(0)
        model = titan.build("meta")
        fc.fully_shard(
            model,
            units=wrap.by_class({titan.Block}),
            mp_policy=MixedPrecision(torch.bfloat16, torch.float32),
            param_init_fn=fc.seeded_init(model, 0, titan.init_own),
        )
        optim = torch.optim.AdamW(model.parameters(), lr=1e-2)
        losses = []
        for _ in range(STEPS):
            loss = loss_of(model, tokens(0)[2 * rank : 2 * rank + 2])
            loss.backward()
            optim.step()
            optim.zero_grad()
            losses.append(loss.item())
        return losses

    for losses in run_ranks(train, 2):
        assert losses[-1] < losses[0] - 0.3
