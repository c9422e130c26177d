"""Wrong use of fully_shard: one clear error on every rank, and nothing half sharded behind it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.device_mesh import init_device_mesh

from fsdp_compose import MixedPrecision, Prefetch, ShardingStrategy, fully_shard, undo, wrap
from fsdp_compose.core.state import STATE_KEY
from fsdp_compose.sharded import is_sharded

from harness import rank_errors, run_ranks, single_process
from models import WIDTH, Block, Tower, by_block, data, seeded, sgd, square, whole


def assert_untouched(model: nn.Module, rank: int) -> None:
    """No trace of an attempt: the module is plain, trains as such, and can be sharded."""
    for module in model.modules():
        assert STATE_KEY not in vars(module)
        assert not module._forward_hooks and not module._forward_pre_hooks
        assert not module._forward_hooks_always_called
    for param in model.parameters():
        assert type(param) is nn.Parameter and not is_sharded(param) and not vars(param)
    if any(p.device.type != "cpu" for p in model.parameters()):
        return
    reference = seeded(lambda: Tower(2))
    reference.load_state_dict(model.state_dict())
    square(model, data(0, rank)).backward()
    square(reference, data(0, rank)).backward()
    for ours, theirs in zip(model.parameters(), reference.parameters()):
        assert torch.equal(ours.grad, theirs.grad)
    model.zero_grad()


Attempt = Callable[[nn.Module, int], Any]


def mesh_of(*shape: int) -> Any:
    names = ("a", "b", "c")[: len(shape)]
    return init_device_mesh("cpu", shape, mesh_dim_names=names)


CASES: dict[str, tuple[Attempt, str, str]] = {
    "not a module": (
        lambda m, r: fully_shard([m, "text"]), "TypeError", "wanted an nn.Module",
    ),
    "an optimizer": (
        lambda m, r: fully_shard(sgd(m.parameters())), "TypeError", "(?s)SGD.*wanted an nn.Module",
    ),
    "nothing": (lambda m, r: fully_shard([]), "TypeError", "non-empty sequence"),
    "None": (lambda m, r: fully_shard(None), "TypeError", "NoneType.*wanted an nn.Module"),
    "a list of modules": (
        lambda m, r: fully_shard(m.blocks), "ValueError", "ModuleList has no forward",
    ),
    "the same module twice": (
        lambda m, r: fully_shard([m.first, m.first]), "ValueError", "Linear.*twice|more than once",
    ),
    "a module and its own child": (
        lambda m, r: fully_shard([m, m.first]), "ValueError", "inside|contains|part of",
    ),
    "policy matches nothing": (
        lambda m, r: fully_shard(m, units=wrap.by_class({nn.Conv2d})),
        "ValueError", r"by_class\(\{Conv2d\}\).*matches no submodule of Tower.*Block",
    ),
    "policy is a class": (
        lambda m, r: fully_shard(m, units={Block}), "TypeError", "units is.*wrap",
    ),
    "units of a list": (
        lambda m, r: fully_shard(list(m.blocks), units=wrap.by_class({Block})),
        "ValueError", "units goes with one module",
    ),
    "contradicting options": (
        lambda m, r: fully_shard(
            m, strategy=ShardingStrategy.SHARD_GRAD_OP, reshard_after_forward=True
        ),
        "ValueError", "SHARD_GRAD_OP means reshard_after_forward=False",
    ),
    "contradicting options the other way": (
        lambda m, r: fully_shard(
            m, strategy=ShardingStrategy.FULL_SHARD, reshard_after_forward=False
        ),
        "ValueError", "FULL_SHARD",
    ),
    "strategy is a string": (
        lambda m, r: fully_shard(m, strategy="full_shard"), "TypeError", "ShardingStrategy",
    ),
    "reshard_after_forward is a string": (
        lambda m, r: fully_shard(m, reshard_after_forward="no"),
        "TypeError|ValueError", "reshard_after_forward",
    ),
    "mp_policy is a dtype": (
        lambda m, r: fully_shard(m, mp_policy=torch.bfloat16), "TypeError", "MixedPrecision",
    ),
    "mp_policy raises in the middle": (
        lambda m, r: by_block(m, mp_policy=lambda fqn, p: {"a": 1}[fqn]),
        "KeyError|ValueError", "first.weight|norm.weight",
    ),
    "mp_policy gives a dtype": (
        lambda m, r: by_block(m, mp_policy=lambda fqn, p: torch.bfloat16),
        "TypeError", "MixedPrecision",
    ),
    "prefetch is a number": (lambda m, r: fully_shard(m, prefetch=2), "TypeError", "Prefetch"),
    "granularity unknown": (
        lambda m, r: fully_shard(m, granularity="column"), "ValueError", "column",
    ),
    "granularity of one parameter unknown": (
        lambda m, r: by_block(m, granularity=lambda fqn, p: "column"), "ValueError", "column",
    ),
    "init unknown": (lambda m, r: fully_shard(m, init="random"), "ValueError", "random"),
    "ignored is a name": (
        lambda m, r: fully_shard(m, ignored=["first.weight"]), "TypeError", "holds 'first.weight'",
    ),
    "unit overrides what it cannot": (
        lambda m, r: fully_shard(m, units=wrap.by_fn(lambda n, x: {"units": ()})),
        "ValueError", "overrides.*units",
    ),
    "policy raises": (
        lambda m, r: fully_shard(m, units=wrap.by_fn(lambda n, x: 1 / 0)),
        "ZeroDivisionError|ValueError", "division",
    ),
    "three dimensions": (
        lambda m, r: fully_shard(m, mesh=mesh_of(1, 1, 2)), "ValueError", "mesh has 3 dimensions",
    ),
    "another device": (
        lambda m, r: fully_shard(m, mesh=torch.device("cpu")), "TypeError", "mesh is.*wanted None",
    ),
    "policy raises on one rank": (
        lambda m, r: fully_shard(m, units=wrap.by_fn(lambda n, x: 1 / 0 if r else n == "head")),
        "ZeroDivisionError|RuntimeError|ValueError", "division",
    ),
    "hybrid on one axis": (
        lambda m, r: fully_shard(m, strategy=ShardingStrategy.HYBRID_SHARD),
        "ValueError", "mesh of 2 axes, but no mesh was passed",
    ),
    "full shard on one rank and not on the other": (
        lambda m, r: fully_shard(m if r == 0 else "text"), "TypeError", "wanted an nn.Module",
    ),
    "one rank has other options": (
        lambda m, r: fully_shard(m, init="random" if r == 1 else "verify"),
        "ValueError", r"random",
    ),
    "one rank shards other units": (
        lambda m, r: fully_shard(
            m, units=wrap.by_class({Block}) if r == 0 else wrap.by_class({nn.Linear})
        ),
        "ValueError", "shards other units",
    ),
    "one rank has another mixed precision": (
        lambda m, r: fully_shard(
            m, mp_policy=MixedPrecision(param_dtype=torch.bfloat16 if r else None)
        ),
        "ValueError", "bfloat16|precision|dtype",
    ),
    "one rank has a frozen parameter": (
        lambda m, r: fully_shard(m.requires_grad_(r == 0)), "ValueError", "requires_grad|frozen",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_error_on_every_rank_and_nothing_left(case: str) -> None:
    attempt, kind, text = CASES[case]

    def ranks(rank: int) -> None:
        model = seeded(lambda: Tower(2))
        with pytest.raises(Exception, match=text) as raised:
            attempt(model, rank)
        assert raised.type.__name__ in kind.split("|"), repr(raised.value)
        model.requires_grad_(True)
        assert_untouched(model, rank)
        by_block(model)
        square(model, data(0, rank)).backward()

    run_ranks(ranks, 2, timeout=20)


@pytest.mark.parametrize("part", ["whole", "block"])
def test_already_sharded(part: str) -> None:
    def ranks(rank: int) -> None:
        model = by_block(seeded(lambda: Tower(2)))
        module = model if part == "whole" else model.blocks[0]
        with pytest.raises(ValueError, match=r"already sharded.*undo\(module\)"):
            fully_shard(module)
        square(model, data(0, rank)).backward()

    run_ranks(ranks)


def test_nested_calls_in_the_wrong_order() -> None:
    """The outer call took the inner module's parameters: the inner one says so, and works after."""

    def ranks(rank: int) -> None:
        model = seeded(lambda: Tower(2))
        fully_shard(model)
        with pytest.raises(ValueError, match=r"Block.*before|inner.*first|already sharded"):
            fully_shard(model.blocks[0])
        square(model, data(0, rank)).backward()
        undo(model)
        fully_shard(model.blocks[0])
        fully_shard(model)

    run_ranks(ranks)


