"""Adapters, reparametrisation, averages, edits and odd modules train as in one process."""

from __future__ import annotations

import abc
import copy
import re
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrizations, parametrize, prune
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn, update_bn

from fsdp_compose import (
    MixedPrecision,
    ShardingStrategy,
    accumulate,
    count_traffic,
    fully_shard,
    gathered,
    load_checkpoint,
    no_sync,
    participate,
    reduce_grads,
    refresh,
    reshard,
    save_checkpoint,
    set_gradient_divide_factor,
    set_reshard_after_backward,
    set_reshard_after_forward,
    state_dict,
    undo,
    unshard,
    wrap,
)
from fsdp_compose.sharded import is_sharded

from harness import rank_errors, run_ranks, single_process
from models import (
    WIDTH,
    Block,
    MakeOptimizer,
    Tolerance,
    Tower,
    Twin,
    adamw,
    assert_at_rest,
    by_block,
    compare,
    data,
    fqns,
    one_unit,
    seeded,
    sgd,
    square,
    train_twin,
    units,
    whole,
)

Change = Callable[[nn.Module], Any]


def by_linear(model: nn.Module) -> nn.Module:
    return fully_shard(model, units=wrap.by_class(nn.Linear))


def blocks_with(change: Change, depth: int = 2) -> Callable[[], nn.Module]:
    """Towers whose blocks had a change each."""

    def build() -> nn.Module:
        model = Tower(depth)
        for block in model.blocks:
            change(block)
        return model

    return build


class Built(Twin):
    """The plain replicas are built, not copied: legacy norms hold tensors that cannot be copied."""

    def replicate(self, model: nn.Module) -> list[nn.Module]:
        others = [seeded(self.build, self.seed) for _ in range(1, self.world)]
        for other in others:
            for mine, first in zip(other.modules(), model.modules()):
                mine._parameters.update(first._parameters)
        return [model, *others]


def trained(model: nn.Module) -> list[nn.Parameter]:
    return [p for p in model.parameters() if p.requires_grad]


def together(
    model: nn.Module, plain: nn.Module, rank: int, world: int = 2, steps: int = 3, start: int = 0
) -> None:
    """Steps of both with fresh optimizers of what is trained now, then all parameters agree."""
    ours, theirs = adamw(trained(model)), adamw(trained(plain))
    for step in range(start, start + steps):
        square(model, data(step, rank)).backward()
        assert_at_rest(model)
        square(plain, torch.cat([data(step, r) for r in range(world)])).backward()
        for optim in (ours, theirs):
            optim.step()
            optim.zero_grad()
    same(model, plain)


def same(model: nn.Module, plain: nn.Module) -> None:
    found, wanted = dict(model.named_parameters()), dict(plain.named_parameters())
    assert list(found) == list(wanted)
    for name, param in found.items():
        compare(name, whole(param), wanted[name].detach(), Tolerance())


# Low-rank adapters by hand


class LoRALinear(nn.Module):
    """A frozen weight and a trained update of rank 2, in one module."""

    def __init__(self, width: int, out: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(out, width) * 0.3, requires_grad=False)
        self.a = nn.Parameter(torch.randn(2, width))
        self.b = nn.Parameter(torch.randn(out, 2) * 0.1)
        self.merged = False

    def forward(self, x: Tensor) -> Tensor:
        out = F.linear(x, self.weight)
        return out if self.merged else out + F.linear(F.linear(x, self.a), self.b)

    def merge(self, sign: int) -> None:
        with torch.no_grad():
            self.weight += sign * (self.b @ self.a)
        self.merged = sign > 0


def low_rank(block: nn.Module) -> None:
    block.requires_grad_(False)
    block.up = LoRALinear(WIDTH, 7)


@pytest.mark.parametrize("optimizer", [sgd, adamw])
@pytest.mark.parametrize(("shard", "world"), [(by_block, 2), (one_unit, 2), (by_block, 4)])
def test_adapters_by_hand(shard: Any, world: int, optimizer: MakeOptimizer) -> None:
    def ranks(rank: int) -> None:
        twin = Twin(rank, world, blocks_with(low_rank), shard, optimizer)
        twin.train()
        for sign in (1, -1):
            with gathered(twin.model, writeback=True):
                for block in twin.model.blocks:
                    block.up.merge(sign)
            for block in twin.reference.blocks:
                block.up.merge(sign)
            for plain in twin.plain:
                for block in plain.blocks:
                    block.up.merged = sign > 0
            with torch.no_grad():
                found = twin.model(data(9, rank))
                compare("output", found, twin.mine(data(9, rank)), Tolerance())
        twin.train()

    run_ranks(ranks, world)


def test_frozen_buckets_reduce_nothing_and_gather_no_more_than_they_must() -> None:
    """A frozen unit in front of everything trained is gathered once: no backward needs it."""

    def build() -> nn.Module:
        model = Tower(3)
        model.requires_grad_(False)
        low_rank(model.blocks[2])
        model.head.requires_grad_(True)
        return model

    def ranks(rank: int) -> None:
        model = by_block(seeded(build))
        root, *rest = units(model)
        assert [len(u.buckets) for u in (root, *rest)] == [2, 1, 1, 2]
        for step in range(3):
            with count_traffic() as traffic:
                square(model, data(step, rank)).backward()
        # The root's two buckets stay gathered; the adapted block's are gathered for backward too.
        assert (traffic.gathers, traffic.reduces) == (2 + 1 + 1 + 2 * 2, 2)
        assert all(p.grad is None for p in model.parameters() if not p.requires_grad)

    run_ranks(ranks, 2)


def test_frozen_units_may_stay_gathered_until_their_weights_change() -> None:
    def ranks(rank: int) -> None:
        twin = Twin(rank, 2, blocks_with(lambda b: b.requires_grad_(False)), by_block, sgd)
        for block in twin.model.blocks:
            set_reshard_after_forward(block, False)
            set_reshard_after_backward(block, False)

        def gathers(seed: int) -> int:
            with count_traffic() as traffic:
                twin.backward(square, seed)
            assert traffic.reduces == 1
            twin.optim.step()
            twin.plain_optim.step()
            twin.zero_grad()
            return traffic.gathers

        assert [gathers(0), gathers(1), gathers(2)] == [3, 1, 1]
        for model in (twin.model, twin.reference):
            with torch.no_grad():
                model.blocks[0].up.weight.mul_(2)
        assert [gathers(3), gathers(4)] == [2, 1]
        same(twin.model, twin.reference)

    run_ranks(ranks, 2)


