"""Experts on a mesh of their own beside dense parameters: one scale, as in one process.

Every rank has tokens of its own and holds some of the experts. Tokens travel to their expert by
all-to-all, so an expert's gradient on one rank brings the tokens of all ranks that sent some.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed._functional_collectives import all_to_all_single_autograd
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)
from torch.utils.checkpoint import checkpoint

from fsdp_compose import (
    accumulate,
    clip_grad_norm_,
    count_traffic,
    declare_tensor_parallel,
    fully_shard,
    grad_norm,
    load_checkpoint,
    participate,
    plan,
    save_checkpoint,
    save_full,
    set_gradient_divide_factor,
    state_dict,
)
from fsdp_compose.sharded import ShardedWeightError

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
        self.router = nn.Linear(WIDTH, EXPERTS)
        self.experts = nn.ModuleDict({str(i): Expert() for i in range(EXPERTS)})
        self.ep: DeviceMesh | None = None
        self.skips = False  # an expert without tokens is not run
        self.skipped = 0

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
            mixed = torch.cat([pieces[j] for j in mine])
            skips = self.skips and self.ep is not None and not len(mixed)
            self.skipped += skips
            done = participate(expert, mixed) if skips else expert(mixed)
            parts = done.split([len(pieces[j]) for j in mine])
            for j, part in zip(mine, parts, strict=True):
                out[j] = part
        return torch.cat(out)


class Sparing(Expert):
    """An expert that reads one parameter only where it has tokens, and another never."""

    def __init__(self) -> None:
        super().__init__()
        self.bonus = nn.Parameter(torch.randn(WIDTH))
        self.spare = nn.Parameter(torch.randn(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = super().forward(x)
        return out + self.bonus if len(x) else out


class SparingMoE(MoE):
    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleDict({str(i): Sparing() for i in range(EXPERTS)})


class Grouped(nn.Module):
    """All experts of a rank in two parameters, by expert."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Parameter(torch.randn(EXPERTS, WIDTH, 5) / 4)
        self.down = nn.Parameter(torch.randn(EXPERTS, 5, WIDTH) / 4)

    def forward(self, tokens: Sequence[Tensor]) -> list[Tensor]:
        up, down = (p.to_local() if isinstance(p, DTensor) else p for p in (self.up, self.down))
        return [torch.tanh(x @ u) @ d for x, u, d in zip(tokens, up, down, strict=True)]


class GroupedMoE(MoE):
    def __init__(self) -> None:
        super().__init__()
        self.experts = Grouped()
        self.local = EXPERTS

    def distribute(self, ep: DeviceMesh, how: str = "declared") -> None:
        self.ep, self.local = ep, EXPERTS // ep.size()
        for name, param in list(self.experts.named_parameters()):
            if how == "dtensor":
                part = distribute_tensor(param.detach(), ep, [Shard(0)])
            else:
                part = param.detach().chunk(ep.size())[ep.get_local_rank()].clone()
            setattr(self.experts, name, nn.Parameter(part))
        if how == "declared":
            declare_tensor_parallel(self.experts.parameters(), ep, 0)

    def run(self, tokens: Tensor, counts: Sequence[Sequence[int]]) -> Tensor:
        pieces = list(tokens.split([n for by_expert in counts for n in by_expert]))
        mixed = [torch.cat(pieces[i :: self.local]) for i in range(self.local)]
        out: list[Any] = [None] * len(pieces)
        for i, done in enumerate(self.experts(mixed)):
            out[i :: self.local] = done.split([len(p) for p in pieces[i :: self.local]])
        return torch.cat(out)


class Model(nn.Module):
    def __init__(self, layer: Callable[[], MoE] = MoE) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.layers = nn.ModuleList(layer() for _ in range(2))
        self.head = nn.Linear(WIDTH, 2)
        self.recompute = False

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=False) if self.recompute else layer(x)
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


