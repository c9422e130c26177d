"""Small models and the twin that most tests train: a sharded model beside the plain one it equals.

The plain side holds one replica per rank. Replicas share their parameters and have buffers of
their own, so a loss averaged over replicas is what data parallelism computes.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import checkpoint

from fsdp_compose import (
    fully_shard,
    wrap,
)
from fsdp_compose.base.torch_private import KEEPS_RANK_ORDER, raw
from fsdp_compose.buckets.bucket import Phase
from fsdp_compose.comm.shared_memory import all_segments
from fsdp_compose.core.state import Unit, iter_units
from fsdp_compose.sharded import is_sharded, spec_of
from fsdp_compose.sharded.cut import own_slice
from fsdp_compose.sharded.torchstate import to_local

from harness import DEVICE, run_ranks

WIDTH = 6
BATCH = 3


class Block(nn.Module):
    """A residual layer whose parameters are of odd sizes, so that cuts fall inside them."""

    def __init__(self, width: int = WIDTH, hidden: int = 7) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, hidden)
        self.down = nn.Linear(hidden, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.tanh(self.up(self.norm(x))))


class Tower(nn.Module):
    """An embedding-like first layer, blocks, and a head."""

    def __init__(self, depth: int = 3, width: int = WIDTH) -> None:
        super().__init__()
        self.first = nn.Linear(width, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(depth))
        self.head = nn.Linear(width, 2)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


class Recomputed(Tower):
    """Its blocks' gradients come from backwards inside the other."""

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=True)
        return self.head(x)


class ThreeBuckets(Tower):
    """In double precision its blocks have parts that train, of another dtype, and frozen ones."""

    def double(self) -> ThreeBuckets:
        super().double()
        for block in self.blocks:
            block.norm.float()
            block.up.bias.requires_grad_(False)
        return self


class TwoKinds(nn.Sequential):
    """Layers in single and in double precision: two buckets in one unit."""

    def __init__(self) -> None:
        super().__init__(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH).double())

    def forward(self, x: Tensor, both: bool = True) -> Tensor:
        x = self[0](x.float()).double()
        return self[1](x) if both else x


def two_blocks() -> Tower:
    return Tower(2)


def trainable(model: nn.Module) -> list[nn.Parameter]:
    return [p for p in model.parameters() if p.requires_grad]


def seeded(build: Callable[[], nn.Module], seed: int = 0) -> nn.Module:
    """``build()`` in double precision, with weights that depend on the seed alone."""
    torch.manual_seed(seed)
    return build().double().to(DEVICE)


def data(seed: int, rank: int, *shape: int, dtype: torch.dtype = torch.float64) -> Tensor:
    """Random input that depends on (seed, rank)."""
    generator = torch.Generator().manual_seed(1000 * seed + rank)
    found = torch.randn(shape or (BATCH, WIDTH), generator=generator, dtype=torch.float64)
    return found.to(DEVICE, dtype)


def square(model: nn.Module, x: Tensor) -> Tensor:
    """The usual loss: the mean square of the output."""
    return model(x).square().mean()


def by_block(model: nn.Module, **options: Any) -> nn.Module:
    """Each ``Block`` a unit, and the rest another."""
    return fully_shard(model, units=wrap.by_class({Block}), **options)


def one_unit(model: nn.Module, **options: Any) -> nn.Module:
    return fully_shard(model, **options)


def nested(model: nn.Module, **options: Any) -> nn.Module:
    """Calls on submodules first, as people write it."""
    for module in model.modules():
        if isinstance(module, Block):
            fully_shard(module, **options)
    return fully_shard(model, **options)


SHARDS = {"blocks": by_block, "one": one_unit}
EVERY_SHARD = SHARDS | {"nested": nested}


def whole(tensor: Tensor) -> Tensor:
    """The full value, detached and independent; a collective where it is sharded."""
    if is_sharded(tensor):
        return tensor.full_tensor()
    return tensor.detach().clone()


def replicas(model: nn.Module, world: int) -> list[nn.Module]:
    """Copies that share parameters and have their own buffers."""
    memo = lambda: {id(p): p for p in model.parameters()}  # noqa: E731
    return [model, *(copy.deepcopy(model, memo()) for _ in range(world - 1))]


