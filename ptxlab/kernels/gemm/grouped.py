"""The experts of a layer in one launch (mixture of experts): W4A8 on Hopper, a weight for each expert."""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import product

import numpy as np

from ptxlab import layout, quant
from ptxlab.kernels.gemm import sm90
from ptxlab.kernels.gemm.common import EPILOGUE, GROUPS, INT32, activations, examples, gemm
from ptxlab.quant import TwoLevelWeight
from ptxlab.spec import Arg, Arrays, KernelSpec, Launch, Sizes

_MOST_STAGES = 8
_MOST_EXPERTS = 65536
# For the choice of a tile, of an SM: bytes per clock from the L2 and from memory; clocks in which a warp group
# dequantises 64 rows x 128 channels; clocks of a stage and of a tile beside that. Estimates, not measurements.
_L2_BYTES, _MEMORY_BYTES, _DEQUANT, _PER_STAGE, _PER_TILE = 40, 20, 75, 60, 1500


@dataclass(frozen=True)
class Tile:
    """What a block does at a time.

    Attributes:
        BM: tokens of one expert.
        WN: warp groups.
        MN: MMAs of 64 rows of each.
        STRIPS: most strips of 16 rows.
        BK: channels of a stage.
    """

    BM: int
    WN: int = 2
    MN: int = 1
    STRIPS: int = 8
    BK: int = 256

    def stage_bytes(self, group: int) -> int:
        """Of a slot of the ring."""
        strip = -(-self.BK // 128 * _block_bytes(group) // 128) * 128
        return -(-(self.BM * self.BK + self.STRIPS * strip) // 1024) * 1024

    @property
    def epilogue_bytes(self) -> int:
        """Of the warps' buffers and the warp groups' scales, behind the ring."""
        return self.WN * (4 * 512 + 8 * self.BM)

    def stages(self, group: int) -> int:
        """As many as fit."""
        room = sm90._SHARED - 1024 - sm90._BESIDE - self.epilogue_bytes
        return min(_MOST_STAGES, room // self.stage_bytes(group))

    def row_tiles(self, N: int) -> int:
        """Of a weight."""
        return -(-N // (16 * self.STRIPS))

    def most_tiles(self, s: Sizes) -> int:
        """That there can be, however the rows are shared out among the experts."""
        active = min(s["E"], s["M"])
        return (active + (s["M"] - active) // self.BM) * self.row_tiles(s["N"])

    def likely_tiles(self, s: Sizes) -> float:
        """That are to be expected when every row takes any expert with the same probability."""
        mean = s["M"] / s["E"]
        deviation = math.sqrt(2 * max(mean * (1 - 1 / s["E"]), 1e-9))
        beyond = (math.erfc((tile * self.BM + 0.5 - mean) / deviation) / 2 for tile in range(1, -(-s["M"] // self.BM)))
        return s["E"] * (_active(s) + sum(beyond)) * self.row_tiles(s["N"])

    def clocks(self, s: Sizes) -> float:
        """An estimate: rounds of tiles, each as long as its products or its bytes; and the weights from memory."""
        block = _block_bytes(s["g"])
        multiply, dequantise = 2 * self.BM * self.WN * self.MN, _DEQUANT * self.WN * self.MN
        compute = max(multiply, dequantise) if self.WN > 1 else multiply + dequantise
        load = (self.STRIPS * block + self.BM * 128) / _L2_BYTES
        tile = s["K"] / 128 * (max(compute, load) + _PER_STAGE * 128 / self.BK) + _PER_TILE
        weights = s["E"] * _active(s) * s["N"] / 16 * s["K"] / 128 * block
        at_work = math.ceil(self.likely_tiles(s) / sm90._SMS) * tile
        from_memory = weights / (_MEMORY_BYTES * sm90._SMS)
        return max(at_work, from_memory) + min(at_work, from_memory) / 8


def _block_bytes(group: int) -> int:
    """Of 16 rows x 128 channels, with their constants."""
    return 1024 + 128 // group * 32


def _active(s: Sizes) -> float:
    """The probability that an expert has rows."""
    return 1 - (1 - 1 / s["E"]) ** s["M"] if s["E"] > 1 else min(1.0, float(s["M"]))


def _candidates(group: int) -> Iterator[Tile]:
    """Tiles of all heights; one that stands earlier is to be preferred."""
    for BM, (WN, MN), BK in product((8, 16, 32, 64, 128), ((2, 1), (2, 2)), (256, 128)):
        for STRIPS in range(4 * WN * MN, 2 * WN * MN, -1):
            tile = Tile(BM, WN, MN, STRIPS, BK)
            if tile.stages(group) >= 3:
                yield tile


def _choose(s: Sizes) -> dict[str, int]:
    """The quickest tile by its estimate."""
    tile = min(_candidates(s["g"]), key=lambda tile: tile.clocks(s))
    return {**asdict(tile), "STAGES": tile.stages(s["g"]), "GROUP": s["g"], "OUT": INT32, "SIGNED": 0}


def _launch(s: Sizes) -> Launch:
    """Persistent blocks, no more than there can be tiles."""
    tile = Tile(**{name: s[name] for name in Tile.__dataclass_fields__})
    shared = s["STAGES"] * tile.stage_bytes(s["GROUP"]) + tile.epilogue_bytes
    return Launch((min(tile.most_tiles(s), sm90._SMS), 1, 1), (128 * (tile.WN + 1), 1, 1), shared)


def _example(rng: np.random.Generator, *, M: int, N: int, K: int, E: int, g: int) -> Arrays:
    """Weights of random numbers, and rows that go to experts at random, of which some are never taken."""
    weights = [quant.quantize_lqq(rng.standard_normal((N, K), dtype=np.float32), group=g) for _ in range(E)]
    taken = rng.permutation(E)[: max(1, E - E // 3)]
    counts = np.bincount(rng.choice(taken, M), minlength=E)
    logical = {"weights": weights, "offsets": offsets_of(counts), **activations(rng, M, N, K)}
    return {**logical, "bias": rng.standard_normal((E, N), dtype=np.float32)}


def offsets_of(counts: np.ndarray | Sequence[int]) -> np.ndarray:
    """Where the rows of each expert begin, s32 [E+1], from how many each has."""
    return np.concatenate([[0], np.cumsum(counts)]).astype(np.int32)


def _pack(logical: Arrays) -> Arrays:
    """The weights in strips, one behind the other, and the token sums."""
    packed = [layout.pack(weight, "strips").buffers for weight in logical["weights"]]
    x = logical["x"]
    return {
        "strips": np.stack([buffers["strips"] for buffers in packed]),
        "w_scale": np.stack([buffers["channel_scale"] for buffers in packed]),
        "x": x,
        "offsets": logical["offsets"],
        "x_scale": logical.get("x_scale", np.ones(len(x), np.float32)),
        "x_sum": x.sum(axis=1, dtype=np.int32),
        **({"bias": logical["bias"]} if "bias" in logical else {}),
    }


def _reference(
    weights: Sequence[TwoLevelWeight],
    x: np.ndarray,
    offsets: np.ndarray,
    x_scale: np.ndarray | None = None,
    bias: np.ndarray | None = None,
    OUT: int = INT32,
) -> np.ndarray:
    """One GEMM after the other, each with its expert's rows."""
    ys = []
    for expert, weight in enumerate(weights):
        rows = slice(int(offsets[expert]), int(offsets[expert + 1]))
        scale, beside = None if x_scale is None else x_scale[rows], None if bias is None else bias[expert]
        ys.append(gemm(weight, x[rows], scale, beside, OUT))
    return np.concatenate(ys)


def _by_expert(args: Mapping[str, Arg]) -> tuple[Arg, ...]:
    """The arguments behind the activations: of each expert a bias, and how many experts there are."""
    return (
        args["x_scale"],
        Arg("x_sum", "int32", ("M",)),
        Arg("bias", "float32", ("E", "N"), optional=True),
        *(args[name] for name in ("y", "M", "N", "K")),
        Arg("E", "int32", role="scalar"),
    )


GROUPED = KernelSpec(
    name="gemm_w4a8_grouped_sm90",
    summary="mixture of experts: the tiles of all experts that have tokens, worked out on the device, in one launch",
    args=(
        Arg("strips", "uint8", ("E", "ceil_div(N, 16)", "ceil_div(K, 128)", "1024 + 32*(128//g)")),
        Arg("w_scale", "float32", ("E", "N")),
        Arg("x", "int8", ("M", "K"), "tma", box=("BM", "128"), swizzle=128),
        Arg("offsets", "int32", ("E + 1",)),
        *_by_expert({arg.name: arg for arg in EPILOGUE}),
    ),
    launch=_launch,
    choose=_choose,
    rules=(
        f"g in {GROUPS}",
        "K % g == 0",
        "N % 8 == 0",
        "1 <= K < 131072",
        f"1 <= E <= {_MOST_EXPERTS}",
        "M*N < 2**31",
    ),
    value_rules=("offsets[:1] == 0", "offsets[1:] >= offsets[:-1]", "(offsets == M) | (offsets < offsets[-1])"),
    operations="2*M*N*K",
    example=_example,
    pack=_pack,
    reference=_reference,
    arch="sm_90a",
    exact_arch=True,
    example_sizes=examples("MNKEg", (1, 8, 128, 1, 128), (9, 40, 192, 4, 64), (70, 200, 160, 3, 32)),
    after_wait=("offsets", "x", "x_scale", "x_sum"),
)

SPECS = (GROUPED,)
