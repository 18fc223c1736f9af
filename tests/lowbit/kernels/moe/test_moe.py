"""Experts of a mixture: what is chosen, where tokens go, and what comes back, against plain references; the calls."""

from dataclasses import replace
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import ptxlab
from ptxlab import emulator, gpu, registry
from ptxlab.errors import ArgumentError, UnavailableError
from ptxlab.lowbit import layout, quant, reference
from ptxlab.lowbit.kernels.moe import CHOOSE, COMBINE, GATHER, RoutedTokens
from ptxlab.lowbit.kernels.moe.specs import router_logits
from ptxlab.lowbit.layout import PackedActivations
from ptxlab.runtime import Kernel, run_spec
from ptxlab.runtime.verify import Job, verify
from tests.support import chains, sync_mutants
from tests.support.axes import on_every_backend
from tests.support.fake_gpu import DeviceArray, FakeGpu

DTYPES = {"float16": np.dtype("float16"), "bfloat16": np.dtype(ml_dtypes.bfloat16)}
RNG = np.random.default_rng(0)
PARTS = ("x_q", "scale", "token_sum")


def normal(*shape: int, dtype: str = "float16") -> np.ndarray:
    return RNG.standard_normal(shape, dtype=np.float32).astype(DTYPES[dtype])


def pack_rows(q: np.ndarray, scale: np.ndarray, token_sum: np.ndarray) -> PackedActivations:
    return PackedActivations(layout="row_major", M=q.shape[0], K=q.shape[1], x_q=q, scale=scale, token_sum=token_sum)


def tokens_of(M: int, H: int) -> PackedActivations:
    """Make tokens with bytes, scale and sum of their own."""
    return pack_rows(RNG.integers(-127, 128, (M, H), np.int8), RNG.random(M, np.float32), np.arange(M, dtype=np.int32))


def check_rows(tokens: PackedActivations, routed: RoutedTokens, experts: int) -> None:
    """Assert that rows are in the order of experts, then of tokens; the expected order is built token by token."""
    rows: list[list[int]] = [[] for _ in range(experts)]
    for token, chosen in enumerate(routed.chosen):
        for expert in chosen:
            rows[expert].append(token)
    in_order = [(token, expert) for expert in range(experts) for token in rows[expert]]
    assert routed.offsets.tolist() == np.cumsum([0, *map(len, rows)]).tolist()
    for row, (token, expert) in enumerate(in_order):
        assert routed.place[token, routed.chosen[token].tolist().index(expert)] == row
    tokens_of_rows = [token for token, _ in in_order]
    assert all(np.array_equal(getattr(routed.rows, part), getattr(tokens, part)[tokens_of_rows]) for part in PARTS)


@st.composite
def problems(draw: st.DrawFn, most_tokens: int) -> dict[str, Any]:
    """Draw small integers, whose products add up exactly in any order, and often to equal scores."""
    E, k = draw(st.sampled_from(((1, 1), (5, 3), (8, 2), (40, 2), (64, 4))))  # each is compiled
    M, H, extent = draw(st.integers(1, most_tokens)), 32 * draw(st.integers(1, 3)), draw(st.integers(0, 3))
    rng, dtype = np.random.default_rng(draw(st.integers(0, 999))), DTYPES[draw(st.sampled_from(sorted(DTYPES)))]
    normed, router = (rng.integers(-extent, extent + 1, size).astype(dtype) for size in ((M, H), (E, H)))
    return {"normed": normed, "router": router, "k": k}


def check_routing(normed: np.ndarray, router: np.ndarray, k: int, backend: str) -> None:
    tokens = tokens_of(*normed.shape)
    routed = ptxlab.route_tokens(tokens, normed, router, k, backend=backend)
    logits = normed.astype(np.float64) @ router.astype(np.float64).T
    order = [sorted(range(len(router)), key=lambda e, row=row: (-row[e], e))[:k] for row in logits]
    assert routed.chosen.tolist() == order
    softmax = np.exp(logits - logits.max(axis=1, keepdims=True))
    chosen_shares = np.take_along_axis(softmax / softmax.sum(axis=1, keepdims=True), np.array(order), axis=1)
    share = chosen_shares / chosen_shares.sum(axis=1, keepdims=True)
    assert np.allclose(routed.share, share, rtol=2.0**-14, atol=1e-30)
    assert np.allclose(routed.share.sum(axis=1), 1, rtol=2.0**-21)
    check_rows(tokens, routed, len(router))


