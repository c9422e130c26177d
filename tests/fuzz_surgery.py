"""What a fuzzed program does to its modules and optimizers: edits, copies, other shardings.

The operations are known to ``fuzz_operations.operations`` once this file has been imported.
"""

from __future__ import annotations

import copy
import random
from dataclasses import replace
from typing import Any

import torch
from fuzz_options import RELEASING, is_ignored, shard
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel

import fsdp_compose as fc
from fsdp_compose.base.process import here

from fuzz_operations import Run, make_optimizer, operation
from fuzz_programs import HYBRID, STRATEGIES, Case, Leaf, LeafModule, NodeModule, nodes
from fuzz_storage import _folder
from fuzz_twin import square_losses


def leaf_modules(model: nn.Module) -> list[LeafModule]:
    """Those of ``model`` whose weights are sharded."""
    return [m for m in model.modules() if isinstance(m, LeafModule) and not m.leaf.ignored]


def _optimizers(run: Run) -> list[tuple[nn.Module, Any]]:
    """Each model with its optimizer, where there are any."""
    pairs = zip(run.both, (run.twin.optim, run.twin.plain_optim), strict=True)
    return [(model, optim) for model, optim in pairs if optim is not None]


def _renew_groups(run: Run) -> None:
    """Give optimizers the parameters that are new, and take from them those that are gone."""
    for model, optim in _optimizers(run):
        present = {id(param) for param in model.parameters()}
        for group in optim.param_groups:
            for param in group["params"]:
                if id(param) not in present:
                    optim.state.pop(param, None)
            group["params"][:] = [p for p in group["params"] if id(p) in present]
        known = {id(p) for group in optim.param_groups for p in group["params"]}
        new = [p for p in model.parameters() if p.requires_grad and id(p) not in known]
        if new:
            optim.add_param_group({"params": new})
        full = [group for group in optim.param_groups if group["params"]]
        if not full:
            run.twin.optim = run.twin.plain_optim = None
        optim.param_groups[:] = full


def _edit_then_refresh(run: Run, seed: int, n: int) -> None:
    """Go on with models whose modules were edited alike."""
    fc.refresh(run.twin.model)
    _renew_groups(run)
    for model in run.both:
        model.zero_grad()
    run.waiting = False
    if n % 2:
        run.twin.train_on(seed)
        run.twin.check_grads()


def _clear(run: Run) -> None:
    for model in run.both:
        model.zero_grad()


@operation("replace")
def _replace_a_parameter(run: Run, n: int, seed: int) -> None:
    """A parameter of a leaf is another one from now on; where it was tied, it is not any more."""
    _clear(run)
    plain = leaf_modules(run.twin.reference)[n % len(leaf_modules(run.twin.reference))]
    values = [plain.weight.detach() * 0.9 for _ in range(2)]
    for model, value in zip(run.both, values, strict=True):
        leaf = leaf_modules(model)[n % len(leaf_modules(model))]
        leaf.weight = nn.Parameter(value, requires_grad=n % 3 > 0)
    _edit_then_refresh(run, seed, n)


@operation("append")
def _append_a_leaf(run: Run, n: int, seed: int) -> None:
    """A module is added, a unit of its own or a part of the one around it."""
    _clear(run)
    kinds = ("matrix", "vector", "low rank", "scalar")
    leaf = Leaf(kinds[n % 4], frozen=n % 5 == 0)
    for model in run.both:
        torch.manual_seed(seed)
        node = nodes(model)[n % len(nodes(model))]
        like = next(model.parameters(), None)
        added = LeafModule(leaf).to(torch.float64 if like is None else like.device)
        if n % 3 == 2 and model is run.twin.model:
            fc.fully_shard(added)
        node.children_.append(added)
    _edit_then_refresh(run, seed, n)


