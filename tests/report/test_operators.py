"""Tables of PyTorch's operators and models, from rows that are made up and from no record."""

from ptxlab.bench.record import Record
from report import operators
from report.frames import MISSING
from tests.support import made_up


def test_tables() -> None:
    of = {"sizes": {"B": 16, "prompt": 32}, "limit": "weights", "peers": {"fp16": 8000.0, "fp8": 6000.0}}
    host = made_up.row(10.0, 1.8, 1, kernel="gemm_w4a8", measure="host time", sizes={}, limit="PyTorch")
    step = made_up.row(1000.0, 4.0, 1, kernel="LLaMA-2-7B", measure="generate", **of)
    record = Record("torch", {"name": "NVIDIA H200"}, {}, {}, (host, step), commit="0123456789ab", date="2026-11-23")
    assert "| `gemm_w4a8` | 18.0 | 10.0 | 8.0 |" in operators.host_table(record)
    assert "| 16 | 4.00 | 4,000 | 2,000 | 2,667 | 2.00x | 1.50x |" in operators.generate_table(record)
    assert "NVIDIA H200, 2026-11-23, commit 0123456789." in operators.generate_table(record)
    assert operators.host_table(None) == operators.generate_table(None) == MISSING
