"""Record golden vectors on a GPU: `python -m tests.golden.record [--out DIR]`. Needs CuPy and NumPy, nothing else.

Each case is compiled and run alone, so one that fails costs only itself; failures are listed at the end, and in the
summary. Writes `vectors.npz` (one array per case and destination, named `case.destination`, and a checksum of each
case's inputs) and `recorded.json` (device, driver, failures).
"""

import argparse
import datetime
import json
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import cupy
import numpy as np

from tests.golden.cases import BLOCK_THREADS, Case, cases


def record(case: Case, folder: Path) -> dict[str, np.ndarray]:
    """Run a case; return its outputs by destination, and a checksum of its inputs."""
    path = folder / f"{case.name}.ptx"
    path.write_text(case.ptx())
    kernel = cupy.RawModule(path=str(path)).get_function(case.name)
    arrays = case.inputs()
    on_device = {name: cupy.asarray(array) for name, array in arrays.items()}
    rows = len(next(iter(arrays.values())))
    kernel((rows // BLOCK_THREADS,), (BLOCK_THREADS,), tuple(on_device.values()))
    cupy.cuda.runtime.deviceSynchronize()
    outputs = {f"{case.name}.{name}": cupy.asnumpy(on_device[name]) for name in case.outputs}
    return outputs | {f"{case.name}.inputs": np.array(case.checksum(case.inputs()), np.uint32)}


def record_all(
    doc: str,
    cases: Sequence[Any],
    outputs: Callable[[Any, Path], dict[str, np.ndarray]],
    vectors_name: str,
    summary_name: str,
) -> int:
    """Write `outputs` of each case, and a summary, into two files of the folder `--out`.

    The exit code is 1 if any case failed.
    """
    parser = argparse.ArgumentParser(description=doc)
    parser.add_argument(
        "--out", type=Path, default=Path(__file__).parent, help="where to write (default: beside this file)"
    )
    folder = parser.parse_args().out
    folder.mkdir(parents=True, exist_ok=True)
    vectors: dict[str, np.ndarray] = {}
    failures: dict[str, str] = {}
    with tempfile.TemporaryDirectory() as scratch:
        for case in cases:
            try:
                vectors |= outputs(case, Path(scratch))
            except Exception as error:  # whatever the driver says about this one
                failures[case.name] = f"{type(error).__name__}: {str(error)[:300]}"
    properties = cupy.cuda.runtime.getDeviceProperties(0)
    summary = {
        "device": properties["name"].decode(),
        "compute_capability": f"{properties['major']}.{properties['minor']}",
        "driver": cupy.cuda.runtime.driverGetVersion(),
        "date": datetime.date.today().isoformat(),
        "cases": len(cases) - len(failures),
        "failures": failures,
    }
    np.savez_compressed(folder / vectors_name, **vectors)
    (folder / summary_name).write_text(json.dumps(summary, indent=1) + "\n")
    print(json.dumps(summary, indent=1))
    print(f"{(folder / vectors_name).stat().st_size} bytes")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(record_all(__doc__, cases(), record, "vectors.npz", "recorded.json"))
