"""What a forward and its backward do with modules, recorded by hooks, as a survey's units do it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from torch import Tensor, nn

from fsdp_compose.base.order import Turn
from fsdp_compose.base.torch_private import graph_task_id
from fsdp_compose.base.torch_stack import on_backward_end
from fsdp_compose.base.tree import find_tensors
from fsdp_compose.report.survey import Survey


@dataclass
class Recording:
    """What a step did with modules that have parameters, which it holds by their ids.

    Attributes:
        calls: in forward, as they begin.
        turns: what backward reached, and whose forwards it ran again; None where one inside ended.
            Each comes with the number of the backward that it was in.
        tasks: backwards that have reached a module, the outermost first.
    """

    calls: list[int] = field(default_factory=list)
    turns: list[tuple[Turn, int | None, int]] = field(default_factory=list)
    tasks: list[int] = field(default_factory=list)

    @contextmanager
    def watch(self, module: nn.Module) -> Iterator[None]:
        """Record what runs inside."""
        known = [m for m in module.modules() if next(m.parameters(), None) is not None]
        handles = [m.register_forward_pre_hook(self._begin, prepend=True) for m in known]
        handles += [m.register_forward_hook(self._end) for m in known]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def _begin(self, module: nn.Module, args: Any) -> None:
        if graph_task_id() == -1:
            self.calls.append(id(module))
        else:
            self.turns.append(("forward", id(module), graph_task_id()))

    def _end(self, module: nn.Module, args: Any, output: Any) -> None:
        for tensor in find_tensors(output)[0]:
            if tensor.requires_grad:
                tensor.register_hook(partial(self._reach, id(module)))

    def _reach(self, module: int, grad: Tensor) -> None:
        task = graph_task_id()
        if task not in self.tasks:
            self.tasks.append(task)
            if len(self.tasks) > 1:
                on_backward_end(partial(self.turns.append, ("ended", None, task)))
        self.turns.append(("reached", module, task))


def follow(survey: Survey, recording: Recording) -> None:
    """Note in which order units run and backward reaches them, from what their modules did."""
    owners = {id(module): record for record in survey.records for module in record.modules}
    called: Counter[int] = Counter()
    for record in filter(None, map(owners.get, recording.calls)):
        if called[id(record)] % len(record.modules) == 0:
            survey.visits.append(record)
        called[id(record)] += 1
    of_units = {task for _, module, task in recording.turns if module in owners}
    for turn, module, task in recording.turns:
        found = None if module is None else owners.get(module)
        is_followed = task in of_units if turn == "ended" else found is not None
        if is_followed and survey.turns[-1:] != [(turn, found)]:
            survey.turns.append((turn, found))
    first: dict[int, int] = {}  # where each is reached first, by its id
    for place, (turn, found) in enumerate(survey.turns):
        if turn == "reached":
            first.setdefault(id(found), place)
    around = survey.around
    inner: dict[int, int] = {}  # where the first unit inside each is
    for key, place in first.items():
        outer = around.get(key)
        while outer is not None:
            inner[id(outer)] = min(place, inner.get(id(outer), place))
            outer = around.get(id(outer))
    for record in survey.records:
        if not record.routes:
            record.is_reached = id(record) in first
        if id(record) in first and id(record) in inner:
            record.passes_on = inner[id(record)] < first[id(record)]
