"""Parameters with a class or attributes of their own work, or are refused by name."""

from __future__ import annotations

import copy
import io
import pickle
import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)

from fsdp_compose import (
    fully_shard,
    gathered,
    parameters_by_name,
    refresh,
    reshard,
    undo,
    unshard,
)
from fsdp_compose.sharded import is_sharded

from harness import rank_errors, run_ranks, simulate_ranks
from models import (
    WIDTH,
    Tolerance,
    Tower,
    Twin,
    by_block,
    compare,
    data,
    one_unit,
    sgd,
    square,
)
from surgery import (
    Built,
    Packed,
    blocks_with,
    change_to_packed,
    same,
)
from tp_models import mesh_of


@pytest.mark.parametrize("shard", [by_block, one_unit])
def test_parameters_of_a_class_of_their_own(shard: Any) -> None:
    def ranks(rank: int) -> None:
        twin = Twin(rank, 2, blocks_with(change_to_packed), shard)
        twin.train()
        weight = twin.model.blocks[0].up.weight
        assert is_sharded(weight)
        with gathered(twin.model):
            shown = twin.model.blocks[0].up.weight
            assert isinstance(shown, Packed) and shown.scale is weight.scale
        held = twin.model.blocks[0] if shard is by_block else twin.model
        unshard(held)
        shown = twin.model.blocks[0].up.weight
        assert isinstance(shown, Packed) and shown.shape == (7, WIDTH)
        reshard(held)
        found: list[Any] = []
        name = "blocks.0.up.weight"
        hook = twin.model.blocks[0].up.register_forward_hook(
            lambda *_: found.append(parameters_by_name(twin.model)[name])
        )
        twin.model(data(0, rank))
        hook.remove()
        assert found[0] is weight
        copied = copy.deepcopy(twin.model)
        copied.blocks[0].up.weight.scale.mul_(2)
        twin.model.blocks[0].up.weight.scale.mul_(2)  # seen by the next forward
        twin.reference.blocks[0].up.weight.scale.mul_(2)
        with torch.no_grad():
            wanted = twin.reference(data(3, rank))
            compare("output", twin.model(data(3, rank)), wanted, Tolerance())
            compare("copy", copied(data(3, rank)), wanted, Tolerance())
        undo(twin.model)
        assert weight is twin.model.blocks[0].up.weight and type(weight) is Packed
        same(twin.model, twin.reference)

    run_ranks(ranks, 2)


