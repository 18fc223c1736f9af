"""The paged KV cache of a batch: the pool, block table and lengths that a kernel reads (vLLM's scheme).

A pool is u8 [pages, 2, Hkv, page_bytes], keys and then values (`layout.pages`). Token t of sequence b lies in page
block_table[b, t // page_size] at offset t % page_size; its *slot* is page·page_size + offset. What no sequence uses, of
the pool or of the table, may hold anything.
"""

import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from ptxlab.arithmetic import ceil_div
from ptxlab.errors import ArgumentError
from ptxlab.hardware.words import F32, S32
from ptxlab.lowbit import reference
from ptxlab.lowbit.layout.description import Described
from ptxlab.lowbit.layout.pages import PageView, page_bytes, require_array
from ptxlab.lowbit.quant.inputs import extremes
from ptxlab.lowbit.quant.kv import QuantizedKV, check_channel, kv_scheme, quantize_kv
from ptxlab.validate import is_integer, is_one_of

HEAD_DIMS = (64, 128, 256)


@dataclass(frozen=True, eq=False, kw_only=True)
class KVCache(Described):
    """Keys and values of a batch of sequences in pages of one pool; arrays of any library, of which none is copied.

    `pool` u8 [pages, 2, Hkv, page_bytes], `block_table` s32 [B, max_pages], `lengths` s32 [B], the new tokens included.
    `k_channel` and `v_channel` are (scale, zero) f32 [Hkv, D] of a scheme by channel, else None. Keys of a `rotated`
    cache (kv4 or kv8) are `reference.rotate_heads` of those behind RoPE: append rotates keys, attention queries.
    Raises ArgumentError if dtypes, shapes or strides are others; numbers in the arrays are looked at by `check` alone.
    """

    pool: Any = field(repr=False)
    block_table: Any = field(repr=False)
    lengths: Any = field(repr=False)
    page_size: int
    head_dim: int
    scheme: str = "kv4"
    k_channel: tuple[Any, Any] | None = field(default=None, repr=False)
    v_channel: tuple[Any, Any] | None = field(default=None, repr=False)
    rotated: bool = False

    def __post_init__(self) -> None:
        if not is_one_of(self.head_dim, HEAD_DIMS):
            raise ArgumentError("head_dim", f"must be one of {', '.join(map(str, HEAD_DIMS))}", self.head_dim)
        size = page_bytes(self.scheme, self.page_size, self.head_dim)
        require_array("pool", self.pool, "uint8", ("pages", 2, "Hkv", size))
        require_array("block_table", self.block_table, "int32", ("B", "max_pages"))
        require_array("lengths", self.lengths, "int32", (self.batch,))
        for name, channel in (("k_channel", self.k_channel), ("v_channel", self.v_channel)):
            self._require_channel(name, channel)
        if not isinstance(self.rotated, bool):
            raise ArgumentError("rotated", "must be True or False", repr(self.rotated))
        if self.rotated and kv_scheme(self.scheme).by_channel:
            raise ArgumentError(
                "rotated", f"must be False for {self.scheme}: only kv4 and kv8 rotate keys", self.rotated
            )

    @classmethod
    def empty(
        cls,
        batch: int,
        max_pages: int,
        num_kv_heads: int,
        head_dim: int,
        *,
        page_size: int = 64,
        scheme: str = "kv4",
        k_channel: tuple[F32, F32] | None = None,
        v_channel: tuple[F32, F32] | None = None,
        rotated: bool = False,
        like: Any = None,
    ) -> "KVCache":
        """Allocate a cache for `batch` sequences of max_pages·page_size tokens, each page used once, of length 0.

        `like` is an array whose library and device the cache's arrays take: NumPy (None), CuPy or PyTorch. Raises
        ArgumentError for a number below 1, or as the class does.
        """
        size = page_bytes(scheme, page_size, head_dim)
        for name, number in (("batch", batch), ("max_pages", max_pages), ("num_kv_heads", num_kv_heads)):
            if not is_integer(number) or number < 1:
                raise ArgumentError(name, "must be an integer, at least 1", repr(number))
        pages = batch * max_pages
        return cls(
            pool=_zeros(like, "uint8", (pages, 2, num_kv_heads, size)),
            block_table=_range(like, pages).reshape(batch, max_pages),
            lengths=_zeros(like, "int32", (batch,)),
            page_size=page_size,
            head_dim=head_dim,
            scheme=scheme,
            k_channel=k_channel,
            v_channel=v_channel,
            rotated=rotated,
        )

    @property
    def pages(self) -> int:
        """Pages of the pool."""
        return int(self.pool.shape[0])

    @property
    def num_kv_heads(self) -> int:
        """Hkv."""
        return int(self.pool.shape[2])

    @property
    def batch(self) -> int:
        """Sequences, B."""
        return int(self.block_table.shape[0])

    @property
    def max_pages(self) -> int:
        """Entries of the block table per sequence."""
        return int(self.block_table.shape[1])

    def check(self) -> None:
        """Look at the numbers in a cache of NumPy or CuPy arrays; on a GPU this waits for it.

        Raises ArgumentError, with the place of the first: a length beyond the table, a used entry of the table outside
        the pool, a constant by channel that is none (`quant.calibrate_kv`).
        """
        capacity = self.max_pages * self.page_size
        table = self.block_table.tolist()
        for b, length in enumerate(self.lengths.tolist()):
            if not 0 <= length <= capacity:
                raise ArgumentError("lengths", f"must lie in 0..{capacity}", f"lengths[{b}] is {length}")
            for i, page in enumerate(table[b][: ceil_div(length, self.page_size)]):
                if not 0 <= page < self.pages:
                    rule = f"pages in use must lie in 0..{self.pages - 1}"
                    raise ArgumentError("block_table", rule, f"block_table[{b}, {i}] is {page}")
        for name, channel in (("k_channel", self.k_channel), ("v_channel", self.v_channel)):
            if channel is not None:
                check_channel(name, self.scheme, channel, (self.num_kv_heads, self.head_dim))

    def rotate(self, x: npt.NDArray[Any]) -> npt.NDArray[Any]:
        """Rotate queries or keys behind RoPE [..., D] as the cache's keys are; return x if these are not rotated."""
        return reference.rotate_heads(x) if self.rotated else x

    def quantize_keys(self, k: npt.NDArray[Any]) -> QuantizedKV:
        """Rotate and quantise keys behind RoPE, float [..., tokens, Hkv, D], as `append_kv4` does.

        Raises ArgumentError as `quant.quantize_kv` does.
        """
        if self.rotated:
            extremes("x", k)  # names the element that is not finite: a rotation spreads it over its block
        return quantize_kv(self.rotate(k), self.scheme, self.k_channel)

    def quantize_values(self, v: npt.NDArray[Any]) -> QuantizedKV:
        """Quantise values, float [..., tokens, Hkv, D], as `append_kv4` does.

        Raises ArgumentError as `quant.quantize_kv` does.
        """
        return quantize_kv(v, self.scheme, self.v_channel)

    def slots(self, b: int) -> S32:
        """Compute the slots of the tokens of sequence `b`: page·page_size + offset, s32 [lengths[b]]."""
        token = np.arange(int(self.lengths[b]), dtype=np.int32, like=self.block_table)
        slots: S32 = self.block_table[b, token // self.page_size] * self.page_size + token % self.page_size
        return slots

    def _require_channel(self, name: str, channel: tuple[Any, Any] | None) -> None:
        is_by_channel = kv_scheme(self.scheme).by_channel
        if not (isinstance(channel, tuple) and len(channel) == 2 if is_by_channel else channel is None):
            rule = f"must be {'(scale, zero)' if is_by_channel else 'None'} for {self.scheme}"
            raise ArgumentError(name, rule, type(channel).__name__ if channel is not None else None)
        for constant, array in zip(("scale", "zero"), channel or (), strict=False):
            require_array(f"{name} {constant}", array, "float32", (self.num_kv_heads, self.head_dim))


def _zeros(like: Any, dtype: str, shape: tuple[int, ...]) -> Any:
    """Allocate zeros in the library and on the device of `like`; None stands for NumPy."""
    if hasattr(like, "new_zeros"):  # PyTorch, which calls its dtypes by the same names
        return like.new_zeros(shape, dtype=getattr(sys.modules["torch"], dtype))
    if like is not None and not hasattr(like, "__array_function__"):
        raise ArgumentError("like", "must be an array of NumPy, CuPy or PyTorch", type(like).__name__)
    try:
        return np.zeros(shape, dtype, like=like)
    except (MemoryError, ValueError):
        raise ArgumentError("KVCache.empty", "must fit the memory", f"{math.prod(shape)} bytes") from None


def _range(like: Any, stop: int) -> Any:
    """Return 0, 1 ... s32 [stop] in the library and on the device of `like`; None stands for NumPy."""
    if hasattr(like, "new_zeros"):
        torch = sys.modules["torch"]
        return torch.arange(stop, dtype=torch.int32, device=like.device)
    return np.arange(stop, dtype=np.int32, like=like)


def gather(cache: KVCache) -> tuple[list[QuantizedKV], list[QuantizedKV]]:
    """Read the keys and the values [lengths[b], Hkv, D] of every sequence of a NumPy or CuPy cache.

    Raises ArgumentError as `KVCache.check` does.
    """
    if not isinstance(cache, KVCache):
        raise ArgumentError("cache", "must be a KVCache", type(cache).__name__)
    cache.check()
    keys, values = _keys_and_values(cache)
    slots = [cache.slots(b) for b in range(cache.batch)]
    return [keys.read(slots_of_sequence, cache.k_channel) for slots_of_sequence in slots], [
        values.read(slots_of_sequence, cache.v_channel) for slots_of_sequence in slots
    ]


def scatter(cache: KVCache, keys: Sequence[QuantizedKV], values: Sequence[QuantizedKV]) -> None:
    """Write the keys and the values [lengths[b], Hkv, D] of every sequence into the cache's pool; inverse of `gather`.

    Nothing else of the pool changes. Raises ArgumentError as `KVCache.check` does, or for another number or shape.
    """
    cache.check()
    for name, sequences in (("keys", keys), ("values", values)):
        if len(sequences) != cache.batch:
            raise ArgumentError(name, f"must be {cache.batch}, one per sequence", len(sequences))
    for b in range(cache.batch):
        write_slots(cache, keys[b], values[b], cache.slots(b))


def write_slots(cache: KVCache, keys: QuantizedKV, values: QuantizedKV, slots: npt.NDArray[Any]) -> None:
    """Write tokens [n, Hkv, D], quantised with the cache's constants, to the slots [n] of its pool.

    Raises ArgumentError for tokens of another shape or scheme, or a slot outside the pool.
    """
    shape = (len(slots), cache.num_kv_heads, cache.head_dim)
    for name, tokens in (("keys", keys), ("values", values)):
        if (tokens.scheme, tokens.shape) != (cache.scheme, shape):
            raise ArgumentError(name, f"must be {cache.scheme} {list(shape)}", f"{tokens.scheme} {list(tokens.shape)}")
    capacity = cache.pages * cache.page_size
    if len(slots) and (slots.min() < 0 or slots.max() >= capacity):
        raise ArgumentError("slots", f"must lie in 0..{capacity - 1}", f"{int(slots.min())}..{int(slots.max())}")
    for view, tokens in zip(_keys_and_values(cache), (keys, values), strict=True):
        view.write(tokens, slots)


def _keys_and_values(cache: KVCache) -> tuple[PageView, PageView]:
    key_and_value_pages = PageView.of(cache.pool, cache.scheme, cache.page_size, cache.head_dim)
    return key_and_value_pages.part(0), key_and_value_pages.part(1)
