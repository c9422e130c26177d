"""What simulated ranks call of torch.distributed besides its usual collectives, held to gloo's."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional

from fsdp_compose import simulate
from fsdp_compose.simulation import KillRank, SimulationError

from harness import rank_errors, run_ranks

pytestmark = pytest.mark.filterwarnings("ignore:.*deprecated:FutureWarning")


def call_several_at_once(rank: int) -> Any:
    """Calls with several tensors, and what is asked of one under way."""
    one, two = torch.full((1,), 1.0 + rank), torch.full((2,), 3.0 + rank)
    parts = [[torch.zeros(1), torch.zeros(2)] for _ in range(2)]
    dist.all_gather_coalesced(parts, [one, two])
    group = dist.group.WORLD
    assert group is not None
    sums = functional.reduce_scatter_tensor_coalesced(
        [two, torch.arange(4.0)], "avg", [0, 0], group
    )
    work = dist.all_reduce(one, async_op=True)
    work.wait()
    assert work.is_success() and work.result()[0] is one
    return [[t.tolist() for t in part] for part in parts], [t.tolist() for t in sums], one.tolist()


def test_several_tensors_in_one_call() -> None:
    assert simulate(lambda: call_several_at_once(dist.get_rank()), 2) == run_ranks(
        call_several_at_once, 2
    )


def gather_two() -> None:
    if dist.get_rank() == 0:
        with dist.distributed_c10d._coalescing_manager():
            for numel in (1, 2):
                dist.all_gather_into_tensor(torch.zeros(2 * numel), torch.ones(numel))


def test_a_call_of_several_fails_as_one() -> None:
    with pytest.raises(SimulationError, match="connection closed: rank 1 has returned"):
        simulate(gather_two, 2)


def change_timeouts() -> None:
    """As torchtitan does after its first step."""
    dist.distributed_c10d._set_pg_timeout(timedelta(seconds=7))
    if dist.get_rank() == 0:
        dist.recv(torch.zeros(1), 1)
    dist.barrier()


def test_timeouts_can_be_changed() -> None:
    with pytest.raises(SimulationError, match="timed out after 7 s"):
        simulate(change_timeouts, 2)


def reduce_nothing() -> list[int]:
    parts = [torch.ones(5, 0) for _ in range(2)]
    dist.all_reduce(total := torch.ones(5, 0))
    dist.all_gather(parts, total)
    return [part.numel() for part in parts]


def test_tensors_without_elements() -> None:
    assert simulate(reduce_nothing, 2) == [[0, 0]] * 2


def die_tidily() -> None:
    """What a rank sends and sets while an error passes; rank 1 waits for it."""
    store = dist.PrefixStore("own", dist.distributed_c10d._get_default_store())
    if dist.get_rank() == 1:
        dist.recv(torch.zeros(1), 0, tag=1)
    elif dist.get_rank() == 2:
        store.get("ended")
    else:
        try:
            dist.send(torch.zeros(1), 1)
        finally:
            try:
                dist.send(torch.zeros(1), 1, tag=1)
            finally:
                store.set("ended", "well")


def test_a_killed_rank_says_nothing_more() -> None:
    for seed in range(6):  # in some orders others run before it sends, which ends it too
        with pytest.raises(SimulationError, match="rank 0 of 3 was killed") as caught:
            simulate(die_tidily, 3, seed=seed, faults=[KillRank(0, 0)])
        errors = caught.value.errors
        assert "rank 0 was killed" in str(errors[1]) and isinstance(errors[2], dist.DistStoreError)
        assert "wait timeout after" in str(errors[2])


def average_integers() -> None:
    dist.all_reduce(torch.ones(1, dtype=torch.int32), op=dist.ReduceOp.AVG)


def gather_into_integers() -> None:
    dist.all_gather_into_tensor(torch.zeros(2, dtype=torch.int32), torch.ones(1))


@pytest.mark.parametrize("call", [average_integers, gather_into_integers])
def test_numbers_are_not_read_as_another_dtype(call: Callable[[], None]) -> None:
    """Where gloo raises; in the bytes of a float an integer would read a large number."""
    errors = rank_errors(lambda rank: call(), 2)
    assert all(error is not None and error.startswith("RuntimeError: ") for error in errors)
    with pytest.raises(SimulationError, match=r"raised RuntimeError: .*(to|of) .*[iI]nt"):
        simulate(call, 2)


def use_store(store: Any) -> list[Any]:
    """What each function of a store answers, one after the other."""
    calls: list[tuple[Any, ...]] = [
        ("set", "a", "1"), ("append", "a", "23"), ("append", "n", "x"), ("get", "a"), ("get", "n"),
        ("add", "c", 2), ("add", "c", 3), ("get", "c"), ("check", ["a", "n"]), ("check", ["z"]),
        ("compare_set", "a", "123", "q"), ("compare_set", "a", "no", "r"), ("get", "a"),
        ("compare_set", "new", "", "v"), ("compare_set", "other", "x", "v"), ("check", ["other"]),
        ("multi_set", ["u", "v"], ["1", "2"]), ("multi_get", ["u", "v"]), ("has_extended_api",),
        ("delete_key", "u"), ("delete_key", "u"), ("wait", ["v"]),
    ]  # fmt: skip
    before = store.num_keys()
    return [*(getattr(store, name)(*given) for name, *given in calls), store.num_keys() - before]


def test_the_store_answers_as_torchs() -> None:
    def run() -> list[Any]:
        return use_store(dist.PrefixStore("own", dist.distributed_c10d._get_default_store()))

    assert simulate(run, 1) == [use_store(dist.HashStore())]


def test_receiving_from_anyone_is_refused() -> None:
    with pytest.raises(SimulationError, match="name the rank: recv"):
        simulate(lambda: dist.recv(torch.zeros(1)), 1)
