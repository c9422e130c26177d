"""Short faithful versions of optimizers that others publish; plain torch, no sharding.

The first ten look at elements, or at norms and sums of whole tensors, and run on sharded parameters
as they are. Kron looks at matrices and runs under ``owner_step``.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor


class PerParameter(torch.optim.Optimizer):
    """Calls ``update(p, grad, state, group)`` for each parameter with a gradient."""

    settings: dict[str, Any] = {}

    def __init__(self, params: Any, lr: float = 0.01, **settings: Any) -> None:
        super().__init__(params, {"lr": lr, **self.settings, **settings})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    self.update(p, p.grad, self.state[p], group)

    def update(self, p: Tensor, grad: Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        raise NotImplementedError


def moment(state: dict[str, Any], key: str, like: Tensor) -> Tensor:
    """A tensor of zeros at first."""
    if key not in state:
        state[key] = torch.zeros_like(like)
    return state[key]


def count(state: dict[str, Any]) -> int:
    state["step"] = state.get("step", 0) + 1
    return state["step"]


class Lion(PerParameter):
    """Chen et al., "Symbolic Discovery of Optimization Algorithms", 2023."""

    def update(self, p: Tensor, grad: Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        mean = moment(state, "exp_avg", p)
        p.mul_(1 - 0.1 * group["lr"])
        p.add_(mean.clone().mul_(0.9).add_(grad, alpha=0.1).sign_(), alpha=-group["lr"])
        mean.lerp_(grad, 0.01)


class Adan(PerParameter):
    """Xie et al., "Adan: Adaptive Nesterov Momentum Algorithm", 2022."""

    def update(self, p: Tensor, grad: Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        before = state["previous"] if "previous" in state else grad.clone()
        change = grad - before
        mean, slope, square = (moment(state, key, p) for key in ("exp_avg", "slope", "exp_avg_sq"))
        mean.lerp_(grad, 0.02)
        slope.lerp_(change, 0.08)
        square.lerp_((grad + 0.92 * change).square(), 0.01)
        scale = square.sqrt().add_(1e-8)
        p.addcdiv_(mean + 0.92 * slope, scale, value=-group["lr"]).div_(1 + 0.1 * group["lr"])
        state["previous"] = grad.clone()


class Sophia(PerParameter):
    """Liu et al., "Sophia", 2023, with the squared gradient as the estimate of the Hessian."""

    def update(self, p: Tensor, grad: Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        mean, hessian = moment(state, "exp_avg", p), moment(state, "hessian", p)
        mean.lerp_(grad, 0.035)
        if count(state) % 2 == 1:
            hessian.lerp_(grad.square(), 0.01)
        ratio = (mean.abs() / (0.04 * hessian + 1e-15)).clamp(max=1)
        p.addcmul_(mean.sign(), ratio, value=-group["lr"])


class AdaBelief(PerParameter):
    """Zhuang et al., "AdaBelief Optimizer", 2020."""

    def update(self, p: Tensor, grad: Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        step, mean, spread = count(state), moment(state, "mean", p), moment(state, "spread", p)
        mean.lerp_(grad, 0.1)
        spread.lerp_((grad - mean).square(), 0.001).add_(1e-16)
        scale = (spread / (1 - 0.999**step)).sqrt_().add_(1e-8)
        p.addcdiv_(mean, scale, value=-group["lr"] / (1 - 0.9**step))


class Lamb(PerParameter):
    """You et al., "Large Batch Optimization for Deep Learning", 2019: one norm ratio a tensor."""

    def update(self, p: Tensor, grad: Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        mean, square = moment(state, "exp_avg", p), moment(state, "exp_avg_sq", p)
        mean.lerp_(grad, 0.1)
        square.lerp_(grad.square(), 0.001)
        update = mean / (square.sqrt() + 1e-6) + 0.1 * p
        ratio = p.norm() / update.norm().clamp(min=1e-12)
        p.sub_(update * ratio, alpha=group["lr"])


class Lars(PerParameter):
    """You, Gitman and Ginsburg, "Large Batch Training of Convolutional Networks", 2017."""

    def update(self, p: Tensor, grad: Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        grad = grad + 1e-4 * p
        rate = group["lr"] * p.norm() / (grad.norm() + 1e-8)
        momentum = moment(state, "momentum_buffer", p).mul_(0.9).add_(grad * rate)
        p.sub_(momentum)


class Amos(PerParameter):
    """Tian and Parikh, "Amos", 2022, in short: mean squares of whole tensors, kept as ``()``."""

    def update(self, p: Tensor, grad: Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        if not state:
            state["exp_avg_sq"] = torch.zeros((), dtype=p.dtype)
            state["decay"] = torch.zeros((), dtype=p.dtype)
        step = count(state)
        square = grad.square().mean()
        state["exp_avg_sq"].lerp_(square, 0.1)
        scale = state["exp_avg_sq"] / (1 - 0.9**step)
        decay = (1 + state["decay"]).rsqrt()
        state["decay"] += 0.1 * decay * square / (scale + 1e-18)
        p.sub_(grad * (group["lr"] * decay * (scale + 1e-18).rsqrt()))


class Lookahead(torch.optim.SGD):
    """Zhang et al., "Lookahead Optimizer", 2019: slow weights follow the fast ones."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None and "slow" not in self.state[p]:
                    self.state[p]["slow"] = p.clone()
        super().step()
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None and count(self.state[p]) % 2 == 0:
                    self.state[p]["slow"].lerp_(p, 0.5)
                    p.copy_(self.state[p]["slow"])


