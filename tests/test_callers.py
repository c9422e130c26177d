"""Threads, forked workers, tracing and sparse gradients: each works or is one clear error."""

from __future__ import annotations

import os
import threading
import warnings

import pytest
import torch
from torch import Tensor, nn

from fsdp_compose import fully_shard

from harness import run_ranks
from models import Tower, assert_at_rest, by_block, data, seeded, square


def test_a_second_thread_is_refused_and_the_first_goes_on() -> None:
    def check(rank: int) -> None:
        model = by_block(seeded(Tower))
        wanted = square(model, data(0, rank))
        errors: list[BaseException] = []

        def other() -> None:
            try:
                model(data(1, rank))
            except BaseException as error:
                errors.append(error)

        def interrupt(module: nn.Module, args: tuple[Tensor, ...]) -> None:
            thread = threading.Thread(target=other)
            thread.start(), thread.join()

        handle = model.blocks[1].up.register_forward_pre_hook(interrupt)
        loss = square(model, data(0, rank))
        handle.remove()
        assert torch.equal(loss, wanted) and "second thread" in str(errors[0])
        loss.backward()
        assert_at_rest(model)
        thread = threading.Thread(target=other)
        thread.start(), thread.join()
        assert len(errors) == 1  # one after the other is fine

    run_ranks(check, 2)


def test_a_forked_process_and_a_trace_are_refused() -> None:
    def check(rank: int) -> None:
        model = by_block(seeded(Tower))
        child = os.fork()
        if child == 0:
            try:
                model(data(0, rank))
            except RuntimeError as error:
                os._exit(7 if "forked off" in str(error) and "worker" in str(error) else 8)
            os._exit(9)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)
            with pytest.raises(RuntimeError, match=r"torch\.jit\.trace cannot record"):
                torch.jit.trace(model, data(0, rank))
        square(model, data(0, rank)).backward()
        table = nn.Sequential(nn.Embedding(4, 6, sparse=True), nn.Linear(6, 2))
        with pytest.raises(ValueError, match=r"'0' with sparse=True.*ignored="):
            fully_shard(table)

    run_ranks(check, 2)
