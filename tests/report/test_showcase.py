"""Plain kernels through the real command line: each mistake is found at its line, and its remedy is clean."""

import json
import re
import runpy
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ptxlab import emulator
from ptxlab.hardware.fragments import mma_a
from report import showcase
from report.showcase import MISTAKES, Mistake

every_mistake = pytest.mark.parametrize("mistake", MISTAKES, ids=lambda mistake: mistake.name)


@pytest.fixture
def kernel_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Copy the kernels and their inputs to the current folder."""
    monkeypatch.chdir(tmp_path)
    for path in showcase.folder().glob("*.*"):
        shutil.copy(path, tmp_path)
    runpy.run_path("inputs.py")
    return tmp_path


@pytest.fixture
def run(kernel_folder: Path, cli: Any) -> Any:
    """Run a mistake's command in this process: (exit code, findings, what the kernel wrote)."""

    def command(mistake: Mistake, *options: str) -> tuple[int, list[dict[str, Any]], dict[str, np.ndarray]]:
        code, out, _ = cli(*mistake.command(*options, "--json", "--out out.npz").split()[1:])
        with np.load("out.npz") as archive:
            return code, json.loads(out)["findings"], dict(archive)

    return command


def line_of(name: str, text: str) -> int:
    """Return the number of the only line that contains the text."""
    (line,) = [i for i, line in enumerate(Path(f"{name}.cu").read_text().splitlines(), 1) if text in line]
    return line


FOUND = {  # kind, what is on the line that is found, on the one that called it, and in the message
    "missing_proxy_fence": ("async-dirty", '"l"(a), "l"(b));', "wgmma(d, ", r"without a fence\.proxy\.async behind it"),
    "reused_fragment": ("async", "a[0] = ", None, r"still in use by line \d+ .*`wgmma.* nobody has waited"),
    "carrying_multiply": ("carry", "mul.lo.u32", "__vsub4(low, z)", r"lane 1 is disturbed by lane 0 .* < 0"),
}


@pytest.mark.parametrize("mode", [(), ("--late",)], ids=emulator.MODES)
@every_mistake
def test_the_mistake_is_found_at_its_line(mistake: Mistake, mode: tuple[str, ...], run: Any) -> None:
    kind, text, call, message = FOUND[mistake.name]
    code, findings, _ = run(mistake, *mode)
    first = findings[0]
    assert code == 1 and {f["kind"] for f in findings} == {kind}
    assert (first["path"], first["line"]) == (f"{mistake.name}.cu", line_of(mistake.name, text))
    assert first["callers"] == ([[first["path"], line_of(mistake.name, call)]] if call else [])
    assert re.search(message, first["message"])


def right(name: str) -> np.ndarray:
    """Compute the kernel's right output from its inputs, in plain NumPy."""
    with np.load(f"{name}.npz") as archive:
        inputs = dict(archive)
    if name == "carrying_multiply":
        q = inputs["q"][:, None] >> np.array([0, 8, 16, 24, 4, 12, 20, 28], np.uint32) & 15
        scale, zero = (np.repeat(inputs[part], 16)[:, None].astype(np.int8) for part in ("scale", "zero"))
        return (q.astype(np.int8) - zero) * scale
    nibbles = inputs["w"][:, None] >> np.arange(0, 32, 4, dtype=np.uint32) & 15
    weights = nibbles.astype(np.int32).reshape(64, -1) - 8
    if name == "reused_fragment":  # [steps, warps, lanes, words], low nibbles before high ones
        words = inputs["w"].reshape(-1, 4, 32, 2)
        registers = np.stack([words & 0x0F0F0F0F, words >> 4 & 0x0F0F0F0F], axis=-1).reshape(-1, 4, 32, 4)
        weights = mma_a(32).gather(registers).astype(np.int32).transpose(1, 2, 0, 3).reshape(64, -1) - 8
    return weights @ inputs["x"].T.astype(np.int32)


@pytest.mark.parametrize("mode", [(), ("--late",)], ids=emulator.MODES)
@every_mistake
def test_the_remedy_is_clean_and_right(mistake: Mistake, mode: tuple[str, ...], run: Any) -> None:
    code, findings, wrote = run(mistake, "-D FIXED", *mode)
    assert code == 0 and findings == []
    assert np.array_equal(next(reversed(wrote.values())), right(mistake.name))


def test_late_shows_what_the_missing_wait_does(run: Any) -> None:
    """Early, the results are right by luck; the finding is the same."""
    mistake = next(m for m in MISTAKES if m.name == "reused_fragment")
    wrong = [not np.array_equal(run(mistake, *mode)[2]["y"], right(mistake.name)) for mode in ((), ("--late",))]
    assert wrong == [False, True]


@every_mistake
def test_the_page_shows_the_lines_that_are_found_and_the_remedy(mistake: Mistake) -> None:
    printed = showcase.output_of(mistake)
    text = (showcase.folder() / f"{mistake.name}.cu").read_text()
    shown = list(showcase.excerpt(text, printed))
    assert len(shown) < 14 and any("#ifdef FIXED" in line or "#ifndef FIXED" in line for line in shown)
    for line in re.findall(rf"{mistake.name}\.cu:(\d+)", printed):
        assert any(row.startswith(f"{line:>3} ") for row in shown)
