"""Makes a parameter with its hooks sharded, and plain again; the Python object stays the same."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from fsdp_compose.base.exchange import swap_contents
from fsdp_compose.base.torch_private import (
    dtensor_spec,
    give_leaf_hooks,
    local_part,
    raw,
    set_class,
    set_dtensor_spec,
    set_local_part,
    take_leaf_hooks,
)
from fsdp_compose.sharded.cut import part_slice
from fsdp_compose.sharded.kept_grad import stop_keeping
from fsdp_compose.sharded.leaf_hooks import DeferredHook, listen
from fsdp_compose.sharded.reads import ignore_reads
from fsdp_compose.sharded.spec import ShardSpec
from fsdp_compose.sharded.tensor import (
    ShardedDTensor,
    ShardedParameter,
    ShardedTensor,
    sharded_hook,
    spec_of,
    tag,
)
from fsdp_compose.sharded.torchstate import to_local
from fsdp_compose.sharded.wrapped import Wrapper

_PLAIN: dict[type, type] = {
    ShardedTensor: Tensor,
    ShardedParameter: torch.nn.Parameter,
    ShardedDTensor: DTensor,
}


def untag(tensor: Any) -> Any:
    """Undo :func:`tag`: the same object is a plain tensor of the local slice again."""
    if type(tensor) in _PLAIN:
        stop_keeping(tensor)
        ignore_reads(tensor)
        own = tensor.__dict__
        for name in ("_shard_spec", "dtype", "device"):
            own.pop(name, None)
        set_class(tensor, _PLAIN[type(tensor)])
    return tensor


def as_own_file(tensor: Tensor) -> Any:
    """Return a detached slice that pickle may store, for a file of this rank alone."""
    return tag(to_local(tensor), replace(spec_of(tensor), is_own_file=True))


def whole_slice(whole: Tensor, spec: ShardSpec) -> Tensor:
    """Cut this rank's elements from a plain tensor of the shape that all ranks hold together."""
    return part_slice(whole if spec.parallel is None else spec.parallel.cut(whole), spec)


def take_over_hooks(
    param: Tensor,
    spec: ShardSpec,
    gradient: OrderedDict[int, Any] | None,
    accumulated: OrderedDict[int, Any] | None,
) -> None:
    """Let a plain leaf's hooks run as those of a sharded parameter, in the tables they lie in."""
    if gradient is not None:
        gradient.update({key: sharded_hook(hook, spec) for key, hook in gradient.items()})
        spec.hooks.gradient = gradient
    if accumulated is not None:
        hooks = {key: DeferredHook(hook, spec.hooks) for key, hook in accumulated.items()}
        accumulated.update(hooks)
        spec.hooks.accumulated = accumulated
    if gradient or accumulated:
        listen(param, spec)


def open_dtensor(param: Any) -> None:
    """Put an empty plain tensor into a DTensor parameter, which can be tagged then.

    The Python object stays. Take its gradient and its gradient hooks from it before.
    """
    with raw():
        accumulated = take_leaf_hooks(param)[1]
        plain = torch.nn.Parameter(local_part(param).new_empty(0), param.requires_grad)
        swap_contents(param, plain)
        give_leaf_hooks(param, None, accumulated)
    set_local_part(param, None)


def close_dtensor(param: Any, part: Tensor, spec: ShardSpec) -> None:
    """Undo ``open_dtensor``: make an untagged parameter the DTensor around ``part`` again."""
    assert spec.parallel is not None
    with torch.no_grad():
        whole: Any = torch.nn.Parameter(spec.parallel.wrap(part.detach()), param.requires_grad)
        swap_contents(param, whole)
    set_local_part(param, local_part(whole))
    set_dtensor_spec(param, dtensor_spec(whole))


def open_wrapped(param: Any, wrapper: Wrapper) -> None:
    """Make a parameter of a class around a tensor a plain, empty one, which can be tagged then.

    The Python object stays. Take its gradient and its gradient hooks from it before.
    """
    with raw():
        accumulated = take_leaf_hooks(param)[1]
        dense = wrapper.unwrap(param).detach()
        for name in vars(wrapper.build(dense)):
            param.__dict__.pop(name, None)
        swap_contents(param, torch.nn.Parameter(dense.new_empty(0), param.requires_grad))
        set_class(param, torch.nn.Parameter)
        give_leaf_hooks(param, None, accumulated)


def close_wrapped(param: Any, dense: Tensor, wrapper: Wrapper) -> None:
    """Undo ``open_wrapped``: give an untagged parameter its class, around ``dense``, again."""
    with torch.no_grad():
        whole: Any = torch.nn.Parameter(wrapper.build(dense.detach()), param.requires_grad)
        swap_contents(param, whole)
    set_class(param, type(whole))
    param.__dict__.update(vars(whole))
