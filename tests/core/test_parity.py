"""A sharded model learns what one process learns from the concatenated batch.

Every configuration of sharding is held to the same plain run: losses, parameters, and the dtypes
that mixed precision promises.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

from fsdp_compose import MixedPrecision, Prefetch, ShardingStrategy, fully_shard, undo, wrap
from fsdp_compose.base.process import here

from harness import run_ranks, single_process
from models import (
    WIDTH,
    Block,
    Tolerance,
    Tower,
    Twin,
    adamw,
    assert_at_rest,
    by_block,
    compare,
    data,
    nested,
    one_unit,
    seeded,
    sgd,
    square,
    units,
    whole,
)

sys.path.insert(0, str(Path(__file__).parents[2] / "examples"))
from gpt import GPT, GPTConfig
from gpt import Block as GPTBlock

OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "sgd": lambda params: torch.optim.SGD(params, lr=0.1),
    "momentum": sgd,
    "adamw": adamw,
}
STEPS = 3


def against_one_process(
    rank: int,
    world: int,
    shard: Callable[[nn.Module], Any],
    optimizer: Callable[[Any], torch.optim.Optimizer] = adamw,
    build: Callable[[], nn.Module] = Tower,
    check: Callable[[nn.Module], None] | None = None,
) -> None:
    """Train both, and compare every loss (averaged over ranks) and every parameter."""
    model, plain = seeded(build), seeded(build)
    shard(model)
    optims = optimizer(model.parameters()), optimizer(plain.parameters())
    for step in range(STEPS):
        xs = [data(step, r) for r in range(world)]
        ours, theirs = square(model, xs[rank]), square(plain, torch.cat(xs))
        ours.backward()
        theirs.backward()
        mean = ours.detach().clone()
        if dist.is_initialized():
            dist.all_reduce(mean)
            mean /= world
        torch.testing.assert_close(mean, theirs.detach(), rtol=1e-10, atol=0)
        assert_at_rest(model)
        if check is not None:
            check(model)
        for optim in optims:
            optim.step()
            optim.zero_grad()
    for (name, param), wanted in zip(model.named_parameters(), plain.parameters(), strict=True):
        found = whole(param)
        assert found.stride() == wanted.stride()
        torch.testing.assert_close(found, wanted.detach(), rtol=1e-9, atol=1e-11, msg=name)
    for name, value in plain.named_buffers():
        torch.testing.assert_close(model.get_buffer(name), value, msg=name)


WORLDS = [1, 2, 3]


@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_optimizers(optimizer: str, world: int) -> None:
    run_ranks(against_one_process, world, world, by_block, OPTIMIZERS[optimizer])


def test_without_a_process_group() -> None:
    with single_process():
        for strategy in (None, *(s for s in ShardingStrategy if "HYBRID" not in s.name)):
            against_one_process(0, 1, lambda m: by_block(m, strategy=strategy))


def mesh_1d(world: int) -> Any:
    return init_device_mesh("cpu", (world,))


def mesh_2d(world: int) -> Any:
    return init_device_mesh("cpu", (2, world // 2), mesh_dim_names=("replicate", "shard"))


def groups(world: int) -> tuple[Any, Any]:
    """(shard, replicate) groups of a 2-D arrangement."""
    rank = dist.get_rank()
    half = world // 2
    shards = [dist.new_group(range(i * half, (i + 1) * half)) for i in range(2)]
    replicas = [dist.new_group([i, i + half]) for i in range(half)]
    return shards[rank // half], replicas[rank % half]


STRATEGIES: dict[str, dict[str, Any]] = {
    "default": {},
    "FULL_SHARD": {"strategy": ShardingStrategy.FULL_SHARD},
    "SHARD_GRAD_OP": {"strategy": ShardingStrategy.SHARD_GRAD_OP},
    "NO_SHARD": {"strategy": ShardingStrategy.NO_SHARD},
    "reshard": {"reshard_after_forward": True},
    "keep": {"reshard_after_forward": False},
}


@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_strategies(strategy: str, world: int) -> None:
    run_ranks(against_one_process, world, world, lambda m: by_block(m, **STRATEGIES[strategy]))


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("shard", [one_unit, nested])
def test_strategies_of_other_arrangements(strategy: str, shard: Callable[..., Any]) -> None:
    world = 2
    run_ranks(against_one_process, world, world, lambda m: shard(m, **STRATEGIES[strategy]))


HYBRIDS: dict[str, dict[str, Any]] = {
    "default": {},
    "HYBRID_SHARD": {"strategy": ShardingStrategy.HYBRID_SHARD},
    "HYBRID_SHARD_ZERO2": {"strategy": ShardingStrategy.HYBRID_SHARD_ZERO2},
}


@pytest.mark.parametrize("world", [2, 4])
@pytest.mark.parametrize(
    ("mesh", "strategy"), [(groups, "default"), *((mesh_2d, name) for name in HYBRIDS)]
)
def test_hybrid(mesh: Callable[[int], Any], strategy: str, world: int) -> None:
    def ranks(rank: int) -> None:
        shard = lambda m: by_block(m, mesh=mesh(world), **HYBRIDS[strategy])  # noqa: E731
        against_one_process(rank, world, shard, check=lambda m: check_replicas(rank, world, m))

    run_ranks(ranks, world)


def check_replicas(rank: int, world: int, model: nn.Module) -> None:
    """Gradients were summed over both axes: replicas agree on every bit."""
    for param in model.parameters():
        mine = param.grad.to_local().contiguous()
        every = [torch.empty(0)] * world
        dist.all_gather_object(every, mine)
        half = world // 2
        assert torch.equal(every[rank], every[(rank + half) % world])


@pytest.mark.parametrize("world", [2, 3])
@pytest.mark.parametrize("mesh", ["none", "mesh", "group", "pair"])
def test_meshes(mesh: str, world: int) -> None:
    def ranks(rank: int) -> None:
        made = {
            "none": lambda: None,
            "mesh": lambda: mesh_1d(world),
            "group": lambda: dist.group.WORLD,
            "pair": lambda: (dist.group.WORLD, [dist.new_group([r]) for r in range(world)][rank]),
        }[mesh]()
        against_one_process(rank, world, lambda m: by_block(m, mesh=made))

    run_ranks(ranks, world)


def test_a_sub_mesh_trains_on_its_own_ranks() -> None:
    """Two independent models on the two rows of a mesh."""

    def ranks(rank: int) -> None:
        mesh = mesh_2d(4)["shard"]
        model, plain = seeded(Tower), seeded(Tower)
        by_block(model, mesh=mesh)
        row = rank // 2
        square(model, data(0, rank)).backward()
        square(plain, torch.cat([data(0, 2 * row), data(0, 2 * row + 1)])).backward()
        for ours, theirs in zip(model.parameters(), plain.parameters()):
            torch.testing.assert_close(whole(ours.grad), theirs.grad)

    run_ranks(ranks, 4)


def modules_as_one(model: nn.Module) -> nn.Module:
    """Two blocks and the head gathered together, the rest by the root."""
    fully_shard([model.blocks[0], model.blocks[1]])
    fully_shard([model.blocks[2], model.head])
    return fully_shard(model)


def only_parts(model: nn.Module) -> nn.Module:
    """No unit around everything: the root's own parameters are ignored in each part."""
    for block in model.blocks:
        fully_shard(block)
    fully_shard([model.first])
    return fully_shard(model.head)


