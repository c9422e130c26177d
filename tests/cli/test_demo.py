"""The example, the launcher and the command line: what a newcomer runs first."""

from __future__ import annotations

import math
import os
import pty
import re
import runpy
import signal
import subprocess
import sys
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

from processes import alive, wait_until
from scripts import run_alone, run_script

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "examples"))

import demo  # noqa: E402
import demo_report  # noqa: E402
import text  # noqa: E402
import train_gpt  # noqa: E402
from gpt import GPT, Block, GPTConfig  # noqa: E402

from fsdp_compose import __main__ as command_line  # noqa: E402

TINY = GPTConfig(vocab_size=11, block_size=8, n_layer=2, n_head=2, n_embd=8)


def cli(*args: str | Path, timeout: float = 120.0) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "fsdp_compose", *map(str, args)]
    return subprocess.run(
        command, check=False, cwd=ROOT, text=True, input="", capture_output=True, timeout=timeout
    )


@contextmanager
def background(*args: str | Path):
    """The command line, started; killed at the end if it still runs."""
    command = [sys.executable, "-m", "fsdp_compose", *map(str, args)]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, cwd=ROOT, stdout=pipe, stderr=pipe, text=True) as process:
        try:
            yield process
        finally:
            process.kill()


@pytest.fixture
def script(tmp_path):
    """Writes a script of one rank; the lines may use ``rank``, ``os``, ``sys`` and ``time``."""

    def write(*lines: str) -> Path:
        path = tmp_path / "script.py"
        head = [
            "import os, signal, sys, time; from pathlib import Path",
            "rank = int(os.environ['RANK'])",
        ]
        path.write_text("\n".join([*head, *lines]) + "\n")
        return path

    return write


# The model


def test_gpt_shapes():
    model = GPT(TINY)
    idx = torch.randint(11, (3, 5))
    assert model(idx).shape == (3, 5, 11)
    logits, loss = model(idx, idx)
    assert logits.shape == (3, 5, 11)
    assert loss.shape == () and loss.dtype == torch.float32
    assert sum(isinstance(m, Block) for m in model.modules()) == TINY.n_layer


def test_gpt_default_is_a_few_million_parameters():
    """The default GPT is a few million parameters over bytes."""
    assert GPTConfig().vocab_size == 256
    with torch.device("meta"):
        assert 2e6 < sum(p.numel() for p in GPT(GPTConfig()).parameters()) < 5e6


def test_gpt_init_follows_the_seed():
    def build(seed):
        torch.manual_seed(seed)
        return torch.cat([p.flatten() for p in GPT(TINY).parameters()])

    assert torch.equal(build(0), build(0))
    assert not torch.equal(build(0), build(1))


def test_gpt_starts_at_the_uniform_loss():
    torch.manual_seed(0)
    idx = torch.randint(11, (16, 8))
    assert float(GPT(TINY)(idx, idx)[1].detach()) == pytest.approx(math.log(11), abs=0.02)


def test_gpt_is_causal():
    model = GPT(TINY)
    idx = torch.randint(11, (1, 8))
    later = idx.clone()
    later[0, 5:] = (later[0, 5:] + 1) % 11
    same = torch.isclose(model(idx), model(later)).all(-1)[0]
    assert same[:5].all() and not same[5:].any()


def test_gpt_tied_weights_are_one_parameter():
    tied = GPT(GPTConfig(vocab_size=11, block_size=8, n_layer=1, n_embd=12, tie_weights=True))
    assert tied.lm_head.weight is tied.wte.weight
    assert len(list(tied.parameters())) == len(list(GPT(TINY).parameters())) - 12 - 1


def test_gpt_checkpointing_changes_no_gradient():
    model = GPT(TINY)
    idx = torch.randint(11, (2, 8))
    grads = []
    for model.activation_checkpointing in (False, True):
        model.zero_grad()
        model(idx, idx)[1].backward()
        grads.append([p.grad.clone() for p in model.parameters()])
    assert all(map(torch.equal, *grads))


