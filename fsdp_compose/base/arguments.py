"""Checks of arguments: the errors name the function and the argument, what is found and wanted."""

from __future__ import annotations

import inspect
import re
from numbers import Real
from os import PathLike, fsdecode
from os.path import expanduser
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import nn


def describe_value(value: object) -> str:
    """A value as it is written where that is short; else what it is."""
    text = "\n" if isinstance(value, nn.Module | torch.Tensor) else repr(value)
    is_long = len(text) > 60 or "\n" in text or " at 0x" in text
    return f"a {type(value).__name__}" if is_long else text


def check_kind(
    where: str, name: str, value: object, kind: type | tuple[type, ...], wanted: str
) -> None:
    """Raise unless ``value`` is a ``kind``; True and False are no numbers.

    Raises:
        TypeError: it is something else.
    """
    is_flag = isinstance(value, bool) and kind is not bool
    if is_flag or not isinstance(value, kind):
        raise TypeError(f"{where}: {name} is {describe_value(value)}; wanted {wanted}.")


def check_module(where: str, module: object) -> None:
    """Raise unless ``module`` is one.

    Raises:
        TypeError: it is something else.
    """
    wanted = "an nn.Module, such as the model that fully_shard returned"
    check_kind(where, "module", module, nn.Module, wanted)


def check_path(where: str, path: object) -> None:
    """Raise unless ``path`` is one.

    Raises:
        TypeError: it is something else.
        ValueError: it is empty, which would be the working directory; a URL or one from the
            home, which would be a folder in it; or holds a null character.
    """
    check_kind(where, "path", path, (str, PathLike), "a path")
    if path == "":
        raise ValueError(f"{where}: path is ''; wanted a path, or '.' for the working directory.")
    text = fsdecode(cast("str | PathLike[str]", path))
    if "\0" in text:
        raise ValueError(f"{where}: path is {text!r}; wanted one without a null character.")
    if (home := expanduser(text)) != text:
        raise ValueError(
            f"{where}: path is {str(path)!r}, and only a shell knows what '~' is; wanted {home!r}, "
            "such as os.path.expanduser gives, or './' in front for a folder of that name."
        )
    if _URL.match(text):
        raise ValueError(
            f"{where}: path is {str(path)!r}, a URL; wanted a path in a file system. Mount what it "
            "names, or copy to or from a local folder; './' in front makes it a local one."
        )


_URL = re.compile("[a-z][a-z0-9+.-]+:/", re.IGNORECASE)  # a drive's name has one letter


def check_timeout(where: str, timeout: Any) -> None:
    """Raise unless ``timeout`` is a number of seconds, or None.

    Raises:
        TypeError: it is something else.
        ValueError: it is not positive.
    """
    if timeout is not None:
        check_positive(where, "timeout", timeout, "seconds to wait, a positive number, or None")


def check_process_group(where: str, group: object) -> None:
    """Raise unless ``group`` is a process group, or None.

    Raises:
        TypeError: it is something else.
    """
    if group is not None:
        wanted = "a torch.distributed.ProcessGroup, such as mesh.get_group('dp'), or None"
        check_kind(where, "process_group", group, dist.ProcessGroup, wanted)


def check_flags(where: str, **flags: object) -> None:
    """Raise unless each of ``flags`` is a boolean.

    Raises:
        TypeError: one is something else.
    """
    for name, value in flags.items():
        check_kind(where, name, value, bool, "True or False")


def check_int(where: str, name: str, value: Any, least: int, wanted: str) -> None:
    """Raise unless ``value`` is an int, ``least`` or larger; True and False are none.

    Raises:
        TypeError: it is something else.
        ValueError: it is less.
    """
    check_kind(where, name, value, int, wanted)
    if value < least:
        raise ValueError(f"{where}: {name} is {value}; wanted {wanted}.")


def is_number(value: object) -> bool:
    """Whether it is a real number, or a tensor of one; True and False are none."""
    if isinstance(value, torch.Tensor):
        return value.numel() == 1 and not value.is_complex()
    return isinstance(value, Real) and not isinstance(value, bool)


def check_number(where: str, name: str, value: object, wanted: str) -> None:
    """Raise unless ``value`` is a real number, or a tensor of one.

    Raises:
        TypeError: it is something else.
    """
    if not is_number(value):
        raise TypeError(f"{where}: {name} is {describe_value(value)}; wanted {wanted}.")


def check_positive(where: str, name: str, value: Any, wanted: str) -> None:
    """Raise unless ``value`` is a number larger than 0.

    Raises:
        TypeError: it is no number.
        ValueError: it is 0, negative or nan.
    """
    check_number(where, name, value, wanted)
    if not value > 0:
        raise ValueError(f"{where}: {name} is {describe_value(value)}; wanted {wanted}.")


def check_not_negative(where: str, name: str, value: Any, wanted: str) -> None:
    """Raise unless ``value`` is a number that is 0 or larger.

    Raises:
        TypeError: it is no number.
        ValueError: it is negative or nan.
    """
    check_number(where, name, value, wanted)
    if not value >= 0:
        raise ValueError(f"{where}: {name} is {describe_value(value)}; wanted {wanted}.")


def check_function(where: str, name: str, function: Any, takes: str) -> None:
    """Raise unless ``function`` can be called with as many positional arguments as ``takes`` lists.

    Raises:
        TypeError: it is not callable, or takes others.
    """
    found = repr(function)
    if callable(function) and not isinstance(function, type):
        found = str(getattr(function, "__name__", found))
        try:
            signature = inspect.signature(function)
        except (TypeError, ValueError):  # some functions in C have no signature
            return
        try:
            signature.bind(*takes.strip("()").split(", "))
        except TypeError:
            found = f"{found}{signature}"
        else:
            return
    raise TypeError(f"{where}: {name} is {found}; wanted a function of {takes}.")
