"""A decoder layer as one chain of launches in the emulator, held against its NumPy twins."""

from dataclasses import fields, is_dataclass, replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ptxlab import emulator, gpu, runtime
from ptxlab.errors import ArgumentError, VerificationError
from ptxlab.llm.model import Config, LayerBuffers, LayerInputs, LayerWeights, layer
from ptxlab.llm.model.layer import layer_calls
from ptxlab.llm.model.reference import compare, exact, in_float64
from ptxlab.lowbit.kernels import operation
from ptxlab.lowbit.layout import KVCache
from ptxlab.spec.dtypes import numbers
from tests.support.attention_problems import map_arrays
from tests.support.dispatching_array import DispatchingArray
from tests.support.fake_gpu import DeviceArray, FakeGpu, on_device
from tests.support.layers import TINY, LayerProblem, another_layer, layer_problem

LLAMA = Config(hidden=256, ffn=256, heads=2, kv_heads=2, head_dim=128, layers=1, vocabulary=100)
QWEN = replace(TINY, heads=4, kv_heads=2, ffn=192, qkv_bias=True, window=40, activation="gelu_tanh")
MIXTRAL = replace(TINY, experts=4, chosen_experts=2)
CHAIN = (
    "rmsnorm_quantize", "gemm_w4a8_small_sm90", "rope_append_kv4", "attention_kv4_sm90", "quantize_activations_s8",
    "gemm_w4a8_small_sm90", "rmsnorm_quantize", "gemm_w4a8_small_sm90", "silu_mul_quantize", "gemm_w4a8_small_sm90",
)  # fmt: skip
OF_EXPERTS = (
    *(*CHAIN[:7], "choose_experts", "gather_tokens", "gemm_w4a8_grouped_sm90", "silu_mul_quantize"),
    *("gemm_w4a8_grouped_sm90", "combine_experts"),
)
# Root mean square of the errors by that of the result: of INT8 activations, and a new token in 4 bits.
OF_QUANTISING = 0.08


def run_and_compare(problem: LayerProblem, **how: Any) -> str:
    """Run the layer, and compare it with `exact` step by step, and with `in_float64`."""
    inputs, dtype = problem.inputs, problem.weights.dtype
    hidden = problem.run(**how)
    outputs, expected_outputs = (hidden, problem.residual), in_float64(inputs, problem.weights)
    if problem.buffers.residual_epilogue and not problem.weights.config.experts:
        outputs, expected_outputs = outputs[1:], (sum(expected_outputs),)
        assert hidden is problem.residual
    else:
        assert hidden is problem.buffers.hidden
    for output, expected in zip(outputs, expected_outputs, strict=True):
        error = numbers(output, dtype) - expected
        assert np.sqrt((error**2).mean()) < OF_QUANTISING * np.sqrt((expected**2).mean())
    return compare(inputs, problem.weights, problem.buffers, problem.residual, problem.cache)


BFLOAT16 = {"dtype": "bfloat16"}
EARLY, LATE = ({"mode": mode, "begin": "early"} for mode in emulator.MODES)


@pytest.mark.full
@pytest.mark.parametrize(
    ("config", "how", "when", "names"),
    [
        (LLAMA, {}, EARLY, CHAIN),
        (QWEN, {**BFLOAT16, "scheme": "qoq_channel", "order": "fragment"}, LATE, CHAIN),
        (MIXTRAL, {**BFLOAT16, "group": 64}, {**LATE, "begin": "late"}, OF_EXPERTS),
    ],
    ids=["llama", "qwen", "mixtral"],
)
def test_a_layer_is_its_twin(config: Config, how: dict[str, Any], when: dict[str, Any], names: tuple[str, ...]) -> None:
    problem = layer_problem(config, **how)
    with emulator.chain(emulator.CHECKS, **when, given=[problem.cache.pool]) as chain:
        summary = run_and_compare(problem)
    assert chain.findings == [] and tuple(chain.launches) == names
    routed = ("share, ", 19) if config.experts else ("", 10)  # without experts `o` and `hidden` go to the stream
    assert summary == f"{routed[1]} steps: attention, {routed[0]}down_in within bounds, all others equal in every bit"


