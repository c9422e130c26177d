"""A state written as torch.distributed.checkpoint plans it, with messages of our own.

Its own messages need NumPy, wait half an hour whatever the group's timeout, and make an error of
Ctrl-C.
"""

from __future__ import annotations

from typing import Any

from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import SavePlan
from torch.distributed.checkpoint.storage import WriteResult

from fsdp_compose.base.mesh import Group
from fsdp_compose.checkpoint.consensus import Shared, several
from fsdp_compose.checkpoint.files import CommittingWriter
from fsdp_compose.comm.messages import through_first


def write_checkpoint(state: dict[str, Any], writer: CommittingWriter, group: Group) -> None:
    """Writes what this rank has of ``state``; the first rank plans who writes what, and commits.

    Raises:
        RuntimeError: on every rank, when it failed on any; nothing was committed.
    """
    planner, first = DefaultSavePlanner(), group.rank == 0
    planned: list[Metadata] = []

    def plan(plans: list[SavePlan]) -> list[SavePlan]:
        plans, metadata = planner.create_global_plan(plans)
        planned.append(metadata)
        return writer.prepare_global_plan(plans)

    def finish(results: list[list[WriteResult]]) -> list[None]:
        writer.finish(planned[0], results)
        return [None] * len(results)

    try:
        with Shared(several(group)):
            planner.set_up_planner(state, writer.storage_meta(), first)
            writer.set_up_storage_writer(first)
            local = writer.prepare_local_plan(planner.create_local_plan())
        mine = through_first(local, plan, group)
        with Shared(several(group)):
            results = writer.write_data(planner.finish_plan(mine), planner).wait()
        through_first(results, finish, group)
    except Exception as error:
        writer.discard()
        raise RuntimeError(
            f"save_checkpoint: {writer.root} was not saved; what it held before is untouched: "
            f"{type(error).__name__}: {error}"
        ) from error
    except BaseException:
        writer.discard()
        raise
