"""What a fuzzed program does: each operation, on a sharded model and its plain twin."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from fuzz_options import is_ignored, shard
from torch import Tensor, nn

import fsdp_compose as fc
from fsdp_compose import (
    ShardedWeightError,
)
from fsdp_compose.scopes.switches import Keep

from fuzz_programs import (
    Case,
    LeafModule,
    NodeModule,
    leaves_units_kept,
    nodes,
)
from fuzz_twin import Batched, penalised_losses
from models import assert_at_rest, compare, units, whole


def make_optimizer(name: str, params: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    if name == "sgd":
        return torch.optim.SGD(params, lr=0.1, momentum=0.9)
    if name == "decayed sgd":
        return torch.optim.SGD(params, lr=0.1, weight_decay=0.1)
    # A large epsilon: AdamW's step is the sign of a gradient that is all rounding.
    return torch.optim.AdamW(params, lr=0.01, weight_decay=0.2, eps=1e-2, foreach=name == "adamw")


@dataclass(eq=False)
class Run:
    """A case under way on one rank."""

    case: Case
    rank: int
    twin: Batched
    waiting: bool = False  # a forward whose backward never comes may have left units gathered

    @property
    def both(self) -> tuple[nn.Module, nn.Module]:
        return self.twin.model, self.twin.reference

    def name_of(self, n: int) -> str:
        left = {id(m.weight) for m in self.twin.model.modules() if is_ignored(m)}
        named = list(self.twin.model.named_parameters())
        names = [name for name, param in named if id(param) not in left] or [named[0][0]]
        return names[n % len(names)]

    def trained(self, model: nn.Module) -> list[nn.Parameter]:
        return [p for p in model.parameters() if p.requires_grad]

    def infer(self, seed: int) -> None:
        """Both compute the same on this rank's batch."""
        ours, theirs = (model(self.twin.input(seed)) for model in self.both)
        self.compare("output", ours, theirs)

    def infer_without_gradients(self, seed: int) -> None:
        with torch.no_grad():
            self.infer(seed)

    def whole(self, tensor: Tensor) -> Tensor:
        return whole(tensor)

    def compare(self, what: str, found: Tensor, wanted: Tensor) -> None:
        compare(what, found, wanted.to(found.dtype), self.twin.tolerance)


Operation = Callable[[Run, int, int], None]
operations: dict[str, Operation] = {}


def operation(name: str) -> Callable[[Operation], Operation]:
    def add(function: Operation) -> Operation:
        operations[name] = function
        return function

    return add


@operation("step")
def _step(run: Run, n: int, seed: int) -> None:
    run.twin.train_on(seed)
    if not run.waiting and not leaves_units_kept(run.case.tree):
        assert_at_rest(run.twin.model)
    has_gradients = any(p.grad is not None for p in run.twin.reference.parameters())
    if run.twin.optim is not None and has_gradients:  # a step of none is an error (D12)
        run.twin.step()


@operation("accumulate")
def _accumulate(run: Run, n: int, seed: int) -> None:
    run.twin.train_on(seed)
    run.twin.check_grads()


def _accumulate_in(keep: Keep) -> Operation:
    def operate(run: Run, n: int, seed: int) -> None:
        with fc.accumulate(run.twin.model, keep=keep):
            for part in range(1 + n % 3):
                run.twin.train_on(seed + 20 * part)
        run.twin.check_grads()

    return operate


operation("accumulate sharded")(_accumulate_in("sharded"))
operation("accumulate unsharded")(_accumulate_in("unsharded"))
operation("accumulate local")(_accumulate_in("no_all_reduce"))


@operation("no_sync")
def _no_sync(run: Run, n: int, seed: int) -> None:
    with fc.no_sync(run.twin.model):
        run.twin.train_on(seed + 20)
    if n % 3 == 0:  # what is asked for by name leaves alone what waits
        _autograd_grad(run, n, seed + 40)
    if n % 2:
        run.twin.train_on(seed)
    fc.reduce_grads(run.twin.model)
    run.twin.check_grads()


@operation("two forwards")
def _two_forwards(run: Run, n: int, seed: int) -> None:
    first, second = (run.twin.pair(s) for s in (seed, seed + 100))
    for a, b in zip(first, second):
        (a + 2 * b).backward()


@operation("crossed")
def _crossed(run: Run, n: int, seed: int) -> None:
    first, second = (run.twin.pair(s) for s in (seed, seed + 100))
    for loss in (*first, *second) if n % 2 else (*second, *first):
        loss.backward()


@operation("retain")
def _retain(run: Run, n: int, seed: int) -> None:
    if is_read_once(run):
        return
    for loss in run.twin.pair(seed):
        loss.backward(retain_graph=True)
        loss.backward()


