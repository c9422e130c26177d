"""Files that lie: one clear error on every rank, no code run, nothing written into the model."""

from __future__ import annotations

import io
import json
import pickle
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex

import fsdp_compose as fc
from fsdp_compose.__main__ import main
from fsdp_compose.checkpoint.metadata import check_whole

from harness import run_ranks
from saved import Code

Change = Callable[[Path], Any]


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 6), nn.Linear(6, 3))


def sharded() -> nn.Module:
    model = net()
    for layer in model.children():
        fc.fully_shard(layer)
    return fc.fully_shard(model)


def errors_of_loads(rank: int, folders: list[Path], load: Callable[..., Any]) -> list[str]:
    """What loading each folder raises; the model must stay as it was."""
    model = sharded()
    before, found = fc.state_dict(model), []
    for folder in folders:
        try:
            load(folder, model)
            found.append("loaded")
        except (RuntimeError, ValueError) as error:
            found.append(str(error))
    after = fc.state_dict(model)
    assert all(torch.equal(before[key], after[key]) for key in before)
    return found


def check_refused(
    tmp_path: Path, load: Any, cases: dict[str, tuple[Change, str]], capsys: Any
) -> None:
    """Every changed copy of ``tmp_path/good`` is refused with its text, on ranks and in a shell."""
    folders = []
    for name, (change, _) in cases.items():
        folders.append(tmp_path / name)
        shutil.copytree(tmp_path / "good", folders[-1])
        change(folders[-1])
    by_rank = run_ranks(errors_of_loads, 2, folders, load)
    for index, (name, (_, text)) in enumerate(cases.items()):
        for errors in by_rank:
            assert text in errors[index] and str(folders[index]) in errors[index], (name, errors)
        out = tmp_path / f"{name}-out"
        for command in (["show", str(folders[index])], ["convert", str(folders[index]), str(out)]):
            capsys.readouterr()
            assert main(["checkpoint", *command]) == 1, (name, command)
            message = capsys.readouterr().err
            assert text in message and "Traceback" not in message, (name, message)
    assert not (tmp_path / "ran").exists()


# The metadata of sharded checkpoints


def rewrite(folder: Path, change: Callable[[Metadata], Any]) -> None:
    """Changes the metadata, and drops the checksums that would tell."""
    file = folder / ".metadata"
    metadata = pickle.loads(file.read_bytes())
    result = change(metadata)
    file.write_bytes(pickle.dumps(metadata if result is None else result))
    for manifest in folder.glob("data-*/manifest.json"):
        manifest.unlink()


def edit(change: Callable[[Metadata], Any]) -> Change:
    return lambda folder: rewrite(folder, change)


def entry(metadata: Metadata, key: str = "model.0.weight") -> Any:
    return metadata.state_dict_metadata[key]


def place(metadata: Metadata, key: str = "model.0.weight") -> Any:
    return next(v for k, v in metadata.storage_data.items() if k.fqn == key)


def drop_chunk(metadata: Metadata) -> None:
    entry(metadata).chunks.pop()


def repeat_chunk(metadata: Metadata) -> None:
    chunks = entry(metadata).chunks
    chunks[-1] = chunks[0]


def drop_place(metadata: Metadata) -> None:
    del metadata.storage_data[next(k for k in metadata.storage_data if k.fqn == "model.0.weight")]


def share_bytes(metadata: Metadata) -> None:
    place(metadata).offset = place(metadata, "model.0.bias").offset
    place(metadata).relative_path = place(metadata, "model.0.bias").relative_path


def grow(metadata: Metadata) -> None:
    entry(metadata).size = torch.Size([1 << 40, 1 << 40])


def set_class_attribute(folder: Path) -> None:
    """BUILD with a state of slots sets attributes of what lies below it, here of a class."""
    name = Metadata.__module__.encode()
    data = b"c" + name + b"\nMetadata\n(N}X\x07\x00\x00\x00versionX\x03\x00\x00\x00badstb."
    for manifest in folder.glob("data-*/manifest.json"):
        manifest.unlink()
    (folder / ".metadata").write_bytes(b"\x80\x02" + data)


