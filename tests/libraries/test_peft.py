"""Adapters of the ``peft`` library: added before sharding or after, switched, merged and saved."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fsdp_compose import (
    count_traffic,
    fully_shard,
    gathered,
    refresh,
    state_dict,
    wrap,
)
from fsdp_compose.sharded import is_sharded

from harness import rank_errors, run_ranks
from models import (
    Tolerance,
    Tower,
    Twin,
    adamw,
    assert_at_rest,
    by_block,
    compare,
    data,
    fqns,
    one_unit,
    seeded,
    sgd,
    square,
    trainable,
    units,
    whole,
)

pytestmark = [
    pytest.mark.models,
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
]
peft: Any = None


@pytest.fixture(scope="module", autouse=True)
def _import_peft() -> None:
    """Once, here: a rank that did it would take seconds."""
    global peft
    import peft as imported

    peft = imported


def config(rank: int = 2, **options: Any) -> Any:
    chosen = {"target_modules": ["up", "down"], "init_lora_weights": False, **options}
    return peft.LoraConfig(r=rank, lora_alpha=4, lora_dropout=0.0, **chosen)


def adapt(model: nn.Module, seed: int = 1, **options: Any) -> nn.Module:
    torch.manual_seed(seed)
    return peft.get_peft_model(model, config(**options))


def adapted() -> nn.Module:
    return adapt(Tower(2))


def same(model: nn.Module, plain: nn.Module) -> None:
    wanted = dict(plain.named_parameters())
    assert list(wanted) == [name for name, _ in model.named_parameters()]
    for name, param in model.named_parameters():
        assert is_sharded(param), name
        compare(name, whole(param), wanted[name].detach(), Tolerance())


def together(model: nn.Module, plain: nn.Module, rank: int, steps: int = 2) -> None:
    ours, theirs = adamw(trainable(model)), adamw(trainable(plain))
    for step in range(steps):
        square(model, data(step, rank)).backward()
        assert_at_rest(model)
        square(plain, torch.cat([data(step, r) for r in range(2)])).backward()
        for optim in (ours, theirs):
            optim.step()
            optim.zero_grad()
    same(model, plain)


def agree(model: nn.Module, plain: nn.Module, rank: int) -> None:
    with torch.no_grad():
        compare("output", model(data(9, rank)), plain(data(9, rank)), Tolerance())


@pytest.mark.parametrize("optimizer", [sgd, adamw])
@pytest.mark.parametrize("shard", [by_block, one_unit])
def test_adapters_from_before_sharding(shard: Any, optimizer: Any) -> None:
    """Frozen bases reduce nothing; switched off, adapters change nothing but the output."""

    def ranks(rank: int) -> None:
        twin = Twin(rank, 2, adapted, shard, optimizer)
        with count_traffic() as traffic:
            twin.backward(square, 0)
        assert traffic.reduces == (2 if shard is by_block else 1)
        twin.step()
        twin.train()
        with twin.model.disable_adapter(), twin.reference.disable_adapter():
            agree(twin.model, twin.reference, rank)
        twin.train()

    run_ranks(ranks, 2)


@pytest.mark.parametrize("shard", [by_block, one_unit])
def test_adapters_added_to_a_sharded_model(shard: Any) -> None:
    """A second adapter beside the first, switched, merged, taken off again."""

    def ranks(rank: int) -> None:
        bare, plain_bare = shard(seeded(lambda: Tower(2))), seeded(lambda: Tower(2))
        model, plain = adapt(bare), adapt(plain_bare)
        with pytest.raises(RuntimeError, match=r"up\.lora_A\.default\.weight.*refresh\(model\)"):
            model(data(0, rank))
        refresh(model)
        assert all(is_sharded(p) for p in model.parameters())
        together(model, plain, rank)
        for m in (model, plain):
            torch.manual_seed(3)
            m.add_adapter("second", config(3))
            m.set_adapter("second")
        refresh(model)
        together(model, plain, rank)
        for m in (model, plain):
            m.set_adapter("default")
        agree(model, plain, rank)
        together(model, plain, rank)
        with pytest.raises(RuntimeError, match=r"torch\.Tensor\.matmul needs the whole of"):
            model.merge_adapter()
        for change in ("merge_adapter", "unmerge_adapter"):
            getattr(plain, change)()
            with torch.no_grad(), gathered(model, writeback=True):
                getattr(model, change)()
            agree(model, plain, rank)
        plain = plain.merge_and_unload()
        with torch.no_grad(), gathered(model, writeback=True):
            model = model.merge_and_unload()
        refresh(model)
        assert model is bare
        names = [name for name, _ in model.named_parameters()]
        assert fqns(model) == names and not any("lora" in name for name in names)
        for m in (model, plain):
            m.requires_grad_(True)
        together(model, plain, rank)

    run_ranks(ranks, 2)


def test_adapters_are_saved_and_loaded_alone(tmp_path: Path) -> None:
    """``get_peft_model_state_dict`` gives sharded values; no frozen weight is gathered."""

    def ranks(rank: int) -> None:
        twin = Twin(rank, 2, adapted, by_block, sgd)
        twin.train()
        wanted = peft.get_peft_model_state_dict(twin.reference)
        sharded = peft.get_peft_model_state_dict(twin.model)
        assert list(sharded) == list(wanted) and all(map(is_sharded, sharded.values()))
        with count_traffic() as traffic:
            full = {name: value.full_tensor() for name, value in sharded.items()}
        assert traffic.gathers == len(full)
        from_all = peft.get_peft_model_state_dict(
            twin.model, state_dict=state_dict(twin.model, kind="full")
        )
        for name, value in wanted.items():
            compare(name, full[name], value, Tolerance())
            assert torch.equal(full[name], from_all[name])
        twin.model.save_pretrained(tmp_path / str(rank), state_dict=full)
        fresh = by_block(adapt(seeded(lambda: Tower(2)), seed=5).double())
        peft.set_peft_model_state_dict(fresh, peft.load_peft_weights(tmp_path / str(rank), "cpu"))
        with torch.no_grad():
            for a, b in zip(trainable(fresh), trainable(twin.reference)):
                compare("loaded", whole(a), b.detach(), Tolerance())
        same(twin.model, twin.reference)

    run_ranks(ranks, 2)


def test_a_save_of_slices_is_refused(tmp_path: Path) -> None:
    def ranks(rank: int) -> None:
        by_block(model := adapt(seeded(lambda: Tower(2))))
        model.save_pretrained(tmp_path / str(rank))

    assert all(rank_errors(ranks, 2))


def llama() -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=32,
            hidden_size=16,
            intermediate_size=24,
            num_hidden_layers=2,
            num_attention_heads=2,
            num_key_value_heads=1,
            pad_token_id=0,
            attn_implementation="eager",
        )
    ).double()


def adapt_llama(model: nn.Module) -> nn.Module:
    return adapt(model, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")


def by_layer(model: nn.Module, **options: Any) -> nn.Module:
    from transformers.models.llama.modeling_llama import LlamaDecoderLayer

    return fully_shard(model, units=wrap.by_class({LlamaDecoderLayer}), **options)


def tokens(rank: int) -> Tensor:
    generator = torch.Generator().manual_seed(rank)
    return torch.randint(1, 32, (2, 7), generator=generator)


@pytest.mark.parametrize("before", [True, False])
def test_llama(before: bool) -> None:
    pytest.importorskip("transformers")

    def ranks(rank: int) -> None:
        model, plain = llama(), adapt_llama(llama())
        if before:  # the outermost unit is peft's model, whose generate does not call its forward
            model = by_layer(adapt_llama(model), methods=("forward", "generate"))
        else:
            model = adapt_llama(by_layer(model))
            refresh(model)
        ours, theirs = adamw(trainable(model)), adamw(trainable(plain))
        batches = [tokens(r) for r in range(2)]
        for _ in range(2):
            model(input_ids=batches[rank], labels=batches[rank]).loss.backward()
            assert_at_rest(model)
            losses = [plain(input_ids=x, labels=x).loss for x in batches]
            torch.stack(losses).mean().backward()
            for optim in (ours, theirs):
                optim.step()
                optim.zero_grad()
        same(model, plain)
        given = {"input_ids": batches[0], "attention_mask": torch.ones_like(batches[0])}
        options = {"max_new_tokens": 3, "do_sample": False}
        with torch.no_grad():
            found, wanted = (m.generate(**given, **options) for m in (model, plain))
        assert torch.equal(found, wanted)
        for unit in units(model):
            assert not unit.run.calls

    run_ranks(ranks, 2)
