"""Gradients of plain parameters and of the sharded ones agree, whoever changed which, and when."""

from __future__ import annotations

import copy
import gc
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fsdp_compose as fc
from fsdp_compose import accumulate, no_sync

from flat_ways import WAYS, twin, ways
from harness import rank_errors, simulate_ranks
from models import Tower, by_block, compare, data, one_unit, seeded, square, units, whole

Models = tuple[nn.Module, nn.Module]


def penalty(model: nn.Module) -> Tensor:
    return sum(0.01 * p.square().sum() for p in model.parameters() if p.requires_grad)


def penalised(model: nn.Module, x: Tensor) -> Tensor:
    return square(model, x) + penalty(model)


def penalise(both: Models) -> None:
    for model in both:
        penalty(model).backward()


def preset(both: Models) -> None:
    for model in both:
        for p in model.parameters():
            p.grad = torch.ones_like(p) * 0.1


def asked(both: Models) -> None:
    for model in both:
        params = list(model.parameters())
        for p, grad in zip(params, torch.autograd.grad(penalty(model), params), strict=True):
            p.grad = grad


BEFORE: dict[str, Callable[[Models], None] | None] = {
    "in the loss": None,
    "before": penalise,
    "preset": preset,
    "asked": asked,
}


@ways
@pytest.mark.parametrize("before", BEFORE)
@pytest.mark.parametrize("world", [1, 2])
def test_a_penalty_on_the_weights_counts(world: int, before: str, way: str) -> None:
    """Also behind steps whose gradients were cleared on the optimizer's side alone."""

    def ranks(rank: int) -> None:
        made = twin(rank, world, way)
        for seed in range(3):
            change = BEFORE[before]
            if change is not None:
                change((made.model, made.reference))
            made.backward(square if change is not None else penalised, seed)
            made.step()
        made.check()

    simulate_ranks(ranks, world)


@ways
@pytest.mark.parametrize("scope", [no_sync, accumulate])
def test_a_penalty_counts_while_others_wait(scope: Any, way: str) -> None:
    """What autograd adds itself is added to what is reduced later."""

    def ranks(rank: int) -> None:
        made = twin(rank, 2, way)
        for seed in range(2):
            with scope(made.model):
                made.backward(penalised, seed)
            made.backward(penalised, 10 + seed)
            made.step()
        made.check()

    simulate_ranks(ranks)


@ways
@pytest.mark.parametrize("change", [penalise, preset, asked])
def test_a_step_on_gradients_set_by_hand(change: Callable[[Models], None], way: str) -> None:
    """No forward of a unit ran: what is in the parameters' ``.grad`` is what is stepped with."""

    def ranks(rank: int) -> None:
        made = twin(rank, 2, way)
        for _ in range(2):
            change((made.model, made.reference))
            made.step()
        made.check()

    simulate_ranks(ranks)


EDITS: dict[str, Callable[[nn.Module], Any]] = {
    "cleared": lambda model: model.zero_grad(),
    "one cleared": lambda model: setattr(model.first.weight, "grad", None),
    "scaled": lambda model: [setattr(p, "grad", p.grad * 2) for p in model.parameters()],
    "norm": fc.grad_norm,
}


@ways
@pytest.mark.parametrize("edit", EDITS)
def test_gradients_edited_before_the_step(edit: str, way: str) -> None:
    """A step over plain parameters uses what the model's parameters have then."""

    def ranks(rank: int) -> None:
        made = twin(rank, 2, way)
        made.optim = torch.optim.SGD(WAYS[way](made.model), 0.1)
        made.plain_optim = torch.optim.SGD(made.reference.parameters(), 0.1)
        for seed in range(2):
            made.backward(square, seed)
            EDITS[edit](made.model)
            if edit != "norm":
                EDITS[edit](made.reference)
            for optim in (made.optim, made.plain_optim):
                optim.step()
                optim.zero_grad()
        made.check()

    simulate_ranks(ranks)


@ways
def test_gradients_replaced_on_the_plain_side(way: str) -> None:
    """The model's parameters and norms see what a caller put there."""

    def ranks(rank: int) -> None:
        made = twin(rank, 2, way)
        made.backward(square, 0)
        for p in WAYS[way](made.model):
            p.grad = p.grad * 3
        found, wanted = fc.grad_norm(made.model), 3 * fc.grad_norm(made.reference)
        compare("norm", found, wanted.to(found.dtype), made.tolerance)
        made.zero_grad()
        assert fc.grad_norm(made.model) == 0
        assert all(p.grad is None for p in made.model.parameters())

    simulate_ranks(ranks)


