"""The commands that look: plan, trace, doctor, bench, checkpoint show; what they say to users."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import fsdp_compose as fc
from fsdp_compose.__main__ import main
from fsdp_compose.cli import doctor, launch, progress
from fsdp_compose.cli.checkpoint import _fold

from scripts import run_alone

ROOT = Path(__file__).resolve().parents[2]
ENVIRONMENT = {**os.environ, "PYTHONPATH": str(ROOT)}
MODEL = """
from __future__ import annotations
from dataclasses import dataclass
import torch
from torch import nn
from beside_that_model import WIDTH
@dataclass
class Sizes:
    width: int = WIDTH
class Block(nn.Sequential):
    def __init__(self): super().__init__(nn.Linear(64, 64), nn.ReLU())
def model(): return nn.Sequential(nn.Embedding(100, 64), Block(), Block(), nn.Linear(64, 100))
def broken(): raise KeyError("no such thing")
def number(): return 3
def on_meta(): return nn.Linear(4, Sizes().width) if torch.empty(1).is_meta else 3
made = nn.Linear(4, 4)
def broken_lines(): raise ValueError("one\\ntwo")
def leave(): raise SystemExit(3)
"""


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "a_model_of_mine.py"
    path.write_text(MODEL)
    (tmp_path / "beside_that_model.py").write_text("WIDTH = 64")
    return path


@pytest.fixture(autouse=True)
def _restore_path(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", list(sys.path))


def test_plan_prints_draws_and_says_whether_it_fits(
    file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("matplotlib")
    options = ["--world-size", "4", "--units", "Block", "--units", "0", "--optimizer", "adamw"]
    options += ["--dtype", "bf16", "--reduce-dtype", "fp32", "--sample", "2x8:long"]
    assert main(["plan", f"{file}:model", *options, "--device-memory", "1GiB"]) == 0
    printed = capsys.readouterr().out
    assert "plan for Sequential: 4 units" in printed and "it fits: " in printed
    assert main(["plan", f"{file}:model", *options, "--device-memory", "10kB", "--json"]) == 1
    found = json.loads(capsys.readouterr().out)
    assert found["fits"] is False and found["units"][0]["buckets"][0]["reduce"] == "float32"
    drawn = [f"--{name}={tmp_path / name}.svg" for name in ("memory", "shards", "picture")]
    assert main(["plan", f"{file}:model", "--world-size", "2x2", *drawn]) == 0
    assert "<svg" in (tmp_path / "shards.svg").read_text()
    assert "2 replicas of 2 ranks" in capsys.readouterr().out
    for name, size in (("made", "20"), ("on_meta", "320")):
        assert main(["plan", f"{file}:{name}"]) == 0
        assert f"plan for Linear: 1 unit, {size} parameter" in capsys.readouterr().out


WRONG = {
    "names no model; wanted PATH:NAME": ["{file}"],
    "has no 'modle'; it has Block, Sizes, broken, broken_lines, dataclass, leave, made": [
        "{file}:modle"
    ],
    "broken() raised KeyError": ["{file}:broken"],
    "number() returned int; wanted an nn.Module": ["{file}:number"],
    "no_such.py does not exist": ["no_such.py:model"],
    "cannot be imported": ["no.such.package:model"],
    ": cannot be imported: ValueError: Empty module name": [":model"],
    ".: cannot be imported: TypeError": [".:model"],
    'SystemExit: 3; keep what a script runs below `if __name__ == "__main__":`': [
        "{folder}/leaves.py:model"
    ],
    "leave() raised SystemExit: 3": ["{file}:leave"],
    "broken_lines() raised ValueError: one two": ["{file}:broken_lines"],
    "wanted at most 1,048,576 ranks": ["{file}:model", "--world-size", "99999999999"],
    "config.json does not exist": ["config.json"],
    "--world-size is '8x'": ["{file}:model", "--world-size", "8x"],
    "--sample is '8by8'": ["{file}:model", "--sample", "8by8"],
    "'long' is not known; wanted one of fp32, bf16, fp16.": [
        "{file}:model",
        "--dtype",
        "long",
    ],
    "bad.py: cannot be imported: SyntaxError": ["{folder}/bad.py:model"],
    "wanted replicas x shards, as 2x4": ["{file}:model", "--strategy", "hybrid_shard"],
    "wanted a number of ranks": ["{file}:model", "--strategy", "zero1", "--world-size", "2x4"],
    "device_memory is '80 gigs'": ["{file}:model", "--device-memory", "80 gigs"],
    "optimizer 'adamv' is not known": ["{file}:model", "--optimizer", "adamv"],
    "matches no submodule": ["{file}:model", "--units", "Blok"],
    "'[0-' is not a pattern of names": ["{file}:model", "--units", "[0-"],
    "plot_memory needs": ["{file}:model", "--memory", "m.png"],
}


@pytest.mark.parametrize("said", WRONG)
def test_wrong_plans_are_one_line(
    said: str, file: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    (file.parent / "bad.py").write_text("def model:")
    (file.parent / "leaves.py").write_text("raise SystemExit(3)")
    words = [word.format(file=file, folder=file.parent) for word in WRONG[said]]
    assert main(["plan", *words]) == 2
    errors = capsys.readouterr().err
    assert errors.startswith("fsdp-compose: ") and said in errors, errors
    assert errors.count("\n") == 1


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["run", "--simulate", "2", "--nproc", "3"], "--nproc and --simulate both say how many"),
        (["run", "--seed", "5"], "--seed is the order of a simulation: pass --simulate N"),
        (["trace", "--out", "/dev/null/folder"], "--out is /dev/null/folder, which cannot be made"),
    ],
)
def test_options_without_effect_are_refused(
    words: list[str], said: str, file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*words, str(file)]) == 2
    assert said in capsys.readouterr().err


def test_trace_records_every_rank(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("matplotlib")
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    script = tmp_path / "script.py"
    script.write_text(
        "import sys, torch, torch.distributed as dist, fsdp_compose as fc\n"
        "assert sys.argv[1:] == ['--steps', '2'], sys.argv\n"
        "dist.init_process_group('gloo')\n"
        "torch.manual_seed(0)\n"
        "model = fc.fully_shard(torch.nn.Linear(8, 8))\n"
        "for _ in range(2): model(torch.ones(1, 8)).sum().backward()\n"
        "dist.destroy_process_group()\n"
        "sys.exit()\n"
    )
    command = ["trace", "--out", "out", "-m", "script", "--steps", "2"]
    code, printed, errors = run_alone(lambda: main(command), tmp_path)
    assert code == 0, printed + errors
    events = json.loads((tmp_path / "out" / "trace.json").read_text())["traceEvents"]
    assert {event["pid"] for event in events} == {0, 1}
    assert sorted(p.name for p in (tmp_path / "out").iterdir()) == [
        "memory.svg", "timeline.svg", "trace.json",
    ]  # fmt: skip
    assert "Perfetto" in printed


def test_trace_of_a_script_that_fails(
    file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """What was recorded until then is joined; where nothing was, that is said."""
    codes = [7, 0]

    def launch(module: str, words: list[str], **options: Any) -> int:
        if codes[0]:
            (Path(words[0]) / "rank1.json").write_text('{"traceEvents": [{"pid": 1}]}')
        return codes.pop(0)

    monkeypatch.setattr("fsdp_compose.__main__.launch", launch)
    command = ["trace", "--out", str(tmp_path / "out"), str(file)]
    assert main(command) == 7
    assert [p.name for p in (tmp_path / "out").iterdir()] == ["trace.json"]
    assert main(command) == 2 and "nothing was recorded" in capsys.readouterr().err


def test_doctor_finds_nothing_wrong_here(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(launch.AGENT_STORE, "True")  # as in what torchrun starts
    assert main(["doctor", "--json"]) == 0
    findings = json.loads(capsys.readouterr().out)
    said = " ".join(finding["what"] for finding in findings)
    for word in (
        "Python",
        "torch",
        "backends: gloo",
        "interfaces: ",
        "cores",
        "two ranks gathered",
    ):
        assert word in said, word


def test_doctor_says_what_is_wrong(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "eth99")
    monkeypatch.setenv("MASTER_PORT", "none")
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    monkeypatch.setattr(torch, "__version__", "2.4.0")
    monkeypatch.setattr(doctor, "find_spec", lambda name: name == "matplotlib")
    assert main(["doctor"]) == 1  # the two ranks cannot meet over eth99 either
    printed = capsys.readouterr().out
    for word in (
        "WRONG  torch 2.4.0 is too old\n       -> pip install",
        "GLOO_SOCKET_IFNAME names 'eth99', which is not there\n       -> set it to one of lo",
        "MASTER_PORT is set, RANK, WORLD_SIZE, MASTER_ADDR is not",
        "MASTER_PORT is 'none'",
        "WRONG  optree is not installed\n       -> pip install optree",
        "note   rich is not installed",
        "two ranks could not gather: ",
        "6 of these are wrong",
    ):
        assert word in printed, printed


def test_doctor_goes_on_without_torch(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A torch that cannot be imported is one finding, and the rest is looked at."""
    monkeypatch.setitem(sys.modules, "torch", None)
    monkeypatch.setattr(doctor, "PATIENCE", 0.0)  # what the two ranks would say comes later
    assert main(["doctor"]) == 1
    printed = capsys.readouterr().out
    for word in (
        "WRONG  torch cannot be imported: ",
        " cores",
        "WRONG  two ranks did not gather within 0 s",
        "2 of these are wrong",
    ):
        assert word in printed, printed