def deep(model: nn.Module) -> nn.Module:
    """Every module with parameters is a unit inside another."""
    return fully_shard(model, units=wrap.by_size(1))


def mixed(model: nn.Module) -> nn.Module:
    """Each unit with options of its own."""
    choices = iter(
        [
            {"reshard_after_forward": False},
            {"strategy": ShardingStrategy.NO_SHARD},
            {"prefetch": Prefetch(0, 0), "granularity": "tensor"},
        ]
    )
    by = wrap.by_fn(lambda name, m: next(choices) if isinstance(m, Block) else False)
    return fully_shard(model, units=by, granularity="row")


@pytest.mark.parametrize("world", [1, 2, 3])
@pytest.mark.parametrize("shard", [modules_as_one, only_parts, deep, mixed])
def test_arrangements(shard: Callable[[nn.Module], Any], world: int) -> None:
    run_ranks(against_one_process, world, world, shard)


@pytest.mark.parametrize("granularity", ["row", "tensor", 4, lambda fqn, p: "row" if p.ndim else 1])
def test_granularities(granularity: Any) -> None:
    run_ranks(against_one_process, 3, 3, lambda m: by_block(m, granularity=granularity))


@pytest.mark.parametrize(
    "prefetch",
    [Prefetch(0, 0), Prefetch(2, 3), Prefetch(1, 1, None), Prefetch(1, 2, "post")],
    ids=str,
)
def test_prefetch(prefetch: Prefetch) -> None:
    run_ranks(against_one_process, 2, 2, lambda m: by_block(m, prefetch=prefetch))


