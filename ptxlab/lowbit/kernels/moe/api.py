"""`route_tokens` and `combine_experts`: what lies around the grouped GEMMs of a mixture of experts."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Self

from ptxlab.errors import ArgumentError
from ptxlab.io.dynamo import break_graph
from ptxlab.lowbit.kernels.moe.specs import CHOOSE, COMBINE, DTYPES, GATHER
from ptxlab.lowbit.kernels.operation import CallArray, Operation, dtype_of
from ptxlab.lowbit.kernels.options import LaunchOptions, Rule, document_options, early_launch, option
from ptxlab.lowbit.kernels.spec_call import SpecCall
from ptxlab.lowbit.layout import PackedActivations
from ptxlab.validate import is_integer, shape_of

ROUTE, COMBINED = "route_tokens", "combine_experts"
_RESULTS = ("chosen", "share", "offsets", "place", "row_x_q", "row_scale", "row_sum")
_PARTS = ("x_q", "scale", "token_sum")


@dataclass(frozen=True, eq=False, kw_only=True)
class RoutedTokens:
    """A row for each expert of each token: rows are in the order of experts, then of tokens.

    Attributes:
        rows: activations of M·k rows, row-major, as `gemm_w4a8_grouped` takes them.
        offsets: s32 [E + 1], where each expert's rows begin.
        place: s32 [M, k], the row of token m for its c-th expert.
        share: f32 [M, k], how much of a token's result each expert gives; of a token they add up to 1.
        chosen: s32 [M, k], the experts, the one with the largest share first.

    Raises ArgumentError for shapes that do not fit together.
    """

    rows: PackedActivations
    offsets: Any = field(repr=False)
    place: Any = field(repr=False)
    share: Any = field(repr=False)
    chosen: Any = field(repr=False)

    def __post_init__(self) -> None:
        _check_row_major("RoutedTokens: rows", self.rows)
        shape = shape_of(self.place)
        if len(shape) != 2 or shape[0] * shape[1] != self.rows.M:
            raise ArgumentError("RoutedTokens: place", f"must be [M, k] for {self.rows.M} rows", f"shape {list(shape)}")
        for name in ("share", "chosen"):
            if shape_of(getattr(self, name)) != shape:
                got = f"shape {list(shape_of(getattr(self, name)))}"
                raise ArgumentError(f"RoutedTokens: {name}", f"must be {list(shape)} as place is", got)

    @property
    def arrays(self) -> dict[str, Any]:
        """Arrays by the kernels' names."""
        rows = dict(zip(_RESULTS[4:], (getattr(self.rows, part) for part in _PARTS), strict=True))
        return {**{name: getattr(self, name) for name in _RESULTS[:4]}, **rows}

    @classmethod
    def of(cls, arrays: Mapping[str, Any]) -> Self:
        """Build RoutedTokens of arrays by the kernels' names."""
        x_q, scale, token_sum = (arrays[name] for name in _RESULTS[4:])
        M, K = shape_of(x_q)
        rows = PackedActivations(layout="row_major", M=M, K=K, x_q=x_q, scale=scale, token_sum=token_sum)
        return cls(rows=rows, **{name: arrays[name] for name in _RESULTS[:4]})


@dataclass(frozen=True, kw_only=True, eq=False)
class RouteOptions(LaunchOptions):
    """Options of `route_tokens`."""

    k: int = option("experts of a token, 1 to 4.", Rule("must be an integer", is_integer))
    programmatic: bool = early_launch(", for which both launches wait by themselves.")


@break_graph
@document_options(RouteOptions)
def route_tokens(
    tokens: PackedActivations,
    normed: Any,
    router: Any,
    k: int,
    *,
    out: RoutedTokens | None = None,
    backend: str | None = None,
    programmatic: bool = False,
) -> RoutedTokens:
    """Choose the k experts of every token, and copy its INT8 activations to their rows, in two launches.

    Logits are normed routerᵀ in float32. A token takes the experts of the k largest, of equal ones the lower. Shares
    are the softmax over all experts, divided by its sum over the chosen ones (Mixtral). A token has the same choice and
    shares in any batch. Nothing looks at the numbers: a logit that is no number comes last, and a token with one among
    its choices, or an infinite one, has shares that are none.

    Args:
        tokens: row-major activations [M, H], H a multiple of 32 up to 32768; NumPy, CuPy, PyTorch or JAX.
        normed: the same before they were quantised (`rmsnorm_quantize`), f16 or bf16 [M, H] (bf16 also as its bits).
        router: [E, H], E at most 64, of the dtype of `normed`. No kernel that may still run writes it: it is read ahead
            of the wait.
        out: to write into; needed while a CUDA graph is captured.
        {options}

    Raises:
        ArgumentError: the argument, the rule and the value; nothing was launched.
        UnavailableError: no GPU backend here, or one below sm_90.
    """
    options = RouteOptions.of(backend, programmatic, k)
    _check_row_major(f"{ROUTE}: tokens", tokens)
    if not isinstance(out, RoutedTokens | None):
        raise ArgumentError(f"{ROUTE}: out", "must be RoutedTokens", type(out).__name__)
    arrays = {part: getattr(tokens, part) for part in _PARTS} | {"x": normed, "router": router}
    arrays |= {} if out is None else out.arrays
    outputs = _ROUTE(options, tokens.description, arrays, tokens)
    return RoutedTokens.of(outputs) if out is None else out


