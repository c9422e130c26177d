"""Checks what the functions of a user's ``Transport`` return, and says what they wait for.

Those of the library's own begin to communicate and return. Those of a user may wait for other
ranks themselves, and a rank that has died then ends them in an error of the backend's.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import fields, replace
from typing import Any

import torch

from fsdp_compose.base.group import Call, Transport, check_started
from fsdp_compose.comm import waiting
from fsdp_compose.comm.messages import no_answer
from fsdp_compose.comm.transports import AT_ONCE, ON_HOST, PAIRS

_BUILT_IN = [getattr(way, each.name) for way in (PAIRS, ON_HOST, AT_ONCE) for each in fields(way)]


def watch_transport(transport: Transport | None) -> Transport | None:
    """``transport``, with a user's functions watched; the library's own are left as they are."""
    watched: dict[str, Any] = {}
    for name, check in _CHECKS.items():
        function = getattr(transport, name, None)
        if function is not None and not any(function is known for known in _BUILT_IN):
            watched[name] = _watch(name, function, check)
    return replace(transport, **watched) if transport is not None and watched else transport


def _watch(name: str, function: Callable[..., Any], check: Callable[..., None]) -> Any:
    @functools.wraps(function)
    def start(*given: Any) -> Any:
        call: Call = given[-1]
        waiting.enter(call.purpose, call.group.ranks)
        try:
            started = function(*given)
        except torch.OutOfMemoryError:
            raise
        except RuntimeError as error:
            group = call.group
            others = [str(rank) for rank in group.ranks if rank != group.ranks[group.rank]]
            who = f"rank {others[0]}" if len(others) == 1 else f"one of ranks {', '.join(others)}"
            absent = waiting.find_absent() or "it has died, is stuck, or does not take part"
            advice = (
                f"{absent}; or the transport's function for {name} is wrong. Look at what other "
                "ranks printed."
            )
            raise no_answer(call.purpose, who, advice, error) from error
        finally:
            waiting.end_wait()
        check(name, started, *given)
        return started

    return start


def _check_alone(name: str, started: object, *_: object) -> None:
    check_started(name, started)


def _check_reduce(
    name: str, started: object, whole: torch.Tensor, parts: Sequence[torch.Tensor], call: Call
) -> None:
    check_started(name, started, whole, parts[call.group.rank], call.group)


def _check_each(
    name: str, started: Any, wholes: Sequence[torch.Tensor], parts: Sequence[Any], call: Call
) -> None:
    for each, whole, cut in zip(started, wholes, parts, strict=True):
        _check_reduce(name, each, whole, cut, call)


_CHECKS: dict[str, Callable[..., None]] = {
    "gather": _check_alone,
    "gather_all": _check_alone,
    "reduce_scatter": _check_reduce,
    "reduce_all": _check_each,
    "exchange": _check_alone,
}
