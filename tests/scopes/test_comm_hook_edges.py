"""Communication hooks where gradients are not finite, or a unit is empty or sharded anew."""

from __future__ import annotations

import copy
import gc
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import fsdp_compose as fc
from fsdp_compose.base.group import SELF
from fsdp_compose.comm.grad_bucket import GradBucket, run_hook
from fsdp_compose.scopes.comm_hooks import forget_rounding, restore, snapshot

from harness import fake_world, rank_errors, run_ranks, simulate_ranks
from models import Tower, by_block, data, mesh_of_replicas, seeded, square, units

F32 = torch.float32


class Scaled(nn.Module):
    """Multiplies by a number that a parameter of any size gives."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(size))

    def forward(self, x: Tensor) -> Tensor:
        return x * (1 + self.scale.sum())


def coded(model: nn.Module, state: fc.Int8ErrorFeedback | None = None, **options: object) -> None:
    """Shards the model, whose gradients travel as int8."""
    fc.fully_shard(model, init="broadcast", **options)
    state = state or fc.Int8ErrorFeedback(block=8)
    fc.register_comm_hook(model, state, fc.int8_error_feedback_hook)


def close_to_plain(model: nn.Module, plain: nn.Module, seed: int) -> None:
    """The next gradients of the model are the plain ones, but for rounding."""
    xs = [data(seed, rank, 3, 6, dtype=F32) for rank in range(2)]
    model(xs[torch.distributed.get_rank()]).square().mean().backward()
    torch.stack([plain(x).square().mean() for x in xs]).mean().backward()
    for p, q in zip(model.parameters(), plain.parameters()):
        gap = (p.grad.full_tensor() - q.grad).abs().max()
        assert gap < 0.05 * q.grad.abs().max()
        q.grad = None


@pytest.mark.parametrize("how", ["scaler", "skippable"])
def test_int8_goes_on_after_an_overflow(how: str) -> None:
    """A step whose gradients are not finite is skipped, and leaves nothing in later ones."""

    def check(rank: int) -> None:
        torch.manual_seed(0)
        model, plain = nn.Linear(6, 4), nn.Linear(6, 4)
        coded(model)
        plain.load_state_dict(fc.state_dict(model))
        optim = torch.optim.SGD(model.parameters(), lr=0.1)
        bad = torch.full((3, 6), float("inf") if rank else 1.0)
        if how == "scaler":
            scaler = fc.GradScaler("cpu", init_scale=4.0)
            scaler.scale(model(bad).square().mean()).backward()
            scaler.step(optim)
            scaler.update()
            assert scaler.get_scale() == 2.0
        else:
            with fc.skippable_step(model, finite_gradients=True) as step:
                model(bad).square().mean().backward()
            assert step.skipped
        for seed in range(2):
            optim.zero_grad()
            close_to_plain(model, plain, seed)

    simulate_ranks(check, 2)


@pytest.mark.parametrize("size", [0, 1])
def test_int8_with_fewer_elements_than_ranks(size: int) -> None:
    """A unit of no or one element is reduced like others."""

    def check(rank: int) -> None:
        model = nn.Sequential(Scaled(size), nn.Linear(2, 1, bias=False))
        coded(model, units=fc.wrap.by_class(Scaled))
        model(torch.ones(2, 2)).sum().backward()
        wanted = torch.full((1, 2), 2.0 * (1 + size))
        torch.testing.assert_close(model[1].weight.grad.full_tensor(), wanted, rtol=0.02, atol=0)

    simulate_ranks(check, 3)


def test_int8_errors_are_kept_in_float32() -> None:
    """Also of gradients in bfloat16, in which what rounding takes would be rounded away."""
    half, model = torch.bfloat16, nn.Linear(2, 2)
    state = fc.Int8ErrorFeedback()
    coded(model, state, mp_policy=fc.MixedPrecision(half, half))
    model(torch.randn(3, 2)).sum().backward()
    assert [error.dtype for error in state.errors.values()] == [torch.float32]


def test_states_are_restored_for_the_same_layout() -> None:
    """Where a bucket is cut elsewhere, what is remembered is of other elements."""
    with fake_world(2):
        models = [nn.Linear(5, 3) for _ in range(3)]
        for model, granularity in zip(models, (1, 1, "tensor"), strict=True):
            coded(model, granularity=lambda *_, g=granularity: g)
        first, same, other = models
        saved = snapshot(first)
        assert saved is not None and restore(same, saved) and not restore(other, saved)


def test_int8_state_after_sharding_anew() -> None:
    """What rounding took from other buckets is not added to those of the same name."""

    def check(rank: int) -> None:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(6, 5), nn.Linear(5, 3))
        state = fc.Int8ErrorFeedback(block=8)
        coded(model, state)
        model(data(0, rank, 3, 6, dtype=F32)).square().mean().backward()
        fc.undo(model)
        coded(model, state, units=fc.wrap.by_name("1"))
        model.zero_grad()
        plain = nn.Sequential(nn.Linear(6, 5), nn.Linear(5, 3))
        plain.load_state_dict(fc.state_dict(model))
        close_to_plain(model, plain, seed=1)

    simulate_ranks(check, 2)


def test_int8_state_after_refresh() -> None:
    """What rounding took from parameters that were replaced is not added to those of a new head."""

    def check(rank: int) -> None:
        torch.manual_seed(0)
        model, state = nn.Linear(6, 5), fc.Int8ErrorFeedback(block=8)
        coded(model, state)
        model(data(0, rank, 3, 6, dtype=F32)).square().mean().backward()
        assert state.errors
        model.weight, model.bias = map(nn.Parameter, (torch.ones(5, 6), torch.ones(5)))
        fc.refresh(model)
        assert not state.errors

    simulate_ranks(check, 2)


WRONG: list[Callable[[Tensor], object]] = [Tensor.int, lambda part: part + 0j, lambda part: None]


@pytest.mark.parametrize("make", WRONG)
@pytest.mark.parametrize("size", [0, 4])
def test_a_hook_that_returns_no_real_numbers(make: Callable[[Tensor], object], size: int) -> None:
    """Integers, complex numbers and None are refused by name, for empty units too."""

    def hook(state: None, grads: GradBucket) -> object:
        return make(fc.default_hook(state, grads))

    def train(rank: int) -> None:
        model = fc.fully_shard(Scaled(size))
        fc.register_comm_hook(model, None, hook)
        model(torch.ones(2, requires_grad=True)).sum().backward()

    for error in rank_errors(train, 2):
        assert error is not None
        assert "communication hook of unit 'Scaled' returned" in error
        assert "in a floating-point dtype" in error


@pytest.mark.parametrize("strategy", ["HYBRID_SHARD", "HYBRID_SHARD_OPTIMIZER"])
@pytest.mark.parametrize("syncs", [True, False])
def test_a_hook_takes_over_what_waits_for_replicas(strategy: str, syncs: bool) -> None:
    """Gradients of backwards before it was registered, which only a shard group has summed."""

    def ranks(rank: int) -> None:
        torch.manual_seed(0)
        plain, model = (nn.Linear(6, 4, dtype=torch.float64) for _ in range(2))
        model.load_state_dict(plain.state_dict())
        mesh = mesh_of_replicas(2, 2)
        fc.fully_shard(model, mesh=mesh, strategy=fc.ShardingStrategy[strategy])
        fc.set_requires_all_reduce(model, False)
        for seed in range(3):
            if seed == 1:
                fc.register_comm_hook(model, None, fc.default_hook)
                fc.set_requires_all_reduce(model, syncs)
            model(data(seed, rank, 3, 6)).square().mean().backward()
            for other in range(4):
                (plain(data(seed, other, 3, 6)).square().mean() / 4).backward()
        for p, q in zip(model.parameters(), plain.parameters()):
            torch.testing.assert_close(p.grad.full_tensor(), q.grad)

    simulate_ranks(ranks, 4)


def test_units_of_one_name_need_states_of_their_own(tmp_path: Path) -> None:
    """One state remembers by name; each layer's own is saved by where the layer is."""

    def ranks(rank: int) -> None:
        torch.manual_seed(0)
        model = nn.Sequential(*(nn.Linear(6, 6) for _ in range(3)))
        for layer in model:
            fc.fully_shard(layer)
        state = fc.Int8ErrorFeedback(block=8)
        with pytest.raises(ValueError, match="3 units are called 'Linear', and one Int8Error"):
            fc.register_comm_hook(model, state, fc.int8_error_feedback_hook)
        fc.register_comm_hook(model[0], state, fc.int8_error_feedback_hook)
        with pytest.raises(ValueError, match="2 units are called 'Linear', and one Int8Error"):
            fc.register_comm_hook(model[1], state, fc.int8_error_feedback_hook)
        states = [fc.Int8ErrorFeedback(block=8) for _ in model]
        for layer, own in zip(model, states):
            fc.register_comm_hook(layer, own, fc.int8_error_feedback_hook)
        model(data(0, rank, 3, 6, dtype=F32)).square().mean().backward()
        saved = [dict(own.errors) for own in states]
        twin = copy.deepcopy(model)
        fc.save_checkpoint(tmp_path, model)
        for net in (model, twin):
            net(data(1, rank, 3, 6, dtype=F32)).square().mean().backward()
        fc.load_checkpoint(tmp_path, model)
        for own, errors in zip(states, saved):
            assert own.errors.keys() == errors.keys() == {"Linear/0"}
            assert torch.equal(own.errors["Linear/0"], errors["Linear/0"])

    run_ranks(ranks, 2)


