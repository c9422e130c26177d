"""Torch's process group over the network: what ``torch.distributed`` and the engine call.

It takes the place of ``ProcessGroupGloo`` while a simulation runs, so that everything that is built
on that class (``init_process_group``, ``new_group``, device meshes) is torch's own code. The names
of the methods are torch's.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from types import SimpleNamespace
from typing import Any, TypeAlias

import torch
import torch.distributed as dist

from fsdp_compose.base.process import here
from fsdp_compose.simulation.network import Contribution, Move
from fsdp_compose.simulation.reduce import combine, copy, name_op
from fsdp_compose.simulation.store import WHERE
from fsdp_compose.simulation.work import JoinedWork, SimulatedWork

Tensors: TypeAlias = Sequence[torch.Tensor]
_HALF_AN_HOUR = timedelta(minutes=30)


_ProcessGroup: Any = dist.ProcessGroup  # its signatures differ between releases of torch


class SimulatedGroup(_ProcessGroup):
    """Ranks of a simulation that communicate."""

    def __init__(
        self,
        store: Any,
        rank: int,
        size: int,
        timeout: timedelta = _HALF_AN_HOUR,
        enable_reconfigure: bool = False,  # torch 2.15 says it; ranks of a simulation stay
    ) -> None:
        super().__init__(rank, size)
        self.network = here.simulated
        self.key = store.get(WHERE).decode()
        self.joined = self.network.join(self.key, rank)
        self.own_rank, self.own_size = rank, size
        self.calls = 0
        self.messages: dict[tuple[object, ...], int] = {}
        self.options = SimpleNamespace(
            _timeout=timeout, global_ranks_in_group=[], group_name=self.key
        )

    @property
    def _device_types(self) -> list[torch.device]:
        return [torch.device("cpu")]

    def _get_backend(self, device: torch.device) -> SimulatedGroup:
        return self

    @property
    def group_name(self) -> str:
        return str(self.options.group_name)

    def _set_group_name(self, name: str) -> None:
        self.options.group_name = name

    def getGroupName(self) -> str:  # noqa: N802
        return self.group_name

    def getBackendName(self) -> str:  # noqa: N802
        return "simulated"  # where it is "gloo", torch's C++ wants a ProcessGroupGloo

    def name(self) -> str:
        return "gloo"

    def _set_sequence_number_for_group(self) -> None:
        pass

    def _get_sequence_number_for_group(self) -> int:
        return self.calls

    def set_timeout(self, timeout: timedelta) -> None:
        self.options._timeout = timeout

    _set_default_timeout = set_timeout

    def _members(self) -> tuple[int, ...]:
        """World ranks of the group, by their rank in it."""
        if self.options.global_ranks_in_group:
            return tuple(self.options.global_ranks_in_group)
        if self.own_size == self.network.size:
            return tuple(range(self.own_size))
        # Of a group that torch does not list: those that have joined.
        return tuple(self.joined.get(r, -1) for r in range(self.own_size))

    def _call(
        self,
        kind: str,
        sent: Tensors,
        received: Tensors,
        move: Move,
        opts: Any = None,
        agreed: tuple[object, ...] = (),
    ) -> SimulatedWork:
        """Bring this rank's part to the group's next collective."""
        self.calls += 1
        key = (self.key, self.calls)
        part = Contribution((kind, *agreed), sent, received)
        exchange = self.network.post(key, self.own_rank, part, self._members(), move)
        given = getattr(opts, "timeout", None)
        seconds = given.total_seconds() if given is not None else -1.0
        if seconds <= 0:
            seconds = self.options._timeout.total_seconds()
        return SimulatedWork(
            self.network, exchange, f"take part in {kind}", seconds, list(received)
        )

    # Messages between two ranks

    def send(self, tensors: Tensors, peer: int, tag: int) -> SimulatedWork:
        return self._message(list(map(_take_arrived, tensors)), peer, tag, is_sender=True)

    def recv(self, tensors: Tensors, peer: int, tag: int) -> SimulatedWork:
        return self._message(tensors, peer, tag, is_sender=False)

    def recv_anysource(self, tensors: Tensors, tag: int) -> SimulatedWork:
        raise NotImplementedError(
            "simulate: recv without src= takes what comes first from any rank, which is not "
            "simulated; name the rank: recv(tensor, src)."
        )

    def _message(self, tensors: Tensors, peer: int, tag: int, is_sender: bool) -> SimulatedWork:
        ends = (self.own_rank, peer) if is_sender else (peer, self.own_rank)
        key = (*ends, tag)
        count = self.messages.get(key, 0)
        self.messages[key] = count + 1
        known = self._members()
        members = (known[ends[0]], known[ends[1]])
        sent, received = (tensors, ()) if is_sender else ((), tensors)
        exchange = self.network.post(
            (self.key, *key, count),
            0 if is_sender else 1,
            Contribution(("message",), sent, received),
            members,
            _move_message,
        )
        purpose = f"send to rank {members[1]}" if is_sender else f"receive from rank {members[0]}"
        seconds = self.options._timeout.total_seconds()
        return SimulatedWork(self.network, exchange, purpose, seconds, list(tensors))

    # Collectives

    def allreduce(self, tensors: Tensors, opts: Any = None) -> SimulatedWork:
        op = getattr(opts, "reduceOp", opts) or dist.ReduceOp.SUM
        what = (name_op(op), *sizes(tensors))

        def move(parts: dict[int, Contribution]) -> None:
            for index in range(len(tensors)):
                total = combine([parts[r].sent[index] for r in sorted(parts)], op)
                for part in parts.values():
                    copy(part.received[index], total)

        return self._call("all_reduce", tensors, tensors, move, opts, what)

    allreduce_coalesced = allreduce

    def reduce(self, tensors: Tensors, opts: Any = None) -> SimulatedWork:
        root, op = opts.rootRank, opts.reduceOp

        def move(parts: dict[int, Contribution]) -> None:
            total = combine([parts[r].sent[0] for r in sorted(parts)], op)
            copy(parts[root].received[0], total)

        what = (name_op(op), root, *sizes(tensors))
        return self._call("reduce", tensors, tensors, move, opts, what)

    def broadcast(self, tensors: Tensors, opts: Any = None) -> SimulatedWork:
        root = opts.rootRank

        def move(parts: dict[int, Contribution]) -> None:
            for rank, part in parts.items():
                if rank != root:
                    copy(part.received[0], parts[root].sent[0])

        return self._call("broadcast", tensors, tensors, move, opts, (root, *sizes(tensors)))

    def allgather(self, outputs: Any, inputs: Any, opts: Any = None) -> SimulatedWork:
        received = outputs[0] if isinstance(outputs[0], (list, tuple)) else outputs
        sent = inputs if isinstance(inputs, (list, tuple)) else [inputs]
        return self._call("all_gather", sent, received, _move_all_gather, opts)

    def all_gather_single(
        self, output: torch.Tensor, given: torch.Tensor, opts: Any = None
    ) -> SimulatedWork:
        parts = output.detach().view(-1).chunk(self.own_size)
        work = self._call("all_gather", [given.view(-1)], parts, _move_all_gather, opts)
        work.outputs = [output]
        return work

    def allgather_coalesced(self, outputs: Any, inputs: Any, opts: Any = None) -> SimulatedWork:
        flat = [tensor for part in outputs for tensor in part]
        return self._call("all_gather_coalesced", inputs, flat, _move_all_gather, opts)

    def all_gather_single_coalesced(
        self, outputs: Tensors, inputs: Tensors, opts: Any = None
    ) -> SimulatedWork:
        works = [self.all_gather_single(o, i, opts) for o, i in zip(outputs, inputs, strict=True)]
        return JoinedWork(works)

    def gather(self, outputs: Any, inputs: Tensors, opts: Any = None) -> SimulatedWork:
        root = opts.rootRank
        received = outputs[0] if outputs else []

        def move(parts: dict[int, Contribution]) -> None:
            for rank, into in enumerate(parts[root].received):
                copy(into, parts[rank].sent[0])

        return self._call("gather", inputs, received, move, opts, (root, *sizes(inputs)))

    def scatter(self, outputs: Tensors, inputs: Any, opts: Any = None) -> SimulatedWork:
        root = opts.rootRank
        sent = inputs[0] if inputs else []

        def move(parts: dict[int, Contribution]) -> None:
            for rank, part in parts.items():
                copy(part.received[0], parts[root].sent[rank])

        return self._call("scatter", sent, outputs, move, opts, (root, *sizes(outputs)))

    def reduce_scatter(self, outputs: Tensors, inputs: Any, opts: Any = None) -> SimulatedWork:
        sent = inputs[0] if isinstance(inputs[0], (list, tuple)) else inputs
        op = dist.ReduceOp.SUM if opts is None else opts.reduceOp

        def move(parts: dict[int, Contribution]) -> None:
            ranks = sorted(parts)
            totals = [combine([parts[r].sent[rank] for r in ranks], op) for rank in ranks]
            for rank in ranks:
                copy(parts[rank].received[0], totals[rank])

        return self._call("reduce_scatter", sent, outputs, move, opts, (name_op(op), *sizes(sent)))

    def reduce_scatter_single(
        self, output: torch.Tensor, given: torch.Tensor, opts: Any = None
    ) -> SimulatedWork:
        parts = given.detach().view(-1).chunk(self.own_size)
        return self.reduce_scatter([output], [list(parts)], opts)

    def reduce_scatter_single_coalesced(
        self, outputs: Tensors, inputs: Tensors, opts: Any = None
    ) -> SimulatedWork:
        pairs = zip(outputs, inputs, strict=True)
        return JoinedWork([self.reduce_scatter_single(o, i, opts) for o, i in pairs])

    def _exchange_pieces(
        self, outputs: Tensors, inputs: Tensors, opts: Any = None
    ) -> SimulatedWork:
        def move(parts: dict[int, Contribution]) -> None:
            for rank, part in parts.items():
                for source, into in enumerate(part.received):
                    copy(into, parts[source].sent[rank])

        return self._call("all_to_all", inputs, outputs, move, opts)

    alltoall = _exchange_pieces

    def all_to_all_single(
        self,
        output: torch.Tensor,
        given: torch.Tensor,
        output_sizes: list[int],
        input_sizes: list[int],
        opts: Any = None,
    ) -> SimulatedWork:
        into, source, size = output.detach(), given.detach(), self.own_size
        received = into.split(output_sizes) if output_sizes else into.chunk(size)
        sent = source.split(input_sizes) if input_sizes else source.chunk(size)
        work = self._exchange_pieces(received, sent, opts)
        work.outputs = [output]
        return work

    def barrier(self, opts: Any = None) -> SimulatedWork:
        return self._call("barrier", (), (), lambda parts: None, opts)

    def monitored_barrier(
        self, timeout: timedelta | None = None, wait_all_ranks: bool = False
    ) -> None:
        self.barrier().wait(timeout)

    # The same under the names of other releases of torch.
    _allgather_base = allgather_into_tensor = all_gather_single
    allgather_into_tensor_coalesced = all_gather_single_coalesced
    _reduce_scatter_base = reduce_scatter_tensor = reduce_scatter_single
    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced
    alltoall_base = all_to_all_single


def sizes(tensors: Tensors) -> tuple[object, ...]:
    """What all ranks of a collective must agree on, as words."""
    return tuple(f"{tensor.numel()} x {tensor.dtype}" for tensor in tensors)


def _take_arrived(tensor: torch.Tensor) -> torch.Tensor:
    """What is sent: of a tensor that waits for a collective of torch's, the result.

    Such a tensor (DTensor's ``to_local()`` may be one) has no memory of its own.
    """
    waits = type(tensor).__torch_dispatch__ is not torch.Tensor.__torch_dispatch__
    return tensor.detach().clone() if waits else tensor


def _move_message(parts: dict[int, Contribution]) -> None:
    for source, into in zip(parts[0].sent, parts[1].received, strict=True):
        copy(into, source)


def _move_all_gather(parts: dict[int, Contribution]) -> None:
    for part in parts.values():
        for index, into in enumerate(part.received):  # rank by rank all that it sent
            rank, number = divmod(index, len(part.sent))
            copy(into, parts[rank].sent[number])