GATED = (*CHAIN[:8], "quantize_activations_s8", CHAIN[9])


@pytest.mark.full
@pytest.mark.parametrize(
    ("how", "when"),
    [
        ({"residual_epilogue": False}, EARLY),
        ({**BFLOAT16, "interleaved": True, "residual_epilogue": False, "scheme": "qoq_channel"}, EARLY),
        ({"interleaved": True}, LATE),
    ],
    ids=["neither", "silu_mul", "both"],
)
def test_products_that_end_with_more(how: dict[str, Any], when: dict[str, Any]) -> None:
    problem = layer_problem(TINY, **how)
    with emulator.chain(emulator.CHECKS, **when, given=[problem.cache.pool]) as chain:
        summary = run_and_compare(problem)
    gated, added = "interleaved" in how, how.get("residual_epilogue", True)
    assert chain.findings == [] and tuple(chain.launches) == (GATED if gated else CHAIN)
    last = "gate_up" if gated else "down_in"
    assert summary == f"{10 if added else 12} steps: attention, {last} within bounds, all others equal in every bit"


@pytest.mark.full
def test_layers_that_add_to_the_stream_follow_each_other() -> None:
    """The second is given the residual itself, to which there is nothing to add."""
    first = layer_problem()
    second = another_layer(first, seed=1)
    with emulator.chain({"race", "init"}, given=[first.cache.pool, second.cache.pool]) as chain:
        run_and_compare(first)
        run_and_compare(second, programmatic=True)
    assert chain.findings == [] and tuple(chain.launches) == 2 * CHAIN


@pytest.mark.full
@pytest.mark.parametrize("config", [TINY, MIXTRAL], ids=["llama", "mixtral"])
def test_a_residual_epilogue_has_the_bits_of_the_chain_without(config: Config) -> None:
    plain_problem, fused = (layer_problem(config, residual_epilogue=added) for added in (False, True))
    hidden, returned = plain_problem.run(), fused.run()
    if config.experts:
        assert np.array_equal(hidden, returned) and np.array_equal(plain_problem.residual, fused.residual)
    else:
        assert np.array_equal(plain_problem.residual + hidden, returned)  # as the next layer adds them


@st.composite
def problems(draw: st.DrawFn) -> LayerProblem:
    """Draw layers of widths in steps of 32, heads of any grouping, and batches of any lengths.

    They have one dtype, as each dtype is compiled.
    """
    kv_heads, D = draw(st.integers(1, 2)), draw(st.sampled_from((64, 128)))
    widths = {name: 32 * draw(st.integers(1, 9)) for name in ("hidden", "ffn")}
    heads = {"heads": kv_heads * draw(st.integers(1, 3)), "kv_heads": kv_heads, "head_dim": D}
    experts = draw(st.sampled_from(({}, {"experts": 4, "chosen_experts": 2})))
    lengths = tuple(draw(st.lists(st.integers(1, 128), min_size=1, max_size=5)))
    config = Config(**widths, **heads, **experts, qkv_bias=draw(st.booleans()), layers=1, vocabulary=1)
    return layer_problem(config, lengths=lengths, group=32, seed=draw(st.integers(0, 99)))


def fill(part: Any, byte: int) -> None:
    """Fill every array in a buffer, or in a structure of buffers, with a byte."""
    if isinstance(part, np.ndarray):
        part.view(np.uint8)[...] = byte
    elif is_dataclass(part) and not isinstance(part, Config):
        for part_field in fields(part):
            fill(getattr(part, part_field.name), byte)


@pytest.mark.full
@given(problem=problems(), mode=st.sampled_from(emulator.MODES), poison=st.sampled_from((0xA5, 0x5A, 0xFF)))
@settings(max_examples=4)
def test_any_layer_is_its_twin(problem: LayerProblem, mode: str, poison: int) -> None:
    """The buffers hold other bytes before."""
    fill(problem.buffers, poison)
    inputs = problem.inputs
    with emulator.chain(emulator.CHECKS, mode=mode, begin=mode, given=[problem.cache.pool]) as chain:
        problem.run()
    assert chain.findings == []
    compare(inputs, problem.weights, problem.buffers, problem.residual, problem.cache)


