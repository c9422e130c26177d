"""What ranks did differently, in words: units, weights, ways to reduce, steps left out."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

Event = tuple[int, str, str, str]
"""(number, verb, name of the unit, purpose); two events are the same if their numbers are."""

Frozen = list[tuple[str, str]]
"""(name of the unit, name of the parameter) for each parameter that a rank does not train."""

REDUCE = "reduce"
STEPPED = "stepped"
WRITE = "write"
EDIT = "edit"
CHANGE = "change"
DISCARD = "discard"
"""The kind of what a rank says at the end of a skippable step; its purpose is the reason."""
ALONE = "call"
"""The kind of a collective that no step issues; its purpose is what the rank was to do."""
_WRITING = (
    "A forward may only write the same values into a parameter on every rank, and what it writes "
    "into a sharded one would be lost. Write the parameter outside of forward, after "
    "optimizer.step()."
)
_EDITING = (
    "Each rank would keep a part of its own values, so nothing was written. Make the same edit on "
    "every rank, drawing random numbers in fsdp_compose.apply(module, fn) or after "
    "torch.manual_seed with one seed, or take that of rank 0: gathered(module, writeback=True, "
    "rank0_only=True). A backward inside a scope reduces gradients unless it has with_grads=True."
)
_CHANGING = (
    "Each rank writes its slice alone, so the whole is now made of parts of different values. "
    "Write the same on every rank, also where one rank alone knows what (send it to the others, or "
    "use gathered(module, writeback=True, rank0_only=True)); p.normal_() and torch.randn_like(p) "
    "draw the same on all; all-reduce what gradients are divided by, such as a count of tokens. "
    "Then load a checkpoint on every rank."
)
_ALONE = (
    "Call what all ranks take part in (full_tensor, state dicts, saves, loads, fully_shard, "
    "gathered, p.sum(), p.norm(), grad_norm, clip_grad_norm_) on every rank, for the same tensors, "
    "with the same arguments and in the same order, also where only rank 0 uses the result, after "
    "as many batches; and in the thread that trains, since ranks call what other threads do in "
    "orders of their own."
)
_REDUCING = (
    "Call set_gradient_divide_factor, register_comm_hook and set_requires_all_reduce alike on "
    "every rank, before the forward."
)

_SETTING = (
    "Where all run the same modules, some rank has set otherwise when units are gathered and "
    "reduced: call set_reshard_after_forward, set_reshard_after_backward, set_unshard_in_backward, "
    "set_forward_prefetch, set_backward_prefetch, prefetch_units, set_requires_gradient_sync, "
    "no_sync and accumulate alike on every rank."
)

LATE = (
    "This was found at the end of the step: its results and gradients are mixed up, so discard "
    "them. With fsdp_compose.set_debug(True) it is found before it happens."
)


def explain_unknown(name: str, unit: str, step: int, is_used: bool) -> str:
    """The error for a parameter whose use changed without the other ranks knowing."""
    found = (
        "some rank began to use it, and the others took it for unused and did not set its gradient"
        if is_used
        else "no rank used it any more, and the ranks took it for used elsewhere and set zeros"
    )
    return (
        f"parameter {name!r} of unit {unit!r}: in step {step} {found}. On an accelerator a rank "
        "goes by what the ranks used when they last compared it. Discard this step, and call "
        "fsdp_compose.set_find_unused_parameters(model) on every rank before training: ranks then "
        "compare what they used at every reduction, for which the host waits."
    )


def explain_frozen(step: int, reports: Sequence[tuple[int, Frozen]]) -> str | None:
    """Say which parameters some ranks train and others do not; None where they agree.

    Args:
        reports: (rank, what it does not train), by rank.
    """
    everywhere = set.intersection(*(set(names) for _, names in reports))
    differing = sorted(set().union(*(names for _, names in reports)) - everywhere)
    if not differing:
        return None
    unit, name = differing[0]
    frozen = [rank for rank, names in reports if differing[0] in names]
    trained = [rank for rank, names in reports if differing[0] not in names]
    more = f", and {len(differing) - 1} more parameters differ" if len(differing) > 1 else ""
    return (
        f"ranks disagree on what is trained in step {step}: parameter {name!r} of unit {unit!r} "
        f"requires a gradient on {_name(trained)} and not on {_name(frozen)}{more}. Call "
        "requires_grad_ alike on every rank, before the forward."
    )


def explain_stepped(step: int, reports: Sequence[tuple[int, list[Event]]]) -> str | None:
    """Say which ranks left an optimizer's step out; None unless that is all that differs.

    Args:
        reports: (rank, its events since the ranks last agreed), by rank.
    """
    last = {rank: events[-1] for rank, events in reports if events and events[-1][1] == STEPPED}
    without = [rank for rank, _ in reports if rank not in last]
    rest = {tuple(number for number, *_ in _list_collectives(events)) for _, events in reports}
    if not last or not without or len(rest) > 1:
        return None
    _, _, unit, name = next(iter(last.values()))
    return _explain_left_out(step, without, (unit, name), list(last))


def _explain_left_out(
    step: int, without: Sequence[int], place: tuple[str, str], stepped: Sequence[int]
) -> str:
    unit, name = place
    return (
        f"optimizer.step() was left out on {_name(without)} before step {step}: parameter {name!r} "
        f"of unit {unit!r}, perhaps among others, was stepped on {_name(stepped)} alone, so the "
        "ranks hold parts of different weights. Load a checkpoint on every rank, and step alike on "
        "every rank: after as many backwards, for which ranks without data left call "
        "fsdp_compose.participate(model); with fsdp_compose.skippable_step(model) all discard what "
        "one cannot use."
    )


STEPS = "steps"
"""How often optimizers have stepped a parameter, among its settings.

