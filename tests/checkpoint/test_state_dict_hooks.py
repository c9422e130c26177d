"""Hooks of the user's on saving and loading do what they do in the plain module."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fsdp_compose as fc
from fsdp_compose import wrap
from fsdp_compose.sharded import is_sharded

from harness import simulate_ranks
from models import seeded, whole

Hook = Callable[..., None]


def each(function: Callable[[Tensor], Tensor]) -> Hook:
    """A state-dict hook that replaces every value of its module."""

    def hook(module: nn.Module, state: dict[str, Any], prefix: str, metadata: Any) -> None:
        for key in [key for key in state if key.startswith(prefix)]:
            state[key] = function(state[key])

    return hook


def delete(module: nn.Module, state: dict[str, Any], prefix: str, metadata: Any) -> None:
    del state[prefix + "bias"]


def add(module: nn.Module, state: dict[str, Any], prefix: str, metadata: Any) -> None:
    state[prefix + "more"] = torch.ones(2)


def alias(module: nn.Module, state: dict[str, Any], prefix: str, metadata: Any) -> None:
    state[prefix + "alias"] = state[prefix + "weight"]


def rename(module: nn.Module, state: dict[str, Any], prefix: str, metadata: Any) -> None:
    state[prefix + "old"] = state.pop(prefix + "weight")


POST: dict[str, Hook] = {
    "clone": each(Tensor.clone),
    "half": each(Tensor.half),
    "twice": each(lambda value: value * 2),
    "delete": delete,
    "add": add,
    "alias": alias,
    "rename": rename,
}


class Two(nn.Module):
    """A linear layer with hooks, and one without."""

    def __init__(self, post: Hook | None = None, pre: Hook | None = None) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 6), nn.Linear(6, 2)
        if post is not None:
            self.first.register_state_dict_post_hook(post)
        if pre is not None:
            self.first.register_load_state_dict_pre_hook(pre)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.first(x))


def shard(model: nn.Module, units: bool) -> nn.Module:
    return fc.fully_shard(model, units=wrap.by_class({nn.Linear}) if units else None)


def values_of(model: nn.Module) -> list[Tensor]:
    return [whole(p).detach().clone() for p in model.parameters()]


def assert_same(found: Any, wanted: Any) -> None:
    torch.testing.assert_close(found, wanted, rtol=0, atol=0)


@pytest.mark.parametrize("units", [True, False])
@pytest.mark.parametrize("name", list(POST))
def test_full_state_dicts_are_the_plain_modules(name: str, units: bool, tmp_path: Path) -> None:
    """Through ``state_dict``, ``state_dict_type`` and files: what hooks replaced and renamed."""

    def body(rank: int) -> None:
        wanted = seeded(lambda: Two(POST[name])).state_dict()
        model = shard(seeded(lambda: Two(POST[name])), units)
        assert_same(dict(fc.state_dict(model)), dict(wanted))
        with fc.state_dict_type(model, "full"):
            found = model.state_dict()
        assert {type(value) for value in found.values()} == {Tensor}
        assert_same(dict(found), dict(wanted))
        fc.save_full(tmp_path / "full", model)
        again = shard(seeded(Two, 1), units)
        fc.load_full(tmp_path / "full", again, strict=False)
        if name == "twice":
            assert_same(whole(again.first.weight).detach(), wanted["first.weight"])

    simulate_ranks(body)


@pytest.mark.parametrize("units", [True, False])
@pytest.mark.parametrize("name", list(POST))
def test_loading_writes_the_parameters(name: str, units: bool) -> None:
    """Local shards and plain weights, copied or assigned, whatever hooks make of a state dict."""

    def body(rank: int) -> None:
        model = shard(seeded(lambda: Two(POST[name])), units)
        kept, before = values_of(model), list(model.parameters())
        saved = copy.deepcopy(fc.state_dict(model, "local"))
        other = seeded(Two, 1)
        model.load_state_dict(other.state_dict())
        assert_same(values_of(model), values_of(other))
        fc.load_state_dict(model, saved, strict=name != "add")
        assert_same(values_of(model), kept)
        model.load_state_dict(other.state_dict(), assign=True)
        assert_same(values_of(model), values_of(other))
        with fc.state_dict_type(model, "local"):
            saved = copy.deepcopy(model.state_dict())
        fc.load_state_dict(model, seeded(Two, 2).state_dict())
        model.load_state_dict(saved, strict=name != "add")
        assert_same(values_of(model), values_of(other))
        assert [id(p) for p in model.parameters()] == [id(p) for p in before]
        model(torch.ones(1, 4, dtype=torch.float64)).sum().backward()

    simulate_ranks(body)


def transpose(module: nn.Module, state: dict[str, Any], prefix: str, *_: Any) -> None:
    state[prefix + "weight"] = state[prefix + "weight"].t()


def fuse(module: nn.Module, state: dict[str, Any], prefix: str, *_: Any) -> None:
    both = state.pop(prefix + "both")
    state[prefix + "weight"], state[prefix + "bias"] = both[:24].view(6, 4), both[24:]


def first_row(module: nn.Module, state: dict[str, Any], prefix: str, *_: Any) -> None:
    """Takes a run of the weight for the bias, which is cut otherwise."""
    state[prefix + "bias"] = state[prefix + "weight"].view(-1)[:6]


def turned(module: nn.Module, state: dict[str, Any], prefix: str, *_: Any) -> None:
    """Reads the whole of a value that fits."""
    state[prefix + "weight"] = state[prefix + "weight"].flip(0).cumsum(1)


class Turned(nn.Linear):
    """Reads its weight transposed."""

    def _load_from_state_dict(self, state: Any, prefix: str, *more: Any) -> None:
        transpose(self, state, prefix)
        super()._load_from_state_dict(state, prefix, *more)


class OwnLoading(Two):
    def __init__(self) -> None:
        super().__init__()
        self.first = Turned(4, 6)


class Forgiving(Two):
    """Reports nothing as missing or unexpected."""

    def __init__(self) -> None:
        super().__init__()
        self.register_load_state_dict_post_hook(forgive)


def forgive(module: nn.Module, keys: Any) -> None:
    keys.missing_keys.clear()
    keys.unexpected_keys.clear()


def given_to(case: str) -> dict[str, Tensor]:
    state = dict(seeded(Two, 1).state_dict())
    if case in ("transpose", "override"):
        state["first.weight"] = state["first.weight"].t().contiguous()
    elif case == "fuse":
        parts = state.pop("first.weight").reshape(-1), state.pop("first.bias")
        state["first.both"] = torch.cat(parts)
    elif case == "forgive":
        del state["first.weight"], state["first.bias"]
        state["other"] = torch.ones(1)
    return state


LOADS: dict[str, Callable[[], nn.Module]] = {
    "transpose": lambda: Two(pre=transpose),
    "fuse": lambda: Two(pre=fuse),
    "whole": lambda: Two(pre=turned),
    "row": lambda: Two(pre=first_row),
    "override": OwnLoading,
    "forgive": Forgiving,
}


@pytest.mark.parametrize("assign", [True, False, None], ids=["assign", "copy", "ours"])
@pytest.mark.parametrize("units", [True, False])
@pytest.mark.parametrize("case", list(LOADS))
def test_load_hooks_do_what_they_do_in_torch(case: str, units: bool, assign: bool | None) -> None:
    """Hooks that reshape, fuse, read whole values or clear the missing keys; same objects stay."""

    def body(rank: int) -> None:
        plain = seeded(LOADS[case])
        plain.load_state_dict(given_to(case))
        model = shard(seeded(LOADS[case]), units)
        before = [id(p) for p in model.parameters()]
        if assign is None:
            fc.load_state_dict(model, given_to(case))
        else:
            model.load_state_dict(given_to(case), assign=assign)
        assert_same(values_of(model), values_of(plain))
        assert [id(p) for p in model.parameters()] == before
        model(torch.ones(1, 4, dtype=torch.float64)).sum().backward()

    simulate_ranks(body)


def note_and_load(model: nn.Module, given: list[Tensor], state: Any, **more: Any) -> Any:
    given += state.values()
    return nn.Module.load_state_dict(model, state, **more)


@pytest.mark.parametrize("case", ["whole", "row"])
@pytest.mark.parametrize("units", [True, False])
def test_load_hooks_read_whole_tensors_of_files(units: bool, case: str, tmp_path: Path) -> None:
    """Where they read slices in vain, and those of the other layer stay slices."""

    def body(rank: int) -> None:
        plain, other = seeded(LOADS[case]), shard(seeded(Two, 1), units)
        plain.load_state_dict(seeded(Two, 1).state_dict())
        fc.save_full(tmp_path / "full", other)
        fc.save_checkpoint(tmp_path / "dcp", other)
        for name, load in {"full": fc.load_full, "dcp": fc.load_checkpoint}.items():
            given: list[Tensor] = []
            model = shard(seeded(LOADS[case]), units)
            model.load_state_dict = partial(note_and_load, model, given)  # type: ignore[assignment]
            load(tmp_path / name, model)
            assert_same(values_of(model), values_of(plain))
            assert [is_sharded(value) for value in given] == [True] * 4 + [False, False, True, True]
            model, given = shard(seeded(lambda: Two(pre=halve)), units), []
            model.load_state_dict = partial(note_and_load, model, given)  # type: ignore[assignment]
            load(tmp_path / name, model)
            assert_same(values_of(model)[0], values_of(other)[0] / 2)
            assert [is_sharded(value) for value in given] == [True] * 4

    simulate_ranks(body)


class Converting(nn.Linear):
    """Its weight was stored upside down before version 2."""

    _version = 2

    def _load_from_state_dict(self, state: Any, prefix: str, meta: Any, *more: Any) -> None:
        if meta.get("version", 1) < 2:
            state[prefix + "weight"] = state[prefix + "weight"].flip(0)
        super()._load_from_state_dict(state, prefix, meta, *more)


def test_checkpoints_keep_the_versions_of_modules(tmp_path: Path) -> None:
    """A hook converts what an older class saved, once; models without hooks save no versions."""

    def build() -> nn.Module:
        return shard(nn.Sequential(nn.Linear(4, 4), Converting(4, 4)), True)

    def body(rank: int) -> None:
        model, other = seeded(build), seeded(build, 1)
        fc.save_checkpoint(tmp_path / "own", model)
        fc.load_checkpoint(tmp_path / "own", other)
        assert_same(values_of(other), values_of(model))
        older = seeded(lambda: shard(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), True))
        fc.save_checkpoint(tmp_path / "older", older)
        fc.load_checkpoint(tmp_path / "older", other)
        assert_same(values_of(other)[2], values_of(older)[2].flip(0))

    simulate_ranks(body)


def test_what_a_load_hook_leaves_wrong_is_torchs() -> None:
    """A shape that no hook put right is torch's error on every rank."""

    def body(rank: int) -> None:
        model = shard(seeded(lambda: Two(pre=turned)), True)
        given = {**seeded(Two, 1).state_dict(), "second.weight": torch.ones(3, 6)}
        with pytest.raises(RuntimeError, match=r"size mismatch for second.weight"):
            model.load_state_dict(given)

    simulate_ranks(body)


