"""Optimizers of whole matrices: one rank has each, computes its update once, and no other does.

What the optimizer keeps stays at the owner, whatever its shape: momentum, Gram matrices, 8-bit
blocks and their scales. Replicas each do the work on equal gradients, so they stay equal.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from functools import wraps
from inspect import Parameter, signature
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from fsdp_compose.base.arguments import check_function, check_not_negative, describe_value
from fsdp_compose.base.loops import parameters_of
from fsdp_compose.layout.matrix_work import matrix_work
from fsdp_compose.optim.matrices import (
    Matrix,
    Work,
    assign_owners,
    check_matrices,
    collect_matrices,
    make_matrix,
    release_matrices,
    return_matrices,
)
from fsdp_compose.optim.owner_ranks import OwnerFacts, OwnerLinks, compare_matrices, list_settings
from fsdp_compose.optim.unread_matrices import RefuseReads

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

    Updates are bit-equal to one process's from the same gradients, where the optimizer draws no
    random numbers and looks at one matrix at a time: one that pairs them (LoRA-RITE) finds
    gradients of those that this rank owns, and skips the others without a word. So does one whose
    step takes a number over several and does not keep it (the mean square of Ranger21 and Adai, the
    norm by which LAMB may clip): give such optimizers ``model.parameters()``. With
    ``granularity="tensor"`` nothing is communicated, for more padding; at the default nothing is
    padded, and a step moves three times this rank's part of the matrices, in two exchanges per
    mesh: see ``plan``. Of matrices that tensor parallelism split, whole or cut, owners of the parts
    send each other parameters and gradients in one exchange more, and each computes the update.

    Every rank makes it, and calls ``step``, with the same parameters and groups in the same order
    and the same optimizer, which ranks compare. On gloo they also compare in each step, by two
    small messages per group, which parameters have gradients, and hear of an error in the step of
    another rank; on other backends that error leaves the others waiting. ``copy.deepcopy((model,
    optim))`` gives an independent pair.

    Args:
        params: sharded parameters, or groups of them, as any optimizer takes.
        make: from groups of plain parameters to an optimizer over them, in their order. It must
            leave parameters without a gradient alone, as torch's do, and read values in steps only.
        work: what the update of a parameter of some shape costs; levelled over the ranks.

    Returns:
        an optimizer over ``params``: schedulers, ``GradScaler``, ``optim_state_dict`` and
        checkpoints take it as any other.

    Raises:
        ValueError: a parameter is not sharded, there is none, or ranks were given different things.
        TypeError: ``params`` are no parameters, ``make`` or ``work`` is not such a function, or
            ``make`` returned something else than an optimizer over what it was given.

    Example:
        >>> model = fully_shard(nn.Linear(2, 2))
        >>> optim = owner_step([model.weight], lambda groups: torch.optim.SGD(groups, lr=0.1))
        >>> model(torch.ones(1, 2)).sum().backward()
        >>> optim.step()
    """
    if not isinstance(make, type):
        check_function("owner_step", "make", make, "(groups)")
    check_function("owner_step", "work", work, "(shape)")
    return OwnerOptimizer(_list_params(params), make, work)


def _list_params(params: Any) -> list[Any]:
    wanted = "sharded parameters or groups of them: [p for p in model.parameters() if p.ndim == 2]"
    is_one = isinstance(params, nn.Module | Tensor | Mapping | str | bytes)
    is_several = isinstance(params, Iterable) and not is_one
    listed = list(params) if is_several else []
    strange = [item for item in listed if not isinstance(item, Tensor | Mapping | tuple)]
    strange += [item for item in listed if isinstance(item, Mapping) and "params" not in item]
    if strange or not is_several:
        what = f"holds {describe_value(strange[0])}" if strange else f"is {describe_value(params)}"
        raise TypeError(f"owner_step: params {what}; wanted {wanted}.")
    if not listed:
        raise ValueError(f"owner_step: params is empty; wanted {wanted}.")
    return listed


