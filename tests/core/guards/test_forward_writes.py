"""What a forward writes into a weight stays as in a plain module, or that forward raises (D16)."""

from __future__ import annotations

from operator import attrgetter
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from fsdp_compose import (
    MixedPrecision,
    Offload,
    ShardingStrategy,
    fully_shard,
    gathered,
    reshard,
    set_debug,
    unshard,
)
from fsdp_compose.core.guards import forward_writes

from harness import rank_errors, run_ranks, simulate_ranks, single_process
from models import assert_at_rest, units, whole

TEXT = "parameter {!r} of unit 'Writer' was written while it was gathered"


class Writer(nn.Module):
    """A layer that changes its weight in forward, in one way or another, while ``how`` says so."""

    def __init__(self, how: str = "") -> None:
        super().__init__()
        self.emb = nn.Embedding(3, 4)
        self.lin = nn.Linear(4, 3)
        self.how = how

    def forward(self, x: Tensor) -> Tensor:
        weight = self.lin.weight
        if self.how == "clamp_":
            with torch.no_grad():
                weight.clamp_(-0.1, 0.1)
        elif self.how == "copy_":
            with torch.no_grad():
                weight.copy_(weight * 0.5)
        elif self.how == "fill_":
            with torch.no_grad():
                weight.fill_(float(x.flatten()[0]))
        elif self.how == "data":
            weight.data.mul_(0.5)
        elif self.how == "assign":
            self.lin.weight.data = weight.data * 0.5
        elif self.how == "assign own":
            self.lin.weight.data = torch.full_like(weight, float(x.flatten()[0]))
        elif self.how == "replace":
            self.lin.weight = nn.Parameter(weight.detach() * 0.5)
        elif self.how == "delete":
            del self.lin.weight
            return self.emb(x)
        self.emb.max_norm = 0.5 if self.how == "max_norm" else None
        return self.lin(self.emb(x))


def build(how: str, **options: Any) -> Writer:
    torch.manual_seed(0)
    model = Writer(how).double()
    return model if not options else fully_shard(model, **options)  # type: ignore[return-value]


def tokens(rank: int) -> Tensor:
    return torch.tensor([rank, rank + 1])


def train(model: nn.Module, steps: int, rank: int = 0) -> None:
    optim = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(steps):
        model(tokens(rank)).square().sum().backward()
        optim.step()
        optim.zero_grad()


HOWS = ["clamp_", "copy_", "data", "assign", "replace", "max_norm"]
STRATEGIES: dict[str, dict[str, Any]] = {
    "released": {"reshard_after_forward": True},
    "kept": {"strategy": ShardingStrategy.SHARD_GRAD_OP},
    "bfloat16": {"mp_policy": MixedPrecision(torch.bfloat16)},
    "offload": {"offload_policy": Offload(params=True)},
}


@pytest.mark.parametrize("name", list(STRATEGIES))
def test_a_write_in_forward_raises(name: str) -> None:
    """Trained and frozen, with gradients and without; the error names it, the next step works."""

    def ranks(rank: int, how: str, frozen: bool, grad: bool) -> None:
        model = build(how, **STRATEGIES[name])
        before = {n: whole(p) for n, p in model.named_parameters()}
        model.requires_grad_(not frozen)
        fqn = "emb.weight" if how == "max_norm" else "lin.weight"
        for _ in range(2):
            with torch.set_grad_enabled(grad), pytest.raises(RuntimeError) as caught:
                model(tokens(rank))
            assert TEXT.format(fqn) in str(caught.value)
        model.how = ""
        with torch.set_grad_enabled(grad):
            model(tokens(rank))
        reshard(model)
        assert_at_rest(model)
        for key, param in model.named_parameters():
            assert torch.equal(whole(param), before[key]), key

    def all_hows(rank: int) -> None:
        for how in HOWS if name != "bfloat16" else HOWS[:4]:
            for frozen, grad in ((False, True), (True, True), (False, False)):
                ranks(rank, how, frozen, grad)

    run_ranks(all_hows, 2)


