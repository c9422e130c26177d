"""Training loops as papers and their repositories write them, for plain and sharded models alike.

Each takes a ``Lab``, which makes models and batches, and returns what is compared. No loop knows
whether its model is sharded.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

import fsdp_compose as fc

Found = dict[str, Tensor]
LOOPS: dict[str, Callable[[Lab], Found]] = {}


class Net(nn.Module):
    """Residual blocks around an input and an output layer."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(6, 7)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(7), nn.Linear(7, 14), nn.GELU(), nn.Linear(14, 7))
            for _ in range(3)
        )
        self.head = nn.Linear(7, 5)
        self.skipped = -1

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for i, block in enumerate(self.blocks):
            if i != self.skipped:
                x = x + block(x)
        return self.head(x)


@dataclass
class Lab:
    """What a loop works with: alone on the batches of all ranks, or on one rank of several."""

    world: int
    options: dict[str, Any] | None = None  # of ``fully_shard``; None: plain modules
    start: int = 0

    def model(self, seed: int = 0) -> Net:
        torch.manual_seed(seed)
        return self.shard(Net().double())

    def shard(self, model: Net) -> Net:
        if self.options is not None:
            for block in model.blocks:
                fc.fully_shard(block, **self.options)
            fc.fully_shard(model, **self.options)
        return model

    def batch(self, step: int) -> tuple[Tensor, Tensor]:
        generator = torch.Generator().manual_seed(1000 + step)
        x = torch.randn(4 * self.world, 6, generator=generator, dtype=torch.float64)
        y = torch.randint(0, 5, (4 * self.world,), generator=generator)
        if self.options is None:
            return x, y
        own = slice(4 * dist.get_rank(), 4 * dist.get_rank() + 4)
        return x[own], y[own]

    def batches(self, steps: int) -> Iterator[tuple[Tensor, Tensor]]:
        """Those of the next steps."""
        for _ in range(steps):
            self.start += 1
            yield self.batch(self.start)

    def train(self, model: nn.Module, optim: torch.optim.Optimizer, steps: int) -> None:
        for x, y in self.batches(steps):
            F.cross_entropy(model(x), y).backward()
            optim.step()
            optim.zero_grad()

    def mean(self, loss: Tensor) -> Tensor:
        """A loss over the batches of all ranks, where nothing of the library takes the mean."""
        loss = loss.detach().clone()
        if self.options is not None:
            dist.all_reduce(loss)
            loss /= self.world
        return loss


def whole(*models: nn.Module) -> Found:
    found: Found = {}
    for i, model in enumerate(models):
        for name, p in model.named_parameters():
            value: Any = p
            full = value.full_tensor() if hasattr(value, "full_tensor") else value
            found[f"{i} {name}"] = full.detach().clone()
    return found


def sgd(model: nn.Module, **options: Any) -> torch.optim.SGD:
    return torch.optim.SGD(model.parameters(), lr=0.1, **options)


def loop(function: Callable[[Lab], Found]) -> Callable[[Lab], Found]:
    LOOPS[function.__name__] = function
    return function


@loop
def sharpness_aware(lab: Lab) -> Found:
    """SAM (Foret et al., 2021): a second gradient where the loss is highest nearby."""
    model = lab.model()
    optim = sgd(model, momentum=0.9)
    for x, y in lab.batches(3):
        F.cross_entropy(model(x), y).backward()
        norms = [p.grad.norm() for p in model.parameters() if p.grad is not None]
        norm = torch.norm(torch.stack(norms))
        old = {}
        with torch.no_grad():
            for p in model.parameters():
                old[p] = p.data.clone()
                p.add_(p.grad * (0.05 / (norm + 1e-12)))
        optim.zero_grad()
        F.cross_entropy(model(x), y).backward()
        for p in model.parameters():
            p.data = old[p]
        optim.step()
        optim.zero_grad()
    return whole(model)


@loop
def lookahead(lab: Lab) -> Found:
    """Lookahead (Zhang et al., 2019): slow weights that follow fast ones."""
    model = lab.model()
    optim = torch.optim.AdamW(model.parameters(), lr=0.01)
    slow = [p.clone().detach() for p in model.parameters()]
    for _ in range(3):
        lab.train(model, optim, 2)
        for s, p in zip(slow, model.parameters(), strict=True):
            s.data.add_(p.data - s.data, alpha=0.5)
            p.data.copy_(s.data)
    return whole(model)


