"""`route_tokens` and `combine_experts`: what lies around the grouped GEMMs of a mixture of experts."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Self

from ptxlab import gpu
from ptxlab.errors import ArgumentError, UnavailableError
from ptxlab.kernels.moe.specs import CHOOSE, COMBINE, DTYPES, GATHER
from ptxlab.kernels.operation import CallArray, Operation, Prepared, Results, check_how, dtype_of
from ptxlab.layout import PackedActivations
from ptxlab.runtime import run_spec
from ptxlab.runtime.arguments import require_on_host
from ptxlab.runtime.plan import Plan
from ptxlab.sources import of_kernel
from ptxlab.spec import KernelSpec
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
        """By the kernels' names."""
        rows = dict(zip(_RESULTS[4:], (getattr(self.rows, part) for part in _PARTS), strict=True))
        return {**{name: getattr(self, name) for name in _RESULTS[:4]}, **rows}

    @classmethod
    def of(cls, arrays: Mapping[str, Any]) -> Self:
        """Of these arrays."""
        x_q, scale, token_sum = (arrays[name] for name in _RESULTS[4:])
        M, K = shape_of(x_q)
        rows = PackedActivations(layout="row_major", M=M, K=K, x_q=x_q, scale=scale, token_sum=token_sum)
        return cls(rows=rows, **{name: arrays[name] for name in _RESULTS[:4]})


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
    """The k experts of every token, and its INT8 activations copied to their rows, in two launches.

    Logits are normed routerᵀ in float32. A token takes the experts of the k largest, of equal ones the lower. Shares
    are the softmax over all experts, divided by its sum over the chosen ones (Mixtral). A token has the same choice and
    shares in any batch. Nothing looks at the numbers: a logit that is no number comes last, and a token with one among
    its choices, or an infinite one, has shares that are none.

    Args:
        tokens: row-major activations [M, H], M at least 1, H a multiple of 32 up to 32768; NumPy, CuPy, PyTorch or JAX.
        normed: the same before they were quantised (`rmsnorm_quantize`), f16 or bf16 [M, H] (bf16 also as its bits).
        router: [E, H], E at most 64, of the dtype of `normed`. No kernel that may still run writes it: it is read ahead
            of the wait.
        k: experts of a token, 1 to 4.
        out: to write into; needed while a CUDA graph is captured.
        backend: `gpu` or `emulator`; by default the GPU where there is one. Host arrays are copied there and back.
        programmatic: the launches may begin before the kernel before them on the stream has ended, for which they wait
            by themselves. Of no effect on host arrays.

    Raises:
        ArgumentError: the argument, the rule and the value; nothing was launched.
        UnavailableError: no GPU backend here, or one below sm_90.
    """
    _check_row_major(f"{ROUTE}: tokens", tokens)
    if not isinstance(out, RoutedTokens | None):
        raise ArgumentError(f"{ROUTE}: out", "must be RoutedTokens", type(out).__name__)
    if not is_integer(k):
        raise ArgumentError(f"{ROUTE}: k", "must be an integer", repr(k))
    given = {part: getattr(tokens, part) for part in _PARTS} | {"x": normed, "router": router}
    given |= {} if out is None else out.arrays

    def check() -> _Call:
        shape = shape_of(router)
        if len(shape) != 2 or shape[1] != tokens.K:
            raise ArgumentError(f"{ROUTE}: router", f"must be a matrix [E, {tokens.K}]", f"shape {list(shape)}")
        M, H, E, dtype = tokens.M, tokens.K, shape[0], _float_of(ROUTE, "normed", normed)
        sizes = {"M": M, "H": H, "K": H, "E": E, "k": int(k)}
        known = (
            *((part, f"tokens.{part}", of, size) for part, of, size in _packed(_PARTS, M, H)),
            ("x", "normed", dtype, (M, H)),
            ("router", "router", dtype, (E, H)),
            *((name, f"out.{name}", of, (M, k)) for name, of in zip(_RESULTS, ("int32", "float32"), strict=False)),
            ("offsets", "out.offsets", "int32", (E + 1,)),
            ("place", "out.place", "int32", (M, k)),
            *((name, f"out.rows.{name[4:]}", of, size) for name, of, size in _packed(_RESULTS[4:], M * k, H)),
        )
        return _Call(ROUTE, (CHOOSE, GATHER), given, known, sizes, dtype, backend, programmatic)

    made = _ROUTE((tokens.M, tokens.K, int(k), backend, programmatic), given, check)
    return RoutedTokens.of(made) if out is None else out


