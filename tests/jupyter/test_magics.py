"""`%%ptx` and `%%cuda` in a real IPython shell."""

import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from IPython.core.interactiveshell import InteractiveShell

import ptxlab
from ptxlab import toolchain
from ptxlab.errors import ArgumentError, CompileError, MemoryFault, SourceError, UnavailableError
from ptxlab.jupyter import Cell
from tests.jupyter.conftest import CUDA, PTX

WORDS = np.random.default_rng(0).integers(0, 2**32, (2, 32), dtype=np.uint32)


def run(shell: InteractiveShell, options: str, text: str) -> Cell:
    done = shell.run_cell(f"%%{options}\n{text}")
    done.raise_error()
    return done.result


def error_of(shell: InteractiveShell, options: str, text: str) -> Exception:
    done = shell.run_cell(f"%%{options}\n{text}")
    assert done.result is None and done.error_in_exec is not None
    return done.error_in_exec


def line_of(text: str, part: str) -> int:
    """Return the number of the line in the cell, whose first line is the magic's."""
    return 2 + next(i for i, line in enumerate(text.splitlines()) if part in line)


@pytest.mark.smoke
def test_a_cell_of_ptx_is_bound_and_counted(shell: InteractiveShell) -> None:
    cell = run(shell, "ptx", PTX)
    report = cell.reports["add4"]
    assert report.registers > 0 and report.opcodes["STG.E"] == 1 and "add4 (ptx, sm_90a, ptxas" in repr(cell)
    got = shell.user_ns["add4"](*WORDS, np.empty_like(WORDS[0]), grid=1, block=32, backend="emulator")
    np.testing.assert_array_equal(got.outputs["sum"], WORDS[0] + WORDS[1])
    assert got.findings == ()


def test_checks_are_those_of_every_call_and_findings_point_at_the_cells_line(shell: InteractiveShell) -> None:
    run(shell, "ptx --check lanes,race", PTX)
    kernel, out = shell.user_ns["add4"], np.empty_like(WORDS[0])
    assert kernel.checks == {"lanes", "race"}
    findings = kernel(*WORDS, out, grid=1, block=32).findings
    assert findings and {(f.path, f.line) for f in findings} == {("<cell add4>", line_of(PTX, "add.u32"))}
    assert kernel(*WORDS, out, grid=1, block=32, checks=(), backend="emulator").findings == ()


@pytest.mark.full
def test_a_cell_of_cuda_with_constants(shell: InteractiveShell) -> None:
    cell = run(shell, "cuda -D SCALE=300 --check lanes", CUDA)
    assert list(cell.kernels) == ["scale", "nothing"] and shell.user_ns["nothing"].parameters == ()
    findings = shell.user_ns["scale"](np.full(32, 0x0F0F0F0F, np.uint32), grid=1, block=32).findings
    assert {(f.path, f.line) for f in findings} == {("<cell scale>", line_of(CUDA, "mul.lo"))}
    assert "15 * 300 = 4500" in findings[0].message


@pytest.mark.full
def test_one_of_several_kernels(shell: InteractiveShell) -> None:
    cell = run(shell, "cuda -D SCALE=2 --kernel nothing", CUDA)
    assert list(cell.kernels) == list(cell.reports) == ["nothing"] and "scale" not in shell.user_ns
    assert "one of scale, nothing (got other)" in str(error_of(shell, "cuda -D SCALE=2 --kernel other", CUDA))


def test_quiet_binds_and_shows_nothing(shell: InteractiveShell) -> None:
    assert run(shell, "ptx -q", PTX) is None
    assert isinstance(shell.user_ns["add4"], ptxlab.Kernel)


def test_a_changed_cell_says_what_changed(shell: InteractiveShell) -> None:
    first = run(shell, "ptx", PTX)
    again = run(shell, "ptx", PTX)
    assert first.earlier == {} and "was" not in repr(again)
    changed = run(shell, "ptx", PTX.replace("add.u32 %x0, %x0, %x1; ", "vadd4.u32.u32.u32 %x0, %x0, %x1, %none; //"))
    was = sum(first.reports["add4"].opcodes.values())
    assert f"instructions (was {was})" in repr(changed)


def test_machine_code_by_line(shell: InteractiveShell) -> None:
    cell = run(shell, "ptx --listing", PTX)
    assert "IADD3" in {i.opcode for i in cell.listing["<cell add4>", line_of(PTX, "add.u32")]}
    assert [i.opcode for i in cell.listing["<cell add4>", line_of(PTX, "st.global")]] == ["STG", "EXIT"]


