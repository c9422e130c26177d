"""Models of Hugging Face transformers: trained like one process, sampled from, saved and loaded."""

from __future__ import annotations

import copy
import inspect
import warnings
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors import safe_open
from torch import Tensor, nn

import fsdp_compose as fc
from fsdp_compose import MixedPrecision, ShardedWeightError
from fsdp_compose.__main__ import main

from harness import rank_errors, run_ranks
from models import assert_at_rest, whole

pytestmark = pytest.mark.models

hf: ModuleType

NAMES = "llama gpt2 t5 mixtral vit bert whisper mamba".split()
WRITERS = "llama gpt2 t5 mixtral whisper mamba".split()
STEPS = 5
BF16 = MixedPrecision(torch.bfloat16, torch.float32, cast_forward_inputs="root")


@pytest.fixture(scope="module", autouse=True)
def _library() -> None:
    """Import transformers once, here: a rank that did it would take seconds."""
    global hf
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import hf_models

    hf = hf_models
    assert list(hf.FAMILIES) == NAMES
    assert [name for name in NAMES if hf.FAMILIES[name].generates] == WRITERS


def sgd(params: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=0.1, momentum=0.9)


def adamw(params: Any) -> torch.optim.Optimizer:
    """Its epsilon hides gradients that are zero but for rounding, as those of a key's bias are."""
    return torch.optim.AdamW(params, lr=0.01, eps=1e-4)


def near(what: str, found: Tensor, wanted: Tensor, rtol: float = 1e-4, atol: float = 2e-6) -> None:
    torch.testing.assert_close(
        found, wanted, rtol=rtol, atol=atol, msg=lambda text: f"{what}: {text}"
    )


class Plain:
    """One process on the whole batch. With ``compute``, in that dtype by parts, as ranks do it."""

    def __init__(self, model: nn.Module, compute: torch.dtype | None, parts: int) -> None:
        self.model, self.compute, self.parts = model, compute, parts
        self.low = copy.deepcopy(model)
        if compute is not None:
            for param in self.low.parameters():
                param.data = param.data.to(compute)

    def backward(self, batch: Any) -> Tensor:
        if self.compute is None:
            loss = self.model(**batch).loss
            loss.backward()
            return loss.detach()
        pairs = list(zip(self.low.parameters(), self.model.parameters()))
        losses = []
        for part in range(self.parts):
            with torch.no_grad():
                for low, param in pairs:
                    low.copy_(param)
            mine = hf.floats(hf.rows(batch, part, self.parts), self.compute)
            loss = self.low(**mine).loss
            loss.backward()
            losses.append(loss.detach().float())
            for low, param in pairs:
                if low.grad is not None:
                    grad = low.grad.to(param.dtype) / self.parts
                    param.grad = grad if param.grad is None else param.grad + grad
                    low.grad = None
        return torch.stack(losses).mean()


def count_calls(model: nn.Module, blocks: set[type[nn.Module]]) -> list[int]:
    """One number that grows with every call of a linear layer (of a convolution) in a block."""
    calls = [0]

    def count(module: nn.Module, args: Any) -> None:
        calls[0] += 1

    for block in model.modules():
        if isinstance(block, tuple(blocks)):
            for layer in block.modules():
                if not list(layer.children()) and list(layer.parameters()):
                    layer.register_forward_pre_hook(count)
                    break
    return calls


