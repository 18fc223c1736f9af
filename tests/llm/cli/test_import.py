"""`ptxlab import` as a person or a script meets it."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from ptxlab.llm.checkpoints.folder import load
from ptxlab.llm.checkpoints.tokenizer import Tokenizer
from ptxlab.llm.model import NumpyRunner, generate
from ptxlab.lowbit import layout
from tests.support.foreign_files import (
    ORDERED_DICT,
    push_text,
    qserve,
    quantize_two_levels,
    write_archive,
    write_model,
    write_torch,
)


@pytest.mark.full
def test_a_model_of_qserve_generates(cli: Any, tmp_path: Path) -> None:
    folder, out = write_model(tmp_path / "theirs", "qserve", container="torch"), tmp_path / "ours"
    code, output, err = cli("import", folder, "--out", out)
    assert code == 0 and err == ""
    summary = " ".join(output.split())
    assert "theirs: QServe per group" in summary and "layer 1 down 128x256 lqq, group 64 exact -" in summary
    assert f"written: {out}" in output.replace("\n", "")
    code, output, _ = cli("generate", "the cat", "--model", out, "--backend", "numpy", "--tokens", 2, "--json")
    prompt = Tokenizer.from_folder(out).encode("the cat").tolist()
    expected = [int(step[0]) for step in generate(NumpyRunner(load(out), 1, 100), [prompt], 2)]
    assert code == 0 and json.loads(output)["tokens"] == [expected]


def test_an_error_that_is_not_zero_is_shown(cli: Any, tmp_path: Path) -> None:
    folder = write_model(tmp_path / "theirs", "gptq")
    code, output, _ = cli("import", folder / "model.safetensors", "--out", tmp_path / "o.safetensors", "--json")
    rows = json.loads(output)
    assert code == 0 and len(rows) == 14 and {row["format"] for row in rows} == {"GPTQ"}
    assert all(0.005 < row["relative_error"] < 0.05 and row["overflows"] == 0 for row in rows)


def test_groups_that_overflow_are_listed(cli: Any, tmp_path: Path) -> None:
    w = np.random.default_rng(0).standard_normal((32, 64)).astype(np.float32)
    q4, s1, s2, zeros = quantize_two_levels(w, 32)
    q4[5, 32:], s2[5, 1], zeros[5, 1] = 15, 16, -100
    arrays = {f"up.{part}": array for part, array in qserve(q4, s1, s2, zeros).items()}
    source, out = write_torch(tmp_path / "quant_model.pt", arrays), tmp_path / "out.safetensors"
    code, _, err = cli("import", source, "--out", out)
    assert code == 2 and err.startswith("error: up.weight: ") and "140..140 in row 5, group 1, scale 16; 1 of 64" in err
    code, output, _ = cli("import", source, "--out", out, "--unchecked")
    assert code == 0 and "up.weight: first overflow: 140..140 in row 5, group 1, scale 16; 1 of 64 groups" in output
    assert "1 of 64" in output


@pytest.mark.full
@pytest.mark.parametrize("command", ["import", "quantize --recipe rtn --group 32", "quantize"])
def test_of_several_processes_one_writes(command: str, tmp_path: Path) -> None:
    """The others are refused in one line, and what is written is whole."""
    source, out = write_model(tmp_path / "in", "qserve"), tmp_path / "out"
    if command == "quantize":
        source, out = source / "model.safetensors", tmp_path / "out.safetensors"
        save_file({f"{i}": np.ones((1024, 1024), np.float32) for i in range(8)}, source)
    words = [sys.executable, "-m", "ptxlab", *command.split(), str(source), "--out", str(out)]
    processes = [subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) for _ in range(3)]
    outcomes = [(*process.communicate(), process.returncode) for process in processes]
    refused = [err for _, err, code in outcomes if code]
    assert all(err.startswith(f"error: {out}: ") and err.count("\n") == 1 for err in refused)
    assert all("another process is writing it" in err or "is there already" in err for err in refused)
    assert {path.name for path in tmp_path.iterdir()} == {"in", out.name}
    if out.is_dir():
        assert len(refused) == 2 and len(load(out).layers) == 2
    else:  # which one process may write after another
        assert len(refused) < 3 and layout.unpack(layout.load(out, "7")).shape == (1024, 1024)


def test_nothing_of_a_file_is_executed(cli: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    program = ORDERED_DICT + b"(" + push_text("a") + b"cos\nsystem\n(" + push_text("touch executed") + b"tRu"
    source = write_archive(tmp_path / "quant_model.pt", program, {})
    code, _, err = cli("import", source, "--out", tmp_path / "out.safetensors")
    assert code == 2 and "holds os.system, not only tensors; nothing was executed" in err and err.count("\n") == 1
    assert {*tmp_path.iterdir()} == {source}