@pytest.mark.full
@given(problem=problems(most_tokens=12))
@settings(max_examples=25)
def test_routing_of_any_problem(problem: dict[str, Any]) -> None:
    """The lower of two experts with equal logits comes first."""
    check_routing(**problem, backend="emulator")


@pytest.mark.gpu
@given(problem=problems(most_tokens=1200))
@settings(max_examples=200)
def test_routing_of_any_problem_on_the_gpu(problem: dict[str, Any]) -> None:
    check_routing(**problem, backend="gpu")


@pytest.mark.long(30)
@pytest.mark.gpu
@pytest.mark.parametrize(("M", "E", "H", "k"), [(1, 8, 4096, 2), (256, 8, 4096, 2), (16384, 64, 1024, 4)])
def test_routing_of_large_batches_on_the_gpu(M: int, E: int, H: int, k: int) -> None:
    """Choices are those of logits in the kernel's order, as verify finds too; rows are checked one by one."""
    tokens, normed, router = tokens_of(M, H), normal(M, H), normal(E, H)
    routed = ptxlab.route_tokens(tokens, normed, router, k, backend="gpu")
    logits = router_logits(normed.astype(np.float32), router.astype(np.float32))
    assert np.array_equal(routed.chosen, reference.top_experts(logits, k)[0])
    check_rows(tokens, routed, E)


@pytest.mark.parametrize("H", [32, 992, 1056, 32768])
def test_the_order_of_the_sum_is_near_the_sum(H: int) -> None:
    x, router = (normal(*shape, dtype="bfloat16").astype(np.float32) for shape in ((3, H), (4, H)))
    right = x.astype(np.float64) @ router.astype(np.float64).T
    size = np.abs(x).astype(np.float64) @ np.abs(router).astype(np.float64).T
    assert (np.abs(router_logits(x, router) - right) <= (32 + 5 + 32) * 2.0**-24 * size).all()


@pytest.mark.full
@on_every_backend
def test_a_token_has_the_same_bits_in_any_batch(backend: str) -> None:
    M, H, E = 150, 96, 40
    tokens, normed, router = tokens_of(M, H), normal(M, H), normal(E, H)
    routed = ptxlab.route_tokens(tokens, normed, router, 2, backend=backend)
    expert_outputs = normal(2 * M, H)
    hidden = ptxlab.combine_experts(expert_outputs, routed, backend=backend)
    for m in (0, 131, 132, 149):
        one = pack_rows(*(getattr(tokens, part)[m : m + 1] for part in PARTS))
        alone = ptxlab.route_tokens(one, normed[m : m + 1], router, 2, backend=backend)
        assert np.array_equal(alone.chosen[0], routed.chosen[m])
        assert np.array_equal(alone.share.view(np.uint32)[0], routed.share.view(np.uint32)[m])
        of_token = expert_outputs[routed.place[m]][alone.place[0].argsort()]
        assert np.array_equal(ptxlab.combine_experts(of_token, alone, backend=backend)[0], hidden[m])


@on_every_backend
def test_logits_that_are_no_number_come_last(backend: str) -> None:
    """The tokens keep their rows: a token has as many experts as it must, all different."""
    M, H, E = 4, 64, 5
    normed, router = np.ones((M, H), np.float16), np.arange(E, dtype=np.float16)[:, None].repeat(H, axis=1)
    router[2], normed[1, 3], normed[2, 3], tokens = np.nan, np.nan, np.inf, tokens_of(M, H)
    routed = ptxlab.route_tokens(tokens, normed, router, 4, backend=backend)
    # Token 1 has no logit that is a number; in token 2's, infinity times 0 is none either
    assert routed.chosen.tolist() == [[4, 3, 1, 0], [0, 1, 2, 3], [1, 3, 4, 0], [4, 3, 1, 0]]
    assert np.isfinite(routed.share).all(axis=1).tolist() == [True, False, False, True]
    check_rows(tokens, routed, E)


