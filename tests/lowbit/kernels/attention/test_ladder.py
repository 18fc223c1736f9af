"""QServe's steps to KV4 attention: each against float64, on all backends, with all that may go wrong in a cache."""

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ptxlab import emulator, registry, toolchain
from ptxlab.errors import ArgumentError, MemoryFault
from ptxlab.lowbit.kernels.attention import ladder
from ptxlab.lowbit.layout import KVCache, pack_u4
from ptxlab.runtime import Kernel, by_name, load, run_spec
from ptxlab.spec import Arrays, KernelSpec
from tests.support import attention_problems as problems
from tests.support import sync_mutants
from tests.support.axes import on_every_backend
from tests.support.skeletons import inline_skeletons

SCALE = 128**-0.5

every_step = pytest.mark.parametrize("spec", ladder.SPECS, ids=lambda spec: spec.name)


def logical_of(spec: KernelSpec, q: np.ndarray, cache: KVCache) -> Arrays:
    assert q.shape[1] == 1
    return {"q": q[:, 0].astype(np.float16), "cache": cache, "softmax_scale": SCALE}


def scheme_of(spec: KernelSpec) -> str:
    return spec.name.split("_")[1]


@pytest.mark.default_cases("one_dominant_score-emulator-attention_kv8")
@every_step
@on_every_backend
@pytest.mark.parametrize("change", problems.CASES, ids=lambda change: change.__name__)
def test_near_float64_in_hard_cases(spec: KernelSpec, backend: str, change: problems.Change) -> None:
    """The sequences have whole pages and parts of them, one token and none.

    An output is finite whatever lies around.
    """
    q, cache = problems.problem(1, (150, 0, 1, 64), change, Hq=2, Hkv=1, scheme=scheme_of(spec))
    outputs = problems.check(spec, logical_of(spec, q, cache), backend)
    assert np.isfinite(outputs["out"]).all() and not outputs["out"][1].any()


@pytest.mark.default_cases("emulator-attention_kv4_bittrick")
@every_step
@on_every_backend
def test_near_float64_at_the_edges_of_pages(spec: KernelSpec, backend: str) -> None:
    lengths = problems.edge_lengths(ladder.PAGE)
    q, cache = problems.problem(4, lengths, Hq=2, Hkv=1, scheme=scheme_of(spec), spare=0)
    problems.check(spec, logical_of(spec, q, cache), backend)


@pytest.mark.default_cases("350-attention_kv4_fp16")
@every_step
@pytest.mark.parametrize("tokens", [256, 5 * ladder.PAGE + 30])
def test_near_float64_behind_four_whole_pages(spec: KernelSpec, tokens: int) -> None:
    """Steps that take several pages at a time: as many as they take at once, and a rest."""
    q, cache = problems.problem(6, (tokens,), Hq=1, Hkv=1, scheme=scheme_of(spec))
    problems.check(spec, logical_of(spec, q, cache), "emulator")


@pytest.mark.default_cases("emulator-attention_kv8", "emulator-attention_kv4_naive")
@every_step
@on_every_backend
def test_one_token_is_its_own_attention(spec: KernelSpec, backend: str) -> None:
    """Its weight is 1 whatever the score; FP16 rounds the products once more."""
    q, cache = problems.problem(2, (1, 1), Hq=3, Hkv=3, scheme=scheme_of(spec))
    out = problems.check(spec, logical_of(spec, q, cache), backend)["out"]
    exact = spec.reference(**logical_of(spec, q, cache))
    assert np.allclose(out, exact, rtol=2**-10, atol=0)


@pytest.mark.full
@every_step
@settings(max_examples=8)
@given(
    lengths=st.lists(st.integers(0, 200), min_size=1, max_size=3),
    Hkv=st.integers(1, 2),
    ratio=st.sampled_from((1, 2, 3)),
    seed=st.integers(0, 2**32 - 1),
    change=st.sampled_from(problems.CASES),
    mode=st.sampled_from(emulator.MODES),
)
def test_near_float64_in_the_emulator(
    spec: KernelSpec, lengths: list[int], Hkv: int, ratio: int, seed: int, change: problems.Change, mode: str
) -> None:
    q, cache = problems.problem(seed, tuple(lengths), change, Hq=ratio * Hkv, Hkv=Hkv, scheme=scheme_of(spec))
    problems.check(spec, logical_of(spec, q, cache), mode=mode, seed=seed)


@pytest.mark.long(30)
@pytest.mark.gpu
@every_step
@given(
    lengths=st.lists(st.integers(0, 2000), min_size=1, max_size=8),
    Hkv=st.integers(1, 3),
    ratio=st.sampled_from((1, 4, 8, 16)),
    seed=st.integers(0, 2**32 - 1),
    change=st.sampled_from(problems.CASES),
)
@settings(max_examples=30)
def test_near_float64_on_the_gpu(
    spec: KernelSpec, lengths: list[int], Hkv: int, ratio: int, seed: int, change: problems.Change
) -> None:
    q, cache = problems.problem(seed, tuple(lengths), change, Hq=ratio * Hkv, Hkv=Hkv, scheme=scheme_of(spec))
    logical = logical_of(spec, q, cache)
    problems.check(spec, logical, "gpu", runs=2)


