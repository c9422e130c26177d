"""Weights written through memory that somebody holds, or swapped for others, between passes."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fsdp_compose as fc
from fsdp_compose import MixedPrecision, ShardingStrategy, fully_shard
from fsdp_compose.base import streams
from fsdp_compose.comm.grad_bucket import GradBucket
from fsdp_compose.core.guards import forward_writes, weight_versions

from harness import rank_errors, run_ranks, simulate_ranks
from models import (
    WIDTH,
    Tower,
    Twin,
    assert_at_rest,
    by_block,
    data,
    one_unit,
    seeded,
    sgd,
    square,
    two_blocks,
    units,
    whole,
)

pytestmark = pytest.mark.filterwarnings("error")


def twin(rank: int, world: int = 2, **options: Any) -> Twin:
    return Twin(rank, world, lambda: Tower(1), lambda m: by_block(m, **options))


# Swapping


@pytest.mark.parametrize("world", [1, 2])
@pytest.mark.parametrize("kept", [False, True])
def test_swapped_weights_come_back(world: int, kept: bool) -> None:
    """``tmp = p.data; p.data = average; ...; p.data = tmp``, with forwards and readers between."""

    def swap(model: nn.Module, values: list[Tensor]) -> list[Tensor]:
        former = [p.data for p in model.parameters()]
        for param, value in zip(model.parameters(), values, strict=True):
            param.data = value
        return former

    def equal(pair: Twin) -> None:
        for name, param in pair.reference.named_parameters():
            torch.testing.assert_close(whole(pair.model.get_parameter(name)), param.detach())

    def ranks(rank: int) -> None:
        strategy = ShardingStrategy.SHARD_GRAD_OP if kept else ShardingStrategy.FULL_SHARD
        for wholes in (False, True):
            pair = twin(rank, world, strategy=strategy)
            pair.train(steps=1)
            half = [p.detach() * 0.5 for p in pair.reference.parameters()]
            mine = half if wholes else [p.detach() * 0.5 for p in pair.model.parameters()]
            former, plain = swap(pair.model, mine), swap(pair.reference, half)
            equal(pair)
            with torch.no_grad():
                pair.losses(square, 5)
            fc.state_dict(pair.model)
            swap(pair.model, former), swap(pair.reference, plain)
            equal(pair)
            pair.train(steps=2)

    run_ranks(ranks, world)


def full_of_scope(model: nn.Module) -> dict[str, Tensor]:
    with torch.no_grad(), fc.gathered(model):
        return {name: p.detach().clone() for name, p in model.named_parameters()}


def loaded(kind: Any) -> Callable[[nn.Module], dict[str, Tensor]]:
    """Through a state dict of that kind and another model."""

    def read(model: nn.Module) -> dict[str, Tensor]:
        other = by_block(Tower(1).to(next(model.parameters()).dtype))
        fc.load_state_dict(other, fc.state_dict(model, kind))
        return {name: whole(p) for name, p in other.named_parameters()}

    return read


def undone(model: nn.Module) -> dict[str, Tensor]:
    fc.undo(model)
    return {name: p.detach().clone() for name, p in model.named_parameters()}


def saved(path: Path, model: nn.Module) -> dict[str, Tensor]:
    from safetensors.torch import load_file

    fc.save_full(path, model)
    torch.distributed.barrier()
    return {k: v for file in path.rglob("*.safetensors") for k, v in load_file(file).items()}


READERS: dict[str, Callable[[nn.Module], dict[str, Tensor]]] = {
    "full": fc.state_dict,
    "local": loaded("local"),
    "sharded": loaded("sharded"),
    "full_tensor": lambda m: {n: p.full_tensor() for n, p in m.named_parameters()},
    "iter_full": lambda m: dict(fc.iter_full(m)),
    "gathered": full_of_scope,
    "deepcopy": lambda m: fc.state_dict(copy.deepcopy(m)),
    "undo": undone,
}


def test_every_reader_sees_what_was_assigned(tmp_path: Path) -> None:
    """After ``p.data = x`` or a conversion, before any forward, also while units are gathered."""

    readers = {**READERS, "save_full": partial(saved, tmp_path / "model")}

    def ranks(rank: int, read: str, kind: torch.dtype) -> None:
        model = by_block(seeded(lambda: Tower(1)), strategy=ShardingStrategy.SHARD_GRAD_OP)
        with torch.no_grad():
            model(data(0, rank))  # which leaves units gathered
        wanted = {name: (whole(p) * 3).to(kind) for name, p in model.named_parameters()}
        for param in model.parameters():
            param.data = (param.data * 3).to(kind)
        found = readers[read](model)
        assert found.keys() == wanted.keys()
        for name, value in wanted.items():
            assert found[name].dtype == kind and torch.equal(found[name], value), (read, name)
        if read != "undo":
            plain = Tower(1).to(kind)
            plain.load_state_dict(wanted)
            x = data(0, 0, dtype=kind)
            torch.testing.assert_close(model(x), plain(x))

    def all_readers(rank: int) -> None:
        for read in readers:
            for kind in (torch.float64, torch.float32):
                ranks(rank, read, kind)

    run_ranks(all_readers, 2)


def test_flat_parameters_follow_a_swap_before_a_step() -> None:
    """An optimizer over flat parameters steps what was swapped back, though a reader came first."""

    def ranks(rank: int) -> None:
        pair = Twin(rank, 2, lambda: Tower(1), by_block)
        optim = sgd(fc.flat_parameters(pair.model))
        pair.backward(square, 0)
        former = [p.data for p in pair.model.parameters()]
        for param in pair.model.parameters():
            param.data = param.data * 2
        fc.state_dict(pair.model)
        for param, value in zip(pair.model.parameters(), former, strict=True):
            param.data = value
        fc.state_dict(pair.model)
        optim.step()
        pair.plain_optim.step()
        pair.check()

    run_ranks(ranks, 2)


# Writes between forward and backward


@pytest.mark.parametrize("strategy", [*ShardingStrategy][:3])
@pytest.mark.parametrize("held", [False, True])
def test_a_write_through_data_before_backward(strategy: ShardingStrategy, held: bool) -> None:
    """A plain module's backward reads what was written through ``.data`` since its forward."""

    def ranks(rank: int) -> None:
        pair = twin(rank, strategy=strategy)
        pair.train(steps=1)
        if held:
            for param in pair.model.parameters():
                param.data.norm()  # an alias was given out before, too
        loss, plain = pair.losses(square, 0)
        for model in (pair.model, pair.reference):
            for param in model.parameters():
                param.data.mul_(1.5)
        loss.backward()
        plain.backward()
        pair.step()
        pair.train(steps=2)

    run_ranks(ranks, 2)


