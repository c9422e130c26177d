"""The handle of a save that a thread writes. One that fails is never silent."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from pathlib import Path

from fsdp_compose.base.process import here

_logger = logging.getLogger("fsdp_compose")


class Saving:
    """A save that may still be under way.

    One that failed, and whose handle is gone without a ``wait``, is logged as an error.

    Example:
        >>> saving = save_checkpoint("latest", fully_shard(nn.Linear(2, 2)), asynchronous=True)
        >>> saving.wait()  # raises what went wrong
        >>> saving.done()
        True
    """

    def __init__(self) -> None:
        self._end: _End | None = None
        self._outcome: _Outcome | None = None

    def done(self) -> bool:
        """Whether it has ended, well or not."""
        return self._end is None or self._end.has_come

    def wait(self) -> None:
        """Return when the checkpoint is on disk and committed.

        Raises:
            RuntimeError: the save failed, on whatever rank; the previous checkpoint is untouched.
        """
        if self._end is not None:
            self._end.wait()
        if self._outcome is not None and self._outcome.error is not None:
            self._outcome.is_told = True
            raise self._outcome.error

    def __del__(self) -> None:
        if self._outcome is not None:
            self._outcome.release()


class _End:
    """Whether a thread has ended; Python takes it for ended after Ctrl-C in a ``join``."""

    def __init__(self) -> None:
        self.is_reached, self.process = False, os.getpid()

    @property
    def has_come(self) -> bool:
        return self.is_reached or self.process != os.getpid()  # a fork has no such thread

    def wait(self) -> None:
        nap = 0.001
        while not self.has_come:
            here.clock.sleep(nap)
            nap = min(2 * nap, 0.05)


class _Outcome:
    """What went wrong, for the handle; or for the log, once nobody has the handle."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.error: BaseException | None = None
        self.is_held, self.is_told = True, False

    def fail(self, error: BaseException) -> None:
        self.error = error
        self._tell()

    def release(self) -> None:
        self.is_held = False
        self._tell()

    def _tell(self) -> None:
        if self.error is None or self.is_held or self.is_told:
            return
        self.is_told = True
        _logger.error(
            "save_checkpoint: the asynchronous save to %s failed, and nobody waited for it: %s: %s",
            self.path, type(self.error).__name__, self.error,
        )  # fmt: skip


def start_saving(path: Path, write: Callable[[], None]) -> Saving:
    """Call ``write`` in a thread, for which the next save or load waits."""
    outcome, end, saving = _Outcome(path), _End(), Saving()

    def run() -> None:
        try:
            write()
        except BaseException as error:
            outcome.fail(error)
        finally:
            end.is_reached = True

    here.clock.thread(target=run, name=f"save {path}").start()
    saving._outcome, saving._end = outcome, end
    here.saves.append(end)
    return saving
