"""Ranks that were launched together have a process group before anything is sharded over them."""

from __future__ import annotations

import os

import torch.distributed as dist


def require_group(what: str) -> None:
    """Raise where ranks that were launched together would each be a world of one.

    Args:
        what: the function that was called.

    Raises:
        RuntimeError: ``WORLD_SIZE`` in the environment says that there are several ranks, and
            there is no process group.
    """
    launched = os.environ.get("WORLD_SIZE", "")
    if dist.is_initialized() or not launched.isdecimal() or int(launched) <= 1:
        return
    raise RuntimeError(
        f"{what}: this is rank {os.environ.get('RANK', '?')} of {launched} that were launched "
        f"together (WORLD_SIZE={launched} in the environment), but there is no process group, so "
        "each rank would work alone, on a model of its own. Before it, call "
        "torch.distributed.init_process_group(), on GPUs after "
        "torch.cuda.set_device(int(os.environ['LOCAL_RANK'])). If each rank is to have a whole "
        'model of its own, pass fully_shard(..., mesh="self"); to plan for several ranks without '
        "a group, pass plan(..., world_size=...)."
    )


def refuse_late_group(unit: str) -> None:
    """Raise where ranks joined a group after ``unit`` had been made a world of one on each.

    Raises:
        RuntimeError: the default group has several ranks.
    """
    if dist.get_world_size() > 1:
        raise RuntimeError(
            f"unit {unit!r} was sharded before this process joined a group of "
            f"{dist.get_world_size()} ranks, as a world of one, so each rank would train a model "
            "of its own. Call torch.distributed.init_process_group() before fully_shard; or, if "
            'that is what you want, pass fully_shard(..., mesh="self").'
        )
