"""Pipeline stages: ranks that hold other modules of one model, and who saves what of it.

Ranks that share a group of a module hold the same stage. Stages call their parameters by names of
their own, as in the whole model. A name that two of them have is a weight tied between them: it is
saved once, and loaded into each.
"""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

import torch.distributed as dist
from torch import Tensor, nn

from fsdp_compose.base.group import Group
from fsdp_compose.base.torch_private import IncompatibleKeys
from fsdp_compose.buckets.entries import entry_of
from fsdp_compose.checkpoint.contents import (
    Contents,
    contents_of,
    loads_by_own_code,
    slots_to_load,
    visit_values,
)
from fsdp_compose.checkpoint.model import match
from fsdp_compose.checkpoint.optimizer.nested import write_exactly
from fsdp_compose.checkpoint.optimizer.shapes import OwnedState
from fsdp_compose.checkpoint.ranks import groups_of
from fsdp_compose.checkpoint.values import find_unwritable, gather_whole, is_cut
from fsdp_compose.comm.messages import SharedErrors, difference, gather_objects, raise_on_all
from fsdp_compose.construct.names import clean_name, name_cleaner
from fsdp_compose.core.guards.collective_log import code_of
from fsdp_compose.core.guards.divisors import held_by_fewer
from fsdp_compose.core.guards.replicas import checksum
from fsdp_compose.core.guards.scope_parameters import leaf_of
from fsdp_compose.core.guards.units import units_holding
from fsdp_compose.core.state import find_state
from fsdp_compose.sharded import is_sharded, to_local


@dataclass(frozen=True)
class Stages:
    """The stages that the ranks of a group hold.

    Attributes:
        members: ranks in ``group`` of each stage; stages by their first rank.
        mine: which of them this rank holds.
        elsewhere: clean names that only other stages have, or ranks with other experts.
        earlier: names of this stage that an earlier one has too, which saves them.
        leads: clean names that fewer ranks of a stage hold, of which this rank is the first.
        of_fewer: all that fewer ranks of a stage hold, on any rank.
    """

    group: Group
    members: tuple[tuple[int, ...], ...]
    mine: int
    elsewhere: frozenset[str] = frozenset()
    earlier: frozenset[str] = frozenset()
    leads: frozenset[str] = frozenset()
    of_fewer: frozenset[str] = frozenset()

    @property
    def are_uneven(self) -> bool:
        return bool(self.of_fewer)

    @property
    def are_several(self) -> bool:
        return len(self.members) > 1

    @property
    def is_first(self) -> bool:
        """Whether this rank saves what all ranks of its stage have alike."""
        return self.members[self.mine][0] == self.group.rank

    def gather(self, value: Any) -> list[Any]:
        """The picklable ``value`` of each stage's first rank; every rank of the group must call."""
        if not self.are_several:
            return [value]
        found = gather_objects(value if self.is_first else None, self.group)
        return [found[ranks[0]] for ranks in self.members]

    def agree(self, given: object) -> None:
        """Raise, on every rank of the group, unless the ranks of each stage pass the same.

        Args:
            given: picklable and small; its text is shown where two ranks differ.

        Raises:
            RuntimeError: some differ.
        """
        found = gather_objects(given, self.group)
        for members in self.members:
            ranks = [self.group.ranks[i] for i in members]
            if problem := difference([found[i] for i in members], ranks):
                raise_on_all(problem, ())

    def keep_own(self, names: Mapping[str, Any]) -> dict[str, Any]:
        """Leave out the entries of a checkpoint that this rank has no place for, and others do."""
        return {
            name: value
            for name, value in names.items()
            if clean_name(str(name)) not in self.elsewhere
        }

    def keep_own_groups(self, optim: Mapping[str, Any]) -> dict[str, Any]:
        """Leave out the optimizer state of parameters that other ranks alone have."""
        groups = [
            {
                **group,
                "params": [n for n in group["params"] if clean_name(str(n)) not in self.elsewhere],
            }
            for group in optim["param_groups"]
        ]
        return {**optim, "state": self.keep_own(optim["state"]), "param_groups": groups}

    def advise(self, unexpected: Sequence[str]) -> str:
        """Say what to call where unexpected names may be those of other stages."""
        if not unexpected or not dist.is_initialized() or self.group.size == dist.get_world_size():
            return ""
        return (
            "\n  If other ranks hold the unexpected ones, as stages of a pipeline, call this on "
            "every rank with process_group=torch.distributed.group.WORLD."
        )


