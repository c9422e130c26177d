"""Fully Sharded Data Parallel as plain functions over plain modules."""

from fsdp_compose import wrap
from fsdp_compose.comm_hooks import (
    Int8ErrorFeedback,
    bf16_compress_hook,
    comm_hook_state_dict,
    default_hook,
    fp16_compress_hook,
    int8_error_feedback_hook,
    load_comm_hook_state_dict,
    register_comm_hook,
    register_post_reduce_hook,
)
from fsdp_compose.fully_shard import fully_shard, undo
from fsdp_compose.policy import MixedPrecision, Offload, Prefetch, ShardingStrategy
from fsdp_compose.state import get_state, is_fully_sharded

__all__ = [
    "Int8ErrorFeedback",
    "MixedPrecision",
    "Offload",
    "Prefetch",
    "ShardingStrategy",
    "bf16_compress_hook",
    "comm_hook_state_dict",
    "default_hook",
    "fp16_compress_hook",
    "fully_shard",
    "get_state",
    "int8_error_feedback_hook",
    "is_fully_sharded",
    "load_comm_hook_state_dict",
    "register_comm_hook",
    "register_post_reduce_hook",
    "undo",
    "wrap",
]
__version__ = "0.1.0"