@operation("no_grad")
def _no_grad(run: Run, n: int, seed: int) -> None:
    with torch.no_grad():
        run.infer(seed)


@operation("inference")
def _inference(run: Run, n: int, seed: int) -> None:
    with torch.inference_mode():
        run.infer(seed)


@operation("eval")
def _eval(run: Run, n: int, seed: int) -> None:
    for model in run.both:
        model.eval()
    with torch.no_grad():
        run.infer(seed)
    for model in run.both:
        model.train()


@operation("dropped")
def _dropped(run: Run, n: int, seed: int) -> None:
    run.twin.pair(seed)
    run.waiting = True


@operation("toggle")
def _toggle(run: Run, n: int, seed: int) -> None:
    name = run.name_of(n)
    for model in run.both:
        param = model.get_parameter(name)
        param.requires_grad_(not param.requires_grad)
        param.grad = None


def _skip(model: nn.Module, n: int) -> None:
    node = nodes(model)[n % len(nodes(model))]
    node.skip = None if node.skip is not None else n % len(node.children_)


@operation("skip")
def _skip_everywhere(run: Run, n: int, seed: int) -> None:
    run.waiting = True  # what an inference kept gathered for a unit that is skipped from now on
    for model in run.both:
        _skip(model, n)


@contextlib.contextmanager
def skipping(node: NodeModule, child: int) -> Iterator[None]:
    node.skip = child
    yield
    node.skip = None


def spare_leaves(node: NodeModule) -> list[int]:
    """Positions of trained leaves of a node whose unit trains another one there too."""
    spare = [
        i
        for i, child in enumerate(node.children_)
        if isinstance(child, LeafModule)
        and not child.leaf.unit
        and child.leaf.dtype == "float64"
        and child.leaf.tie is None
        and child.leaf.kind != "empty"  # for which ranks alone exchange nothing
        and child.weight.requires_grad
    ]
    return spare if len(spare) > 1 else []


@operation("update")
def _update(run: Run, n: int, seed: int) -> None:
    if run.twin.optim is None:
        return
    params = [p for group in run.twin.optim.param_groups for p in group["params"]]
    if all(p.grad is None for p in params) and any(p.requires_grad for p in params):
        with contextlib.suppress(RuntimeError):
            run.twin.optim.step()
            raise AssertionError("a step without any gradient was not refused")
        return
    run.twin.step()


@operation("zero")
def _zero(run: Run, n: int, seed: int) -> None:
    for model in run.both:
        model.zero_grad(set_to_none=bool(n % 2))


def _clip_with(clip: Callable[[Any], Tensor], run: Run, seed: int) -> None:
    run.twin.train_on(seed)
    trained = run.trained(run.twin.reference)
    wanted = torch.nn.utils.clip_grad_norm_(trained, 0.05)
    if any(p.grad is not None for p in trained):
        run.compare("norm", clip(run.twin.model), wanted)
    run.twin.check_grads()


@operation("clip")
def _clip(run: Run, n: int, seed: int) -> None:
    _clip_with(lambda model: fc.clip_grad_norm_(model, 0.05), run, seed)


@operation("torch clip")
def _torch_clip(run: Run, n: int, seed: int) -> None:
    clip = torch.nn.utils.clip_grad_norm_
    _clip_with(lambda model: clip(run.trained(model), 0.05, foreach=bool(n % 2)), run, seed)


@operation("norm")
def _norm(run: Run, n: int, seed: int) -> None:
    name = run.name_of(n)
    ours, plain = (model.get_parameter(name).detach() for model in run.both)
    if plain.numel():
        run.compare("norm of a parameter", whole(ours.norm()), plain.norm())


def recomputes(run: Run) -> bool:
    """Whether a part of this model is computed again in backward."""
    return any(node.node.recompute != "no" for node in nodes(run.twin.model))


def recomputes_reentrantly(run: Run) -> bool:
    """Whether torch refuses ``autograd.grad`` over this model."""
    return any(node.node.recompute == "reentrant" for node in nodes(run.twin.model))


def is_read_once(run: Run) -> bool:
    """Whether torch refuses a second backward over a graph of this model."""
    return any(node.node.recompute == "selective" for node in nodes(run.twin.model))


