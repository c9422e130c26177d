"""Random module trees and random programs over them, sharded at random, against one process.

A drawn ``Case`` is data: a tree, which of its nodes are units, and a list of operations. Every rank
runs it beside its plain twin, and they are compared after every operation.
"""

from __future__ import annotations

import contextlib
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from hypothesis import given, note, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from fsdp_compose import Prefetch, ShardingStrategy, fully_shard, wrap

from harness import run_ranks
from models import WIDTH, Tolerance, Twin, assert_at_rest, compare, data, sgd, square

pytestmark = pytest.mark.filterwarnings("ignore:the forward of unit")  # skipped nodes

KINDS = ("matrix", "transposed", "vector", "scalar", "low rank", "empty", "norm", "single")


@dataclass(frozen=True)
class Leaf:
    kind: str
    dtype: str = "float64"
    frozen: bool = False
    tie: int | None = None  # to the n-th leaf before of the same kind and dtype, if there is one
    unit: bool = False


@dataclass(frozen=True)
class Node:
    children: tuple[Any, ...]
    unit: bool = False
    recompute: str = "no"  # no | saved | reentrant
    calls: int = 1


@dataclass(frozen=True)
class Case:
    tree: Node
    world: int
    strategy: str
    prefetch: tuple[int, int]
    granularity: Any
    ops: tuple[tuple[str, int], ...] = field(default=())


class OnPurpose(Exception):
    """What a node raises when a program tells it to fail."""


class LeafModule(nn.Module):
    def __init__(self, leaf: Leaf) -> None:
        super().__init__()
        self.leaf = leaf
        dtype = getattr(torch, leaf.dtype)
        shape = {"matrix": (WIDTH, WIDTH), "transposed": (WIDTH, WIDTH), "vector": (WIDTH,),
                 "scalar": (), "low rank": (2, WIDTH), "empty": (0, WIDTH), "norm": (2, WIDTH),
                 "single": (1,)}[leaf.kind]  # fmt: skip
        value = torch.randn(shape, dtype=torch.float64).to(dtype) * 0.5
        if leaf.kind == "transposed":
            value = value.t()
        self.weight = nn.Parameter(value, requires_grad=not leaf.frozen)

    def forward(self, x: Tensor) -> Tensor:
        w = self.weight.to(x.dtype)
        if self.leaf.kind in ("matrix", "transposed"):
            return x + torch.tanh(x @ w)
        if self.leaf.kind == "low rank":
            return x + torch.tanh(x @ w.t()) @ w
        if self.leaf.kind == "norm":
            return nn.functional.layer_norm(x, (WIDTH,), w[0], w[1])
        if self.leaf.kind == "empty":
            return x + w.sum()
        return x * (1 + 0.1 * torch.tanh(w))


class NodeModule(nn.Module):
    def __init__(self, node: Node) -> None:
        super().__init__()
        self.node = node
        self.children_ = nn.ModuleList(make(child) for child in node.children)
        self.skip: int | None = None
        self.fail = False

    def run(self, x: Tensor) -> Tensor:
        for i, child in enumerate(self.children_):
            if i == self.skip:
                continue
            x = child(x)
        if self.fail:
            raise OnPurpose
        return x

    def forward(self, x: Tensor) -> Tensor:
        y = x
        for _ in range(self.node.calls):
            if self.node.recompute == "no" or not torch.is_grad_enabled():
                y = self.run(y)
            else:
                y = checkpoint(self.run, y, use_reentrant=self.node.recompute == "reentrant")
        return (x + y) * 0.5

    def double(self) -> NodeModule:
        return self


def make(spec: Leaf | Node) -> nn.Module:
    return LeafModule(spec) if isinstance(spec, Leaf) else NodeModule(spec)


def build(tree: Node) -> nn.Module:
    model = NodeModule(tree)
    before: dict[tuple[str, str], list[LeafModule]] = {}
    for module in model.modules():
        if isinstance(module, LeafModule):
            same = before.setdefault((module.leaf.kind, module.leaf.dtype), [])
            if module.leaf.tie is not None and module.leaf.tie < len(same):
                module.weight = same[-1 - module.leaf.tie].weight
            same.append(module)
    return model


def shard(case: Case, model: nn.Module) -> nn.Module:
    chosen = [m for m in model.modules() if spec_of(m) is not None and spec_of(m).unit]
    options = {
        "strategy": ShardingStrategy[case.strategy],
        "prefetch": Prefetch(*case.prefetch),
        "granularity": case.granularity,
    }
    inside = [m for m in chosen if m is not model]
    units = wrap.by_fn(lambda _, m: any(m is c for c in inside)) if inside else None
    return fully_shard(model, units=units, **options)


def spec_of(module: nn.Module) -> Leaf | Node | None:
    if isinstance(module, LeafModule):
        return module.leaf
    return module.node if isinstance(module, NodeModule) else None


def nodes(model: nn.Module) -> list[NodeModule]:
    return [m for m in model.modules() if isinstance(m, NodeModule)]


def forward(model: nn.Module, x: Tensor) -> Tensor:
    return square(model, x.requires_grad_())


