"""``apply``: ``nn.Module.apply`` on full parameters, unit by unit, and what it writes is kept."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack, nullcontext
from typing import Any, TypeVar

import torch
from torch import nn

from fsdp_compose.base.arguments import check_function, check_module
from fsdp_compose.core.state import find_state
from fsdp_compose.scopes.gathered import find_units, gathered
from fsdp_compose.sharded import as_first_rank, find_generator

M = TypeVar("M", bound=nn.Module)


@torch.no_grad()
def apply(module: M, fn: Callable[[nn.Module], Any]) -> M:
    """Call ``fn`` on every submodule and then on ``module``, in the order of ``nn.Module.apply``.

    ``fn`` finds the parameters of the unit that its argument belongs to in full, and what it writes
    is kept. Units around that one are gathered too; those inside its argument are not any more.
    Every rank must call this, and write the same values, as each keeps its own slice of them. So
    all ranks draw with torch's generators of the first one, whatever they were seeded with; where a
    rank's own were in another state, they go on from it afterwards.

    Returns:
        ``module``.

    Raises:
        RuntimeError: ranks wrote different values, which no rank keeps of that unit.
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
    with ExitStack() as stack:
        _draw_alike(module, stack)
        if state is None:
            stack.enter_context(gathered(module, writeback=True, recurse=False))
        _visit(module, fn)
    return module


def _draw_alike(module: nn.Module, stack: ExitStack) -> None:
    """Have all ranks draw what the first one draws, on the host and on the units' devices."""
    meshes = dict.fromkeys(b.mesh for u in find_units(module, recurse=True) for b in u.buckets)
    for kind in dict.fromkeys(mesh.device for mesh in meshes):
        groups = dict.fromkeys(g for mesh in meshes if mesh.device == kind for g in mesh.groups)
        for device in dict.fromkeys((torch.device("cpu"), kind)):
            what = f"draw random numbers in apply on {device.type}"
            stack.enter_context(as_first_rank(find_generator(device), groups, kind, what))


def _visit(module: nn.Module, fn: Callable[[nn.Module], object]) -> None:
    is_unit = find_state(module) is not None
    with gathered(module, writeback=True, recurse=False) if is_unit else nullcontext():
        for child in module.children():
            _visit(child, fn)
        fn(module)
