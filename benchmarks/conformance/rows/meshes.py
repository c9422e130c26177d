"""Replicas, tensor parallelism and experts: meshes of more than one axis."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)

import fsdp_compose as fc

from conformance.libraries import Library, Pair, Wrong, compare, data, square, world
from conformance.models import tower
from conformance.outcomes import row


def _mesh(*sizes: int) -> Any:
    return init_device_mesh("cpu", sizes, mesh_dim_names=("replicate", "shard"))


@row("U24", "two replicas of two shards", ranks=4)
def hybrid(lib: Library) -> None:
    lib.pair(tower, mesh=_mesh(2, 2)).train()


@row("U40", "one replica of two shards: a mesh with a 1 in it")
def one_replica(lib: Library) -> None:
    lib.pair(tower, mesh=_mesh(1, 2)).train()


@row("U40", "two replicas of one shard: a mesh with a 1 in it")
def one_shard(lib: Library) -> None:
    lib.pair(tower, mesh=_mesh(2, 1)).train()


@row("U11", "clipping over two replicas of two shards", ranks=4)
def clips_hybrid(lib: Library) -> None:
    pair = lib.pair(tower, mesh=_mesh(2, 2), dtype=torch.float32)
    pair.backward(0)
    found = lib.clip(pair.model, 0.01)
    found = found.full_tensor() if hasattr(found, "full_tensor") else found
    compare(
        {"norm": found}, {"norm": nn.utils.clip_grad_norm_(pair.plain.parameters(), 0.01)}, 1e-6
    )


class Mlp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(6, 8), nn.Linear(8, 6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(torch.tanh(self.up(x)))


PLAN = {"up": ColwiseParallel(), "down": RowwiseParallel()}


def _tensor_parallel(lib: Library, dtype: torch.dtype) -> tuple[Pair, Any]:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    lib.pick("takes no DTensors on another axis", fsdp1=1, fsdp2=1, ours=1)
    pair = Pair.__new__(Pair)
    torch.manual_seed(0)
    pair.lib, pair.plain, pair.dtype = lib, Mlp().to(dtype), dtype
    torch.manual_seed(0)
    model = parallelize_module(Mlp().to(dtype), mesh["tp"], PLAN)
    pair.model = lib.shard(model, mesh=mesh["dp"])
    pair.optims = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (pair.model, pair.plain)]
    return pair, mesh["dp"].get_local_rank()


@row("U21", "tensor parallelism inside, sharding outside", ranks=4)
def tensor_parallel(lib: Library) -> None:
    pair, replica = _tensor_parallel(lib, torch.float64)
    for seed in range(2):
        square(pair.model, data(seed, replica)).backward()
        (sum(square(pair.plain, data(seed, r)) for r in (0, 1)) / 2).backward()
        pair.step()
    for seed in (7, 8):
        compare({"y": pair.model(data(seed, 0))}, {"y": pair.plain(data(seed, 0))})


@row("U11", "one clip_grad_norm_ over a tensor-parallel sharded model", ranks=4)
def clips_tensor_parallel(lib: Library) -> None:
    pair, replica = _tensor_parallel(lib, torch.float32)
    square(pair.model, data(0, replica).float()).backward()
    (sum(square(pair.plain, data(0, r).float()) for r in (0, 1)) / 2).backward()
    found = lib.clip(pair.model, 0.01)
    found = found.full_tensor() if hasattr(found, "full_tensor") else found
    wanted = nn.utils.clip_grad_norm_(pair.plain.parameters(), 0.01)
    compare({"norm": found}, {"norm": wanted}, 1e-6)


@row(
    "D9", "tensor parallelism applied after sharding", ranks=4, names=r"weight|parallel|up\b|shard"
)
def tp_after(lib: Library) -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    lib.pick("takes no DTensors on another axis", fsdp1=1, fsdp2=1, ours=1)
    torch.manual_seed(0)
    plain = Mlp().double()
    torch.manual_seed(0)
    model = lib.shard(Mlp().double(), mesh=mesh["dp"])
    parallelize_module(lib.inner(model), mesh["tp"], PLAN)
    replica = mesh["dp"].get_local_rank()
    optims = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (model, plain)]
    square(model, data(0, replica)).backward()
    (sum(square(plain, data(0, r)) for r in (0, 1)) / 2).backward()
    for optim in optims:
        optim.step()
    compare({"y": model(data(7, 0))}, {"y": plain(data(7, 0))})


@row(
    "D9",
    "sharded over the axis that tensor parallelism split",
    ranks=2,
    names=r"weight|mesh|parallel",
)
def same_axis(lib: Library) -> None:
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    lib.pick("takes no DTensors on another axis", fsdp1=1, fsdp2=1, ours=1)
    model = parallelize_module(Mlp().double(), mesh["tp"], PLAN)
    model = lib.shard(model, mesh=mesh["tp"])
    square(model, data(0)).backward()
    raise Wrong("trained on ranks with different data")


class Mixture(nn.Module):
    """Dense layers on every rank; one expert per rank, which sees every rank's tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.dense = nn.Linear(6, 6)
        self.expert = nn.Linear(6, 6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.expert(self.dense(x))


@row("U22", "experts on a mesh of one rank beside dense layers on all", names=r"expert|divide")
def experts(lib: Library) -> None:
    """The expert is this rank's own: its gradient is not averaged, only divided."""
    lib.pick("shards over one mesh", fsdp2=1, ours=1)
    torch.manual_seed(0)
    plain = Mixture().double()
    torch.manual_seed(0)
    model = Mixture().double()
    alone = init_device_mesh("cpu", (2, 1), mesh_dim_names=("ep", "edp"))["edp"]
    if lib.name == "ours":
        fc.fully_shard(model.expert, mesh=alone)
        fc.set_gradient_divide_factor(model.expert, world())
        fc.fully_shard(model)
    else:
        from torch.distributed.fsdp import fully_shard

        fully_shard(model.expert, mesh=alone)
        model.expert.set_gradient_divide_factor(float(world()))
        fully_shard(model)
    square(model, data(0)).backward()
    square(plain, data(0)).backward()
    wanted = plain.expert.weight.grad / world()
    compare({"expert": model.expert.weight.grad.full_tensor()}, {"expert": wanted})


@row("D9", "ranks pass meshes of different ranks", ranks=2, names=r"mesh|rank \d|group")
def other_meshes(lib: Library) -> None:
    group = dist.new_group([0, 1])
    other = dist.new_group([1])
    del group
    if lib.name == "ddp":
        raise_group = other if dist.get_rank() else None
        model = lib.shard(tower().double(), process_group=raise_group)
    else:
        from torch.distributed.device_mesh import DeviceMesh

        mesh = DeviceMesh.from_group(other, "cpu") if dist.get_rank() else None
        model = lib.shard(tower().double(), mesh=mesh)
    square(model, data(0)).backward()
    raise Wrong("trained")
