"""Experts on a mesh of their own beside dense parameters: gradients on one scale, as in one process.

Every rank has tokens of its own and holds some of the experts. Tokens travel to their expert by
all-to-all, so an expert's gradient on one rank brings the tokens of all ranks that sent some.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed._functional_collectives import all_to_all_single_autograd
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from fsdp_compose import (
    clip_grad_norm_,
    count_traffic,
    fully_shard,
    grad_norm,
    load_checkpoint,
    plan,
    save_checkpoint,
    set_gradient_divide_factor,
    state_dict,
)

from harness import rank_errors, run_ranks
from models import (
    BATCH,
    WIDTH,
    MakeOptimizer,
    Tolerance,
    adamw,
    assert_at_rest,
    compare,
    data,
    seeded,
    sgd,
    whole,
)

EXPERTS = 4
WORLD = 4
STEPS = 3


class Expert(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, 5)
        self.down = nn.Linear(5, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(torch.tanh(self.up(x)))


class MoE(nn.Module):
    """A router and experts, each token to the best one, weighted by its probability.

    With ``ep``, this rank keeps its share of the experts, by their global numbers, so that names
    are unlike on ranks that hold other experts.
    """

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(WIDTH, EXPERTS, bias=False)
        self.experts = nn.ModuleDict({str(i): Expert() for i in range(EXPERTS)})
        self.ep: DeviceMesh | None = None

    def distribute(self, ep: DeviceMesh) -> None:
        self.ep = ep
        each = EXPERTS // ep.size()
        first = ep.get_local_rank() * each
        for number in range(EXPERTS):
            if not first <= number < first + each:
                del self.experts[str(number)]

    def forward(self, x: Tensor) -> Tensor:
        weight, choice = self.router(x).softmax(-1).max(-1)
        order = choice.argsort(stable=True)
        tokens, counts = x[order], choice.bincount(minlength=EXPERTS)
        if self.ep is None:
            out = self.run(tokens, [counts.tolist()])
        else:
            out = self.exchange(tokens, counts)
        return x + weight[:, None] * torch.empty_like(x).index_copy(0, order, out)

    def exchange(self, tokens: Tensor, counts: Tensor) -> Tensor:
        """Tokens, sorted by expert, to their experts' ranks and back."""
        assert self.ep is not None
        group, size = self.ep.get_group(), self.ep.size()
        theirs = torch.empty_like(counts)
        dist.all_to_all_single(theirs, counts, group=group)
        sent, received = (c.view(size, -1).sum(1).tolist() for c in (counts, theirs))
        there = all_to_all_single_autograd(tokens, received, sent, group)
        there = torch.ops._c10d_functional.wait_tensor(there)
        back = all_to_all_single_autograd(
            self.run(there, theirs.view(size, -1).tolist()), sent, received, group
        )
        return torch.ops._c10d_functional.wait_tensor(back)

    def run(self, tokens: Tensor, counts: Sequence[Sequence[int]]) -> Tensor:
        """``tokens`` come by sender, then by expert: counts[sender][expert] of them."""
        pieces = list(tokens.split([n for by_expert in counts for n in by_expert]))
        each = len(self.experts)
        out: list[Any] = [None] * len(pieces)
        for i, expert in enumerate(self.experts.values()):
            mine = range(i, len(pieces), each)
            done = expert(torch.cat([pieces[j] for j in mine]))
            parts = done.split([len(pieces[j]) for j in mine])
            for j, part in zip(mine, parts, strict=True):
                out[j] = part
        return torch.cat(out)


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.layers = nn.ModuleList(MoE() for _ in range(2))
        self.head = nn.Linear(WIDTH, 2)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


def meshes(ep: int) -> tuple[DeviceMesh, DeviceMesh]:
    """(the ranks with different experts, the ranks that share some)."""
    mesh = init_device_mesh("cpu", (WORLD // ep, ep), mesh_dim_names=("edp", "ep"))
    return mesh["ep"], mesh["edp"]


def shard(model: nn.Module, ep: int, divide: bool = True, **options: Any) -> DeviceMesh:
    over, among = meshes(ep)
    for layer in model.layers:
        layer.distribute(over)
        for expert in layer.experts.values():
            fully_shard(expert, mesh=among, **options)
            if divide:
                set_gradient_divide_factor(expert, WORLD)
        fully_shard(layer, **options)
    fully_shard(model, **options)
    return over


def inputs(seed: int) -> list[Tensor]:
    return [data(seed, rank, 4 * BATCH, WIDTH) for rank in range(WORLD)]


def train(rank: int, ep: int, optimizer: MakeOptimizer, skew: float, **options: Any) -> None:
    model, plain = seeded(Model), seeded(Model)
    for m in (model, plain):
        for layer in m.layers:
            with torch.no_grad():
                layer.router.weight[0].mul_(1 + skew).add_(skew)
    over = shard(model, ep, **options)
    theirs = dict(plain.named_parameters())
    ours = dict(model.named_parameters())
    optims = optimizer(model.parameters()), optimizer(plain.parameters())
    for seed in range(STEPS):
        xs = inputs(seed)
        loss = model(xs[rank]).square().mean()
        wanted = [plain(x).square().mean() for x in xs]
        compare("loss", loss.detach(), wanted[rank].detach(), Tolerance())
        loss.backward()
        torch.stack(wanted).mean().backward()
        assert_at_rest(model)
        for name, param in ours.items():
            grad = theirs[name].grad
            compare(f"gradient of {name}", whole(param.grad), grad, Tolerance())
        for order in (1.0, 2.0, float("inf"), float("-inf")):
            norm = nn.utils.get_total_norm([p.grad for p in plain.parameters()], order)
            compare("norm", grad_norm(model, order, expert_mesh=over), norm, Tolerance())
        before = nn.utils.clip_grad_norm_(plain.parameters(), 0.01)
        compare("norm", clip_grad_norm_(model, 0.01, expert_mesh=over), before, Tolerance())
        for optim in optims:
            optim.step()
            optim.zero_grad(set_to_none=False)
    for name, param in ours.items():
        compare(name, whole(param), theirs[name].detach(), Tolerance())


@pytest.mark.parametrize("optimizer", [sgd, adamw])
@pytest.mark.parametrize("ep", [2, 4])
def test_experts_train_as_in_one_process(ep: int, optimizer: MakeOptimizer) -> None:
    run_ranks(train, WORLD, ep, optimizer, 0.0)
