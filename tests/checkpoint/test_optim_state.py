"""Optimizer state by name: equal to a plain optimizer's, and into any other, bit for bit."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

import fsdp_compose as fc
from fsdp_compose.base.process import Traffic, here
from fsdp_compose.checkpoint import (
    load_optim_state_dict,
    load_state_dict,
    optim_state_dict,
    rekey_optim_state_dict,
    state_dict,
)
from fsdp_compose.core.guards.moved_parameters import shard_of

from harness import rank_errors, run_ranks, simulate_ranks
from models import trainable
from optimizers import PackagedProdigy
from saved import OPTIMIZERS, Net, equal, shard, train, two_groups


def plain_state(name: str, steps: int = 3) -> tuple[Net, Optimizer]:
    model = Net()
    optim = OPTIMIZERS[name](model)
    train(model, optim, steps)
    return model, optim


@pytest.mark.parametrize("name", list(OPTIMIZERS))
def test_full_is_the_plain_optimizers_and_loads_there(name: str) -> None:
    """World of one against plain is bit-equal; two ranks compute the same averages here too."""

    def run(rank: int) -> None:
        reference, reference_optim = plain_state(name)
        model = shard(Net())
        optim = OPTIMIZERS[name](model)
        train(model, optim, 3)
        full = optim_state_dict(model, optim)
        numbered = rekey_optim_state_dict(full, "id", model)
        want = reference_optim.state_dict()
        equal(numbered["state"], want["state"])
        equal(numbered["param_groups"], want["param_groups"])
        # Ours into a plain optimizer, and a plain one's into ours.
        plain, fresh = Net(), None
        plain.load_state_dict(state_dict(model))
        fresh = OPTIMIZERS[name](plain)
        fresh.load_state_dict(numbered)
        ahead = train(plain, fresh, 3, first=3)
        other = shard(Net(1), "row")
        load_state_dict(other, reference.state_dict())
        other_optim = OPTIMIZERS[name](other)
        load_optim_state_dict(other, other_optim, copy.deepcopy(want))
        assert ahead == train(other, other_optim, 3, first=3)
        assert ahead == train(model, optim, 3, first=3)

    run_ranks(run, 2)


@pytest.mark.parametrize("kind", ["full", "sharded", "local"])
@pytest.mark.parametrize("name", ["momentum", "adamw", "asgd"])
def test_every_kind_loads_back(name: str, kind: str) -> None:
    def run(rank: int) -> None:
        model = shard(Net())
        optim = OPTIMIZERS[name](model)
        train(model, optim, 2)
        here.traffic.reset()
        saved = optim_state_dict(model, optim, kind)
        assert (here.traffic == Traffic()) == (kind != "full")
        saved = copy.deepcopy(saved)
        weights = state_dict(model)
        ahead = train(model, optim, 3, first=2)
        elsewhere = "blocks" if kind == "local" else "row"
        again = shard(Net(4), elsewhere)
        load_state_dict(again, weights)
        again_optim = OPTIMIZERS[name](again)
        load_optim_state_dict(again, again_optim, saved)
        assert ahead == train(again, again_optim, 3, first=2)

    run_ranks(run, 2)


def test_full_options_and_rank0_only() -> None:
    def run(rank: int) -> None:
        model = shard(Net())
        optim = OPTIMIZERS["adamw"](model)
        train(model, optim, 1)
        full = optim_state_dict(model, optim, "full")
        first = optim_state_dict(model, optim, "full", rank0_only=True, cpu_offload=True)
        if rank == 0:
            equal(full, first)
        else:
            assert first == {}
        model2 = shard(Net(), "root", strategy=fc.ShardingStrategy.SHARD_GRAD_OP)
        optim2 = OPTIMIZERS["adamw"](model2)
        load_optim_state_dict(model2, optim2, first, broadcast_from_rank0=True)
        equal(optim_state_dict(model2, optim2), full)
        assert optim2.param_groups[1]["lr"] == 0.003
        held = sum(part["exp_avg"].to_local().numel() for part in optim2.state.values())
        assert held < sum(p.numel() for p in trainable(model2))

    run_ranks(run, 2)


def test_broadcast_over_two_axes() -> None:
    def run(rank: int) -> None:
        from torch.distributed.device_mesh import init_device_mesh

        mesh = init_device_mesh("cpu", (2, 2))
        model = shard(Net(), mesh=mesh)
        optim = OPTIMIZERS["adam"](model)
        saved = plain_state("adam")[1].state_dict() if rank == 0 else {}
        load_optim_state_dict(model, optim, saved, broadcast_from_rank0=True)
        got = rekey_optim_state_dict(optim_state_dict(model, optim), "id", model)
        equal(got["state"], plain_state("adam")[1].state_dict()["state"])

    run_ranks(run, 4)


def test_gathers_one_per_bucket_and_kind_of_state() -> None:
    def run(rank: int) -> None:
        model = shard(Net(), "root")
        optim = OPTIMIZERS["adamw"](model)
        train(model, optim, 1)
        here.traffic.reset()
        optim_state_dict(model, optim)
        assert here.traffic.gathers == 2  # exp_avg and exp_avg_sq of the one trained bucket

    run_ranks(run, 2)


def test_empty_before_the_first_step() -> None:
    def run(rank: int) -> None:
        model = shard(Net())
        optim = OPTIMIZERS["adamw"](model)
        for kind in ("full", "sharded", "local"):
            saved = optim_state_dict(model, optim, kind)
            assert saved["state"] == {} and len(saved["param_groups"]) == 2
            load_optim_state_dict(model, optim, saved)
            assert not optim.state
        plain = OPTIMIZERS["adamw"](Net())
        plain.load_state_dict(rekey_optim_state_dict(saved, "id", model))

    run_ranks(run, 2)


def test_hyper_parameters_travel_by_group() -> None:
    def run(rank: int) -> None:
        model = shard(Net())
        optim = OPTIMIZERS["adamw"](model)
        train(model, optim, 1)
        for group, lr in zip(optim.param_groups, (0.5, 0.25)):
            group["lr"] = lr
        saved = optim_state_dict(model, optim)
        assert [g["lr"] for g in saved["param_groups"]] == [0.5, 0.25]
        assert saved["param_groups"][0]["params"] == ["a.weight", "b.weight", "c.weight"]
        groups = list(reversed(two_groups(model)))  # other order: matched by name
        again = torch.optim.AdamW(groups, lr=7.0)
        load_optim_state_dict(model, again, saved)
        assert [g["lr"] for g in again.param_groups] == [0.25, 0.5]
        assert [g["weight_decay"] for g in again.param_groups] == [0.01, 0.1]

    run_ranks(run, 2)


def test_several_optimizers_and_one_per_parameter() -> None:
    def run(rank: int) -> None:
        model = shard(Net())
        optims = [torch.optim.AdamW([p], lr=0.01) for p in trainable(model)]
        train(model, optims, 2)
        saved = copy.deepcopy(optim_state_dict(model, optims))
        weights = state_dict(model)
        assert len(saved["param_groups"]) == len(optims)
        ahead = train(model, optims, 2, first=2)
        other = shard(Net(1), "row")
        load_state_dict(other, weights)
        one = torch.optim.AdamW(trainable(other), lr=0.01)
        load_optim_state_dict(other, one, saved)
        assert ahead == train(other, one, 2, first=2)
        # and each of several takes its own from the whole
        other = shard(Net(1), "row")
        load_state_dict(other, weights)
        pair = [torch.optim.AdamW(trainable(other)[:3]), torch.optim.AdamW(trainable(other)[3:])]
        for each in pair:
            load_optim_state_dict(other, each, saved)
        assert ahead == train(other, pair, 2, first=2)

    run_ranks(run, 2)


def test_optimizer_inside_backward() -> None:
    def run(rank: int) -> None:
        def build(model: Net) -> dict[Any, Optimizer]:
            optims = {p: torch.optim.Adam([p], lr=0.01) for p in trainable(model)}

            def step(param: Any) -> None:
                optims[param].step()
                optims[param].zero_grad()

            for param in optims:
                param.register_post_accumulate_grad_hook(step)
            return optims

        model = shard(Net())
        optims = build(model)
        train(model, [], 2)
        saved = copy.deepcopy(optim_state_dict(model, optims.values(), "sharded"))
        weights = state_dict(model)
        ahead = train(model, [], 2, first=2)
        other = shard(Net(1), "row")
        load_state_dict(other, weights)
        others = build(other)
        load_optim_state_dict(other, others.values(), saved)
        assert ahead == train(other, [], 2, first=2)

    run_ranks(run, 2)


@pytest.mark.parametrize("pieces", ["whole shards", "slices", "slices, marked"])
def test_optimizer_over_raw_pieces_of_shards(pieces: str) -> None:
    """Plain tensors over the shards: the state is cut at the parameters' borders."""

    def run(rank: int) -> None:
        model = shard(Net())
        units = [fc.get_state(m).unit for m in (model, model.a, model.b)]
        buckets = [b for u in units for b in u.buckets if b.entries[0].param.requires_grad]
        raw = []
        for bucket in buckets:
            if pieces == "whole shards":
                raw.append(shard_of(bucket).detach())
            else:
                for entry in bucket.entries:
                    raw.append(entry.param.to_local().detach())
                    if pieces == "slices, marked":
                        raw[-1]._fsdp_compose_entry = entry.param._fsdp_compose_entry
        if pieces == "slices" and any(not r.numel() for r in raw):
            raw = [r for r in raw if r.numel()]  # nobody can tell whose an unmarked empty one is
        optim = torch.optim.AdamW(raw, lr=0.01)
        for step in range(2):
            for i, tensor in enumerate(raw):
                tensor.grad = torch.full_like(tensor, 0.1 * (step + i + 1))
            optim.step()
        sharded = optim_state_dict(model, optim, "sharded")
        for name, values in sharded["state"].items():
            param = dict(model.named_parameters())[name]
            assert values["exp_avg"].shape == param.shape
            assert values["exp_avg"]._shard_spec is param._shard_spec
            assert values["step"] == 2
        if pieces == "slices":
            return
        again = torch.optim.AdamW(raw, lr=0.5)
        load_optim_state_dict(model, again, sharded)
        for a, b in zip(optim.state.values(), again.state.values()):
            for key in a:
                assert type(b[key]) is torch.Tensor
        full = optim_state_dict(model, optim)
        assert set(full["state"]) == {n for n, p in model.named_parameters() if p.requires_grad}
        elsewhere = shard(Net(), "row")
        named = torch.optim.AdamW(trainable(elsewhere), lr=0.01)
        load_optim_state_dict(elsewhere, named, full)
        equal(optim_state_dict(elsewhere, named)["state"], dict(sorted_like(full, elsewhere)))

    run_ranks(run, 2)


