"""Values in optimizer and extra state, beside what torch's optimizers keep, resume as they were."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor
from torch.testing import assert_close

import fsdp_compose as fc
from fsdp_compose.checkpoint.formats.export import find_stored
from fsdp_compose.checkpoint.formats.safetensors import SAFETENSORS
from fsdp_compose.sharded import is_sharded

from harness import rank_errors, run_ranks, simulate_ranks
from models import Tower, by_block, data, seeded, sgd, square, whole
from saved import equal


@pytest.mark.parametrize("call", [fc.save_full, fc.load_full])
def test_whole_files_wait_for_a_save_under_way(tmp_path: Path, call: Any) -> None:
    """Both talk over one group: neither reads what the other says."""

    def check(rank: int) -> None:
        model = by_block(seeded(Tower))
        fc.save_full(tmp_path / "whole", model)
        for _ in range(5):
            saving = fc.save_checkpoint(tmp_path / "parts", model, asynchronous=True)
            call(tmp_path / "whole", model)
            assert saving.done()
            saving.wait()
        fc.load_checkpoint(tmp_path / "parts", model)

    run_ranks(check, 3)


class Counted(nn.Linear):
    """Keeps tensors in a tuple."""

    def __init__(self) -> None:
        super().__init__(3, 2)
        self.mean, self.best = torch.zeros(2), torch.zeros(1)

    def get_extra_state(self) -> Any:
        return self.mean, {"best": self.best}

    def set_extra_state(self, state: Any) -> None:
        self.mean, self.best = state[0], state[1]["best"]


def test_an_asynchronous_save_copies_tuples(tmp_path: Path) -> None:
    def check(rank: int) -> None:
        model = fc.fully_shard(seeded(Counted))
        optimizer = torch.optim.AdamW(model.parameters())
        settings = optimizer.param_groups[0]
        settings["stats"] = (torch.zeros(1), [torch.zeros(1)])
        settings["seen"] = {torch.zeros(1)}
        saving = fc.save_checkpoint(tmp_path, model, optimizer, asynchronous=True)
        for tensor in (model.mean, model.best, settings["stats"][0], *settings["seen"]):
            tensor.fill_(7.0)
        settings["stats"][1][0].fill_(7.0)
        saving.wait()
        fc.load_checkpoint(tmp_path, model, optimizer)
        found = optimizer.param_groups[0]
        first, (second,) = found["stats"]
        for tensor in (model.mean, model.best, first, second, *found["seen"]):
            assert not tensor.any()

    run_ranks(check, 2)


def test_numbers_of_numpy_resume_as_numbers(tmp_path: Path) -> None:
    """As a schedule by np.cos sets them, in groups and in state."""

    def build() -> tuple[nn.Module, torch.optim.Optimizer, Any]:
        model = by_block(seeded(Tower))
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
        cosine = lambda step: 0.5 * (1 + np.cos(step / 10))  # noqa: E731
        return model, optimizer, torch.optim.lr_scheduler.LambdaLR(optimizer, cosine)

    def check(rank: int) -> None:
        model, optimizer, schedule = build()
        square(model, data(0, rank)).backward()
        optimizer.step()
        schedule.step()
        optimizer.state[model.first.weight]["seen"] = [np.int64(3), {"scale": np.float32(0.5)}]
        assert type(optimizer.param_groups[0]["lr"]) is np.float64
        fc.save_checkpoint(tmp_path, model, optimizer)
        full = fc.optim_state_dict(model, optimizer)
        assert type(full["param_groups"][0]["lr"]) is float
        other, again, _ = build()
        fc.load_checkpoint(tmp_path, other, again)
        equal(fc.optim_state_dict(other, again), full)
        seen = again.state[other.first.weight]["seen"]
        assert seen == [3, {"scale": 0.5}] and type(seen[0]) is int

    simulate_ranks(check, 2)


class AggMo(torch.optim.Optimizer):
    """Lucas et al., "Aggregated Momentum", 2019: a buffer for each coefficient, by that number."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for p in self.param_groups[0]["params"]:
            for beta in (0, 0.9, 1 - 1e-5):
                buffers = self.state[p].setdefault("momentum", {})
                buffers[beta] = buffers.get(beta, torch.zeros_like(p)) * beta + p.grad
                p.sub_(buffers[beta], alpha=0.01)


