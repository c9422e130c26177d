"""Small random models of Hugging Face transformers, by name: how to build, cut and feed each.

Nothing here reaches the network. Importing this imports transformers, which takes seconds: the
pytest process does it once, before ranks are forked.
"""

from __future__ import annotations

import os

os.environ["HF_HUB_OFFLINE"] = "1"  # before transformers is imported

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import transformers as tf
from torch import Tensor, nn
from transformers.models.bert.modeling_bert import BertLayer
from transformers.models.gpt2.modeling_gpt2 import GPT2Block
from transformers.models.llama.modeling_llama import LlamaDecoderLayer
from transformers.models.mamba.modeling_mamba import MambaBlock
from transformers.models.mixtral.modeling_mixtral import MixtralDecoderLayer
from transformers.models.t5.modeling_t5 import T5Block
from transformers.models.vit.modeling_vit import ViTLayer
from transformers.models.whisper.modeling_whisper import WhisperDecoderLayer, WhisperEncoderLayer

import fsdp_compose as fc

tf.utils.logging.set_verbosity_error()
tf.utils.logging.disable_progress_bar()  # its monitor is a thread, and this process is forked

VOCAB = 64
ROWS = 4  # of the whole batch
Batch = dict[str, Tensor]

_TOKENS = {"bos_token_id": 0, "eos_token_id": None, "pad_token_id": 0}
_LLAMA_LIKE = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "initializer_range": 0.1,
    **_TOKENS,
}
_ENCODER = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "hidden_dropout_prob": 0.0,
    "attention_probs_dropout_prob": 0.0,
    "initializer_range": 0.1,
}


def _random(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def ids(seed: int, length: int = 10) -> Tensor:
    return torch.randint(3, VOCAB, (ROWS, length), generator=_random(seed))


def _language(seed: int) -> Batch:
    tokens = ids(seed)
    return {"input_ids": tokens, "labels": tokens}


def _masked(seed: int) -> Batch:
    return {"input_ids": ids(seed), "labels": ids(seed + 1000)}


def _translation(seed: int) -> Batch:
    return {"input_ids": ids(seed), "labels": ids(seed + 1000, 6)}


def _images(seed: int) -> Batch:
    pixels = torch.randn(ROWS, 3, 16, 16, generator=_random(seed))
    return {"pixel_values": pixels, "labels": ids(seed)[:, 0] % 5}


def _speech(seed: int) -> Batch:
    return {
        "input_features": torch.randn(ROWS, 8, 32, generator=_random(seed)),
        "labels": ids(seed, 6),
    }


@dataclass(frozen=True)
class Family:
    """A kind of model.

    Attributes:
        kind: the class of the model.
        config: makes its configuration, given options that override this one's.
        blocks: classes that become units.
        batch: the whole batch of a seed; ranks take their rows of it.
        tied: names that share one parameter, the first of which is on file.
    """

    kind: type[nn.Module]
    config: Callable[..., Any]
    blocks: set[type[nn.Module]]
    batch: Callable[[int], Batch]
    tied: tuple[str, ...] = ()

    @property
    def generates(self) -> bool:
        return self.batch in (_language, _translation, _speech)

    def build(self, seed: int = 0, **options: Any) -> Any:
        torch.manual_seed(seed)
        return self.kind(self.config(**options))

    def shard(self, model: nn.Module, **options: Any) -> Any:
        return fc.fully_shard(model, units=fc.wrap.by_class(self.blocks), **options)

    def prompt(self, seed: int = 0) -> Batch:
        """What ``generate`` is given."""
        return {key: value for key, value in self.batch(seed).items() if key != "labels"}


def _family(
    kind: type[nn.Module],
    config: type[Any],
    blocks: set[type[nn.Module]],
    batch: Callable[[int], Batch],
    tied: tuple[str, ...] = (),
    **values: Any,
) -> Family:
    return Family(kind, lambda **options: config(**{**values, **options}), blocks, batch, tied)


FAMILIES: dict[str, Family] = {
    "llama": _family(
        tf.LlamaForCausalLM, tf.LlamaConfig, {LlamaDecoderLayer}, _language, **_LLAMA_LIKE
    ),
    "gpt2": _family(
        tf.GPT2LMHeadModel,
        tf.GPT2Config,
        {GPT2Block},
        _language,
        ("transformer.wte.weight", "lm_head.weight"),
        vocab_size=VOCAB,
        n_embd=32,
        n_layer=2,
        n_head=4,
        n_positions=64,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
        initializer_range=0.1,
        **_TOKENS,
    ),
    "t5": _family(
        tf.T5ForConditionalGeneration,
        tf.T5Config,
        {T5Block},
        _translation,
        (
            "shared.weight",
            "encoder.embed_tokens.weight",
            "decoder.embed_tokens.weight",
            "lm_head.weight",
        ),
        vocab_size=VOCAB,
        d_model=32,
        d_kv=8,
        d_ff=48,
        num_layers=2,
        num_heads=4,
        dropout_rate=0.0,
        decoder_start_token_id=0,
        eos_token_id=None,
        pad_token_id=0,
    ),
    "mixtral": _family(
        tf.MixtralForCausalLM,
        tf.MixtralConfig,
        {MixtralDecoderLayer},
        _language,
        num_local_experts=4,
        num_experts_per_tok=2,
        **_LLAMA_LIKE,
    ),
    "vit": _family(
        tf.ViTForImageClassification,
        tf.ViTConfig,
        {ViTLayer},
        _images,
        image_size=16,
        patch_size=4,
        num_labels=5,
        **_ENCODER,
    ),
    "bert": _family(
        tf.BertForMaskedLM,
        tf.BertConfig,
        {BertLayer},
        _masked,
        ("bert.embeddings.word_embeddings.weight", "cls.predictions.decoder.weight"),
        vocab_size=VOCAB,
        max_position_embeddings=32,
        **_ENCODER,
    ),
    "whisper": _family(
        tf.WhisperForConditionalGeneration,
        tf.WhisperConfig,
        {WhisperEncoderLayer, WhisperDecoderLayer},
        _speech,
        ("model.decoder.embed_tokens.weight", "proj_out.weight"),
        vocab_size=VOCAB,
        num_mel_bins=8,
        d_model=32,
        encoder_layers=2,
        decoder_layers=2,
        encoder_attention_heads=4,
        decoder_attention_heads=4,
        encoder_ffn_dim=48,
        decoder_ffn_dim=48,
        max_source_positions=16,
        max_target_positions=32,
        dropout=0.0,
        init_std=0.1,
        decoder_start_token_id=1,
        begin_suppress_tokens=[],
        suppress_tokens=[],
        bos_token_id=0,
        eos_token_id=2,
        pad_token_id=0,
    ),
    "mamba": _family(
        tf.MambaForCausalLM,
        tf.MambaConfig,
        {MambaBlock},
        _language,
        ("backbone.embeddings.weight", "lm_head.weight"),
        vocab_size=VOCAB,
        hidden_size=32,
        state_size=8,
        num_hidden_layers=2,
        initializer_range=0.1,
        **_TOKENS,
    ),
}


def rows(batch: Batch, rank: int, world: int) -> Batch:
    """The rows of ``rank``."""
    share = ROWS // world
    return {key: value[share * rank : share * (rank + 1)] for key, value in batch.items()}


def floats(batch: Batch, dtype: torch.dtype) -> Batch:
    """``batch`` with what is floating-point in ``dtype``."""
    return {k: v.to(dtype) if v.is_floating_point() else v for k, v in batch.items()}