def train(
    rank: int,
    name: str,
    *,
    reentrant: bool | None = None,
    compute: torch.dtype | None = None,
    optimizer: Callable[[Any], torch.optim.Optimizer] = sgd,
    world: int = 2,
    **options: Any,
) -> dict[str, Any]:
    """Train five steps beside one process; gradients are compared in every step."""
    family = hf.FAMILIES[name]
    model, plain = family.build(**options).train(), family.build(**options).train()
    calls = count_calls(model, family.blocks)
    if reentrant is not None:
        model.activation_checkpointing_enable({"use_reentrant": reentrant})
        if compute is not None:  # it turns off the cache, with which T5 rounds otherwise
            plain.activation_checkpointing_enable({"use_reentrant": reentrant})
    family.shard(model, mp_policy=MixedPrecision() if compute is None else BF16)
    reference = Plain(plain, compute, world)
    optim, plain_optim = optimizer(model.parameters()), optimizer(plain.parameters())
    theirs = dict(plain.named_parameters())
    gathers, moved = [], {n: p.detach().clone() for n, p in theirs.items()}
    for step in range(STEPS):
        batch = family.batch(step)
        with fc.count_traffic() as traffic:
            loss = model(**hf.rows(batch, rank, world)).loss
            loss.backward()
        assert_at_rest(model)
        gathers.append(traffic.gathers)
        losses = [torch.empty(()) for _ in range(world)]
        dist.all_gather(losses, loss.detach().float())
        near("loss", torch.stack(losses).mean(), reference.backward(batch))
        for key, param in model.named_parameters():
            wanted = theirs[key].grad
            if param.grad is None or wanted is None:
                assert param.grad is None or not whole(param.grad).any(), key
                assert wanted is None or not wanted.any(), key
            else:
                near(f"gradient of {key}", whole(param.grad), wanted)
        for each in (optim, plain_optim):
            each.step()
            each.zero_grad()
        for key, param in model.named_parameters():
            near(key, whole(param), theirs[key].detach())
            if compute is not None:  # a last bit that differs must not round to another weight
                theirs[key].detach().copy_(whole(param))
    changed = sum(not torch.equal(p.detach(), moved[n]) for n, p in theirs.items())
    return {
        "type": type(model).__name__,
        "gathers": gathers,
        "calls": calls[0],
        "blocks": sum(isinstance(module, tuple(family.blocks)) for module in model.modules()),
        "buckets": [len(fc.get_state(unit).unit.buckets) for unit in fc.units_of(model)],
        "changed": changed / len(theirs),
    }


CHECKPOINTED = [(name, how) for name in NAMES for how in (None, False)]
CHECKPOINTED += [("llama", True), ("t5", True)]


@pytest.mark.parametrize(("name", "reentrant"), CHECKPOINTED)
def test_training_equals_one_process(name: str, reentrant: bool | None) -> None:
    for found in run_ranks(train, 2, name, reentrant=reentrant):
        root, *blocks = found["buckets"]
        assert found["type"] == hf.FAMILIES[name].kind.__name__
        assert len(blocks) == found["blocks"] >= 2
        assert found["gathers"] == [root + 2 * sum(blocks)] * STEPS
        assert found["calls"] == STEPS * len(blocks) * (1 if reentrant is None else 2)
        assert found["changed"] > 0.85


@pytest.mark.parametrize("name", NAMES)
def test_mixed_precision_equals_the_same_casts(name: str) -> None:
    run_ranks(train, 2, name, reentrant=False, compute=torch.bfloat16)


@pytest.mark.parametrize("name", ["gpt2", "mixtral"])
def test_adamw_equals_one_process(name: str) -> None:
    run_ranks(train, 2, name, optimizer=adamw)


@pytest.mark.parametrize("name", ["gpt2", "mixtral"])
def test_four_ranks_equal_one_process(name: str) -> None:
    run_ranks(train, 4, name, reentrant=False, world=4)


def test_experts_are_chosen_by_each_rank_for_itself() -> None:
    """What the parity of Mixtral above rests on: some expert is used on one rank alone."""

    def route(rank: int) -> list[int]:
        family = hf.FAMILIES["mixtral"]
        model = family.build()
        assert model.model.layers[0].mlp.experts.gate_up_proj.ndim == 3
        family.shard(model)
        batch = {k: v[:1, :2] for k, v in hf.rows(family.batch(0), rank, 2).items()}
        logits = model(**batch, output_router_logits=True).router_logits[0]
        return logits.topk(2).indices.unique().tolist()

    first, second = run_ranks(route, 2)
    assert first != second


def sharded_and_plain(name: str, **options: Any) -> tuple[Any, Any]:
    """Both in eval mode."""
    family = hf.FAMILIES[name]
    return family.shard(family.build().eval(), **options), family.build().eval()


GREEDY = {"max_new_tokens": 6, "do_sample": False}


