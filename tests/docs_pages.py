"""README.md and the pages of ``docs/``: their code blocks, links and directives.

A page says in comments that a reader does not see how its Python blocks are run:

    <!-- ranks: 2 -->            on so many ranks; without it in one process without a group

The recipes are scripts too, on two ranks with a process group; one that says ``with="library"`` is
run where that is installed (tests/libraries/test_recipes.py).
Blocks of a page share their names. A block with a title that ends in ``.py`` is a script: it is run
by itself, with the environment of torchrun and no process group. A block that says
``needs="library"`` is a script of that library that is compiled only.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
FENCE = re.compile(r"^```(\w*)([^\n]*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
DIRECTIVE = re.compile(r"<!-- (\w+): (.+?) -->")
LINK = re.compile(r"(?<!!)\[[^\]\[]+\]\(([^)\s]+)\)")
IMAGE = re.compile(r"!\[[^\]]*\]\(([^)\s]+)\)")


@dataclass(frozen=True)
class Block:
    """A fenced block: its language, what stands behind that, its text and its line."""

    language: str
    options: str
    text: str
    line: int

    @property
    def title(self) -> str:
        return (re.findall(r'title="([^"]+)"', self.options) or [""])[0]

    @property
    def is_script(self) -> bool:
        return self.title.endswith(".py")

    @property
    def libraries(self) -> list[str]:
        return re.findall(r"\w+", (re.findall(r'with="([^"]+)"', self.options) or [""])[0])

    @property
    def needs(self) -> str:
        return (re.findall(r'needs="([^"]+)"', self.options) or [""])[0]


@dataclass(frozen=True)
class Page:
    """A page of Markdown."""

    path: Path

    @property
    def name(self) -> str:
        return self.path.relative_to(ROOT).as_posix()

    @cached_property
    def text(self) -> str:
        return self.path.read_text("utf-8")

    @cached_property
    def directives(self) -> dict[str, str]:
        return dict(DIRECTIVE.findall(self.text))

    @property
    def ranks(self) -> int:
        """How many ranks run it; 0 for one process without a process group."""
        return int(self.directives.get("ranks", "0"))

    @cached_property
    def blocks(self) -> list[Block]:
        return [
            Block(found[1], found[2], found[3], self.text[: found.start()].count("\n") + 1)
            for found in FENCE.finditer(self.text)
        ]

    def of(self, *languages: str) -> list[Block]:
        return [block for block in self.blocks if block.language in languages]

    @cached_property
    def prose(self) -> str:
        """The page without its blocks."""
        return FENCE.sub("", self.text)

    @cached_property
    def anchors(self) -> set[str]:
        """What a link may name behind ``#``: headings as the site writes them."""
        titles = re.findall(r"^#+ (.+)$", self.prose, re.MULTILINE)
        plain = [re.sub(r"[^\w\s-]", "", title.lower()) for title in titles]
        return {re.sub(r"[\s]+", "-", title.strip()) for title in plain}

    @cached_property
    def links(self) -> list[str]:
        return LINK.findall(self.prose) + IMAGE.findall(self.prose)


README = Page(ROOT / "README.md")
PAGES = [README, *map(Page, sorted((ROOT / "docs").glob("*.md")))]


if __name__ == "__main__":  # prints the README's example
    print(next(block.text for block in README.blocks if block.is_script))