class Prodigy(torch.optim.Optimizer):
    """Mishchenko and Defazio, "Prodigy", 2023, with Adam and no decay: sums over all parameters."""

    def __init__(self, params: Any, lr: float = 1.0) -> None:
        super().__init__(params, {"lr": lr, "d": 1e-3, "numerator": 0.0, "k": 0})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        group = self.param_groups[0]
        d, rate = group["d"], group["d"] * group["lr"]
        numerator, denominator = group["numerator"] * 0.999**0.5, 0.0
        params = [p for group in self.param_groups for p in group["params"] if p.grad is not None]
        for p in params:
            state, grad = self.state[p], p.grad
            if not state:
                state["start"] = p.clone()
            numerator += d * rate * (grad * (state["start"] - p)).sum().item()
            moment(state, "exp_avg", p).mul_(0.9).add_(grad, alpha=0.1 * d)
            moment(state, "exp_avg_sq", p).mul_(0.999).add_(grad.square(), alpha=0.001 * d * d)
            moment(state, "s", p).mul_(0.999**0.5).add_(grad, alpha=d * rate)
            denominator += state["s"].abs().sum().item()
        for p in params:
            state = self.state[p]
            p.addcdiv_(state["exp_avg"], state["exp_avg_sq"].sqrt().add_(d * 1e-8), value=-rate)
        if denominator:
            d = max(d, numerator / ((1 - 0.999**0.5) * denominator))
        for each in self.param_groups:
            each.update(d=d, numerator=numerator, k=group["k"] + 1)


class PackagedProdigy(torch.optim.Optimizer):
    """Prodigy as its authors' package words it: over flattened views, which ``slice_p`` thins."""

    def __init__(self, params: Any, lr: float = 1.0, slice_p: int = 1) -> None:
        super().__init__(params, {"lr": lr, "d": 1e-3, "numerator": 0.0, "slice_p": slice_p})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        group = self.param_groups[0]
        d, rate, slice_p = group["d"], group["d"] * group["lr"], group["slice_p"]
        numerator, denominator = group["numerator"] * 0.999**0.5, 0.0
        params = [p for group in self.param_groups for p in group["params"] if p.grad is not None]
        for p in params:
            state, grad = self.state[p], p.grad.data
            if not state:
                flat = p.data.flatten()[::slice_p]
                state["s"] = torch.zeros_like(flat).detach()
                state["p0"] = flat.detach().clone() if p.any() else torch.tensor(0.0)
                state["exp_avg"] = torch.zeros_like(p.data).detach()
                state["exp_avg_sq"] = torch.zeros_like(p.data).detach()
            sliced, start = grad.flatten()[::slice_p], state["p0"].data
            moved = start - p.data.flatten()[::slice_p]
            numerator += d * rate * torch.dot(sliced, moved).item()
            state["exp_avg"].mul_(0.9).add_(grad, alpha=0.1 * d)
            state["exp_avg_sq"].mul_(0.999).addcmul_(grad, grad, value=0.001 * d * d)
            state["s"].mul_(0.999**0.5).add_(sliced, alpha=d * rate)
            denominator += state["s"].abs().sum().item()
        for p in params:
            state = self.state[p]
            p.data.addcdiv_(
                state["exp_avg"], state["exp_avg_sq"].sqrt().add_(d * 1e-8), value=-rate
            )
        if denominator:
            d = max(d, numerator / ((1 - 0.999**0.5) * denominator))
        for each in self.param_groups:
            each.update(d=d, numerator=numerator)


