"""Trainable parameters around sharded units that no unit has are an error that names them (D18)."""

from __future__ import annotations

import tempfile
from pathlib import Path

import pytest
import torch
from torch import nn

import fsdp_compose as fc
from fsdp_compose import fully_shard

from harness import run_ranks
from models import Block, Tower, data, seeded, sgd, square


def shard_blocks(model: nn.Module, **options: object) -> nn.Module:
    for module in model.modules():
        if isinstance(module, Block):
            fully_shard(module, **options)
    return model


def test_plain_siblings_of_units_are_an_error() -> None:
    """At the first backward, at clipping and at saving; not when sharded, frozen or ignored."""
    wanted = r"'first\.weight', 'first\.bias', 'head\.weight', 'head\.bias'.*fully_shard\(model\)"

    def check(rank: int, folder: str) -> None:
        model = shard_blocks(seeded(Tower))
        with torch.no_grad():
            model(data(0, rank))  # an evaluation first
        with pytest.raises(RuntimeError, match="backward: .*" + wanted):
            square(model, data(0, rank)).backward()
        with pytest.raises(RuntimeError, match="backward: .*" + wanted):
            nn.Sequential(model)(data(0, rank)).sum().backward()
        with pytest.raises(RuntimeError, match="clip_grad_norm_: .*" + wanted):
            fc.clip_grad_norm_(model, 1.0)
        for save in (fc.save_full, fc.save_checkpoint):
            with pytest.raises(RuntimeError, match=wanted):
                save(Path(folder) / "saved", model)
        fully_shard(model)
        square(model, data(0, rank)).backward()
        fc.clip_grad_norm_(model, 1.0)
        sgd(model.parameters()).step()
        frozen = shard_blocks(seeded(Tower))
        frozen.first.requires_grad_(False), frozen.head.requires_grad_(False)
        square(frozen, data(0, rank)).backward()
        told = seeded(Tower)
        shard_blocks(told, ignored=[told.first, told.head.weight, told.head.bias])
        square(told, data(0, rank)).backward()
        fc.clip_grad_norm_(told, 1.0)

    with tempfile.TemporaryDirectory() as folder:
        run_ranks(check, 2, folder=folder)
