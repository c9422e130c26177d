"""Surgery on a sharded model: what was added, replaced and moved is noticed, and taken over."""

from __future__ import annotations

import copy
import timeit
import weakref
from collections.abc import Callable
from itertools import product
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fsdp_compose as fc
from fsdp_compose import fully_shard, gathered, state_dict, undo, unshard, wrap
from fsdp_compose.attach.refresh import refresh
from fsdp_compose.core.guards.added_parameters import check_additions
from fsdp_compose.sharded import is_sharded, spec_of

from harness import rank_errors, run_ranks, simulate_ranks, single_process
from models import (
    WIDTH,
    Block,
    Tolerance,
    Tower,
    Twin,
    adamw,
    assert_at_rest,
    by_block,
    compare,
    data,
    fqns,
    mesh_of_replicas,
    nested,
    one_unit,
    replicas,
    seeded,
    square,
    trainable,
    units,
    whole,
)


class LoRA(nn.Module):
    """A frozen linear layer and a trained update of rank 2."""

    def __init__(self, base: nn.Linear, seed: int) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(seed)
        self.base = base
        self.a = nn.Parameter(torch.randn(2, base.in_features, generator=generator).double())
        self.b = nn.Parameter(torch.randn(base.out_features, 2, generator=generator).double())

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + F.linear(F.linear(x, self.a), self.b)


def adapt(model: nn.Module, seed: int = 7) -> nn.Module:
    model.requires_grad_(False)
    for i, block in enumerate(model.blocks):
        block.up = LoRA(block.up, seed + i)
    return model


Surgery = Callable[[nn.Module], Any]


def follow(model: nn.Module, plain: nn.Module, rank: int, world: int, optims: Any) -> None:
    """Three steps beside a plain model that had the same surgery."""
    copies = replicas(plain, world)
    for step in range(3):
        square(model, data(step, rank)).backward()
        assert_at_rest(model)
        torch.stack([square(m, data(step, r)) for r, m in enumerate(copies)]).mean().backward()
        for optim in optims:
            optim.step()
            optim.zero_grad()
    theirs = dict(plain.named_parameters())
    assert list(theirs) == [n for n, _ in model.named_parameters()]
    for name, param in model.named_parameters():
        assert is_sharded(param), name
        compare(name, whole(param), theirs[name].detach(), Tolerance())


def lora(rank: int, world: int, shard: Any) -> None:
    """Training, then adapters, then training of the adapters alone."""
    model, plain = shard(seeded(Tower)), seeded(Tower)
    optims = [adamw(model.parameters()), adamw(plain.parameters())]
    follow(model, plain, rank, world, optims)
    before = {id(p) for p in model.parameters()}
    for m in (model, plain):
        adapt(m)
    with pytest.raises(RuntimeError, match=r"refresh\(model\)") as caught:
        model(data(0, rank))
    assert "up.a" in str(caught.value) and "up.b" in str(caught.value)
    model.zero_grad()
    refresh(model)
    assert before < {id(p) for p in model.parameters()}  # the same objects, and the new
    assert fqns(model) == [n for n, _ in model.named_parameters()]
    optims = [adamw(trainable(model)), adamw(trainable(plain))]
    follow(model, plain, rank, world, optims)
    full = state_dict(model, kind="full")
    assert list(full) == list(plain.state_dict())
    copied = copy.deepcopy(model)
    undo(model)
    for name, param in model.named_parameters():
        compare(name, param.detach(), plain.get_parameter(name).detach(), Tolerance())
    follow(copied, plain, rank, world, [adamw(trainable(copied)), adamw(trainable(plain))])


@pytest.mark.parametrize(
    ("world", "shard"), [*product([1, 2], [by_block, nested, one_unit]), (4, by_block)]
)
def test_adapters_added_after_sharding(world: int, shard: Any) -> None:
    if world == 1:
        with single_process():
            lora(0, 1, shard)
    else:
        run_ranks(lora, world, world, shard)


def replace_weight(model: nn.Module) -> None:
    model.blocks[1].down.weight = nn.Parameter(torch.full((WIDTH, 7), 0.3).double())


def swap_module(model: nn.Module) -> None:
    model.blocks[0].up = seeded(lambda: nn.Linear(WIDTH, 7), 5)


def swap_unit(model: nn.Module) -> None:
    model.blocks[1] = seeded(Block, 5)


def add_bias(model: nn.Module) -> None:
    model.blocks[0].down.bias = nn.Parameter(torch.ones(WIDTH).double())


