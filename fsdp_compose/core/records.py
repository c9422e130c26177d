"""What units remember besides their buckets, as small records of declared fields."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from fsdp_compose.buckets.bucket import Bucket
from fsdp_compose.comm.grad_bucket import GradBucket


@dataclass(frozen=True, eq=False, repr=False)
class Route:
    """Which gradients of a set of trained entries go to one bucket."""

    bucket: Bucket
    sources: list[int]  # by entry of the bucket: position among the gradients, -1 for none
    trained: int  # bits of the entries that have a source
    takes_all: bool  # the gradients are those of the bucket's entries, in their order
    is_whole: bool  # every entry has a source

    def pick(self, grads: Sequence[torch.Tensor | None]) -> list[torch.Tensor | None]:
        """The gradients of the bucket's entries, in order."""
        return list(map((*grads, None).__getitem__, self.sources))


@dataclass(eq=False, repr=False)
class Live:
    """The parameters a unit's last forward computed with, connected to autograd."""

    tensors: Sequence[torch.Tensor]
    pass_id: int  # the outermost forward they were made in; 0 once backward consumed them
    trained: tuple[int, ...]  # the entries whose tensors are connected to their leaves
    versions: list[tuple[int, ...]] = field(default_factory=list)  # of the shards they are from
    outputs: Sequence[torch.Tensor] = ()  # the tensors of ``trained``, as plain ones
    joined_at: int = -1  # when the last forward began that computed with them again
    closed_at: int = -1  # when the last node of the last forward was made, see kept_tensors.py


@dataclass
class Switches:
    """What the user can change between steps; see the ``set_*`` functions."""

    sync: bool = True
    all_reduce: bool = True
    last_backward: bool = True
    keep_after_forward: bool | None = None  # None: only where the unit is outermost
    keep_over_microbatches: bool = False
    reshard_after_backward: bool = True
    unshard_in_backward: bool | None = True  # None: unless its forward is found to save no weight
    divide_factor: float | None = None
    find_unused: bool = False
    comm_hook: Callable[[Any, GradBucket], torch.Tensor] | None = None
    comm_state: Any = None
    hook_name: str = ""  # which ranks compare


@dataclass(eq=False, repr=False)
class Opened:
    """What a unit's modules hold instead of its leaves while a scope is open over it."""

    tensors: list[torch.Tensor]  # by entry
    in_forward: bool  # forward reads these too, and nothing is gathered for it
    calls: int = 0  # forwards on these tensors that are running
    outer: Opened | None = None  # the scope around this one
    for_call: bool = False  # ends with the forward it was made for; see functional_calls.py
    stored: bool = False  # forward computes in the shards' own dtype
    given: dict[int, torch.Tensor] = field(default_factory=dict)  # read instead of gathered ones
    copies: list[tuple[int, torch.Tensor, int]] = field(default_factory=list)
    """(entry, tensor, its version) of copies that were made for a forward alone."""
    leaf_versions: list[int] = field(default_factory=list)  # when ``tensors`` were gathered


@dataclass(frozen=True, eq=False, repr=False)
class Watch:
    """What a unit's modules held when they were last looked through; see added_parameters.py."""

    tables: tuple[dict[str, Any], ...]  # their dictionaries of parameters and of children
    lengths: tuple[int, ...]  # of ``tables``
    parents: tuple[dict[str, Any], ...]  # those of ``tables`` that hold children
    children: tuple[nn.Module | None, ...]  # the values of ``parents``
    strays: tuple[tuple[dict[str, Any], str], ...]  # (values, name) of what no bucket has
    hooks: tuple[dict[int, Any], ...]  # forward hooks of the modules inside the unit's own
    backward_hooks: tuple[dict[int, Any], ...]  # those of all its modules


@dataclass(frozen=True, eq=False, repr=False)
class Traced:
    """How compiled graphs refer to a unit that is part of them; see scopes/compile.py."""

    key: str
    anchor: torch.Tensor  # the unit's, if it trains anything
    trained: tuple[bool, ...]  # by entry
    sizes: tuple[tuple[int, ...], ...]  # cuts each gathered bucket into entries and gaps
    views: tuple[tuple[int, int, tuple[int, ...], tuple[int, ...]], ...]
    """By entry: its bucket, its piece of that, the piece's shape, and how to permute it."""
    epoch: int
