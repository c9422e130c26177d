"""A weight itself that is kept, and what frames of a traceback keep, read after the release."""

from __future__ import annotations

import copy
import sys
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)
from torch.testing import assert_close
from torch.utils.checkpoint import checkpoint

import fsdp_compose as fc
from fsdp_compose.base import tracked
from fsdp_compose.core.guards import kept_tensors, kept_views
from fsdp_compose.core.guards.kept_views import KeptView

from harness import run_ranks, simulate_ranks
from models import assert_at_rest, data, seeded, square, units, whole

BAG: list[Tensor] = []
ERROR = "kept from a forward is a view of parameter '0.inner.weight' of unit '0.inner'"


class Inner(nn.Module):
    """Keeps its weight, or a view of it, outside attributes while ``keeps``, or fails."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(6, 6))
        self.bias = nn.Parameter(torch.randn(6))
        self.keeps, self.fails = "", False

    def forward(self, x: Tensor) -> Tensor:
        weight = self.weight
        view = weight.t()
        if self.keeps == "weight":
            BAG.append(weight)
        elif self.keeps == "view":
            BAG.append(view)
        elif self.keeps == "alias":
            BAG.append(weight.detach())
        if self.fails:
            raise ValueError("no")
        return torch.tanh(x @ view + self.bias)


class Outer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner, self.last = Inner(), nn.Linear(6, 6)
        self.recomputes = False

    def forward(self, x: Tensor) -> Tensor:
        if self.recomputes:
            return self.last(checkpoint(self.inner, x, use_reentrant=False))
        return self.last(self.inner(x))


def models(**options: Any) -> tuple[Any, Any]:
    plain = seeded(lambda: nn.Sequential(Outer(), Outer()))
    model = copy.deepcopy(plain)
    return fc.fully_shard(model, units=fc.wrap.by_class({Inner, Outer}), **options), plain


def assert_guarded(tensors: list[Any]) -> None:
    """Reading raises, and printing works."""
    assert tensors
    for tensor in tensors:
        assert repr(tensor) == "KeptView((6, 6), released)"
        with pytest.raises(RuntimeError, match=ERROR):
            tensor + 1


def assert_goes_on(model: Any, plain: Any, rank: int) -> None:
    """A step and a forward without gradients are those of the plain model."""
    model.zero_grad()
    plain.zero_grad()
    square(model, data(7, rank, 3, 6)).backward()
    sum(square(plain, data(7, r, 3, 6)) for r in range(2)).div(2).backward()
    for p, q in zip(model.parameters(), plain.parameters(), strict=True):
        if p.requires_grad:
            assert_close(whole(p.grad), q.grad, rtol=1e-12, atol=1e-12)
    with torch.no_grad():
        assert_close(model(data(8, rank, 3, 6)), plain(data(8, rank, 3, 6)))
    own = [tensor for unit in units(model) for tensor in kept_views._own_tensors(unit)]
    assert all(not isinstance(tensor, KeptView) for tensor in own)
    assert_at_rest(model)


@pytest.fixture(autouse=True)
def empty() -> Iterator[None]:
    BAG.clear()
    yield
    BAG.clear()


WAYS = ["plain", "frozen", "static"]


@pytest.mark.parametrize("way", WAYS)
def test_a_kept_weight_raises(way: str) -> None:
    """In a list that is no attribute: between forward and backward, after a step, after eval."""

    def ranks(rank: int) -> None:
        for keeps in ("weight", "view"):
            model, plain = models(static_buffers=way == "static")
            inner = model[0].inner
            inner.bias.requires_grad_(way != "frozen")
            inner.weight.requires_grad_(way != "frozen")
            for step in range(4):
                inner.keeps = keeps if step != 1 else ""
                loss = square(model, data(step, rank, 3, 6))
                if step != 1:
                    assert_guarded(BAG)
                loss.backward()
                if step != 1:
                    assert_guarded(BAG)
                BAG.clear()
            for _ in range(2):
                with torch.no_grad():
                    model(data(1, rank, 3, 6))
                assert_guarded(BAG)
            inner.keeps = ""
            BAG.clear()
            assert_goes_on(model, plain, rank)

    run_ranks(ranks, 2)


@pytest.mark.parametrize("keeps", ["weight", "view", "alias"])
def test_what_is_kept_first_in_a_later_step_raises(keeps: str) -> None:
    """In that step and in each one after it, before its backward and behind it."""

    def ranks(rank: int) -> None:
        model, plain = models()
        inner = model[0].inner
        for step in range(6):
            inner.keeps = keeps if step > 1 else ""
            loss = square(model, data(step, rank, 3, 6))
            for _ in range(2):
                if inner.keeps:
                    assert_guarded(BAG)
                if loss.grad_fn is not None:
                    loss.backward()
                    loss = loss.detach()
            BAG.clear()
        inner.keeps = ""
        assert_goes_on(model, plain, rank)

    run_ranks(ranks, 2)


def test_weights_of_several_units_are_kept_at_once() -> None:
    """Each is guarded, in each step again, and the library goes on without it."""

    def ranks(rank: int) -> None:
        model, plain = models()
        for step in range(4):
            for part in model:
                part.inner.keeps = ("weight", "view")[step % 2]
            for grad in (True, False):
                with torch.set_grad_enabled(grad):
                    loss = square(model, data(step, rank, 3, 6))
                assert [type(tensor) for tensor in BAG] == [KeptView, KeptView]
                if grad:
                    loss.backward()
                for number, tensor in enumerate(BAG):
                    with pytest.raises(RuntimeError, match=f"of unit '{number}.inner'"):
                        tensor + 1
                BAG.clear()
        for part in model:
            part.inner.keeps = ""
        assert_goes_on(model, plain, rank)

    run_ranks(ranks, 2)


def frames_of(error: BaseException) -> list[dict[str, Any]]:
    """Locals of every frame of a traceback."""
    found, traceback = [], error.__traceback__
    while traceback is not None:
        found.append(traceback.tb_frame.f_locals)
        traceback = traceback.tb_next
    return found


@pytest.mark.parametrize("way", WAYS)
def test_a_traceback_shows_no_released_memory(way: str) -> None:
    """Of a forward that failed, in training and without gradients, at first and later."""

    def ranks(rank: int) -> None:
        model, plain = models(static_buffers=way == "static")
        inner = model[0].inner
        for p in (model[0].inner.weight, plain[0].inner.weight):
            p.requires_grad_(way != "frozen")
        for step in range(3):
            for grad in (True, False):
                inner.fails = True
                try:
                    with torch.set_grad_enabled(grad):
                        model(data(step, rank, 3, 6))
                except ValueError as error:
                    (local,) = [v for v in frames_of(error) if "view" in v]
                    assert_guarded([local["weight"], local["view"]])
                inner.fails = False
                assert_goes_on(model, plain, rank)

    run_ranks(ranks, 2)


def test_a_failed_backward_shows_no_released_memory() -> None:
    """Its recomputation failed; what its frames keep is readable until the next forward."""

    def ranks(rank: int) -> None:
        model, plain = models()
        model[0].recomputes = True
        for step in range(2):
            loss = square(model, data(step, rank, 3, 6))
            model[0].inner.fails = True
            try:
                loss.backward()
            except ValueError as error:
                (local,) = [v for v in frames_of(error) if "view" in v]
                assert_close(local["view"] + 1, plain[0].inner.weight.t() + 1)
                model[0].inner.fails = False
                model(data(step, rank, 3, 6))
                assert_guarded([local["weight"], local["view"]])
            assert_goes_on(model, plain, rank)

    run_ranks(ranks, 2)


def test_a_gathered_weight_is_guarded_at_its_release() -> None:
    """The outermost unit's after its backward; when it is resharded, where it stays gathered."""

    def ranks(rank: int) -> None:
        model = fc.fully_shard(seeded(Inner))
        model.keeps = "weight"
        for _ in range(3):
            loss = square(model, data(0, rank, 3, 6))
            assert type(BAG[0]) is Tensor and (BAG[0] + 1).shape == (6, 6)
            loss.backward()
            with pytest.raises(RuntimeError, match="of unit 'Inner'"):
                BAG.pop() + 1
        fc.set_reshard_after_backward(model, False)
        for keeps in ("view", "weight", "view"):
            model.keeps = keeps
            square(model, data(0, rank, 3, 6)).backward()
            fc.reshard(model)
            with pytest.raises(RuntimeError, match="of unit 'Inner'"):
                BAG.pop() + 1

    run_ranks(ranks, 2)