class DAdaptSGD(torch.optim.Optimizer):
    """Defazio and Mishchenko, "Learning-Rate-Free Learning by D-Adaptation", 2023, with SGD."""

    def __init__(self, params: Any, lr: float = 1.0) -> None:
        super().__init__(params, {"lr": lr, "d": 1e-2, "numerator": 0.0, "norm": 0.0})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        group = self.param_groups[0]
        params = [p for p in group["params"] if p.grad is not None]
        if not group["norm"]:
            group["norm"] = math.sqrt(sum(p.grad.square().sum().item() for p in params))
        rate = group["d"] * group["lr"] / group["norm"]
        numerator, norm = group["numerator"], 0.0
        for p in params:
            state, grad = self.state[p], p.grad
            if not state:
                state["z"], state["x0"] = p.clone(), p.clone()
            total = moment(state, "s", p)
            numerator += rate * (grad * total).sum().item()
            total.add_(grad, alpha=rate)
            norm += total.square().sum().item()
            state["z"].copy_(state["x0"] - total)
            p.lerp_(state["z"], 0.1)
        group["numerator"] = numerator
        if norm:
            group["d"] = max(group["d"], 2 * numerator / math.sqrt(norm))


class ScheduleFree(PerParameter):
    """Defazio et al., "The Road Less Scheduled", 2024, with SGD and the average at ``p``."""

    def update(self, p: Tensor, grad: Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        if "z" not in state:
            state["z"] = p.clone()
        step = count(state)
        p.lerp_(state["z"], 1 / (step + 1)).sub_(grad, alpha=group["lr"] * 0.1 * (1 - 1 / step))
        state["z"].sub_(grad, alpha=group["lr"])


class Kron(PerParameter):
    """Li, "Preconditioned Stochastic Gradient Descent", in short: a list of triangular factors."""

    def update(self, p: Tensor, grad: Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        if not state:
            state["Q"] = [torch.eye(n, dtype=p.dtype) for n in p.shape]
            state["exprs"] = ("left", "right")
        left, right = state["Q"]
        turned = left @ grad @ right.T
        for q, terms in ((left, turned @ turned.T), (right, turned.T @ turned)):
            size = terms.norm().clamp(min=1e-12)
            q.sub_(
                ((terms - terms.trace() / len(q) * torch.eye(len(q), dtype=p.dtype)) / size).triu()
                @ q,
                alpha=0.1,
            )
        p.sub_(left.T @ (left @ grad @ right.T) @ right, alpha=group["lr"])


Make = Callable[[Any], torch.optim.Optimizer]


O = torch.optim  # noqa: E741


EXACT: dict[str, Make] = {
    "sgd": lambda p: O.SGD(p, 0.1, weight_decay=0.1),
    "sgd momentum": lambda p: O.SGD(p, 0.1, momentum=0.9, dampening=0.1),
    "sgd nesterov foreach": lambda p: O.SGD(p, 0.1, momentum=0.9, nesterov=True, foreach=True),
    "sgd fused": lambda p: O.SGD(p, 0.1, momentum=0.9, fused=True),
    "adam": lambda p: O.Adam(p, 0.1, foreach=False),
    "adam amsgrad foreach": lambda p: O.Adam(p, 0.1, amsgrad=True, foreach=True),
    "adam fused": lambda p: O.Adam(p, 0.1, fused=True),
    "adam tensor lr": lambda p: O.Adam(p, torch.tensor(0.1), foreach=False),
    "adamw": lambda p: O.AdamW(p, 0.1, foreach=False),
    "adamw foreach": lambda p: O.AdamW(p, 0.1, foreach=True),
    "adamw fused": lambda p: O.AdamW(p, 0.1, amsgrad=True, fused=True),
    "adamw maximize": lambda p: O.AdamW(p, 0.1, maximize=True, foreach=True),
    "adagrad": lambda p: O.Adagrad(p, 0.1, foreach=False, initial_accumulator_value=0.1),
    "adagrad foreach": lambda p: O.Adagrad(p, 0.1, foreach=True),
    "adagrad fused": lambda p: O.Adagrad(p, 0.1, fused=True),
    "rmsprop": lambda p: O.RMSprop(p, 0.1, momentum=0.9, centered=True, foreach=False),
    "rmsprop foreach": lambda p: O.RMSprop(p, 0.1, centered=True, foreach=True),
    "nadam": lambda p: O.NAdam(p, 0.1, foreach=False),
    "nadam foreach": lambda p: O.NAdam(p, 0.1, foreach=True),
    "radam": lambda p: O.RAdam(p, 0.1, foreach=False),
    "radam foreach": lambda p: O.RAdam(p, 0.1, foreach=True),
    "adamax": lambda p: O.Adamax(p, 0.1, foreach=False),
    "adamax foreach": lambda p: O.Adamax(p, 0.1, foreach=True),
    "asgd": lambda p: O.ASGD(p, 0.1, t0=2, foreach=False),
    "asgd foreach": lambda p: O.ASGD(p, 0.1, t0=2, foreach=True),
    "rprop": lambda p: O.Rprop(p, 0.1, foreach=False),
    "rprop foreach": lambda p: O.Rprop(p, 0.1, foreach=True),
    "adadelta": lambda p: O.Adadelta(p, 1.0, foreach=False),
    "adadelta foreach": lambda p: O.Adadelta(p, 1.0, foreach=True),
}
