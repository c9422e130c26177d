"""What a fuzzed program calls beside its steps: gradients in scopes, plain parameters, conversions.

The operations are known to ``fuzz_operations.operations`` once this file has been imported.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence

import torch
from torch import nn

import fsdp_compose as fc

from fuzz_operations import Run, operation, recomputes, recomputes_reentrantly
from fuzz_programs import LeafModule, OnPurpose, nodes
from fuzz_twin import square_losses
from models import Tolerance, units


@operation("cleared in no_sync")
def _cleared_in_no_sync(run: Run, n: int, seed: int) -> None:
    with fc.no_sync(run.twin.model):
        run.twin.train_on(seed + 20)
        for model in run.both:
            model.zero_grad(set_to_none=bool(n % 2))
        run.twin.train_on(seed)
    fc.reduce_grads(run.twin.model)
    run.twin.check_grads()


@operation("one cleared")
def _one_cleared(run: Run, n: int, seed: int) -> None:
    """A parameter's gradient is dropped while those beside it wait with it."""
    scopes = (fc.no_sync, lambda model: fc.accumulate(model, keep="no_all_reduce"))
    with scopes[n % 2](run.twin.model):
        run.twin.train_on(seed + 20)
        for model in run.both:
            model.get_parameter(run.name_of(n)).grad = None
        run.twin.train_on(seed)
    fc.reduce_grads(run.twin.model)
    run.twin.check_grads()


@operation("not last")
def _not_last(run: Run, n: int, seed: int) -> None:
    """Where gradients are offloaded, those of microbatches wait on the device or on the host."""
    model = run.twin.model
    fc.set_is_last_backward(model, False)
    run.twin.train_on(seed + 20)
    if n % 3 == 0:
        for either in run.both:
            either.zero_grad()
    fc.set_is_last_backward(model, True)
    if n % 2:
        run.twin.train_on(seed)
    else:
        fc.reduce_grads(model)
    run.twin.check_grads()


@operation("fail in no_sync")
def _fail_in_no_sync(run: Run, n: int, seed: int) -> None:
    """A forward that fails leaves what waits; a backward that fails drops it."""
    before = [None if p.grad is None else p.grad.clone() for p in run.twin.reference.parameters()]
    target = nodes(run.twin.model)[n % len(nodes(run.twin.model))]
    was_run, failed = all(node.skip is None for node in nodes(run.twin.model)), False
    with fc.no_sync(run.twin.model):
        run.twin.train_on(seed + 20)
        run.waiting = True
        target.fail, target.fail_backward = n % 2 == 0, n % 2 == 1
        try:
            run.twin.own_loss(seed).backward()
        except OnPurpose:
            failed = True
        finally:
            target.fail = target.fail_backward = False
        if not failed:  # the node was not run, or its inputs need no gradient
            assert n % 2 or not was_run
            losses = square_losses(run.twin.reference, run.twin.all_inputs(seed), run.case.world)
            losses.mean().backward()
    fc.reduce_grads(run.twin.model)
    if failed and n % 2:
        for param, grad in zip(run.twin.reference.parameters(), before, strict=True):
            param.grad = grad
    run.twin.check_grads()


@operation("scope gradients")
def _edit_gradients_in_a_scope(run: Run, n: int, seed: int) -> None:
    """Full gradients that are edited in a scope are what the parameters have after it."""
    run.twin.train_on(seed)
    with fc.gathered(run.twin.model, with_grads=True, writeback=True):
        for ours, plain in zip(run.trained(run.twin.model), run.trained(run.twin.reference)):
            assert (ours.grad is None) == (plain.grad is None)
            if ours.grad is not None and plain.grad is not None:
                run.compare("gradient in a scope", ours.grad, plain.grad)
                ours.grad.mul_(0.5)
                plain.grad.mul_(0.5)
        if n % 2:
            for model in run.both:
                model.get_parameter(run.name_of(n)).grad = None
    run.twin.check_grads()


@operation("plain optimizer")
def _step_plain_parameters(run: Run, n: int, seed: int) -> None:
    """SGD over plain tensors that share the shards' memory."""
    for model in run.both:
        model.zero_grad()
    take: Callable[[nn.Module], Sequence[nn.Parameter]]
    take = fc.local_parameters if n % 2 else fc.flat_parameters
    try:
        params = take(run.twin.model)
    except ValueError:  # one of a buffer was frozen later
        assert take is fc.flat_parameters
        return
    trained = run.trained(run.twin.reference)
    if not trained:
        return
    pairs = [torch.optim.SGD(either, lr=0.05) for either in (params, trained)]
    for part in range(2):
        run.twin.train_on(seed + 20 * part)
        if all(p.grad is None for p in trained):
            break
        for optim in pairs:
            optim.step()
            optim.zero_grad()
    for model in run.both:  # the plain parameters' are not the model's before the next backward
        model.zero_grad()


