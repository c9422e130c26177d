"""Inside a scope a parameter is the same object and holds the full tensor; its gradient stays.

The user's object (``entry.held``) takes the full tensor. Another object (``entry.param``) takes the
shard and stays the leaf that autograd reaches:

    at rest     held is param: shard
    one scope   held: full tensor of the scope      param: shard
    two scopes  held: full tensor of the inner one  param: shard    the outer's waits in a layer

So the usual loops over ``model.parameters()`` clip, clear and freeze what the optimizer trains.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, NoReturn

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.utils.hooks import RemovableHandle

from fsdp_compose.base.attributes import get_grad, set_grad, set_requires_grad
from fsdp_compose.base.exchange import swap_contents
from fsdp_compose.base.interrupts import hold_interrupts
from fsdp_compose.base.torch_private import (
    call_raw,
    make_subclass,
    raw,
    read_version,
    swap_dtensor_slots,
)
from fsdp_compose.base.torch_stack import (
    is_asked_for_gradient,
    is_asked_for_node,
    is_called_by_parameter,
    is_in_call,
    is_stepping,
)
from fsdp_compose.buckets.bucket import Entry
from fsdp_compose.buckets.entries import entry_of, find_entry, give_slice
from fsdp_compose.sharded import EDGE, Handler, ShardedWeightError, part_of, refuse_export

_plain: Any = torch.Tensor
_node_get = _plain.grad_fn.__get__

if TYPE_CHECKING:
    _Base: Any = object  # a mixin: what it does not define, the parameter class beside it does
else:
    _Base = object


@dataclass(eq=False, repr=False)
class Layer:
    """A full tensor that a scope shows in the place of a parameter."""

    scope: object
    rebuild: Callable[[Entry, bool], torch.Tensor]
    """The full tensor again, connected to the shard or not, after ``requires_grad`` changed."""
    own_grad: bool = False  # ``.grad`` is the full tensor's; else the shard's
    is_renewed: bool = False  # it is the unit's own memory, which later forwards gather into
    returns_grad: bool = False  # that gradient takes the place of the shard's at the scope's end
    beneath: Any = None  # holds what the parameter held before: the shard, or an outer scope's
    kind: type = torch.Tensor  # of ``beneath`` before it took that
    is_outdated: bool = False  # it is from before a step: the parameter holds its shard meanwhile
    is_retrained: bool = False  # ``requires_grad`` changed in a scope inside this one


def give_gradient(entry: Entry, grad: torch.Tensor | None) -> None:
    """Set the shard's gradient to ``grad``, which is moved to the host if the shard lies there."""
    if isinstance(grad, torch.Tensor) and entry.param.device.type == "cpu":
        grad = grad.to(entry.param.device)
    entry.param.grad = grad


