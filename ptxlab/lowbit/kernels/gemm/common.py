"""What the steps of the ladder share: what one is fed, outputs, arguments, examples and their reference."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, TypeVar

import numpy as np

from ptxlab.errors import ArgumentError
from ptxlab.lowbit import quant, reference
from ptxlab.spec import Arg, Arrays, KernelSpec, Sizes
from ptxlab.spec.dtypes import ByVariant
from ptxlab.spec.expressions import names_in

AnyTile = TypeVar("AnyTile")

MANY = 1 << 30  # tokens: the last row of a table of tiles
GROUPS = (32, 64, 128)
SUM_PAD = 4  # int32 or floats between rows of results in shared memory, which lie in other banks then
DTYPES = ("float16", "bfloat16", "float32", "int32")  # by OUT: what is stored; int32 are the accumulators themselves
F16, F32, INT32 = (DTYPES.index(name) for name in ("float16", "float32", "int32"))
FLOATS = DTYPES[:INT32]

# A weight with constants per group in QServe's order, as kernels on mma.sync take it.
QSERVE = (
    Arg("qweight", "uint32", ("ceil_div(N, 32)", "K/32", "128")),
    Arg("scale", "uint8", ("ceil_div(N, 32)", "K/g", "32")),
    Arg("offset", "uint8", ("ceil_div(N, 32)", "K/g", "32")),
)


def output_args(dtypes: tuple[str, ...], *sizes: str) -> tuple[Arg, ...]:
    """Return the last arguments of a GEMM: the bias, Y of a dtype by OUT, and M, N and these sizes as scalars."""
    return (
        Arg("bias", "float32", ("N",), optional=True),
        Arg("y", ByVariant("OUT", dtypes), ("M", "N"), "out"),
        *(Arg(size, "int32", role="scalar") for size in ("M", "N", *sizes)),
    )


# Behind the weight and the activations every step of W4A8 takes the same arguments.
EPILOGUE = (Arg("x_scale", "float32", ("M",)), *output_args(DTYPES, "K"))
X_SCALE, *AFTER_SCALE = EPILOGUE  # kernels that take token sums take them behind the scales


def suits_all_sizes(_: Sizes) -> bool:
    """Return True: the step suits all sizes."""
    return True


@dataclass(frozen=True)
class GemmStep:
    """A kernel of the ladder and what it takes: `gemm_w4a8` chooses and launches by these, and its errors name them.

    Attributes:
        spec: the kernel. Its inputs but `bias` and those of the tokens are buffers of the packed weight.
        scheme: of the weight it multiplies: `qoq`, `qoq_channel` or `lqq`.
        packing: the layout of that weight.
        order: of the activations: `row_major`, `fragment` or `tiles`.
        suits: M, N, K, g -> whether it is the one to take. Of those that suit the highest step is taken.
    """

    spec: KernelSpec
    scheme: str
    packing: str
    order: str = "row_major"
    suits: Callable[[Sizes], bool] = suits_all_sizes

    @cached_property
    def buffers(self) -> tuple[tuple[str, str], ...]:
        """Arguments that are buffers of the packed weight, with the buffers' names."""
        required_inputs = (arg.name for arg in self.spec.inputs if not arg.optional)
        names = (name for name in required_inputs if name not in ("x", "x_scale", "x_sum", "offsets", "y"))
        return tuple((name, {"w_scale": "channel_scale", "w_zero": "channel_zero"}.get(name, name)) for name in names)

    @cached_property
    def takes_sum(self) -> bool:
        """True if the kernel takes the token sums."""
        return any(arg.name == "x_sum" for arg in self.spec.inputs)

    @cached_property
    def needs_sum(self) -> bool:
        """True if the kernel needs the token sums."""
        return any(arg.name == "x_sum" and not arg.optional for arg in self.spec.inputs)

    def config(self, sizes: Sizes, OUT: int, sums: bool) -> dict[str, int]:
        """Return the constants of the variant for these sizes that stores dtype `OUT`, fed token sums or not."""
        config = {**self.spec.config_for(sizes), "OUT": OUT}
        return {**config, "SIGNED": int(not sums and not self.needs_sum)} if "SIGNED" in config else config

    def sizes(self, M: int, N: int, K: int, group: int, rows: int = 1, E: int = 1) -> dict[str, int]:
        """Return the sizes that the kernel knows; `rows` are the tokens of a tile of activations, E the experts."""
        all_sizes = {"M": M, "N": N, "K": K, "E": E, "g": group, "rows": rows}
        return {name: size for name, size in all_sizes.items() if name in self.spec.symbols}


def per_channel(spec: KernelSpec, *args: Arg, **fields: Any) -> KernelSpec:
    """Build the same kernel for QoQ weights per channel: no groups, and zero points that leave with the token sums.

    `args` take the place of those of their names.
    """
    arg_by_name = {arg.name: arg for arg in (*args, Arg("x_sum", "int32", ("M",)))}
    return replace(
        spec,
        args=tuple(arg_by_name.get(arg.name, arg) for arg in spec.args),
        rules=("K % 32 == 0", *(rule for rule in spec.rules if "g" not in names_in(rule))),
        value_rules=(*spec.value_rules, "w_zero <= 15"),
        example_sizes=tuple({n: size for n, size in sizes.items() if n != "g"} for sizes in spec.example_sizes),
        form="channel",
        summary=f"{spec.name} for QoQ weights per channel: zero points leave with the token sums (QServe §5.2.2)",
        **fields,
    )


