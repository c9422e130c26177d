"""A rank that leaves a call says so in the store, where those that wait in the call look."""

from __future__ import annotations

import torch.distributed as dist

from fsdp_compose.base.group import Group
from fsdp_compose.base.torch_private import default_store


def leave_call(group: Group, error: BaseException) -> None:
    """Tell the ranks that wait in the same call that this one has left it.

    Their messages on this group would no longer meet; it must not be used again.
    """
    reason = " ".join(f"{type(error).__name__}: {error}".split())
    try:
        default_store().set(group.note, f"rank {dist.get_rank()} left {group.purpose}: {reason}")
    except (RuntimeError, ValueError):
        pass  # the rank that keeps the store has died, which the others notice


def raise_if_left(group: Group) -> None:
    """Raise where a rank has left the call over ``group``, and say why it did.

    Raises:
        RuntimeError: one has.
    """
    text = None
    try:
        if group.note and default_store().check([group.note]):
            text = default_store().get(group.note).decode(errors="replace")
    except (RuntimeError, ValueError):
        pass  # the rank that keeps the store has died; the wait itself will tell
    if text is not None:
        raise RuntimeError(text)
