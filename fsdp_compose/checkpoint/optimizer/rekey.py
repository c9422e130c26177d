"""Optimizer state by parameter names or by the numbers of a plain optimizer; values stay as is."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from torch import nn

from fsdp_compose.base.arguments import check_module, describe_value
from fsdp_compose.checkpoint.optimizer.members import (
    OptimLike,
    Targets,
    is_state,
    list_members,
    names_of,
)
from fsdp_compose.checkpoint.optimizer.nested import is_by_key, join_keys, write_exactly
from fsdp_compose.construct.names import first_names, list_names, name_cleaner, parameter_names


def rekey_optim_state_dict(
    state_dict: Mapping[str, Any],
    key: Literal["name", "id"],
    module: nn.Module,
    optim: OptimLike | None = None,
) -> dict[str, Any]:
    """Optimizer state by parameter names or by the numbers a plain optimizer uses.

    ``rekey_optim_state_dict(optim_state_dict(model, optim), "id", model)`` loads into a plain
    optimizer with the same groups, in the same order, over the plain model, and ``"name"`` is the
    way back. Pass that optimizer too where it lists its parameters in another order.

    Args:
        state_dict: as ``load_optim_state_dict`` takes it; values are not looked at, and nothing
            communicates.
        key: ``"name"`` or ``"id"``. State that has these keys already is copied.
        module: gives the order of parameters for state by number with one group.
        optim: whose numbers they are, over ``module``'s parameters. Needed for several groups by
            number, and for an optimizer that lists parameters in another order than the state.

    Raises:
        TypeError: ``state_dict`` is no optimizer state, or ``module`` is no module.
        ValueError: an unknown ``key``, numbers that cannot be matched to parameters, or groups of
            ``optim`` that the state does not have.

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
    check_module("rekey_optim_state_dict", module)
    state_dict = _read_state(state_dict)
    if has_numbers(state_dict) is (key == "id"):
        return dict(state_dict)
    order: list[list[str]] | None = None
    if optim is not None:
        groups = [group for _, groups in list_members(module, optim) for group in groups]
        order = names_of(module, groups)
    if key == "id":
        return _to_numbers(state_dict if order is None else _regroup(state_dict, order, module))
    return to_names(state_dict, order or _default_order(state_dict, module))


def _read_state(state_dict: Any) -> Mapping[str, Any]:
    """The state in its usual form."""
    if isinstance(state_dict, Mapping) and is_by_key(state_dict):
        return join_keys(state_dict)
    groups = state_dict["param_groups"] if is_state(state_dict) else [None]
    strange = [group for group in groups if not isinstance(group, Mapping) or "params" not in group]
    if strange:
        found = f"is {describe_value(state_dict)}"
        if strange[0] is not None:
            found = f"has the group {describe_value(strange[0])}"
        raise TypeError(
            f"rekey_optim_state_dict: state_dict {found}; wanted a dictionary with 'state' and "
            "'param_groups', each group with 'params', as optim_state_dict gives."
        )
    return state_dict


def has_numbers(state_dict: Mapping[str, Any]) -> bool:
    """Whether optimizer state is by number."""
    params = [p for group in state_dict["param_groups"] for p in group["params"]]
    return any(not isinstance(p, str) for p in params)


def _regroup(
    state_dict: Mapping[str, Any], order: list[list[str]], module: nn.Module
) -> dict[str, Any]:
    """Give state by name the groups of an optimizer, each with the settings saved for it."""
    clean = name_cleaner(module)
    canonical = first_names(module)
    known = lambda name: canonical.get(clean(name), clean(name))  # noqa: E731
    given = [{k: v for k, v in g.items() if k != "param_names"} for g in state_dict["param_groups"]]
    saved = {known(name): group for group in given for name in group["params"]}
    unused = iter([group for group in given if not group["params"]])  # one after the other
    groups: list[dict[str, Any]] = []
    for names in order:
        found = [saved[name] for name in names if name in saved]
        found = found or [next(unused, given[0])]
        settings = [write_exactly({**group, "params": ()}) for group in found]
        absent = [name for name in names if name not in saved]
        if absent or settings.count(settings[0]) < len(settings):
            what = f"lacks {list_names(absent, saved)}" if absent else "has several groups"
            raise ValueError(
                f"rekey_optim_state_dict: the state {what}, of a group of optim with {names[:4]}; "
                "pass the optimizer that the state is to be loaded into, with groups as they were."
            )
        groups.append({**found[0], "params": names})
    state = {known(name): values for name, values in state_dict["state"].items()}
    return {**state_dict, "state": state, "param_groups": groups}


def _to_numbers(state_dict: Mapping[str, Any]) -> dict[str, Any]:
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


def order_by_names(
    state_dict: Mapping[str, Any], targets: Targets, module: nn.Module
) -> list[list[str]]:
    """The names of what the numbers of ``state_dict`` stand for, by group.

    Those that it tells (``param_names``, of an optimizer over ``named_parameters()``) where they
    are the names of what ``targets`` train, in whatever order; in that of ``targets`` otherwise.
    """
    order = names_of(module, [members for _, groups in targets for members in groups])
    clean = name_cleaner(module)
    told = [group.get("param_names", ()) for group in state_dict["param_groups"]]
    if list(map(len, told)) != [len(group["params"]) for group in state_dict["param_groups"]]:
        return order
    canonical = [name for names in order for name in names]
    groups = [group for optim, _ in targets for group in optim.param_groups]
    given = [name for group in groups for name in group.get("param_names", ())]
    for own in (given, canonical):
        known = dict(zip(map(clean, own), canonical, strict=False))
        if len(own) == len(known) == len(canonical) and known.keys() == {
            clean(name) for names in told for name in names
        }:
            return [[known[clean(name)] for name in names] for names in told]
    return order


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
