"""Plain parameters over shards train exactly as the plain model does, and are never stale."""

from __future__ import annotations

import copy
import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from fsdp_compose import (
    MixedPrecision,
    Offload,
    ShardingStrategy,
    fully_shard,
    grad_norm,
    refresh,
    set_reshard_after_backward,
    undo,
)
from fsdp_compose.core.guards.moved_parameters import shard_of
from fsdp_compose.optim.mirror import source_of
from fsdp_compose.optim.plain_parameters import (
    flat_parameters,
    local_parameters,
    named_local_parameters,
)
from fsdp_compose.sharded import to_local

from flat_ways import OPTIMIZERS, WAYS, twin, ways
from harness import rank_errors, run_ranks, simulate_ranks
from models import (
    Block,
    Tower,
    Twin,
    assert_at_rest,
    by_block,
    data,
    one_unit,
    seeded,
    square,
    units,
    whole,
)

pytestmark = pytest.mark.filterwarnings("error")


@ways
@pytest.mark.parametrize("make", OPTIMIZERS)
@pytest.mark.parametrize("world", [1, 2, 3])
def test_training_equals_the_plain_model(world: int, make: str, way: str) -> None:
    simulate_ranks(lambda rank: twin(rank, world, way, make).train(steps=4), world)


@ways
def test_made_in_inference_mode(way: str) -> None:
    """As an evaluation may: they train, and are what is given afterwards."""
    model = by_block(seeded(Tower))
    make = flat_parameters if way == "flat" else local_parameters
    with torch.inference_mode():
        plain = make(model)
    square(model, data(0, 0)).backward()
    torch.optim.SGD(plain, lr=0.1).step()
    assert all(a is b for a, b in zip(plain, make(model), strict=True))


@ways
@pytest.mark.parametrize("strategy", ["SHARD_GRAD_OP", "NO_SHARD", "ZERO1"])
def test_training_under_each_strategy(strategy: str, way: str) -> None:
    def ranks(rank: int) -> None:
        shard = lambda m: by_block(m, strategy=ShardingStrategy[strategy])  # noqa: E731
        twin(rank, 2, way, shard=shard).train(steps=3)

    simulate_ranks(ranks)


@ways
def test_training_with_the_optimizer_on_the_host(way: str) -> None:
    def ranks(rank: int) -> None:
        offload = Offload(optimizer=True, pin_memory=False)
        twin(rank, 2, way, shard=lambda m: by_block(m, offload_policy=offload)).train()

    simulate_ranks(ranks)


