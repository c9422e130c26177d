"""Ranks that write different values into parameters or gradients raise in the next step."""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

import fsdp_compose as fc
from fsdp_compose import ShardingStrategy
from fsdp_compose.core.guards.compared_steps import Steps
from fsdp_compose.sharded.writes import crc_of

from harness import run_ranks, simulate_ranks
from models import Tower, Twin, by_block, data, mesh_of_replicas, seeded, square, whole


def write_both(twin: Twin, write: Callable[[nn.Module], None]) -> None:
    """Write the sharded model and the plain one, with the same random numbers."""
    state = torch.get_rng_state()
    with torch.no_grad():
        for model in (twin.model, twin.reference):
            torch.set_rng_state(state)
            write(model)


OWN = "ranks wrote in their own ways before step"

Write = Callable[[Any, int], object]


def like(param: nn.Parameter, value: float) -> torch.Tensor:
    return torch.full(param.shape, value, dtype=param.dtype)


def swap_data(p: nn.Parameter, rank: int) -> None:
    p.data = like(p, rank)


def set_row(p: nn.Parameter, rank: int) -> None:
    p[0] = like(p, rank)[0]


def set_masked(p: nn.Parameter, rank: int) -> None:
    p[p > 0] = float(rank)


def another_row(p: nn.Parameter, rank: int) -> None:
    p[rank].zero_()


def in_turn(p: nn.Parameter, rank: int) -> None:
    """The last write is the same on both ranks."""
    p.mul_(rank + 1)
    p.add_(1)


WRITES: dict[str, Write] = {
    "on one rank": lambda p, rank: rank or p.zero_(),
    "a number": lambda p, rank: p.mul_(1 + rank),
    "a tensor": lambda p, rank: p.copy_(like(p, rank)),
    "a tensor of one element": lambda p, rank: p.mul_(torch.tensor(1.0 + rank)),
    "a factor by keyword": lambda p, rank: p.add_(p.detach(), alpha=0.1 * rank),
    "what another was computed with": lambda p, rank: p.copy_(p * like(p, rank)),
    "out": lambda p, rank: torch.add(p, rank, out=p),
    "augmented": lambda p, rank: p.__iadd__(rank),
    "a constant": lambda p, rank: nn.init.constant_(p, float(rank)),
    "through data": lambda p, rank: p.data.fill_(rank),
    "other data": swap_data,
    "through detach": lambda p, rank: p.detach().mul_(1 + rank),
    "through a view": lambda p, rank: p.view(-1).mul_(1 + rank),
    "a row": set_row,
    "in a row": lambda p, rank: p[0].fill_(rank),
    "another row": another_row,
    "behind a mask": set_masked,
    "an earlier write": in_turn,
    "a list of numbers": lambda p, rank: torch._foreach_mul_([p], [1.0 + rank]),
    "a list": lambda p, rank: torch._foreach_mul_([p], 1.0 + rank),
    "lists of tensors": lambda p, rank: torch._foreach_copy_([p], [like(p, rank)]),
}

WAYS: dict[str, Callable[[nn.Module], object]] = {
    "sharded": by_block,
    "copied": partial(by_block, strategy=ShardingStrategy.NO_SHARD),
    "hybrid": lambda model: by_block(model, mesh=mesh_of_replicas(2, 1)),
}


@pytest.mark.parametrize("way", WAYS)
def test_writes_that_differ_raise_on_every_rank(way: str) -> None:
    """Whatever way they are written in; then the ranks go on, and train what they agree on."""

    def check(rank: int) -> dict[str, str]:
        found = {}
        for name, write in WRITES.items():
            model = seeded(lambda: Tower(1))
            WAYS[way](model)
            square(model, data(0, rank)).backward()
            before = {n: whole(p) for n, p in model.named_parameters()}
            with torch.no_grad():
                write(model.head.weight, rank)
            with pytest.raises(RuntimeError) as caught:
                square(model, data(1, rank)).backward()
            found[name] = str(caught.value)
            with torch.no_grad():
                for key, param in model.named_parameters():
                    param.copy_(before[key])
            model.zero_grad()
            square(model, data(1, rank)).backward()
        return found

    first, second = simulate_ranks(check)
    assert first == second
    for name, text in first.items():
        assert text.startswith(OWN), (name, text)
        assert re.search(r"parameter 'head\.weight'( in a list)?, last by", text), (name, text)


def other_gradient(p: nn.Parameter, rank: int) -> None:
    p.grad = like(p, rank)


GRADIENTS: dict[str, Write] = {
    "a count of tokens": lambda p, rank: p.grad.div_(torch.tensor(100 + rank)),
    "a number": lambda p, rank: p.grad.mul_(1 + rank),
    "on one rank": lambda p, rank: rank or p.grad.zero_(),
    "another gradient": other_gradient,
    "a tensor": lambda p, rank: p.grad.add_(like(p, rank)),
    "a row": lambda p, rank: p.grad[0].fill_(rank),
    "through data": lambda p, rank: p.grad.data.mul_(rank),
    "behind a mask": lambda p, rank: p.grad.masked_fill_(p.grad > 0, float(rank)),
    "a list": lambda p, rank: torch._foreach_add_([p.grad], 1.0 + rank),
}


