"""Fully Sharded Data Parallel as plain functions over plain modules."""

from fsdp_compose import wrap
from fsdp_compose.fully_shard import fully_shard, undo
from fsdp_compose.policy import MixedPrecision, Prefetch, ShardingStrategy
from fsdp_compose.state import get_state, is_fully_sharded

__all__ = [
    "MixedPrecision",
    "Prefetch",
    "ShardingStrategy",
    "fully_shard",
    "get_state",
    "is_fully_sharded",
    "undo",
    "wrap",
]
__version__ = "0.1.0"
