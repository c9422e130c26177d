"""Sharded tensors as objects: assignment, copies, pickles, hooks, errors, collectives."""

from __future__ import annotations

import _thread
import copy
import io
import math
import pickle
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from fsdp_compose import ShardingStrategy, fully_shard
from fsdp_compose.base.group import Group
from fsdp_compose.sharded import (
    ShardedParameter,
    ShardedTensor,
    ShardedWeightError,
    as_own_file,
    is_sharded,
    set_local,
    spec_of,
    to_local,
)
from fsdp_compose.simulation import simulate

from harness import run_ranks, simulate_ranks
from models import mesh_of_replicas
from sharded_values import WORLDS, examples, on_ranks, same, shard, world

REFUSED: list[Callable[[Any], Any]] = [
    lambda p: p @ p,
    lambda p: torch.matmul(p, p),
    lambda p: F.linear(torch.ones(2, 4), p),
    lambda p: F.embedding(torch.tensor([0]), p),
    lambda p: F.layer_norm(p, (4,)),
    lambda p: p.split(2, 1),
    lambda p: p.select(1, 0),
    lambda p: p.unfold(0, 2, 1),
    lambda p: p.expand(4, 4, 4),
    lambda p: p.expand_as(torch.ones(4, 4, 4)),
    lambda p: p.view_as(p),
    lambda p: p[::2],
    lambda p: p[:, 0],
    lambda p: p[1:3, :2],
    lambda p: p[torch.tensor([0])],
    lambda p: p[True],
    lambda p: p[None],
    lambda p: p[..., 0],
    lambda p: p.T,
    lambda p: p.mT,
    lambda p: p.t(),
    lambda p: p.transpose(0, 1),
    lambda p: torch.cat([p, p]),
    lambda p: torch.stack([p, p]),
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
    lambda p: F.dropout(p),
    lambda p: torch.poisson(p),
    lambda p: torch.poisson(p),
    lambda p: p.multinomial(1),
    lambda p: nn.init.eye_(p),
    lambda p: nn.init.sparse_(p, 0.5),
    lambda p: nn.init.orthogonal_(p),
    lambda p: torch.linalg.svd(p),
    lambda p: p.expand(2, 4, 4),
    lambda p: torch.where(p),
    lambda p: p.nonzero(),
    lambda p: torch.multinomial(p.sigmoid(), 1),
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
    lambda p: torch.einsum("ij->ji", p),
    lambda p: torch.linalg.matrix_norm(p),
    lambda p: p.index_select(0, torch.tensor([0])),
    lambda p: p.__setitem__((slice(None), 0), 1.0),
    lambda p: p.__setitem__(torch.tensor([0]), 1.0),
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


@pytest.mark.parametrize("name", ["HYBRID_SHARD", "HYBRID_SHARD_OPTIMIZER", "NO_SHARD"])
def test_message_names_the_rank_of_the_job(name: str) -> None:
    """Not the place in the group that shards, or none of a group."""
    strategy = ShardingStrategy[name]

    def ranks() -> str:
        mesh = None if strategy is ShardingStrategy.NO_SHARD else mesh_of_replicas(2, 2)
        weight: Any = fully_shard(nn.Linear(4, 4), mesh=mesh, strategy=strategy).weight
        with pytest.raises(ShardedWeightError) as caught:
            weight @ weight
        return str(caught.value)

    for rank, text in enumerate(simulate(ranks, 4)):
        assert f"of which rank {rank} holds" in text


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
        for alias in (p.detach(), p.data):  # which leaves the parameter alone
            alias.data = w * 5
            same(alias, w * 5)
            same(p, (w + 1) * 2)
        assert not residence.moved
        residence.written = 2
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
        from fsdp_compose.comm import small_reduce
        from fsdp_compose.sharded import ranks, reduce

        for module, name in (
            (reduce, "reduce_alike"),
            (small_reduce, "reduce_alike"),
            (ranks, "all_gather_uneven"),
        ):
            real = getattr(module, name)
            setattr(module, name, lambda *a, _r=real, _n=name: (calls.append(_n), _r(*a))[1])
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


@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support")
@pytest.mark.parametrize("layout", [torch.sparse_coo, torch.sparse_csr])
def test_sparse_tensors_are_cut_like_dense_ones(layout: torch.layout) -> None:
    """As a gradient, from a hook on one, and as the other operand."""

    def check(rank: int) -> None:
        plain = nn.Linear(4, 4)
        model = fully_shard(copy.deepcopy(plain))
        sparse = torch.eye(4).to_sparse(layout=layout)
        for module in (plain, model):
            module.weight.grad = sparse if module is model else torch.eye(4)
            torch.optim.SGD(module.parameters(), 0.5).step()
            with torch.no_grad():
                module.weight.add_(sparse if module is model else torch.eye(4))
        assert torch.equal(model.weight.full_tensor(), plain.weight)
        model.zero_grad()
        model.weight.register_hook(lambda grad: sparse)
        model(torch.ones(1, 4)).sum().backward()
        assert torch.equal(model.weight.grad.full_tensor(), torch.eye(4))

    simulate_ranks(check, 2)


def test_threads_that_run_no_python_ask_for_the_class() -> None:
    """As autograd's threads of devices do: who asked is nobody then."""
    model, found = fully_shard(nn.Linear(2, 2)), []
    kinds = [torch.distributed.tensor.DTensor, ShardedParameter]
    _thread.start_new_thread(found.extend, (map(isinstance, [model.weight] * 2, kinds),))
    deadline = time.monotonic() + 10
    while len(found) < 2 and time.monotonic() < deadline:
        time.sleep(0.001)
    assert found == [False, True]
