"""Methods besides ``forward`` that gather their unit, without a wrapper or a subclass.

A listed method is shadowed by a ``Method`` in the module's own ``__dict__``, where attribute access
finds it before the class's function. It refers to its module weakly and is copied with it, so a
deep copy drives its own state; ``undo`` removes it.
"""

from __future__ import annotations

import copy
import inspect
import types
import weakref
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any

from torch import nn

from fsdp_compose.base.torch_private import untraced, untraced_itself
from fsdp_compose.core.guards.units import require_units
from fsdp_compose.core.hooks import call_as_forward
from fsdp_compose.core.state import find_state

_MISSING = object()
_RESERVED = frozenset(dir(nn.Module)) - {"forward"}
_LAZY = (
    (inspect.isgeneratorfunction, "a generator"),
    (inspect.isasyncgenfunction, "an asynchronous generator"),
    (inspect.iscoroutinefunction, "a coroutine"),
)


class Method:
    """A method that gathers its module's unit as ``forward`` does.

    Attributes:
        shadowed: what the module's own ``__dict__`` held under that name, if anything.
    """

    def __init__(self, module: nn.Module, name: str) -> None:
        self._module = weakref.ref(module)
        self.__name__ = name
        self.shadowed = vars(module).get(name, _MISSING)

    @untraced_itself
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        module = self._owner()
        if find_state(module) is None:  # a copy that was undone elsewhere
            return self.__wrapped__(*args, **kwargs)
        return call_as_forward(module, self.__wrapped__, args, kwargs)

    def __deepcopy__(self, memo: dict[int, Any]) -> Method:
        twin = Method.__new__(Method)
        memo[id(self)] = twin
        twin._module = weakref.ref(copy.deepcopy(self._owner(), memo))
        twin.__name__ = self.__name__
        missing = self.shadowed is _MISSING
        twin.shadowed = _MISSING if missing else copy.deepcopy(self.shadowed, memo)
        return twin

    @property
    @untraced
    def __wrapped__(self) -> Callable[..., Any]:
        """The method itself, where ``inspect.signature`` looks for it."""
        if self.shadowed is not _MISSING:
            found: Callable[..., Any] = self.shadowed
            return found
        module = self._owner()
        static = inspect.getattr_static(type(module), self.__name__)
        bound: Callable[..., Any] = static.__get__(module, type(module))
        return bound

    @property
    def __doc__(self) -> str | None:  # type: ignore[override]
        return self.__wrapped__.__doc__

    @property
    def __func__(self) -> Callable[..., Any]:
        method = self.__wrapped__
        return method.__func__ if isinstance(method, types.MethodType) else method

    @property
    def __self__(self) -> nn.Module:
        return self._owner()

    def __repr__(self) -> str:
        return f"<{self.__name__} of a sharded {type(self._owner()).__name__}>"

    @untraced
    def _owner(self) -> nn.Module:
        """The module that the method was taken from."""
        module = self._module()
        if module is None:
            raise ReferenceError(
                f"method {self.__name__!r} was taken from a sharded module that is gone. Keep the "
                "module, and call the method on it."
            )
        return module


def check_methods(
    methods: Sequence[str], modules: Iterable[nn.Module], caller: str = "fully_shard"
) -> tuple[str, ...]:
    """Return ``methods`` without ``"forward"``, after a check that some of ``modules`` have each.

    Raises:
        TypeError: ``methods`` is not a sequence of names.
        ValueError: a name is of no module, or of something that cannot gather.
    """
    if isinstance(methods, str) or not isinstance(methods, Sequence):
        raise TypeError(
            f"{caller}: methods is {methods!r}; wanted a sequence of names of methods: "
            "methods=('forward', 'encode')."
        )
    for name in methods:
        if not isinstance(name, str):
            raise TypeError(f"{caller}: methods holds {name!r}; wanted names of methods.")
    given = list(modules)
    wanted = tuple(dict.fromkeys(name for name in methods if name != "forward"))
    for name in wanted:
        if name in _RESERVED or (name.startswith("__") and name.endswith("__")):
            raise ValueError(
                f"{caller}: methods names {name!r}, which is nn.Module's or Python's own; list "
                "methods of your model that compute with its weights."
            )
        found = [_find(module, name) for module in given]
        if all(method is None for method in found):
            raise ValueError(
                f"{caller}: methods names {name!r}, but no unit of this call has such a method; "
                f"{_candidates(given)}"
            )
        for method in found:
            for is_lazy, kind in _LAZY:
                if method is not None and is_lazy(method):
                    raise ValueError(
                        f"{caller}: methods names {name!r}, which is {kind}: its body would run "
                        "after the unit was released. List a method that it calls instead, or use "
                        "`with fsdp_compose.gathered(module):` inside it."
                    )
    return wanted


def _find(module: nn.Module, name: str) -> Callable[..., Any] | None:
    """Find the method of that name in the instance or the class; None where there is none."""
    own = vars(module).get(name)
    if own is not None:
        return own if callable(own) else None
    static = inspect.getattr_static(type(module), name, None)
    if isinstance(static, property) or not callable(getattr(static, "__get__", None)):
        return None
    bound = static.__get__(module, type(module))
    return bound if callable(bound) else None


def _candidates(modules: Sequence[nn.Module]) -> str:
    """Say which methods of the modules' classes could gather."""
    texts = []
    for kind in dict.fromkeys(type(module) for module in modules):
        names = [
            name
            for name in dir(kind)
            if not name.startswith("_")
            and name not in _RESERVED
            and inspect.isroutine(inspect.getattr_static(kind, name))
        ]
        texts.append(f"{kind.__name__} has {sorted(names)}")
    return "; ".join(texts) + "."


def attach_methods(module: nn.Module, methods: Iterable[str]) -> None:
    """Have each of ``methods`` that ``module`` has gather the module's unit."""
    for name in methods:
        if _find(module, name) is not None:
            vars(module)[name] = Method(module, name)


def register_forward_method(module: nn.Module, *names: str) -> None:
    """Let methods of a module that is sharded already gather it, as ``methods=`` would have.

    FSDP2 calls this ``register_fsdp_forward_method``. A method that gathers already stays as it
    is; ``undo`` removes them all.

    Args:
        module: a unit: ``fully_shard`` was called on it, or its policy chose it.
        names: of methods of ``module`` that compute with its weights.

    Raises:
        TypeError: a name is not a string.
        ValueError: ``module`` is not a unit, or has no such method, or one that cannot gather.

    Example:
        >>> class Coder(nn.Linear):
        ...     def encode(self, x):
        ...         return nn.functional.linear(x, self.weight)
        >>> model = fully_shard(Coder(2, 2))
        >>> register_forward_method(model, "encode")
        >>> model.encode(torch.ones(1, 2)).shape
        torch.Size([1, 2])
    """
    advice = "The module around it gathers its weights, and needs the method that calls this one."
    (unit,) = require_units(module, "register_forward_method", recurse=False, advice=advice)
    wanted = check_methods(names, [module], "register_forward_method")
    attach_methods(module, [n for n in wanted if not isinstance(vars(module).get(n), Method)])
    known = (*unit.options.methods, *wanted)
    unit.options = replace(unit.options, methods=tuple(dict.fromkeys(known)))


def detach_methods(module: nn.Module) -> None:
    """Give a unit's module back its own methods."""
    values = vars(module)
    for name, method in list(values.items()):
        if isinstance(method, Method):
            if method.shadowed is _MISSING:
                del values[name]
            else:
                values[name] = method.shadowed
