"""Races between blocks that the emulator runs one after the other, in different waves."""

import numpy as np
import pytest

import ptxlab
from ptxlab.emulator import launch

WHOLE = """
__device__ int counter;
extern "C" __global__ void k(int* x, int* out) {{
    int block = blockIdx.x, thread = threadIdx.x, at = block * 32 + thread;
    {0}
}}
"""
RACES = {
    "reads what another block wrote": ("x[at] = at + 7; out[at] = x[(at + 32) % 128];", "read of"),
    "writes what another block read": ("out[at] = x[(at + 32) % 128]; x[at] = at + 7;", "write to|read of"),
    "writes what another block wrote": ("x[thread] = at;", "write to"),
    "adds to what another block wrote": ("if (block == 0) x[thread] = 5; else atomicAdd(x + thread, 1);", "atomic on"),
    "reads what another block adds to": ("atomicAdd(x + thread, 1); __threadfence(); out[at] = x[thread];", "."),
    "a flag that is not looked at": ("x[at] = at + 7; __threadfence(); atomicAdd(&counter, 1);"
                                     "out[at] = x[(at + 96) % 128];", "read of"),
    "vectors and bytes": ("((int4*)x)[thread] = make_int4(at, 1, 2, 3); __syncthreads(); out[at] = ((char*)x)[at];",
                          "write to"),
}  # fmt: skip
ORDERED = {
    "each its own": "x[at] = at; out[at] = x[at];",
    "the same value by all": "x[thread] = 5;",
    "atomics": "atomicAdd(x + thread, at); atomicMax(out + thread, at);",
    "reads of what nobody writes": "out[at] = x[(at + 32) % 128];",
    "a value that nobody uses": """
        if (block == 0) x[thread] = at + 7;
        int seen = x[thread];
        if (block == 0) out[at] = seen;""",
    "the last block adds up": """
        x[at] = at;
        __shared__ int last;
        __syncthreads();
        __threadfence();
        if (thread == 0) last = atomicAdd(&counter, 1) == gridDim.x - 1;
        __threadfence();
        __syncthreads();
        for (int i = 0; last && i < 4; ++i) out[thread] += x[i * 32 + thread];""",
    "a turn for each": """
        if (thread == 0) while (atomicAdd(&counter, 0) != block) {}
        __threadfence();
        __syncthreads();
        x[thread] = x[thread] + at;
        __syncthreads();
        __threadfence();
        if (thread == 0) atomicAdd(&counter, 1);""",
}


@pytest.fixture
def small_waves(monkeypatch: pytest.MonkeyPatch) -> None:
    """Run the four blocks one at a time."""
    monkeypatch.setattr(launch, "WAVE_LANES", 32)


def race_messages(body: str) -> list[str]:
    x, out = np.zeros(128, np.int32), np.zeros(128, np.int32)
    outcome = ptxlab.load(WHOLE.format(body.replace("; ", ";\n")))(
        x, out, grid=4, block=32, backend="emulator", checks=["race"]
    )
    return [str(finding) for finding in outcome.findings]


@pytest.mark.smoke
@pytest.mark.usefixtures("small_waves")
@pytest.mark.parametrize("case", RACES)
def test_races(case: str) -> None:
    body, kinds = RACES[case]
    messages = race_messages(body)
    assert any("by block (" in m and "nothing orders before this one" in m for m in messages), messages
    assert any(kind in "".join(messages) for kind in kinds.split("|"))


@pytest.mark.default_cases(
    "atomics-64",
    "a value that nobody uses-64",
    "each its own-128",
    "reads of what nobody writes-64",
    "the same value by all-64",
    "a value that nobody uses-128",
    "atomics-128",
)
@pytest.mark.parametrize("lanes", [32, 64, 128])
@pytest.mark.parametrize("case", ORDERED)
def test_what_is_ordered_or_alike(case: str, lanes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch, "WAVE_LANES", lanes)
    assert race_messages(ORDERED[case]) == []


def test_one_wave_needs_no_look_back() -> None:
    messages = race_messages(RACES["reads what another block wrote"][0])
    assert messages and not any("nothing orders" in m for m in messages)


@pytest.mark.usefixtures("small_waves")
def test_a_bulk_copy_of_what_another_block_wrote() -> None:
    body = """
        __shared__ __align__(16) int tile[32];
        x[at] = at + 7;
        tile[thread] = at;
        asm volatile("fence.proxy.async;" ::: "memory");
        __syncthreads();
        if (thread == 0) {
            asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], 128;" :: "l"(x + (at + 96) % 128),
                         "r"((unsigned)__cvta_generic_to_shared(tile)) : "memory");
            asm volatile("cp.async.bulk.commit_group; cp.async.bulk.wait_group 0;" ::: "memory");
        }"""
    x, out = np.zeros(128, np.int32), np.zeros(128, np.int32)
    kernel = ptxlab.load(WHOLE.format(body), arch="sm_90a")
    outcome = kernel(x, out, grid=4, block=32, backend="emulator", checks=["race"])
    assert any("nothing orders" in str(f) and "cp.async.bulk" in str(f) for f in outcome.findings)
