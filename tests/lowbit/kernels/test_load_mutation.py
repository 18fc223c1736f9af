"""Would anybody notice? Each synchronising instruction of the load kernels is taken out, one at a time.

A mutant is found by a finding, by a wrong result (early or late), by a deadlock or by a fault.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np
import pytest

from ptxlab import emulator, registry
from ptxlab.errors import EmulationError
from ptxlab.runtime import run_spec
from ptxlab.sources import Source

NAMES = [name for name in registry.specs() if name.startswith("load_")]
SIZES = {"T": 3, "P": 11, "B": 2}  # rounds of the ring enough to use every stage again
# Nobody but its own thread needs what fence.mbarrier_init orders.
SYNCHRONISING = re.compile(
    r"^\s*(bar\.sync|cp\.async\.(commit_group|wait_group)|mbarrier\.(init|arrive|try_wait)|fence\.(?!mbarrier_init))",
    re.MULTILINE,
)


@dataclass(frozen=True)
class Mutant:
    kernel: str
    line: int
    removed: str
    source: Source

    def __str__(self) -> str:
        return f"{self.kernel}:{self.line}: {self.removed}"


def mutants(name: str) -> Iterator[Mutant]:
    """Yield the kernel without each synchronising line, or with its bytes not expected.

    The branch back to a wait goes with the wait.
    """
    source = registry.find(name)[1][0]
    lines = source.text.split("\n")
    for i, line in enumerate(lines):
        if not SYNCHRONISING.match(line):
            continue
        gone = 2 if "try_wait" in line else 1
        changes = {line.strip(): [""] * gone}
        if "arrive.expect_tx" in line:
            without_bytes = re.sub(r"arrive\.expect_tx(.*), \d+;", r"arrive\1;", line)
            changes["expect_tx of " + line.strip()] = [without_bytes]
        for change, instead in changes.items():
            text = "\n".join([*lines[:i], *instead, *lines[i + len(instead) :]])
            yield Mutant(name, i + 1, change, replace(source, text=text))


def diagnosis(mutant: Mutant, mode: str) -> list[str]:
    """Return findings, the error, or "wrong result"; the list is empty if there is none."""
    spec = registry.specs()[mutant.kernel]
    sizes = {symbol: SIZES[symbol] for symbol in spec.example_sizes[0]}
    logical = spec.example(np.random.default_rng(0), **sizes)
    try:
        outcome = run_spec(
            spec, mutant.source, spec.pack(logical), sizes=sizes, backend="emulator", checks=emulator.CHECKS, mode=mode
        )
    except EmulationError as error:
        return [str(error)]
    findings = [str(finding) for finding in outcome.findings]
    right = np.array_equal(outcome.outputs[spec.outputs[0].name], spec.reference(**logical))
    return findings + ([] if right else ["wrong result"])


MUTANTS = [mutant for name in NAMES for mutant in mutants(name)]
FATAL = re.compile(r"deadlock: |no initialised mbarrier|arrivals, but the mbarrier")


def memory_lines(source: Source) -> set[int]:
    """Return the numbers of the lines that touch shared memory or its barriers, where missing synchronisation shows."""
    opcodes = r"\b(ld\.shared|st\.shared|ldmatrix|cp\.async|mbarrier)"
    return {i for i, line in enumerate(source.text.split("\n"), 1) if re.search(opcodes, line.partition("//")[0])}


@pytest.mark.full_cases(
    "load_bulk_sm90:54: m*",
    "load_bulk_sm90:54: e*",
    "load_bulk_sm90:6*",
    "load_bulk_sm90:7*",
    "load_bulk_sm90:11*",
    "load_bulk_sm90:124: m*",
    "load_bulk_sm90:124: e*",
    "load_lds32_u4:42: bar.sync        0;",
    "load_cp_async:56: cp.async.commit_group;",
    "load_cp_async:79: cp.async.commit_group;",
    "load_cp_async:81: cp.async.wait_group 3;",
)
@pytest.mark.parametrize("mutant", MUTANTS, ids=str)
def test_every_missing_step_is_found_early_and_late(mutant: Mutant) -> None:
    for mode in emulator.MODES:
        complaints = diagnosis(mutant, mode)
        assert complaints, f"nobody notices, {mode}"
        first = complaints[0]
        line = re.search(r"\.ptx:(\d+): ", first)
        assert line and int(line[1]) in memory_lines(mutant.source), first
        assert first.split(":")[0] in ("race", "async") or FATAL.search(first), first


@pytest.mark.parametrize(
    ("kernel", "removed", "named"),
    [
        ("load_dual_mma", "bar.sync", r"race: .*`ld\.shared\.v4.* races with line \d+, `st\.shared"),
        (
            "load_cp_async",
            "cp.async.wait_group",
            r"async: .*`ld\.shared\.v4.*still being written by line \d+, `@%copies cp",
        ),
        (
            "load_bulk_sm90",
            "mbarrier.try_wait",
            r"async: .*`ld\.shared\.v4.*still being written by line \d+, `cp\.async\.b",
        ),
        (
            "load_bulk_sm90",
            "mbarrier.arrive",
            r"deadlock: (?s:.)*try_wait.* waits for phase 0 of the mbarrier at byte 0 of",
        ),
    ],
)
def test_messages_of_missing_steps(kernel: str, removed: str, named: str) -> None:
    mutant = next(m for m in MUTANTS if m.kernel == kernel and m.removed.startswith(removed))
    assert re.match(named, diagnosis(mutant, "early")[0])


def test_every_kind_of_step_is_taken_out() -> None:
    removed = {re.sub(r"[\s;].*", "", mutant.removed.removeprefix("expect_tx of ")) for mutant in MUTANTS}
    assert {"bar.sync", "cp.async.commit_group", "cp.async.wait_group"} <= removed
    assert len(MUTANTS) == 20
