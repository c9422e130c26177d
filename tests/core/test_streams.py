"""Is all work on a device's streams ordered, and does the host never wait? On a played device."""

from __future__ import annotations

import inspect
import threading
from collections.abc import Callable
from functools import partial
from operator import is_
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from played_device import Device, Event, Stream, wait_for, watched
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils.checkpoint import checkpoint

import fsdp_compose as fc
from fsdp_compose import MixedPrecision, Prefetch, ShardingStrategy
from fsdp_compose.base import streams
from fsdp_compose.base.process import here
from fsdp_compose.buckets.gather import start_fills
from fsdp_compose.comm import collectives as comm
from fsdp_compose.comm import waiting
from fsdp_compose.comm.transports import AT_ONCE, PAIRS
from fsdp_compose.core import gathering as residency
from fsdp_compose.core import reducing
from fsdp_compose.core.guards import static_buffers
from fsdp_compose.scopes import comm_hooks

from harness import rank_errors, run_ranks
from models import (
    Checkpointed,
    ThreeBuckets,
    Tower,
    assert_at_rest,
    by_block,
    data,
    mesh_of_replicas,
    seeded,
    sgd,
    square,
    units,
)

TOGETHER = {"transport": AT_ONCE, "mp_policy": MixedPrecision(torch.float64, torch.float64)}


def train(rank: int, world: int, build: Callable[[], nn.Module], options: dict[str, Any]) -> None:
    if "mesh" in options:
        options = {**options, "mesh": mesh_of_replicas(*options["mesh"])}
    with pytest.MonkeyPatch.context() as monkeypatch, watched(monkeypatch) as races:
        if "transport" in options:
            monkeypatch.setattr(comm, "is_point_to_point", lambda group: False)
        model = by_block(seeded(build), **options)
        optim = sgd(model.parameters())
        for step in range(4):
            with fc.no_sync(model):
                square(model, data(step, rank)).backward()
            square(model, data(10 + step, rank)).backward()
            fc.clip_grad_norm_(model, 1.0)
            optim.step()
            optim.zero_grad()
        fc.set_requires_all_reduce(model, False)
        for step in range(3):
            square(model, data(20 + step, rank)).backward()
        fc.reduce_grads(model)  # where there are replicas, the sum over them alone
        optim.step()
        with torch.no_grad():
            model(data(0, rank))
            for unit in units(model):  # which evaluation may keep
                fc.reshard(unit.modules[0]())
    assert_at_rest(model)
    if options.get("strategy") is not ShardingStrategy.NO_SHARD:
        assert ("gather into", False) in races.seen and ("gather into", True) not in races.seen
        assert ("reduce", False) in races.seen and ("reduce", True) not in races.seen
    assert races.found == []
    assert ("transport" in options) == (3 in races.calls)  # blocks together, and the rest alone
    assert ("transport" in options) == (2 in races.reduce_calls)  # what is frozen is not reduced


CELLS: dict[str, tuple[int, dict[str, Any], Callable[[], nn.Module]]] = {
    "default": (2, {}, Tower),
    "checkpointed": (2, {}, lambda: Checkpointed("outside", False, depth=3)),
    "kept": (2, {"strategy": ShardingStrategy.SHARD_GRAD_OP}, Tower),
    "no shard": (2, {"strategy": ShardingStrategy.NO_SHARD}, Tower),
    "hybrid": (4, {"strategy": ShardingStrategy.HYBRID_SHARD, "mesh": (2, 2)}, Tower),
    "fused": (4, {"strategy": ShardingStrategy.HYBRID_SHARD_OPTIMIZER, "mesh": (2, 2)}, Tower),
    "spread": (4, {"reshard_after_forward": 2}, Tower),
    "low precision": (2, {"mp_policy": MixedPrecision(torch.float32, torch.float32)}, Tower),
    "no prefetch": (2, {"prefetch": Prefetch(0, 0)}, Tower),
    "deep prefetch": (2, {"prefetch": Prefetch(3, 3, "post")}, Tower),
    "static": (2, {"static_buffers": True}, lambda: Tower(4)),
    "no shard, static": (
        2,
        {"strategy": ShardingStrategy.NO_SHARD, "static_buffers": True},
        lambda: Tower(4),
    ),
    "together": (2, TOGETHER, ThreeBuckets),
    "together, spread": (4, {**TOGETHER, "reshard_after_forward": 2}, ThreeBuckets),
    "together, static": (2, {**TOGETHER, "static_buffers": 4}, ThreeBuckets),
}


