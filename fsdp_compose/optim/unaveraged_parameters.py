"""A step over sharded parameters and plain ones whose gradients nothing averages is an error.

Where no module stands around the units of a model, as in a script's own loop over blocks, nothing
but the optimizer knows what is trained with them. Each optimizer is looked through once, and again
when it has other parameters, others of them train, or more was sharded. Clipping them together,
which comes before, is an error too: the norm would differ between ranks.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence, Set
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from fsdp_compose.base.attributes import requires_grad
from fsdp_compose.base.loops import parameters_of
from fsdp_compose.base.process import here
from fsdp_compose.base.torch_private import parameter_slots, raw
from fsdp_compose.base.tracked import find_tracked, tracked_kinds
from fsdp_compose.base.wording import quote_names
from fsdp_compose.buckets.bucket import Bucket
from fsdp_compose.comm.small_reduce import compares, reduce_alike
from fsdp_compose.core.guards.scope_parameters import leaf_of
from fsdp_compose.core.guards.surroundings import UNAVERAGED, look_again
from fsdp_compose.core.guards.units import list_all_units
from fsdp_compose.optim.mirror import bucket_of, source_of
from fsdp_compose.sharded import ShardedParameter, is_sharded_parameter

_known: WeakKeyDictionary[torch.optim.Optimizer, _Seen] = WeakKeyDictionary()
_AVERAGED = "_fsdp_compose_averaged"
"""Attribute of plain parameters that DistributedDataParallel was found to average."""


class _Seen(NamedTuple):
    """What an optimizer and the process had when the optimizer was looked through."""

    units: list[int]  # how many there were, and had been sharded over several ranks until then
    params: list[int]  # by id: hooks of a parameter may hold the optimizer
    trains: list[bool]


def check_unaveraged(optimizer: torch.optim.Optimizer) -> None:
    """Raise when the optimizer also trains plain parameters that no unit was told to ignore.

    Raises:
        RuntimeError: naming them.
    """
    units = [len(engine.units) for engine in here.engines.values()]
    units += [log.units for engine in here.engines.values() for log in engine.logs.values()]
    params = parameters_of(optimizer)
    with raw():
        seen = _Seen(units, list(map(id, params)), list(map(requires_grad, params)))
    if _known.get(optimizer) == seen:
        return
    if _check_params(params, f"{type(optimizer).__name__}.step()", "trains", "an optimizer"):
        _known[optimizer] = seen
        look_again()


def check_clipped(params: Sequence[torch.Tensor]) -> None:
    """Raise when gradients that nothing averages are to be clipped together with sharded ones.

    Raises:
        RuntimeError: naming them; or, on gloo, those that something was said to average differ.
    """
    if set(map(type, params)) != {ShardedParameter}:
        _check_params(params, "clip_grad_norm_", "clips", "a call")
        _compare_plain([leaf_of(param) for param in params])


def _compare_plain(params: Sequence[Any]) -> None:
    """Raise where gradients that no unit has differ: by their norm each rank scales its slices."""
    grads = [param.grad for param in params if _is_plain(param) and param.grad is not None]
    grads = [grad for grad in grads if grad.layout is torch.strided]
    sharded = filter(None, map(_bucket_over_ranks, params)) if grads else ()
    widest = max(sharded, key=lambda bucket: bucket.mesh.size, default=None)
    groups = [] if widest is None else [g for g in widest.mesh.groups if compares(grads[0], g)]
    if groups:  # not on accelerators, which would take norms in vain
        norms = [torch.linalg.vector_norm(grad).cpu().double() for grad in grads]
        norm = torch.stack(norms).norm().item()
        what = f"take a norm with gradients of no unit, whose own norm is {norm:.4g}"
        for group in groups:
            reduce_alike(torch.zeros(1, device="cpu"), group, "sum", what, _ALIKE)


_ALIKE = (
    "Parameters that are sharded would be scaled by another number on each rank. Average the "
    "gradients of those in no unit (ignored=) over the ranks first, or clip them in a call of "
    "their own. If they are experts, which other ranks have not, make them units in place of that: "
    'fully_shard(experts, mesh="self"), set_gradient_divide_factor(experts, ranks), and pass '
    "clip_grad_norm_ expert_mesh=."
)


def _check_params(params: Sequence[Any], caller: str, verb: str, instead: str) -> bool:
    """Raise for gradients that nothing averages; True if every plain parameter was looked at."""
    params = [leaf_of(param) for param in params]  # those shown in full are sharded too
    bucket = next((found for param in params if (found := _bucket_over_ranks(param))), None)
    plain = [] if bucket is None else _list_plain(params, bucket)
    ready = [param for param in plain if param.grad is not None]
    unknown = [param for param in ready if _AVERAGED not in param.__dict__]
    names = [name for name in _find_names(unknown) if name] if unknown else []
    if names and bucket is not None:
        unit = bucket.entries[0].spec.unit or "the model"
        raise RuntimeError(
            f"{caller}: beside parameters of unit {unit!r}, which are sharded, it {verb} "
            f"parameters that are in no unit: {quote_names(names)}. {UNAVERAGED} Call "
            "fully_shard(module) on the module that they belong to, or freeze them. If something "
            "else averages their gradients, say so when sharding, "
            f"fully_shard(..., ignored=[parameter, ...]), or give them {instead} of their own."
        )
    for param in unknown:
        param.__dict__[_AVERAGED] = True
    return len(ready) == len(plain)


def _bucket_over_ranks(param: nn.Parameter) -> Bucket | None:
    """The parameter's bucket, if it is sharded over several ranks."""
    bucket = bucket_of(param)
    return None if bucket is None or bucket.mesh.size == 1 else bucket


def _list_plain(params: Sequence[torch.Tensor], bucket: Bucket) -> list[torch.Tensor]:
    """The trained parameters that are neither sharded nor ignored.

    Nor DTensors, unless their mesh has none of the ranks that ``bucket`` is averaged over.
    """
    others = {rank for group in bucket.mesh.groups for rank in group.ranks} - {dist.get_rank()}
    ignored: set[int] = set()
    for unit in list_all_units():
        for ref in unit.checks.left_alone.values():
            item = ref()
            found = item.parameters() if isinstance(item, nn.Module) else [item]
            ignored.update(map(id, found))
    return [p for p in params if id(p) not in ignored and _is_plain(p, others)]


def _is_plain(param: Any, others: Set[int] = frozenset()) -> bool:
    """Whether it is trained, not sharded, and no DTensor, or one that none of ``others`` has."""
    if isinstance(param, DTensor):
        ranks = param.device_mesh.mesh.flatten().tolist()
        if not others or not others.isdisjoint(ranks):
            return False
    return param.requires_grad and not is_sharded_parameter(param) and source_of(param) is None


def _find_names(params: list[torch.Tensor]) -> Iterator[str | None]:
    """What to call each; None for one that DistributedDataParallel averages."""
    owners: dict[int, str] = {}
    averaged: set[int] = set()
    modules = [kind for kind in tracked_kinds() if issubclass(kind, nn.Module)]
    for module in find_tracked(*modules):
        kind = type(module)
        slots = parameter_slots(module)
        owners.update({id(p): f"{kind.__name__}.{name}" for name, p in slots.items()})
        if issubclass(kind, DistributedDataParallel):
            averaged.update(map(id, module.parameters()))
    for param in params:
        name = owners.get(id(param), "a parameter")
        yield None if id(param) in averaged else f"{name} of shape {tuple(param.shape)}"
