"""A gradient hook that a forward registers on a parameter of its own unit is an error.

Inside the forward the parameter is a gathered tensor: the hook would see this rank's gradient, not
the average, and be gone after the backward.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from fsdp_compose.base.torch_private import gradient_hooks
from fsdp_compose.core.state import Unit


def find_hooked(unit: Unit, shown: Sequence[torch.Tensor]) -> str | None:
    """After forward: the error text for hooks on what the unit's modules read."""
    if unit.opened is not None and unit.opened.for_call:
        return None  # a caller's own tensors may be among them
    for entry, tensor in zip(unit.entries, shown, strict=True):
        if any(map(_is_users, (gradient_hooks(tensor) or {}).values())):
            return (
                f"register_hook was called on parameter {entry.spec.fqn!r} inside the forward of "
                f"its unit {unit.name!r}, where it is a gathered tensor: the hook would see this "
                "rank's gradient in place of the average, and in this backward only. Register it "
                "on the parameter before the forward. For this rank's own gradient, hook "
                "p.clone() and compute with that."
            )
    return None


def _is_users(hook: object) -> bool:
    """Whether a hook is none of the library's, nor of torch's tools, which are for one backward."""
    return not getattr(hook, "__module__", "").startswith(("fsdp_compose.", "torch."))
