"""What the command line tells its user without a traceback."""

from __future__ import annotations


class UserError(Exception):
    """The command cannot do what was asked; the message says why, and what to do."""
