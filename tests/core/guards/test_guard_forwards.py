"""Forwards on other tensors than gathered ones, second lists of weights, and what ranks used."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.testing import assert_close

import fsdp_compose as fc
from fsdp_compose import MixedPrecision, gathered
from fsdp_compose.core.guards import functional_calls, used_parameters

from harness import simulate_ranks
from models import (
    WIDTH,
    Block,
    assert_at_rest,
    by_block,
    data,
    mesh_of_replicas,
    one_unit,
    seeded,
    square,
    two_blocks,
    units,
    whole,
)


class Recurrent(nn.Module):
    """Two recurrent layers of one unit, which have second lists of their weights."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.LSTM(WIDTH, 4), nn.GRU(4, 3, bidirectional=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.first(x)[0])[0]


def test_every_recurrent_layer_of_a_unit_trains() -> None:
    """Gathered, in a scope and after it: each layer reads the values that its parameters have."""

    def ranks(rank: int) -> None:
        plain = seeded(Recurrent)
        model = one_unit(copy.deepcopy(plain))
        x, optimizer = data(0, rank), torch.optim.SGD(model.parameters(), lr=0.5)
        reference = torch.optim.SGD(plain.parameters(), lr=0.5)
        for step in range(3):
            assert_close(model(x), plain(x))
            square(model, data(step, rank)).backward()
            sum(square(plain, data(step, r)) / 2 for r in range(2)).backward()
            for mine, theirs in zip(model.parameters(), plain.parameters(), strict=True):
                assert_close(whole(mine.grad), theirs.grad)
            optimizer.step(), reference.step()
            model.zero_grad(), plain.zero_grad()
            for part in (model.first, model.second):
                flat = part._flat_weights
                assert all(a is b for a, b in zip(flat, part.parameters(), strict=True))
            with gathered(model):
                assert_close(model(x), plain(x))
                for part in (model.first, model.second):
                    flat = part._flat_weights
                    assert all(a is b for a, b in zip(flat, part.parameters(), strict=True))
        assert_at_rest(model)

    simulate_ranks(ranks)


class Twice(nn.Module):
    """Calls itself once more, inside its own forward, and writes what it is told to between."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.between = nn.Linear(WIDTH, WIDTH), None

    def forward(self, x: Tensor, *, again: bool = True) -> Tensor:
        y = self.layer(x)
        if again:
            if self.between is not None:
                self.between()
            y = y + self(y, again=False)
        return y


def test_a_unit_that_calls_itself_in_a_scope() -> None:
    """It reads what the scope shows, with its keywords, also where a shard was written meanwhile.

    Only a forward that begins looks for such a write.
    """

    def ranks(rank: int) -> None:
        plain = seeded(Twice)
        model = one_unit(copy.deepcopy(plain))
        (entry, *_) = units(model)[0].entries
        x = data(0, rank)

        def write() -> None:
            with torch.no_grad():
                entry.param.mul_(1)

        with gathered(model):
            assert_close(model(x), plain(x))
            assert_close(model(x, again=False), plain(x, again=False))
            model.between = write
            assert_close(model(x), plain(x))
            model.between = None
            with pytest.raises(RuntimeError, match=r"gathered\(\) after the shard of 'layer\."):
                model(x)
        assert_close(model(x), plain(x))
        square(model, x).backward()
        assert_at_rest(model)

    simulate_ranks(ranks)


def test_a_functional_call_in_a_unit_that_calls_itself() -> None:
    """All of its calls read the tensors that were given; the parameters are back after it."""

    def ranks(rank: int) -> None:
        plain = seeded(Twice)
        model = one_unit(copy.deepcopy(plain))
        x = data(0, rank)
        given = {name: torch.ones_like(p) / 3 for name, p in plain.named_parameters()}
        for names in (list(given), ["layer.weight"]):
            tensors = {name: given[name] for name in names}
            for scoped in (False, True):
                with gathered(model) if scoped else torch.enable_grad():
                    found = functional_call(model, tensors, (x,))
                    assert_close(found, functional_call(plain, tensors, (x,)))
                    alone = functional_call(model, tensors, (x,), {"again": False})
                    assert_close(alone, functional_call(plain, tensors, (x,), {"again": False}))
                    assert_close(model(x), plain(x))
        square(model, x).backward()
        assert_at_rest(model)

    simulate_ranks(ranks)


def low() -> MixedPrecision:
    return MixedPrecision(param_dtype=torch.float32, cast_forward_inputs=True)


class Noted(nn.Module):
    """Notes the attribute of its second parameter, and the dtypes that it computes in."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Parameter(torch.ones(WIDTH))
        self.second, self.third = nn.Parameter(torch.ones(1) * 2), nn.Parameter(torch.ones(1))
        self.second.note, self.third.note = "second", "third"
        self.seen: list[Any] = []

    def forward(self, x: Tensor, *, scale: Tensor | float = 1.0) -> Tensor:
        notes = [getattr(p, "note", None) for p in (self.second, self.third)]
        kind = scale.dtype if isinstance(scale, Tensor) else None
        self.seen.append((notes, self.first.dtype, x.dtype, kind))
        return x * self.first * self.second * self.third * scale