def sorted_like(full: dict[str, Any], model: nn.Module) -> Any:
    return [(n, full["state"][n]) for n, p in model.named_parameters() if p.requires_grad]


class Odd(Optimizer):
    """Custom state: replicated matrix, local slice, list, None, an integer, a tensor scalar."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.1, "note": "x"})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                state = self.state[p]
                if not state:
                    state["count"] = 0
                    state["matrix"] = torch.eye(2)
                    state["seen"] = []
                    state["none"] = None
                    state["local"] = torch.zeros_like(p.to_local())
                    state["tagged"] = torch.zeros_like(p)
                state["count"] += 1
                state["matrix"] *= 2
                state["seen"].append(state["count"])
                state["local"] += p.to_local()
                state["tagged"] += p
                p.sub_(0.1 * p.grad)


def test_custom_state_of_every_sort() -> None:
    def run(rank: int) -> None:
        model = shard(Net())
        optim = Odd([model.a.weight, model.c.weight])
        train(model, optim, 2)
        full = copy.deepcopy(optim_state_dict(model, optim))
        values = full["state"]["a.weight"]
        assert values["count"] == 2 and values["seen"] == [1, 2] and values["none"] is None
        assert torch.equal(values["matrix"], 4 * torch.eye(2))
        for name in ("a.weight", "c.weight"):
            assert torch.equal(full["state"][name]["local"], full["state"][name]["tagged"])
        for kind in ("full", "sharded"):
            other = shard(Net(), "row")
            again = Odd([other.a.weight, other.c.weight])
            train(other, again, 1)
            load_optim_state_dict(other, again, optim_state_dict(model, optim, kind))
            equal(optim_state_dict(other, again), full)
            assert type(again.state[other.a.weight]["local"]) is torch.Tensor

    run_ranks(run, 2)


class Means(Optimizer):
    """Keeps two numbers for each parameter, one of them as torch calls state of its shape."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for p in self.param_groups[0]["params"]:
            mean = self.state[p].setdefault("exp_avg_sq", torch.zeros(()))
            total = self.state[p].setdefault("total", torch.zeros(1))
            mean.lerp_(p.grad.square().mean(), 0.1)
            total.add_(mean)
            p.sub_(p.grad * total.rsqrt().view(()), alpha=0.01)


