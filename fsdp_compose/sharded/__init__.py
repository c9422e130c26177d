"""What a sharded parameter knows about itself: it reads as the whole and stores this rank's slice.

``ShardedParameter`` and ``ShardedTensor`` (its gradient, optimizer state and what is computed from
them elementwise) answer ``shape``, ``dim()``, ``numel()`` with the original's. Elementwise
functions act on the slice, reductions of everything are global (every rank of the group must call
them) and differentiable, and whatever else would see a slice raises :class:`ShardedWeightError`.

    ops.py      tables of torch functions by what they mean on a slice
    spec.py     where a slice lies in its parameter and its bucket
    reduce.py   reductions over the ranks of a group
    tensor.py   the two classes; tag, untag, to_local
    calls.py    ``__torch_function__``, by those tables
"""

from fsdp_compose.sharded import calls as _calls  # noqa: F401  fills the table of functions
from fsdp_compose.sharded.spec import Hooks, Residence, ShardedWeightError, ShardSpec, refuse
from fsdp_compose.sharded.tensor import (
    ShardedParameter,
    ShardedTensor,
    give_back_hooks,
    is_sharded,
    own_slice,
    set_local,
    sharded_hook,
    spec_of,
    tag,
    tag_all,
    take_over_hooks,
    to_local,
    untag,
)

__all__ = [
    "Hooks",
    "Residence",
    "ShardSpec",
    "ShardedParameter",
    "ShardedTensor",
    "ShardedWeightError",
    "give_back_hooks",
    "is_sharded",
    "own_slice",
    "refuse",
    "set_local",
    "sharded_hook",
    "spec_of",
    "tag",
    "tag_all",
    "take_over_hooks",
    "to_local",
    "untag",
]
