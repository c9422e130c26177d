"""Forwards in stored precision, on given tensors and under transforms, and what they leave."""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.func import functional_call
from torch.testing import assert_close

import fsdp_compose as fc
from fsdp_compose import MixedPrecision, Prefetch, fully_shard
from fsdp_compose.base.torch_private import saved_tensor_hooks
from fsdp_compose.core.guards import forward_writes, replicas, surroundings, weight_versions
from fsdp_compose.core.schedule import Hold

from harness import fake_world, simulate_ranks
from models import (
    WIDTH,
    Block,
    Ledger,
    ThreeBuckets,
    Tower,
    Twin,
    assert_at_rest,
    by_block,
    data,
    one_unit,
    seeded,
    square,
    two_blocks,
    units,
)


class Inner(nn.Module):
    """Calls itself under a transform, on inputs of double precision; notes the dtypes."""

    def __init__(self) -> None:
        super().__init__()
        self.scale, self.seen = nn.Parameter(torch.ones(WIDTH)), list[torch.dtype]()

    def forward(self, x: Tensor, again: bool = True) -> Tensor:
        self.seen.append(x.dtype)
        y = x * self.scale
        if again:
            inner = torch.vmap(lambda row: self(row, again=False))(x.double())
            self.seen.append(inner.dtype)
            y = y + inner
        return y


def test_a_call_under_a_transform_in_a_forward() -> None:
    """Its inputs are not the outermost ones, which alone are cast; its outputs are cast as all."""

    def ranks(rank: int) -> None:
        single, half, double = torch.float32, torch.float16, torch.float64
        policy = MixedPrecision(single, output_dtype=half, cast_forward_inputs="root")
        model = one_unit(seeded(Inner), mp_policy=policy)
        assert model(data(0, rank)).dtype is half
        assert model.seen == [single, double, half]
        square(model, data(0, rank)).backward()
        assert_at_rest(model)

    simulate_ranks(ranks)


class Named(nn.LayerNorm):
    """A norm with a second way to call it."""

    def apply_to(self, x: Tensor) -> Tensor:
        return nn.functional.layer_norm(x, (WIDTH,), self.weight, self.bias)


def test_a_method_of_a_norm_in_full_precision() -> None:
    """In evaluation it returns what it computed, in stored precision, as its forward does."""

    def ranks(rank: int) -> None:
        plain = seeded(lambda: nn.Sequential(Named(WIDTH), nn.Linear(WIDTH, WIDTH)))
        policy = MixedPrecision(
            torch.bfloat16, full_precision_classes=(Named,), full_precision_in_eval=True
        )
        model = one_unit(copy.deepcopy(plain), mp_policy=policy).eval()
        fc.register_forward_method(model[0], "apply_to")
        with torch.no_grad():
            assert_close(model[0].apply_to(data(0, rank)), plain[0](data(0, rank)))

    simulate_ranks(ranks)


def test_evaluations_on_given_tensors_gather_ahead() -> None:
    """The order of the units inside is known from the first such call that did not fail."""

    def ranks(rank: int) -> None:
        plain = seeded(two_blocks)
        model = by_block(copy.deepcopy(plain), prefetch=Prefetch(forward=1))
        names = [name for name, _ in plain.named_parameters() if not name.startswith("blocks")]
        given = {name: plain.get_parameter(name).detach() * 2 for name in names}
        first, second = units(model.blocks)
        ahead: list[bool] = []

        def note(*_: Any) -> None:
            ahead.append(Hold.PREFETCH in second.holds)

        model.blocks[0].up.register_forward_hook(note)
        with torch.no_grad():
            for _ in range(3):
                functional_call(model, given, (data(0, rank),))
        assert ahead == [False, True, True] and first.name == "blocks.0"
        assert_at_rest(model)

    simulate_ranks(ranks)