def test_ranks_that_hold_nothing_of_it_are_told() -> None:
    """What goes through .data is seen by the ranks that hold it; in the first step they tell."""

    def ranks(rank: int) -> None:
        model = fully_shard(nn.Sequential(nn.Linear(8, 8, bias=False), nn.Linear(2, 2, bias=False)))
        model[1].register_forward_pre_hook(write)
        model[1].forward = lambda x: x * 2  # type: ignore[method-assign]
        model(torch.ones(1, 8)).sum().backward()

    def write(module: nn.Module, args: Any) -> None:
        module.weight.data.mul_(2)  # type: ignore[operator, union-attr]

    texts = rank_errors(ranks, 2)
    assert all(text is not None and "'1.weight'" in text for text in texts)
    assert sum("rank 1 writes unit" in str(text) for text in texts) == 1


def test_a_write_on_one_rank_alone_raises() -> None:
    """No other rank is to be told where a forward computes in another dtype than is stored."""
    with single_process():
        model = build("clamp_", mp_policy=MixedPrecision(torch.bfloat16))
        for _ in range(2):
            with pytest.raises(RuntimeError, match=TEXT.format("lin.weight")):
                model(tokens(0))
        model.how = ""
        train(model, 1)
        assert_at_rest(model)


class Mixed(nn.Module):
    """Weights of two dtypes, of which a forward may clamp those of the second."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4).double()
        self.name = ""

    def forward(self, x: Tensor) -> Tensor:
        if self.name:
            with torch.no_grad():
                attrgetter(self.name)(self).mul_(0.5)
        return self.second(self.first(x).double())


@pytest.mark.parametrize("name", ["first.bias", "second.weight", "second.bias"])
def test_a_later_write_into_any_dtype_raises(name: str) -> None:
    """Each dtype has a buffer of its own: what a write changed there is found in all of them."""

    def ranks(rank: int) -> None:
        x = torch.ones(2, 4)
        model = fully_shard(Mixed())
        for _ in range(2):
            model(x).sum().backward()
        model.name = name
        with pytest.raises(RuntimeError, match=rf"'{name}' of unit 'Mixed' was written"):
            model(x)
        alone = fully_shard(Mixed(), mesh="self")
        before = whole(alone.get_parameter(name))
        for _ in range(2):
            alone(x).sum().backward()
        alone.name = name
        alone(x)
        assert torch.equal(whole(alone.get_parameter(name)), before * 0.5)

    simulate_ranks(ranks)


def test_values_are_compared_once_for_each_kind(monkeypatch: pytest.MonkeyPatch) -> None:
    """Training, evaluating, with gradients and without: later ones read no values of weights."""
    looks: list[nn.Module] = []
    find = forward_writes._find_unseen

    def count(unit: Any, shown: Any) -> Any:
        looks.append(unit)
        return find(unit, shown)

    monkeypatch.setattr(forward_writes, "_find_unseen", count)
    with single_process():
        model = build("", mp_policy=MixedPrecision(torch.bfloat16))
        for steps in (1, 3):
            train(model, steps)
            assert len(looks) == 1
        for _ in range(3):
            with torch.no_grad():
                model(tokens(0))
            assert len(looks) == 2
        for _ in range(3):
            with torch.no_grad():
                model.eval()(tokens(0))
            assert len(looks) == 3


@pytest.mark.parametrize("strategy", ["FULL_SHARD", "ZERO1", "NO_SHARD"])
def test_parameters_replaced_in_later_forwards_raise(strategy: str) -> None:
    """Also one that is replaced from some step on, as a codebook by its average; others go on."""

    def ranks(rank: int) -> None:
        model = build("", strategy=ShardingStrategy[strategy])
        train(model, 2, rank)
        for model.how in ("replace", "delete"):
            for is_training in (True, False):
                with (
                    torch.set_grad_enabled(is_training),
                    pytest.raises(RuntimeError, match=TEXT.format("lin.weight")),
                ):
                    model.train(is_training)(tokens(rank))
        model.how = ""
        plain = build("")
        model.load_state_dict(plain.state_dict())
        train(model, 2)
        train(plain, 2)
        for name, param in plain.named_parameters():
            torch.testing.assert_close(whole(model.get_parameter(name)), param.detach())

    simulate_ranks(ranks)


def test_training_goes_on_after_such_an_error() -> None:
    def ranks(rank: int) -> None:
        model, plain = build("clamp_", strategy=ShardingStrategy.FULL_SHARD), build("")
        with pytest.raises(RuntimeError, match="written while it was gathered"):
            model(tokens(0))
        model.how = ""
        train(model, 3)
        train(plain, 3)
        for name, param in plain.named_parameters():
            torch.testing.assert_close(whole(model.get_parameter(name)), param.detach())

    run_ranks(ranks, 2)


@pytest.mark.parametrize("world", [1, 2])
def test_writes_stay_where_the_buffer_is_the_shard(world: int) -> None:
    """In a world of one, and with NO_SHARD where every rank writes the same."""

    def ranks(rank: int) -> None:
        for how in ("clamp_", "copy_", "data", "assign", "max_norm"):
            model, plain = build(how, strategy=ShardingStrategy.NO_SHARD), build(how)
            train(model, 3)
            train(plain, 3)
            with torch.no_grad():
                assert torch.equal(model(tokens(0)), plain(tokens(0)))
                assert torch.equal(model(tokens(0)), plain(tokens(0)))
            for name, param in plain.named_parameters():
                assert torch.equal(whole(model.get_parameter(name)), param), (how, name)

    run_ranks(ranks, world)


@pytest.mark.parametrize("how", ["fill_", "max_norm", "assign own"])
def test_replicas_that_write_different_values_raise(how: str) -> None:
    def ranks(rank: int) -> None:
        model = build(how, strategy=ShardingStrategy.NO_SHARD)
        train(model, 1, rank)

    for text in rank_errors(ranks, 2):
        assert text is not None and "write different weights" in text
        assert f"parameter '{'emb' if how == 'max_norm' else 'lin'}.weight'" in text


def test_debug_mode_looks_at_every_forward() -> None:
    """No counter shows what goes through .data: after the first step nobody looks unless told."""

    def ranks(rank: int) -> None:
        model = build("", strategy=ShardingStrategy.FULL_SHARD)
        train(model, 2)
        set_debug(True)
        try:
            train(model, 1)
            model.how = "data"
            with pytest.raises(RuntimeError, match=r"'lin\.weight'"):
                train(model, 1)
        finally:
            set_debug(False)

    run_ranks(ranks, 2)


def test_a_write_in_a_later_step_raises() -> None:
    def ranks(rank: int) -> None:
        model = build("", strategy=ShardingStrategy.FULL_SHARD)
        train(model, 3)
        model.how = "clamp_"
        with pytest.raises(RuntimeError, match=r"'lin\.weight' .* was written"):
            train(model, 1)
        with torch.inference_mode(), pytest.raises(RuntimeError, match=r"'lin\.weight' .* written"):
            model(tokens(rank))

    run_ranks(ranks, 2)


def test_a_write_in_a_pre_hook_or_a_tied_unit_raises() -> None:
    def ranks(rank: int) -> None:
        model = fully_shard(nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3)))

        def write(module: nn.Module, args: Any) -> None:
            with torch.no_grad():
                module.weight.mul_(0.5)  # type: ignore[operator]

        model[0].register_forward_pre_hook(write)
        with pytest.raises(RuntimeError, match=r"'0\.weight' of unit 'Sequential' was written"):
            model(torch.ones(1, 3))
        tied = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
        tied[1].weight = tied[0].weight
        fully_shard(tied[1])
        fully_shard(tied)
        tied[0].register_forward_pre_hook(write)
        with pytest.raises(RuntimeError, match=r"weight' of unit '1?(Sequential)?' was written"):
            tied(torch.ones(1, 3))

    run_ranks(ranks, 2)


def test_a_write_in_other_kinds_of_forward() -> None:
    """Recomputed, functional, in a scope, unsharded, evaluated in stored precision."""

    def ranks(rank: int) -> None:
        lost = pytest.raises(RuntimeError, match=r"'lin\.weight' .* was written")
        model = build("clamp_", strategy=ShardingStrategy.FULL_SHARD)
        with lost:
            checkpoint(model, tokens(rank), use_reentrant=False).sum().backward()
        mine = {"emb.weight": torch.zeros(3, 4).double()}
        with lost:
            torch.func.functional_call(model, mine, (tokens(rank),))
        mine["lin.weight"] = torch.ones(3, 4).double()
        torch.func.functional_call(model, mine, (tokens(rank),))
        assert mine["lin.weight"].max() == 0.1  # the caller's own, as in a plain module
        unshard(model)
        with lost:
            model(tokens(rank))
        with pytest.raises(RuntimeError, match="written between unshard and reshard"):
            reshard(model)
        with torch.no_grad(), gathered(model, writeback=True):
            model(tokens(rank))
        assert whole(model.lin.weight).abs().max() == 0.1
        model.how = "copy_"
        before = whole(model.lin.weight)
        low = build("copy_", mp_policy=MixedPrecision(torch.bfloat16))
        with torch.no_grad(), gathered(low, writeback=True), lost:
            low(tokens(rank))
        stored = build("copy_", mp_policy=MixedPrecision(full_precision_in_eval=True)).eval()
        with lost:
            stored(tokens(rank))
        model.how = ""
        model(tokens(rank)).sum().backward()
        assert torch.equal(whole(model.lin.weight), before)

    run_ranks(ranks, 2)


def test_an_error_of_the_forward_itself_comes_first() -> None:
    def ranks(rank: int) -> None:
        model = build("clamp_", strategy=ShardingStrategy.FULL_SHARD)
        with pytest.raises(IndexError):
            model(torch.tensor([99]))
        model.how = ""
        with pytest.raises(RuntimeError, match="written"):
            model(tokens(rank))  # found here, as the values of the failed forward are gone
        model(tokens(rank))

    run_ranks(ranks, 2)


@pytest.mark.parametrize("mode", ["gathered", "stored"])
def test_a_write_raises_where_an_error_is_handled(mode: str) -> None:
    """A forward in an ``except`` block, as of a step that is tried again, has raised nothing."""

    def ranks(rank: int) -> None:
        mp = MixedPrecision(full_precision_in_eval=mode == "stored")
        model = build("clamp_", strategy=ShardingStrategy.FULL_SHARD, mp_policy=mp)
        model.train(mode == "gathered")
        try:
            raise MemoryError
        except MemoryError:
            with pytest.raises(RuntimeError, match=r"'lin\.weight' .* was written"):
                model(tokens(rank))

    run_ranks(ranks, 2)


def test_a_forward_where_an_error_is_handled_ends() -> None:
    """One rank evaluates in an ``except`` block: that is an evaluation as the other rank's is."""

    def ranks(rank: int) -> None:
        model = fully_shard(nn.Sequential(fully_shard(nn.Linear(4, 4)), nn.Linear(4, 4)))
        x = torch.ones(2, 4)
        for _ in range(2):
            model(x).sum().backward()
        with torch.no_grad():
            try:
                raise MemoryError
            except MemoryError:
                seen = [model(x) for _ in range(3)] if rank else []
            seen += [] if rank else [model(x) for _ in range(3)]
        model(x).sum().backward()
        assert len(seen) == 3

    run_ranks(ranks, 2)


