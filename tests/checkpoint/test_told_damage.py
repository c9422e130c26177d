"""What saving and loading refuse: damaged files, and what files or models cannot hold."""

from __future__ import annotations

import copy
import pickle
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import fsdp_compose as fc
from fsdp_compose import fully_shard, simulate
from fsdp_compose.simulation import SimulationError

from models import seeded


def build() -> nn.Module:
    return fully_shard(nn.Linear(4, 3))


def damaged_metadata(path: Path, change: Callable[[Any], object]) -> None:
    """Load a sharded checkpoint after a change of its metadata."""
    fc.save_checkpoint(path, build())
    metadata = pickle.loads((path / ".metadata").read_bytes())
    change(metadata)
    (path / ".metadata").write_bytes(pickle.dumps(metadata))
    fc.load_checkpoint(path, build())


def weight_of(metadata: Any) -> Any:
    return metadata.state_dict_metadata["model.weight"]


def move_piece(metadata: Any) -> None:
    (piece,) = weight_of(metadata).chunks
    weight_of(metadata).chunks[0] = type(piece)(torch.Size([1, 0]), piece.sizes)


METADATA: dict[str, tuple[Callable[[Any], object], str]] = {
    "sum": (
        lambda m: setattr(m, "planner_data", None), "its size or checksum is not what was saved"
    ),
    "dtype": (
        lambda m: setattr(weight_of(m).properties, "dtype", "f"), "'model.weight' has no dtype"
    ),
    "piece": (move_piece, "of shape (3, 4), has a piece [(1, 3, 3), (0, 4, 4)]"),
    "layout": (
        lambda m: setattr(weight_of(m).properties, "layout", torch.sparse_coo),
        "it holds tensors of layout 'torch.sparse_coo'",
    ),
    "place": (lambda m: m.storage_data.update({next(iter(m.storage_data)): 3}), " at 3."),
}  # fmt: skip


@pytest.mark.parametrize("name", METADATA)
def test_damaged_metadata_is_told(name: str, tmp_path: Path) -> None:
    change, text = METADATA[name]
    with pytest.raises(RuntimeError, match=f"damaged.*{re.escape(text)}"):
        damaged_metadata(tmp_path / "saved", change)


def test_folders_that_are_no_full_save(tmp_path: Path) -> None:
    """A single file of one is, and an empty model's."""
    fc.save_full(tmp_path, model := build())
    file, index = tmp_path / "model.safetensors", tmp_path / "model.safetensors.index.json"
    fc.load_full(file, loaded := build())
    assert torch.equal(loaded.weight.full_tensor(), model.weight.full_tensor())
    with pytest.raises(RuntimeError, match="does not exist; wanted a file or a folder"):
        fc.load_full(tmp_path / "nowhere", model)
    (tmp_path / "other.safetensors.index.json").write_text("{}")
    with pytest.raises(RuntimeError, match=r"several indices, .* name a folder with one"):
        fc.load_full(tmp_path, model)
    (tmp_path / "other.safetensors.index.json").unlink()
    index.write_text("{")
    with pytest.raises(RuntimeError, match="damaged or unreadable"):
        fc.load_full(tmp_path, model)
    for damage in (lambda: index.write_text("{"), index.unlink):  # neither is in a save's way
        damage()
        fc.save_full(tmp_path, model)
        fc.load_full(tmp_path, model)
    index.unlink()
    file.write_bytes(file.read_bytes()[:-4])
    with pytest.raises(RuntimeError, match=r"truncated: .* bytes, wanted"):
        fc.load_full(tmp_path, model)
    torch.save({}, file)
    with pytest.raises(RuntimeError, match=r"a file of torch\.save; wanted one of safetensors"):
        fc.load_full(tmp_path, model)
    fc.save_full(tmp_path / "empty", nothing := fully_shard(nn.ReLU()))
    fc.load_full(tmp_path / "empty", nothing)


class Named(nn.Module):
    def __init__(self, name: str, value: torch.Tensor) -> None:
        super().__init__()
        self.register_parameter(name, nn.Parameter(value))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x


def test_what_safetensors_cannot_hold(tmp_path: Path) -> None:
    wide = fully_shard(Named("wide", torch.ones(2, dtype=torch.complex128)))
    with pytest.raises(ValueError, match=r"'wide' is torch\.complex128, which the safetensors"):
        fc.save_full(tmp_path / "wide", wide)
    with pytest.raises(ValueError, match="'__metadata__' is no name of a tensor"):
        fc.save_full(tmp_path / "name", fully_shard(Named("__metadata__", torch.ones(2))))