def test_an_evaluation_between_two_forwards() -> None:
    """In stored precision it is no part of the step, whose second forward is gathered ahead."""

    def ranks(rank: int) -> None:
        policy = MixedPrecision(torch.float32, full_precision_in_eval=True)
        models = [by_block(seeded(two_blocks), prefetch=Prefetch(forward=1)) for _ in range(2)]
        teacher = one_unit(seeded(two_blocks), mp_policy=policy).eval()
        (second, *_), ahead = units(models[1]), list[bool]()
        for step in range(3):
            loss = square(models[0], data(step, rank))
            with torch.no_grad():
                teacher(data(step, rank))
            ahead.append(Hold.PREFETCH in second.holds)
            (loss + square(models[1], data(step, rank))).backward()
        assert ahead == [False, True, True]
        for model in (*models, teacher):
            assert_at_rest(model)

    simulate_ranks(ranks)


class Evaluated(nn.Module):
    """Evaluates itself inside its backward, if it trains."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.found: list[Tensor] = []

    def forward(self, x: Tensor) -> Tensor:
        y = self.first(x)
        if self.training:
            y.register_hook(lambda grad: self.evaluate(x.double()))
        return self.last(y)

    @torch.no_grad()
    def evaluate(self, x: Tensor) -> None:
        self.eval()
        self.found.append(self(x))
        self.train()


def test_an_evaluation_inside_the_backward() -> None:
    """It reads the stored weights, not the low ones that the backward of the same unit shows."""

    def ranks(rank: int) -> None:
        plain, x = seeded(Evaluated), data(0, rank).bfloat16()
        policy = MixedPrecision(torch.bfloat16, full_precision_in_eval=True)
        model = one_unit(copy.deepcopy(plain), mp_policy=policy)
        square(model, x).backward()
        (found,) = model.found
        with torch.no_grad():
            assert torch.equal(found, plain.eval()(x.double()))
        assert_at_rest(model)

    simulate_ranks(ranks)


class Twice(nn.Module):
    """Calls itself once more, and is interrupted there if it is told to be."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.interrupted = nn.Linear(WIDTH, WIDTH), False

    def forward(self, x: Tensor, again: bool = True) -> Tensor:
        y = torch.tanh(self.layer(x))
        if again:
            return self(y, again=False)
        if self.interrupted:
            raise KeyboardInterrupt
        return y


def test_an_interrupt_of_a_unit_that_calls_itself() -> None:
    """The hooks of the caller stay in force for the next forward, and are removed once."""

    def ranks(rank: int) -> None:
        model, packed = one_unit(seeded(Twice)), list[Tensor]()

        def pack(tensor: Tensor) -> Tensor:
            packed.append(tensor)
            return tensor

        def innermost() -> Any:
            found = saved_tensor_hooks()
            return found and found[0]

        with saved_tensors_hooks(pack, lambda tensor: tensor):
            model.interrupted = True
            with pytest.raises(KeyboardInterrupt):
                model(data(0, rank))
            model.interrupted = False
            packed.clear()
            loss = square(model, data(0, rank))
            assert innermost() is pack and len(packed) >= 2
        assert innermost() is None
        loss.backward()
        assert_at_rest(model)

    simulate_ranks(ranks)


def test_checksums_take_memory_for_one_piece() -> None:
    """However large the parameter is."""
    peaks: list[int] = []
    for words in (1 << 20, 1 << 21):
        tensor = torch.zeros(words, dtype=torch.float64)
        with Ledger(tensor) as ledger:
            replicas.sum_bytes(tensor)
        peaks.append(ledger.peak)
    assert peaks[0] == peaks[1]


def test_units_that_stay_gathered_share_no_buffer() -> None:
    """With ``static_buffers=``, where nothing is released after backward either."""

    def ranks(rank: int) -> None:
        def shard(model: nn.Module) -> None:
            by_block(model, static_buffers=True)
            fc.set_reshard_after_backward(model, False)

        twin = Twin(rank, 2, lambda: Tower(4), shard)
        for step in range(3):
            twin.backward(square, step)
            twin.step()
        blocks = [unit for block in twin.model.blocks for unit in units(block)]
        assert len({unit.buckets[0].full.data_ptr() for unit in blocks}) == 4
        fc.reshard(twin.model)

    simulate_ranks(ranks)


