"""`gemm_w4a8` of weights in strips: any number of tokens, in every order, by either kernel."""

from typing import Any

import numpy as np
import pytest

import ptxlab
from ptxlab import quant, reference
from ptxlab.errors import ArgumentError
from ptxlab.kernels.gemm import ladder
from ptxlab.kernels.gemm.common import DTYPES
from tests.support.fake_gpu import DeviceArray, FakeGpu, on_device
from tests.support.gemm_calls import BIAS, LQQ, SCHEMES, STRIPS, WEIGHTS, K, M, N

STRIPS_ORDERS: dict[str, dict[str, Any]] = {
    "row_major": {},
    "tiles": {"layout": "tiles", "rows": 16},
    "fragment": {"layout": "fragment"},
}


def taken(weight: Any, order: str, M: int, **options: Any) -> str:
    """The kernel that would be launched."""
    return ladder.choose(weight, order, M, **{"kernel": None, "backend": "emulator", **options}).spec.name


@pytest.mark.parametrize("scheme", STRIPS)
@pytest.mark.parametrize(
    ("order", "tokens"),
    [(order, M) for order in STRIPS_ORDERS for M in (1, 8, 9, 16, 17, 32, 33, 40) if order != "fragment" or M <= 32],
)
def test_strips_of_any_number_of_tokens(scheme: str, order: str, tokens: int) -> None:
    """Across the two kernels, and beyond what one of them takes."""
    x = np.random.default_rng(tokens).standard_normal((tokens, K), dtype=np.float32)
    packed = ptxlab.quantize_activations(x, **STRIPS_ORDERS[order], backend="emulator")
    plain = quant.quantize_activations(x)
    weight = SCHEMES[scheme]
    y = ptxlab.gemm_w4a8(packed, weight=STRIPS[scheme], bias=BIAS, backend="emulator")
    accumulators = reference.gemm_accumulators(plain.q, weight.exact_level1())
    wanted = reference.gemm_epilogue(accumulators, plain.scale, weight.channel_scale, BIAS, "float16")
    assert y.shape == (tokens, N) and np.array_equal(y, wanted)


@pytest.mark.parametrize("scheme", STRIPS)
@pytest.mark.parametrize("tokens", [5, 40])
@pytest.mark.parametrize("dtype", DTYPES)
def test_strips_with_token_sums_and_without(scheme: str, tokens: int, dtype: str) -> None:
    """The same bits by two variants; sums that are not those of x would give others, and are refused."""
    x = np.random.default_rng(0).integers(-128, 128, (tokens, K), dtype=np.int8)
    x_scale, x_sum = np.full(tokens, 0.01, np.float32), x.sum(axis=1, dtype=np.int32)

    def multiplied(sums: np.ndarray | None) -> np.ndarray:
        return ptxlab.gemm_w4a8(x, x_scale, STRIPS[scheme], x_sum=sums, bias=BIAS, out_dtype=dtype, backend="emulator")

    assert np.array_equal(multiplied(x_sum), multiplied(None))
    with pytest.raises(ArgumentError, match=r"^gemm_w4a8: x_sum: the sum of token 0 over K is -?\d+ \(got x_sum\[0\]"):
        multiplied(x_sum + 1)


def test_tiles_that_no_wgmma_has_are_refused_before_any_launch(fake: FakeGpu) -> None:
    tiles = ptxlab.quantize_activations(np.ones((M, K), np.float32), layout="tiles", rows=24, backend="emulator")
    for weight, name in ((WEIGHTS["lqq"], "gemm_w4a8_lqq_imfp_sm90"), (STRIPS["lqq"], "gemm_w4a8_sm90")):
        with pytest.raises(ArgumentError, match=rf"^{name}: rows in \(8, 16, .*\) \(got rows=24\)$"):
            ptxlab.gemm_w4a8(on_device(tiles), weight=on_device(weight))
    assert fake.launched == [] and fake.loads == 0


