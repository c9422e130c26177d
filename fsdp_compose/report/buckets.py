"""A bucket as a report describes it, in integers and names: of a sharded module, or of a plan."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from fsdp_compose.base.codec import encoded_nbytes
from fsdp_compose.base.mesh import Mesh
from fsdp_compose.base.policy import MixedPrecision, Offload
from fsdp_compose.base.torch_private import raw
from fsdp_compose.buckets.bucket import Bucket
from fsdp_compose.comm.messages import is_point_to_point
from fsdp_compose.comm.transports import count_shared
from fsdp_compose.construct.plans import BucketPlan, UnitPlan
from fsdp_compose.core.guards.moved_parameters import shard_of
from fsdp_compose.layout.matrix_work import whole_owners


@dataclass(frozen=True)
class PlannedBucket:
    """A bucket of one unit. Bytes are of one rank.

    Attributes:
        unit: name of the unit that owns it.
        parameters: their names, as the plan's module knows them.
        storage, compute, reduce, grad: dtypes of the shards, of forward and backward, of gradients
            on their way, and of ``.grad``.
        numel: elements of the parameters.
        trained_numel: elements of those that need a gradient; of a bucket, all or none unless
            ``requires_grad`` was changed after sharding.
        shard_numel: elements per rank, padding included.
        ranks: that the bucket is cut over.
        replicas: that hold the same shards.
        fused: replicas of what is gathered from, where parameters are cut over these too; else 1.
        spread: ranks that share it between forward and backward, where fewer than ``ranks`` do.
        in_place: parameters in compute are the shard itself, and nothing is gathered.
        point_to_point: gradients arrive as one contribution of every rank, summed on arrival.
        read_in_place: ranks whose contribution is read where it lies, as they share a host.
        encoded_bytes: of a rank's shard in a gather, as a codec sends it; None: as it is.
        on_host: shards, gradients and optimizer state are in host memory.
        device_copy: of on_host shards, a copy in the compute dtype stays on the device.
        owned: (rank, work) of each tensor that is never cut; see ``layout.matrix_work``.
        offsets, shapes: of the parameters, in elements from the start of the gathered bucket.
    """

    unit: str
    parameters: tuple[str, ...]
    storage: torch.dtype
    compute: torch.dtype
    reduce: torch.dtype
    grad: torch.dtype
    numel: int
    trained_numel: int
    shard_numel: int
    ranks: int
    replicas: int
    fused: int
    spread: int | None
    in_place: bool
    point_to_point: bool
    read_in_place: int
    encoded_bytes: int | None
    on_host: bool
    device_copy: bool
    owned: tuple[tuple[int, int], ...]
    offsets: tuple[int, ...]
    shapes: tuple[tuple[int, ...], ...]

    DERIVED: ClassVar = ("padding_bytes", "shard_bytes", "full_bytes", "grad_shard_bytes")

    @property
    def padding(self) -> int:
        """Elements over all ranks that belong to no parameter."""
        return self.shard_numel * self.ranks - self.numel

    @property
    def padding_bytes(self) -> int:
        """Padding over all ranks, in the storage dtype."""
        return self.padding * self.storage.itemsize

    @property
    def shard_bytes(self) -> int:
        return self.shard_numel * self.storage.itemsize

    @property
    def full_bytes(self) -> int:
        """Bytes while it is gathered."""
        return 0 if self.in_place else self.shard_numel * self.ranks * self.compute.itemsize

    @property
    def grad_shard_bytes(self) -> int:
        return self.shard_numel * self.grad.itemsize if self.trained_numel else 0

    @property
    def summed_itemsize(self) -> int:
        """Bytes of an element of gradients between replicas: no narrower than between shards."""
        return torch.promote_types(self.reduce, self.grad).itemsize

    @property
    def summed_bytes(self) -> int:
        """A shard's gradients as they travel over replicas."""
        return self.shard_numel * self.summed_itemsize if self.trained_numel else 0

    @property
    def flat_bytes(self) -> int:
        """The flat buffer that gradients are packed into."""
        parts = 2 if self.storage.is_complex else 1
        return self.shard_numel * self.ranks * self.reduce.itemsize * parts

    @property
    def gather_ranks(self) -> int:
        """The ranks that weights are gathered from, and gradients are summed over first."""
        return self.ranks // self.fused

    @property
    def received_bytes(self) -> int:
        """What a reduction under way receives into."""
        ranks = self.gather_ranks
        share = self.flat_bytes // ranks
        if self.point_to_point:
            return share * (ranks - 1 - self.read_in_place)
        return share * (ranks > 1)

    @property
    def staged_bytes(self) -> int:
        """A shard from the host, on the device while a gather casts it."""
        return self.shard_bytes if self.on_host and self.storage != self.compute else 0

    @property
    def encoded_buffer_bytes(self) -> int:
        """What a gather under way receives into before it is decoded."""
        return (self.encoded_bytes or 0) * self.gather_ranks

    @property
    def converts_gradients(self) -> bool:
        """The sharded gradient is a copy of what was reduced, not the same memory."""
        grad = self.grad.to_real() if self.grad.is_complex else self.grad
        return grad != self.reduce

    @property
    def widens_gradients(self) -> bool:
        """They travel over replicas in a wider dtype than between shards."""
        return self.converts_gradients and self.summed_itemsize > self.reduce.itemsize

    @property
    def spread_bytes(self) -> int:
        """What is kept between forward and backward where the bucket is spread."""
        return 0 if self.spread is None else self.full_bytes // self.spread

    @property
    def weight_copy_bytes(self) -> int:
        """What a gather reads, where that is not the shard: in the compute dtype, for good."""
        copied = self.fused if self.fused > 1 else self.device_copy
        return self.shard_numel * self.compute.itemsize * copied


