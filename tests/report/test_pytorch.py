"""The tables of `python -m benchmarks torch`, of a record that is made up."""

from pathlib import Path

import pytest

from ptxlab.bench import Record, Row, save
from report import frames, sections


def row(kernel: str, measure: str, us: float, floor: float, **fields: object) -> Row:
    none = {"source": "torch", "fastest_us": us, "slowest_us": us, "rate_unit": "", "bytes": 0, "operations": 0}
    defaults = {"sizes": {}, "rate": 1e6 / us, "fraction": 0.5, "limit": "", "sm_mhz": 0.0, "checked": "", **fields}
    return Row(kernel=kernel, measure=measure, time_us=us, floor_us=floor, **none, **defaults)  # type: ignore[arg-type]


def test_tables(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = {"B": 16, "prompt": 32}
    peers = {"fp16": 8000.0, "fp8": 4000.0}
    rows = (
        row("gemm_w4a8", "host time", 45.0, 10.0),
        row("LLaMA-2-7B in fp16", "generate", 8000.0, 1.0, sizes=sizes),
        row("LLaMA-2-7B in fp8", "generate", 4000.0, 1.0, sizes=sizes, peers={"fp16": 8000.0}),
        row("LLaMA-2-7B", "generate", 2000.0, 1.0, sizes=sizes, peers=peers, rate=16 / 2000e-6),
    )
    device = {"name": "NVIDIA H200", "slug": "h200"}
    (tmp_path / "h200").mkdir()
    save(Record("torch", device, {}, {}, rows, commit="0123456789ab"), tmp_path / "h200" / "torch.json")
    monkeypatch.setattr(frames, "RESULTS", tmp_path)
    text = sections.SECTIONS["pytorch"]()
    assert "| 16 | 8,000 | 2,000 | 4,000 | 4.00x | 2.00x |" in text
    assert "| `gemm_w4a8` | 45 | 10 | 35 |" in text and "prompts of 32 tokens" in text
    assert "NVIDIA H200, commit 0123456789" in text
