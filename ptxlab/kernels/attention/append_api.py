"""`append_kv4`: new keys and values of any array library into a KV cache, in one launch."""

from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np

from ptxlab import gpu, quant, reference
from ptxlab.errors import ArgumentError, UnavailableError
from ptxlab.kernels.attention.append import APPEND, DTYPES, INDICES, values
from ptxlab.kernels.attention.common import channels_of
from ptxlab.kernels.operation import CallArray, DeviceMemory, Operation, Prepared, Results, check_how, copied, dtype_of
from ptxlab.layout import KVCache
from ptxlab.quant import KV_SCHEMES
from ptxlab.runtime import run_spec
from ptxlab.runtime.arguments import require_on_host
from ptxlab.runtime.plan import Plan
from ptxlab.sources import of_kernel
from ptxlab.validate import shape_of

NAME = "append_kv4"


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
    """Rotate and quantise new keys, quantise new values, and write them into the cache's pool (QServe §4.2, §5.3).

    The bytes are those of `quant.quantize_kv` and `reference.rope`, one token per sequence or whole prompts alike; the
    rest of the pool stays as it is, as do table and lengths. On the GPU a call only enqueues one kernel, on the
    caller's stream, and allocates nothing, so that it can be captured into a CUDA graph. Nothing looks at the values
    then: a token with a NaN or an infinity gets a scale that is not finite.

    Args:
        k, v: [T, Hkv, D], T >= 0, of float16 or bfloat16 (also as its bits, uint16), both the same; NumPy, CuPy,
            PyTorch or JAX.
        cache: in whatever of the four schemes, where k and v are. Its pool is written in place.
        slots: s32 or s64 [T], page·page_size + offset of each token; of a negative one (padding) nothing is written,
            and its k, v and position may be anything. No slot may be there twice.
        rope: (cos, sin), f32 [T or more, D/2] each, in the order of the tokens, to rotate k by (halves are pairs); or
            (cos, sin, positions), tables of all positions f32 [positions, D/2], and positions [T] of the slots' dtype.
        check: look at slots and positions on a GPU too, for which the call waits. On the host that is always done.
        backend: `gpu` or `emulator`; by default the GPU where one will do. Host arrays are copied there and back.
        programmatic: the call may begin before the kernel before it on the stream has ended, for which it waits by
            itself before it reads or writes anything. Of no effect on host arrays.

    Raises:
        ArgumentError: the argument, the rule and the value; nothing was written. On the host also for what
            `quantize_kv` refuses. On the GPU, unless `check`, slots outside the pool write beyond it.
        UnavailableError: the kernel does not run here.
    """
    if not isinstance(cache, KVCache):
        raise ArgumentError(f"{NAME}: cache", "must be a KVCache", type(cache).__name__)
    if rope is not None and (not isinstance(rope, tuple) or len(rope) not in (2, 3)):
        raise ArgumentError(f"{NAME}: rope", "must be (cos, sin) or (cos, sin, positions)", type(rope).__name__)
    tables = {} if rope is None else dict(zip(("cos", "sin", "positions"), rope, strict=False))
    arrays = {"k": k, "v": v, "pool": cache.pool, "slots": slots, **tables, **channels_of(cache)}
    options = cache.scheme, cache.page_size, cache.head_dim, backend, programmatic, check
    _APPEND(options, arrays, lambda: _checked(arrays, cache, backend, programmatic, check))


