"""Ranks on one host read each other's memory: the same numbers, nothing read late, nothing left."""

from __future__ import annotations

import gc
import mmap
import os
import resource
import signal
import time
from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from fsdp_compose import (
    MixedPrecision,
    ShardingStrategy,
    accumulate,
    default_hook,
    explain,
    fully_shard,
    gathered,
    no_sync,
    register_comm_hook,
    set_reshard_after_backward,
    unshard,
)
from fsdp_compose.base.group import Group
from fsdp_compose.buckets.bucket import SentCopy
from fsdp_compose.comm import mail, shared_memory, transports
from fsdp_compose.comm.shared_memory import Offer, Reading, Segments, _Peer, all_segments
from fsdp_compose.comm.transports import PAIRS, _Read

from harness import RankFailure, rank_errors, run_ranks
from laws import Heard, stack
from models import Tower, by_block, data, mesh_of_replicas, seeded, sgd, square

HALF = MixedPrecision(torch.bfloat16, torch.bfloat16)
WAYS: dict[str, tuple[dict[str, Any], tuple[int, int] | None]] = {
    "released": ({}, None),
    "kept": ({"strategy": ShardingStrategy.SHARD_GRAD_OP}, None),
    "half": ({"mp_policy": HALF}, None),
    "summed in fp32": ({"mp_policy": MixedPrecision(torch.bfloat16, torch.float32)}, None),
    "spread": ({"reshard_after_forward": 2}, None),
    "hybrid": ({"strategy": ShardingStrategy.HYBRID_SHARD}, (2, 2)),
    "fused": ({"strategy": ShardingStrategy.HYBRID_SHARD_OPTIMIZER}, (2, 2)),
    "hook": ({"hook": lambda state, bucket: default_hook(state, bucket) / 2}, None),
}


def train(options: dict[str, Any], shape: tuple[int, int] | None, steps: int = 2) -> list[Tensor]:
    """Weights after a few steps, each of a microbatch without reduction and one with it."""
    if shape is not None:
        options = options | {"mesh": mesh_of_replicas(*shape)}
    hook = (options := dict(options)).pop("hook", None)
    model = by_block(seeded(Tower), **options)
    if hook is not None:
        register_comm_hook(model, None, hook)
    optim = torch.optim.AdamW(model.parameters(), lr=0.01)
    for step in range(steps):
        rank = dist.get_rank()
        with accumulate(model, keep="unsharded") if step == 1 else no_sync(model):
            square(model, data(10 + step, rank)).backward()
        square(model, data(step, rank)).backward()
        optim.step()
        optim.zero_grad()
    return [p.full_tensor() for p in model.parameters()]


def tickets() -> int:
    return sum(segments.ticket for segments in all_segments())


def train_alike(rank: int, way: str) -> None:
    """Bit for bit as by messages; and passes send no data."""
    options, shape = WAYS[way]
    wanted = train(options | {"transport": PAIRS}, shape)
    assert tickets() == 0
    with pytest.MonkeyPatch.context() as patch:
        for name in ("_gather_pairs", "_reduce_pairs"):
            send = getattr(transports, name)
            patch.setattr(transports, name, lambda *a, send=send: pytest.fail(a[-1].purpose)
                          if a[-1].offers is not None else send(*a))  # fmt: skip
        refused = {"gather": transports._gather_pairs, "reduce_scatter": transports._reduce_pairs}
        patch.setattr(transports, "PAIRS", replace(PAIRS, **refused))  # of groups without segments
        found = train(options, shape)
    assert tickets() > 0
    assert all(map(torch.equal, found, wanted))


@pytest.mark.parametrize("way", WAYS)
def test_the_same_numbers_as_by_messages(way: str) -> None:
    over_axes = way in ("spread", "hybrid", "fused")
    run_ranks(train_alike, 4 if over_axes or way == "released" else 2, way)


def check_copies(rank: int) -> None:
    """Gradients are packed where the others read them: they are offered without a copy."""
    layer = fully_shard(nn.Linear(64, 64))
    for _ in range(2):
        layer(torch.ones(1, 64)).sum().backward()
        lend, copies = Segments.lend, []
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(Segments, "lend", lambda *a, lend=lend: copies.append(a[1]) or lend(*a))
            layer(torch.ones(1, 64)).sum().backward()
    assert copies == [4 * 65 * 32, 4 * 65 * 64], "a copy of the shard, and room for gradients"


def test_gradients_are_offered_where_they_are_packed() -> None:
    run_ranks(check_copies, 2)


