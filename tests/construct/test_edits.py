"""Layers are initialised again, rows edited, weights exchanged and read from another unit."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fsdp_compose as fc
from fsdp_compose import (
    apply,
    fully_shard,
    gathered,
    plan,
    refresh,
    save_checkpoint,
    save_full,
    state_dict,
    undo,
    wrap,
)
from fsdp_compose.sharded import is_sharded, spec_of

from harness import rank_errors, run_ranks, simulate_ranks
from models import (
    WIDTH,
    Block,
    MakeOptimizer,
    Tower,
    Twin,
    adamw,
    by_block,
    data,
    one_unit,
    seeded,
    sgd,
    square,
    train_twin,
    whole,
)
from surgery import (
    same,
    together,
)


def test_a_buffer_that_is_registered_later_is_cast() -> None:
    """As are those of a module that takes the place of one; others stay as they were converted."""
    low = fc.MixedPrecision(buffer_dtype=torch.bfloat16)
    model = nn.Sequential(nn.BatchNorm1d(2, affine=False), nn.BatchNorm1d(2), nn.Linear(2, 2))
    fully_shard(model, mp_policy=low)
    model[2].register_buffer("mask", torch.ones(2))
    model[1] = nn.BatchNorm1d(2)
    refresh(model)
    assert {b.dtype for b in model.buffers() if b.ndim} == {torch.bfloat16}
    assert {v.dtype for k, v in state_dict(model).items() if "run" in k} == {torch.float32}
    assert state_dict(model)["2.mask"].dtype == torch.float32
    model[2].mask = model[2].mask.float()
    assert refresh(model)[2].mask.dtype == torch.float32


@pytest.mark.parametrize("shard", [by_block, one_unit])
def test_layers_initialised_edited_and_exchanged(shard: Any) -> None:
    """Layers are initialised rows edited and weights exchanged."""

    def edit(model: nn.Module) -> None:
        torch.manual_seed(5)
        model.head.reset_parameters()
        with torch.no_grad():
            model.first.weight[2] = model.first.weight[:2].mean(0)
            model.blocks[0].up.weight[:, 1:3] *= 3
            model.blocks[1].down.weight.clamp_(-0.2, 0.2)
        first, second = model.blocks[0].up, model.blocks[1].up
        first.weight, second.weight = second.weight, first.weight

    def ranks(rank: int) -> None:
        model, plain = shard(seeded(lambda: Tower(2))), seeded(lambda: Tower(2))
        together(model, plain, rank, steps=1)
        kept = list(map(id, model.parameters()))
        with torch.no_grad(), gathered(model, writeback=True):
            edit(model)
        edit(plain)
        same(model, plain)
        assert list(map(id, model.parameters())) == kept
        together(model, plain, rank, start=1)

    run_ranks(ranks, 2)


@pytest.mark.parametrize("grad", [True, False])
def test_views_of_weights_take_their_places(grad: bool) -> None:
    """Parameters over each other's memory: exchanged, moved on by one, transposed."""

    def edit(model: nn.Sequential) -> None:
        memory = [layer.weight.data for layer in model]
        for layer, source in zip(
            model, (memory[1], memory[0], memory[1], memory[3].t()), strict=True
        ):
            layer.weight = nn.Parameter(source)
        model[1].bias = nn.Parameter(model[0].bias.data)
        model[0].bias = nn.Parameter(torch.zeros(3))

    def ranks(rank: int) -> None:
        plain = seeded(lambda: nn.Sequential(*(nn.Linear(3, 3) for _ in range(4))))
        model = fully_shard(copy.deepcopy(plain))
        with torch.set_grad_enabled(grad), gathered(model, writeback=True):
            edit(model)
        edit(plain)
        for (name, p), q in zip(model.named_parameters(), plain.parameters(), strict=True):
            assert torch.equal(whole(p), q), name

    run_ranks(ranks, 2)


def _tie(model: nn.Sequential) -> None:
    model[2].weight = model[1].weight


def _share(model: nn.Sequential) -> None:
    model[1].weight = model[2].weight = nn.Parameter(torch.ones(3, 3).double())


