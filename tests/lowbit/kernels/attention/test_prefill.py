"""Attention of any number of queries: ragged chunks against float64, the same bits in any chunk, what is refused."""

from dataclasses import replace
from itertools import product
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import ptxlab
from ptxlab import emulator, gpu, toolchain
from ptxlab.errors import ArgumentError, UnavailableError
from ptxlab.lowbit.kernels import operation
from ptxlab.lowbit.kernels.attention import common
from ptxlab.lowbit.kernels.attention.prefill import PREFILL, choose_parts
from ptxlab.lowbit.kernels.attention.prefill_sm80 import PREFILL_SM80
from ptxlab.runtime.verify import compare
from ptxlab.sources import Source
from ptxlab.spec import Arrays, KernelSpec
from tests.support.attention_calls import on_device, to_device_array
from tests.support.axes import on_every_backend
from tests.support.fake_gpu import FakeGpu
from tests.support.prefill_problems import SHAPES, SPECS, chunks_of, on_every_kernel, run, source_of
from tests.support.skeletons import inline_skeletons

RNG = np.random.default_rng(0)


def check(
    logical: Arrays,
    sizes: dict[str, Any],
    backend: str = "emulator",
    BF16: int = 0,
    *,
    spec: KernelSpec = PREFILL,
    **how: Any,
) -> None:
    """Assert that the kernel's results are within the bound of float64, and that no check finds anything."""
    outputs, outcome = run(logical, sizes, backend, BF16=BF16, spec=spec, **how)
    compare(spec, outputs, logical, {"BF16": BF16})
    assert not outcome.findings


@pytest.mark.full
@on_every_backend
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("BF16", [0, 1])
@on_every_kernel
def test_ragged_chunks(spec: KernelSpec, BF16: int, shape: str, backend: str) -> None:
    options = {} if backend == "gpu" else {"checks": emulator.CHECKS}
    check(*chunks_of(**SHAPES[shape]), backend, BF16, spec=spec, **options)


@pytest.mark.full_cases("*-emulator")
@on_every_backend
@pytest.mark.parametrize("D", [64, 128, 256])
@pytest.mark.parametrize("BF16", [0, 1])
def test_queries_of_a_rotated_cache(BF16: int, D: int, backend: str) -> None:
    logical, sizes = chunks_of((33, 0, 2), (31, 9, 64), D=D, group=3)
    logical["cache"] = replace(logical["cache"], rotated=True)
    options = {} if backend == "gpu" else {"checks": emulator.CHECKS}
    check(logical, sizes, backend, BF16, config={"ROTATED": 1}, **options)  # type: ignore[arg-type]


@pytest.mark.full
@settings(max_examples=25)
@given(
    chunks=st.lists(st.tuples(st.integers(0, 90), st.integers(0, 200)), min_size=1, max_size=5),
    D=st.sampled_from((64, 128, 256)),
    page=st.sampled_from((16, 32, 64)),
    group=st.integers(1, 16),
    window=st.sampled_from((0, 1, 60, 128)),
    blocks=st.integers(1, 4),
    mode=st.sampled_from(emulator.MODES),
    seed=st.integers(0, 2**32 - 1),
)
@on_every_kernel
def test_chunks_of_any_length(
    spec: KernelSpec,
    chunks: list[tuple[int, int]],
    D: int,
    page: int,
    group: int,
    window: int,
    blocks: int,
    mode: str,
    seed: int,
) -> None:
    new, past = zip(*[(t, p) for t, p in chunks if t] or [(1, 0)], strict=True)
    sizes = {"D": D, "page": page, "group": group, "window": window, "blocks": blocks, "seed": seed}
    check(*chunks_of(new, past, **sizes), mode=mode, spec=spec)


