"""Fully Sharded Data Parallel as plain functions over plain modules.

What is public is imported when the first of its names is used: the command line and the launcher
start without torch.
"""

from fsdp_compose.base.lazy import import_on_use as _import_on_use

_is_used: bool = globals().get("_is_used", False)  # set by lazy.py, which runs this file again
if _is_used:
    from fsdp_compose import wrap
    from fsdp_compose.base.codec import GatherCodec
    from fsdp_compose.base.group import Transport
    from fsdp_compose.base.policy import MixedPrecision, Offload, Prefetch, ShardingStrategy
    from fsdp_compose.checkpoint import (
        Saving,
        get_state_dict_type,
        load_checkpoint,
        load_full,
        load_optim_state_dict,
        load_state_dict,
        optim_state_dict,
        rekey_optim_state_dict,
        save_checkpoint,
        save_full,
        set_state_dict_type,
        state_dict,
        state_dict_type,
    )
    from fsdp_compose.checkpoint.plain import attach_state_dict as _attach_state_dict
    from fsdp_compose.checkpoint.plain import detach_state_dict as _detach_state_dict
    from fsdp_compose.construct.fully_shard import fully_shard
    from fsdp_compose.construct.initialise import seeded_init
    from fsdp_compose.construct.names import (
        clean_name,
        parameter_names,
        parameters_by_name,
        units_of,
    )
    from fsdp_compose.construct.refresh import refresh
    from fsdp_compose.construct.tensor_parallel import declare_tensor_parallel
    from fsdp_compose.construct.trace import ExecutionOrder, TracingConfig, trace_execution_order
    from fsdp_compose.construct.undo import undo
    from fsdp_compose.core.guards.collective_log import set_debug
    from fsdp_compose.core.guards.methods import detach_methods as _detach_methods
    from fsdp_compose.core.guards.methods import register_forward_method
    from fsdp_compose.core.guards.replicas import verify_replicas
    from fsdp_compose.core.hooks import attachments as _attachments
    from fsdp_compose.core.records import GradBucket
    from fsdp_compose.core.state import get_state, is_fully_sharded
    from fsdp_compose.optim.clip import clip_grad_norm_, grad_norm
    from fsdp_compose.optim.flat import flat_parameters, local_parameters, named_local_parameters
    from fsdp_compose.optim.owner import OwnerOptimizer, owner_step
    from fsdp_compose.optim.scaler import GradScaler
    from fsdp_compose.report import (
        Plan,
        count_traffic,
        explain,
        plan,
        plot_plan,
        traffic_report,
    )
    from fsdp_compose.scopes.apply import apply
    from fsdp_compose.scopes.asked import set_traceable
    from fsdp_compose.scopes.comm_hooks import (
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
    from fsdp_compose.scopes.compile import detach_traced as _detach_traced
    from fsdp_compose.scopes.gathered import gathered, iter_full, summon_full_params
    from fsdp_compose.scopes.participate import participate
    from fsdp_compose.scopes.pipeline import pipeline_stage
    from fsdp_compose.scopes.prefetch import seed_order, set_backward_prefetch, set_forward_prefetch
    from fsdp_compose.scopes.switches import (
        accumulate,
        no_sync,
        set_find_unused_parameters,
        set_gradient_divide_factor,
        set_is_last_backward,
        set_requires_all_reduce,
        set_requires_gradient_sync,
        set_reshard_after_backward,
        set_reshard_after_forward,
    )
    from fsdp_compose.scopes.unshard import (
        UnshardHandle,
        prefetch_units,
        reduce_grads,
        reshard,
        unshard,
    )
    from fsdp_compose.sharded import (
        ShardedDTensor,
        ShardedParameter,
        ShardedTensor,
        ShardedWeightError,
    )

    # What is put on the module of every unit, besides the hooks that gather, and taken off it.
    _attachments[:] = [
        (lambda module: None, _detach_methods),
        (lambda module: None, _detach_traced),
        (_attach_state_dict, _detach_state_dict),
    ]

__all__ = [
    "ExecutionOrder",
    "GatherCodec",
    "GradBucket",
    "GradScaler",
    "Int8ErrorFeedback",
    "MixedPrecision",
    "Offload",
    "OwnerOptimizer",
    "Plan",
    "Prefetch",
    "Saving",
    "ShardedDTensor",
    "ShardedParameter",
    "ShardedTensor",
    "ShardedWeightError",
    "ShardingStrategy",
    "TracingConfig",
    "Transport",
    "UnshardHandle",
    "accumulate",
    "apply",
    "bf16_compress_hook",
    "clean_name",
    "clip_grad_norm_",
    "comm_hook_state_dict",
    "count_traffic",
    "declare_tensor_parallel",
    "default_hook",
    "explain",
    "flat_parameters",
    "fp16_compress_hook",
    "fully_shard",
    "gathered",
    "get_state",
    "get_state_dict_type",
    "grad_norm",
    "int8_error_feedback_hook",
    "is_fully_sharded",
    "iter_full",
    "load_checkpoint",
    "load_comm_hook_state_dict",
    "load_full",
    "load_optim_state_dict",
    "load_state_dict",
    "local_parameters",
    "named_local_parameters",
    "no_sync",
    "optim_state_dict",
    "owner_step",
    "parameter_names",
    "parameters_by_name",
    "participate",
    "pipeline_stage",
    "plan",
    "plot_plan",
    "prefetch_units",
    "reduce_grads",
    "refresh",
    "register_comm_hook",
    "register_forward_method",
    "register_post_reduce_hook",
    "rekey_optim_state_dict",
    "reshard",
    "save_checkpoint",
    "save_full",
    "seed_order",
    "seeded_init",
    "set_backward_prefetch",
    "set_debug",
    "set_find_unused_parameters",
    "set_forward_prefetch",
    "set_gradient_divide_factor",
    "set_is_last_backward",
    "set_requires_all_reduce",
    "set_requires_gradient_sync",
    "set_reshard_after_backward",
    "set_reshard_after_forward",
    "set_state_dict_type",
    "set_traceable",
    "state_dict",
    "state_dict_type",
    "summon_full_params",
    "trace_execution_order",
    "traffic_report",
    "undo",
    "units_of",
    "unshard",
    "verify_replicas",
    "wrap",
]
__version__ = "0.1.0"

_import_on_use(__name__)
