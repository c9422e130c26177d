"""Pipeline schedules of torch over sharded stages equal one process, and reduce once."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.pipelining import (
    PipelineStage,
    Schedule1F1B,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
    ScheduleInterleavedZeroBubble,
    ScheduleZBVZeroBubble,
    SplitPoint,
    pipeline,
)
from torch.utils.checkpoint import checkpoint

from fsdp_compose import (
    ShardingStrategy,
    accumulate,
    clip_grad_norm_,
    count_traffic,
    fully_shard,
    grad_norm,
    no_sync,
    pending_gradients,
    pipeline_stage,
    skippable_step,
)

from harness import TORCH, rank_errors, run_ranks, simulate_ranks
from models import (
    WIDTH,
    Block,
    MakeOptimizer,
    Tolerance,
    adamw,
    assert_at_rest,
    by_block,
    compare,
    data,
    seeded,
    sgd,
    whole,
)

MICROBATCHES = 4
BATCH = 8
DEPTH = 2
BUCKETS = DEPTH + 1  # each block's, and the stage's own
SCHEDULES = {
    "gpipe": ScheduleGPipe,
    "1f1b": Schedule1F1B,
    "interleaved": ScheduleInterleaved1F1B,
    "zero bubble": ScheduleInterleavedZeroBubble,
    "v": ScheduleZBVZeroBubble,
}
if TORCH < (2, 13):
    del SCHEDULES["v"]  # on gloo its sends and receives fail to connect there
PLACES = {"v": ([0, 3], [1, 2]), "interleaved": ([0, 2], [1, 3]), "zero bubble": ([0, 2], [1, 3])}


class Part(nn.Module):
    """A stage: a layer of its own, then blocks, some of which recompute."""

    def __init__(self, recompute: str = "") -> None:
        super().__init__()
        self.recompute = recompute
        self.first = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(DEPTH))

    def forward(self, x: Tensor) -> Tensor:
        if self.recompute == "inside":  # a part of the stage's own unit
            x = checkpoint(self.first, x, use_reentrant=False)
        else:
            x = self.first(x)
        for block in self.blocks:
            if self.recompute:
                x = checkpoint(block, x, use_reentrant=False)
            else:
                x = block(x)
        return x


def loss_of(output: Tensor, target: Tensor) -> Tensor:
    return (output - target).square().mean()


class Pipeline:
    """This rank's stages of a pipeline over 2 x 2 ranks, beside the whole on one process."""

    def __init__(
        self, schedule: str, recompute: str = "", adapt: bool = True, **shard: Any
    ) -> None:
        self.mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "dp"))
        pp = self.mesh["pp"].get_local_rank()
        self.dp = self.mesh["dp"].get_local_rank()
        self.mine = PLACES[schedule][pp] if schedule in PLACES else [pp]
        self.last = 3 if schedule in PLACES else 1
        build = lambda: Part(recompute)  # noqa: E731
        self.plain = nn.Sequential(*(seeded(Part, i) for i in range(self.last + 1)))
        self.parts = {i: seeded(build, i) for i in self.mine}
        group = self.mesh.get_group("pp")
        stages = []
        for i, part in self.parts.items():
            by_block(part, mesh=self.mesh["dp"], **shard)
            stage = PipelineStage(part, i, self.last + 1, torch.device("cpu"), group=group)
            stages.append(pipeline_stage(stage) if adapt else stage)
        several: Any = SCHEDULES[schedule]
        self.schedule = several(
            stages if schedule in PLACES else stages[0], MICROBATCHES, loss_fn=loss_of
        )

    @property
    def parameters(self) -> list[nn.Parameter]:
        return [p for part in self.parts.values() for p in part.parameters()]

    def step(self, seed: int) -> dict[str, int]:
        """Losses and gradients agree with the plain side's; what the schedule communicated."""
        xs = [data(seed, r, BATCH, WIDTH) for r in range(2)]
        targets = [data(seed, 10 + r, BATCH, WIDTH) for r in range(2)]
        losses: list[Tensor] = []
        last = self.last in self.mine
        kwargs: Any = {"target": targets[self.dp], "losses": losses} if last else {}
        with count_traffic() as traffic:
            self.schedule.step(*((xs[self.dp],) if 0 in self.mine else ()), **kwargs)
        wanted = [loss_of(self.plain(x), t) for x, t in zip(xs, targets)]
        (sum(wanted) / 2).backward()
        if last:
            assert len(losses) == MICROBATCHES
            compare("loss", torch.stack(losses).mean(), wanted[self.dp].detach(), Tolerance())
        self.check("gradient", lambda p: p.grad)
        return traffic.to_dict()

    def check(self, what: str, get: Callable[[nn.Parameter], Any]) -> None:
        for i, part in self.parts.items():
            assert_at_rest(part)
            for (name, ours), theirs in zip(part.named_parameters(), self.plain[i].parameters()):
                found, wanted = get(ours), get(theirs)
                assert found is not None, f"{name} has no {what}"
                compare(f"{what} of {i}.{name}", whole(found), wanted.detach(), Tolerance())

    def train(self, optimizer: MakeOptimizer = sgd) -> list[dict[str, int]]:
        optims = optimizer(self.parameters), optimizer(self.plain.parameters())
        reports = []
        for seed in range(3):
            reports.append(self.step(seed))
            for optim in optims:
                optim.step()
                optim.zero_grad()
        self.check("value", lambda p: p)
        return reports