class _Whole(_Base):
    """How a parameter answers while its object holds a full tensor."""

    __slots__ = ()

    @property
    def __torch_function__(self) -> Any:
        """Torch's own, except that ``autograd.grad`` and ``backward`` are answered by the shard."""
        if is_asked_for_gradient():
            return partial(_ask, find_entry(self).spec.answers)
        return super().__torch_function__

    @property
    def grad(self) -> torch.Tensor | None:
        """The parameter's own gradient, sharded; in a scope ``with_grads`` the full one.

        torch.export asks for it too, before it keeps what soon holds a shard.
        """
        entry = find_entry(self)
        refuse_export(entry.spec)
        if entry.layers[-1].own_grad:
            return call_raw(get_grad, (), (self,))
        return entry.param.grad

    @grad.setter
    def grad(self, value: torch.Tensor | None) -> None:
        entry = find_entry(self)
        if entry.layers[-1].own_grad:
            call_raw(set_grad, (), (self, value))
        else:
            give_gradient(entry, value)

    @grad.deleter
    def grad(self) -> None:
        self.grad = None

    @property
    def requires_grad(self) -> bool:
        return find_entry(self).param.requires_grad

    @requires_grad.setter
    def requires_grad(self, value: bool) -> None:
        own: Any = self
        entry = entry_of(own)
        if entry is not None:
            set_trained(entry, bool(value))
        else:
            call_raw(set_requires_grad, (), (self, value))  # in ``nn.Parameter(p)``

    def requires_grad_(self, requires_grad: bool = True) -> Any:
        self.requires_grad = requires_grad
        return self

    def detach_(self) -> Any:
        return self.requires_grad_(False)

    @property
    def is_leaf(self) -> bool:
        return True

    @property
    def grad_dtype(self) -> Any:
        """As of a leaf. Compilers ask for it."""
        return find_entry(self).param.grad_dtype

    @property
    def retains_grad(self) -> bool:
        return False

    @property
    def grad_fn(self) -> Any:
        """The node that connects it to its shard; torch's functions over nodes are refused."""
        if is_asked_for_node():
            _refuse_node(self)
        return call_raw(_node_get, (), (self,))

    def view_as(self, other: torch.Tensor) -> torch.Tensor:
        if other is self and not is_in_call(sys._getframe()):
            _refuse_node(self)
        return call_raw(_plain.view_as, (), (self, other))

    def expand_as(self, other: torch.Tensor) -> torch.Tensor:
        if other is self and not is_in_call(sys._getframe()):
            _refuse_node(self)
        return call_raw(_plain.expand_as, (), (self, other))

    def retain_grad(self) -> None:
        """Do nothing, as on any leaf, whose gradient is kept anyway."""

    def register_hook(self, hook: Callable[[Any], Any]) -> RemovableHandle:
        """As outside the scope: run on the reduced, sharded gradient."""
        return find_entry(self).param.register_hook(hook)

    def register_post_accumulate_grad_hook(self, hook: Callable[[Any], None]) -> RemovableHandle:
        return find_entry(self).param.register_post_accumulate_grad_hook(hook)

    def detach(self) -> Any:
        """A plain tensor; of this class for ``nn.Parameter(p)``, which then sets ``_is_param``."""
        if is_called_by_parameter():
            return make_subclass(type(self), call_raw(_plain.detach, (), (self,)))
        return call_raw(_plain.detach, (), (self,))

    @property
    def _is_param(self) -> bool:
        return True

    @_is_param.setter
    def _is_param(self, value: bool) -> None:
        own: Any = self
        own.__class__ = nn.Parameter  # what ``nn.Parameter(p)`` makes is plain

    def __copy__(self) -> Any:
        return nn.Parameter(call_raw(torch.Tensor.detach, (), (self,)), self.requires_grad)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        """A plain parameter with a copy of the full tensor."""
        if id(self) not in memo:
            full = call_raw(torch.Tensor.detach, (), (self,)).clone()
            memo[id(self)] = nn.Parameter(full, self.requires_grad)
        return memo[id(self)]

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.__copy__().__reduce_ex__(protocol)


def _refuse_node(shown: Any) -> NoReturn:
    """Raise for the calls by which users find a leaf's node of the graph.

    Raises:
        ShardedWeightError: naming the parameter.
    """
    spec = find_entry(shown).spec
    raise ShardedWeightError(
        f"{spec.fqn!r} (unit {spec.unit!r}) is shown in full by gathered() or unshard(). There its "
        "node in the graph (get_gradient_edge(p), register_multi_grad_hook, p.view_as(p).grad_fn) "
        f"gets only this rank's own gradient. {EDGE}"
    )


def _ask(
    answers: Mapping[Any, Handler],
    func: Any,
    types: Any,
    args: tuple[Any, ...] = (),
    kwargs: Any = None,
) -> Any:
    """Answer ``autograd.grad`` and ``backward``, given the parameter, as its shard does."""
    if func in (torch.autograd.grad, torch.autograd.backward):
        return answers[func](func, args, kwargs or {})
    return NotImplemented


class WholeParameter(_Whole, nn.Parameter):  # type: ignore[override]
    """A parameter that holds its full tensor, in a scope."""

    def full_tensor(self) -> torch.Tensor:
        """As outside the scope, a detached copy of the whole; there is nothing to gather."""
        spec = find_entry(self).spec
        part = part_of(call_raw(_plain.detach, (), (self,))).clone()
        return spec.parallel.assemble(part) if spec.parallel and spec.reads_whole else part


