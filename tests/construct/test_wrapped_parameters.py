"""Parameters whose class computes in ``__torch_dispatch__``, around tensors that it keeps."""

from __future__ import annotations

import contextlib
import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard
from torch.utils.checkpoint import checkpoint

import fsdp_compose as fc
from fsdp_compose import ShardingStrategy, fully_shard, gathered, undo

from harness import rank_errors, run_ranks, simulate_ranks
from wrapped_models import (
    UNITS,
    Adapted,
    Build,
    Coded,
    Scaled,
    Silent,
    batch,
    check,
    coded,
    part,
    scaled,
    shard,
    tied,
    train,
)

OPTIONS: dict[str, dict[str, Any]] = {
    "full": {},
    "kept": {"strategy": ShardingStrategy.SHARD_GRAD_OP},
    "whole": {"strategy": ShardingStrategy.NO_SHARD},
    "offloaded": {"offload_policy": fc.Offload(params=True)},
    "rows": {"granularity": "row"},
}


@pytest.mark.parametrize("build", [scaled, coded])
@pytest.mark.parametrize("name", OPTIONS)
def test_it_trains_as_in_one_process(build: Build, name: str) -> None:
    def ranks(rank: int, world: int) -> None:
        train(shard(build(), **OPTIONS[name]), build(), rank, world)

    for world in (1, 2, 4):
        simulate_ranks(ranks, world, world)


@pytest.mark.parametrize("build", [scaled, coded, tied])
def test_other_strategies_train_it_too(build: Build) -> None:
    def ranks(rank: int) -> None:
        mesh = init_device_mesh("cpu", (2, 2))
        for options in (
            {"strategy": ShardingStrategy.HYBRID_SHARD, "mesh": mesh},
            {"strategy": ShardingStrategy.HYBRID_SHARD_OPTIMIZER, "mesh": mesh},
            {"reshard_after_forward": 2},
            {"static_buffers": True, "prefetch": fc.Prefetch(forward=2, backward=2)},
        ):
            model = fully_shard(build(), units=UNITS, **options)
            train(model, build(), rank, 4)

    simulate_ranks(ranks, 4)


@pytest.mark.parametrize("build", [scaled, coded])
def test_a_rank_keeps_its_slice_of_the_values(build: Build) -> None:
    def ranks(rank: int) -> None:
        plain, model = build(), build()
        weight = next(p for p in model.parameters() if type(p) is not nn.Parameter)
        shard(model)
        assert type(weight) is fc.ShardedParameter  # the same object
        if build is scaled:
            assert weight.shape == (7, 6) and 0 < weight.to_local().numel() < 42
            assert torch.equal(weight.full_tensor(), plain[0].weight._data)
        else:  # 36 codes and 6 scales and 3 zeros, each from a multiple of 16 bytes on
            assert weight.shape == (48 + 32 + 16,) and weight.dtype == torch.uint8
            assert weight.to_local().numel() <= 96 // 2 + 16
        assert not any("_data" in vars(p) or "codes" in vars(p) for p in model.parameters())
        train(model, plain, rank, 2)
        if build is coded:
            same = coded()[0].base.weight.plain()
            undo(model)
            assert torch.equal(model[0].base.weight.plain(), same)  # frozen, bit for bit

    run_ranks(ranks, 2)


@pytest.mark.parametrize("build", [scaled, coded])
def test_it_composes(build: Build) -> None:
    class Checkpointed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = build()

        def forward(self, x: Tensor) -> Any:
            return checkpoint(self.inner, x, use_reentrant=False)

    def ranks(rank: int) -> None:
        model, reference = Checkpointed(), Checkpointed()
        shard(model.inner)
        train(model, reference, rank, 2)
        model, reference = shard(build()), build()
        for number, first in ((5, True), (6, False)):
            context = fc.no_sync(model) if first else contextlib.nullcontext()
            with context:
                model(part(batch(number), rank, 2)).square().mean().backward()
            reference(batch(number)).square().mean().backward()
        for mine, whole in zip(model.parameters(), reference.parameters(), strict=True):
            if whole.grad is not None:
                torch.testing.assert_close(mine.grad.full_tensor(), whole.grad)
        x = batch(4).requires_grad_()
        for side in (model, reference):
            (grad,) = torch.autograd.grad(side(x).sum(), x, create_graph=True)
            grad.square().sum().backward()  # a penalty
        for mine, whole in zip(model.parameters(), reference.parameters(), strict=True):
            if whole.grad is not None:
                torch.testing.assert_close(mine.grad.full_tensor(), whole.grad)

    simulate_ranks(ranks, 2)