def _share_failures(step: Callable[..., Any]) -> Callable[..., Any]:
    """Have the other ranks hear what a step, or a hook before its end, raises."""
    hooked = Optimizer.profile_hook_step(step)

    @wraps(hooked)
    def call(self: OwnerOptimizer, *args: Any, **kwargs: Any) -> Any:
        steps = self._steps
        with self._links.tell_failures(lambda: self._steps == steps):
            return hooked(self, *args, **kwargs)

    vars(call)["hooked"] = True  # else torch calls the hooks outside of the scope
    return call


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
        self._steps = self._compared = 0  # that ended; after how many settings were compared
        self._shown: list[dict[str, Any] | None] = []  # of each matrix, its state as it was shown
        super().__init__(params, {})
        self._build(make, work)
        self._links = OwnerLinks.of(self._matrices)
        assign_owners(self._matrices, work)
        self.defaults = self.optimizer.defaults
        for matrix in self._matrices:
            if not matrix.is_mine:  # some optimizers make state at once
                self.optimizer.state.pop(matrix.plain, None)
        self._take_back()

    def _build(self, make: Callable[[list[dict[str, Any]]], Optimizer], work: Work) -> None:
        """Make the matrices and the optimizer, on all ranks or on none."""
        problem, facts = None, OwnerFacts("", [], [])
        try:
            for param in parameters_of(self):
                self._matrices.append(make_matrix(param))
            self.optimizer = self._make_optimizer(make)
            facts = self._list_facts(work)
        except Exception as error:
            problem = error
        try:
            compare_matrices(self._matrices, facts, problem)
        finally:
            del problem  # its traceback holds this frame, and with it the matrices

    def _make_optimizer(self, make: Callable[[list[dict[str, Any]]], Optimizer]) -> Optimizer:
        rest = iter(self._matrices)
        groups = [
            {**group, "params": [next(rest).plain for _ in group["params"]]}
            for group in self.param_groups
        ]
        plain = [p for group in groups for p in group["params"]]
        with RefuseReads(plain):
            optimizer = make(groups)
        if not _is_over(optimizer, plain):
            raise TypeError(
                f"owner_step: make returned {type(optimizer).__name__}; wanted an optimizer "
                "over the groups it was given, such as lambda groups: torch.optim.Muon(groups)."
            )
        _check_closure(optimizer)
        return optimizer

    def _list_facts(self, work: Work) -> OwnerFacts:
        groups = [n for n, group in enumerate(self.param_groups) for _ in group["params"]]
        costs = [work(matrix.shape) for matrix in self._matrices]
        for cost in costs:
            wanted = "a number, 0 or more and finite"
            check_not_negative("owner_step", "what work returned", cost, wanted)
            if cost == math.inf:
                raise ValueError(f"owner_step: what work returned is {cost}; wanted {wanted}.")
        names = [matrix.name for matrix in self._matrices]
        params = list(zip(names, groups, costs, strict=True))
        settings = list_settings(self.optimizer.param_groups)
        return OwnerFacts(type(self.optimizer).__qualname__, settings, params)

    def __getstate__(self) -> dict[str, Any]:
        # Matrices come first: their copies have the plain parameters of the optimizer's copy.
        own = ("_matrices", "_links", "_steps", "_compared", "_shown", "optimizer")
        return {**{name: vars(self)[name] for name in own}, **super().__getstate__()}

    @property
    def owners(self) -> list[int]:
        return [matrix.owner for matrix in self._matrices]

    def owner_of(self, param: Tensor) -> int:
        """The rank in the parameter's shard group that owns it.

        Raises:
            ValueError: it is no parameter of this optimizer.
        """
        for matrix in self._matrices:
            if matrix.param is param:
                return matrix.owner
        found = describe_value(param)
        raise ValueError(f"owner_of: param is {found}; wanted a parameter of this optimizer.")

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Only while it is built: ownership is levelled over all parameters."""
        if self._matrices:
            raise RuntimeError(
                "owner_step: a parameter group was added after the owners were chosen; give its "
                "parameters to an owner_step of their own, beside this one."
            )
        super().add_param_group(param_group)

    @_share_failures
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """One step on the owners; every rank of the shard group must call it.

        Raises:
            RuntimeError: on gloo: another rank raised in its step, or lacks other gradients.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        check_matrices(self._matrices)
        with torch.no_grad():
            if self._compared < self._steps <= _WATCHED_STEPS:
                settings = list_settings(self.param_groups)
                self._links.compare_settings(type(self.optimizer).__name__, settings)
                self._compared = self._steps  # once, also where this step is begun again
            self._hand_over()
            self._links.meet("begin a step of owner_step", self._matrices)
            try:
                collect_matrices(self._matrices)
                self._step_own()
                self._links.meet("end a step of owner_step")
                return_matrices(self._matrices)
                self._steps += 1
            finally:
                release_matrices(self._matrices)
                self._take_back()
        return loss

    def _step_own(self) -> None:
        try:
            self.optimizer.step()
        except (AttributeError, TypeError) as error:
            if "NoneType" not in str(error) or all(one.is_mine for one in self._matrices):
                raise
            raise TypeError(
                f"owner_step: the step of {type(self.optimizer).__name__} fails where a parameter "
                "has no gradient, as those have none here that other ranks own; make an optimizer "
                "that leaves them out, as torch's do: `if p.grad is None: continue`."
            ) from error

    def state_dict(self) -> dict[str, Any]:
        """This rank's state, with what the optimizer that ``make`` returned has beside it."""
        extra = self.optimizer.state_dict()
        return {**extra, **super().state_dict()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """As the optimizer that ``make`` returned; state is needed for this rank's parameters.

        Raises:
            RuntimeError: there is state, but none for those: another rank has saved it.
        """
        numbers = [number for group in state_dict["param_groups"] for number in group["params"]]
        own = {n for n, matrix in zip(numbers, self._matrices, strict=False) if matrix.is_mine}
        saved = state_dict["state"]
        numbered = {n for n in saved if not isinstance(n, str)}
        kept = {n: values for n, values in saved.items() if n in own or n not in numbered}
        if own and numbered and not numbered & own:
            raise RuntimeError(
                "owner_step: the state that is to be loaded is of parameters that other ranks "
                "own: state_dict() holds those of one rank. Save with save_checkpoint or "
                "fsdp_compose.optim_state_dict(module, optimizer) on every rank, and load with "
                "load_checkpoint or load_optim_state_dict."
            )
        self.optimizer.load_state_dict({**state_dict, "state": kept})
        self.state = defaultdict(dict)  # others, as torch makes: a load that fails puts them back
        self.param_groups = [{**group} for group in self.param_groups]
        self._take_back()

    def _hand_over(self) -> None:
        """Give the optimizer the settings that this one has now, and state that was put in it."""
        for mine, theirs in zip(self.param_groups, self.optimizer.param_groups, strict=True):
            theirs.update((k, v) for k, v in mine.items() if k not in ("params", "param_names"))
        for matrix, shown in zip(self._matrices, self._shown, strict=True):
            state = self.state.get(matrix.param)
            if matrix.is_mine and state is not shown:
                self.optimizer.state.pop(matrix.plain, None)
                if state is not None:
                    self.optimizer.state[matrix.plain] = state

    def _take_back(self) -> None:
        """Show the optimizer's settings and state as those of the sharded parameters."""
        for mine, theirs in zip(self.param_groups, self.optimizer.param_groups, strict=True):
            mine.update((k, v) for k, v in theirs.items() if k not in ("params", "param_names"))
        self.state.clear()
        for matrix in self._matrices:
            if matrix.is_mine and matrix.plain in self.optimizer.state:
                self.state[matrix.param] = self.optimizer.state[matrix.plain]
        everything: dict[Any, Any] = dict(self.optimizer.state)
        beside = {k: v for k, v in everything.items() if not isinstance(k, Tensor)}
        self.state.update(beside)  # of no parameter: saving refuses it by its name
        self._shown = [self.state.get(matrix.param) for matrix in self._matrices]


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
    found = parameters_of(optimizer)
    return list(map(id, found)) == list(map(id, params))