@pytest.mark.full
def test_machine_code_of_headers_stands_at_their_lines(shell: InteractiveShell) -> None:
    text = """\
#include "dequant.cuh"
extern "C" __global__ void unpack(const unsigned* q, uint2* out) {
    out[threadIdx.x] = ptxlab::dequant_lqq(q[threadIdx.x], 7, 0x09090909);
}
"""
    cell = run(shell, "cuda --listing", text)
    opcodes = {name: {i.opcode for (path, _), code in cell.listing.items() if path.endswith(name) for i in code}
               for name in ("<cell unpack>", "dequant.cuh")}  # fmt: skip
    assert {"LDG", "STG"} <= opcodes["<cell unpack>"] and "LOP3" not in opcodes["<cell unpack>"]
    assert {"LOP3", "IMAD"} <= opcodes["dequant.cuh"]
    assert sum(map(len, cell.listing.values())) == sum(cell.reports["unpack"].opcodes.values())


def test_warnings_name_the_cells_line(shell: InteractiveShell) -> None:
    text = """\
.version 8.0
.target sm_90a
.address_size 64
.visible .entry early(.param .u64 out) {
    .reg .u32 %d<4>, %a<4>; .reg .u64 %o, %b; .reg .pred %p;
    .shared .align 128 .b8 tile[256];
    mov.u64 %b, tile; ld.param.u64 %o, [out]; setp.eq.u32 %p, 0, 0;
    mov.u32 %a0, 1; mov.u32 %a1, 2; mov.u32 %a2, 3; mov.u32 %a3, 4;
    mov.u32 %d0, 0; mov.u32 %d1, 0; mov.u32 %d2, 0; mov.u32 %d3, 0;
    wgmma.fence.sync.aligned;
    wgmma.mma_async.sync.aligned.m64n8k32.s32.s8.s8 {%d0, %d1, %d2, %d3}, {%a0, %a1, %a2, %a3}, %b, %p;
    wgmma.commit_group.sync.aligned;
    add.u32 %d0, %d0, 1;
    wgmma.wait_group.sync.aligned 0;
    st.global.v4.u32 [%o], {%d0, %d1, %d2, %d3};
    ret;
}
"""
    cell = run(shell, "ptx", text)
    (remark,) = cell.remarks
    assert remark.place == f"<cell early>:{line_of(text, 'add.u32')}" and "C7517" in remark.text
    assert "warning: (C7517) wgmma.wait_group is injected" in repr(cell)


@pytest.mark.full
def test_warnings_about_cuda_name_the_line_of_cuda(shell: InteractiveShell) -> None:
    """They do not name the line of the PTX that NVRTC made of it.

    Here an accumulator changes while wgmma adds to it.
    """
    text = (Path(__file__).parent.parent / "outside" / "reused_fragment.cu").read_text()
    call = "wgmma(d, a, descriptor(tokens[2 * step], 128, 128));"
    assert call in text
    cell = run(shell, "cuda --arch sm_90a", text.replace(call, f"{call}\n        d[0] ^= step;"))
    (remark,) = cell.remarks
    assert remark.place == f"<cell w4a8>:{line_of(text, call) + 1}" and "C7517" in remark.text
    assert f"around line {remark.line} " in remark.text


@pytest.mark.parametrize(
    ("options", "text", "line"),
    [
        ("ptx", PTX.replace("add.u32 %x0", "ad.u32 %x0"), line_of(PTX, "add.u32")),
        ("cuda -D SCALE=2", CUDA.replace("unsigned x", "unsignd x"), line_of(CUDA, "unsigned x")),
        ("cuda", CUDA, line_of(CUDA, "SCALE")),
        ("cuda -D SCALE=2", CUDA.replace("mul.lo.u32", "mul.low.u32"), line_of(CUDA, "mul.lo")),
    ],
)
def test_errors_point_at_the_cells_line(shell: InteractiveShell, options: str, text: str, line: int) -> None:
    error = error_of(shell, options, text)
    assert isinstance(error, CompileError) and error.line == line
    shown = error._render_traceback_()
    assert shown[0].startswith("CompileError: <cell ") and not any("Traceback" in part for part in shown)
    (arrow,) = [part for part in shown if part.startswith("---->")]
    number, pointed = re.match(r"----> +(\d+) (.*)", arrow).groups()
    assert (int(number), pointed) == (line, ["", *text.splitlines()][line - 1])


