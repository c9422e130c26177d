"""Saves a sharded model in compressed zip archives, and loads it from them.

    fsdp-compose run --nproc 2 examples/change_one_thing/checkpoint_format.py

The seam is a ``Format``: a function that writes a file, and one that says what a file holds.
"""

import ctypes
import json
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from zipfile import ZIP_DEFLATED, ZipFile

import torch
import torch.distributed as dist
from torch import Tensor, nn

from fsdp_compose import Format, Stored, fully_shard, load_full, save_full, state_dict
from fsdp_compose.checkpoint import Outline


@contextmanager
def write_zip(path: Path, outlines: dict[str, Outline]) -> Iterator[object]:
    with ZipFile(path, "w", ZIP_DEFLATED) as archive:
        header = {name: (str(o.dtype).split(".")[1], o.shape) for name, o in outlines.items()}
        archive.writestr("header.json", json.dumps(header))
        yield lambda name, t: archive.writestr(name, ctypes.string_at(t.data_ptr(), t.nbytes))


def read_run(path: Path, name: str, dtype: torch.dtype, first: int, last: int) -> Tensor:
    with ZipFile(path) as archive, archive.open(name) as member:
        member.seek(first * dtype.itemsize)
        data = member.read((last - first) * dtype.itemsize)
    return torch.frombuffer(bytearray(data), dtype=dtype) if data else torch.empty(0, dtype=dtype)


def read_zip(path: Path) -> dict[str, Stored]:
    found = {}
    with ZipFile(path) as archive:
        for name, (kind, shape) in json.loads(archive.read("header.json")).items():
            dtype = getattr(torch, kind)
            found[name] = Stored(dtype, tuple(shape), partial(read_run, path, name, dtype))
    return found


def main() -> None:
    dist.init_process_group("gloo")
    model, other = (fully_shard(nn.Linear(256, 64), init="broadcast") for _ in range(2))
    folder, zipped = Path("runs/zip_format"), Format(".zip", write_zip, read_zip)
    save_full(folder, model, format=zipped)
    load_full(folder, other, format=zipped)
    same = all(map(torch.equal, state_dict(model).values(), state_dict(other).values()))
    if dist.get_rank() == 0:
        print(f"loaded the same from {sorted(f.name for f in folder.iterdir())}: {same}")


if __name__ == "__main__":
    main()
