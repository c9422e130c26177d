"""What a load refuses before it writes: names left over, calls or folders that differ by rank."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.utils.parametrizations import weight_norm

import fsdp_compose as fc

from harness import simulate_ranks

Load = Callable[..., Any]


class Hooked(nn.Module):
    """A module that torch's parametrization gives a load hook; ``new`` is what files may lack."""

    def __init__(self, has_new: bool) -> None:
        super().__init__()
        self.normed = weight_norm(nn.Linear(4, 4))
        if has_new:
            self.new = nn.Linear(2, 2)


def save_both(folder: Path, model: nn.Module) -> None:
    fc.save_checkpoint(folder / "parts", model)
    fc.save_full(folder / "whole", model)


LOADS: dict[str, Load] = {
    "load_checkpoint": lambda at, model, **kw: fc.load_checkpoint(at / "parts", model, **kw),
    "load_full": lambda at, model, **kw: fc.load_full(at / "whole", model, **kw),
}


@pytest.mark.parametrize("name", LOADS)
@pytest.mark.parametrize("saved_new", [False, True])
def test_strict_holds_beside_load_hooks(tmp_path: Path, name: str, saved_new: bool) -> None:
    """Where a submodule has a load hook, missing and unexpected names raise too."""
    save_both(tmp_path, Hooked(saved_new))

    def run(rank: int) -> None:
        model = fc.fully_shard(Hooked(not saved_new))
        wrong = "Unexpected" if saved_new else "Missing"
        with pytest.raises(RuntimeError, match=rf"(?s)hooks of its own.*{wrong} key.*new\.weight"):
            LOADS[name](tmp_path, model)
        LOADS[name](tmp_path, model, strict=False)
        saved = Hooked(saved_new)
        LOADS[name](tmp_path, saved)
        weight = fc.state_dict(model)["normed.bias"]
        assert torch.equal(weight, saved.normed.bias)

    for world in (1, 2):
        simulate_ranks(run, world)
