"""`generate`: tokens from a runner, greedy or sampled, one of every sequence at a time."""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from ptxlab import gpu
from ptxlab.errors import ArgumentError
from ptxlab.llm.model.runner import Indices, Runner
from ptxlab.llm.model.sampling import Sampling, adjust, tokens_mask
from ptxlab.validate import require_integer


def generate(
    runner: Runner,
    prompts: Sequence[Sequence[int]],
    tokens: int,
    *,
    goes_on: bool = False,
    progress: Callable[[], None] = lambda: None,
    **sampling: Any,
) -> Iterator[Indices]:
    """Generate up to `tokens` tokens after each prompt; yield s32 [B], one token per sequence, as each step ends.

    On a GPU the host reads a token while the next step runs already, and nothing else waits.

    Args:
        runner: of as many sequences as there are prompts.
        prompts: tokens of each; with what is generated they must fit the runner's context.
        tokens: how many, 1 or more.
        goes_on: whether the runner's sequences hold the beginning of their prompts, `runner.lengths` tokens of each;
            only the rest is computed.
        progress: called after each chunk of the prompts.
        sampling: how tokens are chosen, the attributes of `Sampling`: `temperature`, `seed`, `top_k`, `top_p`, `min_p`,
            `repetition_penalty`. By default the likeliest is taken. The two kinds of runner draw differently.

    Raises ArgumentError for what `Runner.prefill` refuses, or a number out of range; and instead of a step's tokens
    where logits of one are not finite (a `Server` goes on with the others).
    """
    require_integer("tokens", tokens, 1)
    rules = Sampling(**sampling)
    longest_prompt = max((len(prompt) for prompt in prompts), default=0)
    if longest_prompt + tokens > runner.context:
        rule = f"prompt and tokens must fit the context of {runner.context}"
        raise ArgumentError("tokens", rule, f"{longest_prompt} + {tokens}")
    return _generate_steps(runner, prompts, tokens, rules, _extend if goes_on else _begin, progress)


def _begin(runner: Runner, prompts: Sequence[Sequence[int]], progress: Callable[[], None]) -> Any:
    """Start the sequences anew with these prompts, and return the logits after them."""
    return runner.prefill(prompts, progress)


def _extend(runner: Runner, prompts: Sequence[Sequence[int]], progress: Callable[[], None]) -> Any:
    """Append the tokens of the prompts that the sequences lack, one sequence after the other, in chunks.

    Return the logits after them.
    """
    if len(prompts) != runner.batch:
        raise ArgumentError("prompts", f"must be {runner.batch}, one for each sequence", len(prompts))
    logits_behind = []
    for b, prompt in enumerate(prompts):
        length = int(runner.lengths[b])
        if len(prompt) <= length:
            raise ArgumentError(f"prompts[{b}]", f"must go on behind the {length} tokens of its sequence", len(prompt))
        for start in range(length, len(prompt), runner.chunk):
            logits = runner.extend({b: prompt[start : start + runner.chunk]})
            progress()
        logits_behind.append(logits)
    return np.concatenate(logits_behind)


def _generate_steps(
    runner: Runner,
    prompts: Sequence[Sequence[int]],
    tokens: int,
    sampling: Sampling,
    compute: Callable[..., Any],
    progress: Callable[[], None],
) -> Iterator[Indices]:
    logits = compute(runner, prompts, progress)
    noise = _gumbel(sampling.seed, logits)
    seen_mask = tokens_mask(prompts, logits) if sampling.penalizes else None
    for n in range(tokens):
        chosen_tokens, goes_on = choose(logits, sampling, noise, seen_mask), n + 1 < tokens
        if seen_mask is not None:
            seen_mask[np.arange(len(chosen_tokens), like=chosen_tokens), chosen_tokens] = True
        fetched = gpu.fetch(chosen_tokens) if gpu.is_device_array(chosen_tokens) else None
        if goes_on and fetched:  # the GPU goes on while the host waits for this token
            logits = runner.decode(np.maximum(chosen_tokens, 0))  # -1 is no token
        host_tokens = fetched() if fetched else chosen_tokens
        if (host_tokens < 0).any():
            place = f"token {n} behind prompts[{host_tokens.argmin()}]"
            raise ArgumentError("runner", "must give finite logits", f"NaN or infinity for {place}")
        yield host_tokens.astype(np.int32)
        if goes_on and not fetched:
            logits = runner.decode(chosen_tokens)


def choose(logits: Any, sampling: Sampling, noise: Callable[[tuple[int, ...]], Any], seen: Any = None) -> Any:
    """Choose tokens [B] from logits [B, V]: the likeliest ones, or drawn ones.

    The largest of the scores plus Gumbel's noise is a draw from their softmax. A token is -1 where the largest logit is
    not finite. `seen` tokens [B, V] are penalised.
    """
    scores = logits
    if not sampling.takes_largest:
        scores = adjust(logits.astype(np.float32), [sampling], seen)
    if sampling.temperature:
        scores = scores + noise(logits.shape)
    return finite_only(scores.argmax(axis=-1), logits)


def finite_only(tokens: Any, logits: Any) -> Any:
    """Replace tokens [B] by -1 where the largest of the logits [B, V] is not finite."""
    return np.where(np.isfinite(logits.max(axis=-1)), tokens, -1)


def _gumbel(seed: int, logits: Any) -> Callable[[tuple[int, ...]], Any]:
    """Return a function that draws Gumbel noise f32 of any shape, on the device if the logits are there."""
    if gpu.is_device_array(logits):
        return gpu.gumbel(seed)
    rng = np.random.default_rng(seed)
    return lambda shape: rng.gumbel(size=shape).astype(np.float32)
