"""`append_kv4` and `rope_append_kv4`: new tokens of any array library into a KV cache, in one launch."""

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np

from ptxlab import gpu
from ptxlab.errors import ArgumentError, UnavailableError
from ptxlab.io.dynamo import break_graph
from ptxlab.lowbit import reference
from ptxlab.lowbit.kernels.attention.append import APPEND, DTYPES, INDICES, ROPE_APPEND, rows_with_gaps, table_rows
from ptxlab.lowbit.kernels.attention.common import ROTATED_CONSTANTS, channel_constants
from ptxlab.lowbit.kernels.attention.options import AppendOptions, RopeAppendOptions
from ptxlab.lowbit.kernels.operation import (
    CallArray,
    DeviceMemory,
    Operation,
    Prepared,
    Results,
    copy_to_host,
    dtype_of,
)
from ptxlab.lowbit.kernels.options import document_options
from ptxlab.lowbit.layout import KVCache
from ptxlab.lowbit.quant import KV_SCHEMES
from ptxlab.runtime import run_spec
from ptxlab.runtime.arguments import require_on_host
from ptxlab.runtime.plan import Plan
from ptxlab.sources import sources_of_kernel
from ptxlab.spec import KernelSpec
from ptxlab.spec.dtypes import dtype_in, floats, storage
from ptxlab.validate import shape_of


@break_graph
@document_options(AppendOptions)
def append_kv4(
    k: Any,
    v: Any,
    cache: KVCache,
    slots: Any,
    *,
    rope: tuple[Any, ...] | None = None,
    check: bool = False,
    backend: str | None = None,
    programmatic: bool = False,
) -> None:
    """Rotate and quantise new keys, quantise new values, and write them into the cache's pool (QServe §5.1).

    The bytes are those of `quant.quantize_kv` and `reference.rope`, one token per sequence or whole prompts alike; the
    rest of the pool stays as it is, as do table and lengths. Keys of a rotated cache are `reference.rotate_heads` of
    those behind RoPE. On the GPU a call only enqueues one kernel, on the
    caller's stream, and allocates nothing, so that it can be captured into a CUDA graph. Nothing looks at the values
    then: a token with a NaN or an infinity gets a scale that is not finite.

    Args:
        k, v: [T, Hkv, D], T >= 0, of float16 or bfloat16 (also as its bits, uint16), both the same; NumPy, CuPy,
            PyTorch or JAX. Tokens may lie apart, as in views of a QKV projection's rows: any multiple of 16 bytes.
        cache: in whatever of the four schemes, where k and v are. Its pool is written in place.
        slots: s32 or s64 [T], page·page_size + offset of each token; of a negative one (padding) nothing is written,
            and its k, v and position may be anything. No slot may be there twice.
        rope: (cos, sin), f32 [T or more, D/2] each, in the order of the tokens, to rotate k by (halves are pairs); or
            (cos, sin, positions), tables of all positions f32 [positions, D/2], and positions [T] of the slots' dtype.
        {options}

    Raises:
        ArgumentError: the argument, the rule and the value; nothing was written. On the host also for what
            `quantize_kv` refuses. On the GPU, unless `check`, slots outside the pool write beyond it.
        UnavailableError: the kernel does not run here.
    """
    options = AppendOptions.of(backend, programmatic, check)
    tables = _tables(APPEND, cache, rope)
    tokens = {"k": k, "v": v}
    k, k_pitch = gpu.flat_rows(f"{APPEND.name}: k", k)
    v, v_pitch = gpu.flat_rows(f"{APPEND.name}: v", v)
    arrays = {"k": k, "v": v, "pool": cache.pool, "slots": slots, **tables}
    if cache.k_channel is not None:  # a decoder makes this call in every layer: no call for nothing
        arrays |= channel_constants(cache)
    pitches = {"k_pitch": k_pitch, "v_pitch": v_pitch}
    _APPEND(options, (*cache.description, k_pitch, v_pitch), arrays, cache, tokens, pitches)


