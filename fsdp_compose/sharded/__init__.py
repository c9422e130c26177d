"""What a sharded parameter knows about itself: it reads as the whole and stores this rank's slice.

``ShardedParameter`` and ``ShardedTensor`` (its gradient, optimizer state and what is computed from
them elementwise) answer ``shape``, ``dim()``, ``numel()`` with the original's. Elementwise
functions act on the slice, reductions of everything are global (every rank of the group must call
them) and differentiable, random numbers are those that one process would draw for the whole, and
whatever else would see a slice raises :class:`ShardedWeightError`.

Files, each importing only from those above it:

    ops         tables of torch functions by what they mean on a slice
    advice      what an error says to call instead, by who called
    parallel    where a rank's part of a tensor lies that tensor parallelism split
    spec        where a slice lies in its parameter and its bucket
    wrapped     a parameter whose class computes around a dense tensor, which is what is sharded
    chunks      a slice as chunks of a distributed checkpoint
    ranks       numbers of all ranks, for reductions that autograd records
    reduce      reductions over the ranks of a group
    cut         cuts this rank's elements out of a whole tensor
    kept_grad   a parameter's gradient, kept where reading it costs little
    leaf_hooks  a sharded parameter's hooks, run once on the reduced gradient
    reads       what the dispatcher asks of a slice, where nobody else does
    torchstate  what torch's functions over state dicts ask of a slice
    writes      what is written into parameters is noted, for ranks to compare
    tensor      the classes of sharded tensor; tag, to_local
    draws       random numbers, those that the whole would have got
    views       views of which a slice is a slice too: flattened, or some rows
    operands    plain operands of elementwise functions, cut and compared
    gradients   autograd.grad and backward, given gradients that are cut
    convert     a parameter with its hooks becomes sharded, and plain again
    calls       __torch_function__, by those tables
"""

from fsdp_compose.sharded.advice import EDGE, PRIVACY, QUANTIZING, STATE_KEY, TENSOR_PARALLEL_FIRST
from fsdp_compose.sharded.calls import ON_SLICES
from fsdp_compose.sharded.convert import (
    as_own_file,
    close_dtensor,
    close_wrapped,
    open_dtensor,
    open_wrapped,
    take_over_hooks,
    untag,
    whole_slice,
)
from fsdp_compose.sharded.cut import own_slice, part_slice
from fsdp_compose.sharded.draws import as_first_rank, find_generator
from fsdp_compose.sharded.kept_grad import KEPT, replace_grad
from fsdp_compose.sharded.leaf_hooks import (
    give_back_hooks,
    refuse_arrivals,
    run_gradient_hooks,
    run_hooks_and_copy,
)
from fsdp_compose.sharded.ops import CASTS, CLEARING, HARMLESS
from fsdp_compose.sharded.parallel import Axis, Parallel, like_dtensor, part_of, split_axes
from fsdp_compose.sharded.spec import (
    Handler,
    Hooks,
    Residence,
    ShardedWeightError,
    ShardSpec,
    Writes,
    refuse_export,
)
from fsdp_compose.sharded.tensor import (
    SHARDED_PARAMETERS,
    ShardedDTensor,
    ShardedParameter,
    ShardedTensor,
    gather_part,
    is_sharded,
    is_sharded_parameter,
    set_local,
    spec_of,
    tag,
)
from fsdp_compose.sharded.torchstate import checked_state, to_local, view_local
from fsdp_compose.sharded.views import flat_spec
from fsdp_compose.sharded.wrapped import Wrapper, dense_of, find_wrapper, tensors_in

__all__ = [
    "CASTS",
    "CLEARING",
    "EDGE",
    "HARMLESS",
    "KEPT",
    "ON_SLICES",
    "PRIVACY",
    "QUANTIZING",
    "SHARDED_PARAMETERS",
    "STATE_KEY",
    "TENSOR_PARALLEL_FIRST",
    "Axis",
    "Handler",
    "Hooks",
    "Parallel",
    "Residence",
    "ShardSpec",
    "ShardedDTensor",
    "ShardedParameter",
    "ShardedTensor",
    "ShardedWeightError",
    "Wrapper",
    "Writes",
    "as_first_rank",
    "as_own_file",
    "checked_state",
    "close_dtensor",
    "close_wrapped",
    "dense_of",
    "find_generator",
    "find_wrapper",
    "flat_spec",
    "gather_part",
    "give_back_hooks",
    "is_sharded",
    "is_sharded_parameter",
    "like_dtensor",
    "open_dtensor",
    "open_wrapped",
    "own_slice",
    "part_of",
    "part_slice",
    "refuse_arrivals",
    "refuse_export",
    "replace_grad",
    "run_gradient_hooks",
    "run_hooks_and_copy",
    "set_local",
    "spec_of",
    "split_axes",
    "tag",
    "take_over_hooks",
    "tensors_in",
    "to_local",
    "untag",
    "view_local",
    "whole_slice",
]