@pytest.mark.smoke
@on_every_backend
@pytest.mark.parametrize("dtype", DTYPES)
def test_results_are_added_in_the_order_of_the_choice(dtype: str, backend: str) -> None:
    """Products and sums are rounded one by one in f32, then once to the output.

    Half of the results cancel but for what the roundings leave.
    """
    M, H, E, k = 7, 1120, 6, 3
    router = (normal(E, H) / np.float16(32)).astype(DTYPES[dtype])  # so that all shares are of some size
    routed = ptxlab.route_tokens(tokens_of(M, H), normal(M, H, dtype=dtype), router, k, backend=backend)
    expert_outputs = normal(M * k, H, dtype=dtype)
    half, share = slice(H // 2), routed.share[:, :, None]
    first_two = (expert_outputs.astype(np.float32)[routed.place] * share)[:, :2, half].sum(axis=1)
    expert_outputs[routed.place[:, 2], half] = -first_two / share[:, 2]
    out = np.empty((M, H), DTYPES[dtype])
    assert ptxlab.combine_experts(expert_outputs, routed, out=out, backend=backend) is out
    wide = expert_outputs.astype(np.float32)[routed.place] * share
    right = ((wide[:, 0] + wide[:, 1]) + wide[:, 2]).astype(DTYPES[dtype])
    assert np.array_equal(out.view(np.uint16), right.view(np.uint16))
    exact = (expert_outputs.astype(np.float64)[routed.place] * share).sum(axis=1)
    assert np.allclose(out.astype(np.float64), exact, rtol=2.0**-8, atol=2.0**-16)


def test_the_references_are_what_they_say() -> None:
    chosen, share = reference.top_experts(np.log([[1.0, 4.0, 4.0, 1.0], [2.0, 1.0, 1.0, 6.0]]), 2)
    assert chosen.tolist() == [[1, 2], [3, 0]] and np.allclose(share, [[0.5, 0.5], [0.75, 0.25]])
    offsets, place = reference.rows_by_expert(chosen, 4)
    assert offsets.tolist() == [0, 1, 2, 3, 4] and place.tolist() == [[1, 2], [3, 0]]
    expert_outputs = np.array([[8.0], [2.0], [4.0], [16.0]], np.float32)
    assert np.allclose(reference.combine_expert_rows(expert_outputs, place, share), [[3.0], [14.0]])


# --- the calls -------------------------------------------------------------------------------------------------------


@pytest.mark.full
def test_torch_keeps_its_kind_and_its_bfloat16() -> None:
    torch = pytest.importorskip("torch")
    normed, router = (torch.from_numpy(normal(*shape).astype(np.float32)).bfloat16() for shape in ((3, 64), (4, 64)))
    tokens = ptxlab.quantize_activations(normed, backend="emulator")
    routed = ptxlab.route_tokens(tokens, normed, router, 2, backend="emulator")
    best = (normed.double() @ router.double().t()).topk(2, 1)
    assert torch.equal(routed.chosen.long(), best.indices) and routed.rows.x_q.dtype == torch.int8
    out = ptxlab.combine_experts(torch.ones((6, 64), dtype=torch.bfloat16), routed, backend="emulator")
    assert out.dtype == torch.bfloat16 and torch.equal(out, torch.ones((3, 64), dtype=torch.bfloat16))


TOKENS, NORMED, ROUTER = tokens_of(3, 64), normal(3, 64), normal(4, 64)


def routed_on_host() -> RoutedTokens:
    return ptxlab.route_tokens(TOKENS, NORMED, ROUTER, 2, backend="emulator")


def test_into_given_arrays() -> None:
    out, expected = routed_on_host(), routed_on_host()
    for array in out.arrays.values():
        array[...] = 0
    assert ptxlab.route_tokens(TOKENS, NORMED, ROUTER, 2, out=out, backend="emulator") is out
    assert all(np.array_equal(array, expected.arrays[name]) for name, array in out.arrays.items())


FRAGMENTS = layout.pack_activations(quant.quantize_activations(NORMED.astype(np.float32)), "fragment")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"tokens": NORMED}, r"route_tokens: tokens: must be row-major PackedActivations \(got ndarray\)"),
        ({"tokens": FRAGMENTS}, r"\(got fragment\)"),
        ({"normed": NORMED[:2]}, r"route_tokens: normed: shape \[3, 64\] \(got \[2, 64\]\)"),
        ({"normed": NORMED.astype(np.float32)}, r"route_tokens: normed: dtype float16 or bfloat16 \(got float32\)"),
        ({"router": ROUTER[:, :32]}, r"route_tokens: router: must be a matrix \[E, 64\] \(got shape \[4, 32\]\)"),
        ({"router": ROUTER.view(np.uint16)}, r"route_tokens: router: dtype float16 \(got uint16\)"),
        ({"router": None}, r"route_tokens: router: must be a matrix \[E, 64\] \(got shape \[\]\)"),
        ({"router": np.ones((65, 64), np.float16)}, r"route_tokens: 1 <= E <= 64 \(got E=65\)"),
        ({"k": 0}, r"route_tokens: 1 <= k <= 4 \(got k=0\)"),
        ({"k": 5}, r"route_tokens: 1 <= k <= 4 \(got k=5\)"),
        ({"k": 3, "router": ROUTER[:2]}, r"route_tokens: k <= E \(got E=2, k=3\)"),
        ({"tokens": tokens_of(3, 48), "router": ROUTER[:, :48].copy()}, r"route_tokens: H % 32 == 0 \(got H=48\)"),
        ({"k": 1.5}, r"route_tokens: k: must be an integer \(got 1.5\)"),
        ({"out": TOKENS}, r"route_tokens: out: must be RoutedTokens \(got PackedActivations\)"),
        ({"k": 1, "out": routed_on_host}, r"route_tokens: out.chosen: shape \[3, 1\] \(got \[3, 2\]\)"),
        ({"programmatic": 1}, r"route_tokens: programmatic: must be True or False \(got 1\)"),
        ({"backend": "cpu"}, r"backend: one of gpu, emulator \(got cpu\)"),
    ],
)
def test_bad_input_to_the_router_is_refused(change: dict[str, Any], message: str) -> None:
    change = {name: argument() if argument is routed_on_host else argument for name, argument in change.items()}
    arguments = {"tokens": TOKENS, "normed": NORMED, "router": ROUTER, "k": 2, "backend": "emulator", **change}
    with pytest.raises(ArgumentError, match=message):
        ptxlab.route_tokens(**arguments)


