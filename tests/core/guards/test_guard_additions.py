"""What is added to units, stands beside them, or copies them: found, named, or left alone."""

from __future__ import annotations

import copy
import gc
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.testing import assert_close

import fsdp_compose as fc
from fsdp_compose import fully_shard, gathered, register_forward_method, undo
from fsdp_compose.core.autograd import EngineWork
from fsdp_compose.core.guards import callers
from fsdp_compose.core.state import engine_of

from harness import simulate_ranks
from models import (
    WIDTH,
    Block,
    Tower,
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


def layer(width: int = WIDTH) -> nn.Linear:
    return nn.Linear(WIDTH, width)


def deep() -> nn.Module:
    return nn.Sequential(nn.Sequential(layer(), nn.Sequential(layer())), layer())


def new(trained: bool = True) -> nn.Parameter:
    return nn.Parameter(torch.ones(2, dtype=torch.float64), trained)


def added_names(model: nn.Module, rank: int) -> str:
    """The names that the error of a forward lists."""
    with pytest.raises(RuntimeError) as caught:
        model(data(0, rank))
    text = str(caught.value)
    assert "refresh(model) on every rank" in text
    return text.partition("not sharded: ")[2].partition(". Their gradients")[0]


def test_parameters_added_at_any_depth_are_named() -> None:
    """Also several, after a forward or before the first; taken away again, training goes on."""

    def ranks(rank: int) -> None:
        for first in (True, False):
            model = one_unit(seeded(deep))
            if first:
                model(data(0, rank))
            model[0][1][0].extra = new()
            assert added_names(model, rank) == "'0.1.0.extra'"
            model[0].other, model.third, model[1].none = new(), new(), None
            assert added_names(model, rank) == "'third', '0.other', '0.1.0.extra'"
            del model[0][1][0].extra, model[0].other, model.third
            model[1].more = layer()
            assert added_names(model, rank) == "'1.more.weight', '1.more.bias'"
            model[1].more = fully_shard(layer().double())  # a unit of its own
            square(model, data(0, rank)).backward()
            assert_at_rest(model)
        model = one_unit(nn.Sequential(seeded(layer), nn.ReLU()))
        for _ in range(2):
            model(data(0, rank))
        model[1] = layer().double()
        assert added_names(model, rank) == "'1.weight', '1.bias'"

    simulate_ranks(ranks)


def test_additions_are_named_as_the_model_names_them() -> None:
    """By the whole name, whether units were sharded before the model or with it."""

    def ranks(rank: int) -> None:
        for together in (True, False):
            model = nn.Sequential(nn.Sequential(seeded(layer)), seeded(layer))
            if not together:
                fully_shard(model[0][0])
            fully_shard(model, units=fc.wrap.by_class({nn.Linear}) if together else None)
            model[0][0].extra = new()
            assert added_names(model, rank) == "'0.0.extra'"
            del model[0][0].extra
            model[0][0].alias = model[0][0].weight
            with pytest.raises(RuntimeError, match=r"names that they did not .*: '0\.0\.alias'\. "):
                model(data(0, rank))

    simulate_ranks(ranks)


def test_frozen_additions_may_stay_until_they_train() -> None:
    """Each that is made trainable later is found, the second too; an empty place is none."""

    def ranks(rank: int) -> None:
        model = one_unit(seeded(deep))
        model[1].register_parameter("empty", None)
        model[0].first, model[0].second = new(False), new(False)
        for _ in range(2):
            model(data(0, rank))
        model[0].second.requires_grad_(True)
        assert added_names(model, rank) == "'0.second'"
        model[0].second.requires_grad_(False)
        model(data(0, rank))
        model[0].first.requires_grad_(True)
        assert added_names(model, rank) == "'0.first'"
        model[0].first.requires_grad_(False)
        model[1].empty = new()
        assert added_names(model, rank) == "'1.empty'"
        model[1].empty = None
        model[0].first = new()
        assert added_names(model, rank) == "'0.first'"

    simulate_ranks(ranks)


def test_forwards_look_again_only_after_a_change() -> None:
    """What is ignored, frozen, empty or at home costs the forwards after the first no full look."""

    def ranks(rank: int) -> None:
        model = seeded(deep)
        model[1].register_parameter("empty", None)
        model = one_unit(model, ignored=[model[0][0].bias])
        model[0].frozen = new(False)
        (unit,) = units(model)
        model(data(0, rank))
        seen = unit.checks.watch
        assert seen is not None
        for step in range(2):
            square(model, data(step, rank)).backward()
            assert unit.checks.watch is seen
        model[0].other = new(False)
        model(data(0, rank))
        assert unit.checks.watch is not seen

    simulate_ranks(ranks)


def test_what_was_ignored_is_not_an_addition() -> None:
    """Parameters and modules, whose flags and contents may change."""

    def ranks(rank: int) -> None:
        model = seeded(deep)
        given = [model[0][0].bias, model[0][1]]
        model = one_unit(model, ignored=given)
        model(data(0, rank))
        given[0].requires_grad_(False)
        model(data(0, rank))
        given[0].requires_grad_(True)
        model[0][1].anything = new()
        model(data(0, rank)).sum().backward()
        assert given[0].grad is not None and model[0][1][0].weight.grad is not None
        model[0].extra = new()
        assert added_names(model, rank) == "'0.extra'"

    simulate_ranks(ranks)


def test_a_shared_layer_is_looked_at_once() -> None:
    """And what follows it is looked at too."""

    def ranks(rank: int) -> None:
        shared = seeded(layer)
        model = one_unit(nn.Sequential(shared, shared, seeded(deep)))
        model(data(0, rank))
        shared.extra = new()
        assert added_names(model, rank) == "'0.extra'"
        model[2][1].extra = new()
        assert added_names(model, rank) == "'0.extra', '2.1.extra'"

    simulate_ranks(ranks)


def test_additions_to_a_unit_of_several_modules() -> None:
    """Names begin with the number of the module; sharded parameters in new places are told."""

    def ranks(rank: int) -> None:
        model = nn.Sequential(seeded(layer), seeded(deep), seeded(layer))
        fully_shard([model[0], model[1]])
        model = fully_shard(model)
        model(data(0, rank))
        model[1][0].extra = new()
        assert added_names(model, rank) == "'1.0.extra'"
        del model[1][0].extra
        model[0].alias = model[0].weight
        with pytest.raises(RuntimeError, match=r"under names that they did not .*: '0\.alias'\. "):
            model(data(0, rank))
        del model[0].alias
        square(model, data(0, rank)).backward()

    simulate_ranks(ranks)


class Replicated(DistributedDataParallel):
    """Is registered as DistributedDataParallel is, and communicates nothing."""

    def __init__(self) -> None:
        nn.Module.__init__(self)

    def forward(self, x: Tensor) -> Tensor:
        return self.module(x)


class Private(nn.Module):
    """Is registered as a module of opacus is."""


Private.__module__ = "opacus.grad_sample"


def test_wrappers_are_refused_sharded_parameters() -> None:
    """Opacus's and DistributedDataParallel's; the latter may be told to leave them alone."""

    def ranks(rank: int) -> None:
        model = seeded(layer)
        fully_shard(model, ignored=[model.weight])
        for around in (Replicated(), Private(), nn.Module()):
            around.register_module("nothing", None)
            around.plain = layer()
        nn.Module().child = model
        with pytest.raises(RuntimeError, match=r"^Private was given 'bias', which is sharded"):
            Private().child = model
        with pytest.raises(RuntimeError, match=r"^DistributedDataParallel was given 'bias'"):
            Replicated().child = model
        model._ddp_params_and_buffers_to_ignore = ["bias"]
        Replicated().child = model
        fully = fully_shard(seeded(layer))
        fully._ddp_params_and_buffers_to_ignore = ["weight"]
        with pytest.raises(RuntimeError, match=r"^DistributedDataParallel was given 'bias'"):
            Replicated().child = fully

    simulate_ranks(ranks)


# The model around units


def outside(model: nn.Module, rank: int) -> str:
    """The names that the error of a backward lists."""
    with pytest.raises(RuntimeError, match=r"^backward: trainable parameters of the ") as caught:
        square(model, data(0, rank)).backward()
    return str(caught.value).partition("are in no unit: ")[2].partition(". Nothing")[0]


def blocks_of(model: nn.Module, **options: Any) -> nn.Module:
    for block in model.blocks:
        fully_shard(block, **options)
    return model


def test_names_of_what_stands_beside_units() -> None:
    """By their paths from the outermost module, in order, each once; not what was ignored."""

    def ranks(rank: int) -> None:
        model = blocks_of(seeded(two_blocks))
        names = "'first.weight', 'first.bias', 'head.weight', 'head.bias'"
        assert outside(model, rank) == names
        assert outside(model, rank) == names  # again
        inner = blocks_of(seeded(two_blocks))
        inner.again, inner.none = inner.first, None
        assert outside(nn.Sequential(inner), rank) == names.replace("'f", "'0.f").replace(
            "'h", "'0.h"
        )
        told = seeded(two_blocks)
        blocks_of(told, ignored=[told.first, told.head.bias])
        assert outside(told, rank) == "'head.weight'"
        beside = blocks_of(seeded(two_blocks))
        averaged = Replicated()
        averaged.module, beside.first.weight.requires_grad = beside.first, False
        beside.first = averaged
        assert outside(beside, rank) == "'head.weight', 'head.bias'"
        beside.head.requires_grad_(False)
        square(beside, data(0, rank)).backward()

    simulate_ranks(ranks)


def test_units_of_one_rank_stand_beside_others() -> None:
    """Their parameters are no plain ones, at rest or in a scope; alone, nothing drifts."""

    def ranks(rank: int) -> None:
        for scoped in (False, True):
            model = nn.Sequential(seeded(Block), seeded(Block))
            fully_shard(model[0], mesh="self"), fully_shard(model[1])
            if scoped:
                with gathered(model):
                    fc.clip_grad_norm_(model, 1.0)
            square(model[1], data(0, rank)).backward()
            with pytest.raises(RuntimeError, match="different numbers of ranks"):
                square(model, data(0, rank)).backward()
        model = blocks_of(seeded(two_blocks), mesh="self")
        square(model, data(0, rank)).backward()

    simulate_ranks(ranks)


class Caller(nn.Module):
    """Calls a unit that it does not contain, and contains one that it does not call."""

    def __init__(self, unit: nn.Module) -> None:
        super().__init__()
        self.called, self.own = [unit], layer().double()
        self.idle = fully_shard(seeded(Block))

    def forward(self, x: Tensor) -> Tensor:
        return self.called[0](self.own(x))


def test_modules_that_only_call_a_unit() -> None:
    """Nor is one that is gone before the backward; and a unit itself is looked at by forwards."""

    def ranks(rank: int) -> None:
        unit = fully_shard(seeded(Block))
        caller = Caller(unit)
        square(caller, data(0, rank)).backward()
        other = fully_shard(seeded(Block))
        around = nn.Sequential(layer().double(), other)
        loss = square(around, data(0, rank))
        del around
        gc.collect()
        loss.backward()
        model = one_unit(seeded(deep))
        loss = square(model, data(0, rank))
        model[0].extra = new()
        loss.backward()
        assert added_names(model, rank) == "'0.extra'"

    simulate_ranks(ranks)


# Copies


class Borrowing(nn.Module):
    """Its first unit has the weights of both others."""

    def __init__(self) -> None:
        super().__init__()
        self.user, self.one, self.two = nn.Sequential(layer(), layer()), layer(), layer()

    def forward(self, x: Tensor) -> Tensor:
        for part in (self.one, self.two, self.user):
            x = torch.tanh(part(x))
        return x


def test_a_copy_borrows_from_copies_of_every_owner() -> None:
    """Also where the unit that borrows is copied before the units that it borrows from."""

    def ranks(rank: int) -> None:
        plain = seeded(Borrowing)
        plain.user[0].weight, plain.user[1].weight = plain.one.weight, plain.two.weight
        model = copy.deepcopy(plain)
        fully_shard(model.one), fully_shard(model.two), fully_shard(model.user)
        for twin in (copy.deepcopy(model), copy.deepcopy(copy.deepcopy(model))):
            assert twin.user[1].weight is twin.two.weight is not model.two.weight
            numbers = [unit.number for unit in (*units(model), *units(twin))]
            assert len(set(numbers)) == len(numbers) == 6
            own = {id(e) for unit in units(twin) for bucket in unit.buckets for e in bucket.entries}
            for unit in units(twin):
                assert {id(entry) for entry in unit.borrowed} <= own
            assert sum(len(unit.borrowed) for unit in units(twin)) == 2
            square(twin, data(0, rank)).backward()
            other = copy.deepcopy(plain)
            sum(square(other, data(0, r)) / 2 for r in range(2)).backward()
            for mine, theirs in zip(twin.parameters(), other.parameters(), strict=True):
                assert_close(whole(mine.grad), theirs.grad)
            assert all(p.grad is None for p in model.parameters())
        first, second = copy.deepcopy(model), copy.deepcopy(model)
        numbers = [unit.number for each in (model, first, second) for unit in units(each)]
        assert len(set(numbers)) == len(numbers) == 9

    simulate_ranks(ranks)


def test_a_copy_that_one_rank_makes() -> None:
    """It does not change how units that are sharded later are numbered, which ranks compare."""

    def ranks(rank: int) -> None:
        model = by_block(seeded(two_blocks))
        square(model, data(0, rank)).backward()
        twins = [copy.deepcopy(model) for _ in range(rank)]
        later = by_block(seeded(two_blocks))
        for each in (later, model):
            square(each, data(1, rank)).backward()
            assert_at_rest(each)
        assert len(twins) == rank

    simulate_ranks(ranks)


def test_a_copy_knows_what_was_ignored_and_not_loaded() -> None:
    """Flags, names and buffers that nothing has written yet, as the original has them."""

    def ranks(rank: int) -> None:
        model = seeded(deep)
        model[1].register_buffer("scale", torch.ones(2))
        model = one_unit(model, ignored=[model[0][0].bias, model[0][1]])
        twin = copy.deepcopy(model)
        twin(data(0, rank)).sum().backward()
        assert twin[0][0].bias.grad is not None and twin[0][1][0].weight.grad is not None
        twin[0].extra = new()
        assert added_names(twin, rank) == "'0.extra'"
        with torch.device("meta"):
            empty = nn.BatchNorm1d(WIDTH, affine=True).double()
        empty = one_unit(nn.Sequential(empty), param_init_fn=lambda module: None)
        other = copy.deepcopy(empty)
        with torch.no_grad():
            for param in other.parameters():
                param.fill_(1)
        with pytest.raises(RuntimeError, match=r"buffer '0\.running_mean', buffer '0\.running_var"):
            other(data(0, rank))
        other.load_state_dict({name: torch.ones_like(t, device="cpu") if not t.is_meta else t
                               for name, t in nn.Sequential(nn.BatchNorm1d(WIDTH)).double()
                               .state_dict().items()})  # fmt: skip
        other(data(0, rank))
        with pytest.raises(RuntimeError, match="nothing has written it"):
            empty(data(0, rank))

    simulate_ranks(ranks)


# Methods


class Bound:
    """A descriptor of a user's own, which wants the class too."""

    def __get__(self, module: Any, owner: type) -> Any:
        return lambda x: owner.encode(module, x)


class Coder(nn.Linear):
    """Has methods of several kinds."""

    bound = Bound()

    def encode(self, x: Tensor) -> Tensor:
        """Encode."""
        return nn.functional.linear(x, self.weight)

    def __hidden(self, x: Tensor) -> Tensor:
        return self.encode(x)

    def decode__(self, x: Tensor) -> Tensor:
        return self.encode(x) * 2

    def _inner(self) -> None: ...

    size = 3


def coder() -> nn.Module:
    return seeded(lambda: Coder(WIDTH, 4))


def test_each_listed_method_is_checked() -> None:
    """The second as the first; names that only begin or end like Python's own are methods."""

    def ranks(rank: int) -> None:
        plain = coder()
        listed = ("forward", "encode", "_Coder__hidden", "decode__", "bound")
        model = fully_shard(coder(), methods=listed)
        for name in listed[1:]:
            assert_close(getattr(model, name)(data(0, 0)), getattr(plain, name)(data(0, 0)))
        wanted = r"names 'nope', but no unit of this call has such a method; Coder has "
        wanted += r"\['bound', 'decode__', 'encode', 'forward', 'reset_parameters'\]\.$"
        for wrong, text in (
            ("nope", wanted),
            ("size", "names 'size', but no unit"),
            ("__call__", "names '__call__', which is nn.Module's or Python's own"),
            ("train", "names 'train', which is nn.Module's"),
        ):
            with pytest.raises(ValueError, match=text):
                fully_shard(coder(), methods=("encode", wrong))
            with pytest.raises(ValueError, match="^register_forward_method: methods " + text):
                register_forward_method(model, "encode", wrong)
        for given in ("encode", 3, ("encode", 3)):
            with pytest.raises(TypeError, match="names of methods"):
                fully_shard(coder(), methods=given)

    simulate_ranks(ranks)


def test_a_method_answers_as_the_one_it_shadows() -> None:
    """Its function, doc and module, of the class or set on the module; also once it is undone."""

    def ranks(rank: int) -> None:
        own = coder()
        own.encode = shadowed = lambda x: Coder.encode(own, x) * 3
        plain, x = coder(), data(0, 0)
        model, other = (
            fully_shard(coder(), methods=("encode",)),
            fully_shard(own, methods=["encode"]),
        )
        method = model.encode
        assert method.__func__ is Coder.encode and method.__self__ is model
        assert method.__doc__ == "Encode." and method.__name__ == "encode"
        assert repr(method) == "<encode of a sharded Coder>"
        assert other.encode.__func__ is shadowed is other.encode.__wrapped__
        assert_close(other.encode(x), plain.encode(x) * 3)
        pair = copy.deepcopy([model.encode, model])
        assert pair[0] is vars(pair[1])["encode"] and pair[0].__self__ is pair[1]
        undo(model), undo(other)
        assert "encode" not in vars(model) and other.encode is shadowed
        assert_close(method(x), plain.encode(x))
        register = fully_shard(coder())
        register_forward_method(register, "encode")
        first = vars(register)["encode"]
        register_forward_method(register, "encode", "decode__")
        assert vars(register)["encode"] is first and "decode__" in vars(register)
        assert units(register)[0].options.methods == ("encode", "decode__")
        twin = copy.deepcopy(register)
        assert_close(twin.decode__(x), plain.decode__(x))
        with pytest.raises(ValueError, match="register_forward_method: Linear is not a unit; "):
            register_forward_method(nn.Linear(1, 1), "forward")
        undo(register)
        assert not {"encode", "decode__"} & set(vars(register))

    simulate_ranks(ranks)


# Processes


@pytest.mark.parametrize("kind", ["flat", "fused"])
def test_what_a_fork_leaves_of_units(kind: str) -> None:
    """Every unit of every device raises there, and every group; one alone on its rank works."""

    def ranks(rank: int) -> None:
        engine_of(torch.device("meta"), EngineWork)
        options: dict[str, Any] = {}
        if kind == "fused":
            options["mesh"] = mesh_of_replicas(2, 2)
            options["strategy"] = fc.ShardingStrategy.HYBRID_SHARD_OPTIMIZER
        model, alone = by_block(seeded(Tower), **options), fully_shard(coder(), mesh="self")
        callers._note_fork()
        for unit in units(model):
            with pytest.raises(RuntimeError, match=f"unit '{unit.name}': forward was called in a"):
                unit.modules[0]()(data(0, rank))
            (bucket,) = unit.buckets
            for group in (*bucket.mesh.groups, *(bucket.mesh.axes or ())):
                with pytest.raises(RuntimeError, match="gathered or summed in a process that was"):
                    group.pg.size()
        with pytest.raises(RuntimeError, match="gathered or summed in a process that was forked"):
            model.head.weight.full_tensor()
        assert_close(alone(data(0, rank)), coder()(data(0, rank)))

    simulate_ranks(ranks, 4)


def test_scripting_names_the_unit_and_ends_with_undo() -> None:
    def ranks(rank: int) -> None:
        model = by_block(seeded(two_blocks))
        for part, name in ((model, "Tower"), (model.blocks[0], "blocks.0")):
            hook = vars(part)[callers.SCRIPT_HOOK]
            with pytest.raises(RuntimeError, match=rf"unit '{name}': torch\.jit\.script cannot"):
                hook()
        undo(model)
        assert not any(callers.SCRIPT_HOOK in vars(module) for module in model.modules())

    simulate_ranks(ranks)
