"""Every option given a wrong value, or another value on another rank, is one clear error."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy

from fsdp_compose import (
    GatherCodec,
    MixedPrecision,
    Offload,
    Prefetch,
    ShardingStrategy,
    fully_shard,
    plan,
    wrap,
)
from fsdp_compose.comm.transports import PAIRS

from harness import run_ranks
from models import Block, Tower, by_block

Make = Callable[[], Any]
BF16 = torch.bfloat16


@dataclass(frozen=True)
class Wrong:
    """A call, the error it ends with, and texts of the message: parameter, found, wanted."""

    call: Make
    kind: type[Exception]
    texts: tuple[str, ...]


def option(name: str, value: Any, wanted: str, kind: type[Exception] = TypeError) -> Wrong:
    """``fully_shard`` with one option, also as what a policy says of one unit."""
    return Wrong(lambda: by_block(Tower(1), **{name: value}), kind, (name, wanted))


OPTIONS = [
    *(option("mesh", v, "wanted None, a DeviceMesh") for v in (5, "dp", [0, 1], object())),
    *(option("strategy", v, "ShardingStrategy.") for v in (5, "full_shard", ShardingStrategy)),
    option("strategy", "no_shard", "ShardingStrategy.NO_SHARD"),
    *(option("reshard_after_forward", v, "wanted a") for v in ("no", 1.5, [1])),
    *(option("reshard_after_forward", v, "wanted a divisor", ValueError) for v in (-1, 3, 0, 7)),
    *(option("mp_policy", v, "MixedPrecision(")
      for v in (BF16, "bf16", None, MixedPrecisionPolicy())),
    *(option("mp_policy", v, "wanted a function of (fqn, parameter)")
      for v in (MixedPrecision, lambda p: None, lambda: None)),
    option("mp_policy", lambda n, p: BF16, "MixedPrecision(...) or None"),
    option("mp_policy", {"**": BF16}, "MixedPrecision(...) or None"),
    option("mp_policy", {5: MixedPrecision()}, "pattern of names"),
    *(option("offload_policy", v, "Offload(params=True)")
      for v in (True, "cpu", Offload, CPUOffloadPolicy())),
    *(option("ignored", v, "ignored=[...]") for v in (5, None, "first", nn.Linear(1, 1))),
    option("ignored", ["first"], "parameters, buffers and modules"),
    *(option("granularity", v, "'row' or 'tensor'", ValueError)
      for v in ("column", 0, -1, 2.5, True, [4], {"**": "col"}, lambda n, p: 0)),
    *(option("granularity", v, "a function of (fqn, parameter)") for v in (lambda p: 1, int)),
    *(option("prefetch", v, "Prefetch(forward=1, backward=1)") for v in (2, None, Prefetch, True)),
    *(option("init", v, "'broadcast'", ValueError) for v in ("random", None, [], 0)),
    *(option("param_init_fn", v, "wanted a function of (module)")
      for v in (5, "reset", lambda: None, lambda a, b: None, nn.Linear)),
    *(option("methods", v, "wanted a sequence") for v in ("encode", None, 5)),
    option("methods", (5,), "names of methods"),
    option("methods", ("encode",), "no unit of this call", ValueError),
    *(Wrong(lambda v=v: fully_shard(Tower(1), units=v), TypeError, ("units", "wrap.by_class"))
      for v in ({Block}, Block, lambda n, m: True, "auto", ["blocks.0"])),
]  # fmt: skip


VALUES = [
    *(Wrong(lambda k=k: MixedPrecision(**{k: v}), ValueError, (k, "torch.dtype"))
      for k in ("param_dtype", "reduce_dtype", "output_dtype", "buffer_dtype")
      for v in ("bf16", torch.int8, 16)),
    *(Wrong(lambda k=k: MixedPrecision(**{k: torch.float8_e5m2}), ValueError,
            ("reduce_dtype is", "float8_e5m2", "wanted a torch.dtype of 16 bits or more"))
      for k in ("param_dtype", "reduce_dtype")),
    *(Wrong(lambda v=v: MixedPrecision(cast_forward_inputs=v), ValueError,
            ("cast_forward_inputs", "root")) for v in (1, "outer", None, [])),
    *(Wrong(lambda v=v: MixedPrecision(full_precision_classes=v), ValueError,
            ("full_precision_classes", "nn.BatchNorm2d"))
      for v in (nn.Linear, 5, ["a"], "LayerNorm")),
    *(Wrong(lambda k=k: MixedPrecision(**{k: "no"}), TypeError, (k, "True or False"))
      for k in ("keep_low_precision_grads", "full_precision_in_eval")),
    *(Wrong(lambda k=k, v=v: Prefetch(**{k: v}), TypeError, (k, "int >= 0"))
      for k in ("forward", "backward") for v in ("2", 1.5, None, True)),
    Wrong(lambda: Prefetch(forward=-1), ValueError, ("forward is -1", "an int >= 0")),
    *(Wrong(lambda v=v: Prefetch(backward_moment=v), ValueError, ("backward_moment", "'pre'"))
      for v in ("later", 5, True)),
    *(Wrong(lambda k=k: Offload(**{k: "cpu"}), TypeError, ("Offload", k, "True or False"))
      for k in ("params", "grads", "optimizer", "pin_memory")),
    *(Wrong(lambda v=v: wrap.by_class(v), TypeError, ("by_class", "wanted classes"))
      for v in (Block(), "Block", 5, None, ["Block"], [int], [Block()])),
    *(Wrong(lambda v=v: wrap.by_size(v), TypeError, ("by_size", "min_numel", "1e6"))
      for v in ("1e6", None, [3])),
    *(Wrong(lambda v=v: wrap.by_size(v), ValueError, ("min_numel", "1e6"))
      for v in (-1, float("nan"))),
    *(Wrong(lambda k=k: wrap.by_size(1, **{k: "Block"}), TypeError, ("by_size", "wanted classes"))
      for k in ("exclude", "leaf")),
    *(Wrong(lambda v=v: wrap.by_fn(v), TypeError, ("by_fn", "wanted a function of (fqn, module)"))
      for v in (5, "Block", lambda module: True, lambda: True, Block)),
    Wrong(lambda: wrap.by_name(), TypeError, ("by_name", "no pattern")),
    *(Wrong(lambda v=v: wrap.by_name(v), TypeError, ("by_name", "wanted a string"))
      for v in (5, Block, ["blocks.*"])),
    Wrong(lambda: wrap.by_execution_order((), "all"), TypeError, ("min_numel",)),
    Wrong(lambda: wrap.by_execution_order((), config=5), TypeError, ("TracingConfig(...)",)),
    *(Wrong(lambda v=v: wrap.by_size(1) | v, TypeError, ("by_size(1) |", "wanted another policy"))
      for v in (None, Block, lambda n, m: True)),
    *(Wrong(lambda v=v: plan(Tower(1), world_size=v), ValueError, ("world_size", "1 or more"))
      for v in (0, "2", 2.0, (1, 2, 3), (0, 2), True)),
    Wrong(lambda: plan(Tower(1), world_size=2, backend=5), TypeError, ("backend", "nccl")),
    *(Wrong(lambda v=v: plan(Tower(1), world_size=2, optimizer=v), TypeError, ("optimizer", "adam"))
      for v in (2.5, torch.optim.Adam, True)),
    Wrong(lambda: plan(Tower(1), world_size=2, optimizer=-1), ValueError, ("optimizer", ">= 0")),
    Wrong(lambda: plan(Tower(1), world_size=2, optimizer="a"), ValueError, ("optimizer", "adam")),
    *(Wrong(lambda v=v: plan(v, world_size=2), TypeError, ("wanted an nn.Module",))
      for v in (5, None, "model", [])),
]  # fmt: skip


def check(wrong: Wrong) -> None:
    with pytest.raises(Exception) as raised:
        wrong.call()
    text = f"{raised.type.__name__}: {raised.value}"
    assert raised.type is wrong.kind, f"{text}; wanted a {wrong.kind.__name__} of {wrong.texts}"
    for part in wrong.texts:
        assert part in text, f"{part!r} is not in: {text}"


def test_values_check_themselves() -> None:
    for wrong in VALUES:
        check(wrong)


def test_wrong_options_on_every_rank() -> None:
    """The same error on every rank, also where one rank alone passes the wrong value."""

    def ranks(rank: int) -> None:
        for wrong in OPTIONS:
            check(wrong)
        for name, value, part in (
            ("mesh", 5, "mesh is 5"),
            ("ignored", 5, "ignored is a int"),
            ("methods", "x", "methods is 'x'"),
            ("granularity", lambda p: 1, "granularity is <lambda>(p)"),
            ("strategy", "zero1", "ShardingStrategy.ZERO1"),
            ("mp_policy", {5: MixedPrecision()}, "5 is not a pattern"),
        ):
            with pytest.raises((TypeError, ValueError)) as raised:
                by_block(Tower(1), **({name: value} if rank else {}))
            assert part in str(raised.value) and (rank or "found on rank 1" in str(raised.value))
        by_block(Tower(1), granularity=None)

    run_ranks(ranks)


def test_iterators_are_read_for_every_unit() -> None:
    """Where a list is wanted, what can be read once holds for all units too."""
    kinds: Any = iter([nn.LayerNorm, nn.BatchNorm1d])
    precise = MixedPrecision(BF16, full_precision_classes=kinds)
    assert precise.full_precision_classes == (nn.LayerNorm, nn.BatchNorm1d)
    for by in (lambda **options: wrap.by_class(Block, **options),
               lambda **options: wrap.by_name("blocks.*", **options)):  # fmt: skip
        model = Tower(2)
        norms = [block.norm for block in model.blocks]
        policy = by(ignored=iter(norms))
        for _ in range(2):
            planned = plan(model, world_size=2, units=policy)
        fully_shard(model, units=policy)
        assert planned.memory.outside == sum(p.nbytes * 2 for n in norms for p in n.parameters())
        assert all(type(p) is nn.Parameter for norm in norms for p in norm.parameters())
    with pytest.raises(TypeError, match="by_class: ignored is a type; wanted a sequence"):
        wrap.by_class(Block, ignored=nn.LayerNorm)


def mixed(**fields: Any) -> dict[str, Any]:
    return {"mp_policy": MixedPrecision(param_dtype=BF16, **fields)}


def coded(function: Any, name: str = "first.weight") -> dict[str, Any]:
    """A codec for one parameter; that of the largest is named as the unit's."""
    policy = MixedPrecision(gather_codec=GatherCodec(function, lambda encoded, into: None))
    return {"mp_policy": lambda n, p: policy if n.endswith(name) else None}


