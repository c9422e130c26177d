"""What a forward and backward take besides weights and gradients, measured on the meta device.

The module's own forward runs on tensors without memory, under a mode that notes how many bytes
each operator would allocate and when they are freed again. So checkpointing, what autograd saves
and what a backward needs in between are counted as they are; what kernels use inside is not. Where
a forward asks for a number (``.item()``, ``if mask.all()``) it is told 1 or True.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

from fsdp_compose.base.taken_back import take_back
from fsdp_compose.base.torch_private import DispatchMode, fused_attention, read_number
from fsdp_compose.base.tree import find_tensors, map_tensors
from fsdp_compose.report.runs import Recording


@dataclass(frozen=True)
class Activations:
    """Bytes of one rank for the sample that was passed.

    Attributes:
        forward, backward: the most that is there at once in each, weights and their gradients left
            out.
        kept: what is there between them, for backward.
    """

    forward: int
    backward: int
    kept: int


def measure_activations(
    module: nn.Module,
    sample: Any,
    dtypes: Mapping[str, torch.dtype],
    inputs: torch.dtype | None,
    recording: Recording,
) -> Activations:
    """Run ``module`` and its backward on the meta device; nothing of it is changed.

    Args:
        module: not sharded; its parameters may have memory or not.
        sample: positional arguments as a tuple or list, keyword arguments as a dictionary, or one
            tensor. Only their shapes and dtypes matter.
        dtypes: what parameters compute in, by name.
        inputs: what floating-point inputs are cast to; None: they stay.
        recording: gets what forward and backward did with modules.

    Raises:
        ValueError: the forward cannot run without memory.
    """
    try:
        values: dict[str, Tensor] = {}
        for name, param in module.named_parameters():
            leaf = torch.empty_like(param, dtype=dtypes.get(name, param.dtype), device="meta")
            leaf.requires_grad_(param.requires_grad)
            values[f"model.{name}"] = leaf
        for name, buffer in module.named_buffers():
            values[f"model.{name}"] = torch.empty_like(buffer, device="meta")

        def on_meta(value: Tensor) -> Tensor:
            dtype = inputs if inputs is not None and value.is_floating_point() else value.dtype
            copy = torch.empty_like(value, dtype=dtype, device="meta")
            return copy.requires_grad_(value.requires_grad)

        args, kwargs = map_tensors(on_meta, _arguments(sample))
        ledger = _Ledger([*values.values(), *find_tensors((args, kwargs))[0]])
        for leaf in values.values():
            if leaf.requires_grad:
                leaf.register_post_accumulate_grad_hook(ledger.drop_gradient)
        step = _Step(module, ledger)
        # Replaced by name: a mode of torch functions is not active where backward recomputes.
        fused = patch.object(nn.functional, _ATTENTION, _attend)
        hooked = recording.watch(module)
        with take_back(module), hooked, torch.device("meta"), torch.enable_grad(), fused, ledger:
            torch.func.functional_call(step, values, args, kwargs)
    except Exception as error:
        raise ValueError(
            f"plan: the forward of {type(module).__name__} cannot run on the meta device, so its "
            f"activations cannot be measured: {type(error).__name__}: {str(error).rstrip('.')}. "
            "Where the sample is what the forward takes, call plan without sample=, and leave room "
            "for activations."
        ) from error
    return Activations(step.forward_peak, ledger.peak, step.kept)


def _arguments(sample: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    if isinstance(sample, Mapping):
        return (), dict(sample)
    return (tuple(sample) if isinstance(sample, tuple | list) else (sample,)), {}


class _Step(nn.Module):
    """A forward and its backward in one call, since recomputation in backward reads the weights."""

    def __init__(self, model: nn.Module, ledger: _Ledger) -> None:
        super().__init__()
        self.model = model
        self.ledger = ledger
        self.forward_peak = 0
        self.kept = 0

    def forward(self, *args: Any, **kwargs: Any) -> None:
        found = self.model(*args, **kwargs)
        self.forward_peak, self.kept = self.ledger.peak, self.ledger.count_live()
        self.ledger.peaks.clear()
        roots = [tensor for tensor in find_tensors(found)[0] if tensor.requires_grad]
        torch.autograd.backward(roots, [torch.ones_like(root) for root in roots])


class _Ledger(DispatchMode):
    """Bytes in the storages that operators inside it made, now and at the most.

    Attributes:
        storages: of each, which one it is in the order in which they were made, and its bytes.
        bound: of what is alive; not less than it.
        peaks: how many storages had been made, and the bytes of those alive: each time more.
    """

    def __init__(self, known: list[Tensor]) -> None:
        super().__init__()
        self.known = {StorageWeakRef(tensor.untyped_storage()) for tensor in known}
        self.storages: dict[StorageWeakRef, tuple[int, int]] = {}
        self.made = self.bound = 0
        self.peaks: list[tuple[int, int]] = []

    @property
    def peak(self) -> int:
        return self.peaks[-1][1] if self.peaks else 0

    def count_live(self) -> int:
        self.storages = {ref: pair for ref, pair in self.storages.items() if not ref.expired()}
        self.bound = sum(nbytes for _, nbytes in self.storages.values())
        return self.bound

    def note(self, made: int, nbytes: int) -> None:
        """Note how much was alive when so many storages had been made, if it is the most."""
        if nbytes > self.peak:
            self.peaks.append((made, nbytes))

    def drop_gradient(self, leaf: Tensor) -> None:
        """A parameter's gradient is counted by the plan's step, from the moment it is made."""
        assert leaf.grad is not None
        ref = StorageWeakRef(leaf.grad.untyped_storage())
        number, nbytes = self.storages.pop(ref, (self.made, 0))
        leaf.grad, self.bound = None, self.bound - nbytes
        peaks, self.peaks = self.peaks, []
        for made, held in peaks:
            self.note(made, held - nbytes if made >= number else held)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is read_number and args[0].is_meta:
            return args[0].dtype is torch.bool or 1  # there are no numbers to look at
        out = func(*args, **(kwargs or {}))
        for tensor in out if isinstance(out, tuple | list) else (out,):
            if isinstance(tensor, Tensor):
                ref = StorageWeakRef(tensor.untyped_storage())
                if ref not in self.storages and ref not in self.known:
                    self.made, nbytes = self.made + 1, tensor.untyped_storage().nbytes()
                    self.storages[ref] = self.made, nbytes
                    self.bound += nbytes
        if self.bound > self.peak:
            self.note(self.made, self.count_live())
        return out


_ATTENTION = "scaled_dot_product_attention"
_attention = getattr(nn.functional, _ATTENTION)


def _attend(query: Tensor, key: Tensor, value: Tensor, *masks: Any, **options: Any) -> Tensor:
    """Attention with the memory of a fused kernel, which keeps no matrix of tokens by tokens.

    Every accelerator has such a kernel, and the meta device has not. No numbers are computed.
    """
    if query.dim() != 4 or not query.is_meta:
        return _attention(query, key, value, *masks, **options)
    width = value.shape[-1]
    if width > query.shape[-1]:  # what the kernel gives is as wide as the queries
        query = nn.functional.pad(query, (0, width - query.shape[-1]))
    return fused_attention(query, key, value)[0][..., :width]
