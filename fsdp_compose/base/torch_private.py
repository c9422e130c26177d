"""Every private torch name this library uses, and nothing else; tried on torch 2.11, 2.13, 2.15.

A torch release that moves one of these breaks this file, or torch_stack.py, alone.
"""

from __future__ import annotations

import sys
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, suppress
from datetime import timedelta
from functools import cache, partial
from importlib import import_module
from inspect import signature
from operator import attrgetter, methodcaller
from threading import Thread
from typing import Any, TypeVar

import torch
import torch.distributed as dist
import torch.distributed.nn.functional  # imported after a group exists, it keeps gloo alive at exit
from torch._functorch import pyfunctorch
from torch._subclasses.fake_tensor import FakeTensor
from torch.autograd import forward_ad
from torch.distributed.checkpoint import filesystem, state_dict_loader
from torch.distributed.checkpoint import metadata as checkpoint_metadata
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.utils import _pytree

Function = TypeVar("Function", bound=Callable[..., Any])
_OUTSIDE = (
    "fsdp_compose gathers, releases and reduces outside graphs; for torch.export call "
    "fsdp_compose.undo(model) first"
)
_frames: Any = torch._C._dynamo.eval_frame
_action, _strategy = _frames._FrameAction, _frames._FrameExecStrategy
_WITH_CALLEES = _strategy(_action.SKIP, _action.SKIP)
_ALONE = _strategy(_action.SKIP, _action.DEFAULT)


def untraced(function: Function) -> Function:
    """Let ``torch.compile`` run ``function``, and all it calls, as the plain Python it is.

    The mark is on the code object, where the interpreter's frame evaluator looks it up: unlike
    ``torch.compiler.disable`` it costs a call nothing, and it does not import the compiler. A trace
    that meets a call of it breaks there.
    """
    return _leave(function, _WITH_CALLEES)


def untraced_itself(function: Function) -> Function:
    """As ``untraced``, but what ``function`` calls is compiled: the forward of a user."""
    return _leave(function, _ALONE)


def _leave(function: Any, strategy: Any) -> Any:
    _frames.set_code_exec_strategy(function.__code__, strategy)
    function._torchdynamo_disable = True
    function._torchdynamo_disable_msg = _OUTSIDE
    return function


def uncompiled_as_frame(function: Function) -> Function:
    """As ``untraced`` where the interpreter calls ``function``; a trace that meets it goes on."""
    _frames.set_code_exec_strategy(function.__code__, _WITH_CALLEES)
    return function


def hide_from_traces(files: Iterable[str], *classes: type) -> None:
    """Keep what ``files`` define, and tensors of these classes, out of compiled graphs.

    Guards compare what a tensor says of its shape with the shape in C++, and these say another.
    """
    if "torch._dynamo" not in sys.modules:
        # What this import keeps of its callers' frames would keep their model: give it none.
        importer = Thread(target=import_module, args=("torch._dynamo",))
        importer.start()
        importer.join()
    import torch._dynamo

    if not set(classes) <= torch._dynamo.config.nontraceable_tensor_subclasses:
        torch._dynamo.config.nontraceable_tensor_subclasses |= set(classes)  # of this thread alone
    known = torch._dynamo.trace_rules.SKIP_DIRS
    unknown = set(files).difference(known)
    if unknown:
        known.extend(unknown)
        torch._dynamo.trace_rules._recompile_re()  # ``add`` would, 3 ms for each file


DispatchMode = torch.utils._python_dispatch.TorchDispatchMode
"""A scope that is called for every operator, below autograd."""

read_number = torch.ops.aten._local_scalar_dense.default
"""The operator of ``tensor.item()``."""

fused_attention: Callable[..., Any] = (
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
)
"""Attention as a fused kernel, which the meta device knows too: ``(query, key, value)``."""

raw = torch._C.DisableTorchFunctionSubclass
"""Scope in which tensor subclasses behave as the plain tensors they hold."""

read_version: Callable[[torch.Tensor], int] = attrgetter("_version")
"""How often a tensor was written in a way autograd can see."""
set_versions: Callable[..., None] = torch._C._autograd._unsafe_set_version_counter
"""``(tensors, versions)``, both tuples: as if they had been written so often."""

