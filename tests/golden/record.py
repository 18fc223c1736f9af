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
from pathlib import Path

import cupy
import numpy as np

from tests.golden.cases import BLOCK, Case, cases


def record(case: Case, folder: Path) -> dict[str, np.ndarray]:
    """Outputs of a case by destination."""
    path = folder / f"{case.name}.ptx"
    path.write_text(case.ptx())
    kernel = cupy.RawModule(path=str(path)).get_function(case.name)
    arrays = case.inputs()
    on_device = {name: cupy.asarray(array) for name, array in arrays.items()}
    rows = len(next(iter(arrays.values())))
    kernel((rows // BLOCK,), (BLOCK,), tuple(on_device.values()))
    cupy.cuda.runtime.deviceSynchronize()
    return {name: cupy.asnumpy(on_device[name]) for name in case.outputs}


def main() -> int:
    """Record everything; exit code 1 if any case failed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--out", type=Path, default=Path(__file__).parent, help="where to write (default: beside this file)"
    )
    arguments = parser.parse_args()
    arguments.out.mkdir(parents=True, exist_ok=True)
    vectors: dict[str, np.ndarray] = {}
    failures: dict[str, str] = {}
    every = cases()
    with tempfile.TemporaryDirectory() as folder:
        for case in every:
            try:
                outputs = record(case, Path(folder))
            except Exception as error:
                failures[case.name] = f"{type(error).__name__}: {str(error)[:300]}"
                continue
            vectors.update({f"{case.name}.{name}": array for name, array in outputs.items()})
            vectors[f"{case.name}.inputs"] = np.array(case.checksum(case.inputs()), np.uint32)
    properties = cupy.cuda.runtime.getDeviceProperties(0)
    summary = {
        "device": properties["name"].decode(),
        "compute_capability": f"{properties['major']}.{properties['minor']}",
        "driver": cupy.cuda.runtime.driverGetVersion(),
        "date": datetime.date.today().isoformat(),
        "cases": len(every) - len(failures),
        "failures": failures,
    }
    np.savez_compressed(arguments.out / "vectors.npz", **vectors)
    (arguments.out / "recorded.json").write_text(json.dumps(summary, indent=1) + "\n")
    print(json.dumps(summary, indent=1))
    print(f"{(arguments.out / 'vectors.npz').stat().st_size} bytes")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
