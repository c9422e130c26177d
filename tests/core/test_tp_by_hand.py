"""Layers split by hand, and what is refused: wrong order, meshes that overlap."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard as fsdp2
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.distributed.tensor.parallel import (
    SequenceParallel,
    parallelize_module,
)

import fsdp_compose
from fsdp_compose import fully_shard
from fsdp_compose.construct.tensor_parallel import declare_tensor_parallel

from harness import TORCH, rank_errors, run_ranks
from tp_models import (
    _PLAN,
    MLP,
    STEPS,
    adamw,
    assert_equal,
    language_model,
    mesh_of,
    parallelize,
)


class HandMLP(nn.Module):
    """Column then row parallel, written in terms of this rank's parts."""

    def __init__(self, whole: MLP, tp: DeviceMesh, sizes: list[int]) -> None:
        super().__init__()
        self.group = tp.get_group()
        rank = tp.get_local_rank()
        mine = slice(sum(sizes[:rank]), sum(sizes[: rank + 1]))
        self.up = nn.Parameter(whole.up.weight.detach()[mine].clone())
        self.up_bias = nn.Parameter(whole.up.bias.detach()[mine].clone())
        self.down = nn.Parameter(whole.down.weight.detach()[:, mine].clone())
        self.bias = nn.Parameter(whole.down.bias.detach().clone())
        declare_tensor_parallel([self.up, self.up_bias], tp, 0)
        declare_tensor_parallel(self.down, tp, -1)

    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.tanh(F.linear(x, self.up, self.up_bias))
        out = F.linear(hidden, self.down)
        return _Sum.apply(out, self.group) + self.bias


