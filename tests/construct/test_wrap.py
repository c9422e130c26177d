"""Which submodules become units, with which options, and what is left alone."""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fsdp_compose import (
    MixedPrecision,
    Offload,
    Prefetch,
    ShardingStrategy,
    fully_shard,
    get_state,
    is_fully_sharded,
    undo,
    wrap,
)
from fsdp_compose.construct.collect import _OVERRIDABLE
from fsdp_compose.core.state import Unit, iter_units
from fsdp_compose.sharded import is_sharded

from harness import rank_errors, run_ranks, single_process
from models import WIDTH, Block, Tower, Twin, assert_at_rest, data, seeded, square


def by_name(model: nn.Module) -> dict[str, Unit]:
    return {unit.name: unit for unit in iter_units(model)}


def units_with(policy: wrap.Policy, model: nn.Module | None = None, **options: Any) -> set[str]:
    """Names of the units the policy makes, besides the root."""
    model = Tower(2) if model is None else model
    fully_shard(model, units=policy, **options)
    return set(by_name(model)) - {type(model).__name__}


class Attentive(nn.Module):
    """An attention that reads its output projection's weight without calling it."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(WIDTH, 2, batch_first=True)
        self.blocks = nn.ModuleList([Block(), Block()])

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(x, x, x, need_weights=False)[0]
        for block in self.blocks:
            x = block(x)
        return x


# Policies


def test_by_class() -> None:
    blocks = {"blocks.0", "blocks.1"}
    assert units_with(wrap.by_class(Block)) == blocks
    assert units_with(wrap.by_class({Block, nn.LayerNorm})) == blocks | {
        f"{b}.norm" for b in blocks
    }
    model = Tower(2)
    units_with(wrap.by_class(Block, reshard_after_forward=False), model)
    assert [u.switches.keep_after_forward for u in iter_units(model)] == [None, True, True]


def test_by_size_counts_what_no_unit_inside_has_taken() -> None:
    block = sum(p.numel() for p in Block().parameters())
    up = sum(p.numel() for p in Block().up.parameters())
    assert units_with(wrap.by_size(block)) == {"blocks.0", "blocks.1"}
    assert units_with(wrap.by_size(up)) == {
        *(f"blocks.{i}{m}" for i in range(2) for m in (".up", "")),
    }  # a block without ``up`` is still large enough
    assert "blocks" not in units_with(wrap.by_size(1))
    assert "blocks" in units_with(wrap.by_size(2 * block, exclude=()), _callable())


class _Called(nn.ModuleList):
    def forward(self, x: Tensor) -> Tensor:
        for block in self:
            x = block(x)
        return x


def _callable() -> nn.Module:
    model = Tower(2)
    model.blocks = _Called(model.blocks)
    return model


def test_by_size_excludes_classes_but_looks_inside() -> None:
    assert units_with(wrap.by_size(1, exclude=[Block, nn.ModuleList, nn.LayerNorm])) == {
        "first",
        "head",
        *(f"blocks.{i}.{m}" for i in range(2) for m in ("up", "down")),
    }


@pytest.mark.parametrize("first", [True, False])
def test_a_leaf_is_taken_whole_whatever_it_is_combined_with(first: bool) -> None:
    size, linear = wrap.by_size(20), wrap.by_class(nn.Linear)
    policy = size | linear if first else linear | size
    assert policy.leaves == (nn.MultiheadAttention,)
    found = units_with(policy, Attentive())
    assert "attention" in found
    assert not any(name.startswith("attention.") for name in found)
    assert {"blocks.0.up", "blocks.0.down"} <= found
    run_ranks(
        lambda rank: Twin(rank, 2, Attentive, lambda m: fully_shard(m, units=policy)).train(
            square, 2, 2, 3, WIDTH
        )
    )


def test_a_leaf_counts_all_it_holds() -> None:
    total = sum(p.numel() for p in nn.MultiheadAttention(WIDTH, 2).parameters())
    assert "attention" in units_with(wrap.by_size(total), Attentive())
    model = Attentive()
    ignored = [model.attention.out_proj.weight]
    with pytest.raises(ValueError, match="matches no submodule"):
        units_with(wrap.by_size(total), model, ignored=ignored)


def test_by_fn_returns_a_bool_or_options() -> None:
    def choose(fqn: str, module: nn.Module) -> Any:
        return {"blocks.0": {"reshard_after_forward": False}, "blocks.1": True, "head": {}}.get(fqn)

    model = Tower(3)
    assert units_with(wrap.by_fn(choose), model) == {"blocks.0", "blocks.1", "head"}
    kept = {name: unit.switches.keep_after_forward for name, unit in by_name(model).items()}
    assert kept == {"Tower": None, "blocks.0": True, "blocks.1": None, "head": None}
    with pytest.raises(TypeError, match="returned 'yes' for 'first'"):
        fully_shard(Tower(), units=wrap.by_fn(lambda fqn, module: "yes"))


def test_the_first_that_says_yes_decides() -> None:
    keep = wrap.by_class(Block, reshard_after_forward=False)
    head = wrap.by_fn(lambda fqn, module: fqn == "head")
    for policy, kept in ((keep | wrap.by_class(Block), True), (wrap.by_class(Block) | keep, None)):
        model = Tower(1)
        assert units_with(policy | head, model) == {"blocks.0", "head"}
        assert by_name(model)["blocks.0"].switches.keep_after_forward is kept
    assert (keep | head | wrap.by_size(3)).description == (
        "by_class({Block}) | by_fn(<lambda>) | by_size(3)"
    )


def test_post_order_application() -> None:
    asked: list[tuple[str, int]] = []

    def decide(fqn: str, module: nn.Module, numel: int) -> bool:
        asked.append((fqn, numel))
        return fqn == "blocks.0.up"

    units_with(wrap.Policy(lambda root: decide, "mine"), Tower(1))
    names = [name for name, _ in asked]
    blocks = [f"blocks.0{m}" for m in (".norm", ".up", ".down", "")]
    assert names == ["first", *blocks, "blocks", "head"]
    sizes = dict(asked)
    assert sizes["blocks.0"] == sizes["blocks.0.norm"] + sizes["blocks.0.down"]
    assert "" not in names  # the root is a unit in any case


def test_a_shared_module_is_asked_about_once() -> None:
    model = Tower(2)
    model.blocks[1] = model.blocks[0]
    assert units_with(wrap.by_class(Block), model) == {"blocks.0"}


def test_a_policy_that_matches_nothing() -> None:
    class Other(nn.Module):
        pass

    with pytest.raises(
        ValueError, match=r"by_class\(\{Other\}\) matches no submodule of Tower"
    ) as e:
        fully_shard(Tower(), units=wrap.by_class(Other))
    assert "'Block'" in str(e.value)
    with pytest.raises(TypeError, match="by_class: 'Block' is not a class"):
        wrap.by_class(["Block"])  # type: ignore[list-item]
    with pytest.raises(TypeError, match="by_size"):
        wrap.by_size(3, leaf=[int])  # type: ignore[list-item]


@pytest.mark.parametrize(
    "policy",
    [
        wrap.by_class({Block, nn.Linear}),
        wrap.by_size(40),
        wrap.by_size(30) | wrap.by_class(nn.LayerNorm),
        wrap.by_fn(lambda fqn, m: fqn.endswith("down")),
        wrap.by_execution_order(data(0, 0, dtype=torch.float32), 30),
    ],
    ids=lambda p: p.description,
)
def test_training_with_any_policy(policy: wrap.Policy) -> None:
    run_ranks(lambda rank: Twin(rank, 2, Tower, lambda m: fully_shard(m, units=policy)).train())


# Options of one unit


def only_first(**options: Any) -> wrap.Policy:
    return wrap.by_fn(lambda fqn, m: options if fqn == "blocks.0" else isinstance(m, Block))


def test_every_option_can_be_overridden() -> None:
    import inspect

    taken = set(inspect.signature(fully_shard).parameters)
    never = {"module", "units"}  # of the whole call
    assert set(_OVERRIDABLE) == taken - never


def test_overrides_take_effect_in_their_unit_alone() -> None:
    def ranks(rank: int) -> None:
        import torch.distributed as dist

        half = dist.new_subgroups(1)[0]
        mp = MixedPrecision(param_dtype=torch.bfloat16)
        model = seeded(lambda: Tower(2))
        weight = model.blocks[0].up.weight
        policy = only_first(
            mesh=half,
            mp_policy=mp,
            offload_policy=Offload(grads=True),
            granularity="row",
            prefetch=Prefetch(3, 0),
            reshard_after_forward=False,
            ignored=[weight],
            init="as_is",
        )
        fully_shard(model, units=policy)
        first, second = (by_name(model)[f"blocks.{i}"] for i in range(2))
        assert first.mp == mp and second.mp == MixedPrecision()
        assert first.prefetch == Prefetch(3, 0) and second.prefetch == Prefetch()
        assert first.buckets[0].offload.grads and not second.buckets[0].offload.grads
        assert first.buckets[0].mesh.shard.size == 1 and second.buckets[0].mesh.shard.size == 2
        assert first.switches.keep_after_forward and second.switches.keep_after_forward is None
        assert not is_sharded(weight)
        assert is_sharded(model.blocks[1].up.weight)

    run_ranks(ranks)


def test_methods_and_initialisation_of_one_unit() -> None:
    class Encoder(Block):
        def encode(self, x: Tensor) -> Tensor:
            return self.up(x)

    class Model(Tower):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.ModuleList(Encoder() for _ in range(2))

    def fill(value: float) -> Any:
        def init(module: nn.Module) -> None:
            for param in module.parameters(recurse=False):
                nn.init.constant_(param, value)

        return init

    def ranks(rank: int) -> None:
        with torch.device("meta"):
            model = Model().double()
        policy = wrap.by_fn(
            lambda fqn, m: {
                "blocks.0": {"methods": ("encode",), "param_init_fn": fill(2.0)},
                "blocks.1": True,
            }.get(fqn, False)
        )
        fully_shard(model, units=policy, param_init_fn=fill(1.0))
        first, second = model.blocks
        assert first.up.weight.full_tensor().eq(2.0).all()
        assert second.up.weight.full_tensor().eq(1.0).all()
        x = data(0, rank)
        assert first.encode(x).shape[0] == x.shape[0]
        with pytest.raises(RuntimeError, match=r"blocks\.1\.up\.weight"):
            second.encode(x)

    run_ranks(ranks)


def test_training_with_overrides() -> None:
    policy = wrap.by_fn(
        lambda fqn, m: {
            "blocks.0": {"strategy": ShardingStrategy.SHARD_GRAD_OP},
            "blocks.1": {"strategy": ShardingStrategy.NO_SHARD, "prefetch": Prefetch(0, 0)},
            "blocks.2": {"reshard_after_forward": False, "granularity": "tensor"},
        }.get(fqn, False)
    )
    run_ranks(lambda rank: Twin(rank, 2, Tower, lambda m: fully_shard(m, units=policy)).train())


def test_reshard_of_one_unit_keeps_the_rest_of_the_strategy() -> None:
    def ranks(rank: int) -> None:
        model = seeded(Tower)
        policy = only_first(reshard_after_forward=False)
        fully_shard(model, units=policy, strategy=ShardingStrategy.NO_SHARD)
        for unit in iter_units(model):
            assert unit.buckets[0].mesh.replicate.size == 2

    run_ranks(ranks)
    policy = only_first(reshard_after_forward=True)
    with single_process(), pytest.raises(ValueError, match="NO_SHARD has nothing to reshard"):
        fully_shard(Tower(), units=policy, strategy=ShardingStrategy.NO_SHARD)


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"units": None}, r"unit 'blocks.0' overrides \['units'\]"),
        ({"wrong": 1}, r"overrides \['wrong'\]"),
        ({"init": "zeros"}, "override of unit 'blocks.0': init is 'zeros'"),
        ({"prefetch": 2}, "prefetch is 2; wanted Prefetch"),
        ({"methods": ("encode",)}, "methods names 'encode', but no unit of this call has"),
        ({"param_init_fn": 3}, "override of unit 'blocks.0': param_init_fn is 3"),
        ({"offload_policy": True}, "offload_policy is True; wanted Offload"),
        ({"ignored": [3]}, "ignored holds a int"),
        ({"mp_policy": torch.bfloat16}, "mp_policy is torch.bfloat16; wanted MixedPrecision"),
    ],
)
def test_overrides_that_are_wrong(options: dict[str, Any], text: str) -> None:
    with pytest.raises((TypeError, ValueError), match=text):
        fully_shard(Tower(), units=only_first(**options))


def test_a_wrong_override_on_one_rank_is_an_error_on_all() -> None:
    def ranks(rank: int) -> None:
        fully_shard(Tower(), units=only_first(**({"wrong": 1} if rank else {})))

    errors = rank_errors(ranks)
    assert all(e is not None and "overrides ['wrong']" in e for e in errors)


# Classes in full precision


class Mixed(nn.Module):
    """Norms with and without parameters and buffers, inside blocks and beside them."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(Inner() for _ in range(2))
        self.norm = nn.BatchNorm1d(WIDTH)
        self.seen: dict[str, tuple[torch.dtype, torch.dtype]] = {}

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        return self.norm(x)