def test_a_counted_write_after_data_raises() -> None:
    """Also where ``.data`` was handed out before."""

    def ranks(rank: int) -> None:
        model = by_block(seeded(lambda: Tower(1)), strategy=ShardingStrategy.FULL_SHARD)
        model.blocks[0].up.weight.data.mul_(1.0)
        loss = square(model, data(0, rank))
        with torch.no_grad():
            model.blocks[0].up.weight.mul_(2.0)
        loss.backward()

    for text in rank_errors(ranks, 2):
        assert text is not None and "'blocks.0.up.weight'" in text and "written between" in text


@pytest.mark.parametrize("world", [1, 2])
@pytest.mark.parametrize("unit", [True, False])
def test_a_frozen_weight_written_before_backward(unit: bool, world: int) -> None:
    """Its value is in the gradients of what is in front of it; nothing trained is in its unit."""

    def ranks(rank: int) -> None:
        model = seeded(lambda: Tower(2))
        model.blocks[1].requires_grad_(False)
        if unit:
            by_block(model, strategy=ShardingStrategy.FULL_SHARD)
        else:
            fully_shard(model, reshard_after_forward=True)
        loss = square(model, data(0, rank))
        with torch.no_grad():
            model.blocks[1].up.weight.mul_(2.0)
        loss.backward()

    for text in rank_errors(ranks, world):
        assert text is not None and "'blocks.1.up.weight'" in text and "written between" in text


