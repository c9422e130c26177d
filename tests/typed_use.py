"""Uses of public functions whose types mypy checks; ``test_public.py`` runs them too."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn
from typing_extensions import assert_type

import fsdp_compose as fc


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(4, 4)


def arguments_keep_their_type() -> None:
    block = assert_type(fc.fully_shard(Block()), Block)
    assert_type(block.up, nn.Linear)
    assert_type(fc.refresh(block), Block)
    assert_type(fc.undo(block), Block)
    assert_type(fc.fully_shard([Block(), Block()]), list[Block])


def average(state: None, grads: fc.GradBucket) -> torch.Tensor:
    return fc.default_hook(state, grads)


def one_at_most(upcoming: Sequence[tuple[str, int]], held: int) -> int:
    return min(1, len(upcoming))


def hooks_and_policies_have_types() -> None:
    rule: fc.PrefetchRule = one_at_most
    policy: fc.Policy = fc.wrap.by_class({nn.Linear})
    hook: fc.CommHook = average
    block = fc.fully_shard(Block(), units=policy, prefetch=fc.Prefetch(rule=rule))
    fc.register_comm_hook(block, None, hook)
