"""A bucket: parameters in one flat buffer, with every view of it that a step needs made once.

    shard      storage dtype   layout.shard_numel      persistent; parameters are slices of it
    full       compute dtype   layout.numel            gathered; parameters in compute alias it
    flat_grad  reduce dtype    layout.numel            packed gradients, real numbers

The storages of ``full`` and ``flat_grad`` hold 0 bytes except while they are needed. Aliases are
made over the storage, not as views, since views share a version counter with their base, and
refilling ``full`` between forward and backward would trip autograd's check.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from enum import Enum, auto
from functools import cached_property
from typing import Any, Protocol

import torch
from torch import nn

from fsdp_compose.base.group import Group
from fsdp_compose.base.memory import StorageSpan
from fsdp_compose.base.mesh import Mesh
from fsdp_compose.base.microbatches import MicrobatchSums
from fsdp_compose.base.policy import Dtypes, MixedPrecision, Offload
from fsdp_compose.base.torch_private import parameter_slots, profiler_enabled
from fsdp_compose.base.unwritten import UnwrittenMark
from fsdp_compose.base.weak_list import WeakList
from fsdp_compose.base.weak_set import OrderedWeakSet
from fsdp_compose.comm.collectives import NOTHING_SENT, Caller, Exchange, GatherPlan, ReducePlan
from fsdp_compose.layout.shards import Layout
from fsdp_compose.sharded import Residence, ShardSpec, Wrapper

logger = logging.getLogger("fsdp_compose")
_QUIET = nullcontext()


class Phase(Enum):
    """Where a bucket's full parameters are."""

    __hash__ = object.__hash__  # looked up several times a pass; Enum's own is written in Python

    SHARDED = auto()  # there are none: the storage of ``full`` holds 0 bytes
    GATHERING = auto()  # being filled
    GATHERED = auto()  # readable on the compute stream


SHARDED, GATHERING, GATHERED = Phase
"""A name is looked up in a quarter of the time that an attribute of a class takes."""

_LEGAL = {
    SHARDED: (GATHERING,),
    GATHERING: (GATHERED, SHARDED),  # SHARDED: it was gathered ahead in vain
    GATHERED: (SHARDED, GATHERING),  # GATHERING: the shard was written meanwhile
}


@dataclass(frozen=True, eq=False, repr=False)
class Slot:
    """A place a module reads a parameter from: ``values[name]``."""

    module: weakref.ref[nn.Module]
    name: str
    values: dict[str, Any]  # the module's own dictionary of parameters

    @classmethod
    def of(cls, module: nn.Module, name: str) -> Slot:
        """The place of the parameter ``name`` in ``module``."""
        return cls(weakref.ref(module), name, parameter_slots(module))


@dataclass(eq=False, repr=False)
class Entry:
    """A parameter: the caller's own object, now this rank's slice of a bucket.

    ``held`` is the caller's object, which modules hold between passes and optimizers were given;
    ``param`` holds the slice. They are two only while a scope shows the parameter in full, see
    scope_parameters.py.
    """

    param: nn.Parameter
    spec: ShardSpec
    names: tuple[str, ...]  # FQNs from the unit's module; more than one when tied
    slots: list[Slot]
    owner: weakref.ref[Bucket] | None = None
    pin: weakref.ref[nn.Parameter] | None = None  # torch.utils.swap_tensors refuses what has one
    index: int = 0  # within the owner
    kind: type[torch.Tensor] = nn.Parameter  # the class it was sharded from
    wrapper: Wrapper | None = None  # or the class around it
    grad_dtype: torch.dtype | None = None  # of gradients before; None: the parameter's own
    origin: StorageSpan | None = None  # memory that it shared before it was sharded
    held: nn.Parameter = field(init=False)
    layers: tuple[Any, ...] = ()  # what scopes show in its place

    def __post_init__(self) -> None:
        self.held = self.param

    @property
    def is_of_class(self) -> bool:
        """Whether modules read more of the parameter than a plain tensor's values."""
        return self.kind is not nn.Parameter or self.wrapper is not None


@dataclass(eq=False, repr=False)
class GradBuffer:
    """Where gradients are packed; ``flat`` is real, so that any backend can sum it."""

    flat: torch.Tensor
    nbytes: int  # of ``flat``
    parts: Sequence[torch.Tensor]  # by rank of the axis that sums first
    views: list[torch.Tensor]  # by entry, in the parameter's shape and strides
    gaps: list[torch.Tensor]  # where no parameter lies
    lease: Any = None  # of memory that others have too, see Transport.lend; None: of its own
    plan: ReducePlan | None = field(default=None, init=False)  # made by the first reduction of it


