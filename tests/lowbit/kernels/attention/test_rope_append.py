"""`rope_append_kv4`: every bit of q and of keys as the reference rotates them, every byte of the pool as `append_kv4`
leaves it."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import ptxlab
from ptxlab import gpu, registry
from ptxlab.errors import ArgumentError, EmulationError, UnavailableError
from ptxlab.lowbit.kernels.attention.append import ROPE_APPEND
from ptxlab.lowbit.layout import HEAD_DIMS, PAGE_SIZES
from ptxlab.lowbit.quant import KV_SCHEMES
from tests.support.append_problems import (
    BACKENDS,
    DTYPES,
    ON_GPU,
    RNG,
    FusedProblem,
    draw_rotations,
    gaussian_kv,
    make_problem,
    replace_in_source,
)
from tests.support.attention_calls import on_device, to_device_array
from tests.support.fake_gpu import DeviceArray, FakeGpu


def make_fused_problem(
    tokens: int,
    heads: int,
    ratio: int,
    D: int,
    scheme: str = "kv4",
    size: int = 16,
    *,
    dtype: np.dtype = DTYPES[0],
    index: Any = np.int32,
    positions: bool = True,
    kept: bool = True,
) -> FusedProblem:
    """Make a problem in which every fourth token is padding, with a position far outside the tables."""
    q = (RNG.standard_normal((tokens, ratio * heads, D)) * 3).astype(dtype)
    rope = draw_rotations(tokens, D, index, positions)
    problem = make_problem(*gaussian_kv(tokens, heads, D, dtype), scheme, size, index=index, rope=rope)
    if positions:
        wild = RNG.choice([-1, -(2**31), 50, 2**31 - 1], tokens)
        rope[2][problem.slots < 0] = wild[problem.slots < 0]
    return FusedProblem(q, problem, kept)


@st.composite
def problems(draw: st.DrawFn, tokens: int, heads: int) -> FusedProblem:
    return make_fused_problem(
        draw(st.integers(1, tokens)),
        draw(st.integers(1, heads)),
        draw(st.integers(1, 3)),
        draw(st.sampled_from(HEAD_DIMS)),
        draw(st.sampled_from(sorted(KV_SCHEMES))),
        draw(st.sampled_from(PAGE_SIZES)),
        dtype=draw(st.sampled_from(DTYPES)),
        index=draw(st.sampled_from((np.int32, np.int64))),
        positions=draw(st.booleans()),
        kept=draw(st.booleans()),
    )


@pytest.mark.full
@given(problem=problems(tokens=9, heads=3), rows=st.sampled_from((0, 1, 2, 4)))
@settings(max_examples=8)
def test_every_bit_in_the_emulator(problem: FusedProblem, rows: int) -> None:
    q, pool, outcome = problem.run(rows=rows)
    assert (
        np.array_equal(q, problem.expected_rows)
        and np.array_equal(pool, problem.kv.expected_pool)
        and outcome.findings == ()
    )


@pytest.mark.long(30)
@pytest.mark.gpu
@ON_GPU
@given(problem=problems(tokens=300, heads=9))
@settings(max_examples=200)
def test_every_bit_on_the_gpu(problem: FusedProblem) -> None:
    problem.check("gpu")


@pytest.mark.default_cases("kv4-64-emulator")
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("D", HEAD_DIMS)
@pytest.mark.parametrize("scheme", KV_SCHEMES)
def test_every_scheme_and_head_dim(scheme: str, D: int, backend: str) -> None:
    make_fused_problem(11, 3, 2, D, scheme, 64, dtype=DTYPES[D == 128], index=(np.int32, np.int64)[D == 64]).check(
        backend
    )


@pytest.mark.full
@pytest.mark.parametrize("scheme", KV_SCHEMES)
@pytest.mark.parametrize("rows", [2, 4])
def test_rows_of_a_thread_have_tokens_or_heads_of_their_own(rows: int, scheme: str) -> None:
    """A thread's rows are tokens with constants by channel, each at its own position; else heads of one token."""
    problem = make_fused_problem(rows + 1, rows + 1, 1, 64, scheme)
    q, pool, _ = problem.run(rows=rows)
    assert np.array_equal(q, problem.expected_rows) and np.array_equal(pool, problem.kv.expected_pool)


@pytest.mark.default_cases("3-8-8-emulator", "2-40-1-emulator")
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(("tokens", "heads", "ratio"), [(1, 1, 1), (2, 40, 1), (3, 8, 8)])
def test_more_heads_than_a_block_has_and_fewer(tokens: int, heads: int, ratio: int, backend: str) -> None:
    make_fused_problem(tokens, heads, ratio, 128, size=64, positions=False).check(backend)


