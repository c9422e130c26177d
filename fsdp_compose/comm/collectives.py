"""Gather, reduce and exchange over plain tensors and a group: what the rest of the package calls.

A buffer is one flat tensor of ``group.size`` equal parts, part ``r`` belonging to rank ``r``.
Gathers move bytes, so that any dtype travels. Data is moved by the group's ``Transport``; what is
here counts it, has ranks compare what they do, and waits.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from fsdp_compose.base.group import Call, Group, Op, Started, Transport
from fsdp_compose.base.parts import cut_by_rank
from fsdp_compose.base.process import here
from fsdp_compose.base.torch_stack import count_modes, refuse_fakes
from fsdp_compose.comm import waiting
from fsdp_compose.comm.flags import Flags as Flags
from fsdp_compose.comm.heads import Caller as Caller
from fsdp_compose.comm.heads import Head as Head
from fsdp_compose.comm.heads import Heads as Heads
from fsdp_compose.comm.heads import compare_heads, send_heads, tag_outside
from fsdp_compose.comm.heads import hear as hear
from fsdp_compose.comm.heads import tell as tell
from fsdp_compose.comm.messages import end_messages as end_messages
from fsdp_compose.comm.messages import gather_objects as gather_objects
from fsdp_compose.comm.messages import is_point_to_point as is_point_to_point
from fsdp_compose.comm.messages import no_answer, wait_for
from fsdp_compose.comm.shared_memory import Offer
from fsdp_compose.comm.shared_memory import open_segments as open_segments
from fsdp_compose.comm.transports import premultiplies, room_for_parts
from fsdp_compose.comm.transports import transport_of as transport_of
from fsdp_compose.comm.under_way import BEGUN_BY_HALF as BEGUN_BY_HALF
from fsdp_compose.comm.under_way import NOTHING_SENT as NOTHING_SENT
from fsdp_compose.comm.under_way import Exchange as Exchange
from fsdp_compose.comm.under_way import ReduceScatter as ReduceScatter


def _open(
    group: Group,
    transport: Transport,
    purpose: str,
    nbytes: int,
    caller: Caller | None,
    data: torch.Tensor,
    flags: Flags | None = None,
    room: Sequence[torch.Tensor] = (),
) -> tuple[Call, Heads | None]:
    """What a transport is told; on gloo also the heads of other ranks, if they are not read yet.

    Args:
        data: what this rank brings.
        room: memory for what it gets, see ``Call.room``.
    """
    if not is_point_to_point(group):
        return Call(group, 0, purpose, room=room), None
    if caller is None:
        return Call(group, tag_outside(purpose, nbytes, group), purpose, room=room), None
    head = caller.head()
    offer = Offer() if transport.offer is None else Offer(*transport.offer(data, group))
    heads = send_heads(caller, head, group, purpose, flags, offer=offer)
    call = Call(group, heads.tag_behind(), purpose, offer, heads.offers, room=room)
    if transport.may_wait:
        heads.check()
        return call, None
    return call, heads


def gather_parts(
    whole: torch.Tensor,
    parts: Sequence[torch.Tensor],
    own: torch.Tensor,
    group: Group,
    purpose: str = "gather",
    caller: Caller | None = None,
    finish: Callable[[], None] | None = None,
) -> Exchange:
    """Fill every part of ``whole`` from the rank that owns it.

    Args:
        whole: uint8, one dimension.
        parts: ``whole`` cut into ``group.size`` equal views.
        own: what this rank sends: its part, filled already; or, where the transport copies it there
            (``copies_own``), another tensor of the same bytes.
        finish: called when the data has arrived: on an accelerator in the order of the current
            stream, elsewhere by ``wait``.
    """
    if group.pg is None or not whole.numel():
        return Exchange()
    nbytes, traffic, transport = own.numel(), here.traffic, transport_of(group)
    traffic.gathers += 1
    traffic.gather_bytes += whole.numel() - nbytes
    call, heads = _open(group, transport, purpose, nbytes, caller, own)
    started = transport.gather(whole, parts, own, call)
    exchange = Exchange(started.works, purpose, started.peers, heads, finish)
    if finish is not None and not whole.is_cpu:
        exchange.wait()
    return exchange


@dataclass(frozen=True, eq=False, repr=False, slots=True)
class GatherPlan:
    """A gather of one buffer, with what is the same each time worked out; see ``gather_parts``."""

    whole: torch.Tensor
    parts: Sequence[torch.Tensor]
    own: torch.Tensor
    transport: Transport
    call: Call
    nbytes: int  # that arrive here; 0: nothing travels
    exchange: Exchange  # the gather under way, or the last one: there is one at a time
    finish: Callable[[], None] | None = None

    def start(self, started: Started | None = None) -> Exchange:
        """Fill every part from the rank that owns it; ``started``: what does so, with others."""
        exchange = self.exchange
        if self.nbytes:
            traffic = here.traffic
            traffic.gathers += 1
            traffic.gather_bytes += self.nbytes
            if started is None:
                started = self.transport.gather(self.whole, self.parts, self.own, self.call)
            exchange.works, exchange.peers, _, _ = started
            exchange.is_lost = exchange.is_open = False
            if self.finish is not None:
                exchange.finish = self.finish
                if not self.whole.is_cpu:
                    exchange.wait()
        return exchange


def plan_gather(
    whole: torch.Tensor,
    parts: Sequence[torch.Tensor],
    own: torch.Tensor,
    group: Group,
    purpose: str,
    finish: Callable[[], None] | None = None,
) -> GatherPlan:
    """A gather to be started any number of times, where no messages between pairs go ahead."""
    nbytes = 0 if group.pg is None else whole.numel() - own.numel()
    exchange, call = Exchange(purpose=purpose), Call(group, 0, purpose)
    return GatherPlan(whole, parts, own, transport_of(group), call, nbytes, exchange, finish)


P = TypeVar("P", GatherPlan, "ReducePlan")


def start_gathers(plans: Sequence[GatherPlan]) -> None:
    """Start gathers together; those over one group are one call, where its transport has one."""
    for alike in _by_call(plans):
        first, started = alike[0], None
        if len(alike) > 1 and first.transport.gather_all is not None:
            wholes, parts, owns = zip(*((p.whole, p.parts, p.own) for p in alike), strict=True)
            started = first.transport.gather_all(wholes, parts, owns, first.call)
        for plan in alike:
            plan.start(started)


def _by_call(plans: Sequence[P]) -> Iterable[list[P]]:
    """Plans for which something travels, those that one call can start in one list."""
    joined: dict[tuple[Any, int], list[P]] = {}
    for plan in plans:
        if plan.nbytes:
            joined.setdefault((plan.call.group.pg, id(plan.transport)), []).append(plan)
    return joined.values()


def lender_of(group: Group) -> Callable[[int, Group], Any] | None:
    """What lends memory to pack gradients in that ``group`` reduces, see ``Transport.lend``."""
    return None if group.pg is None else transport_of(group).lend


def reduce_scatter_parts(
    whole: torch.Tensor,
    parts: Sequence[torch.Tensor],
    group: Group,
    purpose: str = "reduce gradients",
    caller: Caller | None = None,
    flags: Flags | None = None,
    factor: float = 1.0,
    in_tree: bool = False,
) -> ReduceScatter:
    """Start summing every rank's ``whole``; this rank receives part ``group.rank`` of the sum.

    Args:
        whole: real floating point, one dimension; must stay allocated until the result is read.
        parts: ``whole`` cut into ``group.size`` equal views.
        flags: united over the group with it, on gloo.
        factor: multiplies each rank's ``whole``; in place, where the backend does not on the way.
        in_tree: add up neighbouring ranks first, then their sums, which every transport can do.
    """
    if factor != 1.0 and (in_tree or not premultiplies(group)):
        whole.mul_(factor)
        factor = 1.0
    total = whole.nbytes
    if group.pg is None or total == 0:
        return ReduceScatter(Exchange(), [whole])
    nbytes, traffic, transport = total // group.size, here.traffic, transport_of(group)
    if factor == 1.0 and not in_tree and (plan := plan_reduce(whole, parts, group, purpose)):
        return plan.start()
    traffic.reduces += 1
    traffic.reduce_bytes += total - nbytes
    room: Sequence[torch.Tensor] = ()
    if in_tree and not transport.keeps_parts:
        room = room_for_parts(parts, group)
    elif transport.room is not None:
        room = transport.room(parts, group)
    call, heads = _open(group, transport, purpose, nbytes, caller, whole, flags, room)
    if in_tree and not transport.keeps_parts:
        started: Any = _exchange_parts(parts, call)
    else:
        call = call if factor == 1.0 else call._replace(factor=factor)
        started = transport.reduce_scatter(whole, parts, call)
    exchange = Exchange(started.works, purpose, started.peers, heads)
    return ReduceScatter(exchange, started.parts, group.rank, started.release, in_tree)


@dataclass(frozen=True, eq=False, repr=False, slots=True)
class ReducePlan:
    """A reduce-scatter of one buffer, as ``GatherPlan``; see ``reduce_scatter_parts``."""

    whole: torch.Tensor
    parts: Sequence[torch.Tensor]
    transport: Transport
    call: Call
    nbytes: int  # that arrive here; 0: there is one rank
    scatter: ReduceScatter  # the reduction under way, or the last one: there is one at a time

    def start(self, started: Started | None = None) -> ReduceScatter:
        """Start summing every rank's buffer; ``started``: what does so, with others."""
        scatter, traffic = self.scatter, here.traffic
        if not self.nbytes:
            scatter.contributions = [self.whole]
            return scatter
        traffic.reduces += 1
        traffic.reduce_bytes += self.nbytes
        if started is None:
            started = self.transport.reduce_scatter(self.whole, self.parts, self.call)
        exchange = scatter.exchange
        exchange.works, exchange.peers, scatter.contributions, scatter.release = started
        exchange.is_lost = exchange.is_open = False
        return scatter