@loop
def gradient_surgery(lab: Lab) -> Found:
    """PCGrad (Yu et al., 2020): what two losses disagree on is projected away."""
    model = lab.model()
    optim = sgd(model)
    for x, y in lab.batches(3):
        params, out = list(model.parameters()), model(x)
        first = torch.autograd.grad(F.cross_entropy(out, y), params, retain_graph=True)
        second = torch.autograd.grad(out.square().mean(), params)
        dot = sum((a * b).sum() for a, b in zip(first, second, strict=True))
        norms = [sum(g.pow(2).sum() for g in grads) for grads in (first, second)]
        for p, a, b in zip(params, first, second, strict=True):
            p.grad = a + b if dot >= 0 else a + b - dot / norms[1] * b - dot / norms[0] * a
        optim.step()
        optim.zero_grad()
    return whole(model)


@loop
def momentum_contrast(lab: Lab) -> Found:
    """MoCo (He et al., 2020): keys from a copy whose ``.data`` follows the queries' weights."""
    model = lab.model()
    keys = copy.deepcopy(model).requires_grad_(False)
    optim = sgd(model)
    for x, _ in lab.batches(3):
        with torch.no_grad():
            for q, k in zip(model.parameters(), keys.parameters(), strict=True):
                k.data = k.data * 0.9 + q.data * 0.1
            wanted = F.normalize(keys(x + 0.1), dim=1)
        (2 - 2 * (F.normalize(model(x), dim=1) * wanted).sum(1)).mean().backward()
        optim.step()
        optim.zero_grad()
    return whole(model, keys)


@loop
def target_network(lab: Lab) -> Found:
    """DQN (Mnih et al., 2015): clamped gradients, a target that is overwritten now and then."""
    model, target = lab.model(), lab.model(1)
    target.load_state_dict(model.state_dict())
    optim = torch.optim.RMSprop(model.parameters(), lr=0.01)
    for i, (x, y) in enumerate(lab.batches(4)):
        with torch.no_grad():
            value = target(x).max(1).values
        found = model(x).gather(1, y[:, None]).squeeze(1)
        F.smooth_l1_loss(found, 0.1 + 0.9 * value).backward()
        for p in model.parameters():
            assert p.grad is not None
            p.grad.data.clamp_(-1e-3, 1e-3)
        optim.step()
        optim.zero_grad()
        if i == 1:
            target.load_state_dict(model.state_dict())
    return whole(model, target)


@loop
def elastic_weights(lab: Lab) -> Found:
    """EWC (Kirkpatrick et al., 2017): a penalty by the squared gradients of a former task."""
    model = lab.model()
    optim = torch.optim.SGD(model.parameters(), lr=0.05)
    x, y = lab.batch(0)
    F.cross_entropy(model(x), y).backward()
    grads = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
    fisher = {n: g.data.clone().pow(2) for n, g in grads.items()}
    old = {n: p.data.clone() for n, p in model.named_parameters()}
    optim.zero_grad()
    for x, y in lab.batches(3):
        loss = F.cross_entropy(model(x), y)
        for n, p in model.named_parameters():
            loss = loss + 50 * (fisher[n] * (p - old[n]).pow(2)).sum()
        loss.backward()
        optim.step()
        optim.zero_grad()
    return whole(model)


@loop
def starting_point(lab: Lab) -> Found:
    """L2-SP (Li et al., 2018): near the weights that fine-tuning began with."""
    model = lab.model()
    old = copy.deepcopy(model).requires_grad_(False)
    optim = sgd(model)
    for x, y in lab.batches(3):
        pairs = zip(model.parameters(), old.parameters(), strict=True)
        penalty = sum(F.mse_loss(p, q) for p, q in pairs)
        (F.cross_entropy(model(x), y) + 0.1 * penalty).backward()
        optim.step()
        optim.zero_grad()
    return whole(model)


@loop
def adaptive_clipping(lab: Lab) -> Found:
    """AGC (Brock et al., 2021), by parameter: gradients at most a part of the weights' norm."""
    model = lab.model()
    optim = sgd(model)
    for x, y in lab.batches(3):
        F.cross_entropy(model(x), y).backward()
        for p in model.parameters():
            assert p.grad is not None
            most = 0.01 * p.detach().norm().clamp_(min=1e-3)
            norm = p.grad.detach().norm()
            clipped = p.grad * (most / norm.clamp(min=1e-6))
            p.grad.detach().copy_(torch.where(norm < most, p.grad, clipped))
        optim.step()
        optim.zero_grad()
    return whole(model)


@loop
def variance_reduced(lab: Lab) -> Found:
    """SVRG (Johnson and Zhang, 2013): less the gradient of a snapshot, plus its mean."""
    model = lab.model()
    snapshot, optim = copy.deepcopy(model), torch.optim.SGD(model.parameters(), lr=0.05)
    batches = list(lab.batches(3))
    for x, y in batches:
        (F.cross_entropy(snapshot(x), y) / 3).backward()
    mean = [p.grad.clone() for p in snapshot.parameters() if p.grad is not None]
    for x, y in batches:
        for each in (model, snapshot):
            each.zero_grad()
            F.cross_entropy(each(x), y).backward()
        for p, s, m in zip(model.parameters(), snapshot.parameters(), mean, strict=True):
            assert p.grad is not None and s.grad is not None
            p.grad.data += m - s.grad.data
        optim.step()
    return whole(model)


