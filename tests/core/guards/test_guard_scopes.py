"""What a parameter answers while a scope shows it in full, and what it is after the scope."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)
from torch.testing import assert_close

import fsdp_compose as fc
from fsdp_compose import fully_shard, gathered, reshard, undo, unshard
from fsdp_compose.core.guards.gathered_memory import lies_in
from fsdp_compose.core.guards.scope_parameters import (
    Layer,
    at_rest,
    end_rests,
    hide,
    hide_all,
    is_connected,
    is_whole,
    leaf_of,
    rest,
    show,
)
from fsdp_compose.core.state import owner_of
from fsdp_compose.sharded import ShardedWeightError, is_sharded

from harness import simulate_ranks
from models import Tower, assert_at_rest, by_block, data, one_unit, seeded, square, units, whole


@contextmanager
def unsharded(model: nn.Module) -> Iterator[nn.Module]:
    unshard(model)
    yield model
    reshard(model)


SCOPES: list[Any] = [gathered, unsharded]


def linear() -> nn.Module:
    return seeded(lambda: nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2)))


def pair() -> tuple[nn.Module, nn.Module]:
    """One sharded unit, the first of whose layers has a frozen weight, and its plain twin."""
    plain = linear()
    plain[0].weight.requires_grad_(False)
    return one_unit(copy.deepcopy(plain)), plain


@pytest.mark.parametrize("scope", SCOPES)
def test_a_shown_parameter_answers_as_a_leaf(scope: Any) -> None:
    """Each of the questions that torch and users ask a parameter, with the answer of a leaf."""

    def ranks(rank: int) -> None:
        model, plain = pair()
        with scope(model):
            for p, q in zip(model.parameters(), plain.parameters(), strict=True):
                assert isinstance(p, nn.Parameter) and p._is_param is True
                assert p.is_leaf is True and p.retains_grad is False
                assert p.grad_dtype is p.dtype is torch.float64
                assert p.requires_grad is q.requires_grad
                assert p.retain_grad() is None and p.grad is None
                assert is_whole(p) is True and not is_whole(q)
                assert is_connected(p) is q.requires_grad and not is_connected(q)
                assert (p.grad_fn is not None) is q.requires_grad
                assert not is_connected(q * 2 if q.requires_grad else q)
                assert torch.equal(p, q) and type(p + 0) is Tensor
            assert is_sharded(leaf_of(model[1].bias)) and leaf_of(plain) is plain
        p = model[1].weight
        assert not is_whole(p) and not is_connected(p) and leaf_of(p) is p
        assert p.requires_grad_(False) is p and not p.requires_grad

    simulate_ranks(ranks)


@pytest.mark.parametrize("scope", SCOPES)
def test_copies_of_a_shown_parameter_are_plain(scope: Any) -> None:
    """Shallow, deep, pickled or by ``nn.Parameter(p)``: trained or not, as the parameter is."""

    def ranks(rank: int) -> None:
        model, plain = pair()
        with scope(model):
            for p, q in zip(model.parameters(), plain.parameters(), strict=True):
                deep = copy.deepcopy([p, p])
                copies = [copy.copy(p), deep[0], pickle.loads(pickle.dumps(p))]
                assert deep[0] is deep[1]
                for made in (*copies, nn.Parameter(p, q.requires_grad)):
                    assert type(made) is nn.Parameter and torch.equal(made, q)
                    assert made.requires_grad is q.requires_grad and made.grad_fn is None
                    assert made.is_leaf and isinstance(made, nn.Parameter)
                for flag in (True, False):
                    assert nn.Parameter(p, flag).requires_grad is flag
                assert nn.Parameter(p).requires_grad and p.requires_grad is q.requires_grad
                assert copies[0].data_ptr() == p.data_ptr() == nn.Parameter(p).data_ptr()
                assert deep[0].data_ptr() != p.data_ptr()
                detached = p.detach()
                assert type(detached) is Tensor and not detached.requires_grad
                assert detached.data_ptr() == p.data_ptr()
        square(model, data(0, rank, 2, 3)).backward()
        assert model[0].weight.grad is None and model[1].weight.grad is not None

    simulate_ranks(ranks)


class Viewing(nn.Module):
    """Looks at its own weight as views of other tensors' shapes, and of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.arange(6.0))

    def forward(self, x: Tensor) -> Tensor:
        w = self.weight
        return w.view_as(x) * x + w.view_as(w).view_as(x) + w.expand_as(w).view_as(x)


