"""Run a corpus of kernels that others wrote, and record what came out: `python -m tests.outside.corpus FOLDER`.

FOLDER lies outside the repository, which has none of those kernels. Each of its `cases_*.py` describes kernels:

    from tests.outside.corpus import case

    @case("Triton tutorials", "3.0, a7e3476", archs=("sm_80", "sm_90"), source="01-vector-add.py")
    def add(emulate, arch):
        out = emulate(add_kernel, x, y, np.zeros_like(x), x.size, grid=2, BLOCK_SIZE=1024, arch=arch)
        np.testing.assert_array_equal(out[2], x + y)

`emulate` is the pytest fixture: all checks, an early and a late schedule. Each kernel runs in a process of its own with
limits on time and memory. What the checks find is recorded; the result is then compared in a run without checks.
"""

import argparse
import datetime
import importlib
import json
import multiprocessing
import os
import platform
import re
import resource
import sys
import time
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from ptxlab.errors import EmulationError, MemoryFault, PtxlabError, UnknownInstruction
from ptxlab.testing.emulate import CheckFailed, Emulate, Settings

RECORD = Path(__file__).parents[2] / "notebooks" / "results" / "corpus.json"
SECONDS, BYTES = 300, 12 << 30  # that a kernel may take
Check = Callable[[Emulate, str], None]
_PATH = re.compile(r"(?<![\w.])/(?:[^/\s:`]+/)+([^/\s:`]+)")


@dataclass(frozen=True)
class Case:
    """A kernel of the corpus for one architecture, and the function that runs and compares it.

    Attributes:
        project, version, source: whose kernel it is, and in which file.
        judged: what a person made of the findings: a bug of the kernel, or how it is right nevertheless.
        checks: the emulator's, of the run that is recorded.
    """

    name: str
    arch: str
    project: str
    version: str
    source: str
    check: Check
    judged: str = ""
    checks: str = "all"


@dataclass
class Outcome:
    """Outcome of a case: `result` is right, wrong, refused, fault (the emulator stopped it) or unfinished.

    `why` says more. `seconds` are those of the run with checks, of all schedules.
    """

    result: str = "right"
    why: str = ""
    forms: str = ""  # opcodes, in one line
    findings: list[dict[str, Any]] = field(default_factory=list)
    schedules: int = 0
    seconds: float = 0.0


CASES: list[Case] = []


def case(
    project: str,
    version: str,
    *,
    source: str,
    archs: Iterable[str] = ("sm_80",),
    judged: str = "",
    checks: str = "all",
    name: str = "",
) -> Callable[[Check], Check]:
    """Enter a function (emulate, arch) as a case of each architecture."""

    def enter(check: Check) -> Check:
        called = name or check.__name__
        CASES.extend(Case(called, arch, project, version, source, check, judged, checks) for arch in archs)
        return check

    return enter


class Observed(Emulate):
    """The fixture, which keeps opcodes, the names of the schedules that have run, and for how long."""

    def __init__(self, settings: Callable[[], Settings]) -> None:
        super().__init__(settings)
        self.forms: set[str] = set()
        self.schedules: tuple[str, ...] = ()
        self.seconds = 0.0

    def __call__(self, *args: Any, **named: Any) -> Any:
        started = time.perf_counter()
        try:
            out = super().__call__(*args, **named)
        finally:
            self.seconds += time.perf_counter() - started
        self.schedules = max(self.schedules, out.schedules, key=len)
        return out

    def _target(self, *args: Any) -> Any:
        started = time.perf_counter()
        try:
            target, arrays = super()._target(*args)
            instructions = target.kernel.module.entries[target.kernel.entry].instructions
            self.forms |= {instruction.opcode for instruction in instructions}
        finally:
            self.seconds -= time.perf_counter() - started
        return target, arrays


def one_line(error: BaseException) -> str:
    """Return the first line of a message, with the next if it ends in a colon.

    Files outside the corpus are named without their folders.
    """
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    joined = " ".join(lines[: 1 + (lines[0][-1] == ":")]) if lines else type(error).__name__
    return _PATH.sub(r"\1", joined)


