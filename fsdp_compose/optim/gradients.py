"""The gradients of a module or of parameters, a bucket's as one tensor where they are one buffer.

A backward leaves the gradients of a bucket as slices of one flat buffer. As long as every one of
them is still there, a norm of them all is the norm of the buffer, and one multiplication scales
them. What was set, cleared, replaced or shared since is taken one by one.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate, chain
from operator import attrgetter
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from fsdp_compose.base.arguments import check_kind, describe_value
from fsdp_compose.base.attributes import get_grad
from fsdp_compose.base.group import Group
from fsdp_compose.base.mesh import Mesh
from fsdp_compose.base.process import here
from fsdp_compose.base.torch_private import raw, read_base
from fsdp_compose.buckets.bucket import Bucket
from fsdp_compose.buckets.entries import find_entry
from fsdp_compose.construct.names import parameter_names
from fsdp_compose.construct.tensor_parallel import find_parallel
from fsdp_compose.core.guards.scope_parameters import clipped_of
from fsdp_compose.core.guards.surroundings import check_once
from fsdp_compose.core.state import owner_of
from fsdp_compose.optim.mirror import Mirror, leaves_of, mirror_of, share_gradients
from fsdp_compose.optim.unaveraged_parameters import check_clipped
from fsdp_compose.scopes.unshard import check_reduced
from fsdp_compose.sharded import (
    Parallel,
    ShardedParameter,
    ShardSpec,
    is_sharded,
    is_sharded_parameter,
    part_of,
    spec_of,
    to_local,
)

Params = nn.Module | torch.Tensor | Iterable[torch.Tensor]


@dataclass(eq=False, slots=True)
class Gradient:
    """One or more gradients' elements on this rank, as one plain tensor.

    Attributes:
        names: of the parameters, for errors and for what ranks compare.
        local: the elements.
        groups: whose ranks hold the rest, or the same.
        copies: how many ranks of the groups hold the same elements.
        param: the parameter, or the first of several, if a unit has it.
        stored: what is in ``.grad``, where ``local`` is the sum of that over ranks.
    """

    names: tuple[str, ...]
    local: torch.Tensor
    groups: tuple[Group, ...]
    copies: int = 1
    param: nn.Parameter | None = None
    stored: torch.Tensor | None = None


def list_parameters(params: Params, caller: str) -> nn.Module | list[torch.Tensor]:
    """The module, or the parameters given as a list.

    Raises:
        TypeError: they are something else.
    """
    if isinstance(params, nn.Module):
        return params
    given = [params] if isinstance(params, torch.Tensor) else params
    wanted = "a module, or parameters, such as module.parameters()"
    check_kind(caller, "module_or_params", given, Iterable, wanted)
    listed = list(given)
    for item in listed:
        if not isinstance(item, torch.Tensor):
            raise TypeError(
                f"{caller}: module_or_params holds {describe_value(item)}; wanted {wanted}."
            )
    if not {ShardedParameter, nn.Parameter}.issuperset(map(type, listed)):
        _refuse_values(listed, caller, wanted)
    return listed


def _refuse_values(listed: Sequence[Any], caller: str, wanted: str) -> None:
    """Raise for gradients themselves, whose own gradients, None, would be a norm of 0."""
    for item in listed:
        if is_sharded(item) and not is_sharded_parameter(item) and not item.requires_grad:
            what = f"what {describe_parameter(spec_of(item))} holds or its gradient"
            raise TypeError(f"{caller}: module_or_params has {what}; wanted {wanted}.")


def collect_gradients(params: Params, caller: str, joins: bool = True) -> list[Gradient]:
    """The gradients of a module's parameters, or of those given, that are not None.

    Args:
        joins: give the gradients of a bucket as one where they lie in one buffer.

    Raises:
        RuntimeError: gradients were accumulated and not reduced, or nothing averages some
            of the parameters; ``caller`` is named.
    """
    params = list_parameters(params, caller)
    if isinstance(params, nn.Module):
        if not all(params in engine.surveyed for engine in here.engines.values()):
            check_once(params, caller)
        shown: list[Any] = list(params.parameters())
    else:
        shown = params
        check_clipped(shown)
    if set(map(type, shown)) == {ShardedParameter}:
        sharded, others = shown, []
    else:
        if isinstance(params, nn.Module):
            shown = list(parameter_names(params))  # not what a unit's forward reads in their place
            check_clipped(shown)  # some may be trained only since it was looked through
        leaves = list(chain.from_iterable(map(leaves_of, map(clipped_of, shown))))
        sharded = [leaf for leaf in leaves if is_sharded_parameter(leaf)]
        others = [leaf for leaf in leaves if not is_sharded_parameter(leaf)]
    # Gradients that are shared anew may lie elsewhere, and are looked up again.
    found, left = join_buckets(sharded) if joins else ([], sharded)
    if share_gradients(list_mirrors([*[gradient.param for gradient in found], *left])):
        found, left = join_buckets(sharded) if joins else ([], sharded)
    firsts = [*[gradient.param for gradient in found], *left]
    refuse_waiting(firsts, caller)
    return found + _take_one_by_one(params, left, others)


def list_mirrors(params: Sequence[Any]) -> list[Mirror]:
    """List the mirrors of the buckets of ``params`` that have plain parameters over them."""
    shared = [param for param in params if param._shard_spec.residence.is_shared]
    mirrors = [mirror_of(owner_of(find_entry(param))) for param in shared]
    return list(dict.fromkeys(mirror for mirror in mirrors if mirror is not None))


def join_buckets(
    params: Sequence[Any], grads: Sequence[Any] | None = None
) -> tuple[list[Gradient], list[Any]]:
    """The gradients of each bucket that lie in one buffer, and the parameters left.

    Args:
        params: sharded parameters; those without a gradient are among the ones left.
        grads: the gradient of each, if the caller has them.
    """
    left: list[Any] = []
    with raw():
        if grads is None:
            grads = list(map(get_grad, params))
            left = [param for param, grad in zip(params, grads, strict=True) if grad is None]
        if left:
            params = [p for p, grad in zip(params, grads, strict=True) if grad is not None]
            grads = [grad for grad in grads if grad is not None]
        bases = list(map(read_base, grads))
    ids, buffers = list(map(id, params)), list(map(id, bases))
    buffer_of = dict(zip(ids, buffers, strict=True))
    if len(buffer_of) < len(ids):
        return [], [*left, *params]  # one is there twice
    firsts = dict(zip(reversed(buffers), reversed(range(len(ids))), strict=True))
    found: list[Gradient] = []
    joined: set[int] = set()
    for at in sorted(firsts.values()):
        base, param = bases[at], params[at]
        if base is None:
            continue
        bucket = owner_of(find_entry(param))
        own, facts = list(map(id, bucket.views.params)), _find_facts(bucket)
        if facts is None or list(map(buffer_of.get, own)).count(buffers[at]) < len(own):
            continue
        if bucket.residence.regraded and not (
            facts.is_dense and _are_slices(grads, bases, base)
        ):  # where a rank has gaps, parts of other gradients may lie in them
            continue
        if base.numel() == bucket.layout.shard_numel:  # complex ones lie in one of real numbers
            for gap in facts.gaps:
                base.data[gap].zero_()  # without a count: no gradient is written
            found.append(Gradient(facts.names, base, facts.groups, param=param))
            joined.update(own)
    if len(joined) < len(ids):
        left += [param for param, key in zip(params, ids, strict=True) if key not in joined]
    return found, left


def _are_slices(grads: Sequence[Any], bases: Sequence[Any], base: torch.Tensor) -> bool:
    """Whether the gradients that were cut from ``base`` still lie in its memory."""
    cut = [grad for grad, own in zip(grads, bases, strict=True) if own is base]
    with raw():
        return len({t.untyped_storage().data_ptr() for t in (base, *cut)}) == 1


@dataclass(frozen=True, eq=False)
class _BucketFacts:
    """What a bucket's gradients are called, and who has the rest of them."""

    mesh: Mesh
    specs: list[ShardSpec]  # others, when they are renamed
    names: tuple[str, ...]
    groups: tuple[Group, ...]
    is_plain: bool
    is_dense: bool  # no rank has gaps
    gaps: tuple[slice, ...]  # where no gradient lies, but a NaN may that all were scaled by


