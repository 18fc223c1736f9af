"""A GPU made of the emulator, for what the suites do around their launches: arrays are NumPy's, a call runs at once."""

from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from ptxlab import gpu
from ptxlab.runtime import Kernel
from ptxlab.runtime.timing import Measured
from ptxlab.sources import Source
from ptxlab.spec import Launch


def _load(source: Source, entry: str, *, defines: Any = None) -> Any:
    return SimpleNamespace(run=Kernel(source, entry, dict(defines or {})), registers=100, local_bytes=0)


def _prepare(kernel: Any, args: Sequence[Any], geometry: Launch) -> Callable[[], None]:
    return lambda: kernel.run.launch(args, geometry, backend="emulator")


def _measure(calls: Sequence[Callable[[], None]], **_: Any) -> Measured:
    for call in calls:
        call()
    return Measured(us=10.0, fastest=9.0, slowest=11.0, sm_mhz=1900.0)


def _measure_graph(calls: Sequence[Callable[[], None]], **_: Any) -> tuple[Measured, Any]:
    """Measure calls, and return with the time a graph whose replays run the calls."""

    def replay() -> None:
        for call in calls:
            call()

    return _measure(calls), SimpleNamespace(calls=len(calls), replay=replay, synchronize=lambda: None)


@pytest.fixture
def emulated_gpu(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """Replace `ptxlab.gpu` and the measuring by stand-ins on the CPU."""
    from benchmarks.layer import decoder, fused
    from ptxlab.bench import copying
    from ptxlab.bench import user_kernels as own
    from ptxlab.llm import layer_chain
    from ptxlab.lowbit.bench import attention, stream
    from ptxlab.lowbit.bench.attention import append, merge
    from ptxlab.lowbit.bench.attention import problem as attention_problem
    from ptxlab.lowbit.bench.gemm import grouped, points, problem, quantiser

    stand_ins = {
        "device_info": lambda: SimpleNamespace(sms=2, slug="h200", arch="sm_90a"),
        "to_device": lambda array: np.array(array, order="C"),
        "to_host": np.array,
        "empty": np.empty,
        "zeros": np.zeros,
        "fill_bytes": lambda array, byte: array.view(np.uint8).fill(byte),
        "copy_bytes": lambda target, source: np.copyto(target, source),
        "why_not": lambda arch, exact=False: None,
        "load": _load,
        "prepare": _prepare,
    }
    for name, stand_in in stand_ins.items():
        monkeypatch.setattr(gpu, name, stand_in)
    for module in (append, attention, copying, decoder, fused, grouped, merge, own, points, quantiser, stream):
        monkeypatch.setattr(module, "measure", _measure)
    monkeypatch.setattr(decoder, "measure_graph", _measure_graph)
    for module in (append, decoder, fused, points, grouped, attention_problem, layer_chain, own, problem, stream):
        monkeypatch.setattr(module, "copies_beyond_l2", lambda nbytes: 2)
    return monkeypatch