class Inner(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.plain = nn.LayerNorm(WIDTH, elementwise_affine=False)
        self.norm = nn.LayerNorm(WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.norm(self.plain(self.linear(x)))


def dtypes_seen(model: nn.Module) -> dict[str, tuple[torch.dtype, torch.dtype]]:
    """By module: dtypes it computes on and that the next one receives."""
    seen: dict[str, Any] = {}

    def note(name: str) -> Any:
        def hook(module: nn.Module, args: Any) -> None:
            seen[name] = args[0].dtype

        return hook

    for name, module in model.named_modules():
        module.register_forward_pre_hook(note(name))
    return seen


NORMS = (nn.BatchNorm1d, nn.LayerNorm)
BF16 = MixedPrecision(torch.bfloat16, buffer_dtype=torch.bfloat16, full_precision_classes=NORMS)


@pytest.mark.parametrize(
    "units", [None, wrap.by_class(Inner), wrap.by_class({Inner, nn.LayerNorm})]
)
def test_classes_in_full_precision(units: wrap.Policy | None) -> None:
    def ranks(rank: int) -> None:
        model = Mixed()
        fully_shard(model, units=units, mp_policy=BF16)
        found = by_name(model)
        norms = {"norm", *(f"blocks.{i}.{n}" for i in range(2) for n in ("plain", "norm"))}
        blocks = set() if units is None else {"blocks.0", "blocks.1"}
        assert set(found) == {"Mixed"} | norms | blocks
        for name in norms:
            assert found[name].mp.param_dtype is torch.float32
            assert found[name].mp.output_dtype is torch.bfloat16
            for bucket in found[name].buckets:
                assert bucket.full.dtype is bucket.reduce_dtype is torch.float32
        seen = dtypes_seen(model)
        for step in range(2):
            out = model(data(step, rank, dtype=torch.float32))
            assert out.dtype is torch.bfloat16
            out.float().square().mean().backward()
            assert_at_rest(model)
        assert all(seen[name] is torch.float32 for name in norms)
        others = {"first", "blocks.0", "blocks.1", "blocks.0.linear", "blocks.1.linear"}
        assert all(seen[name] is torch.bfloat16 for name in others)
        assert model.norm.running_mean.dtype is torch.float32
        assert model.norm.num_batches_tracked == 2
        assert all(p.grad is not None and p.grad.dtype is torch.float32 for p in model.parameters())

    run_ranks(ranks)


def test_full_precision_equals_casts_written_by_hand() -> None:
    class Cast(nn.Module):
        def __init__(self, inner: nn.Module) -> None:
            super().__init__()
            self.inner = inner

        def forward(self, x: Tensor) -> Tensor:
            return self.inner(x.double()).float()

    def ranks(rank: int) -> None:
        model = seeded(Tower)
        plain = copy.deepcopy(model)
        for block in plain.blocks:
            block.norm = Cast(block.norm)
            block.up.float()
            block.down.float()
        plain.first.float()
        plain.head.float()
        mp = MixedPrecision(torch.float32, full_precision_classes=(nn.LayerNorm,))
        fully_shard(model, units=wrap.by_class(Block), mp_policy=mp)
        x = data(0, 0, dtype=torch.float32)  # the same on every rank
        ours, theirs = model(x), plain(x)
        torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=1e-6)
        ours.sum().backward()
        theirs.sum().backward()
        for p, q in zip(model.parameters(), plain.parameters()):
            torch.testing.assert_close(p.grad.full_tensor(), q.grad.double(), rtol=1e-4, atol=1e-4)

    run_ranks(ranks)


def test_full_precision_of_the_sharded_module_itself_and_of_a_few() -> None:
    with single_process():
        norm = fully_shard(nn.LayerNorm(WIDTH), mp_policy=BF16)
        assert get_state(norm).unit.mp.param_dtype is torch.float32
        assert norm(torch.ones(2, WIDTH)).dtype is torch.bfloat16
        out = fully_shard(nn.LayerNorm(3), mp_policy=replace(BF16, output_dtype=torch.float64))
        assert out(torch.ones(2, 3)).dtype is torch.float64
        with pytest.raises(ValueError, match="some are to run in full precision"):
            fully_shard([nn.LayerNorm(3), nn.Linear(3, 3)], mp_policy=BF16)
        model = Tower(1)
        fully_shard([model.first, model.blocks[0]], mp_policy=BF16)
        fully_shard(model)
        assert set(by_name(model)) == {"Tower", "first", "blocks.0.norm"}
        model = Tower(1)
        fully_shard(model, mp_policy=MixedPrecision(full_precision_classes=NORMS))
        assert set(by_name(model)) == {"Tower"}  # there is no other precision
        with pytest.raises(ValueError, match="full_precision_classes is"):
            MixedPrecision(full_precision_classes=nn.LayerNorm)  # type: ignore[arg-type]


def test_full_precision_in_eval_reaches_them_too() -> None:
    with single_process():
        model, plain = seeded(Mixed).float(), seeded(Mixed).float()
        mp = MixedPrecision(
            torch.bfloat16, full_precision_classes=NORMS, full_precision_in_eval=True
        )
        fully_shard(model, units=wrap.by_class(Inner), mp_policy=mp)
        x = torch.randn(3, WIDTH)
        with torch.no_grad():
            torch.testing.assert_close(model.eval()(x), plain.eval()(x))
        assert model.train()(x).dtype is torch.bfloat16


def test_undo_of_full_precision_units() -> None:
    with single_process():
        model = Mixed()
        before = copy.deepcopy(model.state_dict())
        undo(fully_shard(model, mp_policy=BF16))
        for name, value in model.state_dict().items():
            torch.testing.assert_close(value, before[name], rtol=0, atol=0)


# What is left alone


class Buffered(Tower):
    """Blocks with a buffer each, and one of its own."""

    def __init__(self, depth: int = 3) -> None:
        super().__init__(depth)
        for block in self.blocks:
            block.register_buffer("scale", torch.tensor([1.1]))
        self.register_buffer("shift", torch.tensor([0.1]))

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x) + self.shift.to(x.dtype)
        for block in self.blocks:
            x = block(x) * block.scale.to(x.dtype)
        return self.head(x)


