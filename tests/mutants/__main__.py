"""`python -m tests.mutants`: try the mutants, print what became of each, and fail if one survives."""

import argparse
import os
import sys
import tempfile
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import islice
from pathlib import Path
from queue import SimpleQueue

from tests.mutants.draw import all_drawn
from tests.mutants.runner import ERROR, Copy, Outcome
from tests.mutants.table import ROOT, Mutant, load


def main(arguments: Sequence[str] | None = None) -> int:
    """Return the exit status: 0 if every mutant is killed, or survives for the reason that is listed."""
    parser = argparse.ArgumentParser("python -m tests.mutants", description=__doc__)
    parser.add_argument("pattern", nargs="?", default="", help="only mutants with this in their name or file")
    parser.add_argument("--ci", action="store_true", help="only those that CI tries")
    parser.add_argument("--list", action="store_true", help="list them, and try none")
    parser.add_argument("--draw", metavar="HASH/N", help="draw N mistakes of the files of `draw.py` by a hash instead")
    parser.add_argument("-j", type=int, default=os.cpu_count() or 1, metavar="N", help="how many at a time")
    given = parser.parse_args(arguments)
    spare: Iterable[Mutant] = ()
    if given.draw:
        seed, _, count = given.draw.rpartition("/")
        if not seed or not count.isdecimal():
            parser.error(f"--draw expects HASH/N, such as 4d1718cd/30 (got {given.draw})")
        spare = all_drawn(seed, given.pattern)
        chosen = list(islice(spare, int(count)))
    else:
        chosen = [m for m in load() if given.pattern in f"{m.file}: {m.what}" and (m.ci or not given.ci)]
    if not chosen:
        parser.error(f"no mutant has {given.pattern!r} in its name or file")
    if given.list:
        print("\n".join(f"{m.file}: {m.what}{' (equivalent)' if m.equivalent else ''}" for m in chosen))
        return 0
    with tempfile.TemporaryDirectory(prefix="ptxlab-mutants-") as folder:
        return try_all(chosen, Path(folder), max(1, given.j), spare=spare)


def try_all(mutants: list[Mutant], folder: Path, workers: int, root: Path = ROOT, spare: Iterable[Mutant] = ()) -> int:
    """Try mutants in as many copies as there are workers, once their tests have passed without any mutant.

    Of each that turns out to be none, the next of `spare` takes the place, and it does not count.
    """
    free: SimpleQueue[Copy] = SimpleQueue()
    for i in range(workers):
        free.put(first := Copy(folder / str(i), root))
    spare, outcomes, passed = iter(spare), list[Outcome](), set[str]()

    def try_out(mutant: Mutant) -> Outcome:
        copy = free.get()
        try:
            return copy.try_out(mutant)
        finally:
            free.put(copy)

    while mutants:
        tests = [test for mutant in mutants for test in mutant.killed_by if test not in passed]
        status, output = first.run(dict.fromkeys(tests), workers if workers > 1 else 0) if tests else (0, "")
        if status:
            print(f"{output}\nwithout a mutant all tests must pass")
            return 2
        passed.update(tests)
        with ThreadPoolExecutor(workers) as pool:
            tried = [show(outcome) for outcome in pool.map(try_out, mutants)]
        mutants = list(islice(spare, sum(outcome.verdict == ERROR for outcome in tried)))
        outcomes += [outcome for outcome in tried if not mutants or outcome.verdict != ERROR]
    return report(outcomes)


def show(outcome: Outcome) -> Outcome:
    """Print what became of a mutant."""
    print(f"{outcome.verdict:10} {outcome.seconds:6.1f} s  {outcome.mutant.file}: {outcome.mutant}", flush=True)
    print(f"{'':21}{outcome.detail}", flush=True)
    return outcome


def report(outcomes: Sequence[Outcome]) -> int:
    """Print how many there were of which kind; return the exit status."""
    kinds = [outcome.verdict for outcome in outcomes]
    counts = ", ".join(f"{kinds.count(kind)} {kind}" for kind in dict.fromkeys(kinds))
    print(f"{len(kinds)} mutants: {counts}; {sum(outcome.seconds for outcome in outcomes):.0f} s")
    return 0 if all(outcome.good for outcome in outcomes) else 1


if __name__ == "__main__":
    sys.exit(main())
