"""What the ranks must agree on before anything is sharded: errors, structure and values."""

from __future__ import annotations

import hashlib
import math
import weakref
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from fsdp_compose.base.group import Group
from fsdp_compose.base.mesh import Mesh, MeshLike, is_outside, resolve_mesh
from fsdp_compose.base.policy import Placement
from fsdp_compose.base.strides import contiguous_strides, storage_order
from fsdp_compose.base.torch_private import buffer_slots, is_opaque
from fsdp_compose.buckets.bucket import Slot
from fsdp_compose.comm.meeting import gather_objects_or_differ
from fsdp_compose.comm.messages import ErrorReport, describe_error, first_error
from fsdp_compose.construct.choose_buckets import unit_precision
from fsdp_compose.construct.plans import UnitPlan
from fsdp_compose.construct.tensor_parallel import tensor_parallel_groups
from fsdp_compose.core.guards.replicas import sum_bytes
from fsdp_compose.sharded import Parallel


@dataclass(frozen=True)
class Value:
    """A parameter or buffer that a unit will manage."""

    key: str  # the same on every rank
    name: str  # in the unit
    what: str  # for messages
    tensor: torch.Tensor
    slot: Slot  # the first place it is read from
    mesh: Mesh | None  # None: no mesh was needed for it
    is_verified: bool  # it must start alike on all of them: init="verify"
    repeated: tuple[Group, ...] = ()  # whose ranks repeat it, beside tensor parallelism


@dataclass(frozen=True)
class Report:
    """What one rank tells the others."""

    problem: ErrorReport
    structure: list[Any]
    sums: dict[str, tuple[int, tuple[int, ...]]]  # checksum, and the ranks that must have the same
    what: dict[str, str]  # for messages, by key of ``sums``
    meta: frozenset[str]  # keys of values on the meta device, or left unwritten


def compare_plans(
    plans: list[UnitPlan],
    mesh: MeshLike | None,
    problem: Exception | None,
    modules: Sequence[object],
    what: str = "fully_shard",
) -> set[str]:
    """Raise on every rank what any rank found wrong, and check that all start alike.

    Args:
        what: the function that every rank calls.
        modules: what is sharded; where tensor parallelism split some of it, the ranks that hold
            the other parts are told of problems too.

    Returns:
        Keys of the values that are on the meta device on some rank, for ``compare_values`` to
        compare once they are materialised.
    """
    groups = find_groups(mesh)
    problem = problem or (_find_opaque(plans) if groups else None)
    values = [] if problem else [value for plan in plans for value in values_of(plan)]
    meta = frozenset(value.key for value in values if value.tensor.is_meta)
    if len(groups) > 1 and not _is_ascending(mesh):
        found = _find_other_slices(groups)  # whose ranks all send, those with a problem too
        problem = problem or found
    if groups:
        real = [v for v in values if v.key not in meta]
        structure = [] if problem else [_describe_structure(plan) for plan in plans]
        report = _make_report(problem, structure, real, meta)
        reports = _exchange_reports(report, groups, what)
        problem = problem or _first_problem(reports) or _first_difference(reports)
        meta = meta.union(*(report.meta for report in reports.values()))
    totals = {
        value.key: (int(sum_bytes(value.tensor)), value)
        for value in values
        if value.repeated and value.key not in meta and value.is_verified
    }
    try:
        return set(_compare_beside(modules, problem, totals, meta))
    finally:
        del problem  # its traceback holds the frames that hold it, and with them the model


def _find_opaque(plans: Sequence[UnitPlan]) -> Exception | None:
    """The error for a buffer that ranks can neither compare nor send; None where there is none."""
    for plan in plans:
        for value in () if plan.options.init == "as_is" else values_of(plan):
            buffer = value.tensor
            if isinstance(buffer, torch.nn.Parameter):
                continue
            if buffer.layout is not torch.strided or buffer.is_quantized:
                kind = buffer.dtype if buffer.is_quantized else buffer.layout
                return ValueError(
                    f"fully_shard: {value.what} is {kind}; wanted a dense buffer for "
                    f"init={plan.options.init!r}. Build the same on every rank, and pass it in "
                    'ignored=, or init="as_is".'
                )
    return None


