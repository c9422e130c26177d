"""Forwards under a mode that records operators, or fakes their results, are refused."""

from __future__ import annotations

from fsdp_compose.base.torch_stack import recording_mode
from fsdp_compose.core.state import Unit


def check_modes(unit: Unit) -> None:
    """Raise where the unit would be gathered under a mode that records operators, or fakes them.

    Raises:
        RuntimeError: naming the mode.
    """
    if mode := recording_mode():
        raise RuntimeError(
            f"unit {unit.name!r}: forward was called under {mode}, which records or fakes "
            "operators: nothing is gathered there, and what it kept of weights would be "
            "released memory. fsdp_compose.plan(model, sample=...) counts memory and "
            "communication. To record operators use a plain model: one that loads "
            "fsdp_compose.state_dict(model, kind='full'), or "
            "fsdp_compose.undo(copy.deepcopy(model)), called on every rank."
        )