def test_metadata_that_lies_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run_ranks(lambda rank: fc.save_checkpoint(tmp_path / "good", sharded()), 2)
    outside = [lambda m, p=p: setattr(place(m), "relative_path", p) for p in OUTSIDE]
    cases: dict[str, tuple[Change, str]] = {
        "code": (edit(lambda m: Code(tmp_path / "ran")), "which was not run"),
        "code inside": (
            edit(lambda m: setattr(m, "planner_data", Code(tmp_path / "ran"))),
            "which was not run",
        ),
        "attribute": (set_class_attribute, "it sets ['version'] of the class Metadata"),
        "no metadata": (edit(lambda m: {"a": 1}), "holds a dict"),
        **{
            f"outside {i}": (edit(change), "which is outside the folder")
            for i, change in enumerate(outside)
        },
        "no name": (edit(lambda m: setattr(place(m), "relative_path", 3)), "name of a file"),
        "missing chunk": (edit(drop_chunk), "are not the whole of its shape"),
        "repeated chunk": (edit(repeat_chunk), "are not the whole of its shape"),
        "missing place": (edit(drop_place), "does not say where 'model.0.weight'"),
        "shared bytes": (edit(share_bytes), "share bytes of"),
        "negative": (edit(lambda m: setattr(place(m), "offset", -8)), "lies at -8"),
        "beyond": (edit(lambda m: setattr(place(m), "offset", 1 << 50)), "truncated"),
        "absurd shape": (edit(grow), "a shape that no tensor can have"),
        "wrong shape": (
            edit(lambda m: setattr(entry(m), "size", torch.Size([6, 5]))),
            "are not the whole of its shape",
        ),
        "negative shape": (edit(lambda m: setattr(entry(m), "size", torch.Size([-6, 4]))), "shape"),
        "no entries": (edit(lambda m: setattr(m, "state_dict_metadata", [1])), "has no entries"),
        "odd entry": (edit(lambda m: m.state_dict_metadata.update(x=MetadataIndex("x"))), "'x'"),
        "odd paths": (edit(lambda m: m.planner_data.update(x=3)), "planner_data"),
    }
    shape = cases.pop("wrong shape")
    check_refused(tmp_path, fc.load_checkpoint, cases, capsys)
    check_shape_refused(tmp_path, shape, capsys)
    assert Metadata.version is None


OUTSIDE = ("../good/x.distcp", "data/../../x", "/etc/passwd", "..\\x", "C:\\x")


def check_shape_refused(tmp_path: Path, case: tuple[Change, str], capsys: Any) -> None:
    """A shape that is not the model's is told as such; the command line looks at the pieces."""
    folder = tmp_path / "shape"
    shutil.copytree(tmp_path / "good", folder)
    case[0](folder)
    for errors in run_ranks(errors_of_loads, 2, [folder], fc.load_checkpoint):
        assert "'0.weight' has global shape (6, 5); wanted (6, 4)" in errors[0]
    assert main(["checkpoint", "show", str(folder)]) == 1
    assert case[1] in capsys.readouterr().err


def test_values_are_plain_data_or_refused(tmp_path: Path) -> None:
    """What an optimizer's hyperparameters unpickle to could run code as well."""
    model = fc.fully_shard(net())
    optim = torch.optim.SGD(model.parameters(), lr=0.1)
    fc.save_checkpoint(tmp_path, model, optim)
    metadata = pickle.loads((tmp_path / ".metadata").read_bytes())
    index, where = next((k, v) for k, v in metadata.storage_data.items() if k.fqn.endswith(".lr"))
    data = io.BytesIO()
    torch.save(Code(tmp_path / "ran"), data)
    where.relative_path = f"{Path(where.relative_path).parent}/lr"
    where.offset, where.length = 0, len(data.getvalue())
    (tmp_path / where.relative_path).write_bytes(data.getvalue())
    rewrite(tmp_path, lambda m: m.storage_data.update({index: where}))
    with pytest.raises(RuntimeError, match=r"\.lr' holds a \w+\.mkdir, and is not unpickled"):
        fc.load_checkpoint(tmp_path, model, optim)
    fc.load_checkpoint(tmp_path, model)  # which reads no such values
    assert not (tmp_path / "ran").exists()


