"""Fully Sharded Data Parallel as plain functions over plain modules."""

from fsdp_compose import wrap
from fsdp_compose.apply import apply
from fsdp_compose.checkpoint import load_state_dict, state_dict
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
from fsdp_compose.grads import clip_grad_norm_, grad_norm
from fsdp_compose.init import seeded_init
from fsdp_compose.names import clean_name, parameter_names, parameters_by_name, units_of
from fsdp_compose.policy import MixedPrecision, Offload, Prefetch, ShardingStrategy
from fsdp_compose.scaler import GradScaler
from fsdp_compose.schedule import seed_order, set_backward_prefetch, set_forward_prefetch
from fsdp_compose.scopes import gathered, iter_full, summon_full_params
from fsdp_compose.sharded import ShardedParameter, ShardedTensor, ShardedWeightError
from fsdp_compose.state import get_state, is_fully_sharded
from fsdp_compose.switches import (
    accumulate,
    no_sync,
    set_gradient_divide_factor,
    set_is_last_backward,
    set_requires_all_reduce,
    set_requires_gradient_sync,
    set_reshard_after_backward,
    set_reshard_after_forward,
)
from fsdp_compose.trace import ExecutionOrder, TracingConfig, trace_execution_order
from fsdp_compose.unshard import UnshardHandle, prefetch_units, reduce_grads, reshard, unshard
from fsdp_compose.verify import set_debug

__all__ = [
    "ExecutionOrder",
    "GradScaler",
    "Int8ErrorFeedback",
    "MixedPrecision",
    "Offload",
    "Prefetch",
    "ShardedParameter",
    "ShardedTensor",
    "ShardedWeightError",
    "ShardingStrategy",
    "TracingConfig",
    "UnshardHandle",
    "accumulate",
    "apply",
    "bf16_compress_hook",
    "clean_name",
    "clip_grad_norm_",
    "comm_hook_state_dict",
    "default_hook",
    "fp16_compress_hook",
    "fully_shard",
    "gathered",
    "get_state",
    "grad_norm",
    "int8_error_feedback_hook",
    "is_fully_sharded",
    "iter_full",
    "load_comm_hook_state_dict",
    "load_state_dict",
    "no_sync",
    "parameter_names",
    "parameters_by_name",
    "prefetch_units",
    "reduce_grads",
    "register_comm_hook",
    "register_post_reduce_hook",
    "reshard",
    "seed_order",
    "seeded_init",
    "set_backward_prefetch",
    "set_debug",
    "set_forward_prefetch",
    "set_gradient_divide_factor",
    "set_is_last_backward",
    "set_requires_all_reduce",
    "set_requires_gradient_sync",
    "set_reshard_after_backward",
    "set_reshard_after_forward",
    "state_dict",
    "summon_full_params",
    "trace_execution_order",
    "undo",
    "units_of",
    "unshard",
    "wrap",
]
__version__ = "0.1.0"
