"""Decide which parameters of a unit share a bucket, and plan each bucket with integers."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, cast

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from fsdp_compose.base.group import Group
from fsdp_compose.base.mesh import Mesh, check_fusable, check_subgroup, compute_device, resolve_mesh
from fsdp_compose.base.policy import MixedPrecision, MixedPrecisionLike
from fsdp_compose.base.torch_private import is_opaque, steps_in_backward
from fsdp_compose.buckets.entries import entry_of, find_entry
from fsdp_compose.comm.own_transports import watch_transport
from fsdp_compose.construct.deterministic import check_weights, refuse_tensor_parallel
from fsdp_compose.construct.plans import BucketPlan, ParameterPlan, UnitPlan
from fsdp_compose.construct.tensor_parallel import check_meshes, find_parallel, note_repeated
from fsdp_compose.core.guards.units import modules_of
from fsdp_compose.core.state import owner_of
from fsdp_compose.layout.matrix_work import spread_work
from fsdp_compose.layout.planner import plan_layout, run_layout
from fsdp_compose.layout.shards import Extent, Granularity
from fsdp_compose.sharded import find_wrapper, is_sharded

_Kind = tuple[torch.dtype, bool, MixedPrecision]
"""What all parameters of a bucket share: dtype, whether they are trained, precision."""


def plan_buckets(
    plan: UnitPlan,
    promised: set[int],
    work: dict[tuple[int, ...], list[int]],
    beside: Sequence[Group],
) -> None:
    """Sort the unit's own parameters into buckets and plan each with integers.

    ``work``, on whole tensors by ranks of the shard group, is levelled over the units. ``beside``
    are the groups over which tensor parallelism split other parameters of the model.
    """
    groups, device = _group_parameters(plan, promised)
    if device is None:
        return
    options, mesh = plan.options, _find_mesh(plan, device, groups)
    own = [item for items in groups.values() for item in items]
    for item in own:
        if item.parallel is not None:
            refuse_tensor_parallel(plan, item)
            check_meshes(item.parallel, item.names[0], plan.name, mesh, options.mesh)
    note_repeated(own, mesh, beside)
    for (storage, _, chosen), items in groups.items():
        dtypes = chosen.dtypes_for(storage)
        itemsize = min(t.itemsize for t in (storage, dtypes.compute, dtypes.reduce))
        extents = [
            Extent(plan.full_name(i.names[0]), tuple(i.part.shape), _granularity_for(plan, i))
            for i in items
        ]
        parts = mesh.size if options.placement.fused else mesh.shard.size
        layout = run_layout(options.layout, extents, itemsize, parts)
        if options.layout is plan_layout:
            before = work.setdefault((parts, *mesh.shard.ranks), [0] * parts)
            layout = spread_work(layout, before)
        plan.buckets.append(BucketPlan(mesh, layout, items, storage, chosen))


def _group_parameters(
    plan: UnitPlan, promised: set[int]
) -> tuple[dict[_Kind, list[ParameterPlan]], torch.device | None]:
    """The unit's own parameters by what a bucket has one of, and their device if there are any."""
    found: dict[tuple[torch.dtype, bool, tuple[Any, ...]], list[ParameterPlan]] = {}
    devices: dict[torch.device, str] = {}
    options = plan.options
    for item in plan.found:
        param = item.param
        if is_sharded(param):
            _check_nesting(plan, item)
            continue
        if id(param) in promised:
            continue
        promised.add(id(param))
        name = plan.full_name(item.names[0])
        _check_parameter(plan, name, param)
        item.parallel = find_parallel(param, name, plan.name)
        devices.setdefault(options.device if param.is_meta else param.device, name)
        if len(devices) > 1:
            (device, first), (other, second) = devices.items()
            raise ValueError(
                f"fully_shard: parameter {second!r} of unit {plan.name!r} is on {other}, but "
                f"{first!r} is on {device}; move the module to one device first: module.to(device)."
            )
        mp = precision_for(options.mp_policy, name, param)
        _check_gradient_dtype(plan, name, param, mp)
        storage = item.part.dtype
        codec = mp.gather_codec if storage.is_floating_point else None
        asked = (mp.param_dtype, mp.reduce_dtype, mp.keep_low_precision_grads, codec)
        found.setdefault((storage, param.requires_grad, asked), []).append(item)
    groups: dict[_Kind, list[ParameterPlan]] = {}
    for (storage, is_trained, (compute, reduce, keeps, codec)), items in found.items():
        chosen = MixedPrecision(compute, reduce, keep_low_precision_grads=keeps, gather_codec=codec)
        groups[storage, is_trained, chosen] = items
    return groups, next(iter(devices), None)


