"""The bench of a `FILE.py` with specs of somebody's own: the project that `ptxlab init` writes."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from ptxlab.bench import user_kernels as own
from ptxlab.bench.ceilings import Ceilings
from ptxlab.cli import init
from ptxlab.errors import ArgumentError, BenchmarkError
from ptxlab.spec.user_specs import SpecWithSources, specs_in

CEILINGS = Ceilings(4.6, 4.2)


@pytest.fixture
def sums(tmp_path: Path) -> SpecWithSources:
    texts = init.project_files("sums", "")
    for name in ("sums.cu", "sums.py"):
        (tmp_path / name).write_text(texts[name])
    (spec,) = specs_in(tmp_path / "sums.py")
    return spec


@pytest.mark.usefixtures("emulated_gpu")
def test_every_copy_is_compared(sums: SpecWithSources) -> None:
    spec, sources = sums
    (row,) = own.rows([sums], CEILINGS, lambda _: None)
    assert (row.kernel, row.measure, row.sizes) == ("sums", "streaming", {"rows": 4, "n": 4096})
    assert (row.bytes, row.operations) == (4 * (4 * 4096 + 4), 4 * 4096)
    assert row.floor_us == pytest.approx(row.bytes / CEILINGS.copy_tbps / 1e6) and row.limit == "copy"
    assert row.checked == "every copy equal to the reference"
    wrong = replace(spec, reference=lambda x: np.append(x[:-1].sum(axis=1, dtype=np.int32), np.int32(7)))
    with pytest.raises(BenchmarkError, match=r"sums\.cu: the timed launches gave wrong .*1 of 4 elements differ"):
        list(own.rows([(wrong, sources)], CEILINGS, lambda _: None))


@pytest.mark.usefixtures("emulated_gpu")
def test_what_is_written_in_place_cannot_be_compared(sums: SpecWithSources) -> None:
    spec, sources = sums
    args = tuple(replace(arg, role="inout") if arg.name == "x" else arg for arg in spec.args)
    (row,) = own.rows([(replace(spec, args=args), sources)], CEILINGS, lambda _: None)
    assert row.checked == "not: it writes in place"


def test_without_sizes_there_is_nothing_to_measure(sums: SpecWithSources) -> None:
    spec, sources = sums
    with pytest.raises(ArgumentError, match=r"sums: example_sizes: sizes to measure at \(got none\)"):
        list(own.rows([(replace(spec, example_sizes=()), sources)], CEILINGS, lambda _: None))