@operation("grad")
def _autograd_grad(run: Run, n: int, seed: int) -> None:
    """Of all parameters, or of some, where no gradients end the backward of other units."""
    if recomputes_reentrantly(run):
        return
    losses = run.twin.pair(seed)
    grads = [
        torch.autograd.grad(loss, run.trained(model)[n % 2 :: 1 + n % 3], allow_unused=True)
        for loss, model in zip(losses, run.both)
        if run.trained(model)[n % 2 :: 1 + n % 3]
    ]
    for found, wanted in zip(*grads) if grads else ():
        wanted = None if wanted is None or not wanted.any() else wanted
        if found is None or wanted is None:
            assert wanted is None and (found is None or not whole(found).any())
        else:
            run.compare("autograd.grad", whole(found), wanted)


@operation("penalty")
def _gradient_penalty(run: Run, n: int, seed: int) -> None:
    if recomputes_reentrantly(run) or is_read_once(run):
        return
    run.twin.train_on(seed, penalised_losses)
    if n % 2:  # two graphs over gradients at once, one of them read twice
        first, second = (run.twin.pair(seed + part, penalised_losses) for part in (20, 40))
        for a, b in zip(first, second):
            b.backward(retain_graph=True)
            a.backward()
            b.backward()
    run.twin.check_grads()


@operation("gathered")
def _gathered(run: Run, n: int, seed: int) -> None:
    with torch.no_grad(), fc.gathered(run.twin.model):
        ours = dict(run.twin.model.named_parameters())
        for name, plain in run.twin.reference.named_parameters():
            run.compare(name, ours[name].detach(), plain.detach())
        run.infer(seed)


@operation("gathered loss")
def _loss_in_a_scope(run: Run, n: int, seed: int) -> None:
    """A loss of the scope's tensors; its backward comes inside the scope or after it."""
    if is_read_once(run) and not n % 2:
        return  # it would be recomputed where nothing is gathered any more
    with fc.gathered(run.twin.model):
        ours, plain = run.twin.pair(seed)
        if n % 2:
            ours.backward()
    run.waiting = True
    plain.backward()
    try:
        if not n % 2:
            ours.backward()
    except ShardedWeightError:  # recomputed after the scope, by a function that gathers nothing
        assert any(node.node.recompute != "no" for node in nodes(run.twin.model))
        for model in run.both:
            model.zero_grad()


@operation("unshard")
def _unshard(run: Run, n: int, seed: int) -> None:
    fc.unshard(run.twin.model)
    if n % 2:
        run.twin.train_on(seed)
    fc.reshard(run.twin.model)
    run.waiting = True


@operation("undo")
def _undo(run: Run, n: int, seed: int) -> None:
    fc.undo(run.twin.model)
    for (name, found), wanted in zip(
        run.twin.model.named_parameters(), run.twin.reference.parameters()
    ):
        run.compare(name, found.detach(), wanted.detach())
    if run.twin.optim is not None:
        params = [p for group in run.twin.optim.param_groups for p in group["params"]]
        for optim in (run.twin.optim, run.twin.plain_optim):
            assert optim is not None
            optim.state.clear()  # its state was sharded
        assert all(any(p is q for q in run.twin.model.parameters()) for p in params)
    run.waiting = False
    shard(run.case, run.twin.model)


@operation("hook")
def _gradient_hook(run: Run, n: int, seed: int) -> None:
    """A hook on a parameter sees its whole gradient once, and what it returns counts."""
    name = run.name_of(n)
    calls = [0, 0]
    handles = []
    for i, model in enumerate(run.both):
        param = model.get_parameter(name)
        if not param.requires_grad:
            return

        def halve(grad: Tensor, i: int = i) -> Tensor:
            calls[i] += 1
            return grad * 0.5

        handles.append(param.register_hook(halve))
    run.twin.train_on(seed)
    for handle in handles:
        handle.remove()
    once = calls[0] <= 1 or recomputes_reentrantly(run)  # each recomputation is a backward then
    assert once, f"the hook of {name} ran {calls[0]} times"


@operation("hook after")
def _optimizer_in_backward(run: Run, n: int, seed: int) -> None:
    """A hook that steps a parameter as soon as its gradient is there sees the whole of it."""
    name = run.name_of(n)
    if recomputes_reentrantly(run) or not run.twin.model.get_parameter(name).requires_grad:
        return
    for model in run.both:
        model.zero_grad()
    handles = []
    for model in run.both:

        def step(param: Tensor) -> None:
            with torch.no_grad():
                assert param.grad is not None
                param.sub_(param.grad, alpha=0.1)
            param.grad = None

        handles.append(model.get_parameter(name).register_post_accumulate_grad_hook(step))
    run.twin.train_on(seed)
    for handle in handles:
        handle.remove()
    run.compare(name, *(run.whole(model.get_parameter(name)) for model in run.both))
    run.twin.check_grads()


