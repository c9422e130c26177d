"""Arithmetic on sharded tensors equals arithmetic on the whole."""

from __future__ import annotations

import math
import weakref
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from fsdp_compose.base.group import SELF, Group
from fsdp_compose.sharded import (
    Residence,
    ShardedParameter,
    ShardedTensor,
    ShardedWeightError,
    ShardSpec,
    is_sharded,
    spec_of,
    tag,
    to_local,
    untag,
)

from sharded_values import WORLDS, examples, on_ranks, same, shard


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
    grad = torch.zeros(4)
    assert type(tag(grad, spec)) is ShardedTensor and type(untag(grad)) is torch.Tensor


def test_local_slice_shares_storage_and_version() -> None:
    (p,) = shard([torch.zeros(3)], SELF)
    local, version = to_local(p), p._version
    local.add_(1)
    assert p._version == version + 1 and p.full_tensor().tolist() == [1, 1, 1]
    assert p.to_local().requires_grad and not to_local(p).requires_grad
    p.to_local().sum().backward()
    assert p.grad.full_tensor().tolist() == [1, 1, 1]


UNARY = "abs neg sqrt exp tanh sigmoid sign isnan isfinite clone detach square reciprocal log1p"


ACTIVATIONS = "relu relu6 gelu silu mish softplus logsigmoid leaky_relu elu hardtanh softsign"


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
            for name in ACTIVATIONS.split():
                found = getattr(F, name)(p).full_tensor()  # rounded by the length of a slice
                torch.testing.assert_close(found, getattr(F, name)(w).detach())
            with torch.no_grad(), pytest.raises(ShardedWeightError, match="inplace=True"):
                F.relu(p, inplace=True)
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


def test_equal_values_of_other_dtypes_are_equal() -> None:
    (p,), w = shard([torch.arange(5.0)], SELF), torch.arange(5.0)
    for dtype in (torch.float64, torch.bfloat16, torch.int64):
        assert torch.equal(p, w.to(dtype)) and torch.equal(p.detach().to(dtype), w)
        assert not p.equal(w.to(dtype) + 1)
    assert torch.equal(input=p, other=p) and torch.allclose(input=p, other=w)
    assert p.dist(other=w + 1, p=1) == 5 and torch.dist(input=p, other=w + 1) == 5**0.5


@pytest.mark.parametrize("name", ["dot", "vdot", "inner"])
def test_products_of_half_precision_lose_nothing(name: str) -> None:
    """1e-8 is 0 in fp16, and 90,000 infinite; bf16 knows no 1 + 1/256."""
    product = getattr(torch, name)
    for dtype, one, other, wanted in (
        (torch.float16, [2**-14.0] * 1024, [2**-14.0] * 1024, 2**-18.0),
        (torch.float16, [300.0, -300.0, 0.5], [300.0, 300.0, 1.0], 0.5),
        (torch.bfloat16, [1.0625, 1.0], [1.0625, -1.0], 0.12890625),
    ):
        w, v = torch.tensor(one, dtype=dtype), torch.tensor(other, dtype=dtype)
        (p,) = shard([w], SELF)
        found = product(p, v)
        assert found.dtype == dtype and found.item() == wanted == product(w, v).item()
        found.backward()
        assert torch.equal(p.grad, v)


def test_sums_keep_the_dtype_that_was_asked_for() -> None:
    for w in (torch.arange(1, 6), torch.arange(1, 6) > 2):
        (p,) = shard([w], SELF)
        for dtype in (torch.int32, torch.uint8, torch.int64, torch.float32, torch.bfloat16):
            for name in ("sum", "prod", "nansum"):
                found, wanted = (getattr(torch, name)(t, dtype=dtype) for t in (p, w))
                assert (found, found.dtype) == (wanted, wanted.dtype)
        for name in ("all", "any"):
            assert getattr(p, name)() == getattr(w, name)()
            for dim in ((), []):  # elementwise, of plain tensors
                with pytest.raises(ShardedWeightError, match="along a dimension"):
                    getattr(p, name)(dim=dim)


@pytest.mark.parametrize("dtype", [torch.float16, torch.float8_e4m3fn, torch.complex64])
def test_autocast_does_not_look_at_what_is_gathered(dtype: torch.dtype) -> None:
    def body(group: Group) -> None:
        for w in (torch.arange(5.0).to(dtype), torch.zeros(0, dtype=dtype)):
            with torch.autocast("cpu", torch.bfloat16):
                full = shard([w], group)[0].full_tensor()
            assert full.dtype == dtype and full.tolist() == w.tolist()

    on_ranks(body, 2)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_reductions_under_autocast_of_another_dtype(dtype: torch.dtype) -> None:
    def body(group: Group) -> None:
        w = torch.arange(1.0, 6).to(dtype)
        (p,) = shard([w], group)
        other = torch.bfloat16 if dtype == torch.float16 else torch.float16
        with torch.autocast("cpu", other):
            for name in ("max", "min", "amax", "sum", "prod", "mean", "norm"):
                found, wanted = getattr(p, name)(), getattr(w, name)()
                assert (name, found.item(), found.dtype) == (name, wanted.item(), wanted.dtype)

    on_ranks(body, 2)


COMPARING = (
    "eq ge greater greater_equal gt isclose le less less_equal logical_and logical_or logical_xor "
    "lt ne not_equal"
).split()


@pytest.mark.parametrize("name", COMPARING)
def test_comparing_needs_no_gradient(name: str) -> None:
    """With what was computed in grad mode too; what is differentiated says how to go without."""

    def body(group: Group) -> None:
        (p,), w = shard([torch.arange(5.0) - 2], group), nn.Parameter(torch.arange(5.0) - 2)
        compare = getattr(torch, name)
        for found, wanted in (
            (compare(p, p.mean()), compare(w, w.mean())),
            (getattr(p, name)(p.abs().max()), compare(w, w.max())),
            (compare(w, p), compare(w, w)),
        ):
            assert found.full_tensor().tolist() == wanted.tolist() and not found.requires_grad
        with pytest.raises(
            ShardedWeightError, match=r"detach\(\) it or compute under torch.no_grad"
        ):
            p.mul(p.mean())

    on_ranks(body, 2)


def test_operators_compare_in_grad_mode() -> None:
    """As the methods they stand for, with a sharded parameter on either side."""

    def body(group: Group) -> None:
        (p,), w = shard([torch.arange(5.0)], group), nn.Parameter(torch.arange(5.0))
        pairs = [(p > p.mean(), w > 2), (p <= w.mean(), w <= 2), (w.mean() != p, w != 2)]
        for found, wanted in [*pairs, (w >= p, w >= w), (p == w, w == w), (w < p, w < w)]:
            assert found.full_tensor().tolist() == wanted.tolist()

    on_ranks(body, 2)


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
