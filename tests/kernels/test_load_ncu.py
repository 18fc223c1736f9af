"""The bank model against the hardware's counters, kernel by kernel. Needs a GPU, and ncu with permission to count."""

import csv
import io
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from ptxlab import kernels
from ptxlab.runtime import run_spec

pytestmark = pytest.mark.gpu

COUNTERS = {
    (store, what): f"l1tex__data_{metric}_mem_shared_op_{'st' if store else 'ld'}.sum"
    for store in (False, True)
    for what, metric in (("conflicts", "bank_conflicts_pipe_lsu"), ("wavefronts", "pipe_lsu_wavefronts"))
}
TILES = [name for name, spec in kernels.specs().items() if spec.family == "load" and "T" in spec.example_sizes[0]]


def counted_by_ncu(name: str, inputs: Path) -> dict[tuple[bool, str], int]:
    command = ["ncu", "--clock-control", "none", "--csv", "--page", "raw", "--metrics", ",".join(COUNTERS.values())]
    run = [sys.executable, "-m", "ptxlab", "run", name, "--in", str(inputs), "--backend", "gpu"]
    done = subprocess.run([*command, *run], capture_output=True, text=True, check=False)
    if "ERR_NVGPUCTRPERM" in done.stdout + done.stderr:
        pytest.skip("ncu: no permission to read the GPU's counters (ERR_NVGPUCTRPERM)")
    table = [line for line in done.stdout.splitlines() if line.startswith('"')]
    rows = list(csv.DictReader(io.StringIO("\n".join(table))))
    (row,) = [r for r in rows if r["Kernel Name"].startswith(name)]
    return {key: int(row[metric].replace(",", "")) for key, metric in COUNTERS.items()}


@pytest.mark.skipif(shutil.which("ncu") is None, reason="ncu (Nsight Compute) is not on the PATH")
@pytest.mark.parametrize("name", TILES)
def test_wavefronts_and_conflicts_are_those_that_ncu_counts(name: str, tmp_path: Path) -> None:
    spec, (source, *_) = kernels.find(name)
    inputs = spec.pack(spec.example(np.random.default_rng(0), T=24))
    np.savez(tmp_path / "in.npz", **inputs)
    modelled = dict.fromkeys(COUNTERS, 0)
    for access in run_spec(spec, source, inputs, backend="emulator", count_banks=True).shared:
        store = access.text.startswith("st")
        modelled[store, "wavefronts"] += access.wavefronts
        modelled[store, "conflicts"] += access.conflicts
    assert modelled == counted_by_ncu(name, tmp_path / "in.npz")
    assert modelled[False, "wavefronts"] > 0
