"""The calls that quantise as Atom and COMET do: from the floats of any array library to what `gemm_w4a4` and
`gemm_w4ax` take."""

from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np

from ptxlab.errors import ArgumentError
from ptxlab.hardware.words import F32
from ptxlab.lowbit.kernels.operation import CallArray, Operation, dtype_of
from ptxlab.lowbit.kernels.quantize.api import fit_gated, fit_normed, gated_numbers, given, normed_numbers
from ptxlab.lowbit.kernels.quantize.atom import (
    BY_PAIRS,
    COMET,
    ORDERS,
    REORDER,
    RMSNORM_REORDER,
    RULES,
    SILU_MUL_REORDER,
    check_place,
    ordered_rows,
)
from ptxlab.lowbit.kernels.quantize.call import Fitted, matrix_shape
from ptxlab.lowbit.kernels.spec_call import SpecCall
from ptxlab.lowbit.layout import BLOCK_ORDERS, AtomActivations, BlockActivations
from ptxlab.lowbit.layout.atom_operands import activation_shapes
from ptxlab.lowbit.layout.comet_operands import block_activation_shapes
from ptxlab.lowbit.layout.packings import Shapes
from ptxlab.lowbit.quant.atom import ACTIVATION_CLIP, ATOM_OUTLIERS, ATOM_PAPER, AtomRules
from ptxlab.lowbit.quant.fmpq import BLOCK
from ptxlab.lowbit.quant.inputs import extremes
from ptxlab.spec import KernelSpec
from ptxlab.spec.dtypes import floats
from ptxlab.validate import is_integer, is_one_of

_NAMES = {"x": "x_q", "x8": "x8", "scale": "x_scale"}  # the specs' of the activations' arrays
Numbers = Callable[[dict[str, np.ndarray], Mapping[str, Any]], F32]


class _How(NamedTuple):
    """The options that all calls have."""

    outliers: int
    group: int
    layout: str | None
    clip: float
    rules: AtomRules
    int8: int | None
    backend: str | None
    programmatic: bool


_FIELDS = {AtomActivations: ("K", "outliers", "group", "layout"), BlockActivations: ("K4", "K8", "layout")}
_OF_ATOM = {"outliers": 128, "group": 128, "clip": ACTIVATION_CLIP, "rules": ATOM_PAPER}  # with their defaults


class _Quantizer:
    """One of the calls: checks arrays, launches its kernel, and hands the activations over."""

    def __init__(self, spec: KernelSpec, numbers: Numbers, apart: tuple[str, ...] = ()) -> None:
        """`numbers` makes of a call's floats by name, its sizes and dtype, what is quantised, or raises ArgumentError:
        for host arrays alone, as on a GPU nothing reads values. No two arrays of `apart` may share memory."""
        self.name, self.spec, self.numbers = spec.name, spec, numbers
        self._operation = Operation(spec.name, SpecCall.prepare, SpecCall.on_host, apart={each: each for each in apart})

    def __call__(
        self, arrays: Mapping[str, Any], place: Any, fit: Callable[[], Fitted], how: _How, out: Any, *options: Any
    ) -> Any:
        """The activations: `out`, or new ones of the first array's kind; `fit` and `options` as of `call.Quantizer`."""
        arrays, like, kind = {**arrays, "place": place}, None, AtomActivations if how.int8 is None else BlockActivations
        if isinstance(out, kind):
            arrays |= {_NAMES[name]: array for name, array in out.arrays.items()}
            like = out.M, *(getattr(out, name) for name in _FIELDS[kind])
        elif out is not None:
            raise ArgumentError(f"{self.name}: out", f"must be {kind.__name__}", type(out).__name__)
        made = self._operation((*how, like, *options), arrays, lambda: self._checked(arrays, fit, how, like))
        if out is not None:
            return out
        M, channels, *_ = fit()
        parts = {name: made[spec] for name, spec in _NAMES.items() if spec in made}
        return kind(M=M, **_fields(self.name, channels, how), **parts)

    def _checked(self, arrays: Mapping[str, Any], fit: Callable[[], Fitted], how: _How, like: Any) -> SpecCall:
        """The call; raises ArgumentError for what does not fit together. `like` is what describes `out`."""
        M, channels, shapes, sizes = fit()
        fields = {"M": M, **_fields(self.name, channels, how)}
        if like not in (None, tuple(fields.values())):
            said = (
                ", ".join(f"{name}={value}" for name, value in zip(fields, each, strict=True))
                for each in (fields.values(), like)
            )
            raise ArgumentError(f"{self.name}: out", f"must have {next(said)}", next(said))
        dtype, first = dtype_of(arrays[next(iter(shapes))]), next(iter(shapes))
        if dtype not in (dtypes := self.spec.by_variant["IN"]):
            raise ArgumentError(f"{self.name}: {first}", f"dtype {' or '.join(dtypes)}", dtype)
        rows: dict[str, Any]
        if how.int8 is None:
            results = activation_shapes(**fields)
            rows = {"outliers": how.outliers, "g": how.group, "code": RULES.index(how.rules), "clip": float(how.clip)}
        else:
            results = block_activation_shapes(**fields)
            rows = {"outliers": fields["K8"], "g": BLOCK, "code": COMET, "clip": 1.0}
        pairs = BY_PAIRS.index(fields["layout"])
        sizes = {"M": M, "K": channels - rows["outliers"], "pairs": pairs, **rows, **sizes}
        operands = [
            CallArray(each, f"{self.name}: {each}", arrays[each], dtype, shape) for each, shape in shapes.items()
        ]
        operands.append(CallArray("place", f"{self.name}: place", arrays["place"], "int16", (channels,)))
        operands += self._results(arrays, results)

        def look(given: dict[str, np.ndarray]) -> None:
            check_place(self.name, given)
            y = self.numbers({each: floats(given[each]) for each in shapes}, {**sizes, "dtype": dtype})
            ordered_rows(y, given["place"], **rows)  # or what is wrong with it

        return SpecCall(self.name, (self.spec,), tuple(operands), sizes, dtype, how.backend, how.programmatic, look)

    def _results(self, arrays: Mapping[str, Any], shapes: Shapes) -> Iterator[CallArray]:
        """The arrays of the activations."""
        label, lacking = f"{self.name}: out", "must be given in a capture: the result of a call before it"
        for name, (dtype, shape) in shapes.items():
            array = arrays.get(_NAMES[name])
            yield CallArray(_NAMES[name], label if array is None else f"{label}.{name}", array, dtype, shape, lacking)


