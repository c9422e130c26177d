"""Steps that training loops take: accumulation, clipping, conditional compute, failed steps."""

from __future__ import annotations

import contextlib
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.join import Join

import fsdp_compose as fc

from conformance.libraries import Library, compare, data, square, world
from conformance.models import Tower, tower
from conformance.outcomes import row


@row("basic", "three SGD steps")
def basic(lib: Library) -> None:
    lib.pair(tower).train(3)


@row("basic", "units stay gathered from forward to backward")
def kept(lib: Library) -> None:
    lib.pair(tower, kept=True).train(3)


class Experts(Tower):
    """The ranks choose a block each; ``skip`` runs where a rank runs a block that others skip."""

    def forward(self, x: Tensor, which: int | None = 0) -> Tensor:
        return self.head(self.first(x) if which is None else self.blocks[which](self.first(x)))


def _chosen(lib: Library, mine: int | None, of: Any) -> None:
    pair = lib.pair(Experts, unused=True)
    for seed in range(2):
        square(lambda x: pair.model(x, mine), data(seed)).backward()
        losses = [
            square(lambda x, r=r: pair.plain(x, of(r)), data(seed, r)) for r in range(world())
        ]
        (sum(losses) / world()).backward()
        pair.step()
    pair.check()


@row("U1 D2", "each rank runs another expert, of equal shapes", names=r"blocks\.\d|rank \d")
def other_experts(lib: Library) -> None:
    _chosen(lib, dist.get_rank(), lambda r: r)


@row("U1 D2", "a rank runs one unit fewer", names=r"blocks\.\d|rank \d")
def one_fewer(lib: Library) -> None:
    _chosen(lib, 0 if dist.get_rank() == 0 else None, lambda r: 0 if r == 0 else None)


class Skips(Experts):
    """A rank that skips a block says so to its library, where that wants to know."""

    skip: Any = None

    def forward(self, x: Tensor, which: int | None = 0) -> Tensor:
        if which is None and self.skip is not None:
            return self.head(self.skip(self.blocks[0], self.first(x)))
        return super().forward(x, which)


@row("U1", "a rank skips a unit the way its library provides", names=r"blocks\.\d|rank \d")
def participates(lib: Library) -> None:
    skip = lib.pick("runs every unit on every rank", ours=fc.participate, ddp=None)
    pair = lib.pair(Skips, unused=True)
    pair.inner.skip = skip
    mine = 0 if dist.get_rank() == 0 else None
    for seed in range(2):
        square(lambda x: pair.model(x, mine), data(seed)).backward()
        losses = [
            square(lambda x, r=r: pair.plain(x, None if r else 0), data(seed, r)) for r in (0, 1)
        ]
        (sum(losses) / 2).backward()
        pair.step()
    pair.check()


@row("U1", "AdamW leaves a parameter alone that no rank used")
def decay(lib: Library) -> None:
    pair = lib.pair(Experts, unused=True, optim=torch.optim.AdamW)
    for seed in range(2):
        pair.backward(seed)
        pair.step()
    pair.check()


@row("U1", "a rank has one batch fewer: the way its library provides", names=r"rank \d")
def uneven(lib: Library) -> None:
    pair = lib.pair(tower)
    batches = range(2 - dist.get_rank())
    if lib.name == "ddp":
        with Join([pair.model], divide_by_initial_world_size=True):
            for seed in batches:
                square(pair.model, data(seed)).backward()
                pair.optims[0].step()
                pair.optims[0].zero_grad()
    else:
        lib.pick("asks for as many batches on every rank", ours=1)
        for seed in range(2):
            loss = square(pair.model, data(seed)) if seed in batches else fc.participate(pair.model)
            loss.backward()
            pair.optims[0].step()
            pair.optims[0].zero_grad()
    for seed in range(2):
        (sum(square(pair.plain, data(seed, r)) for r in range(2 - seed)) / 2).backward()
        pair.optims[1].step()
        pair.optims[1].zero_grad()
    pair.check()


@row("U14", "accumulation over three microbatches, without communication")
def accumulates(lib: Library) -> None:
    pair = lib.pair(tower)
    with lib.no_sync(pair.model):
        pair.backward(0)
        pair.backward(1)
    pair.backward(2)
    pair.step()
    pair.check()


@row("U14", "accumulation over three microbatches, reduced each time")
def accumulates_reduced(lib: Library) -> None:
    pair = lib.pair(tower)
    for seed in range(3):
        pair.backward(seed)
    pair.step()
    pair.check()


