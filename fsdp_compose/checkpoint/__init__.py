"""Save, load and reshard: model and optimizer state, whole or in shards, from and to anywhere.

Files, each importing only from those above it:

    ranks                 ranks meet before they save or load
    files                 a folder's files, committed by one rename and checked on load
    values                values in state dicts: cut, fitted, gathered, sent
    given                 what ranks compare of the state that each was given to load
    contents              what a module's state dict holds, and its full tensors bucket by bucket
    metadata              what a checkpoint folder says of itself, read without trust
    local                 kind='local': raw shards and the layout they fit in
    model                 model state, out of and into a sharded module
    optimizer/members     what an optimizer's parameters are
    optimizer/nested      lists and dictionaries of tensors in optimizer state
    optimizer/shapes      optimizer state in another shape than its parameter
    optimizer/watch       what torch's own functions load into optimizers
    optimizer/fit         saved optimizer state, as the parameters take it
    optimizer/agree       ranks agree on what their optimizers hold
    optimizer/read        optimizer state by name, out of any optimizer
    optimizer/rekey       optimizer state by names or by numbers
    optimizer/write       optimizer state by name, into any optimizer
    plain_data            what is unpickled without running code
    containers            dictionaries and lists, which torch cuts into parts
    source                a torch.distributed.checkpoint folder to read from
    saving                the handle of a save that a thread writes
    steady                a save beside which training went on commits nothing
    load_hooks            what load hooks of a module's own are given of files
    stages                pipeline stages: who saves what of a model
    dcp                   save_checkpoint and load_checkpoint
    formats/format        what a file of whole tensors is to save_full and load_full
    formats/safetensors   the safetensors format, read and written in pieces
    formats/export        files of a whole model, committed by one atomic step
    full                  save_full and load_full
    state_dict_hooks      model.state_dict() and model.load_state_dict(), through hooks
"""

from fsdp_compose.checkpoint.dcp import load_checkpoint, save_checkpoint
from fsdp_compose.checkpoint.formats.format import Format, Stored
from fsdp_compose.checkpoint.formats.safetensors import SAFETENSORS
from fsdp_compose.checkpoint.full import load_full, save_full
from fsdp_compose.checkpoint.model import load_state_dict, state_dict
from fsdp_compose.checkpoint.optimizer.read import optim_state_dict
from fsdp_compose.checkpoint.optimizer.rekey import rekey_optim_state_dict
from fsdp_compose.checkpoint.optimizer.write import load_optim_state_dict
from fsdp_compose.checkpoint.saving import Saving
from fsdp_compose.checkpoint.state_dict_hooks import (
    get_state_dict_type,
    set_state_dict_type,
    state_dict_type,
)
from fsdp_compose.checkpoint.values import Outline

__all__ = [
    "SAFETENSORS",
    "Format",
    "Outline",
    "Saving",
    "Stored",
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
