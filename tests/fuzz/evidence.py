"""Evidence of mismatches, in one archive: by form a program, its inputs, both outputs and the reduction."""

import io
import re
import zipfile
from pathlib import Path

import numpy as np

from tests.fuzz.examine import Outcome

ARCHIVE = "mismatches.zip"
MOST = 20  # programs that are written


def save(outcome: Outcome, seed: int, folder: Path) -> None:
    """Write the evidence of an outcome, unless there is some of its form already, or enough."""
    evidence = outcome.evidence
    if evidence is None:
        return
    case = re.sub(r"[^\w.-]+", "_", outcome.mismatches[0].form)
    folder.mkdir(parents=True, exist_ok=True)
    with zipfile.ZipFile(folder / ARCHIVE, "a", zipfile.ZIP_DEFLATED) as archive:
        cases = {name.partition("/")[0] for name in archive.namelist()}
        if case in cases or len(cases) >= MOST:
            return
        lines = [f"{outcome.category}, program {outcome.number} of seed {seed}"]
        lines += [f"{m.form}: {m.threads} threads, {m.example}, level 0 {m.level0}" for m in outcome.mismatches]
        arrays = io.BytesIO()
        np.savez_compressed(
            arrays,
            inputs=evidence.inputs,
            emulator=evidence.emulator,
            gpu=evidence.gpu,
            reduced_inputs=evidence.reduced_inputs,
        )
        archive.writestr(f"{case}/program.ptx", evidence.program)
        archive.writestr(f"{case}/reduced.ptx", evidence.reduced)
        archive.writestr(f"{case}/mismatches.txt", "\n".join(lines) + "\n")
        archive.writestr(f"{case}/arrays.npz", arrays.getvalue())
