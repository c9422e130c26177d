"""``set_traceable``: units inside one graph equal the uncompiled model bit for bit."""

from __future__ import annotations

import copy
import gc
import operator
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.fx.experimental.proxy_tensor import make_fx

import fsdp_compose as fc

from compiling import (
    Call,
    Checkpointed,
    Line,
    Trial,
    import_compiler,
)
from harness import rank_errors, run_ranks
from models import (
    WIDTH,
    Block,
    Tolerance,
    Tower,
    adamw,
    by_block,
    compare,
    data,
    seeded,
    sgd,
    square,
    units,
    whole,
)

# The compiler reads .grad of every input, and hides the warning from all but an "error" filter.
pytestmark = [
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor"),
    pytest.mark.filterwarnings("ignore:.torch.jit.script_method:DeprecationWarning"),
]


class Tied(Line):
    """The head is the first layer, which belongs to the root and is read by two units."""

    def __init__(self) -> None:
        super().__init__()
        self.head.weight = self.first.weight


class Shared(nn.Module):
    """One block twice, and a projection that is read without being called."""

    def __init__(self) -> None:
        super().__init__()
        self.a = Block()
        self.out = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.linear(self.a(self.a(x)), self.out.weight)


class Again(nn.Module):
    """A block twice on one input, and another's last bias for two: equal reductions of a unit."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = Block(), Block()
        self.b.requires_grad_(False).down = nn.Linear(7, WIDTH)
        self.b.down.weight.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        x = self.a(x) + self.a(x)
        return self.b(x) + self.b(x.sin())


class Halves(nn.Module):
    """A unit whose two calls read other parameters, and one of two modules."""

    class Half(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up, self.down = nn.Linear(WIDTH, 7), nn.Linear(7, WIDTH)

        def forward(self, x: Tensor, is_up: bool) -> Tensor:
            return (self.up if is_up else self.down)(x)

    def __init__(self) -> None:
        super().__init__()
        self.part, self.a, self.b = self.Half(), Block(), Block()

    def forward(self, x: Tensor) -> Tensor:
        return self.b(self.a(self.part(self.part(x, True).sin(), False)))


def by_halves(model: nn.Module) -> None:
    fc.fully_shard(model.part)
    fc.fully_shard([model.a, model.b])
    fc.fully_shard(model)


@pytest.fixture(scope="module", autouse=True)
def imports() -> None:
    import_compiler()


def traceable(
    model: nn.Module, backend: Any, shard: Callable[[nn.Module], Any] = by_block
) -> Call | None:
    """One graph over every unit, the root's hooks included."""
    shard(model)
    if not backend:
        return None
    fc.set_traceable(model)
    return torch.compile(lambda x: model(x), backend=backend, fullgraph=True)


def traceable_root(model: nn.Module, backend: Any) -> Call | None:
    """As people write it: the root's own hooks run outside the graph."""
    by_block(model)
    if not backend:
        return None
    fc.set_traceable(model)
    return torch.compile(model, backend=backend, fullgraph=True)


def sharded_with(**options: Any) -> Callable[[nn.Module, Any], Call | None]:
    return lambda model, backend: traceable(model, backend, lambda m: by_block(m, **options))


@pytest.mark.parametrize(
    ("prepare", "build"),
    [
        *((traceable, build) for build in (Tower, Line, Tied, Shared)),
        *((traceable_root, build) for build in (Tower, Tied)),
    ],
)
def test_fullgraph_over_units(build: Any, prepare: Any) -> None:
    exact = build is not Shared  # whose two calls are reduced apart
    run_ranks(lambda rank: Trial(rank, 2, build, prepare, exact=exact).run(graphs=1), 2)


def test_fullgraph_reduces_after_every_call() -> None:
    """A compiler computes once what is called twice with the same arguments."""

    def run(rank: int) -> None:
        Trial(rank, 2, Again, traceable, "aot_eager", exact=False).run(graphs=1)
        torch._dynamo.reset()
        prepare = partial(traceable, shard=by_halves)
        Trial(rank, 2, Halves, prepare, "aot_eager", exact=False).run(graphs=1)

    run_ranks(run, 2)