def test_a_manifest_that_lies_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    fc.save_checkpoint(tmp_path, fc.fully_shard(net()))
    (manifest,) = tmp_path.glob("data-*/manifest.json")
    good = json.loads(manifest.read_text())
    for bad in (
        [],
        {},
        {**good, "files": 3},
        {**good, "metadata": {"bytes": "1", "crc32": 2}},
        {**good, "files": {"__0_0.distcp": None}},
    ):
        manifest.write_text(json.dumps(bad))
        with pytest.raises(RuntimeError, match=r"manifest\.json: (damaged|holds)"):
            fc.load_checkpoint(tmp_path, fc.fully_shard(net()))
        assert main(["checkpoint", "show", str(tmp_path)]) == 1
        assert "manifest.json" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("boxes", "whole"),
    [
        ([((0, 0), (2, 3)), ((2, 0), (2, 3))], True),
        ([((0, 0), (4, 1)), ((0, 1), (4, 2))], True),
        ([((0, 0), (1, 3)), ((1, 0), (1, 2)), ((1, 2), (1, 1)), ((2, 0), (2, 3))], True),
        ([((0, 0), (4, 3)), ((4, 0), (0, 3))], True),  # an empty piece
        ([((0, 0), (2, 3)), ((1, 0), (2, 3))], False),  # over each other, and one row missing
        ([((0, 0), (1, 3)), ((2, 0), (2, 3))], False),
        ([((0, 0), (4, 2))], False),
        ([], False),
    ],
)
def test_pieces_are_the_whole_or_not(boxes: Any, whole: bool) -> None:
    from torch.distributed.checkpoint.metadata import (
        ChunkStorageMetadata,
        TensorProperties,
        TensorStorageMetadata,
    )

    chunks = [ChunkStorageMetadata(torch.Size(o), torch.Size(s)) for o, s in boxes]
    described = TensorStorageMetadata(TensorProperties(), torch.Size((4, 3)), chunks)
    if whole:
        check_whole(Path("x"), "key", described)
    else:
        with pytest.raises(RuntimeError, match="not the whole"):
            check_whole(Path("x"), "key", described)


# safetensors


def header(change: Callable[[dict[str, Any]], Any]) -> Change:
    """Changes the header of the one file."""

    def act(folder: Path) -> None:
        file = folder / "model.safetensors"
        data = file.read_bytes()
        length = int.from_bytes(data[:8], "little")
        entries = json.loads(data[8 : 8 + length])
        result = change(entries)
        text = (json.dumps(entries) if result is None else result).encode()
        file.write_bytes(len(text).to_bytes(8, "little") + text + data[8 + length :])
        (folder / "model.safetensors.index.json").unlink()

    return act


def index(change: Callable[[dict[str, Any]], Any]) -> Change:
    """Changes the index of several files."""

    def act(folder: Path) -> None:
        shutil.rmtree(folder)
        shutil.copytree(folder.parent / "several", folder)
        file = folder / "model.safetensors.index.json"
        content = json.loads(file.read_text())
        change(content)
        file.write_text(json.dumps(content))

    return act


def overlap(entries: dict[str, Any]) -> None:
    entries["1.bias"]["data_offsets"] = [0, 12]


