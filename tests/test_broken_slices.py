"""The tests notice what goes wrong with slices themselves: each break names the test that fails."""

from __future__ import annotations

import sys
from contextlib import nullcontext
from dataclasses import replace as changed
from typing import Any

import pytest
import torch

import fsdp_compose as fc
from fsdp_compose.comm.collectives import all_reduce
from fsdp_compose.core.guards import collective_log, compared_steps
from fsdp_compose.optim import plain_parameters, slice_step, step_guard
from fsdp_compose.scopes import compared_edits
from fsdp_compose.sharded import convert, draws, reads, tensor, views, writes

from breaking import assert_noticed, put, wrap

pytestmark = pytest.mark.slow

DRAWS = "sharded/test_draws.py"
WRITES = "core/guards/test_writes_differ.py"
EDITS = "scopes/test_compared_edits.py"
VIEWS = "sharded/test_views.py"
FLAT = "optim/test_flat.py"
AGREE = "optim/test_flat_agree.py"
READS = "sharded/test_reads.py"


def note_at_the_end() -> None:
    """What was written is compared when the step ends."""
    note = collective_log.Log.note

    def note_alone(log: Any, event: Any) -> None:
        found = dict(log.steps.writes.found)
        log.steps.writes.found.clear()
        note(log, event)
        log.steps.writes.found |= found

    collective_log.Log.note = note_alone  # type: ignore[method-assign]


def pass_over_ended() -> None:
    """Plain parameters of a model that is sharded no more are not looked for."""
    find = plain_parameters._find_buckets
    plain_parameters._find_buckets = lambda optimizer: [ref for ref in find(optimizer) if ref()]


def remember_first_buckets() -> None:
    """What an optimizer is given after its first step is not looked at."""
    find = plain_parameters._find_buckets
    plain_parameters._find_buckets = lambda optimizer: (
        plain_parameters._find_stepped(optimizer).buckets or find(optimizer)
    )


def copy_buckets() -> None:
    """A copied optimizer goes by what the original has stepped."""
    del plain_parameters._Stepped.__reduce__


def take_frozen(list_leaves: Any, module: Any) -> Any:
    return dict(module.named_parameters())


