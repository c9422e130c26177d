"""``fsdp-compose doctor``: what this machine has, what is wrong with it, and what to do."""

from __future__ import annotations

import json
import os
import platform
import shutil
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from importlib import metadata
from importlib.util import find_spec
from typing import Literal

from fsdp_compose.base.environment import wants_debugging
from fsdp_compose.cli.launch import AGENT_STORE, free_port, usable_cores

State = Literal["ok", "note", "wrong"]
PATIENCE = 60.0  # seconds in which two ranks must import torch and gather


@dataclass(frozen=True)
class Finding:
    """One thing that was looked at; ``cure`` is what to do where it is wrong."""

    state: State
    what: str
    cure: str = ""

    def __str__(self) -> str:
        mark = {"ok": "ok   ", "note": "note ", "wrong": "WRONG"}[self.state]
        return f"{mark}  {self.what}" + (f"\n       -> {self.cure}" if self.cure else "")


def run_doctor(as_json: bool) -> int:
    """Print what was found; the exit code is 1 where something is wrong."""
    findings: list[Finding] = []
    for check in CHECKS:
        for finding in check():
            findings.append(finding)
            if not as_json:
                print(finding, flush=True)
    wrong = sum(finding.state == "wrong" for finding in findings)
    if as_json:
        print(json.dumps([asdict(finding) for finding in findings], indent=2))
    else:
        print("\nnothing is wrong" if not wrong else f"\n{wrong} of these are wrong")
    return 1 if wrong else 0


def check_software() -> Iterator[Finding]:
    """Python, torch and what the extras bring."""
    yield Finding("ok", f"Python {platform.python_version()} on {platform.platform(terse=True)}")
    try:
        import torch
    except ImportError as error:
        cure = "pip install 'torch>=2.11'"
        yield Finding("wrong", f"torch cannot be imported: {error}", cure)
        return
    version = tuple(int(n) for n in torch.__version__.split("+")[0].split(".")[:2])
    if version < (2, 11):
        cure = "pip install --upgrade 'torch>=2.11'"
        yield Finding("wrong", f"torch {torch.__version__} is too old", cure)
    else:
        yield Finding("ok", f"torch {torch.__version__}")
    for name, use in (
        ("optree", ""),
        ("matplotlib", "pictures"),
        ("rich", "the progress bar of the demo"),
    ):
        if find_spec(name):
            yield Finding("ok", f"{name} {metadata.version(name)}")
        elif use:
            yield Finding(
                "note", f"{name} is not installed; it is for {use}", f"pip install {name}"
            )
        else:
            yield Finding("wrong", f"{name} is not installed", f"pip install {name}")


def check_backends() -> Iterator[Finding]:
    """What collectives can run on."""
    try:
        import torch
        import torch.distributed as dist
    except ImportError:  # which ``check_software`` has found
        return
    if not dist.is_available():
        cure = "install a torch that was built with distributed"
        yield Finding("wrong", "torch.distributed is not available", cure)
        return
    names = [n for n in ("gloo", "nccl", "mpi") if getattr(dist, f"is_{n}_available")()]
    yield Finding("ok", f"backends: {', '.join(names)}")
    count = torch.cuda.device_count()
    if count and "nccl" not in names:
        cure = "install a torch for CUDA"
        yield Finding("wrong", f"{count} GPUs, but no NCCL in this torch", cure)
    elif count:
        free = [torch.cuda.mem_get_info(i)[0] / 2**30 for i in range(count)]
        yield Finding("ok", f"{count} GPUs, {torch.cuda.get_device_name(0)}")
        if min(free) < 1:
            cure = "nvidia-smi shows which processes hold it"
            yield Finding("wrong", f"a GPU has {min(free):.1f} GiB of free memory", cure)
    else:
        yield Finding("note", "no GPU is visible: ranks compute on CPUs, over gloo")


def check_machine() -> Iterator[Finding]:
    """Cores, shared memory, open files."""
    cores, threads = usable_cores(), os.environ.get("OMP_NUM_THREADS")
    yield Finding("ok", f"{cores} cores" + (f", OMP_NUM_THREADS={threads}" if threads else ""))
    if threads and threads.isdecimal() and int(threads) > cores:
        cure = "unset it, or set it to cores over ranks"
        yield Finding("note", f"OMP_NUM_THREADS={threads} is more than the cores", cure)
    if os.path.isdir("/dev/shm"):
        free = shutil.disk_usage("/dev/shm").free / 2**20
        small = free < 64
        cure = "run the container with more: --shm-size=8g" if small else ""
        yield Finding("note" if small else "ok", f"{free:,.0f} MiB of shared memory are free", cure)


