"""Clipping takes one norm for each bucket, asks nothing of the host, and sees every gradient."""

from __future__ import annotations

import gc
import math
import weakref
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Partial, Replicate, Shard, distribute_tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

import fsdp_compose as fc
from fsdp_compose.base.process import here
from fsdp_compose.base.torch_private import raw
from fsdp_compose.optim import clip as clipping
from fsdp_compose.sharded import spec_of

from harness import fake_world, run_ranks, simulate_ranks


class Calls(TorchDispatchMode):
    """Kernels that ran, each with the number of tensors in its first argument."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[tuple[str, int]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        first = args[0] if args else None
        name = func.__name__.split(".")[0]
        self.found.append((name, len(first) if isinstance(first, list) else 1))
        return func(*args, **(kwargs or {}))


class Made(TorchFunctionMode):
    """Tensors made from Python numbers, which the host sends to the device and waits for."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += func in (torch.tensor, torch.as_tensor)
        return func(*args, **(kwargs or {}))


def build(seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(*(nn.Sequential(nn.Linear(5, 5), nn.Linear(5, 5)) for _ in range(3)))


def sharded() -> nn.Module:
    model = build()
    for block in model:
        fc.fully_shard(block)
    return fc.fully_shard(model)


def backward(model: nn.Module) -> None:
    model(torch.linspace(-1, 1, 10).view(2, 5)).square().sum().backward()


Clip = Callable[[nn.Module, float], torch.Tensor]
WAYS: dict[str, Clip] = {
    "module": lambda model, p: fc.clip_grad_norm_(model, 0.1, p),
    "parameters": lambda model, p: fc.clip_grad_norm_(model.parameters(), 0.1, p),
    "torch's": lambda model, p: nn.utils.clip_grad_norm_(model.parameters(), 0.1, p),
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("p", [2.0, float("inf"), 1.0])
def test_a_bucket_is_one_tensor_and_no_host_waits(way: str, p: float) -> None:
    with fake_world(2):
        model = sharded()
        backward(model)
        WAYS[way](model, p)
        before = here.traffic.all_reduces
        with Calls() as calls:
            WAYS[way](model, p)
        assert here.traffic.all_reduces == before + 1
        with Made() as made:
            WAYS[way](model, p)
        counts = [n for name, n in calls.found if name.startswith("_foreach")]
        assert counts == [3, 3]  # a norm and a product over three buckets of four parameters
        waits = {"_local_scalar_dense", "nonzero", "index", "index_put_", "masked_select", "item"}
        assert not waits & {name for name, _ in calls.found} and not made.count


EDITS: dict[str, Callable[[Any], None]] = {
    "none": lambda model: None,
    "cleared": lambda model: setattr(model[0][0].weight, "grad", None),
    "replaced": lambda model: setattr(model[1][1].bias, "grad", torch.full((5,), 3.0)),
    "edited": lambda model: model[2][0].weight.grad.mul_(2.0),
    "frozen and accumulated": lambda model: (
        model[0][0].weight.requires_grad_(False),
        backward(model),
    ),
}


@pytest.mark.parametrize("world", [1, 2])
def test_edited_gradients_count_as_they_are(world: int) -> None:
    """Every way, order and edit equals torch's clipping of the plain model."""

    def body(rank: int) -> None:
        for name, edit in EDITS.items():
            for p in (2.0, 0.0) if name != "replaced" else (0.5, float("inf")):
                for way, clip in WAYS.items():
                    model, plain = sharded(), build()
                    for each in (plain, model):
                        backward(each)
                        edit(each)
                    norm = clip(model, p)
                    wanted = nn.utils.clip_grad_norm_(plain.parameters(), 0.1, p)
                    torch.testing.assert_close(norm.float(), wanted, msg=f"{name} {p} {way}")
                    for mine, theirs in zip(model.parameters(), plain.parameters()):
                        if theirs.grad is None:
                            assert mine.grad is None
                        else:
                            torch.testing.assert_close(mine.grad.full_tensor(), theirs.grad)

    run_ranks(body, world)


def test_a_module_is_looked_through_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """The names of a module's parameters are looked up where one of no unit has to be named."""
    model, walks = sharded(), []
    backward(model)
    walk = nn.Module.named_parameters

    def walking(self: Any, *args: Any, **kwargs: Any) -> Any:
        walks.append(self)
        return walk(self, *args, **kwargs)

    monkeypatch.setattr(nn.Module, "named_parameters", walking)
    fc.clip_grad_norm_(model, 1.0)
    del walks[:]
    fc.clip_grad_norm_(model, 1.0)
    assert walks == [model]  # by ``parameters``
    model[0][0].weight.grad = None
    fc.grad_norm(model)
    assert walks == [model] * 2


def test_frozen_buckets_leave_others_whole() -> None:
    """A bucket without gradients changes nothing for those whose gradients are one buffer."""
    model = sharded()
    model[0].requires_grad_(False)
    backward(model)
    for clip in WAYS.values():
        with Calls() as calls:
            clip(model, 2.0)
        assert [n for name, n in calls.found if name.startswith("_foreach")] == [2, 2]


def test_one_of_a_bucket_is_clipped_alone() -> None:
    """Parameters given twice, or in part, are not taken for the whole of their buckets."""
    model, plain = sharded(), build()
    for each in (model, plain):
        backward(each)
    for pick in (
        lambda m: [m[0][0].weight],
        lambda m: [m[0][0].weight, m[0][0].weight, m[1][0].bias],
    ):
        norm = fc.clip_grad_norm_(pick(model), 1e-3)
        torch.testing.assert_close(norm, nn.utils.clip_grad_norm_(pick(plain), 1e-3))
    for mine, theirs in zip(model.parameters(), plain.parameters()):
        torch.testing.assert_close(mine.grad.full_tensor(), theirs.grad)


def test_what_a_hook_leaves_in_gaps_is_not_counted() -> None:
    """A communication hook that fills the padding changes no norm."""

    def body(rank: int) -> None:
        model = sharded()

        def hook(state: Any, bucket: Any) -> torch.Tensor:
            part = bucket.parts[rank].clone()
            torch.distributed.all_reduce(part.mul_(0.0))
            return part + 7.0

        for unit in model:
            fc.register_comm_hook(unit, None, hook)
        backward(model)
        alone = torch.stack([p.grad.norm() for p in model.parameters()]).norm()
        torch.testing.assert_close(fc.grad_norm(model), alone)

    run_ranks(body, 2)


@pytest.mark.parametrize("clip", [fc.clip_grad_norm_, nn.utils.clip_grad_norm_])
@pytest.mark.parametrize("granularity", [None, lambda fqn, param: "tensor"])
def test_padding_of_gradients_is_in_no_norm(clip: Any, granularity: Any) -> None:
    """Neither the NaN that gradients were clipped by before, nor noise added to flat ones."""

    def body(rank: int) -> None:
        model = fc.fully_shard(build(), granularity=granularity)
        plain, noisy = build(), fc.flat_parameters(model)
        for each in (model, plain):
            each(torch.full((2, 5), torch.nan)).sum().backward()
            assert clip(each.parameters(), 1.0).isnan()
            each.zero_grad(set_to_none=False)
            backward(each)
        for param in [*noisy, *plain.parameters()]:
            param.grad.add_(1.0)
        wanted = nn.utils.clip_grad_norm_(plain.parameters(), 0.1)
        torch.testing.assert_close(clip(model.parameters(), 0.1), wanted)
        for mine, theirs in zip(model.parameters(), plain.parameters(), strict=True):
            torch.testing.assert_close(mine.grad.full_tensor(), theirs.grad)

    run_ranks(body, 2)


def share(model: nn.Module) -> None:
    """As many gradients lie in the first block's buffer as it has parameters."""
    first, second, _ = model
    second[0].weight.grad = first[0].weight.grad
    first[1].bias.grad = None


@pytest.mark.parametrize("norm", [fc.clip_grad_norm_, nn.utils.clip_grad_norm_])
def test_a_gradient_that_two_parameters_share(norm: Callable[..., Any]) -> None:
    """Its norm counts twice, and it is scaled twice, as torch does with a plain model."""
    plain, model = build(), sharded()
    for module in (plain, model):
        backward(module)
        share(module)
    wanted = nn.utils.clip_grad_norm_(plain.parameters(), 0.1)
    assert float(norm(model.parameters(), 0.1)) == pytest.approx(float(wanted), rel=1e-6)
    for param, twin in zip(model.parameters(), plain.parameters(), strict=True):
        grad = None if param.grad is None else param.grad.full_tensor()
        assert (grad is None) == (twin.grad is None)
        assert grad is None or torch.allclose(grad, twin.grad)


@pytest.mark.parametrize("norm", [fc.clip_grad_norm_, nn.utils.clip_grad_norm_])
def test_a_gradient_that_is_a_part_of_another(norm: Callable[..., Any]) -> None:
    """The rest of the other one, which lies where the first's padding would, is left and counts."""
    model = nn.Sequential(nn.LayerNorm(2, bias=False), nn.Linear(2, 2, bias=False))
    fc.fully_shard(model, units=fc.wrap.by_class((nn.LayerNorm, nn.Linear)))
    part, other = model.parameters()
    model(torch.tensor([[1.0, 2.0]])).sum().backward()
    part.grad = other.grad[0]
    assert float(norm([part, other], 0.1)) == pytest.approx(math.sqrt(6), rel=1e-3)
    assert other.grad.full_tensor().all()


def test_torch_joins_gradients_once() -> None:
    """What the norm was taken of is what is scaled, until the call returns or raises."""
    with fake_world(2):
        model = sharded()
        backward(model)
        counted = mock.Mock(wraps=clipping.join_buckets)
        with mock.patch.object(clipping, "join_buckets", counted):
            nn.utils.clip_grad_norm_(model.parameters(), 0.1)
            assert counted.call_count == 1
            nn.utils.clip_grads_with_norm_(model.parameters(), 0.1, torch.tensor(1.0))
            nn.utils.clip_grads_with_norm_(list(model.parameters()), 0.1, torch.tensor(1.0))
            assert counted.call_count == 2  # alone it has no norm before it


def test_clipping_that_raises_keeps_no_gradient() -> None:
    with fake_world(2):
        model = sharded()
        backward(model)
        model[0][0].bias.grad.fill_(math.nan)
        with raw():
            flat = weakref.ref(model[0][0].bias.grad._base)
        with pytest.raises(RuntimeError, match="non-finite"):
            nn.utils.clip_grad_norm_(model.parameters(), 0.1, error_if_nonfinite=True)
        assert flat() is not None
        model.zero_grad()
        gc.collect()  # the error, with torch's frames
        assert flat() is None


def test_units_share_one_group() -> None:
    """Groups are compared for every bucket of a norm; one object is equal to itself at once."""
    with fake_world(4):
        model = sharded()
        groups = {id(spec_of(param).group) for param in model.parameters()}
        assert len(groups) == 1


def test_partial_sums_of_split_weights_are_clipped() -> None:
    """A gradient that ranks have not added up yet is scaled where it lies, not its sum."""

    def ranks(rank: int) -> None:
        mesh = init_device_mesh("cpu", (2,))
        param = nn.Parameter(distribute_tensor(torch.ones(4), mesh, [Replicate()]))
        x = distribute_tensor(torch.arange(16.0).view(4, 4), mesh, [Shard(0)])
        (x * param).sum().backward()
        assert param.grad.placements == (Partial(),)
        before = param.grad.full_tensor()
        norm = fc.clip_grad_norm_([param], 1.0)
        torch.testing.assert_close(norm, before.norm())
        torch.testing.assert_close(param.grad.full_tensor(), before / before.norm())

    run_ranks(ranks, 2)


def test_a_split_tensor_that_is_no_parameter() -> None:
    """Its gradient counts as a whole, as that of a parameter does, and ranks clip alike."""

    def ranks(rank: int) -> None:
        mesh = init_device_mesh("cpu", (2,))
        split = distribute_tensor(torch.arange(8.0), mesh, [Shard(0)]).detach().requires_grad_()
        split.square().sum().backward()
        before = split.grad.full_tensor()
        torch.testing.assert_close(fc.grad_norm([split]), before.norm())
        torch.testing.assert_close(fc.clip_grad_norm_([split], 1.0), before.norm())
        torch.testing.assert_close(split.grad.full_tensor(), before / before.norm())

    simulate_ranks(ranks, 2)


def test_names_that_parameters_have_by_now() -> None:
    """A block was clipped alone, and is part of a model since; ranks compare names of gradients."""

    def ranks(rank: int) -> None:
        block = fc.fully_shard(nn.Linear(4, 4))
        block(torch.ones(4)).sum().backward()
        fc.clip_grad_norm_(block, 1.0)
        model = fc.fully_shard(nn.Sequential(nn.ReLU(), block))
        if rank == 1:
            block.weight.grad = block.weight.grad.clone()  # it is named by itself there
        fc.clip_grad_norm_(model, 1.0)
        mesh = init_device_mesh("cpu", (2,))
        copied = nn.Parameter(distribute_tensor(torch.ones(4), mesh, [Replicate()]))
        copied.grad = 3 * torch.ones_like(copied)
        norm = fc.clip_grad_norm_([*model.parameters(), copied], 1.0)
        torch.testing.assert_close(norm, torch.tensor(37.0).sqrt())

    simulate_ranks(ranks)