@break_graph
@document_options(RopeAppendOptions)
def rope_append_kv4(
    qkv: Any,
    cache: KVCache,
    slots: Any,
    *,
    rope: tuple[Any, ...],
    out: Any = None,
    keys: Any = None,
    check: bool = False,
    backend: str | None = None,
    programmatic: bool = False,
) -> Any:
    """Rotate queries and append keys and values, in one launch after the QKV projection (QServe §5.1).

    The pool has the same bytes as after `append_kv4` of the keys and values, and q is `reference.rope` of the queries,
    rounded once. A call allocates at most q; with `out` it can be captured into a CUDA graph.

    Args:
        qkv: [T, (Hq + 2·Hkv)·D] of float16 or bfloat16 (also as its bits, uint16), as the GEMM leaves it: a token's
            queries, then its keys, then its values. Hq follows from the width; it is a multiple of the cache's heads.
            Rows may lie apart, any multiple of 16 bytes.
        cache: as in `append_kv4`.
        slots: as in `append_kv4`. The queries of padding are rotated like all others.
        rope: as in `append_kv4`: (cos, sin), or (cos, sin, positions); `reference.rope_tables` makes tables. On the
            GPU a position outside of them, which only padding may have, reads their last row.
        out: [T, Hq, D] like qkv, to write q into, in other memory.
        keys: [T, Hkv, D] like qkv, for the keys behind RoPE, rounded once as q is (an attention that reads no cache
            takes them), in other memory; or None. Neither q nor these are rotated as those of a rotated cache.
        {options}

    Returns:
        q [T, Hq, D] of qkv's dtype and library.

    Raises:
        ArgumentError: as in `append_kv4`.
        UnavailableError: the kernel does not run here.
    """
    if rope is None:
        raise ArgumentError(f"{ROPE_APPEND.name}: rope", "must be (cos, sin) or (cos, sin, positions)", "None")
    options = RopeAppendOptions.of(backend, programmatic, check)
    tables = _tables(ROPE_APPEND, cache, rope)
    tokens = {"qkv": qkv}
    qkv, pitch = gpu.flat_rows(f"{ROPE_APPEND.name}: qkv", qkv)
    arrays = {"qkv": qkv, "pool": cache.pool, "slots": slots, **tables, **channel_constants(cache), "q": out}
    if keys is not None:
        arrays["keys"] = keys
    outputs = _ROPE_APPEND(options, (*cache.description, pitch), arrays, cache, tokens, {"pitch": pitch})
    return outputs["q"] if out is None else out


def _tables(spec: KernelSpec, cache: Any, rope: Any) -> dict[str, Any]:
    """Return the arrays of `rope` by name; raise ArgumentError for what is no cache or no tables."""
    if not isinstance(cache, KVCache):
        raise ArgumentError(f"{spec.name}: cache", "must be a KVCache", type(cache).__name__)
    if rope is None:
        return {}
    if not isinstance(rope, tuple) or len(rope) not in (2, 3):
        raise ArgumentError(f"{spec.name}: rope", "must be (cos, sin) or (cos, sin, positions)", type(rope).__name__)
    tables = dict(zip(("cos", "sin", "positions"), rope, strict=False))
    for name, array in tables.items():
        if array is None:
            raise ArgumentError(f"{spec.name}: rope {name}", "must be an array", "None")
    return tables


class _AppendCall(NamedTuple):
    """Arrays by argument of the kernel, those with gaps between tokens flat; `shapes` of new tokens; sizes.

    `dtype` is that of new tokens, `index_dtype` that of slots and positions.
    """

    spec: KernelSpec
    arrays: Mapping[str, Any]
    shapes: Mapping[str, tuple[int, ...]]
    cache: KVCache
    sizes: dict[str, int]
    dtype: str
    index_dtype: str
    options: AppendOptions

    @property
    def name(self) -> str:
        """Name of the call."""
        return self.spec.name

    @property
    def constants(self) -> dict[str, int]:
        """Constants for the dtypes and for rotated keys."""
        rotated_constants = ROTATED_CONSTANTS if self.cache.rotated else {}
        return {"BF16": DTYPES.index(self.dtype), "INDEX": INDICES.index(self.index_dtype), **rotated_constants}

    @property
    def config(self) -> dict[str, int]:
        return self.spec.config_for(self.sizes) | self.constants

    @property
    def key(self) -> tuple[Any, ...]:
        return (*self.sizes.values(), self.cache.rotated, self.dtype, self.index_dtype)

    @property
    def is_empty(self) -> bool:
        return self.sizes["T"] == 0

    @property
    def operands(self) -> Iterator[CallArray]:
        """Operands of the call: all given arrays, and q; the pool is written in place."""
        labels = {"pool": "cache.pool", "q": "out", "cos": "rope cos", "sin": "rope sin", "positions": "rope positions"}
        labels |= {name: f"cache.{name[0]}_channel {name[2:]}" for name in channel_constants(self.cache)}
        constants = self.constants
        for name, array in self.arrays.items():
            arg = self.spec.arg(name)
            label = f"{self.name}: {labels.get(name, name)}"
            shape = shape_of(array) if name in self.shapes else arg.resolve(self.sizes)
            yield CallArray(name, label, array, dtype_in(arg.dtype, constants), shape)


