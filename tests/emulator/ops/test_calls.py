"""printf, assert and trap; and what else a kernel may call, which is refused by name."""

import numpy as np
import pytest

import ptxlab
from ptxlab.errors import EmulationError, MemoryFault, PtxlabError

ASSERT = """extern "C" __device__ void __assertfail(const char*, const char*, unsigned, const char*, size_t);
#define assert(e) ((e) ? (void)0 : __assertfail(#e, "file.cu", __LINE__, __func__, 1))
"""


def run(body: str, *args: object, head: str = "", **options: object) -> None:
    text = f'{head}extern "C" __global__ void k(int* x, int n) {{\n{body}\n}}'
    ptxlab.load(text)(*args, grid=2, block=32, backend="emulator", **options)


def integers() -> np.ndarray:
    return np.arange(64, dtype=np.int32)


def test_printf_prints_as_c_does(capsys: pytest.CaptureFixture[str]) -> None:
    run(
        """int i = blockIdx.x * 32 + threadIdx.x;
        if (i < 2) printf("%d of %u: %5.2f|%-6s|%c|%lld|%04x|%*d|100%%\\n", i, 4000000000u, i * 0.5, "word", 'a' + i,
                          -(1ll << 40), 255, 3, i);
        if (i == 40) x[0] = printf("%s and %g, 100%%", "one", 1e-7), x[1] = printf("|%*d|", 4, i);""",
        x := integers(),
        np.int32(0),
        checks="all",
    )
    assert capsys.readouterr().out == (
        "0 of 4000000000:  0.00|word  |a|-1099511627776|00ff|  0|100%\n"
        "1 of 4000000000:  0.50|word  |b|-1099511627776|00ff|  1|100%\n"
        "one and 1e-07, 100%|  40|"
    )
    assert (x[:2] == [2, 2]).all()