def test_doctor_looks_at_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda index: "H200")
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda index: ((9 - 8 * index) << 28, 0))
    monkeypatch.setattr(torch.distributed, "is_nccl_available", lambda: True)
    said = "\n".join(map(str, doctor.check_backends()))
    assert "nccl" in said and "ok     2 GPUs, H200\nWRONG  a GPU has 0.2 GiB of free" in said
    monkeypatch.setattr(torch.distributed, "is_nccl_available", lambda: False)
    assert "WRONG  2 GPUs, but no NCCL" in str([*doctor.check_backends()][-1])
    monkeypatch.setattr(torch.distributed, "is_available", lambda: False)
    (finding,) = doctor.check_backends()
    assert "torch.distributed is not available" in finding.what


def test_doctor_reads_variables_as_they_are_meant(monkeypatch: pytest.MonkeyPatch) -> None:
    """NCCL's list of interfaces that are left out may name some that are not there; 0 is off."""
    monkeypatch.setenv("NCCL_SOCKET_IFNAME", "^docker9,eth99")
    monkeypatch.setenv("FSDP_COMPOSE_DEBUG", "0")
    said = " ".join(finding.what for finding in doctor.check_network())
    assert "which is not there" not in said and "DEBUG" not in said
    monkeypatch.setenv("NCCL_SOCKET_IFNAME", "=docker9")
    monkeypatch.setenv("FSDP_COMPOSE_DEBUG", "1")
    said = " ".join(finding.what for finding in doctor.check_network())
    assert "NCCL_SOCKET_IFNAME names 'docker9', which is not there" in said and "DEBUG is" in said
    monkeypatch.setenv("OMP_NUM_THREADS", "9999")
    monkeypatch.setenv("MASTER_PORT", "70000")

    def find_no_host(name: str) -> str:
        raise OSError(name)

    monkeypatch.setattr(socket, "gethostbyname", find_no_host)
    said = " ".join(
        str(f) for check in (doctor.check_machine, doctor.check_network) for f in check()
    )
    for word in ("9999 is more than the cores", "MASTER_PORT is '70000'", "cannot be resolved"):
        assert word in said, said


