"""The tests notice a broken guard: each mutation fails the check that is there for it."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fsdp_compose as fc
from fsdp_compose.attach.entrances import ANSWERS
from fsdp_compose.comm import small_reduce
from fsdp_compose.core import forward, passes
from fsdp_compose.core.guards import compared_records, parted_gradients
from fsdp_compose.core.guards.kept_tensors import watch_forwards
from fsdp_compose.optim import clip, slice_step, step_guard, step_plan
from fsdp_compose.scopes import compile as compiling
from fsdp_compose.scopes import skippable
from fsdp_compose.sharded import is_sharded, reduce

from breaking import run_once
from checked_steps import assert_steps_agree
from compiling import import_compiler
from harness import RankFailure, run_ranks
from models import Block, by_block, data, seeded, sgd, square, whole

pytestmark = pytest.mark.slow


class Part(nn.Module):
    """Leaves one of its weights out, and keeps a view of another where nobody sees it."""

    kept: list[Tensor] = []
    keeps = False

    def __init__(self) -> None:
        super().__init__()
        self.used, self.unused = nn.Linear(6, 6), nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        if Part.keeps:
            Part.kept.append(self.used.weight.detach().t())
        return self.used(x)


def check_compiled_unused(rank: int) -> None:
    """Weight decay leaves alone what no rank's compiled graph uses."""
    model = fc.fully_shard(seeded(Part))
    fc.set_traceable(model)
    call = torch.compile(lambda x: model(x), backend="aot_eager", fullgraph=True)
    call(data(0, rank)).square().mean().backward()
    assert model.used.weight.grad is not None and model.unused.weight.grad is None


def give_zeros() -> None:
    """A gradient that a compiled graph never makes arrives as zeros."""

    def backward(ctx: Any, *grads: Tensor | None) -> Any:
        traced = compiling._find_unit(ctx.key)[1]
        like = next(grad for grad in grads if grad is not None)
        shapes = [[shape[d] for d in dims] for _, _, shape, dims in traced.views]
        full = [like.new_zeros(s) if g is None else g for g, s in zip(grads, shapes, strict=True)]
        return torch.ops.fsdp_compose.reduce(full, [*range(len(full))], ctx.key, 0), None, None

    compiling.Show.backward = staticmethod(backward)  # type: ignore[method-assign]


def check_asked_in_scope(rank: int) -> None:
    """``autograd.grad`` on a parameter that a scope shows is averaged over the ranks."""
    plain, model = seeded(Part), fc.fully_shard(seeded(Part))
    with fc.gathered(model):
        (found,) = torch.autograd.grad(square(model, data(0, rank)), model.used.weight)
    loss = square(plain, data(0, 0)) / 2 + square(plain, data(0, 1)) / 2
    (wanted,) = torch.autograd.grad(loss, plain.used.weight)
    assert torch.allclose(found, wanted)


def give_own() -> None:
    """A gradient asked for in a scope is this rank's own."""

    def grad(func: Any, args: Any, kwargs: Any) -> Any:
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **{k: v for k, v in kwargs.items() if v is not None})

    ANSWERS[torch.autograd.grad] = grad


def check_kept(rank: int) -> None:
    """A view that is first kept in a later step is not one whose reading ends the process."""
    model = fc.fully_shard(nn.Sequential(fc.fully_shard(seeded(Part))))
    for step in range(3):
        Part.keeps = step == 2
        loss = square(model, data(step, rank))
        if Part.keeps:
            kind = type(Part.kept.pop()).__name__
            assert kind == "KeptView"
        loss.backward()


def check_kept_in_backward(rank: int) -> None:
    """Nor is one that a hook keeps in a backward."""
    model = fc.fully_shard(nn.Sequential(fc.fully_shard(seeded(Part))))
    kept: list[Tensor] = []
    for step in range(3):
        hidden = model(data(step, rank))
        if step == 2:
            hidden.register_hook(lambda grad: kept.append(model[0].used.weight.detach()[1:]))
        hidden.square().sum().backward()
    kind = type(kept.pop()).__name__
    assert kind == "KeptView"


def check_failed(rank: int) -> None:
    """Nor what the frames of a traceback keep."""
    model = fc.fully_shard(seeded(Part))
    handle = model.used.register_forward_hook(lambda module, args, output: 1 / 0)
    Part.keeps = True
    with pytest.raises(ZeroDivisionError):
        model(data(0, rank))
    handle.remove()
    kind = type(Part.kept.pop()).__name__
    assert kind == "KeptView"


