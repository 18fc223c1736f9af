"""Races of loads, and loads of what nobody has written, count where something depends on the value."""

import functools

import numpy as np
import pytest

from ptxlab import emulator
from ptxlab.emulator.checks import load_taint
from ptxlab.errors import MemoryFault
from tests.support.small_kernels import STORE, cuda_to_ptx, kernel_text, line_of, run_text

# Thread 0 makes `total`, its warp uses it. NVRTC has all three warps load it, and hoists loads out of loops.
GUARDED = {
    "plain": "if (FEW) v = total;",
    "computed": "if (FEW) v = total * 2 + 1;",
    "condition": "if (FEW && total > 3) v = 5;",
    "hoisted": "for (int i = 0; i < n; i++) if (FEW && (i ^ threadIdx.x) & 1) v += total * x[i];",
    "integers": "if (FEW) v = __float_as_int(total) + __float_as_int(other);",
    "twice": "if (FEW) v += total;\n float w = FEW ? total : 3; v += w;",
    "rewritten": "for (int i = 0; i < n; i++) { if (FEW) v += total; __syncwarp();\n"
    "if (threadIdx.x == 0) total = x[i + 1]; __syncwarp(); }",
    "rewritten later": "if (FEW) v = total; __syncwarp(); if (threadIdx.x == 0) total = 5;",
}


@functools.cache
def module(users: str, together: str = "__syncwarp();") -> emulator.Module:
    """Compile a kernel for each of `GUARDED`, all at once; those of the threads `users` use what thread 0 writes."""
    kernels = "".join(
        f"""extern "C" __global__ void {name.replace(" ", "_")}(const float* x, float* y, int n) {{
            __shared__ float total, other;
            float v = 0;
            if (threadIdx.x == 0) total = x[0], other = x[1];
            {together}
            {code}
            y[threadIdx.x] = v;
        }}\n"""
        for name, code in GUARDED.items()
    )
    return emulator.parse(cuda_to_ptx(kernels.replace("FEW", users)), "k.ptx")


def races(name: str, users: str, together: str = "__syncwarp();") -> list[str]:
    x, y = np.arange(1, 41, dtype=np.float32), np.zeros(96, np.float32)
    args, entry = [x, y, np.int32(6)], name.replace(" ", "_")
    launch = emulator.run(module(users, together), entry, args, grid=1, block=96, checks=["race"])
    return [f.kind for f in launch.findings]


@pytest.mark.default_cases("twice", "computed", "rewritten later", "condition", "integers", "hoisted")
@pytest.mark.parametrize("name", GUARDED)
def test_nvrtc_loads_for_all_what_one_warp_uses(name):
    assert races(name, "threadIdx.x < 32") == []
    assert set(races(name, "threadIdx.x < 33")) == {"race"}  # thread 32 uses it
    assert set(races(name, "threadIdx.x < 32", together="__threadfence_block();")) == {"race"}  # threads 1 to 31 do


SHARED = ".shared .align 4 .b32 total; .shared .align 4 .b8 buf[512];"
LOAD = """mov.u32 %r0, %tid.x; setp.eq.u32 %p, %r0, 0; setp.lt.u32 %q, %r0, 32; mov.u32 %s, 0; mov.u32 %r3, 0;
    @%p st.shared.u32 [total], 0;
    bar.warp.sync -1;
    ld.shared.u32 %r1, [total];
"""


def outcome(body: str, **options) -> list[tuple[str, int]]:
    """List findings and their counts of 64 threads, the upper 32 of which load what nobody has told them of."""
    text = kernel_text(LOAD + body + STORE, outside=SHARED)
    launch = run_text(text, np.zeros(64, np.uint32), threads=64, checks=["race"], **options)
    assert all(f.kind == "race" and f.line == line_of(text, "ld.shared.u32 %r1") for f in launch.findings)
    return [(str(f.thread), f.count) for f in launch.findings]


