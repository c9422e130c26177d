"""Which parameters ranks used, as they said before a disagreement, is not read after it."""

from __future__ import annotations

from collections import deque
from typing import Any, NoReturn

import torch
import torch.distributed as dist

from fsdp_compose.base.group import Group
from fsdp_compose.base.mesh import group_of
from fsdp_compose.comm.flags import Flags
from fsdp_compose.comm.heads import Head, Heads, send_heads

from harness import simulate_ranks

HEAD: Head = (5, 1, 2, 0, 0, 0, 0, 0)


class Sender:
    """Counts the disagreements of its only group."""

    def __init__(self) -> None:
        self.unread: dict[Any, deque[Heads]] = {}
        self.unmet: set[Group] = set()
        self.disagreements = 0

    def epoch(self, group: Group) -> int:
        return self.disagreements

    def head(self) -> Head:
        return HEAD

    def disagree(self, group: Group, meets: int) -> NoReturn:
        raise AssertionError("they do the same")


def test_flags_from_before_a_disagreement_stay_unread() -> None:
    """The same exchange, begun again, unites what the ranks say now."""

    def ranks(rank: int) -> int:
        sender, group = Sender(), group_of(dist.group.WORLD, torch.device("cpu"))
        send_heads(sender, HEAD, group, "reduce", Flags(1 << rank, 4))
        sender.disagreements += 1
        heads = send_heads(sender, HEAD, group, "reduce", Flags(4 << rank, 4))
        assert heads.flags is not None and heads.check()
        return heads.flags.bits

    assert simulate_ranks(ranks, 2) == [0b1100, 0b1100]