def plan_reduce(
    whole: torch.Tensor, parts: Sequence[torch.Tensor], group: Group, purpose: str
) -> ReducePlan | None:
    """A reduce-scatter to be started any number of times; None where each one is another.

    That is where messages go ahead of it, or the transport first makes room for what arrives.
    """
    if is_point_to_point(group) or transport_of(group).room is not None:
        return None
    nbytes = 0 if group.pg is None else whole.nbytes - whole.nbytes // group.size
    scatter = ReduceScatter(Exchange(purpose=purpose), (), group.rank)
    call = Call(group, 0, purpose)
    return ReducePlan(whole, parts, transport_of(group), call, nbytes, scatter)


def start_reduces(plans: Sequence[ReducePlan]) -> list[ReduceScatter]:
    """Start reductions together, as ``start_gathers``; what came of each plan."""
    together: dict[ReducePlan, Started] = {}
    for alike in _by_call(plans):
        first = alike[0]
        if len(alike) > 1 and first.transport.reduce_all is not None:
            wholes, parts = zip(*((plan.whole, plan.parts) for plan in alike), strict=True)
            started = first.transport.reduce_all(wholes, parts, first.call)
            together.update(zip(alike, started, strict=True))
    return [plan.start(together.get(plan)) for plan in plans]


def _exchange_parts(parts: Sequence[torch.Tensor], call: Call) -> Started:
    """Start fetching what each rank adds to this rank's part, from a transport that would sum."""
    group = replace(call.group, pg=call.group.reductions or call.group.pg)
    outgoing, incoming = ([t.view(torch.uint8) for t in side] for side in (parts, call.room))
    started = transport_of(group).exchange(outgoing, incoming, call._replace(group=group))
    return started._replace(parts=call.room)


