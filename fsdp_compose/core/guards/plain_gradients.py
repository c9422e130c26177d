"""Gradients that were cleared or set on the plain parameters over a unit reach its own."""

from __future__ import annotations

from collections.abc import Iterable

from fsdp_compose.core.state import Unit


def share_plain_gradients(units: Iterable[Unit]) -> None:
    """Have the parameters of ``units`` see what an optimizer over plain ones did to gradients.

    For whoever reads ``.grad`` ahead of the next backward: what such an optimizer's ``zero_grad()``
    has cleared is still there.
    """
    for unit in units:
        for bucket in unit.buckets:
            if bucket.history.mirror is not None:
                bucket.history.mirror.share_gradients()