def mesh_of_replicas(replicas: int, shards: int) -> DeviceMesh:
    """(replicate, shard); replicas next to each other where torch orders groups by rank."""
    ranks = torch.arange(replicas * shards)
    grid = ranks.view(replicas, shards) if KEEPS_RANK_ORDER else ranks.view(shards, replicas).T
    return DeviceMesh(DEVICE, grid, mesh_dim_names=("replicate", "shard"))


def units(model: nn.Module) -> list[Unit]:
    return list(iter_units(model))


def assert_at_rest(model: nn.Module) -> None:
    """Every unit is resharded, holds its leaves, and owes nothing."""
    for unit in units(model):
        assert not unit.holds, f"unit {unit.name!r} is still held: {unit.holds}"
        assert unit.run.calls == 0 and unit.run.task is None and not unit.run.finished
        assert not unit.run.modes and unit.run.shield is None and unit.run.chosen is None
        assert unit.run.showing is None, f"the modules of {unit.name!r} read full parameters"
        assert not unit.graphs.readers, f"a graph still reads {unit.name!r}"
        assert unit.opened is None or not unit.opened.for_call, "a functional call is not closed"
        for bucket in unit.buckets:
            inner = bucket.inner
            if inner is not None and inner.source is None:
                assert inner.store is None, f"{unit.name!r} keeps a part for a backward"
            if not bucket.in_place:
                held = 0 if bucket.static else bucket.full.untyped_storage().nbytes()
                assert not held and bucket.phase is Phase.SHARDED, f"{unit.name!r} is gathered"
            arriving = bucket.arriving
            assert bucket.fill.mark is None
            assert not arriving.packed, f"gradients of {unit.name!r} wait to be reduced"
            assert not arriving.used and not arriving.trained
            assert arriving.partial is None and arriving.waiting is None
            if bucket.grads is not None:
                assert bucket.grads.flat.untyped_storage().nbytes() == 0
    engines = {id(u.engine): u.engine for u in units(model)}
    for engine in engines.values():
        assert (
            not engine.schedule.active
            and not engine.tasks
            and not engine.reductions
            and not engine.landing
            and not engine.reached
            and not engine.schedule.prefetched
            and engine.schedule.eval_order is None
            and not engine.retained
            and engine.host_reads is None
        )
        for order in (engine.schedule.forward_order, engine.schedule.backward_order):
            assert not order.is_open
    for name, param in model.named_parameters():
        assert isinstance(param, nn.Parameter), f"{name} is a {type(param).__name__}"
        assert param.is_leaf, name


@dataclass
class Tolerance:
    rtol: float = 1e-9
    atol: float = 1e-11


def compare(what: str, found: Tensor, wanted: Tensor, tolerance: Tolerance) -> None:
    found = found.to(wanted.device)  # that of an offloaded parameter is on the host
    if are_close(found, wanted, tolerance):
        return
    torch.testing.assert_close(
        found,
        wanted,
        rtol=tolerance.rtol,
        atol=tolerance.atol,
        equal_nan=True,
        msg=lambda text: f"{what}: {text}",
    )


def are_close(found: Tensor, wanted: Tensor, tolerance: Tolerance) -> bool:
    """What assert_close asks of plain floats, in a third of its time; of other tensors no.

    A rank's first call of assert_close copies 450 pages.
    """
    return (
        {type(found), type(wanted)} <= {Tensor, nn.Parameter}
        and found.is_floating_point()
        and (found.dtype, found.shape, found.layout) == (wanted.dtype, wanted.shape, torch.strided)
        and wanted.layout == torch.strided
        and torch.allclose(found, wanted, tolerance.rtol, tolerance.atol, equal_nan=True)
    )


def compare_slice(what: str, found: Tensor, wanted: Tensor, tolerance: Tolerance) -> None:
    """Compare what this rank holds with its part of ``wanted``: all ranks compare all of it."""
    if is_sharded(found):
        assert found.shape == wanted.shape, what
        found, wanted = to_local(found), own_slice(wanted, spec_of(found))
    compare(what, found.detach(), wanted, tolerance)


def sgd(params: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=0.1, momentum=0.9)


