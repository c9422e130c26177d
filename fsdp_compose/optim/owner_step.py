"""Optimizers of whole matrices: one rank has each, computes its update once, and no other does.

A matrix that lies whole in a rank's shard (granularity ``"tensor"``) is owned there, and nothing
travels. One that is cut goes to the rank with the least work: before the step its slices and those
of its gradient are sent to the owner, after it the new slices come back, for all matrices of a
group in one exchange each way.

    slices of p, p.grad  --move-->  plain (m, n) at its owner --step--> --move-->  slices of p

A matrix that tensor parallelism split is owned by one rank for each of its parts. Those ranks
exchange the parts of the matrix and of its gradient, and each computes the update of the whole and
keeps its own part of it, so that they stay equal as replicas do.

What the optimizer keeps stays at the owner, whatever its shape: momentum, Gram matrices, 8-bit
blocks and their scales. Replicas each do the work on equal gradients, so they stay equal.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from inspect import Parameter, signature
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.autograd.graph import increment_version
from torch.optim import Optimizer

from fsdp_compose.base.group import Group
from fsdp_compose.base.strides import flatten
from fsdp_compose.base.torch_private import raw
from fsdp_compose.buckets.bucket import Entry
from fsdp_compose.buckets.entries import find_entry
from fsdp_compose.comm import collectives as comm
from fsdp_compose.comm.collectives import move_pieces
from fsdp_compose.core.reducing import get_grad
from fsdp_compose.core.state import owner_of
from fsdp_compose.layout.matrix_work import balance, matrix_work
from fsdp_compose.sharded import Axis, Parallel, is_sharded, to_local

Params: TypeAlias = "Iterable[nn.Parameter] | Iterable[dict[str, Any]] | Iterable[tuple[str, Any]]"
_BLAS_ALIGN = 64
"""Bytes. Matrix products may round otherwise where a matrix starts elsewhere, as allocators never
do: a gradient that does is copied, so that updates are bit-equal to one process's."""

_WATCHED_STEPS = 3
"""Steps after which ranks compare what the optimizer made of its settings; the first sums are 0."""

Work: TypeAlias = "Callable[[torch.Size], float]"


def owner_step(
    params: Params, make: Callable[[list[dict[str, Any]]], Optimizer], *, work: Work = matrix_work
) -> OwnerOptimizer:
    """An optimizer over sharded parameters in which one rank computes each update, on the whole.

    For optimizers that look at a matrix as one: Muon, Shampoo, SOAP, Kron, Adafactor. They need not
    know of sharding: each is given plain parameters of the original shapes, and gradients only for
    those that this rank owns. An optimizer that sums over all parameters (Prodigy, D-Adaptation) is
    given the sharded parameters themselves, whose sums are of all ranks; LBFGS, to which all are
    one vector, is refused. Other parameters go to another optimizer::

        matrices = [p for p in model.blocks.parameters() if p.ndim == 2]
        others = [p for p in model.parameters() if p not in set(matrices)]
        muon = owner_step(matrices, lambda groups: torch.optim.Muon(groups, lr=0.02))
        adamw = torch.optim.AdamW(others, lr=3e-4)

    Updates are bit-equal to one process's from the same gradients. With ``granularity="tensor"``
    nothing is communicated, for more padding; at the default nothing is padded, and a step moves
    three times this rank's part of the matrices, in two exchanges per mesh: see ``plan``. Of
    matrices that tensor parallelism split, whole or cut, owners of the parts send each other
    parameters and gradients in one exchange more, and each computes the update.

    Args:
        params: sharded parameters, or groups of them, as any optimizer takes.
        make: from groups of plain parameters to an optimizer over them, in their order. It must
            leave parameters without a gradient alone, as torch's do.
        work: what the update of a parameter of some shape costs; levelled over the ranks.

    Returns:
        an optimizer over ``params``: schedulers, ``GradScaler``, ``optim_state_dict`` and
        checkpoints take it as any other.

    Raises:
        ValueError: a parameter is not sharded.
        TypeError: ``make`` returned something else than an optimizer over what it was given.

    Example:
        >>> model = fully_shard(nn.Linear(2, 2))
        >>> optim = owner_step([model.weight], lambda groups: torch.optim.SGD(groups, lr=0.1))
        >>> model(torch.ones(1, 2)).sum().backward()
        >>> optim.step()
    """
    return OwnerOptimizer(params, make, work)


