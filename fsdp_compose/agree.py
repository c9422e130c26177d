"""What the ranks must agree on before anything is sharded: errors, structure and values."""

from __future__ import annotations

from typing import Any

import torch

from fsdp_compose import comm
from fsdp_compose.collect import UnitPlan
from fsdp_compose.mesh import SELF, Group, MeshLike, resolve_mesh


def agree(plans: list[UnitPlan], mesh: MeshLike | None, problem: Exception | None) -> None:
    """Raise on every rank what any rank found wrong, and check that all start alike."""
    group = _group(plans, mesh)
    if group.size > 1:
        summary = [
            (plan.name, [(item.names[0], tuple(item.param.shape)) for item in plan.found])
            for plan in plans
        ]
        sums = _checksums(plans) if problem is None else {}
        reports = comm.gather_objects((describe(problem), summary, sums), group)
        for rank, (text, _, _) in enumerate(reports):
            if text is not None and problem is None:
                kind, message = text
                problem = _KINDS[kind](f"{message} (found on rank {group.ranks[rank]})")
        if problem is None:
            problem = _first_difference(reports, group.ranks)
    if problem is not None:
        raise problem


_KINDS: dict[str, type[Exception]] = {"TypeError": TypeError, "ValueError": ValueError}


def describe(problem: Exception | None) -> tuple[str, str] | None:
    return None if problem is None else (type(problem).__name__, str(problem))


def _group(plans: list[UnitPlan], mesh: MeshLike | None) -> Group:
    """All ranks that must agree; with two axes the larger group of the two is the best at hand."""
    for plan in plans:
        for bucket in plan.buckets:
            groups = bucket.mesh.groups
            return max(groups, key=lambda g: g.size) if groups else SELF
    try:
        resolved = resolve_mesh(mesh, torch.device("cpu"), False)
    except (TypeError, ValueError):
        resolved = None
    return SELF if resolved is None else resolved.shard


def _checksums(plans: list[UnitPlan]) -> dict[str, int]:
    """A number per parameter that differs where its values do, for ``init="verify"``."""
    sums: dict[str, int] = {}
    for plan in plans:
        if plan.options.init != "verify":
            continue
        for bucket in plan.buckets:
            for item in bucket.found:
                sums[f"{plan.name}:{item.names[0]}"] = checksum(item.param.detach())
    return sums


def checksum(tensor: torch.Tensor) -> int:
    """A 64-bit sum over the bytes of ``tensor``, weighted so that permutations differ."""
    data = tensor.contiguous().reshape(-1)
    raw_bytes = (torch.view_as_real(data).reshape(-1) if data.is_complex() else data).view(
        torch.uint8
    )
    words = raw_bytes[: raw_bytes.numel() // 8 * 8].view(torch.int64)
    tail = raw_bytes[raw_bytes.numel() // 8 * 8 :].to(torch.int64)
    total = int((words * _weights(words)).sum()) + int((tail * _weights(tail)).sum())
    return total % (1 << 64)


def _weights(values: torch.Tensor) -> torch.Tensor:
    return torch.arange(1, 2 * values.numel() + 1, 2, device=values.device)


def _first_difference(reports: list[Any], ranks: tuple[int, ...]) -> Exception | None:
    _, summary, sums = reports[0]
    for rank, (_, other_summary, other_sums) in zip(ranks[1:], reports[1:], strict=True):
        if other_summary != summary:
            return ValueError(
                f"fully_shard: rank {rank} shards other units or parameters than rank {ranks[0]}: "
                f"{_shorten(summary, other_summary)}. Build the same model on every rank."
            )
        for name, value in sums.items():
            if other_sums[name] != value:
                unit, parameter = name.split(":", 1)
                return ValueError(
                    f"fully_shard: parameter {parameter!r} of unit {unit!r} differs between rank "
                    f"{ranks[0]} and rank {rank}, so the shards would be cut from different "
                    "models. Seed every rank alike before building the model, load the same file, "
                    'or pass init="broadcast" to take rank 0\'s values.'
                )
    return None


def _shorten(summary: list[Any], other: list[Any]) -> str:
    for mine, theirs in zip(summary, other, strict=False):
        if mine != theirs:
            pairs = zip(mine[1], theirs[1], strict=False)
            different = next(((a, b) for a, b in pairs if a != b), (mine[0], theirs[0]))
            return f"found {different[1]}, wanted {different[0]}"
    return f"found {len(other)} units, wanted {len(summary)}"