def look_up_tile(table: Mapping[int, tuple[int, AnyTile, AnyTile]], sizes: Sizes) -> AnyTile:
    """Look up the tile in a table {most tokens: (rows, tile up to so many rows, tile beyond)}."""
    rows, narrow_tile, wide_tile = next(entry for tokens, entry in table.items() if sizes["M"] <= tokens)
    return narrow_tile if sizes["N"] <= rows else wide_tile


def draw_activations(rng: np.random.Generator, M: int, N: int, K: int) -> Arrays:
    """Draw random activations with the epilogue's operands."""
    return {
        "x": rng.integers(-128, 128, size=(M, K), dtype=np.int8),
        "x_scale": rng.uniform(1e-3, 1e-2, M).astype(np.float32),
        "bias": rng.standard_normal(N, dtype=np.float32),
    }


def example_qoq(rng: np.random.Generator, *, M: int, N: int, K: int, g: int) -> Arrays:
    """Draw a QoQ weight of random numbers, and random activations."""
    weight = quant.quantize_qoq(rng.standard_normal((N, K), dtype=np.float32), group=g)
    return {"weight": weight, **draw_activations(rng, M, N, K)}


def example_lqq(rng: np.random.Generator, *, M: int, N: int, K: int, g: int) -> Arrays:
    """Draw an LQQ weight of random numbers, and random activations."""
    weight = quant.quantize_lqq(rng.standard_normal((N, K), dtype=np.float32), group=g)
    return {"weight": weight, **draw_activations(rng, M, N, K)}


def example_channel(rng: np.random.Generator, *, M: int, N: int, K: int) -> Arrays:
    """Draw a per-channel QoQ weight of random numbers, and random activations."""
    weight = quant.quantize_qoq_channel(rng.standard_normal((N, K), dtype=np.float32))
    return {"weight": weight, **draw_activations(rng, M, N, K)}


def check_sums(label: str, arrays: Arrays) -> None:
    """Raise ArgumentError for the first token sum x_sum s32 [M] that is not that of x s8 [M, K], in row-major order."""
    if "x_sum" not in arrays or arrays["x"].ndim != 2:
        return
    expected_sums, x_sum = arrays["x"].sum(axis=1, dtype=np.int32), arrays["x_sum"]
    is_wrong = expected_sums != x_sum
    if is_wrong.any():
        token = int(is_wrong.argmax())
        rule = f"the sum of token {token} over K is {expected_sums[token]}"
        raise ArgumentError(f"{label}: x_sum", rule, f"x_sum[{token}] = {x_sum[token]}")


def epilogue_arrays(logical: Arrays) -> Arrays:
    """Return the arguments of `EPILOGUE` that the logical inputs give; missing scales are 1."""
    return {"x_scale": logical.get("x_scale", np.ones(len(logical["x"]), np.float32)), **bias_of(logical)}


def bias_of(logical: Arrays) -> Arrays:
    """Return the bias, if there is one."""
    return {"bias": logical["bias"]} if "bias" in logical else {}


def pack_plain(logical: Arrays) -> Arrays:
    """Pass all operands as they are; missing scales are 1."""
    ones = np.ones(len(logical["w"]), np.float32)
    return {"w": logical["w"], "w_scale": logical.get("w_scale", ones), "x": logical["x"], **epilogue_arrays(logical)}


def gemm_plain(
    w: np.ndarray,
    x: np.ndarray,
    w_scale: np.ndarray | None = None,
    x_scale: np.ndarray | None = None,
    bias: np.ndarray | None = None,
    OUT: int = INT32,
) -> np.ndarray:
    """Compute the reference without dequantisation: the accumulators, or with `OUT` the scaled output."""
    accumulators = reference.gemm_accumulators(x, w.astype(np.int32))
    return scale_accumulators(
        accumulators, x_scale, np.ones(len(w), np.float32) if w_scale is None else w_scale, bias, OUT
    )


def gemm(
    weight: quant.TwoLevelWeight,
    x: np.ndarray,
    x_scale: np.ndarray | None = None,
    bias: np.ndarray | None = None,
    OUT: int = INT32,
) -> np.ndarray:
    """Compute the reference with a two-level weight: the accumulators, or with `OUT` the scaled output."""
    accumulators = reference.gemm_accumulators(x, weight.exact_level1())
    return scale_accumulators(accumulators, x_scale, weight.channel_scale, bias, OUT)


def gemm_channel(
    weight: quant.QoQChannelWeight,
    x: np.ndarray,
    x_scale: np.ndarray | None = None,
    bias: np.ndarray | None = None,
    x_sum: np.ndarray | None = None,
    OUT: int = INT32,
) -> np.ndarray:
    """Compute the reference with a per-channel weight; the token sum is that of `x` unless another is given."""
    sums = x.sum(axis=1, dtype=np.int32) if x_sum is None else x_sum
    accumulators = reference.gemm_accumulators_channel(x, weight.q4, weight.zero, sums)
    return scale_accumulators(accumulators, x_scale, weight.scale, bias, OUT)


def scale_accumulators(
    accumulators: np.ndarray, x_scale: np.ndarray | None, w_scale: np.ndarray, bias: np.ndarray | None, OUT: int
) -> np.ndarray:
    """Return the accumulators, or with `OUT` the scaled output; missing scales of tokens are 1."""
    scale = np.ones(len(accumulators), np.float32) if x_scale is None else x_scale
    return reference.gemm_epilogue(accumulators, scale, w_scale, bias, DTYPES[OUT])


def add_bias_and_round(sums: np.ndarray, bias: np.ndarray | None, OUT: int) -> np.ndarray:
    """Add the bias to float sums [M, N] and round to the output dtype of `FLOATS`."""
    return reference.rounded_to(sums if bias is None else sums + bias, FLOATS[OUT])