UNLIKE: list[tuple[dict[str, Any], dict[str, Any], str]] = [
    ({"strategy": ShardingStrategy.SHARD_GRAD_OP}, {}, "strategy and reshard_after_forward"),
    ({"reshard_after_forward": True}, {}, "strategy and reshard_after_forward"),
    ({"strategy": ShardingStrategy.NO_SHARD}, {}, "strategy and reshard_after_forward"),
    ({"prefetch": Prefetch(forward=2)}, {}, "prefetch"),
    ({"prefetch": Prefetch(backward_moment=None)}, {}, "prefetch"),
    ({"offload_policy": Offload(grads=True)}, {}, "offload_policy"),
    ({"offload_policy": Offload(pin_memory=False)}, {}, "offload_policy"),
    ({"init": "as_is"}, {}, "init"),
    ({"methods": ("forward", "encode")}, {}, "methods"),
    ({"granularity": "tensor"}, {}, "bucket"),
    ({"granularity": lambda n, p: "tensor"}, {"granularity": lambda n, p: 1}, "bucket"),
    ({"mp_policy": lambda n, p: MixedPrecision(output_dtype=BF16)}, {}, "output_dtype"),
    (mixed(), {}, "param_dtype"),
    *((mixed(**{name: value}), mixed(), f"mp_policy's {name}") for name, value in (
        ("reduce_dtype", torch.float32),
        ("output_dtype", torch.float32),
        ("buffer_dtype", torch.float32),
        ("cast_forward_inputs", False),
        ("keep_low_precision_grads", True),
        ("full_precision_in_eval", True),
        ("full_precision_classes", (nn.Dropout,)),
    )),
    ({"static_buffers": True}, {}, "static_buffers"),
    ({"deterministic": 4}, {}, "deterministic"),
    ({"transport": PAIRS}, {}, "transport"),
    (coded(torch.neg), coded(torch.abs), "gather_codec"),
    (coded(torch.neg, "head.bias"), coded(torch.abs, "head.bias"), "bucket"),
    ({"ignored": "first.weight"}, {}, "first.weight"),
    ({"ignored": "act"}, {}, "ignored"),
]  # fmt: skip


def test_ranks_with_other_options() -> None:
    """Each option in turn; functions are compared by what they answered."""

    class Coder(Tower):
        def __init__(self) -> None:
            super().__init__(1)
            self.act = nn.Dropout(0.0)

        def encode(self, x: torch.Tensor) -> torch.Tensor:
            return self.first(x)

    def ranks(rank: int) -> None:
        for odd in (0, 1):
            for theirs, ours, part in UNLIKE:
                torch.manual_seed(0)
                model = Coder()
                options = dict(theirs if rank == odd else ours)
                if "ignored" in options:
                    path, _, name = options["ignored"].partition(".")
                    item = model.get_submodule(path)
                    options["ignored"] = [getattr(item, name) if name else item]
                with pytest.raises(ValueError, match="shards other units or parameters") as raised:
                    by_block(model, **options)
                assert part in str(raised.value), (part, str(raised.value))

    run_ranks(ranks)
