"""The tests notice a guard that decides otherwise: each break names the test that must fail."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import replace as changed
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import fsdp_compose as fc
from fsdp_compose.base import mesh
from fsdp_compose.base.group import SELF
from fsdp_compose.comm import waiting
from fsdp_compose.core import reducing
from fsdp_compose.core.autograd import Gather
from fsdp_compose.core.guards import (
    added_gradients,
    cast_buffers,
    collective_log,
    compared_reductions,
    hooked_weights,
    interrupts,
    partly_run,
    standing_views,
    trained_entries,
    unread_weights,
)
from fsdp_compose.optim import step_guard
from fsdp_compose.sharded import operands

from breaking import Break, answer, assert_noticed, put, wrap

pytestmark = pytest.mark.slow

UNREAD = "core/test_unread_weights.py"
INTERRUPTS = "core/test_interrupts.py"
FAILURE = "core/test_after_failure.py"
PARTLY = "core/test_partly_run.py"
HOOKS = "core/test_parameter_hooks.py"
PRECISION = "core/test_precision.py"
INSIDE = "core/test_enabled_inside.py"
TRAINED = "core/guards/test_trained_entries.py"
FREEZING = "construct/test_freezing.py"
WAYS = "core/test_ways_of_reducing.py"
LEFT_OUT = "core/test_steps_left_out.py"
SETTINGS = "core/test_settings_differ.py"
PARTNERS = "sharded/test_partners_differ.py"
EXIT = "cli/test_exit.py"
CLEARED = "core/guards/test_cleared_differ.py"


def is_function(node: Any) -> bool:
    return getattr(node, "_forward_cls", None) is not None


def see_hooks_alone(hides: Any, node: Any) -> bool:
    return not is_function(node) and hides(node)


def see_functions_alone(hides: Any, node: Any) -> bool:
    return is_function(node) and hides(node)


def see_own_functions(hides: Any, node: Any) -> bool:
    return is_function(node) or hides(node)


def unpack_saved() -> None:
    """The tensors that hooks of the caller took are asked for."""
    answer(False, "hides_reads", "base.torch_stack")()
    unread_weights.saved_tensor_hooks = lambda: None


def forget_earlier_calls(note: Any, unit: Any, *rest: Any) -> Any:
    """As if the earlier call had saved no weight: the note of a node that is gone stands for it."""
    unit.graphs.unread = [*unit.graphs.unread, weakref.ref(torch.nn.Identity())]
    return note(unit, *rest)


def wait_for_active(clear: Any, unit: Any, module: Any) -> None:
    """What an interrupt at the very end of a forward left is not looked for."""
    if unit.engine.schedule.active or unit.run.task is not None or unit.opened is not None:
        clear(unit, module)


def close_as_seen(close: Any, unit: Any) -> None:
    unit.run.finished = dict.fromkeys(unit.run.finished, "seen")
    close(unit)


def cast_one_by_one(
    convert: Any, module: Any, dtypes: Mapping[str, Any], mp: Any, *, back: bool
) -> None:
    """A buffer of two names becomes two."""
    for name, dtype in dtypes.items():
        convert(module, {name: dtype}, mp, back=back)


def cast_every_dtype(
    convert: Any, module: Any, dtypes: Mapping[str, Any], mp: Any, *, back: bool
) -> None:
    """A buffer that was converted to another dtype is cast too."""
    for name, dtype in dtypes.items():
        buffer = module.get_buffer(name)
        buffer.data = buffer.data.to(dtype if back else mp.buffer_dtype)


def leave_buffers_in_inference() -> None:
    cast_buffers.torch = SimpleNamespace(inference_mode=lambda mode: nullcontext())


def view_anew(view: Any, unit: Any) -> Any:
    unit.links.standing = None
    return view(unit)


def share_after_backward() -> None:
    """The node that a backward has reached is read by the next evaluation, too."""

    def backward(ctx: Any, *grads: Any) -> Any:
        ctx.unit_ref().graphs.nodes.add(ctx)
        return Gather.backward(ctx, *grads)

    node: Any = standing_views.Stand
    node._backward_cls.apply = backward


def keep_frozen(leave_out: Any, unit: Any, trained: Any, grads: Any) -> Any:
    return trained, grads


def count_trained() -> None:
    """That a rank trains only some parameters is compared, and not which ones."""
    code_of = compared_reductions.code_of
    compared_reductions.code_of = lambda number, how, trained: code_of(
        number, how, trained.bit_count()
    )


def reduce_alike(note: Any, unit: Any, bucket: Any) -> None:
    log, number = unit.links.reduce_events[bucket]
    log.note((number, "reduce", unit.name, "backward"))


def compare_settings(is_compared: Callable[[str, Any], bool]) -> Break:
    """Let ranks compare only those settings of a group of which ``is_compared`` is true."""

    def some(group: dict[str, Any]) -> dict[str, Any]:
        return found({k: v for k, v in group.items() if is_compared(k, v)})

    found = step_guard._list_numbers
    return put(step_guard, "_list_numbers", some)


def forget_replicas(compare: Any, specs: Any) -> None:
    compare([changed(spec, replicas=SELF) for spec in specs])


def remember_compared() -> None:
    """A mask is taken for a result of what the parameter was compared with."""
    names = {k: v for k, v in vars(operands.ops).items() if not k.startswith("__")}
    operands.ops = SimpleNamespace(**{**names, "COMPARING": frozenset()})


def note_all(note: Any, entries: Any, were_there: Any) -> None:
    note(entries, [True] * len(entries))


def clear_first(model: torch.nn.Module) -> None:
    model.get_parameter("first.weight").grad = None


BREAKS: dict[str, tuple[Any, ...]] = {
    # Units that are not gathered in backward.
    "reads of functions": (
        wrap("hides_reads", "base.torch_stack", see_hooks_alone),
        UNREAD, "test_reads_that_the_graph_does_not_show", "function",
    ),
    "reads of what hooks took": (
        wrap("hides_reads", "base.torch_stack", see_functions_alone),
        UNREAD, "test_reads_that_the_graph_does_not_show", "checkpoint",
    ),
    "no reads of the library's own functions": (
        wrap("hides_reads", "base.torch_stack", see_own_functions),
        UNREAD, "test_a_unit_inside_is_no_hidden_read",
    ),
    "saved weights": (
        put(unread_weights, "lies_in", lambda bucket, tensor: False),
        UNREAD, "test_every_branch_of_the_graph_is_looked_at", True,
    ),
    "units that the caller keeps": (
        answer(False, "_is_kept", "core.guards.unread_weights"),
        UNREAD, "test_what_the_caller_keeps_is_kept",
    ),
    "reads of an evaluation": (
        put(unread_weights, "read_versions", lambda unit: ()),
        UNREAD, "test_an_evaluation_between", {"reshard_after_forward": True},
    ),
    "reads of an earlier call": (
        wrap("note_unread", "core.guards.unread_weights", forget_earlier_calls),
        UNREAD, "test_a_layer_of_which_one_call_is_read", True,
    ),
    "what hooks of the caller took": (
        unpack_saved, UNREAD, "test_hooks_of_the_caller_are_left_alone",
    ),
    "which weight is read": (
        put(unread_weights, "_name_at", lambda unit, pointer: unit.entries[-1].spec.fqn),
        UNREAD, "test_a_weight_that_is_read_is_named",
    ),
    # Interrupts.
    "units that an interrupt left open": (
        answer(None, "leave_interrupted", "core.guards.interrupts"),
        INTERRUPTS, "test_a_forward_that_catches_the_interrupt", False, False, {},
    ),
    "shields that an interrupt left": (
        put(interrupts, "unshield", lambda unit: None),
        INTERRUPTS, "test_an_interrupt_inside_saved_tensor_hooks",
    ),
    "what an interrupted call has put back": (
        put(interrupts, "_find_returned", lambda unit: []),
        INTERRUPTS, "test_a_functional_call_is_interrupted_inside", ["weight", "bias"], True,
    ),
    "a functional call that is over": (
        put(interrupts, "close_functional_call", lambda unit: None),
        INTERRUPTS, "test_a_functional_call_is_interrupted_inside", ["weight", "bias"], False,
    ),
    "a forward that was interrupted": (
        answer(None, "clear_failed", "core.guards.interrupts"),
        FAILURE, "test_gradients_from_before_an_interrupt", "head",
    ),
    "an interrupt at the end of a forward": (
        wrap("clear_failed", "core.guards.interrupts", wait_for_active),
        FAILURE, "test_an_interrupt_while_leaves_are_put_back", "ZERO1",
    ),
    "a call that does not run": (
        put(interrupts, "is_on_stack", lambda unit, module: True),
        FAILURE, "test_gradients_from_before_an_interrupt", "head",
    ),
    "a call that runs": (
        put(interrupts, "is_on_stack", lambda unit, module: False),
        "core/test_passes.py", "test_module_called_three_times_reduces_once", True, False,
    ),
    "steps after an interrupt": (
        answer(None, "clear_interrupted", "core.guards.interrupts"),
        INTERRUPTS, "test_a_step_after_an_interrupt",
    ),
    "gradients that clipping did not reach": (
        put(interrupts, "find_uncleared", lambda engine: None),
        INTERRUPTS, "test_a_step_after_an_interrupt",
    ),
    "parameters that modules do not hold": (
        put(interrupts, "recover", lambda engine: None),
        INTERRUPTS, "test_a_step_after_an_interrupt",
    ),
    "a step inside a forward": (
        put(interrupts, "is_in_call", lambda frame: False),
        INTERRUPTS, "test_a_step_inside_a_forward",
    ),
    # Units of which a part ran.
    "units of which a part ran": (
        answer(None, "close_partly_run", "core.guards.partly_run"),
        PARTLY, "test_a_module_is_left_out", False,
    ),
    "parts that are recomputed": (
        put(partly_run, "graph_task_id", lambda: -1),
        "core/test_checkpointing.py", "test_a_checkpoint_inside_a_recomputed_unit", False,
    ),
    "outputs that cannot be looked into": (
        wrap("close_forward", "core.guards.partly_run", close_as_seen),
        PARTLY, "test_a_hidden_output_of_one_module",
    ),
    "parts of a functional call": (
        put(partly_run, "close_functional_call", lambda unit: None),
        PARTLY, "test_left_out_in_a_functional_call",
    ),
    # Hooks on gathered weights, and buffers that are cast.
    "hooks registered in a forward": (
        answer(None, "find_hooked", "core.guards.hooked_weights"),
        HOOKS, "test_hooks_registered_in_their_forward_raise", "FULL_SHARD",
    ),
    "hooks of the library itself": (
        put(hooked_weights, "_is_users", lambda hook: True),
        HOOKS, "test_a_unit_that_returns_its_weight_runs_twice",
    ),
    "buffers of an evaluation": (
        wrap("choose_precision", "core.guards.cast_buffers",
             lambda choose, unit, module: cast_buffers.computes_as_stored(unit, module)),
        PRECISION, "test_buffers_follow_full_precision_in_eval", "plain",
    ),
    "buffers that modules share": (
        wrap("convert_buffers", "core.guards.cast_buffers", cast_one_by_one),
        PRECISION, "test_buffers_follow_full_precision_in_eval", "plain",
    ),
    "buffers that were converted": (
        wrap("convert_buffers", "core.guards.cast_buffers", cast_every_dtype),
        PRECISION, "test_a_converted_buffer_stays_what_it_was_made",
    ),
    "buffers in inference mode": (
        leave_buffers_in_inference,
        PRECISION, "test_buffers_cast_in_inference_can_be_trained_on",
    ),
    "evaluations in stored precision": (
        answer(False, "computes_as_stored", "core.guards.cast_buffers"),
        PRECISION, "test_buffers_follow_full_precision_in_eval", "scope",
    ),
    # What trains, under no_grad too.
    "gradients turned on inside": (
        put(standing_views, "trained_entries", lambda unit: ()),
        INSIDE, "test_frozen_parameters_have_none",
    ),
    "views of the evaluation before": (
        wrap("view_standing", "core.guards.standing_views", view_anew),
        INSIDE, "test_evaluations_share_their_views",
    ),
    "weights that changed between evaluations": (
        put(standing_views, "read_versions", lambda unit: ()),
        INSIDE, "test_evaluations_share_their_views",
    ),
    "views that a backward has reached": (
        share_after_backward, INSIDE, "test_a_graph_over_its_gradients", False,
    ),
    "parameters that were frozen or not": (
        wrap("trained_entries", "core.guards.trained_entries",
             lambda ask, unit: unit.links.trained or ask(unit)),
        TRAINED, "test_a_change_is_heeded",
        lambda model, param, value: param.requires_grad_(value),
    ),
    "that nothing was frozen": (
        wrap("trained_entries", "core.guards.trained_entries",
             lambda ask, unit: trained_entries._ask(unit)),
        TRAINED, "test_parameters_are_asked_once",
    ),
    "what was frozen before the backward": (
        wrap("leave_out_frozen", "core.guards.trained_entries", keep_frozen),
        TRAINED, "test_a_change_before_backward_is_heeded",
    ),
    # What ranks do differently.
    "ways of reducing": (
        wrap("note_reduction", "core.guards.compared_reductions", reduce_alike),
        WAYS, "test_the_right_step_after_different_ways",
    ),
    "which parameters each rank trains": (
        count_trained, FREEZING, "test_each_rank_freezes_another_parameter",
    ),
    "what one rank does not train": (
        answer(None, "explain_frozen", "core.guards.rank_differences"),
        FREEZING, "test_freezing_on_one_rank_before_the_backward", "",
    ),
    "a step left out": (
        answer(None, "explain_stepped", "core.guards.rank_differences"),
        LEFT_OUT, "test_a_step_left_out_raises_on_every_rank",
        fc.ShardingStrategy.FULL_SHARD, torch.nn.Module.parameters,
    ),
    "a step of one of two optimizers": (
        answer(None, "_explain_counts", "core.guards.rank_differences"),
        LEFT_OUT, "test_a_step_of_one_of_two_optimizers", torch.nn.Module.parameters, 0,
    ),
    "guesses that were wrong": (
        answer("", "explain_unknown", "core.guards.rank_differences"),
        "core/guards/test_guard_logs.py", "test_a_guess_that_was_wrong_is_named", 0,
    ),
    "settings that differ": (
        answer(None, "explain_settings", "core.guards.rank_differences"),
        SETTINGS, "test_any_setting_of_any_group", "weight_decay", 0.5,
    ),
    "settings besides the rate": (
        compare_settings(lambda name, value: name == "lr"),
        SETTINGS, "test_any_setting_of_any_group", "weight_decay", 0.5,
    ),
    "settings of two numbers": (
        compare_settings(lambda name, value: not isinstance(value, tuple)),
        SETTINGS, "test_any_setting_of_any_group", "betas", (0.5, 0.5),
    ),
    "settings that are tensors": (
        compare_settings(lambda name, value: not isinstance(value, torch.Tensor)),
        SETTINGS, "test_any_setting_of_any_group", "lr", None,
    ),
    "that ranks have other groups": (
        put(collective_log.Log, "_check_settings", lambda log, comparison: None),
        SETTINGS, "test_ranks_may_have_other_groups",
    ),
    "optimizers that are gone": (
        put(step_guard, "weakref", SimpleNamespace(ref=lambda optimizer: lambda: optimizer)),
        SETTINGS, "test_a_step_keeps_no_model_alive",
    ),
    "operands of a result": (
        wrap("with_partners", "sharded.operands", lambda remember, func, spec, *rest: spec),
        PARTNERS, "test_a_number_of_its_own_on_each_rank",
    ),
    "operands of a reduction": (
        answer(None, "compare_partners", "sharded.operands"),
        PARTNERS, "test_a_number_of_its_own_on_each_rank",
    ),
    "operands of replicas": (
        wrap("compare_partners", "sharded.operands", forget_replicas),
        PARTNERS, "test_replicas_with_tensors_of_their_own",
    ),
    "values of operands": (
        put(operands, "crc_of", lambda tensor: 0),
        PARTNERS, "test_a_number_of_its_own_on_each_rank",
    ),
    "operands that are compared with": (
        remember_compared, PARTNERS, "test_writes_remember_nothing",
    ),
    # Gradients that ranks clear in their own ways.
    "gradients that one rank clears": (
        answer(None, "explain_added", "core.guards.rank_differences"),
        CLEARED, "test_the_next_backward_finds_it", torch.nn.Module.zero_grad,
    ),
    "which gradients one rank clears": (
        wrap("note_added", "core.guards.added_gradients", note_all),
        CLEARED, "test_the_next_backward_finds_it", clear_first,
    ),
    "gradients with a graph that one rank clears": (
        put(reducing, "note_added", lambda entries, were_there: None),
        CLEARED, "test_a_gradient_with_a_graph_is_compared_too",
    ),
    "gradients that a backward reduces twice": (
        put(added_gradients, "int", lambda text: 0),
        CLEARED, "test_a_unit_that_is_reduced_twice_in_a_backward",
    ),
    "settings after a difference": (
        answer(False, "have_same_parameters", "core.guards.rank_differences"),
        CLEARED, "test_settings_are_compared_after_a_difference",
    ),
    "steps without a gradient": (
        put(step_guard, "_list_without_gradient", lambda optimizer, log: []),
        CLEARED, "test_a_step_without_it_is_found_in_the_next", clear_first,
    ),
    # The end of a process.
    "the thread that watches": (
        put(waiting._Watch, "stop", lambda watch: None), EXIT, "test_the_thread_that_watches_ends",
    ),
    "threads of gloo": (
        put(mesh, "_let_gloo_end", lambda: None), EXIT, "test_a_rank_gives_gloo_a_moment",
    ),
}  # fmt: skip
"""What is not heeded any more: how, and the test that notices it, with its parameters."""


@pytest.mark.parametrize("name", BREAKS)
def test_a_broken_guard_is_noticed(
    name: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert_noticed(BREAKS[name], caplog=caplog, monkeypatch=monkeypatch)
