"""What a plan points out: ties, dtypes, frozen parameters, late gradients, what is left out."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence

from fsdp_compose.base.wording import quote_names
from fsdp_compose.report.buckets import PlannedBucket
from fsdp_compose.report.static_buffers import find_static_buffers
from fsdp_compose.report.survey import Survey
from fsdp_compose.report.text import count, dtype_name, plural, size
from fsdp_compose.sharded import part_of

MUCH_PADDING = 0.01
LARGE_UNIT = 0.5


def notes_on(survey: Survey) -> tuple[str, ...]:
    """One sentence or two for each thing worth knowing, most consequential first."""
    return (
        *_note_left_out(survey),
        *_note_largest(survey),
        *_note_far_apart(survey),
        *_note_meshes(survey),
        *_note_hooks(survey),
        *_note_split(survey),
        *_note_ties(survey),
        *_note_dtypes(survey),
        *_note_frozen(survey),
        *_note_owners(survey),
        *_note_static_buffers(survey),
        *_note_padding(survey),
    )


def odd_notes_on(survey: Survey) -> tuple[str, ...]:
    """What is worth a second look; nothing of a module that is sharded as most are."""
    return (
        *_note_left_out(survey),
        *(note for note in _note_largest(survey) if ";" in note),
        *_note_far_apart(survey),
        *_note_frozen(survey),
        *_note_static_buffers(survey),
        *_note_padding(survey),
    )


def _note_left_out(survey: Survey) -> Iterator[str]:
    trained = [name for name, p in survey.outside.items() if p.requires_grad]
    frozen = [name for name, p in survey.outside.items() if not p.requires_grad]
    for kind, names, consequence in (
        ("trained", trained, "whole on every rank, their gradients are not averaged over ranks: do "
         "that yourself, or do not ignore them and shard the module that contains them"),
        ("frozen", frozen, "whole on every rank"),
    ):  # fmt: skip
        if names:
            held = [survey.outside[name] for name in names]
            nbytes = sum(part_of(p).numel() * p.dtype.itemsize for p in held)
            yield (
                f"in no unit, ignored or left out: {plural(len(names), f'{kind} parameter')} "
                f"({size(nbytes)}): {quote_names(names)}; {consequence}."
            )


def _note_static_buffers(survey: Survey) -> Iterator[str]:
    """Note which units are gathered at fixed addresses, and which have a buffer to themselves."""
    found = find_static_buffers(survey)
    if found.place:
        alone = f", {quote_names(found.alone)} alone in one" if found.alone else ""
        yield (
            f"static buffers: {plural(len(found.place), 'unit')} in "
            f"{plural(len(found.gather_nbytes), 'gather buffer')}{alone}; "
            f"{plural(len(found.grad_nbytes), 'gradient buffer')}; {size(found.nbytes)} in all, "
            "which are kept."
        )


def _note_split(survey: Survey) -> Iterator[str]:
    """Note what tensor parallelism split before it was sharded."""
    if survey.split:
        ranks = " or ".join(str(n) for n in sorted(set(survey.split.values())))
        yield (
            f"tensor parallelism splits {plural(len(survey.split), 'parameter')} over {ranks} "
            f"ranks: {quote_names(survey.split)}; what is counted is this rank's part of them."
        )


def _note_hooks(survey: Survey) -> Iterator[str]:
    """Note reductions that are left to functions of the user's."""
    if survey.hooked:
        yield (
            f"a communication hook reduces gradients of {_units(survey.hooked)}: what it sends is "
            "not known, and counted as without it."
        )


def _note_meshes(survey: Survey) -> Iterator[str]:
    """Note gradients that are averaged over fewer ranks than others."""
    found: dict[int, list[str]] = {}
    for bucket in survey.buckets:
        if bucket.trained_numel:
            found.setdefault(bucket.ranks * bucket.replicas, []).append(bucket.unit)
    most = max(found, default=0)
    for ranks, names in sorted(found.items(), reverse=True):
        if ranks < most:
            yield (
                f"{_units(list(dict.fromkeys(names)))} over {ranks} of {most} ranks: say with "
                f"set_gradient_divide_factor what gradients are divided by there ({most} for "
                f"experts, which have the tokens of all of them, {ranks} where the other ranks "
                "repeat the same data), or backward raises."
            )


def _note_largest(survey: Survey) -> Iterator[str]:
    sizes = [sum(b.full_bytes for b in survey.buckets_of(record)) for record in survey.records]
    if not any(sizes):
        return
    largest = max(range(len(sizes)), key=lambda i: sizes[i])
    name, share = survey.records[largest].name, sizes[largest] / sum(sizes)
    text = f"largest unit: {name!r}, {size(sizes[largest])} gathered, {share:.0%} of all units"
    if share > LARGE_UNIT and len(survey.records) == 1:
        text += "; the whole model is gathered at once: name units inside it, as with units="
        text += "wrap.by_class({Block})"
    elif share > LARGE_UNIT:
        text += "; split it, since what is gathered at once is set by the largest"
    yield f"{text}."


