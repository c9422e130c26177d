"""A small decoder-only transformer in plain PyTorch that knows nothing about sharding.

The model the examples, tests and benchmarks share: pre-norm blocks, causal attention through
``scaled_dot_product_attention``, learned positions, byte-level by default (256 tokens).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

__all__ = ["GPT", "Block", "GPTConfig"]


@dataclass(frozen=True)
class GPTConfig:
    """Shape of a GPT. The default is about three million parameters."""

    vocab_size: int = 256
    block_size: int = 256
    n_layer: int = 6
    n_head: int = 6
    n_embd: int = 192
    dropout: float = 0.0
    tie_weights: bool = False

    def __post_init__(self) -> None:
        if self.n_embd % self.n_head:
            raise ValueError(
                f"n_embd must be a multiple of n_head, found n_embd={self.n_embd} and "
                f"n_head={self.n_head}"
            )


class CausalSelfAttention(nn.Module):
    """Multi-head self-attention in which a position sees itself and what came before."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.n_head = config.n_head
        self.dropout = config.dropout
        self.qkv = nn.Linear(config.n_embd, 3 * config.n_embd)
        self.proj = nn.Linear(config.n_embd, config.n_embd)

    def forward(self, x: Tensor) -> Tensor:
        batch, time, width = x.shape
        heads = (batch, time, self.n_head, width // self.n_head)
        q, k, v = (t.view(heads).transpose(1, 2) for t in self.qkv(x).split(width, dim=-1))
        dropout = self.dropout if self.training else 0.0
        y = F.scaled_dot_product_attention(q, k, v, dropout_p=dropout, is_causal=True)
        out: Tensor = self.proj(y.transpose(1, 2).reshape(batch, time, width))
        return F.dropout(out, self.dropout, self.training)


class MLP(nn.Module):
    """Two linear layers, four times as wide in between, with a GELU."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.dropout = config.dropout
        self.up = nn.Linear(config.n_embd, 4 * config.n_embd)
        self.down = nn.Linear(4 * config.n_embd, config.n_embd)

    def forward(self, x: Tensor) -> Tensor:
        return F.dropout(self.down(F.gelu(self.up(x))), self.dropout, self.training)


class Block(nn.Module):
    """One transformer layer; the natural unit of sharding and of activation checkpointing."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.ln_1 = nn.LayerNorm(config.n_embd)
        self.attn = CausalSelfAttention(config)
        self.ln_2 = nn.LayerNorm(config.n_embd)
        self.mlp = MLP(config)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(self.ln_1(x))
        x = x + self.mlp(self.ln_2(x))
        return x


class GPT(nn.Module):
    """Token and position embeddings, ``n_layer`` blocks, a final norm and a linear head.

    The weights depend only on the config and on the state of torch's default generator, so
    ``torch.manual_seed(s); GPT(config)`` builds the same model on every rank.

    With ``activation_checkpointing`` set, a training forward keeps only each block's input and
    runs the block again in backward.
    """

    activation_checkpointing = False

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.config = config
        self.wte = nn.Embedding(config.vocab_size, config.n_embd)
        self.wpe = nn.Embedding(config.block_size, config.n_embd)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.n_layer))
        self.ln_f = nn.LayerNorm(config.n_embd)
        self.lm_head = nn.Linear(config.n_embd, config.vocab_size, bias=False)
        if config.tie_weights:
            self.lm_head.weight = self.wte.weight
        self.init_weights()

    @torch.no_grad()
    def init_weights(self) -> None:
        """GPT-2's initialisation: N(0, 0.02), residual outputs scaled by 1/sqrt(2 n_layer)."""
        residual_std = 0.02 / (2 * self.config.n_layer) ** 0.5
        for name, module in self.named_modules():
            if isinstance(module, nn.LayerNorm):
                module.reset_parameters()
            elif isinstance(module, (nn.Linear, nn.Embedding)):
                residual = name.endswith(("attn.proj", "mlp.down"))
                module.weight.normal_(0.0, residual_std if residual else 0.02)
                if isinstance(module, nn.Linear) and module.bias is not None:
                    module.bias.zero_()

    def forward(self, idx: Tensor, targets: Tensor | None = None) -> Tensor | tuple[Tensor, Tensor]:
        """Logits of shape (batch, time, vocab) for integer tokens ``idx`` of shape (batch, time).

        With ``targets`` of the same shape, ``(logits, loss)``: the mean cross-entropy in nats, in
        fp32 whatever the dtype of the compute.
        """
        time = idx.shape[1]
        if time > self.config.block_size:
            raise ValueError(
                f"the input is {time} tokens long, this model's block_size is "
                f"{self.config.block_size}"
            )
        x = self.wte(idx) + self.wpe(torch.arange(time, device=idx.device))
        x = F.dropout(x, self.config.dropout, self.training)
        recompute = self.activation_checkpointing and self.training and torch.is_grad_enabled()
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if recompute else block(x)
        logits: Tensor = self.lm_head(self.ln_f(x))
        if targets is None:
            return logits
        return logits, F.cross_entropy(logits.float().flatten(0, 1), targets.flatten())

    @torch.no_grad()
    def generate(
        self,
        idx: Tensor,
        new_tokens: int,
        temperature: float = 1.0,
        top_k: int | None = None,
        generator: torch.Generator | None = None,
    ) -> Tensor:
        """``idx`` of shape (batch, time) with ``new_tokens`` sampled tokens appended.

        ``temperature`` 0 takes the likeliest token. On several ranks every rank must ask for the
        same number of tokens, because each token is one forward.
        """
        for _ in range(new_tokens):
            logits = self(idx[:, -self.config.block_size :])[:, -1].float()
            if temperature == 0.0:
                token = logits.argmax(-1, keepdim=True)
            else:
                logits = logits / temperature
                if top_k is not None:
                    kth = logits.topk(min(top_k, logits.shape[-1])).values[:, -1:]
                    logits = logits.masked_fill(logits < kth, float("-inf"))
                token = torch.multinomial(logits.softmax(-1), 1, generator=generator)
            idx = torch.cat((idx, token), dim=1)
        return idx
