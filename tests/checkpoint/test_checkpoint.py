"""Checkpoints on disk: any world size to any other, whole or not at all, damage found and named."""

from __future__ import annotations

import json
import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import fsdp_compose as fc
from fsdp_compose.__main__ import main
from fsdp_compose.base.process import here
from fsdp_compose.checkpoint import (
    load_checkpoint,
    load_full,
    optim_state_dict,
    save_checkpoint,
    save_full,
    state_dict,
)

from harness import RankFailure, rank_errors, run_ranks
from saved import OPTIMIZERS, Net, TiedNet, equal, shard, shard_tied, train

State = tuple[dict[str, Any], dict[str, Any]]


def snapshot(model: nn.Module, optim: Any) -> State:
    return dict(state_dict(model)), optim_state_dict(model, optim)


def same(a: State, b: State) -> None:
    equal(a[0], b[0])
    equal(a[1], b[1])


def save(rank: int, path: Path, how: str = "blocks", steps: int = 2, **kwargs: Any) -> State:
    model = shard(Net(), how)
    optim = OPTIMIZERS["adamw"](model)
    train(model, optim, steps)
    save_checkpoint(path, model, optim, {"step": steps, "rank": rank}, **kwargs).wait()
    return snapshot(model, optim)


def load(rank: int, path: Path, how: str = "row", **kwargs: Any) -> tuple[State, Any]:
    model = shard(Net(7), how, **kwargs)
    optim = OPTIMIZERS["adamw"](model)
    extra = load_checkpoint(path, model, optim)
    return snapshot(model, optim), extra


@pytest.mark.parametrize("asynchronous", [False, True])
def test_saved_at_4_loads_at_3_2_1_and_back(tmp_path: Path, asynchronous: bool) -> None:
    saved = run_ranks(save, 4, tmp_path / "a", asynchronous=asynchronous)[0]
    ways = {3: "row", 2: "root", 1: "blocks", 4: "blocks"}
    for world, how in ways.items():
        for state, extra in run_ranks(load, world, tmp_path / "a", how):
            same(state, saved)
            assert extra["step"] == 2
    assert [e["rank"] for _, e in run_ranks(load, 4, tmp_path / "a")] == [0, 1, 2, 3]
    assert [e["rank"] for _, e in run_ranks(load, 2, tmp_path / "a")] == [0, 0]
    back = run_ranks(save, 1, tmp_path / "b", "row", asynchronous=asynchronous)[0]
    for world in (4, 1):
        for state, _ in run_ranks(load, world, tmp_path / "b", "blocks"):
            same(state, back)


def test_without_a_process_group(tmp_path: Path) -> None:
    saved = save(0, tmp_path)
    same(load(0, tmp_path)[0], saved)
    for state, _ in run_ranks(load, 2, tmp_path):
        same(state, saved)


def resumed(rank: int, path: Path, how: str, strategy: Any, steps: int) -> list[float]:
    model = shard(Net(7), how, strategy=strategy)
    optim = OPTIMIZERS["adamw"](model)
    load_checkpoint(path, model, optim)
    return train(model, optim, steps, first=3)


@pytest.mark.parametrize("world", [1, 2])
def test_resuming_gives_the_next_losses_bit_for_bit(tmp_path: Path, world: int) -> None:
    """Saved at 4 ranks; every rank sees the same batch, so that averages are exact at 1, 2, 4."""

    def uninterrupted(rank: int) -> list[float]:
        model = shard(Net())
        optim = OPTIMIZERS["adamw"](model)
        train(model, optim, 3)
        save_checkpoint(tmp_path, model, optim)
        return train(model, optim, 10, first=3)

    want = run_ranks(uninterrupted, 4)[0]
    for how, strategy in (
        ("row", fc.ShardingStrategy.FULL_SHARD),
        ("root", fc.ShardingStrategy.SHARD_GRAD_OP),
        ("blocks", fc.ShardingStrategy.NO_SHARD),
    ):
        assert run_ranks(resumed, world, tmp_path, how, strategy, 10)[0] == want
    assert run_ranks(resumed, 4, tmp_path, "root", None, 10)[0] == want