def test_errors_of_a_launch_show_the_line_and_no_frame_of_ours(
    shell: InteractiveShell, capsys: pytest.CaptureFixture[str]
) -> None:
    run(shell, "ptx", PTX)
    shell.user_ns |= {"a": WORDS[0], "short": np.empty(8, np.uint32)}
    capsys.readouterr()
    done = shell.run_cell("add4(a, a, short, grid=1, block=32, backend='emulator')")
    assert isinstance(done.error_in_exec, MemoryFault)
    printed = re.sub(r"\x1b\[[\d;]*m", "", capsys.readouterr().out)
    line = line_of(PTX, "st.global")
    assert f"---->  {line} {PTX.splitlines()[line - 2]}" in printed and f"MemoryFault: <cell add4>:{line}" in printed
    assert "add4(a, a, short" in printed and "runtime.py" not in printed and "emulator/" not in printed


def test_what_the_assembler_is_not_there_for_the_parser_finds(
    shell: InteractiveShell, monkeypatch: pytest.MonkeyPatch
) -> None:
    def missing(*_: object, **__: object) -> None:
        raise UnavailableError("ptxas: not found; install it")

    monkeypatch.setattr(toolchain, "build", missing)
    cell = run(shell, "ptx", PTX)
    assert repr(cell) == "not assembled: ptxas: not found; install it" and cell.reports == {}
    assert shell.user_ns["add4"].parameters == ("a", "b", "sum")
    assert isinstance(error_of(shell, "ptx", PTX.replace("ret;", "ret")), SourceError)


@pytest.mark.parametrize(
    ("options", "text", "message"),
    [
        (
            "ptx --check lane",
            PTX,
            "--check: some of all, async, divergence, float, init, lanes, narrow, overrun, proxy, quirks, race "
            "(got lane); nearest: lanes",
        ),
        ("cuda -D SCALE=x", CUDA, "-D: NAME=INTEGER (got SCALE=x)"),
        ("cuda -D SCALE=", CUDA, "-D: NAME=INTEGER (got SCALE=)"),
        ("ptx --arch hopper", PTX, "arch: sm_<number>, such as sm_80 or sm_90a (got hopper)"),
        ("cuda", "__device__ int x;\n", "<cell>: a kernel (.visible .entry, __global__) (got none)"),
        ("ptx --verify dequant_lq", PTX, "unknown kernel 'dequant_lq'; nearest: dequant_lqq"),
    ],
)
def test_bad_options_are_one_line(shell: InteractiveShell, options: str, text: str, message: str) -> None:
    error = error_of(shell, options, text)
    assert isinstance(error, ArgumentError) and message in str(error) and len(error._render_traceback_()) == 1


class TestVerify:
    """A cell held against the contract of a kernel of the project."""

    TEXT = Path(ptxlab.find("dequant_lqq")[1][0].path).read_text()

    @pytest.mark.full
    def test_the_project_s_own(self, shell: InteractiveShell) -> None:
        cell = run(shell, "ptx --verify dequant_lqq", self.TEXT)
        assert len(cell.verdicts) == len(ptxlab.find("dequant_lqq")[0].example_sizes)
        assert all(v.passed and "equal to the reference, checks clean" in v.detail for v in cell.verdicts)
        assert cell.reports["dequant_lqq"].alu_per_8 == 7

    @pytest.mark.full
    def test_a_mistake_under_another_name(self, shell: InteractiveShell) -> None:
        text = self.TEXT.replace("dequant_lqq", "mine").replace("0x80808080", "0x80808081")
        cell = run(shell, "ptx --verify dequant_lqq", text)
        assert not any(v.passed for v in cell.verdicts)
        assert "differ from the reference" in repr(cell) and "FAILED mine.ptx" in repr(cell)

    def test_a_spec_of_the_notebook(self, shell: InteractiveShell) -> None:
        spec = ptxlab.find("dequant_lqq")[0]
        shell.user_ns["contract"] = replace(spec, example_sizes=spec.example_sizes[:1])
        (verdict,) = run(shell, "ptx --verify contract", self.TEXT).verdicts
        assert verdict.passed and verdict.sizes == spec.example_sizes[0]