def test_mesh_without_this_rank() -> None:
    from torch.distributed.device_mesh import DeviceMesh

    def with_mesh(rank: int) -> None:
        mesh = DeviceMesh("cpu", [0])
        model = seeded(lambda: Tower(2))
        if rank == 0:
            fully_shard(model, mesh=mesh)
            return
        with pytest.raises(ValueError, match="does not contain rank 1"):
            fully_shard(model, mesh=mesh)
        assert_untouched(model, rank)

    def with_group(rank: int) -> None:
        group = dist.new_group([0])
        model = seeded(lambda: Tower(2))
        if rank == 0:
            fully_shard(model, mesh=group)
            return
        with pytest.raises(ValueError, match="rank 1 is not in the process group"):
            fully_shard(model, mesh=group)
        assert_untouched(model, rank)

    run_ranks(with_mesh, timeout=20)
    run_ranks(with_group, timeout=20)


def test_mesh_of_another_device() -> None:
    from torch.distributed.device_mesh import DeviceMesh

    def ranks(rank: int) -> None:
        mesh = DeviceMesh("cuda", [0, 1], _init_backend=False, _rank=rank)
        model = seeded(lambda: Tower(2))
        with pytest.raises(ValueError, match=r"mesh is for device 'cuda'.*are on cpu"):
            fully_shard(model, mesh=mesh)
        assert_untouched(model, rank)

    run_ranks(ranks)


