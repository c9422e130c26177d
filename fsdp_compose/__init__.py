"""Fully Sharded Data Parallel as plain functions over plain modules.

The public names, by the question that they answer:

How do I shard a model, and undo it?
    fully_shard, undo, refresh, get_state, is_fully_sharded, ShardingStrategy, MixedPrecision,
    Offload, declare_tensor_parallel, seeded_init
Which modules become units?
    wrap, Policy, units_of, trace_execution_order, ExecutionOrder, TracingConfig,
    register_forward_method
When are weights gathered?
    unshard, reshard, UnshardHandle, Prefetch, PrefetchRule, prefetch_units,
    set_forward_prefetch, set_backward_prefetch, set_reshard_after_forward,
    set_reshard_after_backward, set_unshard_in_backward, set_traceable
When are gradients reduced?
    accumulate, no_sync, reduce_grads, pending_gradients, PendingGradient, participate,
    pipeline_stage, set_requires_gradient_sync, set_requires_all_reduce, set_is_last_backward,
    set_find_unused_parameters, set_gradient_divide_factor, register_post_reduce_hook,
    skippable_step
How do weights travel?
    Transport, GatherCodec, bf16_codec, fp8_codec, int8_codec
How are gradients reduced?
    register_comm_hook, CommHook, GradBucket, default_hook, bf16_compress_hook,
    fp16_compress_hook, int8_error_feedback_hook, Int8ErrorFeedback
How do I clip, scale and step?
    clip_grad_norm_, grad_norm, GradScaler, flat_parameters, local_parameters,
    named_local_parameters, owner_step, OwnerOptimizer
How do I get whole tensors?
    gathered, summon_full_params, iter_full, apply, parameter_names, parameters_by_name
What is a parameter between passes?
    ShardedParameter, ShardedTensor, ShardedDTensor, ShardedWeightError
How do I save and load?
    save_checkpoint, load_checkpoint, Saving, save_full, load_full, Format, Stored, state_dict,
    load_state_dict, set_state_dict_type, get_state_dict_type, state_dict_type, optim_state_dict,
    load_optim_state_dict, rekey_optim_state_dict
What does it cost?
    plan, Plan, explain, count_traffic, trace, Timeline, plot_plan, plot_memory, plot_timeline,
    plot_shards
What will go wrong?
    set_debug, verify_replicas, simulate

The folders; each imports only from those above it:

    layout      where every element of a bucket lives, who owns whole matrices: integers only
    base        the user's choices, meshes, streams, trees; torch's private names in one file
    comm        collectives, and how ranks agree on what they run
    sharded     what a parameter is between passes
    buckets     parameters in one flat buffer, and everything a step needs of it
    core        the engine: gathers, releases and reduces units; its guards against wrong numbers
    construct   what is to be built: names, policies, units, buckets; ranks compare it
    scopes      what users call between passes: full parameters, switches, hooks
    optim       clipping, scaling, plain tensors for optimizers, whole-matrix optimizers
    report      plans, explanations, traffic
    checkpoint  state dicts, checkpoints, safetensors
    attach      fully_shard, undo and refresh: build units, attach them to their modules
    simulation  W ranks in this process, replayed from a seed, with faults
    cli         the command line and the launcher

What is public is imported when the first of its names is used: the command line and the launcher
start without torch.
"""

from fsdp_compose.base.lazy import import_on_use as _import_on_use