def train(rank: int, ep: int, optimizer: MakeOptimizer, idle: bool = False, **options: Any) -> int:
    """With ``idle``, the last expert never has a token, and on some ranks nor has another."""
    model, plain = seeded(Model), seeded(Model)
    for m in (model, plain):
        for layer in m.layers:
            layer.skips = idle
            if idle:
                layer.router.bias.data.copy_(torch.tensor([2.0, 0.0, 1.0, -99.0]))
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
            if param.grad is None:  # no rank that holds these experts had tokens for them
                assert idle and not grad.any()
                continue
            compare(f"gradient of {name}", whole(param.grad), grad, Tolerance())
        for order in (1.0, 2.0, float("inf"), float("-inf")):
            norm = nn.utils.get_total_norm([p.grad for p in plain.parameters()], order)
            compare("norm", grad_norm(model, order, expert_mesh=over), norm, Tolerance())
        refuse_torch_norm(ours)
        before = nn.utils.clip_grad_norm_(plain.parameters(), 0.01)
        compare("norm", clip_grad_norm_(model, 0.01, expert_mesh=over), before, Tolerance())
        for optim in optims:
            optim.step()
            optim.zero_grad(set_to_none=False)
    for name, param in ours.items():
        compare(name, whole(param), theirs[name].detach(), Tolerance())
    return sum(layer.skipped for layer in model.layers)


def refuse_torch_norm(ours: dict[str, nn.Parameter]) -> None:
    """Torch would take a norm of this rank's experts alone, unless these are all it is given."""
    grads = {name: p.grad for name, p in ours.items() if p.grad is not None}
    own = [grad for name, grad in grads.items() if "experts" in name]
    for foreach in (None, False) if own else ():
        with pytest.raises(ShardedWeightError, match="or other experts in its place: each rank"):
            nn.utils.clip_grad_norm_(ours.values(), 0.01, foreach=foreach)
        with pytest.raises(ShardedWeightError, match="expert_mesh=mesh"):
            nn.utils.get_total_norm(grads.values(), foreach=foreach)
        nn.utils.get_total_norm(own, foreach=foreach)


@pytest.mark.parametrize(("ep", "optimizer"), [(2, sgd), (2, adamw), (4, sgd)])
def test_experts_train_as_in_one_process(ep: int, optimizer: MakeOptimizer) -> None:
    run_ranks(train, WORLD, ep, optimizer)


def test_experts_that_some_ranks_have_no_tokens_for() -> None:
    """They are skipped there, and their gradients are still those of all tokens."""
    skipped = run_ranks(train, WORLD, 2, sgd, idle=True)
    assert skipped[1] > 2 * STEPS or skipped[3] > 2 * STEPS  # more than the last expert alone
    assert len(set(skipped)) > 2  # and not the same on ranks that share experts


def test_unused_parameters_of_experts_are_left_alone() -> None:
    """One that no rank used keeps no gradient, so that weight decay does not move it."""

    def ranks(rank: int) -> tuple[int, int]:
        models = [seeded(lambda: Model(SparingMoE)) for _ in range(2)]
        for model in models:
            for layer in model.layers:
                layer.router.bias.data.copy_(torch.tensor([2.0, 0.0, 1.0, -99.0]))
        shard(models[0], 2)
        optims = [torch.optim.SGD(m.parameters(), lr=0.1, weight_decay=0.5) for m in models]
        for seed in range(2):
            models[0](inputs(seed)[rank]).square().mean().backward()
            torch.stack([models[1](x).square().mean() for x in inputs(seed)]).mean().backward()
            theirs = dict(models[1].named_parameters())
            none = [n for n, p in models[0].named_parameters() if p.grad is None]
            assert none == [n for n in none if theirs[n].grad is None or not theirs[n].grad.any()]
            for optim in optims:
                optim.step()
                optim.zero_grad()
        for name, param in models[0].named_parameters():
            if name.endswith(("spare", "bonus")):
                compare(name, whole(param), theirs[name].detach(), Tolerance())
        return sum(n.endswith("spare") for n in none), sum(n.endswith("bonus") for n in none)

    spare, bonus = zip(*run_ranks(ranks, WORLD), strict=True)
    assert spare == (4,) * WORLD  # two layers of two experts each on every rank
    assert bonus[:2] == bonus[2:] and min(bonus) >= 2  # of experts that had no token anywhere


