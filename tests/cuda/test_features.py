"""What ranks do besides plain steps, over NCCL on a GPU: run with ``-m cuda``."""

from __future__ import annotations

import warnings
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import fsdp_compose as fc
from fsdp_compose import MixedPrecision, Offload
from fsdp_compose.sharded import is_sharded

from autograd_steps import Recomputed, penalty
from harness import run_ranks
from models import Tolerance, Tower, Twin, by_block, compare, data, seeded, square
from wrapped_models import Build, coded, scaled, shard, train

pytestmark = pytest.mark.cuda


def test_ranks_in_other_numbers_of_groups_meet() -> None:
    """Each of their communicators has one name on all of them."""

    def ranks(rank: int) -> None:
        dist.new_group([0])
        Twin(rank, 2, Tower).train(steps=1)

    run_ranks(ranks, 2)


def owned(params: list[nn.Parameter]) -> torch.optim.Optimizer:
    """Matrices stepped by their owners, where they are sharded."""
    make = partial(torch.optim.AdamW, lr=0.01)
    return fc.owner_step(params, make) if is_sharded(params[0]) else make(params)


@pytest.mark.parametrize("offload", [Offload(), Offload(params=True)])
def test_owners_step_whole_matrices(offload: Offload) -> None:
    def ranks(rank: int) -> None:
        Twin(rank, 2, Tower, partial(by_block, offload_policy=offload), owned).train()

    run_ranks(ranks, 2)


@pytest.mark.parametrize("build", [Tower, Recomputed])
def test_penalties_on_gradients(build: type[Tower]) -> None:
    """Graphs over a backward, whose nodes a thread of the device makes."""

    def ranks(rank: int) -> None:
        Twin(rank, 2, build).train(penalty)

    run_ranks(ranks, 2)


def test_hooks_get_the_sum_of_what_a_backward_brings() -> None:
    """A penalty on weights arrives at the leaves, beside what their units reduce."""

    def ranks(rank: int) -> None:
        twin, seen = Twin(rank, 2, Tower), list[tuple[str, Tensor]]()
        for name, param in twin.model.named_parameters():
            param.register_hook(lambda grad, name=name: seen.append((name, grad.full_tensor())))

        def loss(model: nn.Module, x: Tensor) -> Tensor:
            return square(model, x) + sum(p.square().sum() for p in model.parameters())

        twin.backward(loss, 0)
        wanted = dict(twin.reference.named_parameters())
        assert sorted(name for name, _ in seen) == sorted(wanted)
        for name, found in seen:
            compare(f"gradient of {name}", found, wanted[name].grad, twin.tolerance)
        twin.step()
        twin.check()

    run_ranks(ranks, 2)


CODECS = {"bf16": fc.bf16_codec(), "fp8": fc.fp8_codec(), "int8": fc.int8_codec()}


@pytest.mark.parametrize("codec", CODECS)
def test_weights_travel_encoded(codec: str) -> None:
    """All ranks compute with the same weights, which are near those that were sent."""

    def ranks(rank: int) -> None:
        plain, x = seeded(Tower).float(), data(0, 0).float()
        policy = MixedPrecision(gather_codec=CODECS[codec])
        model = by_block(seeded(Tower).float(), mp_policy=policy)
        for _ in range(3):
            found = model(x)
            torch.testing.assert_close(found, plain(x), rtol=0.2, atol=0.2)
            others = [torch.empty_like(found) for _ in range(2)]
            dist.all_gather(others, found.detach())
            assert torch.equal(*others)
            found.square().mean().backward()

    run_ranks(ranks, 2)


@pytest.mark.parametrize("build", [scaled, coded])
def test_weights_of_a_class_around_tensors(build: Build) -> None:
    def ranks(rank: int) -> None:
        train(shard(build().cuda()), build().cuda(), rank, 2, "cuda")

    run_ranks(ranks, 2)


def test_gradients_travel_in_int8() -> None:
    """They are exchanged by a communicator of their own, beside gathers for other units."""

    def ranks(rank: int) -> None:
        twin = Twin(rank, 2, Tower, tolerance=Tolerance(1e-1, 2e-2))
        state = fc.Int8ErrorFeedback()
        fc.register_comm_hook(twin.model, state, fc.int8_error_feedback_hook)
        for seed in range(4):
            twin.backward(square, seed)
            twin.check_grads()
            twin.zero_grad()
            state.load_state_dict(state.state_dict())

    run_ranks(ranks, 2)


def test_a_tree_of_microbatches_gives_the_same_bits() -> None:
    """Whatever the number of ranks, and wherever the shards are."""

    def ranks(rank: int, world: int, offload: Offload) -> list[Tensor]:
        model = by_block(seeded(Tower).float(), deterministic=4, offload_policy=offload)
        for micro in range(rank, 4, world):
            square(model, data(micro, 0).float()).backward()
        return [p.grad.full_tensor().cpu() for p in model.parameters()]

    (wanted,) = run_ranks(ranks, 1, 1, Offload())
    for offload in (Offload(), Offload(params=True)):
        for found in run_ranks(ranks, 2, 2, offload):
            assert all(map(torch.equal, found, wanted))


def test_a_step_is_skipped_by_all_ranks() -> None:
    def ranks(rank: int) -> None:
        twin = Twin(rank, 2, Tower)
        for seed in range(2):
            with fc.skippable_step(twin.model, finite_gradients=True) as step:
                factor = float("nan") if rank else 1.0
                (square(twin.model, data(9, rank)) * factor).backward()
            assert step.skipped and all(p.grad is None for p in twin.model.parameters())
            twin.backward(square, seed)
            twin.step()
        twin.check()

    run_ranks(ranks, 2)


def test_a_group_of_nccl_alone_serves_offloaded_models(tmp_path: Any) -> None:
    """What lies on the host travels by way of the device."""

    def ranks(rank: int) -> None:
        shard = partial(by_block, offload_policy=Offload(params=True))
        twin = Twin(rank, 2, Tower, shard, partial(torch.optim.AdamW, lr=0.01))
        twin.backward(square, 0)
        norm = fc.clip_grad_norm_(twin.model, 0.1)
        wanted = nn.utils.clip_grad_norm_(twin.reference.parameters(), 0.1)
        torch.testing.assert_close(norm.cpu(), wanted.cpu().to(norm.dtype))
        with torch.no_grad():
            for ours, plain in zip(twin.model.parameters(), twin.reference.parameters()):
                assert abs(float(ours.norm()) - float(plain.norm())) < 1e-6
        twin.step()
        saving = fc.save_checkpoint(tmp_path / "saved", twin.model, twin.optim, asynchronous=True)
        twin.train(steps=1)
        saving.wait()
        again = by_block(seeded(Tower, 5), offload_policy=Offload(params=True))
        optim = torch.optim.AdamW(again.parameters(), lr=0.01)
        fc.load_checkpoint(tmp_path / "saved", again, optim)
        whole = fc.state_dict(again, kind="full")
        assert all(value.isfinite().all() for value in whole.values())

    run_ranks(ranks, 2, backend="nccl")


def test_traced_units_train_as_one_process() -> None:
    """Whole graphs over gathers, without the time that kernels take to be made."""

    def ranks(rank: int) -> None:
        warnings.simplefilter("ignore")
        twin = Twin(rank, 2, Tower)
        fc.set_traceable(twin.model)
        twin.model.compile(fullgraph=True, backend="aot_eager")
        twin.train(steps=2)

    run_ranks(ranks, 2, timeout=150)
