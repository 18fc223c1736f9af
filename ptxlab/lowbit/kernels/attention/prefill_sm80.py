"""KV4 attention of any number of queries from Ampere on: the contract of `prefill` by mma.sync (QServe §5.3)."""

from dataclasses import replace

from ptxlab.lowbit.kernels.attention import common
from ptxlab.lowbit.kernels.attention.prefill import HEADROOM, PREFILL
from ptxlab.lowbit.layout.pages import page_bytes
from ptxlab.spec import Launch, Sizes

WARPS = 4  # of a block of the launch, 16 rows each


def keys_of(head_dim: int) -> int:
    """Return the tokens of a block of keys: as many as leave room for two blocks of the launch on an A100's SM."""
    return 32 if head_dim == 256 else 64


def blocks_of(head_dim: int) -> int:
    """Return the blocks of the launch that share an SM, as registers allow."""
    return 4 if head_dim == 64 else 2


def shared_bytes(s: Sizes) -> int:
    """Return the dynamic shared memory of a block: queries, restored keys and values, and copies of one of each."""
    halves = 2 * s["D"] * (16 * s["WARPS"] + 2 * s["KEYS"])
    return int(halves + 2 * page_bytes("kv4", s["KEYS"], s["D"]))


def _choose(s: Sizes) -> dict[str, int]:
    tile = {"KEYS": keys_of(s["D"]), "WARPS": WARPS, "BLOCKS": blocks_of(s["D"])}
    return {"D": s["D"], "PAGE": s["page"], "BF16": 0, **tile, "HEADROOM": HEADROOM}


PREFILL_SM80 = replace(
    PREFILL,
    name="attention_kv4_prefill_mma_sm80",
    summary="the same by mma.sync: keys and values restored to f16 once for 64 rows, 16 rows to a warp (QServe §5.3)",
    launch=lambda s: Launch((s["blocks"], 1, 1), (32 * s["WARPS"], 1, 1), shared_bytes(s)),
    choose=_choose,
    arch="sm_80",
    exact_arch=False,
)
SPECS = (PREFILL_SM80,)
ROTATED = common.rotated_form(PREFILL_SM80)