@pytest.mark.parametrize("strategy", ["FULL_SHARD", "NO_SHARD"])
def test_a_weight_that_is_never_released_may_be_kept(strategy: str) -> None:
    """Of one rank, or of copies on every rank: it goes on reading, as in a plain module."""

    def ranks(rank: int) -> None:
        model = fc.fully_shard(seeded(Inner), strategy=fc.ShardingStrategy[strategy])
        for step in range(4):
            model.keeps = ("weight", "view")[step % 2]
            square(model, data(step, rank, 3, 6)).backward()
            with torch.no_grad():
                model(data(step, rank, 3, 6))
            assert [type(tensor) for tensor in BAG] == [Tensor, Tensor]
            for tensor in BAG:
                found = tensor.t() if model.keeps == "view" else tensor
                assert_close(found.detach(), whole(model.weight).detach())
            BAG.clear()

    run_ranks(ranks, 1 if strategy == "FULL_SHARD" else 2)


def test_a_steady_state_looks_at_no_weight(monkeypatch: pytest.MonkeyPatch) -> None:
    """After the first steps of each kind nothing is asked of any unit's weights."""
    asked: list[int] = []
    guard = kept_views._guard_views
    monkeypatch.setattr(
        kept_views, "_guard_views", lambda engine, found: asked.append(0) or guard(engine, found)
    )

    def ranks(rank: int) -> None:
        model, _ = models()
        for step in range(6):
            if step == 3:
                asked.clear()
            square(model, data(step, rank, 3, 6)).backward()
            with torch.no_grad():
                model(data(step, rank, 3, 6))
        assert not asked

    run_ranks(ranks, 2)


