"""Whole matrices at the ranks that own them: who owns which, and how slices get there and back.

A matrix that lies whole in a rank's shard (granularity ``"tensor"``) is owned there, and nothing
travels. One that is cut goes to the rank with the least work: before the step its slices and those
of its gradient are sent to the owner, after it the new slices come back, for all matrices of a
group in one exchange each way.

    slices of p, p.grad  --send-->  plain (m, n) at its owner --step--> --send-->  slices of p

A matrix that tensor parallelism split is owned by one rank for each of its parts. Those ranks
exchange the parts of the matrix and of its gradient, and each computes the update of the whole and
keeps its own part of it, so that they stay equal as replicas do.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.autograd.graph import increment_version

from fsdp_compose.base.attributes import get_grad
from fsdp_compose.base.group import Group
from fsdp_compose.base.strides import flatten
from fsdp_compose.base.torch_private import raw
from fsdp_compose.buckets.bucket import Entry
from fsdp_compose.buckets.entries import find_entry
from fsdp_compose.comm.collectives import gather_objects
from fsdp_compose.comm.uneven import move_pieces
from fsdp_compose.core.guards.collective_log import Log
from fsdp_compose.core.guards.moved_parameters import shard_of
from fsdp_compose.core.guards.scope_parameters import leaf_of
from fsdp_compose.core.state import owner_of
from fsdp_compose.layout.matrix_work import balance
from fsdp_compose.sharded import Axis, Parallel, is_sharded, to_local

Work: TypeAlias = "Callable[[torch.Size], float]"

_BLAS_ALIGN = 64
"""Bytes. Matrix products may round otherwise where a matrix starts elsewhere, as allocators never
do: a gradient that does is copied, so that updates are bit-equal to one process's."""

_PLAIN_KEY = "_fsdp_compose_matrix"
"""Attribute of the plain parameters that stand for matrices."""


@dataclass(eq=False)
class Matrix:
    """A sharded parameter, and the plain one that stands for the whole of it at its owner.

    Attributes:
        param: the sharded parameter.
        plain: the whole at its owner during a step; NaN everywhere at all other times.
        group: the ranks that it is sharded over.
        owner: the rank of ``group`` that computes its update.
        is_cut: its owner has to be sent the others' slices.
        parallel: how tensor parallelism split it, if it did.
        part: what the slices of a split parameter add up to, at the owner.
        part_grad: the same of the gradient.
        is_copied: ``param`` is a copy, and ``entry`` still that of the original.
    """

    param: nn.Parameter
    entry: Entry
    plain: nn.Parameter
    group: Group
    owner: int = 0
    is_cut: bool = False
    parallel: Parallel | None = None
    part: Tensor | None = None
    part_grad: Tensor | None = None
    is_copied: bool = False

    def __deepcopy__(self, memo: dict[int, Any]) -> Matrix:
        # The unit of the copy may not be there yet: it is looked up by the next step.
        plain = memo[id(self.plain)] = _make_plain(self.plain, self.plain.grad_dtype)
        param = copy.deepcopy(self.param, memo)
        twin = replace(self, param=param, plain=plain, part=None, part_grad=None, is_copied=True)
        twin.empty()
        return twin

    @property
    def is_mine(self) -> bool:
        return self.owner == self.group.rank

    @property
    def name(self) -> str:
        """The name in messages."""
        return f"{self.entry.spec.fqn!r} (unit {self.entry.spec.unit!r})"

    @property
    def has_gradient(self) -> bool:
        return _grad_of(self) is not None

    @property
    def log(self) -> Log | None:
        """Compares what its ranks communicate; None where it has no other ranks."""
        caller = owner_of(self.entry).users.caller
        assert caller is None or isinstance(caller, Log)
        return caller

    @property
    def groups(self) -> tuple[Group, ...]:
        """The groups whose ranks hold slices, replicas or parts of it."""
        return (*owner_of(self.entry).mesh.groups, *(a.group for a in _list_splits(self)))

    def span_of(self, rank: int) -> slice:
        """The elements that ``rank`` has, in storage order."""
        own = owner_of(self.entry).layout.slice_of(self.entry.index, rank)
        return slice(own.start, own.stop)

    @property
    def shape(self) -> torch.Size:
        """The shape of the whole parameter, over all ranks."""
        return self.entry.spec.whole_shape

    def shape_elements(self, flat: Tensor) -> Tensor:
        """Give all elements, which come in storage order, their shape and strides."""
        return flat.as_strided(self.entry.spec.shape, self.entry.spec.stride)

    def take_elements(self, flat: Tensor, grad: Tensor | None) -> None:
        """Take what the slices add up to, as the plain parameter or as a part of it."""
        shaped = self.shape_elements(flat)
        shaped_grad = None if grad is None else self.shape_elements(grad)
        if self.parallel is None:
            self.plain.data, self.plain.grad = shaped, shaped_grad
        else:
            self.part, self.part_grad = shaped, shaped_grad

    def list_stepped(self) -> Tensor:
        """What the step made of the elements it took, in the same order."""
        new = self.plain.data if self.parallel is None else self.parallel.cut(self.plain.data)
        return flatten(new, self.entry.spec.stride)

    def empty(self) -> None:
        """Hold nothing until the next step: one NaN reads as every element."""
        nan = self.plain.data.new_full((1,) * len(self.shape), math.nan)
        self.plain.data = nan.expand(self.shape)
        self.plain.grad = self.part = self.part_grad = None