def test_attributes_and_dtypes_in_every_mode() -> None:
    """In the compute dtype, inputs by name too; attributes are on copies, but not on the given."""

    def ranks(rank: int) -> None:
        model = one_unit(seeded(Noted), mp_policy=low())
        x, both = data(0, rank), ["second", "third"]
        kinds = (torch.float32,) * 3
        given = {"second": torch.ones(1).double()}
        scale = torch.ones(1).double()

        def seen() -> Any:
            return model.seen.pop()

        assert model(x, scale=scale).dtype is torch.float32 and seen() == (both, *kinds)
        functional_call(model, given, (x,), {"scale": scale})
        assert seen() == ([None, "third"], *kinds)
        with gathered(model):
            assert model(x, scale=scale).dtype is torch.float32 and seen() == (both, *kinds)
            functional_call(model, given, (x,), {"scale": scale})
            assert seen() == ([None, "third"], *kinds)
        every = {name: torch.ones_like(p) for name, p in seeded(Noted).named_parameters()}
        functional_call(model, every, (x,), {"scale": scale})
        assert seen() == ([None, None], *kinds)
        torch.vmap(lambda x: model(x, scale=scale))(x)
        assert seen() == (both, *kinds)

    simulate_ranks(ranks)


@pytest.mark.parametrize("scope", [False, True])
def test_what_functional_call_refuses_changes_nothing(scope: bool) -> None:
    """Tensors sharded in another way: one error, after which the unit runs and trains as ever."""

    def ranks(rank: int) -> None:
        plain = seeded(two_blocks)
        model, other = by_block(copy.deepcopy(plain)), one_unit(seeded(two_blocks))
        x = data(0, rank)
        for name in ("head.weight", "blocks.0.up.weight"):
            wrong = {name: other.get_parameter(name)}
            with gathered(model) if scope else torch.enable_grad():
                with pytest.raises(RuntimeError, match=r"sharded in another way.*full_tensor\(\)"):
                    functional_call(model, wrong, (x,))
                assert_close(model(x), plain(x))
        with pytest.raises(RuntimeError, match=r"shape|size"):
            functional_call(model, {"head.weight": torch.ones(3, 1).double()}, (x,))
        assert_close(model(x), plain(x))
        square(model, x).backward()
        assert_at_rest(model)

    simulate_ranks(ranks)


def test_given_shards_are_gathered_bucket_by_bucket() -> None:
    """Updated leaves of a unit with several buckets, with gradients through them; MAML's step."""

    def ranks(rank: int) -> None:
        plain = seeded(lambda: nn.Sequential(Block(), Block()))
        plain[0].down.weight.requires_grad_(False)
        model = one_unit(copy.deepcopy(plain))
        assert len(units(model)[0].buckets) == 2

        def step(model: nn.Module, loss: Tensor) -> dict[str, Tensor]:
            named = {n: p for n, p in model.named_parameters() if p.requires_grad}
            grads = torch.autograd.grad(loss, list(named.values()), create_graph=True)
            new = {n: p - 0.1 * g for (n, p), g in zip(named.items(), grads, strict=True)}
            return {**new, "0.down.weight": model[0].down.weight * 2}

        xs = [data(0, r) for r in range(2)]
        fast = step(model, square(model, xs[rank]))
        loss = functional_call(model, fast, (xs[rank],)).square().mean()
        slow = step(plain, sum(square(plain, x) for x in xs) / 2)
        wanted = [functional_call(plain, slow, (x,)).square().mean() for x in xs]
        assert_close(loss, wanted[rank])
        loss.backward()
        (sum(wanted) / 2).backward()
        for (name, mine), theirs in zip(model.named_parameters(), plain.parameters(), strict=True):
            assert (mine.grad is None) == (theirs.grad is None), name
            if mine.grad is not None:
                assert_close(whole(mine.grad), theirs.grad)
        assert_at_rest(model)

    simulate_ranks(ranks)