@operation("remove")
def _remove_a_child(run: Run, n: int, seed: int) -> None:
    """A module, with the units in it, is taken out."""
    found = [i for i, node in enumerate(nodes(run.twin.model)) if len(node.children_) > 1]
    if not found or any(map(is_ignored, run.twin.model.modules())):  # else those may be all
        return
    _clear(run)
    for model in run.both:
        node = nodes(model)[found[n % len(found)]]
        del node.children_[n % len(node.children_)]
        node.skip = None
    _edit_then_refresh(run, seed, n)


@operation("exchange")
def _exchange_parameters(run: Run, n: int, seed: int) -> None:
    """Two leaves change weights, or the second takes the weight of the first too."""
    leaves = leaf_modules(run.twin.reference)
    pairs = [
        (i, j)
        for i, a in enumerate(leaves)
        for j, b in enumerate(leaves)
        if i != j and (a.leaf.kind, a.weight.dtype) == (b.leaf.kind, b.weight.dtype)
    ]
    if not pairs:
        return
    _clear(run)
    i, j = pairs[n % len(pairs)]
    for model in run.both:
        a, b = leaf_modules(model)[i], leaf_modules(model)[j]
        if n % 3:
            a.weight, b.weight = b.weight, a.weight
        else:
            b.weight = a.weight
    _edit_then_refresh(run, seed, n)


@operation("move")
def _move_a_child(run: Run, n: int, seed: int) -> None:
    """A module goes to the end of another."""
    every = nodes(run.twin.model)
    sources = [i for i, node in enumerate(every) if len(node.children_) > 1]
    if not sources or len(every) < 2:
        return
    source = sources[n % len(sources)]
    child = n % len(every[source].children_)
    inside = {id(m) for m in every[source].children_[child].modules()}
    targets = [i for i, node in enumerate(every) if i != source and id(node) not in inside]
    if not targets:
        return
    _clear(run)
    for model in run.both:
        found = nodes(model)
        for node in found:
            node.skip = None
        moved = found[source].children_[child]
        del found[source].children_[child]
        found[targets[n % len(targets)]].children_.append(moved)
    _edit_then_refresh(run, seed, n)


@operation("later group")
def _add_a_group(run: Run, n: int, seed: int) -> None:
    """Trained parameters that the optimizers lack get a group with a rate of its own."""
    name = run.name_of(n)
    for model, optim in _optimizers(run):
        if n % 2:
            model.get_parameter(name).requires_grad_(True)
        known = {id(p) for group in optim.param_groups for p in group["params"]}
        new = [p for p in model.parameters() if p.requires_grad and id(p) not in known]
        if new:
            optim.add_param_group({"params": new, "lr": 0.03})
    if n % 3 == 0:
        run.twin.train_on(seed)
        run.twin.check_grads()


def other_case(case: Case, rng: random.Random) -> Case:
    """The same model sharded otherwise, on the same ranks."""
    world = case.world
    is_even = world >= 4 and world % 2 == 0
    hybrid = (HYBRID[:2] if case.codec else HYBRID) if is_even else ()
    strategy = rng.choice((*STRATEGIES, *hybrid))
    sharers = world // 2 if strategy in HYBRID else world
    spreads = is_even and sharers > 2 and sharers % 2 == 0
    return replace(
        case,
        strategy=strategy,
        prefetch=rng.choice(((1, 1), (0, 0), (2, 1), (1, 3))),
        granularity=rng.choice((1, 1, "row", "tensor", 4)),
        release=rng.choice((None, True, 2 if spreads else None)) if strategy in RELEASING else None,
        offload=rng.choice(((), (), ("params",), ("optimizer",), ("params", "grads"))),
        mixed=rng.choice(("", *(hybrid if strategy not in HYBRID else ()))),
    )


def _choose_other_units(model: nn.Module, rng: random.Random) -> None:
    for module in model.modules():
        if isinstance(module, NodeModule):
            module.node = replace(module.node, unit=rng.random() < 0.5)
        elif isinstance(module, LeafModule):
            module.leaf = replace(module.leaf, unit=rng.random() < 0.4)


