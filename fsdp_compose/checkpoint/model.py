"""Model state: full, sharded or local, out of and into a sharded module.

Keys are those of the plain module. ``"sharded"`` and ``"local"`` communicate nothing; ``"full"``
gathers one bucket at a time. Loading checks everything on every rank before anything is written.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias, get_args

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor

from fsdp_compose.base.arguments import check_flags, check_module
from fsdp_compose.base.group import Group, get_global_rank
from fsdp_compose.base.torch_private import IncompatibleKeys
from fsdp_compose.buckets.entries import find_entry
from fsdp_compose.checkpoint import local
from fsdp_compose.checkpoint.contents import (
    Contents,
    contents_of,
    contents_to_load,
    copy_tensor,
    loads_by_own_code,
    require_released,
    visit_full,
    without_our_hooks,
)
from fsdp_compose.checkpoint.given import GivenFacts, facts_of, spec_or_none
from fsdp_compose.checkpoint.ranks import (
    device_of,
    groups_of,
    meet_in,
    refuse_broadcast,
    refuse_left_out,
)
from fsdp_compose.checkpoint.values import (
    broadcast_state,
    describe_unreadable,
    find_unnamed,
    find_unwritable,
    fit,
    gather_whole,
    is_cut,
    list_problems,
    mark_ready,
    needs_gather,
    show_whole,
    unwrap,
    whole_shape,
)
from fsdp_compose.comm.messages import SharedErrors, raise_on_all
from fsdp_compose.construct.names import (
    clean_keys,
    list_names,
    name_cleaner,
    named_leaves,
    path_cleaner,
)
from fsdp_compose.core.guards.compared_records import compare_records, forget_records
from fsdp_compose.core.guards.moved_parameters import require_all_written
from fsdp_compose.core.guards.units import units_holding
from fsdp_compose.core.state import find_state
from fsdp_compose.sharded import is_sharded

Kind: TypeAlias = Literal["full", "sharded", "local"]


@dataclass(frozen=True)
class StateDictType:
    """What a state dict holds.

    Attributes:
        kind: ``"full"`` plain tensors; ``"sharded"`` slices that know their place; ``"local"`` this
            rank's raw shards, one per bucket.
        cpu_offload: with ``"full"``, put tensors on the CPU as they are gathered.
        rank0_only: with ``"full"``, only rank 0 keeps them; the others get an empty dictionary.

    Raises:
        ValueError: an unknown kind, or an option that does not go with it.
        TypeError: an option is not a boolean.
    """

    kind: Kind = "sharded"
    cpu_offload: bool = False
    rank0_only: bool = False

    def __post_init__(self) -> None:
        if self.kind not in get_args(Kind):
            raise ValueError(f"state dict kind is {self.kind!r}; wanted one of {get_args(Kind)}.")
        check_flags("StateDictType", cpu_offload=self.cpu_offload, rank0_only=self.rank0_only)
        if self.kind != "full" and (self.cpu_offload or self.rank0_only):
            raise ValueError(
                f"cpu_offload and rank0_only go with kind='full', not with {self.kind!r}."
            )


def state_dict(
    module: nn.Module, kind: Kind = "full", *, cpu_offload: bool = False, rank0_only: bool = False
) -> OrderedDict[str, Any]:
    """The module's parameters, buffers and extra state, by FQN, in the plain module's order.

    Args:
        module: sharded as a whole, in part or not at all.
        kind: ``"full"``: plain tensors that share nothing with the model, gathered bucket by
            bucket; every rank must call it. ``"sharded"``: no communication; each parameter is
            this rank's slice, live, and knows its global shape and place; ``full_tensor()`` gathers
            one, ``torch.distributed.checkpoint`` saves all and loads them cut in any other way.
            ``"local"``: no communication; one raw shard per bucket, live, with the layout.
        cpu_offload: with ``"full"``, move each tensor to the CPU before the next bucket.
        rank0_only: with ``"full"``, ranks other than 0 take part and return an empty dictionary.

    Raises:
        ValueError: options that do not go together.
        RuntimeError: ``rank0_only`` would leave out experts that other ranks hold; or ``"local"``
            of a module without the unit that one of its parameters lies in.

    Example:
        >>> model = fully_shard(nn.Linear(3, 2))
        >>> {name: tuple(value.shape) for name, value in state_dict(model).items()}
        {'weight': (2, 3), 'bias': (2,)}
    """
    check_module("state_dict", module)
    wanted = StateDictType(kind, cpu_offload, rank0_only)
    refuse_left_out("state_dict", module, rank0_only, compares=True)
    contents = contents_of(module)
    result: OrderedDict[str, Any] = OrderedDict(contents.values)
    if kind == "full":
        result = _gather_full(module, contents, wanted)
    elif kind == "sharded":
        for name, value in contents.values.items():
            if isinstance(value, Tensor):
                result[name] = show_whole(value) if is_sharded(value) else value.detach()
    else:
        local.require_whole_buckets(module)
        for name, value in contents.values.items():
            if is_sharded(value):
                del result[name]
            elif isinstance(value, Tensor):
                result[name] = value.detach()
        for prefix, unit in local.named_units(module):
            result.update((prefix + k, v) for k, v in local.local_values(unit).items())
    if result:
        result._metadata = contents.metadata  # type: ignore[attr-defined]
    return result


def _gather_full(
    module: nn.Module, contents: Contents, wanted: StateDictType
) -> OrderedDict[str, Any]:
    keep = not wanted.rank0_only or is_first(module)
    copies: dict[int, Tensor] = {}

    def take(leaf: nn.Parameter, full: Tensor) -> None:
        if keep:
            copies[id(leaf)] = copy_tensor(full, wanted.cpu_offload)

    for _, leaf in named_leaves(module):
        if is_sharded(leaf):
            find_entry(leaf)  # raises for copies of parts of a unit; a hook's slices are no leaves
    compare_records(units_holding(module), "state_dict")
    require_all_written(units_holding(module))
    visit_full(filter(is_sharded, contents.values.values()), take)
    result: OrderedDict[str, Any] = OrderedDict()
    if not keep:
        return result
    dtypes = buffer_dtypes(module)
    for name, value in contents.values.items():
        if isinstance(value, Tensor):
            if id(value) not in copies:
                whole, dtype = gather_whole(value.detach()), dtypes.get(name, value.dtype)
                copies[id(value)] = copy_tensor(whole, wanted.cpu_offload).to(dtype)
            value = copies[id(value)].detach()  # tied names share their storage
        result[name] = value
    return result


def is_first(module: nn.Module) -> bool:
    """Whether this is rank 0 of every group the module is cut or copied over."""
    groups = groups_of(module)
    return all(group.rank == 0 for group in groups) if groups else get_global_rank() == 0


def buffer_dtypes(module: nn.Module) -> dict[str, torch.dtype]:
    """Find the dtypes that buffers had before mixed precision cast them, by clean FQN."""
    found: dict[str, torch.dtype] = {}
    clean = name_cleaner(module)
    for path, submodule in module.named_modules():
        state = find_state(submodule)
        if state is not None:
            prefix = f"{path}." if path else ""
            found.update((clean(prefix + k), dtype) for k, dtype in state.buffer_dtypes.items())
    return found


def load_state_dict(
    module: nn.Module,
    state_dict: Mapping[str, Any],
    strict: bool = True,
    *,
    broadcast_from_rank0: bool = False,
) -> IncompatibleKeys:
    """Write ``state_dict`` into the module; every rank must call it.

    Nothing is written unless everything fits on every rank, and parameters stay the same objects.
    Where load hooks of the module's own, or its own ``load_state_dict`` or
    ``_load_from_state_dict``, change what is loaded, they get whole tensors as in a plain module,
    and torch checks what they make of them: names that are left over raise after the rest was
    written.

    Args:
        state_dict: by FQN, with or without ``_orig_mod.`` (``torch.compile``),
            ``_checkpoint_wrapped_module.`` and ``_fsdp_wrapped_module.``; remove the ``module.`` of
            DistributedDataParallel. Values may be plain full tensors, sharded values cut in any
            way, DTensors, or all of ``kind="local"``. A tied parameter may be given under any of
            its names.
        strict: raise for keys that are missing or unexpected.
        broadcast_from_rank0: only rank 0's ``state_dict`` is read; the other ranks' are ignored.
            One tensor at a time is sent.

    Raises:
        RuntimeError: keys, shapes or layouts do not fit, or a value is on the meta device or
            sparse, on any rank; or rank 0's values would replace other ranks' experts.
        TypeError: ``state_dict`` is no dictionary.
        ValueError: two keys mean the same parameter.

    Example:
        >>> model = fully_shard(nn.Linear(3, 2))
        >>> load_state_dict(model, nn.Linear(3, 2).state_dict())
        <All keys matched successfully>
    """
    check_module("load_state_dict", module)
    check_flags("load_state_dict", strict=strict, broadcast_from_rank0=broadcast_from_rank0)
    require_released("load_state_dict", module)
    contents = contents_to_load(module)
    groups = meet_in("load_state_dict", module)
    if broadcast_from_rank0:
        refuse_broadcast("load_state_dict(broadcast_from_rank0=True)", module, groups)
        state_dict = broadcast_state(
            "load_state_dict", state_dict, groups, contents.values.get, device_of(module)
        )
    versions = getattr(state_dict, "_metadata", None)
    custom = loads_by_own_code(module)
    matched = match(module, contents.values, state_dict, strict and not custom, custom, versions)
    if not custom:
        matched.problem = matched.problem or find_unwritable(matched.values, contents.values)
    raise_on_all(take_problem(matched, contents.values), groups, matched.facts, "load_state_dict")
    extra = {k: v for k, v in clean_keys(state_dict, module).items() if k in matched.unexpected}
    left_out = IncompatibleKeys(matched.missing, matched.unexpected)
    with SharedErrors(*groups, what="load_state_dict"):
        left_out = write(
            contents, matched.values, extra if custom else {}, left_out, strict, versions
        )
        if matched.local is not None:
            local.write_local(module, matched.local)
    return left_out


def write(
    contents: Contents,
    values: Mapping[str, Any],
    extra: Mapping[str, Any],
    left_out: IncompatibleKeys,
    strict: bool,
    versions: Any = None,
) -> IncompatibleKeys:
    """Write checked values into the module, through its own ``load_state_dict``.

    Returns ``left_out``, or what torch says where hooks of the user's may know other names.

    Args:
        extra: entries the module has no place for, which a hook of the user's may know.
        left_out: the names that are missing or unexpected without such hooks.
        strict: raise for names that are left over once such hooks have run; where the module has
            none, they were compared before.
        versions: the ``_metadata`` that came with the values, if any.

    Raises:
        RuntimeError: names are left over; the others were written.
    """
    module, native = contents.module, OrderedDict[str, Any]()
    cut = not loads_by_own_code(module)
    for name, value in values.items():
        native[contents.native[name]] = prepare(value, contents.values[name], cut)
    native.update(extra)
    if versions is not None:
        native._metadata = _name_versions(module, versions)  # type: ignore[attr-defined]
    compare = strict and not cut
    with without_our_hooks():
        try:
            told: Any = module.load_state_dict(native, strict=compare)
        except RuntimeError as error:
            if not compare:
                raise
            raise RuntimeError(
                f"load_state_dict: {type(module).__name__} has load hooks of its own, which alone "
                f"know the names that they want, and what fits was loaded. Torch says: {error}\n"
                "Pass strict=False to leave out what does not fit."
            ) from error
    forget_records(units_holding(module))
    if cut:
        return left_out
    if told is None:  # the module's own load_state_dict need not return what torch's does
        return IncompatibleKeys([], [])
    (missing, unexpected), clean = told, name_cleaner(module)
    return IncompatibleKeys([clean(key) for key in missing], [clean(key) for key in unexpected])


def _name_versions(module: nn.Module, versions: Mapping[str, Any]) -> OrderedDict[str, Any]:
    """Versions of submodules by the paths that they have in ``module``, whatever wraps them.

    Torch notes there that a load was told to assign, and would do so in every later one.
    """
    clean = path_cleaner(module)
    known = {
        clean(path): {k: v for k, v in version.items() if k != "assign_to_params_buffers"}
        for path, version in versions.items()
    }
    paths = [path for path, _ in module.named_modules(remove_duplicate=False)]
    return OrderedDict((path, known[clean(path)]) for path in paths if clean(path) in known)


@dataclass
class Matched:
    """Incoming values beside what a module has; nothing is written yet."""

    values: dict[str, Any]
    missing: list[str]
    unexpected: list[str]
    problem: Exception | None
    local: dict[str, Any] | None = None  # raw shards that fit the model
    facts: Callable[[Group], GivenFacts] | None = None  # what must be the same on a group's ranks


def match(
    module: nn.Module,
    current: Mapping[str, Any],
    incoming: Any,
    strict: bool,
    custom: bool,
    versions: object,
) -> Matched:
    """Compare ``incoming`` with what ``module`` has, ``current``; by ``current``'s names.

    Args:
        custom: the module's own code may make what fits of what does not.
        versions: the ``_metadata`` that came with ``incoming``, if any.
    """
    if not isinstance(incoming, Mapping):
        kind = type(incoming).__name__
        wrong = TypeError(f"load_state_dict: got a {kind}; wanted a dictionary by FQN.")
        return Matched({}, [], [], wrong)
    if (other := find_unnamed(incoming)) is not None:
        return Matched({}, [], [], TypeError(f"load_state_dict: {other}"))
    clean = name_cleaner(module)
    try:
        given = clean_keys(incoming, module)
        raw_shards = given if local.is_local(given) else None
        if raw_shards is not None:
            local.check_local(module, raw_shards)
            given = {k: v for k, v in given.items() if not _is_raw(k)}
            given.update((clean(n), v) for n, v in current.items() if is_sharded(v))
    except (RuntimeError, TypeError, ValueError) as error:
        return Matched({}, [], [], error)
    names = {clean(name): name for name in current}
    _complete_ties(current, names, given)
    unexpected = [key for key in given if key not in names]
    missing = [name for name in names if name not in given and not _may_lack(name, versions)]
    # Gathered in the order of the module, whatever order each rank's dictionary has.
    found = {name: given[key] for key, name in names.items() if key in given}
    values = {name: unwrap(value, current[name]) for name, value in found.items()}
    misfits = (_find_misfit(n, v, current[n], custom) for n, v in values.items())
    problems = [problem for problem in misfits if problem is not None]
    if strict and missing:
        advice = "pass strict=False to keep these as they are"
        problems.append(f"missing keys: {list_names(missing, unexpected)}; {advice}")
    if strict and unexpected:
        advice = "pass strict=False to leave them out, as where other ranks alone hold them"
        problems.append(f"unexpected keys: {list_names(unexpected, missing or names)}; {advice}")
    problem: Exception | None = None
    if problems:
        problem = RuntimeError(
            f"load_state_dict: the state does not fit {type(module).__name__}, which is unchanged:"
            f"{list_problems(problems)}"
        )
    return Matched(values, missing, unexpected, problem, raw_shards, facts_of(values, current))


def _is_raw(key: str) -> bool:
    return key.rpartition(".")[2] == local.LAYOUT or local.SHARD in key


def _complete_ties(
    current: Mapping[str, Any], names: Mapping[str, str], given: dict[str, Any]
) -> None:
    """Give a tied parameter's missing names the value of a name that is there."""
    by_tensor: dict[int, list[str]] = {}
    for key, name in names.items():
        if isinstance(current[name], Tensor):
            by_tensor.setdefault(id(current[name]), []).append(key)
    for keys in by_tensor.values():
        present = [key for key in keys if key in given]
        if present:
            given.update((key, given[present[-1]]) for key in keys if key not in given)


