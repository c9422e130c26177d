"""Finds weights that were written since they were gathered, also where autograd cannot see it."""

from __future__ import annotations

import torch

from fsdp_compose.base.codec import encode_shard
from fsdp_compose.base.streams import may_compare
from fsdp_compose.buckets.bucket import GATHERED, Bucket, Entry
from fsdp_compose.buckets.gather import find_other, versions_of
from fsdp_compose.core.records import Live
from fsdp_compose.core.state import Unit


def check_lent(unit: Unit, bucket: Bucket) -> None:
    """Raise when a slice that was handed out was written in a way that autograd cannot see.

    On an accelerator this waits for the device, so it is done only in debug mode.
    """
    if not may_compare(bucket.views.own.device):
        return
    entry = find_difference(bucket)
    if entry is not None:
        bucket.fill.stamp = object()
        raise RuntimeError(
            f"parameter {entry.spec.fqn!r} of unit {unit.name!r} was written while the unit was "
            "kept gathered, through memory that p.to_local(), local_parameters or flat_parameters "
            "gave out, and in a way that autograd does not count (.data, NumPy). The gathered "
            "parameter still has the old value. Write under torch.no_grad() without .data, or call "
            "fsdp_compose.reshard(module) after writing."
        )


def is_outrun(bucket: Bucket) -> bool:
    """Whether a parameter was written, or its ``.data`` handed out, since the bucket was filled."""
    if bucket.in_place:
        return False  # there is nothing to fill
    fill = bucket.fill
    return fill.handed_out != bucket.residence.written or fill.versions != versions_of(bucket)


def find_difference(bucket: Bucket) -> Entry | None:
    """Find an entry whose gathered values differ from this rank's shard."""
    if bucket.in_place or bucket.phase is not GATHERED or bucket.residence.moved:
        return None  # they share memory, or there is nothing to compare
    if is_outrun(bucket):
        return None  # the shard was written since, as its version says
    own, codec = bucket.views.own, bucket.mp.gather_codec
    if codec is None or bucket.mesh.shard.pg is None or not own.numel():
        return find_other(bucket, own, bucket.stored)
    shard = bucket.stored.to(own.device)
    with torch.no_grad():
        encoded = encode_shard(codec, shard)
        if not torch.equal(encoded, encode_shard(codec, shard)):
            return None  # the codec rounds at random
        wanted = torch.empty_like(own)
        codec.decode(encoded, wanted)
    return find_other(bucket, own, wanted)


def read_versions(unit: Unit) -> list[tuple[int, ...]]:
    """Return the versions of the weights that the unit's modules read now, by bucket."""
    versions: list[tuple[int, ...]] = []
    for bucket in unit.gathered:
        versions.append(versions_of(bucket) if bucket.in_place else bucket.fill.versions)
    return versions


def forget_outdated(unit: Unit) -> None:
    """After a backward and a write: forget what forward computed with, which holds its graph."""
    live = unit.run.live
    if (
        live is not None
        and not live.pass_id
        and live.versions != list(map(versions_of, unit.gathered))
    ):
        unit.run.live = None


def end_live(unit: Unit) -> Live | None:
    """End the unit's pass, which failed; what its last forward computed with.

    The backward of a forward before it may compute checkpointed parts again, which read that.
    """
    live = unit.run.live
    if live is not None:
        live.pass_id = 0
    return live


def check_unwritten(unit: Unit, read: list[tuple[int, ...]]) -> None:
    """Raise unless backward computed with the versions that forward ``read``."""
    for bucket, before in zip(unit.gathered, read, strict=False):
        now = versions_of(bucket) if bucket.in_place else bucket.fill.versions
        if before != now:
            check_versions(unit, bucket, before, now)


def check_versions(
    unit: Unit, bucket: Bucket, before: tuple[int, ...], now: tuple[int, ...]
) -> None:
    """Raise where a bucket's versions in forward, ``before``, are not those in backward."""
    if before == now:
        return
    changed = [e for e, a, b in zip(bucket.entries, before[1:], now[1:], strict=False) if a != b]
    spec = (changed or bucket.entries)[0].spec
    raise RuntimeError(
        f"parameter {spec.fqn!r} of unit {unit.name!r} was written between the unit's "
        "forward and this backward, which gathered it anew: the gradients would mix old "
        "and new weights. Call optimizer.step(), and anything else that writes weights, "
        "after the backwards of all losses that were computed with them; what is stepped apart "
        "from the rest of a unit can be a unit of its own (fully_shard, units=)."
    )


def check_computed(unit: Unit, read: list[tuple[int, ...]]) -> None:
    """Raise unless backward computed with gathered weights, of the versions ``read``."""
    check_unwritten(unit, read)
    for bucket in unit.gathered:
        if bucket.phase is not GATHERED and not bucket.in_place:
            raise RuntimeError(_UNSEEN.format(name=unit.name))


_UNSEEN = (
    "backward computed with weights of unit {name!r} that were released. It reached a tensor that "
    "the unit's forward passed on without returning it, such as a key-value cache that it was "
    "given, and nothing that the forward returned is part of the loss. Run forward inside "
    "`with fsdp_compose.gathered(model):`, after which backward needs no gather, or let the loss "
    "depend on what forward returned (loss + 0 * output.sum()), or return the tensor."
)