def _untie(model: nn.Sequential) -> None:
    model[3].weight = nn.Parameter(torch.zeros(3, 3).double())


def _part(model: nn.Sequential) -> None:
    model[0].weight, model[3].weight = (
        nn.Parameter(torch.full((3, 3), n).double()) for n in (1.0, 2.0)
    )


@pytest.mark.parametrize("edit", [_tie, _share, _untie, _part])
@pytest.mark.parametrize("policy", [None, wrap.by_class({nn.Linear})])
def test_ties_change_outside_of_scopes(edit: Callable[[Any], None], policy: Any) -> None:
    """In a scope that is an error, as each parameter would keep its own shard, or one for both."""

    def tied() -> nn.Sequential:
        model = nn.Sequential(*(nn.Linear(3, 3) for _ in range(4)))
        model[3].weight = model[0].weight
        return model

    def ranks(rank: int) -> None:
        model, plain = fully_shard(seeded(tied), units=policy), seeded(tied)
        before = [whole(p) for p in model.parameters()]
        with pytest.raises(RuntimeError, match=r"gathered: parameter .* tie or untie"):
            with torch.no_grad(), gathered(model, writeback=True):
                edit(model)
        assert all(torch.equal(whole(p), q) for p, q in zip(model.parameters(), before))
        with torch.no_grad(), gathered(model, writeback=True):
            model[0].weight = model[3].weight = nn.Parameter(torch.full((3, 3), 0.5))
            model[1].weight, model[2].weight = model[2].weight, model[1].weight
            plain[0].weight.fill_(0.5)
            plain[1].weight, plain[2].weight = plain[2].weight, plain[1].weight
        edit(plain)
        edit(model)
        refresh(model)
        for module in (model, plain):
            module(torch.ones(2, 3).double()).square().mean().backward()
        for (name, p), q in zip(model.named_parameters(), plain.parameters(), strict=True):
            assert torch.equal(whole(p), q), name
            torch.testing.assert_close(p.grad.full_tensor(), q.grad)

    run_ranks(ranks, 2)


def test_what_a_unit_outside_reads_stays_sharded() -> None:
    """``refresh`` of one unit takes no parameter from another one that it was tied to."""
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    model[1].weight = tied = model[0].weight
    fully_shard(model, units=wrap.by_class({nn.Linear}))
    model[0].weight = nn.Parameter(torch.ones(3, 3))
    refresh(model[0])
    assert model[1].weight is tied and all(map(is_sharded, model.parameters()))
    model(torch.ones(2, 3)).sum().backward()
    assert all(p.grad is not None for p in model.parameters())


def test_nothing_of_a_bucket_is_left() -> None:
    """It is gathered no more, and its memory is free; a backward from before is refused."""
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    model[0].requires_grad_(False)
    fully_shard(model)
    loss = model(torch.ones(1, 3)).sum()
    model[1] = nn.Linear(3, 3)
    refresh(model)
    assert [b.parameters[0] for b in plan(model).buckets] == ["0.weight", "1.weight"]
    with pytest.raises(RuntimeError, match="between forward and backward"):
        loss.backward()


class Reader(nn.Module):
    """An embedding, a body, and logits by the embedding's weight, which another unit may own."""

    gathers = False

    def __init__(self) -> None:
        super().__init__()
        self.emb = nn.Embedding(5, WIDTH)
        self.body = Block()

    def forward(self, ids: Tensor) -> Tensor:
        x = self.body(self.emb(ids))
        if self.gathers:
            with gathered(self.emb):
                return x @ self.emb.weight.t()
        return x @ self.emb.weight.t()


class GatheringReader(Reader):
    gathers = True


def read_loss(model: nn.Module, x: Tensor) -> Tensor:
    return model((x[:, 0].abs() * 7).long() % 5).square().mean()


