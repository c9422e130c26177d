"""``explain``: what of a sharded module is in memory at this moment, why, and what happens next."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import nn

from fsdp_compose.base.arguments import check_kind
from fsdp_compose.base.attributes import get_grad
from fsdp_compose.base.torch_private import raw
from fsdp_compose.base.tree import find_tensors
from fsdp_compose.base.wording import quote_names
from fsdp_compose.buckets.bucket import Bucket, Phase
from fsdp_compose.buckets.gather import stamp_of
from fsdp_compose.core.guards.moved_parameters import shard_of
from fsdp_compose.core.guards.units import require_units
from fsdp_compose.core.schedule import Hold
from fsdp_compose.core.state import Engine, Unit
from fsdp_compose.report.notes import odd_notes_on
from fsdp_compose.report.survey import Survey, survey_units
from fsdp_compose.report.text import fit_names, plain, plural, size, table, wrap_text
from fsdp_compose.sharded import part_of

_REASONS = {
    Hold.FORWARD: "its forward is running",
    Hold.BACKWARD: "its backward is running",
    Hold.KEPT: "kept for backward",
    Hold.PREFETCH: "gathered ahead of use",
    Hold.RETAINED: "a graph over its parameters was made in backward (create_graph)",
    Hold.USER: "unshard(module) was called and reshard(module) was not",
}


@dataclass(frozen=True)
class UnitState:
    """What a unit has in this rank's memory at this moment, in bytes.

    Attributes:
        phase: of its buckets: sharded, gathering or gathered; several where they differ.
        reasons: why it is gathered.
        gathered: full parameters in memory.
        shards: parameter shards.
        gradients: sharded gradients in ``.grad``.
        packed: full gradients that wait to be reduced.
        partial: gradients reduced over the shard group and not yet over the replicas.
        waiting: gradients of microbatches that are not in ``.grad`` yet.
        spread: parts of the parameters kept for backward.
        weight_copies: kept in the compute dtype beside the shards, for gathers to read.
        is_stale: it is gathered, and its shard has changed since.
    """

    name: str
    phase: str
    reasons: tuple[str, ...]
    gathered: int
    shards: int
    gradients: int
    packed: int
    partial: int
    waiting: int
    spread: int
    weight_copies: int
    is_stale: bool

    DERIVED: ClassVar = ("total",)

    @property
    def total(self) -> int:
        kept = self.shards + self.gradients + self.partial + self.waiting + self.weight_copies
        return kept + self.gathered + self.packed + self.spread


@dataclass(frozen=True)
class Explanation:
    """What ``explain`` found; ``print`` it, or take it as data with ``to_dict``.

    Attributes:
        units: parents first.
        optimizer: bytes of the state of the optimizer that was passed; None without one.
        other: bytes of buffers and of parameters in no unit, with their gradients.
        now: what is running and what is under way.
        next: what the next step will do about what is here, and what to call to prevent it.
        notes: what makes the module bigger than it need be; as in a plan.
    """

    module: str
    units: tuple[UnitState, ...]
    optimizer: int | None
    other: int
    now: tuple[str, ...]
    next: tuple[str, ...]
    notes: tuple[str, ...]

    DERIVED: ClassVar = ("total", "gathered")

    @property
    def total(self) -> int:
        """Everything in the report; activations are not in it."""
        return sum(unit.total for unit in self.units) + (self.optimizer or 0) + self.other

    @property
    def gathered(self) -> tuple[str, ...]:
        """Names of units that are gathered."""
        return tuple(unit.name for unit in self.units if unit.reasons)

    def to_dict(self) -> dict[str, Any]:
        """Numbers, strings, lists and dictionaries only."""
        return plain(self)

    def to_json(self) -> str:
        return json.dumps(self.to_dict(), indent=2)

    def __str__(self) -> str:
        return _render(self)


def explain(module: nn.Module, optimizer: torch.optim.Optimizer | None = None) -> Explanation:
    """Say what of ``module`` is in memory on this rank now, why, and what the next step will do.

    Call it anywhere, inside a forward or a hook too: nothing is changed, nothing communicates.

    Raises:
        ValueError: nothing in ``module`` is sharded.
        TypeError: an argument is of the wrong type.

    Example:
        >>> model = fully_shard(nn.Linear(3, 2))
        >>> explain(model).gathered  # no unit is gathered between steps
        ()
    """
    advice = "print(fsdp_compose.plan(module, world_size=...)) says what sharding it would cost."
    units = require_units(module, "explain", advice=advice)
    if optimizer is not None:
        wanted = "a torch.optim.Optimizer or None"
        check_kind("explain", "optimizer", optimizer, torch.optim.Optimizer, wanted)
    survey = survey_units(module, units)
    engines = dict.fromkeys(unit.engine for unit in units)
    return Explanation(
        module=type(module).__name__,
        units=tuple(_state_of(unit) for unit in units),
        optimizer=None if optimizer is None else _state_bytes(optimizer),
        other=_count_other(survey),
        now=tuple(text for engine in engines for text in _describe_now(engine)),
        next=tuple(_describe_next(units)),
        notes=odd_notes_on(survey),
    )


def _state_of(unit: Unit) -> UnitState:
    phases = list(dict.fromkeys(bucket.phase.name.lower() for bucket in unit.gathered))
    gathered = [b for b in unit.buckets if b.phase is not Phase.SHARDED and not b.in_place]
    return UnitState(
        name=unit.name,
        phase="+".join(phases) or "empty",
        reasons=tuple(_explain_hold(unit, why) for why in Hold if why in unit.holds),
        gathered=sum(b.full.untyped_storage().nbytes() for b in gathered),
        shards=sum(_nbytes(shard_of(b)) for b in unit.buckets),
        gradients=held_gradients(unit),
        packed=sum(b.grads.flat.untyped_storage().nbytes() for b in unit.buckets if b.grads),
        partial=sum(_nbytes(b.arriving.partial) for b in unit.buckets),
        waiting=sum(_waiting_bytes(b) for b in unit.buckets),
        spread=sum(_nbytes(b.inner.store) for b in unit.buckets if b.inner and b.spread),
        weight_copies=sum(_weight_copy_bytes(b) for b in unit.buckets),
        is_stale=any(_is_stale(unit, b) for b in unit.gathered),
    )


def _count_microbatches(units: Sequence[Unit]) -> Iterator[str]:
    """How far the step is whose microbatches are added up in one tree."""
    for unit in units:
        for bucket in unit.buckets:
            if bucket.arriving.sums.arrived and bucket.mesh.microbatches is not None:
                wanted = bucket.mesh.microbatches // bucket.mesh.size
                yield (
                    f"{bucket.arriving.sums.arrived} of {wanted} backwards of a step are summed "
                    f"(unit {unit.name!r} and others); the last one sets .grad, see deterministic="
                )
                return


def _waiting_bytes(bucket: Bucket) -> int:
    return sum(map(_nbytes, (bucket.arriving.waiting, *bucket.arriving.sums.nodes)))


def _weight_copy_bytes(bucket: Bucket) -> int:
    """What is kept for gathers to read in place of the shard."""
    kept = None if bucket.device_copy is None else bucket.device_copy.tensor
    if bucket.inner and not bucket.spread:
        kept = bucket.inner.store
    sent = None if bucket.views.sent is None else bucket.views.sent.lease.memory
    return _nbytes(kept) + _nbytes(sent)


def _explain_hold(unit: Unit, why: Hold) -> str:
    if why is Hold.KEPT and not unit.switches.reshard_after_backward:
        return "kept from backward on (set_reshard_after_backward)"
    return _REASONS[why]


def held_gradients(unit: Unit) -> int:
    """Bytes of the storages behind ``.grad``, each once: slices of a bucket share one."""
    with raw():
        grads = [get_grad(entry.param) for bucket in unit.buckets for entry in bucket.entries]
        return _storage_bytes([grad for grad in grads if grad is not None])


def _storage_bytes(tensors: Iterable[torch.Tensor]) -> int:
    storages = [tensor.untyped_storage() for tensor in tensors]
    return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())


def _nbytes(tensor: torch.Tensor | None) -> int:
    return 0 if tensor is None else tensor.numel() * tensor.element_size()


def _is_stale(unit: Unit, bucket: Bucket) -> bool:
    """Whether a forward now would gather again what is gathered."""
    if bucket.phase is not Phase.GATHERED or bucket.in_place or Hold.FORWARD in unit.holds:
        return False
    return bucket.fill.stamp is not None and bucket.fill.stamp != stamp_of(bucket)


def _state_bytes(optimizer: torch.optim.Optimizer) -> int:
    with raw():
        return _storage_bytes(map(part_of, find_tensors(list(optimizer.state.values()))[0]))


def _count_other(survey: Survey) -> int:
    outside = list(survey.outside.values())
    grads = [p.grad for p in outside if p.grad is not None]
    return survey.buffer_bytes + sum(t.nbytes for t in map(part_of, [*outside, *grads]))


def _describe_now(engine: Engine) -> Iterator[str]:
    if engine.schedule.active:
        yield "in forward: " + " > ".join(repr(unit.name) for unit in engine.schedule.active)
    alive = [task for task in engine.tasks.values() if task.alive]
    dead = len(engine.tasks) - len(alive)
    if alive:
        opened = [unit.name for task in alive for unit in task.units if Hold.BACKWARD in unit.holds]
        yield f"in backward: {', '.join(map(repr, dict.fromkeys(opened))) or 'no unit open'}"
    if dead:
        yield (
            f"{plural(dead, 'backward')} ended with an error; the next forward or backward clears "
            "what it left"
        )
    if engine.reductions:
        names = list(dict.fromkeys(reduction.unit.name for reduction in engine.reductions))
        yield f"being reduced: gradients of {', '.join(map(repr, names))}"
    if engine.landing:
        yield f"on its way to the host: {plural(len(engine.landing), 'gradient buffer')}"


def _describe_next(units: Sequence[Unit]) -> Iterator[str]:
    packed = [unit for unit in units if any(bucket.arriving.packed for bucket in unit.buckets)]
    action = (
        "the next backward with gradient sync adds to them and reduces them once"
        if any(not unit.switches.sync for unit in packed)
        else "reduced when this backward, or the next, ends"
    )
    rows = (
        (
            [u for u in units if Hold.USER in u.holds],
            "stay gathered until reshard(module): {}",
        ),
        (
            [u for u in units if Hold.RETAINED in u.holds],
            "stay gathered until the backward over their graph has run: {}",
        ),
        (
            [u for u in units if u.holds == {Hold.KEPT} and u.switches.reshard_after_backward],
            "stay gathered until backward, or the next forward: {}; if there is no backward to "
            "come, run forward under torch.no_grad(), or call reshard(module)",
        ),
        (
            [u for u in units if any(_is_stale(u, b) for b in u.gathered)],
            "gathered again in the next forward, their shards have changed: {}",
        ),
        (packed, f"full gradients wait to be reduced: {{}}; {action}"),
        (
            [u for u in units if any(b.arriving.partial is not None for b in u.buckets)],
            "gradients wait for the all-reduce over replicas: {}; the next backward with "
            "set_requires_all_reduce(module, True) completes them",
        ),
        (
            [u for u in units if any(b.arriving.waiting is not None for b in u.buckets)],
            "gradients of earlier microbatches are not in .grad: {}; the next backward with "
            "set_is_last_backward(module, True) brings them there",
        ),
        (
            [u for u in units if held_gradients(u)],
            "have gradients: {}; the next backward adds to them unless zero_grad() is called first",
        ),
    )
    for found, text in rows:
        if found:
            yield text.format(quote_names(unit.name for unit in found))
    yield from _count_microbatches(units)


_MORE = ("gathered", "packed", "partial", "waiting", "spread", "weight_copies")
_GLOSSARY = {
    "shards": "shards: what this rank keeps",
    "gathered": "gathered: whole weights",
    "gradients": "gradients: reduced, in .grad",
    "packed": "packed: full gradients that wait to be reduced",
    "partial": "partial: gradients that wait for the replicas",
    "waiting": "waiting: gradients of earlier microbatches",
    "spread": "spread: parts of weights kept for backward",
    "weight_copies": "weight copies: in the compute dtype, for gathers",
}


def _render(found: Explanation) -> str:
    """A line where everything is at rest; else the units that hold more than shards, and why."""
    optimizer = "" if found.optimizer is None else f", optimizer state {size(found.optimizer)}"
    shards, grads = (sum(getattr(u, n) for u in found.units) for n in ("shards", "gradients"))
    title = (
        f"{found.module} on this rank: {size(found.total)}: shards {size(shards)} in "
        f"{plural(len(found.units), 'unit')}, gradients {size(grads)}{optimizer}, buffers and "
        f"parameters of no unit {size(found.other)}."
    )
    busy = [u for u in found.units if u.reasons or any(getattr(u, c) for c in _MORE)]
    if not busy and not found.now:
        title += " Nothing is gathered, and nothing is under way."
    parts = [wrap_text(title, indent="")]
    if busy:
        shown = [c for c in _GLOSSARY if c == "shards" or any(getattr(u, c) for u in busy)]
        rows = [("unit", "phase", *(c.replace("_", " ") for c in shown))]
        rows += [(u.name, u.phase, *(size(getattr(u, c)) for c in shown)) for u in busy]
        glossary = wrap_text("; ".join(_GLOSSARY[c] for c in shown) + ".")
        parts.append(f"{table(fit_names(rows), left=(0, 1))}\n{glossary}")
    why = [f"{u.name!r}: {'; '.join(u.reasons)}" for u in found.units if u.reasons]
    for name, lines in (
        ("gathered because", why),
        ("now", found.now),
        ("next", found.next),
        ("why it is this big", found.notes),
    ):
        if lines:
            parts.append("\n".join([name, *(wrap_text(line, bullet="- ") for line in lines)]))
    return "\n\n".join(parts)
