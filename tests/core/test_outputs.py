"""Inputs and outputs of any structure: units are gathered and released on time."""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn

from fsdp_compose import MixedPrecision, fully_shard, wrap
from fsdp_compose.core.schedule import Hold

from harness import run_ranks
from models import (
    WIDTH,
    Block,
    Twin,
    data,
    square,
    train_twin,
    units,
)


class Pair(NamedTuple):
    first: Tensor
    second: Any


@dataclasses.dataclass
class Record:
    first: Tensor
    second: Any = None


@dataclasses.dataclass(frozen=True)
class Frozen:
    first: Tensor
    second: Any = None


@dataclasses.dataclass(slots=True)
class Slotted:
    first: Tensor
    second: Any = None


@dataclasses.dataclass
class HalfSlotted(Slotted):
    """Has a dictionary, though what it inherits lies in slots."""

    third: Any = None


@dataclasses.dataclass(slots=True)
class Unset:
    first: Tensor
    second: Any
    missing: Any = dataclasses.field(init=False)


class ModelOutput(collections.OrderedDict):
    """As in Hugging Face transformers: fields are attributes and items, None left out."""

    def __post_init__(self) -> None:
        for f in dataclasses.fields(self):
            value = getattr(self, f.name)
            if value is not None:
                super().__setitem__(f.name, value)

    def __setitem__(self, key: str, value: Any) -> None:
        super().__setitem__(key, value)
        super().__setattr__(key, value)

    def __setattr__(self, name: str, value: Any) -> None:
        if name in self.keys() and value is not None:
            super().__setitem__(name, value)
        super().__setattr__(name, value)

    def __reduce__(self) -> Any:
        args = tuple(getattr(self, f.name) for f in dataclasses.fields(self))
        return (self.__class__, args)


@dataclasses.dataclass
class TextOutput(ModelOutput):
    first: Tensor | None = None
    loss: Tensor | None = None
    second: Any = None


class Plain:
    def __init__(self, first: Tensor, second: Any = None) -> None:
        self.first, self.second = first, second


class Items(list):
    """A list of a class of its own, with an attribute."""

    source: str = ""


class Point(tuple):
    """A tuple of a class of its own, with an attribute, that counts otherwise (as e3nn's do)."""

    source: str = ""

    def __len__(self) -> int:
        raise NotImplementedError


class Sealed:
    """No tensor in it can be found: it hides in a generator."""

    __slots__ = ("get",)

    def __init__(self, *held: Tensor) -> None:
        self.get = (tensor for tensor in held).__next__

    def open(self) -> tuple[Tensor, Tensor]:
        first, second = self.get(), self.get()
        self.__init__(first, second)
        return first, second


PACK: dict[str, tuple[Callable[[Tensor, Tensor], Any], Callable[[Any], tuple[Tensor, Tensor]]]] = {
    "tuple": (lambda a, b: (a, b), lambda o: o),
    "list": (lambda a, b: [a, [b, "text", None]], lambda o: (o[0], o[1][0])),
    "dict": (lambda a, b: {"a": a, "n": {"b": [b], 3: None}}, lambda o: (o["a"], o["n"]["b"][0])),
    "unsortable": (lambda a, b: {1: a, "b": b}, lambda o: (o[1], o["b"])),
    "named": (Pair, lambda o: (o.first, o.second)),
    "record": (Record, lambda o: (o.first, o.second)),
    "frozen": (Frozen, lambda o: (o.first, o.second)),
    "slotted": (Slotted, lambda o: (o.first, o.second)),
    "half slotted": (HalfSlotted, lambda o: (o.first, o.second)),
    "unset": (Unset, lambda o: (o.first, o.second)),
    "nested": (lambda a, b: Record((a,), {"x": Frozen(b)}),
               lambda o: (o.first[0], o.second["x"].first)),
    "ordered": (lambda a, b: collections.OrderedDict(a=a, b=b), lambda o: (o["a"], o["b"])),
    "model": (lambda a, b: TextOutput(first=a, second=(b,)), lambda o: (o["first"], o.second[0])),
    "default": (lambda a, b: collections.defaultdict(list, a=a, b=b), lambda o: (o["a"], o["b"])),
    "deque": (lambda a, b: collections.deque([a, b]), tuple),
    "own list": (lambda a, b: Items([a, Items([b])]), lambda o: (o[0], o[1][0])),
    "own tuple": (lambda a, b: Point((a, {"x": Point([b, a.shape])})),
                  lambda o: (o[0], o[1]["x"][0])),
    "object": (Plain, lambda o: (o.first, o.second)),
    "object in list": (lambda a, b: [Plain(a, {"x": Plain(b)})],
                       lambda o: (o[0].first, o[0].second["x"].first)),
}  # fmt: skip


