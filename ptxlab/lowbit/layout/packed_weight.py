"""A quantised weight in one of the packings, and back, bit for bit."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from ptxlab.errors import ArgumentError
from ptxlab.hardware.words import F32, U8
from ptxlab.io.dynamo import break_graph
from ptxlab.lowbit.layout.description import Described
from ptxlab.lowbit.layout.packings import PACKINGS, Buffers, Packing, Pair, Shapes, Size
from ptxlab.lowbit.quant import GROUPS, LQQWeight, QoQChannelWeight, QoQWeight, TwoLevelWeight
from ptxlab.lowbit.quant.inputs import check_protective_range
from ptxlab.lowbit.quant.tiled import with_arrays
from ptxlab.validate import is_integer, is_one_of

QuantizedWeight: TypeAlias = LQQWeight | QoQWeight | QoQChannelWeight
_TURN = 8  # rows of gate, then of up, in a strip
VERSION = 1  # of every packing together: raised when the meaning of any stored byte changes


@dataclass(frozen=True, eq=False, kw_only=True)
class PackedWeight(Described):
    """A weight [N, K] of `scheme` in the packing `layout`; `group` is K for qoq_channel, which has no groups.

    `buffers` are NumPy or CuPy arrays: those of the packing (`layout.packings`), where an offset is the byte that the
    scheme's dequantiser adds (`weight.offset`; in `strips` that of the unsigned form), and `channel_scale` f32 [N]
    (qoq_channel: and `channel_zero` u8 [N]) for the epilogue, in the order of the rows. Raises ArgumentError if
    anything does not fit together.

    `interleaved`: the rows are gate and up of an FFN [2·F, K], in turns of eight, so that rows g and g + 8 of a strip
    are gate and up of one feature (`gemm_w4a8(epilogue="silu_mul")`).
    """

    layout: str
    scheme: str
    N: int
    K: int
    group: int
    protective_range: int  # of level 1; 0 for qoq_channel, which has none
    buffers: Mapping[str, npt.NDArray[Any]] = field(repr=False)
    version: int = VERSION
    interleaved: bool = False

    def __post_init__(self) -> None:
        if not is_one_of(self.version, (VERSION,)):
            raise ArgumentError("version", f"must be {VERSION}", self.version)
        shapes = buffer_shapes(self.layout, self.scheme, self.N, self.K, self.group)
        if _SCHEMES[self.scheme].zero is not None:
            check_protective_range(self.protective_range)
        elif self.protective_range != 0:
            raise ArgumentError("protective_range", f"{self.scheme} has none: must be 0", self.protective_range)
        _check_interleaved(self.interleaved, self.layout, self.N)
        if not isinstance(self.buffers, Mapping):
            raise ArgumentError("buffers", "must be arrays by name", type(self.buffers).__name__)
        if set(self.buffers) != set(shapes):
            raise ArgumentError("buffers", f"must be {', '.join(shapes)}", ", ".join(map(str, self.buffers)) or "none")
        for name, (dtype, shape) in shapes.items():
            array = self.buffers[name]
            if not _is(array, dtype, shape):
                rule = f"must be {dtype} {list(shape)} for {self.layout}, {self.scheme}, N={self.N}, K={self.K}"
                raise ArgumentError(f"buffers[{name}]", rule, _describe_array(array))

    @property
    def arch(self) -> str:
        """The first architecture whose MMA the packing feeds; `a` marks one that runs nowhere else."""
        return PACKINGS[self.layout].arch

    @property
    def nbytes(self) -> int:
        """Bytes of all buffers, padding included."""
        return sum(int(array.nbytes) for array in self.buffers.values())


@dataclass(frozen=True)
class _Scheme:
    """Properties of a scheme that packing needs: its class, and the offset with which q4 = 0 stands for weight 0."""

    weight: type[QuantizedWeight]
    zero: int | None  # None: no constants per group
    rebuild: Callable[..., QuantizedWeight]


def _rebuild_lqq(q4: U8, scale: U8, offset: U8, channel_scale: F32, protective_range: int) -> LQQWeight:
    minimum = (offset ^ np.uint8(0x80)).view(np.int8)
    return LQQWeight(
        q4=q4, group_scale=scale, minimum=minimum, channel_scale=channel_scale, protective_range=protective_range
    )


def _rebuild_qoq(q4: U8, scale: U8, offset: U8, channel_scale: F32, protective_range: int) -> QoQWeight:
    zero = -offset // np.maximum(scale, np.uint8(1))  # offset is -zero·scale modulo 256, and zero·scale is a byte
    return QoQWeight(
        q4=q4, group_scale=scale, zero=zero, channel_scale=channel_scale, protective_range=protective_range
    )


_SCHEMES = {
    "lqq": _Scheme(LQQWeight, 128, _rebuild_lqq),
    "qoq": _Scheme(QoQWeight, 0, _rebuild_qoq),
    "qoq_channel": _Scheme(QoQChannelWeight, None, QoQChannelWeight),
}
SCHEMES = tuple(_SCHEMES)
LAYOUTS = tuple(PACKINGS)


def buffer_shapes(layout: str, scheme: str, N: int, K: int, group: int) -> Shapes:
    """Return the buffers of a packed weight: name -> (dtype, shape).

    Raises ArgumentError: an unknown layout or scheme (with those known), N not a positive multiple of 8, an unknown
    group, K not a positive multiple of the group (qoq_channel: group not K, or K not a multiple of 32).
    """
    packing, size = _packing(layout), _size(scheme, N, K, group)
    channel: Shapes = {"channel_scale": ("float32", (N,))}
    return packing.shapes(size) | channel | ({} if size.group else {"channel_zero": ("uint8", (N,))})


@break_graph
def pack(
    weight: QuantizedWeight, layout: str = "row_major", *, interleaved: bool = False, unchecked: bool = False
) -> PackedWeight:
    """Pack a quantised weight of NumPy or CuPy arrays; `unpack` gives it back bit for bit.

    `interleaved`: the weight is gate above up [2·F, K], whose rows are to take turns; in `strips`, F a multiple of 8.
    A weight with a group that the kernels would restore wrong is refused (`TwoLevelWeight.overflows`), unless
    `unchecked`.

    Raises ArgumentError: an unknown layout (with those known), N or K as in `buffer_shapes`, an array of the weight
    with another dtype or shape than its class documents, a q4 or zero point above 15, a QoQ scale outside 1..17, a
    group that overflows, with its place and values.
    """
    scheme = next((name for name, entry in _SCHEMES.items() if isinstance(weight, entry.weight)), None)
    if scheme is None:
        raise ArgumentError("weight", "must be an LQQWeight, QoQWeight or QoQChannelWeight", type(weight).__name__)
    packing = _packing(layout)
    _require_matrix(weight.q4)
    N, K = weight.shape
    group = _group(weight) if isinstance(weight, TwoLevelWeight) else K
    size = _size(scheme, N, K, group)
    _check_interleaved(interleaved, layout, N)
    if interleaved:
        weight = with_arrays(weight, interleave)
    constants = _constants(weight) if isinstance(weight, TwoLevelWeight) else None
    buffers = packing.pack(weight.q4, constants, size) | _channel_buffers(weight)
    if not unchecked:
        require_no_overflow("weight", weight)
    protective_range = int(weight.protective_range) if isinstance(weight, TwoLevelWeight) else 0
    return PackedWeight(
        layout=layout,
        scheme=scheme,
        N=N,
        K=K,
        group=group,
        protective_range=protective_range,
        buffers=buffers,
        interleaved=interleaved,
    )


def unpack(packed: PackedWeight) -> QuantizedWeight:
    """Unpack the quantised weight, equal to the packed one in every bit, on the device of the buffers."""
    if not isinstance(packed, PackedWeight):
        raise ArgumentError("packed", "must be a PackedWeight", type(packed).__name__)
    scheme, buffers = _SCHEMES[packed.scheme], packed.buffers
    q4, constants = PACKINGS[packed.layout].unpack(buffers, _size(packed.scheme, packed.N, packed.K, packed.group))
    if constants is None:
        weight = scheme.rebuild(q4, buffers["channel_scale"], buffers["channel_zero"])
    else:
        weight = scheme.rebuild(q4, *constants, buffers["channel_scale"], packed.protective_range)
    return with_arrays(weight, _deinterleave) if packed.interleaved else weight


def interleave(array: Any) -> Any:
    """Interleave rows of gate above up [2·F, ...] in turns of eight: gates 0..7, ups 0..7, gates 8..15, ...

    Takes NumPy and CuPy arrays.
    """
    return array.reshape(2, -1, _TURN, *array.shape[1:]).swapaxes(0, 1).reshape(array.shape)


def _deinterleave(array: Any) -> Any:
    return array.reshape(-1, 2, _TURN, *array.shape[1:]).swapaxes(0, 1).reshape(array.shape)


def _check_interleaved(interleaved: Any, layout: str, N: int) -> None:
    if not isinstance(interleaved, bool):
        raise ArgumentError("interleaved", "must be True or False", repr(interleaved))
    if interleaved and (layout != "strips" or N % (2 * _TURN)):
        raise ArgumentError("interleaved", f"only in strips, N a multiple of {2 * _TURN}", f"{layout}, N={N}")


def require_no_overflow(name: str, weight: QuantizedWeight) -> None:
    """Raise ArgumentError, with the first place, if the kernels would restore a group of the weight wrong."""
    if not isinstance(weight, TwoLevelWeight):
        return  # only two levels can overflow
    has_overflow = weight.overflows()
    count = int(has_overflow.sum())
    if count:
        row, group = divmod(int(has_overflow.argmax()), has_overflow.shape[1])
        group_place = slice(row, row + 1), slice(group * weight.group, (group + 1) * weight.group)
        restored_weights = weight.exact_level1()[group_place]
        ends_text = f"{int(restored_weights.min())}..{int(restored_weights.max())}"
        scale = int(weight.group_scale[row, group])
        got = f"{ends_text} in row {row}, group {group}, scale {scale}; {count} of {has_overflow.size} groups"
        raise ArgumentError(name, "must restore to -128..127, unless unchecked", got)


def _packing(layout: str) -> Packing:
    if not is_one_of(layout, PACKINGS):
        raise ArgumentError("layout", f"must be one of {', '.join(PACKINGS)}", layout)
    return PACKINGS[layout]


def _size(scheme: str, N: int, K: int, group: int) -> Size:
    if not is_one_of(scheme, _SCHEMES):
        raise ArgumentError("scheme", f"must be one of {', '.join(_SCHEMES)}", scheme)
    if not is_integer(N) or N <= 0 or N % 8:
        raise ArgumentError("weight", "N must be a positive multiple of 8", f"N={N}")
    if not is_integer(K) or K <= 0 or K % 32:
        raise ArgumentError("weight", "K must be a positive multiple of 32", f"K={K}")
    zero = _SCHEMES[scheme].zero
    if zero is None:
        if not is_integer(group) or group != K:
            raise ArgumentError("group", f"{scheme} has none: must be K", f"group={group}, K={K}")
        return Size(N, K, None)
    if not is_one_of(group, GROUPS):
        raise ArgumentError("group", f"must be one of {', '.join(map(str, GROUPS))}", group)
    if K % group:
        raise ArgumentError("weight", "K must be a multiple of the group", f"K={K}, group={group}")
    return Size(N, K, group, zero)


def _require_matrix(q4: U8) -> None:
    if getattr(q4, "ndim", None) != 2:
        shape = getattr(q4, "shape", type(q4).__name__)
        raise ArgumentError("weight.q4", "must be a matrix [N, K]", f"shape {shape}")


def _group(weight: TwoLevelWeight) -> int:
    shape: tuple[int, ...] = getattr(weight.group_scale, "shape", ())
    groups = shape[-1] if len(shape) == 2 else 0
    if not groups or weight.shape[1] % groups:
        rule = "must be [N, K/g], K a multiple of the group"
        raise ArgumentError("weight.group_scale", rule, f"{shape} for q4 {weight.shape}")
    return weight.group


def _constants(weight: LQQWeight | QoQWeight) -> Pair:
    """Return scales and offsets as bytes, after checking that the weight can be recovered from them."""
    shape = (weight.shape[0], weight.shape[1] // weight.group)
    scale = _require(weight, "group_scale", np.uint8, shape)
    if isinstance(weight, LQQWeight):
        _require(weight, "minimum", np.int8, shape)
        return scale, weight.offset
    zero = _require(weight, "zero", np.uint8, shape)
    _require_within("zero", zero, 0, 15)
    _require_within("group_scale", scale, 1, 17)  # 15·17 is a byte
    return scale, weight.offset.view(np.uint8)


def _channel_buffers(weight: QuantizedWeight) -> Buffers:
    rows = (weight.shape[0],)
    if isinstance(weight, TwoLevelWeight):
        return {"channel_scale": _require(weight, "channel_scale", np.float32, rows)}
    zero = _require(weight, "zero", np.uint8, rows)
    _require_within("zero", zero, 0, 15)
    return {"channel_scale": _require(weight, "scale", np.float32, rows), "channel_zero": zero}


def _require(weight: QuantizedWeight, name: str, dtype: type[np.generic], shape: tuple[int, ...]) -> npt.NDArray[Any]:
    """Check dtype and shape of a field of the weight and return a copy.

    With the copy a packed weight shares no memory with the weight.
    """
    array: npt.NDArray[Any] = getattr(weight, name)
    if not _is(array, dtype, shape):
        raise ArgumentError(f"weight.{name}", f"must be {np.dtype(dtype)} {list(shape)}", _describe_array(array))
    return array.copy(order="C")


def _require_within(name: str, array: npt.NDArray[Any], low: int, high: int) -> None:
    if array.min() < low or array.max() > high:
        raise ArgumentError(f"weight.{name}", f"must lie in {low}..{high}", f"{int(array.min())}..{int(array.max())}")


def _is(array: Any, dtype: npt.DTypeLike, shape: tuple[int, ...]) -> bool:
    return getattr(array, "dtype", None) == dtype and array.shape == shape


def _describe_array(array: Any) -> str:
    return f"{array.dtype} {list(array.shape)}" if hasattr(array, "dtype") else type(array).__name__