@dataclass(eq=False, repr=False)
class Inner:
    """How a bucket is gathered from fewer ranks than it is sharded over, each of which holds more.

    Attributes:
        group: the ranks to gather from.
        parts: ``full`` as uint8, by rank of ``group``.
        own: this rank's part of ``full``.
        source: the ranks whose shards make up this rank's part, where it is kept for good; None
            where it is kept only from forward to backward.
        store: this rank's part, in the compute dtype, while it is kept.
        stamp: of the shard when ``store`` was filled.
    """

    group: Group
    parts: Sequence[torch.Tensor]
    own: torch.Tensor
    source: Group | None = None
    store: torch.Tensor | None = None
    stamp: object = None


class Lender(Protocol):
    """Memory at fixed addresses that a bucket shares with others; see static.py."""

    def lend(self, bucket: Bucket) -> GradBuffer | None:
        """Memory to pack the bucket's gradients in; None where others use all of it now."""

    def refuse_reads(self, bucket: Bucket) -> None:
        """Have backward raise where it reads the bucket, which was released."""

    def allow_reads(self, bucket: Bucket) -> None:
        """Let backward read the bucket, which is gathered again."""


class Mirror(Protocol):
    """Plain tensors over a bucket's memory that are given its gradients too."""

    def share_gradients(
        self, flat: torch.Tensor | None = None, are_set: bool = False, converted: bool = False
    ) -> None:
        """Have both sides' gradients be the same memory; new ones are slices of ``flat``."""

    def unwatch(self, entries: Iterable[Entry]) -> None:
        """Let go of where autograd adds to the gradients of parameters that become plain."""


@dataclass(eq=False, repr=False)
class SentCopy:
    """A copy of the shard where other ranks read it, and the versions that it was made of."""

    lease: Any  # see Transport.copy
    versions: tuple[int, ...]


@dataclass(eq=False, repr=False)
class Views:
    """Views of a bucket's buffers, made once; where a buffer is replaced, they are too.

    Attributes:
        params: by entry, the object that holds its slice.
        own: this rank's part of ``full``.
        nbytes: of ``full`` while it is gathered.
        storage: the identity of the storage of ``full``.
        whole_bytes: ``full`` as uint8.
        part_bytes: ``full`` as uint8, by rank.
        shard_bytes: ``shard`` as uint8, where its dtype is that of ``full``.
        splits: sizes that cut a sharded gradient into slices and gaps.
        pieces: by entry, which of these is its slice.
        in_order: whether the slices come first, in the order of the entries.
        every: the bits of all entries.
        plan: of gathers over these views, made by the first one; None where they are not alike.
        sent: what gathers send, while microbatches gather the same weights again and again.
    """

    params: list[nn.Parameter]
    own: torch.Tensor
    nbytes: int
    storage: int
    whole_bytes: torch.Tensor
    part_bytes: Sequence[torch.Tensor]
    shard_bytes: torch.Tensor | None
    splits: tuple[int, ...]
    pieces: tuple[int, ...]
    in_order: bool
    every: int
    plan: GatherPlan | None = field(default=None, init=False)
    sent: SentCopy | None = field(default=None, init=False)


@dataclass(eq=False, repr=False, slots=True)
class Fill:
    """What a bucket's ``full`` was gathered from; a new one for each gather.

    Attributes:
        versions: of the shard and its parameters, when it began.
        handed_out: ``residence.written`` when it began.
        exchange: the collective, until it was waited for.
        mark: of the stream, behind the collective.
        stamp: of the shard, where a pass left ``full`` for a later one.
        is_superseded: whether parameters were given other memory since.
    """

    versions: tuple[int, ...] = ()
    handed_out: int = 0
    exchange: Exchange = NOTHING_SENT
    mark: Any = None
    stamp: object = None
    is_superseded: bool = False

    def drop(self) -> None:
        """Wait for what was gathered and is not read; on a device its stream does."""
        self.exchange.end()
        self.mark = None


@dataclass(eq=False, repr=False)
class Arriving:
    """Gradients of a bucket that are not yet in ``.grad``.

    Attributes:
        packed: whether the flat buffer holds gradients that were not reduced.
        postponed: whether some of those wait for a later backward, or for ``reduce_grads``.
        used: bits of the entries that have a gradient among these.
        trained: bits of the entries that could have had one when these arrived.
        joined: this rank took part in a backward of other ranks, without a gradient of its own.
        partial: gradients that were summed over ``shard`` ranks, and not yet over ``replicate``.
        waiting: gradients of microbatches, on their way to host memory.
        sums: of microbatches, where ``deterministic=`` adds them up in one tree.
    """

    packed: bool = False
    postponed: bool = False
    used: int = 0
    trained: int = 0
    joined: bool = False
    partial: torch.Tensor | None = None
    waiting: torch.Tensor | None = None
    sums: MicrobatchSums = field(default_factory=MicrobatchSums)


