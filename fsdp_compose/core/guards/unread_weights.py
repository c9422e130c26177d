"""A unit whose forward saved no weight for its backward stays released in backward.

An embedding's backward needs the indices alone, and that of a first layer its input. A unit that
is a plain ``nn.Embedding`` is looked at by itself, any other after ``set_unshard_in_backward``.
Each forward is looked at: the graph between its output and the unit's parameters is searched for
saved tensors that lie in the gathered memory. Where there is one, the unit is gathered as usual; so
it is where the graph does not show what is read, as where a part of the unit is checkpointed, or
where the forward made nodes that the output does not lead to: a result kept in a list may read.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Iterable, Iterator
from contextlib import suppress
from typing import Any

import torch
from torch import nn

from fsdp_compose.base.torch_private import made_at, next_node_number, saved_tensor_hooks
from fsdp_compose.base.torch_stack import hides_reads
from fsdp_compose.base.tree import find_tensors
from fsdp_compose.core.guards.gathered_memory import lies_in
from fsdp_compose.core.guards.weight_versions import read_versions
from fsdp_compose.core.records import Switches
from fsdp_compose.core.schedule import Backward
from fsdp_compose.core.state import Unit


def is_embedding(modules: Iterable[nn.Module]) -> bool:
    """Whether a unit of ``modules`` is one plain embedding, whose backward reads no weight."""
    return [type(module) for module in modules] == [nn.Embedding]


def default_of(modules: Iterable[nn.Module]) -> bool | None:
    """``Switches.unshard_in_backward`` where the caller has not set it."""
    return None if is_embedding(modules) else True


def note_unread(unit: Unit, module: nn.Module, output: Any) -> Backward:
    """After a forward whose backward may leave the unit released: ``"none"`` if it will.

    A unit that the caller keeps gathered is kept all the same.
    """
    nodes, live, graphs = list(unit.graphs.nodes), unit.run.live, unit.graphs
    if not nodes or live is None or not live.trained or not torch.is_grad_enabled():
        return "seen"
    node = nodes[-1]
    known = [ref for ref in graphs.unread if ref() is not None and ref() is not node]
    was_read = live.joined_at >= 0 and len(known) == len(graphs.unread)  # in an earlier call
    is_read = was_read or _is_kept(unit.switches) or _may_read(unit, module, node, output)
    graphs.unread = known if is_read else [*known, weakref.ref(node)]
    unit.expected.is_read = is_read
    return "seen" if is_read else "none"


def reads_weights(unit: Unit) -> bool:
    """Whether the backward of any of the unit's graphs may read its weights."""
    unread = {id(node) for ref in unit.graphs.unread if (node := ref()) is not None}
    standing = unit.links.standing
    if not unread or (standing is not None and standing.versions == read_versions(unit)):
        return True
    return any(id(node) not in unread for node in unit.graphs.nodes)


def _is_kept(switches: Switches) -> bool:
    """Whether the caller keeps the unit gathered from a forward on, or from a backward on."""
    stays = switches.keep_after_forward or switches.keep_over_microbatches
    return stays or not switches.reshard_after_backward


def _may_read(unit: Unit, module: nn.Module, node: Any, output: Any) -> bool:
    """Whether the backward from ``output`` to the unit's ``node`` may read a weight of the unit."""
    if unit.switches.unshard_in_backward is None and not is_embedding([module]):
        return True
    if saved_tensor_hooks() is not None:  # they have the saved tensors
        return True
    found = _find_saved(unit, output, node)
    is_asked = unit.switches.unshard_in_backward is False
    if found is not None and is_asked and "unread" not in unit.checks.warned:
        unit.checks.warned.add("unread")
        _logger.warning(_READ, unit.name, found)
    return found is not None


def _find_saved(unit: Unit, output: Any, last: Any) -> str | None:
    """What nodes between ``output`` and ``last`` read of the unit; None if they read nothing."""
    pending: list[Any] = [tensor.grad_fn for tensor in find_tensors(output)[0]]
    seen: set[Any] = {None, last}
    live, shown, end = unit.run.live, 0, next_node_number()
    start = made_at(last) + 1 if live is None or live.joined_at < 0 else live.joined_at
    while pending:
        node = pending.pop()
        if node in seen or made_at(node) < made_at(last):
            continue
        seen.add(node)
        shown += start <= made_at(node) < end
        if hides_reads(node):
            return f"may read parameters in {node.name()} (a checkpoint, a function or hooks)"
        for tensor in _list_saved(node):
            if any(lies_in(bucket, tensor) for bucket in unit.gathered):
                return f"reads its parameter {_name_at(unit, tensor.data_ptr())!r}"
        pending += [source for source, _ in node.next_functions]
    return None if shown == end - start else _BESIDE


def _list_saved(node: Any) -> Iterator[torch.Tensor]:
    """The tensors that an autograd node keeps for its backward, as far as torch shows them."""
    for name in dir(node):
        if name.startswith("_saved_") or name == "saved_tensors":
            with suppress(RuntimeError):  # one that was written since, which is no weight
                value = getattr(node, name)
                values = value if isinstance(value, tuple | list) else (value,)
                yield from (item for item in values if isinstance(item, torch.Tensor))


def _name_at(unit: Unit, pointer: int) -> str:
    """The parameter in whose gathered memory ``pointer`` lies."""
    starts = [alias.data_ptr() for alias in unit.links.aliases]
    before = [index for index, start in enumerate(starts) if start <= pointer]
    return unit.entries[max(before, key=starts.__getitem__)].spec.fqn


_logger = logging.getLogger("fsdp_compose")
_BESIDE = "may read parameters in what its forward computed beside its output"
_READ = (
    "set_unshard_in_backward(False): the backward of unit %r %s, so the unit "
    "is gathered in backward all the same. set_unshard_in_backward(module, None) stops asking."
)
