"""A step that every rank discards when one of them cannot use its batch.

A rank that raises tells the others ahead of whatever they wait for: on gloo every exchange begins
with a head, and a rank that reads "discard" there raises ``StepDiscarded``, which ends its forward
or backward as the error of the first rank ended that one's. All ranks meet at the end of the scope,
forget what they sent, and put gradients and buffers back to what they were at its start.
"""

from __future__ import annotations

import copy
import dataclasses
import logging
import weakref
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from fsdp_compose.base.arguments import check_flags, check_kind, describe_value, is_number
from fsdp_compose.base.attributes import get_grad
from fsdp_compose.base.group import Group, get_global_rank
from fsdp_compose.base.mesh import Ranks, check_ranks, group_of, group_over
from fsdp_compose.base.strides import distinct
from fsdp_compose.base.torch_private import buffer_slots, raw
from fsdp_compose.buckets.bucket import Arriving, Bucket
from fsdp_compose.buckets.gradients import discard_packed, list_waiting, make_grad_buffer
from fsdp_compose.comm import collectives as comm
from fsdp_compose.comm.counts import epoch_of
from fsdp_compose.comm.grad_bucket import has_state
from fsdp_compose.comm.messages import SKIPPING
from fsdp_compose.construct.names import parameter_names
from fsdp_compose.construct.tensor_parallel import tensor_parallel_groups
from fsdp_compose.core.guards.collective_log import DISCARDED, KEPT, Log, StepDiscarded
from fsdp_compose.core.guards.compared_units import forget_orders
from fsdp_compose.core.guards.connect import is_running
from fsdp_compose.core.guards.failed_steps import clear_failed_steps
from fsdp_compose.core.guards.plain_gradients import share_plain_gradients
from fsdp_compose.core.guards.scope_parameters import holder_of
from fsdp_compose.core.guards.units import require_units
from fsdp_compose.core.passes import recover
from fsdp_compose.core.state import Engine, Unit, unit_of
from fsdp_compose.sharded import replace_grad

__all__ = ["SkippableStep", "skippable_step"]

Loss = torch.Tensor | float

_logger = logging.getLogger("fsdp_compose")


class _WrongArgument(TypeError):
    """A call that would fail in every step, which the scope does not take for a bad batch."""


class _Misplaced(RuntimeError):
    """A scope entered inside another, or inside a pass, which would fail in every step too."""


@dataclass(eq=False)
class SkippableStep:
    """What comes of a step; ``skippable_step`` returns it.

    Attributes:
        skipped: after the scope: every rank discarded the step.
        reasons: after the scope: why, by rank, of the ranks that had a reason.
    """

    skipped: bool = False
    reasons: dict[int, str] = field(default_factory=dict)
    _own: str | None = None  # this rank's reason; empty where another rank had told it

    def discard(self, reason: str) -> None:
        """Have every rank discard the step at the end of the scope; the program goes on to there.

        Args:
            reason: for ``reasons`` and the log.

        Raises:
            TypeError: ``reason`` is no string; the scope lets it through.
        """
        if not isinstance(reason, str):
            raise _WrongArgument(
                f"skippable_step: discard() was given {describe_value(reason)}; wanted a string."
            )
        self._own = self._own or reason or "discard() was called"

    def _hear(self, told: StepDiscarded) -> None:
        self.reasons.update(told.reasons)
        self._own = self._own or ""

    def check(self, value: Loss) -> bool:
        """Discard the step where ``value``, a loss of any shape, is not finite; whether it is.

        Every rank goes on with its backward all the same. The host waits for ``value``.

        Raises:
            TypeError: ``value`` is no tensor and no number; the scope lets it through.
        """
        if not isinstance(value, torch.Tensor) and not is_number(value):
            found = describe_value(value)
            raise _WrongArgument(
                f"skippable_step: check() was given {found}; wanted a tensor or a number."
            )
        loss = value if isinstance(value, torch.Tensor) else torch.as_tensor(value, device="cpu")
        finite = bool(torch.isfinite(loss.detach()).all())
        if not finite:
            self.discard("the loss is not finite")
        return finite