def check_late_reads(rank: int) -> None:
    """Rank 1 reads long after rank 0 has gone on to write its shard and its next gradients."""
    layer = fully_shard(nn.Linear(64, 64, bias=False))
    read = Reading.read_from

    def read_late(self: Reading, other: int, offer: Any) -> Tensor:
        found = read(self, other, offer)
        if rank == 1:
            time.sleep(0.03)
        return found

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Reading, "read_from", read_late)
        for step in range(6):
            with torch.no_grad():
                layer.weight.fill_(step)
                with gathered(layer):
                    assert bool((layer.weight == step).all()), f"read late in step {step}"
            x = torch.full((1, 64), float(step * (rank + 1)))
            layer(x).sum().backward()
            grad = layer.weight.grad
            assert grad is not None
            assert bool((grad.to_local() == step * 1.5).all()), f"summed late in step {step}"
            layer.weight.grad = None
    (segments,) = all_segments()
    assert (1 if rank else 2) <= len(segments.slots) <= 6


def test_what_is_read_late_is_what_was_offered() -> None:
    run_ranks(check_late_reads, 2)


def check_kept_copies(rank: int) -> None:
    """Microbatches gather the same weights again: their shard is copied once in a step.

    Rank 1 reads late. What it reads is nevertheless what was offered, also where the weights are
    written between gathers, or in a way that their versions do not show.
    """
    layer = fully_shard(nn.Linear(64, 64, bias=False), reshard_after_forward=True)
    read, copy, copies, ones = Reading.read_from, Segments.copy, [], torch.ones(1, 64)

    def read_late(self: Reading, other: int, offer: Any) -> Tensor:
        found = read(self, other, offer)
        if rank == 1:
            time.sleep(0.03)
        return found

    def check(value: float) -> None:
        with no_sync(layer):
            outputs = [layer(ones) for _ in range(3)]
        assert all(bool((y == 64 * value).all()) for y in outputs), f"other weights than {value}"

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Reading, "read_from", read_late)
        patch.setattr(Segments, "copy", lambda *a: copies.append(a[1].nbytes) or copy(*a))
        for step in range(6):
            with torch.no_grad():
                layer.weight.fill_(step)
            check(step)
        assert copies == [4 * 64 * 32] * 6
        layer.weight.to_local().data.fill_(7.0)
        check(7.0)
        assert len(copies) == 9, "what may be written unseen is copied each time"


def test_a_shard_is_copied_once_for_microbatches() -> None:
    run_ranks(check_kept_copies, 2)


def check_tickets(rank: int) -> None:
    """A copy that is offered again is not free before it was read again."""
    fully_shard(nn.Linear(8, 8))
    (segments,) = all_segments()
    lease = segments.copy(torch.zeros(64, dtype=torch.uint8))
    assert lease is not None
    first, again = segments.offer(lease.memory), segments.offer(lease.memory)
    assert first.slot == again.slot, "it is copied again"
    slot = segments.slots[first.slot]
    del lease
    for offer in (first, again):
        assert not segments._is_free(offer.slot, slot), "written while it is read again"
        dist.barrier()
        reading = segments.begin()
        reading.read_from(1 - rank, offer)
        reading.close()
        dist.barrier()
    assert segments._is_free(first.slot, slot)
    lent = segments.lend(64)
    assert lent is not None
    first, again = segments.offer(lent.memory), segments.offer(lent.memory)
    assert first.slot != again.slot, "it may have been written, while the first offer is read"


def test_a_copy_is_offered_again() -> None:
    run_ranks(check_tickets, 2)


def test_what_a_slot_holds_is_read_where_it_lies_now() -> None:
    """A rank offers more in the slot than before, or has given it another place in its segment."""
    size, fd = mmap.PAGESIZE, os.memfd_create("segment")
    os.write(fd, b"a" * 2 * size + b"b" * size)
    peer = _Peer(fd, memoryview(b""))
    for start, nbytes, wanted in ((0, 8, "a"), (0, 2 * size, "a"), (2 * size, 8, "b")):
        found = peer.read(Offer(1, 0, start, nbytes))
        assert found.numel() == nbytes and bool((found == ord(wanted)).all())
    os.close(fd)


