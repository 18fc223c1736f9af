"""`python -m tests.fuzz --seconds N --seed S --jobs J --out FOLDER`: run the fuzzer, and add to the record."""

import argparse
import os
import sys
import time
from pathlib import Path

from ptxlab import gpu as devices
from ptxlab import sources
from tests.fuzz import evidence, gpu, record
from tests.fuzz.categories import CATEGORIES
from tests.fuzz.examine import build, examine
from tests.fuzz.workers import Task, outcomes


def main() -> int:
    """Return the exit status: 0 if nothing differs and nothing failed."""
    parser = argparse.ArgumentParser("python -m tests.fuzz", description=__doc__)
    parser.add_argument("--seconds", type=float, default=60)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--out", type=Path, required=True, metavar="FOLDER", help="where the record and mismatches go")
    parser.add_argument("--category", default="", choices=["", *CATEGORIES], help="only programs of this kind")
    parser.add_argument("--program", type=int, metavar="NUMBER", help="print and examine one program of the seed")
    options = parser.parse_args()
    on_gpu = gpu.is_available()
    if options.program is not None:
        print(build(options.seed, options.program, options.category).render())
        outcome = examine(options.seed, options.program, options.category, on_gpu)
        evidence.save(outcome, options.seed, options.out)
        print(*outcome.mismatches, *outcome.failures, sep="\n")
        return int(bool(outcome.mismatches or outcome.failures))
    run = fuzz(Task(options.seed, options.category, on_gpu, time.time() + options.seconds), options.jobs, options.out)
    print(f"seed {run.seed}: {sum(run.programs.values())} programs, {run.values} values, {run.seconds:.0f} s, "
          f"{len(run.mismatches)} mismatches, {sum(run.failures.values())} failures")  # fmt: skip
    print(*run.mismatches[:20], *run.texts, sep="\n")
    add_to_record(run, options.out, on_gpu)
    return int(not run.is_clean)


def fuzz(task: Task, jobs: int, out: Path) -> record.Run:
    """Examine programs until the deadline; write evidence of mismatches as they come."""
    run, started = record.Run(task.seed), time.time()
    for answer in outcomes(task, jobs):
        if isinstance(answer, str):
            run.fail("worker", answer)
        else:
            run.add(answer)
            evidence.save(answer, task.seed, out)
    run.seconds = round(time.time() - started, 1)
    return run


def add_to_record(run: record.Run, out: Path, on_gpu: bool) -> None:
    """Add a run to the GPU's record, and write a copy of that into the output folder."""
    device = {"name": "none: the emulator's modes", "slug": "cpu", "driver": ""}
    if on_gpu:
        info = devices.device_info()
        device = {"name": info.name, "slug": info.slug, "driver": info.driver}
    recorded = sources.results_dir() / device["slug"] / "fuzz.json"
    merged = record.merge(run, device, recorded if on_gpu else out / "fuzz.json")
    for path in (recorded, out / "fuzz.json") if on_gpu else (out / "fuzz.json",):
        record.save(merged, path)


if __name__ == "__main__":
    sys.exit(main())