USED = [("(32, 0, 0)", 32)]


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        ("", []),
        ("mov.u32 %r2, %r1; add.u32 %r2, %r2, 1; mov.u32 %r2, 0; mov.u32 %s, %r2;", []),
        ("selp.u32 %s, %r1, 0, %q;", []),
        ("selp.u32 %s, 0, %r1, %q;", USED),
        ("mad.lo.u32 %r1, %r1, 3, 7; selp.u32 %s, %r1, 0, %q;", []),
        ("@%q mov.u32 %s, %r1;", []),
        ("@!%q mov.u32 %s, %r1;", USED),
        ("mov.u32 %s, %r1;", USED),
        ("@%q bra END; mov.u32 %s, %r1; END:", USED),
        ("@!%q bra END; mov.u32 %s, %r1; END:", []),
        # as an address, in a branch, by another lane, in another thread's memory
        ("ld.shared.u32 %r2, [%r1+1024];", USED),
        ("setp.eq.u32 %p, %r1, 0; @%p bra END; END:", USED),
        ("setp.eq.u32 %p, %r1, 0; @%p mov.u32 %r2, 1;", USED),
        ("setp.eq.u32 %p, %r1, 0; selp.u32 %s, 1, 2, %p;", USED),
        ("shfl.sync.idx.b32 %r2, %r1, 0, 31, -1;", USED),
        ("atom.shared.add.u32 %r2, [buf], %r1;", USED),
        ("setp.eq.u32 %p, %r1, 0; vote.sync.any.pred %p, %p, -1;", USED),
        ("add.cc.u32 %r2, %r1, 1; addc.u32 %s, 0, 0;", USED),
        # `and`, `or`: the other operand may decide
        ("setp.eq.u32 %p, %r1, 0; and.pred %p, %p, %q; selp.u32 %s, 1, 2, %p;", []),
        ("setp.eq.u32 %p, %r1, 0; or.pred %p, %p, %q; selp.u32 %s, 1, 2, %p;", USED),
        ("setp.eq.u32 %p, %r1, 0; not.pred %q, %q; or.pred %p, %p, %q; selp.u32 %s, 1, 2, %p;", []),
        ("setp.eq.u32 %p, %r1, 0; not.pred %q, %q; and.pred %p, %q, %p; selp.u32 %s, 1, 2, %p;", USED),
        ("selp.u32 %r2, -1, 0, %q; and.b32 %s, %r2, %r1;", []),
        ("selp.u32 %r2, -1, 0, %q; or.b32 %s, %r2, %r1;", USED),
        ("selp.u32 %r2, 0, -1, %q; or.b32 %s, %r1, %r2;", []),
        ("and.b32 %s, %r1, %r1;", USED),  # neither is clean
        # of two reads one is used
        ("ld.shared.u32 %r2, [total]; selp.u32 %s, %r1, 0, %q; mov.u32 %r3, %r2;", []),
        ("ld.shared.u32 %r2, [buf]; add.u32 %s, %r1, %r2;", USED),
        # used where the value has since been loaded again; and read, but loaded again since
        ("mov.u32 %r4, 0; L: ld.shared.u32 %r2, [buf]; add.u32 %r3, %r3, %r1; add.u32 %r4, %r4, 1; "
         "setp.lt.u32 %p, %r4, 3; @%p bra L; mov.u32 %s, %r3;", USED),
    ],
)  # fmt: skip
def test_what_counts_as_use(body, expected):
    assert outcome(body.replace("; ", ";\n")) == expected


@pytest.mark.parametrize(("use", "kinds"), [("selp.u32 %s, %r1, 0, %q;", 0), ("mov.u32 %s, %r1;", 1)])
def test_a_write_after_a_read_of_no_consequence(use, kinds):
    """The upper warp reads; then the lower one writes, and has not heard of that."""
    body = f"""mov.u32 %r0, %tid.x; setp.lt.u32 %q, %r0, 32;
    ld.shared.u32 %r1, [total];
    {use}
    mov.u32 %r5, 0; @!%q bra WAIT;
    L: add.u32 %r5, %r5, 1; setp.lt.u32 %p, %r5, 20; @%p bra L;
    setp.eq.u32 %p, %r0, 0; bar.warp.sync -1;
    @%p st.shared.u32 [total], 5;
    WAIT:
    """
    text = kernel_text(body + STORE, outside=SHARED)
    launch = run_text(text, np.zeros(64, np.uint32), threads=64, checks=["race"])
    assert [(f.kind, f.line) for f in launch.findings] == [("race", line_of(text, "@%p st.shared"))] * kinds


def test_each_execution_of_a_load_counts_for_itself():
    """The upper warp throws away what it reads in the first round; in the second it uses it, behind a barrier."""
    body = """mov.u32 %r4, 0; mov.u32 %r3, 0; mov.u32 %r0, %tid.x; shr.u32 %r5, %r0, 5;
    L: or.b32 %r6, %r0, %r4; setp.eq.u32 %p, %r6, 0;
    @%p st.shared.u32 [total], 9;
    bar.warp.sync -1;
    ld.shared.u32 %r1, [total];
    setp.eq.u32 %q, %r4, %r5; selp.u32 %r1, %r1, 0, %q; add.u32 %r3, %r3, %r1;
    BARRIER
    add.u32 %r4, %r4, 1; setp.lt.u32 %p, %r4, 2; @%p bra L;
    mov.u32 %s, %r3;
    """
    for barrier, count in (("bar.sync 0;", 0), ("", 1)):
        text = kernel_text(body.replace("BARRIER", barrier) + STORE, outside=SHARED)
        launch = run_text(text, np.zeros(64, np.uint32), threads=64, checks=["race"])
        assert len(launch.findings) == count