def test_transforms_in_a_scope_and_out_of_it() -> None:
    """Per-sample, differentiated and plain calls after each other give the plain model's."""

    def ranks(rank: int) -> None:
        plain = seeded(two_blocks)
        model = by_block(copy.deepcopy(plain))
        x = data(0, rank)
        for scoped in (False, True):
            with gathered(model) if scoped else torch.enable_grad():
                for call in (model, model.blocks[1]):
                    other = plain if call is model else plain.blocks[1]
                    assert_close(torch.vmap(call)(x), torch.vmap(other)(x))
                    assert_close(
                        torch.func.jacrev(lambda x, call=call: call(x).sum())(x),
                        torch.func.jacrev(lambda x, other=other: other(x).sum())(x),
                    )
                    assert_close(call(x), other(x))
                assert not units(model)[0].engine.schedule.active
        square(model, x).backward()
        assert_at_rest(model)

    simulate_ranks(ranks)


def test_stored_precision_in_evaluation() -> None:
    """Computes in the shards' dtype on a buffer of its own, and takes over what was moved."""

    def ranks(rank: int) -> None:
        plain = seeded(two_blocks)
        policy = MixedPrecision(param_dtype=torch.float32, full_precision_in_eval=True)
        model = by_block(copy.deepcopy(plain), mp_policy=policy)
        x = data(0, rank)
        for grad in (True, False):
            with torch.set_grad_enabled(grad):
                model.eval()
                assert model(x).dtype is torch.float64
                assert_close(model(x), plain(x))
                model.train()
                assert model(x.float()).dtype is torch.float32
        model.eval()
        for mine, theirs in zip(model.parameters(), plain.parameters(), strict=True):
            mine.data, theirs.data = mine.detach() * 2, theirs.detach() * 2
        assert_close(model(x), plain(x))
        model(x).square().mean().backward()
        sum(square(plain, data(0, r)) / 2 for r in range(2)).backward()
        for mine, theirs in zip(model.parameters(), plain.parameters(), strict=True):
            assert_close(whole(mine.grad), theirs.grad)

    simulate_ranks(ranks)


class Choosy(nn.Module):
    """Uses one of its layers."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(5))
        self.chosen = 0

    def forward(self, x: Tensor) -> Tensor:
        return self.layers[self.chosen](x)


@pytest.mark.parametrize("asks", [True, False])
def test_what_any_rank_of_two_axes_used(asks: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """By what ranks compared in the first step, as on an accelerator, or in each; exact in all."""
    monkeypatch.setattr(used_parameters, "is_known_at_once", lambda *_: False)

    def ranks(rank: int) -> None:
        plain = seeded(Choosy)
        options: dict[str, Any] = {"strategy": fc.ShardingStrategy.HYBRID_SHARD}
        model = one_unit(copy.deepcopy(plain), mesh=mesh_of_replicas(2, 2), **options)
        fc.set_find_unused_parameters(model, asks)
        fc.register_comm_hook(model, None, fc.default_hook)
        for step in range(4):
            turn = step if asks else 0
            model.chosen = (rank + turn) % 4
            square(model, data(step, rank)).backward()
            for r in range(4):
                plain.chosen = (r + turn) % 4
                (square(plain, data(step, r)) / 4).backward()
            for mine, theirs in zip(model.parameters(), plain.parameters(), strict=True):
                assert (mine.grad is None) == (theirs.grad is None)
                if theirs.grad is not None:
                    assert_close(whole(mine.grad), theirs.grad)
            model.zero_grad(), plain.zero_grad()

    simulate_ranks(ranks, 4)


def test_a_functional_call_that_fails_to_gather_ends() -> None:
    """Its own error comes out, and the unit computes and trains as if it had not been called."""

    def fail(*_: Any) -> None:
        raise ZeroDivisionError

    def ranks(rank: int) -> None:
        plain = seeded(two_blocks)
        model = one_unit(copy.deepcopy(plain))
        x, given = data(0, rank), {n: torch.ones_like(p) for n, p in plain.named_parameters()}
        for names in (given, {"head.bias": given["head.bias"]}):
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(functional_calls, "_gather_given", fail)
                with pytest.raises(ZeroDivisionError):
                    functional_call(model, names, (x,))
            (unit,) = units(model)
            assert unit.opened is None
            assert_close(model(x), plain(x))
        square(model, x).backward()
        assert_at_rest(model)

    simulate_ranks(ranks)


class Parameters(nn.Module):
    """Its forward takes only parameters, as Hugging Face's and others' do."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        assert all(isinstance(p, nn.Parameter) for p in self.layer._parameters.values())
        return self.layer(x)