def test_doctor_takes_the_port_of_an_ended_job(monkeypatch: pytest.MonkeyPatch) -> None:
    """The system remembers its connections for a minute; a port that is listened on is taken."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = server.getsockname()
        for name, value in (("RANK", 0), ("WORLD_SIZE", 1), ("MASTER_PORT", address[1])):
            monkeypatch.setenv(name, str(value))
        monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
        with socket.create_connection(address):
            server.accept()[0].close()  # first, so that this side remembers
        (taken,) = doctor._check_launch()
        assert taken.state == "wrong" and "cannot be used" in taken.what
    assert not list(doctor._check_launch())


def test_bench_lists_runs_and_refuses(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench"]) == 0
    listed = capsys.readouterr().out.split()
    assert {"host_overhead", "padding", "step_time"} <= set(listed)
    assert not {"common", "shapes"} & set(listed)  # which are no benchmarks
    assert main(["bench", "speed"]) == 2
    refused = capsys.readouterr().err
    assert "no benchmark 'speed'; there are " in refused
    assert ", ".join(listed) in refused
    assert main(["bench", "padding", "--help"]) == 0


def test_show_folds_names_that_are_alike(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = fc.fully_shard(nn.Sequential(*(nn.Linear(3, 3) for _ in range(5))))
    fc.save_checkpoint(tmp_path / "s", model)
    assert main(["checkpoint", "show", str(tmp_path / "s")]) == 0
    printed = capsys.readouterr().out
    assert "1 piece\n" in printed and printed.endswith("saved by 1 rank\n")
    fc.save_full(tmp_path / "f", model)
    assert main(["checkpoint", "show", str(tmp_path / "f")]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines[:-1]] == ["{0..4}.weight", "{0..4}.bias"]
    assert lines[-1].startswith("10 entries, 60 elements")
    assert main(["checkpoint", "show", "--all", str(tmp_path / "f")]) == 0
    assert "3.weight" in capsys.readouterr().out
    assert main(["checkpoint", "show", str(tmp_path / "nowhere")]) == 2
    assert "nowhere does not exist." in capsys.readouterr().err
    assert main(["convert", str(tmp_path / "nowhere"), str(tmp_path / "g")]) == 2
    (tmp_path / "file").touch()
    assert main(["convert", str(tmp_path / "s"), str(tmp_path / "file")]) == 2
    assert "file is a file; name a folder" in capsys.readouterr().err
    own = tmp_path / "own" / "model-00001-of-00002.safetensors"  # no conversion was killed here
    own.parent.mkdir()
    own.touch()
    assert main(["convert", str(tmp_path / "s"), str(own.parent)]) == 2 and own.exists()
    for source, target in (("f", "deep"), ("deep", "out")):
        words = ["convert", "--prefix", "a.b", str(tmp_path / source), str(tmp_path / target)]
        assert main(words) == 0
    rows = [("a.0", "x"), ("a.1", "x"), ("a.3", "x"), ("b.0", "x"), ("b.1", "y"), ("b.2", "x")]
    assert [row[0] for row in _fold(rows)] == ["a.0", "a.1", "a.3", "b.0", "b.2", "b.1"]
    rows = [("a*.0", "x"), ("a*.1", "x"), ("a*.2", "x"), ("a7.0", "x")]  # names hold anything
    assert [row[0] for row in _fold(rows)] == ["a*.{0..2}", "a7.0"]


def test_a_bar_is_shown_after_two_seconds(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def seen(is_terminal: bool, now: Callable[[], float]) -> str:
        monkeypatch.setattr(sys.stderr, "isatty", lambda: is_terminal, raising=False)
        monkeypatch.setattr(progress.time, "monotonic", now)
        assert list(progress.follow(list(range(4)), "writing")) == [0, 1, 2, 3]
        return capsys.readouterr().err

    def clock(step: float) -> Callable[[], float]:
        ticks: Iterator[float] = iter([step * i for i in range(9)])
        return lambda: next(ticks)

    assert seen(True, clock(0.4)) == "" == seen(False, clock(2.0))
    assert "3/4" in seen(True, clock(1.1))


def run_command(words: list[str], is_forked: bool, folder: Path) -> tuple[object, str, str]:
    """Exit code, output and errors of the command line; a fork has no ranks of its own to print."""
    if is_forked:
        return run_alone(lambda: main(words), folder)
    command = [sys.executable, "-m", "fsdp_compose", *words]
    done = subprocess.run(
        command, check=False, cwd=folder, env=ENVIRONMENT, text=True, capture_output=True,
        timeout=60,
    )  # fmt: skip
    return done.returncode, done.stdout, done.stderr


def test_a_launcher_gives_signals_back() -> None:
    """What the caller does at Ctrl-C, and that it hears of no closed terminal under nohup."""
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        for signum in (signal.SIGINT, signal.SIGHUP):
            handler = signal.getsignal(signum)
            with launch._signals_to(lambda signum: None):
                assert (signal.getsignal(signum) is handler) == (signum == signal.SIGHUP)
            assert signal.getsignal(signum) is handler
    finally:
        signal.signal(signal.SIGHUP, before)


@pytest.mark.parametrize("how", ["--nproc", "--simulate"])
def test_run_takes_a_module_and_its_arguments(how: str, tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "inside.py").touch()
    (tmp_path / "mine" / "program.py").write_text(
        "import os, sys, mine.inside\n"
        "print(os.environ['RANK'], 'of', os.environ['WORLD_SIZE'], __name__, sys.argv[1:])\n"
        "sys.exit()\n"
    )
    words = ["run", how, "2", "-m", "mine.program", "-x"]
    code, printed, errors = run_command(words, how == "--simulate", tmp_path)
    assert code == 0, errors
    for rank in range(2):
        assert f"{rank} of 2 __main__ ['-x']" in printed


def test_a_script_that_is_not_there(capsys: pytest.CaptureFixture[str]) -> None:
    for command in ("run", "trace"):
        assert main([command, "nowhere.py"]) == 2
        assert main([command, "-m", "no_such_package.train"]) == 2
        said = capsys.readouterr().err
        assert "no such script: nowhere.py" in said
        assert "no such module: no_such_package.train; it is looked for here" in said


@pytest.mark.parametrize(
    ("words", "command"),
    [("run --nprocs 2 train.py", "run"), ("checkpoint show a b", "checkpoint show")],
)
def test_an_unknown_argument(words: str, command: str, capsys: pytest.CaptureFixture[str]) -> None:
    """The command that was asked shows what it takes."""
    with pytest.raises(SystemExit):
        main(words.split())
    said = capsys.readouterr().err
    assert f"fsdp-compose {command}: error: unrecognized arguments: " in said
    assert f"usage: fsdp-compose {command} [-h]" in said


@pytest.mark.parametrize("is_full", [True, False])
def test_output_that_nobody_takes(is_full: bool, file: Path) -> None:
    """A full disk is one line, and a reader that has seen enough is no error."""
    saved = file.parent / "saved"
    fc.save_full(saved, fc.fully_shard(nn.Linear(2, 2)))
    words = ["plan", f"{file}:model"] if is_full else ["checkpoint", "show", "--all", str(saved)]
    read, target = os.pipe()
    os.close(read)
    if is_full:
        target = os.open("/dev/full", os.O_WRONLY)
    script = "import sys; from fsdp_compose.__main__ import main; sys.exit(main(sys.argv[1:]))"
    done = subprocess.run(
        [sys.executable, "-c", script, *words],
        stdout=target,
        stderr=subprocess.PIPE,
        text=True,
        env=ENVIRONMENT,
        check=False,
    )
    said = "fsdp-compose: [Errno 28] No space left on device\n" if is_full else ""
    assert (done.returncode, done.stderr) == (1 if is_full else 0, said)


@pytest.mark.parametrize("how", ["--nproc", "--simulate"])
def test_run_returns_what_a_script_exits_with(how: str, tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text("import os, sys\nsys.exit(3 if os.environ['RANK'] == '1' else 0)\n")
    code, _, errors = run_command(["run", how, "2", str(script)], how == "--simulate", tmp_path)
    said = "1 exited with code 3" if how == "--nproc" else "1 of 2: the script ended with 3"
    lines = [line for line in errors.splitlines() if line.startswith("fsdp-compose: ")]
    assert code == 3 and lines[0].startswith(f"fsdp-compose: rank {said}"), errors
    assert "Traceback" not in errors
    assert how == "--nproc" or len(errors.splitlines()) == 1


def test_a_reader_of_ranks_that_has_seen_enough(tmp_path: Path) -> None:
    """The ranks run to their end, and nothing says that one of the launcher's threads failed."""
    script = tmp_path / "script.py"
    script.write_text(
        "import os\nrank = os.environ['RANK']\n"
        "for _ in range(9000 * int(rank)): print('line')\n"
        f"open(r'{tmp_path}/' + rank, 'w').close()\n"
    )
    command = [sys.executable, "-m", "fsdp_compose", "run", "--nproc", "2", str(script)]
    read, target = os.pipe()
    os.close(read)
    done = subprocess.run(
        command, stdout=target, stderr=subprocess.PIPE, text=True, env=ENVIRONMENT, check=False
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert (tmp_path / "0").exists() and (tmp_path / "1").exists()
