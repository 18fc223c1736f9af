"""On a GPU, at 131,072 tokens: launches that were given wrong pages or lengths are refused, right ones are not."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from ptxlab import gpu
from ptxlab.bench.attention import kvdata
from ptxlab.bench.attention.problem import SCALE
from ptxlab.bench.shapes import HEAD_DIM, PAGE
from ptxlab.kernels.attention import sm90
from ptxlab.kernels.attention.sm90 import SM90
from ptxlab.sources import of_kernel
from ptxlab.spec.tolerance import within
from tests.support import attention_faults as faults
from tests.support.attention_faults import every_data, refused

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(gpu.why_not("sm_90a", exact=True) is not None, reason="attention_kv4_sm90 runs on Hopper only"),
]

LENGTH = 131072


def launcher(of: faults.Problem) -> Callable[[faults.Draws], dict[str, Any]]:
    """Launches the kernel once for every table and length: out f16 [draws, 1, 1, Hq, D], lse f32 [draws, 1, 1, Hq]."""
    Hkv, Hq = of.cache.num_kv_heads, of.q.shape[2]
    sizes: dict[str, Any] = {"B": 1, "T": 1, "Hq": Hq, "Hkv": Hkv, "D": HEAD_DIM, "P": of.cache.block_table.shape[1]}
    sizes |= {"pages": of.cache.pages, "page": PAGE, "bits": 4, "channel": 0, "window": 0, "softmax_scale": SCALE}
    sizes["blocks"] = sm90.blocks_for(sizes, gpu.device_info().sms)
    config = SM90.config_for(sizes)
    sizes |= config
    kernel = gpu.load(of_kernel(SM90.name)[0], SM90.name, defines=config)
    geometry = SM90.launch(sizes)
    handed_over = {
        name: gpu.zeros(SM90.arg(name).resolve(sizes), str(SM90.arg(name).dtype)) for name in ("partial", "stats")
    }

    def launch(draws: faults.Draws) -> dict[str, Any]:
        tables, lengths = (gpu.to_device(np.ascontiguousarray(x, np.int32)) for x in draws)
        out = gpu.empty((len(tables), 1, 1, Hq, HEAD_DIM), np.float16)
        lse = gpu.empty((len(tables), 1, 1, Hq), np.float32)
        gpu.fill_bytes(out, 0xFF), gpu.fill_bytes(lse, 0xFF)
        for i in range(len(tables)):
            given = {"q": of.q, "pool": of.cache.pool, "table": tables[i : i + 1], "lengths": lengths[i : i + 1]}
            written = {"out": out[i], "lse": lse[i], **handed_over}
            gpu.prepare(kernel, SM90.arguments({**given, **written}, sizes), geometry)()
        return {"out": out, "lse": lse}

    return launch


@every_data
@pytest.mark.parametrize("heads", [(32, 8), (64, 8), (8, 1)], ids=lambda heads: f"{heads[0]}-{heads[1]}")
def test_every_fault_is_refused_at_131072_tokens(
    data: kvdata.Data, heads: tuple[int, int], record_property: Callable[[str, object], None]
) -> None:
    """By results and by logarithms alone, 1,000 draws of each; right launches are accepted in every draw.

    One bound serves all last tokens: at this length another one hardly changes it.
    """
    host, rng = faults.problem(data, heads, LENGTH, spare=faults.DRAWS), np.random.default_rng(0)
    of = replace(host, q=gpu.to_device(host.q), cache=replace(host.cache, pool=gpu.to_device(host.cache.pool)))
    placed = {name: gpu.to_device(getattr(of.cache, name)) for name in ("block_table", "lengths")}
    logical = {"q": of.q, "cache": replace(of.cache, **placed), "softmax_scale": SCALE, "window": 0, "blocks": 1}
    allowed = {name: error for name, error in SM90.allowed(logical).items() if name in ("out", "lse")}
    exact, launch = faults.Expected(of), launcher(of)

    def expected(draws: faults.Draws) -> dict[str, Any]:
        return dict(zip(allowed, exact(draws), strict=True))

    right, others = expected(of.right(1)), expected(of.with_other_lasts())
    for draws, wanted in ((of.right(3), right), (of.with_other_lasts(), others)):
        found = launch(draws)
        problem = within(found, wanted, allowed)
        assert problem is None, problem
    for name, error in allowed.items():
        off = np.abs(found[name] - others[name])
        rms = np.sqrt((off**2).mean(axis=-1))
        size = float(np.sqrt((others[name] ** 2).mean()))
        measured = {
            "max": float(off.max()),
            "rms": float(rms.max()),
            "of allowed": float((off / error.each).max()),
            "rms of allowed": float((rms / error.rms).max()),
        }
        for what, value in measured.items():
            record_property(f"{name} {what}", value)
        shown = ", ".join(f"{what} {value:.2e}" for what, value in measured.items())
        print(f"\n{data.__name__} {heads[0]}/{heads[1]} {name} (RMS {size:.2e}): error {shown}")
    for fault in faults.FAULTS:
        wanted, found = others if fault is faults.last_token_lost else right, launch(fault(of, rng))
        for name in allowed:
            by_name = refused(found[name], wanted[name], allowed[name])
            assert bool(by_name.all()), f"{fault.__name__}: {int(by_name.sum())} of {len(by_name)} refused by {name}"
