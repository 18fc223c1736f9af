"""Records: round trip, what is refused, comparison, and the rule that makes a record invalid."""

import io
import json
import re
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
from rich.console import Console

from ptxlab import bench, gpu, registry, sources
from ptxlab.bench.ceilings import Ceilings, shortfall
from ptxlab.bench.record import Record, commit
from ptxlab.cli.common import table
from ptxlab.errors import ArgumentError, BenchmarkError, FileError
from ptxlab.lowbit import cost
from ptxlab.runtime.timing import BEYOND_L2, clock_mhz, copies_beyond_l2
from tests.support.bench_rows import ROW, slow_down

RECORD = Record(
    suite="dequant",
    device={"name": "NVIDIA H200", "slug": "h200", "driver": "580.1", "sms": 132},
    versions={"cupy": "14.2.0"},
    ceilings={"read_tbps": 4.65, "copy_tbps": 4.26},
    rows=(ROW, replace(ROW, source="cu", rate=3900.0)),
)


def test_round_trip(tmp_path: Path) -> None:
    path = bench.save(RECORD, tmp_path / "new" / "folder" / "r.json")
    assert bench.load(path) == RECORD
    assert [p.name for p in path.parent.iterdir()] == ["r.json"]
    bench.save(replace(RECORD, invalid="slow"), path)
    assert bench.load(path).invalid == "slow"
    rows = [line for line in path.read_text().splitlines() if line.startswith('{"kernel":')]
    assert [json.loads(row.rstrip(",")) for row in rows] == RECORD.to_json()["rows"], "a line per row"


def test_default_path() -> None:
    assert bench.default_path(RECORD).parts[-3:] == ("results", "h200", "dequant.json")
    user_record = replace(RECORD, suite="gemm.py")
    assert bench.default_path(user_record) == Path("gemm-h200.json"), "the project's record stays"