@operation("convert")
def _convert(run: Run, n: int, seed: int) -> None:
    """To another dtype and back, with gradients there or waiting, as a plain module."""
    scope = contextlib.nullcontext() if n % 2 else fc.no_sync(run.twin.model)
    with scope:
        run.twin.train_on(seed)
    for optim in filter(None, (run.twin.optim, run.twin.plain_optim)):
        optim.state.clear()  # its dtypes are those of before
    run.twin.tolerance = Tolerance(1e-3, 1e-4)
    for model in run.both:
        model.to(torch.float32)
        if n % 3:
            model.to(torch.float64)
    fc.reduce_grads(run.twin.model)
    run.waiting = True


@operation("ahead")
def _gather_ahead(run: Run, n: int, seed: int) -> None:
    """Units that are gathered ahead by name, written, and used by a later pass or by none."""
    found = [ref() for unit in units(run.twin.model) for ref in unit.modules]
    chosen = found[n % len(found)]
    assert chosen is not None
    fc.prefetch_units(run.twin.model, chosen)
    if n % 3 == 0:
        with torch.no_grad():
            for model in run.both:
                for param in model.parameters():
                    param.mul_(0.98)
    if n % 2:
        run.twin.train_on(seed)
    run.waiting = True


@operation("apply")
def _apply(run: Run, n: int, seed: int) -> None:
    """A function over modules writes parameters in full."""

    def scale(module: nn.Module) -> None:
        if isinstance(module, LeafModule):
            with torch.no_grad():
                module.weight.mul_(0.9)

    fc.apply(run.twin.model, scale)
    run.twin.reference.apply(scale)
    run.waiting = True


@operation("stream")
def _stream(run: Run, n: int, seed: int) -> None:
    """Full parameters come one after the other."""
    theirs = dict(run.twin.reference.named_parameters(remove_duplicate=False))
    for name, full in fc.iter_full(run.twin.model, bucket_bytes=(64, 1 << 20)[n % 2]):
        run.compare(name, full, theirs[name].detach())


@operation("own gradient")
def _assign_gradient(run: Run, n: int, seed: int) -> None:
    """A whole gradient that is assigned is cut, and takes the place of the one that was there.

    Where ranks assume that one of them uses the parameter, no rank is to drop what waits of it: the
    next step would say so, as all would have done alike.
    """
    name = run.name_of(n)
    assumed = run.case.backend != "gloo" and any(op == "skip here" for op, _ in run.case.ops)
    scope = contextlib.nullcontext() if n % 2 or assumed else fc.no_sync(run.twin.model)
    with scope:
        run.twin.train_on(seed)
        for model in run.both:
            param = model.get_parameter(name)
            if param.requires_grad:
                like = run.twin.reference.get_parameter(name).detach()
                param.grad = torch.full_like(like, 0.01 * (n + 1), device=param.device)
    fc.reduce_grads(run.twin.model)
    run.twin.check_grads()


@operation("hook on units")
def _post_reduce_hook(run: Run, n: int, seed: int) -> None:
    """A hook on units halves the gradients that have just been reduced, once."""
    for model in run.both:
        model.zero_grad()

    def halve(module: nn.Module, params: list[nn.Parameter]) -> None:
        for param in params:
            assert param.grad is not None
            param.grad.mul_(0.5)

    handle = fc.register_post_reduce_hook(run.twin.model, halve)
    run.twin.train_on(seed)
    handle.remove()
    for param in run.twin.reference.parameters():
        if param.grad is not None:
            param.grad.mul_(0.5)
    if not recomputes_reentrantly(run):  # each recomputation may bring some of them by itself
        run.twin.check_grads()
    run.twin.zero_grad()


@operation("interrupt")
def _interrupt_a_child(run: Run, n: int, seed: int) -> None:
    """A forward goes on without a child that an interrupt ended, and the next ones are right."""

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    if recomputes(run):
        return
    params = [param for model in run.both for param in model.parameters()]  # as an optimizer's
    handles = []
    for model in run.both:
        node = nodes(model)[n % len(nodes(model))]
        node.stops = n % len(node.children_)
        handles.append(node.children_[node.stops].register_forward_pre_hook(interrupt))
    with torch.set_grad_enabled(n % 2 == 0):
        run.infer(seed)
    for model, handle in zip(run.both, handles, strict=True):
        nodes(model)[n % len(nodes(model))].stops = None
        handle.remove()
    run.waiting = True
    with torch.no_grad():
        for param in params:
            param.mul_(0.98)
    run.twin.train_on(seed + 20)
    run.twin.check_grads()
