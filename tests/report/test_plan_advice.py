"""A plan says whether it fits, what activations take, and what to change, as it would be."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import fsdp_compose as fc
from fsdp_compose import MixedPrecision, Offload, ShardingStrategy, fully_shard, no_sync, wrap
from fsdp_compose.report import Plan, explain, plan
from fsdp_compose.report.activations import measure_activations
from fsdp_compose.report.plan import imagine_mesh
from fsdp_compose.report.runs import Recording
from fsdp_compose.report.text import count, size

from harness import run_ranks
from models import Ledger, Tower, by_block, data, mesh_of_replicas, seeded, square

BF16_FP32 = MixedPrecision(torch.bfloat16, torch.float32)


class Layer(nn.Module):
    """The parameters of a decoder layer of an 8B model, at full size or smaller."""

    def __init__(self, width: int, hidden: int, keys: int) -> None:
        super().__init__()
        self.norms = nn.ParameterList(nn.Parameter(torch.empty(width)) for _ in range(2))
        self.q, self.o = (nn.Linear(width, width, bias=False) for _ in range(2))
        self.k, self.v = (nn.Linear(width, keys, bias=False) for _ in range(2))
        self.up, self.gate = (nn.Linear(width, hidden, bias=False) for _ in range(2))
        self.down = nn.Linear(hidden, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        heads = [f(x).unflatten(-1, (-1, 8)).transpose(1, 2) for f in (self.q, self.k, self.v)]
        y = F.scaled_dot_product_attention(*heads, is_causal=True, enable_gqa=True)
        x = x + self.o(y.transpose(1, 2).flatten(2) * self.norms[0])
        return x + self.down(F.silu(self.gate(x * self.norms[1])) * self.up(x))


class Decoder(nn.Module):
    def __init__(self, depth=32, width=4096, hidden=14336, keys=1024, vocab=128256) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocab, width)
        self.layers = nn.ModuleList(Layer(width, hidden, keys) for _ in range(depth))
        self.norm = nn.LayerNorm(width, bias=False)
        self.head = nn.Linear(width, vocab, bias=False)
        self.register_buffer("scale", torch.ones(()))
        self.again = False

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens) * self.scale.to(self.embed.weight.dtype)
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=False) if self.again else layer(x)
        return self.head(self.norm(x))


SMALL = (3, 32, 48, 16, 100)  # depth, width, hidden, keys and values, vocabulary
TOKENS = torch.zeros(2, 24, dtype=torch.long)


def on_meta(*shape: int) -> Decoder:
    with torch.device("meta"):
        return Decoder(*shape)


def pasted(line: str) -> dict[str, Any]:
    """The arguments that a line of advice writes."""
    names = {"wrap": wrap, "MixedPrecision": MixedPrecision, "Offload": Offload, "torch": torch}
    for kind in (Layer, Decoder):
        names[kind.__name__] = kind
    return eval(f"dict({line})", names)


def check_advice(found: Plan, model: nn.Module, **options: Any) -> dict[str, Any]:
    """Every line, pasted, saves what it says; the lines by what they set."""
    lines = {}
    for advice in found.advice:
        changed = plan(model, **{**options, **pasted(advice.paste)})
        assert found.needed - changed.needed == advice.saved_bytes
        assert found.step.total_bytes - changed.step.total_bytes == advice.saved_traffic
        lines[advice.paste] = changed
    return lines


def test_an_8b_model_at_64_ranks() -> None:
    """An embedding and a head of their own: 7.68 GiB becomes 4.81."""
    options = {"world_size": 64, "mp_policy": BF16_FP32, "optimizer": "adamw"}
    options |= {"units": wrap.by_class(Layer), "device_memory": "80GiB"}
    found = plan(on_meta(), **options)
    assert size(found.memory.total) == "7.68 GiB" and found.fits
    lines = check_advice(found, on_meta(), **options)
    ends = 'units=wrap.by_class({Layer}) | wrap.by_name("embed", "head")'
    assert size(lines[ends].memory.total) == "4.81 GiB"
    assert "reshard_after_forward=False" in lines  # there is room
    tight = plan(on_meta(), **{**options, "device_memory": found.needed})
    chosen = plan(on_meta(), **{**options, "strategy": ShardingStrategy.FULL_SHARD})
    for other in (tight, chosen):
        assert other.fits and "reshard_after_forward=False" not in {a.paste for a in other.advice}
    text = str(found)
    words = " ".join(text.split())
    assert "2.87 GiB less at the peak" in words and ends in words
    assert "it fits: 72.3 GiB are left for activations" in text
    assert max(map(len, text.split("\n"))) <= 100


def test_a_model_that_does_not_fit() -> None:
    options = {"world_size": 8, "optimizer": "adamw", "device_memory": "24GB"}
    found = plan(on_meta(), **options)
    assert not found.fits and found.device_memory == 24 * 10**9
    assert "it does NOT fit: " in str(found)
    lines = check_advice(found, on_meta(), **options)
    assert next(iter(lines)) == "units=wrap.by_class({Layer})"
    around = plan(nn.Sequential(on_meta()), **options)  # a class of which there is one is no choice
    assert around.advice[0].paste == "units=wrap.by_class({Layer})"
    split = found.advice[0]  # what is released after forward is gathered again
    assert split.saved_traffic < 0
    assert f"less at the peak, {size(-split.saved_traffic)} more to move in a step" in str(split)
    assert "offload_policy=Offload(params=True)" in lines
    assert "mp_policy=MixedPrecision(torch.bfloat16, torch.float32)" in lines


def test_bf16_halves_activations_too() -> None:
    model = nn.Sequential(*(nn.Linear(64, 64) for _ in range(4)))
    options = {"world_size": 8, "units": wrap.by_class(nn.Linear), "device_memory": 1000}
    options |= {"sample": torch.ones(4096, 64)}
    lines = check_advice(plan(model, **options), model, **options)
    assert "mp_policy=MixedPrecision(torch.bfloat16, torch.float32)" in lines


def test_the_outermost_unit_should_stay_gathered() -> None:
    options = {"world_size": 8, "units": wrap.by_class(Layer), "reshard_after_forward": True}
    found = plan(on_meta(), **options)
    assert "reshard_after_forward=None" in check_advice(found, on_meta(), **options)
    quiet = plan(on_meta(), **{**options, "reshard_after_forward": None})
    assert "reshard_after_forward=None" not in {advice.paste for advice in quiet.advice}


class Tied(nn.Module):
    """Its own parameter is read on both sides of a unit inside it."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(64, 64))
        self.block = nn.Linear(64, 64)
        self.head = nn.Linear(64, 64, bias=False)
        self.head.weight = self.weight


