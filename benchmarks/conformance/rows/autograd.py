"""What autograd is asked beyond loss.backward(): penalties, several passes, checkpointing."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from conformance.libraries import Library, compare, data, square, world
from conformance.models import Tower, tower
from conformance.outcomes import row


def _mean(tensors: list[Tensor]) -> Tensor:
    return sum(tensors) / len(tensors)  # type: ignore[return-value]


@row("U10", "a gradient penalty: create_graph through the input")
def penalty(lib: Library) -> None:
    def loss(model: Any, x: Tensor) -> Tensor:
        x = x.clone().requires_grad_()
        (grad,) = torch.autograd.grad(model(x).sum(), x, create_graph=True)
        return grad.square().sum()

    lib.pair(tower, unused=True).train(loss=loss)


@row("U10", "torch.autograd.grad(loss, model.parameters())")
def grad_of_parameters(lib: Library) -> None:
    pair = lib.pair(tower)
    found = torch.autograd.grad(square(pair.model, data(0)), list(pair.model.parameters()))
    loss = _mean([square(pair.plain, data(0, r)) for r in range(world())])
    wanted = torch.autograd.grad(loss, list(pair.plain.parameters()))
    whole = [g.full_tensor() if hasattr(g, "full_tensor") else g for g in found]
    compare(dict(enumerate(whole)), dict(enumerate(wanted)))


@row("U10", "a Hessian-vector product over the parameters")
def hvp(lib: Library) -> None:
    def product(model: Any, loss: Tensor) -> list[Tensor]:
        params = list(model.parameters())
        grads = torch.autograd.grad(loss, params, create_graph=True)
        total = sum((g * torch.ones_like(g)).sum() for g in grads)
        return [
            g.full_tensor() if hasattr(g, "full_tensor") else g
            for g in torch.autograd.grad(total, params, allow_unused=True, materialize_grads=True)
        ]

    pair = lib.pair(tower)
    found = product(pair.model, square(pair.model, data(0)))
    loss = _mean([square(pair.plain, data(0, r)) for r in range(world())])
    compare(dict(enumerate(found)), dict(enumerate(product(pair.plain, loss))))


@row("basic", "gradients turned on inside a forward that runs under no_grad")
def enabled_inside(lib: Library) -> None:
    class Inside(Tower):
        def forward(self, x: Tensor) -> Tensor:
            with torch.enable_grad():
                return super().forward(x)

    def loss(model: Any, x: Tensor) -> Tensor:
        with torch.no_grad():
            out = model(x)
        return out.square().mean()

    lib.pair(Inside).train(loss=loss)


@row("U2", "a loss of a weight and each rank's own batch: (p * x).sum()", names=r"head\.weight")
def own_partner(lib: Library) -> None:
    def loss(model: Any, x: Tensor) -> Tensor:
        weight = getattr(model, "module", model).head.weight
        return square(model, x) + (weight * x[: len(weight)]).sum()

    lib.pair(tower).train(loss=loss)


@row("basic", "two backwards over one graph (retain_graph)")
def retained(lib: Library) -> None:
    pair = lib.pair(tower)
    loss = square(pair.model, data(0))
    loss.backward(retain_graph=True)
    loss.backward()
    pair.plain_backward(0)
    pair.plain_backward(0)
    pair.check_grads()


@row("basic", "two forwards, one backward over the sum")
def two_forwards(lib: Library) -> None:
    lib.pair(tower).train(loss=lambda m, x: square(m, x) + square(m, 2 * x))


@row("T11", "a block called twice in one forward")
def twice(lib: Library) -> None:
    class Twice(Tower):
        def forward(self, x: Tensor) -> Tensor:
            return self.head(self.blocks[1](self.blocks[0](self.blocks[0](self.first(x)))))

    lib.pair(Twice).train()


class Checkpointed(Tower):
    reentrant = False
    inside = False

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for block in self.blocks:
            if self.inside:
                x = x + block.down(checkpoint(self._up, block, x, use_reentrant=self.reentrant))
            else:
                x = checkpoint(block, x, use_reentrant=self.reentrant)
        return self.head(x)

    @staticmethod
    def _up(block: Any, x: Tensor) -> Tensor:
        return torch.tanh(block.up(block.norm(x)))


@row("U17 T1", "non-reentrant checkpointing around units")
def checkpoints(lib: Library) -> None:
    lib.pair(Checkpointed).train()


@row("U17", "reentrant checkpointing around units")
def checkpoints_reentrant(lib: Library) -> None:
    class Reentrant(Checkpointed):
        reentrant = True

    lib.pair(Reentrant).train()


@row("U17 T17", "checkpointing of a part inside a unit")
def checkpoints_inside(lib: Library) -> None:
    class Inside(Checkpointed):
        inside = True

    lib.pair(Inside, units=lambda m: ()).train()


@row("T15", "one checkpointed region over several units")
def checkpoints_several(lib: Library) -> None:
    class Region(Tower):
        def forward(self, x: Tensor) -> Tensor:
            run = lambda x: self.blocks[1](self.blocks[0](x))  # noqa: E731
            return self.head(checkpoint(run, self.first(x), use_reentrant=False))

    lib.pair(Region).train()


@row("U17", "checkpointing and two forwards before one backward")
def checkpoints_twice(lib: Library) -> None:
    lib.pair(Checkpointed).train(loss=lambda m, x: square(m, x) + square(m, 2 * x))


@row("T13", "forward-mode derivatives over the input (torch.func.jvp)")
def forward_mode(lib: Library) -> None:
    pair = lib.pair(tower)
    x, v = data(0), data(1)
    found = torch.func.jvp(pair.model, (x,), (v,))[1]
    compare({"jvp": found}, {"jvp": torch.func.jvp(pair.plain, (x,), (v,))[1]})


@row("T13", "per-sample gradients over the input (torch.func.vmap of grad)")
def mapped(lib: Library) -> None:
    pair = lib.pair(tower)

    def each(model: Any) -> Tensor:
        one = torch.func.grad(lambda x: model(x[None]).sum())
        return torch.func.vmap(one)(data(0))

    compare({"grads": each(pair.model)}, {"grads": each(pair.plain)})


@row("basic", "backward(inputs=) of some parameters")
def chosen_inputs(lib: Library) -> None:
    pair = lib.pair(tower, unused=True)
    square(pair.model, data(0)).backward(inputs=list(pair.inner.head.parameters()))
    loss = _mean([square(pair.plain, data(0, r)) for r in range(world())])
    loss.backward(inputs=list(pair.plain.head.parameters()))
    pair.check_grads()


@row("U2", "a weight of another unit read in forward: x @ self.emb.weight.T", names=r"weight|emb")
def other_units_weight(lib: Library) -> None:
    class Reads(Tower):
        def forward(self, x: Tensor) -> Tensor:
            x = self.first(x)
            return self.blocks[1](self.blocks[0](x)) @ self.first.weight.T

    lib.pair(Reads, units=lambda m: [*m.blocks, m.first], unused=True).train()


@row("U2", "the same inside the library's own scope", names=r"weight|emb")
def scoped_weight(lib: Library) -> None:
    import fsdp_compose as fc

    class Scoped(Tower):
        def forward(self, x: Tensor) -> Tensor:
            x = self.blocks[1](self.blocks[0](self.first(x)))
            if lib.name == "ours" and fc.is_fully_sharded(self.first):
                with fc.gathered(self.first):
                    return x @ self.first.weight.T
            if lib.name == "fsdp2" and hasattr(self.first, "unshard"):
                self.first.unshard()
            return x @ self.first.weight.T

    lib.pick("has no differentiable scope", fsdp2=1, ddp=1, ours=1)
    lib.pair(Scoped, units=lambda m: [*m.blocks, m.first], unused=True).train()


@row("D8", "a view of a weight kept over a forward, read in the next", names=r"weight|cached|view")
def kept_view(lib: Library) -> None:
    class Keeps(Tower):
        cached: Any = None

        def forward(self, x: Tensor) -> Tensor:
            if self.cached is None:
                self.cached = self.head.weight.detach().t()
            return super().forward(x) + x @ self.cached

    pair = lib.pair(Keeps)
    for module in (pair.model, pair.plain):
        with torch.no_grad():
            module(data(0))
    compare({"y": pair.model(data(1))}, {"y": pair.plain(data(1))})


@row("D8", "reshard in the middle: a unit's backward after the user released it")
def released_by_hand(lib: Library) -> None:
    import fsdp_compose as fc

    release = lib.pick(
        "does not release by hand",
        fsdp2=lambda m: [b.reshard() for b in m.blocks],
        ours=lambda m: [fc.reshard(b) for b in m.blocks],
    )
    pair = lib.pair(tower, kept=True)
    for seed in range(2):
        loss = square(pair.model, data(seed))
        release(pair.model)
        loss.backward()
        pair.plain_backward(seed)
        pair.step()
    pair.check()


@row("U28", "units gathered ahead by hand before the forward")
def ahead_by_hand(lib: Library) -> None:
    import fsdp_compose as fc

    ahead = lib.pick(
        "gathers in its own order",
        fsdp2=lambda m: [b.unshard(async_op=True) for b in m.blocks],
        ours=lambda m: [fc.unshard(b, async_op=True) for b in m.blocks],
    )
    pair = lib.pair(tower)
    for seed in range(2):
        ahead(pair.model)
        pair.backward(seed)
        pair.step()
    pair.check()


@row("U28", "a communication hook that halves the gradients")
def comm_hook(lib: Library) -> None:
    import fsdp_compose as fc

    def ddp_hook(state, bucket):  # type: ignore[no-untyped-def] # it reads annotations
        buffer = bucket.buffer()
        future = dist.all_reduce(buffer, async_op=True).get_future()
        return future.then(lambda f: f.value()[0] / (2 * world()))

    def fsdp1_hook(state: Any, grad: Tensor, part: Tensor) -> None:
        dist.reduce_scatter_tensor(part, grad)
        part.div_(2 * world())

    def our_hook(state: Any, bucket: Any) -> Tensor:
        return fc.default_hook(state, bucket) / 2

    pair = lib.pair(tower)
    lib.pick(
        "takes a reduce-scatter object, not a hook",
        fsdp1=lambda: pair.model.register_comm_hook(None, fsdp1_hook),
        ddp=lambda: pair.model.register_comm_hook(None, ddp_hook),
        ours=lambda: fc.register_comm_hook(pair.model, None, our_hook),
    )()
    for seed in range(2):
        pair.backward(seed)
        for p in pair.plain.parameters():
            p.grad /= 2
        pair.step()
    pair.check()
