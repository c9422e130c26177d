"""The guard on optimizer steps: what would train nothing, or on the wrong values, raises."""

from __future__ import annotations

import weakref
import zlib
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from functools import partial
from itertools import compress, repeat
from operator import attrgetter, is_, is_not
from typing import Any

import torch
from torch import nn
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from fsdp_compose.base.attributes import get_grad, requires_grad
from fsdp_compose.base.loops import parameters_of
from fsdp_compose.base.process import here
from fsdp_compose.base.torch_private import call_at_step_end, raw
from fsdp_compose.buckets.bucket import Entry
from fsdp_compose.buckets.entries import entry_of, find_entry
from fsdp_compose.buckets.gather import count_writes
from fsdp_compose.core.guards.callers import count_calls
from fsdp_compose.core.guards.collective_log import Log
from fsdp_compose.core.guards.compared_steps import Begun
from fsdp_compose.core.guards.interrupts import clear_interrupted
from fsdp_compose.core.guards.rank_differences import STEPS
from fsdp_compose.core.guards.scope_parameters import end_rests, rest
from fsdp_compose.core.guards.units import list_all_units, list_nested, list_opened
from fsdp_compose.core.state import Engine, Unit, owner_of
from fsdp_compose.optim.matrices import stands_for_matrix
from fsdp_compose.optim.mirror import bucket_of, find_buckets, source_of
from fsdp_compose.optim.scaler import bring_scale
from fsdp_compose.optim.slice_step import hook_slice_step, unhook_slice_step
from fsdp_compose.optim.unaveraged_parameters import check_unaveraged
from fsdp_compose.scopes.unshard import check_stepped, end_steps, may_wait, show_current
from fsdp_compose.sharded import QUANTIZING, is_sharded_parameter, spec_of


def guard_steps() -> None:
    """Check every optimizer step of the process from the first unit on; called once."""
    register_optimizer_step_pre_hook(_before_step)
    register_optimizer_step_post_hook(_after_step)