def _may_lack(name: str, versions: object) -> bool:
    """BatchNorm's counter is newer than some files, and torch starts it at 0 for those."""
    return name.endswith("num_batches_tracked") and versions is None


def describe_lone_slice(value: Any) -> str | None:
    """Say why a slice that was loaded from one rank's file cannot be gathered; None if it can."""
    spec = value._shard_spec
    if all(group.pg is not None or group.size == 1 for group in spec.whole_groups):
        return None
    return (
        f"is the slice of rank {spec.group.rank} of {spec.group.size} ({spec.held}), loaded "
        "without the other ranks, and this rank holds other elements: save kind='full' or use "
        "save_checkpoint to load it anywhere"
    )


def _find_misfit(name: str, value: Any, current: Any, custom: bool) -> str | None:
    """Why ``value`` cannot be written into ``current``, or None.

    Args:
        custom: the module's own hooks may make what fits of it, and torch checks that.
    """
    if not isinstance(current, Tensor):
        return None
    gathers = is_sharded(value) and needs_gather(value, spec_or_none(current))
    lone = describe_lone_slice(value) if gathers else None
    if lone is not None:
        return f"{name!r} {lone}"
    if custom:
        return None
    if not isinstance(value, Tensor):
        return f"{name!r} is a {type(value).__name__}; wanted a tensor of {tuple(current.shape)}"
    if not _has_shape(value, current):
        shape, want = tuple(whole_shape(value)), tuple(whole_shape(current))
        return f"{name!r} has global shape {shape}; wanted {want}"
    if value.is_complex() and not current.is_complex():
        return f"{name!r} is {value.dtype}; wanted {current.dtype}, which has no imaginary part"
    return None


