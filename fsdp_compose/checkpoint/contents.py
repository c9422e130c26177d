"""What a module's state dict holds, by clean name, and its full tensors, one bucket at a time."""

from __future__ import annotations

import contextlib
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from fsdp_compose.base.torch_private import (
    buffer_slots,
    has_foreign_load_hooks,
    non_persistent,
    parameter_slots,
)
from fsdp_compose.buckets.bucket import Bucket
from fsdp_compose.buckets.entries import entry_of, find_entry
from fsdp_compose.buckets.gather import gather_flat
from fsdp_compose.checkpoint.values import gather_whole
from fsdp_compose.construct.names import name_cleaner, path_cleaner
from fsdp_compose.construct.tensor_parallel import check_declared
from fsdp_compose.core.guards.failed_steps import clear_failed_steps
from fsdp_compose.core.guards.moved_parameters import shard_of
from fsdp_compose.core.guards.replaced_parameters import check_place
from fsdp_compose.core.guards.units import units_holding
from fsdp_compose.core.state import Unit, owner_of
from fsdp_compose.scopes.open_scope import Scope
from fsdp_compose.sharded import is_sharded

CHECKPOINTED = "_checkpoint_wrapped_module."
"""What activation checkpointing puts into the names of what it wraps."""

_EXTRA_STATE = "_extra_state"
"""The name under which torch keeps what ``get_extra_state`` returned."""

_plain: ContextVar[bool] = ContextVar("fsdp_compose_plain_state_dict", default=False)


@contextlib.contextmanager
def without_our_hooks() -> Iterator[None]:
    """Scope in which ``module.state_dict()`` and ``load_state_dict()`` run without our hooks."""
    token = _plain.set(True)
    try:
        yield
    finally:
        _plain.reset(token)


def are_our_hooks_off() -> bool:
    return _plain.get()


@dataclass(frozen=True)
class Contents:
    """What a module's state dict holds.

    Attributes:
        module: the module.
        values: clean FQN -> the sharded leaf, or the buffer, plain parameter or extra state, live;
            in the order of ``module.state_dict()``.
        native: clean FQN -> the key that ``module.load_state_dict`` wants.
        metadata: versions of the submodules, as ``state_dict()._metadata``, by clean name.
    """

    module: nn.Module
    values: dict[str, Any]
    native: dict[str, str]
    metadata: OrderedDict[str, Any]


def contents_of(module: nn.Module) -> Contents:
    """Walk ``module`` as its own ``state_dict`` does; parameters are leaves even while gathered."""
    refuse_writeback(units_holding(module))
    with without_our_hooks():
        native = module.state_dict(keep_vars=True)
    check_declared(native)
    leaves, clean = gathered_leaves(module), name_cleaner(module)
    values: dict[str, Any] = {}
    keys: dict[str, str] = {}
    for key, value in native.items():
        name = clean(key)
        values[name] = leaves.get(id(value), value)
        keys[name] = key
    versions = getattr(native, "_metadata", {})
    metadata = OrderedDict(zip(map(path_cleaner(module), versions), versions.values(), strict=True))
    return Contents(module, values, keys, metadata)


def contents_to_load(module: nn.Module) -> Contents:
    """What loading writes: each parameter and buffer itself, whatever hooks make of its value."""
    slots = slots_to_load(module)
    leaves, clean = gathered_leaves(module), name_cleaner(module)
    values = {clean(key): leaves.get(id(value), value) for key, value in slots.items()}
    return Contents(module, values, {clean(key): key for key in slots}, OrderedDict())


def loads_by_own_code(module: nn.Module) -> bool:
    """Whether the module's own code changes what it is given to load, in hooks or around them."""
    is_torchs = type(module).load_state_dict is nn.Module.load_state_dict
    return not is_torchs or changes_keys_on_load(module)


def changes_keys_on_load(module: nn.Module) -> bool:
    """Whether a submodule's own code changes what is loaded, so that only torch knows what fits."""
    return any(map(changes_what_it_loads, module.modules()))


def changes_what_it_loads(module: nn.Module) -> bool:
    """Whether a module has load hooks, or a ``_load_from_state_dict``, that are not torch's."""
    is_torchs = type(module).__module__.startswith("torch.distributed.algorithms")
    return not is_torchs and has_foreign_load_hooks(module)


def slots_to_load(module: nn.Module) -> dict[str, Any]:
    """What ``module.load_state_dict`` writes, by its own keys; None for extra state.

    No hook of the user's runs: what those of ``state_dict`` rename, replace, add or leave out is
    not what a module has.
    """
    slots: dict[str, Any] = {}
    for path, inner in module.named_modules(remove_duplicate=False):
        prefix = f"{path}.".replace(CHECKPOINTED, "") if path else ""
        left_out = non_persistent(inner)
        buffers = {k: v for k, v in buffer_slots(inner).items() if k not in left_out}
        for name, value in {**parameter_slots(inner), **buffers}.items():
            if value is not None:
                slots[prefix + name] = value
        if type(inner).set_extra_state is not nn.Module.set_extra_state:
            slots[prefix + _EXTRA_STATE] = None
    check_declared(slots)
    return slots


