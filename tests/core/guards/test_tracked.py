"""Looking through all objects of the process harms no other thread."""

from __future__ import annotations

import sys
import threading
import time

import torch
from torch import nn

from fsdp_compose.base.tracked import find_tracked, tracked_kinds

from harness import run_ranks
from models import by_block, data, seeded, square, two_blocks


def test_objects_of_some_classes_are_found() -> None:
    layer = nn.Linear(2, 2)
    assert nn.Linear in tracked_kinds()
    found = find_tracked(nn.Linear)
    assert any(module is layer for module in found)
    assert {type(module) for module in found} == {nn.Linear}
    output = layer(torch.ones(1, 2))
    wanted = output, output.detach(), output[0], layer.weight
    tensors = find_tracked(torch.Tensor, nn.Parameter)
    assert {id(tensor) for tensor in wanted} <= {id(tensor) for tensor in tensors}


def test_a_thread_that_fills_tuples_goes_on() -> None:
    """As a loader of data does, while the first forwards look for what was kept of weights."""

    def train(rank: int) -> None:
        many = [[number] for number in range(300_000)]
        failures: list[BaseException] = []
        ended = threading.Event()

        def load() -> None:
            try:
                while not ended.is_set():
                    tuple(time.sleep(0.0001) for _ in range(3))
            except SystemError as error:
                failures.append(error)

        loader = threading.Thread(target=load)
        loader.start()
        interval = sys.getswitchinterval()
        sys.setswitchinterval(1e-5)
        for seed in range(3):
            model = by_block(seeded(two_blocks))
            for _ in range(2):
                square(model, data(seed, rank)).backward()
        ended.set()
        loader.join()
        sys.setswitchinterval(interval)
        assert not failures
        assert len(many) == 300_000

    run_ranks(train)
