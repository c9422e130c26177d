"""What only a device can show, on one GPU and a world of one: run with ``-m cuda``.

Compute is in bfloat16 and storage in float32, so that gathers, casts, streams and the copies of
offloaded shards are those of many ranks, without the collectives.
"""

from __future__ import annotations

import copy
import warnings
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from fsdp_compose import (
    GradScaler,
    MixedPrecision,
    Offload,
    Prefetch,
    ShardingStrategy,
    accumulate,
    gathered,
)
from fsdp_compose.base.group import Call, Group, Started, Transport
from fsdp_compose.comm.transports import AT_ONCE
from fsdp_compose.sharded.draws import find_generator, in_state

from harness import fake_world, run_ranks
from models import Tower, by_block, data, seeded, square

pytestmark = pytest.mark.cuda

BACKEND = "cpu:gloo,cuda:nccl"  # tells offloaded parameters where they compute
LOW = MixedPrecision(torch.bfloat16, torch.float32)
CELLS: dict[str, dict[str, Any]] = {
    "default": {},
    "kept": {"strategy": ShardingStrategy.SHARD_GRAD_OP},
    "no prefetch": {"prefetch": Prefetch(0, 0, None)},
    "params offloaded": {"offload_policy": Offload(params=True)},
    "optimizer offloaded": {"offload_policy": Offload(optimizer=True)},
    "optimizer and grads offloaded": {"offload_policy": Offload(optimizer=True, grads=True)},
    "grads offloaded": {"offload_policy": Offload(grads=True)},
}


def build(device: str, **options: Any) -> torch.nn.Module:
    model = seeded(Tower).float()
    if not options.get("offload_policy", Offload()).shards:
        model.to(device)
    return by_block(model, mp_policy=LOW, **options)


def train(device: str, steps: int, **options: Any) -> dict[str, torch.Tensor]:
    model = build(device, **options)
    optim = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(steps):
        with accumulate(model):
            for micro in range(2):
                square(model, data(10 * step + micro, 0).float().to(device)).backward()
        optim.step()
        optim.zero_grad()
    return {name: p.full_tensor().cpu() for name, p in model.named_parameters()}


@pytest.mark.parametrize("cell", CELLS)
def test_training_is_that_of_the_cpu(cell: str) -> None:
    def ranks(rank: int) -> None:
        found, wanted = train("cuda", 3, **CELLS[cell]), train("cpu", 3)
        for name, value in found.items():
            torch.testing.assert_close(value, wanted[name], rtol=2e-2, atol=2e-2)

    run_ranks(ranks, 1, backend=BACKEND)


@pytest.mark.parametrize("cell", ["default", "kept", "no prefetch"])
def test_a_step_never_waits_and_memory_stays(cell: str) -> None:
    """A step never waits and uses the same memory each time."""

    def ranks(rank: int) -> None:
        warnings.filterwarnings("ignore", message="Synchronization debug mode")
        model = build("cuda", **CELLS[cell])
        optim = torch.optim.SGD(model.parameters(), lr=0.1, foreach=True)
        x = data(0, 0).float().to("cuda")
        peaks = []
        for step in range(6):
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
            torch.cuda.set_sync_debug_mode("error" if step > 1 else "default")
            square(model, x).backward()
            optim.step()
            optim.zero_grad()
            torch.cuda.set_sync_debug_mode("default")
            peaks.append(torch.cuda.max_memory_allocated())
        assert len(set(peaks[2:])) == 1, peaks

    run_ranks(ranks, 1, backend=BACKEND)


@pytest.mark.parametrize("is_fused", [False, True])
@pytest.mark.parametrize("offload", [Offload(params=True), Offload(optimizer=True)])
def test_an_overflow_on_the_host_is_never_missed(offload: Offload, is_fused: bool) -> None:
    """The scale is on the GPU, and the gradients that it is divided out of are not."""

    def check(rank: int) -> None:
        model = by_block(seeded(Tower).float(), offload_policy=offload)
        optim = torch.optim.AdamW(model.parameters(), lr=0.01, fused=is_fused)
        scaler = GradScaler("cuda", init_scale=4.0, growth_interval=1000)
        for step in range(20):
            before = scaler.get_scale()
            factor = float("inf") if step % 2 else 1.0
            scaler.scale(square(model, data(step, rank).float()) * factor).backward()
            scaler.step(optim)
            scaler.update()
            optim.zero_grad()
            assert scaler.get_scale() == before * (0.5 if step % 2 else 1.0)
        assert all(p.full_tensor().isfinite().all() for p in model.parameters())

    run_ranks(check, 1, backend=BACKEND)


@pytest.mark.parametrize("offload", [Offload(params=True), Offload(optimizer=True, grads=True)])
def test_gradients_set_in_scopes_reach_the_host(offload: Offload) -> None:
    """In a scope parameters lie on the GPU, and so do the gradients that they are given there."""

    def check(rank: int) -> None:
        model = by_block(seeded(Tower).float(), offload_policy=offload)
        square(model, data(0, rank).float()).backward()
        wanted = [p.grad.full_tensor().cpu() / 2 for p in model.parameters() if p.grad is not None]
        with gathered(model, with_grads=True, writeback=True):
            for p in model.parameters():
                assert p.grad is not None and p.grad.device == p.device
                p.grad.mul_(0.5)
        found = [p.grad.full_tensor().cpu() for p in model.parameters() if p.grad is not None]
        assert len(found) == len(wanted) and all(map(torch.equal, found, wanted))
        with gathered(model):
            for p in model.parameters():
                p.grad = torch.ones_like(p)
        assert all(p.grad is not None and bool((p.grad == 1).all()) for p in model.parameters())
        assert all(p.grad is not None and p.grad.device == p.device for p in model.parameters())

    run_ranks(check, 1, backend=BACKEND)


