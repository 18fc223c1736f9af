"""What the steps of the ladder share: outputs, the arguments behind the weight, the example."""

import numpy as np

from ptxlab import quant
from ptxlab.spec import Arg, Arrays

GROUPS = (32, 64, 128)
F16, BF16, F32, INT32 = range(4)  # OUT: what a kernel is compiled to store; INT32 are the accumulators themselves

# Behind the weight and the activations every step takes the same arguments.
EPILOGUE = (
    Arg("x_scale", "float32", ("M",)),
    Arg("bias", "float32", ("N",)),
    Arg("y", "int32", ("M", "N"), "out"),
    Arg("M", "int32", role="scalar"),
    Arg("N", "int32", role="scalar"),
    Arg("K", "int32", role="scalar"),
)


def example_qoq(rng: np.random.Generator, *, M: int, N: int, K: int, g: int) -> Arrays:
    """A QoQ weight of random numbers, and random activations."""
    weight = quant.quantize_qoq(rng.standard_normal((N, K), dtype=np.float32), group=g)
    return {"x": rng.integers(-128, 128, size=(M, K), dtype=np.int8), "weight": weight}
