"""Ranks simulated in this process: torch.distributed works, a seed repeats, who failed is said."""

from __future__ import annotations

import gc
import math
import os
import random
import re
import signal
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.fsdp import fully_shard as torch_fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.experimental import implicit_replication
from torch.distributed.tensor.parallel import ColwiseParallel, loss_parallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

import fsdp_compose as fc
from fsdp_compose import ShardingStrategy, fully_shard, simulate
from fsdp_compose.base.mesh import resolve_mesh
from fsdp_compose.base.policy import place
from fsdp_compose.base.process import here
from fsdp_compose.simulation import (
    DelayMessage,
    DelayRank,
    Fault,
    KillRank,
    LoseMessage,
    RaiseError,
    RunOtherUnit,
    SimulationError,
)

from harness import run_ranks
from models import Tower, by_block, data, seeded, square

pytestmark = pytest.mark.filterwarnings("ignore:.*deprecated:FutureWarning")


def exchange_everything() -> list[float]:
    """Each collective of torch.distributed once; what it gives is known."""
    rank, size = dist.get_rank(), dist.get_world_size()
    own, found = torch.tensor([float(rank)]), torch.zeros(1)
    parts = [torch.zeros(1) for _ in range(size)]
    whole, numbers = torch.zeros(size), torch.arange(float(size)) + 10 * rank
    dist.all_gather(parts, own)
    dist.all_gather_into_tensor(whole, own)
    assert [p.item() for p in parts] == whole.tolist() == list(range(size))
    dist.reduce_scatter_tensor(found, numbers)
    assert found == sum(10 * r + rank for r in range(size))
    dist.reduce_scatter(found, list(numbers.chunk(size)), op=dist.ReduceOp.AVG)
    assert found == sum(10 * r + rank for r in range(size)) / size
    dist.all_to_all_single(whole, numbers)
    dist.all_to_all(parts, list(numbers.chunk(size)))
    assert [p.item() for p in parts] == whole.tolist() == [10 * r + rank for r in range(size)]
    dist.broadcast(copy := own.clone(), src=2)
    assert copy == 2
    dist.reduce(total := own.clone(), dst=1, op=dist.ReduceOp.MAX)
    assert total == (size - 1 if rank == 1 else rank)
    dist.gather(own, parts if rank == 1 else None, dst=1)
    dist.scatter(found, list(numbers.chunk(size)) if rank == 0 else None, src=0)
    assert found == rank
    objects: list[Any] = [None] * size
    dist.all_gather_object(objects, {"rank": rank})
    assert objects[2] == {"rank": 2}
    dist.broadcast_object_list(said := [rank], src=3)
    assert said == [3]
    pair = [
        dist.P2POp(dist.isend, own, (rank + 1) % size),
        dist.P2POp(dist.irecv, found, (rank - 1) % size),
    ]
    for request in dist.batch_isend_irecv(pair):
        request.wait()
    assert found == (rank - 1) % size
    group = dist.new_group([1, 3])
    if rank in (1, 3):
        dist.all_reduce(total := torch.ones(1), group=group)
        assert total == 2 and dist.get_rank(group) == rank // 2
    dist.all_reduce_coalesced([total := own.clone(), most := numbers.clone()], op=dist.ReduceOp.MAX)
    assert total == size - 1 and most[0] == 10 * (size - 1)
    work = dist.all_reduce(total := own.clone(), async_op=True)
    assert work.get_future().wait()[0] == total == 6
    dist.barrier()
    dist.monitored_barrier()
    assert os.environ["RANK"] == str(rank) and dist.get_backend() == "gloo"
    return total.tolist()


