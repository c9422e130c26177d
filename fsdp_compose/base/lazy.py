"""Makes a package import what is public when the first of its names is used, and not before."""

from __future__ import annotations

import sys
from importlib import import_module, reload
from threading import RLock
from types import ModuleType
from typing import Any

_loading = RLock()
_under_way: set[str] = set()


class LazyPackage(ModuleType):
    """A package that runs its ``__init__`` again, with ``_is_used`` set, on first use of a name."""

    __all__: list[str]

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or name not in self.__all__:
            raise AttributeError(f"module {self.__name__!r} has no attribute {name!r}")
        with _loading:
            if name not in vars(self):
                if self.__name__ in _under_way:  # `from package import file`, in a file of it
                    raise AttributeError(f"{self.__name__}.{name} is being imported")
                _under_way.add(self.__name__)
                try:
                    vars(self)["_is_used"] = True
                    reload(self)
                finally:
                    _under_way.remove(self.__name__)
            return vars(self)[name]

    def __reduce__(self) -> tuple[Any, ...]:
        """By name, as cloudpickle does for other modules: Ray sends functions that use one."""
        return import_module, (self.__name__,)

    def __dir__(self) -> list[str]:
        return sorted({*super().__dir__(), *self.__all__})


def import_on_use(package: str) -> None:
    """Have the package of this name, whose ``__init__`` calls, import what is public on use."""
    sys.modules[package].__class__ = LazyPackage
