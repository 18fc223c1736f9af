"""Suite `torch`: host time of operators; `model.generate` beside the same model in FP16 and FP8."""

import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM, StaticCache

from benchmarks.decode import random_model
from ptxlab.bench.ceilings import Ceilings
from ptxlab.bench.record import Row
from ptxlab.bench.suite import Suite
from ptxlab.errors import BenchmarkError
from ptxlab.llm.model import Config
from ptxlab.llm.torch import KV4Cache, W4A8Linear, attention_workspace, quantize_model
from ptxlab.llm.torch.operators import ALLOCATING

STEP, OURS = "generate", "W4A8KV4"
MODEL, BATCHES = "LLaMA-2-7B", (1, 16, 64)
PROMPT, SHORT_RUN, LONG_RUN, RUNS = 32, 8, 72, 3  # tokens; a step is the difference of two runs of `generate`
LONGEST = PROMPT + LONG_RUN
_ROUNDED = 0.15  # rms of what rounding does to logits, in standard deviations of theirs; unlike ones are 1.4 apart
_CALLS, _CALLS_PER_WAIT = 2000, 100  # every so many calls the device is waited for, so that the queue stays short


def rows(
    names: Sequence[str], ceilings: Ceilings, progress: Callable[[str], None], done: Sequence[Row] = ()
) -> Iterator[Row]:
    """Measure the host time of every operator, then a step of a 7B-shaped model with random weights at each batch.

    Steps in `done` are taken as they are.
    """
    progress("host time")
    yield from host_times()
    yield from steps(ceilings, progress, done)


# Host time


def host_times() -> Iterator[Row]:
    """Measure the host time of a repeated call of each operator.

    The floor is a Python operator that only allocates the same results.
    """
    for operator, (call, floor) in operator_calls().items():
        us, fastest_us, slowest_us = _host_us(call)
        floor_us = _host_us(floor)[0], "PyTorch"
        yield _row(operator, "host time", {}, (us, fastest_us, slowest_us), (1e3 / us, "calls/ms"), floor_us, "")


