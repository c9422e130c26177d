"""The command line, ``python -m fsdp_compose`` or ``fsdp-compose``; starts without torch."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import cast

from fsdp_compose.cli.launch import launch

__all__ = ["main"]

_ROOT = Path(__file__).resolve().parent.parent
_DEMO = _ROOT / "examples" / "train_gpt.py"


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command and returns its exit code."""
    args = _parser().parse_args(argv)
    handler = cast(Callable[[argparse.Namespace], int], args.handler)
    return handler(args)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="fsdp-compose",
        description="Composable Fully Sharded Data Parallel for PyTorch.",
    )
    parser.add_argument("--version", action="version", version=f"fsdp-compose {_version()}")
    commands = parser.add_subparsers(metavar="COMMAND", required=True)
    _add_demo(commands)
    _add_run(commands)
    _add_checkpoint(commands)
    return parser


def _add_demo(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    command = commands.add_parser(
        "demo",
        help="train a small GPT on local ranks and check it against one process",
        description="Runs examples/train_gpt.py on local ranks. Its own options go after --, as "
        "in: fsdp-compose demo --nproc 2 -- --steps 50",
    )
    _add_nproc(command)
    command.add_argument("args", nargs="*", metavar="ARG", help="options for the script, after --")
    command.set_defaults(handler=_demo)


def _add_run(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    command = commands.add_parser(
        "run",
        help="run a script on local ranks",
        description="Starts local ranks of a script with the environment variables of torchrun.",
    )
    _add_nproc(command)
    command.add_argument(
        "--simulate", type=_positive, metavar="N", help="N ranks in one process, as for pdb"
    )
    command.add_argument("--seed", type=int, default=0, help="of the simulation's order")
    command.add_argument("script", type=Path)
    command.add_argument("args", nargs=argparse.REMAINDER, metavar="ARG", help="its arguments")
    command.set_defaults(handler=_run)


def _add_checkpoint(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    command = commands.add_parser("checkpoint", help="look into a checkpoint, or convert it")
    command.set_defaults(handler=_checkpoint)
    actions = command.add_subparsers(metavar="ACTION", dest="action", required=True)
    show = actions.add_parser("show", help="list what a checkpoint holds")
    show.add_argument("path", type=Path)
    show.add_argument("--verify", action="store_true", help="read the files, compare checksums")
    convert = actions.add_parser(
        "convert",
        help="turn a sharded checkpoint into safetensors files, or the reverse",
        description="A sharded checkpoint (a folder with .metadata) becomes safetensors files with "
        "an index; safetensors files become a sharded checkpoint. One tensor is held at a time.",
    )
    convert.add_argument("source", type=Path)
    convert.add_argument("target", type=Path)
    convert.add_argument("--max-file-bytes", type=_positive, metavar="N", help="per safetensors")
    convert.add_argument(
        "--prefix",
        default="model",
        metavar="NAME",
        help="where the model is in the sharded checkpoint; '' for the top (default: model)",
    )


def _add_nproc(command: argparse.ArgumentParser) -> None:
    command.add_argument(
        "--nproc", type=_positive, default=2, metavar="N", help="local ranks (default: 2)"
    )


def _positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"wants at least 1, found {value}")
    return value


def _demo(args: argparse.Namespace) -> int:
    if not _DEMO.is_file():
        print(
            f"fsdp-compose: there is no {_DEMO}. The demo is part of the source tree and is not "
            "installed with the package: run it from a checkout, or start your own script with "
            "`fsdp-compose run`.",
            file=sys.stderr,
        )
        return 2
    return launch(_DEMO, args.args, nproc=args.nproc, env=_environment())


def _checkpoint(args: argparse.Namespace) -> int:
    from fsdp_compose.cli.checkpoint import run  # which imports torch

    return run(args)


def _run(args: argparse.Namespace) -> int:
    if not args.script.is_file():
        print(f"fsdp-compose: no such script: {args.script}", file=sys.stderr)
        return 2
    if args.simulate:
        from fsdp_compose.cli.simulate import run_simulated  # which imports torch

        return run_simulated(args.script, args.args, args.simulate, args.seed)
    return launch(args.script, args.args, nproc=args.nproc, env=_environment())


def _environment() -> dict[str, str]:
    """This environment, in which a checkout that is not installed can still be imported."""
    env = dict(os.environ)
    if _DEMO.is_file():
        inherited = env.get("PYTHONPATH")
        env["PYTHONPATH"] = f"{_ROOT}{os.pathsep}{inherited}" if inherited else str(_ROOT)
    return env


def _version() -> str:
    try:
        return version("fsdp-compose")
    except PackageNotFoundError:
        return "(a checkout that is not installed)"


if __name__ == "__main__":
    sys.exit(main())
