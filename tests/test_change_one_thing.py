"""Each seam has an example that changes one thing; it is short, it runs, and it does what it says.

A reader starts it with ``fsdp-compose run``; here its ranks are forks.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from scripts import run_script

ROOT = Path(__file__).resolve().parent.parent
EXAMPLES = ROOT / "examples" / "change_one_thing"
MAX_LINES = 60


def run(name: str) -> str:
    return run_script(EXAMPLES / f"{name}.py")


@pytest.mark.parametrize("path", sorted(EXAMPLES.glob("*.py")), ids=lambda path: path.stem)
def test_an_example_is_short(path: Path) -> None:
    assert len(path.read_text("utf-8").splitlines()) <= MAX_LINES


def test_prefetch_by_bytes() -> None:
    """The rule lowers the peak to its limit, and changes no gradient."""
    printed = run("prefetch_by_bytes")
    peaks, norms = zip(
        *re.findall(r"(\d+) bytes gathered at most, gradients ([\d.]+)", printed), strict=True
    )
    without, within = map(int, peaks)
    assert within <= 2 << 20 < without
    assert norms[0] == norms[1] and float(norms[0]) > 0


def test_own_reduction() -> None:
    """With one byte per element of the gradients, the loss falls to less than a fifth."""
    before, after = re.findall(r"loss ([\d.]+) after", run("own_reduction"))
    assert float(after) < float(before) / 5


def test_checkpoint_format() -> None:
    """A model saved in zip archives, and nothing else, is the same when it is loaded."""
    printed = run("checkpoint_format")
    assert printed == "loaded the same from ['model.zip', 'model.zip.index.json']: True\n"


def test_own_layout() -> None:
    """Parameters start where the function put them, and training is the same to the last digit."""
    found = re.findall(r"starts \[(.*)\], padding (\d+), loss ([\d.]+)", run("own_layout"))
    (starts, padding, loss), (own_starts, own_padding, own_loss) = found
    assert set(own_starts.split(", ")) == {"0"} != set(starts.split(", "))
    assert int(padding) < int(own_padding)
    assert loss == own_loss


def test_int8_gather() -> None:
    """A step gathers exactly a quarter of the bytes, plus scales, and trains close to fp32."""
    found = re.findall(r"(\d+) bytes gathered in a step, loss ([\d.]+)", run("int8_gather"))
    (exact, loss), (encoded, encoded_loss) = found
    blocks = -(-int(exact) // 4 // 128)
    assert int(encoded) == 128 * blocks + 4 * blocks
    assert float(encoded_loss) == pytest.approx(float(loss), rel=0.2)


def test_own_collective() -> None:
    """Gradients are those of the library's own way, and a link carries half of them."""
    found = re.findall(r"gradients ([\d.]+), bytes by link \{(.*)\}", run("own_collective"))
    (norm, nothing), (own_norm, links) = found
    assert norm == own_norm and not nothing
    numel = 32 * 64 + 64 + 64 + 1
    shard = -(-numel // 2 // 4) * 4
    assert links == f"'0 -> 1': {4 * shard}"
