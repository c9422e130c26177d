"""Policies that choose which submodules become units: ``fully_shard(model, units=...)``."""

from fsdp_compose.construct.wrap import (
    Classes,
    Decide,
    Decision,
    Policy,
    UnitOptions,
    by_class,
    by_execution_order,
    by_fn,
    by_name,
    by_size,
)

__all__ = [
    "Classes",
    "Decide",
    "Decision",
    "Policy",
    "UnitOptions",
    "by_class",
    "by_execution_order",
    "by_fn",
    "by_name",
    "by_size",
]