def step_in_backward(model: nn.Module) -> None:
    """Step each parameter by itself, in a hook, as soon as its gradient is there."""
    for param in model.parameters():
        optim = sgd([param])

        def step(_: Tensor, optim: torch.optim.Optimizer = optim) -> None:
            optim.step()
            optim.zero_grad()

        param.register_post_accumulate_grad_hook(step)


def adamw(params: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(params, lr=0.01, weight_decay=0.1)


Forward = Callable[[nn.Module, Tensor], Tensor]
MakeOptimizer = Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]


@dataclass
class Twin:
    """A sharded model and, beside it, the plain model it must equal after every operation."""

    rank: int
    world: int
    build: Callable[[], nn.Module]
    shard: Callable[[nn.Module], Any] = by_block
    optimizer: MakeOptimizer = sgd
    tolerance: Tolerance = field(default_factory=Tolerance)
    seed: int = 0

    def __post_init__(self) -> None:
        self.model = seeded(self.build, self.seed)
        self.plain = self.replicate(seeded(self.build, self.seed))
        self.shard(self.model)
        ours = trainable(self.model)
        self.optim = self.optimizer(ours) if ours else None
        self.plain_optim = self.optimizer(trainable(self.plain[0])) if self.optim else None

    def replicate(self, model: nn.Module) -> list[nn.Module]:
        return replicas(model, self.world)

    @property
    def reference(self) -> nn.Module:
        return self.plain[0]

    @property
    def mine(self) -> nn.Module:
        """The replica that stands for this rank."""
        return self.plain[self.rank]

    def inputs(self, seed: int, *shape: int) -> list[Tensor]:
        return [data(seed, r, *shape) for r in range(self.world)]

    def losses(self, forward: Forward, seed: int, *shape: int) -> tuple[Tensor, Tensor]:
        """(this rank's loss, the plain model's loss over all ranks), checked against each other."""
        xs = self.inputs(seed, *shape)
        loss = forward(self.model, xs[self.rank])
        plain = [forward(m, x) for m, x in zip(self.plain, xs)]
        compare("loss", loss.detach(), plain[self.rank].detach(), self.tolerance)
        return loss, torch.stack(plain).mean()

    def backward(self, forward: Forward, seed: int, *shape: int, **options: Any) -> None:
        loss, plain = self.losses(forward, seed, *shape)
        loss.backward(**options)
        plain.backward(**options)

    def step(self) -> None:
        """Check gradients, update both, clear both."""
        self.check_grads()
        self.optim.step()
        self.plain_optim.step()
        self.zero_grad()

    def zero_grad(self) -> None:
        """Through the optimizers, which keep the leaves whatever the modules hold."""
        for optim in filter(None, (self.optim, self.plain_optim)):
            optim.zero_grad()

    def train(self, forward: Forward = square, steps: int = 3, *shape: int) -> None:
        for seed in range(steps):
            self.backward(forward, seed, *shape)
            assert_at_rest(self.model)
            self.step()
        self.check()

    def check_grads(self) -> None:
        """Gradients agree; ours is None exactly where the plain one is."""
        theirs = dict(self.reference.named_parameters())
        for name, param in self.model.named_parameters():
            wanted = theirs[name].grad
            if param.grad is None or wanted is None:
                assert param.grad is None, f"{name} has a gradient"
                assert wanted is None, f"{name} has no gradient"
                continue
            compare_slice(f"gradient of {name}", param.grad, wanted, self.tolerance)

    def check(self) -> None:
        """Parameters and this rank's buffers agree, and the model is at rest."""
        assert_at_rest(self.model)
        ours = dict(self.model.named_parameters(remove_duplicate=False))
        theirs = dict(self.reference.named_parameters(remove_duplicate=False))
        assert list(ours) == list(theirs)
        for name, param in ours.items():
            compare_slice(name, param, theirs[name].detach(), self.tolerance)
            assert param.shape == theirs[name].shape
        for name in list(ours)[:1]:  # what is gathered outside of the passes, too
            compare(name, whole(ours[name]), theirs[name].detach(), self.tolerance)
        mine = dict(self.mine.named_buffers())
        for name, buffer in self.model.named_buffers():
            compare(name, buffer, mine[name], self.tolerance)


