"""What a load refuses before it writes: names left over, calls or folders that differ by rank."""

from __future__ import annotations

import re
import shutil
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor
from torch.nn.utils.parametrizations import weight_norm

import fsdp_compose as fc
from fsdp_compose.checkpoint.formats.safetensors import SAFETENSORS

from harness import run_ranks, simulate_ranks
from saved import equal

Load = Callable[..., Any]


class Hooked(nn.Module):
    """A module that torch's parametrization gives a load hook; ``new`` is what files may lack."""

    def __init__(self, has_new: bool) -> None:
        super().__init__()
        self.normed = weight_norm(nn.Linear(4, 4))
        if has_new:
            self.new = nn.Linear(2, 2)


def save_both(folder: Path, model: nn.Module) -> None:
    fc.save_checkpoint(folder / "parts", model)
    fc.save_full(folder / "whole", model)


LOADS: dict[str, Load] = {
    "load_checkpoint": lambda at, model, **kw: fc.load_checkpoint(at / "parts", model, **kw),
    "load_full": lambda at, model, **kw: fc.load_full(at / "whole", model, **kw),
}


@pytest.mark.parametrize("name", LOADS)
@pytest.mark.parametrize("saved_new", [False, True])
def test_strict_holds_beside_load_hooks(tmp_path: Path, name: str, saved_new: bool) -> None:
    """Where a submodule has a load hook, missing and unexpected names raise too."""
    save_both(tmp_path, Hooked(saved_new))

    def run(rank: int) -> None:
        model = fc.fully_shard(Hooked(not saved_new))
        wrong = "Unexpected" if saved_new else "Missing"
        with pytest.raises(RuntimeError, match=rf"(?s)hooks of its own.*{wrong} key.*new\.weight"):
            LOADS[name](tmp_path, model)
        LOADS[name](tmp_path, model, strict=False)
        saved = Hooked(saved_new)
        LOADS[name](tmp_path, saved)
        weight = fc.state_dict(model)["normed.bias"]
        assert torch.equal(weight, saved.normed.bias)

    for world in (1, 2):
        simulate_ranks(run, world)


@pytest.mark.parametrize("name", LOADS)
@pytest.mark.parametrize("has_hook", [False, True])
def test_what_a_load_left_out_is_told(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, name: str, has_hook: bool
) -> None:
    """By what it returns, or in the log; without the names that a load hook knew."""
    saved = nn.Sequential(OrderedDict(old=nn.Linear(2, 2), gone=nn.Linear(2, 2)))
    model = nn.Sequential(OrderedDict(kept=nn.Linear(2, 2), new=nn.Linear(2, 2)))
    save_both(tmp_path, saved)

    def take_old(module: nn.Module, state: dict[str, Any], prefix: str, *_: Any) -> None:
        for key in [key for key in state if key.startswith("old.")]:
            state[key.replace("old.", "new.")] = state.pop(key)

    if has_hook:
        model.register_load_state_dict_pre_hook(take_old)
    found = LOADS[name](tmp_path, fc.fully_shard(model), strict=False)
    told = str([record.args for record in caplog.records if record.name == "fsdp_compose"])
    told = told if found is None else str(found)
    for part, is_told in (("kept", True), ("gone", True), ("old", not has_hook)):
        assert (f"{part}.weight" in told) is is_told, told
    caplog.clear()
    LOADS[name](tmp_path, saved, strict=False)
    assert "fsdp_compose" not in [record.name for record in caplog.records]


