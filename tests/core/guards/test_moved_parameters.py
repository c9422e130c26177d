"""What people do to parameters after sharding is taken over at the next forward, or refused."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from fsdp_compose import (
    MixedPrecision,
    ShardingStrategy,
    fully_shard,
    reduce_grads,
    set_requires_all_reduce,
    undo,
)
from fsdp_compose.scopes.gathered import gathered
from fsdp_compose.sharded import is_sharded

from harness import rank_errors, run_ranks, simulate_ranks
from models import (
    EVERY_SHARD,
    Block,
    Tolerance,
    Tower,
    Twin,
    adamw,
    assert_at_rest,
    by_block,
    data,
    mesh_of_replicas,
    nested,
    seeded,
    square,
    units,
    whole,
)

pytestmark = pytest.mark.filterwarnings("error")


def twin(rank: int, world: int, shard: Any = by_block, optimizer: Any = adamw) -> Twin:
    return Twin(rank, world, lambda: Tower(2), shard, optimizer)


def plain_sgd(params: Any) -> torch.optim.Optimizer:
    """Without state, which would keep its dtype, as it does beside a plain module."""
    return torch.optim.SGD(params, lr=0.1)


def both(pair: Twin, change: Callable[[nn.Module], Any]) -> None:
    change(pair.model)
    for model in pair.plain[:1]:
        change(model)


class Cast(Tower):
    """Takes inputs in any dtype."""

    def forward(self, x: Tensor) -> Tensor:
        weight = self.first.weight
        return super().forward(x.to(weight.dtype)).double()


CONVERSIONS: dict[str, Callable[[nn.Module], Any]] = {
    "float": lambda m: m.float(),
    "bfloat16": lambda m: m.bfloat16(),
    "half": lambda m: m.half(),
    "there and back": lambda m: m.half().double(),
    "to cpu": lambda m: m.to("cpu"),
    "data": lambda m: [setattr(p, "data", p.data.float()) for p in m.parameters()],
    "data like": lambda m: [setattr(p, "data", p.data * 2) for p in m.parameters()],
    "data once": lambda m: setattr(m.head.bias, "data", m.head.bias.data + 1),
}


@pytest.mark.parametrize("name", list(CONVERSIONS))
@pytest.mark.parametrize("shard", list(EVERY_SHARD))
@pytest.mark.parametrize("world", [1, 2])
def test_training_goes_on_as_that_of_the_plain_module(name: str, shard: str, world: int) -> None:
    change = CONVERSIONS[name]

    def ranks(rank: int) -> None:
        loose = Tolerance(3e-2, 3e-2) if name in ("bfloat16", "half") else Tolerance(1e-4, 1e-5)
        pair = Twin(rank, world, lambda: Cast(2), EVERY_SHARD[shard], plain_sgd)
        ids = [id(p) for p in pair.model.parameters()]
        pair.train(steps=2)
        both(pair, change)
        if "data" not in name or name == "data":
            pair.plain = [pair.plain[0], *[copy_sharing(pair.plain[0]) for _ in range(world - 1)]]
        pair.tolerance = loose if not name.startswith(("to cpu", "data ")) else Tolerance()
        pair.train(steps=3)
        assert [id(p) for p in pair.model.parameters()] == ids
        kinds = {p.dtype for p in pair.model.parameters()}
        assert kinds == {p.dtype for p in pair.plain[0].parameters()}
        assert {a.dtype for u in units(pair.model) for a in u.links.aliases} == kinds
        assert not any(b.residence.moved for u in units(pair.model) for b in u.buckets)

    simulate_ranks(ranks, world)


def copy_sharing(model: nn.Module) -> nn.Module:
    return copy.deepcopy(model, {id(p): p for p in model.parameters()})


def test_conversion_is_exact_where_the_plain_one_is() -> None:
    def ranks(rank: int) -> None:
        torch.manual_seed(0)
        model, plain = Tower(2), Tower(2)
        plain.load_state_dict(model.state_dict())
        by_block(model)
        for kind in (torch.bfloat16, torch.float64, torch.float16):
            model.to(kind)
            plain.to(kind)
            x = data(0, 0, dtype=kind)
            assert torch.equal(model(x), plain(x))
            for name, param in plain.named_parameters():
                assert torch.equal(whole(model.get_parameter(name)), param)

    run_ranks(ranks, 3)


def test_gradients_are_converted_and_accumulated_on() -> None:
    def ranks(rank: int) -> None:
        pair = twin(rank, 2)
        pair.tolerance = Tolerance(1e-4, 1e-5)
        pair.backward(square, 0)
        both(pair, lambda m: m.float())
        assert all(p.grad.dtype is torch.float32 for p in pair.model.parameters())
        assert all(is_sharded(p.grad) for p in pair.model.parameters())
        single = lambda m, x: square(m, x.float())  # noqa: E731
        pair.plain = [pair.plain[0], copy_sharing(pair.plain[0])]
        pair.backward(single, 1)
        pair.step()
        pair.train(single, 2)

    run_ranks(ranks, 2)


@pytest.mark.parametrize("shard", [by_block, nested])
def test_gradients_that_wait_are_converted(shard: Any) -> None:
    """Gradients that wait for the last microbatch are converted."""

    def ranks(rank: int) -> None:
        pair = twin(rank, 2, shard)
        pair.tolerance = Tolerance(1e-4, 1e-5)
        for unit in units(pair.model):
            unit.switches.sync = False
        pair.backward(square, 0)
        both(pair, lambda m: m.float())
        pair.plain = [pair.plain[0], copy_sharing(pair.plain[0])]
        for unit in units(pair.model):
            unit.switches.sync = True
        pair.backward(lambda m, x: square(m, x.float()), 1)
        pair.step()

    run_ranks(ranks, 2)


def test_gradients_waiting_for_replicas_convert() -> None:
    """Gradients that only the shards have summed are converted, and then summed over replicas."""

    def ranks(rank: int) -> None:
        mesh = mesh_of_replicas(2, 2)
        model = by_block(seeded(Tower), mesh=mesh, strategy=ShardingStrategy.HYBRID_SHARD)
        plain = seeded(Tower)
        set_requires_all_reduce(model, False)
        square(model, data(0, rank)).backward()
        sum(square(plain, data(0, r)) / 4 for r in range(4)).backward()
        for converted in (model, plain):
            converted.float()
        set_requires_all_reduce(model, True)
        reduce_grads(model)
        for p, q in zip(model.parameters(), plain.parameters(), strict=True):
            assert p.grad.dtype is torch.float32
            torch.testing.assert_close(whole(p.grad), q.grad, rtol=1e-4, atol=1e-5)

    simulate_ranks(ranks, 4)


def test_compute_dtype_follows_policy_or_storage() -> None:
    def policy(name: str, param: nn.Parameter) -> MixedPrecision | None:
        return MixedPrecision(param_dtype=torch.float32) if "norm" in name else None

    def ranks(rank: int) -> None:
        model = fully_shard(Block(), mp_policy=policy)
        model.double()
        with pytest.raises(RuntimeError):  # norm computes in float32, as asked
            model(data(0, rank))
        (unit,) = units(model)
        kinds = {b.entries[0].spec.fqn.split(".")[0]: b.full.dtype for b in unit.buckets}
        assert kinds == {"norm": torch.float32, "up": torch.float64}
        other = fully_shard(Block(), mp_policy=MixedPrecision(param_dtype=torch.bfloat16))
        other.double()
        other(data(0, rank)).sum().backward()
        (bucket,) = units(other)[0].buckets
        assert (bucket.full.dtype, bucket.dtypes.reduce) == (torch.bfloat16, torch.bfloat16)
        assert other.up.weight.grad.dtype is torch.float64

    run_ranks(ranks, 2)


@pytest.mark.parametrize("strategy", list(ShardingStrategy)[:4])
def test_under_every_strategy_also_while_gathered(strategy: ShardingStrategy) -> None:
    def ranks(rank: int) -> None:
        pair = twin(rank, 2, lambda m: by_block(m, strategy=strategy))
        pair.tolerance = Tolerance(1e-4, 1e-5)
        square(pair.model, data(0, rank))  # without a backward: units may stay gathered
        both(pair, lambda m: m.float())
        pair.plain = [pair.plain[0], copy_sharing(pair.plain[0])]
        pair.train(lambda m, x: square(m, x.float()))

    run_ranks(ranks, 2)


def test_tied_weights_across_units_stay_tied() -> None:
    def build() -> nn.Module:
        model = Tower(1)
        model.last = nn.Linear(6, 2)
        model.last.weight = model.head.weight
        forward = model.forward
        model.forward = lambda x: forward(x) + model.last(x)
        return model

    def shard(model: nn.Module) -> None:
        fully_shard(model.last)
        fully_shard(model)

    def ranks(rank: int) -> None:
        pair = Twin(rank, 2, build, shard, plain_sgd)
        pair.tolerance = Tolerance(1e-4, 1e-5)
        pair.train(steps=1)
        both(pair, lambda m: m.float())
        single = lambda m, x: square(m, x.float())  # noqa: E731
        for seed in range(3):
            xs = pair.inputs(seed)
            single(pair.model, xs[rank]).backward()
            torch.stack([single(pair.plain[0], x) for x in xs]).mean().backward()
            pair.step()
        pair.check()

    run_ranks(ranks, 2)


def test_reading_without_a_forward_sees_the_change() -> None:
    """Reading without a forward takes the change over too."""

    def ranks(rank: int) -> None:
        model = by_block(Tower(1))
        before = {n: whole(p) for n, p in model.named_parameters()}
        model.double()
        with torch.no_grad(), gathered(model):
            for name, param in model.named_parameters():
                assert torch.equal(param, before[name].double())
        model.half()
        undo(model)
        for name, param in model.named_parameters():
            assert torch.equal(param, before[name].double().half())

    run_ranks(ranks, 2)


def test_requires_grad_may_change_at_any_time() -> None:
    def ranks(rank: int) -> None:
        pair = twin(rank, 2)
        pair.train(steps=1)
        both(pair, lambda m: m.blocks.requires_grad_(False))
        pair.train(steps=1)
        both(pair, lambda m: m.requires_grad_(True))
        pair.train(steps=1)

    run_ranks(ranks, 2)


def test_swapping_weights_for_evaluation() -> None:
    """An average of the weights takes their place for a while, as slices of its own."""

    def ranks(rank: int) -> None:
        pair = twin(rank, 2)
        pair.train(steps=1)
        average = [p.detach() * 0.5 for p in pair.model.parameters()]
        plain = [p.detach() * 0.5 for p in pair.plain[0].parameters()]
        stored = []
        for model, values in ((pair.model, average), (pair.plain[0], plain)):
            stored.append([p.data for p in model.parameters()])
            for param, value in zip(model.parameters(), values):
                param.data = value
        with torch.no_grad():
            pair.losses(square, 5)
        pair.check()

    run_ranks(ranks, 2)


# Loading


@pytest.mark.parametrize("assign", [False, True])
@pytest.mark.parametrize("kind", [torch.float64, torch.float32])
def test_load_state_dict(assign: bool, kind: torch.dtype) -> None:
    def ranks(rank: int) -> None:
        pair = twin(rank, 2)
        pair.train(steps=1)
        other = {n: (t * 2).to(kind) for n, t in pair.plain[0].state_dict().items()}
        ids = [id(p) for p in pair.model.parameters()]
        pair.model.load_state_dict(other, assign=assign)
        pair.plain[0].load_state_dict(other)
        assert [id(p) for p in pair.model.parameters()] == ids
        pair.tolerance = Tolerance(1e-5, 1e-6)
        if pair.model.head.weight.dtype is torch.float64:
            pair.train(steps=2)
        else:
            assert assign and kind is torch.float32
            assert pair.model(data(0, rank).float()).dtype is torch.float32

    run_ranks(ranks, 2)


# What is refused


def one_parameter(model: nn.Module) -> None:
    model.blocks[0].up.weight.data = model.blocks[0].up.weight.data.half()


def one_submodule(model: nn.Module) -> None:
    model.blocks[0].up.half()


@pytest.mark.parametrize("change", [one_parameter, one_submodule])
def test_a_conversion_in_part_is_refused_by_name(change: Callable[[nn.Module], None]) -> None:
    def ranks(rank: int) -> None:
        model = by_block(Tower(2))
        change(model)
        with pytest.raises(RuntimeError) as caught:
            model(data(0, rank).float())
        text = str(caught.value)
        assert "unit 'blocks.0'" in text and "'blocks.0.up.weight' is torch.float16" in text
        assert "module.to(" in text and "undo" in text
        model.blocks[0].half()
        model.blocks[0].float()
        model(data(0, rank).float()).sum().backward()
        assert_at_rest(model)

    run_ranks(ranks, 2)


def test_a_whole_unit_may_have_a_dtype_of_its_own() -> None:
    def ranks(rank: int) -> None:
        model = by_block(Tower(2))
        model.blocks[1].double()
        model.blocks[1].register_forward_pre_hook(lambda m, args: (args[0].double(),))
        model.blocks[1].register_forward_hook(lambda m, args, out: out.float())
        model(data(0, rank).float()).sum().backward()
        assert model.blocks[1].up.weight.grad.dtype is torch.float64
        assert model.head.weight.grad.dtype is torch.float32

    run_ranks(ranks, 2)


def test_a_replaced_parameter_is_refused_and_not_lost() -> None:
    def ranks(rank: int) -> None:
        model = by_block(Tower(1))
        new = model.head.weight = nn.Parameter(torch.ones(2, 6))
        for call in (lambda: model(data(0, rank).float()), lambda: undo(model)):
            with pytest.raises(RuntimeError) as caught:
                call()
            assert "parameter 'head.weight' of unit 'Tower' was replaced" in str(caught.value)
            assert model.head.weight is new
        assert_at_rest_but_for(model)

    run_ranks(ranks, 2)


class Fail(torch.autograd.Function):
    """Identity whose backward raises."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        raise ValueError("in backward")


