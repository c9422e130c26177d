"""Two hosts, which are network namespaces of this machine with a cable between them.

Ranks of one read each other's memory; between the two all goes over the cable, which can be cut.
"""

from __future__ import annotations

import ctypes
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import fsdp_compose as fc
from fsdp_compose.base.torch_private import KEEPS_RANK_ORDER
from fsdp_compose.comm.shared_memory import all_segments

from harness import rank_errors, run_ranks
from models import Tower, by_block, data, seeded, sgd, square

HYBRID = fc.ShardingStrategy.HYBRID_SHARD
FUSED = fc.ShardingStrategy.HYBRID_SHARD_OPTIMIZER
WAYS: dict[str, dict[str, Any]] = {
    "released": {},
    "kept": {"strategy": fc.ShardingStrategy.SHARD_GRAD_OP},
    "whole": {"strategy": fc.ShardingStrategy.NO_SHARD},
    "within hosts": {"strategy": HYBRID},
    "state over all": {"strategy": FUSED},
    "gathered within hosts": {"reshard_after_forward": 2},
}
if not KEEPS_RANK_ORDER:  # torch 2.11 takes replicas within hosts only
    del WAYS["state over all"]


@dataclass(frozen=True)
class Hosts:
    """Names of two network namespaces; ``10.77.0.1`` and ``.2`` are their addresses."""

    names: tuple[str, str]

    def run(self, number: int, *words: str) -> None:
        command = ["ip", "-n", self.names[number], *words]
        subprocess.run(command, check=True, capture_output=True)

    def make(self) -> None:
        for name in self.names:
            subprocess.run(["ip", "netns", "add", name], check=True, capture_output=True)
        self.run(0, *"link add cable0 type veth peer name cable1 netns".split(), self.names[1])
        for number in range(2):
            self.run(number, *f"addr add 10.77.0.{number + 1}/24 dev cable{number}".split())
            for device in ("lo", f"cable{number}"):
                self.run(number, *f"link set {device} up".split())

    @contextmanager
    def joined(self, rank: int, world_size: int, port: int, timeout: float) -> Iterator[None]:
        """This process on a host, the first half of the ranks on the first, in a process group."""
        number = rank * 2 // world_size
        with open(f"/run/netns/{self.names[number]}", "rb") as namespace:
            if ctypes.CDLL(None, use_errno=True).setns(namespace.fileno(), 0):
                raise OSError(ctypes.get_errno(), "setns")
        os.environ["GLOO_SOCKET_IFNAME"] = f"cable{number}"
        address, patience = f"tcp://10.77.0.1:{port}", timedelta(seconds=timeout)
        dist.init_process_group("gloo", address, rank=rank, world_size=world_size, timeout=patience)
        yield


@pytest.fixture(scope="module")
def hosts() -> Iterator[Hosts]:
    if sys.platform != "linux" or shutil.which("ip") is None:
        pytest.skip("needs Linux and iproute2")
    made = Hosts((f"fc{os.getpid()}a", f"fc{os.getpid()}b"))
    try:
        try:
            made.make()
        except subprocess.CalledProcessError:
            pytest.skip("may not make network namespaces, or cables between them, here")
        yield made
    finally:
        for name in made.names:
            subprocess.run(["ip", "netns", "del", name], capture_output=True, check=False)


def options_of(name: str) -> dict[str, Any]:
    """For ``fully_shard``, on four ranks."""
    way = WAYS[name]
    is_hybrid = way.get("strategy") in (HYBRID, FUSED)
    return way | ({"mesh": init_device_mesh("cpu", (2, 2))} if is_hybrid else {})


def train(model: nn.Module, *ranks: int) -> None:
    """Two steps of SGD on the data of ``ranks``."""
    optim = sgd(model.parameters())
    for seed in range(2):
        optim.zero_grad()
        square(model, torch.cat([data(seed, rank) for rank in ranks])).backward()
        optim.step()


