"""A unit whose backward reads no weight is not gathered for it."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

import fsdp_compose as fc
from fsdp_compose import ShardingStrategy, fully_shard, set_unshard_in_backward, wrap
from fsdp_compose.base.process import here
from fsdp_compose.core.guards.unread_weights import reads_weights
from fsdp_compose.report import Plan, plan

from harness import fake_world, run_ranks, simulate_ranks
from models import Block, seeded

WIDTH = 12


class Words(nn.Module):
    """A model of token numbers: embedding, blocks and head, each a unit of its own."""

    def __init__(self, tied: bool = False) -> None:
        super().__init__()
        self.words = nn.Embedding(10, WIDTH)
        self.blocks = nn.ModuleList(Block(WIDTH, WIDTH) for _ in range(2))
        self.head = nn.Linear(WIDTH, 10, bias=False)
        if tied:
            self.head.weight = self.words.weight

    def forward(self, x: Tensor) -> Tensor:
        x = self.words(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


UNITS = wrap.by_class({Block}) | wrap.by_name("words", "head")


def tokens(rank: int = 0, step: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(10 * step + rank)
    return torch.randint(0, 10, (3, 4), generator=generator)


def loss_of(model: nn.Module, x: Tensor) -> Tensor:
    return model(x).log_softmax(-1)[..., 0].neg().mean()


def train(rank: int, world: int, tied: bool = False, **options: Any) -> tuple[list[int], Tensor]:
    """Gathers in each step, and the first weights after three steps of SGD."""
    model = seeded(lambda: Words(tied))
    fully_shard(model, units=UNITS, **options)
    optim = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9)
    counts = []
    for step in range(3):
        here.traffic.reset()
        loss_of(model, tokens(rank, step)).backward()
        counts.append(here.traffic.gathers)
        optim.step()
        optim.zero_grad()
    return counts, model.words.weight.full_tensor()


def train_plain(world: int, tied: bool = False) -> Tensor:
    model = seeded(lambda: Words(tied))
    optim = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9)
    for step in range(3):
        torch.stack([loss_of(model, tokens(rank, step)) for rank in range(world)]).mean().backward()
        optim.step()
        optim.zero_grad()
    return model.words.weight.detach()


GATHERED = {"FULL_SHARD": [7, 7, 7], "SHARD_GRAD_OP": [4, 4, 4], "ZERO1": [4, 4, 4]}


@pytest.mark.parametrize("strategy", GATHERED)
def test_an_embedding_is_gathered_once(strategy: str) -> None:
    """In its forward: backward needs the token numbers alone. The others are gathered twice."""
    counts, weight = run_ranks(train, 2, 2, strategy=ShardingStrategy[strategy])[0]
    assert counts == GATHERED[strategy]
    torch.testing.assert_close(weight, train_plain(2))


def test_a_tied_embedding_is_gathered_with_the_head() -> None:
    """Its bucket is the embedding's: gathered for both forwards and for the head's backward."""
    counts, weight = run_ranks(train, 2, 2, True)[0]
    assert counts == [7, 7, 7]
    torch.testing.assert_close(weight, train_plain(2, True))


def plan_gathers(found: Plan) -> tuple[int, int]:
    """Gathers of forward and of backward."""
    return sum(u.forward.gathers for u in found.units), sum(u.backward.gathers for u in found.units)


def test_the_plan_knows_it() -> None:
    with fake_world(4):
        found = plan(Words(), world_size=4, units=UNITS)
        model = fully_shard(Words(), units=UNITS)
        assert plan_gathers(found) == plan_gathers(plan(model)) == (4, 3)
        set_unshard_in_backward(model.words, True)
        assert plan_gathers(plan(model)) == (4, 4)
        kept = plan(Words(), world_size=4, units=UNITS, reshard_after_forward=False)
        assert kept.memory.forward.gathered == sum(unit.full_bytes for unit in kept.units)
        for _ in range(2):
            here.traffic.reset()
            loss_of(model, tokens()).backward()
            assert here.traffic.gathers == 8
        set_unshard_in_backward(model.words, None)
        here.traffic.reset()
        loss_of(model, tokens()).backward()
        assert here.traffic.gathers == 7


class First(nn.Module):
    """A linear layer on the data, and one behind it."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.first(x).tanh())


