"""What a fuzzed program does in odd moments: one operation inside another, switches unit by unit.

The operations are known to ``fuzz_operations.operations`` once this file has been imported.
"""

from __future__ import annotations

import contextlib
import random
from typing import Any

import torch
import torch.distributed as dist
from fuzz_options import is_ignored
from torch import Tensor, nn

import fsdp_compose as fc

from fuzz_operations import (
    Run,
    is_read_once,
    operation,
    operations,
    recomputes,
    recomputes_reentrantly,
)
from fuzz_programs import NodeModule, OnPurpose, nodes
from fuzz_twin import square_losses
from models import BATCH, units

READING = (
    "no_grad", "inference", "eval", "norm", "torch state", "stream", "functional", "copy",
    "optimizer state", "dropped", "fail",
)  # fmt: skip
"""Operations that leave weights and gradients as they are."""
TRAINING = (
    "accumulate", "accumulate sharded", "accumulate unsharded", "accumulate local", "no_sync",
    "two forwards", "crossed", "retain", "zero", "clip", "torch clip", "grad", "penalty",
    "gathered", "gathered loss", "hook", "second order", "half a graph", "module hook",
    "skippable", "participate", "skip here", "own reduction", "outside loss", "scope grad",
    "own gradient", "not last", "cleared in no_sync", "fail in no_sync", "fail backward", "divide",
    "scope gradients", "inputs", "hook on units", "switch units", "part", "enabled inside",
)  # fmt: skip
"""Operations that change gradients alone, and may stand between a forward and its backward."""
WRITING = ("state", "save", "write", "write data", "swap", "edit", "apply", "nested scopes")
"""Operations that change weights, and may stand where gradients wait."""


