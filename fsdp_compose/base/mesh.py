"""Which ranks share a shard, which hold replicas, and on which device; a world of one included."""

from __future__ import annotations

import atexit
import time
import weakref
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Literal, TypeAlias, TypeGuard

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from fsdp_compose.base.arguments import check_kind
from fsdp_compose.base.group import SELF, Group, Transport
from fsdp_compose.base.microbatches import check_microbatches
from fsdp_compose.base.policy import Placement
from fsdp_compose.base.process import here, once
from fsdp_compose.base.torch_groups import ordered_group
from fsdp_compose.base.torch_private import KEEPS_RANK_ORDER

MeshLike: TypeAlias = (
    "DeviceMesh | dist.ProcessGroup | tuple[dist.ProcessGroup, dist.ProcessGroup] | Mesh"
    " | Literal['self']"
)

Ranks: TypeAlias = DeviceMesh | dist.ProcessGroup
"""A DeviceMesh of one dimension, or a process group."""


@dataclass(frozen=True)
class Mesh:
    """Parameters are cut over ``shard`` and copied over ``replicate``.

    Where they are cut over both axes of what the user passed, ``shard`` is all of its ranks and
    ``axes`` its (shard, replicate) axes: the ranks of one replicate axis follow each other in it.
    ``microbatches`` of a step are added up in one tree, see microbatches.py.
    """

    shard: Group
    replicate: Group
    device: torch.device
    axes: tuple[Group, Group] | None = None
    microbatches: int | None = None

    @cached_property
    def size(self) -> int:
        return self.shard.size * self.replicate.size

    @cached_property
    def divisor(self) -> int:
        """What a sum of gradients is divided by."""
        return self.microbatches or self.size

    @cached_property
    def gather_axis(self) -> Group:
        """The ranks that weights are gathered from, and that gradients are summed over first."""
        return self.shard if self.axes is None else self.axes[0]

    @cached_property
    def replicate_axis(self) -> Group:
        """The ranks whose sums are added up after that."""
        return self.replicate if self.axes is None else self.axes[1]

    @cached_property
    def groups(self) -> tuple[Group, ...]:
        """The groups of more than one rank."""
        return tuple(g for g in (self.shard, self.replicate) if g.size > 1)


def resolve_mesh(
    mesh: MeshLike | None,
    device: torch.device,
    placement: Placement,
    transport: Transport | None = None,
    microbatches: int | None = None,
) -> Mesh:
    """Turn what the user passed as ``mesh`` into groups.

    Args:
        mesh: None (the default group, or a world of one when there is none), a DeviceMesh of one
            dimension (shard) or two (replicate, shard), a ProcessGroup (shard), a
            (shard, replicate) pair of ProcessGroups, or ``"self"``, a world of this rank alone.
        device: where the parameters live.
        placement: what the strategy asks of the mesh.
        transport: how tensors travel in the groups; None: as their backends do it best.
        microbatches: how many of a step that are added up in one tree; None: there is no tree.

    Raises:
        ValueError: the mesh has more than two dimensions, does not fit the strategy or
            ``microbatches``, or does not contain this rank; or simulated ranks are to use an
            accelerator.
        TypeError: ``mesh`` is none of the above.
    """
    refuse_ended(mesh, "fully_shard")
    if not isinstance(mesh, DeviceMesh) and is_outside(mesh):
        raise ValueError(_outside())
    if here.simulated is not None and device.type not in ("cpu", "meta"):
        raise ValueError(
            f"fully_shard: the parameters are on {device}, in simulate(), whose ranks are threads "
            "of one process: backward passes on a device share one more thread, and would wait "
            "there for each other. Build the model on the CPU, or start processes: "
            "fsdp-compose run --nproc 2 SCRIPT."
        )
    shard, replicate = _split_mesh(mesh, device)
    axes = 2 if _has_two_axes(mesh) else 1
    if placement.axes is not None and axes != placement.axes:
        raise ValueError(
            f"fully_shard: the strategy is for a mesh of {placement.axes} "
            f"axes, but {'no mesh' if mesh is None else f'a mesh of {axes}'} was passed. Hybrid "
            "strategies need (replicate, shard): init_device_mesh(device, (replicas, shards), "
            "mesh_dim_names=('replicate', 'shard')); the others need one group: mesh['shard']."
        )
    if placement.replicate_only:
        shard, replicate = SELF, shard
    if device.type != "cpu" and transport is None and "gloo" in (shard.backend, replicate.backend):
        raise ValueError(
            f"fully_shard: parameters are on {device}, but the process group serves it by gloo, "
            "whose messages between ranks cannot read a device's memory. Call init_process_group() "
            'without a backend, or with "cpu:gloo,cuda:nccl"; or move the module to the CPU.'
        )
    if transport is not None:
        shard, replicate = (with_transport(group, transport) for group in (shard, replicate))
    if microbatches is not None:
        check_microbatches(microbatches, shard.size * replicate.size)
    return Mesh(shard, replicate, device, microbatches=microbatches)