@pytest.mark.full
@settings(max_examples=10)
@given(
    past=st.integers(400, 900),
    new=st.integers(1, 40),
    window=st.sampled_from((0, 513, 640)),
    parts=st.integers(2, 5),
    blocks=st.integers(2, 4),
    mode=st.sampled_from(emulator.MODES),
    seed=st.integers(0, 2**32 - 1),
)
def test_parts_of_any_context(past: int, new: int, window: int, parts: int, blocks: int, mode: str, seed: int) -> None:
    sizes = {"D": 256, "group": 1, "window": window, "parts": parts, "blocks": blocks, "seed": seed}
    check(*chunks_of((new,), (past,), **sizes), mode=mode)


@pytest.mark.parametrize(
    ("sizes", "parts"),
    [
        ({}, 4),  # 32 tiles, 132 SMs
        ({"Hq": 64}, 2),
        ({"N": 512}, 1),
        ({"N": 600}, 3),  # 152 tiles would be two rounds
        ({"N": 8192}, 1),
        ({"N": 16}, 16),
        ({"P": 8}, 1),  # contexts are too short
        ({"window": 1024}, 2),
        ({"B": 100}, 1),  # each may have a tile of its own
        ({"D": 256}, 4),
        ({"D": 256, "page": 32, "P": 1024}, 1),
    ],
)
def test_parts_fill_the_gpu(sizes: dict[str, int], parts: int) -> None:
    problem = {
        "N": 128,
        "B": 1,
        "Hq": 32,
        "Hkv": 8,
        "D": 128,
        "P": 512,
        "page": 64,
        "window": 0,
        "blocks": 132,
        **sizes,
    }
    assert choose_parts(problem) == parts


@pytest.mark.full
def test_the_public_call_cuts_a_long_context_unless_batch_invariant() -> None:
    logical, sizes = chunks_of((3,), (2100,), D=64)
    q = logical["q"].astype(np.float16)
    call = {"q": q, "cache": logical["cache"], "query_start_loc": logical["starts"], "backend": "emulator"}
    out, lse = ptxlab.attention_kv4(**call, return_lse=True)
    parts = choose_parts(sizes)
    assert parts > 1
    cut, whole = ({**logical, "q": q.astype(np.float32), "parts": n} for n in (parts, 1))
    compare(PREFILL, {"out": out, "lse": lse, "arrivals": PREFILL.pack(cut)["arrivals"]}, cut)
    invariant = ptxlab.attention_kv4(**call, batch_invariant=True)
    assert np.array_equal(invariant, run(whole, {**sizes, "parts": 1})[0]["out"])


@pytest.mark.full
@pytest.mark.parametrize("edge", [-1, 0, 1])
@pytest.mark.parametrize("D", [128, 256])
@on_every_kernel
def test_contexts_that_end_at_the_edge_of_a_block(spec: KernelSpec, D: int, edge: int) -> None:
    """Windows begin there, too."""
    block_keys = spec.config_for(chunks_of((1,), (0,), D=D)[1])["KEYS"]
    check(*chunks_of((3,), (2 * block_keys - 3 + edge,), D=D), spec=spec)
    check(*chunks_of((3,), (3 * block_keys - 3,), D=D, window=block_keys + edge), spec=spec)


@pytest.mark.full
@on_every_backend
@on_every_kernel
def test_a_query_has_the_same_bits_in_any_chunk(spec: KernelSpec, backend: str) -> None:
    """The chunk is whole, or in pieces.

    A piece sees the tokens of the pieces before through the cache alone.
    """
    logical, sizes = chunks_of((150, 40), (70, 5), D=128, window=90)
    whole, _ = run(logical, sizes, backend, spec=spec)
    cache = logical["cache"]
    for cut in (1, 64, 149):
        pieces = [(0, cut), (cut, 150)]
        for begin, end in pieces:
            piece = replace(cache, block_table=cache.block_table[:1], lengths=cache.lengths[:1] - np.int32(150 - end))
            part = {**logical, "q": logical["q"][begin:end], "cache": piece}
            part["starts"] = np.array([0, end - begin], np.int32)
            outputs, _ = run(part, {**sizes, "N": end - begin, "B": 1}, backend, spec=spec)
            for name in ("out", "lse"):
                assert np.array_equal(outputs[name], whole[name][begin:end]), (name, begin, end)