@pytest.mark.parametrize("cell", CELLS)
def test_streams_are_ordered_and_the_host_never_waits(cell: str) -> None:
    """Work on streams is ordered and the host never waits."""
    world, options, build = CELLS[cell]
    run_ranks(train, world, world, build, options)


def test_static_buffers_belong_to_the_gather_stream() -> None:
    """The allocator then gives their memory, once the model is gone, to later gathers alone."""

    def ranks(rank: int) -> None:
        with pytest.MonkeyPatch.context() as monkeypatch, watched(monkeypatch) as races:
            place, device = static_buffers.place_full, races.device
            used: list[Any] = []

            def noted(*args: Any) -> None:
                used.append(device.active)
                place(*args)

            monkeypatch.setattr(static_buffers, "place_full", noted)
            model = by_block(seeded(Tower), static_buffers=True)
            square(model, data(0, rank)).backward()
            (gather,) = {unit.engine.streams.gather for unit in units(model)}
        assert gather is not device.main and used == [gather] * 4

    run_ranks(ranks, 2)


class Partly(Tower):
    """Recomputes its head where asked for."""

    def forward(self, x: Tensor, again: bool) -> Tensor:
        x = torch.tanh(self.blocks[0](self.first(x)))
        return checkpoint(self.head, x, use_reentrant=True) if again else self.head(x)


def test_a_recomputed_part_waits_for_a_reduction() -> None:
    """The buffer that its gradients go to may still be read for those of another forward."""

    def ranks(rank: int) -> None:
        with pytest.MonkeyPatch.context() as monkeypatch, watched(monkeypatch) as races:
            model, x = by_block(seeded(lambda: Partly(1)), transport=PAIRS), data(0, rank)
            (model(x, True) + model(2 * x, False)).sum().backward()
        assert ("reduce", False) in races.seen and races.found == []

    run_ranks(ranks, 2)


def test_asking_for_gradients_waits_for_a_reduction() -> None:
    """In a hook of a backward whose reductions may still read the buffers."""

    def ranks(rank: int) -> None:
        with pytest.MonkeyPatch.context() as monkeypatch, watched(monkeypatch) as races:
            model, x = by_block(seeded(Tower), transport=PAIRS), data(0, rank)
            other, weight = square(model, 2 * x), model.blocks[2].up.weight
            hook = lambda grad: torch.autograd.grad(other, weight) and None  # noqa: E731
            model.blocks[2].register_forward_pre_hook(
                lambda _, args: args[0].register_hook(hook) and None
            )
            square(model, x).backward()
        assert ("reduce", False) in races.seen and races.found == []

    run_ranks(ranks, 2)


def test_events_and_scopes_are_made_once() -> None:
    """From the third step on no event and no scope of a stream is made, only used again."""
    made: list[str] = []

    def counted(kind: type) -> Callable[..., None]:
        make = kind.__init__

        def init(self: Any, *args: Any) -> None:
            made.append(kind.__name__)
            make(self, *args)

        return init

    def ranks(rank: int) -> None:
        with pytest.MonkeyPatch.context() as patch, watched(patch):
            for kind in (Event, streams._Scope):
                patch.setattr(kind, "__init__", counted(kind))
            model = by_block(seeded(Tower), offload_policy=fc.Offload(grads=True))
            patch.setattr(Event, "synchronize", lambda event: None)
            for step in range(6):
                if step == 2:
                    assert {"Event", "_Scope"} <= set(made)
                    made.clear()
                square(model, data(step, rank)).backward()
        assert made == []

    run_ranks(ranks, 2)


def test_a_scope_is_entered_again_and_on_threads() -> None:
    """What was current before is current again, on each thread by itself."""
    device = streams.Streams(torch.device("cpu"), Stream(), Stream())
    here, there = Device(), Device()
    with pytest.MonkeyPatch.context() as patch:
        get = threading.get_ident
        mine = get()
        patch.setattr(streams, "_module", lambda of: here if get() == mine else there)

        def other() -> None:
            scope.__enter__()
            entered.wait()
            scope.__exit__()
            found.append(there.active is there.main)

        found: list[bool] = []
        entered = threading.Event()
        scope = device.beside(device.gather)
        thread = threading.Thread(target=other)
        with scope, device.beside(device.reduce), scope:
            assert here.active is device.gather
            thread.start()
            while there.active is there.main:
                pass
        assert here.active is here.main
        entered.set()
        thread.join()
    assert found == [True]