@row("U14 D12", "gradient sync switched off, then step()", names=r"gradient|unit|blocks|weight")
def forgotten_sync(lib: Library) -> None:
    pair = lib.pair(tower)
    with lib.no_sync(pair.model):
        pair.backward(0)
    pair.step()
    pair.check()


@row("U14", "zero_grad() drops what was accumulated without communication")
def clears_accumulated(lib: Library) -> None:
    pair = lib.pair(tower)
    with lib.no_sync(pair.model):
        pair.backward(0)
        for optim in pair.optims:
            optim.zero_grad()
    pair.train()


@row(
    "U14 D12",
    "gradients accumulated without communication, then torch's clipping",
    names=r"gradient|unit|blocks|weight",
)
def clips_accumulated(lib: Library) -> None:
    pair = lib.pair(tower)
    with lib.no_sync(pair.model):
        pair.backward(0)
    norms = [torch.nn.utils.clip_grad_norm_(m.parameters(), 1e9) for m in (pair.model, pair.plain)]
    compare({"norm": torch.as_tensor(float(norms[0]))}, {"norm": norms[1].detach()})


@row("U14", "an exception inside the accumulation scope, then a normal step")
def accumulation_fails(lib: Library) -> None:
    pair = lib.pair(tower)
    with contextlib.suppress(ValueError), lib.no_sync(pair.model):
        raise ValueError("bad batch")
    pair.train()


@row("U31", "bfloat16 gradients 256 + 1 - 256, accumulated over three microbatches")
def small_sums(lib: Library) -> None:
    model = lib.shard(nn.Linear(2, 2, bias=False), mixed=torch.bfloat16)
    for scale in (256.0, 1.0, -256.0):
        last = scale < 0
        with contextlib.nullcontext() if last else lib.no_sync(model):
            model(torch.full((1, 2), scale)).sum().backward()
    compare(lib.grads(model), {"weight": torch.ones(2, 2)})


@row("U32", "mixed precision, a parameter first used in the last microbatch")
def late_use(lib: Library) -> None:
    class Late(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(2, 2, bias=False), nn.Linear(2, 2, bias=False)

        def forward(self, x: Tensor, both: bool) -> Tensor:
            return self.a(x) + (self.b(x) if both else 0)

    model = lib.shard(Late(), mixed=torch.bfloat16, unused=True)
    with lib.no_sync(model):
        model(torch.ones(1, 2), False).sum().backward()
    model(torch.ones(1, 2), True).sum().backward()
    compare(lib.grads(model), {"a.weight": torch.full((2, 2), 2.0), "b.weight": torch.ones(2, 2)})


@row("U9", "gradients summed instead of averaged")
def divide_factor(lib: Library) -> None:
    pair = lib.pair(tower)
    model = pair.model
    lib.pick(
        "divides by the number of ranks, or takes a communication hook",
        fsdp2=lambda: [b.set_gradient_divide_factor(1.0) for b in [model, *model.blocks]],
        ours=lambda: fc.set_gradient_divide_factor(model, 1.0),
    )()
    for seed in range(2):
        square(model, data(seed)).backward()
        sum(square(pair.plain, data(seed, r)) for r in range(world())).backward()  # type: ignore[union-attr]
        pair.step()
    pair.check()


def _clips(lib: Library, clip: Any) -> None:
    pair = lib.pair(tower, dtype=torch.float32)
    for seed in range(2):
        pair.backward(seed)
        clip(pair.model)
        nn.utils.clip_grad_norm_(pair.plain.parameters(), 0.01)
        pair.step()
    pair.check(1e-6)


@row("U11", "torch.nn.utils.clip_grad_norm_")
def clips_by_torch(lib: Library) -> None:
    _clips(lib, lambda m: nn.utils.clip_grad_norm_(m.parameters(), 0.01))


@row("U11", "clipping by the library's own function")
def clips(lib: Library) -> None:
    _clips(lib, lambda m: lib.clip(m, 0.01))


@row("U11", "clipping by a hand-written norm over p.grad")
def clips_by_hand(lib: Library) -> None:
    def clip(model: Any) -> None:
        norm = sum(p.grad.pow(2).sum() for p in model.parameters()).sqrt()
        for p in model.parameters():
            p.grad.mul_((0.01 / (norm + 1e-6)).clamp(max=1.0))

    _clips(lib, clip)


@row("U11", "clip_grad_norm_ over sharded and ignored parameters together", names=r"first|weight")
def clips_ignored(lib: Library) -> None:
    torch.manual_seed(0)
    plain, model = Tower().double(), Tower().double()
    model.load_state_dict(plain.state_dict())
    ignored = model.first
    model = lib.shard(model, model.blocks, ignored=[ignored])
    for m in (model, plain):
        for r in range(world()) if m is plain else [dist.get_rank()]:
            (square(m, data(0, r)) / (world() if m is plain else 1)).backward()
    for p in ignored.parameters():  # its owner averages what is ignored
        dist.all_reduce(p.grad)
        p.grad /= world()
    got = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.01)
    want = torch.nn.utils.clip_grad_norm_(plain.parameters(), 0.01)
    got = got.full_tensor() if hasattr(got, "full_tensor") else got
    compare({"norm": got}, {"norm": want})