def add_child(model: nn.Module) -> None:
    model.head.extra = seeded(lambda: nn.Linear(2, 2), 3)
    model.head.register_forward_hook(lambda m, a, out: m.extra(out))


def drop_all(model: nn.Module) -> None:
    model.blocks[2].norm = nn.Identity()


def exchange(model: nn.Module) -> None:
    """Two units exchange a module each."""
    first, second = model.blocks[0], model.blocks[1]
    first.up, second.up = second.up, first.up


SURGERY: list[Surgery] = [
    replace_weight, swap_module, swap_unit, add_bias, add_child, drop_all, exchange
]  # fmt: skip


def surgery(rank: int, world: int, operate: Surgery) -> None:
    """The optimizer state of what survives stays valid."""
    for shard in (by_block, one_unit):
        model, plain = shard(seeded(Tower)), seeded(Tower)
        ours, theirs = adamw(model.parameters()), adamw(plain.parameters())
        follow(model, plain, rank, world, [ours, theirs])
        old = dict(model.named_parameters())
        for m in (model, plain):
            operate(m)
        refresh(model)
        assert fqns(model) == [n for n, _ in model.named_parameters()]
        kept = {id(p) for p in model.parameters()}
        for name, param in old.items():
            if id(param) not in kept and shard is one_unit:
                assert type(param) is nn.Parameter, name  # plain and whole again
                assert param.untyped_storage().nbytes() == param.numel() * 8
        both = []
        for m, optim in ((model, ours), (plain, theirs)):
            state = {p: optim.state[p] for p in m.parameters() if p in optim.state}
            fresh = adamw(m.parameters())
            fresh.state.update(state)
            both.append(fresh)
        follow(model, plain, rank, world, both)
        refresh(model)  # nothing to do
        follow(model, plain, rank, world, both)
        assert list(state_dict(model, kind="full")) == list(plain.state_dict())
        copied = copy.deepcopy(model)
        undo(model)
        assert not any(is_sharded(p) for p in model.parameters())
        follow(copied, plain, rank, world, [adamw(copied.parameters()), adamw(plain.parameters())])


@pytest.mark.parametrize("operate", SURGERY, ids=lambda f: f.__name__)
def test_surgery(operate: Surgery) -> None:
    run_ranks(surgery, 2, 2, operate)


def unnoticed(operate: Surgery) -> str:
    with single_process():
        model = by_block(seeded(Tower))
        model(data(0, 0))
        operate(model)
        with pytest.raises(RuntimeError, match=r"fsdp_compose.refresh\(model\)") as caught:
            model(data(0, 0))
        refresh(model)
        square(model, data(0, 0)).backward()
        return str(caught.value)


def add_next_to_another(model: nn.Module) -> None:
    """As many parameters as before."""
    block = model.blocks[0]
    block.spare = nn.Parameter(torch.ones(1).double())
    refresh(model)
    model(data(0, 0))
    del block.spare
    block.up.spare = nn.Parameter(torch.ones(1).double())


def unfreeze(model: nn.Module) -> None:
    model.head.scale = nn.Parameter(torch.ones(1).double(), requires_grad=False)
    model(data(0, 0))
    model.head.scale.requires_grad_()


@pytest.mark.parametrize(
    ("operate", "name"),
    [
        (replace_weight, "down.weight"),
        (swap_module, "up.weight"),
        (swap_unit, "blocks.1.norm.weight"),
        (add_bias, "'blocks.0.down.bias'"),
        (add_child, "'head.extra.weight'"),
        (add_next_to_another, "spare"),
        (unfreeze, "'head.scale'"),
        (lambda m: undo(m.blocks[0]), "'blocks.0.norm.weight'"),
    ],
)
def test_the_next_forward_names_what_would_be_left_out(operate: Surgery, name: str) -> None:
    assert name in unnoticed(operate)


def test_what_was_ignored_is_left_alone() -> None:
    with single_process():
        model = seeded(Tower)
        model.free = nn.Parameter(torch.ones(1).double())
        fully_shard(model, units=wrap.by_class({Block}), ignored=[model.free, model.head])
        for m in (model, copy.deepcopy(model)):
            square(m, data(0, 0)).backward()
            m.head.extra = nn.Linear(2, 2)
            square(m, data(0, 0)).backward()
            refresh(m)
            assert not is_sharded(m.free) and not is_sharded(m.head.weight)
            square(m, data(0, 0)).backward()


def different(rank: int) -> None:
    model = by_block(seeded(Tower))
    adapt(model, seed=rank)
    refresh(model)


