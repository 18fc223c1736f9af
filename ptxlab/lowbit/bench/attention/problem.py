"""Decode attention of a batch: a cache on the device, launches over rotating copies of it, results within the bound."""

from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import numpy as np

from ptxlab import gpu, registry
from ptxlab.errors import BenchmarkError
from ptxlab.lowbit.bench.attention import kvdata
from ptxlab.lowbit.bench.shapes import HEAD_DIM, PAGE, Batch
from ptxlab.lowbit.kernels.attention import exact
from ptxlab.lowbit.kernels.attention.common import cache_arrays, channel_constants
from ptxlab.lowbit.kernels.attention.sm90 import SM90
from ptxlab.lowbit.kernels.attention.steps import AttentionStep
from ptxlab.lowbit.layout import KVCache, page_bytes
from ptxlab.lowbit.quant import KV_SCHEMES
from ptxlab.runtime.launching import Call, Launches, allocate_poisoned, prepare_launches
from ptxlab.runtime.timing import copies_beyond_l2
from ptxlab.spec import Arrays
from ptxlab.spec.tolerance import Allowed, describe_mismatch

SCALE = HEAD_DIM**-0.5
_RANDOM = 64 << 20  # bytes of distinct random pages; repeated in a larger cache, whose tables mix them
_WILD_PAGE = 0x7FFFFFF0  # where a table has no page
_NAN = 0xFF  # what results are filled with before


def scheme_of(step: AttentionStep) -> str:
    """Return the KV scheme that a step takes: 8 bits for the baseline, otherwise 4."""
    return "kv8" if step.spec.name == "attention_kv8" else "kv4"


def sizes_at(step: AttentionStep, batch: Batch, scheme: str, pages: int, sms: int | None = None) -> dict[str, Any]:
    """Return the spec's sizes for one new token per sequence, in a pool of `pages`.

    The launch takes `sms` SMs, by default those of this GPU.
    """
    sizes = {
        "B": len(batch.lengths),
        "T": 1,
        "Hq": batch.Hq,
        "Hkv": batch.Hkv,
        "D": batch.D,
        "P": max(batch.pages()),
        "pages": pages,
        "page": PAGE,
        "bits": KV_SCHEMES[scheme].bits,
        "channel": int(KV_SCHEMES[scheme].by_channel),
        "window": 0,
        "softmax_scale": batch.D**-0.5,
    }
    sizes = {name: size for name, size in sizes.items() if name in step.spec.symbols}
    if step.blocks is not None:
        sizes["blocks"] = step.blocks(sizes, sms or gpu.device_info().sms)
    step.spec.check_sizes(sizes)
    return sizes


@dataclass(frozen=True)
class Problem:
    """Queries and a cache on the device, in so many copies that no launch finds its copy in the L2.

    Attributes:
        batch: heads and lengths.
        scheme: of the cache.
        q: f16 [B, Hq, D].
        caches: one per copy, in one pool; equal but for the place of their pages.
    """

    batch: Batch
    scheme: str
    q: Any
    caches: list[KVCache]

    @property
    def pages(self) -> int:
        """Number of pages of one copy."""
        return self.caches[0].pages // len(self.caches)

    def sequence(self, b: int) -> tuple[Any, KVCache]:
        """Return one sequence's queries f16 [1, Hq, D] and its cache, taken from the first copy."""
        cache = self.caches[0]
        return self.q[b : b + 1], replace(
            cache, block_table=cache.block_table[b : b + 1], lengths=cache.lengths[b : b + 1]
        )


