"""Does work on a bucket's buffers on a stream, named in the log and in a profile."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

from fsdp_compose.base.streams import Streams
from fsdp_compose.base.torch_private import profiler_enabled
from fsdp_compose.buckets.bucket import Bucket, logger


def is_unseen(stream: Any) -> bool:
    """Whether work needs no ``issue``: there is no stream, and no log or profile names it."""
    return stream is None and not profiler_enabled() and not logger.isEnabledFor(logging.DEBUG)


def issue(
    streams: Streams, stream: Any, phase: str, bucket: Bucket, nbytes: int, work: Callable[[], None]
) -> None:
    """Do ``work`` on a stream, where there are streams, and name it in the log and in a profile."""
    with streams.on(stream), bucket.noted(phase, nbytes):
        work()