def _do(run: Run, names: tuple[str, ...], n: int, seed: int) -> str:
    """Do one of ``names``, which ``n`` says, as another operation."""
    name = names[n % len(names)]
    run.waiting = True
    operations[name](run, n // len(names), seed)
    return name


@operation("between")
def _between(run: Run, n: int, seed: int) -> None:
    """Another operation between a forward and its backward."""
    losses = run.twin.pair(seed)
    _do(run, READING + TRAINING, n, seed + 50)
    for loss in losses:
        loss.backward()
    run.twin.check_grads()


@operation("in a graph")
def _between_backwards(run: Run, n: int, seed: int) -> None:
    """Another operation between two backwards over one graph."""
    if is_read_once(run):
        return
    losses = run.twin.pair(seed)
    for loss in losses:
        loss.backward(retain_graph=True)
    _do(run, READING + TRAINING, n, seed + 50)
    for loss in losses:
        loss.backward()
    run.twin.check_grads()


@operation("while waiting")
def _while_gradients_wait(run: Run, n: int, seed: int) -> None:
    """Another operation while gradients wait to be reduced, or to be summed over replicas."""
    names = READING + WRITING
    is_local = n // len(names) % 3 == 2
    scope = fc.accumulate(run.twin.model, keep="no_all_reduce") if is_local else None
    with scope or fc.no_sync(run.twin.model):
        run.twin.train_on(seed + 20)
        _do(run, names, n, seed + 50)
        if n // len(names) % 2:
            run.twin.train_on(seed)
    fc.reduce_grads(run.twin.model)
    run.twin.check_grads()


def unit_modules(model: nn.Module) -> list[nn.Module]:
    return [found for unit in units(model) for ref in unit.modules if (found := ref()) is not None]


def _flip_switches(model: nn.Module, rng: random.Random) -> None:
    """Set what can be set unit by unit, all ranks alike."""
    modules = unit_modules(model)
    flags = (
        fc.set_requires_gradient_sync, fc.set_requires_all_reduce, fc.set_is_last_backward,
        fc.set_reshard_after_forward, fc.set_reshard_after_backward, fc.set_find_unused_parameters,
    )  # fmt: skip
    for module in modules:
        for flag in flags:
            if rng.random() < 0.3:
                flag(module, rng.random() < 0.5, recurse=False)
        for prefetch in (fc.set_forward_prefetch, fc.set_backward_prefetch):
            if rng.random() < 0.2:
                chosen = rng.sample(modules, rng.randint(0, min(2, len(modules))))
                prefetch(module, rng.choice((chosen, None)))


@contextlib.contextmanager
def _kept_switches(model: nn.Module) -> Any:
    """Scope after which the switches of units are as before, and nothing waits."""
    before = [(u, vars(u.switches).copy(), u.expected.forward_list) for u in units(model)]
    lists = [unit.expected.backward_list for unit in units(model)]
    yield
    for (unit, switches, forward_list), backward_list in zip(before, lists, strict=True):
        vars(unit.switches).update(switches)
        unit.expected.forward_list, unit.expected.backward_list = forward_list, backward_list
    fc.reduce_grads(model)
    fc.reshard(model)


@operation("switch units")
def _switch_units(run: Run, n: int, seed: int) -> None:
    """Microbatches in an order of their own, between which switches of units are set."""
    rng = random.Random(f"{seed} {n}")
    open_losses: list[tuple[Tensor, Tensor]] = []
    with _kept_switches(run.twin.model):
        for part in range(2 + n % 3):
            _flip_switches(run.twin.model, rng)
            open_losses.append(run.twin.pair(seed + 20 * part))
            if rng.random() < 0.3:
                with torch.no_grad():
                    run.infer(seed + 7)
            if rng.random() < 0.7:
                for loss in open_losses.pop(rng.randrange(len(open_losses))):
                    loss.backward()
        for losses in open_losses:
            for loss in losses:
                loss.backward()
    run.waiting = True
    run.twin.check_grads()


@operation("part")
def _run_a_part(run: Run, n: int, seed: int) -> None:
    """A unit inside the model is run alone, by its forward or by a method, or beside the model."""
    model, reference = run.both
    if any(node.skip is not None for node in nodes(model)):
        return
    inner = [
        (ours, plain)
        for ours, plain in zip(model.modules(), reference.modules(), strict=True)
        if ours is not model and fc.is_fully_sharded(ours)
    ]
    if not inner:
        return
    part, plain_part = inner[n % len(inner)]
    call: Any = None
    if n % 3 == 1 and isinstance(part, NodeModule):
        fc.register_forward_method(part, "encode")
        call = "encode"
    x, rows = run.twin.input(seed + 5), run.twin.all_inputs(seed + 5)
    ours = _losses_of(part, call, x, 1)[0]
    plain = _losses_of(plain_part, call, rows, run.case.world)
    run.compare("loss of a part", ours.detach(), plain[run.rank].detach())
    found = [ours, plain.mean()]
    if n % 3 == 2:
        found = [a + b for a, b in zip(found, run.twin.pair(seed), strict=True)]
    for loss in found:
        if loss.requires_grad:
            loss.backward()
    run.waiting = True
    run.twin.check_grads()


def _losses_of(part: nn.Module, method: str | None, x: Tensor, count: int) -> Tensor:
    if method is None:
        return square_losses(part, x, count)
    output: Tensor = getattr(part, method)(x.requires_grad_())
    return output.square().view(count, -1).mean(1)


@operation("nested scopes")
def _nested_scopes(run: Run, n: int, seed: int) -> None:
    """A scope over a part, in which a weight is written, around one over the model."""
    parts = [list(model.modules()) for model in run.both]
    chosen = n % len(parts[0])
    left = {id(m.weight) for m in run.twin.model.modules() if is_ignored(m)}  # each rank's own
    names = [name for name, p in parts[0][chosen].named_parameters() if id(p) not in left]
    if not names:
        return
    name = names[n % len(names)]
    with torch.no_grad(), fc.gathered(parts[0][chosen], writeback=True, rank0_only=n % 4 == 3):
        for own in parts:
            param = own[chosen].get_parameter(name)
            if n % 4 < 3 or own is parts[1] or run.rank == 0:
                param.mul_(0.95)
        if n % 4 < 3:
            with fc.summon_full_params(run.twin.model, recurse=n % 2 == 0):
                run.infer(seed)
    with torch.no_grad():
        run.infer(seed)


@operation("look")
def _read_in_scopes(run: Run, n: int, seed: int) -> None:
    """Full parameters in host memory, or on one rank, or of a unit alone."""
    options = (
        {"offload_to_cpu": True}, {"rank0_only": True}, {"with_grads": True},
        {"rank0_only": True, "offload_to_cpu": True},
    )[n % 4]  # fmt: skip
    with torch.no_grad(), fc.gathered(run.twin.model, **options):
        ours = dict(run.twin.model.named_parameters())
        for name, plain in run.twin.reference.named_parameters():
            if not options.get("rank0_only") or run.rank == 0:
                run.compare(name, ours[name].detach(), plain.detach())
            if options.get("with_grads") and plain.grad is not None:
                grad = ours[name].grad
                assert grad is not None, name
                run.compare(name, grad, plain.grad)


@operation("pending")
def _read_pending(run: Run, n: int, seed: int) -> None:
    """What waits, added up over the ranks, is what the plain model's gradient grew by."""
    for model in run.both:
        model.zero_grad()
    with fc.no_sync(run.twin.model):
        run.twin.train_on(seed)
        if n % 2:
            run.twin.train_on(seed + 20)
        found = fc.pending_gradients(run.twin.model)
        theirs = dict(run.twin.reference.named_parameters())
        for name, param in run.twin.model.named_parameters():
            pending, wanted = found.get(param), theirs[name].grad
            if pending is None or pending.unreduced is None:
                assert wanted is None or not wanted.any() or run.case.world > 1, name
                continue
            total = pending.unreduced.clone()
            if run.case.world > 1:
                dist.all_reduce(total)
            wanted = torch.zeros_like(total) if wanted is None else wanted
            run.compare(f"pending {name}", total / run.case.world, wanted)
    fc.reduce_grads(run.twin.model)
    run.twin.check_grads()


@operation("uneven")
def _run_out_of_batches(run: Run, n: int, seed: int) -> None:
    """A rank that has no batch joins the others, whose gradients are divided by their number."""
    world = run.case.world
    skips = any(name == "skip" for name, _ in run.case.ops)
    is_empty = any(not p.numel() for p in run.twin.reference.parameters())  # alone it is not sent
    is_plain = all(
        node.node.style in ("plain", "keywords", "object") for node in nodes(run.twin.model)
    )
    if world == 1 or recomputes(run) or skips or is_empty or not is_plain:
        return
    if not run.trained(run.twin.model):
        return
    run.twin.train_on(seed)  # so that the order of its units is known
    for model in run.both:
        model.zero_grad()
    left = n % world
    fc.set_gradient_divide_factor(run.twin.model, float(world - 1))
    if run.rank == left:
        x = run.twin.input(seed).requires_grad_()  # which frozen units hand on
        (fc.participate(run.twin.model, x).sum() * 0).backward()
    else:
        run.twin.own_loss(seed + 20).backward()
    fc.set_gradient_divide_factor(run.twin.model, None)
    rows = run.twin.all_inputs(seed + 20)
    rest = torch.cat([rows[: left * BATCH], rows[(left + 1) * BATCH :]])
    square_losses(run.twin.reference, rest, world - 1).mean().backward()
    run.twin.check_grads()


@operation("state type")
def _torch_state_of_a_kind(run: Run, n: int, seed: int) -> None:
    """What ``state_dict()`` gives in a scope is loaded after it, between a forward and others."""
    model = run.twin.model
    kind: Any = ("full", "sharded")[n % 2]
    with fc.state_dict_type(model, kind):
        run.twin.train_on(seed)
        saved = {name: value.clone() for name, value in model.state_dict().items()}
        if kind == "full":
            for name, wanted in run.twin.reference.state_dict().items():
                run.compare(name, saved[name], wanted)
        with torch.no_grad():
            for param in model.parameters():
                param.mul_(3)
        if n % 3 == 0:
            model.load_state_dict(saved)
    if n % 3:
        model.load_state_dict(saved)
    run.waiting = True
    with torch.no_grad():
        run.infer(seed)
    run.twin.check_grads()


@operation("fail in a scope")
def _fail_in_accumulate(run: Run, n: int, seed: int) -> None:
    """An error out of ``accumulate`` drops what waits, and leaves what is in ``.grad``."""
    keep: Any = ("sharded", "unsharded")[n % 2]
    before = [None if p.grad is None else p.grad.clone() for p in run.twin.reference.parameters()]
    with contextlib.suppress(OnPurpose), fc.accumulate(run.twin.model, keep=keep):
        run.twin.train_on(seed)
        raise OnPurpose
    if keep == "unsharded":
        for param, grad in zip(run.twin.reference.parameters(), before, strict=True):
            param.grad = grad
    run.twin.check_grads()


@operation("fail in a hook")
def _fail_in_a_hook(run: Run, n: int, seed: int) -> None:
    """An error in a hook, on all ranks, and a step after it."""
    model = run.twin.model

    def fail(*_: Any) -> Any:
        raise OnPurpose

    target = nodes(model)[n % len(nodes(model))]
    if n % 5 == 0:
        handle: Any = fc.register_post_reduce_hook(model, fail)
    elif n % 5 == 1:
        fc.register_comm_hook(model, None, fail)
        handle = None
    elif n % 5 == 2:
        handle = target.register_forward_hook(fail)
    elif n % 5 == 3:
        handle = target.register_forward_pre_hook(fail, prepend=True)
    else:
        param = model.get_parameter(run.name_of(n))
        if not param.requires_grad:
            return
        handle = param.register_post_accumulate_grad_hook(fail)
    run.waiting = True
    with contextlib.suppress(OnPurpose):
        run.twin.own_loss(seed).backward()
    if handle is None:
        fc.register_comm_hook(model, None, None)
    else:
        handle.remove()
    for either in run.both:
        either.zero_grad()
    run.twin.train_on(seed + 20)
    run.twin.check_grads()


@operation("fail again")
def _fail_in_a_recomputation(run: Run, n: int, seed: int) -> None:
    """A part that fails when it is computed again, in backward, and a step after it."""
    found = [node for node in nodes(run.twin.model) if node.node.recompute != "no"]
    if not found or (recomputes_reentrantly(run) and n % 2):
        return
    target = found[n % len(found)]
    run.waiting = True
    loss = run.twin.own_loss(seed)
    target.fail = True
    with contextlib.suppress(OnPurpose):
        loss.backward()
    target.fail = False
    for model in run.both:
        model.zero_grad()
    run.twin.train_on(seed + 20)
    run.twin.check_grads()


@operation("halved")
def _reduce_half(run: Run, n: int, seed: int) -> None:
    """A communication hook that halves gradients, over one backward or over several."""
    for model in run.both:
        model.zero_grad()

    def halve(state: dict[str, int], grads: fc.GradBucket) -> Tensor:
        state[grads.key] = state.get(grads.key, 0) + 1
        return fc.default_hook(state, grads) * 0.5

    calls: dict[str, int] = {}
    fc.register_comm_hook(run.twin.model, calls, halve)
    scope = fc.accumulate(run.twin.model, keep="unsharded") if n % 2 else contextlib.nullcontext()
    with scope:
        run.twin.train_on(seed)
        run.twin.train_on(seed + 20)
    fc.register_comm_hook(run.twin.model, None, None)
    for param in run.twin.reference.parameters():
        if param.grad is not None:
            param.grad *= 0.5
    run.twin.check_grads()
    for model in run.both:
        model.zero_grad()


@operation("reports")
def _report(run: Run, n: int, seed: int) -> None:
    """What is planned, explained, counted or drawn changes nothing."""
    scopes = (contextlib.nullcontext, fc.count_traffic, lambda: fc.trace(run.twin.model))
    with scopes[n % 3]():
        run.twin.train_on(seed)
    fc.explain(run.twin.model, run.twin.optim)
    assert len(fc.units_of(run.twin.model)) == len(units(run.twin.model))
    found = fc.parameters_by_name(run.twin.model)
    wanted = dict(run.twin.reference.named_parameters(remove_duplicate=False))
    assert found.keys() == wanted.keys()
    assert sum(map(len, fc.parameter_names(run.twin.model).values())) == len(wanted)
    run.twin.check_grads()
