"""What ranks are given to load is the same, and readable, or every rank says what is not."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn

import fsdp_compose as fc

from harness import simulate_ranks
from models import Tower, adamw, by_block, data, mesh_of_replicas, seeded, square, two_blocks

pytestmark = pytest.mark.filterwarnings("ignore:torch.quantize_per_tensor")

HYBRID = fc.ShardingStrategy.HYBRID_SHARD
NAME = "first.weight"


class Normed(Tower):
    """A tower with running averages."""

    def __init__(self) -> None:
        super().__init__(2)
        self.norm = nn.BatchNorm1d(6)


def stepped(rank: int, seed: int = 0, **options: Any) -> tuple[nn.Module, torch.optim.Optimizer]:
    model = by_block(seeded(two_blocks), **options)
    optim = adamw(model.parameters())
    square(model, data(seed, rank)).backward()
    optim.step()
    return model, optim


def change(state: dict[str, Any], what: str) -> None:
    if what == "exp_avg":
        state["state"][NAME][what] = state["state"][NAME][what] + 1
    elif what == "step":
        state["state"][NAME][what] += 5
    else:
        state["param_groups"][0][what] = 0.5


@pytest.mark.parametrize(
    ("kind", "what"),
    [("full", "exp_avg"), ("full", "step"), ("full", "lr"), ("sharded", "step"), ("sharded", "lr")],
)
def test_ranks_given_other_optimizer_state(kind: Any, what: str) -> None:
    """State, step counts and settings of two files are not stitched together; nothing changes."""

    def body(rank: int) -> None:
        model, optim = stepped(rank)
        before = fc.optim_state_dict(model, optim)
        given = copy.deepcopy(fc.optim_state_dict(model, optim, kind=kind))
        fc.load_optim_state_dict(model, optim, given)
        if rank == 1:
            change(given, what)
        with pytest.raises(RuntimeError, match=f"given different things: .*{what}.*{NAME}"):
            fc.load_optim_state_dict(model, optim, given)
        after = fc.optim_state_dict(model, optim)
        torch.testing.assert_close(after["state"], before["state"], rtol=0, atol=0)
        assert after["param_groups"] == before["param_groups"]

    simulate_ranks(body)


def test_ranks_of_other_groups_hear_it_too() -> None:
    """Over two axes a difference in one group is an error on every rank, in loading and saving."""

    def body(rank: int) -> list[str]:
        model, optim = stepped(rank, mesh=mesh_of_replicas(2, 2), strategy=HYBRID)
        given = fc.optim_state_dict(model, optim)
        if rank == 1:
            change(given, "lr")
            optim.param_groups[0]["lr"] = 0.5
        errors = []
        for call in (
            lambda: fc.load_optim_state_dict(model, optim, given),
            lambda: fc.optim_state_dict(model, optim),
        ):
            with pytest.raises(RuntimeError, match=f"setting 'lr' of {NAME!r}") as caught:
                call()
            errors.append(str(caught.value))
        return errors

    assert all(len(errors) == 2 for errors in simulate_ranks(body, 4))


WAYS: dict[str, Callable[[nn.Module, dict[str, Tensor]], Any]] = {
    "ours": fc.load_state_dict,
    "torch": lambda model, given: model.load_state_dict(given),
    "broadcast": lambda model, given: fc.load_state_dict(model, given, broadcast_from_rank0=True),
}

quantize = partial(torch.quantize_per_tensor, scale=0.1, zero_point=0, dtype=torch.qint8)
UNREADABLE: dict[str, tuple[Callable[[Tensor], Tensor], str]] = {
    "meta": (lambda value: value.to("meta"), "is on the meta device, where it has no numbers"),
    "sparse": (Tensor.to_sparse, "has layout torch.sparse_coo; wanted a dense tensor"),
    "quantized": (lambda value: quantize(value.float()), "is quantized; wanted its numbers"),
}


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("case", list(UNREADABLE))
@pytest.mark.parametrize("way", list(WAYS))
@pytest.mark.parametrize("name", [NAME, "norm.running_mean"])
def test_values_without_numbers(way: str, name: str, case: str, ranks: int) -> None:
    """Meta and sparse values, on one rank or on all, are refused before anything is written."""
    change_value, text = UNREADABLE[case]

    def body(rank: int) -> None:
        model = by_block(seeded(Normed))
        before = {key: value.clone() for key, value in fc.state_dict(model).items()}
        given = dict(seeded(Normed, 1).state_dict())
        if rank < ranks:
            given[name] = change_value(given[name])
        with pytest.raises((RuntimeError, TypeError), match=f"{name!r} {text}"):
            WAYS[way](model, given)
        torch.testing.assert_close(dict(fc.state_dict(model)), before, rtol=0, atol=0)

    simulate_ranks(body)


@pytest.mark.parametrize("case", list(UNREADABLE))
def test_assigned_values_without_numbers(case: str) -> None:
    """With ``assign=True`` a sharded parameter cannot take them; a buffer does, as in torch."""
    change_value, text = UNREADABLE[case]

    def body(rank: int) -> None:
        model = by_block(seeded(Normed))
        given = dict(seeded(Normed, 1).state_dict())
        given["norm.running_mean"] = change_value(given["norm.running_mean"])
        model.load_state_dict(given, assign=True)
        assert model.norm.running_mean is given["norm.running_mean"]
        given[NAME] = change_value(given[NAME])
        with pytest.raises(RuntimeError, match=f"{NAME!r} {text}"):
            model.load_state_dict(given, assign=True)

    simulate_ranks(body)


@pytest.mark.parametrize("broadcast", [False, True])
@pytest.mark.parametrize("case", list(UNREADABLE))
def test_optimizer_state_without_numbers(case: str, broadcast: bool) -> None:
    """Meta and sparse state is refused by name on every rank, and nothing changes."""
    change_value, text = UNREADABLE[case]

    def body(rank: int) -> None:
        model, optim = stepped(rank)
        before = fc.optim_state_dict(model, optim)
        given = copy.deepcopy(before)
        given["state"][NAME]["exp_avg"] = change_value(given["state"][NAME]["exp_avg"] + 1)
        with pytest.raises((RuntimeError, TypeError), match=f"{NAME}.*{text}"):
            fc.load_optim_state_dict(model, optim, given, broadcast_from_rank0=broadcast)
        after = fc.optim_state_dict(model, optim)
        torch.testing.assert_close(after["state"], before["state"], rtol=0, atol=0)

    simulate_ranks(body)


@pytest.mark.parametrize("lacking", [1, 2])
def test_a_prefix_that_keys_lack_is_named(lacking: int) -> None:
    """Keys of a module that another holds begin with its path, or every rank says how."""

    def body(rank: int) -> None:
        model = by_block(seeded(Normed))
        state = dict(fc.state_dict(model))
        if rank >= lacking:
            state = {f"policy.{key}": value for key, value in state.items()}
        told = r"missing keys: 'first\.weight'(?s:.*)no key begins with 'policy\.', where this"
        with pytest.raises(RuntimeError, match=told):
            nn.ModuleDict({"policy": model}).load_state_dict(state)

    simulate_ranks(body)


class Quantized(nn.Module):
    def __init__(self, table: Tensor) -> None:
        super().__init__()
        self.inner = nn.Linear(2, 2)
        self.register_buffer("table", table)


@pytest.mark.parametrize("save", [fc.save_checkpoint, fc.save_full])
def test_saves_refuse_values_without_numbers(save: Any, tmp_path: Path) -> None:
    """What no load could read is named when it is saved; what the folder held stays."""

    def body(rank: int) -> None:
        save(tmp_path, fc.fully_shard(Quantized(torch.ones(3)), init="as_is"))
        before = sorted(path.name for path in tmp_path.iterdir())
        for case in "quantized", "sparse":
            change_value, text = UNREADABLE[case]
            model = fc.fully_shard(Quantized(change_value(torch.ones(3))), init="as_is")
            with pytest.raises(ValueError, match=rf"cannot be saved:\n  'table' {text}"):
                save(tmp_path, model)
        assert sorted(path.name for path in tmp_path.iterdir()) == before

    simulate_ranks(body)


def test_quantized_buffers_and_files(tmp_path: Path) -> None:
    """A quantized buffer takes the numbers of a file; a file of quantized values is refused."""

    def body(rank: int) -> None:
        plain = fc.fully_shard(Quantized(torch.ones(3)), init="as_is")
        model = fc.fully_shard(Quantized(quantize(torch.zeros(3))), init="as_is")
        fc.save_checkpoint(tmp_path / "plain", plain)
        fc.load_checkpoint(tmp_path / "plain", model)
        assert model.table.dequantize().tolist() == pytest.approx([1, 1, 1])
        state = {"model": dict(Quantized(quantize(torch.ones(3))).state_dict())}
        dcp.save(state, checkpoint_id=tmp_path / "quantized")
        with pytest.raises(RuntimeError, match=r"'model\.table' is quantized; wanted its numbers"):
            fc.load_checkpoint(tmp_path / "quantized", plain)

    simulate_ranks(body)