RESULTS = np.ones((6, 64), np.float16)


def test_rows_that_do_not_fit_together_are_refused() -> None:
    routed = routed_on_host()
    for change, message in (
        ({"rows": FRAGMENTS}, r"RoutedTokens: rows: must be row-major PackedActivations \(got fragment\)"),
        ({"rows": TOKENS}, r"RoutedTokens: place: must be \[M, k\] for 3 rows \(got shape \[3, 2\]\)"),
        ({"place": routed.offsets}, r"RoutedTokens: place: must be \[M, k\] for 6 rows \(got shape \[5\]\)"),
        ({"share": None}, r"RoutedTokens: share: must be \[3, 2\] as place is \(got shape \[\]\)"),
    ):
        with pytest.raises(ArgumentError, match=message):
            replace(routed, **change)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"results": np.ones((5, 64), np.float16)}, r"results: must be a matrix \[6, H\] \(got shape \[5, 64\]\)"),
        ({"results": np.ones((6, 32800), np.float16)}, r"combine_experts: 1 <= H <= 32768 \(got H=32800\)"),
        ({"programmatic": 1}, r"combine_experts: programmatic: must be True or False \(got 1\)"),
        ({"results": np.ones((6, 48), np.float16)}, r"combine_experts: H % 32 == 0 \(got H=48\)"),
        ({"results": np.ones((6, 64), np.float32)}, r"results: dtype float16 or bfloat16 \(got float32\)"),
        ({"routed": TOKENS}, r"combine_experts: routed: must be RoutedTokens \(got PackedActivations\)"),
        ({"out": np.ones((2, 64), np.float16)}, r"combine_experts: out: shape \[3, 64\] \(got \[2, 64\]\)"),
        ({"out": np.ones((3, 64), np.uint16)}, r"combine_experts: out: dtype float16 \(got uint16\)"),
        ({"results": RESULTS, "out": RESULTS[3:]}, r"combine_experts: out: must not share memory with results"),
    ],
)
def test_bad_input_to_the_sum_is_refused(change: dict[str, Any], message: str) -> None:
    arguments = {"results": np.ones((6, 64), np.float16), "routed": routed_on_host(), "backend": "emulator", **change}
    with pytest.raises(ArgumentError, match=message):
        ptxlab.combine_experts(**arguments)