def test_ends_that_are_no_modules_stay() -> None:
    """They cannot be units of their own."""
    found = plan(Tied(), world_size=8, units=wrap.by_name("block"))
    assert not any("units of their own" in advice.text for advice in found.advice)


def test_units_too_small_for_their_link() -> None:
    model = nn.Sequential(
        *(nn.Sequential(*(nn.Linear(128, 128) for _ in "0123" * 4)) for _ in "ab")
    )
    options = {"world_size": 8, "units": wrap.by_class(nn.Linear)}
    found = plan(model, **options)
    (advice,) = found.advice
    assert "32 units gather less than 1.00 MiB each" in advice.text
    check_advice(found, model, **options)
    assert not plan(model, world_size=8).advice
    with torch.device("meta"):  # as few among large ones they cost little
        large = nn.Sequential(*(nn.Linear(1024, 1024) for _ in range(32)))
    assert not plan(nn.Sequential(model[0], large), **options).advice


class Apart(Ledger):
    """Leaves gradients of parameters out, from the moment at which they are made."""

    def __init__(self, *known: Tensor) -> None:
        super().__init__(*known)
        self.kept: list[Any] = []  # so that no two storages are known by one address
        self.moments: list[dict[int, int]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = super().__torch_dispatch__(func, types, args, kwargs)
        self.kept += self.storages.values()
        alive = {key: torch.UntypedStorage._new_with_weak_ptr(key) for key in self.storages}
        self.moments.append({key: s.nbytes() for key, s in alive.items() if s is not None})
        return out

    def drop(self, param: Tensor) -> None:
        assert param.grad is not None
        for moment in self.moments:
            moment.pop(param.grad.untyped_storage()._cdata, None)
        param.grad = None


@pytest.mark.parametrize("way", ["trained", "checkpointed", "frozen"])
def test_activations_are_those_of_a_real_step(way: str) -> None:
    """What is measured without memory is what operators allocate in the same step with memory."""
    model = Decoder(*SMALL)
    model.again = way == "checkpointed"
    model.layers.requires_grad_(way != "frozen")  # whose backward keeps fewer of their inputs
    planned = measure_activations(model, TOKENS, {}, None, Recording())
    ledger = Apart(TOKENS, model.scale, *model.parameters())
    for param in model.parameters():
        nn.init.normal_(param, std=0.02)
        if param.requires_grad:
            param.register_post_accumulate_grad_hook(ledger.drop)
    with ledger:
        out = model(TOKENS)
        forward, kept = ledger.peak, ledger.live()
        ledger.moments.clear()
        torch.autograd.backward(out, torch.ones_like(out))
    assert (planned.forward, planned.kept) == (forward, kept)
    backward = max(sum(moment.values()) for moment in ledger.moments)
    assert planned.backward == pytest.approx(backward, rel=0.02)


def test_gradients_of_weights_are_no_activations() -> None:
    """They are counted in a step, as what backward makes."""
    model = nn.Sequential(*(nn.Linear(64, 64, bias=False) for _ in range(3)))
    found = plan(model, world_size=2, sample=torch.ones(1, 64)).activations
    assert found is not None and found.backward < 64 * 64


def test_a_sample_is_counted_and_changes_nothing() -> None:
    model = Decoder(*SMALL)
    options = {"world_size": 4, "units": wrap.by_class(Layer), "mp_policy": BF16_FP32}
    before = dict(model.named_parameters())
    bare, found = plan(model, **options), plan(model, sample=(TOKENS,), **options)
    assert all(p is before[name] and p.grad is None for name, p in model.named_parameters())
    assert bare.needed == bare.memory.total < found.needed
    assert found.activations is not None
    exactly, less = (plan(model, device_memory=bare.needed - n, **options) for n in (0, 1))
    assert exactly.fits is True and "it fits: 0 B are left" in str(exactly)
    assert less.fits is False and "it does NOT fit: 1 B too much" in str(less)
    wide = replace(found, activations=replace(found.activations, forward=1 << 40))
    assert wide.needed == wide.memory.persistent + wide.memory.forward.total + (1 << 40)
    full = plan(model, world_size=4, units=options["units"], sample={"tokens": TOKENS})
    assert full.activations.kept > 1.5 * found.activations.kept  # twice the bytes in fp32
    words = " ".join(str(found).split())
    for name in ("forward", "backward"):
        nbytes = getattr(found.activations, name)
        assert f"activations in {name} {size(nbytes)} measured" in words
    as_dict = json.loads(found.to_json())
    assert as_dict["needed"] == found.needed and as_dict["fits"] is None
    assert as_dict["activations"]["kept"] == found.activations.kept


class Asking(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x[: int(x.sum())]) if (x > 0).all() else x.numpy()


def test_forwards_that_ask_for_numbers() -> None:
    asked = plan(Asking(4, 4), world_size=2, sample=torch.ones(3, 4)).activations
    assert asked is not None and asked.forward == 4 * 4  # one row
    with pytest.raises(ValueError, match=r"Tower cannot run on the meta device.*without sample="):
        plan(Tower(), world_size=2, sample="no input")


class OneHead(nn.Linear):
    """Attention without a dimension of heads, as wide as attention over numbers says."""

    def forward(self, x: Tensor) -> Tensor:
        one, values = torch.ones(1, 1, 2, 8, device="cpu"), torch.arange(2.0, device="cpu")
        values = values.view(1, 1, 2, 1).expand_as(one)
        width = F.scaled_dot_product_attention(one, one, values, is_causal=True).sum()
        assert width == 4  # a half for each element of the second token
        x = super().forward(x)[..., : int(width)]
        return F.scaled_dot_product_attention(x, x, x)


def test_attention_that_no_fused_kernel_takes() -> None:
    found = plan(OneHead(32, 32), world_size=2, sample=torch.ones(2, 5, 32)).activations
    assert found is not None and found.kept >= 4 * 2 * 5 * 5  # with the matrix of tokens by tokens


class Latent(nn.Linear):
    """Attention with values of another width, and an output that needs no gradient."""

    def __init__(self, width: int) -> None:
        super().__init__(8, 2 * (4 + width))
        self.out = nn.Linear(2 * width, 8)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        heads = super().forward(x).tanh().unflatten(-1, (2, -1)).transpose(1, 2)
        found = F.scaled_dot_product_attention(heads[..., :4], heads[..., :4], heads[..., 4:])
        return self.out(found.transpose(1, 2).flatten(2)), x.detach() > 0


@pytest.mark.parametrize("width", [2, 4, 6])
def test_what_needs_a_gradient_is_kept(width: int) -> None:
    """Under ``no_grad`` too; of a frozen model where the sample needs one."""
    model, sample = Latent(width), torch.ones(2, 5, 8)
    wanted = plan(model, world_size=2, sample=sample).activations
    with torch.no_grad():
        assert plan(model, world_size=2, sample=sample).activations == wanted
    model.requires_grad_(False)
    frozen = plan(model, world_size=2, sample=sample).activations
    asked = plan(model, world_size=2, sample=sample.requires_grad_()).activations
    assert wanted.kept > frozen.kept < asked.kept


def test_sizes_and_numbers_of_states() -> None:
    """As a program computes them, and as the command line has them."""
    for given in ("2048", "2KiB", 2048, 2048.9, "2.048 kB"):
        assert plan(Tower(), world_size=2, device_memory=given).device_memory == 2048
    named, counted = (plan(Tower(), world_size=2, optimizer=o).memory for o in ("adamw", "2"))
    assert named.optimizer == counted.optimizer > 0
    assert (size((1 << 20) - 1), size(10235), count(999_600)) == ("1.00 MiB", "10.0 KiB", "1.00M")
    assert plan(fully_shard(Tower()), device_memory="1GiB").fits is True


def test_wrong_questions() -> None:
    assert imagine_mesh((2, 4), "nccl").replicate.ranks == (0, 4)
    for wrong in ("80 gigs", -1, True, math.nan, "GiB"):
        with pytest.raises(ValueError, match=r'device_memory is .*; wanted bytes.*"80GiB"'):
            plan(Tower(), world_size=2, device_memory=wrong)
    with pytest.raises(ValueError, match="sample goes with one module, found 2"):
        plan([nn.Linear(2, 2), nn.Linear(2, 2)], world_size=2, sample=torch.ones(1, 2))
    with pytest.raises(ValueError, match="sharded already, so sample would change nothing"):
        plan(fully_shard(Tower()), sample=torch.ones(1, 2))
    with pytest.raises(ValueError, match="sharded already, so backend would change nothing"):
        plan(fully_shard(Tower()), backend="gloo")
    with pytest.raises(ValueError, match="backend is 'gloo' without world_size"):
        plan(Tower(), backend="gloo")


@pytest.mark.parametrize("strategy", ["HYBRID_SHARD", "HYBRID_SHARD_OPTIMIZER"])
def test_the_price_of_accumulation_is_what_stays(strategy: str) -> None:
    def ranks(rank: int) -> None:
        chosen = fc.ShardingStrategy[strategy]
        model = by_block(seeded(Tower), mesh=mesh_of_replicas(2, 2), strategy=chosen)
        prices = {way.keep: way for way in plan(model).accumulation}
        with no_sync(model):
            square(model, data(0, rank)).backward()
            assert sum(unit.packed for unit in explain(model).units) == prices["unsharded"].held
        square(model, data(1, rank)).backward()
        fc.set_requires_all_reduce(model, False)
        with fc.count_traffic() as traffic:
            square(model, data(0, rank)).backward()
        assert sum(unit.partial for unit in explain(model).units) == prices["no_all_reduce"].held
        assert traffic.reduce_bytes + traffic.all_reduce_bytes == prices["no_all_reduce"].moved
        fc.set_requires_all_reduce(model, True)
        square(model, data(1, rank)).backward()
        with fc.count_traffic() as traffic:
            square(model, data(0, rank)).backward()
        assert traffic.reduce_bytes + traffic.all_reduce_bytes == prices["sharded"].moved

    run_ranks(ranks, 4)


def test_long_names_fit_in_100_columns() -> None:
    model = nn.Sequential()
    inner = model
    for i in range(4):
        inner.add_module(f"a_module_with_a_very_long_name_{i}", nn.Sequential(nn.Linear(8, 8)))
        inner = inner.get_submodule(f"a_module_with_a_very_long_name_{i}")
    options = {"units": wrap.by_class(nn.Linear), "strategy": ShardingStrategy.FULL_SHARD}
    text = str(plan(model, world_size=1024, **options)) + "\n"
    fully_shard(model, units=wrap.by_class(nn.Linear))
    fc.unshard(model)
    text += str(explain(model))
    assert max(map(len, text.split("\n"))) <= 100 and "a_module_with" in text


def test_explain_is_quiet_where_nothing_is_odd() -> None:
    model = fully_shard(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), units=wrap.by_name("*"))
    text = str(explain(model))
    assert len(text.split("\n")) <= 3 and "Nothing is gathered, and nothing is under way." in text
    assert json.loads(explain(model).to_json())["gathered"] == []
