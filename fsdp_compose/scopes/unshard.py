"""Keep units gathered between passes, gather them ahead of one, reduce what they accumulated."""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import partial

import torch
from torch import nn

from fsdp_compose.base.arguments import check_flags, check_kind, check_module
from fsdp_compose.base.interrupts import hold_interrupts
from fsdp_compose.base.process import here
from fsdp_compose.base.torch_private import read_version
from fsdp_compose.buckets.bucket import GATHERED, Bucket, Entry
from fsdp_compose.buckets.entries import find_entry
from fsdp_compose.buckets.gradients import pack
from fsdp_compose.core.gathering import (
    forget_inner,
    install_leaves,
    refresh_stale,
    renew_bucket,
    wait_gathered,
)
from fsdp_compose.core.guards.collective_log import Log, StepDiscarded
from fsdp_compose.core.guards.connect import Reach, connect, is_running, owners
from fsdp_compose.core.guards.failed_steps import clear_failed_steps
from fsdp_compose.core.guards.forward_writes import (
    forget_written,
    leaf_versions_of,
    versions_at_fill,
)
from fsdp_compose.core.guards.scope_parameters import (
    Layer,
    as_parameter,
    end_rests,
    hide,
    outdate,
    show,
)
from fsdp_compose.core.guards.units import require_units
from fsdp_compose.core.guards.waiting_gradients import drop_waiting_gradients
from fsdp_compose.core.records import Opened
from fsdp_compose.core.reducing import drain, land, start_all_reduce, start_reduce
from fsdp_compose.core.schedule import Hold
from fsdp_compose.core.state import Engine, Unit, as_read, find_state, owner_of, units_with
from fsdp_compose.sharded import ShardSpec, part_of, part_slice, to_local


def own_units(module: nn.Module, caller: str) -> list[Unit]:
    """The unit of ``module``, or of what is in it when it is not a unit itself."""
    advice = "For the parameters of a part of a unit, use fsdp_compose.gathered(module)."
    check_module(caller, module)
    units = require_units(module, caller, find_state(module) is None, advice)
    clear_failed_steps(units)
    return units


@dataclass(eq=False)
class Unsharded(Opened):
    """A unit between ``unshard`` and ``reshard``."""

    versions: list[int] = field(default_factory=list)


_graphs: weakref.WeakKeyDictionary[Unit, weakref.WeakSet[Reach]] = weakref.WeakKeyDictionary()
"""Graphs over the gathered parameters of a unit, which must not be released before they are."""


class UnshardHandle:
    """An ``unshard`` under way.

    Example:
        >>> model = fully_shard(nn.Linear(2, 2))
        >>> handle = unshard(model, async_op=True)
        >>> handle.wait()
        >>> tuple((model.weight * 2).shape)
        (2, 2)
    """

    def __init__(self, units: list[Unit]) -> None:
        self._units = units

    def wait(self) -> None:
        """Make the parameters readable on the current stream, and let the modules hold them.

        What was written since ``unshard`` is gathered again.
        """
        units, self._units = self._units, []
        clear_failed_steps(units)
        for unit in units:
            if Hold.USER in unit.holds:
                if not is_running(unit):
                    refresh_stale(unit)  # the parameters may have been written since ``unshard``
                try:
                    wait_gathered(unit)
                except BaseException:
                    unit.engine.schedule.drop(unit, Hold.USER)
                    raise
                unit.engine.wait_for_host_reads()
                _show(unit)


def unshard(module: nn.Module, async_op: bool = False) -> UnshardHandle | None:
    """Gather a unit, in its compute dtype, and keep it gathered until ``reshard(module)``.

    Its forwards then gather nothing, so one rank may run them alone, such as to evaluate, and its
    modules hold full tensors between them, through which gradients flow to the sharded parameters.
    To write, use ``gathered(module, writeback=True)``. After an optimizer step the parameters hold
    their slices until the next forward, or ``unshard``, gathers the new values.

    Args:
        module: a unit, which is gathered without the units inside it; or a module that is none and
            contains units: all of them are. For a whole model whose root is a unit:
            ``for unit in units_of(model): unshard(unit)``.
        async_op: return at once, with a handle whose ``wait()`` is called before parameters are
            read; a forward waits by itself.

    Raises:
        ValueError: ``module`` is not a unit and contains none.
        RuntimeError: ranks ask for different units, which this call or ``wait()`` finds; what did
            not arrive is not held then.

    Example:
        >>> model = fully_shard(nn.Linear(2, 2))
        >>> unshard(model)
        >>> model.weight.sum().backward()
        >>> reshard(model)
        >>> model.weight.grad.full_tensor()
        tensor([[1., 1.],
                [1., 1.]])
    """
    check_flags("unshard", async_op=async_op)
    units = own_units(module, "unshard")
    for unit in units:
        if not is_running(unit):
            refresh_stale(unit)  # what it, or a unit with a tied weight, kept from before a write
        unit.engine.schedule.keep(unit, Hold.USER)
    handle = UnshardHandle(units)
    if async_op:
        return handle
    handle.wait()
    return None