def combine_experts(
    results: Any,
    routed: RoutedTokens,
    *,
    out: Any = None,
    backend: str | None = None,
    programmatic: bool = False,
) -> Any:
    """What the experts of each token gave, by their shares: Σ_c share[m, c] · results[place[m, c]].

    Products and sums are float32, rounded one by one in the order of c, and the sum once more to the dtype of results.

    Args:
        results: f16 or bf16 [M·k, H] (bf16 also as its bits), H a multiple of 32 up to 32768; NumPy, CuPy, PyTorch or
            JAX: the result is of the same kind.
        routed: whose rows the results are of.
        out: [M, H] to write into, in other memory; it is what is returned.
        backend, programmatic: as of `route_tokens`.

    Raises:
        ArgumentError: the argument, the rule and the value; nothing was launched.
        UnavailableError: no GPU backend here, or one below sm_90.
    """
    if not isinstance(routed, RoutedTokens):
        raise ArgumentError(f"{COMBINED}: routed", "must be RoutedTokens", type(routed).__name__)
    given = {"results": results, "place": routed.place, "share": routed.share, "hidden": out}

    def check() -> _Call:
        shape, (M, k) = shape_of(results), shape_of(routed.place)
        if len(shape) != 2 or shape[0] != M * k:
            raise ArgumentError(f"{COMBINED}: results", f"must be a matrix [{M * k}, H]", f"shape {list(shape)}")
        dtype, H = _float_of(COMBINED, "results", results), shape[1]
        known = (
            ("results", "results", dtype, shape),
            ("place", "routed.place", "int32", (M, k)),
            ("share", "routed.share", "float32", (M, k)),
            ("hidden", "out", dtype, (M, H)),
        )
        sizes = {"M": M, "H": H, "k": k, "rows": M * k}
        return _Call(COMBINED, (COMBINE,), given, known, sizes, dtype, backend, programmatic)

    made = _COMBINE((backend, programmatic), given, check)
    return made["hidden"] if out is None else out


def _check_row_major(label: str, packed: Any) -> None:
    if not isinstance(packed, PackedActivations) or packed.layout != "row_major":
        got = packed.layout if isinstance(packed, PackedActivations) else type(packed).__name__
        raise ArgumentError(label, "must be row-major PackedActivations", got)


def _packed(names: tuple[str, ...], rows: int, H: int) -> Iterator[tuple[str, str, tuple[int, ...]]]:
    yield from zip(names, ("int8", "float32", "int32"), ((rows, H), (rows,), (rows,)), strict=True)


def _float_of(name: str, label: str, array: Any) -> str:
    dtype = dtype_of(array)
    if dtype not in DTYPES:
        raise ArgumentError(f"{name}: {label}", f"dtype {' or '.join(DTYPES)}", dtype)
    return dtype


@dataclass(frozen=True, eq=False)
class _Call:
    """The arrays given, by argument of the kernels, and what each of `known` has to be: name, label, dtype, shape."""

    name: str
    specs: tuple[KernelSpec, ...]
    given: Mapping[str, Any]
    known: tuple[tuple[str, str, str, tuple[int, ...]], ...]
    sizes: dict[str, int]
    dtype: str
    backend: str | None
    programmatic: bool
    check = is_empty = False  # there is at least one token

    def __post_init__(self) -> None:
        check_how(self.name, self.backend, programmatic=self.programmatic)
        for spec in self.specs:
            try:
                spec.check_sizes(self.sizes)
            except ArgumentError as error:
                raise ArgumentError(self.name, error.rule, error.value) from None

    @property
    def key(self) -> tuple[Any, ...]:
        return (*self.sizes.values(), self.dtype, self.programmatic)

    @property
    def operands(self) -> Iterator[CallArray]:
        for name, label, dtype, shape in self.known:
            yield CallArray(name, f"{self.name}: {label}", self.given.get(name), dtype, shape)

    def config(self, spec: KernelSpec) -> dict[str, int]:
        config = spec.config_for(self.sizes)
        return {**config, "IN": DTYPES.index(self.dtype)} if "IN" in config else config


def _prepare(call: _Call) -> Prepared:
    if reason := gpu.why_not("sm_90"):
        raise UnavailableError(f'{call.name}: {reason}; pass backend="emulator" with NumPy arrays')
    configs = [(spec, call.config(spec)) for spec in call.specs]

    def plans() -> tuple[Plan, ...]:
        return tuple(Plan(spec, config, call.sizes, programmatic=call.programmatic) for spec, config in configs)

    return Prepared(call.specs[-1].name, plans)


def _on_host(call: _Call) -> Results:
    """NumPy, or PyTorch on the CPU: in the emulator, or copied to the GPU and back."""
    written = {arg.name for spec in call.specs for arg in spec.outputs}
    arrays = {}
    for each in call.operands:
        if each.array is not None:
            require_on_host(*each[1:5], written=each.name in written)
            arrays[each.name] = each.array
        elif each.name not in written:
            raise ArgumentError(each.label, f"must be {each.dtype} {list(each.shape)}", "nothing")
    for spec in call.specs:
        inputs = {arg.name: arrays[arg.name] for arg in spec.inputs}
        out = {arg.name: arrays[arg.name] for arg in spec.outputs if arg.name in arrays}
        sizes = {name: size for name, size in call.sizes.items() if name in spec.symbols}
        how: dict[str, Any] = {"backend": call.backend, "config": call.config(spec), "programmatic": call.programmatic}
        arrays |= run_spec(spec, of_kernel(spec.name)[0], inputs, sizes=sizes, out=out, **how).outputs
    return {name: arrays[name] for name in written}


_ROUTE, _COMBINE = Operation(ROUTE, _prepare, _on_host), Operation(COMBINED, _prepare, _on_host)