@pytest.mark.parametrize("shard", [one_unit, by_block])
def test_a_forward_whose_backward_never_comes(shard: Any) -> None:
    """Forward, write, forward, backward: legal, as only the second forward is part of the loss."""

    def ranks(rank: int) -> None:
        pair = Twin(rank, 2, lambda: Tower(1), shard)
        for seed in range(3):
            first = square(pair.model, data(9, rank))
            with torch.no_grad():
                for model in (pair.model, pair.reference):
                    for param in model.parameters():
                        param.mul_(1.1)
            if seed == 2 and shard is by_block:  # of one unit, it was kept for its backward
                with pytest.raises(RuntimeError, match="was written between"):
                    first.backward()
            pair.backward(square, seed)
            pair.step()
        pair.check()

    run_ranks(ranks, 2)


# Writes that nothing counts


def test_an_uncounted_write_to_a_kept_unit() -> None:
    """Through ``p.to_local().data``, NumPy or plain parameters, where the unit stays gathered."""

    def ranks(rank: int) -> None:
        def held(model: nn.Module, how: str) -> Tensor:
            param = model[0].weight  # type: ignore[index]
            if how == "to_local":
                return param.to_local().data
            if how == "numpy":
                return torch.from_numpy(param.to_local().detach().numpy())
            make = fc.flat_parameters if how == "flat" else fc.local_parameters
            return make(model)[0].data

        for how in ("to_local", "numpy", "local", "flat"):
            for keep in ("backward", "unshard", "forward"):
                model = fully_shard(nn.Sequential(nn.Linear(4, 4, bias=False)))
                memory = held(model, how)
                if keep == "backward":
                    fc.set_reshard_after_backward(model, False)
                elif keep == "unshard":
                    fc.unshard(model)
                loss = model(torch.ones(1, 4)).sum()
                if keep == "forward":
                    memory.mul_(2)
                    with pytest.raises(RuntimeError, match=r"'0\.weight' .* does not count"):
                        loss.backward()
                    continue
                loss.backward()
                memory.mul_(2)
                with pytest.raises(RuntimeError, match=r"'0\.weight' .* does not count"):
                    model(torch.ones(1, 4))
                fc.reshard(model)
                wanted = torch.ones(1, 4) @ whole(model[0].weight).T
                torch.testing.assert_close(model(torch.ones(1, 4)), wanted)

    run_ranks(ranks, 2)


# Views that outlive their memory


class Keeper(nn.Module):
    """Keeps a view of its weight in one of the places where models keep such things."""

    kept: list[Tensor] = []

    def __init__(self, where: str) -> None:
        super().__init__()
        self.lin = nn.Linear(4, 4)
        self.where, self.views = where, []

    def forward(self, x: Tensor) -> Tensor:
        weight = self.lin.weight
        if self.where == "attribute":
            self.cached = weight.t()
        elif self.where == "itself":
            self.cached = weight
        elif self.where == "list":
            self.views = [weight.t()]
        elif self.where == "buffer":
            self.register_buffer("cached", weight.detach().t(), persistent=False)
        elif self.where == "elsewhere":
            Keeper.kept.append(weight.detach()[1:])
        elif self.where == "lazy" and "cached" not in vars(self):
            self.cached = weight.detach().t()
        return x @ self.cached if self.where == "lazy" else self.lin(x)

    def view(self) -> Tensor:
        if self.where == "elsewhere":
            return Keeper.kept[0]
        return self.views[0] if self.where == "list" else self.cached