@row("U11", "weight decay by `p.dim() >= 2`, grouped after sharding")
def groups_by_dim(lib: Library) -> None:
    pair = lib.pair(tower)

    def make(model: nn.Module) -> Any:
        groups = [
            {"params": [p for p in model.parameters() if p.dim() >= 2], "weight_decay": 0.5},
            {"params": [p for p in model.parameters() if p.dim() < 2], "weight_decay": 0.0},
        ]
        return torch.optim.SGD([g for g in groups if g["params"]], lr=0.1)

    pair.optims = [make(pair.model), make(pair.plain)]
    pair.train()


@row("basic", "SGD written by hand: p.sub_(lr * p.grad)")
def sgd_by_hand(lib: Library) -> None:
    pair = lib.pair(tower)
    for seed in range(2):
        pair.backward(seed)
        for model in (pair.model, pair.plain):
            with torch.no_grad():
                for p in model.parameters():
                    p.sub_(0.1 * p.grad)
                    p.grad = None
    pair.check()


@row("basic", "parameters frozen, then trained again")
def toggles(lib: Library) -> None:
    pair = lib.pair(tower, unused=True)
    for seed, train in enumerate((True, False, True)):
        for module in (pair.inner, pair.plain):
            module.blocks[0].requires_grad_(train)
        pair.backward(seed)
        pair.step()
    pair.check()


def _fails(lib: Library, where: str, reset: Any = lambda model: None) -> None:
    pair = lib.pair(tower).train(1)

    def loss(model: Any, x: Tensor) -> Tensor:
        y = model(x)
        if where == "backward":
            y.register_hook(lambda g: (_ for _ in ()).throw(ValueError("bad batch")))
        return y.square().mean()

    handle = None
    if where == "forward":

        def fail(m: Any, a: Any) -> None:
            raise ValueError("bad batch")

        handle = pair.inner.blocks[1].up.register_forward_pre_hook(fail)
    with contextlib.suppress(ValueError):
        loss(pair.model, data(9)).backward()
    if handle is not None:
        handle.remove()
    reset(pair.model)
    pair.optims[0].zero_grad()
    pair.train(2)


@row("U29", "an exception in forward on every rank, then normal steps")
def fails_in_forward(lib: Library) -> None:
    _fails(lib, "forward")


@row("U29 T16", "an exception in backward on every rank, then normal steps")
def fails_in_backward(lib: Library) -> None:
    _fails(lib, "backward")


@row("U29", "the same, with what the library has to be called after it")
def fails_and_resets(lib: Library) -> None:
    reset = lib.pick(
        "has nothing to be called",
        fsdp2=lambda m: m.reset_iter_state(),
        ours=lambda m: None,
    )
    _fails(lib, "backward", reset)


@row("basic", "a sum over all ranks' losses is logged from p.grad's norm")
def grad_norm(lib: Library) -> None:
    pair = lib.pair(tower)
    pair.backward(0)

    def norm(p: Any) -> Tensor:
        found = p.grad.norm()
        return found.full_tensor() if hasattr(found, "full_tensor") else found

    found = {n: norm(p) for n, p in enumerate(pair.model.parameters())}
    compare(found, {n: p.grad.norm() for n, p in enumerate(pair.plain.parameters())})