def attempt(case: Case, folder: Path) -> Outcome:
    """Run a case here."""
    settings = Settings(folder=folder, root=folder, test=case.name, checks=case.checks, seeds=1)
    emulate, outcome = Observed(lambda: settings), Outcome()
    try:
        try:
            case.check(emulate, case.arch)
        except CheckFailed as error:
            outcome.findings = [
                {
                    "kind": note.kind,
                    "file": _PATH.sub(r"\1", note.path),
                    "line": note.line,
                    "message": one_line(Exception(note.message)),
                }
                for note in error.annotations
            ]
            outcome.seconds = emulate.seconds
            settings = replace(settings, checks="")
            case.check(emulate, case.arch)
    except AssertionError as error:
        outcome.result, outcome.why = "wrong", " ".join(str(error).split())[:300]
    except UnknownInstruction as error:
        outcome.result, outcome.why = "refused", one_line(error)
    except (MemoryFault, EmulationError) as error:
        outcome.result, outcome.why = "fault", one_line(error)
    except PtxlabError as error:
        outcome.result, outcome.why = "refused", one_line(error)
    except Exception as error:  # a traceback in the emulator is what a corpus is there to find
        place = error.__traceback__
        while place and place.tb_next:
            place = place.tb_next
        place_of_error = f"{Path(place.tb_frame.f_code.co_filename).name}:{place.tb_lineno}" if place else ""
        outcome.result, outcome.why = "crashed", f"{type(error).__name__}: {one_line(error)} ({place_of_error})"
    outcome.seconds = outcome.seconds or emulate.seconds
    outcome.forms, outcome.schedules = " ".join(sorted(emulate.forms)), len(emulate.schedules)
    return outcome


def _child(case: Case, folder: Path, pipe: Any) -> None:
    resource.setrlimit(resource.RLIMIT_DATA, (BYTES, BYTES))
    os.environ["OPENBLAS_NUM_THREADS"] = "1"
    pipe.send(attempt(case, folder))


def run(case: Case, folder: Path, seconds: float = SECONDS) -> Outcome:
    """Run a case in a process of its own, which is ended when its time is over."""
    receiver, sender = multiprocessing.Pipe(duplex=False)
    process = multiprocessing.get_context("fork").Process(target=_child, args=(case, folder, sender))
    process.start()
    sender.close()
    try:
        outcome: Outcome = receiver.recv() if receiver.poll(seconds) else Outcome("unfinished", f"after {seconds:g} s")
    except EOFError:
        outcome = Outcome("crashed", "the process ended")
    process.kill()
    process.join()
    return outcome


def load(folder: Path) -> list[Case]:
    """Load the cases of a folder's `cases_*.py`."""
    sys.path = [*sys.path, str(folder)]  # cases may share modules
    sys.modules.setdefault("tests.outside.corpus", sys.modules[__name__])  # where this file runs as `__main__`
    CASES.clear()
    for path in sorted(folder.glob("cases_*.py")):
        importlib.import_module(path.stem)
    return list(CASES)


def main() -> None:
    """Run the cases, print a line for each, and write the record."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--only", default="", metavar="TEXT", help="cases whose name, project or arch has this")
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--out", type=Path, metavar="FILE", help=f"write the record (with --only: merged), as {RECORD}")
    arguments = parser.parse_args()
    folder = arguments.folder.resolve()
    chosen = [c for c in load(folder) if arguments.only in f"{c.project} {c.name} {c.arch}"]

    def row(case: Case) -> dict[str, Any]:
        outcome = run(case, folder)
        print(f"{case.name:32} {case.arch:7} {outcome.result:10} {outcome.seconds:6.1f} s  "
              f"{len(outcome.findings)} findings  {outcome.why[:200]}", flush=True)  # fmt: skip
        for finding in outcome.findings[:4]:
            print(f"    {finding['message'][:300]}", flush=True)
        about = {name: entry for name, entry in asdict(replace(case, check=None)).items() if name != "check"}  # type: ignore[arg-type]
        return about | asdict(outcome) | {"seconds": round(outcome.seconds, 2)}

    with ThreadPoolExecutor(arguments.jobs) as pool:
        rows = list(pool.map(row, chosen))
    if arguments.out:
        kept_rows = (
            json.loads(arguments.out.read_text())["kernels"] if arguments.only and arguments.out.exists() else []
        )
        new_keys = {(r["project"], r["name"], r["arch"]) for r in rows}
        rows = [r for r in kept_rows if (r["project"], r["name"], r["arch"]) not in new_keys] + rows
        rows.sort(key=lambda r: (r["project"].lower(), r["name"], r["arch"]))
        record = {"date": datetime.date.today().isoformat(), "python": platform.python_version(), "kernels": rows}
        arguments.out.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
