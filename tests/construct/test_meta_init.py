"""A model on the meta device gets its weights by an initialiser, a load or rank 0."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from fsdp_compose import (
    fully_shard,
    gathered,
    iter_full,
    load_state_dict,
    refresh,
    save_checkpoint,
    save_full,
    seeded_init,
    set_state_dict_type,
    state_dict,
    wrap,
)

from buffered import equal, full, on_meta, unlike
from harness import rank_errors, run_ranks
from models import (
    EVERY_SHARD,
    WIDTH,
    Block,
    Ledger,
    Tower,
    by_block,
    data,
    whole,
)

pytestmark = pytest.mark.filterwarnings("error")


@pytest.mark.parametrize("shard", list(EVERY_SHARD))
@pytest.mark.parametrize("world", [1, 2, 3])
def test_reset_parameters_initialises_from_meta(shard: str, world: int) -> None:
    """``reset_parameters`` initialises a model from meta."""

    def ranks(rank: int) -> Any:
        model = on_meta(lambda: nn.Sequential(Block(), nn.BatchNorm1d(WIDTH), Block()))
        before = list(model.parameters())
        optim = torch.optim.AdamW(model.parameters(), lr=0.01)
        torch.manual_seed(0)
        EVERY_SHARD[shard](model)
        assert all(a is b for a, b in zip(model.parameters(), before, strict=True))
        assert not any(t.is_meta for t in (*model.parameters(), *model.buffers()))
        start = full(model)
        model(data(0, rank).float()).square().mean().backward()
        optim.step()
        assert all(not torch.equal(v, start[n]) for n, v in full(model).items() if "." in n)
        return start

    first, *others = run_ranks(ranks, world)
    for other in others:
        equal(other, first)
    assert first["0.norm.weight"].eq(1).all() and first["1.running_var"].eq(1).all()
    assert 0 < first["0.up.weight"].abs().max() <= WIDTH**-0.5
    assert all(v.isfinite().all() for v in first.values())


def test_one_unit_initialises_as_the_plain_model() -> None:
    """One unit equals the plain model initialised in the same order."""

    def ranks(rank: int) -> None:
        model = on_meta(lambda: Tower(2))
        torch.manual_seed(5)
        fully_shard(model)
        plain = Tower(2)
        torch.manual_seed(5)
        plain.apply(lambda m: m.reset_parameters() if isinstance(m, nn.Linear) else None)
        found, wanted = full(model), full(plain)
        equal(
            {n: found[n] for n in wanted if "norm" not in n},
            {n: v for n, v in wanted.items() if "norm" not in n},
        )

    run_ranks(ranks, 2)


class Rotary(nn.Module):
    """A cache that is not in the state dict, made where it is asked to be."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.empty(WIDTH))
        self.register_buffer("cache", torch.empty(WIDTH), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        return x * self.scale * self.cache


class Filled(Rotary):
    def reset_parameters(self) -> None:
        nn.init.ones_(self.scale)
        self.cache.copy_(torch.arange(WIDTH))


@pytest.mark.parametrize("how", ["fill", "data", "replace", "to_empty"])
def test_param_init_fn_may_write_in_any_way(how: str) -> None:
    seen: list[str] = []

    def fill(module: nn.Module) -> None:
        seen.append(type(module).__name__)
        if how == "to_empty":
            module.to_empty(device="cpu", recurse=False)
        for name, param in list(module.named_parameters(recurse=False)):
            if how == "data":
                param.data.fill_(3)
            elif how == "replace":
                setattr(module, name, nn.Parameter(torch.full_like(param, 3)))
            else:
                param.fill_(3)
        for buffer in module.buffers(recurse=False):
            buffer.fill_(2)

    def ranks(rank: int) -> None:
        model = on_meta(lambda: nn.Sequential(Tower(1), Rotary()))
        before = list(model.parameters())
        by_block(model, param_init_fn=fill)
        assert all(a is b for a, b in zip(model.parameters(), before, strict=True))
        assert all(whole(p).eq(3).all() for p in model.parameters())
        assert model[1].cache.eq(2).all()
        assert sorted(seen) == ["LayerNorm", *["Linear"] * 4, "Rotary"]

    run_ranks(ranks, 2)


def test_a_buffer_that_nothing_fills_is_refused() -> None:
    """A buffer that nothing fills is refused on every rank."""

    def ranks(rank: int, kind: type[nn.Module]) -> None:
        fully_shard(on_meta(lambda: nn.Sequential(kind())))

    assert run_ranks(ranks, 2, Filled) == [None, None]
    for text in rank_errors(ranks, 2, Rotary):
        assert text is not None
        assert "ValueError: fully_shard: buffer '0.cache' of unit 'Sequential'" in text
        assert "param_init_fn(module)" in text


def test_an_initialiser_that_fails_raises_on_all_ranks() -> None:
    def ranks(rank: int, mode: str) -> None:
        def fail(module: nn.Module) -> None:
            if rank == 1 and isinstance(module, nn.LayerNorm):
                raise OSError("no such file")
            module.reset_parameters()

        by_block(on_meta(lambda: Tower(2)), param_init_fn=fail, init=mode)

    for mode in ("verify", "broadcast", "as_is"):
        texts = rank_errors(ranks, 2, mode)
        assert texts[1] == "OSError: no such file"
        assert texts[0] == "RuntimeError: OSError: no such file (found on rank 1)"


class Table(nn.Module):
    """Whole numbers, among which no NaN tells what nobody wrote."""

    def __init__(self) -> None:
        super().__init__()
        self.codes = nn.Parameter(torch.empty(3, WIDTH, dtype=torch.int8), requires_grad=False)
        self.register_buffer("shift", torch.empty(3, dtype=torch.long))

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.codes.to(x.dtype).t() + self.shift


def write(module: nn.Module, value: int) -> None:
    for tensor in (*module.parameters(recurse=False), *module.buffers(recurse=False)):
        tensor.fill_(value)


@pytest.mark.parametrize("how", ["fully_shard", "refresh"])
@pytest.mark.parametrize("fails", [True, False])
def test_a_failed_initialisation_leaves_all_unset(how: str, fails: bool, tmp_path: Path) -> None:
    """All raise, and then whatever reads or saves the model does, until it is loaded."""

    def init(module: nn.Module) -> None:
        write(module, dist.get_rank() + 1)
        if fails and dist.get_rank() == 1:
            raise OSError("no such file")

    def ranks(rank: int) -> None:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(WIDTH, WIDTH))
        if how == "refresh":
            fully_shard(model)
        model.append(on_meta(lambda: nn.Sequential(nn.Linear(WIDTH, WIDTH), Table())))
        problem = "no such file" if fails else "differs between rank 0 and rank 1"
        with pytest.raises((OSError, RuntimeError, ValueError), match=problem):
            (fully_shard if how == "fully_shard" else refresh)(model, param_init_fn=init)
        names = r"'1\.0\.weight'.*'1\.1\.codes'.*'1\.1\.shift'.* came from the meta device"
        x = data(0, rank).float()
        reads: list[Callable[[], Any]] = [
            lambda: model(x),
            lambda: state_dict(model),
            lambda: list(iter_full(model)),
            lambda: save_checkpoint(tmp_path / "sharded", model),
            lambda: save_full(tmp_path / "full", model),
        ]
        for read in reads:
            with pytest.raises(RuntimeError, match=names):
                read()
        set_state_dict_type(model, "full")
        with pytest.raises(RuntimeError, match=names):
            model.state_dict()
        assert not (tmp_path / "full").exists()
        written = {"1.1.shift": torch.ones(3, dtype=torch.long)}
        written |= {n: torch.ones(p.shape, dtype=p.dtype) for n, p in model.named_parameters()}
        load_state_dict(model, written)
        equal(state_dict(model), {name: written[name] for name in model.state_dict()})
        model(x).square().mean().backward()

    run_ranks(ranks, 2)


