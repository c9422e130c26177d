"""Inside a scope ``m.parameters()`` are the parameters: gradients, flags and hooks too."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge, register_multi_grad_hook
from torch.testing import assert_close

import fsdp_compose as fc
from fsdp_compose import gathered, is_fully_sharded, reshard, unshard
from fsdp_compose.sharded import ShardedWeightError, is_sharded

from harness import TORCH, run_ranks, simulate_ranks
from models import Tower, by_block, data, seeded, sgd, square, whole


@contextmanager
def unsharded(model: nn.Module) -> Iterator[nn.Module]:
    inner = [module for module in model.modules() if is_fully_sharded(module)]
    for module in inner:
        unshard(module)
    yield model
    for module in inner:
        reshard(module)


def gathered_without_grad(model: nn.Module) -> AbstractContextManager[nn.Module]:
    with torch.no_grad():
        scope = gathered(model)
        scope.__enter__()

    @contextmanager
    def enter() -> Iterator[nn.Module]:
        yield model
        scope.__exit__(None, None, None)

    return enter()


def nested(model: nn.Module) -> AbstractContextManager[nn.Module]:
    @contextmanager
    def enter() -> Iterator[nn.Module]:
        unshard(model)
        with gathered(model), torch.no_grad(), gathered(model), torch.enable_grad():
            reshard(model)
            yield model

    return enter()


OFFLOADED = {"offload_policy": fc.Offload(params=True)}
SCOPES = [unsharded, gathered, gathered_without_grad, nested]


def pair(rank: int) -> tuple[nn.Module, nn.Module]:
    """A sharded model and the plain one, with the same gradients."""
    plain = seeded(Tower)
    model = by_block(copy.deepcopy(plain))
    square(model, data(0, rank)).backward()
    sum(square(plain, data(0, r)) / 2 for r in range(2)).backward()
    return model, plain


def check_gradients(model: nn.Module, plain: nn.Module) -> None:
    for ours, theirs in zip(model.parameters(), plain.parameters(), strict=True):
        if theirs.grad is None:
            assert ours.grad is None
        else:
            assert_close(whole(ours.grad), theirs.grad)


@pytest.mark.parametrize("scope", SCOPES)
def test_loops_in_a_scope_act_on_the_parameters(scope: Callable[..., Any]) -> None:
    """Clipping, clearing, freezing, hooks and an optimizer see one parameter, in or out."""

    def check(rank: int) -> None:
        model, plain = pair(rank)
        params, named = list(model.parameters()), dict(model.named_parameters())
        optimizer = sgd(params)
        with scope(model):
            assert [id(p) for p in model.parameters()] == [id(p) for p in params]
            assert not any(is_sharded(p) for p in model.parameters())
            assert all(type(p.clone()) is Tensor and p.is_leaf for p in model.parameters())
            check_gradients(model, plain)
            norm = nn.utils.clip_grad_norm_(model.parameters(), 0.01)
            assert_close(norm, nn.utils.clip_grad_norm_(plain.parameters(), 0.01))
            assert_close(fc.grad_norm(model), torch.tensor(0.01).double(), rtol=1e-4, atol=1e-4)
            check_gradients(model, plain)
        check_gradients(model, plain)
        with scope(model):
            model.zero_grad()
            assert all(p.grad is None for p in model.parameters())
            model.first.requires_grad_(False)
            assert not model.first.weight.requires_grad and model.head.weight.requires_grad
            built = sgd(model.parameters())
        assert all(p.grad is None for p in params)
        assert [n for n, p in named.items() if not p.requires_grad] == [
            "first.weight",
            "first.bias",
        ]
        square(model, data(0, rank)).backward()
        assert model.first.weight.grad is None and model.head.weight.grad is not None
        assert [id(p) for p in model.parameters()] == [id(p) for p in params]
        before = whole(model.head.weight)
        optimizer.step(), built.step()
        assert not torch.equal(before, whole(model.head.weight))

    run_ranks(check, 2)


def test_training_and_hooks_inside_scopes() -> None:
    """A step, a hook that steps, a copy: all on the objects that the optimizer has."""

    def check(rank: int) -> None:
        for scope in (unsharded, gathered, nested):
            plain = seeded(Tower)
            model = by_block(copy.deepcopy(plain))
            params = list(model.parameters())
            optimizer, reference = sgd(params), sgd(plain.parameters())
            stepper = {p: sgd([p]) for p in model.first.parameters()}
            for step in range(3):
                with scope(model):
                    square(model, data(step, rank)).backward()
                    if scope is unsharded:
                        optimizer.step()
                        assert [id(p) for p in model.parameters()] == [id(p) for p in params]
                        assert all(is_sharded(p) for p in params)
                if scope is not unsharded:
                    optimizer.step()
                optimizer.zero_grad()
                sum(square(plain, data(step, r)) / 2 for r in range(2)).backward()
                reference.step(), reference.zero_grad()
            for p, q in zip(params, plain.parameters(), strict=True):
                assert_close(whole(p), q.detach())
            seen = []

            def hook(p: nn.Parameter) -> None:
                seen.append(is_sharded(p) and is_sharded(p.grad))
                stepper[p].step()
                p.grad = None

            with scope(model):
                for p in stepper:
                    p.register_post_accumulate_grad_hook(hook)
                square(model, data(9, rank)).backward()
                assert model.first.weight.grad is None and model.head.weight.grad is not None
                assert [is_sharded(p) for p in params] == [p in stepper for p in params]
            assert seen == [True, True]
            sum(square(plain, data(9, r)) / 2 for r in range(2)).backward()
            reference = sgd(plain.first.parameters())
            reference.step()
            assert_close(whole(params[0]), plain.first.weight.detach())
            with scope(model):
                twin = copy.deepcopy(model)
                one = copy.deepcopy(model.head.weight)
            assert all(is_sharded(p) for p in twin.parameters())
            assert type(one) is nn.Parameter and torch.equal(one, whole(model.head.weight))
            square(twin, data(0, rank)).backward()

    run_ranks(check, 2)


class TiedUnits(nn.Module):
    """``first`` and ``last`` read one weight; each is a unit."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.last = nn.Linear(4, 4)
        self.last.weight = self.first.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.first(x).tanh())