@pytest.mark.default_cases("attention_kv8")
@every_step
def test_the_longest_sequences_that_the_rule_admits_have_room(spec: KernelSpec) -> None:
    """The sequences' table fits an A100's shared memory beside the step's other buffers."""
    most_pages = int(next(rule for rule in spec.rules if rule.startswith("P <=")).split()[-1])
    image = toolchain.compile_cuda(registry.find(spec.name)[1][0], "sm_80")
    sizes = {"B": 1, "Hq": 1, "Hkv": 1, "pages": most_pages}
    dynamic = spec.launch({**sizes, "P": most_pages}).shared_bytes
    assert dynamic + image.resources[spec.name].shared <= 163 * 1024
    assert spec.launch({**sizes, "P": most_pages + 1}).shared_bytes + image.resources[spec.name].shared > 163 * 1024
    with pytest.raises(ArgumentError, match=rf"{spec.name}: P <= {most_pages} \(got P={most_pages + 1}\)"):
        spec.check_sizes({**sizes, "P": most_pages + 1})


@pytest.mark.default_cases("sm_80-attention_kv8", "sm_90a-attention_kv4_naive")
@every_step
@pytest.mark.parametrize("arch", ["sm_80", "sm_90a"])
def test_nothing_is_spilled(spec: KernelSpec, arch: str) -> None:
    image = toolchain.compile_cuda(registry.find(spec.name)[1][0], arch)
    resources = image.resources[spec.name]
    assert (resources.stack, resources.spill_stores, resources.spill_loads) == (0, 0, 0)
    assert not image.warnings


@every_step
@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"q": np.zeros((2, 3, 128), np.float16)}, r"Hq % Hkv == 0 \(got Hq=3, Hkv=2\)"),
        ({"q": np.zeros((2, 4, 64), np.float16)}, r"q: shape \[B, Hq, 128\]"),
        ({"q": np.zeros((2, 4, 128), np.float32)}, r"q: dtype float16 \(got float32\)"),
        ({"lengths": np.zeros(3, np.int32)}, r"lengths: shape \[B\] with .* \(got \(3,\)\)"),
        ({"pool": np.zeros((3, 2, 2, 4096), np.uint8)}, r"pool: shape \[pages, 2, Hkv, \d+\]"),
        ({"lengths": np.array([3, 193], np.int32)}, r"lengths: lengths <= P\*64 \(got lengths\[1\] = 193\)"),
        ({"lengths": np.array([-1, 3], np.int32)}, r"lengths: lengths >= 0 \(got lengths\[0\] = -1\)"),
        ({"softmax_scale": None}, r"sizes: softmax_scale must be given"),
    ],
)
def test_bad_input_is_refused_by_name(spec: KernelSpec, change: dict[str, Any], message: str) -> None:
    q, cache = problems.problem(0, (3, 5), Hq=4, Hkv=2, scheme=scheme_of(spec))
    arrays = {**spec.pack(logical_of(spec, q, cache)), "softmax_scale": SCALE, **change}
    arrays = {name: array for name, array in arrays.items() if array is not None}
    with pytest.raises(ArgumentError, match=f"{spec.name}: {message}") as raised:
        by_name.run(spec.name, backend="emulator", **arrays)
    assert "\n" not in str(raised.value)


@pytest.mark.default_cases("attention_kv4_simple")
@every_step
def test_a_page_outside_the_pool_is_a_fault_in_the_emulator(spec: KernelSpec) -> None:
    q, cache = problems.problem(0, (65,), Hq=1, Hkv=1, scheme=scheme_of(spec))
    inputs = spec.pack(logical_of(spec, q, cache))
    inputs["table"] = np.where(np.arange(inputs["table"].shape[1]) == 1, cache.pages, inputs["table"]).astype(np.int32)
    with pytest.raises(MemoryFault, match="out of bounds"):
        run_spec(spec, registry.find(spec.name)[1][0], inputs, sizes={"softmax_scale": SCALE}, backend="emulator")


def test_nibbles_without_their_zero_point_are_exact() -> None:
    """The function `dequant_u4_f16_minus` is exact for every nibble at every place of a word, beside others.

    Every zero point is tried.
    """
    text = """#include "dequant.cuh"
    extern "C" __global__ void __launch_bounds__(256)
    minus(const unsigned* words, uint4* halves) {
        const unsigned i = blockIdx.x * 256 + threadIdx.x;
        halves[i] = ptxlab::dequant_u4_f16_minus(words[i], ptxlab::bias_u4_f16(__int2half_rn(int(blockIdx.x))));
    }"""
    rng = np.random.default_rng(0)
    nibbles = rng.integers(0, 16, (16, 256, 8), dtype=np.uint8)
    nibbles[:, :128] = np.where(
        np.eye(8, dtype=bool)[None, :, None],
        np.arange(16, dtype=np.uint8)[:, None],
        15 - nibbles[:, :128].reshape(16, 8, 16, 8),
    ).reshape(16, 128, 8)
    halves = np.zeros((16, 256, 8), np.float16)
    load(text)(pack_u4(nibbles)[..., 0], halves.view(np.uint32), grid=16, block=256, backend="emulator")
    expected = nibbles.astype(np.float16) - np.arange(16, dtype=np.float16)[:, None, None]
    assert np.array_equal(halves, expected[..., [0, 2, 1, 3, 4, 6, 5, 7]])


@pytest.mark.full
@every_step
def test_every_missing_wait_is_noticed(spec: KernelSpec, monkeypatch: pytest.MonkeyPatch) -> None:
    q, cache = problems.problem(0, (150, 70), Hq=1, Hkv=1, scheme=scheme_of(spec))
    kernel = Kernel.of(spec, inline_skeletons(registry.find(spec.name)[1][0]), {})

    def check() -> None:
        for mode in emulator.MODES:
            problems.check(spec, logical_of(spec, q, cache), mode=mode)

    assert (
        sync_mutants.unnoticed_removals(kernel, lambda module: sync_mutants.diagnosis(module, check, monkeypatch)) == []
    )