@contextmanager
def skippable_step(
    module: nn.Module,
    *,
    finite_gradients: bool = False,
    errors: tuple[type[Exception], ...] = (Exception,),
    pipeline_mesh: Ranks | None = None,
) -> Iterator[SkippableStep]:
    """Scope of a step's forwards and backwards that all ranks discard if any rank has a reason to.

    Reasons are an exception of the types ``errors`` that leaves the scope,
    ``step.discard(reason)``, ``step.check(loss)`` of a loss that is not finite, and, with
    ``finite_gradients``, a gradient that is not finite. Then the scope ends without an error on
    every rank, ``step.skipped`` is True, and gradients (those of earlier microbatches, also packed
    ones of ``no_sync``) and buffers are what they were before. Call it on every rank, and the
    optimizer after it::

        with fsdp_compose.skippable_step(model) as step:
            loss = loss_of(model, next(batches))
            step.check(loss)
            loss.backward()
        if not step.skipped:
            optim.step()
        optim.zero_grad()

    Put it around all microbatches of a step, or inside ``accumulate`` around one. Collectives of
    your own, clipping and ``optim.step()`` go outside: a rank that waits there cannot be told.
    What a forward does besides, such as random numbers drawn, optimizers stepped in backward or
    what a communication hook of your own remembers, stays. It costs one small message per step and
    group of ranks, a copy of the module's buffers and, inside an accumulation, of the gradients so
    far.

    On backends other than gloo a rank cannot be told while it waits in a kernel: there an exception
    leaves the scope as it is, and the other reasons work. A rank cannot be told either while it
    waits for another part of a layer (tensor or pipeline parallelism): there all ranks of a layer
    must raise, or the others wait until the timeout. With parameters over several groups of which
    none has the ranks of all (replicas) every rank of the default process group must run the scope.

    Args:
        module: a unit, or a module that contains units.
        finite_gradients: look at every gradient at the end, for which the host waits.
        errors: exceptions that are a reason; others, and errors that tell that ranks ran different
            units, leave the scope.
        pipeline_mesh: the ranks that hold the other stages of a pipeline, a DeviceMesh of one
            dimension or a ProcessGroup: they run the scope too, and discard the step together.
            Without it they are not asked.

    Returns:
        a ``SkippableStep``: ``skipped``, ``reasons`` by rank, ``discard`` and ``check``.

    Raises:
        ValueError: ``module`` contains no unit.
        TypeError: an argument is of the wrong type, such as a list for ``errors``.
        RuntimeError: it is inside another such scope, or inside a forward or backward.

    Example:
        >>> model = fully_shard(nn.Linear(2, 2))
        >>> with skippable_step(model) as step:
        ...     raise ValueError("a bad batch")
        >>> step.skipped, step.reasons
        (True, {0: 'ValueError: a bad batch'})
    """
    check_flags("skippable_step", finite_gradients=finite_gradients)
    _check_errors(errors)
    whose = "the stages' ranks, such as mesh['pp']"
    check_ranks("skippable_step", "pipeline_mesh", pipeline_mesh, whose)
    units = require_units(module, "skippable_step")
    links, step = _Links.of(units), SkippableStep()
    clear_failed_steps(units)
    _refuse_inside(links.engines)
    share_plain_gradients(units)
    before = _State.of(module, units)
    disagreed = links.disagreements()
    try:
        with links.postpone_meetings():
            yield step
            if finite_gradients and not _are_finite(module, units):
                step.discard("a gradient is not finite")
    except StepDiscarded as told:
        step._hear(told)
        told.__traceback__ = None
    except (_WrongArgument, _Misplaced):
        raise
    except errors as error:
        if not links.can_tell or links.disagreements() != disagreed:
            raise
        step.discard(f"{type(error).__name__}: {error}")
        # Python 3.12 keeps the error until garbage is collected, and with it the frames of what
        # failed: their memory and, before torch 2.13, hooks of an interrupted checkpoint().
        error.__traceback__ = None
    device = links.engines[0].streams.device
    stages = [] if pipeline_mesh is None else [group_over(pipeline_mesh, device)]
    _agree(step, links, tensor_parallel_groups([module]), stages)
    if step.skipped:
        links.forget(units)
        before.restore()
        rank, reason = min(step.reasons.items())
        _logger.warning("a step is skipped on every rank: rank %d: %s", rank, reason)


_open: weakref.WeakSet[Engine] = weakref.WeakSet()
"""Engines over whose units a scope is open."""


def _refuse_inside(engines: list[Engine]) -> None:
    """Raise inside another scope: a rank that hears "discard" could not tell which one is meant."""
    for engine in engines:
        if engine in _open:
            raise _Misplaced(
                "skippable_step: this is inside another skippable_step, and ranks could not tell "
                "which of the two another rank discards; use one scope for all microbatches and "
                "models of a step: fsdp_compose.skippable_step(nn.ModuleList([model, other]))."
            )
        for unit in filter(is_running, engine.units):
            raise _Misplaced(
                f"skippable_step: unit {unit.name!r} is inside its forward or backward, which a "
                "discarded step would end; enter the scope before the forward."
            )


