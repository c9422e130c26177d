"""How weights come to be: materialised from the meta device, taken from rank 0, seeded by name.

A value that nobody has written is filled with a mark (NaN), so that what is left for loading is
recognised later, however it is written.
"""

from __future__ import annotations

import hashlib
import weakref
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from numbers import Integral
from typing import Any, cast

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from fsdp_compose.base.arguments import check_function, check_kind, check_module
from fsdp_compose.base.exchange import swap_contents
from fsdp_compose.base.mesh import Mesh
from fsdp_compose.base.strides import as_bytes, flatten, shown_once, storage_order
from fsdp_compose.base.torch_private import (
    buffer_slots,
    non_persistent,
    parameter_slots,
    read_version,
    set_local_part,
)
from fsdp_compose.base.unwritten import UnwrittenMark, is_unwritten, mark_unwritten
from fsdp_compose.comm import collectives as comm
from fsdp_compose.construct.names import find_holders, walk_named
from fsdp_compose.construct.plans import UnitPlan
from fsdp_compose.construct.tensor_parallel import find_parallel
from fsdp_compose.sharded import (
    Parallel,
    dense_of,
    find_wrapper,
    is_sharded,
    like_dtensor,
    part_of,
    tensors_in,
)

InitFn = Callable[[nn.Module], object]

CHUNK_BYTES = 250 << 20


@torch.no_grad()
def broadcast_tensors(
    tensors: Iterable[torch.Tensor], mesh: Mesh, chunk_bytes: int = CHUNK_BYTES
) -> None:
    """Overwrite tensors of any dtype and strides with those of the mesh's first rank.

    Small ones travel together and large ones in pieces, ``chunk_bytes`` at a time.
    """
    if not mesh.groups:
        return
    held = [dense.detach() for tensor in tensors for dense in tensors_in(tensor)]
    given = [tensor for tensor in held if tensor.numel()]
    with torch.inference_mode(any(tensor.is_inference() for tensor in given)):  # to write these
        own = [tensor.resolve_conj().resolve_neg() for tensor in given]
        flats = [flatten(tensor, storage_order(tensor)) for tensor in own]
        _broadcast_flat(flats, mesh, chunk_bytes)
        for tensor, source, flat in zip(given, own, flats, strict=True):
            if flat.data_ptr() != tensor.data_ptr():
                once = shown_once(tensor)
                value = flat.as_strided(tensor.shape, storage_order(source))
                tensor[once].copy_(value[once])


def _broadcast_flat(flats: list[torch.Tensor], mesh: Mesh, chunk_bytes: int) -> None:
    pieces = [piece for flat in flats for piece in as_bytes(flat).split(chunk_bytes)]
    size = min(chunk_bytes, sum(piece.numel() for piece in pieces))
    room = torch.empty(size, dtype=torch.uint8, device=mesh.device)
    message: list[torch.Tensor] = []
    used = 0
    for piece in pieces:
        if used + piece.numel() > size:
            _send_message(room[:used], message, mesh)
            message, used = [], 0
        message.append(piece)
        used += piece.numel()
    _send_message(room[:used], message, mesh)


def _send_message(room: torch.Tensor, message: list[torch.Tensor], mesh: Mesh) -> None:
    places = room.split([piece.numel() for piece in message])
    for place, piece in zip(places, message, strict=True):
        place.copy_(piece)
    for group in mesh.groups:
        comm.broadcast(room, group)
    for place, piece in zip(places, message, strict=True):
        piece.copy_(place)


def is_on_meta(modules: Any) -> bool:
    """Whether a parameter or buffer of the modules is on the meta device."""
    return isinstance(modules, Sequence) and any(
        tensor.is_meta
        for module in modules
        if isinstance(module, nn.Module)
        for tensor in (*module.parameters(), *module.buffers())
    )


