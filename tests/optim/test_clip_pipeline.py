"""Norms and clipping over the stages of a pipeline are those of the whole model."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from fsdp_compose import clip_grad_norm_, fully_shard, grad_norm, simulate

from models import Block, Tolerance, compare, data, seeded, square, whole

ORDERS = [2.0, 1.0, 3.5, math.inf, -math.inf, -1.0, 0.0]


def meshes() -> tuple[DeviceMesh, DeviceMesh]:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "dp"))
    return mesh["pp"], mesh["dp"]


class Stages:
    """This rank's stage of two, with gradients, beside both on one process."""

    def __init__(self, frozen: int | None = None, **options: Any) -> None:
        self.pp, mesh = meshes()
        self.plain = [seeded(Block, index) for index in range(2)]
        index = self.pp.get_local_rank()
        self.stage = fully_shard(seeded(Block, index), mesh=mesh, **options)
        self.own = self.plain[index]
        for place, part in enumerate(self.plain):
            part.requires_grad_(place != frozen)
        if index == frozen:
            self.stage.requires_grad_(False)
        else:
            square(self.stage, data(index, mesh.get_local_rank())).backward()
        for place, part in enumerate(self.plain):
            if place != frozen:
                (sum(square(part, data(place, rank)) for rank in range(2)) / 2).backward()

    @property
    def parameters(self) -> list[nn.Parameter]:
        return [param for part in self.plain for param in part.parameters()]

    def compare_gradients(self) -> None:
        for ours, theirs in zip(self.stage.parameters(), self.own.parameters(), strict=True):
            if theirs.grad is not None:
                compare("gradient", whole(ours.grad), theirs.grad, Tolerance())


@pytest.mark.parametrize("options", [{}, {"deterministic": 2}], ids=["plain", "deterministic"])
def test_the_norm_is_that_of_all_stages(options: dict[str, Any]) -> None:
    def check() -> list[float]:
        stages = Stages(**options)
        found = []
        for order in ORDERS:
            wanted = nn.utils.get_total_norm([p.grad for p in stages.parameters], order)
            norm = grad_norm(stages.stage, order, pipeline_mesh=stages.pp)
            compare(f"norm of order {order}", norm, wanted, Tolerance())
            found.append(norm.item())
        wanted = nn.utils.clip_grad_norm_(stages.parameters, 0.1)
        norm = clip_grad_norm_(stages.stage.parameters(), 0.1, pipeline_mesh=stages.pp.get_group())
        compare("norm", norm, wanted, Tolerance())
        stages.compare_gradients()
        return [*found, norm.item()]

    found = simulate(check, 4)
    assert all(ranks == found[0] for ranks in found)


def test_each_stage_alone_has_a_norm_of_its_own() -> None:
    def check() -> None:
        stages = Stages()
        wanted = nn.utils.get_total_norm([p.grad for p in stages.own.parameters()])
        compare("norm", grad_norm(stages.stage), wanted, Tolerance())

    simulate(check, 4)


@pytest.mark.parametrize("order", [2.0, math.inf, -math.inf, -1.0])
def test_a_stage_without_gradients(order: float) -> None:
    """It takes part, and changes nothing."""

    def check() -> None:
        stages = Stages(frozen=1)
        grads = [p.grad for p in stages.parameters if p.grad is not None]
        norm = clip_grad_norm_(stages.stage, 0.1, order, pipeline_mesh=stages.pp)
        wanted = nn.utils.get_total_norm(grads, order)
        compare("norm", norm.to(wanted.dtype), wanted, Tolerance(1e-6))  # fp32 without gradients
        nn.utils.clip_grad_norm_(stages.parameters, 0.1, order)
        stages.compare_gradients()

    simulate(check, 4)


def test_what_is_not_finite_is_named_on_every_rank() -> None:
    """Also on ranks of the other stage; and nothing is scaled."""

    def check() -> str:
        stages = Stages()
        if stages.pp.get_local_rank() == 1:
            grad = next(stages.stage.parameters()).grad
            assert grad is not None
            grad.fill_(math.nan)
        with pytest.raises(RuntimeError) as caught:
            clip_grad_norm_(stages.stage, 0.1, error_if_nonfinite=True, pipeline_mesh=stages.pp)
        if stages.pp.get_local_rank() == 0:
            stages.compare_gradients()
        return str(caught.value)

    errors = simulate(check, 4)
    assert set(errors) == {errors[0]} and "the gradient of" in errors[0]


def test_stages_clip_to_one_limit() -> None:
    """Ranks that were given others are told, before anything is scaled."""

    def check() -> None:
        stages = Stages()
        limit = 0.1 if stages.pp.get_local_rank() else 0.2
        with pytest.raises(RuntimeError, match="of all stages"):
            clip_grad_norm_(stages.stage, limit, pipeline_mesh=stages.pp)
        stages.compare_gradients()

    simulate(check, 4)


def test_one_rank_of_a_pipeline() -> None:
    """A mesh of one stage gives the norm of that stage."""

    def check() -> None:
        mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("pp", "dp"))
        model = fully_shard(seeded(Block), mesh=mesh["dp"])
        square(model, data(0, dist.get_rank())).backward()
        assert torch.equal(grad_norm(model, pipeline_mesh=mesh["pp"]), grad_norm(model))

    simulate(check, 2)
