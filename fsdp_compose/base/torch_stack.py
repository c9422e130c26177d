"""Which of torch's functions called: read from the stack, where torch passes no argument that says.

They are known by their code, or by name where an import would take half a second. Like
torch_private.py, this file may name what is private to torch; tried on torch 2.11, 2.13, 2.15.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterator, MutableMapping, Sequence
from contextlib import suppress
from functools import cache
from types import FrameType
from typing import Any, NamedTuple, cast

import torch
from torch._functorch import pyfunctorch
from torch.autograd import Variable
from torch.distributed.tensor import DTensor
from torch.nn.utils import stateless
from torch.utils import _python_dispatch as _modes
from torch.utils import checkpoint as _checkpoint

from fsdp_compose.base.wording import describe_clipping

_STATE_WALK = "torch.distributed._state_dict_utils"
_clip: Any = inspect.unwrap(torch.nn.utils.clip_grad_norm_)
_total_norm: Any = inspect.unwrap(torch.nn.utils.get_total_norm)
_step: Any = torch.optim.Optimizer.profile_hook_step(torch.optim.Optimizer.step)
_cast: Any = inspect.unwrap(torch.optim.Optimizer._process_value_according_to_param_policy)
_asking = {
    inspect.unwrap(function).__code__
    for function in (
        torch.autograd.grad,
        torch.autograd.backward,
        torch.overrides.handle_torch_function,
    )
}


def walk_stack() -> Iterator[FrameType]:
    """The frames of this thread, from the caller's on."""
    return walk_frames(sys._getframe(1))


def walk_frames(frame: FrameType | None) -> Iterator[FrameType]:
    """``frame`` and those that called it; none where there is none."""
    while frame is not None:
        yield frame
        frame = frame.f_back


def is_called_by(function: Any) -> bool:
    """Whether a Python function is on this thread's stack."""
    return _find_frame(function) is not None


def _find_locals(function: Any) -> dict[str, Any]:
    """The variables of a function's innermost call on this thread's stack; empty without one."""
    frame = _find_frame(function)
    return {} if frame is None else frame.f_locals


def _find_frame(function: Any) -> FrameType | None:
    """The innermost call of a function on this thread's stack; None without one."""
    code, frame = function.__code__, sys._getframe(1).f_back
    while frame is not None and frame.f_code is not code:
        frame = frame.f_back
    return frame


def clipping_under_way() -> str:
    """What ``torch.nn.utils.clip_grad_norm_`` on this thread's stack clips to; empty without it."""
    values = _find_locals(_clip)
    return describe_clipping(values["max_norm"], values["error_if_nonfinite"]) if values else ""


def tensors_of_total_norm() -> list[Any] | None:
    """What torch takes one norm of, to clip or by ``get_total_norm``; None where it does not."""
    given = _find_locals(_total_norm).get("tensors")
    if given is None:
        return None
    return [given] if isinstance(given, torch.Tensor) else list(given)


def is_stepping(optimizer: object = None) -> bool:
    """Whether a step of an optimizer is on this thread's stack; of this one, where it is given."""
    code = _step.__code__
    return any(
        frame.f_code is code and (optimizer is None or frame.f_locals.get("self") is optimizer)
        for frame in walk_stack()
    )


def in_functional_call() -> bool:
    """Whether ``torch.func.functional_call`` is on this thread's stack."""
    return is_called_by(stateless._functional_call)


def load_under_way() -> dict[str, Any]:
    """What ``Module.load_state_dict`` under way was given (``self``, ``strict``, ``assign``).

    Its hooks are not told all of it. Empty where a hook is called by something else.
    """
    return _find_locals(torch.nn.Module.load_state_dict)


def is_in_call(frame: FrameType | None) -> bool:
    """Whether a call of a module, or of a method that gathers, is on the stack of ``frame``."""
    while frame is not None:
        name = frame.f_code.co_name
        if "_call_impl" in name or name == "call_as_forward":  # also where dynamo resumes it
            return True
        frame = frame.f_back
    return False


