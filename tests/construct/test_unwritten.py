"""Memory that nothing wrote is never trained on: FSDP1's initialisers, ``to_empty``, swapping."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import fsdp_compose as fc
from fsdp_compose import fully_shard

from harness import run_ranks, simulate_ranks
from models import Block, Tower, by_block, data, seeded, sgd, square, whole


class Scaled(nn.Module):
    """Parameters and a buffer of its own, which FSDP1's initialisers fill in their own ways."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(3, 6))
        self.shift = nn.Parameter(torch.empty(3), requires_grad=False)
        self.register_buffer("scale", torch.empty(3))

    def reset_parameters(self) -> None:
        with torch.no_grad():
            self.weight.copy_(torch.arange(18.0).view(3, 6))
            self.shift.fill_(2)
            self.scale.fill_(3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (x @ self.weight.t()) * self.scale + self.shift


def moves_off_meta(module: nn.Module) -> None:
    """As in PyTorch's FSDP1 tutorial."""
    if any(p.is_meta for p in module.parameters(recurse=False)):
        module.to_empty(device=torch.device("cpu"), recurse=False)
        module.reset_parameters()


def replaces_each(module: nn.Module) -> None:
    """As in PyTorch's own tests: every tensor on the meta device is replaced by a new one."""
    for name, param in list(module.named_parameters(recurse=False)):
        if param.is_meta:
            real = nn.Parameter(torch.empty_like(param, device="cpu"), param.requires_grad)
            setattr(module, name, real)
    for name, buffer in list(module.named_buffers(recurse=False)):
        if buffer.is_meta:
            module.register_buffer(name, torch.empty_like(buffer, device="cpu"))
    module.reset_parameters()


def fills_by_itself(module: nn.Module) -> None:
    """Only what is still on the meta device, and the rest whatever it is."""
    if module.weight.is_meta:
        module.to_empty(device="cpu", recurse=False)
        module.reset_parameters()
    else:
        with torch.no_grad():
            module.scale.fill_(7)


@pytest.mark.parametrize("init_fn", [moves_off_meta, replaces_each, fills_by_itself])
def test_initialisers_that_test_for_meta(init_fn: Callable[[nn.Module], Any]) -> None:
    """Written for FSDP1, which calls them with meta tensors, they write the same values here."""

    def ranks(rank: int) -> None:
        plain = Scaled()
        plain.reset_parameters()
        with torch.device("meta"):
            model = nn.Sequential(nn.ReLU(), Scaled())
        params = list(model.parameters())
        fully_shard(model, param_init_fn=init_fn)
        assert all(p is q for p, q in zip(model.parameters(), params, strict=True))
        assert [p.requires_grad for p in params] == [True, False]
        for (name, ours), theirs in zip(model[1].state_dict().items(), plain.state_dict().values()):
            assert torch.equal(whole(ours), theirs), name
        square(model, data(0, rank).float()).backward()

    run_ranks(ranks)


def test_an_initialiser_that_writes_nothing_leaves_it() -> None:
    """It is called twice, and what it left is an error in forward until it is loaded."""

    def ranks(rank: int) -> None:
        seen: list[bool] = []
        with torch.device("meta"):
            model = Scaled()
        fully_shard(model, param_init_fn=lambda m: seen.append(m.weight.is_meta))
        assert seen == [False, True] and not any(t.is_meta for t in model.state_dict().values())
        with pytest.raises(RuntimeError, match=r"parameter 'weight'.*nothing has written it"):
            model(data(0, rank).float())
        model.load_state_dict({k: torch.ones(v.shape) for k, v in model.state_dict().items()})
        square(model, data(0, rank).float()).backward()

    run_ranks(ranks)


WAYS: dict[str, Callable[[nn.Module, nn.Module], Any]] = {}


def way(fn: Callable[[nn.Module, nn.Module], Any]) -> Callable[[nn.Module, nn.Module], Any]:
    WAYS[fn.__name__] = fn
    return fn


@way
def load(model: nn.Module, plain: nn.Module) -> None:
    model.load_state_dict(plain.state_dict())


@way
def load_ours(model: nn.Module, plain: nn.Module) -> None:
    fc.load_state_dict(model, plain.state_dict())


@way
def gathered(model: nn.Module, plain: nn.Module) -> None:
    with fc.gathered(model, writeback=True), torch.no_grad():
        for ours, theirs in zip(model.parameters(), plain.parameters(), strict=True):
            ours.copy_(theirs)


@way
def apply(model: nn.Module, plain: nn.Module) -> None:
    sources = dict(zip(model.modules(), plain.modules(), strict=True))

    def init(module: nn.Module) -> None:
        for ours, theirs in zip(module.parameters(False), sources[module].parameters(False)):
            ours.copy_(theirs)

    fc.apply(model, init)


def test_to_empty_after_sharding() -> None:
    """What ``to_empty`` emptied is an error in forward on every rank, until it is written."""

    def ranks(rank: int) -> None:
        plain = seeded(lambda: Tower(2))
        for name, write in WAYS.items():
            for strategy in (fc.ShardingStrategy.FULL_SHARD, fc.ShardingStrategy.SHARD_GRAD_OP):
                model = by_block(copy.deepcopy(plain), strategy=strategy)
                optim = sgd(model.parameters())
                square(model, data(0, rank)).backward()
                model.zero_grad()
                model.to_empty(device="cpu")
                for part in (model, model.blocks[0]):
                    with pytest.raises(RuntimeError, match=r"to_empty\(\).*fsdp_compose.apply"):
                        part(data(0, rank))
                write(model, plain)
                reference = copy.deepcopy(plain)
                for module, opt in ((model, optim), (reference, sgd(reference.parameters()))):
                    square(module, data(1, 0)).backward()
                    opt.step()
                for ours, theirs in zip(model.parameters(), reference.parameters()):
                    assert torch.allclose(whole(ours), theirs, rtol=1e-12), (name, strategy)

    run_ranks(ranks)


def test_one_rank_alone_empties_its_parameters() -> None:
    """Before what rank 0 has is loaded, all ranks raise; after it they train, and nobody waits."""

    def ranks(rank: int) -> None:
        model = by_block(seeded(lambda: Tower(2)))
        state = fc.state_dict(model, kind="full")
        if rank:
            model.to_empty(device="cpu")
        with pytest.raises(RuntimeError, match=r"rank 1 wants to have .* of unit .* loaded"):
            model(data(0, rank))
        fc.load_state_dict(model, state if rank == 0 else {}, broadcast_from_rank0=True)
        square(model, data(0, rank)).backward()
        if rank:
            model.to_empty(device="cpu")
        model.load_state_dict(state)
        assert all(torch.equal(state[n], v) for n, v in fc.state_dict(model, kind="full").items())

    run_ranks(ranks)


def test_swapping_parameters_is_refused() -> None:
    """torch.__future__'s swapping would give the optimizer's parameters away: one clear error."""

    def ranks(rank: int) -> None:
        model = by_block(seeded(lambda: Tower(1)))
        before = [whole(p) for p in model.parameters()]
        state = {name: whole(value) for name, value in model.state_dict().items()}
        torch.__future__.set_overwrite_module_params_on_conversion(True)
        with pytest.raises(RuntimeError, match=r"set_overwrite_module_params_on_conversion\(F"):
            model.double()
        torch.__future__.set_overwrite_module_params_on_conversion(False)
        torch.__future__.set_swap_module_params_on_conversion(True)
        try:
            for convert in (
                lambda: model.to(torch.float32),
                lambda: model.float(),
                lambda: model.blocks[0].half(),
                lambda: model.to_empty(device="cpu"),
                lambda: model.load_state_dict(state),
            ):
                with pytest.raises(RuntimeError, match=r"set_swap_module_params_on_conversion\(F"):
                    convert()
            assert (model.first.weight.float()).dtype == torch.float32
        finally:
            torch.__future__.set_swap_module_params_on_conversion(False)
        assert all(torch.equal(whole(p), q) for p, q in zip(model.parameters(), before))
        square(model, data(0, rank)).backward()
        model.to(torch.float32)
        assert isinstance(model.blocks[0], Block) and model.first.weight.dtype == torch.float32

    run_ranks(ranks)


@pytest.mark.parametrize("what", ["weight", "mask", "part"])
def test_what_was_taken_out_is_not_waited_for(what: str) -> None:
    """Nothing can load it any more; what is there still is waited for."""

    class Part(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.kept, self.weight = nn.Parameter(torch.ones(4)), nn.Parameter(torch.ones(4))
            self.register_buffer("mask", torch.ones(4))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x * self.kept

    def ranks(rank: int) -> None:
        with torch.device("meta"):
            model = Part()
            model.part = Part()
        fully_shard(model)
        setattr(model, what, None)
        fc.refresh(model)
        with pytest.raises(RuntimeError, match=r"'kept'.* came from the meta device"):
            model(torch.ones(4))
        model.load_state_dict({key: torch.full((4,), 2.0) for key in model.state_dict()})
        assert model(torch.ones(4)).tolist() == [2.0] * 4

    simulate_ranks(ranks, 2)


def test_a_meta_parameter_of_a_module_that_stays() -> None:
    """``refresh`` left the unit half changed; its other weights are not initialised again."""

    class Shifted(Block):
        shift: nn.Parameter | None

        def __init__(self) -> None:
            super().__init__()
            self.register_parameter("shift", None)

        def reset_parameters(self) -> None:
            for layer in self.children():
                if isinstance(layer, nn.Linear):
                    layer.reset_parameters()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            out: torch.Tensor = super().forward(x)
            return out if self.shift is None else out * self.shift

    def fill(module: nn.Module) -> None:
        shift = getattr(module, "shift", None)
        if shift is not None:
            nn.init.constant_(shift, 2.0)

    def ranks(rank: int) -> None:
        for init in (None, fill):
            model, x = fully_shard(seeded(Shifted)), data(0, rank)
            wanted, before = model(x).mul(2).detach(), fc.state_dict(model)
            model.shift = nn.Parameter(torch.empty(x.shape[-1], dtype=x.dtype, device="meta"))
            fc.refresh(model, param_init_fn=init)
            if init is None:
                with pytest.raises(RuntimeError, match="parameter 'shift' came from the meta"):
                    model(x)
                fc.load_state_dict(model, {**before, "shift": torch.full_like(x[0], 2.0)})
            model(x).sum().backward()
            torch.testing.assert_close(model(x).detach(), wanted)
            assert model.shift.grad is not None

    simulate_ranks(ranks)
