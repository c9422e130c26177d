"""The classes of sharded tensor, and how a plain slice becomes one.

A tensor becomes sharded by a change of its ``__class__``, so a parameter stays the same Python
object. The methods and properties here answer without ``__torch_function__``, which takes four
times as long: optimizers read them for every tensor in every step. All else goes through
``HANDLERS``.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable
from typing import Any, TypeGuard

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.utils.hooks import RemovableHandle

from fsdp_compose.base.attributes import (
    Cached,
    get_grad,
    requires_grad,
    set_grad,
    set_requires_grad,
)
from fsdp_compose.base.group import Group
from fsdp_compose.base.process import here
from fsdp_compose.base.torch_private import (
    call_raw,
    enable_torch_function,
    is_torch_function_enabled,
    make_subclass,
    prefer_foreach,
    raw,
    set_dtensor_spec,
    transforms_active,
)
from fsdp_compose.base.torch_stack import is_called_by_broadcast
from fsdp_compose.comm.uneven import all_gather_uneven
from fsdp_compose.sharded.cut import own_slice, part_slice
from fsdp_compose.sharded.kept_grad import forget_grad, keep_grad
from fsdp_compose.sharded.leaf_hooks import DeferredHook, add_hook, listen
from fsdp_compose.sharded.parallel import Parallel
from fsdp_compose.sharded.reads import Dispatched, call_beneath, watch_reads
from fsdp_compose.sharded.spec import (
    Handler,
    Residence,
    ShardedWeightError,
    ShardSpec,
    refuse,
    refuse_pickle,
    require_ranks,
)
from fsdp_compose.sharded.torchstate import TorchState, memory_place, to_local, view_local
from fsdp_compose.sharded.writes import GRADIENT, PARAMETER, note_write

HANDLERS: dict[Callable[..., Any], Handler] = {}
"""By torch function; what is not here is refused. Only calls.py writes it, by these classes."""

_plain: Any = Tensor
_data_get, _data_set = _plain.data.__get__, _plain.data.__set__
_leaf_get = _plain.is_leaf.__get__


class _Sharded(TorchState):
    __slots__ = ()
    _shard_spec: ShardSpec
    _is_parameter = False
    _noted = ""  # what ranks compare writes into: parameters, their gradients, views of these
    _kept_grad: Tensor | None = None

    is_sparse = False
    is_sparse_csr = False
    is_mkldnn = False
    is_quantized = False
    is_nested = False
    layout = torch.strided
    dtype = Cached("dtype")
    device = Cached("device")

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        handler = HANDLERS.get(func)
        if handler is None:
            refuse(func, first_spec(args, kwargs))
        if transforms_active():
            return call_beneath(handler, func, args, kwargs or {})
        return handler(func, args, kwargs or {})

    @property
    def shape(self) -> torch.Size:
        return self._shard_spec.seen

    @property
    def ndim(self) -> int:
        return len(self._shard_spec.seen)

    @property
    def nbytes(self) -> int:
        return self._shard_spec.seen.numel() * self.dtype.itemsize

    @property
    def is_cuda(self) -> bool:
        return self.device.type == "cuda"

    @property
    def is_cpu(self) -> bool:
        return self.device.type == "cpu"

    @property
    def is_leaf(self) -> bool:
        return call_raw(_leaf_get, (), (self,))

    @property
    def requires_grad(self) -> bool:
        return call_raw(requires_grad, (), (self,))

    @requires_grad.setter
    def requires_grad(self, value: bool) -> None:
        here.retrained += self._is_parameter
        call_raw(set_requires_grad, (), (self, value))

    def requires_grad_(self, requires_grad: bool = True) -> Any:
        here.retrained += self._is_parameter
        return call_raw(Tensor.requires_grad_, (), (self, requires_grad))

    @property
    def grad(self) -> Tensor | None:
        """The gradient's slice, which is tagged when it is first asked for."""
        if self._shard_spec.residence.awaits:
            return self._shard_spec.answers[get_grad](get_grad, (self,), {})
        if self._kept_grad is not None:
            return self._kept_grad
        grad = call_raw(get_grad, (), (self,))
        if type(grad) is Tensor:
            tag(grad, self._shard_spec)
        if grad is not None and self._is_parameter:
            grad._noted = GRADIENT
            keep_grad(self, grad)
        return grad

    @grad.setter
    def grad(self, value: Tensor | None) -> None:
        residence = self._shard_spec.residence
        residence.is_mirrored = False
        if residence.awaits:
            self._shard_spec.answers[set_grad](set_grad, (self, value), {})
            return
        if value is not None and (type(value) is Tensor or is_torch_function_enabled()):
            if value is not self._kept_grad:  # as it is after ``p.grad /= x``
                note_write(self, "grad =", (value,), GRADIENT)
                self._shard_spec.residence.regraded = True
            value = fit_slice(value, self._shard_spec, "the gradient assigned to")
        if self._kept_grad is not None:
            forget_grad(self)
        call_raw(set_grad, (), (self, value))

    @grad.deleter
    def grad(self) -> None:
        self.grad = None

    @property
    def data(self) -> Tensor:
        """The slice, outside autograd; torch does not count what is written through it."""
        if self._is_parameter:
            self._shard_spec.residence.written += 1
        return tag_alias(call_raw(_data_get, (), (self,)), self._shard_spec, self)

    @data.setter
    def data(self, value: Tensor) -> None:
        """Another slice takes this one's place; tensors over the former memory keep its values."""
        spec, mine = self._shard_spec, to_local(self)
        local = to_local(fit_slice(value, spec, "the tensor assigned to .data of"))
        note_write(self, "data =", (value,))
        is_own = self._noted != PARAMETER  # not the parameter's memory, as that of p.detach() is
        if is_own and not is_sharded(value) and local.dtype == mine.dtype:
            mine.copy_(local)  # a gradient's slice is part of a buffer, so it is written in place
            return
        set_local(self, local)
        if self._is_parameter:
            spec.residence.moved |= memory_place(local) != memory_place(mine)
        else:
            spec.residence.regraded = True

    def dim(self) -> int:
        return len(self._shard_spec.seen)

    ndimension = dim

    def numel(self) -> int:
        return self._shard_spec.seen.numel()

    nelement = numel

    def size(self, dim: int | None = None) -> Any:
        return self._shard_spec.seen if dim is None else self._shard_spec.seen[dim]

    def stride(self, dim: int | None = None) -> Any:
        return self._shard_spec.seen_stride if dim is None else self._shard_spec.seen_stride[dim]

    def is_contiguous(self, memory_format: Any = torch.contiguous_format) -> bool:
        spec = self._shard_spec
        outline = torch.empty_strided(spec.seen, spec.seen_stride, device="meta")
        return outline.is_contiguous(memory_format=memory_format)

    def __len__(self) -> int:
        if not self._shard_spec.seen:
            raise TypeError("len() of a 0-d tensor")
        return self._shard_spec.seen[0]

    def set_(self, *args: Any, **kwargs: Any) -> Any:
        if is_torch_function_enabled():
            refuse(Tensor.set_, self._shard_spec)
        return call_raw(Tensor.set_, (), (self, *args), kwargs)

    def as_subclass(self, cls: Any) -> Any:
        if is_torch_function_enabled():
            refuse(Tensor.as_subclass, self._shard_spec)
        return call_raw(Tensor.as_subclass, (), (self, cls))

    def to_local(self) -> Tensor:
        """This rank's slice as a plain 1-D tensor: same storage, same version counter.

        With grad mode on it is part of the graph, as a view of this tensor.
        """
        residence = self._shard_spec.residence
        residence.is_taken = True
        if self._is_parameter:
            residence.is_shared = True
        return view_local(self)

    def full_tensor(self) -> Tensor:
        """The whole tensor, detached, shape and stride as before sharding.

        Every rank of the group must call it; one collective. Of a DTensor the whole plain tensor,
        which takes another collective per mesh dimension that splits it.

        Raises:
            RuntimeError: this is a slice that was unpickled, whose other ranks are not here.
        """
        spec = self._shard_spec
        require_ranks(spec, "full_tensor")
        part = gather_part(self)
        return spec.parallel.assemble(part) if spec.parallel and spec.reads_whole else part

    def register_hook(self, hook: Callable[[Tensor], Tensor | None]) -> RemovableHandle:
        """As Tensor.register_hook. A parameter's hooks run on its reduced, sharded gradient."""
        if not self.requires_grad:
            raise RuntimeError("cannot register a hook on a tensor that doesn't require gradient")
        hook = sharded_hook(hook, self._shard_spec)
        if self._is_parameter:
            listen(self, self._shard_spec)
            return add_hook(self._shard_spec.hooks.gradient, hook)
        return call_raw(Tensor.register_hook, (), (self, hook))

    def register_post_accumulate_grad_hook(self, hook: Callable[[Any], None]) -> RemovableHandle:
        """As on Tensor: called with the parameter when its reduced gradient is in ``.grad``."""
        if self._is_parameter and self.requires_grad:
            listen(self, self._shard_spec)
            hooks = self._shard_spec.hooks
            return add_hook(hooks.accumulated, DeferredHook(hook, hooks))
        return call_raw(Tensor.register_post_accumulate_grad_hook, (), (self, hook))

    def __repr__(self, *, tensor_contents: object = None) -> str:
        spec, local = self._shard_spec, to_local(self)
        grad = ", requires_grad=True" if self.requires_grad else ""
        return (
            f"{type(self).__name__}({spec.fqn!r} of unit {spec.unit!r}: rank {spec.group.rank} of "
            f"{spec.group.size} holds {spec.held}, dtype={self.dtype}, device={self.device}{grad}, "
            f"local={local!r})"
        )

    def __format__(self, format_spec: str) -> str:
        return format(self.item() if format_spec else repr(self), format_spec)

    def __copy__(self) -> Any:
        return _build(type(self), to_local(self), self._shard_spec, self.requires_grad)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        if id(self) in memo:
            return memo[id(self)]
        if not self.is_leaf:
            raise RuntimeError(
                f"deepcopy of a tensor computed from sharded {self._shard_spec.fqn!r} under "
                "autograd; call detach() first."
            )
        local = to_local(self).clone()
        spec = copy.deepcopy(self._shard_spec, memo)
        memo[id(self)] = twin = _build(type(self), local, spec, self.requires_grad)
        if self.grad is not None and not self._is_parameter:
            twin.grad = copy.deepcopy(self.grad, memo)
        return twin

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Pickle the slice and its place in the whole, so that what is unpickled is a slice too.

        Raises:
            ShardedWeightError: the slice was not asked for as such, by ``kind="local"``.
        """
        spec, local = self._shard_spec, to_local(self)
        if not spec.is_own_file:
            refuse_pickle(spec)
        if local.untyped_storage().nbytes() > local.nbytes:
            local = local.clone()
        place = (spec.fqn, spec.unit, tuple(spec.shape), spec.stride, spec.offset)
        parallel = None if spec.parallel is None else spec.parallel.to_plain()
        where = (spec.shard_numel, spec.group.rank, spec.group.size, parallel)
        return rebuild_sharded, (local, self.requires_grad, self._is_parameter, place, where)


class ShardedTensor(_Sharded, Tensor):  # type: ignore[misc, override]
    """A slice of a gradient, an optimizer state, or a tensor computed from them elementwise.

    ``to_local()`` is the plain slice of this rank, ``full_tensor()`` the whole.
    """


class ShardedParameter(Dispatched, _Sharded, torch.nn.Parameter):  # type: ignore[misc, override]
    """A slice of a parameter: ``to_local()`` is this rank's, ``full_tensor()`` the whole."""

    _is_parameter = True
    _noted = PARAMETER


