"""How weights come to be: verified, broadcast, materialised from meta, seeded by name."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

from fsdp_compose import ShardingStrategy, fully_shard, undo, wrap
from fsdp_compose.base.mesh import SELF, Mesh
from fsdp_compose.comm import collectives as comm
from fsdp_compose.construct import init
from fsdp_compose.construct.init import seeded_init
from fsdp_compose.core.guards import replicas
from fsdp_compose.core.guards.replicas import checksum

from harness import rank_errors, run_ranks
from models import (
    EVERY_SHARD,
    WIDTH,
    Block,
    Ledger,
    Tower,
    Twin,
    adamw,
    by_block,
    compare,
    data,
    nested,
    one_unit,
    square,
    units,
    whole,
)

pytestmark = pytest.mark.filterwarnings("error")


class Buffered(Tower):
    """With parameters and buffers of every kind."""

    def __init__(self) -> None:
        super().__init__(2)
        self.norm = nn.BatchNorm1d(WIDTH)
        self.register_buffer("table", torch.randn(4, 3).t())  # dense, not contiguous
        self.register_buffer("mask", torch.rand(5) > 0.5)
        self.register_buffer("scratch", torch.randn(7), persistent=False)
        self.register_buffer("none", None)
        self.shared = self.table
        self.codes = nn.Parameter(torch.randint(0, 9, (5,), dtype=torch.uint8), False)
        self.wave = nn.Parameter(torch.randn(3, 2, dtype=torch.complex64))
        self.channels = nn.Parameter(torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last))
        self.head.weight = nn.Parameter(torch.randn(2, WIDTH))
        self.tied = nn.Linear(WIDTH, 2, bias=False)
        self.tied.weight = self.head.weight


def full(model: nn.Module) -> dict[str, Tensor]:
    params = {n: whole(p) for n, p in model.named_parameters(remove_duplicate=False)}
    return params | {n: b.detach().clone() for n, b in model.named_buffers(remove_duplicate=False)}


def equal(found: dict[str, Tensor], wanted: dict[str, Tensor]) -> None:
    assert list(found) == list(wanted)
    for name, value in wanted.items():
        assert found[name].dtype == value.dtype, name
        torch.testing.assert_close(found[name], value, rtol=0, atol=0, msg=name)


def unlike(rank: int, build: Callable[[], nn.Module] = Buffered) -> nn.Module:
    """A model that differs between ranks."""
    torch.manual_seed(rank)
    return build()


def mesh_for(world: int, hybrid: bool) -> Any:
    if not hybrid:
        return None
    return init_device_mesh("cpu", (2, world // 2), mesh_dim_names=("replicate", "shard"))


# init="broadcast"


@pytest.mark.parametrize(("world", "hybrid"), [(1, False), (2, False), (3, False), (4, True)])
@pytest.mark.parametrize("shard", ["blocks", "nested"])
def test_broadcast_takes_parameters_and_buffers_from_rank_0(
    world: int, hybrid: bool, shard: str
) -> None:
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
        init.broadcast(given, mesh, 100)
        equal(full(model), full(unlike(0)))
        assert max(sizes) <= 100
        total = sum(t.numel() * t.element_size() for t in given)
        assert total / 100 <= len(sizes) <= 2 * total / 100 + 1
        sizes.clear()
        fully_shard(unlike(rank), init="broadcast")
        return sizes

    a, b = run_ranks(ranks, 2)
    assert a == b
    assert len(a) == 1, "one unit, one message"


def fully_mesh(pg: Any) -> Any:
    from fsdp_compose.base.mesh import group_of

    return group_of(pg, torch.device("cpu"))


def test_broadcast_reaches_the_buffers_of_a_unit_without_parameters() -> None:
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


# init="verify" and "as_is"


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


@pytest.mark.parametrize("odd", [1, 2, 3])
def test_verify_compares_over_both_axes_of_a_hybrid_mesh(odd: int) -> None:
    def ranks(rank: int) -> None:
        model = unlike(0)
        if rank == odd:
            spoil(model, "first.bias")
        fully_shard(model, mesh=mesh_for(4, True), strategy=ShardingStrategy.HYBRID_SHARD)

    for text in rank_errors(ranks, 4):
        assert text is not None
        assert "parameter 'first.bias'" in text
        assert f"rank {odd}" in text


def test_verify_compares_where_every_rank_holds_a_replica() -> None:
    def ranks(rank: int) -> None:
        fully_shard(unlike(rank), strategy=ShardingStrategy.NO_SHARD)

    assert all("differs between rank 0 and rank 1" in str(e) for e in rank_errors(ranks, 2))


def test_values_may_differ_between_ranks_that_share_no_mesh_axis() -> None:
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
    def ranks(rank: int) -> list[int]:
        counts = []
        for shard in (one_unit, by_block, nested):
            comm.traffic.reset()
            shard(unlike(0, lambda: Tower(3)))
            counts.append(comm.traffic.control)
        comm.traffic.reset()
        fully_shard(unlike(0, lambda: Tower(1)), mesh=mesh_for(4, True))
        return [*counts, comm.traffic.control]

    for counts in run_ranks(ranks, 4):
        assert counts == [1, 1, 4, 2]


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


# What one rank gets wrong


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
]


@pytest.mark.parametrize(("fn", "text"), WRONG, ids=[fn.__name__ for fn, _ in WRONG])
def test_what_is_wrong_on_one_rank_is_raised_on_all(fn: Callable[[int], None], text: str) -> None:
    for error in rank_errors(fn, 2):
        assert error is not None
        assert text in error, error
        assert not error.startswith("Hung")


# From the meta device


def on_meta(build: Callable[[], nn.Module]) -> nn.Module:
    with torch.device("meta"):
        return build()


@pytest.mark.parametrize("shard", list(EVERY_SHARD))
@pytest.mark.parametrize("world", [1, 2, 3])
def test_reset_parameters_initialises_a_model_from_meta(shard: str, world: int) -> None:
    def ranks(rank: int) -> Any:
        model = on_meta(lambda: nn.Sequential(Block(), nn.BatchNorm1d(WIDTH), Block()))
        before = list(model.parameters())
        optim = torch.optim.AdamW(model.parameters(), lr=0.01)
        torch.manual_seed(0)
        EVERY_SHARD[shard](model)
        assert all(a is b for a, b in zip(model.parameters(), before, strict=True))
        assert not any(t.is_meta for t in (*model.parameters(), *model.buffers()))
        start = full(model)
        model(data(0, rank).float()).square().mean().backward()
        optim.step()
        assert all(not torch.equal(v, start[n]) for n, v in full(model).items() if "." in n)
        return start

    first, *others = run_ranks(ranks, world)
    for other in others:
        equal(other, first)
    assert first["0.norm.weight"].eq(1).all() and first["1.running_var"].eq(1).all()
    assert 0 < first["0.up.weight"].abs().max() <= WIDTH**-0.5
    assert all(v.isfinite().all() for v in first.values())


def test_one_unit_equals_the_plain_model_initialised_in_the_same_order() -> None:
    def ranks(rank: int) -> None:
        model = on_meta(lambda: Tower(2))
        torch.manual_seed(5)
        fully_shard(model)
        plain = Tower(2)
        torch.manual_seed(5)
        plain.apply(lambda m: m.reset_parameters() if isinstance(m, nn.Linear) else None)
        found, wanted = full(model), full(plain)
        equal(
            {n: found[n] for n in wanted if "norm" not in n},
            {n: v for n, v in wanted.items() if "norm" not in n},
        )

    run_ranks(ranks, 2)


class Rotary(nn.Module):
    """A cache that is not in the state dict, made where it is asked to be."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.empty(WIDTH))
        self.register_buffer("cache", torch.empty(WIDTH), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        return x * self.scale * self.cache


class Filled(Rotary):
    def reset_parameters(self) -> None:
        nn.init.ones_(self.scale)
        self.cache.copy_(torch.arange(WIDTH))


@pytest.mark.parametrize("how", ["fill", "data", "replace", "to_empty"])
def test_param_init_fn_may_write_in_any_way(how: str) -> None:
    seen: list[str] = []

    def fill(module: nn.Module) -> None:
        seen.append(type(module).__name__)
        if how == "to_empty":
            module.to_empty(device="cpu", recurse=False)
        for name, param in list(module.named_parameters(recurse=False)):
            if how == "data":
                param.data.fill_(3)
            elif how == "replace":
                setattr(module, name, nn.Parameter(torch.full_like(param, 3)))
            else:
                param.fill_(3)
        for buffer in module.buffers(recurse=False):
            buffer.fill_(2)

    def ranks(rank: int) -> None:
        model = on_meta(lambda: nn.Sequential(Tower(1), Rotary()))
        before = list(model.parameters())
        by_block(model, param_init_fn=fill)
        assert all(a is b for a, b in zip(model.parameters(), before, strict=True))
        assert all(whole(p).eq(3).all() for p in model.parameters())
        assert model[1].cache.eq(2).all()
        assert sorted(seen) == ["LayerNorm", *["Linear"] * 4, "Rotary"]

    run_ranks(ranks, 2)


def test_a_buffer_that_nothing_fills_is_refused_on_every_rank() -> None:
    def ranks(rank: int, kind: type[nn.Module]) -> None:
        fully_shard(on_meta(lambda: nn.Sequential(kind())))

    assert run_ranks(ranks, 2, Filled) == [None, None]
    for text in rank_errors(ranks, 2, Rotary):
        assert text is not None
        assert "ValueError: fully_shard: buffer '0.cache' of unit 'Sequential'" in text
        assert "param_init_fn(module)" in text


def test_an_initialiser_that_fails_on_one_rank_raises_on_all() -> None:
    def ranks(rank: int, mode: str) -> None:
        def fail(module: nn.Module) -> None:
            if rank == 1 and isinstance(module, nn.LayerNorm):
                raise OSError("no such file")
            module.reset_parameters()

        by_block(on_meta(lambda: Tower(2)), param_init_fn=fail, init=mode)

    for mode in ("verify", "broadcast", "as_is"):
        texts = rank_errors(ranks, 2, mode)
        assert texts[1] == "OSError: no such file"
        assert texts[0] == "RuntimeError: OSError: no such file (found on rank 1)"


def test_initialisers_that_differ_between_ranks_are_refused_or_broadcast() -> None:
    def ranks(rank: int, mode: str) -> None:
        torch.manual_seed(rank)
        model = by_block(on_meta(lambda: Tower(1)), init=mode)
        torch.manual_seed(0)
        equal(full(model), full(by_block(on_meta(lambda: Tower(1)))))

    run_ranks(ranks, 2, "broadcast")
    for text in rank_errors(ranks, 2, "verify"):
        assert text is not None
        assert "parameter 'blocks.0.up.weight' of unit 'blocks.0' differs between rank" in text


@pytest.mark.parametrize("empty", [False, True])
def test_the_weights_may_be_on_rank_0_only(empty: bool) -> None:
    """The classic way to load: rank 0 has the model, the others have none, broadcast."""

    def ranks(rank: int) -> None:
        fill = (lambda m: m.to_empty(device="cpu", recurse=False)) if empty else (lambda m: None)
        model = unlike(7, lambda: nn.Sequential(Filled(), Tower(1)))
        if rank == 0:
            model[0].reset_parameters()
        else:
            model = on_meta(lambda: nn.Sequential(Filled(), Tower(1)))
            model[0].cache = torch.zeros(WIDTH)
        by_block(model, init="broadcast", param_init_fn=fill)
        wanted = unlike(7, lambda: nn.Sequential(Filled(), Tower(1)))
        wanted[0].reset_parameters()
        equal(full(model), full(wanted))
        model(data(0, rank).float())

    run_ranks(ranks, 3)


class Bare(nn.Module):
    """Parameters and a buffer that nothing initialises."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH)
        self.scale = nn.Parameter(torch.ones(WIDTH))
        self.shift = nn.Parameter(torch.zeros(1))
        self.register_buffer("mean", torch.zeros(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x) * self.scale + self.shift + self.mean


def load_copy(model: nn.Module, wanted: dict[str, Tensor]) -> None:
    with torch.no_grad():
        for name, tensor in (*model.named_parameters(), *model.named_buffers()):
            tensor.copy_(wanted[name])


@torch.no_grad()
def load_local(model: nn.Module, wanted: dict[str, Tensor]) -> None:
    """As a checkpoint reader does: into the slices, and only where there is something."""
    for name, param in model.named_parameters():
        spec = param._shard_spec
        if spec.stop > spec.start:
            param.to_local().copy_(wanted[name].reshape(-1)[spec.start : spec.stop])
    for name, buffer in model.named_buffers():
        buffer.copy_(wanted[name])


def load_data(model: nn.Module, wanted: dict[str, Tensor]) -> None:
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        tensor.data = wanted[name].clone()


def load_dict(model: nn.Module, wanted: dict[str, Tensor], assign: bool = False) -> None:
    model.load_state_dict(wanted, assign=assign)


def load_assign(model: nn.Module, wanted: dict[str, Tensor]) -> None:
    load_dict(model, wanted, True)


LOADERS = [load_copy, load_local, load_data, load_dict, load_assign]


@pytest.mark.parametrize("loader", LOADERS, ids=lambda f: f.__name__)
@pytest.mark.parametrize("world", [1, 2, 4])
def test_build_on_meta_then_shard_then_load(loader: Callable[..., None], world: int) -> None:
    def ranks(rank: int) -> None:
        wanted = {n: t.detach().clone() for n, t in full(unlike(3, Bare)).items()}
        model = on_meta(Bare)
        optim = torch.optim.SGD(model.parameters(), lr=0.5)
        by = wrap.by_class({nn.Linear})
        fully_shard(model, units=by, param_init_fn=lambda m: None)
        x = data(0, rank).float()
        with pytest.raises(RuntimeError) as caught:
            model(x)
        text = str(caught.value)
        assert "'scale'" in text and "'shift'" in text and "buffer 'mean'" in text
        assert "load_state_dict" in text and "param_init_fn" in text
        loader(model, wanted)
        equal(full(model), wanted)
        model(x).sum().backward()
        optim.step()
        changed = full(model)
        assert all(not torch.equal(changed[n], v) for n, v in wanted.items() if n != "mean")

    run_ranks(ranks, world)


def test_what_was_not_loaded_is_named_on_every_rank() -> None:
    def ranks(rank: int) -> None:
        model = on_meta(Bare)
        fully_shard(model)
        wanted = full(unlike(3, Bare))
        del wanted["shift"]  # one element, which only the last rank holds
        model.load_state_dict(wanted, strict=False)
        model(data(0, rank).float())

    for text in rank_errors(ranks, 3):
        assert text is not None
        assert "RuntimeError: unit 'Bare': parameter 'shift' came from the meta device" in text


def test_reset_parameters_leaves_weights_that_are_there() -> None:
    """A model that is on meta in part: what is real keeps its value."""

    def ranks(rank: int) -> None:
        model = unlike(2, lambda: nn.Linear(3, 4))
        weight = model.weight.detach().clone()
        model.bias = nn.Parameter(torch.empty(4, device="meta"))
        fully_shard(model)
        assert torch.equal(whole(model.weight), weight)
        assert whole(model.bias).isfinite().all()

    run_ranks(ranks, 2)


def test_recurrent_modules_hooks_and_attributes_survive() -> None:
    def ranks(rank: int) -> None:
        model = on_meta(lambda: nn.LSTM(WIDTH, 5))
        param = model.weight_hh_l0
        param.tag, calls = "recurrent", []
        param.register_hook(lambda g: calls.append("grad"))
        param.register_post_accumulate_grad_hook(lambda p: calls.append("done"))
        torch.manual_seed(0)
        fully_shard(model)
        torch.manual_seed(0)
        plain = nn.LSTM(WIDTH, 5)
        equal(full(model), full(plain))
        assert model.weight_hh_l0 is param and param.tag == "recurrent"
        model(data(0, rank).float())[0].sum().backward()
        assert calls == ["grad", "done"]

    run_ranks(ranks, 2)


def test_peak_memory_is_one_unit_and_the_shards() -> None:
    width, depth, world = 64, 6, 4

    def ranks(rank: int) -> None:
        model = on_meta(lambda: nn.Sequential(*[nn.Linear(width, width) for _ in range(depth)]))
        unit = 4 * (width * width + width)
        shards = depth * unit / world
        with Ledger(*model.parameters()) as ledger:
            fully_shard(model, units=wrap.by_class({nn.Linear}), init="as_is")
        assert ledger.live() <= shards * 1.02 + 4096
        assert unit < ledger.peak <= unit + shards * 1.02 + 4096

    run_ranks(ranks, world)


# Seeded by name


class Tied(Tower):
    """Head and embedding share a weight; a parameter of its own is initialised by a function."""

    def __init__(self) -> None:
        super().__init__(2)
        self.embed = nn.Embedding(2, WIDTH)
        self.head.weight = self.embed.weight
        self.gain = nn.Parameter(torch.empty(3))

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * self.gain.sum()


def initialise(module: nn.Module) -> None:
    if isinstance(module, Tied):
        nn.init.normal_(module.gain)
    else:
        module.reset_parameters()


def children_first(model: nn.Module, **options: Any) -> nn.Module:
    """Other units than by block: the head, which has the tied weight, is one of its own."""
    fully_shard(model.head, **options)
    fully_shard([model.blocks[1], model.first], **options)
    return fully_shard(model, **options)


@pytest.mark.parametrize("world", [1, 2, 3, 4])
def test_the_same_weights_for_every_world_and_choice_of_units(world: int) -> None:
    def ranks(rank: int) -> list[dict[str, Tensor]]:
        found = []
        for shard in (*EVERY_SHARD.values(), children_first):
            torch.manual_seed(rank)  # of no consequence
            state = torch.get_rng_state()
            model = on_meta(Tied)
            shard(model, param_init_fn=seeded_init(model, 11, initialise))
            assert torch.equal(state, torch.get_rng_state())
            found.append(full(model))
        return found

    plain = Tied()
    plain.apply(seeded_init(plain, 11, lambda m: initialise(m) if has_own(m) else None))
    for models in run_ranks(ranks, world):
        for found in models:
            equal(found, full(plain))
    other = Tied()
    other.apply(seeded_init(other, 12, lambda m: initialise(m) if has_own(m) else None))
    assert not torch.equal(other.first.weight, plain.first.weight)
    assert not torch.equal(plain.blocks[0].up.weight, plain.blocks[1].up.weight)


def has_own(module: nn.Module) -> bool:
    return any(True for _ in module.parameters(recurse=False))


def test_names_behind_wrappers_seed_alike() -> None:
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

    plain, wrapped = Tower(2), Tower(2)
    for i, block in enumerate(wrapped.blocks):
        wrapped.blocks[i] = checkpoint_wrapper(block)
    for model in (plain, wrapped):
        model.apply(seeded_init(model, 0))
    for a, b in zip(plain.parameters(), wrapped.parameters(), strict=True):
        assert torch.equal(a, b)


def test_a_module_outside_the_seeded_model_is_refused() -> None:
    inner = on_meta(lambda: nn.Linear(2, 2))
    init_fn = seeded_init(inner, 0)
    outer = on_meta(lambda: nn.Sequential(nn.Linear(2, 2)))
    with pytest.raises(ValueError, match="not in the model it was made for"):
        fully_shard(outer, param_init_fn=init_fn)


def test_a_seeded_model_trains_as_the_plain_one() -> None:
    def ranks(rank: int) -> None:
        twin = Twin(rank, 2, lambda: Tower(2), lambda m: None, adamw)
        model = on_meta(lambda: Tower(2)).double()
        by_block(model, param_init_fn=seeded_init(model, 1))
        for name, param in twin.plain[0].named_parameters():
            param.data.copy_(full(model)[name])
        twin.model = model
        twin.optim = adamw(model.parameters())
        twin.train(square)

    run_ranks(ranks, 2)


# Buffers


def test_buffers_are_cast_once_and_given_back() -> None:
    from fsdp_compose import MixedPrecision

    def ranks(rank: int) -> None:
        model = unlike(0)
        before = full(model)
        fully_shard(
            model,
            units=wrap.by_class({nn.BatchNorm1d}),
            mp_policy=MixedPrecision(buffer_dtype=torch.bfloat16),
        )
        kinds = {n: b.dtype for n, b in model.named_buffers(remove_duplicate=False)}
        floating = {n for n, b in before.items() if n in kinds and b.is_floating_point()}
        assert {n for n, d in kinds.items() if d is torch.bfloat16} == floating
        assert kinds["mask"] is torch.bool and kinds["norm.num_batches_tracked"] is torch.int64
        model.scratch = model.scratch.double()  # converted since: the user's choice stays
        undo(model)
        after = {n: b.dtype for n, b in model.named_buffers(remove_duplicate=False)}
        assert after.pop("scratch") is torch.float64
        assert all(after[n] == before[n].dtype for n in after)
        compare("table", model.table.double(), before["table"].bfloat16().double(), Tolerance0)

    run_ranks(ranks, 2)


from models import Tolerance  # noqa: E402

Tolerance0 = Tolerance(0, 0)


def test_units_are_not_kept_alive_by_initialisation() -> None:
    import gc
    import weakref

    model = on_meta(lambda: Tower(1))
    init_fn = seeded_init(model, 0)
    fully_shard(model, param_init_fn=init_fn)
    assert units(copy.deepcopy(model))
    ref = weakref.ref(model)
    del model
    gc.collect()
    assert ref() is None