@operation("inputs")
def _backward_of_some(run: Run, n: int, seed: int) -> None:
    """``backward(inputs=)`` leaves the other gradients alone."""
    if recomputes_reentrantly(run):
        return
    losses = run.twin.pair(seed)
    for loss, model in zip(losses, run.both):
        chosen = [p for i, p in enumerate(run.trained(model)) if (i + n) % 2]
        if chosen and any(p.requires_grad for p in chosen):
            loss.backward(inputs=chosen)
    run.waiting = True
    run.twin.check_grads()


@operation("scope clip")
def _clip_in_a_scope(run: Run, n: int, seed: int) -> None:
    """The usual loops over parameters act on them inside a scope too."""
    run.twin.train_on(seed)
    with fc.gathered(run.twin.model):
        trained = [run.trained(model) for model in run.both]
        if n % 3 == 0:
            found = [torch.nn.utils.clip_grad_norm_(params, 0.05) for params in trained]
            if any(p.grad is not None for p in trained[1]):
                run.compare("norm", *found)
        elif n % 3 == 1:
            for model in run.both:
                model.zero_grad()
        else:
            for model in run.both:
                param = model.get_parameter(run.name_of(n))
                param.requires_grad_(not param.requires_grad)
                param.grad = None
    ours, theirs = (dict(model.named_parameters()) for model in run.both)
    flags = [{k: p.requires_grad for k, p in found.items()} for found in (ours, theirs)]
    assert flags[0] == flags[1], f"flags set in a scope: {flags[0]}, wanted {flags[1]}"
    run.twin.check_grads()


@operation("scope grad")
def _grad_in_a_scope(run: Run, n: int, seed: int) -> None:
    """Gradients asked for by name inside a scope are averaged over the ranks."""
    if recomputes_reentrantly(run) or run.case.compute:
        return
    with fc.gathered(run.twin.model):
        losses = run.twin.pair(seed)
        found = [
            torch.autograd.grad(loss, run.trained(model), allow_unused=True)
            for loss, model in zip(losses, run.both)
            if run.trained(model)
        ]
    run.waiting = True
    for mine, wanted in zip(*found) if found else ():
        if mine is None or wanted is None:
            assert wanted is None or not wanted.any(), "no gradient in a scope"
        else:
            run.compare("gradient in a scope", run.whole(mine), wanted)


@operation("divide")
def _divide(run: Run, n: int, seed: int) -> None:
    for model in run.both:
        model.zero_grad()
    fc.set_gradient_divide_factor(run.twin.model, 2.0 * run.case.world)
    run.twin.train_on(seed)
    fc.set_gradient_divide_factor(run.twin.model, None)
    for param in run.twin.reference.parameters():
        if param.grad is not None:
            param.grad *= 0.5
    run.twin.check_grads()


@operation("own reduction")
def _reduce_by_a_hook(run: Run, n: int, seed: int) -> None:
    fc.register_comm_hook(run.twin.model, None, fc.default_hook)
    run.twin.train_on(seed)
    fc.register_comm_hook(run.twin.model, None, None)
    run.twin.check_grads()


@operation("switch")
def _switch(run: Run, n: int, seed: int) -> None:
    """Units that stay gathered after forward, or after backward, read what was written since."""
    model, before = run.twin.model, [vars(u.switches).copy() for u in units(run.twin.model)]
    fc.set_reshard_after_forward(model, bool(n % 2))
    fc.set_reshard_after_backward(model, n % 3 == 0)
    for unit in units(model) if n % 4 == 1 else ():
        if len(unit.modules) == 1:  # what its forward saves decides
            unit.switches.unshard_in_backward = False
    for part in range(2):
        run.twin.train_on(seed + 20 * part)
        with torch.no_grad():
            for either in run.both:
                for param in either.parameters():
                    param.mul_(0.98)
    for unit, switches in zip(units(model), before):
        vars(unit.switches).update(switches)
    fc.reshard(model)
    run.waiting = True
    run.twin.check_grads()


@operation("refresh")
def _refresh(run: Run, n: int, seed: int) -> None:
    fc.refresh(run.twin.model)


@operation("functional")
def _functional_call(run: Run, n: int, seed: int) -> None:
    x = run.twin.input(seed)
    with torch.no_grad():
        weights = {k: whole(v).to(x.device) * 1.5 for k, v in run.twin.model.named_parameters()}
        ours = torch.func.functional_call(run.twin.model, weights, (x,))
        plain = {k: v.detach() * 1.5 for k, v in run.twin.reference.named_parameters()}
        theirs = torch.func.functional_call(run.twin.reference, plain, (x,))
    run.compare("functional output", ours, theirs)
