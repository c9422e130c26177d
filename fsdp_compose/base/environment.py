"""What is read of the environment; without torch, as the command line starts."""

from __future__ import annotations

import os

_OFF = ("", "0", "false", "no", "off")


def wants_debugging() -> bool:
    """Whether ``FSDP_COMPOSE_DEBUG`` turns debug mode on from the start."""
    return os.environ.get("FSDP_COMPOSE_DEBUG", "").lower() not in _OFF


def connects_late() -> bool:
    """Whether gloo connects two ranks when they first exchange something, and not all at once."""
    return os.environ.get("TORCH_GLOO_LAZY_INIT", "").lower() not in _OFF