def _split_mesh(mesh: MeshLike | None, device: torch.device) -> tuple[Group, Group]:
    """The (shard, replicate) groups of what the user passed as ``mesh``."""
    if mesh is None:
        return group_of(dist.group.WORLD, device) if dist.is_initialized() else SELF, SELF
    if isinstance(mesh, str) and mesh == "self":
        return SELF, SELF
    if isinstance(mesh, DeviceMesh):
        return _from_device_mesh(mesh, device)
    if isinstance(mesh, dist.ProcessGroup):
        return group_of(mesh, device), SELF
    if isinstance(mesh, Mesh):  # resolved already, or made up for a plan
        return mesh.shard, mesh.replicate
    if _is_pair(mesh):
        return group_of(mesh[0], device), group_of(mesh[1], device)
    raise TypeError(
        f"fully_shard: mesh is {mesh!r}; wanted None, a DeviceMesh with dimensions (shard) or "
        "(replicate, shard), a ProcessGroup, a (shard, replicate) pair of ProcessGroups, or "
        '"self" for a world of this rank alone.'
    )


def with_transport(group: Group, transport: Transport | None) -> Group:
    """``group`` with another way for tensors to travel; a group of one rank stays as it is."""
    return group if group.pg is None else replace(group, transport=transport)


def _has_two_axes(mesh: MeshLike | None) -> bool:
    if isinstance(mesh, Mesh):
        return mesh.replicate is not SELF
    return isinstance(mesh, tuple) or (isinstance(mesh, DeviceMesh) and mesh.ndim == 2)


def _is_pair(mesh: object) -> TypeGuard[tuple[dist.ProcessGroup, dist.ProcessGroup]]:
    if not isinstance(mesh, tuple) or len(mesh) != 2:
        return False
    return all(isinstance(group, dist.ProcessGroup) for group in mesh)


def _from_device_mesh(mesh: DeviceMesh, device: torch.device) -> tuple[Group, Group]:
    if mesh.device_type != device.type:
        raise ValueError(
            f"fully_shard: the mesh is for device {mesh.device_type!r} but the parameters are on "
            f"{device}; move the module there first, or build the mesh for {device.type!r}."
        )
    if mesh.get_coordinate() is None:
        raise ValueError(
            f"fully_shard: mesh {mesh} does not contain rank {dist.get_rank()}; call fully_shard "
            "on the ranks of the mesh only, each with a mesh that contains it."
        )
    if mesh.ndim == 1:
        return group_of(mesh.get_group(0), device), SELF
    if mesh.ndim == 2:
        first, second = names = mesh.mesh_dim_names or ("", "")
        if "shard" in first and "replicate" in second:
            raise ValueError(
                f"fully_shard: mesh has dimensions {names}; wanted (replicate, shard), as "
                "parameters are cut over the second dimension and copied over the first: "
                "init_device_mesh(device, (replicas, shards), "
                "mesh_dim_names=('replicate', 'shard'))."
            )
        return group_of(mesh.get_group(1), device), group_of(mesh.get_group(0), device)
    raise ValueError(
        f"fully_shard: mesh has {mesh.ndim} dimensions {mesh.mesh_dim_names}; wanted one (shard) "
        "or two (replicate, shard). Slice it: mesh['dp'] or mesh['replicate', 'shard']."
    )


