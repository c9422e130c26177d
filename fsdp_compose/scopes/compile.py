"""Units inside a compiled graph: gather and reduce as operators, one graph over many units.

Ordinarily hooks and gathers stay outside compiled graphs, which end at every unit. What
``set_traceable`` was called on can be part of a larger graph instead (``fullgraph=True``): there a
forward reads what ``Show`` returns, whose backward hands the gradients to the engine. Releasing is
implied: what was gathered is freed with its last use, and unless the unit is kept after forward,
the compiler is told to gather again in backward instead of saving it.

    fsdp_compose::versions(anchor, unit)               how often the weights were written until now
    fsdp_compose::gather(anchor, unit, versions, call) full buckets; parameters are views of them
    fsdp_compose::reduce(grads, given, unit, call)     what the anchor gets; sets leaves' ``.grad``

``Show`` itself stands in the graph that Dynamo makes, and is taken apart when autograd is traced:
its backward sees then which parameters the graph uses, which becomes a constant (``given``).

The anchor is a tensor that requires grad: sharded leaves cannot be inputs of a graph. A compiler
computes once what is called twice with the same arguments, and not at all what nothing reads. So
the reductions of a graph are told apart by a number (``call``), and what they return, a zero, has
an element, since the sum of empty tensors reads nothing. Gathers that are made again in backward
are told apart too: two forwards may read different parts of one. Forward saves ``versions`` for
them: they raise where weights were written since, as other backwards do.
The unit is named by a key that changes whenever what was compiled for it does not hold any more.
This file alone may be traced; everything it calls in a trace must be, too.
"""

from __future__ import annotations

import hashlib
import itertools
import weakref
from functools import partial
from itertools import chain, islice
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from fsdp_compose.base.arguments import check_flags
from fsdp_compose.base.parts import split_around
from fsdp_compose.base.torch_private import (
    remove_forward_hooks,
    replace_forward_hooks,
    tree_map,
    uncompiled_as_frame,
    will_accumulate,
)
from fsdp_compose.buckets.bucket import Bucket, Entry
from fsdp_compose.buckets.gather import gather_flat, versions_of
from fsdp_compose.core.autograd import receive
from fsdp_compose.core.gathering import take_over_changes
from fsdp_compose.core.guards.added_parameters import check_additions
from fsdp_compose.core.guards.moved_parameters import shard_of
from fsdp_compose.core.guards.recurrent_weights import find_recurrent
from fsdp_compose.core.guards.replaced_parameters import refuse_replaced
from fsdp_compose.core.guards.trained_entries import trained_entries
from fsdp_compose.core.guards.units import modules_of, require_units
from fsdp_compose.core.guards.weight_versions import check_versions
from fsdp_compose.core.hooks import after_forward, before_forward
from fsdp_compose.core.records import Traced
from fsdp_compose.core.state import Unit, owner_of
from fsdp_compose.sharded import STATE_KEY

_numbers = itertools.count()
_units: weakref.WeakValueDictionary[str, Unit] = weakref.WeakValueDictionary()
_library = torch.library.Library("fsdp_compose", "DEF")
_tags = (torch.Tag.pt2_compliant_tag, torch.Tag.cudagraph_unsafe)  # they communicate
_library.define("versions(Tensor anchor, str unit) -> Tensor", tags=_tags)
_library.define(
    "gather(Tensor anchor, str unit, Tensor? versions=None, int call=0) -> Tensor[]", tags=_tags
)
_library.define("reduce(Tensor[] grads, int[] given, str unit, int call) -> Tensor", tags=_tags)