class _Report(NamedTuple):
    """What a rank tells the others, so that they know who holds which stage."""

    peers: list[int]  # ranks that hold slices or copies of the same parameters
    has_units: bool
    copies: dict[tuple[int, ...], int]  # by ranks that should hold the same, a sum of it
    of_fewer: list[str]  # clean names that fewer ranks hold
    plain: dict[str, int | None]  # see ``_sum_plain``


def find_stages(what: str, module: nn.Module, group: Group, saves: bool) -> Stages:
    """See which ranks hold which stage; every rank of ``group`` must call it.

    Args:
        what: the function that was called, for messages.
        saves: check that what several stages call by one name is one parameter, and warn where
            copies beside tensor parallelism differ.

    Raises:
        RuntimeError: on every rank: it is not.
    """
    if group.size == 1:
        return Stages(group, ((0,),), 0)
    peers = sorted({rank for other in groups_of(module) for rank in other.ranks})
    has_units = bool(units_holding(module))
    copies = _copies_beside(module) if saves else {}
    sums = {ranks: code_of(sorted(found.items())) for ranks, found in copies.items()}
    names, of_fewer = _names_of_fewer(module)
    mine = _Report(peers, has_units, sums, of_fewer, _sum_plain(module, saves))
    reports: list[_Report] = gather_objects(mine, group)
    members = _components([report.peers for report in reports], group.ranks)
    all_sums = {pair for report in reports for pair in report.copies.items()}
    if len(all_sums) > len(dict(all_sums)):  # ranks that should hold the same do not
        _warn_of_copies(what, gather_objects(copies, group), group)
    first = _find_first_holders(what, reports, members, group)
    stages = Stages(
        group,
        (tuple(range(group.size)),),
        0,
        elsewhere=frozenset(first.keys() - names),
        leads=frozenset(name for name, rank in first.items() if rank == group.rank),
        of_fewer=frozenset(first),
    )
    if len(members) == 1 or not any(report.has_units for report in reports):
        return stages
    own = next(i for i, ranks in enumerate(members) if group.rank in ranks)
    return _compare_stages(what, module, replace(stages, members=members, mine=own), saves)


def _find_first_holders(
    what: str, reports: Sequence[_Report], members: Sequence[tuple[int, ...]], group: Group
) -> dict[str, int]:
    """Find the first holder of each name that fewer ranks of a stage hold."""
    held = [(name, rank) for rank, report in enumerate(reports) for name in report.of_fewer]
    first = dict(reversed(held))
    for ranks in members:
        plain = {rank: reports[rank].plain for rank in ranks}
        first = {**_compare_plain(what, plain, group), **first}
    return first


def _compare_stages(what: str, module: nn.Module, stages: Stages, saves: bool) -> Stages:
    """Find which names other stages have, and check what several have; as of ``find_stages``."""
    with SharedErrors(stages.group):
        values = contents_of(module).values
    by_stage = stages.gather(list(values))
    before = {name for listed in by_stage[: stages.mine] for name in listed}
    others = {name for i, listed in enumerate(by_stage) if i != stages.mine for name in listed}
    stages = replace(
        stages,
        elsewhere=(stages.elsewhere | others) - set(values),
        earlier=frozenset(before & set(values)),
    )
    if saves:
        shared = [name for name in values if name in others]
        _check_alike(what, stages, _identify_all({name: values[name] for name in shared}))
    return stages


def _names_of_fewer(module: nn.Module) -> tuple[set[str], list[str]]:
    """The clean names in ``module``, and those in units that fewer ranks hold, such as experts."""
    params = module.named_parameters(remove_duplicate=False)
    buffers = module.named_buffers(remove_duplicate=False)
    clean = name_cleaner(module)
    names = {clean(name) for name, _ in chain(params, buffers)}
    holding = units_holding(module)
    entries = set(held_by_fewer(entry for unit in holding for entry in unit.entries))
    units = {id(unit) for unit in holding if not entries.isdisjoint(unit.entries)}
    own = {
        clean(name)
        for name, param in module.named_parameters(remove_duplicate=False)
        if entry_of(leaf_of(param)) in entries
    }
    paths = tuple(
        clean(f"{path}.")
        for path, submodule in module.named_modules(remove_duplicate=False)
        if (state := find_state(submodule)) is not None and id(state.unit) in units
    )
    return names, [name for name in names if name.startswith(paths) or name in own]