@pytest.mark.parametrize("make", [lambda params: Means(params, {}), PackagedProdigy])
def test_state_of_a_parameter_of_one_element(make: Any) -> None:
    """Whether it is a slice is told by that of larger parameters; also of what was flattened."""

    def build(model: nn.Module) -> Optimizer:
        named = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
        return make([p for name, p in named if name != "c.weight"])  # which flatten() copies

    def run(rank: int) -> None:
        plain, model = Net(), shard(Net())
        reference, optim = build(plain), build(model)
        train(plain, reference, 2)
        train(model, optim, 2)
        train(plain, reference, 1)
        for kind in ("full", "sharded"):
            other = shard(Net(3))
            again = build(other)
            load_state_dict(other, state_dict(model))
            load_optim_state_dict(other, again, optim_state_dict(model, optim, kind))
            train(other, again, 1)
            torch.testing.assert_close(dict(state_dict(other)), dict(plain.state_dict()))

    simulate_ranks(run, 2)


@pytest.mark.parametrize("order", list(itertools.permutations((4, 3, 2, 1), 2))[:4])
def test_full_state_moves_between_world_sizes(order: tuple[int, int]) -> None:
    def save(rank: int) -> Any:
        model = shard(Net())
        optim = OPTIMIZERS["adamw"](model)
        train(model, optim, 2)
        return state_dict(model), optim_state_dict(model, optim)

    def load(rank: int, saved: Any) -> Any:
        model = shard(Net(3), "row")
        optim = OPTIMIZERS["adamw"](model)
        load_state_dict(model, saved[0])
        load_optim_state_dict(model, optim, saved[1])
        return dict(state_dict(model)), optim_state_dict(model, optim)

    saved = run_ranks(save, order[0])[0]
    for weights, state in run_ranks(load, order[1], saved):
        equal(weights, dict(saved[0]))
        equal(state, saved[1])