@pytest.mark.parametrize("scope", [unsharded, gathered, nested])
@pytest.mark.parametrize("owner", ["first", "last"])
def test_a_tie_of_units_is_copied_in_a_scope(scope: Callable[..., Any], owner: str) -> None:
    """A deep copy that is made where parameters are whole trains as the model does."""

    def train(model: nn.Module, ranks: list[int]) -> None:
        optimizer = sgd(model.parameters())
        for step in range(2):
            batch = torch.cat([data(step, rank, 3, 4) for rank in ranks])
            model(batch).square().mean().backward()
            optimizer.step(), optimizer.zero_grad()

    plain = seeded(TiedUnits)
    train(plain, [0, 1])

    def check(rank: int) -> None:
        model = seeded(TiedUnits)
        for name in (owner, "last" if owner == "first" else "first"):
            fc.fully_shard(model.get_submodule(name))
        with scope(model):
            copied = copy.deepcopy(model)
        assert copied.last.weight is copied.first.weight is not model.first.weight
        assert all(map(is_sharded, copied.parameters()))
        for each in copied, model:
            train(each, [rank])
            for ours, theirs in zip(each.parameters(), plain.parameters(), strict=True):
                assert_close(whole(ours), theirs.detach())

    simulate_ranks(check, 2)


def test_a_copy_in_a_scope_keeps_what_replaced_a_tie() -> None:
    """A parameter that took the place of one is in the copy too, which says so when it runs."""

    def check(rank: int) -> None:
        model = seeded(TiedUnits)
        for module in model.first, model.last:
            fc.fully_shard(module)
        new, copies = nn.Parameter(torch.ones(4, 4, dtype=torch.float64)), []

        def edit() -> None:
            with gathered(model):
                model.last.weight = new
                copies.append(copy.deepcopy(model))

        with pytest.raises(RuntimeError, match="was edited inside a scope"):
            edit()
        [copied] = copies
        assert torch.equal(copied.last.weight, new)
        with pytest.raises(RuntimeError, match=r"'weight' of unit .* was replaced"):
            copied(data(0, rank, 3, 4))

    simulate_ranks(check, 2)


@pytest.mark.parametrize("outer", [unsharded, gathered])
def test_flags_set_in_a_scope_hold_around_it(outer: Callable[..., Any]) -> None:
    def check(rank: int) -> None:
        model = by_block(seeded(Tower))
        model.first.weight.requires_grad_(False)
        head, first = model.head.weight, model.first.weight
        with outer(model):
            with gathered(model):
                head.requires_grad_(False)
                first.requires_grad_(True)
            assert not (head * 2).requires_grad
            (3 * first.sum() + head.sum()).backward()
        assert head.grad is None
        assert torch.equal(whole(first.grad), torch.full_like(whole(first), 3))

    run_ranks(check, 2)