@ways
@pytest.mark.parametrize("event", ["converted", "looked at", "dropped", "kept"])
def test_cleared_gradients_do_not_come_back(event: str, way: str) -> None:
    """Whatever happens to model or optimizer between ``zero_grad()`` and the next backward."""

    def ranks(rank: int) -> None:
        plain = seeded(Tower)
        model = by_block(copy.deepcopy(plain))
        optim = torch.optim.SGD(WAYS[way](model), 0.1)
        square(model, data(0, rank)).backward()
        optim.zero_grad()
        if event == "converted":
            model.float().double()
            plain.float().double()
        elif event == "looked at":
            kept = [fc.flat_parameters(model), fc.local_parameters(model)]
            assert kept
        elif event == "dropped":
            del optim
            gc.collect()
        square(model, data(1, rank)).backward()
        (sum(square(plain, data(1, r)) for r in range(2)) / 2).backward()
        for p, q in zip(model.parameters(), plain.parameters(), strict=True):
            torch.testing.assert_close(whole(p.grad), q.grad)

    simulate_ranks(ranks)


@ways
def test_a_move_between_devices_sets_no_gradient(way: str) -> None:
    """It makes new tensors of gradients that were cleared on the other side."""
    model = by_block(seeded(Tower))
    params = WAYS[way](model)
    square(model, data(0, 0)).backward()
    torch.optim.SGD(params, 0.1).zero_grad()
    for p in model.parameters():
        p.grad = p.grad.clone()  # as Module.to("cuda") does
    for bucket in (bucket for unit in units(model) for bucket in unit.buckets):
        bucket.history.mirror.share_gradients(converted=True)
    assert all(p.grad is None for p in (*params, *model.parameters()))


@pytest.mark.parametrize("cleared", ["flat", "local", "model"])
def test_three_views_of_a_gradient_agree(cleared: str) -> None:
    """Flat and local parameters at once, and the model's own: replaced and cleared together."""
    model = by_block(seeded(Tower))
    both = {way: WAYS[way](model) for way in ("local", "flat")}
    square(model, data(0, 0)).backward()
    before = float(fc.grad_norm(model))
    every = [*both["flat"], *both["local"], *model.parameters()]
    chosen = both.get(cleared, list(model.parameters()))
    for p in chosen:
        p.grad = p.grad * 2
    norms = [float(fc.grad_norm(params)) for params in (*both.values(), model)]
    assert norms == pytest.approx([2 * before] * 3)
    fc.clip_grad_norm_(model, before)
    own = [float(torch.nn.utils.get_total_norm([p.grad for p in ps])) for ps in both.values()]
    assert own == pytest.approx([before] * 2)
    for p in chosen:
        p.grad = None
    assert fc.grad_norm(model) == 0 and all(p.grad is None for p in every)


@ways
def test_gradients_outlive_plain_parameters(way: str) -> None:
    """An optimizer that is dropped leaves gradients that it did not clear."""

    def ranks(rank: int) -> None:
        made = twin(rank, 2, way)
        made.backward(square, 0)
        made.optim = None
        gc.collect()
        made.check_grads()

    simulate_ranks(ranks)


@ways
def test_a_gradient_set_since_outlives_them_too(way: str) -> None:
    """They were cleared through plain parameters before, of which none is left."""
    model = by_block(seeded(Tower))
    params = WAYS[way](model)
    square(model, data(0, 0)).backward()
    for param in params:
        param.grad = None
    for p in model.parameters():
        p.grad = torch.ones_like(p)
    del param, params
    gc.collect()
    assert all(p.grad is not None for p in model.parameters())


@ways
@pytest.mark.filterwarnings("ignore:Using backward")
def test_a_graph_over_gradients_is_left(way: str) -> None:
    """What ``create_graph=True`` was asked for, whoever looks at plain gradients meanwhile."""
    model = by_block(seeded(Tower))
    params = WAYS[way](model)
    square(model, data(0, 0)).backward(create_graph=True)
    assert fc.grad_norm(params) > 0
    assert all(p.grad.requires_grad for p in model.parameters())


def hook(params: list[nn.Parameter]) -> None:
    params[0].register_hook(lambda grad: grad)


def hook_after(params: list[nn.Parameter]) -> None:
    params[0].register_post_accumulate_grad_hook(lambda param: None)


def freeze(params: list[nn.Parameter]) -> None:
    params[0].requires_grad_(False)


@ways
@pytest.mark.parametrize("change", [hook, hook_after, freeze])
def test_what_does_nothing_to_plain_parameters(change: Any, way: str) -> None:
    """Hooks, which nothing would run, and freezing are refused, and say what to do instead."""

    def ranks(rank: int) -> None:
        model = one_unit(seeded(Tower))
        params = WAYS[way](model)
        change(params)
        square(model, data(0, rank)).backward()

    for text in rank_errors(ranks, 2):
        assert text is not None and "of a plain parameter of unit 'Tower'" in text.replace(
            " on ", " of "
        )
        assert "module's own parameter" in text


@ways
def test_a_copied_optimizer_says_so(way: str) -> None:
    """Its parameters are copies that no model reads."""
    model = by_block(seeded(Tower))
    both = model, torch.optim.SGD(WAYS[way](model), 0.1)
    twin_model, optim = copy.deepcopy(both)
    square(twin_model, data(0, 0)).backward()
    with pytest.raises(RuntimeError, match=r"copies of plain parameters \(copy.deepcopy\)"):
        optim.step()
    both[1].step()


