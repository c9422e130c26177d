"""What torch's own FSDP has sharded is refused by name: its parameters are slices by then."""

from __future__ import annotations

import re
from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.fsdp import fully_shard as fsdp2

import fsdp_compose as fc

from harness import run_ranks
from models import Tower, data, seeded, square


def wrap(module: nn.Module) -> nn.Module:
    return FullyShardedDataParallel(module, device_id=torch.device("cpu"), use_orig_params=True)


def wrap_part(model: nn.Module) -> nn.Module:
    model.blocks[1] = wrap(model.blocks[1])
    return model


def shard_part(model: nn.Module) -> nn.Module:
    fsdp2(model.blocks[1])
    return model


MADE: dict[str, tuple[Callable[[nn.Module], nn.Module], str]] = {
    "FSDP1": (wrap_part, "'blocks.1', which torch.distributed.fsdp's FullyShardedDataParallel has"),
    "FSDP1 around": (wrap, "is what torch.distributed.fsdp's FullyShardedDataParallel has sharded"),
    "FSDP2": (shard_part, "'blocks.1', which torch.distributed.fsdp's fully_shard has"),
}


def test_torchs_fsdp_inside_is_refused_by_name() -> None:
    """And left to torch where it is ignored."""

    def ranks(rank: int) -> None:
        for make, text in MADE.values():
            for init in ("verify", "broadcast"):
                with pytest.raises(ValueError, match=re.escape(text)):
                    fc.fully_shard(make(seeded(Tower)), init=init)
        model = shard_part(seeded(Tower))
        fc.fully_shard(model, ignored=[model.blocks[1]])
        square(model, data(0, rank)).backward()
        assert model.head.weight.grad is not None and model.blocks[1].up.weight.grad is not None

    run_ranks(ranks, 2)
