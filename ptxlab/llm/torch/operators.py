"""The kernels as operators of `torch.library`, `torch.ops.ptxlab.*`.

Of CUDA tensors they are the public calls (`ptxlab.gemm_w4a8` ...): a call enqueues its kernel on PyTorch's current
stream and takes memory from PyTorch's allocator, so that CUDA graphs capture it. Of CPU tensors they compute the same
integers with the NumPy references, not with the emulator.

Activations are row-major; x_q, scale and token_sum are those of `ptxlab.PackedActivations`. A weight is the list of its
buffers in the order of `layout.buffer_shapes`. A cache is its pool, with `channel` the constants of a scheme by channel
(k scale, k zero, v scale, v zero), else empty, and `rotated` as in `KVCache`. Bad input raises `ptxlab.PtxlabError`;
numbers in the tensors are looked at on the CPU alone.
"""

import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import cache
from itertools import pairwise
from typing import Any, NamedTuple, TypeVar

import numpy as np
import torch
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

from ptxlab import gpu
from ptxlab.arithmetic import ceil_div
from ptxlab.errors import ArgumentError, naming
from ptxlab.hardware.words import F32
from ptxlab.llm.model.numpy_runner import IntegerProduct
from ptxlab.llm.torch.repeats import Repeats
from ptxlab.lowbit import quant, reference
from ptxlab.lowbit.kernels import attention, gemm, quantize
from ptxlab.lowbit.kernels.attention.append import table_rows
from ptxlab.lowbit.kernels.attention.append_api import check_places
from ptxlab.lowbit.kernels.attention.call import check_cache
from ptxlab.lowbit.kernels.attention.options import AttentionOptions
from ptxlab.lowbit.kernels.attention.prefill import PREFILL
from ptxlab.lowbit.kernels.attention.prefill_api import chunk_memory
from ptxlab.lowbit.kernels.attention.steps import choose
from ptxlab.lowbit.kernels.gemm.common import DTYPES
from ptxlab.lowbit.kernels.operation import Scratch
from ptxlab.lowbit.kernels.quantize.gated import silu_mul_quantize_reference
from ptxlab.lowbit.kernels.quantize.rmsnorm import normalize_rows
from ptxlab.lowbit.layout import (
    ExpertWeights,
    KVCache,
    PackedActivations,
    PackedWeight,
    buffer_shapes,
    gather,
    write_slots,
)
from ptxlab.lowbit.layout.pages import require_array
from ptxlab.lowbit.quant import Level1Weight, QuantizedActivations
from ptxlab.lowbit.quant.inputs import extremes
from ptxlab.spec.dtypes import convert_to_dtype, floats, name_of, round_to_dtype

Quantized = tuple[Tensor, Tensor, Tensor]  # x_q s8 [M, K], scale f32 [M], token_sum s32 [M]

_Channel = Sequence[Tensor] | None

ON_CUDA: dict[str, Callable[..., Any]] = {}  # what each operator does with CUDA tensors
ALLOCATING: dict[str, Callable[..., Any]] = {}  # what makes its results and nothing else, by the operator's schema
_library = torch.library.Library("ptxlab", "DEF")
_HALVES = ("float16", "bfloat16")


def define(schema: str, *, cuda: Callable[..., Any], cpu: Callable[..., Any], fake: Callable[..., Any]) -> None:
    """Define an operator; the first of its arguments says on which device it runs."""
    name = schema.partition("(")[0]
    _library.define(schema)
    arguments = getattr(torch.ops.ptxlab, name).default._schema.arguments
    written_arguments = {
        argument.name: argument.alias_info is not None and argument.alias_info.is_write for argument in arguments
    }
    repeats = ON_CUDA[name] = Repeats(cuda, fake, written_arguments)
    ALLOCATING[schema] = fake

    def run_on_device(x: Tensor, *args: Any, **kwargs: Any) -> Any:
        if x.get_device() == torch.cuda.current_device():
            return repeats(x, *args, **kwargs)
        with torch.cuda.device(x.device):
            return repeats(x, *args, **kwargs)

    _library.impl(name, run_on_device, "CUDA")
    _library.impl(name, cpu, "CPU")
    torch.library.register_fake(f"ptxlab::{name}", fake, lib=_library)


# Tensors as arrays, and back


def array_of(name: str, tensor: Tensor, dtypes: str | Sequence[str], *shape: int | str) -> Any:
    """View a CPU tensor's memory as a NumPy array, bfloat16 as its bits.

    Raises ArgumentError unless it has one of the dtypes and the shape.
    """
    dtypes = (dtypes,) if isinstance(dtypes, str) else dtypes
    dtype = name_of(tensor.dtype)
    require_array(name, tensor, dtype if dtype in dtypes else " or ".join(dtypes), shape)
    if tensor.device.type != "cpu":
        raise ArgumentError(name, "must be on the CPU as the first argument is", tensor.device)
    tensor = tensor.detach()
    return (tensor.view(torch.uint16) if dtype == "bfloat16" else tensor).numpy()


def tensor_of(array: Any, dtype: torch.dtype) -> Tensor:
    """View an array's memory as a tensor; bfloat16 are its bits."""
    tensor = torch.from_numpy(array)
    return tensor.view(torch.bfloat16) if dtype == torch.bfloat16 else tensor


def _to_tensors(activations: QuantizedActivations) -> Quantized:
    return torch.from_numpy(activations.q), torch.from_numpy(activations.scale), torch.from_numpy(activations.token_sum)


