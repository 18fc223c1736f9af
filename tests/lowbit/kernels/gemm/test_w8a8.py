"""The 8-bit GEMM: exact in every tile, K split or not, early and late; built and chosen as meant."""

import csv
import math
from collections import defaultdict
from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ptxlab import emulator, registry, sources
from ptxlab.arithmetic import ceil_div
from ptxlab.errors import ArgumentError
from ptxlab.lowbit import quant, reference
from ptxlab.lowbit.bench.shapes import LAYERS
from ptxlab.lowbit.kernels.gemm import gemm_w8a8, strips_tiles, w8a8_tiles
from ptxlab.lowbit.kernels.gemm.w8a8 import W8A8
from ptxlab.lowbit.layout.packed_activations import pack_activations
from tests.support import gemm_checks as checks
from tests.support import gemm_problems
from tests.support.axes import on_every_backend

(SOURCE,) = registry.find(W8A8.name)[1]
# Tiles that the emulator runs in a moment: few tokens, a short ring, one to three warp groups, clusters that split K.
TILES = (
    {"BM": 8, "WN": 2, "BK": 128, "SPLIT": 1, "STAGES": 2},
    {"BM": 16, "WN": 1, "BK": 256, "SPLIT": 2, "STAGES": 3},
    {"BM": 32, "WN": 2, "BK": 128, "SPLIT": 4, "STAGES": 2},
    {"BM": 16, "WN": 3, "BK": 128, "SPLIT": 1, "STAGES": 2},
    {"BM": 32, "WN": 3, "BK": 256, "SPLIT": 2, "STAGES": 3},
    {"BM": 64, "WN": 1, "BK": 128, "SPLIT": 1, "STAGES": 2},
)
OUTPUT_TILES = (*TILES[:3], *TILES[4:], {"BM": 256, "WN": 2, "BK": 128, "SPLIT": 1, "STAGES": 2})
SWEEP = sources.results_dir() / "h200" / "sweeps" / "gemm_w8a8.csv"


def output(logical: Mapping[str, Any], backend: str, config: Mapping[str, int], **options: Any) -> np.ndarray:
    """Run W8A8 under the emulator's checks and return Y; `config` overrides chosen constants."""
    (M, K), N = logical["x"].shape, len(logical["w"])
    config = {**W8A8.config_for({"M": M, "N": N, "K": K}), **config}
    return checks.run_checked(W8A8, W8A8.pack(dict(logical)), backend, config=config, **options)


