"""A real IPython shell with the extension loaded, which shows HTML as a notebook does."""

from pathlib import Path

import pytest

pytest.importorskip("IPython", reason="IPython is not installed: it comes with the extra `jupyter`")

from IPython.core.interactiveshell import InteractiveShell
from traitlets.config import Config

PTX = """\
.version 6.5
.target sm_75
.address_size 64
.visible .entry add4(.param .u64 a, .param .u64 b, .param .u64 sum) {
    .reg .u64 %p<3>; .reg .u32 %x<2>, %i, %none; .reg .u64 %o;
    ld.param.u64 %p0, [a]; ld.param.u64 %p1, [b]; ld.param.u64 %p2, [sum];
    mov.u32 %i, %tid.x; mul.wide.u32 %o, %i, 4; mov.u32 %none, 0;
    add.u64 %p0, %p0, %o; add.u64 %p1, %p1, %o; add.u64 %p2, %p2, %o;
    ld.global.u32 %x0, [%p0]; ld.global.u32 %x1, [%p1];
    add.u32 %x0, %x0, %x1;                     // @lanes d:u8x4 a:u8x4 b:u8x4
    st.global.u32 [%p2], %x0; ret;
}
"""
CUDA = """\
extern "C" __global__ void scale(unsigned* words) {
    unsigned x = words[threadIdx.x];
    asm("mul.lo.u32 %0, %0, %1; // @lanes d:u8x4 a:u8x4 b:u32" : "+r"(x) : "n"(SCALE));
    words[threadIdx.x] = x;
}
extern "C" __global__ void nothing() {}
"""


@pytest.fixture
def shell(tmp_path: Path) -> InteractiveShell:
    config = Config()
    config.HistoryManager.enabled = False
    new_shell = InteractiveShell(config=config, ipython_dir=str(tmp_path))
    new_shell.run_line_magic("load_ext", "ptxlab")
    new_shell.display_formatter.active_types = ["text/plain", "text/html"]
    return new_shell