class _Part:
    """A rank's part of a tensor-parallel parameter, as one tensor that can be written."""

    def __init__(self, param: Any) -> None:
        self.param = param

    def copy_(self, part: Tensor) -> None:
        to_local(self.param).copy_(part_slice(part, self.param._shard_spec))


class ShardedDTensor(Dispatched, _Sharded, DTensor):  # type: ignore[misc, override]
    """A slice of a DTensor parameter, which stays a DTensor with the same mesh and placements.

    Its memory is that of a plain tensor, which autograd and optimizers handle at their usual speed.
    """

    __slots__ = ()  # what a class must have in common with DTensor to take its place
    _is_parameter = True
    _is_param = True  # for isinstance(p, nn.Parameter)
    _noted = PARAMETER

    device_mesh = DTensor.device_mesh
    placements = DTensor.placements

    def to_local(self) -> Any:  # type: ignore[override]
        """As on the other sharded tensors; torch's setter of state dicts writes a part of it."""
        return _Part(self) if is_called_by_broadcast() else super().to_local()

    @property
    def _local_tensor(self) -> Tensor:  # type: ignore[override]
        return to_local(self)


SHARDED_PARAMETERS: frozenset[type] = frozenset((ShardedParameter, ShardedDTensor))
SHARDED = SHARDED_PARAMETERS | {ShardedTensor}


