"""The table of the documents' systems: its figures are the record's, its commands run, and what they write speaks."""

import json
import re
from pathlib import Path
from typing import Any

import pytest

from ptxlab.llm.checkpoints import folder as folders
from ptxlab.llm.recipe.systems import SYSTEMS, ServingSystem
from report import accuracy, frames, sections, systems
from tests.support import fake_rows
from tests.support.markdown_pages import ROOT
from tests.support.small_models import write_folder


def command(system: ServingSystem) -> str:
    return f"quantize MODEL {system.options} --out DIR"


def test_the_figures_are_those_of_the_record(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(accuracy, "RESULTS", tmp_path)
    assert "| Atom | Atom §4 | `ptxlab quantize MODEL --recipe atom --group 128 --out DIR` |  |" in systems.section()
    assert sections.SECTIONS["accuracy_systems"]() == frames.MISSING
    rows = [
        {"ladder": ladder, "step": step, "seed": 0, "perplexity": {"wikipedia": perplexity}}
        for (ladder, step), perplexity in {("float", "float32"): 20.0, ("systems", "Atom"): 25.0}.items()
    ]
    record = {**fake_rows.ACCURACY, "windows": {"wikipedia": [2, 512]}, "calibration": [8, 512], "rows": rows}
    (tmp_path / "accuracy_systems.json").write_text(json.dumps(record))
    assert "--recipe atom --group 128 --out DIR` | 1.250x | [GEMM](notebooks/guide/w4a4.md)" in systems.section()
    text = sections.SECTIONS["accuracy_systems"]()
    assert "| systems | Atom | 25.00 | 1.250x |\n" in text and "wikipedia: 2 windows of 512" in text


def test_every_system_is_recorded_and_on_the_page() -> None:
    measured = accuracy.points(systems.load_record())
    assert {system.name for system in SYSTEMS} == set(measured.step[measured.ladder == "systems"])
    page = (ROOT / "notebooks" / "guide" / "README.md").read_text()
    assert re.findall(r"`ptxlab (quantize MODEL [^`]*)`", page) == [command(system) for system in SYSTEMS]


@pytest.mark.default_cases("COMET")
@pytest.mark.parametrize("system", SYSTEMS, ids=lambda system: system.name)
def test_the_command_runs(system: ServingSystem, cli: Any, tmp_path: Path) -> None:
    """The model has random weights and a little text; then a text is generated from the folder in NumPy."""
    sizes = {"hidden_size": 256, "intermediate_size": 384}
    model, text, out = write_folder(tmp_path / "model", "smollm", **sizes), tmp_path / "text.txt", tmp_path / "out"
    text.write_text("the cat and the dog and the other cat\n" * 40)
    words = [{"MODEL": model, "DIR": out}.get(word, word) for word in command(system).split()]
    code, _, err = cli(*words, "--text", text, "--samples", 2, "--length", 32)
    assert code == 0, err
    written, settings = json.loads((out / "recipe.json").read_text())["recipe"], system.settings
    assert written["group"] == (system.group or settings.group)
    for name in ("scheme", "acts", "int8", "kv"):
        assert written[name] == getattr(settings, name)
    assert folders.load(out).layers[0].cache == (settings.kv if settings.calibrates_cache else "kv4")
    code, output, err = cli("generate", "the cat", "--model", out, "--tokens", 3, "--backend", "numpy", "--json")
    assert code == 0, err
    assert len(json.loads(output)["texts"]) == 1
