"""Other transports and codecs train as the library's own do, or raise on every rank."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace
from operator import is_
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from fsdp_compose import (
    GatherCodec,
    MixedPrecision,
    Offload,
    ShardingStrategy,
    fully_shard,
    get_state,
    no_sync,
    owner_step,
)
from fsdp_compose.base import mesh
from fsdp_compose.base.group import Call, Group, Started
from fsdp_compose.base.policy import place
from fsdp_compose.base.process import here
from fsdp_compose.base.torch_groups import ordered_group
from fsdp_compose.comm import transports
from fsdp_compose.comm.collectives import (
    exchange_parts,
    gather_parts,
    plan_gather,
    plan_reduce,
    reduce_scatter_parts,
)
from fsdp_compose.comm.messages import post_pairs
from fsdp_compose.comm.own_transports import watch_transport
from fsdp_compose.comm.posted import forget
from fsdp_compose.comm.transports import AT_ONCE, PAIRS
from fsdp_compose.comm.uneven import move_pieces

from harness import fake_world, rank_errors, run_ranks
from models import Tower, by_block, data, mesh_of_replicas, seeded


def to_bytes(shard: Tensor) -> Tensor:
    """The shard as it is; gathers then bring what they bring without a codec."""
    return shard.contiguous().view(torch.uint8).clone()


def from_bytes(encoded: Tensor, into: Tensor) -> None:
    into.copy_(encoded.clone().view(into.dtype))


EXACT = GatherCodec(to_bytes, from_bytes)
COLLECTIVES = replace(AT_ONCE, reduce_scatter=PAIRS.reduce_scatter, may_wait=True)
"""Gloo's own gather, which copies the shard, and the exact sum."""

WAYS: dict[str, tuple[dict[str, Any], bool]] = {
    "default": ({}, False),
    "kept": ({"strategy": ShardingStrategy.SHARD_GRAD_OP}, False),
    "spread": ({"reshard_after_forward": 2}, False),
    "hybrid": ({"strategy": ShardingStrategy.HYBRID_SHARD}, True),
    "offloaded": ({"offload_policy": Offload(params=True)}, False),
}


def train(options: dict[str, Any], is_hybrid: bool) -> tuple[list[Tensor], tuple[int, int]]:
    if is_hybrid:
        options = options | {"mesh": mesh_of_replicas(2, 2)}
    model = by_block(seeded(Tower), **options)
    optim = torch.optim.AdamW(model.parameters(), lr=0.01)
    for seed in range(3):
        here.traffic.reset()
        model(data(seed, dist.get_rank())).square().mean().backward()
        optim.step()
        optim.zero_grad()
    moved = here.traffic.gather_bytes, here.traffic.reduce_bytes
    return [p.full_tensor() for p in model.parameters()], moved


def test_sums_over_replicas_say_which_unit_they_are_of() -> None:
    purposes: list[str] = []

    def all_reduce(tensor: Tensor, op: Any, call: Call) -> None:
        purposes.append(call.purpose)

    noting = replace(AT_ONCE, all_reduce=all_reduce)
    with fake_world(2):
        model = fully_shard(seeded(Tower), strategy=ShardingStrategy.NO_SHARD, transport=noting)
        model(data(0, 0)).sum().backward()
    assert "reduce gradients of unit 'Tower' over the replicas" in purposes, purposes


@pytest.mark.parametrize("way", WAYS)
def test_an_exact_codec_and_a_transport_change_nothing(way: str) -> None:
    """Bit for bit the same weights, and as many bytes, with and without them."""

    def ranks(rank: int) -> None:
        options, is_hybrid = WAYS[way]
        weights, moved = train(options, is_hybrid)
        for more in ({"mp_policy": MixedPrecision(gather_codec=EXACT)}, {"transport": COLLECTIVES}):
            found, bytes_moved = train(options | more, is_hybrid)
            assert all(map(torch.equal, found, weights)), more
            assert bytes_moved == moved, more

    run_ranks(ranks, 4)