def test_a_unit_with_a_tied_weight_is_removed() -> None:
    """The weight goes on in the unit that reads it still; what it lay beside is let go."""

    def build() -> nn.Module:
        model = Tower(2)
        model.blocks[1].down.weight = model.blocks[0].down.weight
        return model

    def ranks(rank: int) -> None:
        model, plain = by_block(seeded(build)), seeded(build)
        together(model, plain, rank, steps=1)
        for each in (model, plain):
            del each.blocks[0]
        refresh(model)
        together(model, plain, rank, steps=2)
        same(model, plain)
        undo(model)
        torch.testing.assert_close(model.blocks[0].down.weight, plain.blocks[0].down.weight)

    simulate_ranks(ranks)


def test_a_vocabulary_grows() -> None:
    def ranks(rank: int) -> None:
        def shard(model: nn.Module) -> nn.Module:
            return fully_shard(model, units=wrap.by_class({Block}))

        twin = Twin(rank, 2, Reader, shard, adamw)
        twin.train(read_loss)
        with pytest.raises(RuntimeError, match=r"replaced by \(7, 6\).* call refresh"):
            with gathered(twin.model, writeback=True):
                twin.model.emb.weight = nn.Parameter(torch.zeros(7, WIDTH).double())
        with torch.no_grad(), gathered(twin.model):
            old = twin.model.emb.weight.clone()
        for model, start in ((twin.model, old), (twin.reference, twin.reference.emb.weight)):
            grown = torch.cat([start.detach(), start.detach().mean(0, keepdim=True).expand(2, -1)])
            model.emb.weight = nn.Parameter(grown)
            model.emb.num_embeddings = 7
        with pytest.raises(RuntimeError, match=r"'emb.weight'.*refresh\(model\)"):
            read_loss(twin.model, data(0, rank))
        refresh(twin.model)
        twin.plain[1].emb.weight = twin.reference.emb.weight
        ours, theirs = (adamw(m.parameters()) for m in (twin.model, twin.reference))
        for step in range(2):
            twin.backward(read_loss, step)
            twin.check_grads()
            for optim in (ours, theirs):
                optim.step()
                optim.zero_grad()
        same(twin.model, twin.reference)

    run_ranks(ranks, 2)


def own_embedding(model: nn.Module) -> nn.Module:
    return fully_shard(model, units=wrap.by_class({Block, nn.Embedding}))


@pytest.mark.parametrize("optimizer", [sgd, adamw])
def test_a_weight_read_from_another_unit(optimizer: MakeOptimizer) -> None:
    """In one unit with its reader, or inside a scope in forward; gradients of both uses add up."""
    train_twin(Reader, read_loss, by_block, optimizer)
    train_twin(GatheringReader, read_loss, own_embedding, optimizer)


def replace(model: nn.Module) -> None:
    model.first.weight = nn.Parameter(torch.full((WIDTH, WIDTH), 2.0).double())


def exchange(model: nn.Module) -> None:
    a, b = model.blocks[0].up, model.blocks[1].up
    a.weight, b.weight = b.weight, a.weight


def tie(model: nn.Module) -> None:
    model.blocks[1].up.weight = model.blocks[0].up.weight


def drop(model: nn.Module) -> None:
    model.head.bias = None


def enter(model: nn.Module, path: Path, **options: bool) -> None:
    with gathered(model, **options):
        pass


SHOW = {
    "gathered": enter,
    "writeback": lambda model, path: enter(model, path, writeback=True),
    "apply": lambda model, path: apply(model, lambda module: None),
}
READ: dict[str, Callable[[nn.Module, Path], Any]] = {
    "full": lambda model, path: state_dict(model),
    "sharded": lambda model, path: state_dict(model, "sharded"),
    "local": lambda model, path: state_dict(model, "local"),
    "own": lambda model, path: model.state_dict(),
    "checkpoint": lambda model, path: save_checkpoint(path, model),
    "file": lambda model, path: save_full(path, model),
}


