"""``fully_shard``: plan every unit, compare the plans between ranks, then build.

Everything that can fail is done before anything is changed, and the ranks agree on it: an error on
one is raised on all, and no module is left half sharded.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

from torch import nn

from fsdp_compose.attach.build_unit import (
    MetaValues,
    build_unit,
    leave_for_loading,
    rename_nested_units,
    share_memory,
)
from fsdp_compose.base.exchange import check_exchangeable
from fsdp_compose.base.group import Transport, get_global_rank
from fsdp_compose.base.mesh import MeshLike, compute_device
from fsdp_compose.base.policy import (
    GranularityLike,
    Init,
    MixedPrecision,
    MixedPrecisionLike,
    Offload,
    Prefetch,
    ShardingStrategy,
    place,
)
from fsdp_compose.base.torch_private import hide_from_traces
from fsdp_compose.comm.meeting import meet_or_differ
from fsdp_compose.construct.choose_units import plan_shards
from fsdp_compose.construct.compare_ranks import compare_plans, find_groups
from fsdp_compose.construct.initialise import InitFn, is_on_meta
from fsdp_compose.construct.plans import Ignored, Options, UnitPlan
from fsdp_compose.construct.wrap import Policy
from fsdp_compose.core.guards.failed_steps import clear_deleted_models
from fsdp_compose.core.guards.methods import check_methods
from fsdp_compose.layout.planner import PlanLayout, plan_layout
from fsdp_compose.sharded import ShardedDTensor, ShardedParameter, ShardedTensor

log = logging.getLogger("fsdp_compose")

M = TypeVar("M", bound="nn.Module | Sequence[nn.Module]")


def fully_shard(
    module: M,
    *,
    mesh: MeshLike | None = None,
    units: Policy | None = None,
    strategy: ShardingStrategy | None = None,
    reshard_after_forward: bool | int | None = None,
    mp_policy: MixedPrecisionLike = MixedPrecision(),
    offload_policy: Offload = Offload(),
    ignored: Iterable[nn.Parameter | nn.Module] = (),
    granularity: GranularityLike = 1,
    prefetch: Prefetch = Prefetch(),
    init: Init = "verify",
    param_init_fn: InitFn | None = None,
    methods: Sequence[str] = ("forward",),
    layout: PlanLayout = plan_layout,
    transport: Transport | None = None,
    deterministic: int | None = None,
    static_buffers: bool | int = False,
) -> M:
    """Shard a module's parameters, gradients and optimizer state over the data-parallel ranks.

    The module, its parameters and their names stay the same objects; between passes each parameter
    holds this rank's slice, and what needs the whole of it raises ``ShardedWeightError`` (whose
    help lists the few functions of torch, such as ``torch.tensor(p)``, that read the slice without
    asking); ``p.full_tensor()`` is the whole. Call it on submodules first, then on what contains
    them, or once with ``units``. All ranks of the mesh must call it.

    Parameters that tensor parallelism split before, over another dimension of the same mesh, are
    sharded further, and DTensors stay DTensors: ``parallelize_module(model, mesh["tp"], plan)``,
    then ``fully_shard(model, mesh=mesh["dp"])``. See ``declare_tensor_parallel`` for layers that
    were split by hand.

    Args:
        module: a module, or several that are gathered together as one unit.
        mesh: None for all ranks, a DeviceMesh with dimensions (shard) or (replicate, shard), a
            ProcessGroup, or a (shard, replicate) pair of ProcessGroups; or ``"self"``, for a whole
            model on this rank alone. Without ``torch.distributed`` initialised, None is a world of
            one, and an error where ``WORLD_SIZE`` says that several ranks were launched.
        units: a policy of ``fsdp_compose.wrap`` that names the submodules that become units of
            their own; what they leave belongs to ``module``'s unit.
        strategy: where weights live between forward and backward; see ``ShardingStrategy``.
        reshard_after_forward: release full parameters between forward and backward. None: all but
            the outermost unit's, which backward needs first. A number: spread them over that many
            neighbouring ranks, so that backward gathers from close by (a divisor of the group).
        mp_policy: dtypes; or a function ``(fqn, parameter)``, or a dictionary by patterns of names,
            that gives them per parameter. Inputs, outputs and buffers of a unit are cast then as
            its largest parameter's policy says.
        offload_policy: what lives in host memory; see ``Offload``.
        ignored: parameters and modules to leave alone.
        granularity: how parameters may be cut: 1 (anywhere), a block size in elements, ``"row"``,
            ``"tensor"`` (never), or a function ``(fqn, parameter)`` that says so per parameter.
        prefetch: how many units are gathered ahead of use.
        init: ``"verify"`` raises when ranks start with different parameters or buffers,
            ``"broadcast"`` takes them from rank 0, ``"as_is"`` takes each rank's slice as it is.
        param_init_fn: for parameters and buffers on the meta device: called with each submodule
            that has some, which have memory by then, on the mesh's device; see ``seeded_init``.
            Where None, ``reset_parameters()`` of the submodule is called if it has one. One unit
            is materialised, initialised and sharded before the next. What nothing has written is
            left for loading: forward raises until it is loaded. A function that was written for
            FSDP1, which looks for parameters on the meta device and moves them off it, works too.
            The model may be on the meta device on some ranks only, with ``init="broadcast"``.
        methods: names of methods that gather as ``forward`` does, which always gathers, for example
            ``("forward", "encode", "generate")``. They apply to every unit of this call whose
            module has them. The modules' hooks are not run for them.
        layout: a function ``(extents, itemsize, world_size)`` that says with integers where each
            parameter of a bucket lies; see ``fsdp_compose.layout.shards.Layout``.
        transport: how tensors travel between ranks; see ``fsdp_compose.base.group.Transport``.
            None: between pairs of ranks on gloo, by the group's own collectives elsewhere.
        deterministic: how many microbatches a step has on all ranks together, ``M``. Training then
            has the same bits on 1, 2, 4, ... ranks, as many as divide ``M``, and with every
            strategy: gradients of microbatches are added up in one order. Rank ``r`` of ``W`` runs
            one backward for each of ``microbatches[r::W]``; ``.grad`` is the average over all
            ``M``, set by the last one. A page of the documentation, "Promises", says what else is
            to be the same, and what it costs.
        static_buffers: gather units, and pack their gradients, in buffers that keep their addresses
            for the whole run, for CUDA graphs. Units of one model that run one after the other take
            turns in two gather buffers (one more than ``prefetch`` is deep, or the number given, 2
            or more) and two gradient buffers, each as large as the largest unit in it. A unit that
            stays gathered from forward to backward, or shares a parameter with another unit, has a
            gather buffer of its own; units that contain units take turns among themselves. Nothing
            is gathered ahead into a buffer that is in use, and a unit that must be gathered there
            raises ``RuntimeError``. Gradients that wait for more (``no_sync``) and what reductions
            receive are allocated as they are needed, as is what ``gathered`` shows.

    Returns:
        ``module``.

    Raises:
        TypeError: ``module`` is not a module, or an argument is of the wrong type.
        ValueError: the module is sharded already, a DTensor lies on the ranks to shard over,
            options contradict each other, ``units`` matches
            nothing, parameters lie on several devices or differ between ranks. The same error is
            raised on every rank, and nothing has been changed; except where the initialisation of
            meta parameters failed or differs between ranks, after which the model must be built
            again, or loaded: what was on the meta device counts as unwritten, and forward raises.
        RuntimeError: several ranks were launched (``WORLD_SIZE`` in the environment), ``mesh`` is
            None, and there is no process group; or a parameter of ``module`` is sharded and shown
            whole now, in a scope or a forward.

    Example:
        >>> model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4))
        >>> model = fully_shard(model, units=wrap.by_class({nn.Linear}))
        >>> optim = torch.optim.AdamW(model.parameters())
        >>> model(torch.ones(2, 4)).sum().backward()
        >>> optim.step()
        >>> [is_fully_sharded(module) for module in model]
        [True, False, True]
    """
    hide_from_traces(list_untraced_files(), ShardedParameter, ShardedTensor, ShardedDTensor)
    modules = [module] if isinstance(module, nn.Module) else module
    problem: Exception | None = None
    plans: list[UnitPlan] = []
    try:
        options = Options(
            mesh=mesh,
            placement=place(strategy, reshard_after_forward),
            mp_policy=mp_policy,
            offload_policy=offload_policy,
            granularity=granularity,
            prefetch=prefetch,
            init=init,
            param_init_fn=param_init_fn,
            methods=methods,
            layout=layout,
            transport=transport,
            deterministic=deterministic,
            static_buffers=static_buffers,
        )
        plans = _plan_units(modules, options, units, Ignored.of(ignored))
    except Exception as error:  # whatever it is, the other ranks wait for it
        problem = error
    try:
        meet_or_differ("fully_shard", find_groups(mesh))
        meta = MetaValues(compare_plans(plans, mesh, problem, _list_modules(modules)))
    finally:
        del problem  # where it is raised, it would hold this frame, and the model
    clear_deleted_models()
    for plan in plans:
        for bucket in plan.buckets:
            share_memory(bucket.mesh)
    for plan in plans:
        build_unit(plan, meta)
    for outer in modules:
        rename_nested_units(outer)
    if meta.keys:
        leave_for_loading(meta, mesh, _list_modules(modules))
    if log.isEnabledFor(logging.INFO):
        _log_summary(plans)
    return module


def _plan_units(
    modules: Any, options: Options, units: Policy | None, ignored: Ignored
) -> list[UnitPlan]:
    """Plan the units of a call, and check all that can be wrong with them on this rank alone."""
    if is_on_meta(modules):
        options = replace(options, device=compute_device(options.mesh, options.device))
    plans = plan_shards(modules, options, units, ignored)
    check_exchangeable("fully_shard", (item.param for plan in plans for item in plan.found))
    _find_methods(plans, options)
    return plans


def _find_methods(plans: Sequence[UnitPlan], options: Options) -> None:
    """Leave in every unit's options the methods that its modules have; most units share them."""
    given = options.methods
    alike = [m for p in plans if p.options.methods is given for m in p.modules]
    every = check_methods(given, alike)
    shared = replace(options, methods=every)
    for plan in plans:
        if plan.options is options:  # the unit overrides nothing
            plan.options = shared
            continue
        own = plan.options.methods
        found = every if own is given else check_methods(own, plan.modules)
        plan.options = replace(plan.options, methods=found)


def _log_summary(plans: Sequence[UnitPlan]) -> None:
    """Log one line for what a call sharded."""
    buckets = [bucket for plan in plans for bucket in plan.buckets]
    numel = sum(extent.numel for bucket in buckets for extent in bucket.layout.extents)
    nbytes = sum(bucket.layout.shard_numel * bucket.storage_dtype.itemsize for bucket in buckets)
    log.info(
        "rank %d sharded %s: units %d, parameter elements %d, ranks %d, bytes on this rank %d",
        get_global_rank(),
        plans[-1].name,
        len(plans),
        numel,
        max((bucket.mesh.shard.size for bucket in buckets), default=1),
        nbytes,
    )


@functools.cache
def list_untraced_files() -> list[str]:
    """The files of this package that are never part of a compiled graph: all but one."""
    package = Path(__file__).parent.parent
    traced = package / "scopes" / "compile.py"
    return [path.as_posix() for path in package.rglob("*.py") if path != traced]


def _list_modules(modules: Any) -> Sequence[object]:
    return modules if isinstance(modules, Sequence) else ()
