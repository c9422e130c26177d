"""Policies that choose which submodules become units."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from torch import nn

UnitOptions = dict[str, Any]
Decision = bool | UnitOptions


@dataclass(frozen=True)
class Policy:
    """Chooses units: ``decide(fqn, module, numel)`` says whether a submodule becomes one.

    ``numel`` is the number of parameter elements not yet taken by units inside the submodule,
    which the policy is asked about first. A dictionary instead of True overrides options of
    ``fully_shard`` for that unit. Combine policies with ``|``; the first that says yes decides.
    """

    decide: Callable[[str, nn.Module, int], Decision]
    description: str

    def __or__(self, other: Policy) -> Policy:
        def decide(fqn: str, module: nn.Module, numel: int) -> Decision:
            return self.decide(fqn, module, numel) or other.decide(fqn, module, numel)

        return Policy(decide, f"{self.description} | {other.description}")


def by_class(classes: Iterable[type[nn.Module]] | type[nn.Module]) -> Policy:
    """Every instance of one of ``classes`` is a unit."""
    kinds = (classes,) if isinstance(classes, type) else tuple(classes)
    names = ", ".join(sorted(kind.__name__ for kind in kinds))
    return Policy(lambda fqn, module, numel: isinstance(module, kinds), f"by_class({{{names}}})")


def by_size(
    min_numel: int,
    exclude: Iterable[type[nn.Module]] = (nn.ModuleList, nn.ModuleDict),
    leaf: Iterable[type[nn.Module]] = (nn.MultiheadAttention,),
) -> Policy:
    """Units of at least ``min_numel`` parameter elements, built from the leaves of the tree up.

    Args:
        exclude: classes that never become units; what is inside them still may.
        leaf: classes that are taken whole: nothing inside them becomes a unit.
    """
    excluded, whole = tuple(exclude), tuple(leaf)

    def decide(fqn: str, module: nn.Module, numel: int) -> Decision:
        return numel >= min_numel and not isinstance(module, excluded)

    policy = Policy(decide, f"by_size({min_numel})")
    return SizePolicy(policy.decide, policy.description, whole)


@dataclass(frozen=True)
class SizePolicy(Policy):
    """A policy that does not look inside modules of some classes."""

    leaves: tuple[type[nn.Module], ...] = ()


def by_fn(fn: Callable[[str, nn.Module], Decision]) -> Policy:
    """``fn(fqn, module)`` says whether a submodule is a unit, or with which options."""
    return Policy(
        lambda fqn, module, numel: fn(fqn, module), f"by_fn({getattr(fn, '__name__', fn)})"
    )
