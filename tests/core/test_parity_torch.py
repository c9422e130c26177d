"""Ten AdamW steps beside torch's FSDP2, FSDP1 and DDP in the same run, from the same weights."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP1
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.fsdp import fully_shard as fsdp2
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from fsdp_compose import MixedPrecision, fully_shard, wrap

from harness import DEVICE, run_ranks
from models import whole

sys.path.insert(0, str(Path(__file__).parents[2] / "examples"))
from gpt import GPT, Block, GPTConfig

STEPS = 10
CONFIG = GPTConfig(vocab_size=29, block_size=12, n_layer=3, n_head=2, n_embd=16)


def build() -> GPT:
    torch.manual_seed(0)
    return GPT(CONFIG).to(DEVICE)


def batch(step: int, rank: int) -> Tensor:
    generator = torch.Generator().manual_seed(100 * step + rank)
    return torch.randint(CONFIG.vocab_size, (2, 13), generator=generator).to(DEVICE)


def full(param: Tensor) -> Tensor:
    return param.full_tensor() if isinstance(param, DTensor) else whole(param)


def run(
    rank: int, wrapper: Callable[[GPT], nn.Module], accumulate: int = 1
) -> tuple[list[Tensor], dict[str, Tensor]]:
    """Losses of this rank, and parameters after ten steps."""
    model = build()
    wrapped = wrapper(model)
    optim = torch.optim.AdamW(wrapped.parameters(), lr=1e-2, weight_decay=0.1)
    losses = []
    for step in range(STEPS):
        for micro in range(accumulate):
            tokens = batch(10 * step + micro, rank)
            _, loss = wrapped(tokens[:, :-1], tokens[:, 1:])
            loss.backward()
            losses.append(loss.detach())
        optim.step()
        optim.zero_grad()
    if isinstance(wrapped, FSDP1):
        with FSDP1.summon_full_params(wrapped):
            named = {
                n.replace("_fsdp_wrapped_module.", ""): p.detach().clone()
                for n, p in wrapped.named_parameters()
            }
    else:
        named = {n.removeprefix("module."): full(p) for n, p in wrapped.named_parameters()}
    return losses, named


def ours(model: GPT, **options: Any) -> nn.Module:
    return fully_shard(model, units=wrap.by_class({Block}), **options)


def torch_fsdp2(model: GPT, **options: Any) -> nn.Module:
    for block in model.blocks:
        fsdp2(block, **options)
    return fsdp2(model, **options)


def torch_fsdp1(model: GPT) -> nn.Module:
    from torch.distributed.fsdp.wrap import ModuleWrapPolicy

    return FSDP1(
        model,
        auto_wrap_policy=ModuleWrapPolicy({Block}),
        use_orig_params=True,
        device_id=torch.device(DEVICE),
    )


def largest_difference(a: dict[str, Tensor], b: dict[str, Tensor]) -> float:
    assert list(a) == list(b)
    return max((a[n].double() - b[n].double()).abs().max().item() for n in a)


def assert_close(
    found: tuple[list[Tensor], dict[str, Tensor]],
    wanted: tuple[list[Tensor], dict[str, Tensor]],
    loss: float,
    param: float,
) -> None:
    for step, (a, b) in enumerate(zip(found[0], wanted[0], strict=True)):
        assert abs(a.item() - b.item()) <= loss, f"step {step}: {a.item()} and {b.item()}"
    assert largest_difference(found[1], wanted[1]) <= param


def ignore_torch_warnings() -> None:
    """FSDP1 and its state reading use torch APIs that torch itself has deprecated."""
    import warnings

    warnings.filterwarnings("ignore", category=FutureWarning, module="torch")
    warnings.filterwarnings("ignore", category=UserWarning, module="torch")


def assert_bit_equal(
    mine: Callable[[GPT], nn.Module], theirs: Callable[[GPT], nn.Module], accumulate: int = 1
) -> None:
    def ranks(rank: int) -> None:
        ignore_torch_warnings()
        found, wanted = (run(rank, wrapper, accumulate) for wrapper in (mine, theirs))
        assert all(torch.equal(a, b) for a, b in zip(found[0], wanted[0], strict=True))
        assert list(found[1]) == list(wanted[1])
        for name, value in found[1].items():
            assert torch.equal(value, wanted[1][name]), name

    run_ranks(ranks, 2)


@pytest.mark.parametrize("checkpointing", [False, True])
def test_bit_equal_to_fsdp2_at_two_ranks(checkpointing: bool) -> None:
    """The sum of two numbers has one order; all else is the same arithmetic."""

    def with_checkpointing(wrapper: Callable[[GPT], nn.Module]) -> Callable[[GPT], nn.Module]:
        def wrapped(model: GPT) -> nn.Module:
            model.activation_checkpointing = checkpointing
            return wrapper(model)

        return wrapped

    assert_bit_equal(with_checkpointing(ours), with_checkpointing(torch_fsdp2))


def test_bit_equal_to_fsdp2_with_gradient_accumulation() -> None:
    assert_bit_equal(ours, torch_fsdp2, accumulate=2)


def test_bit_equal_to_fsdp2_in_bf16() -> None:
    """Bit-equal to FSDP2 in bf16 with fp32 reduction."""

    def mixed_ours(model: GPT) -> nn.Module:
        return ours(model, mp_policy=MixedPrecision(torch.bfloat16, torch.float32))

    def mixed_theirs(model: GPT) -> nn.Module:
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        return torch_fsdp2(model, mp_policy=policy)

    assert_bit_equal(mixed_ours, mixed_theirs)


@pytest.mark.parametrize("world", [2, 4])
def test_close_to_fsdp2_fsdp1_and_ddp(world: int) -> None:
    def ranks(rank: int) -> None:
        ignore_torch_warnings()
        mine = run(rank, ours)
        for wrapper in (torch_fsdp2, torch_fsdp1, DistributedDataParallel):
            assert_close(mine, run(rank, wrapper), loss=2e-5, param=2e-4)

    run_ranks(ranks, world)


def test_close_to_fsdp2_on_a_two_axis_mesh() -> None:
    def ranks(rank: int) -> None:
        ignore_torch_warnings()
        mesh = init_device_mesh(DEVICE, (2, 2), mesh_dim_names=("replicate", "shard"))
        mine = run(rank, lambda m: ours(m, mesh=mesh))
        assert_close(mine, run(rank, lambda m: torch_fsdp2(m, mesh=mesh)), loss=2e-5, param=2e-4)

    run_ranks(ranks, 4)


def test_equal_to_one_process_on_the_whole_batch() -> None:
    def ranks(rank: int) -> None:
        losses, named = run(rank, ours)
        model = build()
        optim = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.1)
        for step in range(STEPS):
            tokens = torch.cat([batch(10 * step, r) for r in range(2)])
            _, loss = model(tokens[:, :-1], tokens[:, 1:])
            loss.backward()
            optim.step()
            optim.zero_grad()
            mean = losses[step].clone()
            dist.all_reduce(mean)
            torch.testing.assert_close(mean / 2, loss.detach(), rtol=2e-5, atol=0)
        wanted = {n: p.detach() for n, p in model.named_parameters()}
        assert largest_difference(named, wanted) <= 2e-4

    run_ranks(ranks, 2)