def test_scopes_and_calls_compute_with_the_class() -> None:
    def ranks(rank: int, build: Build) -> None:
        model, reference = shard(build()), build()
        with gathered(model, writeback=True):
            check(model, reference)
            for side in (model, reference):
                with torch.no_grad():
                    (side[0] if build is scaled else side[0].down).weight.mul_(2)
        check(model, reference)
        fc.unshard(model)
        check(model, reference)
        fc.reshard(model)
        with torch.inference_mode():
            torch.testing.assert_close(model.eval()(batch(1)), reference(batch(1)))
        named = dict(model.named_parameters())
        called = torch.func.functional_call(model, named, (batch(1),))
        torch.testing.assert_close(called, reference(batch(1)))
        name = "0.weight" if build is scaled else "0.base.weight"
        for plain in (named[name].detach(), named[name].full_tensor()):
            with pytest.raises(RuntimeError, match=r"plain tensor, where the parameter was a "):
                torch.func.functional_call(model, {name: plain}, (batch(1),))
        given = build().get_parameter(name).detach()  # of the class
        called = torch.func.functional_call(model, {name: given}, (batch(1),))
        wanted = torch.func.functional_call(reference, {name: given}, (batch(1),))
        torch.testing.assert_close(called, wanted)
        with gathered(model):
            bias = {k: v + 1 for k, v in model.named_parameters() if k == "0.bias"}
            wanted = {k: v + 1 for k, v in reference.named_parameters() if k == "0.bias"}
            called = torch.func.functional_call(model, bias, (batch(1),))
            wanted_output = torch.func.functional_call(reference, wanted, (batch(1),))
            torch.testing.assert_close(called, wanted_output)
        check(copy.deepcopy(model), reference)
        train(model.train(), reference, rank, 2)

    for build in (scaled, coded):
        simulate_ranks(ranks, 2, build)


@pytest.mark.parametrize("build", [scaled, coded])
def test_undo_gives_the_class_back(build: Build) -> None:
    def ranks(rank: int) -> None:
        model, reference = build(), build()
        before = list(model.parameters())
        kinds = [type(p) for p in before]
        before[0].note = "mine"
        shard(model)
        x = train(model, reference, rank, 2)
        undo(model)
        now = list(model.parameters())
        assert all(a is b for a, b in zip(before, now, strict=True))
        assert [type(p) for p in now] == kinds and now[0].note == "mine"
        assert [p.requires_grad for p in now] == [p.requires_grad for p in build().parameters()]
        torch.testing.assert_close(model(x), reference(x))
        train(shard(model), reference, rank, 2)  # and again

    simulate_ranks(ranks, 2)


def test_mixed_precision_casts_what_is_in_the_class() -> None:
    seen: list[torch.dtype] = []

    def ranks(rank: int) -> None:
        model = scaled()
        low = fc.MixedPrecision(param_dtype=torch.bfloat16)
        model[0].register_forward_hook(lambda m, *_: seen.append(m.weight._data.dtype))
        shard(model, mp_policy=low)
        model(batch(0)).sum().backward()
        assert model[0].weight.grad.dtype == torch.float32

    simulate_ranks(ranks, 2)
    assert seen == [torch.bfloat16] * 2


