"""Operations of fuzzed programs that read, write, save and load weights and optimizer state."""

from __future__ import annotations

import copy
import shutil
import tempfile
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    set_model_state_dict,
)

import fsdp_compose as fc
from fsdp_compose import sharded
from fsdp_compose.base.process import here

from fuzz_mistakes import count_ranks, expect_error
from fuzz_operations import Run, make_optimizer, operation, recomputes
from harness import DEVICE

_folders: list[Path] = []


def _folder(run: Run, seed: int) -> Path:
    """A folder that the simulated ranks share; ``remove_folders`` ends it."""
    if not _folders:
        _folders.append(Path(tempfile.mkdtemp(prefix="fuzz-")))
    return _folders[0] / f"{id(here.simulated)}-{seed}"


def remove_folders() -> None:
    """Remove what a program saved."""
    while _folders:
        shutil.rmtree(_folders.pop(), ignore_errors=True)


def _spoil(run: Run) -> None:
    with torch.no_grad():
        for param in run.twin.model.parameters():
            param.mul_(3)


def _compare_state(run: Run) -> None:
    full = fc.state_dict(run.twin.model)
    for name, wanted in run.twin.reference.state_dict().items():
        run.compare(name, full[name], wanted)


@operation("state")
def _state_dict(run: Run, n: int, seed: int) -> None:
    model = run.twin.model
    kind = ("full", "sharded", "local")[n % 3]
    saved = copy.deepcopy(fc.state_dict(model, kind=kind))  # type: ignore[arg-type]
    _spoil(run)
    fc.load_state_dict(model, saved)
    _compare_state(run)


@operation("torch state")
def _torch_state_dict(run: Run, n: int, seed: int) -> None:
    """Torch's own getter gives the whole."""
    options = StateDictOptions(full_state_dict=True)
    found = get_model_state_dict(run.twin.model, options=options)
    for name, wanted in run.twin.reference.state_dict().items():
        run.compare(name, found[name], wanted)


@operation("save")
def _save(run: Run, n: int, seed: int) -> None:
    """Model and optimizer come back from a checkpoint; the model alone from an export."""
    if here.simulated is None:
        return
    path = _folder(run, seed)
    model, optim = run.twin.model, run.twin.optim
    if n % 2:
        fc.save_full(path, model)
        _spoil(run)
        fc.load_full(path, model)
    else:
        fc.save_checkpoint(path, model, optim, {"seed": seed})
        _spoil(run)
        fresh = _fresh_optimizer(run)
        assert fc.load_checkpoint(path, model, fresh) == {"seed": seed}
        run.twin.optim = fresh
    _compare_state(run)


def _fresh_optimizer(run: Run) -> Any:
    if run.twin.optim is None:
        return None
    groups = [{"params": g["params"], "lr": g["lr"]} for g in run.twin.optim.param_groups]
    return make_optimizer(run.case.optimizer, groups)  # type: ignore[arg-type]


@operation("optimizer state")
def _optimizer_state(run: Run, n: int, seed: int) -> None:
    if run.twin.optim is None:
        return
    kind = ("full", "sharded", "local")[n % 3]
    saved = fc.optim_state_dict(run.twin.model, run.twin.optim, kind=kind)  # type: ignore[arg-type]
    saved = copy.deepcopy(saved)
    fresh = _fresh_optimizer(run)
    fc.load_optim_state_dict(run.twin.model, fresh, saved)
    run.twin.optim = fresh


@operation("write")
def _write(run: Run, n: int, seed: int) -> None:
    """Every element, every last row, or noise that depends on the seed alone."""
    # Offloaded parameters draw their noise on the host, the reference draws it on its device.
    draws = n % 4 == 3 and (DEVICE == "cpu" or not run.case.offload)
    for model in run.both:
        with torch.no_grad(), torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            for param in model.parameters():
                if draws and param.is_floating_point():
                    param.add_(torch.randn_like(param), alpha=0.01)
                elif n % 4 == 2 and param.ndim and len(param) and param.is_contiguous():
                    param[-1].mul_(0.99)
                else:
                    param.mul_(0.99)


@operation("write local")
def _write_local(run: Run, n: int, seed: int) -> None:
    """What is written through a plain tensor over this rank's slice is the parameter's."""
    if DEVICE != "cpu":
        return  # the numbers that lie there are compared in debug mode alone
    name, plain = run.name_of(n), fc.named_local_parameters(run.twin.model)
    if name not in plain:  # it is frozen
        return
    with torch.no_grad():
        plain[name].mul_(0.98)
        run.twin.reference.get_parameter(name).mul_(0.98)


@operation("write unseen")
def _write_unseen(run: Run, n: int, seed: int) -> None:
    """What autograd did not see written is read by the next pass, or raises on every rank."""
    if DEVICE != "cpu":
        return  # as above: the pass may read what was gathered before
    name, plain = run.name_of(n), fc.named_local_parameters(run.twin.model)
    if name not in plain or count_ranks(run, plain[name].numel() > 0) < run.case.world:
        return  # a rank without a part of it would wait for the others, which raise
    in_backward = n % 2 and not (run.case.compute or run.waiting or recomputes(run))
    losses = run.twin.pair(seed)
    plain[name].data.mul_(0.97)
    run.twin.reference.get_parameter(name).data.mul_(0.97)

    def go_on() -> None:
        for loss in losses if in_backward else run.twin.pair(seed + 100):
            loss.backward() if in_backward else loss.detach()

    expect_error(run, "a way that autograd does not count", None, go_on)
    with torch.no_grad():
        plain[name].mul_(1)  # which autograd sees; a unit that is skipped now was not looked at
    for unit in fc.units_of(run.twin.model):
        fc.reshard(unit)
    run.twin.pair(seed + 100)