class _Sum(torch.autograd.Function):
    """Sum over the ranks; each rank's gradient is the whole one."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        x = x.clone()
        dist.all_reduce(x, group=group)
        return x

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad, None


class PlainMLP(nn.Module):
    """The same, in one process."""

    def __init__(self, whole: MLP) -> None:
        super().__init__()
        self.up, self.up_bias = whole.up.weight, whole.up.bias
        self.down, self.bias = whole.down.weight, whole.down.bias

    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.tanh(F.linear(x, self.up, self.up_bias))
        return F.linear(hidden, self.down, self.bias)


def _by_hand(rank: int, path: Path) -> None:
    mesh = mesh_of(dp=2, tp=2)
    torch.manual_seed(0)
    whole_mlp = MLP(4, 7).double()
    model = HandMLP(whole_mlp, mesh["tp"], [5, 2])
    shapes = [p.shape for p in model.parameters()]
    fully_shard(model, mesh=mesh["dp"])
    reference = PlainMLP(whole_mlp)
    assert shapes == [p.shape for p in model.parameters()]
    optim, plain = adamw(model.parameters()), adamw(reference.parameters())
    for seed in range(STEPS):
        torch.manual_seed(seed)
        xs = torch.randn(2, 3, 4, dtype=torch.float64)
        model(xs[mesh["dp"].get_local_rank()]).square().mean().backward()
        reference(xs).square().mean().backward()
        for order in (2.0, float("inf")):
            wanted = nn.utils.get_total_norm([p.grad for p in reference.parameters()], order)
            torch.testing.assert_close(fsdp_compose.grad_norm(model, order), wanted)
        found = fsdp_compose.clip_grad_norm_(model, 0.1)
        torch.testing.assert_close(found, nn.utils.clip_grad_norm_(reference.parameters(), 0.1))
        optim.step(), plain.step()
        optim.zero_grad(), plain.zero_grad()
    state = fsdp_compose.state_dict(model)
    torch.testing.assert_close(dict(state), dict(reference.state_dict()))
    optim_state = fsdp_compose.optim_state_dict(model, optim)
    exp_avg = plain.state_dict()["state"][0]["exp_avg"]
    torch.testing.assert_close(optim_state["state"]["up"]["exp_avg"], exp_avg)
    fsdp_compose.save_checkpoint(path, model, optim)
    fsdp_compose.save_full(path / "full", model)
    torch.save(dict(reference.state_dict()), path / f"reference{rank}.pt")
    sharded = copy.deepcopy(fsdp_compose.state_dict(model, "sharded"))
    assert sharded["up"].shape == (7, 4)
    for load in (
        lambda: fsdp_compose.load_checkpoint(path, model, optim),
        lambda: fsdp_compose.load_full(path / "full", model),
        lambda: fsdp_compose.load_state_dict(model, state),
        lambda: fsdp_compose.load_state_dict(model, sharded),
        lambda: model.load_state_dict(sharded),
        lambda: fsdp_compose.load_optim_state_dict(model, optim, optim_state),
    ):
        if load.__code__.co_names[-1] != "load_optim_state_dict":
            with torch.no_grad():
                for param in model.parameters():
                    param.zero_()
        load()
        torch.testing.assert_close(dict(fsdp_compose.state_dict(model)), dict(state))
    again = fsdp_compose.optim_state_dict(model, optim)
    torch.testing.assert_close(again["state"]["down"], optim_state["state"]["down"])


def test_layers_that_were_split_by_hand(tmp_path: Path) -> None:
    """Parts of 5 and 2 rows: clipping, state and checkpoints see one parameter of 7."""
    run_ranks(_by_hand, 4, tmp_path)
    torch.manual_seed(0)
    one = PlainMLP(MLP(4, 7).double())
    fsdp_compose.load_checkpoint(tmp_path, one, adamw(one.parameters()))
    torch.testing.assert_close(dict(one.state_dict()), torch.load(tmp_path / "reference0.pt"))


def test_a_part_never_passes_for_the_whole() -> None:
    def check(rank: int) -> None:
        mesh = mesh_of(dp=1, tp=2)
        model = HandMLP(MLP(4, 6), mesh["tp"], [3, 3])
        fully_shard(model, mesh=mesh["dp"], ignored=[model.up])
        fsdp_compose.state_dict(model)

    for error in rank_errors(check, 2):
        assert error is not None and "'up' was declared to be a part of shape (3, 4)" in error
        assert "of shape (6, 4), but no unit has it" in error and "without ignored=" in error


def test_a_declaration_that_cannot_be() -> None:
    def check(rank: int, case: str) -> None:
        mesh = mesh_of(dp=1, tp=2)
        param = nn.Parameter(torch.zeros(3, 4 + (rank if case == "differ" else 0)))
        if case == "dtensor":
            param = nn.Parameter(distribute_tensor(param.detach(), mesh["tp"], [Shard(0)]))
        dim = {"dimension": 2, "dimensions": rank}.get(case, 0)
        if case == "dimensions":
            param = nn.Parameter(torch.zeros(4, 4))
        declare_tensor_parallel(torch.zeros(2) if case == "type" else param, mesh["tp"], dim)

    for case, text in (
        ("differ", r"rank \d has parts of \['\[\d\] torch.float32 split in .*the same parameters"),
        ("dimensions", r"parts of \['\[4\] torch.float32 split in dimension \d'\], this rank has"),
        ("dtensor", "is a DTensor, which says how it is split; wanted a plain parameter"),
        ("dimension", "has no dimension 2 that could be split"),
        ("type", "item 0 is a Tensor; wanted a parameter"),
    ):
        for error in rank_errors(check, 2, case):
            assert error is not None and re.search(text, error), error


def _errors(world: int, build: Callable[[DeviceMesh], Any]) -> list[str]:
    def check(rank: int) -> None:
        build(mesh_of(dp=2, tp=world // 2))

    found = rank_errors(check, world)
    assert all(found), found
    return [str(error) for error in found]


def test_tensor_parallelism_comes_first() -> None:
    """Refused at once where a sharded parameter is to be split, else at the next forward."""

    def split(mesh: DeviceMesh) -> None:
        parallelize_module(fully_shard(MLP(4, 6), mesh=mesh["dp"]), mesh["tp"], _PLAN)

    def repeat(mesh: DeviceMesh) -> None:
        model = fully_shard(nn.Sequential(nn.LayerNorm(4)), mesh=mesh["dp"])
        parallelize_module(model, mesh["tp"], {"0": SequenceParallel()})

    def replace(mesh: DeviceMesh) -> None:
        model = fully_shard(MLP(4, 6), mesh=mesh["dp"])
        weight = distribute_tensor(model.up.weight.full_tensor(), mesh["tp"], [Shard(0)])
        model.up.weight = nn.Parameter(weight)
        model(torch.ones(2, 4))

    after = "build the model again, call parallelize_module(model, mesh['tp'], plan), then fully"
    first = "up" if TORCH >= (2, 13) else "down"  # before, rows are refused at the next forward
    for build, name in ((split, f"'{first}.weight' of unit 'M"), (repeat, "'0.weight' of unit 'S")):
        for error in _errors(4, build):
            assert f"ShardedWeightError: parameter {name}" in error, error
            assert "is to become a DTensor now" in error and after in error, error
    for error in _errors(4, replace):
        assert error.startswith("RuntimeError: parameter 'up.weight' of unit 'MLP' was replaced by")
        assert "a DTensor after fully_shard" in error and after in error, error


def test_meshes_that_overlap() -> None:
    """All ranks by default, the tensor-parallel dimension itself, FSDP2, another root mesh."""

    def split(mesh: DeviceMesh) -> MLP:
        return parallelize_module(MLP(4, 6), mesh["tp"], _PLAN)

    def default(mesh: DeviceMesh) -> None:
        fully_shard(split(mesh))

    def same(mesh: DeviceMesh) -> None:
        fully_shard(split(mesh), mesh=mesh["tp"])

    def group(mesh: DeviceMesh) -> None:
        fully_shard(split(mesh), mesh=mesh["tp"].get_group())

    def twice(mesh: DeviceMesh) -> None:
        fully_shard(fsdp2(MLP(4, 6), mesh=mesh["dp"]), mesh=mesh["dp"])

    def both(mesh: DeviceMesh) -> None:
        fully_shard(fsdp2(split(mesh), mesh=mesh["dp"]), mesh=mesh["dp"])

    def other_root(mesh: DeviceMesh) -> None:
        mine = [[0, 2], [1, 3]][dist.get_rank() % 2]
        everyone = [DeviceMesh("cpu", ranks) for ranks in ([0, 2], [1, 3])]
        fully_shard(split(mesh), mesh=everyone[mine[0]])

    def crossed(mesh: DeviceMesh) -> None:
        twisted = DeviceMesh("cpu", [[0, 1], [3, 2]], mesh_dim_names=("dp", "x"))
        fully_shard(split(mesh), mesh=twisted["dp"])

    def by_hand(mesh: DeviceMesh) -> None:
        mlp = MLP(4, 6)
        declare_tensor_parallel(mlp.up.weight, mesh["tp"], 0)
        fully_shard(mlp, mesh=mesh["tp"])

    for build in (twice, both):
        for error in _errors(4, build):
            assert "torch.distributed.fsdp's fully_shard has sharded" in error, error
    overlap = (default, same, group, by_hand)
    for build in (*overlap, other_root):
        for error in _errors(4, build):
            start = "ValueError: fully_shard: parameter 'up.weight' of unit 'MLP'"
            assert error.startswith(start), error
            assert "mesh['dp']" in error, error
            if build in overlap:
                assert "would be sharded over ranks [" in error and "of them too" in error, error
            if build is default:
                assert "over ranks [0, 1, 2, 3]" in error and "default mesh is all ranks" in error
            if build is other_root:
                assert "are not in the mesh that" in error and "init_device_mesh" in error
    for error in _errors(4, crossed):
        assert "of rank 1 of 2 of tensor parallelism" in error, error
        assert "What is sharded together must be the same part: slice both meshes" in error


def test_an_equal_mesh_is_the_same_mesh() -> None:
    """DTensor may answer with a mesh of equal ranks that was sliced from an older one."""

    def check(rank: int) -> None:
        for names in (("dp", "tp"), ("data", "tp")):
            mesh = mesh_of(**{names[0]: 2, names[1]: 2})
            fully_shard(parallelize(language_model(), mesh["tp"]), mesh=mesh[names[0]])
        both = mesh_of(replicate=2, shard=1, tp=2)
        flat = both["replicate", "shard"]._flatten("dp")
        fully_shard(parallelize(language_model(), both["tp"]), mesh=flat)
        model = parallelize(language_model(), both["tp"])
        fully_shard(model, mesh=flat.get_group())
        assert_equal(model, language_model())

    run_ranks(check, 4)


def test_a_partial_sum_is_no_parameter() -> None:
    def build(mesh: DeviceMesh) -> None:
        from torch.distributed.tensor import Partial

        module = nn.Module()
        module.p = nn.Parameter(DTensor.from_local(torch.ones(3), mesh["tp"], [Partial()]))
        fully_shard(module, mesh=mesh["dp"])

    for error in _errors(4, build):
        assert "'p' of unit 'Module' is a DTensor with placements (Partial(sum),)" in error
        assert "wanted Shard and Replicate only" in error
