"""Communication under way: what waits for it, and says that its data did not come."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from fsdp_compose.comm.heads import Heads
from fsdp_compose.comm.messages import wait_for
from fsdp_compose.comm.posted import may_go_on
from fsdp_compose.comm.sums import add_up, scale_in_place


@dataclass(eq=False, slots=True)
class Exchange:
    """Communication under way; ``wait`` makes its data safe to read on the current stream.

    Raises:
        RuntimeError: another rank has died, did not answer within the group's timeout, or differs.
    """

    works: Sequence[Any] = ()
    purpose: str = "communicate"
    peers: Sequence[int] = ()  # by work, the global rank it is with; empty: all ranks at once
    heads: Heads | None = None
    finish: Callable[[], None] | None = None  # called when the data has arrived
    is_lost: bool = False  # the data did not come, and nobody is to read it
    is_open: bool = False  # nor are others to use its memory, where data may yet come

    def wait(self) -> None:
        works, heads, finish = self.works, self.heads, self.finish
        if works or heads is not None or finish is not None:
            self.works, self.heads, self.finish, self.is_lost = (), None, None, True
            try:
                if heads is None or heads.check():
                    wait_for(works, self.peers, self.purpose)
                    if finish is not None:
                        finish()
                    self.is_lost = False
            finally:
                self.is_open = self.is_lost and may_go_on(works, bool(self.peers))
        if self.is_lost:
            raise RuntimeError(
                f"{self.purpose}: its data did not come, since ranks ran different units while it "
                "was under way, or one did not answer. No weights are lost: discard this step, and "
                "run the next one."
            )

    def end(self) -> None:
        """Wait where nobody is to read the data, and it may have been lost."""
        if self.will_be_lost():
            self.is_open |= may_go_on(self.works, bool(self.peers))
            self.works, self.heads, self.finish, self.is_lost = (), None, None, True
        else:
            self.wait()

    def will_be_lost(self) -> bool:
        """Whether ``wait`` would raise, as far as this rank knows."""
        return self.is_lost or (self.heads is not None and self.heads.is_outdated())


NOTHING_SENT = Exchange()  # one that is over, for whoever communicates nothing
BEGUN_BY_HALF = Exchange(is_open=True)  # the start of it raised, perhaps behind its first messages


@dataclass(slots=True)
class ReduceScatter:
    """A reduce-scatter under way: this rank's part of the sum, or what each rank adds to it."""

    exchange: Exchange
    contributions: Sequence[torch.Tensor]
    own: int = 0  # index of this rank's contribution, which lies in the packed buffer
    release: Callable[[], None] | None = None  # lets other ranks write their memory again
    in_tree: bool = False  # neighbours are added first, not all in rank order

    def result(self, dtype: torch.dtype, scale: float) -> torch.Tensor:
        """This rank's part of the sum, times ``scale``, in ``dtype``; a tensor of its own."""
        self.exchange.wait()
        parts, self.contributions = self.contributions, ()
        if len(parts) == 1:
            total = parts[0] if parts[0].dtype == dtype else parts[0].to(dtype)
            return total if scale == 1.0 else scale_in_place(total, scale)
        is_spare = self.release is None and parts[0].dtype == dtype
        received = parts[1 if self.own == 0 else 0]
        total = received if is_spare else torch.empty_like(received, dtype=dtype)
        add_up(parts, total, scale, self.in_tree)
        if self.release is not None:
            self.release()
        return total
