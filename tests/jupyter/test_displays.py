"""What the workbench's types look like in a notebook; their plain `repr` stays as it is."""

from html.parser import HTMLParser
from typing import Any

import numpy as np
import pytest
from IPython.core.interactiveshell import InteractiveShell

import ptxlab
from ptxlab import jupyter, sources
from ptxlab.lowbit import quant
from tests.jupyter.conftest import CUDA, PTX


class Reader(HTMLParser):
    """The text of a page; raises if an element is not closed where it should be."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.marked: list[str] = []
        self.text: list[str] = []
        self.feed(page)
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag != "br":
            self.open.append(f"{tag}.{dict(attrs).get('class') or ''}")

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop().split(".")[0] == tag

    def handle_data(self, data: str) -> None:
        if "style." not in self.open:
            self.text.append(data)
            self.marked += [data] if any("bad" in name.split(".")[1].split() for name in self.open) else []


def display_of(shell: InteractiveShell, content: Any) -> tuple[str, Reader]:
    """Return plain and rich text of a cell's last expression."""
    bundle, _ = shell.display_formatter.format(content)
    return bundle["text/plain"], Reader(bundle["text/html"])


@pytest.fixture
def outcome(shell: InteractiveShell) -> ptxlab.Outcome:
    """Run a kernel on bytes 0..3 of a: 200, 1, 2, 3; of b: 100, 1, 2, 3, in the second of two threads."""
    shell.run_cell(f"%%ptx --check lanes\n{PTX}").raise_error()
    a, b = np.array([0, 0x030201C8], np.uint32), np.array([0, 0x03020164], np.uint32)
    return shell.user_ns["add4"](a, b, np.empty_like(a), grid=1, block=2)


@pytest.mark.full
def test_a_finding_shows_its_line_and_operands_in_binary(shell: InteractiveShell, outcome: ptxlab.Outcome) -> None:
    carry = next(f for f in outcome.findings if f.kind == "carry")
    plain_text, page = display_of(shell, carry)
    assert plain_text == repr(carry) and "LaneFault" not in plain_text
    text = "".join(page.text)
    assert "<cell add4>:11" in text and "block (0, 0, 0) thread (1, 0, 0)" in text
    assert "add.u32" in "".join(page.text) and "ld.global" in text  # the lines around it
    assert "1100 1000" in text and "0110 0100" in text  # 200 and 100
    assert "1" in page.marked and " 0010 1100" in page.marked  # 300: the bit that does not fit stands apart
    assert "lane 1" in page.marked and "lane 0" not in page.marked


def test_a_launch_shows_its_findings(shell: InteractiveShell, outcome: ptxlab.Outcome) -> None:
    plain_text, page = display_of(shell, outcome)
    assert plain_text.startswith("Outcome(backend='emulator'")
    assert "2 findings" in page.marked and "sum" in page.text and " uint32[2]" in page.text
    clean = shell.user_ns["add4"](*[np.zeros(1, np.uint32)] * 3, grid=1, block=1)
    assert "no findings" in display_of(shell, clean)[1].text


@pytest.mark.full
def test_a_finding_in_a_header_shows_no_folder(shell: InteractiveShell) -> None:
    text = """\
#include "dequant.cuh"
extern "C" __global__ void carries(unsigned* x) { x[0] = ptxlab::mul_u8x4(x[0], 300); }
"""
    shell.run_cell(f"%%cuda --check lanes\n{text}").raise_error()
    outcome = shell.user_ns["carries"](np.full(1, 0x0F0F0F0F, np.uint32), grid=1, block=1)
    _, page = display_of(shell, outcome)
    page_text = "".join(page.text)
    assert "dequant.cuh:" in page_text and str(sources.include_dir()) not in page_text and "mul.lo.u32" in page_text


@pytest.mark.full
def test_a_cell_shows_counts_and_what_changed(shell: InteractiveShell) -> None:
    shell.run_cell(f"%%cuda -D SCALE=300 --kernel scale\n{CUDA}")
    changed = '#include "dequant.cuh"\n' + CUDA.replace("= x;", "= ptxlab::unpack_u4(x).y;")
    cell = shell.run_cell(f"%%cuda -D SCALE=300 --kernel scale --listing\n{changed}").result
    _, page = display_of(shell, cell)
    assert "registers" in page.text and " was 0" in page.text and "LOP3.LUT" in page.text
    assert {"machine code by line", "dequant.cuh"} <= set(page.text)


@pytest.mark.full
def test_spills_stand_out(shell: InteractiveShell) -> None:
    body = "".join(f"a[{i}] = x[{i} * n]; " for i in range(64)) + "for (int i = 0; i < n; ++i) x[i] = a[i & 63];"
    text = f'extern "C" __global__ void heavy(float* x, int n) {{ float a[64]; {body} }}'
    cell = shell.run_cell(f"%%cuda\n{text}").result
    assert f"{cell.reports['heavy'].stack}" in display_of(shell, cell)[1].marked


@pytest.mark.parametrize("name", ["dequant_lqq", "gemm_w4a8_lqq_imfp_sm90", "dequant_qoq_presub"])
def test_a_spec_shows_arguments_rules_and_sources(shell: InteractiveShell, name: str) -> None:
    spec, sources = ptxlab.find(name)
    plain_text, page = display_of(shell, spec)
    assert plain_text.startswith("KernelSpec(")
    assert {spec.summary, *spec.rules, *(arg.name for arg in spec.args)} <= set(page.text)
    assert any(text.startswith(sources[0].label) for text in page.text)
    assert ("wrong by design" in page.marked) == (spec.wrong is not None)
    assert f"{spec.arch} {'only' if spec.exact_arch else 'and newer'}" in page.text


def test_a_kernel_shows_its_source(shell: InteractiveShell) -> None:
    plain_text, page = display_of(shell, ptxlab.load(PTX))
    assert plain_text.startswith("Kernel(") and "add4(a, b, sum, grid=, block=)" in page.text
    assert PTX.splitlines()[0].split()[0] in page.text and "sm_75 and newer" in page.text


def test_a_packed_weight_shows_its_buffers_and_layout(shell: InteractiveShell) -> None:
    w = np.random.default_rng(0).standard_normal((64, 128), dtype=np.float32)
    packed = ptxlab.pack(quant.quantize_lqq(w, group=64), "dual_mma")
    plain_text, page = display_of(shell, packed)
    assert plain_text == repr(packed)
    assert {"blocks", "channel_scale", "groups of 64", "[1, 2, 2176]", "0.r0"} <= set(page.text)


def test_what_comes_from_outside_is_escaped(shell: InteractiveShell) -> None:
    text = PTX.replace("// @lanes", "// <script>alert(1)</script> @lanes")
    _, page = display_of(shell, ptxlab.load(text))
    assert not any("script" in name for name in page.open) and any("<script>" in part for part in page.text)


def test_names_are_exported() -> None:
    assert all(hasattr(jupyter, name) for name in jupyter.__all__)
