"""Are the streams of what is not a plain step ordered? Each feature alone, on a played device."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import played_device
import pytest
import torch
from played_device import wait_for, watched
from torch import Tensor, nn

import fsdp_compose as fc
from fsdp_compose import MixedPrecision, Offload, ShardingStrategy
from fsdp_compose.base import streams
from fsdp_compose.comm import collectives as comm
from fsdp_compose.comm import transports
from fsdp_compose.comm.transports import AT_ONCE
from fsdp_compose.core import reducing

from autograd_steps import penalty
from harness import fake_world, run_ranks
from models import ThreeBuckets, Tower, assert_at_rest, by_block, data, seeded, sgd, square, units

Step = Callable[[nn.Module, Tensor], None]


class Woven(ThreeBuckets):
    """Calls its blocks in a row, and again behind others."""

    def forward(self, x: Tensor) -> Tensor:
        x, (a, b, c) = self.first(x), self.blocks
        for block in (a, a, b, a, c, b, b, a):
            x = block(x)
        return self.head(x)


def backward(model: nn.Module, x: Tensor) -> None:
    square(model, x).backward()


def ask_for_inputs(model: nn.Module, x: Tensor) -> None:
    """Which closes each unit where backward is past it, and then trains."""
    x.requires_grad_()
    torch.autograd.grad(square(model, x), x)
    square(model, x).backward(inputs=[x])
    backward(model, x)


def ask_for_parameters(model: nn.Module, x: Tensor) -> None:
    grads = torch.autograd.grad(square(model, x), list(model.parameters())[:3])
    backward(model, x)
    for param, grad in zip(model.parameters(), grads, strict=False):
        assert param.grad is not None
        param.grad += grad


def take_penalty(model: nn.Module, x: Tensor) -> None:
    penalty(model, x).backward()


def skip_one(model: nn.Module, x: Tensor) -> None:
    backward(model, x)
    with fc.skippable_step(model, finite_gradients=True) as step:
        backward(model, 2 * x)
        step.discard("it is a test")
    assert step.skipped
    backward(model, 3 * x)


def gather_by_hand(model: nn.Module, x: Tensor) -> None:
    first, last = model.blocks[0], model.blocks[2]
    fc.prefetch_units(model, [model.blocks[1], last])
    handle = fc.unshard(first, async_op=True)
    square(model, x).backward()
    handle.wait()
    (first.up.weight * 2).sum().backward()
    fc.reshard(first)
    fc.unshard(last)
    backward(model, x)
    fc.reshard(last)


def read_in_scopes(model: nn.Module, x: Tensor) -> None:
    backward(model, x)
    with fc.gathered(model, with_grads=True, writeback=True), torch.no_grad():
        for param in model.parameters():
            param.mul_(0.9)
            if param.grad is not None:
                param.grad.mul_(0.5)
    for _, value in fc.iter_full(model):
        value.sum()


def chunk_its_head(model: nn.Module, x: Tensor) -> None:
    with fc.accumulate(model):
        for part in x.split(1):
            backward(model, part)


def let_chunks_wait(model: nn.Module, x: Tensor) -> None:
    """Outside ``.grad``: on the host, where that is asked for."""
    for number, part in enumerate(x.split(1)):
        fc.set_is_last_backward(model, number == 2)
        backward(model, part)


def compress(model: nn.Module, x: Tensor, hook: Any) -> None:
    if not fc.get_state(model).unit.switches.comm_hook:
        state = fc.Int8ErrorFeedback() if hook is fc.int8_error_feedback_hook else None
        fc.register_comm_hook(model, state, hook)
    backward(model, x)


def own(params: Any) -> torch.optim.Optimizer:
    return fc.owner_step(params, partial(torch.optim.SGD, lr=0.1, momentum=0.9))


def encoded(codec: fc.GatherCodec) -> MixedPrecision:
    return MixedPrecision(torch.float64, torch.float64, gather_codec=codec)


def offload(*what: str) -> Offload:
    return Offload(**dict.fromkeys(what, True), pin_memory=False)


DOUBLE = MixedPrecision(torch.float64, torch.float64)
DIRECT = {"transport": AT_ONCE, "mp_policy": DOUBLE}
Cell = tuple[Callable[[], nn.Module], dict[str, Any], Step, Any]
CELLS: dict[str, Cell] = {
    "several calls": (Woven, {}, backward, sgd),
    "several calls, together": (Woven, DIRECT, backward, sgd),
    "several calls, static": (Woven, {"static_buffers": 4}, backward, sgd),
    "several calls, together, static": (Woven, DIRECT | {"static_buffers": 4}, backward, sgd),
    "several calls, kept": (Woven, {"strategy": ShardingStrategy.SHARD_GRAD_OP}, backward, sgd),
    "several calls, spread": (Woven, DIRECT | {"reshard_after_forward": 2}, backward, sgd),
    "several calls in a tree": (Woven, {"deterministic": 4}, backward, sgd),
    "inputs": (Tower, {}, ask_for_inputs, sgd),
    "inputs, several calls": (Woven, DIRECT, ask_for_inputs, sgd),
    "inputs, static": (Tower, DIRECT | {"static_buffers": True}, ask_for_inputs, sgd),
    "parameters asked for": (Tower, DIRECT, ask_for_parameters, sgd),
    "penalty": (Tower, DIRECT, take_penalty, sgd),
    "skipped": (Woven, {}, skip_one, sgd),
    "skipped, in a tree": (Tower, {"deterministic": 4}, skip_one, sgd),
    "by hand": (Tower, DIRECT, gather_by_hand, sgd),
    "by hand, spread": (Tower, DIRECT | {"reshard_after_forward": 2}, gather_by_hand, sgd),
    "scopes": (ThreeBuckets, DIRECT, read_in_scopes, sgd),
    "chunks": (Woven, DIRECT, chunk_its_head, sgd),
    "codec": (Woven, {"mp_policy": encoded(fc.bf16_codec())}, backward, sgd),
    "codec, together": (
        Woven,
        DIRECT | {"mp_policy": encoded(fc.bf16_codec())},
        backward,
        sgd,
    ),
    "codec, static": (
        Tower,
        {"mp_policy": encoded(fc.int8_codec()), "static_buffers": True},
        backward,
        sgd,
    ),
    "int8": (Woven, {}, partial(compress, hook=fc.int8_error_feedback_hook), sgd),
    "bf16": (Woven, DIRECT, partial(compress, hook=fc.bf16_compress_hook), sgd),
    "owners": (Tower, {}, backward, own),
    "owners, offloaded": (
        Tower, {"offload_policy": offload("params")}, backward, own,
    ),
    **{
        f"{' and '.join(what)} offloaded, {way}": (
            Woven, {"offload_policy": offload(*what)}, step, sgd,
        )
        for what in (["params"], ["optimizer"], ["grads"], ["optimizer", "grads"])
        for way, step in (("in parts", let_chunks_wait), ("asked for", ask_for_parameters))
    },
    "params offloaded, in a tree": (
        Tower, {"deterministic": 4, "offload_policy": offload("params")}, backward, sgd,
    ),
    "grads offloaded, skipped": (Woven, {"offload_policy": offload("grads")}, skip_one, sgd),
}  # fmt: skip
ON_TWO_RANKS = ("owners", "owners, offloaded", "int8")
"""What is exchanged between ranks has to be there."""


def find_races(rank: int, cell: str) -> list[str]:
    build, options, step, optimizer = CELLS[cell]
    with pytest.MonkeyPatch.context() as patch, watched(patch) as races:
        patch.setattr(played_device.Event, "synchronize", wait_for)
        patch.setattr(transports, "segments_of", lambda group: None)
        patch.setattr(
            reducing, "copy_to_host", lambda grad, pin_memory: races.put_on_host(grad.clone())
        )
        if "transport" in options:
            patch.setattr(comm, "is_point_to_point", lambda group: False)
        model = by_block(seeded(build), **{"mp_policy": DOUBLE, **options})
        wait_for(races.device.main.record_event())  # the host has cut what lies there
        for bucket in [bucket for unit in units(model) for bucket in unit.buckets]:
            if bucket.offload.shards:
                races.put_on_host(bucket.stored)
        optim = optimizer([p for p in model.parameters() if p.requires_grad])
        for number in range(2):
            for _ in range(2 if "deterministic" in options and step is backward else 1):
                step(model, data(number, rank))
            fc.clip_grad_norm_(model, 1.0)
            optim.step()
            optim.zero_grad()
            with torch.no_grad():
                model(data(number, rank))
        for unit in units(model):
            fc.reshard(unit.modules[0]())
    assert_at_rest(model)
    assert ("gather into", False) in races.seen
    return races.found


def run(cell: str) -> list[str]:
    """What one rank of several finds; their collectives return at once, and move nothing."""
    if cell in ON_TWO_RANKS:
        first, second = run_ranks(find_races, 2, cell)
        return [*first, *second]
    with fake_world(4 if "spread" in cell else 2):
        return find_races(0, cell)


@pytest.mark.parametrize("cell", CELLS)
def test_what_is_not_a_plain_step_is_ordered(cell: str) -> None:
    assert run(cell) == []


def on_all_but_reduce(self: streams.Streams, stream: Any) -> Any:
    return self.beside(stream) if stream is self.reduce else _on(self, stream)


def wait_elsewhere(self: streams.Streams, mark: Any) -> None:
    if mark is not None:
        self.gather.wait_event(mark.event)


_on = streams.Streams.on
BREAKS: dict[str, tuple[Any, str, Any, tuple[str, ...]]] = {
    "gradients are read while they are packed": (
        streams.Streams, "on", on_all_but_reduce,
        ("several calls", "several calls, together, static", "bf16", "inputs", "skipped"),
    ),
    "another stream waits": (
        streams.Streams, "wait", wait_elsewhere,
        ("several calls, spread", "by hand", "codec, together", "scopes", "penalty"),
    ),
    "weights are freed while they are read": (
        streams.Streams, "on", lambda self, stream: self.beside(stream),
        ("several calls, static", "inputs, static", "chunks", "several calls in a tree"),
    ),
    "the host waits for nothing": (
        streams.Mark, "synchronize", lambda mark: None,
        (
            "params offloaded, in parts", "optimizer offloaded, in parts",
            "grads offloaded, in parts", "params offloaded, in a tree",
        ),
    ),
}  # fmt: skip


@pytest.mark.parametrize(("what", "cell"), [(w, cell) for w in BREAKS for cell in BREAKS[w][3]])
def test_a_missing_order_is_found(what: str, cell: str, monkeypatch: pytest.MonkeyPatch) -> None:
    owner, name, broken, _ = BREAKS[what]
    monkeypatch.setattr(owner, name, broken)
    found = run(cell)
    assert found and all("races" in text or "freed memory" in text for text in found)
