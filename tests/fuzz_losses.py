"""What a fuzzed program computes beyond a plain loss: of parameters, of gradients, through hooks.

The operations are known to ``fuzz_operations.operations`` once this file has been imported.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

import fsdp_compose as fc

from fuzz_operations import Run, is_read_once, operation, recomputes_reentrantly
from fuzz_programs import nodes
from fuzz_twin import square_losses

REDUCTIONS: tuple[Callable[[Tensor], Tensor], ...] = (
    lambda p: p.norm(),
    lambda p: p.sum(),
    lambda p: p.square().sum(),
    lambda p: (2 * p - 1).abs().sum(),
    lambda p: torch.linalg.vector_norm(p, 1),
)
"""Of a parameter that is read outside of forward."""


def _weight_of(rank: int) -> float:
    """How much a rank's loss counts such a reduction: each rank another part."""
    return 0.05 * (rank + 1)


@operation("outside loss")
def _read_outside_of_forward(run: Run, n: int, seed: int) -> None:
    """A loss with a term of a parameter beside the forward, whose weight differs by rank."""
    name, reduce = run.name_of(n), REDUCTIONS[n % len(REDUCTIONS)]
    ours, plain = run.twin.pair(seed)
    mean = sum(map(_weight_of, range(run.case.world))) / run.case.world
    for loss, model, weight in zip(
        (ours, plain), run.both, (_weight_of(run.rank), mean), strict=True
    ):
        param = model.get_parameter(name)
        if n % 2 or not param.requires_grad:
            (loss + weight * reduce(param)).backward()
        else:  # beside a backward of its own
            loss.backward()
            (weight * reduce(param)).backward()
    run.twin.check_grads()


@operation("second order")
def _differentiate_twice(run: Run, n: int, seed: int) -> None:
    """A backward through the gradients of parameters."""
    if recomputes_reentrantly(run) or is_read_once(run):
        return
    for loss, model in zip(run.twin.pair(seed), run.both, strict=True):
        trained = run.trained(model)
        if not trained:
            return
        grads = torch.autograd.grad(loss, trained, create_graph=True, allow_unused=True)
        penalty = sum(g.square().sum() for g in grads if g is not None and g.requires_grad)
        if isinstance(penalty, Tensor):
            penalty.backward()
    run.waiting = True
    run.twin.check_grads()


@operation("scaler")
def _step_with_a_scaler(run: Run, n: int, seed: int) -> None:
    """A scaled loss, whose overflow on one rank has every rank leave out the step."""
    if run.twin.optim is None or run.twin.plain_optim is None:
        return
    for model in run.both:
        model.zero_grad()
    scaler = fc.GradScaler("cpu", init_scale=4.0)
    ours, plain = run.twin.pair(seed)
    plain.backward()
    stepped = [p for group in run.twin.plain_optim.param_groups for p in group["params"]]
    used = [p for p in stepped if p.grad is not None]
    overflows = n % 3 == 0 and any(p.numel() for p in used)
    is_hit = overflows and run.rank == n % run.case.world
    scaler.scale(ours * (float("inf") if is_hit else 1.0)).backward()
    if used:
        scaler.step(run.twin.optim)
        scaler.update()
        assert scaler.get_scale() == (2.0 if overflows else 4.0)
    if used and not overflows:
        run.twin.plain_optim.step()
    for model in run.both:
        model.zero_grad()


@operation("module hook")
def _hook_on_a_module(run: Run, n: int, seed: int) -> None:
    """Hooks of users on a module change its inputs, its outputs and their gradients."""

    def scale_input(module: nn.Module, args: tuple[Any, ...]) -> Any:
        return tuple(0.9 * x for x in args)

    def scale_output(module: nn.Module, args: Any, output: Tensor) -> Tensor:
        return 0.9 * output

    def scale_gradient(module: nn.Module, grads: Any, outputs: Any) -> Any:
        return tuple(None if g is None else 0.5 * g for g in grads)

    handles = []
    for model in run.both:
        wrapped = [m for node in nodes(model) if node.node.style != "plain" for m in node.children_]
        found = [node for node in nodes(model) if node not in wrapped]
        module = found[n % len(found)]
        if n % 3 == 0:
            handles.append(module.register_forward_pre_hook(scale_input, prepend=bool(n % 2)))
        elif n % 3 == 1:
            handles.append(module.register_forward_hook(scale_output, prepend=bool(n % 2)))
        else:
            handles.append(module.register_full_backward_hook(scale_gradient))
    run.twin.train_on(seed)
    for handle in handles:
        handle.remove()
    run.twin.check_grads()


@operation("half a graph")
def _backward_by_parts(run: Run, n: int, seed: int) -> None:
    """Two losses of one forward, each with a backward of its own."""
    if is_read_once(run):
        return
    for model, x, count in zip(
        run.both,
        (run.twin.input(seed), run.twin.all_inputs(seed)),
        (1, run.case.world),
        strict=True,
    ):
        losses = square_losses(model, x, count)
        total = losses.mean()
        (0.25 * total).backward(retain_graph=True)
        (total * total).backward() if count == 1 else (losses * losses).mean().backward()
    run.twin.check_grads()


@operation("enabled inside")
def _enable_inside(run: Run, n: int, seed: int) -> None:
    """A forward under ``no_grad`` that turns gradients on inside, and a backward after it."""
    outputs = []
    for model, x in zip(run.both, (run.twin.input(seed), run.twin.all_inputs(seed)), strict=True):
        call: Any = torch.enable_grad()(model.forward)
        model.forward = call
        with torch.no_grad():
            outputs.append(model(x))
        del model.forward
    for output in outputs:
        if output.requires_grad:
            output.square().mean().backward()
    run.twin.check_grads()