def test_initialisers_that_differ_between_ranks() -> None:
    """Initialisers that differ between ranks are refused or broadcast."""

    def ranks(rank: int, mode: str) -> None:
        torch.manual_seed(rank)
        model = by_block(on_meta(lambda: Tower(1)), init=mode)
        torch.manual_seed(0)
        equal(full(model), full(by_block(on_meta(lambda: Tower(1)))))

    run_ranks(ranks, 2, "broadcast")
    for text in rank_errors(ranks, 2, "verify"):
        assert text is not None
        assert "parameter 'blocks.0.up.weight' of unit 'blocks.0' differs between rank" in text


@pytest.mark.parametrize("empty", [False, True])
def test_the_weights_may_be_on_rank_0_only(empty: bool) -> None:
    """The classic way to load: rank 0 has the model, the others have none, broadcast."""

    def ranks(rank: int) -> None:
        fill = (lambda m: m.to_empty(device="cpu", recurse=False)) if empty else (lambda m: None)
        model = unlike(7, lambda: nn.Sequential(Filled(), Tower(1)))
        if rank == 0:
            model[0].reset_parameters()
        else:
            model = on_meta(lambda: nn.Sequential(Filled(), Tower(1)))
            model[0].cache = torch.zeros(WIDTH)
        by_block(model, init="broadcast", param_init_fn=fill)
        wanted = unlike(7, lambda: nn.Sequential(Filled(), Tower(1)))
        wanted[0].reset_parameters()
        equal(full(model), full(wanted))
        model(data(0, rank).float())

    run_ranks(ranks, 3)


