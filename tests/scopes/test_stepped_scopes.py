"""After an optimizer's step inside a scope nothing reads what parameters were before it."""

from __future__ import annotations

import copy
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.testing import assert_close

import fsdp_compose as fc
from fsdp_compose.sharded import ShardedWeightError, is_sharded

from harness import run_ranks, simulate_ranks
from models import MakeOptimizer, Tower, by_block, data, seeded, sgd, square, whole


def opened(model: nn.Module, how: str) -> AbstractContextManager[Any]:
    """The scope in which ``model`` is trained; it is gathered before each step."""
    for module in model.modules() if how == "unshard" else ():
        if fc.is_fully_sharded(module):
            fc.unshard(module)
    return fc.gathered(model) if how == "gathered" else nullcontext()


def average(model: nn.Module, ema: AveragedModel) -> None:
    ema.update_parameters(model)


def penalise(model: nn.Module, ema: AveragedModel) -> None:
    (0.1 * sum(p.square().sum() for p in model.parameters())).backward()  # type: ignore[union-attr]


def lerp_whole(model: nn.Module, ema: AveragedModel) -> None:
    with torch.no_grad():
        for mean, p in zip(ema.parameters(), model.parameters(), strict=True):
            mean.lerp_(whole(p), 0.5)


def read_copies(model: nn.Module, ema: AveragedModel) -> None:
    with torch.no_grad():
        for mean, p in zip(ema.parameters(), model.parameters(), strict=True):
            for value in (p.detach(), p.data, p + 0):
                mean.lerp_(value, 0.25)


def owned(params: Any) -> torch.optim.Optimizer:
    return fc.owner_step(params, sgd)


def train(
    model: nn.Module, how: str, use: Callable[..., None], batches: Any, make: MakeOptimizer = sgd
) -> list[Tensor]:
    ema = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.5))
    with opened(model, how):
        optimizer = make(model.parameters())
    for step in range(3):
        with opened(model, how):
            losses = [square(model, batch) for batch in batches(step)]
            (sum(losses) / len(losses)).backward()  # type: ignore[union-attr]
            optimizer.step()
            optimizer.zero_grad()
            use(model, ema)
        if use is penalise:
            optimizer.step()
            optimizer.zero_grad()
    fc.reshard(model) if how == "unshard" else None
    return [whole(p) for p in (*model.parameters(), *ema.parameters())]


@pytest.mark.parametrize("use", [average, penalise, lerp_whole, read_copies])
def test_reads_after_a_step_see_it(use: Callable[..., None]) -> None:
    """An average of the weights, a penalty, a copy: as one process, in every scope."""
    plain = train(seeded(Tower), "plain", use, lambda step: [data(step, rank) for rank in range(2)])

    def check(rank: int) -> None:
        makes = [sgd, owned] if use is average else [sgd]
        for how, make in product(("outside", "gathered", "unshard"), makes):
            model = by_block(seeded(Tower))
            found = train(model, how, use, lambda step: [data(step, rank)], make)
            for mine, wanted in zip(found, plain, strict=True):
                assert_close(mine, wanted, msg=lambda text, how=how: f"{how}: {text}")

    run_ranks(check, 2)


def test_parameters_hold_slices_until_gathered() -> None:
    """Only those that were stepped."""

    def check(rank: int) -> None:
        model = by_block(seeded(Tower))
        block = model.blocks[0]
        weight = block.up.weight
        block.down.requires_grad_(False)
        optimizer = sgd(model.parameters())

        def step() -> None:
            square(model, data(0, rank)).backward()
            optimizer.step()

        for again in (lambda: fc.unshard(block), lambda: square(model, data(1, rank))):
            fc.unshard(block)
            assert weight[0].shape == weight.shape[1:]
            step()
            assert is_sharded(weight) and not is_sharded(block.down.weight)
            with pytest.raises(ShardedWeightError, match="needs the whole"):
                weight @ weight
            again()
            assert not is_sharded(weight)
            assert torch.equal(weight.detach(), fc.state_dict(model)["blocks.0.up.weight"])
        fc.reshard(block)
        with fc.gathered(model):
            step()
            assert all(is_sharded(p) == p.requires_grad for p in model.parameters())
            with pytest.raises(RuntimeError, match="already open in a scope around this one, in"):
                fc.gathered(model).__enter__()
            with pytest.raises(RuntimeError, match="forward was called inside gathered"):
                square(model, data(0, rank))
        model.zero_grad()
        with fc.gathered(model):
            with pytest.raises(RuntimeError, match="no parameter has a gradient"):
                optimizer.step()  # after which they are shown as before
            assert not any(map(is_sharded, model.parameters()))

    simulate_ranks(check, 2)


