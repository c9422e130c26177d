"""Which state goes into which list of a step, remembered from the step before.

``_init_group`` of torch's optimizers asks one parameter after another for its gradient and looks up
its state. A ``Recorder`` calls it, and sees which tensor goes where. As long as the optimizer has
the same state, its parameters are the same, and gradients are there or missing as before, a
``StepPlan`` then fills the lists without looking anything up. It consists of positions and keeps no
tensor alive; where anything differs, torch is asked again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import chain, repeat
from operator import attrgetter, is_, itemgetter, methodcaller
from typing import Any
from weakref import ref

from torch import Tensor
from torch.optim import Optimizer

from fsdp_compose.base.attributes import get_grad
from fsdp_compose.base.torch_private import raw
from fsdp_compose.sharded import ShardedParameter, ShardedTensor, ShardSpec

Pick = Callable[[Sequence[Any]], Sequence[Any]]

_get_spec = attrgetter("_shard_spec")


@dataclass(frozen=True, eq=False)
class StepInputs:
    """What an optimizer has before a step.

    Attributes:
        params: of all its groups, in order.
        grads: their gradients, or None.
        values: all values of its state, in order.
    """

    params: list[Any]
    grads: list[Tensor | None]
    values: list[Any]


def list_inputs(optimizer: Optimizer, params: list[Any]) -> StepInputs:
    """List what the step of an optimizer over ``params`` will look up."""
    with raw():
        grads = list(map(get_grad, params))
    states = list(optimizer.state.values())
    list_values = dict.values if set(map(type, states)) <= {dict} else methodcaller("values")
    return StepInputs(params, grads, list(chain.from_iterable(map(list_values, states))))


def _outline(optimizer: Optimizer, found: StepInputs) -> list[object]:
    """What a step depends on beside the tensors themselves."""
    return [
        _find_owners(optimizer.state, found.params),
        [grad is None for grad in found.grads],
        *map(_outline_group, optimizer.param_groups),
    ]


def _find_owners(owners: Iterable[Any], params: list[Any]) -> list[int] | None:
    """The positions of those that have state, -1 for others; None for the first in order."""
    if all(map(is_, owners, params)):
        return None
    at = {id(param): k for k, param in enumerate(params)}
    return [at.get(id(owner), -1) for owner in owners]


def _outline_group(group: dict[str, Any]) -> list[object]:
    """How many parameters a group has, and what its options tell ``_init_group``.

    It asks of numbers whether they are 0, and of others, such as a learning rate, what they are.
    """
    options = [_outline_option(value) for name, value in group.items() if name != "params"]
    return [len(group["params"]), *group, *options]


def _outline_option(value: Any) -> object:
    if value is None or type(value) is bool:
        return value
    return (value > 0) - (value < 0) if type(value) in (int, float) else type(value)


def _pick(positions: list[int]) -> Pick:
    """A function that gives the items at ``positions``."""
    if len(positions) > 1:
        return itemgetter(*positions)
    return lambda items: [items[position] for position in positions]


@dataclass(frozen=True, eq=False)
class StepPlan:
    """How the lists of a step are filled.

    Attributes:
        outline: what the step depended on beside the tensors.
        specs: of the parameters, which are all sharded.
        ids: of the state's values.
        watches: of these values; without a watch, another object may have got the id of one.
        gone: gets an item when one of these values is deleted.
        pick_state: picks the sharded tensors among the state's values.
        groups: for each group what ``_init_group`` returned, and for each of its lists what picks
            that list's items among parameters, gradients and values.
    """

    outline: list[object]
    specs: list[ShardSpec]
    ids: list[int]
    watches: list[ref[Any]]
    gone: list[object]
    pick_state: Pick
    groups: list[tuple[Any, list[Pick]]]

    def fits(self, optimizer: Optimizer, found: StepInputs) -> bool:
        """Whether ``_init_group`` would fill the lists as it did, with the state that it had."""
        return (
            not self.gone
            and set(map(type, found.params)) == {ShardedParameter}
            and list(map(_get_spec, found.params)) == self.specs
            and list(map(id, found.values)) == self.ids
            and _outline(optimizer, found) == self.outline
        )

    def fill(self, found: StepInputs) -> Callable[..., Any]:
        """What a step calls in the place of ``_init_group``, once for each group in order."""
        items = [*found.params, *found.grads, *found.values]
        groups = iter(self.groups)

        def init_group(group: dict[str, Any], *lists: list[Any]) -> Any:
            answer, picks = next(groups)
            for filled, pick in zip(lists, picks, strict=True):
                filled += pick(items)
            return answer

        return init_group


class Recorder:
    """Calls an optimizer's ``_init_group``, and remembers what it put into which list."""

    def __init__(self, optimizer: Optimizer) -> None:
        self.optimizer = optimizer
        self.ask: Callable[..., Any] = optimizer._init_group  # type: ignore[attr-defined]
        self.groups: list[tuple[Any, tuple[list[Any], ...]]] = []

    def init_group(self, group: dict[str, Any], *lists: list[Any]) -> Any:
        answer = self.ask(group, *lists)
        self.groups.append((answer, tuple(map(list, lists))))
        return answer

    def plan(self, found: StepInputs) -> StepPlan | None:
        """The plan for steps like the one that was taken; None where not all lists are known.

        Only where every parameter is sharded: the gradient of a plain one may be of any layout.
        """
        items = [*found.params, *found.grads, *found.values]
        at = {id(item): k for k, item in enumerate(items) if isinstance(item, Tensor)}
        count = sum(isinstance(item, Tensor) for item in items)
        listed = [item for _, lists in self.groups for filled in lists for item in filled]
        if set(map(type, found.params)) != {ShardedParameter} or len(at) < count:
            return None
        if not all(id(item) in at for item in chain(self.optimizer.state, found.values, listed)):
            return None
        gone: list[object] = []
        return StepPlan(
            _outline(self.optimizer, found),
            list(map(_get_spec, found.params)),
            list(map(id, found.values)),
            list(map(ref, found.values, repeat(gone.append))),
            gone,
            _pick([k for k, value in enumerate(found.values) if type(value) is ShardedTensor]),
            [
                (answer, [_pick([at[id(item)] for item in filled]) for filled in lists])
                for answer, lists in self.groups
            ],
        )
