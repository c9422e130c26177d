"""What to change so that a plan needs less: tried, with what it saves and the line to paste."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from fsdp_compose.base.policy import MixedPrecision, Offload, ShardingStrategy
from fsdp_compose.base.wording import quote_names
from fsdp_compose.construct.wrap import Policy, by_class, by_name, by_size
from fsdp_compose.report.notes import find_used_far_apart
from fsdp_compose.report.survey import Survey
from fsdp_compose.report.text import plural, size

SMALL_GATHER = 1 << 20
"""Bytes below which a gather's start, some tens of microseconds, costs more than what it moves."""
MANY = 8  # how many small units are worth a line
WORTH = 0.01  # of what is needed, or moved, before a saving is worth a line


@dataclass(frozen=True)
class Trial:
    """What a plan comes to: bytes at the peak with activations, bytes and collectives of a step."""

    needed: int
    moved: int
    collectives: int


@dataclass(frozen=True)
class Advice:
    """A change that was planned too, and what it saves on each rank.

    Attributes:
        text: what to do, and why.
        saved_bytes: of memory at the peak; less than 0 where it takes more.
        saved_traffic: bytes that a step does not move; less than 0 where it moves more.
        saved_collectives: of a step; less than 0 where it has more.
        paste: the argument of ``fully_shard`` to write.
    """

    text: str
    saved_bytes: int
    saved_traffic: int
    saved_collectives: int
    paste: str

    def __str__(self) -> str:
        saved = ((self.saved_bytes, "at the peak"), (self.saved_traffic, "to move in a step"))
        found = [f"{size(abs(n))} {'less' if n > 0 else 'more'} {what}" for n, what in saved if n]
        if self.saved_collectives > 0:
            found.append(f"{plural(self.saved_collectives, 'collective')} less")
        return f"{self.text}: {', '.join(found)}\n{self.paste}"


@dataclass(frozen=True)
class Question:
    """What advice is asked about: a plan, and a way to plan again with other arguments."""

    survey: Survey
    now: Trial
    chosen: Mapping[str, Any]  # arguments of plan as they were passed
    available: int | None  # bytes of a device
    plan_again: Callable[[Mapping[str, Any]], Trial]

    def try_change(self, text: str, paste: str, **changes: Any) -> tuple[Trial, Advice]:
        """Plan with other arguments."""
        found = self.plan_again({**self.chosen, **changes})
        saved = self.now.needed - found.needed
        advice = Advice(
            text, saved, self.now.moved - found.moved, self.now.collectives - found.collectives,
            paste,
        )  # fmt: skip
        return found, advice

    @property
    def is_too_large(self) -> bool:
        return self.available is not None and self.now.needed > self.available


def advise(question: Question) -> tuple[Advice, ...]:
    """Return what is worth a change, most bytes of memory first."""
    found = [
        *_split_whole_model(question),
        *_split_ends(question),
        *_join_small_units(question),
        *_keep_outermost(question),
        *_keep_all(question),
        *_make_it_fit(question),
    ]
    return tuple(sorted(found, key=lambda advice: -advice.saved_bytes))


def _units_line(policy: Policy | None, *more: str) -> str:
    """``units=`` as it would be written, with ``more`` policies joined to it."""
    parts = policy.description.split(" | ") if policy is not None else []
    return "units=" + " | ".join(f"wrap.{part}" for part in [*parts, *more])


def _split_whole_model(question: Question) -> Iterator[Advice]:
    """Advise to split a single unit by the class of which most of the model is made."""
    if question.chosen["units"] is not None or len(question.survey.records) != 1:
        return
    (root,) = question.survey.records[0].modules[:1]
    numbers: Counter[type[nn.Module]] = Counter()
    counts: Counter[type[nn.Module]] = Counter()
    for module in root.modules():
        if module is not root and next(module.children(), None) is not None:
            numbers[type(module)] += sum(p.numel() for p in module.parameters())
            counts[type(module)] += 1
    repeated = [kind for kind in numbers if counts[kind] > 1 and not issubclass(kind, _CONTAINERS)]
    if not repeated:
        return
    kind = max(repeated, key=lambda kind: (numbers[kind], -counts[kind]))
    text = f"gather each of the {counts[kind]} {kind.__name__} modules on its own"
    policy = by_class({kind})
    _, advice = question.try_change(text, _units_line(policy), units=policy)
    if advice.saved_bytes > WORTH * question.now.needed:
        yield advice


_CONTAINERS = (nn.ModuleList, nn.ModuleDict, nn.Sequential)


def _split_ends(question: Question) -> Iterator[Advice]:
    """Advise to split modules of one unit that are used far apart, as an embedding and a head."""
    policy = question.chosen["units"]
    for unit, before, after in find_used_far_apart(question.survey) if policy is not None else ():
        ends = [name.rpartition(".")[0] for name in (*before, *after)]
        modules = [name for name in ends if name and name != unit]
        nbytes = {name: _grad_bytes(question.survey, name) for name in modules}
        names = [name for name in nbytes if nbytes[name] > WORTH * sum(nbytes.values())]
        if not names:
            continue
        text = f"make {quote_names(names)} units of their own, so that neither waits for the other"
        quoted = ", ".join([f'"{name}"' for name in names])
        paste = _units_line(policy, f"by_name({quoted})")
        _, advice = question.try_change(text, paste, units=policy | by_name(*names))
        if advice.saved_bytes > WORTH * question.now.needed:
            yield advice


