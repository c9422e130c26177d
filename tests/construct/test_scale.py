"""What sharding a model costs grows with its units and parameters, and not with the ranks."""

from __future__ import annotations

import gc
import pickle
import sys
import tracemalloc
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard as fsdp2

from fsdp_compose import Offload, fully_shard, wrap
from fsdp_compose.base.mesh import group_of
from fsdp_compose.base.parts import MANY_RANKS, Parts, cut_by_rank
from fsdp_compose.comm import meeting, messages
from fsdp_compose.core.state import iter_units

from harness import fake_world, run_ranks
from models import seeded


class Group(nn.Module):
    """Parameters without modules of their own."""

    def __init__(self, count: int) -> None:
        super().__init__()
        self.weights = nn.ParameterList(nn.Parameter(torch.ones(4, 4)) for _ in range(count))


def groups(units: int, params: int) -> nn.Module:
    return nn.Sequential(*(Group(params) for _ in range(units)))


def shard(model: nn.Module) -> None:
    fully_shard(model, units=wrap.by_class({Group}))


def shard_by_fsdp2(model: nn.Module) -> None:
    for part in model:
        fsdp2(part)
    fsdp2(model)


def count_calls(work: Callable[[nn.Module], None], units: int, params: int) -> int:
    """Calls of Python and C functions, which unlike seconds are the same every time."""
    model, calls = groups(units, params), 0

    def note(frame: Any, event: str, arg: Any) -> None:
        nonlocal calls
        calls += event in ("call", "c_call")

    gc.disable()
    sys.setprofile(note)
    try:
        work(model)
    finally:
        sys.setprofile(None)
        gc.enable()
    return calls


@pytest.mark.filterwarnings("ignore:.*:FutureWarning")
def test_calls_grow_linearly_and_are_fewer_than_fsdp2s() -> None:
    with fake_world(8):
        for work in (shard, shard_by_fsdp2):
            work(groups(2, 2))  # imports, and what is cached by class
        for small, middle, large in (((10, 4), (20, 4), (40, 4)), ((10, 4), (10, 8), (10, 16))):
            a, b, c = (count_calls(shard, *size) for size in (small, middle, large))
            assert c - b <= 2.1 * (b - a), (small, a, b, c)
        assert count_calls(shard, 8, 25) < count_calls(shard_by_fsdp2, 8, 25)


def test_nothing_is_kept_per_rank() -> None:
    """100 units over 16384 ranks take megabytes; lists by rank took 2 GB."""
    with fake_world(16384):
        shard(groups(1, 1))
        model = groups(100, 2)
        tracemalloc.start()
        shard(model)
        kept, peak = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        assert kept < 4e6 and peak < 8e6, (kept, peak)
        unit = next(iter_units(model[0]))
        assert isinstance(unit.buckets[0].views.part_bytes, Parts)
        model = nn.Linear(4, 4)
        fully_shard(model)
        model(torch.ones(1, 4)).sum().backward()
        (bucket,) = next(iter_units(model)).buckets
        assert bucket.grads is not None and isinstance(bucket.grads.parts, Parts)


def test_parts_made_on_demand_are_those_of_a_list() -> None:
    size = MANY_RANKS + 1
    flat = torch.arange(3 * size)
    made, wanted = cut_by_rank(flat, size), list(flat.chunk(size))
    assert isinstance(made, Parts) and len(made) == size
    for found, part in [*zip(made, wanted), (made[-1], wanted[-1]), *zip(made[5:9], wanted[5:9])]:
        assert torch.equal(found, part) and found.data_ptr() == part.data_ptr()
    with pytest.raises(IndexError):
        made[size]
    assert isinstance(cut_by_rank(flat[: 3 * MANY_RANKS], MANY_RANKS), list)


def test_ranks_that_agree_exchange_digests() -> None:
    """Reports of every parameter by every rank would be gigabytes on thousands of ranks."""

    def ranks(rank: int, shape: tuple[int, int]) -> int:
        sizes: list[int] = []
        gather = meeting.gather_objects

        def noted(value: Any, group: Any, what: str) -> list[Any]:
            sizes.append(len(pickle.dumps(value)))
            return gather(value, group, what)

        meeting.gather_objects = noted
        names = ("replicate", "shard")
        mesh = torch.distributed.init_device_mesh("cpu", shape, mesh_dim_names=names)
        fully_shard(seeded(lambda: groups(3, 30)), units=wrap.by_class({Group}), mesh=mesh)
        return max(sizes)

    for largest in run_ranks(ranks, 4, (2, 2)):
        assert largest < 200


def test_bytes_of_every_rank_come_in_one_buffer() -> None:
    """Where ranks exchange objects through collectives, whatever their lengths."""

    def ranks(rank: int) -> None:
        group = group_of(dist.group.WORLD, torch.device("cpu"))
        found = messages._all_gather_bytes(b"x" * (5 * rank + 1), group, "a test")
        assert found == {r: b"x" * (5 * r + 1) for r in range(3)}

    run_ranks(ranks, 3)


def test_fake_groups_compute_where_the_parameters_are() -> None:
    """They name every kind of device, also one that the machine has not."""
    with fake_world(64):
        offload = Offload(params=True, pin_memory=False)
        model = fully_shard(nn.Linear(8, 8), offload_policy=offload)
        model(torch.ones(2, 8)).sum().backward()
        kind = torch.accelerator.current_accelerator(check_available=True)
        assert next(iter_units(model)).gathered[0].mesh.device.type == (
            kind.type if kind else "cpu"
        )
