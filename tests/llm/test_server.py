"""Requests that come and go: each gets the tokens that it gets alone, and every page comes back."""

from dataclasses import replace
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ptxlab.errors import ArgumentError
from ptxlab.llm import server
from ptxlab.llm.accuracy.parting import parting
from ptxlab.llm.model import FloatModel, KernelRunner, NumpyRunner, QuantizedModel
from ptxlab.llm.model.sampling import Sampling
from ptxlab.llm.server import Request, Server, _draw_tokens
from tests.support.layers import TINY_MODEL
from tests.support.serving import Served, random_requests, soak

MODEL = QuantizedModel.rounded(FloatModel.random(replace(TINY_MODEL, tied_head=False)), group=32)
TOKENS = 8  # the third prompt begins a second page with them
REQUESTS: list[dict[str, Any]] = [
    {"prompt": [1, 2, 3, 4, 5, 6, 7], "tokens": TOKENS},
    {"prompt": [8], "tokens": TOKENS, "temperature": 30.0, "seed": 1},
    {"prompt": list(range(60)), "tokens": TOKENS},
    {"prompt": list(range(70, 140)), "tokens": TOKENS, "temperature": 30.0, "seed": 2},
    {"prompt": [5, 5], "tokens": TOKENS, "repetition_penalty": 3.0},
    {"prompt": [6], "tokens": TOKENS, "temperature": 30.0, "top_k": 9, "top_p": 0.8, "min_p": 0.1, "seed": 3},
    {"prompt": [*range(70, 134), 9], "tokens": TOKENS},  # the first page of the fourth prompt
]
ALONE = {head: NumpyRunner(MODEL, 1, 128, chunk=32, batch_invariant=True, head=head) for head in ("float16", "int8")}
KNOWN: dict[str, dict[str, list[int]]] = {head: {} for head in ALONE}


def small_server(batch: int, head: str = "float16", *, share_prefixes: bool = True, **how: Any) -> Served:
    runner = NumpyRunner(MODEL, batch, 128, batch_invariant=True, head=head, **how)
    return Served(Server(runner, share_prefixes=share_prefixes), ALONE[head], _tokens_by_request=KNOWN[head])


@pytest.mark.full
@settings(max_examples=15)
@given(
    st.lists(st.one_of(st.integers(0, 6), st.sampled_from(["step", "cancel"])), min_size=2, max_size=12),
    st.integers(1, 4),
    st.integers(2, 5),
    st.sampled_from([1, 20, 64]),
    st.sampled_from([*ALONE]),
)
def test_any_schedule_gives_the_tokens_of_each_alone(
    schedule: list[Any], batch: int, pages: int, chunk: int, head: str
) -> None:
    these = small_server(batch, head, pages=pages, chunk=chunk)
    for action in schedule:
        if action == "step":
            these.step()
        elif action != "cancel":
            these.submit(**REQUESTS[action])
        elif these.requests:
            these.cancel(these.requests[len(schedule) % len(these.requests)][1])
    these.finish()


@pytest.mark.full
def test_a_soak_of_random_requests() -> None:
    """This is the small soak; `test_server_on_gpu` has 2,000 requests."""
    these = small_server(4, pages=4, chunk=40)
    for _ in soak(these, random_requests(20, TINY_MODEL.vocabulary, 100), cancels=0.2):
        pass
    these.finish()
    assert these.preempted and these.cancelled
    assert {request.sampling.temperature for _, request in these.requests} == {0.0, 20.0}
    assert any(len(request.tokens) < request.most for _, request in these.requests)


NOISE = 0.25


class Noisy(NumpyRunner):
    """Logits that depend on how many sequences decode together, as a GPU's may: by up to NOISE."""

    def decode(self, tokens: Any, at: Any = None) -> Any:
        logits = super().decode(tokens, at)
        rng = np.random.default_rng(len(logits))
        return logits + rng.uniform(-NOISE, NOISE, logits.shape[1]).astype(np.float16) if len(logits) > 1 else logits


