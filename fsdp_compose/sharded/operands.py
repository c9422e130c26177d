"""Plain operands of elementwise functions are cut as the sharded ones are, and equal on all ranks.

Each rank cuts its own part of a plain operand. Where ranks hold other tensors, a sum of the result
would be made of parts of each. So the result remembers what it was computed with, which ranks
compare before it is reduced; on an accelerator nothing is compared, as the host would wait.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from fsdp_compose.base.torch_private import beneath_transforms, is_opaque
from fsdp_compose.comm.small_reduce import compares, reduce_alike
from fsdp_compose.sharded import ops
from fsdp_compose.sharded.advice import INTO_SCOPE, advise_on_target
from fsdp_compose.sharded.cut import own_slice
from fsdp_compose.sharded.spec import ShardSpec, refuse
from fsdp_compose.sharded.tensor import is_sharded
from fsdp_compose.sharded.torchstate import view_local
from fsdp_compose.sharded.writes import crc_of

PLAIN_FORMATS = (None, torch.preserve_format, torch.contiguous_format)


def check_cut(func: Any, other: ShardSpec, spec: ShardSpec) -> None:
    """Raise ShardedWeightError unless another operand is cut as ``spec`` says."""
    if other.key != spec.key:
        how = (
            f"the other, {other.fqn!r}, is cut differently: {other.held_unlike(spec)} (two modules "
            "are cut alike where both are units of the same parameters, trained and frozen alike "
            "when they are sharded: copy with copy.deepcopy after fully_shard, and freeze then)"
        )
        refuse(func, spec, how)


def refuse_target(func: Any, target: Any, spec: ShardSpec) -> NoReturn:
    """Raise ShardedWeightError for a slice to be written into ``target``, which is whole."""
    if isinstance(target, nn.Parameter) and "full_tensor" in dir(target):
        refuse(func, spec, "it would write a slice into a whole parameter", INTO_SCOPE)
    refuse(func, spec, "it would write a slice into a plain tensor", advise_on_target())


def cut_operands(func: Any, args: Any, kwargs: Any, spec: ShardSpec) -> tuple[Any, Any]:
    """Cut every plain operand as ``spec`` says; refuse what could mean several things."""
    target = kwargs.get("out", args[0] if func in ops.IN_PLACE and args else None)
    if target is not None and not is_sharded(target):
        refuse_target(func, target, spec)
    if kwargs.get("memory_format") not in PLAIN_FORMATS:
        refuse(func, spec, "the slice has no memory format")
    cut = tuple(cut_operand(func, value, spec) for value in args)
    return cut, {k: cut_operand(func, value, spec) for k, value in kwargs.items()}


def cut_operand(func: Any, value: Any, spec: ShardSpec) -> Any:
    """A plain operand, cut as ``spec`` says."""
    if not isinstance(value, Tensor) or is_sharded(value):
        return value
    check_differentiable(func, value, spec)
    if value.ndim == 0:
        return value
    if is_opaque(value):
        refuse(func, spec, f"the other is a {type(value).__name__}, which cannot be cut")
    pairs = zip(reversed(value.shape), reversed(spec.seen), strict=False)
    if value.ndim > len(spec.seen) or any(n not in (1, m) for n, m in pairs):
        refuse(func, spec, f"the other has shape {tuple(value.shape)}")
    return value.reshape(1) if value.numel() == 1 else own_slice(value, spec)


def show_slices(args: Any, kwargs: Any) -> tuple[Any, Any]:
    """The arguments with plain slices for what saved-tensor hooks may be given.

    A hook reads the shape of what it is to store, and a sharded tensor says that of the whole.
    """
    shown = {k: v if k == "out" or not is_sharded(v) else view_local(v) for k, v in kwargs.items()}
    return tuple([view_local(v) if is_sharded(v) else v for v in args]), shown


def check_differentiable(func: Any, value: Tensor, spec: ShardSpec) -> None:
    """Raise ShardedWeightError for a plain operand whose gradient each rank would have in part."""
    if value.requires_grad and torch.is_grad_enabled() and func not in ops.COMPARING:
        refuse(func, spec, _DIFFERENTIATED)
    if beneath_transforms(value) is not value:
        refuse(func, spec, _TRANSFORMED, _BY_SCOPE)


_TRANSFORMED = "the other operand is what a transform of torch.func (vmap, grad, jvp) computes with"
_BY_SCOPE = (
    "Call the transform inside `with fsdp_compose.gathered(model):`, where parameters are whole."
)
_DIFFERENTIATED = (
    "the other operand requires grad (where no gradient is wanted, detach() it or compute under "
    "torch.no_grad())"
)


def with_partners(
    func: Any, spec: ShardSpec, plain: Sequence[Tensor], partners: tuple[Tensor, ...]
) -> ShardSpec:
    """The spec of a result, which remembers the plain operands that it was computed with.

    What a parameter, gradient or state is written with in place is not remembered, nor what it is
    compared with, nor outside of losses the numbers of an optimizer. The caller asks where the
    result is part of a graph, or made of a parameter: what is kept of gradients over steps, such as
    a running mean, would hold the tensors of all steps.

    Args:
        plain: operands of this function.
        partners: of its sharded operands but the first, whose spec this is.
    """
    if func in ops.IN_PLACE or func in ops.COMPARING:
        return spec
    least = 0 if torch.is_grad_enabled() else 1
    found = [x for x in plain if x.ndim >= least and not isinstance(x, DTensor)]
    known = {id(x): x for x in (*spec.partners, *partners, *found)}
    if len(known) == len(spec.partners):
        return spec
    return replace(spec, partners=tuple(known.values()))


def compare_partners(specs: Sequence[ShardSpec]) -> None:
    """Have the ranks that reduce tensors of ``specs`` compare what these were computed with.

    Raises:
        RuntimeError: on every rank, if they differ.
    """
    for spec in sorted(specs, key=lambda s: (s.unit, s.fqn)):
        probe = torch.zeros(1, dtype=torch.int64, device=spec.partners[0].device)
        groups = [g for g in (*spec.groups, spec.replicas) if g.size > 1 and compares(probe, g)]
        if not groups:
            continue
        found = ", ".join(f"{tuple(x.shape)} (checksum {crc_of(x):08x})" for x in spec.partners)
        what = f"reduce {spec.fqn!r} after it was computed with plain tensors of shape {found}"
        for group in groups:
            reduce_alike(probe, group, "max", what, _OWN)


_OWN = (
    "Each rank has only a part of the parameter, and would take that part of its own tensor. Where "
    "the tensor is each rank's own, as a batch is, compute the loss inside `with "
    "fsdp_compose.gathered(model):` instead; otherwise make sure that it is the same on every rank."
)