_GLOO_ENDS = 0.25
"""Seconds; a thread that may run gets its turn within them, on a loaded machine too."""

_ranks: weakref.WeakKeyDictionary[dist.ProcessGroup, tuple[int, ...]] = weakref.WeakKeyDictionary()
_groups: weakref.WeakKeyDictionary[
    dist.ProcessGroup, weakref.WeakValueDictionary[tuple[int, str], Group]
] = weakref.WeakKeyDictionary()
_subgroups: weakref.WeakKeyDictionary[dist.ProcessGroup, dict[object, Group]] = (
    weakref.WeakKeyDictionary()
)


def check_fusable(mesh: Mesh, given: MeshLike | None) -> None:
    """Raise unless ``fuse`` can make one group of the whole mesh.

    Raises:
        ValueError: ``given``, from which ``mesh`` was resolved, is a pair of groups; or this torch
            cannot number its ranks as needed.
    """
    if mesh.shard.size == 1 or mesh.replicate.size == 1:
        return
    if isinstance(given, DeviceMesh):
        ranks = _list_by_shard(given)
        if not KEEPS_RANK_ORDER and ranks != sorted(ranks):
            raise ValueError(
                "fully_shard: HYBRID_SHARD_OPTIMIZER needs the ranks of one replicate axis to "
                f"follow each other, but the mesh is {given.mesh.tolist()}, and torch "
                f"{torch.__version__} numbers the ranks of every group by size; pass "
                "DeviceMesh(device, torch.arange(ranks).view(shards, replicas).T, "
                "mesh_dim_names=('replicate', 'shard')), or use HYBRID_SHARD, or torch 2.13."
            )
    elif isinstance(given, tuple):
        raise ValueError(
            "fully_shard: HYBRID_SHARD_OPTIMIZER cuts parameters over all ranks of a mesh, which a "
            "pair of ProcessGroups does not name; pass a DeviceMesh: init_device_mesh(device, "
            "(replicas, shards), mesh_dim_names=('replicate', 'shard'))."
        )


def fuse(mesh: Mesh, given: MeshLike | None) -> Mesh:
    """``mesh`` with its two axes as one shard group; every rank of it must call."""
    shard, replicate = mesh.shard, mesh.replicate
    if replicate.size == 1:
        return mesh
    if shard.size == 1:
        return replace(mesh, shard=replicate, replicate=SELF, axes=(shard, replicate))
    assert isinstance(given, DeviceMesh) and shard.pg is not None
    ranks = tuple(_list_by_shard(given))
    known = _subgroups.setdefault(shard.pg, {})
    if ranks not in known:
        pg = ordered_group(ranks)
        known[ranks] = group_of(pg, mesh.device)
    both = with_transport(group_of(known[ranks].pg, mesh.device), shard.transport)
    return replace(mesh, shard=both, replicate=SELF, axes=(shard, replicate))


def _list_by_shard(mesh: DeviceMesh) -> list[int]:
    """Ranks by their numbers in the shard and the replicate group, which torch gives by size."""
    numbered = mesh.mesh.sort(dim=1).values.sort(dim=0).values
    found: list[int] = numbered.T.flatten().tolist()
    return found


QUEUES = ("nccl",)
"""Backends whose groups work in order: a gather waits for a reduction asked for before it."""


def with_own_reductions(mesh: Mesh) -> Mesh:
    """``mesh`` with a communicator for reductions where a gather would wait behind them.

    Every rank of it must call. Gathers over the other axis of two come before all reductions.
    """
    group = mesh.gather_axis
    if group.pg is None or group.backend not in QUEUES:
        return mesh
    known = _subgroups.setdefault(group.pg, {})
    if "reductions" not in known:
        known["reductions"] = replace(group, pg=ordered_group(group.ranks))
    return with_known_reductions(mesh)