@pytest.mark.smoke
def test_where_requests_part_is_reported_with_a_margin_within_the_noise() -> None:
    runner = Noisy(MODEL, 3, 128, batch_invariant=True)
    these = Served(Server(runner), ALONE["float16"], may_part=True)
    for prompt in range(12):
        these.submit(prompt=[prompt, 2 * prompt], tokens=16)
    these.finish()
    likeliest, drawn = these.parted
    assert f"12 requests: 0 preempted; 0 cancelled; {len(likeliest)} likeliest parted, first at [" in these.summary()
    assert likeliest and not drawn and these.summary().endswith("0 drawn parted")
    for tie in likeliest:
        assert 0 <= tie.position < 16 and tie.token != tie.alone and 0 <= tie.margin <= 2 * NOISE + 0.02
    quiet = small_server(3)
    quiet.may_part = True
    request = quiet.submit(**REQUESTS[0])
    quiet.finish()
    assert quiet.parted == ([], []) and len(request.tokens) == TOKENS


@pytest.mark.parametrize("temperature", [0.0, 30.0])
@pytest.mark.parametrize("position", [0, 5])
def test_the_first_other_token_is_found(temperature: float, position: int) -> None:
    """A request is changed at one token: no token before it differs, and no later one counts."""
    options: dict[str, Any] = {"prompt": [1, 2, 3, 4], "tokens": 8, "temperature": temperature, "seed": 3}
    right = small_server(1).tokens_alone(options)
    runner = ALONE["float16"]
    logits = runner.prefill([[1, 2, 3, 4, *right[:position]]])[0].astype(float)
    wrong = (right[position] + 7) % 260
    sampling = Sampling(temperature=temperature, seed=3)
    request = Request([1, 2, 3, 4], 8, sampling=sampling, tokens=[*right[:position], wrong, 5, 6])
    tie = parting(runner, request)
    assert tie is not None and (tie.position, tie.token, tie.alone) == (position, wrong, right[position])
    assert tie.spread == pytest.approx(logits.std())
    if temperature:
        shares = np.exp((logits - logits.max()) / temperature)
        below = np.concatenate([[0], shares.cumsum() / shares.sum()])
        drawn = np.random.default_rng((3, position)).random()
        assert below[right[position]] <= drawn < below[right[position] + 1]
        assert tie.margin == pytest.approx(max(below[wrong] - drawn, drawn - below[wrong + 1]))
    else:
        assert tie.margin == logits.max() - logits[wrong] > 0
    assert parting(runner, Request([1, 2, 3, 4], 8, sampling=sampling, tokens=right)) is None
    assert parting(runner, Request([1], 8)) is None


def test_the_margin_of_a_penalised_token_is_that_of_its_score() -> None:
    options: dict[str, Any] = {"prompt": [1, 2, 3, 4], "tokens": 4, "repetition_penalty": 3.0}
    right = small_server(1).tokens_alone(options)
    (wrong,) = {1, 2} - {right[0]} if right[0] in (1, 2) else {1}
    request = Request([1, 2, 3, 4], 4, sampling=Sampling(repetition_penalty=3.0), tokens=[wrong])
    logits = ALONE["float16"].prefill([[1, 2, 3, 4]])[0].astype(float)
    score = logits[wrong] / 3 if logits[wrong] > 0 else logits[wrong] * 3
    best = logits[right[0]] if right[0] > 4 or right[0] == 0 else logits[right[0]] / 3
    tie = parting(ALONE["float16"], request)
    assert tie is not None and tie.alone == right[0] and tie.margin == pytest.approx(best - score)


@pytest.mark.parametrize(
    ("runner", "request_", "message"),
    [
        (NumpyRunner(MODEL, 2, 20), Request([1], 2), r"runner: must be a Runner of 1 sequence \(got 2 sequences\)"),
        ("gpu", Request([1], 2), r"runner: must be a Runner of 1 sequence \(got str\)"),
        (ALONE["int8"], [1, 2], r"request: must be a Request \(got list\)"),
    ],
)
def test_bad_input_of_parting(runner: Any, request_: Any, message: str) -> None:
    with pytest.raises(ArgumentError, match=f"^{message}$"):
        parting(runner, request_)


def test_out_of_pages_the_youngest_waits_and_none_is_lost() -> None:
    these = small_server(3, pages=3, chunk=64)
    first, second, young = (these.submit(**REQUESTS[i]) for i in (2, 0, 1))
    these.finish()
    assert these.preempted == {young} and first.tokens and second.tokens


