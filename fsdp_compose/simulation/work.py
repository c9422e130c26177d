"""Communication under way, as torch hands it out: waiting for it lets other ranks run."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from fsdp_compose.simulation.network import Network, SimulatedExchange


class SimulatedWork(dist.Work):
    """What a call of a process group returns; it keeps itself alive until it is over."""

    def __init__(
        self,
        network: Network,
        exchange: SimulatedExchange,
        purpose: str,
        seconds: float,
        outputs: list[Any],
    ) -> None:
        super().__init__()
        self.network, self.exchange, self.purpose = network, exchange, purpose
        self.seconds, self.outputs = seconds, outputs

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Return True when the data is there.

        Raises:
            RuntimeError: a rank that was to take part has ended, or the timeout is over.
        """
        given = 0.0 if timeout is None else timeout.total_seconds()
        self.network.wait(self.exchange, self.purpose, given if given > 0 else self.seconds)
        return True

    def is_completed(self) -> bool:
        """Whether the data is there, which it may be soon: others get to run."""
        self.network.scheduler.may_switch()
        return self.exchange.is_done or bool(self.exchange.error)

    def is_success(self) -> bool:
        return self.exchange.is_done and not self.exchange.error

    def result(self) -> list[torch.Tensor]:
        return self.outputs

    def get_future(self) -> Any:
        """A future that is done: whoever asks for one would wait for it without letting others run.

        Raises:
            RuntimeError: as ``wait``.
        """
        self.wait()
        future: torch.futures.Future[Any] = torch.futures.Future()
        future.set_result(self.outputs)
        return future

    # What torch's own classes in C++ call it.
    getFuture = get_future  # noqa: N815


class JoinedWork(SimulatedWork):
    """Several calls that were made as one."""

    def __init__(self, works: list[SimulatedWork]) -> None:
        last = works[-1]
        super().__init__(last.network, last.exchange, last.purpose, last.seconds, [])
        self.works = works
        self.outputs = [output for work in works for output in work.outputs]

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Wait for all of them, also where one fails: nothing of the call is under way then."""
        errors: list[RuntimeError] = []
        for work in self.works:
            try:
                work.wait(timeout)
            except RuntimeError as error:
                errors.append(error)
        if errors:
            raise errors[0]
        return True