def test_what_a_failing_kernel_has_printed_is_shown(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(EmulationError):
        run('if (threadIdx.x == 7) { printf("seven"); __trap(); }', integers(), np.int32(0))
    assert capsys.readouterr().out.startswith("seven")


@pytest.mark.full
def test_endless_output_is_cut(capsys: pytest.CaptureFixture[str]) -> None:
    run('for (int i = 0; i < 300; ++i) printf("%200d", i);', integers(), np.int32(0))
    assert len(capsys.readouterr().out) == 1 << 20


def test_a_string_that_points_nowhere() -> None:
    with pytest.raises(MemoryFault, match="the string at address 0x1, no buffer, is out of bounds"):
        run('printf("%s", (const char*)(long long)n);', integers(), np.int32(1))


def test_an_assertion_fails_with_line_and_values() -> None:
    with pytest.raises(EmulationError) as error:
        run("int i = blockIdx.x * 32 + threadIdx.x;\nassert(x[i] < n);", integers(), np.int32(60), head=ASSERT)
    message = str(error.value)
    assert (
        "\n" not in message
        and "block (1,0,0) thread (28,0,0) and 3 more: the assertion `x[i] < n` of file.cu:5 (k)" in message
    )
    assert message.startswith("<text>:5: ") and message.count(" = 60") == 2 and "setp" in message


def test_a_trap_fails_with_line_and_values() -> None:
    with pytest.raises(
        EmulationError, match=r"thread \(9,0,0\) and .*: the kernel trapped; line 3, `setp\.\w+\.s32 .* = 9"
    ):
        run("int i = threadIdx.x;\nif (x[i] > n) __trap();", integers(), np.int32(8))


@pytest.mark.full_cases("cooper*")
@pytest.mark.parametrize(
    ("body", "head", "message"),
    [
        ("int* p = new int[4]; x[0] = p[n];", "", "malloc on the device is not emulated"),
        (
            "x[0] = (n > 3 ? f : g)(n);",
            "#define F __device__ __noinline__ int\nF f(int x) { return x + 1; } F g(int x) { return x; }\n",
            "calls through function pointers are not emulated",
        ),
        (
            "x[0] = table[n & 1](n);",
            "#define F __device__ __noinline__ int\nF f(int x) { return x + 1; } F g(int x) { return x; }\n"
            "__device__ int (*const table[2])(int) = {f, g};\n",
            "<text>:5: `call of an address`: calls through function pointers are not emulated",
        ),
        (
            "B b; C c; A* a = n > 3 ? (A*)&b : (A*)&c; x[0] = a->f();",
            "struct A { __device__ virtual int f() = 0; };\n"
            "struct B : A { __device__ int f() override { return 1; } };\n"
            "struct C : A { __device__ int f() override { return 2; } };\n",
            "calls through function pointers are not emulated",
        ),
        (
            "cooperative_groups::this_grid().sync();",
            "#include <cooperative_groups.h>\n",
            "cooperative launches are not emulated",
        ),
        ("x[0] = h(n);", 'extern "C" __device__ int h(int);\n', "`call.uni h`: the emulator does not know this"),
        (
            "x[0] = f(n);",
            "__device__ __noinline__ int f(int x) { return x > 1000 ? x : f(x * 3 + 1) + 1; }\n",
            "calls itself: recursion is not emulated",
        ),
        ("x[0] = tex1Dfetch<int>(n, 0);", "", "textures and surfaces are not emulated"),
    ],
)
def test_unsupported_calls_are_refused_by_name(body: str, head: str, message: str) -> None:
    with pytest.raises(PtxlabError) as error:
        run(body, integers(), np.int32(5), head=head)
    assert message in str(error.value) and "\n" not in str(error.value)


def test_initial_values_may_be_addresses() -> None:
    """Variables may begin with addresses of arrays and strings; a table of functions that nobody calls does no harm."""
    head = """__device__ int numbers[4] = {1, 2, 3, 4};
__device__ int* third = numbers + 2;
__device__ const char* const names[2] = {"ab", "cd"};
__device__ __noinline__ int f(int x) { return x + 1; }
__device__ int (*table[1])(int) = {f};
"""
    x = integers()
    run("x[0] = third[-1] + third[1]; x[1] = names[1][n]; third[0] = 9; x[2] = numbers[2];", x, np.int32(1), head=head)
    assert x[:3].tolist() == [6, ord("d"), 9]
    module = ptxlab.emulator.parse(
        ".version 8.7\n.target sm_90\n.address_size 64\n.global .u32 a[2];\n.global .u64 p[3] = {a+4, -1};\n"
    )
    p = module.variables[1]
    assert p.initial is None and p.size == 24, "nobody may take its bytes for known ones"
    assert p.pointers[8] == 2**64 - 1 and p.pointers[0].offset == 4


@pytest.mark.parametrize(
    ("declared", "message"),
    [
        (".u64 p = generic(nosuch)", "nosuch is no variable of global memory that is declared above"),
        (".u32 a[2]; .global .u32 p = a", "p: an address has 8 bytes, not 4"),
        (".u64 p = generic(", "expected a variable"),
    ],
)
def test_invalid_initial_addresses_are_refused(declared: str, message: str) -> None:
    with pytest.raises(PtxlabError, match=message) as error:
        ptxlab.emulator.parse(f".version 8.7\n.target sm_90\n.address_size 64\n.global {declared};\n")
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("instruction", "message"),
    [
        (
            "tcgen05.commit.cta_group::1.mbarrier::arrive::one.b64 [%rd1];",
            "the tensor memory of sm_100 is not emulated",
        ),
        ("tcgen05.mma.cta_group::1.kind::f16 [%r1], %rd1, %rd1, %r1, %p1;", "the tensor memory of sm_100"),
        ("{tcgen05.wait::ld.sync.aligned;}", "the tensor memory of sm_100"),
        ("mma.sync.aligned.kind::f8f6f4.m16n8k32.row.col.f32.e2m1.e2m1.f32 %r1, %r1, %r1, %r1;", "mixed mma of sm_100"),
        ("clusterlaunchcontrol.try_cancel.async.shared::cta.b128 [%r1], [%r1];", "cluster launch control of sm_100"),
    ],
)
def test_blackwell_is_parsed_and_refused(instruction: str, message: str) -> None:
    text = (
        ".version 8.7\n.target sm_100a\n.address_size 64\n.visible .entry k() {\n"
        f".reg .b32 %r<2>; .reg .b64 %rd<2>; .reg .pred %p<2>;\n{instruction}\nret; }}"
    )
    with pytest.raises(PtxlabError, match=message):
        ptxlab.emulator.run(text, None, [], grid=1, block=32)