@operation("another model")
def _go_on_in_another_model(run: Run, n: int, seed: int) -> None:
    """Weights and optimizer state go into a model that is sharded otherwise, which is trained on.

    The way: state dicts in full, or as slices; a checkpoint; an export; torch's state dicts.
    """
    rng = random.Random(f"{seed} {n}")
    _clear(run)
    case = other_case(run.case, rng)
    before = run.twin.model
    model = copy.deepcopy(run.twin.reference)
    _choose_other_units(model, rng)
    with torch.no_grad():
        for param in model.parameters():
            param.mul_(3)
    shard(case, model)
    optim = _same_optimizer(run, model)
    way = n % 5
    saved: Any = None
    if way < 2:
        kind: Any = ("full", "sharded")[way]
        fc.load_state_dict(model, fc.state_dict(before, kind=kind))
        if optim is not None:
            saved = fc.optim_state_dict(before, run.twin.optim, kind=kind)
            fc.load_optim_state_dict(model, optim, saved)
    elif way == 2 and here.simulated is not None:
        path = _folder(run, seed)
        fc.save_checkpoint(path, before, run.twin.optim)
        fc.load_checkpoint(path, model, optim)
    elif way == 3 and here.simulated is not None:
        path = _folder(run, seed)
        fc.save_full(path, before)
        fc.load_full(path, model)
    else:
        with fc.state_dict_type(before, "full"):
            model.load_state_dict(before.state_dict())
    if way > 2:  # without the optimizer's state
        for _, either in _optimizers(run):
            either.state.clear()
    run.case, run.twin.model, run.twin.optim, run.waiting = case, model, optim, False


def _same_optimizer(run: Run, model: nn.Module) -> Any:
    """A new optimizer over ``model`` with the groups of the plain one."""
    if run.twin.plain_optim is None:
        return None
    names = {id(param): name for name, param in run.twin.reference.named_parameters()}
    groups = []
    for group in run.twin.plain_optim.param_groups:
        params = [model.get_parameter(names[id(p)]) for p in group["params"]]
        backwards = run.case.reordered and run.rank % 2
        groups.append({"params": params[::-1] if backwards else params, "lr": group["lr"]})
    return make_optimizer(run.case.optimizer, groups)  # type: ignore[arg-type]


@operation("shard otherwise")
def _shard_otherwise(run: Run, n: int, seed: int) -> None:
    """The same modules are plain for a moment, and then sharded with other units and options."""
    rng = random.Random(f"{seed} {n}")
    _clear(run)
    fc.undo(run.twin.model)
    _choose_other_units(run.twin.model, rng)
    run.case = other_case(run.case, rng)
    shard(run.case, run.twin.model)
    for _, optim in _optimizers(run):
        optim.state.clear()
    run.waiting = False


@operation("copies")
def _go_on_with_copies(run: Run, n: int, seed: int) -> None:
    """Copies of model and optimizer go on, and what is done to the original changes nothing."""
    _clear(run)
    before = run.twin.model, run.twin.optim
    run.twin.model, run.twin.optim = copy.deepcopy(before)
    square_losses(before[0], run.twin.input(seed), 1).sum().backward()
    with torch.no_grad():
        for param in before[0].parameters():
            param.mul_(3)
    if n % 2:
        run.twin.train_on(seed)
        run.twin.check_grads()


@operation("average")
def _average(run: Run, n: int, seed: int) -> None:
    """A running average of the weights computes what the plain one does."""
    averages = [AveragedModel(model) for model in run.both]
    for part in range(2):
        with torch.no_grad():
            for model in run.both:
                for param in model.parameters():
                    param.mul_(0.9)
        for average, model in zip(averages, run.both, strict=True):
            average.update_parameters(model)
        if n % 2 == part:
            run.twin.train_on(seed)
    with torch.no_grad():
        ours, plain = (average(run.twin.input(seed)) for average in averages)
    run.compare("output of an average", ours, plain)


