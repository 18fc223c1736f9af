"""`python -m tests.mutants`: try the mutants, print what became of each, and fail if one survives."""

import argparse
import os
import sys
import tempfile
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from queue import SimpleQueue

from tests.mutants.draw import draw
from tests.mutants.runner import Copy, Outcome
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
    if given.draw:
        seed, _, count = given.draw.rpartition("/")
        if not seed or not count.isdecimal():
            parser.error(f"--draw expects HASH/N, such as 4d1718cd/30 (got {given.draw})")
        chosen = draw(seed, int(count), given.pattern)
    else:
        chosen = [m for m in load() if given.pattern in f"{m.file}: {m.what}" and (m.ci or not given.ci)]
    if not chosen:
        parser.error(f"no mutant has {given.pattern!r} in its name or file")
    if given.list:
        print("\n".join(f"{m.file}: {m.what}{' (equivalent)' if m.equivalent else ''}" for m in chosen))
        return 0
    with tempfile.TemporaryDirectory(prefix="ptxlab-mutants-") as folder:
        return try_all(chosen, Path(folder), max(1, given.j))


def try_all(mutants: list[Mutant], folder: Path, workers: int, root: Path = ROOT) -> int:
    """Try mutants in as many copies as there are workers, once the tests have passed without any mutant."""
    free: SimpleQueue[Copy] = SimpleQueue()
    for i in range(workers):
        free.put(first := Copy(folder / str(i), root))
    status, output = first.run(
        dict.fromkeys(test for mutant in mutants for test in mutant.killed_by), workers if workers > 1 else 0
    )
    if status:
        print(f"{output}\nwithout a mutant all tests must pass")
        return 2

    def try_out(mutant: Mutant) -> Outcome:
        copy = free.get()
        try:
            return copy.try_out(mutant)
        finally:
            free.put(copy)

    with ThreadPoolExecutor(workers) as pool:
        return report(pool.map(try_out, mutants))


def report(outcomes: Iterable[Outcome]) -> int:
    """Print each as it comes, and how many there were of which kind."""
    all_of_them = []
    for outcome in outcomes:
        all_of_them.append(outcome)
        print(f"{outcome.verdict:10} {outcome.seconds:6.1f} s  {outcome.mutant.file}: {outcome.mutant}", flush=True)
        print(f"{'':21}{outcome.detail}", flush=True)
    kinds = [outcome.verdict for outcome in all_of_them]
    counts = ", ".join(f"{kinds.count(kind)} {kind}" for kind in dict.fromkeys(kinds))
    print(f"{len(kinds)} mutants: {counts}; {sum(outcome.seconds for outcome in all_of_them):.0f} s")
    return 0 if all(outcome.good for outcome in all_of_them) else 1


if __name__ == "__main__":
    sys.exit(main())
