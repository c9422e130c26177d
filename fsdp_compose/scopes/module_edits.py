"""Edits of modules inside a scope are kept whole, or all of them are undone.

Parametrisations replace a layer's weight by what they compute it from. Of a layer that tensor
parallelism split, that may be a partial sum, which nothing could shard.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn
from torch.distributed.tensor import DTensor

from fsdp_compose.base.torch_private import parameter_slots
from fsdp_compose.core.state import Unit


@dataclass(frozen=True, eq=False)
class Before:
    """What a module was: its class, and its attributes with a copy of each dictionary in use."""

    module: nn.Module
    kind: type[nn.Module]
    attributes: dict[str, Any]
    copies: dict[str, dict[Any, Any]]

    @classmethod
    def of(cls, module: nn.Module) -> Before:
        attributes = dict(module.__dict__)
        copies = {k: dict(v) for k, v in attributes.items() if isinstance(v, dict) and v}
        return cls(module, type(module), attributes, copies)

    def restore(self) -> None:
        self.module.__class__ = self.kind
        self.module.__dict__.clear()
        self.module.__dict__.update(self.attributes)
        for key, current in self.attributes.items():
            if isinstance(current, dict):
                current.clear()
                current.update(self.copies.get(key, {}))


def remember_modules(module: nn.Module) -> list[Before]:
    """What the modules with parameters are now, for ``check_edits`` and ``restore_edited``."""
    return [Before.of(submodule) for submodule in module.modules() if parameter_slots(submodule)]


def restore_edited(before: Iterable[Before]) -> None:
    """Give back the modules that a parameter was taken out of, as pruning does."""
    for one in before:
        if not one.copies["_parameters"].keys() <= parameter_slots(one.module).keys():
            one.restore()


def check_edits(module: nn.Module, units: Iterable[Unit], before: Sequence[Before]) -> None:
    """Raise where tensor parallelism split a parameter, and one that was made of it is partial.

    Raises:
        ValueError: naming it; the modules are what they were.
    """
    if not any(unit.links.dtensors for unit in units):
        return
    for path, submodule in module.named_modules():
        for key, param in parameter_slots(submodule).items():
            if isinstance(param, DTensor) and any(p.is_partial() for p in param.placements):
                placements = param.placements
                for one in before:
                    one.restore()
                raise ValueError(
                    f"gathered: parameter {f'{path}.{key}' if path else key!r} was made in the "
                    f"scope, with placements {placements}; wanted Shard and Replicate only. Weight "
                    "norm of a row-parallel layer is taken over the dimension that is split, and "
                    "torch computes no gradient for it: leave it off layers that tensor "
                    "parallelism splits. The modules are as they were before the scope."
                )