def _fields(name: str, channels: int, how: _How) -> dict[str, Any]:
    """What describes the activations besides M; ArgumentError for options that there are not, or that do not fit."""
    if how.int8 is not None:
        return _block_fields(name, channels, how)
    layout = "bytes" if how.layout is None else how.layout
    if not is_one_of(layout, ORDERS):
        raise ArgumentError(f"{name}: layout", f"must be one of {', '.join(ORDERS)}", layout)
    if not is_one_of(how.outliers, ATOM_OUTLIERS):
        raise ArgumentError(f"{name}: outliers", f"must be one of {', '.join(map(str, ATOM_OUTLIERS))}", how.outliers)
    number = isinstance(how.clip, int | float | np.number) and not isinstance(how.clip, bool)
    if not number or not 0.001 <= how.clip <= 1:
        raise ArgumentError(f"{name}: clip", "a number in 0.001..1", repr(how.clip))
    if not isinstance(how.rules, AtomRules) or how.rules not in RULES:
        raise ArgumentError(f"{name}: rules", "must be quant.ATOM_PAPER or quant.ATOM_CODE", repr(how.rules))
    K = channels - how.outliers
    if K < 1:
        raise ArgumentError(f"{name}: outliers", f"must leave INT4 channels of {channels}", how.outliers)
    activation_shapes(layout, 0, K, how.outliers, how.group)  # or what is wrong with K and the group
    return {"K": K, "outliers": how.outliers, "group": how.group, "layout": layout}


def _block_fields(name: str, channels: int, how: _How) -> dict[str, Any]:
    """The same of COMET's, whose rules leave no choice."""
    for option, default in _OF_ATOM.items():
        given = getattr(how, option)
        if type(given) is not type(default) or given != default:
            raise ArgumentError(f"{name}: {option}", "must be left out with int8: it is Atom's", given)
    layout = "joined" if how.layout is None else how.layout
    if not is_one_of(layout, BLOCK_ORDERS.values()):
        raise ArgumentError(f"{name}: layout", f"must be one of {', '.join(BLOCK_ORDERS.values())} with int8", layout)
    if not channels or channels % BLOCK:
        raise ArgumentError(f"{name}: channels", f"must be a positive multiple of {BLOCK}", channels)
    if not is_integer(how.int8) or not 0 <= how.int8 <= channels // BLOCK:
        raise ArgumentError(f"{name}: int8", f"must be 0..{channels // BLOCK} blocks", how.int8)
    K8 = how.int8 * BLOCK
    return {"K4": channels - K8, "K8": K8, "layout": layout}


