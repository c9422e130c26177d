"""A sharded tensor against the whole: facts, arithmetic, reductions, copies, errors."""

from __future__ import annotations

import copy
import io
import math
import pickle
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from fsdp_compose.base.mesh import SELF, Group, group_of
from fsdp_compose.sharded import (
    Residence,
    ShardedParameter,
    ShardedTensor,
    ShardedWeightError,
    ShardSpec,
    as_own_file,
    is_sharded,
    set_local,
    spec_of,
    tag,
    tag_all,
    to_local,
    untag,
)

from harness import run_ranks

CPU = torch.device("cpu")
WORLDS = [1, 2, 3]


def world() -> Group:
    return group_of(torch.distributed.group.WORLD, CPU)


def shard(values: list[torch.Tensor], group: Group) -> list[Any]:
    """The values as parameters that are slices of one bucket, cut evenly over the group."""
    total = sum(v.numel() for v in values)
    width = -(-total // group.size)
    flat = torch.zeros(width * group.size, dtype=values[0].dtype)
    residence, offset, params = Residence(), 0, []
    specs = []
    for i, value in enumerate(values):
        flat.as_strided(value.shape, value.stride(), offset).copy_(value)
        spec = ShardSpec(
            f"layer.{i}",
            "layer",
            value.shape,
            value.stride(),
            offset,
            width,
            group,
            residence,
        )
        specs.append(spec)
        offset += value.numel()
    mine = flat[group.rank * width : (group.rank + 1) * width].clone()
    for value, spec in zip(values, specs):
        param = nn.Parameter(value.clone(), requires_grad=value.is_floating_point())
        at = max(spec.offset + spec.start - group.rank * width, 0) if spec.stop > spec.start else 0
        param.data = mine[at : at + spec.stop - spec.start]
        params.append(tag(param, spec))
    return params


def examples(dtype: torch.dtype = torch.float32) -> list[torch.Tensor]:
    """Two and more dimensions, transposed, scalar, empty and long: several cuts fall inside."""
    gen = torch.Generator().manual_seed(0)
    rand = lambda *s: torch.randn(*s, generator=gen).to(dtype)  # noqa: E731
    return [
        rand(4, 3),
        rand(5, 3).t(),
        rand(()),
        rand(7),
        torch.zeros(0, 2, dtype=dtype),
        rand(2, 3, 2).permute(2, 0, 1),
        rand(1, 9),
    ]


def on_ranks(body: Callable[[Group], Any], ranks: int) -> None:
    """Run on a world of one without a process group, or on real ranks."""
    if ranks == 1:
        body(SELF)
    else:
        run_ranks(lambda rank: body(world()) and None, ranks)


def same(sharded: Any, whole: torch.Tensor, **tolerance: float) -> None:
    assert is_sharded(sharded), type(sharded)
    assert sharded.shape == whole.shape and sharded.dtype == whole.dtype
    full = sharded.full_tensor()
    assert full.shape == whole.shape
    torch.testing.assert_close(full, whole.detach(), rtol=0, atol=0, equal_nan=True, **tolerance)


@pytest.mark.parametrize("ranks", WORLDS)
def test_reads_as_the_whole(ranks: int) -> None:
    def body(group: Group) -> None:
        for p, w in zip(shard(examples(), group), examples()):
            assert isinstance(p, nn.Parameter) and isinstance(p, ShardedParameter)
            assert p.shape == w.shape == p.size() and p.ndim == p.dim() == w.ndim
            assert p.numel() == p.nelement() == torch.numel(p) == w.numel()
            assert p.stride() == w.stride() and p.is_contiguous() == w.is_contiguous()
            assert p.nbytes == w.nbytes and p.element_size() == 4 and p.itemsize == 4
            assert p.dtype == w.dtype and p.device == w.device and p.layout == w.layout
            assert p.is_leaf and p.requires_grad and p.grad is None and p.grad_fn is None
            assert not (p.is_sparse or p.is_cuda or p.is_quantized or p.is_meta or p.is_complex())
            assert p.is_cpu and p.is_floating_point() and torch.is_floating_point(p)
            assert torch.Tensor.dim(p) == w.dim() and torch.Tensor.shape.__get__(p) == w.shape
            if w.ndim:
                assert len(p) == len(w) and p.size(-1) == w.size(-1) == torch.Tensor.size(p, -1)
                assert p.stride(0) == w.stride(0)
            assert p.to_local().untyped_storage().nbytes() > 0
            assert hash(p) == id(p) and {p: 1}[p] == 1 and weakref.ref(p)() is p
            same(p, w)

    on_ranks(body, ranks)


def test_identity_survives_tag_and_untag() -> None:
    plain = nn.Parameter(torch.randn(2, 2))
    before, name = id(plain), {plain: "kept"}
    local = plain.detach().reshape(-1).clone()
    spec = ShardSpec("w", "u", plain.shape, plain.stride(), 0, 4, SELF, Residence())
    plain.data = local
    assert tag(plain, spec) is plain and spec_of(plain) is spec
    assert plain.dtype == torch.float32
    assert name[plain] == "kept"
    assert untag(plain) is plain and type(plain) is nn.Parameter and id(plain) == before
    assert plain.shape == (4,) and "dtype" not in plain.__dict__ and not is_sharded(plain)
    with pytest.raises(TypeError, match="not sharded"):
        spec_of(plain)
    grads = [torch.zeros(4), None]
    tag_all(grads, [spec, spec])
    assert type(grads[0]) is ShardedTensor and type(untag(grads[0])) is torch.Tensor


def test_local_slice_shares_storage_and_version() -> None:
    (p,) = shard([torch.zeros(3)], SELF)
    local, version = to_local(p), p._version
    local.add_(1)
    assert p._version == version + 1 and p.full_tensor().tolist() == [1, 1, 1]
    assert p.to_local().requires_grad and not to_local(p).requires_grad
    p.to_local().sum().backward()
    assert p.grad.full_tensor().tolist() == [1, 1, 1]


UNARY = "abs neg sqrt exp tanh sigmoid sign isnan isfinite clone detach square reciprocal log1p"
BINARY = "add sub mul div maximum minimum atan2 pow eq lt ge fmod logical_and"


@pytest.mark.parametrize("ranks", WORLDS)
def test_elementwise_equals_the_whole(ranks: int) -> None:
    def body(group: Group) -> None:
        for p, q, w in zip(shard(examples(), group), shard(examples(), group), examples()):
            with torch.no_grad():
                q.mul_(2).sub_(0.5)
            v = w * 2 - 0.5
            for name in UNARY.split():
                same(getattr(torch, name)(p), getattr(torch, name)(w))
                same(getattr(p, name)(), getattr(w, name)())
            for name in BINARY.split():
                f = getattr(torch, name)
                same(f(p, q), f(w, v))  # sharded and sharded
                same(f(p, v), f(w, v))  # sharded and whole
                same(f(v, p), f(v, w))
                same(f(p, torch.tensor(1.5)), f(w, torch.tensor(1.5)))
            same(1 - p / 2 + p**2 - (-p) * q // 3, 1 - w / 2 + w**2 - (-w) * v // 3)
            same(2**p, 2**w)
            same(p > 0, w > 0)
            same(p == q, w == v)
            same(p != q, w != v)
            same(torch.where(p > 0, p, q), torch.where(w > 0, w, v))
            same(torch.where(p > 0, 1.0, 0.0), torch.where(w > 0, 1.0, 0.0))
            same(torch.lerp(p, q, 0.3), torch.lerp(w, v, 0.3))
            same(torch.addcdiv(p, q, q, value=2), torch.addcdiv(w, v, v, value=2))
            same(p.addcmul(q, q), w.addcmul(v, v))
            same(p.clamp(-0.5, 0.5), w.clamp(-0.5, 0.5))
            same(p.masked_fill(w > 0, 7), w.masked_fill(w > 0, 7))
            same(torch.nan_to_num(p), torch.nan_to_num(w))
            if w.ndim == 2 and w.numel():
                same(p * w[:1], w * w[:1])  # broadcast to the original shape
                same(p * w[:, :1], w * w[:, :1])
                same(p * torch.ones(1, 1), w)

    on_ranks(body, ranks)


@pytest.mark.parametrize("ranks", WORLDS)
def test_in_place_returns_the_same_object(ranks: int) -> None:
    @torch.no_grad()
    def body(group: Group) -> None:
        for p, w in zip(shard(examples(), group), examples()):
            for change in (
                lambda t: t.add_(1),
                lambda t: t.mul_(w),
                lambda t: t.copy_(w + 3),
                lambda t: t.addcmul_(t, t, value=0.1),
                lambda t: t.lerp_(t * 2, 0.5),
                lambda t: t.clamp_(min=0.1),
                lambda t: t.__imul__(2),
                lambda t: t.masked_fill_(t > 3, 0.0),
                lambda t: nn.init.constant_(t, 3.0),
                lambda t: t.fill_(torch.tensor(2.0)),
                lambda t: t.zero_(),
                lambda t: nn.init.ones_(t),
            ):
                version = p._version
                assert change(p) is p and p._version > version
                change(w)
                same(p, w)
            p[p > 0] = 5.0
            same(p, torch.full_like(w, 5.0))
            out = torch.zeros_like(p)
            assert torch.maximum(p, p * 2, out=out) is out
            same(out, torch.full_like(w, 10.0))

    on_ranks(body, ranks)


@pytest.mark.parametrize("ranks", WORLDS)
def test_casts_and_likes(ranks: int) -> None:
    def body(group: Group) -> None:
        for p, w in zip(shard(examples(), group), examples()):
            for cast in (
                lambda t: t.half(),
                lambda t: t.bfloat16().float(),
                lambda t: t.to(torch.float64),
                lambda t: t.to("cpu"),
                lambda t: t.to("cpu", torch.float16),
                lambda t: t.to(torch.zeros(1, dtype=torch.float64)),
                lambda t: t.type(torch.float64),
                lambda t: (t > 0).int(),
                torch.zeros_like,
                lambda t: torch.full_like(t, 3, dtype=torch.float64),
                lambda t: t.new_zeros(t.shape),
                lambda t: t.new_full(t.shape, 2.0, dtype=torch.float64),
                lambda t: t.new_ones(size=t.shape),
            ):
                same(cast(p), cast(w))
            assert p.to(torch.float32) is p and p.float() is p and p.cpu() is p
            assert type(torch.zeros(3, dtype=torch.float64).to(p)) is torch.Tensor
            assert type(p.new_zeros(11)) is type(p.new_tensor([1.0])) is torch.Tensor
            assert p.new_zeros(2, 11).shape == (2, 11)
            assert torch.empty_like(p).shape == w.shape
            assert torch.zeros_like(p, requires_grad=True).requires_grad

    on_ranks(body, ranks)


@pytest.mark.parametrize("ranks", WORLDS)
def test_foreach_tags_each_result(ranks: int) -> None:
    @torch.no_grad()
    def body(group: Group) -> None:
        ps, ws = shard(examples(), group), examples()
        qs, vs = [p * 2 for p in ps], [w * 2 for w in ws]
        for out, want in (
            (torch._foreach_add(ps, qs, alpha=3), torch._foreach_add(ws, vs, alpha=3)),
            (torch._foreach_add(ps, vs), torch._foreach_add(ws, vs)),
            (torch._foreach_mul(ps, 2.0), torch._foreach_mul(ws, 2.0)),
            (torch._foreach_div(ps, [2.0] * 7), torch._foreach_div(ws, [2.0] * 7)),
            (torch._foreach_mul(ps, torch.tensor(3.0)), torch._foreach_mul(ws, 3.0)),
            (torch._foreach_lerp(ps, qs, 0.1), torch._foreach_lerp(ws, vs, 0.1)),
            (torch._foreach_abs(ps), torch._foreach_abs(ws)),
        ):
            assert len(out) == 7
            for o, w in zip(out, want):
                same(o, w)
        torch._foreach_addcdiv_(ps, qs, [q.abs() + 1 for q in qs], -0.1)
        torch._foreach_addcdiv_(ws, vs, [v.abs() + 1 for v in vs], -0.1)
        torch._foreach_copy_(qs, ws)
        for p, q, w in zip(ps, qs, ws):
            same(p, w)
            same(q, w)
        mixed, plain = [ps[0], torch.ones(2), ps[3]], [ws[0], torch.ones(2), ws[3]]
        same(torch._foreach_add(mixed, 1)[2], torch._foreach_add(plain, 1)[2])
        assert type(torch._foreach_add(mixed, 1)[1]) is torch.Tensor
        with pytest.raises(ShardedWeightError, match=r"layer\.0.*plain tensor"):
            torch._foreach_add_([torch.zeros(4, 3)], [ps[0]])
        with pytest.raises(ShardedWeightError, match="cut differently"):
            torch._foreach_add(ps[:1], ps[3:4])

    on_ranks(body, ranks)


def reductions(t: Any) -> list[Any]:
    return [
        t.sum(),
        torch.sum(t),
        t.mean(),
        t.prod(),
        (t > 0).all(),
        (t == t).all(),
        torch.isnan(t).any(),
        t.isfinite().all(),
        t.var(unbiased=False),
        t.var(correction=0),
        torch.count_nonzero(t),
        t.norm(),
        t.norm(1),
        t.norm(p=3.5),
        torch.norm(t, math.inf),
        torch.linalg.vector_norm(t, 0),
        torch.linalg.norm(t),
        torch.linalg.vector_norm(t, ord=2, dtype=torch.float64),
        t.sum(dtype=torch.float64),
        torch.dist(t, t * 2),
        t.nansum(),
    ]


def extremes(t: Any) -> list[Any]:
    return [
        t.std(),
        torch.var(t),
        t.var(False),
        t.max(),
        t.min(),
        t.amax(),
        torch.amin(t),
        (t * 7).int().max(),
        torch.max(t, t * 0).min(),
        torch.linalg.vector_norm(t, -math.inf),
        torch.linalg.vector_norm(t, math.inf),
        t.norm(-1.5),
    ]


@pytest.mark.parametrize("ranks", WORLDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_reductions_are_global(ranks: int, dtype: torch.dtype) -> None:
    @torch.no_grad()
    def body(group: Group) -> None:
        for p, w in zip(shard(examples(dtype), group), examples(dtype)):
            if w.numel() == 0:
                assert p.sum() == 0 and p.norm() == 0 and not p.any() and p.all()
                with pytest.raises((RuntimeError, IndexError)):
                    p.max()
                continue
            results, wanted = reductions(p), reductions(w)
            if w.numel() > 1 and dtype == torch.float32:
                results, wanted = results + extremes(p), wanted + extremes(w)
            for i, (got, want) in enumerate(zip(results, wanted)):
                assert type(got) is torch.Tensor and got.shape == () and got.dtype == want.dtype, i
                torch.testing.assert_close(got, want, equal_nan=True)

    with torch.no_grad():
        on_ranks(body, ranks)


@pytest.mark.parametrize("ranks", WORLDS)
def test_scalars_comparisons_and_dot(ranks: int) -> None:
    @torch.no_grad()
    def body(group: Group) -> None:
        p, q, w = *shard([torch.arange(5.0)] * 2, group), torch.arange(5.0)
        assert torch.equal(p, p.clone()) and torch.equal(p, w) and torch.equal(w, p)
        assert not torch.equal(p, w + 1) and not torch.equal(p, torch.ones(4))
        assert torch.allclose(p, w + 1e-9) and not p.allclose(w + 1)
        assert torch.dot(p, p + 1) == torch.dot(w, w + 1) and p.vdot(w) == w.dot(w)
        (s,) = shard([torch.tensor([[2.5]])], group)
        assert s.item() == 2.5 and float(s) == 2.5 and int(s) == 2 and bool(s)
        assert f"{s:.2f}" == "2.50"
        nan = p.clone()
        nan.mul_(torch.tensor([1.0, 1, 1, 1, math.nan]))
        assert nan.max().isnan() and nan.norm(math.inf).isnan() and nan.isnan().any()
        with pytest.raises(ShardedWeightError, match="cut differently" if ranks > 1 else "cut"):
            p + q

    on_ranks(body, ranks)


@pytest.mark.parametrize("ranks", WORLDS)
def test_reductions_train(ranks: int) -> None:
    def penalty(ts: list[Any]) -> torch.Tensor:
        t = sum(x.square().sum() for x in ts) + sum(x.norm() + x.norm(3) + x.mean() for x in ts)
        return t + sum(x.var() + x.amax() + x.prod() + x.abs().max() for x in ts)

    def body(group: Group) -> None:
        values = [v for v in examples() if v.numel() > 1]
        ps, ws = shard(values, group), [v.clone().requires_grad_() for v in values]
        scale = 1 + group.rank  # a loss that differs per rank: gradients are averaged
        (penalty(ps) * scale).backward()
        (penalty(ws) * (sum(range(1, group.size + 1)) / group.size)).backward()
        for p, w in zip(ps, ws):
            assert is_sharded(p.grad) and p.grad.shape == w.shape
            torch.testing.assert_close(p.grad.full_tensor(), w.grad)
        zero = shard([torch.zeros(4)], group)[0]
        zero.norm().backward()
        assert zero.grad.full_tensor().tolist() == [0, 0, 0, 0]

    on_ranks(body, ranks)


@pytest.mark.parametrize("ranks", WORLDS)
@pytest.mark.parametrize("order", [0, 1, 2, 3.5, math.inf, -math.inf])
def test_foreach_norm_and_clip(ranks: int, order: float) -> None:
    @torch.no_grad()
    def body(group: Group) -> None:
        values = [v for v in examples() if v.numel()]
        ps, ws = shard(values, group), [v.clone() for v in values]
        got = torch._foreach_norm([*ps, torch.ones(3)], order)
        want = torch._foreach_norm([*ws, torch.ones(3)], order)
        assert all(type(g) is torch.Tensor and g.shape == () for g in got)
        torch.testing.assert_close(got, list(want))
        torch.testing.assert_close(
            torch.nn.utils.get_total_norm(ps, order), torch.nn.utils.get_total_norm(ws, order)
        )
        plain = [nn.Parameter(w) for w in ws]
        for p, q, v in zip(ps, plain, values):
            p.grad, q.grad = v * 2, v * 2
        if order != 0:
            for foreach in (None, False):
                norms = [
                    torch.nn.utils.clip_grad_norm_(x, 0.5, order, foreach=foreach)
                    for x in (ps, plain)
                ]
                torch.testing.assert_close(*norms)
        torch.nn.utils.clip_grad_value_(ps, 0.01)
        torch.nn.utils.clip_grad_value_(plain, 0.01)
        for p, q in zip(ps, plain):
            torch.testing.assert_close(p.grad.full_tensor(), q.grad)
        got = torch._foreach_max(ps)
        torch.testing.assert_close(got, [w.max() for w in ws])

    on_ranks(body, ranks)


REFUSED: list[Callable[[Any], Any]] = [
    lambda p: p @ p,
    lambda p: torch.matmul(p, p),
    lambda p: F.linear(torch.ones(2, 4), p),
    lambda p: F.embedding(torch.tensor([0]), p),
    lambda p: F.layer_norm(p, (4,)),
    lambda p: p.view(-1),
    lambda p: p.reshape(16),
    lambda p: p.flatten(),
    lambda p: p[0],
    lambda p: p[...],
    lambda p: p.T,
    lambda p: p.mT,
    lambda p: p.t(),
    lambda p: p.transpose(0, 1),
    lambda p: torch.cat([p, p]),
    lambda p: torch.stack([p, p]),
    lambda p: p.split(2),
    lambda p: list(p),
    lambda p: p.tolist(),
    lambda p: p.detach().numpy(),
    lambda p: p.unbind(),
    lambda p: p.sum(0),
    lambda p: p.norm(dim=1),
    lambda p: p.mean(dim=-1, keepdim=True),
    lambda p: torch.max(p, 1),
    lambda p: p.softmax(-1),
    lambda p: p.cumsum(0),
    lambda p: p.sort(),
    lambda p: p.normal_(),
    lambda p: p.uniform_(),
    lambda p: p.bernoulli_(),
    lambda p: p.random_(),
    lambda p: F.dropout(p),
    lambda p: torch.rand_like(p),
    lambda p: torch.randn_like(p),
    lambda p: nn.init.normal_(p),
    lambda p: nn.init.xavier_uniform_(p),
    lambda p: nn.init.kaiming_uniform_(p),
    lambda p: nn.init.trunc_normal_(p),
    lambda p: nn.init.orthogonal_(p),
    lambda p: torch.linalg.svd(p),
    lambda p: p.expand(2, 4, 4),
    lambda p: torch.where(p),
    lambda p: p.nonzero(),
    lambda p: torch.bernoulli(p.sigmoid()),
    lambda p: torch.zeros(4, 4).copy_(p),
    lambda p: torch.zeros(4, 4).add_(p),
    lambda p: p + torch.ones(2, 4, 4),
    lambda p: p + torch.ones(3),
    lambda p: p.item(),
    lambda p: p * torch.ones(4, 4, requires_grad=True),
    lambda p: bool(p > 0),
    lambda p: torch.add(p, 1, out=torch.zeros(4, 4)),
    lambda p: p.set_(),
    lambda p: p.resize_(2),
    lambda p: p.to(memory_format=torch.channels_last),
    lambda p: torch.linalg.norm(p, 1),
    lambda p: p.norm("nuc"),
    lambda p: F.mse_loss(p, p),
    lambda p: torch.einsum("ij->ji", p),
    lambda p: torch.linalg.matrix_norm(p),
    lambda p: p.index_select(0, torch.tensor([0])),
    lambda p: p.__setitem__(0, 1.0),
    lambda p: p.repeat(2, 1),
    lambda p: p.as_strided((2,), (1,)),
    lambda p: torch.distributed.nn.functional and torch.outer(p, p),
    lambda p: p.quantile(0.5),
]


@pytest.mark.parametrize("ranks", [1, 2])
def test_everything_else_is_refused_by_name(ranks: int) -> None:
    def body(group: Group) -> None:
        (p,) = shard([torch.randn(4, 4)], group)
        version = p._version
        for i, call in enumerate(REFUSED):
            with torch.no_grad() if i % 2 else torch.enable_grad():
                try:
                    out = call(p)
                except ShardedWeightError as error:
                    text = str(error)
                    for part in (
                        "'layer.0'",
                        "'layer'",
                        f"rank {group.rank}",
                        "of shape (4, 4)",
                        "full_tensor()",
                        "to_local()",
                    ):
                        assert part in text, text
                else:
                    raise AssertionError(f"REFUSED[{i}] returned {out!r}")
        assert p._version == version

    on_ranks(body, ranks)


def test_message_names_the_function_and_the_slice() -> None:
    def body(rank: int) -> None:
        (p,) = shard([torch.randn(4, 3)], world())
        with pytest.raises(
            ShardedWeightError,
            match=r"linear needs the whole of 'layer.0' \(unit 'layer'\), of "
            rf"which rank {rank} holds elements {6 * rank}..{6 * rank + 6} of shape \(4, 3\)",
        ):
            F.linear(torch.ones(1, 3), p)

    run_ranks(body, 2)


@pytest.mark.parametrize("ranks", WORLDS)
def test_data_and_grad_assignment(ranks: int) -> None:
    def body(group: Group) -> None:
        w = torch.randn(3, 5, generator=torch.Generator().manual_seed(1)).t()
        (p,) = shard([w], group)
        residence, former = spec_of(p).residence, p.data
        before = former.clone()
        p.data = w + 1
        same(p, w + 1)
        assert torch.equal(former, before)  # whoever holds the former slice can put it back
        assert residence.moved and residence.written == 1
        residence.moved, residence.written = False, 0
        p.data.mul_(2)
        assert residence.written == 1
        same(p, (w + 1) * 2)
        p.data = p.data
        assert not residence.moved
        p.grad = w
        same(p.grad, w)
        p.grad.data.zero_()
        assert residence.written == 2  # a gradient's alias is not the parameter's
        p.grad = p * 2
        same(p.grad, (w + 1) * 4)
        del p.grad
        assert p.grad is None
        p.data = p.half()
        assert residence.moved and p.dtype == torch.float16
        same(p, ((w + 1) * 2).half())
        p.data = w
        assert p.dtype == torch.float32
        same(p, w)
        for attribute in ("data", "grad"):
            with pytest.raises(ValueError, match=r"layer\.0.*shape \(4,\); wanted.*\(5, 3\)"):
                setattr(p, attribute, torch.zeros(4))
            with pytest.raises(ValueError, match="slice that holds"):
                setattr(p, attribute, shard([torch.zeros(7), torch.zeros(5, 3)], group)[1])
        set_local(p, to_local(p).double())
        assert p.dtype == torch.float64

    on_ranks(body, ranks)


@pytest.mark.parametrize("ranks", [1, 2])
def test_module_to_moves_the_slices(ranks: int) -> None:
    def body(group: Group) -> None:
        module = nn.Linear(3, 4)
        values = [p.detach().clone() for p in module.parameters()]
        for name, p in zip(["weight", "bias"], shard(values, group)):
            module.register_parameter(name, p)
            p.grad = torch.ones_like(p)
        before = list(module.parameters())
        module.to(torch.bfloat16)
        assert [id(p) for p in before] == [id(p) for p in module.parameters()]
        for p, w in zip(before, values):
            same(p, w.bfloat16())
            assert p.grad.dtype == torch.bfloat16 and is_sharded(p.grad)
        assert spec_of(before[0]).residence.moved
        module.float().load_state_dict({"weight": values[0] * 3, "bias": values[1] * 3})
        same(module.weight, values[0] * 3)
        assert all(is_sharded(v) for v in module.state_dict().values())
        module.requires_grad_(False).zero_grad()
        assert not module.weight.requires_grad and module.weight.grad is None
        assert "Linear(in_features=3" in repr(module)

    on_ranks(body, ranks)


@pytest.mark.parametrize("ranks", WORLDS)
def test_copies_are_independent(ranks: int) -> None:
    def body(group: Group) -> None:
        p, q = shard([torch.randn(4, 3), torch.randn(3)], group)
        p.grad = torch.ones_like(p)
        twin, twin_q = copy.deepcopy([p, q])
        assert type(twin) is ShardedParameter and twin.requires_grad and twin.grad is None
        assert spec_of(twin).key == spec_of(p).key
        assert spec_of(twin).residence is spec_of(twin_q).residence is not spec_of(p).residence
        whole = p.full_tensor()
        with torch.no_grad():
            twin.zero_()
        same(p, whole)
        shallow = copy.copy(p)
        assert (
            shallow is not p
            and to_local(shallow).data_ptr() == to_local(p).data_ptr()
            and shallow.requires_grad
        )
        state = copy.deepcopy(p.grad)
        assert type(state) is ShardedTensor and torch.equal(state, p.grad)
        with pytest.raises(RuntimeError, match=r"layer\.0"):
            copy.deepcopy(p * 2)

    on_ranks(body, ranks)


@pytest.mark.parametrize("ranks", WORLDS)
def test_pickle_never_passes_for_the_whole(ranks: int) -> None:
    def body(group: Group) -> None:
        p, _ = shard([torch.randn(4, 3), torch.randn(30)], group)
        for value in (p, p.data, p.detach(), torch.zeros_like(p), [p * 2]):
            for save in (pickle.dumps, lambda v: torch.save({"w": v}, io.BytesIO())):
                with pytest.raises(ShardedWeightError, match=r"layer\.0.*save_full.*kind='local'"):
                    save(value)
        own, file = as_own_file(p), io.BytesIO()
        torch.save({"w": own, "g": torch.zeros_like(own)}, file)
        assert len(file.getvalue()) < 4000
        file.seek(0)
        for loaded in (
            pickle.loads(pickle.dumps(own)),
            torch.load(file, weights_only=True)["w"],
        ):
            assert type(loaded) is ShardedTensor and not loaded.requires_grad
            assert loaded.shape == (4, 3) and spec_of(loaded).fqn == "layer.0"
            assert torch.equal(loaded.to_local(), p.to_local())
            assert spec_of(loaded).key == spec_of(p).key
            with torch.no_grad():
                p.copy_(loaded)  # the same slice of a model sharded the same way
            if group.size > 1:
                assert spec_of(loaded).group.pg is None
                for call in (lambda: loaded.full_tensor(), loaded.sum, loaded.norm):
                    with pytest.raises(RuntimeError, match=r"layer\.0.*unpickled"):
                        call()
                with pytest.raises(RuntimeError, match="unpickled"):
                    torch._foreach_norm([loaded])

    on_ranks(body, ranks)


def test_repr_needs_no_communication() -> None:
    def body(rank: int) -> None:
        (p,) = shard([torch.arange(6.0).view(2, 3)], world())
        if rank == 1:
            text = f"{p}"
            assert text == repr(p) == str(p)
            for part in (
                "ShardedParameter('layer.0' of unit 'layer'",
                "rank 1 of 2",
                "3..6",
                "shape (2, 3)",
                "torch.float32",
                "[3., 4., 5.]",
                "requires_grad",
            ):
                assert part in text, text

    run_ranks(body, 2)


@pytest.mark.parametrize("ranks", [1, 2])
def test_hooks_and_autograd_grad(ranks: int) -> None:
    def body(group: Group) -> None:
        (p,) = shard([torch.arange(6.0).view(2, 3)], group)
        seen: list[Any] = []
        spec = spec_of(p)
        handle = p.register_hook(lambda g: seen.append(g.norm()) or torch.ones(2, 3))
        post = p.register_post_accumulate_grad_hook(lambda q: seen.append(q))
        (hook,), (after,) = spec.hooks.gradient.values(), spec.hooks.accumulated.values()
        result = hook(torch.ones(spec.stop - spec.start))
        assert torch.equal(result, torch.ones(2, 3)) and torch.allclose(
            seen[0], torch.ones(6).norm()
        )
        after(p)  # autograd calls it before the reduction: nothing happens
        assert len(seen) == 1
        after.deliver(p)
        assert seen[1] is p
        handle.remove()
        post.remove()
        assert not spec.hooks.gradient and not spec.hooks.accumulated
        doubled = p * 2
        doubled.register_hook(lambda g: seen.append(g.sum()) or g * 3)
        (grad,) = torch.autograd.grad(doubled.sum(), [p], create_graph=True)
        same(grad, torch.full((2, 3), 6.0))
        assert seen[2] == 6
        p.grad = None
        torch.autograd.backward([p.square().sum()], inputs=[p])
        same(p.grad, 2 * torch.arange(6.0).view(2, 3))

    on_ranks(body, ranks)


@pytest.mark.parametrize("ranks", WORLDS)
def test_complex(ranks: int) -> None:
    @torch.no_grad()
    def body(group: Group) -> None:
        w = torch.randn(3, 4, dtype=torch.complex64, generator=torch.Generator().manual_seed(0))
        p, w = shard([w[0].clone(), w.t()], group)[1], w.t()
        assert torch.is_complex(p) and p.is_complex()
        same(torch.view_as_real(p), torch.view_as_real(w))
        torch.view_as_real(p).mul_(2)
        same(p, w * 2)
        same(p.abs(), (w * 2).abs())
        torch.testing.assert_close(p.norm(), (w * 2).norm())

    on_ranks(body, ranks)


def test_collective_budget() -> None:
    """One collective for a list of norms however long, one for any other reduction."""

    def body(rank: int) -> None:
        ps = shard([v for v in examples() if v.numel()], world())
        calls: list[str] = []
        from fsdp_compose.sharded import reduce

        for name in ("all_reduce", "all_gather_uneven"):
            real = getattr(reduce, name)
            setattr(reduce, name, lambda *a, _r=real, _n=name: (calls.append(_n), _r(*a))[1])
        with torch.no_grad():
            for order in (2, math.inf, 3):
                calls.clear()
                torch._foreach_norm(ps, order)
                assert len(calls) == 1, calls
            for call in (lambda p: p.sum(), lambda p: p.max(), lambda p: (p > 0).any()):
                calls.clear()
                call(ps[0])
                assert len(calls) == 1, calls
            calls.clear()
            _ = (ps[0] * 2 + 1).sqrt(), repr(ps[0]), ps[0].shape, torch._foreach_mul(ps, 2)
            assert calls == []

    run_ranks(body, 2)