def test_assigned_weights_follow_the_shard_again() -> None:
    """After ``weight.data = x`` in an evaluation, another evaluation reads what a step wrote."""

    def ranks(rank: int) -> None:
        model = build("", strategy=ShardingStrategy.NO_SHARD)
        plain = build("")
        for one in (model, plain):
            one.how = "assign"
            with torch.no_grad():
                one(tokens(0))
            one.how = ""
            train(one, 1)
        with torch.no_grad():
            assert torch.equal(model(tokens(0)), plain(tokens(0)))

    simulate_ranks(ranks)


def test_a_lost_write_releases_what_was_kept() -> None:
    """A unit kept for an earlier forward's backward is released, which raises as in plain torch."""

    def ranks(rank: int) -> None:
        model = build("", strategy=ShardingStrategy.SHARD_GRAD_OP)
        earlier = model(tokens(0)).square().sum()
        assert gathered_nbytes(model)
        model.how = "clamp_"
        with pytest.raises(RuntimeError, match="written while it was gathered"):
            model(tokens(0))
        assert not gathered_nbytes(model)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            earlier.backward()
        model.how = ""
        train(model, 1)
        assert_at_rest(model)

    simulate_ranks(ranks)


def gathered_nbytes(model: nn.Module) -> int:
    """Bytes of gathered weights that the model holds now."""
    return sum(b.full.untyped_storage().nbytes() for u in units(model) for b in u.gathered)


