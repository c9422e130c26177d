"""What was under way when ranks disagreed never arrives: nobody reads it, and the next step works.

A rank that hears in one exchange that another does something else reads none of those behind it.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from fsdp_compose import (
    Prefetch,
    ShardedWeightError,
    fully_shard,
    reshard,
    simulate,
    skippable_step,
    unshard,
)
from fsdp_compose.base.process import here

from harness import run_ranks
from models import seeded


class Patient(nn.Sequential):
    """Goes on where a layer cannot run; ``skipped`` is one that this rank leaves out."""

    skipped = -1

    def __init__(self) -> None:
        super().__init__(*(nn.Linear(4, 4) for _ in range(5)))
        self.failed: dict[int, str] = {}

    def forward(self, x: Tensor) -> Tensor:
        for i, layer in enumerate(self):
            if i != self.skipped:
                try:
                    x = layer(x)
                except RuntimeError as error:
                    self.failed[i] = str(error)
        return x


def build(ahead: int = 1) -> tuple[Patient, Patient]:
    """A model whose layers are units, after two steps, and the same model in one piece."""
    model, plain = (seeded(Patient).double() for _ in range(2))
    for layer in model:
        fully_shard(layer, prefetch=Prefetch(forward=ahead))
    fully_shard(model)
    for _ in range(2):
        model(example()).sum().backward()
        model.zero_grad()
    return model, plain


def example() -> Tensor:
    return torch.ones(2, 4, dtype=torch.float64)


def check_next_steps(model: nn.Module, plain: nn.Module) -> None:
    for _ in range(2):
        out, wanted = model(example()), plain(example())
        torch.testing.assert_close(out, wanted, rtol=0, atol=0)
        out.sum().backward(), wanted.sum().backward()
    for p, q in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(p.grad.full_tensor(), q.grad)
    model.zero_grad(), plain.zero_grad()


@pytest.mark.filterwarnings("ignore:the forward of unit")
@pytest.mark.parametrize("run", [simulate, run_ranks])
def test_an_error_that_a_forward_catches(run: Callable[..., object]) -> None:
    """Layers behind it were gathered ahead: they raise too, or compute with their weights."""

    def ranks(rank: int | None = None) -> None:
        rank = torch.distributed.get_rank()
        model, plain = build(ahead=3)
        model.skipped = 1 if rank == 1 else -1
        out = model(example())
        wanted = example()
        for i, layer in enumerate(plain):
            if i != model.skipped and i not in model.failed:
                wanted = layer(wanted)
        torch.testing.assert_close(out, wanted, rtol=0, atol=0)
        assert "ranks run different units" in str(model.failed)
        if rank == 1:
            assert "its data did not come" in model.failed[4]
        model.skipped = -1
        check_next_steps(model, plain)

    run(ranks, 2)


@pytest.mark.filterwarnings("ignore:the forward of unit")
def test_what_is_gathered_ahead_in_vain() -> None:
    """Backward begins by releasing it, and hears there that another rank discards the step."""

    class Bad(Exception): ...

    def ranks() -> None:
        rank, (model, plain) = torch.distributed.get_rank(), build(ahead=2)
        out = model(model(example()))  # from now on a second forward is expected
        out.sum().backward()
        model.zero_grad()

        def fail(*_: object) -> None:
            raise Bad

        hook = model[3].register_forward_pre_hook(fail) if rank == 0 else None
        with skippable_step(model, errors=(Bad,)) as step:
            model(example()).sum().backward()
        assert step.skipped
        if hook is not None:
            hook.remove()
        check_next_steps(model, plain)

    simulate(ranks, 2)


@pytest.mark.parametrize("hears", ["unshard", "wait", "forward"])
def test_unshard_on_ranks_that_differ(hears: str) -> None:
    """What ``unshard`` did not get is not held: neither it nor what was asked for before it."""

    def ranks() -> None:
        rank, (model, plain) = torch.distributed.get_rank(), build()
        asked = unshard(model[2], async_op=True)
        assert asked is not None

        def differ() -> None:
            handle = unshard(model[rank], async_op=hears != "unshard")
            if handle is not None and hears == "wait":
                handle.wait()
            model[3](example())

        with pytest.raises(RuntimeError, match="ranks run different units"):
            differ()
        asked.wait()
        with pytest.raises(ShardedWeightError):
            model[2].weight[:, 0]
        check_next_steps(model, plain)
        unshard(model[2])
        torch.testing.assert_close(model[2].weight.detach(), plain[2].weight.detach())
        reshard(model[2])

    simulate(ranks, 2)


def test_what_unshard_got_before_ranks_differ() -> None:
    """It stays until ``reshard``, readable, and forwards gather it no more."""

    def ranks() -> None:
        rank, (model, plain) = torch.distributed.get_rank(), build(ahead=0)
        unshard(model[2])
        with pytest.raises(RuntimeError, match="ranks run different units"):
            model[rank](example())
        x = example()
        with torch.no_grad():
            torch.testing.assert_close(model(x), plain(x), rtol=0, atol=0)
            here.traffic.reset()
            torch.testing.assert_close(model[2](x), plain[2](x), rtol=0, atol=0)
            assert here.traffic.gathers == 0
        assert torch.equal(model[2].weight, plain[2].weight)
        reshard(model[2])
        check_next_steps(model, plain)

    simulate(ranks, 2)