def with_known_reductions(mesh: Mesh) -> Mesh:
    """``mesh`` with what ``with_own_reductions`` made for its ranks before, if it did."""
    group = mesh.gather_axis
    known = {} if group.pg is None else _subgroups.get(group.pg, {})
    if "reductions" not in known or group.backend not in QUEUES:
        return mesh
    group = replace(group, reductions=known["reductions"].pg)
    if mesh.axes is None:
        return replace(mesh, shard=group)
    return replace(mesh, axes=(group, mesh.axes[1]))


def with_process_group(group: Group) -> Group:
    """``group`` as torch's functions take it: of one rank too, as they take None for all ranks."""
    world = dist.group.WORLD
    if group.pg is not None or world is None:
        return group
    known = _subgroups.setdefault(world, {})
    if "alone" not in known:
        known["alone"] = replace(group, pg=ordered_group([dist.get_rank()]))
    return replace(group, pg=known["alone"].pg)


def _is_no_member(group: object) -> bool:
    """Whether it is what ``dist.new_group`` returns on ranks outside of the group."""
    outside = dist.GroupMember.NON_GROUP_MEMBER
    return type(group) is type(outside) and group == outside


def is_outside(mesh: object) -> bool:
    """Whether this rank takes no part in ``mesh``, so that its other ranks do not wait for it."""
    if isinstance(mesh, DeviceMesh):
        return mesh.get_coordinate() is None
    members = mesh if isinstance(mesh, tuple) else (mesh,)
    return any(
        _is_no_member(member)
        or (
            isinstance(member, dist.ProcessGroup)
            and not _has_ended(member)
            and dist.get_rank(member) < 0
        )
        for member in members
    )


def refuse_ended(mesh: object, what: str) -> None:
    """Raise ValueError where a process group of ``mesh`` was destroyed.

    Args:
        what: the function that was given it.
    """
    if any(map(_has_ended, mesh if isinstance(mesh, tuple) else (mesh,))):
        raise ValueError(
            f"{what}: a process group of the mesh or group that was passed was destroyed "
            "(destroy_process_group), so that its ranks cannot reach each other. After "
            "init_process_group make another: init_device_mesh(...), new_group(...); what was "
            "sharded over the former goes there by undo(model) and fully_shard(model, ...)."
        )


def check_ranks(caller: str, name: str, given: object, whose: str) -> None:
    """Check an argument that says which ranks hold other parameters; None is none.

    Raises:
        TypeError: it is neither a DeviceMesh nor a process group.
        ValueError: it was destroyed, or is a mesh of several dimensions.
    """
    if given is not None:
        wanted = f"a DeviceMesh or process group over {whose}"
        check_kind(caller, name, given, (DeviceMesh, dist.ProcessGroup), wanted)
        refuse_ended(given, caller)
        if isinstance(given, DeviceMesh) and given.ndim > 1:
            found = f"a mesh of {given.ndim} dimensions, {given.mesh_dim_names or 'without names'}"
            raise ValueError(f"{caller}: {name} is {found}; wanted {wanted}.")


def group_over(ranks: Ranks, device: torch.device) -> Group:
    """The group of these ranks, for tensors on ``device``."""
    return group_of(ranks.get_group() if isinstance(ranks, DeviceMesh) else ranks, device)


def _has_ended(mesh: object) -> bool:
    try:
        if isinstance(mesh, DeviceMesh) and mesh.get_coordinate() is not None:
            mesh.get_all_groups()
        elif isinstance(mesh, dist.ProcessGroup):
            dist.get_rank(mesh)
    except (RuntimeError, ValueError) as error:
        return "groups not initialized" not in str(error)  # of a mesh that never had any
    return False