class CopiedWhole(torch.optim.SGD):
    """An optimizer whose copies have all its attributes."""

    def __getstate__(self) -> dict[str, Any]:
        return dict(self.__dict__)


@ways
def test_a_copy_of_one_that_has_stepped_says_so(way: str) -> None:
    model = by_block(seeded(Tower))
    optim = CopiedWhole(WAYS[way](model), 0.1)
    square(model, data(0, 0)).backward()
    optim.step()
    copied = copy.deepcopy((model, optim))[1]
    with pytest.raises(RuntimeError, match=r"copies of plain parameters \(copy.deepcopy\)"):
        copied.step()


@ways
@pytest.mark.parametrize("change", ["all", "one more", "in place"])
def test_an_optimizer_is_given_other_parameters(change: str, way: str) -> None:
    """Behind steps, and the step takes gradients that were set on the sharded side."""
    model, other = by_block(seeded(Tower)), by_block(seeded(Tower))
    params, others = WAYS[way](model), WAYS[way](other)
    given = params[:-1] if change == "one more" else list(params)
    optim = torch.optim.SGD(given, 0.1)
    for _ in range(2):
        square(model, data(0, 0)).backward()
        optim.step()
        optim.zero_grad()
    changed = model if change == "one more" else other
    if change == "all":
        optim.param_groups[0]["params"] = others
    else:
        optim.param_groups[0]["params"][:] = params if change == "one more" else others
    before = [p.detach().clone() for p in changed.parameters()]
    for p in changed.parameters():
        p.grad = torch.ones_like(p)
    optim.step()
    for p, old in zip(changed.parameters(), before, strict=True):
        assert torch.equal(p.detach(), old - 0.1)


@ways
def test_norms_of_plain_parameters_are_of_all_ranks(way: str) -> None:
    """Given to this library, they are what the model's parameters are; clipping scales both."""

    def ranks(rank: int) -> None:
        made = twin(rank, 3, way)
        made.backward(square, 0)
        params = WAYS[way](made.model)
        wanted = torch.nn.utils.clip_grad_norm_(made.reference.parameters(), 0.01)
        for found in (fc.grad_norm(params), fc.clip_grad_norm_(params, 0.01)):
            compare("norm", found, wanted.to(found.dtype), made.tolerance)
        made.check_grads()

    simulate_ranks(ranks, 3)


@ways
def test_ranks_agree_on_overflow_of_plain_parameters(way: str) -> None:
    """An infinity in one rank's part makes all of them skip the step."""

    def ranks(rank: int) -> tuple[bool, float]:
        model = one_unit(seeded(Tower))
        optim = torch.optim.SGD(WAYS[way](model), 0.1)
        scaler = fc.GradScaler("cpu", init_scale=8.0)
        scaler.scale(square(model, data(0, rank))).backward()
        before = whole(model.first.weight)
        if rank == 0:
            model.first.weight.grad.to_local()[0] = float("inf")
        scaler.step(optim)
        scaler.update()
        return torch.equal(before, whole(model.first.weight)), scaler.get_scale()

    assert simulate_ranks(ranks) == [(True, 4.0)] * 2


@ways
@pytest.mark.parametrize("side", ["own", "plain"])
def test_gradients_replaced_before_they_are_unscaled(side: str, way: str) -> None:
    """Of a gradient that another took the place of, the other one is unscaled, and stepped."""

    def ranks(rank: int) -> None:
        made = twin(rank, 2, way)
        made.optim = torch.optim.SGD(WAYS[way](made.model), 0.1)
        made.plain_optim = torch.optim.SGD(made.reference.parameters(), 0.1)
        scaler = fc.GradScaler("cpu", init_scale=1024.0)
        loss, plain = made.losses(square, 0)
        scaler.scale(loss).backward()
        plain.backward()
        for p in made.model.parameters() if side == "own" else WAYS[way](made.model):
            p.grad = p.grad * 1.0
        scaler.step(made.optim)
        made.plain_optim.step()
        made.check()

    simulate_ranks(ranks)


@ways
def test_what_looks_at_whole_parameters_is_refused(way: str) -> None:
    """An optimizer of sums over all elements, and torch's own scaler, see one rank's part."""
    model = by_block(seeded(Tower))
    params = WAYS[way](model)
    square(model, data(0, 0)).backward()
    for make in (torch.optim.LBFGS, torch.optim.Adafactor):
        with pytest.raises(RuntimeError, match=f"{make.__name__} computes with norms and sums"):
            make(params).step(lambda: torch.ones(()))
    scaler = torch.amp.GradScaler("cpu")
    scaler.scale(torch.ones(()))
    with pytest.raises(RuntimeError, match=r"use fsdp_compose\.GradScaler"):
        scaler.step(torch.optim.SGD(params, 0.1))
