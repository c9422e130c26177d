"""``deterministic=``: the same bits at any number of ranks, with every strategy and option.

Each program trains on one rank without a process group, and on 2, 4 and 8 simulated ranks and over
replicas, and must end with the same hash of all parameters.
"""

from __future__ import annotations

import hashlib
import math
import re
from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import fsdp_compose as fc
from fsdp_compose import MixedPrecision, Offload, ShardingStrategy, simulate
from fsdp_compose.base.microbatches import MicrobatchSums, add_in_tree
from fsdp_compose.comm.transports import AT_ONCE, PAIRS
from fsdp_compose.optim.fixed_sum import add_powers, carry, exponent_of, root_of

from harness import run_ranks
from models import (
    Block,
    Checkpointed,
    Tower,
    by_block,
    data,
    mesh_of_replicas,
    nested,
    seeded,
    square,
    units,
)

MICROBATCHES = 8
Shard = Callable[..., nn.Module]


class Odd(nn.Module):
    """Tied, frozen and unused parameters, one that some inputs use, a block used twice."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.head = nn.Linear(6, 6), nn.Linear(6, 6)
        self.twice, self.once = Block(), Block()
        self.head.weight = self.first.weight
        self.sometimes = nn.Parameter(torch.randn(6))
        self.never = nn.Parameter(torch.randn(3))
        self.first.bias.requires_grad_(False)
        self.once.norm.weight.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        x = self.twice(self.once(self.twice(self.first(x))))
        return self.head(x + self.sometimes if x.detach().sum() > 0 else x)


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=0.05, weight_decay=0.1)


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def orthogonal(model: nn.Module) -> torch.optim.Optimizer:
    """An update of whole matrices, each at the rank that owns it."""
    matrices = [p for p in model.parameters() if p.ndim == 2]
    return fc.owner_step(matrices, partial(torch.optim.Muon, lr=0.02))


def compare(model: nn.Module, x: Tensor) -> Tensor:
    """The loss of two forwards."""
    return (model(x) - model(x.flip(0))).square().mean()


def train(
    shard: Shard,
    build: Callable[[], nn.Module] = partial(Tower, 1),
    *,
    microbatches: int = MICROBATCHES,
    steps: int = 2,
    optimizer: Callable[[nn.Module], torch.optim.Optimizer] = adamw,
    clip: Callable[[nn.Module], Any] = partial(fc.clip_grad_norm_, max_norm=0.1),
    loss_of: Callable[[nn.Module, Tensor], Tensor] = square,
    skips: bool = False,
    set_to_none: bool = True,
) -> str:
    """A hash of all parameters after some steps."""
    model = seeded(build).float()
    shard(model)
    mesh = units(model)[0].gathered[0].mesh  # whose order need not be that of the ranks' numbers
    rank = mesh.replicate_axis.rank * mesh.gather_axis.size + mesh.gather_axis.rank
    optim = optimizer(model)
    for step in range(steps):
        for number in range(rank, microbatches, mesh.size):
            x = data(100 * step + number, 0).float()
            loss = fc.participate(model) if skips and number % 5 == 3 else loss_of(model, x)
            loss.backward()
        clip(model)
        optim.step()
        optim.zero_grad(set_to_none)
    digest = hashlib.sha256()
    for name, value in sorted(fc.state_dict(model, cpu_offload=True).items()):
        digest.update(name.encode() + bytes(value.flatten().view(torch.uint8).tolist()))
    return digest.hexdigest()


def over(replicas: int, shards: int, strategy: str, shard: Shard = by_block) -> Shard:
    chosen = ShardingStrategy[strategy]

    def apply(model: nn.Module, **options: Any) -> nn.Module:
        mesh = mesh_of_replicas(replicas, shards) if replicas else None
        return shard(model, mesh=mesh, strategy=chosen, **options)

    return apply


def by_microbatch(
    shard: Shard = by_block, microbatches: int = MICROBATCHES, **options: Any
) -> Shard:
    return partial(shard, deterministic=microbatches, **options)


def test_ten_steps_at_every_number_of_ranks() -> None:
    """With every strategy: the issue's promise, whole."""
    run = partial(train, steps=10)
    wanted = run(by_microbatch())
    worlds = [
        (2, over(0, 2, "SHARD_GRAD_OP")),
        (4, over(0, 4, "NO_SHARD")),
        (8, over(0, 8, "FULL_SHARD", nested)),
        (4, over(2, 2, "HYBRID_SHARD")),
        (8, over(4, 2, "HYBRID_SHARD_OPTIMIZER")),
    ]
    for seed, (ranks, shard) in enumerate(worlds):
        found = set(simulate(run, ranks, by_microbatch(shard), seed=seed))
        assert found == {wanted}, f"world {seed}"