def missing(rank: int) -> None:
    model = by_block(seeded(Tower))
    if rank:
        add_bias(model)
    refresh(model)


def broadcasts(rank: int) -> list[Tensor]:
    model = by_block(seeded(Tower))
    adapt(model, seed=rank)
    refresh(model, init="broadcast")
    return [whole(p) for p in model.parameters()]


def test_what_has_the_id_of_an_ignored_buffer_is_cast() -> None:
    """Buffers that were ignored are gone after ``module.to(...)``, and others get their ids."""
    with single_process():
        model = nn.Sequential(nn.BatchNorm1d(2), nn.BatchNorm1d(2))
        low = fc.MixedPrecision(buffer_dtype=torch.bfloat16)
        fully_shard(model, mp_policy=low, ignored=[model[1]])
        late = nn.BatchNorm1d(2)
        left_alone = units(model)[0].checks.left_alone
        left_alone[id(late.running_mean)] = left_alone.pop(id(model[1].running_mean))
        model[1].double()
        refresh(model.append(late))
        assert late.running_mean.dtype == torch.bfloat16


def test_ranks_agree() -> None:
    for error in rank_errors(different, 2):
        assert "up.a" in str(error) and "differs between rank 0 and rank 1" in str(error)
    for error in rank_errors(missing, 2):
        assert "down.bias" in str(error)
    for ours, theirs in zip(*run_ranks(broadcasts, 2)):
        assert torch.equal(ours, theirs)


def test_when_refresh_is_refused() -> None:
    with single_process():
        with pytest.raises(ValueError, match="refresh: Linear is not a unit and contains none"):
            refresh(nn.Linear(2, 2))
        model = by_block(seeded(Tower))
        with pytest.raises(ValueError, match="init is 'never'"):
            refresh(model, init="never")  # type: ignore[arg-type]
        model.extra = nn.Linear(2, 2, device="meta")
        with pytest.raises(TypeError, match="refresh: param_init_fn is 3; wanted a function of"):
            refresh(model, param_init_fn=3)  # type: ignore[arg-type]
        assert model.extra.weight.is_meta
        del model.extra
        with gathered(model), pytest.raises(RuntimeError, match="scope that shows"):
            refresh(model)
        unshard(model)
        with pytest.raises(RuntimeError, match="scope that shows"):
            refresh(model)


@pytest.mark.parametrize("keep", ["unsharded", "no_all_reduce"])
def test_refused_while_gradients_wait(keep: Any) -> None:
    """Those of a parameter that is given back would be lost, or it would be given back in part."""

    def check(rank: int) -> None:
        model = by_block(seeded(Tower), mesh=mesh_of_replicas(2, 2))
        with fc.accumulate(model, keep=keep):
            square(model, data(0, rank)).backward()
            bias, model.head.bias = model.head.bias, None
            with pytest.raises(RuntimeError, match="and is not in "):
                refresh(model)
            model.head.bias = bias
        fc.reduce_grads(model)
        assert bias.grad is not None
        model.head.bias = None
        refresh(model)
        assert type(bias) is nn.Parameter and bias.grad is not None

    simulate_ranks(check, 4)


def test_names_after_a_parameter_has_moved() -> None:
    """It is named as where it is now, and what comes to its former unit as in that one."""
    with single_process():
        first, second = model = seeded(lambda: nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)))
        fully_shard(model, units=wrap.by_class(nn.Linear))
        second.moved = first.weight
        first.weight = nn.Parameter(torch.ones(4, 4).double())
        refresh(model)
        first.late = nn.Parameter(torch.ones(2).double())
        refresh(model)
        for name, param in model.named_parameters():
            assert spec_of(param).fqn == name


@pytest.mark.parametrize("how", ["inserted", "wrapped"])
def test_a_gradient_is_renamed_with_its_parameter(how: str) -> None:
    """Also where one rank alone had read it: ranks compare the names of what they reduce."""

    def check(rank: int) -> None:
        (block,) = model = seeded(lambda: nn.Sequential(nn.Linear(4, 4)))
        unit = fully_shard(block if how == "wrapped" else model)
        unit(data(0, rank, 3, 4)).sum().backward()
        seen = block.weight.grad if rank == 1 else None
        model.insert(0, nn.ReLU())
        refresh(model) if how == "inserted" else fully_shard(model)
        assert block.weight.grad.norm() > 0 and seen is (block.weight.grad if rank else None)
        assert spec_of(block.weight.grad).fqn == "1.weight"

    simulate_ranks(check, 2)


