"""README and the pages of docs/ are true: blocks run, commands parse, links lead somewhere."""

from __future__ import annotations

import ast
import contextlib
import importlib.util
import inspect
import io
import os
import re
import shlex
from pathlib import Path

import pytest
import torch.distributed as dist

import fsdp_compose as fc
from fsdp_compose.__main__ import build_parser
from fsdp_compose.cli.launch import free_port

import error_texts
from docs_pages import PAGES, README, ROOT, Block, Page
from harness import run_ranks

NAMES = [page.name for page in PAGES]
RUN = [page for page in PAGES if page.of("python", "py") and page.path.name != "recipes.md"]


def run_blocks(page: Page, blocks: list[Block]) -> None:
    """Run blocks one after the other in one namespace; lines in errors are those of the page."""
    names = {"__name__": "__main__"}
    for block in blocks:
        code = compile("\n" * block.line + block.text, str(page.path), "exec")
        with contextlib.redirect_stdout(io.StringIO()):
            exec(code, names)


def run_script(page: Page, block: Block, ranks: int) -> None:
    """Run a script on ``ranks`` forked ranks, as torchrun starts it; 0: as plain python does."""
    port = free_port()

    def start(rank: int) -> None:
        if ranks:
            os.environ |= {
                "RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(ranks),
                "LOCAL_WORLD_SIZE": str(ranks), "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": str(port),
            }  # fmt: skip
        run_blocks(page, [block])
        assert not dist.is_initialized()

    run_ranks(start, max(1, ranks), init=False)


@pytest.mark.parametrize("page", RUN, ids=[page.name for page in RUN])
@pytest.mark.filterwarnings("ignore")
def test_blocks_run(page: Page, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    blocks = [block for block in page.of("python", "py") if not block.needs]
    shared = [block for block in blocks if not block.is_script]
    if shared:
        ranks = max(1, page.ranks)
        run_ranks(lambda rank: run_blocks(page, shared), ranks, init=page.ranks > 0)
    killed = tmp_path / "run" / "last" / "data-0123456789ab"  # as by a job in its first save
    for block in blocks:
        if block.is_script:
            killed.mkdir(parents=True, exist_ok=True)
            run_script(page, block, 0)
            run_script(page, block, 2)


@pytest.mark.parametrize("page", PAGES, ids=NAMES)
def test_blocks_can_be_read(page: Page) -> None:
    """Every block has a language that is known, compiles, and calls public names alone."""
    for block in page.blocks:
        where = f"{page.name}:{block.line}"
        assert block.language in {"python", "py", "console", "bash", "text", ""}, where
        if block.language in ("python", "py"):
            ast.parse(block.text)
    for name in re.findall(r"\bfc\.([a-zA-Z_]+)", page.text):
        assert name in fc.__all__, f"{page.name}: {name}"


def commands(page: Page) -> list[list[str]]:
    """The command lines of a page, in words."""
    found = []
    for block in page.blocks:
        if block.language in ("console", "bash") or (page is README and not block.language):
            text = re.sub(r"\\\n", " ", block.text)
            found += [shlex.split(line, comments=True) for line in text.splitlines()]
    return [words for words in found if words]


@pytest.mark.parametrize("page", PAGES, ids=NAMES)
def test_commands_parse(page: Page) -> None:
    """Commands of ours take the arguments that they are shown with; make has the targets."""
    targets = set(re.findall(r"^(\w[\w-]*):", (ROOT / "Makefile").read_text("utf-8"), re.MULTILINE))
    for words in commands(page):
        if words[0] == "fsdp-compose":
            build_parser().parse_args(words[1:])
        elif words[0] == "make":
            assert set(words[1:]) <= targets, words


@pytest.mark.parametrize("page", PAGES, ids=NAMES)
def test_links_lead_somewhere(page: Page) -> None:
    known = {other.path: other for other in PAGES}
    for link in page.links:
        target, _, anchor = link.partition("#")
        if "://" in target:
            continue
        path = (page.path.parent / target).resolve() if target else page.path
        if page is not README and path.name == "reference.md":
            continue  # made when the site is built
        assert path.exists(), f"{page.name}: {link}"
        if anchor and path in known:
            assert anchor in known[path].anchors, f"{page.name}: {link}"


def test_the_site_has_every_page() -> None:
    nav = (ROOT / "mkdocs.yml").read_text("utf-8").split("\nnav:\n")[1]
    listed = re.findall(r": ([\w-]+\.md)$", nav, re.MULTILINE)
    made = ["reference.md"]
    assert sorted(listed) == sorted([page.path.name for page in PAGES[1:]] + made)


def error_rows() -> list[tuple[list[str], str, str]]:
    """(fragments of texts, cause, cure) of each row of the page on troubleshooting."""
    page = Page(ROOT / "docs" / "troubleshooting.md")
    rows = [line[2:-2].split(" | ") for line in page.text.splitlines() if line.startswith("| `")]
    return [(re.findall(r"`([^`]+)`", said), cause, cure) for said, cause, cure in rows]


def test_every_error_is_found_by_its_text() -> None:
    """Each error that the source raises has a row with a part of its text; a row, an error."""
    fragments = [fragment for said, _, _ in error_rows() for fragment in said]
    errors = list(error_texts.raised())
    assert len(errors) > 250
    missing = [
        f"{place}: {text}" for place, text in errors if not any(f in text for f in fragments)
    ]
    assert not missing, "add a row to docs/troubleshooting.md for\n" + "\n".join(missing)
    everything = error_texts.written()
    assert not [fragment for fragment in fragments if fragment not in everything]
    assert all(len(cause) > 7 and len(cure) > 3 for _, cause, cure in error_rows())
    assert len(set(fragments)) == len(fragments)


def test_calls_in_texts_fit_their_functions() -> None:
    """A call that an error or a docstring shows names arguments in the function's order."""
    same = {"model": "module", "optimizer": "optim"}
    shown = 0
    for name, written in re.findall(r"\b(\w+)\(([^()]*)\)", error_texts.written()):
        if name in fc.__all__ and inspect.isfunction(getattr(fc, name)):
            takes = list(inspect.signature(getattr(fc, name)).parameters)
            for place, given in enumerate(same.get(arg, arg) for arg in written.split(", ")):
                shown += given in takes
                assert given not in takes or takes.index(given) == place, f"{name}({written})"
    assert shown > 300


def test_the_reference_has_every_public_name() -> None:
    """Under its question, with its signature, its docstring and its example."""
    spec = importlib.util.spec_from_file_location("reference", ROOT / "docs" / "reference.py")
    assert spec is not None and spec.loader is not None
    reference = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(reference)
    text = reference.write_reference()
    questions = re.split(r"^## ", text, flags=re.MULTILINE)[1:]
    assert [part.split("\n")[0] for part in questions] == list(reference.list_questions())
    names = [n for n in fc.__all__ if n != "wrap"] + [f"wrap.{n}" for n in fc.wrap.__all__]
    assert sorted(re.findall(r"^### (\S+)$", text, re.MULTILINE)) == sorted(names)
    shard = text.split("### fully_shard\n")[1].split("\n### ")[0]
    assert "```python\nfully_shard(\n    module: M,\n    *,\n" in shard
    assert "mp_policy: MixedPrecisionLike = MixedPrecision()," in shard
    assert "- `units`: a policy" in shard and "**Raises**" in shard and "```pycon\n>>> " in shard
    assert text.count("```pycon") >= len(names) - 20
    assert not re.search(r"(?<!`)``(?!`)", text) and text.count("```") % 2 == 0


def test_readme_is_short() -> None:
    assert README.text.count("\n") < 200