def test_rekey_both_ways_and_its_errors() -> None:
    model, optim = plain_state("adamw")
    single, single_optim = plain_state("adam")
    sd = single_optim.state_dict()
    named = rekey_optim_state_dict(sd, "name", single)
    assert list(named["state"]) == [n for n, p in single.named_parameters() if p.requires_grad]
    equal(rekey_optim_state_dict(named, "id", single), sd)
    equal(rekey_optim_state_dict(sd, "id", single), sd)
    equal(rekey_optim_state_dict(named, "name", single), named)
    sd = optim.state_dict()
    with pytest.raises(ValueError, match="pass optim="):
        rekey_optim_state_dict(sd, "name", model)
    named = rekey_optim_state_dict(sd, "name", model, optim)
    equal(rekey_optim_state_dict(named, "id", model), sd)
    with pytest.raises(ValueError, match="'name' or 'id'"):
        rekey_optim_state_dict(sd, "names", model)  # type: ignore[arg-type]


def test_numbers_are_those_of_the_given_optimizer() -> None:
    """Which lists parameters in another order; groups that the state does not have raise."""

    def listed(model: nn.Module, turned: bool) -> torch.optim.Optimizer:
        groups = [
            [p for p in model.parameters() if (p.ndim > 1) is is_matrix]
            for is_matrix in (True, False)
        ]
        chosen = [
            {"params": g[:: -1 if turned else 1], "lr": i + 0.5} for i, g in enumerate(groups)
        ]
        return torch.optim.SGD(chosen[:: -1 if turned else 1], momentum=0.9)

    saved, plain = Net(), Net()
    first, second = listed(saved, turned=False), listed(plain, turned=True)
    for p in saved.parameters():
        p.grad = torch.randn_like(p)
    first.step()
    named = optim_state_dict(saved, first)
    second.load_state_dict(rekey_optim_state_dict(named, "id", plain, second))
    for mine, theirs in zip(plain.parameters(), saved.parameters(), strict=True):
        assert torch.equal(
            second.state[mine]["momentum_buffer"], first.state[theirs]["momentum_buffer"]
        )
    assert [group["lr"] for group in second.param_groups] == [1.5, 0.5]
    with pytest.raises(ValueError, match="has several groups"):
        rekey_optim_state_dict(named, "id", plain, torch.optim.SGD(plain.parameters(), lr=0.1))
    named["param_groups"].pop()
    with pytest.raises(ValueError, match=r"lacks 'b\.bias'"):
        rekey_optim_state_dict(named, "id", plain, second)