def set_traceable(module: nn.Module, value: bool = True, recurse: bool = True) -> None:
    """Whether units become part of the compiled graphs around them, as ``fullgraph=True`` needs.

    By default a compiled graph ends where a unit begins. With this, gathering and reducing are
    operators in it, without prefetch: each gather is awaited where it stands. A unit that is
    released after forward is gathered again in backward. Outside compiled code, and for a unit
    that is itself what was compiled, nothing changes. Call it again when parameters were frozen,
    unfrozen, converted or exchanged since: graphs are compiled anew then.

    Args:
        module: a unit, or with ``recurse`` a module that contains units.
        value: True, or False, the default state.
        recurse: also set it for the units nested in ``module``.

    Raises:
        ValueError: there is no such unit, or a unit's options cannot be followed in a graph.

    Example:
        >>> model = fully_shard(nn.Linear(2, 2))
        >>> set_traceable(model)
        >>> compiled = torch.compile(nn.Sequential(model), fullgraph=True, backend="eager")
        >>> compiled(torch.ones(1, 2)).shape
        torch.Size([1, 2])
    """
    check_flags("set_traceable", value=value)
    units = require_units(module, "set_traceable", recurse)
    for unit in units if value else ():
        _require_traceable(unit)
    torch.compiler.allow_in_graph(_show)
    for unit in units:
        unit.traced = _record_unit(unit) if value else None
        for member in modules_of(unit):
            old, new = (_PLAIN, _TRACED) if value else (_TRACED, _PLAIN)
            replace_forward_hooks(member, dict(zip(old, new, strict=True)))


def _require_traceable(unit: Unit) -> None:
    mp = unit.mp
    problem = None
    if mp.cast_forward_inputs == "root":
        problem = 'MixedPrecision(cast_forward_inputs="root"); use True or False'
    elif mp.full_precision_in_eval:
        problem = "MixedPrecision(full_precision_in_eval=True)"
    elif find_recurrent(unit):
        problem = "a recurrent module, which torch.compile does not trace"
    elif unit.links.dtensors:
        problem = "tensor parallel parameters; compile its blocks instead: block.compile()"
    elif any(entry.wrapper for entry in unit.entries):
        problem = "parameters of a class around tensors; compile its blocks: block.compile()"
    if problem is not None:
        raise ValueError(
            f"set_traceable: unit {unit.name!r} has {problem}, which cannot be followed in a "
            "compiled graph; leave this unit out, with set_traceable(unit, recurse=False) on the "
            "others."
        )


def _record_unit(unit: Unit) -> Traced:
    trained = trained_entries(unit)
    shapes = [(e.spec.shape, e.spec.stride, e.spec.offset) for e in unit.entries]
    buffers = [(b.layout.numel, b.full.dtype, b.mesh.device) for b in unit.gathered]
    # Compiled code is cached on disk by the text of its graph, which these would not be part of.
    digest = hashlib.sha256(repr((shapes, buffers, trained)).encode()).hexdigest()[:16]
    key = f"{next(_numbers)}:{digest}"
    _units[key] = unit
    cuts = [_split_full(bucket) for bucket in unit.gathered]
    places = [(unit.gathered.index(owner_of(e)), e) for e in unit.entries]
    return Traced(
        key=key,
        anchor=unit.links.anchor if trained else unit.links.anchor.detach(),
        trained=tuple([index in trained for index in range(len(unit.entries))]),
        sizes=tuple([tuple(sizes) for sizes, _ in cuts]),
        views=tuple([(b, cuts[b][1][e.index], *_storage_permutation(e)) for b, e in places]),
        epoch=unit.checks.epoch,
    )


def _split_full(bucket: Bucket) -> tuple[list[int], list[int]]:
    """Sizes that split a full bucket, and the position of each entry's piece."""
    spans = [(entry.spec.offset, entry.spec.numel) for entry in bucket.entries]
    return split_around(spans, bucket.layout.numel)


def _storage_permutation(entry: Entry) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The shape in which an entry is stored, and the order that makes it the parameter's."""
    order = entry.spec.storage_dims
    inverse = sorted(range(len(order)), key=order.__getitem__)
    return tuple([entry.spec.shape[d] for d in order]), tuple(inverse)


def _list_trained(traced: Traced) -> tuple[int, ...]:
    return tuple(itertools.compress(itertools.count(), traced.trained))