def exchange_parts(
    parts: Sequence[torch.Tensor], group: Group, caller: Caller | None = None
) -> list[torch.Tensor]:
    """Send ``parts[r]`` to rank ``r`` and return what every rank sent here, in rank order.

    Args:
        parts: uint8, one dimension, all of the same size on every rank.
    """
    if group.pg is None:
        return list(parts)
    purpose, own = "exchange gradients", parts[group.rank]
    if caller is not None and is_point_to_point(group):
        send_heads(caller, caller.head(), group, purpose).check()
    group = replace(group, pg=group.reductions or group.pg)
    here.traffic.reduces += 1
    here.traffic.reduce_bytes += own.numel() * (group.size - 1)
    received = room_for_parts(parts, group)
    transport = transport_of(group)
    call, _ = _open(group, transport, purpose, own.nbytes, None, own)
    started = transport.exchange(parts, received, call)
    wait_for(started.works, started.peers, call.purpose)
    return received


def all_reduce(
    tensor: torch.Tensor,
    group: Group,
    op: Op = "sum",
    caller: Caller | None = None,
    flags: Flags | None = None,
    purpose: str = "add up gradients or norms over the ranks",
) -> torch.Tensor:
    """Combine ``tensor`` over the group in place and return it; ``flags`` as in a reduction."""
    if group.pg is not None:
        if caller is not None and is_point_to_point(group):
            send_heads(caller, caller.head(), group, purpose, flags).check()
        here.traffic.all_reduces += 1
        here.traffic.all_reduce_bytes += 2 * tensor.nbytes * (group.size - 1) // group.size
        with _blocking(purpose, group, tensor):
            transport_of(group).all_reduce(tensor, op, Call(group, 0, purpose))
    return tensor