@pytest.mark.parametrize("strategy", ["FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD"])
def test_gradients_accumulate(strategy: str) -> None:
    """Micro-batches and one update against one process that does the same."""

    def ranks(rank: int) -> None:
        shard = lambda m: by_block(m, strategy=ShardingStrategy[strategy])  # noqa: E731
        twin = Twin(rank, 3, Tower, shard, optimizer=adamw)
        for step in range(3):
            for micro in range(4):
                twin.backward(square, 10 * step + micro)
            twin.step()
        twin.check()

    run_ranks(ranks, 3)


def test_ignored_parameters_are_left_to_the_user() -> None:
    def ranks(rank: int) -> None:
        model, plain = seeded(Tower), seeded(Tower)
        fully_shard(model, ignored=[model.first, model.head.bias])
        left = {id(model.first.weight), id(model.first.bias), id(model.head.bias)}
        square(model, data(0, rank)).backward()
        square(plain, data(0, rank)).backward()
        for ours, theirs in zip(model.parameters(), plain.parameters()):
            assert (id(ours) in left) == (type(ours) is nn.Parameter)
            if id(ours) in left:
                torch.testing.assert_close(ours.grad, theirs.grad)

    run_ranks(ranks)


# A GPT


def gpt(tie: bool = False, **changes: Any) -> GPT:
    torch.manual_seed(0)
    config = GPTConfig(
        vocab_size=33, block_size=16, n_layer=3, n_head=2, n_embd=16, tie_weights=tie
    )
    model = GPT(config)
    for name, value in changes.items():
        setattr(model, name, value)
    return model


@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("tie", [False, True])
def test_gpt(tie: bool, checkpointing: bool) -> None:
    def ranks(rank: int) -> None:
        model = gpt(tie, activation_checkpointing=checkpointing)
        plain = gpt(tie)
        fully_shard(model, units=wrap.by_class({GPTBlock}))
        optims = sgd(model.parameters()), sgd(plain.parameters())
        for step in range(3):
            draw = lambda r: torch.Generator().manual_seed(9 * step + r)  # noqa: E731
            tokens = [torch.randint(33, (2, 17), generator=draw(r)) for r in range(2)]
            _, ours = model(tokens[rank][:, :-1], targets=tokens[rank][:, 1:])
            both = torch.cat(tokens)
            _, theirs = plain(both[:, :-1], targets=both[:, 1:])
            ours.backward()
            theirs.backward()
            mean = ours.detach().clone()
            dist.all_reduce(mean)
            torch.testing.assert_close(mean / 2, theirs.detach(), rtol=1e-5, atol=1e-6)
            for (name, p), wanted in zip(model.named_parameters(), plain.parameters()):
                torch.testing.assert_close(
                    whole(p.grad), wanted.grad, rtol=1e-4, atol=1e-6, msg=name
                )
            for optim in optims:
                optim.step()
                optim.zero_grad()
        prompt = torch.tensor([[1, 2, 3]])
        undo(model)
        plain.load_state_dict(model.state_dict())
        assert torch.equal(model.generate(prompt, 4, 0.0), plain.generate(prompt, 4, 0.0))

    run_ranks(ranks)


# Mixed precision


class Spy(nn.Module):
    """A block that notes the dtypes it meets."""

    def __init__(self) -> None:
        super().__init__()
        self.block = Block()
        self.norm = nn.BatchNorm1d(WIDTH)
        self.seen: dict[str, Any] = {}

    def forward(self, x: Tensor, *, flag: Tensor, count: Tensor) -> Tensor:
        self.seen = {
            "input": x.dtype, "keyword": flag.dtype, "integer": count.dtype,
            "weight": self.block.up.weight.dtype, "buffer": self.norm.running_mean.dtype,
            "counter": self.norm.num_batches_tracked.dtype,
        }  # fmt: skip
        out = self.block(x)
        self.seen["inside"] = out.dtype
        return out


BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32


@pytest.mark.parametrize("dtype", [BF16, FP16])
@pytest.mark.parametrize("cast", [True, False])
@pytest.mark.parametrize("output", [None, FP32])
def test_dtypes_in_forward(dtype: torch.dtype, cast: bool, output: torch.dtype | None) -> None:
    def ranks(rank: int) -> None:
        torch.manual_seed(0)
        model = Spy()
        mp = MixedPrecision(
            param_dtype=dtype, output_dtype=output, buffer_dtype=BF16, cast_forward_inputs=cast
        )
        fully_shard(model, mp_policy=mp)
        assert model.norm.running_mean.dtype == BF16
        x = data(0, rank, dtype=FP32 if cast else dtype)
        count = torch.ones(1, dtype=torch.int64)
        out = model(x, flag=x[:1], count=count)
        assert model.seen == {
            "input": dtype, "keyword": dtype, "integer": torch.int64, "weight": dtype,
            "buffer": BF16, "counter": torch.int64, "inside": dtype,
        }  # fmt: skip
        assert out.dtype == (output or dtype)
        out.float().square().mean().backward()
        for param in model.block.parameters():
            assert param.dtype == param.to_local().dtype == FP32
            assert param.grad.dtype == param.grad.to_local().dtype == FP32

    run_ranks(ranks)


@pytest.mark.parametrize("dtype", [BF16, FP16])
@pytest.mark.parametrize("reduce", [None, FP32, BF16])
@pytest.mark.parametrize("strategy", ["FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD"])
def test_mixed_precision_against_the_definition(
    dtype: torch.dtype, reduce: torch.dtype | None, strategy: str
) -> None:
    """fp32 weights are rounded, gradients computed in ``dtype``, rounded to ``reduce``, averaged in
    fp32, and applied to the fp32 weights: bit by bit, for two ranks."""

    def ranks(rank: int) -> None:
        torch.manual_seed(0)
        model = Tower(2)
        masters = [p.detach().clone() for p in model.parameters()]
        mp = MixedPrecision(param_dtype=dtype, reduce_dtype=reduce)
        by_block(model, mp_policy=mp, strategy=ShardingStrategy[strategy])
        optim = torch.optim.AdamW(model.parameters(), lr=0.01)
        wanted = [nn.Parameter(m.clone()) for m in masters]
        theirs = torch.optim.AdamW(wanted, lr=0.01)
        for step in range(3):
            here.traffic.reset()
            model(data(step, rank, dtype=FP32)).float().square().mean().backward()
            grads = [[], []]
            for r in range(2):
                plain = Tower(2).to(dtype)
                with torch.no_grad():
                    for p, w in zip(plain.parameters(), wanted):
                        p.copy_(w)
                plain(data(step, r, dtype=dtype)).float().square().mean().backward()
                # Float16 is halved before the sum of two, which could overflow, else after it.
                first = 0.5 if (reduce or dtype) is torch.float16 else 1.0
                sent = [p.grad.to(reduce or dtype) * first for p in plain.parameters()]
                grads[r] = [grad.float() for grad in sent]
            for w, a, b in zip(wanted, *grads):
                w.grad = (a + b) * (0.5 / first)
            for (name, p), w in zip(model.named_parameters(), wanted):
                found = whole(p.grad)
                if strategy == "NO_SHARD" and (reduce or dtype) is not FP32:
                    torch.testing.assert_close(found, w.grad, rtol=2**-6, atol=1e-5, msg=name)
                else:
                    assert torch.equal(found, w.grad), name
                w.grad = found
            for o in (optim, theirs):
                o.step()
                o.zero_grad()
            for (name, p), w in zip(model.named_parameters(), wanted):
                assert torch.equal(whole(p), w.detach()), name

    run_ranks(ranks)


