"""Which parameters ranks used is read once, ahead of its turn too, and not after a disagreement."""

from __future__ import annotations

from collections import deque
from typing import Any, NoReturn

import torch
import torch.distributed as dist

from fsdp_compose.base.group import Group
from fsdp_compose.base.mesh import group_of
from fsdp_compose.comm.counts import end_epoch
from fsdp_compose.comm.flags import Flags
from fsdp_compose.comm.heads import Head, Heads, send_heads

from harness import simulate_ranks

HEAD: Head = (5, 1, 2, 0, 0, 0, 0, 0)


class Sender:
    """Sends heads over one group, whose ranks do the same."""

    def __init__(self) -> None:
        self.unread: dict[Any, deque[Heads]] = {}
        self.unmet: set[Group] = set()

    def head(self) -> Head:
        return HEAD

    def disagree(self, group: Group, meets: int) -> NoReturn:
        raise AssertionError("they do the same")


def test_flags_from_before_a_disagreement_stay_unread() -> None:
    """The same exchange, begun again, unites what the ranks say now."""

    def ranks(rank: int) -> int:
        sender, group = Sender(), group_of(dist.group.WORLD, torch.device("cpu"))
        send_heads(sender, HEAD, group, "reduce", Flags(1 << rank, 4))
        end_epoch(group)
        heads = send_heads(sender, HEAD, group, "reduce", Flags(4 << rank, 4))
        assert heads.flags is not None and heads.check()
        return heads.flags.bits

    assert simulate_ranks(ranks, 2) == [0b1100, 0b1100]


def test_flags_that_were_read_ahead_are_kept() -> None:
    """An exchange that is checked behind later ones is read once, by the first of those."""

    def ranks(rank: int) -> list[int]:
        sender, group = Sender(), group_of(dist.group.WORLD, torch.device("cpu"))
        sent = [
            send_heads(sender, (number, *HEAD[1:]), group, "reduce", Flags(1 << rank + number, 6))
            for number in range(3)
        ]
        assert all(sent[number].check() for number in (1, 2, 0))
        assert not sender.unread[group.pg]
        return [heads.flags.bits for heads in sent if heads.flags is not None]

    assert simulate_ranks(ranks, 2) == [[0b11, 0b110, 0b1100]] * 2