def train(rank: int, schedule: str, optimizer: MakeOptimizer, **options: Any) -> Any:
    return Pipeline(schedule, **options).train(optimizer)


@pytest.mark.parametrize(
    ("schedule", "optimizer"), [*((schedule, sgd) for schedule in SCHEDULES), ("1f1b", adamw)]
)
def test_a_step_equals_one_process_and_reduces_once(
    schedule: str, optimizer: MakeOptimizer
) -> None:
    """The first step also tries shapes out, so gathers are counted after it."""
    stages = 2 if schedule in PLACES else 1
    for reports in run_ranks(train, 4, schedule, optimizer):
        assert [report["reduces"] for report in reports] == [stages * BUCKETS] * 3
        if schedule == "v":
            continue  # stages of two orders meet on a rank, so one gather ahead may be in vain
        # The stage's own bucket stays from forward to backward where nothing else comes between.
        each = MICROBATCHES * (2 * DEPTH + 1)
        assert [report["gathers"] for report in reports[1:]] == [stages * each] * 2


@pytest.mark.parametrize("schedule", ["gpipe", "interleaved", "zero bubble"])
def test_zero1_gathers_once_a_step(schedule: str) -> None:
    stages = 2 if schedule in PLACES else 1
    for reports in run_ranks(train, 4, schedule, sgd, strategy=ShardingStrategy.ZERO1):
        counts = [(report["gathers"], report["reduces"]) for report in reports[1:]]
        assert counts == [(stages * BUCKETS, stages * BUCKETS)] * 2


def test_a_stage_that_was_not_adapted() -> None:
    """A stage that was not adapted reduces for each microbatch."""
    for reports in run_ranks(train, 4, "1f1b", sgd, adapt=False):
        assert [report["reduces"] for report in reports] == [MICROBATCHES * BUCKETS] * 3


@pytest.mark.parametrize(
    ("schedule", "recompute"), [("gpipe", "inside"), ("gpipe", "units"), ("1f1b", "inside")]
)
def test_activation_checkpointing_in_stages(schedule: str, recompute: str) -> None:
    """Several forwards wait for their backward, whose recomputations read the right weights."""
    for reports in run_ranks(train, 4, schedule, sgd, recompute=recompute):
        assert [report["reduces"] for report in reports] == [BUCKETS] * 3


