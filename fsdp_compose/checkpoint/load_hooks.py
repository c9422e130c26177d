"""Values read from files reach a module's own load hooks as slices, or whole where these want it.

A hook that renames, drops or scales needs no more than slices; one that turns a weight needs all of
it, and what lies in its module is read once more.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch import nn

from fsdp_compose.base.torch_private import IncompatibleKeys
from fsdp_compose.checkpoint.contents import CHECKPOINTED, Contents, changes_what_it_loads
from fsdp_compose.checkpoint.model import write

_WANTS_WHOLE = "needs the whole of"
"""What a ``ShardedWeightError`` says, also where torch has put it into an error of its own."""

Read = Callable[[frozenset[str]], tuple[Mapping[str, Any], Mapping[str, Any]]]


def write_from_files(
    contents: Contents, read: Read, left_out: IncompatibleKeys, strict: bool, versions: Any = None
) -> IncompatibleKeys:
    """Write what ``read`` gives; where a load hook needs whole tensors, read and write once more.

    Args:
        read: takes the names whose values are to be whole, and gives values by name, and entries
            that the module has no place for. The other arguments are those of ``write``.
    """
    try:
        return write(contents, *read(frozenset()), left_out, strict, versions)
    except RuntimeError as error:
        if _WANTS_WHOLE not in str(error):
            raise
    return write(contents, *read(_names_in_hooked(contents)), left_out, strict, versions)


def _names_in_hooked(contents: Contents) -> frozenset[str]:
    """The names of the values in modules that have load hooks of their own."""
    module = contents.module
    if type(module).load_state_dict is not nn.Module.load_state_dict:
        return frozenset(contents.values)
    inside = module.named_modules(remove_duplicate=False)
    paths = [path for path, inner in inside if changes_what_it_loads(inner)]
    starts = tuple(f"{path}.".replace(CHECKPOINTED, "") if path else "" for path in paths)
    return frozenset(name for name, key in contents.native.items() if key.startswith(starts))
