"""A script or a module, run in this process as ``python`` and ``python -m`` run it."""

from __future__ import annotations

import os
import runpy
import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path


def as_main(script: str, args: Sequence[str], is_module: bool) -> Callable[[], object]:
    """Set ``sys.argv`` and the path for ``script``, and return what runs it.

    Args:
        script: a path; with ``is_module`` the name of a module, looked for in this folder first.
        args: what it finds behind its name in ``sys.argv``.
    """
    sys.argv = [script, *args]
    if is_module:
        sys.path.insert(0, os.getcwd())
        return partial(runpy.run_module, script, run_name="__main__")
    sys.path.insert(0, str(Path(script).resolve().parent))
    return partial(runpy.run_path, script, run_name="__main__")
