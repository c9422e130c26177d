"""What a fuzzed program asks of autograd: inputs, transforms, saved tensors, checkpoints around.

The operations are known to ``fuzz_operations.operations`` once this file has been imported.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import fsdp_compose as fc

from fuzz_operations import Run, operation, recomputes, recomputes_reentrantly
from fuzz_twin import square_losses


def _around(use_reentrant: bool) -> Callable[[nn.Module, Tensor, int], Tensor]:
    def losses(model: nn.Module, x: Tensor, n: int) -> Tensor:
        output: Any = checkpoint(model, x.requires_grad_(), use_reentrant=use_reentrant)
        return output.square().view(n, -1).mean(1)

    return losses


@operation("checkpoint around")
def _checkpoint_the_model(run: Run, n: int, seed: int) -> None:
    """The whole model is computed again in backward, inside of which parts are too."""
    losses = _around(n % 2 == 0)
    if n % 3 == 0:
        pairs = [run.twin.pair(seed + part, losses) for part in (0, 20)]
        for pair in pairs:
            for loss in pair:
                loss.backward()
    else:
        run.twin.train_on(seed, losses)
    run.waiting = True
    run.twin.check_grads()


def _twice(model: nn.Module, x: Tensor, n: int) -> Tensor:
    return square_losses(model, model(x.requires_grad_()), n)


def _beside(model: nn.Module, x: Tensor, n: int) -> Tensor:
    kept = model(x.requires_grad_())
    with torch.no_grad():
        model(x)
    return square_losses(model, x, n) + (kept * 0.5).view(n, -1).mean(1)


@operation("twice through")
def _call_on_its_output(run: Run, n: int, seed: int) -> None:
    """The model is given its own output, or two calls share a loss with inference between them."""
    run.twin.train_on(seed, (_twice, _beside)[n % 2])
    run.twin.check_grads()


@operation("input gradient")
def _differentiate_inputs(run: Run, n: int, seed: int) -> None:
    """Gradients of inputs, where everything is frozen, or some, or nothing."""
    flags = []
    for model in run.both:
        flags.append([param.requires_grad for param in model.parameters()])
        for i, param in enumerate(model.parameters()):
            if n % 3 == 0 or (n % 3 == 1 and i % 2):
                param.requires_grad_(False)
    x, rows = run.twin.input(seed), run.twin.all_inputs(seed)
    ours = square_losses(run.twin.model, x, 1)[0]
    plain = square_losses(run.twin.reference, rows, run.case.world)
    if n % 2 and not recomputes_reentrantly(run):
        slopes = [torch.autograd.grad(loss, y)[0] for loss, y in ((ours, x), (plain.mean(), rows))]
    else:
        ours.backward()
        plain.mean().backward()
        slopes = [x.grad, rows.grad]  # type: ignore[list-item]
    wanted = slopes[1].view(run.case.world, *x.shape)[run.rank] * run.case.world
    run.compare("gradient of an input", slopes[0], wanted)
    for model, known in zip(run.both, flags, strict=True):
        for param, flag in zip(model.parameters(), known, strict=True):
            param.requires_grad_(flag)
    run.waiting = True
    run.twin.check_grads()


@operation("packed")
def _pack_saved_tensors(run: Run, n: int, seed: int) -> None:
    """What backward reads is packed into other memory meanwhile."""
    scopes = (
        lambda: torch.autograd.graph.save_on_cpu(),
        lambda: torch.autograd.graph.saved_tensors_hooks(torch.clone, torch.clone),
    )
    with scopes[n % 4 // 2]():
        losses = run.twin.pair(seed)
        if n % 2:
            for loss in losses:
                loss.backward()
    if not n % 2:
        for loss in losses:
            loss.backward()
    run.waiting = True
    run.twin.check_grads()


@operation("transform")
def _transform(run: Run, n: int, seed: int) -> None:
    """Transforms of ``torch.func`` over inputs compute what they do of the plain model."""
    if recomputes(run):
        return
    x = run.twin.input(seed)
    found = []
    for model in run.both:

        def loss(y: Tensor, model: nn.Module = model) -> Tensor:
            output: Tensor = model(y).square().mean()
            return output

        if n % 4 == 0 and run.case.world == 1:  # a process has one forward mode for all ranks
            values = torch.func.jvp(model, (x,), (torch.ones_like(x),))
        elif n % 4 < 2:
            output, pull = torch.func.vjp(model, x)
            values = (output, *pull(torch.ones_like(output)))
        elif n % 4 == 2:
            values = (torch.func.grad(loss)(x),)
        else:
            values = (torch.func.vmap(torch.func.grad(loss))(x[:, None]),)
        found.append(values)
    for ours, plain in zip(*found, strict=True):
        run.compare("a transform", ours.detach(), plain.detach())
    run.waiting = True


@operation("functional gradient")
def _train_given_tensors(run: Run, n: int, seed: int) -> None:
    """Some weights are given as tensors for one call, and both they and the rest are trained."""
    if recomputes(run):
        return
    model, reference = run.both
    names = [name for name, _ in reference.named_parameters()]
    chosen = names[n % 2 :: 2]

    def call(either: nn.Module, x: Tensor, count: int) -> tuple[dict[str, Tensor], Tensor]:
        given = {
            name: (reference.get_parameter(name).detach() * 0.9).requires_grad_() for name in chosen
        }
        output = torch.func.functional_call(either, given, (x.requires_grad_(),))
        return given, output.square().view(count, -1).mean(1)

    mine, loss = call(model, run.twin.input(seed), 1)
    loss.sum().backward()
    _, plain = call(reference, run.twin.all_inputs(seed), run.case.world)
    run.compare("functional loss", loss[0].detach(), plain[run.rank].detach())
    plain.mean().backward()
    theirs, own = call(reference, run.twin.input(seed), 1)
    if theirs:
        wanted = torch.autograd.grad(own.sum(), list(theirs.values()), allow_unused=True)
        for name, grad in zip(chosen, wanted, strict=True):
            ours = mine[name].grad
            assert (ours is None) == (grad is None), name
            if ours is not None and grad is not None:
                run.compare(f"gradient of the given {name}", ours, grad)
    run.waiting = True
    run.twin.check_grads()


@operation("product")
def _multiply_by_the_hessian(run: Run, n: int, seed: int) -> None:
    """A Hessian times a vector, by two backwards; with parameters, or by forward over backward."""
    if recomputes(run) or run.case.compute:
        return
    found = []
    for loss, model in zip(run.twin.pair(seed), run.both, strict=True):
        trained = run.trained(model)
        if not trained:
            return
        grads = torch.autograd.grad(loss, trained, create_graph=True, allow_unused=True)
        kept = [(p, g) for p, g in zip(trained, grads, strict=True) if g is not None]
        dot = sum((g * p.detach()).sum() for p, g in kept if g.requires_grad)
        if not isinstance(dot, Tensor):
            return
        found.append(torch.autograd.grad(dot, trained, allow_unused=True))
    run.waiting = True
    for ours, plain in zip(*found, strict=True):
        if ours is None or plain is None:
            assert plain is None or not plain.any()
        else:
            run.compare("a product", run.whole(ours), plain)


@operation("several roots")
def _several_roots(run: Run, n: int, seed: int) -> None:
    """One backward of several losses, each with a weight of its own."""
    first, second = (run.twin.pair(s) for s in (seed, seed + 20))
    for a, b in zip(first, second, strict=True):
        weights = [torch.full_like(a, 0.5), torch.full_like(b, float(n % 3))]
        torch.autograd.backward([a, b], weights)
    run.twin.check_grads()


@operation("clip by value")
def _clip_by_value(run: Run, n: int, seed: int) -> None:
    """Functions of torch over all gradients: clipping by value, norms by hand, division."""
    run.twin.train_on(seed)
    params = [run.trained(model) for model in run.both]
    if all(param.grad is None for param in params[1]):
        return
    if n % 3 == 0:
        for each in params:
            torch.nn.utils.clip_grad_value_(each, 0.01, foreach=bool(n % 2))
    elif n % 3 == 1:
        found = [
            [torch.linalg.vector_norm(p.grad) for p in each if p.grad is not None and p.numel()]
            for each in params
        ]
        for ours, plain in zip(*found, strict=True):
            run.compare("norm of a gradient", run.whole(ours), plain)
    else:
        grads = [[p.grad for p in each if p.grad is not None] for each in params]
        for each in grads:
            if each:
                torch._foreach_mul_(each, 0.5)  # type: ignore[arg-type]
        order = (2.0, 1.0, float("inf"))[n % 9 // 3]
        plain_grads = [grad for grad in grads[1] if grad.numel()]
        if plain_grads:
            wanted = torch.nn.utils.get_total_norm(plain_grads, order)
            run.compare("norm", fc.grad_norm(run.twin.model, norm_type=order), wanted)
    run.twin.check_grads()
