"""Optimizer state by parameter names or by the numbers of a plain optimizer; values stay as is."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from torch import nn

from fsdp_compose.checkpoint.optimizer.members import OptimLike, list_members, names_of
from fsdp_compose.construct.names import name_cleaner, parameter_names


def rekey_optim_state_dict(
    state_dict: Mapping[str, Any],
    key: Literal["name", "id"],
    module: nn.Module,
    optim: OptimLike | None = None,
) -> dict[str, Any]:
    """Optimizer state by parameter names or by the numbers a plain optimizer uses.

    ``rekey_optim_state_dict(optim_state_dict(model, optim), "id", model)`` loads into a plain
    optimizer with the same groups over the plain model, and ``"name"`` is the way back.

    Args:
        state_dict: values are not looked at; nothing communicates.
        key: ``"name"`` or ``"id"``. State that has these keys already is copied.
        module: gives the order of parameters for state by number with one group.
        optim: gives it for several groups; not needed otherwise.

    Raises:
        ValueError: an unknown ``key``, or numbers that cannot be matched to parameters.

    Example:
        >>> model = fully_shard(nn.Linear(3, 2))
        >>> saved = optim_state_dict(model, torch.optim.SGD(model.parameters(), lr=0.1))
        >>> saved["param_groups"][0]["params"]
        ['weight', 'bias']
        >>> rekey_optim_state_dict(saved, "id", model)["param_groups"][0]["params"]
        [0, 1]
    """
    if key not in ("name", "id"):
        raise ValueError(f"rekey_optim_state_dict: key is {key!r}; wanted 'name' or 'id'.")
    if key == "id":
        return _to_numbers(state_dict)
    if not has_numbers(state_dict):
        return dict(state_dict)
    if optim is not None:
        groups = [group for _, groups in list_members(module, optim) for group in groups]
        order = names_of(module, groups)
    else:
        order = _default_order(state_dict, module)
    return to_names(state_dict, order)


def has_numbers(state_dict: Mapping[str, Any]) -> bool:
    """Whether optimizer state is by number."""
    params = [p for group in state_dict["param_groups"] for p in group["params"]]
    return any(not isinstance(p, str) for p in params)


def _to_numbers(state_dict: Mapping[str, Any]) -> dict[str, Any]:
    if has_numbers(state_dict):
        return dict(state_dict)
    numbers: dict[str, int] = {}
    groups = []
    for group in state_dict["param_groups"]:
        ids = [numbers.setdefault(name, len(numbers)) for name in group["params"]]
        groups.append({**group, "params": ids})
    state = {numbers[name]: dict(v) for name, v in state_dict["state"].items() if name in numbers}
    return {**state_dict, "state": state, "param_groups": groups}


def to_names(state_dict: Mapping[str, Any], order: list[list[str]]) -> dict[str, Any]:
    """Replace the numbers of optimizer state by the names of each group.

    Raises:
        ValueError: the groups are of other sizes.
    """
    groups = state_dict["param_groups"]
    sizes = [len(group["params"]) for group in groups]
    if sizes != [len(names) for names in order]:
        raise ValueError(
            f"optimizer state by number: saved groups of {sizes} parameters, here they are of "
            f"{[len(names) for names in order]}; group the parameters as they were, or pass optim= "
            "with the optimizer that has those groups."
        )
    names = {
        number: name
        for group, group_names in zip(groups, order, strict=True)
        for number, name in zip(group["params"], group_names, strict=True)
    }
    state = {names[int(number)]: dict(v) for number, v in state_dict["state"].items()}
    renamed = [{**g, "params": list(n)} for g, n in zip(groups, order, strict=True)]
    return {**state_dict, "state": state, "param_groups": renamed}


def _default_order(state_dict: Mapping[str, Any], module: nn.Module) -> list[list[str]]:
    groups = state_dict["param_groups"]
    if all("param_names" in group for group in groups):
        clean = name_cleaner(module)
        return [[clean(name) for name in group["param_names"]] for group in groups]
    names = parameter_names(module)
    if len(groups) == 1:
        for chosen in (
            [names[p][0] for p in module.parameters() if p in names],
            [names[p][0] for p in module.parameters() if p in names and p.requires_grad],
        ):
            if len(chosen) == len(groups[0]["params"]):
                return [chosen]
    raise ValueError(
        f"rekey_optim_state_dict: groups of {[len(g['params']) for g in groups]} parameters do not "
        f"tell which of the module's {len(names)} they are; pass optim= with an optimizer that has "
        "the same groups over this module's parameters."
    )