def test_in_a_unit_that_stays_gathered_only_what_trained_is_gathered_again() -> None:
    def ranks(rank: int) -> None:
        model = by_block(seeded(blocks_with(low_rank)))
        for block in model.blocks:
            set_reshard_after_forward(block, False)
            set_reshard_after_backward(block, False)
        optim, found = adamw(trained(model)), []
        for step in range(3):
            with count_traffic() as traffic:
                square(model, data(step, rank)).backward()
            found.append((traffic.gathers, traffic.reduces))
            optim.step()
            optim.zero_grad()
        assert found == [(5, 3), (3, 3), (3, 3)]

    run_ranks(ranks, 2)


def test_only_the_adapters_are_saved() -> None:
    """Sharded values gather one by one, so the frozen weights move no byte."""

    def ranks(rank: int) -> None:
        twin = Twin(rank, 2, blocks_with(low_rank), by_block, sgd)
        twin.train()
        names = [n for n, p in twin.model.named_parameters() if p.requires_grad and ".up." in n]
        values = twin.model.state_dict()
        with count_traffic() as traffic:
            saved = {name: values[name].full_tensor() for name in names}
        assert traffic.gathers == len(names)
        for name in names:
            assert torch.equal(saved[name], twin.reference.state_dict()[name])
        with torch.no_grad():
            for name in names:
                twin.model.get_parameter(name).zero_()
        twin.model.load_state_dict(saved, strict=False)
        twin.check()

    run_ranks(ranks, 2)


# Frozen bases in few bits


class LowBit(nn.Module):
    """Weights in 8 or packed 4 bits with a scale per row, and a trained update."""

    def __init__(self, bits: int, signed: bool) -> None:
        super().__init__()
        self.bits, self.signed = bits, signed
        columns = WIDTH * bits // 8
        dtype = torch.int8 if signed else torch.uint8
        packed = torch.randint(0, 256, (7, columns)).to(torch.uint8).view(dtype)
        self.packed = nn.Parameter(packed, requires_grad=False)
        self.scale = nn.Parameter(torch.rand(7, 1) * 0.01, requires_grad=False)
        self.a = nn.Parameter(torch.randn(2, WIDTH))
        self.b = nn.Parameter(torch.randn(7, 2) * 0.1)

    def forward(self, x: Tensor) -> Tensor:
        q = self.packed
        if self.bits == 4:
            q = torch.stack([q & 15, q >> 4], -1).flatten(1)
        weight = (q.to(x.dtype) - (0 if self.signed else 2 ** (self.bits - 1))) * self.scale
        return F.linear(x, weight.to(x.dtype)) + F.linear(F.linear(x, self.a), self.b)


@pytest.mark.parametrize("shard", [by_block, one_unit])
@pytest.mark.parametrize(("bits", "signed"), [(8, False), (8, True), (4, False)])
def test_low_bit_bases(bits: int, signed: bool, shard: Any) -> None:
    def change(block: nn.Module) -> None:
        block.requires_grad_(False)
        block.up = LowBit(bits, signed)

    def build() -> nn.Module:
        return blocks_with(change)()

    for optimizer in (sgd, adamw):
        train_twin(build, shard=shard, optimizer=optimizer)


def test_low_bit_bases_are_cut_in_bytes_and_never_cast() -> None:
    def ranks(rank: int) -> None:
        model = Tower(1)
        torch.manual_seed(0)
        model.blocks[0].up = LowBit(4, False)
        kept = model.blocks[0].up.packed.detach().clone()
        by_block(model, mp_policy=MixedPrecision(param_dtype=torch.bfloat16))
        packed = model.blocks[0].up.packed
        buckets = [b for u in units(model) for b in u.buckets if b.shard.dtype == torch.uint8]
        assert [b.full_nbytes for b in buckets] == [32]  # 21 bytes, and 16 per rank at the least
        square(model, data(0, rank, dtype=torch.float32)).backward()
        model.to(torch.bfloat16)
        square(model, data(0, rank, dtype=torch.bfloat16)).backward()
        assert packed.grad is None and packed.dtype == torch.uint8
        assert torch.equal(packed.full_tensor(), kept)
        assert torch.equal(state_dict(model, kind="full")["blocks.0.up.packed"], kept)
        undo(model)
        assert packed is model.blocks[0].up.packed and torch.equal(packed, kept)

    run_ranks(ranks, 2)


# Parameters with a class or attributes of their own


class Packed(nn.Parameter):
    """Bytes that carry their scale, as 4-bit weights of quantisation libraries do."""

    scale: Tensor

    def __new__(cls, data: Tensor, scale: Tensor) -> Packed:
        packed = torch.Tensor._make_subclass(cls, data, False)
        packed.scale = scale
        return packed

    def __deepcopy__(self, memo: dict[int, Any]) -> Packed:
        memo[id(self)] = twin = Packed(self.detach().clone(), self.scale.clone())
        return twin

    def dequantize(self) -> Tensor:
        return self.as_subclass(Tensor).to(self.scale.dtype) * self.scale