def make_matrix(param: nn.Parameter) -> Matrix:
    """The matrix of a sharded parameter, whose owner is not chosen yet.

    Raises:
        ValueError: the parameter is not sharded.
    """
    leaf = leaf_of(param)
    if not is_sharded(leaf):
        raise ValueError(
            f"owner_step: a parameter of shape {tuple(param.shape)} is not sharded, so there "
            "is no owner to choose; call fully_shard first, or give it to another optimizer. "
            "Where it is of flat_parameters or local_parameters, give module.parameters()."
        )
    entry = find_entry(param)
    bucket = owner_of(entry)
    plain = _make_plain(to_local(leaf), bucket.dtypes.grad)
    parallel = entry.spec.parallel
    if parallel is not None and not parallel.splits:
        parallel = None
    matrix = Matrix(param, entry, plain, bucket.mesh.shard, parallel=parallel)
    matrix.empty()
    return matrix


def _make_plain(like: Tensor, grad_dtype: torch.dtype | None) -> nn.Parameter:
    plain = nn.Parameter(like.detach().new_empty(0))
    if plain.grad_dtype != grad_dtype:
        plain.grad_dtype = grad_dtype
    plain.__dict__[_PLAIN_KEY] = True
    return plain


def stands_for_matrix(param: Tensor) -> bool:
    """Whether it is the plain parameter of a matrix, which has no gradient where others own it."""
    return _PLAIN_KEY in param.__dict__


def assign_owners(matrices: Sequence[Matrix], work: Work) -> None:
    """Level the work over each group of ranks; whole matrices stay where they are."""
    holders = dict(zip(matrices, _list_holders(matrices), strict=True))
    for group in list_groups(matrices):
        alike = [matrix for matrix in matrices if matrix.group.ranks == group.ranks]
        costs = [work(matrix.shape) for matrix in alike]
        held = [holders[matrix] for matrix in alike]
        for matrix, owner in zip(alike, balance(costs, held, group.size), strict=True):
            matrix.owner, matrix.is_cut = owner, holders[matrix] is None


def _list_holders(matrices: Sequence[Matrix]) -> list[int | None]:
    """The rank that has a parameter, or its part of one, whole; None where it is cut.

    Alike on all ranks that hold parts, whose buckets may be cut in other places.
    """
    owners = [owner_of(p.entry).layout.owners(p.entry.index) or range(1) for p in matrices]
    holders = [None if len(ranks) > 1 else ranks[0] for ranks in owners]
    for group in _split_groups(matrices):
        theirs = zip(*gather_objects(holders, group, "owner_step"), strict=True)
        holders = [found[0] if len(set(found)) == 1 else None for found in theirs]
    return holders


def check_matrices(matrices: Iterable[Matrix]) -> None:
    """Raise for a parameter that was sharded another way after its owner was chosen.

    Raises:
        RuntimeError: naming it.
        ValueError: it is a copy, made without its unit.
    """
    for matrix in matrices:
        if matrix.is_copied and is_sharded(matrix.param):
            matrix.entry, matrix.is_copied = find_entry(matrix.param), False
        if not is_sharded(matrix.param) or find_entry(matrix.param) is not matrix.entry:
            raise RuntimeError(
                f"owner_step: parameter {matrix.entry.spec.fqn!r} of unit "
                f"{matrix.entry.spec.unit!r} was sharded another way, or not at all, after its "
                "owner was chosen (undo, refresh); build another owner_step, and carry its "
                "state over with optim_state_dict and load_optim_state_dict."
            )