def test_a_scope_leaves_the_current_device_alone() -> None:
    """Where a model is on another device than the current one, both keep their streams."""
    kept = {torch.device("cpu"): Stream(), torch.device("meta"): Stream()}
    module = SimpleNamespace(streams=dict(kept), current=torch.device("meta"))

    def set_stream(stream: Stream) -> None:
        module.current = next((d for d, s in kept.items() if s is stream), torch.device("cpu"))
        module.streams[module.current] = stream

    module.set_stream = set_stream
    module.current_stream = lambda device=None: module.streams[device or module.current]
    device = streams.Streams(torch.device("cpu"), Stream(), Stream())
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(streams, "_module", lambda of: module)
        with device.beside(device.gather):
            assert module.current_stream() is device.gather
    assert module.streams == kept and module.current == torch.device("meta")


@pytest.mark.parametrize(("build", "options"), [(Tower, {}), (ThreeBuckets, TOGETHER)])
def test_what_a_device_waits_for_is_noted(
    build: Callable[[], nn.Module], options: dict[str, Any]
) -> None:
    """Each gather and reduction with its ranks, for the error about a rank that does not answer."""

    def ranks(rank: int) -> None:
        noted: list[tuple[str, list[int], bool]] = []

        def note(purpose: str, ranks: Any, mark: Any) -> None:
            noted.append((purpose, list(ranks), isinstance(mark, streams.Mark)))

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(waiting, "watch_mark", note)
            model = by_block(seeded(Tower))
            square(model, data(0, rank)).backward()
            assert noted == []  # the host waits itself
            with watched(patch):
                if options:
                    patch.setattr(comm, "is_point_to_point", lambda group: False)
                model = by_block(seeded(build), **options)
                square(model, data(0, rank)).backward()
        wanted = {f"{what} unit 'blocks.0'" for what in ("gather", "reduce gradients of")}
        assert wanted <= {purpose for purpose, _, _ in noted}
        assert all(given == [0, 1] and is_mark for _, given, is_mark in noted)

    run_ranks(ranks, 2)


def test_a_reduction_over_two_axes_names_all_ranks() -> None:
    """The device passes its mark once the replicas have come, too."""

    def ranks(rank: int) -> None:
        noted: list[tuple[str, list[int]]] = []
        with pytest.MonkeyPatch.context() as patch, watched(patch):
            patch.setattr(waiting, "watch_mark", lambda what, ranks, _: noted.append((what, ranks)))
            mesh = mesh_of_replicas(2, 2)
            fused = ShardingStrategy.HYBRID_SHARD_OPTIMIZER
            model = by_block(seeded(Tower), strategy=fused, mesh=mesh)
            square(model, data(0, rank)).backward()
        reduced = [sorted(ranks) for what, ranks in noted if what.startswith("reduce")]
        assert reduced and all(found == [0, 1, 2, 3] for found in reduced)

    run_ranks(ranks, 4)


def test_buckets_that_travel_together_are_one_wait() -> None:
    """The compute stream waits once for all buckets of a unit, which one call gathers."""

    def ranks(rank: int) -> None:
        waits: list[Any] = []
        with pytest.MonkeyPatch.context() as patch, watched(patch) as races:
            patch.setattr(comm, "is_point_to_point", lambda group: False)
            model = by_block(seeded(ThreeBuckets), **TOGETHER)
            handle = fc.unshard(model.blocks[0], async_op=True)
            unit = fc.get_state(model.blocks[0]).unit
            marks = {bucket.fill.mark for bucket in unit.gathered}
            patch.setattr(races.device.main, "wait_event", waits.append)
            handle.wait()
            assert races.calls == [3] and [mark.event for mark in marks] == waits

    run_ranks(ranks, 2)


def test_a_failed_backward_waits_for_its_reduction() -> None:
    """The buffer of a reduction that a failure left under way is not freed while it is read."""

    def ranks(rank: int) -> None:
        with pytest.MonkeyPatch.context() as patch, watched(patch) as races:
            model = by_block(seeded(Tower))
            engine = next(iter(here.engines.values()))
            fail = model.blocks[0].register_forward_hook(
                lambda module, args, out: out.register_hook(lambda grad: 1 / 0) and None
            )
            with pytest.raises(ZeroDivisionError):
                square(model, data(0, rank)).backward()
            fail.remove()
            left = [dict(reduction.done.event.clock) for reduction in engine.reductions]
            assert left
            with fc.no_sync(model):  # clears what the failed step left
                assert engine.reductions == []
            clock = races.device.main.clock
            assert all(clock.get(k, 0) >= tick for done in left for k, tick in done.items())

    run_ranks(ranks, 2)