def take_problem(matched: Matched, current: Mapping[str, Any]) -> Exception | None:
    """Take what is wrong out of ``matched``, or find values that have no numbers to write.

    A raised error keeps the frames that hold ``matched``, so ``matched`` must not hold the error.
    """
    problem, matched.problem = matched.problem, None
    problems = [
        f"{name!r} {why}"
        for name, value in matched.values.items()
        if isinstance(current[name], Tensor)
        and describe_unreadable(current[name]) is None
        and (why := describe_unreadable(value)) is not None
    ]
    if problem is not None or not problems:
        return problem
    what = "load_state_dict: the state cannot be read, the module is unchanged:"
    return RuntimeError(f"{what}{list_problems(problems)}")


def _has_shape(value: Tensor, current: Tensor) -> bool:
    shape = tuple(whole_shape(value))
    return shape == tuple(whole_shape(current)) or (current.ndim == 0 and shape == (1,))


def prepare(value: Any, current: Any, cut: bool = True) -> Any:
    """Convert ``value`` to what ``current`` takes; a collective where ``needs_gather`` says so.

    Args:
        cut: take this rank's slice of a plain tensor; else it stays whole, as hooks of the module's
            expect it, and copying it into ``current`` cuts it.
    """
    if not isinstance(current, Tensor) or not isinstance(value, Tensor) or value is current:
        return value
    if not _has_shape(value, current):  # a hook of the module's makes another of it
        return gather_whole(value)
    if is_sharded(current):
        if not cut and not is_cut(value) and current._shard_spec.parallel is None:
            return mark_ready(value.detach())
        value = value.reshape(()) if current.ndim == 0 != value.ndim else value
        return mark_ready(fit(value, current._shard_spec))
    if isinstance(current, DTensor) and not isinstance(value, DTensor):
        return distribute_tensor(
            gather_whole(value), current.device_mesh, current.placements, src_data_rank=None
        )
    return value if isinstance(current, DTensor) else gather_whole(value)