def test_what_the_last_microbatch_does_not_use() -> None:
    """A block that runs in the first microbatch alone has its gradients in the step's end."""

    class Skipping(Part):
        def forward(self, x: Tensor) -> Tensor:
            x = self.first(x)
            return self.blocks[0](x) if bool(x.detach().sum() > 0) else self.blocks[1](x) * 2

    def ranks(rank: int) -> dict[str, bool]:
        mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("pp", "dp"))
        part, plain = seeded(Skipping), seeded(Skipping)
        by_block(part, mesh=mesh["dp"])
        stage = PipelineStage(part, 0, 1, torch.device("cpu"), group=mesh.get_group("pp"))
        schedule = ScheduleGPipe(pipeline_stage(stage), 2, loss_fn=loss_of)
        sign = torch.tensor([1.0, -1.0], dtype=torch.float64).repeat_interleave(BATCH // 2)
        x = 9 * sign[:, None] * plain.first.weight.sum(0).sign()[None].detach()  # alike on ranks
        target = data(0, rank, BATCH, WIDTH)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the order of units changes
            schedule.step(x, target=target)
        targets = [data(0, r, BATCH, WIDTH).chunk(2) for r in range(2)]
        losses = [loss_of(plain(a), t) for ts in targets for a, t in zip(x.chunk(2), ts)]
        (sum(losses) / 4).backward()
        for (name, ours), theirs in zip(part.named_parameters(), plain.parameters()):
            assert theirs.grad is not None
            compare(name, whole(ours.grad), theirs.grad, Tolerance())
        return {}

    run_ranks(ranks)


class Whole(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = Part(), Part()

    def forward(self, x: Tensor) -> Tensor:
        return self.b(self.a(x))


@pytest.mark.filterwarnings("ignore")
def test_stages_that_torch_traced() -> None:
    """A stage cut from a traced model is sharded as any module is."""

    def ranks(rank: int) -> None:
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "dp"))
        pp, dp = (mesh[name].get_local_rank() for name in ("pp", "dp"))
        model, plain = seeded(Whole), seeded(Whole)
        example = data(0, 0, BATCH // MICROBATCHES, WIDTH)
        pipe = pipeline(model, (example,), split_spec={"b": SplitPoint.BEGINNING})
        part = pipe.get_stage_module(pp)
        fully_shard(part, mesh=mesh["dp"])
        stage = pipe.build_stage(pp, torch.device("cpu"), mesh.get_group("pp"))
        schedule = Schedule1F1B(pipeline_stage(stage), MICROBATCHES, loss_fn=loss_of)
        xs, targets = ([data(n, r, BATCH, WIDTH) for r in range(2)] for n in (1, 2))
        with count_traffic() as traffic:
            schedule.step(*((xs[dp],) if pp == 0 else ()), target=targets[dp] if pp else None)
        (sum(loss_of(plain(x), t) for x, t in zip(xs, targets)) / 2).backward()
        theirs = dict(plain.named_parameters())
        for name, param in part.named_parameters():
            compare(name, whole(param.grad), theirs[name].grad, Tolerance())
        assert traffic.reduces == 1

    run_ranks(ranks, 4)


def test_evaluation_and_a_changed_number_of_steps() -> None:
    def ranks(rank: int) -> None:
        pipeline = Pipeline("1f1b")
        pipeline.train()
        x = data(7, pipeline.dp, BATCH, WIDTH)
        with torch.no_grad():
            last = pipeline.last in pipeline.mine
            kwargs: Any = {"target": x, "losses": []} if last else {}
            output = pipeline.schedule.eval(*((x,) if 0 in pipeline.mine else ()), **kwargs)
            if last:
                compare("output", output, pipeline.plain(x), Tolerance())
        pipeline.train()

    run_ranks(ranks, 4)


@pytest.mark.parametrize("schedule", ["gpipe", "interleaved"])
def test_clipping_by_the_norm_of_all_stages(schedule: str) -> None:
    """As the whole model's in one process; ``grad_norm`` of a stage alone is that stage's."""

    def ranks(rank: int) -> None:
        pipeline = Pipeline(schedule)
        pipeline.step(0)
        for i, part in pipeline.parts.items():
            own = torch.nn.utils.get_total_norm([p.grad for p in pipeline.plain[i].parameters()])
            compare("norm of a stage", grad_norm(part), own, Tolerance())
        wanted = torch.nn.utils.clip_grad_norm_(pipeline.plain.parameters(), 0.1)
        stages = pipeline.mesh["pp"]
        found = clip_grad_norm_(pipeline.parameters, 0.1, pipeline_mesh=stages)
        compare("norm", found, wanted, Tolerance())
        pipeline.check("clipped gradient", lambda p: p.grad)

    run_ranks(ranks, 4)


def test_a_step_that_all_stages_discard() -> None:
    """The last stage sees the loss; each stage's gradients stay as they were before the step."""

    def ranks(rank: int) -> None:
        pipeline = Pipeline("gpipe")
        stages = pipeline.mesh["pp"]
        (stage,) = pipeline.parts.values()
        for seed, bad in ((0, False), (1, True), (2, False)):
            last = pipeline.last in pipeline.mine
            with skippable_step(stage, pipeline_mesh=stages) as step:
                if bad:
                    x = data(seed, pipeline.dp, BATCH, WIDTH)
                    target = data(seed, 10 + pipeline.dp, BATCH, WIDTH)
                    kwargs: Any = {"target": target, "losses": []} if last else {}
                    pipeline.schedule.step(*(() if last else (x,)), **kwargs)
                    if last and pipeline.dp:
                        step.check(float("nan"))
                else:
                    pipeline.step(seed)
            assert step.skipped == bad
            assert step.reasons == ({3: "the loss is not finite"} if bad else {})
            if bad:
                assert all(param.grad is None for param in stage.parameters())
            stage.zero_grad()
            pipeline.plain.zero_grad()

    run_ranks(ranks, 4)


@pytest.mark.parametrize("scope", ["no_sync", "accumulate", "leftover"])
def test_gradients_divided_wrongly_are_an_error(scope: str) -> None:
    """Gradients that the schedule would divide wrongly are an error."""

    def ranks(rank: int) -> None:
        pipeline = Pipeline("1f1b")
        scopes = contextlib.ExitStack()
        for part in pipeline.parts.values():
            if scope == "no_sync":
                scopes.enter_context(no_sync(part))
            elif scope == "accumulate":
                scopes.enter_context(accumulate(part, keep="unsharded"))
        with scopes:
            if scope == "leftover":
                pipeline.step(0)
            pipeline.step(1)

    wanted = "had a gradient before" if scope == "leftover" else "postpones its reductions"
    for error in rank_errors(ranks, 4):
        assert error is not None and error.startswith("RuntimeError") and wanted in error
        assert "scale_grads=False" in error


@pytest.mark.parametrize("earlier", [False, True])
def test_gradients_found_after_a_failed_step(earlier: bool) -> None:
    """A step looks at those before it, not at those before the one that failed.

    It is of another schedule: torch's would go on with losses of the one that failed.
    """

    def ranks(rank: int) -> str:
        mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("pp", "dp"))
        part = by_block(seeded(Part), mesh=mesh["dp"])
        stage = PipelineStage(part, 0, 1, torch.device("cpu"), group=mesh.get_group("pp"))
        failures = [TypeError]

        def failing(output: Tensor, target: Tensor) -> Tensor:
            if failures and pending_gradients(part):  # after the first microbatch's backward
                raise failures.pop()
            return loss_of(output, target)

        pipeline_stage(stage)
        x, gradients = data(0, rank, BATCH, WIDTH), lambda: loss_of(part(x), x).backward()
        if earlier:
            gradients()
        failed = Schedule1F1B(stage, 2, loss_fn=failing)
        with pytest.raises(TypeError):
            failed.step(x, target=x)
        part.zero_grad()
        if not earlier:
            gradients()
        with pytest.raises(RuntimeError, match=r"a loss of an earlier schedule.step\(\)"):
            failed.step(x, target=x)
        try:
            Schedule1F1B(stage, 2, loss_fn=failing).step(x, target=x)
        except RuntimeError as error:
            return str(error)
        return ""

    for error in simulate_ranks(ranks):
        assert error.count("had a gradient before schedule.step()") == (not earlier)


