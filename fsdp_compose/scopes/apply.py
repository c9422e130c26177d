"""``apply``: ``nn.Module.apply`` on full parameters, unit by unit, and what it writes is kept."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any, TypeVar

import torch
from torch import nn

from fsdp_compose.base.arguments import check_function, check_module
from fsdp_compose.core.state import find_state
from fsdp_compose.scopes.gathered import gathered

M = TypeVar("M", bound=nn.Module)


@torch.no_grad()
def apply(module: M, fn: Callable[[nn.Module], Any]) -> M:
    """Call ``fn`` on every submodule and then on ``module``, in the order of ``nn.Module.apply``.

    ``fn`` finds the parameters of the unit that its argument belongs to in full, and what it writes
    is kept. Units around that one are gathered too; those inside its argument are not any more.
    Every rank must call this, and write the same values: each keeps its own slice of what it wrote
    (``seeded_init`` gives every rank the same random numbers).

    Returns:
        ``module``.

    Raises:
        ShardedWeightError: ``fn`` reads the parameters of a unit inside its argument.

    Example:
        >>> model = fully_shard(nn.Linear(2, 2))
        >>> model = apply(model, lambda module: nn.init.ones_(module.bias))
        >>> model.bias.full_tensor()
        tensor([1., 1.])
    """
    check_function("apply", "fn", fn, "(module)")
    check_module("apply", module)
    state = find_state(module)
    with gathered(module, writeback=True, recurse=False) if state is None else nullcontext():
        _visit(module, fn)
    return module


def _visit(module: nn.Module, fn: Callable[[nn.Module], object]) -> None:
    state = find_state(module)
    is_closed = state is not None and state.unit.opened is None
    scope = gathered(module, writeback=True, recurse=False) if is_closed else nullcontext()
    with scope:
        for child in module.children():
            _visit(child, fn)
        fn(module)
