"""`reorder_quantize`, also with RMSNorm or the gate of an FFN before it: channels in Atom's order, INT4 in groups and
INT8 outliers (Atom §4), or in COMET's, blocks in INT4 and then in INT8 (COMET §3). `outliers` counts the INT8 channels.
"""

from collections.abc import Mapping
from typing import Any

import numpy as np

from ptxlab.arithmetic import ceil_div
from ptxlab.errors import ArgumentError
from ptxlab.hardware.words import F32
from ptxlab.lowbit import layout, quant
from ptxlab.lowbit.kernels.quantize.gated import compute_gate
from ptxlab.lowbit.kernels.quantize.rmsnorm import normalize_rows
from ptxlab.lowbit.kernels.quantize.specs import DTYPES, draw_activations, one_block_form, row_geometry
from ptxlab.lowbit.quant.atom import ATOM_CODE, ATOM_GROUPS, ATOM_OUTLIERS, ATOM_PAPER
from ptxlab.lowbit.quant.groups import group_scales
from ptxlab.spec import Arg, Arrays, KernelSpec, Launch, Sizes, sizes_rows
from ptxlab.spec.dtypes import ByVariant, convert_to_dtype, round_to_dtype

RULES = (ATOM_PAPER, ATOM_CODE)  # by `code`; then COMET's
COMET = len(RULES)
BY_PAIRS = ("bytes", "pairs", "joined")  # orders of the activations
ORDERS = BY_PAIRS[:2]  # Atom's; COMET's are the last two
JOINED = BY_PAIRS.index("joined")

_PLACE = Arg("place", "int16", ("K + outliers",))
_WRITTEN = (  # what gemm_w4a4 and gemm_w4ax take
    Arg(
        "x_q",
        ByVariant("PACKED", ("int8", "uint8", "uint8"), by_sizes=True),
        ("M", "K - min(pairs, 1)*K//2 + (pairs != 1)*outliers"),
        "out",
    ),
    Arg("x8", "int8", ("M", "(pairs == 1)*outliers"), "out"),
    Arg("x_scale", "float16", ("M", "ceil_div((K + (code == 2)*outliers)//g + (code < 2), 8)*8"), "out"),
    Arg("K", "int32", role="scalar"),
    Arg("outliers", "int32", role="scalar"),
)
_CLIP = Arg("clip", "float32", role="scalar")
_RULES = (
    f"g in {ATOM_GROUPS}",
    "K % g == 0",
    "code in (0, 1, 2)",
    "pairs in (0, 1) if code < 2 else pairs in (1, 2)",
    f"outliers in {ATOM_OUTLIERS} if code < 2 else outliers % 128 == 0 <= outliers",
    "1 <= K if code < 2 else 0 <= K and 1 <= K + outliers",
    "g == 128 and clip == 1 or code < 2",
    "ceil_div(K, 128)*128 + ceil_div(outliers, 128)*128 <= 32768",
    "M < 2**28",
    "0.001 <= clip <= 1",
)
_FLOAT = ByVariant("IN", DTYPES[:2])
_SIZES = "M K outliers g pairs code clip"
_MOST_OF_A_BLOCK = 11776  # channels: 736 threads, 66 bytes of shared memory for each of their 16


def _blocks(sizes: Sizes) -> int:
    """Count the blocks of 128 channels of a row, of INT4 and of INT8."""
    return ceil_div(int(sizes["K"]), 128) + ceil_div(int(sizes["outliers"]), 128)


def _choose(sizes: Sizes) -> dict[str, int]:
    rules = {"IN": 0, "GROUP": int(sizes["g"]), "PACKED": int(sizes["pairs"]), "CODE": int(sizes["code"])}
    return rules | row_geometry(128 * _blocks(sizes))


def _launch(sizes: Sizes) -> Launch:
    """Return the launch of a block, or a cluster of them, per token."""
    blocks = sizes["CLUSTER"]
    return Launch((sizes["M"] * blocks, 1, 1), (sizes["THREADS"], 1, 1), cluster=(blocks, 1, 1))


def check_place(name: str, arrays: Mapping[str, Any]) -> None:
    """Raise ArgumentError for a `place` that is no permutation; the kernels would leave channels undefined."""
    place = arrays["place"]
    if not np.array_equal(np.sort(place, axis=None), np.arange(place.size)):
        times_seen = np.bincount(np.clip(place, -1, place.size) + 1, minlength=place.size + 2)[1:-1]
        missing_place = int(np.argmin(times_seen))
        raise ArgumentError(f"{name}: place", f"must be a permutation of 0..{place.size - 1}", f"no {missing_place}")