@hold_interrupts()
def _show(unit: Unit) -> None:
    if unit.opened is not None:
        return
    reaches: list[Reach] = []
    fulls = dict(zip(unit.entries, as_read(unit, unit.links.aliases), strict=True))
    with torch.inference_mode(False), torch.enable_grad():
        shown = connect(owners(unit), fulls, reaches)
    _watch_graphs(unit, reaches)
    opened = Unsharded(tensors=[], in_forward=False)
    rebuild = partial(_rebuild, weakref.ref(unit))
    try:
        for entry in unit.entries:
            full = shown[entry]
            full = full if full.grad_fn else as_parameter(full)
            show(entry, full, Layer(opened, rebuild, is_renewed=True))
    except BaseException:
        for entry in unit.entries:
            hide(entry, opened)
        raise
    opened.tensors = [entry.held for entry in unit.entries]
    opened.versions = [tensor._version for tensor in opened.tensors]
    unit.opened = opened
    unit.engine.opened.add(unit)
    if not is_running(unit):
        install_leaves(unit)


def _watch_graphs(unit: Unit, reaches: list[Reach]) -> None:
    _graphs.setdefault(unit, weakref.WeakSet()).update(reaches)
    for reach in reaches:
        weakref.finalize(reach, _graph_is_gone, weakref.ref(unit)).atexit = False


def _rebuild(ref: weakref.ref[Unit], entry: Entry, trained: bool) -> torch.Tensor:
    unit, reaches = ref(), list[Reach]()
    assert unit is not None
    full = reconnect(entry, entry.held.detach(), trained, reaches)
    _watch_graphs(unit, reaches)
    return full


def reconnect(
    entry: Entry, full: torch.Tensor, trained: bool, reaches: list[Reach]
) -> torch.Tensor:
    """The full tensor of a scope after its parameter was made trainable, or frozen."""
    if not trained:
        return as_parameter(full)
    owner = owner_of(entry)
    units = [unit for unit in units_with(owner) if owner in unit.buckets]
    with torch.enable_grad():
        return connect(units, {entry: full}, reaches)[entry]


def _graph_is_gone(ref: weakref.ref[Unit]) -> None:
    unit = ref()
    if unit is not None and not _is_unsharded(unit) and not _has_graphs(unit):
        unit.engine.schedule.drop(unit, Hold.USER)


def _has_graphs(unit: Unit) -> bool:
    return any(True for _ in _graphs.get(unit, ()))


def _is_unsharded(unit: Unit) -> bool:
    opened = unit.opened
    while opened is not None and not isinstance(opened, Unsharded):
        opened = opened.outer
    return opened is not None


def list_outdated(unit: Unit) -> list[Entry]:
    """The parameters of which a scope over the unit has full tensors from before a step."""
    opened = unit.opened
    if opened is None:
        return []
    then, now = opened.leaf_versions or versions_at_fill(unit), leaf_versions_of(unit)
    return [entry for entry, a, b in zip(unit.entries, then, now, strict=True) if a != b]


def show_current(units: Iterable[Unit]) -> None:
    """Show full parameters again after a step, but for those from before it, which hold slices."""
    for unit in units:
        if unit.opened is not None:
            for entry in list_outdated(unit):
                outdate(entry)
            end_rests(unit.entries)


def reshard(module: nn.Module) -> None:
    """Withdraw ``unshard`` and release what is gathered, as soon as nothing needs it any more.

    What a running forward or backward reads stays until it is done, and so does what a graph over
    parameters that were read directly still needs. What was kept for a backward that is still to
    come is gathered again there.

    Raises:
        ValueError: ``module`` is not a unit and contains none.
        RuntimeError: a parameter was written since ``unshard``, which would be lost.

    Example:
        >>> model = fully_shard(nn.Linear(2, 2))
        >>> unshard(model)
        >>> reshard(model)
        >>> type(model.weight).__name__
        'ShardedParameter'
    """
    edited: list[Entry] = []
    for unit in own_units(module, "reshard"):
        edited += _end_unshard(unit)
        reasons = [Hold.PREFETCH]
        if not _has_graphs(unit):
            reasons.append(Hold.USER)
        if "hidden" not in unit.checks.warned:
            reasons.append(Hold.KEPT)
            forget_inner(unit)
        for reason in reasons:
            unit.engine.schedule.drop(unit, reason)
    if edited:
        spec = edited[0].spec
        raise RuntimeError(
            f"reshard: parameter {spec.fqn!r} of unit {spec.unit!r} was written "
            "between unshard and reshard, and the edit would be lost; edit parameters inside "
            "`with fsdp_compose.gathered(module, writeback=True):`."
        )