@pytest.mark.parametrize("fails", [False, True])
def test_requests_keep_their_order(fails: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """The oldest run, the others wait, whoever has to give pages back, and after a step that fails."""
    these = Server(NumpyRunner(MODEL, 3, 128, pages=3, chunk=200), share_prefixes=False)
    requests = [these.submit([i] * 60, tokens=TOKENS) for i in range(5)]
    for _ in range(3):
        these.step()
    assert these.waiting == requests[3:]
    if fails:
        with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
            patch.setattr(these.runner, "_logits", Mock(side_effect=KeyboardInterrupt))
            these.step()
        assert these.waiting == requests
    waited: list[Request] = []
    while these.waiting or these.running:
        assert [*these.running.values(), *these.waiting] == [request for request in requests if not request.done]
        waited += [request for request in these.waiting if request.tokens]
        these.step()
    assert {id(request) for request in waited} >= {id(request) for request in requests[1:3]}


def test_prompts_go_in_between_steps() -> None:
    """A prompt of 70 tokens goes in chunks of 20.

    The sequence before it makes a token in each of the steps.
    """
    these = small_server(2, chunk=20)
    first = these.submit(**REQUESTS[0])
    these.step()
    second = these.submit(**REQUESTS[3])
    counts = []
    while not second.tokens:
        these.step()
        counts.append(len(first.tokens))
    assert counts == [2, 3, 4, 5]


@pytest.mark.default_cases("False")
@pytest.mark.parametrize("share_prefixes", [True, False])
def test_a_page_of_an_equal_prefix_is_computed_once(share_prefixes: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """The request that computed the page may run still or have ended; behind another beginning the page does not count.

    A prompt that is wholly in the cache computes its last token.
    """
    these = small_server(3, pages=9, chunk=128, share_prefixes=share_prefixes)
    extend, computed = these.server.runner.extend, list[int]()
    monkeypatch.setattr(
        these.server.runner, "extend", lambda new: computed.extend(map(len, new.values())) or extend(new)
    )
    prompts = [[*range(70, 140)], [*range(70, 134), 9], [*range(70, 134)], [1, *range(71, 140)]]
    for prompt in prompts[:2]:
        these.submit(prompt=prompt, tokens=TOKENS)
        these.step()
    these.finish()
    for prompt in [*prompts[2:], prompts[0]]:
        these.submit(prompt=prompt, tokens=TOKENS)
        these.finish()
    assert computed == ([70, 1, 64, 70, 6] if share_prefixes else [70, 65, 64, 70, 70])


def test_a_whole_prompt_of_shared_pages_computes_its_last_page() -> None:
    these = small_server(1, pages=4, chunk=128)
    for _ in range(2):
        these.submit(prompt=[*range(64)], tokens=2)
        these.finish()
    these.server.runner.share(0, [*range(65)])
    assert these.server.runner.lengths.tolist() == [64]


def test_preempted_requests_take_up_what_they_had_left() -> None:
    """Pages of generated tokens are shared too, without batch invariance."""
    runner = NumpyRunner(MODEL, 1, 128, chunk=128)
    server = Server(runner)
    request = server.submit([*range(60)], tokens=10)
    server.run()
    runner.share(0, [*range(60), *request.tokens])
    assert runner.lengths.tolist() == [64]
    runner.release(0)


def test_a_chunk_takes_several_prompts() -> None:
    these = small_server(4, chunk=32)
    requests = [these.submit(prompt=[i, 5, 6, i], tokens=2) for i in range(4)]
    these.step()
    assert [len(request.tokens) for request in requests] == [1, 1, 1, 1]


def test_the_first_token_of_the_vocabulary_is_a_token(monkeypatch: pytest.MonkeyPatch) -> None:
    these = small_server(1, chunk=32)
    request = these.server.submit([5, 6], tokens=2)
    monkeypatch.setattr(these.server.runner, "_logits", lambda states: np.eye(len(states), 9, dtype=np.float16))
    these.server.run()
    assert request.tokens == [0, 0] and request.done and request.error is None


@pytest.mark.parametrize("wrong", [np.nan, np.inf])
def test_logits_that_are_not_finite_end_that_request_alone(wrong: float, monkeypatch: pytest.MonkeyPatch) -> None:
    these = small_server(2, chunk=32)
    runner = these.server.runner
    decode = runner.decode

    def broken(tokens: Any, at: Any) -> Any:
        logits = decode(tokens, at)
        logits[at.index(0), 5] = wrong
        return logits

    first, second = (these.submit(**REQUESTS[i]) for i in (0, 3))
    these.step()
    these.step()
    count = len(first.tokens)
    monkeypatch.setattr(runner, "decode", broken)
    these.step()
    monkeypatch.undo()
    assert first.done and first.error == f"logits are not finite at token {count}"
    assert first.tokens == these.tokens_alone(REQUESTS[0])[:count]
    these.requests.pop(0)
    these.finish()
    assert second.error is None


def test_a_prompt_whose_logits_are_not_finite_ends_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    these = small_server(2, chunk=32)
    runner, extend = these.server.runner, these.server.runner.extend

    def broken(new: Any) -> Any:
        logits = extend(new)
        logits[[*new].index(1)] = np.nan
        return logits

    first, second = these.submit(**REQUESTS[0]), these.submit(prompt=[9, 8], tokens=4)
    monkeypatch.setattr(runner, "extend", broken)
    these.step()
    monkeypatch.undo()
    assert second.done and second.error == "logits are not finite at token 0" and not second.tokens
    these.requests.pop()
    these.finish()
    assert len(first.tokens) == TOKENS


@pytest.mark.parametrize("head", [*ALONE])
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_a_state_that_is_not_finite_ends_its_request_alone(head: str, dtype: str) -> None:
    """The state belongs to a prompt's own chunk, an earlier one, or a generated token.

    The request's pages are used again.
    """
    config = replace(TINY_MODEL, layers=1, tied_head=False)
    model = QuantizedModel.rounded(FloatModel.random(config), group=32, dtype=dtype)
    options: dict[str, Any] = {"batch_invariant": True, "head": head, "chunk": 8}
    runner = NumpyRunner(model, 3, 128, pages=4, **options)
    these = Served(Server(runner), NumpyRunner(model, 1, 128, **options))
    first_tokens, second_tokens = (these.tokens_alone({"prompt": prompt, "tokens": 6}) for prompt in ([5, 6], [9, 9]))
    unsound = next(token for token in first_tokens if token > 30 and token not in second_tokens)
    runner._embedding = runner._embedding.copy()
    runner._embedding[[unsound, 7]] = [[np.inf], [3e38]]  # the square of the other is not finite in float32
    prompts = [[1, 2, 7], [1, 7, *range(20, 30)], [7], [5, 6]]
    broken_requests = [these.server.submit(prompt, tokens=6) for prompt in prompts]
    good_requests = [these.submit(prompt=[9, 9], tokens=6) for _ in range(3)]
    these.finish()
    counts = [0, 0, 0, first_tokens.index(unsound) + 1]
    assert [request.error for request in broken_requests] == [
        f"logits are not finite at token {count}" for count in counts
    ]
    assert all(len(request.tokens) == 6 for request in good_requests)


def test_a_stream_gives_tokens_as_they_come() -> None:
    these = small_server(2, chunk=32)
    first, second_request = (these.submit(**REQUESTS[i]) for i in (0, 1))
    stream = these.server.stream(first)
    assert next(stream) == first.tokens[0] and len(first.tokens) == 1
    assert [first.tokens[0], *stream] == these.tokens_alone(REQUESTS[0]) and second_request.tokens
    these.finish()


def test_a_stream_of_another_server_is_refused() -> None:
    these, foreign_request = small_server(1), small_server(1).submit(**REQUESTS[0])
    with pytest.raises(ArgumentError, match=r"^request: must be one of this server's \(got prompt of 7 tokens\)$"):
        next(these.server.stream(foreign_request))


@pytest.mark.full
@pytest.mark.parametrize("error", [KeyboardInterrupt, MemoryError])
@pytest.mark.parametrize("place", ["layer", "head", "choice"])
def test_requests_survive_a_step_that_fails(place: str, error: type, monkeypatch: pytest.MonkeyPatch) -> None:
    """The step fails in its middle, at any time: with prompts in chunks, with steps, with both."""
    for offset in range(0, 8, 2):
        these = small_server(2, pages=3, chunk=20)
        for i in (2, 0, 1):
            these.submit(**REQUESTS[i])
        for _ in range(offset):
            these.step()
        target, name = {
            "layer": (these.server.runner, "_append"),
            "head": (these.server.runner, "_logits"),
            "choice": (server, "choose_tokens"),
        }[place]
        monkeypatch.setattr(target, name, Mock(side_effect=error))
        with pytest.raises(error):
            for _ in range(8):  # no token is chosen while a prompt is not through
                these.step()
        monkeypatch.undo()
        these.finish()


def test_tokens_of_a_call_that_fails_do_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    right, broken = (NumpyRunner(MODEL, 1, 20, chunk=4) for _ in range(2))
    calls = [lambda one: one.prefill([[1, 2, 3]]), lambda one: one.extend({0: [4, 5]}), lambda one: one.decode([6])]
    for call in calls:
        lengths = broken.lengths.copy()
        with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
            patch.setattr(broken, "_logits", Mock(side_effect=KeyboardInterrupt))
            call(broken)
        assert broken.lengths.tolist() == lengths.tolist()
        assert np.array_equal(call(broken), call(right))


def test_what_was_not_finite_in_a_call_that_fails_does_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    runner = NumpyRunner(MODEL, 1, 20)
    right = runner.prefill([[1, 2]])
    runner._embedding = runner._embedding.copy()
    runner._embedding[7] = np.inf
    runner.prefill([[1]])
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(runner, "_logits", Mock(side_effect=KeyboardInterrupt))
        runner.extend({0: [7]})
    assert np.array_equal(runner.extend({0: [2]}), right)


def test_numbers_that_a_failed_step_leaves_on_the_device_are_set_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    """The failed step runs without its layers.

    The next step of both sequences would begin at the numbers that it had.
    """
    runner = KernelRunner(MODEL, 2, 20, chunk=2, backend="emulator", batch_invariant=True)
    monkeypatch.setattr(runner, "_forward_calls", lambda step: [lambda: runner._begin(step)])
    runner.prefill([[1], [2]])
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(runner, "_begin", Mock(side_effect=KeyboardInterrupt))
        runner.decode([3, 4])
    for b in range(2):
        runner.decode([3 + b], [b])
    runner.decode([5, 6])
    assert runner._decode_step(2).positions.tolist() == [2, 2]


def test_a_request_ends_at_its_last_token() -> None:
    right = small_server(1).tokens_alone(REQUESTS[1])
    end = next(token for i, token in enumerate(right) if i and token not in right[:i])
    these = small_server(1)
    request = these.submit(**REQUESTS[1], ends={end})
    these.server.run()
    assert request.tokens == right[: right.index(end) + 1]


def test_a_cancelled_request_gives_its_pages_back() -> None:
    these = small_server(1, pages=2)
    running, waiting = (these.submit(**REQUESTS[i]) for i in (0, 3))
    these.step()
    these.cancel(waiting)
    these.cancel(running)
    assert running.done and waiting.done and len(these.server.runner.page_pool.free) == 2
    assert these.server.step() == []
    these.finish()


def test_pages_of_a_prompt_that_was_cancelled_halfway_are_not_shared() -> None:
    """Nobody knows yet whether its logits are finite."""
    these = small_server(1, pages=2, chunk=64)
    prompt = [*range(100)]
    running = these.submit(prompt=prompt, tokens=2)
    these.step()
    assert these.server.runner.lengths.tolist() == [64] and not running.tokens
    these.cancel(running)
    these.server.runner.share(0, prompt)
    assert these.server.runner.lengths.tolist() == [0]


def test_draws_have_the_probabilities_of_the_softmax() -> None:
    logits, uniform = np.array([[2.0, 0.0, -np.inf, 1.0]], np.float16), np.linspace(0, 1, 20_000, endpoint=False)
    tokens = _draw_tokens(2 * logits.repeat(20_000, 0).astype(float), uniform[:, None])
    right = np.exp(2 * logits[0].astype(float)) / np.exp(2 * logits[0].astype(float)).sum()
    assert np.abs(np.bincount(tokens, minlength=4) / 20_000 - right).max() < 1e-4


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ({"prompt": [1] * 121}, r"tokens: prompt and tokens must fit the 128 tokens of a sequence \(got 121 \+ 8\)"),
        ({"prompt": []}, r"prompt: must have 1 token or more \(got 0\)"),
        ({"ends": 7}, r"ends: must be a collection of tokens \(got 7\)"),
        ({"tokens": 0}, r"tokens: must be an integer, 1 or more \(got 0\)"),
        ({"prompt": [260]}, r"prompt: must be tokens in 0..259 \(got 260\)"),
        ({"prompt": [[1], [2, 3]]}, r"prompt: must be integers \[n\] \(got object \[2\]\)"),
        ({"temperature": -1.0}, r"temperature: must be 0, or a number in 1e-06..1e\+06 \(got -1.0\)"),
        ({"top_k": -1}, r"top_k: must be an integer, 0 or more \(got -1\)"),
        ({"min_p": 2.0}, r"min_p: must be a number in 0..1 \(got 2.0\)"),
        ({"temperature": 1e-310}, r"temperature: must be 0, or a number in 1e-06..1e\+06 \(got 1e-310\)"),
        ({"temperature": 10**400}, r"temperature: must be 0, or a number in 1e-06..1e\+06 \(got 10+ \.\.\.\)"),
        ({"seed": 2**32}, r"seed: must be an integer in 0..2\^32-1 \(got 4294967296\)"),
    ],
)
def test_bad_requests(how: dict[str, Any], message: str) -> None:
    server = Server(NumpyRunner(MODEL, 1, 128))
    with pytest.raises(ArgumentError, match=f"^{message}$"):
        server.submit(**{"prompt": [1], "tokens": 8, **how})
    assert not server.waiting