class Talkative(nn.Module):
    """A stack of modules that speak to one another in structures."""

    def __init__(self, kind: str, depth: int = 2) -> None:
        super().__init__()
        self.kind = kind
        self.parts = nn.ModuleList(Part(kind) for _ in range(depth))

    def forward(self, x: Tensor) -> Any:
        message = PACK[self.kind][0](x, x * 2)
        for part in self.parts:
            message = part(message, scale=torch.ones(1, dtype=x.dtype))
        return message


class Part(nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.block = Block()
        self.side = nn.Linear(WIDTH, WIDTH)

    def forward(self, message: Any, *, scale: Tensor, missing: Any = None) -> Any:
        pack, unpack = PACK[self.kind]
        first, second = unpack(message)
        return pack(self.block(first) * scale, self.side(second))


def by_part(model: nn.Module, **options: Any) -> nn.Module:
    return fully_shard(model, units=wrap.by_class({Part}), **options)


@pytest.mark.parametrize("kind", PACK)
def test_structures(kind: str) -> None:
    def forward(model: nn.Module, x: Tensor) -> Tensor:
        out = model(x)
        assert type(out) is type(PACK[kind][0](x, x))
        first, second = PACK[kind][1](out)
        return first.square().mean() + second.mean()

    train_twin(lambda: Talkative(kind), forward, by_part)


@pytest.mark.parametrize("kind", PACK)
def test_structures_are_released_on_time(kind: str) -> None:
    """A unit is released by its own backward, not by the end of everybody's."""

    def ranks(rank: int) -> None:
        twin = Twin(rank, 2, lambda: Talkative(kind, depth=3), by_part)
        first, middle, last = (u for u in units(twin.model) if "parts" in u.name)
        seen: list[bool] = []

        def look(grad: Tensor) -> None:
            seen.append(bool(last.holds & {Hold.KEPT, Hold.BACKWARD}))

        x = data(1, rank).requires_grad_()
        handle = twin.model.parts[0].register_forward_hook(
            lambda m, a, out: PACK[kind][1](out)[0].register_hook(look) and None
        )
        a, b = PACK[kind][1](twin.model(x))
        (a.mean() + b.mean()).backward()
        handle.remove()
        assert seen == [False]
        assert not middle.holds and not first.holds

    run_ranks(ranks)


@pytest.mark.parametrize("kind", [Items, Point])
def test_own_lists_and_tuples_are_cast(kind: type[Items] | type[Point]) -> None:
    """Tensors in them are cast on the way in and out; class, attributes and the rest stay."""

    class Passes(nn.Linear):
        def forward(self, given: Any) -> Any:
            assert type(given) is kind and given.source == "loader"
            assert given[1] == "text" and type(given[2]) is torch.Size
            made = kind([super().forward(given[0]), given[2]])
            made.source = "model"
            return made

    policy = MixedPrecision(param_dtype=torch.bfloat16, output_dtype=torch.float64)
    model = fully_shard(Passes(2, 3), mp_policy=policy)
    given = kind([torch.ones(1, 2), "text", torch.Size([3])])
    given.source = "loader"
    out = model(given)
    assert type(out) is kind and out.source == "model"
    assert out[0].dtype is torch.float64 and out[1] == (3,)
    assert given[0].dtype is torch.float32


def test_slots_that_a_dataclass_inherits_are_cast() -> None:
    class Returns(nn.Linear):
        def forward(self, x: Tensor) -> HalfSlotted:
            return HalfSlotted(super().forward(x), third="text")

    policy = MixedPrecision(param_dtype=torch.bfloat16, output_dtype=torch.float64)
    out = fully_shard(Returns(2, 3), mp_policy=policy)(torch.ones(1, 2))
    assert out.first.dtype is torch.float64 and out.third == "text"


def test_structures_that_hide_their_tensors() -> None:
    """D14: a warning, once, and right results."""
    PACK["sealed"] = (Sealed, Sealed.open)

    def ranks(rank: int) -> None:
        twin = Twin(rank, 2, lambda: Talkative("sealed"), by_part)
        forward = lambda m, x: sum(t.square().mean() for t in m(x).open())  # noqa: E731
        with pytest.warns(UserWarning, match="unit '[a-zA-Z.0-9]*' returned a Sealed") as found:
            twin.train(forward)
        assert len(found) == 2  # one for each unit with parameters, not for each step

    try:
        run_ranks(ranks)
    finally:
        del PACK["sealed"]


class Quirky(nn.Module):
    """Outputs with a catch."""

    def __init__(self, quirk: str) -> None:
        super().__init__()
        self.quirk = quirk
        self.block = Block()
        self.inner = nn.Linear(WIDTH, WIDTH)
        self.odd = Odd(quirk)

    def forward(self, x: Tensor) -> Tensor:
        y = self.inner(self.block(x))
        out = self.odd(y)
        if self.quirk == "in-place":
            out.mul_(2)
            out += 1
            return self.inner(out.relu_())
        if self.quirk == "view":
            out[:, 0] = 3.0
            return out
        return self.inner(out)


class Odd(nn.Module):
    def __init__(self, quirk: str) -> None:
        super().__init__()
        self.quirk = quirk
        self.layer = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        if self.quirk == "input":
            return x
        if self.quirk == "detached":
            return self.layer(x).detach()
        if self.quirk == "in-place on input":
            return x.mul_(2).add_(self.layer(torch.ones_like(x)))
        if self.quirk == "bare weight":
            return x + self.layer.weight.mean(0)
        if self.quirk == "view of weight":
            return self.layer.weight[:3]
        if self.quirk == "no_grad":
            with torch.no_grad():
                return self.layer(x)
        if self.quirk == "partly no_grad":
            with torch.no_grad():
                scale = self.layer(x).mean()
            return self.layer(x) * scale
        if self.quirk == "slice":
            return self.layer(x)[:, :]
        if self.quirk == "twice":
            return self.layer(x) + self.layer(x * 2)
        return self.layer(x)


QUIRKS = ("input", "detached", "in-place on input", "bare weight", "view of weight", "no_grad",
          "partly no_grad", "slice", "in-place", "view", "twice")  # fmt: skip


@pytest.mark.parametrize("quirk", QUIRKS)
def test_quirks_of_outputs(quirk: str) -> None:
    shard = lambda m: fully_shard(m, units=wrap.by_class({Block, Odd}))  # noqa: E731
    train_twin(lambda: Quirky(quirk), shard=shard)


class Watched(nn.Linear):
    """Registers a hook on its output in forward, as code that looks at gradients does."""

    def forward(self, x: Tensor) -> Tensor:
        out = super().forward(x)
        self.seen: list[Tensor] = []
        out.register_hook(self.seen.append)
        return out


def test_hooks_on_outputs_run_beside_the_units_own() -> None:
    """Hooks from inside and after forward run, one that was removed does not, backward gathers."""
    module = Watched(3, 2)
    wanted = torch.autograd.grad(module(torch.ones(1, 3)).sum(), list(module.parameters()))
    model = fully_shard(module)
    out, later, removed = model(torch.ones(1, 3)), [], []
    out.register_hook(later.append)
    out.register_hook(removed.append).remove()
    assert len(out._backward_hooks) == 3
    out.sum().backward()
    assert (len(module.seen), len(later), len(removed)) == (1, 1, 0)
    for param, grad in zip(model.parameters(), wanted, strict=True):
        assert torch.equal(param.grad.full_tensor(), grad)


class Projected(nn.Linear):
    """Its output, of a bias and three dimensions, is a view, as torch makes it."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(torch.tanh(x))


class Adding(nn.Module):
    """Adds to the outputs of its layers in place, from some step on."""

    in_place = True

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Projected(WIDTH, WIDTH) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            out = layer(x[None])
            assert out._is_view()
            x = (out.add_(x) if self.in_place else out + x)[0]
        return x


@pytest.mark.parametrize("first", [0, 2])
def test_outputs_that_are_views_written_in_place(first: int) -> None:
    def train(rank: int) -> None:
        shard = lambda m: fully_shard(m, units=wrap.by_class({Projected}))  # noqa: E731
        twin = Twin(rank, 2, Adding, shard)
        for seed in range(4):
            for model in twin.model, *twin.plain:
                model.in_place = seed >= first
            twin.backward(square, seed)
            assert {unit.checks.entrance for unit in units(twin.model)} == {"outputs"}
            twin.step()
        twin.check()

    run_ranks(train)