def redistribute() -> tuple[Sequence[int] | None, list[float]]:
    """A DTensor over two axes, in pieces of different sizes."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    values = torch.arange(15.0).view(5, 3)
    tensor = distribute_tensor(values, mesh, [Shard(0), Shard(1)])
    full = tensor.redistribute(mesh, [Replicate(), Replicate()]).to_local()
    assert torch.equal(full, values)
    assert torch.equal((tensor @ tensor.t()).full_tensor(), values @ values.t())
    return mesh.get_coordinate(), tensor.to_local().flatten().tolist()


def test_torch_distributed_works() -> None:
    assert simulate(exchange_everything, 4) == [[6.0]] * 4
    places = simulate(redistribute, 4, seed=1)
    assert [place for place, _ in places] == [(0, 0), (0, 1), (1, 0), (1, 1)]
    assert sum(len(values) for _, values in places) == 15


def train(shard: Callable[[nn.Module], nn.Module], steps: int = 3) -> dict[str, Any]:
    model = shard(seeded(Tower))
    optim = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    losses = []
    for step in range(steps):
        loss = square(model, data(step, dist.get_rank()))
        loss.backward()
        optim.step()
        optim.zero_grad()
        losses.append(loss.item())
    state = fc.state_dict(model) if fc.is_fully_sharded(model) else {}
    return {"losses": losses, "state": state, "random": torch.rand(3), "python": random.random()}


def by_torch(model: nn.Module) -> nn.Module:
    for block in model.blocks:
        torch_fully_shard(block)
    return torch_fully_shard(model)


def hybrid(model: nn.Module) -> nn.Module:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    return by_block(model, mesh=mesh, strategy=ShardingStrategy.HYBRID_SHARD)


def flat_by_torch(model: nn.Module) -> nn.Module:
    return FullyShardedDataParallel(model, device_id=torch.device("cpu"))


def same(first: Any, second: Any) -> bool:
    """Whether two results are equal to the last bit."""
    if isinstance(first, torch.Tensor):
        return torch.equal(first, second)
    if isinstance(first, dict):
        return first.keys() == second.keys() and all(same(first[k], second[k]) for k in first)
    return bool(first == second)


def test_results_of_tensor_parallel_layers_are_sent() -> None:
    """As a pipeline sends them: they wait for their sum, and have no memory of their own."""

    def send() -> Tensor:
        mesh, rank = init_device_mesh("cpu", (2,)), dist.get_rank()
        part = DTensor.from_local(torch.full((3,), rank + 1.0), mesh, [Partial()])
        total = part.redistribute(placements=[Replicate()], async_op=True).to_local()
        received = torch.zeros(3)
        if rank == 0:
            dist.send(total, 1)
        else:
            dist.recv(received, 0)
        return received + total

    assert simulate(send, 2)[1].tolist() == [6.0, 6.0, 6.0]


def parallel_loss() -> float:
    """The loss of logits that tensor parallelism cut over the vocabulary."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "tensor"))
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 12))
    parallelize_module(model, mesh["tensor"], {"0": ColwiseParallel(use_local_output=False)})
    fully_shard(model, mesh=mesh["data"])
    with loss_parallel():
        loss = nn.functional.cross_entropy(model(torch.ones(4, 8)), torch.arange(4))
        loss.backward()
    return loss.detach().full_tensor().item()


def test_scopes_of_dtensor_are_those_of_one_rank() -> None:
    """Torch keeps them in the process: ranks enter and leave them at different times."""

    def add() -> list[float]:
        mesh, rank = init_device_mesh("cpu", (2,)), dist.get_rank()
        whole = DTensor.from_local(torch.ones(2), mesh, [Replicate()])
        with implicit_replication() if rank else nullcontext():
            dist.barrier()
            if rank == 0:
                with pytest.raises(RuntimeError, match=r"mixed torch\.Tensor and DTensor"):
                    whole + torch.ones(2)
            else:
                whole = whole + torch.ones(2)
            dist.barrier()
        return whole.to_local().tolist()

    torch.manual_seed(0)
    plain = nn.Linear(8, 12)
    wanted = nn.functional.cross_entropy(plain(torch.ones(4, 8)), torch.arange(4))
    assert simulate(parallel_loss, 4) == pytest.approx([wanted.item()] * 4)
    assert simulate(add, 2) == [[1.0, 1.0], [2.0, 2.0]]


def test_the_default_dtype_is_that_of_one_rank() -> None:
    def made() -> list[torch.dtype]:
        if dist.get_rank() == 1:
            torch.set_default_dtype(torch.float64)
        dist.barrier()
        return [torch.ones(1).dtype]

    assert simulate(made, 2) == [[torch.float32], [torch.float64]]
    assert torch.get_default_dtype() is torch.float32