def test_a_prompt_longer_than_the_pages_is_refused() -> None:
    with pytest.raises(ArgumentError, match=r"must fit the 64 tokens of a sequence \(got 60 \+ 8\)"):
        small_server(1, pages=1).submit(**REQUESTS[2])


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda r: r.prefill([[1] * 60, [2] * 70]), r"prefill: no more than the 2 pages .* 2 are free \(got 3 more\)"),
        (lambda r: r.extend({0: [1] * 62, 1: [2] * 66}), r"extend: no more than the 2 pages .*"),
        (lambda r: r.extend({0: [1] * 129}), r"tokens: must be 1 to 128, at least one of each sequence \(got 129\)"),
        (lambda r: r.extend({0: [1], 1: []}), r"tokens: must be 1 to 128, at least one of each sequence \(got 1\)"),
        (lambda r: r.extend({2: [1]}), r"sequences: must be sequences in 0..1, each once \(got \[2\]\)"),
        (lambda r: r.decode([1, 2], [0, 0]), r"sequences: must be sequences in 0..1, each once \(got \[0, 0\]\)"),
        (lambda r: r.decode([1], []), r"sequences: must be sequences in 0..1, each once \(got \[\]\)"),
    ],
)
def test_what_a_runner_refuses_leaves_it_as_it_was(call: Any, message: str) -> None:
    runner = NumpyRunner(MODEL, 2, 128, chunk=128, pages=2)
    with pytest.raises(ArgumentError, match=f"^{message}$"):
        call(runner)
    assert not runner.lengths.any() and not runner.page_counts.any() and len(runner.page_pool.free) == 2


