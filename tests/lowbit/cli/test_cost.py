"""The commands `cost` and `cost schedule`."""

import json
from pathlib import Path
from typing import Any

import pytest

from ptxlab.lowbit.cost.published import FIGURES


def test_schemes_are_chosen_by_name(cli: Any) -> None:
    code, out, _ = cli("cost", "--device", "RTX3090", "--scheme", "w4a4,W4Ax,w4a8-sm80", "--json")
    report = json.loads(out)
    assert code == 0 and (report["M"], report["N"], report["K"]) == (512, 4096, 4096)
    names = ["W4A4", "W4A4 outlier", "W4A4 g128", "W4A4 Atom", "W4Ax g128", "W4Ax token", "W4A8 sm80"]
    assert [entry["scheme"]["name"] for entry in report["schemes"]] == names
    atom = report["schemes"][3]
    assert atom["cost"]["scale_us"] > atom["cost"]["dequantise_us"] > 0 and atom["counts"]["tile"] == 64
    code, out, _ = cli("cost", "--device", "rtx3090", "--scheme", "w4a4")
    assert code == 0 and "W4A4 outlier" in out and "scale" in out


def test_papers_beside_the_model(cli: Any) -> None:
    code, out, _ = cli("cost", "--papers")
    assert code == 0 and all(figure.source.split()[0] in out for figure in FIGURES) and "0.43" in out
    output = json.loads(cli("cost", "--papers", "--json")[1])
    assert [entry["scheme"] for entry in output] == [figure.scheme for figure in FIGURES]
    assert all(entry["overlapped"] >= entry["in_turn"] > 0 for entry in output)


@pytest.mark.full
def test_schedules_beside_comet(cli: Any, tmp_path: Path) -> None:
    picture = tmp_path / "schedules.png"
    code, out, _ = cli("cost", "schedule", "--spread", "--conversion", "0.24", "--plot", str(picture))
    assert (
        code == 0 and "2.24 INT4 tiles" in " ".join(out.split()) and "1.71x." in out and picture.stat().st_size > 9_000
    )
    code, out, _ = cli("cost", "schedule", "--model", "Mistral-7B", "--sms", "82", "--json")
    report = json.loads(out)
    assert code == 0 and (report["bound"], report["ratio"], report["sms"]) == (pytest.approx(1.6), 2, 82)
    assert list(report["over_w4a8"]) == ["naive", "in order", "remapped", "decomposed", "stealing"]
    assert "1.56x" in cli("cost", "schedule")[1] and "1.71x" not in cli("cost", "schedule", "--sms", "82")[1]
    assert "GPUs by their data sheets" not in cli("cost", "schedule", "--model", "Mistral-7B")[1]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--device", "rtx3080"), "nearest: rtx3090, rtx4090"),
        (("--device", "a100", "--scheme", "w4a5"), "scheme: a known one; nearest: w4a"),
        (("--device", "h100", "--scheme", "w4a4"), "scheme: one that h100 runs: it multiplies fp16, fp8, int8"),
        (("--device", "h200-measured", "--scheme", "w4ax-token"), "scheme: one that h200-measured runs"),
        (("--papers", "--device", "a100"), "--device cannot be combined with --papers"),
        (("--device", "a100", "schedule"), "--device is no option of `schedule`: leave it out"),
        (("schedule", "--model", "LLaMA-9"), "LLaMA-3-8B"),
        (("schedule", "--sms", "0"), "sms: 1 to 100,000 (got 0)"),
        (("schedule", "--tokens", "0"), "--tokens expects 1 or more, got 0"),
        (("schedule", "--int8-cost", "1e308"), "int8: a time above 0, at most 1e+06 (got 1e+308)"),
        (("schedule", "--int4", "1.5"), "--int4 expects a share of 0 to 1, got 1.5"),
        (("schedule", "--int4", "2"), "--int4 expects a share of 0 to 1, got 2.0"),
        (("schedule", "--int4", "nan"), "--int4 expects a share of 0 to 1, got nan"),
        (("schedule", "--int8-cost", "-1"), "int8: a time above 0, at most 1e+06 (got -1.0)"),
        (("schedule", "--plot", "picture.txt"), "--plot expects a .png"),
        (("schedules",), "no such command"),
    ],
)
def test_bad_input_is_one_line(cli: Any, arguments: tuple[str, ...], message: str) -> None:
    code, out, err = cli("cost", *arguments)
    assert code == 2 and message in err and len(err.strip().splitlines()) == 1 and not out
