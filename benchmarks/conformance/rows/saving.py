"""State dicts and checkpoints: plain and sharded, of models and optimizers, whole and partial."""

from __future__ import annotations

import copy
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.distributed.checkpoint.state_dict as dcp_state

import fsdp_compose as fc

from conformance.libraries import Library, Pair, Wrong, compare, data, square
from conformance.models import Tower, tower
from conformance.outcomes import row, shared_folder


@row("U3", "a plain full state dict of a sharded model")
def saves_plain(lib: Library) -> None:
    pair = lib.pair(tower).train()
    compare(lib.state(pair.model), pair.plain.state_dict())


@row("U3", "a plain state dict loaded by the library's function")
def loads_plain(lib: Library) -> None:
    pair = lib.pair(tower)
    torch.manual_seed(9)
    pair.plain = tower().double()
    lib.load(pair.model, pair.plain.state_dict())
    pair.check()


@row("U3 D10", "model.load_state_dict(plain file) called directly", names=r"weight|first|summon")
def loads_directly(lib: Library) -> None:
    pair = lib.pair(tower)
    torch.manual_seed(9)
    pair.plain = tower().double()
    pair.inner.load_state_dict(pair.plain.state_dict())
    pair.check()


@row("U3", "model.state_dict() holds whole values or shards that say so", names=r"weight|first")
def state_dict_directly(lib: Library) -> None:
    pair = lib.pair(tower).train(1)
    state = {n.removeprefix("module."): v for n, v in pair.model.state_dict().items()}
    whole = {n: v.full_tensor() if hasattr(v, "full_tensor") else v for n, v in state.items()}
    compare(whole, pair.plain.state_dict())


@row("D10", "a state dict with another shape", names=r"head\.weight|head")
def other_shape(lib: Library) -> None:
    pair = lib.pair(tower)
    state = dict(pair.plain.state_dict(), **{"head.weight": torch.zeros(3, 6).double()})
    lib.load(pair.model, state)
    raise Wrong("loaded")


@row("D10", "a state dict with a name missing", names=r"head\.weight|head")
def missing_name(lib: Library) -> None:
    pair = lib.pair(tower)
    state = dict(pair.plain.state_dict())
    del state["head.weight"]
    lib.load(pair.model, state)
    raise Wrong("loaded")


@row("D10", "ranks are given different state dicts (rank 1 an older file)", names=r"rank \d|weight")
def other_files(lib: Library) -> None:
    pair = lib.pair(tower)
    torch.manual_seed(9)
    newer = tower().double()
    state = newer.state_dict() if dist.get_rank() == 0 else pair.plain.state_dict()
    lib.load(pair.model, state)
    compare(lib.full(pair.model), dict(newer.named_parameters()))


def _adam(lib: Library) -> Pair:
    pair = lib.pair(tower, optim=torch.optim.AdamW)
    for seed in range(2):
        pair.backward(seed)
        pair.step()
    return pair


def _optim_state(lib: Library, pair: Pair) -> Any:
    if lib.name == "ours":
        return fc.optim_state_dict(pair.model, pair.optims[0], kind="full")
    options = dcp_state.StateDictOptions(full_state_dict=True)
    return dcp_state.get_optimizer_state_dict(pair.model, pair.optims[0], options=options)


@row("U3", "full optimizer state by name")
def optimizer_state(lib: Library) -> None:
    pair = _adam(lib)
    found = _optim_state(lib, pair)["state"]
    wanted = {n: pair.optims[1].state[p]["exp_avg"] for n, p in pair.plain.named_parameters()}
    compare({n: found[n]["exp_avg"] for n in found}, wanted)


@row("U3", "full optimizer state loaded into a fresh optimizer, then trained on")
def optimizer_resumes(lib: Library) -> None:
    pair = _adam(lib)
    state, weights = _optim_state(lib, pair), lib.state(pair.model)
    fresh = lib.pair(tower, optim=torch.optim.AdamW)
    lib.load(fresh.model, weights)
    if lib.name == "ours":
        fc.load_optim_state_dict(fresh.model, fresh.optims[0], state)
    else:
        options = dcp_state.StateDictOptions(full_state_dict=True)
        dcp_state.set_optimizer_state_dict(fresh.model, fresh.optims[0], state, options=options)
    fresh.plain, fresh.optims[1] = pair.plain, pair.optims[1]
    fresh.backward(5)
    fresh.step()
    fresh.check()


