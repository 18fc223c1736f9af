"""What `attention_kv4` refuses, and in which words."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

import ptxlab
from ptxlab.errors import ArgumentError
from ptxlab.layout import KVCache
from ptxlab.spec.dtypes import stored
from tests.support import attention_problems as problems
from tests.support.attention_calls import CACHE, SM90, TEACHING, Q, on_device, sent
from tests.support.fake_gpu import FakeGpu


def changed(array: np.ndarray, at: Any, value: Any) -> np.ndarray:
    array = array.copy()
    array[at] = value
    return array


CHANNEL = problems.problem(0, (3, 0, 1, 2), Hq=4, Hkv=2, scheme="kv4_channel", page_size=32)[1]
ROOM = CACHE.max_pages * 32
VALUES: list[tuple[KVCache, str]] = [
    (
        replace(CACHE, lengths=changed(CACHE.lengths, 2, ROOM + 1)),
        rf"attention_kv4: cache.lengths: must lie in 0..{ROOM} \(got lengths\[2\] is {ROOM + 1}\)",
    ),
    (
        replace(CACHE, lengths=changed(CACHE.lengths, 0, -1)),
        r"cache.lengths: must .* \(got lengths\[0\] is -1\)",
    ),
    (
        replace(CACHE, block_table=changed(CACHE.block_table, (3, 9), CACHE.pages)),
        rf"cache.block_table: pages in use must lie in 0..{CACHE.pages - 1} \(got block_table\[3, 9\] is {CACHE.pages}",
    ),
    (
        replace(CHANNEL, k_channel=(changed(CHANNEL.k_channel[0], (1, 5), np.nan), CHANNEL.k_channel[1])),
        r"attention_kv4: cache.k_channel",
    ),
]
REFUSED: list[tuple[dict[str, Any], str]] = [
    *(({"cache": cache}, message) for cache, message in VALUES),
    ({"cache": Q}, r"attention_kv4: cache: must be a KVCache \(got ndarray\)"),
    (
        {"q": Q[:3]},
        r"attention_kv4: q: must be \[4, Hq, 128\] or \[4, T, Hq, 128\] for .* \(got shape \[3, 1, 4, 1",
    ),
    ({"q": Q[..., :64]}, r"attention_kv4: q: must be \[4, Hq, 128\] or .* \(got shape \[4, 1, 4, 64\]\)"),
    ({"q": Q[0, 0]}, r"attention_kv4: q: must be \[4, Hq, 128\] or .* \(got shape \[4, 128\]\)"),
    ({"q": Q.astype(np.float32)}, r"attention_kv4: q: dtype float16 or bfloat16 \(got float32\)"),
    ({"q": Q.repeat(9, 1)}, r"attention_kv4: q: T must lie in 1..8 \(got T=9\)"),
    ({"q": Q[:, :0]}, r"attention_kv4: q: T must lie in 1..8 \(got T=0\)"),
    ({"q": Q[:, :, :3]}, r"attention_kv4: q: Hq must be 1 to 16 times the cache's 2 \(got Hq=3\)"),
    ({"q": Q.repeat(9, 2)}, r"attention_kv4: q: Hq must be 1 to 16 times the cache's 2 \(got Hq=36\)"),
    ({"q": Q[:, :, :0]}, r"attention_kv4: q: Hq must be 1 to 16 times the cache's 2 \(got Hq=0\)"),
    ({"q": Q[:, :, ::-1]}, r"attention_kv4: q: C-contiguous \(got strides"),
    ({"window": 0}, r"attention_kv4: window: must be an integer, 1 or more, or None \(got 0\)"),
    ({"window": 2.0}, r"attention_kv4: window: must be an integer, 1 or more, or None \(got 2.0\)"),
    ({"scale": 0.0}, r"attention_kv4: scale: must be above 0 and finite in float32 \(got 0.0\)"),
    ({"scale": np.nan}, r"attention_kv4: scale: must be above 0 and finite in float32 \(got nan\)"),
    ({"scale": 1e39}, r"attention_kv4: scale: must be above 0 and finite in float32 \(got 1e\+39\)"),
    (
        {"out": np.zeros((4, 1, 4, 64), np.float16)},
        r"attention_kv4: out: shape \[4, 1, 4, 128\] \(got \[4, 1, 4, 64\]\)",
    ),
    ({"out": np.zeros(Q.shape, np.float32)}, r"attention_kv4: out: dtype float16 \(got float32\)"),
    ({"out": (Q.copy(), Q.copy())}, r"attention_kv4: out: must be one array without return_lse \(got a tuple of 2\)"),
    ({"out": (Q.copy(),), "return_lse": True}, r"attention_kv4: out: must be \(out, lse\) \(got a tuple of 1\)"),
    (
        {"out": (Q.copy(), np.zeros((4, 4), np.float32)), "return_lse": True},
        r"attention_kv4: out lse: shape \[4, 1, 4\] \(got \[4, 4\]\)",
    ),
    ({"return_lse": 1}, r"attention_kv4: return_lse: must be True or False \(got 1\)"),
    ({"check": None}, r"attention_kv4: check: must be True or False \(got None\)"),
    ({"programmatic": 1}, r"attention_kv4: programmatic: must be True or False \(got 1\)"),
    ({"backend": "tpu"}, r"backend: one of gpu, emulator \(got tpu\)"),
    ({"kernel": "append_kv4"}, rf"attention_kv4: kernel: must be one of attention_kv8, .*, {SM90} \(got append_kv4\)"),
    ({"kernel": "attention_kv8"}, r"attention_kv4: cache: scheme must be kv8 for attention_kv8 \(got kv4\)"),
    ({"kernel": TEACHING[1]}, rf"attention_kv4: cache: page_size must be 64 for {TEACHING[1]} \(got 32\)"),
]


@pytest.mark.parametrize(("change", "message"), REFUSED, ids=[str(i) for i in range(len(REFUSED))])
def test_bad_input_is_refused_by_name_and_nothing_is_written(change: dict[str, Any], message: str) -> None:
    out = np.zeros_like(Q)
    given = {"q": Q, "cache": CACHE, "out": out, "backend": "emulator", **change}
    with pytest.raises(ArgumentError, match=message) as raised:
        ptxlab.attention_kv4(**given)
    assert "\n" not in str(raised.value) and not out.any()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"window": 5}, r"window: must be None for attention_kv4_naive \(got 5\)"),
        ({"return_lse": True}, r"return_lse: must be False for attention_kv4_naive \(got True\)"),
        ({"T": 2}, r"q: T must be 1 for attention_kv4_naive \(got 2\)"),
        ({"D": 64}, r"cache: head_dim must be 128 for attention_kv4_naive \(got 64\)"),
        ({"dtype": "bfloat16"}, r"q: dtype float16 for attention_kv4_naive \(got bfloat16\)"),
        ({"scheme": "kv4_channel"}, r"cache: scheme must be kv4 for attention_kv4_naive \(got kv4_channel\)"),
    ],
)
def test_what_is_not_a_teaching_steps_is_refused(options: dict[str, Any], message: str) -> None:
    sizes = {name: options.pop(name) for name in ("T", "D", "scheme") if name in options}
    q, cache = problems.problem(0, (70, 1), **{"Hq": 2, "Hkv": 2, "scheme": "kv4", **sizes})
    q = stored(q, options.pop("dtype", "float16"))
    with pytest.raises(ArgumentError, match=f"attention_kv4: {message}"):
        ptxlab.attention_kv4(q, cache, kernel="attention_kv4_naive", backend="emulator", **options)


@pytest.mark.parametrize(("cache", "message"), VALUES, ids=[str(i) for i in range(len(VALUES))])
def test_numbers_on_a_device_are_looked_at_if_asked_for(fake: FakeGpu, cache: KVCache, message: str) -> None:
    with pytest.raises(ArgumentError, match=message):
        ptxlab.attention_kv4(sent(Q), on_device(cache), check=True)
    assert fake.launched == []


def test_arrays_in_different_places_are_refused(fake: FakeGpu) -> None:
    with pytest.raises(ArgumentError, match=r"attention_kv4: cache.pool: must be on the host, as the other arrays are"):
        ptxlab.attention_kv4(Q, on_device(CACHE), backend="emulator")
    elsewhere = on_device(CACHE)
    elsewhere.pool.device = 1
    with pytest.raises(ArgumentError, match=r"attention_kv4: cache.pool: on the current device 0 \(got device 1\)"):
        ptxlab.attention_kv4(sent(Q), elsewhere)
    with pytest.raises(ArgumentError, match=r"backend: arrays on the CPU \(NumPy\) for the emulator"):
        ptxlab.attention_kv4(sent(Q), on_device(CACHE), backend="emulator")
    assert fake.launched == []