@pytest.mark.default_cases("sm90-nan")
@pytest.mark.parametrize("wrong", [np.nan, np.inf])
@on_every_kernel
def test_a_query_that_is_no_number_shows_and_spoils_no_other(spec: KernelSpec, wrong: float) -> None:
    logical, sizes = chunks_of((70,), (10,), D=64)
    right, _ = run(logical, sizes, spec=spec)
    q = logical["q"].copy()
    q[33, 1, 5] = wrong
    outputs, _ = run({**logical, "q": q}, sizes, spec=spec)
    assert np.isnan(outputs["out"][33, 1].astype(np.float32)).all()
    spoiled = np.zeros((70, 2), bool)
    spoiled[33, 1] = True
    assert np.array_equal(outputs["out"][~spoiled], right["out"][~spoiled])


@on_every_kernel
def test_nothing_seen_is_zeros(spec: KernelSpec) -> None:
    logical, sizes = chunks_of((4,), (0,), D=64)
    logical["cache"] = replace(logical["cache"], lengths=np.array([2], np.int32))  # two queries before the first token
    outputs, _ = run(logical, sizes, spec=spec)
    assert (outputs["out"][:2] == 0).all() and np.isneginf(outputs["lse"][:2]).all()
    assert np.isfinite(outputs["lse"][2:]).all()


CHANGES = {
    "sm90": {
        "a key too many": ("if (key >= end[r] ||", "if (key > end[r] ||"),
        "a window too wide": ("key < end[r] - window)", "key < end[r] - window - 1)"),
        "values beyond the end": ("if (token >= tokens) pair = 0;", ""),
        "sums are not scaled down": ("o[i] *= rescale[i / 2 % 2];", ";"),
        "scale of another token": ("token % PAGE * 4);", "(token ^ 1) % PAGE * 4);"),
        "results out of order": ("        const bool odd = threadIdx.x % 2;", "        const bool odd = false;"),
        "keys are not fenced": (
            "        ptxlab::fence_proxy_async();\n        if (has_pages)",
            "        if (has_pages)",
        ),
        "nobody waits for the kernel before": ("    ptxlab::wait_for_predecessors();", ""),
        "restored before there is room": ("barriers.empty[slot.index], slot.parity ^ 1);", "barriers.empty[0], 1);"),
        "parts have a block in common": (
            "blocks * tile.part_index / tile.parts",
            "max(0, blocks * tile.part_index / tile.parts - 1)",
        ),
        "a part is not weighed": ("fmaf(x.x, factor[0], o[4 * v])", "x.x + o[4 * v]"),
        "parts are handed over in one place": (
            "first_part(tile) + size_t(tile.part_index) * kPitch",
            "first_part(tile)",
        ),
        "counters are left behind": ("*count = 0;", ";"),
    },
    "sm80": {
        "a key too many": ("rows.end[r] = tile.visible_end(", "rows.end[r] = 1 + tile.visible_end("),
        "a window without an edge": (" || (window > 0 && position < last_end - window)", ""),
        "values beyond the end": ("if (token >= tokens) pair = 0;", ""),
        "sums are not scaled down": ("o[i] *= rescale[i / 2 % 2];", ";"),
        "scale of another token": ("(stage + KEYS * kTokenBytes)[token];", "(stage + KEYS * kTokenBytes)[token ^ 1];"),
        "results out of order": ("    ptxlab::put_in_order(o);\n", ""),
        "the first half of a page again": ("const int slot = block * KEYS % PAGE;", "const int slot = 0;"),
        "copies are not waited for": ("ptxlab::cp_async_wait<0>();\n            __syncthreads();  // the keys", "//"),
        "values are replaced while they are read": ("__syncthreads();  // the keys are restored,", "//"),
        "keys are replaced while they are read": ("__syncthreads();  // the values are restored,", "//"),
        "nobody waits for the kernel before": ("    ptxlab::wait_for_predecessors();", ""),
    },
}
NOTICED_BY = {
    "sm90": ("one of each", "pages of 32, a window", "parts"),
    "sm80": ("many heads", "pages of 32, a window", "wide heads"),
}


