"""Sizes beyond a kernel's contract are refused before anything is launched, by the rule that they break."""

import pytest

from ptxlab import registry
from ptxlab.errors import ArgumentError
from ptxlab.lowbit.kernels.attention.sm80 import MMA
from ptxlab.lowbit.kernels.attention.sm90 import SM90
from ptxlab.lowbit.kernels.gemm.grouped import GROUPED
from ptxlab.lowbit.kernels.gemm.strips import LARGE, LARGE_TILES, SMALL, SMALL_FRAGMENTS
from ptxlab.lowbit.kernels.gemm.w4a4 import ATOM, OUTLIER, S4
from ptxlab.lowbit.kernels.gemm.w4a4 import SM90 as W4A4
from ptxlab.lowbit.kernels.gemm.w4ax import COMET, NAIVE, REMAP
from ptxlab.lowbit.kernels.gemm.w4ax import SM90 as W4AX
from ptxlab.spec import KernelSpec

TILE = registry.specs()["gemm_tile_lqq_sm80"]
SIZES = {"M": 8, "N": 64, "K": 128, "E": 2, "g": 64, "rows": 8}  # such as every GEMM takes
SIZES |= {"outliers": 64, "K4": 128, "K8": 128, "blocks": 4}
WRONG = [
    (MMA, {"D": 96}, r"D in \(64, 128, 256\) \(got D=96\)"),
    (MMA, {"page": 8}, r"page in \(16, 32, 64\) \(got page=8\)"),
    (MMA, {"bits": 2}, r"bits in \(4, 8\) \(got bits=2\)"),
    (MMA, {"T": 9}, r"1 <= T <= 8 \(got T=9\)"),
    (MMA, {"Hq": 3}, r"Hq % Hkv == 0 \(got Hq=3, Hkv=2\)"),
    (MMA, {"Hq": 34}, r"1 <= Hq//Hkv <= 16 \(got Hq=34, Hkv=2\)"),
    (MMA, {"window": -1}, r"window >= 0 \(got window=-1\)"),
    (SM90, {"D": 96}, r"D in \(64, 128, 256\) \(got D=96\)"),
    (SM90, {"T": 9}, r"1 <= T <= 8 \(got T=9\)"),
    (SM90, {"Hq": 3}, r"Hq % Hkv == 0 \(got Hq=3, Hkv=2\)"),
    (SM90, {"blocks": 0}, r"blocks >= 1 \(got blocks=0\)"),
    (GROUPED, {"K": 96}, r"K % g == 0 \(got K=96, g=64\)"),
    (GROUPED, {"N": 12}, r"N % 8 == 0 \(got N=12\)"),
    (GROUPED, {"K": 131072}, r"1 <= K < 131072 \(got K=131072\)"),
    (GROUPED, {"E": 0}, r"1 <= E <= 65536 \(got E=0\)"),
    (GROUPED, {"g": 16}, r"g in \(32, 64, 128\) \(got g=16\)"),
    (LARGE, {"g": 48}, r"g in \(32, 64, 128\) \(got g=48\)"),
    (LARGE, {"K": 96}, r"K % g == 0 \(got K=96, g=64\)"),
    (LARGE, {"N": 12}, r"N % 8 == 0 \(got N=12\)"),
    (LARGE, {"K": 131072}, r"1 <= K < 131072 \(got K=131072\)"),
    (LARGE, {"M": 1 << 20, "N": 2048}, r"M\*N < 2\*\*31 \(got M=1048576, N=2048\)"),
    (LARGE_TILES, {"rows": 24}, r"rows in \(8, 16, 32, 48, .*, 256\) \(got rows=24\)"),
    (SMALL, {"N": 12}, r"N % 8 == 0 \(got N=12\)"),
    (SMALL, {"M": 33}, r"M <= 32 \(got M=33\)"),
    (SMALL_FRAGMENTS, {"M": 33}, r"M <= 32 \(got M=33\)"),
    (SMALL, {"M": 9, "K": 12928}, r"ceil_div\(M, 8\).* <= 204800 \(got M=9, K=12928\)"),
    (S4, {"K": 48}, r"K % 32 == 0 \(got K=48\)"),
    (S4, {"N": 12}, r"N % 8 == 0 \(got N=12\)"),
    (OUTLIER, {"K": 96}, r"K % 64 == 0 \(got K=96\)"),
    (OUTLIER, {"outliers": 32}, r"outliers in \(0, 64, 128\) \(got outliers=32\)"),
    (ATOM, {"g": 32}, r"g in \(64, 128\) \(got g=32\)"),
    (ATOM, {"K": 192, "g": 128}, r"K % g == 0 \(got K=192, g=128\)"),
    (ATOM, {"K": 131072}, r"1 <= K < 131072 \(got K=131072\)"),
    (W4A4, {"N": 12}, r"N % 8 == 0 \(got N=12\)"),
    (W4A4, {"outliers": 256}, r"outliers in \(0, 64, 128\) \(got outliers=256\)"),
    (NAIVE, {"K4": 64}, r"K4 % 128 == 0 \(got K4=64\)"),
    (NAIVE, {"K8": 64}, r"K8 % 128 == 0 \(got K8=64\)"),
    (NAIVE, {"K4": 0, "K8": 0}, r"1 <= K4 \+ K8 < 131072 \(got K4=0, K8=0\)"),
    (REMAP, {"blocks": 0}, r"1 <= blocks <= 65536 \(got blocks=0\)"),
    (COMET, {"K8": 64}, r"K8 % 128 == 0 \(got K8=64\)"),
    (W4AX, {"N": 12}, r"N % 8 == 0 \(got N=12\)"),
    (W4AX, {"K4": 64}, r"K4 % 128 == 0 \(got K4=64\)"),
    (W4AX, {"M": 1 << 20, "N": 2048}, r"M\*N < 2\*\*31 \(got M=1048576, N=2048\)"),
    (TILE, {"M": 4}, r".*M"),
    (TILE, {"N": 24}, r"N % 16 == 0 \(got N=24\)"),
    (TILE, {"K": 96, "g": 32}, r"K % 64 == 0 \(got K=96\)"),
]


@pytest.mark.parametrize(("spec", "change", "message"), WRONG, ids=[f"{spec.name} {how}" for spec, how, _ in WRONG])
def test_sizes_beyond_the_contract_are_refused(spec: KernelSpec, change: dict[str, int], message: str) -> None:
    usual = SIZES if spec.family == "gemm" else spec.example_sizes[0]
    right = {name: size for name, size in usual.items() if name in spec.symbols}
    spec.check_sizes(right)
    with pytest.raises(ArgumentError, match=f"{spec.name}: {message}") as raised:
        spec.check_sizes({**right, **change})
    assert "\n" not in str(raised.value)
