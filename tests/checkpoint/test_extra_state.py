"""Dictionaries and lists in extra state and in optimizers' settings: saved, they load as they were.

torch.distributed.checkpoint cuts them into parts, and changes what is no string or empty.
"""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.utils._pytree import tree_map

import fsdp_compose as fc
from fsdp_compose.__main__ import main
from fsdp_compose.checkpoint.containers import OBJECTS, join_parts

from harness import simulate_ranks
from saved import equal

VALUES: dict[str, Any] = {
    "names": {"scale": 1.5, "step": 3},
    "nested": {"a": {"b": torch.ones(2)}, "c": [1, 2]},
    "list": [torch.ones(2), {"z": 2}],
    "numbers": {1: 2},
    "empty": {},
    "hole": [{}, torch.ones(1)],
    "dots": {"a.b": 1},
}


class Scaled(nn.Module):
    """A module with extra state, as quantized layers and samplers have."""

    def __init__(self, state: object) -> None:
        super().__init__()
        self.state = state
        self.linear = nn.Linear(3, 2)

    def get_extra_state(self) -> object:
        return self.state

    def set_extra_state(self, state: object) -> None:
        self.state = state


@pytest.mark.parametrize("name", VALUES)
def test_extra_state_loads_as_it_was_saved(tmp_path: Path, name: str) -> None:
    """Of any form, also from an asynchronous save and into another number of ranks."""

    def save(rank: int) -> None:
        model = fc.fully_shard(nn.Sequential(Scaled(VALUES[name]), nn.Linear(2, 2)))
        fc.save_checkpoint(tmp_path, model, asynchronous=True).wait()

    def load(rank: int) -> None:
        model = fc.fully_shard(nn.Sequential(Scaled(None), nn.Linear(2, 2)))
        fc.load_checkpoint(tmp_path, model)
        equal(model[0].state, VALUES[name])

    simulate_ranks(save, 2)
    simulate_ranks(load, 3)


def test_settings_of_groups_load_as_saved(tmp_path: Path) -> None:
    """A setting that is a dictionary is restored, not left as it is."""

    def run(rank: int) -> None:
        model = fc.fully_shard(nn.Linear(3, 2))
        optim = torch.optim.SGD(model.parameters(), lr=0.1)
        optim.param_groups[0].update(VALUES)
        fc.save_checkpoint(tmp_path, model, optim)
        optim.param_groups[0].update({name: {"another": 1} for name in VALUES})
        fc.load_checkpoint(tmp_path, model, optim)
        equal({name: optim.param_groups[0][name] for name in VALUES}, VALUES)

    simulate_ranks(run, 2)


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.parametrize("name", ["names", "nested", "list", "dots"])
def test_torch_and_we_read_extra_state(tmp_path: Path, name: str) -> None:
    """Of each other's checkpoints, where torch keeps all of it."""
    plain, value = Scaled(VALUES[name]), VALUES[name]
    dcp.save({"model": plain.state_dict()}, checkpoint_id=tmp_path / "torch")
    model = fc.fully_shard(Scaled(None))
    fc.load_checkpoint(tmp_path / "torch", model)
    equal(model.state, value)
    fc.save_checkpoint(tmp_path / "ours", model)
    read = {"model": Scaled(tree_map(lambda part: part * 0, value)).state_dict()}
    dcp.load(read, checkpoint_id=tmp_path / "ours")
    equal(read["model"]["_extra_state"], value)


def test_convert_refuses_extra_state(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Files of tensors cannot hold it; it is not left out."""
    fc.save_checkpoint(tmp_path / "parts", fc.fully_shard(Scaled({"scale": 1.5})))
    assert main(["checkpoint", "convert", str(tmp_path / "parts"), str(tmp_path / "whole")]) == 1
    assert "'_extra_state' is not a tensor" in capsys.readouterr().err


@pytest.mark.parametrize("text", ["{", '"model"', "[]", "[[1]]"])
def test_a_place_that_is_none_is_refused(tmp_path: Path, text: str) -> None:
    """Metadata that says of a whole value where it belongs, and lies."""
    model = fc.fully_shard(Scaled({"scale": 1.5}))
    fc.save_checkpoint(tmp_path, model, checksum=False)
    metadata = pickle.loads((tmp_path / ".metadata").read_bytes())
    (key,) = (key for key, path in metadata.planner_data.items() if path[0] == OBJECTS)
    metadata.planner_data[key] = (OBJECTS, text)
    (tmp_path / ".metadata").write_bytes(pickle.dumps(metadata))
    with pytest.raises(RuntimeError, match="damaged"):
        fc.load_checkpoint(tmp_path, model)


def test_a_part_that_is_missing_is_noticed() -> None:
    assert join_parts({("a", 0): 1, ("a", 1, "b"): 2, ("c",): 3}) == {"a": [1, {"b": 2}], "c": 3}
    with pytest.raises(ValueError, match="has none with number 0"):
        join_parts({("a", 1): 1})
