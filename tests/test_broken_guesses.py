"""What accelerators guess of each other, broken on purpose: each break fails the test it names."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace as changed
from typing import Any

import pytest
import torch

from fsdp_compose.core.guards import collective_log
from fsdp_compose.optim import scaler, step_guard
from fsdp_compose.scopes import unshard
from fsdp_compose.sharded import calls

from breaking import Break, assert_noticed, load, put, wrap

GUESSES = "core/guards/test_guessed_use.py"
HOME = "core.guards.guessed_use"
SCALER = "optim/test_scaler.py"
hook_on_units = load(GUESSES).hook_on_units


def make_guesses(change: Callable[..., Any]) -> Break:
    """Let a guess be what ``change`` makes of it, for its bucket and the flags it was given."""

    def make(original: Any, bucket: Any, used: Any) -> Any:
        return change(original, bucket, used)

    return wrap("make_guess", HOME, make)


def forget_possible(original: Any, bucket: Any, used: Any) -> Any:
    used.possible = -1
    return original(bucket, used)


def forget_mirror(original: Any, bucket: Any, used: Any) -> Any:
    history, kept = bucket.history, bucket.history.mirror
    history.mirror = None
    try:
        return original(bucket, used)
    finally:
        history.mirror = kept


def take_all_back(original: Any, bucket: Any, used: Any) -> Any:
    found = original(bucket, used)
    return changed(found, unset=found.anywhere)


def leave_waiting(original: Any, guesses: Any) -> None:
    """Settle gradients that arrived, not those that wait for a later backward."""
    waiting = [(one.bucket(), one.bucket().arriving.used) for one in guesses]
    original(guesses)
    for bucket, bits in waiting:
        bucket.arriving.used = bits


BREAKS: dict[str, tuple[Any, ...]] = {
    "what is frozen counts as used": (
        make_guesses(forget_possible), GUESSES, "test_hooks_are_not_told_of_what_is_frozen",
    ),
    "zeros are left": (
        put(collective_log, "take_back_zeros", lambda guesses: None),
        GUESSES, "test_replicas_may_turn_to_others", "HYBRID_SHARD",
    ),
    "gradients are taken back": (
        make_guesses(take_all_back), GUESSES, "test_microbatches_may_turn_to_others", "sharded",
    ),
    "gradients that wait keep zeros": (
        wrap("take_back_zeros", HOME, leave_waiting),
        GUESSES, "test_microbatches_may_turn_to_others", "no_all_reduce",
    ),
    "hooks are told of zeros": (
        make_guesses(lambda original, *rest: changed(original(*rest), is_seen=False)),
        GUESSES, "test_zeros_that_a_hook_was_told_of_are_an_error", hook_on_units,
    ),
    "cleared flat gradients count as there": (
        make_guesses(forget_mirror), GUESSES, "test_flat_gradients_follow",
    ),
    "sums are not shared when reduced": (
        put(unshard, "sorted", lambda logs, key: []),
        GUESSES, "test_sums_that_waited_are_settled_when_reduced",
    ),
    "ranks that part are taken for alike": (
        put(collective_log, "sum_up", lambda guesses, rank: ()),
        GUESSES, "test_ranks_that_part_are_told",
    ),
    "a scale on a device is not awaited": (
        put(scaler, "_is_needed_on_host", lambda *_: False),
        SCALER, "test_offloaded_gradients_wait_for_the_scale", torch.nn.Module.parameters,
    ),
    "fused steps unscale on the host": (
        put(step_guard, "bring_scale", lambda optimizer: None),
        SCALER, "test_a_fused_step_of_offloaded_ones_waits_too", torch.optim.SGD,
    ),
    "torch's scaler is not awaited": (
        put(calls, "await_copies", lambda host: None), SCALER, "test_torchs_scaler_is_awaited",
    ),
}  # fmt: skip
"""What is not heeded any more: how, and the test that notices it, with its parameters."""


@pytest.mark.parametrize("name", BREAKS)
def test_a_broken_guess_is_noticed(
    name: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert_noticed(BREAKS[name], caplog=caplog, monkeypatch=monkeypatch)