def halve(module: nn.Module, state: dict[str, Any], prefix: str, *_: Any) -> None:
    state[prefix + "weight"] = state[prefix + "weight"] / 2


@pytest.mark.parametrize("ours", [True, False])
@pytest.mark.parametrize("units", [True, False])
def test_local_shards_pass_by_load_hooks(units: bool, ours: bool) -> None:
    """Hooks on saving have not changed them; the next state dict goes through both again."""

    def body(rank: int) -> None:
        model = shard(seeded(lambda: Two(POST["twice"], halve)), units)
        other = shard(seeded(lambda: Two(POST["twice"], halve), 1), units)
        if ours:
            fc.load_state_dict(other, fc.state_dict(model, "local"))
        else:
            with fc.state_dict_type(model, "local"):
                saved = model.state_dict()
            other.load_state_dict(saved)
        assert_same(values_of(other), values_of(model))
        other.load_state_dict(fc.state_dict(model))
        assert_same(values_of(other)[0], values_of(model)[0])
        assert_same(values_of(other)[1], values_of(model)[1] * 2)  # nothing halves a bias
        if not ours:  # what a failed load has left is not written by the next
            whole, failing = fc.state_dict(other), {"fails": True}

            def fail(*_: Any) -> None:
                if failing.pop("fails", False):
                    raise ValueError("a hook of the user's")

            other.register_load_state_dict_pre_hook(fail)
            with pytest.raises(ValueError, match="of the user's"):
                other.load_state_dict(saved)
            other.load_state_dict(whole)
            assert_same(values_of(other)[1], whole[next(k for k in whole if "bias" in k)])

    simulate_ranks(body)