class Scaled(nn.Linear):
    """Reads an attribute that somebody put on the weight."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * getattr(self.weight, "factor", 1.0)


@pytest.mark.parametrize("frozen", [False, True])
def test_attributes_of_parameters_are_read_in_forward(frozen: bool) -> None:
    def change(block: nn.Module) -> None:
        block.down = Scaled(7, WIDTH, bias=False)
        block.down.weight.factor = 3.0
        block.down.weight.requires_grad_(not frozen)

    def ranks(rank: int) -> None:
        twin = Built(rank, 2, blocks_with(change), by_block, sgd)
        twin.train()
        for model in (twin.model, twin.reference):
            model.blocks[0].down.weight.factor = 0.5
        twin.train()

    run_ranks(ranks, 2)


class Elsewhere(Tensor):
    """A wrapper: computes in ``__torch_dispatch__`` and holds its data in other tensors."""

    @staticmethod
    def __new__(cls, q: Tensor, scale: Tensor) -> Elsewhere:
        return Tensor._make_wrapper_subclass(cls, q.shape, dtype=scale.dtype)

    def __init__(self, q: Tensor, scale: Tensor) -> None:
        self.q, self.scale = q, scale

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.detach.default:
            return Elsewhere(args[0].q, args[0].scale)
        raise NotImplementedError(str(func))


class Slotted(nn.Parameter):
    __slots__ = ("extra",)


def script(module: nn.Module) -> nn.Module:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return torch.jit.script(module)


def wrapped(rank: int) -> None:
    model = Tower(1)
    made = Elsewhere(torch.ones(7, 7, dtype=torch.int8), torch.ones(()))
    model.blocks[0].up.weight = nn.Parameter(made, requires_grad=False)
    by_block(model)


def extended(rank: int) -> None:
    model = Tower(1)
    model.blocks[0].up.weight.fsdp_pre_all_gather = lambda mesh: ((), None)
    by_block(model)


def slotted(rank: int) -> None:
    model = Tower(1)
    model.blocks[0].up.weight = Slotted(torch.ones(7, 6))
    by_block(model)


def lazy(rank: int) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        fully_shard(nn.Sequential(nn.LazyLinear(6), nn.Linear(6, 2)))


def scripted(rank: int) -> None:
    fully_shard(script(nn.Linear(2, 2)))


def scripted_inside(rank: int) -> None:
    fully_shard(nn.Sequential(nn.Linear(2, 2), script(nn.Linear(2, 2))))


@pytest.mark.parametrize(
    ("build", "text"),
    [
        (
            wrapped,
            "parameter 'blocks.0.up.weight' of unit 'blocks.0' is an instance of "
            "Elsewhere, whose class computes in __torch_dispatch__",
        ),
        (
            extended,
            "parameter 'blocks.0.up.weight' of unit 'blocks.0' has a method fsdp_pre_all_gather, ",
        ),
        (
            slotted,
            "parameter 'blocks.0.up.weight' of unit 'blocks.0' is an instance of Slotted, a ",
        ),
        (
            lazy,
            "parameter '0.weight' of unit 'Sequential' is an UninitializedParameter, which has no "
            "shape yet; run one forward",
        ),
        (scripted, "unit 'RecursiveScriptModule' has a ScriptModule, whose compiled code"),
        (scripted_inside, "unit 'Sequential' has a ScriptModule as '1', whose compiled code"),
    ],
)
def test_what_cannot_be_sharded_is_refused_by_name(build: Any, text: str) -> None:
    for error in rank_errors(build, 2):
        assert error is not None and error.startswith("ValueError: fully_shard: ")
        assert text in error and ("ignored=" in error or build is lazy)


def test_scripted_functions_are_left_alone() -> None:
    """Scripted functions and ignored modules are left alone."""

    def ranks(rank: int) -> None:
        plain = nn.Sequential(nn.Linear(WIDTH, 6), nn.Tanh(), nn.Linear(6, 2)).double()
        model = copy.deepcopy(plain)
        model[1] = script(nn.Sequential(nn.Tanh()))
        model.append(script(nn.Linear(2, 2).double()))
        fully_shard(model, ignored=[model[3]])
        square(model, data(0, rank)).backward()
        assert model[3].weight.grad is not None and not is_sharded(model[3].weight)
        model[0].extra = nn.Parameter(torch.ones(1).double())
        with pytest.raises(RuntimeError, match=r"'0\.extra'.*refresh"):
            model(data(0, rank))
        refresh(model)
        square(model, data(0, rank)).backward()

    run_ranks(ranks, 2)


class Sized(nn.Linear):
    """Keeps the size of its inputs on its weight, and reads what others set on it."""

    def forward(self, x: Tensor) -> Tensor:
        size = x.detach().abs().mean()
        weight: Any = self.weight
        weight.size_ = 0.9 * weight.size_ + 0.1 * size if hasattr(weight, "size_") else size
        return nn.functional.linear(x / weight.size_, weight * getattr(weight, "factor", 1.0))


@pytest.mark.parametrize("grad", [True, False])
def test_attributes_set_later_are_shared(grad: bool) -> None:
    """In a forward and after sharding, in a plain forward and in scopes; in every forward."""

    def train(model: Any) -> list[float]:
        optim, found = torch.optim.SGD(model.parameters(), lr=0.1), []
        for step in range(4):
            if step == 2:
                model[0].weight.factor = 0.5
            with torch.set_grad_enabled(grad):
                loss = model(torch.full((2, 4), 1.0 + step)).square().mean()
            if grad:
                loss.backward()
                optim.step()
                optim.zero_grad()
            found += [loss.item(), float(model[0].weight.size_)]
        return found

    def ranks(rank: int) -> None:
        models: list[Any] = []
        for _ in range(2):
            torch.manual_seed(0)
            models.append(nn.Sequential(Sized(4, 4), nn.Linear(4, 2)))
        one_unit(models[1])
        wanted, found = map(train, models)
        assert found == pytest.approx(wanted, rel=1e-5)
        with gathered(models[1]):
            models[1](torch.full((2, 4), 7.0))
        models[1](torch.full((2, 4), 9.0))
        for value in (7.0, 9.0):
            models[0](torch.full((2, 4), value))
        assert models[1][0].weight.size_ == models[0][0].weight.size_
        assert set(vars(undo(models[1])[0].weight)) == {"size_", "factor"}

    run_ranks(ranks, 2)


class Kept(nn.Linear):
    """Copies its weight in each way that Python and torch have."""

    copies: tuple[Tensor, ...] = ()
    attributes: dict[str, Any]
    kept: list[Tensor]

    def forward(self, x: Tensor) -> Tensor:
        file, weight = io.BytesIO(), self.weight
        torch.save(weight, file)
        file.seek(0)
        loaded = torch.load(file, weights_only=True)
        self.copies = (loaded, pickle.loads(pickle.dumps(weight)))
        if weight.is_leaf:
            self.copies += (copy.deepcopy(weight),)
        self.attributes = vars(copy.copy(weight))
        self.kept = [weight]
        return super().forward(x)


@pytest.mark.parametrize("attributes", [{}, {"part": "up"}])
def test_gathered_weights_are_copied_as_plain_ones(attributes: dict[str, str]) -> None:
    """With what the user set on them, and nothing of how they are sharded."""

    def ranks(rank: int) -> None:
        model: Any = nn.Sequential(Kept(3, 3), Kept(3, 3))
        model[1].requires_grad_(False)
        plain = copy.deepcopy(model)
        fully_shard(model, init="broadcast")
        for name, value in attributes.items():
            setattr(model[1].weight, name, value)
            setattr(plain[1].weight, name, value)
        for each in (model, plain):
            each(torch.ones(1, 3)).sum().backward()
        assert model[1].attributes == plain[1].attributes == attributes
        assert len(model[1].copies) == len(plain[1].copies) == 3
        assert vars(plain[1].copies[0]) == attributes
        for found in model[1].copies:
            assert vars(found) == attributes
            assert not is_sharded(found) and found.shape == (3, 3)
        with pytest.raises(RuntimeError, match="that was kept from a forward is a view of"):
            model[1].kept[0].sum()
        assert "_kept_in" not in vars(model[1].weight)

    run_ranks(ranks, 2)


class Returned(nn.Linear):
    """Its output has the weight, on which a user keeps something."""

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return super().forward(x), self.weight


def test_a_weight_with_attributes_may_be_returned() -> None:
    def ranks(rank: int) -> None:
        model: Any = Returned(3, 3)
        model.weight.part = {"of": [model.weight.detach()]}
        plain = copy.deepcopy(model)
        fully_shard(model, init="broadcast")
        with torch.no_grad():
            for p, q in zip(plain.parameters(), model.parameters(), strict=True):
                p.copy_(q.full_tensor())
        for each in (model, plain):
            output, weight = each(torch.ones(1, 3))
            (output.sum() + weight.square().sum()).backward()
        assert torch.allclose(model.weight.grad.full_tensor(), plain.weight.grad)

    simulate_ranks(ranks)


@pytest.mark.parametrize("way", ["plain", "vmap", "tensor parallel"])
def test_gathered_weights_are_no_parameters(way: str) -> None:
    """Also after a transform, which shows them as such; a module may keep one for a while."""

    def ranks(rank: int) -> None:
        model: Any = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
        mesh = None
        if way == "tensor parallel":
            meshes = mesh_of(dp=1, tp=2)
            parallelize_module(
                model, meshes["tp"], {"0": ColwiseParallel(), "1": RowwiseParallel()}
            )
            mesh = meshes["dp"]
        fully_shard(model, mesh=mesh, init="broadcast")
        if way == "vmap":
            torch.vmap(model)(torch.ones(3, 2, 4))
        seen: list[bool] = []

        def keep(module: Any, _: Any) -> None:
            seen.append(isinstance(module.weight, nn.Parameter))
            module.kept = module.weight

        handle = model[0].register_forward_pre_hook(keep)
        for grad in (True, False, True):
            with torch.set_grad_enabled(grad):
                model(torch.ones(2, 4))
        assert seen == [False] * 3
        handle.remove()
        del model[0].kept
        assert isinstance(model[0].weight, nn.Parameter)
        plain = undo(copy.deepcopy(model))
        assert isinstance(plain[0].weight, nn.Parameter)
        assert set(dict(plain.named_parameters())) == set(dict(model.named_parameters()))

    run_ranks(ranks, 2)