def random_problem(batch: Batch, scheme: str = "kv4", copies: int | None = None) -> Problem:
    """Draw a problem of random pages (`kvdata.spread`) in any order; free entries of the table are wild."""
    copies, pages = copies or copies_beyond_l2(batch.kv_bytes(scheme)), sum(batch.pages())
    block = random_pages(batch.Hkv, scheme, batch.D)
    pool = gpu.empty((copies * pages, *block.shape[1:]), np.uint8)
    for shift, start in enumerate(range(0, pages, len(block))):
        part = pool[start : min(pages, start + len(block))]
        gpu.copy_bytes(part, kvdata.roll_tokens(block[: len(part)], shift, scheme, batch.D))
    rng = np.random.default_rng(0)
    is_used = np.arange(max(batch.pages())) < np.array(batch.pages())[:, None]
    tables = np.full((copies, *is_used.shape), _WILD_PAGE, np.int32)
    tables[:, is_used] = rng.permutation(pages) + pages * np.arange(copies)[:, None]
    lengths = gpu.to_device(np.array(batch.lengths, np.int32))
    channels = kvdata.random_channels(rng, batch.Hkv, scheme, batch.D) if KV_SCHEMES[scheme].by_channel else ()
    k_channel, v_channel = ((gpu.to_device(a), gpu.to_device(b)) for a, b in channels) if channels else (None, None)
    caches = [
        KVCache(
            pool=pool,
            block_table=gpu.to_device(table),
            lengths=lengths,
            page_size=PAGE,
            head_dim=batch.D,
            scheme=scheme,
            k_channel=k_channel,
            v_channel=v_channel,
        )
        for table in tables
    ]
    kvdata.let_last_stand_out(caches[0])
    for copy in range(1, copies):
        gpu.copy_bytes(pool[copy * pages : (copy + 1) * pages], pool[:pages])
    q = kvdata.random_queries(rng, (len(batch.lengths), batch.Hq, batch.D))
    return Problem(batch, scheme, gpu.to_device(q), caches)