def called_module(frame: FrameType) -> Any | None:
    """The module whose call, or whose method that gathers, the frame is; None for other frames."""
    names = {"_call_impl": "self", "call_as_forward": "module"}
    name = names.get(frame.f_code.co_name)
    return None if name is None else frame.f_locals.get(name)


def calls_compiled(frame: FrameType) -> bool:
    """Whether the frame is of torch.compile: those that it calls may have other names there."""
    return "_dynamo" in frame.f_code.co_filename


_SELECTIVE = (_checkpoint._CachingTorchDispatchMode, _checkpoint._CachedTorchDispatchMode)

count_modes: Callable[[], int] = torch._C._len_torch_dispatch_stack
"""How many modes see the operators of this thread; costs next to nothing."""

below_dispatch = torch._C._DisableTorchDispatch
"""Scope in which operators ask neither modes nor classes."""


def is_dispatched(tensor: torch.Tensor) -> bool:
    """Whether operators ask the class of a tensor, which was so when torch made the tensor."""
    return torch._C._dispatch_keys(tensor).has(torch._C.DispatchKey.Python)


_dtensor: Any = DTensor


class _Asked(_dtensor):
    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return args[0]


@cache
def asks_dtensors() -> bool:
    """Whether operators ask a class derived from DTensor: torch 2.13 does, 2.11 does not."""
    with suppress(AttributeError), torch._C.DisableTorchFunctionSubclass():
        torch.Tensor._make_subclass(_Asked, torch.empty(0, device="cpu")).detach()
        return True
    return False  # it took the tensor for a DTensor, and missed what that has


def in_selective() -> bool:
    """Whether a selective checkpoint saves operators, or looks for those that it saved."""
    return any(isinstance(mode, _SELECTIVE) for mode in _modes._get_current_dispatch_mode_stack())


def on_backward_end(callback: Callable[[], None]) -> None:
    """Run ``callback`` when the autograd pass that is running now has finished without error.

    Raises:
        RuntimeError: it runs compiled, which does not call what is queued in it.
    """
    compiled = sys.modules.get("torch._dynamo.compiled_autograd")
    if compiled is not None and compiled.in_compiled_autograd_region:
        raise RuntimeError(
            "backward runs under compiled autograd (torch._dynamo.config.compiled_autograd), which "
            "does not say when it ends, so gradients would be lost. Set it to False; forwards, "
            "blocks and optimizers may be compiled."
        )
    Variable._execution_engine.queue_callback(callback)


def recording_mode() -> str:
    """The mode under which operators are recorded or faked, if there is one."""
    keys = torch._C._TorchDispatchModeKey
    for key, name in ((keys.FAKE, "FakeTensorMode"), (keys.PROXY, "make_fx")):
        if torch._C._get_dispatch_mode(key) is not None:
            return name
    return ""


def refuse_fakes(purpose: str) -> None:
    """Raise under ``FakeTensorMode``, which takes a collective or a write for done.

    Raises:
        RuntimeError: saying that this rank was to ``purpose``.
    """
    if recording_mode() == "FakeTensorMode":
        raise RuntimeError(
            f"this rank was to {purpose} under FakeTensorMode, in which tensors have no values. "
            "Leave the mode first; fsdp_compose.plan(model, sample=...) counts memory and "
            "communication."
        )


def outside_selective(function: Callable[..., Any], *args: Any) -> Any:
    """Call ``function`` where selective checkpoints neither save nor look for its operators.

    They expect those of the forward again when it is recomputed, where other units are gathered.
    """
    stack = _modes._get_current_dispatch_mode_stack()
    others = [mode for mode in stack if not isinstance(mode, _SELECTIVE)]
    _replace_modes(stack, others)
    try:
        return function(*args)
    finally:
        _replace_modes(others, stack)