def check_step(rank: int) -> None:
    """An optimizer over units and plain parts that nothing averages raises at its step (D18)."""
    first, block = seeded(lambda: nn.Linear(6, 6)), fc.fully_shard(seeded(Block))
    block(first(data(0, rank))).sum().backward()
    optimizer = sgd([*first.parameters(), *block.parameters()])
    with pytest.raises(RuntimeError, match="in no unit"):
        optimizer.step()


def check_clip(rank: int) -> None:
    """Torch's clipping over them raises too."""
    first, block = seeded(lambda: nn.Linear(6, 6)), fc.fully_shard(seeded(Block))
    block(first(data(0, rank))).sum().backward()
    with pytest.raises(RuntimeError, match="in no unit"):
        nn.utils.clip_grad_norm_([*first.parameters(), *block.parameters()], 1.0)


def check_blend(rank: int) -> None:
    """Sums of two parameters, one on each rank, are not added up."""
    model = by_block(seeded(lambda: nn.Sequential(Block(), Block())))
    with pytest.raises(RuntimeError, match="at the same time"), torch.no_grad():
        model[rank].up.weight.sum()
    assert whole(model[0].up.weight).isfinite().all()


def check_skipped(rank: int) -> None:
    """A step that one rank cannot use leaves no gradient, and an earlier one as it was."""
    model = fc.fully_shard(nn.Sequential(fc.fully_shard(seeded(Part))))
    for earlier in (False, True):
        if earlier:
            square(model, data(0, rank)).backward()
        before = [None if p.grad is None else whole(p.grad) for p in model.parameters()]
        with fc.skippable_step(model) as step:
            square(model, data(1, rank)).backward()
            if rank:
                raise ValueError("a bad batch")
        assert step.skipped and set(step.reasons) == {1}
        after = [None if p.grad is None else whole(p.grad) for p in model.parameters()]
        assert all(torch.equal(a, b) if a is not None else b is None for a, b in zip(before, after))


def skip_alone(step: Any, *_: Any) -> None:
    """The rank that raised skips its step, and tells nobody."""
    step.skipped, step.reasons = step._own is not None, {1: step._own or ""}


def no_numbers() -> None:
    reduce.reduce_alike = lambda tensor, group, op, what: small_reduce.all_reduce(  # type: ignore[assignment]
        tensor.clone(), group, op
    )


def _step_once(rank: int, shape: tuple[int, int]) -> tuple[nn.Module, torch.optim.Optimizer]:
    model = fc.fully_shard(seeded(lambda: nn.Linear(*shape, bias=False)))
    optimizer = torch.optim.AdamW(model.parameters())
    for _ in range(2):
        model(torch.ones(1, shape[0]).to(model.weight.dtype)).sum().backward()
    optimizer.step()
    return model, optimizer


def check_state_is_sharded(rank: int) -> None:
    """What a step on slices makes is known to be slices."""
    model, optimizer = _step_once(rank, (8, 1))
    assert is_sharded(optimizer.state[model.weight]["exp_avg"])


def check_state_of_another_cut(rank: int) -> None:
    """State of as many elements as the slice, but other ones, is refused."""
    (model, optimizer), (_, other) = _step_once(rank, (8, 1)), _step_once(rank, (4, 2))
    given = next(iter(other.state.values()))["exp_avg"]
    optimizer.state[model.weight]["exp_avg"] = given
    with pytest.raises(fc.ShardedWeightError, match="cut differently"):
        optimizer.step()


def check_planned_step(rank: int) -> None:
    """Torch fills the lists of a step again where an option that they depend on was changed."""
    change = lambda optimizer, params: optimizer.param_groups[0].update(weight_decay=0.0)  # noqa: E731
    assert assert_steps_agree(change) == [True, True, False, True, False]


def check_stepped_alike(rank: int) -> None:
    """Weights that one rank alone has stepped are not gathered into a state dict."""
    model = fc.fully_shard(seeded(Block))
    optimizer = sgd(model.parameters())
    square(model, data(0, rank)).backward()
    if rank:
        optimizer.step()
    with pytest.raises(RuntimeError, match="left out on rank 0"):
        fc.state_dict(model)


def check_stepped_with_one_rate(rank: int) -> None:
    """Nor are those that were stepped with other learning rates."""
    model = fc.fully_shard(seeded(Block))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1 + rank)
    square(model, data(0, rank)).backward()
    optimizer.step()
    with pytest.raises(RuntimeError, match="had settings that differ"):
        fc.state_dict(model)


def check_parts_meet(rank: int) -> None:
    """A hook gets the sum of what a forward and a penalty, before or after it, bring."""
    model = seeded(lambda: nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 6)))
    fc.fully_shard(model, units=fc.wrap.by_class({nn.Linear}))
    weight: Any = model[1].weight
    seen: list[Tensor] = []
    weight.register_hook(lambda grad: seen.append(grad.full_tensor()))
    early = weight.square().sum()
    (square(model, data(0, rank)) + early).backward()
    (square(model, data(0, rank)) + weight.square().sum()).backward()
    assert len(seen) == 2
    assert torch.allclose(*seen)