def operator_calls(
    width: int = 4096, rows: int = 16, device: str = "cuda"
) -> dict[str, tuple[Callable[[], Any], Callable[[], Any]]]:
    """Make two calls per operator at a decoder's sizes: the operator, and one that only allocates its results."""
    ops, D, Hq, Hkv, tokens = torch.ops.ptxlab, 128, width // 128, max(1, width // 512), 64
    empty = torch.empty(0, device=device)

    def halves(*shape: int) -> Tensor:
        return torch.randn(shape, device=device).half()

    linear = W4A8Linear.from_linear(nn.Linear(width, width, dtype=torch.float16), group=128).to(device)
    x, gamma, gate_up, q = halves(rows, width), halves(width), halves(rows, 2 * width), halves(rows, Hq, D)
    qkv, k, v = halves(rows, (Hq + 2 * Hkv) * D), halves(rows, Hkv, D), halves(rows, Hkv, D)
    weight = [getattr(linear, field) for field in linear.names]
    weight_format = {"scheme": linear.scheme, "group": linear.group, "out_dtype": linear.dtype}
    experts = [torch.stack([tensor] * 2) for tensor in weight]
    int8_weight = torch.ones(width, width, dtype=torch.int8, device=device)
    offsets = torch.tensor([0, rows // 2, rows], dtype=torch.int32, device=device)
    table = torch.arange(rows, dtype=torch.int32, device=device).view(rows, 1)
    pool = torch.zeros(rows, 2, Hkv, tokens * (D // 2 + 4), dtype=torch.uint8, device=device)
    lengths = torch.full((rows,), tokens - 1, dtype=torch.int32, device=device)
    slots, (cos, sin) = table.view(-1) * tokens + tokens - 1, torch.ones(2, rows, D // 2, device=device)
    space = attention_workspace(D, empty.device) if empty.is_cuda else None
    calls: dict[str, tuple[tuple[Any, ...], dict[str, Any]]] = {
        "quantize_activations": ((x,), {}),
        "gemm_w4a8": ((*ops.quantize_activations(x), weight), {"layout": linear.layout, **weight_format}),
        "gemm_w4a8_grouped": ((*ops.quantize_activations(x), experts, offsets), weight_format),
        "gemm_w8a8": (
            (*ops.quantize_activations(x), int8_weight, torch.ones(width, device=device)),
            {"out_dtype": torch.float16},
        ),
        "rmsnorm_quantize": ((x, gamma), {}),
        "silu_mul_quantize": ((gate_up,), {}),
        "rope_append_kv4": ((qkv, pool, slots, cos, sin), {"head_dim": D}),
        "append_kv4": ((k, v, pool, slots), {}),
        "attention_kv4": ((q, pool, table, lengths), {"workspace": space}),
        "attention_kv4_out": ((q, pool, table, lengths, torch.empty_like(q)), {"workspace": space}),
    }
    _define_allocating()
    return {
        operator: (
            partial(getattr(ops, operator), *args, **keywords),
            partial(getattr(torch.ops.ptxlab_bench, operator), *args, **keywords),
        )
        for operator, (args, keywords) in calls.items()
    }


@cache
def _define_allocating() -> torch.library.Library:
    """Define `torch.ops.ptxlab_bench`: operators of the same schemas that only allocate.

    They live as long as the library.
    """
    library = torch.library.Library("ptxlab_bench", "DEF")
    for schema, allocate in ALLOCATING.items():
        library.define(schema)
        for key in ("CPU", "CUDA"):
            library.impl(schema.partition("(")[0], allocate, key)
    return library


def _host_us(call: Callable[[], Any]) -> tuple[float, float, float]:
    """Time many calls on the host: median, minimum and maximum in microseconds."""
    times_us = []
    for i in range(_CALLS + 50):
        if i % _CALLS_PER_WAIT == 0:
            torch.cuda.synchronize()
        start_ns = time.perf_counter_ns()
        call()
        times_us.append((time.perf_counter_ns() - start_ns) / 1e3)
    return statistics.median(times_us[50:]), min(times_us[50:]), max(times_us[50:])


# Generating


def steps(ceilings: Ceilings, progress: Callable[[str], None], done: Sequence[Row] = ()) -> Iterator[Row]:
    """Measure a decode step, compiled with a static cache as `generate` does by default: the peers, then ours.

    Rows in `done` are not measured again.
    """
    recorded_rows = {(row.kernel, row.sizes["B"]): row for row in done if row.measure == STEP}
    peers: dict[int, dict[str, float]] = {B: {} for B in BATCHES}
    for mode, prepare in _WAYS.items():
        model: Any = None
        for B in BATCHES:
            kernel = MODEL if mode == OURS else f"{MODEL} in {mode}"
            row = recorded_rows.get((kernel, B))
            if row is None:
                progress(f"generate, {mode}, batch {B}")
                model = model or prepare()
                make_static_cache = partial(StaticCache, config=model.config, max_cache_len=LONGEST)
                cache: Any = KV4Cache(model, B, LONGEST) if mode == OURS else make_static_cache()
                measured = step_us(model, B, cache)
                check_note = _compare_with_eager(model, B, cache) if mode == OURS else ""
                read_tensors = [model.lm_head.weight, *model.model.layers.parameters(), *model.model.layers.buffers()]
                nbytes = sum(int(tensor.nbytes) for tensor in read_tensors)
                floor = nbytes / ceilings.read_tbps / 1e6, "weights"
                rate = B / measured[0] * 1e6, "tokens/s"
                sizes = {"B": B, "prompt": PROMPT}
                row = _row(kernel, STEP, sizes, measured, rate, floor, check_note, bytes=nbytes, peers=peers[B])
            if mode != OURS:
                peers[B] = {**peers[B], mode: row.time_us}
            yield row
        del model
        torch.cuda.empty_cache()


_WAYS: dict[str, Callable[[], Any]] = {
    "fp16": lambda: _random_llama(LlamaConfig()),
    "fp8": lambda: in_fp8(_random_llama(LlamaConfig())),
    OURS: lambda: quantize_model(_random_llama(LlamaConfig()), random_model(Config.named(MODEL))),
}


def _random_llama(config: LlamaConfig) -> LlamaForCausalLM:
    default_dtype = torch.get_default_dtype()
    torch.set_default_dtype(torch.float16)
    try:
        with torch.device("cuda"):
            return LlamaForCausalLM(config).eval()
    finally:
        torch.set_default_dtype(default_dtype)


class Fp8Linear(nn.Module):
    """x Wᵀ in E4M3 with one scale for the weight and one for the tokens, by cuBLAS."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        w = linear.weight.detach()
        scale = (w.abs().max() / 448).float()
        self.register_buffer("w", (w / scale).to(torch.float8_e4m3fn))
        self.register_buffer("w_scale", scale)

    def forward(self, x: Tensor) -> Tensor:
        """Compute the linear layer: [.., N] of x [.., K]."""
        tokens = x.reshape(-1, x.shape[-1])
        scale = (tokens.abs().max() / 448).float()
        operands = (tokens / scale).to(torch.float8_e4m3fn), self.w.t()
        y = torch._scaled_mm(*operands, scale_a=scale, scale_b=self.w_scale, out_dtype=x.dtype)
        return y.view(*x.shape[:-1], -1)


def in_fp8(model: nn.Module) -> nn.Module:
    """Replace every linear of the model's layers by an FP8 one; the head stays."""
    for module in [*model.model.layers.modules()]:
        for child_name, child in [*module.named_children()]:
            if isinstance(child, nn.Linear):
                setattr(module, child_name, Fp8Linear(child))
    return model


def _generate(model: Any, B: int, cache: Any, tokens: int, **overrides: Any) -> Any:
    cache.reset()
    prompt = torch.arange(B * PROMPT, device=model.device).view(B, PROMPT) % 31999 + 1
    options = {"attention_mask": torch.ones_like(prompt), "past_key_values": cache, "do_sample": False, **overrides}
    return model.generate(prompt, max_new_tokens=tokens, min_new_tokens=tokens, **options)


def step_us(model: Any, B: int, cache: Any) -> tuple[float, float, float]:
    """Time a step by wall clock, after two runs that compile: median, minimum and maximum in microseconds.

    Raises BenchmarkError where the longer of two runs took less time: the host was busy with something else.
    """

    def seconds(tokens: int) -> float:
        torch.cuda.synchronize()
        start = time.perf_counter()
        _generate(model, B, cache, tokens)
        torch.cuda.synchronize()
        return time.perf_counter() - start

    for _ in range(2):
        seconds(SHORT_RUN)
    times_us = [(seconds(LONG_RUN) - seconds(SHORT_RUN)) / (LONG_RUN - SHORT_RUN) * 1e6 for _ in range(RUNS)]
    if min(times_us) <= 0:
        raise BenchmarkError(
            f"generate, batch {B}: {LONG_RUN} tokens took less time than {SHORT_RUN}; leave the host idle"
        )
    return statistics.median(times_us), min(times_us), max(times_us)


def _compare_with_eager(model: Any, B: int, cache: Any) -> str:
    """Check that the compiled model's tokens are the eager one's up to where rounding parts them; return that claim.

    Inductor rounds where eager PyTorch does not, and the head's sums may be of another order. Either can move an INT8
    activation to the next step, and so put a token first that is nearly as likely. Raises BenchmarkError if logits of
    the same tokens differ by more than that explains.
    """
    options = {"return_dict_in_generate": True, "output_logits": True}
    compiled_run, eager_run = (
        _generate(model, B, cache, SHORT_RUN, disable_compile=without_compiling, **options)
        for without_compiling in (False, True)
    )
    has_diverged = (compiled_run.sequences != eager_run.sequences)[:, PROMPT:].cumsum(dim=1) > 0
    same_prefix = torch.cat([torch.ones_like(has_diverged[:, :1]), ~has_diverged[:, :-1]], dim=1)  # same tokens before
    compiled_logits, eager_logits = (
        torch.stack(run.logits, dim=1)[same_prefix].float() for run in (compiled_run, eager_run)
    )
    deviation = float((compiled_logits - eager_logits).square().mean().sqrt() / eager_logits.std())
    if not deviation <= _ROUNDED:
        rule = f"generate, batch {B}: logits of the compiled model and of the eager one"
        raise BenchmarkError(
            f"{rule} are {deviation:.2f} standard deviations apart (rms), at most {_ROUNDED} by rounding"
        )
    diverged = int(has_diverged[:, -1].sum())
    exception = (
        f" but for {diverged}, which part where logits of the same tokens are {deviation:.3f} deviations apart (rms)"
    )
    return f"{SHORT_RUN} tokens of each sequence equal to the eager model's{',' + exception if diverged else ''}"


def _row(
    kernel: str,
    measure: str,
    sizes: dict[str, int],
    us: tuple[float, float, float],
    rate: tuple[float, str],
    floor: tuple[float, str],
    checked: str,
    **fields: Any,
) -> Row:
    return Row(
        kernel=kernel,
        source="torch",
        measure=measure,
        sizes=sizes,
        time_us=us[0],
        fastest_us=us[1],
        slowest_us=us[2],
        rate=rate[0],
        rate_unit=rate[1],
        operations=0,
        floor_us=floor[0],
        fraction=floor[0] / us[0],
        limit=floor[1],
        sm_mhz=0.0,
        checked=checked,
        **{"bytes": 0, **fields},
    )


SUITE = Suite("torch", rows, resumes=True)