def _compare_beside(
    modules: Sequence[object],
    problem: Exception | None,
    sums: Mapping[str, tuple[int, Value]],
    left: frozenset[str],
) -> frozenset[str]:
    """Compare the values that ranks with other parts of the modules hold in common.

    Args:
        left: keys of values that wait for materialisation or loading.

    Returns:
        Those of all ranks.
    """
    for group in tensor_parallel_groups(modules):
        mine = {k: (total, v.what) for k, (total, v) in sums.items() if group in v.repeated}
        mine_and_left = (describe_error(problem), mine, left)
        reports = gather_objects_or_differ(mine_and_left, group, "fully_shard")
        errors = [error for error, _, _ in reports]
        problem = problem or first_error(zip(group.ranks, errors, strict=True))
        problem = problem or _difference_beside([found for _, found, _ in reports], group)
        left = left.union(*(others for _, _, others in reports))
    try:
        if problem is not None:
            raise problem
    finally:
        del problem
    return left


def _difference_beside(
    reports: Sequence[Mapping[str, tuple[int, str]]], group: Group
) -> Exception | None:
    for rank, sums in zip(group.ranks, reports, strict=True):
        for key, (total, what) in sums.items():
            if total != reports[0].get(key, (total, what))[0]:
                return ValueError(
                    f"fully_shard: {what} differs between rank {group.ranks[0]} and rank {rank}, "
                    "which hold parts of other layers and should hold the same of this one. Seed "
                    "every rank alike before building the model, load the same file, or pass "
                    'init="broadcast" to take the first rank\'s values. If the ranks hold parts '
                    "of it, or experts of their own, say so with declare_tensor_parallel."
                )
    return None


def compare_values(
    mesh: MeshLike | None,
    sums: dict[str, tuple[int, Value]],
    unwritten: set[str],
    problem: Exception | None,
    modules: Sequence[object],
) -> set[str]:
    """Raise on every rank what went wrong on any while values were materialised, or differs.

    Returns:
        Keys of the values that were left unwritten on some rank.
    """
    left = frozenset(unwritten)
    groups = find_groups(mesh)
    if groups:
        compared = {key: (total, _list_peers(value)) for key, (total, value) in sums.items()}
        what = {key: value.what for key, (_, value) in sums.items()}
        reports = _exchange_reports(
            Report(describe_error(problem), [], compared, what, left), groups
        )
        problem = problem or _first_problem(reports) or _first_difference(reports)
        left = left.union(*(report.meta for report in reports.values()))
    return set(_compare_beside(modules, problem, sums, left))


def values_of(plan: UnitPlan) -> Iterator[Value]:
    """The unit's own parameters and its buffers, each once."""
    is_verified = plan.options.init == "verify"
    for bucket in plan.buckets:
        for item in bucket.found:
            name = item.names[0]
            what = f"parameter {plan.full_name(name)!r} of unit {plan.name!r}"
            key = f"{plan.name}:p:{name}"
            axes = () if item.parallel is None else item.parallel.axes
            repeated = tuple(a.group for a in axes if a.dim is None and a.group.size > 1)
            slot = item.slots[0]
            yield Value(key, name, what, item.param, slot, bucket.mesh, is_verified, repeated)
    seen: set[int] = set()
    for module in plan.modules:
        for name, submodule, place, buffer in plan.managed_buffers(module):
            if id(buffer) not in seen:
                seen.add(id(buffer))
                what = f"buffer {plan.full_name(name)!r} of unit {plan.name!r}"
                key = f"{plan.name}:b:{plan.modules.index(module)}.{name}"
                slot = Slot(weakref.ref(submodule), place, buffer_slots(submodule))
                mesh = mesh_of(plan, buffer)
                yield Value(key, name, what, buffer, slot, mesh, is_verified)


def mesh_of(plan: UnitPlan, tensor: torch.Tensor) -> Mesh | None:
    """The mesh of a unit, which may have no parameters of its own."""
    if plan.buckets:
        return plan.buckets[0].mesh
    device = plan.options.device if tensor.is_meta else tensor.device
    try:
        return resolve_mesh(plan.options.mesh, device, plan.options.placement)
    except ValueError:
        return None  # the mesh is not for the device the buffer is on


def _make_report(
    problem: Exception | None,
    structure: list[Any],
    values: Sequence[Value],
    meta: frozenset[str],
) -> Report:
    compared = [v for v in values if v.is_verified and _list_peers(v)]
    sums = [sum_bytes(v.tensor) for v in compared]
    totals = [int(t) for t in torch.stack([t.cpu() for t in sums]).tolist()] if sums else []
    return Report(
        describe_error(problem),
        structure,
        {v.key: (total, _list_peers(v)) for v, total in zip(compared, totals, strict=True)},
        {v.key: v.what for v in compared},
        meta,
    )


def _list_peers(value: Value) -> tuple[int, ...]:
    """The first rank of each group that must hold the same value."""
    return () if value.mesh is None else tuple(group.ranks[0] for group in value.mesh.groups)


