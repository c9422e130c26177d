"""Ranks meet before they save or load: one that never comes is named, and no other hangs.

``attend_meeting`` is the scope of a call that all ranks have begun: when one leaves with an error,
those that still wait in it raise that error instead of waiting until a timeout.
"""

from __future__ import annotations

import contextlib
import os
import uuid
import weakref
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from fsdp_compose.base import process
from fsdp_compose.base.arguments import check_module, check_path, check_process_group, check_timeout
from fsdp_compose.base.environment import connects_late
from fsdp_compose.base.group import SELF, Group, get_global_rank, is_alive
from fsdp_compose.base.launched import require_group
from fsdp_compose.base.torch_private import default_store, gloo_group, timeout_of
from fsdp_compose.buckets.entries import find_entry
from fsdp_compose.comm import messages, waiting
from fsdp_compose.comm.heads import meet_to_call
from fsdp_compose.comm.messages import SharedErrors, gather_in_turn, gather_objects
from fsdp_compose.construct.names import parameters_by_name
from fsdp_compose.core.guards.divisors import held_by_fewer
from fsdp_compose.core.guards.scope_parameters import leaf_of
from fsdp_compose.core.guards.surroundings import check_surroundings
from fsdp_compose.core.guards.units import units_holding
from fsdp_compose.core.state import owner_of
from fsdp_compose.sharded import is_sharded


def describe_call(what: str, **given: object) -> str:
    """What this rank passed to a call, as text that ranks compare."""
    return f"{what}({', '.join(f'{name}={value}' for name, value in given.items())})"


def groups_of(module: nn.Module) -> list[Group]:
    """The groups of more than one rank over which ``module``'s parameters are cut or copied.

    Those that tensor parallelism split them over come last.
    """
    found: dict[tuple[int, ...], Group] = {}
    buckets = [bucket for unit in units_holding(module) for bucket in unit.gathered]
    for bucket in buckets:
        for group in bucket.mesh.groups:
            found.setdefault(group.ranks, group)
    for bucket in buckets:
        for entry in bucket.entries:
            for group in () if entry.spec.parallel is None else entry.spec.parallel.groups:
                found.setdefault(group.ranks, group)
    return list(found.values())


def meet_in(what: str, module: nn.Module) -> list[Group]:
    """Return ``groups_of`` the module; on gloo raise unless every rank of them begins the call."""
    groups = groups_of(module)
    meet_to_call(what, groups)
    return groups


def device_of(module: nn.Module) -> torch.device:
    """Where ``module``'s sharded parameters are communicated."""
    return next((unit.engine.streams.device for unit in units_holding(module)), torch.device("cpu"))


_control: weakref.WeakKeyDictionary[dist.ProcessGroup, dict[tuple[int, ...], Any]] = (
    weakref.WeakKeyDictionary()
)
"""By the default group, which ends with its process group: gloo over some ranks, for messages."""
_GIVEN_UP = -1  # in front of its ranks: a group over which nothing more is sent
_meetings: weakref.WeakKeyDictionary[dist.ProcessGroup, dict[str, int]] = (
    weakref.WeakKeyDictionary()
)


def meet_ranks(
    what: str,
    module: nn.Module,
    process_group: dist.ProcessGroup | None,
    timeout: float | None,
) -> Group:
    """Wait for all ranks that hold ``module``, and give a gloo group of its own over them.

    Its messages wait for as long as the ranks' own group does. A save that is under way in a thread
    is waited for: it talks over the same group.

    Args:
        what: the function they were to call.
        process_group: those ranks; None: the group the module is cut over, or all ranks when it is
            cut over several or none.
        timeout: seconds; None for that of the process group.

    Raises:
        RuntimeError: some did not come in ``timeout`` seconds; names them. This rank may try again.
            One cannot open as many files as it takes. Or their process group has ended.
    """
    _finish_saves()
    _require_living(what, module, process_group)
    if not dist.is_initialized():
        if what.startswith("save") and not units_holding(module):
            require_group(what)  # the ranks would write over each other's files
        return SELF
    if dist.get_backend() == "fake":
        return SELF
    groups = groups_of(module)
    pg = process_group
    if pg is None:
        pg = groups[0].pg if len(groups) == 1 else dist.group.WORLD
    assert pg is not None
    ranks = tuple(dist.get_process_group_ranks(pg))
    if len(ranks) == 1:
        return SELF
    patience = timeout_of(pg)
    me = ranks.index(dist.get_rank())
    known = _control.setdefault(_world(), {})
    seconds = patience if timeout is None else timeout
    told = groups if seconds <= patience else ()  # whose own waits end when their patience does
    told = [group for group in told if set(group.ranks) <= set(ranks)]
    key, is_new = _meet(what, ranks, told, seconds, ranks in known)
    if is_new:
        known.pop(ranks, None)
        known[ranks] = gloo_group(key, me, len(ranks), patience)
    group = Group(known[ranks], me, len(ranks), "gloo", ranks, what, f"{key}/left")
    if is_new:  # a rank that leaves with an error would end it for those that still connect
        with attend_meeting(group):
            gather_objects(None, group)
    return group