def initialise(plan: UnitPlan, init_fn: InitFn | None) -> set[int]:
    """Give the unit's meta parameters and buffers memory, and initialise them.

    The objects stay the same. Each submodule that has some of them is given to ``init_fn``, or its
    ``reset_parameters`` is called; what it holds besides them keeps its value. A tied parameter is
    initialised once, by the first module that has it. An ``init_fn`` that leaves some unwritten is
    called once more with those on the meta device: one that was written for FSDP1 tests for that,
    and puts memory there itself.

    Returns:
        Ids of the tensors that were left unwritten.

    Raises:
        ValueError: a module wrote what a module inside it had in memory, such as loaded weights.
    """
    own = {id(item.param) for bucket in plan.buckets for item in bucket.found}
    fresh: dict[int, torch.Tensor] = {}
    makers: dict[int, nn.Module] = {}  # by tensor: who initialises it
    for _, submodule in _members(plan):
        for values in (parameter_slots(submodule), buffer_slots(submodule)):
            for tensor in values.values():
                wanted = tensor is not None and tensor.is_meta
                if wanted and (id(tensor) in own or not isinstance(tensor, nn.Parameter)):
                    fresh.setdefault(id(tensor), tensor)
                    makers.setdefault(id(tensor), submodule)
    for item in (found for bucket in plan.buckets for found in bucket.found):
        if item.param.is_meta and id(item.param) not in fresh:  # ``refresh`` finds it in a module
            fresh[id(item.param)] = item.param  # that the unit had, whose weights are kept
            if init_fn is not None and (module := item.slots[0].module()) is not None:
                makers[id(item.param)] = module
    for tensor in fresh.values():
        allocate(tensor, plan.options.device)
    marks = {key: UnwrittenMark(dense_of(tensor)) for key, tensor in fresh.items()}
    if isinstance(init_fn, Seeded):
        makers.update((key, init_fn.maker(key)) for key in makers if init_fn.knows(key))
    for maker in dict.fromkeys(makers.values()):
        kept = {key for key, module in makers.items() if module is maker}
        loaded = [*_list_loaded(maker, fresh)]
        with only(maker, kept, plan.options.device, fresh=True), torch.no_grad():
            _initialise_module(maker, init_fn)
        left = {key for key in kept if marks[key].is_on(dense_of(fresh[key]))}
        if left and init_fn is not None and not isinstance(init_fn, Seeded):
            with only(maker, kept, plan.options.device, left, fresh=True), torch.no_grad():
                _initialise_module(maker, init_fn)
        for name, tensor, version in loaded:
            if read_version(tensor) != version:
                raise ValueError(
                    f"fully_shard: initialising {type(maker).__name__} of unit {plan.name!r}, "
                    f"which has tensors on the meta device, wrote {name!r} inside it too, which "
                    "was in memory already, so its values are lost. Load it after fully_shard, or "
                    "pass a param_init_fn(module) that writes only what the module holds itself."
                )
    return {key for key, mark in marks.items() if mark.is_on(dense_of(fresh[key]))}


def require_filled(plan: UnitPlan, left: set[int]) -> None:
    """Raise for a buffer among those ``left`` unwritten, by id, that no state dict will bring.

    Raises:
        ValueError: naming it.
    """
    for path, submodule in _members(plan):
        for key in non_persistent(submodule):
            if id(buffer_slots(submodule).get(key)) in left:
                is_asked = plan.options.param_init_fn is not None
                raise ValueError(
                    f"fully_shard: buffer {f'{path}.{key}' if path else key!r} of unit "
                    f"{plan.name!r} was on the meta device, and nothing has filled it: it is not "
                    f"in the state dict, and {type(submodule).__name__} "
                    f"{'is not initialised by param_init_fn' if is_asked else 'has no'} "
                    "reset_parameters that does. Fill it in param_init_fn(module)."
                )


def _members(plan: UnitPlan) -> list[tuple[str, nn.Module]]:
    return [member for module in plan.modules for member in plan.managed(module)]


def allocate(tensor: torch.Tensor, device: torch.device) -> None:
    """Move a meta tensor to ``device`` in place, marked as unwritten."""
    wrapper = find_wrapper(tensor)
    twin = torch.empty_like(dense_of(tensor), device=device, requires_grad=False)
    mark_unwritten(twin)
    if wrapper is not None:
        twin = wrapper.build(twin)
    if isinstance(tensor, DTensor):
        twin = like_dtensor(tensor, twin)
    twin.requires_grad_(tensor.requires_grad)
    if isinstance(tensor, nn.Parameter):
        tensor.grad = None
    swap_contents(tensor, twin)
    if isinstance(tensor, DTensor):
        set_local_part(tensor, part_of(twin))
    elif wrapper is not None:
        tensor.__dict__.update(vars(twin))