OFFLOADS = {
    "params": fc.Offload(params=True),
    "params and grads": fc.Offload(params=True, grads=True),
    "grads": fc.Offload(grads=True),
}


@pytest.mark.parametrize("offload", OFFLOADS)
def test_the_host_waits_at_the_end_of_a_pass_alone(offload: str) -> None:
    """Gradients go to the host on the reduce stream; it may write its shards after each pass."""

    def ranks(rank: int) -> None:
        waits: list[str] = []
        copies: list[bool] = []
        back: list[Any] = []  # arguments of copies to the device
        move = Tensor.to

        def to_device(tensor: Tensor, *given: Any, **options: Any) -> Tensor:
            if inspect.stack()[1].function == "_deliver":
                back.append((given, options))
            return move(tensor, *given, **options)

        def to_host(grad: Tensor, pin_memory: bool) -> Tensor:
            copies.append(here.engines[grad.device].streams.reduce is races.device.active)
            return grad.clone()

        def synchronize(mark: streams.Mark) -> None:
            waits.append(inspect.stack()[1].function)
            races.device.active.wait_event(mark.event)  # and so does what the host issues then

        with pytest.MonkeyPatch.context() as patch, watched(patch) as races:
            patch.setattr(reducing, "copy_to_host", to_host)
            patch.setattr(Tensor, "to", to_device)
            patch.setattr(streams.Mark, "synchronize", synchronize)
            model = by_block(seeded(Tower), offload_policy=OFFLOADS[offload])
            plain, engine = seeded(Tower), next(iter(here.engines.values()))
            with fc.accumulate(model):
                for micro in range(3):
                    fc.set_is_last_backward(model, micro == 2)
                    loss = square(model, data(micro, rank))
                    assert engine.host_reads is None  # the caller may write shards here too
                    loss.backward()
                    for other in range(2):
                        (square(plain, data(micro, other)) / 2).backward()
            assert engine.host_reads is None
        assert races.found == [] and all(copies)
        assert set(waits) <= {"land", "wait_for_host_reads"}
        assert ("wait_for_host_reads" in waits) == ("params" in offload)
        assert bool(copies) and ("land" in waits)
        in_order = (torch.device("cpu"),), {"non_blocking": True}
        assert bool(back) == (offload == "grads") and all(given == in_order for given in back)
        for found, wanted in zip(model.parameters(), plain.parameters()):
            torch.testing.assert_close(found.grad.full_tensor(), wanted.grad)

    run_ranks(ranks, 2)


@pytest.mark.parametrize("world", [1, 2])
@pytest.mark.parametrize("accumulates", [False, True])
def test_gradients_leave_the_device_one_by_one(world: int, accumulates: bool) -> None:
    """Of those that were sent to the host none stays, but the last one where it was not reduced to
    memory of its own.
    """

    def ranks(rank: int) -> None:
        sent: list[StorageWeakRef] = []
        alive: list[int] = []

        def to_host(grad: Tensor, pin_memory: bool) -> Tensor:
            alive.append(sum(not storage.expired() for storage in sent))
            sent.append(StorageWeakRef(grad.untyped_storage()))
            return grad.clone()

        with pytest.MonkeyPatch.context() as patch, watched(patch) as races:
            patch.setattr(reducing, "copy_to_host", to_host)
            patch.setattr(Event, "synchronize", wait_for)
            model = by_block(seeded(Tower), offload_policy=fc.Offload(params=True))
            for step in range(3):
                if accumulates:
                    fc.set_is_last_backward(model, False)
                    square(model, data(step, rank)).backward()
                    with fc.skippable_step(model) as skipped:  # which puts copies in their place
                        skipped.discard("it is a test")
                    fc.set_is_last_backward(model, True)
                square(model, data(step, rank)).backward()
                model.zero_grad()
        assert races.found == [] and len(alive) == 3 * len(units(model))
        assert max(alive) == (world == 1 or accumulates)

    run_ranks(ranks, world)


