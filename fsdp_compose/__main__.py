"""The command line, ``python -m fsdp_compose`` or ``fsdp-compose``; starts without torch.

Exit codes: 0 when it was done; 1 when it failed, something is wrong, or a plan does not fit; 2 when
it was asked wrongly; of ``run``, ``trace``, ``demo`` and ``bench`` that of the first rank that
failed, 128 + n for signal n.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import cast

from fsdp_compose.cli.completion import SHELLS, write_completion
from fsdp_compose.cli.errors import UserError
from fsdp_compose.cli.launch import launch

__all__ = ["main"]

_ROOT = Path(__file__).resolve().parent.parent
_DEMO = _ROOT / "examples" / "demo.py"


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command and returns its exit code."""
    args = build_parser().parse_args(argv)
    handler = cast(Callable[[argparse.Namespace], int], args.handler)
    try:
        return handler(args)
    except UserError as error:
        print(f"fsdp-compose: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:  # the reader of our output has closed it, as `head` does
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="fsdp-compose",
        description="Composable Fully Sharded Data Parallel for PyTorch.",
    )
    parser.add_argument("--version", action="version", version=f"fsdp-compose {_version()}")
    commands = parser.add_subparsers(metavar="COMMAND", required=True)
    _add_demo(commands)
    _add_run(commands)
    _add_plan(commands)
    _add_trace(commands)
    _add_bench(commands)
    _add_checkpoint(commands)
    _add_convert(commands.add_parser("convert", help="the same as checkpoint convert"))
    _add_doctor(commands)
    _add_completion(commands)
    return parser