@pytest.mark.full
def test_layers_follow_each_other() -> None:
    """The second begins while the first still runs, and goes on with its result and its residual."""
    first = layer_problem()
    first.residual[...] = 0  # as before the first layer of a decoder
    second = another_layer(first, seed=1)
    with emulator.chain({"race", "init"}, given=[first.cache.pool, second.cache.pool]) as chain:
        run_and_compare(first)
        run_and_compare(second, programmatic=True)
    assert chain.findings == [] and len(chain.launches) == 20


@pytest.mark.full
@pytest.mark.parametrize(
    ("config", "ends"),
    [(TINY, {"residual_epilogue": False}), (MIXTRAL, {}), (TINY, {"interleaved": True})],
    ids=["llama", "mixtral", "epilogues"],
)
def test_a_token_has_the_same_bits_alone(config: Config, ends: dict[str, Any]) -> None:
    problem = layer_problem(config, batch_invariant=True, **ends)
    inputs, b = problem.inputs, 0
    cache = replace(
        inputs.cache, **{name: getattr(inputs.cache, name)[b : b + 1] for name in ("block_table", "lengths")}
    )
    cos, sin, positions = problem.rope
    alone = replace(
        problem,
        cache=cache,
        x=inputs.x[b : b + 1],
        residual=inputs.residual[b : b + 1],
        slots=inputs.slots[b : b + 1],
        rope=(cos, sin, positions[b : b + 1]),
        buffers=replace(
            LayerBuffers.empty(problem.weights, cache, batch_invariant=True),
            residual_epilogue=problem.buffers.residual_epilogue,
        ),
    )
    together, by_itself = problem.run(), alone.run()
    assert (together[b].view(np.uint16) == by_itself[0].view(np.uint16)).all()
    assert (problem.residual[b] == alone.residual[0]).all()


