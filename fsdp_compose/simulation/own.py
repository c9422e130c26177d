"""What a simulated rank has of its own, though a process has one of each: changed at every switch.

Random number generators, torch's list of groups, the package's own state (``base/process.py``), the
environment variables of a launcher, warning filters, the default dtype, what scopes of DTensor
change. Each rank begins with what a new process has.
"""

from __future__ import annotations

import copy
import os
import random
import sys
import warnings
from typing import Any

import torch

from fsdp_compose.base.process import Clock, Process, here
from fsdp_compose.base.torch_groups import (
    RankWorld,
    get_dispatch,
    get_world,
    set_dispatch,
    set_world,
)
from fsdp_compose.comm.waiting import NoWatch

_SHARED = ("WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


class Own:
    """One rank's state, while another rank runs; ``leave`` and ``enter`` exchange it."""

    process: dict[str, Any]
    world: Any
    torch_random: torch.Tensor
    python_random: Any
    numpy_generator: Any
    filters: Any
    main: Any
    dtype: torch.dtype
    dispatch: dict[str, Any] | None

    def __init__(self, environment: dict[str, str | None]) -> None:
        self.environment = environment
        self.leave()

    def leave(self) -> None:
        """Keep what the rank that runs has, before another one runs."""
        self.process = here.__dict__
        self.world = get_world()
        self.torch_random = torch.get_rng_state()
        self.python_random = random.getstate()
        numpy = sys.modules.get("numpy")
        self.numpy_generator = None if numpy is None else numpy.random.get_bit_generator()
        self.filters = warnings.filters
        self.main = sys.modules.get("__main__")
        self.dtype = torch.get_default_dtype()
        self.dispatch = get_dispatch()

    def enter(self) -> None:
        """Give the process what this rank has."""
        for name, value in self.environment.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value
        here.__dict__ = self.process
        set_world(self.world)
        torch.set_rng_state(self.torch_random)
        random.setstate(self.python_random)
        if self.numpy_generator is not None:
            sys.modules["numpy"].random.set_bit_generator(self.numpy_generator)
        warnings.filters = self.filters
        if self.main is not None:
            sys.modules["__main__"] = self.main
        torch.set_default_dtype(self.dtype)
        if self.dispatch is None:
            self.dispatch = _copy_dispatch()  # another rank was the first to import DTensor
        if self.dispatch is not None:
            set_dispatch(self.dispatch)


def _copy_dispatch() -> dict[str, Any] | None:
    now = get_dispatch()
    return None if now is None else {name: copy.copy(value) for name, value in now.items()}


def caller() -> Own:
    """What this process has now, to be given back at the end."""
    names = ("RANK", "LOCAL_RANK", *_SHARED)
    return Own({n: os.environ.get(n) for n in names})


def share_environment(size: int) -> None:
    """Set what a launcher sets alike for all of ``size`` ranks."""
    for name, value in zip(_SHARED, (str(size), str(size), "localhost", "29500"), strict=True):
        os.environ[name] = value


def new_rank(rank: int, seed: int, clock: Clock, simulated: Any) -> Own:
    """What a new process has that a launcher started as ``rank``.

    Its random number generators are seeded with ``seed``, on every rank alike.
    """
    own = Own({"RANK": str(rank), "LOCAL_RANK": str(rank)})
    # Torch's and Python's own tables belong to the process, so what was added to them does too.
    process = Process(
        watch=NoWatch(),
        pytrees=here.pytrees,
        installed=here.installed,
        is_debugging=here.is_debugging,
        clock=clock,
        simulated=simulated,
    )
    own.process = vars(process)
    own.world = RankWorld()
    own.torch_random = torch.Generator().manual_seed(seed).get_state()
    own.python_random = random.Random(seed).getstate()
    if (numpy := sys.modules.get("numpy")) is not None:
        legacy: Any = numpy.random.RandomState(seed % 2**32)  # as ``numpy.random.seed`` makes
        own.numpy_generator = legacy._bit_generator
    own.filters, own.dispatch = list(warnings.filters), _copy_dispatch()
    return own