def _empty_quantized(x: Tensor, K: Any) -> Quantized:
    M = x.shape[0]
    return x.new_empty((M, K), dtype=torch.int8), x.new_empty(M, dtype=torch.float32), x.new_empty(M, dtype=torch.int32)


# Quantisers


def _quantize_on_cpu(x: Tensor) -> Quantized:
    array = array_of("quantize_activations: x", x, ("float16", "bfloat16", "float32"), "M", "K")
    _check_width("quantize_activations: x", x.shape[1])
    with naming("quantize_activations"):
        return _to_tensors(quant.quantize_activations(floats(array)))


@contextmanager
def norm_rows(
    name: str, x: Tensor, gamma: Tensor, residual: Tensor | None, eps: float, normed: Tensor | None, columns: str = "K"
) -> Iterator[F32]:
    """Yield RMSNorm of x + residual, f32 [M, K]; write residual and `normed` afterwards, unless the block raised."""
    dtype = name_of(x.dtype)
    v = floats(array_of(f"{name}: x", x, _HALVES, "M", columns))
    weight = floats(array_of(f"{name}: gamma", gamma, dtype, x.shape[1]))
    stream, normed_array = (
        None if tensor is None else array_of(f"{name}: {argument}", tensor, dtype, *x.shape)
        for argument, tensor in (("residual", residual), ("normed", normed))
    )
    extremes(f"{name}: x", v), extremes(f"{name}: gamma", weight)  # refuse what is not finite
    if stream is not None:
        v = round_to_dtype(v + floats(stream), dtype)
        extremes(f"{name}: x + residual", v)
    y = normalize_rows(v, weight, eps)
    yield y
    for array, values in ((stream, v), (normed_array, y)):
        if array is not None:
            array[...] = convert_to_dtype(values, dtype)


def _rmsnorm_on_cpu(
    x: Tensor, gamma: Tensor, residual: Tensor | None = None, eps: float = 1e-5, normed: Tensor | None = None
) -> Quantized:
    name = "rmsnorm_quantize"
    array_of(f"{name}: x", x, _HALVES, "M", "K")
    _check_width(f"{name}: x", x.shape[1])
    with norm_rows(name, x, gamma, residual, eps, normed) as y, naming(name):
        quantised_rows = quant.quantize_activations(y)
    return _to_tensors(quantised_rows)


def _silu_mul_on_cpu(gate_up: Tensor, activation: str = "silu") -> Quantized:
    name = "silu_mul_quantize"
    array = array_of(f"{name}: gate_up", gate_up, _HALVES, "M", "2·K")
    _check_width(f"{name}: gate_up", gate_up.shape[1], step=64)
    if activation not in reference.ACTIVATIONS:
        raise ArgumentError(f"{name}: activation", f"must be one of {', '.join(reference.ACTIVATIONS)}", activation)
    extremes(f"{name}: gate_up", floats(array))
    kinds = reference.ACTIVATIONS.index(activation), DTYPES.index(name_of(gate_up.dtype))
    x_q, scale, token_sum = silu_mul_quantize_reference(floats(array), 1, 32, *kinds)
    return _to_tensors(QuantizedActivations(x_q, scale.astype(np.float32), token_sum.astype(np.int32)))


def _check_width(name: str, width: int, step: int = 32) -> None:
    if width % step:
        raise ArgumentError(name, f"width % {step} == 0", width)


def _quantize_on_cuda(quantiser: Callable[..., Any], x: Tensor, K: int, *operands: Any, **options: Any) -> Quantized:
    """Run a quantiser on x into new tensors [M, K] and return them."""
    x_q, scale, token_sum = _empty_quantized(x, K)
    sizes = {"layout": "row_major", "rows": 1, "M": x.shape[0], "K": K}
    out = PackedActivations(**sizes, x_q=x_q, scale=scale, token_sum=token_sum)
    quantiser(x, *operands, out=out, **options)
    return x_q, scale, token_sum


def _rmsnorm_on_cuda(
    x: Tensor, gamma: Tensor, residual: Tensor | None = None, eps: float = 1e-5, normed: Tensor | None = None
) -> Quantized:
    options = {"residual": residual, "eps": eps, "normed": normed}
    return _quantize_on_cuda(quantize.rmsnorm_quantize, x, x.shape[-1], gamma, **options)


