"""`__syncthreads()` by the rule of CUDA C++: all threads of the block come to the same, or have returned."""

from pathlib import Path

import numpy as np
import pytest

import ptxlab
from ptxlab import Launch

HEADER = "#define UNLESS_LOW(n) if (threadIdx.x >= (n)) return\n"
SOURCE = """#include "leave.h"
#define AT threadIdx.x
#define UNLESS(condition) \\
    if (!(condition)) return
__device__ void meet() { __syncthreads(); }
__device__ void body(int* y, int n) {
    if (AT >= 64) return;
    y[AT] = n;
    __syncthreads();
    y[AT] += y[AT ^ 1];
}
extern "C" {
__global__ void two_arms(int* y, int n) {
    if (AT < 64) { y[AT] = 1; __syncthreads();  // two_arms
    } else {
        __syncthreads();
    }
}
__global__ void an_arm_calls(int* y, int n) {
    if (AT < 64) {
        meet();
    } else {
        meet();
    }
}
__global__ void some_warps(int* y, int n) {  // they may not return
    if (AT < 64) __syncthreads();  // some_warps
    else y[AT] = n;
}
__global__ void half_warps(int* y, int n) {
    if (AT % 2) __syncthreads_or(n);  // half_warps
}
__global__ void fewer_turns(int* y, int n) {
    for (int i = AT; i < 96; i += 64) {
        __syncthreads();  // fewer_turns
    }
}
__global__ void all(int* y, int n) {
    if (n > 3) meet();
    else __syncthreads();
    for (int i = 0; i < n; i++) { y[AT] += i; __syncthreads(); }
}
__global__ void returned(int* y, int n) {
    if (AT >= 64) { y[AT] = n; return; }
    __syncthreads();
}
__global__ void returned_in_a_macro(int* y, int n) {
    UNLESS(AT < 64);
    __syncthreads();
}
__global__ void returned_below(int* y, int n) {
    for (int d = 64; d >= 32; d >>= 1) {
        __syncthreads();
        if (AT >= d) return;
        y[AT] += n;
    }
}
__global__ void returned_in_a_function(int* y, int n) { body(y, n); }
__global__ void returned_in_a_macro_of_a_header(int* y, int n) {
    UNLESS_LOW(64);
    __syncthreads();
}
__global__ void written_in_ptx(int* y, int n) {
    if (AT < 64) asm volatile("bar.sync 0;");
    else asm volatile("bar.sync 0;");
}
}
"""


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    source = tmp_path_factory.mktemp("source") / "blocks.cu"
    source.write_text(SOURCE)
    (source.parent / "leave.h").write_text(HEADER)
    return source


def reports(path: Path, entry: str) -> list[str]:
    """List findings by the rule of CUDA C++: the text of the line, and what it says of another thread."""
    kernel = ptxlab.load(path, entry)
    outcome = kernel.launch(
        [np.zeros(128, np.int32), np.int32(5)], Launch((1, 1, 1), (128, 1, 1)), backend="emulator", checks="divergence"
    )
    lines = SOURCE.split("\n")
    assert all("by the rule of CUDA C++" in finding.message for finding in outcome.findings)
    return [f"{lines[f.line - 1].rpartition('// ')[2]}: {f.message.partition(', but ')[2]}" for f in outcome.findings]


@pytest.mark.parametrize(
    ("entry", "words"),
    [
        ("two_arms", "two_arms: thread (64,0,0) comes to line 16, `bar.sync 0`"),
        ("some_warps", "some_warps: thread (64,0,0) has gone past it, to the end"),
        ("half_warps", "half_warps: thread (0,0,0) has gone past it, to the end"),
        ("fewer_turns", "fewer_turns: thread (96,0,0) has gone past it, to the end"),
    ],
)
def test_a_block_in_parts_is_reported(path: Path, entry: str, words: str) -> None:
    (report,) = reports(path, entry)
    assert report.startswith(words) and report.endswith("PTX allows that to whole warps,")


def test_a_call_in_each_arm_names_the_calls(path: Path) -> None:
    (report,) = reports(path, "an_arm_calls")
    assert "comes to line 5 (called from line 23), `bar.sync 0`" in report


@pytest.mark.parametrize(
    "entry",
    ["all", "returned", "returned_in_a_macro", "returned_below", "returned_in_a_function",
     "returned_in_a_macro_of_a_header", "written_in_ptx"],
)  # fmt: skip
def test_a_whole_block_is_not(path: Path, entry: str) -> None:
    assert reports(path, entry) == []
