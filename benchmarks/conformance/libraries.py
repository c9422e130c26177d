"""Four libraries behind one small face; what each does is what its own documentation says.

A row asks for what it needs: ``lib.shard``, ``lib.full``, ``lib.grads``, ``lib.pair``. Where the
libraries' ways differ in one row alone, the row writes each with ``lib.pick``.
"""

from __future__ import annotations

import contextlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint.state_dict as dcp_state
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import (
    CPUOffload,
    CPUOffloadPolicy,
    MixedPrecisionPolicy,
    ShardingStrategy,
)
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP1
from torch.distributed.fsdp import MixedPrecision as Mixed1
from torch.distributed.fsdp import fully_shard as fsdp2
from torch.distributed.fsdp.wrap import CustomPolicy
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

import fsdp_compose as fc

__all__ = ["LIBRARIES", "Library", "NotApplicable", "Pair", "Wrong", "data", "square", "world"]


class NotApplicable(Exception):
    """The library has no such feature; the text says why."""


class Wrong(Exception):
    """The program ran to its end with another result than one process, and nobody was told."""


def world() -> int:
    return dist.get_world_size()


def data(seed: int, rank: int | None = None, *shape: int) -> Tensor:
    """Random input that depends on the seed and the rank."""
    rank = dist.get_rank() if rank is None else rank
    generator = torch.Generator().manual_seed(1000 * seed + rank)
    return torch.randn(shape or (3, 6), generator=generator, dtype=torch.float64)


def square(model: Callable[..., Any], x: Tensor) -> Tensor:
    """The usual loss: the mean square of the output."""
    return model(x).square().mean()


def _clean(name: str) -> str:
    while name.startswith("module."):
        name = name.removeprefix("module.")
    return name.replace("_fsdp_wrapped_module.", "")


class Library(ABC):
    """What the libraries have in common; each one below says what it does in its own way."""

    name = ""
    mixed: Callable[..., Any]

    def pick(self, missing: str = "has no such feature", **ways: Any) -> Any:
        """The value given for this library; ``torch=`` stands for the three of torch's."""
        if self.name in ways:
            return ways[self.name]
        if self.name != "ours" and "torch" in ways:
            return ways["torch"]
        raise NotApplicable(missing)

    @abstractmethod
    def shard(self, model: nn.Module, units: Iterable[nn.Module] = (), **options: Any) -> Any:
        """``model`` as this library trains it, with ``units`` as units of their own."""

    def pair(self, build: Callable[[], nn.Module], units: Any = None, **options: Any) -> Pair:
        """A model of this library beside the plain one that it must equal."""
        return Pair(self, build, units, **options)

    def full(self, model: nn.Module) -> dict[str, Tensor]:
        """Full parameters by name."""
        return {_clean(n): _whole(p) for n, p in model.named_parameters()}

    def grads(self, model: nn.Module) -> dict[str, Tensor | None]:
        """Full gradients by parameter's name; None where there is none."""
        return {
            _clean(n): None if p.grad is None else _whole(p.grad)
            for n, p in model.named_parameters()
        }

    def inner(self, model: Any) -> Any:
        """The user's module, below a wrapper."""
        return model

    def clip(self, model: Any, norm: float) -> Any:
        return nn.utils.clip_grad_norm_(model.parameters(), norm)

    @abstractmethod
    def gathered(self, model: Any, write: bool = False) -> Any:
        """A scope in which the user's modules hold full parameters."""

    @abstractmethod
    def no_sync(self, model: Any) -> Any:
        """A scope in which backwards reduce nothing."""

    def state(self, model: Any) -> dict[str, Tensor]:
        """A full state dict on every rank, by torch's own function for all its libraries."""
        options = dcp_state.StateDictOptions(full_state_dict=True, cpu_offload=False)
        return dcp_state.get_model_state_dict(model, options=options)

    def load(self, model: Any, state: dict[str, Tensor]) -> None:
        """Load a plain full state dict, which every rank has."""
        options = dcp_state.StateDictOptions(full_state_dict=True)
        dcp_state.set_model_state_dict(model, state, options=options)


def _whole(tensor: Tensor) -> Tensor:
    if isinstance(tensor, DTensor) or type(tensor).__module__.startswith("fsdp_compose"):
        return tensor.full_tensor().detach().clone()  # type: ignore[attr-defined]
    return tensor.detach().clone()


