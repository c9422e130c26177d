"""A unit of several buckets: what is kept, read again, reduced and freed for each of them."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fsdp_compose import (
    Prefetch,
    default_hook,
    fully_shard,
    register_comm_hook,
    register_post_reduce_hook,
    reshard,
    set_reshard_after_forward,
    state_dict,
    wrap,
)
from fsdp_compose.base import mesh
from fsdp_compose.base.process import here
from fsdp_compose.core.guards import moved_parameters

from harness import fake_world, simulate_ranks
from models import WIDTH, Tower, Twin, TwoKinds, by_block, data, seeded, square, two_blocks, units


def seeded_kinds() -> TwoKinds:
    torch.manual_seed(0)
    return TwoKinds()


def two_kinds(**options: Any) -> nn.Module:
    return fully_shard(seeded_kinds(), **options)


def test_a_write_to_any_kept_bucket_is_read() -> None:
    """An evaluation after it reads the new weights, whichever bucket they are in."""

    def ranks(rank: int) -> None:
        model = two_kinds(reshard_after_forward=False)
        with torch.no_grad():
            for layer in (1, 0):
                model(data(0, rank))
                model[layer].weight.zero_()
                model[layer].bias.fill_(3.0 + layer)
                output = model(data(0, rank))
                if layer:
                    assert torch.equal(output, torch.full_like(output, 4.0))
            assert torch.equal(model(data(1, rank), False), torch.full_like(output, 3.0))

    simulate_ranks(ranks)


@pytest.mark.parametrize("layer", [0, 1])
def test_an_unseen_write_to_any_bucket_raises(layer: int) -> None:
    """Through memory that ``to_local()`` gave out, to a bucket that stays gathered."""

    def ranks(rank: int) -> None:
        model = two_kinds(reshard_after_forward=False)
        given = [model[i].weight.to_local().detach().numpy() for i in range(2)]
        with torch.no_grad():
            model(data(0, rank))
            given[layer] += 1.0
            with pytest.raises(RuntimeError, match=rf"'{layer}\.weight' .* was written while"):
                model(data(0, rank))
            output = model(data(0, rank))  # reads what was written
            reshard(model)
            assert torch.equal(output, model(data(0, rank)))

    simulate_ranks(ranks)


def test_memory_of_former_weights_is_freed() -> None:
    """Once the weights were converted, though a graph over the former ones lives."""

    def ranks(rank: int) -> None:
        model = fully_shard(nn.Linear(WIDTH, WIDTH), reshard_after_forward=False)
        output = model(data(0, rank).float())
        former = units(model)[0].buckets[0].full.untyped_storage()
        assert former.nbytes()
        model.double()
        model(data(0, rank))
        assert not former.nbytes() and output.requires_grad

    simulate_ranks(ranks)


def test_hooks_are_given_what_any_rank_used() -> None:
    """Each hook once for a bucket, in their order; none for a bucket without gradients."""

    def ranks(rank: int) -> None:
        model, seen = two_kinds(), list[Any]()
        for sign in (1, -1):
            look = lambda _, params, sign=sign: seen.append(sign * len(params))  # noqa: E731
            register_post_reduce_hook(model, look)
        model(data(0, rank), False).sum().backward()
        assert seen == [2, -2]
        model(data(0, rank)).sum().backward()
        assert seen == [2, -2] * 3

    simulate_ranks(ranks)


def test_a_hook_reduces_before_earlier_units_compute() -> None:
    """A communication hook starts when the gradients are there, not when the next ones are."""

    def ranks(rank: int) -> None:
        model, seen = by_block(seeded(Tower), prefetch=Prefetch(0, 0)), list[str]()

        def reduce(state: Any, grads: Any) -> Tensor:
            seen.append(f"reduce {grads.unit}")
            return default_hook(state, grads)

        register_comm_hook(model, None, reduce)
        for name, block in model.blocks.named_children():
            block.register_full_backward_pre_hook(lambda *_, name=name: seen.append(name))
        square(model, data(0, rank)).backward()
        steps = [step for i in (2, 1, 0) for step in (str(i), f"reduce blocks.{i}")]
        assert seen == [*steps, "reduce Tower"]

    simulate_ranks(ranks)


class Twice(nn.Module):
    """A second call takes the gradient of what the first one returned."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, before: Any = None) -> Tensor:
        if before is not None:
            before()
        return self.layer(x)


def test_an_unseen_write_in_a_forward_raises() -> None:
    """Where a backward inside the forward would read the weights from before the write."""

    def ranks(rank: int) -> None:
        model = fully_shard(seeded(Twice), reshard_after_forward=True)
        local, x = model.layer.weight.to_local().detach(), data(0, rank).requires_grad_()
        output = model(x)

        def before() -> None:
            local.numpy()[:] += 1.0
            torch.autograd.grad(output.sum(), x)

        with pytest.raises(RuntimeError, match=r"'layer\.weight' .* was written while"):
            model(x, before)

    simulate_ranks(ranks)