# Would anybody notice? Small mistakes in the source and in the rows that it shares with `append_kv4`.
CHANGES = {
    "queries of the next group": ("(size_t(section) * heads + h)", "(size_t(section) * heads + h + 1)"),
    "keys are values": ("section > ratio;", "section >= ratio;"),
    "tokens beyond the last, of q": ("t >= tokens || h >= heads", "h >= heads"),
    "heads beyond the last, of q": ("t >= tokens || h >= heads", "t >= tokens"),
    "tokens beyond the last": ("t < tokens && !is_q ? slots[t]", "!is_q ? slots[t]"),
    "positions beyond the last": ("positions && t < tokens ?", "positions ?"),
    "positions of padding": ("min(size_t(position), size_t(turns - 1))", "position"),
    "halves exchanged": (
        "lane_values[0] = y.halves[0], lane_values[Rows::kLanes]",
        "lane_values[Rows::kLanes] = y.halves[0], lane_values[0]",
    ),
    "keys where as many queries would be": ("size_t(is_q ? ratio : 1) * heads", "size_t(ratio) * heads"),
    "keys of a cache alone": ("KEYS && !is_v", "KEYS && section == 0"),
    "heads beyond the last": ("row_slot < 0 || head + i / kTokens >= heads", "row_slot < 0"),
    "no wait for the kernel before": ("    ptxlab::wait_for_predecessors();", ""),
    "qkv is read ahead of the wait": (
        "    Rows::Channels channels;",
        "    if (token < tokens && is_q) q[token] = qkv[token];\n    Rows::Channels channels;",
    ),
}


@pytest.mark.full
@pytest.mark.parametrize("change", CHANGES)
def test_a_changed_kernel_is_noticed(change: str) -> None:
    source = replace_in_source(registry.find(ROPE_APPEND.name)[1][0], *CHANGES[change])
    assert any(is_killed(problem, source) for problem in battery())


@pytest.mark.full
def test_the_kernel_itself_passes() -> None:
    assert not any(is_killed(problem, registry.find(ROPE_APPEND.name)[1][0]) for problem in battery())


def battery() -> list[FusedProblem]:
    full = make_fused_problem(9, 3, 2, 64)
    slots = np.arange(9, dtype=np.int32) + 7
    cache = replace(full.kv.cache, pool=full.kv.cache.pool[:1])
    rope = (*full.kv.rope[:2], np.clip(full.kv.rope[2], 0, 49))
    return [make_fused_problem(9, 3, 2, 64), replace(full, kv=replace(full.kv, cache=cache, slots=slots, rope=rope))]


def is_killed(problem: FusedProblem, source: Any) -> bool:
    try:
        q, pool, outcome = problem.run(source, rows=4)
    except EmulationError:  # a stray access
        return True
    right = np.array_equal(q, problem.expected_rows) and np.array_equal(pool, problem.kv.expected_pool)
    return bool(outcome.findings) or not right


PROBLEM = make_fused_problem(6, 2, 3, 64, kept=False)
QKV, ROPE = PROBLEM.qkv, PROBLEM.kv.rope


def call(fake_cache: Any, **options: Any) -> Any:
    """Call `rope_append_kv4` on device arrays."""
    rope = tuple(map(to_device_array, ROPE))
    return ptxlab.rope_append_kv4(
        to_device_array(QKV), fake_cache, to_device_array(PROBLEM.kv.slots), rope=rope, **options
    )


def test_on_the_device_q_is_made_or_given(fake: FakeGpu) -> None:
    for out in (None, to_device_array(np.zeros((6, 6, 64), np.float16))):
        cache = on_device(replace(PROBLEM.kv.cache, pool=PROBLEM.kv.cache.pool.copy()))
        q = call(cache, out=out)
        assert q is out or out is None
        assert np.array_equal(q.host, PROBLEM.expected_rows)
        assert np.array_equal(cache.pool.host, PROBLEM.kv.expected_pool)
    assert fake.launched[0] == (ROPE_APPEND.name, fake.launched[0][1]) and fake.loads == 1


@pytest.mark.full
def test_rows_may_lie_apart(fake: FakeGpu) -> None:
    rows = np.full((6, QKV.shape[1] + 40), np.nan, np.float16)
    rows[:, 16:-24] = QKV
    qkv, rope, slots = rows[:, 16:-24], tuple(map(to_device_array, ROPE)), to_device_array(PROBLEM.kv.slots)
    assert not qkv.flags.c_contiguous
    cache = replace(PROBLEM.kv.cache, pool=PROBLEM.kv.cache.pool.copy())
    q = ptxlab.rope_append_kv4(qkv, cache, PROBLEM.kv.slots, rope=ROPE, backend="emulator")
    assert np.array_equal(q, PROBLEM.expected_rows) and np.array_equal(cache.pool, PROBLEM.kv.expected_pool)
    device = on_device(replace(PROBLEM.kv.cache, pool=PROBLEM.kv.cache.pool.copy()))
    q = ptxlab.rope_append_kv4(DeviceArray(qkv, has_gaps=True), device, slots, rope=rope)
    assert np.array_equal(q.host, PROBLEM.expected_rows) and np.array_equal(device.pool.host, PROBLEM.kv.expected_pool)
    assert len(fake.launched) == 1
    inside = DeviceArray(rows.reshape(-1)[16 + QKV.shape[1] :][: 6 * 6 * 64].reshape(6, 6, 64))
    with pytest.raises(ArgumentError, match=r"out: must not share memory with qkv \(got some of it\)"):
        ptxlab.rope_append_kv4(DeviceArray(qkv, has_gaps=True), device, slots, rope=rope, out=inside)


