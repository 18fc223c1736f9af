"""`append_kv4`, the Python face: new keys and values of any array library into a KV cache, in one launch."""

from typing import Any, NamedTuple

import numpy as np

from ptxlab import gpu, quant, reference
from ptxlab.errors import ArgumentError, UnavailableError
from ptxlab.kernels.attention.append import APPEND, DTYPES, INDICES, values
from ptxlab.kernels.attention.call import copied
from ptxlab.kernels.gemm.call import check_how, dtype_of
from ptxlab.layout import KVCache
from ptxlab.quant import KV_SCHEMES
from ptxlab.runtime import run_spec
from ptxlab.runtime.arguments import require_on_host
from ptxlab.runtime.plan import Plan
from ptxlab.sources import of_kernel
from ptxlab.validate import shape_of

FACE = "append_kv4"
_MOST_PLANS = 4096  # that are remembered
_plans: dict[tuple[Any, ...], Plan] = {}


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
    call = _checked(k, v, cache, slots, rope)
    check_how(FACE, backend, programmatic)
    if not isinstance(check, bool):
        raise ArgumentError(f"{FACE}: check", "must be True or False", repr(check))
    if not gpu.is_device_array(k):
        _on_host(call, backend)
    elif backend == "emulator":
        raise ArgumentError("backend", "arrays on the CPU (NumPy) for the emulator", "arrays on a GPU")
    else:
        _on_gpu(call, check, programmatic)


