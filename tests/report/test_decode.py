"""Tables of whole models, from rows that are made up and from no record."""

from ptxlab.bench import models
from ptxlab.bench.ceilings import Ceilings
from ptxlab.bench.layer.decoder import Alone
from ptxlab.bench.record import Record, Row
from ptxlab.bench.timing import Measured
from report import decode
from report.frames import MISSING
from tests.support import made_up

SEVEN = models.MODELS[1]


def record() -> Record:
    work = [models.Work("gemm qkv", 9_200_000_000, 1)]
    apart = Alone({"gemm qkv": 50.0, "attention": 10.0}, {"gemm qkv": "gemm", "attention": "attention"})
    measured = Measured(4000.0, 4000.0, 4000.0, 1900.0)
    peers = {"fp8_row/sdpa": 8000.0, "fp8_tensor/sdpa": 6000.0, "without": 5000.0}
    step = models.row_at(SEVEN, 16, measured, work, apart, 80.0, Ceilings(4.6, 4.2), "made up", peers, {})
    more = {"decode_us": 4e6, "fp8_row/sdpa tokens_per_second": 10_000.0, "fp8_row/xqa tokens_per_second": 8_000.0}
    sizes = models.sizes_of(SEVEN, 100, 80)
    whole: Row = made_up.row(1.0, 2.0, 1, kernel="x", measure="generate", sizes=sizes, limit="itself", more=more)
    rows = (step, Row(**{**vars(whole), "rate": 12_000.0}))
    return Record("decode/LLaMA-2-7B", {"name": "NVIDIA H200"}, {}, {}, rows, commit="0123456789ab", date="2026-11-23")


def test_tables() -> None:
    steps, whole = decode.steps_table([record()]), decode.generate_table([record()])
    row = "| LLaMA-2-7B | 16 | 4.00 | 4,000 | 0.50 | 40% | 8% | 0% | 2% |  | 1.50x |  | 1.25x |"
    assert row in steps and "NVIDIA H200, commit 0123456789" in steps
    assert "| LLaMA-2-7B | 80 | 100 | 12,000 | 12,800 |  | 1.20x |  | 6,721 | 194 |" in whole
    assert decode.steps_table([]) == decode.generate_table([]) == MISSING


def test_the_papers_figures_are_of_the_models_that_are_measured() -> None:
    assert list(decode.LIQUIDSERVE) == [config.name for config in models.MODELS]