def _used_matrices(model: nn.Module, reference: nn.Module) -> list[nn.Parameter]:
    names = [n for n, p in reference.named_parameters() if p.ndim == 2 and p.numel()]
    return [p for n in names if (p := model.get_parameter(n)).requires_grad]


@operation("owners")
def _step_whole_matrices(run: Run, n: int, seed: int) -> None:
    """One rank steps each matrix."""
    _clear(run)
    ours, plain = (_used_matrices(model, run.twin.reference) for model in run.both)
    if not ours:
        return

    def make(groups: Any) -> torch.optim.Optimizer:
        return torch.optim.SGD(groups, lr=0.05, momentum=0.9)

    pair = fc.owner_step(ours, make), make(plain)
    for part in range(1 + n % 3):
        run.twin.train_on(seed + 20 * part)
        if any(param.grad is not None for param in plain):
            for optim in pair:
                optim.step()
        _clear(run)
    for name, found in run.twin.model.named_parameters():
        run.compare(name, run.whole(found), run.twin.reference.get_parameter(name).detach())


@operation("two optimizers")
def _step_with_two(run: Run, n: int, seed: int) -> None:
    """Each half of the parameters has an optimizer, and they take turns."""
    _clear(run)
    pairs = []
    for half in range(2):
        chosen = [run.trained(model)[half::2] for model in run.both]
        if chosen[1]:
            pairs.append([make_optimizer(run.case.optimizer, params) for params in chosen])
    for part in range(3):
        run.twin.train_on(seed + 20 * part)
        for optim in pairs[(part + n) % 2] if len(pairs) == 2 else ():
            if any(p.grad is not None for p in pairs[(part + n) % 2][1].param_groups[0]["params"]):
                optim.step()
        if n % 3:
            _clear(run)
    run.twin.check_grads()
    _clear(run)


@operation("closure")
def _step_with_a_closure(run: Run, n: int, seed: int) -> None:
    """The optimizer computes the gradients of its step itself."""
    optimizers = _optimizers(run)
    for model, optim in optimizers:
        model.zero_grad()

        def evaluate(model: nn.Module = model) -> Tensor:
            if model is run.twin.model:
                loss = run.twin.own_loss(seed)
            else:
                loss = square_losses(model, run.twin.all_inputs(seed), run.case.world).mean()
            loss.backward()
            return loss

        if any(p.requires_grad for group in optim.param_groups for p in group["params"]):
            optim.step(evaluate)
    run.twin.check_grads()
    _clear(run)


@operation("buffers")
def _change_buffers(run: Run, n: int, seed: int) -> None:
    """Buffers that a forward writes, and reads a weight for, are as in the plain model."""
    if any(node.node.style == "chunked" for node in nodes(run.twin.model)):
        return  # the plain model's chunks are of other rows, and what it counts by then differs
    chosen = n % len(leaf_modules(run.twin.model))
    handles = []
    for model in run.both:
        leaf = leaf_modules(model)[chosen]
        leaf.register_buffer("seen", torch.zeros((), dtype=torch.float64))
        handles.append(leaf.register_forward_pre_hook(_count))
    run.twin.train_on(seed)
    with torch.no_grad():
        run.infer(seed)
    if n % 3 == 0:
        saved = copy.deepcopy(fc.state_dict(run.twin.model))
        fc.load_state_dict(run.twin.model, saved)
    ours, plain = (leaf_modules(model)[chosen] for model in run.both)
    run.compare("a buffer", ours.seen, plain.seen)  # type: ignore[arg-type]
    for leaf, handle in zip((ours, plain), handles, strict=True):
        handle.remove()
        del leaf.seen
    run.twin.check_grads()


def _count(module: nn.Module, args: Any) -> Any:
    with torch.no_grad():
        module.seen += 1 + module.weight.sum()  # type: ignore[union-attr, operator]
    return tuple(x * (1 + 0.01 * torch.tanh(module.seen.clone())) for x in args)  # type: ignore[operator, arg-type]