def test_gpt_generates_within_the_block_size():
    model = GPT(TINY)
    prompt = torch.randint(11, (2, 3))
    out = model.generate(prompt, 12)  # longer than the block
    assert out.shape == (2, 15) and torch.equal(out[:, :3], prompt)
    assert torch.equal(model.generate(prompt, 9, 0.0), model.generate(prompt, 9, top_k=1))


def test_gpt_names_what_is_wrong():
    with pytest.raises(ValueError, match="n_embd=10 and n_head=3"):
        GPTConfig(n_embd=10, n_head=3)
    with pytest.raises(ValueError, match=r"9 tokens long.*block_size is 8"):
        GPT(TINY)(torch.zeros(1, 9, dtype=torch.long))


# The data and the schedule


def test_documentation_has_every_paragraph_once():
    whole = text.documentation()
    assert len(whole) > 200_000
    paragraphs = whole.split("\n\n")
    assert len(set(paragraphs)) == len(paragraphs)


def test_split_keeps_every_byte_on_one_side():
    given = "".join(chr(32 + i % 90) for i in range(1000))
    corpus = text.split(given, piece=10, every=5)
    pieces = [given[i : i + 10].encode() for i in range(0, 1000, 10)]
    held_out = b"".join(p for i, p in enumerate(pieces) if i % 5 == 4)
    train = b"".join(p for i, p in enumerate(pieces) if i % 5 != 4)
    assert bytes(corpus.held_out.tolist()) == held_out
    assert bytes(corpus.train.tolist()) == train


def test_split_refuses_a_text_that_is_too_short():
    """Split refuses a text too short to hold anything out."""
    with pytest.raises(ValueError, match=r"90 bytes long.*longer than 90"):
        text.split("x" * 90, piece=10)
    assert len(text.split("x" * 91, piece=10).held_out) == 1


def test_unigram_entropy():
    def entropy(*values):
        return text.unigram_entropy(torch.tensor(values, dtype=torch.uint8))

    assert entropy(7, 7, 7) == 0.0
    assert entropy(*range(256)) == pytest.approx(math.log(256))
    assert entropy(1, 1, 1, 2) == pytest.approx(-0.75 * math.log(0.75) - 0.25 * math.log(0.25))


def test_batches_are_a_function_of_the_step():
    """Batches are a function of the step and shares make the whole."""
    data = torch.arange(200, dtype=torch.uint8)
    batches = text.Batches(data, rows=6, block=5, seed=3)
    inputs, targets = batches.full(4)
    assert inputs.shape == targets.shape == (6, 5)
    assert torch.equal(targets, inputs + 1)
    assert torch.equal(batches.full(4)[0], inputs)
    assert not torch.equal(batches.full(5)[0], inputs)
    assert torch.equal(torch.cat([batches.share(4, rank, 3)[0] for rank in range(3)]), inputs)


def test_windows_follow_each_other():
    inputs, targets = text.windows(torch.arange(11, dtype=torch.uint8), 3)
    assert inputs.tolist() == [[0, 1, 2], [3, 4, 5], [6, 7, 8]]
    assert targets.tolist() == [[1, 2, 3], [4, 5, 6], [7, 8, 9]]


def test_learning_rate_warms_up_and_falls_to_a_tenth():
    recipe = train_gpt.Recipe(TINY, torch.float32, 100, 10, 2.0, 0.0, 1.0, 0)
    rates = [recipe.lr(step) for step in range(101)]
    assert rates[0] == pytest.approx(0.2) and rates[9] == pytest.approx(2.0)
    assert rates[:10] == sorted(rates[:10])
    assert rates[10:] == sorted(rates[10:], reverse=True)
    assert rates[100] == pytest.approx(0.2)


def test_memory_is_measured():
    now, peak = (
        f(torch.device("cpu")) for f in (demo_report.memory_in_use, demo_report.peak_memory)
    )
    assert 2**24 < now <= peak * 1.05


# The launcher