_facts: WeakKeyDictionary[Bucket, _BucketFacts] = WeakKeyDictionary()


def _find_facts(bucket: Bucket) -> _BucketFacts | None:
    """Names and groups of a bucket's gradients; None where tensor parallelism split one."""
    facts, specs = _facts.get(bucket), list(map(_get_spec, bucket.entries))
    if facts is None or facts.mesh is not bucket.mesh or facts.specs != specs:
        facts = _facts[bucket] = _BucketFacts(
            mesh=bucket.mesh,
            specs=specs,
            names=tuple(map(describe_parameter, specs)),
            groups=groups_of_several((bucket.mesh.shard,)),
            is_plain=all(spec.parallel is None for spec in specs),
            is_dense=sum(spec.numel for spec in specs) == bucket.layout.numel,
            gaps=tuple(_list_gaps(bucket)),
        )
    return facts if facts.is_plain else None


def _list_gaps(bucket: Bucket) -> Iterable[slice]:
    """Where this rank's shard holds no parameter."""
    views = bucket.views
    ends = list(accumulate(views.splits))
    for index in sorted(set(range(len(ends))) - set(views.pieces)):
        yield slice(ends[index] - views.splits[index], ends[index])


def describe_parameter(spec: ShardSpec) -> str:
    """The parameter and its unit, for errors."""
    return f"{spec.fqn!r} (unit {spec.unit!r})"