@dataclass(eq=False)
class _Piece:
    """A parameter, and the plain one that stands for the whole of it at its owner."""

    param: nn.Parameter
    entry: Entry
    plain: nn.Parameter
    group: Group
    owner: int = 0
    is_cut: bool = False  # its owner has to be sent the others' slices
    parallel: Parallel | None = None  # how tensor parallelism split it, if it did
    part: Tensor | None = None  # what the slices add up to at the owner, of a split parameter
    part_grad: Tensor | None = None

    @property
    def is_mine(self) -> bool:
        return self.owner == self.group.rank

    def span(self, rank: int) -> slice:
        """The elements that ``rank`` has, in storage order."""
        own = owner_of(self.entry).layout.slice_of(self.entry.index, rank)
        return slice(own.start, own.stop)

    @property
    def shape(self) -> torch.Size:
        """Of the whole parameter, over all ranks."""
        return self.entry.spec.whole_shape

    def shaped(self, flat: Tensor) -> Tensor:
        """All elements that the bucket has, in storage order, in their shape and strides."""
        return flat.as_strided(self.entry.spec.shape, self.entry.spec.stride)

    def give(self, flat: Tensor, grad: Tensor | None) -> None:
        """Take over what the slices add up to, as the plain parameter or as a part of it."""
        shaped, shaped_grad = self.shaped(flat), None if grad is None else self.shaped(grad)
        if self.parallel is None:
            self.plain.data, self.plain.grad = shaped, shaped_grad
        else:
            self.part, self.part_grad = shaped, shaped_grad

    def stepped(self) -> Tensor:
        """What the step made of ``give``'s elements, in the same order."""
        new = self.plain.data if self.parallel is None else self.parallel.cut(self.plain.data)
        return flatten(new, self.entry.spec.stride)

    def hollow(self) -> None:
        """Hold nothing until the next step: one NaN reads as every element."""
        nan = self.plain.data.new_full((1,) * len(self.shape), math.nan)
        self.plain.data = nan.expand(self.shape)
        self.plain.grad = self.part = self.part_grad = None


