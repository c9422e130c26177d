"""The twin of a fuzzed program: one plain model computes what all ranks should, in one batch.

The fuzzer's modules treat every row of their input alone, so the plain model need not be run once
for each rank: it runs once, on the inputs of all ranks one below the other.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextlib import AbstractContextManager

import torch
from torch import Tensor, nn

from models import BATCH, Twin, compare, data

Losses = Callable[[nn.Module, Tensor, int], Tensor]
"""``(model, x, n)``: the losses of the ``n`` ranks whose inputs are the rows of ``x``."""


def square_losses(model: nn.Module, x: Tensor, n: int) -> Tensor:
    """The mean square of each rank's output."""
    return model(x.requires_grad_()).square().view(n, -1).mean(1)


def penalised_losses(model: nn.Module, x: Tensor, n: int) -> Tensor:
    """The same with each rank's gradient of its input as a penalty."""
    losses = square_losses(model, x, n)
    (slope,) = torch.autograd.grad(losses.sum(), x, create_graph=True)
    return losses + slope.square().view(n, -1).sum(1)


@functools.cache
def _rows(seed: int, world: int) -> Tensor:
    return torch.cat([data(seed, rank) for rank in range(world)])


def rows(seed: int, world: int) -> Tensor:
    """The inputs of all ranks, one below the other."""
    if _rows.cache_info().currsize > 2000:
        _rows.cache_clear()
    return _rows(seed, world).clone()


class Batched(Twin):
    """A sharded model beside one plain model, which sees the batches of all ranks at once."""

    def replicate(self, model: nn.Module) -> list[nn.Module]:
        return [model]

    @property
    def mine(self) -> nn.Module:
        return self.reference

    def input(self, seed: int) -> Tensor:
        """This rank's batch."""
        return rows(seed, self.world)[self.rank * BATCH :][:BATCH].clone()

    def all_inputs(self, seed: int) -> Tensor:
        """The batches of all ranks, one below the other."""
        return rows(seed, self.world)

    def own_loss(self, seed: int, losses: Losses = square_losses) -> Tensor:
        """The sharded model's loss on this rank's batch."""
        return losses(self.model, self.input(seed), 1)[0]

    def pair(self, seed: int, losses: Losses = square_losses) -> tuple[Tensor, Tensor]:
        """(this rank's loss, the plain model's loss over all ranks), checked against each other."""
        loss = self.own_loss(seed, losses)
        plain = losses(self.reference, self.all_inputs(seed), self.world)
        compare("loss", loss.detach(), plain[self.rank].detach().to(loss.dtype), self.tolerance)
        return loss, plain.mean()

    def train_on(self, seed: int, losses: Losses = square_losses) -> None:
        """Forward and backward of both."""
        for loss in self.pair(seed, losses):
            loss.backward()

    def train_apart(self, seed: int, first: Callable[[], AbstractContextManager[object]]) -> None:
        """The same where rank 0 computes otherwise, as the plain model does in the scope ``first``.

        It is open over backward too, which may compute parts of the forward again.
        """
        loss, x = self.own_loss(seed), self.all_inputs(seed)
        loss.backward()
        with first():
            plain = [square_losses(self.reference, x[:BATCH], 1)]
            (plain[0].sum() / self.world).backward()
        if self.world > 1:
            plain.append(square_losses(self.reference, x[BATCH:], self.world - 1))
            (plain[1].sum() / self.world).backward()
        wanted = torch.cat(plain)[self.rank].detach().to(loss.dtype)
        compare("loss", loss.detach(), wanted, self.tolerance)