@pytest.mark.parametrize("name", WRITERS)
def test_generate_equals_one_process(name: str) -> None:
    """Greedily, with beams, and each rank a prompt of its own; training goes on after it."""

    def write(rank: int) -> None:
        model, plain = sharded_and_plain(name, methods=("forward", "generate"))
        family = hf.FAMILIES[name]
        prompt, mine = family.prompt(), hf.rows(family.prompt(1), rank, 2)
        for options in (GREEDY, {**GREEDY, "num_beams": 2}):
            text = model.generate(**prompt, **options)
            assert text.shape[-1] > 4 and torch.equal(text, plain.generate(**prompt, **options))
        text = model.generate(**mine, **GREEDY, synced_gpus=True)
        assert torch.equal(text, plain.generate(**mine, **GREEDY))
        assert_at_rest(model)
        model.train()(**hf.rows(family.batch(0), rank, 2)).loss.backward()
        plain.train()(**family.batch(0)).loss.backward()
        for (key, param), theirs in zip(model.named_parameters(), plain.parameters()):
            if theirs.grad is not None:
                near(f"gradient of {key}", whole(param.grad), theirs.grad)

    run_ranks(write, 2)


@pytest.mark.parametrize("name", ["llama", "t5", "whisper"])
@pytest.mark.parametrize("how", ["method", "gathered", "kept"])
def test_gathers_of_generate(name: str, how: str) -> None:
    """Blocks are gathered for every token, unless all is gathered once for all tokens."""

    def write(rank: int) -> None:
        model, plain = sharded_and_plain(name, methods=("forward", "generate"))
        prompt = hf.FAMILIES[name].prompt()
        root, *blocks = fc.units_of(model)
        once = [len(fc.get_state(unit).unit.buckets) for unit in (root, *blocks)]
        calls = [0]
        for block in blocks:
            block.register_forward_pre_hook(lambda *_: calls.__setitem__(0, calls[0] + 1))
        with fc.count_traffic() as traffic:
            if how == "gathered":
                with fc.gathered(model):
                    text = model.generate(**prompt, **GREEDY)
            else:
                if how == "kept":
                    fc.set_reshard_after_forward(model, False)
                text = model.generate(**prompt, **GREEDY)
        assert torch.equal(text, plain.generate(**prompt, **GREEDY))
        assert calls[0] > 2 * len(blocks)
        assert traffic.gathers == (once[0] + calls[0] if how == "method" else sum(once))
        for unit in (root, *blocks):
            fc.reshard(unit)
        assert_at_rest(model)

    run_ranks(write, 2)


@pytest.mark.parametrize("name", ["t5", "whisper"])
def test_generate_that_is_not_listed_says_so(name: str) -> None:
    """Their encoder is called by itself, outside of any unit's forward."""

    def write(rank: int) -> None:
        model, _ = sharded_and_plain(name)
        model.generate(**hf.FAMILIES[name].prompt(), **GREEDY)

    for error in rank_errors(write, 2):
        assert error.startswith("ShardedWeightError") and "methods=('forward', " in error


def logits(model: nn.Module, name: str) -> Tensor:
    with torch.no_grad():
        return model(**hf.FAMILIES[name].batch(0)).logits


@pytest.mark.parametrize("name", NAMES)
def test_saved_full_it_loads_with_from_pretrained(name: str, tmp_path: Path) -> None:
    def save(rank: int) -> None:
        family = hf.FAMILIES[name]
        model, plain = sharded_and_plain(name)
        fc.save_full(tmp_path, model)
        if rank == 0:
            model.config.save_pretrained(tmp_path)
            files = {"config.json", "model.safetensors", "model.safetensors.index.json"}
            assert {p.name for p in tmp_path.iterdir()} == files
            with safe_open(tmp_path / "model.safetensors", "pt") as file:
                assert file.metadata() == {"format": "pt"}
                assert set(family.tied) <= set(file.keys())
            loaded, info = family.kind.from_pretrained(tmp_path, output_loading_info=True)
            assert not any(info.values()), info
            assert len({id(loaded.get_parameter(key)) for key in family.tied}) <= 1
            assert torch.equal(logits(loaded.eval(), name), logits(plain, name))

    run_ranks(save, 2)