def test_recomputed_layers_exchange_their_tokens_again() -> None:
    """The backward of one region gathers dense and expert units, over their own ranks."""

    def ranks(rank: int) -> None:
        model, plain = seeded(Model), seeded(Model)
        shard(model, 2)
        model.recompute = True
        theirs = dict(plain.named_parameters())
        for seed in range(2):
            model(inputs(seed)[rank]).square().mean().backward()
            torch.stack([plain(x).square().mean() for x in inputs(seed)]).mean().backward()
            assert_at_rest(model)
        for name, param in model.named_parameters():
            compare(name, whole(param.grad), theirs[name].grad, Tolerance())

    run_ranks(ranks, WORLD)


@pytest.mark.parametrize("keep", ["sharded", "unsharded"])
def test_experts_accumulate_beside_dense_parameters(keep: Any) -> None:
    def ranks(rank: int) -> int:
        model, plain = seeded(Model), seeded(Model)
        shard(model, 2)
        theirs = dict(plain.named_parameters())
        with count_traffic() as traffic, accumulate(model, keep=keep):
            for seed in range(2):
                model(inputs(seed)[rank]).square().mean().backward()
        for seed in range(2):
            torch.stack([plain(x).square().mean() for x in inputs(seed)]).mean().backward()
        for name, param in model.named_parameters():
            compare(name, whole(param.grad), theirs[name].grad, Tolerance())
        return traffic.reduces

    units = 1 + 2 + EXPERTS
    assert run_ranks(ranks, WORLD) == [2 * units if keep == "sharded" else units] * WORLD


@pytest.mark.parametrize("how", ["declared", "dtensor"])
def test_experts_split_from_one_parameter(how: str, tmp_path: Path) -> None:
    """Norms and checkpoints see all experts: what was saved loads into an unsplit model."""

    def ranks(rank: int) -> None:
        over, among = meshes(2)
        model, plain = seeded(lambda: Model(GroupedMoE)), seeded(lambda: Model(GroupedMoE))
        for layer in model.layers:
            layer.distribute(over, how)
            fully_shard(layer.experts, mesh=among)
            set_gradient_divide_factor(layer.experts, WORLD)
            fully_shard(layer)
        fully_shard(model)
        optims = sgd(model.parameters()), sgd(plain.parameters())
        for seed in range(STEPS):
            xs = inputs(seed)
            model(xs[rank]).square().mean().backward()
            torch.stack([plain(x).square().mean() for x in xs]).mean().backward()
            before = nn.utils.clip_grad_norm_(plain.parameters(), 0.01)
            grads = [p.grad for p in model.parameters()]
            if how == "dtensor":
                compare("norm by torch", nn.utils.get_total_norm(grads), before, Tolerance())
            else:  # a part that was declared reads as a part, for torch
                with pytest.raises(ShardedWeightError, match="torch's total norm over the grad"):
                    nn.utils.get_total_norm(grads)
            compare("norm", clip_grad_norm_(model, 0.01), before, Tolerance())
            for optim in optims:
                optim.step()
                optim.zero_grad()
        found = state_dict(model)
        for name, value in plain.state_dict().items():
            compare(name, found[name], value, Tolerance())
        save_checkpoint(tmp_path, model, optims[0])
        again = fully_shard(seeded(lambda: Model(GroupedMoE), 1))
        load_checkpoint(tmp_path, again, sgd(again.parameters()))
        for name, param in again.named_parameters():
            compare(name, whole(param), plain.state_dict()[name], Tolerance())

    run_ranks(ranks, WORLD)


