"""What ncu prints, as numbers in the rows."""

from collections.abc import Sequence
from types import SimpleNamespace

import pytest

from ptxlab import gpu, nsight
from ptxlab.bench import limits, problem
from ptxlab.bench.shapes import DISSECTED, DISSECTED_TOKENS, LAYERS
from ptxlab.errors import UnavailableError
from tests.bench.test_gemm import NAMES, SMALL
from tests.ladder_record import row

STALLS = {"long_scoreboard": 2.5, "barrier": 1.5, "selected": 1.0, "not_selected": 0.3, "wait_not_issued": 0.1}


def printed(names: Sequence[str], metrics: Sequence[str]) -> str:
    """As ncu prints with --csv --page raw: other output, the header, a line of units, a line per launch."""
    columns = ["ID", "Process ID", "Kernel Name", *metrics]
    columns += [f"smsp__average_warps_issue_stalled_{reason}_per_issue_active.ratio" for reason in STALLS]
    lines = [columns, ["", "", "", *("%" for _ in columns[3:])]]
    for number, name in enumerate(names):
        values = [f"1,{number:03}.5" for _ in metrics] + [str(value) for value in STALLS.values()]
        lines.append([str(number), "7", f"{name}(const uint4 *, int)", *values])
    return "==PROF== Connected\n" + "\n".join(",".join(f'"{cell}"' for cell in line) for line in lines) + "\n"


@pytest.fixture
def ncu(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """An ncu that says what the test wants and remembers how it was called."""
    state = SimpleNamespace(output="", command=[])

    def run(command: list[str], **_: object) -> SimpleNamespace:
        state.command = command
        return SimpleNamespace(stdout=state.output, stderr="")

    monkeypatch.setattr(nsight.shutil, "which", lambda name: "/opt/ncu")
    monkeypatch.setattr(nsight.subprocess, "run", run)
    return state


def test_counters_of_one_launch(ncu: SimpleNamespace) -> None:
    ncu.output = printed(["k"], ["a.sum", "b.sum"])
    found = nsight.counters(["python", "-c", "0"], "k", ["a.sum", "b.sum"])
    assert found["a.sum"] == found["b.sum"] == 1000.5
    assert ncu.command[-3:] == ["python", "-c", "0"]
    assert ncu.command[ncu.command.index("--kernel-name") + 1] == "regex:^(k)$"
    assert ncu.command[ncu.command.index("--metrics") + 1] == "a.sum,b.sum"


@pytest.mark.parametrize(
    ("output", "message"),
    [
        ("==ERROR== ERR_NVGPUCTRPERM", "no permission to read the GPU's counters"),
        ("==ERROR== it broke", "saw launches of nothing: .*it broke"),
        (printed(["k", "k"], ["a.sum"]), "saw launches of k, k"),
        (printed(["k"], ["b.sum"]), "does not know the metric a.sum"),
    ],
)
def test_what_ncu_cannot(output: str, message: str, ncu: SimpleNamespace) -> None:
    ncu.output = output
    with pytest.raises(UnavailableError, match=message):
        nsight.counters(["python"], "k", ["a.sum"])


def test_rows_of_the_dissected_matrix_get_counters(ncu: SimpleNamespace) -> None:
    rows = [row(name, layer, M) for layer in (LAYERS[0], DISSECTED) for name in NAMES[:2] for M in (4, 16, 256)]
    rows = [type(r)(**{**vars(r), "more": {"registers": 128}}) for r in rows]
    counted = [name for name in NAMES[:2] for _ in DISSECTED_TOKENS]
    ncu.output = printed(counted, list(limits.METRICS.values()))
    found = limits.with_limits(rows)
    with_counters = [r for r in found if "tensor_pct" in r.more]
    assert [(r.kernel, r.sizes["M"]) for r in with_counters] == [(n, M) for n in NAMES[:2] for M in DISSECTED_TOKENS]
    assert [r.more["tensor_pct"] for r in with_counters] == [1000.5, 1001.5, 1002.5, 1003.5]
    more = with_counters[0].more
    assert {n for n in more if n.startswith(limits.STALL)} == {"stall_long_scoreboard", "stall_barrier"}
    assert more["stall_barrier"] == 1.5 and more["registers"] == 128
    assert ncu.command[-2:] == NAMES[:2] and "limits.launch_once(sys.argv[1:])" in ncu.command[-3]


def test_without_counters_a_warning_says_why(ncu: SimpleNamespace) -> None:
    ncu.output = "==ERROR== ERR_NVGPUCTRPERM"
    rows = [row(NAMES[0], DISSECTED, 16)]
    with pytest.warns(UserWarning, match="no counters in the record: ncu: no permission"):
        assert limits.with_limits(rows) == rows
    assert limits.with_limits([row(NAMES[0], LAYERS[0], 16)]) == [row(NAMES[0], LAYERS[0], 16)], "nothing to count"


def test_what_ncu_runs_launches_in_the_order_of_the_rows(emulated_gpu: pytest.MonkeyPatch) -> None:
    launched: list[str] = []
    prepare = gpu.prepare

    def remembered(kernel, args, geometry):
        call = prepare(kernel, args, geometry)
        return lambda: (launched.append(kernel.run.entry), call())

    emulated_gpu.setattr(gpu, "prepare", remembered)
    emulated_gpu.setattr(limits, "DISSECTED", SMALL)
    emulated_gpu.setattr(limits, "DISSECTED_TOKENS", (3, 5))
    limits.launch_once(NAMES[:2])
    assert launched == [NAMES[0], NAMES[0], NAMES[1], NAMES[1]]
    assert problem.steps_of(NAMES[:2])[0].spec.name == NAMES[0]