class Bare(nn.Module):
    """Parameters and a buffer that nothing initialises."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH)
        self.scale = nn.Parameter(torch.ones(WIDTH))
        self.shift = nn.Parameter(torch.zeros(1))
        self.register_buffer("mean", torch.zeros(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x) * self.scale + self.shift + self.mean


def load_copy(model: nn.Module, wanted: dict[str, Tensor]) -> None:
    with torch.no_grad():
        for name, tensor in (*model.named_parameters(), *model.named_buffers()):
            tensor.copy_(wanted[name])


@torch.no_grad()
def load_local(model: nn.Module, wanted: dict[str, Tensor]) -> None:
    """As a checkpoint reader does: into the slices, and only where there is something."""
    for name, param in model.named_parameters():
        spec = param._shard_spec
        if spec.stop > spec.start:
            param.to_local().copy_(wanted[name].reshape(-1)[spec.start : spec.stop])
    for name, buffer in model.named_buffers():
        buffer.copy_(wanted[name])


def load_data(model: nn.Module, wanted: dict[str, Tensor]) -> None:
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        tensor.data = wanted[name].clone()


def load_dict(model: nn.Module, wanted: dict[str, Tensor], assign: bool = False) -> None:
    model.load_state_dict(wanted, assign=assign)


def load_assign(model: nn.Module, wanted: dict[str, Tensor]) -> None:
    load_dict(model, wanted, True)


LOADERS = [load_copy, load_local, load_data, load_dict, load_assign]


@pytest.mark.parametrize("loader", LOADERS, ids=lambda f: f.__name__)
@pytest.mark.parametrize("world", [1, 2, 4])
def test_build_on_meta_then_shard_then_load(loader: Callable[..., None], world: int) -> None:
    def ranks(rank: int) -> None:
        wanted = {n: t.detach().clone() for n, t in full(unlike(3, Bare)).items()}
        model = on_meta(Bare)
        optim = torch.optim.SGD(model.parameters(), lr=0.5)
        by = wrap.by_class({nn.Linear})
        fully_shard(model, units=by, param_init_fn=lambda m: None)
        x = data(0, rank).float()
        with pytest.raises(RuntimeError) as caught:
            model(x)
        text = str(caught.value)
        assert "'scale'" in text and "'shift'" in text and "buffer 'mean'" in text
        assert "load_state_dict" in text and "param_init_fn" in text
        loader(model, wanted)
        equal(full(model), wanted)
        model(x).sum().backward()
        optim.step()
        changed = full(model)
        assert all(not torch.equal(changed[n], v) for n, v in wanted.items() if n != "mean")

    run_ranks(ranks, world)


class Barer(Bare):
    def __init__(self) -> None:
        super().__init__()
        self.more = nn.ParameterList(torch.ones(2) for _ in range(4))


@pytest.mark.parametrize(
    ("build", "names"),
    [(Bare, ["shift"]), (Barer, ["shift", *(f"more.{i}" for i in range(4))])],
)
def test_what_was_not_loaded_is_named_on_every_rank(build: type[Bare], names: list[str]) -> None:
    """By rank, and in one order in every process, whatever the order of its sets."""

    def ranks(rank: int) -> None:
        model = on_meta(build)
        fully_shard(model)
        wanted = full(unlike(3, Bare))
        del wanted["shift"]  # one element, which only the last rank holds
        model.load_state_dict(wanted, strict=False)
        model(data(0, rank).float())

    listed = ", ".join(f"parameter {name!r}" for name in names)
    for text in rank_errors(ranks, 3):
        assert text is not None
        assert f"RuntimeError: unit {build.__name__!r}: {listed} came from the meta" in text


def test_reset_parameters_leaves_real_weights() -> None:
    """A model that is on meta in part: what is real keeps its value."""

    def ranks(rank: int) -> None:
        model = unlike(2, lambda: nn.Linear(3, 4))
        weight = model.weight.detach().clone()
        model.bias = nn.Parameter(torch.empty(4, device="meta"))
        fully_shard(model)
        assert torch.equal(whole(model.weight), weight)
        assert whole(model.bias).isfinite().all()

    run_ranks(ranks, 2)


class Gated(nn.Module):
    """``reset_parameters`` resets the layer inside, too."""

    def __init__(self) -> None:
        super().__init__()
        self.lin = nn.Linear(WIDTH, WIDTH)
        self.gate = nn.Parameter(torch.zeros(WIDTH))

    def reset_parameters(self) -> None:
        nn.init.ones_(self.gate)
        self.lin.reset_parameters()


def test_loaded_weights_are_not_initialised_again() -> None:
    """A module on meta would reset a layer inside it that was loaded: an error on every rank."""

    def ranks(rank: int) -> None:
        for inner, name in (
            (nn.Linear(WIDTH, WIDTH), "weight"),
            (nn.BatchNorm1d(WIDTH, affine=False), "running_mean"),
        ):
            model = on_meta(Gated)
            model.lin = inner
            with pytest.raises(ValueError, match=rf"wrote 'lin\.{name}' inside it too"):
                fully_shard(model)
        model = on_meta(Gated)  # where the layer is on meta, resetting it twice is harmless
        fully_shard(model, units=wrap.by_class(nn.Linear))
        assert torch.equal(whole(model.gate), torch.ones(WIDTH))

    run_ranks(ranks, 2)


class Magnitude(nn.Module):
    """An adapter whose first values follow from a loaded weight and buffer, as DoRA's do."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.arange(12.0).view(3, 4), requires_grad=False)
        self.register_buffer("scale", torch.tensor([1.0, 2.0, 3.0]))
        with torch.device("meta"):
            self.magnitude = nn.Parameter(torch.empty(3))

    def reset_parameters(self) -> None:
        with torch.no_grad():
            self.magnitude.copy_(self.weight.norm(dim=1) * self.scale)
            self.weight.zero_()