def test_every_engine_trains_alike() -> None:
    """Ours, FSDP2, FSDP1 and DDP in simulation have the losses of each other."""
    wanted = simulate(train, 4, by_block, 2)
    for shard in (hybrid, by_torch, flat_by_torch, DistributedDataParallel):
        for found, ours in zip(simulate(train, 4, shard, 2), wanted, strict=True):
            assert found["losses"] == pytest.approx(ours["losses"], rel=1e-12), shard


def test_a_seed_repeats_the_run_to_the_last_bit() -> None:
    """Same results and as many switches; other seeds have other orders, and the same weights."""
    switches = []

    def run() -> Any:
        found = train(by_block)
        if dist.get_rank() == 0:
            switches.append(here.simulated.scheduler.switches)
        return found

    first, second, third = (simulate(run, 4, seed=seed) for seed in (3, 3, 4))
    assert switches[0] == switches[1] != switches[2]
    for ours, again, other in zip(first, second, third, strict=True):
        assert same(ours, again)
        assert same(ours["state"], other["state"])


def draw() -> tuple[float, float]:
    if dist.get_rank() == 1:
        torch.rand(5), random.random()
    dist.barrier()
    return torch.rand(1).item(), random.random()


def test_each_rank_has_its_own_random_numbers() -> None:
    found = simulate(draw, 3, seed=5)
    assert found[0] == found[2] and found[0][0] != found[1][0] and found[0][1] != found[1][1]


def test_nothing_of_a_simulation_is_left() -> None:
    before = torch.get_rng_state(), random.getstate(), dict(os.environ), here.__dict__
    threads, counts = torch.get_num_threads(), dict(vars(here.traffic))
    with pytest.raises(SimulationError):
        simulate(train, 2, by_block, faults=[KillRank(1, 50)])
    assert not dist.is_initialized() and here.simulated is None and here.__dict__ is before[3]
    assert torch.equal(torch.get_rng_state(), before[0]) and random.getstate() == before[1]
    assert dict(os.environ) == before[2] and torch.get_num_threads() == threads
    assert vars(here.traffic) == counts
    assert [t for t in threading.enumerate() if t.name.startswith("rank ")] == []


def test_threads_of_ranks_have_ended() -> None:
    """With all they free: a thread that frees tensors while the process exits aborts it."""
    freed = []

    class Slow:
        def __del__(self) -> None:
            time.sleep(0.1)
            freed.append(self)

    def program() -> None:
        local.kept = Slow()  # until the thread is over

    local = threading.local()
    simulate(program, 3)
    assert len(freed) == 3


def main() -> float:
    dist.init_process_group("gloo", init_method="env://")
    dist.all_reduce(total := torch.ones(1))
    dist.destroy_process_group()
    return total.item()


def end_first() -> float:
    dist.destroy_process_group()
    return main()


def test_a_program_may_make_its_group() -> None:
    """What a launcher starts runs as it is, also one that ends the group that it has first."""
    assert simulate(main, 3) == [3.0] * 3
    assert simulate(end_first, 2) == [2.0] * 2


def failing(where: int) -> None:
    if dist.get_rank() == where:
        raise ValueError("mine")
    dist.barrier()


def stuck() -> None:
    if dist.get_rank() == 2:
        dist.recv(torch.zeros(1), src=1)
    else:
        dist.barrier()


def mixed_up() -> None:
    dist.all_reduce(torch.ones(1 + dist.get_rank()))


def test_an_error_names_rank_and_positions() -> None:
    with pytest.raises(SimulationError, match=r"rank 2 of 3 raised ValueError: mine") as caught:
        simulate(failing, 3, 2, seed=9)
    error = caught.value
    assert error.rank == 2 and isinstance(error.__cause__, ValueError) and error.seed == 9
    assert set(error.positions) == {0, 1} and "test_simulate.py" in str(error)
    assert "rank 2 has raised ValueError: mine" in str(error.errors[0])
    with pytest.raises(SimulationError, match="calls all_reduce SUM 1 x"):
        simulate(mixed_up, 2)


def test_a_deadlock_is_found_at_once() -> None:
    started = time.monotonic()
    with pytest.raises(SimulationError, match="Deadlock: none could go on") as caught:
        simulate(stuck, 4)
    assert time.monotonic() - started < 10
    assert "in stuck, waits to receive from rank 1" in str(caught.value)
    assert str(caught.value).count("in stuck, waits to take part in barrier") == 3