@hold_interrupts()
def _end_unshard(unit: Unit) -> list[Entry]:
    """Let parameters and modules hold their slices again; return those that were written."""
    around, opened = None, unit.opened
    while opened is not None and not isinstance(opened, Unsharded):
        around, opened = opened, opened.outer  # scopes that were opened over it
    if opened is None:
        return []
    edited: list[Entry] = []
    versions = opened.versions, versions_at_fill(unit), leaf_versions_of(unit)
    for entry, before, then, now in zip(unit.entries, *versions, strict=True):
        full = hide(entry, opened)
        if full is not None and (
            full._version != before or (then == now and _is_written_unseen(entry, full))
        ):
            edited.append(entry)
            forget_written(unit)
            bucket = owner_of(entry)  # whose next forward is not the one that wrote
            bucket.counts = list(map(read_version, bucket.aliases))
        del full  # which may free a graph that keeps the unit gathered
    if around is not None:
        around.outer = None
    else:
        unit.opened = None
        if not is_running(unit):
            install_leaves(unit)
    opened.tensors = []
    return edited


def _is_written_unseen(entry: Entry, full: torch.Tensor) -> bool:
    """Whether a write through ``.data`` or NumPy, which leaves no version, is in the own slice."""
    bucket, mine = owner_of(entry), to_local(entry.param)
    can_tell = bucket.phase is GATHERED and bucket.mp.gather_codec is None
    can_tell &= not bucket.residence.is_shared  # else the shard may have been written
    if not can_tell or full.device.type != "cpu" or mine.device.type != "cpu":
        return False
    return not shows_own_slice(entry, full)


def shows_own_slice(entry: Entry, full: torch.Tensor) -> bool:
    """Whether a full tensor has, in this rank's slice, the bits of the shard in its dtype."""
    mine = to_local(entry.param)
    shown = part_slice(part_of(full).detach(), entry.spec).to(mine.device).contiguous()
    return torch.equal(mine.to(shown.dtype).view(torch.uint8), shown.view(torch.uint8))


def prefetch_units(module: nn.Module, modules: nn.Module | Iterable[nn.Module]) -> None:
    """Start gathering the units of ``modules`` now, ahead of their use in the pass of ``module``.

    What the pass does not use is released at its end, and by an optimizer step. What is written
    before its use is gathered again then.

    Raises:
        ValueError: one of them is not a unit and contains none.

    Example:
        >>> model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
        >>> model = fully_shard(model, units=wrap.by_class({nn.Linear}))
        >>> prefetch_units(model, [model[1]])
    """
    own_units(module, "prefetch_units")
    wanted = [modules] if isinstance(modules, nn.Module) else modules
    check_kind("prefetch_units", "modules", wanted, Iterable, "a module, or a list of modules")
    for unit in [unit for target in wanted for unit in own_units(target, "prefetch_units")]:
        schedule = unit.engine.schedule
        schedule.prefetch([unit])
        is_between = not schedule.active and not unit.engine.tasks
        if is_between and Hold.PREFETCH in unit.holds:
            schedule.work.note_kept(unit)  # for a later pass, which looks for writes


def reduce_grads(module: nn.Module) -> None:
    """Reduce the gradients that ``module``'s units accumulated without synchronisation.

    Afterwards they are in ``.grad``, averaged over all ranks. Every rank must call it, outside
    backward; where nothing waits it does nothing.

    If it fails, as where a communication hook raises, what waited is dropped with a warning: clear
    ``.grad`` and run the step again.

    Raises:
        ValueError: ``module`` contains no unit.
        RuntimeError: microbatches of a step with ``deterministic=`` are missing.

    Example:
        >>> model = fully_shard(nn.Linear(2, 2))
        >>> with no_sync(model):
        ...     model(torch.ones(1, 2)).sum().backward()
        >>> reduce_grads(model)
        >>> model.bias.grad.full_tensor()
        tensor([1., 1.])
    """
    reduce_units(require_units(module, "reduce_grads"))


