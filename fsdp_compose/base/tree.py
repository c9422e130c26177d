"""Tensors inside whatever a module takes and returns, found and rebuilt through optree.

Beyond optree's own containers: dataclasses, mappings that subclass dict (the outputs of Hugging
Face models are both), subclasses of list and tuple, and, for finding only, sets, closures and the
attributes of plain objects, tensors and containers.
"""

from __future__ import annotations

import copy
import dataclasses
import functools
import gc
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Set, ValuesView
from operator import is_
from types import (
    BuiltinMethodType,
    CellType,
    FunctionType,
    MemberDescriptorType,
    MethodType,
    MethodWrapperType,
    ModuleType,
)
from typing import Any, NamedTuple

import optree
import torch

from fsdp_compose.base.process import here

_NAMESPACE = "fsdp_compose"
_EDITED = (list, dict, OrderedDict, defaultdict)  # what forwards may edit where they are given it
_ATOMS = (
    *(str, bytes, int, float, complex, bool, type(None)),
    *(torch.dtype, torch.device, type, ModuleType),
)


class Copied(NamedTuple):
    """A list or dictionary that was copied, as tensors in it were replaced.

    Attributes:
        depth: of the call that is given the copy.
        before: what the copy held at first.
    """

    depth: int
    given: Any
    copy: Any
    before: Any


def map_tensors(
    fn: Callable[[torch.Tensor], torch.Tensor],
    tree: Any,
    copied: list[Copied] | None = None,
    depth: int = 0,
) -> Any:
    """``tree`` with every tensor replaced by ``fn(tensor)``.

    A container in which that changes nothing is the same object: a forward may add to it. Lists and
    dictionaries that are others are noted in ``copied``.
    """
    if type(tree) is tuple and all(map(_is_bare, tree)):
        return tuple(map(fn, tree))
    if not isinstance(tree, torch.Tensor):
        _register_leaves(tree)
    found: list[tuple[Any, Any]] = []
    mapped = _map_parts(fn, tree, found)
    if copied is not None:
        copied += [Copied(depth, *pair, pair[1].copy()) for pair in found]
    return mapped


def give_back_edits(copied: list[Copied], depth: int) -> None:
    """Do to lists and dictionaries what a call has done to the copies that it was given."""
    while copied and copied[-1].depth >= depth:
        _, given, copy, before = copied.pop()
        is_list = type(given) is list
        pairs, known = (dict(enumerate(c) if is_list else c) for c in (copy, before))
        if [*pairs] == [*known] and all(map(is_, pairs.values(), known.values())):
            continue
        former = {id(known[key]): given[key] for key in known}
        changed = {key: former.get(id(value), value) for key, value in pairs.items()}
        given.clear()
        (given.extend if is_list else given.update)(changed.values() if is_list else changed)


def _map_parts(
    fn: Callable[[torch.Tensor], torch.Tensor], node: Any, found: list[tuple[Any, Any]]
) -> Any:
    if isinstance(node, torch.Tensor):
        return fn(node)
    if isinstance(node, _ATOMS):
        return node
    parts, spec = optree.tree_flatten(
        node, is_leaf=lambda part: part is not node, namespace=_NAMESPACE
    )
    if len(parts) == 1 and parts[0] is node:
        return node
    mapped = [_map_parts(fn, part, found) for part in parts]
    if all(map(is_, mapped, parts)):
        return node
    copy: Any = optree.tree_unflatten(spec, mapped)
    if type(node) in _EDITED:
        found.append((node, copy))
    return copy


def find_tensors(tree: Any) -> tuple[list[torch.Tensor], bool]:
    """Tensors in ``tree``, and whether something in it could not be looked into."""
    if _is_bare(tree):
        return [tree], False
    if type(tree) is tuple and all(map(_is_bare, tree)):
        return list(tree), False
    tensors: dict[int, torch.Tensor] = {}
    opaque = False
    seen: set[int] = set()
    pending = [tree]

    def look(node: Any) -> bool:
        attributes = getattr(node, "__dict__", None)
        if attributes and id(node) not in seen and _has_open_attributes(node):
            seen.add(id(node))
            pending.append(dict(attributes.items()))  # of a gathered weight the user's alone
        return False

    while pending:
        value = pending.pop()
        _register_leaves(value)
        for leaf in optree.tree_leaves(value, is_leaf=look, namespace=_NAMESPACE):
            if isinstance(leaf, torch.Tensor):
                tensors[id(leaf)] = leaf
            elif not isinstance(leaf, _ATOMS) and -id(leaf) not in seen:
                seen.add(-id(leaf))
                contents = _contents_of(leaf)
                opaque = opaque or contents is None
                pending += contents or ()
    return list(tensors.values()), opaque


def find_in_lists(values: Iterable[Any], kind: type) -> Iterator[Any]:
    """List what is a ``kind`` among ``values``, and in lists and tuples of them at any depth."""
    for value in values:
        if isinstance(value, kind):
            yield value
        elif isinstance(value, list | tuple):
            yield from find_in_lists(value, kind)


