"""A launch on a page, from a real report, and two of them in words."""

from dataclasses import replace
from pathlib import Path

import pytest

from ptxlab.errors import FileError, UnavailableError
from ptxlab.profile import nsight
from ptxlab.profile.nsight import Profile, ProfiledLaunch
from tests.support.reports import FILE, GEMM, SIZES

WEIGHTS = SIZES["N"] * SIZES["K"]


@pytest.fixture(scope="module")
def gemm() -> ProfiledLaunch:
    return nsight.read(GEMM)[0]


@pytest.fixture(scope="module")
def page(gemm: ProfiledLaunch) -> Profile:
    return nsight.profile_of(gemm, sizes=SIZES, weights=WEIGHTS, origin={"commit": "abc"})


@pytest.mark.smoke
def test_figures_are_made_of_ncus_metrics(gemm: ProfiledLaunch, page: Profile) -> None:
    assert set(page.figures) == {figure.name for figure in nsight.FIGURES}
    figures, number = page.figures, gemm.number
    assert figures["time_us"] == number("gpu__time_duration.sum") / 1e3
    assert figures["per_weight"] == 32 * number("smsp__inst_executed.sum") / WEIGHTS
    assert 1000 < figures["sm_mhz"] < 2000
    assert figures["registers"] == number("launch__registers_per_thread") and figures["threads"] == 128
    assert all(0 <= figures[name] <= 100 for name in nsight.BUSY)
    assert figures["dram_mb"] * 1e6 >= WEIGHTS / 2  # four bits each, from memory


def test_a_hit_rate_that_is_no_share_is_left_out(gemm: ProfiledLaunch) -> None:
    """ncu counts hits and sectors in two passes; where there are few, one pass may see more of another's traffic."""
    (tiny,) = nsight.read(FILE)
    assert tiny.number("lts__t_sector_hit_rate.pct") > 200
    assert "l2_hit_pct" not in nsight.profile_of(tiny).figures
    assert nsight.profile_of(gemm).figures["l2_hit_pct"] == gemm.number("lts__t_sector_hit_rate.pct") < 100


def test_without_the_weights_nothing_is_per_weight(gemm: ProfiledLaunch) -> None:
    figures = nsight.profile_of(gemm).figures
    assert "per_weight" not in figures and len(figures) == len(nsight.FIGURES) - 1


def test_stalls_by_reason_and_by_line(gemm: ProfiledLaunch, page: Profile) -> None:
    assert page.samples == gemm.number("smsp__pcsamp_sample_count")
    assert nsight.ISSUING not in page.stalls and sum(page.stalls.values()) == pytest.approx(1)
    assert list(page.stalls.values()) == sorted(page.stalls.values(), reverse=True)
    issuing = gemm.number("smsp__pcsamp_warps_issue_stalled_selected")
    assert page.issuing == pytest.approx(issuing / page.samples)
    shares = [carrier.share for carrier in page.carriers]
    assert shares == sorted(shares, reverse=True) and 0 < sum(shares) <= 1
    for carrier in page.carriers:
        assert sum(carrier.reasons.values()) == pytest.approx(carrier.share)
        assert carrier.where.count(":") == 1 and carrier.text and carrier.sass


def test_without_a_line_table_instructions_carry_the_stalls() -> None:
    page = nsight.profile_of(nsight.read(FILE)[0])
    assert page.carriers and all(one.where.startswith("+0x") and not one.text for one in page.carriers)


def test_a_report_that_lacks_a_metric_is_refused(gemm: ProfiledLaunch) -> None:
    numbers = {name: number for name, number in gemm.numbers.items() if name != "lts__t_sector_hit_rate.pct"}
    with pytest.raises(UnavailableError, match=r"does not know the metric lts__t_sector_hit_rate\.pct"):
        nsight.profile_of(replace(gemm, numbers=numbers))


def test_a_profile_is_kept_as_json(page: Profile, tmp_path: Path) -> None:
    nsight.save(page, tmp_path / "p.json")
    assert nsight.load(tmp_path / "p.json") == page
    for text, message in (
        ("{", "not JSON: "),
        ("[]", "not a profile of schema 1$"),
        ("{}", "not a profile of schema 1$"),
        ('{"schema": 9}', "not a profile of schema 1$"),
        ((tmp_path / "p.json").read_text().replace('"kernel"', '"core"'), "not a profile: "),
    ):
        (tmp_path / "q.json").write_text(text)
        with pytest.raises(FileError, match=rf"q\.json: {message}"):
            nsight.load(tmp_path / "q.json")


def test_differences_begin_with_the_time_and_leave_out_what_is_the_same(page: Profile) -> None:
    assert nsight.differences(page, page) == [
        f"{page.kernel} is 1.00 times as fast as {page.kernel}: {page.figures['time_us']:.1f} µs, "
        f"not {page.figures['time_us']:.1f}."
    ]
    changed = {"time_us": 2 * page.figures["time_us"], "registers": 250.0, "alu_pct": page.figures["alu_pct"] + 4}
    slower = replace(page, kernel="slower", figures={**page.figures, **changed})
    first, *further_lines = nsight.differences(slower, page)
    assert first.startswith(f"slower takes 2.00 times as long as {page.kernel}: ")
    assert further_lines == [f"Registers: 250 per thread, up from {page.figures['registers']:.0f} per thread."]
    assert nsight.differences(page, slower)[0].startswith(f"{page.kernel} is 2.00 times as fast as slower")


def test_differences_tell_what_stalls_moved_and_other_sizes(page: Profile) -> None:
    changed_page = replace(page, sizes={"M": 256}, stalls={"barrier": 0.5, "long_scoreboard": 0.5})
    differences = nsight.differences(replace(page, stalls={"barrier": 0.1, "long_scoreboard": 0.9}), changed_page)
    assert differences[1] == "They did not do the same: M=16 N=1024 K=2048 g=128 here, M=256 there."
    assert differences[2:] == [
        "Stalls for barrier: 10%, down from 50%.",
        "Stalls for long scoreboard: 90%, up from 50%.",
    ]


@pytest.mark.parametrize(
    ("name", "number", "shown"),
    [
        ("time_us", 37.56, "37.6 µs"),
        ("alu_pct", 36.0, "36%"),
        ("conflicts", 143325.0, "143,325"),
        ("per_weight", 4.7, "4.7"),
        ("registers", None, "-"),
    ],
)
def test_amounts(name: str, number: float | None, shown: str) -> None:
    assert nsight.amount(next(figure for figure in nsight.FIGURES if figure.name == name), number) == shown