def _replace_modes(found: Sequence[Any], wanted: Sequence[Any]) -> None:
    """Have other modes see operators, without entering or leaving any."""
    for _ in found:
        _modes._pop_mode()
    for mode in wanted:
        _modes._push_mode(mode)


def calling_modules() -> Iterator[torch.nn.Module]:
    """The modules whose calls are under way on this thread, the innermost first."""
    code = torch.nn.Module._call_impl.__code__
    return (frame.f_locals["self"] for frame in walk_stack() if frame.f_code is code)


def is_called_by_parameter() -> bool:
    """Whether ``nn.Parameter(x)`` called the caller, a method of ``x``'s class."""
    caller = sys._getframe(1).f_back
    return caller is not None and caller.f_code is torch.nn.Parameter.__new__.__code__


def is_asked_for_gradient() -> bool:
    """Whether ``autograd.grad`` or ``backward(inputs=)`` asks a tensor who handles the call.

    To be called by the tensor's ``__torch_function__``, which torch reads in order to ask.
    """
    caller = sys._getframe(1).f_back
    return caller is not None and caller.f_code in _asking


def is_called_from(package: str) -> bool:
    """Whether a function of a module in ``package`` is on this thread's stack."""
    names = (str(frame.f_globals.get("__name__")) for frame in walk_stack())
    return any(name.startswith(f"{package}.") for name in names)


def is_converted_by_module() -> bool:
    """Whether ``Module._apply`` (``to``, ``float``, ``to_empty``) is on this thread's stack."""
    return is_called_by(torch.nn.Module._apply)


def is_asked_by_state_walk() -> bool:
    """Whether the caller's caller is torch's walk over a state dict, which knows DTensors only."""
    return _is_function(sys._getframe(1).f_back, "_iterate_state_dict", _STATE_WALK)


def is_called_by_state_walk() -> bool:
    """Whether the caller's caller is part of what torch gathers a state dict with."""
    caller = sys._getframe(1).f_back
    return caller is not None and caller.f_globals.get("__name__") == _STATE_WALK


def find_calling_collective() -> Callable[..., Any] | None:
    """The function of torch.distributed that called the caller; None where something else did."""
    frame, collectives = sys._getframe(1).f_back, vars(torch.distributed.distributed_c10d)
    if frame is None or frame.f_globals is not collectives:
        return None
    while frame.f_back is not None and frame.f_code.co_name not in collectives:
        frame = frame.f_back  # out of a comprehension
    return cast(Callable[..., Any], collectives[frame.f_code.co_name])


def is_called_by_broadcast() -> bool:
    """Whether the caller's caller is torch's setter, writing what rank 0 sent into a DTensor."""
    return _is_function(sys._getframe(1).f_back, "_distribute_tensors", _STATE_WALK)


def value_under_load() -> tuple[Any, torch.Tensor] | None:
    """(key, value) if the caller's caller is ``Optimizer.load_state_dict`` casting a value."""
    frame = sys._getframe(1).f_back
    if frame is None or frame.f_code is not _cast.__code__:
        return None
    return frame.f_locals["key"], frame.f_locals["value"]


def state_api_under_way() -> str | None:
    """Torch's getter or setter of optimizer state dicts that is on this thread's stack, if any."""
    public = {
        "_get_optim_state_dict": "get_optimizer_state_dict",
        "_load_optim_state_dict": "set_optimizer_state_dict",
    }
    module = "torch.distributed.checkpoint.state_dict"
    found = (
        public[name]
        for frame in walk_stack()
        for name in public
        if _is_function(frame, name, module)
    )
    return next(found, None)


def _is_function(frame: FrameType | None, name: str, module: str) -> bool:
    """Told by name, since importing those modules takes torch half a second.

    Args:
        frame: None where nothing on the thread but C called, as on autograd's threads of devices.
    """
    if frame is None or frame.f_code.co_name != name:
        return False
    return frame.f_globals.get("__name__") == module


def _find_named_locals(name: str, module: str) -> dict[str, Any]:
    found = (frame.f_locals for frame in walk_stack() if _is_function(frame, name, module))
    return next(found, {})


