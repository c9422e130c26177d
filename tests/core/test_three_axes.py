"""Tensor, pipeline and data parallelism at once, on 8 simulated ranks, equal one process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)

from fsdp_compose import (
    ShardingStrategy,
    clip_grad_norm_,
    fully_shard,
    load_checkpoint,
    pipeline_stage,
    save_checkpoint,
    simulate,
    wrap,
)

from models import Tolerance, compare, data, seeded, whole

WIDTH, BATCH, STEPS, LIMIT = 8, 8, 3, 0.5


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        added: Tensor = self.down(self.up(self.norm(x)).relu())
        return x + added


class Stage(nn.Module):
    """Layers ``start`` to ``end``, named as in the whole model."""

    def __init__(self, layers: nn.ModuleDict, start: int, end: int) -> None:
        super().__init__()
        self.layers = nn.ModuleDict({str(i): layers[str(i)] for i in range(start, end)})

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers.values():
            x = layer(x)
        return x


def build() -> Stage:
    return Stage(seeded(lambda: nn.ModuleDict({str(i): Layer() for i in range(4)})), 0, 4)


def loss_of(y: Tensor, target: Tensor) -> Tensor:
    return (y - target).square().mean()


def optimizer_of(module: nn.Module) -> torch.optim.SGD:
    return torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9)


def train_plain(steps: int) -> tuple[Stage, list[float]]:
    model, norms = build(), []
    optim = optimizer_of(model)
    for step in range(steps):
        for rank in range(2):
            x, target = (data(step + 10 * n, rank, BATCH, WIDTH) for n in range(2))
            (loss_of(model(x), target) / 2).backward()
        norms.append(nn.utils.clip_grad_norm_(model.parameters(), LIMIT).item())
        optim.step()
        optim.zero_grad()
    return model, norms


def shard(mesh: DeviceMesh, **options: Any) -> Stage:
    """This rank's stage of two, each layer split over tp and sharded over dp."""
    place = mesh.get_local_rank("pp")
    stage = Stage(build().layers, 2 * place, 2 * place + 2)
    for layer in stage.layers.values():
        plan = {"up": ColwiseParallel(), "down": RowwiseParallel()}
        parallelize_module(layer, mesh["tp"], plan)
    return fully_shard(stage, mesh=mesh["dp"], units=wrap.by_class(Layer), **options)


def train(
    mesh: DeviceMesh, stage: Stage, schedule: Any, steps: range, optim: torch.optim.Optimizer
) -> list[float]:
    place, norms = mesh.get_local_rank("pp"), []
    group = mesh.get_group("pp")
    piped = pipeline_stage(PipelineStage(stage, place, 2, torch.device("cpu"), group=group))
    run = schedule(piped, 4, loss_fn=loss_of)
    for step in steps:
        x, target = (data(step + 10 * n, mesh.get_local_rank("dp"), BATCH, WIDTH) for n in range(2))
        run.step(x) if place == 0 else run.step(target=target)
        norms.append(clip_grad_norm_(stage, LIMIT, pipeline_mesh=mesh["pp"]).item())
        optim.step()
        optim.zero_grad()
    return norms


@pytest.mark.parametrize(
    ("schedule", "strategy"), [(ScheduleGPipe, None), (Schedule1F1B, ShardingStrategy.ZERO1)]
)
def test_three_axes_equal_one_process(
    schedule: Any, strategy: ShardingStrategy | None, tmp_path: Path
) -> None:
    """Weights, the norm of all stages, and training on from a checkpoint of all ranks."""
    options = {} if strategy is None else {"strategy": strategy}
    plain, norms = train_plain(STEPS)

    def ranks() -> None:
        mesh = init_device_mesh("cpu", (2, 2, 2), mesh_dim_names=("pp", "dp", "tp"))
        world = dist.group.WORLD
        stage = shard(mesh, **options)
        optim = optimizer_of(stage)
        found = train(mesh, stage, schedule, range(STEPS - 1), optim)
        save_checkpoint(tmp_path, stage, optim, process_group=world)
        again = shard(mesh, **options)
        optim = optimizer_of(again)
        load_checkpoint(tmp_path, again, optim, process_group=world)
        found += train(mesh, again, schedule, range(STEPS - 1, STEPS), optim)
        assert found == pytest.approx(norms, rel=1e-12)
        for name, param in again.named_parameters():
            compare(name, whole(param), plain.get_parameter(name).detach(), Tolerance())

    simulate(ranks, 8)
