"""The experts of a layer in one launch (mixture of experts): W4A8 on Hopper, a weight for each expert."""

import math
from collections.abc import Iterator, Mapping, Sequence

import numpy as np

from ptxlab.arithmetic import ceil_div
from ptxlab.lowbit import layout, quant
from ptxlab.lowbit.kernels.gemm.common import (
    EPILOGUE,
    GROUPS,
    INT32,
    GemmStep,
    check_sums,
    draw_activations,
    gemm,
    gemm_channel,
    per_channel,
)
from ptxlab.lowbit.kernels.gemm.strips import LAYOUT, SCHEMES, group_constants
from ptxlab.lowbit.kernels.gemm.strips_tiles import (
    BMS,
    COSTS,
    MOST_STAGES,
    ROOM,
    SMS,
    StripTile,
    group_of,
    shared_bytes,
    stream_microseconds,
    tile_microseconds,
    tiles_of_widths,
    widest_of_kind,
)
from ptxlab.lowbit.quant import QoQChannelWeight, TwoLevelWeight
from ptxlab.spec import Arg, Arrays, KernelSpec, Launch, Sizes, sizes_rows

_MOST_EXPERTS = 65536


def constants(tile: StripTile, strips: int, group: int) -> dict[str, int]:
    """Return the constants of the variant with this tile, up to so many strips, and as many stages as fit."""
    ring_bytes = [shared_bytes(tile, strips, stages, 1, group) for stages in range(1, MOST_STAGES + 1)]
    shape = {"BM": tile.BM, "WN": tile.WN, "MN": tile.MN, "STRIPS": strips, "BK": tile.BK}
    return {**shape, "STAGES": sum(nbytes <= ROOM for nbytes in ring_bytes), **group_constants(group)}


def likely_token_tiles(s: Sizes, BM: int) -> int:
    """Estimate the tiles of tokens of all experts together, if every row takes any expert with the same probability."""
    mean, miss_probability = s["M"] / s["E"], 1 - 1 / s["E"]
    deviation = math.sqrt(2 * mean * miss_probability) or math.inf
    further_tiles = (math.erfc((n * BM + 0.5 - mean) / deviation) / 2 for n in range(1, ceil_div(s["M"], BM)))
    if s["E"] == 1:
        return int(ceil_div(s["M"], BM))
    mean_tiles: float = s["E"] * (1 - miss_probability ** s["M"] + sum(further_tiles))
    return math.ceil(mean_tiles - 0.4)  # one that is nearly as likely as not counts