def test_run_gives_ranks_environment_and_arguments(script):
    """Run gives every rank its environment and passes arguments on."""
    path = script(
        "names = ('RANK', 'LOCAL_RANK', 'WORLD_SIZE', 'LOCAL_WORLD_SIZE', 'MASTER_ADDR')",
        "found = [*map(os.environ.get, names), int(os.environ['MASTER_PORT']) > 0, sys.argv[1:]]",
        "found += [os.fstat(0).st_rdev == os.stat(os.devnull).st_rdev]  # only rank 0 is typed to",
        "print(*found)",
        "print(int(os.environ['OMP_NUM_THREADS']) >= 1, file=sys.stderr)",
    )
    done = cli("run", "--nproc", "2", path, "--steps", "3", "--", "x")
    assert done.returncode == 0, done.stderr
    tail = "2 2 127.0.0.1 True ['--steps', '3', '--', 'x']"
    lines = [f"0 0 {tail} False", f"[rank 1] 1 1 {tail} True"]
    assert sorted(done.stdout.splitlines()) == lines
    assert sorted(done.stderr.splitlines()) == ["True", "[rank 1] True"]


def test_what_the_terminal_cannot_show_is_escaped(script, monkeypatch):
    """What a rank writes is forwarded to its end all the same."""
    monkeypatch.setenv("PYTHONIOENCODING", "ascii")
    path = script("if rank == 1: os.write(1, b'caf\\xc3\\xa9 \\xff\\n' * 9000)")
    done = cli("run", "--nproc", "2", path)
    assert done.returncode == 0, done.stderr
    assert done.stdout == "[rank 1] caf\\xe9 \\udcff\n" * 9000


def test_no_line_breaks_another(script):
    """One that rank 0 writes in pieces stays whole, and what is no text stays as it is."""
    path = script(
        "met = Path(__file__).with_suffix('.met')",
        "while rank == 1 and not met.exists(): time.sleep(0.01)",
        "if rank == 1: print('between')",
        "if rank == 0: os.write(1, b'first \\xff'); met.touch(); time.sleep(0.5)",
        "if rank == 0: os.write(1, b' last\\r\\n'); os.write(1, b'no end')",
    )
    words = [sys.executable, "-m", "fsdp_compose", "run", "--nproc", "2", str(path)]
    done = subprocess.run(words, capture_output=True, cwd=ROOT, check=False, timeout=60)
    assert done.returncode == 0, done.stderr
    assert done.stdout == b"[rank 1] between\nfirst \xff last\r\nno end"


def test_progress_is_forwarded_as_it_goes(script):
    """A bar that returns to the start of its line is seen before that line has ended."""
    path = script("for k in range(3): print(f' {k}', end='\\r')", "time.sleep(60)")
    with background("run", "--nproc", "1", path) as launcher:
        assert launcher.stdout.readline(3) == " 0\n"  # universal newlines
        launcher.send_signal(signal.SIGINT)
        launcher.communicate(timeout=60)


def test_rank_0_has_the_terminal(script, monkeypatch):
    """It can show a bar, and prints its lines whole; the others are forwarded."""
    monkeypatch.delenv("PYTHONUNBUFFERED", raising=False)
    path = script("sys.stdout.write(f'{rank} {sys.stdout.isatty()} {sys.stdout.write_through}\\n')")
    ours, theirs = pty.openpty()
    words = [sys.executable, "-m", "fsdp_compose", "run", "--nproc", "2", str(path)]
    done = subprocess.run(words, stdout=theirs, stderr=subprocess.PIPE, cwd=ROOT, check=False)
    assert done.returncode == 0, done.stderr
    said = os.read(ours, 1000).decode().split("\r\n")
    assert sorted(said) == ["", "0 True False", "[rank 1] 1 False True"]
    os.close(ours)
    os.close(theirs)


def test_ranks_started_by_a_rank_of_torchrun_meet(script, monkeypatch):
    """They keep their own store; torchrun has told its ranks that it keeps theirs."""
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "True")
    path = script(
        "from datetime import timedelta",
        "import torch.distributed as dist",
        "dist.init_process_group('gloo', timeout=timedelta(seconds=10))",
        "print(dist.get_world_size())",
    )
    done = cli("run", "--nproc", "2", path)
    assert done.returncode == 0 and "[rank 1] 2" in done.stdout, done.stderr


