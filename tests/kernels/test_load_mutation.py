"""Would anybody notice? Each synchronising instruction of the load kernels is taken out, one at a time.

A mutant is found by a finding, by a wrong result (early or late), by a deadlock or by a fault.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np
import pytest

from ptxlab import emulator, kernels
from ptxlab.errors import EmulationError
from ptxlab.runtime import run_spec
from ptxlab.sources import Source

NAMES = [name for name in kernels.specs() if name.startswith("load_")]
SIZES = {"T": 3, "P": 11, "B": 2}  # rounds of the ring enough to use every stage again
SYNCHRONISING = re.compile(
    r"^\s*(bar\.sync|cp\.async\.(commit_group|wait_group)|mbarrier\.(init|arrive|try_wait)|fence\.)", re.MULTILINE
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
    """Every kernel with one such line gone (the branch back to a wait goes with it), or with its bytes not expected."""
    source = kernels.find(name)[1][0]
    lines = source.text.split("\n")
    for i, line in enumerate(lines):
        if not SYNCHRONISING.match(line):
            continue
        gone = 2 if "try_wait" in line else 1
        changes = {line.strip(): [""] * gone}
        if "arrive.expect_tx" in line:
            less = re.sub(r"arrive\.expect_tx(.*), \d+;", r"arrive\1;", line)
            changes["expect_tx of " + line.strip()] = [less]
        for what, instead in changes.items():
            text = "\n".join([*lines[:i], *instead, *lines[i + len(instead) :]])
            yield Mutant(name, i + 1, what, replace(source, text=text))


def diagnosis(mutant: Mutant, mode: str) -> list[str]:
    """Lines of the source that are named, or what else happened; nothing if all seems well."""
    spec = kernels.specs()[mutant.kernel]
    sizes = {symbol: SIZES[symbol] for symbol in spec.example_sizes[0]}
    logical = spec.example(np.random.default_rng(0), **sizes)
    try:
        outcome = run_spec(
            spec,
            mutant.source,
            spec.pack(logical),
            sizes=sizes,
            backend="emulator",
            checks=emulator.CHECKS,
            mode=mode,
        )
    except EmulationError as error:
        return [str(error)]
    found = [str(finding) for finding in outcome.findings]
    right = np.array_equal(outcome.outputs[spec.outputs[0].name], spec.reference(**logical))
    return found + ([] if right else ["wrong result"])


MUTANTS = [mutant for name in NAMES for mutant in mutants(name)]