def _check_route(options: RouteOptions, arrays: Mapping[str, Any], tokens: PackedActivations) -> SpecCall:
    """Build the call of `route_tokens`; raise ArgumentError for operands that do not fit together."""
    shape = shape_of(arrays["router"])
    if len(shape) != 2 or shape[1] != tokens.K:
        raise ArgumentError(f"{ROUTE}: router", f"must be a matrix [E, {tokens.K}]", f"shape {list(shape)}")
    M, H, E, k = tokens.M, tokens.K, shape[0], int(options.k)
    dtype = _float_of(ROUTE, "normed", arrays["x"])
    sizes = {"M": M, "H": H, "K": H, "E": E, "k": k}
    shapes = (
        *((part, f"tokens.{part}", of, size) for part, of, size in _activation_arrays(_PARTS, M, H)),
        ("x", "normed", dtype, (M, H)),
        ("router", "router", dtype, (E, H)),
        *((name, f"out.{name}", of, (M, k)) for name, of in zip(_RESULTS, ("int32", "float32"), strict=False)),
        ("offsets", "out.offsets", "int32", (E + 1,)),
        ("place", "out.place", "int32", (M, k)),
        *((name, f"out.rows.{name[4:]}", of, size) for name, of, size in _activation_arrays(_RESULTS[4:], M * k, H)),
    )
    return SpecCall(ROUTE, (CHOOSE, GATHER), _operands(ROUTE, arrays, shapes), sizes, dtype, options)


@break_graph
@document_options(LaunchOptions)
def combine_experts(
    results: Any,
    routed: RoutedTokens,
    *,
    out: Any = None,
    backend: str | None = None,
    programmatic: bool = False,
) -> Any:
    """Combine the results of each token's experts by their shares: Σ_c share[m, c] · results[place[m, c]].

    Products and sums are float32, rounded one by one in the order of c, and the sum once more to the dtype of results.

    Args:
        results: f16 or bf16 [M·k, H] (bf16 also as its bits), H a multiple of 32 up to 32768; NumPy, CuPy, PyTorch or
            JAX: the result is of the same kind.
        routed: whose rows the results are of.
        out: [M, H] to write into, in other memory; it is what is returned.
        {options}

    Raises:
        ArgumentError: the argument, the rule and the value; nothing was launched.
        UnavailableError: no GPU backend here, or one below sm_90.
    """
    options = LaunchOptions.of(backend, programmatic)
    if not isinstance(routed, RoutedTokens):
        raise ArgumentError(f"{COMBINED}: routed", "must be RoutedTokens", type(routed).__name__)
    arrays = {"results": results, "place": routed.place, "share": routed.share, "hidden": out}
    outputs = _COMBINE(options, (), arrays)
    return outputs["hidden"] if out is None else out


def _check_combine(options: LaunchOptions, arrays: Mapping[str, Any]) -> SpecCall:
    """Build the call of `combine_experts`; raise ArgumentError for operands that do not fit together."""
    shape, (M, k) = shape_of(arrays["results"]), shape_of(arrays["place"])
    if len(shape) != 2 or shape[0] != M * k:
        raise ArgumentError(f"{COMBINED}: results", f"must be a matrix [{M * k}, H]", f"shape {list(shape)}")
    dtype, H = _float_of(COMBINED, "results", arrays["results"]), shape[1]
    shapes = (
        ("results", "results", dtype, shape),
        ("place", "routed.place", "int32", (M, k)),
        ("share", "routed.share", "float32", (M, k)),
        ("hidden", "out", dtype, (M, H)),
    )
    sizes = {"M": M, "H": H, "k": k, "rows": M * k}
    return SpecCall(COMBINED, (COMBINE,), _operands(COMBINED, arrays, shapes), sizes, dtype, options)


def _check_row_major(label: str, packed: Any) -> None:
    if not isinstance(packed, PackedActivations) or packed.layout != "row_major":
        got = packed.layout if isinstance(packed, PackedActivations) else type(packed).__name__
        raise ArgumentError(label, "must be row-major PackedActivations", got)


def _activation_arrays(names: tuple[str, ...], rows: int, H: int) -> Iterator[tuple[str, str, tuple[int, ...]]]:
    yield from zip(names, ("int8", "float32", "int32"), ((rows, H), (rows,), (rows,)), strict=True)


def _operands(
    name: str, arrays: Mapping[str, Any], shapes: tuple[tuple[str, str, str, tuple[int, ...]], ...]
) -> tuple[CallArray, ...]:
    """Make the arrays of a call: `shapes` has every array's name, label, dtype and shape."""
    return tuple(
        CallArray(array_name, f"{name}: {label}", arrays.get(array_name), dtype, shape)
        for array_name, label, dtype, shape in shapes
    )


def _float_of(name: str, label: str, array: Any) -> str:
    dtype = dtype_of(array)
    if dtype not in DTYPES:
        raise ArgumentError(f"{name}: {label}", f"dtype {' or '.join(DTYPES)}", dtype)
    return dtype


_ROUTE = Operation(ROUTE, _check_route, SpecCall.prepare, SpecCall.on_host)
_COMBINE = Operation(
    COMBINED, _check_combine, SpecCall.prepare, SpecCall.on_host, disjoint={"results": "results", "hidden": "out"}
)
