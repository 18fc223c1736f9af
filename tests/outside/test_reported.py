"""Programs of what people have reported in public, made small: what is said of each, and of its twin `-D FIXED`."""

import re
from pathlib import Path

import numpy as np
import pytest

import ptxlab
from ptxlab import Launch, emulator
from ptxlab.errors import EmulationError
from tests.outside.reported.cases import CASES, FOLDER, Case

# Of checks that have no other such program.
QUICK = ("06_*", "07_*", "09_*", "16_*", "26_*", "47_*", "p3_*")
CHAINS = [("b_ok", "c_ok", ""), ("b_late", "c_ok", "race"), ("b_nowait", "c_ok", "race"), ("b_ok", "c_war", "race")]


def outcome(path: Path, case: Case, fixed: bool) -> str:
    """Return `kind:line` of each finding, or the error."""
    kernel = ptxlab.load(path, case.entry, arch=case.arch, defines={"FIXED": 1} if fixed else {})
    arguments = [array.copy() if isinstance(array, np.ndarray) else array for array in case.arguments.values()]
    launch = Launch((case.grid, 1, 1), (case.block, 1, 1), case.shared[fixed])
    try:
        launched = kernel.launch(arguments, launch, backend="emulator", checks=case.checks)
    except EmulationError as error:
        return str(error).replace(str(path), "")
    assert launched is not None
    return " ".join(f"{finding.kind}:{finding.line}" for finding in launched.findings)


@pytest.mark.default_cases(*QUICK)
@pytest.mark.parametrize("name", CASES)
def test_what_is_said_of_each_and_of_its_twin(name: str) -> None:
    case, paths = CASES[name], [*FOLDER.glob(f"{name}.*")]
    for path in paths:
        twins = (case.report, case.fixed) if path.suffix == ".cu" else (case.report,)  # PTX has no `-D`
        for fixed, expected in enumerate(twins):
            report = outcome(path, case, bool(fixed))
            assert re.search(expected, report, re.DOTALL) if ".*" in expected else report == expected
    assert paths


@pytest.mark.full
@pytest.mark.parametrize(("second", "third", "kind"), CHAINS)
def test_a_chain_of_programmatic_launches(second: str, third: str, kind: str) -> None:
    """Kernels of `62_pdl.cu`, one after the other."""
    a, b, c = (ptxlab.load(FOLDER / "62_pdl.cu", name, arch="sm_90") for name in ("a", second, third))
    x, (p, q, r) = np.arange(32, dtype=np.int32), np.zeros((3, 32), np.int32)
    launch = Launch((1, 1, 1), (32, 1, 1))
    with emulator.chain(emulator.CHECKS, begin="late", given=[x]) as chain:
        a.launch([x, p], launch, backend="emulator")
        b.launch([p, q], launch, backend="emulator", programmatic=True)
        c.launch([q, x, r], launch, backend="emulator", programmatic=True)
    assert {finding.kind for finding in chain.findings} == ({kind} if kind else set())
