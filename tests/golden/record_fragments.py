"""Record the fragment vectors on an H100 or H200: `python -m tests.golden.record_fragments [--out DIR]`.

Needs CuPy and NumPy, nothing else. Writes `fragments.npz` (one array per case, and a checksum of its kernel and inputs)
and `fragments.json` (device, driver, failures). Each case is compiled and run alone; failures are listed at the end.
"""

import argparse
import datetime
import json
import sys
import tempfile
from pathlib import Path

import cupy
import numpy as np

from tests.golden.fragments import FragmentCase, fragment_cases, rounded_cases


def record(case: FragmentCase, folder: Path) -> np.ndarray:
    """What the kernel of a case leaves in its result."""
    path = folder / f"{case.name}.ptx"
    path.write_text(case.ptx)
    kernel = cupy.RawModule(path=str(path)).get_function(case.name)
    out = cupy.full(case.out, 0xDEADBEEF, np.uint32)
    kernel((1,), (case.threads,), (*(cupy.asarray(array) for array in case.inputs.values()), out))
    cupy.cuda.runtime.deviceSynchronize()
    return cupy.asnumpy(out)


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
    with tempfile.TemporaryDirectory() as folder:
        for case in [*fragment_cases(), *rounded_cases()]:
            try:
                vectors[case.name] = record(case, Path(folder))
            except Exception as error:  # whatever the driver says about this one
                failures[case.name] = f"{type(error).__name__}: {str(error)[:300]}"
                continue
            vectors[f"{case.name}.checksum"] = np.array(case.checksum(), np.uint32)
    properties = cupy.cuda.runtime.getDeviceProperties(0)
    summary = {
        "device": properties["name"].decode(),
        "compute_capability": f"{properties['major']}.{properties['minor']}",
        "driver": cupy.cuda.runtime.driverGetVersion(),
        "date": datetime.date.today().isoformat(),
        "cases": len(vectors) // 2,
        "failures": failures,
    }
    np.savez_compressed(arguments.out / "fragments.npz", **vectors)
    (arguments.out / "fragments.json").write_text(json.dumps(summary, indent=1) + "\n")
    print(json.dumps(summary, indent=1))
    print(f"{(arguments.out / 'fragments.npz').stat().st_size} bytes")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