@uncompiled_as_frame
def before_traced(module: nn.Module, args: Any, kwargs: Any) -> Any:
    """Let the unit's modules read the outputs of the operator, in a trace; else as ever."""
    unit = getattr(module, STATE_KEY).unit
    traced = unit.traced
    if not torch.compiler.is_compiling() or traced is None or unit.opened is not None:
        return before_forward(module, args, kwargs)

    key = traced.key

    def show(anchor: torch.Tensor, versions: torch.Tensor | None) -> list[torch.Tensor]:
        return _show(anchor, key, versions)

    if unit.switches.keep_after_forward is True or not torch.is_grad_enabled():
        shown = show(traced.anchor, None)
    else:  # in a region of its own, whose outputs the compiler makes again instead of saving
        now = torch.ops.fsdp_compose.versions(traced.anchor.detach(), key)
        shown = checkpoint(show, traced.anchor, now, use_reentrant=False, preserve_rng_state=False)
    links = unit.links  # whose property ``places`` cannot be traced
    indices = links.indices or range(len(links.tables))
    for values, name, index in zip(links.tables, links.names, indices, strict=True):
        values[name] = shown[index]
    if not unit.mp.cast_forward_inputs or unit.mp.param_dtype is None:
        return None
    return tree_map(partial(_cast_floating, unit.mp.param_dtype), (args, kwargs))


@uncompiled_as_frame
def after_traced(module: nn.Module, args: Any, output: Any) -> Any:
    """Put the leaves back, in a trace; else as ever."""
    unit = getattr(module, STATE_KEY).unit
    if not torch.compiler.is_compiling() or unit.traced is None or unit.opened is not None:
        return after_forward(module, args, output)
    links = unit.links
    indices = links.indices or range(len(links.tables))
    for values, name, index in zip(links.tables, links.names, indices, strict=True):
        values[name] = unit.entries[index].held
    if unit.mp.output_dtype is None:
        return output
    return tree_map(partial(_cast_floating, unit.mp.output_dtype), output)


_PLAIN = (before_forward, after_forward)
_TRACED = (before_traced, after_traced)


def detach_traced(module: nn.Module) -> None:
    """Remove the hooks that ``set_traceable`` put on a unit's module."""
    remove_forward_hooks(module, *_TRACED)


class Show(torch.autograd.Function):
    """The anchor to what the unit's modules read, by entry; their gradients to the reduction."""

    @staticmethod
    def forward(
        ctx: Any, anchor: torch.Tensor, key: str, versions: torch.Tensor | None
    ) -> tuple[torch.Tensor, ...]:
        traced = _find_unit(key)[1]
        ctx.key = key
        ctx.set_materialize_grads(False)
        call = 0 if versions is None else next(_numbers)
        fulls = torch.ops.fsdp_compose.gather(anchor, key, versions, call)
        cut = [f.split_with_sizes(sizes) for f, sizes in zip(fulls, traced.sizes, strict=True)]
        shown = [cut[b][piece].view(shape).permute(dims) for b, piece, shape, dims in traced.views]
        frozen = itertools.compress(shown, [not trained for trained in traced.trained])
        ctx.mark_non_differentiable(*frozen)
        return tuple(shown)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor | None) -> Any:
        """Runs while a graph is made: a gradient that is None is one that the graph never makes."""
        given = {index: grad for index, grad in enumerate(grads) if grad is not None}
        reduce, number = torch.ops.fsdp_compose.reduce, next(_numbers)
        return reduce([*given.values()], [*given], ctx.key, number), None, None


def _show(anchor: torch.Tensor, key: str, versions: torch.Tensor | None) -> list[torch.Tensor]:
    """Run as one operation under Dynamo, which would give zeros for gradients that are None."""
    return list(Show.apply(anchor, key, versions))


def _cast_floating(dtype: torch.dtype, value: Any) -> Any:
    if isinstance(value, torch.Tensor) and value.is_floating_point():
        return value.to(dtype)
    return value


