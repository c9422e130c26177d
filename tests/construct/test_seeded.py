"""Weights seeded by name are the same for every world, and buffers are cast once."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fsdp_compose import fully_shard, undo, wrap
from fsdp_compose.construct.initialise import seeded_init

from buffered import equal, full, on_meta, unlike
from harness import run_ranks
from models import (
    EVERY_SHARD,
    WIDTH,
    Tolerance,
    Tower,
    Twin,
    adamw,
    by_block,
    compare,
    square,
    units,
)

pytestmark = pytest.mark.filterwarnings("error")


class Tied(Tower):
    """Head and embedding share a weight; a parameter of its own is initialised by a function."""

    def __init__(self) -> None:
        super().__init__(2)
        self.embed = nn.Embedding(2, WIDTH)
        self.head.weight = self.embed.weight
        self.gain = nn.Parameter(torch.empty(3))

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * self.gain.sum()


def initialise(module: nn.Module) -> None:
    if isinstance(module, Tied):
        nn.init.normal_(module.gain)
    else:
        module.reset_parameters()


def children_first(model: nn.Module, **options: Any) -> nn.Module:
    """Other units than by block: the head, which has the tied weight, is one of its own."""
    fully_shard(model.head, **options)
    fully_shard([model.blocks[1], model.first], **options)
    return fully_shard(model, **options)


@pytest.mark.parametrize("world", [1, 2, 3, 4])
def test_the_same_weights_for_every_world(world: int) -> None:
    """The same weights for every world and choice of units."""

    def ranks(rank: int) -> list[dict[str, Tensor]]:
        found = []
        for shard in (*EVERY_SHARD.values(), children_first):
            torch.manual_seed(rank)  # of no consequence
            state = torch.get_rng_state()
            model = on_meta(Tied)
            shard(model, param_init_fn=seeded_init(model, 11, initialise))
            assert torch.equal(state, torch.get_rng_state())
            found.append(full(model))
        return found

    plain = Tied()
    plain.apply(seeded_init(plain, 11, lambda m: initialise(m) if has_own(m) else None))
    for models in run_ranks(ranks, world):
        for found in models:
            equal(found, full(plain))
    other = Tied()
    other.apply(seeded_init(other, 12, lambda m: initialise(m) if has_own(m) else None))
    assert not torch.equal(other.first.weight, plain.first.weight)
    assert not torch.equal(plain.blocks[0].up.weight, plain.blocks[1].up.weight)


def has_own(module: nn.Module) -> bool:
    return any(True for _ in module.parameters(recurse=False))


def test_names_behind_wrappers_seed_alike() -> None:
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

    plain, wrapped = Tower(2), Tower(2)
    for i, block in enumerate(wrapped.blocks):
        wrapped.blocks[i] = checkpoint_wrapper(block)
    for model in (plain, wrapped):
        model.apply(seeded_init(model, 0))
    for a, b in zip(plain.parameters(), wrapped.parameters(), strict=True):
        assert torch.equal(a, b)


def test_a_module_outside_the_seeded_model_is_refused() -> None:
    inner = on_meta(lambda: nn.Linear(2, 2))
    init_fn = seeded_init(inner, 0)
    outer = on_meta(lambda: nn.Sequential(nn.Linear(2, 2)))
    with pytest.raises(ValueError, match="not in the model it was made for"):
        fully_shard(outer, param_init_fn=init_fn)


def test_a_seeded_model_trains_as_the_plain_one() -> None:
    def ranks(rank: int) -> None:
        twin = Twin(rank, 2, lambda: Tower(2), lambda m: None, adamw)
        model = on_meta(lambda: Tower(2)).double()
        by_block(model, param_init_fn=seeded_init(model, 1))
        for name, param in twin.plain[0].named_parameters():
            param.data.copy_(full(model)[name])
        twin.model = model
        twin.optim = adamw(model.parameters())
        twin.train(square)

    run_ranks(ranks, 2)


def test_buffers_are_cast_once_and_given_back() -> None:
    from fsdp_compose import MixedPrecision

    def ranks(rank: int) -> None:
        model = unlike(0)
        before = full(model)
        fully_shard(
            model,
            units=wrap.by_class({nn.BatchNorm1d}),
            mp_policy=MixedPrecision(buffer_dtype=torch.bfloat16),
        )
        kinds = {n: b.dtype for n, b in model.named_buffers(remove_duplicate=False)}
        floating = {n for n, b in before.items() if n in kinds and b.is_floating_point()}
        assert {n for n, d in kinds.items() if d is torch.bfloat16} == floating
        assert kinds["mask"] is torch.bool and kinds["norm.num_batches_tracked"] is torch.int64
        model.scratch = model.scratch.double()  # converted since: the user's choice stays
        undo(model)
        after = {n: b.dtype for n, b in model.named_buffers(remove_duplicate=False)}
        assert after.pop("scratch") is torch.float64
        assert all(after[n] == before[n].dtype for n in after)
        compare("table", model.table.double(), before["table"].bfloat16().double(), Tolerance0)

    run_ranks(ranks, 2)


Tolerance0 = Tolerance(0, 0)


def test_units_are_not_kept_alive_by_initialisation() -> None:
    import gc
    import weakref

    model = on_meta(lambda: Tower(1))
    init_fn = seeded_init(model, 0)
    fully_shard(model, param_init_fn=init_fn)
    assert units(copy.deepcopy(model))
    ref = weakref.ref(model)
    del model
    gc.collect()
    assert ref() is None
