"""What ``fully_shard`` is to build: options, parameters, buckets and units, as they are decided."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from fsdp_compose.base.group import Transport
from fsdp_compose.base.mesh import Mesh, MeshLike
from fsdp_compose.base.policy import (
    ByName,
    GranularityLike,
    Init,
    MixedPrecision,
    MixedPrecisionLike,
    Offload,
    Placement,
    Prefetch,
)
from fsdp_compose.base.torch_private import buffer_slots
from fsdp_compose.buckets.bucket import Slot
from fsdp_compose.layout.planner import PlanLayout, plan_layout
from fsdp_compose.layout.shards import Layout
from fsdp_compose.sharded import Parallel, dense_of

_CPU = torch.device("cpu")


@dataclass(frozen=True)
class Options:
    """The arguments of ``fully_shard`` under their names, and what follows from two of them."""

    mesh: MeshLike | None
    placement: Placement  # from strategy and reshard_after_forward
    mp_policy: MixedPrecisionLike
    offload_policy: Offload
    granularity: GranularityLike
    prefetch: Prefetch
    init: Init
    device: torch.device = _CPU  # where meta parameters are materialised
    param_init_fn: Any = None
    methods: Sequence[str] = ("forward",)  # that gather; of a unit, without "forward"
    layout: PlanLayout = plan_layout
    transport: Transport | None = None
    deterministic: int | None = None  # microbatches of a step, added up in one tree
    static_buffers: bool | int = False  # gathered at fixed addresses, in so many by turns

    def __post_init__(self) -> None:
        for name in ("mp_policy", "granularity"):
            value: Any = getattr(self, name)
            if isinstance(value, Mapping):
                object.__setattr__(self, name, ByName(name, dict(value)))

    @property
    def buffers_in_turn(self) -> int:
        """In how many static buffers units are gathered in turn: with what is gathered ahead."""
        if self.static_buffers is True:
            return max(2, 1 + self.prefetch.forward, 1 + self.prefetch.backward)
        return int(self.static_buffers)


@dataclass
class ParameterPlan:
    """A parameter to shard, and every place it is read from."""

    param: nn.Parameter
    names: list[str] = field(default_factory=list)
    slots: list[Slot] = field(default_factory=list)
    parallel: Parallel | None = None  # how tensor parallelism split it

    @property
    def part(self) -> torch.Tensor:
        """What is to be sharded of it: of a DTensor its local tensor, of a wrapper its tensor."""
        return dense_of(self.param)


@dataclass(frozen=True)
class BucketPlan:
    """A bucket that is to be built."""

    mesh: Mesh
    layout: Layout
    found: list[ParameterPlan]
    storage_dtype: torch.dtype
    mp: MixedPrecision


def list_ignored(ignored: Any, where: str = "fully_shard") -> list[Any]:
    """List what was passed as ``ignored`` to the function ``where``.

    Raises:
        TypeError: it is no sequence.
    """
    if isinstance(ignored, torch.Tensor | nn.Module | str) or not isinstance(ignored, Iterable):
        raise TypeError(
            f"{where}: ignored is a {type(ignored).__name__}; wanted a sequence of "
            "parameters, buffers and modules: ignored=[...]."
        )
    return list(ignored)


@dataclass(frozen=True)
class Ignored:
    """What is left alone, by id: of a module all that is in it, wherever else it is used."""

    params: frozenset[int] = frozenset()
    modules: frozenset[int] = frozenset()
    buffers: frozenset[int] = frozenset()
    given: tuple[weakref.ref[Any], ...] = ()  # the objects that the caller listed

    @classmethod
    def of(cls, ignored: Iterable[torch.Tensor | nn.Module]) -> Ignored:
        params: set[int] = set()
        modules: set[int] = set()
        buffers: set[int] = set()
        items = list_ignored(ignored)
        for item in items:
            if isinstance(item, nn.Module):
                modules.update(id(m) for m in item.modules())
                params.update(id(p) for p in item.parameters())
                buffers.update(id(b) for b in item.buffers())
            elif isinstance(item, nn.Parameter):
                params.add(id(item))
            elif isinstance(item, torch.Tensor):
                buffers.add(id(item))
            else:
                raise TypeError(
                    f"fully_shard: ignored holds {item!r:.60}; wanted parameters, "
                    "buffers and modules."
                )
        refs = tuple(weakref.ref(item) for item in items)
        return cls(frozenset(params), frozenset(modules), frozenset(buffers), refs)

    def and_more(self, items: Iterable[torch.Tensor | nn.Module]) -> Ignored:
        more = Ignored.of(items)
        return Ignored(
            self.params | more.params,
            self.modules | more.modules,
            self.buffers | more.buffers,
            self.given + more.given,
        )


@dataclass
class UnitPlan:
    """A unit that is to be built."""

    name: str
    modules: list[nn.Module]
    options: Options
    is_named: bool = False  # ``name`` is the FQN of its one module, not a class name
    members: list[list[tuple[str, nn.Module]]] = field(default_factory=list)  # by module
    found: list[ParameterPlan] = field(default_factory=list)
    buckets: list[BucketPlan] = field(default_factory=list)
    ignored: Ignored = Ignored()

    def full_name(self, name: str) -> str:
        """The name in the model of what is called ``name`` in the unit, as far as it is known.

        A unit that was sharded by a call of its own is named from that call's module, until a call
        on a module around it.
        """
        return f"{self.name}.{name}" if self.is_named else name

    def managed(self, module: nn.Module) -> list[tuple[str, nn.Module]]:
        """The submodules of ``module`` that belong to the unit, with their names in it."""
        return self.members[self.modules.index(module)]

    def managed_buffers(self, module: nn.Module) -> Iterator[tuple[str, nn.Module, str, Any]]:
        """(name in the unit, submodule, name in that, buffer) of each that is not to be ignored."""
        for path, submodule in self.managed(module):
            for key, buffer in [*buffer_slots(submodule).items()]:
                if buffer is not None and id(buffer) not in self.ignored.buffers:
                    yield f"{path}.{key}" if path else key, submodule, key, buffer

    def left_alone(self) -> dict[int, weakref.ref[Any]]:
        """The parameters, buffers and modules that were to be ignored, by id."""
        ignored = self.ignored
        if not (ignored.params or ignored.modules or ignored.buffers):
            return {}
        around = {id(item): ref for ref in ignored.given if (item := ref()) is not None}
        return around | {
            id(item): weakref.ref(item)
            for module in self.modules
            for submodule in module.modules()
            for ids, items in (
                (ignored.modules, [submodule]),
                (ignored.params, submodule.parameters(recurse=False)),
                (ignored.buffers, submodule.buffers(recurse=False)),
            )
            for item in items
            if id(item) in ids
        }