def test_writes_into_gradients_that_differ_raise() -> None:
    def check(rank: int) -> dict[str, str]:
        found = {}
        for name, write in GRADIENTS.items():
            model = by_block(seeded(Tower))
            optim = torch.optim.SGD(model.parameters(), lr=0.1)
            for seed in range(2):
                square(model, data(seed, rank)).backward()
            write(model.head.weight, rank)
            optim.step()
            optim.zero_grad()
            with pytest.raises(RuntimeError) as caught:
                model(data(2, rank))
            found[name] = str(caught.value)
        return found

    first, second = simulate_ranks(check)
    assert first == second
    for name, text in first.items():
        assert text.startswith(OWN), (name, text)
        assert re.search(r"gradient of parameter 'head\.weight'.*, last by", text), (name, text)


def scaled(model: nn.Module) -> None:
    torch._foreach_mul_([p.grad for p in model.parameters()], 0.5)
    for p in model.parameters():
        p.grad /= 3


def clipped(model: nn.Module) -> None:
    torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
    torch.nn.utils.clip_grad_value_(model.parameters(), 0.01)


def projected(model: nn.Module) -> None:
    for p in model.parameters():
        p.grad = p.grad - p * (p * p.grad).sum() / (p * p).sum()


def noisy(model: nn.Module) -> None:
    for p in model.parameters():
        p.grad += torch.randn_like(p.grad)


@pytest.mark.parametrize("write", [scaled, clipped, projected, noisy])
def test_gradients_may_be_written_alike(write: Callable[[nn.Module], None]) -> None:
    def check(rank: int) -> None:
        twin = Twin(rank, 2, Tower)
        for seed in range(3):
            twin.backward(square, seed)
            write_both(twin, write)
            twin.step()
        twin.check()

    run_ranks(check)


def test_the_next_gather_finds_it() -> None:
    """On gloo nothing is computed with the mixture: the first gather of the next forward raises."""

    def check(rank: int) -> None:
        model = by_block(seeded(Tower))
        for seed in range(3):  # so that steps are compared as a whole
            square(model, data(seed, rank)).backward()
        with torch.no_grad():
            model.blocks[0].up.bias.fill_(rank)
        with pytest.raises(RuntimeError, match=OWN) as caught:
            model(data(3, rank))
        assert "fill_(0)" in str(caught.value) and "fill_(1)" in str(caught.value)
        assert "load a checkpoint on every rank" in str(caught.value)

    run_ranks(check)


def test_a_write_in_backward_is_found_at_its_end() -> None:
    def check(rank: int) -> None:
        model = by_block(seeded(Tower))
        weight = model.head.weight
        square(model, data(0, rank)).backward()

        @weight.register_post_accumulate_grad_hook
        def step(param: Any) -> None:
            with torch.no_grad():
                param.add_(param.grad, alpha=-0.1 * (rank + 1))
            param.grad = None

        with pytest.raises(RuntimeError, match=rf"{OWN}.*-0\.2"):
            square(model, data(1, rank)).backward()

    simulate_ranks(check)


def by_hand(model: nn.Module) -> None:
    for p in model.parameters():
        p -= 0.1 * p.grad


def noise(model: nn.Module) -> None:
    for p in model.parameters():
        p.add_(torch.randn_like(p), alpha=0.1)


def masked(model: nn.Module) -> None:
    for p in model.parameters():
        p.mul_(torch.linspace(0.5, 1.0, p.numel(), dtype=p.dtype).view(p.shape))


def by_norm(model: nn.Module) -> None:
    for p in model.parameters():
        p.mul_(1 / (1 + p.norm().item()))


def in_lists(model: nn.Module) -> None:
    params = list(model.parameters())
    torch._foreach_mul_(params, 0.9)
    torch._foreach_sub_(params, [p.grad for p in params], alpha=0.1)


@pytest.mark.parametrize("write", [by_hand, noise, masked, by_norm, in_lists])
def test_what_is_the_same_on_every_rank_is_no_error(write: Callable[[nn.Module], None]) -> None:
    def check(rank: int) -> None:
        twin = Twin(rank, 2, Tower)
        for seed in range(3):
            twin.backward(square, seed)
            write_both(twin, write)
            for model in (twin.model, *twin.plain):
                model.zero_grad()
        twin.check()

    run_ranks(check)