def check_subgroup(group: Group, size: int) -> None:
    """Raise unless ``group`` can be cut into several groups of ``size`` ranks.

    Raises:
        ValueError: ``size`` is not a divisor of the group's size other than 1 and itself.
    """
    if not 1 < size < group.size or group.size % size:
        raise ValueError(
            f"fully_shard: reshard_after_forward={size} for a shard group of {group.size} ranks; "
            "wanted a divisor of it, larger than 1 and smaller than it; or True to reshard over "
            "all of them, False not to reshard."
        )


def subgroup_of(group: Group, size: int) -> Group:
    """This rank's run of ``size`` consecutive ranks of ``group``; every rank of it must call."""
    assert group.pg is not None
    known = _subgroups.setdefault(group.pg, {})
    if size not in known:
        first = group.rank // size * size
        ranks = group.ranks[first : first + size]
        known[size] = Group(ordered_group(ranks), group.rank - first, size, group.backend, ranks)
    return replace(known[size], backend=group.backend, transport=group.transport)


def compute_device(mesh: MeshLike | None, param_device: torch.device) -> torch.device:
    """Where parameters that are offloaded to the host compute: the device the mesh serves."""
    kind = param_device.type
    if isinstance(mesh, Mesh):
        return mesh.device
    if isinstance(mesh, str):
        return param_device
    if isinstance(mesh, DeviceMesh):
        kind = mesh.device_type
    elif mesh is not None or dist.is_initialized():
        pg = mesh[0] if isinstance(mesh, tuple) else mesh
        found = torch.accelerator.current_accelerator(check_available=True)
        if found is not None and served_devices(pg).get(found.type, "gloo") != "gloo":
            kind = found.type
    if kind == param_device.type:
        return param_device
    return torch.device(kind, torch.get_device_module(kind).current_device())


def served_devices(pg: dist.ProcessGroup | None) -> dict[str, str]:
    """By type of device the backend that serves it; empty where one backend serves whatever comes.

    A group may be "cpu:gloo,cuda:nccl".
    """
    config = dist.get_backend_config(pg)
    return dict(part.split(":") for part in config.split(",") if ":" in part)


def group_of(pg: dist.ProcessGroup | None, device: torch.device) -> Group:
    """Describe ``pg`` for tensors on ``device``.

    Raises:
        ValueError: this rank is not in the group.
    """
    rank = dist.get_rank(pg)
    if rank < 0 or not isinstance(pg, dist.ProcessGroup):
        raise ValueError(_outside())
    size = dist.get_world_size(pg)
    ranks = _ranks.get(pg)
    if ranks is None:  # one tuple for every unit: it takes 8 bytes a rank
        once(_let_gloo_end)
        ranks = _ranks[pg] = tuple(dist.get_process_group_ranks(pg))
    if size == 1:
        return Group(pg=None, rank=0, size=1, backend="none", ranks=ranks)
    backend = _backend(pg, device)
    known = _groups.setdefault(pg, weakref.WeakValueDictionary())
    # One object for all units: groups are compared for every bucket of a norm.
    return known.setdefault((rank, backend), Group(pg, rank, size, backend, ranks))


def _let_gloo_end() -> None:
    """At exit, wait a moment for gloo's threads to let go of the last messages.

    They do so after whoever waited for a message has gone on, and need Python for it, which by then
    may be shutting down: a process that has done its work would abort, with or without
    ``destroy_process_group``, while anything refers to the group.
    """
    if here.simulated is None:
        atexit.register(time.sleep, _GLOO_ENDS)


def _backend(pg: dist.ProcessGroup, device: torch.device) -> str:
    """Backend that serves ``device``."""
    config, served = dist.get_backend_config(pg), served_devices(pg)
    name = served.get(device.type, config)
    if served and device.type not in served:
        raise ValueError(
            f"fully_shard: parameters are on {device} but the process group serves {config}; "
            "move the module first: module.to(device)."
        )
    return name


def _outside() -> str:
    return (
        f"fully_shard: rank {dist.get_rank()} is not in the process group it was given; call "
        "fully_shard on the ranks of the group only."
    )
