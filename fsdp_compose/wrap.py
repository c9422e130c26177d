"""Policies that choose which submodules become units."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from torch import nn

from fsdp_compose.trace import ExecutionOrder, TracingConfig, trace_execution_order

UnitOptions = dict[str, Any]
Decision = bool | UnitOptions
Decide = Callable[[str, nn.Module, int], Decision]
Classes = type[nn.Module] | Iterable[type[nn.Module]]


@dataclass(frozen=True)
class Policy:
    """Chooses units; combine policies with ``|``, of which the first that says yes decides.

    Submodules are asked about innermost first.

    Attributes:
        start: given the module that is sharded, returns ``decide(fqn, submodule, numel)``, where
            ``numel`` is the number of parameter elements in the submodule that no unit inside it
            has taken. A dictionary instead of True overrides options of ``fully_shard`` for the
            unit.
        description: what the policy is, for messages.
        leaves: classes that are taken whole: nothing inside one becomes a unit, whatever the policy
            is combined with.
    """

    start: Callable[[nn.Module], Decide]
    description: str
    leaves: tuple[type[nn.Module], ...] = ()

    def __or__(self, other: Policy) -> Policy:
        def start(root: nn.Module) -> Decide:
            first, second = self.start(root), other.start(root)
            return lambda *question: first(*question) or second(*question)

        leaves = tuple(dict.fromkeys((*self.leaves, *other.leaves)))
        return Policy(start, f"{self.description} | {other.description}", leaves)


def by_class(classes: Classes, **options: Any) -> Policy:
    """Every instance of one of ``classes`` is a unit, with ``options`` of its own if given."""
    kinds = _classes(classes, "by_class")
    names = ", ".join(sorted(kind.__name__ for kind in kinds))

    def decide(fqn: str, module: nn.Module, numel: int) -> Decision:
        return isinstance(module, kinds) and (options or True)

    return Policy(lambda root: decide, f"by_class({{{names}}})")


def by_size(
    min_numel: int,
    exclude: Classes = (nn.ModuleList, nn.ModuleDict),
    leaf: Classes = (nn.MultiheadAttention,),
) -> Policy:
    """Units of at least ``min_numel`` parameter elements, built from the leaves of the tree up.

    Args:
        exclude: classes that never become units; what is inside them still may.
        leaf: classes that are taken whole: nothing inside them becomes a unit, also where the
            policy is combined with others.
    """
    excluded = _classes(exclude, "by_size")

    def decide(fqn: str, module: nn.Module, numel: int) -> Decision:
        return numel >= min_numel and not isinstance(module, excluded)

    return Policy(lambda root: decide, f"by_size({min_numel})", _classes(leaf, "by_size"))


def by_fn(fn: Callable[[str, nn.Module], Decision]) -> Policy:
    """``fn(fqn, module)`` says whether a submodule is a unit, or with which options."""

    def decide(fqn: str, module: nn.Module, numel: int) -> Decision:
        decision: Any = fn(fqn, module)
        if decision is not None and not isinstance(decision, bool | dict):
            raise TypeError(
                f"by_fn: {getattr(fn, '__name__', fn)} returned {decision!r} for {fqn!r}; wanted a "
                "bool, or a dict of options of fully_shard for that unit."
            )
        return True if decision == {} else decision or False

    return Policy(lambda root: decide, f"by_fn({getattr(fn, '__name__', fn)})")


def by_execution_order(
    sample_args: Any,
    min_numel: int = 1_000_000,
    *,
    kwargs: Mapping[str, Any] | None = None,
    config: TracingConfig | None = None,
) -> Policy:
    """Units whose parameters are used one after another, by a symbolic trace of the module.

    A submodule that is called in the trace is a unit when the parameters left to it number at least
    ``min_numel`` elements and no parameter from outside it is used between its first and its last.
    A container whose parts run far apart, with other parts between them, would stay gathered all
    the while; by size alone it would be chosen.

    Args:
        sample_args: arguments of the module's forward; see ``trace_execution_order``.
    """

    def start(root: nn.Module) -> Decide:
        order = trace_execution_order(root, sample_args, config, kwargs=kwargs)
        called, spans = set(order.modules), _spans(root, order)

        def decide(fqn: str, module: nn.Module, numel: int) -> Decision:
            if numel < min_numel or fqn not in called:
                return False
            inside = {id(p) for p in module.parameters()}
            ends = [spans[key] for key in inside if key in spans]
            if not ends:
                return False
            first, last = min(a for a, _ in ends), max(b for _, b in ends)
            return all(id(p) in inside for p in uses[first : last + 1])

        parameters = dict(root.named_parameters(remove_duplicate=False))
        uses = [parameters[name] for _, name in order.uses]
        return decide

    return Policy(start, f"by_execution_order(min_numel={min_numel})", (nn.MultiheadAttention,))


def _spans(root: nn.Module, order: ExecutionOrder) -> dict[int, tuple[int, int]]:
    """By parameter: positions of its first and last use."""
    parameters = dict(root.named_parameters(remove_duplicate=False))
    spans: dict[int, tuple[int, int]] = {}
    for position, (_, name) in enumerate(order.uses):
        key = id(parameters[name])
        spans[key] = (spans.get(key, (position, position))[0], position)
    return spans


def _classes(classes: Classes, where: str) -> tuple[type[nn.Module], ...]:
    kinds = (classes,) if isinstance(classes, type) else tuple(classes)
    kind: Any
    for kind in kinds:
        if not (isinstance(kind, type) and issubclass(kind, nn.Module)):
            raise TypeError(f"{where}: {kind!r} is not a class of modules.")
    return kinds