def test_ignored_modules_and_parameters_train_by_themselves() -> None:
    """Nobody averages them: here each rank gets the same data, so that they stay equal."""

    def ranks(rank: int) -> None:
        model, plain = seeded(Tower), seeded(Tower)
        ignored = [model.blocks[1], model.head.bias]
        fully_shard(model, units=wrap.by_class(Block), ignored=ignored)
        assert not is_fully_sharded(model.blocks[1])
        left = {name for name, p in model.named_parameters() if not is_sharded(p)}
        inside = {f"blocks.1.{name}" for name, _ in Block().named_parameters()}
        assert left == inside | {"head.bias"}
        pairs = [(m, torch.optim.SGD(m.parameters(), 0.1)) for m in (model, plain)]
        for step in range(3):
            for m, optimizer in pairs:
                square(m, data(step, 0)).backward()
                optimizer.step()
                optimizer.zero_grad()
        for p, q in zip(model.parameters(), plain.parameters()):
            whole = p.full_tensor() if is_sharded(p) else p.detach()
            torch.testing.assert_close(whole, q.detach())

    run_ranks(ranks)


def test_buffers_are_ignored_by_module_or_one_by_one() -> None:
    with single_process():
        mp = MixedPrecision(torch.bfloat16, buffer_dtype=torch.bfloat16)
        model = Buffered()
        fully_shard(model, mp_policy=mp, ignored=[model.blocks[0], model.shift])
        dtypes = {name: b.dtype for name, b in model.named_buffers()}
        assert dtypes == {
            "shift": torch.float32,
            "blocks.0.scale": torch.float32,
            "blocks.1.scale": torch.bfloat16,
            "blocks.2.scale": torch.bfloat16,
        }