@pytest.mark.parametrize("scope", SCOPES)
def test_views_of_a_shown_parameter_are_values(scope: Any) -> None:
    """``view_as`` and ``expand_as`` another tensor, or itself inside a module's forward."""

    def ranks(rank: int) -> None:
        plain = seeded(Viewing)
        model = one_unit(copy.deepcopy(plain))
        x, wide = data(0, rank, 2, 3), torch.zeros(4, 6)
        with scope(model):
            p = model.weight
            assert torch.equal(p.view_as(x), plain.weight.view(2, 3))
            assert torch.equal(p.expand_as(wide), plain.weight.expand(4, 6))
            assert type(p.view_as(x)) is type(p.expand_as(wide)) is Tensor
            assert p.view_as(x).requires_grad and p.expand_as(wide).requires_grad
            for ask in (lambda: p.view_as(p), lambda: p.expand_as(p), lambda: get_gradient_edge(p)):
                with pytest.raises(ShardedWeightError, match=r"'weight' .* own gradient"):
                    ask()
            assert_close(model(x), plain(x))
            assert_close(nn.Module.__call__(model, x), plain(x))
            model(x).sum().backward()
        sum(plain(data(0, r, 2, 3)).sum() / 2 for r in range(2)).backward()
        assert_close(whole(model.weight.grad), plain.weight.grad)

    simulate_ranks(ranks)


@pytest.mark.parametrize("scope", SCOPES)
def test_a_part_is_not_exported_in_a_scope(scope: Any) -> None:
    """A plain part of a unit would keep parameters that soon hold slices: the error says so."""

    def ranks(rank: int) -> None:
        model, plain = pair()
        x = data(0, rank, 2, 3)
        with (
            scope(model),
            pytest.raises(
                ShardedWeightError,
                match=r"'0\.weight' \(unit '\w+'\) is sharded\. torch\.export needs",
            ),
        ):
            torch.export.export(model[0], (x,))
        assert_close(model(x), plain(x))

    simulate_ranks(ranks)


class Marked(Tensor):
    """A user's tensor class, which answers every function itself."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return "marked"


def test_other_tensor_classes_answer_beside_it() -> None:
    """A parameter in a scope leaves functions other than gradients to the other tensor's class."""

    def ranks(rank: int) -> None:
        model, _ = pair()
        with gathered(model):
            other = torch.ones(4, 3).as_subclass(Marked)
            for first, second in ((model[0].weight, other), (other, model[0].weight)):
                assert F.mse_loss(first, second) == "marked"
                assert F.gaussian_nll_loss(first, second, second) == "marked"
            assert float(F.mse_loss(model[0].weight, model[0].weight)) == 0

    simulate_ranks(ranks)


@pytest.mark.parametrize("way", ["grad", "named", "backward"])
@pytest.mark.parametrize("scope", SCOPES)
def test_gradients_asked_for_by_each_way(scope: Any, way: str) -> None:
    """The shard answers ``autograd.grad`` and ``backward(inputs=)``, with and without keywords."""

    def ranks(rank: int) -> None:
        model, plain = pair()
        with scope(model):
            p = model[1].weight
            loss = square(model, data(0, rank, 2, 3))
            if way == "grad":
                (found,) = torch.autograd.grad(loss, [p])
            elif way == "named":
                (found,) = torch.autograd.grad(outputs=loss, inputs=p, retain_graph=True)
            else:
                torch.autograd.backward(loss, inputs=[p])
                found = whole(p.grad)
        wanted = sum(square(plain, data(0, r, 2, 3)) / 2 for r in range(2))
        assert_close(found, torch.autograd.grad(wanted, plain[1].weight)[0])

    simulate_ranks(ranks)


