"""The paged cache: what is scattered through a shuffled table is gathered, all else is left alone, and bad input."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ptxlab.arithmetic import ceil_div
from ptxlab.errors import ArgumentError
from ptxlab.lowbit.layout import PAGE_SIZES, KVCache, gather, pack_pages, page_bytes, scatter, write_slots
from ptxlab.lowbit.quant import KV_SCHEMES, QuantizedKV, quantize_kv
from ptxlab.lowbit.reference import rotate_heads
from tests.support.random_weights import assert_equal, every_scheme, random_kv


def shuffled_cache(scheme, page_size, lengths, heads, D, seed, spare=3) -> KVCache:
    """Make a cache with pages in any order, in a pool of random bytes with `spare` unused pages.

    Unused entries of the table are far outside the pool.
    """
    rng = np.random.default_rng(seed)
    used = [ceil_div(length, page_size) for length in lengths]
    pages = sum(used) + spare
    order = rng.permutation(pages)
    table = rng.choice([-1, pages, 2**31 - 1, -(2**31)], (len(lengths), max(used) + 2)).astype(np.int32)
    for b, count in enumerate(used):
        table[b, :count], order = order[:count], order[count:]
    channel = None
    if KV_SCHEMES[scheme].by_channel:
        zero = np.full((heads, D), 0 if KV_SCHEMES[scheme].low else 8, np.float32)
        channel = rng.uniform(0.1, 1, (heads, D)).astype(np.float32), zero
    return KVCache(
        pool=rng.integers(0, 256, (pages, 2, heads, page_bytes(scheme, page_size, D)), np.uint8),
        block_table=table, lengths=np.array(lengths, np.int32), page_size=page_size, head_dim=D, scheme=scheme,
        k_channel=channel, v_channel=channel,
    )  # fmt: skip


def sequences(cache: KVCache, seed: int) -> tuple[list[QuantizedKV], list[QuantizedKV]]:
    """Make random keys and values for every sequence of the cache."""

    def one(b: int, part: int, channel) -> QuantizedKV:
        size = int(cache.lengths[b]), cache.num_kv_heads, cache.head_dim
        random = random_kv(cache.scheme, *size, seed + 2 * b + part)
        return random if channel is None else QuantizedKV(cache.scheme, random.values, *channel)

    batch = range(cache.batch)
    return [one(b, 0, cache.k_channel) for b in batch], [one(b, 1, cache.v_channel) for b in batch]


def caches():
    lengths = st.lists(st.integers(0, 150) | st.sampled_from([0, 1, 16, 64, 128]), min_size=1, max_size=4)
    return st.builds(
        shuffled_cache, st.sampled_from([*KV_SCHEMES]), st.sampled_from(PAGE_SIZES), lengths, st.integers(1, 3),
        st.sampled_from([64, 128, 256]), st.integers(0, 2**32 - 1),
    )  # fmt: skip


@pytest.mark.full
@given(caches(), st.integers(0, 99))
def test_what_is_scattered_is_gathered(cache, seed):
    keys, values = sequences(cache, seed)
    scatter(cache, keys, values)
    for scattered, gathered in zip((keys, values), gather(cache), strict=True):
        for a, b in zip(scattered, gathered, strict=True):
            assert_equal(a, b)


@pytest.mark.full
@given(caches(), st.integers(0, 99))
def test_the_pages_of_a_sequence_are_its_packed_pages_and_nothing_else_changes(cache, seed):
    """The bytes are those of `pack_pages`, in a last page those of its tokens; every other byte of the pool stays."""
    keys, values = sequences(cache, seed)
    expected = cache.pool.copy()
    token = cache.head_dim * KV_SCHEMES[cache.scheme].bits // 8
    for b, part_of in enumerate(zip(keys, values, strict=True)):
        for part, quantized in enumerate(part_of):
            for i, page in enumerate(pack_pages(quantized, cache.page_size)):
                at = expected[cache.block_table[b, i], part]
                count = min(cache.page_size, int(cache.lengths[b]) - i * cache.page_size)
                at[:, : count * token] = page[:, : count * token]
                constants = cache.page_size * token
                at[:, constants : constants + 4 * count] = page[:, constants : constants + 4 * count]
    scatter(cache, keys, values)
    np.testing.assert_array_equal(cache.pool, expected)


@every_scheme
def test_slots_are_the_contract_s(scheme):
    cache = shuffled_cache(scheme, 16, [40, 0, 16], 2, 64, seed=1)
    for b, length in enumerate([40, 0, 16]):
        expected = [int(cache.block_table[b, t // 16]) * 16 + t % 16 for t in range(length)]
        assert cache.slots(b).tolist() == expected and cache.slots(b).dtype == np.int32


def test_tokens_are_appended_by_their_slots():
    """A decode step: one more token per sequence, at the slot of its last."""
    cache = KVCache.empty(2, 3, 2, 64, page_size=16)
    k, v = np.random.default_rng(0).standard_normal((2, 2, 40, 2, 64)).astype(np.float16)
    for t in range(40):
        cache.lengths[:] += 1
        slots = np.array([cache.slots(b)[-1] for b in range(2)])
        write_slots(cache, quantize_kv(k[:, t]), quantize_kv(v[:, t]), slots)
    for appended, gathered in zip((k, v), gather(cache), strict=True):
        for b in range(2):
            assert_equal(gathered[b], quantize_kv(appended[b]))


def test_keys_of_a_rotated_cache():
    """Keys alone are rotated before they are quantised; what describes the cache for a plan says so."""
    plain, rotated = (KVCache.empty(1, 1, 2, 64, scheme="kv8", rotated=rotated) for rotated in (False, True))
    assert plain.description != rotated.description and replace(rotated, lengths=plain.lengths).rotated
    x = np.random.default_rng(0).standard_normal((5, 2, 64)).astype(np.float16)
    assert plain.rotate(x) is x
    assert_equal(plain.quantize_keys(x), quantize_kv(x, "kv8"))
    assert_equal(rotated.quantize_keys(x), quantize_kv(rotate_heads(x), "kv8"))
    assert_equal(rotated.quantize_values(x), quantize_kv(x, "kv8"))


@pytest.mark.parametrize("scheme", [name for name, scheme in KV_SCHEMES.items() if scheme.by_channel])
def test_constants_by_channel_exclude_a_rotation(scheme):
    with pytest.raises(ArgumentError, match=f"rotated: must be False for {scheme}: only kv4 and kv8 rotate keys"):
        KVCache.empty(1, 1, 2, 64, scheme=scheme, k_channel=CHANNEL, v_channel=CHANNEL, rotated=True)


@every_scheme
def test_an_empty_cache(scheme):
    channel = (np.ones((2, 64), np.float32), np.zeros((2, 64), np.float32)) if "channel" in scheme else None
    cache = KVCache.empty(3, 4, 2, 64, page_size=32, scheme=scheme, k_channel=channel, v_channel=channel)
    assert (cache.batch, cache.max_pages, cache.num_kv_heads, cache.pages) == (3, 4, 2, 12)
    assert sorted(cache.block_table.ravel()) == list(range(12)) and not cache.lengths.any() and not cache.pool.any()
    assert [part[2].shape for part in gather(cache)] == [(0, 2, 64)] * 2
    cache.check()


@pytest.mark.parametrize("name", ["batch", "max_pages", "num_kv_heads"])
def test_refuses_an_empty_cache_of_nothing(name):
    sizes = {"batch": 1, "max_pages": 1, "num_kv_heads": 1} | {name: 0}
    with pytest.raises(ArgumentError, match=rf"{name}: must be an integer, at least 1 \(got 0\)"):
        KVCache.empty(**sizes, head_dim=64)


CHANNEL = (np.ones((2, 64), np.float32), np.zeros((2, 64), np.float32))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"head_dim": 32}, r"head_dim: must be one of 64, 128, 256 \(got 32\)"),
        ({"page_size": 8}, r"page_size: must be one of 16, 32, 64 \(got 8\)"),
        ({"scheme": "int4"}, "scheme: must be one of kv4, kv8, kv4_channel, kv8_channel .got int4"),
        ({"head_dim": 128}, r"pool: must be uint8 \[pages, 2, Hkv, 1088\] \(got uint8 \[12, 2, 2, 576\]\)"),
        ({"scheme": "kv8"}, r"pool: must be uint8 \[pages, 2, Hkv, 1088\]"),
        ({"pool": np.zeros((12, 3, 2, 576), np.uint8)}, r"pool: must be uint8 \[pages, 2, Hkv, 576\]"),
        ({"pool": np.zeros((12, 2, 2, 576), np.int8)}, r"pool: must be uint8 .*got int8 \[12, 2, 2, 576\]"),
        ({"pool": np.zeros((2, 12, 2, 576), np.uint8).swapaxes(0, 1)}, "pool: C-contiguous"),
        ({"pool": [1]}, r"pool: must be uint8 .*got list \[\]"),
        ({"block_table": np.zeros((3, 4), np.int64)}, r"block_table: must be int32 \[B, max_pages\] .*int64 \[3, 4\]"),
        ({"block_table": np.zeros(4, np.int32)}, r"block_table: must be int32 \[B, max_pages\]"),
        ({"block_table": np.zeros((3, 8), np.int32)[:, ::2]}, "block_table: C-contiguous"),
        ({"lengths": np.zeros(4, np.int32)}, r"lengths: must be int32 \[3\] \(got int32 \[4\]\)"),
        ({"lengths": np.zeros(3, np.uint32)}, r"lengths: must be int32 \[3\] \(got uint32 \[3\]\)"),
        ({"k_channel": CHANNEL}, r"k_channel: must be None for kv4 \(got tuple\)"),
        ({"rotated": 1}, r"rotated: must be True or False \(got 1\)"),
    ],
)
def test_what_does_not_fit_together(change, message):
    with pytest.raises(ArgumentError, match=message) as error:
        replace(KVCache.empty(3, 4, 2, 64, page_size=16), **change)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("channel", "message"),
    [
        (None, r"v_channel: must be \(scale, zero\) for kv4_channel \(got None\)"),
        (CHANNEL[0], r"v_channel: must be \(scale, zero\) for kv4_channel \(got ndarray\)"),
        ((*CHANNEL, None), r"v_channel: must be \(scale, zero\) for kv4_channel \(got tuple\)"),
        ((CHANNEL[0][:1], CHANNEL[1]), r"v_channel scale: must be float32 \[2, 64\] \(got float32 \[1, 64\]\)"),
        ((CHANNEL[0], CHANNEL[1].astype(np.uint8)), r"v_channel zero: must be float32 \[2, 64\]"),
    ],
)
def test_constants_that_do_not_fit(channel, message):
    with pytest.raises(ArgumentError, match=message):
        KVCache.empty(1, 1, 2, 64, scheme="kv4_channel", k_channel=CHANNEL, v_channel=channel)


def test_check_looks_at_the_numbers():
    cache = KVCache.empty(2, 3, 2, 64, page_size=16)
    cache.lengths[:] = 48, 17
    cache.block_table[1, 2] = 2**31 - 1  # not in use
    cache.check()
    gather(cache)
    for number in (6, -1):
        cache.block_table[1, 1] = number
        message = rf"block_table: pages in use must lie in 0..5 \(got block_table\[1, 1\] is {number}\)"
        for function in (KVCache.check, gather, lambda c: scatter(c, [], [])):
            with pytest.raises(ArgumentError, match=message):
                function(cache)
    for number in (49, -1):
        cache.lengths[0] = number
        with pytest.raises(ArgumentError, match=rf"lengths: must lie in 0..48 \(got lengths\[0\] is {number}\)"):
            cache.check()


def test_check_looks_at_constants_by_channel():
    scale = CHANNEL[0].copy()
    scale[1, 7] = 0
    bad = scale, CHANNEL[1]
    cache = KVCache.empty(1, 1, 2, 64, scheme="kv8_channel", k_channel=CHANNEL, v_channel=bad)
    with pytest.raises(ArgumentError, match=r"v_channel scale: scales by channel .*channel \[1, 7\] has 0"):
        cache.check()


def test_refuses_to_write():
    cache = KVCache.empty(1, 2, 2, 64, page_size=16)
    good, of_one_head = random_kv("kv4", 3, 2, 64), random_kv("kv4", 3, 1, 64)
    with pytest.raises(ArgumentError, match=r"values: must be kv4 \[3, 2, 64\] \(got kv4 \[3, 1, 64\]\)"):
        write_slots(cache, good, of_one_head, np.arange(3))
    with pytest.raises(ArgumentError, match=r"keys: must be kv4 \[3, 2, 64\] \(got kv8 \[3, 2, 64\]\)"):
        write_slots(cache, random_kv("kv8", 3, 2, 64), good, np.arange(3))
    for slots in ([0, 1, 32], [-1, 0, 1]):
        with pytest.raises(ArgumentError, match=rf"slots: must lie in 0..31 \(got {min(slots)}..{max(slots)}\)"):
            write_slots(cache, good, good, np.array(slots))
    with pytest.raises(ArgumentError, match=r"keys: must be 1, one per sequence \(got 2\)"):
        scatter(cache, [good, good], [good])
    assert not cache.pool.any()


class OfPyTorch:
    """Stand-in with the attributes of a PyTorch tensor."""

    def __init__(self, shape: tuple[int, ...], dtype: str, contiguous: bool = True) -> None:
        self.shape, self.dtype, self.is_contiguous = shape, f"torch.{dtype}", lambda: contiguous


def test_arrays_of_another_library():
    arrays = {
        "pool": OfPyTorch((4, 2, 2, 576), "uint8"),
        "block_table": OfPyTorch((2, 2), "int32"),
        "lengths": OfPyTorch((2,), "int32"),
    }
    cache = KVCache(**arrays, page_size=16, head_dim=64)
    assert (cache.pages, cache.num_kv_heads, cache.batch, cache.max_pages) == (4, 2, 2, 2)
    with pytest.raises(ArgumentError, match=r"lengths: must be int32 \[2\] \(got int64 \[2\]\)"):
        replace(cache, lengths=OfPyTorch((2,), "int64"))
    with pytest.raises(ArgumentError, match="pool: C-contiguous"):
        replace(cache, pool=OfPyTorch((4, 2, 2, 576), "uint8", contiguous=False))