@contextmanager
def only(
    module: nn.Module,
    kept: set[int],
    device: torch.device,
    on_meta: Collection[int] = (),
    fresh: bool = False,
) -> Iterator[None]:
    """Let ``module`` write the tensors ``kept``, by id, and copies instead of others.

    What it puts in the place of a kept tensor is copied into it. Of the kept ones it sees those in
    ``on_meta`` on the meta device. In the place of one that tensor parallelism split it finds the
    whole, so that the part has the numbers that the plain model has there: on a CPU torch gives
    every rank's part the same ones. ``fresh`` says that nothing was written into the kept tensors
    yet, which spares gathering the whole.
    """
    slots = (parameter_slots(module), buffer_slots(module))
    before = [dict(values) for values in slots]
    split: dict[int, Parallel] = {}
    for values in slots:
        for name, tensor in values.items():
            if tensor is None or (id(tensor) in kept and is_sharded(tensor)):
                continue
            if id(tensor) not in kept:
                values[name] = _make_like(tensor, _copy_of(tensor, device), False)
            elif isinstance(tensor, DTensor) and not tensor.is_meta:
                split[id(tensor)] = _parallel_of(tensor, name, module)
                values[name] = _whole_of(tensor, split[id(tensor)], device, fresh)
            if id(tensor) in on_meta:
                outline = torch.empty_like(values[name], device="meta", requires_grad=False)
                values[name] = _make_like(tensor, outline, tensor.requires_grad)
    try:
        yield
        for values, originals in zip(slots, before, strict=True):
            for name, tensor in originals.items():
                given = values.get(name)
                if id(tensor) not in kept or given is tensor or given is None or given.is_meta:
                    continue  # it was written itself, or left as it was shown
                if given.shape != tensor.shape:
                    raise ValueError(
                        f"fully_shard: initialisation replaced {name!r} of "
                        f"{type(module).__name__}, {tuple(tensor.shape)}, with a tensor of shape "
                        f"{tuple(given.shape)}; write into it instead."
                    )
                with torch.no_grad():
                    if id(tensor) not in split:
                        tensor.copy_(given)
                    elif not (fresh and is_unwritten(given)):
                        part_of(tensor).copy_(split[id(tensor)].cut(given))
    finally:
        for values, originals in zip(slots, before, strict=True):
            values.update(originals)


def _make_like(tensor: torch.Tensor, data: torch.Tensor, requires_grad: bool) -> torch.Tensor:
    """``data`` as what ``tensor`` is: a parameter or a plain tensor."""
    return nn.Parameter(data, requires_grad) if isinstance(tensor, nn.Parameter) else data


def _copy_of(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Its values to read, such as a loaded weight's; marked where they are elsewhere too."""
    if tensor.is_meta or is_sharded(tensor) or isinstance(tensor, DTensor):
        copied = torch.empty(tensor.shape, dtype=tensor.dtype, device=device)
        mark_unwritten(copied)
        return copied
    return tensor.detach().to(device, copy=True)


def _parallel_of(tensor: torch.Tensor, name: str, module: nn.Module) -> Parallel:
    parallel = find_parallel(cast("nn.Parameter", tensor), name, type(module).__name__)
    assert parallel is not None
    return parallel


def _whole_of(
    tensor: DTensor, parallel: Parallel, device: torch.device, fresh: bool
) -> torch.Tensor:
    """A plain tensor, or parameter, of the whole shape; a collective unless it is ``fresh``."""
    whole = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=device)
    if fresh:
        mark_unwritten(whole)
    else:
        with torch.no_grad():
            whole.copy_(parallel.assemble(part_of(tensor).detach()))
    return _make_like(tensor, whole, tensor.requires_grad)