class Pick(Line):
    """The root's head, or its unused layer, by ``pick``; nobody uses the bias of ``first``."""

    pick = "head"

    def __init__(self) -> None:
        super().__init__()
        self.unused = nn.Linear(WIDTH, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        x = self.a(nn.functional.linear(x, self.first.weight))
        return self.head(x) if self.pick == "head" else self.unused(x)


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_fullgraph_leaves_alone_what_no_rank_used(backend: str) -> None:
    """Weight decay does not move it; what one rank's graph uses is averaged on every rank."""

    def run(rank: int) -> None:
        model, plain = seeded(Pick), seeded(Pick)
        call = traceable(model, backend)
        assert call is not None
        steppers = [adamw(model.parameters()), adamw(plain.parameters())]
        xs = [data(0, r) for r in range(2)]
        for picks in (("head", "head"), ("head", "unused"), ("head", "head")):
            model.pick = picks[rank]
            square(call, xs[rank]).backward()
            for plain.pick, x in zip(picks, xs, strict=True):
                (square(plain, x) / 2).backward()
            for (name, p), q in zip(model.named_parameters(), plain.parameters(), strict=True):
                assert (p.grad is None) == (q.grad is None), (name, picks)
            for stepper in steppers:
                stepper.step()
                stepper.zero_grad()
        unmoved = seeded(Pick).state_dict()
        for name, value in fc.state_dict(model).items():
            torch.testing.assert_close(value, plain.get_parameter(name).detach())
            kept = name == "first.bias" or name.startswith("b.")
            assert torch.equal(value, unmoved[name]) == kept, name

    run_ranks(run, 2)


def test_fullgraph_on_four_ranks_and_replicas() -> None:
    def run(rank: int) -> None:
        Trial(rank, 4, Line, traceable, backend="aot_eager", optimizer=adamw).run(graphs=1)
        torch._dynamo.reset()
        mesh = init_device_mesh("cpu", (2, 2))
        Trial(rank, 4, Line, sharded_with(mesh=mesh)).run(graphs=1)

    run_ranks(run, 4)


def test_fullgraph_gathers_again_unless_kept() -> None:
    def run(rank: int) -> None:
        for strategy, again in (("FULL_SHARD", 3), ("SHARD_GRAD_OP", 0)):
            torch._dynamo.reset()
            prepare = sharded_with(strategy=fc.ShardingStrategy[strategy])
            trial = Trial(rank, 2, Line, prepare, backend="aot_eager")
            trial.run(graphs=1)
            with fc.count_traffic() as forward:
                loss = trial.call(data(0, rank)).sum()
            with fc.count_traffic() as backward:
                loss.backward()
            assert (forward.gathers, forward.reduces) == (3, 0)
            assert (backward.gathers, backward.reduces) == (again, 3)

    run_ranks(run, 2)


def test_fullgraph_in_mixed_precision() -> None:
    half = fc.MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    back = replace(half, output_dtype=torch.float32)
    coded = fc.MixedPrecision(gather_codec=fc.int8_codec(8))

    def run(rank: int) -> None:
        for build, shard in (
            (Tower, partial(by_block, mp_policy=half)),
            (Block, partial(fc.fully_shard, mp_policy=back)),
            (Line, partial(by_block, mp_policy=coded)),
        ):
            torch._dynamo.reset()
            loose = Tolerance(rtol=0.1, atol=0.05)
            prepare = partial(traceable, shard=shard)
            trial = Trial(rank, 2, build, prepare, dtype=torch.float32, tolerance=loose)
            trial.run(graphs=1)

    run_ranks(run, 2)


def test_fullgraph_with_frozen_parameters() -> None:
    def freeze(model: nn.Module) -> None:
        model.a.requires_grad_(False)
        model.b.norm.requires_grad_(False)

    def run(rank: int) -> None:
        def prepare(model: nn.Module, backend: Any) -> Call | None:
            freeze(model)
            return traceable(model, backend)

        trial = Trial(rank, 2, Line, prepare, backend="aot_eager")
        freeze(trial.plain)
        trial.run(graphs=1)

    run_ranks(run, 2)


def test_fullgraph_with_offload_and_a_comm_hook() -> None:
    def hooked(model: nn.Module) -> None:
        by_block(model, offload_policy=fc.Offload(params=True))
        fc.register_comm_hook(model, None, fc.bf16_compress_hook)

    def run(rank: int) -> None:
        loose = Tolerance(rtol=0.05, atol=0.01)
        prepare = lambda m, b: traceable(m, b, hooked)  # noqa: E731
        Trial(rank, 2, Line, prepare, tolerance=loose).run(graphs=1)

    run_ranks(run, 2)


def test_fullgraph_accumulates_and_evaluates() -> None:
    def loss(model: nn.Module, call: Call, x: Tensor) -> Tensor:
        model.eval()
        with torch.no_grad():
            call(x)
        model.train()
        with fc.no_sync(model):
            (call(x).square().mean() / 4).backward()
        with fc.accumulate(model, keep="unsharded"):
            (call(x).square().mean() / 4).backward()
            loss = call(x).square().mean()
            (loss / 2).backward()
        return loss

    run_ranks(lambda rank: Trial(rank, 2, Line, traceable, loss=loss).run(graphs=2), 2)


def test_fullgraph_backward_for_inputs_alone() -> None:
    """Fullgraph backward for inputs alone leaves parameters alone."""

    def loss(model: nn.Module, call: Call, x: Tensor) -> Tensor:
        x = x.clone().requires_grad_()
        loss = call(x).square().mean()
        loss.backward(inputs=[x], retain_graph=True)
        (slope,) = torch.autograd.grad(loss, x, retain_graph=True)
        assert torch.equal(slope, x.grad)
        assert all(p.grad is None for p in model.parameters())
        loss.backward()
        return loss

    def run(rank: int) -> None:
        Trial(rank, 2, Line, traceable, backend="aot_eager", loss=loss).run(graphs=1)

    run_ranks(run, 2)


def test_fullgraph_gradients_of_chosen_parameters() -> None:
    """``autograd.grad`` and ``backward(inputs=)`` reach parameters of units inside the graph."""
    names = ["a.up.weight", "first.bias"]

    def run(rank: int) -> None:
        model, plain = seeded(Line), seeded(Line)
        call = traceable(model, "aot_eager")
        assert call is not None
        ours = [model.get_parameter(name) for name in names]
        theirs = [plain.get_parameter(name) for name in names]
        xs = [data(0, r) for r in range(2)]
        mean = lambda: torch.stack([square(plain, x) for x in xs]).mean()  # noqa: E731
        for _ in range(2):
            found = torch.autograd.grad(square(call, xs[rank]), ours)
            for grad, wanted in zip(found, torch.autograd.grad(mean(), theirs)):
                torch.testing.assert_close(whole(grad), wanted)
            assert all(p.grad is None for p in model.parameters())
        unused = [model.unused.weight.detach().requires_grad_()]
        assert torch.autograd.grad(square(call, xs[rank]), unused, allow_unused=True) == (None,)
        square(call, xs[rank]).backward(inputs=ours)
        mean().backward(inputs=theirs)
        for (name, p), q in zip(model.named_parameters(), plain.parameters()):
            assert (p.grad is None) == (q.grad is None) == (name not in names), name
            if q.grad is not None:
                torch.testing.assert_close(whole(p.grad), q.grad)

    run_ranks(run, 2)


def test_fullgraph_second_derivatives() -> None:
    """Fullgraph second derivatives are right or refused."""

    def run(rank: int) -> None:
        model, sharded = seeded(Line), by_block(seeded(Line))
        call = traceable(model, "eager")
        for forward in (call, sharded):
            x = data(0, rank).requires_grad_()
            (slope,) = torch.autograd.grad(square(forward, x), x, create_graph=True)
            slope.square().sum().backward()
        for p, q in zip(model.parameters(), sharded.parameters(), strict=True):
            if q.grad is not None:
                assert torch.equal(whole(p.grad), whole(q.grad))
        with pytest.raises(RuntimeError, match=r"create_graph=True.*run it uncompiled"):
            square(call, x).backward(create_graph=True)

    run_ranks(run, 2)


def test_fullgraph_around_checkpoints() -> None:
    """Fullgraph around checkpoints needs a setting of torch."""

    def run(rank: int) -> None:
        call = traceable(seeded(Checkpointed), "eager")
        with pytest.raises(torch._dynamo.exc.Unsupported, match="skip_fwd_side_effects"):
            call(data(0, rank))
        torch._dynamo.reset()
        with torch._dynamo.config.patch(skip_fwd_side_effects_in_bwd_under_checkpoint=True):
            Trial(rank, 2, Checkpointed, traceable, backend="aot_eager").run(graphs=1)

    run_ranks(run, 2)


def test_what_a_graph_rests_on_may_not_change_unseen() -> None:
    def run(rank: int) -> None:
        trial = Trial(rank, 2, Line, traceable)
        trial.run(graphs=1)
        for model in (trial.model, trial.sharded, trial.plain):
            model.a.requires_grad_(False)
        trial.call(data(0, rank))

    errors = rank_errors(run, 2)
    assert len(errors) == 2
    for error in errors:
        assert "parameters of unit 'a' were frozen, unfrozen, converted or" in str(error)
        assert "set_traceable(model) again" in str(error)

    def again(rank: int) -> None:
        trial = Trial(rank, 2, Line, traceable)
        trial.run(graphs=1)
        for model in (trial.model, trial.sharded, trial.plain):
            model.a.requires_grad_(False)
        fc.set_traceable(trial.model)
        trial.step(0)
        trial.step(1)
        assert trial.counter.frame_count == 2
        trial.check()

    run_ranks(again, 2)


def one_graph(model: nn.Module, backend: str = "eager") -> Call:
    return torch.compile(lambda x: model(x), backend=backend, fullgraph=True)


def test_fullgraph_sees_writes_before_backward() -> None:
    model = by_block(seeded(Line))
    fc.set_traceable(model)
    call = one_graph(model, "aot_eager")
    loss, other = square(call, data(0, 0)), square(call, data(1, 0))
    other.backward()
    sgd(model.parameters()).step()
    with pytest.raises(RuntimeError, match="was written between the unit's forward and this"):
        loss.backward()
    model.zero_grad()
    square(call, data(0, 0)).backward()
    grads = [None if p.grad is None else whole(p.grad) for p in model.parameters()]
    model.zero_grad()
    square(model, data(0, 0)).backward()
    for grad, p in zip(grads, model.parameters(), strict=True):
        assert (grad is None) == (p.grad is None)
        if grad is not None:
            torch.testing.assert_close(grad, whole(p.grad))
    torch._dynamo.reset()


def test_a_traceable_unit_that_was_refreshed() -> None:
    model = by_block(seeded(Line))
    fc.set_traceable(model)
    call = one_graph(model)
    model.a.up = nn.Sequential(model.a.up, nn.Linear(7, 7).double())
    fc.refresh(model)
    with pytest.raises(RuntimeError, match=r"were.*exchanged since.*set_traceable"):
        call(data(0, 0))
    fc.set_traceable(model)
    assert torch.equal(call(data(0, 0)), model(data(0, 0)))
    torch._dynamo.reset()


def test_traceable_or_not_copied_or_undone() -> None:
    def run(rank: int) -> None:
        model = by_block(seeded(Line))
        before = [dict(m._forward_pre_hooks) for m in model.modules()]
        fc.set_traceable(model)
        assert before != [dict(m._forward_pre_hooks) for m in model.modules()]
        twin = copy.deepcopy(model)
        fc.set_traceable(model, False)
        assert before == [dict(m._forward_pre_hooks) for m in model.modules()]
        call = one_graph(model)
        with pytest.raises(torch._dynamo.exc.Unsupported, match="before_forward"):
            call(data(0, rank))
        x = data(0, rank)
        wanted = square(model, x)
        assert torch.equal(square(twin, x), wanted)  # a copy is not traceable until it is made so
        fc.set_traceable(twin)
        over_twin = one_graph(twin)
        del model, call
        gc.collect()
        assert torch.equal(square(over_twin, x), wanted)
        fc.undo(twin)
        assert not any(m._forward_pre_hooks or m._forward_hooks for m in twin.modules())
        assert torch.equal(square(twin, x), wanted)

    run_ranks(run, 2)


def test_set_traceable_says_what_it_cannot_do() -> None:
    with pytest.raises(ValueError, match="Linear is not a unit and contains none"):
        fc.set_traceable(nn.Linear(2, 2))
    root = fc.fully_shard(Block(), mp_policy=fc.MixedPrecision(cast_forward_inputs="root"))
    with pytest.raises(ValueError, match=r'cast_forward_inputs="root"'):
        fc.set_traceable(root)
    recurrent = fc.fully_shard(nn.GRU(2, 2))
    with pytest.raises(ValueError, match="unit 'GRU' has a recurrent module"):
        fc.set_traceable(recurrent)


def test_operators_have_fake_implementations() -> None:
    def run(rank: int) -> None:
        model = by_block(seeded(Line))
        fc.set_traceable(model)
        traced = units(model)[1].traced
        gather = torch.ops.fsdp_compose.gather
        arguments = (traced.anchor.detach(), traced.key)
        results = torch.library.opcheck(gather.default, arguments)
        assert set(results.values()) == {"SUCCESS"}
        full = gather(*arguments)
        fake = make_fx(lambda a: gather(a, traced.key), tracing_mode="fake")(arguments[0])
        outputs = [n.meta["val"] for n in fake.graph.nodes if n.target is operator.getitem]
        for real, planned in zip(full, outputs, strict=True):
            assert real.shape == planned.shape and real.stride() == planned.stride()
            assert real.dtype == planned.dtype

    run_ranks(run, 2)


@pytest.mark.slow
def test_inductor() -> None:
    def run(rank: int) -> None:
        torch._inductor.config.compile_threads = 1
        model, plain = seeded(Again), by_block(seeded(Again))
        call = traceable(model, "inductor")
        optimizers = [sgd(m.parameters()) for m in (model, plain)]
        for seed in range(3):
            x = data(seed, rank)
            with torch.compiler.set_stance("fail_on_recompile" if seed else "default"):
                found = square(model if call is None else call, x)
            wanted = square(plain, x)
            compare("loss", found.detach(), wanted.detach(), Tolerance())
            for loss, optimizer in zip((found, wanted), optimizers, strict=True):
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
        for p, q in zip(model.parameters(), plain.parameters(), strict=True):
            compare("parameter", whole(p), whole(q), Tolerance())

    run_ranks(run, 2, timeout=300)


def test_a_rank_that_runs_uncompiled_is_told_at_once() -> None:
    """As one does that has met a limit on compiled shapes; no rank waits for the timeout."""

    def run(rank: int) -> None:
        model = fc.fully_shard(seeded(Tower), units=fc.wrap.by_class({Block}))
        fc.set_traceable(model)
        call = torch.compile(model, backend="aot_eager", fullgraph=True) if rank else model
        call(data(0, rank)).square().mean().backward()

    for error in rank_errors(run, 2):
        assert error is not None and "ranks run different units" in error, error