WHERE = ["attribute", "itself", "list", "buffer", "elsewhere", "lazy"]


@pytest.mark.parametrize("grad", [False, True])
def test_a_stored_view_read_after_release_raises(grad: bool) -> None:
    """It would end the process; the error names the parameter and the unit."""

    def ranks(rank: int) -> None:
        for where in WHERE:
            Keeper.kept.clear()
            model = nn.Sequential(Keeper(where), nn.Linear(4, 4))
            fully_shard(model, units=fc.wrap.by_class({Keeper}))
            for _ in range(3):
                with torch.set_grad_enabled(grad):
                    output = model(torch.ones(1, 4))
                    if grad:
                        output.sum().backward()
                view = model[0].view()
                assert view.shape == ((3, 4) if where == "elsewhere" else (4, 4))
                assert "released" in repr(view)
                for read in (lambda v=view: v + 1, lambda v=view: torch.cat([v, v])):
                    with pytest.raises(RuntimeError, match=r"'0\.lin\.weight' of unit '0'"):
                        read()
            assert_at_rest(model)
            fc.unshard(model[0])
            assert torch.equal(view.sum(), model[0].view().sum())  # readable while gathered

    run_ranks(ranks, 2)


def test_a_comm_hook_may_return_a_view() -> None:
    """Of the buffer it was given, which is freed behind it."""

    def hook(state: object, grads: GradBucket) -> Tensor:
        torch.distributed.all_reduce(grads.flat)
        return grads.parts[grads.shard.rank].mul_(grads.scale)

    def ranks(rank: int) -> None:
        pair = twin(rank)
        fc.register_comm_hook(pair.model, None, hook)
        pair.train(steps=3)

    run_ranks(ranks, 2)


def test_a_codec_rounds_what_was_handed_out() -> None:
    """That is no write, though slices were handed out while the unit is kept gathered."""

    def ranks(rank: int) -> None:
        policy = MixedPrecision(gather_codec=fc.bf16_codec())
        model = by_block(seeded(two_blocks).float(), mp_policy=policy)
        fc.set_reshard_after_backward(model, False)
        for step in range(3):
            square(model, data(step, rank).float()).backward()
            slices = [p.to_local() for p in model.parameters()]
            assert sum(piece.numel() for piece in slices)
        fc.reshard(model)

    simulate_ranks(ranks)


def test_handed_out_slices_are_compared_on_demand(monkeypatch: pytest.MonkeyPatch) -> None:
    """On an accelerator only in debug mode, as that waits for the device; on a CPU always.

    Not while a CUDA graph is captured, when the host cannot wait.
    """
    compared: list[Any] = []
    monkeypatch.setattr(weight_versions, "find_difference", compared.append)
    monkeypatch.setattr(forward_writes, "find_difference", lambda bucket: None)

    def ranks(rank: int) -> None:
        model = one_unit(seeded(lambda: nn.Linear(WIDTH, 4)))
        (bucket,) = units(model)[0].buckets
        model.weight.to_local()
        fc.set_reshard_after_backward(model, False)
        square(model, data(0, rank)).backward()
        own = bucket.views.own
        for device, debug in (("cpu", False), ("meta", False), ("meta", True), ("cpu", True)):
            fc.set_debug(debug)
            bucket.views = replace(bucket.views, own=own.to(device))
            model(data(0, rank))
            assert (bucket in compared) == (debug or device == "cpu"), (device, debug)
            compared[:] = [other for other in compared if other is not bucket]
        bucket.views = replace(bucket.views, own=own.to("meta"))
        with monkeypatch.context() as patch:
            patch.setattr(streams, "is_capturing", lambda: True)
            model(data(0, rank))
            assert bucket not in compared
        bucket.views = replace(bucket.views, own=own)
        fc.reshard(model)

    try:
        simulate_ranks(ranks)
    finally:
        fc.set_debug(False)
