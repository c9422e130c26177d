"""While a CUDA graph is captured, units have anchors that were made on its stream.

When a backward ends, autograd lets the current stream wait for the one on which a leaf's node was
made. That node lives as long as any autograd graph that reached it, so a step before may have made
it, on a stream that is not captured; and CUDA refuses to capture a wait for such a stream.
"""

from __future__ import annotations

import torch

from fsdp_compose.base.streams import is_capturing
from fsdp_compose.comm.waiting import forget_marks
from fsdp_compose.core.state import Unit


def choose_anchor(unit: Unit) -> None:
    """While a CUDA graph is captured, give the unit an anchor whose node is of that stream."""
    if not is_capturing():
        return
    forget_marks()
    known, key = unit.graphs.captured, unit.engine.streams.current.stream_id
    if key not in known:
        anchor = torch.empty_like(unit.links.anchor, requires_grad=True)
        known[key] = anchor, torch.autograd.graph.get_gradient_edge(anchor).node
    unit.links.anchor = known[key][0]
