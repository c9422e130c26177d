"""Operations of fuzzed programs in which one rank, or all, do what needs an error, or agreement."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from fuzz_options import is_ignored, shard, spreads
from torch import Tensor, nn

import fsdp_compose as fc
from fsdp_compose import fully_shard, sharded

from fuzz_operations import (
    Run,
    operation,
    recomputes,
    recomputes_reentrantly,
    skipping,
    spare_leaves,
)
from fuzz_programs import HYBRID, Case, LeafModule, NodeModule, OnPurpose, build, nodes
from fuzz_twin import square_losses
from harness import DEVICE
from models import seeded, square


def count_ranks(run: Run, says_so: bool) -> int:
    """On how many ranks ``says_so`` is true."""
    found = torch.tensor(float(says_so))
    if run.case.world > 1:
        try:
            dist.all_reduce(found)
        except RuntimeError as error:
            raise RuntimeError(f"while counting, a rank does not answer: {error}") from error
    return int(found)


def expect_error(run: Run, text: str, is_due: bool | None, act: Callable[[], object]) -> str:
    """Do what is an error with ``text`` on every rank, or on none; then go on without gradients.

    Args:
        is_due: None where both are right, as long as the ranks agree.
    """
    said = ""
    try:
        act()
    except (RuntimeError, ValueError) as error:
        said = str(error)
        if text not in said:
            raise
    raised = count_ranks(run, bool(said))
    if is_due is None:
        assert raised in (0, run.case.world), f"{raised} ranks raise, this one {said}"
    else:
        assert raised == is_due * run.case.world, f"{raised} ranks raise, this one {said}"
    if said:
        for model in run.both:
            model.zero_grad()
        run.waiting = True
    return said


def hears_at_once(case: Case) -> bool:
    """Whether a rank that ends its step is heard by those that wait for its data.

    With collectives of a group they wait for each other until the timeout; with data cut over both
    axes, the end of a step is compared over all ranks at once, and not where data is awaited. Units
    over two meshes end their steps in two groups, and each rank may wait in another; so they may
    where units are gathered again in smaller groups (``release``).
    """
    in_one_group = case.strategy != HYBRID[2] and not case.mixed and not spreads(case)
    return case.backend == "gloo" and in_one_group


@operation("stray")
def _run_another_unit(run: Run, n: int, seed: int) -> None:
    """One rank runs another unit first: an error on every rank or on none, then all is well."""
    model = run.twin.model
    inner = [m for m in nodes(model) if m is not model and fc.is_fully_sharded(m)]
    x = run.twin.input(seed).requires_grad_()
    if not inner or not hears_at_once(run.case):
        return
    if any(node.skip is not None for node in nodes(model)):
        return  # the others may then run no unit at all, and are elsewhere

    def act() -> None:
        if run.rank == n % run.case.world:
            square(inner[n % len(inner)], x * 1)
        square(model, x).backward()

    expect_error(run, "different units", None, act)
    for model in run.both:
        model.zero_grad()
    run.waiting = True


@operation("skip here")
def _skip_a_leaf_of_one_rank(run: Run, n: int, seed: int) -> None:
    """Rank 0 leaves out a leaf beside another of its unit: it counts as zero, and ranks agree."""
    every = nodes(run.twin.model)
    found = [(i, j) for i, node in enumerate(every) for j in spare_leaves(node)]
    if not found or any(node.skip is not None for node in every):
        return
    i, j = found[n % len(found)]
    if run.rank == 0:
        every[i].skip = j
    run.twin.train_apart(seed, lambda: skipping(nodes(run.twin.reference)[i], j))
    every[i].skip = None
    run.twin.check_grads()


def _is_unused(module: nn.Module) -> bool:
    """Whether its parameters may get no gradient where it runs, as they do where a rank joins."""
    return any(
        isinstance(one, NodeModule) and one.node.style == "unused" for one in module.modules()
    )


@operation("participate")
def _participate(run: Run, n: int, seed: int) -> None:
    """Rank 0 joins what the others communicate for a unit that it leaves out."""
    every = nodes(run.twin.model)
    found = [
        (i, j)
        for i, node in enumerate(every)
        for j, child in enumerate(node.children_)
        if fc.is_fully_sharded(child) and node.node.style == "plain" and not _is_unused(child)
    ]
    if not found or recomputes(run) or any(name == "skip" for name, _ in run.case.ops):
        return
    run.twin.train_on(seed)  # so that the order of its units is known
    i, j = found[n % len(found)]
    if run.rank == 0:
        every[i].joins = j
    run.twin.train_apart(seed + 20, lambda: skipping(nodes(run.twin.reference)[i], j))
    every[i].joins = None
    run.twin.check_grads()


@operation("freeze here")
def _freeze_on_one_rank(run: Run, n: int, seed: int) -> None:
    """A parameter that one rank alone freezes is an error on every rank (D17)."""
    name = run.name_of(n)
    param = run.twin.model.get_parameter(name)
    if run.case.world == 1 or not param.requires_grad:
        return
    if not hears_at_once(run.case):
        return
    run.twin.zero_grad()
    for model in run.both:
        model.zero_grad()
    square_losses(run.twin.reference, run.twin.all_inputs(seed), run.case.world).mean().backward()
    grads = {id(p): p.grad for p in run.twin.reference.parameters() if p.grad is not None}
    is_used = grads.pop(id(run.twin.reference.get_parameter(name)), None) is not None
    if not grads:  # a rank that trains nothing ends its step without a word
        run.twin.reference.zero_grad()
        return
    if run.rank == n % run.case.world:
        param.requires_grad_(False)
    expect_error(run, "", is_used or None, lambda: run.twin.own_loss(seed).backward())
    param.requires_grad_(True)
    for model in run.both:
        model.zero_grad()


@operation("write inside")
def _write_in_forward(run: Run, n: int, seed: int) -> None:
    """A forward that writes its weight does what a plain one does, or raises on every rank."""
    found = [
        [m for m in model.modules() if isinstance(m, LeafModule) and m.weight.numel()]
        for model in run.both
    ]
    if not found[0] or recomputes(run) or run.waiting:
        return
    ours, plain = (leaves_[n % len(leaves_)] for leaves_ in found)
    if not sharded.is_sharded(ours.weight):  # it was ignored
        return
    if _count_uses(run, plain.weight, seed) != 1:  # torch refuses what was written between uses
        return
    is_kept = sharded.spec_of(ours.weight).group.size == 1  # units differ with ``mixed``
    if run.case.compute and ours.weight.dtype != getattr(torch, run.case.compute):
        is_kept = False  # what it writes is a copy in the compute dtype
    if is_kept and n % 3 == 2 and run.case.world > 1 and run.case.backend == "gloo":
        before = ours.weight.detach().clone()
        handle = ours.register_forward_pre_hook(lambda *_: _write(ours, None, 0.9 - run.rank / 99))
        expect_error(
            run, "write different weights", True, lambda: run.twin.own_loss(seed).backward()
        )
        handle.remove()
        with torch.no_grad():
            ours.weight.copy_(before)
        return
    handles = [leaf.register_forward_pre_hook(_write) for leaf in (ours, plain)]
    try:
        if is_kept:
            run.twin.train_on(seed)
        else:
            run.twin.reference.zero_grad()
            expect_error(run, "was written", True, lambda: run.twin.own_loss(seed).backward())
    finally:
        for handle in handles:
            handle.remove()
    run.twin.check_grads()


def _write(module: nn.Module, args: Any, factor: float = 0.9) -> None:
    with torch.no_grad():
        weight: Any = module.weight
        weight.mul_(factor)


def _count_uses(run: Run, weight: Tensor, seed: int) -> int:
    """How often a forward of the plain model reads ``weight``."""
    calls: list[object] = []
    handles = [
        leaf.register_forward_hook(lambda *_: calls.append(_))
        for leaf in run.twin.reference.modules()
        if isinstance(leaf, LeafModule) and leaf.weight is weight
    ]
    with torch.no_grad():
        run.twin.reference(run.twin.input(seed))
    for handle in handles:
        handle.remove()
    return len(calls)


@operation("own operand")
def _reduce_with_an_operand(run: Run, n: int, seed: int) -> None:
    """A sum over a parameter times a tensor, which is an error where each rank has its own."""
    name = run.name_of(n)
    ours, plain = (model.get_parameter(name) for model in run.both)
    operand = torch.linspace(1.0, 2.0, plain.numel()).to(plain).view(plain.shape)
    total = (ours * operand.to(ours.device)).sum().detach()
    run.compare("a sum", total, (plain * operand).sum().detach())
    if run.case.backend == "gloo" and plain.numel():  # elsewhere nothing is compared
        differs = run.case.world > 1
        text = "with plain tensors of shape"
        expect_error(run, text, differs, lambda: (ours * (operand + run.rank)).sum())


@operation("own edit")
def _edit_on_one_rank(run: Run, n: int, seed: int) -> None:
    """What one rank alone writes in a scope, or fails in, is an error on all and is not written."""
    name, alone = run.name_of(n), run.rank == n % run.case.world
    fails = n % 3 == 2 and run.case.backend == "gloo"  # elsewhere the others wait for a timeout
    is_seen = fails or run.twin.reference.get_parameter(name).numel() > 0

    def edit() -> None:
        first = fails and n % 2 == 1
        with fc.gathered(run.twin.model, writeback=True, rank0_only=first), torch.no_grad():
            if not first or run.rank == 0:
                run.twin.model.get_parameter(name).fill_(float(alone))
            if fails and alone:
                raise RuntimeError("this rank failed inside a scope of full parameters")

    if run.case.world > 1:
        expect_error(run, "a scope of", is_seen, edit)


@operation("own clear")
def _clear_on_one_rank(run: Run, n: int, seed: int) -> None:
    """What one rank alone clears is an error on all once a backward adds to what others have."""
    if run.case.world == 1 or not hears_at_once(run.case):
        return
    for model in run.both:
        model.zero_grad()
    run.twin.train_on(seed)
    alone = run.rank == n % run.case.world
    trained = [p for p in run.twin.model.parameters() if p.grad is not None]
    holders = count_ranks(run, not alone and any(sharded.to_local(p).numel() for p in trained))
    if alone:
        run.twin.model.zero_grad()
    again = lambda: run.twin.own_loss(seed + 20).backward()  # noqa: E731
    is_due = None if recomputes_reentrantly(run) else holders > 0  # it may reduce several times
    expect_error(run, "gradients were cleared on some", is_due, again)
    for model in run.both:
        model.zero_grad()


@operation("read below")
def _read_below_classes(run: Run, n: int, seed: int) -> None:
    """What reads memory without asking a parameter's class gets an error, and no slice."""
    param = run.twin.model.get_parameter(run.name_of(n))
    expect_error(
        run, "needs the whole of", True, lambda: torch.as_tensor(param, dtype=torch.complex128)
    )