class Ours(Library):
    name = "ours"

    def shard(self, model: nn.Module, units: Iterable[nn.Module] = (), **options: Any) -> Any:
        options.pop("unused", None)
        if options.pop("kept", False):
            options["reshard_after_forward"] = False
        if (mixed := options.pop("mixed", None)) is not None:
            options["mp_policy"] = fc.MixedPrecision(param_dtype=mixed, reduce_dtype=torch.float32)
        if options.pop("offload", False):
            options["offload_policy"] = fc.Offload(params=True)
        options["init"] = "broadcast" if options.pop("sync", False) else "verify"
        for unit in units:
            fc.fully_shard(unit, **options)
        return fc.fully_shard(model, **options)

    def gathered(self, model: Any, write: bool = False) -> Any:
        return fc.gathered(model, writeback=write)

    def no_sync(self, model: Any) -> Any:
        return fc.no_sync(model)

    def clip(self, model: Any, norm: float) -> Any:
        return fc.clip_grad_norm_(model, norm)

    def state(self, model: Any) -> dict[str, Tensor]:
        return fc.state_dict(model)

    def load(self, model: Any, state: dict[str, Tensor]) -> None:
        fc.load_state_dict(model, state)


class Fsdp2(Library):
    name = "fsdp2"

    def shard(self, model: nn.Module, units: Iterable[nn.Module] = (), **options: Any) -> Any:
        options.pop("unused", None)
        if options.pop("kept", False):
            options["reshard_after_forward"] = False
        if (mixed := options.pop("mixed", None)) is not None:
            policy = MixedPrecisionPolicy(param_dtype=mixed, reduce_dtype=torch.float32)
            options["mp_policy"] = policy
        if options.pop("offload", False):
            options["offload_policy"] = CPUOffloadPolicy(pin_memory=False)
        if options.pop("sync", False):  # its documentation: broadcast before, or load
            for tensor in [*model.parameters(), *model.buffers()]:
                dist.broadcast(tensor.data, 0)
        ignored = {p for m in options.pop("ignored", ()) for p in m.parameters()}
        if ignored:
            options["ignored_params"] = ignored
        mesh = options.pop("mesh", None) or DeviceMesh("cpu", range(world()))
        for unit in units:
            fsdp2(unit, mesh=mesh, **options)
        return fsdp2(model, mesh=mesh, **options)

    @contextlib.contextmanager
    def gathered(self, model: Any, write: bool = False) -> Any:
        if write:
            raise NotApplicable("has no scope that writes back")
        units = [m for m in model.modules() if hasattr(m, "unshard")]
        for unit in units:
            unit.unshard()
        yield
        for unit in units:
            unit.reshard()

    @contextlib.contextmanager
    def no_sync(self, model: Any) -> Any:
        model.set_requires_gradient_sync(False)
        try:
            yield
        finally:
            model.set_requires_gradient_sync(True)


class Fsdp1(Library):
    name = "fsdp1"

    def shard(self, model: nn.Module, units: Iterable[nn.Module] = (), **options: Any) -> Any:
        options.pop("unused", None)
        if options.pop("kept", False):
            options["sharding_strategy"] = ShardingStrategy.SHARD_GRAD_OP
        if (mixed := options.pop("mixed", None)) is not None:
            options["mixed_precision"] = Mixed1(param_dtype=mixed, reduce_dtype=torch.float32)
        if options.pop("offload", False):
            options["cpu_offload"] = CPUOffload(offload_params=True)
        if options.pop("sync", False):
            options["sync_module_states"] = True
        if (ignored := options.pop("ignored", ())) != ():
            options["ignored_modules"] = list(ignored)
        mesh = options.pop("mesh", None)
        if mesh is not None:
            options["device_mesh"] = mesh
            if mesh.ndim == 2:
                options["sharding_strategy"] = ShardingStrategy.HYBRID_SHARD
        chosen = set(units)
        if chosen:
            options["auto_wrap_policy"] = CustomPolicy(lambda m: m in chosen)
        options.setdefault("use_orig_params", True)
        return FSDP1(model, device_id=torch.device("cpu"), **options)

    def inner(self, model: Any) -> Any:
        return model.module

    def full(self, model: nn.Module) -> dict[str, Tensor]:
        with FSDP1.summon_full_params(model, writeback=False):
            return super().full(model)

    def grads(self, model: nn.Module) -> dict[str, Tensor | None]:
        with FSDP1.summon_full_params(model, writeback=False, with_grads=True):
            return super().grads(model)

    def clip(self, model: Any, norm: float) -> Any:
        return model.clip_grad_norm_(norm)

    def gathered(self, model: Any, write: bool = False) -> Any:
        return FSDP1.summon_full_params(model, writeback=write)

    def no_sync(self, model: Any) -> Any:
        return model.no_sync()