def _check_errors(errors: Any) -> None:
    wanted = "a tuple of classes of exceptions, such as (ValueError,)"
    check_kind("skippable_step", "errors", errors, tuple, wanted)
    for kind in errors:
        if not (isinstance(kind, type) and issubclass(kind, Exception)):
            raise TypeError(
                f"skippable_step: errors holds {describe_value(kind)}; wanted {wanted}."
            )


@dataclass(frozen=True)
class _Links:
    """How the ranks of the units' groups reach each other."""

    engines: list[Engine]
    logs: list[Log]
    epochs: dict[tuple[Log, Group], int]  # when the scope was entered
    stepped: dict[Log, object]  # what optimizers had stepped then, not compared yet

    @classmethod
    def of(cls, units: list[Unit]) -> _Links:
        logs = list(dict.fromkeys(log for unit in units for log in unit.links.logs))
        links = [
            (log, group)
            for log in logs
            for group in dict.fromkeys((*log.channels, *log.groups))
            if group.pg is not None
        ]
        # Every rank meets its groups in the same order: else two ranks wait for each other in two.
        links.sort(key=lambda link: (link[1].size, link[1].ranks))
        epochs = {(log, group): epoch_of(group) for log, group in links}
        stepped: dict[Log, object] = {log: log.steps.parameter for log in logs}
        return cls(list(dict.fromkeys(unit.engine for unit in units)), logs, epochs, stepped)

    @contextmanager
    def postpone_meetings(self) -> Iterator[None]:
        """Inside, a rank that finds that others have ended the step meets them in ``_agree``."""
        for log in self.logs:
            log.skippable = "open"
            log.unmet.clear()
        _open.update(self.engines)
        try:
            yield
        finally:
            _open.difference_update(self.engines)
            for log in self.logs:
                log.skippable = None

    @property
    def can_tell(self) -> bool:
        """Whether every rank can be told while it waits."""
        return all(comm.is_point_to_point(group) for _, group in self.epochs)

    def list_spanning(self) -> list[Group]:
        """The group with all ranks of the others, if there is one: all of its ranks hear of all.

        Which groups a rank is in says nothing of how many the others are in: experts may be spread
        over some ranks, and whole on another.
        """
        groups = [group for _, group in self.epochs]
        widest = max(groups, key=lambda group: group.size, default=None)
        every = {rank for group in groups for rank in group.ranks}
        return [widest] if widest is not None and len(every) == widest.size else []

    def disagreements(self) -> int:
        return sum(log.disagreements for log in self.logs)

    def list_untold(self) -> list[tuple[Log, Group]]:
        """Groups in which the ranks were not told yet that one discards the step."""
        return [(log, group) for (log, group), n in self.epochs.items() if epoch_of(group) == n]

    def forget(self, restored: Collection[Unit]) -> None:
        """Clear the failed pass; whatever is still under way is never read.

        Args:
            restored: units whose gradients that wait will be put back.
        """
        for log in self.logs:
            log.start_over([group for one, group in self.list_untold() if one is log])
            inside = log.steps.parameter  # what was stepped in the scope stays so
            log.steps.forget_all()  # some ranks may have ended the step, and compared it
            log.steps.parameter = None if inside is self.stepped[log] else inside
        for engine in self.engines:
            recover(engine, restored)
            forget_orders(engine)  # some ranks may have run the step to its end
        inner = {group for log in self.logs for group in log.inner_channels()}
        comm.end_messages(inner, SKIPPING)


def _agree(step: SkippableStep, links: _Links, beside: list[Group], stages: list[Group]) -> None:
    """Tell every group whether this rank keeps the step, then find out whether all do.

    Args:
        beside: the groups whose ranks hold other parts of the parameters.
        stages: that whose ranks hold other stages, if any.

    Raises:
        RuntimeError: ranks ran different units.

    Where a rank is in groups of which none has all ranks of the others, so that it is apart, its
    peers hear of that as they meet: all ranks then meet once more, together.
    """
    if step._own:
        step.reasons[get_global_rank()] = step._own
    spanning = links.list_spanning() if links.can_tell else []
    is_apart = bool(links.epochs) and not spanning
    if links.can_tell:
        code = KEPT if step._own is None else DISCARDED
        told = [
            (log, group, None if group in log.unmet else comm.tell(log, code, group, is_apart))
            for log, group in links.list_untold()
        ]
        for log, group, heads in told:
            try:
                if step._own is not None:
                    log.announce_discard(step._own)
                if heads is None:
                    log.disagree(group, meets=DISCARDED)
                comm.hear(heads)
                is_apart = is_apart or (not heads.is_outdated() and heads.are_apart())
            except StepDiscarded as found:
                step._hear(found)
        kept = set() if code == DISCARDED else {group for _, group in links.list_untold()}
        for group in {group: None for _, group in links.epochs if group not in kept}:
            for notes in comm.gather_objects((step.reasons, is_apart), group, SKIPPING):
                step.reasons.update(notes[0])
                is_apart = is_apart or notes[1]
    if is_apart:
        beside = [group_of(dist.group.WORLD, links.engines[0].streams.device)]
    for group in (*beside, *stages):
        for reasons in comm.gather_objects(step.reasons, group, SKIPPING):
            step.reasons.update(reasons)
    step.skipped = bool(step.reasons)