@pytest.mark.parametrize("frozen", [False, True])
def test_a_first_backward_from_what_a_list_keeps(frozen: bool) -> None:
    """A tensor that was made inside a unit's very first forward, before any other backward."""

    def ranks(rank: int) -> None:
        model, plain = models()
        found: list[Tensor] = []

        def keep(module: nn.Module, args: tuple[Tensor]) -> None:
            found.append(args[0] * 2)

        for m in (model, plain):
            m[0].inner.weight.requires_grad_(not frozen)
            m[0].last.register_forward_pre_hook(keep)
        square(model, data(0, rank, 3, 6))
        found.pop().square().mean().backward()
        for r in range(2):
            square(plain, data(0, r, 3, 6))
            (found.pop().square().mean() / 2).backward()
        for p, q in zip(model.parameters(), plain.parameters(), strict=True):
            assert (p.grad is None) == (q.grad is None)
            if q.grad is not None:
                assert_close(whole(p.grad), q.grad, rtol=1e-12, atol=1e-12)

    run_ranks(ranks, 2)


class Repeats(nn.Module):
    """Its forward makes a graph of another size each time."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.times = nn.Linear(6, 6), 0

    def forward(self, x: Tensor) -> Tensor:
        self.times += 1
        for _ in range(self.times):
            x = torch.tanh(self.inner(x))
        return x


def note_looks(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Note each look through all that Python's garbage collector knows."""
    looks: list[int] = []
    find = tracked.gc.get_referrers
    monkeypatch.setattr(tracked.gc, "get_referrers", lambda *kinds: looks.append(0) or find(*kinds))
    return looks


