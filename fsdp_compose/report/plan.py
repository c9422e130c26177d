"""``plan``: what sharding a module costs in memory and communication, in integers, before a step.

    a, r     bytes of the compute and the reduce dtype
    P        elements of a unit
    W        ranks its parameters are cut over

    backward peak = a (P + P of the neighbour gathered ahead) + a P gradients + r P flat buffer
                  + what the reduction under way receives: r P / W, on gloo r P (W - 1) / W

and beside these whatever stays gathered, the outermost unit for instance. Which units really are
neighbours, and what is under way at once, is found by playing a step with integers; see
``schedule.py``. Activations are measured where a sample is passed; what kernels and the allocator
use is not counted.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from inspect import signature
from itertools import chain
from typing import Any

import torch
from torch import nn

from fsdp_compose.base.group import SELF, Group
from fsdp_compose.base.mesh import Mesh, MeshLike, compute_device
from fsdp_compose.base.policy import (
    GranularityLike,
    MixedPrecision,
    MixedPrecisionLike,
    Offload,
    Prefetch,
    ShardingStrategy,
    place,
)
from fsdp_compose.construct.choose_units import check_modules, plan_shards
from fsdp_compose.construct.initialise import is_on_meta
from fsdp_compose.construct.plans import Ignored, Options, list_ignored
from fsdp_compose.construct.wrap import Policy
from fsdp_compose.core.state import iter_units
from fsdp_compose.report.activations import Activations, measure_activations
from fsdp_compose.report.advice import Question, Trial, advise, price_accumulation
from fsdp_compose.report.figures import Memory, Plan, PlannedUnit
from fsdp_compose.report.notes import notes_on
from fsdp_compose.report.runs import Recording, follow
from fsdp_compose.report.schedule import Step, play
from fsdp_compose.report.static_buffers import find_static_buffers
from fsdp_compose.report.survey import Record, Survey, survey_plans, survey_units
from fsdp_compose.report.text import parse_size
from fsdp_compose.report.traffic import TrafficReport
from fsdp_compose.sharded import part_of

STATES: Mapping[str, int] = {
    "sgd": 0,
    "sgd_momentum": 1,
    "adagrad": 1,
    "asgd": 1,
    "lion": 1,
    "muon": 1,
    "rmsprop": 1,
    "adam": 2,
    "adamw": 2,
    "nadam": 2,
    "radam": 2,
    "adamax": 2,
    "adadelta": 2,
    "rprop": 2,
    "adam_amsgrad": 3,
    "adamw_amsgrad": 3,
}
"""Tensors of a parameter's size and dtype that optimizers keep."""


def plan(
    module: nn.Module | Sequence[nn.Module],
    *,
    world_size: int | tuple[int, int] | None = None,
    mesh: MeshLike | None = None,
    units: Policy | None = None,
    strategy: ShardingStrategy | None = None,
    reshard_after_forward: bool | int | None = None,
    mp_policy: MixedPrecisionLike = MixedPrecision(),
    offload_policy: Offload = Offload(),
    ignored: Iterable[nn.Parameter | nn.Module] = (),
    granularity: GranularityLike = 1,
    prefetch: Prefetch = Prefetch(),
    static_buffers: bool | int = False,
    optimizer: str | int | torch.optim.Optimizer | None = None,
    backend: str = "nccl",
    device_memory: str | float | None = None,
    sample: Any = None,
) -> Plan:
    """Say what sharding ``module`` costs, and whether it fits; nothing is changed.

    The module may be on the meta device. One that is sharded already, or has units in it, is
    described as it is. The step that is described is a steady one: a forward that runs each module
    once in the order of registration, or units that have run as they ran last, its backward with
    every gradient synchronised, an optimizer step, and gradients set to None. Nothing communicates.

    Args:
        module: as for ``fully_shard``; of a sequence, the modules of one unit.
        world_size: ranks to plan for, or (replicas, shards) for the hybrid strategies, without a
            process group. None: those of ``mesh``, or of the default group.
        mesh, units, strategy, reshard_after_forward, mp_policy, offload_policy, ignored,
            granularity, prefetch, static_buffers: as for ``fully_shard``.
        optimizer: a name, such as ``"adamw"``, the number of tensors of a parameter's size that it
            keeps, an optimizer of ``torch.optim``, or None for no state.
        backend: which one ``world_size`` ranks use: on ``"gloo"`` a reduction receives every
            rank's contribution.
        device_memory: what a device has, in bytes or as ``"80GiB"``: the plan says whether it
            fits, and what to do where it does not.
        sample: what one rank's forward is given: positional arguments in a tuple, keyword arguments
            in a dictionary, or one tensor; only shapes and dtypes matter. Activations are measured
            by running the module on the meta device, in the dtype that most weights compute in;
            where the forward asks for a number, it is told 1 or True. Units are then taken to run,
            and backward to reach and run them again, as they do there.

    Raises:
        ValueError: an option is wrong, as in ``fully_shard``; options were passed for a module that
            is sharded already; the optimizer or the size is not known; or the forward cannot run on
            the meta device.

    Example:
        >>> model = nn.Sequential(nn.Linear(1024, 1024), nn.Linear(1024, 1024))
        >>> found = plan(model, world_size=8, units=wrap.by_class(nn.Linear), optimizer="adamw",
        ...              device_memory="24GiB", sample=torch.ones(32, 1024))
        >>> found.memory.shards, found.memory.optimizer  # bytes of each rank
        (1049600, 2099200)
        >>> found.step.collectives, found.fits  # what is printed says more
        (6, True)
    """
    modules = [module] if isinstance(module, nn.Module) else module
    check_modules("plan", modules)
    keeps = _states_of(optimizer)
    available = None if device_memory is None else parse_size(device_memory)
    chosen: dict[str, Any] = {
        "mesh": mesh,
        "units": units,
        "strategy": strategy,
        "reshard_after_forward": reshard_after_forward,
        "mp_policy": mp_policy,
        "offload_policy": offload_policy,
        "ignored": list_ignored(ignored, "plan"),
        "granularity": granularity,
        "prefetch": prefetch,
        "static_buffers": static_buffers,
    }
    if isinstance(module, nn.Module) and (known := list(iter_units(module))):
        others = {"world_size": world_size, "backend": backend, "sample": sample}
        _check_nothing_passed(module, {**others, **chosen})
        return _describe(modules, survey_units(module, known), keeps, available, is_sharded=True)
    if world_size is not None and mesh is not None:
        raise ValueError("plan: pass world_size or mesh, not both.")
    if world_size is not None:
        chosen["mesh"] = imagine_mesh(world_size, backend)
    elif backend != _unsaid("backend"):
        raise ValueError(
            f"plan: backend is {backend!r} without world_size; ranks of a mesh use their own."
        )
    survey, recording = _survey(modules, chosen), Recording()
    activations = None
    if sample is not None:
        activations = _activations(modules, survey, mp_policy, sample, recording)
        follow(survey, recording)
    found = _describe(modules, survey, keeps, available, activations=activations)

    def plan_again(changed: Mapping[str, Any]) -> Trial:
        again, measured, mp = _survey(modules, changed), activations, changed["mp_policy"]
        if measured is not None and mp is not mp_policy:
            measured = _activations(modules, again, mp, sample, Recording())
        if measured is not None:
            follow(again, recording)
        return _trial(_describe(modules, again, keeps, activations=measured))

    question = Question(survey, _trial(found), chosen, available, plan_again)
    return replace(found, advice=advise(question))


