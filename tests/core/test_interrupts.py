"""After a KeyboardInterrupt that is caught, units are closed, and no gradient is lost."""

from __future__ import annotations

import copy
import gc
import sys
import weakref
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.utils import clip_grad_norm_
from torch.testing import assert_close

from fsdp_compose import (
    apply,
    flat_parameters,
    fully_shard,
    load_state_dict,
    local_parameters,
    refresh,
    undo,
    unshard,
    wrap,
)
from fsdp_compose.core.guards import partly_run
from fsdp_compose.core.state import Unit

from harness import simulate_ranks
from models import (
    WIDTH,
    Tower,
    Twin,
    assert_at_rest,
    by_block,
    data,
    seeded,
    sgd,
    square,
    units,
    whole,
)


class Catching(nn.Module):
    """Goes on where an interrupt ended the module inside it, perhaps by calling it again."""

    def __init__(self, again: bool = False) -> None:
        super().__init__()
        self.first, self.inner = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.again, self.stops, self.shielded = again, 0, False

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        try:
            return torch.tanh(self.inner(x))
        except KeyboardInterrupt:
            return torch.tanh(self.inner(x)) if self.again else x


def stop(outer: Any, *_: Any) -> None:
    """Forward pre-hook: interrupt a forward as often as ``outer.stops`` says."""
    if outer.stops:
        outer.stops -= 1
        raise KeyboardInterrupt


@pytest.mark.parametrize("again", [False, True])
@pytest.mark.parametrize("enabled", [False, True])
@pytest.mark.parametrize("options", [{}, {"reshard_after_forward": True}], ids=str)
@pytest.mark.filterwarnings("ignore:the forward of unit")
def test_a_forward_that_catches_the_interrupt(
    again: bool, enabled: bool, options: dict[str, Any]
) -> None:
    """The unit inside trains on; left gathered, it would compute with old weights for ever."""

    def ranks(rank: int) -> None:
        plain = seeded(partial(Catching, again))
        model = fully_shard(copy.deepcopy(plain), units=wrap.by_class({nn.Linear}), **options)
        optims = [sgd(model.parameters()), sgd(plain.parameters())]
        for module in (plain, model):
            module.inner.register_forward_pre_hook(partial(stop, module))
        for step in range(4):
            if step == 1:
                with torch.set_grad_enabled(enabled):
                    model.stops = plain.stops = 1
                    assert_close(model(data(step, rank)), plain(data(step, rank)))
            for optim in optims:
                optim.zero_grad()
            square(model, data(step, rank)).backward()
            (square(plain, data(step, 0)) + square(plain, data(step, 1))).div(2).backward()
            for optim in optims:
                optim.step()
        for found, wanted in zip(model.parameters(), plain.parameters(), strict=True):
            assert_close(whole(found), wanted)
        assert_at_rest(model)

    simulate_ranks(ranks)


class Given(Catching):
    """Computes the module inside on tensors that the caller gives, if any."""

    def forward(self, x: Tensor, given: dict[str, Tensor] | None = None) -> Tensor:
        try:
            x = self.first(x)
            return functional_call(self.inner, given, (x,)) if given else self.inner(x)
        except KeyboardInterrupt:
            return x


@pytest.mark.parametrize("names", [["weight"], ["weight", "bias"]], ids=len)
@pytest.mark.parametrize("inside", [False, True])
def test_a_functional_call_is_interrupted_inside(names: list[str], inside: bool) -> None:
    """The modules hold their parameters again, and not what the call was given in their place."""

    def ranks(rank: int) -> None:
        plain = seeded(Given)
        model = fully_shard(copy.deepcopy(plain), units=wrap.by_class({nn.Linear}))
        given = {name: torch.zeros_like(plain.inner.get_parameter(name)) for name in names}
        x, results = data(0, rank), []
        for module in (plain, model):
            module.inner.register_forward_pre_hook(partial(stop, module))
            module.stops = 1
            if inside:
                results.append(module(x, given))
            else:
                every = {f"inner.{name}": value for name, value in given.items()}
                results.append(functional_call(module, every, (x,)))
            results.append(module(x))
        found, wanted = results[2:], results[:2]
        assert_close(found, wanted)
        found[1].sum().backward()
        assert model.inner.weight.grad is not None
        assert_at_rest(model)

    simulate_ranks(ranks)


