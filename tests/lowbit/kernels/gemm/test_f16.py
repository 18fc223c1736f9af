"""The FP16 head: its bits are those of its order of sums, alone and in any batch, in every tile."""

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ptxlab import gpu, registry
from ptxlab.errors import ArgumentError
from ptxlab.lowbit.kernels.attention.exact.arithmetic import EMULATED
from ptxlab.lowbit.kernels.gemm import gemm_f16
from ptxlab.lowbit.kernels.gemm.f16 import F16, ORDER, multiply_in_order
from ptxlab.lowbit.reference.tensor_cores import hopper_mma
from ptxlab.runtime import verify
from tests.support import gemm_checks as checks
from tests.support.axes import on_every_backend

(SOURCE,) = registry.find(F16.name)[1]


def draw_operands(M: int, N: int, K: int, seed: int = 0) -> dict[str, Any]:
    """Make operands whose halves nearly cancel, so that what is lost on the way shows in the result."""
    rng = np.random.default_rng(seed)
    x, w = (rng.standard_normal((rows, K)).astype(np.float16) for rows in (M, N))
    half = K // 64 * 32
    x[:, half : 2 * half], w[:, half : 2 * half] = -x[:, :half], w[:, :half]
    x[:, 2 * half :] *= np.float16(2**-10)
    x[:, 0] += np.float16(2**-8)
    return {"w": w, "x": x}


def have_same_bits(actual: Any, expected: Any) -> bool:
    return np.array_equal(actual.view(np.uint16), expected.view(np.uint16))


@pytest.mark.full
@given(st.integers(1, 80), st.integers(1, 150), st.integers(1, 3), st.integers(0, 9))
@settings(max_examples=8)
def test_every_bit_in_the_emulator(M: int, N: int, steps: int, seed: int) -> None:
    logical = draw_operands(M, N, 32 * steps, seed)
    y = gemm_f16(logical["x"], logical["w"], backend="emulator")
    assert have_same_bits(y, multiply_in_order(**logical, mma=EMULATED.mma))
    within = np.abs(y.astype(float) - logical["x"].astype(float) @ logical["w"].astype(float).T)
    assert (within <= F16.bound(**logical)).all()


@pytest.mark.gpu
@pytest.mark.parametrize("M", [1, 8, 9, 16, 31, 64, 65, 256, 300])
@pytest.mark.parametrize(("N", "K"), [(1000, 576), (32_000, 96), (130, 4096)])
def test_every_bit_on_a_gpu(M: int, N: int, K: int) -> None:
    """The reference cuts off as a Hopper's tensor cores do; the last rows and tokens are those of a tile's end."""
    if reason := gpu.why_not("sm_90a", exact=True):
        pytest.skip(f"what is cut off is Hopper's: {reason}")
    logical = draw_operands(M, N, K)
    y = gemm_f16(*(gpu.to_device(logical[name]) for name in ("x", "w")))
    rows = np.unique(np.concatenate([np.arange(min(N, 40)), np.arange(max(0, N - 40), N)]))
    right = multiply_in_order(logical["w"][rows], logical["x"], hopper_mma)
    assert have_same_bits(np.ascontiguousarray(gpu.to_host(y)[:, rows]), right)


@on_every_backend
def test_a_rows_bits_do_not_depend_on_the_batch(backend: str) -> None:
    assert verify.check_rows(verify.Job(F16, SOURCE, backend, {"M": 20, "N": 40, "K": 64})).passed
    logical = draw_operands(20, 40, 64)
    whole = gemm_f16(logical["x"], logical["w"], backend=backend)
    assert backend == "gpu" or have_same_bits(whole, multiply_in_order(**logical, mma=EMULATED.mma))
    for row in (0, 9, 19):  # of tiles of 32, of 8
        assert have_same_bits(gemm_f16(logical["x"][row : row + 1], logical["w"], backend=backend)[0], whole[row])


def test_another_order_has_other_bits() -> None:
    """This shows that the tests above can fail."""
    logical = draw_operands(5, 40, 96)
    swapped = {name: array[:, np.r_[32:64, 0:32, 64:96]] for name, array in logical.items()}
    assert not have_same_bits(
        multiply_in_order(**logical, mma=EMULATED.mma), multiply_in_order(**swapped, mma=EMULATED.mma)
    )
    assert sorted(ORDER) == list(range(32)) and ORDER[:5].tolist() == [0, 1, 2, 3, 8]


@pytest.mark.default_cases("1")
@pytest.mark.parametrize("M", [1, 64])
def test_no_tile_spills(M: int) -> None:
    config = F16.config_for({"M": M, "N": 32_000, "K": 4096})
    assert config["BM"] >= min(M, 64) and checks.compile_checked(F16, config, {"M": M, "N": 32_000, "K": 4096})


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"x": np.zeros((2, 96), np.float16)}, r"gemm_f16: w: .*\[8, 96\].*\[8, 64\].*"),
        ({"x": np.zeros((2, 48), np.float16), "w": np.zeros((8, 48), np.float16)}, r"gemm_f16: K % 32 == 0 .*K=48\)"),
        ({"x": np.zeros(64, np.float16)}, r"gemm_f16: x: must be a matrix \(got shape \[64\]\)"),
        ({"x": np.zeros((2, 64), np.float32)}, r"gemm_f16: x: .*float16.*float32.*"),
        ({"out": np.zeros((8, 2), np.float16)}, r"gemm_f16: out: .*\[2, 8\].*\[8, 2\].*"),
        ({"backend": "cpu"}, r"gemm_f16: backend: one of .*\(got cpu\); nearest: gpu"),
    ],
)
def test_bad_input(change: dict[str, Any], message: str) -> None:
    good = {"x": np.zeros((2, 64), np.float16), "w": np.zeros((8, 64), np.float16), "backend": "emulator"}
    with pytest.raises(ArgumentError, match=f"^{message}$"):
        gemm_f16(**{**good, **change})
    assert gemm_f16(**{**good, "x": np.zeros((0, 64), np.float16)}).shape == (0, 8)