def test_hooks_set_in_a_scope_can_be_removed() -> None:
    """Both kinds return the handle that removes the hook; it sees the reduced gradient."""

    def ranks(rank: int) -> None:
        model, plain = pair()
        seen: list[Tensor] = []
        with gathered(model):
            p = model[1].weight
            handles = [
                p.register_hook(lambda grad: seen.append(whole(grad))),
                p.register_post_accumulate_grad_hook(lambda p: seen.append(whole(p.grad))),
            ]
        square(model, data(0, rank, 2, 3)).backward()
        sum(square(plain, data(0, r, 2, 3)) / 2 for r in range(2)).backward()
        assert len(seen) == 2
        for found in seen:
            assert_close(found, plain[1].weight.grad)
        for handle in handles:
            handle.remove()
        square(model, data(1, rank, 2, 3)).backward()
        assert len(seen) == 2

    simulate_ranks(ranks)


def test_gradients_of_the_innermost_scope() -> None:
    """Full with ``with_grads``, else sharded; they can be read, set and deleted in either."""

    def ranks(rank: int) -> None:
        model, _ = pair()
        square(model, data(0, rank, 2, 3)).backward()
        p = model[1].weight
        sharded = whole(p.grad)
        with gathered(model, with_grads=True):
            assert not is_sharded(p.grad) and torch.equal(p.grad, sharded)
            with gathered(model):
                assert is_sharded(p.grad) and torch.equal(whole(p.grad), sharded)
                p.grad = p.grad * 2
                assert torch.equal(whole(p.grad), sharded * 2)
            assert torch.equal(p.grad, sharded)
        assert torch.equal(whole(p.grad), sharded * 2)
        with gathered(model):
            with gathered(model, with_grads=True, writeback=True):
                assert torch.equal(p.grad, sharded * 2)
                p.grad = sharded * 3
                assert torch.equal(p.grad, sharded * 3)
            assert torch.equal(whole(p.grad), sharded * 3)
            del p.grad
            assert p.grad is None
        assert p.grad is None
        both = {"with_grads": True, "writeback": True}
        for inner in ({}, both):
            with pytest.raises(RuntimeError, match="which would overwrite it"):
                with gathered(model, **both), gathered(model, **inner):
                    p.sum().backward()
            assert torch.equal(whole(p.grad), torch.ones_like(sharded))
            p.grad = None

    simulate_ranks(ranks)


OPTIONS: list[dict[str, bool]] = [{}, {"with_grads": True}, {"with_grads": True, "writeback": True}]


@pytest.mark.parametrize("options", OPTIONS)
def test_flags_set_in_nested_scopes(options: dict[str, bool]) -> None:
    """What the scopes show trains as the flag says, in the innermost scope and after them all."""

    def ranks(rank: int) -> None:
        model, _ = pair()
        p, q = model[1].weight, model[0].weight
        with gathered(model), gathered(model, **options):
            assert p.requires_grad_(False) is p and q.requires_grad_() is q
            p.requires_grad = False  # once more
            node = q.grad_fn
            q.requires_grad = True
            assert q.grad_fn is node
            assert not p.requires_grad and q.requires_grad
            assert not (p * 2).requires_grad and (q * 2).requires_grad
            if not options:
                q.sum().backward()
                assert torch.equal(whole(q.grad), torch.ones(4, 3).double())
        assert not p.requires_grad and q.requires_grad
        model.zero_grad()
        square(model, data(0, rank, 2, 3)).backward()
        assert p.grad is None and q.grad is not None

    simulate_ranks(ranks)


class Scale(nn.Parameter):
    """A user's class of parameters."""