"0" where a rank holds elements of it, and none has; nothing where it had no gradient."""
ADDED = "additions to its gradient"
"""How often a backward added to it, among the settings of a parameter; "" says nothing."""


def explain_added(
    step: int, reports: Sequence[tuple[int, Mapping[tuple[str, str], Mapping[str, str]]]]
) -> str | None:
    """Say to which gradient some ranks added where others had cleared it; None where they agree.

    A rank that reports nothing of a parameter has not added to its gradient.

    Args:
        reports: as of ``explain_settings``.
    """
    for unit, name in sorted({p for _, texts in reports for p in texts if ADDED in texts[p]}):
        ways: dict[int, list[int]] = {}
        for rank, texts in reports:
            count = texts.get((unit, name), {}).get(ADDED, "0")
            if count:
                ways.setdefault(int(count), []).append(rank)
        if len(ways) > 1:
            return (
                f"gradients were cleared on some ranks only: in step {step} that of parameter "
                f"{name!r} of unit {unit!r}, perhaps among others, was there on "
                f"{_name(ways[max(ways)])}, which added to it, and not on "
                f"{_name(ways[min(ways)])}. Clear gradients on every rank or on none. Call "
                "zero_grad() on all ranks now, and run the step again."
            )
    return None


def have_same_parameters(reports: Sequence[tuple[int, Mapping[Any, Mapping[str, str]]]]) -> bool:
    """Whether ranks that added to gradients, as they may, have stepped the same parameters."""
    adds = any(ADDED in texts for _, found in reports for texts in found.values())
    others = {ADDED, STEPS}
    stepped = [{p for p, texts in found.items() if texts.keys() - others} for _, found in reports]
    return adds and all(places == stepped[0] for places in stepped)


def explain_settings(
    step: int, reports: Sequence[tuple[int, Mapping[tuple[str, str], Mapping[str, str]]]]
) -> str | None:
    """Say which parameter ranks stepped with other settings, or how often; None where they did not.

    Args:
        reports: (rank, texts of settings by (unit, parameter) and name), by rank.
    """
    if text := _explain_counts(step, reports):
        return text
    found: dict[tuple[tuple[str, str], str], dict[str, list[int]]] = {}
    for rank, settings in reports:
        for place, texts in settings.items():
            for name, text in texts.items():
                if name in (ADDED, STEPS):
                    continue
                found.setdefault((place, name), {}).setdefault(text, []).append(rank)
    differing = [(place, name) for (place, name), ways in found.items() if len(ways) > 1]
    if not differing:
        return None
    (unit, parameter), name = differing[0]
    ways = " and ".join(
        f"{name}={text} on {_name(ranks)}" for text, ranks in found[differing[0]].items()
    )
    return (
        f"optimizer.step() before step {step} had settings that differ between ranks: parameter "
        f"{parameter!r} of unit {unit!r}, perhaps among others, was stepped with {ways}, so the "
        "ranks hold parts of weights that no optimizer makes. Set the same on every rank: give "
        "ReduceLROnPlateau, and whatever else follows a loss, the mean of the loss over the ranks; "
        "give an optimizer that sums over all parameters (Prodigy, D-Adaptation) "
        "model.parameters(), not a rank's part of them (owner_step, local_parameters, "
        "flat_parameters); clear a gradient (p.grad = None) on every rank or on none. Then load a "
        "checkpoint on every rank."
    )


def _explain_counts(
    step: int, reports: Sequence[tuple[int, Mapping[tuple[str, str], Mapping[str, str]]]]
) -> str | None:
    """Say which parameter was stepped on some ranks more often than on others."""
    counts: dict[tuple[str, str], dict[int, list[int]]] = {}
    for rank, settings in reports:
        for place, texts in settings.items():
            if texts.get(STEPS):
                counts.setdefault(place, {}).setdefault(int(texts[STEPS]), []).append(rank)
    for place, found in counts.items():
        if len(found) > 1:
            return _explain_count(step, place, found)
    return None


def _explain_count(step: int, place: tuple[str, str], found: Mapping[int, list[int]]) -> str:
    """Say on which ranks a parameter was stepped how often; ranks by that number."""
    least, most = min(found), max(found)
    if not least:
        stepped = sorted(rank for count, ranks in found.items() if count for rank in ranks)
        return _explain_left_out(step, found[0], place, stepped)
    return (
        f"optimizer.step() was called more often on {_name(found[most])} than on "
        f"{_name(found[least])} before step {step}: parameter {place[1]!r} of unit {place[0]!r}, "
        f"perhaps among others, was stepped {most} times and {least}, so the ranks hold parts of "
        "different weights. Load a checkpoint on every rank, and step as often on every rank, also "
        "where an error is caught and the step is called again."
    )


def differ_in_writes(reports: Sequence[tuple[int, list[Event]]]) -> bool:
    """Whether what the ranks did differently first is a write between steps."""
    return any(event[1] == CHANGE for event in _find_first(reports)[1])


def _find_first(reports: Sequence[tuple[int, list[Event]]]) -> tuple[int, list[Event]]:
    """Where the ranks differ first among their collectives, and what those did that did any."""
    lists = [_list_collectives(events) for _, events in reports]
    length = max(map(len, lists))
    same = (len({_number(events, i) for events in lists}) == 1 for i in range(length))
    position = next((i for i, is_same in enumerate(same) if not is_same), length)
    return position, [event for events in lists for event in events[position : position + 1]]


def _list_collectives(events: Sequence[Event]) -> list[Event]:
    """The events that are collectives; whether an optimizer had stepped is none."""
    return [event for event in events if event[1] != STEPPED]


def explain_difference(step: int, reports: Sequence[tuple[int, list[Event]]]) -> str:
    """Say what the ranks did differently first.

    Args:
        reports: (rank, its events since the ranks last agreed), by rank.
    """
    reports = [(rank, _list_collectives(events)) for rank, events in reports]
    position, differing = _find_first(reports)
    if not differing:
        return (
            f"ranks were interrupted at different moments of step {step}, as by Ctrl-C, and ran "
            "it again, so that each met what another one had begun before. No weights are lost: "
            "discard this step, and run it once more."
        )
    kinds: dict[int, tuple[str, list[int]]] = {}
    for rank, events in reports:
        text = _describe(events[position]) if position < len(events) else "end{} the step"
        kinds.setdefault(_number(events, position), (text, []))[1].append(rank)
    texts = [text for text, _ in kinds.values()]
    if len(set(texts)) < len(texts):
        texts = [f"{text} of {'one model' if not i else 'another'}" for i, text in enumerate(texts)]
    found = " where ".join(
        _name(ranks) + " " + text.replace("{}", "s" if len(ranks) == 1 else "", 1)
        for text, (_, ranks) in zip(texts, kinds.values(), strict=True)
    )
    if any(event[1] == ALONE for event in differing):
        return f"ranks do different things at the same time: {found}. {_ALONE}"
    if any(event[1] == WRITE for event in differing):
        return f"ranks write different weights in step {step}: {found}. {_WRITING}"
    if any(event[1] == CHANGE for event in differing):
        return f"ranks wrote in their own ways before step {step} ended: {found}. {_CHANGING}"
    if any(event[1] == EDIT for event in differing):
        return f"ranks leave a scope of full parameters in different ways: {found}. {_EDITING}"
    ways = {event[3] for event in differing}
    if len(ways) > 1 and {event[1:3] for event in differing} == {(REDUCE, differing[0][2])}:
        return f"ranks reduce gradients in different ways in step {step}: {found}. {_REDUCING}"
    text = (
        f"ranks run different units in step {step}: as collective {position + 1} of it, {found}. "
        "Every gather and reduction needs all ranks that share the parameters, so they must run "
        "the same units in the same order: choose the branch alike on every rank, or let ranks "
        "that skip a unit run x = fsdp_compose.participate(unit, x) in its place, and have the "
        "loss depend on what that returns. Where ranks run the model another number of times, as "
        "to generate or evaluate, run it inside `with fsdp_compose.gathered(model):`, which every "
        "rank enters. Use the model, and gather its parameters, in one thread, as two run in "
        "another order on each rank."
    )
    in_forward = all(verb == "gather" and purpose == "forward" for _, verb, _, purpose in differing)
    return text if in_forward else f"{text} {_SETTING}"


def _number(events: Sequence[Event], position: int) -> int:
    """The number of the event at ``position``; 0 where the step ended before it."""
    return events[position][0] if position < len(events) else 0


def _describe(event: Event) -> str:
    """What a rank was doing; ``{}`` is the ending of the verb."""
    _, verb, unit, purpose = event
    if verb == ALONE:
        return f"want{{}} to {purpose}"
    if verb == DISCARD:
        return f"discard{{}} a skippable step ({purpose})"
    return f"{verb}{{}} unit {unit!r} ({purpose})"


def _name(ranks: Sequence[int]) -> str:
    """Name ranks in a sentence."""
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    return f"ranks {', '.join(map(str, ranks[:-1]))} and {ranks[-1]}"