def test_a_scope_inside_shows_what_was_stepped() -> None:
    """And after it the parameters hold their slices again, as before it."""

    def check(rank: int) -> None:
        model = by_block(seeded(Tower))
        block, name = model.blocks[0], "blocks.0.up.weight"
        weight, optimizer = block.up.weight, sgd(model.parameters())
        fc.unshard(block)
        square(model, data(0, rank)).backward()
        optimizer.step()
        with fc.gathered(block):
            assert torch.equal(weight.detach(), fc.state_dict(model)[name])
        assert is_sharded(weight)
        fc.unshard(block)
        with fc.gathered(block):
            optimizer.step()
            fc.unshard(block)  # gathers what was written; the scope has no tensors of it
            assert is_sharded(weight)
        assert torch.equal(weight.detach(), fc.state_dict(model)[name])
        with fc.gathered(block, writeback=True), torch.no_grad():
            weight.mul_(2.0)
        assert torch.equal(weight.detach(), fc.state_dict(model)[name])
        fc.reshard(block)

    simulate_ranks(check, 2)


def test_a_parameter_is_frozen_while_it_is_a_slice() -> None:
    """Shown in full again it is frozen, or free, as it was set meanwhile."""

    def check(rank: int) -> None:
        model = by_block(seeded(Tower))
        block = model.blocks[0]
        weight, optimizer = block.up.weight, sgd(model.parameters())
        for trained in (False, True):
            fc.unshard(block)
            square(model, data(0, rank)).backward()
            optimizer.step()
            weight.requires_grad_(trained)
            fc.unshard(block)
            assert weight.requires_grad == (2 * weight).requires_grad == trained
            optimizer.zero_grad()
            (weight.sum() + block.up.bias.sum()).backward()
            assert (weight.grad is not None) == trained
        fc.reshard(block)

    simulate_ranks(check, 2)


class TwoSteps(torch.optim.SGD):
    """Steps twice, each time by the gradient that the closure finds, as line searches do."""

    def step(self, closure: Any = None) -> Any:
        for _ in range(2):
            closure()
            with torch.no_grad():
                for param in self.param_groups[0]["params"]:
                    param.sub_(0.1 * param.grad)


def test_a_closure_reads_what_the_step_before_wrote() -> None:
    def train(model: nn.Module, batches: list[Any]) -> list[Tensor]:
        optimizer, seen = TwoSteps(model.parameters(), lr=0.1), list[Tensor]()

        def closure() -> None:
            optimizer.zero_grad()
            if not len(seen) % 2:  # the second is called after a write
                assert not any(map(is_sharded, model.parameters()))
            penalty: Any = 0.1 * sum(p.square().sum() for p in model.parameters())
            loss = sum(square(model, batch) for batch in batches) / len(batches)
            (loss + penalty).backward()
            seen.append(penalty.detach())

        for step in (optimizer.step, lambda call: optimizer.step(closure=call)):
            for module in model.modules():
                fc.unshard(module) if fc.is_fully_sharded(module) else None
            step(closure)
        return [*seen, *map(whole, model.parameters())]

    plain = train(seeded(Tower), [data(0, rank) for rank in range(2)])

    def check(rank: int) -> None:
        found = train(by_block(seeded(Tower)), [data(0, rank)])
        for mine, wanted in zip(found, plain, strict=True):
            assert_close(mine, wanted)

    run_ranks(check, 2)


