"""Every public function and class has an example in its docstring, which runs as it is written.

The examples run in a world of one process, in an empty folder, with the public names, ``torch``,
``nn`` and ``os`` at hand.
"""

from __future__ import annotations

import doctest
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import fsdp_compose as fc

NAMES = [
    *(name for name in fc.__all__ if name != "wrap"),
    *(f"wrap.{name}" for name in fc.wrap.__all__ if callable(getattr(fc.wrap, name))),
]
OPTIONS = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE

# What has no example yet. Names leave this list; none is added.
WITHOUT_EXAMPLE = {
    "ExecutionOrder",
    "GradBucket",
    "GradScaler",
    "Int8ErrorFeedback",
    "MixedPrecision",
    "Offload",
    "OwnerOptimizer",
    "ShardedDTensor",
    "ShardedParameter",
    "ShardedTensor",
    "ShardedWeightError",
    "ShardingStrategy",
    "TracingConfig",
    "UnshardHandle",
    "accumulate",
    "apply",
    "bf16_compress_hook",
    "clip_grad_norm_",
    "declare_tensor_parallel",
    "default_hook",
    "flat_parameters",
    "fp16_compress_hook",
    "fully_shard",
    "gathered",
    "get_state",
    "grad_norm",
    "int8_error_feedback_hook",
    "is_fully_sharded",
    "iter_full",
    "local_parameters",
    "named_local_parameters",
    "no_sync",
    "owner_step",
    "parameter_names",
    "parameters_by_name",
    "participate",
    "pipeline_stage",
    "prefetch_units",
    "reduce_grads",
    "refresh",
    "register_comm_hook",
    "register_forward_method",
    "register_post_reduce_hook",
    "reshard",
    "seeded_init",
    "set_backward_prefetch",
    "set_debug",
    "set_find_unused_parameters",
    "set_forward_prefetch",
    "set_gradient_divide_factor",
    "set_is_last_backward",
    "set_requires_all_reduce",
    "set_requires_gradient_sync",
    "set_reshard_after_backward",
    "set_reshard_after_forward",
    "set_traceable",
    "summon_full_params",
    "trace_execution_order",
    "undo",
    "units_of",
    "unshard",
    "wrap.Decide",
    "wrap.Policy",
    "wrap.UnitOptions",
    "wrap.by_class",
    "wrap.by_execution_order",
    "wrap.by_fn",
    "wrap.by_name",
    "wrap.by_size",
}


def examples_of(name: str) -> list[doctest.DocTest]:
    value: Any = fc
    for part in name.split("."):
        value = getattr(value, part)
    public = {public: getattr(fc, public) for public in fc.__all__}
    names = public | {"torch": torch, "nn": nn, "os": os}
    finder = doctest.DocTestFinder(recurse=False)
    return [test for test in finder.find(value, name, globs=names) if test.examples]


@pytest.mark.parametrize("name", NAMES)
def test_its_example_runs(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    torch.manual_seed(0)
    found = examples_of(name)
    if name in WITHOUT_EXAMPLE:
        assert not found, f"{name} has an example: take it off the list"
        return
    assert found, f"{name} has no example in its docstring"
    said: list[str] = []
    for test in found:
        doctest.DocTestRunner(optionflags=OPTIONS).run(test, out=said.append)
    assert not said, "".join(said)