def _are_finite(module: nn.Module, units: list[Unit]) -> bool:
    """Whether this rank's part of every gradient is finite, also of those that wait."""
    with raw():
        found = [get_grad(holder_of(param)) for param in parameter_names(module)]
        grads = [grad for grad in found if grad is not None]
        grads += (t for unit in units for bucket in unit.buckets for t in list_waiting(bucket))
        flags: dict[torch.device, list[torch.Tensor]] = {}
        for grad in grads:
            values = grad._values() if grad.is_sparse else _data(grad)
            flags.setdefault(grad.device, []).append(torch.isfinite(values).all())
        return all(bool(torch.stack(found).all()) for found in flags.values())  # each waits once


@dataclass(frozen=True)
class _State:
    """Gradients, buffers and what communication hooks remember as they were, to be put back."""

    grads: list[tuple[nn.Parameter, torch.Tensor | None, torch.Tensor | None]]
    buffers: list[tuple[torch.Tensor, torch.Tensor]]
    places: list[tuple[dict[str, Any], dict[str, Any]]]  # of buffers, which a forward may replace
    arriving: list[tuple[Bucket, Arriving, torch.Tensor | None]]
    hook_states: list[tuple[Any, Any]]

    @classmethod
    def of(cls, module: nn.Module, units: list[Unit]) -> _State:
        grads = []
        with raw(), torch.no_grad():
            for param in parameter_names(module):
                grad = get_grad(holder_of(param))
                grads.append((param, grad, None if grad is None else _data(grad).clone()))
            buffers = [(own, own.clone()) for own in map(distinct, module.buffers())]
            slots = [buffer_slots(submodule) for submodule in module.modules()]
            places = [(values, dict(values)) for values in slots]
            arriving = [
                (bucket, _copy(bucket.arriving), _copy_packed(bucket))
                for unit in units
                for bucket in unit.buckets
            ]
        states = {
            id(state): state for unit in units if (state := unit.switches.comm_state) is not None
        }
        kept = [state for state in states.values() if has_state(state)]
        saved = [(state, copy.deepcopy(state.state_dict())) for state in kept]
        return cls(grads, buffers, places, arriving, saved)

    def restore(self) -> None:
        with raw(), torch.no_grad():
            for bucket, arriving, packed in self.arriving:
                if bucket.arriving.packed:
                    discard_packed(bucket)
                bucket.arriving, bucket.residence.awaits = arriving, True
                unit_of(bucket).engine.awaiting.add(bucket)
                if packed is not None:
                    if bucket.grads is None:
                        bucket.grads = make_grad_buffer(bucket)
                    flat = bucket.grads.flat
                    flat.untyped_storage().resize_(packed.numel() * packed.element_size())
                    flat.copy_(packed)
            for param, grad, data in self.grads:
                replace_grad(holder_of(param), grad)
                if grad is not None and data is not None:
                    _data(grad).copy_(data)
            for values, held in self.places:
                values.clear()
                values.update(held)
            for buffer, value in self.buffers:
                buffer.copy_(value)
        for state, saved in self.hook_states:
            state.load_state_dict(saved)


def _data(grad: torch.Tensor) -> torch.Tensor:
    """The memory of a gradient on this rank."""
    return getattr(grad, "_local_tensor", grad)


def _copy(arriving: Arriving) -> Arriving:
    partial, waiting = (
        None if t is None else t.clone() for t in (arriving.partial, arriving.waiting)
    )
    return dataclasses.replace(
        arriving, partial=partial, waiting=waiting, sums=arriving.sums.copy()
    )


def _copy_packed(bucket: Bucket) -> torch.Tensor | None:
    if not bucket.arriving.packed:
        return None
    assert bucket.grads is not None
    return bucket.grads.flat.clone()
