"""Runners and text: NumPy's integers are the layer's twin bit for bit, and the kernels' but for floats of attention."""

from contextlib import suppress
from dataclasses import replace
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest

from ptxlab import emulator, gpu
from ptxlab.errors import ArgumentError, UnavailableError
from ptxlab.llm.model import FloatModel, KernelRunner, LayerInputs, NumpyRunner, QuantizedModel, generate
from ptxlab.llm.model.generate import choose
from ptxlab.llm.model.kernel_runner import LMHead
from ptxlab.llm.model.memory import Footprint
from ptxlab.llm.model.numpy_runner import IntegerProduct
from ptxlab.llm.model.reference import exact
from ptxlab.llm.model.runner import OWN_KEYS
from ptxlab.llm.model.sampling import Sampling
from ptxlab.lowbit import quant, reference
from ptxlab.lowbit.layout import gather, pack, unpack
from ptxlab.spec.dtypes import convert_to_dtype, floats
from tests.support.kernel_attention import KernelAttentionRunner
from tests.support.layers import TINY_MODEL
from tests.support.small_prompts import quantized_model

PROMPTS = [[1, 2, 3, 4, 5, 6, 7], [8, 9, 1], list(range(70, 140))]  # the last one begins a second page
# Root mean square of what logits differ by, by that of the logits: attention is rounded differently once in a while,
# which moves some INT8 activations by a step.
OF_ATTENTION = 0.03


@pytest.fixture(scope="module")
def model() -> QuantizedModel:
    return quantized_model()


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_a_float_head_multiplies_the_numbers_of_its_stream(dtype: str) -> None:
    rng = np.random.default_rng(0)
    normed = convert_to_dtype(rng.standard_normal((3, 64)).astype(np.float32), dtype)
    weight = rng.standard_normal((5, 64)).astype(np.float16)
    logits = LMHead(weight, 5)(normed)
    assert logits.dtype == np.float16 and np.allclose(logits, floats(normed) @ weight.T.astype(np.float32), atol=0.05)


def bits(array: Any) -> Any:
    return array.view(np.uint8)


@pytest.mark.parametrize(
    "how",
    [
        {},
        {"scheme": "qoq_channel", "dtype": "bfloat16", "qkv_bias": True, "tied_head": False, "window": 40},
        {"scheme": "qoq", "activation": "gelu_tanh", "kv_heads": 2},
    ],
    ids=["lqq", "qoq_channel", "qoq"],
)
def test_a_step_is_that_of_the_layers_twin(how: dict[str, Any]) -> None:
    """Every bit of every step is equal.

    These are the pools, and the stream behind each layer, which all other bits decide.
    """
    model = quantized_model(**how)
    runner = NumpyRunner(model, len(PROMPTS), 80)
    runner.prefill(PROMPTS)
    caches_before = [replace(cache, pool=cache.pool.copy()) for cache in runner.caches]
    seen: list[Any] = []
    for layer in runner._layers:
        layer.down = recording(layer.down, seen)
    tokens = np.array([3, 1, 4])
    runner.decode(tokens)

    dtype, positions = model.layers[0].dtype, runner.lengths - 1
    x = convert_to_dtype(floats(model.embedding)[tokens], dtype)
    residual, rope = np.zeros_like(x), (*model.config.rope_tables(80), positions)
    for i, weights in enumerate(model.layers):
        slots = np.array([caches_before[i].slots(b)[-1] for b in range(len(PROMPTS))], np.int32)
        steps = exact(LayerInputs.of(x, residual, caches_before[i], slots, rope), weights)
        down_in, accumulators, hidden = seen[i]
        expected_input = steps["down_in"].right
        assert np.array_equal(down_in.q, expected_input.q) and np.array_equal(
            bits(down_in.scale), bits(expected_input.scale)
        )
        weight = unpack(weights.down)
        if isinstance(weight, quant.QoQChannelWeight):
            expected = reference.gemm_accumulators_channel(
                expected_input.q, weight.q4, weight.zero, expected_input.token_sum
            )
        else:
            expected = reference.gemm_accumulators(expected_input.q, weight.exact_level1())
        assert np.array_equal(accumulators, expected)
        x, residual = steps["hidden"].right, steps["residual"].right
        assert np.array_equal(bits(convert_to_dtype(hidden, dtype)), bits(x))
        assert np.array_equal(runner.caches[i].pool, steps["pool"].right)