def collect_matrices(matrices: Sequence[Matrix]) -> None:
    """Give every plain parameter that this rank owns the whole parameter and its gradient."""
    for matrix in matrices:
        if matrix.is_mine and not matrix.is_cut:
            grad = _grad_of(matrix)
            if grad is not None and grad.data_ptr() % _BLAS_ALIGN:
                grad = grad.clone()
            matrix.take_elements(to_local(matrix.param).detach(), grad)
    for cut in _list_cut(matrices):
        _fetch_slices(cut)
    _exchange_parts(matrices)


def return_matrices(matrices: Sequence[Matrix]) -> None:
    """Give every rank its slices of what the owners' step made.

    Inside a scope parameters show full tensors since that step; their entries have the slices.
    """
    for cut in _list_cut(matrices):
        _send_back(cut)
    for matrix in matrices:
        if matrix.is_mine and matrix.parallel is not None and not matrix.is_cut:
            to_local(matrix.entry.param).detach().copy_(matrix.list_stepped())


def release_matrices(matrices: Sequence[Matrix]) -> None:
    """Empty the plain parameters after a step, also after one that failed."""
    for bucket in {id(b): b for m in matrices if (b := owner_of(m.entry))}.values():
        increment_version(shard_of(bucket))  # a unit that is kept gathered must notice
    for matrix in matrices:
        matrix.plain.grad = None
        if matrix.is_mine and (matrix.is_cut or matrix.parallel is not None):
            matrix.empty()


def list_groups(matrices: Iterable[Matrix]) -> list[Group]:
    """The groups that the matrices are sharded over, each once."""
    return list({matrix.group.ranks: matrix.group for matrix in matrices}.values())


def _list_cut(matrices: Sequence[Matrix]) -> list[list[Matrix]]:
    """The matrices that are cut, by the group they are cut over."""
    cut = [matrix for matrix in matrices if matrix.is_cut]
    return [[m for m in cut if m.group.ranks == group.ranks] for group in list_groups(cut)]


def _fetch_slices(matrices: Sequence[Matrix]) -> None:
    """Send slices of parameters and gradients to their owners."""
    group = matrices[0].group
    parcels = _Parcels(group, owner_of(matrices[0].entry).mesh.device)
    for matrix in matrices:
        local, grad = to_local(matrix.param).detach(), _grad_of(matrix)
        if grad is None:
            grad = torch.zeros_like(local, dtype=owner_of(matrix.entry).dtypes.grad)
        parcels.send(matrix.owner, local)
        parcels.send(matrix.owner, grad)
        if not matrix.is_mine:
            continue
        flat, flat_grad = (t.new_empty(matrix.entry.spec.numel) for t in (local, grad))
        for rank in range(group.size):
            parcels.receive(rank, flat[matrix.span_of(rank)])
            parcels.receive(rank, flat_grad[matrix.span_of(rank)])
        # A unit that ran gives every rank a gradient, so the owner's tells of the others'.
        matrix.take_elements(flat, None if _grad_of(matrix) is None else flat_grad)
    parcels.deliver("send matrices to their owners")


def _exchange_parts(matrices: Sequence[Matrix]) -> None:
    """Give the optimizer the whole of what tensor parallelism split, from its parts."""
    mine = [p for p in matrices if p.is_mine and p.parallel is not None]
    for depth in range(max((len(_list_splits(p)) for p in mine), default=0)):
        alike: dict[Group, list[Matrix]] = {}
        for matrix in mine:
            if len(_list_splits(matrix)) > depth:
                alike.setdefault(_axis_at(matrix, depth).group, []).append(matrix)
        for group, members in alike.items():
            _join_parts(members, depth, group)
    for matrix in mine:
        assert matrix.parallel is not None and matrix.part is not None
        stride = matrix.parallel.stride
        data = matrix.part.new_empty(matrix.shape.numel())
        matrix.plain.data = data.as_strided(matrix.shape, stride).copy_(matrix.part)
        if matrix.part_grad is not None:
            grad = torch.empty_like(matrix.plain.data, dtype=matrix.part_grad.dtype)
            matrix.plain.grad = grad.copy_(matrix.part_grad)