def test_hybrid_mesh_and_no_shard(tmp_path: Path) -> None:
    def hybrid(rank: int) -> State:
        from torch.distributed.device_mesh import init_device_mesh

        model = shard(Net(), mesh=init_device_mesh("cpu", (2, 2)))
        optim = OPTIMIZERS["adamw"](model)
        train(model, optim, 2)
        save_checkpoint(tmp_path / "h", model, optim)
        again = shard(Net(3), "row", strategy=fc.ShardingStrategy.NO_SHARD)
        other = OPTIMIZERS["adamw"](again)
        load_checkpoint(tmp_path / "h", again, other)
        save_checkpoint(tmp_path / "n", again, other)
        return snapshot(model, optim)

    saved = run_ranks(hybrid, 4)[0]
    for name in ("h", "n"):
        for state, _ in run_ranks(load, 3, tmp_path / name):
            same(state, saved)


def test_no_parameter_is_gathered(tmp_path: Path) -> None:
    def run(rank: int) -> None:
        model = shard(Net())
        optim = OPTIMIZERS["adamw"](model)
        train(model, optim, 1)
        here.traffic.reset()
        save_checkpoint(tmp_path, model, optim)
        load_checkpoint(tmp_path, model, optim)
        assert here.traffic.gathers == here.traffic.all_reduces == here.traffic.reduces == 0

    run_ranks(run, 2)


def test_an_asynchronous_save_is_of_the_call(tmp_path: Path) -> None:
    """An asynchronous save is of the state when it was called."""

    def run(rank: int) -> State:
        model = shard(Net())
        optim = OPTIMIZERS["adamw"](model)
        train(model, optim, 2)
        before = snapshot(model, optim)
        saving = save_checkpoint(tmp_path, model, optim, asynchronous=True)
        train(model, optim, 3)
        second = save_checkpoint(tmp_path / "b", model, optim, asynchronous=True)
        assert saving.done()  # the next save waited for it
        saving.wait()
        second.wait()
        return before

    saved = run_ranks(run, 2)[0]
    for state, _ in run_ranks(load, 3, tmp_path):
        same(state, saved)


def test_model_alone_and_tied_and_frozen_and_buffers(tmp_path: Path) -> None:
    def put(rank: int) -> None:
        save_checkpoint(tmp_path, shard_tied(TiedNet(2), "head"))

    def get(rank: int) -> Any:
        model = shard_tied(TiedNet(1), "blocks")
        load_checkpoint(tmp_path, model)
        assert model.head.weight is model.emb.weight
        with pytest.raises(RuntimeError, match="no optimizer state in this checkpoint"):
            load_checkpoint(tmp_path, model, torch.optim.SGD(model.parameters()))
        return dict(state_dict(model))

    run_ranks(put, 3)
    for state in run_ranks(get, 2):
        equal(state, dict(TiedNet(2).state_dict()))


# Atomic, damaged, alone.


def test_a_killed_save_leaves_the_previous_checkpoint(tmp_path: Path) -> None:
    """Killed at every stage: before files, between files, before and after the commit."""
    saved = run_ranks(save, 2, tmp_path)[0]

    def killed(rank: int, stage: str) -> None:
        from fsdp_compose.checkpoint import files

        def die(*args: Any, **kwargs: Any) -> Any:
            os.kill(os.getpid(), signal.SIGKILL)

        if stage == "write":
            files.CommittingWriter.write_data = die  # type: ignore[method-assign]
        elif stage == "finish":
            files.CommittingWriter.finish = die  # type: ignore[method-assign]
        elif stage == "commit":
            files.os.replace = die  # type: ignore[assignment]
        save(rank, tmp_path, steps=5)

    for stage in ("write", "finish", "commit"):
        with pytest.raises(RankFailure):
            run_ranks(killed, 2, stage)
        for state, _ in run_ranks(load, 3, tmp_path):
            same(state, saved)
    assert len(list(tmp_path.glob("data-*"))) > 1
    newer = run_ranks(save, 2, tmp_path, steps=4)[0]
    assert len(list(tmp_path.glob("data-*"))) == 1  # what the killed ones left is gone
    same(run_ranks(load, 1, tmp_path)[0][0], newer)