def test_a_token_takes_an_expert_once() -> None:
    arrays = {part: getattr(TOKENS, part) for part in PARTS}
    for chosen, message in (
        ([[0, 1], [2, 2], [1, 0]], r"different \(got token 1\)"),
        ([[0, 1], [2, 4], [1, 0]], "< E"),
    ):
        with pytest.raises(ArgumentError, match=message):
            ptxlab.run("gather_tokens", **arrays, chosen=np.array(chosen, np.int32), E=4, backend="emulator")


# --- the GPU side, on a GPU that isn't one ---------------------------------------------------------------------------


@pytest.mark.full
def test_device_arrays(fake: FakeGpu) -> None:
    """Routing makes two launches and combining one, programmatic if asked.

    A repeated call allocates nothing but results.
    """
    on_device = pack_rows(*(DeviceArray(getattr(TOKENS, part)) for part in PARTS))
    normed, router, expert_outputs = DeviceArray(NORMED), DeviceArray(ROUTER), normal(6, 64)
    routed, on_host = ptxlab.route_tokens(on_device, normed, router, 2, programmatic=True), routed_on_host()
    assert all(np.array_equal(array.host, on_host.arrays[name]) for name, array in routed.arrays.items())
    hidden = ptxlab.combine_experts(DeviceArray(expert_outputs), routed)
    assert np.array_equal(hidden.host, ptxlab.combine_experts(expert_outputs, on_host, backend="emulator"))
    assert [name for name, _ in fake.launched] == ["choose_experts", "gather_tokens", "combine_experts"]
    assert [geometry.programmatic for geometry in fake.geometries] == [True, True, False]

    fake.capturing, allocations = True, fake.allocations
    assert ptxlab.route_tokens(on_device, normed, router, 2, out=routed, programmatic=True) is routed
    assert ptxlab.combine_experts(DeviceArray(expert_outputs), routed, out=hidden) is hidden
    assert fake.allocations == allocations
    with pytest.raises(ArgumentError, match=r"route_tokens: out.chosen: must be given in a capture"):
        ptxlab.route_tokens(on_device, normed, router, 2, programmatic=True)
    with pytest.raises(ArgumentError, match=r"combine_experts: out: must be given in a capture"):
        ptxlab.combine_experts(DeviceArray(expert_outputs), routed)


def test_an_older_gpu_is_said(fake: FakeGpu) -> None:
    fake.arch, tokens = 75, pack_rows(*(DeviceArray(getattr(TOKENS, part)) for part in PARTS))
    with pytest.raises(UnavailableError, match="route_tokens: choose_experts: it runs on sm_80, and this is sm_75"):
        ptxlab.route_tokens(tokens, DeviceArray(NORMED), DeviceArray(ROUTER), 2)


# --- what synchronises -----------------------------------------------------------------------------------------------


EXAMPLES = [(spec, sizes) for spec in (CHOOSE, GATHER, COMBINE) for sizes in spec.example_sizes]