def _find_device(modules: Sequence[nn.Module], options: Options) -> torch.device:
    """Where meta parameters are taken to be: where others are that have values already."""
    params = chain.from_iterable(module.parameters() for module in modules)
    devices = (param.device for param in params if not param.is_meta)
    return next(devices, compute_device(options.mesh, options.device))


def _survey(modules: Sequence[nn.Module], chosen: Mapping[str, Any]) -> Survey:
    """What ``fully_shard`` would build with these arguments."""
    named = dict(chosen)
    units, ignored = named.pop("units"), Ignored.of(named.pop("ignored"))
    placement = place(named.pop("strategy"), named.pop("reshard_after_forward"))
    options = Options(placement=placement, init="as_is", **named)
    if is_on_meta(modules):
        options = replace(options, device=_find_device(modules, options))
    return survey_plans(modules, plan_shards(modules, options, units, ignored))


def _activations(
    modules: Sequence[nn.Module],
    survey: Survey,
    mp_policy: MixedPrecisionLike,
    sample: Any,
    recording: Recording,
) -> Activations:
    """Measure the one module, in the dtype that most of its weights compute in."""
    if len(modules) != 1:
        raise ValueError(
            f"plan: sample goes with one module, found {len(modules)}; plan the module that "
            "contains them."
        )
    numel: Counter[torch.dtype] = Counter()
    for bucket in survey.buckets:
        if bucket.compute.is_floating_point:
            numel[bucket.compute] += bucket.numel
    dtype = max(numel, key=lambda found: numel[found], default=None)
    names = [name for bucket in survey.buckets for name in bucket.parameters]
    casts = isinstance(mp_policy, MixedPrecision) and not mp_policy.cast_forward_inputs
    dtypes = {} if dtype is None else dict.fromkeys(names, dtype)
    return measure_activations(modules[0], sample, dtypes, None if casts else dtype, recording)


def _describe(
    modules: Sequence[nn.Module],
    survey: Survey,
    keeps: tuple[int, str | None],
    available: int | None = None,
    *,
    activations: Activations | None = None,
    is_sharded: bool = False,
) -> Plan:
    """Play a step of what was surveyed, and put the figures together."""
    step = play(survey)
    return Plan(
        module="+".join(type(m).__name__ for m in modules),
        is_sharded=is_sharded,
        ranks=max((bucket.ranks for bucket in survey.buckets), default=1),
        replicas=max((bucket.replicas for bucket in survey.buckets), default=1),
        optimizer=keeps[1],
        units=tuple(_unit(record, survey, step) for record in survey.records),
        memory=_memory(survey, step, keeps[0]),
        notes=notes_on(survey),
        activations=activations,
        device_memory=available,
        accumulation=price_accumulation(survey),
        moments=tuple(step.moments),
    )


