"""The oracle of the prefill kernels in their own order of operations: the same bits, whatever the bound says."""

from collections.abc import Callable
from dataclasses import fields, replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ptxlab import emulator, gpu
from ptxlab.errors import ArgumentError
from ptxlab.lowbit.kernels.attention import exact
from ptxlab.lowbit.kernels.attention.prefill import PREFILL
from ptxlab.lowbit.kernels.attention.prefill_sm80 import PREFILL_SM80
from ptxlab.lowbit.reference.tensor_cores import hopper_mma
from ptxlab.spec import Arrays, KernelSpec
from ptxlab.spec.dtypes import convert_to_dtype
from tests.support import tensor_cores
from tests.support.attention_problems import map_arrays
from tests.support.dispatching_array import DispatchingArray
from tests.support.prefill_problems import SHAPES, chunks_of, on_every_kernel, run
from tests.support.result_bits import difference

Problem = tuple[Arrays, dict[str, Any]]
DTYPES = "float16", "bfloat16"


def run_oracle(
    problem: Problem, BF16: int = 0, spec: KernelSpec = PREFILL, arithmetic: exact.Arithmetic | None = None
) -> tuple[Any, Any]:
    """Return (out, lse) by the oracle, with the constants that the kernel is compiled with."""
    logical, sizes = problem
    config = {**spec.config_for(sizes), "BF16": BF16, "ROTATED": int(logical["cache"].rotated)}
    options = {"softmax_scale": logical["softmax_scale"], "window": logical["window"], "parts": logical["parts"]}
    q = convert_to_dtype(logical["q"], DTYPES[BF16]) if isinstance(logical["q"], np.ndarray) else logical["q"]
    return exact.prefill(q, logical["cache"], logical["starts"], config=config, arithmetic=arithmetic, **options)


def run_kernel(
    problem: Problem, BF16: int = 0, spec: KernelSpec = PREFILL, backend: str = "emulator", **how: Any
) -> tuple[Any, Any]:
    """Return (out, lse) as the kernel writes them."""
    logical, sizes = problem
    constants = {"ROTATED": 1} if logical["cache"].rotated else {}
    outputs, _ = run(logical, sizes, backend, BF16=BF16, config=constants, spec=spec, **how)
    return outputs["out"], outputs["lse"]


def assert_same_bits(problem: Problem, BF16: int = 0, spec: KernelSpec = PREFILL, **how: Any) -> None:
    """Assert that the kernel has the oracle's bits."""
    assert difference(run_oracle(problem, BF16, spec), run_kernel(problem, BF16, spec, **how), bool(BF16)) == ""


@pytest.mark.full
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("BF16", [0, 1])
@on_every_kernel
def test_equal_for_ragged_chunks(spec: KernelSpec, BF16: int, shape: str) -> None:
    assert_same_bits(chunks_of(**{**SHAPES[shape], "parts": parts_of(spec, shape)}), BF16, spec)


def parts_of(spec: KernelSpec, shape: str) -> int:
    """Return the parts of a tile; one where the kernel knows none."""
    parts: int = SHAPES[shape].get("parts", 1) if "parts" in spec.symbols else 1
    return parts


@pytest.mark.full
@pytest.mark.parametrize("D", [64, 128, 256])
@on_every_kernel
def test_equal_for_rotated_keys(spec: KernelSpec, D: int) -> None:
    logical, sizes = chunks_of((33, 0, 2), (31, 9, 64), D=D, group=3)
    assert_same_bits(({**logical, "cache": replace(logical["cache"], rotated=True)}, sizes), spec=spec)


@pytest.mark.full
@pytest.mark.parametrize(("past", "parts"), [(2100, 4), (2100, 16), (4200, 7)])
def test_equal_in_many_parts(past: int, parts: int) -> None:
    """A tile of 17 blocks has 4 of the 16 parts that are asked for."""
    assert_same_bits(chunks_of((5, 70), (past, 3), parts=parts, blocks=12))


@pytest.mark.default_cases("sm90-tiny")
@pytest.mark.parametrize("case", ["wrong", "tiny", "large"])
@on_every_kernel
def test_equal_for_queries_at_the_ends_of_their_range(spec: KernelSpec, case: str) -> None:
    """The queries have NaN and infinity, or elements whose f16 over the row's power is subnormal.

    There is also a query of zeros, and scores of 10^5.
    """
    logical, sizes = chunks_of((70,), (10,), D=64)
    q = logical["q"].copy()
    if case == "wrong":
        q[33, 1, 5], q[40, 0, 7] = np.nan, np.inf
    elif case == "tiny":
        q[..., 1:] *= 2.0**-18
        q[3] = 0
    else:
        q *= 1000
    assert_same_bits(({**logical, "q": q}, sizes), spec=spec)


@pytest.mark.full
@on_every_kernel
def test_equal_where_a_query_sees_nothing(spec: KernelSpec) -> None:
    logical, sizes = chunks_of((4,), (0,), D=64)
    short = replace(logical["cache"], lengths=np.array([2], np.int32))  # two queries before the first token
    assert_same_bits(({**logical, "cache": short}, sizes), spec=spec)


@pytest.mark.full
def test_equal_where_tensor_cores_truncate(monkeypatch: pytest.MonkeyPatch) -> None:
    """The terms of one product matter now, not only their sum. Only mma.sync is modelled."""
    tensor_cores.patch_emulator(hopper_mma, monkeypatch)
    problem = chunks_of((30,), (120,), D=64)
    right = run_kernel(problem, spec=PREFILL_SM80)
    assert difference(run_oracle(problem, spec=PREFILL_SM80, arithmetic=exact.TRUNCATING), right) == ""
    assert difference(run_oracle(problem, spec=PREFILL_SM80), right) != ""