def is_noticed(kernel: str, source: Source) -> bool:
    """Tell whether a problem's result, or a check, is wrong."""
    spec = SPECS[kernel]
    for shape in NOTICED_BY[kernel]:
        logical, sizes = chunks_of(**SHAPES[shape])
        try:
            outputs, outcome = run(logical, sizes, source=source, spec=spec, checks=emulator.CHECKS, programmatic=True)
            compare(spec, outputs, logical)
        except ptxlab.PtxlabError:
            return True
        if outcome.findings:
            return True
    return False


@pytest.mark.full
@pytest.mark.parametrize(("kernel", "change"), [(kernel, change) for kernel in CHANGES for change in CHANGES[kernel]])
def test_a_changed_kernel_is_noticed(kernel: str, change: str) -> None:
    (old, new), source = CHANGES[kernel][change], inline_skeletons(source_of(SPECS[kernel]))
    assert source.text.count(old) == 1
    assert is_noticed(kernel, replace(source, text=source.text.replace(old, new)))


@pytest.mark.full
@pytest.mark.parametrize("kernel", SPECS)
def test_the_kernel_itself_passes(kernel: str) -> None:
    assert not is_noticed(kernel, inline_skeletons(source_of(SPECS[kernel])))


LAUNCHABLE = [
    (kernel, D, page, BF16, rotated, parts)
    for kernel, spec in SPECS.items()
    for D, page, BF16, rotated in product((64, 128, 256), (16, 32, 64), (0, 1), (0, 1))
    for parts in ((1, 2) if "parts" in spec.symbols and (D < 256 or page == 64) else (1,))
]


@pytest.mark.full
@pytest.mark.parametrize(("kernel", "D", "page", "BF16", "rotated", "parts"), LAUNCHABLE)
def test_no_register_is_spilt(kernel: str, D: int, page: int, BF16: int, rotated: int, parts: int) -> None:
    """Compile every variant that a call may launch. Shared memory suffices, too: on an SM of 8.6 a block has 99 KiB."""
    spec, sizes = SPECS[kernel], chunks_of((1,), (2000,), D=D, page=page, parts=parts)[1]
    config = {**spec.config_for(sizes), "BF16": BF16, **({"ROTATED": 1} if rotated else {})}
    resources = toolchain.compile_cuda(source_of(spec), spec.arch, defines=config).resources[spec.name]
    assert (resources.spill_stores, resources.spill_loads) == (0, 0)
    shared = spec.launch({**sizes, **config}).shared_bytes + resources.shared
    assert shared <= (227 if spec.exact_arch else 99) * 1024


def test_parts_of_wide_heads_in_small_pages_are_refused() -> None:
    """Their producers would spill."""
    logical, sizes = chunks_of((1,), (600,), D=256, page=32, parts=2)
    with pytest.raises(ArgumentError, match=r"parts == 1 or D < 256 or page == 64"):
        run(logical, sizes)


@pytest.mark.full
@pytest.mark.parametrize("blocks", [1, 2])
def test_a_part_that_comes_first_leaves_the_merge_to_the_last(blocks: int) -> None:
    """A block that has all parts takes them in turn: what it merged too early, nobody would have written yet.

    Blocks that have a part each end together in the emulator, which hides it.
    """
    logical, sizes = chunks_of((3,), (300,), parts=3, blocks=blocks)
    check(logical, sizes, checks=("init",), config={"PART_BLOCKS": 1})


