"""A refusal says what to call instead, by who called: optimizers, methods, savers, hooks."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge, register_multi_grad_hook
from torch.distributed._tools.mem_tracker import MemTracker
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import fsdp_compose as fc
from fsdp_compose.sharded import ShardedWeightError

from harness import run_ranks
from models import WIDTH, Tower, by_block, data, seeded, square
from optimizers import PerParameter


class Whitening(PerParameter):
    """An optimizer that needs matrices."""

    def update(self, p: Tensor, grad: Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        p.sub_(self.direction(grad), alpha=group["lr"])

    def direction(self, grad: Tensor) -> Tensor:
        return grad @ grad.T @ grad if grad.ndim == 2 else grad


class Covering(Whitening):
    """One that makes whole tensors of its own, as SM3 does."""

    def direction(self, grad: Tensor) -> Tensor:
        return torch.ones(grad.shape).addcmul_(grad, grad)


class Addressing(Whitening):
    """One that knows parameters by their addresses, as heavyball's do."""

    def direction(self, grad: Tensor) -> Tensor:
        self.state.setdefault(grad.data_ptr(), {})
        return grad


class Scorer(nn.Module):
    """A submodule with a method of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH)

    def score(self, x: Tensor) -> Tensor:
        return self.inner(x).sum()

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x)


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scorer = Scorer()
        self.head = nn.Linear(WIDTH, WIDTH)

    def weigh(self, x: Tensor) -> Tensor:
        return nn.functional.linear(x, self.head.weight)

    @torch.no_grad()
    def encode(self, x: Tensor) -> Tensor:
        return next(self.head(x) for _ in range(1))

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.scorer(x))


class Reader(Model):
    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.linear(x, self.head.weight)


def refusal(call: Callable[[], Any], kind: type[Exception] = ShardedWeightError) -> str:
    with pytest.raises(kind) as caught:
        call()
    return str(caught.value)


def says(text: str, *parts: str) -> None:
    for part in parts:
        assert part in text, text


def test_in_an_optimizer_owner_step_is_named() -> None:
    """With what it costs, and which optimizers are wrong without an error on plain slices."""

    def ranks(rank: int) -> None:
        model = by_block(seeded(Tower))
        square(model, data(0, rank)).backward()
        text = refusal(Whitening(model.parameters()).step)
        says(text, "Whitening", "fsdp_compose.owner_step(params, lambda groups: Whitening(groups")
        says(text, "local_parameters(model)", "wrong without an", "Prodigy", "LAMB", "sends")
        says(text, "owner_step is wrong without an error", "Ranger21", "is for model.parameters()")
        matrices = [p for p in model.parameters() if p.ndim == 2]
        says(refusal(torch.optim.Muon(matrices).step), "owner_step", "Muon(groups")
        for made in (Covering, Addressing):
            says(refusal(made(model.parameters()).step), "owner_step(params, lambda groups:")
        for kind in (Whitening, Covering):
            fc.owner_step(model.parameters(), kind).step()
        assert "Prodigy" in (fc.local_parameters.__doc__ or "")

    run_ranks(ranks, 2)


def test_sums_over_everything_are_not_sent_away() -> None:
    """``owner_step`` refuses such optimizers, so it is not what they are told to use."""

    def ranks(rank: int) -> None:
        class ProdigyLike(Whitening):
            def direction(self, grad: Tensor) -> Tensor:
                return torch.dot(grad.flatten()[::2], grad.flatten()[::2])

        class DAdaptAdam(ProdigyLike):
            pass

        model = by_block(seeded(Tower))
        square(model, data(0, rank)).backward()
        for kind in (ProdigyLike, DAdaptAdam):
            text = refusal(kind(model.parameters()).step)
            says(text, "`module.parameters()`", "torch.dot(", "slice_p=1", "owner_step refuses it")
            assert "lambda groups" not in text

        def closure() -> None:
            model.head(data(0, rank))  # its own mistake, not the optimizer's

        text = refusal(lambda: torch.optim.SGD(model.parameters()).step(closure))
        says(text, "fsdp_compose.gathered(module)")
        assert "owner_step" not in text

    run_ranks(ranks, 2)


def test_in_a_method_that_method_is_named() -> None:
    """For ``methods=`` of its unit; one of a submodule asks for a unit of its own."""

    def ranks(rank: int) -> None:
        x = data(0, rank)
        model = fc.fully_shard(seeded(Model))
        says(refusal(lambda: model.encode(x)), "Model.encode", "methods=('forward', 'encode')")
        text = refusal(lambda: model.scorer.score(x))
        says(text, "Scorer.score", "unit of its own", "methods=('forward', 'score')")
        text = refusal(lambda: nn.Sequential(nn.Identity(), model.scorer)(x))
        says(text, "Sequential was called by itself", "fsdp_compose.gathered(module)")
        assert "methods=" not in text
        text = refusal(lambda: model.forward(x))  # it runs no hooks
        says(text, "Model.forward was called by itself", "`module(...)`")
        assert "methods=" not in text
        model = seeded(Model)
        fc.fully_shard(model.scorer, methods=("forward", "score"))
        fc.fully_shard(model, methods=("forward", "encode"))
        assert model.scorer.score(x).ndim == 0 and model.encode(x).shape == x.shape

    run_ranks(ranks, 2)


def test_a_method_of_a_unit_around() -> None:
    """``methods=`` of a unit gathers that unit alone: it is not told to name the method again."""

    def ranks(rank: int) -> None:
        x, model = data(0, rank), seeded(Model)
        fc.fully_shard(model.head)
        fc.fully_shard(model, methods=("forward", "weigh"))
        text = refusal(lambda: model.weigh(x))
        says(text, "Model.weigh runs outside of that unit", "fsdp_compose.gathered(part)")
        assert "methods=" not in text
        with fc.gathered(model.head):
            assert model.weigh(x).shape == x.shape
        around = Reader()
        around.head = model.head
        assert "called by itself" not in refusal(lambda: around(x))

    run_ranks(ranks, 2)


def test_a_part_that_a_model_calls_itself() -> None:
    """The part is named, and not the model around it, as diffusers' DiT calls one of a block."""

    class Reusing(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.block = nn.Sequential(nn.Sequential(nn.Linear(WIDTH, WIDTH)), nn.Tanh())

        def forward(self, x: Tensor) -> Tensor:
            return self.block(x) + self.block[0](x)

    def ranks(rank: int) -> None:
        x, model = data(0, rank), seeded(Reusing)
        fc.fully_shard(model.block)
        text = refusal(lambda: model(x))
        says(text, "Sequential was called by itself", "a unit of its own (units=)")
        assert "methods=" not in text

    run_ranks(ranks, 2)


def test_a_call_of_its_own_runs_no_hooks() -> None:
    """As in gpytorch, and where a class has ``__call__`` in place of ``forward``."""

    class Direct(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(WIDTH, WIDTH)

        def __call__(self, x: Tensor) -> Tensor:
            return self.forward(x) if x.ndim == 2 else self.inner(x)

        def forward(self, x: Tensor) -> Tensor:
            return x @ self.inner.weight

    class Passing(Direct):
        def __call__(self, x: Tensor) -> Tensor:
            return nn.Module.__call__(self, x)

    def ranks(rank: int) -> None:
        x, model = data(0, rank), fc.fully_shard(seeded(Direct))
        for given in (x, x[0]):
            text = refusal(lambda given=given: model(given))
            says(text, "Direct has a `__call__` of its own", "fsdp_compose.gathered(module)")
            assert "methods=" not in text and "module(...)" not in text
        with fc.gathered(model):
            assert model(x).shape == x.shape
        assert fc.fully_shard(seeded(Passing))(x).shape == x.shape

    run_ranks(ranks, 2)


def test_a_generator_is_not_told_methods() -> None:
    """``methods=`` refuses it: its body runs after the unit was released."""

    class Steps(Model):
        def generate(self, x: Tensor, whole: bool) -> Iterator[Tensor]:
            with fc.gathered(self) if whole else contextlib.nullcontext():
                yield self.weigh(x) if whole else nn.functional.linear(x, self.head.weight)

    def ranks(rank: int) -> None:
        x, model = data(0, rank), fc.fully_shard(seeded(Steps))
        text = refusal(lambda: list(model.generate(x, False)))
        says(text, "A generator or coroutine", "fsdp_compose.gathered(module)")
        assert "('forward'" not in text
        assert len(list(model.generate(x, True))) == 1

    run_ranks(ranks, 2)


def test_a_hook_on_a_unit_is_told_prepend() -> None:
    """One that was registered after sharding runs when the unit is released, as LoRA's may."""

    def read(module: nn.Module, args: Any, output: Any = None) -> None:
        assert nn.functional.linear(args[0], module.weight).shape == args[0].shape

    def ranks(rank: int) -> None:
        x, model = data(0, rank), seeded(Model)
        fc.fully_shard(model.head)
        fc.fully_shard(model)
        for register, wrong in (
            (model.head.register_forward_hook, False),
            (model.head.register_forward_pre_hook, True),
        ):
            handle = register(read, prepend=wrong)
            says(refusal(lambda: model(x)), "register_forward_hook(fn, prepend=True)")
            handle.remove()
            register(read, prepend=not wrong)
            square(model, x).backward()

    run_ranks(ranks, 2)


def test_a_weight_in_a_list_is_not_sent_to_methods() -> None:
    """As packages keep them: the unit is gathered, and the list still holds what is sharded."""

    class Listed(nn.Module):
        def __init__(self, inside: bool) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(WIDTH))
            self.kept, self.inside = [self.weight], inside

        def scale(self, x: Tensor) -> Tensor:
            return x * self.kept[0]

        def forward(self, x: Tensor) -> Tensor:
            return x * self.kept[0] if self.inside else self.scale(x)

    def ranks(rank: int) -> None:
        x = data(0, rank)
        for inside in (True, False):
            model = fc.fully_shard(nn.Sequential(Listed(inside)))
            text = refusal(lambda model=model: model(x))
            says(text, "a list, a dictionary", "fsdp_compose.gathered(module)")
            assert "methods=" not in text
            with fc.gathered(model):
                loss = model(x).sum()
            loss.backward()
            assert model[0].weight.grad is not None

    fc.simulate(lambda: ranks(dist.get_rank()), 2)


def test_initialisers_and_copies_say_what_they_need() -> None:
    """``writeback=True`` for nn.init; an EMA is built after sharding."""

    def ranks(rank: int) -> None:
        plain, optim_state = seeded(Tower), seeded(Tower)
        early = AveragedModel(plain, multi_avg_fn=get_ema_multi_avg_fn(0.5))
        slow = AveragedModel(plain)
        model = by_block(plain)
        weight = next(p for p in model.parameters() if p.ndim == 2)
        for init in (nn.init.orthogonal_, nn.init.eye_, partial(nn.init.sparse_, sparsity=0.5)):
            says(refusal(partial(init, weight)), "writeback=True")
        with torch.no_grad():
            for call in (
                lambda: early.update_parameters(model),
                lambda: (slow.update_parameters(model), slow.update_parameters(model)),
                lambda: torch._foreach_lerp_(
                    list(optim_state.parameters()), list(model.parameters()), 0.5
                ),
                lambda: next(optim_state.parameters()).mul_(0.5).add_(next(model.parameters())),
            ):
                says(refusal(call), "EMA", "after", "AveragedModel(model)", "load_optim_state_dict")
        late = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.5))
        wanted = {n: p.full_tensor() for n, p in model.named_parameters()}
        late.update_parameters(model)
        with torch.no_grad():
            for p in model.parameters():
                p.mul_(3)
        late.update_parameters(model)
        for name, p in late.module.named_parameters():
            torch.testing.assert_close(p.full_tensor(), 2 * wanted[name])

    run_ranks(ranks, 2)


