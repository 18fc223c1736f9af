"""Record the fragment vectors on an H100 or H200: `python -m tests.golden.record_fragments [--out DIR]`.

Needs CuPy and NumPy, nothing else. Writes `fragments.npz` (one array per case, and a checksum of its kernel and inputs)
and `fragments.json` (device, driver, failures). Each case is compiled and run alone; failures are listed at the end.
"""

import sys
from pathlib import Path

import cupy
import numpy as np

from tests.golden.fragments import (
    FragmentCase,
    fragment_cases,
    further_mma_cases,
    narrow_cases,
    rounding_cases,
    s4_cases,
)
from tests.golden.record import record_all


def record(case: FragmentCase, folder: Path) -> dict[str, np.ndarray]:
    """Run the kernel of a case; return its result, and a checksum of kernel and inputs."""
    path = folder / f"{case.name}.ptx"
    path.write_text(case.ptx)
    kernel = cupy.RawModule(path=str(path)).get_function(case.name)
    out = cupy.full(case.out, 0xDEADBEEF, np.uint32)
    kernel((1,), (case.threads,), (*(cupy.asarray(array) for array in case.inputs.values()), out))
    cupy.cuda.runtime.deviceSynchronize()
    return {case.name: cupy.asnumpy(out), f"{case.name}.checksum": np.array(case.checksum(), np.uint32)}


if __name__ == "__main__":
    every = [*fragment_cases(), *rounding_cases(), *s4_cases(), *narrow_cases(), *further_mma_cases()]
    sys.exit(record_all(__doc__, every, record, "fragments.npz", "fragments.json"))