class Scaling(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale, self.shift = Scale(torch.ones(6) * 3), nn.Parameter(torch.zeros(6))
        self.scale.note = "kept"

    def forward(self, x: Tensor) -> Tensor:
        return x * self.scale + self.shift


@pytest.mark.parametrize("scope", SCOPES)
def test_a_parameter_keeps_its_own_class_in_scopes(scope: Any) -> None:
    """Class, module of the class and attributes stay, in each of several scopes and after them."""

    def ranks(rank: int) -> None:
        model = one_unit(seeded(Scaling))
        p, kinds = model.scale, list[type]()
        rested = type(p), set(vars(p)) - {"dtype", "device"}
        for _ in range(2):
            with scope(model):
                assert model.scale is p and isinstance(p, Scale) and p.note == "kept"
                assert type(p).__name__ == "Scale" and type(p).__module__ == Scale.__module__
                assert not isinstance(model.shift, Scale) and p.eq(3).all()
                assert p.dtype is torch.float64 and p.device.type == "cpu"
                kinds.append(type(p))
            assert (type(p), set(vars(p))) == rested and is_sharded(p)
        assert kinds[0] is kinds[1]

    simulate_ranks(ranks)


def test_what_is_cached_of_a_slice_ends_with_a_scope() -> None:
    """The slice caches its dtype and device, which a scope may change below it."""

    def ranks(rank: int) -> None:
        model, _ = pair()
        for p in model.parameters():
            assert p.dtype is torch.float64 and p.device.type == "cpu"
            assert {"dtype", "device"} <= set(vars(p))
        with gathered(model):
            pass
        for p in model.parameters():
            assert not {"dtype", "device"} & set(vars(p))

    simulate_ranks(ranks)


def test_scopes_that_end_in_another_order() -> None:
    """The outer one ends first: the inner one goes on showing, then the shard is back."""

    def ranks(rank: int) -> None:
        model, plain = pair()
        params = list(model.parameters())
        unshard(model)
        with gathered(model), torch.no_grad():
            inner = [(p.data_ptr(), type(p)) for p in params]
            reshard(model)
            assert [(p.data_ptr(), type(p)) for p in params] == inner
            for p, q in zip(params, plain.parameters(), strict=True):
                assert is_whole(p) and torch.equal(p, q)
        for p, q in zip(params, plain.parameters(), strict=True):
            assert is_sharded(p) and torch.equal(whole(p), q)
        assert_at_rest(model)
        assert [hide(entry, object()) for entry in units(model)[0].entries] == [None] * 4
        square(model, data(0, rank, 2, 3)).backward()

    simulate_ranks(ranks)


def test_undo_ends_every_scope() -> None:
    """Parameters are plain then, with their flags and values, and no scope is left to end."""

    def ranks(rank: int) -> None:
        model, plain = pair()
        unshard(model)
        undo(model)
        for p, q in zip(model.parameters(), plain.parameters(), strict=True):
            assert type(p) is nn.Parameter and torch.equal(p, q)
            assert p.requires_grad is q.requires_grad and p.is_leaf and p.grad_fn is None
        assert_close(model(data(0, 0, 2, 3)), plain(data(0, 0, 2, 3)))

    simulate_ranks(ranks)


def test_parameters_rest_in_a_scope_for_a_while() -> None:
    """They hold their slices then, and show what they showed after it; at rest, nothing is done."""

    def ranks(rank: int) -> None:
        model, plain = pair()
        (unit,) = units(model)
        params = list(model.parameters())
        with at_rest(unit.entries):
            assert not any(map(rest, unit.entries)) and all(map(is_sharded, params))
        scopes: list[AbstractContextManager[Any]] = [gathered(model), gathered(model)]
        with scopes[0], scopes[1]:
            shown = [p.data_ptr() for p in params]
            with at_rest(unit.entries[1:]):
                assert [is_sharded(p) for p in params] == [False, True, True, True]
                assert [entry.held is entry.param for entry in unit.entries[1:]] == [True] * 3
                for entry in unit.entries[1:]:
                    assert owner_of(entry).views.params[entry.index] is entry.held
            assert [p.data_ptr() for p in params] == shown and all(map(is_whole, params))
            assert [rest(entry) for entry in unit.entries] == [True] * 4
            assert [rest(entry) for entry in unit.entries] == [False] * 4
            end_rests(unit.entries)
            end_rests(unit.entries)
            for p, q in zip(params, plain.parameters(), strict=True):
                assert is_whole(p) and torch.equal(p, q)
            for entry in unit.entries:
                assert owner_of(entry).views.params[entry.index] is entry.param
            rest(unit.entries[0])
            hide(unit.entries[0], object())  # of a scope that shows it not
            assert is_whole(params[0])
        assert all(map(is_sharded, params))
        square(model, data(0, rank, 2, 3)).backward()

    simulate_ranks(ranks)


def test_hooks_on_reduced_gradients_see_slices() -> None:
    """In a scope too: both parameters of a layer hold their slices for the hook on the unit."""

    def ranks(rank: int) -> None:
        model = by_block(seeded(Tower))
        seen: list[bool] = []
        fc.register_post_reduce_hook(
            model, lambda module, params: seen.extend(map(is_sharded, params))
        )
        with gathered(model):
            square(model, data(0, rank)).backward()
            assert not any(map(is_sharded, model.parameters()))
        assert len(seen) == len(list(model.parameters())) and all(seen)

    simulate_ranks(ranks)


@pytest.mark.parametrize("grad", [True, False])
def test_a_scope_opened_in_a_hook_on_a_gradient(grad: bool) -> None:
    """The hook's parameter holds its slice, in a scope too; one that the hook opens shows all."""

    def ranks(rank: int) -> None:
        model, plain = pair()
        seen: list[Tensor] = []

        def hook(p: nn.Parameter) -> None:
            assert is_sharded(p) and is_sharded(p.grad)
            with torch.set_grad_enabled(grad), gathered(model):
                seen.extend(p.detach().clone() for p in model.parameters())

        with gathered(model):
            model[1].weight.register_post_accumulate_grad_hook(hook)
            square(model, data(0, rank, 2, 3)).backward()
            for p, q in zip(model.parameters(), plain.parameters(), strict=True):
                assert is_whole(p) and torch.equal(p, q)
        for p, q, shown in zip(model.parameters(), plain.parameters(), seen, strict=True):
            assert is_sharded(p) and torch.equal(whole(p), q) and torch.equal(shown, q)

    simulate_ranks(ranks)


def test_what_two_layers_showed_is_given_back() -> None:
    """In either order: the values of each, in objects of their own classes; ``hide_all`` too."""

    def ranks(rank: int) -> None:
        model, _ = pair()
        entry = units(model)[0].entries[1]
        p, values = entry.held, whole(entry.held)

        def layers() -> tuple[Any, Any]:
            shown = torch.zeros(entry.spec.shape), nn.Parameter(torch.ones(entry.spec.shape))
            for scope, full in zip("ab", shown, strict=True):
                show(entry, full, Layer(scope, lambda entry, trained: p))
            return shown

        for order in ("ab", "ba"):
            shown = dict(zip("ab", layers(), strict=True))
            assert p.eq(1).all()
            for scope in order:
                full = hide(entry, scope)
                assert full is not None and vars(full) == {}
                assert type(full) is (Tensor if full is shown["a"] else nn.Parameter)
                assert full.eq(0 if scope == "a" else 1).all()
                assert is_sharded(p) is (scope == order[1])
            assert [type(shown[scope]) for scope in "ab"] == [Tensor, nn.Parameter]
            assert torch.equal(whole(p), values)
        first, second = layers()
        hide_all(entry)
        assert first.eq(0).all() and second.eq(1).all()
        assert (type(first), type(second)) == (Tensor, nn.Parameter)
        assert is_sharded(p) and not entry.layers and torch.equal(whole(p), values)
        square(model, data(0, rank, 2, 3)).backward()

    simulate_ranks(ranks)


def test_a_parameter_that_tensor_parallelism_split() -> None:
    """It is a DTensor in a scope, and so are its copies; ``nn.Parameter(p)`` is a parameter."""

    def ranks(rank: int) -> None:
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        plain = linear()
        model = parallelize_module(
            copy.deepcopy(plain), mesh["tp"], {"0": ColwiseParallel(), "1": RowwiseParallel()}
        )
        fully_shard(model, mesh=mesh["dp"])
        p = model[0].weight
        for _ in range(2):
            with gathered(model):
                assert (
                    isinstance(p, DTensor) and isinstance(p, nn.Parameter) and p._is_param is True
                )
                for made in (nn.Parameter(p), nn.Parameter(p, False)):
                    assert isinstance(made, nn.Parameter) and made._is_param is True
                    assert type(made) is DTensor and torch.equal(
                        made.full_tensor(), plain[0].weight
                    )
                assert not nn.Parameter(p, False).requires_grad and nn.Parameter(p).requires_grad
                detached = p.detach()
                assert type(detached) is DTensor and not isinstance(detached, nn.Parameter)
                assert torch.equal(detached.full_tensor(), plain[0].weight)
            assert is_sharded(p)
        square(model, data(0, rank // 2, 2, 3)).backward()
        unshard(model)
        for entry in units(model)[0].entries:
            assert isinstance(entry.held, DTensor) and lies_in(owner_of(entry), entry.held)
        reshard(model)

    simulate_ranks(ranks, 4)