@pytest.mark.parametrize("debug", [False, True])
def test_changing_graphs_are_not_always_looked_into(
    debug: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After so many kinds of graphs a forward costs what it did, except in debug mode."""
    looks = note_looks(monkeypatch)

    def ranks(rank: int) -> None:
        fc.set_debug(debug)
        plain = seeded(lambda: nn.Sequential(Repeats()))
        model = copy.deepcopy(plain)
        fc.fully_shard(model, units=fc.wrap.by_class({Repeats}))
        for step in range(kept_views._LOOKS + 8):
            if step == kept_views._LOOKS:
                looks.clear()
            x = data(step, rank, 3, 6)
            loss = square(model, x)
            assert_close(loss, square(plain, x))
            loss.backward()
        assert bool(looks) == debug

    try:
        simulate_ranks(ranks)
    finally:
        fc.set_debug(False)


class Split(nn.Linear):
    """Keeps its weight, which tensor parallelism splits too."""

    keeps = ""

    def forward(self, x: Tensor) -> Tensor:
        if self.keeps == "weight":
            BAG.append(self.weight)
        elif self.keeps == "view":
            BAG.append(self.weight.t())
        return super().forward(x)


def test_a_weight_split_twice_raises() -> None:
    """A DTensor asks no override of its local tensor's, so it is guarded itself."""

    def ranks(rank: int) -> None:
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        model = seeded(lambda: nn.Sequential(Split(6, 8), nn.Tanh(), Split(8, 6)))
        parallelize_module(model, mesh["tp"], {"0": ColwiseParallel(), "2": RowwiseParallel()})
        fc.fully_shard(model, mesh=mesh["dp"], units=fc.wrap.by_class({Split}))
        for step in range(6):
            keeps = ("weight", "view")[step % 2]
            model[0].keeps = keeps
            loss = square(model, data(step, rank // 2, 3, 6))
            (kept,) = BAG
            shape = (8, 6) if keeps == "weight" else (6, 8)
            for _ in range(2):
                assert isinstance(kept, DTensor)
                assert repr(kept) == f"KeptDTensor({shape}, released)"
                for read in (lambda: kept + 1, kept.to_local, kept.full_tensor):
                    with pytest.raises(RuntimeError, match="of unit '0', whose"):
                        read() + 1
                if loss.grad_fn is not None:
                    loss.backward()
                    loss = loss.detach()
            with fc.gathered(model):
                known = model[0].weight.full_tensor()
            fc.unshard(model[0])
            found = kept.full_tensor()
            assert_close(found if keeps == "weight" else found.t(), known)
            fc.reshard(model[0])
            BAG.clear()

    run_ranks(ranks, 4)


def test_an_early_exit_looks_through_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A forward that is left early by an exception, as to read features, stays fast."""
    looks = note_looks(monkeypatch)

    class Stop(Exception):
        pass

    def stop(*_: Any) -> None:
        raise Stop

    def ranks(rank: int) -> None:
        model, plain = models()
        with torch.no_grad():
            model(data(0, rank, 3, 6))
            handle = model[1].last.register_forward_hook(stop)
            before = len(looks)
            for step in range(3):
                with pytest.raises(Stop):
                    model(data(step, rank, 3, 6))
            assert len(looks) == before
        handle.remove()
        assert_goes_on(model, plain, rank)

    simulate_ranks(ranks)


@pytest.mark.parametrize("mode", [torch.enable_grad, torch.no_grad, torch.inference_mode])
def test_references_are_counted_as_torch_does(mode: Any) -> None:
    """Nothing is held by others where only a list of the library holds it, or a graph too."""
    held = [torch.ones(1, requires_grad=True).clone()]
    kept_tensors._beside.cache_clear()
    for graph in (None, held[0] * held[0], None):
        with mode():
            (count,) = map(sys.getrefcount, held)
            assert count - kept_tensors.count_beside(held[0]) == 1
        other = held[0]
        (count,) = map(sys.getrefcount, held)
        assert count - kept_tensors.count_beside(held[0]) == 2
        del other, graph