def _trial(found: Plan) -> Trial:
    return Trial(found.needed, found.step.total_bytes, found.step.collectives)


def _check_nothing_passed(module: nn.Module, passed: Mapping[str, Any]) -> None:
    """Raise ValueError for arguments that a module which is sharded already cannot take."""
    values = passed.items()
    said = [n for n, value in values if n != "ignored" and value is not _unsaid(n)]
    said += ["ignored"] * bool(passed["ignored"])
    if said:
        raise ValueError(
            f"plan: {type(module).__name__} is sharded already, so {', '.join(said)} would "
            "change nothing; call plan(module) alone, or plan a module that is not sharded."
        )


def _unsaid(name: str) -> Any:
    """The default of an argument of ``plan``."""
    return signature(plan).parameters[name].default


def imagine_mesh(world_size: int | tuple[int, int], backend: str) -> Mesh:
    """Make rank 0's mesh of so many ranks, or (replicas, shards), without a process group."""
    numbers: Any = world_size if isinstance(world_size, tuple) else (None, world_size)
    if len(numbers) != 2 or any(
        type(number) is not int or number < 1 for number in numbers if number is not None
    ):
        raise ValueError(
            f"plan: world_size is {world_size!r}; wanted a number of ranks, 1 or more, or "
            "(replicas, shards)."
        )
    replicas, shards = numbers
    found: Any = backend
    if not isinstance(found, str):
        raise TypeError(f'plan: backend is {found!r}; wanted a name, such as "nccl" or "gloo".')
    shard = Group(None, 0, shards, backend, tuple(range(shards)))
    replicate = SELF
    if replicas is not None:
        replicate = Group(None, 0, replicas, backend, tuple(range(0, replicas * shards, shards)))
    device = torch.device("cpu" if backend == "gloo" else "cuda")
    return Mesh(shard, replicate, device)


def _states_of(optimizer: str | int | torch.optim.Optimizer | None) -> tuple[int, str | None]:
    """(tensors per parameter, name)."""
    if optimizer is None:
        return 0, None
    if isinstance(optimizer, str) and optimizer.isdecimal():  # as the command line has it
        optimizer = int(optimizer)
    found: Any = optimizer
    if isinstance(found, bool) or not isinstance(found, str | int | torch.optim.Optimizer):
        raise TypeError(
            f"plan: optimizer is {found!r}; wanted one of {sorted(STATES)}, the number of tensors "
            "of a parameter's size that it keeps, an optimizer of torch.optim, or None."
        )
    if isinstance(optimizer, int):
        if optimizer < 0:
            raise ValueError(f"plan: optimizer is {optimizer}; wanted a number of tensors >= 0.")
        return optimizer, f"{optimizer} tensors per parameter"
    if isinstance(optimizer, torch.optim.Optimizer):
        has = lambda key: any(group.get(key) for group in optimizer.param_groups)  # noqa: E731
        name = type(optimizer).__name__.lower()
        if name in ("sgd", "rmsprop"):
            more = list(filter(has, ("momentum", "centered")))
            return STATES[name] + len(more), " with ".join([name, *more])
        if has("amsgrad"):
            name = f"{name}_amsgrad"
    else:
        name = optimizer.lower()
    if name not in STATES:
        raise ValueError(
            f"plan: optimizer {name!r} is not known; wanted one of {sorted(STATES)}, or the number "
            "of tensors of a parameter's size that it keeps."
        )
    return STATES[name], name


def _unit(record: Record, survey: Survey, step: Step) -> PlannedUnit:
    outermost = any(e.record is record and e.leaves and e.outermost for e in survey.events)
    return PlannedUnit(
        name=record.name,
        classes=record.classes,
        buckets=tuple(survey.buckets_of(record)),
        borrowed=record.loans,
        keeps=outermost if record.keep is None else record.keep,
        forward=sum((step.traffic_forward[i] for i in record.held), TrafficReport()),
        backward=sum((step.traffic_backward[i] for i in record.held), TrafficReport()),
    )


def _memory(survey: Survey, step: Step, states: int) -> Memory:
    buckets = survey.buckets
    state = {
        id(b): states * b.shard_numel * b.storage.itemsize * (b.trained_numel > 0) for b in buckets
    }
    outside = 0
    for param in survey.outside.values():
        tensors = 1 + (1 + states) * param.requires_grad
        outside += tensors * part_of(param).numel() * param.dtype.itemsize
    return Memory(
        shards=sum(b.shard_bytes for b in buckets),
        gradients=sum(b.grad_shard_bytes for b in buckets),
        optimizer=sum(state.values()),
        buffers=survey.buffer_bytes,
        outside=outside,
        weight_copies=sum(b.weight_copy_bytes for b in buckets),
        static_buffers=find_static_buffers(survey).nbytes,
        host=sum(b.shard_bytes + state[id(b)] for b in buckets if b.on_host),
        forward=step.forward,
        backward=step.backward,
    )
