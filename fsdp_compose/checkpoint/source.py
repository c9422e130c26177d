"""A checkpoint of torch.distributed.checkpoint to read from, whoever wrote it.

Needs no process group: what each rank reads depends on its own slices alone.
"""

from __future__ import annotations

import io
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.checkpoint.planner import ReadItem

from fsdp_compose.base.torch_private import load_checkpoint_plan
from fsdp_compose.checkpoint.containers import OBJECTS, container_of, join_parts, read_place
from fsdp_compose.checkpoint.files import METADATA
from fsdp_compose.checkpoint.metadata import CheckedReader, check_whole
from fsdp_compose.checkpoint.optimizer.nested import is_by_key, join_keys, nested_key
from fsdp_compose.checkpoint.plain_data import load_plain
from fsdp_compose.checkpoint.values import show_whole, whole_shape
from fsdp_compose.comm.messages import to_bytes
from fsdp_compose.construct.names import clean_name
from fsdp_compose.sharded import is_sharded, tag

KeyPath: TypeAlias = "tuple[Any, ...]"


class CheckpointSource:
    """What a checkpoint has, by the path of each value in the dictionary that was saved.

    ``want`` says what to read and ``read`` reads all of it into ``values``, by flat key.
    """

    def __init__(self, path: Path, metadata: Metadata) -> None:
        self.path, self.metadata = path, metadata
        self.entries: dict[str, Any] = metadata.state_dict_metadata
        nested = metadata.planner_data or {}
        paths = {tuple(nested.get(key, (key,))): key for key in self.entries}
        self.values: dict[str, Any] = {}
        self._wanted: dict[str, Any] = {}
        self._outlines: dict[int, tuple[str, Any]] = {}
        self._whole = self._find_whole(paths)
        self._pickled = frozenset(self._whole.values())
        self._parts: dict[str, dict[KeyPath, str]] = {}
        self._joined: set[str] = set()
        self.paths = self._join(paths)

    def _find_whole(self, paths: Mapping[KeyPath, str]) -> dict[KeyPath, str]:
        """Take the values that were saved whole out of ``paths``; their keys by place.

        Raises:
            RuntimeError: the place of one is not what a save writes.
        """
        found: dict[KeyPath, str] = {}
        for path, key in paths.items():
            if path[:1] == (OBJECTS,) and len(path) == 2:
                try:
                    found[read_place(path[1])] = key
                except (TypeError, ValueError, RecursionError) as error:
                    raise RuntimeError(f"{self.path / METADATA}: damaged: {error}.") from error
        return found

    def _join(self, paths: Mapping[KeyPath, str]) -> dict[KeyPath, str]:
        """Give each value that torch cut into parts one path, and remember its parts."""
        joined: dict[KeyPath, str] = {}
        for path, key in paths.items():
            starts = (path[:n] for n in range(1, len(path) + 1))
            if path[:1] == (OBJECTS,) or any(start in self._whole for start in starts):
                continue
            place = container_of(path)
            joined[place] = key
            if place != path:
                joined[place] = whole = ".".join(map(str, place))
                self._parts.setdefault(whole, {})[path[len(place) :]] = key
        return {**joined, **self._whole}

    def below(self, prefix: KeyPath) -> dict[KeyPath, str]:
        """Find the paths one step below ``prefix``, and their flat keys."""
        depth = len(prefix)
        return {
            path: key
            for path, key in self.paths.items()
            if len(path) == depth + 1 and path[:depth] == prefix
        }

    def outline(self, key: str) -> Any:
        """A meta tensor for a tensor, whose key ``key_of`` gives; a string for anything else."""
        entry = self.entries.get(key)
        if not isinstance(entry, TensorStorageMetadata) or key in self._pickled:
            return f"<{key}>"
        outline = torch.empty(entry.size, dtype=entry.properties.dtype, device="meta")
        self._outlines[id(outline)] = (key, outline)
        return outline

    def key_of(self, outline: Tensor) -> str:
        """The flat key that an outline stands for."""
        return self._outlines[id(outline)][0]

    def model_prefix(self, names: Iterable[str]) -> KeyPath:
        """Find the place in the saved dictionary below which most of ``names`` lie.

        Raises:
            RuntimeError: several have as many, and none of them is ``"model"``.
        """
        known = set(names)
        hits: dict[KeyPath, int] = {("model",): 0}
        for path in self.paths:
            if clean_name(str(path[-1])) in known:
                hits[path[:-1]] = hits.get(path[:-1], 0) + 1
        best, *others = [prefix for prefix in hits if hits[prefix] == max(hits.values())]
        if others and best != ("model",):
            one, other = (".".join(map(str, prefix)) for prefix in (best, others[0]))
            raise RuntimeError(
                f"{self.path}: {one!r} and {other!r} both have the names of this module, and "
                f"nothing tells which to load; call torch.distributed.checkpoint.load({{{one!r}: "
                "module.state_dict()}, checkpoint_id=path), which writes into the module, or save "
                "the one that is wanted as 'model'."
            )
        return best

    def optimizer(self) -> dict[str, Any]:
        """Optimizer state as it was saved, with outlines for the tensors in ``"state"``.

        Raises:
            RuntimeError: there is none.
        """
        prefixes = {p[: p.index("param_groups")] for p in self.paths if "param_groups" in p}
        if not prefixes and is_by_key(path[-1] for path in self.paths):
            return self._optimizer_by_key()
        if not prefixes:
            raise RuntimeError(
                f"{self.path}: no optimizer state in this checkpoint; pass optim=None to load the "
                "model alone."
            )
        prefix = ("optim",) if ("optim",) in prefixes else min(prefixes)
        depth = len(prefix)
        groups: dict[int, dict[str, Any]] = {}
        state: dict[str, dict[str, Any]] = {}
        extra: dict[str, Any] = {}
        for path, key in self.paths.items():
            if path[:depth] != prefix:
                continue
            match path[depth:]:
                case ("param_groups", int(number), hyper):
                    groups.setdefault(number, {})[hyper] = key
                case ("state", name, first, *rest):
                    outline = self.outline(key)
                    is_tensor = isinstance(outline, Tensor)
                    what = nested_key(first, rest)
                    state.setdefault(name, {})[what] = outline if is_tensor else key
                case (other,):
                    extra[other] = key
        self._fill([extra, *groups.values(), *state.values()])
        return {
            **extra,
            "state": {
                name: {key: of[key] for key in sorted(of, key=lambda key: (key != "step", key))}
                for name, of in state.items()
            },
            "param_groups": [groups[number] for number in sorted(groups)],
        }

    def _fill(self, dicts: list[dict[Any, Any]]) -> None:
        """Read what has the flat keys that are values of ``dicts``, and put it in their place."""
        keys = [{n: k for n, k in each.items() if not isinstance(k, Tensor)} for each in dicts]
        for key in (key for each in keys for key in each.values()):
            self.want(key, None)
        self.read()
        for each, wanted in zip(dicts, keys, strict=True):
            each.update((name, self.values[key]) for name, key in wanted.items())

    def _optimizer_by_key(self) -> dict[str, Any]:
        """Optimizer state that torch was told to flatten, with one key for each value."""
        prefixes = {path[:-1] for path in self.paths if is_by_key(path[-1:])}
        prefix = ("optim",) if ("optim",) in prefixes else min(prefixes)
        found: dict[Any, Any] = {}
        for path, key in self.below(prefix).items():
            outline = self.outline(key)
            is_state = isinstance(outline, Tensor) and not is_by_key(path[-1:])
            found[path[-1]] = outline if is_state else key
        self._fill([found])
        return join_keys(found)

    def want(self, key: str, like: Tensor | None, dtype: torch.dtype | None = None) -> None:
        """Ask for a value, in host memory.

        Args:
            like: what it will be written into; of a sharded tensor of the saved shape only the
                slice is read. None: all of it.
            dtype: None for that of ``like``, or the saved one.

        Raises:
            RuntimeError: the checkpoint does not hold all of it, or it is quantized.
        """
        if key in self._parts:
            self._joined.add(key)
            for part in self._parts[key].values():
                self.want(part, None)
            return
        entry = self.entries[key]
        if not isinstance(entry, TensorStorageMetadata):
            self._wanted[key] = None
            return
        check_whole(self.path, key, entry)
        saved = entry.properties.dtype
        if torch.empty(0, dtype=saved, device="meta").is_quantized:  # torch saved no scale
            raise RuntimeError(
                f"{self.path}: {key!r} is quantized; wanted its numbers, such as dequantize() gives"
            )
        dtype = dtype or (saved if like is None or like.is_quantized else like.dtype)
        if is_sharded(like) and whole_shape(like) == entry.size:
            spec = like._shard_spec
            local = torch.empty(spec.stop - spec.start, dtype=dtype, device="cpu")
            self._wanted[key] = show_whole(tag(local, spec))
        else:
            self._wanted[key] = torch.empty(entry.size, dtype=dtype, device="cpu")

    def read(self) -> None:
        """Read what was asked for.

        Raises:
            RuntimeError: a file cannot be read.
        """
        if not self._wanted:
            return
        reader = CheckedReader(self.path, self.metadata)
        try:
            load_checkpoint_plan(self._wanted, reader, None, 0, True, _Planner())
        except CheckpointException as error:
            failures = [
                f"rank {rank}: {type(found).__name__}: {found}"
                for rank, (found, _) in error.failures.items()
            ]
            raise RuntimeError(f"{self.path}: could not be read: {'; '.join(failures)}") from error
        self.values.update(self._wanted)
        try:
            for key in self._wanted.keys() & self._pickled:
                self.values[key] = load_plain(key, io.BytesIO(to_bytes(self.values[key])))
            for key in self._joined:
                parts = self._parts[key].items()
                self.values[key] = join_parts({rest: self.values[part] for rest, part in parts})
        except Exception as error:  # a damaged pickle raises anything
            raise RuntimeError(f"{self.path}: could not be read: {error}") from error
        self._wanted, self._joined = {}, set()


class _Planner(DefaultLoadPlanner):
    """Unpickles values that are not tensors as torch does with ``weights_only``."""

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        key = read_item.dest_index.fqn
        self.original_state_dict[key] = load_plain(key, value)