def test_hooks_keep_what_was_loaded_while_they_read() -> None:
    """It is memory of the stream that loaded it, which would use it again."""

    def ranks(rank: int) -> None:
        with pytest.MonkeyPatch.context() as patch, watched(patch) as races:
            patch.setattr(Event, "synchronize", wait_for)
            model, state = by_block(seeded(Tower)), comm_hooks.Int8ErrorFeedback()
            fc.register_comm_hook(model, state, comm_hooks.int8_error_feedback_hook)
            for step in range(4):
                square(model, data(step, rank)).backward()
                state.load_state_dict(state.state_dict())
        assert ("aten::where.self", False) in races.seen and races.found == []

    run_ranks(ranks, 2)


def test_a_captured_step_compares_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """A captured step asks no rank and no stream for anything, and computes the same."""

    def steps(rank: int, capture: bool) -> list[Tensor]:
        asked: list[Any] = []
        with pytest.MonkeyPatch.context() as patch, watched(patch):
            model = by_block(seeded(Tower))
            optim = sgd(model.parameters())
            for step in range(3):
                if capture and step == 2:
                    patch.setattr(torch.cuda, "is_initialized", lambda: True)
                    patch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
                    patch.setattr(comm, "span", lambda *args: asked.append(args))
                square(model, data(step, rank)).backward()
                optim.step()
                optim.zero_grad()
            assert asked == [] and capture == (waiting.the_watch().newest is None)
        return [p.full_tensor() for p in model.parameters()]

    def ranks(rank: int) -> None:
        assert all(map(torch.equal, steps(rank, True), steps(rank, False)))

    run_ranks(ranks, 2)


def add_beside(device: streams.Streams, grad: Tensor) -> None:
    with device.on(device.gather):
        grad.add(1)


def test_a_captured_graph_ends_at_anchors_of_its_own() -> None:
    """One for each stream that graphs are captured on; what runs beside it ends with the graph."""

    def ranks(rank: int) -> None:
        with pytest.MonkeyPatch.context() as patch, watched(patch) as races:
            model, device = by_block(seeded(Tower)), races.device
            streams = units(model)[0].engine.streams
            square(model, data(0, rank)).backward()
            seen = [[unit.links.anchor for unit in units(model)]]
            patch.setattr(torch.cuda, "is_initialized", lambda: True)
            patch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
            for stream in (first := Stream(), Stream(), first):
                device.set_stream(stream)
                x = data(1, rank).requires_grad_()
                x.register_hook(partial(add_beside, streams))
                square(model, x).backward()
                seen.append([unit.links.anchor for unit in units(model)])
                for side in (streams.gather, streams.reduce):
                    assert stream.clock[side.key] == side.clock[side.key]
            device.set_stream(device.main)
            assert all(map(is_, seen[1], seen[3]))
            assert not any(map(is_, seen[0], seen[1])) and not any(map(is_, seen[1], seen[2]))

    run_ranks(ranks, 2)


def mark_ahead(device: streams.Streams, buckets: Any) -> None:
    with device.on(device.gather):
        mark = device.record(device.gather)
        start_fills(buckets)
    for bucket in buckets:
        bucket.fill.mark = mark


def combine_and_free(reduction: Any) -> Tensor:
    found = _combine(reduction)
    reduction.added = None
    return found


_combine = reducing._combine
BREAKS: dict[str, tuple[Any, str, Any]] = {
    "what was read is freed at once": (
        streams.Streams,
        "on",
        lambda self, stream: self.beside(stream),
    ),
    "compute does not wait for a gather": (streams.Streams, "wait", lambda self, mark: None),
    "an event is recorded again before it was waited for": (
        streams.Streams,
        "record",
        lambda self, stream: streams.Mark(stream.record_event(self.behind), []),
    ),
    "a mark ahead of what it is for": (residency, "start_fills_on", mark_ahead),
    "what was added to a sum is freed at once": (reducing, "_combine", combine_and_free),
}


@pytest.mark.parametrize(
    ("what", "cell"),
    [(what, "default") for what in [*BREAKS][:4]]
    + [(what, "static") for what in [*BREAKS][:2]]
    + [(what, "together") for what in [*BREAKS][1:4]]
    + [("what was added to a sum is freed at once", "no shard")],
)
def test_a_missing_wait_is_found(what: str, cell: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """In static buffers nothing is freed, and the next gather may not write what compute reads."""
    monkeypatch.setattr(*BREAKS[what])
    world, options, build = CELLS[cell]
    for error in rank_errors(train, world, world, build, options):
        assert error is not None and ("races" in error or "freed memory in use" in error)