def gathered_leaves(module: nn.Module) -> dict[int, nn.Parameter]:
    """The sharded parameter behind each full one that a module holds now, by id of the full one.

    Raises:
        RuntimeError: a parameter was replaced by a tensor since it was sharded.
    """
    found: dict[int, nn.Parameter] = {}
    for unit in units_holding(module):
        for values, name, index in unit.links.places:
            leaf = unit.entries[index].param
            if values.get(name) is not leaf and isinstance(values.get(name), torch.Tensor):
                check_place(unit, values, name, index)
                found[id(values[name])] = leaf
    return found


def require_released(what: str, module: nn.Module) -> None:
    """Raise where ``module`` holds full parameters now, which slices would be loaded into.

    Args:
        what: the function that was called.

    Raises:
        RuntimeError: it does; or a forward was interrupted, see ``clear_failed_steps``.
    """
    clear_failed_steps(units_holding(module))
    if gathered_leaves(module):
        raise RuntimeError(
            f"{what}: {type(module).__name__} is gathered now; leave the scope or the forward "
            "first, or call reshard where unshard was called."
        )


def refuse_writeback(units: Iterable[Unit]) -> None:
    """Raise inside ``gathered(writeback=True)``, whose edits are not in the slices yet.

    Raises:
        RuntimeError: naming the first unit whose scope that is.
    """
    for unit in units:
        scope = unit.opened
        while scope is not None:
            if isinstance(scope, Scope) and scope.options.writeback:
                raise RuntimeError(
                    f"the state of unit {unit.name!r} was asked for inside "
                    "gathered(writeback=True), whose edits reach the slices when the scope ends, "
                    "so they would be left out; leave the scope first."
                )
            scope = scope.outer


def visit_full(
    leaves: Iterable[nn.Parameter], visit: Callable[[nn.Parameter, torch.Tensor], None]
) -> None:
    """Call ``visit`` with each leaf and its full tensor, in the parameter's shape and strides.

    A parameter that tensor parallelism split is put together too, and a slice that a state-dict
    hook made of a leaf is gathered by itself. The tensor is valid during the call only. Every rank
    must pass the same leaves.
    """
    by_bucket: dict[int, tuple[Bucket, list[nn.Parameter]]] = {}
    for leaf in {id(leaf): leaf for leaf in leaves}.values():
        entry = entry_of(leaf)
        if entry is None:
            visit(leaf, gather_whole(leaf.detach()))
            continue
        bucket = owner_of(entry)
        by_bucket.setdefault(id(bucket), (bucket, []))[1].append(leaf)
    for bucket, inside in by_bucket.values():
        flat = gather_bucket(bucket, shard_of(bucket))
        for leaf in inside:
            visit(leaf, view_parameter(bucket, flat, find_entry(leaf).index))
        del flat


def visit_values(values: Mapping[str, Any], visit: Callable[[str, torch.Tensor], None]) -> None:
    """Call ``visit`` with each name and its full tensor, as ``visit_full`` does; plain ones last.

    What is no tensor is left out.
    """
    names: dict[int, list[str]] = {}
    for name, value in values.items():
        names.setdefault(id(value), []).append(name)

    def visit_names(leaf: nn.Parameter, full: torch.Tensor) -> None:
        for name in names[id(leaf)]:
            visit(name, full)

    visit_full(filter(is_sharded, values.values()), visit_names)
    for name, value in values.items():
        if isinstance(value, torch.Tensor) and not is_sharded(value):
            visit(name, gather_whole(value.detach()))


def gather_bucket(bucket: Bucket, shard: torch.Tensor) -> torch.Tensor:
    """Gather every rank's ``shard``, cut as the bucket is, on the device that communicates."""
    with torch.no_grad():
        shard = shard.detach().to(bucket.mesh.device)
        return gather_flat(bucket, shard, shard.dtype, "a state dict")


def view_parameter(bucket: Bucket, flat: torch.Tensor, index: int) -> torch.Tensor:
    """View parameter ``index`` in a gathered flat tensor; assemble it if it was split."""
    spec = bucket.entries[index].spec
    part = flat.as_strided(spec.shape, spec.stride, spec.offset)
    return part if spec.parallel is None else spec.parallel.assemble(part)


def copy_tensor(tensor: torch.Tensor, cpu: bool) -> torch.Tensor:
    """Copy a tensor, to the CPU if asked for; the copy shares no memory."""
    source = tensor.detach()
    return source.to("cpu", copy=True) if cpu else source.clone()