class Renaming(nn.Module):
    """A module whose own ``load_state_dict`` knows older names, and returns nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.new = nn.Linear(2, 2)

    def load_state_dict(self, state_dict: Any, strict: bool = True) -> None:  # type: ignore[override]
        renamed = {key.replace("old.", "new."): value for key, value in state_dict.items()}
        super().load_state_dict(renamed, strict)


@pytest.mark.parametrize("name", LOADS)
@pytest.mark.parametrize("part", ["old", "new", "other"])
def test_a_load_state_dict_of_the_modules_own(tmp_path: Path, name: str, part: str) -> None:
    """It is given whole tensors and unknown names, as a load hook is."""
    saved = nn.Sequential(OrderedDict([(part, nn.Linear(2, 2))]))
    save_both(tmp_path, saved)
    if part == "other":
        with pytest.raises(RuntimeError, match=r"(?s)Missing key.*new\.weight.*other\.weight"):
            LOADS[name](tmp_path, fc.fully_shard(Renaming()))
        return
    for model in (fc.fully_shard(Renaming()), Renaming()):
        assert LOADS[name](tmp_path, model) in (None, ([], []))
        assert fc.load_state_dict(model, saved.state_dict()) == ([], [])
        assert torch.equal(fc.state_dict(model)["new.weight"], saved[0].weight)


def rename(module: nn.Module, state: dict[str, Any], prefix: str, _: Any) -> None:
    state[prefix + "shift"] = state.pop(prefix + "bias").clone()


@pytest.mark.parametrize("name", LOADS)
def test_names_that_a_saving_hook_made_are_no_places(tmp_path: Path, name: str) -> None:
    """What a module's hooks call its values when it saves is not what it loads, as in torch."""
    plain = nn.Linear(4, 4)
    plain._register_state_dict_hook(rename)
    save_both(tmp_path, plain)
    with pytest.raises(RuntimeError, match=r"(?s)Missing.*bias.*Unexpected.*shift"):
        plain.load_state_dict(plain.state_dict())

    def run(rank: int) -> None:
        model = nn.Linear(4, 4)
        model._register_state_dict_hook(rename)
        fc.fully_shard(model)
        with pytest.raises(RuntimeError, match=r"missing keys: 'bias'"):
            LOADS[name](tmp_path, model)
        LOADS[name](tmp_path, model, strict=False)
        assert torch.equal(model.weight.full_tensor(), plain.weight)

    simulate_ranks(run)


WRONG_READS: dict[str, Callable[[Tensor], Any]] = {
    "a Tensor of torch.float32, of shape (1,)": lambda run: run[:1],
    "a Tensor of torch.float64, of shape (8,)": lambda run: run.double(),
    "a Tensor of torch.float32, of shape (1, 8)": lambda run: run[None],
    "NoneType": lambda run: None,
}


@pytest.mark.parametrize("found", WRONG_READS)
def test_formats_whose_reads_are_wrong(tmp_path: Path, found: str) -> None:
    """One element for eight was spread over them all; nothing is written."""
    fc.save_full(tmp_path, nn.Linear(4, 4))

    def read(path: Path) -> dict[str, fc.Stored]:
        def change(stored: fc.Stored) -> fc.Stored:
            def part(first: int, last: int) -> Any:
                run = stored.read(first, last)
                return WRONG_READS[found](run) if len(run) == 8 else run

            return replace(stored, read=part)

        return {name: change(stored) for name, stored in SAFETENSORS.read(path).items()}

    def run(rank: int) -> None:
        model = fc.fully_shard(nn.Linear(4, 4), init="broadcast")
        before = model.weight.full_tensor()
        text = f"gave {found}; wanted a Tensor of torch.float32, of shape (8,)"
        with pytest.raises(RuntimeError, match=re.escape(text)):
            fc.load_full(tmp_path, model, format=replace(SAFETENSORS, read=read))
        assert torch.equal(model.weight.full_tensor(), before)

    simulate_ranks(run, 2)


def save_models(folder: Path, *seeds: int) -> None:
    for seed in seeds:
        model = net(seed)
        optim = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        model(torch.ones(1, 4)).sum().backward()
        optim.step()
        fc.save_checkpoint(folder / str(seed) / "parts", model, optim)
        fc.save_full(folder / str(seed) / "whole", model)


def net(seed: int) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3))


@pytest.mark.parametrize("has_index", [True, False])
@pytest.mark.parametrize("name", LOADS)
def test_ranks_load_one_model(tmp_path: Path, name: str, has_index: bool) -> None:
    """Ranks whose folders hold other models raise; copies of one model load."""
    save_models(tmp_path, 0, 1)
    shutil.copytree(tmp_path / "0", tmp_path / "copy")
    if not has_index:
        for index in tmp_path.glob("*/whole/*.index.json"):
            index.unlink()

    def run(rank: int) -> None:
        model = fc.fully_shard(net(2))
        with pytest.raises(RuntimeError, match=f"different things: rank 0 has {name}"):
            LOADS[name](tmp_path / str(rank), model)
        equal(fc.state_dict(model), fc.state_dict(net(2)))
        LOADS[name](tmp_path / ("copy" if rank else "0"), model)
        saved = net(3)
        LOADS[name](tmp_path / "0", saved)
        equal(fc.state_dict(model), fc.state_dict(saved))

    simulate_ranks(run, 2)