def test_a_copy_remembers_by_itself() -> None:
    """What rounding has cost so far, and from then on its own; a layer's state stays one."""

    def ranks(rank: int) -> None:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 6))
        state = fc.Int8ErrorFeedback(block=8)
        for layer in model:
            fc.fully_shard(layer)
        coded(model, state)
        model(data(0, rank, 3, 6, dtype=F32)).square().mean().backward()
        before = dict(state.errors)
        twin = copy.deepcopy(model)
        twin(1000 * data(1, rank, 3, 6, dtype=F32)).square().mean().backward()
        assert state.errors == before and len(before) == 2
        own = {id(unit.switches.comm_state) for unit in units(twin) if unit.buckets}
        assert len(own) == 1 and own != {id(state)}

    simulate_ranks(ranks, 2)


def test_a_skipped_step_costs_no_rounding() -> None:
    def ranks(rank: int) -> None:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(6, 6))
        state = fc.Int8ErrorFeedback(block=8)
        coded(model, state)
        model(data(0, rank, 3, 6, dtype=F32)).square().mean().backward()
        before = dict(state.errors)
        with fc.skippable_step(model) as step:
            (1000 * model(data(1, rank, 3, 6, dtype=F32)).square().mean()).backward()
            step.discard("an outlier")
        assert step.skipped and state.errors.keys() == before.keys() != set()
        assert all(torch.equal(before[key], error) for key, error in state.errors.items())

    simulate_ranks(ranks, 2)