@pytest.mark.parametrize("name", NAMES)
def test_what_save_pretrained_wrote_loads(name: str, tmp_path: Path) -> None:
    """Into other weights, and into a model on the meta device, whose buffers the library makes."""

    def load(rank: int) -> None:
        family = hf.FAMILIES[name]
        plain = family.build().eval()
        if rank == 0:
            plain.save_pretrained(tmp_path, save_original_format=False)
        dist.barrier()
        other = family.shard(family.build(seed=1).eval())
        assert not torch.equal(logits(other, name), logits(plain, name))
        fc.load_full(tmp_path, other)
        with torch.device("meta"):
            empty = family.kind(family.config()).eval()
        family.shard(empty, param_init_fn=empty._init_weights)
        fc.load_full(tmp_path, empty)
        for model in (other, empty):
            model.tie_weights()
            assert torch.equal(logits(model, name), logits(plain, name))

    run_ranks(load, 2)


@pytest.mark.parametrize("name", ["llama", "t5"])
def test_weights_of_rank_0_alone(name: str) -> None:
    """Rank 0 has the weights, the others a model on the meta device."""

    def load(rank: int) -> None:
        family = hf.FAMILIES[name]
        with torch.device("meta" if rank else "cpu"):
            model = family.build(seed=3).eval()
        family.shard(model, init="broadcast", param_init_fn=model._init_weights)
        assert torch.equal(logits(model, name), logits(family.build(seed=3).eval(), name))

    run_ranks(load, 2)


@pytest.mark.parametrize("name", ["llama", "gpt2", "t5"])
def test_save_pretrained_of_a_sharded_model(name: str, tmp_path: Path) -> None:
    """Given the full state, or inside a scope, it is right; on slices it raises, everywhere."""

    def save(rank: int) -> None:
        family = hf.FAMILIES[name]
        model, plain = sharded_and_plain(name)
        state = fc.state_dict(model, kind="full", rank0_only=True)
        if rank == 0:
            model.save_pretrained(tmp_path / "state", state_dict=state)
        with fc.gathered(model):
            model.save_pretrained(tmp_path / "gathered", is_main_process=rank == 0)
        with fc.state_dict_type(model, "full"):
            model.save_pretrained(tmp_path / "typed", is_main_process=rank == 0)
        with pytest.raises(ShardedWeightError, match="save_full"):
            model.save_pretrained(tmp_path / "slices")
        dist.barrier()
        for folder in ("state", "gathered", "typed"):
            loaded = family.kind.from_pretrained(tmp_path / folder).eval()
            assert torch.equal(logits(loaded, name), logits(plain, name))

    run_ranks(save, 2)


@pytest.mark.parametrize("name", NAMES)
def test_tying_again_changes_nothing(name: str) -> None:
    def tie(rank: int) -> None:
        model, plain = sharded_and_plain(name)
        before = {key: id(p) for key, p in model.named_parameters(remove_duplicate=False)}
        model.tie_weights()
        assert {k: id(p) for k, p in model.named_parameters(remove_duplicate=False)} == before
        assert torch.equal(logits(model, name), logits(plain, name))

    run_ranks(tie, 2)


@pytest.mark.parametrize("name", ["llama", "gpt2", "t5", "bert"])
def test_resizing_the_vocabulary(name: str) -> None:
    """Of a sharded model it raises; between ``undo`` and ``fully_shard`` it is the plain one's."""

    def resize(rank: int) -> None:
        family = hf.FAMILIES[name]
        model, plain = sharded_and_plain(name)
        with pytest.raises(ShardedWeightError):
            model.resize_token_embeddings(hf.VOCAB + 8)
        with (
            pytest.raises(RuntimeError, match="to change shapes"),
            torch.no_grad(),
            fc.gathered(model, writeback=True),
        ):
            model.resize_token_embeddings(hf.VOCAB + 8)
        model, plain = sharded_and_plain(name)
        fc.undo(model)
        for each in (model, plain):
            torch.manual_seed(7)
            each.resize_token_embeddings(hf.VOCAB + 8)
        family.shard(model)
        assert model.get_input_embeddings().weight.shape == (hf.VOCAB + 8, 32)
        loss, wanted = (each(**family.batch(0)).loss for each in (model, plain))
        assert torch.equal(loss, wanted)
        loss.backward()
        wanted.backward()
        for (key, param), theirs in zip(model.named_parameters(), plain.parameters()):
            if theirs.grad is not None:
                near(f"gradient of {key}", whole(param.grad), theirs.grad)

    run_ranks(resize, 2)