def _send_back(matrices: Sequence[Matrix]) -> None:
    """Send each rank its slices of the matrices that were stepped."""
    group = matrices[0].group
    parcels = _Parcels(group, owner_of(matrices[0].entry).mesh.device)
    for matrix in matrices:
        parcels.receive(matrix.owner, to_local(matrix.entry.param).detach())
        if matrix.is_mine:
            flat = matrix.list_stepped()
            for rank in range(group.size):
                parcels.send(rank, flat[matrix.span_of(rank)])
    parcels.deliver("return matrices from their owners")


def _list_splits(matrix: Matrix) -> tuple[Axis, ...]:
    return () if matrix.parallel is None else matrix.parallel.splits


def _axis_at(matrix: Matrix, depth: int) -> Axis:
    """The innermost axes come first, as parts are put together."""
    return _list_splits(matrix)[-1 - depth]


def _split_groups(matrices: Iterable[Matrix]) -> list[Group]:
    found = {axis.group.ranks: axis.group for matrix in matrices for axis in _list_splits(matrix)}
    return list(found.values())


def _join_parts(matrices: list[Matrix], depth: int, group: Group) -> None:
    """Put the parts of parameters, and of their gradients, together over one axis."""
    parcels = _Parcels(group, owner_of(matrices[0].entry).mesh.device)
    joined: list[tuple[list[Tensor], list[Tensor]]] = []
    for matrix in matrices:
        axis, part = _axis_at(matrix, depth), matrix.part
        assert axis.dim is not None and part is not None
        grads = [] if matrix.part_grad is None else [matrix.part_grad]
        found: list[list[Tensor]] = [[], []]
        for tensor, found_parts in zip((part, *grads), found, strict=False):
            for rank, size in enumerate(axis.sizes):
                shape = (*part.shape[: axis.dim], size, *part.shape[axis.dim + 1 :])
                found_parts.append(tensor.new_empty(shape))
                parcels.send(rank, tensor.reshape(-1))
                parcels.receive(rank, found_parts[-1].view(-1))
        joined.append((found[0], found[1]))
    parcels.deliver("exchange parts of matrices")
    for matrix, (parts, grads) in zip(matrices, joined, strict=True):
        dim = _axis_at(matrix, depth).dim
        assert dim is not None
        matrix.part = torch.cat(parts, dim)
        matrix.part_grad = torch.cat(grads, dim) if grads else None


def _grad_of(matrix: Matrix) -> Tensor | None:
    """The plain slice of the parameter's gradient."""
    with raw():
        grad = get_grad(matrix.param)
    return None if grad is None else to_local(grad).detach()


class _Parcels:
    """Pieces of any dtype on their way between ranks, as one run of bytes for each pair."""

    def __init__(self, group: Group, device: torch.device) -> None:
        self.group, self.device = group, device
        self.outgoing: list[list[Tensor]] = [[] for _ in range(group.size)]
        self.incoming: list[list[Tensor]] = [[] for _ in range(group.size)]

    def send(self, rank: int, piece: Tensor) -> None:
        if piece.numel():
            self.outgoing[rank].append(piece.contiguous().view(torch.uint8).to(self.device))

    def receive(self, rank: int, piece: Tensor) -> None:
        """Have ``piece``, one dense dimension, overwritten; pieces arrive in the order sent."""
        if piece.numel():
            self.incoming[rank].append(piece.view(torch.uint8))

    def deliver(self, purpose: str) -> None:
        empty = torch.empty(0, dtype=torch.uint8, device=self.device)
        outgoing = [torch.cat([empty, *pieces]) for pieces in self.outgoing]
        incoming = [empty.new_empty(sum(p.numel() for p in pieces)) for pieces in self.incoming]
        incoming[self.group.rank] = outgoing[self.group.rank]
        move_pieces(outgoing, incoming, self.group, purpose)
        for pieces, flat in zip(self.incoming, incoming, strict=True):
            for piece, part in zip(pieces, flat.split([p.numel() for p in pieces]), strict=True):
                piece.copy_(part)