class WholeDTensor(_Whole, DTensor):  # type: ignore[override]
    """As ``WholeParameter``, of a parameter that tensor parallelism split."""

    __slots__ = ()

    def detach(self) -> Any:
        """A DTensor; of this class for ``nn.Parameter(p)``, which then sets ``_is_param``."""
        plain: Any = DTensor.detach(self)
        if is_called_by_parameter():
            plain.__class__ = type(self)
        return plain

    @property
    def _is_param(self) -> bool:
        return True

    @_is_param.setter
    def _is_param(self, value: bool) -> None:
        own: Any = self
        own.__class__ = DTensor  # what ``nn.Parameter(p)`` makes is plain
        own._is_param = value


_classes: dict[type, type] = {nn.Parameter: WholeParameter, DTensor: WholeDTensor}


def _class_for(entry: Entry) -> type:
    """Find the class of the entry's parameter in a scope, which is also of its own class."""
    kind = DTensor if entry.spec.is_dtensor else entry.kind
    if kind not in _classes:
        _classes[kind] = type(kind.__name__, (_Whole, kind), {"__module__": kind.__module__})
    return _classes[kind]


def is_whole(tensor: object) -> bool:
    """Whether it is a parameter that holds its full tensor for a scope."""
    return isinstance(tensor, _Whole)


def leaf_of(tensor: Any) -> Any:
    """Return the shard of a parameter that a scope shows in full; anything else as it is."""
    return find_entry(tensor).param if isinstance(tensor, _Whole) else tensor


def holder_of(tensor: Any) -> Any:
    """Return what autograd gives a parameter's gradient: its shard; in ``with_grads`` itself."""
    if not isinstance(tensor, _Whole):
        return tensor
    entry = find_entry(tensor)
    return tensor if entry.layers[-1].own_grad else entry.param


def clipped_of(tensor: Any) -> Any:
    """Return what has the gradient to be clipped: the shard, or what writes its own back to it."""
    if not isinstance(tensor, _Whole):
        return tensor
    entry = find_entry(tensor)
    return tensor if entry.layers[-1].returns_grad else entry.param


def is_connected(tensor: Any) -> bool:
    """Whether it is a parameter shown in full, through which gradients reach its shard."""
    return isinstance(tensor, _Whole) and tensor.grad_fn is not None


def show(entry: Entry, full: Any, layer: Layer) -> None:
    """Let the parameter hold ``full`` until ``hide``; ``full`` then holds what it held.

    It must not be at rest, see ``end_rests``, except over an outdated tensor.
    """
    _wake(entry)
    held = entry.held
    before = type(held)
    layer.beneath, layer.kind = full, type(full)
    _exchange(held, full)
    if not entry.layers:
        full.__class__, full.__dict__ = before, held.__dict__
        give_slice(entry, full)
    entry.layers += (layer,)
    held.__class__ = _class_for(entry)


def as_parameter(full: torch.Tensor) -> nn.Parameter:
    """Make another parameter over a full tensor, which is not trained."""
    return nn.Parameter(call_raw(_plain.detach, (), (full,)), False)


def hide(entry: Entry, scope: object) -> torch.Tensor | None:
    """End what ``scope`` shows of the entry; return its full tensor, which the caller may free."""
    _wake(entry)
    place = next((i for i, layer in enumerate(entry.layers) if layer.scope is scope), None)
    if place is None:
        return None
    layer = entry.layers[place]
    entry.layers = entry.layers[:place] + entry.layers[place + 1 :]
    held = entry.held
    if place < len(entry.layers):  # an inner scope goes on: it keeps what lay beneath this one
        inner = entry.layers[place]
        full, inner.beneath = inner.beneath, layer.beneath
        inner.kind, layer.kind = layer.kind, inner.kind
    else:
        full = layer.beneath
        kind, before = type(full), type(held)
        _exchange(held, full)
        held.__class__ = kind if not entry.layers else before
    if not entry.layers:
        give_slice(entry, held)
        for name in ("dtype", "device"):
            held.__dict__.pop(name, None)
    if full.__dict__ is held.__dict__:
        full.__class__, full.__dict__ = layer.kind, {}
    if entry.layers and entry.layers[-1].is_outdated:
        rest(entry)
    elif entry.layers and entry.layers[-1].is_retrained:
        outer = entry.layers[-1]
        _exchange(held, outer.rebuild(entry, entry.param.requires_grad))
        outer.is_retrained = False
    hidden: torch.Tensor = full
    return hidden