@pytest.mark.parametrize("how", ["reset", "param_init_fn", "seeded", "broadcast"])
def test_initialisation_reads_what_is_real(how: str) -> None:
    """What it writes into that goes nowhere."""

    def ranks(rank: int) -> None:
        plain = Magnitude()
        wanted = plain.weight.norm(dim=1) * plain.scale
        model = nn.Sequential(Magnitude())
        fill = {"param_init_fn": lambda m: m.reset_parameters(), "seeded": seeded_init(model, 0)}
        init = "broadcast" if how == "broadcast" else "verify"
        fully_shard(model, units=wrap.by_class(Magnitude), param_init_fn=fill.get(how), init=init)
        assert torch.equal(whole(model[0].magnitude), wanted)
        assert torch.equal(whole(model[0].weight), plain.weight)

    run_ranks(ranks, 2)


class Flags(nn.Module):
    """Values that may be the marks of unwritten memory themselves, or False."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH)
        self.zero_points = nn.Parameter(torch.tensor([255, 7, 255]).byte(), requires_grad=False)
        self.keep = nn.Parameter(torch.zeros(3, dtype=torch.bool), requires_grad=False)
        self.register_buffer("is_ready", torch.tensor(False))
        self.register_buffer("best_loss", torch.tensor(float("nan")))

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x) * (self.zero_points.sum() + self.keep.sum())


FLAGS = ["zero_points", "keep", "is_ready", "best_loss"]


def by_gathered(model: nn.Module, state: dict[str, Tensor]) -> None:
    with gathered(model, writeback=True), torch.no_grad():
        for name, tensor in (*model.named_parameters(), *model.named_buffers()):
            tensor.copy_(state[name])


@pytest.mark.parametrize(
    "load",
    [nn.Module.load_state_dict, partial(nn.Module.load_state_dict, assign=True), by_gathered,
     load_state_dict],
)  # fmt: skip
def test_loaded_values_may_be_those_of_a_mark(load: Callable[..., Any]) -> None:
    """Masks of False, integers at their end and NaN, on a copy of the model and converted too."""

    def ranks(rank: int) -> None:
        wanted = full(unlike(3, Flags))
        model = on_meta(Flags)
        fully_shard(model)
        twin = copy.deepcopy(model)
        for each in (model, twin):
            load(each, wanted)
            each(data(0, rank).float())
        model.double()(data(0, rank))
        equal({k: v for k, v in full(twin).items() if k != "best_loss"},
              {k: v for k, v in wanted.items() if k != "best_loss"})  # fmt: skip

    run_ranks(ranks, 2)


@pytest.mark.parametrize("name", FLAGS)
@pytest.mark.parametrize("convert", [False, True])
def test_flags_that_were_not_loaded_are_named(name: str, convert: bool) -> None:
    def ranks(rank: int) -> None:
        model = on_meta(Flags)
        fully_shard(model)
        wanted = full(unlike(3, Flags))
        twin = copy.deepcopy(model)
        if convert:  # after which NaN in a buffer tells nothing else
            wanted["best_loss"] = torch.tensor(1.0)
            model.double()
        del wanted[name]
        for each in (model, twin):
            each.load_state_dict(wanted, strict=False)
            with pytest.raises(RuntimeError, match=f"'{name}' came from the meta device"):
                each(data(0, rank).to(each.inner.weight.dtype))

    run_ranks(ranks, 2)


def test_a_mask_outside_the_state_dict_is_refused() -> None:
    def ranks(rank: int, fill: Any) -> None:
        model = on_meta(Flags)
        model.register_buffer("mask", torch.ones(3, dtype=torch.bool, device="meta"), False)
        fully_shard(model, param_init_fn=fill)

    def fill(module: nn.Module) -> None:
        if isinstance(module, Flags):
            module.mask.fill_(False)

    run_ranks(ranks, 2, fill)
    for text in rank_errors(ranks, 2, None):
        assert text is not None and "buffer 'mask' of unit 'Flags' was on the meta device" in text


def test_rank_0_brings_what_no_state_dict_has() -> None:
    """A buffer outside the state dict, where only rank 0 is not on the meta device."""

    def ranks(rank: int) -> None:
        def build() -> nn.Module:
            model = nn.Linear(WIDTH, WIDTH)
            model.register_buffer("frequency", torch.arange(4.0), persistent=False)
            model.register_buffer("mask", torch.arange(4) > 7, persistent=False)
            return model

        model = build() if rank == 0 else on_meta(build)
        fully_shard(model, init="broadcast")
        assert torch.equal(model.frequency, torch.arange(4.0)) and not model.mask.any()
        model(data(0, rank).float())
        with pytest.raises(ValueError, match=r"buffer '(mask|frequency)' .* nothing has filled it"):
            fully_shard(on_meta(build), init="broadcast")

    run_ranks(ranks, 2)


def test_recurrent_modules_and_hooks_survive() -> None:
    """Recurrent modules hooks and attributes survive."""

    def ranks(rank: int) -> None:
        model = on_meta(lambda: nn.LSTM(WIDTH, 5))
        param = model.weight_hh_l0
        param.tag, calls = "recurrent", []
        param.register_hook(lambda g: calls.append("grad"))
        param.register_post_accumulate_grad_hook(lambda p: calls.append("done"))
        torch.manual_seed(0)
        fully_shard(model)
        torch.manual_seed(0)
        plain = nn.LSTM(WIDTH, 5)
        equal(full(model), full(plain))
        assert model.weight_hh_l0 is param and param.tag == "recurrent"
        model(data(0, rank).float())[0].sum().backward()
        assert calls == ["grad", "done"]

    run_ranks(ranks, 2)


def test_peak_memory_is_one_unit_and_the_shards() -> None:
    width, depth, world = 64, 6, 4

    def ranks(rank: int) -> None:
        model = on_meta(lambda: nn.Sequential(*[nn.Linear(width, width) for _ in range(depth)]))
        unit = 4 * (width * width + width)
        shards = depth * unit / world
        with Ledger(*model.parameters()) as ledger:
            fully_shard(model, units=wrap.by_class({nn.Linear}), init="as_is")
        assert ledger.live() <= shards * 1.02 + 4096
        assert unit <= ledger.peak <= unit + shards * 1.02 + 4096

    run_ranks(ranks, world)
