"""Ranks agree on what their optimizers hold before anything is gathered, or all of them raise.

What is cut is compared by name, type and shape; what is not (step counts, learning rates, an
optimizer's own sums) by its numbers too, since one rank's are saved for all. Whole tensors that
ranks are given are compared by some of their numbers, since each rank cuts its slices out of its
own.
"""

from __future__ import annotations

import hashlib
import zlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fsdp_compose.base.group import Group
from fsdp_compose.checkpoint.optimizer.fit import NUMBERS
from fsdp_compose.checkpoint.optimizer.members import Part, settings_of
from fsdp_compose.checkpoint.optimizer.shapes import OwnedState
from fsdp_compose.checkpoint.values import is_cut, sample_bytes, whole_shape
from fsdp_compose.comm.messages import gather_objects, raise_on_all, to_bytes
from fsdp_compose.core.state import owner_of
from fsdp_compose.sharded import is_sharded, spec_of, tag

Fact = tuple[Any, ...]
"""Of cut state ("cut", dtype, whole shape), of any other tensor ("tensor", dtype, shape, numbers),
else ("value", text)."""

Facts = dict[str, dict[tuple[str, Any], Fact]]
"""Parameter -> ("state", key), ("setting", key) of its group or ("entry", key) beside both -> what
must be alike on all ranks."""

_FEW = 16
"""Elements up to which numbers are compared as such; longer tensors are compared by a digest."""


_NOT_CUT = (
    "wanted the same on every rank, since it is not cut. An optimizer that takes sums or norms "
    "over local_parameters or flat_parameters takes them of one rank's slices: give it the sharded "
    "parameters, whose sums are of the whole, or use owner_step where it needs whole matrices."
)
_PASS = "pass the same on every rank, or, where only rank 0 has it, pass broadcast_from_rank0=True."


class _Report(NamedTuple):
    facts: Facts
    empty: set[str]  # parameters of which the rank has no element


def agree_on_state(
    caller: str, result: Mapping[str, Any], parts: Mapping[str, Part], groups: Sequence[Group]
) -> None:
    """Raise on every rank where the optimizers of two ranks differ; a collective.

    An optimizer may skip a slice without elements. Then the other ranks tell what state it lacks,
    and it is added to ``result``.

    Raises:
        RuntimeError: naming the parameter, what differs and the ranks.
    """
    facts = _facts_of(result, parts, _fact)
    for group, mine, reports in _compare_on_all(caller, caller, _NOT_CUT, facts, parts, groups):
        _fill(caller, result["state"], parts, mine, reports, group)


def agree_on_given(
    given: Mapping[str, Any], parts: Mapping[str, Part], groups: Sequence[Group]
) -> None:
    """Raise on every rank where two ranks were given different state to load; a collective.

    Raises:
        RuntimeError: naming the parameter, what differs and the ranks.
    """
    facts = _facts_of(given, parts, _given_fact)
    problem = "the ranks were given different things"
    _compare_on_all("load_optim_state_dict", problem, _PASS, facts, parts, groups)


def _compare_on_all(
    caller: str,
    problem: str,
    advice: str,
    facts: Facts,
    parts: Mapping[str, Part],
    groups: Sequence[Group],
) -> list[tuple[Group, Facts, list[_Report]]]:
    """Compare every rank's facts; give those that differ where a rank has no elements."""
    error: Exception | None = None
    found: list[tuple[Group, Facts, list[_Report]]] = []
    for group in groups:
        mine = {name: fact for name, fact in facts.items() if _is_over(parts[name], group)}
        digests = gather_objects(_digest(mine), group, caller)
        if all(digest == digests[0] for digest in digests):
            continue
        empty = {name for name in mine if _is_empty(parts[name])}
        reports = gather_objects(_Report(mine, empty), group, caller)
        found.append((group, mine, reports))
        try:
            _compare(problem, reports, group, advice)
        except RuntimeError as difference:  # ranks of other groups wait in theirs
            error = error or difference
    raise_on_all(error, groups, what=caller)
    return found


def _facts_of(
    state: Mapping[str, Any], parts: Mapping[str, Part], fact_of: Callable[[Any], Fact]
) -> Facts:
    facts: Facts = {}
    beside = state.keys() - {"state", "param_groups", NUMBERS}
    entries = {("entry", key): _fact(state[key]) for key in beside}
    for group in state["param_groups"]:
        settings = {("setting", k): _fact(v) for k, v in settings_of(group).items()} | entries
        for name in group["params"]:
            if name in parts and parts[name].entry is not None:
                facts[name] = dict(settings)
    for name, values in state["state"].items():
        if name in facts and not isinstance(values, OwnedState):
            facts[name].update((("state", key), fact_of(value)) for key, value in values.items())
    return facts


def _fact(value: Any) -> Fact:
    if is_sharded(value):
        return "cut", str(value.dtype), tuple(spec_of(value).whole_shape)
    if isinstance(value, Tensor):
        return "tensor", str(value.dtype), tuple(value.shape), _numbers(value.detach())
    return "value", _text(value)


def _given_fact(value: Any) -> Fact:
    if is_cut(value):
        return "cut", str(value.dtype), tuple(whole_shape(value))
    if isinstance(value, Tensor) and value.numel() > _FEW:
        sampled = f"values with checksum {zlib.crc32(sample_bytes(value)):08x}"
        return "tensor", str(value.dtype), tuple(value.shape), sampled
    return _fact(value)


