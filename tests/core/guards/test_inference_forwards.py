"""Forwards without gradients that read copies of weights: the copies compute as weights do."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import fsdp_compose as fc
from fsdp_compose import MixedPrecision

from harness import simulate_ranks
from models import Tower, by_block, whole

BF16 = torch.bfloat16


def full_copies(model: nn.Module, part: str = "") -> dict[str, Tensor]:
    """The whole values of the parameters whose names begin with ``part``."""
    return {name: whole(p) for name, p in model.named_parameters() if name.startswith(part)}


def call(model: nn.Module, x: Tensor, how: str) -> Tensor:
    """The model's output, computed on copies of its weights."""
    if how == "vmap":
        return torch.func.vmap(model)(x)
    if how in ("gathered", "gathered, some given"):
        with fc.gathered(model):
            if how == "gathered":
                return model(x)
            return torch.func.functional_call(model, full_copies(model, "head"), (x,))
    given = full_copies(model, "" if how == "all given" else "head")
    return torch.func.functional_call(model, given, (x,))


HOWS = ("vmap", "gathered", "gathered, some given", "all given", "some given")


@pytest.mark.parametrize("full", [False, True])
@pytest.mark.parametrize("how", HOWS)
def test_inference_mode_reads_copies_of_weights(how: str, full: bool) -> None:
    """Copies of weights work in inference mode, and the next step trains."""

    def check(rank: int) -> None:
        torch.manual_seed(0)
        model = Tower()
        by_block(model, mp_policy=MixedPrecision(BF16, full_precision_in_eval=full))
        torch.manual_seed(0)
        plain = Tower() if full else Tower().to(BF16)
        x = torch.ones(4, 6)
        with torch.inference_mode():
            out = call(model.eval(), x, how)
        wanted = plain(x.to(plain.head.weight.dtype))
        assert out.dtype is wanted.dtype
        close = {"rtol": 1e-5, "atol": 1e-6} if full else {"rtol": 0.05, "atol": 0.02}
        torch.testing.assert_close(out, wanted, **close)
        model.train()(x).float().sum().backward()
        assert all(p.grad is not None for p in model.parameters())

    simulate_ranks(check, 2)


def test_given_weights_are_cast() -> None:
    """Tensors in the place of some parameters of a unit compute in param_dtype, and train."""

    def check(rank: int) -> None:
        torch.manual_seed(0)
        model = fc.fully_shard(Tower(), mp_policy=MixedPrecision(BF16, torch.float32))
        torch.manual_seed(0)
        plain = Tower().to(BF16)
        given = {"head.weight": plain.head.weight.detach().float().requires_grad_()}
        out = torch.func.functional_call(model, given, (torch.ones(4, 6),))
        out.float().sum().backward()
        plain(torch.ones(4, 6, dtype=BF16)).float().sum().backward()
        wanted = plain.head.weight.grad.float()
        torch.testing.assert_close(given["head.weight"].grad, wanted, rtol=0.02, atol=0.02)

    simulate_ranks(check, 2)


def test_full_precision_eval_in_inference_mode() -> None:
    """A first forward in eval and inference mode computes in full precision."""

    def check(rank: int) -> None:
        torch.manual_seed(0)
        model = by_block(Tower(), mp_policy=MixedPrecision(BF16, full_precision_in_eval=True))
        torch.manual_seed(0)
        x, plain = torch.ones(4, 6), Tower()
        with torch.inference_mode():
            torch.testing.assert_close(model.eval()(x), plain(x), rtol=1e-6, atol=1e-6)

    simulate_ranks(check, 2)


@pytest.mark.parametrize("grad", [False, True])
def test_full_precision_eval_in_a_scope(grad: bool) -> None:
    """Inside gathered an eval forward computes as stored, a training one in param_dtype."""

    def check(rank: int) -> None:
        torch.manual_seed(0)
        model = by_block(Tower(), mp_policy=MixedPrecision(BF16, full_precision_in_eval=True))
        torch.manual_seed(0)
        x, plain = torch.randn(4, 6, generator=torch.Generator().manual_seed(rank)), Tower()
        with torch.set_grad_enabled(grad), fc.gathered(model):
            out = model.eval()(x)
            torch.testing.assert_close(out, plain(x), rtol=1e-6, atol=1e-6)
            assert model.train()(x).dtype is BF16
            if grad:
                out.sum().backward()
                for p, q in zip(model.parameters(), plain.parameters()):
                    assert p.grad.dtype is q.dtype

    simulate_ranks(check, 2)


def test_lost_writes_in_inference_mode() -> None:
    """A forward that writes a copy of a weight raises in inference mode too."""

    class Clamped(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            self.weight.clamp_(-0.1, 0.1)
            return super().forward(x)

    def check(rank: int) -> None:
        torch.manual_seed(0)
        model = fc.fully_shard(Clamped(6, 6), mp_policy=MixedPrecision(BF16))
        with torch.inference_mode(), fc.gathered(model):
            with pytest.raises(RuntimeError, match="the write would be lost"):
                model(torch.ones(2, 6))

    simulate_ranks(check, 2)