def is_broadcast_to_ranks() -> bool:
    """Whether ``torch.distributed.checkpoint.load`` has a reader that broadcasts each piece."""
    module = "torch.distributed.checkpoint.state_dict_loader"
    reader = _find_named_locals("_load_state_dict", module).get("storage_reader")
    return type(reader).__name__ == "BroadcastingTorchSaveReader"


def is_saved_as_safetensors() -> bool:
    """Whether ``torch.distributed.checkpoint.save`` is under way with a writer of safetensors."""
    module = "torch.distributed.checkpoint.state_dict_saver"
    writer = _find_named_locals("_save_state_dict", module).get("storage_writer")
    chosen = getattr(writer, "serialization_format", None)
    return getattr(chosen, "value", None) == "safetensors"


def is_scaled_by_torch() -> bool:
    """Whether ``torch.amp.GradScaler.step`` itself, and no subclass's, steps an optimizer."""
    return type(_find_locals(torch.amp.GradScaler.step).get("self")) in _SCALERS


_SCALERS = (torch.amp.GradScaler, torch.cuda.amp.GradScaler)


def is_asked_for_node() -> bool:
    """Whether the caller's caller is ``get_gradient_edge`` or the like, looking for a node."""
    caller = sys._getframe(1).f_back
    return caller is not None and caller.f_code.co_name == "_get_grad_fn_or_grad_acc"


class Clipping(NamedTuple):
    """A call of ``torch.nn.utils`` that clips gradients.

    Attributes:
        params: the parameters that it was given.
        notes: what was noted while it runs, by name; forgotten when it returns or raises.
    """

    params: Sequence[torch.Tensor]
    notes: MutableMapping[str, Any]


def find_clipping() -> Clipping | None:
    """The call of ``torch.nn.utils.clip_grad_norm_``, if it called what is handled now.

    Also a call of ``clip_grads_with_norm_`` alone, where notes are lost at once.
    """
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_globals.get("__name__", "").startswith("fsdp_compose."):
        frame = frame.f_back
    params: Any = None
    while frame is not None and frame.f_globals.get("__name__") == "torch.nn.utils.clip_grad":
        if params is None:
            params = frame.f_locals.get("parameters")
        if frame.f_code is _clip.__code__:
            break
        frame = frame.f_back
    else:
        frame = None
    if not isinstance(params, list | tuple):
        return None
    # A frame keeps names of its locals that are none of its variables, until it ends.
    return Clipping(params, {} if frame is None else frame.f_locals)


def is_from_local(node: Any) -> bool:
    """Whether an autograd node is that of ``DTensor.from_local``."""
    return bool(node.name() == "_FromTorchTensorBackward")


def is_placement(node: Any) -> bool:
    """Whether an autograd node makes a DTensor of a plain tensor, or redistributes one."""
    return is_from_local(node) or node.name() == "RedistributeBackward"


def hides_reads(node: Any) -> bool:
    """Whether the backward of a node may read tensors that the node does not show as saved.

    So does that of an ``autograd.Function`` of others, as of a reentrant checkpoint, and that of
    any operator in whose forward hooks took the saved tensors, as another checkpoint's do.
    """
    function = getattr(node, "_forward_cls", None)
    if function is not None:
        return not function.__module__.startswith("fsdp_compose.")
    for name in dir(node):
        if name.startswith("_raw_saved_"):
            saved = getattr(node, name)
            for one in saved if isinstance(saved, tuple | list) else (saved,):
                if getattr(one, "unpack_hook", None) is not None:
                    return True
    return False


def records_below_transforms() -> bool:
    """Whether autograd records below every transform: not where one was called under no_grad."""
    transforms = pyfunctorch.retrieve_all_functorch_interpreters()
    grads = [t for t in transforms if isinstance(t, pyfunctorch.GradInterpreter)]
    return torch.is_grad_enabled() and all(grad.prev_grad_mode() for grad in grads)