read_base: Callable[[Any], torch.Tensor | None] = torch.Tensor._base.__get__  # type: ignore[union-attr]
"""What a tensor is a view of; use under ``raw``."""

profiler_enabled: Callable[[], bool] = torch._C._autograd._profiler_enabled
"""Whether a profiler is recording: ranges cost microseconds even where nothing records them."""

tree_map: Callable[..., Any] = _pytree.tree_map
"""``(function, tree)``: over the containers that ``torch.compile`` can trace."""

is_jit_tracing: Callable[[], bool] = torch._C._is_tracing  # whether torch.jit.trace records

SCRIPT_HOOK = "__prepare_scriptable__"
"""What ``torch.jit.script`` calls on every module first, if the module has it."""

graph_task_id: Callable[[], int] = torch._C._current_graph_task_id
"""Id of the autograd pass running on this thread, -1 outside any."""

forward_level: Callable[[], int] = partial(getattr, forward_ad, "_current_level")
"""Of forward-mode AD (``dual_level``, ``jvp``), of which a process has one; -1 outside any."""

running_node: Callable[[], Any] = torch._C._current_autograd_node  # in a backward, for its hooks
next_node_number: Callable[[], int] = torch._C._autograd._get_sequence_nr  # of ``made_at``
graph_is_kept: Callable[[], bool] = torch._C._autograd._get_current_graph_task_keep_graph
"""Whether the backward under way leaves its graph as it is, for another one (retain_graph)."""


def plain_apply(function: type[torch.autograd.Function]) -> Callable[..., Any]:
    """``function.apply``, and its backward, less what torch looks at first for ``torch.func``."""
    wanted: Any = function
    base: Any = super(torch.autograd.Function, function)
    wanted._backward_cls.apply = function.backward
    apply: Callable[..., Any] = base.apply
    return apply


def hook_for_good(tensor: torch.Tensor, hook: Callable[[torch.Tensor], Any]) -> None:
    """Hook the gradient of a tensor that is no leaf, without a handle, which takes the longest."""
    if type(tensor) is not torch.Tensor or tensor._backward_hooks is not None:
        tensor.register_hook(hook)
        return
    node: Any = tensor.grad_fn
    tensor._backward_hooks = hooks = OrderedDict()
    node._register_hook_dict(tensor)
    hooks[hook] = hook


made_at: Callable[[Any], int] = methodcaller("_sequence_nr")
"""``(node)``: when an autograd node was made, a number that grows with every node of a thread."""


def will_accumulate(leaf: torch.Tensor) -> bool:
    """Whether the running pass accumulates into ``leaf``, and is no ``autograd.grad``."""
    try:
        return node_will_run(torch.autograd.graph.get_gradient_edge(leaf).node)
    except RuntimeError:
        return False  # what autograd.grad asks for


storage_use_count: Callable[[int], int] = torch._C._storage_Use_Count
"""``(storage._cdata)``: how many tensors are over it, in Python, C++ and graphs; and itself."""
tensor_use_count: Callable[[torch.Tensor], int] = methodcaller("_use_count")  # Python is one

node_will_run: Callable[[Any], bool] = torch._C._will_engine_execute_node
"""Whether a node that is no leaf is part of the autograd pass running now; also once it ran."""

transforms_active: Callable[[], bool] = torch._C._are_functorch_transforms_active
"""Whether the caller runs inside ``torch.func.grad``, ``vmap``, ``jvp`` and the like."""

outside_transforms: Callable[[], AbstractContextManager[Any]] = (
    pyfunctorch.temporarily_clear_interpreter_stack
)
"""Scope in which operations are those of plain autograd, below every ``torch.func`` transform."""