@pytest.mark.parametrize("where", ["one", "block"])
def test_parameters_on_several_devices(where: str) -> None:
    """The message names the parameter; a fake tensor stands for one of an absent device."""

    def ranks(rank: int) -> None:
        model = seeded(lambda: Tower(2))
        target = {"one": model.head, "block": model.blocks[1].up}[where]
        with FakeTensorMode():
            target.weight = nn.Parameter(torch.zeros(target.weight.shape, device="cuda"))
        with pytest.raises(
            ValueError, match=f"{(where == 'one' and 'head') or 'up'}.*on c(uda|pu)"
        ):
            by_block(model, init="as_is")
        target.weight = nn.Parameter(torch.zeros(target.weight.shape, dtype=torch.float64))
        assert_untouched(model, rank)

    run_ranks(ranks)


@pytest.mark.parametrize("what", ["value", "shape", "name", "dtype", "nan"])
def test_ranks_that_start_differently(what: str) -> None:
    def ranks(rank: int) -> None:
        model = seeded(lambda: Tower(2))
        if rank == 1:
            if what == "value":
                model.blocks[1].up.weight.data[3, 2] += 1e-9
            elif what == "nan":
                model.blocks[1].up.weight.data[3, 2] = float("nan")
            elif what == "shape":
                model.blocks[1].up = nn.Linear(WIDTH, 8).double()
            elif what == "name":
                model.blocks[1].extra = nn.Parameter(torch.zeros(1))
            else:
                model.blocks[1].up.float()
        by_block(model)

    errors = rank_errors(ranks, 3)
    assert len(set(errors)) == 1, errors
    assert errors[0] is not None and errors[0].startswith("ValueError"), errors
    name = {"value": "up.weight", "nan": "up.weight", "name": "extra"}.get(what, "up")
    assert name in errors[0] and "blocks.1" in errors[0] and "rank 1" in errors[0]


@pytest.mark.parametrize("shape", [(2, 2), (2, 1), (1, 2)])
def test_replicas_that_start_differently(shape: tuple[int, int]) -> None:
    """Every rank of a two-axis mesh is compared, not only those of one row."""

    def ranks(rank: int, odd: int) -> None:
        model = seeded(lambda: Tower(2))
        if rank == odd:
            model.head.weight.data.add_(1e-9)
        by_block(model, mesh=mesh_of(*shape))

    world = shape[0] * shape[1]
    for odd in range(1, world):
        errors = rank_errors(ranks, world, odd)
        assert all(e and "head.weight" in e for e in errors), errors


def test_an_error_on_two_axes_reaches_all_ranks() -> None:
    """An error on one rank of a two axis mesh reaches all."""

    def ranks(rank: int) -> None:
        model = seeded(lambda: Tower(2))
        init = "random" if rank == 3 else "verify"
        by_block(model, mesh=mesh_of(2, 2), init=init)

    errors = rank_errors(ranks, 4, timeout=10)
    assert all(e and "random" in e for e in errors), errors


@pytest.mark.parametrize("shape", [None, (2, 2)])
def test_broadcast_takes_rank_zero(shape: tuple[int, int] | None) -> None:
    """Parameters and buffers, strided ones too, and the buffers of a unit without parameters."""

    def build() -> nn.Module:
        model = Tower(2)
        model.norm = nn.BatchNorm1d(WIDTH)
        model.free = nn.BatchNorm1d(WIDTH, affine=False)
        model.strided = nn.Parameter(torch.randn(4, 3).t())
        model.number = nn.Parameter(torch.arange(3), requires_grad=False)
        model.register_buffer("table", torch.randn(3, 2).t())
        model.register_buffer("gaps", torch.randn(6)[::2])
        return model

    def ranks(rank: int) -> None:
        model, wanted = seeded(build, rank), seeded(build, 0)
        for i, other in enumerate((model, wanted)):
            other.number.data.add_(rank if i == 0 else 0)
            other.free.running_mean.fill_(rank if i == 0 else 0)
        kinds = wrap.by_class({Block, nn.BatchNorm1d})
        mesh = None if shape is None else mesh_of(*shape)
        fully_shard(model, units=kinds, init="broadcast", mesh=mesh)
        for (name, ours), theirs in zip(model.named_parameters(), wanted.parameters()):
            assert torch.equal(whole(ours), theirs), name
        for (name, ours), theirs in zip(model.named_buffers(), wanted.buffers()):
            assert torch.equal(ours, theirs), name

    run_ranks(ranks, 2 if shape is None else 4)


