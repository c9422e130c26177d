"""Model state: what goes out equals the plain module's, and everything that fits comes in."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

import fsdp_compose as fc
from fsdp_compose.base.process import Traffic, here
from fsdp_compose.checkpoint import load_state_dict, state_dict
from fsdp_compose.checkpoint.ranks import groups_of
from fsdp_compose.checkpoint.values import broadcast_state, gather_whole
from fsdp_compose.sharded import is_sharded, to_local

from harness import rank_errors, run_ranks
from models import Tower, by_block, seeded, whole
from saved import TiedNet, shard_tied


def same(a: dict[str, Any], b: dict[str, Any]) -> None:
    assert list(a) == list(b)
    for key in a:
        assert torch.equal(a[key], b[key]), key
        assert a[key].dtype == b[key].dtype, key


@pytest.mark.parametrize("world", [1, 2, 3])
@pytest.mark.parametrize("units", ["blocks", "root", "head"])
def test_full_is_the_plain_modules(world: int, units: str) -> None:
    def run(rank: int) -> None:
        plain = TiedNet()
        model = shard_tied(TiedNet(), units)
        for kwargs in ({}, {"cpu_offload": True}):
            full = state_dict(model, "full", **kwargs)
            same(full, plain.state_dict())
            assert all(type(v) is torch.Tensor for v in full.values())
            assert full["turned"].stride() == plain.turned.stride()
            for name, value in full.items():  # safetensors refuses tensors that share memory
                assert value.untyped_storage().nbytes() == value.nbytes, name
            assert full._metadata == plain.state_dict()._metadata
            assert full["head.weight"].data_ptr() == full["emb.weight"].data_ptr()
        TiedNet(3).load_state_dict(full, strict=True)

    run_ranks(run, world)


def test_full_rank0_only() -> None:
    def run(rank: int) -> None:
        full = state_dict(shard_tied(TiedNet()), "full", rank0_only=True, cpu_offload=True)
        if rank == 0:
            same(full, TiedNet().state_dict())
        else:
            assert full == {}

    run_ranks(run, 2)


def test_load_plain() -> None:
    def run(rank: int) -> None:
        model = shard_tied(TiedNet(1))
        ids = [id(p) for p in model.parameters()]
        other = TiedNet(2)
        keys = load_state_dict(model, other.state_dict())
        assert keys == ([], [])
        same(state_dict(model), other.state_dict())
        assert ids == [id(p) for p in model.parameters()]

    run_ranks(run, 3)


@pytest.mark.parametrize("assign", [False, True])
@pytest.mark.parametrize("units", ["blocks", "head"])
def test_plain_load_of_full_sharded_and_dtensor_values(units: str, assign: bool) -> None:
    def run(rank: int) -> None:
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.tensor import Shard, distribute_tensor

        target = TiedNet(2).state_dict()
        mesh = init_device_mesh("cpu", (2,))
        elsewhere = shard_tied(TiedNet(2), "root", granularity="row")
        dtensors = {
            k: distribute_tensor(v, mesh, [Shard(0)]) if v.ndim else v for k, v in target.items()
        }
        for given in (target, elsewhere.state_dict(), dtensors, state_dict(elsewhere, "sharded")):
            model = shard_tied(TiedNet(1), units)
            params = dict(model.named_parameters())
            model.load_state_dict(given, assign=assign)
            same(state_dict(model), target)
            assert all(params[k] is v for k, v in model.named_parameters())
            assert model.head.weight is model.emb.weight
            model.eval()(torch.tensor([1, 2])).sum().backward()

    run_ranks(run, 2)


def test_plain_state_dict_is_sharded_and_free() -> None:
    def run(rank: int) -> None:
        model = shard_tied(TiedNet())
        here.traffic.reset()
        plain = model.state_dict()
        sharded = state_dict(model, "sharded")
        local = state_dict(model, "local")
        with fc.checkpoint.state_dict_type(model, "local"):
            hooked = model.state_dict()
        assert here.traffic == Traffic()
        assert list(plain) == list(sharded) == list(TiedNet().state_dict())
        assert set(hooked) == set(local)
        for key, value in TiedNet().state_dict().items():
            assert plain[key].shape == value.shape
            if "norm.running" not in key and key not in ("kept", "norm.num_batches_tracked"):
                assert torch.equal(plain[key].full_tensor(), value)
                assert plain[key]._shard_spec.fqn in (key, "emb.weight", "head.weight")
        assert (
            plain["emb.weight"].to_local().data_ptr() == plain["head.weight"].to_local().data_ptr()
        )

    run_ranks(run, 2)


@pytest.mark.parametrize("units", ["blocks", "root", "head"])
def test_state_dict_type_chooses_what_is_returned(units: str) -> None:
    """``state_dict_type`` chooses what plain state dict returns."""

    def run(rank: int) -> None:
        want = TiedNet().state_dict()
        model = shard_tied(TiedNet(), units)
        wrapper = nn.Sequential(model)  # the root of the tree need not be a unit
        assert fc.checkpoint.get_state_dict_type(wrapper).kind == "sharded"
        fc.checkpoint.set_state_dict_type(model, "full", cpu_offload=True)
        same(model.state_dict(), want)
        same(wrapper.state_dict(prefix="a."), {f"a.0.{k}": v for k, v in want.items()})
        twin = copy.deepcopy(model)
        same(twin.state_dict(), want)
        with fc.checkpoint.state_dict_type(model, "full", rank0_only=True):
            got = model.state_dict()
        if rank == 0:
            same(got, want)
        else:
            assert got == {}
        assert fc.checkpoint.get_state_dict_type(model).cpu_offload
        if units != "root":
            inner = model.blocks[0] if units == "blocks" else model.head
            fc.checkpoint.set_state_dict_type(inner, "local")
            for call in (model.state_dict, lambda: fc.checkpoint.get_state_dict_type(wrapper)):
                with pytest.raises(RuntimeError, match=r"disagree.*set_state_dict_type"):
                    call()

    run_ranks(run, 2)


def test_state_dict_type_refuses_bad_options() -> None:
    """``state_dict_type`` refuses bad options and plain modules."""

    def run(rank: int) -> None:
        set_type = fc.checkpoint.set_state_dict_type
        with pytest.raises(ValueError, match="not a unit"):
            set_type(nn.Linear(2, 2), "full")
        model = fc.fully_shard(nn.Linear(2, 2))
        with pytest.raises(ValueError, match="wanted one of"):
            set_type(model, "whole")
        with pytest.raises(ValueError, match="cpu_offload"):
            set_type(model, "sharded", cpu_offload=True)
        with pytest.raises(ValueError, match="cpu_offload"):
            state_dict(model, "local", rank0_only=True)
        with pytest.raises(RuntimeError, match="inside"):
            with fc.checkpoint.state_dict_type(model, "full"):
                raise RuntimeError("inside")
        assert fc.checkpoint.get_state_dict_type(model).kind == "sharded"

    run_ranks(run, 2)


@pytest.mark.parametrize("units", ["blocks", "root", "head"])
@pytest.mark.parametrize("way", ["function", "hooks", "pickled"])
def test_local_round_trip(units: str, way: str) -> None:
    def run(rank: int) -> None:
        import io

        saved_from = shard_tied(TiedNet(2), units)
        if way == "hooks":
            with fc.checkpoint.state_dict_type(saved_from, "local"):
                saved = saved_from.state_dict()
        else:
            saved = state_dict(saved_from, "local")
        if way == "pickled":
            file = io.BytesIO()
            torch.save(saved, file)
            file.seek(0)
            saved = torch.load(file, weights_only=True)
        model = shard_tied(TiedNet(1), units)
        here.traffic.reset()
        if way == "hooks":
            model.load_state_dict(saved)
        else:
            load_state_dict(model, saved)
        assert here.traffic.gathers == 0
        same(state_dict(model), TiedNet(2).state_dict())

    run_ranks(run, 2)


def test_local_refuses_another_layout_everywhere() -> None:
    """Local refuses another layout everywhere and writes nothing."""

    def save(rank: int) -> list[Any]:
        import pickle

        turned = TiedNet(2)
        turned.turned = nn.Parameter(turned.turned.detach().contiguous())
        models = [shard_tied(TiedNet(2), u) for u in ("blocks", "root")] + [shard_tied(turned)]
        return [pickle.dumps(dict(state_dict(model, "local"))) for model in models]

    saved = run_ranks(save, 2)

    def run(rank: int, which: int, swap: bool) -> None:
        import pickle

        model = shard_tied(TiedNet(1), "blocks")
        before = state_dict(model)
        try:
            load_state_dict(model, pickle.loads(saved[1 - rank if swap else rank % 2][which]))
        finally:
            same(state_dict(model), before)

    for world, which, swap, text in (
        (3, 0, False, "saved at world size 2, this model is cut over 3"),
        (2, 1, False, "the units differ"),
        (2, 0, True, "is that of rank"),
        (2, 2, False, "unit 'TiedNet': strides of bucket 0 were"),
    ):
        errors = rank_errors(run, world, which, swap)
        assert all(e is not None and text in e and "RuntimeError" in e for e in errors), errors


def test_local_state_of_a_unit_without_parameters() -> None:
    """It has no number of ranks that could differ, only buckets."""

    def run(rank: int) -> None:
        model = fc.fully_shard(
            seeded(lambda: nn.Sequential(Tower(1))), units=fc.wrap.by_class(Tower)
        )
        saved = state_dict(model, "local")
        model.append(seeded(lambda: nn.Linear(2, 2)))
        fc.refresh(model)
        with pytest.raises(RuntimeError, match=r"'Sequential': saved 0 buckets, here 1\. Local"):
            load_state_dict(model, saved)

    run_ranks(run, 2)


def test_local_state_holds_whole_units() -> None:
    """Units of several modules are told by the first of them; parts of units are refused."""
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2), nn.Linear(2, 2))
    fc.fully_shard([model[1], model[0]])
    fc.fully_shard(model)
    with fc.state_dict_type(model, "local"):
        saved = copy.deepcopy(model.state_dict())
    assert set(saved) == set(state_dict(model, "local"))
    with torch.no_grad():
        model[0].weight.zero_()
    model.load_state_dict(saved)
    assert model[0].weight.any()
    for unit in ("Sequential", "0"):
        with pytest.raises(RuntimeError, match=f"'weight' lies in the shard of unit '{unit}'"):
            state_dict(model[2], "local")
        model[2].weight = model[1].weight
        fc.refresh(model)


@pytest.mark.parametrize("plain", [False, True])
def test_bad_keys_and_shapes_write_nothing(plain: bool) -> None:
    """Bad keys and shapes raise everywhere and write nothing."""

    def run(rank: int, change: str) -> None:
        model = shard_tied(TiedNet(1))
        before = state_dict(model)
        given = TiedNet(2).state_dict()
        if rank == 1:
            if change == "missing":
                given["blocks.0.weihgt"] = given.pop("blocks.0.weight")
            elif change == "shape":
                given["turned"] = given["turned"].t().contiguous()
            elif change == "type":
                given["scale"] = 3.0
            elif change == "complex":
                given["scale"] = given["scale"] + 1j
            elif change == "newer":  # which had the counter already
                del given["norm.num_batches_tracked"]
            elif change == "fewer":
                del given["kept"], given["blocks.0.bias"]
        try:
            model.load_state_dict(given) if plain else load_state_dict(model, given)
        finally:
            same(state_dict(model), before)

    for change, texts in {
        "missing": ["missing keys: 'blocks.0.weight' (closest: 'blocks.0.weihgt'", "unexpected"],
        "shape": ["'turned' has global shape (5, 3); wanted (3, 5)"],
        "type": ["'scale' is a float"],
        "complex": ["'scale' is torch.complex64; wanted torch.float32, which has no imaginary"],
        "newer": ["missing keys: 'norm.num_batches_tracked'"],
        "fewer": ["'blocks.0.bias'", "'kept'"],
    }.items():
        errors = rank_errors(run, 2, change)
        for error in errors:
            assert error is not None and error.startswith("RuntimeError"), errors
            assert all(text in error for text in texts), error
        assert "found on rank 1" in str(errors[0])


def test_not_strict_returns_what_it_left_out() -> None:
    def run(rank: int) -> None:
        model = shard_tied(TiedNet(1))
        given = TiedNet(2).state_dict()
        given["extra"] = torch.ones(2)
        bias = given.pop("blocks.1.bias")
        for load in (
            lambda: load_state_dict(model, given, strict=False),
            lambda: model.load_state_dict(given, strict=False),
        ):
            keys = load()
            assert keys.missing_keys == ["blocks.1.bias"]
            assert keys.unexpected_keys == ["extra"]
            assert str(keys) == str(model.load_state_dict(given, strict=False))
        full = state_dict(model)
        assert torch.equal(full["turned"], given["turned"])
        assert not torch.equal(full["blocks.1.bias"], bias)
        whole = load_state_dict(model, TiedNet(2).state_dict())
        assert str(whole) == "<All keys matched successfully>"

    run_ranks(run, 2)


def test_a_tied_weight_loads_from_any_of_its_names() -> None:
    def run(rank: int) -> None:
        for gone in ("head.weight", "emb.weight"):
            for units in ("root", "head"):
                model = shard_tied(TiedNet(1), units)
                given = TiedNet(2).state_dict()
                del given[gone]
                load_state_dict(model, given)
                same(state_dict(model), TiedNet(2).state_dict())
                model = shard_tied(TiedNet(1), units)
                model.load_state_dict(given)
                same(state_dict(model), TiedNet(2).state_dict())
                assert model.head.weight is model.emb.weight

    run_ranks(run, 2)


def test_names_are_the_modules_own_whatever_wraps_it() -> None:
    def run(rank: int) -> None:
        from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

        model = TiedNet(1)
        model.blocks[0] = checkpoint_wrapper(model.blocks[0])
        model.blocks[1] = torch.compile(model.blocks[1], backend="eager")
        fc.fully_shard(model.blocks[0])
        fc.fully_shard(model)
        want = TiedNet(2).state_dict()
        assert list(state_dict(model)) == list(want)
        assert list(state_dict(model, "sharded")) == list(want)
        load_state_dict(model, want)
        same(state_dict(model), want)
        assert "blocks.1._orig_mod.weight" in model.state_dict()
        for key in ("full", "sharded", "local"):
            with fc.checkpoint.state_dict_type(model, key):
                again = shardless(model.state_dict(), key)
            other = copy.deepcopy(model)
            load_state_dict(other, TiedNet(5).state_dict())
            other.load_state_dict(again)
            same(state_dict(other), want)
            load_state_dict(other, TiedNet(5).state_dict())
            load_state_dict(other, again)
            same(state_dict(other), want)

    def shardless(given: Any, kind: str) -> Any:
        return given if kind == "local" else dict(given)

    run_ranks(run, 2)


def test_broadcast_from_rank_0() -> None:
    """A rank keeps no more than its slices of what was sent."""

    def run(rank: int) -> None:
        from torch.distributed.device_mesh import init_device_mesh

        for mesh in (None, init_device_mesh("cpu", (2, 2))):
            model = shard_tied(TiedNet(1), mesh=mesh)
            given = TiedNet(2).state_dict() if rank == 0 else {}
            load_state_dict(model, given, broadcast_from_rank0=True)
            same(state_dict(model), TiedNet(2).state_dict())
            sent = broadcast_state(
                "load",
                given,
                groups_of(model),
                dict(model.named_parameters()).get,
                torch.device("cpu"),
            )
            slices = [to_local(value) for value in sent.values() if is_sharded(value)]
            assert slices and all(s.untyped_storage().nbytes() == s.nbytes for s in slices)
        with pytest.raises(RuntimeError, match="broadcast_from_rank0=True"):
            load_state_dict(model, given, strict=False)

    run_ranks(run, 4)


def test_state_dict_while_gathered_is_what_lasts() -> None:
    def run(rank: int) -> None:
        model = shard_tied(TiedNet())
        seen = []
        model.norm.register_forward_hook(
            lambda *_: seen.append((model.state_dict(), state_dict(model)))
        )
        model(torch.tensor([1, 2, 3]))
        plain, full = seen[0]
        norms = [k for k in full if k.startswith("norm.")]
        for key, value in TiedNet().state_dict().items():
            if key not in norms:
                assert torch.equal(full[key], value)
                if key != "kept":
                    assert torch.equal(plain[key].full_tensor(), value)

    run_ranks(run, 2)


def test_undo_takes_the_hooks_away() -> None:
    def run(rank: int) -> None:
        model = shard_tied(TiedNet())
        fc.undo(model)
        same(model.state_dict(), TiedNet().state_dict())
        assert all(type(v) is torch.Tensor for v in model.state_dict().values())
        for module in model.modules():
            assert not module._state_dict_hooks and not module._load_state_dict_pre_hooks

    run_ranks(run, 2)


def test_full_and_load_in_a_world_of_one() -> None:
    model = shard_tied(TiedNet(1))
    load_state_dict(model, TiedNet(2).state_dict())
    same(state_dict(model), TiedNet(2).state_dict())
    for key, value in model.state_dict().items():
        assert torch.equal(gather_whole(value), TiedNet(2).state_dict()[key])


def test_extra_state_and_custom_loading() -> None:
    class Odd(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w = nn.Parameter(torch.ones(3, 3))
            self.note = "new"

        def get_extra_state(self) -> dict[str, str]:
            return {"note": self.note}

        def set_extra_state(self, state: dict[str, str]) -> None:
            self.note = state["note"]

    def rename(module: Any, state: Any, prefix: str, *_: Any) -> None:
        if prefix + "old" in state:
            state[prefix + "w"] = state.pop(prefix + "old")

    def run(rank: int) -> None:
        model = fc.fully_shard(nn.Sequential(Odd()))
        model[0].note = "saved"
        full = state_dict(model)
        assert full["0._extra_state"] == {"note": "saved"}
        other = fc.fully_shard(nn.Sequential(Odd()))
        load_state_dict(other, full)
        assert other[0].note == "saved"
        other[0].register_load_state_dict_pre_hook(rename)
        legacy = {"0.old": torch.full((3, 3), 7.0), "0._extra_state": {"note": "x"}}
        load_state_dict(other, legacy)
        assert torch.equal(state_dict(other)["0.w"], legacy["0.old"])
        other.load_state_dict({**legacy, "0.old": torch.zeros(3, 3)})
        assert not state_dict(other)["0.w"].any()

    run_ranks(run, 2)


def test_peak_of_full_is_one_bucket() -> None:
    def run(rank: int) -> None:
        from torch.utils._python_dispatch import TorchDispatchMode

        model = nn.Sequential(*[nn.Linear(64, 64, bias=False) for _ in range(8)])
        for layer in model:
            fc.fully_shard(layer)
        fc.fully_shard(model)
        live: dict[int, Any] = {}
        shards = {p.to_local().untyped_storage()._cdata for p in model.parameters()}
        peak = 0

        class Ledger(TorchDispatchMode):
            def __torch_dispatch__(
                self, func: Any, types: Any, args: Any = (), kwargs: Any = None
            ) -> Any:
                import weakref

                nonlocal peak
                out = func(*args, **(kwargs or {}))
                for t in [out] if isinstance(out, torch.Tensor) else []:
                    storage = t.untyped_storage()
                    if storage._cdata not in live and storage._cdata not in shards:
                        live[storage._cdata] = (weakref.ref(t), storage.nbytes())
                alive = {k: v for k, v in live.items() if v[0]() is not None}
                live.clear()
                live.update(alive)
                peak = max(peak, sum(n for _, n in alive.values()))
                return out

        with Ledger():
            got = state_dict(model, "full", rank0_only=True)
        bucket = 64 * 64 * 4
        assert peak <= (9 if rank == 0 else 1) * bucket + 4096, peak / bucket
        assert len(got) == (8 if rank == 0 else 0)

    run_ranks(run, 2)


def test_ignored_parameters_and_cast_buffers_are_saved() -> None:
    """Ignored parameters and cast buffers are where a plain module has them."""

    def run(rank: int) -> None:
        def build(seed: int) -> nn.Module:
            model = TiedNet(seed)
            return fc.fully_shard(
                model,
                ignored=[model.turned, model.blocks[1]],
                mp_policy=fc.MixedPrecision(buffer_dtype=torch.bfloat16),
            )

        model = build(1)
        assert model.kept.dtype is torch.bfloat16
        load_state_dict(model, TiedNet(2).state_dict())
        full = state_dict(model)
        want = TiedNet(2).state_dict()
        assert list(full) == list(want)
        for key, value in want.items():
            assert full[key].dtype == value.dtype
            half = key == "kept" or "running" in key
            assert torch.equal(full[key], value.bfloat16().float() if half else value)
        assert type(model.state_dict()["turned"]) is torch.Tensor
        elsewhere = build(3)
        elsewhere.load_state_dict(model.state_dict())
        same(state_dict(elsewhere), full)

    run_ranks(run, 2)


def test_names_below_a_wrapper_are_the_plain_ones() -> None:
    """Below nn.DataParallel no name has `module.` in it, in any kind of state."""
    inner = nn.Linear(3, 2)
    model = nn.Sequential(nn.DataParallel(inner), nn.Linear(2, 2))
    fc.fully_shard(inner)
    fc.fully_shard(model)
    optim = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    model(torch.ones(1, 3)).sum().backward()
    optim.step()
    for kind in ("full", "sharded", "local"):
        saved = state_dict(model, kind)
        assert not [name for name in saved if "module" in name]
        load_state_dict(model, saved)
    found = fc.optim_state_dict(model, optim)
    assert set(found["state"]) == set(state_dict(model))
    as_torch_names = {n.replace("0.", "0.module."): v for n, v in found["state"].items()}
    fc.load_optim_state_dict(model, optim, {**found, "state": as_torch_names})
    assert not [
        name for unit in fc.plan(model).buckets for name in unit.parameters if "mod" in name
    ]


@pytest.mark.parametrize("directly", [True, False])
def test_ranks_given_other_files_raise(directly: bool) -> None:
    """Each rank cuts its slices out of its own file: from two files, one model was stitched."""

    def ranks(rank: int) -> None:
        model = by_block(seeded(lambda: Tower(1)))
        given = seeded(lambda: Tower(1)).state_dict()
        given["first.weight"].flatten()[-1].add_(rank)  # long before which they are alike
        before = whole(model.first.weight)
        try:
            model.load_state_dict(given) if directly else load_state_dict(model, given)
        finally:
            assert torch.equal(whole(model.first.weight), before)

    errors = rank_errors(ranks, 2)
    assert errors[0] == errors[1] and errors[0] is not None, errors
    assert "rank 1" in errors[0] and "checksum" in errors[0] and "Pass the same" in errors[0]