@operation("write data")
def _write_data(run: Run, n: int, seed: int) -> None:
    name = run.name_of(n)
    for model in run.both:
        param = model.get_parameter(name)
        if n % 2:
            param.data = param.data * 0.97
        else:
            param.data.mul_(0.97)


@operation("write late")
def _write_before_backward(run: Run, n: int, seed: int) -> None:
    """A backward reads what was written through ``.data`` since its forward."""
    if run.case.compute:
        return
    name = run.name_of(n)
    losses = run.twin.pair(seed)
    for model in run.both:
        model.get_parameter(name).data.mul_(1.1)
    for loss in losses:
        loss.backward()
    run.twin.check_grads()


@operation("write between")
def _write_between(run: Run, n: int, seed: int) -> None:
    """A backward after a write that autograd sees has the old gradients, or raises everywhere."""
    if recomputes(run) or run.waiting:
        return
    name = run.name_of(n)
    loss, plain = run.twin.pair(seed)
    plain.backward()
    with torch.no_grad():
        for model in run.both:
            model.get_parameter(name).mul_(1.1)
    said = expect_error(run, "", None, loss.backward)
    assert not said or "was written between" in said or "modified by an inplace" in said, said
    run.twin.check_grads()


@operation("swap")
def _swap(run: Run, n: int, seed: int) -> None:
    """Other weights for one forward; then the former memory has its values still."""
    name = run.name_of(n)
    params = [model.get_parameter(name) for model in run.both]
    before = [param.data for param in params]
    for param, data in zip(params, before):
        param.data = data * 1.5
    with torch.no_grad():
        run.infer(seed)
    for param, data in zip(params, before):
        param.data = data
    with torch.no_grad():
        run.infer(seed)


@operation("edit")
def _edit_in_a_scope(run: Run, n: int, seed: int) -> None:
    name = run.name_of(n)
    with torch.no_grad(), fc.gathered(run.twin.model, writeback=True):
        for model in run.both:
            param = model.get_parameter(name)
            param.add_(torch.ones_like(param).tril() if param.ndim == 2 else 0.25)


@operation("save behind")
def _save_behind(run: Run, n: int, seed: int) -> None:
    """A checkpoint has the weights and state of when it was begun, whatever is done meanwhile."""
    if here.simulated is None:
        return
    path, model, optim = _folder(run, seed), run.twin.model, run.twin.optim
    saving = fc.save_checkpoint(path, model, optim, asynchronous=True)
    if n % 2:
        run.twin.train_on(seed)
    _spoil(run)
    if n % 3 == 0 and optim is not None:
        for state in optim.state.values():
            for value in state.values():
                if isinstance(value, torch.Tensor):
                    value.mul_(3)
    saving.wait()
    fc.load_checkpoint(path, model, optim)
    run.waiting = True
    _compare_state(run)
    run.twin.check_grads()


@operation("load from one")
def _load_from_one_rank(run: Run, n: int, seed: int) -> None:
    """One rank alone has what is loaded, of the model or of a part, by this library or by torch."""
    parts = list(run.twin.model.modules()) if n % 3 else [run.twin.model]
    chosen = n % len(parts)
    part, plain = parts[chosen], list(run.twin.reference.modules())[chosen]
    if not any(map(sharded.is_sharded, part.parameters())):
        return
    saved = copy.deepcopy(fc.state_dict(part, rank0_only=True))
    assert bool(saved) == (run.rank == 0)
    _spoil(run)
    if n % 4 == 3 and part is run.twin.model:
        options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
        set_model_state_dict(part, saved, options=options)
    else:
        fc.load_state_dict(part, saved, broadcast_from_rank0=True)
    full = fc.state_dict(part)
    for name, wanted in plain.state_dict().items():
        run.compare(name, full[name], wanted)
    fc.load_state_dict(run.twin.model, run.twin.reference.state_dict())


@operation("unshard a part")
def _unshard_a_part(run: Run, n: int, seed: int) -> None:
    """Units that are gathered by name, one after the other or all, around passes."""
    found = fc.units_of(run.twin.model)
    chosen = found[n % len(found)]
    handle = fc.unshard(chosen, async_op=n % 2 == 0)
    if n % 3 == 0:
        with fc.accumulate(run.twin.model, keep="unsharded"):
            run.twin.train_on(seed)
            run.twin.train_on(seed + 20)
    elif handle is not None and n % 4:
        handle.wait()
    with torch.no_grad():
        run.infer(seed)
    run.twin.train_on(seed)
    fc.reshard(chosen)
    run.waiting = True
    run.twin.check_grads()


@operation("own gradients")
def _edit_gradients(run: Run, n: int, seed: int) -> None:
    """What loops do to gradients by hand."""
    run.twin.train_on(seed)
    for model in run.both:
        params = [p for p in model.parameters() if p.grad is not None]
        for param in params:
            if n % 5 == 0:
                param.grad.add_(param.detach(), alpha=0.1)
            elif n % 5 == 1:
                param.grad = param.grad * 0.5 + 0.1 * param.detach()
            elif n % 5 == 2:
                param.grad = -param.grad
            elif n % 5 == 3:
                param.grad = torch.where(param.grad > 0, param.grad, torch.zeros_like(param.grad))
        if n % 5 == 4 and params:
            with torch.no_grad():
                torch._foreach_sub_(params, [p.grad for p in params], alpha=0.01)
                torch._foreach_zero_([p.grad for p in params])
    run.twin.check_grads()