@row(
    "U3",
    "optim.load_state_dict() of a plain run's optimizer",
    names=r"weight|optim|exp_avg|sharded",
)
def plain_optimizer(lib: Library) -> None:
    pair = _adam(lib)
    state = copy.deepcopy(pair.optims[1].state_dict())
    fresh = lib.pair(tower, optim=torch.optim.AdamW)
    lib.load(fresh.model, lib.state(pair.model))
    fresh.optims[0].load_state_dict(state)
    fresh.plain, fresh.optims[1] = pair.plain, pair.optims[1]
    fresh.backward(5)
    fresh.step()
    fresh.check()


@row("U3", "torch.distributed.checkpoint of model.state_dict(), saved and loaded")
def torch_checkpoint(lib: Library) -> None:
    pair = lib.pair(tower).train()
    folder = shared_folder()
    dcp.save({"model": dcp_state.get_model_state_dict(pair.model)}, checkpoint_id=folder)
    fresh = lib.pair(tower)
    state = {"model": dcp_state.get_model_state_dict(fresh.model)}
    dcp.load(state, checkpoint_id=folder)
    dcp_state.set_model_state_dict(fresh.model, state["model"])
    fresh.plain = pair.plain
    fresh.check()


@row("U3", "a checkpoint of four ranks read by two of them", ranks=4)
def resharded(lib: Library) -> None:
    """Two ranks share a mesh of their own, and each pair loads what the four saved."""
    from torch.distributed.device_mesh import init_device_mesh

    pair = lib.pair(tower).train()
    folder = shared_folder()
    dcp.save({"model": dcp_state.get_model_state_dict(pair.model)}, checkpoint_id=folder)
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b"))["b"]
    model = tower().double()
    if lib.name == "ddp":
        fresh: Any = lib.shard(model, process_group=mesh.get_group())
    else:
        fresh = lib.shard(model, model.blocks, mesh=mesh)
    state = {"model": dcp_state.get_model_state_dict(fresh)}
    dcp.load(state, checkpoint_id=folder)
    dcp_state.set_model_state_dict(fresh, state["model"])
    compare(lib.full(fresh), dict(pair.plain.named_parameters()))


@row("U43 U45 D3", "the full state dict asked for on rank 0 alone", names=r"rank \d")
def saves_on_rank_0(lib: Library) -> None:
    pair = lib.pair(tower)
    if dist.get_rank() == 0:
        compare(lib.state(pair.model), pair.plain.state_dict())


@row("U45 D3", "an evaluation on rank 0 alone", names=r"rank \d")
def evaluates_on_rank_0(lib: Library) -> None:
    pair = lib.pair(tower)
    if dist.get_rank() == 0:
        with torch.no_grad():
            compare({"y": pair.model(data(0))}, {"y": pair.plain(data(0))})


@row("U45 D3", "p.norm() on rank 0 alone", names=r"rank \d")
def norm_on_rank_0(lib: Library) -> None:
    pair = lib.pair(tower)
    if dist.get_rank() == 0:
        found = next(pair.model.parameters()).norm()
        found = found.full_tensor() if hasattr(found, "full_tensor") else found
        compare({"norm": found}, {"norm": next(pair.plain.parameters()).norm()})


@row("U45 D3", "a rank leaves the loop one step early", names=r"rank \d")
def leaves_early(lib: Library) -> None:
    pair = lib.pair(tower)
    for seed in range(3 - dist.get_rank()):
        square(pair.model, data(seed)).backward()
    raise Wrong("went on")


@row("U45 D3", "a rank dies in its second step", names=r"rank \d")
def dies(lib: Library) -> None:
    import os
    import signal

    pair = lib.pair(tower)
    for seed in range(2):
        if seed and dist.get_rank() == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        square(pair.model, data(seed)).backward()


@row("U37", "200 state dicts taken and dropped: memory stays flat")
def dropped_state_dicts(lib: Library) -> None:
    import gc

    pair = lib.pair(tower)
    count = []
    for i in range(200):
        lib.state(pair.model) if i % 20 == 0 else pair.model.state_dict()
        if i in (20, 199):
            gc.collect()
            count.append(len(gc.get_objects()))
    if count[1] - count[0] > 200:
        raise Wrong(f"{count[1] - count[0]} objects more")


@row("U38", "ignored parameters and buffers are in the full state dict")
def everything(lib: Library) -> None:
    class Buffered(Tower):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("table", torch.ones(3, dtype=torch.float64))

    torch.manual_seed(0)
    plain = Buffered().double()
    model = copy.deepcopy(plain)
    model = lib.shard(model, model.blocks, ignored=[model.first])
    compare(lib.state(model), plain.state_dict())
