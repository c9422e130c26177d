"""Calls of one unit in one forward, released between: their gradients meet in the first call.

The sum has the bits of a plain module, see tests/simulation/test_same_bits.py. Here stands which
calls a backward reaches, and what it may hand from one to the next.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from fsdp_compose import count_traffic, fully_shard, wrap

from harness import simulate_ranks
from models import Mirrored, assert_at_rest, data, seeded


class Cell(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight, self.scale = nn.Parameter(torch.randn(5, 5)), nn.Parameter(torch.randn(5))

    def forward(self, x: Tensor, scales: bool = False) -> Tensor:
        return Mirrored.apply(x, self.scale) if scales else torch.tanh(x @ self.weight)


Calls = Callable[[Cell, Cell, Tensor], Tensor]
CALLS: dict[str, Calls] = {
    "each": lambda a, b, x: a(b(a(x))),
    "the last alone": lambda a, b, x: a(b(a(x).detach())),
    "one unused": lambda a, b, x: (a(x), a(b(x)))[1],
    "other parameters": lambda a, b, x: a(b(a(x, scales=True))),
    "gradients in released memory": lambda a, b, x: a(b(a(x, scales=True)), scales=True),
    "three": lambda a, b, x: a(b(a(b(a(x).detach())))),
}


class Net(nn.Module):
    def __init__(self, calls: Calls) -> None:
        super().__init__()
        self.a, self.b, self.calls = Cell(), Cell(), calls

    def forward(self, x: Tensor) -> Tensor:
        return self.calls(self.a, self.b, x)


@pytest.mark.parametrize("name", CALLS)
@pytest.mark.parametrize("released", [True, False])
def test_calls_that_a_backward_reaches(name: str, released: bool) -> None:
    """Those alone bring gradients, reduced once; a call that it does not reach is not gathered."""

    def ranks(rank: int) -> None:
        plain, model = (seeded(lambda: Net(CALLS[name])) for _ in range(2))
        fully_shard(model, units=wrap.by_class({Cell}), reshard_after_forward=released)
        x = data(0, 0, 3, 5)  # the same on both: what ``Mirrored`` gives depends on no loss
        plain(x).square().mean().backward()
        with count_traffic() as traffic:
            model(x).square().mean().backward()
        assert traffic.reduces == 2
        for ours, theirs in zip(model.parameters(), plain.parameters(), strict=True):
            assert (ours.grad is None) == (theirs.grad is None)
            if theirs.grad is not None:
                torch.testing.assert_close(ours.grad.full_tensor(), theirs.grad)
        assert_at_rest(model)

    simulate_ranks(ranks)
