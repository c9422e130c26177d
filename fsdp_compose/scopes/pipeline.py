"""Pipeline stages of ``torch.distributed.pipelining`` that reduce gradients once per step.

A schedule runs forwards and backwards of several microbatches in an order of its own, for which a
sharded module needs nothing. What a stage adds is when to reduce: gradients of all microbatches but
the last add up unsharded, and those of the last take them along.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol, TypeVar

from torch import nn

from fsdp_compose.base.arguments import describe_value
from fsdp_compose.base.torch_private import made_at, next_node_number
from fsdp_compose.core.guards.microbatches import refuse_postponing
from fsdp_compose.core.guards.plain_gradients import share_plain_gradients
from fsdp_compose.core.guards.units import require_units
from fsdp_compose.core.schedule import Hold
from fsdp_compose.core.state import iter_units
from fsdp_compose.scopes.switches import no_sync
from fsdp_compose.scopes.unshard import reduce_grads


class Stage(Protocol):
    """What is used of a ``PipelineStage``."""

    submod: nn.Module
    clear_runtime_states: Callable[[], None]
    backward_maybe_with_nosync: Callable[..., Any]
    perform_reduce_grad: Callable[[int], None]


StageT = TypeVar("StageT", bound=Stage)


def pipeline_stage(stage: StageT) -> StageT:
    """Have ``stage`` reduce each bucket's gradients once per ``schedule.step()``.

    ::

        fully_shard(part, mesh=mesh["dp"], units=wrap.by_class({Block}))
        stage = PipelineStage(part, index, stages, device, group=mesh.get_group("pp"))
        schedule = Schedule1F1B(pipeline_stage(stage), microbatches, loss_fn)

    Without it results are the same, and every microbatch reduces. The reductions run beside the
    backward of the last microbatch; the schedule divides by the number of microbatches after them,
    so choose its ``scale_grads`` by the loss, as ever. ``FULL_SHARD`` gathers for each microbatch,
    in forward and in backward; ``ZERO1`` gathers once a step and keeps the whole stage until its
    last backward. Schedules that split a backward into inputs and weights (zero bubble) do both
    in the first part here, since a unit's gradients arrive together: results are the same, the
    bubble stays.

    Args:
        stage: made by ``PipelineStage`` or ``pipe.build_stage``, of a module that contains units.
            Where a rank has several, each.

    Returns:
        ``stage``.

    Raises:
        ValueError: the stage's module contains no unit.
        TypeError: ``stage`` is something else, such as the module itself.
        RuntimeError: in ``schedule.step()``: inside ``no_sync`` or another scope that postpones
            reductions, or with gradients of an earlier step still in ``.grad``, if the schedule
            divides gradients, which would then be divided never or twice; or after a step that
            failed, of whose losses torch's schedules go on: make a new schedule.

    Example:
        >>> from torch.distributed.pipelining import PipelineStage, ScheduleGPipe
        >>> def train():
        ...     sizes, names = (2, 1), ("dp", "pp")
        ...     mesh = torch.distributed.init_device_mesh("cpu", sizes, mesh_dim_names=names)
        ...     part = fully_shard(nn.Linear(2, 1), mesh=mesh["dp"])
        ...     stage = PipelineStage(part, 0, 1, torch.device("cpu"), group=mesh.get_group("pp"))
        ...     schedule = ScheduleGPipe(pipeline_stage(stage), 2, nn.functional.mse_loss)
        ...     schedule.step(torch.ones(4, 2), target=torch.zeros(4, 1))
        ...     return part.weight.grad is not None
        >>> simulate(train, 2)
        [True, True]
    """
    if not isinstance(getattr(stage, "submod", None), nn.Module):
        raise TypeError(
            f"pipeline_stage: stage is {describe_value(stage)}; wanted a stage of "
            "torch.distributed.pipelining, such as PipelineStage(module, ...)."
        )
    require_units(stage.submod, "pipeline_stage", advice="Shard the stage's module first.")
    refuse_postponing(iter_units(stage.submod), "pipeline_stage")
    start, finish = stage.clear_runtime_states, stage.perform_reduce_grad
    run = stage.backward_maybe_with_nosync
    held: list[str] = []  # what had a gradient before the step that runs
    is_first, begun = True, 0  # of the step's backwards; its first autograd node

    def clear() -> None:
        nonlocal is_first, begun
        is_first, begun = True, next_node_number()  # also after a step that failed
        start()

    def backward(kind: str, kwargs: dict[str, Any], last_backward: bool = False) -> Any:
        nonlocal is_first
        if is_first:
            is_first = False
            share_plain_gradients(iter_units(stage.submod))
            held[:] = [n for n, p in stage.submod.named_parameters() if p.grad is not None][:1]
        if kind == "weight":
            return (), None  # done in the backward for the inputs
        if kwargs["output_grads"] is None:
            _check_loss(kwargs["stage_output"], begun)
        if kind == "full" and last_backward:
            return run(kind, kwargs, last_backward=True)
        if kind == "input" and kwargs["output_grads"] is None:
            kwargs = {**kwargs, "stage_output": kwargs["stage_output"][0]}  # the loss
        with no_sync(stage.submod):
            grads, _ = run("full", kwargs, last_backward=False)
        return grads, []

    def reduce(scale: int) -> None:
        if scale != 1:
            _check_scaling(stage.submod, held)
        units = list(iter_units(stage.submod))
        if all(unit.switches.sync for unit in units):
            reduce_grads(stage.submod)  # what the last microbatch did not use
        for unit in units:
            if unit.switches.reshard_after_backward and unit.switches.sync:
                unit.engine.schedule.drop(unit, Hold.KEPT)
        finish(scale)

    stage.clear_runtime_states = clear
    stage.backward_maybe_with_nosync = backward
    stage.perform_reduce_grad = reduce
    return stage


def _check_loss(loss: Any, begun: int) -> None:
    """Raise where the loss, or a tuple of one, is of a step before that with node ``begun``."""
    node = (loss[0] if isinstance(loss, tuple | list) else loss).grad_fn
    if node is not None and made_at(node) < begun:
        raise RuntimeError(
            "pipeline_stage: the schedule gave a loss of an earlier schedule.step(), which ended "
            "with an error: torch's schedules keep such losses, and gradients would be of that "
            "step's batch. Make a new schedule, over the same stages, after a step that failed."
        )


def _check_scaling(module: nn.Module, held: list[str]) -> None:
    """Raise where dividing ``.grad`` does not divide this step's gradients and no others."""
    remedy = "or give the schedule scale_grads=False and divide the loss instead."
    if held:
        raise RuntimeError(
            f"pipeline_stage: {held[0]!r} had a gradient before schedule.step(), which the "
            "schedule would divide by the number of microbatches again; call zero_grad() before "
            f"each step, {remedy}"
        )
    for unit in iter_units(module):
        if not (unit.switches.sync and unit.switches.all_reduce):
            raise RuntimeError(
                f"pipeline_stage: unit {unit.name!r} postpones its reductions, so that the "
                "schedule cannot divide the gradients by the number of microbatches; call "
                "schedule.step() outside no_sync() and accumulate(), since it reduces once by "
                f"itself, {remedy}"
            )