def test_what_state_dicts_refuse() -> None:
    model = build()
    with pytest.raises(ValueError, match="state dict kind is 'whole'"):
        fc.state_dict(model, kind="whole")  # type: ignore[call-overload]
    with pytest.raises(ValueError, match="go with kind='full', not with 'sharded'"):
        fc.state_dict(model, kind="sharded", rank0_only=True)
    state = dict(fc.state_dict(model, kind="full"))
    for value, text in (
        (state["weight"].to(torch.complex64), "which has no imaginary part"),
        (3, "is a int; wanted a tensor of"),
    ):
        with pytest.raises(RuntimeError, match=text):
            fc.load_state_dict(model, {**state, "weight": value})
    with pytest.raises(TypeError, match="got a list; wanted a dictionary by FQN"):
        fc.load_state_dict(model, [])  # type: ignore[arg-type]
    for broadcast in (False, True):
        with pytest.raises(TypeError, match="key 3 is a int; wanted FQNs, which are strings"):
            fc.load_state_dict(model, {**state, 3: None}, broadcast_from_rank0=broadcast)


def test_local_state_that_was_changed() -> None:
    model = build()
    for kind, value, text in (
        ("_layout", 3, "layout is a int"),
        ("_shard.0", torch.zeros(16), "shard 0 is a Tensor; wanted the sharded tensor that"),
        ("_shard.0", None, "shard 0 has 16 elements of torch.float64; wanted 16 of torch.float32"),
    ):
        state = dict(fc.state_dict(model, kind="local"))
        (key,) = [key for key in state if key.endswith(kind)]
        state[key] = state[key].double() if value is None else value
        with pytest.raises((TypeError, RuntimeError), match=text):
            fc.load_state_dict(model, state)


LAYOUTS: dict[str, tuple[Callable[[dict[str, Any]], object], str]] = {
    "no list": (lambda at: at.update(buckets=None), "buckets were None, here a list"),
    "a string": (lambda at: at.update(buckets="ab"), "buckets were 'ab', here a list"),
    "no dictionary": (lambda at: at.update(buckets=[None]), r"buckets were \[None\], here a list"),
    "later": (lambda at: at.update(version=2), "version were 2, here 1"),
    "tensor": (lambda at: at.update(version=torch.ones(2)), r"version were tensor\(\[1"),
    "more": (lambda at: at.update(order="row"), "order were 'row', here None"),
    "of a bucket": (lambda at: at["buckets"][0].update(more=1), "more of bucket 0 were 1, here N"),
}


@pytest.mark.parametrize("kind", LAYOUTS)
@pytest.mark.parametrize("load", [fc.load_state_dict, nn.Module.load_state_dict])
def test_a_layout_that_one_rank_has_wrong(load: Any, kind: str) -> None:
    """What differs in the layout of one rank's raw shards is said on every rank."""
    change, text = LAYOUTS[kind]

    def run() -> None:
        model = build()
        state = dict(fc.state_dict(model, kind="local"))
        (key,) = [key for key in state if key.endswith("_layout")]
        state[key] = copy.deepcopy(state[key])
        if dist.get_rank() == 1:
            change(state[key])
        load(model, state)

    with pytest.raises(SimulationError) as caught:
        simulate(run, 2)
    for error in caught.value.errors.values():
        assert re.search(rf"local state of unit 'Linear': {text}", str(error)), error
    assert len(caught.value.errors) == 2


def test_rank_0_has_no_dictionary() -> None:
    def load() -> None:
        given: Any = [1] if dist.get_rank() == 0 else {}
        fc.load_state_dict(build(), given, broadcast_from_rank0=True)

    with pytest.raises(SimulationError) as caught:
        simulate(load, 2)
    errors = [str(error) for _, error in sorted(caught.value.errors.items())]
    told = "broadcast_from_rank0: rank 0 has a list"
    assert errors == [told, f"{told} (found on rank 0)"]


class Unread(dict[str, Any]):
    """A dictionary whose values cannot be listed."""

    def items(self) -> Any:
        raise KeyError("weight")


@pytest.mark.parametrize(
    ("spoil", "text"),
    [
        (lambda state: {**state, "more": lambda: 1}, r"rank 0's 'more' does not pickle \(Attr"),
        (Unread, "weight"),
    ],
    ids=["lambda", "unread"],
)
def test_what_rank_0_cannot_send(spoil: Any, text: str) -> None:
    """All ranks hear of it, and none waits for a value that never comes."""

    def load() -> None:
        model = build()
        state = dict(fc.state_dict(model))
        with pytest.raises((TypeError, RuntimeError, KeyError), match=text):
            fc.load_state_dict(model, spoil(state), broadcast_from_rank0=True)
        optim = torch.optim.SGD(model.parameters(), lr=0.1)
        groups = fc.optim_state_dict(model, optim)
        groups["param_groups"][0]["rate"] = lambda step: 1.0
        told = r"a value that other ranks are sent does not pickle \(Attr"
        with pytest.raises(TypeError, match=told):
            fc.load_optim_state_dict(model, optim, groups, broadcast_from_rank0=True)
        fc.load_state_dict(model, state, broadcast_from_rank0=True)

    simulate(load, 2)


def test_groups_by_number_that_differ() -> None:
    model = build()
    optim = torch.optim.SGD([{"params": [model.weight]}, {"params": [model.bias]}], lr=0.1)
    saved = {"state": {}, "param_groups": [{"params": [0, 1], "lr": 1.0}]}
    with pytest.raises(ValueError, match=r"saved groups of \[2\] parameters, here .* \[1, 1\]"):
        fc.load_optim_state_dict(model, optim, saved)


