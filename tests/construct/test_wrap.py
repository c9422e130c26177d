"""Which submodules become units, and with which options."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.modules.linear import NonDynamicallyQuantizableLinear

from fsdp_compose import (
    MixedPrecision,
    Offload,
    Prefetch,
    ShardingStrategy,
    fully_shard,
    gathered,
    wrap,
)
from fsdp_compose.construct.choose_units import _OVERRIDABLE
from fsdp_compose.core.state import find_state, iter_units
from fsdp_compose.sharded import is_sharded

from harness import rank_errors, run_ranks, single_process
from models import WIDTH, Block, Tower, Twin, data, seeded, square, units, units_by_name, whole


def units_with(policy: wrap.Policy, model: nn.Module | None = None, **options: Any) -> set[str]:
    """Names of the units the policy makes, besides the root."""
    model = Tower(2) if model is None else model
    fully_shard(model, units=policy, **options)
    return set(units_by_name(model)) - {type(model).__name__}


class Attentive(nn.Module):
    """An attention that reads its output projection's weight without calling it."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(WIDTH, 2, batch_first=True)
        self.blocks = nn.ModuleList([Block(), Block()])

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(x, x, x, need_weights=False)[0]
        for block in self.blocks:
            x = block(x)
        return x


def test_by_class() -> None:
    blocks = {"blocks.0", "blocks.1"}
    assert units_with(wrap.by_class(Block)) == blocks
    assert units_with(wrap.by_class({Block, nn.LayerNorm})) == blocks | {
        f"{b}.norm" for b in blocks
    }
    model = Tower(2)
    units_with(wrap.by_class(Block, reshard_after_forward=False), model)
    assert [u.switches.keep_after_forward for u in iter_units(model)] == [None, True, True]


def test_by_size_counts_what_no_unit_inside_has_taken() -> None:
    block = sum(p.numel() for p in Block().parameters())
    up = sum(p.numel() for p in Block().up.parameters())
    assert units_with(wrap.by_size(block)) == {"blocks.0", "blocks.1"}
    assert units_with(wrap.by_size(up)) == {
        *(f"blocks.{i}{m}" for i in range(2) for m in (".up", "")),
    }  # a block without ``up`` is still large enough
    assert "blocks" not in units_with(wrap.by_size(1))
    assert "blocks" in units_with(wrap.by_size(2 * block, exclude=()), _callable())


class _Called(nn.ModuleList):
    def forward(self, x: Tensor) -> Tensor:
        for block in self:
            x = block(x)
        return x


def _callable() -> nn.Module:
    model = Tower(2)
    model.blocks = _Called(model.blocks)
    return model


def test_by_size_excludes_classes_but_looks_inside() -> None:
    assert units_with(wrap.by_size(1, exclude=[Block, nn.ModuleList, nn.LayerNorm])) == {
        "first",
        "head",
        *(f"blocks.{i}.{m}" for i in range(2) for m in ("up", "down")),
    }


@pytest.mark.parametrize("first", [True, False])
def test_a_leaf_is_taken_whole_in_any_combination(first: bool) -> None:
    """A leaf is taken whole whatever it is combined with."""
    size, linear = wrap.by_size(20), wrap.by_class(nn.Linear)
    policy = size | linear if first else linear | size
    assert policy.leaves == (nn.MultiheadAttention,)
    found = units_with(policy, Attentive())
    assert "attention" in found
    assert not any(name.startswith("attention.") for name in found)
    assert {"blocks.0.up", "blocks.0.down"} <= found
    run_ranks(
        lambda rank: Twin(rank, 2, Attentive, lambda m: fully_shard(m, units=policy)).train(
            square, 2, 2, 3, WIDTH
        )
    )


def test_a_leaf_counts_all_it_holds() -> None:
    total = sum(p.numel() for p in nn.MultiheadAttention(WIDTH, 2).parameters())
    assert "attention" in units_with(wrap.by_size(total), Attentive())
    model = Attentive()
    ignored = [model.attention.out_proj.weight]
    with pytest.raises(ValueError, match="matches no submodule"):
        units_with(wrap.by_size(total), model, ignored=ignored)


def test_by_fn_returns_a_bool_or_options() -> None:
    def choose(fqn: str, module: nn.Module) -> Any:
        return {"blocks.0": {"reshard_after_forward": False}, "blocks.1": True, "head": {}}.get(fqn)

    model = Tower(3)
    assert units_with(wrap.by_fn(choose), model) == {"blocks.0", "blocks.1", "head"}
    kept = {name: unit.switches.keep_after_forward for name, unit in units_by_name(model).items()}
    assert kept == {"Tower": None, "blocks.0": True, "blocks.1": None, "head": None}
    with pytest.raises(TypeError, match="returned 'yes' for 'first'"):
        fully_shard(Tower(), units=wrap.by_fn(lambda fqn, module: "yes"))