def sum_replicas(
    tensor: torch.Tensor,
    group: Group,
    purpose: str,
    caller: Caller | None,
    flags: Flags | None,
    in_tree: bool,
) -> torch.Tensor:
    """The sum of gradients over the group, on every rank, in place where it is in no tree.

    A tree takes a reduce-scatter and a gather, of the same bytes, in place of an all-reduce.
    """
    if not in_tree:
        return all_reduce(tensor, group, caller=caller, flags=flags, purpose=purpose)
    width = -(-tensor.numel() // group.size)
    whole = tensor.new_zeros(width * group.size)
    whole[: tensor.numel()] = tensor
    parts = cut_by_rank(whole, group.size)
    scatter = reduce_scatter_parts(whole, parts, group, purpose, caller, flags, in_tree=in_tree)
    parts[group.rank].copy_(scatter.result(tensor.dtype, 1.0))
    cut = [part.view(torch.uint8) for part in parts]
    gather_parts(whole.view(torch.uint8), cut, cut[group.rank], group, purpose, caller).wait()
    return whole[: tensor.numel()]


@contextlib.contextmanager
def _blocking(purpose: str, group: Group, tensor: torch.Tensor) -> Iterator[None]:
    """Scope of a collective that on a CPU returns when it is done."""
    if count_modes():
        refuse_fakes(purpose)
    waiting.enter(purpose, group.ranks)
    try:
        yield
    except RuntimeError as error:
        absent = waiting.find_absent() or "it has died, is stuck, or does not take part"
        advice = f"{absent}. Look at what it printed."
        raise no_answer(purpose, "another rank", advice, error) from error
    finally:
        waiting.end_wait()
    if tensor.device.type != "cpu":
        stream = torch.get_device_module(tensor.device).current_stream(tensor.device)
        waiting.watch_mark(purpose, group.ranks, stream.record_event())


def unite(flags: Flags, group: Group, device: torch.device, caller: Caller) -> None:
    """Combine ``flags`` over the group and wait for the result, which stalls an accelerator."""
    if is_point_to_point(group):
        send_heads(caller, caller.head(), group, "compare gradients", flags).check()
        return
    here.traffic.control += 1
    tensor = flags.to_tensor().to(device)
    _take_largest(tensor, group, "compare gradients")
    flags.take(tensor)


def broadcast(tensor: torch.Tensor, group: Group, source: int = 0) -> torch.Tensor:
    """Overwrite ``tensor``, of a dtype that the backend knows, with that of the rank ``source``."""
    if group.pg is not None and tensor.numel():
        here.traffic.control += 1
        with _blocking("receive a broadcast", group, tensor):
            dist.broadcast(tensor, group.ranks[source], group=group.pg)
    return tensor


def span(
    values: Sequence[int], groups: Sequence[Group], device: torch.device, caller: Caller
) -> torch.Tensor:
    """The largest of each value over all ranks of ``groups``, then the largest of its negative.

    The values are written by kernels, so that nothing waits for a device. On an accelerator the
    result is in the order of the current stream.
    """
    both = [*values, *(-value for value in values)]
    if device.type == "cpu" and all(map(is_point_to_point, groups)):
        here.traffic.control += len(groups)
        return torch.tensor(compare_heads(both, groups, caller), device="cpu")
    if device.type == "cpu":
        tensor = torch.tensor(both, device="cpu")
    else:
        tensor = torch.empty(len(both), dtype=torch.int64, device=device)
        for index, value in enumerate(both):
            tensor[index].fill_(value)
    for group in groups:
        here.traffic.control += 1
        _take_largest(tensor, group, "compare what ranks run")
    return tensor


def _take_largest(tensor: torch.Tensor, group: Group, purpose: str) -> None:
    """Set each element to the largest of the group; on an accelerator nothing waits for it."""
    with _blocking(purpose, group, tensor) if tensor.is_cpu else contextlib.nullcontext():
        dist.all_reduce(tensor, dist.ReduceOp.MAX, group=group.pg)