class PackedLinear(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        q = torch.randint(0, 255, (7, WIDTH), dtype=torch.uint8)
        self.weight = Packed(q, torch.rand(7, 1, dtype=torch.float64) * 0.01)

    def forward(self, x: Tensor) -> Tensor:
        assert isinstance(self.weight, Packed)
        return F.linear(x, self.weight.dequantize())


def change_to_packed(block: nn.Module) -> None:
    block.up = PackedLinear()


@pytest.mark.parametrize("shard", [by_block, one_unit])
def test_parameters_of_a_class_of_their_own(shard: Any) -> None:
    def ranks(rank: int) -> None:
        twin = Twin(rank, 2, blocks_with(change_to_packed), shard)
        twin.train()
        weight = twin.model.blocks[0].up.weight
        assert is_sharded(weight)
        with gathered(twin.model):
            shown = twin.model.blocks[0].up.weight
            assert isinstance(shown, Packed) and shown.scale is weight.scale
        held = twin.model.blocks[0] if shard is by_block else twin.model
        unshard(held)
        shown = twin.model.blocks[0].up.weight
        assert isinstance(shown, Packed) and shown.shape == (7, WIDTH)
        reshard(held)
        copied = copy.deepcopy(twin.model)
        copied.blocks[0].up.weight.scale.mul_(2)
        twin.model.blocks[0].up.weight.scale.mul_(2)  # seen by the next forward
        twin.reference.blocks[0].up.weight.scale.mul_(2)
        with torch.no_grad():
            wanted = twin.reference(data(3, rank))
            compare("output", twin.model(data(3, rank)), wanted, Tolerance())
            compare("copy", copied(data(3, rank)), wanted, Tolerance())
        undo(twin.model)
        assert weight is twin.model.blocks[0].up.weight and type(weight) is Packed
        same(twin.model, twin.reference)

    run_ranks(ranks, 2)


class Scaled(nn.Linear):
    """Reads an attribute that somebody put on the weight."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * getattr(self.weight, "factor", 1.0)


@pytest.mark.parametrize("frozen", [False, True])
def test_attributes_of_parameters_are_read_in_forward(frozen: bool) -> None:
    def change(block: nn.Module) -> None:
        block.down = Scaled(7, WIDTH, bias=False)
        block.down.weight.factor = 3.0
        block.down.weight.requires_grad_(not frozen)

    def ranks(rank: int) -> None:
        twin = Built(rank, 2, blocks_with(change), by_block, sgd)
        twin.train()
        for model in (twin.model, twin.reference):
            model.blocks[0].down.weight.factor = 0.5
        twin.train()

    run_ranks(ranks, 2)


class Elsewhere(Tensor):
    """A wrapper: computes in ``__torch_dispatch__`` and holds its data in other tensors."""

    @staticmethod
    def __new__(cls, q: Tensor, scale: Tensor) -> Elsewhere:
        return Tensor._make_wrapper_subclass(cls, q.shape, dtype=scale.dtype)

    def __init__(self, q: Tensor, scale: Tensor) -> None:
        self.q, self.scale = q, scale

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.detach.default:
            return Elsewhere(args[0].q, args[0].scale)
        raise NotImplementedError(str(func))


class Slotted(nn.Parameter):
    __slots__ = ("extra",)


def script(module: nn.Module) -> nn.Module:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return torch.jit.script(module)


def wrapped(rank: int) -> None:
    model = Tower(1)
    made = Elsewhere(torch.ones(7, 7, dtype=torch.int8), torch.ones(()))
    model.blocks[0].up.weight = nn.Parameter(made, requires_grad=False)
    by_block(model)


def slotted(rank: int) -> None:
    model = Tower(1)
    model.blocks[0].up.weight = Slotted(torch.ones(7, 6))
    by_block(model)


def lazy(rank: int) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        fully_shard(nn.Sequential(nn.LazyLinear(6), nn.Linear(6, 2)))


def scripted(rank: int) -> None:
    fully_shard(script(nn.Linear(2, 2)))


def scripted_inside(rank: int) -> None:
    fully_shard(nn.Sequential(nn.Linear(2, 2), script(nn.Linear(2, 2))))


@pytest.mark.parametrize(
    ("build", "text"),
    [
        (
            wrapped,
            "parameter 'blocks.0.up.weight' of unit 'blocks.0' is an instance of "
            "Elsewhere, whose class computes in __torch_dispatch__",
        ),
        (
            slotted,
            "parameter 'blocks.0.up.weight' of unit 'blocks.0' is an instance of Slotted, a ",
        ),
        (
            lazy,
            "parameter '0.weight' of unit 'Sequential' is an UninitializedParameter, which has no "
            "shape yet; run one forward",
        ),
        (scripted, "unit 'RecursiveScriptModule' has a ScriptModule, whose compiled code"),
        (scripted_inside, "unit 'Sequential' has a ScriptModule as '1', whose compiled code"),
    ],
)
def test_what_cannot_be_sharded_is_refused_by_name(build: Any, text: str) -> None:
    for error in rank_errors(build, 2):
        assert error is not None and error.startswith("ValueError: fully_shard: ")
        assert text in error and ("ignored=" in error or build is lazy)


def test_scripted_functions_and_ignored_modules_are_left_alone() -> None:
    def ranks(rank: int) -> None:
        plain = nn.Sequential(nn.Linear(WIDTH, 6), nn.Tanh(), nn.Linear(6, 2)).double()
        model = copy.deepcopy(plain)
        model[1] = script(nn.Sequential(nn.Tanh()))
        model.append(script(nn.Linear(2, 2).double()))
        fully_shard(model, ignored=[model[3]])
        square(model, data(0, rank)).backward()
        assert model[3].weight.grad is not None and not is_sharded(model[3].weight)
        model[0].extra = nn.Parameter(torch.ones(1).double())
        with pytest.raises(RuntimeError, match=r"'0\.extra'.*refresh"):
            model(data(0, rank))
        refresh(model)
        square(model, data(0, rank)).backward()

    run_ranks(ranks, 2)


# Freezing and unfreezing


@pytest.mark.parametrize("optimizer", [sgd, adamw])
@pytest.mark.parametrize("shard", [by_block, one_unit])
def test_progressive_unfreezing(shard: Any, optimizer: MakeOptimizer) -> None:
    """From the head down, with one optimizer over everything; half of a unit at a time."""
    order = ["head", "blocks.1.down", "blocks.1", "blocks.0.norm", "blocks.0", "first"]

    def ranks(rank: int) -> None:
        twin = Twin(rank, 2, lambda: Tower(2), shard, optimizer)
        for seed in range(len(order) + 2):
            open_now = tuple(order[: seed + 1])
            for model in (twin.model, twin.reference):
                for name, param in model.named_parameters():
                    param.requires_grad_(name.startswith(open_now))
            with count_traffic() as traffic:
                twin.backward(square, seed)
            assert_at_rest(twin.model)
            trains_now = [
                bucket
                for unit in units(twin.model)
                for bucket in unit.buckets
                if any(entry.param.requires_grad for entry in bucket.entries)
            ]
            assert traffic.reduces == len(trains_now)
            for name, param in twin.model.named_parameters():
                assert (param.grad is None) == (not name.startswith(open_now)), name
            twin.step()
        twin.check()

    run_ranks(ranks, 2)


@pytest.mark.parametrize("keep", ["sharded", "unsharded", "no_all_reduce"])
@pytest.mark.parametrize(("pattern", "shard"), [("up", one_unit), ("blocks.0", by_block)])
def test_what_is_frozen_during_accumulation_keeps_what_it_had(
    shard: Any, pattern: str, keep: Any
) -> None:
    def ranks(rank: int) -> None:
        world = 4 if keep == "no_all_reduce" else 2
        mesh = torch.distributed.init_device_mesh("cpu", (world // 2, 2))
        twin = Twin(rank, world, lambda: Tower(2), lambda m: shard(m, mesh=mesh))
        for first in (False, True, False):
            with accumulate(twin.model, keep=keep):
                for seed, frozen in enumerate((first, not first)):
                    for model in (twin.model, twin.reference):
                        for name, param in model.named_parameters():
                            param.requires_grad_(not frozen or pattern not in name)
                    twin.backward(square, seed)
            wanted = dict(twin.reference.named_parameters())
            for name, param in twin.model.named_parameters():
                assert param.grad is not None, f"{name} lost its gradient"
                compare(name, whole(param.grad), wanted[name].grad, Tolerance())
            twin.optim.step()
            twin.plain_optim.step()
            twin.zero_grad()
        for model in (twin.model, twin.reference):
            for name, param in model.named_parameters():
                param.requires_grad_(pattern not in name)
        twin.backward(square, 3)
        for name, param in twin.model.named_parameters():
            assert (param.grad is None) == (pattern in name), name
        twin.step()
        twin.check()

    run_ranks(ranks, 4 if keep == "no_all_reduce" else 2)


def test_gradients_of_a_unit_that_was_frozen_before_the_last_backward_are_asked_for() -> None:
    """Nothing of it runs in the last backward, so the step says what to call (D12)."""

    def ranks(rank: int) -> None:
        twin = Twin(rank, 2, lambda: Tower(2))
        with no_sync(twin.model):
            twin.backward(square, 0)
        for model in (twin.model, twin.reference):
            model.blocks[0].requires_grad_(False)
        twin.backward(square, 1)
        with pytest.raises(RuntimeError, match=r"'blocks\.0\..*reduce_grads\(module\)"):
            twin.optim.step()
        reduce_grads(twin.model)
        twin.step()
        twin.check()

    run_ranks(ranks, 2)


@pytest.mark.parametrize("keep", ["unsharded", "no_all_reduce"])
def test_a_discarded_accumulation_leaves_nothing_to_what_is_frozen(keep: Any) -> None:
    def ranks(rank: int) -> None:
        mesh = torch.distributed.init_device_mesh("cpu", (2, 2))
        twin = Twin(rank, 4, lambda: Tower(2), lambda m: by_block(m, mesh=mesh))

        def spoil() -> None:
            with accumulate(twin.model, keep=keep):
                square(twin.model, data(0, rank)).backward()
                raise KeyError

        with pytest.raises(KeyError):
            spoil()
        for model in (twin.model, twin.reference):
            for block in model.blocks:
                block.up.requires_grad_(False)
        twin.backward(square, 1)
        assert twin.model.blocks[0].up.weight.grad is None
        twin.step()
        twin.check()

    run_ranks(ranks, 4)


@pytest.mark.parametrize("make", [sgd, adamw])
def test_adversaries_take_turns(make: MakeOptimizer) -> None:
    """A critic with clipped weights and a generator; each is frozen in the other's turn."""

    def build() -> nn.Module:
        critic = nn.Sequential(nn.Linear(2, WIDTH), Tower(1))
        return nn.ModuleDict({"generator": Tower(2), "critic": critic})

    def turn(models: nn.Module, optims: Any, inputs: list[Tensor]) -> None:
        generator, critic = models["generator"], models["critic"]
        for acts, rests, optim in ((critic, generator, 1), (generator, critic, 0)):
            acts.requires_grad_(True)
            rests.requires_grad_(False)
            losses = []
            for z in inputs:
                fake = generator(z)
                loss = critic(fake).square().mean()
                losses.append(loss - critic(z[:, :2]).mean() if acts is critic else -loss)
            torch.stack(losses).mean().backward()
            assert all(p.grad is None for p in rests.parameters())
            optims[optim].step()
            optims[optim].zero_grad()
            with torch.no_grad():
                for i, p in enumerate(critic.parameters()):
                    (p if i % 2 else p.data).clamp_(-0.3, 0.3)

    def ranks(rank: int) -> None:
        model, plain = seeded(build), seeded(build)
        for part in model.values():
            by_block(part)
        optims = [[make(part.parameters()) for part in m.values()] for m in (model, plain)]
        for step in range(3):
            turn(model, optims[0], [data(step, rank)])
            turn(plain, optims[1], [data(step, r) for r in range(2)])
        same(model, plain)
        for part in model.values():
            assert_at_rest(part)

    run_ranks(ranks, 2)


# Reparametrisation


class Squash(nn.Module):
    """A parametrisation of a user."""

    def forward(self, weight: Tensor) -> Tensor:
        return torch.tanh(weight) * 1.5

    def right_inverse(self, weight: Tensor) -> Tensor:
        return torch.atanh((weight / 1.5).clamp(-0.9, 0.9))


@pytest.fixture(autouse=True)
def _legacy() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", ".*weight_norm.*is deprecated", FutureWarning)
        yield


def seeded_spectral(norm: Callable[[nn.Module], Any], module: nn.Module) -> None:
    """Its first vectors are random."""
    torch.manual_seed(3)
    norm(module)


CHANGES: dict[str, Change] = {
    "parametrize": lambda m: parametrize.register_parametrization(m, "weight", Squash()),
    "orthogonal": lambda m: parametrizations.orthogonal(m, orthogonal_map="matrix_exp"),
    "cayley": lambda m: parametrizations.orthogonal(m, orthogonal_map="cayley"),
    "weight_norm": parametrizations.weight_norm,
    "spectral_norm": lambda m: seeded_spectral(parametrizations.spectral_norm, m),
    "legacy weight_norm": torch.nn.utils.weight_norm,
    "legacy spectral_norm": lambda m: seeded_spectral(torch.nn.utils.spectral_norm, m),
    "prune": lambda m: prune.l1_unstructured(m, "weight", 0.4),
}


@pytest.mark.parametrize("change", CHANGES)
def test_reparametrised_before_sharding(change: str) -> None:
    """In a unit's submodule, and on the unit's own module, which has hooks of both."""
    build = blocks_with(lambda block: CHANGES[change](block.up))

    def ranks(rank: int) -> None:
        Built(rank, 2, build, by_block, sgd).train()
        Built(rank, 2, build, by_linear, adamw).train()

    run_ranks(ranks, 2)


@pytest.mark.parametrize(
    ("change", "shard"),
    [*((change, by_block) for change in CHANGES), ("weight_norm", one_unit), ("prune", by_linear)],
)
def test_reparametrised_after_sharding(change: str, shard: Any) -> None:
    """Inside ``gathered(writeback=True)``, then ``refresh``; forgetting it is an error."""

    def ranks(rank: int) -> None:
        model, plain = shard(seeded(lambda: Tower(2))), seeded(lambda: Tower(2))
        together(model, plain, rank)
        kept = {id(p) for p in model.parameters()}
        with torch.no_grad(), gathered(model, writeback=True):
            CHANGES[change](model.blocks[0].up)
        with torch.no_grad():
            CHANGES[change](plain.blocks[0].up)
        with pytest.raises(RuntimeError, match=r"refresh\(model\) on every rank"):
            model(data(0, rank))
        refresh(model)
        names = [name for name, _ in plain.named_parameters()]
        assert sorted(fqns(model)) == sorted(names)
        made = 2 if "weight_norm" in change else 0
        assert len([p for p in model.parameters() if id(p) not in kept]) == made
        together(model, plain, rank, start=3)

    run_ranks(ranks, 2)


@pytest.mark.parametrize(
    ("change", "leave"), [("parametrize", True), ("parametrize", False), ("weight_norm", True)]
)
def test_a_parametrisation_is_removed(change: str, leave: bool) -> None:
    """Out of two originals torch makes a new parameter, in grad mode only."""

    def ranks(rank: int) -> None:
        build = blocks_with(lambda block: CHANGES[change](block.up))
        model, plain = by_block(seeded(build)), seeded(build)
        together(model, plain, rank)
        with torch.no_grad(), gathered(model, writeback=True), torch.enable_grad():
            parametrize.remove_parametrizations(model.blocks[0].up, "weight", leave)
        parametrize.remove_parametrizations(plain.blocks[0].up, "weight", leave)
        refresh(model)
        assert type(model.blocks[0].up) is nn.Linear
        together(model, plain, rank, start=3)

    run_ranks(ranks, 2)


def test_parametrised_values_may_be_cached() -> None:
    def forward(model: nn.Module, x: Tensor) -> Tensor:
        with parametrize.cached():
            return square(model, x) + square(model, 2 * x)

    train_twin(blocks_with(lambda b: CHANGES["parametrize"](b.up)), forward, optimizer=adamw)


def test_spectral_vectors_agree_between_ranks() -> None:
    """They follow the weights alone, which are the same everywhere."""

    def ranks(rank: int) -> list[Tensor]:
        build = blocks_with(lambda block: CHANGES["spectral_norm"](block.up))
        model = by_block(seeded(build))
        start = [b.clone() for b in model.buffers()]
        for step in range(3):
            square(model, data(step, rank)).backward()
        assert not any(torch.equal(a, b) for a, b in zip(start, model.buffers()))
        return list(model.buffers())

    for ours, theirs in zip(*run_ranks(ranks, 2)):
        assert torch.equal(ours, theirs)


def test_surgery_without_writeback_is_an_error() -> None:
    def ranks(rank: int) -> None:
        model = by_block(seeded(lambda: Tower(2)))
        with torch.no_grad(), gathered(model):
            CHANGES["prune"](model.blocks[0].up)

    for error in rank_errors(ranks, 2):
        assert error is not None
        assert "'blocks.0.up.weight' of unit 'blocks.0' was edited" in error
        assert "writeback=True" in error


def test_a_parameter_that_was_moved_is_named() -> None:
    def ranks(rank: int) -> None:
        model = by_block(seeded(lambda: Tower(2)))
        model.blocks[0].spare = model.head.weight
        model(data(0, rank))

    for error in rank_errors(ranks, 2):
        assert error is not None and "'blocks.0' has sharded parameters at places" in error
        assert "'spare'" in error and "fsdp_compose.refresh(model) on every rank" in error


# Averages of weights


def averaged(before: bool, multi: bool) -> Callable[[int], None]:
    """A model and its average, averaged before either is sharded or after the model is."""
    options: dict[str, Any] = {"multi_avg_fn": get_ema_multi_avg_fn(0.9)} if multi else {}

    def ranks(rank: int) -> None:
        model, plain = seeded(lambda: Tower(2)), seeded(lambda: Tower(2))
        if before:
            mean = AveragedModel(model, **options)
            by_block(mean.module)
        by_block(model)
        if not before:
            mean = AveragedModel(model, **options)
        wanted = AveragedModel(plain, **options)
        ours, theirs = adamw(model.parameters()), adamw(plain.parameters())
        for step in range(3):
            square(model, data(step, rank)).backward()
            square(plain, torch.cat([data(step, r) for r in range(2)])).backward()
            for optim in (ours, theirs):
                optim.step()
                optim.zero_grad()
            mean.update_parameters(model)
            wanted.update_parameters(plain)
        same(mean, wanted)
        assert all(is_sharded(p) for p in mean.parameters())
        with torch.no_grad():
            compare("output", mean(data(9, rank)), wanted(data(9, rank)), Tolerance())
        full = state_dict(mean, kind="full")
        assert list(full) == list(wanted.state_dict())
        assert_at_rest(mean)

    return ranks


@pytest.mark.parametrize("multi", [False, True])
@pytest.mark.parametrize("before", [False, True])
def test_averaged_model(before: bool, multi: bool) -> None:
    run_ranks(averaged(before, multi), 2)


def test_batch_statistics_of_an_averaged_model() -> None:
    def build() -> nn.Module:
        return nn.Sequential(nn.Linear(WIDTH, 6), nn.BatchNorm1d(6), nn.Linear(6, 2))

    def ranks(rank: int) -> None:
        model, plain = one_unit(seeded(build)), seeded(build)
        mean, wanted = AveragedModel(model), AveragedModel(plain)
        for average, source in ((mean, model), (wanted, plain)):
            average.update_parameters(source)
            update_bn([data(step, rank) for step in range(3)], average)
        assert wanted.module[1].running_mean.any()
        for (name, found), buffer in zip(mean.named_buffers(), wanted.buffers()):
            compare(name, found, buffer, Tolerance())
        with torch.no_grad():
            compare("output", mean(data(9, rank)), wanted(data(9, rank)), Tolerance())

    run_ranks(ranks, 2)


@pytest.mark.parametrize("world", [2, 4])
def test_averages_by_hand_and_in_checkpoints(world: int, tmp_path: Path) -> None:
    """A deep copy is sharded on its own; three ways to average, none communicates."""

    def update(average: nn.Module, model: nn.Module, step: int) -> None:
        pairs = list(zip(average.parameters(), model.parameters()))
        with torch.no_grad():
            if step == 0:
                for a, b in pairs:
                    a.lerp_(b, 0.1)
            elif step == 1:
                torch._foreach_lerp_([a for a, _ in pairs], [b for _, b in pairs], 0.1)
            else:
                for a, b in pairs:
                    a.data.mul_(0.9).add_(b.data, alpha=0.1)

    def ranks(rank: int) -> None:
        model, plain = by_block(seeded(lambda: Tower(2))), seeded(lambda: Tower(2))
        mean, wanted = (copy.deepcopy(m).requires_grad_(False).eval() for m in (model, plain))
        ours, theirs = adamw(model.parameters()), adamw(plain.parameters())
        for step in range(3):
            square(model, data(step, rank)).backward()
            square(plain, torch.cat([data(step, r) for r in range(world)])).backward()
            for optim in (ours, theirs):
                optim.step()
                optim.zero_grad()
            with count_traffic() as traffic:
                update(mean, model, step)
            assert traffic.collectives == traffic.control == 0
            update(wanted, plain, step)
            with torch.no_grad():
                compare("output", mean(data(9, rank)), wanted(data(9, rank)), Tolerance())
        both = nn.ModuleDict({"model": model, "mean": mean})
        save_checkpoint(tmp_path / "both", both, ours)
        fresh = nn.ModuleDict(
            {
                "model": by_block(seeded(lambda: Tower(2), 1)),
                "mean": one_unit(seeded(lambda: Tower(2), 2)).requires_grad_(False),
            }
        )
        load_checkpoint(tmp_path / "both", fresh, adamw(fresh["model"].parameters()))
        same(fresh["model"], plain)
        same(fresh["mean"], wanted)

    run_ranks(ranks, world)


def test_averages_of_a_model_that_is_cut_differently_are_refused_by_name() -> None:
    def ranks(rank: int) -> None:
        model = seeded(lambda: Tower(2))
        mean = one_unit(copy.deepcopy(model))
        by_block(model)
        with torch.no_grad():
            for a, b in zip(mean.parameters(), model.parameters()):
                a.lerp_(b, 0.1)

    for error in rank_errors(ranks, 2):
        assert error is not None and "'first.weight', is cut differently" in error


# Edits


@pytest.mark.parametrize("shard", [by_block, one_unit])
def test_layers_are_initialised_rows_edited_and_weights_exchanged(shard: Any) -> None:
    def edit(model: nn.Module) -> None:
        torch.manual_seed(5)
        model.head.reset_parameters()
        with torch.no_grad():
            model.first.weight[2] = model.first.weight[:2].mean(0)
            model.blocks[0].up.weight[:, 1:3] *= 3
            model.blocks[1].down.weight.clamp_(-0.2, 0.2)
        first, second = model.blocks[0].up, model.blocks[1].up
        first.weight, second.weight = second.weight, first.weight

    def ranks(rank: int) -> None:
        model, plain = shard(seeded(lambda: Tower(2))), seeded(lambda: Tower(2))
        together(model, plain, rank, steps=1)
        kept = list(map(id, model.parameters()))
        with torch.no_grad(), gathered(model, writeback=True):
            edit(model)
        edit(plain)
        same(model, plain)
        assert list(map(id, model.parameters())) == kept
        together(model, plain, rank, start=1)

    run_ranks(ranks, 2)


class Reader(nn.Module):
    """An embedding, a body, and logits by the embedding's weight, which another unit may own."""

    gathers = False

    def __init__(self) -> None:
        super().__init__()
        self.emb = nn.Embedding(5, WIDTH)
        self.body = Block()

    def forward(self, ids: Tensor) -> Tensor:
        x = self.body(self.emb(ids))
        if self.gathers:
            with gathered(self.emb):
                return x @ self.emb.weight.t()
        return x @ self.emb.weight.t()


class GatheringReader(Reader):
    gathers = True


def read_loss(model: nn.Module, x: Tensor) -> Tensor:
    return model((x[:, 0].abs() * 7).long() % 5).square().mean()


def test_a_vocabulary_grows() -> None:
    def ranks(rank: int) -> None:
        def shard(model: nn.Module) -> nn.Module:
            return fully_shard(model, units=wrap.by_class({Block}))

        twin = Twin(rank, 2, Reader, shard, adamw)
        twin.train(read_loss)
        with pytest.raises(RuntimeError, match=r"replaced by \(7, 6\).*refresh\(model\)"):
            with gathered(twin.model, writeback=True):
                twin.model.emb.weight = nn.Parameter(torch.zeros(7, WIDTH).double())
        with torch.no_grad(), gathered(twin.model):
            old = twin.model.emb.weight.clone()
        for model, start in ((twin.model, old), (twin.reference, twin.reference.emb.weight)):
            grown = torch.cat([start.detach(), start.detach().mean(0, keepdim=True).expand(2, -1)])
            model.emb.weight = nn.Parameter(grown)
            model.emb.num_embeddings = 7
        with pytest.raises(RuntimeError, match=r"'emb.weight'.*refresh\(model\)"):
            read_loss(twin.model, data(0, rank))
        refresh(twin.model)
        twin.plain[1].emb.weight = twin.reference.emb.weight
        ours, theirs = (adamw(m.parameters()) for m in (twin.model, twin.reference))
        for step in range(2):
            twin.backward(read_loss, step)
            twin.check_grads()
            for optim in (ours, theirs):
                optim.step()
                optim.zero_grad()
        same(twin.model, twin.reference)

    run_ranks(ranks, 2)


def own_embedding(model: nn.Module) -> nn.Module:
    return fully_shard(model, units=wrap.by_class({Block, nn.Embedding}))


@pytest.mark.parametrize("optimizer", [sgd, adamw])
def test_a_weight_read_from_another_unit(optimizer: MakeOptimizer) -> None:
    """In one unit with its reader, or inside a scope in forward; gradients of both uses add up."""
    train_twin(Reader, read_loss, by_block, optimizer)
    train_twin(GatheringReader, read_loss, own_embedding, optimizer)


class Speaker(Tower):
    def encode(self, x: Tensor) -> Tensor:
        return self.first(x)


def reads(rank: int) -> None:
    read_loss(own_embedding(seeded(Reader)), data(0, rank))


def encodes(rank: int) -> None:
    by_block(seeded(Speaker)).encode(data(0, rank))


def between(rank: int) -> None:
    model = by_block(seeded(Tower))
    model.head.weight[0].sum()


@pytest.mark.parametrize(
    ("use", "text"),
    [
        (reads, "torch.Tensor.t needs the whole of 'emb.weight' (unit 'emb'), of which rank "),
        (encodes, "torch.nn.functional.linear needs the whole of 'first.weight' (unit 'Speaker')"),
        (between, "torch.Tensor.__getitem__ needs the whole of 'head.weight' (unit 'Tower')"),
    ],
)
def test_a_sharded_weight_that_is_read_says_what_to_call(use: Any, text: str) -> None:
    for rank, error in enumerate(rank_errors(use, 2)):
        assert error is not None and error.startswith(f"ShardedWeightError: {text}")
        assert re.search(rf"of which rank {rank} holds (no )?elements", error)
        assert "`with fsdp_compose.gathered(module):`" in error
        assert re.search(r"fully_shard\(module, methods=\('forward', ", error)


# Modules that are odd as Python


class Abstract(abc.ABC):
    @abc.abstractmethod
    def encode(self, x: Tensor) -> Tensor: ...


class Concrete(Tower, Abstract):
    def encode(self, x: Tensor) -> Tensor:
        return self(x)


class Registry(type):
    """Counts the calls of its classes."""

    made = 0

    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        Registry.made += 1
        return super().__call__(*args, **kwargs)


class Registered(Tower, metaclass=Registry):
    pass


class WithSlots(nn.Module):
    __slots__ = ("factor",)

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, 2)
        self.factor = 3

    @property
    def weight(self) -> nn.Parameter:
        return self.inner.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x) * self.factor + F.linear(x, self.weight)


