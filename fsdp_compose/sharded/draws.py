"""Random numbers for sharded tensors: those that the whole would have got, cut.

Each rank draws the whole and keeps its slice, so the numbers do not depend on how many ranks there
are, and one process that is seeded alike gets the same. All ranks draw with the generator of the
first one. Where a rank's own generator was in the same state, it has advanced with it; where it was
in another, as with a seed for each rank, it goes on where it was.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor

from fsdp_compose.base.group import Group
from fsdp_compose.base.torch_private import call_raw
from fsdp_compose.base.torch_stack import is_called_by
from fsdp_compose.comm.small_reduce import reduce_alike
from fsdp_compose.sharded import ops
from fsdp_compose.sharded.cut import own_slice
from fsdp_compose.sharded.spec import ShardSpec, refuse, require_ranks
from fsdp_compose.sharded.tensor import first_spec, is_sharded, tag

__all__ = ["as_first_rank", "draw_from", "draw_into", "draw_like", "find_generator", "in_state"]


def draw_into(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Call what overwrites a tensor with random numbers, such as ``p.normal_()``."""
    tensor, rest, kwargs = _split_arguments(func, "tensor", args, kwargs)
    whole = _draw(func, tensor, lambda room: func(room, *rest, **kwargs), kwargs.get("generator"))
    with torch.no_grad() if func in ops.INITIAL else contextlib.nullcontext():
        call_raw(Tensor.copy_, (), (tensor, own_slice(whole, tensor._shard_spec)))
    return tensor


def draw_like(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Call ``torch.randn_like`` and the like; the result is sharded as the first argument is."""
    tensor, rest, kwargs = _split_arguments(func, "input", args, kwargs)
    spec = tensor._shard_spec
    if kwargs.get("device") not in (None, tensor.device):
        refuse(func, spec, "the numbers would be on another device")
    settings = {k: v for k, v in kwargs.items() if k != "requires_grad"}
    whole = _draw(func, tensor, lambda room: func(room, *rest, **settings), kwargs.get("generator"))
    local = own_slice(whole, spec).clone()
    return tag(local, spec).requires_grad_(bool(kwargs.get("requires_grad")))


def draw_from(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Call ``torch.bernoulli``, whose argument, the probability of each number, is gathered."""
    tensor, rest, kwargs = _split_arguments(func, "input", args, kwargs)
    if tensor._shard_spec.parallel is not None:
        refuse(func, tensor._shard_spec, "it is split by tensor parallelism")
    odds = tensor.full_tensor()
    whole = _draw(func, tensor, lambda _: func(odds, *rest, **kwargs), kwargs.get("generator"))
    return tag(own_slice(whole, tensor._shard_spec).clone(), tensor._shard_spec)


def _split_arguments(
    func: Any, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[Any, tuple[Any, ...], dict[str, Any]]:
    """The sharded tensor, which may be given by ``name``, and the other arguments of a draw.

    Refused are a plain tensor to draw into, a sharded one to draw with, and ``init.sparse_``.
    """
    if not args:
        args, kwargs = (kwargs[name],), {k: v for k, v in kwargs.items() if k != name}
    tensor, *rest = args
    others = (*rest, *kwargs.values())
    if (
        not is_sharded(tensor)
        or any(map(is_sharded, others))
        or is_called_by(torch.nn.init.sparse_)
    ):
        refuse(func, first_spec((tensor, *others), {}))
    require_ranks(tensor._shard_spec, getattr(func, "__name__", "a draw"))
    return tensor, tuple(rest), kwargs


def _draw(
    func: Any, tensor: Any, call: Callable[[Tensor], Tensor], given: torch.Generator | None
) -> Tensor:
    """What ``call`` draws for a whole tensor, with the state that the first rank's generator has.

    Args:
        call: takes a tensor of the whole's shape, whose values mean nothing.
        given: the generator that the caller named; by default that of the device.
    """
    spec, device = tensor._shard_spec, tensor.device
    room = torch.empty_strided(spec.seen, spec.seen_stride, dtype=tensor.dtype, device=device)
    groups = _list_groups(spec)
    if not groups or device.type == "meta":
        return call(room)
    what = f"draw {getattr(func, '__name__', 'numbers')} for {spec.fqn!r}"
    with as_first_rank(given or find_generator(device), groups, device, what):
        return call(room)


@contextlib.contextmanager
def as_first_rank(
    generator: torch.Generator, groups: Iterable[Group], device: torch.device, what: str
) -> Iterator[None]:
    """Scope in which a generator gives what that of the first rank of ``groups`` gives.

    Args:
        groups: of ranks that all enter; smaller ones inside others may come first or last.
        device: of the groups.
        what: what the ranks draw, the same on each.
    """
    own = generator.get_state()
    state = own.long()
    for group in groups:
        if group.backend != "fake":
            mine = state if group.rank == 0 else torch.zeros_like(state)
            state = reduce_alike(mine.to(device), group, "max", what).cpu()
    first = state.to(own.dtype)
    with contextlib.nullcontext() if torch.equal(first, own) else in_state(generator, first):
        yield


@contextlib.contextmanager
def in_state(generator: torch.Generator, state: Tensor) -> Iterator[None]:
    """Scope in which a generator goes on from ``state``, and after which from where it was."""
    own = generator.get_state()
    generator.set_state(state)
    try:
        yield
    finally:
        generator.set_state(own)


def _list_groups(spec: ShardSpec) -> list[Group]:
    """The groups whose ranks are to draw the same; not those with other parts of a hand-split."""
    parallel = spec.parallel
    axes = () if parallel is None else parallel.axes
    alike = [axis.group for axis in axes if axis.dim is None or spec.reads_whole]
    return [group for group in (spec.group, spec.replicas, *alike) if group.size > 1]


def find_generator(device: torch.device) -> torch.Generator:
    """The generator that functions on a device draw with where they are given none."""
    if device.type == "cpu":
        return torch.default_generator
    generators: Any = torch.get_device_module(device).default_generators
    return generators[device.index]