@pytest.mark.parametrize("checks", [["init"], ["init", "race"]])
@pytest.mark.parametrize(
    ("use", "expected"),
    [
        ("selp.u32 %s, %r1, 0, %q;", [("(32, 0, 0)", 32, 1)]),  # the upper warp
        ("mov.u32 %s, 0;", []),
        ("selp.u32 %s, 0, %r1, %q; mov.u32 %r3, %s;", [("(0, 0, 0)", 32, 1)]),
        ("selp.u32 %s, %r1, 0, %q; mov.u32 %s, 0;", []),
        # a second load of the same: it alone is used
        ("ld.shared.u32 %r2, [total]; selp.u32 %s, %r2, 0, %q;", [("(32, 0, 0)", 32, 2)]),
    ],
)
def test_what_nobody_has_written_counts_where_it_is_used(use, expected, checks):
    body = "mov.u32 %r0, %tid.x; setp.ge.u32 %q, %r0, 32;\nld.shared.u32 %r1, [total];\n" + use
    text = kernel_text(body + STORE, outside=SHARED)
    first = line_of(text, "%r1, [total]") - 1
    findings = run_text(text, np.zeros(64, np.uint32), threads=64, checks=checks).findings
    assert all(f.kind == "uninitialised" for f in findings)
    assert [(str(f.thread), f.count, f.line - first) for f in findings] == expected


@pytest.mark.parametrize("checks", [["init"], ["init", "race"]])
def test_lanes_that_use_what_they_have_written_are_not_blamed_for_those_that_throw_away(checks: list[str]) -> None:
    """An idle block of Marlin loads a first tile that nobody has stored, and throws it away."""
    body = """mov.u32 %r0, %tid.x; setp.lt.u32 %q, %r0, 32;
    shl.b32 %r2, %r0, 2; mov.u32 %r3, buf; add.u32 %r2, %r2, %r3;
    @%q st.shared.u32 [%r2], 5;
    ld.shared.u32 %r1, [%r2]; selp.u32 %s, %r1, 0, %q;"""
    text = kernel_text(body + STORE, outside=SHARED)
    assert run_text(text, np.zeros(64, np.uint32), threads=64, checks=checks).findings == ()


def test_a_fault_tells_what_was_used_before_it():
    with pytest.raises(MemoryFault, match="found before that: race"):
        outcome("st.shared.u32 [buf], %r1;\nst.shared.u32 [buf+4096], %r1;\n")
    with pytest.raises(MemoryFault) as raised:
        outcome("selp.u32 %s, %r1, 0, %q;\nst.shared.u32 [buf+4096], %s;\n")
    assert "found before" not in str(raised.value)


@pytest.mark.parametrize("operation", ["and.b32 %s, %r1, %r2;", "and.b32 %s, %r2, %r1;", "add.u32 %s, %r1, %r2;"])
def test_of_two_races_neither_hides_the_other(operation):
    """Either value would decide alone, were it known."""
    text = kernel_text(LOAD + f"ld.shared.u32 %r2, [total];\n{operation}" + STORE, outside=SHARED)
    findings = run_text(text, np.zeros(64, np.uint32), threads=64, checks=["race"]).findings
    assert sorted(f.line for f in findings) == [line_of(text, f"ld.shared.u32 %r{i}") for i in (1, 2)]


def test_strong_reads_count_at_once():
    """No compiler moves them."""
    text = kernel_text(LOAD.replace("ld.shared.u32 %r1", "ld.volatile.shared.u32 %r1") + STORE, outside=SHARED)
    assert len(run_text(text, np.zeros(64, np.uint32), threads=64, checks=["race"]).findings) == 1


def test_what_has_been_used_is_not_followed_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """A sum that is stored in every turn does not gather the reads of all turns: time and memory would be squares."""
    sizes = []
    number = load_taint.LoadTaint.number_of
    monkeypatch.setattr(
        load_taint.LoadTaint, "number_of", lambda self, reads: sizes.append(len(reads)) or number(self, reads)
    )
    text = cuda_to_ptx("""extern "C" __global__ void k(int* y) {
        __shared__ int part[64];
        int sum = 0;
        part[threadIdx.x] = 1;
        for (int i = 0; i < 40; i++) {
            sum += part[threadIdx.x ^ 32];
            __syncthreads();
            part[threadIdx.x] = sum;
        }
        y[threadIdx.x] = sum;
    }""")
    assert {f.kind for f in run_text(text, np.zeros(64, np.int32), threads=64, checks=["race"]).findings} == {"race"}
    assert 1 <= max(sizes) <= 4
