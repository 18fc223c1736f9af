"""What a mismatch leaves in the output folder: the program, its inputs, both outputs, and the reduced program."""

from pathlib import Path

import numpy as np

from tests.fuzz.examine import Outcome

MOST = 40  # programs that are written


def save(outcome: Outcome, seed: int, folder: Path) -> None:
    """Write the evidence of an outcome, unless there is enough already."""
    evidence, cases = outcome.evidence, folder / "mismatches"
    if evidence is None or (cases.exists() and len(list(cases.iterdir())) >= MOST):
        return
    case = cases / f"{outcome.category}_{seed}_{outcome.number}"
    case.mkdir(parents=True, exist_ok=True)
    (case / "program.ptx").write_text(evidence.program, encoding="utf-8")
    (case / "reduced.ptx").write_text(evidence.reduced, encoding="utf-8")
    lines = [f"{m.form}: {m.threads} threads, {m.example}, level 0 {m.level0}" for m in outcome.mismatches]
    (case / "mismatches.txt").write_text("\n".join(lines) + "\n", encoding="utf-8")
    np.savez_compressed(
        case / "arrays.npz",
        inputs=evidence.inputs,
        emulator=evidence.emulator,
        gpu=evidence.gpu,
        reduced_inputs=evidence.reduced_inputs,
    )