@pytest.mark.full
@settings(max_examples=12)
@given(
    chunks=st.lists(st.tuples(st.integers(1, 40), st.integers(0, 700)), min_size=1, max_size=3),
    D=st.sampled_from((64, 128, 256)),
    page=st.sampled_from((16, 32, 64)),
    group=st.integers(1, 8),
    window=st.sampled_from((0, 1, 60, 513)),
    parts=st.integers(1, 4),
    BF16=st.integers(0, 1),
    mode=st.sampled_from(emulator.MODES),
    seed=st.integers(0, 2**32 - 1),
)
@on_every_kernel
def test_equal_in_the_emulator(
    spec: KernelSpec, chunks: list[tuple[int, int]], BF16: int, mode: str, parts: int, **how: Any
) -> None:
    new, past = zip(*chunks, strict=True)
    cuts = "parts" in spec.symbols and (how["D"] < 256 or how["page"] == 64)  # else in one part
    assert_same_bits(
        chunks_of(new, past, parts=parts if cuts else 1, blocks=10, **how), BF16, spec, mode=mode
    )  # 10 tiles at most


CONSTANTS = [("HEAD_DIM", 128), ("PAGE", 16), ("BF16", 1), ("ROTATED", 1)]


@pytest.mark.parametrize(("name", "number"), CONSTANTS)
def test_constants_of_other_arrays_are_refused(name: str, number: int) -> None:
    logical, sizes = chunks_of((2,), (3,))
    config, q = {**PREFILL.config_for(sizes), name: number}, logical["q"].astype(np.float16)
    with pytest.raises(ArgumentError, match=rf"exact: config: {name} must be \d+ for these arrays \(got {number}\)"):
        exact.prefill(q, logical["cache"], logical["starts"], softmax_scale=1.0, config=config)


def repeat_page(logical: Arrays) -> Arrays:
    """Read the first page twice."""
    table = logical["cache"].block_table.copy()
    table[0, 1] = table[0, 0]
    return {**logical, "cache": replace(logical["cache"], block_table=table)}


def swap_nibbles(logical: Arrays) -> Arrays:
    """Swap the nibbles of the first page's first keys and values."""
    cache = logical["cache"]
    pool = cache.pool.copy()
    nibbles = pool[cache.block_table[0, 0], :, :, :8]
    nibbles[:] = nibbles << 4 | nibbles >> 4
    return {**logical, "cache": replace(cache, pool=pool)}


def widen_window(logical: Arrays) -> Arrays:
    """Widen the window by one token."""
    return {**logical, "window": logical["window"] + 1}


def move_last_query(logical: Arrays) -> Arrays:
    """Move the first sequence's last query to the second sequence."""
    return {**logical, "starts": logical["starts"] - np.array([0, 1, 0], np.int32)}


@pytest.mark.parametrize("fault", [repeat_page, swap_nibbles, widen_window, move_last_query])
def test_a_fault_shows(fault: Callable[[Arrays], Arrays]) -> None:
    """It shows in out, and in the logarithms."""
    logical, sizes = chunks_of((40, 3), (100, 20), Hkv=2, window=130)
    for x, y in zip(run_oracle((fault(logical), sizes)), run_oracle((logical, sizes)), strict=True):
        assert (x != y).any()


@pytest.mark.full
@pytest.mark.parametrize("BF16", [0, 1])
@on_every_kernel
def test_the_same_on_arrays_that_are_not_numpy_s(spec: KernelSpec, BF16: int) -> None:
    """Mixed arrays, which CuPy would refuse, fail here without a GPU: NumPy's arrays among the device's."""

    def there(function: Callable[..., Any]) -> Callable[..., Any]:
        return lambda *arrays: DispatchingArray(function(*(getattr(x, "array", x) for x in arrays)))

    scalars = {f.name: there(getattr(exact.EMULATED, f.name)) for f in fields(exact.Arithmetic) if f.name != "mma"}
    parts = 2 if "parts" in spec.symbols else 1
    logical, sizes = chunks_of((20, 3), (1030, 7), parts=parts, window=1040)
    device = {**logical, "cache": map_arrays(logical["cache"], DispatchingArray)}
    device |= {
        "q": DispatchingArray(convert_to_dtype(logical["q"], DTYPES[BF16])),
        "starts": DispatchingArray(logical["starts"]),
    }
    arithmetic = exact.Arithmetic(**scalars, mma=hopper_mma)
    outputs = run_oracle((device, sizes), BF16, spec, arithmetic)
    right = run_oracle((logical, sizes), BF16, spec, exact.TRUNCATING)
    assert difference([x.array for x in outputs], right, bool(BF16)) == ""


# On an H200 --------------------------------------------------------------------------------------------------------


@pytest.mark.gpu
@pytest.mark.skipif(gpu.why_not("sm_90a", exact=True) is not None, reason="a model of Hopper")
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("BF16", [0, 1])
@on_every_kernel
def test_equal_on_the_gpu(spec: KernelSpec, BF16: int, shape: str) -> None:
    logical, sizes = chunks_of(**{**SHAPES[shape], "parts": parts_of(spec, shape)})
    right = run_kernel((logical, sizes), BF16, spec, "gpu")
    device = {**logical, "cache": map_arrays(logical["cache"], gpu.to_device)}
    device |= {
        "q": gpu.to_device(convert_to_dtype(logical["q"], DTYPES[BF16])),
        "starts": gpu.to_device(logical["starts"]),
    }
    assert difference(run_oracle((device, sizes), BF16, spec), right, bool(BF16)) == ""