def test_the_check_costs_little() -> None:
    """Under 3 µs a unit; measured against a generous multiple, since machines are busy."""
    with single_process():
        model = one_unit(seeded(lambda: nn.Sequential(*(nn.Linear(4, 4) for _ in range(12)))))
        (unit,) = units(model)
        model(torch.ones(4).double())
        times = timeit.repeat(lambda: check_additions(unit), number=1000, repeat=5)
        assert min(times) / 1000 < 15e-6


def test_a_flat_optimizer_outlives_a_replaced_head() -> None:
    """It goes on training the parameters that are still there; what was taken out is padding."""

    def check(rank: int) -> None:
        twin = Twin(rank, 2, Tower)
        twin.optim = adamw(fc.flat_parameters(twin.model))
        twin.plain_optim = adamw(twin.reference.parameters())
        twin.backward(square, 0)
        twin.step()
        for model in (twin.model, twin.reference):
            model.head = seeded(lambda: nn.Linear(WIDTH, 2), 5)
        twin.plain = twin.replicate(twin.reference)
        refresh(twin.model)
        for seed in (1, 2):
            twin.backward(square, seed)
            twin.step()
        twin.check()
        saved = fc.optim_state_dict(twin.model, twin.optim, kind="full")
        assert set(saved["state"]) == {name for name in fqns(twin.model) if "head" not in name}
        parts = fc.flat_parameters(twin.model)  # the new head's bucket too
        assert len(parts) == len(twin.optim.param_groups[0]["params"]) + 1

    simulate_ranks(check, 2)


@pytest.mark.parametrize("stepped", [False, True])
def test_a_plain_parameter_over_one_taken_out(stepped: bool) -> None:
    """It is over nothing: its step would train what was given back, on the ranks that had it."""

    def check(rank: int) -> None:
        model = one_unit(seeded(Tower))
        optim = adamw(fc.local_parameters(model))
        for _ in range(1 + stepped):
            square(model, data(0, rank)).backward()
            if stepped:
                optim.step()
        bias, model.head.bias = model.head.bias, None
        refresh(model)
        before = bias.detach().clone()
        with pytest.raises(RuntimeError, match="refresh took them out"):
            optim.step()
        assert torch.equal(bias, before)
        optim = adamw(fc.local_parameters(model))
        square(model, data(1, rank)).backward()
        optim.step()
        assert_at_rest(model)

    simulate_ranks(check, 2)


def test_what_was_taken_out_is_the_callers_alone() -> None:
    """Norms and clipping over flat parameters leave it out, and nothing of it is kept alive."""

    def check(rank: int) -> None:
        model = one_unit(seeded(Tower))
        fc.flat_parameters(model)
        square(model, data(0, rank)).backward()
        head, model.head = model.head, nn.Linear(WIDTH, 2).double()
        refresh(model, init="as_is")
        flat, before = fc.flat_parameters(model), head.weight.grad.clone()
        assert torch.equal(fc.grad_norm(flat), fc.grad_norm(model))
        fc.clip_grad_norm_(flat, 1e-3)
        assert torch.equal(head.weight.grad, before)
        gone = weakref.ref(head.weight)
        del head
        assert gone() is None

    simulate_ranks(check, 2)


@pytest.mark.parametrize("held", [False, True])
def test_one_of_several_modules_is_replaced(held: bool) -> None:
    """The unit lets go of it, once nobody holds it, and a copy of the model trains."""

    def build() -> nn.Module:
        return nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(3))).double()

    def shard(model: nn.Module) -> nn.Module:
        fully_shard([model[1], model[2]])
        return fully_shard(model)

    def check(rank: int) -> None:
        twin = Twin(rank, 2, build, shard)
        twin.train(steps=1)
        old, weight = twin.model[2], twin.model[2].weight
        twin.model[2], plain = (seeded(lambda: nn.Linear(WIDTH, 2).double()) for _ in range(2))
        for replica in twin.plain:
            replica[2] = plain
        if not held:
            del old
        refresh(twin.model)
        assert is_sharded(weight) is held
        old = None
        twin.model = copy.deepcopy(twin.model)
        twin.optim, twin.plain_optim = (adamw(m.parameters()) for m in (twin.model, twin.reference))
        twin.train()

    run_ranks(check, 2)


class Named(nn.Module):
    """A dense layer and this rank's expert, by its number."""

    def __init__(self, number: int) -> None:
        super().__init__()
        self.experts = nn.ModuleDict({str(number): nn.Linear(4, 4)})
        self.head = nn.Sequential(nn.Linear(4, 4))

    def forward(self, x: Tensor) -> Tensor:
        for expert in self.experts.values():
            x = expert(x)
        return self.head(x)