def most_tiles(s: Sizes) -> int:
    """Count the most tiles that there can be, however the rows are shared out among the experts."""
    active_experts = min(s["E"], s["M"])
    return int((active_experts + (s["M"] - active_experts) // s["BM"]) * _row_tiles(s["N"], s["STRIPS"]))


def _row_tiles(N: int, strips: int) -> int:
    return ceil_div(ceil_div(N, 16), strips)


def _candidates(group: int) -> Iterator[dict[str, int]]:
    """Yield tiles of which a block can do several, of any width, and of any height that needs most of their MMAs."""
    for tile in tiles_of_widths(BMS):
        for strips in range(tile.strips * 3 // 4, tile.strips + 1) if tile.WK == 1 else ():
            variant = constants(tile, strips, group)
            if variant["STAGES"] >= 3:
                yield variant


def _microseconds(s: Sizes) -> tuple[float, float, float]:
    """Estimate microseconds as for one GEMM, by three measures in order of importance.

    The first is rounds of blocks, but not less than the stream of all experts' weights. The second leaves the stream
    out. The third is the second with one more expert that has tokens.
    """
    tile, row_tiles = StripTile(s["BM"], s["WN"], 1, s["MN"], s["BK"]), _row_tiles(s["N"], s["STRIPS"])
    stages, row_tile_strips = ceil_div(s["K"], s["BK"]), s["N"] / 16 / row_tiles
    cost = COSTS[widest_of_kind(tile)]
    # A tile that holds all rows: one for each expert that has any.
    active_tiles, likely_tiles = likely_token_tiles(s, max(1, s["M"])), likely_token_tiles(s, s["BM"])
    us, us_with_one_more = (
        ceil_div(token_tiles * row_tiles, SMS) * tile_microseconds(tile, stages, row_tile_strips, group_of(s))
        + cost.launch
        for token_tiles in (likely_tiles, likely_tiles + (active_tiles < s["E"]))
    )
    return max(us, stream_microseconds({**s, "N": active_tiles * s["N"]}) + cost.drain), us, us_with_one_more


def _choose(s: Sizes) -> dict[str, int]:
    """Choose the quickest variant by the costs.

    Of equals it is the one of the fewest tokens, then the lowest, so that more blocks share the work.
    """
    return min(_candidates(group_of(s)), key=lambda variant: _microseconds({**s, **variant}))


def _launch(s: Sizes) -> Launch:
    """Return the launch of persistent blocks, no more than there can be tiles."""
    shared_memory = shared_bytes(
        StripTile(s["BM"], s["WN"], 1, s["MN"], s["BK"]), s["STRIPS"], s["STAGES"], 1, s["GROUP"]
    )
    return Launch((min(most_tiles(s), SMS), 1, 1), (128 * (s["WN"] + 1), 1, 1), shared_memory)


def _example(rng: np.random.Generator, *, M: int, N: int, K: int, E: int, g: int = 0) -> Arrays:
    """Draw random weights, per channel without `g`, and rows that go to random experts, to some never."""
    float_weights = [rng.standard_normal((N, K), dtype=np.float32) for _ in range(E)]
    weights = [quant.quantize_lqq(w, group=g) if g else quant.quantize_qoq_channel(w) for w in float_weights]
    active_experts = rng.permutation(E)[: max(1, E - E // 3)]
    counts = np.bincount(rng.choice(active_experts, M), minlength=E)
    logical = {"weights": weights, "offsets": offsets_of(counts), **draw_activations(rng, M, N, K)}
    return {**logical, "bias": rng.standard_normal((E, N), dtype=np.float32)}


def offsets_of(counts: np.ndarray | Sequence[int]) -> np.ndarray:
    """Compute the first row of each expert, s32 [E+1], from the number of rows of each."""
    return np.concatenate([[0], np.cumsum(counts)]).astype(np.int32)


def _pack(logical: Arrays) -> Arrays:
    """Pack the weights in strips, one behind the other, and sum the tokens."""
    packed_buffers = [layout.pack(weight, LAYOUT).buffers for weight in logical["weights"]]
    x = logical["x"]
    return {
        "strips": np.stack([buffers["strips"] for buffers in packed_buffers]),
        "w_scale": np.stack([buffers["channel_scale"] for buffers in packed_buffers]),
        **(
            {"w_zero": np.stack([b["channel_zero"] for b in packed_buffers])}
            if "channel_zero" in packed_buffers[0]
            else {}
        ),
        "x": x,
        "offsets": logical["offsets"],
        "x_scale": logical.get("x_scale", np.ones(len(x), np.float32)),
        "x_sum": x.sum(axis=1, dtype=np.int32),
        **({"bias": logical["bias"]} if "bias" in logical else {}),
    }


def _reference(
    weights: Sequence[TwoLevelWeight | QoQChannelWeight],
    x: np.ndarray,
    offsets: np.ndarray,
    x_scale: np.ndarray | None = None,
    bias: np.ndarray | None = None,
    OUT: int = INT32,
) -> np.ndarray:
    """Compute one GEMM after the other, each on its expert's rows; at least one expert has rows."""
    expert_results = []
    for expert, weight in enumerate(weights):
        rows = slice(int(offsets[expert]), int(offsets[expert + 1]))
        if rows.start == rows.stop:
            continue
        inputs = x[rows], None if x_scale is None else x_scale[rows], None if bias is None else bias[expert]
        if isinstance(weight, TwoLevelWeight):
            expert_results.append(gemm(weight, *inputs, OUT=OUT))
        else:
            expert_results.append(gemm_channel(weight, *inputs, OUT=OUT))
    return np.concatenate(expert_results)


def _by_expert(args: Mapping[str, Arg]) -> tuple[Arg, ...]:
    """Return the arguments after the activations: a bias per expert, and the number of experts."""
    return (
        args["x_scale"],
        Arg("x_sum", "int32", ("M",), optional=True, absent="SIGNED"),
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
        Arg("w_zero", "uint8", ("0", "0"), optional=True),  # of weights without groups alone
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
    agree=check_sums,
    arch="sm_90a",
    exact_arch=True,
    example_sizes=sizes_rows("M N K E g", (1, 8, 128, 1, 128), (9, 40, 192, 4, 64), (70, 200, 160, 3, 32)),
    after_wait=("offsets", "x", "x_scale", "x_sum"),
    one_row=lambda arrays, row: {"offsets": (arrays["offsets"] > row).astype(np.int32)},
)

GROUPED_CHANNEL = per_channel(
    GROUPED,
    Arg("strips", "uint8", ("E", "ceil_div(N, 16)", "ceil_div(K, 128)", "1024")),
    Arg("w_zero", "uint8", ("E", "N")),
)

STEPS = {
    scheme: GemmStep(GROUPED_CHANNEL if scheme == "qoq_channel" else GROUPED, scheme, LAYOUT) for scheme in SCHEMES
}
SPECS = (GROUPED,)