def test_q_is_not_written_where_qkv_is_read(fake: FakeGpu) -> None:
    """The call refuses it on the host and on the device.

    On the device a repeated call skips the checks.
    """
    room = np.concatenate([QKV.reshape(-1), np.zeros(6 * 6 * 64, np.float16)])
    qkv, ends = room[: QKV.size].reshape(QKV.shape), (0, QKV.size - 8)  # inside, and by eight values
    cache, pool = on_device(PROBLEM.kv.cache), PROBLEM.kv.cache.pool.copy()
    refused = r"^rope_append_kv4: out: must not share memory with qkv \(got some of it\)$"
    rope, slots = tuple(map(to_device_array, ROPE)), to_device_array(PROBLEM.kv.slots)
    separate_out = room[QKV.size :].reshape(6, 6, 64)
    ptxlab.rope_append_kv4(to_device_array(qkv), cache, slots, rope=rope, out=to_device_array(separate_out))
    for begin in ends:
        out = room[begin:][: 6 * 6 * 64].reshape(6, 6, 64)
        with pytest.raises(ArgumentError, match=refused):
            ptxlab.rope_append_kv4(to_device_array(qkv), cache, slots, rope=rope, out=to_device_array(out))
        with pytest.raises(ArgumentError, match=refused):
            ptxlab.rope_append_kv4(qkv, PROBLEM.kv.cache, PROBLEM.kv.slots, rope=ROPE, out=out, backend="emulator")
    assert len(fake.launched) == 1 and np.array_equal(qkv, QKV) and np.array_equal(PROBLEM.kv.cache.pool, pool)


def test_a_capture_needs_an_array_for_q(fake: FakeGpu) -> None:
    cache = on_device(PROBLEM.kv.cache)
    fake.runs = False
    call(cache)
    fake.capturing = True
    with pytest.raises(ArgumentError, match=r"rope_append_kv4: out: must be given in a capture: .*\[6, 6, 64\] of fl"):
        call(cache)
    call(cache, out=to_device_array(np.zeros((6, 6, 64), np.float16)))


def test_no_tokens(fake: FakeGpu) -> None:
    empty = {"slots": PROBLEM.kv.slots[:0], "rope": tuple(array[:0] for array in ROPE[:2]), "backend": "emulator"}
    assert ptxlab.rope_append_kv4(QKV[:0], PROBLEM.kv.cache, **empty).shape == (0, 6, 64)


def test_another_gpu_is_told_what_the_kernel_runs_on(fake: FakeGpu) -> None:
    fake.arch = 75
    with pytest.raises(UnavailableError, match=r"rope_append_kv4: it runs on sm_80, and this is sm_75; pass backend="):
        call(on_device(PROBLEM.kv.cache))


@pytest.mark.full
def test_torch_on_the_cpu() -> None:
    torch = pytest.importorskip("torch")
    problem = make_fused_problem(5, 2, 2, 64, dtype=DTYPES[1], kept=False)
    qkv = torch.from_numpy(problem.qkv.view(np.int16)).view(torch.bfloat16)
    pool = problem.kv.cache.pool.copy()
    q = ptxlab.rope_append_kv4(
        qkv, replace(problem.kv.cache, pool=pool), problem.kv.slots, rope=problem.kv.rope, backend="emulator"
    )
    assert q.dtype == torch.bfloat16 and np.array_equal(
        q.view(torch.int16).numpy().view(np.uint16), problem.expected_rows
    )
    assert np.array_equal(pool, problem.kv.expected_pool)


def repeat_last_slot(slots: np.ndarray) -> np.ndarray:
    """Return slots that are all the largest one, so that tokens collide."""
    again = slots.copy()
    again[:] = slots.max()
    return again


