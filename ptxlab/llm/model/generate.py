"""`generate`: tokens from a runner, greedy or sampled, one of every sequence at a time."""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from ptxlab import gpu
from ptxlab.errors import ArgumentError
from ptxlab.llm.model.runner import Indices, Runner
from ptxlab.validate import is_integer, require_integer

COLDEST, HOTTEST = 1e-6, 1e6  # temperatures: float16 logits over them are finite, and still differ, in float32


def generate(
    runner: Runner, prompts: Sequence[Sequence[int]], tokens: int, *, temperature: float = 0.0, seed: int = 0
) -> Iterator[Indices]:
    """Up to `tokens` tokens s32 [B] behind the prompts, one of every sequence at a time, each as soon as it is there.

    On a GPU the host reads a token while the next step runs already, and nothing else waits.

    Args:
        runner: of as many sequences as there are prompts.
        prompts: tokens of each; with what is generated they must fit the runner's context.
        tokens: how many, 1 or more.
        temperature: 0 takes the likeliest token; above 0 tokens are drawn from softmax(logits / temperature).
        seed: of the draws, 0 or more. The two kinds of runner draw differently.

    Raises ArgumentError for what `Runner.prefill` refuses, or a number out of range; and instead of a step's tokens
    where logits of one are not finite (a `Server` goes on with the others).
    """
    require_integer("tokens", tokens, 1)
    check_sampling(temperature, seed)
    longest = max((len(prompt) for prompt in prompts), default=0)
    if longest + tokens > runner.context:
        rule = f"prompt and tokens must fit the context of {runner.context}"
        raise ArgumentError("tokens", rule, f"{longest} + {tokens}")
    return _generated(runner, prompts, tokens, float(temperature), seed)


def check_sampling(temperature: float, seed: int) -> None:
    """Raise ArgumentError for a temperature or a seed out of range."""
    if not isinstance(temperature, int | float) or not (temperature == 0 or COLDEST <= temperature <= HOTTEST):
        raise ArgumentError("temperature", f"must be 0, or a number in {COLDEST:g}..{HOTTEST:g}", repr(temperature))
    if not is_integer(seed) or not 0 <= seed < 2**32:
        raise ArgumentError("seed", "must be an integer in 0..2^32-1", repr(seed))


def _generated(
    runner: Runner, prompts: Sequence[Sequence[int]], tokens: int, temperature: float, seed: int
) -> Iterator[Indices]:
    logits = runner.prefill(prompts)
    noise = _gumbel(seed, logits)
    for n in range(tokens):
        chosen, more = choose(logits, temperature, noise), n + 1 < tokens
        fetched = gpu.fetch(chosen) if gpu.is_device_array(chosen) else None
        if more and fetched:  # the GPU goes on while the host waits for this token
            logits = runner.decode(np.maximum(chosen, 0))  # -1 is no token
        found = fetched() if fetched else chosen
        if (found < 0).any():
            where = f"token {n} behind prompts[{found.argmin()}]"
            raise ArgumentError("runner", "must give finite logits", f"NaN or infinity for {where}")
        yield found.astype(np.int32)
        if more and not fetched:
            logits = runner.decode(chosen)


def choose(logits: Any, temperature: float, noise: Callable[[tuple[int, ...]], Any]) -> Any:
    """Tokens [B] of logits [B, V]: the likeliest, or drawn: the largest of logits / temperature + Gumbel's noise is
    a draw from their softmax; -1 where the largest of the logits is not finite."""
    scores = logits
    if temperature:
        scores = logits.astype(np.float32) / np.float32(temperature) + noise(logits.shape)
    return finite_only(scores.argmax(axis=-1), logits)


def finite_only(tokens: Any, logits: Any) -> Any:
    """These tokens [B], with -1 where the largest of the logits [B, V] is not finite."""
    return np.where(np.isfinite(logits.max(axis=-1)), tokens, -1)


def _gumbel(seed: int, like: Any) -> Callable[[tuple[int, ...]], Any]:
    """Noise f32 of any shape, where the logits are."""
    if gpu.is_device_array(like):
        return gpu.gumbel(seed)
    rng = np.random.default_rng(seed)
    return lambda shape: rng.gumbel(size=shape).astype(np.float32)
