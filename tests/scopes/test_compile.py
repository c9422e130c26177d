"""torch.compile around and inside units: same numbers, no recompilation, one graph a block.

Each test trains a compiled sharded model beside the same model uncompiled, which it must equal bit
for bit, and one process on all the data.
"""

from __future__ import annotations

import copy
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounterWithBackend
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)
from torch.utils.checkpoint import checkpoint

import fsdp_compose as fc
from fsdp_compose.sharded import is_sharded

from compiling import (
    Call,
    Checkpointed,
    Line,
    Trial,
    blocks,
    import_compiler,
    shard_then_compile,
)
from harness import TORCH, run_ranks
from models import (
    WIDTH,
    Block,
    Tolerance,
    Tower,
    adamw,
    by_block,
    data,
    fqns,
    nested,
    seeded,
    square,
    units,
)
from tp_models import MLP, mesh_of, whole

# The compiler reads .grad of every input, and hides the warning from all but an "error" filter.
pytestmark = [
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor"),
    pytest.mark.filterwarnings("ignore:.torch.jit.script_method:DeprecationWarning"),
]


class CheckpointInside(nn.Module):
    """A unit of which a part is recomputed."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = Block(), Block()

    def forward(self, x: Tensor) -> Tensor:
        return self.b(checkpoint(self.a, x, use_reentrant=False))


@pytest.fixture(scope="module", autouse=True)
def imports() -> None:
    import_compiler()


def wrap_blocks(model: nn.Module, backend: Any) -> None:
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if isinstance(child, Block):
                setattr(parent, name, torch.compile(child, backend=backend))


def compile_then_shard(model: nn.Module, backend: Any) -> None:
    for block in blocks(model) if backend else ():
        block.compile(backend=backend)
    by_block(model)


def wrap_then_shard(model: nn.Module, backend: Any) -> None:
    if not backend:
        by_block(model)
        return
    wrap_blocks(model, backend)
    for module in list(model.modules()):
        if isinstance(module, torch._dynamo.eval_frame.OptimizedModule):
            fc.fully_shard(module)
    fc.fully_shard(model)


def shard_then_wrap(model: nn.Module, backend: Any) -> None:
    by_block(model)
    if backend:
        wrap_blocks(model, backend)


def nested_then_forward(model: nn.Module, backend: Any) -> None:
    nested(model)
    for block in blocks(model) if backend else ():
        block.forward = torch.compile(block.forward, backend=backend)


def whole_module(model: nn.Module, backend: Any) -> None:
    by_block(model)
    if backend:
        model.compile(backend=backend)


def whole_wrapped(model: nn.Module, backend: Any) -> Call | None:
    by_block(model)
    return torch.compile(model, backend=backend) if backend else None


def submodules(model: nn.Module, backend: Any) -> None:
    fc.fully_shard(model)
    for block in blocks(model) if backend else ():
        block.compile(backend=backend)


@pytest.mark.parametrize(
    "prepare",
    [
        compile_then_shard,
        shard_then_compile,
        wrap_then_shard,
        shard_then_wrap,
        nested_then_forward,
        whole_module,
        whole_wrapped,
        submodules,
    ],
)
def test_blocks_share_one_graph_in_every_order(prepare: Any) -> None:
    def run(rank: int) -> None:
        Trial(rank, 2, Tower, prepare, backend="aot_eager").run(graphs=1)

    run_ranks(run, 2)


def test_four_ranks_and_adam() -> None:
    def run(rank: int) -> None:
        Trial(rank, 4, Tower, shard_then_compile, optimizer=adamw).run(graphs=1)

    run_ranks(run, 4)


def test_a_whole_model_breaks_at_units_only() -> None:
    def run(rank: int) -> None:
        # before the first block, between the blocks, behind the last, and a block.
        Trial(rank, 2, Line, whole_module).run(graphs=4)

    run_ranks(run, 2)


def test_a_function_that_resumes_inside_the_model() -> None:
    """Dynamo's frames of the model's call have other names then; the model runs all the same."""

    def prepare(model: nn.Module, backend: Any) -> Call | None:
        by_block(model)
        return torch.compile(lambda x: model(x) * 1.0, backend=backend) if backend else None

    def run(rank: int) -> None:
        with torch._dynamo.config.patch(nested_graph_breaks=True):
            trial = Trial(rank, 2, Line, prepare)
            for seed in range(3):
                trial.step(seed)
            trial.check()

    run_ranks(run, 2)


def test_two_shapes_compile_twice() -> None:
    def run(rank: int) -> None:
        shapes = ((3, WIDTH), (5, WIDTH))
        Trial(rank, 2, Tower, shard_then_compile).run(graphs=2, shapes=shapes, steps=4)

    run_ranks(run, 2)


@pytest.mark.parametrize("build", [Checkpointed, CheckpointInside])
def test_checkpointing(build: Any) -> None:
    def run(rank: int) -> None:
        for prepare in (shard_then_compile, submodules):
            torch._dynamo.reset()
            # The first block's input needs no gradient, the second's does.
            Trial(rank, 2, build, prepare, backend="aot_eager").run(graphs=2)

    run_ranks(run, 2)


def test_mixed_precision() -> None:
    policy = fc.MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)

    def prepare(model: nn.Module, backend: Any) -> None:
        by_block(model, mp_policy=policy)
        for block in blocks(model) if backend else ():
            block.compile(backend=backend)

    def run(rank: int) -> None:
        loose = Tolerance(rtol=0.1, atol=0.05)
        trial = Trial(rank, 2, Tower, prepare, dtype=torch.float32, tolerance=loose)
        trial.run(graphs=1)

    run_ranks(run, 2)


@pytest.mark.parametrize("strategy", ["SHARD_GRAD_OP", "NO_SHARD"])
def test_weights_that_stay_gathered(strategy: str) -> None:
    def prepare(model: nn.Module, backend: Any) -> None:
        by_block(model, strategy=fc.ShardingStrategy[strategy])
        for block in blocks(model) if backend else ():
            block.compile(backend=backend)

    run_ranks(lambda rank: Trial(rank, 2, Tower, prepare).run(graphs=1), 2)


def test_a_world_of_one() -> None:
    Trial(0, 1, Tower, shard_then_compile).run(graphs=1)


def test_frozen_parameters() -> None:
    def prepare(model: nn.Module, backend: Any) -> None:
        model.a.requires_grad_(False)
        model.b.norm.requires_grad_(False)
        shard_then_compile(model, backend)

    def run(rank: int) -> None:
        trial = Trial(rank, 2, Line, prepare, backend="aot_eager")
        trial.plain.a.requires_grad_(False)
        trial.plain.b.norm.requires_grad_(False)
        trial.run(graphs=2)

    run_ranks(run, 2)


def test_accumulation_and_eval_between_steps() -> None:
    def loss(model: nn.Module, call: Call, x: Tensor) -> Tensor:
        model.eval()
        with torch.no_grad():
            before = call(x)
        with torch.inference_mode():
            assert torch.equal(call(x), before)
        model.train()
        with fc.no_sync(model):
            (call(x).square().mean() / 4).backward()
        with fc.accumulate(model, keep="unsharded"):
            (call(x).square().mean() / 4).backward()
            loss = call(x).square().mean()
            (loss / 2).backward()
        return loss

    def run(rank: int) -> None:
        # under no_grad, in inference mode, in training
        Trial(rank, 2, Tower, shard_then_compile, loss=loss).run(graphs=3)

    run_ranks(run, 2)


def test_autograd_grad_and_gradient_penalty() -> None:
    """``autograd.grad``, retain graph and gradient penalty."""

    def run(rank: int) -> None:
        model, sharded = seeded(Tower), by_block(seeded(Tower))
        shard_then_compile(model, "eager")
        x = data(0, rank)
        found = torch.autograd.grad(square(model, x), list(model.parameters()))
        wanted = torch.autograd.grad(square(sharded, x), list(sharded.parameters()))
        assert all(torch.equal(whole(f), whole(w)) for f, w in zip(found, wanted, strict=True))
        for m in (model, sharded):
            loss = square(m, x)
            loss.backward(retain_graph=True)
            loss.backward()
            given = x.clone().requires_grad_()
            (slope,) = torch.autograd.grad(square(m, given), given, create_graph=True)
            slope.square().sum().backward()
        for p, q in zip(model.parameters(), sharded.parameters(), strict=True):
            assert torch.equal(whole(p.grad), whole(q.grad))

    run_ranks(run, 2)


def test_an_error_in_a_block_leaves_nothing_behind() -> None:
    def run(rank: int) -> None:
        trial = Trial(rank, 2, Tower, shard_then_compile)
        trial.run(graphs=1)
        plain = Block.forward
        with pytest.MonkeyPatch.context() as patch:

            def broken(self: Any, x: Tensor) -> Tensor:
                plain(self, x)
                raise ValueError("as planned")

            patch.setattr(Block, "forward", broken)
            torch._dynamo.reset()
            with pytest.raises(Exception, match="as planned"):
                trial.model(data(0, rank))
            for param in trial.model.parameters():
                assert is_sharded(param)
        torch._dynamo.reset()
        trial.step(20)
        trial.check()

    run_ranks(run, 2)


def test_other_methods_than_forward() -> None:
    def prepare(model: nn.Module, backend: Any) -> Call:
        by_block(model, methods=("forward", "encode"))
        return torch.compile(model.encode, backend=backend) if backend else model.encode

    run_ranks(lambda rank: Trial(rank, 2, Line, prepare).run(graphs=4), 2)


def test_a_compiled_training_step() -> None:
    def step(model: nn.Module, optimizer: Any, x: Tensor) -> Tensor:
        with fc.no_sync(model):
            square(model, x).backward()
        loss = square(model, x * 2)
        loss.backward()
        norm = fc.clip_grad_norm_(model, 0.1)
        optimizer.step()
        optimizer.zero_grad()
        with fc.gathered(model):
            total = model.weight.sum()
        return loss + norm + total

    def run(rank: int) -> None:
        model, sharded = (
            fc.fully_shard(seeded(lambda: nn.Linear(WIDTH, 2, bias=False))) for _ in range(2)
        )
        optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (model, sharded)]
        counter = CompileCounterWithBackend("eager")
        compiled = torch.compile(step, backend=counter)
        for seed in range(3):
            x = data(seed, rank)
            wanted = step(sharded, optimizers[1], x)
            with torch.compiler.set_stance("fail_on_recompile" if seed else "default"):
                assert torch.equal(compiled(model, optimizers[0], x), wanted)
        assert torch.equal(whole(model.weight), whole(sharded.weight))
        assert counter.frame_count > 0

    run_ranks(run, 2)


def test_compiled_autograd_is_refused() -> None:
    """It would not call what ends a backward, and the root would get no gradients."""

    def run(rank: int) -> None:
        model = by_block(seeded(Tower))
        compiled = partial(torch.compile, backend="aot_eager")
        with torch._dynamo.config.patch(compiled_autograd=True):
            loss = compiled(lambda x: square(model, x))
            with pytest.raises(RuntimeError, match="runs under compiled autograd"):
                compiled(lambda x: loss(x).backward())(data(0, rank))
        plain = seeded(Tower)
        for one in (model, plain):
            one.zero_grad()
            square(one, data(0, 0)).backward()
        for p, q in zip(model.parameters(), plain.parameters(), strict=True):
            assert p.grad is not None and q.grad is not None
            torch.testing.assert_close(p.grad.full_tensor(), q.grad)

    run_ranks(run, 1)


def test_a_compiled_optimizer_over_local_parameters() -> None:
    def run(rank: int) -> None:
        model, sharded = (fc.fully_shard(seeded(lambda: nn.Linear(WIDTH, 2))) for _ in range(2))
        counter = CompileCounterWithBackend("eager")
        mine = torch.optim.SGD(fc.local_parameters(model), lr=0.1)
        other = torch.optim.SGD(sharded.parameters(), lr=0.1)
        compiled = torch.compile(mine.step, backend=counter)
        for seed in range(2):
            for m in (model, sharded):
                square(m, data(seed, rank)).backward()
            compiled()
            other.step()
            mine.zero_grad()
            other.zero_grad()
        assert counter.op_count > 0
        for p, q in zip(model.parameters(), sharded.parameters(), strict=True):
            # Torch 2.11 compiles the step's fused multiply-add as a product and a sum.
            atol = 0.0 if TORCH >= (2, 13) else 1e-15
            torch.testing.assert_close(whole(p), whole(q), rtol=0.0, atol=atol)

    run_ranks(run, 2)


def test_names_and_state_dicts_have_no_wrappers() -> None:
    def run(rank: int) -> None:
        seen: list[str] = []

        def policy(fqn: str, param: nn.Parameter) -> int:
            seen.append(fqn)
            return 1

        wanted = seeded(Line, 5).state_dict()
        names = fqns(by_block(seeded(Line)))
        for prepare in (wrap_then_shard, shard_then_wrap):
            model = seeded(Line)
            prepare(model, "eager")
            assert fqns(model) == names
            assert [unit.name for unit in units(model)] == ["Line", "a", "b"]
            assert list(fc.state_dict(model)) == list(wanted)
            fc.load_state_dict(model, wanted)
            plain = seeded(Line)
            plain.load_state_dict(fc.state_dict(model))
            assert all(torch.equal(v, wanted[k]) for k, v in plain.state_dict().items())
            model.load_state_dict(model.state_dict())
        model = seeded(Line)
        wrap_blocks(model, "eager")
        by_block(model, granularity=policy)
        assert [unit.name for unit in units(model)] == ["Line", "a", "b"]
        assert set(seen) == {name for name, _ in seeded(Line).named_parameters()}

    run_ranks(run, 2)


def test_blocks_split_by_tensor_parallelism() -> None:
    """Whose hooks are part of the graph; of three dimensions, in steps of several shapes."""

    def ranks(rank: int) -> None:
        mesh = mesh_of(dp=1, tp=2)
        torch.manual_seed(0)
        model = nn.Sequential(MLP(8, 12), MLP(8, 12)).double()
        plain = copy.deepcopy(model)
        for block in model:
            layout = {"up": ColwiseParallel(), "down": RowwiseParallel()}
            parallelize_module(block, mesh["tp"], layout)
            fc.fully_shard(block, mesh=mesh["dp"])
            block.compile(backend="eager", fullgraph=True)
        fc.fully_shard(model, mesh=mesh["dp"])
        pairs = [torch.optim.SGD(each.parameters(), lr=0.1) for each in (model, plain)]
        for step in range(4):
            x = torch.randn(2 + step, 5, 8, dtype=torch.float64)
            for each, optim in zip((model, plain), pairs, strict=True):
                each(x).square().mean().backward()
                optim.step()
                optim.zero_grad()
        for ours, theirs in zip(model.parameters(), plain.parameters(), strict=True):
            torch.testing.assert_close(whole(ours), theirs.detach())

    run_ranks(ranks, 2)