def _describe_structure(plan: UnitPlan) -> Any:
    """What must be the same on every rank, as plain data: options, parameters, buffers, buckets."""
    params = [
        (
            f"parameter {plan.full_name(item.names[0])!r}",
            tuple(item.param.shape),
            str(item.param.dtype),
            "trained" if item.param.requires_grad else "frozen",
            *(() if item.parallel is None else (_describe_place(item.parallel),)),
            *((type(item.param).__name__,) if is_opaque(item.param) else ()),
            *_describe_order(item.part),
        )
        for item in plan.found
    ]
    # Sent one after the other, as each rank has them.
    buffers = [
        (
            f"buffer {plan.full_name(value.name)!r}",
            tuple(value.tensor.shape),
            str(value.tensor.dtype),
            *_describe_order(value.tensor),
        )
        for value in (values_of(plan) if plan.options.init == "broadcast" else ())
        if not isinstance(value.tensor, torch.nn.Parameter)
    ]
    buckets = [
        (
            "bucket",
            b.layout.offsets,
            b.layout.shard_numel,
            str(b.mp.dtypes_for(b.storage_dtype)),
            *(() if b.mp.gather_codec is None else (str(b.mp.gather_codec),)),
            f"{b.mesh.shard.size} x {b.mesh.replicate.size} ranks",
        )
        for b in plan.buckets
    ]
    return plan.name, [*_option_values(plan), *params, *buffers, *buckets]


def _describe_order(tensor: torch.Tensor) -> tuple[str, ...]:
    """How its elements follow each other in memory, where that is not the usual order.

    They are cut and sent in that order, in which other ranks put them together again.
    """
    if tensor.is_contiguous():
        return ()
    strides, usual = storage_order(tensor), contiguous_strides(tensor.shape)
    sizes = tensor.shape if tensor.numel() else ()
    differ = any(a != b for a, b, size in zip(strides, usual, sizes, strict=False) if size != 1)
    return (f"with strides {strides}",) if differ else ()


def _describe_place(parallel: Parallel) -> str:
    places = [f"rank {a.group.rank} of {a.group.size}" for a in parallel.axes]
    return f"of {' and '.join(places)} of tensor parallelism, part at {parallel.offsets}"


_COMPARED = (
    *("offload_policy", "prefetch", "init", "methods", "transport", "deterministic"),
    "static_buffers",
)
"""Options that are the same on every rank as they are written, besides the placement."""


def _option_values(plan: UnitPlan) -> list[tuple[str, str]]:
    """Options by argument; of those that are functions what they answered, or that there is one."""
    options = plan.options
    values = [("strategy and reshard_after_forward", repr(options.placement))]
    values += [(name, repr(getattr(options, name))) for name in _COMPARED]
    precision = unit_precision(plan)
    for field in fields(precision):
        value: Any = getattr(precision, field.name)
        if field.name == "full_precision_classes":
            value = sorted(kind.__qualname__ for kind in value)
        values.append((f"mp_policy's {field.name}", str(value)))
    ignored = sum(1 for module in plan.modules for m in module.modules() if _left_alone(plan, m))
    return [*values, ("ignored", f"{ignored} modules")]


def _left_alone(plan: UnitPlan, module: torch.nn.Module) -> bool:
    ignored = plan.ignored
    return id(module) in ignored.modules or any(
        id(buffer) in ignored.buffers for buffer in buffer_slots(module).values()
    )


def find_groups(mesh: MeshLike | None) -> tuple[Group, ...]:
    """The groups of more than one rank whose ranks make this call together.

    They depend on the argument alone, so that a rank that failed meets the others.
    """
    if not dist.is_initialized() or is_outside(mesh):
        return ()
    devices = [torch.device("cpu")]
    accelerator = torch.accelerator.current_accelerator()
    if accelerator is not None:
        devices.append(accelerator)
    for candidate in (mesh, None):
        for device in devices:
            try:
                return resolve_mesh(candidate, device, Placement()).groups
            except (TypeError, ValueError, RuntimeError):  # also a mesh without groups
                continue
    return ()


def count_ranks(mesh: MeshLike | None) -> int:
    """How many ranks compare what is sharded over ``mesh``."""
    return math.prod(group.size for group in find_groups(mesh))


def _is_ascending(mesh: MeshLike | None) -> bool:
    """Whether a mesh lists the ranks of each shard group as the group numbers them in any case."""
    return isinstance(mesh, DeviceMesh) and bool(mesh.mesh.diff(dim=-1).gt(0).all())