def test_ranks_of_other_models_load_apart(tmp_path: Path) -> None:
    """A model that is not cut over ranks may be loaded from each rank's own folder."""
    save_models(tmp_path, 0, 1)

    def run(rank: int) -> None:
        for model in (net(2), fc.fully_shard(net(2), mesh="self")):
            for load in LOADS.values():
                load(tmp_path / str(rank), model)
            saved = net(3)
            fc.load_full(tmp_path / str(rank) / "whole", saved)
            equal(fc.state_dict(model), fc.state_dict(saved))

    simulate_ranks(run, 2)


@pytest.mark.parametrize("option", ["optim", "strict"])
def test_ranks_load_with_the_same_options(tmp_path: Path, option: str) -> None:
    """An optimizer, or strict=False, on some ranks only raises; nothing is written."""
    save_models(tmp_path, 0)

    def run(rank: int) -> None:
        model = fc.fully_shard(net(2))
        optim = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9)
        given = {"optim": optim if rank else None} if option == "optim" else {"strict": bool(rank)}
        told = rf"different things: rank 0 has load_checkpoint.*{option}=False.*{option}=True"
        with pytest.raises(RuntimeError, match=told):
            fc.load_checkpoint(tmp_path / "0" / "parts", model, **given)
        equal(fc.state_dict(model), fc.state_dict(net(2)))
        assert not optim.state and optim.param_groups[0]["lr"] == 0.5

    simulate_ranks(run, 2)