def _is_bare(value: Any) -> bool:
    """Whether it is a tensor to which nobody gave an attribute."""
    return isinstance(value, torch.Tensor) and not (type(value) in _PLAIN and vars(value))


_PLAIN = (torch.Tensor, torch.nn.Parameter)


def _has_open_attributes(value: Any) -> bool:
    """Whether tensors in the attributes count as part of the value."""
    if isinstance(value, torch.Tensor):
        return type(value) in _PLAIN
    return vars_of(value) and not isinstance(value, (torch.nn.Module, *_ATOMS))


def _contents_of(leaf: Any) -> list[Any] | None:
    """What an object that is no container of optree's holds besides attributes; None: unknown."""
    if isinstance(leaf, torch.nn.Module):
        return None
    if isinstance(leaf, FunctionType):
        return [*filter(None, map(_read_cell, leaf.__closure__ or ())), *(leaf.__defaults__ or ())]
    if isinstance(leaf, MethodType | BuiltinMethodType | MethodWrapperType):
        return [leaf.__self__, getattr(leaf, "__func__", None)]
    if isinstance(leaf, functools.partial):
        return [leaf.func, leaf.args, leaf.keywords]
    if isinstance(leaf, Set | ValuesView):
        return list(leaf)
    slots = [kind for kind in type(leaf).__mro__ if "__slots__" in vars(kind)]
    if slots or vars_of(leaf):
        members = [member for kind in slots for member in vars(kind).values()]
        members = [member for member in members if isinstance(member, MemberDescriptorType)]
        return [value for member in members for value in _read_member(member, leaf)]
    return None if gc.is_tracked(leaf) else []


def _read_cell(cell: CellType) -> tuple[Any, ...]:
    try:
        return (cell.cell_contents,)
    except ValueError:  # not assigned yet
        return ()


def _read_member(member: MemberDescriptorType, value: Any) -> tuple[Any, ...]:
    try:
        return (member.__get__(value),)
    except AttributeError:  # not assigned yet
        return ()


def _has_slot(value: Any, name: str) -> bool:
    """Whether a field lies in a slot, of the class or of one that it inherits from, and is set."""
    member = getattr(type(value), name, None)
    return isinstance(member, MemberDescriptorType) and bool(_read_member(member, value))


def _register_leaves(tree: Any) -> None:
    """Teach optree the dataclasses and subclasses of containers in ``tree``, outermost first."""
    fresh = True
    while fresh:
        fresh = False
        for leaf in optree.tree_leaves(tree, namespace=_NAMESPACE):
            kind = type(leaf)
            if kind in here.pytrees:
                continue
            if isinstance(leaf, dict):
                _register_mapping(kind)
            elif dataclasses.is_dataclass(kind):
                _register_dataclass(kind)
            elif isinstance(leaf, list | tuple):
                _register_sequence(kind)
            else:
                continue
            here.pytrees.add(kind)
            fresh = True


def _register_mapping(kind: type) -> None:
    def flatten(value: Mapping[Any, Any]) -> tuple[list[Any], Any]:
        return [value[key] for key in value], (value, tuple(value))

    def unflatten(context: Any, children: Any) -> Any:
        before, keys = context
        rebuilt = copy.copy(before)
        for key, child in zip(keys, children, strict=True):
            rebuilt[key] = child
        return rebuilt

    optree.register_pytree_node(kind, flatten, unflatten, namespace=_NAMESPACE)  # type: ignore[arg-type]


def _register_sequence(kind: type) -> None:
    def flatten(value: Any) -> tuple[list[Any], Any]:
        return _items_of(value), value

    def unflatten(before: Any, children: Any) -> Any:
        if isinstance(before, list):
            rebuilt = copy.copy(before)
            rebuilt[:] = list(children)
            return rebuilt
        made: Any = tuple.__new__(kind, children)
        if vars_of(before):
            vars(made).update(vars(before))
        return made

    optree.register_pytree_node(kind, flatten, unflatten, namespace=_NAMESPACE)


def _items_of(value: list[Any] | tuple[Any, ...]) -> list[Any]:
    """What it holds, whatever its class has made of ``len(value)`` and ``iter(value)``."""
    return [*(list if isinstance(value, list) else tuple).__iter__(value)]  # type: ignore[arg-type]


def _register_dataclass(kind: type) -> None:
    names = tuple(f.name for f in dataclasses.fields(kind))

    def flatten(value: Any) -> tuple[list[Any], Any]:
        own = vars(value) if vars_of(value) else {}
        present = tuple(name for name in names if name in own or _has_slot(value, name))
        return [getattr(value, name) for name in present], (value, present)

    def unflatten(context: Any, children: Any) -> Any:
        before, present = context
        rebuilt = copy.copy(before)
        for name, child in zip(present, children, strict=True):
            object.__setattr__(rebuilt, name, child)
        return rebuilt

    optree.register_pytree_node(kind, flatten, unflatten, namespace=_NAMESPACE)


def vars_of(value: Any) -> bool:
    """Whether the instance keeps its fields in a dictionary (it has no ``__slots__``)."""
    return isinstance(getattr(value, "__dict__", None), dict)
