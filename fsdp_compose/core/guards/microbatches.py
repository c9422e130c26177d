"""What cannot be added up in one tree over the microbatches of a step (``deterministic=``)."""

from __future__ import annotations

from collections.abc import Iterable

from fsdp_compose.core.state import Unit


def refuse_early_gradients(unit: Unit) -> None:
    """Raise where gradients of the unit are to be reduced outside of the tree.

    Raises:
        RuntimeError: naming what asks for it.
    """
    for bucket in unit.buckets:
        if bucket.mesh.microbatches is not None:
            raise RuntimeError(
                f"unit {unit.name!r} was sharded with deterministic="
                f"{bucket.mesh.microbatches}, whose gradients are complete when the last "
                "microbatch of a step has arrived; found autograd.grad over its parameters, or "
                "backward(create_graph=True), which take them before. Call loss.backward(), or "
                "shard without deterministic=. A penalty on gradients of inputs works: "
                "autograd.grad(loss, inputs, create_graph=True)."
            )


def refuse_postponing(units: Iterable[Unit], what: str) -> None:
    """Raise where microbatches are to be added up otherwise than in the tree.

    Raises:
        ValueError: naming ``what`` asks for it.
    """
    for unit in units:
        for bucket in unit.buckets:
            if bucket.mesh.microbatches is not None:
                raise ValueError(
                    f"{what}: unit {unit.name!r} was sharded with deterministic="
                    f"{bucket.mesh.microbatches}, which reduces each microbatch and adds them up "
                    "in its own order. Leave the call out: .grad is set once, by the step's last "
                    "backward. Or shard without deterministic=."
                )