def _before_step(
    optimizer: torch.optim.Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[Any, Any] | None:
    """Let parameters that a scope shows in full hold their shards for the step, and check it."""
    rested = _rest_parameters(optimizer)
    try:
        _check_step(optimizer, args, kwargs)
    except BaseException:
        end_rests(rested)
        raise
    bring_scale(optimizer)
    call_at_step_end(optimizer, _end_step)
    hook_slice_step(optimizer)
    _note_begin(optimizer)
    if not rested:
        return None
    if len(args) > 1 and args[1] is not None:
        return (args[0], _in_full(args[1], rested), *args[2:]), kwargs
    if kwargs.get("closure") is not None:
        return args, {**kwargs, "closure": _in_full(kwargs["closure"], rested)}
    return None


def _in_full(closure: Callable[[], Any], rested: list[Entry]) -> Callable[[], Any]:
    """``closure`` for a step inside a scope: its forward sees the parameters in full."""

    def call() -> Any:
        show_current(list_opened())
        result = closure()
        for entry in rested:
            rest(entry)
        return result

    return call


def _end_step(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
    """Note that the step has ended, whatever the user's hooks on its end raise."""
    unhook_slice_step(optimizer)
    for engine in here.engines.values():
        for log in engine.logs.values():
            log.steps.end(optimizer)
    _note_step(optimizer)
    end_steps()


def _after_step(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
    show_current(list_opened())


def _note_begin(optimizer: torch.optim.Optimizer) -> None:
    """Note no writes into parameters: of a step, ranks compare the settings, if it ends.

    Torch's own steps write all parameters or, where they raise, none; those of others are counted.
    """
    ref, kind = weakref.ref(optimizer), type(optimizer).__name__
    is_torchs = type(optimizer).__module__.startswith("torch.optim.")
    for engine in here.engines.values():
        buckets = [] if is_torchs else [bucket for unit in engine.units for bucket in unit.buckets]
        for log in engine.logs.values():
            shared = [bucket for bucket in buckets if bucket.users.caller is log]
            refs = list(map(weakref.ref, shared))
            log.steps.begin(Begun(ref, kind, refs, count_writes(shared)))


def _note_step(optimizer: torch.optim.Optimizer) -> None:
    """Have the ranks that share its parameters compare, when a step ends, that all have stepped.

    Ranks may have given optimizers the parameters that they hold a part of, so whether one has
    stepped is compared, and not how many; and with what settings.
    """
    logs = [log for engine in here.engines.values() for log in engine.logs.values()]
    if not logs:
        return
    params, noted = parameters_of(optimizer), set[Any]()
    for some in params[:1], params:  # the first says it for all where every unit has its groups
        held, refs = find_buckets(some)
        with raw():
            trained = list(map(is_not, map(get_grad, held), repeat(None)))
        pairs = zip(compress(refs, trained), compress(held, trained), strict=True)
        first = dict([*pairs][::-1])
        for ref in dict.fromkeys(refs):
            bucket = None if ref is None else ref()
            log: Any = None if bucket is None else bucket.users.caller
            if bucket is None or log is None:
                continue
            if log not in noted:
                noted.add(log)
                log.steps.take(optimizer, *take_settings(optimizer, log))
            if log.steps.parameter is None and ref in first:
                spec = (entry_of(first[ref]) or bucket.entries[0]).spec
                log.steps.parameter = spec.unit, spec.fqn
        if len(noted) == len(logs) and all(log.steps.parameter is not None for log in logs):
            return


def _list_entries(param: nn.Parameter) -> Sequence[Entry]:
    """That of a sharded parameter, or those that a plain one lies over."""
    bucket, source = bucket_of(param), source_of(param)
    if bucket is None:
        return []
    entry = entry_of(param) if source is None else source.entry()
    return bucket.entries if entry is None else [entry]


def _name(entry: Entry) -> tuple[str, str]:
    return entry.spec.unit, entry.spec.fqn


def take_settings(
    optimizer: torch.optim.Optimizer, log: Log
) -> tuple[int, Callable[[], dict[tuple[str, str], dict[str, str]] | None]]:
    """What the groups of an optimizer say now, as ``Settings`` has it; no device is waited for.

    Of parameters that other ranks share than those of ``log``, as of experts, the groups alone.
    """
    settings = [_list_numbers(group) for group in optimizer.param_groups]
    passed_over = _list_without_gradient(optimizer, log)
    names = [zlib.crc32(f"{unit} {name}".encode()) for unit, name in passed_over]
    values = [tuple(map(_steady, numbers.values())) for numbers in settings]
    if len({*values}) > 1:  # which group has which
        numbered = map(_number_group, optimizer.param_groups)
        values = [(*value, number) for value, number in zip(values, numbered, strict=True)]
    number = hash(frozenset([*values, *names]))
    ref = weakref.ref(optimizer)  # else this holds the weights if no step follows

    def by_parameter() -> dict[tuple[str, str], dict[str, str]] | None:
        stepped = ref()
        if stepped is None:
            return None
        groups = stepped.param_groups
        return {
            _name(entry): {k: repr(v) for k, v in numbers.items()}
            | _show_gradient(param, entry, log, passed_over)
            for group, numbers in zip(groups, settings, strict=False)
            for param in group["params"]
            for entry in _list_entries(param)
        }

    return number, by_parameter


def _show_gradient(
    param: nn.Parameter, entry: Entry, log: Log, passed_over: Collection[tuple[str, str]]
) -> dict[str, str]:
    """Whether a parameter was stepped with a gradient, where an element of it is here.

    A plain one over it is taken to have been stepped with one.
    """
    if not _is_compared_by(param, log):
        return {}
    is_passed = _name(entry) in passed_over
    is_shown = is_sharded_parameter(param) and entry.spec.start < entry.spec.stop
    texts = {"gradient": "None" if is_passed else "a tensor"} if is_shown else {}
    return texts if is_passed else {**texts, STEPS: ""}


def _is_compared_by(param: nn.Parameter, log: Log) -> bool:
    """Whether the ranks of ``log`` compare what is done to a parameter."""
    bucket = bucket_of(param)
    return bucket is not None and bucket.users.caller is log


def _list_without_gradient(optimizer: torch.optim.Optimizer, log: Log) -> list[tuple[str, str]]:
    """(unit, parameter) of the sharded parameters that were to be trained and had no gradient."""
    params = parameters_of(optimizer)
    with raw():
        missing = list(compress(params, map(is_, map(get_grad, params), repeat(None))))
        trained = [p for p in missing if is_sharded_parameter(p) and requires_grad(p)]
        trained = [p for p in trained if _is_compared_by(p, log)]
    return [_name(entry) for param in trained for entry in _list_entries(param)]


def _number_group(group: dict[str, Any]) -> int:
    """A number for the parameters of a group, in any order; 0 where other ranks may have others."""
    try:
        if any(map(_IS_OF_FEWER, group["params"])):
            return 0
        return zlib.crc32(min(map(_FQN, group["params"]), default="").encode())
    except AttributeError:  # one that is not sharded
        return 0


_FQN, _IS_OF_FEWER = map(attrgetter, ("_shard_spec.fqn", "_shard_spec.residence.is_of_fewer"))


def _list_numbers(group: dict[str, Any]) -> dict[str, Any]:
    """The settings of a group that are numbers or several, whose hash is the same on every rank."""
    found: dict[str, Any] = {}
    for name, value in group.items():
        kind = type(value)
        if kind in _NUMBERS or (kind is tuple and _NUMBERS.issuperset(map(type, value))):
            found[name] = value
        elif kind is torch.Tensor and value.device.type == "cpu" and value.numel() == 1:
            found[name] = value.item()
    return found


def _steady(value: Any) -> Any:
    """``value``, or what has the same hash on every rank: that of NaN follows from its address."""
    if type(value) is tuple:
        return tuple(map(_steady, value))
    return value if value == value else 0x7FF8


_NUMBERS = frozenset((int, float, bool))


def _rest_parameters(optimizer: torch.optim.Optimizer) -> list[Entry]:
    """The optimizer's parameters that a scope shows in full, which now hold their shards."""
    shown = {id(entry.held): entry for unit in list_opened() for entry in unit.entries}
    if not shown:
        return []
    return [e for p in parameters_of(optimizer) if (e := shown.get(id(p))) is not None and rest(e)]


def _check_step(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
    """Refuse a step that would train nothing or miss gradients; drop what it makes stale."""
    if type(optimizer).__module__.startswith("torchao."):
        _refuse_torchao(optimizer)
    caller = f"{type(optimizer).__name__}.step()"
    if any(group.get("fused") for group in optimizer.param_groups):
        _refuse_fused(optimizer, caller)
    for engine in here.engines.values():
        if engine.schedule.active:
            clear_interrupted(engine, caller)
            _refuse_inside(engine, optimizer, caller)
        waits = may_wait(engine)
        ahead = {bucket for unit in engine.schedule.prefetched for bucket in unit.gathered}
        if not waits and not ahead:
            continue
        for param in filter(is_sharded_parameter, parameters_of(optimizer)):
            if waits:
                check_stepped(owner_of(find_entry(param)), caller, param)
            if bucket_of(param) in ahead:  # others stay: a hook steps units that backward has left
                engine.schedule.drop_prefetched()
    check_unaveraged(optimizer)
    if len(args) < 2 and kwargs.get("closure") is None:
        _check_any_gradient(optimizer)


def _refuse_inside(engine: Engine, optimizer: torch.optim.Optimizer, caller: str) -> None:
    """Raise where the rest of a forward that is running would compute with the weights from before.

    Raises:
        RuntimeError: naming a parameter of its unit.
    """
    called = partial(count_calls, thread=engine.thread)  # a hook's may be a device's
    running = [u for u in engine.schedule.active if u.run.calls and called(u.links.heads)]
    held = {bucket: unit for unit in running for bucket in unit.gathered if not bucket.in_place}
    for param in parameters_of(optimizer):
        bucket = bucket_of(param) if held else None
        with raw():
            is_stepped = get_grad(param) is not None
        if is_stepped and bucket in held:
            spec = (entry_of(param) or bucket.entries[0]).spec
            raise RuntimeError(
                f"{caller} was called inside the forward of unit {held[bucket].name!r} (or one of "
                f"methods=), where its parameters, such as {spec.fqn!r}, are gathered: what that "
                "computes next would use the weights from before the step. Step after the "
                "forward, or let a module around the units, which is none itself, run both."
            )


def _refuse_fused(optimizer: torch.optim.Optimizer, caller: str) -> None:
    """Raise where slices of other lengths would be stepped with other bits (``deterministic=``).

    On a CPU torch's fused kernels round the last elements of a tensor otherwise than the rest.

    Raises:
        RuntimeError: naming a parameter.
    """
    deterministic = {
        id(bucket.residence): bucket.mesh.microbatches
        for unit in list_all_units()
        for bucket in unit.buckets
        if bucket.mesh.microbatches is not None and bucket.stored.device.type == "cpu"
    }
    if not deterministic:
        return
    for spec in map(spec_of, filter(is_sharded_parameter, parameters_of(optimizer))):
        if (chosen := deterministic.get(id(spec.residence))) is not None:
            raise RuntimeError(
                f"{caller}: it has fused=True and was given {spec.fqn!r} (unit {spec.unit!r}), "
                f"which was sharded with deterministic={chosen}; fused steps on a CPU "
                "round by the length of a slice, and so by the number of ranks. Pass foreach=True "
                "in place of fused=True."
            )


def _refuse_torchao(optimizer: torch.optim.Optimizer) -> None:
    """Raise where its compiled step would be given sharded parameters.

    Raises:
        RuntimeError: naming one.
    """
    for param in filter(is_sharded_parameter, parameters_of(optimizer)):
        raise RuntimeError(
            f"{type(optimizer).__name__}.step(): it was given {spec_of(param).fqn!r} (unit "
            f"{spec_of(param).unit!r}), which is sharded. {QUANTIZING}"
        )


def _check_any_gradient(optimizer: torch.optim.Optimizer) -> None:
    """Raise when no parameter has a gradient, though a sharded one is to be trained."""
    params = parameters_of(optimizer)
    with raw():
        if any(get_grad(param) is not None for param in params):
            return
        sharded = [param for param in params if is_sharded_parameter(param)]
        idle = next((param for param in sharded if requires_grad(param)), None)
    if not sharded and not any(map(stands_for_matrix, params)):
        _check_other_parameters(optimizer, params)
    if idle is not None:
        spec = spec_of(idle)
        raise RuntimeError(
            f"{type(optimizer).__name__}.step(): no parameter has a gradient, so nothing would be "
            f"trained; found .grad None for all, {spec.fqn!r} (unit {spec.unit!r}) among them. "
            "Call loss.backward() between zero_grad() and step(), with a loss that depends on them."
        )


def _list_models(engine: Engine) -> list[set[Unit]]:
    """What may be the units of one model: all, those in an outermost unit, and all but those."""
    inside = {unit: set(list_nested(unit)) for unit in engine.units}
    covered = {inner for unit, found in inside.items() for inner in found - {unit}}
    models = [found for unit, found in inside.items() if unit not in covered]
    every = set(engine.units)
    return [every, *models, *(every - model for model in models)]


def _check_other_parameters(
    optimizer: torch.optim.Optimizer, params: Sequence[torch.Tensor]
) -> None:
    """Raise when an optimizer holds a plain copy of the model that has the gradients.

    That is when none of its parameters has a gradient, and those of a sharded model, which have,
    are as many of the same shapes.
    """
    shapes = Counter(tuple(param.shape) for param in params)
    for units in (model for engine in here.engines.values() for model in _list_models(engine)):
        with raw():
            trained = [
                entry.spec
                for unit in units
                for entry in unit.entries
                if get_grad(entry.param) is not None
            ]
        if trained and Counter(tuple(spec.shape) for spec in trained) == shapes:
            raise RuntimeError(
                f"{type(optimizer).__name__}.step(): it holds parameters without gradients that "
                f"have the shapes of the sharded ones, whose gradients it does not see: "
                f"{trained[0].fqn!r} (unit {trained[0].unit!r}) is among these. It was built over "
                "a copy of the model, or over the model that a copy was sharded from. Build it "
                "over model.parameters() of the sharded model."
            )
