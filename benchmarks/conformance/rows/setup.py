"""What happens when a model is sharded: initial values, odd parameters, options that disagree."""

from __future__ import annotations

import copy
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

import fsdp_compose as fc

from conformance.libraries import Library, Wrong, compare, data, square
from conformance.models import Block, Scaled, Tied, Tower, tower
from conformance.outcomes import row


@row("U12 D11", "ranks start from different weights", names=r"weight|rank \d")
def different_seeds(lib: Library) -> None:
    torch.manual_seed(dist.get_rank())
    model = tower().double()
    torch.manual_seed(0)
    rank0 = tower().double()
    compare(lib.full(lib.shard(model, model.blocks)), dict(rank0.named_parameters()))


@row("U12", "rank 0's weights taken on purpose")
def broadcasts(lib: Library) -> None:
    torch.manual_seed(dist.get_rank())
    model = tower().double()
    torch.manual_seed(0)
    rank0 = tower().double()
    model = lib.shard(model, model.blocks, sync=True)
    compare(lib.full(model), dict(rank0.named_parameters()))


@row("U12", "buffers of rank 0 taken on purpose")
def broadcasts_buffers(lib: Library) -> None:
    model = tower().double()
    model.register_buffer("table", torch.full((3,), float(dist.get_rank())))
    model = lib.shard(model, model.blocks, sync=True)
    compare({"table": lib.inner(model).table}, {"table": torch.zeros(3)})


@row("D11", "ranks have different shapes", names=r"weight|rank \d")
def different_shapes(lib: Library) -> None:
    model = nn.Sequential(nn.Linear(6, 4 + 2 * dist.get_rank()), nn.Identity()).double()
    model = lib.shard(model)
    square(model, data(0)).backward()
    raise Wrong("trained")


@row("D11", "ranks have different dtypes", names=r"weight|rank \d")
def different_dtypes(lib: Library) -> None:
    model = nn.Linear(6, 4).to(torch.float64 if dist.get_rank() else torch.float32)
    model = lib.shard(model)
    x = data(0).to(next(lib.inner(model).parameters()).dtype)
    square(model, x).backward()
    torch.optim.SGD(model.parameters(), lr=0.1).step()
    lib.full(model)
    raise Wrong("trained")


@row(
    "D11",
    "ranks name a unit differently (one block is a unit on rank 0 alone)",
    names=r"blocks|rank \d",
)
def different_units(lib: Library) -> None:
    units = lambda m: m.blocks if dist.get_rank() == 0 else m.blocks[:1]  # noqa: E731
    lib.pair(tower, units=units).train()


@row("U12", "a model on the meta device, given values by its own reset_parameters", names="meta")
def meta(lib: Library) -> None:
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(6, 5), nn.Linear(5, 2)).double()

    def reset(module: Any) -> None:
        for p in module.parameters(recurse=False):
            nn.init.constant_(p, 0.5)

    def fill(module: nn.Module) -> None:
        module.to_empty(device="cpu", recurse=False)
        with torch.no_grad():
            reset(module)

    if lib.name == "fsdp2":  # its documentation: shard, to_empty, then initialise
        model = lib.shard(model)
        model.to_empty(device="cpu")
        for p in model.parameters():
            nn.init.constant_(p, 0.5)
    else:
        key = lib.pick("takes no meta parameters", fsdp1=fill, ours=reset)
        model = lib.shard(model, param_init_fn=key)
    square(model, data(0)).backward()
    compare(lib.full(model), {n: torch.full_like(v, 0.5) for n, v in lib.full(model).items()})


@row("U6 D6", "tied weights across units", names=r"weight|tied|shared")
def tied(lib: Library) -> None:
    lib.pair(Tied, units=lambda m: [m.emb, *m.blocks, m.head]).train()


@row("U6", "tied weights inside one unit")
def tied_inside(lib: Library) -> None:
    lib.pair(Tied).train()