class _Kernels(TorchDispatchMode):
    """Kernels that ran, each with how many tensors it was given first."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[tuple[str, int]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        count = len(args[0]) if args and isinstance(args[0], list) else 1
        self.found.append((func.__name__.split(".")[0], count))
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("offload", [{"params": True, "grads": True}, {"optimizer": True}])
def test_an_offloaded_step_is_one_pass(offload: dict[str, bool]) -> None:
    """AdamW, fused over the flat host buffers: one kernel for all, and no gradient is copied."""

    def ranks(rank: int) -> None:
        policy = Offload(pin_memory=False, **offload)
        model = by_block(seeded(Tower), offload_policy=policy)
        flat = flat_parameters(model)
        optimizer = torch.optim.AdamW(flat, lr=0.1, fused=True)
        for seed in range(2):
            square(model, data(seed, rank)).backward()
            for bucket, param in zip((b for u in units(model) for b in u.buckets), flat):
                grads = [to_local(entry.param.grad) for entry in bucket.entries]
                assert all(
                    grad.untyped_storage().data_ptr() == param.grad.untyped_storage().data_ptr()
                    for grad in grads
                )
            with _Kernels() as kernels:
                optimizer.step()
            optimizer.zero_grad()
        assert len(flat) < len(list(model.parameters()))
        ran = [kernel for kernel in kernels.found if "record_function" not in kernel[0]]
        assert ran == [("_foreach_add_", len(flat)), ("_fused_adamw_", len(flat))]

    simulate_ranks(ranks)


@ways
@pytest.mark.parametrize("reentrant", [False, True], ids=["saved", "reentrant"])
def test_training_under_checkpointing(reentrant: bool, way: str) -> None:
    def forward(model: nn.Module, x: Tensor) -> Tensor:
        return checkpoint(model, x.requires_grad_(), use_reentrant=reentrant).square().mean()

    simulate_ranks(lambda rank: twin(rank, 2, way).train(forward))


class Mixed(nn.Module):
    """Frozen and trained, two dtypes, complex and empty parameters, and one tied."""

    def __init__(self) -> None:
        super().__init__()
        self.a = Block()
        self.b = Block()
        self.b.up.weight = self.a.up.weight
        self.b.norm.requires_grad_(False)
        self.phase = nn.Parameter(torch.randn(5, dtype=torch.complex128))
        self.nothing = nn.Parameter(torch.empty(0, 3))
        self.unused = nn.Parameter(torch.ones(3))

    def forward(self, x: Tensor) -> Tensor:
        return self.b(self.a(x)) * self.phase.abs().sum() + self.nothing.sum()


@ways
@pytest.mark.parametrize("shard", [by_block, one_unit])
def test_training_any_parameter(shard: Callable[[nn.Module], Any], way: str) -> None:
    """The unused parameter decays as a part of a flat one, whose gradient there is zero."""

    def ranks(rank: int) -> None:
        made = twin(rank, 2, way, build=Mixed, shard=shard)
        for seed in range(3):
            made.backward(square, seed)
            made.check_grads()
            if way == "flat":
                made.reference.unused.grad = torch.zeros_like(made.reference.unused)
            made.optim.step()
            made.plain_optim.step()
            made.zero_grad()
        made.check()

    run_ranks(ranks)


@ways
def test_parameters_of_no_unit_are_trained_too(way: str) -> None:
    def ranks(rank: int) -> None:
        shard = lambda m: fully_shard(m, ignored=[m.head])  # noqa: E731
        made = twin(rank, 2, way, shard=shard)
        assert sum(p is made.model.head.weight for p in WAYS[way](made.model)) == 1
        made.model.head.requires_grad_(False)
        assert not any(p is made.model.head.weight for p in WAYS[way](made.model))

    run_ranks(ranks)


def test_one_flat_parameter_for_each_trained_bucket() -> None:
    def ranks(rank: int) -> None:
        model = seeded(lambda: Tower(2))
        model.blocks[1].requires_grad_(False)
        model.blocks[0].norm.requires_grad_(False)
        by_block(model)
        leaves = flat_parameters(model)
        trained = [b for u in units(model) for b in u.buckets if b.entries[0].param.requires_grad]
        assert len(leaves) == len(trained) == 2
        for leaf, bucket in zip(leaves, trained):
            assert type(leaf) is nn.Parameter and leaf.is_leaf and leaf.requires_grad
            assert leaf.shape == (bucket.layout.shard_numel,)
            assert leaf.data_ptr() == shard_of(bucket).data_ptr()
            assert leaf.dtype == torch.float64
        assert all(a is b for a, b in zip(leaves, flat_parameters(model)))

    run_ranks(ranks)


def test_local_parameters_in_the_order_of_the_model() -> None:
    def ranks(rank: int) -> int:
        model = by_block(seeded(Tower))
        model.blocks[2].requires_grad_(False)
        found = named_local_parameters(model)
        wanted = {name: p for name, p in model.named_parameters() if p.requires_grad}
        assert list(found) == list(wanted)
        for name, leaf in found.items():
            assert type(leaf) is nn.Parameter and leaf.is_leaf and leaf.ndim == 1
            assert leaf.data_ptr() == to_local(wanted[name]).data_ptr()
            assert leaf.shape == to_local(wanted[name]).shape
        again = named_local_parameters(model)
        assert all(found[name] is again[name] for name in found)
        model.blocks[2].requires_grad_(True)
        assert len(named_local_parameters(model)) == len(list(model.parameters()))
        return sum(leaf.numel() == 0 for leaf in found.values())

    assert sum(run_ranks(ranks)) > 0  # empty slices are there too


def test_decay_for_matrices_only() -> None:
    """As the documentation of local_parameters shows."""

    def groups(model: nn.Module, leaves: dict[str, nn.Parameter]) -> torch.optim.Optimizer:
        shapes = {name: p.dim() for name, p in model.named_parameters()}
        decayed = [p for name, p in leaves.items() if shapes[name] >= 2]
        others = [p for name, p in leaves.items() if shapes[name] < 2]
        return torch.optim.AdamW(
            [{"params": decayed}, {"params": others, "weight_decay": 0.0}], weight_decay=0.5
        )

    def ranks(rank: int) -> None:
        made = Twin(rank, 2, Tower, by_block)
        made.optim = groups(made.model, named_local_parameters(made.model))
        made.plain_optim = groups(made.reference, dict(made.reference.named_parameters()))
        made.train()

    run_ranks(ranks)


def test_source_tells_what_a_parameter_stands_for() -> None:
    model = by_block(seeded(Tower))
    bucket = units(model)[0].buckets[0]
    source = source_of(flat_parameters(model)[0])
    assert source is not None and source.bucket() is bucket and source.entry() is None
    source = source_of(named_local_parameters(model)["first.bias"])
    entry = None if source is None else source.entry()
    assert entry is not None and entry.param is model.first.bias
    assert source_of(model.first.bias) is None


def test_plain_parameters_keep_nothing_alive() -> None:
    model = by_block(seeded(Tower))
    leaves = [*flat_parameters(model), *named_local_parameters(model).values()]
    square(model, data(0, 0)).backward()
    gone = weakref.ref(model), weakref.ref(leaves[0]), weakref.ref(leaves[-1])
    del leaves
    assert gone[1]() is None and gone[2]() is None
    square(model, data(0, 0)).backward()
    kept = flat_parameters(model)
    gc.disable()
    try:
        del model
        assert gone[0]() is None
    finally:
        gc.enable()
    assert kept[0].numel()


def test_a_deep_copy_has_plain_parameters_of_its_own() -> None:
    model = by_block(seeded(Tower))
    leaves = flat_parameters(model)
    twin = copy.deepcopy(model)
    square(twin, data(0, 0)).backward()
    assert all(leaf.grad is None for leaf in leaves)
    assert all(a is not b for a, b in zip(leaves, flat_parameters(twin)))
    assert all(leaf.grad is not None for leaf in flat_parameters(twin))


@pytest.mark.parametrize("way", [*WAYS, "sharded"])
@pytest.mark.parametrize("make", OPTIMIZERS)
def test_a_step_is_seen_by_a_unit_that_stays_gathered(make: str, way: str) -> None:
    def ranks(rank: int) -> None:
        shard = lambda m: by_block(m, strategy=ShardingStrategy.SHARD_GRAD_OP)  # noqa: E731
        made = Twin(rank, 2, Tower, shard, OPTIMIZERS[make])
        if way != "sharded":
            made.optim = OPTIMIZERS[make](WAYS[way](made.model))
        set_reshard_after_backward(made.model, False)
        for seed in range(3):
            made.backward(square, seed)
            made.step()
        with torch.no_grad():
            made.losses(square, 9)

    run_ranks(ranks)


@ways
def test_module_to_is_followed(way: str) -> None:
    def ranks(rank: int) -> None:
        made = twin(rank, 2, way, "sgd")
        leaves = WAYS[way](made.model)
        made.train(steps=1)
        for change in (nn.Module.float, lambda model: model._apply(torch.clone)):
            change(made.model)
            made.optim.state.clear()
            square(made.model, data(0, rank, dtype=torch.float32)).backward()
            assert all(p.dtype == torch.float32 == p.grad.dtype for p in leaves)
            before = [whole(p) for p in made.model.parameters()]
            made.optim.step()
            for p, old in zip(made.model.parameters(), before):
                assert not torch.equal(whole(p), old)

    run_ranks(ranks)


@ways
def test_a_module_that_is_not_sharded(way: str) -> None:
    with pytest.raises(ValueError, match=r"Tower is not a unit.*fully_shard was called"):
        WAYS[way](Tower())


def test_flat_refuses_a_part_of_a_unit() -> None:
    model = one_unit(seeded(Tower))
    by_hand = nn.Sequential(model.first, fully_shard(nn.Linear(2, 2)))
    with pytest.raises(ValueError, match=r"'0.weight' of Sequential belongs to unit 'Tower'"):
        flat_parameters(by_hand)


def test_flat_refuses_what_was_frozen_afterwards() -> None:
    model = one_unit(seeded(Tower))
    model.head.requires_grad_(False)
    with pytest.raises(ValueError, match=r"'head.weight' of unit 'Tower' is frozen"):
        flat_parameters(model)


def test_freezing_under_a_flat_parameter_raises() -> None:
    def ranks(rank: int) -> None:
        model = one_unit(seeded(Tower))
        leaves = flat_parameters(model)
        model.head.requires_grad_(False)
        square(model, data(0, rank)).backward()
        assert leaves

    for error in rank_errors(ranks):
        assert error is not None and "'head.weight' was frozen after flat_parameters" in error


@ways
def test_a_step_after_undo_raises(way: str) -> None:
    def ranks(rank: int) -> None:
        made = twin(rank, 2, way)
        made.train(steps=1)
        undo(made.model)
        gc.collect()
        made.optim.step()

    for error in rank_errors(ranks):
        assert error is not None and "AdamW holds plain parameters of a module that is no" in error


@ways
def test_converting_between_backward_and_step_raises(way: str) -> None:
    def ranks(rank: int) -> None:
        made = twin(rank, 2, way)
        made.backward(square, 0)
        made.model.float()
        made.optim.step()

    for error in rank_errors(ranks):
        assert error is not None and "was converted" in error and "convert after step" in error


def test_low_precision_gradients() -> None:
    def ranks(rank: int) -> None:
        mp = MixedPrecision(param_dtype=torch.bfloat16, keep_low_precision_grads=True)
        model = by_block(seeded(Tower).float(), mp_policy=mp)
        leaves = flat_parameters(model)
        square(model, data(0, rank, dtype=torch.float32)).backward()
        assert {p.dtype for p in leaves} == {torch.float32}
        assert {p.grad.dtype for p in leaves} == {torch.bfloat16}
        for param in (*leaves, *model.parameters()):
            param.grad = None
        for param in model.parameters():  # given one by one, where nothing packed them
            param.grad = torch.full(param.shape, 2.0, dtype=torch.bfloat16)
        numel = sum(param.numel() for param in model.parameters())
        torch.testing.assert_close(grad_norm(model).float(), torch.tensor(4.0 * numel).sqrt())
        assert {p.grad.dtype for p in leaves} == {torch.bfloat16}
        assert {x for p in leaves for x in p.grad.tolist()} <= {0.0, 2.0}

    run_ranks(ranks)


def test_state_is_at_rest_after_all_that() -> None:
    model = by_block(seeded(Tower))
    optim = torch.optim.SGD(flat_parameters(model), lr=0.1)
    square(model, data(0, 0)).backward()
    optim.step()
    assert_at_rest(model)


@ways
@pytest.mark.parametrize("how", ["undo", "refresh"])
def test_what_became_plain_again_trains(how: str, way: str) -> None:
    """Also while the optimizer over plain parameters, which are of no use then, is kept."""

    def ranks(rank: int) -> None:
        model, plain = by_block(seeded(Tower)), seeded(Tower)
        kept = torch.optim.SGD(WAYS[way](model), lr=0.1)
        square(model, data(0, rank)).backward()
        kept.zero_grad()
        head, model.head = model.head, nn.Identity()
        if how == "refresh":
            refresh(model)
        else:
            model.head = head
            undo(model)
        square(head, data(1, 0)).backward()
        square(plain.head, data(1, 0)).backward()
        assert torch.equal(head.weight.grad, plain.head.weight.grad)

    simulate_ranks(ranks)


@pytest.mark.parametrize("call", [flat_parameters, local_parameters, named_local_parameters])
def test_what_is_no_unit_is_refused_by_the_caller(call: Callable[..., Any]) -> None:
    with pytest.raises(ValueError, match=f"^{call.__name__}: Linear is not a unit"):
        call(nn.Linear(2, 2))
