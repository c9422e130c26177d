"""A save beside which another thread went on training commits nothing.

Files are written for seconds. What an optimizer steps meanwhile would be in them in part: weights
of several steps, in a checkpoint that loads without a word.
"""

from __future__ import annotations

from collections.abc import Callable

from torch import nn

from fsdp_compose.buckets.gather import versions_of
from fsdp_compose.core.guards.units import units_holding


def watch_writes(what: str, module: nn.Module) -> Callable[[], None]:
    """Return a function that raises if a sharded parameter of ``module`` was written since.

    Args:
        what: the function that saves.
    """
    buckets = [bucket for unit in units_holding(module) for bucket in unit.buckets]
    before = [versions_of(bucket) for bucket in buckets]

    def require_unwritten() -> None:
        for bucket, old in zip(buckets, before, strict=True):
            now = versions_of(bucket)
            if now == old:
                continue
            changed = [was != is_ for was, is_ in zip(old[1:], now[1:], strict=True)]
            spec = bucket.entries[changed.index(True) if any(changed) else 0].spec
            raise RuntimeError(
                f"{what}: parameter {spec.fqn!r} (unit {spec.unit!r}), perhaps among others, was "
                "written while it was being saved, as by a step in another thread: the files would "
                "hold weights of several steps. Save between two steps, in the thread that trains; "
                "save_checkpoint(..., asynchronous=True) called there copies the state, and writes "
                "while training goes on."
            )

    return require_unwritten
