"""What ncu prints, as numbers in the rows."""

from types import SimpleNamespace

import pytest

from ptxlab import gpu
from ptxlab.lowbit.bench.gemm import limits, problem
from ptxlab.lowbit.bench.shapes import DISSECTED, DISSECTED_TOKENS, LAYERS, Layer
from tests.support.fake_ncu import ncu, raw_page_csv
from tests.support.ladder_record import NAMES, row

__all__ = ["ncu"]


def test_rows_of_the_dissected_matrix_get_counters(ncu: SimpleNamespace) -> None:
    rows = [row(name, layer, M) for layer in (LAYERS[0], DISSECTED) for name in NAMES[:2] for M in (4, 16, 256)]
    rows = [type(r)(**{**vars(r), "more": {"registers": 128}}) for r in rows]
    counted = [name for name in NAMES[:2] for _ in DISSECTED_TOKENS]
    ncu.output = raw_page_csv(counted, list(limits.METRICS.values()))
    limited = limits.with_limits(rows)
    with_counters = [r for r in limited if "tensor_pct" in r.more]
    assert [(r.kernel, r.sizes["M"]) for r in with_counters] == [(n, M) for n in NAMES[:2] for M in DISSECTED_TOKENS]
    assert [r.more["tensor_pct"] for r in with_counters] == [1000.5, 1001.5, 1002.5, 1003.5]
    figures = with_counters[0].more
    assert {n for n in figures if n.startswith(limits.STALL)} == {"stall_long_scoreboard", "stall_barrier"}
    assert figures["stall_barrier"] == 1.5 and figures["registers"] == 128
    assert ncu.command[-2:] == NAMES[:2] and "limits.launch_once(sys.argv[1:])" in ncu.command[-3]


def test_without_counters_a_warning_says_why(ncu: SimpleNamespace) -> None:
    ncu.output = "==ERROR== ERR_NVGPUCTRPERM"
    rows = [row(NAMES[0], DISSECTED, 16)]
    with pytest.warns(UserWarning, match="no counters in the record: ncu: no permission"):
        assert limits.with_limits(rows) == rows
    assert limits.with_limits([row(NAMES[0], LAYERS[0], 16)]) == [row(NAMES[0], LAYERS[0], 16)], "nothing to count"


def test_what_ncu_runs_launches_in_the_order_of_the_rows(emulated_gpu: pytest.MonkeyPatch) -> None:
    launched_names: list[str] = []
    prepare = gpu.prepare

    def prepare_and_note(kernel, args, geometry):
        call = prepare(kernel, args, geometry)
        return lambda: (launched_names.append(kernel.run.entry), call())

    emulated_gpu.setattr(gpu, "prepare", prepare_and_note)
    emulated_gpu.setattr(limits, "DISSECTED", Layer("test", "small", N=128, K=256))
    emulated_gpu.setattr(limits, "DISSECTED_TOKENS", (3, 5))
    limits.launch_once(NAMES[:2])
    assert launched_names == [NAMES[0], NAMES[0], NAMES[1], NAMES[1]]
    assert problem.steps_of(NAMES[:2])[0].spec.name == NAMES[0]