def loads_unchanged(rank: int, path: Path, load_it: Any = load_checkpoint) -> None:
    model = shard(Net(7))
    optim = OPTIMIZERS["adamw"](model)
    train(model, optim, 1)
    before = snapshot(model, optim)
    try:
        if load_it is load_checkpoint:
            load_it(path, model, optim)
        else:
            load_it(path, model)
    finally:
        same(snapshot(model, optim), before)


def damage(file: Path, how: str) -> None:
    data = file.read_bytes()
    if how == "truncated":
        file.write_bytes(data[: len(data) // 2])
    elif how == "damaged":
        middle = len(data) // 2
        file.write_bytes(data[:middle] + bytes([data[middle] ^ 1]) + data[middle + 1 :])
    else:
        file.unlink()


@pytest.mark.parametrize("how", ["truncated", "damaged", "missing"])
@pytest.mark.parametrize("which", ["__1_0.distcp", ".metadata"])
def test_a_bad_file_is_named_on_every_rank(tmp_path: Path, which: str, how: str) -> None:
    run_ranks(save, 2, tmp_path)
    file = next(tmp_path.rglob(which))
    damage(file, how)
    wanted = "no .metadata file" if (which, how) == (".metadata", "missing") else str(file)
    for error in rank_errors(loads_unchanged, 3, tmp_path):
        assert error is not None and error.startswith("RuntimeError")
        assert wanted in error and (how in error or which == ".metadata"), error


def test_no_checkpoint_and_a_killed_first_save(tmp_path: Path) -> None:
    errors = rank_errors(loads_unchanged, 2, tmp_path / "nowhere")
    assert all("no checkpoint" in str(e) for e in errors)
    (tmp_path / "data-0123456789ab").mkdir()
    assert all("half-written" in str(e) for e in rank_errors(loads_unchanged, 2, tmp_path))


def test_a_full_disk_is_an_error_and_leaves_the_old(tmp_path: Path) -> None:
    """A full disk is an error on every rank and leaves the old."""
    saved = run_ranks(save, 2, tmp_path)[0]

    def full(rank: int, asynchronous: bool, to_full: bool) -> None:
        import resource

        model = shard(Net())
        optim = OPTIMIZERS["adamw"](model)
        if rank == 1:
            signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
            hard = resource.getrlimit(resource.RLIMIT_FSIZE)[1]
            resource.setrlimit(resource.RLIMIT_FSIZE, (64, hard))
        try:
            if to_full:
                save_full(tmp_path, model, max_file_bytes=1)
            else:
                save_checkpoint(tmp_path, model, optim, asynchronous=asynchronous).wait()
        finally:
            if rank == 1:
                resource.setrlimit(resource.RLIMIT_FSIZE, (hard, hard))

    for asynchronous, to_full in ((False, False), (True, False), (False, True)):
        errors = rank_errors(full, 2, asynchronous, to_full)
        for error in errors:
            assert error is not None and error.startswith("RuntimeError"), errors
            assert ("was not saved" in error and "rank 1" in error) or "File too large" in error
            assert "File too large" in error or "could not be written to its end" in error
    assert len(list(tmp_path.iterdir())) == 2
    same(run_ranks(load, 2, tmp_path)[0][0], saved)


@pytest.mark.parametrize("call", ["save_checkpoint", "load_checkpoint", "save_full", "load_full"])
def test_a_rank_that_calls_alone_names_the_missing(tmp_path: Path, call: str) -> None:
    """A rank that calls alone is told who is missing, as often as it calls."""
    run_ranks(save, 3, tmp_path / "c")
    run_ranks(lambda rank: save_full(tmp_path / "f", shard(Net())), 3)

    def run(rank: int) -> None:
        model = shard(Net())
        function = getattr(fc.checkpoint, call)
        path = tmp_path / ("f" if "full" in call else "c")
        if rank == 0:
            start = time.monotonic()
            text = rf"{call}: rank 0 waited 0.1 s for rank 1, 2"
            for one in (model, *[Net()] * 3):  # where none is sharded, the store alone tells
                with pytest.raises(RuntimeError, match=text):
                    function(path, one, timeout=0.1)
            assert time.monotonic() - start < 5
        dist.barrier()
        function(path, model, timeout=20)  # and then together

    run_ranks(run, 3)


def test_names_and_shapes_that_do_not_fit(tmp_path: Path) -> None:
    run_ranks(save, 2, tmp_path / "c")
    run_ranks(lambda rank: save_full(tmp_path / "f", shard(Net())), 2)

    def run(rank: int, call: Any, change: str) -> None:
        other = Net(7)
        if change == "name":
            other.aa = other.a
            del other.a
            fc.fully_shard(other)
        else:
            other.b = nn.Linear(5, 4)
            fc.fully_shard(other)
        before = dict(state_dict(other))
        try:
            call(tmp_path / ("c" if call is load_checkpoint else "f"), other)
        finally:
            equal(dict(state_dict(other)), before)

    for call in (load_checkpoint, load_full):
        for change, texts in {
            "name": ["missing keys: 'aa.weight' (closest: 'a.weight'", "unexpected keys"],
            "shape": ["'b.weight' has global shape (3, 5); wanted (4, 5)"],
        }.items():
            for error in rank_errors(run, 2, call, change):
                assert error is not None and all(text in error for text in texts), error


def test_load_not_strict(tmp_path: Path) -> None:
    run_ranks(save, 2, tmp_path)

    def run(rank: int) -> None:
        model = Net(7)
        model.extra = nn.Linear(2, 2)
        fc.fully_shard(model)
        kept = state_dict(model)["extra.weight"]
        load_checkpoint(tmp_path, model, strict=False)
        full = state_dict(model)
        assert torch.equal(full["extra.weight"], kept)
        assert not torch.equal(full["a.weight"], Net(7).a.weight)

    run_ranks(run, 2)


# safetensors


@pytest.mark.parametrize("max_file_bytes", [1 << 30, 100])
def test_full_files_are_the_plain_models(tmp_path: Path, max_file_bytes: int) -> None:
    safetensors = pytest.importorskip("safetensors.torch")

    def put(rank: int) -> None:
        save_full(tmp_path, shard_tied(TiedNet(2)), max_file_bytes=max_file_bytes)

    run_ranks(put, 3)
    files = sorted(tmp_path.glob("*.safetensors"))
    if max_file_bytes == 100:
        count = len(files)
        assert [f.name for f in files] == [
            f"model-{i + 1:05d}-of-{count:05d}.safetensors" for i in range(count)
        ]
        assert count > 3
    else:
        assert [f.name for f in files] == ["model.safetensors"]
    got: dict[str, Any] = {}
    for file in files:
        got.update(safetensors.load_file(file))
    want = TiedNet(2).state_dict()
    assert set(got) == set(want)
    for key in want:
        assert torch.equal(got[key], want[key]), key

    def get(rank: int, how: str) -> Any:
        model = shard_tied(TiedNet(1), how)
        assert load_full(tmp_path, model) == ([], [])
        return dict(state_dict(model))

    for world, how in ((2, "root"), (1, "head"), (4, "blocks")):
        for state in run_ranks(get, world, how):
            equal(state, dict(want))
    plain = TiedNet(1)
    load_full(tmp_path, plain)
    equal(dict(plain.state_dict()), dict(want))


def test_files_that_safetensors_wrote_load_here(tmp_path: Path) -> None:
    safetensors = pytest.importorskip("safetensors.torch")
    want = TiedNet(2).state_dict()
    given = {k: v.contiguous().clone() for k, v in want.items() if k != "head.weight"}
    safetensors.save_file(given, tmp_path / "anything.safetensors", {"format": "pt"})

    def get(rank: int) -> Any:
        model = shard_tied(TiedNet(1))
        load_full(tmp_path, model)  # as Hugging Face leaves out one of two tied names
        return dict(state_dict(model))

    for state in run_ranks(get, 2):
        equal(state, dict(want))


def test_full_in_another_dtype_and_every_dtype(tmp_path: Path) -> None:
    class Many(nn.Module):
        def __init__(self, fill: float) -> None:
            super().__init__()
            for i, dtype in enumerate(
                (
                    torch.float64,
                    torch.bfloat16,
                    torch.float16,
                    torch.complex64,
                    torch.int8,
                    torch.bool,
                )
            ):
                values = torch.full((3, 3), fill).to(dtype)
                self.register_parameter(f"p{i}", nn.Parameter(values, dtype.is_floating_point))
            self.empty = nn.Parameter(torch.empty(0, 3))

    def put(rank: int) -> None:
        model = fc.fully_shard(Many(1))
        save_full(tmp_path / "same", model)
        save_full(tmp_path / "half", model, dtype=torch.bfloat16)
        save_checkpoint(tmp_path / "dcp", model)

    def get(rank: int) -> None:
        for load_it, name in ((load_full, "same"), (load_full, "half"), (load_checkpoint, "dcp")):
            model = fc.fully_shard(Many(0))
            load_it(tmp_path / name, model)
            equal(dict(state_dict(model)), dict(Many(1).state_dict()))

    run_ranks(put, 2)
    run_ranks(get, 3)
    sizes = [(tmp_path / n / "model.safetensors").stat().st_size for n in ("same", "half")]
    assert sizes[1] < sizes[0]


def test_full_holds_one_bucket_at_a_time(tmp_path: Path) -> None:
    """``save_full`` holds one bucket and the ranks share the files."""

    def run(rank: int) -> int:
        from fsdp_compose.checkpoint import contents
        from fsdp_compose.checkpoint.formats import safetensors

        model = nn.Sequential(*[nn.Linear(64, 64, bias=False) for _ in range(6)])
        for layer in model:
            fc.fully_shard(layer)
        fc.fully_shard(model)
        import weakref

        live: list[Any] = []
        gather = contents.gather_bucket
        puts = [0]

        def counted(*args: Any) -> Any:
            assert not [ref for ref in live if ref() is not None], "two gathered buckets"
            flat = gather(*args)
            live.append(weakref.ref(flat))
            return flat

        contents.gather_bucket = counted
        write_at = safetensors.write_at

        def counted_put(*args: Any) -> None:
            puts[0] += args[1] > 0  # not the header
            write_at(*args)

        safetensors.write_at = counted_put
        save_full(tmp_path, model, max_file_bytes=64 * 64 * 4)
        assert len(live) == 6
        return puts[0]

    assert run_ranks(run, 3) == [2, 2, 2]


@pytest.mark.parametrize("how", ["truncated", "damaged", "missing"])
def test_a_bad_full_file_is_named_on_every_rank(tmp_path: Path, how: str) -> None:
    run_ranks(lambda rank: save_full(tmp_path, shard(Net()), max_file_bytes=64), 2)
    file = sorted(tmp_path.glob("*.safetensors"))[1]
    damage(file, how)
    for error in rank_errors(loads_unchanged, 2, tmp_path, load_full):
        assert error is not None and str(file) in error and how in error, error


def test_full_refuses_other_values_and_bad_folders(tmp_path: Path) -> None:
    """``save_full`` refuses what is not a tensor and bad folders."""

    class Odd(nn.Linear):
        def get_extra_state(self) -> str:
            return "x"

        def set_extra_state(self, state: str) -> None:
            pass

    def run(rank: int) -> None:
        with pytest.raises(ValueError, match="such files hold tensors only"):
            save_full(tmp_path, fc.fully_shard(Odd(2, 2)))
        with pytest.raises(RuntimeError, match=r"no \.safetensors file"):
            load_full(tmp_path, fc.fully_shard(Odd(2, 2)))

    run_ranks(run, 2)


# The command line


def test_show_and_convert_without_a_process_group(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    saved = run_ranks(save, 3, tmp_path / "c")[0]
    assert main(["checkpoint", "show", "--verify", str(tmp_path / "c")]) == 0
    out = capsys.readouterr().out
    assert "model.a.weight" in out and "(5, 3)" in out and "saved by 3 ranks" in out
    assert main(["checkpoint", "convert", str(tmp_path / "c"), str(tmp_path / "f")]) == 0
    plain = Net(1)
    load_full(tmp_path / "f", plain)
    equal(dict(plain.state_dict()), saved[0])
    assert main(["checkpoint", "show", "--verify", str(tmp_path / "f")]) == 0
    assert "every file as it was saved" in capsys.readouterr().out
    assert main(["checkpoint", "convert", str(tmp_path / "f"), str(tmp_path / "g")]) == 0

    def get(rank: int) -> Any:
        model = shard(Net(7))
        load_checkpoint(tmp_path / "g", model)
        return dict(state_dict(model))

    for state in run_ranks(get, 2):
        equal(state, saved[0])
    capsys.readouterr()
    assert main(["checkpoint", "convert", str(tmp_path / "f"), str(tmp_path / "g")]) == 2
    assert "not empty" in capsys.readouterr().err
    assert (
        main(["checkpoint", "convert", "--prefix", "x", str(tmp_path / "c"), str(tmp_path / "h")])
        == 2
    )
    assert "nothing below --prefix 'x'" in capsys.readouterr().err
    damage(next((tmp_path / "c").rglob("__1_0.distcp")), "damaged")
    assert main(["checkpoint", "show", "--verify", str(tmp_path / "c")]) == 1
    assert "__1_0.distcp" in capsys.readouterr().err
    assert main(["checkpoint", "show", str(tmp_path / "nowhere")]) == 2
    file = next((tmp_path / "f").glob("*.safetensors"))
    data = file.read_bytes()
    file.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
    for source in "cf":
        assert main(["checkpoint", "convert", str(tmp_path / source), str(tmp_path / "i")]) == 1
        assert "damaged: its checksum is not what was saved" in capsys.readouterr().err
    assert not (tmp_path / "i").exists()


def test_show_says_of_what_it_has_no_checksum(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Of torch's own checkpoints there is none; nor where somebody removed the list of them."""
    run_ranks(save, 3, tmp_path / "c")
    assert main(["checkpoint", "convert", str(tmp_path / "c"), str(tmp_path / "f")]) == 0
    manifest = next((tmp_path / "c").rglob("manifest.json"))
    content = json.loads(manifest.read_text())
    gone, _ = content["files"].popitem()
    manifest.write_text(json.dumps(content))
    capsys.readouterr()
    assert main(["checkpoint", "show", "--verify", str(tmp_path / "c")]) == 0
    assert capsys.readouterr().out.endswith(f"without a checksum of {gone}\n")
    manifest.unlink()
    index = next((tmp_path / "f").glob("*.index.json"))
    kept = json.loads(index.read_text())
    index.write_text(json.dumps({"weight_map": kept["weight_map"]}))
    for folder in "cf":
        capsys.readouterr()
        assert main(["checkpoint", "show", "--verify", str(tmp_path / folder)]) == 0
        assert "without a checksum of " in capsys.readouterr().out
        assert main(["checkpoint", "show", str(tmp_path / folder)]) == 0
        assert "checksum" not in capsys.readouterr().out


def test_an_empty_path_is_no_folder(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["checkpoint", "show", ""])
    assert ended.value.code == 2 and "an empty text" in capsys.readouterr().err