_get_spec = attrgetter("spec")
_get_residence = attrgetter("_shard_spec.residence")


def refuse_waiting(params: Sequence[Any], caller: str) -> None:
    """Raise where gradients of a bucket wait to be reduced, naming its first parameter."""
    keys = list(map(id, map(_get_residence, params)))
    firsts = dict(zip(reversed(keys), reversed(params), strict=True))
    for key in dict.fromkeys(keys):
        check_reduced([owner_of(find_entry(firsts[key]))], caller, firsts[key])


def _take_one_by_one(params: Params, left: list[Any], others: list[Any]) -> list[Gradient]:
    names: dict[int, str] | None = None
    found = []
    for number, param in enumerate([*left, *others], -len(left)):
        grad = param.grad
        if grad is None:
            continue
        if is_sharded(param):
            spec = spec_of(param)
            groups = groups_of_several((spec.group, *_groups_beside(spec.parallel)))
            owned: Any = param if is_sharded_parameter(param) else None
            copies = _count_copies(spec.parallel)
            found.append(
                Gradient((describe_parameter(spec),), to_local(grad), groups, copies, owned)
            )
        else:
            names = _name_parameters(params) if names is None else names
            name = names.get(id(param), f"parameter {number} of those that are not sharded")
            found.append(_take_unsharded(name, param, grad))
    return found


def _name_parameters(params: Params) -> dict[int, str]:
    """The names of a module's parameters, by id; there are none where it is given a list."""
    if not isinstance(params, nn.Module):
        return {}
    return {id(clipped_of(param)): repr(name) for name, param in params.named_parameters()}


def groups_of_several(groups: tuple[Group, ...]) -> tuple[Group, ...]:
    """The groups of more than one rank."""
    return tuple(group for group in groups if group.size > 1)


def share_groups(grads: Sequence[Gradient]) -> bool:
    """Whether all gradients are spread over the same groups."""
    first = grads[0].groups if grads else ()
    return all(grad.groups == first for grad in grads)


def _take_unsharded(name: str, param: Any, grad: torch.Tensor) -> Gradient:
    """The gradient of a plain tensor, or of one that only tensor parallelism splits."""
    parallel = find_parallel(param, name, "")
    stored = None
    if isinstance(grad, DTensor) and isinstance(param, DTensor):
        stored = part_of(grad.detach())
        grad = grad.redistribute(placements=param.placements)  # a partial sum becomes the sum
    part, copies = part_of(grad.detach()), _count_copies(parallel)
    return Gradient((name,), part, _groups_beside(parallel), copies, stored=stored)


def _groups_beside(parallel: Parallel | None) -> tuple[Group, ...]:
    return () if parallel is None else parallel.groups


def _count_copies(parallel: Parallel | None) -> int:
    """How many ranks beside the shard group have what tensor parallelism left whole."""
    axes = () if parallel is None else parallel.axes
    return math.prod(axis.group.size for axis in axes if axis.dim is None)