def test_a_step_in_backward_is_seen_in_the_scope() -> None:
    def train(model: nn.Module, scope: Callable[[nn.Module], Any], batches: Any) -> list[Tensor]:
        ema = copy.deepcopy(model)
        each = {p: sgd([p]) for p in model.parameters()}
        for p in each:
            p.register_post_accumulate_grad_hook(partial(step_one, each))
        for step in range(3):
            with scope(model):
                losses = [square(model, batch) for batch in batches(step)]
                (sum(losses) / len(losses)).backward()  # type: ignore[union-attr]
                with torch.no_grad():
                    for mean, p in zip(ema.parameters(), model.parameters(), strict=True):
                        mean.lerp_(p, 0.5)
        return [whole(p) for p in (*model.parameters(), *ema.parameters())]

    def step_one(each: dict[nn.Parameter, torch.optim.Optimizer], p: nn.Parameter) -> None:
        each[p].step()
        p.grad = None

    plain = train(seeded(Tower), nullcontext, lambda step: [data(step, r) for r in range(2)])

    def check(rank: int) -> None:
        model = by_block(seeded(Tower))
        found = train(model, fc.gathered, lambda step: [data(step, rank)])
        for mine, wanted in zip(found, plain, strict=True):
            assert_close(mine, wanted)

    run_ranks(check, 2)


@pytest.mark.parametrize("strategy", [None, fc.ShardingStrategy.NO_SHARD])
@pytest.mark.parametrize("scope", ["gathered", "unshard"])
def test_a_step_by_hand_in_backward_is_seen(scope: str, strategy: Any) -> None:
    """A hook that writes the weight itself, as in LOMO, is a step of it like another."""

    def by_hand(p: nn.Parameter) -> None:
        with torch.no_grad():
            p.sub_(p.grad, alpha=0.5)
        p.grad = None

    def check(rank: int) -> None:
        plain, model = seeded(Tower), by_block(seeded(Tower), strategy=strategy)
        for p in (*plain.parameters(), *model.parameters()):
            p.register_post_accumulate_grad_hook(by_hand)
        for step in range(2):
            sum(square(plain, data(step, other)) / 2 for other in range(2)).backward()
            if scope == "unshard":
                fc.unshard(model)
            with fc.gathered(model) if scope == "gathered" else nullcontext():
                square(model, data(step, rank)).backward()
                for mine, wanted in zip(model.parameters(), plain.parameters(), strict=True):
                    assert_close(mine.norm(), wanted.norm())
                    assert_close(whole(mine), wanted.detach())
            fc.reshard(model)

    run_ranks(check, 2)


@pytest.mark.parametrize("write", ["step", "in place", "apply"])
def test_a_handle_shows_what_was_written_since(write: str) -> None:
    """``wait`` comes after the write, which ``unshard`` came before."""

    def check(rank: int) -> None:
        model = by_block(seeded(Tower))
        block, optimizer = model.blocks[0], sgd(model.parameters())
        square(model, data(0, rank)).backward()
        handle = fc.unshard(block, async_op=True)
        if write == "step":
            optimizer.step()
        elif write == "in place":
            with torch.no_grad():
                block.up.weight.mul_(2.0)
        else:
            fc.apply(block.up, lambda module: module.weight.mul_(2.0))
        wanted = fc.state_dict(model)["blocks.0.up.weight"]
        handle.wait()
        assert torch.equal(block.up.weight.detach(), wanted)
        fc.reshard(block)

    simulate_ranks(check, 2)


def test_apply_writes_to_what_is_unsharded() -> None:
    """Also through ``.data``: the full tensors and the slices."""

    def check(rank: int) -> None:
        model = by_block(seeded(Tower))
        block = model.blocks[0]
        wanted = 0.5 * fc.state_dict(model)["blocks.0.up.weight"]
        fc.unshard(block)
        fc.apply(model, halve)
        assert torch.equal(block.up.weight.detach(), wanted)
        fc.reshard(block)
        assert torch.equal(whole(block.up.weight), wanted)

    def halve(module: nn.Module) -> None:
        if isinstance(module, nn.Linear):
            module.weight.data.mul_(0.5)

    run_ranks(check, 2)


@pytest.mark.parametrize("depth", [1, 2])
def test_a_step_that_raises_leaves_full_tensors(depth: int) -> None:
    """A forward in the scope, after the program has caught the error, reads them as before."""

    def refuse(*_: Any) -> None:
        raise ValueError("a hook of the user")

    def ranks(rank: int) -> None:
        model = by_block(seeded(Tower))
        optim = sgd(model.parameters())
        optim.register_step_pre_hook(refuse)
        square(model, data(0, rank)).backward()
        expected = model(data(1, rank))
        with fc.gathered(model), fc.gathered(model) if depth == 2 else nullcontext():
            with pytest.raises(ValueError, match="a hook of the user"):
                optim.step()
            assert torch.equal(model(data(1, rank)), expected)
            assert not is_sharded(model.first.weight)

    simulate_ranks(ranks)