@pytest.mark.full
@pytest.mark.parametrize("tile", TILES, ids=lambda tile: f"{tile['BM']}-{tile['WN']}-{tile['SPLIT']}")
@given(
    logical=gemm_problems.w8a8(tokens=80, rows=400, sixteens=60),
    mode=st.sampled_from(emulator.MODES),
    sms=st.sampled_from((8, 132)),
)
@settings(max_examples=5)
def test_accumulators_are_exact_in_the_emulator(
    tile: dict[str, int], logical: dict[str, Any], mode: str, sms: int
) -> None:
    """A block has many tiles on few SMs, and the ring goes on from one to the next."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(strips_tiles, "SMS", sms)
        assert np.array_equal(output(logical, "emulator", tile, mode=mode), W8A8.reference(**logical))


@pytest.mark.full
@on_every_backend
def test_more_tokens_than_a_band(backend: str) -> None:
    """Nineteen token tiles make a band of sixteen and a narrower one.

    Each band is over three row tiles.
    """
    logical = W8A8.example(np.random.default_rng(0), M=150, N=272, K=64)
    assert np.array_equal(output(logical, backend, TILES[0]), W8A8.reference(**logical))


@pytest.mark.gpu
@given(logical=gemm_problems.w8a8(tokens=600, rows=1200, sixteens=120), tile=st.sampled_from(({}, *TILES)))
def test_accumulators_are_exact_on_the_gpu(logical: dict[str, Any], tile: dict[str, int]) -> None:
    checks.assert_exact_twice(lambda: output(logical, "gpu", tile), W8A8.reference(**logical))


@pytest.mark.gpu
@pytest.mark.parametrize("M", [1, 8, 9, 16, 32, 64, 65, 128, 129, 256, 300, 2048, 2056])
@pytest.mark.parametrize("N", [1088, 4096, 30016])
def test_every_chosen_tile_is_exact(M: int, N: int) -> None:
    """M and N leave the last tile ragged, and K the last stage."""
    logical = W8A8.example(np.random.default_rng(M), M=M, N=N, K=1072)
    assert np.array_equal(output(logical, "gpu", {}), W8A8.reference(**logical))


@pytest.mark.full
@on_every_backend
@pytest.mark.parametrize("tile", OUTPUT_TILES, ids="BM{BM}-WN{WN}-SPLIT{SPLIT}".format_map)
@checks.every_output
def test_scaled_outputs_are_the_epilogue_in_float32(
    variant: int, dtype: Any, tile: dict[str, int], backend: str
) -> None:
    """The bits are those of acc * x_scale * w_scale + bias.

    Each operation is rounded to float32, then once to the output.
    """
    with_bias = (variant + OUTPUT_TILES.index(tile)) % 2 == 0
    logical = W8A8.example(np.random.default_rng(variant), M=85, N=136, K=400)
    logical = checks.with_zeros(logical, with_bias)
    y = output(logical, backend, {**tile, "OUT": variant})
    exact = logical["x"].astype(np.int32) @ logical["w"].T.astype(np.int32)
    checks.assert_scaled_in_float32(y, exact, dtype, logical["x_scale"], logical["w_scale"], logical.get("bias"))
    bits = f"u{y.itemsize}"
    assert np.array_equal(y.view(bits), W8A8.expected(logical, {"OUT": variant})["y"].view(bits))


def chosen_constants(M: int, N: int, K: int) -> dict[str, int]:
    return {**W8A8.config_for({"M": M, "N": N, "K": K}), "OUT": 0}


@pytest.mark.full
@pytest.mark.parametrize(
    "config",
    sorted(
        {
            tuple(chosen_constants(M, layer.N, layer.K).items())
            for layer in LAYERS
            for M in (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192)
        }
    ),
    ids=lambda config: "-".join(f"{name}{constant}" for name, constant in config),
)
def test_no_tile_spills_or_waits_for_its_own_wgmma(config: tuple[tuple[str, int], ...]) -> None:
    assert checks.compile_checked(W8A8, dict(config), {"M": 256, "N": 4096, "K": 4096}).warnings == ()


@pytest.mark.parametrize("layer", LAYERS, ids=str)
@pytest.mark.parametrize("M", [1, 16, 64, 256, 512, 1024, 2048, 4096, 8192])
def test_chosen_tiles_leave_few_sms_idle(layer: Any, M: int) -> None:
    """There is a cluster or a persistent block for nearly every SM.

    This holds in the last round of tiles, too.
    """
    sizes = {"M": M, "N": layer.N, "K": layer.K}
    tile, stages, split = w8a8_tiles.choose(sizes)
    assert stages >= 2
    rounds = w8a8_tiles.count_tiles(sizes, tile) * split / 132
    assert rounds / ceil_div(rounds, 1) >= 0.6


def test_the_chosen_tiles_are_near_the_best_of_the_sweep() -> None:
    """The measure is the time of the chosen constants over that of the best, by matrix and tokens."""
    points: dict[tuple[int, int, int], dict[tuple[int, ...], float]] = defaultdict(dict)
    names = ("BM", "WN", "BK", "SPLIT", "STAGES")
    with SWEEP.open() as file:
        for line in csv.DictReader(file):
            constants = tuple(int(line[name]) for name in names)
            points[int(line["M"]), int(line["N"]), int(line["K"])][constants] = float(line["us"])
    losses = [
        times[tuple(chosen_constants(*point)[name] for name in names)] / min(times.values())
        for point, times in points.items()
    ]
    assert len(losses) >= 50
    assert math.exp(sum(map(math.log, losses)) / len(losses)) <= 1.02
    assert max(losses) <= 1.12


def quantized_operands(M: int, N: int, K: int) -> tuple[quant.QuantizedActivations, quant.Level1Weight]:
    rng = np.random.default_rng(M)
    x, w = rng.standard_normal((M, K), np.float32), rng.standard_normal((N, K), np.float32)
    return quant.quantize_activations(x), quant.quantize_level1(w, 127)


@pytest.mark.default_cases("int32-emulator")
@on_every_backend
@pytest.mark.parametrize("dtype", ["float16", "int32"])
def test_the_public_call(dtype: str, backend: str) -> None:
    """It writes the epilogue's very bits, into an array that is given or a new one.

    A row's bits are those that it has alone.
    """
    x, weight = quantized_operands(5, 40, 64)
    y = gemm_w8a8(pack_activations(x, "row_major"), weight, out_dtype=dtype, backend=backend)
    right = reference.gemm_epilogue(x.q.astype(np.int32) @ weight.q8.T, x.scale, weight.scale, None, dtype)
    assert y.dtype.name == dtype and np.array_equal(y, right)
    one = quant.QuantizedActivations(x.q[2:3], x.scale[2:3], x.token_sum[2:3])
    out = np.zeros((1, 40), dtype)
    bias = np.ones(40, np.float32) if dtype == "float16" else None
    assert gemm_w8a8(pack_activations(one, "row_major"), weight, out=out, bias=bias, backend=backend) is out
    right = reference.gemm_epilogue(one.q.astype(np.int32) @ weight.q8.T, one.scale, weight.scale, bias, dtype)
    assert np.array_equal(out, right)


_X, _W = quantized_operands(5, 40, 64)
TILES_OF_X = pack_activations(_X, "tiles", 8)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"weight": "w"}, r"gemm_w8a8: weight: must be a Level1Weight \(quant.quantize_level1\) \(got str\)"),
        ({"x": _X}, r"gemm_w8a8: x: must be row-major PackedActivations \(.*\) \(got QuantizedActivations\)"),
        ({"x": TILES_OF_X}, r"gemm_w8a8: x: must be row-major PackedActivations \(.*\) \(got tiles\)"),
        ({"weight": quantized_operands(1, 8, 96)[1]}, r"gemm_w8a8: x: K must be 96 as the weight's \(got 64\)"),
        ({"weight": quantized_operands(1, 12, 64)[1]}, r"gemm_w8a8: N % 8 == 0 \(got N=12\)"),
        ({"out_dtype": "int8"}, r"gemm_w8a8: out_dtype: must be one of float16, .* \(got int8\)"),
        ({"out": np.zeros((5, 41), np.float16)}, r"gemm_w8a8: out: .*\[5, 40\].*\[5, 41\].*"),
        ({"bias": np.zeros(41, np.float32)}, r"gemm_w8a8: bias: .*\[40\].*\[41\].*"),
        ({"backend": "cpu"}, r"gemm_w8a8: backend: one of .*\(got cpu\); nearest: gpu"),
    ],
)
def test_bad_input_of_the_public_call(change: dict[str, Any], message: str) -> None:
    good = {"x": pack_activations(_X, "row_major"), "weight": _W, "backend": "emulator"}
    with pytest.raises(ArgumentError, match=f"^{message}$"):
        gemm_w8a8(**{**good, **change})


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ({"M": 2, "N": 64, "K": 24}, r"gemm_w8a8_sm90: K % 16 == 0 \(got K=24\)"),
        ({"M": 2, "N": 12, "K": 64}, r"gemm_w8a8_sm90: N % 8 == 0 \(got N=12\)"),
        ({"M": 2, "N": 8, "K": 131072}, r"gemm_w8a8_sm90: 1 <= K < 131072 \(got K=131072\)"),
    ],
)
def test_sizes_beyond_the_contract_are_refused(sizes: dict[str, int], message: str) -> None:
    with pytest.raises(ArgumentError, match=message):
        W8A8.sizes_of({"x": (sizes["M"], sizes["K"]), "w": (sizes["N"], sizes["K"])})