def _add_demo(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    command = commands.add_parser(
        "demo",
        help="train a small GPT on local ranks and check it against one process",
        description="Runs examples/demo.py on local ranks. Its own options go after --, as "
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
    command.add_argument("-m", dest="module", action="store_true", help="SCRIPT names a module")
    command.add_argument(
        "--simulate", type=_positive, metavar="N", help="N ranks in one process, as for pdb"
    )
    command.add_argument("--seed", type=int, default=0, help="of the simulation's order")
    _add_script(command)
    command.set_defaults(handler=_run)


def _add_checkpoint(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    command = commands.add_parser("checkpoint", help="look into a checkpoint, or convert it")
    command.set_defaults(handler=_checkpoint)
    actions = command.add_subparsers(metavar="ACTION", dest="action", required=True)
    show = actions.add_parser("show", help="list what a checkpoint holds")
    show.add_argument("path", type=Path)
    show.add_argument("--verify", action="store_true", help="read the files, compare checksums")
    show.add_argument("--all", action="store_true", help="a line for each of those that are alike")
    _add_convert(
        actions.add_parser(
            "convert", help="turn a sharded checkpoint into safetensors files, or the reverse"
        )
    )


def _add_convert(convert: argparse.ArgumentParser) -> None:
    convert.description = (
        "A sharded checkpoint (a folder with .metadata) becomes safetensors files with "
        "an index; safetensors files become a sharded checkpoint. One tensor is held at a time."
    )
    convert.set_defaults(handler=_checkpoint, action="convert")
    convert.add_argument("source", type=Path)
    convert.add_argument("target", type=Path)
    convert.add_argument("--max-file-bytes", type=_positive, metavar="N", help="per safetensors")
    convert.add_argument(
        "--prefix",
        default="model",
        metavar="NAME",
        help="where the model is in the sharded checkpoint; '' for the top (default: model)",
    )


def _add_plan(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    command = commands.add_parser(
        "plan",
        help="say what sharding a model costs, and whether it fits",
        description="Plans without memory and without a process group. The exit code is 1 where "
        "the model does not fit.",
    )
    add = command.add_argument
    add("model", metavar="MODEL", help="PATH:NAME of a Python file, or package.module:NAME, a "
        "function without arguments that returns a module; or a config.json")  # fmt: skip
    add("--world-size", default="8", metavar="N", help="ranks; 4x8 for replicas x shards")
    add("--units", action="append", metavar="NAME", help="class of modules that become units, or a "
        "pattern of names, such as layers.*; may be repeated")  # fmt: skip
    add("--strategy", metavar="NAME", choices=STRATEGIES, help=", ".join(STRATEGIES))
    add("--dtype", metavar="DTYPE", help="of compute: fp32, bf16, fp16 (default: as stored)")
    add("--reduce-dtype", metavar="DTYPE", help="of reductions (default: that of compute)")
    add("--optimizer", metavar="NAME", help="such as adamw, for its state")
    add("--device-memory", metavar="SIZE", help="such as 80GiB: does it fit?")
    add("--sample", action="append", metavar="SHAPE:DTYPE", help="an input of one rank, such as "
        "8x2048:long, to measure activations; may be repeated")  # fmt: skip
    add("--json", action="store_true", help="all figures as JSON")
    for name, what in (("memory", "memory over a step"), ("shards", "who owns which rows"),
                       ("picture", "units and peaks")):  # fmt: skip
        add(f"--{name}", type=Path, metavar="FILE", help=f"draw {what} (.png, .svg, .pdf)")
    command.set_defaults(handler=_plan)


STRATEGIES = (
    "full_shard", "shard_grad_op", "zero1", "no_shard", "hybrid_shard", "hybrid_shard_zero2",
    "hybrid_shard_optimizer",
)  # fmt: skip


def _add_trace(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    command = commands.add_parser(
        "trace",
        help="run a script on local ranks and record a timeline",
        description="Runs as `run` does, and writes trace.json for Perfetto, and timeline.svg and "
        "memory.svg of the last step of rank 0 where matplotlib is installed.",
    )
    _add_nproc(command)
    command.add_argument("--out", type=Path, default=Path("trace"), metavar="FOLDER")
    _add_script(command)
    command.set_defaults(handler=_trace)


def _add_bench(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    command = commands.add_parser(
        "bench",
        help="run a benchmark of a checkout",
        description="Runs one of the benchmarks with one thread; without NAME, lists them.",
    )
    command.add_argument("name", nargs="?", metavar="NAME")
    command.add_argument("args", nargs=argparse.REMAINDER, metavar="ARG", help="its arguments")
    command.set_defaults(handler=_bench)


def _add_doctor(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    command = commands.add_parser(
        "doctor",
        help="check torch, backends, devices, network and a gather between two ranks",
        description="Looks at this machine; the exit code is 1 where something is wrong.",
    )
    command.add_argument("--json", action="store_true")
    command.set_defaults(handler=_doctor)


def _add_completion(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    command = commands.add_parser(
        "completion",
        help="print what lets a shell complete these commands",
        description="For bash, in ~/.bashrc: source <(fsdp-compose completion bash). The scripts "
        "for zsh and fish are sourced likewise.",
    )
    command.add_argument("shell", choices=sorted(SHELLS))
    command.set_defaults(handler=_completion)


def _add_nproc(command: argparse.ArgumentParser) -> None:
    command.add_argument(
        "--nproc", type=_positive, default=2, metavar="N", help="local ranks (default: 2)"
    )


def _add_script(command: argparse.ArgumentParser) -> None:
    command.add_argument("script", type=Path)
    rest = command.add_argument(
        "args", nargs=argparse.REMAINDER, metavar="ARG", help="its arguments"
    )
    rest.required = False  # a script may have none; Python 3.11 lists them as missing


def _positive(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"wants a whole number of at least 1, found {text!r}")
    return int(text)


def _demo(args: argparse.Namespace) -> int:
    if not _DEMO.is_file():
        raise UserError(
            f"there is no {_DEMO}. The demo is part of the source tree and is not installed with "
            "the package: run it from a checkout, or start your own script with `fsdp-compose run`."
        )
    return launch(_DEMO, args.args, nproc=args.nproc, env=_environment())


def _checkpoint(args: argparse.Namespace) -> int:
    from fsdp_compose.cli.checkpoint import run  # which imports torch

    return run(args)


def _plan(args: argparse.Namespace) -> int:
    from fsdp_compose.cli.look import run_plan  # which imports torch

    return run_plan(args)


def _trace(args: argparse.Namespace) -> int:
    if not args.script.is_file():
        raise UserError(f"no such script: {args.script}")
    args.out.mkdir(parents=True, exist_ok=True)
    script = [str(args.out), str(args.script), *args.args]
    module = "fsdp_compose.cli.traced"
    code = launch(module, script, nproc=args.nproc, env=_environment(), is_module=True)
    if code:
        return code
    from fsdp_compose.cli.look import finish_trace

    return finish_trace(args.out, args.nproc)


def _bench(args: argparse.Namespace) -> int:
    found = {
        path.stem: path
        for path in (_ROOT / "benchmarks").glob("*.py")
        if '__name__ == "__main__"' in path.read_text("utf-8")
    }
    if not found:
        raise UserError("benchmarks are part of the source tree: run this from a checkout.")
    if args.name is None:
        print("\n".join(sorted(found)))
        return 0
    if args.name not in found:
        raise UserError(f"no benchmark {args.name!r}; there are {', '.join(sorted(found))}.")
    environment = {**_environment(), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, str(found[args.name]), *args.args]
    return subprocess.run(command, check=False, env=environment).returncode


def _doctor(args: argparse.Namespace) -> int:
    from fsdp_compose.cli.doctor import run_doctor

    return run_doctor(args.json)


def _completion(args: argparse.Namespace) -> int:
    print(write_completion(args.shell, build_parser()), end="")
    return 0


def _run(args: argparse.Namespace) -> int:
    if args.module:
        return launch(
            str(args.script), args.args, nproc=args.nproc, env=_environment(), is_module=True
        )
    if not args.script.is_file():
        raise UserError(f"no such script: {args.script}")
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