_Shapes = Mapping[str, tuple[int, ...]]


def _check_pair(
    options: AppendOptions,
    arrays: Mapping[str, Any],
    cache: KVCache,
    tokens: Mapping[str, Any],
    pitches: Mapping[str, int],
) -> _AppendCall:
    """Build the call of `append_kv4`; raise ArgumentError for operands that do not fit together."""
    H, D = cache.num_kv_heads, cache.head_dim
    shapes = {name: shape_of(array) for name, array in tokens.items()}
    shape = shapes["k"]
    if len(shape) != 3 or shape[1:] != (H, D):
        raise ArgumentError(f"{APPEND.name}: k", f"must be [T, {H}, {D}] for this cache", f"shape {list(shape)}")
    if shapes["v"] != shape:
        raise ArgumentError(f"{APPEND.name}: v", f"shape {list(shape)}", list(shapes["v"]))
    return _check(APPEND, options, arrays, "k", cache, shapes, {"T": shape[0]}, pitches)


def _check_rows(
    options: AppendOptions,
    arrays: Mapping[str, Any],
    cache: KVCache,
    tokens: Mapping[str, Any],
    pitches: Mapping[str, int],
) -> _AppendCall:
    """Build the call of `rope_append_kv4`."""
    shape, heads = shape_of(tokens["qkv"]), cache.num_kv_heads * cache.head_dim
    if len(shape) != 2 or shape[1] % heads or shape[1] < 3 * heads:
        rule = f"must be [T, (Hq + {2 * cache.num_kv_heads})·{cache.head_dim}] for this cache, "
        rule += f"Hq a multiple of {cache.num_kv_heads}"
        raise ArgumentError(f"{ROPE_APPEND.name}: qkv", rule, f"shape {list(shape)}")
    sizes = {"T": shape[0], "ratio": shape[1] // heads - 2, "kept": int("keys" in arrays)}
    return _check(ROPE_APPEND, options, arrays, "qkv", cache, {"qkv": shape}, sizes, pitches)


def _check(
    spec: KernelSpec,
    options: AppendOptions,
    arrays: Mapping[str, Any],
    tokens: str,
    cache: KVCache,
    shapes: _Shapes,
    sizes: dict[str, int],
    pitches: Mapping[str, int],
) -> _AppendCall:
    """Check what holds for both calls; `tokens` names the array of new tokens."""
    x, slots, scheme = arrays[tokens], arrays["slots"], KV_SCHEMES[cache.scheme]
    if dtype_of(x) not in DTYPES:
        raise ArgumentError(f"{spec.name}: {tokens}", f"dtype {' or '.join(DTYPES)}", dtype_of(x))
    if dtype_of(slots) not in INDICES:
        raise ArgumentError(f"{spec.name}: slots", f"dtype {' or '.join(INDICES)}", dtype_of(slots))
    R = _rows(spec.name, arrays, sizes["T"]) if "cos" in arrays else 0
    if scheme.bits == 8:  # symmetric
        arrays = {name: array for name, array in arrays.items() if name not in ("k_zero", "v_zero")}
    sizes |= {"H": cache.num_kv_heads, "D": cache.head_dim, "pages": cache.pages, "size": cache.page_size}
    sizes |= {"bits": scheme.bits, "channel": int(scheme.by_channel), "R": R, **pitches}
    return _AppendCall(spec, arrays, shapes, cache, sizes, dtype_of(x), dtype_of(slots), options)


def _rows(name: str, arrays: Mapping[str, Any], T: int) -> int:
    """Return the number of rows of the tables; raise ArgumentError if there are too few."""
    rows = tuple(getattr(arrays["cos"], "shape", ()))[:1]
    min_rows = 1 if "positions" in arrays else T
    if rows < (min_rows,):
        rule = f"must have {min_rows} rows or more" + ("" if "positions" in arrays else ", one for each token")
        raise ArgumentError(f"{name}: rope cos", rule, *rows or ("no array",))
    return int(rows[0])


def _prepare(call: _AppendCall) -> Prepared:
    spec = call.spec
    if reason := gpu.why_not(spec.arch):
        raise UnavailableError(f'{spec.name}: {reason}; pass backend="emulator" with NumPy arrays')
    return Prepared(spec.name, lambda: (Plan(spec, call.config, call.sizes, programmatic=call.options.programmatic),))


def _check_values(call: _AppendCall, prepared: Prepared, memory: DeviceMemory | None) -> None:
    """Raise ArgumentError for slots and positions on the device that the kernel must not be given."""
    slots, positions = (copy_to_host(call.name, call.arrays.get(name)) for name in ("slots", "positions"))
    check_places(call.name, call.cache, slots, positions, rows=call.sizes["R"])


_WRITTEN = ("pool", "q", "keys")


def _on_host(call: _AppendCall) -> Results:
    """Run on NumPy arrays, or PyTorch's on the CPU: in the emulator, or copied to the GPU and back."""
    arrays = {}
    for operand in call.operands:
        if operand.array is not None:
            array = require_on_host(*operand[1:5], written=operand.name in _WRITTEN)
            is_new = operand.name in call.shapes
            arrays[operand.name] = (
                rows_with_gaps(array, call.spec.arg(operand.name).resolve(call.sizes)) if is_new else array
            )
    new_operands = [operand for operand in call.operands if operand.array is None]
    if call.is_empty:
        outputs = {operand.name: np.empty(operand.shape, storage(operand.dtype)) for operand in new_operands}
    else:
        call.spec.check_sizes(call.sizes)
        check_places(call.name, call.cache, arrays["slots"], arrays.get("positions"), rows=call.sizes["R"])
        _check_tokens(call, arrays)
        out: dict[str, Any] = {name: arrays.pop(name) for name in _WRITTEN if name in arrays}
        outputs = run_spec(
            call.spec,
            sources_of_kernel(call.name)[0],
            arrays,
            sizes=call.sizes,
            out=out,
            backend=call.options.backend,
            config=call.config,
            programmatic=call.options.programmatic,
        ).outputs
    return {
        operand.name: gpu.like(outputs[operand.name], call.arrays["qkv"], operand.dtype) for operand in new_operands
    }


def check_places(
    name: str, cache: KVCache, slots: np.ndarray, positions: np.ndarray | None = None, *, rows: int
) -> None:
    """Raise ArgumentError for a slot outside the pool, one that is there twice, or a position without a table's row."""
    pool_tokens, is_token = cache.pages * cache.page_size, slots >= 0
    _refuse(f"{name}: slots", f"must be below {pool_tokens}, the pages' tokens", slots, slots >= pool_tokens)
    _, first_index = np.unique(slots, return_index=True)
    is_repeated = is_token.copy()
    is_repeated[first_index] = False
    _refuse(f"{name}: slots", "must be distinct", slots, is_repeated)
    if positions is not None:
        is_outside = is_token & ((positions < 0) | (positions >= rows))
        _refuse(f"{name}: rope positions", f"must lie in 0..{rows - 1}", positions, is_outside)


def _refuse(argument: str, rule: str, array: np.ndarray, wrong: np.ndarray) -> None:
    if wrong.any():
        t = int(wrong.argmax())
        raise ArgumentError(argument, rule, f"{argument.rpartition(' ')[2]}[{t}] = {array[t]}")


def _check_tokens(call: _AppendCall, arrays: dict[str, np.ndarray]) -> None:
    """Raise ArgumentError for what `quantize_kv` refuses."""
    is_token, cache = (arrays["slots"] >= 0)[:, None, None], call.cache
    if "qkv" in arrays:
        width = call.shapes["qkv"][1]
        heads = arrays["qkv"][:, :width].reshape(len(is_token), -1, cache.head_dim)[:, -2 * cache.num_kv_heads :]
        tokens = np.split(heads, 2, axis=1)
    else:
        width = cache.num_kv_heads * cache.head_dim
        tokens = [arrays[name][:, :width].reshape(call.shapes[name]) for name in "kv"]
    k, v = (np.where(is_token, floats(x), np.float32(0)) for x in tokens)
    if "cos" in arrays:
        table_row = table_rows(arrays.get("positions", np.arange(len(k))), len(arrays["cos"]))
        k = reference.rope(k, arrays["cos"][table_row], arrays["sin"][table_row])
    k_channel, v_channel = (
        channel and tuple(gpu.as_array(f"{call.name}: {name}", array) for array in channel)
        for name, channel in (("k", cache.k_channel), ("v", cache.v_channel))
    )
    cache = replace(cache, k_channel=k_channel, v_channel=v_channel)
    for name, x, quantize in (("k", k, cache.quantize_keys), ("v", v, cache.quantize_values)):
        try:
            quantize(x)
        except ArgumentError as error:
            raise ArgumentError(
                f"{call.name}: {name}", error.rule, str(error.value).replace("x[", f"{name}[")
            ) from None


_APPEND = Operation(APPEND.name, _check_pair, _prepare, _on_host, _check_values)
_ROPE_APPEND = Operation(
    ROPE_APPEND.name,
    _check_rows,
    _prepare,
    _on_host,
    _check_values,
    disjoint={"qkv": "qkv", "q": "out", "keys": "keys"},
)
