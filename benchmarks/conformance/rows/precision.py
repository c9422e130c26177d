"""Which numbers are computed in which dtype: storage, compute, reduction."""

from __future__ import annotations

import copy
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecision as Mixed1
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.fsdp import fully_shard as fsdp2

import fsdp_compose as fc

from conformance.libraries import Library, Wrong, compare, data, world
from conformance.models import Block, Tower, tower
from conformance.outcomes import row


@row("basic", "bfloat16 compute, float32 reduction and weights, by the definition")
def mixed(lib: Library) -> None:
    torch.manual_seed(0)
    plain = tower()
    model = copy.deepcopy(plain)
    model = lib.shard(model, model.blocks, mixed=torch.bfloat16)
    optims = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (model, plain)]
    for seed in range(2):
        model(data(seed).float()).float().square().mean().backward()
        for r in range(world()):  # per rank in bfloat16, then summed in float32
            low = copy.deepcopy(plain).to(torch.bfloat16)
            low(data(seed, r).to(torch.bfloat16)).float().square().mean().backward()
            for p, q in zip(plain.parameters(), low.parameters()):
                grad = q.grad.float() / world()
                p.grad = grad if p.grad is None else p.grad + grad
        for optim in optims:
            optim.step()
            optim.zero_grad()
    compare(lib.full(model), dict(plain.named_parameters()), 1e-6)


class Norms(Tower):
    """float32 norms in bfloat16 blocks."""

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for block in self.blocks:
            hidden = block.norm(x.float()).to(x.dtype)
            x = x + block.down(torch.tanh(block.up(hidden)))
        return self.head(x)


@row("U7 D7", "a unit of bfloat16 weights with a float32 norm", names=r"norm|weight|dtype")
def mixed_storage(lib: Library) -> None:
    torch.manual_seed(0)
    plain = Norms().to(torch.bfloat16)
    for block in plain.blocks:
        block.norm.float()
    model = copy.deepcopy(plain)
    Block.forward = lambda b, x: x + b.down(torch.tanh(b.up(b.norm(x.float()).to(x.dtype))))  # type: ignore[method-assign]
    Norms.forward = Tower.forward  # type: ignore[method-assign]
    model = lib.shard(model, model.blocks)
    model(data(0).bfloat16()).float().square().mean().backward()
    grads = lib.grads(model)
    for r in range(world()):
        (plain(data(0, r).bfloat16()).float().square().mean() / world()).backward()
    wanted = {n: p.grad for n, p in plain.named_parameters()}
    compare(grads, wanted, 0.02)


@row("U7", "one module kept in float32 under a bfloat16 policy")
def kept_precision(lib: Library) -> None:
    seen = []

    class Watches(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            seen.append(self.weight.dtype)
            return super().forward(x.to(self.weight.dtype))

    torch.manual_seed(0)
    model: Any = nn.Sequential(nn.Linear(6, 6), Watches(6, 2))
    low = torch.bfloat16
    if lib.name == "ours":
        model = fc.fully_shard(
            model, mp_policy=lambda fqn, p: fc.MixedPrecision(None if fqn[0] == "1" else low)
        )
    elif lib.name == "fsdp2":
        fsdp2(model[1], mp_policy=MixedPrecisionPolicy())
        fsdp2(model, mp_policy=MixedPrecisionPolicy(param_dtype=low))
    else:
        lib.pick("one dtype; autocast instead", fsdp1=1)
        model = lib.shard(
            model, [model[0]], mixed_precision=Mixed1(low, _module_classes_to_ignore=[Watches])
        )
    model(data(0).float()).float().sum().backward()
    if seen != [torch.float32]:
        raise Wrong(f"computed in {seen}")


@row("D13", "a float64 input cast to bfloat16 by the policy")
def lossy_input(lib: Library) -> None:
    model = nn.Linear(6, 2)
    model = lib.shard(model, mixed=torch.bfloat16)
    if model(data(0)).dtype != torch.bfloat16:
        raise Wrong("computed in another dtype")


@row("U33", "reduce_dtype holds on the replicas' axis too", ranks=4)
def reduce_dtype(lib: Library) -> None:
    """256 + 1 + 0 + 0: bfloat16 sums to 256 over the replicas where float32 gives 257."""
    from torch.distributed.device_mesh import init_device_mesh

    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    model = lib.shard(nn.Linear(2, 2, bias=False), mesh=mesh, mixed=torch.bfloat16)
    scale = [256.0, 0.0, 1.0, 0.0][dist.get_rank()]
    model(torch.full((1, 2), scale)).sum().backward()
    compare(lib.grads(model), {"weight": torch.full((2, 2), 257 / 4)})


@row("U26", "gathers that send bfloat16 of float32 weights")
def low_gather(lib: Library) -> None:
    model = lib.shard(nn.Linear(2, 2, bias=False), mixed=torch.bfloat16)
    y = model(torch.ones(1, 2))
    if y.dtype != torch.bfloat16:
        raise Wrong(str(y.dtype))


@row("U26", "gathers that send int8, with scales")
def int8_gather(lib: Library) -> None:
    lib.pick("sends a subclass of torch's, or nothing", ours=1)

    def encode(shard: Tensor) -> Tensor:
        scale = shard.abs().max().clamp_min(1e-12).float().reshape(1) / 127
        values = (shard / scale).round().to(torch.int8)
        return torch.cat([scale.view(torch.uint8), values.view(torch.uint8)])

    def decode(code: Tensor, into: Tensor) -> None:
        into.copy_(code[4:].view(torch.int8) * code[:4].view(torch.float32))

    codec = fc.GatherCodec(encode, decode)
    torch.manual_seed(0)
    plain = tower()
    model = fc.fully_shard(copy.deepcopy(plain), mp_policy=fc.MixedPrecision(gather_codec=codec))
    y = model(data(0).float())
    compare({"y": y}, {"y": plain(data(0).float())}, 0.05)


@row("U31", "gradients of float32 weights stay float32")
def grad_dtype(lib: Library) -> None:
    model = lib.shard(nn.Linear(2, 2), mixed=torch.bfloat16)
    model(torch.ones(1, 2)).sum().backward()
    if {p.grad.dtype for p in model.parameters() if p.grad is not None} != {torch.float32}:
        raise Wrong("another dtype")


@row("basic", "torch.autocast around the forward")
def autocast(lib: Library) -> None:
    pair = lib.pair(tower, dtype=torch.float32)

    def loss(model: Any, x: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return model(x).float().square().mean()

    for seed in range(2):
        pair.backward(seed, loss)
        pair.step()
    pair.check(1e-5)
