"""Says what to call instead of a function that is refused on a slice, depending on its caller.

This reads the callers' frames, which takes time only where an error is raised anyway. The innermost
frame that a table or a rule knows decides.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable
from types import FrameType
from typing import Any

from torch import Tensor, nn
from torch.fx import GraphModule
from torch.optim import Optimizer

from fsdp_compose.base.torch_stack import is_called_from, walk_stack
from fsdp_compose.sharded.ops import MEMORY

__all__ = [
    "EDGE",
    "EXPORT",
    "INTO_SCOPE",
    "PRIVACY",
    "QUANTIZING",
    "RAW",
    "READ",
    "SAVING",
    "STATE_KEY",
    "TENSOR_PARALLEL_FIRST",
    "advise_call",
    "advise_on_target",
]

STATE_KEY = "_fsdp_compose_state"
"""The attribute of a module that heads a unit, where ``fully_shard`` keeps what it attached."""

_COPIES = (
    "`p.full_tensor()` is a detached copy of the whole (every rank calls it; `p.copy_(whole)` "
    "writes one back), `p.to_local()` this rank's 1-D slice."
)
ANY = (
    "Gather it for a while: `with fsdp_compose.gathered(module):` (writeback=True to write it, "
    "with_grads=True for gradients too; what an optimizer keeps stays cut); if a method other than "
    "forward uses it, name the method: `fully_shard(module, "
    f"methods=('forward', ...))`. {_COPIES}"
)
SAVING = (
    "To save the whole, call on every rank fsdp_compose.save_full(path, module) (safetensors), "
    "save_checkpoint(...), or state_dict(module, kind='full'), whose plain tensors any format "
    "takes; state_dict(module, kind='local') is for one file per rank."
)
RAW = (
    f"{SAVING} `p.to_local()` gives the memory of the slice itself, local_parameters(model) that "
    "of all slices; `p.full_tensor()` is a detached copy of the whole (every rank calls it). Tied "
    "parameters are one object: compare id(p), not addresses."
)
KEPT_SLICE = "Where p.to_local() was kept from before p was written, call it again. "
READ = (
    "torch.tensor(p), torch.as_tensor(p, dtype=...), torch.vmap over p, collectives of "
    "torch.distributed and operators of other packages would take the slice for the whole. "
    f"{_COPIES}"
)
WHOLE_COPY = (
    "An EMA or another copy of the model that was made before fully_shard has whole parameters: "
    "make it after fully_shard, with copy.deepcopy(model) or AveragedModel(model), and it is "
    "sharded in the same way. An optimizer's state stays whole through fully_shard, and cut "
    "through undo: take saved = optim_state_dict(model, optim, kind='full'), build a new optimizer "
    "after that call, and load_optim_state_dict(model, new, saved). An optimizer whose step makes "
    "whole tensors, as SM3's does, is one for owner_step(params, lambda groups: SM3(groups, ...)). "
    f"{_COPIES}"
)
TORCHS_FSDP = (
    "torch.distributed.fsdp was called around modules that are sharded here already: use one of "
    "the two. To have the rest sharded too, fsdp_compose.fully_shard(model); to leave the rest to "
    "torch, its fully_shard with ignored_params=set(part.parameters()), and ignored= of it here."
)
COLLECTIVE = (
    "Gradients are averaged over the ranks of a unit in backward, and its weights start alike: "
    "leave out what a script without sharding sends for that. What else is to be combined, such as "
    "the gradient of a weight that two pipeline stages share, is whole in `with "
    "fsdp_compose.gathered(module, with_grads=True, writeback=True):`. "
    f"{_COPIES}"
)
INTO_SCOPE = (
    "Inside `gathered` and `unshard` parameters are whole, while gradients, optimizer state and "
    "what was computed from parameters before are slices: leave the scope first, or enter "
    f"gathered(module, with_grads=True, writeback=True), where gradients are whole too. {_COPIES}"
)
INIT = (
    "An initialiser gets whole parameters in `with fsdp_compose.gathered(module, "
    "writeback=True):`, which every rank enters with the same seed (or rank0_only=True). Or "
    "initialise before "
    "fully_shard, or pass fully_shard param_init_fn=. "
    f"{_COPIES}"
)
HOOK = (
    "A gradient hook is given the reduced gradient's slice: `grad.norm()`, `grad.mean()`, "
    "`grad.max()` and arithmetic with numbers work on it as they are; `grad.to_local()` is this "
    "rank's 1-D slice (for a histogram of it, say), `grad.full_tensor()` the whole, which every "
    "rank's hook must call."
)
EDGE = (
    "Its gradient is reduced by its unit, so its node in the graph never sees it. Give "
    "torch.autograd.grad and backward(inputs=) the parameter itself; for a hook call "
    "p.register_post_accumulate_grad_hook(fn), or p.register_hook(fn)."
)
MULTI_HOOK = (
    "Gradients are reduced a unit at a time, so autograd cannot count them. To act on a unit's "
    "gradients together call fsdp_compose.register_post_reduce_hook(module, fn); on each, "
    "p.register_hook(fn) or p.register_post_accumulate_grad_hook(fn); on the first one, "
    "register_multi_grad_hook(..., mode='any')."
)
STAGING = (
    "torch.distributed.checkpoint.async_save copies whole tensors by address. Call "
    "fsdp_compose.save_checkpoint(path, module, optimizer, asynchronous=True) or "
    "torch.distributed.checkpoint.save, or give async_save an async_stager= whose stage() returns "
    "{name: value.detach().clone()}."
)
STAGE = (
    "A schedule that splits backward needs to know that the stage is sharded: "
    "`fsdp_compose.pipeline_stage(stage)` before the schedule is built."
)
TENSOR_PARALLEL_FIRST = (
    "Tensor parallelism comes first: build the model again, call parallelize_module(model, "
    "mesh['tp'], plan), then fully_shard(model, mesh=mesh['dp'])."
)
PRIVACY = (
    "opacus clips each sample's gradient before ranks combine them, and fsdp_compose reduces "
    "gradients inside backward, so the two cannot train one model. Wrap the plain model in opacus "
    "(with its own DPDDP, or its FSDP2 support), or train without opacus."
)
FUSION = (
    "Layers are fused in a plain model: fsdp_compose.undo(model) first, or "
    "fsdp_compose.undo(copy.deepcopy(model)) if this one is to stay sharded (every rank calls it)."
)
QUANTIZED = (
    "torchao would quantize this rank's slice, so a sharded module cannot be quantized in place: "
    "quantize a plain copy, fsdp_compose.undo(copy.deepcopy(model)). Frozen weights under adapters "
    "are sharded as bytes where they are quantized before fully_shard."
)
QUANTIZING = (
    "torchao's optimizers compile their step and keep their state in blocks, which fails on slices "
    "that report the whole shape. Give the optimizer fsdp_compose.local_parameters(model): plain "
    "1-D slices, which it may update as they are."
)
EXPORT = (
    "torch.export needs whole parameters and no hooks: export "
    "fsdp_compose.undo(copy.deepcopy(model)), which every rank calls, or a plain model that loaded "
    "fsdp_compose.state_dict(model, kind='full')."
)
TRACKING = (
    "Trackers of torch.distributed._tools read the memory of whole parameters: track a plain "
    "model. fsdp_compose.explain(model) counts what a sharded model holds now, "
    "fsdp_compose.plan(model, sample=(inputs,)) what its step needs, activations too."
)
GRAPH = (
    "This torch.fx.GraphModule was made from sharded modules, by symbolic_trace or as a copy of a "
    "sharded GraphModule, and lacks the hooks that gather them. Trace or copy the plain model, "
    "then call fully_shard on the result."
)
COPIED = (
    "It was copied without its unit, by copy.deepcopy of a part of the unit, so nothing gathers "
    "it. Copy the whole unit, whose copy is sharded in the same way, or copy inside `with "
    "fsdp_compose.gathered(module):`, where copies of parts are plain. "
    f"{_COPIES}"
)
HOOKED = (
    "A hook on a unit's own module finds its parameters gathered where it was registered before "
    "fully_shard; after that, with module.register_forward_hook(fn, prepend=True), and with "
    "module.register_forward_pre_hook(fn) without prepend. Or gather them in the hook: `with "
    f"fsdp_compose.gathered(module):`. {_COPIES}"
)
FORWARD = (
    "{kind}.forward was called by itself, which runs none of a module's hooks, and so gathers "
    "nothing: call the module, `module(...)` in place of `module.forward(...)`. "
    f"{_COPIES}"
)
CALLED = (
    "{kind} has a `__call__` of its own that runs none of a module's hooks, and so gathers "
    "nothing: call that method `forward`, have it call `super().__call__(...)`, or call the module "
    f"inside `with fsdp_compose.gathered(module):`. {_COPIES}"
)
OUTSIDE = (
    "{kind} was called by itself, and only the forward of that unit gathers it: call the module "
    "that was sharded, make {kind} a unit of its own (units=), or call it inside `with "
    f"fsdp_compose.gathered(module):`. {_COPIES}"
)
LISTED = (
    "Its unit runs its forward now, in which modules read it gathered as an attribute "
    "(`self.name`); what a list, a dictionary, a closure or an argument holds is the sharded "
    "parameter. Read the attribute (`getattr(self, name)`), or run the forward in `with "
    f"fsdp_compose.gathered(module):`. {_COPIES}"
)
GENERATOR = (
    "A generator or coroutine runs after the call that made it, so methods= cannot gather for it: "
    "inside it, gather with `with fsdp_compose.gathered(module):`, and again after an optimizer's "
    f"step. {_COPIES}"
)
_LAZY = inspect.CO_GENERATOR | inspect.CO_COROUTINE | inspect.CO_ASYNC_GENERATOR
_IS_SUM = re.compile(r"prodigy|d_?adapt|dog\b", re.IGNORECASE)
_IS_VECTOR = re.compile(r"lbfgs", re.IGNORECASE)


def _in_optimizer(name: str) -> str:
    """What to call instead in an optimizer of that name."""
    if name == "ZeroRedundancyOptimizer":
        return (
            f"{name} keeps each rank's share of the state, and the state of sharded parameters is "
            "cut over the ranks already: use the optimizer that it was given, over "
            "model.parameters()."
        )
    if _IS_VECTOR.search(name):
        return (
            f"{name} takes all parameters as one vector, so it cannot step a sharded model: "
            "owner_step refuses it, and on local_parameters(model) each rank would search by "
            "itself. Call fsdp_compose.undo(model) on every rank, and step the plain model."
        )
    if _IS_SUM.search(name):
        return (
            f"{name} sums over all parameters, in a way that needs whole ones. Give it a model "
            "that is not sharded, or write its sums for the sharded `module.parameters()`: "
            "`(a * b).sum()` and `torch.dot(a.flatten(), b.flatten())` are sums over all ranks, "
            "of whole tensors (Prodigy with slice_p=1). "
            "fsdp_compose.owner_step refuses it, and on local_parameters(model) each rank would "
            "have a sum of its own."
        )
    make = f"lambda groups: {name}(groups, ...)"
    return (
        f"{name} asks for whole parameters, so step it as "
        f"`fsdp_compose.owner_step(params, {make})`: one rank has each whole parameter, and a step "
        "sends this rank's part of parameters and gradients there and back (nothing with "
        "granularity='tensor'). fsdp_compose.local_parameters(model) costs nothing and gives "
        "plain 1-D slices. These are right where each element is updated by itself, and wrong "
        "without an error where an optimizer takes norms, means or sums of a parameter (LAMB, "
        "LARS, Adafactor, Muon, Shampoo) or of all parameters (Prodigy, D-Adaptation, which "
        "owner_step refuses too). owner_step is wrong without an error where a step takes one "
        "number over several parameters and does not keep it (Ranger21, Adai, clipping by one norm "
        "in the step): such an optimizer is for model.parameters(), whose sums and norms are of "
        f"all ranks, or for a model that is not sharded. {_COPIES}"
    )


def _in_method(module: nn.Module, method: str, unit: str) -> str:
    """What to call instead in a method of ``module`` that is not its forward."""
    kind = type(module).__name__
    given = f"methods=('forward', {method!r})"
    if _heads(module, unit):
        text = f"{kind}.{method} gathers it if you name that method: fully_shard(module, {given}"
        return f"{text}, ...). Or gather it with `with fsdp_compose.gathered(module):`. {_COPIES}"
    if STATE_KEY in module.__dict__:
        return (
            f"{kind}.{method} runs outside of that unit, whose forward alone gathers it: call that "
            "unit's module, or gather it with `with fsdp_compose.gathered(part):`, where part is "
            f"the module that has it. {_COPIES}"
        )
    return (
        f"{kind}.{method} gathers it if that {kind} is a unit of its own: fully_shard(part, "
        f"{given}) before the module around it, or in units=. Or gather it with "
        f"`with fsdp_compose.gathered(module):`. {_COPIES}"
    )


_BY_PACKAGE = {
    "numpy": RAW,
    "opacus": PRIVACY,
    "safetensors": RAW,
    "torch._export": EXPORT,
    "torch.distributed._tools": TRACKING,
    "torch.distributed.fsdp": TORCHS_FSDP,
    "torch.export": EXPORT,
    "torchao.quantization": QUANTIZED,
}
_BY_MODULE = {
    "torch.distributed.checkpoint._state_dict_stager": STAGING,
    "torch.distributed.pipelining._backward": STAGE,
    "torch.nn.init": INIT,
    "torch.nn.utils.fusion": FUSION,
    "torch.serialization": RAW,
}
_BY_CALLER = {
    ("torch.autograd.graph", "get_gradient_edge"): EDGE,
    ("torch.autograd.graph", "register_multi_grad_hook"): MULTI_HOOK,
    ("fsdp_compose.sharded.tensor", "on_slice"): HOOK,
    ("torch.optim.swa_utils", "update_parameters"): WHOLE_COPY,
}
_COLLECTIVES = ("torch.distributed.distributed_c10d", "torch.distributed.nn.functional")
_EDGES = frozenset((Tensor.view_as, Tensor.expand_as))


def advise_call(func: Callable[..., Any], spec: object, unit: str, is_copy: bool) -> str:
    """What to call instead of ``func`` on the slice of ``spec``, whose unit is called ``unit``."""
    in_forward, inner, part = False, None, None
    for frame in walk_stack():
        module = str(frame.f_globals.get("__name__", ""))
        found = (
            _BY_CALLER.get((module, frame.f_code.co_name))
            or _BY_MODULE.get(module)
            or next(
                (t for name, t in _BY_PACKAGE.items() if f"{module}.".startswith(f"{name}.")), None
            )
        )
        if found is not None:
            return found
        owner, name = _self_of(frame), frame.f_code.co_name
        if isinstance(owner, Optimizer) and not in_forward:
            return _in_optimizer(type(owner).__name__)
        if not isinstance(owner, nn.Module):
            continue
        if isinstance(owner, GraphModule) and func not in MEMORY:
            return GRAPH
        in_forward = True  # an optimizer's closure may have called it
        if is_copy or func in MEMORY:
            continue
        if name != "_call_impl":
            inner = owner
        elif inner is not owner and _heads(owner, unit):
            return LISTED if _is_shown(unit) else HOOKED
        if _runs_no_hooks(frame, owner) and _heads(owner, unit):
            text = FORWARD if type(owner).__call__ is nn.Module.__call__ else CALLED
            return text.format(kind=type(owner).__name__)
        if name == "forward" and _is_part(owner, spec, unit):
            part = owner
        if _is_own_method(owner, name) and _has(owner, spec):
            if _is_shown(unit):
                return LISTED
            return GENERATOR if frame.f_code.co_flags & _LAZY else _in_method(owner, name, unit)
    if func in MEMORY:
        return RAW
    if getattr(func, "__module__", "") in _COLLECTIVES:
        return COLLECTIVE
    if is_copy:
        return COPIED
    if part is not None:
        return LISTED if _is_shown(unit) else OUTSIDE.format(kind=type(part).__name__)
    if func in _EDGES:
        return f"{EDGE} {ANY}"
    return LISTED if _is_shown(unit) else ANY


def _heads(module: nn.Module, unit: str) -> bool:
    """Whether ``module`` is one of the unit's own."""
    state = module.__dict__.get(STATE_KEY)
    return state is not None and bool(state.unit.name == unit)