def _list_loaded(
    maker: nn.Module, fresh: Mapping[int, torch.Tensor]
) -> Iterator[tuple[str, torch.Tensor, int]]:
    """(name, tensor, version) of plain ones below ``maker`` that nobody is to initialise."""
    for path, submodule in maker.named_modules():
        for values in (parameter_slots(submodule), buffer_slots(submodule)):
            for name, tensor in values.items() if submodule is not maker else ():
                if tensor is None or id(tensor) in fresh or tensor.is_meta or is_sharded(tensor):
                    continue
                if not tensor.is_inference():
                    yield f"{path}.{name}", tensor, read_version(tensor)


def _initialise_module(module: nn.Module, init_fn: InitFn | None) -> None:
    if init_fn is not None:
        init_fn(module)
        return
    reset = getattr(module, "reset_parameters", None)
    if callable(reset):
        reset()


class Seeded:
    """An initialiser whose weights depend on the seed and each module's name alone."""

    def __init__(self, module: nn.Module, seed: int, init: InitFn | None) -> None:
        self.seed, self.init = seed, init
        self._names: weakref.WeakKeyDictionary[nn.Module, str] = weakref.WeakKeyDictionary()
        for name, submodule in walk_named(module):
            self._names.setdefault(submodule, name)
        self._makers = {
            key: (name, weakref.ref(maker)) for key, (name, maker) in find_holders(module).items()
        }

    def knows(self, key: int) -> bool:
        """Whether the tensor with this id was in the model."""
        return key in self._makers

    def maker(self, key: int) -> nn.Module:
        """The module that initialises the tensor with this id."""
        maker = self._makers[key][1]()
        assert maker is not None, "seeded_init: the model it was made for is gone"
        return maker

    def __call__(self, module: nn.Module) -> None:
        if module not in self._names:
            raise ValueError(
                f"seeded_init: {type(module).__name__} is not in the model it was made for; pass "
                "the outermost module to seeded_init(model, seed), after adding all others to it."
            )
        name = self._names[module]
        tensors = [
            tensor
            for values in (parameter_slots(module), buffer_slots(module))
            for tensor in values.values()
            if tensor is not None
        ]
        kept = {id(t) for t in tensors if not self.knows(id(t)) or self.maker(id(t)) is module}
        device = next((t.device for t in tensors if not t.is_meta), torch.device("cpu"))
        with only(module, kept, device), _seed_generators(device, self.seed, name), torch.no_grad():
            _initialise_module(module, self.init)


def seeded_init(module: nn.Module, seed: int, init: InitFn | None = None) -> Seeded:
    """A ``param_init_fn`` that gives the same weights for every world size and choice of units.

    Each submodule is initialised with random numbers of its own, which follow from ``seed`` and its
    name in ``module``. ``module.apply(seeded_init(module, seed))`` gives a plain module the same
    weights, and one whose layers tensor parallelism split its parts of them.

    Args:
        module: the outermost module, from which names are taken.
        seed: any integer.
        init: called with each submodule that has parameters or buffers of its own;
            ``reset_parameters`` where None.

    Example:
        >>> with torch.device("meta"):
        ...     model = nn.Linear(2, 2)
        >>> model = fully_shard(model, param_init_fn=seeded_init(model, seed=0))
        >>> plain = nn.Linear(2, 2)
        >>> _ = plain.apply(seeded_init(plain, seed=0))
        >>> torch.equal(model.weight.full_tensor(), plain.weight)
        True
    """
    check_module("seeded_init", module)
    check_kind("seeded_init", "seed", seed, Integral, "an integer")
    if init is not None:
        check_function("seeded_init", "init", init, "(module)")
    return Seeded(module, seed, init)


@contextmanager
def _seed_generators(device: torch.device, seed: int, name: str) -> Iterator[None]:
    """Random numbers that follow from ``seed`` and ``name``, on the CPU and ``device``."""
    digest = hashlib.blake2b(f"{seed}\0{name}".encode(), digest_size=8).digest()
    number = int.from_bytes(digest, "little")
    devices: list[Any] = [] if device.type == "cpu" else [device]
    kind = "cuda" if device.type == "cpu" else device.type
    with torch.random.fork_rng(devices=devices, device_type=kind):
        torch.default_generator.manual_seed(number)
        if devices:
            with torch.get_device_module(device).device(device):
                torch.get_device_module(device).manual_seed(number)
        yield
