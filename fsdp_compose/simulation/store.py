"""The key-value store that the ranks of a simulation share; who waits for a key lets others run."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from fsdp_compose.simulation.scheduler import Ended, Scheduler

WHERE = "?where"
"""A key that every prefix of a store has: its value is the prefix."""


_Store: Any = dist.Store  # type: ignore[attr-defined]


class SimulatedStore(_Store):
    """One dictionary for all ranks; the names of its methods are those that torch calls."""

    def __init__(self, scheduler: Scheduler) -> None:
        super().__init__()
        self.scheduler = scheduler
        self.values: dict[str, bytes] = {}

    def _check_alive(self) -> None:
        task = self.scheduler.running
        if task is not None and task.rank in self.scheduler.killed:
            raise Ended

    def set(self, key: str, value: str | bytes) -> None:
        self._check_alive()
        self.values[key] = value.encode() if isinstance(value, str) else bytes(value)

    def get(self, key: str) -> bytes:
        if key.endswith(WHERE):
            return key.removesuffix(WHERE).encode()
        self.wait([key])
        return self.values[key]

    def check(self, keys: Sequence[str]) -> bool:
        self._check_alive()
        return all(key in self.values for key in keys)

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        """Return when all keys are there.

        Raises:
            dist.DistStoreError: they are not, after ``timeout`` of the simulation's time.
        """
        self._check_alive()
        seconds = (timeout or self.timeout).total_seconds()
        names = ", ".join(keys)

        def are_there() -> bool:
            return all(key in self.values for key in keys)

        if not self.scheduler.wait(are_there, f"read {names} in the store", seconds):
            raise dist.DistStoreError(f"wait timeout after {seconds:g} s, keys: {names}")

    def add(self, key: str, value: int) -> int:
        self._check_alive()
        total = int(self.values.get(key, b"0")) + value
        self.values[key] = str(total).encode()
        return total

    def compare_set(self, key: str, expected: str | bytes, desired: str | bytes) -> bytes:
        self._check_alive()
        wanted = expected.encode() if isinstance(expected, str) else bytes(expected)
        found = self.values.get(key)
        if found == wanted or (found is None and not wanted):
            self.set(key, desired)
        return self.values.get(key, wanted)

    def append(self, key: str, value: str | bytes) -> None:
        more = value.encode() if isinstance(value, str) else bytes(value)
        self.values[key] = self.values.get(key, b"") + more

    def multi_get(self, keys: Sequence[str]) -> list[bytes]:
        return [self.get(key) for key in keys]

    def multi_set(self, keys: Sequence[str], values: Sequence[str | bytes]) -> None:
        for key, value in zip(keys, values, strict=True):
            self.set(key, value)

    def delete_key(self, key: str) -> bool:
        self._check_alive()
        return self.values.pop(key, None) is not None

    def num_keys(self) -> int:
        return len(self.values)

    def has_extended_api(self) -> bool:
        return True

    # What torch's own classes in C++ call them.
    deleteKey, getNumKeys = delete_key, num_keys  # noqa: N815
