"""After a backward that failed, the next call computes on what it is given."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.func import functional_call

from fsdp_compose import MixedPrecision

from harness import run_ranks
from models import Tower, by_block, data, seeded, square


class OnPurpose(Exception):
    """What a hook raises in backward."""


def fail_in_backward(model: nn.Module, rank: int) -> None:
    def fail(*_: Any) -> None:
        raise OnPurpose

    hook = model.blocks[0].register_full_backward_hook(fail)
    with pytest.raises(OnPurpose):
        square(model, data(0, rank)).backward()
    hook.remove()


@pytest.mark.parametrize("how", ["plain", "transform", "full precision"])
def test_functional_call_after_a_failure(how: str) -> None:
    """Tensors given for one call are read by it: not the weights, and not the failed pass's."""

    def ranks(rank: int) -> None:
        mp = MixedPrecision(full_precision_in_eval=how == "full precision")
        model, plain = by_block(seeded(Tower), mp_policy=mp), seeded(Tower)
        fail_in_backward(model, rank)
        weights = {name: param.detach() * 1.5 for name, param in plain.named_parameters()}
        x = data(1, rank)
        wanted = functional_call(plain, weights, (x,))
        if how == "transform":
            call = lambda x: functional_call(model, weights, (x,))  # noqa: E731
            found = torch.vmap(call)(x)
        else:
            model.train(how == "plain")
            found = functional_call(model, weights, (x,))
        torch.testing.assert_close(found, wanted)

    run_ranks(ranks, 2)