def test_a_part_converted_while_a_graph_lives() -> None:
    """The other parts of its unit stay where the graph reads them until the graph is gone."""
    with fake_world(2):
        double = MixedPrecision(torch.float64, torch.float64)
        model = by_block(seeded(ThreeBuckets), mp_policy=double, static_buffers=True)
        loss = square(model, data(0, 0))
        (unit,) = units(model.blocks[0])
        before = [bucket.full for bucket in unit.buckets]
        for block in model.blocks:
            block.norm.to(torch.bfloat16)
        with torch.no_grad():
            model(data(0, 0))
        moved = [b.full is not full for b, full in zip(unit.buckets, before, strict=True)]
        assert sum(moved) == 1
        with pytest.raises(RuntimeError, match="backward"):
            loss.backward()
        del loss
        square(model, data(0, 0)).backward()
        assert all(bucket.static is not None for bucket in unit.buckets)


def test_a_codec_rounds_what_was_handed_out() -> None:
    """That is no write, though slices were handed out while the unit is kept gathered."""

    def ranks(rank: int) -> None:
        policy = MixedPrecision(gather_codec=fc.bf16_codec())
        model = by_block(seeded(two_blocks).float(), mp_policy=policy)
        fc.set_reshard_after_backward(model, False)
        for step in range(3):
            square(model, data(step, rank).float()).backward()
            slices = [p.to_local() for p in model.parameters()]
            assert sum(piece.numel() for piece in slices)
        fc.reshard(model)

    simulate_ranks(ranks)


def test_later_backwards_look_at_no_model_around(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first backward looks through it, once for all of its units."""
    looks: dict[str, list[nn.Module]] = {"iter_units": [], "check_surroundings": []}
    for name, modules in looks.items():
        real = getattr(surroundings, name)

        def counted(module: nn.Module, *args: Any, real: Any = real, seen: Any = modules) -> Any:
            seen.append(module)
            return real(module, *args)

        monkeypatch.setattr(surroundings, name, counted)

    def ranks(rank: int) -> None:
        model = nn.Sequential(*(fully_shard(seeded(Block)) for _ in range(3)))
        square(model, data(0, rank)).backward()
        assert looks["check_surroundings"].count(model) == 1
        asked = looks["iter_units"].count(model)
        for step in range(2):
            square(model, data(step, rank)).backward()
        assert looks["iter_units"].count(model) == asked

    simulate_ranks(ranks)


def test_handed_out_slices_are_compared_on_demand(monkeypatch: pytest.MonkeyPatch) -> None:
    """On an accelerator only in debug mode, as that waits for the device; on a CPU always."""
    compared: list[Any] = []
    monkeypatch.setattr(weight_versions, "find_difference", compared.append)
    monkeypatch.setattr(forward_writes, "find_difference", lambda bucket: None)

    def ranks(rank: int) -> None:
        model = one_unit(seeded(lambda: nn.Linear(WIDTH, 4)))
        (bucket,) = units(model)[0].buckets
        model.weight.to_local()
        fc.set_reshard_after_backward(model, False)
        square(model, data(0, rank)).backward()
        own = bucket.views.own
        for device, debug in (("cpu", False), ("meta", False), ("meta", True), ("cpu", True)):
            fc.set_debug(debug)
            bucket.views = replace(bucket.views, own=own.to(device))
            model(data(0, rank))
            assert (bucket in compared) == (debug or device == "cpu"), (device, debug)
            compared[:] = [other for other in compared if other is not bucket]
        bucket.views = replace(bucket.views, own=own)
        fc.reshard(model)

    try:
        simulate_ranks(ranks)
    finally:
        fc.set_debug(False)
