"""Parameters that tensor parallelism split before they are sharded: found, declared, and checked.

DTensors say themselves how they are split. For parameters that were split by hand,
``declare_tensor_parallel`` says it. Both must lie on other mesh dimensions than the ranks that the
library shards over.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Protocol, TypeAlias

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.utils.weak import WeakIdKeyDictionary

from fsdp_compose.base.arguments import check_kind
from fsdp_compose.base.group import Group, get_global_rank
from fsdp_compose.base.mesh import Mesh, group_of, refuse_ended, served_devices
from fsdp_compose.base.strides import contiguous_strides, storage_order
from fsdp_compose.base.torch_private import dtensor_spec, is_opaque, parameter_slots, root_mesh
from fsdp_compose.comm.meeting import gather_objects_or_differ
from fsdp_compose.sharded import Axis, Parallel, is_sharded, part_of, spec_of, split_axes

TPGroup: TypeAlias = "DeviceMesh | dist.ProcessGroup"

_declared: Any = WeakIdKeyDictionary()  # parameter -> Parallel


def declare_tensor_parallel(
    params: nn.Parameter | Iterable[nn.Parameter], mesh: TPGroup, dim: int
) -> None:
    """Say that parameters hold this rank's part of larger ones, which were split by hand.

    For layers that are written in terms of their parts, as Megatron's column and row parallel
    linear layers are. Call it before ``fully_shard``; every rank of ``mesh`` must call it, with the
    same parameters in the same order. The parameters read as they did, as parts;
    ``clip_grad_norm_`` and ``grad_norm`` count every part once, and state dicts and checkpoints
    hold the whole parameters, by the names they have here, so that they load into a model that is
    split otherwise or not at all. Parameters that every rank has in full need no declaration. A
    copy of a parameter is declared anew.

    Args:
        params: plain parameters; their sizes may differ between ranks in ``dim``, and in nothing
            else.
        mesh: the ranks that hold the parts, in order: a DeviceMesh of one dimension or a
            ProcessGroup.
        dim: the dimension that is split; counted from the end when negative.

    Raises:
        TypeError: something is not a parameter, or not a mesh.
        ValueError: a parameter is a DTensor or sharded already, has no such dimension, or the parts
            do not fit together. The same on every rank of ``mesh``.

    Example:
        >>> def shard_rows():
        ...     sizes, names = (1, 2), ("dp", "tp")
        ...     mesh = torch.distributed.init_device_mesh("cpu", sizes, mesh_dim_names=names)
        ...     linear = nn.Linear(4, 2, bias=False)  # this rank's rows of a (4, 4) weight
        ...     declare_tensor_parallel(linear.weight, mesh["tp"], dim=0)
        ...     fully_shard(linear, mesh=mesh["dp"])
        ...     whole = state_dict(linear, kind="full")["weight"]
        ...     return tuple(linear.weight.shape), tuple(whole.shape)
        >>> simulate(shard_rows, 2)
        [((2, 4), (4, 4)), ((2, 4), (4, 4))]
    """
    group = _check_group(mesh)
    given: list[nn.Parameter] = []
    mine: list[Any] = []
    problem: Exception | None = None
    try:
        given = _list_params(params)
        for number, param in enumerate(given):
            mine.append(_read_part(param, number, dim))
    except (TypeError, ValueError) as error:
        problem = error
    report = None if problem is None else repr(problem), mine
    reports = gather_objects_or_differ(report, group, "declare_tensor_parallel")
    if problem is not None:
        raise problem
    for rank, (text, parts) in zip(group.ranks, reports, strict=True):
        if text is not None:
            raise ValueError(f"declare_tensor_parallel: rank {rank} raised {text}")
        if [p[1:] for p in parts] != [p[1:] for p in mine]:
            raise ValueError(
                f"declare_tensor_parallel: rank {rank} has parts of {_spell(parts)}, this rank has "
                f"{_spell(mine)} (the size of the split dimension left out); wanted the same "
                "parameters in the same order on every rank of the mesh."
            )
    for number, param in enumerate(given):
        at = dim % param.ndim
        sizes = tuple(parts[number][0] for _, parts in reports)
        shape = torch.Size([*param.shape[:at], sum(sizes), *param.shape[at + 1 :]])
        _declared[param] = Parallel(shape, contiguous_strides(shape), (Axis(group, at, sizes),))


def _list_params(params: Any) -> list[Any]:
    if isinstance(params, torch.Tensor):
        return [params]
    wanted = "a parameter or several: [linear.weight, linear.bias]"
    check_kind("declare_tensor_parallel", "params", params, Iterable, wanted)
    return list(params)


def _read_part(param: Any, number: int, dim: int) -> tuple[int, int, list[int], str]:
    """Its size in the dimension that is split, that dimension, its other sizes and its dtype."""
    check_kind("declare_tensor_parallel", "dim", dim, int, "the dimension that is split, an int")
    if not isinstance(param, nn.Parameter):
        raise TypeError(
            f"declare_tensor_parallel: item {number} is a {type(param).__name__}; wanted a "
            "parameter."
        )
    if is_sharded(param) or isinstance(param, DTensor):
        what = "sharded already" if is_sharded(param) else "a DTensor, which says how it is split"
        raise ValueError(
            f"declare_tensor_parallel: parameter {number} of shape {tuple(param.shape)} is {what}; "
            "wanted a plain parameter, before fully_shard."
        )
    if not -param.ndim <= dim < param.ndim:
        raise ValueError(
            f"declare_tensor_parallel: parameter {number} of shape {tuple(param.shape)} has no "
            f"dimension {dim} that could be split."
        )
    at = dim % param.ndim
    return param.shape[at], at, [*param.shape[:at], *param.shape[at + 1 :]], str(param.dtype)


def _spell(parts: list[Any]) -> list[str]:
    return [f"{rest} {dtype} split in dimension {at}" for _, at, rest, dtype in parts]


def _check_group(mesh: TPGroup) -> Group:
    refuse_ended(mesh, "declare_tensor_parallel")
    if isinstance(mesh, DeviceMesh):
        if mesh.ndim != 1:
            raise ValueError(
                f"declare_tensor_parallel: mesh has {mesh.ndim} dimensions {mesh.mesh_dim_names}; "
                "wanted one: mesh['tp']."
            )
        return group_of(mesh.get_group(0), torch.device(mesh.device_type))
    if isinstance(mesh, dist.ProcessGroup):
        served = served_devices(mesh)
        kind = "cpu" if "cpu" in served else next(iter(served), "cpu")
        return group_of(mesh, torch.device(kind))
    raise TypeError(
        f"declare_tensor_parallel: mesh is {mesh!r}; wanted a DeviceMesh of one dimension or a "
        "ProcessGroup."
    )


def tensor_parallel_groups(modules: Iterable[object]) -> list[Group]:
    """The groups of more than one rank over which parameters of the modules are split, if any."""
    found: dict[tuple[int, ...], Group] = {}
    for module in modules:
        for inner in module.modules() if isinstance(module, nn.Module) else ():
            for param in parameter_slots(inner).values():
                for group in () if param is None else _groups_of(param):
                    found.setdefault(group.ranks, group)
    return [group for group in found.values() if group.size > 1]


def _groups_of(param: nn.Parameter) -> Iterable[Group]:
    if is_sharded(param):
        parallel = spec_of(param).parallel
        return () if parallel is None else parallel.groups
    if not isinstance(param, DTensor):
        declared: Parallel | None = _declared.get(param)
        return () if declared is None else declared.groups
    mesh = param.device_mesh
    if mesh.get_coordinate() is None:
        return ()
    device = torch.device(mesh.device_type)
    return [group_of(mesh.get_group(number), device) for number in range(mesh.ndim)]


def find_parallel(param: nn.Parameter, name: str, unit: str) -> Parallel | None:
    """How tensor parallelism split a parameter that is not sharded yet; None: it did not.

    Raises:
        ValueError: a DTensor that cannot be sharded.
    """
    if not isinstance(param, DTensor):
        known: Parallel | None = _declared.get(param)
        if known is not None and known.sizes != tuple(param.shape):
            raise ValueError(
                f"fully_shard: parameter {name!r} of unit {unit!r} has shape {tuple(param.shape)}, "
                f"but was declared as a part of shape {known.sizes}; call "
                "declare_tensor_parallel again after changing it."
            )
        return known
    mesh, placements = param.device_mesh, param.placements
    where = f"fully_shard: parameter {name!r} of unit {unit!r} is a DTensor"
    if mesh.get_coordinate() is None:
        raise ValueError(f"{where} on {mesh}, which does not contain rank {dist.get_rank()}.")
    part = part_of(param)
    if is_opaque(part):
        raise ValueError(
            f"{where} of {type(part).__name__}, whose class computes in __torch_dispatch__; "
            "sharded, it would be the plain values in it. Let tensor parallelism split a plain "
            "parameter (for torchao's Float8Linear, enable_fsdp_float8_all_gather=False), or pass "
            "it in ignored=."
        )
    device = torch.device(mesh.device_type) if part.is_meta else part.device
    placed: list[tuple[Group, int | None]] = []
    placement: Any
    for number, placement in enumerate(placements):
        if not (placement.is_shard() or placement.is_replicate()):
            raise ValueError(
                f"{where} with placements {placements}; wanted Shard and Replicate only. "
                "Redistribute a Partial one before fully_shard. _StridedShard is left by torch's "
                "own fully_shard, and cannot be sharded again: use one of the two, "
                "fully_shard(model, mesh=mesh['dp']) on a model that is tensor parallel only."
            )
        group = group_of(mesh.get_group(number), device)
        dim = placement.dim % param.ndim if placement.is_shard() else None
        placed.append((group, dim))
    axes = split_axes(param.shape, placed)
    found = Parallel(param.shape, tuple(param.stride()), axes, dtensor_spec(param))
    if found.sizes != tuple(part_of(param).shape):
        raise ValueError(
            f"{where} of shape {tuple(param.shape)} with placements {placements}, of which this "
            f"rank holds {tuple(part_of(param).shape)}; wanted {found.sizes}, as "
            "torch.distributed.tensor.distribute_tensor cuts it."
        )
    return found


class Split(Protocol):
    """A parameter to shard, which other ranks may hold other parts of."""

    names: list[str]
    parallel: Parallel | None

    @property
    def part(self) -> torch.Tensor: ...


def note_repeated(items: Sequence[Split], mesh: Mesh, beside: Sequence[Group]) -> None:
    """Note that what tensor parallelism left whole is alike on the ranks that split the rest.

    Args:
        items: parameters of a unit, to be sharded over ``mesh``.
        beside: the groups over which other parameters of the model are split.
    """
    here = get_global_rank()
    taken = {rank for group in mesh.groups for rank in group.ranks} - {here}
    axes = tuple(Axis(group, None) for group in beside if taken.isdisjoint(group.ranks))
    for item in items:
        if axes and item.parallel is None:
            item.parallel = Parallel(item.part.shape, storage_order(item.part), axes)


def check_declared(named: Mapping[str, object]) -> None:
    """Raise where a parameter that was split by hand is in no unit, and passes for the whole.

    Raises:
        ValueError: naming it.
    """
    for name, value in named.items():
        if isinstance(value, nn.Parameter) and not is_sharded(value) and value in _declared:
            raise ValueError(
                f"parameter {name!r} was declared to be a part of shape {tuple(value.shape)} of "
                f"one of shape {tuple(_declared[value].shape)}, but no unit has it, so that a "
                "state dict would hold the part under the name of the whole. Call fully_shard on "
                "a module that contains it, without ignored=."
            )


def check_meshes(parallel: Parallel, name: str, unit: str, mesh: Mesh, given: object) -> None:
    """Raise ValueError when a split parameter and the ranks to shard it over overlap.

    That the ranks to shard it over hold the same part is for ``agree`` to see.
    """
    here = get_global_rank()
    what = "is a DTensor on" if parallel.dtensor is not None else "was declared to be split over"
    if isinstance(given, DeviceMesh) and parallel.dtensor is not None:
        # By ranks: DTensor's caches may hold an equal mesh that was sliced from another one.
        known = set(root_mesh(given).mesh.flatten().tolist())
        outside = sorted({r for axis in parallel.axes for r in axis.group.ranks} - known)
        if outside:
            raise ValueError(
                f"fully_shard: parameter {name!r} of unit {unit!r} {what} {parallel.dtensor.mesh}, "
                f"whose ranks {outside} are not in the mesh that {given} was sliced from; wanted "
                "slices of one mesh: mesh = init_device_mesh(device, (dp, tp), "
                "mesh_dim_names=('dp', 'tp')); parallelize_module(model, mesh['tp'], plan); "
                "fully_shard(model, mesh=mesh['dp'])."
            )
    for axis in parallel.axes:
        for role, group in (("sharded", mesh.shard), ("replicated", mesh.replicate)):
            common = sorted(set(axis.group.ranks) & set(group.ranks) - {here})
            if group.size == 1 or axis.group.size == 1 or not common:
                continue
            raise ValueError(
                f"fully_shard: parameter {name!r} of unit {unit!r} {what} ranks "
                f"{list(axis.group.ranks)}, and would be {role} over ranks {list(group.ranks)}, "
                f"which include {common} of them too"
                + ("; the default mesh is all ranks" if given is None else "")
                + ". They hold other parts of it, or are sharded over already. Pass the "
                "data-parallel dimension alone: fully_shard(model, mesh=mesh['dp']), with the "
                "layers split over another: parallelize_module(model, mesh['tp'], plan). A model "
                "that torch's own fully_shard has sharded cannot be sharded again: use one of "
                "the two."
            )
