"""A copy of the checkout, in which one mutant at a time lives, and what its tests say of it."""

import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from tests.mutants.table import ROOT, Mutant

KILLED, SURVIVED, EQUIVALENT, ERROR = "killed", "survived", "equivalent", "error"
_PARTS = ("pyproject.toml", "ptxlab", "ptx", "cuda_src", "tests", "notebooks/benchmarks", "notebooks/results")
_SECONDS = 300  # that all tests of a mutant may take
_TIMEOUT = 120  # seconds that one test may take: a mutant that hangs is noticed
_HANGS = re.compile(r"\++ Timeout \++$", re.MULTILINE)  # what pytest-timeout prints as it ends the process
_UNDECIDED = -1  # status of a run that was ended before any test had failed
# A mutant that cannot be built is none, whatever tests say of it.
_BROKEN = "CompileError|SourceError|UnknownInstruction|SyntaxError|NameError|ImportError|AttributeError"
_NO_MUTANT = re.compile(rf"^E +(?:[\w.]+\.)?({_BROKEN}):", re.MULTILINE)


@dataclass(frozen=True)
class Outcome:
    """The outcome of a mutant: `verdict`, seconds, and the test that noticed or what went wrong."""

    mutant: Mutant
    verdict: str
    seconds: float
    detail: str

    @property
    def good(self) -> bool:
        """Return whether the mutant fares as the list has it."""
        return self.verdict in (KILLED, EQUIVALENT)


class Copy:
    """A copy of the checkout, with a cache of compiled kernels of its own. The checkout itself is never written to."""

    def __init__(self, folder: Path, root: Path = ROOT) -> None:
        self.folder, self.tried = folder, 0
        folder.mkdir(parents=True, exist_ok=True)
        for name in _PARTS:
            source, target = root / name, folder / name
            if source.is_dir():
                shutil.copytree(source, target, ignore=shutil.ignore_patterns(".*"))
            elif source.exists():
                shutil.copy2(source, target)

    def run(self, tests: Iterable[str], workers: int = 0, seconds: float | None = None) -> tuple[int, str]:
        """pytest's exit status and output, up to the first failure or, without a verdict, for so many seconds."""
        unset = "PYTEST_", "PYTHONDONTWRITEBYTECODE"  # most of a run is imports, which the next one finds compiled
        env = {name: value for name, value in os.environ.items() if not name.startswith(unset)}
        env |= {"PYTHONPATH": str(self.folder), "PTXLAB_CACHE_DIR": str(self.folder / ".cache")}
        env.setdefault("PYTHONPYCACHEPREFIX", str(self.folder / ".bytecode"))
        command = [sys.executable, "-m", "pytest", "-n", str(workers), "-x", "-p", "no:cacheprovider", "--tb=short"]
        # By signal it would raise in the test, and Hypothesis would run a test that failed again, without a limit.
        command += [f"--timeout={_TIMEOUT}", "--timeout-method=thread", "-m", "not gpu", *tests]
        try:
            done = subprocess.run(command, cwd=self.folder, env=env, capture_output=True, text=True, timeout=seconds)
        except subprocess.TimeoutExpired:
            return _UNDECIDED, f"nothing failed in {seconds:.0f} s"
        return done.returncode, done.stdout + done.stderr

    def try_out(self, mutant: Mutant) -> Outcome:
        """Make the mistake, run the tests that should notice, and take it back."""
        path, start = self.folder / mutant.file, time.perf_counter()
        before, stat = path.read_text(encoding="utf-8"), path.stat()
        try:
            path.write_text(mutant.changed(before), encoding="utf-8")
            # Python knows bytecode by the source's size and second: two mutants may share the one, never the other.
            self.tried += 1
            os.utime(path, (stat.st_atime, stat.st_mtime + self.tried))
            verdict, detail = judged(mutant, *self.run(mutant.killed_by, seconds=_SECONDS))
        except ValueError as error:
            verdict, detail = ERROR, str(error)
        finally:
            path.write_text(before, encoding="utf-8")
            os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns))
        return Outcome(mutant, verdict, time.perf_counter() - start, detail)


def judged(mutant: Mutant, status: int, output: str) -> tuple[str, str]:
    """(verdict, detail) of a run of pytest: 0 all passed, 1 some failed, else it could not run them."""
    last = (output.strip().splitlines() or ["nothing"])[-1].strip("= ")
    failed = re.search(r"^(?:FAILED|ERROR) (\S+)", output, re.MULTILINE)
    noticed_by = failed[1] if failed else f"a test that had not ended after {_TIMEOUT} s"
    if status == 0:
        return (EQUIVALENT, mutant.equivalent) if mutant.equivalent else (SURVIVED, last)
    if status == _UNDECIDED:
        return ERROR, last
    if status != 1 or not (failed or _HANGS.search(output)):
        return ERROR, f"pytest ended with {status}: {last}"
    if broken := _NO_MUTANT.search(output):
        return ERROR, f"not built: {broken[1]} in {noticed_by}"
    if mutant.equivalent:
        return ERROR, f"listed as equivalent, but killed by {noticed_by}"
    return KILLED, noticed_by
