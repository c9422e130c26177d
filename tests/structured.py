"""Reference optimizers that look at more than one number at a time; plain torch, no sharding."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

import structured
from optimizers import PerParameter


def inverse_root(matrix: Tensor, power: int, eps: float) -> Tensor:
    values, vectors = torch.linalg.eigh(matrix)
    return (vectors * values.clamp(min=eps).pow(-1.0 / power)) @ vectors.T


class Shampoo(PerParameter):
    """Gupta, Koren and Singer, "Shampoo: Preconditioned Stochastic Tensor Optimization", 2018.

    For matrices: L += G G^T, R += G^T G, W -= lr L^(-1/4) G R^(-1/4).
    """

    settings = {"eps": 1e-4}

    def update(self, p: Tensor, grad: Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        if not state:
            state["step"] = 0
            state["left"] = group["eps"] * torch.eye(p.shape[0], dtype=p.dtype)
            state["right"] = group["eps"] * torch.eye(p.shape[1], dtype=p.dtype)
        state["step"] += 1
        state["left"] += grad @ grad.T
        state["right"] += grad.T @ grad
        left = inverse_root(state["left"], 4, group["eps"])
        right = inverse_root(state["right"], 4, group["eps"])
        p.sub_(left @ grad @ right, alpha=group["lr"])


def basis(vectors: Tensor) -> Tensor:
    """Row by row, as checkpoints store it: products of other strides may round otherwise."""
    return vectors.contiguous()


class Soap(PerParameter):
    """Vyas et al., "SOAP: Improving and Stabilizing Shampoo using Adam", 2024, algorithm 3.

    Adam in the eigenbasis of Shampoo's two statistics; the basis is refreshed by one step of power
    iteration and a QR decomposition.
    """

    settings = {"betas": (0.9, 0.95), "eps": 1e-8, "every": 2}

    def update(self, p: Tensor, grad: Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        first, second = group["betas"]
        if not state:
            state["step"] = torch.zeros(())
            state["left"], state["right"] = grad @ grad.T, grad.T @ grad
            state["left_basis"] = basis(torch.linalg.eigh(state["left"])[1])
            state["right_basis"] = basis(torch.linalg.eigh(state["right"])[1])
            state["exp_avg"], state["exp_avg_sq"] = torch.zeros_like(p), torch.zeros_like(p)
            return  # as published: the first gradient only makes the basis
        state["step"] += 1
        left, right, step = state["left_basis"], state["right_basis"], state["step"].item()
        turned = left.T @ grad @ right
        state["exp_avg"].lerp_(grad, 1 - first)
        state["exp_avg_sq"].lerp_(turned.square(), 1 - second)
        mean = left.T @ state["exp_avg"] @ right / (1 - first**step)
        scale = (state["exp_avg_sq"] / (1 - second**step)).sqrt() + group["eps"]
        p.sub_(left @ (mean / scale) @ right.T, alpha=group["lr"])
        state["left"].lerp_(grad @ grad.T, 1 - second)
        state["right"].lerp_(grad.T @ grad, 1 - second)
        if step % group["every"] == 0:
            state["left_basis"] = basis(torch.linalg.qr(state["left"] @ left)[0])
            state["right_basis"] = basis(torch.linalg.qr(state["right"] @ right)[0])


class RowAdagrad(PerParameter):
    """Adagrad with one accumulator per row, as for embedding tables; ``width`` elements a row.

    Takes matrices, or whole rows of one as a flat tensor with ``width`` in its group.
    """

    settings = {"width": 0}

    def update(self, p: Tensor, grad: Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        rows = p.view(-1, group["width"] or p.shape[-1])
        grad = grad.view_as(rows)
        if not state:
            state["rows"] = torch.zeros(len(rows), 1, dtype=p.dtype)
        state["rows"] += grad.square().mean(1, keepdim=True)
        rows.sub_(grad / (state["rows"].sqrt() + 1e-8), alpha=group["lr"])


BLOCK = 256


def codebook(signed: bool) -> Tensor:
    """256 sorted values in [-1, 1], or [0, 1]: powers of ten, cut more finely away from 0.

    The dynamic tree of Dettmers et al., "8-bit Optimizers via Block-wise Quantization", 2021: an
    exponent of i leading zeros leaves 7 - i bits (6 - i beside a sign) for a linear fraction.
    """
    values = [0.0, 1.0]
    bits = 6 if signed else 7
    for zeros in range(7):
        steps = torch.linspace(0.1, 1.0, 2 ** (bits - zeros) + 1, dtype=torch.float64)
        means = (steps[:-1] + steps[1:]) / 2 * 10.0**-zeros
        values += means.tolist() + ((-means).tolist() if signed else [])
    return torch.tensor(sorted(values), dtype=torch.float32)


SIGNED, UNSIGNED = codebook(True), codebook(False)


def quantise(values: Tensor, book: Tensor) -> tuple[Tensor, Tensor]:
    """Codes (n,) uint8 and the largest magnitude of each block of 256, (ceil(n / 256),)."""
    n = values.numel()
    blocks = torch.nn.functional.pad(values.float(), (0, -n % BLOCK)).view(-1, BLOCK)
    scale = blocks.abs().amax(1)
    unit = blocks / scale.clamp(min=1e-38)[:, None]
    middle = (book[1:] + book[:-1]) / 2
    return torch.bucketize(unit, middle).to(torch.uint8).view(-1)[:n], scale


def dequantise(codes: Tensor, scale: Tensor, book: Tensor) -> Tensor:
    return book[codes.int()] * scale.repeat_interleave(BLOCK)[: codes.numel()]


class AdamW8bit(PerParameter):
    """AdamW with both moments in 8 bits, by blocks of 256 elements with a scale each."""

    settings = {"betas": (0.9, 0.99), "weight_decay": 0.1}

    def update(self, p: Tensor, grad: Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        first, second = group["betas"]
        grad = grad.reshape(-1).float()
        if not state:
            state["step"] = torch.zeros(())
            for key, book in (("mean", SIGNED), ("square", UNSIGNED)):
                state[key], state[f"{key}_scale"] = quantise(torch.zeros_like(grad), book)
        state["step"] += 1
        step = state["step"].item()
        mean = dequantise(state["mean"], state["mean_scale"], SIGNED)
        square = dequantise(state["square"], state["square_scale"], UNSIGNED)
        mean.lerp_(grad, 1 - first)
        square.lerp_(grad.square(), 1 - second)
        state["mean"], state["mean_scale"] = quantise(mean, SIGNED)
        state["square"], state["square_scale"] = quantise(square, UNSIGNED)
        change = mean / (1 - first**step) / ((square / (1 - second**step)).sqrt() + 1e-8)
        p.mul_(1 - group["lr"] * group["weight_decay"])
        p.sub_(change.view(p.shape).to(p.dtype), alpha=group["lr"])

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Keeps the dtypes: torch casts state to that of the parameter."""
        super().load_state_dict(state_dict)
        flat = [p for group in self.param_groups for p in group["params"]]
        numbers = [n for group in state_dict["param_groups"] for n in group["params"]]
        for number, p in zip(numbers, flat, strict=True):
            for key, value in state_dict["state"].get(number, {}).items():
                self.state[p][key] = value.clone()


MAKE: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "muon": partial(torch.optim.Muon, lr=0.02, weight_decay=0.1),
    "adafactor": partial(torch.optim.Adafactor, lr=0.05),
    "shampoo": partial(structured.Shampoo, lr=0.1),
    "soap": partial(structured.Soap, lr=0.01),
    "sgd": partial(torch.optim.SGD, lr=0.1, momentum=0.9),
}


def wholes(fqn: str, param: nn.Parameter) -> Any:
    return "tensor" if param.ndim == 2 else 1


def matrices(model: nn.Module) -> list[nn.Parameter]:
    return [p for p in model.parameters() if p.ndim == 2]


def others(model: nn.Module) -> list[nn.Parameter]:
    return [p for p in model.parameters() if p.ndim != 2]
