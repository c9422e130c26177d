"""Where the slice of one parameter lives; integers, names and a group, no tensors.

A bucket is one flat buffer of parameters in storage order, cut into equal shards:

    bucket   | a a a a a a | b b b b b b b b | c c |      a.offset 0, b.offset 6, c.offset 14
    ranks    | 0 0 0 0 | 1 1 1 1 | 2 2 2 2 | 3 3 3 3 |    shard_numel 4

    b on rank 1: start 0, stop 2, a 1-D tensor of 2 elements; lengths [0, 2, 4, 2]

With tensor parallelism a, b and c are this rank's parts of larger tensors; see parallel.py.
"""

from __future__ import annotations

import copy
import math
from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, NoReturn

import torch
from torch.overrides import resolve_name

from fsdp_compose.base.group import SELF, Group, get_global_rank
from fsdp_compose.base.torch_stack import is_called_from
from fsdp_compose.sharded.advice import EXPORT, SAVING, TENSOR_PARALLEL_FIRST, advise_call
from fsdp_compose.sharded.parallel import Parallel

__all__ = [
    "Handler",
    "Hooks",
    "Residence",
    "ShardSpec",
    "ShardedWeightError",
    "Writes",
    "refuse",
    "refuse_export",
    "refuse_pickle",
    "require_ranks",
]


Handler = Callable[[Any, tuple[Any, ...], dict[str, Any]], Any]
"""What is done for a torch function on sharded tensors: ``(function, args, kwargs)``."""


class ShardedWeightError(RuntimeError):
    """A function that needs the whole tensor was given this rank's slice of one.

    A few functions of torch read a tensor's memory without asking its class. Of a parameter they
    raise all the same, but for ``torch.utils.dlpack.to_dlpack(p)`` and ``plain.data = p``. Of what
    is computed from parameters, gradients and optimizer state they give this rank's slice, plain
    and 1-D: ``torch.tensor(x)`` (which warns), ``torch.Tensor(x)``, ``y.new(x)`` and
    ``y.new_tensor(x)`` of a plain y, ``torch.as_tensor(x, dtype)`` and ``torch.asarray(x, dtype)``
    with another dtype, ``torch.autograd.Variable(x)``, ``torch.vmap``, ``torch.func.grad`` and
    ``torch.func.vjp`` over x. Give them ``x.full_tensor()``.
    """


class SlicePickledError(ShardedWeightError, TypeError):
    """A slice was to be pickled as if it were the whole; TypeError is what pickle raises."""


@dataclass(slots=True)
class Writes:
    """What was written into parameters and gradients of one mesh since its ranks last compared.

    Attributes:
        found: by (unit, what was written), or ("", what they are) for lists of tensors: a number
            that follows from all writes, in whatever order; unit, tensor and function of the last.
        are_noted: not while an optimizer steps, whose settings ranks compare.
    """

    found: dict[tuple[str, str], tuple[int, str, str, str]] = field(default_factory=dict)
    are_noted: bool = True


@dataclass(slots=True)
class Residence:
    """What happened to a bucket's parameters since the bucket placed them; one per bucket.

    Attributes:
        moved: a parameter's storage was replaced (``p.data = x``, ``module.to(dtype)``).
        written: how often ``p.data`` gave out an alias, whose writes autograd does not see.
        emptied: ``module.to_empty()`` replaced the storage by memory that nobody has written.
        is_hooked: a hook was registered on a parameter.
        is_shared: plain tensors over a parameter's slice were handed out.
        is_of_fewer: the bucket lies on fewer ranks than others, which may hold other parameters.
        is_taken: ``to_local()`` was called, of a parameter or of what follows from one: plain
            tensors may be slices.
        regraded: a gradient was given other memory (``module.to(dtype)``), or another tensor took
            its place (``p.grad = x``): it may be no slice of the bucket's own buffer any more.
        awaits: gradients lay outside ``.grad`` after a backward, and may still do.
        is_mirrored: gradients are those that plain tensors over the slices have; whoever sets one
            clears this.
        writes: where writes into the parameters are noted; None where no other ranks are.
    """

    moved: bool = False
    written: int = 0
    emptied: bool = False
    is_hooked: bool = False
    is_shared: bool = False
    is_of_fewer: bool = False
    is_taken: bool = False
    regraded: bool = False
    awaits: bool = False
    is_mirrored: bool = False
    writes: Writes | None = None