def test_a_named_optimizer_tells_its_names() -> None:
    model = Net()
    optim = torch.optim.SGD(list(model.named_parameters())[:2], lr=0.1, momentum=0.9)
    assert rekey_optim_state_dict(optim.state_dict(), "name", model)["param_groups"][0][
        "params"
    ] == ["scale", "gain"]


BAD: dict[str, tuple[Callable[[dict[str, Any]], Any], str]] = {
    "name": (
        lambda sd: sd["state"].update({"a.wieght": sd["state"].pop("a.weight")}),
        "no parameters 'a.wieght' (closest: 'a.weight'",
    ),
    "group": (
        lambda sd: sd["param_groups"][0]["params"].remove("a.weight"),
        "no group has 'a.weight'",
    ),
    "shape": (
        lambda sd: sd["state"]["a.weight"].update(exp_avg=torch.zeros(3, 5)),
        "'exp_avg' of 'a.weight' has global shape (3, 5); wanted (5, 3)",
    ),
    "split": (
        lambda sd: sd["param_groups"].append(
            {"lr": 9.0, "params": [sd["param_groups"][0]["params"].pop()]}
        ),
        "is several groups in the saved state",
    ),
    "format": (lambda sd: sd.pop("param_groups"), "wanted a dictionary with 'state'"),
}


@pytest.mark.parametrize("case", list(BAD))
def test_bad_state_raises_and_changes_nothing(case: str) -> None:
    """Bad state raises everywhere and changes nothing."""
    change, text = BAD[case]

    def run(rank: int) -> None:
        model = shard(Net())
        optim = OPTIMIZERS["adamw"](model)
        train(model, optim, 1)
        given = copy.deepcopy(optim_state_dict(model, optim))
        before = copy.deepcopy(given)
        if rank == 1:
            change(given)
        for values in given.get("state", {}).values():
            values["exp_avg_sq"].fill_(5)
        try:
            load_optim_state_dict(model, optim, given)
        finally:
            equal(optim_state_dict(model, optim), before)

    errors = rank_errors(run, 2)
    assert all(e is not None and text in e for e in errors), errors
    assert "found on rank 1" in str(errors[0])


def test_wrong_world_size_for_local() -> None:
    def save(rank: int) -> bytes:
        import pickle

        model = shard(Net())
        optim = OPTIMIZERS["adamw"](model)
        train(model, optim, 1)
        return pickle.dumps(optim_state_dict(model, optim, "local"))

    saved = run_ranks(save, 2)

    def load(rank: int) -> None:
        import pickle

        model = shard(Net())
        optim = OPTIMIZERS["adamw"](model)
        load_optim_state_dict(model, optim, pickle.loads(saved[rank % 2]))

    assert run_ranks(load, 2) == [None, None]
    errors = rank_errors(load, 3)
    assert all(e is not None and "saved over 2 ranks, here it is cut over 3" in e for e in errors)


def test_foreign_parameters_are_refused() -> None:
    def run(rank: int) -> None:
        model = shard(Net())
        with pytest.raises(ValueError, match=r"parameter 0 of group 0 \(shape"):
            optim_state_dict(model, torch.optim.SGD([nn.Parameter(torch.ones(3))]))
        with pytest.raises(ValueError, match="is not a parameter of the module"):
            optim_state_dict(model.b, torch.optim.SGD(model.parameters()))
        with pytest.raises(TypeError, match="wanted a torch"):
            optim_state_dict(model, [3])  # type: ignore[list-item]

    run_ranks(run, 2)


def test_state_of_gathered_weights_is_left_out() -> None:
    """A lookup makes an empty one; what was put there belongs to no parameter."""
    model = fc.fully_shard(nn.Sequential(nn.Linear(2, 2)))
    optim = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    seen: list[Tensor] = []

    def look(module: Any, *_: object) -> None:
        seen.append(module.weight)
        assert not optim.state[module.weight]

    model[0].register_forward_hook(look)
    model(torch.ones(1, 2)).sum().backward()
    optim.step()
    assert set(fc.optim_state_dict(model, optim)["state"]) == {"0.weight", "0.bias"}
    assert len(optim.state) == 2
    optim.state[seen[0]]["kept"] = torch.ones(())
    with pytest.raises(ValueError, match=r"entries for a tensor of shape \(2, 2\) that is in none"):
        fc.optim_state_dict(model, optim)
    del optim.state[seen[0]]
    optim.param_groups.clear()
    with pytest.raises(ValueError, match=r"parameter '0.weight', that is in none"):
        fc.optim_state_dict(model, optim)