def recording(product: IntegerProduct, seen: list[Any]) -> Any:
    """Return a product that logs its input, its accumulators, and its output."""

    def call(x: quant.QuantizedActivations, dtype: str) -> Any:
        seen.append((x, product.accumulators(x.q), product(x, dtype)))
        return seen[-1][-1]

    call.quantize_gated = product.quantize_gated  # type: ignore[attr-defined]
    return call


def test_numpy_adds_up_a_head_exactly_where_batches_may_not_matter() -> None:
    """Logits of large weights that cancel, of which float32 would keep other small ones in each order."""
    rng = np.random.default_rng(0)
    model = quantized_model(tied_head=False)
    V, H = model.head.shape
    head = np.full((V, H), 2.0**-11, np.float16)
    for row in head:
        row[rng.choice(H, 2, replace=False)] = 30000, -30000
    runner = NumpyRunner(replace(model, head=head), 2, 80, batch_invariant=True)
    logits = runner._logits(np.ones((2, H), np.float16))
    np.testing.assert_array_equal(logits, np.full((2, V), (H - 2) * 2.0**-11, np.float16))


@pytest.mark.parametrize("batch_invariant", [True, False])
def test_a_head_whose_batch_may_not_matter_is_a_kernel_of_ours(batch_invariant: bool) -> None:
    """cuBLAS adds in an order that depends on the number of rows."""
    model, names = quantized_model(tied_head=False), list[str]()
    runner = KernelRunner(model, 2, 80, backend="emulator", batch_invariant=batch_invariant)
    x = np.ones((2, model.config.hidden), np.float16)
    with emulator.watch_launches(lambda machine: names.append(machine.launch.entry.name) or []):
        logits = runner._head(x)
    assert names == ["gemm_f16_sm80"] * batch_invariant
    np.testing.assert_allclose(logits, x @ model.head.T, rtol=2**-9, atol=2**-9)