@pytest.mark.full
@pytest.mark.parametrize("D", [64, 128, 256])
def test_shared_memory_is_read_and_written_without_conflicts(D: int) -> None:
    """This holds for the kernel whose layouts wgmma does not dictate."""
    _, outcome = run(*chunks_of((40,), (90,), D=D, page=32, group=3), spec=PREFILL_SM80, count_banks=True)
    assert outcome.shared and sum(access.conflicts for access in outcome.shared) == 0


# The public call


LOGICAL, SIZES = chunks_of((40, 0, 3), (30, 7, 60), D=128, Hkv=2)
Q = LOGICAL["q"].astype(np.float16)
CALL = {"q": Q, "cache": LOGICAL["cache"], "query_start_loc": LOGICAL["starts"], "backend": "emulator"}


@pytest.mark.full
@pytest.mark.parametrize("kernel", [None, PREFILL_SM80.name])
def test_the_public_call(kernel: str | None) -> None:
    call = {**CALL, "kernel": kernel}
    out, lse = ptxlab.attention_kv4(**call, return_lse=True)
    compare(PREFILL_SM80, {"out": out, "lse": lse}, {**LOGICAL, "q": Q.astype(np.float32)})
    given_out, given_lse = np.empty_like(out), np.empty_like(lse)
    assert ptxlab.attention_kv4(**call, out=(given_out, given_lse), return_lse=True)[0] is given_out
    assert np.array_equal(given_out, out) and np.array_equal(given_lse, lse)
    assert ptxlab.attention_kv4(**{**call, "q": Q[:0], "query_start_loc": np.zeros(4, np.int32)}).shape == (0, 4, 128)


OTHER_CACHE = common.draw_cache(RNG, np.array([40, 7, 63]), Hkv=2, P=1, pages=3, D=128, scheme="kv8")
REFUSED: dict[str, dict[str, Any]] = {
    r"cache: scheme must be kv4 with query_start_loc \(got kv8\)": {"cache": OTHER_CACHE},
    r"q: must be \[T, Hq, 128\] with query_start_loc \(got shape \[1, 43, 4, 128\]\)": {"q": Q[None]},
    r"q: dtype float16 or bfloat16 \(got float32\)": {"q": Q.astype(np.float32)},
    r"q: Hq must be 1 to 16 times the cache's 2 \(got Hq=3\)": {"q": Q[:, :3].copy()},
    r"query_start_loc: must be \[4\], one more than sequences \(got shape \[3\]\)": {
        "query_start_loc": LOGICAL["starts"][:3]
    },
    r"query_start_loc: must rise from 0, to 43 queries at most \(got \[0, 41, 40, 43\]\)": {
        "query_start_loc": np.array([0, 41, 40, 43], np.int32)
    },
    r"cache.lengths: a sequence's length must include its queries \(got 7 tokens, 20 queries in sequence 1\)": {
        "query_start_loc": np.array([0, 20, 40, 43], np.int32)
    },
    rf"kernel: must be one of {PREFILL_SM80.name}, {PREFILL.name} with query_start_loc": {
        "kernel": "attention_kv4_sm90"
    },
    r"out: must be one array without return_lse": {"out": (Q, Q)},
    r"query_start_loc: dtype int32 \(got int64\)": {"query_start_loc": LOGICAL["starts"].astype(np.int64)},
}


@pytest.mark.parametrize("message", REFUSED)
def test_bad_input_is_refused_by_name(message: str) -> None:
    with pytest.raises(ArgumentError, match=message) as raised:
        ptxlab.attention_kv4(**{**CALL, **REFUSED[message]})
    assert "\n" not in str(raised.value)