def _sum_plain(module: nn.Module, saves: bool) -> dict[str, int | None]:
    """The clean names of what lies in no unit; in a save, with checksums of trained parameters."""
    found: dict[str, int | None] = {}
    clean = name_cleaner(module)
    for name, value in slots_to_load(module).items():
        if isinstance(value, Tensor) and not is_cut(leaf_of(value)):
            is_summed = saves and type(value) is nn.Parameter and value.requires_grad
            found[clean(name)] = checksum(value) if is_summed and not value.is_meta else None
    return found


def _compare_plain(
    what: str, reports: Mapping[int, dict[str, int | None]], group: Group
) -> dict[str, int]:
    """By name of what lies in no unit and some ranks of a stage lack, the first rank that has it.

    Warns of trained parameters that differ between the ranks that have them.
    """
    first: dict[str, int] = {}
    differ: list[tuple[str, int]] = []
    holders = Counter(name for sums in reports.values() for name in sums)
    for rank, sums in reports.items():
        for name, total in sums.items():
            wanted = reports[first.setdefault(name, rank)][name]
            if None not in (wanted, total) and wanted != total:
                differ.append((name, rank))
    for name, rank in differ[:1]:
        warnings.warn(
            f"{what}: parameter {name!r} is in no unit (ignored=), and rank {group.ranks[rank]} "
            f"holds other numbers than rank {group.ranks[first[name]]}, whose are saved. If each "
            "rank has an expert of its own, give each a name of its own, such as its number in an "
            "nn.ModuleDict; else average its gradients over the ranks.",
            stacklevel=5,
        )
    return {name: first[name] for name, count in holders.items() if count < len(reports)}


Copies: TypeAlias = "dict[tuple[int, ...], dict[tuple[str, int, int], int]]"


def _copies_beside(module: nn.Module) -> Copies:
    """Checksums of slices that tensor parallelism repeats, by the ranks that hold the copies.

    Shard groups whose parts are of unequal sizes may cut it in other places; such slices are not
    compared.
    """
    found: Copies = {}
    buckets = [bucket for unit in units_holding(module) for bucket in unit.buckets]
    for entry in [entry for bucket in buckets for entry in bucket.entries]:
        spec = entry.spec
        for axis in () if spec.parallel is None else spec.parallel.axes:
            if axis.dim is None and axis.group.size > 1 and is_sharded(entry.param):
                of_group = found.setdefault(axis.group.ranks, {})
                of_group[spec.fqn, spec.start, spec.stop] = checksum(to_local(entry.param))
    return found


def _warn_of_copies(what: str, reports: Iterable[Copies], group: Group) -> None:
    first: dict[tuple[object, ...], int] = {}
    for rank, copies in zip(group.ranks, reports, strict=True):
        for ranks, sums in copies.items():
            for (name, *own), total in sums.items():
                if first.setdefault((ranks, name, *own), total) != total:
                    warnings.warn(
                        f"{what}: parameter {name!r} is copied on ranks {list(ranks)} beside "
                        f"layers that tensor parallelism split, and rank {rank} holds other "
                        f"numbers than rank {ranks[0]}, whose are saved. Its gradients differed, "
                        "or it was written on some of the ranks only; see verify_replicas(module).",
                        stacklevel=5,
                    )
                    return


def _components(peers: Iterable[list[int]], ranks: tuple[int, ...]) -> tuple[tuple[int, ...], ...]:
    """Group the positions in ``ranks`` that their ``peers`` connect."""
    position = {rank: i for i, rank in enumerate(ranks)}
    label = list(range(len(ranks)))
    for i, found in enumerate(peers):
        joined = {label[i], *(label[position[rank]] for rank in found if rank in position)}
        label = [min(joined) if old in joined else old for old in label]
    return tuple(
        tuple(i for i, found in enumerate(label) if found == first) for first in sorted(set(label))
    )


def _identify_all(values: Mapping[str, Any]) -> dict[str, Any]:
    """Sum values by name, to tell them apart; a collective of the stage's ranks."""
    found: dict[str, Any] = {
        name: repr(value) for name, value in values.items() if not isinstance(value, Tensor)
    }

    def identify(name: str, full: Tensor) -> None:
        found[name] = _identify(full)

    visit_values(values, identify)
    return found


def _identify(tensor: Tensor) -> Any:
    return tuple(tensor.shape), str(tensor.dtype), checksum(tensor.detach().contiguous())


