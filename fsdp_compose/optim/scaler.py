"""Loss scaling whose ranks agree on whether a step overflowed."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import chain
from typing import Any

import torch

from fsdp_compose.base.group import Group
from fsdp_compose.base.loops import parameters_of
from fsdp_compose.base.mesh import Ranks, check_ranks, group_over
from fsdp_compose.base.torch_private import raw
from fsdp_compose.buckets.entries import find_entry
from fsdp_compose.comm import collectives as comm
from fsdp_compose.comm.heads import meet_alone
from fsdp_compose.core.guards.scope_parameters import leaf_of
from fsdp_compose.core.state import owner_of
from fsdp_compose.optim.gradients import (
    describe_parameter,
    groups_of_several,
    list_mirrors,
    refuse_waiting,
)
from fsdp_compose.optim.mirror import leaves_of, share_gradients
from fsdp_compose.sharded import is_sharded_parameter, spec_of


class GradScaler(torch.amp.GradScaler):
    """``torch.amp.GradScaler`` for sharded parameters, on the CPU as on other devices.

    An infinity or NaN that any rank finds in its slices makes every rank of the optimizer's groups
    skip the step and lower the scale. torch's own scaler agrees within the shard group of each
    list of gradients it looks at; this one also agrees between parameters of different groups,
    between replicas, and with plain parameters, with one small all-reduce per group. Gradients in
    fp16 are unscaled too, as by FSDP1's ``ShardedGradScaler``.

    Args:
        *args: as for ``torch.amp.GradScaler``.
        pipeline_mesh: the ranks that hold the other stages of a pipeline, a DeviceMesh of one
            dimension or a process group: all stages skip a step that one of them cannot use. Each
            stage then gives the scaler as many optimizers, in the same order.
        **kwargs: as for ``torch.amp.GradScaler``.

    Raises:
        TypeError: ``pipeline_mesh`` is neither a DeviceMesh nor a process group.
        RuntimeError: ``unscale_`` or ``step`` while gradients wait to be reduced.

    Example:
        >>> model = fully_shard(nn.Linear(2, 2))
        >>> optim = torch.optim.SGD(model.parameters(), lr=0.1)
        >>> scaler = GradScaler("cpu")
        >>> scaler.scale(model(torch.ones(1, 2)).sum()).backward()
        >>> scaler.step(optim)
        >>> scaler.update()
    """

    def __init__(self, *args: Any, pipeline_mesh: Ranks | None = None, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        whose = "the stages' ranks, such as mesh['pp']"
        check_ranks("GradScaler", "pipeline_mesh", pipeline_mesh, whose)
        self._pipeline_mesh = pipeline_mesh

    def _unscale_grads_(
        self,
        optimizer: torch.optim.Optimizer,
        inv_scale: torch.Tensor,
        found_inf: torch.Tensor,
        allow_fp16: bool,
    ) -> dict[torch.device, torch.Tensor]:
        sharded = _list_sharded(optimizer)
        refuse_waiting(sharded, "GradScaler")
        share_gradients(list_mirrors(sharded))  # else its step does so afterwards
        if _is_needed_on_host(found_inf, optimizer):  # torch's copies there do not wait to arrive
            inv_scale, found_inf = inv_scale.cpu(), found_inf.cpu()
        with raw():  # on plain slices: the ranks agree on overflow once, below
            found = super()._unscale_grads_(optimizer, inv_scale, found_inf, True)
        groups = _find_groups(optimizer)
        device = next(iter(found), None)
        if self._pipeline_mesh is not None:  # the last one, for what each stage has found
            home = next(iter(groups.values()), device or torch.device("cpu"))
            groups[group_over(self._pipeline_mesh, home)] = home
        for group, home in groups.items():
            flags = [flag.to(home) for flag in found.values()]
            shared = torch.stack(flags).amax(0) if flags else torch.zeros(1, device=home)
            meet_alone(group, "find overflows in GradScaler")
            comm.all_reduce(shared, group, "max")
            for flag in found.values():
                flag.copy_(shared)
            if device is None:
                found[home] = shared
        return found


def bring_scale(optimizer: torch.optim.Optimizer) -> None:
    """Before a fused step, which unscales by itself: move the scale to offloaded gradients.

    torch's own copies to the host do not wait to arrive.
    """
    found_inf = getattr(optimizer, "found_inf", None)
    if found_inf is None or not _is_needed_on_host(found_inf, optimizer):
        return
    for name in ("found_inf", "grad_scale"):
        value = getattr(optimizer, name, None)
        if value is not None:
            setattr(optimizer, name, value.cpu())


def _is_needed_on_host(found_inf: torch.Tensor, optimizer: torch.optim.Optimizer) -> bool:
    """Whether it is on a device, and some gradient is not."""
    if found_inf.device.type == "cpu":
        return False
    params = parameters_of(optimizer)
    grads = (param.grad for param in params)
    return any(grad is not None and grad.device.type == "cpu" for grad in grads)


def _find_groups(optimizer: torch.optim.Optimizer) -> dict[Group, torch.device]:
    """Groups of the optimizer's parameters and their device, small ones first.

    What a small group found must reach the large one that contains it, in the same order on every
    rank, whatever the order in which the optimizer lists parameters.
    """
    sharded = _list_sharded(optimizer)
    groups = _groups_of(sharded)
    if len(groups) > 1:
        groups = _groups_of(sorted(sharded, key=lambda param: describe_parameter(spec_of(param))))
    return dict(sorted(groups.items(), key=lambda item: item[0].size))


def _list_sharded(optimizer: torch.optim.Optimizer) -> list[Any]:
    """The sharded parameters of an optimizer, or those that its plain ones are over."""
    given = parameters_of(optimizer)
    leaves = chain.from_iterable(map(leaves_of, map(leaf_of, given)))
    return list(filter(is_sharded_parameter, leaves))


def _groups_of(params: Iterable[Any]) -> dict[Group, torch.device]:
    """Groups of more than one rank and their device, as the parameters come."""
    groups: dict[Group, torch.device] = {}
    for param in params:
        mesh = owner_of(find_entry(param)).mesh
        for group in groups_of_several((*mesh.groups, *spec_of(param).whole_groups)):
            groups.setdefault(group, mesh.device)
    return groups