def test_each_bucket_that_was_emptied_is_asked_for() -> None:
    """After ``to_empty``, each parameter has to be written, whichever bucket it is in."""

    def ranks(rank: int) -> None:
        model = two_kinds()
        model(data(0, rank))
        for written, missing in ((0, 1), (1, 0)):
            model.to_empty(device="cpu")
            with torch.no_grad():
                for param in model[written].parameters():
                    param.fill_(0.5)
                named = rf"parameter '{missing}\.(weight|bias)' came from"
                with pytest.raises(RuntimeError, match=named):
                    model(data(0, rank))
                for param in model[missing].parameters():
                    param.fill_(0.5)
                model(data(0, rank))

    simulate_ranks(ranks)


class Lender(nn.Module):
    """Reads its layer before and after each of its parts, which read the same layer."""

    def __init__(self, parts: int) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)
        self.parts = nn.ModuleList(Lender(0) for _ in range(parts))
        for part in self.parts:
            part.layer = self.layer

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.layer(x))
        for part in self.parts:
            x = torch.tanh(self.layer(part(x)))
        return x


def test_a_layer_of_several_units_in_their_passes() -> None:
    """Behind a part's forward the layer is read in full, though other parts are at rest."""

    def ranks(rank: int) -> None:
        build = lambda: Lender(3)  # noqa: E731
        shard = lambda m: fully_shard(m, units=wrap.by_class({Lender}))  # noqa: E731
        twin = Twin(rank, 2, build, shard)
        twin.train(steps=2)

    simulate_ranks(ranks)


@pytest.mark.parametrize("moves", [False, True])
def test_what_was_gathered_again_is_still_compared(moves: bool) -> None:
    """A unit that an earlier forward left gathered reads every later write, not only the first."""

    def ranks(rank: int) -> None:
        twin = Twin(rank, 2, two_blocks, partial(by_block, reshard_after_forward=False))
        mine, theirs = (m.blocks[0].up.weight for m in (twin.model, twin.reference))
        twin.losses(square, 0)
        set_reshard_after_forward(twin.model, True)  # from here on no forward keeps it
        for step in range(2):
            with torch.no_grad():
                theirs *= 2.0
                if moves and step == 0:
                    mine.data = mine.data * 2.0
                else:
                    mine *= 2.0
            twin.losses(square, 0)

    simulate_ranks(ranks)


def test_each_bucket_gathered_again_is_still_compared() -> None:
    """Also where a write to all of them had them gathered again together."""

    def ranks(rank: int) -> None:
        model, plain = two_kinds(reshard_after_forward=False), seeded_kinds()
        model(data(0, rank))
        set_reshard_after_forward(model, True)
        for written in ((0, 1), (1,), (0,)):
            with torch.no_grad():
                for layer in written:
                    for each in (model, plain):
                        each[layer].bias += 1.0
            assert torch.equal(model(data(0, rank)), plain(data(0, rank)))

    simulate_ranks(ranks)


def test_backward_of_kept_weights_that_were_replaced() -> None:
    """It reads what forward read, as a plain module's, once the new values are in the shards."""

    def ranks(rank: int) -> None:
        twin = Twin(rank, 2, two_blocks, partial(by_block, reshard_after_forward=False))
        loss, plain = twin.losses(square, 0)
        for model in (twin.model, twin.reference):
            param = model.blocks[0].up.weight
            param.data = param.detach() * 2.0
        state_dict(twin.model)  # reads the new values
        loss.backward()
        plain.backward()
        twin.check_grads()
        twin.losses(square, 1)

    simulate_ranks(ranks)


def test_a_read_of_data_before_a_forward_costs_nothing() -> None:
    """Weights that stay gathered are those that forward read, so backward gathers none again."""

    def ranks(rank: int) -> None:
        model = two_kinds(reshard_after_forward=False)
        for layer in model:
            assert layer.weight.data.numel()
        loss = square(model, data(0, rank))
        here.traffic.reset()
        loss.backward()
        assert here.traffic.gathers == 0

    simulate_ranks(ranks)


def test_another_device_keeps_the_reductions_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    """A model that comes back to a device has there the communicator that was made for it."""
    seen: list[Any] = []

    def note(entries: Any, layout: Any, moved: Any, *more: Any) -> None:
        seen.append(moved.shard)
        raise NotImplementedError("this device has no memory")

    monkeypatch.setattr(mesh, "QUEUES", ("fake",))
    monkeypatch.setattr(mesh, "_backend", lambda pg, device: "fake")
    monkeypatch.setattr(moved_parameters, "make_bucket", note)
    with fake_world(4):
        (bucket,) = units(fully_shard(nn.Linear(4, 4)))[0].buckets
        with pytest.raises(NotImplementedError):
            moved_parameters._rebuild(bucket, bucket.stored.to("meta"))
        assert seen[0].reductions is bucket.mesh.shard.reductions is not None