def beneath_transforms(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor that ``torch.func`` transforms wrapped, all wrappings undone."""
    functorch = torch._C._functorch
    while functorch.is_functorch_wrapped_tensor(tensor):
        tensor = functorch.get_unwrapped(tensor)
    return tensor


SavedHooks = tuple[Callable[[torch.Tensor], Any], Callable[[Any], torch.Tensor]]

saved_tensor_hooks: Callable[[], SavedHooks | None] = partial(
    torch._C._autograd._top_saved_tensors_default_hooks, False
)
"""The innermost ``saved_tensors_hooks`` (pack, unpack), the only ones that apply; None: none."""

push_saved_tensor_hooks: Callable[..., None] = torch._C._autograd._push_saved_tensors_default_hooks
"""``(pack, unpack)``: until they are popped, these apply in place of those before."""

pop_saved_tensor_hooks: Callable[[], None] = torch._C._autograd._pop_saved_tensors_default_hooks


def parameter_slots(module: torch.nn.Module) -> dict[str, Any]:
    """The dictionary that ``module.name`` reads its parameters from."""
    return module._parameters


def is_opaque(tensor: torch.Tensor) -> bool:
    """Whether a class computes by itself what every operator does, and keeps its data elsewhere."""
    plain: Any = torch.Tensor
    computes = type(tensor).__torch_dispatch__ is not plain.__torch_dispatch__
    return computes and not isinstance(tensor, (FakeTensor, DTensor))


def steps_in_backward(parameter: torch.Tensor) -> bool:
    """Whether torch.distributed.optim._apply_optimizer_in_backward hooked its accumulator."""
    return "_in_backward_optimizers" in parameter.__dict__


def buffer_slots(module: torch.nn.Module) -> dict[str, Any]:
    """The dictionary that ``module.name`` reads its buffers from."""
    return module._buffers


def flat_weights(module: torch.nn.RNNBase) -> list[Any]:
    """The second list of parameters that recurrent modules read in forward."""
    return module._flat_weights


def remove_forward_hooks(module: torch.nn.Module, *functions: Callable[..., Any]) -> None:
    """Remove forward and forward-pre hooks by function, since copies of a module have no handle."""
    tables: tuple[Any, ...] = forward_hook_tables(module)
    keys = {k for table in tables for k, hook in table.items() if hook in functions}
    flags = "pre_hooks_with_kwargs", "hooks_with_kwargs", "hooks_always_called"
    for table in (*tables, *(getattr(module, f"_forward_{name}") for name in flags)):
        for key in keys & set(table):
            del table[key]


def forward_hook_tables(module: torch.nn.Module) -> tuple[dict[int, Any], dict[int, Any]]:
    """A module's dictionaries of forward-pre hooks and of forward hooks."""
    return module._forward_pre_hooks, module._forward_hooks


def backward_hook_tables(module: torch.nn.Module) -> tuple[dict[int, Any], dict[int, Any]]:
    """A module's dictionaries of backward-pre hooks and of backward hooks."""
    return module._backward_pre_hooks, module._backward_hooks


def replace_forward_hooks(module: torch.nn.Module, replaced: Mapping[Any, Any]) -> None:
    """Put other functions in the places of forward and forward-pre hooks."""
    for table in forward_hook_tables(module):
        for key, hook in table.items():
            table[key] = replaced.get(hook, hook)


def leaf_hooks(tensor: torch.Tensor) -> tuple[Any, Any]:
    """A tensor's tables of gradient and post-accumulate hooks; None where it never had one."""
    return tensor._backward_hooks, tensor._post_accumulate_grad_hooks


gradient_hooks: Callable[[torch.Tensor], Any] = attrgetter("_backward_hooks")


def take_leaf_hooks(parameter: torch.Tensor) -> tuple[Any, Any]:
    """A leaf's tables of both kinds; autograd keeps reading the latter."""
    gradient, post = leaf_hooks(parameter)
    parameter._backward_hooks = None
    return gradient, post


def give_leaf_hooks(parameter: torch.Tensor, gradient: Any, post: Any) -> None:
    """Let autograd read these tables for a plain leaf."""
    if gradient:
        parameter._backward_hooks = gradient
    if post:
        parameter._post_accumulate_grad_hooks = post


def set_leaf_hooks(parameter: torch.Tensor, gradient: Any, post: Any) -> None:
    """Let autograd read these tables for a sharded leaf, empty ones too."""
    parameter._backward_hooks, parameter._post_accumulate_grad_hooks = gradient, post


_of_group: Any = dist.ProcessGroup


def _find(name: str, before: str) -> Any:
    """``(group, out, given, options)``, without checks; ``before`` torch 2.13 by another name."""
    return getattr(_of_group, name if name in dir(_of_group) else before)


all_gather_single = _find("all_gather_single", "_allgather_base")
reduce_scatter_single = _find("reduce_scatter_single", "_reduce_scatter_base")
all_gather_several = _find("all_gather_single_coalesced", "allgather_into_tensor_coalesced")
reduce_scatter_several = _find("reduce_scatter_single_coalesced", "reduce_scatter_tensor_coalesced")
"""``(group, outs, given, options)``, as ``all_gather_several``: many tensors in one launch."""


_c10d: Any = dist.distributed_c10d


KEEPS_RANK_ORDER = "sort_ranks" in signature(dist.new_group).parameters
"""Whether a group can number its ranks otherwise than by size: torch 2.13 does, 2.11 does not."""


def _synchronous(options: Any) -> Any:
    options.asyncOp = False
    return options


GATHER_OPTIONS = _synchronous(_c10d.AllgatherOptions())
"""Run on the caller's stream: no stream of the backend's own, so no ``record_stream``."""
REDUCE_OPTIONS = _synchronous(_c10d.ReduceScatterOptions())
"""As ``GATHER_OPTIONS``, with sum as the operation."""


@cache
def premultiplied(factor: float) -> Any:
    """``REDUCE_OPTIONS`` for NCCL: each rank's tensor is multiplied by ``factor`` first."""
    options = _synchronous(_c10d.ReduceScatterOptions())
    options.reduceOp = dist._make_nccl_premul_sum(factor)  # type: ignore[attr-defined]
    return options


call_raw: Callable[..., Any] = torch._C._disabled_torch_function_impl
"""``(func, types, args, kwargs)``: call ``func`` in a ``raw`` scope, at C speed."""

enable_torch_function = torch._C._EnableTorchFunction
"""Scope that ends a ``raw`` scope around it, for user code called from inside one."""

is_torch_function_enabled: Callable[[], bool] = torch._C._is_torch_function_enabled
"""False inside a ``raw`` scope."""


def prefer_foreach(*classes: Any) -> None:
    """Tell torch.optim and torch.nn.utils that foreach kernels take these tensor classes."""
    from torch.optim import optimizer
    from torch.utils import _foreach_utils

    for known in (optimizer._foreach_supported_types, _foreach_utils._foreach_supported_types):
        known.extend(c for c in classes if c not in known)


def step_function(kind: Any) -> Callable[..., Any]:
    """The step of an optimizer class without what torch, and its compiler, wrap around it."""
    step = kind.step
    while getattr(step, "hooked", False):
        step = step.__wrapped__
    return step


def call_at_step_end(optimizer: Any, hook: Callable[..., None]) -> None:
    """Call ``hook`` at the end of each of the optimizer's steps, before hooks that may raise."""
    hooks = optimizer._optimizer_step_post_hooks
    if hook not in hooks.values():
        handle = optimizer.register_step_post_hook(hook)
        hooks.move_to_end(handle.id, last=False)


NO_CAPTURE_WARNING = {"_warned_capturable_if_run_uncaptured": True}
"""Attributes of an optimizer that does not say that its step could run in a CUDA graph."""


def remove_state_dict_hooks(module: torch.nn.Module, *functions: Callable[..., Any]) -> None:
    """Remove state-dict hooks by function, since copies of a module have no handle."""
    for kind in ("state_dict", "state_dict_pre", "load_state_dict_pre", "load_state_dict_post"):
        table: Any = getattr(module, f"_{kind}_hooks")
        for key, hook in list(table.items()):
            if getattr(hook, "hook", hook) in functions:
                del table[key]


def has_foreign_load_hooks(module: torch.nn.Module) -> bool:
    """Whether code that is neither torch's nor this package's changes what a module loads."""
    hooks = (*module._load_state_dict_pre_hooks.values(), type(module)._load_from_state_dict)
    found = (getattr(h, "hook", h) for h in (*hooks, *module._load_state_dict_post_hooks.values()))
    known = "fsdp_compose.", "torch.nn.modules."
    return any(not f"{f.__module__}.".startswith(known) for f in found)


def non_persistent(module: torch.nn.Module) -> set[str]:
    """Names of the buffers that a module keeps out of its state dict."""
    return module._non_persistent_buffers_set


def child_slots(module: torch.nn.Module) -> dict[str, torch.nn.Module | None]:
    """The dictionary of a module's children, the same one under two names included."""
    return module._modules


swap_tensors: Callable[[torch.Tensor, torch.Tensor], None] = torch._C._swap_tensor_impl


make_subclass: Callable[..., Any] = torch.Tensor._make_subclass
"""``(cls, tensor, requires_grad)``: another object of class ``cls`` over the tensor's storage."""

disabled_torch_dispatch = torch._C._disabled_torch_dispatch_impl
"""As ``__torch_dispatch__`` of a class: its tensors are dispatched as plain ones."""


def local_part(dtensor: DTensor) -> torch.Tensor:
    """What this rank holds of a DTensor, outside autograd."""
    return dtensor._local_tensor


def set_local_part(dtensor: DTensor, local: torch.Tensor | None) -> None:
    """Give a DTensor object, whatever its class, another local tensor, or none."""
    slot: Any = DTensor.__dict__["_local_tensor"]
    if local is None:
        slot.__delete__(dtensor)
    else:
        slot.__set__(dtensor, local)


def swap_dtensor_slots(first: DTensor, second: DTensor) -> None:
    """Exchange what two DTensor objects, of whatever classes, have besides their tensors."""
    slots: list[Any] = [DTensor.__dict__["_local_tensor"], DTensor.__dict__["_spec"]]
    for slot in slots:
        found = []
        for dtensor in (first, second):
            try:
                found.append(slot.__get__(dtensor))
                slot.__delete__(dtensor)
            except AttributeError:
                found.append(None)  # the slot is empty while the tensor is sharded
        for dtensor, value in zip((second, first), found, strict=True):
            if value is not None:
                slot.__set__(dtensor, value)


def dtensor_spec(dtensor: DTensor) -> Any:
    """Mesh, placements and global shape, as one object that DTensors share."""
    return dtensor._spec


def set_dtensor_spec(dtensor: DTensor, spec: Any) -> None:
    dtensor._spec = spec


def root_mesh(mesh: DeviceMesh) -> DeviceMesh:
    """The mesh that ``mesh`` was sliced from, or itself."""
    return mesh._get_root_mesh()


def timeout_of(pg: dist.ProcessGroup) -> float:
    """Seconds that the ranks of a group wait for each other; torch's default where it is unsaid."""
    timeout: timedelta = _c10d.default_pg_timeout
    with suppress(AttributeError, RuntimeError):  # not every backend has options
        is_listed = isinstance(pg, dist.ProcessGroup)  # what gloo_group makes is not
        backend: Any = pg._get_backend(pg._device_types[0]) if is_listed else pg
        timeout = backend.options._timeout
    return timeout.total_seconds()


def gloo_group(key: str, rank: int, size: int, timeout: float) -> Any:
    """A group that torch does not list, over the ranks that call with the same ``key``, once."""
    store = _c10d.PrefixStore(key, default_store())
    return _c10d.ProcessGroupGloo(store, rank, size, timedelta(seconds=timeout))


def default_store() -> Any:
    """The key-value store that the default process group was started with."""
    return dist.distributed_c10d._get_default_store()


@contextmanager
def below_modes() -> Iterator[None]:
    """Scope of plain kernels: no mode, subclass, transform or autograd sees what is in it."""
    core = torch._C
    with (
        core.DisableTorchFunction(),
        core._DisableTorchDispatch(),
        core._DisableFuncTorch(),
        torch.inference_mode(),
    ):
        yield


IncompatibleKeys = torch.nn.modules.module._IncompatibleKeys
"""What a load left out: ``missing_keys`` and ``unexpected_keys``."""

StorageInfo: type[Any] = filesystem._StorageInfo
"""Where the metadata of a checkpoint says that a piece lies: relative_path, offset, length."""

MemoryFormatCode: type[Any] = checkpoint_metadata._MEM_FORMAT_ENCODING
"""Part of what the metadata of a checkpoint pickles for each tensor."""

# torch.distributed.checkpoint's load, without the warning that its public form gives wherever
# there is no process group.
load_checkpoint_plan: Callable[..., None] = state_dict_loader._load_state_dict
"""``(state_dict, storage_reader, process_group, coordinator_rank, no_dist, planner)``"""

set_class: Callable[[Any, type], None] = object.__dict__["__class__"].__set__
"""``tensor.__class__ = cls`` for a class whose ``__class__`` is a property."""
