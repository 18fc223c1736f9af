"""The products of a decoder layer from attention to attention in one persistent launch (QServe Fig. 11)."""

from typing import Any

import numpy as np

from ptxlab import layout, quant, reference
from ptxlab.kernels.gemm.common import DTYPES, GROUPS, gemm
from ptxlab.kernels.gemm.strips_tiles import ROOM, SMS, block_bytes
from ptxlab.kernels.quantize.rmsnorm import normalized
from ptxlab.quant import TwoLevelWeight
from ptxlab.reference.packed import F32
from ptxlab.spec import Arg, Arrays, KernelSpec, Launch, Sizes, sizes_rows
from ptxlab.spec.dtypes import ByVariant, as_stored, stored

PRODUCTS = ("o", "gate_up", "down", "qkv")
MOST_TOKENS, MOST_WIDTH = 8, 8192  # of the stream: `rmsnorm_quantize` adds up wider rows in another order
_ROWS, _SLICES, _TILES = 2, 8, 2 * 8 * 36 * 4  # strips of a stage; their blocks of 128 channels; bytes of sums
_PIECE = 512  # channels of a row that a warp looks at
_MOST_STAGES = 12
_FLOAT = ByVariant("IN", DTYPES[:2])


def _shared_bytes(s: Sizes, stages: int) -> int:
    """X of the widest product, the ring, two tiles of sums, and what is said of the pieces of rows."""
    widest = int(max(s["A"], s["H"], s["F"]))
    ring = stages * _ROWS * _SLICES * block_bytes(s["g"])
    return int(widest * s["M"] + ring + _TILES + 12 * s["M"] * -(-widest // _PIECE))


def _choose(s: Sizes) -> dict[str, int]:
    room = (ROOM - _shared_bytes(s, 0)) // (_ROWS * _SLICES * block_bytes(s["g"]))
    return {
        "IN": 0,
        "PRODUCTS": len(PRODUCTS) if s["Q"] else len(PRODUCTS) - 1,
        "STAGES": max(2, min(_MOST_STAGES, room)),
        "GROUP": s["g"],
    }


def _launch(s: Sizes) -> Launch:
    """A block on every SM, or per strip of the highest product: all of them have to be there at once."""
    blocks = min(SMS, max(s["H"], 2 * s["F"], s["Q"]) // 16)
    return Launch((blocks, 1, 1), (32 * (_ROWS * _SLICES + 2), 1, 1), _shared_bytes(s, s["STAGES"]))


def _weight(name: str, N: str, K: str) -> tuple[Arg, Arg]:
    strips = Arg(name, "uint8", (f"{N}//16", f"{K}//128", "1024 + 128//g*32"))
    return strips, Arg(f"{name}_scale", "float32", (N,))


def _example(rng: np.random.Generator, *, M: int, H: int, A: int, F: int, Q: int, g: int, eps: float) -> Arrays:
    """Weights of a decoder's size: a stream that neither vanishes nor grows."""
    shapes = {"o": (H, A), "gate_up": (2 * F, H), "down": (H, F), "qkv": (Q, H)}
    weights = {
        name: quant.quantize_lqq(rng.standard_normal((N, K), np.float32) / np.float32(np.sqrt(K)), group=g)
        for name, (N, K) in shapes.items()
        if N
    }
    norms = {name: rng.uniform(0.5, 2, H if Q or name == "gamma" else 0) for name in ("gamma", "gamma_next")}
    return {
        "attended": rng.standard_normal((M, A), np.float32),
        "stream": rng.standard_normal((M, H), np.float32),
        **{name: norm.astype(np.float32) for name, norm in norms.items()},
        **weights,
        "qkv_bias": rng.standard_normal(Q, np.float32),
        "eps": eps,
    }


def _pack(logical: Arrays) -> Arrays:
    packed = {name: logical[name] for name in ("attended", "stream", "gamma", "gamma_next", "qkv_bias")}
    for name in PRODUCTS:
        weight = logical.get(name)
        if weight is None:
            packed |= {name: packed["gate_up"][:0], f"{name}_scale": packed["gate_up_scale"][:0]}
        else:
            buffers = layout.pack(weight, "strips").buffers
            packed |= {name: buffers["strips"], f"{name}_scale": buffers["channel_scale"]}
    return {**packed, "arrived": np.zeros(len(PRODUCTS), np.uint32)}


def _product(y: F32, weight: TwoLevelWeight, dtype: str, bias: Any = None) -> F32:
    """y f32 [M, K] quantised by token, times the weight, as dtype stores it."""
    x = quant.quantize_activations(y)
    return as_stored(gemm(weight, x.q, x.scale, bias, OUT=DTYPES.index("float32")), dtype)


def chained(
    attended: F32,
    stream: F32,
    gamma: F32,
    gamma_next: F32,
    o: TwoLevelWeight,
    gate_up: TwoLevelWeight,
    down: TwoLevelWeight,
    qkv_bias: F32,
    eps: float,
    qkv: TwoLevelWeight | None = None,
    IN: int = 0,
) -> tuple[np.ndarray, ...]:
    """The reference of f32 as IN stores them: the stream, gate and up, the next queries, keys and values, and zeros."""
    dtype = DTYPES[IN]
    v = as_stored(stream, dtype)
    v = as_stored(v + _product(as_stored(attended, dtype), o, dtype), dtype)
    between = _product(normalized(v, as_stored(gamma, dtype), eps), gate_up, dtype)
    v = as_stored(v + _product(reference.gated(between).astype(np.float32), down, dtype), dtype)
    y = np.empty((len(v), 0), np.float32)
    if qkv is not None:
        y = _product(normalized(v, as_stored(gamma_next, dtype), eps), qkv, dtype, qkv_bias)
    return *(stored(each, dtype) for each in (v, between, y)), np.zeros(len(PRODUCTS), np.uint32)


CHAIN = KernelSpec(
    name="gemm_w4a8_chain_sm90",
    summary="few tokens: O, gate and up, down and the next QKV in one launch; weights never wait (QServe Fig. 11)",
    args=(
        Arg("attended", _FLOAT, ("M", "A")),
        Arg("stream", _FLOAT, ("M", "H"), "inout"),
        Arg("gamma", _FLOAT, ("H",)),
        Arg("gamma_next", _FLOAT, ("min(Q, 1)*H",)),
        *_weight("o", "H", "A"),
        *_weight("gate_up", "2*F", "H"),
        *_weight("down", "H", "F"),
        *_weight("qkv", "Q", "H"),
        Arg("qkv_bias", "float32", ("Q",), optional=True),
        Arg("between", _FLOAT, ("M", "2*F"), "out"),
        Arg("y", _FLOAT, ("M", "Q"), "out"),
        Arg("arrived", "uint32", (str(len(PRODUCTS)),), "inout"),
        *(Arg(size, "int32", role="scalar") for size in ("M", "H", "A", "F", "Q")),
        Arg("eps", "float32", role="scalar"),
    ),
    launch=_launch,
    choose=_choose,
    rules=(
        f"g in {GROUPS}",
        f"1 <= M <= {MOST_TOKENS}",
        f"H % 128 == 0 and 1 <= H <= {MOST_WIDTH}",
        "A % 128 == 0 and 1 <= A <= 32768",
        "F % 128 == 0 and 1 <= F <= 32768",
        "Q % 16 == 0 and 0 <= Q",
        f"max(A, H, F)*M*{_PIECE + 12}//{_PIECE} + 2*16*(1024 + 128//g*32) <= {ROOM - _TILES - 96}",
        "1e-30 <= eps <= 1",
    ),
    operations="2*M*(H*A + 3*F*H + Q*H)",
    example=_example,
    pack=_pack,
    reference=chained,
    arch="sm_90a",
    exact_arch=True,
    tolerance=2.0**-8,
    tolerance_reason="ex2 and rcp of the gate are approximate (silu_mul_quantize): where an integer of down's input "
    "changes by a step, so do the results behind it. The launches one by one have the same bits",
    example_sizes=sizes_rows(
        "M H A F Q g eps",
        (1, 128, 128, 256, 64, 128, 1e-5),
        (3, 256, 128, 1152, 0, 64, 1e-5),
    ),
    after_wait=("attended", "stream"),
)
SPECS = (CHAIN,)