@pytest.mark.parametrize("edit", [replace, exchange, tie, drop])
def test_a_replaced_parameter_is_nowhere_the_old(edit: Any, tmp_path: Path) -> None:
    """What shows or saves parameters raises until ``refresh`` was told of the edit."""
    wanted = r"'(first|head|blocks\.\d\.up)\.\w+' .*was replaced.*refresh\(model\)"

    def ranks(rank: int) -> None:
        model, plain = by_block(seeded(Tower)), seeded(Tower)
        together(model, plain, rank, steps=1)
        edit(model)
        edit(plain)
        for use in (SHOW | READ if edit is not drop else SHOW).values():
            with pytest.raises(RuntimeError, match=wanted):
                use(model, tmp_path)
        assert list(state_dict(refresh(model))) == list(plain.state_dict())
        same(model, plain)
        for use in (SHOW | READ).values():
            use(model, tmp_path)
        together(model, plain, rank, start=1)

    simulate_ranks(ranks, 2)


def test_what_was_deleted_is_not_saved(tmp_path: Path) -> None:
    """A state dict has what modules have, also before ``refresh``."""

    def ranks(rank: int) -> None:
        model, plain = by_block(seeded(Tower)), seeded(Tower)
        drop(model)
        drop(plain)
        for read in (READ[kind] for kind in ("full", "sharded", "own")):
            assert list(read(model, tmp_path)) == list(plain.state_dict())
        with pytest.raises(RuntimeError, match=r"'head.bias' .*found nothing, wanted"):
            square(model, data(0, rank))

    simulate_ranks(ranks, 2)


class Speaker(Tower):
    def encode(self, x: Tensor) -> Tensor:
        return self.first(x)


def reads(rank: int) -> None:
    read_loss(own_embedding(seeded(Reader)), data(0, rank))


def encodes(rank: int) -> None:
    by_block(seeded(Speaker)).encode(data(0, rank))


def between(rank: int) -> None:
    model = by_block(seeded(Tower))
    model.head.weight[:, 0].sum()


@pytest.mark.parametrize(
    ("use", "text"),
    [
        (reads, "torch.Tensor.t needs the whole of 'emb.weight' (unit 'emb'), of which rank "),
        (encodes, "torch.nn.functional.linear needs the whole of 'first.weight' (unit 'Speaker')"),
        (between, "torch.Tensor.__getitem__ needs the whole of 'head.weight' (unit 'Tower')"),
    ],
)
def test_reading_a_sharded_weight_says_what_to_call(use: Any, text: str) -> None:
    for rank, error in enumerate(rank_errors(use, 2)):
        assert error is not None and error.startswith(f"ShardedWeightError: {text}")
        assert re.search(rf"of which rank {rank} holds (no )?elements", error)
        assert "`with fsdp_compose.gathered(module):`" in error
        assert re.search(r"fully_shard\(module, methods=\('forward', ", error)


def test_names_of_a_unit_that_gave_a_parameter_away() -> None:
    """Of several modules; what moved has its name in the unit that reads it now."""
    parts = nn.ModuleDict({name: nn.Sequential(nn.Linear(2, 2)) for name in "abc"})
    fully_shard([parts["a"], parts["b"]])
    fully_shard(parts["c"])
    model: Any = fully_shard(InTurn(parts))
    (first,), (last,) = parts["a"], parts["c"]
    last.weight, first.weight = first.weight, nn.Parameter(torch.ones(2, 2))
    refresh(model)
    parts["b"].scale = nn.Parameter(torch.ones(3))
    parts["a"].scale = nn.Parameter(torch.ones(3))
    refresh(model)
    assert {spec_of(p).fqn for p in model.parameters()} == {*dict(model.named_parameters())}


class InTurn(nn.Module):
    def __init__(self, parts: nn.ModuleDict) -> None:
        super().__init__()
        self.parts = parts

    def forward(self, x: Tensor) -> Tensor:
        for part in self.parts.values():
            x = part(x)
        return x


def test_a_unit_that_one_rank_removed() -> None:
    """Nothing is changed, so that the rank can remove it where it forgot to."""

    def ranks(rank: int) -> None:
        model = by_block(seeded(Tower))
        if rank == 0:
            del model.blocks[-1]
        with pytest.raises(
            ValueError, match=r"refresh: rank 1 shards other.*found 4 units, wanted 3"
        ):
            fc.refresh(model)
        if rank == 1:
            del model.blocks[-1]
        fc.refresh(model)
        square(model, data(0, rank)).backward()

    simulate_ranks(ranks)
