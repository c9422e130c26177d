"""Weights are verified or broadcast, and what one rank gets wrong is raised on all."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

from fsdp_compose import ShardingStrategy, fully_shard, plan, skippable_step, undo, wrap
from fsdp_compose.base.group import SELF
from fsdp_compose.base.mesh import Mesh
from fsdp_compose.base.process import here
from fsdp_compose.comm import collectives as comm
from fsdp_compose.construct import initialise
from fsdp_compose.core.guards import replicas
from fsdp_compose.core.guards.replicas import checksum

from buffered import equal, full, on_meta, unlike
from harness import rank_errors, run_ranks
from models import (
    EVERY_SHARD,
    Block,
    Ledger,
    Tower,
    Twin,
    by_block,
    nested,
    one_unit,
    whole,
)

pytestmark = pytest.mark.filterwarnings("error")


def mesh_for(world: int, hybrid: bool) -> Any:
    if not hybrid:
        return None
    return init_device_mesh("cpu", (2, world // 2), mesh_dim_names=("replicate", "shard"))


@pytest.mark.parametrize(("world", "hybrid"), [(1, False), (2, False), (3, False), (4, True)])
@pytest.mark.parametrize("shard", ["blocks", "nested"])
def test_broadcast_takes_values_from_rank_0(world: int, hybrid: bool, shard: str) -> None:
    """Broadcast takes parameters and buffers from rank 0."""

    def ranks(rank: int) -> None:
        model = unlike(rank)
        ids = [id(p) for p in model.parameters()]
        EVERY_SHARD[shard](model, init="broadcast", mesh=mesh_for(world, hybrid))
        equal(full(model), full(unlike(0)))
        assert [id(p) for p in model.parameters()] == ids
        assert model.shared is model.table
        assert model.tied.weight is model.head.weight
        undo(model)
        equal(full(model), full(unlike(0)))

    run_ranks(ranks, world)


class Shown(nn.Module):
    """Buffers that ``expand`` shows several times, in part, conjugated and wholly."""

    def __init__(self, rank: int) -> None:
        super().__init__()
        self.linear = nn.Linear(2, 2)
        start = torch.arange(3.0) + rank
        self.register_buffer("whole", start[:1].expand(2, 2))
        self.register_buffer("rows", start.expand(2, 3))
        self.register_buffer("turned", (start + 1j * start).conj().view(3, 1).expand(3, 2))


@pytest.mark.parametrize("made", ["plainly", "in inference mode", "on meta"])
def test_broadcast_of_buffers_that_are_expanded(made: str) -> None:
    """Nothing fails once units are built; on the meta device, on one rank, none is expanded."""

    def ranks(rank: int) -> None:
        device = "meta" if made == "on meta" and rank else "cpu"
        with torch.inference_mode(made == "in inference mode"), torch.device(device):
            model = nn.Sequential(Shown(rank), Shown(rank + 3))
        fully_shard(model, units=wrap.by_class(Shown), init="broadcast")
        for first, part in zip((0, 3), model, strict=True):
            for name, buffer in Shown(first).named_buffers():
                mine = part.get_buffer(name)
                assert torch.equal(mine, buffer), name
                assert device == "meta" or mine.stride() == buffer.stride()

    run_ranks(ranks)


@pytest.mark.parametrize("kind", ["sparse_coo", "quint8"])
def test_buffers_that_are_not_dense_are_refused(kind: str) -> None:
    """Where ranks would compare or send them; otherwise they are as in the plain module."""

    def build() -> nn.Module:
        model = nn.Sequential(nn.Linear(3, 3))
        plain, how = torch.eye(3), cast("Any", torch.quantize_per_tensor)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch will remove these dtypes
            is_sparse = kind == "sparse_coo"
            buffer = plain.to_sparse() if is_sparse else how(plain, 0.1, 0, torch.quint8)
        model[0].register_buffer("graph", buffer)
        return model

    def ranks(rank: int) -> None:
        for init in ("verify", "broadcast"):
            model = build() if rank else nn.Sequential(nn.Linear(3, 3))
            with pytest.raises(
                ValueError, match=rf"buffer '0\.graph' of .* is torch\.{kind}; wanted"
            ):
                fully_shard(model, init=init)  # type: ignore[arg-type]
            assert type(model[0].weight) is nn.Parameter
        for given in ("ignored", "init"):
            model = build()
            options: Any = (
                {"ignored": [model[0].graph]} if given == "ignored" else {"init": "as_is"}
            )
            fully_shard(model, **options)
            assert plan(model).memory.buffers > 0
            with skippable_step(model) as step:
                step.discard("a bad batch")
            model(torch.ones(2, 3)).sum().backward()
            assert type(undo(model)[0].weight) is nn.Parameter

    run_ranks(ranks)
    fully_shard(build())  # alone, with nobody to compare with


def test_broadcast_goes_in_messages_of_bounded_size(monkeypatch: pytest.MonkeyPatch) -> None:
    def ranks(rank: int) -> list[int]:
        sizes: list[int] = []
        send = comm.broadcast

        def counted(tensor: Tensor, group: Any, source: int = 0) -> Tensor:
            sizes.append(tensor.numel())
            return send(tensor, group, source)

        comm.broadcast = counted
        model = unlike(rank)
        given = [t.detach() for t in (*model.parameters(), *model.buffers())]
        group = dist.group.WORLD
        mesh = Mesh(fully_mesh(group), SELF, torch.device("cpu"))
        initialise.broadcast_tensors(given, mesh, 100)
        equal(full(model), full(unlike(0)))
        assert max(sizes) <= 100
        total = sum(t.numel() * t.element_size() for t in given)
        assert total / 100 <= len(sizes) <= 2 * total / 100 + 1
        before = here.traffic.control
        initialise.broadcast_tensors([torch.ones(0)], mesh)
        assert here.traffic.control == before
        sizes.clear()
        fully_shard(unlike(rank), init="broadcast")
        return sizes

    a, b = run_ranks(ranks, 2)
    assert a == b
    assert len(a) == 1, "one unit, one message"


def fully_mesh(pg: Any) -> Any:
    from fsdp_compose.base.mesh import group_of

    return group_of(pg, torch.device("cpu"))


def test_broadcast_reaches_a_unit_without_parameters() -> None:
    """Broadcast reaches the buffers of a unit without parameters."""

    def ranks(rank: int) -> None:
        norm = unlike(rank, lambda: nn.BatchNorm1d(3, affine=False))
        norm.running_mean.fill_(rank)
        fully_shard(norm, init="broadcast")
        assert not norm.running_mean.any()

    run_ranks(ranks, 2)


def test_broadcast_then_training_equals_one_process() -> None:
    def ranks(rank: int) -> None:
        twin = Twin(rank, 2, lambda: Tower(2), lambda m: None)
        for param in twin.model.parameters():
            param.data.add_(rank)
        by_block(twin.model, init="broadcast")
        twin.train()

    run_ranks(ranks, 2)


def spoil(model: nn.Module, name: str) -> None:
    tensor = dict([*model.named_parameters(), *model.named_buffers()])[name]
    with torch.no_grad():
        if tensor.dtype is torch.bool:
            tensor[-1] = ~tensor[-1]
        else:
            tensor.view(-1)[-1:].add_(1) if tensor.is_contiguous() else tensor.add_(1)


NAMES = ["first.weight", "blocks.1.down.weight", "codes", "wave", "channels", "table", "mask"]


@pytest.mark.parametrize("name", [*NAMES, "scratch", "norm.running_var", "head.weight"])
def test_verify_names_what_differs(name: str) -> None:
    def ranks(rank: int) -> None:
        model = unlike(0)
        if rank == 1:
            spoil(model, name)
        by_block(model)

    for text in rank_errors(ranks, 2):
        assert text is not None
        assert text.startswith("ValueError: fully_shard: ")
        kind = "buffer" if name in dict(unlike(0).named_buffers()) else "parameter"
        assert f"{kind} {name!r} of unit" in text
        assert "rank 0 and rank 1" in text and 'init="broadcast"' in text


def test_verify_compares_a_unit_named_with_a_colon() -> None:
    """A key of an ``nn.ModuleDict`` may hold one."""

    def ranks(rank: int) -> None:
        tasks = unlike(rank, lambda: nn.ModuleDict({"task:a": nn.Linear(4, 4)}))
        fully_shard(nn.Sequential(tasks), units=wrap.by_class(nn.Linear))

    for text in rank_errors(ranks, 2):
        assert text is not None and "parameter '0.task:a.weight' of unit" in text, text
        assert "differs between rank 0 and rank 1" in text


@pytest.mark.parametrize("odd", [1, 2, 3])
def test_verify_compares_over_both_axes(odd: int) -> None:
    def ranks(rank: int) -> None:
        model = unlike(0)
        if rank == odd:
            spoil(model, "first.bias")
        fully_shard(model, mesh=mesh_for(4, True), strategy=ShardingStrategy.HYBRID_SHARD)

    for text in rank_errors(ranks, 4):
        assert text is not None
        assert "parameter 'first.bias'" in text
        assert f"rank {odd}" in text


def test_verify_compares_replicas() -> None:
    """Verify compares where every rank holds a replica."""

    def ranks(rank: int) -> None:
        fully_shard(unlike(rank), strategy=ShardingStrategy.NO_SHARD)

    assert all("differs between rank 0 and rank 1" in str(e) for e in rank_errors(ranks, 2))


def test_values_may_differ_between_unrelated_ranks() -> None:
    """Experts: a unit on a mesh of its own inside a call for all ranks."""

    def ranks(rank: int) -> None:
        pairs = [dist.new_group([0, 1]), dist.new_group([2, 3])]
        model = unlike(0, lambda: Tower(1))
        with torch.no_grad():
            model.blocks[0].up.weight.fill_(rank // 2)
        experts = wrap.by_fn(
            lambda name, m: {"mesh": pairs[rank // 2]} if isinstance(m, Block) else False
        )
        fully_shard(model, units=experts)
        assert whole(model.blocks[0].up.weight).eq(rank // 2).all()

    run_ranks(ranks, 4)


def test_as_is_checks_no_values() -> None:
    def ranks(rank: int) -> dict[str, Tensor]:
        model = fully_shard(unlike(rank), init="as_is")
        return {"mine": full(model)["first.weight"], "was": unlike(rank).first.weight}

    a, b = run_ranks(ranks, 2)
    assert torch.equal(a["mine"], b["mine"])
    flat, before = a["mine"].view(-1), [r["was"].detach().view(-1) for r in (a, b)]
    assert torch.equal(flat[:1], before[0][:1]), "rank 0's slice comes first"
    taken = [torch.isin(flat, w) for w in before]
    assert bool((taken[0] | taken[1]).all())


def test_one_exchange_of_objects_per_call() -> None:
    """And two more for each group that is new, whose ranks find out who shares a host."""

    def ranks(rank: int) -> list[int]:
        counts = []
        for shard in (one_unit, by_block, nested):
            here.traffic.reset()
            shard(unlike(0, lambda: Tower(3)))
            counts.append(here.traffic.control)
        here.traffic.reset()
        fully_shard(unlike(0, lambda: Tower(1)), mesh=mesh_for(4, True))
        return [*counts, here.traffic.control]

    for counts in run_ranks(ranks, 4):
        assert counts == [1 + 2, 1, 4, 2 + 2 * 2]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bool, torch.uint8, torch.complex128])
def test_a_checksum_tells_values_apart(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    base = torch.randn(1001).gt(0) if dtype is torch.bool else torch.randn(1001).mul(50).to(dtype)
    want = checksum(base)
    assert want == checksum(base.clone())
    monkeypatch.setattr(replicas, "_CHUNK", 16)
    assert want == checksum(base), "the size of the pieces does not matter"
    assert want == checksum(torch.cat([base[:1], base])[1:]), "nor does alignment"
    swapped = base.clone()
    different = int((base != base[0]).nonzero()[0])
    swapped[0], swapped[different] = base[different], base[0]
    assert want != checksum(swapped)
    assert len({checksum(base[n:]) for n in range(11)}) == 11


def test_verifying_takes_memory_that_does_not_grow(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replicas, "_CHUNK", 1 << 10)
    big = torch.randn(1 << 18)
    with Ledger(big) as ledger:
        checksum(big)
    assert ledger.peak < 64 << 10


def wrong_argument(rank: int) -> None:
    options = {"granularity": "colum"} if rank == 1 else {}
    fully_shard(Tower(1), **options)


def wrong_init(rank: int) -> None:
    fully_shard(Tower(1), init="verifi" if rank == 1 else "verify")


def wrong_mesh(rank: int) -> None:
    fully_shard(Tower(1), mesh="dp" if rank == 1 else None)


def wrong_strategy(rank: int) -> None:
    fully_shard(Tower(1), strategy="full" if rank == 1 else None)


def raising_policy(rank: int) -> None:
    def choose(name: str, module: nn.Module) -> bool:
        return {"blocks.0": True}[name] if rank == 1 else "." in name

    fully_shard(Tower(1), units=wrap.by_fn(choose))


def other_shape(rank: int) -> None:
    fully_shard(Tower(1, 6 + rank))


def missing_parameter(rank: int) -> None:
    model = Tower(1)
    if rank == 1:
        model.head.bias = None
    fully_shard(model)


def other_dtype(rank: int) -> None:
    fully_shard(Tower(1).to(torch.bfloat16 if rank == 1 else torch.float32))


def frozen_on_one(rank: int) -> None:
    model = Tower(1)
    model.head.bias.requires_grad_(rank == 0)
    fully_shard(model)


def other_strategy(rank: int) -> None:
    fully_shard(Tower(1), reshard_after_forward=rank == 0)


def fewer_units(rank: int) -> None:
    by_block(Tower(1 + rank))


def other_order(rank: int) -> None:
    """The same values: their slices would be cut from other places, and put together wrongly."""
    model = unlike(0, lambda: nn.Linear(3, 4))
    if rank == 1:
        model.weight.data = model.weight.data.t().contiguous().t()
    fully_shard(model, init="as_is")


def loaded_on_one(rank: int) -> None:
    model = on_meta(lambda: nn.Linear(3, 4))
    if rank == 0:
        loaded = {"weight": torch.randn(3, 4).t(), "bias": torch.randn(4)}
        model.load_state_dict(loaded, assign=True)
    fully_shard(model, init="broadcast")


def other_buffer(rank: int) -> None:
    model = Tower(1)
    model.register_buffer("cache", torch.zeros(4 + rank), persistent=False)
    fully_shard(model, init="broadcast")


def other_order_of_buffers(rank: int) -> None:
    model = Tower(1)
    for name in ("ab", "ba")[rank]:
        model.register_buffer(name, torch.zeros(2))
    fully_shard(model, init="broadcast")


def other_strides_of_a_buffer(rank: int) -> None:
    model = Tower(1)
    model.register_buffer("cache", torch.zeros(2, 3).t() if rank else torch.zeros(3, 2))
    fully_shard(model, init="broadcast")


WRONG = [
    (wrong_argument, "colum"),
    (wrong_init, "verifi"),
    (wrong_mesh, "mesh is 'dp'"),
    (wrong_strategy, "strategy is 'full'"),
    (raising_policy, "KeyError"),
    (other_shape, "parameter 'first.weight' (7, 7)"),
    (missing_parameter, "missing parameter 'head.bias'"),
    (other_dtype, "torch.bfloat16"),
    (frozen_on_one, "frozen"),
    (other_strategy, "keep_after_forward"),
    (fewer_units, "unit 'blocks.1'"),
    (other_order, "trained with strides (1, 4), wanted parameter 'weight' (4, 3)"),
    (loaded_on_one, "wanted parameter 'weight' (4, 3) torch.float32 trained with strides (1, 4)"),
    (other_buffer, "found buffer 'cache' (5,) torch.float32, wanted buffer 'cache' (4,)"),
    (other_strides_of_a_buffer, "found buffer 'cache' (3, 2) torch.float32 with strides (1, 3)"),
    (other_order_of_buffers, "found buffer 'b' (2,) torch.float32, wanted buffer 'a' (2,)"),
]


@pytest.mark.parametrize(("fn", "text"), WRONG, ids=[fn.__name__ for fn, _ in WRONG])
def test_what_is_wrong_on_one_rank_is_raised_on_all(fn: Callable[[int], None], text: str) -> None:
    for error in rank_errors(fn, 2):
        assert error is not None
        assert text in error, error
        assert not error.startswith("Hung")