@pytest.mark.parametrize(
    ("fault", "text"),
    [
        (KillRank(1, 60), "rank 1 does not answer.*rank 1 was killed"),
        (RaiseError(1, 60, OSError("disk full")), "rank 1 does not answer.*disk full"),
        (LoseMessage(1, 60), "does not answer.*timed out after 1800 s"),
        (RunOtherUnit(1, "blocks.1", "blocks.0", call=1), "ranks run different units"),
        (DelayRank(0, 60, 1e3), None),
        (DelayMessage(1, 60, 1e3), None),
        (DelayMessage(1, 60, 1e4), "timed out"),
    ],
)
def test_faults_end_in_errors_that_name_them(fault: Fault, text: str | None) -> None:
    """On every living rank; what is only late changes no bit."""
    if text is None:
        pairs = zip(simulate(train, 3, by_block, faults=[fault]), simulate(train, 3, by_block))
        assert all(same(found, wanted) for found, wanted in pairs)
        return
    with pytest.raises(SimulationError) as caught:
        simulate(train, 3, by_block, faults=[fault])
    errors = caught.value.errors
    assert set(errors) == {0, 1, 2} - ({1} if isinstance(fault, KillRank) else set())
    own = [r for r, e in errors.items() if "disk full" in str(e) and isinstance(e, OSError)]
    for rank, error in errors.items():
        if rank not in own:
            assert re.search(text, str(error), re.DOTALL) or "does not answer" in str(error)
    assert any(re.search(text, str(e), re.DOTALL) for e in errors.values())


def read_early(wait: bool) -> float:
    value = torch.full((1,), float(dist.get_rank()))
    work = dist.broadcast(value, src=0, async_op=True)
    if wait:
        work.wait()
    return value.item()


def freed_early() -> None:
    value = torch.ones(4)
    work = dist.all_reduce(value, async_op=True)
    value.untyped_storage().resize_(0)
    work.wait()


def test_communication_that_is_not_awaited_shows() -> None:
    """Data moves when the seed says, so some seed shows who reads it or frees it too early."""
    early = [simulate(read_early, 2, False, seed=seed)[1] for seed in range(12)]
    assert set(early) == {0.0, 1.0}
    assert {simulate(read_early, 2, True, seed=seed)[1] for seed in range(12)} == {0.0}
    with pytest.raises(SimulationError, match="was released before the message had arrived"):
        simulate(freed_early, 2)


def test_checkpoints_and_scopes_run_in_it(tmp_path: Any) -> None:
    """What waits in threads, naps and meets through the store does so in simulated time."""

    def run() -> bool:
        model = by_block(seeded(Tower))
        optim = torch.optim.AdamW(model.parameters(), lr=0.01)
        square(model, data(0, dist.get_rank())).backward()
        optim.step()
        before = fc.state_dict(model)
        fc.save_checkpoint(tmp_path / "now", model, optim)
        saving = fc.save_checkpoint(tmp_path / "later", model, optim, asynchronous=True)
        with torch.no_grad():
            for param in model.parameters():
                param.zero_()
        saving.wait()
        fc.load_checkpoint(tmp_path / "later", model, optim)
        with fc.gathered(model):
            return all(torch.equal(p, before[n]) for n, p in model.named_parameters())

    assert simulate(run, 2) == [True, True]


def only_rank_0_saves(path: Any, seconds: float) -> None:
    """Rank 1 is there for so many seconds more, and then it ends."""
    model = by_block(seeded(Tower))
    if dist.get_rank() == 0:
        fc.save_checkpoint(path, model, timeout=60)
    here.clock.sleep(seconds)


def test_timeouts_pass_in_simulated_time(tmp_path: Any) -> None:
    started = time.monotonic()
    with pytest.raises(SimulationError, match="waited 60 s for rank 1, which did not call it"):
        simulate(only_rank_0_saves, 2, tmp_path, 90)
    with pytest.raises(SimulationError, match="rank 0 waits to call save_checkpoint, and rank 1 "):
        simulate(only_rank_0_saves, 2, tmp_path, 0)
    assert time.monotonic() - started < 30


