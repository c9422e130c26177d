"""Optimizers of whole matrices: one rank has each, computes its update once, and no other does.

What the optimizer keeps stays at the owner, whatever its shape: momentum, Gram matrices, 8-bit
blocks and their scales. Replicas each do the work on equal gradients, so they stay equal.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from inspect import Parameter, signature
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from fsdp_compose.comm.collectives import gather_objects
from fsdp_compose.layout.matrix_work import matrix_work
from fsdp_compose.optim.matrices import (
    Matrix,
    Work,
    assign_owners,
    check_matrices,
    collect_matrices,
    list_groups,
    make_matrix,
    return_matrices,
)

Params: TypeAlias = "Iterable[nn.Parameter] | Iterable[dict[str, Any]] | Iterable[tuple[str, Any]]"
_WATCHED_STEPS = 3
"""Steps after which ranks compare what the optimizer made of its settings; the first sums are 0."""


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
        self._matrices: list[Matrix] = []
        self._steps = 0
        super().__init__(params, {})
        self._matrices = [make_matrix(p) for group in self.param_groups for p in group["params"]]
        assign_owners(self._matrices, work)
        rest = iter(self._matrices)
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
        for matrix in self._matrices:
            if not matrix.is_mine:  # some optimizers make state at once
                self.optimizer.state.pop(matrix.plain, None)
        self._take_back()

    @property
    def owners(self) -> list[int]:
        return [matrix.owner for matrix in self._matrices]

    def owner_of(self, param: Tensor) -> int:
        """The rank in the parameter's shard group that owns it."""
        return next(matrix.owner for matrix in self._matrices if matrix.param is param)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Only while it is built: ownership is levelled over all parameters."""
        if self._matrices:
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
        check_matrices(self._matrices)
        if 0 < self._steps <= _WATCHED_STEPS:
            self._check_settings()
        self._steps += 1
        with torch.no_grad():
            self._hand_over_settings()
            collect_matrices(self._matrices)
            self.optimizer.step()
            return_matrices(self._matrices)
            self._take_back()
        return loss

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """As the optimizer that ``make`` returned; state is needed for this rank's parameters."""
        numbers = [number for group in state_dict["param_groups"] for number in group["params"]]
        own = {n for n, matrix in zip(numbers, self._matrices, strict=False) if matrix.is_mine}
        kept = {n: values for n, values in state_dict["state"].items() if n in own}
        self.optimizer.load_state_dict({**state_dict, "state": kept})
        self._take_back()

    def _check_settings(self) -> None:
        """After a step: raise on every rank if the optimizer set other values on another rank."""
        mine = [
            {k: repr(v) for k, v in group.items() if isinstance(v, int | float)}
            for group in self.param_groups
        ]
        for group in list_groups(self._matrices):
            for rank, theirs in zip(
                group.ranks, gather_objects(mine, group, "step() of owner_step"), strict=True
            ):
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

    def _hand_over_settings(self) -> None:
        """Give the optimizer the settings that this one has now, such as a scheduler's."""
        for mine, theirs in zip(self.param_groups, self.optimizer.param_groups, strict=True):
            theirs.update((k, v) for k, v in mine.items() if k not in ("params", "param_names"))

    def _take_back(self) -> None:
        """Show the optimizer's settings and state as those of the sharded parameters."""
        for mine, theirs in zip(self.param_groups, self.optimizer.param_groups, strict=True):
            mine.update((k, v) for k, v in theirs.items() if k not in ("params", "param_names"))
        self.state.clear()
        for matrix in self._matrices:
            if matrix.is_mine and matrix.plain in self.optimizer.state:
                self.state[matrix.param] = self.optimizer.state[matrix.plain]


def _check_closure(optimizer: Optimizer) -> None:
    """Refuse optimizers that evaluate the loss themselves: they search along one vector of all."""
    closure = signature(optimizer.step).parameters.get("closure")
    if closure is not None and closure.default is Parameter.empty:
        raise TypeError(
            f"owner_step: {type(optimizer).__name__}.step needs a closure: it looks at all "
            "parameters as one vector, and each rank would have the part it owns. It cannot run "
            "on a sharded model; undo(model) and give it the plain parameters, on one process or "
            "on equal replicas."
        )


def _is_over(optimizer: object, params: list[nn.Parameter]) -> bool:
    if not isinstance(optimizer, Optimizer):
        return False
    found = [p for group in optimizer.param_groups for p in group["params"]]
    return list(map(id, found)) == list(map(id, params))
