"""The examples run, and what they print is what they claim to show.

Some start their ranks themselves, as for a reader; the others run in ranks that are forked here.
"""

from __future__ import annotations

import argparse
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import fsdp_compose
from fsdp_compose import load_checkpoint, load_full

from processes import alive, wait_until
from scripts import run_script

ROOT = Path(__file__).resolve().parent.parent
EXAMPLES = ROOT / "examples"
sys.path.insert(0, str(EXAMPLES))

import lora  # noqa: E402
import tensor_parallel  # noqa: E402
import text  # noqa: E402
from gpt import GPT  # noqa: E402

NAMES = "dpo gradient_penalty lora muon stream_weights tensor_parallel".split()


def command(name: str, *args: object) -> list[str]:
    return [sys.executable, str(EXAMPLES / f"{name}.py"), *map(str, args)]


def run_forked(name: str, *args: object) -> str:
    return run_script(EXAMPLES / f"{name}.py", *args)


def numbers(pattern: str, printed: str) -> list[float]:
    found = re.findall(pattern, printed)
    assert found, f"{pattern!r} is not in what was printed:\n{printed}"
    return [float(v) for v in found]


def server_of(printed: str) -> int:
    return int(numbers(r"server (\d+)", printed)[0])


@pytest.mark.slow
def test_lora_reduces_adapters_only_and_merges(tmp_path: Path) -> None:
    file, folder = tmp_path / "adapters.pt", tmp_path / "merged"
    printed = run_forked(
        "lora", "--base-steps", 30, "--steps", 30, "--save", file, "--export", folder
    )
    adapters = torch.load(file, weights_only=True)
    upper = range(lora.CONFIG.n_layer // 2, lora.CONFIG.n_layer)
    assert {int(name.split(".")[1]) for name in adapters} == set(upper)
    assert all(name.endswith((".A", ".B")) for name in adapters) and len(adapters) == 16
    base, adapted = re.findall(r"(\d+) reduce-scatters, (\d+) bytes", printed)
    assert int(base[0]) == lora.CONFIG.n_layer + 1
    assert int(adapted[0]) == len(upper)
    # Of what is reduced over two ranks, half comes from the other.
    held = sum(t.nbytes for t in adapters.values())
    assert held / 2 <= int(adapted[1]) < held / 2 + 16 * len(upper) < int(base[1]) / 10
    before, after = numbers(r"held-out loss \w+ ([\d.]+)", printed)
    assert after < before - 0.02
    assert numbers(r"logits differ by at most (\S+)", printed)[0] < 1e-4
    plain = GPT(lora.CONFIG)
    assert load_full(folder, plain) == ([], [])
    source = text.split(Path(argparse.__file__).read_text()).held_out
    with torch.no_grad():
        loss = plain(*text.windows(source, lora.CONFIG.block_size))[1]
    assert float(loss) == pytest.approx(after, abs=2e-4)


@pytest.mark.slow
def test_tensor_parallel_equals_one_process(tmp_path: Path) -> None:
    printed = run_forked("tensor_parallel", "--steps", 6, "--save", tmp_path / "saved")
    loss, plain = (numbers(p + r" ([\d.]+)", printed) for p in ("loss", "process:"))
    assert len(loss) == 6 and loss == pytest.approx(plain, abs=1e-4) and loss[-1] < loss[0] - 1
    norm, plain = (numbers(p, printed) for p in (r"norm ([\d.]+)", r"process: \S+ ([\d.]+)"))
    assert norm == pytest.approx(plain, rel=1e-3)
    assert numbers(r"logits differ by (\S+)", printed)[0] < 1e-4
    alone = GPT(tensor_parallel.CONFIG)
    load_checkpoint(tmp_path / "saved", alone, tensor_parallel.adamw(alone))


@pytest.mark.slow
def test_dpo_learns_and_reduces_once_a_step() -> None:
    """DPO learns preferences and reduces the policy once a step."""
    printed = run_forked("dpo", "--base-steps", 24, "--steps", 21)
    loss = numbers(r"loss ([\d.]+)", printed)
    assert loss[0] == 0.6931 and loss[-1] < 0.6  # -log sigmoid(0) while policy is reference
    reduces, units = re.findall(r"reduce-scatters a step: (\d+), units: (\d+)", printed)[0]
    assert reduces == units == "4"
    ((before, after),) = re.findall(r"accuracy on unseen pairs: (\S+), then (\S+)", printed)
    before, after = float(before), float(after)
    assert before == 0.5 and after > 0.65


@pytest.mark.slow
def test_gradient_penalty_equals_one_process() -> None:
    """Gradient penalty equals one process and learns."""
    printed = run_forked("gradient_penalty", "--steps", 21)
    ((loss, plain),) = re.findall(r"loss (\S+), one process: ([\d.]+);", printed)
    assert float(loss) == pytest.approx(float(plain), abs=2e-6)
    assert numbers(r"gradients differ by (\S+)", printed)[0] < 1e-5
    distance = numbers(r"energy distance (\S+)", printed)
    assert distance[-1] < distance[0] / 2


@pytest.mark.slow
def test_streamed_weights_give_the_same_loss(capsys: pytest.CaptureFixture[str]) -> None:
    printed = run_forked("stream_weights", "--steps", 6, "--every", 3)
    printed += capsys.readouterr().out  # the server's
    trained, served = (
        numbers(r + r" held-out loss ([\d.]+)", printed) for r in (r"step \d+:", r"server \d+:")
    )
    assert trained == pytest.approx(served, abs=2e-5) and len(trained) == 2
    assert trained[0] != trained[1]
    server = server_of(printed)
    wait_until(lambda: not alive(server), 20)


@pytest.mark.slow
def test_streaming_stops_at_ctrl_c(tmp_path: Path) -> None:
    args = command("stream_weights", "--steps", 10**6, "--every", 1, "--nproc", 1)
    with (
        (tmp_path / "log").open("w+") as log,
        subprocess.Popen(args, cwd=ROOT, stdout=log, stderr=log, start_new_session=True) as process,
    ):
        try:
            wait_until(lambda: "server" in (tmp_path / "log").read_text(), 120)
            assert process.poll() is None
            os.kill(process.pid, signal.SIGINT)
            assert process.wait(60) == 130
        finally:
            process.kill()
    server = server_of((tmp_path / "log").read_text())
    wait_until(lambda: not alive(server), 20)


@pytest.mark.parametrize("name", NAMES)
def test_examples_are_short_and_use_public_names_only(name: str) -> None:
    source = (EXAMPLES / f"{name}.py").read_text()
    assert source.count("\n") <= 120
    assert not re.search(r"fc\._|\b(?:from|import) fsdp_compose\.(?!cli.launch\b)", source)
    used = set(re.findall(r"\bfc\.(\w+)", source))
    assert used and used <= set(fsdp_compose.__all__)
