"""Policies that choose which submodules become units."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from torch import nn
from torch.nn.modules.linear import NonDynamicallyQuantizableLinear

from fsdp_compose.base.arguments import check_function, check_kind, check_not_negative
from fsdp_compose.base.policy import name_pattern
from fsdp_compose.construct.names import path_cleaner
from fsdp_compose.construct.plans import list_ignored
from fsdp_compose.construct.trace import TracingConfig, trace_execution_order

UnitOptions = dict[str, Any]
Decision = bool | UnitOptions
Decide = Callable[[str, nn.Module, int], Decision]
Classes = type[nn.Module] | Iterable[type[nn.Module]]

_NUMEL = "a number of parameter elements, such as 1e6"


@dataclass(frozen=True)
class Policy:
    """Chooses units; combine policies with ``|``, of which the first that says yes decides.

    Submodules are asked about innermost first.

    Attributes:
        start: given the module that is sharded, returns ``decide(fqn, submodule, numel)``, where
            ``fqn`` is the submodule's full name in it, without what wrappers put in, and ``numel``
            the number of parameter elements in the submodule that no unit inside it has taken. A
            dictionary instead of True overrides options of ``fully_shard`` for the unit.
        description: what the policy is, for messages.
        leaves: classes that are taken whole: nothing inside one becomes a unit, whatever the policy
            is combined with.

    Example:
        >>> policy = wrap.by_class({nn.Linear}) | wrap.by_size(1000)
        >>> model = fully_shard(nn.Sequential(nn.Linear(2, 2), nn.ReLU()), units=policy)
        >>> is_fully_sharded(model[0])
        True
    """

    start: Callable[[nn.Module], Decide]
    description: str
    leaves: tuple[type[nn.Module], ...] = ()

    def __or__(self, other: Policy) -> Policy:
        found: Any = other
        if not isinstance(found, Policy):
            raise TypeError(
                f"wrap: {self.description} | {found!r}; wanted another policy of "
                "fsdp_compose.wrap, such as wrap.by_class({Block})."
            )

        def start(root: nn.Module) -> Decide:
            first, second = self.start(root), other.start(root)
            return lambda *question: first(*question) or second(*question)

        leaves = tuple(dict.fromkeys((*self.leaves, *other.leaves)))
        return Policy(start, f"{self.description} | {other.description}", leaves)


def by_class(classes: Classes, **options: Any) -> Policy:
    """Every instance of one of ``classes`` is a unit, with ``options`` of its own if given.

    A module without any instance of them is an error, also where another policy chooses units. The
    ``out_proj`` of an ``nn.MultiheadAttention``, an ``nn.Linear`` that nothing calls, is none: the
    attention's own functions read its weight.

    Example:
        >>> model = nn.Sequential(nn.Linear(2, 2), nn.ReLU())
        >>> len(units_of(fully_shard(model, units=wrap.by_class({nn.Linear}))))
        2
    """
    kinds = _check_classes(classes, "by_class")
    names = ", ".join(sorted(kind.__name__ for kind in kinds))
    description, chosen = f"by_class({{{names}}})", _read_options(options, "by_class")

    def decide(fqn: str, module: nn.Module, numel: int) -> Decision:
        is_called = type(module) is not NonDynamicallyQuantizableLinear or type(module) in kinds
        return is_called and isinstance(module, kinds) and (chosen or True)

    def start(root: nn.Module) -> Decide:
        if not any(decide("", module, 0) for module in root.modules() if module is not root):
            raise ValueError(describe_no_match(description, root))
        return decide

    return Policy(start, description)


def by_name(*patterns: str, **options: Any) -> Policy:
    """Submodules whose full name matches a pattern are units, with ``options`` if given.

    ``*`` stands for any part of one name between dots, ``**`` for any number of such names, ``?``
    for one character, ``[0-3]`` for one out of a range: ``by_name("layers.*", "**.head")``. A
    pattern that matches no submodule is an error.

    Example:
        >>> model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
        >>> model = fully_shard(model, units=wrap.by_name("1"))
        >>> [is_fully_sharded(module) for module in model]
        [False, True]
    """
    tests = {pattern: name_pattern(pattern, "by_name") for pattern in patterns}
    if not tests:
        raise TypeError('by_name: got no pattern; wanted names, such as by_name("layers.*").')
    description = f"by_name({', '.join(map(repr, tests))})"
    given = _read_options(options, "by_name")

    def start(root: nn.Module) -> Decide:
        modules = root.named_modules(remove_duplicate=False)
        clean = path_cleaner(root)
        names = [(clean(path), module) for path, module in modules if module is not root]
        chosen: set[int] = set()
        for pattern, test in tests.items():
            matching = {id(module) for name, module in names if test(name)}
            if not matching:
                known = list(dict.fromkeys(name for name, _ in names))
                raise ValueError(
                    f"by_name: {pattern!r} matches no submodule of {type(root).__name__}; "
                    f"{describe_closest(pattern, known)}."
                )
            chosen |= matching
        return lambda fqn, module, numel: id(module) in chosen and (given or True)

    return Policy(start, description)


def describe_closest(name: str, known: list[str]) -> str:
    """The names out of ``known`` that are most like ``name``, for a message."""
    closest = difflib.get_close_matches(name, known, n=4, cutoff=0.3) or known[:4]
    return f"the closest names are {closest}" if closest else "there are no names"


def numel_of(parameter: nn.Parameter) -> int:
    """Its elements; 0 of a lazy one, which has no shape yet."""
    is_lazy: bool = nn.parameter.is_lazy(parameter)
    return 0 if is_lazy else parameter.numel()


def describe_no_match(description: str, root: nn.Module) -> str:
    """The error for a policy that makes no submodule of ``root`` a unit."""
    inside = [module for module in root.modules() if module is not root]
    kinds = sorted({type(m).__name__ for m in inside} - {type(root).__name__})
    if not inside:
        return (
            f"fully_shard: units={description} matches no submodule, as {type(root).__name__} has "
            "none; leave units= out, and it is one unit."
        )
    largest = max((sum(map(numel_of, m.parameters())) for m in inside), default=0)
    unknown = any(map(nn.parameter.is_lazy, root.parameters()))
    lazy = " Lazy ones have no shape yet: run one forward first." if unknown else ""
    itself = f" The {type(root).__name__} itself is a unit where units= is left out."
    return (
        f"fully_shard: units={description} matches no submodule of {type(root).__name__}; it has "
        f"submodules of classes {kinds}, of up to {largest:,} parameter elements.{lazy}"
        f"{itself if type(root).__name__ in description else ''}"
    )


def by_size(
    min_numel: int,
    exclude: Classes = (nn.ModuleList, nn.ModuleDict, nn.ParameterList, nn.ParameterDict),
    leaf: Classes = (nn.MultiheadAttention,),
) -> Policy:
    """Units of at least ``min_numel`` parameter elements, built from the leaves of the tree up.

    Args:
        exclude: classes that never become units; what is inside them still may.
        leaf: classes that are taken whole: nothing inside them becomes a unit, also where the
            policy is combined with others.

    Example:
        >>> model = nn.Sequential(nn.Linear(2, 2), nn.Linear(9, 9))
        >>> model = fully_shard(model, units=wrap.by_size(50))
        >>> [is_fully_sharded(module) for module in model]
        [False, True]
    """
    check_not_negative("by_size", "min_numel", min_numel, _NUMEL)
    excluded = _check_classes(exclude, "by_size")

    def decide(fqn: str, module: nn.Module, numel: int) -> Decision:
        return numel >= min_numel and not isinstance(module, excluded)

    return Policy(lambda root: decide, f"by_size({min_numel})", _check_classes(leaf, "by_size"))


def by_fn(fn: Callable[[str, nn.Module], Decision]) -> Policy:
    """``fn(fqn, module)`` says whether a submodule is a unit, or with which options.

    Example:
        >>> model = nn.Sequential(nn.Linear(2, 2), nn.ReLU(), nn.Linear(2, 2))
        >>> policy = wrap.by_fn(lambda fqn, module: isinstance(module, nn.Linear) and fqn != "0")
        >>> [is_fully_sharded(module) for module in fully_shard(model, units=policy)]
        [False, False, True]
    """
    check_function("by_fn", "fn", fn, "(fqn, module)")

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

    Example:
        >>> model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4))
        >>> policy = wrap.by_execution_order(torch.ones(1, 4), min_numel=20)
        >>> [is_fully_sharded(module) for module in fully_shard(model, units=policy)]
        [True, False, True]
    """
    check_not_negative("by_execution_order", "min_numel", min_numel, _NUMEL)
    if config is not None:
        wanted = "TracingConfig(...) or None"
        check_kind("by_execution_order", "config", config, TracingConfig, wanted)

    def start(root: nn.Module) -> Decide:
        order = trace_execution_order(root, sample_args, config, kwargs=kwargs)
        called = set(map(path_cleaner(root), order.modules))
        parameters = dict(root.named_parameters(remove_duplicate=False))
        uses = [id(parameters[name]) for _, name in order.uses]

        def decide(fqn: str, module: nn.Module, numel: int) -> Decision:
            if numel < min_numel or fqn not in called:
                return False
            inside = {id(p) for p in module.parameters()}
            places = [place for place, used in enumerate(uses) if used in inside]
            return bool(places) and places[-1] - places[0] + 1 == len(places)

        return decide

    return Policy(start, f"by_execution_order(min_numel={min_numel})", (nn.MultiheadAttention,))


def _read_options(options: UnitOptions, where: str) -> UnitOptions:
    """``options`` for all units: an iterator would be at its end after the first of them."""
    if "ignored" not in options:
        return options
    return {**options, "ignored": list_ignored(options["ignored"], where)}


def _check_classes(classes: Any, where: str) -> tuple[type[nn.Module], ...]:
    wanted = "wanted classes of modules, such as {Block}, not instances or names"
    if isinstance(classes, str | nn.Module) or not isinstance(classes, type | Iterable):
        raise TypeError(f"{where}: {classes!r:.80} is not a class of modules; {wanted}.")
    kinds = (classes,) if isinstance(classes, type) else tuple(classes)
    for kind in kinds:
        if not (isinstance(kind, type) and issubclass(kind, nn.Module)):
            raise TypeError(f"{where}: {kind!r:.80} is not a class of modules; {wanted}.")
    return kinds
