"""A step over state that is cut otherwise than its parameter is refused before it writes anything.

State stays as it was when ``fully_shard``, ``undo`` or another choice of units changes parameters.
torch's optimizers would count the step, and some average the gradient into state of the old cut,
before a call that cannot be right is refused.
"""

from __future__ import annotations

from typing import Any
from weakref import WeakKeyDictionary

from torch import Tensor
from torch.optim import Optimizer

from fsdp_compose.base.attributes import get_grad
from fsdp_compose.base.loops import parameters_of
from fsdp_compose.base.process import here
from fsdp_compose.base.torch_private import raw
from fsdp_compose.sharded import ShardedTensor, ShardedWeightError, ShardSpec, is_sharded, spec_of

_known: WeakKeyDictionary[Optimizer, tuple[int, ...]] = WeakKeyDictionary()


def check_plain_steps(optimizer: Optimizer) -> None:
    """Call ``check_state`` for an optimizer over plain parameters: once, and after ``undo``."""
    units = [len(engine.units) for engine in here.engines.values()]
    seen = (here.retrained, len(optimizer.state), *units)
    if _known.get(optimizer) != seen and check_state(optimizer):
        _known[optimizer] = seen


def check_state(optimizer: Optimizer) -> bool:
    """Raise where a parameter to be stepped has state of another cut; False if others have.

    Raises:
        ShardedWeightError: naming it.
    """
    is_right = True
    for param in parameters_of(optimizer):
        with raw():
            is_stepped = get_grad(param) is not None
        spec = spec_of(param) if is_sharded(param) else None
        for name, value in optimizer.state.get(param, {}).items():
            how = _describe(value, spec)
            if how is not None and is_stepped:
                _refuse(optimizer, name, how, spec or value._shard_spec)
            is_right &= how is None
    return is_right


def _describe(value: Any, spec: ShardSpec | None) -> str | None:
    """How state is cut, if not as its parameter, which has ``spec`` or is plain."""
    if isinstance(value, ShardedTensor):
        if spec is None:
            return "cut over ranks, and the parameter is whole"
        if value._shard_spec.key != spec.key:
            return f"cut differently than the parameter: {value._shard_spec.held_unlike(spec)}"
    elif spec is None or spec.parallel is not None or spec.numel == 1:
        return None
    elif type(value) is Tensor and value.shape == spec.shape:
        return "whole, and the parameter is cut over ranks"
    return None


def _refuse(optimizer: Optimizer, name: str, how: str, spec: ShardSpec) -> None:
    kind = type(optimizer).__name__
    raise ShardedWeightError(
        f"{kind}.step(): the state {name!r} of parameter {spec.fqn!r} (unit {spec.unit!r}) is "
        f"{how}. An optimizer's state stays whole through fully_shard, cut through undo, and as it "
        "was cut when a model is sharded in another way. Nothing was written: take saved = "
        "fsdp_compose.optim_state_dict(model, optim, kind='full'), build a new optimizer over the "
        "model's parameters, and call fsdp_compose.load_optim_state_dict(model, new, saved)."
    )