def test_a_gradient_hook_is_told_what_works() -> None:
    """``grad.reshape(-1)`` for a histogram, as wandb's; reductions work as they are."""

    def ranks(rank: int) -> None:
        model = by_block(seeded(Tower))
        weight = next(p for p in model.parameters() if p.ndim == 2)
        norms: list[Tensor] = []
        weight.register_hook(lambda grad: norms.append(grad.norm()))
        handle = weight.register_hook(lambda grad: grad.data.reshape(-1).histc(4) and None)
        text = refusal(lambda: square(model, data(0, rank)).backward(), RuntimeError)
        says(text, "gradient hook", "grad.to_local()", "grad.full_tensor()", "grad.norm()")
        handle.remove()
        model.zero_grad()
        norms.clear()
        square(model, data(0, rank)).backward()
        assert weight.grad is not None
        torch.testing.assert_close(norms, [weight.grad.full_tensor().norm()])

    run_ranks(ranks, 2)


def test_nodes_of_the_graph_have_hooks_to_use_instead() -> None:
    def ranks(rank: int) -> None:
        model = by_block(seeded(Tower))
        params = list(model.parameters())
        text = refusal(lambda: get_gradient_edge(params[0]))
        says(
            text, "backward(inputs=)", "the parameter itself", "register_post_accumulate_grad_hook"
        )
        for idiom in (params[0].view_as, params[0].expand_as):
            text = refusal(lambda: idiom(params[0]).grad_fn)
            says(text, "register_post_accumulate_grad_hook")
        text = refusal(lambda: register_multi_grad_hook(params, print))
        says(text, "register_post_reduce_hook", "mode='any'")
        seen: list[Tensor] = []
        handle = register_multi_grad_hook(params, seen.append, mode="any")
        for count in (1, 2):
            square(model, data(0, rank)).backward()
            assert len(seen) == count
        handle.remove()

    run_ranks(ranks, 2)