def _hvp(model: nn.Module, batch: tuple[Tensor, Tensor], v: Sequence[Tensor]) -> list[Tensor]:
    """The Hessian of the loss times ``v``."""
    params = list(model.parameters())
    loss = F.cross_entropy(model(batch[0]), batch[1])
    grads = torch.autograd.grad(loss, params, create_graph=True)
    return list(torch.autograd.grad(grads, params, grad_outputs=v))


@loop
def curvature(lab: Lab) -> Found:
    """The sharpest direction by power iteration, as PyHessian (Yao et al., 2020)."""
    model, batch = lab.model(), lab.batch(0)
    v: list[Tensor] = [torch.ones_like(p) for p in model.parameters()]
    for _ in range(3):
        norm = torch.sqrt(torch.stack([u.pow(2).sum() for u in v]).sum())
        v = _hvp(model, batch, [u / norm for u in v])
    return {"norm": torch.sqrt(torch.stack([u.pow(2).sum() for u in v]).sum())}


@loop
def influence(lab: Lab) -> Found:
    """Influence functions (Koh and Liang, 2017): conjugate gradients on a damped Hessian."""

    def dot(a: Sequence[Tensor], b: Sequence[Tensor]) -> Tensor:
        return torch.stack([(u * v).sum() for u, v in zip(a, b, strict=True)]).sum()

    model, batch = lab.model(), lab.batch(0)
    loss = F.cross_entropy(model(batch[0]), batch[1])
    grad = torch.autograd.grad(loss, list(model.parameters()))
    solution = [torch.zeros_like(g) for g in grad]
    rest, way = [g.clone() for g in grad], [g.clone() for g in grad]
    for _ in range(3):
        product = [h + 0.1 * w for h, w in zip(_hvp(model, batch, way), way, strict=True)]
        before = dot(rest, rest)
        step = before / dot(way, product)
        solution = [s + step * w for s, w in zip(solution, way, strict=True)]
        rest = [r - step * h for r, h in zip(rest, product, strict=True)]
        way = [r + dot(rest, rest) / before * w for r, w in zip(rest, way, strict=True)]
    return {"influence": dot(solution, grad)}


@loop
def zeroth_order(lab: Lab) -> Found:
    """MeZO (Malladi et al., 2023): the same noise drawn again from its seed."""
    model = lab.model()

    def shift(step: int, scale: Any) -> None:
        torch.manual_seed(step)
        with torch.no_grad():
            for p in model.parameters():
                p.add_(torch.randn_like(p) * scale)

    for step, (x, y) in enumerate(lab.batches(2)):
        losses = []
        for scale in (1e-2, -2e-2):
            shift(step, scale)
            losses.append(lab.mean(F.cross_entropy(model(x), y)))
        shift(step, 1e-2)
        shift(step, -0.1 * (losses[0] - losses[1]) / 2e-2)
    return whole(model)


@loop
def langevin(lab: Lab) -> Found:
    """SGLD (Welling and Teh, 2011): noise on the gradients of every step."""
    model = lab.model()
    optim = sgd(model)
    for x, y in lab.batches(2):
        F.cross_entropy(model(x), y).backward()
        for p in model.parameters():
            assert p.grad is not None
            p.grad += 0.01 * torch.randn_like(p.grad)
        optim.step()
        optim.zero_grad()
    return whole(model)


@loop
def resets(lab: Lab) -> Found:
    """The primacy bias (Nikishin et al., 2022): last layers begin anew, and the rest shrinks."""
    model, fresh = lab.model(), lab.model(7)
    optim = sgd(model)
    lab.train(model, optim, 1)
    torch.manual_seed(3)
    model.head.reset_parameters()
    with torch.no_grad():
        for p, q in zip(model.blocks.parameters(), fresh.blocks.parameters(), strict=True):
            p.mul_(0.8).add_(q, alpha=0.2)
    lab.train(model, optim, 1)
    return whole(model)


@loop
def gaussian_average(lab: Lab) -> Found:
    """SWAG (Maddox et al., 2019): the mean and variance of weights over steps."""
    model = lab.model()
    optim = sgd(model)
    mean, square = ([torch.zeros_like(p) for p in model.parameters()] for _ in range(2))
    for n in range(3):
        lab.train(model, optim, 1)
        for i, p in enumerate(model.parameters()):
            mean[i] = (mean[i] * n + p.data) / (n + 1)
            square[i] = (square[i] * n + p.data**2) / (n + 1)
    for m, s, p in zip(mean, square, model.parameters(), strict=True):
        p.data.copy_(m + (s - m**2).clamp(min=1e-30).sqrt() * 0.5)
    return whole(model)