def is_sharded(tensor: object) -> TypeGuard[ShardedTensor]:
    return type(tensor) in SHARDED


def spec_of(tensor: Tensor) -> ShardSpec:
    """The spec of a sharded tensor; TypeError for any other."""
    if not is_sharded(tensor):
        raise TypeError(f"a {type(tensor).__name__} of shape {tuple(tensor.shape)} is not sharded")
    return tensor._shard_spec


def tag(tensor: Any, spec: ShardSpec) -> Any:
    """Make a 1-D local slice a sharded tensor, or a Parameter over one a sharded parameter."""
    tensor._shard_spec = spec
    if type(tensor) is Tensor:
        tensor.__class__ = ShardedTensor
    elif type(tensor) not in SHARDED:
        kind = ShardedDTensor if isinstance(tensor, DTensor) else ShardedParameter
        watch_reads(tensor, kind)
        tensor.__class__ = kind
    return tensor


def tag_alias(tensor: Any, spec: ShardSpec, source: Any) -> Any:
    """As ``tag``, of a tensor over the memory of ``source``."""
    tag(tensor, spec)._noted = source._noted
    return tensor


def set_local(tensor: Any, local: Tensor) -> None:
    """Give a sharded tensor another slice, as ``.data = local`` gives a tensor other memory."""
    call_raw(_data_set, (), (tensor, local))
    tensor.__dict__.pop("dtype", None)
    tensor.__dict__.pop("device", None)