def test_record_says_when_and_what() -> None:
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\+00:00", RECORD.date)
    assert re.fullmatch(r"[0-9a-f]{40}\+?|unknown", commit())


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "not JSON"),
        ("[]", "not a benchmark record of schema 1"),
        (json.dumps({**RECORD.to_json(), "schema": 99}), "not a benchmark record of schema 1"),
        (json.dumps({**RECORD.to_json(), "rows": [{"kernel": "x"}]}), "not a benchmark record: "),
        (json.dumps({**RECORD.to_json(), "surprise": 1}), "surprise"),
        (json.dumps({k: v for k, v in RECORD.to_json().items() if k != "rows"}), "rows"),
        (json.dumps(RECORD.to_json()).replace("4000.0", '"fast"'), "rate is no number"),
    ],
    ids=("no_json", "no_object", "schema", "row", "unknown_key", "no_rows", "rate"),  # workers must agree: no dates
)
def test_files_that_are_no_records(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "r.json"
    path.write_text(text)
    with pytest.raises(FileError, match=re.escape(message)) as raised:
        bench.load(path)
    assert str(raised.value).startswith(str(path)) and "\n" not in str(raised.value)


def test_missing_file(tmp_path: Path) -> None:
    with pytest.raises(FileError, match="cannot be read: No such file"):
        bench.load(tmp_path / "nothing.json")


@pytest.mark.parametrize(("rate", "slower"), [(4000.0, False), (5000.0, False), (3885.0, False), (3875.0, True)])
def test_compare(rate: float, slower: bool) -> None:
    new_record = replace(RECORD, rows=(slow_down(ROW, rate / ROW.rate), RECORD.rows[1]))
    slower_rows = bench.compare(new_record, RECORD)
    assert [row_found.row.source for row_found in slower_rows] == (["ptx"] if slower else [])
    if slower:
        text = "dequant_lqq.ptx streaming (R=16384, K=16384, g=128): 3875 GB/s, was 4000 (3.1% less), +3.2% cycles at "
        assert str(slower_rows[0]) == text + f"{ROW.sm_mhz:.0f} MHz"


@pytest.mark.parametrize(
    ("rate", "clock", "slower"), [(3600.0, 0.9, False), (3600.0, 0.95, True), (4000.0, 1.1, False)]
)
def test_a_lower_clock_alone_makes_no_slower_kernel(rate: float, clock: float, slower: bool) -> None:
    """10% less under a clock that is 10% lower is the card's temperature; under one that is 5% lower it is not."""
    row = replace(slow_down(ROW, rate / ROW.rate), sm_mhz=clock * ROW.sm_mhz)
    slower_rows = bench.compare(replace(RECORD, rows=(row, RECORD.rows[1])), RECORD)
    assert [slower_row.row for slower_row in slower_rows] == ([row] if slower else [])


@pytest.mark.parametrize(("floor", "slower"), [(1.0, True), (1.02, True), (1.04, False)])
def test_a_floor_that_rose_as_much_makes_no_slower_kernel(floor: float, slower: bool) -> None:
    """5% more time over a floor that is 4% higher is another card's memory; over one that is 2% higher it is not."""
    row = slow_down(ROW, 1 / 1.055)
    row = replace(row, floor_us=floor * ROW.floor_us, fraction=floor * row.fraction)
    slower_rows = bench.compare(replace(RECORD, rows=(row, RECORD.rows[1])), RECORD)
    assert [slower_row.row for slower_row in slower_rows] == ([row] if slower else [])


def test_a_row_whose_replays_overlap_the_old_ones_is_not_slower() -> None:
    """Two speeds that a kernel has by turns: the median of the replays may be either."""
    fast, slow = 0.9 * ROW.time_us, ROW.time_us
    old_record = replace(
        ROW, time_us=fast, fastest_us=fast, slowest_us=slow, rate=ROW.rate / 0.9, fraction=ROW.fraction / 0.9
    )
    for fastest, slower in ((fast, False), (1.01 * slow, True)):
        new_record = replace(ROW, time_us=1.01 * slow, fastest_us=fastest, slowest_us=1.02 * slow, rate=ROW.rate / 1.01)
        slower_rows = bench.compare(replace(RECORD, rows=(new_record,)), replace(RECORD, rows=(old_record,)))
        assert bool(slower_rows) == slower


def test_what_is_slower_is_measured_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """A row that is as fast as before somewhere in memory was slow by chance; what no kernel's own run has stays."""
    names = ("dequant_lqq", "dequant_qoq_vadd4", "gemm_w8a8_sm90", "a, b", "quantize_activations_s8")
    rows = {name: replace(ROW, kernel=name, sizes={"N": 8, "K": 64}) for name in names}
    old_record = replace(RECORD, rows=tuple(rows.values()))
    slower_rows = bench.compare(
        replace(old_record, rows=tuple(slow_down(row, 0.9) for row in old_record.rows)), old_record
    )
    assert len(slower_rows) == 5
    speeds = {"dequant_lqq": [1.0], "dequant_qoq_vadd4": [0.9, 0.9, 0.9], "gemm_w8a8_sm90": [0.9, 1.0]}
    places: list[int] = []

    def run(kernel: str, progress: Callable[[str], None], matrices: set[tuple[int, int]] | None) -> Record:
        assert matrices == ({(8, 64)} if kernel == "gemm_w8a8_sm90" else None)
        return replace(RECORD, rows=(slow_down(rows[kernel], speeds[kernel].pop(0)),))

    monkeypatch.setattr(bench, "run_suite", run)
    monkeypatch.setattr(bench.gpu, "allocating_elsewhere", lambda nbytes: nullcontext(places.append(nbytes)))
    still = [slower_row.row.kernel for slower_row in bench.confirm_slower(slower_rows, old_record)]
    assert still == ["dequant_qoq_vadd4", "a, b", "quantize_activations_s8"]
    assert not any(speeds.values()) and len(set(places)) == 3
    assert bench.confirm_slower([], old_record) == []


@pytest.mark.parametrize("suite", ["dequant", "attention_kv4_sm90", "emulator", "sums.py"])
def test_matrices_are_a_gemm_s(suite: str) -> None:
    with pytest.raises(ArgumentError, match=r"matrices: must be None for the suite [\w.]+ \(got \{\(8, 64\)\}\)"):
        bench.run_suite(suite, matrices={(8, 64)})


def test_compare_only_the_same_measurement() -> None:
    other_rows = [
        replace(ROW, kernel="dequant_comet", rate=1.0),
        replace(ROW, measure="registers", rate=1.0),
        replace(ROW, sizes={"R": 1, "K": 32, "g": 32}, rate=1.0),
        replace(ROW, config={"STAGES": 2}, rate=1.0),
    ]
    assert bench.compare(replace(RECORD, rows=tuple(other_rows)), RECORD) == []
    with pytest.raises(ArgumentError, match=r"against: a record of b200 \(got h200\)"):
        bench.compare(replace(RECORD, device={"slug": "b200"}), RECORD)


@pytest.mark.parametrize(
    ("read", "copy", "reason"),
    [
        (4.65, 4.26, ""),
        (4.52, 4.14, ""),
        (4.50, 4.26, "memory read reaches 4.50 TB/s, 3% below the 4.65 of this card"),
        (4.65, 4.00, "memory copy reaches 4.00 TB/s, 6% below the 4.26 of this card"),
    ],
)
def test_slow_card_makes_the_record_invalid(read: float, copy: float, reason: str) -> None:
    assert shortfall(Ceilings(read, copy), "h200") == reason
    assert shortfall(Ceilings(read, copy), "some-other-gpu") == ""


def test_sheets() -> None:
    assert cost.sheet("h200").sms == 132
    with pytest.raises(ArgumentError, match=r"device: a GPU with a sheet: h200 \(got h300\)"):
        cost.sheet("h300")


def test_tables_show_rows_and_the_title_invalidity() -> None:
    title = bench.title(replace(RECORD, invalid="memory is slow"))
    assert title.startswith("dequant on NVIDIA H200") and title.endswith("NOT VALID: memory is slow")
    ((title, columns, rows),) = bench.as_tables(replace(RECORD, rows=(ROW,)))
    assert title == "streaming, dequant_lqq.ptx" and columns == ["sizes", "µs>", "GB/s>", "of floor"]
    assert rows == [["R=16384 K=16384 g=128", "100.0", "4000.0", " 95% copy 4.26 TB/s"]]
    with_peers = replace(RECORD, rows=(replace(ROW, peers={"slow": 130.0, "fast": 101.0}),))
    assert bench.as_tables(with_peers)[0][2][0][-1] == "1.01x fast"


def test_what_all_rows_share_is_in_the_title_of_their_table() -> None:
    comet_row = replace(ROW, kernel="dequant_comet", sizes={**ROW.sizes, "g": 64})
    ((title, columns, rows),) = bench.as_tables(replace(RECORD, rows=(ROW, comet_row)))
    assert title == "streaming, R=16384 K=16384" and columns[:2] == ["kernel", "sizes"]
    assert [row[:2] for row in rows] == [["dequant_lqq.ptx", "g=128"], ["dequant_comet.ptx", "g=64"]]
    faces = [replace(ROW, sizes={"M": M}, kernel="gemm_w4a8_sm90", face="gemm_w4a8") for M in (16, 64)]
    tables = bench.as_tables(replace(RECORD, rows=(ROW, *faces, replace(faces[0], kernel="gemm_w4a8_small_sm90"))))
    assert [title for title, *_ in tables] == ["streaming, dequant_lqq.ptx", "streaming, gemm_w4a8"]
    assert [row[0] for row in tables[1][2]] == ["sm90", "sm90", "small_sm90"]


def lines_at(width: int, columns: list[str], rows: list[list[str]]) -> int:
    file = io.StringIO()
    Console(file=file, width=width).print(table("", columns, rows))
    return len(file.getvalue().splitlines())


@pytest.mark.full_cases("gemm")
@pytest.mark.parametrize("suite", ["dequant", "load", "gemm", "attention"])
def test_no_row_of_a_suite_is_broken_at_100_columns(suite: str) -> None:
    for title, columns, rows in bench.as_tables(bench.load(sources.results_dir() / "h200" / f"{suite}.json")):
        assert len(rows) < lines_at(100, columns, rows) == lines_at(1000, columns, rows), title


def test_clock_rate() -> None:
    first_stamps = {0: (1000, 5000), 1: (0, 5000), 7: (1, 1)}
    last_stamps = {0: (1000 + 1980, 6000), 1: (2 * 1985, 7000), 9: (1, 2)}
    assert clock_mhz(first_stamps, last_stamps) == pytest.approx((1980 + 1985) / 2)
    with pytest.raises(BenchmarkError, match="no SM was stamped twice"):
        clock_mhz({0: (1, 1)}, {1: (2, 2)})


def test_rotation() -> None:
    assert copies_beyond_l2(BEYOND_L2) == copies_beyond_l2(10 * BEYOND_L2) == 1
    assert copies_beyond_l2(8_650_000) * 8_650_000 >= BEYOND_L2


@pytest.mark.parametrize("suite", registry.entries("suites"))
def test_every_suite_runs(suite: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu, "device_info", lambda: SimpleNamespace(**RECORD.device, l2_bytes=0, memory_bytes=0))
    monkeypatch.setattr(bench, "measure_ceilings", lambda: Ceilings(4.6, 4.2))
    monkeypatch.setattr(bench, "versions", lambda _: {})
    registered, names = bench.suite_of(suite)
    assert suite == registered.name and (names or suite == "emulator")
    assert bench.run_suite(replace(registered, rows=lambda *_: [ROW])).rows == (ROW,)


def test_a_record_without_peers_has_a_name_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """It does not take the place of the record with peers, from which tables are made."""
    monkeypatch.setattr(bench, "_record", lambda name, *_: name)
    assert bench.run_suite("gemm") == "gemm_ours" and bench.run_suite("gemm", peers=None) == "gemm"
    assert bench.run_suite("gemm", only=["w4a4"]) == "gemm_w4a4_ours" and bench.run_suite("dequant") == "dequant"
    assert bench.run_suite("gemm_w4a8_sm90") == "gemm_w4a8_sm90"


@pytest.mark.parametrize("suite", ["decode", "layer", "torch"])
def test_suites_that_time_other_projects_say_where_they_are(suite: str) -> None:
    with pytest.raises(ArgumentError, match=rf"run `python -m benchmarks {suite}` in notebooks/"):
        bench.run_suite(suite)


def test_unknown_suite() -> None:
    with pytest.raises(ArgumentError, match="dequant_lqq"):
        bench.run_suite("dequant_lqqq")
