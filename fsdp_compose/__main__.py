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
from importlib.util import find_spec
from pathlib import Path
from typing import TypeAlias, cast

from fsdp_compose.cli.completion import SHELLS, write_completion
from fsdp_compose.cli.errors import UserError
from fsdp_compose.cli.launch import launch

__all__ = ["main"]

Commands: TypeAlias = "argparse._SubParsersAction[argparse.ArgumentParser]"
Handler: TypeAlias = Callable[[argparse.Namespace], int]

_ROOT = Path(__file__).resolve().parent.parent
_DEMO = _ROOT / "examples" / "demo.py"


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command and returns its exit code."""
    args, unknown = build_parser().parse_known_args(argv)
    if unknown:
        args.parser.error(f"unrecognized arguments: {' '.join(unknown)}")
    handler = cast(Handler, args.handler)
    try:
        return handler(args)
    except UserError as error:
        print(f"fsdp-compose: {' '.join(str(error).split())}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:  # the reader of our output has closed it, as `head` does
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except OSError as error:  # a full disk, to which our output goes
        print(f"fsdp-compose: {error}", file=sys.stderr)
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1


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


def _add(
    commands: Commands, name: str, handler: Handler, text: str, description: str
) -> argparse.ArgumentParser:
    command = commands.add_parser(name, help=text, description=description)
    command.set_defaults(handler=handler, parser=command)
    return command


def _add_demo(commands: Commands) -> None:
    command = _add(
        commands, "demo", _demo,
        "train a small GPT on local ranks and check it against one process",
        "Runs examples/demo.py on local ranks. Its own options go after --, as in: "
        "fsdp-compose demo --nproc 2 -- --steps 50",
    )  # fmt: skip
    _add_nproc(command)
    command.add_argument("args", nargs="*", metavar="ARG", help="options for the script, after --")


def _add_run(commands: Commands) -> None:
    command = _add(
        commands, "run", _run, "run a script on local ranks",
        "Starts local ranks of a script with the environment variables of torchrun.",
    )  # fmt: skip
    _add_nproc(command)
    command.add_argument(
        "--simulate",
        type=_positive,
        metavar="N",
        help="N ranks in one process, as for pdb, in place of --nproc",
    )
    command.add_argument("--seed", type=int, help="of the simulation's order (default: 0)")
    command.set_defaults(nproc=None)  # to tell whether it was given
    _add_script(command)


def _add_checkpoint(commands: Commands) -> None:
    command = commands.add_parser("checkpoint", help="look into a checkpoint, or convert it")
    actions = command.add_subparsers(metavar="ACTION", dest="action", required=True)
    show = actions.add_parser("show", help="list what a checkpoint holds")
    show.set_defaults(handler=_checkpoint, parser=show)
    show.add_argument("path", type=_path, help="a folder, or a file of safetensors")
    show.add_argument("--verify", action="store_true", help="read the files, compare checksums")
    show.add_argument("--all", action="store_true", help="a line for each name, none folded")
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
    convert.set_defaults(handler=_checkpoint, parser=convert, action="convert")
    convert.add_argument("source", type=_path, help="what is read")
    convert.add_argument("target", type=_path, help="a folder that is not there yet")
    convert.add_argument("--max-file-bytes", type=_positive, metavar="N", help="of one file")
    convert.add_argument(
        "--prefix",
        default="model",
        metavar="NAME",
        help="where the model is in the sharded checkpoint; '' for the top (default: model)",
    )


def _add_plan(commands: Commands) -> None:
    command = _add(
        commands, "plan", _plan, "say what sharding a model costs, and whether it fits",
        "Plans without memory and without a process group. The exit code is 1 where the model does "
        "not fit.",
    )  # fmt: skip
    add = command.add_argument
    add("model", metavar="MODEL", help="PATH:NAME of a Python file, which is imported, or "
        "package.module:NAME, a function without arguments that returns a module; or a "
        "config.json")  # fmt: skip
    add("--world-size", default="8", metavar="N", help="ranks; 4x8 for replicas x shards "
        "(default: 8)")  # fmt: skip
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


STRATEGIES = (
    "full_shard", "shard_grad_op", "zero1", "no_shard", "hybrid_shard", "hybrid_shard_zero2",
    "hybrid_shard_optimizer",
)  # fmt: skip


def _add_trace(commands: Commands) -> None:
    command = _add(
        commands, "trace", _trace, "run a script on local ranks and record a timeline",
        "Runs as `run` does, and writes trace.json for Perfetto, and timeline.svg and memory.svg "
        "of the last step of rank 0 where matplotlib is installed; also of a script that fails.",
    )  # fmt: skip
    _add_nproc(command)
    command.add_argument(
        "--out", type=Path, default=Path("trace"), metavar="FOLDER", help="default: trace"
    )
    _add_script(command)


def _add_bench(commands: Commands) -> None:
    command = _add(
        commands, "bench", _bench, "run a benchmark of a checkout",
        "Runs one of the benchmarks with one thread; without NAME, lists them.",
    )  # fmt: skip
    command.add_argument("name", nargs="?", metavar="NAME")
    command.add_argument("args", nargs=argparse.REMAINDER, metavar="ARG", help="its arguments")


def _add_doctor(commands: Commands) -> None:
    command = _add(
        commands, "doctor", _doctor,
        "check torch, backends, devices, network and a gather between two ranks",
        "Looks at this machine; the exit code is 1 where something is wrong.",
    )  # fmt: skip
    command.add_argument("--json", action="store_true", help="what was found as JSON")


def _add_completion(commands: Commands) -> None:
    command = _add(
        commands, "completion", _completion, "print what lets a shell complete these commands",
        "For bash, in ~/.bashrc: source <(fsdp-compose completion bash). The scripts for zsh and "
        "fish are sourced likewise.",
    )  # fmt: skip
    command.add_argument("shell", choices=sorted(SHELLS))


def _add_nproc(command: argparse.ArgumentParser) -> None:
    command.add_argument(
        "--nproc", type=_positive, default=2, metavar="N", help="local ranks (default: 2)"
    )


def _add_script(command: argparse.ArgumentParser) -> None:
    command.add_argument("-m", dest="module", action="store_true", help="SCRIPT names a module")
    command.add_argument("script", metavar="SCRIPT", help="a Python file, or with -m a module")
    rest = command.add_argument(
        "args", nargs=argparse.REMAINDER, metavar="ARG", help="its arguments"
    )
    rest.required = False  # a script may have none; Python 3.11 lists them as missing


def _positive(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"wants a whole number of at least 1, found {text!r}")
    return int(text)


def _path(text: str) -> Path:
    if not text:
        raise argparse.ArgumentTypeError("wants a path, found an empty text")
    return Path(text)


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
    from fsdp_compose.cli.plan import run_plan  # which imports torch

    return run_plan(args)


def _trace(args: argparse.Namespace) -> int:
    _check_script(args)
    try:
        args.out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"--out is {args.out}, which cannot be made: {error.strerror}") from None
    script = [str(args.out), *(["-m"] if args.module else []), args.script, *args.args]
    module = "fsdp_compose.cli.traced"
    code = launch(module, script, nproc=args.nproc, env=_environment(), is_module=True)
    from fsdp_compose.cli.traced import finish_trace

    if not finish_trace(args.out, args.nproc) and not code:
        raise UserError("nothing was recorded: the script sharded no module, or ran no forward.")
    return code


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
    _check_script(args)
    if args.simulate:
        if args.nproc is not None:
            raise UserError(
                "--nproc and --simulate both say how many ranks: leave one of them out."
            )
        from fsdp_compose.cli.simulate import run_simulated  # which imports torch

        return run_simulated(args.script, args.args, args.simulate, args.seed or 0, args.module)
    if args.seed is not None:
        raise UserError("--seed is the order of a simulation: pass --simulate N, or leave it out.")
    env = _environment()
    return launch(args.script, args.args, nproc=args.nproc or 2, env=env, is_module=args.module)


def _check_script(args: argparse.Namespace) -> None:
    """Raise where the script, or the package of the module, is not there."""
    if not args.module:
        if not Path(args.script).is_file():
            raise UserError(f"no such script: {args.script}")
        return
    package = args.script.partition(".")[0]
    sys.path.insert(0, os.getcwd())  # as `python -m` does
    try:
        found = package in sys.modules or (package and find_spec(package))
    finally:
        sys.path.pop(0)
    if not found:
        raise UserError(f"no such module: {args.script}; it is looked for here and in {sys.prefix}")


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
