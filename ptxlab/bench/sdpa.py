"""PyTorch's attention over a contiguous FP16 cache, in the same run as the kernels it is compared with."""

from collections.abc import Callable
from functools import partial
from typing import Any

from ptxlab.bench.kvshapes import HEAD_DIM, Batch
from ptxlab.bench.peers import capture, importable
from ptxlab.bench.timing import copies_beyond_l2, measure
from ptxlab.errors import BenchmarkError

# Our name, which is that of the stored times too -> PyTorch's backend.
BACKENDS = {"sdpa_flash_f16": "FLASH_ATTENTION", "sdpa_cudnn_f16": "CUDNN_ATTENTION"}
NAMES = {"sdpa_flash_f16": "sdpa_flash_f16"}  # for `stored_peers`: what both runs called in the same way
_UNGROUPED = "sdpa_cudnn_f16"  # takes a group's rows for the queries of a prompt: up to ten times flash's time
_DEVICE = "cuda"
_TOLERANCE = 1e-2  # of the largest result: a wrong result shows, rounding does not


def sdpa(batch: Batch) -> dict[str, float]:
    """Microseconds by backend for sequences of equal length, rotated beyond the L2; empty without PyTorch.

    Query heads of a group are rows of one head, so that no backend reads the cache more than once; cuDNN, which is slow
    with them, only where there are no groups. A backend that this PyTorch lacks is left out.
    """
    if not importable():
        return {}
    import torch
    from torch.nn.attention import SDPBackend, sdpa_kernel

    B, length = len(batch.lengths), batch.lengths[0]
    copies = copies_beyond_l2(2 * batch.tokens * batch.Hkv * HEAD_DIM * 2)
    q = _normal(B, batch.Hkv, batch.Hq // batch.Hkv, HEAD_DIM)
    caches = [tuple(_normal(B, batch.Hkv, length, HEAD_DIM) for _ in range(2)) for _ in range(copies)]
    times = {}
    for name, backend in BACKENDS.items():
        if name == _UNGROUPED and batch.Hq > batch.Hkv:
            continue
        with sdpa_kernel(getattr(SDPBackend, backend)):
            calls = [partial(torch.nn.functional.scaled_dot_product_attention, q, k, v) for k, v in caches]
            if _runs(name, calls[0], q, *caches[0]):
                times[name] = measure(calls, capture=capture).us
    caches.clear()
    torch.cuda.empty_cache()  # the kernels to be compared need memory too
    return times


def _normal(*shape: int) -> Any:
    import torch

    return torch.randn(shape, dtype=torch.float16, device=_DEVICE)


def _runs(name: str, call: Callable[[], Any], q: Any, k: Any, v: Any) -> bool:
    """Whether the backend is there; the first sequence's results are checked."""
    import torch

    try:
        got = call()[0].double()
    except RuntimeError as error:
        if "No available kernel" in str(error):
            return False
        raise
    weights = torch.softmax(q[0].double() @ k[0].double().transpose(-1, -2) * HEAD_DIM**-0.5, dim=-1)
    expected = weights @ v[0].double()
    error_of = float((got - expected).abs().max() / expected.abs().max())
    if not error_of <= _TOLERANCE:
        raise BenchmarkError(f"{name}: wrong results, relative error {error_of:.2g}")
    return True
