"""The source archive, the wheel that is built from it, and the README's example on that."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tarfile
import zipfile
from email.parser import Parser
from pathlib import Path

import pytest

import fsdp_compose as fc

from docs_pages import README, ROOT

HOSTS = re.compile(r"(pypi|pythonhosted|anaconda|conda-forge)\.(org|com|io)", re.IGNORECASE)


FOLDERS = ("fsdp_compose", "tests", "docs", "examples", "benchmarks")
FILES = [path.name for path in ROOT.iterdir() if path.is_file() and path.name[0] != "."]


@pytest.fixture(scope="module")
def sdist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built from a copy, so that nothing is left in the checkout."""
    source = tmp_path_factory.mktemp("source")
    out = tmp_path_factory.mktemp("sdist")
    left_out = shutil.ignore_patterns("__pycache__", "results")
    for name in FOLDERS:
        shutil.copytree(ROOT / name, source / name, ignore=left_out)
    for name in FILES:
        shutil.copy(ROOT / name, source)
    build = f"from setuptools.build_meta import build_sdist; build_sdist({str(out)!r})"
    subprocess.run(
        [sys.executable, "-c", build], check=True, cwd=source, capture_output=True, timeout=200
    )
    (found,) = out.glob("*.tar.gz")
    return found


@pytest.fixture(scope="module")
def wheel(sdist: Path) -> Path:
    """Built from the source archive alone, as whoever installs from that does."""
    out = sdist.parent
    build = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation"]
    done = subprocess.run(
        [*build, "--wheel-dir", str(out), str(sdist)],
        check=False, text=True, capture_output=True, timeout=200,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    (found,) = out.glob("*.whl")
    return found


def test_what_the_wheel_says_and_holds(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
        (info,) = [name for name in names if name.endswith("METADATA")]
        metadata = Parser().parsestr(archive.read(info).decode())
    tops = {name.split("/")[0] for name in names}
    assert tops == {"fsdp_compose", f"fsdp_compose-{fc.__version__}.dist-info"}
    assert "fsdp_compose/py.typed" in names and any("licenses/LICENSE" in name for name in names)
    files = {f"fsdp_compose/{p.relative_to(ROOT / 'fsdp_compose')}" for p in
             (ROOT / "fsdp_compose").rglob("*.py")}  # fmt: skip
    assert files <= set(names)
    needed = metadata.get_all("Requires-Dist") or []
    always = sorted(re.split(r"[><=;\s]", need)[0] for need in needed if "extra ==" not in need)
    assert always == ["optree", "torch"]
    extras = set(metadata.get_all("Provides-Extra") or [])
    assert extras == {"dev", "demo", "docs", "models", "safetensors"}
    assert all(extra in README.text for extra in extras)
    assert metadata.get_payload().strip().startswith("# fsdp_compose")


def test_the_source_archive_can_be_tested_and_read(sdist: Path) -> None:
    """It has what a checkout has, so that whoever packages it can run its tests."""
    with tarfile.open(sdist) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    assert set(FILES) <= names
    for folder in FOLDERS:
        files = [path for path in (ROOT / folder).rglob("*.*") if path.is_file()]
        wanted = {path.relative_to(ROOT).as_posix() for path in files}
        wanted = {name for name in wanted if not re.search("__pycache__|/results/", name)}
        assert not wanted - names


@pytest.mark.slow
def test_the_example_of_the_readme_runs_on_the_wheel(wheel: Path, tmp_path: Path) -> None:
    """From a folder that the wheel alone was installed into, on two ranks and as one process."""
    place = tmp_path / "installed"
    install = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target"]
    subprocess.run([*install, str(place), str(wheel)], check=True, timeout=200)
    script = tmp_path / "train.py"
    script.write_text(next(block.text for block in README.blocks if block.is_script))
    env = {k: v for k, v in os.environ.items() if k not in ("RANK", "WORLD_SIZE", "LOCAL_RANK")}
    env["PYTHONPATH"] = str(place)
    command = [sys.executable, "-m", "fsdp_compose", "run", "--nproc", "2", str(script)]
    done = subprocess.run(
        command, check=False, cwd=tmp_path, env=env, text=True, capture_output=True, timeout=200
    )
    assert done.returncode == 0, done.stdout + done.stderr
    losses = [float(loss) for loss in re.findall(r"loss ([\d.]+)", done.stdout)]
    assert len(losses) == 5 and losses[-1] < losses[0] / 2
    assert (tmp_path / "checkpoint" / ".metadata").is_file()


def test_no_file_names_a_registry() -> None:
    """Nothing of the project depends on where packages are kept."""
    files = [path for path in ROOT.iterdir() if path.is_file()]
    for folder in ("fsdp_compose", "tests", "docs", "examples", "benchmarks", ".ci"):
        files += (ROOT / folder).rglob("*")
    texts = [p for p in files if p.is_file() and p.suffix in {".md", ".py", ".toml", ".yml", ""}]
    assert len(texts) > 200
    for path in texts:
        assert not HOSTS.search(path.read_text("utf-8", errors="ignore")), path


def test_the_citation_is_of_this_version() -> None:
    text = (ROOT / "CITATION.cff").read_text("utf-8")
    assert f"version: {fc.__version__}\n" in text and "cff-version: 1.2.0" in text