class OwnerOptimizer(Optimizer):
    """What ``owner_step`` returns.

    Attributes:
        optimizer: what ``make`` returned: over plain parameters of the original shapes, of which
            those that other ranks own hold nothing and never have a gradient.
        owners: for each parameter, in order, the rank of its shard group that owns it.
        state: of this rank's parameters; the dictionaries of ``optimizer``.

    Example:
        >>> model = fully_shard(nn.Linear(2, 2))
        >>> optim = owner_step(model.parameters(), lambda groups: torch.optim.SGD(groups, lr=0.1))
        >>> isinstance(optim, OwnerOptimizer)
        True
    """

    def __init__(
        self, params: Params, make: Callable[[list[dict[str, Any]]], Optimizer], work: Work
    ) -> None:
        self._pieces: list[_Piece] = []
        self._steps = 0
        super().__init__(params, {})
        self._pieces = [self._piece(p) for group in self.param_groups for p in group["params"]]
        self._assign_owners(work)
        rest = iter(self._pieces)
        groups = [
            {**group, "params": [next(rest).plain for _ in group["params"]]}
            for group in self.param_groups
        ]
        plain = [p for group in groups for p in group["params"]]
        self.optimizer = make(groups)
        if not _is_over(self.optimizer, plain):
            raise TypeError(
                f"owner_step: make returned {type(self.optimizer).__name__}; wanted an optimizer "
                "over the groups it was given, such as lambda groups: torch.optim.Muon(groups)."
            )
        _check_closure(self.optimizer)
        self.defaults = self.optimizer.defaults
        for piece in self._pieces:
            if not piece.is_mine:  # some optimizers make state at once
                self.optimizer.state.pop(piece.plain, None)
        self._take_back()

    @property
    def owners(self) -> list[int]:
        return [piece.owner for piece in self._pieces]

    def owner_of(self, param: Tensor) -> int:
        """The rank in the parameter's shard group that owns it."""
        return next(piece.owner for piece in self._pieces if piece.param is param)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Only while it is built: ownership is levelled over all parameters."""
        if self._pieces:
            raise RuntimeError(
                "owner_step: a parameter group was added after the owners were chosen; build "
                "another owner_step over the new parameters."
            )
        super().add_param_group(param_group)

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """One step on the owners; every rank of the shard group must call it."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._check_pieces()
        if 0 < self._steps <= _WATCHED_STEPS:
            self._check_settings()
        self._steps += 1
        with torch.no_grad():
            self._hand_over()
            for group in self._groups_with_cuts():
                self._fetch_values(group)
            self._exchange_parts()
            self.optimizer.step()
            for group in self._groups_with_cuts():
                self._send_back(group)
            for bucket in {id(b): b for p in self._pieces if (b := owner_of(p.entry))}.values():
                increment_version(bucket.shard)  # a unit that is kept gathered must notice
            for piece in self._pieces:
                piece.plain.grad = None
                if piece.is_mine and piece.parallel is not None and not piece.is_cut:
                    to_local(piece.param).detach().copy_(piece.stepped())
                if piece.is_mine and (piece.is_cut or piece.parallel is not None):
                    piece.hollow()
            self._take_back()
        return loss

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """As the optimizer that ``make`` returned; state is needed for this rank's parameters."""
        numbers = [number for group in state_dict["param_groups"] for number in group["params"]]
        own = {n for n, piece in zip(numbers, self._pieces, strict=False) if piece.is_mine}
        kept = {n: values for n, values in state_dict["state"].items() if n in own}
        self.optimizer.load_state_dict({**state_dict, "state": kept})
        self._take_back()

    def _piece(self, param: nn.Parameter) -> _Piece:
        if not is_sharded(param):
            raise ValueError(
                f"owner_step: a parameter of shape {tuple(param.shape)} is not sharded, so there "
                "is no owner to choose; call fully_shard first, or give it to another optimizer."
            )
        entry = find_entry(param)
        bucket = owner_of(entry)
        plain = nn.Parameter(to_local(param).detach().new_empty(0))
        if plain.grad_dtype != bucket.dtypes.grad:
            plain.grad_dtype = bucket.dtypes.grad
        parallel = entry.spec.parallel
        if parallel is not None and not parallel.splits:
            parallel = None
        piece = _Piece(param, entry, plain, bucket.mesh.shard, parallel=parallel)
        piece.hollow()
        return piece

    def _assign_owners(self, work: Work) -> None:
        """Level the work over each group of ranks; whole matrices stay where they are."""
        holders = dict(zip(self._pieces, self._list_holders(), strict=True))
        for group in {piece.group.ranks: piece.group for piece in self._pieces}.values():
            pieces = [piece for piece in self._pieces if piece.group.ranks == group.ranks]
            costs = [work(piece.shape) for piece in pieces]
            held = [holders[piece] for piece in pieces]
            for piece, owner in zip(pieces, balance(costs, held, group.size), strict=True):
                piece.owner, piece.is_cut = owner, holders[piece] is None

    def _list_holders(self) -> list[int | None]:
        """The rank that has a parameter, or its part of one, whole; None where it is cut.

        Alike on all ranks that hold parts, whose buckets may be cut in other places.
        """
        owners = [owner_of(p.entry).layout.owners(p.entry.index) or range(1) for p in self._pieces]
        holders = [None if len(ranks) > 1 else ranks[0] for ranks in owners]
        for group in _split_groups(self._pieces):
            theirs = zip(*comm.gather_objects(holders, group), strict=True)
            holders = [found[0] if len(set(found)) == 1 else None for found in theirs]
        return holders

    def _check_pieces(self) -> None:
        for piece in self._pieces:
            if not is_sharded(piece.param) or find_entry(piece.param) is not piece.entry:
                raise RuntimeError(
                    f"owner_step: parameter {piece.entry.spec.fqn!r} of unit "
                    f"{piece.entry.spec.unit!r} was sharded another way, or not at all, after its "
                    "owner was chosen (undo, refresh); build another owner_step, and carry its "
                    "state over with optim_state_dict and load_optim_state_dict."
                )

    def _check_settings(self) -> None:
        """After a step: raise on every rank if the optimizer set itself otherwise on another."""
        mine = [
            {k: repr(v) for k, v in group.items() if isinstance(v, int | float)}
            for group in self.param_groups
        ]
        for group in {piece.group.ranks: piece.group for piece in self._pieces}.values():
            for rank, theirs in zip(group.ranks, comm.gather_objects(mine, group), strict=True):
                for a, b in zip(mine, theirs, strict=False):
                    key = next((k for k in a if k in b and a[k] != b[k]), None)
                    if key is not None:
                        raise RuntimeError(
                            f"owner_step: {type(self.optimizer).__name__} made {key!r} of its "
                            f"group {a[key]} on rank {group.ranks[group.rank]} and {b[key]} on "
                            f"rank {rank}, since it sums over all parameters and each rank has "
                            "those it owns; give it the sharded parameters themselves, whose sums "
                            "are of all ranks. If its step cannot take those, it needs a model "
                            "that is not sharded."
                        )

    def _hand_over(self) -> None:
        """Give the optimizer its settings, and the matrices that lie whole in this rank's shard."""
        for mine, theirs in zip(self.param_groups, self.optimizer.param_groups, strict=True):
            theirs.update((k, v) for k, v in mine.items() if k not in ("params", "param_names"))
        for piece in self._pieces:
            if piece.is_mine and not piece.is_cut:
                grad = _grad_of(piece)
                if grad is not None and grad.data_ptr() % _BLAS_ALIGN:
                    grad = grad.clone()
                piece.give(to_local(piece.param).detach(), grad)

    def _take_back(self) -> None:
        """Show the optimizer's settings and state as those of the sharded parameters."""
        for mine, theirs in zip(self.param_groups, self.optimizer.param_groups, strict=True):
            mine.update((k, v) for k, v in theirs.items() if k not in ("params", "param_names"))
        self.state.clear()
        for piece in self._pieces:
            if piece.is_mine and piece.plain in self.optimizer.state:
                self.state[piece.param] = self.optimizer.state[piece.plain]

    def _groups_with_cuts(self) -> list[Group]:
        return list({p.group.ranks: p.group for p in self._pieces if p.is_cut}.values())

    def _cut_pieces(self, group: Group) -> list[_Piece]:
        return [p for p in self._pieces if p.is_cut and p.group.ranks == group.ranks]

    def _fetch_values(self, group: Group) -> None:
        """Send slices of parameters and gradients to their owners."""
        pieces = self._cut_pieces(group)
        parcels = _Parcels(group, owner_of(pieces[0].entry).mesh.device)
        for piece in pieces:
            local, grad = to_local(piece.param).detach(), _grad_of(piece)
            if grad is None:
                grad = torch.zeros_like(local, dtype=owner_of(piece.entry).dtypes.grad)
            parcels.send(piece.owner, local)
            parcels.send(piece.owner, grad)
            if not piece.is_mine:
                continue
            flat, flat_grad = (t.new_empty(piece.entry.spec.numel) for t in (local, grad))
            for rank in range(group.size):
                parcels.receive(rank, flat[piece.span(rank)])
                parcels.receive(rank, flat_grad[piece.span(rank)])
            # A unit that ran gives every rank a gradient, so the owner's tells of the others'.
            piece.give(flat, None if _grad_of(piece) is None else flat_grad)
        parcels.deliver("send matrices to their owners")

    def _exchange_parts(self) -> None:
        """Give the optimizer the whole of what tensor parallelism split, from its parts."""
        mine = [p for p in self._pieces if p.is_mine and p.parallel is not None]
        for depth in range(max((len(_list_splits(p)) for p in mine), default=0)):
            deep = [p for p in mine if len(_list_splits(p)) > depth]
            for group in {
                _axis_at(p, depth).group.ranks: _axis_at(p, depth).group for p in deep
            }.values():
                _join_parts([p for p in deep if _axis_at(p, depth).group == group], depth, group)
        for piece in mine:
            assert piece.parallel is not None and piece.part is not None
            stride = piece.parallel.stride
            data = piece.part.new_empty(0).new_empty(piece.shape.numel())
            piece.plain.data = data.as_strided(piece.shape, stride).copy_(piece.part)
            if piece.part_grad is not None:
                grad = torch.empty_like(piece.plain.data, dtype=piece.part_grad.dtype)
                piece.plain.grad = grad.copy_(piece.part_grad)

    def _send_back(self, group: Group) -> None:
        """Send each rank its slices of the matrices that were stepped."""
        pieces = self._cut_pieces(group)
        parcels = _Parcels(group, owner_of(pieces[0].entry).mesh.device)
        for piece in pieces:
            parcels.receive(piece.owner, to_local(piece.param).detach())
            if piece.is_mine:
                flat = piece.stepped()
                for rank in range(group.size):
                    parcels.send(rank, flat[piece.span(rank)])
        parcels.deliver("return matrices from their owners")