NAN = QKV.copy()
NAN[PROBLEM.kv.slots >= 0, 6 * 64 + 5] = np.nan
REFUSED: list[tuple[dict[str, Any], str]] = [
    (
        {"qkv": QKV.reshape(6, -1, 64)},
        r"qkv: must be \[T, \(Hq \+ 4\)·64\] for this cache, Hq a multiple of 2 \(got sh",
    ),
    ({"qkv": QKV[:, : 4 * 64].copy()}, r"qkv: must be \[T, \(Hq \+ 4\)·64\] for this cache.*\(got shape \[6, 256\]\)"),
    ({"qkv": QKV[:, 64:].copy()}, r"qkv: must be \[T, .*Hq a multiple of 2 \(got shape \[6, 576\]\)"),
    ({"qkv": QKV.astype(np.float32)}, r"qkv: dtype float16 or bfloat16 \(got float32\)"),
    ({"qkv": NAN}, r"rope_append_kv4: k: must be finite in float32 \(got k\[\d, 0, \d+\] is nan\)"),
    ({"cache": QKV}, r"cache: must be a KVCache \(got ndarray\)"),
    ({"slots": PROBLEM.kv.slots[:5]}, r"slots: shape \[6\] \(got \[5\]\)"),
    ({"slots": repeat_last_slot(PROBLEM.kv.slots)}, r"slots: must be distinct \(got slots\[1\]"),
    ({"rope": None}, r"rope: must be \(cos, sin\) or \(cos, sin, positions\) \(got None\)"),
    ({"rope": (ROPE[0][:4], ROPE[1][:4])}, r"rope cos: must have 6 rows or more, one for each token \(got 4\)"),
    ({"rope": (*ROPE[:2], ROPE[2].astype(np.int64))}, r"rope positions: dtype int32 \(got int64\)"),
    ({"rope": (*ROPE[:2], None)}, r"rope positions: must be an array \(got None\)"),
    ({"out": np.zeros((6, 5, 64), np.float16)}, r"out: shape \[6, 6, 64\] \(got \[6, 5, 64\]\)"),
    ({"out": np.zeros((6, 6, 64), np.float32)}, r"out: dtype float16 \(got float32\)"),
    ({"keys": np.zeros((6, 3, 64), np.float16)}, r"keys: shape \[6, 2, 64\] \(got \[6, 3, 64\]\)"),
    (
        {"keys": QKV.reshape(-1)[: 6 * 128].reshape(6, 2, 64)},
        r"keys: must not share memory with qkv \(got some of it\)",
    ),
    ({"check": 1}, r"check: must be True or False \(got 1\)"),
    ({"programmatic": 0}, r"programmatic: must be True or False \(got 0\)"),
]


@pytest.mark.parametrize(("change", "message"), REFUSED, ids=[str(i) for i in range(len(REFUSED))])
def test_bad_input_is_refused_by_name_and_nothing_is_written(change: dict[str, Any], message: str) -> None:
    cache, pool_before = PROBLEM.kv.cache, PROBLEM.kv.cache.pool.copy()
    arguments = {"qkv": QKV, "cache": cache, "slots": PROBLEM.kv.slots, "rope": ROPE, "backend": "emulator", **change}
    with pytest.raises(ArgumentError, match=message) as raised:
        ptxlab.rope_append_kv4(**arguments)
    assert "\n" not in str(raised.value) and np.array_equal(cache.pool, pool_before)


@pytest.mark.gpu
@ON_GPU
@pytest.mark.parametrize("programmatic", [False, True])
def test_a_graph_is_replayed_on_other_rows(cupy: Any, programmatic: bool) -> None:
    """The kernel before it in the graph makes qkv, for which a programmatic launch has to wait."""
    problem = make_fused_problem(64, 8, 4, 128, size=64)
    cache = replace(problem.kv.cache, **{n: cupy.asarray(getattr(problem.kv.cache, n)) for n in
                                         ("pool", "block_table", "lengths")})  # fmt: skip
    source, qkv, slots = map(cupy.asarray, (problem.qkv, problem.qkv, problem.kv.slots))
    rope = tuple(map(cupy.asarray, problem.kv.rope))
    out, keys = (cupy.empty(x.shape, cupy.float16) for x in (problem.q, problem.kv.k))

    def layer() -> None:
        cupy.multiply(source, 1, out=qkv)
        ptxlab.rope_append_kv4(qkv, cache, slots, rope=rope, out=out, keys=keys, programmatic=programmatic)

    layer()
    graph = gpu.capture([layer])
    for _ in range(20):
        next_problem = make_fused_problem(64, 8, 4, 128, size=64)
        new = replace(problem, q=next_problem.q, kv=replace(problem.kv, k=next_problem.kv.k, v=next_problem.kv.v))
        source[...], cache.pool[...] = cupy.asarray(new.qkv), cupy.asarray(problem.kv.cache.pool)
        cupy.cuda.Device().synchronize()
        graph.replay()
        graph.synchronize()
        rows = np.concatenate([out.get(), keys.get()], axis=1)
        assert np.array_equal(rows, new.expected_rows) and np.array_equal(cache.pool.get(), new.kv.expected_pool)