def test_which_kernel_strips_take() -> None:
    for weight in STRIPS.values():
        chosen = {M: taken(weight, "row_major", M) for M in range(41)}
        assert set(chosen.values()) == {"gemm_w4a8_small_sm90", "gemm_w4a8_sm90"}
        assert {M for M, name in chosen.items() if name == "gemm_w4a8_small_sm90"} == set(range(17))
        assert taken(weight, "tiles", 4) == "gemm_w4a8_sm90" and taken(weight, "fragment", 32) == "gemm_w4a8_small_sm90"
        assert taken(weight, "row_major", 32, kernel="gemm_w4a8_small_sm90") == "gemm_w4a8_small_sm90"
        assert taken(weight, "row_major", 4, kernel="gemm_w4a8_sm90") == "gemm_w4a8_sm90"
    deep = ptxlab.pack(quant.quantize_lqq(np.ones((8, 16384), np.float32), group=128), "strips")
    assert [taken(deep, "row_major", M) for M in (8, 9)] == ["gemm_w4a8_small_sm90", "gemm_w4a8_sm90"], "room for X"


def test_what_kernels_for_strips_do_not_take() -> None:
    x = np.zeros((33, K), np.int8)
    call: dict[str, Any] = {"weight": STRIPS["lqq"], "out_dtype": "int32", "backend": "emulator"}
    with pytest.raises(ArgumentError, match=r"^gemm_w4a8_small_sm90: M <= 32 \(got M=33\)$"):
        ptxlab.gemm_w4a8(x, kernel="gemm_w4a8_small_sm90", **call)
    floats = np.ones((33, K), np.float32)
    fragments = ptxlab.quantize_activations(floats, layout="fragment", backend="emulator")
    with pytest.raises(ArgumentError, match=r"^gemm_w4a8_small_sm90: M <= 32 \(got M=33\)$"):
        ptxlab.gemm_w4a8(fragments, weight=STRIPS["lqq"], backend="emulator")
    message = r"x_q: must be row_major or tiles for gemm_w4a8_sm90 \(got fragment\)"
    with pytest.raises(ArgumentError, match=message):
        ptxlab.gemm_w4a8(fragments, weight=STRIPS["lqq"], kernel="gemm_w4a8_sm90", backend="emulator")
    tiles = ptxlab.quantize_activations(floats, layout="tiles", rows=24, backend="emulator")
    with pytest.raises(ArgumentError, match=r"gemm_w4a8_sm90: rows in \(8, 16, 32, 48, .*, 256\) \(got rows=24\)"):
        ptxlab.gemm_w4a8(tiles, weight=STRIPS["lqq"], backend="emulator")
    with pytest.raises(ArgumentError, match=r"gemm_w4a8: x_sum: shape \[33\] \(got \[5\]\)"):
        ptxlab.gemm_w4a8(x, x_sum=np.zeros(5, np.int32), **call)
    with pytest.raises(
        ArgumentError, match=r"weight: must be lqq in strips .* or qoq in strips .*\(got lqq in dual_mma"
    ):
        ptxlab.gemm_w4a8(x, kernel="gemm_w4a8_sm90", **{**call, "weight": WEIGHTS["lqq"]})


@pytest.mark.parametrize("with_sum", [False, True])
@pytest.mark.parametrize("tokens", [5, 40])
def test_strips_from_device_arrays(fake: FakeGpu, tokens: int, with_sum: bool) -> None:
    """One launch, with token sums or without, plainly and programmatically."""
    x = np.random.default_rng(0).integers(-128, 128, (tokens, K), dtype=np.int8)
    sums = DeviceArray(x.sum(axis=1, dtype=np.int32)) if with_sum else None
    wanted = x.astype(np.int32) @ LQQ.exact_level1().T
    weight, name = on_device(STRIPS["lqq"]), "gemm_w4a8_small_sm90" if tokens == 5 else "gemm_w4a8_sm90"
    for programmatic in (False, True):
        y = ptxlab.gemm_w4a8(DeviceArray(x), weight=weight, x_sum=sums, out_dtype="int32", programmatic=programmatic)
        assert np.array_equal(y.host, wanted) and fake.launched.pop() == (name, 7)
        assert fake.geometries.pop().programmatic == programmatic
    assert fake.launched == [] and ptxlab.gemm_workspace(weight, tokens).nbytes == 0
    with pytest.raises(ArgumentError, match=r"gemm_w4a8_small_sm90: M <= 32 \(got M=40"):
        ptxlab.gemm_workspace(weight, 40, kernel="gemm_w4a8_small_sm90")
