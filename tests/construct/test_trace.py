"""The execution order by symbolic tracing: what it finds, and what it says when it cannot."""

from __future__ import annotations

import math
import random
from typing import Any, cast

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn

from fsdp_compose import (
    ExecutionOrder,
    TracingConfig,
    fully_shard,
    plan,
    trace_execution_order,
    wrap,
)

from models import WIDTH, Block, Tower, by_block, seeded

X = torch.randn(2, WIDTH, generator=torch.Generator().manual_seed(0))


def called(model: nn.Module, *args: Any, **kwargs: Any) -> list[str]:
    """What really runs, by hooks."""
    order = [""]
    handles = [
        m.register_forward_pre_hook(lambda m, a, name=name: order.append(name))
        for name, m in model.named_modules()
        if name
    ]
    model(*args, **kwargs)
    for handle in handles:
        handle.remove()
    return order


class Backwards(nn.Module):
    """Registered in another order than it is called, one part twice, one never, weights shared."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(WIDTH, 4)
        self.second = Block()
        self.unused = nn.Linear(3, 3)
        self.scale = nn.Parameter(torch.ones(WIDTH))
        self.first = Block()
        self.tied = nn.Linear(WIDTH, 4)
        self.tied.weight = self.head.weight

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        x = self.second(self.first(x) * self.scale)
        return self.head(x) + F.linear(x, weight=self.tied.weight)


def test_modules_parameters_and_their_use() -> None:
    model = Backwards()
    order = trace_execution_order(model, X)
    block = ["", ".norm", ".up", ".down"]
    expected = ["", *(f"{name}{p}" for name in ("first", "first", "second") for p in block), "head"]
    assert list(order.modules) == expected == called(model, X)
    inside = ["norm.weight", "norm.bias", "up.weight", "up.bias", "down.weight"]
    assert list(order.parameters) == [
        *(f"first.{p}" for p in inside),
        "scale",
        *(f"second.{p}" for p in inside),
        "head.weight",
        "head.bias",
    ]
    assert order.used_by("") == ("scale", "head.weight")
    assert order.used_by("first.up") == ("first.up.weight", "first.up.bias")
    assert order.used_by("first") == order.used_by("unused") == ()
    assert order.uses.count(("first.up", "first.up.weight")) == 2
    assert not any("unused" in name for name in (*order.modules, *order.parameters))


def test_nothing_is_computed() -> None:
    with torch.device("meta"):
        model = Tower(2)
    order = trace_execution_order(model, (X,))
    assert order.modules[:2] == ("", "first")
    assert trace_execution_order(Tower(2)) == order
    assert all(p.is_meta for p in model.parameters())


class Choosy(nn.Module):
    """Control flow over arguments that are no tensors, and containers of tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = (nn.Linear(WIDTH, WIDTH) for _ in range(3))

    def forward(
        self,
        x: dict[str, Tensor],
        times: int = 1,
        mask: Tensor | None = None,
        *,
        deep: bool = False,
    ) -> Tensor:
        y = x["x"]
        for _ in range(times):
            y = self.a(y)
        if mask is not None:
            y = self.b(y) * mask
        return self.c(y) if deep else y


def test_what_is_no_tensor_decides() -> None:
    model, inputs = Choosy(), {"x": X}
    for args, kwargs in (
        ((inputs,), {}),
        ((inputs, 3), {"deep": True}),
        ((inputs, 2, torch.ones(WIDTH)), {}),
        ((inputs,), {"mask": torch.ones(WIDTH), "times": 0}),
    ):
        order = trace_execution_order(model, args, kwargs=kwargs)
        assert list(order.modules) == called(model, *args, **kwargs)
    config = TracingConfig(concrete_args={"times": 2, "deep": True})
    order = trace_execution_order(model, (inputs,), config)
    assert order.modules == ("", "a", "a", "c")


class DataDependent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.inner = Unsteady()

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(self.first(x))


class Unsteady(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.weight if x.sum() > 0 else x


class Whole(fx.Tracer):
    """Takes ``Unsteady`` whole."""

    def is_leaf_module(self, m: nn.Module, qualname: str) -> bool:
        return isinstance(m, Unsteady) or super().is_leaf_module(m, qualname)


def test_what_cannot_be_traced_says_where() -> None:
    """What cannot be traced says where and what to do."""
    with pytest.raises(ValueError, match="DataDependent cannot be traced") as caught:
        trace_execution_order(DataDependent(), X)
    text = str(caught.value)
    assert "in submodule 'inner'" in text
    assert "concrete_args" in text and "tracer" in text and "first iteration records" in text
    assert caught.value.__cause__ is not None
    with pytest.raises(ValueError, match="in its own forward"):
        trace_execution_order(Unsteady(), X)
    with pytest.raises(ValueError, match="too many positional"):
        trace_execution_order(Unsteady(), (X, 1, 2))


def test_a_tracer_of_ones_own() -> None:
    tracer = Whole()
    order = trace_execution_order(DataDependent(), X, TracingConfig(tracer))
    assert order == ExecutionOrder(
        ("", "first", "inner"),
        ("first.weight", "first.bias", "inner.weight"),
        (("first", "first.weight"), ("first", "first.bias"), ("inner", "inner.weight")),
    )
    assert not {"call_module", "create_proxy"} & set(vars(tracer))
    assert trace_execution_order(DataDependent(), X, TracingConfig(tracer)) == order


def test_a_module_is_left_as_it_was() -> None:
    model = Backwards()
    before = model(X)
    calls = [m.forward for m in model.modules()]
    trace_execution_order(model, X)
    with pytest.raises(ValueError, match="cannot be traced"):
        trace_execution_order(DataDependent(), X)
    assert [m.forward for m in model.modules()] == calls
    torch.testing.assert_close(model(X), before)


def test_a_sharded_module_is_refused() -> None:
    model = by_block(Tower())
    with pytest.raises(ValueError, match="sharded already; trace it before"):
        trace_execution_order(model, X)


# Units by execution order


class Apart(nn.Module):
    """``ends`` holds what runs first and last; ``middle`` runs between."""

    def __init__(self) -> None:
        super().__init__()
        self.ends = nn.ModuleDict({"a": nn.Linear(8, 8), "b": nn.Linear(8, 8)})
        self.middle = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))

    def forward(self, x: Tensor) -> Tensor:
        return self.ends["b"](self.middle(self.ends["a"](x)))


