"""torchtitan's own Llama, made small. Importing this imports torchtitan, which takes seconds."""

from __future__ import annotations

import sys
from typing import Any
from unittest import mock

import torch

# Kernels that nothing here runs, in triton, which comes with torch for GPUs only.
sys.modules["torchtitan.distributed.minimal_async_ep.kernels"] = mock.MagicMock()

import torchtitan.models.common.attention as attention  # noqa: E402
import torchtitan.models.llama3 as llama3  # noqa: E402

VOCAB = 64
Block = llama3.Llama3TransformerBlock


def build(device: str = "cpu", tied: bool = False) -> Any:
    """The debug configuration of torchtitan, narrower, with two layers and plain attention.

    Its attention over packed documents is a compiled kernel for GPUs.
    """
    config = llama3._debugmodel("flex")
    config.layers = llama3._build_llama3_layers(
        n_layers=2,
        dim=32,
        n_heads=4,
        hidden_dim=48,
        rope=llama3.ComplexRoPE.Config(dim=8, max_seq_len=64, theta=10000, scaling="llama"),
        attn_backend="flex",
    )
    for layer in config.layers:
        layer.attention.inner_attention = attention.ScaledDotProductAttention.Config()
    config.dim, config.vocab_size, config.enable_weight_tying = 32, VOCAB, tied
    for part, fields in {
        "tok_embeddings": {"num_embeddings": VOCAB, "embedding_dim": 32},
        "norm": {"normalized_shape": 32},
        "lm_head": {"in_features": 32, "out_features": VOCAB},
    }.items():
        for name, value in fields.items():
            setattr(getattr(config, part), name, value)
    with torch.device(device):
        model = config.build()
    if device != "meta":
        torch.manual_seed(0)
        model.init_states()
    return model


def init_own(module: Any) -> None:
    """Initialise what the module itself has, of which torchtitan has no public name."""
    module._init_self_parameters()
    module._init_self_buffers(buffer_device=torch.device("cpu"))