def test_experts_by_number_are_saved_by_every_rank(tmp_path: Path) -> None:
    """Names unlike on ranks that hold other experts do not collide in a checkpoint."""

    def ranks(rank: int) -> None:
        model = seeded(Model)
        shard(model, 2)
        save_checkpoint(tmp_path, model)
        wanted = {name: whole(p) for name, p in model.named_parameters()}
        for param in model.parameters():
            with torch.no_grad():
                param.zero_()
        load_checkpoint(tmp_path, model)  # the others' are left alone
        for name, param in model.named_parameters():
            compare(name, whole(param), wanted[name], Tolerance())
        everything = seeded(Model, 1)
        fully_shard(everything)
        load_checkpoint(tmp_path, everything)
        found = dict(everything.named_parameters())
        for name in found:
            value = whole(found[name])
            if name in wanted:
                compare(name, value, wanted[name], Tolerance())

    run_ranks(ranks, WORLD)


@pytest.mark.parametrize("ep", [2, 4])
@pytest.mark.parametrize("save", [save_checkpoint, save_full])
def test_other_experts_under_one_name_are_kept_apart(ep: int, save: Any, tmp_path: Path) -> None:
    """Other experts under one name are not saved over each other."""

    def ranks(rank: int) -> None:
        over, among = meshes(ep)
        model = seeded(lambda: Model(GroupedMoE))
        for layer in model.layers:
            layer.distribute(over, "unsaid")
            fully_shard(layer.experts, mesh=among)
            set_gradient_divide_factor(layer.experts, WORLD)
        fully_shard(model)
        save(tmp_path / "saved", model)

    for error in rank_errors(ranks, WORLD):
        assert error is not None and error.startswith("RuntimeError: ")
        assert f"{save.__name__}: " in error  # found here, or told by the rank that left for it
        assert "'layers.0.experts.up' is held by ranks" in error
        assert "declare_tensor_parallel" in error
    assert not (tmp_path / "saved").exists()


def test_what_ranks_repeat_is_saved(tmp_path: Path) -> None:
    def ranks(rank: int) -> None:
        _, among = meshes(2)
        model = seeded(Model)
        fully_shard(model.head, mesh=among)
        set_gradient_divide_factor(model.head, 2)
        fully_shard(model)
        save_checkpoint(tmp_path, model)
        wanted = whole(model.head.weight)
        with torch.no_grad():
            model.head.weight.zero_()
        load_checkpoint(tmp_path, model)
        assert torch.equal(whole(model.head.weight), wanted)

    run_ranks(ranks, WORLD)


@pytest.mark.parametrize("ep", [2, 4])
def test_a_scale_that_nobody_chose_is_an_error(ep: int) -> None:
    def ranks(rank: int) -> None:
        model = seeded(Model)
        shard(model, ep, divide=False)
        model(inputs(0)[rank]).square().mean().backward()

        assert f"over {4 // ep} of 4 ranks: say with set_gradient_divide_factor" in str(plan(model))

    for error in rank_errors(ranks, WORLD):
        assert error is not None and error.startswith("RuntimeError")
        assert "over 4, of unit 'layers.1.experts" in error and f"over {4 // ep}" in error
        assert "set_gradient_divide_factor(experts, 4)" in error


def test_a_norm_that_differs_between_ranks_is_an_error() -> None:
    def ranks(rank: int) -> None:
        model = seeded(Model)
        shard(model, 2)
        model(inputs(0)[rank]).square().mean().backward()
        with pytest.raises(RuntimeError, match=r"2 of the 4 ranks .* expert_mesh of 4"):
            clip_grad_norm_(model, 1.0, expert_mesh=dist.group.WORLD)
        clip_grad_norm_(model, 1.0)

    for error in rank_errors(ranks, WORLD):
        assert error is not None and error.startswith("RuntimeError")
        assert "layers.0.experts" in error and "2 of the 4 ranks" in error
        assert "expert_mesh=mesh['ep']" in error