def test_ranks_may_write_in_another_order() -> None:
    """Of an optimizer's loop that follows each rank's own list, the sum is the same."""

    def check(rank: int) -> None:
        twin = Twin(rank, 2, Tower)
        twin.backward(square, 0)
        with torch.no_grad():
            for model in (twin.model, twin.reference):
                params = list(model.parameters())
                for p in params if rank else params[::-1]:
                    p.mul_(0.9)
                    p.add_(1.0)
        twin.zero_grad()
        twin.train()

    simulate_ranks(check)


def test_what_is_no_parameter_is_each_ranks_own() -> None:
    """Results, optimizer state and own slices may be written on one rank alone."""

    def check(rank: int) -> None:
        model = by_block(seeded(Tower))
        optim = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        for seed in range(3):
            square(model, data(seed, rank)).backward()
            optim.step()
            optim.zero_grad()
            if rank == 0:
                moved = model.head.weight.detach().clone().mul_(2).add_(1)
                moved.copy_(like(model.head.weight, 1.0))
                with torch.no_grad():
                    model.head.weight.to_local().mul_(1.0)

    simulate_ranks(check)


class ByHand(torch.optim.Optimizer):
    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.1})

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                p.add_(p.grad, alpha=-group["lr"])
            torch._foreach_mul_(group["params"], 0.9)


def test_steps_of_optimizers_note_nothing() -> None:
    """Their settings are compared instead, and what they write costs nothing more."""

    def check(rank: int) -> None:
        model = by_block(seeded(Tower))
        kinds = (ByHand, torch.optim.SGD, torch.optim.AdamW)
        optims = [kind(model.parameters()) for kind in kinds]
        for seed in range(2):
            square(model, data(seed, rank)).backward()
            for optim in optims:
                optim.step()
                writes = model.head.weight._shard_spec.residence.writes
                assert not writes.found and writes.are_noted

    simulate_ranks(check)


def test_clipping_notes_nothing() -> None:
    """Torch scales gradients by a tensor of one number, whose last bit may differ by rank."""

    def check(rank: int) -> None:
        model = by_block(seeded(Tower))
        square(model, data(0, rank)).backward()
        params = list(model.parameters())
        writes = params[0]._shard_spec.residence.writes
        for foreach in (False, True):
            torch.nn.utils.clip_grad_norm_(params, 1e-3, foreach=foreach)
            assert not writes.found
        params[0].grad.mul_(0.5)
        assert len(writes.found) == 1

    simulate_ranks(check)


def test_loading_makes_up_for_it() -> None:
    """What ranks wrote before they loaded a checkpoint is no matter; what they write then is."""

    def check(rank: int) -> None:
        model = by_block(seeded(Tower))
        saved = fc.state_dict(model)
        for differs in (False, True):
            with torch.no_grad():
                model.head.weight.mul_(rank)
                torch._foreach_add_([model.head.weight], float(rank))
            fc.load_state_dict(model, saved)
            with torch.no_grad():
                model.head.weight.mul_(1.0 + differs * rank)
            if not differs:
                square(model, data(0, rank)).backward()
        with pytest.raises(RuntimeError, match=OWN):
            square(model, data(0, rank)).backward()

    simulate_ranks(check)


def test_other_models_of_the_same_ranks() -> None:
    """A teacher that follows the student is compared in the student's step."""

    def check(rank: int) -> None:
        student, teacher = by_block(seeded(Tower)), by_block(seeded(Tower))
        teacher.requires_grad_(False)
        for seed in range(3):
            square(student, data(seed, rank)).backward()
            with torch.no_grad():
                for mine, other in zip(teacher.parameters(), student.parameters()):
                    mine.lerp_(other, 0.1)
        with torch.no_grad():
            teacher.head.bias.lerp_(student.head.bias, 0.1 * rank)
        with pytest.raises(RuntimeError, match=rf"{OWN}.*lerp_"):
            square(student, data(3, rank)).backward()

    simulate_ranks(check)


def test_one_process_notes_nothing() -> None:
    model = fc.fully_shard(seeded(Tower))
    with torch.no_grad():
        model.head.weight.zero_()
    assert model.head.weight._shard_spec.residence.writes is None


def test_checksums_are_of_what_is_read() -> None:
    """Also where memory holds the conjugate, the negative, or other elements between them."""
    number = torch.tensor([1 + 2j, 3 - 4j])
    assert crc_of(number.conj()) == crc_of(number.conj().resolve_conj()) != crc_of(number)
    negative = number.conj().imag
    assert negative.is_neg() and crc_of(negative) == crc_of(torch.tensor([-2.0, 4.0]))


def test_writes_of_a_step_that_ended_early_add_up() -> None:
    """All of them are compared at the end of the next step, also those of before its first part."""
    steps, place = Steps(), ("a", "parameter 'w'")
    for number, text in (3, "mul_(2)"), (4, "add_(1)"):
        steps.writes.found[place] = (number, *place, text)
        (event,) = steps.take_writes()
        assert event[0] == number << 2 | 2 and not steps.writes.found
    steps.recall()
    assert steps.writes.found == {place: (7, *place, "add_(1)")}
