"""Where a step of an engine of vLLM goes: the time of its kernels by what they do, and of the gaps between them.

A batch makes `SHORT` and then `LONG` tokens under PyTorch's profiler; the difference of both, in which prefill cancels,
by the difference in tokens, as `serving_engine` has it.
"""

import json
import os
import random
import re
import sys
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from heapq import nlargest
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from benchmarks.serving_engine import Rule, engine_arguments, prepare, run_process, time_run
from ptxlab.errors import BenchmarkError

BATCHES = (1, 64)
SHORT, LONG = 16, 80  # tokens that a batch makes
RULE = Rule(prompts=max(BATCHES), new=LONG)  # of every model
# What a kernel does, by the first pattern that its name has.
PATTERNS = {
    "attention": r"^attention_kv|flash|unified_attention|merge_attn",
    "append": r"^(rope_)?append_kv|reshape_and_cache",
    "quantisers": r"^quantize_activations|scaled_fp8_quant|per_token_quant",
    "products": r"^gemm_w4a8|cutlass.*(fp8|e4m3|Scaled|ScaledMM)|scaled_mm|device_kernel.*e4m3|enable_sm90",
    "head": r"nvjet|gemm|gemv|cublas|splitK",
    "sampling": r"argmax|arg_max|softmax|topk|top_k|sort|sampl|ArgMax|reduce_kernel",
    "norms, RoPE, gates": r"triton_|rms_norm|rotary|silu|act_and_mul|embedding",
    "copies": r"^Mem(cpy|set)|copy|fill|index|elementwise|CatArray",
}
OTHER, IDLE = "other kernels", "no kernel"
PARTS = (*PATTERNS, OTHER, IDLE)


class KernelTime(NamedTuple):
    """A kernel as the profiler saw it, in microseconds."""

    name: str
    start: float
    end: float


@dataclass(frozen=True)
class StepProfile:
    """A step of a batch.

    Attributes:
        step_us: from one step to the next, under the profiler.
        part_us: of that by `PARTS`; kernels that overlap count twice, so `no kernel` is what no kernel covers.
        launches: kernels of a step.
        unknown: names of the longest kernels of `other kernels`.
    """

    step_us: float
    part_us: Mapping[str, float]
    launches: float
    unknown: tuple[str, ...] = ()


def measure(model: str, name: str) -> dict[int, StepProfile]:
    """Profile a variant in a new process, by batch. Raises BenchmarkError with the line that says why if it fails."""
    readings = json.loads(run_process("benchmarks.serving_profile", model, name))
    return {int(batch): StepProfile(**fields) for batch, fields in readings.items()}


def part_of(kernel: str) -> str:
    """Say what a kernel does by its name."""
    return next((part for part, pattern in PATTERNS.items() if re.search(pattern, kernel)), OTHER)


class Run(NamedTuple):
    """Seconds of a run, and its kernels."""

    seconds: float
    kernels: list[KernelTime]


def compare_runs(short: Run, long: Run, steps: int) -> StepProfile:
    """Make the profile of a step of two runs that differ by so many steps.

    Raises BenchmarkError if the second is not longer, and if the profiler saw no kernel in one of them.
    """
    if not (short.kernels and long.kernels):
        rule = f"the profiler must see kernels in the runs of {SHORT} and {LONG} tokens"
        raise BenchmarkError(f"{rule} (got {len(short.kernels)} and {len(long.kernels)} kernels)")
    step_us = 1e6 * (long.seconds - short.seconds) / steps
    if step_us <= 0:
        raise BenchmarkError(f"{LONG} tokens took no longer than {SHORT}: {long.seconds:.3f} s, {short.seconds:.3f} s")
    short_us, long_us = (_us_by_part(run.kernels) for run in (short, long))
    part_us = {part: max(0.0, long_us[part] - short_us[part]) / steps for part in long_us}
    busy_us = (_busy_us(long.kernels) - _busy_us(short.kernels)) / steps
    other_us = defaultdict[str, float](float)
    for kernel in long.kernels:
        if part_of(kernel.name) == OTHER:
            other_us[kernel.name[:80]] += kernel.end - kernel.start
    return StepProfile(
        step_us,
        {**part_us, IDLE: max(0.0, step_us - busy_us)},
        (len(long.kernels) - len(short.kernels)) / steps,
        tuple(nlargest(5, other_us, key=other_us.__getitem__)),
    )


def _us_by_part(kernels: Iterable[KernelTime]) -> dict[str, float]:
    part_us = dict.fromkeys((*PATTERNS, OTHER), 0.0)
    for kernel in kernels:
        part_us[part_of(kernel.name)] += kernel.end - kernel.start
    return part_us


def _busy_us(kernels: Iterable[KernelTime]) -> float:
    """Return the microseconds in which at least one kernel runs."""
    starts, ends = np.array(sorted((kernel.start, kernel.end) for kernel in kernels)).T
    covered_before = np.maximum.accumulate(np.concatenate([starts[:1], ends[:-1]]))
    return float(np.maximum(0.0, ends - np.maximum(starts, covered_before)).sum())


def profile(model: str, name: str, folder: Path) -> None:
    """Profile a variant in this process, and write its steps into the folder."""
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"  # the profiler sees this process alone
    prepare(folder, model, RULE)
    import torch
    from torch.profiler import ProfilerActivity
    from vllm import LLM

    llm = LLM(**engine_arguments(folder, name, RULE))
    draw = random.Random(0)

    def run(batch: int, new: int) -> Run:
        with torch.profiler.profile(activities=[ProfilerActivity.CUDA]) as profiler:
            seconds = time_run(llm, model, draw, batch, RULE.tokens, new)
        return Run(seconds, kernels_of(profiler.events()))

    profiles = {}
    for batch in BATCHES:
        run(batch, SHORT)  # warms up the shapes, under the profiler as the runs that count
        profiles[batch] = asdict(compare_runs(run(batch, SHORT), run(batch, LONG), LONG - SHORT))
    (folder / "reading.json").write_text(json.dumps(profiles))


def kernels_of(events: Any) -> list[KernelTime]:
    """Return the kernels and copies among a profiler's events."""
    from torch.autograd import DeviceType

    return [
        KernelTime(event.name, event.time_range.start, event.time_range.end)
        for event in events
        if event.device_type == DeviceType.CUDA
    ]


if __name__ == "__main__":
    profile(sys.argv[1], sys.argv[2], Path(sys.argv[3]))