@contextlib.contextmanager
def begin_checkpoint_call(
    what: str,
    path: object,
    module: nn.Module,
    process_group: dist.ProcessGroup | None,
    timeout: float | None,
) -> Iterator[Group]:
    """Scope of a call that saves or loads: checks what all of these take, and meets the ranks.

    Raises:
        TypeError, ValueError: an argument is of no use.
        RuntimeError: as ``meet_ranks``.
    """
    check_module(what, module)
    check_path(what, path)
    check_process_group(what, process_group)
    check_timeout(what, timeout)
    group = meet_ranks(what, module, process_group, timeout)
    with attend_meeting(group):
        yield group


def _finish_saves() -> None:
    """Wait for saves under way; whoever holds their handles gets their errors."""
    saves = process.here.saves
    while saves:
        saves[0].wait()  # if that is interrupted, the next call waits
        del saves[0]


def _require_living(what: str, module: nn.Module, process_group: dist.ProcessGroup | None) -> None:
    """Raise where the ranks could not find each other, and each would save its slices alone."""
    ended = [group for group in groups_of(module) if not is_alive(group.pg)]
    if not ended and (process_group is None or is_alive(process_group)):
        return
    whose = "passed as process_group"
    if ended:
        held = f"that the parameters of {type(module).__name__} are cut or copied over"
        whose = f"over ranks {list(ended[0].ranks)} {held}"
    raise RuntimeError(
        f"{what}: the process group {whose} was destroyed, so that its ranks cannot agree on one "
        f"checkpoint. Call {what} before torch.distributed.destroy_process_group(); under a new "
        "process group, call fully_shard on a model after init_process_group()."
    )


def _world() -> dist.ProcessGroup:
    world = dist.group.WORLD
    assert world is not None
    return world


@contextlib.contextmanager
def attend_meeting(group: Group) -> Iterator[None]:
    """Scope of a call that ``meet_ranks`` began: if one rank leaves early, the others raise why."""
    try:
        with messages.attend_call(group):
            yield
    except BaseException as error:
        if group.size > 1 and not messages.is_on_all_ranks(error):
            known = _control.get(_world(), {})
            if group.ranks in known:  # it stays open: others may not have read yet what went wrong
                given_up = (_GIVEN_UP, *group.ranks)
                known[given_up] = known.pop(group.ranks)
        raise


def _meet(
    what: str, ranks: tuple[int, ...], groups: Sequence[Group], timeout: float, has_group: bool
) -> tuple[str, bool]:
    """Wait for the other ranks; a name for the meeting, and whether some rank has no group yet.

    Args:
        groups: over which ranks that do something else are told, and raise with this one.
    """
    store, me = default_store(), dist.get_rank()
    turns = _meetings.setdefault(_world(), {})
    place = f"fsdp_compose/{what}/{'.'.join(map(str, ranks))}"
    turn = turns.get(place, 0)
    here = f"{place}/{turn}"
    store.set(f"{here}/{me}", "here")
    if not has_group:
        store.set(f"{here}/new", "new")
        if shortage := find_shortage(len(ranks)):
            store.set(f"{here}/short", f"rank {me} {shortage}")
    if store.add(f"{here}/count", 1) == len(ranks):
        store.set(f"{here}/go", uuid.uuid4().hex)
    try:
        has_come = _meet_in_time(what, groups, timeout)
        with waiting.waiting(f"{what} (every rank must call it)", ranks):
            has_come = has_come and _await_key(f"{here}/go", timeout)
    except BaseException:
        _withdraw(here)
        raise
    if not has_come:
        missing = [r for r in ranks if not store.check([f"{here}/{r}"])]
        _withdraw(here)
        raise RuntimeError(
            f"{what}: rank {me} waited {timeout:g} s for rank {', '.join(map(str, missing))}, "
            f"which did not call it. Every rank must call {what}, not rank 0 alone."
        )
    turns[place] = turn + 1
    is_new = store.check([f"{here}/new"])
    short = store.get(f"{here}/short").decode() if store.check([f"{here}/short"]) else ""
    meeting = f"{here}/{store.get(f'{here}/go').decode()}"
    if store.add(f"{here}/gone", 1) == len(ranks):
        for key in (*ranks, "new", "short", "count", "go", "gone"):
            store.delete_key(f"{here}/{key}")
    if short:
        raise RuntimeError(
            f"{what}: {short}, which connections to the other ranks take. Close files, or start "
            f"the job with a higher limit (ulimit -n), and call {what} on every rank again."
        )
    return meeting, is_new