def test_the_first_that_says_yes_decides() -> None:
    keep = wrap.by_class(Block, reshard_after_forward=False)
    head = wrap.by_fn(lambda fqn, module: fqn == "head")
    for policy, kept in ((keep | wrap.by_class(Block), True), (wrap.by_class(Block) | keep, None)):
        model = Tower(1)
        assert units_with(policy | head, model) == {"blocks.0", "head"}
        assert units_by_name(model)["blocks.0"].switches.keep_after_forward is kept
    assert (keep | head | wrap.by_size(3)).description == (
        "by_class({Block}) | by_fn(<lambda>) | by_size(3)"
    )


def test_post_order_application() -> None:
    asked: list[tuple[str, int]] = []

    def decide(fqn: str, module: nn.Module, numel: int) -> bool:
        asked.append((fqn, numel))
        return fqn == "blocks.0.up"

    units_with(wrap.Policy(lambda root: decide, "mine"), Tower(1))
    names = [name for name, _ in asked]
    blocks = [f"blocks.0{m}" for m in (".norm", ".up", ".down", "")]
    assert names == ["first", *blocks, "blocks", "head"]
    sizes = dict(asked)
    assert sizes["blocks.0"] == sizes["blocks.0.norm"] + sizes["blocks.0.down"]
    assert "" not in names  # the root is a unit in any case


def test_a_shared_module_is_asked_about_once() -> None:
    model = Tower(2)
    model.blocks[1] = model.blocks[0]
    assert units_with(wrap.by_class(Block), model) == {"blocks.0"}