BREAKS: dict[str, tuple[Any, ...]] = {
    # What ranks write in a scope.
    "edits that differ": (
        put(compared_edits, "sum_bytes", lambda tensor: torch.zeros((), dtype=torch.int64)),
        EDITS, "test_apply_compares_what_it_writes",
    ),
    "gradients that differ": (
        put(compared_edits, "_show", lambda total: ""),
        EDITS, "test_different_gradients_raise",
    ),
    "ranks of several meshes": (
        put(compared_edits, "min", lambda *counts: 1),
        EDITS, "test_ranks_of_other_meshes_write_nothing_either", "head",
    ),
    "a rank that fails in a scope": (
        put(collective_log.Log, "announce_failure", lambda log, rank: None),
        EDITS, "test_an_exception_reaches_the_other_ranks", "sharded", {1},
    ),
    "a failure that was told in a scope": (
        put(compared_edits.EditComparison, "_was_told", lambda comparison, log: False),
        EDITS, "test_an_exception_is_heard_in_the_next_gather",
    ),
    "where initialisers draw": (
        put(sys.modules[fc.apply.__module__], "_draw_alike", lambda module, stack: None),
        EDITS, "test_apply_draws_as_the_first_rank_does",
    ),
    # What ranks write into parameters.
    "writes outside of scopes": (
        put(collective_log.Log, "_add_writes", lambda log: log.steps.writes.found.clear()),
        WRITES, "test_the_next_gather_finds_it",
    ),
    "writes before a gather": (note_at_the_end, WRITES, "test_the_next_gather_finds_it"),
    "writes through views": (
        put(tensor, "tag_alias", lambda made, spec, source: tensor.tag(made, spec)),
        WRITES, "test_writes_that_differ_raise_on_every_rank", "sharded",
    ),
    "numbers of what is written": (
        put(writes, "crc_of", lambda tensor: 0),
        WRITES, "test_writes_that_differ_raise_on_every_rank", "copied",
    ),
    "writes but the last": (
        wrap("_add", "sharded.writes",
             lambda add, noted, *rest: (noted.found.clear(), add(noted, *rest))),
        WRITES, "test_writes_that_differ_raise_on_every_rank", "sharded",
    ),
    "writes into gradients": (
        put(tensor, "keep_grad", lambda param, grad: setattr(grad, "_noted", "")),
        WRITES, "test_writes_into_gradients_that_differ_raise",
    ),
    "writes of optimizers": (
        put(step_guard, "_note_begin", lambda optimizer: None),
        WRITES, "test_steps_of_optimizers_note_nothing",
    ),
    "that ranks have loaded": (
        put(compared_steps.Steps, "forget_loaded", lambda steps, unit: steps.forget()),
        WRITES, "test_loading_makes_up_for_it",
    ),
    # Random numbers.
    "one generator for all ranks": (
        put(draws, "_list_groups", lambda spec: []),
        DRAWS, "test_each_function_draws_what_one_process_would", 2, 100,
    ),
    "one generator for replicas": (
        put(draws, "_list_groups", lambda spec: [spec.group]),
        DRAWS, "test_replicas_and_parts_draw_the_same_whole",
    ),
    "the stream of each rank": (
        put(draws, "in_state", lambda generator, state: nullcontext(generator.set_state(state))),
        DRAWS, "test_generators_go_on_as_in_one_process_or_apart",
    ),
    "that other parameters are drawn": (
        put(draws, "reduce_alike", lambda state, group, op, what: all_reduce(state, group, op)),
        DRAWS, "test_what_cannot_be_drawn_is_refused",
    ),
    # Views.
    "where a run of elements begins": (
        put(torch.Tensor, "narrow", lambda t, dim, begin, length: t[:length]),
        VIEWS, "test_runs_are_read_and_written_like_the_whole", 2,
    ),
    "the order of what is flattened": (
        put(views, "flat_spec", lambda spec: changed(spec, shape=(spec.numel,), stride=(1,))),
        VIEWS, "test_each_way_gives_the_flattened_whole", 2,
    ),
    # Plain parameters over the shards.
    "optimizers of whole parameters": (
        put(plain_parameters, "_OF_WHOLE", ()),
        AGREE, "test_what_looks_at_whole_parameters_is_refused", "flat",
    ),
    "torch's own scaler": (
        put(plain_parameters, "is_scaled_by_torch", lambda: False),
        AGREE, "test_what_looks_at_whole_parameters_is_refused", "flat",
    ),
    "models that are sharded no more": (
        pass_over_ended, FLAT, "test_a_step_after_undo_raises", "flat",
    ),
    "gradients that wait": (
        put(plain_parameters, "is_open", lambda bucket: False),
        "scopes/test_unreduced.py", "test_local_parameters_are_not_stepped_without_it",
    ),
    "gradients set on the other side": (
        put(plain_parameters, "share_gradients", lambda mirrors: None),
        AGREE, "test_an_optimizer_is_given_other_parameters", "all", "flat",
    ),
    "parameters given to an optimizer later": (
        remember_first_buckets, AGREE, "test_an_optimizer_is_given_other_parameters", "all", "flat",
    ),
    "writes that torch does not count": (
        put(plain_parameters, "increment_version", lambda tensors: None),
        FLAT, "test_a_step_is_seen_by_a_unit_that_stays_gathered", "fused", "flat",
    ),
    "copies of an optimizer": (
        copy_buckets, AGREE, "test_a_copy_of_one_that_has_stepped_says_so", "flat",
    ),
    "frozen parameters": (
        wrap("_list_leaves", "optim.plain_parameters", take_frozen),
        FLAT, "test_local_parameters_in_the_order_of_the_model",
    ),
    # Reads that ask no class.
    "parameters that are asked": (
        put(tensor, "watch_reads", lambda param, cls: None),
        READS, "test_every_parameter_of_a_trained_model_refuses", fc.ShardingStrategy.FULL_SHARD,
    ),
    "what is not asked any more": (
        put(convert, "ignore_reads", lambda param: None),
        READS, "test_it_is_whole_in_a_scope_and_after_undo",
    ),
    "graphs that outlive a sharded parameter": (
        put(reads, "_refuse_backward", lambda name, grad: None),
        READS, "test_a_graph_from_before_undo_cannot_be_run",
    ),
    "modes in a step": (
        put(slice_step, "count_modes", lambda: 0),
        READS, "test_a_mode_sees_what_an_optimizer_does_to_slices", {"foreach": True},
    ),
    "what lists write in a mode": (
        put(reads, "increment_version", lambda tensors: None),
        READS, "test_kept_weights_follow_a_step_in_a_mode", "by hand",
    ),
    "what steps write in a mode": (
        put(slice_step, "increment_version", lambda tensors: None),
        READS, "test_kept_weights_follow_a_step_in_a_mode", "foreach",
    ),
    "what autograd reads": (
        put(reads, "graph_task_id", lambda: -1), READS, "test_autograd_computes_with_slices",
    ),
}  # fmt: skip
"""What is not heeded any more: how, and the test that notices it, with its parameters."""


@pytest.mark.parametrize("name", BREAKS)
def test_a_broken_slice_is_noticed(
    name: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert_noticed(BREAKS[name], caplog=caplog, monkeypatch=monkeypatch)
