"""KV4 attention of any number of queries from Ampere on: the contract of `prefill` by mma.sync."""

from dataclasses import replace

from ptxlab.lowbit.kernels.attention import common
from ptxlab.lowbit.kernels.attention.prefill import HEADROOM, PREFILL, attend, bound_chunks, own_form
from ptxlab.lowbit.layout.pages import page_bytes
from ptxlab.spec import Arrays, Launch, Sizes, sizes_rows

WARPS = 4  # of a block of the launch, 16 rows each


def keys_per_block(head_dim: int) -> int:
    """Return the tokens of a block of keys: as many as leave room for two blocks of the launch on an A100's SM."""
    return 32 if head_dim == 256 else 64


def blocks_per_sm(head_dim: int) -> int:
    """Return the blocks of the launch that share an SM, as registers allow."""
    return 4 if head_dim == 64 else 2


def shared_bytes(s: Sizes) -> int:
    """Return the dynamic shared memory of a block: queries, restored keys and values, and copies of one of each."""
    restored_bytes = 2 * s["D"] * (16 * s["WARPS"] + 2 * s["KEYS"])
    return int(restored_bytes + 2 * page_bytes("kv4", s["KEYS"], s["D"]))


def _choose(s: Sizes) -> dict[str, int]:
    tile = {"KEYS": keys_per_block(s["D"]), "WARPS": WARPS, "BLOCKS": blocks_per_sm(s["D"])}
    return {"HEAD_DIM": s["D"], "PAGE": s["page"], "BF16": 0, **tile, "HEADROOM": HEADROOM}


_INPUTS = ("q", "pool", "table", "lengths", "starts")
_ARGUMENTS = (*_INPUTS, "out", "lse", "softmax_scale", "B", "Hq", "Hkv", "P", "window")  # tiles have no parts


def _pack(logical: Arrays) -> Arrays:
    return {name: array for name, array in PREFILL.pack(logical).items() if name in _INPUTS}


PREFILL_SM80 = replace(
    PREFILL,
    name="attention_kv4_prefill_mma_sm80",
    summary="the same by mma.sync: keys and values restored to f16 once for 64 rows, 16 rows to a warp",
    args=tuple(arg for arg in PREFILL.args if arg.name in _ARGUMENTS),
    launch=lambda s: Launch((s["blocks"], 1, 1), (32 * s["WARPS"], 1, 1), shared_bytes(s)),
    choose=_choose,
    rules=tuple(rule for rule in PREFILL.rules if "parts" not in rule),
    example=lambda rng, **sizes: PREFILL.example(rng, parts=1, **sizes),
    pack=_pack,
    reference=attend,
    bound=bound_chunks,
    arch="sm_80",
    exact_arch=False,
    after_wait=_INPUTS,
    example_sizes=sizes_rows(
        "N B Hq Hkv D P pages page window blocks softmax_scale",
        (70, 2, 4, 2, 128, 4, 8, 64, 0, 2, 0.088),
        (150, 3, 4, 1, 64, 9, 20, 32, 100, 3, 0.125),
        (40, 2, 6, 2, 256, 8, 14, 16, 0, 1, 0.0625),
    ),
)
SPECS = (PREFILL_SM80,)
ROTATED = common.rotated_form(PREFILL_SM80)
OWN = own_form(PREFILL_SM80)
OWN_ROTATED = common.rotated_form(OWN)
