"""What torch's own FSDP has sharded is refused by name: its parameters are slices by then."""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.fsdp import fully_shard as fsdp2

import fsdp_compose as fc
from fsdp_compose.sharded import ShardedWeightError

from harness import run_ranks
from models import Tower, by_block, data, seeded, square


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


def all_reduce(model: nn.Module) -> None:
    dist.all_reduce(model.head.weight.grad)


def step_cut(model: nn.Module) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of torch's, that what it imports is deprecated
        from torch.distributed.optim import ZeroRedundancyOptimizer
    ZeroRedundancyOptimizer(model.parameters(), torch.optim.SGD, lr=0.1).step()


REFUSED: dict[str, Callable[[nn.Module], object]] = {
    r"torch.distributed.fsdp was called around modules that are sharded here": fsdp2,
    r"torch.cat needs .* torch.distributed.fsdp was called around": wrap,
    r"all_reduce needs .* averaged over the ranks of a unit in backward": all_reduce,
    r"ZeroRedundancyOptimizer keeps each rank's share .* cut over the ranks already": step_cut,
}


def test_what_else_averages_and_cuts_is_told_so() -> None:
    """Torch's FSDP around units, collectives on gradients, its optimizer that cuts state."""

    def ranks(rank: int) -> None:
        for text, call in REFUSED.items():
            model = by_block(seeded(Tower))
            square(model, data(0, rank)).backward()
            with pytest.raises(ShardedWeightError, match=text):
                call(model)

    run_ranks(ranks, 2)