def test_a_column_of_optimizer_state_is_told_its_way() -> None:
    """A scope does not gather state, as where dead neurons of an autoencoder start again."""

    def train(model: nn.Module, rank: int | None) -> Tensor:
        optim = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        weight = model.get_parameter("head.weight")
        for step in range(3):
            square(model, data(step, 0)).backward()
            optim.step()
            optim.zero_grad()
            momentum = optim.state[weight]["momentum_buffer"]
            if rank is None:
                momentum[:, 1] = 0
            else:
                text = refusal(lambda: momentum.__setitem__((slice(None), 1), 0))
                says(text, "what an optimizer keeps stays cut", "p.copy_(whole)")
                whole = momentum.full_tensor()
                whole[:, 1] = 0
                momentum.copy_(whole)
        return weight.detach()

    def ranks(rank: int) -> None:
        found = train(by_block(seeded(Tower)), rank)
        torch.testing.assert_close(found.full_tensor(), train(seeded(Tower), None))

    run_ranks(ranks, 2)


def test_memory_trackers_are_told_what_counts_instead() -> None:
    model = by_block(seeded(Tower))
    with pytest.raises(ShardedWeightError, match=r"read the memory.*plan\(model, sample="):
        MemTracker().track_external(model)


def test_opacus_is_refused_in_one_line() -> None:
    def ranks(rank: int) -> None:
        class GradSampleModule(nn.Module):
            __module__ = "opacus.grad_sample"

            def __init__(self, module: nn.Module) -> None:
                super().__init__()
                self._module = module

        GradSampleModule(seeded(Tower))
        text = refusal(lambda: GradSampleModule(by_block(seeded(Tower))), RuntimeError)
        says(text, "GradSampleModule was given", "opacus clips each sample's gradient")
        assert "\n" not in text

    run_ranks(ranks, 2)