@pytest.mark.parametrize("is_hybrid", [False, True])
def test_reductions_have_a_communicator_of_their_own(
    monkeypatch: pytest.MonkeyPatch, is_hybrid: bool
) -> None:
    """Where a communicator works in order, no gather waits behind a reduction."""
    gathered: set[Any] = set()
    reduced: list[Any] = []
    gather = transports.all_gather_single

    def all_gather(pg: Any, *given: Any) -> Any:
        gathered.add(pg)
        return gather(pg, *given)

    def reduce_scatter(pg: Any, own: Tensor, whole: Tensor, options: Any) -> None:
        reduced.append(pg)
        dist.all_reduce(whole, group=pg)
        own.copy_(whole.chunk(2)[dist.get_rank(pg)])

    def ranks(rank: int) -> None:
        options = {"strategy": ShardingStrategy.HYBRID_SHARD_OPTIMIZER} if is_hybrid else {}
        wanted, _ = train(options, is_hybrid)
        monkeypatch.setattr(mesh, "QUEUES", ("gloo",))
        monkeypatch.setattr(transports, "all_gather_single", all_gather)
        monkeypatch.setattr(transports, "reduce_scatter_single", reduce_scatter)
        at_once = {"transport": replace(AT_ONCE, may_wait=True)}
        found, _ = train(options | at_once, is_hybrid)
        assert len(set(reduced)) == 1 + is_hybrid  # over each axis
        assert gathered and reduced[0] not in gathered
        for value, other in zip(found, wanted):
            torch.testing.assert_close(value, other)

    run_ranks(ranks, 4 if is_hybrid else 2)


def test_a_hooks_exchange_is_a_reduction() -> None:
    """As of gradients in int8: no gather waits behind it either."""
    used: list[Any] = []

    def exchange(outgoing: Any, incoming: Any, call: Call) -> Started:
        used.append(call.group.pg)
        return Started()

    pgs: Any = "of gathers", "of reductions"
    transport, parts = replace(AT_ONCE, exchange=exchange), list(torch.zeros(2, 4).byte())
    exchange_parts(parts, Group(pgs[0], 0, 2, "nccl", (0, 1), "", "", transport, pgs[1]))
    exchange_parts(parts, Group(pgs[0], 0, 2, "nccl", (0, 1), "", "", transport))
    assert used == [pgs[1], pgs[0]]


def test_a_smaller_group_serves_its_tensors_device() -> None:
    """Also where units on another device, which another backend serves, asked for it first."""

    def ranks(rank: int) -> None:
        every = mesh.group_of(dist.group.WORLD, torch.device("cpu"))
        first = mesh.subgroup_of(every, 2)
        other = mesh.subgroup_of(replace(every, backend="nccl"), 2)
        assert (first.backend, other.backend, other.pg) == ("gloo", "nccl", first.pg)

    run_ranks(ranks, 4)


def test_gloo_is_refused_for_what_lies_on_a_device() -> None:
    """It would read the addresses as those of the host."""

    def ranks(rank: int) -> None:
        device, placement = torch.device("cuda", 0), place(None, None)
        with pytest.raises(ValueError, match="on cuda:0, but the process group serves it by gloo"):
            mesh.resolve_mesh(None, device, placement)
        mesh.resolve_mesh(None, device, placement, AT_ONCE)
        mesh.resolve_mesh("self", device, placement)

    run_ranks(ranks, 2)


def test_what_lies_on_the_host_travels_where_nccl_does(monkeypatch: pytest.MonkeyPatch) -> None:
    """Norms of offloaded gradients, and slices: groups of NCCL alone serve no host."""
    moved: list[Tensor] = []
    served = ["cpu:gloo,meta:nccl", "meta:nccl"]
    monkeypatch.setattr(dist, "get_backend_config", lambda pg: served[0])
    monkeypatch.setattr(dist, "all_reduce", lambda tensor, op, group: moved.append(tensor))
    monkeypatch.setattr(transports, "all_gather_single", lambda *given: moved.extend(given[1:3]))
    call = Call(Group(None, 0, 2, "nccl", (0, 1)), 0, "")
    whole, own = torch.zeros(4, dtype=torch.uint8), torch.ones(2, dtype=torch.uint8)
    AT_ONCE.all_reduce(own, "sum", call)
    AT_ONCE.gather(whole, whole.chunk(2), own, call)
    assert all(map(is_, moved, (own, whole, own)))
    del served[0], moved[:]
    for start in (
        lambda: AT_ONCE.all_reduce(own, "sum", call),
        lambda: AT_ONCE.gather(whole, whole.chunk(2), own, call),
    ):
        with pytest.raises(NotImplementedError, match="copy out of meta"):  # what came back
            start()
    assert [tensor.device.type for tensor in moved] == ["meta"] * 3


