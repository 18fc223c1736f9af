"""Pages of the KV cache: the keys or values of `page_size` tokens of one KV head each.

A page holds the features of its tokens one after the other, D/2 bytes each at 4 bits (micro-kernel words,
`layout.nibbles`: word j has dims 8j to 8j+7) or D bytes at 8 bits, then, for the schemes per token and head, f16
(scale, zero) of each token:

    kv4: page_size x D/2 bytes | page_size x (scale, zero)      64 tokens of D 128: 4096 + 256 = 4352 bytes
"""

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from ptxlab.arithmetic import ceil_div
from ptxlab.errors import ArgumentError
from ptxlab.hardware.words import F16, F32, U8, as_bytes, as_words
from ptxlab.lowbit.layout.nibbles import pack_u4, unpack_u4
from ptxlab.lowbit.quant.kv import QuantizedKV, kv_scheme
from ptxlab.validate import is_integer, is_one_of, shape_of

PAGE_SIZES = (16, 32, 64)
_CONSTANTS = 4  # bytes of a token's scale and zero


def page_bytes(scheme: str, page_size: int, head_dim: int) -> int:
    """Count the bytes of a page of one head's keys or values.

    Raises ArgumentError: an unknown scheme or page size (with those known), or a head_dim that is no multiple of 8.
    """
    format = kv_scheme(scheme)
    if not is_one_of(page_size, PAGE_SIZES):
        raise ArgumentError("page_size", f"must be one of {', '.join(map(str, PAGE_SIZES))}", page_size)
    if not is_integer(head_dim) or head_dim < 8 or head_dim % 8:
        raise ArgumentError("head_dim", "must be a positive multiple of 8", head_dim)
    return page_size * (head_dim * format.bits // 8 + (0 if format.by_channel else _CONSTANTS))


def pack_pages(quantized: QuantizedKV, page_size: int) -> U8:
    """Pack keys or values [tokens, heads, D] of a sequence in pages u8 [ceil(tokens / page_size), heads, page_bytes].

    Scales and zeros of a scheme by channel are not in the pages. What the last page has left is 0. NumPy or CuPy.
    Raises ArgumentError as `page_bytes` does, for a value above 15 of 4 bits, or for a batch.
    """
    if not isinstance(quantized, QuantizedKV):
        raise ArgumentError("quantized", "must be a QuantizedKV (quant.quantize_kv)", type(quantized).__name__)
    if quantized.values.ndim != 3:
        raise ArgumentError("quantized", "must be one sequence [tokens, heads, D]", f"shape {quantized.shape}")
    tokens, heads, D = quantized.shape
    size = page_bytes(quantized.scheme, page_size, D)
    pages = np.zeros((ceil_div(tokens, page_size), heads, size), np.uint8, like=quantized.values)
    PageView.of(pages, quantized.scheme, page_size, D).write(quantized, np.arange(tokens, like=quantized.values))
    return pages


def unpack_pages(
    pages: U8, scheme: str, head_dim: int, page_size: int, tokens: int, channel: tuple[F32, F32] | None = None
) -> QuantizedKV:
    """Unpack keys or values [tokens, heads, head_dim] of a sequence from its pages; the inverse of `pack_pages`.

    `channel` is (scale, zero) of a scheme by channel. Raises ArgumentError for pages of another shape or dtype, or
    more tokens than they hold.
    """
    require_array("pages", pages, "uint8", ("pages", "heads", page_bytes(scheme, page_size, head_dim)))
    if not 0 <= tokens <= len(pages) * page_size:
        raise ArgumentError("tokens", f"must lie in 0..{len(pages) * page_size}", tokens)
    return PageView.of(pages, scheme, page_size, head_dim).read(np.arange(tokens, like=pages), channel)


@dataclass(frozen=True, eq=False)
class PageView:
    """Pages by token, on their memory.

    `features` u8 [..., page_size, bytes of a token] and, where the scheme stores them, `constants` f16
    [..., page_size, 2]. What is read and written are pages [pages, heads].
    """

    scheme: str
    page_size: int
    features: U8
    constants: F16 | None

    @classmethod
    def of(cls, pages: U8, scheme: str, page_size: int, head_dim: int) -> "PageView":
        """Build a view of contiguous pages u8 [..., page_bytes]."""
        kv_format, leading_shape = kv_scheme(scheme), pages.shape[:-1]
        row = head_dim * kv_format.bits // 8
        features = pages[..., : page_size * row].reshape(*leading_shape, page_size, row)
        if kv_format.by_channel:
            return cls(scheme, page_size, features, None)
        constants = pages.view(np.float16)[..., page_size * row // 2 :].reshape(*leading_shape, page_size, 2)
        return cls(scheme, page_size, features, constants)

    def part(self, index: int) -> "PageView":
        """Return a view of one part of a pool's pages [pages, 2, heads]: 0 its keys, 1 its values."""
        constants = None if self.constants is None else self.constants[:, index]
        return replace(self, features=self.features[:, index], constants=constants)

    def write(self, tokens: QuantizedKV, slots: npt.NDArray[Any]) -> None:
        """Write tokens [n, heads, D] to the slots [n]."""
        page, offset = slots // self.page_size, slots % self.page_size
        values = tokens.values
        if not values.size:
            return
        is_four_bit = kv_scheme(self.scheme).bits == 4
        self.features[page, :, offset] = as_bytes(pack_u4(values, "values")) if is_four_bit else values.view(np.uint8)
        if self.constants is not None:
            self.constants[page, :, offset] = np.stack([tokens.scale, tokens.zero], axis=-1)

    def read(self, slots: npt.NDArray[Any], channel: tuple[F32, F32] | None) -> QuantizedKV:
        """Read a copy of the tokens [n, heads, D] in the slots [n]."""
        page, offset = slots // self.page_size, slots % self.page_size
        kv_format, features = kv_scheme(self.scheme), self.features[page, :, offset]
        values = unpack_u4(as_words(features)) if kv_format.bits == 4 else features.view(kv_format.dtype)
        if self.constants is None:
            if channel is None:
                raise ArgumentError("channel", f"must be (scale, zero) for {self.scheme}", None)
            return QuantizedKV(self.scheme, values, *channel)
        constants = self.constants[page, :, offset]
        return QuantizedKV(self.scheme, values, constants[..., 0].copy(), constants[..., 1].copy())


def require_array(argument: str, array: Any, dtype: str, shape: tuple[int | str, ...]) -> None:
    """Raise ArgumentError unless an array of any library is contiguous, of that dtype and shape.

    A name in the shape stands for any size.
    """
    got_dtype = str(getattr(array, "dtype", type(array).__name__)).rpartition(".")[2]  # PyTorch says torch.uint8
    sizes = shape_of(array)
    is_right_shape = len(sizes) == len(shape) and all(
        isinstance(n, str) or n == dimension for n, dimension in zip(shape, sizes, strict=True)
    )
    if got_dtype != dtype or not is_right_shape:
        expected_shape = ", ".join(map(str, shape))
        raise ArgumentError(argument, f"must be {dtype} [{expected_shape}]", f"{got_dtype} {list(sizes)}")
    if isinstance(array, np.ma.MaskedArray | np.matrix):
        raise ArgumentError(argument, "must be a plain array", type(array).__name__)
    if not _is_contiguous(array):
        raise ArgumentError(argument, "C-contiguous", "another order of its axes, or gaps")


def _is_contiguous(array: Any) -> bool:
    if hasattr(array, "is_contiguous"):  # PyTorch
        return bool(array.is_contiguous())
    return bool(array.flags.c_contiguous) if hasattr(array, "flags") else True  # JAX has no other