@pytest.mark.parametrize("scope", [unsharded, gathered])
def test_flags_set_in_a_scope_hold_in_it(scope: Callable[..., Any]) -> None:
    """What is frozen inside a scope trains no further there, and what is set free does."""

    def check(rank: int) -> None:
        model = by_block(seeded(Tower))
        model.first.weight.requires_grad_(False)
        head, first = model.head.weight, model.first.weight
        with scope(model):
            head.requires_grad = False
            first.requires_grad_(True)
            (3 * first.sum() + (2.0 + rank) * model.head.bias.sum() + head.sum()).backward()
            assert head.grad is None
            assert torch.equal(whole(first.grad), torch.full_like(whole(first), 3))
            assert torch.equal(whole(model.head.bias.grad), torch.full((2,), 2.5).double())
            assert not (head * 2).requires_grad and (first * 2).requires_grad
        assert not head.requires_grad and first.requires_grad
        model.zero_grad()
        square(model, data(0, rank)).backward()
        assert head.grad is None and first.grad is not None
        with torch.no_grad(), gathered(model, writeback=True):
            head.requires_grad_(True)
            first.requires_grad_(False)
            head.fill_(4), first.fill_(5)
        assert head.requires_grad and not first.requires_grad
        assert whole(head).eq(4).all() and whole(first).eq(5).all()
        with torch.no_grad(), gathered(model), torch.enable_grad():
            head.requires_grad_(False)
            head.requires_grad_(True)
            with pytest.raises(RuntimeError, match="gathered"):
                head.sum().backward()

    run_ranks(check, 2)


def test_flags_set_in_a_scope_hold_after_it() -> None:
    """With every option of the scope, with grad mode on and off, and through ``refresh``."""

    frozen = {"first.weight", "blocks.0.up.weight", "head.weight", "head.bias"}
    options: list[dict[str, bool]] = [
        {},
        {"writeback": True},
        {"writeback": True, "with_grads": True},
        {"writeback": True, "rank0_only": True},
        {"rank0_only": True},
        {"offload_to_cpu": True},
    ]

    def ranks(rank: int, grad: bool, given: dict[str, bool]) -> None:
        model = by_block(seeded(lambda: Tower(1)))
        square(model, data(0, rank)).backward()
        before = whole(model.first.weight.grad)
        with torch.set_grad_enabled(grad), gathered(model, **given):
            model.first.weight.requires_grad_(False)
            model.blocks[0].up.weight.requires_grad = False
            model.head.requires_grad_(False)
            if "with_grads" in given:
                assert torch.equal(model.first.weight.grad, before)
        assert torch.equal(whole(model.first.weight.grad), before)
        model.zero_grad()
        for _ in range(2):
            assert {n for n, p in model.named_parameters() if not p.requires_grad} == frozen
            square(model, data(0, rank)).backward()
            assert {n for n, p in model.named_parameters() if p.grad is None} == frozen
            fc.refresh(model)

    def every_option(rank: int) -> None:
        for given in options:
            for grad in (True, False):
                ranks(rank, grad, given)

    run_ranks(every_option, 2)


@pytest.mark.parametrize("options", [{}, {"strategy": fc.ShardingStrategy.NO_SHARD}, OFFLOADED])
def test_gradients_asked_for_in_a_scope_are_averaged(options: dict[str, Any]) -> None:
    """``autograd.grad``, also with ``create_graph``, gives the whole; ``backward(inputs=)`` adds to
    ``.grad``. Of a tensor made from a parameter, the gradient is this rank's own."""

    def train(model: nn.Module, loss: Callable[[], Tensor]) -> list[Tensor]:
        params = list(model.parameters())
        named = dict(model.named_parameters())
        if TORCH >= (2, 13):
            found = [*torch.autograd.grad(loss(), named, create_graph=True).values()]
        else:  # takes no dictionary
            found = [*torch.autograd.grad(loss(), params, create_graph=True)]
        sum(grad.square().sum() for grad in found).backward()
        loss().backward(inputs=params[:2])
        for param, grad in zip(params[2:4], torch.autograd.grad(loss(), params[2:4]), strict=True):
            param.grad = grad
        return found

    def check(rank: int) -> None:
        for scope in (gathered, unsharded):
            plain = seeded(Tower)
            model = by_block(copy.deepcopy(plain), **options)
            extra = lambda m: m.head.bias.square().sum()  # noqa: E731  directly used

            def ours(model: nn.Module = model) -> Tensor:
                return square(model, data(0, rank)) + extra(model)

            def theirs(plain: nn.Module = plain) -> Tensor:
                return sum(square(plain, data(0, r)) / 2 for r in range(2)) + extra(plain)

            with scope(model):
                found = train(model, ours)
                copied = model.first.bias.clone()
                part = copied.sum() * rank
                assert torch.autograd.grad(part, copied)[0].eq(rank).all()
            for mine, wanted in zip(found, train(plain, theirs), strict=True):
                assert type(mine) is Tensor
                assert_close(mine, wanted)
            check_gradients(model, plain)

    run_ranks(check, 2)