def test_a_smaller_group_is_made_by_its_ranks_alone() -> None:
    """Also in a job whose ranks are bound to devices, which torch would have split the group."""

    def ranks(rank: int) -> None:
        world: Any = dist.group.WORLD
        dist.new_group([0])  # which counts as a group on one of them alone
        world.bound_device_id = bound = torch.device("cuda", rank)
        if rank < 2:
            group: Any = ordered_group([0, 1])
            assert group.bound_device_id is None  # it was made as in a job without
            assert ordered_group([0, 1]).group_name != group.group_name
        assert world.bound_device_id == bound

    run_ranks(ranks, 3)


def test_a_copy_is_not_sent_once_weights_are_written() -> None:
    """By a transport of one's own that copies, on a backend that compares nothing before."""
    sent: list[Tensor] = []

    def gather(whole: Tensor, parts: Any, own: Tensor, call: Call) -> Started:
        for part in parts:  # every rank is played by this one
            part.copy_(own)
        sent.append(own.clone())
        return Started()

    def copy(shard: Tensor, group: Group) -> SimpleNamespace:
        return SimpleNamespace(memory=shard.clone())

    with fake_world(2):
        transport = replace(AT_ONCE, gather=gather, gather_all=None, copy=copy)
        model = fully_shard(nn.Linear(4, 4), transport=transport)
        optim = torch.optim.SGD(model.parameters(), lr=0.1)
        (bucket,) = get_state(model).unit.buckets
        for _ in range(3):
            with no_sync(model):
                model(torch.ones(2, 4)).sum().backward()
            sent.clear()
            model(torch.ones(2, 4)).sum().backward()
            (found,) = sent
            assert torch.equal(found.view(torch.float32), bucket.stored)
            optim.step()
            optim.zero_grad()


def test_pieces_travel_from_where_they_lie(monkeypatch: pytest.MonkeyPatch) -> None:
    """The exchange of the collective transport sends no copies, and nothing to the rank itself."""

    def all_to_all(received: list[Tensor], sent: list[Tensor], group: Any) -> None:
        me = dist.get_rank(group)
        assert not sent[me].numel() and not received[me].numel()
        works = [dist.isend(piece, r) for r, piece in enumerate(sent) if piece.numel()]
        for r, piece in enumerate(received):
            if piece.numel():
                dist.recv(piece, r)
        for work in works:
            work.wait()

    def ranks(rank: int) -> None:
        monkeypatch.setattr(dist, "all_to_all", all_to_all)
        world = replace(mesh.group_of(dist.group.WORLD, torch.device("cpu")), backend="nccl")
        buffer = torch.arange(10, dtype=torch.uint8) + 10 * rank
        outgoing = list(buffer.split([3, 2, 5]))
        incoming = [torch.zeros(len(outgoing[rank]), dtype=torch.uint8) for _ in range(3)]
        AT_ONCE.exchange(outgoing, incoming, Call(world, 0, "exchange"))
        begin = (0, 3, 5)[rank]
        for r, piece in enumerate(incoming):
            sent = torch.arange(begin, begin + len(piece), dtype=torch.uint8) + 10 * r
            assert torch.equal(piece, sent if r != rank else torch.zeros_like(piece))

    run_ranks(ranks, 3)


