"""The order in which a module runs its submodules and uses its parameters, without running it."""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx, nn
from torch.fx import PH  # type: ignore[attr-defined]

from fsdp_compose.base.arguments import check_kind, check_module
from fsdp_compose.base.taken_back import take_back
from fsdp_compose.base.tree import map_tensors
from fsdp_compose.core.state import iter_units

_HERE: Any = PH  # stands for a tensor inside a container


@dataclass(frozen=True)
class TracingConfig:
    """How to trace a module symbolically.

    Args:
        tracer: decides, by ``is_leaf_module``, which submodules are taken whole, without looking
            into their forward; by default those of ``torch.nn``.
        concrete_args: values, by name of the forward's parameter, that control flow depends on, in
            addition to what is in the sample arguments and is not a tensor.

    Example:
        >>> config = TracingConfig(tracer=torch.fx.Tracer())
        >>> trace_execution_order(nn.Sequential(nn.Linear(2, 2)), torch.ones(1, 2), config).modules
        ('', '0')
    """

    tracer: fx.Tracer | None = None
    concrete_args: Mapping[str, Any] | None = None

    def __post_init__(self) -> None:
        if self.tracer is not None:
            wanted = "an instance of torch.fx.Tracer, or None"
            check_kind("TracingConfig", "tracer", self.tracer, fx.Tracer, wanted)
        _check_names("TracingConfig", "concrete_args", self.concrete_args)


def _check_names(where: str, name: str, values: object) -> None:
    """Raise unless ``values`` are arguments by name, or None."""
    if values is not None:
        check_kind(where, name, values, Mapping, "a dictionary of arguments by name, or None")


@dataclass(frozen=True)
class ExecutionOrder:
    """What a forward does in which order; names are FQNs, "" is the module itself.

    Attributes:
        modules: every call of a submodule, in the order in which the calls begin.
        parameters: every parameter that is used, in the order of first use.
        uses: every use of a parameter, as (submodule whose forward uses it, parameter). A
            submodule that is taken whole uses all of its parameters where it is called.

    Example:
        >>> order = trace_execution_order(nn.Sequential(nn.Linear(2, 2)), torch.ones(1, 2))
        >>> order.parameters
        ('0.weight', '0.bias')
    """

    modules: tuple[str, ...]
    parameters: tuple[str, ...]
    uses: tuple[tuple[str, str], ...]

    def used_by(self, module: str) -> tuple[str, ...]:
        """Parameters that the forward of ``module`` itself uses, in the order of first use."""
        return tuple(dict.fromkeys(name for user, name in self.uses if user == module))


def trace_execution_order(
    module: nn.Module,
    args: Any = (),
    config: TracingConfig | None = None,
    *,
    kwargs: Mapping[str, Any] | None = None,
) -> ExecutionOrder:
    """Find in which order ``module`` runs its submodules, by ``torch.fx``, before it is sharded.

    Nothing is computed, so that the module may be on the meta device, and what its forward sets on
    modules is taken back. Tensors in ``args`` and
    ``kwargs`` only say where a tensor is passed; other values, and the defaults of parameters that
    are not passed, are what control flow sees.

    Args:
        module: not sharded yet.
        args: positional arguments of its forward, or one tensor.

    Raises:
        ValueError: ``module`` is sharded, or its forward cannot be traced.
        TypeError: an argument is of the wrong type.

    Example:
        >>> model = nn.Sequential(nn.Linear(2, 2), nn.ReLU())
        >>> trace_execution_order(model, torch.ones(1, 2)).modules
        ('', '0', '1')
    """
    check_module("trace_execution_order", module)
    if next(iter_units(module), None) is not None:
        raise ValueError(
            f"trace_execution_order: {type(module).__name__} is sharded already; trace it before "
            "fully_shard."
        )
    if config is not None:
        wanted = "TracingConfig(...) or None"
        check_kind("trace_execution_order", "config", config, TracingConfig, wanted)
    _check_names("trace_execution_order", "kwargs", kwargs)
    config = config or TracingConfig()
    _check_concrete(module, config.concrete_args or {})
    recorder = _Recorder(module, config.tracer or fx.Tracer())
    try:
        given = args if isinstance(args, tuple | list) else (args,)
        concrete = _concrete(module, tuple(given), dict(kwargs or {}))
        concrete.update(config.concrete_args or {})
        with take_back(module), recorder.patched(), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            recorder.tracer.trace(module, concrete_args=concrete or None)
    except Exception as error:
        where = recorder.stack[-1]
        inside = f"submodule {where!r}" if where else "its own forward"
        raise ValueError(
            f"trace_execution_order: {type(module).__name__} cannot be traced symbolically; in "
            f"{inside}: {type(error).__name__}: {error}. Pass what its control flow depends on, in "
            "args or as TracingConfig(concrete_args={name: value}); or a tracer that takes the "
            "submodule whole, TracingConfig(tracer=...) with is_leaf_module; or do without: the "
            "first iteration records the order by running it."
        ) from error
    return ExecutionOrder(
        modules=tuple(recorder.modules),
        parameters=tuple(dict.fromkeys(name for _, name in recorder.uses)),
        uses=tuple(recorder.uses),
    )