@pytest.mark.parametrize(("K", "level", "pieces"), [(1024, 127, 1), (2080, 127, 2), (2080, 20, 1), (4160, 119, 4)])
def test_products_are_exact_integers_in_as_few_pieces_as_that_takes(K: int, level: int, pieces: int) -> None:
    """The products have one sign and the largest size, which gives the largest sums there are."""
    q4 = np.full((8, K), 15, np.uint8)
    weight = quant.LQQWeight(
        q4=q4,
        group_scale=np.ones((8, K // 32), np.uint8),
        minimum=np.full((8, K // 32), level - 15, np.int8),
        channel_scale=np.ones(8, np.float32),
        protective_range=119,
    )
    weight.q4[1::2, ::3] = 3
    product = IntegerProduct(pack(weight, "row_major"))
    x = np.full((3, K), 127, np.int8)
    x[1], x[2, 1::2] = -127, 126
    assert len(product.pieces) == pieces
    assert np.array_equal(product.accumulators(x), reference.gemm_accumulators(x, weight.exact_level1()))


@pytest.mark.default_cases("bfloat16")
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_the_8_bit_head_is_the_kernels_bit_for_bit(dtype: str) -> None:
    """A row alone has the same bits as a row of many.

    The 260 rows are padded to 264 and cut off again.
    """
    model = quantized_model(dtype=dtype, tied_head=False)
    kernels = KernelRunner(model, 3, 80, chunk=3, backend="emulator", head="int8")
    numpy_runner = NumpyRunner(model, 3, 80, head="int8")
    normed = convert_to_dtype(np.random.default_rng(0).standard_normal((3, 64), np.float32), dtype)
    logits = numpy_runner._logits(normed)
    assert logits.dtype == np.float16 and logits.shape == (3, 260)
    assert np.array_equal(kernels._logits(normed), logits)
    assert np.array_equal(numpy_runner._logits(normed[1:2])[0], logits[1])
    expected = floats(normed) @ floats(model.head).T
    error = np.sqrt(np.square(logits - expected).mean() / np.square(expected).mean())
    assert 1e-3 < error < 0.015  # two roundings to INT8, of a row of weights and of a token


@pytest.mark.smoke
def test_chunks_and_batches_do_not_matter(model: QuantizedModel) -> None:
    """A prompt gives the same caches at once, in chunks that cut it anywhere, token by token, alone or in a batch."""

    def same(logits: Any, expected: Any) -> bool:
        return bool((np.abs(logits - expected) <= 2.0**-10 * np.abs(expected)).all())

    whole_runner = NumpyRunner(model, 3, 80)
    right = whole_runner.prefill(PROMPTS)
    chunked = NumpyRunner(model, 3, 80, chunk=5)
    assert same(chunked.prefill(PROMPTS), right)
    assert all(np.array_equal(a.pool, b.pool) for a, b in zip(chunked.caches, whole_runner.caches, strict=True))
    next_logits = whole_runner.decode([5, 6, 7])
    for b, prompt in enumerate(PROMPTS):
        single_runner = NumpyRunner(model, 1, 80)
        logits = single_runner.prefill([prompt[:1]])
        for token in prompt[1:]:
            logits = single_runner.decode([token])
        assert same(logits[0], right[b]) and same(single_runner.decode([5 + b])[0], next_logits[b])
        for ours, theirs in zip(single_runner.caches, whole_runner.caches, strict=True):
            for of_one, of_all in zip(gather(ours), gather(theirs), strict=True):
                for part in ("values", "scale", "zero"):
                    assert np.array_equal(getattr(of_one[0], part), getattr(of_all[b], part))
    assert np.array_equal(bits(whole_runner.prefill(PROMPTS)), bits(right))  # begins anew


@pytest.mark.parametrize("layout", ["strips", "qserve", "dual_mma"])
def test_weights_stay_in_a_layout_that_some_kernel_takes(layout: str) -> None:
    model = QuantizedModel.rounded(FloatModel.random(TINY_MODEL), group=32, layout=layout)
    assert KernelRunner(model, 1, 20, backend="emulator")._layers[0] is model.layers[0]


def test_operations_and_logits_are_those_of_the_launch_that_decodes_so_many_rows(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Launches have 1, 2, 4 rows, or all five."""
    runner = KernelRunner(quantized_model(), 5, 80, backend="emulator")
    assert [len(layer) for layer in runner.operations(3)] == [len(layer) for layer in runner.operations(5)]
    assert {*runner._decode_steps} == {4, 5}
    runner._decode_steps[4].normed[:] = np.arange(4)[:, None]
    assert runner.logits(3, lambda states: states)[:, 0].tolist() == [0, 1, 2]  # type: ignore[arg-type]
    monkeypatch.setattr(runner, "_launch", lambda step: None)
    runner.decode([5, 6, 7], [0, 1, 2])
    assert {*runner._decode_steps} == {4, 5}


def test_a_runner_that_the_card_has_no_room_for_is_refused() -> None:
    runner = KernelRunner(quantized_model(), 2, 80, chunk=1, backend="emulator")
    needed = Footprint.of_model(runner.model, 2, 80, chunk=1).total(runner.pages)
    runner._require_room(SimpleNamespace(memory_bytes=needed, name="a card"))  # type: ignore[arg-type]
    with pytest.raises(ArgumentError, match=r"model: must fit the 1\.50 GB of a card \(got 1\.51 GB: "):
        runner._require_room(SimpleNamespace(memory_bytes=needed - 1, name="a card"))  # type: ignore[arg-type]


def test_a_step_writes_its_numbers_where_the_last_launch_left_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """The launch itself adds 1 to lengths, positions and slots. Of one that was interrupted nothing is known."""
    runner, writes = KernelRunner(quantized_model(), 2, 80, backend="emulator"), Mock()
    monkeypatch.setattr(runner, "_write", writes)
    launch = Mock(side_effect=[None, None, None, KeyboardInterrupt, None, None, None, None])
    monkeypatch.setattr(runner, "_launch", launch)
    written = []
    for sequences in ([0, 1], [0, 1], [0, 1], [0, 1], [0, 1], [1, 0], [0], [0]):
        with suppress(KeyboardInterrupt):
            runner.decode([5, 6][: len(sequences)], sequences)
        written.append(writes.call_count)
    assert written == [1, 1, 1, 1, 2, 3, 4, 4]


@pytest.mark.full
@pytest.mark.parametrize("own_keys", OWN_KEYS)
def test_kernels_give_the_same(model: QuantizedModel, own_keys: str) -> None:
    """The emulator's steps equal the kernel's own attention in NumPy to the bit; so do prompts in chunks behind them.

    The last prompt is padded. With attention in floats the first layer's keys and values are the same.
    """
    options = {"batch": 2, "context": 70, "chunk": 6, "own_keys": own_keys}
    kernels = KernelRunner(model, **options, head="int8", backend="emulator")  # whose sums are exact, unlike float16's
    same, near = (kind(model, **options, head="int8") for kind in (KernelAttentionRunner, NumpyRunner))
    stepped, expected, approximate = ([run.decode([5, 6]), run.decode([3, 1], [1, 0])] for run in (kernels, same, near))
    assert np.array_equal(stepped, expected)
    for ours, theirs in zip(same.caches, kernels.caches, strict=True):
        assert np.array_equal(ours.pool, theirs.pool)
    for run, logits in ((kernels, stepped), (near, approximate)):
        logits += [run.extend({1: [8, 9], 0: [1, 2, 3, 4]}), run.extend({0: [5, 6, 7], 1: [1]})]
    assert np.array_equal(near.caches[0].pool, kernels.caches[0].pool) and near.caches[0].pool.any()
    difference = np.sqrt(np.square(np.subtract(approximate, stepped), dtype=np.float64).mean())
    assert 0 < difference < OF_ATTENTION * np.sqrt(np.square(stepped, dtype=np.float64).mean())
    assert np.array_equal(near.lengths, kernels.lengths) and near.lengths.tolist() == [9, 5]


class WithoutCache(NumpyRunner):
    """Forgets what it has written: whoever reads the cache gets other numbers."""

    def _append(self, i: int, k: Any, v: Any, rows: Any) -> None:
        super()._append(i, k, v, rows)
        self._keys[:], self._values[:] = 3.0, 3.0


def test_keys_of_the_own_chunk_may_be_of_16_bits(model: QuantizedModel) -> None:
    """A prompt in one chunk reads nothing of the cache, and writes into the first layer's what it always writes."""
    prompt, options = [list(range(40))], {"context": 60, "own_keys": "16-bit"}
    whole_runner, cut, cached = (
        NumpyRunner(model, **options),
        NumpyRunner(model, **options, chunk=9),
        NumpyRunner(model, context=60),
    )
    right = whole_runner.prefill(prompt)
    forgetful = WithoutCache(model, **options)
    assert np.array_equal(forgetful.prefill(prompt), right)
    of_chunks, of_cache = cut.prefill(prompt), cached.prefill(prompt)
    assert not np.array_equal(WithoutCache(model, **options, chunk=9).prefill(prompt), of_chunks)
    assert not np.array_equal(of_chunks, right) and not np.array_equal(of_cache, right)
    assert np.array_equal(whole_runner.caches[0].pool, cached.caches[0].pool)
    assert not np.array_equal(forgetful.decode([1]), whole_runner.decode([1]))  # which reads the cache
    with pytest.raises(ArgumentError, match=r"own_keys: must be one of cache, 16-bit \(got 8-bit\)"):
        NumpyRunner(model, own_keys="8-bit")
    with pytest.raises(ArgumentError, match=r"own_keys: must be cache for kv8: only kv4 has kernels for 16-bit ones"):
        NumpyRunner(model, cache="kv8", own_keys="16-bit")
    with pytest.raises(ArgumentError, match=r"own_keys: .* where it is batch_invariant: else results depend"):
        NumpyRunner(model, batch_invariant=True, own_keys="16-bit")


@pytest.mark.default_cases("numpy")
@pytest.mark.parametrize("backend", ["numpy", "emulator"])
def test_each_layer_has_its_own_window(backend: str) -> None:
    """Keys of the second layer follow from the first layer's window alone, logits from both."""
    caches, logits = {}, {}
    for name, windows in {"all": None, "first": (0,), "second": (1,), "none": ()}.items():
        window_options = {"window": 3, "window_layers": windows} if windows != () else {}
        model, options = quantized_model(**window_options), {"batch": 1, "context": 16}
        runner = (
            NumpyRunner(model, **options) if backend == "numpy" else KernelRunner(model, **options, backend=backend)
        )
        logits[name] = runner.prefill([[1, 2, 3, 4, 5, 6, 7]]).copy()
        caches[name] = runner.caches[1].pool.copy()
    for name, same in {"first": "all", "second": "none"}.items():
        assert np.array_equal(caches[name], caches[same]) and not np.array_equal(logits[name], logits[same])
    assert not np.array_equal(caches["all"], caches["none"])


def test_tokens_are_the_likeliest(model: QuantizedModel) -> None:
    runner = NumpyRunner(model, 2, 20)
    tokens = np.array(list(generate(runner, PROMPTS[:2], 4)))
    assert tokens.shape == (4, 2) and tokens.dtype == np.int32
    so_far = [list(prompt) for prompt in PROMPTS[:2]]
    for step in tokens:
        logits = NumpyRunner(model, 2, 20).prefill(so_far)
        assert np.array_equal(step, logits.argmax(axis=1))
        for text, token in zip(so_far, step.tolist(), strict=True):
            text.append(token)


def test_draws_follow_the_softmax_and_the_seed(model: QuantizedModel) -> None:
    runner = NumpyRunner(model, 2, 20)

    def draw(seed: int, temperature: float = 20.0) -> list[list[int]]:
        return [step.tolist() for step in generate(runner, PROMPTS[:2], 5, temperature=temperature, seed=seed)]

    assert draw(1) == draw(1) != draw(2)
    greedy = [step.tolist() for step in generate(runner, PROMPTS[:2], 5)]
    assert draw(1, 1e-3) == greedy != draw(1)
    assert any(a != b for a, b in draw(1)[:1])  # sequences draw apart from each other


def test_a_prompt_goes_on_from_what_the_runner_holds(model: QuantizedModel) -> None:
    """Compute in chunks, each sequence from where it is: the same caches, and the same tokens, as computed anew."""
    whole_runner, runner = NumpyRunner(model, 2, 100), NumpyRunner(model, 2, 100, chunk=5)
    first = np.array(list(generate(runner, PROMPTS[1:], 3)))
    prompts = [[*prompt, *first[:, b].tolist(), *range(9 + b)] for b, prompt in enumerate(PROMPTS[1:])]
    lengths, calls = runner.lengths.copy(), list[None]()
    steps = generate(runner, prompts, 4, goes_on=True, progress=lambda: calls.append(None))
    right = np.array(list(generate(whole_runner, prompts, 4)))
    assert np.array_equal(np.array(list(steps)), right) and np.array_equal(runner.lengths, whole_runner.lengths)
    assert lengths.tolist() == [5, 72] and len(calls) == 2 + 3
    for ours, theirs in zip(runner.caches, whole_runner.caches, strict=True):
        for of_one, of_all in zip(gather(ours), gather(theirs), strict=True):
            assert all(np.array_equal(a.values, b.values) for a, b in zip(of_one, of_all, strict=True))
    with pytest.raises(
        ArgumentError, match=r"^prompts\[0\]: must go on behind the 18 tokens of its sequence \(got 2\)$"
    ):
        next(generate(runner, [[1, 2], [3]], 1, goes_on=True))
    with pytest.raises(ArgumentError, match=r"^prompts: must be 2, one for each sequence \(got 1\)$"):
        next(generate(runner, [[1, 2]], 1, goes_on=True))


def test_a_penalty_follows_what_was_generated(model: QuantizedModel) -> None:
    """Prompts count, and every token since; without draws the largest score is taken."""
    runner, prompts = NumpyRunner(model, 2, 60), [list(prompt) for prompt in PROMPTS[:2]]
    tokens = np.array(list(generate(runner, PROMPTS[:2], 12, repetition_penalty=4.0)))
    for step in tokens:
        logits = NumpyRunner(model, 2, 60).prefill(prompts).astype(np.float32)
        for b, prompt in enumerate(prompts):
            row = logits[b]
            row[prompt] = [score / 4 if score > 0 else score * 4 for score in row[prompt]]
            assert step[b] == row.argmax()
            prompt.append(int(step[b]))
    assert not np.array_equal(tokens, np.array(list(generate(runner, PROMPTS[:2], 12))))


def test_draws_come_from_the_tokens_that_are_left(model: QuantizedModel) -> None:
    runner, drawn = NumpyRunner(model, 1, 20), set[int]()
    logits = runner.prefill([PROMPTS[0]])[0]
    for seed in range(60):
        drawn |= {int(next(generate(runner, [PROMPTS[0]], 1, temperature=1e3, top_k=3, seed=seed))[0])}
    assert drawn == set(np.argsort(-logits)[:3].tolist())


def test_draws_have_the_probabilities_of_the_softmax() -> None:
    """Draw from a flat distribution, in which noise of the other sign misses by 0.1."""
    rng, logits = np.random.default_rng(0), np.linspace(0, 1, 8).astype(np.float16)
    repeated_logits = np.tile(logits, (50_000, 1))
    tokens = choose(repeated_logits, Sampling(temperature=0.5), lambda shape: rng.gumbel(size=shape).astype(np.float32))
    expected = np.exp(2 * logits.astype(float)) / np.exp(2 * logits.astype(float)).sum()
    assert np.abs(np.bincount(tokens, minlength=8) / len(repeated_logits) - expected).max() < 0.005


def test_steps_are_made_as_they_are_asked_for(model: QuantizedModel) -> None:
    runner = NumpyRunner(model, 1, 50)
    steps = generate(runner, [PROMPTS[1]], 40)
    next(steps)
    assert runner.lengths.tolist() == [3]
    next(steps)
    assert runner.lengths.tolist() == [4]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_token_without_finite_logits_is_an_error(temperature: float) -> None:
    """The error takes the token's place; no token is made up."""
    model = QuantizedModel.rounded(FloatModel.random(replace(TINY_MODEL, tied_head=False)), group=32)
    runner = NumpyRunner(model, 2, 20)
    runner._embedding[7] = np.inf
    steps = generate(runner, [[1, 2], [1, 7]], 3, temperature=temperature)
    message = r"^runner: must give finite logits \(got NaN or infinity for token 0 behind prompts\[1\]\)$"
    with pytest.raises(ArgumentError, match=message):
        next(steps)


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ({"prompts": [[]]}, r"prompts\[0\]: must have 1 to 20 tokens \(got 0\)"),
        ({"prompts": [[1] * 16]}, r"tokens: prompt and tokens must fit the context of 20 \(got 16 \+ 5\)"),
        ({"prompts": [[1], [2]]}, r"prompts: must be 1, one for each sequence \(got 2\)"),
        ({"prompts": [[260]]}, r"prompts\[0\]: must be tokens in 0..259 \(got 260\)"),
        ({"prompts": [[3, -1]]}, r"prompts\[0\]: must be tokens in 0..259 \(got -1\)"),
        ({"prompts": [[0.5]]}, r"prompts\[0\]: must be integers \[n\] \(got float64 \[1\]\)"),
        ({"tokens": 0}, r"tokens: must be an integer, 1 or more \(got 0\)"),
        ({"temperature": True}, r"temperature: must be 0, or a number in 1e-06..1e\+06 \(got True\)"),
        ({"temperature": -0.1}, r"temperature: must be 0, or a number in 1e-06..1e\+06 \(got -0.1\)"),
        ({"temperature": float("nan")}, r"temperature: must be 0, or a number in 1e-06..1e\+06 \(got nan\)"),
        ({"temperature": 1e-39}, r"temperature: must be 0, or a number in 1e-06..1e\+06 \(got 1e-39\)"),
        ({"top_p": 2}, r"top_p: must be a number in 0..1 \(got 2\)"),
        ({"seed": -1}, r"seed: must be an integer in 0..2\^32-1 \(got -1\)"),
    ],
)
def test_bad_input_of_generate(model: QuantizedModel, how: dict[str, Any], message: str) -> None:
    arguments = {"prompts": [[1, 2]], "tokens": 5, **how}
    with pytest.raises(ArgumentError, match=f"^{message}$"):
        list(generate(NumpyRunner(model, 1, 20), **arguments))


def test_bad_input_of_a_runner(model: QuantizedModel) -> None:
    with pytest.raises(ArgumentError, match=r"^context: must be at most the model's 200 tokens \(got 201\)$"):
        NumpyRunner(model, 1, 201)
    for batch in (0, "2"):
        with pytest.raises(ArgumentError, match=rf"^batch: must be an integer, 1 or more \(got {batch!r}\)$"):
            NumpyRunner(model, batch)  # type: ignore[arg-type]
    with pytest.raises(ArgumentError, match=r"^model: must be a QuantizedModel \(got FloatModel\)$"):
        NumpyRunner(FloatModel.random(TINY_MODEL))  # type: ignore[arg-type]
    with pytest.raises(ArgumentError, match=r"^backend: must be one of gpu, emulator \(got numpy\)$"):
        KernelRunner(model, 1, 20, backend="numpy")
    for flag in ("programmatic", "batch_invariant"):
        with pytest.raises(ArgumentError, match=rf"^{flag}: must be True or False \(got 1\)$"):
            KernelRunner(model, 1, 20, backend="emulator", **{flag: 1})  # type: ignore[arg-type]
    runner = NumpyRunner(model, 1, 2)
    runner.prefill([[1]])
    with pytest.raises(ArgumentError, match=r"^tokens: must be integers \[1\] \(got int64 \[2\]\)$"):
        runner.decode([3, 4])
    with pytest.raises(ArgumentError, match=r"^tokens: must be tokens in 0..259 \(got 260\)$"):
        runner.decode([260])
    assert runner.lengths.tolist() == [1]
    runner.decode([3])
    with pytest.raises(ArgumentError, match=r"^decode: no more than the context of 2 tokens"):
        runner.decode([3])


@pytest.mark.skipif(gpu.available(), reason="there is a GPU")
def test_without_a_gpu_the_kernels_runner_says_so(model: QuantizedModel) -> None:
    with pytest.raises(UnavailableError):
        KernelRunner(model, 1, 20)