def test_an_interrupt_inside_saved_tensor_hooks() -> None:
    """Hooks that the caller entered apply to the rest of its forward, and none is left."""

    def ranks(rank: int) -> None:
        plain = seeded(Catching)
        model = fully_shard(copy.deepcopy(plain), units=wrap.by_class({nn.Linear}))
        model.inner.register_forward_pre_hook(partial(stop, model))
        kept: list[Tensor] = []
        with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
            model.stops = 1
            model(data(0, rank)).sum().backward()
        count = len(kept)
        model(data(0, rank)).sum().backward()
        assert count and len(kept) == count

    simulate_ranks(ranks)


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")  # torch's, of clipping
def test_a_step_after_an_interrupt() -> None:
    """It raises, as clipping may have reached nothing; the parameters are shown then."""

    def ranks(rank: int) -> None:
        model = by_block(seeded(Tower))
        optim = sgd(model.parameters())
        square(model, data(0, rank)).backward()
        wanted = clip_grad_norm_(list(model.parameters()), 1e9)
        outer: Any = model
        outer.stops = 1
        handle = model.head.register_forward_pre_hook(partial(stop, model))
        with pytest.raises(KeyboardInterrupt):
            model(data(1, rank))
        handle.remove()
        assert not clip_grad_norm_(model.parameters(), 1e9).equal(wanted)
        before = whole(model.head.weight)
        with pytest.raises(RuntimeError, match=r"SGD.step\(\): the forward before .* interrupted"):
            optim.step()
        assert_close(whole(model.head.weight), before)
        assert_close(clip_grad_norm_(model.parameters(), 1e9), wanted)
        optim.step()
        assert not whole(model.head.weight).equal(before)
        square(model, data(1, rank)).backward()
        optim.zero_grad()
        assert_at_rest(model)

    simulate_ranks(ranks)


def test_evaluation_lets_go_of_a_deleted_model() -> None:
    """The next forward of any model lets go of what the interrupted one had gathered."""
    left, model = (by_block(seeded(Tower)) for _ in range(2))
    freed = weakref.ref(units(left)[0])
    left.head.register_forward_pre_hook(partial(stop, SimpleNamespace(stops=1)))
    with pytest.raises(KeyboardInterrupt):
        left(data(1, 0))
    del left
    gc.collect()
    with torch.no_grad():
        model(data(0, 0))
    assert freed() is None


@pytest.mark.parametrize("call", [undo, refresh, partial(apply, fn=lambda module: None)], ids=str)
@pytest.mark.parametrize("cleared", [False, True])
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")  # torch's, of clearing
def test_a_call_between_passes(call: Any, cleared: bool) -> None:
    """It works after an interrupt; where clearing did not reach gradients, it says so once."""

    def ranks(rank: int) -> None:
        plain, model = seeded(Tower), by_block(seeded(Tower))
        square(model, data(1, rank)).backward()
        outer: Any = model
        if cleared:
            model.zero_grad()
        outer.stops = 1
        handle = model.head.register_forward_pre_hook(partial(stop, model))
        with pytest.raises(KeyboardInterrupt):
            model(data(0, rank))
        handle.remove()
        if not cleared:
            model.zero_grad()  # which finds gathered tensors
            with pytest.raises(RuntimeError, match="the forward before this one was interrupted"):
                call(model)
            model.zero_grad()
        call(model)
        for module in (plain, model):
            square(module, data(0, 0)).backward()
        for found, wanted in zip(model.parameters(), plain.parameters(), strict=True):
            assert_close(whole(found.grad), wanted.grad)

    simulate_ranks(ranks)


