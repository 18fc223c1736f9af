"""QServe's own steps to KV4 attention on CUDA cores: head dim 128, pages of 64 tokens, one new token (QServe §5.3)."""

from dataclasses import replace
from functools import partial

import numpy as np

from ptxlab.lowbit.kernels.attention import common
from ptxlab.lowbit.kernels.attention.bound import BY_CHANCE
from ptxlab.lowbit.kernels.attention.roundings import HALF, SINGLE, Roundings
from ptxlab.lowbit.layout import KVCache
from ptxlab.spec import Arg, Arrays, KernelSpec, Launch, Sizes, sizes_rows
from ptxlab.spec.tolerance import Allowed

THREADS, PAGE, DIM = 256, 64, 128
_ROOM = 162688  # bytes of shared memory on an A100, without what every step uses of it

_EXACT = "in float64 on the dequantised integers; "
_SINGLE = (
    "an FP32 score has at most 40 roundings (the query's scale, 32 products, 5 levels of sums, the key's scale); a "
    "weight is 2^x within 2^-22, of an x below 100 rounded once; the sums have those of their tokens per thread"
)
_HALF = (
    "four products in a row are summed up in FP16 (4 roundings), and a value's weight is rounded to FP16 as well; all "
    "others are as in FP32"
)


def _roundings(bits: int, half: bool) -> Roundings:
    single_roundings = Roundings(score=40 * SINGLE, query=0, weight=104 * SINGLE, sum=4 * SINGLE, serial=256 // bits)
    if not half:
        return single_roundings
    return replace(
        single_roundings, score=single_roundings.score + 4 * HALF, query=2.0**-25, sum=5 * HALF, floor=2.0**-34
    )


def _example(
    rng: np.random.Generator, *, B: int, Hq: int, Hkv: int, P: int, pages: int, softmax_scale: float, scheme: str
) -> Arrays:
    lengths = common.draw_lengths(rng, B, P * PAGE, pages, PAGE)
    return {
        "q": rng.standard_normal((B, Hq, DIM)).astype(np.float16),
        "cache": common.draw_cache(rng, lengths, Hkv=Hkv, P=P, pages=pages, scheme=scheme),
        "softmax_scale": softmax_scale,
    }


def _pack(logical: Arrays) -> Arrays:
    return {"q": logical["q"], **common.cache_arrays(logical["cache"])}


def _reference(q: np.ndarray, cache: KVCache, softmax_scale: float) -> np.ndarray:
    return common.attention(q[:, None], cache, softmax_scale)[0][:, 0]


def _bound(q: np.ndarray, cache: KVCache, softmax_scale: float, *, roundings: Roundings) -> Allowed:
    out, _ = common.bound_error(q[:, None], cache, softmax_scale, roundings)
    return Allowed(out.per_element[:, 0], out.rms[:, 0])


def _spec(name: str, summary: str, *, bits: int = 4, page_shared: int = 256, half: bool = False) -> KernelSpec:
    """Build the spec of a step that takes `page_shared` bytes of shared memory for every page of a sequence."""

    def launch(s: Sizes) -> Launch:
        return Launch((s["Hq"], s["B"], 1), (THREADS, 1, 1), s["P"] * page_shared)

    return KernelSpec(
        name=name,
        summary=summary,
        args=(
            Arg("q", "float16", ("B", "Hq", "128")),
            Arg("pool", "uint8", ("pages", "2", "Hkv", str(PAGE * (DIM * bits // 8 + 4)))),
            Arg("table", "int32", ("B", "P")),
            Arg("lengths", "int32", ("B",)),
            Arg("out", "float16", ("B", "Hq", "128"), "out"),
            Arg("softmax_scale", "float32", role="scalar"),
            *(Arg(size, "int32", role="scalar") for size in ("Hq", "Hkv", "P")),
        ),
        launch=launch,
        rules=("Hq % Hkv == 0", f"P <= {_ROOM // page_shared}", "B <= 65535"),
        value_rules=("lengths >= 0", f"lengths <= P*{PAGE}"),
        operations="4*B*Hq*P*64*128",
        example=partial(_example, scheme=f"kv{bits}"),
        pack=_pack,
        reference=_reference,
        bound=partial(_bound, roundings=_roundings(bits, half)),
        tolerance_reason=_EXACT + (_HALF if half else _SINGLE) + BY_CHANCE,
        arch="sm_80",
        example_sizes=sizes_rows(
            "B Hq Hkv P pages softmax_scale", (1, 1, 1, 1, 1, 0.088), (3, 4, 2, 3, 8, 0.088), (2, 3, 3, 6, 9, 0.5)
        ),
        batch="B",
        batch_sizes={"B": 16, "Hq": 4, "Hkv": 2, "P": 3, "pages": 8, "softmax_scale": 0.088},
    )


SPECS = (
    _spec("attention_kv8", "the baseline: an 8-bit cache, a block per query head, FP32 (QServe §5.3)", bits=8),
    _spec("attention_kv4_naive", "the same on 4 bits: five operations for each element (QServe §5.3)"),
    _spec("attention_kv4_bittrick", "two operations for two elements: the magic number 1024 (QServe §5.3)"),
    _spec(
        "attention_kv4_simple",
        "no branch in the loops, the block table in shared memory (QServe §5.3)",
        page_shared=260,
    ),
    _spec("attention_kv4_fp16", "QK and SV in half2 (QServe §5.3)", page_shared=260, half=True),
    _spec(
        "attention_kv4_prefetch",
        "all scales and zeros by cp.async at the start (QServe §5.3)",
        page_shared=772,
        half=True,
    ),
)