LOW = MixedPrecision(torch.bfloat16, torch.bfloat16, keep_low_precision_grads=True)
PROGRAMS: dict[str, tuple[Shard, dict[str, Any]]] = {
    "gradients kept in bfloat16, offloaded": (
        by_microbatch(mp_policy=LOW, offload_policy=Offload(True, True), granularity="row"),
        {"optimizer": sgd},
    ),
    "twelve microbatches, some skipped, reduced in float16": (
        by_microbatch(microbatches=12, mp_policy=MixedPrecision(None, torch.float16)),
        {
            "microbatches": 12,
            "skips": True,
            "clip": partial(fc.clip_grad_norm_, max_norm=1, norm_type=1),
        },
    ),
    "odd parameters in two forwards": (
        by_microbatch(mp_policy=MixedPrecision(torch.bfloat16)),
        {"build": Odd, "optimizer": sgd, "loss_of": compare, "set_to_none": False},
    ),
    "whole matrices, checkpointed": (
        by_microbatch(granularity="tensor"),
        {"build": lambda: Checkpointed("inside", False), "optimizer": orthogonal},
    ),
}


@pytest.mark.parametrize("program", PROGRAMS)
def test_options_keep_the_bits(program: str) -> None:
    shard, options = PROGRAMS[program]
    wanted = train(shard, **options)
    for ranks, chosen in ((4, shard), (4, partial(over(2, 2, "HYBRID_SHARD"), **shard.keywords))):
        found = set(simulate(train, ranks, chosen, **options))
        assert found == {wanted}, f"{ranks} ranks"


def test_processes_and_simulated_ranks_agree() -> None:
    """Over shared memory, over pairs of ranks, and on one rank."""

    def in_process(rank: int) -> str:
        return train(by_microbatch())

    wanted = train(by_microbatch())
    assert run_ranks(in_process, 2) == [wanted] * 2 == simulate(train, 2, by_microbatch())


def test_without_it_the_bits_differ() -> None:
    """Else the tests above would say nothing."""
    found = {
        train(by_microbatch(microbatches=4), microbatches=4),
        *simulate(train, 4, by_block, microbatches=4),
    }
    assert len(found) == 2


def test_what_changes_memory_alone_keeps_the_bits() -> None:
    """On as many ranks, where no norm is read, of strategies over one axis all but ``NO_SHARD``."""
    strategies = (ShardingStrategy[name] for name in ("FULL_SHARD", "SHARD_GRAD_OP", "ZERO1"))
    chosen: list[Shard] = [
        fc.fully_shard,
        *(partial(by_block, granularity=cut) for cut in (1, "row", "tensor")),
        *(partial(by_block, strategy=strategy) for strategy in strategies),
        partial(by_block, prefetch=fc.Prefetch(2, 2), static_buffers=True),
        partial(by_block, offload_policy=Offload(params=True, pin_memory=False)),
    ]
    unclipped = partial(train, microbatches=3, clip=lambda model: None)
    assert len({hashed for shard in chosen for hashed in simulate(unclipped, 3, shard)}) == 1