@dataclass(slots=True)
class Hooks:
    """Hooks of a parameter, run by the engine when its gradient has been reduced."""

    gradient: OrderedDict[int, Any] | None = None  # made by the first hook of either kind
    accumulated: OrderedDict[int, Any] | None = None
    is_arriving: bool = False  # autograd accumulates a gradient itself, as the slice was used
    is_summed: bool = False  # ``autograd.grad`` runs them, on the sum of the gradients it finds
    arrived_in: int = -1  # the autograd run that reached the leaf last
    held: torch.Tensor | None = None  # a part of the gradient that waits for the other
    refusal: Callable[[], str] | None = None  # why autograd may accumulate no gradient itself


@dataclass(frozen=True, slots=True, eq=False)
class ShardSpec:
    """Where one parameter lives. Its elements are counted in storage order of ``stride``."""

    fqn: str
    unit: str
    shape: torch.Size
    stride: tuple[int, ...]
    offset: int
    shard_numel: int
    group: Group
    residence: Residence
    hooks: Hooks = field(default_factory=Hooks)
    parallel: Parallel | None = None
    replicas: Group = SELF
    """The ranks that hold the same slice, over which gradients are averaged too."""
    is_own_file: bool = False
    """Whether the user asked for this rank's own slice (``kind="local"``): pickle may store it."""
    is_copy: bool = False
    """Whether the tensor was copied without the bucket that would gather it."""
    partners: tuple[torch.Tensor, ...] = ()
    """Plain tensors that it was computed with: equal on every rank, or no sum of it is right."""
    answers: Mapping[Callable[..., Any], Handler] = field(default_factory=dict)
    """How the unit answers torch functions that concern whole buckets or the graph."""
    numel: int = field(init=False)
    start: int = field(init=False)
    stop: int = field(init=False)
    key: tuple[object, ...] = field(init=False)
    """Equal for two specs over the same ranks exactly when their slices hold the same elements."""
    seen: torch.Size = field(init=False)
    """The shape that the parameter reports: of a DTensor the whole shape, else ``shape``."""

    def __post_init__(self) -> None:
        numel, rank = math.prod(self.shape), self.group.rank
        start, stop = _cut(self.offset, numel, self.shard_numel, rank)
        layout = (tuple(self.shape), tuple(self.stride), self.offset, self.shard_numel)
        parallel = self.parallel
        place = () if parallel is None else parallel.key
        for name, value in (
            ("numel", numel),
            ("start", start),
            ("stop", stop),
            ("key", (*layout, rank, self.group.size, *place)),
            ("seen", self.whole_shape if self.reads_whole else self.shape),
        ):
            object.__setattr__(self, name, value)

    def wrap(self, part: torch.Tensor) -> torch.Tensor:
        """Return what a module reads: ``part``, or a DTensor around it; see ``Parallel.wrap``."""
        return part if self.parallel is None else self.parallel.wrap(part)

    def is_cut_like(self, other: ShardSpec) -> bool:
        """Whether their slices hold the same elements here and on every other rank.

        Over other ranks, or ranks in another order, they may do so on some ranks alone. A slice
        out of a rank's own file does not tell which ranks those were.
        """
        is_own = self.group.pg is None or other.group.pg is None
        return self.key == other.key and (is_own or self.group.ranks == other.group.ranks)

    @property
    def rank(self) -> int:
        """The rank in the default process group whose slice it is."""
        return get_global_rank() if self.group == SELF else self.group.ranks[self.group.rank]

    @property
    def is_declared_part(self) -> bool:
        """Whether ``declare_tensor_parallel`` said that other ranks hold the rest of it."""
        return bool(self._splits) and not self.reads_whole

    @property
    def is_dtensor(self) -> bool:
        """Whether the parameter is a DTensor, of which the bucket has this rank's part."""
        return self.parallel is not None and self.parallel.dtensor is not None

    @property
    def reads_whole(self) -> bool:
        """Whether it reports the shape of what all ranks hold together, not of this rank's part."""
        return self.is_dtensor or (self.parallel is not None and self.parallel.reads_whole)

    @property
    def seen_stride(self) -> tuple[int, ...]:
        """The strides that go with ``seen``."""
        return self.parallel.stride if self.parallel and self.reads_whole else self.stride

    @property
    def whole_shape(self) -> torch.Size:
        """The shape over all ranks, however the parameter was split."""
        return self.shape if self.parallel is None else self.parallel.shape

    @property
    def storage_dims(self) -> list[int]:
        """Dimensions from the slowest to the fastest in storage; ``[0, 1, ...]`` if contiguous."""
        return sorted(range(len(self.shape)), key=lambda d: (-self.stride[d], -self.shape[d]))

    @property
    def groups(self) -> tuple[Group, ...]:
        """The groups whose ranks together hold a tensor of shape ``seen``."""
        return (self.group, *self._splits) if self.reads_whole else (self.group,)

    @property
    def whole_groups(self) -> tuple[Group, ...]:
        """The groups whose ranks together hold the whole tensor, however it was split."""
        return (self.group, *self._splits)

    @property
    def _splits(self) -> tuple[Group, ...]:
        """The tensor-parallel groups that hold different elements."""
        return () if self.parallel is None else tuple(a.group for a in self.parallel.splits)

    @property
    def lengths(self) -> list[int]:
        """How many elements each rank of the group holds."""
        cuts = (_cut(self.offset, self.numel, self.shard_numel, r) for r in range(self.group.size))
        return [stop - start for start, stop in cuts]

    @property
    def held(self) -> str:
        """Say what this rank holds, for errors."""
        what = f"elements {self.start}..{self.stop}" if self.stop > self.start else "no elements"
        if self.parallel is None or not self.parallel.splits:
            return f"{what} of shape {tuple(self.shape)}"
        at, whole = self.parallel.offsets, tuple(self.parallel.shape)
        return f"{what} of the part of shape {tuple(self.shape)} at {at} of shape {whole}"

    def held_unlike(self, other: ShardSpec) -> str:
        """Say what this rank holds, and what tells the cut from ``other``'s, for errors.

        Slices that are alike here may differ on other ranks, or would over more of them.
        """
        if self.held != other.held:
            return self.held
        places = (
            f"element {spec.offset} of unit {spec.unit!r} in strides {tuple(spec.stride)}, of "
            f"which each of {spec.group.size} ranks has {spec.shard_numel}"
            for spec in (self, other)
        )
        return f"{self.held}; the whole begins at {', not at '.join(places)}"

    def __deepcopy__(self, memo: dict[int, Any]) -> ShardSpec:
        """A spec for a copy's own bucket; hooks are not copied, as with plain parameters."""
        residence = copy.deepcopy(self.residence, memo)
        memo[id(self)] = twin = replace(self, residence=residence, hooks=Hooks(), is_copy=True)
        return twin