def find_shortage(ranks: int) -> str | None:
    """What is in the way of a gloo group over so many ranks: one that lacks a file makes all wait.

    Gloo opens one for each other rank it connects to and six for itself.
    """
    needed = 8 if connects_late() else ranks + 8
    opened: list[int] = []
    try:
        for _ in range(needed):
            opened.append(os.open(os.devnull, os.O_RDONLY))
    except OSError as error:
        return f"cannot open {needed} more files ({error.strerror})"
    finally:
        for file in opened:
            os.close(file)
    return None


def _meet_in_time(what: str, groups: Sequence[Group], timeout: float) -> bool:
    """Raise on gloo unless every rank of ``groups`` begins the call; False if some come too late.

    Those that come back to the call, having come too late, still meet.
    """
    clock = process.here.clock
    end = clock.now() + timeout

    def look() -> None:
        if clock.now() >= end:
            raise TimeoutError

    try:
        with messages.looking(look):
            meet_to_call(what, groups)
    except (RuntimeError, TimeoutError):  # the group's own wait may end in the same moment
        if clock.now() < end:
            raise
        return False
    return True


def _withdraw(here: str) -> None:
    default_store().add(f"{here}/count", -1)
    default_store().delete_key(f"{here}/{dist.get_rank()}")


def _await_key(key: str, timeout: float) -> bool:
    """Wait for a key in short naps, because the store's own wait does not hear Ctrl-C.

    Raises:
        RuntimeError: the store is gone.
    """
    store, clock = default_store(), process.here.clock
    end, nap = clock.now() + timeout, 0.001
    try:
        while not store.check([key]):
            if clock.now() > end:
                return False
            clock.sleep(nap)
            nap = min(2 * nap, 0.2)
    except RuntimeError as error:
        raise RuntimeError(
            "the store of the process group does not answer: the rank that keeps it, usually rank "
            f"0, has died. Look at what it printed. The store says: {error}"
        ) from error
    return True


def claim_folder(what: str, path: Path, group: Group) -> None:
    """Raise where other ranks of this job, none of them in ``group``, have saved to ``path``.

    Raises:
        RuntimeError: on every rank of ``group``.
    """
    if not dist.is_initialized() or dist.get_backend() == "fake":
        return
    with SharedErrors(group):
        if group.rank:
            return
        store = default_store()
        ranks = list(group.ranks) if group.size > 1 else [dist.get_rank()]
        mine = ".".join(map(str, ranks))
        try:
            place = f"fsdp_compose/saved/{path.resolve()}"
        except (OSError, RuntimeError) as error:  # a loop is the latter before Python 3.13
            raise RuntimeError(
                f"{what}: {path} was not saved: {error}. Save to a path whose links end somewhere."
            ) from error
        found = store.compare_set(place, "", mine).decode()
        if set(found.split(".")).isdisjoint(mine.split(".")):
            raise RuntimeError(
                f"{what}: ranks {found.replace('.', ', ')} have saved to {path} in this job, and "
                f"ranks {mine.replace('.', ', ')} would overwrite it. If they hold stages of one "
                "pipeline, save all of them in one call: on every rank, pass "
                "process_group=torch.distributed.group.WORLD. Else save to another folder."
            )
        store.set(place, mine)