def test_what_attention_does_not_call_is_no_unit() -> None:
    """``out_proj``, which attention reads by functions, trains as part of the unit around it."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.TransformerEncoderLayer(WIDTH, 2, 8, 0.0, batch_first=True).double())
    twin = copy.deepcopy(model)
    assert units_with(wrap.by_class(nn.Linear), model) == {"0.linear1", "0.linear2"}
    x = torch.randn(2, 3, WIDTH, dtype=torch.float64)
    for m in (model, twin):
        square(m, x).backward()
    for ours, theirs in zip(model.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(whole(ours.grad), theirs.grad)
    chosen = wrap.by_class(NonDynamicallyQuantizableLinear)  # by its own class, it is
    assert units_with(chosen, twin) == {"0.self_attn.out_proj"}
    with pytest.raises(ValueError, match=r"matches no submodule of MultiheadAttention"):
        fully_shard(nn.MultiheadAttention(4, 2), units=wrap.by_class(nn.Linear))


def test_a_policy_that_matches_nothing() -> None:
    class Other(nn.Module):
        pass

    with pytest.raises(
        ValueError, match=r"by_class\(\{Other\}\) matches no submodule of Tower"
    ) as e:
        fully_shard(Tower(), units=wrap.by_class(Other))
    assert "'Block'" in str(e.value)
    with pytest.raises(TypeError, match="by_class: 'Block' is not a class"):
        wrap.by_class(["Block"])  # type: ignore[list-item]
    with pytest.raises(TypeError, match="by_size"):
        wrap.by_size(3, leaf=[int])  # type: ignore[list-item]


@pytest.mark.parametrize(
    "policy",
    [
        wrap.by_class({Block, nn.Linear}),
        wrap.by_size(40),
        wrap.by_size(30) | wrap.by_class(nn.LayerNorm),
        wrap.by_fn(lambda fqn, m: fqn.endswith("down")),
        wrap.by_execution_order(torch.ones(2, WIDTH), 30),
    ],
    ids=lambda p: p.description,
)
def test_training_with_any_policy(policy: wrap.Policy) -> None:
    run_ranks(lambda rank: Twin(rank, 2, Tower, lambda m: fully_shard(m, units=policy)).train())


def only_first(**options: Any) -> wrap.Policy:
    return wrap.by_fn(lambda fqn, m: options if fqn == "blocks.0" else isinstance(m, Block))


def test_every_option_can_be_overridden() -> None:
    import inspect

    taken = set(inspect.signature(fully_shard).parameters)
    never = {"module", "units", "deterministic"}  # of the whole call
    assert set(_OVERRIDABLE) == taken - never


def test_overrides_take_effect_in_their_unit_alone() -> None:
    def ranks(rank: int) -> None:
        import torch.distributed as dist

        half = dist.new_subgroups(1)[0]
        mp = MixedPrecision(param_dtype=torch.bfloat16)
        model = seeded(lambda: Tower(2))
        weight = model.blocks[0].up.weight
        policy = only_first(
            mesh=half,
            mp_policy=mp,
            offload_policy=Offload(grads=True),
            granularity="row",
            prefetch=Prefetch(3, 0),
            reshard_after_forward=False,
            ignored=[weight],
            init="as_is",
        )
        fully_shard(model, units=policy)
        first, second = (units_by_name(model)[f"blocks.{i}"] for i in range(2))
        assert first.mp == mp and second.mp == MixedPrecision()
        assert first.prefetch == Prefetch(3, 0) and second.prefetch == Prefetch()
        assert first.buckets[0].offload.grads and not second.buckets[0].offload.grads
        assert first.buckets[0].mesh.shard.size == 1 and second.buckets[0].mesh.shard.size == 2
        assert first.switches.keep_after_forward and second.switches.keep_after_forward is None
        assert not is_sharded(weight)
        assert is_sharded(model.blocks[1].up.weight)

    run_ranks(ranks)


def test_methods_and_initialisation_of_one_unit() -> None:
    class Encoder(Block):
        def encode(self, x: Tensor) -> Tensor:
            return self.up(x)

    class Model(Tower):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.ModuleList(Encoder() for _ in range(2))

    def fill(value: float) -> Any:
        def init(module: nn.Module) -> None:
            for param in module.parameters(recurse=False):
                nn.init.constant_(param, value)

        return init

    def ranks(rank: int) -> None:
        with torch.device("meta"):
            model = Model().double()
        policy = wrap.by_fn(
            lambda fqn, m: {
                "blocks.0": {"methods": ("encode",), "param_init_fn": fill(2.0)},
                "blocks.1": True,
            }.get(fqn, False)
        )
        fully_shard(model, units=policy, param_init_fn=fill(1.0))
        first, second = model.blocks
        assert first.up.weight.full_tensor().eq(2.0).all()
        assert second.up.weight.full_tensor().eq(1.0).all()
        x = data(0, rank)
        assert first.encode(x).shape[0] == x.shape[0]
        with pytest.raises(RuntimeError, match=r"blocks\.1\.up\.weight"):
            second.encode(x)

    run_ranks(ranks)


def test_training_with_overrides() -> None:
    policy = wrap.by_fn(
        lambda fqn, m: {
            "blocks.0": {"strategy": ShardingStrategy.SHARD_GRAD_OP},
            "blocks.1": {"strategy": ShardingStrategy.NO_SHARD, "prefetch": Prefetch(0, 0)},
            "blocks.2": {"reshard_after_forward": False, "granularity": "tensor"},
        }.get(fqn, False)
    )
    run_ranks(lambda rank: Twin(rank, 2, Tower, lambda m: fully_shard(m, units=policy)).train())


def test_reshard_of_one_unit_keeps_the_strategy() -> None:
    def ranks(rank: int) -> None:
        model = seeded(Tower)
        policy = only_first(reshard_after_forward=False)
        fully_shard(model, units=policy, strategy=ShardingStrategy.NO_SHARD)
        for unit in iter_units(model):
            assert unit.buckets[0].mesh.replicate.size == 2

    run_ranks(ranks)
    policy = only_first(reshard_after_forward=True)
    with single_process(), pytest.raises(ValueError, match="NO_SHARD has nothing to reshard"):
        fully_shard(Tower(), units=policy, strategy=ShardingStrategy.NO_SHARD)


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"units": None}, r"unit 'blocks.0' overrides \['units'\]"),
        ({"wrong": 1}, r"overrides \['wrong'\]"),
        ({"init": "zeros"}, "override of unit 'blocks.0': init is 'zeros'"),
        ({"prefetch": 2}, r"prefetch is 2; wanted such as fsdp_compose\.Prefetch\("),
        ({"methods": ("encode",)}, "methods names 'encode', but no unit of this call has"),
        ({"param_init_fn": 3}, "override of unit 'blocks.0': param_init_fn is 3"),
        (
            {"offload_policy": True},
            r"offload_policy is True; wanted such as .*Offload\(params=True\)",
        ),
        ({"ignored": [3]}, "ignored holds 3; wanted"),
        ({"mp_policy": torch.bfloat16}, r"mp_policy is torch.bfloat16; wanted .*\.MixedPrecision"),
    ],
)
def test_overrides_that_are_wrong(options: dict[str, Any], text: str) -> None:
    with pytest.raises((TypeError, ValueError), match=text):
        fully_shard(Tower(), units=only_first(**options))


def test_a_wrong_override_is_an_error_on_all_ranks() -> None:
    def ranks(rank: int) -> None:
        fully_shard(Tower(), units=only_first(**({"wrong": 1} if rank else {})))

    errors = rank_errors(ranks)
    assert all(e is not None and "overrides ['wrong']" in e for e in errors)


def test_a_policy_counts_a_tied_parameter_once() -> None:
    def build() -> nn.Module:
        pair = nn.Sequential(nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False))
        pair[1].weight = pair[0].weight
        return nn.Sequential(pair, nn.Linear(8, 8))

    assert units_with(wrap.by_size(17), build()) == {"1"}
    assert units_with(wrap.by_size(16), build()) == {"0.0", "0.1", "1"}


def test_a_policy_counts_without_what_is_ignored() -> None:
    model = Tower(1)
    block = sum(p.numel() for p in model.blocks[0].parameters())
    ignored = [model.blocks[0].norm.bias]
    with pytest.raises(ValueError, match="matches no submodule"):
        units_with(wrap.by_size(block), model, ignored=ignored)
    assert units_with(wrap.by_size(block - WIDTH), model, ignored=ignored) == {"blocks.0"}


def test_units_of_before_are_matched_too() -> None:
    """Two towers that were sharded by a policy, and the model around them by the same one."""

    def ranks(rank: int) -> None:
        model = seeded(lambda: nn.Sequential(Tower(2), Tower(1), nn.Linear(WIDTH, 1)))
        for tower in model[:2]:
            fully_shard(tower, units=wrap.by_class({Block}))
        before = units(model)
        fully_shard(model, units=wrap.by_class({Block}))
        assert set(units(model)) == {*before, find_state(model).unit}
        tied = nn.Sequential(nn.Embedding(8, WIDTH), nn.Sequential(nn.Linear(WIDTH, 8, bias=False)))
        tied[1][0].weight = fully_shard(tied[0]).weight
        with pytest.raises(ValueError, match="matches no submodule"):  # which has any of its own
            fully_shard(tied, units=wrap.by_size(8 * WIDTH))

    run_ranks(ranks)


def test_the_error_says_how_large_submodules_are() -> None:
    """A default of a policy may be too large for a small model."""
    model, sample = Tower(2), torch.ones(1, WIDTH)
    largest = sum(p.numel() for p in model.blocks.parameters())
    text = rf"min_numel=1000000\) matches no submodule.*of up to {largest:,} parameter elements"
    with pytest.raises(ValueError, match=text):
        fully_shard(model, units=wrap.by_execution_order(sample))


class Stored(nn.Module):
    """Parameters in containers, which nothing calls, and layers that something does."""

    def __init__(self) -> None:
        super().__init__()
        self.scales = nn.ParameterList([torch.ones(WIDTH * WIDTH)])
        self.shifts = nn.ParameterDict({"first": torch.zeros(WIDTH * WIDTH)})
        self.layers = nn.ModuleList([nn.Linear(WIDTH, WIDTH)])

    def forward(self, x: Tensor) -> Tensor:
        x = x * self.scales[0][:WIDTH] + self.shifts["first"][:WIDTH]
        return self.layers[0](x)


def test_containers_that_nothing_calls_are_no_units() -> None:
    """By size they are passed over; asked for by another policy, the error says what they are."""
    model = fully_shard(Stored(), units=wrap.by_size(WIDTH * WIDTH))
    assert {unit.name for unit in units(model)} == {"Stored", "layers.0"}
    model(torch.ones(2, WIDTH)).sum().backward()
    for policy, name in (
        (wrap.by_class({nn.ModuleList}), "'layers', a ModuleList"),
        (wrap.by_name("scales"), "'scales', a ParameterList"),
        (wrap.by_size(1, exclude=()), r"'(layers|scales)', a (Module|Parameter)List"),
    ):
        with pytest.raises(ValueError, match=f"unit {name} has no forward"):
            fully_shard(Stored(), units=policy)


def test_containers_of_parameters_name_a_module() -> None:
    """Their elements are no modules, which could be sharded."""

    class Rates(nn.Module):
        def __init__(self, rates: nn.ParameterDict) -> None:
            super().__init__()
            self.rates = rates

    rates = nn.ParameterDict({"up": nn.Parameter(torch.ones(2, 3))})
    for given in (rates, [rates], nn.ParameterList(rates.values())):
        with pytest.raises(ValueError, match=r"has no forward.*put it into a module of your own"):
            fully_shard(given)
    model = fully_shard(Rates(rates))
    with gathered(model):
        (rates["up"] * 2).sum().backward()
    torch.testing.assert_close(rates["up"].grad.full_tensor(), torch.full((2, 3), 2.0))


def test_a_list_with_a_forward_is_a_unit() -> None:
    model = _callable()
    fully_shard(model.blocks)
    assert {unit.name for unit in units(model)} == {"_Called"}


def test_a_policy_that_names_the_model_itself() -> None:
    """It is a unit already, whatever is in it."""
    with pytest.raises(
        ValueError, match=r"as Linear has none; leave units= out, and it is one unit"
    ):
        fully_shard(nn.Linear(2, 2), units=wrap.by_class({nn.Linear}))
    with pytest.raises(ValueError, match=r"elements\. The Tower itself is a unit where units= is"):
        fully_shard(Tower(), units=wrap.by_class({Tower}))