def _silu_mul_on_cuda(gate_up: Tensor, activation: str = "silu") -> Quantized:
    return _quantize_on_cuda(quantize.silu_mul_quantize, gate_up, gate_up.shape[-1] // 2, activation=activation)


define(
    "quantize_activations(Tensor x) -> (Tensor x_q, Tensor scale, Tensor token_sum)",
    cuda=lambda x: _quantize_on_cuda(quantize.quantize_activations, x, x.shape[-1]),
    cpu=_quantize_on_cpu,
    fake=lambda x: _empty_quantized(x, x.shape[1]),
)
define(
    "rmsnorm_quantize(Tensor x, Tensor gamma, Tensor(a!)? residual=None, float eps=1e-5, Tensor(b!)? normed=None)"
    " -> (Tensor x_q, Tensor scale, Tensor token_sum)",
    cuda=_rmsnorm_on_cuda,
    cpu=_rmsnorm_on_cpu,
    fake=lambda x, *args, **kwargs: _empty_quantized(x, x.shape[1]),
)
define(
    'silu_mul_quantize(Tensor gate_up, str activation="silu") -> (Tensor x_q, Tensor scale, Tensor token_sum)',
    cuda=_silu_mul_on_cuda,
    cpu=_silu_mul_on_cpu,
    fake=lambda gate_up, activation="silu": _empty_quantized(gate_up, gate_up.shape[1] // 2),
)


# Products


W = TypeVar("W", PackedWeight, ExpertWeights)


def _unchecked_weight(kind: type[W], **fields: Any) -> W:
    """Make a weight whose buffers `_weight_fields` has checked, because its own checks take no tensors."""
    weight = object.__new__(kind)
    vars(weight).update(fields)
    return weight


def _weight_fields(
    name: str, tensors: Sequence[Tensor], layout: str, scheme: str, K: int, group: int, experts: tuple[int, ...] = ()
) -> dict[str, Any]:
    """Return the fields of a PackedWeight, or of ExpertWeights, with these buffers.

    Raises ArgumentError unless the buffers are those of such a weight.
    """
    if not tensors or not tensors[-1].shape:
        raise ArgumentError(name, "must be the buffers of a packed weight", f"{len(tensors)} tensors")
    N, group = tensors[-1].shape[-1], K if scheme == "qoq_channel" else group  # the last one is per channel
    shapes = _buffer_shapes(layout, scheme, N, K, group)
    if len(tensors) != len(shapes):
        raise ArgumentError(name, f"must be {', '.join(buffer for buffer, *_ in shapes)}", f"{len(tensors)} tensors")
    for (buffer, dtype, shape), tensor in zip(shapes, tensors, strict=True):
        if name_of(tensor.dtype) != dtype or tuple(tensor.shape) != (*experts, *shape):
            got = f"{name_of(tensor.dtype)} {list(tensor.shape)}"
            raise ArgumentError(f"{name}: {buffer}", f"must be {dtype} {[*experts, *shape]}", got)
    return {
        "layout": layout,
        "scheme": scheme,
        "N": N,
        "K": K,
        "group": group,
        "protective_range": 0 if scheme == "qoq_channel" else quant.PROTECTIVE_RANGE,  # no product looks at it
        "buffers": {buffer: tensor for (buffer, *_), tensor in zip(shapes, tensors, strict=True)},
    }


@cache
def _buffer_shapes(
    layout: str, scheme: str, N: int, K: int, group: int
) -> tuple[tuple[str, str, tuple[int, ...]], ...]:
    return tuple((name, dtype, shape) for name, (dtype, shape) in buffer_shapes(layout, scheme, N, K, group).items())


class _Unpacked(NamedTuple):
    """A weight as integers, of tensors that nobody has written since."""

    tensors: tuple[Any, ...]
    versions: tuple[int, ...]
    product: IntegerProduct


_unpacked = WeakIdKeyDictionary()  # by the first buffer


def _unpack_product(fields: dict[str, Any]) -> IntegerProduct:
    """Return the weight on the CPU for exact integer products.

    It is unpacked once as long as its buffers exist.
    """
    tensors = tuple(fields["buffers"].values())
    is_tracked = not any(tensor.is_inference() for tensor in tensors)  # else nobody knows whether they were written
    versions = tuple(tensor._version for tensor in tensors) if is_tracked else ()
    cached = _unpacked.get(tensors[0]) if is_tracked else None
    if (
        cached
        and cached.versions == versions
        and all(a() is b for a, b in zip(cached.tensors, tensors[1:], strict=True))
    ):
        cached_product: IntegerProduct = cached.product
        return cached_product
    arrays = {buffer: tensor.detach().numpy().copy() for buffer, tensor in fields["buffers"].items()}
    product = IntegerProduct(PackedWeight(**{**fields, "buffers": arrays}))
    if is_tracked:
        _unpacked[tensors[0]] = _Unpacked(tuple(weakref.ref(tensor) for tensor in tensors[1:]), versions, product)
    return product


def _multiply(product: IntegerProduct, x_q: Any, x_scale: Any, bias: Any, out_dtype: torch.dtype) -> Any:
    # Of quantised activations everything; -128 is beyond what `product` counts exactly.
    clipped_activations = np.maximum(x_q, -127)
    accumulators = (
        product.accumulators(clipped_activations) if len(x_q) else np.zeros((0, product.pieces.shape[2]), np.int32)
    )
    if (clipped_activations != x_q).any():
        accumulators = accumulators + product.accumulators(x_q - clipped_activations)
    return reference.gemm_epilogue(accumulators, x_scale, product.scale, bias, name_of(out_dtype))


def _operands(name: str, x_q: Tensor, x_scale: Tensor, x_sum: Tensor | None, out_dtype: torch.dtype) -> tuple[Any, Any]:
    """Return x_q and x_scale as arrays. Raises ArgumentError for sums that are not those of x_q."""
    if name_of(out_dtype) not in DTYPES:
        raise ArgumentError(f"{name}: out_dtype", f"must be one of {', '.join(DTYPES)}", name_of(out_dtype))
    x, M = array_of(f"{name}: x_q", x_q, "int8", "M", "K"), len(x_q)
    if x_sum is not None:
        gemm.common.check_sums(name, {"x": x, "x_sum": array_of(f"{name}: x_sum", x_sum, "int32", M)})
    return x, array_of(f"{name}: x_scale", x_scale, "float32", M)


def _gemm_on_cpu(
    x_q: Tensor, x_scale: Tensor, x_sum: Tensor | None, weight: list[Tensor], bias: Tensor | None = None,
    *, layout: str, scheme: str, group: int = 0, out_dtype: torch.dtype,
) -> Tensor:  # fmt: skip
    name = "gemm_w4a8"
    x, scale = _operands(name, x_q, x_scale, x_sum, out_dtype)
    fields = _weight_fields(f"{name}: weight", weight, layout, scheme, x.shape[1], group)
    bias_array = None if bias is None else array_of(f"{name}: bias", bias, "float32", fields["N"])
    return tensor_of(_multiply(_unpack_product(fields), x, scale, bias_array, out_dtype), out_dtype)


def _gemm_on_cuda(
    x_q: Tensor, x_scale: Tensor, x_sum: Tensor | None, weight: list[Tensor], bias: Tensor | None = None,
    *, layout: str, scheme: str, group: int = 0, out_dtype: torch.dtype,
) -> Tensor:  # fmt: skip
    packed = _unchecked_weight(
        PackedWeight, **_weight_fields("gemm_w4a8: weight", weight, layout, scheme, x_q.shape[-1], group)
    )
    out = x_q.new_empty((x_q.shape[0], packed.N), dtype=out_dtype)
    return gemm.gemm_w4a8(x_q, x_scale, packed, x_sum=x_sum, bias=bias, out=out)


def _w8a8_on_cpu(
    x_q: Tensor, x_scale: Tensor, x_sum: Tensor, weight: Tensor, weight_scale: Tensor, *, out_dtype: torch.dtype
) -> Tensor:
    x, scale = _operands("gemm_w8a8", x_q, x_scale, x_sum, out_dtype)
    rows = array_of("gemm_w8a8: weight", weight, "int8", "N", x.shape[1])
    row_scales = array_of("gemm_w8a8: weight_scale", weight_scale, "float32", len(rows))
    sums = x.astype(np.float64) @ rows.astype(np.float64).T  # exact: integers below 2^53
    return tensor_of(
        reference.gemm_epilogue(sums.astype(np.int32), scale, row_scales, None, name_of(out_dtype)), out_dtype
    )


def _w8a8_on_cuda(
    x_q: Tensor, x_scale: Tensor, x_sum: Tensor, weight: Tensor, weight_scale: Tensor, *, out_dtype: torch.dtype
) -> Tensor:
    M, K = x_q.shape
    x = PackedActivations(layout="row_major", M=M, K=K, x_q=x_q, scale=x_scale, token_sum=x_sum)
    out = x_q.new_empty((M, weight.shape[0]), dtype=out_dtype)
    return gemm.gemm_w8a8(x, Level1Weight(weight, weight_scale, 127), out=out)


def _grouped_on_cpu(
    x_q: Tensor, x_scale: Tensor, x_sum: Tensor | None, weights: list[Tensor], offsets: Tensor,
    bias: Tensor | None = None, *, scheme: str, group: int = 0, out_dtype: torch.dtype,
) -> Tensor:  # fmt: skip
    name, E = "gemm_w4a8_grouped", len(offsets) - 1
    x, scale = _operands(name, x_q, x_scale, x_sum, out_dtype)
    fields = _weight_fields(f"{name}: weights", weights, "strips", scheme, x.shape[1], group, (E,))
    starts = array_of(f"{name}: offsets", offsets, "int32", E + 1)
    bias_array = None if bias is None else array_of(f"{name}: bias", bias, "float32", E, fields["N"])
    if starts[0] != 0 or starts[-1] != len(x) or (starts[1:] < starts[:-1]).any():
        raise ArgumentError(f"{name}: offsets", f"must rise from 0 to {len(x)}", starts.tolist())
    arrays = {buffer: tensor.detach().numpy() for buffer, tensor in fields["buffers"].items()}
    outputs = []
    for e, (start, stop) in enumerate(pairwise(starts.tolist())):
        expert = PackedWeight(**{**fields, "buffers": {buffer: array[e] for buffer, array in arrays.items()}})
        rows, expert_bias = slice(start, stop), None if bias_array is None else bias_array[e]
        outputs.append(_multiply(IntegerProduct(expert), x[rows], scale[rows], expert_bias, out_dtype))
    return tensor_of(np.concatenate(outputs), out_dtype)


def _grouped_on_cuda(
    x_q: Tensor, x_scale: Tensor, x_sum: Tensor | None, weights: list[Tensor], offsets: Tensor,
    bias: Tensor | None = None, *, scheme: str, group: int = 0, out_dtype: torch.dtype,
) -> Tensor:  # fmt: skip
    E = len(offsets) - 1
    fields = _weight_fields("gemm_w4a8_grouped: weights", weights, "strips", scheme, x_q.shape[-1], group, (E,))
    experts = _unchecked_weight(ExpertWeights, E=E, **fields)
    out = x_q.new_empty((x_q.shape[0], experts.N), dtype=out_dtype)
    return gemm.gemm_w4a8_grouped(x_q, x_scale, experts, offsets, x_sum=x_sum, bias=bias, out=out)


define(
    "gemm_w4a8(Tensor x_q, Tensor x_scale, Tensor? x_sum, Tensor[] weight, Tensor? bias=None, *, str layout,"
    " str scheme, int group=0, ScalarType out_dtype) -> Tensor",
    cuda=_gemm_on_cuda,
    cpu=_gemm_on_cpu,
    fake=lambda x_q, x_scale, x_sum, weight, bias=None, *, layout, scheme, group=0, out_dtype: x_q.new_empty(
        (x_q.shape[0], weight[-1].shape[-1]), dtype=out_dtype
    ),
)
define(
    "gemm_w8a8(Tensor x_q, Tensor x_scale, Tensor x_sum, Tensor weight, Tensor weight_scale, *, ScalarType out_dtype)"
    " -> Tensor",
    cuda=_w8a8_on_cuda,
    cpu=_w8a8_on_cpu,
    fake=lambda x_q, x_scale, x_sum, weight, weight_scale, *, out_dtype: x_q.new_empty(
        (x_q.shape[0], weight.shape[0]), dtype=out_dtype
    ),
)
define(
    "gemm_w4a8_grouped(Tensor x_q, Tensor x_scale, Tensor? x_sum, Tensor[] weights, Tensor offsets, Tensor? bias=None,"
    " *, str scheme, int group=0, ScalarType out_dtype) -> Tensor",
    cuda=_grouped_on_cuda,
    cpu=_grouped_on_cpu,
    fake=lambda x_q, x_scale, x_sum, weights, offsets, bias=None, *, scheme, group=0, out_dtype: x_q.new_empty(
        (x_q.shape[0], weights[-1].shape[-1]), dtype=out_dtype
    ),
)


# The cache


_NO_ROWS = np.zeros((1, 1), np.int32), np.zeros(1, np.int32)  # block table and lengths, at which no append looks


def _cache_fields(
    tensors: tuple[Any, Any, Any], settings: tuple[int, int, str, bool], channel: Sequence[Any] | None
) -> dict[str, Any]:
    """Return the fields of a KVCache.

    Arguments are (pool, block_table, lengths), (page_size, head_dim, scheme, rotated), and constants by channel.
    """
    if channel and len(channel) != 4:
        raise ArgumentError("channel", "must be k scale, k zero, v scale, v zero, or empty", f"{len(channel)} tensors")
    names = "pool", "block_table", "lengths", "page_size", "head_dim", "scheme", "rotated"
    fields = zip(names, (*tensors, *settings), strict=True)
    k_channel, v_channel = (tuple(channel[:2]), tuple(channel[2:])) if channel else (None, None)
    return {**dict(fields), "k_channel": k_channel, "v_channel": v_channel}


def _cache_on_cuda(
    name: str, tensors: tuple[Tensor, Any, Any], settings: tuple[int, int, str, bool], channel: _Channel
) -> KVCache:
    with naming(name):
        return KVCache(**_cache_fields(tensors, settings, channel))


def _cache_on_cpu(
    name: str, tensors: tuple[Tensor, Any, Any], settings: tuple[int, int, str, bool], channel: _Channel
) -> KVCache:
    pool = array_of(f"{name}: pool", tensors[0], "uint8", "pages", 2, "Hkv", "bytes")
    constants = [array_of(f"{name}: channel", constant, "float32", "Hkv", "D") for constant in channel or ()]
    with naming(name):
        return KVCache(**_cache_fields((pool, *tensors[1:]), settings, constants))


def _rope(name: str, cos: Tensor | None, sin: Tensor | None, positions: Tensor | None) -> tuple[Tensor, ...] | None:
    """Build `rope` of the public calls: both tables, with or without positions; or None."""
    if cos is not None and sin is not None:
        return (cos, sin) if positions is None else (cos, sin, positions)
    if cos is not None or sin is not None or positions is not None:
        passed_names = [
            label for label, tensor in (("cos", cos), ("sin", sin), ("positions", positions)) if tensor is not None
        ]
        raise ArgumentError(
            f"{name}: cos, sin", "must be given both, or neither and no positions", ", ".join(passed_names)
        )
    return None


def _angles(name: str, rope: tuple[Tensor, ...] | None, slots: Any, cache: KVCache) -> tuple[Any, Any]:
    """Return (cos, sin) f32 [T, D/2] of the tokens, after checking their slots; Nones without tables."""
    if rope is None:
        check_places(name, cache, slots, rows=0)
        return None, None
    T, half_dims, positions = len(slots), cache.head_dim // 2, rope[2:]
    cos, sin = (
        array_of(f"{name}: {label}", table, "float32", "R", half_dims)
        for label, table in zip(("cos", "sin"), rope, strict=False)
    )
    if len(cos) != len(sin) or len(cos) < (1 if positions else T):
        raise ArgumentError(f"{name}: cos, sin", f"must have {T} rows or more, or positions", [len(cos), len(sin)])
    token_positions = array_of(f"{name}: positions", positions[0], slots.dtype.name, T) if positions else np.arange(T)
    check_places(name, cache, slots, token_positions, rows=len(cos))
    token_positions = table_rows(token_positions, len(cos))
    return cos[token_positions], sin[token_positions]


def _rotate_and_write(
    name: str, cache: KVCache, k: Any, v: Any, slots: Tensor, rope: tuple[Tensor, ...] | None
) -> tuple[Any, Any]:
    """Rotate keys f32 [T, Hkv, D], and write them and values into the cache; the tokens' (cos, sin), or Nones."""
    slot_array = array_of(f"{name}: slots", slots, ("int32", "int64"), len(k))
    has_slot, angles = slot_array >= 0, _angles(name, rope, slot_array, cache)
    k = k if angles[0] is None else reference.rope(k, *angles)
    with naming(f"{name}: k"):
        keys = cache.quantize_keys(k[has_slot])
    with naming(f"{name}: v"):
        values = cache.quantize_values(v[has_slot])
    write_slots(cache, keys, values, slot_array[has_slot])
    return angles


def _append_on_cpu(
    k: Tensor, v: Tensor, pool: Tensor, slots: Tensor, cos: Tensor | None = None, sin: Tensor | None = None,
    positions: Tensor | None = None, *, page_size: int = 64, scheme: str = "kv4", channel: _Channel = None,
    rotated: bool = False,
) -> None:  # fmt: skip
    name, (H, D) = "append_kv4", k.shape[-2:]
    cache = _cache_on_cpu(name, (pool, *_NO_ROWS), (page_size, D, scheme, rotated), channel)
    keys = array_of(f"{name}: k", k.contiguous(), _HALVES, "T", cache.num_kv_heads, D)
    values = array_of(f"{name}: v", v.contiguous(), name_of(k.dtype), len(k), H, D)
    _rotate_and_write(name, cache, floats(keys), floats(values), slots, _rope(name, cos, sin, positions))


def _rope_append_on_cpu(
    qkv: Tensor, pool: Tensor, slots: Tensor, cos: Tensor, sin: Tensor, positions: Tensor | None = None,
    *, head_dim: int, page_size: int = 64, scheme: str = "kv4", channel: _Channel = None, rotated: bool = False,
) -> Tensor:  # fmt: skip
    name = "rope_append_kv4"
    cache = _cache_on_cpu(name, (pool, *_NO_ROWS), (page_size, head_dim, scheme, rotated), channel)
    array, kv_heads = array_of(f"{name}: qkv", qkv.contiguous(), _HALVES, "T", "(Hq + 2·Hkv)·D"), cache.num_kv_heads
    if array.shape[1] % (kv_heads * head_dim) or array.shape[1] < 3 * kv_heads * head_dim:
        rule = f"must be [T, (Hq + {2 * kv_heads})·{head_dim}], Hq a multiple of {kv_heads}"
        raise ArgumentError(f"{name}: qkv", rule, [*array.shape])
    q, k, v = np.split(floats(array).reshape(len(array), -1, head_dim), [-2 * kv_heads, -kv_heads], axis=1)
    angles = _rotate_and_write(name, cache, k, v, slots, _rope(name, cos, sin, positions))
    return tensor_of(convert_to_dtype(reference.rope(q, *angles), name_of(qkv.dtype)), qkv.dtype)


def _attend_on_cpu(
    name: str, q: Tensor, pool: Tensor, block_table: Tensor, lengths: Tensor, page_size: int, scheme: str,
    channel: _Channel, rotated: bool, scale: float | None, window: int | None, starts: Tensor | None,
) -> tuple[Any, Any]:  # fmt: skip
    """Compute what attention gives for q [.., Hq, D], f32, and its lse f32 [.., Hq]."""
    B, (Hq, D) = len(lengths) if starts is not None else len(q), q.shape[-2:]
    shape = ("B", "Hq", "D") if q.ndim == 3 or starts is not None else ("B", "T", "Hq", "D")
    queries = floats(array_of(f"{name}: q", q, _HALVES, *shape))
    table = array_of(f"{name}: block_table", block_table, "int32", B, "pages")
    row_lengths = array_of(f"{name}: lengths", lengths, "int32", B)
    cache = _cache_on_cpu(name, (pool, table, row_lengths), (page_size, D, scheme, rotated), channel)
    check_cache(name, cache)
    if Hq % cache.num_kv_heads:
        raise ArgumentError(f"{name}: q", f"Hq must be a multiple of the cache's {cache.num_kv_heads}", f"Hq={Hq}")
    outputs, lse = np.empty_like(queries), np.empty(queries.shape[:-1], np.float32)
    tables, table_index = np.unique(table, axis=0, return_inverse=True)  # rows of a prompt share theirs
    longest = np.zeros(len(tables), np.int32)
    np.maximum.at(longest, table_index, row_lengths)
    keys_and_values = [[tokens.dequantize() for tokens in pair] for pair in zip(
        *gather(replace(cache, block_table=tables, lengths=longest)), strict=True)]  # fmt: skip
    parts: list[Any] = [*range(B)] if starts is None else _chunks(name, starts, row_lengths, len(q))
    for b, (part, L) in enumerate(zip(parts, row_lengths, strict=True)):
        keys, values = (tokens[:L] for tokens in keys_and_values[table_index[b]])
        row_queries = cache.rotate(queries[part].reshape(-1, Hq, D))
        options: dict[str, Any] = {"scale": D**-0.5 if scale is None else scale, "window": window}
        attended, lse_of_row = reference.attention(row_queries, keys, values, **options)
        outputs[part], lse[part] = attended.reshape(outputs[part].shape), lse_of_row.reshape(lse[part].shape)
    return outputs, lse


def _chunks(name: str, starts: Tensor, lengths: Any, N: int) -> list[slice]:
    """Return the rows of each sequence's queries; ArgumentError for starts that do not fit the lengths and N rows."""
    first_rows = array_of(f"{name}: query_start_loc", starts, "int32", len(lengths) + 1)
    queries = np.diff(first_rows)
    if first_rows[0] != 0 or first_rows[-1] != N or (queries < 0).any():
        raise ArgumentError(f"{name}: query_start_loc", f"must rise from 0 to the {N} queries", first_rows.tolist())
    if (queries > lengths).any():
        b = int((queries > lengths).argmax())
        got = f"{int(lengths[b])} tokens, {int(queries[b])} queries in sequence {b}"
        raise ArgumentError(f"{name}: lengths", "a sequence's length must include its queries", got)
    return [slice(start, stop) for start, stop in pairwise(first_rows.tolist())]


def _attention_on_cpu(
    q: Tensor, pool: Tensor, block_table: Tensor, lengths: Tensor, *, page_size: int = 64, scheme: str = "kv4",
    channel: _Channel = None, rotated: bool = False, scale: float | None = None, window: int | None = None,
    query_start_loc: Tensor | None = None, workspace: Tensor | None = None, batch_invariant: bool = False,
) -> Tensor:  # fmt: skip
    options = page_size, scheme, channel, rotated, scale, window, query_start_loc
    outputs, _ = _attend_on_cpu("attention_kv4", q, pool, block_table, lengths, *options)
    return tensor_of(convert_to_dtype(outputs, name_of(q.dtype)), q.dtype)


def _attention_out_on_cpu(
    q: Tensor, pool: Tensor, block_table: Tensor, lengths: Tensor, out: Tensor, lse: Tensor | None = None, *,
    page_size: int = 64, scheme: str = "kv4", channel: _Channel = None, rotated: bool = False,
    scale: float | None = None, window: int | None = None, query_start_loc: Tensor | None = None,
    workspace: Tensor | None = None, batch_invariant: bool = False,
) -> None:  # fmt: skip
    name = "attention_kv4_out"
    out_array = array_of(f"{name}: out", out, name_of(q.dtype), *q.shape)
    lse_array = None if lse is None else array_of(f"{name}: lse", lse, "float32", *q.shape[:-1])
    options = page_size, scheme, channel, rotated, scale, window, query_start_loc
    outputs, logarithms = _attend_on_cpu(name, q, pool, block_table, lengths, *options)
    out_array[...] = convert_to_dtype(outputs, name_of(q.dtype))
    if lse_array is not None:
        lse_array[...] = logarithms


def _append_on_cuda(
    k: Tensor, v: Tensor, pool: Tensor, slots: Tensor, cos: Tensor | None = None, sin: Tensor | None = None,
    positions: Tensor | None = None, *, page_size: int = 64, scheme: str = "kv4", channel: _Channel = None,
    rotated: bool = False,
) -> None:  # fmt: skip
    cache = _cache_on_cuda("append_kv4", (pool, *_NO_ROWS), (page_size, k.shape[-1], scheme, rotated), channel)
    attention.append_kv4(k, v, cache, slots, rope=_rope("append_kv4", cos, sin, positions))


def _rope_append_on_cuda(
    qkv: Tensor, pool: Tensor, slots: Tensor, cos: Tensor, sin: Tensor, positions: Tensor | None = None,
    *, head_dim: int, page_size: int = 64, scheme: str = "kv4", channel: _Channel = None, rotated: bool = False,
) -> Tensor:  # fmt: skip
    cache = _cache_on_cuda("rope_append_kv4", (pool, *_NO_ROWS), (page_size, head_dim, scheme, rotated), channel)
    options = {"rope": _rope("rope_append_kv4", cos, sin, positions), "out": _empty_queries(qkv, pool, head_dim)}
    return attention.rope_append_kv4(qkv, cache, slots, **options)


def _empty_queries(qkv: Tensor, pool: Tensor, head_dim: int) -> Tensor:
    return qkv.new_empty((qkv.shape[0], qkv.shape[1] // head_dim - 2 * pool.shape[2], head_dim))


def _attention_on_cuda(
    q: Tensor, pool: Tensor, block_table: Tensor, lengths: Tensor, *, page_size: int = 64, scheme: str = "kv4",
    channel: _Channel = None, rotated: bool = False, scale: float | None = None, window: int | None = None,
    query_start_loc: Tensor | None = None, workspace: Tensor | None = None, batch_invariant: bool = False,
) -> Tensor:  # fmt: skip
    out = torch.empty_like(q)
    _attention_out_on_cuda(
        q, pool, block_table, lengths, out, page_size=page_size, scheme=scheme, channel=channel, rotated=rotated,
        scale=scale, window=window, query_start_loc=query_start_loc, workspace=workspace,
        batch_invariant=batch_invariant,
    )  # fmt: skip
    return out


def _attention_out_on_cuda(
    q: Tensor, pool: Tensor, block_table: Tensor, lengths: Tensor, out: Tensor, lse: Tensor | None = None, *,
    page_size: int = 64, scheme: str = "kv4", channel: _Channel = None, rotated: bool = False,
    scale: float | None = None, window: int | None = None, query_start_loc: Tensor | None = None,
    workspace: Tensor | None = None, batch_invariant: bool = False,
) -> None:  # fmt: skip
    cache = _cache_on_cuda(
        "attention_kv4", (pool, block_table, lengths), (page_size, q.shape[-1], scheme, rotated), channel
    )
    is_chunked = query_start_loc is not None
    arrays = None if workspace is None else _carve_workspace(workspace, q.shape[-1], is_chunked=is_chunked)
    out_arrays = out if lse is None else (out, lse)
    options: dict[str, Any] = {"scale": scale, "window": window, "return_lse": lse is not None}
    options["batch_invariant"] = batch_invariant
    attention.attention_kv4(q, cache, query_start_loc=query_start_loc, out=out_arrays, workspace=arrays, **options)


define(
    "append_kv4(Tensor k, Tensor v, Tensor(a!) pool, Tensor slots, Tensor? cos=None, Tensor? sin=None,"
    ' Tensor? positions=None, *, int page_size=64, str scheme="kv4", Tensor[]? channel=None, bool rotated=False) -> ()',
    cuda=_append_on_cuda,
    cpu=_append_on_cpu,
    fake=lambda *args, **kwargs: None,
)
define(
    "rope_append_kv4(Tensor qkv, Tensor(a!) pool, Tensor slots, Tensor cos, Tensor sin, Tensor? positions=None, *,"
    ' int head_dim, int page_size=64, str scheme="kv4", Tensor[]? channel=None, bool rotated=False) -> Tensor',
    cuda=_rope_append_on_cuda,
    cpu=_rope_append_on_cpu,
    fake=lambda qkv, pool, slots, cos, sin, positions=None, *, head_dim, **kwargs: _empty_queries(qkv, pool, head_dim),
)
define(
    "attention_kv4(Tensor q, Tensor pool, Tensor block_table, Tensor lengths, *, int page_size=64,"
    ' str scheme="kv4", Tensor[]? channel=None, bool rotated=False, float? scale=None, int? window=None,'
    " Tensor? query_start_loc=None, Tensor(a!)? workspace=None, bool batch_invariant=False) -> Tensor",
    cuda=_attention_on_cuda,
    cpu=_attention_on_cpu,
    fake=lambda q, *args, **kwargs: torch.empty_like(q),
)
define(
    "attention_kv4_out(Tensor q, Tensor pool, Tensor block_table, Tensor lengths, Tensor(a!) out,"
    ' Tensor(b!)? lse=None, *, int page_size=64, str scheme="kv4", Tensor[]? channel=None, bool rotated=False,'
    " float? scale=None, int? window=None, Tensor? query_start_loc=None, Tensor(c!)? workspace=None,"
    " bool batch_invariant=False) -> ()",
    cuda=_attention_out_on_cuda,
    cpu=_attention_out_on_cpu,
    fake=lambda *_, **__: None,
)


# The memory that attention needs on a GPU


class _KernelArrays(NamedTuple):
    """Arrays of one kernel in a workspace: name, offset in bytes, (shape, dtype) and owner of each."""

    kernel: str
    arrays: tuple[tuple[str, int, tuple[Any, str], "_Owner"], ...]


class _WorkspacePlan(NamedTuple):
    """Places of the kernels' arrays in a workspace of `nbytes` bytes; no `chunks` if the GPU cannot run that kernel."""

    decode: _KernelArrays
    chunks: _KernelArrays | None
    nbytes: int


class _Owner(NamedTuple):
    """Stands in a view for the tensor, which the caller of the operator keeps."""

    nbytes: int


def attention_workspace(head_dim: int, device: torch.device | str = "cuda") -> Tensor:
    """Make the `workspace` of the operator `attention_kv4` for heads of that size: u8 zeros, none on the CPU.

    It serves calls with `query_start_loc` and calls without, but none of the latter with `batch_invariant`. In a CUDA
    graph the operator needs one, and so does each of two calls that may run at the same time.
    """
    device = torch.device(device)
    if device.type != "cuda":
        return torch.zeros(0, dtype=torch.uint8, device=device)
    with torch.cuda.device(device):
        return torch.zeros(
            _plan_workspace(head_dim, torch.cuda.current_device()).nbytes, dtype=torch.uint8, device="cuda"
        )


def _plan_workspace(head_dim: int, device: int) -> _WorkspacePlan:
    """Place the arrays of this device's attention kernels in one workspace; the device must be the current one."""
    return _plan_workspace_for(gpu.target(), head_dim, device)


@cache
def _plan_workspace_for(target: str | None, head_dim: int, device: int) -> _WorkspacePlan:
    """Plan the workspace while kernels are compiled for this target, the current one."""
    sms, step = gpu.device_info().sms, choose(AttentionOptions(backend="gpu"))
    decode, end = _place_arrays(step.spec.name, step.max_memory(head_dim, sms), 0)
    if gpu.why_not(PREFILL.arch, exact=PREFILL.exact_arch):
        return _WorkspacePlan(decode, None, end)
    chunks, end = _place_arrays(PREFILL.name, chunk_memory(head_dim, sms), end)
    return _WorkspacePlan(decode, chunks, end)


def _place_arrays(kernel: str, scratches: Iterable[Scratch], offset: int) -> tuple[_KernelArrays, int]:
    """Place a kernel's arrays from an offset on; return them and the offset behind them."""
    arrays = []
    for scratch in scratches:
        arrays.append((scratch.name, offset, (scratch.shape, scratch.dtype.name), _Owner(scratch.nbytes)))
        offset += ceil_div(scratch.nbytes, 256) * 256
    return _KernelArrays(kernel, tuple(arrays)), offset


def _carve_workspace(workspace: Tensor, head_dim: int, *, is_chunked: bool) -> attention.AttentionWorkspace | None:
    """Return the parts of a workspace that a call needs, by their names.

    Return None for a kernel that needs none.
    """
    start, _, dtype, device, _ = gpu.view("attention_kv4: workspace", workspace)
    plan = _plan_workspace(head_dim, device)
    if dtype != "uint8" or workspace.numel() < plan.nbytes:
        rule = f"must be attention_workspace({head_dim}), uint8 of {plan.nbytes} bytes"
        raise ArgumentError("attention_kv4: workspace", rule, f"{dtype} of {workspace.nbytes} bytes")
    planned = plan.chunks if is_chunked else plan.decode
    if planned is None:
        return None
    views = {name: gpu.View(start + offset, *kind, device, owner) for name, offset, kind, owner in planned.arrays}
    return attention.AttentionWorkspace(kernel=planned.kernel, views=views)