@row("U6", "weights tied by memory: head.weight = nn.Parameter(emb.weight.data)", names="weight")
def tied_by_memory(lib: Library) -> None:
    def build() -> nn.Module:
        model = Tied().double()  # a conversion gives each its own memory
        model.head.weight = nn.Parameter(model.emb.weight.data)
        return model

    lib.pair(build, units=lambda m: [m.emb, *m.blocks, m.head]).train()


@row("U6", "a buffer that is a view of a trained weight", names="weight")
def buffer_view(lib: Library) -> None:
    class Viewed(Tower):
        def __init__(self) -> None:
            super().__init__()
            self.double()
            self.register_buffer("first_row", self.first.weight.data[0])

        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x + self.first_row)

    lib.pair(Viewed).train()


@row("T9", "a tied weight's names in the state dict")
def tied_names(lib: Library) -> None:
    pair = lib.pair(Tied)
    compare(lib.state(pair.model), pair.plain.state_dict())


@row("U15", "a parameter that is a scalar", names=r"scale|scalar")
def scalar(lib: Library) -> None:
    class Scaled(Tower):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.tensor(2.0))

        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) * self.scale

    lib.pair(Scaled).train()


@row("U15", "a parameter whose memory is strided", names=r"weight|contiguous")
def strided(lib: Library) -> None:
    def build() -> nn.Module:
        model = tower()
        model.head.weight = nn.Parameter(torch.randn(6, 2).t())
        return model

    pair = lib.pair(build)
    pair.train()


@row("U15", "parameters smaller than the number of ranks", ranks=4)
def tiny(lib: Library) -> None:
    lib.pair(lambda: nn.Sequential(nn.Linear(6, 1), nn.LayerNorm(1))).train()


@row("U15", "a parameter without elements")
def empty(lib: Library) -> None:
    def build() -> nn.Module:
        model = tower()
        model.nothing = nn.Parameter(torch.empty(0, 3))  # type: ignore[assignment]
        return model

    lib.pair(build, unused=True).train()


@row("U15", "complex parameters")
def complex_numbers(lib: Library) -> None:
    class Phase(Tower):
        def __init__(self) -> None:
            super().__init__()
            self.phase = nn.Parameter(torch.randn(2, dtype=torch.complex128))

        def forward(self, x: Tensor) -> Tensor:
            return (super().forward(x) * self.phase).abs()

    lib.pair(Phase).train()


@row("U8", "frozen parameters beside trained ones in a unit")
def frozen(lib: Library) -> None:
    def build() -> nn.Module:
        model = tower()
        for block in model.blocks:
            block.up.requires_grad_(False)
        return model

    lib.pair(build).train()


@row("U8", "packed bytes (uint8) as frozen parameters")
def packed(lib: Library) -> None:
    class Packed(Tower):
        def __init__(self) -> None:
            super().__init__()
            values = torch.arange(36, dtype=torch.uint8).view(6, 6)
            self.bytes = nn.Parameter(values, requires_grad=False)

        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x + x @ (self.bytes.to(x.dtype) / 100))

    lib.pair(Packed).train()


@row("U36", "a trained weight of a class around its tensor, as torchao's float8 weights")
def around(lib: Library) -> None:
    def build() -> nn.Module:
        model = tower()
        for block in model.blocks:
            block.down.weight = nn.Parameter(Scaled(block.down.weight.detach(), 1.5))
        return model

    pair = lib.pair(build)
    for seed in range(2):
        pair.backward(seed)
        pair.step()
    compare({"output": pair.model(data(9))}, {"output": pair.plain(data(9))})


class Lora(nn.Module):
    """A frozen linear layer with an adapter of rank 2."""

    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base = base.requires_grad_(False)
        dtype = base.weight.dtype
        self.a = nn.Parameter(torch.full((2, base.in_features), 0.1, dtype=dtype))
        self.b = nn.Parameter(torch.full((base.out_features, 2), 0.1, dtype=dtype))

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + x @ self.a.T @ self.b.T


