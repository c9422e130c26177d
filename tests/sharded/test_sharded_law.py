"""One law for every function of torch on a sharded tensor: the whole's answer, or an error.

The functions are enumerated, not listed, so a torch release cannot add one that breaks the law.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fsdp_compose.base.group import Group
from fsdp_compose.sharded import ShardedWeightError, is_sharded, own_slice, spec_of

from harness import run_ranks
from sharded_values import shard, world

OF_THE_OBJECT = """
    __annotations__ __class__ __delattr__ __dict__ __dir__ __doc__ __format__ __getattribute__
    __getstate__ __hash__ __init__ __init_subclass__ __module__ __new__ __reduce_ex__ __repr__
    __setattr__ __setstate__ __sizeof__ __str__ __subclasshook__ __torch_dispatch__
    __torch_function__ __weakref__ _cdata _reduce_ex_internal
"""
NOT_DETERMINED = """
    empty empty_like empty_permuted empty_strided new_empty new_empty_strided resize_as_ resize_as
    share_memory_ register_hook register_post_accumulate_grad_hook backward
"""
NOT_OF_TENSORS = """
    classproperty compile cond export fork from_file frombuffer import_ir_module
    import_ir_module_from_buffer init_num_threads load manual_seed parse_ir parse_schema save seed
    initial_seed typename
    thread_safe_generator unify_type_list vmap wait while_loop handle_torch_function
"""
READ_MEMORY = "as_tensor asarray new new_tensor tensor to_dlpack"
"""Functions that no class can intercept; see ``test_what_cannot_raise_is_documented``."""

SKIPPED = set(f"{OF_THE_OBJECT} {NOT_DETERMINED} {NOT_OF_TENSORS} {READ_MEMORY}".split())
SKIPPED_STARTS = ("set_", "get_", "has_torch_function", "is_grad_", "_")
SPACES = (Tensor, torch, F, torch.linalg, torch.special)
PATTERNS: list[Callable[[Any, Any], tuple[Any, ...]]] = [
    lambda p, w: (p,),
    lambda p, w: (p, p),
    lambda p, w: (p, w),
    lambda p, w: (w, p),
    lambda p, w: (p, 2),
    lambda p, w: (p, 0),
    lambda p, w: (p, torch.tensor(2.0)),
    lambda p, w: (torch.tensor(2.0), p),
    lambda p, w: (p, w, p),
    lambda p, w: ([p, p],),
]


def functions() -> Iterator[tuple[str, bool, Callable[..., Any]]]:
    """(name, is of Tensor, function) for each that may be given tensors."""
    for space in SPACES:
        for name in sorted(dir(space)):
            listed = name.startswith(("_foreach_", "__")) and space in (Tensor, torch)
            if name in SKIPPED or (name.startswith(SKIPPED_STARTS) and not listed):
                continue
            found = getattr(space, name)
            if isinstance(found, type):
                continue
            if space is Tensor:
                yield name, True, read_or_call(name)
            elif callable(found) and not name.startswith("__"):
                yield f"{space.__name__}.{name}", False, found


def read_or_call(name: str) -> Callable[..., Any]:
    def run(tensor: Any, *args: Any) -> Any:
        value = getattr(tensor, name)
        if not callable(value):
            if args:
                raise TypeError(f"{name} is not called")
            return value
        return value(*args)

    return run


def difference(found: Any, wanted: Any) -> str | None:
    """What is not the same; a slice is compared with that of the whole, so ranks need not talk."""
    if isinstance(found, Tensor):
        if not isinstance(wanted, Tensor) or found.shape != wanted.shape:
            return f"{type(found).__name__} of shape {tuple(found.shape)}"
        if found.dtype != wanted.dtype:
            return f"dtype {found.dtype}"
        if is_sharded(found):
            found, wanted = found.to_local(), own_slice(wanted, spec_of(found))
        pair = (t.detach().to(torch.complex128) for t in (found, wanted))
        return None if torch.allclose(*pair, equal_nan=True) else "values"
    if isinstance(found, list | tuple) and isinstance(wanted, list | tuple):
        if len(found) != len(wanted):
            return "length"
        each = [difference(*pair) for pair in zip(found, wanted, strict=True)]
        return next((text for text in each if text), None)
    return None if found == wanted or found is wanted else f"{found!r:.60}"


def breaks(call: Callable[..., Any], pattern: Callable[..., Any], whole: Tensor, p: Any) -> Any:
    """How the law is broken, None where it holds."""
    torch.default_generator.manual_seed(0)  # torch.manual_seed takes a millisecond
    try:
        found = call(*pattern(p, whole.clone()))
    except Exception:
        return None
    plain = whole.clone()
    torch.default_generator.manual_seed(0)  # torch.manual_seed takes a millisecond
    try:
        wanted = call(*pattern(plain, whole.clone()))
    except Exception as error:
        return f"plain raises {error!r:.60}, ours returns {found!r:.60}"
    answers = [difference(found, wanted), difference(p, plain)]
    return next((text for text in answers if text), None)


def law(group: Group, wholes: list[Tensor]) -> tuple[list[str], int]:
    broken: list[str] = []
    count = 0
    for whole in wholes:
        first = shard([whole], group)[0].detach()
        for name, is_method, call in functions():
            for index, pattern in enumerate(PATTERNS):
                if is_method and index == len(PATTERNS) - 1:
                    continue
                count += 1
                text = breaks(call, pattern, whole, first.clone())
                if text is not None:
                    broken.append(f"{name} {index} {tuple(whole.shape)}: {text}")
    return broken, count


def test_every_function_gives_the_wholes_answer() -> None:
    """Equal to the full tensor's, a tagged slice of that, or an error; over 1,000 functions."""

    def ranks(rank: int) -> None:
        generator = torch.Generator().manual_seed(0)
        wholes = [torch.rand(s, generator=generator) + 0.1 for s in ((3, 3), (5,), ())]
        with warnings.catch_warnings(), torch.no_grad():
            warnings.simplefilter("ignore")
            broken, count = law(world(), wholes)
        assert count > 20_000, count
        assert broken == []

    run_ranks(ranks, 2, timeout=300)


