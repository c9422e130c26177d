"""How a fuzzed program begins anew: from the meta device, in stages, plain for a moment, with
the same bits at any number of ranks.

The operations are known to ``fuzz_operations.operations`` once this file has been imported.
"""

from __future__ import annotations

import copy
import random
from dataclasses import replace
from typing import Any

import torch
from fuzz_options import is_ignored, shard
from fuzz_surgery import (
    _choose_other_units,
    _clear,
    _optimizers,
    _same_optimizer,
    other_case,
)
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe

import fsdp_compose as fc
from fsdp_compose.base.process import here
from fsdp_compose.simulation import DelayMessage, DelayRank

from fuzz_mistakes import expect_error
from fuzz_operations import Run, make_optimizer, operation, recomputes_reentrantly
from fuzz_programs import STRATEGIES, build, nodes
from fuzz_storage import _folder
from fuzz_twin import rows, square_losses
from models import seeded, units, whole


def to_meta(model: nn.Module) -> nn.Module:
    """The same modules and ties, on the meta device; what is to be ignored stays."""
    moved = {id(m.weight): m.weight for m in model.modules() if is_ignored(m)}
    for module in model.modules():
        for name, param in list(module._parameters.items()):
            if param is not None and id(param) not in moved:
                value = nn.Parameter(param.detach().to("meta"), param.requires_grad)
                moved[id(param)] = value
            if param is not None:
                module._parameters[name] = moved[id(param)]
    return model