def test_a_model_that_is_gone_has_no_part_in_a_state() -> None:
    """Also where garbage is collected late, which may be on one rank alone."""

    def ranks(rank: int) -> None:
        state = fc.Int8ErrorFeedback(block=8)
        gc.disable()
        try:
            for _ in range(2):
                model = nn.Linear(6, 6)
                model.itself = [model]
                coded(model, state)
                del model
        finally:
            gc.enable()

    simulate_ranks(ranks, 2)


def test_a_hook_may_return_any_layout() -> None:
    """What it returns is read in the order of its elements, wherever they lie."""
    flat = torch.arange(6.0)
    given = GradBucket("unit", "unit", flat, [flat], SELF, SELF, 1.0, flat.dtype)
    turned = flat.view(2, 3).t().contiguous().t()
    assert run_hook(lambda state, grads: turned, None, given, False).tolist() == flat.tolist()


def test_rounding_is_forgotten_of_one_unit_alone() -> None:
    """A unit whose name begins with another's keeps what its own rounding has cost."""
    model = fc.fully_shard(nn.Linear(2, 2))
    (unit,) = units(model)
    state = fc.Int8ErrorFeedback()
    fc.register_comm_hook(model, state, fc.int8_error_feedback_hook)
    state.errors |= {f"{unit.name}{end}/0": torch.ones(1) for end in ("", "0")}
    forget_rounding(unit)
    assert list(state.errors) == [f"{unit.name}0/0"]