def train_twin(
    build: Callable[[], nn.Module] = Tower,
    forward: Forward = square,
    shard: Callable[[nn.Module], Any] = by_block,
    optimizer: MakeOptimizer = sgd,
    *,
    world: int = 2,
    steps: int = 3,
) -> None:
    """Trains a twin on ranks: the whole of many tests."""
    run_ranks(lambda rank: Twin(rank, world, build, shard, optimizer).train(forward, steps), world)


def mean_loss(output: Any) -> Tensor:
    """A loss over whatever tensor is given."""
    return F.mse_loss(output, torch.zeros_like(output))


def fqns(model: nn.Module) -> list[str]:
    return [spec_of(p).fqn for p in model.parameters()]


def is_shared(storage: torch.UntypedStorage) -> bool:
    """Whether it is memory that the ranks of a host read of each other."""
    for segments in all_segments():
        memories = [memory for slot in segments.slots for memory in slot.memories.values()]
        memories += [seen for peer in segments.peers.values() for _, seen in peer.maps.values()]
        for memory in memories:
            if 0 <= storage.data_ptr() - memory.data_ptr() < max(memory.nbytes, 1):
                return True
    return False


class Ledger(TorchDispatchMode):
    """Bytes in the storages that operators inside it made or wrote, now and at the most.

    Of the memory that ranks of a host share, what this rank has lent to itself to write.
    """

    def __init__(self, *known: Tensor) -> None:
        super().__init__()
        self.storages: dict[int, StorageWeakRef] = {}
        self.peak = 0
        with raw():
            self.excluded = {t.untyped_storage()._cdata for t in known}

    def live(self) -> int:
        total = 0
        for key, ref in list(self.storages.items()):
            storage = torch.UntypedStorage._new_with_weak_ptr(ref.cdata)
            if storage is None:
                del self.storages[key]
            else:
                total += storage.nbytes()
        return total + sum(segments.lent_bytes() for segments in all_segments())

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for tensor in tree_leaves((args, kwargs, out)):
            if isinstance(tensor, Tensor):
                storage = tensor.untyped_storage()
                if storage._cdata not in self.excluded and not is_shared(storage):
                    self.storages.setdefault(storage._cdata, StorageWeakRef(storage))
        self.peak = max(self.peak, self.live())
        return out


class Mirrored(torch.autograd.Function):
    """Multiplies; what it returns as the weight's gradient lies in the weight's own memory."""

    @staticmethod
    def forward(ctx: object, x: Tensor, weight: Tensor) -> Tensor:
        ctx.weight = weight.detach()  # type: ignore[attr-defined]
        return x * weight

    @staticmethod
    def backward(ctx: object, grad: Tensor) -> tuple[Tensor, Tensor]:
        weight = ctx.weight  # type: ignore[attr-defined]
        return grad * weight, weight


class Checkpointed(Tower):
    """Recomputes: each block, the inside of each block, pairs of blocks, or everything."""

    def __init__(self, where: str, reentrant: bool, depth: int = 4) -> None:
        super().__init__(depth)
        self.where, self.reentrant = where, reentrant
        if where == "inside":
            for block in self.blocks:
                inner = block.forward
                block.forward = lambda x, inner=inner: self.again(inner, x)

    def again(self, fn: Callable[..., Any], *args: Any) -> Any:
        if not torch.is_grad_enabled():
            return fn(*args)
        return checkpoint(fn, *args, use_reentrant=self.reentrant)

    def run(self, x: Tensor) -> Tensor:
        x = self.first(x)
        blocks = list(self.blocks)
        if self.where == "pairs":
            for a, b in zip(blocks[::2], blocks[1::2]):
                x = self.again(lambda y, a=a, b=b: b(a(y)), x)
        elif self.where == "outside":
            for block in blocks:
                x = self.again(block, x)
        elif self.where == "nested":
            half = lambda y, part: self.again(part[1], self.again(part[0], y))  # noqa: E731
            x = self.again(lambda y: half(y, blocks[:2]), x)
            x = self.again(lambda y: half(y, blocks[2:]), x)
        else:
            for block in blocks:
                x = block(x)
        return self.head(x)

    def forward(self, x: Tensor) -> Tensor:
        if self.where == "root":
            return self.again(self.run, x.requires_grad_())
        return self.run(x)


def units_by_name(model: nn.Module) -> dict[str, Unit]:
    return {unit.name: unit for unit in iter_units(model)}