def test_kept_copies_are_given_back() -> None:
    """With the reduction they are done with; strategies that keep weights gathered keep none."""

    def ranks(rank: int, strategy: ShardingStrategy, kept: int) -> None:
        plain = seeded(Tower)
        plain.blocks[1].requires_grad_(False)
        model = by_block(plain, strategy=strategy)
        if strategy is ShardingStrategy.SHARD_GRAD_OP:
            set_reshard_after_backward(model, False)
        optim = sgd(model.parameters())
        for step in range(3):
            with no_sync(model):
                for micro in range(2):
                    square(model, data(10 * step + micro, rank)).backward()
            (segments,) = all_segments()
            copies = sum(state.weight_copies for state in explain(model).units)
            assert segments.lent_bytes(copies=True) == copies == kept * shard_bytes(model)
            square(model, data(step, rank)).backward()
            assert segments.lent_bytes(copies=True) == segments.lent_bytes() == 0
            assert sum(state.weight_copies for state in explain(model).units) == 0
            optim.step()
            optim.zero_grad()

    run_ranks(ranks, 2, ShardingStrategy.FULL_SHARD, 1)
    run_ranks(ranks, 2, ShardingStrategy.SHARD_GRAD_OP, 0)


def test_half_of_the_slots_are_for_what_is_under_way(monkeypatch: pytest.MonkeyPatch) -> None:
    """Kept copies in all of them would leave none for a reduction."""
    made = SimpleNamespace(slots=[], copy=lambda data: "a copy")
    monkeypatch.setattr(transports, "segments_of", lambda group: made)
    group: Any = None
    for count in (0, shared_memory.MAX_SLOTS // 2, shared_memory.MAX_SLOTS // 2 + 1):
        made.slots = [None] * count
        found = transports._copy_on_host(torch.zeros(1), group)
        assert found == ("a copy" if count <= shared_memory.MAX_SLOTS // 2 else None)


class AlwaysEqual:
    """Versions that are those of every gather."""

    __hash__ = None  # type: ignore[assignment]

    def __eq__(self, other: object) -> bool:
        return True

    def __ne__(self, other: object) -> bool:
        return False


def offer_alike(segments: Segments, offer: Offer) -> Offer:
    """An owner that does not wait for those who read a copy again."""
    segments.slots[offer.slot].ticket = min(segments.slots[offer.slot].ticket, 1)
    return offer


def shard_bytes(model: nn.Module) -> int:
    return sum(unit.shards for unit in explain(model).units)


BREAKS: dict[str, tuple[type, str, Callable[..., Any]]] = {
    "written while it is read": (Segments, "_is_free", lambda self, index, slot: (
        slot.lease is None or slot.lease() is None)),
    "said to be read before it was": (_Read, "wait", lambda self, wait=_Read.wait: (
        self.reading.read.update({self.rank: self.call.offers()[self.rank]}),
        self.reading.close(), time.sleep(0.2), wait(self))),
    "another part than this rank's": (_Read, "wait", lambda self, wait=_Read.wait: (
        setattr(self, "begin", 0), wait(self))),
    "lent while it is offered": (Segments, "lease_of", lambda self, data: None),
    "offered again under the same ticket": (Segments, "offer", lambda self, data,
        offer=Segments.offer: offer_alike(self, offer(self, data))),
    "sent though it was written": (SentCopy, "__setattr__", lambda self, name, value:
        object.__setattr__(self, name, AlwaysEqual() if name == "versions" else value)),
}  # fmt: skip


@pytest.mark.parametrize("name", BREAKS)
def test_a_broken_protocol_is_noticed(name: str) -> None:
    def ranks(rank: int) -> None:
        setattr(*BREAKS[name])
        if name == "lent while it is offered":
            check_copies(rank)
        elif name == "offered again under the same ticket":
            check_tickets(rank)
        elif name == "sent though it was written":
            check_kept_copies(rank)
        elif name == "another part than this rank's":
            train_alike(rank, "released")
        else:
            check_late_reads(rank)

    with pytest.raises(RankFailure, match="AssertionError"):
        run_ranks(ranks, 2)


def test_memory_is_bounded() -> None:
    """A handle that nobody waits for, and exchanges that were given up, do not make it grow."""

    def ranks(rank: int) -> list[int]:
        model, other = by_block(seeded(Tower)), fully_shard(nn.Linear(8, 8))
        optim, held = sgd(model.parameters()), []
        waiting = unshard(other, async_op=True)
        for step in range(12):
            if step % 4 == 1:
                with pytest.raises(ZeroDivisionError):
                    (model(data(step, rank)).sum() * (1 / 0)).backward()
            square(model, data(step, rank)).backward()
            optim.step()
            optim.zero_grad()
            dist.barrier()
            (segments,) = all_segments()
            held.append(segments.held_bytes())
            assert segments.lent_bytes() == 0
        assert waiting is not None
        waiting.wait()
        assert segments.lend(1 << 16) is not None  # in the place of a small one, which is freed
        allocated = os.fstat(segments.fd).st_blocks * 512
        assert allocated == segments.held_bytes() + segments.header.nbytes
        return held

    for held in run_ranks(ranks, 2):
        assert held[-1] <= 16 * 4096, held  # what is under way at once, each in a page


def count_processes(inode: int) -> int:
    """How many processes have a segment open or mapped."""
    found = 0
    for maps in Path("/proc").glob("[0-9]*/maps"):
        try:
            lines = maps.read_text().splitlines()
        except OSError:
            continue
        found += any("memfd:fsdp_compose" in x and x.split()[4] == str(inode) for x in lines)
    return found


def test_a_killed_rank_is_noticed_and_leaves_nothing(tmp_path: Path) -> None:
    """The others raise and name it; when they are gone too, so is all shared memory."""
    files = set(os.listdir("/dev/shm"))

    def ranks(rank: int) -> None:
        store = dist.FileStore(str(tmp_path / "store"), 3)
        patience = timedelta(seconds=20)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=3, timeout=patience)
        model = by_block(seeded(Tower))
        square(model, data(0, rank)).backward()
        (segments,) = all_segments()
        (tmp_path / f"{rank}").write_text(str(os.fstat(segments.fd).st_ino))
        dist.barrier()
        assert count_processes(os.fstat(segments.fd).st_ino) == 3
        for line in Path("/proc/self/maps").read_text().splitlines():
            if "memfd:fsdp_compose" in line and line.split()[4] != str(
                os.fstat(segments.fd).st_ino
            ):
                assert line.split()[1] == "r--s", "another rank's memory can be written"
        dist.barrier()
        for step in range(100):
            if rank == 1 and step == 2:
                os.kill(os.getpid(), signal.SIGKILL)
            square(model, data(step, rank)).backward()

    first, second, third = rank_errors(ranks, 3, init=False)
    assert second is not None and "SIGKILL" in second
    for error in (first, third):
        assert error is not None and "rank 1 does not answer" in error, error
    inodes = [int((tmp_path / f"{rank}").read_text()) for rank in range(3)]
    assert [count_processes(inode) for inode in inodes] == [0, 0, 0]
    assert not {name for name in set(os.listdir("/dev/shm")) - files if "fsdp" in name}


def test_a_group_that_ends_takes_its_memory_along(tmp_path: Path) -> None:
    """The next group's first model finds none of it; groups over the same ranks share none."""

    def held() -> set[int]:
        """Inodes of the segments that this process has open, its own and others'."""
        links = [f"/proc/self/fd/{fd}" for fd in os.listdir("/proc/self/fd")]
        segments = [x for x in links if os.path.islink(x) and "memfd:fsdp" in os.readlink(x)]
        return {os.stat(x).st_ino for x in segments}

    def train_once(rank: int, mesh: dist.ProcessGroup | None) -> None:
        model = by_block(seeded(Tower), mesh=mesh)
        square(model, data(0, rank)).backward()

    def ranks(rank: int) -> None:
        ended: set[int] = set()
        for name in ("first", "second"):
            store = dist.FileStore(str(tmp_path / name), 2)
            dist.init_process_group("gloo", store=store, rank=rank, world_size=2)
            train_once(rank, None)
            assert len(held()) == 2, "of the first group something is left"
            train_once(rank, dist.new_group([0, 1]))
            assert len(list(all_segments())) == 2 and len(held()) == 4
            assert not held() & ended
            ended = held()
            dist.barrier()
            dist.destroy_process_group()
            gc.collect()

    run_ranks(ranks, 2, init=False)


def without_memory(rank: int, when: str) -> Callable[[], object]:
    """Forbid this process large files, and so shared memory, where it is rank 1."""

    def act() -> None:
        if rank == 1:
            signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
            size = 0 if when == "from the start" else 1 << 15
            resource.setrlimit(resource.RLIMIT_FSIZE, (size, resource.RLIM_INFINITY))

    return act


@pytest.mark.parametrize("when", ["from the start", "later"])
def test_a_rank_without_memory_sends(when: str) -> None:
    """Its data travels in messages and it says so; the other ranks share memory still."""

    def ranks(rank: int) -> None:
        make = lambda transport: fully_shard(  # noqa: E731
            seeded(lambda: stack(3, 64)), transport=transport
        )
        results = []
        heard = Heard()
        for transport in (PAIRS, None):
            if transport is None and when == "from the start":
                without_memory(rank, when)()
            model = make(transport)
            without_memory(rank, when)()
            optim = sgd(model.parameters())
            for step in range(3):
                square(model, data(step, rank, 2, 64)).backward()
                optim.step()
                optim.zero_grad()
            results.append([p.full_tensor() for p in model.parameters()])
        assert all(map(torch.equal, *results))
        found = [sorted(s.peers) for s in all_segments()]
        if when == "from the start":
            assert found == ([] if rank == 1 else [[2 - rank]])
        else:
            said = [line for line in heard.lines if "shared memory" in line]
            assert len(found[0]) == 2 and len(said) == int(rank == 1)

    run_ranks(ranks, 3)


def test_a_group_over_two_hosts_uses_both() -> None:
    """Ranks of one host share memory, others send to each other; the sums are the same."""

    def ranks(rank: int) -> None:
        wanted = train({"transport": PAIRS}, None)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(shared_memory, "_name_host", lambda: (f"host {rank // 2}", ""))
            found = train({}, None)
        (segments,) = all_segments()
        assert list(segments.peers) == [rank ^ 1] and len(segments.far) == 2
        assert all(map(torch.equal, found, wanted))

    run_ranks(ranks, 4)


def test_alone_on_its_host_nothing_is_shared() -> None:
    """Each rank on a host of its own, or where memory of others cannot be opened: by messages."""

    def ranks(rank: int, how: str) -> None:
        with pytest.MonkeyPatch.context() as patch:
            if how == "hosts":
                patch.setattr(shared_memory, "_name_host", lambda: (str(rank), ""))
            elif rank == 1:
                patch.setattr(Segments, "try_peer", lambda *args: False)
            train({}, None, 1)
        assert not list(all_segments())

    for how in ("hosts", "permission"):
        run_ranks(ranks, 2, how)


def test_other_bytes_are_an_error_before_they_are_read() -> None:
    """A rank whose model has another dtype: every rank says how many bytes each brings."""

    def ranks(rank: int) -> None:
        model = fully_shard(nn.Linear(64, 64))
        model(torch.ones(1, 64)).sum().backward()
        if rank:
            model.weight._shard_spec.residence.writes = None  # which would tell before
            model.half()
        with torch.no_grad():
            model(torch.ones(1, 64, dtype=next(model.parameters()).dtype))

    errors = rank_errors(ranks, 2)
    assert all(error is not None and "bytes" in error for error in errors), errors


def test_what_cannot_be_opened_is_no_peer(tmp_path: Path) -> None:
    """Another file, or none, where a rank was told that a segment is: nothing is left open."""

    def group_at(rank: int) -> Group:
        return Group(pg=FakeGroup(), rank=rank, size=2, backend="gloo", ranks=(0, 1))

    with pytest.MonkeyPatch.context() as patch, (tmp_path / "empty").open("w+") as empty:
        patch.setattr(mail, "timeout_of", lambda pg: 1.0)
        own, other = Segments(group_at(0)), Segments(group_at(1))
        known = {"fd": other.fd, "secret": other.secret, "entrance": other.mail.entrances[0]}
        before = len(os.listdir("/proc/self/fd"))
        for wrong in ({"secret": 0}, {"fd": empty.fileno()}, {"fd": 1 << 20}, {"entrance": -1}):
            assert not own.try_peer(1, os.getpid(), **{**known, **wrong})
            assert not own.peers and len(os.listdir("/proc/self/fd")) == before
        assert own.try_peer(1, os.getpid(), **known) and [*own.peers] == [1]


class FakeGroup:
    """Stands for a process group."""


def test_a_rank_that_can_open_no_more_files() -> None:
    """A first gather maps the other rank's memory: the error names both, and what was gathered."""

    def ranks(rank: int) -> None:
        model = fully_shard(seeded(lambda: stack(1, 64)))
        if rank == 0:
            model(data(0, 0, 2, 64))
            return
        limit = max(map(int, os.listdir("/proc/self/fd"))) + 1
        resource.setrlimit(resource.RLIMIT_NOFILE, (limit, limit))
        with pytest.raises(OSError, match="Too many"):
            opened.extend(iter(lambda: os.open(os.devnull, os.O_RDONLY), None))
        what = "to gather unit 'Sequential', and cannot map the memory of rank 0: Too many"
        with pytest.raises(OSError, match=what):
            model(data(0, 1, 2, 64))

    opened: list[int] = []
    run_ranks(ranks, 2)
