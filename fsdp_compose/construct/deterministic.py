"""What a model must be for the same bits at any number of ranks (``deterministic=``)."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import nn

from fsdp_compose.base.policy import MixedPrecision
from fsdp_compose.construct.plans import ParameterPlan, UnitPlan
from fsdp_compose.core.state import iter_units


def check_weights(
    plan: UnitPlan, groups: Iterable[tuple[torch.dtype, bool, MixedPrecision]]
) -> None:
    """Raise where weights travel, or are stepped, in a form that depends on how they are cut.

    Torch adds a multiple of a 16-bit tensor on a CPU with another rounding at its end than before.

    Args:
        groups: dtype, whether it is trained, and precision.

    Raises:
        ValueError: naming the unit.
    """
    groups = list(groups)
    for dtype, is_trained, _ in groups:
        if is_trained and dtype in (torch.bfloat16, torch.float16):
            raise ValueError(
                f"fully_shard: unit {plan.name!r} trains parameters stored in {dtype}, "
                "whose updates round by where a slice ends; "
                f"deterministic={plan.options.deterministic} wants the same at every number of "
                "ranks. Keep parameters in float32 and compute in "
                "MixedPrecision(param_dtype=torch.bfloat16), or leave deterministic= out."
            )
    if any(chosen.gather_codec is not None for _, _, chosen in groups):
        raise ValueError(
            f"fully_shard: unit {plan.name!r} has a gather_codec, which encodes what each rank "
            f"holds, so that weights would depend on the number of ranks; deterministic="
            f"{plan.options.deterministic} wants the same at every number. Leave "
            "MixedPrecision(gather_codec=) out, or deterministic=."
        )


def refuse_tensor_parallel(plan: UnitPlan, item: ParameterPlan) -> None:
    """Raise where another split of a parameter decides how its gradient is added up.

    Raises:
        ValueError: naming the parameter.
    """
    if plan.options.deterministic is not None:
        raise ValueError(
            f"fully_shard: parameter {plan.full_name(item.names[0])!r} of unit {plan.name!r} is "
            "split by tensor parallelism, whose sums over ranks have an order of their own; "
            f"deterministic={plan.options.deterministic} adds up over data-parallel ranks alone. "
            "Leave tensor parallelism out, or deterministic=."
        )


def check_alike(modules: Sequence[nn.Module], plans: Sequence[UnitPlan]) -> None:
    """Raise unless all units, those sharded before too, add up the same microbatches.

    Raises:
        ValueError: naming two units that differ.
    """
    found = {
        (plan.options.deterministic, bucket.mesh.size): plan.name
        for plan in plans
        for bucket in plan.buckets
    }
    for module in modules:
        for unit in iter_units(module):
            for bucket in unit.buckets:
                found.setdefault((unit.options.deterministic, bucket.mesh.size), unit.name)
    if len(found) < 2 or all(count is None for count, _ in found):
        return
    (count, ranks), (other, fewer) = list(found)[:2]
    first, second = list(found.values())[:2]
    raise ValueError(
        f"fully_shard: unit {first!r} has deterministic={count} on {ranks} ranks, and unit "
        f"{second!r} deterministic={other} on {fewer}; wanted the same of both, so that each "
        "microbatch has one place in a step. Pass the same deterministic= and a mesh of the same "
        "ranks to every call of fully_shard."
    )