def test_gradients_asked_for_that_one_rank_uses() -> None:
    """Zeros are averaged in; what no rank used is None, or torch's error on every rank."""

    def check(rank: int) -> None:
        model = by_block(seeded(Tower))
        with gathered(model):
            weight, bias = model.head.weight, model.head.bias
            loss = bias.sum() + (rank * weight.sum() if rank else 0)
            found = torch.autograd.grad(loss, [weight, model.first.bias], allow_unused=True)
            assert found[0].eq(0.5).all() and found[1] is None
            with pytest.raises(RuntimeError, match="not have been used"):
                torch.autograd.grad(bias.sum(), [bias, weight])

    simulate_ranks(check, 2)

    run_ranks(check, 2)


def test_closures_in_a_scope_see_whole_parameters() -> None:
    """A step calls them; a forward in the scope after it would read old weights: an error."""

    def check(rank: int) -> None:
        plain = seeded(Tower)
        model = by_block(copy.deepcopy(plain))
        optimizer, reference = sgd(model.parameters()), sgd(plain.parameters())

        def closure() -> Tensor:
            assert not is_sharded(model.head.weight)
            loss = square(model, data(0, rank))
            loss.backward()
            return loss

        for arguments in ({}, {"closure": closure}):
            optimizer.zero_grad(), reference.zero_grad()
            sum(square(plain, data(0, r)) / 2 for r in range(2)).backward()
            reference.step()
            with gathered(model):
                optimizer.step(**arguments) if arguments else optimizer.step(closure)
                with pytest.raises(RuntimeError, match=r"'Tower'.*gathered.*'first.weight'.*Leave"):
                    model(data(0, rank))
                with pytest.raises(RuntimeError, match="which does not show that; leave that"):
                    gathered(model).__enter__()
        for p, q in zip(model.parameters(), plain.parameters(), strict=True):
            assert_close(whole(p), q.detach())
        search = torch.optim.LBFGS(model.parameters())
        with gathered(model), pytest.raises(ShardedWeightError, match=r"LBFGS takes all.*undo"):
            search.step(closure)
        with pytest.raises(ShardedWeightError, match="LBFGS takes all parameters as one vector"):
            search.step(lambda: (loss := square(model, data(0, rank))).backward() or loss)

    run_ranks(check, 2)


@pytest.mark.parametrize("scope", SCOPES)
def test_nodes_of_the_graph_are_refused(scope: Callable[..., Any]) -> None:
    """They see this rank's own gradient; asked for before the scope or for other tensors, as ever.

    Hooks on the parameter itself, which the error names, see the reduced gradient.
    """

    def check(rank: int) -> None:
        model, plain = pair(rank)
        model.zero_grad(), plain.zero_grad()
        seen: list[Tensor] = []
        with scope(model):
            p = model.head.weight
            for ask in (
                lambda: get_gradient_edge(p),
                lambda: register_multi_grad_hook([p], print),
                lambda: p.view_as(p).grad_fn,
                lambda: p.expand_as(p).grad_fn,
            ):
                with pytest.raises(ShardedWeightError, match=r"'head\.weight' .* own gradient"):
                    ask()
            hidden = model.head(torch.ones(1, 6, dtype=torch.float64))
            assert get_gradient_edge(hidden).node is hidden.grad_fn
            p.register_post_accumulate_grad_hook(lambda p: seen.append(whole(p.grad)))
        square(model, data(0, rank)).backward()
        sum(square(plain, data(0, r)) / 2 for r in range(2)).backward()
        assert len(seen) == 1
        assert_close(seen[0], plain.head.weight.grad)

    run_ranks(check, 2)
