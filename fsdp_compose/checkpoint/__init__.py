"""Save, load and reshard: model and optimizer state, whole or in shards, from and to anywhere.

Files, each importing only from those above it:

    consensus    errors of one rank are raised on all before state is written
    files        a folder's files, committed by one rename and checked on load
    names        a module's own names whatever wraps it
    values       sharded values in state dicts
    members      what an optimizer's parameters are
    metadata     what a checkpoint folder says of itself, read without trust
    local        kind='local': raw shards and the layout they fit in
    stream       full tensors out of shards, one bucket at a time
    transfer     state that only rank 0 has, sent tensor by tensor
    model        model state, out of and into a sharded module
    nested       lists and dictionaries of tensors in optimizer state
    structure    optimizer state in another shape than its parameter
    optim_agree  ranks agree on what their optimizers hold
    optim_read   optimizer state by name, out of any optimizer
    rekey        optimizer state by names or by numbers
    watch        what torch's own functions load into optimizers
    optim        optimizer state by name, into any optimizer
    source       a torch.distributed.checkpoint folder to read from
    stages       pipeline stages: who saves what of a model
    write        a state written as torch.distributed.checkpoint plans it
    dcp          save_checkpoint and load_checkpoint
    tensorfile   the safetensors format, read and written in pieces
    export       safetensors files committed by one atomic step
    full         save_full and load_full
    plain        model.state_dict() and model.load_state_dict(), through hooks
"""

from fsdp_compose.checkpoint.dcp import Saving, load_checkpoint, save_checkpoint
from fsdp_compose.checkpoint.full import load_full, save_full
from fsdp_compose.checkpoint.model import load_state_dict, state_dict
from fsdp_compose.checkpoint.optim import load_optim_state_dict
from fsdp_compose.checkpoint.optim_read import optim_state_dict
from fsdp_compose.checkpoint.plain import (
    get_state_dict_type,
    set_state_dict_type,
    state_dict_type,
)
from fsdp_compose.checkpoint.rekey import rekey_optim_state_dict

__all__ = [
    "Saving",
    "get_state_dict_type",
    "load_checkpoint",
    "load_full",
    "load_optim_state_dict",
    "load_state_dict",
    "optim_state_dict",
    "rekey_optim_state_dict",
    "save_checkpoint",
    "save_full",
    "set_state_dict_type",
    "state_dict",
    "state_dict_type",
]