@pytest.mark.parametrize("backend", ["nccl", "gloo"])
def test_half_gradients_are_divided_before_the_sum(
    backend: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By NCCL on the way, and the packed gradients stay as they are; on gloo here, in place."""
    asked: list[dist.ReduceOp] = []

    def scatter(pg: Any, total: Tensor, whole: Tensor, options: Any) -> None:
        """As NCCL does it, whose operation says that it multiplies by 1/4 first."""
        asked.append(options.reduceOp)
        summed = whole.float() / 4
        dist.all_reduce(summed)
        total.copy_(summed[: total.numel()] if dist.get_rank() == 0 else summed[total.numel() :])

    def ranks(rank: int) -> None:
        monkeypatch.setattr(transports, "reduce_scatter_single", scatter)
        group = mesh.group_of(dist.group.WORLD, torch.device("cpu"))
        if backend == "nccl":
            group = replace(group, backend="nccl")
        whole = torch.full((8,), 60000.0, dtype=torch.float16)
        found = reduce_scatter_parts(whole, whole.chunk(2), group, factor=0.25)
        assert torch.equal(found.result(torch.float16, 2.0), torch.full((4,), 60000.0).half())
        assert float(whole[0]) == (60000.0 if backend == "nccl" else 15000.0)
        assert asked == ([dist.ReduceOp.PREMUL_SUM] if backend == "nccl" else [])

    run_ranks(ranks, 2)


@pytest.mark.parametrize(("x", "factor"), [(200.0, 300.0), (2.0**-23, 1.0)])
def test_half_gradients_near_the_limits_stay(x: float, factor: float) -> None:
    """The largest do not overflow, and the smallest are divided by no more than that takes."""

    def ranks(rank: int) -> None:
        linear = nn.Linear(8, 1, bias=False)
        model = fully_shard(linear, mp_policy=MixedPrecision(torch.float16, torch.float16))
        out = model(torch.full((1, 8), x, dtype=torch.float16))
        (out.float() * factor).sum().backward()
        grad = model.weight.grad
        assert grad is not None
        assert torch.equal(grad.full_tensor(), torch.full((1, 8), x * factor)), grad.full_tensor()

    run_ranks(ranks, 2)


def test_ranks_that_chose_others_raise() -> None:
    """A codec or a transport on one rank alone is an error on every rank, before anything."""

    def codec(rank: int) -> None:
        fully_shard(nn.Linear(8, 8), mp_policy=MixedPrecision(gather_codec=EXACT if rank else None))

    def transport(rank: int) -> None:
        fully_shard(nn.Linear(8, 8), transport=COLLECTIVES if rank else None)

    for error in rank_errors(codec, 2):
        assert error is not None and "gather_codec" in error, error
    for error in rank_errors(transport, 2):
        assert error is not None and "transport" in error, error


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"transport": "ring"}, "wanted a Transport"),
        ({"layout": 3}, "layout is 3"),
        ({"layout": lambda extents, itemsize, ranks: 3}, "returned int"),
    ],
)
def test_what_is_no_seam_is_refused(options: dict[str, Any], text: str) -> None:
    with pytest.raises(TypeError, match=text):
        fully_shard(nn.Linear(2, 2), **options)


@pytest.mark.parametrize(
    ("answer", "text"),
    [
        (lambda parts: Started(), r"for reduce_scatter returned Started\(.*; wanted"),
        (lambda parts: Started(parts=parts[:1]), "a part that lies in whole, which is released"),
        (lambda parts: Started(parts=parts), "a part that lies in whole, which is released"),
        (lambda parts: Started(parts=[parts[0][:3].clone()]), r"parts of \[3\] elements; .* of 4"),
    ],
)
def test_what_a_transport_must_return(answer: Callable[[Any], Started], text: str) -> None:
    """What is no part of a sum, or in memory of the library, is an error that names the call."""
    nothing: Any = lambda *_: None  # noqa: E731
    for way in PAIRS, AT_ONCE:  # by messages, and by a plan
        reduce: Any = lambda whole, parts, call: answer(parts)  # noqa: E731
        wrong = replace(way, gather=nothing, reduce_scatter=reduce)
        whole = torch.zeros(8)
        with fake_world(2):
            own = watch_transport(wrong)
            group = mesh.with_transport(mesh.group_of(dist.group.WORLD, whole.device), own)
            with pytest.raises(TypeError, match="for gather returned None; wanted"):
                gather_parts(whole, whole.chunk(2), whole[:4], group)
            with pytest.raises((TypeError, ValueError), match=text):
                reduce_scatter_parts(whole, whole.chunk(2), group)


def test_what_encode_must_return() -> None:
    """A codec whose answer is no row of bytes is an error that says what it returned."""
    wrong = MixedPrecision(gather_codec=GatherCodec(lambda shard: shard, from_bytes))

    def ranks(rank: int) -> None:
        model = fully_shard(nn.Linear(8, 8), mp_policy=wrong)
        model(torch.ones(1, 8))

    for error in rank_errors(ranks, 2):
        assert error is not None and "encode returned" in error and "uint8" in error, error


class Work:
    """As a collective's, whose first wait fails."""

    def __init__(self) -> None:
        self.waits = 0

    def wait(self) -> None:
        self.waits += 1
        if self.waits == 1:
            raise RuntimeError("the connection was closed")


@pytest.mark.parametrize("reduces", [False, True])
def test_a_plan_starts_anew_after_a_wait_that_failed(reduces: bool) -> None:
    """What it started then is waited for, also where nobody reads it: its memory is freed next."""
    whole, work = torch.zeros(8, dtype=torch.uint8), Work()

    def start(*_: object) -> Started:
        return Started((work,), parts=(whole[:4].float(),))

    with fake_world(2):
        way = replace(AT_ONCE, gather=start, reduce_scatter=start)
        pg: Any = dist.group.WORLD
        group = Group(pg, 0, 2, "fake", (0, 1), transport=way)
        parts = [whole[:4], whole[4:]]
        reduction = plan_reduce(whole, parts, group, "reduce")
        assert reduction is not None
        gather = plan_gather(whole, parts, parts[0], group, "gather")
        for _ in range(2):
            exchange = reduction.start().exchange if reduces else gather.start()
            if not work.waits:
                with pytest.raises(RuntimeError, match="the connection was closed"):
                    exchange.wait()
                assert exchange.will_be_lost()
        exchange.end()
        assert work.waits == 2


class FakeGroup:
    """A process group of which a test says what its messages do."""

    recv: Callable[..., object]
    send: Callable[..., object]


def test_the_living_are_served_though_a_rank_has_died() -> None:
    """They would wait for this rank until the timeout, and name it instead of the dead one."""
    served: list[tuple[str, int]] = []

    def start(what: str) -> Callable[..., object]:
        def act(tensors: list[Tensor], peer: int, tag: int) -> None:
            if peer == 1:
                raise RuntimeError("Connection closed by peer")
            served.append((what, peer))

        return act

    pg = FakeGroup()
    pg.recv, pg.send = start("receive"), start("send")
    group: Any = SimpleNamespace(pg=pg, ranks=[10, 11, 12, 13])
    tensors = {peer: torch.zeros(2) for peer in (1, 0, 3)}
    with fake_world(4, rank=2), pytest.raises(RuntimeError, match="rank 11 does not answer"):
        post_pairs(tensors, tensors, group, 7, "gather")
    assert served == [("receive", 0), ("receive", 3), ("send", 0), ("send", 3)]
    forget([None])


def gather_now(whole: Tensor, parts: Any, own: Tensor, call: Call) -> Started:
    dist.all_gather([*parts], own.clone(), group=call.group.pg)
    return Started()


def reduce_now(whole: Tensor, parts: Any, call: Call) -> Started:
    dist.all_reduce(whole, group=call.group.pg)
    return Started(parts=[parts[call.group.rank].clone()])


def exchange_now(outgoing: Any, incoming: Any, call: Call) -> Started:
    started = PAIRS.exchange(outgoing, incoming, call)
    for work in started.works:
        work.wait()
    forget(started.works)
    return Started()


@pytest.mark.parametrize(
    ("name", "function", "what"),
    [
        ("gather", gather_now, "gather unit 'Linear'"),
        ("reduce_scatter", reduce_now, "reduce gradients of unit 'Linear'"),
        ("exchange", exchange_now, "send matrices to their owners"),
    ],
)
def test_a_function_that_waits_says_for_whom(
    name: str, function: Callable[..., Started], what: str
) -> None:
    """A user's, in which another rank dies: what this rank was to do, and with which ranks."""
    calls: list[Call] = []

    def wait(*given: Any) -> Started:
        calls.append(given[-1])
        if dist.get_rank() == 1 and len(calls) == 3:
            os._exit(3)
        return function(*given)

    def ranks(rank: int) -> None:
        changed: Any = {name: wait}
        own = replace(PAIRS, may_wait=True, **changed)
        model = fully_shard(nn.Linear(8, 8), transport=own)
        optim = owner_step([model.weight], torch.optim.Muon)
        for _ in range(4):
            model(torch.ones(2, 8)).sum().backward()
            optim.step()

    errors = [str(error) for error in rank_errors(ranks, 3)[::2]]
    said = [error for error in errors if f"waits to {what}, and one of ranks" in error]
    assert said, errors  # a rank that has what it needs waits for something else
    assert f"does not take part; or the transport's function for {name} is wrong" in said[0]


def test_pieces_of_any_size_travel_at_once() -> None:
    """Also over gloo, whose own collective takes pieces of one size alone."""

    def ranks(rank: int) -> list[int]:
        group = replace(mesh.group_of(dist.group.WORLD, torch.device("cpu")), transport=AT_ONCE)
        sizes = [[0, 3, 1], [2, 0, 0], [5, 4, 0]]
        outgoing = [torch.full((n,), rank, dtype=torch.uint8) for n in sizes[rank]]
        incoming = [torch.full((row[rank],), 9, dtype=torch.uint8) for row in sizes]
        move_pieces(outgoing, incoming, group, "move")
        return [value for piece in incoming for value in piece.tolist()]

    assert run_ranks(ranks, 3) == [[1, 1, *[2] * 5], [0, 0, 0, *[2] * 4], [0]]
