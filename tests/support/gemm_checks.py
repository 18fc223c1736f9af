"""What must hold of every GEMM kernel: clean, twice the same bits, scaled in float32, built without spills."""

from collections.abc import Callable, Mapping
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from ptxlab import registry, sass, toolchain
from ptxlab.runtime import run_spec
from ptxlab.sass.wgmma import overwritten_operands
from ptxlab.spec import KernelSpec

OUTPUTS = [(0, np.float16), (1, ml_dtypes.bfloat16), (2, np.float32), (3, np.int32)]  # by the constant OUT
every_output = pytest.mark.parametrize(("variant", "dtype"), OUTPUTS)


def run_checked(spec: KernelSpec, inputs: Mapping[str, Any], backend: str, **options: Any) -> np.ndarray:
    """Run a GEMM under the emulator's checks, and return Y."""
    checks = ("race", "init", "async") if backend == "emulator" else ()
    source = registry.find(spec.name)[1][0]
    outcome = run_spec(spec, source, inputs, backend=backend, checks=checks, **options)
    assert outcome.findings == ()
    y: np.ndarray = outcome.outputs["y"]
    return y


def assert_exact_twice(run: Callable[[], np.ndarray], expected: np.ndarray) -> None:
    """Assert that two runs each give exactly the expected array."""
    first = run()
    assert np.array_equal(first, expected)
    assert np.array_equal(first, run()), "two runs, the same bits"


def with_zeros(logical: dict[str, Any], with_bias: bool) -> dict[str, Any]:
    """Make one token's results -0, by zeros and a negative scale.

    Without a bias the kernel is given a null pointer.
    """
    logical["x"][3], logical["x_scale"][3] = 0, -1
    return logical if with_bias else {name: operand for name, operand in logical.items() if name != "bias"}


def assert_scaled_in_float32(
    y: np.ndarray, exact: np.ndarray, dtype: Any, x_scale: Any, w_scale: Any, bias: Any
) -> None:
    """Assert y = acc * x_scale * w_scale + bias, each operation rounded in float32, then once to the output.

    `exact` are the accumulators acc.
    """
    scaled = exact.astype(np.float32) * x_scale[:, None] * w_scale
    scaled = scaled if bias is None else scaled + bias
    bits = f"u{y.itemsize}"
    assert np.array_equal(y.view(bits), (exact if dtype is np.int32 else scaled.astype(dtype)).view(bits))


def compile_checked(spec: KernelSpec, config: Mapping[str, int], sizes: Mapping[str, int]) -> toolchain.Image:
    """Compile a kernel and assert that it is built as intended; return the image.

    It has no local memory, no more registers than there are, no wgmma whose operands change under it, and no notes. Of
    ptxas' notes C7510 to C7519 say that wgmma was serialised.
    """
    image = toolchain.compile_cuda(registry.find(spec.name)[1][0], spec.arch, defines=dict(config))
    resources = image.resources[spec.name]
    assert (resources.stack, resources.spill_stores, resources.spill_loads) == (0, 0, 0), config
    assert image.warnings == (), config
    assert overwritten_operands(sass.parse(toolchain.disassemble(image))[spec.name]) == [], config
    threads = spec.launch({**sizes, **config}).block[0] * config.get("RESIDENT", 1)
    assert resources.registers * threads <= 65536, config
    return image
