"""Mistakes that users make around the loop: what is said, if anything."""

from __future__ import annotations

import contextlib
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

import fsdp_compose as fc

from conformance.libraries import Library, Wrong, data, square, world
from conformance.models import Tower, tower
from conformance.outcomes import row


@row("D12", "step() before any backward", names=r"gradient|weight|optimizer|SGD")
def step_without_gradients(lib: Library) -> None:
    pair = lib.pair(tower)
    pair.step()
    pair.check()


@row("D17", "ranks freeze different parameters", names=r"head|weight|rank \d")
def frozen_differently(lib: Library) -> None:
    pair = lib.pair(tower)
    if dist.get_rank() == 1:
        pair.inner.head.requires_grad_(False)
    pair.train()


@row("D17", "a rank freezes a whole unit", names=r"blocks\.0|rank \d")
def frozen_unit(lib: Library) -> None:
    pair = lib.pair(tower)
    if dist.get_rank() == 1:
        pair.inner.blocks[0].requires_grad_(False)
    pair.train()


@row("D17", "a learning rate of each rank's own", names=r"weight|lr|rank \d")
def other_rates(lib: Library) -> None:
    pair = lib.pair(tower)
    pair.optims[0].param_groups[0]["lr"] *= 1 + dist.get_rank()
    pair.train()


@row("D17", "a parameter that rank 0 alone writes", names=r"weight|rank \d")
def written_on_one_rank(lib: Library) -> None:
    pair = lib.pair(tower)
    if dist.get_rank() == 0:
        with torch.no_grad():
            pair.inner.first.weight.zero_()
    pair.train()


@row("D17", "gradients divided by a count of each rank's own tokens", names=r"weight|rank \d")
def divided_apart(lib: Library) -> None:
    pair = lib.pair(tower)
    pair.backward(0)
    for param in pair.model.parameters():
        if param.grad is not None:
            param.grad /= 100 + dist.get_rank()
    pair.step()
    pair.train()


@row("D17", "gradients that rank 0 alone clears between two backwards", names=r"gradient|rank \d")
def cleared_on_one_rank(lib: Library) -> None:
    pair = lib.pair(tower)
    pair.backward(0)
    if dist.get_rank() == 0:
        pair.model.zero_grad()
    pair.backward(1)
    pair.step()
    pair.train()


@row("D17", "gradients that rank 0 alone sets to None before the step", names=r"weight|rank \d")
def dropped_on_one_rank(lib: Library) -> None:
    pair = lib.pair(tower)
    pair.backward(0)
    if dist.get_rank() == 0:
        pair.inner.blocks[0].zero_grad()
    pair.step()
    pair.train()


@row("U16", "full parameters that each rank edits in its own way", names=r"weight|rank \d")
def edited_apart(lib: Library) -> None:
    pair = lib.pair(tower)
    with lib.gathered(pair.model, write=True), torch.no_grad():
        pair.inner.head.weight.mul_(1 + dist.get_rank())
    pair.train()


@row("D2", "ranks run their units in another order", names=r"blocks\.\d|rank \d")
def other_order(lib: Library) -> None:
    class Ordered(Tower):
        def forward(self, x: Tensor) -> Tensor:
            x = self.first(x)
            for block in list(self.blocks)[:: -1 if dist.get_rank() else 1]:
                x = block(x)
            return self.head(x)

    pair = lib.pair(Ordered)
    square(pair.model, data(0)).backward()
    losses = []
    for r in range(world()):
        order = list(pair.plain.blocks)[:: -1 if r else 1]
        hidden = pair.plain.first(data(0, r))
        losses.append(pair.plain.head(order[1](order[0](hidden))).square().mean())
    (sum(losses) / world()).backward()
    pair.step()
    pair.check()


@row(
    "D8",
    "backward of a graph from before an optimizer step",
    names=r"weight|step|in-?place|version",
)
def stale_graph(lib: Library) -> None:
    pair = lib.pair(tower, kept=True)
    loss = square(pair.model, data(0))
    square(pair.model, data(1)).backward()
    pair.optims[0].step()
    loss.backward()
    raise Wrong("backward used other weights than forward")


@row("basic", "the loss's own backward is called twice", names=r"second time|backward|retain_graph")
def twice(lib: Library) -> None:
    pair = lib.pair(tower)
    loss = square(pair.model, data(0))
    loss.backward()
    loss.backward()
    raise Wrong("no error")


@row("D3", "a user's own collective between units on one rank alone", names=r"rank \d")
def own_collective(lib: Library) -> None:
    class Reduces(Tower):
        def forward(self, x: Tensor) -> Tensor:
            x = self.first(x)
            if dist.get_rank() == 0:
                dist.all_reduce(torch.zeros(3))
            return self.head(self.blocks[1](self.blocks[0](x)))

    lib.pair(Reduces).train()


def _one_bad_batch(lib: Library, scope: Any) -> None:
    pair = lib.pair(tower).train(1)
    with contextlib.suppress(ValueError), scope(pair.model):
        if dist.get_rank() == 1:
            raise ValueError("bad batch")
        square(pair.model, data(5)).backward()
    pair.optims[0].zero_grad()
    pair.train(1)


@row("U29", "an exception on one rank alone, caught there; the others go on", names=r"rank \d")
def one_bad_batch(lib: Library) -> None:
    _one_bad_batch(lib, contextlib.nullcontext)


@row("U29", "a batch that one rank cannot use is skipped by all, by the library's own scope")
def skipped_batch(lib: Library) -> None:
    _one_bad_batch(lib, lib.pick("has no such scope", ours=fc.skippable_step))
