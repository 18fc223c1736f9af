"""`attention_kv4`: any array library, any of its kernels, in eager calls and in CUDA graphs."""

from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np

from ptxlab import gpu
from ptxlab.errors import ArgumentError
from ptxlab.io.dynamo import break_graph
from ptxlab.lowbit.kernels.attention.call import (
    NAME,
    AttentionCall,
    cache_on_host,
    check_cache_values,
    check_call,
    check_zeros,
    split_outputs,
    workspace_rules,
)
from ptxlab.lowbit.kernels.attention.common import cache_arrays, channel_constants
from ptxlab.lowbit.kernels.attention.options import AttentionOptions
from ptxlab.lowbit.kernels.attention.prefill import PREFILL
from ptxlab.lowbit.kernels.attention.prefill_api import attend_chunks, chunk_memory
from ptxlab.lowbit.kernels.attention.steps import choose, why_not
from ptxlab.lowbit.kernels.operation import DeviceMemory, Operation, Prepared, Results
from ptxlab.lowbit.kernels.options import document_options
from ptxlab.lowbit.layout import KVCache
from ptxlab.runtime import run_spec
from ptxlab.runtime.arguments import require_on_host
from ptxlab.runtime.plan import Plan
from ptxlab.sources import sources_of_kernel
from ptxlab.validate import shape_of


@dataclass(frozen=True, eq=False)
class AttentionWorkspace(DeviceMemory):
    """Device memory that `attention_kv4` needs besides its result; made by `attention_workspace`.

    Blocks hand parts of results to each other in it, and every call finds and leaves zeros where these come. Calls on
    one stream may share it, since they follow each other; so may graphs that are replayed on one stream. Calls that
    fail leave it empty, so that none takes it any more.
    """


@break_graph
@document_options(AttentionOptions)
def attention_kv4(
    q: Any,
    cache: KVCache,
    *,
    query_start_loc: Any = None,
    k: Any = None,
    v: Any = None,
    scale: float | None = None,
    window: int | None = None,
    out: Any = None,
    return_lse: bool = False,
    kernel: str | None = None,
    backend: str | None = None,
    programmatic: bool = False,
    workspace: AttentionWorkspace | None = None,
    check: bool = False,
    batch_invariant: bool = False,
) -> Any:
    """Decode attention: the last tokens of every sequence over its paged cache of 4 or 8 bits (QServe §5.3).

    out[b, t, h] = softmax(scale · q[b, t, h] kᵀ) v over the tokens that query t sees: those up to lengths[b] - T + t,
    of them the last `window`. Query head h attends to kv head h // (Hq / Hkv). The same input gives the same bits on
    the same GPU. There a call only enqueues one kernel, on the caller's stream; after the first call of a shape it
    allocates nothing but the results, if `out` does not provide them. So it can be captured into a CUDA graph, with
    `out` and `workspace`, and the graph be replayed on other lengths, tables, caches' contents.

    Args:
        q: f16 or bf16 (also as its bits, uint16), [B, Hq, D], or [B, T, Hq, D] with T in 1..8: the last T tokens of
            every sequence. Hq is 1 to 16 times the cache's heads. NumPy, CuPy, PyTorch or JAX.
        query_start_loc: s32 [B + 1], where q is [T, Hq, D], the queries of all sequences one behind the other: those of
            sequence b begin at query_start_loc[b] and are its last tokens. Any numbers, also none, by
            `attention_kv4_prefill_sm90` or, where that does not run, `attention_kv4_prefill_mma_sm80`, for caches of
            kv4: keys and values are rounded to FP16. Queries behind the last one are padding, whose results are not
            written. Where queries are few, the first kernel cuts long contexts into parts, by how many queries and
            sequences there are: a query's last bits depend on that. With `batch_invariant` nothing is cut, and a query
            has the same bits in any chunk and call.
        k, v: the queries' own keys and values, [T, Hkv, D] each like q, behind RoPE; with `query_start_loc`. Attention
            takes them, rounded to FP16, and does not read what the cache has of these tokens: a chunk sees itself in
            16 bits, and only what lies ahead of it in 4. Without them all comes from the cache. For a rotated cache k
            is given unrotated, and rotated here as q is. Tokens may lie apart, as in views of a QKV projection's rows:
            any multiple of 16 bytes. BF16 beyond FP16's largest, 65,504, becomes infinite. A query's result depends on
            where its chunk begins, also with `batch_invariant`.
        cache: in whatever of the four schemes, where q is (`ptxlab.to_device`); its lengths include the new tokens. For
            a rotated one q is rotated here, in float32; teaching steps do not take it.
        out: like q, to write into; with `return_lse` also (out, lse), lse f32 of q's shape without D.
        workspace: from `attention_workspace`, for this kernel, of no other call that runs at the same time. Without
            one, calls on a stream share what the first of them makes, until `ptxlab.release_memory()`.
        {options}

    Returns:
        out, of q's shape, dtype and library; or (out, lse). Where a query sees nothing, out is 0 and lse is -inf, the
        only infinity. NumPy and CuPy have no bfloat16: they get its bits, uint16.

    Raises:
        ArgumentError: the argument, the rule and the value; nothing was launched. On the GPU, unless `check`, lengths
            beyond the table and blocks outside the pool have it read beyond these, and a negative length leaves results
            unwritten.
        UnavailableError: the kernel does not run here; the message names those that would.
    """
    options = AttentionOptions.of(backend, programmatic, scale, window, return_lse, kernel, check, batch_invariant)
    if not isinstance(cache, KVCache):
        raise ArgumentError(f"{NAME}: cache", "must be a KVCache", type(cache).__name__)
    if workspace is not None and not isinstance(workspace, AttentionWorkspace):
        raise ArgumentError(f"{NAME}: workspace", "must come from attention_workspace", type(workspace).__name__)
    out, lse = split_outputs(out, return_lse)
    if query_start_loc is not None:
        return attend_chunks(options, q, cache, query_start_loc, (k, v), out, lse, workspace)
    for name, array in (("k", k), ("v", v)):
        if array is not None:
            raise ArgumentError(f"{NAME}: {name}", "only with query_start_loc", f"shape {list(shape_of(array))}")
    arrays = {"q": q, **cache_arrays(cache), **channel_constants(cache), "out": out, "lse": lse}
    outputs = _ATTENTION(options, cache.description, arrays, cache, workspace=workspace)
    out = outputs["out"] if out is None else out
    return (out, outputs["lse"] if lse is None else lse) if return_lse else out