def override_with_held() -> None:
    original = passes.add_held

    def add_held(engine: Any, task: Any) -> Any:
        held = {entry: entry.spec.hooks.held for entry in engine.held}
        return original(engine, task) | {e: grad for e, grad in held.items() if grad is not None}

    passes.add_held = add_held


def check_told_late(rank: int) -> None:
    """A post-reduce hook sees what a penalty brings after the forward's part, also with a graph."""
    model = seeded(lambda: nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 6)))
    fc.fully_shard(model, units=fc.wrap.by_class({nn.Linear}))
    weight: Any = model[1].weight
    seen: list[Tensor] = []

    def note(module: nn.Module, params: list[Any]) -> None:
        seen.extend(p.grad.full_tensor().detach() for p in params if p is weight)

    fc.register_post_reduce_hook(model, note)
    weight.register_hook(lambda grad: None)
    for with_graph in (False, True):
        model.zero_grad()
        early = weight.square().sum()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of a reference cycle
            (square(model, data(0, rank)) + early).backward(create_graph=with_graph)
    assert len(seen) == 2
    assert torch.allclose(*seen)
    assert torch.allclose(seen[0], weight.grad.full_tensor().detach())


MUTATIONS: dict[str, tuple[Callable[[], None], Callable[[int], None]]] = {
    "zeros for what a compiled graph never used": (give_zeros, check_compiled_unused),
    "own gradients in scopes": (give_own, check_asked_in_scope),
    "kept views not looked for after a forward": (
        lambda: setattr(forward, "note_forward", watch_forwards), check_kept,
    ),
    "kept views not looked for after a backward": (
        lambda: setattr(passes, "note_users", lambda units: None), check_kept_in_backward,
    ),
    "kept views not looked for after an error": (
        lambda: setattr(forward, "guard_after_error", lambda engine: None), check_failed,
    ),
    "plain parts not looked for at a step": (
        lambda: setattr(step_guard, "check_unaveraged", lambda optimizer: None), check_step,
    ),
    "plain parts not looked for at clipping": (
        lambda: setattr(clip, "check_clipped", lambda params: None), check_clip,
    ),
    "state of a step on slices not tagged": (
        lambda: setattr(slice_step, "_tag_state", lambda optimizer: None), check_state_is_sharded,
    ),
    "state of another cut taken for the right one": (
        lambda: setattr(slice_step, "_is_cut_alike", lambda one, other: True),
        check_state_of_another_cut,
    ),
    "a step by the plan of another": (
        lambda: setattr(step_plan.StepPlan, "fits", lambda self, optimizer, found: True),
        check_planned_step,
    ),
    "reductions not compared": (no_numbers, check_blend),
    "steps not compared before weights leave": (
        lambda: setattr(compared_records, "explain_stepped", lambda step, reports: None),
        check_stepped_alike,
    ),
    "settings not compared before weights leave": (
        lambda: setattr(compared_records, "number_of", lambda settings: 0),
        check_stepped_with_one_rate,
    ),
    "gradients of a skipped step kept": (
        lambda: setattr(skippable._State, "restore", lambda self: None), check_skipped,
    ),
    "hooks run on the leaf's part alone": (
        lambda: setattr(parted_gradients, "_is_under_way", lambda unit, entry: False),
        check_parts_meet,
    ),
    "hooks run on the unit's part alone": (
        lambda: setattr(parted_gradients, "will_accumulate", lambda leaf: False),
        check_parts_meet,
    ),
    "post-reduce hooks told of the unit's part alone": (
        lambda: setattr(parted_gradients, "will_accumulate", lambda leaf: False),
        check_told_late,
    ),
    "post-reduce hooks never told late": (
        lambda: setattr(passes, "tell_late", lambda task: None), check_told_late,
    ),
    "what is held takes the place of the rest": (override_with_held, check_told_late),
    "one rank skips alone": (
        lambda: setattr(skippable, "_agree", skip_alone), check_skipped,
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", MUTATIONS)
def test_guard_mutation_is_noticed(name: str) -> None:
    mutate, check = MUTATIONS[name]
    if check is check_compiled_unused:
        import_compiler()
    run_once(check, 2, timeout=90)

    def broken(rank: int) -> None:
        mutate()
        check(rank)

    with pytest.raises(RankFailure, match=r"AssertionError|DID NOT RAISE"):
        run_ranks(broken, 2, timeout=90)