def _check_closure(optimizer: Optimizer) -> None:
    """Refuse optimizers that evaluate the loss themselves, for which all parameters are one."""
    closure = signature(optimizer.step).parameters.get("closure")
    if closure is not None and closure.default is Parameter.empty:
        raise TypeError(
            f"owner_step: {type(optimizer).__name__}.step needs a closure: it looks at all "
            "parameters as one vector, and each rank would have the part it owns. It cannot run "
            "on a sharded model; undo(model) and give it the plain parameters, on one process or "
            "on equal replicas."
        )


def _list_splits(piece: _Piece) -> tuple[Axis, ...]:
    return () if piece.parallel is None else piece.parallel.splits


def _axis_at(piece: _Piece, depth: int) -> Axis:
    """The innermost axes come first, as parts are put together."""
    return _list_splits(piece)[-1 - depth]


def _split_groups(pieces: Iterable[_Piece]) -> list[Group]:
    found = {axis.group.ranks: axis.group for piece in pieces for axis in _list_splits(piece)}
    return list(found.values())


def _join_parts(pieces: list[_Piece], depth: int, group: Group) -> None:
    """Put the parts of parameters, and of their gradients, together over one axis."""
    parcels = _Parcels(group, owner_of(pieces[0].entry).mesh.device)
    joined: list[tuple[list[Tensor], list[Tensor]]] = []
    for piece in pieces:
        axis, part = _axis_at(piece, depth), piece.part
        assert axis.dim is not None and part is not None
        grads = [] if piece.part_grad is None else [piece.part_grad]
        found: list[list[Tensor]] = [[], []]
        for tensor, pieces_of in zip((part, *grads), found, strict=False):
            for rank, size in enumerate(axis.sizes):
                shape = (*part.shape[: axis.dim], size, *part.shape[axis.dim + 1 :])
                pieces_of.append(tensor.new_empty(shape))
                parcels.send(rank, tensor.reshape(-1))
                parcels.receive(rank, pieces_of[-1].view(-1))
        joined.append((found[0], found[1]))
    parcels.deliver("exchange parts of matrices")
    for piece, (parts, grads) in zip(pieces, joined, strict=True):
        dim = _axis_at(piece, depth).dim
        assert dim is not None
        piece.part = torch.cat(parts, dim)
        piece.part_grad = torch.cat(grads, dim) if grads else None


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


def _is_over(optimizer: object, params: list[nn.Parameter]) -> bool:
    if not isinstance(optimizer, Optimizer):
        return False
    found = [p for group in optimizer.param_groups for p in group["params"]]
    return list(map(id, found)) == list(map(id, params))


def _grad_of(piece: _Piece) -> Tensor | None:
    """The plain slice of the parameter's gradient."""
    with raw():
        grad = get_grad(piece.param)
    return None if grad is None else to_local(grad).detach()