def _numbers(tensor: Tensor) -> Any:
    if tensor.numel() <= _FEW:
        return str(tensor.tolist())
    data = tensor.cpu().contiguous().reshape(-1).view(torch.uint8)
    return hashlib.blake2b(to_bytes(data), digest_size=8).hexdigest()


def _text(value: Any) -> str:
    """Write a setting for comparison; of objects and functions the class alone."""
    if isinstance(value, list | tuple):
        return f"{type(value).__name__}({', '.join(map(_text, value))})"
    if isinstance(value, dict):
        return str({str(key): _text(item) for key, item in value.items()})
    if isinstance(value, Tensor):
        return str(_fact(value))
    plain = value is None or isinstance(value, bool | int | float | complex | str)
    return repr(value) if plain else type(value).__name__


def _digest(facts: Facts) -> bytes:
    ordered = [(name, sorted(facts[name].items(), key=str)) for name in sorted(facts)]
    return hashlib.blake2b(repr(ordered).encode(), digest_size=16).digest()


def _is_over(part: Part, group: Group) -> bool:
    """Whether the parameter is cut or copied over this group."""
    assert part.entry is not None
    parallel = part.entry.spec.parallel
    groups = (*owner_of(part.entry).mesh.groups, *(() if parallel is None else parallel.groups))
    return any(group.ranks == other.ranks for other in groups)


def _is_empty(part: Part) -> bool:
    return part.spec is not None and part.spec.start == part.spec.stop


def _lacks_state(report: _Report, name: str) -> bool:
    """Whether the rank has no element of the parameter, and so may have no state of it."""
    return name in report.empty and not any(kind == "state" for kind, _ in report.facts[name])


def _compare(problem: str, reports: Sequence[_Report], group: Group, advice: str) -> None:
    ranked = list(zip(group.ranks, reports, strict=True))
    for name in dict.fromkeys(name for report in reports for name in report.facts):
        absent = [rank for rank, report in ranked if name not in report.facts]
        if absent:
            raise RuntimeError(
                f"{problem}: the optimizer of rank {absent[0]} does not hold {name!r}, those of "
                "other ranks do; every rank must give its optimizers the same parameters."
            )
        every = [(rank, report.facts[name]) for rank, report in ranked]
        found = [(r, report.facts[name]) for r, report in ranked if not _lacks_state(report, name)]
        for known in (found, [(rank, _only_settings(facts)) for rank, facts in every]):
            for other in known[1:]:
                difference = _find_difference(name, known[0], other)
                if difference is not None:
                    raise RuntimeError(f"{problem}: {difference}; {advice}")


def _only_settings(facts: Mapping[tuple[str, Any], Fact]) -> dict[tuple[str, Any], Fact]:
    return {at: fact for at, fact in facts.items() if at[0] != "state"}


def _find_difference(
    name: str, a: tuple[int, dict[Any, Fact]], b: tuple[int, dict[Any, Fact]]
) -> str | None:
    for at in (*a[1], *b[1]):
        if a[1].get(at) != b[1].get(at):
            kind, key = at
            of = f"{kind} {key!r} of {name!r}"
            what = f"{key!r}, beside 'state' and 'param_groups'," if kind == "entry" else of
            return (
                f"{what} is {_show(a[1].get(at))} on rank {a[0]} and "
                f"{_show(b[1].get(at))} on rank {b[0]}"
            )
    return None


def _show(fact: Fact | None) -> str:
    if fact is None:
        return "absent"
    if fact[0] == "cut":
        return f"cut, {fact[1]} of shape {fact[2]}"
    return str(fact[-1])


def _fill(
    caller: str,
    state: dict[str, Any],
    parts: Mapping[str, Part],
    mine: Facts,
    reports: Sequence[_Report],
    group: Group,
) -> None:
    """Add the state of parameters that this rank's optimizer skipped, having no element of them."""
    skipped = {n for report in reports for n in report.facts if _lacks_state(report, n)}
    first: dict[str, int] = {}  # the rank that has the state of a parameter, and tells it
    for rank, report in enumerate(reports):
        for name in skipped:
            if not _lacks_state(report, name):
                first.setdefault(name, rank)
    told = {
        name: {key: _copy_whole(state[name][key]) for kind, key in mine[name] if kind == "state"}
        for name, rank in first.items()
        if rank == group.rank
    }
    values = {name: v for found in gather_objects(told, group, caller) for name, v in found.items()}
    for name in mine:
        if name in first and _lacks_state(reports[group.rank], name):
            facts = reports[first[name]].facts[name]
            own = {
                key: _make_slice(parts[name], facts["state", key]) if value is None else value[0]
                for key, value in values[name].items()
            }
            if own:
                state[name] = own


def _copy_whole(value: Any) -> Any:
    """What is alike on all ranks, in a tuple; None for what is cut."""
    if is_sharded(value):
        return None
    return (value.detach().cpu() if isinstance(value, Tensor) else value,)


def _make_slice(part: Part, fact: Fact) -> Any:
    """Make a slice without elements."""
    assert part.entry is not None and part.spec is not None
    dtype = getattr(torch, fact[1].removeprefix("torch."))
    return tag(torch.empty(0, dtype=dtype, device=part.entry.param.device), part.spec)
