"""``fsdp-compose plan``: plans of a model that is named."""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import math
import sys
from collections.abc import Mapping
from functools import reduce
from operator import or_
from pathlib import Path
from typing import Any

import torch
from torch import nn

from fsdp_compose.base.policy import MixedPrecision, ShardingStrategy
from fsdp_compose.cli.errors import UserError
from fsdp_compose.construct.wrap import Policy, by_class, by_name
from fsdp_compose.report import Plan, plan, plot_memory, plot_plan, plot_shards

_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
_MOST_RANKS = 1 << 20
_INPUTS = {**_DTYPES, "long": torch.int64, "int": torch.int32, "bool": torch.bool}


def run_plan(args: argparse.Namespace) -> int:
    """Print what was planned; the exit code is 1 where it does not fit.

    Raises:
        UserError: an argument means nothing.
    """
    model = _build(args.model)
    units = _choose_units(model, args.units)
    mp = MixedPrecision(_parse_dtype(args.dtype), _parse_dtype(args.reduce_dtype))
    world, strategy = _parse_world_size(args.world_size), args.strategy
    if strategy is not None and strategy.startswith("hybrid") != isinstance(world, tuple):
        wanted = "replicas x shards, as 2x4" if isinstance(world, int) else "a number of ranks"
        raise UserError(
            f"--world-size is {args.world_size!r}; wanted {wanted}, for --strategy {strategy}."
        )
    try:
        found = plan(
            model,
            world_size=world,
            units=units,
            strategy=None if strategy is None else ShardingStrategy(strategy),
            mp_policy=mp,
            optimizer=args.optimizer,
            device_memory=args.device_memory,
            sample=None if args.sample is None else tuple(map(_parse_sample, args.sample)),
        )
    except (TypeError, ValueError) as error:
        raise UserError(str(error)) from error
    print(found.to_json() if args.json else found)
    for path, draw in (
        (args.memory, plot_memory),
        (args.shards, plot_shards),
        (args.picture, plot_plan),
    ):
        if path is not None:
            _draw(draw, found, path)
    return 1 if found.fits is False else 0


def _draw(draw: Any, found: Plan, path: Path) -> None:
    try:
        draw(found, path)
    except (ImportError, OSError, ValueError) as error:
        raise UserError(f"{path}: {error}") from error
    print(f"{path} written", file=sys.stderr)


def _build(name: str) -> nn.Module:
    """The model that a Python file and a name, a module and a name, or a config.json tell."""
    path = Path(name)
    if path.is_dir() or path.suffix == ".json":
        return _build_from_config(path)
    place, colon, attribute = name.rpartition(":")
    if not colon:
        raise UserError(
            f"{name!r} names no model; wanted PATH:NAME of a Python file, or package.module:NAME, "
            "with NAME a function without arguments that returns a module, or a config.json."
        )
    source = _load(place)
    if attribute not in vars(source):
        known = [n for n, v in vars(source).items() if callable(v) and not n.startswith("_")]
        raise UserError(f"{place} has no {attribute!r}; it has {', '.join(sorted(known)[:12])}.")
    make = vars(source)[attribute]
    try:
        with torch.device("meta"):
            model = make if isinstance(make, nn.Module) else make()
    except (Exception, SystemExit) as error:
        raise UserError(
            f"{attribute}() raised {type(error).__name__}: {error}; name a function without "
            "arguments that returns a module and can be built on the meta device."
        ) from error
    if not isinstance(model, nn.Module):
        raise UserError(f"{attribute}() returned {type(model).__name__}; wanted an nn.Module.")
    return model


def _load(place: str) -> Any:
    """The module in a file, or of a name that can be imported."""
    path = Path(place)
    sys.path.insert(0, str(path.parent.resolve() if path.suffix == ".py" else Path.cwd()))
    if path.suffix != ".py":
        try:
            return importlib.import_module(place)
        except (Exception, SystemExit) as error:
            raise _import_error(place, error) from error
    if not path.is_file():
        raise UserError(f"{path} does not exist.")
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None and spec.loader is not None
    source = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = source
    try:
        spec.loader.exec_module(source)
    except (Exception, SystemExit) as error:
        raise _import_error(path, error) from error
    return source


def _import_error(place: object, error: BaseException) -> UserError:
    advice = ""
    if isinstance(error, SystemExit):
        advice = '; keep what a script runs below `if __name__ == "__main__":`'
    return UserError(f"{place}: cannot be imported: {type(error).__name__}: {error}{advice}")


def _build_from_config(path: Path) -> nn.Module:
    path = path / "config.json" if path.is_dir() else path
    if not path.is_file():
        raise UserError(f"{path} does not exist.")
    try:
        transformers: Any = importlib.import_module("transformers")
    except ImportError as error:
        raise UserError("a config.json needs transformers: pip install transformers.") from error
    try:
        config = transformers.AutoConfig.from_pretrained(str(path))
        with torch.device("meta"):
            model: nn.Module = transformers.AutoModelForCausalLM.from_config(config)
    except Exception as error:
        raise UserError(
            f"{path} raised {type(error).__name__}: {error}; name a configuration of a causal "
            "language model that transformers knows, or a function that builds the model."
        ) from error
    return model


def _choose_units(model: nn.Module, wanted: list[str] | None) -> Policy | None:
    """Choose units by class where a word names one in the model, else by pattern of names."""
    if not wanted:
        return None
    kinds = {type(module).__name__: type(module) for module in model.modules()}
    try:
        policies = [by_class(kinds[word]) if word in kinds else by_name(word) for word in wanted]
    except ValueError as error:
        raise UserError(f"--units: {error}") from error
    return reduce(or_, policies)


def _parse_world_size(text: str) -> int | tuple[int, int]:
    """``64``, or ``8x8`` for replicas and shards."""
    parts = text.split("x")
    if not all(part.isdecimal() and int(part) > 0 for part in parts) or len(parts) > 2:
        raise UserError(
            f"--world-size is {text!r}; wanted ranks, as 64, or replicas x shards, 8x8."
        )
    numbers = [int(part) for part in parts]
    if math.prod(numbers) > _MOST_RANKS:
        raise UserError(f"--world-size is {text!r}; wanted at most {_MOST_RANKS:,} ranks.")
    return numbers[0] if len(numbers) == 1 else (numbers[0], numbers[1])


def _parse_sample(text: str) -> torch.Tensor:
    """``8x2048:long`` as a tensor of that shape without memory."""
    shape, _, dtype = text.partition(":")
    if not all(part.isdecimal() for part in shape.split("x")):
        raise UserError(f"--sample is {text!r}; wanted a shape and a dtype, as 8x2048:long.")
    sizes = [int(part) for part in shape.split("x")]
    return torch.empty(sizes, dtype=_parse_dtype(dtype or "fp32", _INPUTS), device="meta")


def _parse_dtype(
    name: str | None, known: Mapping[str, torch.dtype] = _DTYPES
) -> torch.dtype | None:
    if name is not None and name not in known:
        raise UserError(f"dtype {name!r} is not known; wanted one of {', '.join(known)}.")
    return None if name is None else known[name]
