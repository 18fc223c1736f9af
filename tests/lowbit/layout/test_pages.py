"""Pages of the KV cache: every byte at its place by the contract's own words, and back."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ptxlab.arithmetic import ceil_div
from ptxlab.errors import ArgumentError
from ptxlab.lowbit.layout import PAGE_SIZES, pack_pages, page_bytes, unpack_pages
from ptxlab.lowbit.quant import KV_SCHEMES, QuantizedKV
from tests.support.random_weights import assert_equal, every_scheme, random_kv

every_size = pytest.mark.parametrize("page_size", PAGE_SIZES)


def channel_of(quantized: QuantizedKV):
    return (quantized.scale, quantized.zero) if KV_SCHEMES[quantized.scheme].by_channel else None


@pytest.mark.default_cases("16-kv8_channel")
@every_scheme
@every_size
@given(
    tokens=st.integers(0, 200), heads=st.integers(1, 3), D=st.sampled_from([8, 32, 64, 128]), seed=st.integers(0, 99)
)
def test_round_trip(scheme, page_size, tokens, heads, D, seed):
    quantized = random_kv(scheme, tokens, heads, D, seed)
    pages = pack_pages(quantized, page_size)
    assert pages.dtype == np.uint8
    assert pages.shape == (ceil_div(tokens, page_size), heads, page_bytes(scheme, page_size, D))
    assert_equal(unpack_pages(pages, scheme, D, page_size, tokens, channel_of(quantized)), quantized)


@every_size
@pytest.mark.parametrize("D", [64, 128, 256])
def test_every_byte_of_a_kv4_page(page_size, D):
    """Token s: D/2 bytes at s·D/2, word j of them dims 8j..8j+7; f16 scale and zero at page_size·D/2 + 4·s."""
    quantized = random_kv("kv4", page_size, 1, D)
    page = bytes(pack_pages(quantized, page_size)[0, 0])
    assert len(page) == page_size * (D // 2 + 4)
    for s in range(page_size):
        for d in range(D):
            byte = page[s * D // 2 + d // 8 * 4 + d % 4]
            assert byte >> (4 * (d % 8 // 4)) & 15 == quantized.values[s, 0, d]
        constants = page[page_size * D // 2 + 4 * s :][:4]
        assert constants == quantized.scale[s, 0].tobytes() + quantized.zero[s, 0].tobytes()


@pytest.mark.parametrize("scheme", ["kv8", "kv8_channel"])
def test_every_byte_of_an_8_bit_page(scheme):
    quantized = random_kv(scheme, 16, 2, 64)
    for head in range(2):
        page = pack_pages(quantized, 16)[0, head].tobytes()
        assert page[: 16 * 64] == quantized.values[:, head].tobytes()
        stored = np.stack([quantized.scale, quantized.zero], -1)[:, head].tobytes() if scheme == "kv8" else b""
        assert page[16 * 64 :] == stored


def test_sizes_of_pages():
    assert page_bytes("kv4", 64, 128) == 4352  # the contract's example
    assert page_bytes("kv8", 64, 128) == 64 * (128 + 4)
    assert page_bytes("kv4_channel", 16, 256) == 16 * 128
    assert page_bytes("kv8_channel", 32, 64) == 32 * 64


@every_scheme
def test_what_the_last_page_has_left_is_zero(scheme):
    quantized = random_kv(scheme, 17, 1, 64)
    last = pack_pages(quantized, 16)[1, 0]
    token = 32 if KV_SCHEMES[scheme].bits == 4 else 64
    assert not last[token : 16 * token].any()
    if not KV_SCHEMES[scheme].by_channel:
        assert not last[16 * token + 4 :].any()


@every_scheme
def test_what_is_unpacked_is_contiguous_and_its_own(scheme):
    quantized = random_kv(scheme, 20, 2, 64)
    pages = pack_pages(quantized, 16)
    unpacked = unpack_pages(pages, scheme, 64, 16, 20, channel_of(quantized))
    for name in ("values", "scale", "zero"):
        array = getattr(unpacked, name)
        assert array.flags.c_contiguous and not np.shares_memory(array, pages)


def test_refuses_sizes():
    with pytest.raises(ArgumentError, match=r"page_size: must be one of 16, 32, 64 \(got 48\)"):
        page_bytes("kv4", 48, 128)
    with pytest.raises(ArgumentError, match="scheme: must be one of kv4"):
        page_bytes("fp8", 64, 128)
    for D in (0, 12, -8):
        with pytest.raises(ArgumentError, match="head_dim: must be a positive multiple of 8"):
            page_bytes("kv4", 64, D)


def test_refuses_to_pack():
    quantized = random_kv("kv4", 4, 2, 64)
    with pytest.raises(ArgumentError, match=r"quantized: must be one sequence \[tokens, heads, D\] .*\(1, 4, 2, 64\)"):
        pack_pages(QuantizedKV("kv4", *(a[None] for a in (quantized.values, quantized.scale, quantized.zero))), 64)
    with pytest.raises(ArgumentError, match=r"quantized: must be a QuantizedKV .*got ndarray"):
        pack_pages(quantized.values, 64)
    quantized.values[1, 0, 3] = 16
    with pytest.raises(ArgumentError, match=r"values: must be at most 15 \(got values\[1, 0, 3\] is 16\)"):
        pack_pages(quantized, 64)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"tokens": 129}, r"tokens: must lie in 0..128 \(got 129\)"),
        ({"tokens": -1}, "tokens: must lie in 0..128"),
        ({"head_dim": 128}, r"pages: must be uint8 \[pages, heads, 4352\] \(got uint8 \[2, 3, 2304\]\)"),
        ({"pages": np.zeros((2, 3, 2304), np.int8)}, r"pages: must be uint8 .*got int8"),
        ({"pages": np.zeros((3, 2, 2304), np.uint8).swapaxes(0, 1)}, "pages: C-contiguous"),
        ({"pages": None}, r"pages: must be uint8 .*got NoneType \[\]"),
        ({"scheme": "kv4_channel", "pages": np.zeros((2, 3, 2048), np.uint8)}, r"channel: must be \(scale, zero\)"),
    ],
)
def test_refuses_to_unpack(change, message):
    good = {"pages": np.zeros((2, 3, 2304), np.uint8), "scheme": "kv4", "head_dim": 64, "page_size": 64, "tokens": 100}
    assert unpack_pages(**good).shape == (100, 3, 64)
    with pytest.raises(ArgumentError, match=message):
        unpack_pages(**good | change)