def _find_mesh(plan: UnitPlan, device: torch.device, groups: Iterable[_Kind]) -> Mesh:
    """The mesh of the unit's buckets, which its options must fit."""
    options = plan.options
    if options.offload_policy.shards:
        device = compute_device(options.mesh, device)
    transport = watch_transport(options.transport)
    mesh = resolve_mesh(options.mesh, device, options.placement, transport, options.deterministic)
    if options.deterministic is not None:
        check_weights(plan, groups)
    if options.placement.spread is not None:
        check_subgroup(mesh.shard, options.placement.spread)
    if options.placement.fused:
        check_fusable(mesh, options.mesh)
        if any(chosen.gather_codec is not None for _, _, chosen in groups):
            raise ValueError(
                f"fully_shard: unit {plan.name!r} has a gather_codec, but HYBRID_SHARD_OPTIMIZER "
                "gathers weights in two steps, which a codec cannot encode; use HYBRID_SHARD, or "
                "leave MixedPrecision(gather_codec=) out."
            )
    return mesh


def _check_nesting(plan: UnitPlan, item: ParameterPlan) -> None:
    """Raise where the parameter belongs to a unit around the planned one, and is not tied."""
    entry = find_entry(item.param)
    bucket = owner_of(entry)
    unit = bucket.users.unit and bucket.users.unit()
    tops = modules_of(unit) if unit else []
    outer = {id(module) for top in tops for module in top.modules()}
    if unit and any(id(module) in outer for module in plan.modules):
        raise ValueError(
            f"fully_shard: unit {plan.name!r} is inside unit {unit.name!r}, which was sharded "
            f"before it and has its parameter {entry.spec.fqn!r}; shard from the inside out. "
            "Call fsdp_compose.undo on the outer module, then fully_shard on the inner modules "
            "first and on the outer one last, or once on the outer one with units=."
        )


def _check_parameter(plan: UnitPlan, name: str, param: nn.Parameter) -> None:
    """Raise for a parameter that is not a dense tensor in memory of its own."""
    kind, where = type(param), f"fully_shard: parameter {name!r} of unit {plan.name!r}"
    if entry_of(param) is not None or not param.is_leaf:
        raise RuntimeError(
            f"{where} is sharded, and shown whole now: by a scope (gathered, unshard), or in a "
            "forward or backward; call fully_shard outside of them, from the inside out."
        )
    if nn.parameter.is_lazy(param):
        raise ValueError(
            f"{where} is an {kind.__name__}, which has no shape yet; run one forward of its module "
            "before it is sharded, which initialises it."
        )
    if steps_in_backward(param):
        raise ValueError(
            f"{where} was given to torch's _apply_optimizer_in_backward, whose optimizer would "
            "step before gradients are reduced. Build the model again, and after fully_shard let "
            "param.register_post_accumulate_grad_hook(fn) step an optimizer of each parameter."
        )
    wrapper = find_wrapper(param)
    if is_opaque(param) and wrapper is None:
        raise ValueError(
            f"{where} is an instance of {kind.__name__}, whose class computes in "
            "__torch_dispatch__ and keeps its values in other tensors. Such a parameter is sharded "
            "where its __tensor_flatten__ gives one dense tensor of its shape, strides and dtype, "
            "or where it is frozen and in memory. Freeze it, keep the packed values in parameters "
            "of the module (nn.Parameter(packed, requires_grad=False)) and build the tensor in "
            "forward, or leave it whole on every rank: fully_shard(..., ignored=[parameter])."
        )
    if wrapper is None and getattr(param, "fsdp_pre_all_gather", None) is not None:
        raise ValueError(
            f"{where} has a method fsdp_pre_all_gather, which FSDP2 calls and this library does "
            "not. Say how it is gathered with fully_shard(mp_policy=MixedPrecision(gather_codec="
            "GatherCodec(encode, decode))), and use a parameter without that method, or pass it "
            "in ignored=."
        )
    if not issubclass(kind, DTensor) and kind.__basicsize__ != nn.Parameter.__basicsize__:
        raise ValueError(
            f"{where} is an instance of {kind.__name__}, a class with __slots__. Sharding changes "
            "the class of the object for a while, which Python does not allow for such a class. "
            "Remove __slots__, or pass the parameter in ignored=."
        )
    if param.layout is not torch.strided:
        raise ValueError(
            f"{where} has layout {param.layout}; wanted a dense parameter. Pass it in ignored=."
        )
    if param.is_conj() or param.is_neg():
        raise ValueError(
            f"{where} is a view that conjugates or negates what it reads (tensor.conj()), and its "
            "memory holds other values; give it its own: nn.Parameter(tensor.clone())."
        )


