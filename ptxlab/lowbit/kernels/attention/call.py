"""What `attention_kv4` is asked for, after everything that needs no GPU has been checked."""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Any, NamedTuple

from ptxlab.errors import ArgumentError
from ptxlab.lowbit.kernels.attention.common import cache_arrays, channel_constants
from ptxlab.lowbit.kernels.attention.options import AttentionOptions
from ptxlab.lowbit.kernels.attention.sm80 import DTYPES
from ptxlab.lowbit.kernels.operation import CallArray, DeviceMemory, WorkspaceRules, copy_to_host, dtype_of
from ptxlab.lowbit.layout import KVCache
from ptxlab.lowbit.quant import KV_SCHEMES
from ptxlab.spec import Arrays
from ptxlab.validate import shape_of

NAME = "attention_kv4"
MOST_TOKENS, MOST_RATIO = 8, 16  # queries of a sequence; query heads of a kv head


class AttentionCall(NamedTuple):
    """An attention: queries, whose `shape` is as the caller has it, a cache, and options with `scale` filled in.

    `out` and `lse` are what to write into, or None.
    """

    q: Any
    cache: KVCache
    shape: tuple[int, ...]
    dtype: str
    out: Any
    lse: Any
    options: AttentionOptions

    @property
    def queries(self) -> int:
        """Number of queries of a sequence, T."""
        return self.shape[1] if len(self.shape) == 4 else 1

    @property
    def sizes(self) -> dict[str, Any]:
        """Sizes of the problem, by the specs' names."""
        cache, scheme = self.cache, KV_SCHEMES[self.cache.scheme]
        return {
            "B": self.shape[0],
            "T": self.queries,
            "Hq": self.shape[-2],
            "Hkv": cache.num_kv_heads,
            "D": cache.head_dim,
            "P": cache.max_pages,
            "pages": cache.pages,
            "page": cache.page_size,
            "bits": scheme.bits,
            "channel": int(scheme.by_channel),
            "rotated": cache.rotated,
            "window": self.options.window or 0,
            "softmax_scale": self.options.scale,
        }

    @property
    def key(self) -> tuple[Any, ...]:
        """Sizes and dtype that its kernel is chosen and compiled by, besides options."""
        return (*self.sizes.values(), self.dtype)

    @property
    def is_empty(self) -> bool:
        """True if there is no sequence."""
        return self.shape[0] == 0

    @property
    def operands(self) -> Iterator[CallArray]:
        """Queries, cache and results."""
        cache, lse = self.cache, self.shape[:-1]
        yield CallArray("q", f"{NAME}: q", self.q, self.dtype, self.shape)
        yield CallArray("pool", f"{NAME}: cache.pool", cache.pool, "uint8", tuple(cache.pool.shape))
        yield CallArray(
            "table", f"{NAME}: cache.block_table", cache.block_table, "int32", (cache.batch, cache.max_pages)
        )
        yield CallArray("lengths", f"{NAME}: cache.lengths", cache.lengths, "int32", (cache.batch,))
        for name, array in channel_constants(cache).items():
            label = f"{NAME}: cache.{name[0]}_channel {name[2:]}"
            yield CallArray(name, label, array, "float32", (cache.num_kv_heads, cache.head_dim))
        yield CallArray("out", f"{NAME}: out", self.out, self.dtype, self.shape)
        if self.lse is not None:
            yield CallArray("lse", f"{NAME}: out lse", self.lse, "float32", lse)
        elif self.options.return_lse:
            rule = f"must be (out, lse) in a capture: make an array {list(lse)} of float32 before"
            yield CallArray("lse", f"{NAME}: out", None, "float32", lse, rule, "one array")


def split_outputs(out: Any, return_lse: Any) -> tuple[Any, Any]:
    """Return the arrays to write into, out and lse, or None; raise ArgumentError for others than are asked for."""
    if not isinstance(out, tuple):
        return out, None
    if not return_lse or len(out) != 2:
        rule = "must be (out, lse)" if return_lse else "must be one array without return_lse"
        raise ArgumentError(f"{NAME}: out", rule, f"a tuple of {len(out)}")
    return out


def check_call(options: AttentionOptions, arrays: Mapping[str, Any], cache: KVCache) -> AttentionCall:
    """Make the call of q, and of out and lse where they are given; ArgumentError for what does not fit together."""
    q = arrays["q"]
    shape, dtype = shape_of(q), dtype_of(q)
    _check_queries(shape, dtype, cache)
    options = replace(options, scale=_scale(options.scale, cache), window=_window(options.window, cache))
    return AttentionCall(q, cache, shape, dtype, arrays.get("out"), arrays.get("lse"), options)


def _check_queries(shape: tuple[int, ...], dtype: str, cache: KVCache) -> None:
    label, B, Hkv, D = f"{NAME}: q", cache.batch, cache.num_kv_heads, cache.head_dim
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


def _scale(scale: float | None, cache: KVCache) -> float:
    return cache.head_dim**-0.5 if scale is None else float(scale)


def _window(window: int | None, cache: KVCache) -> int | None:
    """Return the window, or None if all tokens are seen."""
    return None if window is None or window >= cache.max_pages * cache.page_size else int(window)


def check_cache_values(call: AttentionCall, arrays: Arrays) -> None:
    """Raise ArgumentError, as the cache does, for lengths, block table and constants, given on the host."""
    constants = {x: (arrays[f"{x}_scale"], arrays[f"{x}_zero"]) if f"{x}_scale" in arrays else None for x in "kv"}
    cache = replace(
        call.cache,
        block_table=arrays["table"],
        lengths=arrays["lengths"],
        k_channel=constants["k"],
        v_channel=constants["v"],
    )
    check_cache(NAME, cache)


def check_cache(name: str, cache: KVCache) -> None:
    """Raise ArgumentError, in the name of a call, for numbers of a cache on the host that no kernel may be given."""
    try:
        cache.check()
    except ArgumentError as error:
        raise ArgumentError(f"{name}: cache.{error.argument}", error.rule, error.value) from None


def cache_on_host(call: AttentionCall) -> Arrays:
    """Copy the cache's arrays except the pool from the device."""
    cache = {**cache_arrays(call.cache), **channel_constants(call.cache)}
    return {name: copy_to_host(NAME, array) for name, array in cache.items() if name != "pool"}


def check_zeros(workspace: DeviceMemory, zero_buffers: Iterable[str]) -> None:
    """Raise ArgumentError if a call has left words of the workspace that are not 0: later calls would be wrong."""
    nonzero_words = sum(int((copy_to_host(NAME, workspace.views[name].owner) != 0).sum()) for name in zero_buffers)
    if nonzero_words:
        workspace.views.clear()
        rule = "must be all zeros between calls: lengths changed under one, or two ran at a time; make another"
        raise ArgumentError(f"{NAME}: workspace", rule, f"{nonzero_words} words that are not")


def workspace_rules(arguments: str = "") -> WorkspaceRules:
    """Return the rules for the workspace that `attention_workspace` makes of a cache and further arguments."""
    workspace = f"attention_workspace(cache{arguments})"
    return WorkspaceRules(
        in_capture=f"must be given in a capture: make {workspace} before",
        kernel=f"must be {workspace}",
        size=f"must be {workspace} of this head dim or a larger one, used by no call that failed",
    )