BYPASSES: list[tuple[str, Callable[[Any], Any]]] = [
    ("torch.tensor(x)", lambda x: torch.tensor(x)),
    ("torch.Tensor(x)", lambda x: torch.Tensor(x)),
    ("y.new(x)", lambda x: torch.zeros(2).new(x)),
    ("y.new_tensor(x)", lambda x: torch.zeros(2).new_tensor(x)),
    ("torch.as_tensor(x, dtype)", lambda x: torch.as_tensor(x, dtype=torch.float64)),
    ("torch.asarray(x, dtype)", lambda x: torch.asarray(x, dtype=torch.float64)),
    ("torch.autograd.Variable(x)", lambda x: torch.autograd.Variable(x)),
    ("torch.vmap", lambda x: torch.vmap(lambda t: 2 * t)(x)),
    ("torch.func.grad", lambda x: torch.func.grad(lambda t: t.square().sum())(x)),
    ("torch.func.vjp", lambda x: torch.func.vjp(lambda t: 2 * t, x)[0]),
]


def test_what_cannot_raise_is_documented() -> None:
    """What is read below ``__torch_function__`` is a plain 1-D slice, as help() says."""

    def ranks(rank: int) -> None:
        p = shard([torch.rand(3, 3)], world())[0]
        text = " ".join((ShardedWeightError.__doc__ or "").split())
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            for name, call in BYPASSES:
                assert name in text, name
                out = call(p.detach())
                assert type(out) is Tensor and out.ndim == 1, name
                with pytest.raises(ShardedWeightError, match="needs the whole of"):
                    call(p)
        capsule = torch.utils.dlpack.to_dlpack(p.detach())
        assert torch.from_dlpack(capsule).ndim == 1 and "to_dlpack(p)" in text
        plain = nn.Parameter(torch.rand(3, 3))
        plain.data = p.data
        assert plain.ndim == 1 and "plain.data = p" in text
        for call in (
            lambda: p.new_tensor(p),
            lambda: p.new(p),
            lambda: p.new(2),
            lambda: torch.inner(p, torch.tensor(2.0)),
            lambda: torch.dot(shard([torch.rand(5)], world())[0], torch.tensor(2.0)),
            lambda: torch.dot(shard([torch.rand(5)], world())[0], torch.rand(1)),
            lambda: torch.tensor([p]),
            lambda: torch.as_tensor([p, p]),
        ):
            with pytest.raises(ShardedWeightError):
                call()
        with pytest.raises(RuntimeError):
            nn.Parameter(p)
        assert p.new_tensor([1.0, 2.0]).tolist() == [1, 2]
        assert torch.as_tensor(p) is p and torch.asarray(p.data).shape == (3, 3)

    run_ranks(ranks, 2)