def test_accelerators_are_refused() -> None:
    """Their one thread for backward passes would wait for one rank and never run the others."""

    def shard() -> None:
        resolve_mesh(None, torch.device("cuda", 0), place(ShardingStrategy.FULL_SHARD, None))

    with pytest.raises(SimulationError, match="parameters are on cuda:0, in simulate"):
        simulate(shard, 2)


def test_bad_arguments_are_named() -> None:
    with pytest.raises(ValueError, match="world_size is 0"):
        simulate(main, 0)
    with pytest.raises(ValueError, match="is for rank 2, and there are 2 ranks"):
        simulate(main, 2, faults=[KillRank(2, 0)])
    wrong: Any = [KillRank(0, -1), DelayRank(0, 0, math.nan), RunOtherUnit(0, "0", "1", -1)]
    for fault in wrong:
        with pytest.raises(ValueError, match=r"of \w+\(rank=0.* is .*; wanted .*, 0 or more"):
            simulate(main, 2, faults=[fault])
    text: Any = "0"
    wrong = [KillRank(text, 0), KillRank(0, text), RaiseError(0, 0, text), DelayRank(0, 0, text)]
    for fault in wrong:
        with pytest.raises(TypeError, match=r"simulate: \w+ of \w+\(rank=.*; wanted "):
            simulate(main, 2, faults=[fault])
    with pytest.raises(SimulationError, match="is in a simulation already"):
        simulate(lambda: simulate(main, 2), 2)


@pytest.mark.parametrize("size", [1, 2, 16, 33])
def test_worlds_of_many_sizes(size: int) -> None:
    found = simulate(train, size, fully_shard, 1)
    assert len(found) == size and all(same(found[0]["state"], each["state"]) for each in found)


def hidden_graph() -> int:
    """A view that torch shows no graph of is alive while a model's tensors are looked through."""
    base = torch.ones(4, requires_grad=True).clone()
    view = base.unbind()[0]
    base.add_(1)
    with pytest.raises(RuntimeError, match="is a view"):
        view.grad_fn  # noqa: B018
    train(by_block, steps=1)
    return view.numel()


def test_threads_share_what_torch_has_one_of() -> None:
    """Tensors of other threads are not taken for a rank's own, and tables do not grow by rank."""
    import torch._dynamo.trace_rules as rules

    simulate(hidden_graph, 2)
    before = len(rules.SKIP_DIRS)
    simulate(hidden_graph, 3)
    assert len(rules.SKIP_DIRS) == before


def test_forward_mode_is_refused() -> None:
    """A process has one level of it, in which the second rank would compute without tangents."""

    def differentiate() -> Tensor:
        model, x = by_block(seeded(Tower)), data(0, dist.get_rank())
        return torch.func.jvp(model, (x,), (torch.ones_like(x),))[1]

    with pytest.raises(SimulationError, match="would wait for the others inside forward-mode AD"):
        simulate(differentiate, 2)
    assert simulate(lambda: square(by_block(seeded(Tower)), data(0, 0)).item(), 2)


def runs_for_ever() -> None:
    while dist.get_rank() == 0:
        sum(range(1000))
    dist.barrier()


def test_ctrl_c_ends_every_rank() -> None:
    """Also one that never communicates; nothing is left running."""
    # What starts in the background ignores Ctrl-C, and so does what that starts.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    timer = threading.Timer(0.5, os.kill, (os.getpid(), signal.SIGINT))
    timer.start()
    try:
        with pytest.raises(KeyboardInterrupt):
            simulate(runs_for_ever, 3)
    finally:
        signal.signal(signal.SIGINT, before)
        timer.join()
    assert [t for t in threading.enumerate() if t.name.startswith("rank ")] == []
    assert simulate(dist.get_rank, 2) == [0, 1]


def test_what_the_caller_set_aside_stays_so() -> None:
    """What there is already is set aside for the ranks, and taken back, but not from the caller."""

    def alone(rank: int) -> None:
        gc.unfreeze()
        here.has_set_aside = False
        for ours in (True, True, False, False):
            if not ours:
                gc.freeze()
            assert all(simulate(gc.get_freeze_count, 2))
            assert (gc.get_freeze_count() == 0) is ours

    run_ranks(alone, 1, init=False)