def test_forwards_under_transforms_read_parameters() -> None:
    """Connected or not; and sharded tensors that are given there are gathered beneath them."""

    def ranks(rank: int) -> None:
        plain = seeded(Parameters)
        model, x = one_unit(copy.deepcopy(plain)), data(0, rank)
        assert_close(torch.vmap(model)(x), plain(x))
        given = {name: p * 2 for name, p in plain.layer.named_parameters()}
        layer = one_unit(copy.deepcopy(plain.layer))
        fast = {name: p * 2 for name, p in layer.named_parameters()}
        found = torch.vmap(lambda x: functional_call(layer, fast, (x,)))(x)
        assert_close(found, functional_call(plain.layer, given, (x,)))

    simulate_ranks(ranks)


def test_a_second_name_of_a_replaced_parameter() -> None:
    """Tied weights of one unit, of which only the last name holds another tensor now."""

    def ranks(rank: int) -> None:
        parts = nn.Linear(6, 6), nn.Linear(6, 6, bias=False), nn.Linear(6, 6, bias=False)
        model = nn.Sequential(*parts).double()
        model[2].weight = model[1].weight
        model = one_unit(model)
        square(model, data(0, rank)).backward()
        model[2].weight = nn.Parameter(torch.ones(6, 6).double())
        with pytest.raises(RuntimeError, match=r"'1\.weight' of unit .* was replaced after"):
            model(data(0, rank))
        model[2].weight = model[1].weight
        square(model, data(0, rank)).backward()
        given = {"2.weight": torch.ones(6, 6).double()}
        with pytest.raises(RuntimeError, match="tied, and was replaced under some of its names"):
            functional_call(model, given, (data(0, rank),), tie_weights=False)

    simulate_ranks(ranks)


class Around(nn.Module):
    """Calls one block with tensors of its own, and then the other."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two, self.seen = Block(), Block(), list[list[str]]()
        self.scale = nn.Parameter(torch.ones(WIDTH))
        self.ask = list[str]

    def forward(self, x: Tensor) -> Tensor:
        given = {name: torch.ones(p.shape, dtype=x.dtype) for name, p in shapes.items()}
        x = functional_call(self.one, given, (x * self.scale,))
        self.seen.append(self.ask())
        return self.two(x)


shapes = dict(Block().named_parameters())


def test_a_functional_call_inside_a_units_forward() -> None:
    """The unit around it goes on as the outermost, which alone casts inputs."""

    def ranks(rank: int) -> None:
        policy = MixedPrecision(param_dtype=torch.float32, cast_forward_inputs="root")
        plain = seeded(Around)
        model = by_block(copy.deepcopy(plain), mp_policy=policy)
        active = units(model)[0].engine.schedule.active
        model.ask = lambda: [unit.name for unit in active]
        for _ in range(2):
            found = model(data(0, rank))
            assert found.dtype is torch.float32 and model.seen.pop() == ["Around"]
            assert_close(found.double(), plain(data(0, rank)), rtol=1e-3, atol=1e-4)
            assert not active
        with gathered(model):
            assert model(data(0, rank)).dtype is torch.float32
        simple = by_block(seeded(two_blocks), mp_policy=policy)
        with gathered(simple):
            assert simple(data(0, rank)).dtype is torch.float32
        found.square().mean().backward()

    simulate_ranks(ranks)


def test_an_evaluation_of_a_unit_with_given_tensors() -> None:
    """Units inside it are gathered as ever, and the pass ends with the call."""

    def ranks(rank: int) -> None:
        plain = seeded(two_blocks)
        model = by_block(copy.deepcopy(plain))
        engine = units(model)[0].engine
        names = [name for name, _ in plain.named_parameters() if not name.startswith("blocks")]
        given = {name: plain.get_parameter(name).detach() * 2 for name in names}
        for _ in range(3):
            with torch.no_grad():
                found = functional_call(model, given, (data(0, rank),))
                assert_close(found, functional_call(plain, given, (data(0, rank),)))
            assert not units(model)[0].expected.eval_order.is_open and not engine.schedule.active
        square(model, data(0, rank)).backward()
        assert_at_rest(model)

    simulate_ranks(ranks)


def test_other_forwards_need_what_was_loaded() -> None:
    """In stored precision and under a transform too, unwritten parameters are an error."""

    def ranks(rank: int) -> None:
        with torch.device("meta"):
            model = nn.Linear(WIDTH, 4).double()
        policy = MixedPrecision(param_dtype=torch.float32, full_precision_in_eval=True)
        model = one_unit(model, param_init_fn=lambda module: None, mp_policy=policy)
        for call in (model.eval(), torch.vmap(model)):
            with pytest.raises(RuntimeError, match="nothing has written it since"):
                call(data(0, rank))
        with pytest.raises(RuntimeError, match="nothing has written it since"):
            torch.vmap(model.train())(data(0, rank).float())

    simulate_ranks(ranks)