def test_steps_accumulate_where_the_loss_is_divided() -> None:
    """Those in ``no_sync`` reduce nothing; the next step that is not reduces for them."""

    def ranks(rank: int) -> None:
        pipeline = Pipeline("gpipe")
        pipeline.schedule.scale_grads = False
        pipeline.schedule._loss_fn = lambda o, t: loss_of(o, t) / MICROBATCHES
        for seed in range(3):
            x, target = data(seed, pipeline.dp, BATCH, WIDTH), data(seed, 9, BATCH, WIDTH)
            with contextlib.ExitStack() as scopes:
                parts = pipeline.parts.values() if seed == 1 else ()
                for part in parts:
                    scopes.enter_context(no_sync(part))
                if 0 in pipeline.mine:
                    pipeline.schedule.step(x)
                else:
                    pipeline.schedule.step(target=target)
                assert all(map(pending_gradients, parts))
            losses = [loss_of(pipeline.plain(data(seed, r, BATCH, WIDTH)), target) for r in (0, 1)]
            (sum(losses) / 2).backward()
        pipeline.check("gradient", lambda p: p.grad)

    run_ranks(ranks, 4)


def test_a_stage_without_units_is_an_error() -> None:
    def ranks(rank: int) -> None:
        stage = PipelineStage(Part(), rank, 2, torch.device("cpu"))
        pipeline_stage(stage)

    for error in rank_errors(ranks):
        assert error is not None and error.startswith(
            "ValueError: pipeline_stage: Part is not a unit"
        )


def test_an_earlier_pipeline_does_not_hold_up_the_next() -> None:
    """Ranks that shared a stage of the first model are different stages of the second.

    What the first left behind, reduced after its last backward, is not compared in the second's
    steps: a rank that waits for its former partner there would keep the gradient from it.
    """

    def ranks(rank: int) -> None:
        first = Pipeline("v" if "v" in SCHEDULES else "zero bubble")
        first.train()
        pp = init_device_mesh("cpu", (4,), mesh_dim_names=("pp",))
        part = by_block(
            seeded(Part, rank), mesh=dist.new_group([rank], use_local_synchronization=True)
        )
        plain = nn.Sequential(*(seeded(Part, i) for i in range(4)))
        stage = PipelineStage(part, rank, 4, torch.device("cpu"), group=pp.get_group())
        schedule = Schedule1F1B(pipeline_stage(stage), MICROBATCHES, loss_fn=loss_of)
        optims = sgd(part.parameters()), sgd(plain.parameters())
        for seed in range(2):
            x = data(seed, 0, BATCH, WIDTH)
            schedule.step(*((x,) if rank == 0 else ()), **({"target": x} if rank == 3 else {}))
            loss_of(plain(x), x).backward()
            for optim in optims:
                optim.step()
                optim.zero_grad()
        for (name, ours), theirs in zip(part.named_parameters(), plain[rank].parameters()):
            compare(name, whole(ours), theirs.detach(), Tolerance())
        first.train()  # which still works

    run_ranks(ranks, 4)