class Ddp(Library):
    name = "ddp"

    def shard(self, model: nn.Module, units: Iterable[nn.Module] = (), **options: Any) -> Any:
        if options.pop("mixed", None) is not None:
            raise NotApplicable("keeps parameters in one dtype; autocast instead")
        if options.pop("offload", False):
            raise NotApplicable("does not offload")
        if options.pop("mesh", None) is not None:
            raise NotApplicable("has one axis of ranks")
        options.pop("kept", None)
        options.pop("sync", None)  # always
        if (ignored := options.pop("ignored", ())) != ():
            names = [
                n for n, p in model.named_parameters() for m in ignored if p in set(m.parameters())
            ]
            DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, names)
        unused = options.pop("unused", False)
        return DistributedDataParallel(model, find_unused_parameters=unused, **options)

    def inner(self, model: Any) -> Any:
        return model.module

    def gathered(self, model: Any, write: bool = False) -> Any:
        return contextlib.nullcontext()

    def no_sync(self, model: Any) -> Any:
        return model.no_sync()


LIBRARIES: dict[str, Library] = {lib.name: lib for lib in (Fsdp1(), Fsdp2(), Ddp(), Ours())}


class Pair:
    """A model of a library beside a plain one, trained on the concatenated batch with SGD."""

    def __init__(
        self,
        lib: Library,
        build: Callable[[], nn.Module],
        units: Callable[[Any], Iterable[nn.Module]] | None = None,
        optim: Callable[..., Any] = torch.optim.SGD,
        lr: float = 0.1,
        dtype: torch.dtype = torch.float64,
        **options: Any,
    ) -> None:
        torch.manual_seed(0)
        self.lib, self.plain, self.dtype = lib, build().to(dtype), dtype
        torch.manual_seed(0)
        module = build().to(dtype)  # no copy, whose parameters would share no memory
        if units is None:
            units = lambda m: getattr(m, "blocks", ())  # noqa: E731
        self.model = lib.shard(module, units(module), **options)
        self.make = lambda params: optim(params, lr=lr)
        self.optims = [self.make(m.parameters()) for m in (self.model, self.plain)]

    @property
    def inner(self) -> Any:
        return self.lib.inner(self.model)

    def backward(self, seed: int = 0, loss: Callable[..., Tensor] = square) -> None:
        """Each rank its own part of the batch; the plain model all of them."""
        loss(self.model, data(seed).to(self.dtype)).backward()
        self.plain_backward(seed, loss)

    def plain_backward(self, seed: int = 0, loss: Callable[..., Tensor] = square) -> None:
        for r in range(world()):
            (loss(self.plain, data(seed, r).to(self.dtype)) / world()).backward()

    def step(self) -> None:
        for optim in self.optims:
            optim.step()
            optim.zero_grad()

    def train(self, steps: int = 2, loss: Callable[..., Tensor] = square) -> Pair:
        for seed in range(steps):
            self.backward(seed, loss)
            self.step()
        return self.check()

    def check(self, tolerance: float = 1e-9) -> Pair:
        """Raise Wrong unless the parameters are those of one process."""
        compare(self.lib.full(self.model), dict(self.plain.named_parameters()), tolerance)
        return self

    def check_grads(self, tolerance: float = 1e-9) -> Pair:
        wanted = {n: p.grad for n, p in self.plain.named_parameters()}
        compare(self.lib.grads(self.model), wanted, tolerance)
        return self


def compare(found: Any, wanted: Any, tolerance: float = 1e-9) -> None:
    """Raise Wrong where named tensors differ, one is missing, or one is not finite."""
    if missing := set(wanted) - set(found):
        raise Wrong(f"{sorted(missing)[0]} is missing")
    for name, value in wanted.items():
        other = found[name]
        if (value is None) != (other is None):
            raise Wrong(f"{name} is {'None' if other is None else 'set'}")
        if value is None:
            continue
        if other.shape != value.shape:
            raise Wrong(f"{name} has shape {tuple(other.shape)}, wanted {tuple(value.shape)}")
        error = (other.double() - value.double()).abs().max().item() if value.numel() else 0.0
        if not error <= tolerance:
            raise Wrong(f"{name} is off by {error:.2g}")
