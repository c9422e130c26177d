"""Errors that a fuzzed program meets at any place of a step, after which the next step is exact.

The operation is known to ``fuzz_operations.operations`` once this file has been imported.
"""

from __future__ import annotations

import contextlib
import random
from collections.abc import Callable
from typing import Any

import torch
from fuzz_surgery import leaf_modules
from torch import Tensor, nn

import fsdp_compose as fc

from fuzz_operations import Run, is_read_once, operation
from fuzz_programs import OnPurpose, nodes

Place = Callable[[Run, random.Random, Callable[..., Any]], contextlib.AbstractContextManager[Any]]
"""``(run, rng, fail)``: a scope in which a step of the sharded model calls ``fail``."""


@contextlib.contextmanager
def _in_a_module(run: Run, rng: random.Random, fail: Callable[..., Any]) -> Any:
    """In a hook around the forward or backward of some module."""
    module: nn.Module = rng.choice([*nodes(run.twin.model), *leaf_modules(run.twin.model)])
    kind = rng.randrange(5)
    if kind == 0:
        handle = module.register_forward_pre_hook(fail, prepend=rng.random() < 0.5)
    elif kind == 1:
        handle = module.register_forward_hook(fail, prepend=rng.random() < 0.5)
    elif kind == 2:
        handle = module.register_forward_hook(fail, always_call=True)
    elif kind == 3:
        handle = module.register_full_backward_pre_hook(fail)
    else:
        handle = module.register_full_backward_hook(fail)
    yield
    handle.remove()


@contextlib.contextmanager
def _in_a_parameter(run: Run, rng: random.Random, fail: Callable[..., Any]) -> Any:
    """In a hook on a gradient, or on one that is complete."""
    param = run.twin.model.get_parameter(run.name_of(rng.randrange(100)))
    if not param.requires_grad:
        yield
        return
    if rng.random() < 0.5:
        handle = param.register_hook(fail)
    else:
        handle = param.register_post_accumulate_grad_hook(fail)
    yield
    handle.remove()


@contextlib.contextmanager
def _in_a_saved_tensor(run: Run, rng: random.Random, fail: Callable[..., Any]) -> Any:
    """When backward, or forward, asks for what was packed for it."""
    left = [rng.randrange(6)]

    def count(tensor: Tensor) -> Tensor:
        left[0] -= 1
        return fail() if left[0] < 0 else tensor

    keep = lambda tensor: tensor  # noqa: E731
    pair = (keep, count) if rng.random() < 0.5 else (count, keep)
    with torch.autograd.graph.saved_tensors_hooks(*pair):
        yield


@contextlib.contextmanager
def _in_communication(run: Run, rng: random.Random, fail: Callable[..., Any]) -> Any:
    """In a hook of this library, at one of its calls."""
    left = [rng.randrange(3)]

    def count(*given: Any) -> Any:
        left[0] -= 1
        if left[0] < 0:
            fail()
        return fc.default_hook(*given) if isinstance(given[-1], fc.GradBucket) else None

    if rng.random() < 0.5:
        fc.register_comm_hook(run.twin.model, None, count)
        yield
        fc.register_comm_hook(run.twin.model, None, None)
    else:
        handle = fc.register_post_reduce_hook(run.twin.model, count)
        yield
        handle.remove()


PLACES: tuple[Place, ...] = (_in_a_module, _in_a_parameter, _in_a_saved_tensor, _in_communication)


def _scope(run: Run, rng: random.Random) -> contextlib.AbstractContextManager[Any]:
    """What is open around a step that fails."""
    model = run.twin.model
    scopes: list[Callable[[], Any]] = [
        contextlib.nullcontext,
        contextlib.nullcontext,
        lambda: fc.no_sync(model),
        lambda: fc.accumulate(model, keep="sharded"),
        lambda: fc.accumulate(model, keep="unsharded"),
        lambda: fc.gathered(model),
        torch.no_grad,
    ]
    return rng.choice(scopes)()  # type: ignore[no-any-return]


@operation("fail anywhere")
def _fail_anywhere(run: Run, n: int, seed: int) -> None:
    """An error, or an interrupt, in a hook of any kind; some of them are met twice."""
    rng = random.Random(f"{seed} {n}")
    params = list(run.twin.model.parameters())  # which modules may not show after an interrupt
    error = KeyboardInterrupt if rng.random() < 0.2 else OnPurpose
    before = rng.randrange(4)

    def fail(*_: Any) -> Any:
        raise error

    run.waiting = True
    for _ in range(rng.choice((1, 1, 2))):
        if before == 1:
            fc.unshard(run.twin.model)
        elif before == 2:
            fc.prefetch_units(run.twin.model, rng.choice(fc.units_of(run.twin.model)))
        with contextlib.suppress(error), _scope(run, rng):
            early = rng.choice((0, 0, 1)) and not is_read_once(run)  # a hook is new to it then
            losses = [run.twin.own_loss(seed)] if early else []
            with _open(rng.choice(PLACES)(run, rng, fail)):
                losses.append(run.twin.own_loss(seed + 20))
                for loss in losses[:: rng.choice((1, -1))]:
                    if loss.requires_grad:
                        loss.backward()
        for param in (*params, *run.twin.reference.parameters()):
            param.grad = None
        losses = []
    run.twin.train_on(seed + 40)
    run.twin.check_grads()
    fc.reshard(run.twin.model)


@contextlib.contextmanager
def _open(place: contextlib.AbstractContextManager[Any]) -> Any:
    """As ``place``, which is left without a word of what failed in it."""
    with contextlib.ExitStack() as stack:
        place.__enter__()
        stack.callback(place.__exit__, None, None, None)
        yield