def test_units_are_compared_over_their_own_ranks() -> None:
    """Experts by number are on one rank each; a new layer beside them is on all."""

    def ranks(rank: int) -> None:
        torch.manual_seed(0)
        model: Any = Named(rank)
        fully_shard(model.experts[str(rank)], mesh="self")
        fc.set_gradient_divide_factor(model.experts[str(rank)], 2.0)
        fully_shard(model)
        torch.manual_seed(1)
        model.head.append(nn.Linear(4, 4))
        refresh(model)
        assert model.head[1].weight.full_tensor().shape == (4, 4)
        model(torch.ones(2, 4)).sum().backward()
        model.head.append(nn.Linear(4, 4 + rank))
        with pytest.raises(ValueError, match="rank 1 shards other units or parameters"):
            refresh(model)

    run_ranks(ranks, 2)


def test_an_initialiser_fails_for_one_ranks_expert() -> None:
    """All ranks raise, and nobody runs what the failed call added."""

    def ranks(rank: int) -> None:
        def fails(module: nn.Module) -> None:
            module.reset_parameters()
            if rank == 1 and module is added:
                raise OSError("no such file")

        torch.manual_seed(0)
        model: Any = Named(rank)
        expert = model.experts[str(rank)]
        fully_shard(expert, mesh="self")
        fc.set_gradient_divide_factor(expert, 2.0)
        fully_shard(model)
        added = expert.added = nn.Linear(4, 4, device="meta")
        model.head.append(nn.Linear(4, 4, device="meta"))
        with pytest.raises((OSError, RuntimeError), match="no such file"):
            refresh(model, param_init_fn=fails)
        with pytest.raises(RuntimeError, match="came from the meta device"):
            model(torch.ones(2, 4))

    run_ranks(ranks, 2)


def test_what_refresh_refuses_names_refresh() -> None:
    """Not ``fully_shard``, also on ranks that hear of it; sparse gradients are refused here too."""

    def ranks(rank: int) -> None:
        model = one_unit(seeded(Tower))
        outer: Any = model
        added: list[tuple[nn.Parameter | nn.Module, str]] = [
            (nn.Parameter(torch.full((2,), float(rank))), "^refresh: parameter 'more' .* differs"),
            (nn.Parameter(torch.ones(2 + rank)), "^refresh: rank 1 shards other"),
            (nn.Embedding(3, 2, sparse=True), r"^refresh: .*sparse=True.*undo\("),
        ]
        for one, text in added:
            outer.more = one
            with pytest.raises(ValueError, match=text) as caught:
                refresh(model)
            assert ("that refresh lacks" in str(caught.value)) == ("sparse" in text)
            del outer.more
        outer.more = nn.Embedding(3, 2, sparse=rank == 1)
        with pytest.raises(ValueError, match=r"^refresh: .*sparse=True.*undo\("):
            refresh(model)
        del outer.more
        square(refresh(model), data(0, rank)).backward()

    simulate_ranks(ranks)


def test_refresh_says_what_to_end() -> None:
    """The call that reduces what waits, or that ends ``unshard``."""
    model = one_unit(seeded(Tower))
    with fc.no_sync(model):
        square(model, data(0, 0)).backward()
    with pytest.raises(RuntimeError, match=r"refresh: .*call fsdp_compose.reduce_grads\(module\)"):
        refresh(model)
    fc.reduce_grads(model)
    unshard(refresh(model))
    with pytest.raises(RuntimeError, match="call reshard where unshard was called"):
        refresh(model)
    fc.reshard(model)
    square(refresh(model), data(0, 0)).backward()


def test_state_of_what_refresh_took_out() -> None:
    """It leaves the optimizer's groups, and then its state, as the errors say."""
    model = one_unit(seeded(Tower))
    optim, old = adamw(model.parameters()), model.head.weight
    square(model, data(0, 0)).backward()
    optim.step()
    model.head.weight = nn.Parameter(torch.ones_like(old.full_tensor()))
    refresh(model)
    with pytest.raises(ValueError, match=r"out of the module \(refresh\) goes out of its"):
        fc.optim_state_dict(model, optim)
    for group in optim.param_groups:
        group["params"] = [p for p in group["params"] if p is not old]
    with pytest.raises(ValueError, match=r"delete its state too: state.pop\(p\)"):
        fc.optim_state_dict(model, optim)
    optim.state.pop(old)
    fc.optim_state_dict(model, optim)