class Delegating(nn.Module):
    """Looks up in another module what it does not have."""

    def __init__(self) -> None:
        super().__init__()
        self.inside = Tower(2)

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__("inside"), name)

    def forward(self, x: Tensor) -> Tensor:
        return self.inside(x)


class Renaming(nn.Module):
    """Names its parameters otherwise than it holds them."""

    def __init__(self) -> None:
        super().__init__()
        self.inside = Tower(2)

    def named_parameters(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, nn.Parameter]]:
        for name, param in self.inside.named_parameters(*args, **kwargs):
            yield name.replace("blocks", "layers"), param

    def forward(self, x: Tensor) -> Tensor:
        return self.inside(x)


class Containers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.steps = nn.ParameterList(torch.randn(WIDTH, WIDTH) * 0.3 for _ in range(3))
        self.named = nn.ParameterDict({"a": torch.randn(WIDTH), "b": torch.randn(WIDTH, 2)})

    def forward(self, x: Tensor) -> Tensor:
        for weight in self.steps:
            x = x @ weight
        extra = sum(value.sum() for value in self.named.values())
        return (x + self.named["a"]) @ self.named["b"] + extra + self.steps[-1].sum()


class TwoNames(nn.Module):
    """One parameter under two names, and in a submodule under a third."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Parameter(torch.randn(WIDTH, 2))
        self.b = self.a
        self.linear = nn.Linear(2, WIDTH)
        self.linear.weight = self.a

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.a + (2 * x) @ self.b + self.linear(x @ self.a).sum()


@pytest.mark.parametrize(
    "build", [Concrete, Registered, WithSlots, Delegating, Renaming, Containers, TwoNames]
)
def test_odd_modules(build: Callable[[], nn.Module]) -> None:
    def ranks(rank: int) -> None:
        def shard(model: nn.Module) -> nn.Module:
            blocks = any(isinstance(m, Block) for m in model.modules())
            return by_block(model) if blocks else one_unit(model)

        twin = Built(rank, 2, build, shard)
        kind = type(twin.model)
        twin.train()
        assert type(twin.model) is kind

    run_ranks(ranks, 2)


def test_backward_hooks_of_modules_see_and_change_gradients() -> None:
    def hook(model: nn.Module) -> list[tuple[int, ...]]:
        seen: list[tuple[int, ...]] = []
        for block in model.blocks:
            block.register_full_backward_hook(
                lambda module, into, out: seen.append(tuple(into[0].shape)) or (2 * into[0],)
            )
            block.up.register_full_backward_hook(lambda m, into, out: seen.append((1,)))
        model.register_full_backward_pre_hook(lambda module, out: (3 * out[0],))
        return seen

    def ranks(rank: int) -> None:
        model, plain = seeded(Tower), seeded(Tower)
        by_block(model)
        seen, wanted = hook(model), hook(plain)
        square(model, data(0, rank).requires_grad_()).backward()
        assert_at_rest(model)
        xs = [data(0, r).requires_grad_() for r in range(2)]
        torch.stack([square(plain, x) for x in xs]).mean().backward()
        assert seen == wanted[: len(seen)] and len(seen) == 6
        for (name, ours), theirs in zip(model.named_parameters(), plain.parameters()):
            compare(name, whole(ours.grad), theirs.grad, Tolerance())

    run_ranks(ranks, 2)


# Conditional compute


class Dropping(Tower):
    """Layers dropped at random; ``shared`` says whether ranks draw alike."""

    draw: Callable[[int], bool] = staticmethod(lambda layer: True)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for i, block in enumerate(self.blocks):
            if self.draw(i):
                x = block(x)
            elif units(block):
                x = participate(block, x)
        return self.head(x)


@pytest.mark.filterwarnings("ignore:the forward of unit")
@pytest.mark.parametrize("shared", [True, False])
def test_layer_drop(shared: bool) -> None:
    """Ranks that draw differently participate; where they draw alike, it costs what it saves."""

    def ranks(rank: int) -> None:
        twin = Twin(rank, 2, lambda: Dropping(4), by_block, adamw)
        for step in range(3):
            for r, model in [(rank, twin.model), *enumerate(twin.plain)]:
                key = 10 * step + (0 if shared else r)
                keep = torch.rand(4, generator=torch.Generator().manual_seed(key)) > 0.4
                model.draw = lambda layer, keep=keep: bool(keep[layer])
            twin.backward(square, step)
            twin.step()
        twin.check()

    run_ranks(ranks, 2)


class Exiting(Tower):
    """Returns from any depth, through the head."""

    def forward(self, x: Tensor, depth: int = 3) -> Tensor:
        x = self.first(x)
        for block in self.blocks[:depth]:
            x = block(x)
        return self.head(x)


@pytest.mark.filterwarnings("ignore:the forward of unit")
def test_early_exit_that_is_the_same_everywhere_gathers_only_what_ran() -> None:
    def ranks(rank: int) -> None:
        twin = Twin(rank, 2, Exiting)
        for step, depth in enumerate([3, 1, 1, 0, 0, 2, 2]):
            with count_traffic() as traffic:
                twin.backward(lambda m, x, d=depth: m(x, d).square().mean(), step)
            assert traffic.reduces == 1 + depth
            if step in (2, 4, 6):  # the order is known by now, and nothing is gathered in vain
                assert traffic.gathers == 1 + 2 * depth
            twin.step()
        twin.check()

    run_ranks(ranks, 2)


class Forked(nn.Module):
    """One unit in which each rank may use other parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = nn.Linear(WIDTH, 2), nn.Linear(WIDTH, 2)
        self.never = nn.Linear(WIDTH, 2)
        self.side = 0

    def forward(self, x: Tensor) -> Tensor:
        return (self.left, self.right)[self.side](x)