@dataclass(eq=False)
class _Recorder:
    """Watches a tracer: which submodule is being traced, and what it calls."""

    root: nn.Module
    tracer: fx.Tracer
    modules: list[str] = field(default_factory=lambda: [""])
    uses: list[tuple[str, str]] = field(default_factory=list)
    stack: list[str] = field(default_factory=lambda: [""])

    def __post_init__(self) -> None:
        self.names = {id(m): name for name, m in self.root.named_modules()}
        self.parameters = {
            name: id(p) for name, p in self.root.named_parameters(remove_duplicate=False)
        }
        self.first_name = {key: name for name, key in reversed(self.parameters.items())}

    @contextmanager
    def patched(self) -> Iterator[None]:
        tracer: Any = self.tracer
        original = tracer.call_module, tracer.create_proxy
        tracer.call_module = lambda *a, **k: self.call_module(original[0], *a, **k)
        tracer.create_proxy = lambda *a, **k: self.create_proxy(original[1], *a, **k)
        try:
            yield
        finally:
            tracer.__dict__.pop("call_module")
            tracer.__dict__.pop("create_proxy")

    def call_module(self, call: Callable[..., Any], module: nn.Module, *rest: Any) -> Any:
        name = self.names[id(module)]
        self.modules.append(name)
        self.stack.append(name)
        result = call(module, *rest)
        self.stack.pop()  # left as it is when the call fails, to tell where
        return result

    def create_proxy(self, create: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        proxy = create(*args, **kwargs)
        node = proxy.node
        if node.op == "call_module":
            whole = self.root.get_submodule(node.target)
            self.uses += [(node.target, self.first_name[id(p)]) for p in whole.parameters()]
        elif node.op in ("call_function", "call_method"):
            for source in node.all_input_nodes:
                if source.op == "get_attr" and source.target in self.parameters:
                    name = self.first_name[self.parameters[source.target]]
                    self.uses.append((self.stack[-1], name))
        return proxy


def _check_concrete(module: nn.Module, values: Mapping[str, Any]) -> None:
    """Raise for a value that no parameter of the forward takes, which a trace would not look at."""
    known = inspect.signature(module.forward).parameters
    unknown = [name for name in values if name not in known]
    if unknown and all(found.kind is not found.VAR_KEYWORD for found in known.values()):
        raise ValueError(
            f"trace_execution_order: concrete_args has {unknown[0]!r}, which no parameter of "
            f"{type(module).__name__}.forward takes; wanted some of {list(known)}."
        )


def _concrete(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """Arguments that are not tensors, by name; containers of tensors with placeholders in them."""
    bound = inspect.signature(module.forward).bind_partial(*args, **kwargs)
    bound.apply_defaults()
    concrete: dict[str, Any] = {}
    for name, parameter in bound.signature.parameters.items():
        if name not in bound.arguments or parameter.kind in (
            parameter.VAR_POSITIONAL,
            parameter.VAR_KEYWORD,
        ):
            continue
        value = bound.arguments[name]
        if not isinstance(value, torch.Tensor):
            concrete[name] = map_tensors(lambda _: _HERE, value)
    return concrete
