"""Functions that are given a name get the parameter's full name; one that fits none raises."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

import fsdp_compose as fc
from fsdp_compose import MixedPrecision, fully_shard, plan, refresh, wrap
from fsdp_compose.sharded import spec_of

from harness import run_ranks
from models import Block, Tower, by_block, nested, seeded, units

BF16 = MixedPrecision(param_dtype=torch.bfloat16)


class ChosenGradients:
    """A policy of any kind that records the names it is asked about."""

    def __init__(self, answer: Any = None) -> None:
        self.names: list[str] = []
        self.answer = answer

    def __call__(self, fqn: str, item: object) -> Any:
        self.names.append(fqn)
        return self.answer


def test_functions_get_full_names() -> None:
    """In units of every kind, below wrappers, in a plan, after a refresh; as errors print them."""

    def ranks(rank: int) -> None:
        plain = Tower(2)
        wanted = {name for name, _ in plain.named_parameters()}
        model = copy.deepcopy(plain)
        model.blocks[1] = checkpoint_wrapper(model.blocks[1])
        mp, granularity, chosen = ChosenGradients(), ChosenGradients(), ChosenGradients(False)
        units_ = wrap.by_class({Block}) | wrap.by_fn(chosen)
        options = {"mp_policy": mp, "granularity": granularity, "units": units_}
        plan(model, world_size=4, **options)
        assert set(mp.names) == set(granularity.names) == wanted
        mp.names.clear(), granularity.names.clear()
        fully_shard(model, **options)
        assert set(mp.names) == set(granularity.names) == wanted
        assert set(mp.names) == {spec_of(p).fqn for p in model.parameters()}
        assert (
            {"first", "head", "blocks.1.up"}
            <= set(chosen.names)
            <= set(dict(plain.named_modules()))
        )
        granularity.names.clear()
        model.blocks[0].up.register_parameter("extra", nn.Parameter(torch.zeros(3)))
        refresh(model)
        assert granularity.names == ["blocks.0.up.extra"]
        precise = MixedPrecision(torch.bfloat16, full_precision_classes=(nn.LayerNorm,))
        granularity.names.clear()
        by_block(copy.deepcopy(plain), mp_policy=precise, granularity=granularity)
        assert set(granularity.names) == wanted
        # Of a submodule's own call, the name in that submodule: more is not known then.
        mp.names.clear()
        nested(copy.deepcopy(plain), mp_policy=mp)
        assert {"norm.weight", "first.weight"} < set(mp.names)
        together = copy.deepcopy(plain)
        mp.names.clear()
        fully_shard([together.blocks[0], together.first], mp_policy=mp)
        assert "0.norm.weight" in mp.names and "1.bias" in mp.names

    run_ranks(ranks)


def test_patterns_of_names_choose_options() -> None:
    """The first pattern that fits decides; the rest is as without a policy."""

    def ranks(rank: int) -> None:
        model = by_block(
            seeded(lambda: Tower(2)).float(),
            mp_policy={"**.norm.*": MixedPrecision(), "blocks.?.**": BF16},
            granularity={"blocks.[0-1].up.weight": "row", "head.*": "tensor"},
        )
        found = {
            entry.spec.fqn: (bucket.mp.param_dtype, bucket.layout.extents[entry.index].granularity)
            for unit in units(model)
            for bucket in unit.buckets
            for entry in bucket.entries
        }
        for name, (dtype, granularity) in found.items():
            low = name.startswith("blocks") and "norm" not in name
            assert dtype == (torch.bfloat16 if low else None), name
            whole = "row" if name.endswith("up.weight") else 1
            assert granularity == ("tensor" if name.startswith("head") else whole), name
        by_name = fully_shard(Tower(3), units=wrap.by_name("blocks.[01]", "**.up", "head"))
        assert {u.name for u in units(by_name)} == {
            "Tower", "blocks.0", "blocks.1", "blocks.0.up", "blocks.1.up", "blocks.2.up", "head",
        }  # fmt: skip
        fully_shard(Tower(3), units=wrap.by_name("blocks.*", reshard_after_forward=False))

    run_ranks(ranks)


def test_names_that_fit_nothing_raise() -> None:
    for options, text in (
        ({"units": wrap.by_name("block.*")}, r"by_name: 'block\.\*' matches no submodule.*blocks"),
        ({"units": wrap.by_name("blocks.*", "haed")}, r"'haed' matches no submodule.*'head'"),
        (
            {"units": wrap.by_class({nn.Conv2d}) | wrap.by_class({Block})},
            r"by_class\(\{Conv2d\}\) matches no submodule of Tower.*Block",
        ),
        ({"units": wrap.by_size(1e9)}, r"by_size\(.*matches no submodule"),
        ({"units": wrap.by_fn(lambda n, m: n == "haed")}, "by_fn.*matches no submodule"),
        (
            {"mp_policy": {"norm.weight": BF16}, "units": wrap.by_class({Block})},
            r"mp_policy=\{'norm\.weight': \.\.\.\} matches no parameter.*blocks\.\d\.norm\.weight",
        ),
        ({"granularity": {"*": "row"}}, r"granularity=\{'\*': \.\.\.\} matches no parameter"),
        (
            {"units": wrap.by_class(Block, mp_policy={"**": BF16, "blocks.7.*": BF16})},
            r"mp_policy=\{'blocks\.7\.\*': \.\.\.\} matches no parameter",
        ),
    ):
        for attempt in (fully_shard, lambda m, **o: fc.plan(m, world_size=2, **o)):
            with pytest.raises(ValueError, match=text):
                attempt(Tower(2), **options)


def test_a_policy_has_patterns_of_some_of_its_units() -> None:
    """A dictionary given to several units may name parameters of one of them alone."""
    options: Any = {"mp_policy": {"blocks.0.up.*": BF16}, "granularity": {"blocks.1.up.*": "row"}}
    model = fully_shard(Tower(2), units=wrap.by_class(Block, **options))
    dtypes = {
        entry.spec.fqn: bucket.mp.param_dtype
        for unit in units(model)
        for bucket in unit.buckets
        for entry in bucket.entries
    }
    assert [name for name, dtype in dtypes.items() if dtype] == [
        "blocks.0.up.weight",
        "blocks.0.up.bias",
    ]
