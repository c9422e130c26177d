"""Shapes of published models, as modules on the meta device: units of parameters, no forward."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import nn

Shape = tuple[int, ...]


@dataclass(frozen=True)
class Layer:
    """Parameters that are gathered together, and how many of them a token computes with."""

    shapes: tuple[Shape, ...]
    active: int

    @property
    def numel(self) -> int:
        return sum(map(math.prod, self.shapes))


@dataclass(frozen=True)
class Model:
    """A model as its units in the order in which they run."""

    name: str
    layers: tuple[Layer, ...]

    @property
    def numel(self) -> int:
        return sum(layer.numel for layer in self.layers)

    @property
    def active(self) -> int:
        return sum(layer.active for layer in self.layers)

    def build(self) -> nn.Module:
        return nn.Sequential(*(Parameters(layer.shapes) for layer in self.layers))


class Parameters(nn.Module):
    """The parameters of a layer, without memory."""

    def __init__(self, shapes: tuple[Shape, ...]) -> None:
        super().__init__()
        for index, shape in enumerate(shapes):
            param = nn.Parameter(torch.empty(shape, device="meta"))
            self.register_parameter(f"p{index}", param)


def _dense(*shapes: Shape) -> Layer:
    return Layer(shapes, sum(map(math.prod, shapes)))


def llama(name: str, width: int, hidden: int, depth: int, vocabulary: int = 128256) -> Model:
    """Llama 3: eight key and value heads of 128, untied embedding and head."""
    attention = ((width, width), (1024, width), (1024, width), (width, width))
    block = _dense(*attention, *((hidden, width),) * 2, (width, hidden), (width,), (width,))
    head = _dense((width,), (vocabulary, width))
    embedding = Layer(((vocabulary, width),), 0)
    return Model(name, (embedding, *(block,) * depth, head))


def mixtral() -> Model:
    """Mixtral 8x7B: 8 experts of 3 separate matrices, 2 of them active."""
    width, hidden = 4096, 14336
    attention: tuple[Shape, ...] = ((width, width), (1024, width), (1024, width), (width, width))
    attention += ((width,), (width,), (8, width))
    experts = ((hidden, width), (width, hidden), (hidden, width)) * 8
    active = sum(map(math.prod, attention)) + 2 * 3 * width * hidden
    embedding = Layer(((32000, width),), 0)
    head = _dense((width,), (32000, width))
    return Model("Mixtral 8x7B", (embedding, *(Layer(attention + experts, active),) * 32, head))


def gpt_oss() -> Model:
    """gpt-oss-120b: 128 experts fused into one tensor per matrix, 4 of them active."""
    width = 2880
    attention: tuple[Shape, ...] = ((4096, width), (4096,), (512, width), (512,), (512, width))
    attention += ((512,), (width, 4096), (width,), (64,), (width,), (width,), (128, width), (128,))
    experts = ((128, 2 * width, width), (128, 2 * width), (128, width, width), (128, width))
    active = sum(map(math.prod, attention)) + sum(map(math.prod, experts)) * 4 // 128
    embedding = Layer(((201088, width),), 0)
    head = _dense((width,), (201088, width))
    return Model("gpt-oss-120b", (embedding, *(Layer(attention + experts, active),) * 36, head))


def t5_3b() -> Model:
    """T5 of three billion parameters: 24 encoder and 24 decoder layers, one shared embedding."""
    width, heads, hidden = 1024, 4096, 16384
    attention = ((heads, width),) * 3 + ((width, heads), (width,))
    feed_forward = ((hidden, width), (width, hidden), (width,))
    encoder = [_dense(*attention), _dense(*feed_forward)] * 24
    decoder = [_dense(*attention), _dense(*attention), _dense(*feed_forward)] * 24
    embedding = _dense((32128, width), (32, 32), (32, 32), (width,), (width,))
    return Model("t5-3b", (embedding, *encoder, *decoder))


def even(name: str, numel: int, layers: int) -> Model:
    """So many parameters in layers of one size."""
    return Model(name, (_dense((numel // layers,)),) * layers)


MODELS = (
    llama("Llama-3 8B", 4096, 14336, 32),
    llama("Llama-3 70B", 8192, 28672, 80),
    llama("Llama-3 405B", 16384, 53248, 126),
    mixtral(),
    gpt_oss(),
)
