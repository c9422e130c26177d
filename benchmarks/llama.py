"""A Llama-like decoder in plain PyTorch: RMSNorm, rotary positions, grouped heads, SwiGLU."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn


@dataclass(frozen=True)
class LlamaConfig:
    """Shape of a model; heads have ``width / heads`` channels."""

    width: int
    hidden: int
    depth: int
    heads: int
    kv_heads: int
    vocabulary: int
    rope_base: float = 500000.0


SIZES = {
    "tiny": LlamaConfig(64, 128, 2, 4, 2, 256),
    "125M": LlamaConfig(768, 2048, 12, 12, 12, 32000),
    "1B": LlamaConfig(2048, 8192, 16, 32, 8, 32000),
    "8B layers": LlamaConfig(4096, 14336, 4, 32, 8, 32000),
}
"""By name; the last has four of the 32 layers of Llama 3 8B."""


class Attention(nn.Module):
    """Causal attention in which several query heads share a key and a value head."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.heads, self.kv_heads = config.heads, config.kv_heads
        channels = config.width // config.heads
        self.q = nn.Linear(config.width, config.width, bias=False)
        self.k = nn.Linear(config.width, channels * config.kv_heads, bias=False)
        self.v = nn.Linear(config.width, channels * config.kv_heads, bias=False)
        self.out = nn.Linear(config.width, config.width, bias=False)

    def forward(self, x: Tensor, rotation: tuple[Tensor, Tensor]) -> Tensor:
        batch, time, width = x.shape
        q = self.q(x).view(batch, time, self.heads, -1).transpose(1, 2)
        k = self.k(x).view(batch, time, self.kv_heads, -1).transpose(1, 2)
        v = self.v(x).view(batch, time, self.kv_heads, -1).transpose(1, 2)
        q, k = rotate(q, *rotation), rotate(k, *rotation)
        repeats = self.heads // self.kv_heads
        k, v = k.repeat_interleave(repeats, 1), v.repeat_interleave(repeats, 1)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        found: Tensor = self.out(y.transpose(1, 2).reshape(batch, time, width))
        return found


class Block(nn.Module):
    """One layer, the unit of sharding."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.attention_norm = nn.RMSNorm(config.width)
        self.attention = Attention(config)
        self.norm = nn.RMSNorm(config.width)
        self.gate = nn.Linear(config.width, config.hidden, bias=False)
        self.up = nn.Linear(config.width, config.hidden, bias=False)
        self.down = nn.Linear(config.hidden, config.width, bias=False)

    def forward(self, x: Tensor, rotation: tuple[Tensor, Tensor]) -> Tensor:
        x = x + self.attention(self.attention_norm(x), rotation)
        y = self.norm(x)
        found: Tensor = x + self.down(F.silu(self.gate(y)) * self.up(y))
        return found


class Llama(nn.Module):
    """Tokens ``(batch, time)`` to the mean loss of the next token."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.config = config
        self.embedding = nn.Embedding(config.vocabulary, config.width)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.depth))
        self.norm = nn.RMSNorm(config.width)
        self.head = nn.Linear(config.width, config.vocabulary, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens[:, :-1])
        rotation = rotations(self.config, x)
        for block in self.blocks:
            x = block(x, rotation)
        logits = self.head(self.norm(x))
        return F.cross_entropy(logits.flatten(0, 1).float(), tokens[:, 1:].flatten())


def rotations(config: LlamaConfig, x: Tensor) -> tuple[Tensor, Tensor]:
    """Cosines and sines ``(time, channels / 2)`` for ``x`` ``(batch, time, width)``."""
    channels = config.width // config.heads
    exponents = torch.arange(0, channels, 2, device=x.device) / channels
    angles = torch.outer(torch.arange(x.shape[1], device=x.device), config.rope_base**-exponents)
    return angles.cos().to(x.dtype), angles.sin().to(x.dtype)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Turn pairs of channels of ``x`` ``(batch, heads, time, channels)`` by their positions."""
    first, second = x.chunk(2, -1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], -1)