@row("U28", "the head called on three chunks of its input")
def chunked(lib: Library) -> None:
    class Chunked(Tower):
        def forward(self, x: Tensor) -> Tensor:
            hidden = self.blocks[1](self.blocks[0](self.first(x)))
            return sum(self.head(part).square().sum() for part in hidden.chunk(3))

    lib.pair(Chunked, units=lambda m: [*m.blocks, m.head]).train(loss=lambda m, x: m(x))


MUON = 0.02  # it computes in bfloat16


@row("U18", "Muon", names=r"weight|matri|2-?D")
def muon(lib: Library) -> None:
    def build() -> nn.Module:
        return nn.Sequential(nn.Linear(6, 6, bias=False), nn.Linear(6, 4, bias=False))

    make = lambda params, lr: torch.optim.Muon(params, lr=lr)  # noqa: E731
    if lib.name == "ours":
        pair = lib.pair(build)
        pair.optims = [
            fc.owner_step(list(pair.model.parameters()), lambda groups: make(groups, 0.1)),
            make(pair.plain.parameters(), 0.1),
        ]
    else:
        pair = lib.pair(build, optim=make)
    for seed in range(2):
        pair.backward(seed)
        pair.step()
    pair.check(MUON)


@row("U18", "Muon given model.parameters() as they are", names=r"weight|matri|2-?D")
def muon_as_it_is(lib: Library) -> None:
    def build() -> nn.Module:
        return nn.Sequential(nn.Linear(6, 6, bias=False), nn.Linear(6, 4, bias=False))

    pair = lib.pair(build, optim=lambda params, lr: torch.optim.Muon(params, lr=lr))
    for seed in range(2):
        pair.backward(seed)
        pair.step()
    pair.check(MUON)


@row("U42", "LBFGS, which flattens all parameters", names=r"LBFGS|weight")
def lbfgs(lib: Library) -> None:
    pair = lib.pair(tower, optim=torch.optim.LBFGS)
    for model, optim in zip((pair.model, pair.plain), pair.optims):

        def closure(model: Any = model, optim: Any = optim) -> Tensor:
            optim.zero_grad()
            ranks = range(world()) if model is pair.plain else [dist.get_rank()]
            loss = sum(square(model, data(0, r)) for r in ranks) / len(ranks)
            loss.backward()
            total = loss.detach().clone()
            if model is not pair.plain:
                dist.all_reduce(total)
                total /= world()
            return total

        optim.step(closure)
    pair.check(1e-6)


ELEMENTWISE = "SGD Adam AdamW NAdam RAdam Adamax Adagrad Adadelta RMSprop ASGD".split()


@row("U42", "Rprop, with shards that are empty", ranks=4)
def rprop(lib: Library) -> None:
    _tiny(lib, ["Rprop"])


@row("U42", "ten element-wise optimizers, with shards that are empty", ranks=4)
def empty_shards(lib: Library) -> None:
    _tiny(lib, ELEMENTWISE)


def _tiny(lib: Library, names: list[str]) -> None:
    for name in names:
        build = lambda: nn.Sequential(nn.Linear(6, 1), nn.LayerNorm(1), nn.Linear(1, 1))  # noqa: E731
        lib.pair(build, optim=getattr(torch.optim, name)).train(2)


@row("U42", "Adafactor, which reads rows and columns", names=r"Adafactor|weight")
def adafactor(lib: Library) -> None:
    lib.pair(tower, optim=torch.optim.Adafactor).train(2)


@row("U27", "an average of the weights by torch.optim.swa_utils.AveragedModel")
def averaged(lib: Library) -> None:
    from torch.optim.swa_utils import AveragedModel

    pair = lib.pair(tower)
    ours, plain = AveragedModel(pair.model), AveragedModel(pair.plain)
    for seed in range(2):
        pair.backward(seed)
        pair.step()
        ours.update_parameters(pair.model)
        plain.update_parameters(pair.plain)
    compare({"y": ours(data(5))}, {"y": plain(data(5))})


@row("basic", "torch.amp.GradScaler, an overflow on one rank alone", names=r"scaler|rank \d")
def scaler(lib: Library) -> None:
    pair = lib.pair(tower)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    for seed in range(2):
        bad = seed == 0 and dist.get_rank() == 1  # nobody steps
        loss = square(pair.model, data(seed)) * (float("inf") if bad else 1.0)
        scaler.scale(loss).backward()
        scaler.step(pair.optims[0])
        scaler.update()
        pair.optims[0].zero_grad()
    pair.plain_backward(1)
    pair.optims[1].step()
    pair.check()