def test_state_by_numbers_resumes(tmp_path: Path) -> None:
    """Those that a dictionary in state has for keys stay numbers, also ones between integers."""

    def check(rank: int) -> None:
        model, other = by_block(seeded(Tower)), by_block(seeded(Tower, seed=1))
        optimizer, again = (AggMo(each.parameters(), {}) for each in (model, other))
        square(model, data(0, rank)).backward()
        optimizer.step()
        full = fc.optim_state_dict(model, optimizer)
        assert list(full["state"]["first.weight"]["momentum"]) == [0, 0.9, 1 - 1e-5]
        fc.load_optim_state_dict(other, again, full)
        equal(fc.optim_state_dict(other, again), full)
        fc.save_checkpoint(tmp_path, model, optimizer)
        last = AggMo(other.parameters(), {})
        fc.load_checkpoint(tmp_path, other, last)
        assert_close(fc.optim_state_dict(other, last)["state"], full["state"])
        optimizer.state[model.first.weight]["momentum"][math.inf] = torch.ones(1)
        with pytest.raises(TypeError, match=r"'momentum' has a key inf; wanted a string or"):
            fc.optim_state_dict(model, optimizer, kind="sharded")

    simulate_ranks(check, 2)


def test_objects_that_will_not_load_are_told_of(tmp_path: Path) -> None:
    """When they are saved; they load once their class is trusted."""

    def check(rank: int) -> None:
        model = fc.fully_shard(seeded(lambda: nn.Linear(3, 2)))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        optimizer.param_groups[0]["last"] = range(3)
        told = r"'optim.param_groups.0.last' holds a range, which load_checkpoint takes"
        if rank == 0:
            with pytest.warns(UserWarning, match=told):
                fc.save_checkpoint(tmp_path, model, optimizer)
        else:
            fc.save_checkpoint(tmp_path, model, optimizer)
        with pytest.raises(RuntimeError, match=r"holds a range, and is not unpickled"):
            fc.load_checkpoint(tmp_path, model, optimizer)
        optimizer.param_groups[0]["last"] = None
        with torch.serialization.safe_globals([range]):
            fc.load_checkpoint(tmp_path, model, optimizer)
        assert optimizer.param_groups[0]["last"] == range(3)

    run_ranks(check, 2)


def test_the_class_that_is_missing_is_named(tmp_path: Path) -> None:
    """Also one that another class, which is trusted, is built of."""

    def check(rank: int) -> None:
        model = fc.fully_shard(seeded(Counted))
        model.mean = np.ones(2)
        with pytest.warns(UserWarning, match="pass it as extra="):
            fc.save_checkpoint(tmp_path, model)
        build = np.zeros(1).__reduce__()[0]
        trusted = [build, np.ndarray, np.dtype]
        with (
            torch.serialization.safe_globals(trusted),
            pytest.raises(RuntimeError, match=r"holds a numpy\.dtypes\.Float64DType, and"),
        ):
            fc.load_checkpoint(tmp_path, model)
        with torch.serialization.safe_globals([*trusted, type(np.dtype("float64"))]):
            fc.load_checkpoint(tmp_path, model)

    simulate_ranks(check, 1)


@pytest.mark.parametrize("over", [fc.local_parameters, fc.flat_parameters])
def test_a_number_that_is_none_resumes(tmp_path: Path, over: Any) -> None:
    """NaN, which is not equal to itself, is the same number for all parameters of a buffer."""

    def check(rank: int) -> None:
        model = by_block(seeded(Tower))
        optimizer = sgd(over(model))
        square(model, data(0, rank)).backward()
        optimizer.step()
        for group in optimizer.param_groups:
            for param in group["params"]:
                optimizer.state[param]["best"] = math.nan
        fc.save_checkpoint(tmp_path, model, optimizer)
        fc.load_checkpoint(tmp_path, model, optimizer)
        assert all(math.isnan(values["best"]) for values in optimizer.state.values())

    simulate_ranks(check, 2)


@pytest.mark.parametrize("key", ["m[0]", "m(1)", "m{'a'}", 5])
def test_keys_that_checkpoints_cannot_keep_are_refused(tmp_path: Path, key: Any) -> None:
    def check(rank: int, call: str) -> None:
        model = fc.fully_shard(seeded(lambda: nn.Linear(3, 2)))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        optimizer.state[model.weight][key] = torch.zeros(1)
        if call == "save":
            fc.save_checkpoint(tmp_path, model, optimizer)
        else:
            fc.optim_state_dict(model, optimizer)

    for call in ("save", "gather"):
        for error in rank_errors(check, 2, call):
            assert error is not None and f"SGD keeps state of 'weight' under {key!r}" in error


