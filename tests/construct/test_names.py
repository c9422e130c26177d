"""Parameter names, units and ``apply``."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.nn.parallel import DistributedDataParallel

import fsdp_compose as fc
from fsdp_compose import fully_shard, gathered, undo, wrap
from fsdp_compose.construct.names import clean_name, parameter_names, parameters_by_name, units_of
from fsdp_compose.scopes.apply import apply

from harness import rank_errors, run_ranks
from models import EVERY_SHARD, Block, Tower, by_block, data, square, units, whole

pytestmark = pytest.mark.filterwarnings("error")


class Tied(Tower):
    """A weight under two names."""

    def __init__(self) -> None:
        super().__init__(2)
        self.embed = nn.Embedding(2, 6)
        self.head.weight = self.embed.weight


class Shared(Tied):
    """And a module under two names."""

    def __init__(self) -> None:
        super().__init__()
        self.again = self.first


def plain_names(model: nn.Module) -> dict[str, nn.Parameter]:
    return dict(model.named_parameters(remove_duplicate=False))


@pytest.mark.parametrize("shard", list(EVERY_SHARD))
def test_names_are_those_of_the_plain_module(shard: str) -> None:
    model = Shared()
    wanted = plain_names(model)
    EVERY_SHARD[shard](model)
    found = parameters_by_name(model)
    assert set(found) == set(wanted)
    assert all(found[name] is param for name, param in wanted.items())
    names = parameter_names(model)
    assert [id(p) for p in names] == [id(p) for p in model.parameters()]
    assert set(names[model.embed.weight]) == {"head.weight", "embed.weight"}
    assert set(names[model.again.bias]) == {"first.bias", "again.bias"}
    assert sum(len(n) for n in names.values()) == len(wanted)


def test_names_while_a_unit_is_gathered() -> None:
    model = Tied()
    wanted = plain_names(model)
    seen: list[Any] = []
    model.blocks[0].up.register_forward_hook(lambda *a: seen.append(parameters_by_name(model)))
    by_block(model)
    model(torch.randn(1, 6))
    assert set(seen[0]) == set(wanted)
    assert all(seen[0][name] is param for name, param in wanted.items())


def test_wrappers_leave_no_trace_in_names() -> None:
    def ranks(rank: int) -> None:
        model = Tied()
        wanted = plain_names(model)
        for i, block in enumerate(model.blocks):
            model.blocks[i] = checkpoint_wrapper(block)
        by_block(model)
        assert set(parameters_by_name(model)) == set(wanted)
        compiled = torch.compile(model, backend="eager")
        assert set(parameters_by_name(compiled)) == set(wanted)
        other = DistributedDataParallel(nn.Sequential(nn.Linear(2, 2)))
        assert list(parameters_by_name(other)) == ["0.weight", "0.bias"]
        outer = nn.ModuleDict({"module": nn.Linear(2, 2)})
        assert list(parameters_by_name(outer)) == ["module.weight", "module.bias"]

    run_ranks(ranks, 2)
    assert clean_name("_orig_mod.a._checkpoint_wrapped_module.b.weight") == "a.b.weight"
    assert clean_name("module.a._fsdp_wrapped_module.weight") == "module.a.weight"


def test_every_list_of_names_agrees_below_wrappers(tmp_path: Any) -> None:
    """Names of parameters, errors, policies, state dicts and saved files are one set."""

    def ranks(rank: int) -> None:
        plain = Tied()
        wanted = set(plain_names(plain))
        asked: set[str] = set()
        model = copy.deepcopy(plain)
        model.blocks[0] = nn.DataParallel(model.blocks[0])
        model.blocks[1] = checkpoint_wrapper(model.blocks[1])
        policy = wrap.by_name("blocks.*") | wrap.by_fn(lambda fqn, m: asked.add(fqn))
        fully_shard(model, units=policy)
        assert asked <= set(dict(plain.named_modules()))
        outer = nn.DataParallel(model)
        optim = torch.optim.AdamW(outer.parameters())
        square(model, data(0, rank).float()).backward()
        optim.step()
        for module in (model, outer):
            state = fc.state_dict(module)
            named = fc.optim_state_dict(module, optim)["state"]
            assert set(parameters_by_name(module)) == set(state) == wanted
            assert {n for names in parameter_names(module).values() for n in names} == wanted
            assert {parameters_by_name(module)[n]._shard_spec.fqn for n in wanted} == set(named)
            assert set(named) < wanted
        fc.save_checkpoint(tmp_path / "a", outer, optim)
        fc.save_full(tmp_path / "b", outer)
        assert set(outer.state_dict()) > {"module.blocks.0.module.norm.weight", "module.head.bias"}
        native = {f"module.{name}": value for name, value in state.items()}
        again = {name: value.full_tensor() for name, value in outer.state_dict().items()}
        fc.load_state_dict(outer, again)
        outer.load_state_dict(again)
        for load in (
            lambda m: fc.load_checkpoint(tmp_path / "a", m),
            lambda m: fc.load_full(tmp_path / "b", m),
            lambda m: fc.load_state_dict(m, fc.state_dict(outer)),
            lambda m: fc.load_state_dict(nn.DataParallel(m), native),
            lambda m: nn.DataParallel(m).load_state_dict(native),
        ):
            other = by_block(Tied(), init="broadcast")
            load(other)
            for name, value in fc.state_dict(other).items():
                assert torch.equal(value, state[name]), name

    run_ranks(ranks)


def test_children_that_are_none_have_no_names() -> None:
    """As a block without its optional part has."""
    model = nn.Sequential(nn.Linear(2, 2))
    model.register_module("extra", None)
    plain = [*dict(model.named_parameters())]
    assert [*parameters_by_name(fully_shard(model))] == plain


def test_units_are_listed_parents_first() -> None:
    """Units are listed parents first and outermost alone."""
    model = nn.ModuleDict({"a": Tower(2), "b": Tower(1), "c": Block(), "d": nn.Linear(2, 2)})
    by_block(model["a"])
    by_block(model["b"])
    fully_shard(model["c"])
    blocks = [m for m in model.modules() if isinstance(m, Block)]
    found = units_of(model)
    assert found == [model["a"], *blocks[:2], model["b"], blocks[2], model["c"]]
    assert units_of(model, root_only=True) == [model["a"], model["b"], model["c"]]
    assert units_of(model["a"], root_only=True) == [model["a"]]
    assert units_of(model["a"].blocks, root_only=True) == blocks[:2]
    assert units_of(model["d"]) == []


def test_a_unit_of_several_modules_is_listed_once() -> None:
    model = Tower(3)
    fully_shard(model.blocks[1].up)
    fully_shard([model.blocks[0], model.blocks[1]])
    assert units_of(model) == [model.blocks[0], model.blocks[1].up]
    assert units_of(model, root_only=True) == [model.blocks[0]]
    assert len(units(model)) == 2


# apply


@pytest.mark.parametrize("shard", list(EVERY_SHARD))
@pytest.mark.parametrize("world", [1, 2, 3])
def test_apply_is_that_of_the_plain_module(shard: str, world: int) -> None:
    def reset(module: nn.Module) -> None:
        for name, param in module.named_parameters(recurse=False):
            assert isinstance(param, Tensor)
            nn.init.normal_(param) if param.dim() > 1 else nn.init.constant_(param, len(name))

    def ranks(rank: int) -> None:
        model, plain = Shared(), Shared()
        before = list(model.parameters())
        EVERY_SHARD[shard](model)
        orders: list[list[str]] = [[], []]
        for order, m, run in zip(orders, (model, plain), (apply, nn.Module.apply)):
            torch.manual_seed(4)
            result = run(m, lambda s, o=order: (o.append(type(s).__name__), reset(s))[0])
            assert result is m
        assert orders[0] == orders[1]
        assert all(a is b for a, b in zip(model.parameters(), before, strict=True))
        for name, param in plain.named_parameters():
            assert torch.equal(whole(model.get_parameter(name)), param), name
        square(model, data(0, rank).float()).backward()
        undo(model)
        for name, param in plain.named_parameters():
            assert torch.equal(model.get_parameter(name), param), name

    run_ranks(ranks, world)


def test_apply_on_a_part_and_on_a_list_of_units() -> None:
    def fill(module: nn.Module) -> None:
        if isinstance(module, nn.Linear):
            module.weight.fill_(2)

    def ranks(rank: int) -> None:
        model = by_block(Tower(2))
        apply(model.blocks[0].up, fill)
        assert whole(model.blocks[0].up.weight).eq(2).all()
        assert not whole(model.blocks[0].down.weight).eq(2).any()
        apply(model.blocks, fill)
        assert whole(model.blocks[1].down.weight).eq(2).all()
        assert not whole(model.head.weight).eq(2).any()
        with gathered(model):  # which itself keeps no edits
            apply(model, fill)
            assert model.head.weight.eq(2).all()
        assert whole(model.head.weight).eq(2).all()
        pair = Tower(2)
        fully_shard([pair.blocks[0], pair.blocks[1]])
        fully_shard(pair)
        apply(pair, fill)
        assert all(whole(p).eq(2).all() for n, p in pair.named_parameters() if "up.weight" in n)
        plain = Tower(1)
        apply(plain, fill)
        assert plain.head.weight.eq(2).all()

    run_ranks(ranks, 2)


def test_apply_holds_one_path_of_units_gathered() -> None:
    def ranks(rank: int) -> None:
        model = fully_shard(Tower(3), units=wrap.by_class({Block}))
        most = 0

        def count(module: nn.Module) -> None:
            nonlocal most
            most = max(most, sum(unit.opened is not None for unit in units(model)))

        apply(model, count)
        assert most == 2, "the root and one block"
        assert not any(unit.opened for unit in units(model))

    run_ranks(ranks, 2)


def test_apply_that_looks_into_a_unit_inside_says_so() -> None:
    def ranks(rank: int) -> None:
        model = by_block(Tower(1))

        def peek(module: nn.Module) -> None:
            if isinstance(module, Tower):
                module.blocks[0].up.weight.t()

        apply(model, peek)

    for text in rank_errors(ranks, 2):
        assert text is not None
        assert text.startswith("ShardedWeightError") and "'blocks.0.up.weight'" in text
