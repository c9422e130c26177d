"""Faults for real under torchrun's agent: what ranks say, how fast they end, what they leave.

Every cell starts torch's elastic agent (which ``torchrun`` is the command of; here its ranks are
forked, so that a cell takes seconds). It trains a small model with a checkpoint after each step. In
step 2 one thing happens to rank 1, in one place:

- killed (SIGKILL), stopped (SIGSTOP), raising, out of memory (the allocator refuses under
  RLIMIT_AS), disk full (a file system of 512 KB where one can be mounted, else RLIMIT_FSIZE),
  Ctrl-C (SIGINT to the agent and all ranks, as a terminal sends it),
- in forward, backward, the optimizer's step, or the save.

Then every process must end within the process group's timeout and the agent's own patience, some
rank or the agent must name rank 1, no process may be left, and the previous checkpoint must load.
Restarted, with as many ranks or with fewer, training must go on with the losses of an undisturbed
run. Two hosts are two network namespaces with a link between them that is taken down.

``make faults`` runs all of it.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import json
import os
import re
import resource
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import uuid
import warnings
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import common
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, Std
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

import fsdp_compose as fc

FAULTS = ("killed", "stopped", "raising", "out of memory", "disk full", "Ctrl-C")
PLACES = ("forward", "backward", "optimizer", "save")
STEPS, AT_STEP, VICTIM = 4, 2, 1
STRUCK = (
    "struck"  # a file that the fault leaves, so that a job which ended before it proves nothing
)
TIMEOUT = 5.0  # of the process group, in seconds
PATIENCE = 120.0  # before a cell is given up; torch's agent gives a stopped rank 30 s


@dataclass(frozen=True)
class Job:
    """One training, as its ranks are told of it."""

    folder: Path
    fault: str = ""
    place: str = ""


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(24, 24) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = x + torch.tanh(block(x))
        return x


def build() -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = fc.fully_shard(Net().double(), units=fc.wrap.by_class({nn.Linear}))
    return model, torch.optim.AdamW(model.parameters(), lr=0.01)


def train(job: Job) -> None:
    """What every rank runs: resume where there is a checkpoint, and save after every step."""
    torch.set_num_threads(1)
    meet()
    rank, world = dist.get_rank(), dist.get_world_size()
    model, optim = build()
    start, folder = 0, job.folder / "checkpoint"
    if (folder / ".metadata").exists():
        extra: Any = fc.load_checkpoint(folder, model, optim)
        start = extra["step"]
    first = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") == "0"
    for step in range(start, STEPS):
        host = int(os.environ.get("FAULTS_HOST", rank))
        hit = bool(job.fault) and first and host == VICTIM and step == AT_STEP
        with trouble(model, optim, job) if hit else contextlib.nullcontext():
            generator = torch.Generator().manual_seed(step)
            batch = torch.randn(12, 24, generator=generator, dtype=torch.float64)
            loss = model(batch.chunk(world)[rank]).square().mean()
            loss.backward()
            optim.step()
            optim.zero_grad()
            fc.save_checkpoint(folder, model, optim, {"step": step + 1})
            total = loss.detach() / world
            dist.all_reduce(total)
            if rank == 0:
                (job.folder / f"loss-{step}").write_text(repr(total.item()))
    dist.destroy_process_group()


def meet() -> None:
    """Make the process group, with keys of its own in the agent's store for each start.

    The agent keeps its store over a restart, and torch 2.13 puts nothing before the keys: a rank
    that starts first may find where another one listened before it was killed.
    """
    store, rank, world = next(dist.rendezvous("env://"))
    own = dist.PrefixStore(f"start {os.environ['TORCHELASTIC_RESTART_COUNT']}", store)
    patience = timedelta(seconds=TIMEOUT)
    dist.init_process_group("gloo", store=own, rank=rank, world_size=world, timeout=patience)


@contextlib.contextmanager
def trouble(model: nn.Module, optim: torch.optim.Optimizer, job: Job) -> Iterator[None]:
    """Scope of a step in which ``job.fault`` happens in ``job.place``."""
    act = ACTS[job.fault]

    def now(*args: Any) -> None:
        (job.folder / STRUCK).touch()
        act(job)

    block: Any = model.blocks[1]
    if job.place == "forward":
        handle = block.register_forward_pre_hook(now)
    elif job.place == "backward":
        handle = block.register_full_backward_hook(now)
    elif job.place == "optimizer":
        handle = optim.register_step_pre_hook(now)
    else:
        from fsdp_compose.checkpoint.files import CommittingWriter

        inner = CommittingWriter.write_data

        def write_data(*args: Any, **kwargs: Any) -> Any:
            now()
            return inner(*args, **kwargs)

        CommittingWriter.write_data = write_data  # type: ignore[method-assign]
        yield
        return
    try:
        yield
    finally:
        handle.remove()


def _raise(job: Job) -> None:
    raise ValueError("a bad batch")


def _exhaust(job: Job) -> None:
    """Have the allocator refuse: the address space may grow by 64 MB, and 1 GB is asked for."""
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    limit = pages * resource.getpagesize() + (64 << 20)
    resource.setrlimit(resource.RLIMIT_AS, (limit, resource.RLIM_INFINITY))
    torch.empty(1 << 27, dtype=torch.float64).fill_(1)


def _fill_disk(job: Job) -> None:
    """No file may grow over 1 KB, unless the folder lies on a file system that is full itself."""
    if not (job.folder / "checkpoint").is_mount():
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (1024, resource.RLIM_INFINITY))
        return
    with open(job.folder / "checkpoint" / "ballast", "wb", buffering=0) as file:
        with contextlib.suppress(OSError):
            while True:
                file.write(bytes(4096))


LINKS, HOSTS = ("fcfault0", "fcfault1"), ("10.77.0.1", "10.77.0.2")


def _run(*command: str) -> bool:
    return subprocess.run(command, check=False, capture_output=True).returncode == 0


ACTS: dict[str, Callable[[Job], None]] = {
    "killed": lambda job: os.kill(os.getpid(), signal.SIGKILL),
    "stopped": lambda job: os.kill(os.getpid(), signal.SIGSTOP),
    "raising": _raise,
    "out of memory": _exhaust,
    "disk full": _fill_disk,
    "Ctrl-C": lambda job: os.killpg(0, signal.SIGINT),
    "host lost": lambda job: os.killpg(0, signal.SIGKILL),
    "link down": lambda job: _run("ip", "link", "set", LINKS[1], "down"),
}


@dataclass(frozen=True)
class Ended:
    """How a job ended."""

    ok: bool
    seconds: float
    text: str  # what its agent and its ranks wrote
    orphans: int


def run_job(job: Job, nproc: int = 2, restarts: int = 0) -> Ended:
    """Run a job under one elastic agent, in a session of its own, until nothing is left."""
    return wait_for_jobs(job, [start_agent(job, nproc, restarts)])


def start_agent(
    job: Job, nproc: int, restarts: int, config: Any = (), namespace: str = "", host: int = -1
) -> int:
    """Fork an agent; its process number. ``config`` has settings of torch's ``LaunchConfig``."""
    logs = job.folder / f"logs-{uuid.uuid4().hex[:6]}"
    logs.mkdir(parents=True)
    pid = os.fork()
    if pid:
        return pid
    code = 1
    warnings.simplefilter("ignore")  # the agent forks its ranks beside its threads
    try:
        os.setsid()
        out = os.open(logs / "agent.txt", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        for fd in (1, 2):
            os.dup2(out, fd)
        sys.stdout = os.fdopen(1, "w", buffering=1, closefd=False)
        sys.stderr = os.fdopen(2, "w", buffering=1, closefd=False)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        if host >= 0:
            os.environ["FAULTS_HOST"] = str(host)
        if namespace:
            enter(namespace, host)
        options: dict[str, Any] = {
            "min_nodes": 1,
            "max_nodes": 1,
            "rdzv_backend": "c10d",
            "rdzv_endpoint": "localhost:0",
            "run_id": uuid.uuid4().hex,
            "local_addr": "localhost",
        }
        settings = LaunchConfig(
            nproc_per_node=nproc,
            max_restarts=restarts,
            monitor_interval=0.5,
            start_method="fork",
            logs_specs=DefaultLogsSpecs(log_dir=str(logs), redirects=Std.ALL),
            **(options | dict(config)),
        )
        elastic_launch(settings, train)(job)
        code = 0
    except BaseException as error:
        print(f"agent: {type(error).__name__}: {error}", file=sys.stderr)
    finally:
        os._exit(code)


def wait_for_jobs(job: Job, agents: list[int], ranks_alone: bool = False) -> Ended:
    """Wait for the agents of a job, or for their ranks alone, and kill what is left of them."""
    start = time.monotonic()
    codes: dict[int, int] = {}
    ranks_ran = ranks_run = False
    while len(codes) < len(agents) and time.monotonic() - start < PATIENCE:
        ranks_run = any(set(_session(pid)) - {pid} for pid in agents)
        ranks_ran = ranks_ran or ranks_run
        if ranks_alone and ranks_ran and not ranks_run:
            break
        for pid in set(agents) - set(codes):
            done, code = os.waitpid(pid, os.WNOHANG)
            if done:
                codes[pid] = os.waitstatus_to_exitcode(code)
        time.sleep(0.05)
    seconds = time.monotonic() - start
    for pid in set(agents) - set(codes):
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
    time.sleep(0.3)
    left = [orphan for pid in agents for orphan in _session(pid)]
    for orphan in left:
        os.kill(orphan, signal.SIGKILL)
    logs = [p for p in sorted(job.folder.glob("logs-*/**/*")) if p.is_file()]
    text = "\n".join(path.read_text(errors="replace") for path in logs)
    return Ended(0 in codes.values(), seconds, text, len(left))


def enter(namespace: str, host: int) -> None:
    """Move this process into a network namespace, and gloo to its end of the link."""
    libc = ctypes.CDLL(None, use_errno=True)
    with open(f"/var/run/netns/{namespace}") as handle:
        if libc.setns(handle.fileno(), 0x40000000):
            raise OSError(ctypes.get_errno(), "setns")
    os.environ["GLOO_SOCKET_IFNAME"] = LINKS[host]


@contextlib.contextmanager
def two_hosts() -> Iterator[list[str] | None]:
    """Two network namespaces with a link between them; None where this process may not."""
    names = [f"fcfault{os.getpid()}{end}" for end in "ab"]
    made = all(_run("ip", "netns", "add", name) for name in names)
    made = made and _run("ip", "link", "add", LINKS[0], "type", "veth", "peer", "name", LINKS[1])
    try:
        for name, link, address in zip(names, LINKS, HOSTS) if made else ():
            inside = ("ip", "-n", name)
            made = made and _run("ip", "link", "set", link, "netns", name)
            made = made and _run(*inside, "addr", "add", f"{address}/24", "dev", link)
            made = made and all(_run(*inside, "link", "set", d, "up") for d in (link, "lo"))
        yield names if made else None
    finally:
        for name in names:
            _run("ip", "netns", "del", name)


def hosts(job: Job, restarts: int, namespaces: list[str] | None = None) -> Ended:
    """Run a job under two agents with a rank each, as on two hosts; the first has the store.

    An agent that a link cuts off from its store waits for that long after its rank has ended.
    """
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    agents = []
    for host in (0, 1):
        rendezvous = {
            "is_host": host == 0,
            "last_call_timeout": 4,
            "join_timeout": 40,
            "read_timeout": 15,
        }
        config = {
            "min_nodes": 1,
            "max_nodes": 2,
            "rdzv_endpoint": f"{HOSTS[0] if namespaces else '127.0.0.1'}:{port}",
            "run_id": "faults",
            "local_addr": HOSTS[host] if namespaces else "127.0.0.1",
            "rdzv_configs": rendezvous | {"keep_alive_interval": 1, "keep_alive_max_attempt": 3},
        }
        name = namespaces[host] if namespaces else ""
        agents.append(start_agent(job, 1, restarts, config, name, host))
    return wait_for_jobs(job, agents, ranks_alone=job.fault == "link down")


def _session(leader: int) -> list[int]:
    """The processes of a session that still run."""
    found = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            state, _, _, session = path.read_text().rpartition(")")[2].split()[:4]
            if int(session) == leader and state not in "ZX":
                found.append(int(path.parent.name))
    return found


def expected_losses(folder: Path) -> list[float]:
    """Those of an undisturbed run of the same steps."""
    job = Job(folder)
    job.folder.mkdir(parents=True, exist_ok=True)
    ended = run_job(job)
    if not ended.ok:
        raise RuntimeError(f"a job without a fault failed:\n{ended.text[-4000:]}")
    return read_losses(job)


def read_losses(job: Job) -> list[float]:
    return [float((job.folder / f"loss-{step}").read_text()) for step in range(STEPS)]


def same(found: list[float], wanted: list[float]) -> bool:
    return len(found) == len(wanted) and all(
        abs(a - b) <= 1e-12 * abs(b) for a, b in zip(found, wanted)
    )


@dataclass(frozen=True)
class Cell:
    """What came of one fault; ``wrong`` is empty where all is as promised."""

    fault: str
    place: str
    seconds: float
    said: str
    resumed: str  # on what it was taken up again
    wrong: str


def run_cell(fault: str, place: str, folder: Path, wanted: list[float], resume: int) -> Cell:
    """Break a job, look at how it ended, and take it up again on ``resume`` ranks."""
    job = Job(folder, fault, place)
    (folder / "checkpoint").mkdir(parents=True)
    with small_disk(folder / "checkpoint") if fault == "disk full" else contextlib.nullcontext():
        ended = run_job(job)
        saved = folder / "saved"
        shutil.copytree(folder / "checkpoint", saved, ignore=shutil.ignore_patterns("ballast"))
    shutil.rmtree(folder / "checkpoint")
    saved.rename(folder / "checkpoint")
    again = run_job(replace(job, fault=""), nproc=resume)
    return judge(job, ended, again, wanted, f"{resume} ranks")


def judge(job: Job, ended: Ended, again: Ended, wanted: list[float], resumed: str) -> Cell:
    wrong = []
    if not (job.folder / STRUCK).exists():
        wrong.append("the fault did not happen")
    if ended.ok and ended is not again:
        wrong.append("the job did not fail")
    if ended.seconds >= PATIENCE:
        wrong.append("did not end")
    if ended.orphans:
        wrong.append(f"{ended.orphans} processes left")
    said = find_text(ended.text, job.fault)
    if not said:
        wrong.append("nobody said who and where")
    if not again.ok:
        wrong.append(f"does not resume: {again.text[-300:]}")
    elif not same(read_losses(job), wanted):
        wrong.append(f"resumed with other losses: {read_losses(job)}, wanted {wanted}")
    return Cell(job.fault, job.place, ended.seconds, said, resumed, "; ".join(wrong))


def run_restart(folder: Path, wanted: list[float]) -> Cell:
    """A rank is killed, and the agent starts both again."""
    job = Job(folder, "killed", "backward")
    ended = run_job(job, restarts=1)
    return judge(job, ended, ended, wanted, "2, by the agent")


def run_fewer(folder: Path, wanted: list[float]) -> Cell:
    """One of two hosts is lost with its agent, and the other goes on alone."""
    job = Job(folder, "host lost", "backward")
    ended = hosts(job, restarts=2)
    return judge(job, ended, ended, wanted, "1, by the agent")


def run_link(folder: Path, wanted: list[float]) -> Cell:
    """The link between two hosts is taken down; then both start again."""
    with two_hosts() as namespaces:
        job = Job(folder, "link down", "backward")
        if namespaces is None:
            return Cell(job.fault, job.place, 0.0, "", "", "not run: no network namespaces here")
        folder.mkdir(parents=True)
        ended = hosts(job, 0, namespaces)
        _run("ip", "-n", namespaces[1], "link", "set", LINKS[1], "up")
        again = hosts(replace(job, fault=""), 0, namespaces)
        return judge(job, ended, again, wanted, "2 hosts")


OURS = re.compile(
    r"rank \d waits to [^,\n]*, and rank 1 does not answer"
    r"|rank 0 waited [^,\n]* for rank 1, which did not call it"
    r"|rank 1 left save_checkpoint: [^\n]{0,160}|rank 1 [^\n]*does not take part"
    r"|[^\n\"]{0,70}\(found on rank 1\)"
)
OWN = {
    "raising": r"ValueError: a bad batch",
    "out of memory": r"RuntimeError: [^\n]*can't allocate memory[^\n]{0,80}|MemoryError",
    "disk full": r"OSError: [^\n]{0,120}|No space left[^\n]{0,120}|File too large[^\n]{0,120}",
    "Ctrl-C": r"KeyboardInterrupt|SignalException: [^\n]{0,80}|got signal: 2",
    "killed": r"rank\s+: 1 \(local_rank: 1\)\s+exitcode\s+: -9",
}


def find_text(text: str, fault: str) -> str:
    """What says who and where: of the other ranks, and the rank's own error."""
    patterns = [OURS.pattern, *([OWN[fault]] if fault in OWN else [])]
    found = [match.group() for p in patterns if (match := re.search(p, text)) is not None]
    return "; ".join(re.sub(r"/\S*/|\|", "", " ".join(part.split()))[:150] for part in found)


@contextlib.contextmanager
def small_disk(folder: Path) -> Iterator[None]:
    """A file system of 512 KB over ``folder``, where this process may mount one."""
    command = ["mount", "-t", "tmpfs", "-o", "size=512k", "none", str(folder)]
    mounted = subprocess.run(command, check=False, capture_output=True).returncode == 0
    try:
        yield
    finally:
        if mounted:
            subprocess.run(["umount", "-l", str(folder)], check=True)


def cells(only: str, home: Path, wanted: list[float]) -> Iterator[Cell]:
    """Every cell that is asked for, as it is run."""
    for fault in FAULTS:
        for place in PLACES if fault != "disk full" else ("save",):
            if re.search(only, f"{fault} in {place}"):
                resume = 1 if place in ("backward", "save") else 2
                folder = home / f"{fault}-{place}".replace(" ", "-")
                yield run_cell(fault, place, folder, wanted, resume)
    for run in (run_restart, run_fewer, run_link):
        if re.search(only, run.__name__):
            yield run(home / run.__name__, wanted)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--only", default="", help="a pattern in 'fault in place' or 'run_...'")
    parser.add_argument("--save", action="store_true", help="write results/faults.*; others stay")
    options = parser.parse_args()
    home = Path(tempfile.mkdtemp(prefix="faults-"))
    path, ended_well = common.RESULTS / "faults.json", True
    known = [Cell(**one) for one in json.loads(path.read_text())] if path.exists() else []
    for cell in cells(options.only, home, expected_losses(home / "undisturbed")):
        print(f"{cell.fault} in {cell.place}: {cell.seconds:.1f} s; {cell.said}", flush=True)
        if cell.wrong:
            print(f"    WRONG: {cell.wrong}", flush=True)
        ended_well = ended_well and not cell.wrong
        if options.save:
            key = cell.fault, cell.place, cell.resumed
            known = [one for one in known if (one.fault, one.place, one.resumed) != key] + [cell]
            path.write_text(json.dumps([asdict(one) for one in known], indent=1) + "\n")
            (common.RESULTS / "faults.md").write_text(render(known))
    shutil.rmtree(home, ignore_errors=True)
    return int(not ended_well)


def render(found: list[Cell]) -> str:
    headers = ["fault", "in", "over after s", "resumed on", "outcome", "said"]
    rows = [
        [c.fault, c.place, f"{c.seconds:.1f}", c.resumed, c.wrong or "as promised", c.said]
        for c in found
    ]
    parts = [
        "# Faults for real",
        f"Two ranks under torch's elastic agent; the process group's timeout is {TIMEOUT:g} s. "
        "Each job was taken up again from the checkpoint of the step before, and its losses are "
        "those of an undisturbed run to 1e-12. Times are of the whole job, from the start of its "
        "agent to the end of its last process; the agent gives a stopped rank 30 s. Where a link "
        "is down, the time is that of the ranks: the agent that has lost its store waits for that.",
        common.table(headers, rows),
        common.machine(),
        "Command: `make faults`",
    ]
    return "\n\n".join(parts) + "\n"


if __name__ == "__main__":
    sys.exit(main())
