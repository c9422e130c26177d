"""Gradients that could not be cleared after a forward was interrupted are an error, and not kept.

A KeyboardInterrupt runs no hook of the modules that it leaves. They hold gathered tensors until the
next forward begins, so ``zero_grad`` of a module does not reach its parameters meanwhile.
"""

from __future__ import annotations

from fsdp_compose.base.attributes import get_grad
from fsdp_compose.base.torch_private import raw
from fsdp_compose.core.state import Engine


def find_uncleared(engine: Engine) -> str | None:
    """The error text where parameters that modules did not hold have gradients; said once."""
    shown = [entry for unit in engine.units if unit.run.showing for entry in unit.entries]
    with raw():
        kept = next((entry for entry in shown if get_grad(entry.param) is not None), None)
    if kept is None:
        return None
    return (
        "the forward before this one was interrupted (KeyboardInterrupt or the like), and "
        f"parameter {kept.spec.fqn!r} of unit {kept.spec.unit!r}, perhaps among others, has a "
        "gradient from before that. Until now model.zero_grad() and clipping did not reach it. "
        "Call model.zero_grad() now, and begin the step again; or call the forward again to go on "
        "with these gradients."
    )
