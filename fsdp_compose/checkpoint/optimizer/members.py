"""What an optimizer's parameters are: module parameters by name, or raw pieces of a shard.

An optimizer may hold the sharded parameters themselves, plain ones, or plain tensors that lie in a
bucket's shard: one parameter's slice or several in a row. The last are recognised by their storage,
so that whoever hands them out need not tell this file.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from fsdp_compose.buckets.bucket import Bucket, Entry
from fsdp_compose.buckets.entries import find_entry
from fsdp_compose.checkpoint.values import whole_shape
from fsdp_compose.construct.names import parameter_names
from fsdp_compose.core.guards.moved_parameters import shard_of
from fsdp_compose.core.guards.scope_parameters import leaf_of
from fsdp_compose.core.guards.units import units_holding
from fsdp_compose.optim.owner_step import OwnerOptimizer
from fsdp_compose.optim.slice_step import cut_first_state
from fsdp_compose.sharded import ShardSpec, is_sharded

Names: TypeAlias = "Mapping[nn.Parameter, tuple[str, ...]]"
OptimLike: TypeAlias = "Optimizer | Iterable[Optimizer]"


@dataclass(frozen=True, eq=False)
class Part:
    """One module parameter, and where an optimizer's parameter has its elements.

    Attributes:
        names: its clean FQNs, canonical one first.
        entry: None for a parameter that is not sharded.
        span: its elements in a raw piece of a shard; None when the optimizer holds the parameter.
        owner: the rank that has all of its state; None where state is cut or on every rank.
    """

    names: tuple[str, ...]
    shape: torch.Size
    entry: Entry | None
    span: slice | None = None
    owner: int | None = None

    @property
    def name(self) -> str:
        return self.names[0]

    @property
    def is_elsewhere(self) -> bool:
        """Whether another rank has all of its state, and this one none."""
        return self.spec is not None and self.owner not in (None, self.spec.group.rank)

    @property
    def spec(self) -> ShardSpec | None:
        return None if self.entry is None else self.entry.spec


@contextlib.contextmanager
def unchanged_by_errors(targets: Targets) -> Iterator[None]:
    """Scope whose error, which every rank raises, leaves the optimizers as they were before it."""
    optims = [optim for optim, _ in targets]
    optims += [optim.optimizer for optim in optims if isinstance(optim, OwnerOptimizer)]
    before = [(optim, optim.state, optim.param_groups) for optim in optims]
    try:
        yield
    except BaseException:
        for optim, state, groups in before:  # load_state_dict makes others of both
            optim.state, optim.param_groups = state, groups
        raise


def is_state(value: object) -> bool:
    """Whether it is a dictionary such as an optimizer's ``state_dict()`` gives."""
    if not isinstance(value, Mapping):
        return False
    return isinstance(value.get("state"), Mapping) and isinstance(
        value.get("param_groups"), list | tuple
    )


def settings_of(group: Mapping[str, Any]) -> dict[str, Any]:
    """What a parameter group says besides which parameters it has."""
    return {key: value for key, value in group.items() if key not in ("params", "param_names")}


def load_numbered(optim: Optimizer, plain: dict[str, Any]) -> None:
    """Have an optimizer load state by numbers.

    Raises:
        RuntimeError: it cannot read it.
    """
    try:
        optim.load_state_dict(plain)
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise RuntimeError(
            f"{type(optim).__name__} cannot read the state that was to be loaded, and is "
            f"unchanged: {type(error).__name__}: {error}"
        ) from error


@dataclass(frozen=True, eq=False)
class Member:
    """A parameter of an optimizer, and what it consists of.

    Attributes:
        is_flat: whether it may stand for several parameters, which nobody has put in an order.
    """

    param: Tensor
    parts: tuple[Part, ...]
    is_flat: bool = False

    @property
    def is_raw(self) -> bool:
        """Whether the optimizer holds a plain tensor over a piece of a shard."""
        return bool(self.parts) and self.parts[0].span is not None


Targets: TypeAlias = "list[tuple[Optimizer, list[list[Member]]]]"


def optimizers_of(optim: OptimLike) -> list[Optimizer]:
    """One optimizer or several, as a list; each once, though it may be given by parameter.

    Raises:
        TypeError: something in it is not an optimizer.
    """
    given: Any = optim
    is_one = isinstance(given, Optimizer) or not isinstance(given, Iterable)
    found = [given] if is_one else list({id(one): one for one in given}.values())
    for one in found:
        if not isinstance(one, Optimizer):
            raise TypeError(
                f"optimizer state: got a {type(one).__name__}; wanted a torch.optim.Optimizer or "
                "several of them."
            )
    return found


def list_members(module: nn.Module, optim: OptimLike) -> Targets:
    """Each optimizer with its parameters, group by group, in its order.

    Raises:
        TypeError: something in ``optim`` is not an optimizer.
        ValueError: one holds a tensor that is neither a parameter of ``module`` nor a piece of its
            shards, or two hold the same parameter, whose state has one name.
    """
    found = [(one, _members_of(module, one)) for one in optimizers_of(optim)]
    for one, groups in found:
        _forget_gathered(one, {id(member.param) for members in groups for member in members})
        cut_first_state(one)
    holders: dict[str, Optimizer] = {}
    for one, groups in found:
        for part in (part for members in groups for member in members for part in member.parts):
            other = holders.setdefault(part.name, one)
            if other is not one:
                raise ValueError(
                    f"optimizer state: {part.name!r} is a parameter of two of the optimizers "
                    f"({type(other).__name__}, {type(one).__name__}), and state by name has room "
                    "for one. Save and load each of the two with a call of its own, in a folder "
                    "of its own."
                )
    return found


