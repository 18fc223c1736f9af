"""The report on W4A4: every figure and every schedule has its row, and the picture its panels."""

from ptxlab.cost.published import FIGURES
from ptxlab.cost.schedule import COMET, SCHEDULES
from report import figures, w4a4


def rows(table: str) -> list[list[str]]:
    """Cells of a Markdown table's body."""
    lines = [line for line in table.splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[2:]]


def test_every_claim_and_every_gpu_has_its_row() -> None:
    figures = rows(w4a4.figures_table())
    assert [(row[0], row[1], row[2]) for row in figures] == [(c.source, c.device, c.scheme) for c in FIGURES]
    assert all(row[-1].endswith("%") for row in figures)
    assert [row[0] for row in rows(w4a4.choice_table())] == ["rtx3090", "rtx4090", "l40s", "a100"]


def test_every_schedule_is_beside_comets() -> None:
    found = rows(w4a4.schedule_table())
    assert [(row[0], row[1]) for row in found] == [(model, name) for model in COMET for name in SCHEDULES]
    assert [float(row[2].rstrip("x")) for row in found] == [COMET[row[0]][row[1]] for row in found]
    assert [row[5] for row in found if row[1] == "naive"] == ["1.00x", "1.00x"]


def test_the_picture_says_how_busy_the_sms_are() -> None:
    titles = [axes.get_title(loc="left") for axes in figures.picture("w4ax_schedules").axes]
    assert titles[:3] == [
        "naive: 10, SMs busy 68%",
        "remapped: 7, SMs busy 96%",
        "decomposed: 6.75, SMs busy 100%",
    ]
    assert len(titles) == 6