def test_all_strategies_over_a_cable(hosts: Hosts) -> None:
    """The weights of one process on all the data, to a rounding."""
    plain = seeded(Tower)
    train(plain, *range(4))
    wanted = {name: value.detach() for name, value in plain.state_dict().items()}

    def ranks(rank: int) -> None:
        with hosts.joined(rank, 4, 29411, 30.0):
            for name in WAYS:
                model = by_block(seeded(Tower), **options_of(name))
                train(model, rank)
                for key, value in model.state_dict().items():
                    torch.testing.assert_close(value.full_tensor(), wanted[key], msg=name)
            assert {len(segments.peers) for segments in all_segments()} == {1}

    run_ranks(ranks, 4, init=False)


def count_cable(rank: int) -> int:
    """Bytes that the cable of this host has carried, both ways."""
    found = Path("/proc/net/dev").read_text().split(f"cable{rank // 2}:")[1].split()
    return int(found[0]) + int(found[8])


TIMES = {"released": 6, "kept": 4, "within hosts": 2, "state over all": 2}


@pytest.mark.parametrize(("name", "times"), [(name, TIMES[name]) for name in TIMES if name in WAYS])
def test_what_the_cable_carries(hosts: Hosts, name: str, times: int) -> None:
    """Each of two ranks of a host is sent the shards of the other's by itself, and sends its own.

    That is a gather's bytes both ways, and so is a reduction; nothing that is for its own host.
    """
    nbytes = 3 * 512 * 512 * 8

    def ranks(rank: int) -> int:
        with hosts.joined(rank, 4, 29414, 30.0):
            options = options_of(name)
            model = seeded(
                lambda: nn.Sequential(*(nn.Linear(512, 512, bias=False) for _ in range(3)))
            )
            fc.fully_shard(model, units=fc.wrap.by_class({nn.Linear}), **options)
            optim = sgd(model.parameters())
            dist.barrier()
            before = count_cable(rank)
            for _ in range(3):
                model(torch.ones(1, 512).double()).sum().backward()
                optim.step()
            dist.barrier()
            return count_cable(rank) - before

    carried = max(run_ranks(ranks, 4, init=False)) / 3  # by who looked before any had begun
    assert times <= carried / nbytes < times * 1.1, (carried / nbytes, times)


def test_a_killed_rank_of_another_host(hosts: Hosts) -> None:
    """It is named at once, by those that it reaches over the cable and in memory."""

    def ranks(rank: int) -> str:
        with hosts.joined(rank, 4, 29412, 30.0):
            model = by_block(seeded(Tower))
            square(model, data(0, rank)).backward()
            if rank == 3:
                os.kill(os.getpid(), signal.SIGKILL)
            with pytest.raises(RuntimeError, match="rank 3 does not answer"):
                train(model, rank)
            raise KeyError("told of it")

    errors = rank_errors(ranks, 4, init=False)
    assert [error is not None and "told of it" in str(error) for error in errors[:3]] == [True] * 3


def test_a_cable_that_is_cut(hosts: Hosts, tmp_path: Path) -> None:
    """Each side says for whom it waits, once the timeout of the process group is over."""

    def ranks(rank: int) -> str:
        with hosts.joined(rank, 2, 29413, 4.0):
            model = by_block(seeded(Tower))
            square(model, data(0, rank)).backward()
            (tmp_path / str(rank)).touch()
            while not all((tmp_path / str(other)).exists() for other in range(2)):
                time.sleep(0.01)
            if rank == 0:
                hosts.run(0, "link", "set", "cable0", "down")
            with pytest.raises(RuntimeError) as raised:
                train(model, rank)
            return str(raised.value)

    try:
        for rank, text in enumerate(run_ranks(ranks, 2, init=False)):
            assert f"rank {1 - rank} does not answer" in text, text
    finally:
        hosts.run(0, "link", "set", "cable0", "up")
