"""The gather and reduce streams of a device, and copies between host and device on them.

On a CPU there are no streams, and a copy to the host is the tensor itself.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import cache, cached_property
from typing import Any

import torch

from fsdp_compose.base.process import here

_HERE = nullcontext()


class Mark:
    """A place in a stream. Once nobody refers to it, its event is recorded again."""

    __slots__ = ("event", "unused")

    def __init__(self, event: Any, unused: list[Any]) -> None:
        self.event, self.unused = event, unused

    def __del__(self) -> None:
        self.unused.append(self.event)

    @property
    def device(self) -> torch.device:
        """The device of its stream."""
        return self.event.device

    def query(self) -> bool:
        """Whether the device has passed it."""
        return bool(self.event.query())

    def synchronize(self) -> None:
        """Let the host wait until the device has passed it."""
        self.event.synchronize()


class _Scope(threading.local):
    """Inside, a stream is the current one. Made once; entered by any thread, also inside itself."""

    def __init__(self, device: torch.device, stream: Any) -> None:
        self.device, self.stream = device, stream
        self.outer: list[tuple[Any, Any]] = []

    def __enter__(self) -> None:
        module = _module(self.device)
        # Two streams, as the current device may be another one than the stream's.
        self.outer.append((module.current_stream(self.device), module.current_stream()))
        module.set_stream(self.stream)

    def __exit__(self, *error: object) -> None:
        module = _module(self.device)
        for stream in self.outer.pop():
            module.set_stream(stream)


@dataclass(frozen=True, eq=False)
class Streams:
    """Side streams of one device; both are None where the device has no streams.

    Gathered parameters are allocated and freed on ``gather``: the allocator then hands their
    memory only to later gathers, which are ordered behind the free, so that no block has to be
    kept alive with ``record_stream`` and memory is the same every step.
    """

    device: torch.device
    gather: Any
    reduce: Any
    behind: Any = None  # the event by which a side stream waits for the current one; reused
    unused: list[Any] = field(default_factory=list)  # events of marks that are gone
    held: list[tuple[torch.Tensor, Mark | None]] = field(default_factory=list)  # see ``hold``

    @property
    def current(self) -> Any:
        return None if self.gather is None else _module(self.device).current_stream(self.device)

    def on(self, stream: Any) -> AbstractContextManager[object]:
        """Issue work on ``stream``, ordered behind what the current stream was given so far."""
        if stream is not None:
            stream.wait_event(self.current.record_event(self.behind))
        return self.beside(stream)

    def beside(self, stream: Any) -> AbstractContextManager[object]:
        """Issue work on ``stream``, ordered behind nothing but what it was given itself."""
        if stream is None:
            return _HERE
        return self._scopes[id(stream)]

    @cached_property
    def _scopes(self) -> dict[int, _Scope]:
        return {id(stream): _Scope(self.device, stream) for stream in (self.gather, self.reduce)}

    def record(self, stream: Any) -> Mark | None:
        """A mark in ``stream`` that another stream can wait for."""
        if stream is None:
            return None
        event = self.unused.pop() if self.unused else _module(self.device).make_event()
        return Mark(stream.record_event(event), self.unused)

    def wait(self, mark: Mark | None) -> None:
        """Order the current stream, not the host, behind ``mark``."""
        if mark is not None:
            self.current.wait_event(mark.event)

    def hold(self, tensor: torch.Tensor, mark: Mark | None) -> None:
        """Keep memory of the current stream that a side stream reads until it comes to ``mark``.

        The next call lets go of it, once the current stream is behind the mark: by then it mostly
        is. So at most one tensor is kept.
        """
        for _, before in self.held:
            self.wait(before)
        self.held[:] = [(tensor, mark)]


def join_graph(streams: Streams) -> None:
    """Let the current stream wait for what a CUDA graph runs beside it."""
    if streams.gather is None or not is_capturing():
        return
    for stream in (streams.gather, streams.reduce):
        with streams.beside(stream):
            is_part = is_capturing()
        if is_part:
            streams.current.wait_stream(stream)


def make_streams(device: torch.device) -> Streams:
    """Side streams for ``device``; high priority, so that gathers are not queued behind compute."""
    if device.type in ("cpu", "meta", "mps"):  # torch.mps has no streams
        return Streams(device, None, None)
    module = _module(device)
    first, second = (module.Stream(device, priority=-1) for _ in range(2))
    return Streams(device, first, second, module.make_event())


def is_capturing() -> bool:
    """Whether a CUDA graph is captured: the host must not ask what the device has done."""
    return torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()


def may_compare(device: torch.device) -> bool:
    """Whether checks may read what lies on ``device``: on a CPU, or in debug mode, which waits."""
    return device.type == "cpu" or (here.is_debugging and not is_capturing())


def turn_to(device: torch.device) -> None:
    """Make ``device`` this thread's current one.

    A new thread begins with the host's first device, and to make an event of another one there
    takes half a gigabyte of that first device.
    """
    torch.accelerator.set_device_index(device)


def copy_shard(into: torch.Tensor, shard: torch.Tensor) -> None:
    """Copy a shard, from the host without waiting: the device casts it, not the host."""
    if shard.device != into.device and shard.dtype != into.dtype:
        shard = shard.to(into.device, non_blocking=True)
    into.copy_(shard, non_blocking=True)


def copy_to_host(tensor: torch.Tensor, pin_memory: bool) -> torch.Tensor:
    """Start a copy to the host; it is there once the device has passed what follows it."""
    if tensor.device.type == "cpu":
        return tensor
    host = torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu", pin_memory=pin_memory)
    return host.copy_(tensor, non_blocking=True)


def await_copies(host: torch.Tensor) -> None:
    """Let the host wait for a copy to ``host`` that somebody started and did not wait for."""
    if host.device.type == "cpu" and torch.cuda.is_initialized():
        torch.cuda.current_stream().synchronize()


class _Accelerator:
    """Streams and events of torch itself, which run less Python than those of ``torch.cuda``."""

    Stream = torch.Stream

    def __init__(self, device: torch.device) -> None:
        self.device = device
        index: int | None = device.index
        self.index = torch.accelerator.current_device_index() if index is None else index

    def make_event(self) -> torch.Event:
        return torch.Event(self.device)

    def current_stream(self, device: torch.device | None = None) -> torch.Stream:
        """The one that is current on the device; without ``device`` on the current device."""
        return torch.accelerator.current_stream(None if device is None else self.index)

    def set_stream(self, stream: torch.Stream) -> None:
        """Make it current on its device, and that the current device."""
        torch.accelerator.set_stream(stream)


_module: Callable[[torch.device], Any] = cache(_Accelerator)