_is_used: bool = globals().get("_is_used", False)  # set by lazy.py, which runs this file again
if _is_used:
    from fsdp_compose import wrap
    from fsdp_compose.attach.fully_shard import fully_shard
    from fsdp_compose.attach.refresh import refresh
    from fsdp_compose.attach.undo import undo
    from fsdp_compose.base.codec import GatherCodec
    from fsdp_compose.base.group import Transport
    from fsdp_compose.base.policy import (
        MixedPrecision,
        Offload,
        Prefetch,
        PrefetchRule,
        ShardingStrategy,
    )
    from fsdp_compose.checkpoint import (
        Format,
        Saving,
        Stored,
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
    from fsdp_compose.comm.codecs import bf16_codec, fp8_codec, int8_codec
    from fsdp_compose.comm.grad_bucket import GradBucket
    from fsdp_compose.construct.initialise import seeded_init
    from fsdp_compose.construct.names import parameter_names, parameters_by_name, units_of
    from fsdp_compose.construct.tensor_parallel import declare_tensor_parallel
    from fsdp_compose.construct.trace import ExecutionOrder, TracingConfig, trace_execution_order
    from fsdp_compose.construct.wrap import Policy
    from fsdp_compose.core.guards.collective_log import set_debug
    from fsdp_compose.core.guards.methods import register_forward_method
    from fsdp_compose.core.guards.replicas import verify_replicas
    from fsdp_compose.core.guards.units import get_state, is_fully_sharded
    from fsdp_compose.optim.clip import clip_grad_norm_, grad_norm
    from fsdp_compose.optim.owner_step import OwnerOptimizer, owner_step
    from fsdp_compose.optim.plain_parameters import (
        flat_parameters,
        local_parameters,
        named_local_parameters,
    )
    from fsdp_compose.optim.scaler import GradScaler
    from fsdp_compose.report import (
        Plan,
        Timeline,
        count_traffic,
        explain,
        plan,
        plot_memory,
        plot_plan,
        plot_shards,
        plot_timeline,
        trace,
    )
    from fsdp_compose.scopes.apply import apply
    from fsdp_compose.scopes.comm_hooks import (
        CommHook,
        Int8ErrorFeedback,
        bf16_compress_hook,
        default_hook,
        fp16_compress_hook,
        int8_error_feedback_hook,
        register_comm_hook,
        register_post_reduce_hook,
    )
    from fsdp_compose.scopes.compile import set_traceable
    from fsdp_compose.scopes.gathered import gathered, summon_full_params
    from fsdp_compose.scopes.participate import participate
    from fsdp_compose.scopes.pending import PendingGradient, pending_gradients
    from fsdp_compose.scopes.pipeline import pipeline_stage
    from fsdp_compose.scopes.prefetch import set_backward_prefetch, set_forward_prefetch
    from fsdp_compose.scopes.skippable import skippable_step
    from fsdp_compose.scopes.stream import iter_full
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
        set_unshard_in_backward,
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
    from fsdp_compose.simulation import simulate

__all__ = [  # noqa: RUF022 - by the question that each answers
    # how do I shard a model, and undo it?
    "fully_shard", "undo", "refresh", "get_state", "is_fully_sharded", "ShardingStrategy",
    "MixedPrecision", "Offload", "declare_tensor_parallel", "seeded_init",
    # which modules become units?
    "wrap", "Policy", "units_of", "trace_execution_order", "ExecutionOrder", "TracingConfig",
    "register_forward_method",
    # when are weights gathered?
    "unshard", "reshard", "UnshardHandle", "Prefetch", "PrefetchRule", "prefetch_units",
    "set_forward_prefetch", "set_backward_prefetch", "set_reshard_after_forward",
    "set_reshard_after_backward", "set_unshard_in_backward", "set_traceable",
    # when are gradients reduced?
    "accumulate", "no_sync", "reduce_grads", "pending_gradients", "PendingGradient", "participate",
    "pipeline_stage", "set_requires_gradient_sync", "set_requires_all_reduce",
    "set_is_last_backward", "set_find_unused_parameters", "set_gradient_divide_factor",
    "register_post_reduce_hook", "skippable_step",
    # how do weights travel?
    "Transport", "GatherCodec", "bf16_codec", "fp8_codec", "int8_codec",
    # how are gradients reduced?
    "register_comm_hook", "CommHook", "GradBucket", "default_hook", "bf16_compress_hook",
    "fp16_compress_hook", "int8_error_feedback_hook", "Int8ErrorFeedback",
    # how do I clip, scale and step?
    "clip_grad_norm_", "grad_norm", "GradScaler", "flat_parameters", "local_parameters",
    "named_local_parameters", "owner_step", "OwnerOptimizer",
    # how do I get whole tensors?
    "gathered", "summon_full_params", "iter_full", "apply", "parameter_names", "parameters_by_name",
    # what is a parameter between passes?
    "ShardedParameter", "ShardedTensor", "ShardedDTensor", "ShardedWeightError",
    # how do I save and load?
    "save_checkpoint", "load_checkpoint", "Saving", "save_full", "load_full", "Format", "Stored",
    "state_dict", "load_state_dict", "set_state_dict_type", "get_state_dict_type",
    "state_dict_type", "optim_state_dict", "load_optim_state_dict", "rekey_optim_state_dict",
    # what does it cost?
    "plan", "Plan", "explain", "count_traffic", "trace", "Timeline", "plot_plan", "plot_memory",
    "plot_timeline", "plot_shards",
    # what will go wrong?
    "set_debug", "verify_replicas", "simulate",
]  # fmt: skip
__version__ = "0.1.0"

_import_on_use(__name__)