def test_ranks_that_repeat_each_other_need_no_experts() -> None:
    """Pairs of ranks with the same data: what only one of them shards is averaged as it is."""

    def ranks(rank: int) -> None:
        _, among = meshes(2)
        model, plain = seeded(Model), seeded(Model)
        fully_shard(model.head, mesh=among)
        set_gradient_divide_factor(model.head, 2)
        fully_shard(model)
        xs = inputs(0)[:2]
        model(xs[rank // 2]).square().mean().backward()
        torch.stack([plain(x).square().mean() for x in xs]).mean().backward()
        norm = nn.utils.get_total_norm([p.grad for p in plain.parameters() if p.grad is not None])
        compare("norm", grad_norm(model), norm, Tolerance())

    run_ranks(ranks, WORLD)


def test_units_beside_parallel_ones_are_no_experts(tmp_path: Path) -> None:
    """All are over the same ranks; what is not split is the same on the others."""

    def ranks(rank: int) -> None:
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        model, plain = seeded(Pair), seeded(Pair)
        parallelize_module(model, mesh["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
        for part in (model.norm, model.up, model.down):
            fully_shard(part, mesh=mesh["dp"])
        model(inputs(0)[rank // 2]).square().mean().backward()
        torch.stack([plain(x).square().mean() for x in inputs(0)[:2]]).mean().backward()
        wanted = nn.utils.get_total_norm([p.grad for p in plain.parameters()])
        compare("norm", grad_norm(model), wanted, Tolerance())
        save_checkpoint(tmp_path, model)

    run_ranks(ranks, WORLD)


class Pair(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 8), nn.Linear(8, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(torch.tanh(self.up(self.norm(x))))


def test_a_nonfinite_gradient_of_an_expert_is_named() -> None:
    """A nonfinite gradient of another rank's expert is named."""

    def ranks(rank: int) -> None:
        model = seeded(Model)
        over = shard(model, 4)
        model(inputs(0)[rank]).square().mean().backward()
        if rank == 3:
            model.layers[0].experts["3"].down.weight.grad.to_local()[0] = float("nan")
        clip_grad_norm_(model, 1.0, error_if_nonfinite=True, expert_mesh=over)

    for error in rank_errors(ranks, WORLD):
        assert error is not None and "'layers.0.experts.3.down.weight'" in error


def test_each_unit_communicates_over_its_own_ranks() -> None:
    """Two gathers and a reduction of every unit, none of an expert that one rank holds alone."""

    def ranks(rank: int, ep: int) -> list[int]:
        model = seeded(Model)
        shard(model, ep)
        for seed in range(3):
            with count_traffic() as traffic:
                model(inputs(seed)[rank]).square().mean().backward()
            model.zero_grad()
        return [traffic.gathers, traffic.reduces]

    dense = 1 + 2
    for ep, experts in ((2, 2 * EXPERTS // 2), (4, 0)):
        for gathers, reduces in run_ranks(ranks, WORLD, ep):
            assert reduces == dense + experts
            assert gathers == 2 * (dense + experts) - 1  # the root's stays from forward to backward


def test_ranks_that_run_other_experts_are_told() -> None:
    """Each mesh has a log of its own; a difference in one names its units."""

    def ranks(rank: int) -> None:
        model = seeded(Model)
        shard(model, 2)
        expert = model.layers[0].experts[str(2 * (rank % 2) + rank // 2)]  # not alike on 0 and 2
        x = inputs(0)[rank]
        (model(x).square().mean() + expert(x).sum()).backward()

    for error in rank_errors(ranks, WORLD):
        assert error is not None and "ranks run different units" in error
        assert "layers.0.experts" in error
