"""What the user switches between passes: when gradients are reduced, and when units are released.

All of these take effect at the next forward or backward. ``no_sync`` and ``accumulate`` restore
what they found, also when the body raises.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Literal, TypeAlias

from torch import nn

from fsdp_compose.base.arguments import check_flags, check_kind, check_number, describe_value
from fsdp_compose.buckets.gradients import discard_waiting
from fsdp_compose.core.guards.failed_steps import clear_failed_steps
from fsdp_compose.core.guards.microbatches import refuse_postponing
from fsdp_compose.core.guards.units import modules_of, require_units
from fsdp_compose.core.guards.unread_weights import default_of
from fsdp_compose.core.state import Unit
from fsdp_compose.scopes.unshard import reduce_units

Keep: TypeAlias = Literal["sharded", "unsharded", "no_all_reduce"]
KEEPS: tuple[Keep, ...] = ("sharded", "unsharded", "no_all_reduce")


def set_requires_gradient_sync(module: nn.Module, value: bool, recurse: bool = True) -> None:
    """Whether backward reduces gradients; if not, they add up unsharded until a backward that does.

    Args:
        module: a unit, or with ``recurse`` a module that contains units.
        value: True, the default state, or False.
        recurse: also set it for the units nested in ``module``.

    Raises:
        ValueError: there is no such unit.
        TypeError: ``value`` or ``recurse`` is no bool.

    Example:
        >>> model = fully_shard(nn.Linear(2, 2))
        >>> for last in (False, True):
        ...     set_requires_gradient_sync(model, last)
        ...     model(torch.ones(1, 2)).sum().backward()
        >>> model.bias.grad.full_tensor()
        tensor([2., 2.])
    """
    units = _find_units("set_requires_gradient_sync", module, value, recurse, postpones=True)
    clear_failed_steps(units)
    for unit in units:
        unit.switches.sync = value


def set_requires_all_reduce(module: nn.Module, value: bool, recurse: bool = True) -> None:
    """Whether a backward that reduces over the shard group goes on to the replicas.

    If not, gradients add up as shards, outside ``.grad``, until a backward that does. Without
    effect where there are no replicas. Arguments and errors as ``set_requires_gradient_sync``.

    Example:
        >>> model = fully_shard(nn.Linear(2, 2))
        >>> set_requires_all_reduce(model, False)  # before all microbatches but the last
    """
    units = _find_units("set_requires_all_reduce", module, value, recurse, postpones=True)
    clear_failed_steps(units)
    for unit in units:
        unit.switches.all_reduce = value


def set_is_last_backward(module: nn.Module, value: bool, recurse: bool = True) -> None:
    """Whether the next backward is a step's last; only then offloaded gradients cross to the host.

    Arguments and errors as ``set_requires_gradient_sync``.

    Example:
        >>> model = fully_shard(nn.Linear(2, 2))
        >>> set_is_last_backward(model, False)  # before all microbatches but the last
    """
    for unit in _find_units("set_is_last_backward", module, value, recurse, postpones=True):
        unit.switches.last_backward = value


def set_reshard_after_forward(module: nn.Module, value: bool, recurse: bool = True) -> None:
    """Whether full parameters are released between forward and backward.

    Arguments and errors as ``set_requires_gradient_sync``.

    Example:
        >>> model = fully_shard(nn.Linear(2, 2))
        >>> set_reshard_after_forward(model, False)  # backward needs no second gather
    """
    for unit in _find_units("set_reshard_after_forward", module, value, recurse):
        unit.switches.keep_after_forward = not value


def set_reshard_after_backward(module: nn.Module, value: bool, recurse: bool = True) -> None:
    """Whether full parameters are released after backward.

    If not, they stay gathered, over the next forward too, which gathers them again only when they
    were written. Arguments and errors as ``set_requires_gradient_sync``.

    Example:
        >>> model = fully_shard(nn.Linear(2, 2))
        >>> set_reshard_after_backward(model, False)  # nor does the next forward
    """
    for unit in _find_units("set_reshard_after_backward", module, value, recurse):
        unit.switches.reshard_after_backward = value


def set_unshard_in_backward(module: nn.Module, value: bool | None, recurse: bool = False) -> None:
    """Whether full parameters are gathered for backward, where they were released after forward.

    Say False where backward reads no parameter of the unit, as in an embedding, or a first layer
    whose input needs no gradient: that saves a gather. Each forward is looked at, and if it saved a
    parameter for its backward, the unit is gathered all the same, with a warning in the log. A unit
    that is a plain ``nn.Embedding`` is not gathered in backward unless this is True.

    Args:
        module: a unit of one module, or with ``recurse`` a module that contains units.
        value: True, False, or None for the default.
        recurse: also set it for the units nested in ``module``.

    Raises:
        ValueError: there is no such unit, or it is one of several modules.
        TypeError: ``value`` is neither a bool nor None, or ``recurse`` is no bool.

    Example:
        >>> first = nn.Linear(2, 2)  # of a model whose inputs need no gradients
        >>> set_unshard_in_backward(fully_shard(first), False)
    """
    if value is not None:
        wanted = "True, False, or None for what fully_shard chose"
        check_kind("set_unshard_in_backward", "value", value, bool, wanted)
    units = require_units(module, "set_unshard_in_backward", recurse)
    for unit in units:
        if value is False and len(unit.modules) > 1:
            raise ValueError(
                f"set_unshard_in_backward: unit {unit.name!r} is one of {len(unit.modules)} "
                "modules; wanted a unit of one, whose forward shows what its backward reads. Shard "
                "the modules separately."
            )
    for unit in units:
        chosen = default_of(modules_of(unit)) if value is None else value
        unit.switches.unshard_in_backward = chosen
        unit.expected.is_read = True  # until the next forward


def set_find_unused_parameters(module: nn.Module, value: bool, recurse: bool = True) -> None:
    """Whether ranks on an accelerator ask each other at every reduction what they used.

    A parameter that no rank used in a unit that ran keeps ``grad is None``; one that some ranks
    used counts as zero on the others. On a CPU this is known in every step. On an accelerator it
    is what the ranks found in the first step, and a step in which that is wrong is an error at the
    end of the next one. Say True where what ranks use changes from step to step: each reduction
    then has a small all-reduce before it, for which the host waits.

    Arguments and errors as ``set_requires_gradient_sync``.

    Example:
        >>> model = fully_shard(nn.Linear(2, 2))
        >>> set_find_unused_parameters(model, True)
    """
    for unit in _find_units("set_find_unused_parameters", module, value, recurse):
        unit.switches.find_unused = value


def set_gradient_divide_factor(
    module: nn.Module, value: float | None, recurse: bool = True
) -> None:
    """Divide summed gradients by ``value`` instead of the number of ranks; None restores that.

    For experts on a mesh of their own, beside dense parameters over more ranks: their gradients
    bring, through the all-to-all, the tokens of all of those ranks, so they are divided by that
    number too. A backward that reaches units over different numbers of ranks raises where this was
    not said. The number of the unit's own ranks says that the others repeat the same data::

        fully_shard(layer.experts, mesh=mesh["edp"])
        set_gradient_divide_factor(layer.experts, dist.get_world_size())
        fully_shard(model)

    Arguments and errors as ``set_requires_gradient_sync``. Ranks that divide by different numbers
    raise when they reduce gradients.

    Raises:
        ValueError: ``value`` is not a positive finite number.
        TypeError: it is no number.

    Example:
        >>> model = fully_shard(nn.Linear(2, 2))
        >>> set_gradient_divide_factor(model, 4)
        >>> model(torch.ones(1, 2)).sum().backward()
        >>> model.bias.grad.full_tensor()
        tensor([0.2500, 0.2500])
    """
    wanted = "a positive finite number, or None for the number of data-parallel ranks"
    if value is not None:
        check_number("set_gradient_divide_factor", "value", value, wanted)
        number = value if isinstance(value, int) else float(value)  # NumPy's would overflow
        if not 0 < number <= sys.float_info.max:
            raise ValueError(
                f"set_gradient_divide_factor: value is {describe_value(value)}; wanted {wanted}."
            )
    for unit in require_units(module, "set_gradient_divide_factor", recurse):
        unit.switches.divide_factor = None if value is None else float(value)


def _find_units(
    caller: str, module: nn.Module, value: bool, recurse: bool, postpones: bool = False
) -> list[Unit]:
    """The units whose switch ``caller`` sets; with ``postpones`` False is to add gradients up."""
    check_flags(caller, value=value)
    units = require_units(module, caller, recurse)
    if postpones and not value:
        refuse_postponing(units, f"{caller}(False)")
    return units


@contextmanager
def no_sync(module: nn.Module) -> Iterator[None]:
    """Inside, backward communicates no gradients: they add up unsharded, in the reduce dtype.

    The first backward after the scope that reaches a unit reduces the unit's with its own, or
    ``reduce_grads(module)`` does. Before that an optimizer step raises, and so does whatever else
    would read ``.grad``; ``zero_grad``, or None assigned to ``.grad``, drops them. A backward that
    fails after it has reached a unit drops them, with a warning, since its own gradients are among
    them; a forward that fails, or a backward that fails before that, as in the loss, leaves them.
    Memory: one flat gradient buffer per bucket.

    Raises:
        ValueError: ``module`` contains no unit.

    Example:
        >>> model = fully_shard(nn.Linear(2, 2))
        >>> with no_sync(model):
        ...     model(torch.ones(1, 2)).sum().backward()
        >>> model(torch.ones(1, 2)).sum().backward()  # reduces both
        >>> model.bias.grad.full_tensor()
        tensor([2., 2.])
    """
    units = require_units(module, "no_sync")
    refuse_postponing(units, "no_sync")
    clear_failed_steps(units)
    found = [unit.switches.sync for unit in units]
    try:
        for unit in units:
            unit.switches.sync = False
        yield
    finally:
        for unit, sync in zip(units, found, strict=True):
            unit.switches.sync = sync


@contextmanager
def accumulate(module: nn.Module, keep: Keep = "sharded") -> Iterator[None]:
    """Gradient accumulation as one scope: all backwards of a step inside, the step after it.

    On leaving, ``.grad`` holds the sum over the backwards, averaged over ranks. When the body
    raises, gradients that were not reduced are dropped; those already in ``.grad`` stay. What was
    to wait anyway, as inside ``no_sync``, waits on.

    Args:
        module: a unit or a module that contains units.
        keep: what microbatches leave behind. With ``k`` backwards, and per unit:

            ============== ================================= ==========================
            keep           collectives                       memory
            ============== ================================= ==========================
            sharded        k reduce-scatters, k all-reduces  the sharded gradients
            no_all_reduce  k reduce-scatters, 1 all-reduce   twice the sharded gradients
            unsharded      1 reduce-scatter, 1 all-reduce    plus full gradients
            ============== ================================= ==========================

            All-reduces are over replicas, where there are any. With ``"unsharded"`` nothing hides
            the reduction at the end; ``no_sync`` around all backwards but the last one does.

    Raises:
        ValueError: ``module`` contains no unit, or ``keep`` is none of the above.

    Example:
        >>> model = fully_shard(nn.Linear(2, 2))
        >>> with accumulate(model):
        ...     for x in torch.ones(4, 1, 2):
        ...         model(x).sum().backward()
        >>> model.bias.grad.full_tensor()
        tensor([4., 4.])
    """
    if keep not in KEEPS:
        raise ValueError(f"accumulate: keep is {keep!r}; wanted one of {KEEPS}.")
    units = require_units(module, "accumulate")
    if keep != "sharded":
        refuse_postponing(units, f"accumulate(keep={keep!r})")
    clear_failed_steps(units)
    found = [(unit.switches.sync, unit.switches.all_reduce) for unit in units]
    try:
        for unit in units:
            unit.switches.sync &= keep != "unsharded"
            unit.switches.all_reduce &= keep != "no_all_reduce"
        yield
    except BaseException:
        for bucket in [bucket for unit in units for bucket in unit.buckets]:
            discard_waiting(bucket)
        raise
    finally:
        for unit, (sync, all_reduce) in zip(units, found, strict=True):
            unit.switches.sync, unit.switches.all_reduce = sync, all_reduce
    reduce_units([unit for unit, flags in zip(units, found, strict=True) if all(flags)])
