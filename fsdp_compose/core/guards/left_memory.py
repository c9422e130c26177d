"""Memory of released weights that something else still reads or writes is left to it.

``weight.detach().numpy()`` in a forward makes torch refuse to resize the storage. The array keeps
it, as in a plain module. A gather that was given up, as a rank died, may yet be written by messages
that come late. In both cases the bucket is gathered elsewhere the next time.
"""

from __future__ import annotations

import torch

from fsdp_compose.base.torch_private import read_version, set_versions
from fsdp_compose.buckets.bucket import Bucket, alias
from fsdp_compose.buckets.build import view_full
from fsdp_compose.core.state import Engine


def leave_full(engine: Engine, bucket: Bucket) -> None:
    """Give a released bucket other memory, of 0 bytes until it is gathered."""
    former = tuple(bucket.aliases)
    with torch.inference_mode(False), torch.no_grad():
        bucket.full = torch.empty_like(bucket.full)
        storage = bucket.full.untyped_storage()
        bucket.aliases = [alias(bucket.full, e.spec.offset, e.spec) for e in bucket.entries]
        bucket.counts = list(map(read_version, bucket.aliases))
        view_full(bucket)
        storage.resize_(0)
    replaced = dict(zip(map(id, former), bucket.aliases, strict=True))
    for unit in engine.units:
        unit.links.aliases[:] = [replaced.get(id(item), item) for item in unit.links.aliases]
        unit.links.standing = None
    if bucket.fill.exchange.is_open:
        # Not what was gathered: torch refuses a backward that would read it.
        set_versions(former, tuple([read_version(alias) + 1 for alias in former]))