class Pair(nn.Module):
    """Two layers that are called far apart, through a method."""

    def __init__(self) -> None:
        super().__init__()
        self.into = nn.Linear(8, 8)
        self.out = nn.Linear(8, 8)

    def forward(self, x: Tensor, way: str) -> Tensor:
        return self.into(x) if way == "in" else self.out(x)


class Around(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.pair = Pair()
        self.middle = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))

    def forward(self, x: Tensor) -> Tensor:
        return self.pair(self.middle(self.pair(x, "in")), "out")


def chosen(model: nn.Module, policy: wrap.Policy) -> list[str]:
    from fsdp_compose import fully_shard
    from fsdp_compose.core.state import iter_units

    fully_shard(model, units=policy)
    return sorted(unit.name for unit in iter_units(model))


def test_units_by_execution_order_are_consecutive() -> None:
    x = torch.ones(1, 8)
    by_order = wrap.by_execution_order(x, min_numel=100)
    assert chosen(Around(), by_order) == ["Around", "middle"]
    assert chosen(Around(), wrap.by_size(100)) == ["Around", "middle", "pair"]
    assert chosen(Apart(), by_order) == ["Apart", "middle"]
    small = wrap.by_execution_order(x, min_numel=math.prod((8, 8)))
    assert chosen(Apart(), small) == ["Apart", "ends.a", "ends.b", "middle.0", "middle.1"]
    assert chosen(Around(), small) == ["Around", "middle.0", "middle.1", "pair.into", "pair.out"]


def test_execution_order_of_what_cannot_be_traced() -> None:
    from fsdp_compose import fully_shard

    with pytest.raises(ValueError, match="DataDependent cannot be traced"):
        fully_shard(DataDependent(), units=wrap.by_execution_order(X))
    config = TracingConfig(Whole())
    policy = wrap.by_execution_order(X, min_numel=WIDTH * WIDTH, config=config)
    assert chosen(DataDependent(), policy) == ["DataDependent", "first"]


class Remembering(nn.Module):
    """A table made in the first forward, a running mean, a count and a log, in plain attributes."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.table: Tensor | None = None
        self.mean: Any = 0.0
        self.log: list[Any] = [1]
        self.calls = {"forward": 0}

    def forward(self, x: Tensor) -> Tensor:
        if self.table is None:
            self.table = x.new_ones(WIDTH) * torch.ones(WIDTH)
            self.drawn = random.random(), torch.rand(2)
        y = self.linear(x) * self.table
        self.calls["forward"] += 1
        self.log.append(y)
        self.last = x
        self.mean = 0.9 * self.mean + y.mean()
        return y - self.mean


@pytest.mark.parametrize("how", ["plan", "trace", "policy"])
def test_what_a_forward_remembers_is_taken_back(how: str) -> None:
    """A forward that is only looked at leaves no Proxy, and no tensor without memory."""
    model, other = seeded(Remembering), seeded(Remembering)
    drawn = random.getstate(), torch.get_rng_state().tolist()
    if how == "plan":
        plan(model, world_size=2, sample=X)
    elif how == "trace":
        trace_execution_order(model, X)
    else:
        fully_shard(model, units=wrap.by_execution_order(X, min_numel=1))
    assert (model.table, model.mean, model.log, model.calls) == (None, 0.0, [1], {"forward": 0})
    assert not hasattr(model, "last") and not hasattr(model, "drawn")
    assert drawn == (random.getstate(), torch.get_rng_state().tolist())
    assert torch.equal(model(X.double()), other(X.double()))


def test_wrong_arguments_of_a_trace() -> None:
    """A class in place of a tracer would have its methods exchanged for good."""
    before, wrong = dict(vars(fx.Tracer)), cast("Any", fx.Tracer)
    with pytest.raises(TypeError, match=r"TracingConfig: tracer is .*Tracer.*; wanted an instance"):
        trace_execution_order(Tower(1), X, TracingConfig(tracer=wrong))
    assert dict(vars(fx.Tracer)) == before
    wrong = 3
    with pytest.raises(TypeError, match=r"TracingConfig: concrete_args is 3; wanted a dictionary"):
        TracingConfig(concrete_args=wrong)
    with pytest.raises(TypeError, match=r"trace_execution_order: kwargs is 3; wanted a dictionary"):
        trace_execution_order(Tower(1), X, kwargs=wrong)
    mistyped = TracingConfig(concrete_args={"flga": True})
    with pytest.raises(ValueError, match=r"'flga', which no parameter of Tower\.forward takes"):
        trace_execution_order(Tower(1), X, mistyped)
