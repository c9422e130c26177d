"""How torch's own state-dict functions and optimizers save and load a sharded tensor.

``torch.distributed.checkpoint.state_dict`` walks over state and gathers DTensors, and
``Optimizer.load_state_dict`` casts its values to the type of the parameter. Neither asks
``__torch_function__``. So a sharded tensor claims to be a DTensor during that walk, and a parameter
checks the value during that cast.
"""

from __future__ import annotations

import contextlib
import zlib
from collections.abc import Iterator, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex
from torch.distributed.checkpoint.planner import WriteItem
from torch.distributed.checkpoint.state_dict_saver import async_save
from torch.distributed.tensor import DTensor, Replicate

from fsdp_compose.base.torch_private import call_raw, is_torch_function_enabled, set_class
from fsdp_compose.base.torch_stack import (
    below_dispatch,
    find_calling_collective,
    is_asked_by_state_walk,
    is_called_by_state_walk,
    value_under_load,
)
from fsdp_compose.comm.collectives import all_reduce, gather_objects
from fsdp_compose.sharded.advice import STAGING
from fsdp_compose.sharded.chunks import find_chunk, list_chunks, list_write_items
from fsdp_compose.sharded.reads import call_slices
from fsdp_compose.sharded.spec import ShardSpec, refuse

_Base: Any = object

_NO_MESH = (
    "a sharded tensor is no DTensor, and has no mesh and no placements: give model.load_state_dict "
    "whole tensors, on every rank, in place of what distribute_tensor would make of them."
)

_checked: ContextVar[bool] = ContextVar("fsdp_compose_checked_optimizer_state", default=False)


@contextlib.contextmanager
def checked_state() -> Iterator[None]:
    """Open a scope in which ``Optimizer.load_state_dict`` is given state that is known to fit."""
    token = _checked.set(True)
    try:
        yield
    finally:
        _checked.reset(token)


@dataclass(frozen=True)
class _Device:
    """All that torch's walk asks of a mesh."""

    device_type: str


@dataclass(frozen=True)
class _Whole:
    """All that torch's walk asks of a gathered DTensor."""

    full: Tensor

    def to_local(self) -> Tensor:
        return self.full


def to_local(tensor: Any) -> Tensor:
    """The slice as a plain 1-D tensor outside autograd: same storage, same version counter."""
    with below_dispatch():
        return call_raw(Tensor.detach, (), (tensor,))


def view_local(tensor: Any) -> Tensor:
    """As ``to_local``; with grad mode on it is part of the graph, as a view of ``tensor``."""
    if torch.is_grad_enabled() and tensor.requires_grad:
        return cast(Tensor, call_slices(Tensor.as_subclass, (tensor, Tensor), {}))
    return to_local(tensor)


def memory_place(local: Tensor) -> tuple[object, ...]:
    """Where a slice lies and as what; a slice without elements has no address."""
    storage = local.untyped_storage()
    return local.dtype, local.device, local.data_ptr(), storage.data_ptr()


