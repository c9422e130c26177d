"""Walks the modules inside a module, without what is left out."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from torch import nn

from fsdp_compose.base.torch_private import child_slots


def walk_modules(
    module: nn.Module,
    skip: Callable[[nn.Module], bool],
    name: str = "",
    seen: set[int] | None = None,
) -> Iterator[tuple[str, nn.Module]]:
    """``module``, called ``name``, and those inside it by name; in registration order, each once.

    Args:
        skip: whether one inside is left out, with all that is in it.
        seen: ids of those that other walks had, to which this one's are added.
    """
    seen = set() if seen is None else seen
    pending = [(name, module)]
    while pending:
        path, current = pending.pop()
        if id(current) in seen or (current is not module and skip(current)):
            continue
        seen.add(id(current))
        yield path, current
        children = [
            (f"{path}.{key}" if path else key, child)
            for key, child in child_slots(current).items()
            if child is not None
        ]
        pending += reversed(children)