class _Call(NamedTuple):
    """The arrays given, by argument of the kernel, sizes, and the dtypes of k and v and of slots and positions."""

    given: dict[str, Any]
    cache: KVCache
    sizes: dict[str, int]
    dtype: str
    place: str

    @property
    def config(self) -> dict[str, int]:
        """Constants of the variant."""
        dtypes = {"BF16": DTYPES.index(self.dtype), "INDEX": INDICES.index(self.place)}
        return APPEND.config_for(self.sizes) | dtypes

    def wanted(self) -> dict[str, tuple[str, str, tuple[int, ...]]]:
        """Of every array given: the label for messages, dtype and shape."""
        T, H, D, R = (self.sizes[name] for name in ("T", "H", "D", "R"))
        channels = {
            f"{x}_{name}": (f"cache.{x}_channel {name}", "float32", (H, D)) for x in "kv" for name in ("scale", "zero")
        }
        known = {
            "k": ("k", self.dtype, (T, H, D)),
            "v": ("v", self.dtype, (T, H, D)),
            "pool": ("cache.pool", "uint8", tuple(self.cache.pool.shape)),
            "slots": ("slots", self.place, (T,)),
            "cos": ("rope cos", "float32", (R, D // 2)),
            "sin": ("rope sin", "float32", (R, D // 2)),
            "positions": ("rope positions", self.place, (T,)),
            **channels,
        }
        return {name: (f"{FACE}: {known[name][0]}", *known[name][1:]) for name in self.given}


def _checked(k: Any, v: Any, cache: Any, slots: Any, rope: Any) -> _Call:
    """The call; raises ArgumentError for what does not fit together."""
    if not isinstance(cache, KVCache):
        raise ArgumentError(f"{FACE}: cache", "must be a KVCache", type(cache).__name__)
    shape, known = shape_of(k), KV_SCHEMES[cache.scheme]
    H, D = cache.num_kv_heads, cache.head_dim
    if len(shape) != 3 or shape[1:] != (H, D):
        raise ArgumentError(f"{FACE}: k", f"must be [T, {H}, {D}] for this cache", f"shape {list(shape)}")
    if dtype_of(k) not in DTYPES:
        raise ArgumentError(f"{FACE}: k", f"dtype {' or '.join(DTYPES)}", dtype_of(k))
    if dtype_of(slots) not in INDICES:
        raise ArgumentError(f"{FACE}: slots", f"dtype {' or '.join(INDICES)}", dtype_of(slots))
    given = {"k": k, "v": v, "pool": cache.pool, "slots": slots, **_tables(rope, shape[0])}
    for x, channel in (("k", cache.k_channel), ("v", cache.v_channel)):
        if channel is not None:
            names = ("scale", "zero") if known.bits == 4 else ("scale",)  # 8 bits are symmetric
            given |= {f"{x}_{name}": array for name, array in zip(names, channel, strict=False)}
    sizes = {"T": shape[0], "H": H, "D": D, "pages": cache.pages, "size": cache.page_size, "bits": known.bits}
    sizes |= {"channel": int(known.by_channel), "R": given["cos"].shape[0] if "cos" in given else 0}
    return _Call(given, cache, sizes, dtype_of(k), dtype_of(slots))


def _tables(rope: Any, T: int) -> dict[str, Any]:
    """cos, sin and positions, as far as they are given."""
    if rope is None:
        return {}
    if not isinstance(rope, tuple) or len(rope) not in (2, 3):
        raise ArgumentError(f"{FACE}: rope", "must be (cos, sin) or (cos, sin, positions)", type(rope).__name__)
    rows = tuple(getattr(rope[0], "shape", ()))[:1]
    least = T if len(rope) == 2 else 1
    if rows < (least,):
        rule = f"must have {least} rows or more" + ("" if len(rope) == 3 else ", one for each token")
        raise ArgumentError(f"{FACE}: rope cos", rule, *rows or ("no array",))
    return dict(zip(("cos", "sin", "positions"), rope, strict=False))


def _on_host(call: _Call, backend: str | None) -> None:
    """NumPy, or PyTorch on the CPU: in the emulator, or copied to the GPU and back."""
    arrays = {}
    for name, (label, dtype, shape) in call.wanted().items():
        arrays[name] = require_on_host(label, call.given[name], dtype, shape, written=name == "pool")
    if call.sizes["T"] == 0:
        return
    APPEND.check_sizes(call.sizes)
    _check_places(call, arrays["slots"], arrays.get("positions"))
    _check_tokens(call, arrays)
    out = {"pool": arrays.pop("pool")}
    source = of_kernel(APPEND.name)[0]
    run_spec(APPEND, source, arrays, sizes=call.sizes, out=out, backend=backend, config=call.config)


def _check_places(call: _Call, slots: np.ndarray, positions: np.ndarray | None) -> None:
    """Raise ArgumentError for a slot outside the pool, one that is there twice, or a position without a row."""
    room, here = call.cache.pages * call.cache.page_size, slots >= 0
    _refuse(f"{FACE}: slots", f"must be below {room}, the pages' tokens", slots, slots >= room)
    _, first = np.unique(slots, return_index=True)
    again = here.copy()
    again[first] = False
    _refuse(f"{FACE}: slots", "must be distinct", slots, again)
    if positions is not None:
        rows = call.sizes["R"]
        outside = here & ((positions < 0) | (positions >= rows))
        _refuse(f"{FACE}: rope positions", f"must lie in 0..{rows - 1}", positions, outside)


def _refuse(argument: str, rule: str, array: np.ndarray, wrong: np.ndarray) -> None:
    if wrong.any():
        t = int(wrong.argmax())
        raise ArgumentError(argument, rule, f"{argument.rpartition(' ')[2]}[{t}] = {array[t]}")


def _check_tokens(call: _Call, arrays: dict[str, np.ndarray]) -> None:
    """Raise ArgumentError for what `quantize_kv` refuses."""
    here, cache = (arrays["slots"] >= 0)[:, None, None], call.cache
    k, v = (np.where(here, values(arrays[name]), np.float32(0)) for name in "kv")
    if "cos" in arrays:
        at = np.where(here[:, 0, 0], arrays.get("positions", np.arange(len(k))), 0)
        k = reference.rope(k, arrays["cos"][at], arrays["sin"][at])
    for name, x, channel in (("k", k, cache.k_channel), ("v", v, cache.v_channel)):
        constants = None if channel is None else tuple(gpu.as_array(f"{FACE}: {name}", array) for array in channel)
        try:
            quant.quantize_kv(x, cache.scheme, constants)
        except ArgumentError as error:
            raise ArgumentError(f"{FACE}: {name}", error.rule, str(error.value).replace("x[", f"{name}[")) from None


def _on_gpu(call: _Call, check: bool, programmatic: bool) -> None:
    """Check what lies on the device, load the kernel if this is the first call of its shape, and launch."""
    if reason := gpu.why_not(APPEND.arch):
        raise UnavailableError(f'{FACE}: {reason}; pass backend="emulator" with NumPy arrays')
    device, stream = gpu.current_device(), gpu.stream_handle()
    views = {}
    for name, (label, dtype, shape) in call.wanted().items():
        views[name] = gpu.view(label, call.given[name]).require(label, dtype, shape, device)
    if call.sizes["T"] == 0:
        return
    key = (*call.sizes.values(), call.dtype, call.place, programmatic, device)
    if gpu.is_capturing(stream) and (check or key not in _plans):
        if check:
            raise ArgumentError(f"{FACE}: check", "must be False in a capture, where nothing can be waited for", check)
        rule = "the first call of a shape loads its kernel: make it before the capture"
        raise ArgumentError(FACE, rule, ", ".join(f"{name}={size}" for name, size in call.sizes.items()))
    if check:
        _check_places(call, *(copied(FACE, call.given.get(name)) for name in ("slots", "positions")))
    plan = _plans.get(key) or _planned(call, key, programmatic)
    plan(stream, views)


def _planned(call: _Call, key: tuple[Any, ...], programmatic: bool) -> Plan:
    if len(_plans) >= _MOST_PLANS:
        _plans.clear()
    plan = _plans[key] = Plan(APPEND, call.config, call.sizes, programmatic=programmatic)
    return plan