@row("U8", "LoRA added before sharding, on a frozen base")
def lora(lib: Library) -> None:
    def build() -> nn.Module:
        model = tower().requires_grad_(False)
        for block in model.blocks:
            block.up = Lora(block.up)
        return model

    lib.pair(build).train()


@row("U5 D5", "LoRA added after sharding", names=r"blocks\.0\.up|\.a\b|weight")
def late_lora(lib: Library) -> None:
    pair = lib.pair(tower)
    with lib.gathered(pair.model):
        pass
    for module in (pair.inner, pair.plain):
        up = module.blocks[0].up
        module.blocks[0].up = Lora(up)
    pair.optims = [
        pair.make([p for p in m.parameters() if p.requires_grad]) for m in (pair.model, pair.plain)
    ]
    pair.train()


@row("U5 D5", "a parameter replaced after sharding", names=r"head|weight|bias")
def replaced(lib: Library) -> None:
    pair = lib.pair(tower)
    for module in (pair.inner, pair.plain):
        torch.manual_seed(5)
        module.head = nn.Linear(6, 2).double()
    pair.optims = [pair.make(m.parameters()) for m in (pair.model, pair.plain)]
    pair.train()


@row("U5 D18", "the blocks sharded and the rest forgotten", names=r"first|head|parameter")
def forgotten_root(lib: Library) -> None:
    pair = lib.pair(tower)
    module = copy.deepcopy(pair.plain)
    for i, block in enumerate(module.blocks):
        module.blocks[i] = lib.shard(block)
    optim = torch.optim.SGD(module.parameters(), lr=0.1)
    for seed in range(2):
        square(module, data(seed)).backward()
        pair.plain_backward(seed)
        optim.step()
        pair.optims[1].step()
        for model in (module, pair.plain):
            model.zero_grad()
    compare({"first": module.first.weight}, {"first": pair.plain.first.weight})


@row("D9", "a module sharded twice", names=r"fully_shard|unit|module|already")
def twice(lib: Library) -> None:
    pair = lib.pair(tower)
    pair.model = lib.shard(pair.model)
    pair.optims[0] = pair.make(pair.model.parameters())
    pair.train()


@row("D19", "launched for several ranks, no process group", group=False, names="process.?group")
def no_group(lib: Library) -> None:
    import os

    os.environ.update(WORLD_SIZE="2", RANK="0", MASTER_ADDR="127.0.0.1")
    os.environ.pop("MASTER_PORT", None)
    model = tower().double()
    if lib.name == "fsdp2":
        from torch.distributed.fsdp import fully_shard

        fully_shard(model)
    else:
        lib.shard(model)
    raise Wrong("each rank trains by itself")


@row("U5 D15", "print the plan: units, memory, collectives")
def plans(lib: Library) -> None:
    lib.pick("has no plan", ours=1)
    text = str(fc.plan(tower(), world_size=8, units=fc.wrap.by_class({Block})))
    if "blocks.0" not in text:
        raise Wrong("no such unit")


@row("U40", "a world of one rank", ranks=1)
def one_rank(lib: Library) -> None:
    lib.pair(tower).train()


@row("U19", "parameters offloaded to the host")
def offloads(lib: Library) -> None:
    lib.pair(tower, offload=True).train()


@row("U5", "ignored modules are left alone")
def ignored(lib: Library) -> None:
    model = tower().double()
    model = lib.shard(model, model.blocks, ignored=[model.first])
    weight = lib.inner(model).first.weight
    if weight.shape != (6, 6) or type(weight) is not nn.Parameter:
        raise Wrong("changed")
    square(model, data(0)).backward()
    torch.manual_seed(0)
    plain = tower().double()
    square(plain, data(0)).backward()
    compare({"grad": weight.grad}, {"grad": plain.first.weight.grad})