class _AppendCall(NamedTuple):
    """The arrays given, by argument of the kernel, sizes, and the dtypes of k and v and of slots and positions."""

    given: dict[str, Any]
    cache: KVCache
    sizes: dict[str, int]
    dtype: str
    place: str
    backend: str | None
    programmatic: bool
    check: bool

    @property
    def config(self) -> dict[str, int]:
        dtypes = {"BF16": DTYPES.index(self.dtype), "INDEX": INDICES.index(self.place)}
        return APPEND.config_for(self.sizes) | dtypes

    @property
    def key(self) -> tuple[Any, ...]:
        return (*self.sizes.values(), self.dtype, self.place, self.programmatic)

    @property
    def is_empty(self) -> bool:
        return self.sizes["T"] == 0

    @property
    def operands(self) -> Iterator[CallArray]:
        """All that is given; the pool is written in place."""
        T, H, D, R = (self.sizes[name] for name in ("T", "H", "D", "R"))
        known: dict[str, tuple[str, str, tuple[int, ...]]] = {
            "k": ("k", self.dtype, (T, H, D)),
            "v": ("v", self.dtype, (T, H, D)),
            "pool": ("cache.pool", "uint8", tuple(self.cache.pool.shape)),
            "slots": ("slots", self.place, (T,)),
            "cos": ("rope cos", "float32", (R, D // 2)),
            "sin": ("rope sin", "float32", (R, D // 2)),
            "positions": ("rope positions", self.place, (T,)),
        }
        for name in channels_of(self.cache):
            known[name] = (f"cache.{name[0]}_channel {name[2:]}", "float32", (H, D))
        for name, array in self.given.items():
            label, dtype, shape = known[name]
            yield CallArray(name, f"{NAME}: {label}", array, dtype, shape)


def _checked(given: dict[str, Any], cache: KVCache, backend: Any, programmatic: Any, check: Any) -> _AppendCall:
    """The call; raises ArgumentError for what does not fit together."""
    k, slots = given["k"], given["slots"]
    shape, known = shape_of(k), KV_SCHEMES[cache.scheme]
    H, D = cache.num_kv_heads, cache.head_dim
    if len(shape) != 3 or shape[1:] != (H, D):
        raise ArgumentError(f"{NAME}: k", f"must be [T, {H}, {D}] for this cache", f"shape {list(shape)}")
    if dtype_of(k) not in DTYPES:
        raise ArgumentError(f"{NAME}: k", f"dtype {' or '.join(DTYPES)}", dtype_of(k))
    if dtype_of(slots) not in INDICES:
        raise ArgumentError(f"{NAME}: slots", f"dtype {' or '.join(INDICES)}", dtype_of(slots))
    R = _rows(given, shape[0]) if "cos" in given else 0
    check_how(NAME, backend, programmatic=programmatic, check=check)
    if known.bits == 8:  # symmetric
        given = {name: array for name, array in given.items() if name not in ("k_zero", "v_zero")}
    sizes = {"T": shape[0], "H": H, "D": D, "pages": cache.pages, "size": cache.page_size, "bits": known.bits}
    sizes |= {"channel": int(known.by_channel), "R": R}
    return _AppendCall(given, cache, sizes, dtype_of(k), dtype_of(slots), backend, programmatic, check)


def _rows(given: dict[str, Any], T: int) -> int:
    """Rows of the tables; ArgumentError if there are too few of them."""
    rows = tuple(getattr(given["cos"], "shape", ()))[:1]
    least = 1 if "positions" in given else T
    if rows < (least,):
        rule = f"must have {least} rows or more" + ("" if "positions" in given else ", one for each token")
        raise ArgumentError(f"{NAME}: rope cos", rule, *rows or ("no array",))
    return int(rows[0])


def _prepare(call: _AppendCall) -> Prepared:
    if reason := gpu.why_not(APPEND.arch):
        raise UnavailableError(f'{NAME}: {reason}; pass backend="emulator" with NumPy arrays')
    return Prepared(APPEND.name, lambda: (Plan(APPEND, call.config, call.sizes, programmatic=call.programmatic),))


def _look(call: _AppendCall, prepared: Prepared, used: DeviceMemory | None) -> None:
    """Raise ArgumentError for slots and positions on the device that the kernel must not be given."""
    _check_places(call, *(copied(NAME, call.given.get(name)) for name in ("slots", "positions")))


def _on_host(call: _AppendCall) -> Results:
    """NumPy, or PyTorch on the CPU: in the emulator, or copied to the GPU and back."""
    arrays = {}
    for operand in call.operands:
        arrays[operand.name] = require_on_host(*operand[1:5], written=operand.name == "pool")
    if call.is_empty:
        return {}
    APPEND.check_sizes(call.sizes)
    _check_places(call, arrays["slots"], arrays.get("positions"))
    _check_tokens(call, arrays)
    out = {"pool": arrays.pop("pool")}
    source = of_kernel(APPEND.name)[0]
    run_spec(APPEND, source, arrays, sizes=call.sizes, out=out, backend=call.backend, config=call.config)
    return {}


def _check_places(call: _AppendCall, slots: np.ndarray, positions: np.ndarray | None) -> None:
    """Raise ArgumentError for a slot outside the pool, one that is there twice, or a position without a row."""
    room, here = call.cache.pages * call.cache.page_size, slots >= 0
    _refuse(f"{NAME}: slots", f"must be below {room}, the pages' tokens", slots, slots >= room)
    _, first = np.unique(slots, return_index=True)
    again = here.copy()
    again[first] = False
    _refuse(f"{NAME}: slots", "must be distinct", slots, again)
    if positions is not None:
        rows = call.sizes["R"]
        outside = here & ((positions < 0) | (positions >= rows))
        _refuse(f"{NAME}: rope positions", f"must lie in 0..{rows - 1}", positions, outside)


def _refuse(argument: str, rule: str, array: np.ndarray, wrong: np.ndarray) -> None:
    if wrong.any():
        t = int(wrong.argmax())
        raise ArgumentError(argument, rule, f"{argument.rpartition(' ')[2]}[{t}] = {array[t]}")


def _check_tokens(call: _AppendCall, arrays: dict[str, np.ndarray]) -> None:
    """Raise ArgumentError for what `quantize_kv` refuses."""
    here, cache = (arrays["slots"] >= 0)[:, None, None], call.cache
    k, v = (np.where(here, values(arrays[name]), np.float32(0)) for name in "kv")
    if "cos" in arrays:
        at = np.where(here[:, 0, 0], arrays.get("positions", np.arange(len(k))), 0)
        k = reference.rope(k, arrays["cos"][at], arrays["sin"][at])
    for name, x, channel in (("k", k, cache.k_channel), ("v", v, cache.v_channel)):
        constants = None if channel is None else tuple(gpu.as_array(f"{NAME}: {name}", array) for array in channel)
        try:
            quant.quantize_kv(x, cache.scheme, constants)
        except ArgumentError as error:
            raise ArgumentError(f"{NAME}: {name}", error.rule, str(error.value).replace("x[", f"{name}[")) from None


_APPEND = Operation(NAME, _prepare, _on_host, _look)