def test_full_state_stays_when_training_goes_on() -> None:
    """Lists of numbers too."""

    def check(rank: int) -> None:
        model = by_block(seeded(Tower))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        square(model, data(0, rank)).backward()
        optimizer.step()
        steps: list[Any] = [1, {"of": [2]}]
        optimizer.state[model.first.weight]["steps"] = steps
        optimizer.param_groups[0]["steps"] = steps
        full = fc.optim_state_dict(model, optimizer)
        steps.append(3), steps[1]["of"].append(4)
        assert full["state"]["first.weight"]["steps"] == [1, {"of": [2]}]
        assert full["param_groups"][0]["steps"] == [1, {"of": [2]}]

    simulate_ranks(check, 2)


class LastNorms(torch.optim.Optimizer):
    """Keeps the last four norms of each gradient, alike on all ranks, and a step in a vector."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.1})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for param in self.param_groups[0]["params"]:
            state = self.state[param]
            if not state:
                state.update(step=torch.zeros(1), norms=torch.zeros(4, dtype=torch.float64))
            state["norms"][int(state["step"]) % 4] = param.grad.norm()
            state["step"] += 1
            param.sub_(param.grad / (0.1 + state["norms"].mean()), alpha=0.1)


def train(model: nn.Module, optimizer: LastNorms, steps: range, batches: Any) -> None:
    for step in steps:
        losses = [model(batch).square().mean() for batch in batches(step)]
        (sum(losses) / len(losses)).backward()  # type: ignore[union-attr]
        optimizer.step()
        optimizer.zero_grad()


def test_vectors_as_long_as_a_slice_are_no_slices(tmp_path: Path) -> None:
    """Four numbers beside a slice of four, and one beside a slice, or a parameter, of one."""

    def build() -> nn.Module:
        layers = lambda: (nn.Linear(2, 4, bias=False), nn.Linear(4, 2), nn.Linear(2, 1))  # noqa: E731
        return seeded(lambda: nn.Sequential(*layers()))

    plain = build()
    reference = LastNorms(plain.parameters())
    train(plain, reference, range(5), lambda step: [batch(step, r) for r in range(2)])

    def check(rank: int, begins: bool) -> Any:
        model = fc.fully_shard(build(), units=fc.wrap.by_class(nn.Linear))
        optimizer = LastNorms(model.parameters())
        mine = lambda step: [batch(step, rank)]  # noqa: E731
        if begins:
            train(model, optimizer, range(3), mine)
            fc.save_checkpoint(tmp_path, model, optimizer)
            train(model, optimizer, range(3, 5), mine)
        else:
            fc.load_checkpoint(tmp_path, model, optimizer)
            train(model, optimizer, range(3, 5), mine)
        states = fc.optim_state_dict(model, optimizer)["state"]
        for name, param in model.named_parameters():
            kinds = {key: type(value) for key, value in optimizer.state[param].items()}
            assert kinds == {"step": Tensor, "norms": Tensor}, name
        return [whole(p) for p in model.parameters()], states

    for begins in (True, False):
        params, states = run_ranks(check, 2, begins)[0]
        for found, wanted, name in zip(params, plain.parameters(), states, strict=True):
            assert_close(found, wanted.detach())
            assert_close(dict(states[name]), reference.state[wanted])


class Lone(nn.Module):
    """One number."""

    def __init__(self) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.ones(1))


def test_state_of_one_number_alone() -> None:
    """No larger parameter tells which of it is cut: ``step`` is not, others are."""

    def check(rank: int) -> None:
        model = fc.fully_shard(Lone())
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for key in ("step", "mean"):
            optimizer.state[model.gain][key] = torch.full_like(model.gain, 3.0)
        optimizer.state[model.gain]["step"] = torch.full((1,), 3.0)
        full = fc.optim_state_dict(model, optimizer)
        other = torch.optim.SGD(model.parameters(), lr=0.1)
        fc.load_optim_state_dict(model, other, full)
        kinds = {key: is_sharded(value) for key, value in other.state[model.gain].items()}
        assert kinds == {"step": False, "mean": True}
        equal(fc.optim_state_dict(model, other), full)

    simulate_ranks(check, 2)


@pytest.mark.parametrize("way", ["read", "local"])
def test_a_step_of_one_number_is_no_slice(way: str) -> None:
    """Also where slices of one were handed out, or are what the optimizer steps."""

    def check(rank: int) -> None:
        for build in (lambda: nn.Linear(2, 1), lambda: nn.Linear(1, 1, bias=False)):
            model = fc.fully_shard(seeded(build))
            *_, last = model.parameters()
            assert last.to_local().numel() == (rank == (0 if model.bias is None else 1))
            params = fc.local_parameters(model) if way == "local" else list(model.parameters())
            optimizer = torch.optim.SGD(params, lr=0.1)
            for param in params:
                optimizer.state[param]["step"] = torch.full((1,), 3.0)
            full = fc.optim_state_dict(model, optimizer)
            fc.load_optim_state_dict(model, optimizer, full)
            for values in (*full["state"].values(), *optimizer.state.values()):
                assert type(values["step"]) is Tensor
                assert torch.equal(values["step"], torch.full((1,), 3.0))

    simulate_ranks(check, 3)


def batch(step: int, rank: int) -> Tensor:
    generator = torch.Generator().manual_seed(10 * step + rank)
    return torch.randn(3, 2, generator=generator, dtype=torch.float64)


@pytest.mark.parametrize("cpu", [True, False])
def test_full_by_type_shares_nothing(tmp_path: Path, cpu: bool) -> None:
    """Buffers and ignored parameters too, a DTensor among them as the plain whole."""

    def body(rank: int) -> None:
        mesh = init_device_mesh("cpu", (2,))
        model = nn.Sequential(nn.BatchNorm1d(4), nn.Linear(4, 4), nn.Linear(4, 4))
        model[1].register_buffer("table", distribute_tensor(torch.arange(4.0), mesh, [Shard(0)]))
        fc.fully_shard(model, units=fc.wrap.by_class({nn.BatchNorm1d}), ignored=[model[1]])
        with fc.state_dict_type(model, "full", cpu_offload=cpu):
            found = model.state_dict()
        asked = fc.state_dict(model, "full", cpu_offload=cpu)
        fc.save_full(tmp_path / "full", model)
        fc.save_checkpoint(tmp_path / "parts", model)
        before = {name: value.clone() for name, value in found.items()}
        assert {type(value) for value in found.values()} == {torch.Tensor}
        model(torch.randn(8, 4) + 5)
        with torch.no_grad():
            model[1].weight.fill_(7)
            model[1].table.mul_(2)
        stored = find_stored(tmp_path / "full", SAFETENSORS).tensors
        for name, value in before.items():
            assert torch.equal(found[name], value), name
            assert torch.equal(asked[name], value), name
            assert torch.equal(stored[name].read_all(), value), name
        assert torch.equal(found["1.table"], torch.arange(4.0))
        fc.load_checkpoint(tmp_path / "parts", model)
        equal({**fc.state_dict(model)}, before)

    run_ranks(body)


class Turned(nn.Module):
    """Buffers that are views that conjugate or negate what memory holds."""

    def __init__(self, scale: float) -> None:
        super().__init__()
        self.lin = nn.Linear(2, 2)
        turn = scale * torch.tensor([[1 + 2j, 3 - 4j], [5j, 6]])
        self.register_buffer("turn", turn.t().conj())
        self.register_buffer("row", turn[0].clone().conj())  # contiguous, so that nothing copies it
        self.register_buffer("part", turn.conj().imag)


@pytest.mark.parametrize("world", [1, 2])
def test_buffers_that_conjugate(tmp_path: Path, world: int) -> None:
    """They are verified, taken from rank 0 and saved as what they read as."""

    def body(rank: int) -> None:
        torch.manual_seed(0)
        model, wanted = fc.fully_shard(Turned(1)), Turned(1)
        given = Turned(1 + rank)
        given.lin.load_state_dict(wanted.lin.state_dict())
        taken = fc.fully_shard(given, init="broadcast")
        fc.save_full(tmp_path / "full", model)
        fc.save_checkpoint(tmp_path / "parts", model)
        loaded = [fc.fully_shard(Turned(0)) for _ in range(2)]
        fc.load_full(tmp_path / "full", loaded[0])
        fc.load_checkpoint(tmp_path / "parts", loaded[1])
        for one in (taken, *loaded):
            for name, value in wanted.named_buffers():
                assert one.get_buffer(name).tolist() == value.tolist(), name

    run_ranks(body, world)