def test_bad_input_of_pages_and_heads() -> None:
    for name in ("context", "pages", "chunk"):
        with pytest.raises(ArgumentError, match=rf"^{name}: must be of fewer than 2\^31 tokens in all \(got \d+\)$"):
            NumpyRunner(MODEL, **{"context": 20, name: 1 << 40})
    with pytest.raises(ArgumentError, match=r"^head: must be one of float16, int8 \(got int4\)$"):
        NumpyRunner(MODEL, 1, 20, head="int4")
    with pytest.raises(ArgumentError, match=r"^pages: must be an integer, 1 or more \(got 0\)$"):
        NumpyRunner(MODEL, 1, 20, pages=0)
    with pytest.raises(ArgumentError, match=r"^runner: must be a Runner \(got str\)$"):
        Server("runner")  # type: ignore[arg-type]
    with pytest.raises(ArgumentError, match=r"^share_prefixes: must be True or False \(got 1\)$"):
        Server(NumpyRunner(MODEL, 1, 20), share_prefixes=1)  # type: ignore[arg-type]


@pytest.mark.full
def test_the_kernels_serve_the_tokens_of_each_alone() -> None:
    """The emulator runs one layer: a sequence and its page are taken over, a row joins and a row leaves."""
    model = QuantizedModel.rounded(FloatModel.random(replace(TINY_MODEL, layers=1)), group=32)
    options: dict[str, Any] = {"chunk": 4, "backend": "emulator", "batch_invariant": True}
    these = Served(Server(KernelRunner(model, 2, 20, **options)), KernelRunner(model, 1, 20, **options))
    gone = these.submit(prompt=[7, 7, 7, 7, 7, 7, 7], tokens=2)
    these.step()
    these.cancel(gone)
    these.submit(prompt=[3, 1, 4], tokens=2)
    these.submit(prompt=[5], tokens=3, temperature=30.0)
    these.finish()