def test_parameters_that_some_ranks_do_not_use_count_as_zero_there() -> None:
    def ranks(rank: int) -> None:
        twin = Twin(rank, 2, Forked, one_unit)
        for step in range(3):
            for r, model in [(rank, twin.model), *enumerate(twin.plain)]:
                model.side = (r + step) % 2
            twin.backward(square, step)
            assert twin.model.never.weight.grad is None
            twin.step()
        twin.check()

    run_ranks(ranks, 2)


def join(model: nn.Module, batches: list[Tensor], optim: torch.optim.Optimizer) -> int:
    """Train until every rank has run out of batches; the loss is the mean over those that have one.

    A rank that ran out keeps participating, so nobody waits for it.
    """
    steps, remaining = 0, iter(batches)
    while True:
        batch = next(remaining, None)
        active = torch.tensor(float(batch is not None))
        torch.distributed.all_reduce(active)
        if not active:
            return steps
        set_gradient_divide_factor(model, active.item())
        loss = participate(model) if batch is None else square(model, batch)
        loss.backward()
        optim.step()
        optim.zero_grad()
        steps += 1


@pytest.mark.parametrize("world", [2, 4])
def test_uneven_numbers_of_batches_that_nobody_knows(world: int) -> None:
    counts = [2, 4, 1, 0][:world]

    def ranks(rank: int) -> None:
        batches = [[data(10 * r + i, r) for i in range(n)] for r, n in enumerate(counts)]
        model, plain = by_block(seeded(Tower)), seeded(Tower)
        assert join(model, batches[rank], adamw(model.parameters())) == max(counts)
        optim = adamw(plain.parameters())
        for step in range(max(counts)):
            square(plain, torch.cat([b[step] for b in batches if step < len(b)])).backward()
            optim.step()
            optim.zero_grad()
        same(model, plain)
        assert_at_rest(model)

    run_ranks(ranks, world)


def test_a_world_without_a_process_group() -> None:
    with single_process():
        model, plain = by_block(seeded(blocks_with(low_rank))), seeded(blocks_with(low_rank))
        together(model, plain, 0, world=1)
        with torch.no_grad(), gathered(model, writeback=True):
            CHANGES["parametrize"](model.first)
        CHANGES["parametrize"](plain.first)
        refresh(model)
        together(model, plain, 0, world=1)
        kept = {"strategy": ShardingStrategy.SHARD_GRAD_OP}
        model, plain = seeded(blocks_with(change_to_packed)), seeded(blocks_with(change_to_packed))
        together(fully_shard(model, **kept), plain, 0, world=1)