def _find_other_slices(groups: tuple[Group, ...]) -> Exception | None:
    """The error of a mesh whose replicas, as their groups number them, hold other slices.

    A group may number its ranks otherwise than the mesh lists them: torch's do so by size.
    """
    shard, replicate = groups
    places = gather_objects_or_differ((shard.rank, shard.ranks), replicate, "fully_shard")
    for rank, (number, ranks) in zip(replicate.ranks, places, strict=True):
        if number != places[0][0]:
            return ValueError(
                f"fully_shard: ranks {list(replicate.ranks)} of the mesh are to hold copies of the "
                f"same slices, but rank {replicate.ranks[0]} is number {places[0][0]} of the ranks "
                f"{list(places[0][1])} that it shards over, and rank {rank} number {number} of "
                f"{list(ranks)}. torch numbers the ranks of a group by size unless told otherwise, "
                "whatever the order in a DeviceMesh. List the ranks of each shard group in "
                "ascending order: init_device_mesh(device, (replicas, shards)) does."
            )
    return None


def _exchange_reports(
    report: Report, groups: tuple[Group, ...], call: str = "fully_shard"
) -> dict[int, Report]:
    """Every rank's report, by rank; this rank's alone where those of all say the same."""
    known = {dist.get_rank(): report}
    if _are_alike(report, groups, call):
        return known
    for group in groups:
        parts = gather_objects_or_differ(known, group, call)
        known = {rank: r for part in parts for rank, r in part.items()}
    return dict(sorted(known.items()))


def _are_alike(report: Report, groups: tuple[Group, ...], call: str) -> bool:
    """Whether all ranks report the same, by a digest: a report of each takes gigabytes at scale."""
    totals = [(key, total) for key, (total, _) in report.sums.items()]
    said = repr((report.problem, report.structure, totals, sorted(report.meta)))
    digest = hashlib.sha256(said.encode()).digest()
    is_alike = True
    for group in groups:
        found = gather_objects_or_differ((digest, is_alike), group, call)
        is_alike = all(other == (digest, True) for other in found)
    return is_alike


def _first_problem(reports: Mapping[int, Report]) -> Exception | None:
    return first_error((rank, report.problem) for rank, report in reports.items())


def _first_difference(reports: dict[int, Report]) -> Exception | None:
    first = next(iter(reports))
    for rank, report in reports.items():
        if report.structure != reports[first].structure:
            what = _describe_difference(reports[first].structure, report.structure)
            advice = "Build the same model and pass the same arguments on every rank."
            if "of tensor parallelism" in what:
                advice += (
                    " What is sharded together must be the same part: slice both meshes from one, "
                    "parallelize_module(model, mesh['tp'], plan), then fully_shard(model, "
                    "mesh=mesh['dp'])."
                )
            return ValueError(
                f"fully_shard: rank {rank} shards other units or parameters, or with other "
                f"options, than rank {first}: {what}. {advice}"
            )
    for rank, report in reports.items():
        for key, (total, peers) in report.sums.items():
            for peer in peers:
                wanted = reports[peer].sums.get(key) if peer in reports else None
                if wanted is not None and wanted[0] != total:
                    return ValueError(
                        f"fully_shard: {report.what[key]} differs between rank {peer} and rank "
                        f"{rank}, so the shards would be cut from different models. Seed every "
                        "rank alike before building the model, load the same file, or pass "
                        'init="broadcast" to take rank 0\'s values.'
                    )
    return None


def _describe_difference(wanted: list[Any], found: list[Any]) -> str:
    for mine, theirs in zip(wanted, found, strict=False):
        if mine[0] != theirs[0]:
            return f"found unit {theirs[0]!r}, wanted {mine[0]!r}"
        names = [{item[0] for item in plan[1]} for plan in (mine, theirs)]
        for a, b in zip(mine[1], theirs[1], strict=False):
            if a != b and a[0] not in names[1]:
                return f"unit {mine[0]!r}: missing {_join_words(a)}"
            if a != b and b[0] not in names[0]:
                return f"unit {mine[0]!r}: found an additional {_join_words(b)}"
            if a != b:
                return f"unit {mine[0]!r}: found {_join_words(b)}, wanted {_join_words(a)}"
        if len(mine[1]) != len(theirs[1]):
            verb = "missing" if len(mine[1]) > len(theirs[1]) else "found an additional"
            rest = max(mine[1], theirs[1], key=len)[min(len(mine[1]), len(theirs[1])) :]
            return f"unit {mine[0]!r}: {verb} {_join_words(rest[0])}"
    return f"found {len(found)} units, wanted {len(wanted)}"


def _join_words(item: tuple[Any, ...]) -> str:
    return " ".join(str(part) for part in item)