def _find_unit(key: str) -> tuple[Unit, Traced]:
    unit = _units.get(key)
    if unit is None or unit.traced is None:
        raise RuntimeError(
            "a compiled graph reached a sharded module that was deleted, or is not traceable any "
            "more; keep a reference to the model until backward has run."
        )
    return unit, unit.traced


def _check_current(unit: Unit, traced: Traced) -> None:
    trained = trained_entries(unit)
    if traced.epoch != unit.checks.epoch or trained != _list_trained(traced):
        raise RuntimeError(
            f"parameters of unit {unit.name!r} were frozen, unfrozen, converted or exchanged since "
            "a graph was compiled for it; call fsdp_compose.set_traceable(model) again on every "
            "rank."
        )


def _run_versions(anchor: torch.Tensor, key: str) -> torch.Tensor:
    unit = _find_unit(key)[0]
    take_over_changes(unit)
    return torch.tensor([*chain(*map(versions_of, unit.gathered))], device="cpu")


def _fake_versions(anchor: torch.Tensor, key: str) -> torch.Tensor:
    number = sum(1 + len(bucket.entries) for bucket in _find_unit(key)[0].gathered)
    return torch.empty(number, dtype=torch.int64, device="cpu")


def _run_gather(
    anchor: torch.Tensor, key: str, versions: torch.Tensor | None = None, call: int = 0
) -> list[torch.Tensor]:
    unit, traced = _find_unit(key)
    take_over_changes(unit)
    if versions is not None:
        read = iter(versions.tolist())
        for bucket in unit.gathered:
            now = versions_of(bucket)
            check_versions(unit, bucket, tuple(islice(read, len(now))), now)
    refuse_replaced(unit)
    check_additions(unit)
    _check_current(unit, traced)
    for _, events, code in unit.links.gather_events:
        events.note((code, "gather", unit.name, "a compiled graph"))
    with torch.no_grad():
        return [
            gather_flat(
                bucket,
                shard_of(bucket).to(bucket.mesh.device),
                bucket.full.dtype,
                "",
                bucket.mp.gather_codec,
            )
            for bucket in unit.gathered
        ]


def _fake_gather(
    anchor: torch.Tensor, key: str, versions: torch.Tensor | None = None, call: int = 0
) -> list[torch.Tensor]:
    unit, traced = _find_unit(key)
    _check_current(unit, traced)
    return [anchor.new_empty(b.layout.numel, dtype=b.full.dtype) for b in unit.gathered]


def _run_reduce(grads: list[torch.Tensor], given: list[int], key: str, call: int) -> torch.Tensor:
    unit, traced = _find_unit(key)
    if torch.is_grad_enabled():
        raise RuntimeError(
            f"unit {unit.name!r}: a graph over the backward of a compiled graph was asked for "
            "(create_graph=True), which torch.compile does not support; run it uncompiled."
        )
    received = torch.zeros_like(traced.anchor, requires_grad=False)
    if unit.run.chosen is None and not will_accumulate(traced.anchor):
        return received  # gradients of other tensors were asked for
    trained = _list_trained(traced)
    by_entry: dict[int, torch.Tensor] = dict(zip(given, grads, strict=True))
    receive(unit, trained, tuple([by_entry.get(index) for index in trained]), None)
    return received


def _fake_reduce(grads: list[torch.Tensor], given: list[int], key: str, call: int) -> torch.Tensor:
    return torch.empty(1, device=_find_unit(key)[1].anchor.device)


_library.impl("versions", _run_versions, "CompositeExplicitAutograd")
_library.impl("gather", _run_gather, "CompositeExplicitAutograd")
_library.impl("reduce", _run_reduce, "CompositeExplicitAutograd")
torch.library.register_fake("fsdp_compose::versions", _fake_versions, lib=_library)
torch.library.register_fake("fsdp_compose::gather", _fake_gather, lib=_library)
torch.library.register_fake("fsdp_compose::reduce", _fake_reduce, lib=_library)