def reorder_quantize(
    x: Any,
    place: Any,
    *,
    outliers: int = 128,
    group: int = 128,
    layout: str | None = None,
    clip: float = ACTIVATION_CLIP,
    rules: AtomRules = ATOM_PAPER,
    int8: int | None = None,
    out: AtomActivations | BlockActivations | None = None,
    backend: str | None = None,
    programmatic: bool = False,
) -> Any:
    """Channels to their places, then INT4 with a scale per group and INT8 outliers: `quantize_atom_activations`' bits.

    With `int8` they are in COMET's blocks of 128, and the bits those of `quantize_blocks`: `BlockActivations`, for
    `gemm_w4ax`. Else `AtomActivations`, for `gemm_w4a4`.

    On the GPU a call only enqueues, on the caller's stream, and nothing looks at values: a group with a NaN or an
    infinity, or whose scale is beyond FP16, gets a scale that is not finite; where `place` is no permutation, some
    results are undefined. On the host all that is refused.

    Args:
        x: [M, C], of float16, bfloat16 (also as its bits, uint16) or float32; NumPy, CuPy, PyTorch or JAX: the results
            are of the same kind. C up to 32768 in whole blocks of 128.
        place: s16 [C], where each channel goes, the last `outliers` places being those of the outliers
            (`quant.channel_places` of `quant.outlier_order`). No kernel that may still run writes it: it is read ahead
            of the wait.
        outliers: 0, 64 or 128; C less these is a multiple of the group.
        group: 64 or 128.
        layout: `bytes` for weights in strips, `pairs` for weights in rows; with `int8` `joined` and `pairs`. By default
            that for strips.
        clip: of a group's largest magnitude what its scale is made for, 0.001 to 1.
        rules: `quant.ATOM_PAPER` or `quant.ATOM_CODE`: how scales are made and values are rounded.
        int8: of COMET: how many blocks of 128, those of the last places, are INT8. Then outliers, group, clip and
            rules, which are Atom's, must be left out.
        out: activations of the same sizes and layout to write into; needed while a CUDA graph is captured.
        backend: `gpu` or `emulator`; by default the GPU where there is one.
        programmatic: the call may begin before the kernel before it on the stream has ended, for which it waits by
            itself before it reads x or writes anything. Of no effect on host arrays.

    Raises:
        ArgumentError: the argument, the rule and the value; nothing was launched.
        UnavailableError: no GPU backend here, or one below sm_90.
    """

    def fit() -> Fitted:
        shape = matrix_shape(_REORDER.name, "x", x)
        return Fitted(*shape, {"x": shape})

    return _REORDER({"x": x}, place, fit, _How(outliers, group, layout, clip, rules, int8, backend, programmatic), out)


def rmsnorm_reorder_quantize(
    x: Any,
    gamma: Any,
    place: Any,
    *,
    residual: Any = None,
    eps: float = 1e-5,
    normed: Any = None,
    outliers: int = 128,
    group: int = 128,
    layout: str | None = None,
    clip: float = ACTIVATION_CLIP,
    rules: AtomRules = ATOM_PAPER,
    int8: int | None = None,
    out: AtomActivations | BlockActivations | None = None,
    backend: str | None = None,
    programmatic: bool = False,
) -> Any:
    """Residual add, RMSNorm and `reorder_quantize` in one launch; y as `rmsnorm_quantize` has it, not rounded before.

    Args:
        x, gamma, residual, eps, normed: as `rmsnorm_quantize` takes them, in the channels' own order.
        place, outliers, group, layout, clip, rules, int8, out, backend, programmatic: as `reorder_quantize` takes them.

    Raises what `rmsnorm_quantize` and `reorder_quantize` raise.
    """
    arrays = {"x": x, **given(residual=residual, normed=normed), "gamma": gamma}
    how = _How(outliers, group, layout, clip, rules, int8, backend, programmatic)
    return _RMSNORM(arrays, place, lambda: fit_normed(_RMSNORM.name, arrays, eps), how, out, eps)


def silu_mul_reorder_quantize(
    gate_up: Any,
    place: Any,
    *,
    activation: str = "silu",
    outliers: int = 128,
    group: int = 128,
    layout: str | None = None,
    clip: float = ACTIVATION_CLIP,
    rules: AtomRules = ATOM_PAPER,
    int8: int | None = None,
    out: AtomActivations | BlockActivations | None = None,
    backend: str | None = None,
    programmatic: bool = False,
) -> Any:
    """The gate of an FFN and `reorder_quantize` in one launch; h as `silu_mul_quantize` has it, not rounded before.

    Args:
        gate_up, activation: as `silu_mul_quantize` takes them; `place` is for the channels of h.
        place, outliers, group, layout, clip, rules, int8, out, backend, programmatic: as `reorder_quantize` takes them.

    Raises what `silu_mul_quantize` and `reorder_quantize` raise.
    """
    how = _How(outliers, group, layout, clip, rules, int8, backend, programmatic)
    arrays = {"gate_up": gate_up}
    return _SILU_MUL(arrays, place, lambda: fit_gated(_SILU_MUL.name, gate_up, activation), how, out, activation)


def _plain(numbers: dict[str, np.ndarray], sizes: Mapping[str, Any]) -> F32:
    extremes("x", numbers["x"])
    return numbers["x"]


_REORDER = _Quantizer(REORDER, _plain)
_RMSNORM = _Quantizer(RMSNORM_REORDER, normed_numbers, apart=("x", "residual", "normed"))
_SILU_MUL = _Quantizer(SILU_MUL_REORDER, gated_numbers)