def hide_all(entry: Entry) -> None:
    """End every scope's tensor, so that the parameter holds its shard, for ``undo``."""
    while entry.layers:
        hide(entry, entry.layers[-1].scope)


@hold_interrupts()
def set_trained(entry: Entry, value: bool) -> None:
    """Set ``requires_grad`` of the shard and of the full tensor that the scope shows."""
    if entry.param.requires_grad == value:
        return
    entry.param.requires_grad = value
    for outer in entry.layers[:-1]:
        outer.is_retrained = True
    _exchange(entry.held, entry.layers[-1].rebuild(entry, value))


@contextmanager
def at_rest(entries: Iterable[Entry]) -> Iterator[None]:
    """Open a scope in which parameters hold their shards, as they do outside all scopes.

    Those that are written in it, as by a step in a hook, hold them on: the full ones are outdated.
    """
    rested = [entry for entry in entries if rest(entry)]
    if not rested:
        yield
        return
    with raw():
        before = [read_version(entry.param) for entry in rested]
    try:
        yield
    finally:
        with raw():
            after = [read_version(entry.param) for entry in rested]
        for entry, then, now in zip(rested, before, after, strict=True):
            if then == now:
                _end_rest(entry)
            elif entry.layers:
                outdate(entry)


def rest(entry: Entry) -> bool:
    """Let the parameter hold its shard until ``end_rests``; False if it does already."""
    is_shown = bool(entry.layers) and entry.param is not entry.held
    if is_shown:
        _turn(entry)
    return is_shown


def end_rests(entries: Iterable[Entry]) -> None:
    """Let the parameters show their full tensors again."""
    for entry in entries:
        _end_rest(entry)


def end_failed_rests(entries: Iterable[Entry]) -> None:
    """Show full tensors again that an optimizer's step has hidden which ended with an error."""
    resting = [entry for entry in entries if entry.layers and entry.param is entry.held]
    if resting and not is_stepping():
        end_rests(resting)


def _end_rest(entry: Entry) -> None:
    """Show the full tensor again, if ``rest`` hid it and it is not outdated."""
    if entry.layers and not entry.layers[-1].is_outdated:
        _wake(entry)


def _wake(entry: Entry) -> None:
    """Show the full tensor again, whatever it is."""
    if entry.layers and entry.param is entry.held:
        _turn(entry)


@hold_interrupts()
def outdate(entry: Entry) -> None:
    """Let the parameter hold its shard, which was stepped, until its full tensor is renewed."""
    for layer in entry.layers:
        layer.is_outdated = True
    rest(entry)


@hold_interrupts()
def renew(entries: Iterable[Entry]) -> None:
    """Show full tensors again whose memory was gathered into."""
    for entry in entries:
        for layer in entry.layers:
            layer.is_outdated = layer.is_outdated and not layer.is_renewed
        _end_rest(entry)
        held = entry.held
        if is_whole(held) and entry.layers[-1].is_renewed:
            trained = entry.param.requires_grad  # which may have been set while it held its shard
            if trained != is_connected(held):
                _exchange(held, entry.layers[-1].rebuild(entry, trained))


@hold_interrupts()
def _turn(entry: Entry) -> None:
    """Exchange what the user's object and the innermost layer hold."""
    held, first = entry.held, entry.layers[0].beneath
    give_slice(entry, first if entry.param is held else held)
    kinds = type(held), type(first)
    _exchange(held, first)
    first.__class__, held.__class__ = kinds


def _exchange(first: Any, second: Any) -> None:
    """Exchange the tensors of two objects; their classes, attributes and references stay."""
    if isinstance(first, DTensor):
        swap_dtensor_slots(first, second)
    swap_contents(first, second)