def _is_shown(unit: str) -> bool:
    """Whether a forward that the unit was gathered for is on this thread's stack."""
    modules = (frame.f_locals.get("self") for frame in walk_stack())
    return any(
        isinstance(module, nn.Module)
        and _heads(module, unit)
        and module.__dict__[STATE_KEY].unit.run.showing is not None
        for module in modules
    )


def advise_on_target() -> str:
    """What to call instead of writing a slice into a plain tensor."""
    return TORCHS_FSDP if is_called_from("torch.distributed.fsdp") else WHOLE_COPY


def _self_of(frame: FrameType) -> Any:
    """The ``self`` of a method's frame; None for a function."""
    is_method = frame.f_code.co_varnames[:1] == ("self",)
    return frame.f_locals.get("self") if is_method else None


def _has(module: nn.Module, spec: object) -> bool:
    """Whether a parameter of ``module`` is the one of ``spec``."""
    return any(getattr(param, "_shard_spec", None) is spec for param in module.parameters())


def _is_part(module: nn.Module, spec: object, unit: str) -> bool:
    """Whether ``module`` has the parameter of ``spec``, and not all of its unit."""
    return _has(module, spec) and not any(_heads(inner, unit) for inner in module.modules())


def _runs_no_hooks(frame: FrameType, module: nn.Module) -> bool:
    """Whether ``frame`` is of ``module``'s forward or own call, and no hooks of it were run."""
    calls = (f for f in walk_stack() if f.f_code.co_name == "_call_impl")
    is_call = frame.f_code.co_name in ("forward", "__call__")
    return is_call and all(_self_of(f) is not module for f in calls)


def _is_own_method(module: nn.Module, name: str) -> bool:
    """Whether ``module``'s class has a method of that name that ``nn.Module`` lacks."""
    is_module = name == "forward" or name in dir(nn.Module)
    return not is_module and callable(getattr(type(module), name, None))