def test_a_failing_rank_is_named_and_ends_the_others(script):
    path = script(
        "if rank == 2: print('last words', file=sys.stderr); sys.exit(7)",
        "print(os.getpid(), flush=True)",
        "time.sleep(600)",
    )
    done = cli("run", "--nproc", "3", path)
    assert done.returncode == 7
    assert "[rank 2] last words" in done.stderr
    assert re.search(r"rank 2 exited with code 7; terminating ranks? 0", done.stderr)
    assert not any(alive(int(pid)) for pid in re.findall(r"\d+$", done.stdout, re.MULTILINE))


def test_the_rank_that_left_is_named(script):
    """The other ends first, with the exception about a connection that was closed."""
    path = script(
        "if rank == 0: raise RuntimeError('rank 1 does not answer')",
        "time.sleep(0.4)",
        "sys.exit(7)",
    )
    done = cli("run", "--nproc", "2", path)
    assert done.returncode == 7
    assert "rank 1 exited with code 7" in done.stderr and "rank 0 exited" not in done.stderr


def test_a_rank_that_ended_before_is_named(script):
    """As with fewer batches: the failure of the other follows from it."""
    done = cli("run", "--nproc", "2", script("if rank == 0: time.sleep(0.4); sys.exit(1)"))
    assert "rank 0 exited with code 1, after rank 1 had ended with code 0" in done.stderr


def test_a_killed_rank_is_named_with_its_signal(script):
    path = script(
        "if rank == 1: os.kill(os.getpid(), signal.SIGKILL)",
        "time.sleep(600)",
    )
    done = cli("run", "--nproc", "2", path)
    assert done.returncode == 128 + signal.SIGKILL
    assert "rank 1 was killed by SIGKILL; terminating rank 0" in done.stderr


def test_what_a_failed_rank_started_is_ended_too(script, tmp_path):
    path = script(
        "import subprocess",
        "child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)'],",
        "                         stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)",
        f"open({str(tmp_path / 'pid')!r}, 'w').write(str(child.pid))",
        "sys.exit(3)",
    )
    assert cli("run", "--nproc", "1", path).returncode == 3
    wait_until(lambda: not alive(int((tmp_path / "pid").read_text())), 10)


@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM])
def test_a_stopped_launcher_leaves_no_orphan(script, tmp_path, signum):
    path = script(
        # The last rank does not listen, so that it has to be killed.
        "if rank == 1: [signal.signal(s, signal.SIG_IGN) for s in (signal.SIGINT, signal.SIGTERM)]",
        f"open({str(tmp_path)!r} + f'/pid{{rank}}', 'w').write(f'{{os.getpid()}}.')",
        "time.sleep(600)",
    )
    files = [tmp_path / f"pid{rank}" for rank in range(2)]
    with background("run", "--nproc", "2", path) as launcher:
        wait_until(lambda: all(f.is_file() and f.read_text().endswith(".") for f in files))
        launcher.send_signal(signum)
        _, errors = launcher.communicate(timeout=60)
    assert launcher.returncode == 128 + signum
    assert f"{signum.name}: stopping ranks 0, 1" in errors
    assert not any(alive(int(f.read_text().rstrip("."))) for f in files)


def test_command_line_refuses_what_it_cannot_run(tmp_path, capsys):
    assert command_line.main(["run", str(tmp_path / "missing.py")]) == 2
    assert "no such script" in capsys.readouterr().err
    for wrong, says in (
        ([], "required: COMMAND"),
        (["run"], "required: SCRIPT\n"),
        (["run", "--nproc", "0", "x.py"], "--nproc: wants a whole number of at least 1, found '0'"),
        (["run", "--nproc", "two", "x.py"], "at least 1, found 'two'"),
        (["unheard-of"], "invalid choice: 'unheard-of'"),
    ):
        with pytest.raises(SystemExit, match="2"):
            command_line.main(wrong)
        assert says in capsys.readouterr().err
    with pytest.raises(SystemExit, match="0"):
        command_line.main(["--version"])
    assert capsys.readouterr().out.startswith("fsdp-compose ")