@break_graph
def attention_workspace(
    cache: KVCache, *, kernel: str | None = None, batch_invariant: bool = False
) -> AttentionWorkspace:
    """Allocate the memory that `attention_kv4` needs on this device for any queries of caches with this head dim.

    It is a few MiB, whatever the batch; teaching steps need none. With `batch_invariant`, for calls with that, it is 32
    times as much: some 35 MiB on an H200 for heads of 128. It serves calls of `kernel` alone, as they name it: by
    default calls of the kernel that is chosen. Calls with `query_start_loc` name `attention_kv4_prefill_sm90`: 35 MiB
    for heads of 128, needed only where contexts are cut into parts. The memory is ready, all zeros, when this returns:
    the call waits for it, so make it before a capture. Raises ArgumentError for what is no KVCache, and what choosing
    the kernel raises.
    """
    if not isinstance(cache, KVCache):
        raise ArgumentError("attention_workspace: cache", "must be a KVCache", type(cache).__name__)
    options = AttentionOptions(kernel=kernel, backend="gpu", batch_invariant=batch_invariant)
    options.require_valid("attention_workspace")
    sms = gpu.device_info().sms
    if kernel == PREFILL.name:
        return AttentionWorkspace.of(kernel, chunk_memory(cache.head_dim, sms), zeros=True)
    step = choose(options)
    memory = step.max_memory(cache.head_dim, sms)
    return AttentionWorkspace.of(step.spec.name, memory, zeros=True)


def _prepare(call: AttentionCall) -> Prepared:
    sms, options = gpu.device_info().sms, call.options
    step = choose(replace(options, backend="gpu"))
    sizes = step.sizes(call, sms)
    config = step.config(sizes, call.dtype, rotated=call.cache.rotated)
    arguments = f", kernel={options.kernel!r}" if options.kernel else ""
    arguments += ", batch_invariant=True" if options.batch_invariant else ""
    return Prepared(
        step.spec.name,
        lambda: (Plan(step.spec, config, sizes, programmatic=options.programmatic),),
        memory=step.max_memory(call.cache.head_dim, sms),
        zero_buffers=step.zero_buffers,
        workspace_rules=workspace_rules(arguments),
    )


def _check_values(call: AttentionCall, prepared: Prepared, memory: DeviceMemory | None) -> None:
    """Raise ArgumentError for numbers on the device that no call may be given."""
    check_cache_values(call, cache_on_host(call))
    if memory is not None:
        check_zeros(memory, prepared.zero_buffers)


def _on_host(call: AttentionCall) -> Results:
    """Run on NumPy arrays, or PyTorch's on the CPU: in the emulator, or copied to the GPU and back."""
    options = call.options
    step = choose(options)
    emulated = options.backend == "emulator" or why_not(step) is not None
    sizes = step.sizes(call, 1 if emulated else gpu.device_info().sms)
    arrays = {}
    for name, *operand in (operand[:5] for operand in call.operands if operand.array is not None):
        shared_array = require_on_host(*operand, written=name in ("out", "lse"))
        arrays[name] = shared_array.reshape(step.spec.arg(name).resolve(sizes))
    check_cache_values(call, arrays)
    zero_arrays = {
        buffer.name: np.zeros(buffer.shape, buffer.dtype)
        for buffer in step.memory(sizes)
        if buffer.name in step.zero_buffers
    }
    out: dict[str, Any] = {name: arrays.pop(name) for name in ("out", "lse") if name in arrays}
    inputs = arrays | zero_arrays
    if call.shape[0] == 0:
        outputs = {"out": np.empty(call.shape, arrays["q"].dtype), "lse": np.empty(call.shape[:-1], np.float32)}
    else:
        source = sources_of_kernel(step.spec.name)[0]
        config = step.config(sizes, call.dtype, rotated=call.cache.rotated)
        run = partial(run_spec, step.spec, source, inputs, sizes=sizes, out=out, config=config)
        outputs = run(backend=options.backend, programmatic=options.programmatic).outputs
    new_operands = [operand for operand in call.operands if operand.array is None]
    return {
        operand.name: gpu.like(outputs[operand.name].reshape(operand.shape), call.q, operand.dtype)
        for operand in new_operands
    }


_ATTENTION = Operation(NAME, check_call, _prepare, _on_host, _check_values)
