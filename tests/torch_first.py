"""What torch imports on first use, in an optimizer step or a checkpoint: 1–3 s.

A process that forks others imports it first, or each of them pays for it.
"""

from __future__ import annotations

import logging
import warnings

import torch._dynamo
import torch._subclasses.schema_check_mode
import torch.distributed.checkpoint
import torch.distributed.fsdp
import torch.distributed.tensor
import torch.profiler
import torch.utils.checkpoint
import torch.utils.serialization.config

with warnings.catch_warnings():  # torch imports it in the first dual level, with a warning
    warnings.simplefilter("ignore")
    import torch._decomp.decompositions_for_jvp  # noqa: F401

# Torch traces what it compiles for whoever listens to this logger, and pytest listens to each that
# passes nothing on.
traces = logging.getLogger("torch.__trace")
traces.handlers.clear()
traces.propagate = True