def find_used_far_apart(survey: Survey) -> Iterator[tuple[str, list[str], dict[str, int]]]:
    """Find units whose parameters are used on both sides of a unit inside them.

    Yields (unit, names used before, bytes of full gradients by name used after).
    """
    entered = 0  # how often units were
    own: dict[int, int] = defaultdict(int)  # how often each was
    first: dict[int, int] = {}  # how often others had been, when it used its first parameter
    before: dict[int, list[str]] = defaultdict(list)
    after: dict[int, dict[str, int]] = defaultdict(dict)
    for event in survey.events:
        key = id(event.record)
        if event.enters:
            entered += 1
            own[key] += 1
        if event.use is not None and event.use.grad_bytes:
            others = entered - own[key]
            if others == first.setdefault(key, others):
                before[key].append(event.use.name)
            else:
                after[key][event.use.name] = event.use.grad_bytes
    for record in survey.records:
        if after[id(record)]:
            yield record.name, before[id(record)], after[id(record)]


def _note_far_apart(survey: Survey) -> Iterator[str]:
    for unit, before, uses in find_used_far_apart(survey):
        after = {name: nbytes for name, nbytes in uses.items() if name not in before}
        if not after:  # a tied weight, whose gradients are added up where both have arrived
            continue
        yield (
            f"unit {unit!r} holds parameters used far apart: gradients of {quote_names(after)} "
            f"({size(sum(after.values()))}) are made at the start of backward and kept to its end, "
            f"when those of {quote_names(before)} arrive. Make either a unit of its own to reduce "
            "them at once."
        )


def _note_ties(survey: Survey) -> Iterator[str]:
    for record in survey.records:
        for names in record.ties:
            yield (
                f"tied inside unit {record.name!r}: {' = '.join(map(repr, names))}, stored and "
                "reduced once."
            )
        for loan in record.loans:
            yield (
                f"tied across units: {loan.name!r} of unit {record.name!r} is {loan.lent_as!r} of "
                f"unit {loan.lender!r}, whose bucket is gathered for both; its gradients are added "
                "up and reduced once, when both have arrived."
            )


def _note_dtypes(survey: Survey) -> Iterator[str]:
    found: dict[str, list[str]] = {}
    for record in survey.records:
        kinds: dict[str, list[PlannedBucket]] = {}
        for bucket in survey.buckets_of(record):
            kinds.setdefault(_kind(bucket), []).append(bucket)
        if len(kinds) > 1:
            split = " and ".join(
                f"{kind} ({plural(sum(len(b.parameters) for b in buckets), 'parameter')})"
                for kind, buckets in kinds.items()
            )
            found.setdefault(split, []).append(record.name)
    for split, names in found.items():
        yield f"mixed dtypes, a bucket for each: {split}, in {_units(names)}."


def _kind(bucket: PlannedBucket) -> str:
    names = list(map(dtype_name, (bucket.storage, bucket.compute, bucket.reduce)))
    if len(set(names)) == 1:
        return names[0]
    return f"{names[0]} computing in {names[1]}, reduced in {names[2]}"


def _note_frozen(survey: Survey) -> Iterator[str]:
    mixed: dict[tuple[int, int, bool], list[str]] = {}
    for record in survey.records:
        own = survey.buckets_of(record)
        frozen = [b for b in own if b.trained_numel < b.numel]
        if frozen and any(b.trained_numel for b in own):
            numel = sum(b.numel - b.trained_numel for b in frozen)
            apart = [b for b in frozen if not b.trained_numel]
            nbytes = sum(b.full_bytes for b in apart)
            mixed.setdefault((numel, nbytes, bool(apart)), []).append(record.name)
    for (numel, nbytes, is_apart), names in mixed.items():
        gathered = f"are gathered with the trained ones, {size(nbytes)} more at once, and "
        extra = (
            f"their buckets {gathered if nbytes else ''}make no gradient, reduction or optimizer "
            "state"
            if is_apart
            else "gradient shards and reductions are as large as if they were trained"
        )
        yield (
            f"frozen and trained parameters mixed in {_units(names)}: {count(numel)} frozen "
            f"elements{' each' if len(names) > 1 else ''}; {extra}."
        )


def _units(names: Sequence[str]) -> str:
    return f"unit {names[0]!r}" if len(names) == 1 else f"{len(names)} units ({quote_names(names)})"


def work_of(buckets: Sequence[PlannedBucket]) -> tuple[int, ...]:
    """Sum the work on tensors that are never cut, by rank; empty where there are none."""
    found = [bucket for bucket in buckets if bucket.owned]
    loads = [0] * max((bucket.ranks for bucket in found), default=0)
    for bucket in found:
        for rank, work in bucket.owned:
            loads[rank] += work
    return tuple(loads)


def _note_owners(survey: Survey) -> Iterator[str]:
    work = work_of(survey.buckets)
    if not work:
        return
    number = sum(len(bucket.owned) for bucket in survey.buckets)
    busiest = max(range(len(work)), key=work.__getitem__)
    yield (
        f"{plural(number, 'whole tensor')} over {plural(len(work), 'rank')}: the busiest, rank "
        f"{busiest}, has {work[busiest] * len(work) / sum(work):.2f} times the mean work of an "
        "optimizer of matrices (m n min(m, n) each); idle "
        f"{plural(sum(not load for load in work), 'rank')}."
    )


def _note_padding(survey: Survey) -> Iterator[str]:
    wasteful: list[str] = []
    nbytes = worst = 0.0
    for record in survey.records:
        own = survey.buckets_of(record)
        part = sum(b.padding for b in own) / max(1, sum(b.numel for b in own))
        if part > MUCH_PADDING:
            wasteful.append(record.name)
            nbytes += sum(b.padding_bytes for b in own)
            worst = max(worst, part)
    if wasteful:
        yield (
            f"padding is up to {worst:.1%} in {_units(wasteful)}, {size(int(nbytes))} over all "
            "ranks; larger units, or a finer granularity, waste less."
        )