def test_a_parameter_replaced_after_a_failed_step() -> None:
    def ranks(rank: int) -> None:
        model = by_block(Tower(1))
        x = data(0, rank).float().requires_grad_()
        with pytest.raises(ValueError, match="in backward"):
            model(Fail.apply(x)).sum().backward()
        new = model.head.weight = nn.Parameter(torch.ones(2, 6))
        with pytest.raises(RuntimeError, match=r"'head.weight' .* was replaced"):
            model(x)
        assert model.head.weight is new

    run_ranks(ranks, 2)


def assert_at_rest_but_for(model: nn.Module) -> None:
    assert not any(unit.run.calls for unit in units(model))


@pytest.mark.parametrize("kind", [torch.float64, torch.float32])
def test_a_change_before_backward_is_refused(kind: torch.dtype) -> None:
    """Backward of the plain module uses the values that forward saw; here they are gone."""

    def ranks(rank: int) -> None:
        model = by_block(Tower(2))
        loss = square(model, data(0, rank).float())
        for param in model.parameters():
            param.data = (param.data * 2).to(kind)
        loss.backward()

    for text in rank_errors(ranks, 2):
        assert text is not None
        assert "between forward and backward" in text
        assert "unit 'Tower'" in text  # which was kept for its backward, the first


def test_another_models_backward_reads_no_moved_one() -> None:
    """A backward may gather ahead a unit of another model that moved, which refuses its own."""

    def ranks(rank: int) -> None:
        first, second = by_block(seeded(Tower)), by_block(seeded(Tower))
        one, two = square(first, data(0, rank)), square(second, data(0, rank))
        for param in first.parameters():
            param.data = param.data * 2
        two.backward()
        wanted = [p.grad.full_tensor() for p in second.parameters() if p.grad is not None]
        with pytest.raises(RuntimeError, match="between forward and backward"):
            one.backward()
        second.zero_grad()
        square(second, data(0, rank)).backward()
        found = [p.grad.full_tensor() for p in second.parameters() if p.grad is not None]
        assert len(found) == len(wanted) and all(map(torch.equal, found, wanted))

    run_ranks(ranks, 2)