@pytest.mark.default_cases("gather_tokens-1-32-1-1", "gather_tokens-3-1056-8-2", "combine_experts-5-1056-2-10")
@pytest.mark.parametrize(
    ("spec", "sizes"), EXAMPLES, ids=lambda of: getattr(of, "name", None) or "-".join(map(str, of.values()))
)
def test_every_bit(spec: Any, sizes: dict[str, int]) -> None:
    """The kernel runs at all of the spec's sizes, on poisoned memory, with all checks."""
    (source,) = registry.find(spec.name)[1]
    verdict = verify(Job(spec, source, "emulator", sizes))
    assert verdict.passed, verdict.detail


SYNCHRONISED = {  # several tokens of a block, several parts of a warp
    "choose": (CHOOSE, {"M": 133, "H": 32, "E": 33, "k": 2}),
    "gather": (GATHER, {"M": 513, "K": 32, "E": 3, "k": 2}),
}


@pytest.mark.full
@pytest.mark.parametrize("case", SYNCHRONISED)
def test_every_missing_wait_is_noticed(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The checks or a wrong result show it."""
    spec, sizes = SYNCHRONISED[case]
    (source,) = registry.find(spec.name)[1]
    logical = spec.example(np.random.default_rng(0), **sizes)
    config = spec.config_for(sizes)
    inputs = {name: array.astype(np.float16) if spec is CHOOSE else array for name, array in spec.pack(logical).items()}
    kernel = Kernel.of(spec, source, config)

    def check() -> None:
        outcome = run_spec(spec, source, inputs, sizes=sizes, backend="emulator", checks=emulator.CHECKS, config=config)
        assert outcome.findings == ()
        ptxlab.runtime.verify.compare(spec, outcome.outputs, logical, config)

    check()
    statements = sync_mutants.statements_by_place(kernel)
    assert statements
    for (opcode, place), copies in statements.items():
        with monkeypatch.context() as patch:
            assert sync_mutants.diagnosis(sync_mutants.apply_change(kernel, copies), check, patch), (
                f"{opcode} of {place}"
            )


@pytest.mark.default_cases("combine_experts")
@pytest.mark.parametrize("spec", [CHOOSE, GATHER, COMBINE], ids=lambda spec: spec.name)
def test_the_kernel_before_is_waited_for(spec: Any) -> None:
    """Without the wait every input but the router is read too early."""
    (source,) = registry.find(spec.name)[1]
    wait = "    ptxlab::wait_for_predecessors();\n"
    assert source.text.count(wait) == 1
    assert {arg.name for arg in spec.inputs} - {*spec.after_wait} == ({"router"} if spec is CHOOSE else set())
    job = Job(spec, replace(source, text=source.text.replace(wait, "")), "emulator", spec.example_sizes[1])
    assert "ahead of griddepcontrol.wait" in verify(job).detail


# --- on a GPU --------------------------------------------------------------------------------------------------------

ON_GPU = pytest.mark.skipif(gpu.why_not("sm_90") is not None, reason="needs sm_90")


@pytest.mark.gpu
@ON_GPU
@pytest.mark.parametrize("M", [1, 33, 256, 1000])
def test_a_programmatic_chain_is_the_plain_chain(M: int) -> None:
    """The chain has norm, routing and sum; a step's x is the sum of the step before.

    So a stale byte goes on.
    """
    import cupy

    H, E = 4096, 8
    x, gamma, router = (cupy.asarray(normal(*shape)) for shape in ((M, H), (H,), (E, H)))
    normed, hidden, expert_outputs = cupy.zeros_like(x), cupy.zeros_like(x), cupy.zeros((2 * M, H), cupy.float16)
    tokens = ptxlab.rmsnorm_quantize(x, gamma, normed=normed)
    routed = ptxlab.route_tokens(tokens, normed, router, 2)
    expert_outputs[...] = cupy.asarray(normal(2 * M, H))

    def chain(programmatic: bool) -> None:
        options: dict[str, Any] = {"programmatic": programmatic}
        for read in (x, *[hidden] * 8):
            ptxlab.rmsnorm_quantize(read, gamma, normed=normed, out=tokens, **options)
            ptxlab.route_tokens(tokens, normed, router, 2, out=routed, **options)
            ptxlab.combine_experts(expert_outputs, routed, out=hidden, **options)

    chains.assert_same_bits_as_plain(chain, (hidden, normed, *routed.arrays.values()))
