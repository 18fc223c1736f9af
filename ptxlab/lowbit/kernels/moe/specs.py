"""The specs of the family, and the order in which the kernels add."""

import numpy as np

from ptxlab.arithmetic import ceil_div
from ptxlab.errors import ArgumentError
from ptxlab.hardware.words import F32
from ptxlab.lowbit import reference
from ptxlab.lowbit.kernels.quantize.rmsnorm import sum_by_halves, sum_in_order
from ptxlab.spec import Arg, Arrays, KernelSpec, Launch, Sizes, sizes_rows
from ptxlab.spec.dtypes import ByVariant, convert_to_dtype, round_to_dtype

DTYPES = ("float16", "bfloat16")  # by IN
MOST_EXPERTS, MOST_CHOSEN, MOST_WIDTH = 64, 4, 32768
_PART = 1024  # values of a row whose products a warp adds up
_ROUTING_BLOCKS = 132  # of `choose_experts`, an SM of Hopper each: more would only load the router's weights again
_GATHERING_BLOCKS = 512  # of `gather_tokens`, which all count the choices
_FLOAT = ByVariant("IN", DTYPES)
_EXPERT_RULES = (f"1 <= E <= {MOST_EXPERTS}", f"1 <= k <= {MOST_CHOSEN}", "k <= E", "0 <= M < 2**28")


def _width_rules(width: str) -> tuple[str, ...]:
    return f"{width} % 32 == 0", f"1 <= {width} <= {MOST_WIDTH}"


def router_logits(x: F32, router: F32) -> F32:
    """Compute x routerᵀ, [M, E], of x [M, H] and router [E, H] in the kernel's order of additions: its bits.

    Both f32 that f16 or bf16 hold: products of two are exact then, but for those of bf16 below 2^-126. A lane adds 32
    products one after the other, two runs of 16 that lie 512 apart, a warp by halves, then the parts of 1024 in turn.
    """
    (M, H), (E, _) = x.shape, router.shape
    logits: F32 = np.zeros((M, E), np.float32)
    products = np.zeros((M, ceil_div(H, _PART) * _PART), np.float32)
    for e in range(E):
        products[:, :H] = x * router[e]
        lane_products = products.reshape(M, -1, 2, 32, 16).swapaxes(2, 3).reshape(M, -1, 32, 32)
        logits[:, e] = sum_in_order(sum_by_halves(sum_in_order(lane_products, axis=3)), axis=1)
    return logits