@pytest.mark.full
def test_the_highest_kernel_that_runs_here(monkeypatch: pytest.MonkeyPatch) -> None:
    fake, call = FakeGpu(monkeypatch), {**CALL, "backend": None}
    fake.runs = False
    call |= {
        "q": to_device_array(Q),
        "cache": on_device(LOGICAL["cache"]),
        "query_start_loc": to_device_array(LOGICAL["starts"]),
    }
    for fake.arch, kernel in ((90, None), (80, None), (90, PREFILL_SM80.name)):
        operation._ready.clear()  # calls that were made for another GPU
        ptxlab.attention_kv4(**call, kernel=kernel)
    assert [name for name, _ in fake.launched] == [PREFILL.name, PREFILL_SM80.name, PREFILL_SM80.name]
    refused = f"attention_kv4: {PREFILL.name}: it runs on sm_90a, and this is sm_80; pass backend"
    with pytest.raises(UnavailableError, match=refused):
        fake.arch = 80
        operation._ready.clear()
        ptxlab.attention_kv4(**call, kernel=PREFILL.name)


@pytest.mark.gpu
@pytest.mark.parametrize("D", [64, 128, 256])
@pytest.mark.parametrize(
    ("new", "past"), [((512,), (8192,)), ((2048, 1, 300), (0, 4000, 77)), ((1,) * 40, (999,) * 40)]
)
@on_every_kernel
def test_long_contexts_on_a_gpu(spec: KernelSpec, new: tuple[int, ...], past: tuple[int, ...], D: int) -> None:
    """A few rows are compared with float64."""
    if reason := gpu.why_not(spec.arch, exact=spec.exact_arch):
        pytest.skip(reason)
    logical, _ = chunks_of(new, past, D=D, Hkv=2, group=4)
    cache, starts = ptxlab.to_device(logical["cache"]), gpu.to_device(logical["starts"])
    q = gpu.to_device(logical["q"].astype(np.float16))
    options: dict[str, Any] = {"return_lse": True, "check": True, "kernel": spec.name}
    out, lse = ptxlab.attention_kv4(q, cache, query_start_loc=starts, **options)
    host, of_rows = gpu.to_host(out), gpu.to_host(lse)
    for b in {0, len(new) - 1}:
        begin, end = logical["starts"][b : b + 2]
        for t in {begin, (begin + end) // 2, end - 1}:
            length = logical["cache"].lengths[b] - (end - 1 - t)
            piece = replace(
                logical["cache"],
                block_table=logical["cache"].block_table[b : b + 1],
                lengths=np.array([length], np.int32),
            )
            row = {**logical, "q": logical["q"][t : t + 1], "cache": piece, "starts": np.array([0, 1], np.int32)}
            compare(PREFILL_SM80, {"out": host[t : t + 1], "lse": of_rows[t : t + 1]}, row)


@pytest.mark.gpu
def test_parts_in_a_captured_graph() -> None:
    """The bits are those without a graph, replay after replay.

    So they are after a call of another length.
    """
    if reason := gpu.why_not(PREFILL.arch, exact=True):
        pytest.skip(reason)
    import cupy

    logical, _ = chunks_of((64,), (8000,), D=128, Hkv=2, group=4)
    cache, starts = ptxlab.to_device(logical["cache"]), gpu.to_device(logical["starts"])
    q = gpu.to_device(logical["q"].astype(np.float16))
    call = {"cache": cache, "query_start_loc": starts}
    right, out = ptxlab.attention_kv4(q, **call, check=True), cupy.empty_like(q)
    workspace = ptxlab.attention_workspace(cache, kernel=PREFILL.name)
    stream = cupy.cuda.Stream(non_blocking=True)
    cupy.cuda.Device().synchronize()
    with stream:
        ptxlab.attention_kv4(q, **call, out=out, workspace=workspace)
        stream.begin_capture()
        try:
            with pytest.raises(ArgumentError, match=r"workspace: must be given in a capture: make attention_workspace"):
                ptxlab.attention_kv4(q, **call, out=out)
            ptxlab.attention_kv4(q, **call, out=out, workspace=workspace)
        finally:
            graph = stream.end_capture()
        for length in (8064, 300, 8064):
            cache.lengths[:] = length
            out[:] = 0
            graph.launch(stream)
    stream.synchronize()
    assert np.array_equal(gpu.to_host(out), gpu.to_host(right))
    ptxlab.attention_kv4(q, **call, workspace=workspace, check=True)  # the counters are zeros