class TorchState(_Base):
    """Mixin of the sharded tensors."""

    __slots__ = ()
    _shard_spec: ShardSpec

    @property
    def __class__(self) -> Any:
        """DTensor for torch's walk over a state dict, which gathers those; else the class."""
        return DTensor if is_asked_by_state_walk() else type(self)

    @__class__.setter
    def __class__(self, kind: type) -> None:
        set_class(self, kind)

    def is_complex(self) -> bool:
        """As on Tensor. Collectives call it, also where torch lets them ask nothing else (2.11)."""
        collective = find_calling_collective()
        if collective is not None and is_torch_function_enabled():
            refuse(collective, self._shard_spec)
        return bool(self.dtype.is_complex)

    def __create_write_items__(self, fqn: str, object: Any) -> list[WriteItem]:
        """What torch.distributed.checkpoint asks of a DTensor when it saves."""
        return list_write_items(fqn, self._shard_spec, to_local(self))

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        """What torch.distributed.checkpoint asks of a DTensor when it loads."""
        return list_chunks(self._shard_spec, to_local(self))

    def __get_tensor_shard__(self, index: MetadataIndex) -> Tensor:
        """What torch.distributed.checkpoint writes to a file, or reads from one."""
        return find_chunk(self._shard_spec, to_local(self), index)

    def is_floating_point(self) -> bool:
        """As on Tensor; if ``Optimizer.load_state_dict`` asks, refuse state that does not fit."""
        found = value_under_load()
        if found is not None and not _checked.get():
            check_loaded(self._shard_spec, *found)
        return self.dtype.is_floating_point

    @property
    def device_mesh(self) -> Any:
        """What torch's walk reads as the mesh of a DTensor."""
        if not is_called_by_state_walk():
            raise AttributeError(_NO_MESH)
        return _Device(self.device.type)

    @property
    def placements(self) -> tuple[Any, ...]:
        """What torch's walk reads as the placements of a DTensor."""
        if not is_called_by_state_walk():
            raise AttributeError(_NO_MESH)
        return ()

    @property
    def _local_tensor(self) -> Tensor:
        """Refuse what the stager of a ``FileSystemWriter`` copies DTensors by."""
        if not is_called_by_state_walk():
            raise AttributeError("_local_tensor")
        refuse(async_save, self._shard_spec, instead=STAGING)

    def redistribute(self, device_mesh: Any = None, placements: Sequence[Any] = ()) -> Any:
        """Gather the whole for torch's walk; every rank must gather the same parameter."""
        is_whole = all(isinstance(placement, Replicate) for placement in placements)
        if not (is_whole and is_called_by_state_walk()):
            refuse(DTensor.redistribute, self._shard_spec)
        _agree_on_name(self._shard_spec, self.device)
        return _Whole(self.full_tensor())


def _agree_on_name(spec: ShardSpec, device: torch.device) -> None:
    """Raise on every rank where ranks are about to gather slices of different parameters."""
    number = zlib.crc32(repr((spec.fqn, *spec.whole_shape)).encode())
    both = torch.tensor([number, -number], device=device)
    for group in spec.whole_groups:
        if group.size > 1:
            low, high = all_reduce(both.clone(), group, "max").tolist()
            if low != -high:
                names = gather_objects(spec.fqn, group, "get_state_dict")
                raise RuntimeError(
                    f"get_state_dict(full_state_dict=True): the ranks gather {names} at the same "
                    "time, since their optimizers list the parameters in different orders. Call "
                    "fsdp_compose.optim_state_dict(module, optimizer), which matches them by name."
                )


def check_loaded(spec: ShardSpec, key: Any, value: Tensor) -> None:
    """Raise unless ``value``, the state ``key`` of a sharded parameter, is cut as the parameter is.

    Raises:
        RuntimeError: it is cut in another way, or is whole.
    """
    other = value.__dict__.get("_shard_spec")
    if isinstance(other, ShardSpec):
        if spec.is_cut_like(other):
            return
        mesh = " of another mesh" if other.key == spec.key else ""
        held = other.held if mesh else other.held_unlike(spec)
        found = f"{held}, cut over {other.group.size} ranks{mesh}"
    elif isinstance(value, DTensor) or (value.numel() > 1 and value.shape == spec.whole_shape):
        found = f"a whole tensor of shape {tuple(value.shape)}"
    else:
        return
    raise RuntimeError(
        f"optimizer.load_state_dict: state {key!r} of {spec.fqn!r} (unit {spec.unit!r}) is "
        f"{found}; rank {spec.group.rank} of {spec.group.size} holds {spec.held}, so step() would "
        "fail. The optimizer is unchanged. Call fsdp_compose.load_optim_state_dict(module, "
        "optimizer, state_dict), which cuts state of any layout as the parameters are cut."
    )
