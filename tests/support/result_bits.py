"""Results of attention compared bit by bit."""

from typing import Any

import numpy as np

from ptxlab import gpu

_AXES = "sequence", "token", "head", "dim"


def difference(outputs: Any, right: Any, bf16: bool = False) -> str:
    """Name the first bit of (out, lse) [..., token, head, ..] that differs, and how many do; a NaN is a NaN."""
    for name, x, y in zip(("out", "lse"), outputs, right, strict=True):
        x, y = (gpu.to_host(a) if gpu.is_device_array(a) else a for a in (x, y))
        assert (x.shape, x.dtype) == (y.shape, y.dtype)
        bits = [a.view(f"u{a.itemsize}") for a in (x, y)]
        differs = bits[0] != bits[1]
        if not (bf16 and name == "out"):
            differs &= ~(np.isnan(x) & np.isnan(y))
        if differs.any():
            at = tuple(int(i) for i in np.argwhere(differs)[0])
            axes = _AXES if name == "out" else _AXES[:-1]
            place = ", ".join(f"{axis} {i}" for axis, i in zip(axes[-len(at) :], at, strict=True))
            return f"{name} of {place}: {x[at]}, not {y[at]}; {differs.sum()} of {differs.size} differ"
    return ""
