"""What a sharded model is to the code around it: names, classes, copies, references, hooks."""

from __future__ import annotations

import abc
import copy
import gc
import io
import weakref
from typing import Any

import torch
from torch import Tensor, nn

import fsdp_compose as fc

from conformance.libraries import Library, Wrong, compare, data, square, world
from conformance.models import Tower, tower
from conformance.outcomes import row


def _demand(holds: bool, otherwise: str) -> None:
    if not holds:
        raise Wrong(otherwise)


@row("U27", "parameter names stay")
def names(lib: Library) -> None:
    lib.pick("wraps the model, as it documents", fsdp2=1, ours=1)
    pair = lib.pair(tower)
    found = [n for n, _ in pair.model.named_parameters()]
    _demand(found == [n for n, _ in pair.plain.named_parameters()], f"{found[0]}")


@row("U27", "isinstance(model, its class) and attributes of the model")
def classes(lib: Library) -> None:
    lib.pick("wraps the model, as it documents", fsdp2=1, ours=1)

    class Named(Tower):
        answer = 42

    pair = lib.pair(Named)
    _demand(isinstance(pair.model, Named), f"is a {type(pair.model).__name__}")
    _demand(
        type(pair.model) is Named or type(pair.model).__name__ == f"FSDP{Named.__name__}", "other"
    )
    _demand(pair.model.answer == 42, "no attribute")


@row("U4", "an optimizer built before sharding", names=r"weight|optimizer|parameter")
def optimizer_before(lib: Library) -> None:
    torch.manual_seed(0)
    plain = tower().double()
    module = copy.deepcopy(plain)
    optims = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (module, plain)]
    pair = lib.pair(tower)
    pair.plain, pair.model, pair.optims = plain, lib.shard(module, module.blocks), optims
    pair.train()


@row("U4 U25", "an optimizer built after an eval forward")
def optimizer_after_eval(lib: Library) -> None:
    pair = lib.pair(tower)
    with torch.no_grad():
        pair.model(data(7))
    pair.optims[0] = torch.optim.SGD(pair.model.parameters(), lr=0.1)
    pair.train()


@row("U4 D4", "an optimizer over a copy of the model", names=r"weight|optim")
def optimizer_of_a_copy(lib: Library) -> None:
    pair = lib.pair(tower)
    pair.optims[0] = torch.optim.SGD(tower().double().parameters(), lr=0.1)
    pair.train()


@row("U27 T3", "deepcopy of a sharded model trains independently", names=r"copy|deepcopy")
def deepcopies(lib: Library) -> None:
    pair = lib.pair(tower)
    pair.train(1)
    twin = copy.deepcopy(pair.model)
    before = lib.full(pair.model)
    optim = torch.optim.SGD(twin.parameters(), lr=0.1)
    square(twin, data(1)).backward()
    optim.step()
    compare(lib.full(pair.model), before)
    pair.backward(1)
    pair.step()
    compare(lib.full(twin), dict(pair.plain.named_parameters()))
    pair.check()


@row("U27", "a model that is an abstract base class")
def abstract(lib: Library) -> None:
    class Base(nn.Module, abc.ABC):
        @abc.abstractmethod
        def forward(self, x: Tensor) -> Tensor: ...

    class Concrete(Tower, Base):
        pass

    lib.pair(Concrete).train()


@row("U27", "a hook on a parameter (p.register_hook) sees the gradient")
def tensor_hook(lib: Library) -> None:
    pair = lib.pair(tower)
    for m in (pair.inner, pair.plain):
        m.head.weight.register_hook(lambda g: g * 2)
    pair.train()


@row("U27", "an optimizer stepped in backward by register_post_accumulate_grad_hook")
def step_in_backward(lib: Library) -> None:
    lib.pick("averages after the hook ran, as its documentation warns", fsdp1=1, fsdp2=1, ours=1)
    pair = lib.pair(tower)

    def step(p: Any) -> None:
        with torch.no_grad():
            p.sub_(0.1 * p.grad)
        p.grad = None

    for m in (pair.model, pair.plain):
        for p in m.parameters():
            p.register_post_accumulate_grad_hook(step)
    for seed in range(2):
        square(pair.model, data(seed)).backward()
        (sum(square(pair.plain, data(seed, r)) for r in range(world())) / world()).backward()
    pair.check()


@row("U27", "torch.save of the sharded module itself", names=r"pickle|save|state_dict")
def pickles(lib: Library) -> None:
    pair = lib.pair(tower)
    file = io.BytesIO()
    torch.save(pair.model, file)
    file.seek(0)
    again = torch.load(file, weights_only=False)
    compare({"y": again(data(0))}, {"y": pair.plain(data(0))})


@row("T2", "a model is freed when its last reference goes")
def freed(lib: Library) -> None:
    pair = lib.pair(tower)
    pair.train()
    ref = weakref.ref(pair.inner)
    del pair
    gc.collect()
    _demand(ref() is None, "still alive")


@row("U36", "attributes on parameters (p.lr_scale = 2) stay", names=r"weight|lr_scale")
def attributes(lib: Library) -> None:
    module = tower().double()
    module.head.weight.lr_scale = 2  # type: ignore[attr-defined]
    model = lib.shard(module, module.blocks)
    square(model, data(0)).backward()
    weight = dict(lib.inner(model).named_parameters())["head.weight"]
    _demand(getattr(weight, "lr_scale", None) == 2, "the attribute is gone")


@row("D1", "a weight read outside forward: x @ model.head.weight.T", names=r"weight")
def read_outside(lib: Library) -> None:
    pair = lib.pair(tower)
    found = data(0) @ pair.inner.head.weight.T
    compare({"y": found}, {"y": data(0) @ pair.plain.head.weight.T})


