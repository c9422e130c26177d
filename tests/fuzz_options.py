"""How a fuzzed model is sharded: layouts of buckets, how data travels, and all other options."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, TypeGuard

import torch
import torch.distributed as dist
from torch import Tensor, nn

from fsdp_compose import MixedPrecision, Offload, Prefetch, ShardingStrategy, fully_shard, wrap
from fsdp_compose.base.group import Call, Started, Transport
from fsdp_compose.base.policy import Init
from fsdp_compose.comm.transports import AT_ONCE, ONE_BY_ONE, PAIRS
from fsdp_compose.layout.planner import PlanLayout, plan_layout
from fsdp_compose.layout.shards import Extent, Layout, alignment

from fuzz_programs import BYTES, HYBRID, Case, LeafModule, spec_of
from models import mesh_of_replicas


def _lay_backwards(extents: Sequence[Extent], itemsize: int, world: int) -> Layout:
    found = plan_layout(extents[::-1], itemsize, world)
    return Layout(tuple(extents), found.offsets[::-1], found.shard_numel, world, itemsize)


def _leave_gaps(extents: Sequence[Extent], itemsize: int, world: int) -> Layout:
    """Three elements lie idle before each parameter, where it may be cut anywhere."""
    if any(extent.block > 1 for extent in extents):
        return plan_layout(extents, itemsize, world)
    offsets, end = [], 0
    for extent in extents:
        offsets.append(end + 3)
        end += 3 + extent.numel
    align = alignment(itemsize, world)
    shard = -(-end // (world * align)) * align
    return Layout(tuple(extents), tuple(offsets), shard, world, itemsize)


def _lay_on_last_rank(extents: Sequence[Extent], itemsize: int, world: int) -> Layout:
    align, total = alignment(itemsize, world), sum(extent.numel for extent in extents)
    shard, offsets = -(-total // align) * align, []
    end = (world - 1) * shard
    for extent in extents:
        offsets.append(end)
        end += extent.numel
    return Layout(tuple(extents), tuple(offsets), shard, world, itemsize)


LAY_OUT: dict[str, PlanLayout] = {
    "": plan_layout,
    "backwards": _lay_backwards,
    "gaps": _leave_gaps,
    "last rank": _lay_on_last_rank,
}


def _gather(whole: Tensor, parts: Sequence[Tensor], own: Tensor, call: Call) -> Started:
    work = dist.all_gather(list(parts), own.clone(), group=call.group.pg, async_op=True)
    return Started((work,))


def _reduce(whole: Tensor, parts: Sequence[Tensor], call: Call) -> Started:
    total = whole.clone()
    work = dist.all_reduce(total, group=call.group.pg, async_op=True)
    return Started((work,), (), (total.view(len(parts), -1)[call.group.rank],))


def _exchange(outgoing: Sequence[Tensor], incoming: Sequence[Tensor], call: Call) -> Started:
    works = []
    for step in range(1, call.group.size):
        to, sender = ((call.group.rank + way) % call.group.size for way in (step, -step))
        if outgoing[to].numel():
            works.append(dist.isend(outgoing[to], call.group.ranks[to], call.group.pg))
        if incoming[sender].numel():
            works.append(dist.irecv(incoming[sender], call.group.ranks[sender], call.group.pg))
    return Started(works)


TRAVEL: dict[str, Transport | None] = {
    "": None,
    "pairs": PAIRS,
    "summing": replace(
        PAIRS, reduce_scatter=AT_ONCE.reduce_scatter, keeps_parts=False, may_wait=True
    ),
    "one by one": replace(ONE_BY_ONE, may_wait=True),
    "own": Transport(_gather, _reduce, PAIRS.all_reduce, _exchange, copies_own=True),
}


RELEASING = ("FULL_SHARD", "HYBRID_SHARD")


def shard(case: Case, model: nn.Module, init: Init = "verify", **more: Any) -> nn.Module:
    """Shard ``model`` as ``case`` says, with ``more`` arguments."""
    chosen = [m for m in model.modules() if (spec := spec_of(m)) is not None and spec.unit]
    chosen = [m for m in chosen if not is_ignored(m)]
    inside = [m for m in chosen if m is not model]
    if case.mixed and inside and not _shares(inside[-1], model):
        _shard_one(case, inside[-1], case.mixed, [], init, more)
        inside = inside[:-1]
    pair = [m for m in model.children_ if isinstance(m, LeafModule)][:2]
    shares = any(_shares(leaf, model) or leaf in chosen for leaf in pair)
    if case.grouped and len(pair) == 2 and not shares:
        _shard_one(case, pair, case.strategy, [], init, more)
    return _shard_one(case, model, case.strategy, inside, init, more)


def is_ignored(module: nn.Module) -> TypeGuard[LeafModule]:
    return isinstance(module, LeafModule) and bool(module.leaf.ignored)


def list_ignored(module: nn.Module) -> list[Any]:
    """What is to be left alone in ``module``."""
    found = [m for m in module.modules() if is_ignored(m)]
    return [m if m.leaf.ignored == "module" else m.weight for m in found]


def _shares(part: nn.Module, model: nn.Module) -> bool:
    """Whether ``part`` has parameters that the rest of ``model`` has too."""
    own, within = {id(p) for p in part.parameters()}, set(map(id, part.modules()))
    others = [m for m in model.modules() if id(m) not in within]
    return any(id(p) in own for m in others for p in m.parameters(recurse=False))


def _shard_one(
    case: Case,
    module: Any,
    strategy: str,
    inside: list[nn.Module],
    init: Init,
    more: dict[str, Any],
) -> nn.Module:
    chosen = set(map(id, inside))
    sharers = case.world // 2 if strategy in HYBRID else case.world
    fits = strategy in RELEASING and (not spreads(case) or is_part(case.release, sharers))
    modules = module if isinstance(module, list) else [module]
    options: dict[str, Any] = {
        "mesh": mesh_of_replicas(2, sharers) if strategy in HYBRID else None,
        "units": wrap.by_fn(lambda _, m: id(m) in chosen) if chosen else None,
        "strategy": ShardingStrategy[strategy],
        "reshard_after_forward": case.release if fits else None,
        "prefetch": Prefetch(*case.prefetch),
        "granularity": case.granularity,
        "static_buffers": case.static or False,
        "mp_policy": MixedPrecision(
            param_dtype=getattr(torch, case.compute) if case.compute else None,
            reduce_dtype=getattr(torch, case.reduce) if case.reduce else None,
            gather_codec=BYTES if case.codec else None,
        ),
        "offload_policy": Offload(**dict.fromkeys(case.offload, True), pin_memory=False),
        "ignored": [found for each in modules for found in list_ignored(each)],
        "init": init,
        "layout": LAY_OUT[case.layout],
        "transport": TRAVEL[case.transport],
        "deterministic": case.deterministic,
    }
    return fully_shard(module, **options | more)


def spreads(case: Case) -> bool:
    """Whether weights are gathered again in groups that are smaller than those of the shards."""
    return case.release is not None and case.release is not True


def is_part(release: int | None, sharers: int) -> bool:
    return release is not None and 1 < release < sharers and sharers % release == 0
