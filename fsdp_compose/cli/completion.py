"""Scripts by which bash, zsh and fish complete the command line, made from its parser.

The command line is argparse's, which starts without torch and needs no other package; so does this.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from shlex import quote

__all__ = ["SHELLS", "write_completion"]


@dataclass(frozen=True)
class _Command:
    """One command: its words, such as ``checkpoint show``, and what may follow them."""

    path: str
    help: str
    children: tuple[str, ...]
    options: dict[str, argparse.Action]


def write_completion(shell: str, parser: argparse.ArgumentParser) -> str:
    """The script that completes ``parser``'s commands, options and choices in ``shell``."""
    return SHELLS[shell](list(_list_commands(parser)))


def _list_commands(
    parser: argparse.ArgumentParser, path: str = "", text: str = ""
) -> Iterator[_Command]:
    children: dict[str, argparse.ArgumentParser] = {}
    helps: dict[str, str] = {}
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            children.update(action.choices)
            helps.update({choice.dest: choice.help or "" for choice in action._choices_actions})
    options = {name: action for action in parser._actions for name in action.option_strings}
    yield _Command(path, text, tuple(children), options)
    for name, child in children.items():
        yield from _list_commands(child, f"{path} {name}".strip(), helps.get(name, ""))


def _choices(commands: list[_Command]) -> Iterator[tuple[str, str]]:
    """Options that take one of a few values, and the values."""
    for command in commands:
        for name, action in command.options.items():
            if action.choices is not None:
                yield name, " ".join(map(str, action.choices))


def _cases(commands: list[_Command]) -> tuple[str, str]:
    """For bash and zsh: what moves from command to command, and what may follow each."""
    moves = "|".join(quote(c.path if " " in c.path else f" {c.path}") for c in commands if c.path)
    follow = "\n".join(
        f"    {quote(c.path)}) children={quote(' '.join(c.children))} "
        f"options={quote(' '.join(c.options))} ;;"
        for c in commands
    )
    return moves, follow


def _write_bash(commands: list[_Command]) -> str:
    moves, follow = _cases(commands)
    values = "\n".join(
        f'    {name}) COMPREPLY=($(compgen -W {quote(words)} -- "$word")); return ;;'
        for name, words in _choices(commands)
    )
    return f"""_fsdp_compose() {{
  local word=${{COMP_WORDS[COMP_CWORD]}} at="" children="" options="" before
  for before in "${{COMP_WORDS[@]:1:COMP_CWORD-1}}"; do
    case "$at $before" in {moves}) at="${{at:+$at }}$before" ;; esac
  done
  case "${{COMP_WORDS[COMP_CWORD-1]}}" in
{values}
  esac
  case "$at" in
{follow}
  esac
  [[ $word == -* ]] && children=$options
  COMPREPLY=($(compgen -W "$children" -- "$word"))
}}
complete -o bashdefault -o default -F _fsdp_compose fsdp-compose
"""


def _write_zsh(commands: list[_Command]) -> str:
    moves, follow = _cases(commands)
    values = "\n".join(
        f"    {name}) compadd -- {words}; return ;;" for name, words in _choices(commands)
    )
    return f"""#compdef fsdp-compose
_fsdp_compose() {{
  local at="" children="" options="" before
  for before in ${{words[2,CURRENT-1]}}; do
    case "$at $before" in {moves}) at="${{at:+$at }}$before" ;; esac
  done
  case "${{words[CURRENT-1]}}" in
{values}
  esac
  case "$at" in
{follow}
  esac
  if [[ $PREFIX == -* ]]; then compadd -- ${{=options}}
  elif [[ -n $children ]]; then compadd -- ${{=children}}
  else _files; fi
}}
compdef _fsdp_compose fsdp-compose
"""


def _write_fish(commands: list[_Command]) -> str:
    lines = []
    for command in commands:
        words = command.path.split()
        if words:
            text = f"-f -a {words[-1]} -d {quote(command.help)}"
            lines.append(f"complete -c fsdp-compose -n {_write_condition(words[:-1])} {text}")
        for name, action in command.options.items():
            kind = f"-l {name[2:]}" if name.startswith("--") else f"-s {name[1:]}"
            if action.choices is not None:
                kind += f" -x -a {quote(' '.join(map(str, action.choices)))}"
            elif action.nargs is None:
                kind += " -r"
            text = f"-d {quote((action.help or '').replace('%%', '%'))}"
            lines.append(f"complete -c fsdp-compose -n {_write_condition(words)} {kind} {text}")
    return "\n".join(lines) + "\n"


def _write_condition(words: list[str]) -> str:
    """For fish: that these are the commands so far."""
    seen = "; and ".join(f"__fish_seen_subcommand_from {word}" for word in words)
    return quote(seen or "__fish_use_subcommand")


SHELLS: dict[str, Callable[[list[_Command]], str]] = {
    "bash": _write_bash,
    "zsh": _write_zsh,
    "fish": _write_fish,
}