@pytest.mark.parametrize("name", NAMES)
def test_a_model_in_bfloat16(name: str) -> None:
    def step(rank: int) -> None:
        family = hf.FAMILIES[name]
        model, plain = family.build(), family.build()
        for each in (model, plain):
            each.to(torch.bfloat16)
        family.shard(model)
        assert model.dtype is torch.bfloat16
        assert model.num_parameters() == plain.num_parameters()
        batch = hf.floats(hf.rows(family.batch(0), 0, 2), torch.bfloat16)  # the same on both ranks
        loss, wanted = model(**batch).loss, plain(**batch).loss
        assert torch.equal(loss, wanted)
        loss.backward()
        wanted.backward()
        for (key, param), theirs in zip(model.named_parameters(), plain.parameters()):
            if theirs.grad is not None:
                assert torch.equal(whole(param.grad), theirs.grad), key

    run_ranks(step, 2)


@pytest.mark.parametrize("name", NAMES)
def test_outputs_are_the_model_s_own(name: str) -> None:
    """Also through a deep copy, as a tuple, and with every hidden state."""

    def run(rank: int) -> None:
        model, plain = sharded_and_plain(name)
        batch = hf.FAMILIES[name].batch(0)
        for each in (model, copy.deepcopy(model)):
            found = each(**batch, output_hidden_states=True)
            wanted = plain(**batch, output_hidden_states=True)
            assert type(found) is type(wanted) and list(found) == list(wanted)
            assert torch.equal(found.loss, wanted.loss)
            found.loss.backward()
            assert_at_rest(each)
        plainly = model(**batch, return_dict=False)
        assert type(plainly) is tuple and torch.equal(plainly[0], wanted.loss)

    run_ranks(run, 2)


@pytest.mark.parametrize("name", ["llama", "gpt2", "mixtral"])
def test_caches_in_and_out(name: str) -> None:
    """A cache that is returned is given back; one row of logits; both kinds of attention."""

    def run(rank: int) -> None:
        family = hf.FAMILIES[name]
        tokens = family.prompt()["input_ids"]
        for attention in ("sdpa", "eager"):
            built = [family.build(attn_implementation=attention).eval() for _ in range(2)]
            model, plain = family.shard(built[0]), built[1]
            for grad in (False, True):
                with torch.set_grad_enabled(grad):
                    found = [_continue(each, tokens) for each in (model, plain)]
                near("logits", *found)
            assert found[0].shape == (hf.ROWS, 1, hf.VOCAB)
            with fc.gathered(model):  # the first forward's logits are not part of the loss
                loss = _continue(model, hf.rows(family.prompt(), rank, 2)["input_ids"])
            loss.square().mean().backward()
            found[1].square().mean().backward()
            for (key, param), theirs in zip(model.named_parameters(), plain.parameters()):
                if theirs.grad is not None:
                    near(f"gradient of {key}", whole(param.grad), theirs.grad)

    run_ranks(run, 2)


def _continue(model: nn.Module, tokens: Tensor) -> Tensor:
    _, cache, *_ = model(input_ids=tokens[:, :6], use_cache=True).to_tuple()
    accepted = inspect.signature(model.forward).parameters  # transformers 5.24 renamed it
    rest = {
        "input_ids": tokens[:, 6:],
        "cache" if "cache" in accepted else "past_key_values": cache,
    }
    return model(**rest, logits_to_keep=1).logits


def test_plan_reads_the_configuration_it_is_given(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Not the one beside it that is called config.json."""
    sizes = {"config.json": 32, "small.json": 8}
    for name, width in sizes.items():
        config = hf.tf.GPT2Config(n_embd=width, n_layer=1, n_head=2, vocab_size=64)
        (tmp_path / name).write_text(config.to_json_string())
    heads = []
    for name in sizes:
        assert main(["plan", str(tmp_path / name), "--world-size", "2"]) == 0
        heads.append(capsys.readouterr().out.splitlines()[0])
    assert heads[0] != heads[1]
