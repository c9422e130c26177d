"""Random models and random training programs: what the differential fuzzer runs, made from a seed.

A ``Case`` is data: a tree of modules, which of them are units, options, and a list of operations.
``draw(seed)`` makes one, always the same for the same seed, so that a failure is repeated by its
seed alone; ``smaller(case)`` gives simpler cases to shrink a failure with.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

from fsdp_compose import GatherCodec, participate
from fsdp_compose.simulation import (
    DelayMessage,
    DelayRank,
    Fault,
    KillRank,
    LoseMessage,
    RaiseError,
)

from models import WIDTH

KINDS = ("matrix", "transposed", "vector", "scalar", "low rank", "empty", "norm", "single")
SHAPES = {
    "matrix": (WIDTH, WIDTH),
    "transposed": (WIDTH, WIDTH),
    "vector": (WIDTH,),
    "scalar": (),
    "low rank": (2, WIDTH),
    "empty": (0, WIDTH),
    "norm": (2, WIDTH),
    "single": (1,),
}


@dataclass(frozen=True)
class Leaf:
    """A module with one parameter."""

    kind: str
    dtype: str = "float64"
    frozen: bool = False
    tie: int | None = None  # to the n-th leaf before of the same kind and dtype, if there is one
    unit: bool = False
    ignored: str = ""  # "module" or "parameter": what of it ``fully_shard`` is to leave alone


@dataclass(frozen=True)
class Node:
    """A residual module that calls its children one after the other."""

    children: tuple[Spec, ...]
    unit: bool = False
    recompute: str = "no"  # no | saved | selective | reentrant
    calls: int = 1
    style: str = "plain"  # how it calls its children: see ``call``


Spec: TypeAlias = Leaf | Node
Op: TypeAlias = tuple[str, int]


@dataclass(frozen=True)
class Case:
    """A model, how it is sharded, and what is done with it."""

    tree: Node
    world: int
    strategy: str
    ops: tuple[Op, ...]
    prefetch: tuple[int, int] = (1, 1)
    granularity: Any = 1
    release: int | None = None  # reshard_after_forward
    optimizer: str = "sgd"
    fault: Fault | None = None
    compute: str = ""  # the dtype of parameters in forward, where it is another
    offload: tuple[str, ...] = ()
    reordered: bool = False  # every other rank's optimizer lists the parameters the other way round
    backend: str = "gloo"  # or "nccl": the path of groups whose collectives are one call
    mixed: str = ""  # the strategy of the last unit inside the model, over two groups of ranks
    static: int = 0  # in how many buffers at fixed addresses units are gathered by turns
    reduce: str = ""  # the dtype in which gradients travel, where it is another
    codec: bool = False  # weights travel as bytes that a codec makes
    grouped: bool = False  # the first two leaves of the outermost module are one unit
    layout: str = ""  # how parameters lie in buckets: one of ``LAYOUTS``
    transport: str = ""  # how data travels, where the kind of group does not decide: ``TRANSPORTS``
    deterministic: int | None = None
    late: tuple[Fault, ...] = ()  # what is delayed beside ``fault``


FIRST_OPS = (
    "step", "accumulate", "accumulate sharded", "accumulate unsharded", "accumulate local",
    "no_sync", "two forwards", "crossed", "retain", "no_grad", "inference", "eval", "dropped",
    "toggle", "skip", "skip here", "fail", "fail backward", "write", "write data", "update",
    "zero", "clip", "torch clip", "norm", "grad", "penalty", "gathered", "gathered loss",
    "edit", "state", "optimizer state", "copy", "undo", "unshard", "hook", "functional", "stray",
    "participate", "freeze here", "write inside", "drift", "differ", "skippable", "debug",
    "sharded twice", "torch state", "save", "write local", "write late", "write between", "swap",
    "hook after", "inputs", "scope clip", "scope grad", "divide", "own reduction", "switch",
    "refresh", "cleared in no_sync", "one cleared", "not last", "fail in no_sync",
    "scope gradients", "plain optimizer", "convert", "ahead", "apply", "stream", "own gradient",
    "hook on units", "outside loss", "second order", "scaler", "module hook", "half a graph",
    "enabled inside", "own operand", "own edit", "own write", "own settings", "interrupt",
    "write unseen", "read below", "own clear",
)  # fmt: skip
LATER_OPS = (
    "between", "in a graph", "while waiting", "switch units", "part", "nested scopes", "look",
    "pending", "uneven", "state type", "fail in a scope", "fail in a hook", "fail again", "halved",
    "reports", "replace", "append", "remove", "exchange", "move", "later group", "another model",
    "shard otherwise", "copies", "average", "owners", "two optimizers", "closure", "buffers",
    "checkpoint around", "twice through", "input gradient", "packed", "transform",
    "functional gradient", "product", "several roots", "clip by value", "save behind",
    "load from one", "unshard a part", "own gradients",
)  # fmt: skip
LATEST_OPS = (
    "from meta", "same bits", "traceable", "stages", "plain meanwhile", "other forms",
    "fail anywhere",
)  # fmt: skip
"""Drawn by generators of their own: programs of before keep the operations that they had."""
OPS = FIRST_OPS + LATER_OPS + LATEST_OPS
STRATEGIES = ("FULL_SHARD", "FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD", "ZERO1")
HYBRID = ("HYBRID_SHARD", "HYBRID_SHARD_ZERO2", "HYBRID_SHARD_OPTIMIZER")
OPTIMIZERS = ("sgd", "decayed sgd", "adamw", "adamw for-loop")


@dataclass
class Given:
    """What a module that is called in style "object" is given, and returns."""

    value: Tensor
    rest: Any = None


def _encode(shard: Tensor) -> Tensor:
    return shard.clone().view(torch.uint8)


def _decode(encoded: Tensor, into: Tensor) -> None:
    wide = encoded.numel() == 8 * into.numel()
    into.copy_(encoded.view(torch.float64 if wide else torch.float32))


BYTES = GatherCodec(_encode, _decode)
"""Weights travel as their own bytes, in their own dtype."""


class OnPurpose(Exception):
    """What a node raises when a program tells it to fail."""


class LeafModule(nn.Module):
    def __init__(self, leaf: Leaf) -> None:
        super().__init__()
        self.leaf = leaf
        dtype = getattr(torch, leaf.dtype)
        value = torch.randn(SHAPES[leaf.kind], dtype=torch.float64).to(dtype) * 0.5
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
        self.joins: int | None = None  # a child for which this rank participates only
        self.stops: int | None = None  # a child that an interrupt ends, without which it goes on
        self.fail = False
        self.fail_backward = False

    def run(self, x: Tensor) -> Tensor:
        for i, child in enumerate(self.children_):
            if i == self.skip:
                continue
            try:
                x = call(child, x, self.node.style) if i != self.joins else participate(child, x)
            except KeyboardInterrupt:
                if i != self.stops:
                    raise
        if self.fail:
            raise OnPurpose
        if self.fail_backward and x.requires_grad and torch.is_grad_enabled():
            x = x * 1
            x.register_hook(_raise)
        return x

    def forward(self, x: Any = None, *, parts: Any = None, scale: float = 1.0) -> Any:
        if parts is not None:
            return {"found": (self.compute(parts["x"][0]), scale)}
        if isinstance(x, Given):
            return Given(self.compute(x.value), x.rest)
        return self.compute(x)

    def compute(self, x: Tensor) -> Tensor:
        y = x
        for _ in range(self.node.calls):
            if self.node.recompute == "no" or not torch.is_grad_enabled():
                y = self.run(y)
            else:
                y = self.recomputed(y)
        return (x + y) * 0.5

    def recomputed(self, x: Tensor) -> Tensor:
        if self.node.recompute == "reentrant":
            return checkpoint(self.run, x, use_reentrant=True)
        chosen = {"context_fn": _keep_products} if self.node.recompute == "selective" else {}
        return checkpoint(self.run, x, use_reentrant=False, **chosen)

    def encode(self, x: Tensor) -> Tensor:
        return self.run(x) * 0.5

    def double(self) -> NodeModule:
        return self


STYLES = ("keywords", "object", "sampled", "detached", "unused", "chunked")


def call(child: nn.Module, x: Tensor, style: str) -> Tensor:
    """What ``child`` makes of ``x``, as one of ``STYLES`` calls it."""
    if style == "keywords" and isinstance(child, NodeModule):
        found, scale = child(parts={"x": [x, None, 3]}, scale=1.0)["found"]
        return found * scale
    if style == "object" and isinstance(child, NodeModule):
        return child(Given(x, ("a", None))).value
    if style == "sampled":  # once without gradients
        with torch.no_grad():
            first = child(x)
        return child(x) + 0.1 * first
    if style == "detached":
        return x + child(x.detach())
    if style == "unused":
        return x + 0.1 * child(x).detach()
    if style == "chunked":
        return torch.cat([child(part) for part in x.chunk(2)])
    found: Tensor = child(x)
    return found


_keep_products = partial(create_selective_checkpoint_contexts, [torch.ops.aten.mm.default])
"""Of a checkpointed part, products of matrices are kept and the rest is computed again."""


def _raise(grad: Tensor) -> None:
    raise OnPurpose


def make(spec: Spec) -> nn.Module:
    """The module that ``spec`` describes, without its ties."""
    return LeafModule(spec) if isinstance(spec, Leaf) else NodeModule(spec)


def build(tree: Node) -> nn.Module:
    """The model that ``tree`` describes."""
    model = NodeModule(tree)
    before: dict[tuple[str, str], list[LeafModule]] = {}
    for module in model.modules():
        if isinstance(module, LeafModule):
            same = before.setdefault((module.leaf.kind, module.leaf.dtype), [])
            if module.leaf.tie is not None and module.leaf.tie < len(same):
                module.weight = same[-1 - module.leaf.tie].weight
            same.append(module)
    return model


def spec_of(module: nn.Module) -> Spec | None:
    if isinstance(module, LeafModule):
        return module.leaf
    return module.node if isinstance(module, NodeModule) else None


def nodes(model: nn.Module) -> list[NodeModule]:
    return [m for m in model.modules() if isinstance(m, NodeModule)]


def leaves_units_kept(tree: Node) -> bool:
    """Whether units run whose backward may never come, and stay gathered until the next forward."""
    inside = any(isinstance(child, Node) and leaves_units_kept(child) for child in tree.children)
    return inside or tree.style in ("unused", "detached")


def leaves(tree: Spec) -> list[Leaf]:
    if isinstance(tree, Leaf):
        return [tree]
    return [leaf for child in tree.children for leaf in leaves(child)]


def is_all_ignored(tree: Node) -> bool:
    return all(leaf.ignored for leaf in leaves(tree))


# Drawing


WORLDS = (2, 2, 3, 2, 4, 2, 2, 3, 2, 5, 2, 2, 4, 2, 3, 2, 6, 2, 1, 4, 2, 3, 2, 7, 2, 2, 8, 2, 3, 2,
          4, 2, 2, 12, 2, 3, 2, 4, 2, 16)  # fmt: skip
"""Sizes of worlds, in turn: most of what goes wrong needs two ranks, and those are cheap."""
LARGE = 8
LAYOUTS = ("backwards", "gaps", "last rank")
TRANSPORTS = ("pairs", "summing", "one by one", "own")


def world_of(seed: int) -> int:
    """How many ranks the program of a seed has, where nobody says."""
    return WORLDS[seed % len(WORLDS)]


def draw(seed: int, world: int, with_fault: bool = False) -> Case:
    """The case of ``seed`` for ``world`` ranks; large worlds have small programs."""
    rng = random.Random(f"{seed} {world}")
    hybrid = world >= 4 and world % 2 == 0 and rng.random() < 0.3
    sharers = world // 2 if hybrid else world
    spreads = world >= 4 and world % 2 == 0 and rng.random() < 0.15
    spreads = spreads and sharers > 2 and sharers % 2 == 0
    strategy = rng.choice(HYBRID if hybrid else STRATEGIES)
    longest = 5 if world >= LARGE else 9
    first = Case(
        tree=_draw_node(rng, depth=3, budget=[rng.randint(2, 5 if world >= LARGE else 8)]),
        world=world,
        strategy=strategy,
        ops=tuple(
            (rng.choice(FIRST_OPS), rng.randrange(12)) for _ in range(rng.randint(2, longest))
        ),
        prefetch=rng.choice(((1, 1), (0, 0), (2, 1), (1, 3))),
        granularity=rng.choice((1, 1, 1, "row", "tensor")),
        release=rng.choice((None, None, True, 2 if spreads else None))
        if strategy in ("FULL_SHARD", "HYBRID_SHARD")
        else None,
        optimizer=rng.choice(OPTIMIZERS),
        compute="float32" if rng.random() < 0.15 else "",
        offload=rng.choice((("params",), ("optimizer",), ("params", "grads")))
        if rng.random() < 0.15
        else (),
        reordered=rng.random() < 0.2,
        backend="nccl" if rng.random() < min(0.25 * world**0.5, 0.9) - 0.1 else "gloo",
        fault=_draw_fault(rng, world) if with_fault else None,
        mixed=_draw_mixed(rng, world, hybrid),
        static=rng.choice((2, 3)) if rng.random() < 0.15 else 0,
    )
    case = _draw_later(first, random.Random(f"later {seed} {world}"))
    return _draw_latest(case, random.Random(f"latest {seed} {world}"))


def _draw_later(case: Case, rng: random.Random) -> Case:
    """Add what is drawn since: other operations, styles of calls, and how data travels."""
    ops = list(case.ops)
    for _ in range(rng.choice((0, 1, 2, 3))):
        ops.insert(rng.randint(0, len(ops)), (rng.choice(LATER_OPS), rng.randrange(240)))
    return replace(
        case,
        ops=tuple(ops),
        tree=_restyle(case.tree, rng),
        reduce="float32" if rng.random() < 0.1 else "",
        codec=rng.random() < 0.1 and HYBRID[2] not in (case.strategy, case.mixed),
        grouped=rng.random() < 0.15,
    )


def _draw_latest(case: Case, rng: random.Random) -> Case:
    """As ``_draw_later``, what came after that; every other program is as before."""
    if rng.random() < 0.5:
        return case
    ops = list(case.ops)
    for _ in range(rng.choice((0, 1, 2))):
        ops.insert(rng.randint(0, len(ops)), (rng.choice(LATEST_OPS), rng.randrange(240)))
    tree = _ignore(case.tree, rng) if rng.random() < 0.3 else case.tree
    sharers = case.world // 2 if case.strategy in HYBRID else case.world
    parts = [part for part in range(2, sharers) if sharers % part == 0]
    release = case.release
    if case.strategy in ("FULL_SHARD", "HYBRID_SHARD") and parts and rng.random() < 0.5:
        release = rng.choice(parts)
    return replace(
        case,
        ops=tuple(ops),
        tree=case.tree if is_all_ignored(tree) else tree,
        layout=rng.choice(LAYOUTS) if rng.random() < 0.2 else "",
        transport=rng.choice(TRANSPORTS) if rng.random() < 0.2 else "",
        release=release,
        late=tuple(_draw_delay(rng, case.world) for _ in range(rng.choice((0, 0, 0, 3, 9)))),
    )


def _ignore(node: Node, rng: random.Random) -> Node:
    """Have some leaves be ignored and not trained."""
    children = tuple(
        _ignore(child, rng)
        if isinstance(child, Node)
        else replace(child, ignored=rng.choice(("module", "parameter")), frozen=True, tie=None)
        if rng.random() < 0.3
        else child
        for child in node.children
    )
    return replace(node, children=children)


def _draw_delay(rng: random.Random, world: int) -> Fault:
    kind = rng.choice((DelayMessage, DelayMessage, DelayRank))
    return kind(rng.randrange(world), int(2 ** rng.uniform(2, 10)), rng.choice((0.1, 1.0, 20.0)))


def _restyle(node: Node, rng: random.Random) -> Node:
    children = tuple(
        child if isinstance(child, Leaf) else _restyle(child, rng) for child in node.children
    )
    style = rng.choice(STYLES) if rng.random() < 0.25 else "plain"
    return replace(node, style=style, children=children)


def _draw_mixed(rng: random.Random, world: int, hybrid: bool) -> str:
    mixes = world >= 4 and world % 2 == 0 and not hybrid and rng.random() < 0.3
    return rng.choice(HYBRID) if mixes else ""


def _draw_fault(rng: random.Random, world: int) -> Fault:
    rank, event = rng.randrange(world), int(2 ** rng.uniform(2, 10))
    kind = rng.choice((KillRank, RaiseError, LoseMessage, DelayMessage, DelayRank))
    if kind is RaiseError:
        return RaiseError(rank, event, OnPurpose("raised by the program's fault"))
    if kind in (DelayMessage, DelayRank):
        return kind(rank, event, rng.choice((1.0, 100.0)))
    return kind(rank, event)


def _draw_node(rng: random.Random, depth: int, budget: list[int]) -> Node:
    children: list[Spec] = []
    for _ in range(rng.randint(1, 3)):
        budget[0] -= 1
        if depth > 1 and budget[0] > 0 and rng.random() < 0.4:
            children.append(_draw_node(rng, depth - 1, budget))
        else:
            children.append(_draw_leaf(rng))
    return Node(
        children=tuple(children),
        unit=rng.random() < 0.5,
        recompute=rng.choice(("no", "no", "no", "saved", "selective", "reentrant")),
        calls=rng.choice((1, 1, 1, 2)),
    )


def _draw_leaf(rng: random.Random) -> Leaf:
    return Leaf(
        kind=rng.choice(KINDS),
        dtype=rng.choice(("float64", "float64", "float64", "float32")),
        frozen=rng.random() < 0.2,
        tie=rng.choice((None, None, None, 0, 1)),
        unit=rng.random() < 0.4,
    )


# Shrinking


def smaller(case: Case) -> Iterator[Case]:
    """Cases that are simpler than ``case`` in one respect, the boldest first."""
    for size in (len(case.ops) // 2, 1):
        for start in range(0, len(case.ops), size) if size else ():
            yield replace(case, ops=case.ops[:start] + case.ops[start + size :])
    for tree in _smaller_trees(case.tree):
        if isinstance(tree, Node) and not is_all_ignored(tree):
            yield replace(case, tree=tree)
    for name, value in (
        ("fault", None), ("backend", "gloo"), ("world", 2), ("strategy", "FULL_SHARD"),
        ("prefetch", (0, 0)), ("granularity", 1), ("release", None), ("optimizer", "sgd"),
        ("compute", ""), ("offload", ()), ("reordered", False), ("mixed", ""), ("static", 0),
        ("reduce", ""), ("codec", False), ("grouped", False), ("layout", ""), ("transport", ""),
        ("deterministic", None), ("late", ()),
    ):  # fmt: skip
        if getattr(case, name) != value:
            yield replace(case, **{name: value})
    for i, (op, n) in enumerate(case.ops):
        if n:
            yield replace(case, ops=(*case.ops[:i], (op, 0), *case.ops[i + 1 :]))


def _smaller_trees(spec: Spec) -> Iterator[Spec]:
    plain = (
        Leaf("matrix")
        if isinstance(spec, Leaf)
        else replace(spec, recompute="no", calls=1, style="plain")
    )
    if spec != plain:
        yield plain
    if spec.unit:
        yield replace(spec, unit=False)
    if isinstance(spec, Leaf):
        for name, value in (
            ("ignored", ""), ("tie", None), ("frozen", False), ("dtype", "float64"),
        ):  # fmt: skip
            if getattr(spec, name) != value:
                yield replace(spec, **{name: value})
        return
    for i, child in enumerate(spec.children):
        if len(spec.children) > 1:
            yield replace(spec, children=spec.children[:i] + spec.children[i + 1 :])
        if isinstance(child, Node):
            yield replace(
                spec, children=spec.children[:i] + child.children + spec.children[i + 1 :]
            )
        for simpler in _smaller_trees(child):
            yield replace(spec, children=(*spec.children[:i], simpler, *spec.children[i + 1 :]))