def test_safetensors_that_lie_are_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    fc.save_full(tmp_path / "good", fc.fully_shard(net()))
    fc.save_full(tmp_path / "several", fc.fully_shard(net()), max_file_bytes=50)

    def of(name: str, value: Any) -> Change:
        return header(lambda h: h["0.weight"].update({name: value}))

    def mapped(value: Any) -> Change:
        return index(lambda i: i["weight_map"].update({"0.weight": value}))

    bits = (tmp_path / "good/model.safetensors").read_bytes()
    cases: dict[str, tuple[Change, str]] = {
        "overlap": (header(overlap), "lies over another tensor"),
        "hole": (header(lambda h: h.pop("0.bias") and None), "damaged"),
        "dtype": (of("dtype", "F4"), "'0.weight' is F4; known are F64"),
        "no dtype": (of("dtype", 3), "is described by"),
        "shape": (of("shape", [1 << 40, 1 << 40]), "a shape that no tensor can have"),
        "empty shape": (of("shape", [1 << 62, 1 << 62, 0]), "a shape that no tensor can have"),
        "negative shape": (of("shape", [-6, -4]), "has shape"),
        "float shape": (of("shape", [6.0, 4]), "has shape"),
        "bool shape": (of("shape", [True, 24]), "has shape"),
        "many dimensions": (of("shape", [1] * 9000), "a shape that no tensor can have"),
        "bytes": (of("shape", [6, 3]), "has 96 bytes"),
        "offsets": (of("data_offsets", [0, 1 << 70]), "bytes"),
        "float offsets": (of("data_offsets", [0.0, 96.0]), "lies at"),
        "negative offsets": (of("data_offsets", [-96, 0]), "lies at"),
        "one offset": (of("data_offsets", [0]), "is described by"),
        "entry": (header(lambda h: h.update(x=3)), "'x' is described by 3"),
        "list": (header(lambda h: "[]"), "its header is a list"),
        "deep": (header(lambda h: "[" * 100_000), "damaged"),
        "twice": (
            header(lambda h: json.dumps(h)[:-1] + ', "0.weight": 1}'),
            "a name appears twice",
        ),
        "long": (
            lambda f: (f / "model.safetensors").write_bytes(b"\xff" * 8 + bits[8:]),
            "truncated or not a safetensors file",
        ),
        "longer": (
            lambda f: (f / "model.safetensors").write_bytes(bits + b"more"),
            "belong to no tensor",
        ),
        "integer": (mapped(7), "where '0.weight' lies, found 7"),
        "nothing": (mapped(None), "where '0.weight' lies, found None"),
        **{
            f"outside {i}": (mapped(name), "which is outside the folder")
            for i, name in enumerate(OUTSIDE)
        },
        "missing": (mapped("nowhere.safetensors"), "missing"),
        "other": (mapped("model-00004-of-00004.safetensors"), "lacks '0.weight'"),
        "no map": (index(lambda i: i.update(weight_map=[1])), "no 'weight_map'"),
        "metadata": (index(lambda i: i.update(metadata=[1])), "its 'metadata'"),
        "checksum": (
            index(
                lambda i: i["metadata"]["checksums"].update({"model-00001-of-00004.safetensors": 1})
            ),
            "where a checksum was wanted",
        ),
    }
    check_refused(tmp_path, fc.load_full, cases, capsys)


def test_float8_scales_are_saved_and_loaded(tmp_path: Path) -> None:
    """F8_E8M0 and the other kinds of eight bits are dtypes as any."""
    kinds = [
        torch.float8_e8m0fnu,
        torch.float8_e4m3fn,
        torch.float8_e5m2,
        torch.float8_e4m3fnuz,
        torch.float8_e5m2fnuz,
    ]

    class Scales(nn.Module):
        def __init__(self, value: float) -> None:
            super().__init__()
            for index, kind in enumerate(kinds):
                self.register_buffer(f"b{index}", torch.full((3,), value).to(kind))
            self.linear = nn.Linear(2, 2)

    fc.save_full(tmp_path, fc.fully_shard(Scales(2.0)))
    model = fc.fully_shard(Scales(1.0))
    fc.load_full(tmp_path, model)
    assert all(model.get_buffer(f"b{i}").float().tolist() == [2.0] * 3 for i in range(len(kinds)))


def test_names_are_printed_without_control_characters(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    fc.save_full(tmp_path, fc.fully_shard(net()))
    header(lambda h: h.update({"\x1b[2Jx": h.pop("0.weight")}))(tmp_path)
    assert main(["checkpoint", "show", str(tmp_path)]) == 0
    out = capsys.readouterr().out
    assert "\x1b" not in out and "\\x1b[2Jx" in out


def test_security_md_says_what_is_trusted() -> None:
    """It has no address of a machine, and names what still runs code."""
    text = (Path(__file__).parents[2] / "SECURITY.md").read_text()
    assert all(word in text for word in ("Trusted", "Not trusted", "`extra`", "private report"))
    assert "http" not in text and "@" not in text