@pytest.mark.parametrize("offload", [Offload(params=True), Offload(optimizer=True, grads=True)])
def test_gradients_with_graphs_reach_the_host(offload: Offload) -> None:
    """They are computed on the GPU, and the parameters whose they are lie on the host."""

    def losses(model: torch.nn.Module) -> list[torch.Tensor]:
        params, x = dict(model.named_parameters()), data(0, 0).float()
        grads = torch.autograd.grad(square(model, x), list(params.values()), create_graph=True)
        assert all(grad.device == p.device for grad, p in zip(grads, params.values(), strict=True))
        fast = {name: p - 0.1 * grad for (name, p), grad in zip(params.items(), grads, strict=True)}
        loss = torch.func.functional_call(model, fast, (x,)).square().mean()
        loss = loss + sum(grad.square().sum() for grad in grads).to(x.device)
        loss.backward()
        square(model, x).backward(create_graph=True)  # which adds to it
        return [p.grad.to(p.device) for p in params.values() if p.grad is not None]

    def check(rank: int) -> None:
        plain = seeded(Tower).float()
        wanted = losses(plain)
        model = by_block(seeded(Tower).float(), offload_policy=offload)
        found = [grad.full_tensor() for grad in losses(model)]
        for grad, theirs in zip(found, wanted, strict=True):
            torch.testing.assert_close(grad.detach().cpu(), theirs.detach().cpu())

    warnings.filterwarnings("ignore", message="Using backward.* with create_graph=True")
    run_ranks(check, 1, backend=BACKEND)


def test_a_copy_of_offloaded_weights_is_pinned() -> None:
    def check(rank: int) -> None:
        model = by_block(seeded(Tower).float(), offload_policy=Offload(params=True))
        twin = copy.deepcopy(model)
        assert all(p.to_local().is_pinned() for p in twin.parameters() if p.to_local().numel())

    run_ranks(check, 1, backend=BACKEND)


def test_one_call_of_nccl_gathers_several_buffers() -> None:
    """In the order of the caller's stream, and the host waits for nothing."""

    def ranks(rank: int) -> None:
        assert AT_ONCE.gather_all is not None
        warnings.filterwarnings("ignore", message="Synchronization debug mode")
        group = Group(dist.group.WORLD, 0, 1, "nccl", (0,))
        side, here = torch.cuda.Stream(), torch.cuda.current_stream()
        for step in range(3):  # the first one starts the communicator, which the host waits for
            owns = [
                torch.full((n,), step + 1, dtype=torch.uint8, device="cuda") for n in (16, 4096)
            ]
            wholes = [torch.zeros_like(own) for own in owns]
            side.wait_stream(here)
            torch.cuda.set_sync_debug_mode("error" if step else "default")
            with torch.cuda.stream(side):
                parts = [[whole] for whole in wholes]
                started = AT_ONCE.gather_all(wholes, parts, owns, Call(group, 0, "gather"))
            torch.cuda.set_sync_debug_mode("default")
            here.wait_stream(side)
            assert started == Started() and all(map(torch.equal, wholes, owns))

    run_ranks(ranks, 1, backend=BACKEND)


def check_together(device: str) -> None:
    """A world of two whose other rank does not answer: units of two buckets, in one call or two."""

    def losses(transport: Transport) -> list[torch.Tensor]:
        with fake_world(2):
            model = seeded(Tower).float().to(device)
            for block in model.blocks:
                block.norm.requires_grad_(False)
            by_block(model, mp_policy=LOW, transport=transport)
            optim = torch.optim.SGD(model.parameters(), lr=0.1)
            found = []
            for step in range(4):
                found.append(square(model, data(step, 0).float().to(device)))
                found[-1].backward()
                optim.step()
                optim.zero_grad()
            return [loss.detach().cpu() for loss in found]

    assert all(map(torch.equal, losses(AT_ONCE), losses(replace(AT_ONCE, gather_all=None))))


def test_buckets_of_a_unit_travel_together() -> None:
    run_ranks(lambda rank: check_together("cuda"), 1, init=False)


def test_random_numbers_are_those_of_a_plain_module() -> None:
    """As CUDA draws them, also with the generator in a state that another rank would send."""

    def rank(_: int) -> None:
        plain, model = seeded(Tower).float().to("cuda"), build("cuda")
        for each in (plain, model):
            torch.manual_seed(3)
            with torch.no_grad():
                for p in each.parameters():
                    p.normal_().add_(torch.rand_like(p))
        for wanted, p in zip(plain.parameters(), model.parameters(), strict=True):
            assert torch.equal(p.full_tensor(), wanted)
        generator = find_generator(torch.device("cuda", torch.cuda.current_device()))
        state = generator.get_state()
        with in_state(generator, torch.cuda.get_rng_state()):
            first = torch.rand(3, device="cuda")
        assert torch.equal(generator.get_state(), state)
        assert torch.equal(torch.rand(3, device="cuda"), first)

    run_ranks(rank, 1, init=False)