@contextlib.contextmanager
def expect_apart(run: Run, text: str, seed: int) -> Iterator[None]:
    """What is done to parameters in the block is an error of the next step; then it is undone."""
    before = [param.detach().clone() for param in run.twin.model.parameters()]
    yield
    for model in run.both:
        model.zero_grad()
    expect_error(run, text, True, lambda: run.twin.own_loss(seed + 20).backward())
    with torch.no_grad():
        for param, value in zip(run.twin.model.parameters(), before, strict=True):
            param.copy_(value)


@operation("own write")
def _write_on_each_rank(run: Run, n: int, seed: int) -> None:
    """A write that differs by rank is an error on all when the next step begins or ends."""
    param = run.twin.model.get_parameter(run.name_of(n))
    alone = run.rank == n % run.case.world
    if run.case.world == 1 or not hears_at_once(run.case):
        return
    for model in run.both:
        model.zero_grad()
    run.twin.train_on(seed)
    if not param.numel() or all(p.grad is None for p in run.twin.reference.parameters()):
        return  # every write is the same, or no step compares anything
    with expect_apart(run, "in their own ways", seed), torch.no_grad():
        if n % 4 == 3 and run.twin.reference.get_parameter(run.name_of(n)).grad is not None:
            param.grad.mul_(1.0 + alone)  # type: ignore[union-attr]
        elif n % 3 == 0:
            param.mul_(1.0 + alone)
        elif n % 3 == 1:
            param.data.copy_(torch.full(param.shape, float(alone)).to(param))
        elif alone:
            param.zero_()


