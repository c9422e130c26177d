"""Buffers at fixed addresses, in which buckets of several units take turns.

A bucket that was placed in one has its ``full`` there for good, over a storage of its own, so that
who reads it can be told from who reads the others. Its storage is never resized.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch.utils.dlpack import from_dlpack

from fsdp_compose.base.torch_private import read_version, set_versions
from fsdp_compose.buckets.bucket import Bucket, GradBuffer
from fsdp_compose.buckets.build import view_full
from fsdp_compose.buckets.gradients import make_grad_buffer


@dataclass(eq=False, repr=False)
class Place:
    """Memory at one address, allocated when it is first used; ``user`` was the last in it."""

    nbytes: int
    memory: torch.Tensor | None = None
    user: weakref.ref[Any] | None = None
    leases: list[weakref.ref[PlaceLease]] = field(default_factory=list)

    def part(self, start: int, nbytes: int, device: torch.device) -> torch.Tensor:
        """View some bytes of the place as a tensor over a storage of its own."""
        with torch.inference_mode(False), torch.no_grad():
            if self.memory is None:
                self.memory = torch.empty(self.nbytes, dtype=torch.uint8, device=device)
            return from_dlpack(self.memory[start : start + nbytes])

    def users(self) -> list[PlaceLease]:
        """List the leases of parts of the place; what nobody keeps is free again."""
        found = [lease for ref in self.leases if (lease := ref()) is not None]
        self.leases = list(map(weakref.ref, found))
        return found


@dataclass(eq=False, repr=False)
class PlaceLease:
    """A note that a unit's gradients are in these bytes of a place, while somebody keeps it."""

    unit: weakref.ref[Any] | None
    span: range


def place_full(bucket: Bucket, place: Place, start: int) -> None:
    """Have a bucket that is not gathered be gathered at ``start`` of ``place`` from now on."""
    nbytes, device = bucket.views.nbytes, bucket.mesh.device
    with torch.inference_mode(False), torch.no_grad():
        bucket.full = place.part(start, nbytes, device).view(bucket.full.dtype)
        storage = bucket.full.untyped_storage()
        for entry, alias in zip(bucket.entries, bucket.aliases, strict=True):
            alias.set_(storage, entry.spec.offset, entry.spec.shape, entry.spec.stride)
        bucket.counts = list(map(read_version, bucket.aliases))
        view_full(bucket)


@dataclass(eq=False, repr=False)
class PlaceLender:
    """A bucket's part of places; lends it its unit's for its gradients, or another that is free.

    Attributes:
        places: those of its model, the own one first.
        start: where the bucket's part of a place begins.
        made: its buffer in each place, made once.
        versions: of the bucket's aliases, while a backward may not read them.
    """

    places: Sequence[Place]
    start: int
    made: dict[Place, GradBuffer] = field(default_factory=dict)
    versions: tuple[int, ...] | None = None

    def refuse_reads(self, bucket: Bucket) -> None:
        """Have torch raise where a backward reads the released bucket, whose memory others use."""
        if self.versions is None:
            aliases = tuple(bucket.aliases)
            self.versions = tuple(map(read_version, aliases))
            set_versions(aliases, tuple([version + _AWAY for version in self.versions]))

    def allow_reads(self, bucket: Bucket) -> None:
        """Undo ``refuse_reads``, as the bucket is gathered again."""
        if self.versions is not None:
            set_versions(tuple(bucket.aliases), self.versions)
            self.versions = None

    def lend(self, bucket: Bucket) -> GradBuffer | None:
        """As ``Lender.lend``."""
        parts = 2 if bucket.stored.is_complex() else 1
        nbytes = bucket.layout.numel * parts * bucket.dtypes.reduce.itemsize
        span = range(self.start, self.start + nbytes)
        for place in self.places if bucket.mesh.gather_axis.size > 1 and nbytes else ():
            if span.stop <= place.nbytes and _is_free(place, bucket.users.unit, span):
                lease = PlaceLease(bucket.users.unit, span)
                place.leases.append(weakref.ref(lease))
                if place not in self.made:
                    memory = place.part(span.start, nbytes, bucket.mesh.device)
                    self.made[place] = make_grad_buffer(bucket, memory.view(bucket.dtypes.reduce))
                return replace(self.made[place], lease=lease)
        return None


_AWAY = 1 << 20
"""More writes than a forward makes: a version that no saved tensor has."""


def _is_free(place: Place, unit: object, span: range) -> bool:
    """Whether nobody but buckets of ``unit`` beside these bytes has gradients in ``place``."""
    return all(
        lease.unit == unit and (lease.span.stop <= span.start or span.stop <= lease.span.start)
        for lease in place.users()
    )