def test_bytes_follow_the_dtypes() -> None:
    """Weights travel in param_dtype, gradients in reduce_dtype."""

    def ranks(rank: int, mp: MixedPrecision) -> tuple[int, int]:
        model = Tower(1)
        fully_shard(model, mp_policy=mp, reshard_after_forward=False)
        here.traffic.reset()
        model(data(0, rank, dtype=FP32)).float().mean().backward()
        return here.traffic.gather_bytes, here.traffic.reduce_bytes

    ((gather, reduce), _) = run_ranks(ranks, 2, MixedPrecision())
    padding = 64
    for mp, a, b in (
        (MixedPrecision(BF16, FP32), 2, 1),
        (MixedPrecision(BF16), 2, 2),
        (MixedPrecision(BF16, BF16), 2, 2),
        (MixedPrecision(None, BF16), 1, 2),
        (MixedPrecision(torch.float64, FP32), 0.5, 1),
    ):
        for g, r in run_ranks(ranks, 2, mp):
            assert abs(g - gather / a) <= padding and abs(r - reduce / b) <= padding, mp


def test_mixed_precision_per_parameter() -> None:
    """USERS 7: fp32 norms in a bf16 block; the unit has a bucket for each."""

    def ranks(rank: int) -> None:
        torch.manual_seed(0)
        model = Tower(2)
        asked: list[tuple[str, torch.Size]] = []

        def policy(fqn: str, param: nn.Parameter) -> MixedPrecision | None:
            asked.append((fqn, param.shape))
            return None if "norm" in fqn else MixedPrecision(param_dtype=BF16, reduce_dtype=FP32)

        seen: dict[str, torch.dtype] = {}
        for name, module in model.named_modules():
            module.register_forward_pre_hook(
                lambda m, a, n=name: seen.update(
                    (f"{n}.{k}", p.dtype) for k, p in m._parameters.items() if p is not None
                )
            )
        for block in model.blocks:
            norm = block.norm.forward
            block.norm.forward = lambda x, norm=norm: norm(x.float()).to(BF16)
        by_block(model, mp_policy=policy)
        model(data(0, rank, dtype=BF16)).float().mean().backward()
        names = {n for n, _ in model.named_parameters()}
        for name in names:
            assert seen[name] == (FP32 if "norm" in name else BF16), name
        assert [len(u.buckets) for u in units(model)] == [1, 2, 2]
        assert all(p.grad.dtype == FP32 for p in model.parameters())
        shapes = {n: p.shape for n, p in model.named_parameters()}
        for fqn, shape in asked:
            assert any(n == fqn or n.endswith("." + fqn) for n in names), (
                f"the policy was asked about {fqn!r}, which is no parameter"
            )
            assert any(s == shape for n, s in shapes.items() if n.endswith(fqn))

    run_ranks(ranks)


def test_buffers_are_cast_once_and_train() -> None:
    def ranks(rank: int) -> None:
        model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH)).double()
        fully_shard(model, mp_policy=MixedPrecision(param_dtype=FP32, buffer_dtype=FP32))
        for _ in range(2):
            before = model[1].running_mean.clone()
            model(data(0, rank)).mean().backward()
            assert model[1].running_mean.dtype == FP32
            assert not torch.equal(model[1].running_mean, before)
        assert model[1].num_batches_tracked == 2
        undo(model)
        assert model[1].running_mean.dtype == torch.float64

    run_ranks(ranks)


def test_bf16_parameters_without_a_policy() -> None:
    """The shard has the dtype the parameters came with, and so do gradients and updates."""

    def ranks(rank: int) -> None:
        model, plain = seeded(Tower).bfloat16(), seeded(Tower).bfloat16()
        by_block(model)
        xs = [data(0, r, dtype=BF16) for r in range(2)]
        model(xs[rank]).float().square().mean().backward()
        grads = []
        for x in xs:
            plain.zero_grad()
            plain(x).float().square().mean().backward()
            grads.append([p.grad.clone() for p in plain.parameters()])
        for (name, p), a, b in zip(model.named_parameters(), *grads):
            assert p.grad.dtype == BF16
            compare(
                name, whole(p.grad).float(), (a.float() + b.float()) / 2, Tolerance(2**-7, 1e-4)
            )

    run_ranks(ranks)