def test_demo_without_the_examples_says_where_they_are(monkeypatch, capsys, tmp_path):
    monkeypatch.setattr(command_line, "_DEMO", tmp_path / "examples" / "demo.py")
    assert command_line.main(["demo"]) == 2
    assert "run it from a checkout" in capsys.readouterr().err


# The demo

SMALL = ["--steps=8", "--resume-steps=3", "--parity-steps=3", "--layers=2", "--heads=2"]
SMALL += ["--width=32", "--block-size=32", "--batch-size=4", "--sample=20", "--gain=-9"]


@pytest.mark.slow
def test_demo_on_two_ranks(tmp_path):
    done = cli("demo", "--nproc", "2", "--", *SMALL, "--dtype=bf16", "--device=cpu",
               f"--out={tmp_path}", timeout=250)  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("[ok]") == 4 and "FAILED" not in done.stdout
    assert "3 of 3 bit-equal, final weights bit-equal" in done.stdout
    report = (tmp_path / "report.md").read_text()
    for part in ("| ranks | 2 (gloo, cpu) |", "unigram entropy", "## Sample", "[ok]"):
        assert part in report
    assert demo.load_exported(tmp_path / "export").config.n_embd == 32
    *_, first, _, _, _, last = done.stdout.splitlines()  # the last screen is five lines
    assert first.startswith("4 of 4 checks passed in ") and "docs/getting-started.md" in last
    assert report.count("held-out") >= 2 and "bits for a byte of unseen text" in report


def test_demo_in_one_process_that_nobody_launched(tmp_path):
    """Demo in one process that nobody launched and a promise it cannot keep."""
    path = str(ROOT / "examples" / "demo.py")

    def run():
        sys.argv = [path, *SMALL, "--device=cpu", "--gain=9", f"--out={tmp_path}"]
        runpy.run_path(path, run_name="__main__")

    code, printed, errors = run_alone(run, tmp_path)
    assert code == 1, printed + errors
    assert "[FAILED] the held-out loss ends at least 9 nats below" in printed
    assert printed.count("[ok]") == 3
    *_, count, broken, _, _ = printed.splitlines()
    assert count.startswith("3 of 4 checks passed") and broken.startswith("not kept: the held-out")
    assert "| ranks | 1 (no process group, cpu) |" in (tmp_path / "report.md").read_text()


@pytest.mark.slow
def test_training_goes_on_from_its_checkpoint(tmp_path):
    """Three steps on two ranks, then the rest in one process, from the saved checkpoint."""
    options = [a for a in SMALL if not a.startswith(("--re", "--pa", "--sa", "--ga", "--st"))]
    options += ["--device=cpu", f"--out={tmp_path}"]
    path = ROOT / "examples" / "train_gpt.py"
    first = run_script(path, *options, "--steps=3", "--save-every=2")
    assert re.findall(r"step (\d+): loss", first) == ["2", "3"]
    second = run_script(path, *options, "--steps=5", ranks=1)
    assert f"going on from step 3 of {tmp_path / 'checkpoint'}" in second
    assert re.findall(r"step (\d+): loss", second) == ["5"]
    assert (tmp_path / "export" / "model.safetensors").is_file()


def test_interrupted_demo_ends_at_once_and_quietly(tmp_path):
    options = [*SMALL, "--steps=100000", "--device=cpu", f"--out={tmp_path}"]
    with background("demo", "--", *options) as launcher:
        while not launcher.stdout.readline().startswith("step     0"):
            assert launcher.poll() is None
        launcher.send_signal(signal.SIGINT)
        _, errors = launcher.communicate(timeout=60)
    assert launcher.returncode == 130
    assert "Traceback" not in errors, errors