@operation("own settings")
def _step_with_own_settings(run: Run, n: int, seed: int) -> None:
    """A learning rate of one rank's own is an error on every rank when the next step ends."""
    optim, plain = run.twin.optim, run.twin.plain_optim
    if optim is None or plain is None or run.case.world == 1 or not hears_at_once(run.case):
        return
    for model in run.both:
        model.zero_grad()  # else a gradient of before may be all there is
    run.twin.train_on(seed)
    stepped = [p for group in plain.param_groups for p in group["params"]]
    if not any(p.grad is not None and p.numel() for p in stepped):
        return
    rate = optim.param_groups[0]["lr"]
    with expect_apart(run, "settings that differ", seed):
        optim.param_groups[0]["lr"] = rate * (1 + (run.rank == n % run.case.world))
        optim.step()
        optim.param_groups[0]["lr"] = rate
    optim.state.clear()
    plain.state.clear()


@operation("drift")
def _copies_drift(run: Run, n: int, seed: int) -> None:
    """Copies that differ between replicas are named on every rank; equal ones are not."""
    fc.verify_replicas(run.twin.model)
    param = run.twin.model.get_parameter(run.name_of(n))
    if sharded.spec_of(param).replicas.size == 1:  # units differ with ``mixed``
        return
    before, drifts = param.detach().clone(), run.rank == n % run.case.world
    if drifts:
        with torch.no_grad():
            sharded.to_local(param).add_(1.0)  # a write to the parameter itself is compared
    is_seen = count_ranks(run, drifts and fc_numel(param) > 0) > 0
    text = "verify_replicas: parameter"  # which may have another name where it is tied
    expect_error(run, text, is_seen, lambda: fc.verify_replicas(run.twin.model))
    with torch.no_grad():
        param.copy_(before)


