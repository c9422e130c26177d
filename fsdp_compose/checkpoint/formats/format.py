"""What a file format is to ``save_full`` and ``load_full``: a suffix and three plain functions."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

import torch
from torch import Tensor

from fsdp_compose.base.arguments import check_function, check_kind
from fsdp_compose.checkpoint.values import Outline

Outlines: TypeAlias = Mapping[str, Outline]
Put: TypeAlias = Callable[[str, Tensor], None]


@dataclass(frozen=True)
class Stored:
    """A tensor in a file, which is not read yet.

    Attributes:
        dtype, shape: what the tensor is.
        read: ``read(first, last)`` gives elements ``[first, last)`` of the flattened tensor, as a
            1-D tensor on the CPU.
        start: the byte of the file at which the elements lie in a row, as they do in memory; None
            where they do not.

    Example:
        >>> numbers = torch.arange(6.0)
        >>> Stored(torch.float32, (2, 3), lambda first, last: numbers[first:last]).read_all()
        tensor([[0., 1., 2.],
                [3., 4., 5.]])
    """

    dtype: torch.dtype
    shape: tuple[int, ...]
    read: Callable[[int, int], Tensor]
    start: int | None = None

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        return self.numel * self.dtype.itemsize

    def read_all(self) -> Tensor:
        return self.read_part(0, self.numel).view(self.shape)

    def read_part(self, first: int, last: int) -> Tensor:
        """What ``read`` gives, which may be of a format of the user's own.

        Raises:
            RuntimeError: it is not that many elements of the dtype.
        """
        found: object = self.read(first, last)
        wanted = f"a Tensor of {self.dtype}, of shape {(last - first,)}"
        what = type(found).__name__
        if isinstance(found, Tensor):
            what = f"a Tensor of {found.dtype}, of shape {tuple(found.shape)}"
            if what == wanted:
                return found
        raise RuntimeError(f"Stored.read({first}, {last}) gave {what}; wanted {wanted}.")


def accept_any(name: str, outline: Outline) -> None:
    """The check of a format that holds every tensor."""


@dataclass(frozen=True)
class Format:
    """How full tensors are laid out in files.

    Attributes:
        suffix: what the names of the files end in, such as ``".safetensors"``.
        write: ``with write(path, outlines) as put:`` makes one file. ``outlines`` tells the dtype
            and shape of each tensor to come, by name; ``put(name, tensor)`` is then called once
            for each, in any order, with a contiguous tensor on the CPU.
        read: ``read(path)`` says what a file holds, by name, and raises RuntimeError where it is
            damaged. Each rank then reads its slices alone.
        check: raises ValueError for a tensor that such a file cannot hold.

    Example:
        >>> from contextlib import contextmanager
        >>> @contextmanager
        ... def write(path, outlines):
        ...     tensors = {}
        ...     yield tensors.__setitem__
        ...     torch.save(tensors, path)
        >>> def read(path):
        ...     found = torch.load(path, mmap=True).items()
        ...     return {n: Stored(t.dtype, t.shape, lambda *run, t=t: t.flatten()[slice(*run)])
        ...             for n, t in found}
        >>> save_full("whole", nn.Linear(2, 2), format=Format(".pt", write, read))
        >>> load_full("whole", nn.Linear(2, 2), format=Format(".pt", write, read))
        <All keys matched successfully>
    """

    suffix: str
    write: Callable[[Path, Outlines], AbstractContextManager[Put]]
    read: Callable[[Path], Mapping[str, Stored]]
    check: Callable[[str, Outline], None] = accept_any

    def __post_init__(self) -> None:
        check_kind("Format", "suffix", self.suffix, str, "what names of files end in: '.pt'")
        takes = {"write": "(path, outlines)", "read": "(path)", "check": "(name, outline)"}
        for name, arguments in takes.items():
            function = getattr(self, name)
            if not isinstance(function, type):  # a class may be what opens a file
                check_function("Format", name, function, arguments)

    @property
    def single(self) -> str:
        """The name of a file that is the whole model."""
        return f"model{self.suffix}"

    @property
    def index(self) -> str:
        """The name of the file that names and sums the others."""
        return f"{self.single}.index.json"


@dataclass(frozen=True)
class PlannedFile:
    """A file to write: its name, and the tensors that go into it."""

    name: str
    tensors: Outlines

    @property
    def data_bytes(self) -> int:
        return sum(outline.nbytes for outline in self.tensors.values())


def plan_files(
    parts: Iterable[Outlines], max_bytes: int, file_format: Format
) -> list[list[PlannedFile]]:
    """Cut each part of a model into files of at most ``max_bytes`` of data, or of one tensor.

    Parts share no file. The names are those that Hugging Face gives.

    Raises:
        ValueError: a tensor that the format cannot hold.
    """
    cut = [_cut(tensors, max_bytes, file_format) for tensors in parts]
    count = sum(map(len, cut))
    names = iter(_names(file_format, count))
    return [[PlannedFile(next(names), tensors) for tensors in files] for files in cut]


def _cut(tensors: Outlines, max_bytes: int, file_format: Format) -> list[dict[str, Outline]]:
    files: list[dict[str, Outline]] = [{}]
    size = 0
    for name, outline in tensors.items():
        file_format.check(name, outline)
        if files[-1] and size + outline.nbytes > max_bytes:
            files.append({})
            size = 0
        files[-1][name] = outline
        size += outline.nbytes
    return files


def _names(file_format: Format, count: int) -> Sequence[str]:
    if count == 1:
        return [file_format.single]
    return [f"model-{i + 1:05d}-of-{count:05d}{file_format.suffix}" for i in range(count)]
