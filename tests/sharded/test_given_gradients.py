"""Gradients that a caller gives to autograd for sharded tensors: whole, or slices."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fsdp_compose as fc
from fsdp_compose.sharded import ShardedWeightError
from fsdp_compose.simulation import simulate

VECTOR = torch.arange(32.0).view(4, 8)


def backward(outputs: Any, w: Any, vector: Any) -> Tensor:
    outputs.backward(vector)
    return w.grad


def backward_of_several(outputs: Any, w: Any, vector: Any) -> Tensor:
    torch.autograd.backward([outputs, outputs], [vector, vector])
    return w.grad


WAYS: dict[str, Callable[[Any, Any, Any], Any]] = {
    "backward": backward,
    "backward of several": backward_of_several,
    "inputs": lambda out, w, v: (out.backward(v, inputs=[w]), w.grad)[1],
    "grad": lambda out, w, v: torch.autograd.grad(out, w, v)[0],
    "grad of several": lambda out, w, v: torch.autograd.grad([out, out], [w], [v, 2 * v])[0],
}
OUTPUTS: dict[str, Callable[[Any], tuple[Any, Tensor]]] = {
    "all": lambda w: (w**2, VECTOR),
    "row": lambda w: (w[1] * 2, VECTOR[0]),
    "one": lambda w: (w[1, 2] * 3, torch.tensor(5.0)),
    "product": lambda w: (
        torch.autograd.grad((w**3).sum(), w, create_graph=True)[0],
        VECTOR,
    ),
}


def make() -> nn.Module:
    module = nn.Linear(8, 4, bias=False)
    with torch.no_grad():
        module.weight.copy_(VECTOR / 7 - 1)
    return module


@pytest.mark.parametrize("world", [1, 2, 4])
@pytest.mark.parametrize("granularity", [1, "row"])
def test_whole_gradients_are_cut(world: int, granularity: Any) -> None:
    """Where a rank holds one row, autograd takes the others for a broadcast of it."""

    def ranks(way: str, what: str) -> list[Tensor]:
        model = fc.fully_shard(make(), granularity=granularity)
        out, vector = OUTPUTS[what](model.weight)
        found = WAYS[way](out, model.weight, vector)
        assert found.shape == (4, 8)
        return [found.full_tensor()]

    for way, call in WAYS.items():
        for what in OUTPUTS:
            plain = make()
            out, vector = OUTPUTS[what](plain.weight)
            wanted = call(out, plain.weight, vector)
            for (found,) in simulate(ranks, world, way, what):
                torch.testing.assert_close(found, wanted)


def test_slices_of_other_tensors_are_refused() -> None:
    """A gradient that is cut otherwise, or given for what is not sharded."""

    def ranks() -> None:
        model = fc.fully_shard(nn.Sequential(nn.Linear(2, 5), nn.Linear(2, 5)))
        p, q = model[0].weight, model[1].weight
        for fails, match in (
            (lambda: (2 * p).backward(q.detach()), "cut differently"),
            (lambda: torch.autograd.grad(2 * p, p, q.detach()), "cut differently"),
            (lambda: torch.autograd.grad([p.sum()], [p], [q[0, 0].detach()]), "is not sharded"),
            (lambda: (2 * p).backward(torch.ones(5, 2).requires_grad_()), "requires grad"),
        ):
            with pytest.raises(ShardedWeightError, match=match):
                fails()
        with pytest.raises(RuntimeError, match="Mismatch in shape"):
            (2 * p).backward(torch.ones(2))
        (2 * p).backward(p.detach() * 3)
        assert p.grad is not None and torch.equal(p.grad, p.detach() * 6)

    simulate(ranks, 2)
