"""Before weights leave the run, ranks compare what was done to them since the last step ended.

The end of a step compares whether all ranks stepped, with what settings, and what else they wrote.
A checkpoint that is saved in between would keep parts of different weights for ever, and what the
last step of a run did wrong would never be found.
"""

from __future__ import annotations

from collections.abc import Iterable
from operator import itemgetter
from typing import Any, TypeVar

from fsdp_compose.comm.heads import meet_alone
from fsdp_compose.comm.messages import gather_in_turn, raise_on_all
from fsdp_compose.core.guards.collective_log import Log, code_of
from fsdp_compose.core.guards.compared_steps import number_of, texts_of
from fsdp_compose.core.guards.rank_differences import (
    STEPPED,
    explain_difference,
    explain_settings,
    explain_stepped,
)
from fsdp_compose.core.state import Unit

T = TypeVar("T", bound="tuple[Any, ...]")


def compare_records(units: Iterable[Unit], call: str) -> None:
    """Raise on every rank where some did other things to the parameters of ``units``.

    Every rank must call it. What is compared is compared again when the next step ends.

    Args:
        units: in the order of the model's modules, which is the same on every rank.
        call: what every rank calls.

    Raises:
        RuntimeError: optimizers stepped on some ranks alone, or with other settings, or something
            was written on some ranks; names the parameter and the ranks.
    """
    found = [*dict.fromkeys(log for unit in units for log in unit.links.logs)]
    problem: Exception | None = None
    shared: list[Log] = []  # with ranks that compare others as well, and may differ there
    for log in found:
        for group in log.groups:
            meet_alone(group, f"call {call}")
        text, is_one_of_several = _find_difference(log, len(found) > 1, call)
        if text:
            problem = problem or RuntimeError(f"{call}: {text}")
        if is_one_of_several:
            shared.append(log)
    for log in shared:
        try:
            raise_on_all(problem, log.groups, what=call)
        except RuntimeError as error:
            problem = error
    if problem is not None:
        raise problem


def forget_records(units: Iterable[Unit]) -> None:
    """After every rank has loaded weights: it does not matter any more which ranks had stepped."""
    for unit in units:
        for log in unit.links.logs:
            log.steps.forget_loaded(unit.name)


def _find_difference(log: Log, has_others: bool, call: str) -> tuple[str | None, bool]:
    """What differs, and whether some rank of the log ``has_others``."""
    steps, mine = log.steps, log.groups[0].ranks[log.groups[0].rank]
    events = steps.list_writes()
    if steps.parameter is not None:
        events.append((code_of(STEPPED), STEPPED, *steps.parameter))
    settings = steps.list_settings()
    reports = _gather(log, (mine, events, number_of(settings), has_others), call)
    done = [(rank, events) for rank, events, _, _ in reports]
    text = None
    if len({tuple(number for number, *_ in events) for _, events in done}) > 1:
        text = explain_stepped(log.step, done) or explain_difference(log.step, done)
    elif len({number for _, _, number, _ in reports}) > 1:
        texts = texts_of(settings, log.find_entries(log))
        text = explain_settings(log.step, _gather(log, (mine, texts), call))
    return text, any(found for *_, found in reports)


def _gather(log: Log, mine: T, call: str) -> list[T]:
    """What every rank of the log's groups has, by rank, which comes first in it."""
    return sorted(gather_in_turn(mine, log.groups, call), key=itemgetter(0))