def run(rank: int, case: Case) -> None:
    leaves = [m.leaf for m in build(case.tree).modules() if isinstance(m, LeafModule)]
    low = any(leaf.dtype != "float64" for leaf in leaves)
    tolerance = Tolerance(1e-4, 1e-5) if low else Tolerance(1e-8, 1e-10)
    twin = Twin(
        rank, case.world, lambda: build(case.tree), lambda m: shard(case, m), sgd, tolerance
    )
    models = [twin.model, *twin.plain]
    waiting = False  # a forward whose backward never comes may have left units gathered
    for seed, (op, n) in enumerate(case.ops):
        if op == "step" and twin.optim is not None:
            twin.backward(forward, seed)
            if not waiting:
                assert_at_rest(twin.model)
            twin.step()
        elif op == "accumulate":
            twin.backward(forward, seed)
            twin.check_grads()
        elif op == "two forwards":
            first, second = twin.losses(forward, seed), twin.losses(forward, seed + 100)
            for a, b in zip(first, second):
                (a + 2 * b).backward()
        elif op == "crossed":
            first, second = twin.losses(forward, seed), twin.losses(forward, seed + 100)
            for loss in (*first, *second) if n % 2 else (*second, *first):
                loss.backward()
        elif op == "retain":
            for loss in twin.losses(forward, seed):
                loss.backward(retain_graph=True)
                loss.backward()
        elif op in ("no_grad", "inference"):
            with torch.no_grad() if op == "no_grad" else torch.inference_mode():
                ours, theirs = (m(data(seed, rank)) for m in (twin.model, twin.mine))
            compare("output", ours, theirs, tolerance)
        elif op == "dropped":
            twin.losses(forward, seed)
            waiting = True
        elif op == "toggle":
            names = [name for name, _ in twin.model.named_parameters()]
            for model in (twin.model, twin.reference):
                param = model.get_parameter(names[n % len(names)])
                param.requires_grad_(not param.requires_grad)
                param.grad = None
        elif op == "skip":
            for model in models:
                node = nodes(model)[n % len(nodes(model))]
                node.skip = None if node.skip is not None else n % len(node.children_)
        elif op == "fail":
            target = nodes(twin.model)[n % len(nodes(twin.model))]
            target.fail = waiting = True
            with contextlib.suppress(OnPurpose):
                forward(twin.model, data(seed, rank))
            target.fail = False
        elif op == "write":
            with torch.no_grad():
                for model in (twin.model, twin.reference):
                    for param in model.parameters():
                        param.mul_(0.99)
        elif op == "update" and twin.optim is not None:
            params = [p for group in twin.optim.param_groups for p in group["params"]]
            idle = (
                [p for p in params if p.requires_grad]
                if all(p.grad is None for p in params)
                else []
            )
            scope = pytest.raises(RuntimeError, match="no parameter has a gradient")
            with scope if idle else contextlib.nullcontext():  # or nothing is trained: no error
                twin.step()
    twin.check_grads()
    for model in models:
        for node in nodes(model):
            node.skip = None
    twin.backward(forward, 99)
    twin.check()


OPS = ("step", "accumulate", "two forwards", "crossed", "retain", "no_grad", "inference",
       "dropped", "toggle", "skip", "fail", "write", "update")  # fmt: skip

leaf_specs = st.builds(
    Leaf,
    kind=st.sampled_from(KINDS),
    dtype=st.sampled_from(("float64", "float64", "float64", "float32")),
    frozen=st.sampled_from((False, False, False, True)),
    tie=st.sampled_from((None, None, None, 0, 1)),
    unit=st.booleans(),
)


def node_specs(children: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    return st.builds(
        Node,
        children=st.lists(children, min_size=1, max_size=3).map(tuple),
        unit=st.booleans(),
        recompute=st.sampled_from(("no", "no", "saved", "reentrant")),
        calls=st.sampled_from((1, 1, 1, 2)),
    )


trees = node_specs(st.recursive(leaf_specs, node_specs, max_leaves=8))
cases = st.builds(
    Case,
    tree=trees,
    world=st.sampled_from((2, 2, 1, 3, 4)),
    strategy=st.sampled_from(("FULL_SHARD", "FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD")),
    prefetch=st.sampled_from(((1, 1), (0, 0), (2, 1), (1, 3))),
    granularity=st.sampled_from((1, 1, 1, "row", "tensor")),
    ops=st.lists(st.tuples(st.sampled_from(OPS), st.integers(0, 11)), min_size=1, max_size=7).map(
        tuple
    ),
)


@settings(max_examples=30)
@given(cases)
def test_random_trees_and_programs(case: Case) -> None:
    note(repr(case))
    run_ranks(run, case.world, case, timeout=30)


def test_a_program_with_everything() -> None:
    """One fixed case that goes through every operation, so that none is left to chance."""
    leaf = lambda kind, **options: Leaf(kind, **options)  # noqa: E731
    inner = Node((leaf("matrix", unit=True), leaf("scalar"), leaf("matrix", tie=0)), True, "saved")
    other = Node(
        (leaf("low rank", frozen=True), leaf("norm", dtype="float32")), True, "reentrant", 2
    )
    tree = Node((leaf("transposed"), inner, other, leaf("matrix", tie=1, unit=True)), True)
    ops = tuple((op, i) for i, op in enumerate([*OPS, "step", "toggle", *OPS, "step"]))
    for world in (1, 2, 3):
        for strategy in ("FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD"):
            run_ranks(run, world, Case(tree, world, strategy, (1, 1), 1, ops))
