"""Record what an H100 or H200 makes of FP16 operands by mma.m16n8k16: `python -m tests.golden.record_hopper_mma`.

Writes `hopper_mma.npz` beside this file: of every case of `tests/golden/hopper_mma.py` some operands, and d.
"""

import numpy as np

from tests.golden.hopper_mma import CASES, RECORDED, instruction

SOME = 8  # products of a case


def main() -> None:
    """Record everything."""
    vectors: dict[str, np.ndarray] = {}
    for case in CASES:
        operands = case(np.random.default_rng(0), SOME)
        arrays = (*operands, instruction(*operands, "gpu"))
        vectors |= {f"{case.__name__}_{name}": array for name, array in zip("abcd", arrays, strict=True)}
    np.savez_compressed(RECORDED, **vectors)


if __name__ == "__main__":
    main()