@pytest.mark.full
@pytest.mark.parametrize(
    ("config", "name", "ends"),
    [
        *((TINY, name, {"residual_epilogue": False}) for name in sorted({*CHAIN})),
        *((MIXTRAL, name, {}) for name in sorted({*OF_EXPERTS} - {*CHAIN})),
        (TINY, "gemm_w4a8_small_sm90", {"interleaved": True}),
    ],
    ids=lambda case: case if isinstance(case, str) else "mixtral" if getattr(case, "experts", 0) else None,
)
def test_a_wait_that_one_kernel_leaves_out_is_found(
    config: Config, name: str, ends: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is found though the results are right, as they may be on a GPU for long."""

    def parse_without_wait(text: str, *paths: str) -> emulator.Module:
        return emulator.parse(text.replace("griddepcontrol.wait;", "") if f".entry {name}(" in text else text, *paths)

    monkeypatch.setattr(runtime, "_parse_cached", parse_without_wait)
    problem = layer_problem(config, **ends)
    inputs = problem.inputs
    with emulator.chain({"race"}, begin="late") as chain:
        problem.run(programmatic=True)
    compare(inputs, problem.weights, problem.buffers, problem.residual, problem.cache)
    assert all(finding.kind == "race" and "griddepcontrol.wait" in finding.message for finding in chain.findings)
    assert {finding.message.startswith("no thread executes") for finding in chain.findings} == {True, False}


SET_LENGTHS = """.version 8.0
.target sm_90
.address_size 64
.visible .entry set_lengths(.param .u64 source, .param .u64 lengths)
{
.reg .u32 %r<3>;
.reg .u64 %rd<3>;
ld.param.u64 %rd1, [source];
ld.param.u64 %rd2, [lengths];
mov.u32 %r1, %tid.x;
mad.wide.u32 %rd1, %r1, 4, %rd1;
mad.wide.u32 %rd2, %r1, 4, %rd2;
griddepcontrol.wait;
ld.global.u32 %r2, [%rd1];
st.global.u32 [%rd2], %r2;
ret;
}
"""


@pytest.mark.default_cases("True")
@pytest.mark.parametrize("programmatic", [False, True])
def test_who_writes_lengths_is_followed_by_an_ordinary_launch(programmatic: bool) -> None:
    """Attention reads them ahead of its wait, three launches later."""
    problem = layer_problem()
    fill(problem.buffers, 0)  # read where attention, too early, sees no tokens and writes nothing
    lengths, problem.cache.lengths[...] = problem.cache.lengths.copy(), 0
    with emulator.chain({"race"}) as chain:
        emulator.run(SET_LENGTHS, None, [lengths, problem.cache.lengths], grid=1, block=len(lengths))
        problem.run(programmatic=programmatic)
    messages = [finding.message for finding in chain.findings]
    assert bool(messages) == programmatic and all("ahead of griddepcontrol.wait" in message for message in messages)


def test_twins_agree_where_nothing_is_left_to_round() -> None:
    """`exact` by itself, without the launches, is as near to float64 as they are."""
    problem = layer_problem()
    inputs = problem.inputs
    steps, (hidden, residual) = exact(inputs, problem.weights), in_float64(inputs, problem.weights)
    for name, right in (("hidden", hidden), ("residual", residual)):
        error = steps[name].right.astype(np.float64) - right
        assert 0 < np.sqrt((error**2).mean()) < OF_QUANTISING * np.sqrt((right**2).mean())


@pytest.fixture
def device_arrays(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make `ptxlab.gpu` take a `DispatchingArray` for CuPy's."""
    replaced = {
        "is_device_array": lambda array: isinstance(array, DispatchingArray),
        "as_array": lambda name, array: array,
        "to_host": lambda array: array.array,
        "to_device": DispatchingArray,
    }
    for name, function in replaced.items():
        monkeypatch.setattr(gpu, name, function)


def to_device(part: Any) -> Any:
    """Move an array or a packed weight to that device."""
    if not hasattr(part, "buffers"):
        return DispatchingArray(part)
    return replace(part, buffers={name: DispatchingArray(array) for name, array in part.buffers.items()})


@pytest.mark.usefixtures("device_arrays")
@pytest.mark.parametrize(
    ("config", "how"),
    [(TINY, {}), (MIXTRAL, {"group": 64}), (QWEN, {"scheme": "qoq_channel", "dtype": "bfloat16"})],
    ids=["llama", "mixtral", "qwen"],
)
def test_twins_take_device_arrays(config: Config, how: dict[str, Any]) -> None:
    problem = layer_problem(config, **how)
    inputs, weights = problem.inputs, problem.weights
    moved_weights = replace(weights, **{name: to_device(part) for name, part in weights.parts.items()})
    x, residual, slots, *rope = map(to_device, (inputs.x, inputs.residual, inputs.slots, *inputs.rope))
    moved_inputs = LayerInputs(x, residual, map_arrays(inputs.cache, DispatchingArray), slots, tuple(rope))
    steps = exact(inputs, weights)
    for name, step in exact(moved_inputs, moved_weights).items():
        array_set, expected_set = (
            vars(each_step.right) if name.endswith("_in") or name == "tokens" else {"": each_step.right}
            for each_step in (step, steps[name])
        )
        assert all((array_set[part].array == expected_set[part]).all() for part in expected_set), name
    floats = zip(in_float64(moved_inputs, moved_weights), in_float64(inputs, weights), strict=True)
    assert all(np.allclose(moved.array, expected, rtol=1e-9) for moved, expected in floats)


STEPS = (
    "qkv_in",
    "qkv",
    "q",
    "pool",
    "attention",
    "o_in",
    "o",
    "residual",
    "gate_up_in",
    "gate_up",
    "down_in",
    "hidden",
)
ROUTED = ("offsets", "place", "share", "chosen", "tokens", "normed", "expert_outputs")


@pytest.mark.default_cases("llama")
@pytest.mark.parametrize(("config", "steps"), [(TINY, STEPS), (MIXTRAL, ROUTED)], ids=["llama", "mixtral"])
def test_a_step_that_went_wrong_is_named(config: Config, steps: tuple[str, ...]) -> None:
    problem = layer_problem(config, residual_epilogue=False)
    inputs, routing = problem.inputs, problem.buffers.routing
    problem.run()
    comparison = inputs, problem.weights, problem.buffers, problem.residual, problem.cache
    compare(*comparison)
    arrays = {"pool": problem.cache.pool, "residual": problem.residual}
    if routing is not None:
        arrays |= {**routing.routed.arrays, **vars(routing)}
    for name in steps:
        array = arrays.get(name, getattr(problem.buffers, name, None))
        array = getattr(array, "x_q", array)
        place = np.unravel_index(int(np.argmax(np.abs(array.astype(np.float32)))), array.shape)
        element = array[place]
        array[place] = 0
        with pytest.raises(VerificationError, match=rf"^{name}[.:]"):
            compare(*comparison)
        array[place] = element
    problem.buffers.o_in.token_sum[1] += 1
    with pytest.raises(VerificationError, match=r"^o_in.token_sum: 1 of 3 elements differ .* first at \[1\]"):
        compare(*comparison)


def on_the_device(problem: LayerProblem) -> LayerProblem:
    """Copy a whole problem to the device, with buffers of its own."""
    weights = replace(problem.weights, **{name: on_device(part) for name, part in problem.weights.parts.items()})
    arrays = {name: on_device(getattr(problem.cache, name)) for name in ("pool", "block_table", "lengths")}
    cache = replace(problem.cache, **arrays)
    moved = {name: on_device(getattr(problem, name)) for name in ("x", "residual", "slots")}
    buffers = LayerBuffers.empty(weights, cache)
    return replace(
        problem, weights=weights, cache=cache, rope=tuple(map(on_device, problem.rope)), buffers=buffers, **moved
    )


@pytest.mark.full
@pytest.mark.parametrize(("config", "names"), [(TINY, CHAIN), (MIXTRAL, OF_EXPERTS)], ids=["llama", "mixtral"])
def test_in_a_capture_nothing_is_allocated(
    config: Config, names: tuple[str, ...], fake: FakeGpu, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The launches but the first are programmatic."""
    for name in ("_prepared", "_ready", "_memory"):
        monkeypatch.setattr(operation, name, {})
    fake.runs = False
    problem = on_the_device(layer_problem(config))
    problem.run(backend=None)
    fake.capturing, allocations = True, fake.allocations
    del fake.launched[:], fake.geometries[:]
    problem.run(backend=None)
    assert fake.allocations == allocations and tuple(name for name, _ in fake.launched) == names
    assert [geometry.programmatic for geometry in fake.geometries] == [False] + [True] * (len(names) - 1)


@pytest.mark.full
@pytest.mark.parametrize("batch_invariant", [False, True])
def test_a_capture_takes_rows_of_prompts(batch_invariant: bool, fake: FakeGpu, monkeypatch: pytest.MonkeyPatch) -> None:
    """Attention cuts long contexts into parts unless it is batch-invariant.

    It needs a workspace then.
    """
    for name in ("_prepared", "_ready", "_memory"):
        monkeypatch.setattr(operation, name, {})
    fake.runs, fake.sms = False, 32
    problem = on_the_device(layer_problem())
    table = DeviceArray(np.zeros((3, 200), np.int32))
    cache = replace(problem.cache, block_table=table)
    buffers = LayerBuffers.empty(problem.weights, cache, tokens=3, batch_invariant=batch_invariant)
    assert (buffers.attention_workspace is None) == batch_invariant
    starts = DeviceArray(np.array([0, 1, 2, 3], np.int32))
    operands = problem.x, problem.residual, problem.weights, cache, problem.slots
    calls = layer_calls(*operands, rope=problem.rope, buffers=buffers, query_start_loc=starts)
    for fake.capturing in (False, True):
        allocations = fake.allocations
        for call in calls:
            call()
    assert fake.allocations == allocations and "attention_kv4_prefill_sm90" in dict(fake.launched)


def test_ampere_cuts_no_contexts_of_prompts(fake: FakeGpu) -> None:
    cache = on_the_device(layer_problem()).cache
    fake.arch = 80
    assert layer._attention_workspace(cache, tokens=3, batch_invariant=False) is None


def overlapping() -> dict[str, np.ndarray]:
    both_arrays = np.zeros((4, 128), np.float16)
    return {"x": both_arrays[1:], "residual": both_arrays[:3]}


def read_only() -> np.ndarray:
    residual = np.zeros((3, 128), np.float16)
    residual.flags.writeable = False
    return residual


PROBLEM = layer_problem()
COS, SIN, POSITIONS = PROBLEM.rope
OTHER_LENGTHS = replace(PROBLEM.cache, lengths=np.array([70, 129, 33], np.int32))
REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"weights": None}, "decode_layer: weights: must be LayerWeights (got NoneType)"),
    ({"buffers": {}}, "decode_layer: buffers: must come from LayerBuffers.empty (got dict)"),
    ({"buffers": layer_problem(lengths=(3, 4)).buffers}, "made for these weights, float16, and 3 rows (got "),
    ({"cache": KVCache.empty(3, 2, 1, 128)}, "decode_layer: cache: must have 1 kv heads of 64 (got 1 of 128)"),
    ({"cache": OTHER_LENGTHS}, "decode_layer: cache.lengths: must lie in 0..128 (got lengths[1] is 129)"),
    ({"x": PROBLEM.x[:2]}, "decode_layer: x: must be float16 [3, 128] (got float16 [2, 128])"),
    ({"x": None}, "decode_layer: x: must be float16 [3, 128] (got NoneType [])"),
    ({"x": np.full_like(PROBLEM.x, np.nan)}, "x: must be finite in float32 (got x[0, 0] is nan)"),
    ({"x": np.repeat(PROBLEM.x, 2, 1)[:, ::2]}, "decode_layer: x: C-contiguous (got strides (512, 4))"),
    ({"residual": PROBLEM.residual.view(np.uint16)}, "residual: must be float16 [3, 128] (got bfloat16 [3, 128])"),
    ({"residual": read_only()}, "decode_layer: residual: must be writeable (got a read-only array)"),
    ({"x": PROBLEM.x, "residual": PROBLEM.x[:]}, "rmsnorm_quantize: residual: must not share memory with x"),
    (overlapping(), "rmsnorm_quantize: residual: must not share memory with x"),
    ({"slots": PROBLEM.slots[:2]}, "decode_layer: slots: must be int32 or int64 [3] (got int32 [2])"),
    ({"slots": None}, "decode_layer: slots: must be int32 or int64 [3] (got NoneType [])"),
    ({"slots": PROBLEM.slots + 384}, "decode_layer: slots: must be below 384, the pages' tokens (got slots[0] = "),
    ({"slots": PROBLEM.slots[[0, 1, 0]]}, "decode_layer: slots: must be distinct (got slots[2] = "),
    ({"rope": None}, "decode_layer: rope: must be (cos, sin) or (cos, sin, positions) (got NoneType)"),
    ({"rope": (COS[:2], SIN[:2])}, "decode_layer: rope cos: must be float32 [3, 32] (got float32 [2, 32])"),
    ({"rope": (COS, SIN[1:], POSITIONS)}, "decode_layer: rope sin: must be float32 [70, 32] (got float32 [69, 32])"),
    ({"rope": (COS, SIN, None)}, "decode_layer: rope positions: must be int32 [3] (got NoneType [])"),
    ({"rope": (COS, SIN, POSITIONS.astype(np.int64))}, "rope positions: must be int32 [3] (got int64 [3])"),
    ({"rope": (COS, SIN, POSITIONS + 1)}, "decode_layer: rope positions: must lie in 0..69 (got positions[0] = 70)"),
]


@pytest.mark.parametrize(("change", "message"), REFUSED, ids=[str(i) for i in range(len(REFUSED))])
@pytest.mark.parametrize("config", [TINY, MIXTRAL], ids=["llama", "mixtral"])
def test_bad_input_is_refused_before_a_launch(config: Config, change: dict[str, Any], message: str) -> None:
    problem = PROBLEM if config is TINY else PROBLEM_OF_EXPERTS
    inputs = problem.inputs
    with emulator.chain(()) as chain, pytest.raises(ArgumentError) as error:
        replace(problem, **change).run()
    assert message in str(error.value) and "\n" not in str(error.value)
    assert chain.launches == []
    assert (problem.residual == inputs.residual).all() and (problem.cache.pool == inputs.cache.pool).all()


PROBLEM_OF_EXPERTS = layer_problem(MIXTRAL)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"cache": None}, r"decode_layer: cache: must be a KVCache \(got NoneType\)"),
        ({"cache": KVCache.empty(3, 2, 1, 128)}, r"decode_layer: cache: must have 1 kv heads of 64 \(got 1 of 128\)"),
        ({"weights": PROBLEM.buffers}, r"decode_layer: weights: must be LayerWeights \(got LayerBuffers\)"),
        ({"order": "rows"}, r"layout: must be one of row_major, fragment, tiles \(got rows"),
        ({"order": "tiles"}, r"rows: must be a multiple of 8 in 8..256 for tiles \(got None"),
        ({"batch_invariant": 1}, r"batch_invariant: must be True or False \(got 1\)"),
    ],
)
def test_buffers_that_cannot_be_made_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ArgumentError, match=message):
        LayerBuffers.empty(**{"weights": PROBLEM.weights, "cache": PROBLEM.cache, **options})


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"heads": 17}, r"^decode_layer: heads: at most 16 \(got 17\)$"),
        ({"experts": 65, "chosen_experts": 1}, r"^decode_layer: experts: at most 64 \(got 65\)$"),
        ({"experts": 8, "chosen_experts": 5}, r"^decode_layer: chosen_experts: at most 4 \(got 5\)$"),
        ({"ffn": 32800}, r"^decode_layer: ffn: must be a multiple of 32 up to 32768 \(got 32800\)$"),
    ],
)
def test_a_layer_that_no_kernel_takes_has_no_buffers(change: dict[str, int], message: str) -> None:
    weights = LayerWeights.random(replace(TINY, **change), group=32)
    with pytest.raises(ArgumentError, match=message):
        LayerBuffers.empty(weights, PROBLEM.cache)


@pytest.mark.parametrize("problem", [PROBLEM, PROBLEM_OF_EXPERTS], ids=["llama", "mixtral"])
def test_a_batch_of_nobody_is_a_layer_of_no_launch(problem: LayerProblem) -> None:
    cache = replace(problem.cache, block_table=problem.cache.block_table[:0], lengths=problem.cache.lengths[:0])
    x, residual, slots, positions = (
        array[:0].copy() for array in (problem.x, problem.residual, problem.slots, POSITIONS)
    )
    nobody = replace(problem, cache=cache, x=x, residual=residual, slots=slots, rope=(COS, SIN, positions))
    nobody = replace(nobody, buffers=LayerBuffers.empty(problem.weights, cache))
    with emulator.chain(()) as chain:
        assert nobody.run().shape == (0, 128)
    assert chain.launches == []


def test_what_is_elsewhere_is_refused_before_a_launch(fake: FakeGpu) -> None:
    """Weights, angles or slots may be on the host, or slots on another device.

    The cache may be on the GPU beside buffers on the host.
    """
    on_gpu = on_the_device(layer_problem())
    host, count = layer_problem(), len(fake.launched)
    second = DeviceArray(host.slots, device=1)
    for problem, message in (
        (replace(on_gpu, slots=host.slots), r"decode_layer: slots: an array on the GPU"),
        (replace(on_gpu, rope=host.rope), r"decode_layer: rope cos: an array on the GPU"),
        (replace(on_gpu, weights=host.weights), r"decode_layer: weights.input_norm: an array on the GPU"),
        (replace(on_gpu, slots=second), r"decode_layer: slots: on the current device 0 \(got device 1\)"),
        (replace(host, cache=on_gpu.cache), r"decode_layer: cache.pool: must be on the host, as the other arrays are"),
    ):
        with pytest.raises(ArgumentError, match=message):
            problem.run(backend=None)
    assert len(fake.launched) == count
    with pytest.raises(ArgumentError, match=r"^o: must be on the host, as input_norm is"):
        replace(host.weights, o=on_gpu.weights.o)


def test_epilogues_that_do_not_fit_are_refused() -> None:
    turns = LayerWeights.random(TINY, interleaved=True)
    gelu = replace(turns, config=replace(TINY, activation="gelu_tanh"))
    buffers = LayerBuffers.empty(turns, PROBLEM.cache)
    for change, message in (
        ({"weights": turns}, "buffers: must be made for a gate_up as these weights have it (got rows in order)"),
        ({"buffers": buffers}, "buffers: must be made for a gate_up as these weights have it (got interleaved rows)"),
        ({"weights": gelu}, "weights.gate_up: must have gate above up unless the activation is silu (got interleaved "),
    ):
        with emulator.chain(()) as chain, pytest.raises(ArgumentError) as error:
            replace(PROBLEM, **change).run()
        assert str(error.value).startswith(f"decode_layer: {message}") and chain.launches == []
    of_experts = replace(PROBLEM_OF_EXPERTS, x=PROBLEM_OF_EXPERTS.residual)  # to which no product has added yet
    with pytest.raises(ArgumentError, match=r"^rmsnorm_quantize: residual: must not share memory with x"):
        of_experts.run()
    with pytest.raises(ArgumentError, match=r"^residual_epilogue: must be True or False \(got 1\)$"):
        LayerBuffers.empty(turns, PROBLEM.cache, residual_epilogue=1)  # type: ignore[arg-type]
    with pytest.raises(ArgumentError, match=r"^weights\[0\]: must not be interleaved: grouped GEMMs have no epilogue"):
        LayerWeights.random(MIXTRAL, interleaved=True)


def test_weights_have_the_shapes_of_the_config() -> None:
    weights = LayerWeights.random(MIXTRAL, scheme="qoq_channel")
    again = LayerWeights.random(MIXTRAL, scheme="qoq_channel")
    assert all((a == b).all() for a, b in zip(weights.qkv.buffers.values(), again.qkv.buffers.values(), strict=True))
    assert weights.nbytes == sum(part.nbytes for part in weights.parts.values())
    assert (weights.gate_up.E, weights.gate_up.N, weights.down.K) == (4, 256, 128)
    for change, message in (
        ({"o": weights.qkv}, r"o: must be PackedWeight \[128, 128\] \(got \(256, 128, 0\)\)"),
        ({"gate_up": weights.qkv}, r"gate_up: must be ExpertWeights \[256, 128\] of 4 experts \(got PackedWeight\)"),
        ({"input_norm": weights.input_norm[:-1]}, r"input_norm: must be an array \[128\] \(got shape \[127\]\)"),
        ({"router": weights.router.view(np.uint16)}, r"router: must be float16, as input_norm is \(got bfloat16\)"),
        ({"router": None}, r"router: must be an array \[4, 128\] \(got NoneType\)"),
        ({"qkv_bias": weights.input_norm}, r"qkv_bias: must be None \(got shape \[128\]\)"),
    ):
        with pytest.raises(ArgumentError, match=f"^{message}$"):
            replace(weights, **change)
    for arguments, message in (
        ({"scheme": "int3"}, "scheme: must be one of lqq, qoq, qoq_channel"),
        ({"interleaved": 1}, "interleaved: "),
        ({"interleaved": True, "layout": "dual_mma"}, "interleaved: only in strips"),
        ({"dtype": "float32"}, "dtype: must be one of float16, bfloat16"),
        ({"seed": -1}, "seed: must be an integer"),
    ):
        with pytest.raises(ArgumentError, match=message):
            LayerWeights.random(TINY, **arguments)


def test_inputs_are_copied() -> None:
    problem = layer_problem()
    inputs = problem.inputs
    assert isinstance(inputs, LayerInputs) and not np.shares_memory(inputs.residual, problem.residual)
    assert not np.shares_memory(inputs.cache.pool, problem.cache.pool)