class Normed(nn.Module):
    """Buffers, which a load that fails on the weights would have written already."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.norm = nn.BatchNorm1d(4)
        self.norm.running_mean.fill_(seed)
        self.linear = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(self.norm(x))


@pytest.mark.parametrize("part", ["", "linear"])
@pytest.mark.parametrize("name", LOADS)
def test_a_load_inside_gathered_raises(tmp_path: Path, name: str, part: str) -> None:
    """In a scope or a hook of any unit; nothing of the model is written."""
    save_both(tmp_path, Normed(1))

    def run(rank: int) -> None:
        model = Normed(0).eval()
        fc.fully_shard(model.linear)
        fc.fully_shard(model)
        refused = pytest.raises(RuntimeError, match=f"{name}: Normed is gathered now; leave the")
        with torch.no_grad(), fc.gathered(model.get_submodule(part)), refused:
            LOADS[name](tmp_path, model)

        def hook(module: nn.Module, args: Any) -> None:
            with refused:
                LOADS[name](tmp_path, model)

        handle = model.get_submodule(part).register_forward_pre_hook(hook)
        model(torch.ones(2, 4))
        handle.remove()
        equal(fc.state_dict(model), fc.state_dict(Normed(0)))
        LOADS[name](tmp_path, model)
        equal(fc.state_dict(model), fc.state_dict(Normed(1)))

    for world in (1, 2):
        simulate_ranks(run, world)


def test_optimizer_state_inside_gathered_raises() -> None:
    """Whole state would meet sliced gradients in the next step; nothing is written."""

    def run(rank: int) -> None:
        model = fc.fully_shard(Normed(0))
        optim = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        saved = fc.optim_state_dict(model, optim)
        saved["param_groups"][0]["lr"] = 0.5
        refused = pytest.raises(RuntimeError, match="load_optim_state_dict: Normed is gathered")
        with fc.gathered(model), refused:
            fc.load_optim_state_dict(model, optim, saved)
        assert optim.param_groups[0]["lr"] == 0.1

    for world in (1, 2):
        simulate_ranks(run, world)


class Versioned(nn.Module):
    """Converts what was saved before its second version."""

    _version = 2

    def __init__(self) -> None:
        super().__init__()
        self.lin = nn.Linear(2, 2)

    def _load_from_state_dict(self, state: Any, prefix: str, meta: Any, *rest: Any) -> None:
        if meta.get("version", 1) < 2:
            state[prefix + "lin.bias"] = state[prefix + "lin.bias"] * 0
        super()._load_from_state_dict(state, prefix, meta, *rest)

    def forward(self, x: Tensor) -> Tensor:
        return self.lin(x)


@pytest.mark.parametrize("from_rank0", [False, True])
@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("world", [1, 2])
def test_versions_come_with_state(world: int, compiled: bool, from_rank0: bool) -> None:
    """From rank 0 too, and by the names that a wrapper gives: new state is not taken for old."""

    def run(rank: int) -> None:
        torch.manual_seed(0)
        plain = nn.Sequential(Versioned())
        model: Any = nn.Sequential(Versioned())
        model.load_state_dict(plain.state_dict())
        fc.fully_shard(model)
        whole = torch.compile(model, backend="eager") if compiled else model
        given = plain.state_dict() if rank == 0 or not from_rank0 else {}
        fc.load_state_dict(whole, given, broadcast_from_rank0=from_rank0)
        equal(fc.state_dict(model), plain.state_dict())

    simulate_ranks(run, world)


def test_any_dtype_is_sent_from_rank_0() -> None:
    """Dtypes that gloo does not know, and views that conjugate; a DTensor is refused by name."""
    given = {
        "lin.weight": torch.arange(4.0).reshape(2, 2),
        "small": torch.tensor([3, -4], dtype=torch.int16),
        "large": torch.tensor([3, 70], dtype=torch.uint16),
        "low": torch.tensor([1.5, -2]).to(torch.float8_e4m3fn),
        "turn": torch.tensor([1 + 2j, 3 - 4j]).conj(),
        "part": torch.tensor([1 + 2j, 3 - 4j]).conj().imag,
        "one": torch.tensor(1 - 2j).conj(),
    }

    def run(rank: int) -> None:
        model = nn.Module()
        model.lin = nn.Linear(2, 2, bias=False)
        for name, value in list(given.items())[1:]:
            model.register_buffer(name, torch.zeros_like(value.clone(), dtype=value.dtype))
        fc.fully_shard(model)
        fc.load_state_dict(model, given if rank == 0 else {}, broadcast_from_rank0=True)
        found = fc.state_dict(model)
        for name, value in given.items():
            assert found[name].tolist() == value.tolist(), name
        mesh = init_device_mesh("cpu", (2,))
        cut = {**given, "lin.weight": distribute_tensor(given["lin.weight"], mesh, [Shard(0)])}
        with pytest.raises(TypeError, match=r"'lin.weight' is a slice; wanted full tensors"):
            fc.load_state_dict(model, cut if rank == 0 else {}, broadcast_from_rank0=True)

    run_ranks(run, 2)


def test_a_number_that_conjugates_is_loaded() -> None:
    def run(rank: int) -> None:
        model = nn.Module()
        model.turn = nn.Parameter(torch.tensor(0j))
        model.part = nn.Parameter(torch.tensor(0.0))
        fc.fully_shard(model)
        turned = torch.tensor(3 - 4j).conj()
        fc.load_state_dict(model, {"turn": turned, "part": turned.imag})
        assert complex(model.turn.full_tensor()) == 3 + 4j
        assert float(model.part.full_tensor()) == 4

    run_ranks(run, 2)


def expand() -> Tensor:
    return torch.zeros(1, 2).expand(3, 2)


def infer() -> Tensor:
    with torch.inference_mode():
        return torch.zeros(3, 2)


@pytest.mark.parametrize("make", [expand, infer, lambda: torch.zeros(3, 2).to_sparse()])
@pytest.mark.parametrize("way", ["checkpoint", "full", "function", "method"])
def test_buffers_that_cannot_be_written(
    tmp_path: Path, make: Callable[[], Tensor], way: str
) -> None:
    """No load writes the parameters first and fails then; ``assign=True`` writes into none."""

    def net(value: float, buffer: Tensor) -> nn.Module:
        model = nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 2))
        for param in model.parameters():
            nn.init.constant_(param, value)
        model.register_buffer("table", buffer)
        fc.fully_shard(model[0])
        return fc.fully_shard(model, init="as_is")

    def run(rank: int) -> None:
        saved, model = net(1, torch.ones(3, 2)), net(0, make())
        loads: dict[str, Callable[[], Any]] = {
            "checkpoint": lambda: fc.load_checkpoint(tmp_path / "parts", model),
            "full": lambda: fc.load_full(tmp_path / "whole", model),
            "function": lambda: fc.load_state_dict(model, state),
            "method": lambda: model.load_state_dict(state),
        }
        fc.save_checkpoint(tmp_path / "parts", saved)
        fc.save_full(tmp_path / "whole", saved)
        state = fc.state_dict(saved)
        with pytest.raises(RuntimeError, match=r"unchanged:\n  'table' (has|of the module)"):
            loads[way]()
        for param in model.parameters():
            assert not param.full_tensor().any()
        model.load_state_dict(state, assign=True)
        for param in model.parameters():
            assert param.full_tensor().all()
        assert model.table.all()

    simulate_ranks(run, 2)