def _grad_bytes(survey: Survey, module: str) -> int:
    """Bytes of the full gradients of what is below ``module``."""
    uses = [event.use for event in survey.events if event.use is not None]
    below = {use.param: use.grad_bytes for use in uses if use.name.startswith(f"{module}.")}
    return sum(below.values())


def _join_small_units(question: Question) -> Iterator[Advice]:
    """Advise to join small units, whose gathers cost more to start than to send."""
    survey = question.survey
    gathers = [sum(b.full_bytes for b in survey.buckets_of(r)) for r in survey.records]
    small = [nbytes for nbytes in gathers if 0 < nbytes < SMALL_GATHER]
    if len(small) < MANY or question.chosen["units"] is None:
        return
    largest = max(bucket.compute.itemsize for bucket in survey.buckets)
    numel = SMALL_GATHER // largest
    text = f"{len(small)} units gather less than {size(SMALL_GATHER)} each; join them"
    policy = by_size(numel)
    try:
        _, advice = question.try_change(text, _units_line(policy), units=policy)
    except ValueError:  # nothing in the model is that large
        return
    if 2 * advice.saved_collectives >= question.now.collectives:
        yield advice


def _keep_outermost(question: Question) -> Iterator[Advice]:
    """Advise to keep an outermost unit that is released although backward needs it first."""
    chosen = question.chosen
    if chosen["reshard_after_forward"] is not True and chosen["strategy"] is None:
        return
    if chosen["strategy"] not in (None, ShardingStrategy.FULL_SHARD):
        return
    text = "let the outermost unit stay gathered for backward, which needs it first"
    paste = "reshard_after_forward=None"
    _, advice = question.try_change(text, paste, reshard_after_forward=None)
    is_free = advice.saved_bytes >= -WORTH * question.now.needed
    if is_free and advice.saved_traffic > WORTH * question.now.moved:
        yield advice


def _keep_all(question: Question) -> Iterator[Advice]:
    """Advise to keep every unit gathered from forward to backward, where there is room."""
    chosen = question.chosen
    if question.available is None or question.is_too_large or chosen["strategy"] is not None:
        return
    text = "there is room to keep every unit gathered from forward to backward"
    paste = "reshard_after_forward=False"
    found, advice = question.try_change(text, paste, reshard_after_forward=False)
    if found.needed <= 0.9 * question.available and advice.saved_traffic > 0:
        yield advice


def _make_it_fit(question: Question) -> Iterator[Advice]:
    """Advise to compute in bf16, or to keep the optimizer in host memory, if it does not fit."""
    if not question.is_too_large:
        return
    half = MixedPrecision(torch.bfloat16, torch.float32)
    for text, paste, changes in (
        ("compute in bfloat16", "mp_policy=MixedPrecision(torch.bfloat16, torch.float32)",
         {"mp_policy": half}),
        ("keep shards and optimizer state in host memory", "offload_policy=Offload(params=True)",
         {"offload_policy": Offload(params=True)}),
    ):  # fmt: skip
        _, advice = question.try_change(text, paste, **changes)
        if advice.saved_bytes > WORTH * question.now.needed:
            yield advice


@dataclass(frozen=True)
class Accumulation:
    """What a microbatch after the first costs with one ``keep=`` of ``accumulate``.

    Attributes:
        keep: ``"sharded"``, ``"no_all_reduce"`` or ``"unsharded"``.
        held: bytes that stay from one microbatch to the next, besides sharded gradients.
        moved: bytes that each microbatch reduces, in place of the last one alone.
    """

    keep: str
    held: int
    moved: int


def price_accumulation(survey: Survey) -> tuple[Accumulation, ...]:
    """Price each ``keep=`` by the buckets that are trained."""
    trained = [bucket for bucket in survey.buckets if bucket.trained_numel]
    over_shards = sum(b.flat_bytes - b.flat_bytes // b.gather_ranks for b in trained)
    over_replicas = sum(
        2 * b.summed_bytes * (b.replicas - 1) // b.replicas for b in trained if b.replicas > 1
    )
    over_replicas += sum(b.summed_bytes * (b.fused - 1) for b in trained)
    found = [Accumulation("sharded", 0, over_shards + over_replicas)]
    if over_replicas:
        waiting = [b for b in trained if b.replicas > 1 or b.fused > 1]
        partial = sum(b.summed_bytes * b.fused for b in waiting)
        found.append(Accumulation("no_all_reduce", partial, over_shards))
    found.append(Accumulation("unsharded", sum(b.flat_bytes for b in trained), 0))
    return tuple(found)