@pytest.mark.parametrize("number", [0, 1, 2])
@pytest.mark.parametrize("call", ["gather", "release"])
def test_an_interrupt_between_two_lines(
    call: str, number: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A unit that was held, and not gathered yet, can be; one held no more does not stay gathered.

    The next step also leaves nothing gathered.
    """

    def ranks(rank: int) -> None:
        twin = Twin(rank, 2, Tower)
        twin.train()
        work, left = units(twin.model)[0].engine.schedule.work, number
        work_on = getattr(work, call)

        def stop_or_work(*given: Any) -> None:
            nonlocal left
            left -= 1
            if left == -1:
                raise KeyboardInterrupt
            work_on(*given)

        monkeypatch.setattr(work, call, stop_or_work)
        with pytest.raises(KeyboardInterrupt):
            twin.model(data(0, rank))
        twin.train()

    simulate_ranks(ranks)


def test_an_interrupt_as_a_unit_is_unsharded(monkeypatch: pytest.MonkeyPatch) -> None:
    """It counts as held no more, and the next step leaves nothing gathered."""

    def ranks(rank: int) -> None:
        twin = Twin(rank, 2, Tower)

        def stop_now(*_: Any) -> None:
            raise KeyboardInterrupt

        for unit in units(twin.model):
            with monkeypatch.context() as patch:
                patch.setattr(unit.engine.schedule.work, "gather", stop_now)
                with pytest.raises(KeyboardInterrupt):
                    unshard(unit.modules[0]())
            twin.train(steps=1)

    simulate_ranks(ranks)


@pytest.mark.parametrize("plain_over", [flat_parameters, local_parameters])
def test_plain_parameters_were_cleared(plain_over: Any) -> None:
    """``zero_grad()`` of an optimizer over plain parameters counts: no gradient is left."""

    def ranks(rank: int) -> None:
        plain, model = seeded(Tower), by_block(seeded(Tower))
        optims = [sgd(plain.parameters()), sgd(plain_over(model))]
        outer: Any = model
        outer.stops = 0
        model.head.register_forward_pre_hook(partial(stop, model))
        for step in range(3):
            for optim, module in zip(optims, (plain, model), strict=True):
                optim.zero_grad()
                if step == 1 and module is model:
                    outer.stops = 1
                    with pytest.raises(KeyboardInterrupt):
                        model(data(step, rank))
                    optim.zero_grad()
                square(module, data(step, 0)).backward()
                optim.step()
        for found, wanted in zip(model.parameters(), plain.parameters(), strict=True):
            assert_close(whole(found), wanted)
        assert_at_rest(model)

    simulate_ranks(ranks)


@pytest.mark.parametrize(
    "call", [load_state_dict, nn.Module.load_state_dict], ids=["ours", "torch"]
)
def test_loading_after_an_interrupt(call: Any) -> None:
    """The model counts as gathered no more, nor what was loaded as written in a forward."""

    def ranks(rank: int) -> None:
        plain, model = seeded(Tower), by_block(seeded(Tower, 1))
        square(model, data(1, rank))
        outer: Any = model
        outer.stops = 1
        handle = model.head.register_forward_pre_hook(partial(stop, model))
        with pytest.raises(KeyboardInterrupt):
            model(data(0, rank))
        handle.remove()
        call(model, plain.state_dict())
        assert_at_rest(model)
        for module in (plain, model):
            square(module, data(0, 0)).backward()
        for found, wanted in zip(model.parameters(), plain.parameters(), strict=True):
            assert_close(whole(found), wanted)
            assert_close(whole(found.grad), wanted.grad)

    simulate_ranks(ranks)


@pytest.mark.parametrize("names", [["weight"], ["weight", "bias"]], ids=len)
def test_a_step_after_a_functional_call(names: list[str]) -> None:
    """The modules hold the caller's tensors no more: the parameters are trained."""

    def ranks(rank: int) -> None:
        plain, model = seeded(Tower), by_block(seeded(Tower))
        optims = [sgd(module.parameters()) for module in (plain, model)]
        outer: Any = model
        outer.stops = 1
        handle = model.head.register_forward_hook(partial(stop, model))
        given = {f"head.{n}": torch.zeros_like(plain.head.get_parameter(n)) for n in names}
        with pytest.raises(KeyboardInterrupt):
            functional_call(model, given, (data(0, rank),))
        handle.remove()
        with pytest.raises(RuntimeError, match="no parameter has a gradient"):
            optims[1].step()
        for module, optim in zip((plain, model), optims, strict=True):
            square(module, data(0, 0)).backward()
            optim.step()
        for found, wanted in zip(model.parameters(), plain.parameters(), strict=True):
            assert_close(whole(found), wanted)
        assert_at_rest(model)

    simulate_ranks(ranks)


def test_a_step_on_what_a_forward_reads() -> None:
    """The rest of the forward would compute with the weights from before it, without a word."""

    class Stepping(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(WIDTH, WIDTH)

        def forward(self, x: Tensor, optim: Any = None) -> Tensor:
            return self.fit(x, optim) if optim else self.inner(x)

        def fit(self, x: Tensor, optim: Any) -> Tensor:
            for _ in range(2):
                optim.zero_grad()
                self.inner(x).square().sum().backward()
                optim.step()
            return self.inner(x).detach()

    def ranks(rank: int) -> None:
        plain, x = seeded(Stepping), data(0, 0)
        results = plain(x, sgd(plain.parameters()))
        model = seeded(Stepping)
        fully_shard(model, methods=("forward", "fit"))
        optim = sgd(model.parameters())
        for call in (model, model.fit):
            with pytest.raises(RuntimeError, match="inside the forward of unit 'Stepping'"):
                call(x, optim)
            assert_at_rest(model)
        outside = seeded(Stepping)
        fully_shard(outside.inner)  # and the module that runs both is no unit
        assert_close(outside(x, sgd(outside.parameters())), results)

    simulate_ranks(ranks)


def test_a_step_inside_a_forward() -> None:
    """No interrupt: an optimizer of something else steps while a forward runs."""

    class Stepping(Tower):
        def forward(self, x: Tensor) -> Tensor:
            with torch.enable_grad():
                extra = nn.Parameter(torch.ones(1, dtype=torch.float64))
                (extra * 2).sum().backward()
            sgd([extra]).step()
            return super().forward(x)

    def ranks(rank: int) -> None:
        model = by_block(seeded(Stepping))
        for _ in range(2):
            square(model, data(0, rank)).backward()
        assert_at_rest(model)

    simulate_ranks(ranks)


def test_an_interrupt_as_autograd_grad_begins() -> None:
    """The units that it had been told of go on to get gradients in later steps."""

    def stop(frame: Any, event: str, value: Any) -> Any:
        if "fsdp_compose" not in Path(frame.f_code.co_filename).parts:
            return None
        told = [unit.run.chosen is not None for unit in units(twin.model)]
        if any(told) and not all(told):
            sys.settrace(None)
            raise KeyboardInterrupt
        return stop

    twin = Twin(0, 1, Tower)
    loss = square(twin.model, data(0, 0))
    sys.settrace(stop)
    try:
        with pytest.raises(KeyboardInterrupt):
            torch.autograd.grad(loss, list(twin.model.parameters()))
    finally:
        sys.settrace(None)
    twin.train()


def test_an_interrupt_as_leaves_are_put_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """What ``zero_grad`` does not reach then is an error of the next forward, and said once."""

    def stop(unit: Unit) -> None:
        monkeypatch.undo()
        raise KeyboardInterrupt

    model = fully_shard(seeded(Tower))
    square(model, data(0, 0)).backward()
    monkeypatch.setattr(partly_run, "install_leaves", stop)
    with pytest.raises(KeyboardInterrupt):
        model(data(1, 0))
    with pytest.raises(RuntimeError, match="the forward before this one was interrupted"):
        model(data(1, 0))
    assert model.head.weight.grad is not None
    model.zero_grad()
    square(model, data(1, 0)).backward()
    assert_at_rest(model)


@pytest.mark.parametrize("other", ["around", "beside"])
@pytest.mark.parametrize("enabled", [False, True])
def test_the_next_forward_is_of_another_unit(other: str, enabled: bool) -> None:
    """A block called by itself is interrupted; the model around it, or another, is next."""

    def stop(*_: Any) -> None:
        raise KeyboardInterrupt

    def ranks(rank: int) -> None:
        model = by_block(seeded(Tower))
        twin = Twin(rank, 2, Tower)
        block = (twin.model if other == "around" else model).blocks[1]
        for _ in range(2):
            twin.train()
            handle = block.up.register_forward_pre_hook(stop)
            with torch.set_grad_enabled(enabled), pytest.raises(KeyboardInterrupt):
                block(data(0, rank))
            handle.remove()
            with torch.no_grad():
                assert_close(twin.model(data(1, rank)), twin.mine(data(1, rank)))
            twin.model.zero_grad()
            twin.train()
        for module in (model, twin.model):
            assert_at_rest(module)

    simulate_ranks(ranks)