def _cut(offset: int, numel: int, shard_numel: int, rank: int) -> tuple[int, int]:
    """The first and last element of a parameter that ``rank`` holds."""
    start = min(max(rank * shard_numel - offset, 0), numel)
    return start, min(max((rank + 1) * shard_numel - offset, start), numel)


def refuse(func: Callable[..., Any], spec: ShardSpec, why: str = "", instead: str = "") -> NoReturn:
    """Raise ShardedWeightError for a function that cannot work on the slice of ``spec``.

    Args:
        why: what is wrong beyond that it needs the whole.
        instead: what to call, where that does not follow from ``func`` and from who calls it.
    """
    if is_called_from("torch.distributed.tensor"):
        raise ShardedWeightError(
            f"parameter {spec.fqn!r} of unit {spec.unit!r} is sharded (rank {spec.rank} "
            f"holds {spec.held}) and is to become a DTensor now (parallelize_module, "
            "distribute_module, distribute_tensor); wanted one that is not sharded yet. "
            f"{TENSOR_PARALLEL_FIRST}"
        )
    name = (resolve_name(func) or getattr(func, "__name__", repr(func))).removesuffix(".__get__")
    raise ShardedWeightError(
        f"{name} needs the whole of {spec.fqn!r} (unit {spec.unit!r}), of which rank "
        f"{spec.rank} holds {spec.held}{why and f'; {why}'}. "
        f"{instead or advise_call(func, spec, spec.unit, spec.is_copy)}"
    )


def refuse_pickle(spec: ShardSpec) -> NoReturn:
    """Raise for a slice that would be written to a file as if it were the whole."""
    raise SlicePickledError(
        f"{spec.fqn!r} (unit {spec.unit!r}) is sharded: pickle (torch.save, "
        "broadcast_object_list, a queue, a spawned worker) would store what rank "
        f"{spec.group.rank} of {spec.group.size} holds, {spec.held}. {SAVING} The same "
        "goes for an optimizer's state: optim_state_dict(model, optim, kind='full') or "
        "kind='local'."
    )


def refuse_export(spec: ShardSpec) -> None:
    """Raise where ``torch.export`` is about to make the parameter its own."""
    if is_called_from("torch.export"):
        raise ShardedWeightError(f"{spec.fqn!r} (unit {spec.unit!r}) is sharded. {EXPORT}")


def require_ranks(spec: ShardSpec, what: str) -> None:
    """Raise for a slice that was unpickled, whose other ranks are not here."""
    if any(group.pg is None and group.size > 1 for group in spec.whole_groups):
        raise RuntimeError(
            f"{what} on {spec.fqn!r}: this is the slice of rank {spec.group.rank} of "
            f"{spec.group.size} ({spec.held}), which was unpickled without the other ranks. Load "
            "it into a model that is sharded in the same way, or save with "
            "fsdp_compose.state_dict(module, kind='full')."
        )