def build_first() -> nn.Module:
    model = fully_shard(seeded(First), units=wrap.by_class({nn.Linear}))
    set_unshard_in_backward(model.first, False)
    return model


def count_gathers(model: nn.Module, x: Tensor) -> tuple[int, int]:
    """Gathers of a forward, and of its backward."""
    here.traffic.reset()
    loss = model(x).sum()
    forward = here.traffic.gathers
    loss.backward()
    return forward, here.traffic.gathers - forward


def use_first(rank: int) -> list[tuple[int, int]]:
    model, plain = build_first(), seeded(First)
    x = torch.ones(2, WIDTH, dtype=torch.float64)
    found = [count_gathers(model, x), count_gathers(model, x.clone().requires_grad_())]
    found.append(count_gathers(model, x))
    for _ in range(3):
        plain(x).sum().backward()
    torch.testing.assert_close(model.first.weight.grad.full_tensor(), plain.first.weight.grad)
    return found


def test_a_first_layer_is_gathered_where_it_is_read(caplog: Any) -> None:
    """For the gradient of its input, which a backward through it needs its weight for."""
    for found in run_ranks(use_first, 2):
        assert found == [(2, 1), (2, 2), (2, 1)]


class Twice(First):
    """The first layer is applied to the data and to what needs a gradient, in either order."""

    def __init__(self, reads_first: bool) -> None:
        super().__init__()
        self.reads_first = reads_first

    def forward(self, x: Tensor) -> Tensor:
        needing = x.clone().requires_grad_()
        x, y = (needing, x) if self.reads_first else (x, needing)
        return self.last((self.first(x) * self.first(y)).tanh())


def use_twice(rank: int, reads_first: bool) -> None:
    model, plain = seeded(lambda: Twice(reads_first)), seeded(lambda: Twice(reads_first))
    fully_shard(model, units=wrap.by_class({nn.Linear}))
    set_unshard_in_backward(model.first, False)
    x = torch.ones(2, WIDTH, dtype=torch.float64)
    for _ in range(2):
        assert count_gathers(model, x)[1] == 2
        plain(x).sum().backward()
    torch.testing.assert_close(model.first.weight.grad.full_tensor(), plain.first.weight.grad)


@pytest.mark.parametrize("reads_first", [True, False])
def test_a_layer_of_which_one_call_is_read(reads_first: bool) -> None:
    run_ranks(use_twice, 2, reads_first)