def _check_alike(what: str, stages: Stages, mine: dict[str, Any]) -> None:
    """Raise, on every rank, where stages have other values under one name."""
    known: dict[str, tuple[int, Any]] = {}
    for stage, sums in enumerate(stages.gather(mine)):
        for name, found in sums.items():
            first, wanted = known.setdefault(name, (stage, found))
            if found != wanted:
                ranks = [[stages.group.ranks[i] for i in stages.members[s]] for s in (first, stage)]
                raise RuntimeError(
                    f"{what}: {name!r} has one value on ranks {ranks[0]} and another on ranks "
                    f"{ranks[1]}, which hold other stages of a pipeline; a checkpoint has one "
                    "value for each name. Name the stages' modules as in the whole model, or pass "
                    "nn.ModuleDict({str(index): stage}) on every rank, for saving and for loading. "
                    "If it is a weight that stages tie, its values have drifted apart: sum its "
                    "gradients over the stages that have it."
                )


@dataclass(frozen=True)
class Chosen:
    """Which stored values a module reads.

    Attributes:
        sources: by name in the module, the name under which its value is stored; a tied parameter
            has one for all its names.
        unknown: stored names that the module does not have, and that a hook of its own may know.
        left_out: the missing and the unexpected names.
    """

    sources: dict[str, str]
    unknown: list[str]
    left_out: IncompatibleKeys


def choose_stored(
    where: Path, contents: Contents, outlines: Mapping[str, Any], strict: bool, stages: Stages
) -> Chosen:
    """Compare what is stored with what a module has; nothing is read.

    Args:
        outlines: by stored name, a meta tensor for a tensor, or a string for anything else.

    Raises:
        RuntimeError: names or shapes do not fit.
    """
    custom = loads_by_own_code(contents.module)
    given = stages.keep_own(outlines)
    matched = match(contents.module, contents.values, given, strict and not custom, custom, None)
    problem = matched.problem
    if problem is None and not custom:
        problem = find_unwritable(matched.values, contents.values)
    if problem is not None:
        raise type(problem)(f"{where}: {problem}{stages.advise(matched.unexpected)}")
    stored = {id(outline): name for name, outline in given.items()}
    sources = {name: stored[id(outline)] for name, outline in matched.values.items()}
    once = {id(contents.values[n]): s for n, s in sources.items()}
    for name in sources:
        if isinstance(contents.values[name], Tensor):
            sources[name] = once[id(contents.values[name])]
    unknown = matched.unexpected if custom else []
    return Chosen(sources, unknown, IncompatibleKeys(matched.missing, matched.unexpected))


def join_states(
    state: dict[str, Any], mine: list[dict[str, Any]], stages: Stages
) -> dict[str, Any]:
    """What this rank saves where ranks hold other layers; every rank of the group must call it.

    What an earlier stage saves is left out, and the optimizers' groups become those of all ranks.

    Args:
        mine: the groups of this rank's optimizers.

    Raises:
        RuntimeError: on every rank: the optimizer state of a tied weight differs between stages.
    """
    if not stages.are_several and not stages.are_uneven:
        return state
    optim = state.get("optim", {})
    states: Mapping[str, Any] = optim.get("state", {})
    count = Counter(name for names in stages.gather(list(states)) for name in names)
    sums = {
        f"{key} of {name}": _identify(gather_whole(value))
        if isinstance(value, Tensor)
        else repr(value)
        for name, values in states.items()
        if count[name] > 1 and not isinstance(values, OwnedState)
        for key, value in values.items()
    }
    _check_alike("save_checkpoint", stages, sums)
    by_rank = gather_objects(mine, stages.group) if stages.are_uneven else stages.gather(mine)
    groups = _join_groups(by_rank)
    model = {n: v for n, v in state["model"].items() if clean_name(n) not in stages.earlier}
    kept = {**state, "model": model}
    if optim or groups:
        own = {n: v for n, v in states.items() if n not in stages.earlier}
        kept["optim"] = {"state": own}
        if stages.group.rank == 0:
            kept["optim"] = {**optim, "state": own, "param_groups": groups}
    return kept


def _join_groups(by_rank: Iterable[list[dict[str, Any]]]) -> list[dict[str, Any]]:
    """Join the groups of all ranks; equal settings at the same place become one group."""
    joined: dict[tuple[int, str], dict[str, Any]] = {}
    seen: set[str] = set()
    for groups in by_rank:
        for place, group in enumerate(groups):
            settings = {key: value for key, value in group.items() if key != "params"}
            names = [name for name in group["params"] if name not in seen]
            seen.update(names)
            one = joined.setdefault((place, write_exactly(settings)), {**settings, "params": []})
            one["params"] = [*one["params"], *names]
    return list(joined.values())