def test_another_rank_of_the_layout_is_not_restored() -> None:
    """What one rank's hooks remember is of its own slices: another rank takes none of it."""

    def ranks(rank: int) -> None:
        model = nn.Linear(4, 4)
        coded(model)
        model(torch.ones(1, 4)).sum().backward()
        saved: list[object] = [None, None]
        torch.distributed.all_gather_object(saved, snapshot(model))
        assert [restore(model, each) for each in saved] == [rank == 0, rank == 1]

    simulate_ranks(ranks, 2)


class Fragile:
    """As a hook of the library, and raises in one of its calls on rank 1."""

    def __init__(self, hook: Callable[..., Tensor]) -> None:
        self.hook, self.calls, self.fails_at = hook, 0, -1

    def __call__(self, state: object, grads: GradBucket) -> Tensor:
        self.calls += 1
        if self.calls == self.fails_at and torch.distributed.get_rank() == 1:
            raise ValueError("on rank 1")
        return self.hook(state, grads)


HOOKS = (fc.default_hook, fc.bf16_compress_hook, fc.int8_error_feedback_hook)


@pytest.mark.parametrize("replicas", [1, 2])
@pytest.mark.parametrize("hook", HOOKS)
def test_all_skip_where_a_hook_raises(hook: Callable[..., Tensor], replicas: int) -> None:
    """Others wait for that rank in the reduction of their own hook, and hear of it there."""

    def ranks(rank: int) -> None:
        options = {"mesh": mesh_of_replicas(2, 2)} if replicas == 2 else {}
        model, fragile = by_block(seeded(Tower), **options), Fragile(hook)
        state = fc.Int8ErrorFeedback(block=8)
        fc.register_comm_hook(model, None, lambda _, grads: fragile(state, grads))
        for fails_at in (0, 2, 0, 3, 0):
            fragile.calls, fragile.fails_at = 0, fails_at
            with fc.skippable_step(model) as step:
                square(model, data(0, rank)).backward()
            assert step.reasons == ({1: "ValueError: on rank 1"} if fails_at else {})

    simulate_ranks(ranks, 2 * replicas)


@pytest.mark.parametrize("replicas", [1, 2])
def test_a_hook_raises_and_its_rank_goes_on(replicas: int) -> None:
    """The others raise at once; when all have cleared their gradients, a step is exact."""

    def ranks(rank: int) -> None:
        options = {"mesh": mesh_of_replicas(2, 2)} if replicas == 2 else {}
        model, fragile = by_block(seeded(Tower), **options), Fragile(fc.default_hook)
        fc.register_comm_hook(model, None, fragile)
        found = []
        for fails_at in (0, 2, 0):
            fragile.calls, fragile.fails_at = 0, fails_at
            texts: list[str] = []
            while not texts or texts[-1]:
                try:
                    square(model, data(0, rank)).backward()
                    texts.append("")
                except (ValueError, RuntimeError) as error:
                    texts.append(str(error))
                    model.zero_grad()
            assert len(texts) == (1 if not fails_at else 3 if rank == 1 else 2)
            assert all("on rank 1" in t or "run different units" in t for t in texts[:-1])
            found.append([param.grad.to_local().clone() for param in model.parameters()])
            model.zero_grad()
        assert all(torch.equal(a, b) and torch.equal(a, c) for a, b, c in zip(*found, strict=True))

    simulate_ranks(ranks, 2 * replicas)