class KeepingInner(nn.Module):
    """Keeps a view of its weight in an attribute."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(6, 6))
        self.kept: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        self.kept = self.weight[0]
        return x @ self.weight


class ReadingOuter(nn.Module):
    """Reads in its forward what the inner module kept, while ``reads`` says so."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.last = KeepingInner(), nn.Linear(6, 6)
        self.reads = False

    def forward(self, x: Tensor) -> Tensor:
        x = self.last(self.inner(x))
        return x + self.inner.kept if self.reads else x


@pytest.mark.parametrize("step", [0, 1, 3])
def test_a_view_in_an_attribute_is_guarded_at_once(step: int) -> None:
    """The module around it may not read it after the inner unit's release, in any step."""

    def ranks(rank: int) -> None:
        model = ReadingOuter()
        fully_shard(model.inner, reshard_after_forward=True)
        fully_shard(model)
        for _ in range(step):
            model(torch.ones(1, 6)).sum().backward()
        model.reads = True
        with pytest.raises(RuntimeError, match=r"view of parameter 'inner.weight' of unit 'inner'"):
            model(torch.ones(1, 6))

    run_ranks(ranks, 2)


def test_a_view_in_a_list_is_guarded_after_inference() -> None:
    """Reading it after the first evaluation raises, as it does after a step of training."""
    bag: list[Tensor] = []

    def ranks(rank: int) -> None:
        model = fully_shard(nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 6)))
        model[0].register_forward_hook(lambda module, args, out: bag.append(module.weight[0]))
        with torch.no_grad():
            model(torch.ones(1, 6))
        with pytest.raises(RuntimeError, match=r"view of parameter '0\.weight'"):
            bag.pop().sum()

    run_ranks(ranks, 2)


class Marked(Tensor):
    """A plain tensor of another class."""


def test_a_first_evaluation_is_looked_into() -> None:
    """Also where as many tensors read the weights as in other forwards, without being guarded."""

    def ranks(rank: int) -> None:
        bag: list[Tensor] = []

        def keep(module: nn.Module, args: Any, out: Tensor) -> None:
            view = module.weight[0]  # type: ignore[index]
            bag[:] = [view.as_subclass(Marked) if module.training else view]

        model = fully_shard(nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 6)))
        model[0].register_forward_hook(keep)
        with torch.no_grad():
            model(torch.ones(1, 6))
            model.eval()
            model(torch.ones(1, 6))
        with pytest.raises(RuntimeError, match=r"view of parameter '0\.weight'"):
            bag.pop().sum()

    run_ranks(ranks, 2)