def _example(rng: np.random.Generator, *, M: int, K: int, outliers: int, **options: Any) -> Arrays:
    """Draw channels in any order, of which the outliers are large, and a token of zeros."""
    order = rng.permutation(K + outliers)
    x = draw_activations(rng, M, K + outliers)
    x[:, order[K:]] *= 30
    return {"x": x, "place": quant.channel_places(order), "outliers": outliers, **options}


def ordered_rows(
    y: np.ndarray, place: np.ndarray, outliers: int, g: int, code: int, clip: float
) -> quant.AtomRows | quant.BlockRows:
    """Quantise y f32 [M, K + outliers], channel k moved to place[k]."""
    ordered_values = y[:, np.argsort(place)]
    if code == COMET:
        return quant.quantize_blocks(ordered_values, outliers // g)
    return quant.quantize_atom_activations(ordered_values, g, outliers, clip=clip, rules=RULES[code])


def _kernel_outputs(rows: quant.AtomRows | quant.BlockRows, pairs: int) -> tuple[np.ndarray, ...]:
    """Return x_q, x8 and x_scale as the kernels write them."""
    packed: Any
    if isinstance(rows, quant.BlockRows):
        packed = layout.pack_block_activations(rows, BY_PAIRS[pairs])
    else:
        packed = layout.pack_atom_activations(rows, BY_PAIRS[pairs])
    return packed.x, np.empty((packed.M, 0), np.int8) if packed.x8 is None else packed.x8, packed.scale


def reorder_reference(
    x: np.ndarray, place: np.ndarray, outliers: int, g: int, pairs: int, code: int, clip: float, IN: int = 0, **_: int
) -> tuple[np.ndarray, ...]:
    """Compute the reference: `quant`'s integers of x f32 [M, K + outliers] as IN stores it, in order."""
    return _kernel_outputs(ordered_rows(round_to_dtype(x, DTYPES[IN]), place, outliers, g, code, clip), pairs)


def _normed_example(rng: np.random.Generator, *, added: int, kept: int, eps: float, **sizes: Any) -> Arrays:
    arrays = _example(rng, **sizes)
    x = arrays["x"]
    return {
        **arrays,
        "residual": draw_activations(rng, *x.shape)[: added * len(x)],
        "gamma": rng.uniform(0.5, 2, x.shape[1]).astype(np.float32),
        "kept": kept,
        "eps": eps,
    }


def rmsnorm_reorder_reference(
    x: F32, residual: F32, gamma: F32, kept: int, eps: float, IN: int = 0, **reorder_options: Any
) -> tuple[np.ndarray, ...]:
    """Compute the reference of f32 [M, K + outliers] as IN stores them.

    Returns residual and y as IN stores them, or nothing, then x_q, x8 and x_scale of y.
    """
    dtype = DTYPES[IN]
    v = round_to_dtype(x, dtype)
    if len(residual):
        v = residual = round_to_dtype(v + round_to_dtype(residual, dtype), dtype)
    y = normalize_rows(v, round_to_dtype(gamma, dtype), eps)
    return (
        convert_to_dtype(residual, dtype),
        convert_to_dtype(y[: kept * len(y)], dtype),
        *reorder_reference(y, **reorder_options, IN=2),
    )


def _gated_example(rng: np.random.Generator, *, activation: int, **sizes: Any) -> Arrays:
    arrays = _example(rng, **sizes)
    up = arrays.pop("x")
    gate = rng.standard_normal(up.shape, dtype=np.float32)
    return {"gate_up": np.concatenate([gate, up], axis=1), "activation": activation, **arrays}


def gate_reorder_reference(gate_up: np.ndarray, activation: int, IN: int = 0, **reorder_options: Any) -> Any:
    """Compute the reference of h in f64, rounded to f32."""
    return reorder_reference(compute_gate(gate_up, activation, IN)[0].astype(np.float32), **reorder_options, IN=2)


def gate_error(
    gate_up: np.ndarray,
    activation: int,
    place: np.ndarray,
    outliers: int,
    g: int,
    pairs: int,
    code: int,
    clip: float,
    IN: int = 0,
    **_: int,
) -> tuple[np.ndarray, ...]:
    """Bound the error of the results.

    Scales may be off by what their FP16 rounding makes of the error of the group's largest |h|. Integers may be off by
    what the ends of h and of the scale make of them. A byte of two INT4, or one without a sign, may be off by anything,
    if it may be off at all.
    """
    gated, relative = compute_gate(gate_up, activation, IN)
    order = np.argsort(place)
    size, error = np.abs(gated)[:, order], (np.abs(gated) * (relative + 2.0**-22))[:, order]
    M, K = len(gated), gated.shape[1] - outliers
    rules = ATOM_CODE if code == COMET else RULES[code]
    integers, scales = [], []
    for part, bits, group in ((slice(0, K), 4, g), (slice(K, None), 8, g if code == COMET else outliers)):
        if not size[:, part].size:
            scales.append(np.zeros((M, int(code != COMET))))  # 1
            integers.append(np.zeros((M, 0)))
            continue
        steps, clip_factor = rules.steps(bits), clip if bits == 4 else 1.0
        low, high = ((size + sign * error)[:, part].reshape(M, -1, group) for sign in (-1, 1))
        largest = [end.max(axis=2) for end in (low, high)]
        min_scales, max_scales = (
            group_scales(end.astype(np.float32), steps, clip_factor).astype(np.float64) for end in largest
        )
        scales.append(max_scales - min_scales)
        if rules.reciprocal and code != COMET:  # multiplied by the reciprocal of what FP16 has not rounded yet
            min_scales, max_scales = (np.maximum(end * clip_factor / steps, 2.0**-24) for end in largest)
        downward, upward = (1 - 2.0**-20), (1 + 2.0**-20)
        quotient_ends = (low * downward / max_scales[..., None], high * upward / min_scales[..., None])
        between = np.floor(quotient_ends[1] + 0.5) - np.ceil(quotient_ends[0] - 0.5)
        integers.append(between.reshape(M, -1))
    scale = np.concatenate(scales, axis=1)
    scale = np.pad(scale, [(0, 0), (0, -scale.shape[1] % 8)])
    if pairs:
        near_integers = np.where(integers[0].reshape(M, -1, 2).any(axis=2), 255.0, 0.0)
        if pairs == JOINED:  # bytes without a sign: from -1 to 0 is 255
            return (
                np.concatenate([near_integers, np.where(integers[1] > 0, 255.0, 0.0)], axis=1),
                np.zeros((M, 0)),
                scale,
            )
        return near_integers, integers[1], scale
    return np.concatenate(integers, axis=1), np.zeros((M, 0)), scale


def _spec(name: str, summary: str, inputs: tuple[Arg, ...], scalars: tuple[Arg, ...] = (), **fields: Any) -> KernelSpec:
    return KernelSpec(
        name=name,
        summary=summary,
        args=(*inputs, *_WRITTEN, *scalars, _CLIP),
        launch=_launch,
        choose=fields.pop("choose", _choose),
        rules=(*_RULES, *fields.pop("rules", ())),
        agree=check_place,
        arch="sm_90",
        tolerance_reason=fields.pop(
            "tolerance_reason", "every operation is IEEE's, so scales are compared for equality"
        ),
        **fields,
    )


REORDER = _spec(
    "reorder_quantize",
    "channels in Atom's order, INT4 with a scale per group and INT8 outliers, in one pass over a row (Atom §4.1)",
    (Arg("x", ByVariant("IN", DTYPES), ("M", "K + outliers")), _PLACE),
    example=_example,
    pack=lambda logical: {name: logical[name] for name in ("x", "place")},
    reference=reorder_reference,
    example_sizes=sizes_rows(  # all orders, all rules; a warp, a block, clusters of 2 and 4; half a block at the end
        _SIZES,
        (1, 64, 0, 64, 0, 0, 1.0),
        (3, 192, 64, 64, 1, 1, 0.9),
        (3, 448, 64, 64, 0, 1, 1.0),
        (2, 8192, 128, 128, 0, 0, 0.9),
        (2, 16512, 128, 128, 1, 0, 0.85),
        (3, 384, 256, 128, 2, 2, 1.0),
        (2, 256, 0, 128, 1, 2, 1.0),
        (2, 6400, 2048, 128, 2, 2, 1.0),
    ),
    after_wait=("x",),
    batch_sizes=dict(zip(_SIZES.split(), (64, 8192, 128, 128, 0, 0, 0.9), strict=True)),
)
RMSNORM_REORDER = _spec(
    "rmsnorm_reorder_quantize",
    "residual add, RMSNorm and reorder_quantize in one pass over a row (Atom §4.3)",
    (
        Arg("x", _FLOAT, ("M", "K + outliers")),
        Arg("residual", _FLOAT, ("added*M", "K + outliers"), "inout"),
        Arg("gamma", _FLOAT, ("K + outliers",)),
        _PLACE,
        Arg("normed", _FLOAT, ("kept*M", "K + outliers"), "out"),
    ),
    (Arg("eps", "float32", role="scalar"),),
    choose=lambda s: _choose(s) | {"RESIDUAL": int(s["added"]), "NORMED": int(s["kept"])},
    rules=("added in (0, 1)", "kept in (0, 1)", "1e-30 <= eps <= 1"),
    example=_normed_example,
    pack=lambda logical: {name: logical[name] for name in ("x", "residual", "gamma", "place")},
    reference=rmsnorm_reorder_reference,
    example_sizes=sizes_rows(
        f"{_SIZES} added kept eps",
        (1, 64, 0, 64, 0, 0, 1.0, 0, 0, 1e-5),
        (3, 192, 64, 64, 1, 1, 0.9, 1, 1, 1e-5),
        (2, 3968, 128, 128, 0, 0, 0.9, 1, 0, 1e-5),
        (2, 8192, 128, 128, 1, 0, 0.9, 1, 1, 1e-5),
        (2, 768, 256, 128, 2, 2, 1.0, 1, 1, 1e-5),
    ),
    after_wait=("x", "residual"),
    batch_sizes=dict(zip(f"{_SIZES} added kept eps".split(), (64, 8192, 128, 128, 0, 0, 0.9, 1, 1, 1e-5), strict=True)),
)
SILU_MUL_REORDER = _spec(
    "silu_mul_reorder_quantize",
    "SiLU or GELU of the gate times up, and reorder_quantize in one pass (Atom §4.3)",
    (Arg("gate_up", _FLOAT, ("M", "2*(K + outliers)")), _PLACE),
    choose=lambda s: _choose(s) | {"ACTIVATION": int(s["activation"])},
    rules=("activation in (0, 1)",),
    example=_gated_example,
    pack=lambda logical: {name: logical[name] for name in ("gate_up", "place")},
    reference=gate_reorder_reference,
    bound=gate_error,
    tolerance_reason="exp and reciprocal are approximate (silu_mul_quantize): an integer may change by a step, and a "
    "scale by FP16's last bit, where the exact value is as near to a tie",
    example_sizes=sizes_rows(
        f"{_SIZES} activation",
        (1, 64, 0, 64, 0, 0, 1.0, 0),
        (3, 192, 64, 64, 1, 1, 0.9, 1),
        (2, 10880, 128, 128, 0, 0, 0.9, 0),
        (2, 768, 256, 128, 2, 2, 1.0, 0),
        (2, 0, 128, 128, 1, 2, 1.0, 1),
    ),
    after_wait=("gate_up",),
    batch_sizes=dict(zip(f"{_SIZES} activation".split(), (64, 8192, 128, 128, 0, 0, 0.9, 0), strict=True)),
)
SPECS = (REORDER, RMSNORM_REORDER, SILU_MUL_REORDER)


def _in_one_block(spec: KernelSpec) -> KernelSpec:
    """Build the form in which each row is one block's: without clusters, up to 48 KiB of the block's shared memory."""
    return one_block_form(
        spec,
        lambda sizes: {"THREADS": ceil_div(_blocks(sizes) * 8, 32) * 32, "CLUSTER": 1},
        rules=(*spec.rules, f"ceil_div(K, 128)*128 + ceil_div(outliers, 128)*128 <= {_MOST_OF_A_BLOCK}"),
        example_sizes=tuple(
            example_sizes for example_sizes in spec.example_sizes if _blocks(example_sizes) * 128 <= _MOST_OF_A_BLOCK
        ),
    )


REORDER_BLOCK, RMSNORM_REORDER_BLOCK, SILU_MUL_REORDER_BLOCK = FORMS = tuple(map(_in_one_block, SPECS))
