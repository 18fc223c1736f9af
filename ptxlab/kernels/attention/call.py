"""What `attention_kv4` is asked for, after everything that needs no GPU has been checked."""

from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np

from ptxlab import gpu
from ptxlab.errors import ArgumentError
from ptxlab.kernels.attention.common import arrays_of, channels_of
from ptxlab.kernels.attention.sm80 import DTYPES
from ptxlab.kernels.gemm.call import check_how, dtype_of
from ptxlab.layout import KVCache
from ptxlab.quant import KV_SCHEMES
from ptxlab.spec import Arrays
from ptxlab.validate import shape_of

FACE = "attention_kv4"
MOST_TOKENS, MOST_RATIO = 8, 16  # queries of a sequence; query heads of a kv head


class Call(NamedTuple):
    """One attention. `shape` is that of q as the caller has it; `window` is 0 for none, `kernel` a step's name or None.

    `out` and `lse` are what to write into, or None; `programmatic` says how to launch.
    """

    q: Any
    cache: KVCache
    shape: tuple[int, ...]
    dtype: str
    scale: float
    window: int
    out: Any
    lse: Any
    return_lse: bool
    kernel: str | None
    programmatic: bool

    @property
    def queries(self) -> int:
        """Of a sequence, T."""
        return self.shape[1] if len(self.shape) == 4 else 1

    @property
    def sizes(self) -> dict[str, Any]:
        """Of the problem, by the specs' names."""
        cache, known = self.cache, KV_SCHEMES[self.cache.scheme]
        return {
            "B": self.shape[0],
            "T": self.queries,
            "Hq": self.shape[-2],
            "Hkv": cache.num_kv_heads,
            "D": cache.head_dim,
            "P": cache.max_pages,
            "pages": cache.pages,
            "page": cache.page_size,
            "bits": known.bits,
            "channel": int(known.by_channel),
            "window": self.window,
            "softmax_scale": self.scale,
        }

    @property
    def lacks_results(self) -> bool:
        """Whether something has to be made to be returned."""
        return self.out is None or (self.return_lse and self.lse is None)

    def arrays(self) -> list[tuple[str, str, Any, str, tuple[int, ...]]]:
        """What was given: the kernel's argument, the label for messages, the array, dtype and shape."""
        cache = self.cache
        wanted = [
            ("q", "q", self.q, self.dtype, self.shape),
            ("pool", "cache.pool", cache.pool, "uint8", tuple(cache.pool.shape)),
            ("table", "cache.block_table", cache.block_table, "int32", (cache.batch, cache.max_pages)),
            ("lengths", "cache.lengths", cache.lengths, "int32", (cache.batch,)),
        ]
        channel = cache.num_kv_heads, cache.head_dim
        for name, array in channels_of(cache).items():
            wanted.append((name, f"cache.{name[0]}_channel {name[2:]}", array, "float32", channel))
        if self.out is not None:
            wanted.append(("out", "out", self.out, self.dtype, self.shape))
        if self.lse is not None:
            wanted.append(("lse", "out lse", self.lse, "float32", self.shape[:-1]))
        return [(name, f"{FACE}: {label}", *rest) for name, label, *rest in wanted]


def checked(
    q: Any,
    cache: Any,
    *,
    scale: Any,
    window: Any,
    out: Any,
    return_lse: Any,
    kernel: Any,
    backend: Any,
    programmatic: Any,
    check: Any,
) -> Call:
    """The arguments of `attention_kv4` as a call; raises ArgumentError for what does not fit together."""
    if not isinstance(cache, KVCache):
        raise ArgumentError(f"{FACE}: cache", "must be a KVCache", type(cache).__name__)
    shape, dtype = shape_of(q), dtype_of(q)
    _check_queries(shape, dtype, cache)
    check_how(FACE, backend, programmatic)
    for name, flag in (("return_lse", return_lse), ("check", check)):
        if not isinstance(flag, bool):
            raise ArgumentError(f"{FACE}: {name}", "must be True or False", repr(flag))
    out, lse = _results(out, return_lse)
    scale = cache.head_dim**-0.5 if scale is None else _positive(scale)
    seen = _window(window, cache.max_pages * cache.page_size)
    return Call(q, cache, shape, dtype, scale, seen, out, lse, return_lse, kernel, programmatic)


def _check_queries(shape: tuple[int, ...], dtype: str, cache: KVCache) -> None:
    label, B, Hkv, D = f"{FACE}: q", cache.batch, cache.num_kv_heads, cache.head_dim
    if len(shape) not in (3, 4) or (shape[0], shape[-1]) != (B, D):
        rule = f"must be [{B}, Hq, {D}] or [{B}, T, Hq, {D}] for this cache"
        raise ArgumentError(label, rule, f"shape {list(shape)}")
    if dtype not in DTYPES:
        raise ArgumentError(label, f"dtype {' or '.join(DTYPES)}", dtype)
    if len(shape) == 4 and not 1 <= shape[1] <= MOST_TOKENS:
        raise ArgumentError(label, f"T must lie in 1..{MOST_TOKENS}", f"T={shape[1]}")
    Hq = shape[-2]
    if Hq % Hkv or not 1 <= Hq // Hkv <= MOST_RATIO:
        raise ArgumentError(label, f"Hq must be 1 to {MOST_RATIO} times the cache's {Hkv}", f"Hq={Hq}")


def _results(out: Any, return_lse: bool) -> tuple[Any, Any]:
    """The arrays to write into."""
    if not isinstance(out, tuple):
        return out, None
    if not return_lse or len(out) != 2:
        rule = "must be (out, lse)" if return_lse else "must be one array without return_lse"
        raise ArgumentError(f"{FACE}: out", rule, f"a tuple of {len(out)}")
    return out


def _positive(scale: Any) -> float:
    if not isinstance(scale, (int, float, np.floating)) or not 2.0**-149 <= scale < 2.0**128:
        raise ArgumentError(f"{FACE}: scale", "must be above 0 and finite in float32", repr(scale))
    return float(scale)


def _window(window: Any, capacity: int) -> int:
    """0 where all tokens are seen."""
    if window is None:
        return 0
    if not isinstance(window, (int, np.integer)) or isinstance(window, bool) or window < 1:
        raise ArgumentError(f"{FACE}: window", "must be an integer, 1 or more, or None", repr(window))
    return 0 if window >= capacity else int(window)


def check_numbers(call: Call, arrays: Arrays) -> None:
    """Raise ArgumentError, as the cache does, for lengths, block table and constants, given on the host."""
    constants = {x: (arrays[f"{x}_scale"], arrays[f"{x}_zero"]) if f"{x}_scale" in arrays else None for x in "kv"}
    cache = replace(
        call.cache,
        block_table=arrays["table"],
        lengths=arrays["lengths"],
        k_channel=constants["k"],
        v_channel=constants["v"],
    )
    try:
        cache.check()
    except ArgumentError as error:
        raise ArgumentError(f"{FACE}: cache.{error.argument}", error.rule, error.value) from None


def cache_on_host(call: Call) -> Arrays:
    """The cache's arrays but the pool, copied from the device."""
    cache = {**arrays_of(call.cache), **channels_of(call.cache)}
    return {name: copied(FACE, array) for name, array in cache.items() if name != "pool"}


def copied(face: str, array: Any) -> Any:
    """A device array's numbers on the host, or None for None."""
    shared = None if array is None else gpu.as_array(face, array)
    return shared if shared is None or isinstance(shared, np.ndarray) else gpu.to_host(shared)