def _choose_reference(x: np.ndarray, router: np.ndarray, k: int, IN: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Compute the reference of x f32 [M, H] and router f32 [E, H] as IN stores them.

    Returns chosen s32 [M, k] and share f64 [M, k].
    """
    logits = router_logits(*(round_to_dtype(matrix, DTYPES[IN]) for matrix in (x, router)))
    chosen_experts, share = reference.top_experts(logits.astype(np.float64), k)
    return chosen_experts.astype(np.int32), share


def _choose_error(x: np.ndarray, router: np.ndarray, k: int, IN: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Bound the error: 0 for choices, for shares that of `ex2.approx` and of the rounding of its argument."""
    _, share = _choose_reference(x, router, k, IN)
    exponents = np.log2(share[:, :1] / np.maximum(share, 2.0**-126))
    relative = 2.0**-21 + 2.0**-22 * exponents
    error = share * (relative + (share * relative).sum(axis=1, keepdims=True)) + 2.0**-120
    return np.zeros(share.shape, np.int32), error


def _choose_example(rng: np.random.Generator, *, M: int, H: int, E: int, k: int) -> Arrays:
    """Draw logits of some size, and a token of zeros, whose logits are all the same."""
    x = rng.standard_normal((M, H), dtype=np.float32)
    x[M // 2] = 0
    return {"x": x, "router": 2 * rng.standard_normal((E, H), dtype=np.float32) / np.float32(H**0.5), "k": k}


def _choose_variant(sizes: Sizes) -> dict[str, int]:
    return {"IN": 0, "EXPERTS": sizes["E"], "CHOSEN": sizes["k"], "PARTS": ceil_div(sizes["H"], _PART)}


CHOOSE = KernelSpec(
    name="choose_experts",
    summary="a router's logits, the best k experts of a token, and the softmax of these (Mixtral)",
    args=(
        Arg("x", _FLOAT, ("M", "H")),
        Arg("router", _FLOAT, ("E", "H")),
        Arg("chosen", "int32", ("M", "k"), "out"),
        Arg("share", "float32", ("M", "k"), "out"),
        Arg("M", "int32", role="scalar"),
        Arg("H", "int32", role="scalar"),
    ),
    launch=lambda s: Launch((max(1, min(s["M"], _ROUTING_BLOCKS)), 1, 1), (32 * min(s["E"] * s["PARTS"], 32), 1, 1)),
    choose=_choose_variant,
    rules=(*_width_rules("H"), *_EXPERT_RULES),
    operations="2*M*E*H",
    example=_choose_example,
    pack=lambda logical: {name: logical[name] for name in ("x", "router")},
    reference=_choose_reference,
    arch="sm_80",
    bound=_choose_error,
    tolerance_reason="logits are added in the reference's order, so choices are equal; exp2 is approximate: shares "
    "have a relative error of 2^-21 and 2^-22 per unit of its argument",
    example_sizes=sizes_rows(
        "M H E k", (1, 32, 1, 1), (3, 1056, 8, 2), (2, 4096, 8, 2), (4, 96, 64, 4), (135, 64, 5, 3), (134, 32, 40, 2)
    ),
    after_wait=("x",),
)


def _gather_reference(
    x_q: np.ndarray, scale: np.ndarray, token_sum: np.ndarray, chosen: np.ndarray, E: int
) -> tuple[np.ndarray, ...]:
    """Compute the reference: offsets, place, and the rows."""
    offsets, place = reference.rows_by_expert(chosen, E)
    token = place.reshape(-1).argsort() // chosen.shape[1]  # of each row
    return offsets, place, x_q[token], scale[token], token_sum[token]


def _gather_example(rng: np.random.Generator, *, M: int, K: int, E: int, k: int) -> Arrays:
    experts = rng.permuted(np.tile(np.arange(E, dtype=np.int32), (M, 1)), axis=1)
    return {
        "x_q": rng.integers(-127, 128, (M, K), np.int8),
        "scale": rng.standard_normal(M, dtype=np.float32),
        "token_sum": rng.integers(-(2**20), 2**20, M, np.int32),
        "chosen": np.ascontiguousarray(experts[:, :k]),
        "E": E,
    }


def _gather_variant(sizes: Sizes) -> dict[str, int]:
    """Choose a vector of 16 bytes per thread, up to 512 threads, and a warp per expert, up to eight."""
    vectors = sizes["K"] // 16
    threads = 32 * max(ceil_div(min(vectors, 512), 32), min(sizes["E"], 8))
    variant = {"EXPERTS": sizes["E"], "CHOSEN": sizes["k"]}
    return {**variant, "THREADS": threads, "VECTORS": ceil_div(vectors, threads)}


def _all_different(name: str, arrays: Arrays) -> None:
    sorted_experts = np.sort(arrays["chosen"], axis=1)
    if (is_repeated := (sorted_experts[:, 1:] == sorted_experts[:, :-1]).any(axis=1)).any():
        raise ArgumentError(
            f"{name}: chosen", "a token's experts must be different", f"token {int(is_repeated.argmax())}"
        )


GATHER = KernelSpec(
    name="gather_tokens",
    summary="INT8 tokens copied to a row for each of their experts, in the order of experts, then of tokens",
    args=(
        Arg("x_q", "int8", ("M", "K")),
        Arg("scale", "float32", ("M",)),
        Arg("token_sum", "int32", ("M",)),
        Arg("chosen", "int32", ("M", "k")),
        Arg("offsets", "int32", ("E + 1",), "out"),
        Arg("place", "int32", ("M", "k"), "out"),
        Arg("row_x_q", "int8", ("M*k", "K"), "out"),
        Arg("row_scale", "float32", ("M*k",), "out"),
        Arg("row_sum", "int32", ("M*k",), "out"),
        Arg("M", "int32", role="scalar"),
        Arg("K", "int32", role="scalar"),
    ),
    launch=lambda sizes: Launch((max(1, min(sizes["M"], _GATHERING_BLOCKS)), 1, 1), (sizes["THREADS"], 1, 1)),
    choose=_gather_variant,
    rules=(*_width_rules("K"), *_EXPERT_RULES),
    value_rules=("chosen >= 0", "chosen < E"),
    example=_gather_example,
    pack=lambda logical: {name: logical[name] for name in ("x_q", "scale", "token_sum", "chosen")},
    reference=_gather_reference,
    arch="sm_80",
    example_sizes=sizes_rows(
        "M K E k", (1, 32, 1, 1), (3, 1056, 8, 2), (70, 64, 64, 4), (2, 16416, 3, 2), (513, 32, 5, 3)
    ),
    agree=_all_different,
    after_wait=("x_q", "scale", "token_sum", "chosen"),
    batch="",
)


def _combine_reference(results: np.ndarray, place: np.ndarray, share: np.ndarray, IN: int = 0) -> np.ndarray:
    """Compute the reference of results f32 [rows, H] as IN stores them: hidden as IN stores it."""
    return convert_to_dtype(
        reference.combine_expert_rows(round_to_dtype(results, DTYPES[IN]), place, share), DTYPES[IN]
    )


def _combine_example(rng: np.random.Generator, *, M: int, H: int, k: int, rows: int) -> Arrays:
    share = rng.random((M, k), dtype=np.float32) + np.float32(0.01)
    return {
        "results": rng.standard_normal((rows, H), dtype=np.float32),
        "place": rng.integers(0, rows, (M, k), np.int32),
        "share": share / share.sum(axis=1, keepdims=True),
    }


COMBINE = KernelSpec(
    name="combine_experts",
    summary="what a token's experts gave, each by its share, added up",
    args=(
        Arg("results", _FLOAT, ("rows", "H")),
        Arg("place", "int32", ("M", "k")),
        Arg("share", "float32", ("M", "k")),
        Arg("hidden", _FLOAT, ("M", "H"), "out"),
        Arg("M", "int32", role="scalar"),
        Arg("H", "int32", role="scalar"),
    ),
    launch=lambda s: Launch((s["M"], ceil_div(s["H"], 8 * s["THREADS"]), 1), (s["THREADS"], 1, 1)),
    choose=lambda sizes: {"IN": 0, "CHOSEN": sizes["k"], "THREADS": 128},
    rules=(*_width_rules("H"), f"1 <= k <= {MOST_CHOSEN}", "rows >= 0", "0 <= M < 2**28"),
    value_rules=("place >= 0", "place < rows"),
    operations="2*M*k*H",
    example=_combine_example,
    pack=dict,
    reference=_combine_reference,
    arch="sm_80",
    tolerance_reason="every operation is IEEE's, and the reference adds in the kernel's order",
    example_sizes=sizes_rows("M H k rows", (1, 32, 1, 1), (5, 1056, 2, 10), (2, 4096, 4, 8), (3, 96, 3, 9)),
    after_wait=("results", "place", "share"),
)