class Sum(nn.Module):
    """Two weights, of which one is read in backward; which comes first in the graph may differ."""

    def __init__(self, reads_first: bool) -> None:
        super().__init__()
        self.reads_first = reads_first
        self.one, self.two = (nn.Parameter(torch.ones(WIDTH, 2)) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        needing = x.clone().requires_grad_()
        x, y = (needing, x) if self.reads_first else (x, needing)
        return x @ self.one + y @ self.two


@pytest.mark.parametrize("reads_first", [True, False])
def test_every_branch_of_the_graph_is_looked_at(reads_first: bool) -> None:
    with fake_world(2):
        model = fully_shard(Sum(reads_first))
        set_unshard_in_backward(model, False)
        loss = model(torch.ones(2, WIDTH)).sum()
        assert reads_weights(fc.get_state(model).unit)
        loss.backward()


def use_both(rank: int) -> None:
    """Of two forwards before one backward, one is read."""
    model, plain = build_first(), seeded(First)
    x = torch.ones(2, WIDTH, dtype=torch.float64)
    grads = []
    for module in (model, plain):
        needing = x.clone().requires_grad_()
        (module(x) + module(needing)).sum().backward()
        grads.append(needing.grad)
    torch.testing.assert_close(*grads)
    torch.testing.assert_close(model.first.weight.grad.full_tensor(), plain.first.weight.grad)


def test_two_forwards_of_which_one_is_read() -> None:
    run_ranks(use_both, 2)


class Scale(nn.Module):
    """Its backward reads the weight where that multiplies, and not where it is added."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.full((WIDTH,), 3.0))

    def forward(self, x: Tensor, multiplies: bool) -> Tensor:
        return x * self.weight if multiplies else x + self.weight


def freeze_between(rank: int) -> None:
    """A frozen forward says nothing of the trained one before it."""
    model = fully_shard(Scale())
    set_unshard_in_backward(model, False)
    x = torch.ones(WIDTH, requires_grad=True)
    loss = model(x, True).sum()
    model.requires_grad_(False)
    loss = loss + model(x, False).sum()
    loss.backward()
    assert x.grad is not None and x.grad.tolist() == [4.0] * WIDTH


def test_a_frozen_forward_between() -> None:
    run_ranks(freeze_between, 2)


class Inside(Scale):
    """Turns gradients on where it multiplies."""

    def forward(self, x: Tensor, multiplies: bool) -> Tensor:
        with torch.set_grad_enabled(multiplies or torch.is_grad_enabled()):
            return super().forward(x, multiplies)


def evaluate_between(rank: int, **options: Any) -> None:
    """A forward under no_grad that turns gradients on inside is read, beside one that is not."""
    model = fully_shard(Inside(), **options)
    set_unshard_in_backward(model, False)
    x = torch.ones(WIDTH, requires_grad=True)
    loss = model(x, False).sum()
    assert not reads_weights(fc.get_state(model).unit)
    with torch.no_grad():
        out = model(x, True)
    assert out.requires_grad and reads_weights(fc.get_state(model).unit)
    out.sum().backward()
    assert x.grad is not None and x.grad.tolist() == [3.0] * WIDTH
    loss.backward()
    assert x.grad.tolist() == [4.0] * WIDTH
    assert model.weight.grad.full_tensor().tolist() == [2.0] * WIDTH


@pytest.mark.parametrize("options", [{}, {"reshard_after_forward": True}], ids=str)
def test_an_evaluation_between(options: dict[str, Any]) -> None:
    """It keeps the unit gathered, or does not."""
    run_ranks(evaluate_between, 2, **options)


class Around(nn.Module):
    """An embedding, and a unit of its own behind it."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.inner = nn.Embedding(10, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(self.words(x))


def test_a_unit_inside_is_no_hidden_read() -> None:
    """What this library puts into the graph reads no weight of the unit around it."""
    with fake_world(2):
        model = fully_shard(Around(), units=wrap.by_name("inner"))
        set_unshard_in_backward(model, False)
        loss = model(tokens()).sum()
        assert not reads_weights(fc.get_state(model).unit)
        loss.backward()


def test_hooks_of_the_caller_are_left_alone() -> None:
    """What they packed is not unpacked to be looked at."""

    def unpack(tensor: Tensor) -> Tensor:
        raise AssertionError("unpacked")

    with fake_world(2):
        model = fully_shard(Words(), units=UNITS)
        with torch.autograd.graph.saved_tensors_hooks(lambda tensor: tensor, unpack):
            model(tokens())


def test_what_the_caller_keeps_is_kept() -> None:
    with fake_world(2):
        model = fully_shard(Words(), units=UNITS)
        fc.set_reshard_after_forward(model, False)
        loss = loss_of(model, tokens())
        assert "words" in fc.explain(model).gathered
        loss.backward()
        del loss
        fc.set_reshard_after_forward(model, True)
        fc.set_reshard_after_backward(model, False)
        for gathers in ((4, 4), (0, 0)):
            assert count_gathers(model, tokens()) == gathers


def test_what_is_gathered_again_is_gathered_ahead() -> None:
    """As soon as one backward did: the unit is expected in the next like any other."""
    with fake_world(2):
        model, ahead = fully_shard(Words(), units=UNITS), list[bool]()
        look = lambda *_: ahead.append("words" in fc.explain(model).gathered)  # noqa: E731
        model.blocks[0].register_full_backward_hook(look)
        for value in (None, True, True):
            set_unshard_in_backward(model.words, value)
            loss_of(model, tokens()).backward()
        assert ahead == [False, False, True]


class Doubled(torch.autograd.Function):
    """Keeps its weight where autograd does not see it."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.weight, ctx.x = weight, x
        return x @ weight

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        return grad @ ctx.weight.t(), ctx.x.t() @ grad


def selective(run: Callable[..., Tensor], x: Tensor) -> Tensor:
    saves = partial(create_selective_checkpoint_contexts, [torch.ops.aten.mm.default])
    return checkpoint(run, x, use_reentrant=False, context_fn=saves)


PARTS: dict[str, Callable[[Callable[..., Tensor], Tensor], Tensor]] = {
    "reentrant": partial(checkpoint, use_reentrant=True),
    "checkpoint": partial(checkpoint, use_reentrant=False),
    "selective": selective,
}


class Hidden(nn.Module):
    """A part of it runs again in backward, or keeps its weight on its own."""

    def __init__(self, part: str) -> None:
        super().__init__()
        self.part = part
        self.weight = nn.Parameter(torch.eye(WIDTH) * 2)

    def run(self, x: Tensor) -> Tensor:
        return x @ self.weight

    def forward(self, x: Tensor) -> Tensor:
        x = x.clone().requires_grad_()
        return (
            PARTS[self.part](self.run, x) if self.part in PARTS else Doubled.apply(x, self.weight)
        )


def use_hidden(rank: int, part: str) -> None:
    plain = Hidden(part)
    model = fully_shard(nn.Sequential(fully_shard(Hidden(part)), nn.Linear(WIDTH, 1)))
    set_unshard_in_backward(model[0], False)
    for _ in range(2):
        hidden = model[0](torch.ones(2, WIDTH))
        assert reads_weights(fc.get_state(model[0]).unit)
        hidden.sum().backward()
        plain(torch.ones(2, WIDTH)).sum().backward()
    torch.testing.assert_close(model[0].weight.grad.full_tensor(), plain.weight.grad)


@pytest.mark.parametrize("part", [*PARTS, "function"])
def test_reads_that_the_graph_does_not_show(part: str, caplog: Any) -> None:
    simulate_ranks(lambda rank: use_hidden(rank, part))
    assert "may read parameters in" in caplog.text


class Beside(nn.Module):
    """Gives a second result in a list of the caller's, and its backward reads the weight."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.eye(WIDTH) * 2)

    def forward(self, x: Tensor, kept: list[Tensor]) -> Tensor:
        kept.append((x @ self.weight).tanh() @ self.weight.t())
        return x @ self.weight


def use_beside(rank: int, weighs: float) -> None:
    plain, model, x = Beside(), fully_shard(Beside()), torch.ones(2, WIDTH)
    set_unshard_in_backward(model, False)
    for _ in range(2):
        for module in (model, plain):
            kept: list[Tensor] = []
            output = module(x, kept)
            (kept[0].square().sum() + weighs * output.sum()).backward()
    torch.testing.assert_close(model.weight.grad.full_tensor(), plain.weight.grad)


@pytest.mark.parametrize("weighs", [0.0, 1.0])
def test_reads_beside_the_output(weighs: float, caplog: Any) -> None:
    """What a forward gives beside its output leads to no node that the output leads to."""
    run_ranks(use_beside, 2, weighs)
    simulate_ranks(use_beside, 2, weighs)
    assert "may read parameters in what its forward computed beside" in caplog.text


def test_a_weight_that_is_read_is_named(caplog: Any) -> None:
    with fake_world(2):
        model = fully_shard(First(), units=wrap.by_class({nn.Linear}))
        set_unshard_in_backward(model.last, False)
        model(torch.ones(2, WIDTH)).sum().backward()
        model(torch.ones(2, WIDTH)).sum().backward()
    (message,) = [r.getMessage() for r in caplog.records if "unshard" in r.getMessage()]
    assert "unit 'last' reads its parameter 'last.weight'" in message


def call_twice(model: nn.Module) -> Tensor:
    return loss_of(model, tokens()) + loss_of(model, tokens(1))


def checkpointed(model: nn.Module) -> Tensor:
    return checkpoint(model, tokens(), use_reentrant=False)[..., 0].square().mean()


def penalised(model: nn.Module) -> Tensor:
    loss = loss_of(model, tokens())
    (grad,) = torch.autograd.grad(loss, [model.words.weight], create_graph=True)
    return loss + grad.square().sum()


def summed(model: nn.Module) -> Tensor:
    """A hook on the embedding reads its weight, and keeps what it computed."""
    kept: list[Tensor] = []
    hook = model.words.register_forward_pre_hook(
        lambda module, args: kept.append(module.weight.square().sum())
    )
    loss = loss_of(model, tokens())
    hook.remove()
    return loss + kept.pop()


def weighted(model: nn.Module) -> Tensor:
    """A hook on the embedding changes what it returns, by its weight."""
    hook = model.words.register_forward_hook(
        lambda module, args, output: output * module.weight.square().mean()
    )
    loss = loss_of(model, tokens())
    hook.remove()
    return loss


PROGRAMS: list[Callable[[nn.Module], Tensor]] = [
    call_twice, checkpointed, penalised, summed, weighted,
]  # fmt: skip


def run_program(rank: int, number: int, **options: Any) -> None:
    model, plain = seeded(Words), seeded(Words)
    fully_shard(model, units=UNITS, **options)
    for _ in range(2):
        loss, wanted = PROGRAMS[number](model), PROGRAMS[number](plain)
        torch.testing.assert_close(loss, wanted)
        loss.backward()
        wanted.backward()
        for (name, param), other in zip(model.named_parameters(), plain.parameters(), strict=True):
            torch.testing.assert_close(param.grad.full_tensor(), other.grad, msg=name)


@pytest.mark.parametrize("number", range(len(PROGRAMS)), ids=[p.__name__ for p in PROGRAMS])
def test_programs_that_use_the_embedding_otherwise(number: int) -> None:
    """As a plain model does: twice, checkpointed, differentiated twice, its weight read."""
    run_ranks(run_program, 2, number)


def skip_here(rank: int) -> list[int]:
    """Rank 1 has no tokens for the embedding."""
    model, plain = seeded(Words), seeded(Words)
    fully_shard(model, units=UNITS)
    counts = []
    for _ in range(2):
        here.traffic.reset()
        if rank == 0:
            loss_of(model, tokens()).backward()
        else:
            fc.participate(model).sum().backward()
        counts.append(here.traffic.gathers)
        (loss_of(plain, tokens()) / 2).backward()
    torch.testing.assert_close(model.words.weight.grad.full_tensor(), plain.words.weight.grad)
    return counts


def test_a_rank_that_skips_the_embedding() -> None:
    assert run_ranks(skip_here, 2) == [[7, 7], [7, 7]]


def accumulate(rank: int) -> list[int]:
    model, plain = seeded(Words), seeded(Words)
    fully_shard(model, units=UNITS)
    here.traffic.reset()
    with fc.accumulate(model, keep="unsharded"):
        for step in range(3):
            loss_of(model, tokens(0, step)).backward()
    counts = [here.traffic.gathers, here.traffic.reduces]
    for step in range(3):
        loss_of(plain, tokens(0, step)).backward()
    torch.testing.assert_close(model.words.weight.grad.full_tensor(), plain.words.weight.grad)
    return counts


def test_microbatches() -> None:
    assert run_ranks(accumulate, 2) == [[21, 4], [21, 4]]


def write_between(rank: int) -> None:
    """A step between a forward and its backward leaves the embedding's gradient as it is."""
    model, plain = seeded(lambda: nn.Embedding(10, 4)), seeded(lambda: nn.Embedding(10, 4))
    fully_shard(model)
    for module in (model, plain):
        loss = module(tokens()).square().sum()
        module(tokens()).sum().backward()
        with torch.no_grad():
            module.weight.mul_(2)
        module(tokens()).sum().backward()
        loss.backward()
    torch.testing.assert_close(model.weight.grad.full_tensor(), plain.weight.grad)


def test_a_write_between_forward_and_backward() -> None:
    run_ranks(write_between, 2)


def test_a_write_before_a_backward_that_reads() -> None:
    """One of two forwards saved no weight; the other's backward would mix old and new ones."""
    with fake_world(2):
        model, x = build_first(), torch.ones(2, WIDTH, dtype=torch.float64)
        both = model(x) + model(x.clone().requires_grad_())
        with torch.no_grad():
            model.first.weight.mul_(2)
        with pytest.raises(
            RuntimeError, match=r"'first\.weight' of unit 'first' was written between"
        ):
            both.sum().backward()


def test_bad_arguments() -> None:
    model = fully_shard([nn.Embedding(4, 2), nn.Linear(2, 2)])
    with pytest.raises(ValueError, match="is one of 2 modules; wanted a unit of one"):
        set_unshard_in_backward(model[0], False)
    with pytest.raises(TypeError, match="value is 1; wanted True, False, or None for"):
        set_unshard_in_backward(model[0], 1)  # type: ignore[arg-type]