@cache
def random_pages(Hkv: int, scheme: str, D: int = HEAD_DIM) -> Any:
    """Draw pages u8 [some, 2, Hkv, page_bytes] on the device, as a quantiser could have written them."""
    count = max(1, _RANDOM // (2 * Hkv * page_bytes(scheme, PAGE, D)))
    return gpu.to_device(kvdata.random_pages(np.random.default_rng(Hkv), count, Hkv, scheme, D=D))


@dataclass(frozen=True)
class Expected:
    """Expected results of launches.

    Attributes:
        sequences: of each, what is right in float64 on the dequantised integers, and how far off it may be; by output.
        bits: what the oracle in the kernel's own order of operations gives of the whole batch; by output, empty of
            kernels that have none.
    """

    sequences: list[tuple[Arrays, dict[str, Allowed]]]
    bits: Arrays


@dataclass(frozen=True)
class Logged:
    """The same launches once more, which write the logarithms of the sums of exponentials too: checked, never timed.

    Attributes:
        calls: launch on CuPy's current stream.
        outputs: what the calls write, f16 [copies, B, Hq, D].
        lse: likewise, f32 [copies, B, Hq].
    """

    calls: list[Call]
    outputs: Any
    lse: Any


@dataclass(frozen=True)
class AttentionLaunches(Launches):
    """Launches of one step, one per copy of the cache.

    Attributes:
        outputs: f16 [copies, B, Hq, D].
        scratch: what the kernel works in, shared by all calls.
        logged: the launches that write logarithms too; None for teaching steps, which have none.
    """

    scratch: dict[str, Any]
    logged: Logged | None

    def compute_expected(self, problem: Problem) -> Expected:
        """Compute the results that these launches should give for the problem in its present state."""
        oracle = registry.find(self.spec.name)[0]
        shape, scale = oracle.arg("q").resolve(self.sizes), problem.batch.D**-0.5
        block_count = {"blocks": self.sizes["blocks"]} if "partial" in {arg.name for arg in oracle.outputs} else {}
        sequences, bits = [], {}
        for b in range(len(problem.batch.lengths)):
            q, cache = problem.sequence(b)
            logical = {"q": q.reshape(1, *shape[1:]), "cache": cache, "softmax_scale": scale, **block_count}
            sequences.append((oracle.expected(logical), oracle.allowed(logical)))
        if self.spec.name == SM90.name:
            out, lse = exact.attention(
                problem.q[:, None], problem.caches[0], softmax_scale=scale, config=self.variant, **block_count
            )
            bits = {"out": out[:, 0], "lse": lse[:, 0]}
        return Expected(sequences, bits)

    def check(self, problem: Problem, expected: Expected | None = None) -> tuple[str, float]:
        """Hold what every call wrote against what is `expected` (by default of the problem as it is now).

        A timed launch writes no logarithms. So it is launched again with them: results must have the same bits, and
        logarithms are held against what is right as well.

        Returns:
            What was checked, in a sentence for the record, and the largest error of the results.

        Raises:
            BenchmarkError: a result is further off than it may be, or not a number, or has another bit.
        """
        expected = expected or self.compute_expected(problem)
        worst_errors = {"out": 0.0, "lse": 0.0}
        written_outputs = {"out": self.outputs}
        if self.logged is not None:
            for call in self.logged.calls:
                call()
            written_outputs["lse"] = self.logged.lse
        for b, (right, allowed_errors) in enumerate(expected.sequences):
            got = {name: array[:, b].reshape(-1, *right[name].shape) for name, array in written_outputs.items()}
            if mismatch := describe_mismatch(got, right, allowed_errors):
                raise self._wrong(problem, f"wrong results for sequence {b}: {mismatch},")
            worst_errors = {
                name: max(worst_errors[name], float(np.abs(x - right[name]).max())) for name, x in got.items()
            }
        sentences = [
            f"all {self.outputs[0].size} results of {len(self.calls)} launches within the spec's bound of float64"
        ]
        sentences[0] += f", at most {worst_errors['out']:.1e} off"
        if expected.bits:
            for name, array in written_outputs.items():
                bits = f"u{array.dtype.itemsize}"
                if differing_elements := int((array.view(bits) != expected.bits[name].view(bits)).sum()):
                    raise self._wrong(problem, f"{differing_elements} results that differ from the oracle's")
            sentences.append("equal to the oracle in the kernel's order of operations, bit for bit")
        if self.logged is not None:
            if not bool((self.logged.outputs == self.outputs).all()):
                raise self._wrong(problem, "results other than those of launches for lse")
            sentences.append(f"launched again for lse: the same results, lse at most {worst_errors['lse']:.1e} off")
        return "; ".join(sentences), worst_errors["out"]

    def _wrong(self, problem: Problem, complaint: str) -> BenchmarkError:
        return BenchmarkError(
            f"{self.spec.name} with {self.variant}: the timed launches gave {complaint} of {problem.batch}"
        )


def launches(
    step: AttentionStep, problem: Problem, *, programmatic: bool = False, constants: dict[str, int] | None = None
) -> AttentionLaunches:
    """Prepare a launch per copy of the cache.

    They share queries, which in a model the previous kernel has just written, and what the kernel works in.

    Args:
        step: the kernel.
        problem: what it is given.
        programmatic: a launch may begin while the one before it still runs, where the kernel waits for that by itself.
        constants: those of another variant than the spec chooses.
    """
    spec, sizes = step.spec, sizes_at(step, problem.batch, problem.scheme, problem.caches[0].pages)
    config = constants or step.config(sizes, "float16", rotated=problem.caches[0].rotated)
    if "blocks" in sizes and "RESIDENT" in config:
        sizes["blocks"] = gpu.device_info().sms * config["RESIDENT"]
    scratch = {buffer.name: gpu.to_device(np.zeros(buffer.shape, buffer.dtype)) for buffer in step.memory(sizes)}
    copies = len(problem.caches)

    def prepare(**written: Any) -> tuple[gpu.GpuKernel, list[Call]]:
        outputs_by_copy = ({name: array[i] for name, array in written.items()} for i in range(copies))
        arrays = (
            {"q": problem.q, **cache_arrays(cache), **channel_constants(cache), **scratch, **copy_outputs}
            for cache, copy_outputs in zip(problem.caches, outputs_by_copy, strict=True)
        )
        return prepare_launches(spec, sizes, config, arrays, programmatic=programmatic)

    outputs, lse_launches = allocate_poisoned((copies, *problem.q.shape), np.float16, _NAN), None
    if "lse" in {arg.name for arg in spec.args}:
        logged_outputs = allocate_poisoned((copies, *problem.q.shape), np.float16, _NAN)
        lse = allocate_poisoned((copies, *problem.q.shape[:2]), np.float32, _NAN)
        lse_launches = Logged(prepare(out=logged_outputs, lse=lse)[1], logged_outputs, lse)
    kernel, calls = prepare(out=outputs)
    return AttentionLaunches(spec, sizes, config, kernel, calls, outputs, scratch, lse_launches)