def describe_bucket(bucket: Bucket, names: tuple[str, ...]) -> PlannedBucket:
    """Describe a bucket of a sharded module; ``names`` are those of its parameters."""
    with raw():
        trained = sum(e.spec.numel for e in bucket.entries if e.param.requires_grad)
    return PlannedBucket(
        unit=bucket.entries[0].spec.unit,
        parameters=names,
        numel=sum(entry.spec.numel for entry in bucket.entries),
        trained_numel=trained,
        spread=None if bucket.spread is None else bucket.spread.size,
        in_place=bucket.in_place,
        **_describe_layout(
            bucket, shard_of(bucket).dtype, bucket.offload, bucket.mesh.axes is not None
        ),
    )


def describe_plan(plan: UnitPlan, bucket: BucketPlan) -> PlannedBucket:
    """Describe a bucket that is to be built."""
    numel = sum(extent.numel for extent in bucket.layout.extents)
    param, options = bucket.found[0].param, plan.options
    device = options.device if param.is_meta else param.device
    stays = not options.offload_policy.shards or device == bucket.mesh.device
    same = bucket.mp.dtypes_for(bucket.storage_dtype).compute == bucket.storage_dtype
    return PlannedBucket(
        unit=plan.name,
        parameters=tuple(plan.full_name(item.names[0]) for item in bucket.found),
        numel=numel,
        trained_numel=numel if param.requires_grad else 0,
        spread=options.placement.spread,
        in_place=bucket.layout.world_size == 1 and same and stays,
        **_describe_layout(
            bucket, bucket.storage_dtype, options.offload_policy, options.placement.fused
        ),
    )


def _describe_layout(
    bucket: Bucket | BucketPlan, storage: torch.dtype, offload: Offload, is_fused: bool
) -> dict[str, Any]:
    """Derive what follows from a bucket's mesh, dtypes and layout alone."""
    mesh: Mesh = bucket.mesh
    mp: MixedPrecision = bucket.mp
    dtypes = mp.dtypes_for(storage)
    fused = mesh.replicate_axis.size if is_fused else 1
    numel = bucket.layout.shard_numel if mesh.shard.size > 1 else 0
    codec = mp.gather_codec if numel else None
    summing = [mesh.shard, mesh.replicate_axis] if is_fused else [mesh.shard]
    return {
        "storage": storage,
        "compute": dtypes.compute,
        "reduce": dtypes.reduce,
        "grad": dtypes.grad,
        "shard_numel": bucket.layout.shard_numel,
        "ranks": mesh.shard.size if mesh.axes else mesh.shard.size * fused,
        "replicas": 1 if is_fused else mesh.replicate.size,
        "fused": fused,
        "point_to_point": any(map(is_point_to_point, summing)) or mesh.microbatches is not None,
        "read_in_place": count_shared(mesh.gather_axis) if isinstance(bucket, Bucket) else 0,
        "encoded_bytes": None if codec is None else encoded_nbytes(codec, numel, storage),
        "on_host": offload.shards and mesh.device.type != "cpu",
        "device_copy": offload.optimizer and not offload.params,
        "owned": tuple(whole_owners(bucket.layout)),
        "offsets": tuple(bucket.layout.offsets),
        "shapes": tuple(tuple(extent.shape) for extent in bucket.layout.extents),
    }