def refuse_left_out(what: str, module: nn.Module, rank0_only: bool, compares: bool = False) -> None:
    """Raise where what rank 0 holds is not the whole model: other ranks have experts of their own.

    Args:
        what: the function that was to give the whole on rank 0 alone.
        compares: every rank calls it: they compare the names of what is not sharded.

    Raises:
        RuntimeError: naming a parameter that fewer ranks hold than others.
    """
    if not rank0_only:
        return
    for entry in held_by_fewer(entry for unit in units_holding(module) for entry in unit.entries):
        raise RuntimeError(
            f"{what}: rank0_only=True gives what rank 0 holds, and {entry.spec.fqn!r} (unit "
            f"{entry.spec.unit!r}) is cut over {owner_of(entry).mesh.size} ranks, fewer than "
            "others are: experts of other ranks would be left out. save_checkpoint saves them "
            "all, and without rank0_only each rank gets its own; experts that are DTensors over "
            "those ranks, or declared with declare_tensor_parallel, before fully_shard are parts "
            "of one parameter. If the other ranks hold the same values, say so with "
            f"set_gradient_divide_factor(module, {owner_of(entry).mesh.size})."
        )
    if not compares:
        return
    params = parameters_by_name(module).items()
    own = [name for name, param in params if not is_sharded(leaf_of(param))]
    reports = sorted(gather_in_turn((get_global_rank(), own), meet_in(what, module), what))
    for rank, names in reports:
        for name in sorted({*names}.difference(reports[0][1])):
            raise RuntimeError(
                f"{what}: rank0_only=True gives what rank {reports[0][0]} holds, and {name!r}, "
                f"which is not sharded (ignored=), is on rank {rank} and not there: experts of "
                "other ranks would be left out. save_checkpoint saves them all, and without "
                "rank0_only each rank gets its own."
            )


def refuse_broadcast(what: str, module: nn.Module, groups: Sequence[Group]) -> None:
    """Raise, on every rank, where rank 0's value of a name would replace another parameter's.

    Args:
        what: the function that was told to load what rank 0 has.

    Raises:
        RuntimeError: naming a parameter that other ranks hold another one under the name of.
    """
    for name, known in _find_holders(module, groups, what).items():
        if len(known) > 1:
            one, other = (str(sorted(ranks)) for ranks in known[:2])
            raise RuntimeError(
                f"{what}: {name!r} is one parameter on ranks {one} and another on ranks {other}, "
                "such as experts, and rank 0 has the values of one of them. Let every rank load "
                "its own, without broadcast_from_rank0, or use load_checkpoint; if they hold the "
                f"same values, say so with set_gradient_divide_factor(module, {len(known[0])})."
            )


def check_names(what: str, module: nn.Module, group: Group, everywhere: bool) -> None:
    """Raise, on every rank, where ranks that hold other parameters call them by the same name.

    Experts on a mesh of their own do, unless something says that they are parts of one parameter.

    Args:
        what: the function that saves.
        everywhere: each rank must have every parameter.

    Raises:
        RuntimeError: naming the parameter.
    """
    check_surroundings(module, what)
    for name, known in _find_holders(module, [group]).items():
        if everywhere or len(known) > 1:
            one, *others = [str(sorted(ranks)) for ranks in known]
            another = f", and another by ranks {others[0]}" if others else ""
            raise RuntimeError(
                f"{what}: {name!r} is held by ranks {one} alone{another}. If other ranks hold "
                "other experts under that name, make the experts DTensors over those ranks before "
                "fully_shard, or call declare_tensor_parallel; save_checkpoint also takes experts "
                "whose names differ, such as their numbers in a ModuleDict. If the other ranks "
                "hold the same values, say so with "
                f"set_gradient_divide_factor(module, {len(known[0])})."
            )


def _find_holders(
    module: nn.Module, groups: Sequence[Group], what: str = ""
) -> dict[str, list[set[int]]]:
    """The ranks of parameters that fewer hold than others, by name; sets apart hold others.

    Args:
        what: as for ``gather_objects``.
    """
    leaves = {name: leaf_of(param) for name, param in parameters_by_name(module).items()}
    entries = {name: find_entry(leaf) for name, leaf in leaves.items() if is_sharded(leaf)}
    homes: dict[str, set[int]] = {}
    fewer = set(held_by_fewer(entries.values()))
    for name, entry in entries.items():
        if entry in fewer:
            own = owner_of(entry).mesh.groups
            homes[name] = {dist.get_rank(), *(rank for one in own for rank in one.ranks)}
    holders: dict[str, list[set[int]]] = {}
    for found in gather_in_turn(homes, groups, what):
        for name, home in found.items():
            known = holders.get(name, [])
            apart = [ranks for ranks in known if ranks.isdisjoint(home)]
            holders[name] = [*apart, home.union(*(r for r in known if not r.isdisjoint(home)))]
    return holders
