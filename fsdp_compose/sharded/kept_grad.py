"""A parameter's gradient, kept where reading it costs little.

Torch takes five times as long to give out ``.grad`` of a class with ``__torch_function__``. So what
was read is kept in the parameter's dictionary for as long as torch's own ``.grad`` is that object:
the setter and ``replace_grad`` forget it, and so does a hook where autograd accumulates a gradient
itself, since under ``create_graph`` it puts another in its place. Nothing is kept where there is no
gradient, so what sets the first one (the engine, at every step) has nothing to forget.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from fsdp_compose.base.attributes import set_grad
from fsdp_compose.base.torch_private import leaf_hooks, raw, set_leaf_hooks

KEPT = "_kept_grad"
"""The attribute; it is there, with or without a gradient, once autograd was told to call back."""


def keep_grad(param: Tensor, grad: Tensor) -> None:
    """Keep ``grad``, which torch has just given out as that of a sharded parameter.

    Not where autograd calls hooks of the parameter, whose table has no room for another.
    """
    own = param.__dict__
    if KEPT not in own:
        with raw():
            if leaf_hooks(param) != (None, None):
                return
            set_leaf_hooks(param, None, {0: forget_grad})
    own[KEPT] = grad


def forget_grad(param: Any) -> None:
    """Have the parameter's gradient read from torch again."""
    if KEPT in param.__dict__:
        param.__dict__[KEPT] = None


def replace_grad(param: Tensor, grad: Tensor | None) -> None:
    """Set torch's own ``.grad`` where there may be one already; to be used under ``raw``."""
    forget_grad(param)
    spec = param.__dict__.get("_shard_spec")  # none where it is being sharded
    if spec is not None:
        spec.residence.is_mirrored = False
    set_grad(param, grad)


def stop_keeping(param: Any) -> None:
    """Keep no gradient of the parameter any more, and give back its table of hooks."""
    if KEPT in param.__dict__:
        del param.__dict__[KEPT]
        with raw():
            set_leaf_hooks(param, None, None)