def check_network() -> Iterator[Finding]:
    """Interfaces, names, ports, and what the environment says of them."""
    names = [name for _, name in socket.if_nameindex()]
    yield Finding("ok", f"interfaces: {', '.join(names)}")
    for variable in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME", "TP_SOCKET_IFNAME"):
        value = os.environ.get(variable, "")  # NCCL takes ^a,b for all but those
        wanted = [n.lstrip("=") for n in value.split(",") if n and value[0] != "^"]
        unknown = [n for n in wanted if not any(name.startswith(n) for name in names)]
        if unknown:
            cure = f"set it to one of {', '.join(names)}, or unset it"
            yield Finding("wrong", f"{variable} names {unknown[0]!r}, which is not there", cure)
    host = socket.gethostname()
    try:
        yield Finding("ok", f"host name {host} is {socket.gethostbyname(host)}")
    except OSError as error:
        cure = "add it to /etc/hosts, or set GLOO_SOCKET_IFNAME=lo for ranks on this machine"
        yield Finding("note", f"host name {host} cannot be resolved: {error}", cure)
    yield from _check_launch()


def _check_launch() -> Iterator[Finding]:
    """The variables of a launcher, and the port that they name."""
    names = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    found = [name for name in names if name in os.environ]
    if found and len(found) < len(names):
        missing = ", ".join(name for name in names if name not in os.environ)
        cure = "start the script with torchrun, which sets all of them, or unset what is there"
        yield Finding("wrong", f"{', '.join(found)} is set, {missing} is not", cure)
    port = os.environ.get("MASTER_PORT", "")
    if port and not (port.isdecimal() and 0 < int(port) < 65536):
        yield Finding("wrong", f"MASTER_PORT is {port!r}", "set it to a number from 1 to 65535")
    elif port and os.environ.get("MASTER_ADDR") in ("127.0.0.1", "localhost"):
        with socket.socket() as listener:
            # As torch does: what an ended job has left there for a minute is not in the way.
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                listener.bind(("127.0.0.1", int(port)))
            except OSError as error:
                cure = "another job has it; choose another MASTER_PORT, or end that job"
                yield Finding("wrong", f"port {port} cannot be used: {error}", cure)
    if wants_debugging():
        yield Finding(
            "note", "FSDP_COMPOSE_DEBUG is set: every collective is compared, which costs"
        )


def check_two_ranks() -> Iterator[Finding]:
    """A gather between two ranks of this machine, as a unit's is."""
    others = ("RANK", "WORLD_SIZE", AGENT_STORE)
    environment = {k: v for k, v in os.environ.items() if k not in others}
    environment |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "WORLD_SIZE": "2"}
    environment["OMP_NUM_THREADS"] = "1"
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", _GATHER],
            env={**environment, "RANK": str(rank), "LOCAL_RANK": str(rank)},
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    said: list[str] = []
    try:
        for rank in ranks:
            said.append(rank.communicate(timeout=PATIENCE)[1])
    except subprocess.TimeoutExpired:
        cure = "set GLOO_SOCKET_IFNAME to an interface that works, such as lo; look at firewalls"
        yield Finding("wrong", f"two ranks did not gather within {PATIENCE:.0f} s", cure)
        return
    finally:
        for rank in ranks:
            rank.kill()
            rank.communicate()
    if any(rank.returncode for rank in ranks):
        lines = "".join(said).strip().splitlines() or ["they said nothing"]
        cure = "the last line is what a rank raised; see the page on debugging"
        yield Finding("wrong", f"two ranks could not gather: {lines[-1]}", cure)
    else:
        yield Finding("ok", "two ranks gathered, trained a step and agree")


_GATHER = """
import torch, torch.distributed as dist
from datetime import timedelta
import fsdp_compose as fc
dist.init_process_group("gloo", timeout=timedelta(seconds=30))
torch.manual_seed(0)
model = fc.fully_shard(torch.nn.Linear(64, 64))
model(torch.ones(1, 64)).sum().backward()
assert float(model.bias.grad.full_tensor().sum()) == 64
dist.destroy_process_group()
"""

CHECKS: tuple[Callable[[], Iterator[Finding]], ...] = (
    check_software,
    check_backends,
    check_machine,
    check_network,
    check_two_ranks,
)
