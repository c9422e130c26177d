"""Shell completion, by real shells: bash, and zsh and fish where they are installed."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from fsdp_compose.__main__ import STRATEGIES, build_parser
from fsdp_compose.cli.completion import SHELLS, write_completion

BASH = """
source {script}
complete -p fsdp-compose >&2
COMP_WORDS=(fsdp-compose {words}) COMP_CWORD={position}
_fsdp_compose
printf '%s\\n' "${{COMPREPLY[@]}}"
"""
ZSH = """
words=(fsdp-compose {words}) CURRENT=$(({position} + 1)) PREFIX={last}
compdef() {{ }}
_files() {{ }}
compadd() {{ shift; printf '%s\\n' "$@" | grep -e "^$PREFIX" || true; }}
source {script}
_fsdp_compose
"""
FISH = """
source {script}
complete -C "fsdp-compose {line}" | cut -f 1
"""
TEXTS = {"bash": BASH, "zsh": ZSH, "fish": FISH}


@pytest.fixture(params=[shell for shell in SHELLS if shell == "bash" or shutil.which(shell)])
def complete(request: pytest.FixtureRequest, tmp_path: Path) -> Callable[[str], set[str]]:
    """What the shell offers for a line, the last word of which is completed."""
    shell = request.param
    script = tmp_path / f"completion.{shell}"
    script.write_text(write_completion(shell, build_parser()))

    def ask(line: str) -> set[str]:
        *words, last = line.split(" ")
        given = " ".join([*words, f"'{last}'"])
        text = TEXTS[shell].format(
            script=script, words=given, position=len(words) + 1, last=f"'{last}'", line=line
        )
        quiet = {"bash": ["--norc"], "zsh": ["-f"], "fish": ["--no-config"]}[shell]
        done = subprocess.run(
            [shell, *quiet, "-c", text], check=False, cwd=tmp_path, text=True, capture_output=True
        )
        assert done.returncode == 0, done.stderr
        assert shell != "bash" or "complete -o bashdefault" in done.stderr
        return set(done.stdout.split()) - {script.name}

    return ask


def test_shells_complete_commands_options_choices(complete: Callable[[str], set[str]]) -> None:
    commands = {"run", "plan", "trace", "demo", "bench", "checkpoint", "convert", "doctor"}
    assert complete("") >= commands and "show" not in complete("")
    assert complete("do") == {"doctor"}
    assert complete("checkpoint ") == {"show", "convert"}
    assert complete("checkpoint show --v") == {"--verify"}
    assert complete("plan --stra") == {"--strategy"}
    assert complete("plan model.py:build --strategy ") == set(STRATEGIES)
    assert complete("plan --strategy full_shard --opt") == {"--optimizer"}
    assert complete("run --nproc 2 --verify") == set()
    assert complete("completion z") <= {"zsh"}