def reduce_units(units: list[Unit]) -> None:
    """Reduce what these units accumulated, as ``reduce_grads`` does."""
    clear_failed_steps(units)
    for unit in units:
        drain(unit.engine)
        switches = unit.switches
        found = switches.all_reduce, switches.last_backward
        switches.all_reduce = switches.last_backward = True
        try:
            for bucket in unit.buckets:
                _reduce_bucket(bucket, unit.engine)
        except BaseException as error:  # such as of a hook, which may have written the gradients
            if not isinstance(error, StepDiscarded):  # for whose scope they are put back
                drop_waiting_gradients(units, [unit.name])
            raise
        finally:
            switches.all_reduce, switches.last_backward = found
    for engine in dict.fromkeys(unit.engine for unit in units):
        land(engine)
        guessing = [log for log in engine.logs.values() if log.guesses]
        for log in sorted(guessing, key=lambda log: log.place):  # in the same order on every rank
            log.compare_guesses()
    check_reduced(
        (b for u in units for b in u.buckets if b.mesh.microbatches is not None), "reduce_grads"
    )


def _reduce_bucket(bucket: Bucket, engine: Engine) -> None:
    """Reduce what waits in a bucket, if anything does."""
    if bucket.residence.moved:
        renew_bucket(bucket)  # and convert what waits
    if bucket.arriving.waiting is not None and not is_pending(bucket):
        pack(bucket, [None] * len(bucket.entries))  # zeros, to send the rest along
    if bucket.arriving.packed:
        engine.reductions.append(start_reduce(bucket))
    elif bucket.arriving.partial is not None:
        engine.reductions.append(start_all_reduce(bucket))
    drain(engine)


def check_reduced(
    buckets: Iterable[Bucket], caller: str, param: nn.Parameter | None = None
) -> None:
    """Raise when gradients of the buckets wait to be reduced, naming ``param`` if given."""
    for bucket in buckets:
        if is_open(bucket):
            spec = bucket.entries[0].spec if param is None else find_entry(param).spec
            raise RuntimeError(explain_open(bucket, caller, spec))


def check_stepped(bucket: Bucket, caller: str, param: nn.Parameter | None = None) -> None:
    """Raise as ``check_reduced`` does, before a step: on every rank, also on those that reduced."""
    log = bucket.users.caller
    is_compared = bucket.mesh.shard.size > 1 or bucket.mesh.microbatches is not None
    if isinstance(log, Log) and not is_compared and is_open(bucket):
        log.ask_who_reduces(bucket.entries[0].spec.unit)
    check_reduced([bucket], caller, param)


def explain_open(bucket: Bucket, caller: str, spec: ShardSpec) -> str:
    """The text of the error for ``caller``, which needs gradients that wait to be reduced."""
    if bucket.mesh.microbatches is not None:
        return _explain_microbatches(bucket, caller, spec)
    last = "leave accumulate() first, run the last backward outside no_sync()"
    if bucket.arriving.waiting is not None and not is_pending(bucket):
        last = "call set_is_last_backward(module, True) before the step's last backward"
    return (
        f"{caller}: the gradient of {spec.fqn!r} (unit {spec.unit!r}) was accumulated "
        f"without synchronisation and is not in .grad yet; {last}, or call "
        "fsdp_compose.reduce_grads(module)."
    )


def _explain_microbatches(bucket: Bucket, caller: str, spec: ShardSpec) -> str:
    mesh, sums = bucket.mesh, bucket.arriving.sums
    assert mesh.microbatches is not None
    wanted = mesh.microbatches // mesh.size
    return (
        f"{caller}: the gradient of {spec.fqn!r} (unit {spec.unit!r}) is of "
        f"{sums.steps * wanted + sums.arrived} backwards on this rank; wanted {wanted}, since "
        f"deterministic={mesh.microbatches} microbatches a step on {mesh.size} ranks are {wanted} "
        "for each. Run one backward for each of them, through every unit (participate(unit) where "
        "a microbatch skips one), then step() and zero_grad(). After a backward that failed, run "
        "the whole step again."
    )


def is_open(bucket: Bucket) -> bool:
    """Whether the bucket holds gradients that are not in ``.grad``, or ``.grad`` several steps'."""
    arriving = bucket.arriving
    if bucket.mesh.microbatches is not None and (arriving.sums.arrived or arriving.sums.steps > 1):
        return True
    return is_pending(bucket) or arriving.waiting is not None


def may_wait(engine: Engine) -> bool:
    """Whether ``is_open`` may be true of a bucket: in a backward of any, else of those noted.

    What leaves gradients outside of ``.grad`` notes the bucket in ``engine.awaiting``.
    """
    return bool(engine.tasks) or any(map(is_open, engine.awaiting))


def end_steps() -> None:
    """After an optimizer's step: what waits from now on is of another."""
    for engine in here.engines.values():
        for bucket in engine.awaiting:
            bucket.arriving.sums.steps = 0
            if not is_open(bucket):
                engine.awaiting.discard(bucket)


def is_pending(bucket: Bucket) -> bool:
    """Whether it holds gradients that were not reduced, or not over the replicas."""
    return bucket.arriving.packed or bucket.arriving.partial is not None