def unit_precision(plan: UnitPlan) -> MixedPrecision:
    """What decides the casts of a unit's inputs, outputs and buffers.

    Where the policy is a function, its answer for the unit's largest parameter.
    """
    mp = plan.options.mp_policy
    if isinstance(mp, MixedPrecision):
        return mp
    if not plan.found:
        return MixedPrecision()
    largest = max(plan.found, key=lambda item: item.param.numel())
    return precision_for(mp, plan.full_name(largest.names[0]), largest.param)


def _check_gradient_dtype(
    plan: UnitPlan, name: str, param: nn.Parameter, mp: MixedPrecision
) -> None:
    """Raise where a parameter asks for gradients of another dtype than its bucket's.

    Raises:
        ValueError: saying by which option they are kept so.
    """
    wanted = param.grad_dtype
    if not param.requires_grad or wanted in (None, param.dtype):
        return
    given = mp.dtypes_for(param.dtype).grad
    if wanted != given:
        raise ValueError(
            f"fully_shard: parameter {name!r} of unit {plan.name!r} has grad_dtype {wanted}, and "
            f"gradients of {param.dtype} parameters are kept in {given} here. They are reduced and "
            "kept by bucket, so say it with mp_policy=MixedPrecision(reduce_dtype="
            f"{wanted}, keep_low_precision_grads=True), or with a function (fqn, parameter) that "
            "gives it for some; or set grad_dtype back to the parameter's own dtype."
        )


def precision_for(mp: MixedPrecisionLike, name: str, param: nn.Parameter) -> MixedPrecision:
    if isinstance(mp, MixedPrecision):
        return mp
    assert not isinstance(mp, Mapping), "Options made a function of it"
    found: Any = mp(name, param)
    if found is not None and not isinstance(found, MixedPrecision):
        raise TypeError(
            f"fully_shard: mp_policy returned {found!r} for parameter {name!r}; wanted "
            "MixedPrecision(...) or None."
        )
    if found is not None and found.in_full_precision:
        raise ValueError(
            f"fully_shard: mp_policy gives parameter {name!r} full_precision_classes, which choose "
            "modules, and it is a function or a dictionary, which chooses parameters; wanted "
            "mp_policy=MixedPrecision(..., full_precision_classes=), or MixedPrecision() for the "
            'parameters of such modules, as in {"**.norm.*": MixedPrecision(), "**": policy}.'
        )
    return found or MixedPrecision()


def _granularity_for(plan: UnitPlan, item: ParameterPlan) -> Granularity:
    chosen: Any = plan.options.granularity
    found = chosen(plan.full_name(item.names[0]), item.param) if callable(chosen) else chosen
    return 1 if found is None else cast(Granularity, found)
