"""W8A8 on Hopper: the sibling of gemm_w4a8_sm90 that has nothing to dequantise, for what dequantisation costs."""

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from itertools import product

import numpy as np

from ptxlab import reference
from ptxlab.kernels.gemm import sm90
from ptxlab.kernels.gemm.common import EPILOGUE, INT32, activations, epilogue, examples, scaled
from ptxlab.spec import Arg, Arrays, KernelSpec, Launch, Sizes

_MOST_STAGES = 12
# For the choice of a tile, of an SM: bytes per clock from the L2 and from memory; clocks of a block beside its main
# loop, and for each other block that it adds up with. Estimates, not measurements.
_L2_BYTES, _MEMORY_BYTES, _FIXED, _EXCHANGE = 36, 20, 3000, 1500


@dataclass(frozen=True)
class Tile:
    """What a block does, and with whom.

    Attributes:
        BM: tokens, up to 256; up to 128 with three warp groups.
        WN: warp groups of 64 rows, 1 to 3.
        BK: channels of a stage.
        SPLIT: blocks that share a tile, each with a slice of K.
        BAND: tiles of rows that go before the next tokens.
    """

    BM: int
    WN: int = 2
    BK: int = 128
    SPLIT: int = 1
    BAND: int = 1

    @property
    def shared_bytes(self) -> tuple[int, int]:
        """Of a slot of the ring; and of what the epilogue receives, stores through and scales by."""
        received = (self.SPLIT - 1) * (self.WN * self.BM // 8 // self.SPLIT) * 2048
        stored, scales = self.WN * 4 * 512, self.WN * 2 * self.BM * 4
        return (self.BM + 64 * self.WN) * self.BK, received + stored + scales

    @property
    def stages(self) -> int:
        """As many as fit."""
        slot, beside = self.shared_bytes
        return min(_MOST_STAGES, (sm90._SHARED - 1024 - sm90._BESIDE - beside) // slot)

    @property
    def runs(self) -> bool:
        """Whether there are registers enough, and the blocks of a cluster have as many sums each."""
        return self.WN * self.BM <= 512 and self.WN * self.BM // 8 % self.SPLIT == 0

    def tiles(self, s: Sizes) -> int:
        """Of a matrix."""
        return -(-s["M"] // self.BM) * -(-s["N"] // (64 * self.WN))

    def clocks(self, s: Sizes) -> int:
        """An estimate: rounds of blocks, each as long as its products or its bytes; or as the weights from memory."""
        products = 2 * self.WN * self.BM  # of 128 channels
        loads = (64 * self.WN + self.BM) * 128 // _L2_BYTES
        main_loop = -(-s["K"] // (128 * self.SPLIT)) * max(products, loads)
        rounds = -(-self.tiles(s) * self.SPLIT // sm90._SMS) * (main_loop + _FIXED + (self.SPLIT - 1) * _EXCHANGE)
        return max(rounds, s["N"] * s["K"] // (_MEMORY_BYTES * sm90._SMS) + _FIXED)


def _candidates(s: Sizes) -> Iterator[Tile]:
    """Tiles about as high as the tokens need, and none that spills; one that stands earlier is to be preferred."""
    highest = next((BM for BM in (16, 32, 64, 128) if s["M"] <= BM), 256)
    heights = [BM for BM in (256, 128, 64) if highest >= BM] or [highest]
    for BM, WN, SPLIT in product(heights, (2, 3, 1), (1, 2, 4)):
        tile = Tile(BM, WN, 256 if BM + 64 * WN <= 256 else 128, SPLIT, BAND=8)
        if tile.runs and tile.stages >= 3:
            yield tile


def _choose(s: Sizes) -> dict[str, int]:
    """The quickest tile by its estimate, so that the last round of blocks is as full as may be."""
    tile = min(_candidates(s), key=lambda tile: tile.clocks(s))
    return {**asdict(tile), "STAGES": tile.stages, "OUT": INT32}


def _launch(s: Sizes) -> Launch:
    """Persistent blocks, or a cluster per tile where K is split."""
    tile = Tile(**{name: s[name] for name in Tile.__dataclass_fields__})
    clusters = tile.tiles(s) if tile.SPLIT > 1 else min(tile.tiles(s), sm90._SMS)
    slot, beside = tile.shared_bytes
    shared = s["STAGES"] * slot + beside
    return Launch((clusters * tile.SPLIT, 1, 1), (128 * (tile.WN + 1), 1, 1), shared, (tile.SPLIT, 1, 1))


def _example(rng: np.random.Generator, *, M: int, N: int, K: int) -> Arrays:
    """Random bytes."""
    w_scale = rng.uniform(1e-3, 1e-2, N).astype(np.float32)
    return {"w": rng.integers(-128, 128, (N, K), np.int8), "w_scale": w_scale, **activations(rng, M, N, K)}


def _pack(logical: Arrays) -> Arrays:
    """Everything as it is; scales are 1 where they are not given."""
    ones = np.ones(len(logical["w"]), np.float32)
    return {"w": logical["w"], "w_scale": logical.get("w_scale", ones), "x": logical["x"], **epilogue(logical)}


def _reference(
    w: np.ndarray,
    x: np.ndarray,
    w_scale: np.ndarray | None = None,
    x_scale: np.ndarray | None = None,
    bias: np.ndarray | None = None,
    OUT: int = INT32,
) -> np.ndarray:
    """The accumulators, or with `OUT` the scaled output."""
    accumulators = reference.gemm_accumulators(x, w.astype(np.int32))
    return scaled(accumulators, x_scale, np.ones(len(w), np.float32) if w_scale is None else w_scale, bias, OUT)


W8A8 = KernelSpec(
    name="gemm_w8a8_sm90",
    summary="8-bit weights: wgmma from shared memory, nothing to dequantise: what W4A8 is measured against",
    args=(
        Arg("w", "int8", ("N", "K"), "tma", box=("64*WN", "128"), swizzle=128),
        Arg("w_scale", "float32", ("N",)),
        Arg("x", "int8", ("M", "K"), "tma", box=("BM", "128"), swizzle=128),
        *EPILOGUE,
    ),
    launch=_launch,
    choose=_choose,
    rules=("K % 16 == 0", "N % 8 == 0", "1 <= K < 131072", "M*N < 2**31"),
    operations="2*M*N*K",
    example=_example,
    pack=_pack,
    reference=_reference,
    arch="sm_90a",
    exact_arch=True,
    example_sizes=examples("MNK", (1, 8, 16), (5, 40, 272), (17, 200, 192), (130, 264, 144)),
    after_wait=("x", "x_scale"),
)

SPECS = (W8A8,)