def test_ignored_buffers_are_not_broadcast() -> None:
    def ranks(rank: int) -> list[float]:
        model = seeded(Buffered)
        model.shift.fill_(rank)
        for block in model.blocks:
            block.scale.fill_(rank + 1)
        fully_shard(model, init="broadcast", ignored=[model.shift, model.blocks[2]])
        return [float(b) for b in model.buffers()]

    zero, one = run_ranks(ranks)
    assert zero == [0, 1, 1, 1]
    assert one == [1, 1, 1, 2]


def test_an_ignored_module_keeps_the_units_inside_it() -> None:
    def ranks(rank: int) -> None:
        def shard(model: Any) -> None:
            fully_shard(model.blocks[1].up)
            outer = nn.Module()
            outer.inside = model.blocks[1]
            fully_shard(model, units=wrap.by_class(Block), ignored=[outer.inside])

        model = seeded(Tower)
        shard(model)
        assert is_fully_sharded(model.blocks[1].up)
        assert not is_fully_sharded(model.blocks[1])
        assert not is_sharded(model.blocks[1].down.weight)
        plain = seeded(Tower)
        square(model, data(0, 0)).backward()
        square(plain, data(0, 0)).backward()
        for p, q in zip(model.parameters(), plain.parameters()):
            grad = p.grad.full_tensor() if is_sharded(p) else p.grad
            torch.testing.assert_close(grad, q.grad)
        assert_at_rest(model)

    run_ranks(ranks)