@operation("from meta")
def _start_on_meta(run: Run, n: int, seed: int) -> None:
    """A model without memory is sharded, and takes the weights of the one that it replaces."""
    rng = random.Random(f"{seed} {n}")
    _clear(run)
    before, wanted = run.twin.model, run.twin.reference
    case = other_case(run.case, rng)
    model, way = copy.deepcopy(wanted), n % 6
    _choose_other_units(model, rng)
    if way != 3 or run.rank:
        to_meta(model)
    values = dict(zip(map(id, model.modules()), wanted.modules(), strict=True))

    def fill(module: nn.Module) -> None:
        if way == 1:  # as functions for FSDP1 do
            if not any(param.is_meta for param in module.parameters(recurse=False)):
                return
            module.to_empty(device="cpu", recurse=False)
        source = values[id(module)]
        with torch.no_grad():
            for param, value in zip(
                module.parameters(recurse=False), source.parameters(recurse=False), strict=True
            ):
                param.copy_(value)

    if way < 2:
        shard(case, model, param_init_fn=fill)
    elif way == 3:
        shard(case, model, init="broadcast")
    else:
        shard(case, model)
        left = any(p.numel() for p in wanted.parameters())
        if left and n % 5 == 0 and all(node.skip is None for node in nodes(model)):
            x = run.twin.input(seed)
            expect_error(run, "", True, lambda: square_losses(model, x, 1)[0].backward())
    path = _folder(run, seed)
    if way == 2:
        kind: Any = ("full", "sharded")[n // 6 % 2]
        fc.load_state_dict(model, fc.state_dict(before, kind=kind))
    elif way == 4:
        saved = fc.state_dict(before, rank0_only=True)
        fc.load_state_dict(model, saved, broadcast_from_rank0=True)
    elif way == 5 and here.simulated is not None:
        if n // 6 % 2:
            fc.save_full(path, before)
            fc.load_full(path, model)
        else:
            fc.save_checkpoint(path, before)
            fc.load_checkpoint(path, model)
    elif way == 5:
        model.load_state_dict(wanted.state_dict())
    optim = _same_optimizer(run, model)
    for _, either in _optimizers(run):
        either.state.clear()
    run.case, run.twin.model, run.twin.optim, run.waiting = case, model, optim, False
    run.infer_without_gradients(seed)


@operation("same bits")
def _train_the_same_bits(run: Run, n: int, seed: int) -> None:
    """With ``deterministic=`` ranks train what one rank does, bit by bit."""
    world, rng = run.case.world, random.Random(f"{seed} {n}")
    if world & (world - 1) or not run.trained(run.twin.reference):
        return
    if recomputes_reentrantly(run):  # each recomputation is a backward
        return
    count = world * (1 + n % 3)
    # A layout of its own puts weights at other addresses, by which MKL rounds.
    case = replace(other_case(run.case, rng), codec=False, mixed="", layout="", deterministic=count)
    alone = replace(case, strategy=rng.choice(STRATEGIES), release=None, offload=(), transport="")
    plain = copy.deepcopy(run.twin.reference)
    _choose_other_units(plain, rng)
    for node in nodes(plain):
        node.skip = None
    plain.zero_grad()
    models, optims = [], []
    for either in (case, alone):
        model = copy.deepcopy(plain)
        shard(either, model, **({"mesh": "self"} if either is alone else {}))
        models.append(model)
        optims.append(make_optimizer(run.case.optimizer, run.trained(model)))
    for part in range(2):
        every = rows(seed + 20 * part, count).chunk(count)
        for model, ranks in zip(models, (world, 1), strict=True):
            for number in range(_place_of(model), count, ranks):
                square_losses(model, every[number].clone(), 1)[0].backward()
        if all(param.grad is None for param in models[0].parameters()):
            return
        norms = [fc.clip_grad_norm_(model, 0.05, (2.0, 1.0)[n % 2]) for model in models]
        assert torch.equal(*norms), f"norms of {norms}"
        for optim in optims:
            optim.step()
            optim.zero_grad()
    for (name, ours), theirs in zip(
        models[0].named_parameters(), models[1].parameters(), strict=True
    ):
        assert torch.equal(whole(ours), whole(theirs)), f"bits of {name}"


def _place_of(model: nn.Module) -> int:
    """Which microbatches a rank has: those from this one on, in steps of the number of ranks."""
    bucket = next(bucket for unit in units(model) for bucket in unit.buckets)
    shards, replicas = bucket.mesh.gather_axis, bucket.mesh.replicate_axis
    return replicas.rank * shards.size + shards.rank


@operation("traceable")
def _make_traceable(run: Run, n: int, seed: int) -> None:
    """Outside of compiled code nothing changes."""
    model = run.twin.model
    found = fc.units_of(model)
    fc.set_traceable(found[n % len(found)] if n % 3 == 0 else model)
    if n % 5:
        run.twin.train_on(seed)
    if n % 4 == 0:
        fc.set_traceable(model, False)
        run.twin.train_on(seed + 20)
    run.twin.check_grads()


@operation("plain meanwhile")
def _train_plain_meanwhile(run: Run, n: int, seed: int) -> None:
    """The modules are undone, trained as plain ones with their optimizer, and sharded again."""
    if n % 2:
        run.twin.train_on(seed)  # gradients are given back whole
    fc.undo(run.twin.model)
    if n % 2:
        for (name, ours), theirs in zip(
            run.twin.model.named_parameters(), run.twin.reference.parameters(), strict=True
        ):
            assert (ours.grad is None) == (theirs.grad is None), name
            if ours.grad is not None and theirs.grad is not None:
                run.compare(f"gradient of {name}", ours.grad, theirs.grad)
    for _, optim in _optimizers(run):
        optim.state.clear()
    if n % 3:
        for model in run.both:
            losses = square_losses(model, run.twin.all_inputs(seed + 20), run.case.world)
            losses.mean().backward()
        for _, optim in _optimizers(run):
            optim.step()
            optim.state.clear()
    if n % 5 == 0:
        run.case = other_case(run.case, random.Random(f"{seed} {n}"))
    _clear(run) if n % 4 else None
    shard(run.case, run.twin.model)
    run.waiting = False
    run.twin.check_grads()


@operation("other forms")
def _save_in_other_forms(run: Run, n: int, seed: int) -> None:
    """State in the forms of torch: of ``state_dict()``, by numbers, by its getters and setters."""
    from torch.distributed.checkpoint.state_dict import (
        StateDictOptions,
        get_state_dict,
        set_state_dict,
    )

    model, optim = run.twin.model, run.twin.optim
    way = n % 5
    if way == 0:
        saved = copy.deepcopy(model.state_dict())
        _spoil(model)
        model.load_state_dict(saved)
    elif way == 1:
        fc.load_state_dict(model, run.twin.reference.state_dict())
    if optim is None or run.twin.plain_optim is None:
        return
    if way == 0:
        kept = copy.deepcopy(optim.state_dict())
        _spoil_state(optim)
        optim.load_state_dict(kept)
    elif way == 1:
        found = fc.optim_state_dict(model, optim)
        by_number = fc.rekey_optim_state_dict(found, "id", model, optim)
        by_name = fc.rekey_optim_state_dict(by_number, "name", model, optim)
        _spoil_state(optim)
        fc.load_optim_state_dict(model, optim, by_name)
    elif way == 2:
        values = [v for state in run.twin.plain_optim.state.values() for v in state.values()]
        is_full = n % 2 == 1 and not run.case.reordered  # which the getter refuses
        is_full = is_full and any(isinstance(v, Tensor) and v.ndim for v in values)
        options = StateDictOptions(full_state_dict=is_full, cpu_offload=not is_full and n % 3 == 0)
        if not run.twin.plain_optim.state:  # the getter steps such an optimizer once
            get_state_dict(run.twin.reference, run.twin.plain_optim)
        weights, state = copy.deepcopy(get_state_dict(model, optim, options=options))
        _spoil(model)
        _spoil_state(optim)
        set_state_dict(
            model, optim, model_state_dict=weights, optim_state_dict=state, options=options
        )
    elif way == 3:
        found = fc.optim_state_dict(model, optim, rank0_only=True, cpu_offload=bool(n % 2))
        _spoil_state(optim)
        fc.load_optim_state_dict(model, optim, found, broadcast_from_rank0=True)
    else:  # a plain optimizer's state, over the plain model
        names = [name for name, _ in run.twin.reference.named_parameters()]
        found = fc.optim_state_dict(run.twin.reference, run.twin.plain_optim)
        assert set(found["state"]) <= set(names)
        fc.load_optim_state_dict(model, optim, copy.deepcopy(found))
    if n % 2:
        run.twin.train_on(seed)
        run.twin.check_grads()


def _spoil(model: nn.Module) -> None:
    with torch.no_grad():
        for param in model.parameters():
            param.mul_(3)


def _spoil_state(optim: torch.optim.Optimizer) -> None:
    for state in optim.state.values():
        for value in state.values():
            if isinstance(value, Tensor):
                value.mul_(3)


@operation("stages")
def _train_stages(run: Run, n: int, seed: int) -> None:
    """Two stages of a pipeline, each sharded over half of the ranks, equal one process."""
    world = run.case.world
    hears = run.case.fault is None or isinstance(run.case.fault, DelayMessage | DelayRank)
    if run.waiting:  # the other model's step is compared while the stages wait for each other
        return
    if world % 2 or not hears or here.simulated is None or recomputes_reentrantly(run):
        return  # between stages data travels by torch's own calls, whose errors are torch's
    rng = random.Random(f"{seed} {n}")
    mesh = init_device_mesh("cpu", (2, world // 2), mesh_dim_names=("pp", "dp"))
    place, dp = (mesh[name].get_local_rank() for name in ("pp", "dp"))
    plain = nn.Sequential(*(seeded(lambda: build(run.case.tree), i) for i in range(2)))
    part = seeded(lambda: build(run.case.tree), place)
    _choose_other_units(part, rng)
    if not all(each(run.twin.input(seed)).requires_grad for each in plain):
        return
    case = replace(
        run.case, strategy=rng.choice(STRATEGIES), release=None, mixed="", world=world // 2
    )
    shard(case, part, mesh=mesh["dp"])
    stage = PipelineStage(part, place, 2, torch.device("cpu"), group=mesh.get_group("pp"))
    microbatches = (2, 4)[n % 2]
    schedule: Any = (ScheduleGPipe, Schedule1F1B)[n // 2 % 2]
    schedule = schedule(
        fc.pipeline_stage(stage) if n % 3 else stage, microbatches, loss_fn=_mean_square
    )
    optims = [make_optimizer(run.case.optimizer, run.trained(each)) for each in (part, plain)]
    for step in range(2):
        every = rows(seed + 20 * step, world).chunk(world // 2)
        every = [torch.cat([x] * (microbatches // 2)) for x in every]
        losses: list[Tensor] = []
        args = () if place else (every[dp],)
        last: dict[str, Any] = {"target": every[dp], "losses": losses} if place else {}
        skips = n % 5 == 4 and step == 0
        if skips:
            with fc.skippable_step(part, pipeline_mesh=mesh["pp"]) as this:
                schedule.step(*args, **last)
                if place and dp == 0:
                    this.discard("it is a bad batch")
            assert this.skipped and all(param.grad is None for param in part.parameters())
            continue
        schedule.step(*args, **last)
        wanted = [
            torch.stack([_mean_square(plain(x), x) for x in whole_.chunk(microbatches)]).mean()
            for whole_ in every
        ]
        torch.stack(wanted).mean().backward()
        if place:
            run.compare("loss", torch.stack(losses).mean(), wanted[dp].detach())
        trained = [p for p in plain.parameters() if p.grad is not None]
        if n % 4 < 3 and trained:
            norm = fc.clip_grad_norm_(part, 0.05, pipeline_mesh=mesh["pp"])
            total = nn.utils.clip_grad_norm_(trained, 0.05)
            run.compare("norm of all stages", norm, total.to(norm.dtype))
        for (name, ours), theirs in zip(
            part.named_parameters(), plain[place].parameters(), strict=True
        ):
            assert (ours.grad is None) == (theirs.grad is None), name
            if ours.grad is not None and theirs.grad is not None:
                run.compare(f"gradient of {name}", whole(ours.grad), theirs.grad)
        for optim, either in zip(optims, (part, plain), strict=True):
            if any(p.grad is not None for p in either.parameters()):
                optim.step()
            optim.zero_grad()
    for (name, ours), theirs in zip(
        part.named_parameters(), plain[place].parameters(), strict=True
    ):
        run.compare(name, whole(ours), theirs.detach())


def _mean_square(output: Tensor, target: Tensor) -> Tensor:
    return (output - target.to(output.dtype)).square().mean()
