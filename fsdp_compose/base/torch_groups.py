"""Torch's private state of process groups, which a simulation replaces; tried on 2.11 to 2.15."""

from __future__ import annotations

import hashlib
import sys
import weakref
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from fsdp_compose.base import torch_private

_c10d: Any = dist.distributed_c10d
_c: Any = torch._C._distributed_c10d


_made: weakref.WeakKeyDictionary[Any, Counter[tuple[int, ...]]] = weakref.WeakKeyDictionary()
"""By default group, how many groups over the same ranks ``ordered_group`` has made."""


def ordered_group(ranks: Sequence[int]) -> Any:
    """A group in which ``ranks`` are numbered as listed; only they call, all of them.

    Torch would name it by how many groups this rank is in, and ranks that are in different numbers
    of them would wait for each other for ever. Where a device is bound to the default group, NCCL
    would split that, which takes all its ranks.
    """
    order = {"sort_ranks": False} if torch_private.KEEPS_RANK_ORDER else {}
    world, make_name = _c10d.group.WORLD, _c10d._hash_ranks_to_str
    made = _made.setdefault(world, Counter())
    made[tuple(ranks)] += 1
    text = f"fsdp_compose {tuple(ranks)} {made[tuple(ranks)]}"

    def name(given: object) -> str:
        _c10d._hash_ranks_to_str = make_name  # a simulated rank may go on before this one
        return hashlib.sha1(text.encode(), usedforsecurity=False).hexdigest()

    _c10d._hash_ranks_to_str = name
    device, world.bound_device_id = world.bound_device_id, None
    try:
        return _c10d.new_group(list(ranks), use_local_synchronization=True, **order)
    finally:
        world.bound_device_id = device
        if _c10d._hash_ranks_to_str is name:
            _c10d._hash_ranks_to_str = make_name


class RankWorld(_c10d._World):
    """The process groups that one simulated rank knows, in place of the process's."""

    pg_map: Any = None
    pg_names: Any = None
    pg_group_ranks: Any = None
    pg_backend_config: Any = None
    tags_to_pg: Any = None
    pg_to_tag: Any = None
    group_count = 0

    def __init__(self) -> None:
        super().__init__()
        self.pg_map, self.pg_names, self.pg_group_ranks = {}, {}, {}
        self.pg_backend_config, self.tags_to_pg, self.pg_to_tag = {}, {}, {}


def get_world() -> Any:
    """What torch.distributed knows of this process's groups."""
    return _c10d._world


def set_world(world: Any) -> None:
    """Let torch.distributed know the groups of another rank."""
    _c10d._world = world


def get_dispatch() -> dict[str, Any] | None:
    """What scopes of DTensor change in the process; None before DTensor was imported.

    Its handlers of operators (``loss_parallel``) and, in torch versions that do not keep it by
    thread, whether plain operands count as replicated.
    """
    tensor: Any = sys.modules.get("torch.distributed.tensor")
    if tensor is None:
        return None
    held = vars(tensor.DTensor._op_dispatcher)
    names = ("_custom_op_handlers", "_allow_implicit_replication")
    return {name: held[name] for name in names if name in held}


def set_dispatch(values: dict[str, Any]) -> None:
    """Let DTensor have what another rank's scopes changed."""
    vars(sys.modules["torch.distributed.tensor"].DTensor._op_dispatcher).update(values)


@contextmanager
def groups_of_class(
    group: type, rendezvous: Callable[..., Any], init: Callable[..., Any], rank: Callable[[], Any]
) -> Iterator[None]:
    """Scope in which gloo's groups are of the class ``group``, and each thread has its own.

    Args:
        rendezvous: in place of torch's, gives the store, the rank and the number of ranks.
        init: in place of ``init_process_group``.
        rank: gives an object that stands for the rank that runs; meshes of two ranks differ, so
            that what DTensor remembers for one is not found for the other.
    """
    make_mesh: Any = DeviceMesh.__init__

    def init_mesh(mesh: Any, *args: Any, **kwargs: Any) -> None:
        make_mesh(mesh, *args, **kwargs)
        mesh._thread_id = rank()

    replaced: list[tuple[Any, str, Any]] = [
        (_c10d, "ProcessGroupGloo", group),
        (_c10d, "rendezvous", rendezvous),
        (_c10d, "init_process_group", init),
        (dist, "init_process_group", init),
        (DeviceMesh, "__init__", init_mesh),
        (sys, "excepthook", sys.excepthook),  # init_process_group wraps it
    ]
    before = [getattr(owner, name) for owner, name, _ in replaced]
    isolate = _c._set_thread_isolation_mode
    try:
        isolate(True)
        for owner, name, value in replaced:
            setattr(owner, name, value)
        yield
    finally:
        for (owner, name, _), value in zip(replaced, before, strict=True):
            setattr(owner, name, value)
        isolate(False)


def set_device_guard() -> None:
    """Let threads that end enter FakeTensorMode, as DTensor does, on a machine without a GPU.

    In a build for CUDA the first entrance registers a device guard that is gone with its thread,
    and the next one ends the process. The backward comes first, since autograd asks that guard how
    many GPUs to start threads for, once.
    """
    if torch.version.cuda and not torch.cuda.is_available():
        torch.ones((), device="cpu", requires_grad=True).backward()
        torch._C._ensureCUDADeviceGuardSet()