def test_an_ignored_parameter_is_ignored_wherever_it_is_shared() -> None:
    with single_process():
        for pick in (lambda m: m.first.weight, lambda m: m.first):
            model = Tower(2)
            model.blocks[0].up = nn.Linear(WIDTH, WIDTH)
            model.blocks[0].down = nn.Linear(WIDTH, WIDTH, bias=False)
            model.blocks[0].up.weight = model.first.weight
            fully_shard(model, units=wrap.by_class(Block), ignored=[pick(model)])
            assert model.blocks[0].up.weight is model.first.weight
            assert not is_sharded(model.first.weight)
            assert is_sharded(model.blocks[0].up.bias)
            square(model, torch.ones(2, WIDTH)).backward()
            assert model.first.weight.grad is not None


def test_what_cannot_be_ignored() -> None:
    with pytest.raises(TypeError, match="ignored holds a str"):
        fully_shard(Tower(), ignored=["head"])  # type: ignore[list-item]
    model = Tower()
    with pytest.raises(TypeError, match=r"ignored is a Linear; wanted a sequence"):
        fully_shard(model, ignored=model.head)  # type: ignore[arg-type]


def test_a_policy_counts_without_what_is_ignored() -> None:
    model = Tower(1)
    block = sum(p.numel() for p in model.blocks[0].parameters())
    ignored = [model.blocks[0].norm.bias]
    with pytest.raises(ValueError, match="matches no submodule"):
        units_with(wrap.by_size(block), model, ignored=ignored)
    assert units_with(wrap.by_size(block - WIDTH), model, ignored=ignored) == {"blocks.0"}