def test_a_forward_without_gradients_may_turn_them_on() -> None:
    seen: list[tuple[bool, bool]] = []

    class Inner(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            with torch.enable_grad():
                seen.append((super().forward(x).requires_grad, self.weight.requires_grad))
            return super().forward(x)

    def ranks(rank: int) -> None:
        model = Inner(6, 6)
        model.weight = nn.Parameter(Scaled(model.weight.detach(), 2.0))
        fully_shard(model)
        with torch.no_grad():
            assert not model(batch(0)).requires_grad

    simulate_ranks(ranks, 2)
    assert seen == [(True, True)] * 2


def test_attributes_of_the_user_are_read_too() -> None:
    seen: list[Any] = []

    def ranks(rank: int) -> None:
        model = scaled()
        model[0].weight.note = "mine"
        model[0].register_forward_hook(lambda m, *_: seen.append((m.weight.note, type(m.weight))))
        shard(model)
        model(batch(0)).sum().backward()

    simulate_ranks(ranks, 2)
    assert seen == [("mine", Scaled)] * 2


def test_the_first_values_are_made_or_sent() -> None:
    def ranks(rank: int) -> None:
        with torch.device("meta"):
            model = scaled()
        fully_shard(model, units=UNITS)
        weight = model[0].weight.full_tensor()
        assert 0.05 < float(weight.std()) < 1.0
        model(batch(0)).sum().backward()
        undo(model)
        assert type(model[0].weight) is Scaled and torch.equal(model[0].weight._data, weight)
        for build in (scaled, coded):
            model, reference = build(), build()
            with torch.no_grad():
                for p in model.parameters():
                    for held in [p] if type(p) is nn.Parameter else vars(p).values():
                        if rank == 1 and isinstance(held, Tensor) and type(held) is not Scaled:
                            held.zero_()
            shard(model, init="broadcast")
            check(model, reference)

    simulate_ranks(ranks, 2)


def test_ranks_that_differ_are_told() -> None:
    def classes(rank: int) -> None:
        model = scaled()
        if rank:
            model[0].weight = nn.Parameter(model[0].weight._data)
        fully_shard(model)

    def values(rank: int) -> None:
        model = coded()
        if rank:
            model[0].base.weight.zero._data[0] += 1  # which no product shows
        fully_shard(model)

    for error in rank_errors(classes, 2):
        assert error is not None and "(7, 6) torch.float32 trained Scaled" in error
    for error in rank_errors(values, 2):
        assert error is not None and "parameter '0.base.weight'" in error and "differs" in error


@pytest.mark.parametrize("build", [scaled, coded])
def test_states_of_one_process_and_checkpoints_load(build: Build, tmp_path: Path) -> None:
    def ranks(rank: int, folder: Path) -> None:
        trained = build()
        with torch.no_grad():
            for p in trained.parameters():
                if type(p) is Coded:
                    p.scales.mul_(1.5)
                elif p.is_floating_point():
                    p.mul_(1.5)
        for call in (
            lambda m: m.load_state_dict(trained.state_dict()),
            lambda m: fc.load_state_dict(m, trained.state_dict()),
            lambda m: fc.load_state_dict(
                m, trained.state_dict() if rank == 0 else {}, broadcast_from_rank0=True
            ),
        ):
            model = shard(build())
            call(model)
            check(model, trained)
        fc.save_checkpoint(folder / "saved", model)
        model = shard(build())
        fc.load_checkpoint(folder / "saved", model)
        check(model, trained)
        if build is scaled:
            plain = build()
            plain.load_state_dict(fc.state_dict(model, kind="full"))
            check(plain, trained)

    run_ranks(ranks, 2, tmp_path)


def test_a_state_of_another_make_is_refused() -> None:
    def ranks(rank: int) -> None:
        model = shard(coded())
        torch.manual_seed(0)
        with pytest.raises(RuntimeError, match=r"'0.base.weight' has global shape \(6, 6\)"):
            model.load_state_dict(nn.Sequential(Adapted(2), Adapted(2)).state_dict())

    simulate_ranks(ranks, 2)


def test_what_cannot_be_sharded_says_why() -> None:
    def trained(rank: int) -> None:
        model = nn.Linear(6, 6)
        model.weight = nn.Parameter(Coded.of(model.weight))
        fully_shard(model)

    def unsaid(rank: int) -> None:
        model = nn.Linear(6, 6)
        model.weight = nn.Parameter(Silent(model.weight.detach(), 2.0))
        fully_shard(model)

    def on_meta(rank: int) -> None:
        with torch.device("meta"):
            model = coded()
        fully_shard(model)

    def split(rank: int) -> None:
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        model = nn.Linear(6, 8, bias=False)
        inner = Scaled(torch.ones(4, 6), 2.0)
        whole = DTensor.from_local(inner, mesh["tp"], [Shard(0)], run_check=False)
        model.weight = nn.Parameter(whole)
        fully_shard(model, mesh=mesh["dp"])

    for fn, world, text in (
        (trained, 2, "parameter 'weight' of unit 'Linear' is an instance of Coded, whose class"),
        (unsaid, 2, "parameter 'weight' of unit 'Linear' is an instance of Silent, whose class"),
        (on_meta, 2, "is an instance of Coded, whose class computes in __torch_dispatch__"),
        (split, 4, "parameter 'weight' of unit 'Linear' is a DTensor of Scaled, whose class"),
    ):
        for error in rank_errors(fn, world):
            assert error is not None and text in error


def test_a_kept_instance_is_not_read_when_released() -> None:
    class Keeps(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            self.__dict__["kept"] = self.weight
            return super().forward(x)

    def ranks(rank: int) -> None:
        model = Keeps(6, 6)
        model.weight = nn.Parameter(Scaled(model.weight.detach(), 2.0))
        shard(nn.Sequential(model))
        model(batch(0)).sum().backward()
        with pytest.raises(RuntimeError, match=r"whose gathered weights were released since"):
            model.kept._data.sum()

    run_ranks(ranks, 2)


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")  # torch's, of compile
def test_units_compile_and_graphs_refuse_it() -> None:
    def ranks(rank: int) -> None:
        model, reference = shard(scaled()), scaled()
        with pytest.raises(ValueError, match=r"has parameters of a class around tensors; compile"):
            fc.set_traceable(model)
        for layer in (model[0], model[2]):
            layer.compile(backend="aot_eager")
        train(model, reference, rank, 2)

    run_ranks(ranks, 2)