def test_as_is_takes_each_rank_as_it_is() -> None:
    def ranks(rank: int) -> None:
        model = seeded(lambda: Tower(1), rank)
        fully_shard(model, init="as_is")
        full = torch.cat([whole(p).flatten() for p in model.parameters()])
        mine = [torch.cat([p.detach().flatten() for p in seeded(lambda: Tower(1), r).parameters()])
                for r in range(2)]  # fmt: skip
        assert ((full == mine[0]) | (full == mine[1])).all()
        assert not torch.equal(full, mine[0]) and not torch.equal(full, mine[1])

    run_ranks(ranks)


def test_mixed_precision_and_prefetch_check_values() -> None:
    with pytest.raises(ValueError, match=r"param_dtype.*int32"):
        MixedPrecision(param_dtype=torch.int32)
    with pytest.raises(ValueError, match="forward is -1"):
        Prefetch(forward=-1)
    with pytest.raises(ValueError, match="backward_moment is 'later'"):
        Prefetch(backward_moment="later")


@pytest.mark.parametrize("how", ["replaced", "removed", "swapped module", "added", "del"])
def test_a_parameter_replaced_after_sharding(how: str) -> None:
    """D5, at the next forward, on every rank, and only for the unit that it concerns."""

    def ranks(rank: int) -> None:
        model = by_block(seeded(lambda: Tower(2)))
        block = model.blocks[1]
        if how == "replaced":
            block.up.weight = nn.Parameter(torch.zeros(7, WIDTH).double())
        elif how == "removed":
            block.up.bias = None
        elif how == "swapped module":
            block.up = nn.Linear(WIDTH, 7).double()
        elif how == "del":
            del block.up.bias
            block.up.register_parameter("bias", None)
        else:
            block.up.register_parameter("extra", nn.Parameter(torch.zeros(3).double()))
        square(model, data(0, rank)).backward()

    errors = rank_errors(ranks, 2)
    assert len(set(errors)) == 1, errors
    assert errors[0] is not None, "the parameter is silently not trained as it should"
    name = {"removed": "up.bias", "del": "up.bias", "added": "extra"}.get(how, "up.weight")
    assert "'blocks.1'" in errors[0] and name in errors[0], errors[0]
    assert "call fsdp_compose.refresh(model)" in errors[0].lower(), errors[0]


def test_a_replaced_parameter_leaves_the_model_usable() -> None:
    def ranks(rank: int) -> None:
        model = by_block(seeded(lambda: Tower(2)))
        up = model.blocks[1].up
        kept, up.weight = up.weight, nn.Parameter(torch.zeros(7, WIDTH).double())
        for _ in range(2):
            with pytest.raises(RuntimeError, match="was replaced after"):
                model(data(0, rank))
        up.weight = kept
        square(model, data(0, rank)).backward()
        assert all(p.grad is not None for p in model.parameters())

    run_ranks(ranks)


def test_without_a_process_group() -> None:
    """The same errors, in a world of one."""
    with single_process():
        model = seeded(lambda: Tower(2))
        for attempt, kind, text in (CASES[c] for c in ("None", "policy matches nothing")):
            with pytest.raises((TypeError, ValueError), match=text) as raised:
                attempt(model, 0)
            assert raised.type.__name__ == kind
        by_block(model)
        square(model, data(0, 0)).backward()
        undo(model)


@pytest.mark.parametrize("layout", ["offset", "shared", "sparse"])
def test_storages_that_need_care(layout: str) -> None:
    """A parameter may lie anywhere in another tensor's storage."""

    def ranks(rank: int) -> None:
        model = nn.Linear(3, 1)
        base = torch.arange(9.0)
        if layout == "sparse":
            model.extra = nn.Parameter(torch.eye(3).to_sparse())
            with pytest.raises(ValueError, match=r"extra.*layout torch\.sparse_coo"):
                fully_shard(model)
            return
        model.weight = nn.Parameter(base[1:4].view(1, 3))
        if layout == "shared":
            model.other = nn.Parameter(base[5:8])
        fully_shard(model)
        assert torch.equal(whole(model.weight), torch.tensor([[1.0, 2.0, 3.0]]))
        undo(model)
        assert torch.equal(model.weight, torch.tensor([[1.0, 2.0, 3.0]]))
        assert torch.equal(base, torch.arange(9.0))

    run_ranks(ranks)
