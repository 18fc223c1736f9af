"""`ptxlab quantize` as a person or a script meets it."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from ptxlab import layout


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    w = np.random.default_rng(0).standard_normal((64, 128)).astype(np.float32)
    save_file({"layer.0.up": w, "layer.0.odd": w[:3], "layer.0.bias": w[0]}, tmp_path / "in.safetensors")
    return tmp_path / "in.safetensors"


def test_it_writes_a_checkpoint_that_loads(cli: Any, checkpoint: Path, tmp_path: Path) -> None:
    out = tmp_path / "out.safetensors"
    options = ("--scheme", "qoq", "--group", "32", "--layout", "qserve", "--tensor", "*.0.*", "--out", out)
    code, printed, err = cli("quantize", checkpoint, *options)
    assert code == 0 and err == ""
    text = " ".join(printed.split())
    assert "qoq, group 32, qserve; loaded again, equal in every bit" in text
    assert "layer.0.up 64x128 32,768 4,864 4.75" in text
    assert "copied layer.0.odd F32 [3, 128]: N must be a positive multiple of 8 (N=3)" in text and "bias" not in text
    assert "1 packed, 2 copied:" in text
    assert layout.load(out).layout == "qserve"


def test_as_json(cli: Any, checkpoint: Path, tmp_path: Path) -> None:
    code, printed, _ = cli("quantize", checkpoint, "--out", tmp_path / "out.safetensors", "--json")
    rows = {row["tensor"]: row for row in json.loads(printed)}
    assert code == 0 and list(rows) == ["layer.0.bias", "layer.0.odd", "layer.0.up"]
    assert rows["layer.0.up"] == {
        "tensor": "layer.0.up",
        "shape": [64, 128],
        "packed": {"layout": "strips", "arch": "sm_90a", "scheme": "lqq", "N": 64, "K": 128, "group": 64,
                   "protective_range": 119},
        "copied_because": "",
        "bytes_before": 32768,
        "bytes": 4608,
    }  # fmt: skip
    assert rows["layer.0.bias"]["packed"] is None and rows["layer.0.bias"]["copied_because"] == "not a matrix"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--layout", "zigzag"), "layout: must be one of row_major, qserve, dual_mma, comet, strips (got zigzag)"),
        (("--scheme", "awq"), "scheme: must be one of lqq, qoq, qoq_channel (got awq)"),
        (("--group", "48"), "group: must be one of 32, 64, 128 (got 48)"),
        (("--tensor", "*gone"), "pattern: must match a tensor of"),
        (("--tensor", "*bias"), "in.safetensors: no tensor can be packed: layer.0.bias F32 [128]: not a matrix"),
        (("--out", "no/such/folder/out"), "cannot be written: No such file or directory"),
    ],
)
def test_bad_input_is_one_line(
    cli: Any, checkpoint: Path, tmp_path: Path, options: tuple[str, ...], message: str
) -> None:
    out = tmp_path / "out.safetensors"
    code, printed, err = cli("quantize", checkpoint, "--out", out, *options)
    assert code == 2 and message in err and err.count("\n") == 1 and printed == ""
    assert not out.exists()