@dataclass(eq=False, repr=False)
class Users:
    """Who gathers and reduces a bucket: its unit, and units that borrow a tied parameter."""

    unit: weakref.ref[Any] | None = None
    is_lent: bool = False  # whether it has had borrowers
    caller: Caller | None = None  # compares its collectives between ranks; None where none do
    views: WeakList | None = None  # that somebody kept from a forward, see kept_views.py
    borrowers = cached_property(lambda _: OrderedWeakSet[Any]())


@dataclass(eq=False, repr=False)
class History:
    """What a bucket remembers from step to step, also when it is built again.

    Attributes:
        earlier: how often the shards that it had before were written.
        agreed: (entries used here, entries used by some rank) when ranks last compared, as bits.
        unready: entries whose values are still to be loaded, see moved_parameters.py.
        emptied: they are since ``to_empty()``, which may have been called on this rank alone.
        mirror: plain tensors over its memory, see optim/plain_parameters.py.
    """

    earlier: int = 0
    agreed: tuple[int, int] | None = None
    unready: list[tuple[Entry, UnwrittenMark]] = field(default_factory=list)
    emptied: bool = False
    mirror: Mirror | None = None


@dataclass(eq=False, repr=False)
class DeviceCopy:
    """An offloaded shard in the compute dtype on the device, and its stamp when it was copied."""

    tensor: torch.Tensor
    stamp: object = None


@dataclass(eq=False, repr=False)
class Bucket:
    """Parameters of one dtype, trainability and mesh, in one flat buffer."""

    entries: list[Entry]
    layout: Layout
    mesh: Mesh
    residence: Residence
    mp: MixedPrecision  # gives the dtypes it computes and reduces in
    dtypes: Dtypes
    stored: torch.Tensor  # the shard as it was last placed, see ``shard_of``
    full: torch.Tensor
    views: Views
    aliases: list[torch.Tensor]  # by entry, in the parameter's shape and strides
    counts: list[int]  # versions of ``aliases``, see forward_writes.py
    in_place: bool  # ``full`` is the shard: one rank, and computing in the storage dtype
    offload: Offload
    inner: Inner | None
    grads: GradBuffer | None = None  # made on first use
    device_copy: DeviceCopy | None = None
    phase: Phase = SHARDED
    static: Lender | None = None  # its buffers keep their addresses; None: freed after each use
    fill: Fill = field(default_factory=Fill)
    arriving: Arriving = field(default_factory=Arriving)
    users: Users = field(default_factory=Users)
    history: History = field(default_factory=History)

    def __repr__(self) -> str:
        """Without its tensors: reading one whose storage holds 0 bytes would crash."""
        return (
            f"Bucket({len(self.entries)} parameters, {self.stored.dtype}, computing in "
            f"{self.full.dtype}, {self.layout.shard_numel} elements per rank, {self.phase.name})"
        )

    def move_to(self, phase: Phase) -> None:
        """Change the phase, which happens nowhere else."""
        assert phase in _LEGAL[self.phase], f"illegal phase change {self.phase} -> {phase}"
        self.phase = phase

    def noted(self, phase: str, nbytes: int) -> AbstractContextManager[object]:
        """Name what happens to the bucket in the log, at DEBUG, and in a profile."""
        self.log(phase, nbytes)
        if profiler_enabled():
            return torch.profiler.record_function(
                f"fsdp_compose.{phase} {self.entries[0].spec.unit}"
            )
        return _QUIET

    def log(self, phase: str, nbytes: int) -> None:
        """Log what this rank does with the bucket."""
        if not logger.isEnabledFor(logging.DEBUG):
            return
        group, numbers = self.mesh.shard, (len(self.entries), self.stored.dtype)
        line = "rank %d: %s %s: %d bytes (%d parameters, %s)"
        rank, unit = group.ranks[group.rank], self.entries[0].spec.unit
        logger.debug(line, rank, phase, unit, nbytes, *numbers)

    @property
    def spread(self) -> Group | None:
        """The ranks that keep it between forward and backward, where fewer than all of them do."""
        return None if self.inner is None or self.inner.source is not None else self.inner.group

    @property
    def gathered_nbytes(self) -> int:
        """Bytes that gathering it allocates."""
        return 0 if self.in_place else self.views.nbytes


def alias(base: torch.Tensor, offset: int, spec: ShardSpec) -> torch.Tensor:
    """A tensor over the storage of ``base`` in the shape and strides of ``spec``."""
    tensor = base.new_empty(0)
    tensor.set_(base.untyped_storage(), offset, spec.shape, spec.stride)
    return tensor


def full_tensor(base: torch.Tensor, entry: Entry) -> torch.Tensor:
    """The entry's parameter in a gathered flat tensor, as modules read it: an alias, no view."""
    return entry.spec.wrap(alias(base, entry.spec.offset, entry.spec))