@row("D1", "p.norm() and p.sum() between passes", names=r"weight")
def reductions(lib: Library) -> None:
    pair = lib.pair(tower)
    whole = lambda t: t.full_tensor() if hasattr(t, "full_tensor") else t  # noqa: E731
    for p, q in zip(pair.model.parameters(), pair.plain.parameters()):
        compare({"n": whole(p.norm()), "s": whole(p.sum())}, {"n": q.norm(), "s": q.sum()})


@row("D1", "an in-place random fill of a parameter: p.normal_()", names=r"weight|bias|rank")
def random_fill(lib: Library) -> None:
    pair = lib.pair(tower)
    with torch.no_grad():
        for p, q in zip(pair.model.parameters(), pair.plain.parameters()):
            torch.manual_seed(3)
            p.normal_()
            torch.manual_seed(3)
            q.normal_()
    pair.check()


@row("D1", "p.clamp_(-0.1, 0.1) between steps")
def clamps(lib: Library) -> None:
    pair = lib.pair(tower)
    with torch.no_grad():
        for m in (pair.model, pair.plain):
            for p in m.parameters():
                p.clamp_(-0.1, 0.1)
    pair.train()


@row("T20", "p.detach().numpy() of a weight between passes", names=r"weight|bias|DTensor")
def to_numpy(lib: Library) -> None:
    pair = lib.pair(tower)
    found = torch.from_numpy(pair.inner.head.weight.detach().numpy())
    compare({"w": found}, {"w": pair.plain.head.weight})


@row("T20", "safetensors' save of model.state_dict()", names=r"weight|bias|tensor")
def to_safetensors(lib: Library) -> None:
    from safetensors.torch import load, save

    pair = lib.pair(tower)
    values = {n.removeprefix("module."): v for n, v in pair.model.state_dict().items()}
    if lib.name == "fsdp2":
        values = {n: v.full_tensor() for n, v in values.items()}  # as its documentation says
    compare(load(save(values)), pair.plain.state_dict())


@row("T21", "torch.tensor(p), which asks no class of torch's", names=r"weight|bias")
def to_tensor(lib: Library) -> None:
    pair = lib.pair(tower)
    found = torch.tensor(pair.inner.head.weight)
    found = found.full_tensor() if hasattr(found, "full_tensor") else found
    compare({"w": found}, {"w": pair.plain.head.weight})


@row("T25", "weak references to parameters, with swap_module_params on conversion")
def swaps(lib: Library) -> None:
    pair = lib.pair(tower)
    refs = [weakref.ref(p) for p in pair.model.parameters()]
    pair.train()
    _demand(all(r() is p for r, p in zip(refs, pair.model.parameters())), "other objects")


@row("T27", "ranks give their optimizers the parameters in another order")
def other_order(lib: Library) -> None:
    import torch.distributed as dist

    pair = lib.pair(tower)
    params = list(pair.model.parameters())[:: 1 if dist.get_rank() else -1]
    pair.optims[0] = torch.optim.SGD(params, lr=0.1, momentum=0.9)
    pair.optims[1] = torch.optim.SGD(pair.plain.parameters(), lr=0.1, momentum=0.9)
    pair.train()


@row("U27", "torch.func.functional_call with the model's own parameters")
def functional(lib: Library) -> None:
    from torch.func import functional_call

    pair = lib.pair(tower)
    found = functional_call(pair.model, dict(pair.model.named_parameters()), (data(0),))
    compare({"y": found}, {"y": pair.plain(data(0))})


@row("U16", "weights edited inside a gathered scope stay")
def edits(lib: Library) -> None:
    pair = lib.pair(tower)
    with torch.no_grad(), lib.gathered(pair.model, write=True):
        pair.inner.head.weight.mul_(3)
        pair.plain.head.weight.mul_(3)
    pair.check()


@row("U16", "weights edited inside a scope that does not write back", names=r"weight|write")
def edits_dropped(lib: Library) -> None:
    pair = lib.pair(tower)
    with torch.no_grad(), lib.gathered(pair.model):
        pair.inner.head.weight.mul_(3)
        pair.plain.head.weight.mul_(3)
    pair.check()


@row("U16 U38", "full values of parameters, ignored parameters and buffers, one by one")
def streams(lib: Library) -> None:
    class Buffered(Tower):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("table", torch.ones(3))

    lib.pick("has no iterator over full values", ours=1, ddp=1)
    pair = lib.pair(Buffered)
    if lib.name == "ddp":
        found = pair.inner.state_dict()
    else:
        found = {**dict(fc.iter_full(pair.model)), **dict(pair.model.named_buffers())}
    compare(found, pair.plain.state_dict())


@row("U20", "a block compiled in place keeps its parameters' names (backend eager)")
def compiles(lib: Library) -> None:
    pair = lib.pair(tower)
    for block in pair.inner.blocks:
        block.compile(backend="eager")
    before = [n for n, _ in pair.model.named_parameters()]
    pair.train()
    _demand(before == [n for n, _ in pair.model.named_parameters()], "renamed")


@row(
    "U30", "one process without a launcher or a process group", ranks=1, group=False, names="group"
)
def alone(lib: Library) -> None:
    torch.manual_seed(0)
    plain = tower().double()
    module = copy.deepcopy(plain)
    if lib.name == "fsdp2":
        from torch.distributed.fsdp import fully_shard

        model = fully_shard(module)
    else:
        model = lib.shard(module, module.blocks)
    for m in (model, plain):
        square(m, data(0, 0)).backward()
        torch.optim.SGD(m.parameters(), lr=0.1).step()
    compare(lib.full(model), dict(plain.named_parameters()))