def test_optimizer_state_that_is_refused(tmp_path: Path) -> None:
    model = build()
    optim = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(ValueError, match="key is 'number'; wanted 'name' or 'id'"):
        fc.rekey_optim_state_dict(optim.state_dict(), "number", model)  # type: ignore[arg-type]
    two = {"state": {}, "param_groups": [{"params": [0]}, {"params": [1]}]}
    with pytest.raises(ValueError, match=r"groups of \[1, 1\] parameters do not tell which"):
        fc.rekey_optim_state_dict(two, "name", model)
    named = fc.rekey_optim_state_dict(optim.state_dict(), "name", model)
    assert fc.rekey_optim_state_dict(named, "name", model) == named
    extra = torch.optim.lr_scheduler.LambdaLR(optim, lambda step: 1.0)
    with pytest.raises(RuntimeError, match="extra is a LambdaLR that holds sharded parameters"):
        fc.save_checkpoint(tmp_path, model, optim, extra=extra)
    optim.param_groups[0]["place"] = Path("here")
    with pytest.warns(UserWarning, match=r"'optim\.param_groups\.0\.place' holds a pathlib"):
        fc.save_checkpoint(tmp_path, model, optim)
    optim.state[model.weight] = {"factors": {(1, 2): torch.zeros(3)}}
    with pytest.raises(TypeError, match=r"'factors' has a key \(1, 2\); wanted a string"):
        fc.save_checkpoint(tmp_path, model, optim)


def change_state(where: str) -> None:
    model = build()
    optim = torch.optim.Adam(model.parameters())
    model(torch.ones(1, 4)).sum().backward()
    optim.step()
    if dist.get_rank() == 1:
        state = optim.state[model.weight]
        if where == "absent":
            del state["exp_avg"]
        else:
            state["more"] = model.weight.detach().clone()
    fc.optim_state_dict(model, optim)


@pytest.mark.parametrize(
    ("where", "text"),
    [
        ("absent", "'exp_avg' of 'weight' is cut, torch.float32 of shape (3, 4) on rank 0 and"),
        ("more", "'more' of 'weight' is absent on rank 0 and cut, torch.float32 of shape (3, 4)"),
    ],
)
def test_state_that_one_rank_lacks(where: str, text: str) -> None:
    with pytest.raises(SimulationError, match=re.escape(text)) as caught:
        simulate(change_state, 2, where)
    assert set(caught.value.errors) == {0, 1}


class Reads(nn.Sequential):
    """Takes views of what it loads, which slices have none of."""

    def load_state_dict(self, state_dict: Any, strict: bool = True, assign: bool = False) -> Any:
        turned = {key: value.flip(0).flip(0) for key, value in state_dict.items()}
        return super().load_state_dict(turned, strict, assign)


def test_a_module_that_reads_what_it_loads(tmp_path: Path) -> None:
    """Gets whole values from a sharded checkpoint."""

    def load() -> None:
        saved, loaded = (fully_shard(seeded(lambda: Reads(nn.Linear(4, 3)))) for _ in range(2))
        nn.init.zeros_(loaded[0].weight)
        fc.save_checkpoint(tmp_path, saved)
        fc.load_checkpoint(tmp_path, loaded)
        assert torch.equal(loaded[0].weight.full_tensor(), saved[0].weight.full_tensor())

    simulate(load, 2)


@pytest.mark.parametrize("size", ["more", "less"])
def test_a_file_of_another_size(tmp_path: Path, size: str) -> None:
    """A file that grew, as one of another save does, is not called truncated."""
    fc.save_checkpoint(tmp_path / "parts", build())
    fc.save_full(tmp_path / "whole", build())
    (parts,) = (tmp_path / "parts").glob("*/*.distcp")
    (whole,) = (tmp_path / "whole").glob("*.safetensors")
    for file in parts, whole:
        data = file.read_bytes()
        file.write_bytes(data + b"x" if size == "more" else data[:-1])
    told = "damaged: .*" if size == "more" else "truncated: "
    with pytest.raises(RuntimeError, match=rf"distcp: {told}\d+ bytes"):
        fc.load_checkpoint(tmp_path / "parts", build())
    with pytest.raises(RuntimeError, match=rf"safetensors: {told}\d+ bytes"):
        fc.load_full(tmp_path / "whole", build())


@pytest.mark.parametrize("save", [fc.save_checkpoint, fc.save_full])
def test_a_link_to_a_place_that_is_gone(tmp_path: Path, save: Any) -> None:
    """Is named, and so is the place; where the folder is below the link, too."""
    link = tmp_path / "latest"
    link.symlink_to(tmp_path / "gone")
    for path in (link, link / "step"):
        with pytest.raises(RuntimeError, match=r"latest is a link to .*gone, which is not there"):
            save(path, build())
