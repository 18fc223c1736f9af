"""`attention_kv4`, the Python face of the kernels: any array library, any of them, eager calls and CUDA graphs."""

from typing import Any

import numpy as np

from ptxlab import gpu
from ptxlab.errors import ArgumentError
from ptxlab.kernels.attention.call import FACE, Call, check_numbers, checked
from ptxlab.kernels.attention.device import AttentionWorkspace, on_gpu
from ptxlab.kernels.attention.steps import choose, why_not
from ptxlab.layout import KVCache
from ptxlab.runtime import run_spec
from ptxlab.runtime.arguments import require_on_host
from ptxlab.sources import of_kernel


def attention_kv4(
    q: Any,
    cache: KVCache,
    *,
    scale: float | None = None,
    window: int | None = None,
    out: Any = None,
    return_lse: bool = False,
    kernel: str | None = None,
    backend: str | None = None,
    programmatic: bool = False,
    workspace: AttentionWorkspace | None = None,
    check: bool = False,
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
        cache: in whatever of the four schemes, where q is (`ptxlab.to_device`); its lengths include the new tokens.
        scale: of the scores, above 0; by default D^-0.5.
        window: how many tokens a query sees at most, its own included; None for all.
        out: like q, to write into; with `return_lse` also (out, lse), lse f32 of q's shape without D.
        return_lse: return (out, lse): the natural logarithm of the sum of exponentials.
        kernel: one of the kernels by name; by default the highest that runs here, `attention_kv4_sm90` or
            `attention_kv4_mma_sm80`. Teaching steps take D 128, T 1, pages of 64, float16, kv4 (`attention_kv8`: kv8).
        backend: `gpu` or `emulator`; by default the GPU where one will do. Host arrays are copied there and back.
        programmatic: the call may begin before the kernel before it on the stream has ended (programmatic dependent
            launch): it reads lengths, block table and constants by channel at once, so no kernel that may still run
            then may write these; before it reads queries and pool, or writes anything, it waits by itself. Only for
            kernels that do so; of no effect on host arrays.
        workspace: from `attention_workspace`, for this kernel, of no other call that runs at the same time. Without
            one, calls on a stream share what the first of them makes.
        check: look at lengths, block table, constants by channel, and whether the workspace is zeros where it has to
            be, on a GPU too, for which the call waits. On the host that is always done.

    Returns:
        out, of q's shape, dtype and library; or (out, lse). Where a query sees nothing, out is 0 and lse is -inf, the
        only infinity. NumPy and CuPy have no bfloat16: they get its bits, uint16.

    Raises:
        ArgumentError: the argument, the rule and the value; nothing was launched. On the GPU, unless `check`, lengths
            beyond the table and blocks outside the pool have it read beyond these, and a negative length leaves results
            unwritten.
        UnavailableError: the kernel does not run here; the message names those that would.
    """
    call = checked(
        q,
        cache,
        scale=scale,
        window=window,
        out=out,
        return_lse=return_lse,
        kernel=kernel,
        backend=backend,
        programmatic=programmatic,
        check=check,
    )
    if workspace is not None and not isinstance(workspace, AttentionWorkspace):
        raise ArgumentError(f"{FACE}: workspace", "must come from attention_workspace", type(workspace).__name__)
    if not gpu.is_device_array(q):
        return _on_host(call, backend)
    if backend == "emulator":
        raise ArgumentError("backend", "arrays on the CPU (NumPy) for the emulator", "arrays on a GPU")
    return on_gpu(call, workspace, check)


def _on_host(call: Call, backend: str | None) -> Any:
    """NumPy, or PyTorch on the CPU: in the emulator, or copied to the GPU and back."""
    step = choose(call.kernel, backend=backend, programmatic=call.programmatic)
    emulated = backend == "emulator" or why_not(step) is not None
    sizes = step.sizes(call, 1 if emulated else gpu.device_info().sms)
    arrays = {}
    for name, label, array, dtype, shape in call.arrays():
        shared = require_on_host(label, array, dtype, shape, written=name in ("out", "lse"))
        arrays[name] = shared.reshape(step.spec.arg(name).resolve(sizes))
    check_numbers(call, arrays)
    kept = {item.name: np.zeros(item.shape, item.dtype) for item in step.memory(sizes) if item.name in step.kept}
    out: dict[str, Any] = {name: arrays.pop(name) for name in ("out", "lse") if name in arrays}
    inputs = arrays | kept
    if call.shape[0] == 0:
        made = {"out": np.empty(call.shape, arrays["q"].dtype), "lse": np.empty(call.shape[:-1], np.float32)}
    else:
        source, config = of_kernel(step.spec.name)[0], step.config(sizes, call.dtype)
        made = run_spec(step.spec, source, inputs, sizes=sizes, out=out, backend=backend, config=config).outputs
    result = _like(call.out, made["out"], call.shape, call.q, call.dtype)
    if not call.return_lse:
        return result
    return result, _like(call.lse, made["lse"], call.shape[:-1], call.q, "float32")


def _like(given: Any, made: np.ndarray, shape: tuple[int, ...], q: Any, dtype: str) -> Any:
    """What the caller gave to be written, or what was made as q's library has it."""
    return gpu.like(made.reshape(shape), q, dtype) if given is None else given
