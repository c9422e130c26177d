"""Tensors that lie hidden beside the ones a unit returns get their gradients right."""

from __future__ import annotations

import collections
import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import pytest
from torch import Tensor, nn

from fsdp_compose import ShardingStrategy, fully_shard, reshard
from fsdp_compose.core.schedule import Hold

from harness import simulate_ranks
from models import WIDTH, Twin, assert_at_rest, data, units

kept: dict[Any, Tensor] = {}  # what forwards keep, by rank and model


@dataclasses.dataclass
class Derived:
    """Its second tensor is in an attribute that is no field."""

    first: Tensor
    given: dataclasses.InitVar[Tensor]

    def __post_init__(self, given: Tensor) -> None:
        self.side = given


class Own(dict):
    pass


class Items(list):
    pass


class Row(collections.namedtuple("Row", "first")):
    pass


class Slots:
    __slots__ = ("later", "side")

    def __init__(self, side: Tensor) -> None:
        self.side = side


class Called:
    def __init__(self, side: Tensor) -> None:
        self.side = side

    def __call__(self) -> Tensor:
        return self.side


def put(holder: Any, side: Tensor) -> Any:
    holder.side = side
    return holder


Pack = Callable[[Tensor, Tensor], Any]
Unpack = Callable[[Any], tuple[Tensor, Tensor]]
FOUND: dict[str, tuple[Pack, Unpack]] = {
    "dataclass": (Derived, lambda o: (o.first, o.side)),
    "dict": (lambda a, b: put(Own(first=a), b), lambda o: (o["first"], o.side)),
    "list": (lambda a, b: put(Items([a]), b), lambda o: (o[0], o.side)),
    "row": (lambda a, b: put(Row(a), b), lambda o: (o.first, o.side)),
    "tensor": (put, lambda o: (o, o.side)),
    "tensors": (lambda a, b: (put(a, b), a * 2), lambda o: (o[0], o[0].side)),
    "slots": (lambda a, b: (a, Slots(b)), lambda o: (o[0], o[1].side)),
    "called": (lambda a, b: (a, Called(b)), lambda o: (o[0], o[1]())),
    "closure": (lambda a, b: (a, lambda: b), lambda o: (o[0], o[1]())),
    "method": (lambda a, b: (a, Called(b).__call__), lambda o: (o[0], o[1]())),
    "partial": (lambda a, b: (a, functools.partial(abs, b)), lambda o: (o[0], o[1].args[0])),
    "set": (lambda a, b: (a, {b}), lambda o: (o[0], next(iter(o[1])))),
    "values": (lambda a, b: (a, {1: b}.values()), lambda o: (o[0], next(iter(o[1])))),
}
OPAQUE: dict[str, tuple[Pack, Unpack]] = {
    "generator": (lambda a, b: (a, (t for t in [b])), lambda o: (o[0], next(o[1]))),
    "iterator": (lambda a, b: (a, iter([b])), lambda o: (o[0], next(o[1]))),
    "zip": (lambda a, b: (a, zip([b], strict=False)), lambda o: (o[0], next(o[1])[0])),
}


class Part(nn.Module):
    """The hidden tensor is made last, so backward begins with it."""

    def __init__(self, pack: Pack) -> None:
        super().__init__()
        self.pack = pack
        self.first, self.side = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Any:
        x = self.first(x)
        return self.pack(x, self.side(x.sin()))


class Sender(nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        pack, self.unpack = (FOUND | OPAQUE)[kind]
        self.lead = nn.Linear(WIDTH, WIDTH)
        self.parts = nn.ModuleList([Part(pack), Part(pack)])

    def forward(self, x: Tensor) -> Tensor:
        x = self.lead(x)
        for part in self.parts:
            first, side = self.unpack(part(x))
            x = first + side.tanh()
        return x


def by_part(model: nn.Module, **options: Any) -> nn.Module:
    for part in model.parts:
        fully_shard(part, **options)
    return fully_shard(model, **options)


@pytest.mark.parametrize("kind", FOUND)
def test_tensors_in_attributes_of_outputs(kind: str) -> None:
    """They are found, without a warning, and the unit is released between its passes."""

    def ranks(rank: int) -> None:
        twin = Twin(rank, 2, lambda: Sender(kind), by_part)
        twin.train()
        twin.model(data(9, rank))
        assert not any(unit.holds for unit in units(twin.model) if "parts" in unit.name)

    simulate_ranks(ranks)


@pytest.mark.parametrize("kind", OPAQUE)
def test_what_cannot_be_looked_into_stays(kind: str) -> None:
    """A warning, right gradients, and the unit stays gathered until its backward is over."""

    def ranks(rank: int) -> None:
        twin = Twin(rank, 2, lambda: Sender(kind), by_part)
        twin.train()
        twin.model(data(9, rank))
        for unit in units(twin.model):
            reshard(unit.modules[0]())
        assert all(Hold.KEPT in unit.holds for unit in units(twin.model) if "parts" in unit.name)

    with pytest.warns(UserWarning, match="returned a tuple with something in it"):
        simulate_ranks(ranks)


class Keeper(nn.Module):
    """Keeps a tensor that is made after its output, where no module has it."""

    def __init__(self, detached: bool) -> None:
        super().__init__()
        self.first, self.side = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.detached = detached

    def forward(self, x: Tensor, key: Any) -> Tensor:
        x = self.first(x).tanh()
        kept[key] = self.side(x.sin()).sin()
        return x.detach() if self.detached else x


class Keepers(nn.Module):
    def __init__(self, detached: bool, trains: bool) -> None:
        super().__init__()
        self.lead = nn.Linear(WIDTH, WIDTH)
        self.parts = nn.ModuleList([Keeper(False), Keeper(detached)]).requires_grad_(trains)

    def forward(self, x: Tensor, key: Any) -> Tensor:
        x = self.lead(x)
        for index, part in enumerate(self.parts):
            x = part(x, (key, index))
        return x


@pytest.mark.parametrize("detached", [False, True])
@pytest.mark.parametrize("strategy", [ShardingStrategy.FULL_SHARD, ShardingStrategy.SHARD_GRAD_OP])
@pytest.mark.parametrize("trains", [False, True])
@pytest.mark.parametrize("uses_output", [False, True])
def test_kept_after_the_output_was_made(
    detached: bool, strategy: ShardingStrategy, trains: bool, uses_output: bool
) -> None:
    """A loss over tensors that forwards kept in a global, made later than what they returned."""

    def forward(model: nn.Module, x: Tensor) -> Tensor:
        out = model(x, id(model))
        sides = [kept.pop((id(model), index)) for index in range(2)]
        loss = (sides[0] * sides[1]).sum()
        return loss + out.square().mean() if uses_output else loss

    def ranks(rank: int) -> None:
        shard = lambda model: by_part(model, strategy=strategy)  # noqa: E731
        twin = Twin(rank, 2, lambda: Keepers(detached, trains), shard)
        twin.train(forward, steps=4)
        assert_at_rest(twin.model)

    simulate_ranks(ranks)