def test_after_such_a_refusal_training_goes_on() -> None:
    def ranks(rank: int) -> None:
        pair = twin(rank, 2)
        loss = square(pair.model, data(0, rank))
        both(pair, lambda m: m.float())
        pair.plain = [pair.plain[0], copy_sharing(pair.plain[0])]
        square(pair.model, data(0, rank).float())
        with pytest.raises(RuntimeError, match="between forward and backward"):
            loss.backward()
        pair.zero_grad()
        pair.tolerance = Tolerance(1e-4, 1e-5)
        pair.train(lambda m, x: square(m, x.float()))

    run_ranks(ranks, 2)


def test_conversion_by_exchange_of_tensors_is_refused() -> None:
    """torch can be told to convert modules by exchanging tensors instead of setting their data."""

    def ranks(rank: int) -> None:
        model = by_block(Tower(1))
        before = {n: whole(p) for n, p in model.named_parameters()}
        torch.__future__.set_swap_module_params_on_conversion(True)
        with pytest.raises(RuntimeError, match="swap"):
            model.double()
        with pytest.raises(RuntimeError, match="swap"):
            torch.utils.swap_tensors(model.head.weight, nn.Parameter(torch.ones(2, 6)))
        model(data(0, rank).float())
        for name, param in model.named_parameters():
            assert torch.equal(whole(param), before[name])
        undo(model)
        model.double()

    run_ranks(ranks, 2)


