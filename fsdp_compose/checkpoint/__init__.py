"""Save, load and reshard: model and optimizer state, whole or in shards, from and to anywhere."""

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