def _forget_gathered(optim: Optimizer, held: set[int]) -> None:
    """Remove the empty state of gathered weights, which a hook looked up during a pass.

    Raises:
        ValueError: there is state of a tensor that the optimizer has no parameter for.
    """
    keys: list[Any] = list(optim.state)
    for key in [key for key in keys if isinstance(key, Tensor) and id(key) not in held]:
        if optim.state[key]:
            what = f", parameter {key._shard_spec.fqn!r}," if is_sharded(key) else ""
            advice = ". If it was taken out of the groups, delete its state too: state.pop(p)."
            if not isinstance(key, nn.Parameter):
                advice = (
                    ", as module.weight inside a forward or backward, where it is gathered. Look "
                    "parameters up before the forward, or by name."
                )
            raise ValueError(
                f"optimizer state: {type(optim).__name__}.state has entries for a tensor of shape "
                f"{tuple(key.shape)}{what} that is in none of its groups{advice}"
            )
        del optim.state[key]


def _members_of(module: nn.Module, optim: Optimizer) -> list[list[Member]]:
    """The optimizer's parameters, group by group, in its order.

    Raises:
        ValueError: it holds a tensor that is neither a parameter of ``module`` nor a piece of its
            shards; or it is an ``owner_step`` whose parameters are plain by now.
    """
    names = parameter_names(module)
    found: list[list[Member]] = []
    pieces: dict[int, Bucket] | None = None
    for number, group in enumerate(optim.param_groups):
        members: list[Member] = []
        for position, param in enumerate(group["params"]):
            if param in names:
                members.append(_named_member(optim, param, names))
                continue
            if pieces is None:
                pieces = {
                    shard_of(bucket).untyped_storage().data_ptr(): bucket
                    for unit in units_holding(module)
                    for bucket in unit.gathered
                    if shard_of(bucket).numel()
                }
            members.append(
                _raw_member(param, names, pieces, f"parameter {position} of group {number}")
            )
        found.append(members)
    return found


def names_of(module: nn.Module, groups: Iterable[Iterable[Member]]) -> list[list[str]]:
    """The names of each group's parameters, in the order in which a plain optimizer numbers them.

    A group with flat tensors has its parameters in the order of ``module``.
    """
    order = {names[0]: place for place, names in enumerate(parameter_names(module).values())}
    found: list[list[str]] = []
    for members in groups:
        held = list(members)
        names = [part.name for member in held for part in member.parts]
        if any(member.is_flat for member in held):
            names.sort(key=lambda name: order.get(name, len(order)))
        found.append(names)
    return found


def _named_member(optim: Optimizer, param: nn.Parameter, names: Names) -> Member:
    """What an optimizer has of a module's parameter that it holds itself."""
    leaf = leaf_of(param)
    entry = find_entry(leaf) if is_sharded(leaf) else None
    owner = None
    if isinstance(optim, OwnerOptimizer):
        if entry is None:
            raise ValueError(
                f"optimizer state: {names[param][0]!r} is sharded no more (undo), and each rank of "
                "an owner_step has the state of what it owns alone. Call fully_shard again first; "
                "another time take the state before undo."
            )
        owner = optim.owner_of(param)
    part = Part(names[param], whole_shape(param), entry, owner=owner)
    return Member(param, (part,))


def _raw_member(param: Tensor, names: Names, pieces: dict[int, Bucket], where: str) -> Member:
    marked = None if is_sharded(param) else getattr(param, "_fsdp_compose_entry", None)
    entry = marked() if callable(marked) else None
    if entry is not None and entry.held in names:
        owned = entry.spec.stop - entry.spec.start
        return Member(param, (_part(entry, names, slice(0, owned)),))
    is_piece = entry is None and not is_sharded(param)
    bucket = pieces.get(param.untyped_storage().data_ptr()) if is_piece else None
    if bucket is None or param.ndim != 1:
        known = sorted(name for all_names in names.values() for name in all_names)
        raise ValueError(
            f"optimizer state: {where} (shape {tuple(param.shape)}) is not a parameter of the "
            f"module, whose parameters are {known[:4]}{' and more' if len(known) > 4 else ''}. "
            "Build the optimizer from this module's parameters, or pass the module it was built "
            "from. What was taken out of the module (refresh) goes out of its groups and state too."
        )
    shard = shard_of(bucket)
    first = param.storage_offset() - shard.storage_offset()
    rank, parts = bucket.mesh.shard.rank, []
    for index, entry in enumerate(bucket.entries):
        if not entry.slots:
            continue  # taken out by ``refresh``
        own = bucket.layout.slice_of(index, rank)
        start = own.shard_offset - first if own.numel else 0
        is_inside = start >= 0 and start + own.numel <= param.numel()
        if is_inside if own.numel else param.numel() == shard.numel():
            parts.append(_part(entry, names, slice(start, start + own.numel)))
    return Member(param, tuple(parts), is_flat=True)


def _part(entry: Entry, names: Names, span: slice) -> Part:
    own_names = names.get(entry.param, (entry.spec.fqn,))
    return Part(own_names, entry.spec.whole_shape, entry, span)