def test_recomputation_and_copies_follow() -> None:
    def ranks(rank: int) -> None:
        model = by_block(Tower(2))
        plain = Tower(2).double()
        model.double()
        twin_model = copy.deepcopy(model)
        for name, param in plain.named_parameters():
            param.data.copy_(whole(model.get_parameter(name)))
        for current in (model, twin_model):
            x = data(0, rank).requires_grad_()
            checkpoint(current, x, use_reentrant=False).square().mean().backward()
            assert_at_rest(current)
        losses = [square(plain, data(0, r)) for r in range(2)]
        torch.stack(losses).mean().backward()
        for name, param in plain.named_parameters():
            for current in (model, twin_model):
                torch.testing.assert_close(whole(current.get_parameter(name).grad), param.grad)

    run_ranks(ranks, 2)


@pytest.mark.cuda
def test_moving_to_a_device_and_back() -> None:
    def ranks(rank: int) -> None:
        model = by_block(Tower(2))
        optim = torch.optim.SGD(model.parameters(), lr=0.1)
        plain = copy.deepcopy(undo(copy.deepcopy(model)))
        other = torch.optim.SGD(plain.parameters(), lr=0.1)
        for device in ("cpu", "cuda", "cpu"):
            for current, opt in ((model, optim), (plain, other)):
                current.to(device)
                square(current, data(0, 0).float().to(device)).backward()
                opt.step()
                opt.zero_grad()
            for name, param in plain.named_parameters():
                found = model.get_parameter(name)
                assert found.device.type == device
                torch.testing.assert_close(whole(found), param.detach(), rtol=1e-4, atol=1e-5)

    run_ranks(ranks, 1, init=False)
