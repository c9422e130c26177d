"""Makes the reference from docstrings: the public names, by the question that they answer.

A hook of mkdocs: ``make docs`` writes ``reference.md`` from what is imported, so it cannot differ
from the code. ``write_reference`` needs no mkdocs, and tests call it.
"""

from __future__ import annotations

import inspect
import re
import textwrap
from typing import Any

import fsdp_compose as fc

SECTION = re.compile(r"^(Args|Returns|Raises|Attributes|Example|Yields):$", re.MULTILINE)
ITEM = re.compile(r"^    (\S[^\n]*?): (.*(?:\n        .*)*)", re.MULTILINE)


def list_questions() -> dict[str, list[str]]:
    """The public names by question, as the package's docstring lists them."""
    names = (fc.__doc__ or "").split("The folders;")[0]
    found = re.findall(r"^(\w.+\?)\n((?:    .+\n)+)", names, re.MULTILINE)
    return {question: re.findall(r"\w+", text) for question, text in found}


def write_reference() -> str:
    """The page: an entry for each public name, with its signature and docstring."""
    parts = [
        "# Reference",
        "Every public name of `fsdp_compose`, by the question that it answers. "
        "Made from the docstrings.",
    ]
    for question, names in list_questions().items():
        parts.append(f"## {question}")
        for name in names:
            if name == "wrap":
                parts += [_entry(f"wrap.{n}", getattr(fc.wrap, n)) for n in fc.wrap.__all__]
            else:
                parts.append(_entry(name, getattr(fc, name)))
    return "\n\n".join(parts) + "\n"


def _entry(name: str, value: Any) -> str:
    parts = [f"### {name}"]
    if inspect.isfunction(value) or inspect.isclass(value):
        signature = _signature(name, value)
        if signature:
            parts.append(f"```python\n{signature}\n```")
        parts.append(_docstring(inspect.getdoc(value) or ""))
    else:
        parts.append(f"`{value}`")
    return "\n\n".join(parts)


def _signature(name: str, value: Any) -> str:
    try:
        parameters = list(inspect.signature(value).parameters.values())
    except (TypeError, ValueError):
        return ""
    if inspect.isclass(value) and issubclass(value, BaseException):
        return ""
    shown = [_parameter(p) for p in parameters]
    keywords = [i for i, p in enumerate(parameters) if p.kind is p.KEYWORD_ONLY]
    if keywords and not any(p.kind is p.VAR_POSITIONAL for p in parameters):
        shown.insert(keywords[0], "*")
    line = f"{name}({', '.join(shown)})"
    if len(line) <= 88:
        return line
    return f"{name}(\n" + "".join(f"    {text},\n" for text in shown) + ")"


def _parameter(p: inspect.Parameter) -> str:
    """A parameter with its type and default; a default that is a class's own as ``Class()``."""
    stars = {p.VAR_POSITIONAL: "*", p.VAR_KEYWORD: "**"}.get(p.kind, "")
    text = f"{stars}{p.name}" + (f": {p.annotation}" if p.annotation is not p.empty else "")
    if p.default is p.empty:
        return text
    default = getattr(p.default, "__name__", repr(p.default))
    if len(default) > 40:
        default = f"{type(p.default).__name__}()"
    return f"{text} = {default}"


def _docstring(text: str) -> str:
    """Google-style sections as lists and blocks; tables and examples as blocks."""
    pieces = SECTION.split(text)
    parts = [_prose(pieces[0])]
    for title, body in zip(pieces[1::2], pieces[2::2], strict=True):
        if title == "Example":
            parts.append(f"```pycon\n{textwrap.dedent(body).strip()}\n```")
            continue
        after = re.search(r"^\S", body, re.MULTILINE)
        body, rest = (body[: after.start()], body[after.start() :]) if after else (body, "")
        is_list = title in ("Args", "Raises", "Attributes")
        shown = _items(body) if is_list else _prose(textwrap.dedent(body))
        parts.append(f"**{title}**\n\n{shown}")
        if rest:
            parts.append(_prose(rest))
    return "\n\n".join(part for part in parts if part.strip())


def _items(body: str) -> str:
    items = ITEM.findall(body)
    if not items:
        return _prose(textwrap.dedent(body))
    lines = []
    for names, description in items:
        paragraphs = textwrap.dedent("        " + description).strip()
        if "====" in paragraphs:
            before, table = paragraphs.split("\n\n", 1)
            paragraphs = f"{before}\n\n{_prose(table)}"
        lines.append(f"- `{names}`: " + textwrap.indent(_codes(paragraphs), "    ").lstrip())
    return "\n".join(lines)


def _prose(text: str) -> str:
    """Paragraphs; tables of ReST and literal blocks become code blocks."""
    parts = []
    for part in re.split(r"\n\s*\n", text.strip("\n")):
        if part.startswith(("===", "    ", ">>>")) or "\n===" in part:
            kind = "pycon" if part.lstrip().startswith(">>>") else "text"
            plain = re.sub(r"``([^`]+)``", r"\1    ", textwrap.dedent(part))  # as wide as it was
            parts.append(f"```{kind}\n{plain}\n```")
        else:
            parts.append(_codes(re.sub(r"::$", ":", part)))
    return "\n\n".join(parts)


def _codes(text: str) -> str:
    return text.replace("``", "`")


def on_files(files: Any, config: Any) -> Any:
    """Adds the page to the site; mkdocs calls this."""
    from mkdocs.structure.files import File

    files.append(File.generated(config, "reference.md", content=write_reference()))
    return files
