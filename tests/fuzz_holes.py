"""Puts closed holes back, one at a time, and has the fuzzer find them again.

    python tests/fuzz_holes.py                     # every patch of tests/holes, a line for each
    python tests/fuzz_holes.py unused_gets_zeros   # these

A patch is a unified diff against the package that opens one hole. Above it stand what was wrong,
the program or the seeds that find it, and words of the finding. Each patch is applied to the
sources in memory, in a process of its own that has imported torch and not the package; then the
fuzzer runs the programs that once failed and the seeds, and if these fit no more, since the fuzzer
draws other programs, others after them.
"""

from __future__ import annotations

import argparse
import importlib.machinery
import json
import os
import re
import sys
import time
import traceback
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import CodeType
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
HOLES = ROOT / "tests" / "holes"
SPARE_SEEDS = range(400)
OWN_FAULT = re.compile(
    r"\b(SyntaxError|ImportError|NameError|ModuleNotFoundError|IndentationError)\b"
)


@dataclass(frozen=True)
class Hole:
    """A patch that opens a closed hole.

    Attributes:
        wrong: what was wrong.
        program: words of the name of a program of ``fuzz_found`` that finds it; "" for none.
        seeds: programs that find it, each on as many ranks as ``world_of`` says.
        finding: a regular expression that the finding matches.
        files: the changed files' sources, by path from the root.
    """

    name: str
    wrong: str
    program: str
    seeds: tuple[int, ...]
    finding: str
    files: dict[str, str]


def read_hole(path: Path) -> Hole:
    """The hole of a patch file.

    Raises:
        ValueError: the patch does not apply to the package's sources.
    """
    head, diff = re.split(r"^(?=--- )", path.read_text(), maxsplit=1, flags=re.MULTILINE)
    said = dict(
        re.findall(r"^# (wrong|program|seeds|finding): (.*(?:\n#   .*)*)", head, re.MULTILINE)
    )
    wrong = re.sub(r"\n#\s+", " ", said["wrong"])
    seeds = tuple(map(int, said.get("seeds", "").split()))
    return Hole(
        path.stem, wrong, said.get("program", ""), seeds, said["finding"], apply(diff, path.name)
    )


def all_holes() -> list[Path]:
    return sorted(HOLES.glob("*.patch"))


def apply(diff: str, name: str) -> dict[str, str]:
    """The sources after a unified diff, by path; each hunk must be found exactly once."""
    sources: dict[str, str] = {}
    for part in re.split(r"^(?=--- )", diff, flags=re.MULTILINE)[1:]:
        path = re.match(r"--- a/(.*)\n", part)
        assert path is not None
        source = (ROOT / path[1]).read_text()
        for hunk in re.split(r"^@@.*\n", part, flags=re.MULTILINE)[1:]:
            lines = hunk.splitlines(keepends=True)
            old = "".join(line[1:] for line in lines if line[:1] in " -")
            new = "".join(line[1:] for line in lines if line[:1] in " +")
            if source.count(old) != 1:
                raise ValueError(f"{name}: a hunk of {path[1]} is found {source.count(old)} times")
            source = source.replace(old, new)
        sources[path[1]] = source
    return sources


class _Patched(importlib.machinery.SourceFileLoader):
    """Loads a module from another source; nothing of it is cached."""

    def __init__(self, name: str, path: str, source: str) -> None:
        super().__init__(name, path)
        self.source = source

    def get_code(self, fullname: str) -> CodeType | None:
        return compile(self.source, self.path, "exec", dont_inherit=True)


class _Finder:
    """Finds the modules of a hole before Python finds those on the disk."""

    def __init__(self, files: dict[str, str]) -> None:
        self.sources = {str(ROOT / path): source for path, source in files.items()}

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        if not name.startswith("fsdp_compose"):
            return None
        spec = importlib.machinery.PathFinder.find_spec(name, path)
        if spec is not None and spec.origin in self.sources:
            spec.loader = _Patched(name, spec.origin, self.sources[spec.origin])
        return spec


def search(hole: Hole, spare: Sequence[int]) -> dict[str, Any]:
    """Open the hole in this process, and run its seeds, then ``spare``, until one finds it."""
    sys.meta_path.insert(0, _Finder(hole.files))  # type: ignore[arg-type]
    import logging

    from fuzz import case_of, failure_of
    from fuzz_found import FOUND
    from fuzz_programs import world_of

    logging.disable(logging.WARNING)
    began, others = time.process_time(), []
    programs = [(f"the program {name!r}", case, 0) for name, case in FOUND.items()]
    programs.sort(key=lambda program: not hole.program or hole.program not in program[0])
    for seed in dict.fromkeys([*hole.seeds, *spare]):
        programs.append((f"seed {seed}", case_of(seed, world_of(seed)), seed))
    for count, (name, case, seed) in enumerate(programs):
        text = failure_of(case, seed) or ""
        if text and re.search(hole.finding, text) and not OWN_FAULT.search(text):
            shown = re.search(rf"[^\n]*(?:{hole.finding})[^\n]*", text)
            return {
                "by": f"{name} of world {case.world}",
                "tried": count + 1,
                "seconds": round(time.process_time() - began, 1),
                "finding": (shown[0] if shown else text)[:300],
            }
        if text:
            others.append(f"{name} of world {case.world}: {text[:200]}")
    return {"by": None, "others": others[:3], "tried": len(programs)}


def search_apart(hole: Hole, spare: Sequence[int]) -> dict[str, Any]:
    """``search`` in a forked process, which ends with its patched package."""
    reader, writer = os.pipe()
    pid = os.fork()
    if not pid:
        status = 1
        try:
            os.close(reader)
            with os.fdopen(writer, "w") as out:
                json.dump(search(hole, spare), out)
            status = 0
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(status)
    os.close(writer)
    with os.fdopen(reader) as found:
        text = found.read()
    os.waitpid(pid, 0)
    return dict(json.loads(text)) if text else {"by": None, "others": ["the process ended"]}


def import_torch() -> None:
    """Import what the package imports, and not the package, so that each fork need not."""
    import torch
    import torch._dynamo
    import torch.distributed.checkpoint.state_dict
    import torch.distributed.device_mesh
    import torch.distributed.tensor
    import torch.multiprocessing.reductions
    import torch.utils.checkpoint

    torch.set_num_threads(1)
    assert not any(name.startswith("fsdp_compose") for name in sys.modules)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("names", nargs="*", help="holes; none: all")
    parser.add_argument("--json", action="store_true", help="print lines for a program")
    options = parser.parse_args(arguments)
    paths = [HOLES / f"{name}.patch" for name in options.names] or all_holes()
    import_torch()
    missed = 0
    for path in paths:
        hole = read_hole(path)
        found = search_apart(hole, SPARE_SEEDS)
        missed += found["by"] is None
        if options.json:
            print(json.dumps({"hole": hole.name, **found}), flush=True)
        elif found["by"] is None:
            print(f"{hole.name}: NOT FOUND. {found}", flush=True)
        else:
            print(f"{hole.name}: {found['by']}: {found['finding']}", flush=True)
    return int(missed > 0)


if __name__ == "__main__":
    sys.path[:0] = [str(ROOT), str(ROOT / "tests")]
    sys.exit(main())