def test_transports_that_sum_exchange_instead() -> None:
    """As NCCL's, which returns one sum."""
    summing = replace(PAIRS, reduce_scatter=AT_ONCE.reduce_scatter, keeps_parts=False)
    shard = by_microbatch(transport=summing)
    assert set(simulate(train, 4, shard)) == {train(by_microbatch())}


# What is refused


def fail(use: Callable[[nn.Module], Any], **options: Any) -> str:
    model = by_block(seeded(Tower), deterministic=4, **options)
    for _ in range(4 // dist.get_world_size()):
        model(data(0, 0)).sum().backward()
    with pytest.raises((RuntimeError, ValueError, TypeError)) as caught:
        use(model)
    return str(caught.value)


def backward(model: nn.Module, times: int) -> None:
    for _ in range(times):
        model(data(0, 0)).sum().backward()


def one_more(model: nn.Module) -> None:
    backward(model, 1)
    sgd(model).step()


def two_steps(model: nn.Module) -> None:
    backward(model, 2)
    fc.clip_grad_norm_(model, 1.0)


def too_few(model: nn.Module) -> None:
    optim = sgd(model)
    optim.step()
    optim.zero_grad()
    with fc.accumulate(model):
        backward(model, 1)


def penalty(params: Iterable[Tensor]) -> Tensor:
    return sum((0.01 * p.square().sum() for p in params), torch.zeros(()))


def penalty_beside_hook(model: nn.Module) -> None:
    model.head.bias.register_hook(lambda grad: grad)
    penalty([model.head.bias]).backward()


REFUSED: dict[str, tuple[Callable[[nn.Module], Any], str]] = {
    "more": (one_more, "is of 3 backwards on this rank; wanted 2, since deterministic=4"),
    "a step more": (two_steps, "clip_grad_norm_: .* is of 4 backwards on this rank; wanted 2"),
    "fewer": (too_few, "reduce_grads: .* is of 1 backwards on this rank; wanted 2"),
    "no_sync": (lambda m: fc.no_sync(m).__enter__(), "no_sync: unit .* deterministic=4"),
    "hook": (lambda m: fc.register_comm_hook(m, None, fc.default_hook), "register_comm_hook: "),
    "graph": (
        lambda m: torch.autograd.grad(m(data(0, 0)).sum(), list(m.parameters())),
        "found autograd.grad over its parameters",
    ),
    "penalty": (
        lambda m: penalty(m.parameters()).backward(),
        "parameter '.*' was sharded with deterministic=4, .* inside .with fsdp_compose.gathered",
    ),
    "penalty beside a hook": (penalty_beside_hook, "parameter 'head.bias' .* penalty on weights"),
    "flat penalty": (
        lambda m: penalty(fc.flat_parameters(m)).backward(),
        "parameter .* was sharded with deterministic=4",
    ),
    "local penalty": (
        lambda m: penalty(fc.local_parameters(m)).backward(),
        "parameter .* was sharded with deterministic=4",
    ),
    "fused": (
        lambda m: torch.optim.AdamW(m.parameters(), fused=True).step(),
        "has fused=True .* Pass foreach=True",
    ),
    "outer": (
        lambda m: fc.fully_shard(nn.Sequential(m, nn.Linear(2, 2))),
        "has deterministic=None on 2 ranks, and unit .* deterministic=4 on 2",
    ),
}


def test_a_step_that_was_left_out() -> None:
    """Of one backward on each rank, so that nothing waits for another: the next step says so."""

    def ranks() -> None:
        model = fc.fully_shard(nn.Linear(2, 2), deterministic=2)
        optim = sgd(model)
        for times in (1, 1, 2):  # where gradients stay, as zeros, only a step ends the count
            for _ in range(times):
                model(torch.ones(1, 2)).sum().backward()
            if times == 2:
                with pytest.raises(RuntimeError, match="is of 2 backwards on this rank; wanted 1"):
                    optim.step()
            else:
                optim.step()
            optim.zero_grad(set_to_none=False)

    simulate(ranks, 2)


@pytest.mark.parametrize("case", REFUSED)
def test_wrong_use_is_an_error_on_every_rank(case: str) -> None:
    use, wanted = REFUSED[case]
    for error in simulate(fail, 2, use):
        assert re.search(wanted, error), error


@pytest.mark.parametrize(
    ("ranks", "options", "wanted"),
    [
        (3, {"deterministic": 12}, "by 3 ranks; wanted .* divides 12: 1, 2, 4. Run on so many"),
        (4, {"deterministic": 6}, "by 4 ranks; wanted .* divides 6: 1, 2. Run on so many"),
        (2, {"deterministic": True}, "deterministic is True; wanted how many microbatches"),
        (2, {"deterministic": 0}, "deterministic is 0; wanted how many microbatches"),
        (
            2,
            {"deterministic": 2, "mp_policy": MixedPrecision(gather_codec=fc.int8_codec())},
            "has a gather_codec, which encodes what each rank holds",
        ),
        (
            2,
            {"deterministic": 2, "dtype": torch.bfloat16},
            "trains parameters stored in torch.bfloat16",
        ),
    ],
)
def test_wrong_options_raise(ranks: int, options: dict[str, Any], wanted: str) -> None:
    given = dict(options)
    dtype = given.pop("dtype", torch.float32)

    def shard() -> None:
        with pytest.raises((ValueError, TypeError), match=wanted):
            by_block(Tower().to(dtype), **given)

    simulate(shard, ranks)


def test_a_penalty_inside_a_scope() -> None:
    """It reaches gradients with the loss, with the same bits at every number of ranks."""

    def step() -> list[Tensor]:
        rank, ranks = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
        model = by_block(seeded(Tower).float(), deterministic=4)
        for number in range(rank, 4, ranks):
            with fc.gathered(model):
                (square(model, data(number, 0).float()) + penalty(model.parameters())).backward()
        return [param.grad.full_tensor() for param in model.parameters()]

    plain = seeded(Tower).float()
    losses = [square(plain, data(number, 0).float()) for number in range(4)]
    (sum(losses) / 4 + penalty(plain.parameters())).backward()
    found = step()
    for grad, param in zip(found, plain.parameters(), strict=True):
        assert torch.allclose(grad, param.grad, rtol=1e-5, atol=1e-7)
    for ranks in (2, 4):
        assert all(map(torch.equal, simulate(step, ranks)[0], found))


def list_norms() -> list[float]:
    """As torch's clipping and ours give them, of all parameters and of some."""
    rank, ranks = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    model = by_block(seeded(Tower).float(), deterministic=MICROBATCHES)
    for number in range(rank, MICROBATCHES, ranks):
        square(model, data(number, 0).float()).backward()
    params, found = list(model.parameters()), []
    for order in (1.0, 2.0, 3.0, math.inf):
        for some in (params, params[1:], params[:-1], params[3:5]):
            found.append(float(nn.utils.clip_grad_norm_(some, 1e9, order)))
            assert found[-1] == pytest.approx(float(fc.grad_norm(some, order)), rel=1e-6)
    return found


def test_torch_takes_the_same_norms_everywhere() -> None:
    wanted = list_norms()
    for ranks in (2, 8):
        assert simulate(list_norms, ranks) == [wanted] * ranks


def fail_inside(model: nn.Module, way: str) -> None:
    if way == "accumulate":
        with fc.accumulate(model):
            square(model, data(1, 0).float()).backward()
            _raise()
    hook = model.blocks[0].register_full_backward_hook(_raise)
    try:
        square(model, data(1, 0).float()).backward()
    finally:
        hook.remove()


@pytest.mark.parametrize("way", ["backward", "accumulate"])
def test_a_failed_step_can_be_run_again(way: str) -> None:
    """What a failed step left of its microbatches is dropped, and the whole step run again."""

    def twice(fails: bool) -> str:
        def shard(model: nn.Module) -> nn.Module:
            by_block(model, deterministic=MICROBATCHES)
            if fails:
                square(model, data(0, 0).float()).backward()
                with pytest.raises(ZeroDivisionError):
                    fail_inside(model, way)
            return model

        return train(shard)

    assert simulate(twice, 2, True) == simulate(twice, 2, False)


def _raise(*_: object) -> None:
    raise ZeroDivisionError


def test_a_discarded_microbatch_leaves_nothing() -> None:
    """``skippable_step`` puts back the sums of the microbatches before it."""

    def run(discards: bool) -> str:
        def shard(model: nn.Module) -> nn.Module:
            by_block(model, deterministic=MICROBATCHES)
            if discards:
                with fc.accumulate(model):
                    for number in range(4):
                        if number == 2:
                            with fc.skippable_step(model) as step:
                                model(data(9, 0).float()).sum().backward()
                                step.discard("a bad batch")
                        model(data(number, 0).float()).square().mean().backward()
                assert model.head.weight.grad is not None
                model.zero_grad()
            return model

        return train(shard)

    assert simulate(run, 2, True) == simulate(run, 2, False)


def test_a_model_converted_inside_a_step() -> None:
    """Sums of microbatches before ``model.double()`` go on in the new dtype."""
    model = by_block(seeded(Tower).float(), deterministic=2)
    model(data(0, 0).float()).sum().backward()
    model.double()
    model(data(1, 0)).sum().backward()
    assert model.head.bias.grad.full_tensor().tolist() == [3.0, 3.0]
    assert fc.grad_norm(model).dtype == torch.float64


# The sums


def test_a_tree_is_the_same_however_it_is_cut() -> None:
    values = [torch.randn(5, generator=torch.Generator().manual_seed(i)) * 10**i for i in range(8)]
    wanted = torch.empty(5)
    add_in_tree(values, wanted)
    for ranks in (1, 2, 4):
        sums, found = MicrobatchSums(), None
        for j in range(0, 8, ranks):
            total = values[j].clone()
            if ranks > 1:
                add_in_tree(values[j : j + ranks], total)
            found = sums.add(total, 8 // ranks)
            assert len(sums.nodes) <= int(math.log2(8 // ranks))
        assert found is not None and torch.equal(found, wanted)


@pytest.mark.parametrize("order", [1.0, 1.5, 2.0, 3.0, 4.0])
def test_a_norm_is_the_same_however_it_is_cut(order: float) -> None:
    """And right, though the largest number is a million times most others."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(70_001, generator=generator, dtype=torch.float64) ** 9
    exponent = exponent_of(x.abs().max())
    counts = []
    for ranks in (1, *range(200, 220)):
        parts = x[torch.randperm(x.numel(), generator=generator)].chunk(ranks)
        counts.append(torch.stack([add_powers([part], order, exponent) for part in parts]).sum(0))
    assert len({tuple(carry(count).tolist()) for count in counts}) == 1
    assert float(root_of(counts[0], order, exponent)) == pytest.approx(
        float(x.norm(order)), rel=1e-9
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("value", [0.0, math.inf, math.nan, 1e-42, 3e38])
def test_norms_at_the_edges(value: float, dtype: torch.dtype) -> None:
    """Of numbers whose squares no float holds; the gradients stay as they are."""
    model = fc.fully_shard(nn.Linear(1, 1, bias=False).to(dtype), deterministic=1)
    model(torch.ones(1, 1, dtype=dtype)).sum().backward()
    model.weight.grad.fill_(value)
    wanted = float(torch.tensor(value, dtype=dtype))
    for _ in range(2):
        assert float(fc.grad_norm(model)) == pytest.approx(wanted, rel=1e-9, abs=0, nan_ok=True)
    found = float(model.weight.grad.full_tensor())
    assert found == pytest.approx(wanted, rel=0, abs=0, nan_ok=True)