def is_sharded_parameter(tensor: object) -> bool:
    """Whether it is a sharded parameter, not a gradient or a state."""
    return type(tensor) in SHARDED_PARAMETERS


def gather_part(tensor: Tensor) -> Tensor:
    """Gather what this rank would hold without sharding, detached; of a DTensor its local part."""
    spec, local = spec_of(tensor), to_local(tensor)
    if spec.group.size == 1:
        flat = local.clone()
    else:
        flat = all_gather_uneven(local, spec.lengths, spec.group, f"gather {spec.fqn!r}")
    return flat.as_strided(spec.shape, spec.stride)


def sharded_hook(
    hook: Callable[[Tensor], Tensor | None], spec: ShardSpec
) -> Callable[[Tensor], Tensor | None]:
    """Wrap a gradient hook: it is given the sharded gradient, and may return such or a whole one.

    ``__wrapped__`` is the hook itself, for a parameter that becomes plain again.
    """

    def on_slice(grad: Tensor) -> Tensor | None:
        if not is_sharded(grad):
            with raw():  # a new object, since the caller may keep this one
                grad = tag(grad.as_subclass(Tensor), spec)
        with enable_torch_function():
            result = hook(grad)
            return None if result is None else fit_slice(result, spec, "what a hook returned for")

    on_slice.__wrapped__ = hook  # type: ignore[attr-defined]
    return on_slice


def _build(cls: type, local: Tensor, spec: ShardSpec, requires_grad: bool) -> Any:
    if cls is ShardedDTensor and spec.parallel is not None and spec.is_dtensor:
        twin = make_subclass(ShardedDTensor, local, requires_grad)
        set_dtensor_spec(twin, spec.parallel.dtensor)
        return tag(twin, spec)
    if issubclass(cls, torch.nn.Parameter):
        return tag(torch.nn.Parameter(local, requires_grad), spec)
    return tag(local.requires_grad_(requires_grad), spec)


def rebuild_sharded(
    local: Tensor, requires_grad: bool, is_parameter: bool, place: Any, where: Any
) -> Any:
    """Build an unpickled slice. It has no group, so every reduction and gather of it raises."""
    fqn, unit, shape, stride, offset = place
    shard_numel, rank, size, *rest = where
    group = Group(None, rank, size, "none", tuple(range(size)))
    parallel = None if not rest or rest[0] is None else Parallel.from_plain(rest[0])
    cut = torch.Size(shape), tuple(stride), offset, shard_numel
    spec = ShardSpec(fqn, unit, *cut, group, Residence(), parallel=parallel, is_own_file=True)
    return _build(ShardedParameter if is_parameter else ShardedTensor, local, spec, requires_grad)


torch.serialization.add_safe_globals([rebuild_sharded])
prefer_foreach(ShardedTensor, ShardedParameter, ShardedDTensor)


def fit_slice(value: Tensor, spec: ShardSpec, what: str) -> Any:
    """Return ``value`` as a slice cut as ``spec`` says; a whole tensor is cut first."""
    if is_sharded(value):
        if value._shard_spec is spec or value._shard_spec.key == spec.key:
            return value
        found = f"a slice that holds {value._shard_spec.held} (of {value._shard_spec.fqn!r})"
    elif isinstance(value, Tensor):
        if value.shape == spec.seen:
            return tag(own_slice(value.detach(), spec).clone(), spec)
        if value.shape == (spec.stop - spec.start,) and not is_torch_function_enabled():
            return tag(value.detach(), spec)
        found = f"a plain tensor of shape {tuple(value.shape)}"
    else:
        raise TypeError(f"{what} {spec.fqn!r} is a {type(value).__name__}; wanted a tensor")
    raise ValueError(
        f"{what} {spec.fqn!r} (unit {spec.unit!r}, rank {spec.rank}) is {found}; wanted a "
        f"plain tensor of shape {tuple(spec.seen)} or a sharded one that holds {spec.held}. "
        "To write the local slice itself: p.to_local().copy_(x)."
    )


def first_spec(args: Iterable[Any], kwargs: Any) -> ShardSpec:
    """The spec of the first sharded tensor among the arguments of a call, at any depth."""
    pending = [*args, *(kwargs or {}).values()]
    while pending:
        value = pending.pop(0)
        if type(value) in SHARDED:
            return value._shard_spec
        if isinstance(value, list | tuple):
            pending += value
        elif isinstance(value, dict):
            pending += value.values()
    raise ShardedWeightError("a sharded tensor is hidden in the arguments of a torch function")