@loop
def reptile(lab: Lab) -> Found:
    """Reptile (Nichol et al., 2018): arithmetic on state dicts."""
    model = lab.model()
    for _ in range(2):
        old = {k: v.clone() for k, v in model.state_dict().items()}
        lab.train(model, sgd(model), 2)
        new = model.state_dict()
        model.load_state_dict({k: old[k] + (new[k] - old[k]) * 0.5 for k in old})
    return whole(model)


@loop
def meta_learning(lab: Lab) -> Found:
    """MAML (Finn et al., 2017): through an inner step, by ``functional_call``."""
    model = lab.model()
    optim = sgd(model)
    for x, y in lab.batches(2):
        params = dict(model.named_parameters())
        loss = F.cross_entropy(torch.func.functional_call(model, params, (x,)), y)
        grads = torch.autograd.grad(loss, list(params.values()), create_graph=True)
        pairs = zip(params.items(), grads, strict=True)
        fast = {name: p - 0.1 * grad for (name, p), grad in pairs}
        F.cross_entropy(torch.func.functional_call(model, fast, (x,)), y).backward()
        optim.step()
        optim.zero_grad()
    return whole(model)


@loop
def stochastic_depth(lab: Lab) -> Found:
    """Stochastic depth (Huang et al., 2016): a block that sits out, with a stateful optimizer."""
    model = lab.model()
    optim = torch.optim.AdamW(model.parameters(), lr=0.01)
    for step in range(4):
        model.skipped = step
        lab.train(model, optim, 1)
    return whole(model)


@loop
def gradual_unfreezing(lab: Lab) -> Found:
    """ULMFiT (Howard and Ruder, 2018): from the head down, one block more in each step."""
    model = lab.model()
    model.requires_grad_(False)
    model.head.requires_grad_(True)
    optim = torch.optim.AdamW(model.parameters(), lr=0.01)
    for i in (2, 1, 0):
        lab.train(model, optim, 1)
        model.blocks[i].requires_grad_(True)
    lab.train(model, optim, 1)
    return whole(model)


@loop
def adversarial_weights(lab: Lab) -> Found:
    """AWP (Wu et al., 2020): a proxy finds the worst weights nearby, which are taken back."""
    model = lab.model()
    proxy, optim = copy.deepcopy(model), sgd(model)
    proxy_optim = torch.optim.SGD(proxy.parameters(), lr=0.01)
    for x, y in lab.batches(2):
        proxy.load_state_dict(model.state_dict())
        (-F.cross_entropy(proxy(x), y)).backward()
        proxy_optim.step()
        proxy_optim.zero_grad()
        moves = {}
        for (name, p), q in zip(model.named_parameters(), proxy.parameters(), strict=True):
            if p.ndim > 1:
                move = q.data - p.data
                moves[name] = p.data.norm() / (move.norm() + 1e-20) * move
        for sign in (1, -1):
            for name, p in model.named_parameters():
                if name in moves:
                    p.data.add_(sign * 0.01 * moves[name])
            if sign > 0:
                F.cross_entropy(model(x), y).backward()
        optim.step()
        optim.zero_grad()
    return whole(model)


@loop
def averaged_weights(lab: Lab) -> Found:
    """EMA weights by name, put in place for an evaluation and taken out again (as in timm)."""
    model = lab.model()
    optim = sgd(model)
    shadow = {n: p.data.clone() for n, p in model.named_parameters()}
    for _ in range(2):
        lab.train(model, optim, 1)
        for n, p in model.named_parameters():
            shadow[n] = 0.9 * shadow[n] + 0.1 * p.data
    kept = {n: p.data for n, p in model.named_parameters()}
    for n, p in model.named_parameters():
        p.data = shadow[n]
    x, y = lab.batch(7)
    loss = lab.mean(F.cross_entropy(model(x), y))
    for n, p in model.named_parameters():
        p.data = kept[n]
    lab.train(model, optim, 1)
    return {**whole(model), "loss": loss}


@loop
def pruning(lab: Lab) -> Found:
    """The lottery ticket (Frankle and Carbin, 2019): masks, and weights rewound to the start."""
    model = lab.model()
    start = copy.deepcopy(model.state_dict())
    lab.train(model, torch.optim.AdamW(model.parameters(), lr=0.01), 2)
    masks = {n: (p.abs() > 0.1).to(p.dtype) for n, p in model.named_parameters()}
    model.load_state_dict(start)
    optim = sgd(model)
    for x, y in lab.batches(2):
        with torch.no_grad():
            for n, p in model.named_parameters():
                p.mul_(masks[n])
        F.cross_entropy(model(x), y).backward()
        for n, p in model.named_parameters():
            assert p.grad is not None
            p.grad.mul_(masks[n])
        optim.step()
        optim.zero_grad()
    return whole(model)
