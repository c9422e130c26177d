"""Ctrl-C waits for the few lines that must not end halfway."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType


class _Waiting:
    """Stands for the program's answer to Ctrl-C, and notes what came."""

    def __init__(self) -> None:
        self.came: tuple[int, FrameType | None] | None = None

    def __call__(self, number: int, frame: FrameType | None) -> None:
        self.came = number, frame


@contextmanager
def hold_interrupts() -> Iterator[None]:
    """Inside, Ctrl-C is noted; the program's answer, KeyboardInterrupt as a rule, comes at the end.

    Nothing inside may wait for other ranks. Python answers signals in the main thread only, so that
    in others there is nothing to hold.
    """
    answer = None
    if threading.current_thread() is threading.main_thread():
        answer = signal.getsignal(signal.SIGINT)
    if not callable(answer) or isinstance(answer, _Waiting):  # ignored, or held already
        yield
        return
    waiting = _Waiting()
    signal.signal(signal.SIGINT, waiting)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, answer)
        if waiting.came is not None:
            answer(*waiting.came)
