"""Which part of the dequantisation a stall is of: by a real report, by opcode and function, and as recorded."""

import json
from pathlib import Path
from typing import Any

import pytest

from ptxlab import sources
from ptxlab.errors import FileError, UnavailableError
from ptxlab.lowbit.bench import stalls
from ptxlab.lowbit.bench.shapes import Layer
from ptxlab.profile import nsight
from ptxlab.profile.launch_target import LaunchTarget
from tests.support.reports import FILE, GEMM, SIZES


@pytest.mark.full
def test_the_parts_of_a_real_launch() -> None:
    (launched,) = nsight.read(GEMM)
    row = stalls.row_of(launched, LaunchTarget(launched.kernel, SIZES), Layer("7B", "down", SIZES["N"], SIZES["K"]))
    # 13 instructions per 8 weights: 3 unpack (some have the caller's line), 2 multiply, 8 subtract (and z's own bits).
    assert row.executed["multiply"] == 2 / 8
    assert 8 / 8 <= row.executed["subtract"] < 9 / 8
    assert 2 / 8 < row.executed["unpack"] <= 3 / 8
    assert 0 < row.subtract < row.dequantise < 1
    assert sum(row.reasons.values()) == pytest.approx(row.subtract) and nsight.ISSUING not in row.reasons
    assert row.stalls == sum(one.stalled for one in launched.instructions)
    assert (row.kernel, row.layer, row.sizes) == (launched.kernel, "7B down", SIZES)


@pytest.mark.full
def test_without_the_dequantisers_source_nothing_is_claimed() -> None:
    (launched,) = nsight.read(FILE)
    with pytest.raises(UnavailableError, match=r"dequant\.cuh is not in the report of add4"):
        stalls.row_of(launched, LaunchTarget("add4"), stalls.FFN[0])


@pytest.mark.parametrize(
    ("sass", "function", "part"),
    [
        ("LOP3.LUT R3, R0, 0x7f7f7f7f, RZ, 0xc0, !PT", "dequant_qoq_vadd4", "subtract"),
        ("IMAD.IADD R3, R0, 0x1, R4", "dequant_qoq_vadd4", "subtract"),
        ("IMAD R3, R0, R4, RZ", "dequant_qoq_vadd4", "multiply"),
        ("@P0 IMAD R3, R0, R4, R5", "mad_u8x4", "multiply"),
        ("LOP3.LUT R3, R0, 0x80808080, RZ, 0x3c, !PT", "dequant_lqq", "subtract"),
        ("LOP3.LUT R3, R0, 0xf0f0f0f, RZ, 0xc0, !PT", "dequant_lqq", "unpack"),
        ("SHF.R.U32.HI R3, RZ, 0x4, R3", "unpack_u4", "unpack"),
        ("IGMMA.64x16x32.S8.S8 R24, R104, gdesc[UR20], R24", "dequant_lqq", ""),
        ("PRMT R3, R4, 0x1111, RZ", "dequant_strip", ""),
        ("IMAD R3, R0, R4, RZ", "", ""),
    ],
)
def test_part_of_an_instruction(sass: str, function: str, part: str) -> None:
    assert stalls.part_of(sass, function) == part


def test_the_dequantisers_are_where_they_are_looked_for() -> None:
    """A function that is renamed or spelt otherwise would be counted as nothing."""
    names = set(stalls.functions_by_line((sources.include_dir() / "dequant.cuh").read_text()).values())
    assert {"unpack_u4", "mul_u8x4", "mad_u8x4", "dequant_qoq_vadd4", "dequant_lqq", "dequant_lqq_unsigned"} <= names


def record() -> stalls.StallRecord:
    rows = tuple(
        stalls.StallRow(
            job.target, str(layer), job.sizes, 9.0, 1000, {"unpack": 0.1, "subtract": 0.05}, {"subtract": 1.0}, {}
        )
        for job, layer in stalls.jobs()
    )
    return stalls.StallRecord({"name": "GPU", "slug": "gpu"}, {"date": "2026-11-22", "commit": "abc", "ncu": "1"}, rows)


def test_a_record_is_kept_as_json(tmp_path: Path) -> None:
    path = stalls.save(record(), tmp_path / "s.json")
    assert stalls.load(path) == record()
    path.write_text(json.dumps({**json.loads(path.read_text()), "schema": 0}))
    with pytest.raises(FileError, match=r"s\.json: not a record of stalls of schema 1$"):
        stalls.load(path)


@pytest.mark.full
def test_tables_have_every_kernel_at_every_point(report: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    head, *rows = stalls.table(record().rows)
    assert [row[0] for row in rows[::2]] == [row[0] for row in rows[1::2]] == list(stalls.KERNELS)
    assert head == ["kernel", "matrix", "M = 16", "M = 64", "M = 256"] and {len(row) for row in rows} == {5}
    assert {cell for row in rows for cell in row[2:]} == {"5% of 15%"}
    monkeypatch.setattr(stalls, "find_record", record)
    lines = report("profiletables").stalls_section().splitlines()
    assert len({line.count("|") for line in lines if line.startswith("|")}) == 1
    assert sum("| 5% | 5% | 5% | 5% | 5% | 5% | 15% to 15% |" in line for line in lines) == len(stalls.KERNELS)