def fc_numel(param: Tensor) -> int:
    local = getattr(param, "to_local", None)
    return param.numel() if local is None else local().numel()


@operation("differ")
def _start_with_other_weights(run: Run, n: int, seed: int) -> None:
    """Ranks that start with other weights are told, or take those of rank 0."""
    model = seeded(lambda: build(run.case.tree))
    left = {id(leaf.weight) for leaf in model.modules() if is_ignored(leaf)}
    wanted = [p.detach().clone() for p in model.parameters() if id(p) not in left]
    if run.rank == n % run.case.world:
        with torch.no_grad():
            for param in model.parameters():
                param.add_(id(param) not in left)
    differs = run.case.world > 1 and any(value.numel() for value in wanted)
    if n % 2:
        expect_error(run, "differs between", differs, lambda: shard(run.case, model))
        return
    shard(run.case, model, init="broadcast")
    if run.case.world > 1 and n % run.case.world:
        named = [(name, p) for name, p in model.named_parameters() if id(p) not in left]
        for (name, found), value in zip(named, wanted, strict=True):
            run.compare(name, run.whole(found), value)


@operation("skippable")
def _skip_a_bad_batch(run: Run, n: int, seed: int) -> None:
    """A step that one rank cannot use is discarded by all, and leaves what was there."""
    model, fails = run.twin.model, run.rank == n % run.case.world and n % 3 > 0
    target = nodes(model)[n % len(nodes(model))]
    raises = fails and run.case.backend == "gloo"
    target.fail, target.fail_backward = raises and n % 2 == 0, raises and n % 2 == 1
    run.waiting = True
    with fc.skippable_step(model, errors=(OnPurpose,)) as step:
        loss = run.twin.own_loss(seed)
        if fails and not raises:
            step.discard("it is a bad batch")
        loss.backward()
    target.fail = target.fail_backward = False
    skipped = count_ranks(run, step.skipped)
    assert skipped in (0, run.case.world), f"{skipped} ranks skip the step"
    if not skipped:
        was_run = all(node.skip is None for node in nodes(model))
        assert not (n % 3 and was_run) or n % 2, "nobody skipped the step"
        square_losses(
            run.twin.reference, run.twin.all_inputs(seed), run.case.world
        ).mean().backward()
    run.twin.check_grads()


@operation("debug")
def _check_more(run: Run, n: int, seed: int) -> None:
    """With the checks of debug mode nothing else is found."""
    fc.set_debug(True)
    run.twin.train_on(seed)
    fc.set_debug(n % 2 == 0)
    run.twin.check_grads()


@operation("copy")
def _copy(run: Run, n: int, seed: int) -> None:
    """Train a deep copy: the original is as before."""
    twin = copy.deepcopy(run.twin.model)
    square_losses(twin, run.twin.input(seed), 1).sum().backward()
    with torch.no_grad():
        for param in twin.parameters():
            param.add_(1)


@operation("sharded twice")
def _shard_again(run: Run, n: int, seed: int) -> None:
    """Sharding what is sharded is an error that changes nothing."""
    expect_error(run, "already sharded", True, lambda: fully_shard(run.twin.model))


@operation("fail")
def _fail(run: Run, n: int, seed: int) -> None:
    target = nodes(run.twin.model)[n % len(nodes(run.twin.model))]
    target.fail = run.waiting = True
    with contextlib.suppress(OnPurpose):
        run.twin.own_loss(seed)
    target.fail = False


@operation("fail backward")
def _fail_in_backward(run: Run, n: int, seed: int) -> None:
    for loss in run.twin.pair(seed):  # what was complete before the failure stays
        loss.backward()
    run.twin.check_grads()
    run.twin.zero_grad()
    target = nodes(run.twin.model)[n % len(nodes(run.twin.model))]
    target.fail_backward = run.waiting = True
    with contextlib.suppress(OnPurpose):
        run.twin.own_loss(seed).backward()
    target.fail_backward = False
    if DEVICE != "cpu":  # a thread of autograd's may have the weights shown a moment longer
        with fc.no_sync(run.twin.model):
            pass
    for model in run.both:
        model.zero_grad()
