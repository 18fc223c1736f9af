"""wgmma: its results, and what is found when a step is missing."""

import functools
import re

import ml_dtypes
import numpy as np
import pytest

import ptxlab
from ptxlab import emulator
from ptxlab.errors import EmulationError, MemoryFault, SourceError
from ptxlab.hardware.descriptors import MatrixDescriptor
from ptxlab.hardware.fragments import wgmma_d
from tests.golden.fragments import fragment_cases
from tests.support.axes import both_modes
from tests.support.small_kernels import HEADER, line_of, run_text
from tests.support.wgmma import CASES, NARROW, cores, draw_operand, kernel_text, problem, run_narrow

CASE = next(case for case in fragment_cases() if case.name == "wgmma_m64n24k32_s8_span64")
PROXY, FENCE = "fence.proxy.async.shared::cta;", "wgmma.fence.sync.aligned;"
COMMIT, WAIT = "wgmma.commit_group.sync.aligned;", "wgmma.wait_group.sync.aligned 0;"
SECOND = [line for line in CASE.ptx.split("\n") if "wgmma.mma_async" in line][1].strip()


def outcome(text: str, mode: str) -> tuple[np.ndarray, list[tuple[str, int]]]:
    """Run the product; return D, and the findings as (kind, line)."""
    out = np.zeros(CASE.out, np.uint32)
    arguments = [*(array.copy() for array in CASE.inputs.values()), out]
    launch = run_text(text, *arguments, threads=CASE.threads, checks=emulator.CHECKS, mode=mode)
    return out, sorted({(finding.kind, finding.line) for finding in launch.findings})


def test_long_lists_of_registers_are_cut_in_messages():
    (launch, _) = [i for i in emulator.parse(CASE.ptx).entries[CASE.name].instructions if "mma_async" in i.opcode]
    assert launch.text.endswith("s8 {%d0, ..., %d11}, {%a0, %a1, %a2, %a3}, %desc, %p")


@functools.cache
def expected_product() -> np.ndarray:
    """Compute D of the unchanged case, once."""
    return outcome(CASE.ptx, "early")[0]


LAUNCHES = [i for i, line in enumerate(CASE.ptx.split("\n"), 1) if "wgmma.mma_async" in line]
STORES = [i for i, line in enumerate(CASE.ptx.split("\n"), 1) if "st.global.b32" in line]


@pytest.mark.parametrize("threads", [32, 96])
def test_a_block_without_a_whole_warp_group_is_refused(threads: int) -> None:
    arguments = [*(array.copy() for array in CASE.inputs.values()), np.zeros(CASE.out, np.uint32)]
    with pytest.raises(EmulationError, match=rf"the four warps of a warp group \(a block of {threads} threads\)"):
        run_text(CASE.ptx, *arguments, threads=threads)


@both_modes
@pytest.mark.parametrize(
    ("gone", "kind", "lines"),
    [
        (PROXY, "async-dirty", LAUNCHES),
        (FENCE, "async", LAUNCHES),
        (COMMIT, "async", LAUNCHES + STORES),  # the block ends while they read shared memory
        (WAIT, "async", LAUNCHES + STORES),
    ],
)
def test_every_step_is_needed(gone, kind, lines, mode):
    assert outcome(CASE.ptx.replace(gone, ""), mode)[1] == [(kind, line) for line in lines]


@both_modes
@pytest.mark.parametrize(
    ("fence", "expected"),
    [
        ("release.sync_restrict::shared::cta", []),
        ("acquire.sync_restrict::shared::cluster", [("async-dirty", line) for line in LAUNCHES]),
    ],
)
def test_proxy_fences_of_one_direction(fence: str, expected: list, mode: str) -> None:
    """The writes of threads need the release fence; acquire orders the engine's writes before the reads of threads."""
    assert outcome(CASE.ptx.replace(PROXY, f"fence.proxy.async::generic.{fence}.cluster;"), mode)[1] == expected


@both_modes
@pytest.mark.parametrize(
    ("line", "wrong"),
    [
        ("mov.b32 %a1, 0;", "late"),
        ("mov.b32 %d1, 0;", "early"),
        ("add.u32 %x1, %d1, 0;", "never"),
        ("mov.b32 %x1, %d1; add.u32 %x1, %x1, 0;", "never"),
        ("mov.b32 %x1, %d1; bra on; on:", "never"),
        ("mov.b32 %x1, %d1; mov.b32 %x1, 0;", "never"),
        ("st.shared.v4.b32 [tile], {%x1, %x1, %x1, %x1};", "late"),
        ("ldmatrix.sync.aligned.m8n8.x1.shared.b16 {%a3}, [tile];", "late"),
    ],
)
def test_operands_are_in_use_until_waited_for(line, wrong, mode):
    """A line too early is found; behind the wait it is fine."""
    text = CASE.ptx.replace(FENCE, f"mov.b32 %x1, 0x07070707; {FENCE}")
    early, late = text.replace(COMMIT, f"{COMMIT} {line}"), text.replace(WAIT, f"{WAIT} bar.sync 0; {line}")
    out, early_findings = outcome(early, mode)
    assert early_findings == [("async", line_of(early, line))]
    assert (out == expected_product()).all() == (mode != wrong)
    if "%d1, 0" not in line:
        out, findings = outcome(late, mode)
        assert findings == [] and (out == expected_product()).all()


@both_modes
@pytest.mark.parametrize(
    ("copy", "use"),
    [
        ("mov.b64 %pair, {%d0, %d1};", "mov.b64 {%d0, %d1}, %pair;"),
        ("mov.b32 {%h0, %h1}, %d1; mov.b32 %x1, {%h0, %h1};", "mov.b32 %d1, %x1;"),
        ("wgmma.wait_group.sync.aligned 1; mov.b32 %x1, %d2;", "mov.b32 %d2, %x1;"),
    ],
)
def test_a_copy_ahead_of_the_wait_is_a_new_name(mode: str, copy: str, use: str) -> None:
    """A compiler unpacks accumulators there; the copy holds what they hold behind the wait."""
    names = "{ .reg .b64 %pair; .reg .b16 %h<2>; "
    text = CASE.ptx.replace(COMMIT, f"{COMMIT} {names}{copy}").replace(WAIT, f"{WAIT} {use} }}")
    out, findings = outcome(text, mode)
    assert findings == [] and (out == expected_product()).all()


@both_modes
def test_what_one_wgmma_gave_and_the_next_one_takes_may_be_read(mode: str) -> None:
    """The first one has been waited for, the next one has not."""
    third = re.sub(r"%d(?=\d)", "%e", SECOND).replace("%a4, %a5, %a6, %a7", "%d0, %d1, %d2, %d3")
    second_group = f"{{ .reg .b32 %e<12>; setp.ne.u32 %p, 0, 0; {FENCE} {third} {COMMIT} add.u32 %t, %d0, 0; {WAIT} }}"
    arguments = [*(array.copy() for array in CASE.inputs.values()), np.zeros(CASE.out, np.uint32)]
    text = CASE.ptx.replace("st.global.b32 [%o+44], %d11;", f"st.global.b32 [%o+44], %d11; {second_group}")
    assert not run_text(text, *arguments, threads=CASE.threads, checks=["async"], mode=mode).findings


LOADED = "{ .reg .b32 %y; ld.shared.b32 %y, [tile]; mov.b32 %a2, %y; }"


@both_modes
@pytest.mark.parametrize(
    ("ahead_of_fence", "after_fence", "ahead_of_second", "lines"),
    [
        ("", "ld.shared.b32 %a2, [tile];", "", LAUNCHES[:1]),
        ("", LOADED, "", LAUNCHES[:1]),  # a copy is what it copies
        ("", "add.u32 %a6, %a6, 0;", "", []),  # arithmetic ahead of the first wgmma, for whichever
        ("", "bra on; on: add.u32 %a2, %a2, 0;", "", LAUNCHES[:1]),
        ("", "", "add.u32 %a6, %a6, 0;", LAUNCHES[1:]),  # while the first one is under way
        ("", "", f"{FENCE} add.u32 %a6, %a6, 0;", LAUNCHES[1:]),
        ("", "", "mov.b32 %a6, %a6;", []),
        ("{ .reg .b64 %pair; mov.b64 %pair, {%a2, %a6};", "mov.b64 {%a2, %a6}, %pair; }", "", []),
        ("", "{ .reg .b16 %h<2>; mov.b32 {%h0, %h1}, %a2; mov.b32 %a2, {%h0, %h1}; }", "", []),
    ],
)
def test_registers_written_behind_the_fence_are_not_seen(mode, ahead_of_fence, after_fence, ahead_of_second, lines):
    text = CASE.ptx.replace(FENCE, f"{ahead_of_fence} {FENCE} {after_fence}").replace(
        SECOND, f"{ahead_of_second} {SECOND}"
    )
    out, findings = outcome(text, mode)
    assert findings == [("async", line) for line in lines]
    assert bool((out == expected_product()).all()) == ("ld.shared" not in after_fence)


@pytest.mark.parametrize("writer", ["ld.shared.b32 %a6, [tile];", "add.u32 %a6, %a6, 0;"])
def test_who_has_written_behind_the_fence_is_named(writer: str) -> None:
    """Memory never counts; arithmetic only while another wgmma is under way."""
    text = CASE.ptx.replace(SECOND, f"{FENCE}\n{writer}\n{SECOND}")
    arguments = [*(array.copy() for array in CASE.inputs.values()), np.zeros(CASE.out, np.uint32)]
    (finding,) = run_text(text, *arguments, threads=CASE.threads, checks=["async"]).findings
    by = f"takes %a6, which line {line_of(text, writer)}, `{writer[:-1]}`, wrote, and no wgmma.fence since"
    assert by in finding.message


@pytest.mark.default_cases("takes what*-late", "writes*-early")
@both_modes
@pytest.mark.parametrize(
    ("first", "second", "message"),
    [
        ("%a4, %a5, %a6, %a7", "%d0, %d1, %d2, %d3", "takes %d0, still in use"),
        ("%d0, %d1,", "%a0, %a1,", "writes %a0, still in use"),
        ("%a4, %a5, %a6, %a7", "%a0, %a1, %a2, %a3", ""),
    ],
    ids=["takes what the first gives", "writes what the first takes", "takes the same"],
)
def test_a_wgmma_waits_for_those_whose_registers_it_shares(mode, first, second, message):
    """Another may not take what one gives, nor write what it takes; both may take the same, and add to one D."""
    sharing = SECOND.replace(first, second)
    text = CASE.ptx.replace(SECOND, sharing)
    assert outcome(text, mode)[1] == [("async", LAUNCHES[1])] * bool(message)
    arguments = [*(array.copy() for array in CASE.inputs.values()), np.zeros(CASE.out, np.uint32)]
    findings = run_text(text, *arguments, threads=CASE.threads, checks=["async"], mode=mode).findings
    assert all(message in str(finding) for finding in findings)
    assert outcome(text.replace(sharing, f"{COMMIT} {WAIT} {FENCE} {sharing}"), mode)[1] == []


@both_modes
def test_newer_groups_may_stay_in_flight(mode):
    """The first group's A may be written again, the second's not."""
    text = CASE.ptx.replace(SECOND, f"{SECOND} {COMMIT} wgmma.wait_group.sync.aligned 1; REWRITE").replace(
        LAUNCHED := CASE.ptx.split("\n")[LAUNCHES[0] - 1], f"{LAUNCHED} {COMMIT}"
    )
    out, findings = outcome(text.replace("REWRITE", "mov.b32 %a1, 7;"), mode)
    assert findings == [] and (out == expected_product()).all()
    assert [kind for kind, _ in outcome(text.replace("REWRITE", "mov.b32 %a5, 7;"), mode)[1]] == ["async"]


def from_shared(n: int, setup: str = "", types: str = "s8.s8") -> str:
    """Write a kernel with A [64, 32] and B [n, 32] in shared memory, without swizzle.

    Its result is out = A·Bᵀ·2 (two products, one added to the other).
    """
    at = MatrixDescriptor(1024, 256, 128).encode()
    bt = MatrixDescriptor(1024 + 2048, 256, 128).encode()
    d = "{" + ", ".join(f"%d{i}" for i in range(n // 2)) + "}"
    store = "\n".join(f"st.global.b32 [%o+{4 * i}], %d{i};" for i in range(n // 2))
    return f"""{HEADER.replace("sm_90", "sm_90a")}
    .visible .entry k(.param .u64 image, .param .u64 out) {{
    .shared .align 1024 .b8 tile[{2048 + 32 * n}];
    .reg .b32 %t, %s, %x<4>, %d<{n // 2}>; .reg .b64 %o, %a, %b; .reg .pred %p, %q;
    mov.u32 %t, %tid.x; ld.param.u64 %o, [image]; mov.u32 %s, tile;
    mad.lo.u32 %s, %t, 16, %s; mad.wide.u32 %o, %t, 16, %o;
    L: ld.global.v4.b32 {{%x0, %x1, %x2, %x3}}, [%o]; st.shared.v4.b32 [%s], {{%x0, %x1, %x2, %x3}};
    add.u32 %s, %s, 2048; add.u64 %o, %o, 2048; setp.lt.u32 %p, %s, {1024 + 2048 + 32 * n}; @%p bra L;
    fence.proxy.async; bar.sync 0; mov.b64 %a, {at}; mov.b64 %b, {bt}; {setup}
    wgmma.fence.sync.aligned; setp.ne.u32 %p, 0, 0; setp.eq.u32 %q, 0, 0;
    wgmma.mma_async.sync.aligned.m64n{n}k32.s32.{types} {d}, %a, %b, %p;
    wgmma.mma_async.sync.aligned.m64n{n}k32.satfinite.s32.{types} {d}, %a, %b, %q;
    wgmma.commit_group.sync.aligned; wgmma.wait_group.sync.aligned 0;
    ld.param.u64 %o, [out]; mad.wide.u32 %o, %t, {2 * n}, %o; {store} ret; }}"""


@both_modes
@pytest.mark.parametrize(("a_type", "b_type"), [("s8", "s8"), ("u8", "s8"), ("s8", "u8"), ("u8", "u8")])
def test_both_operands_from_shared_memory(a_type, b_type, mode):
    rng, n = np.random.default_rng(3), 32
    dtypes = {"s8": np.int8, "u8": np.uint8}
    a, b = (rng.integers(0, 256, (rows, 32), np.uint8).view(dtypes[t]) for rows, t in ((64, a_type), (n, b_type)))
    image = np.concatenate([cores(a).view(np.uint8), cores(b).view(np.uint8)])
    out = np.zeros((256, n // 2), np.uint32)
    text = from_shared(n, types=f"{a_type}.{b_type}")
    assert not run_text(text, image, out[:128], threads=128, checks=emulator.CHECKS, mode=mode).findings
    assert np.array_equal(wgmma_d(n).gather(out[:128], np.int32), 2 * (a.astype(np.int64) @ b.T.astype(np.int64)))


@both_modes
@pytest.mark.parametrize("satfinite", ["", ".satfinite"])
def test_sums_at_the_edge_of_their_range_wrap_or_are_clamped(satfinite, mode):
    rng, n = np.random.default_rng(4), 16
    a, b = rng.integers(-128, 128, (64, 32), np.int8), rng.integers(-128, 128, (n, 32), np.int8)
    start = np.tile(np.array([2**31 - 9, -(2**31) + 9], np.int32), (128, n // 4))
    text = from_shared(n, setup=" ".join(f"mov.b32 %d{i}, {number};" for i, number in enumerate(start[0])))
    first = text.split("\n")[line_of(text, "wgmma.mma_async") - 1]
    text = text.replace(first, "").replace(".satfinite", satfinite)
    image, out = np.concatenate([cores(a), cores(b)]).view(np.uint8), np.zeros((256, n // 2), np.uint32)
    assert not run_text(text, image, out[:128], threads=128, checks=emulator.CHECKS, mode=mode).findings
    sums = wgmma_d(n).gather(start.view(np.uint32), np.int32) + a.astype(np.int64) @ b.T.astype(np.int64)
    clamped = sums.clip(-(2**31), 2**31 - 1)
    assert (sums > clamped).any() and (sums < clamped).any()
    expected = (clamped if satfinite else sums).astype(np.int32)
    assert np.array_equal(wgmma_d(n).gather(out[:128], np.int32), expected)


@both_modes
def test_a_wgmma_whose_registers_are_new_needs_a_fence_too(mode):
    text = from_shared(8).replace(FENCE, "")
    arguments = np.zeros(4096, np.uint8), np.zeros((128, 4), np.uint32)
    findings = run_text(text, *arguments, threads=128, checks=["async"], mode=mode).findings
    first = line_of(text, "mma_async")
    assert [finding.line for finding in findings] == [first, first + 1]
    assert all("no wgmma.fence since the kernel began" in finding.message for finding in findings)


def test_the_first_product_may_not_add():
    text = from_shared(8).replace("%a, %b, %p;", "%a, %b, %q;")
    arguments = np.zeros(4096, np.uint8), np.zeros((128, 4), np.uint32)
    (finding,) = run_text(text, *arguments, threads=128, checks=["init"]).findings
    assert finding.line == line_of(text, "mma_async") and "adds to %d0, which was never written" in finding.message


@pytest.mark.parametrize(
    ("setup", "error", "message"),
    [
        ("add.u64 %b, %b, 64;", MemoryFault, "descriptor reaches shared addresses 3072 to 4096 .window of 3072 bytes"),
        ("or.b64 %b, %b, 0x2000000000000;", EmulationError, "base offset must be 0"),
        ("cvt.u64.u32 %b, %t;", EmulationError, "differs between lanes"),
        ("setp.eq.u32 %p, %t, 5; @%p ret;", EmulationError, "not all 32 threads"),
    ],
)
def test_invalid_descriptors_and_missing_threads_are_refused(setup, error, message):
    image, out = np.zeros(4096, np.uint8), np.zeros((128, 16), np.uint32)
    with pytest.raises(error, match=message):
        run_text(from_shared(32, setup), image, out, threads=128)


# Floating operands


@pytest.mark.default_cases(
    "shared-8-f16-early",
    "shared-8-f16-late",
    "shared-8-bf16-early",
    "shared-8-bf16-late",
    "shared-40-f16-early",
    "shared-40-f16-late",
    "shared-40-bf16-early",
    "shared-40-bf16-late",
    "shared-128-f16-early",
    "registers-40-f16-early",
    "b 64-64-f16-early",
    "b 128-128-f16-early",
    "a 128-64-f16-early",
    "a 32 b 32-64-f16-early",
)
@both_modes
@pytest.mark.parametrize("type_name", ["f16", "bf16"])
@pytest.mark.parametrize(
    ("case", "n"), [(case, n) for case in CASES for n in ((8, 40, 128) if case in CASES[:2] else (64, 128))]
)
def test_floats_from_everywhere(case: str, type_name: str, n: int, mode: str) -> None:
    text, image, a_registers, right = problem(case, type_name, n)
    out = np.zeros((128, n // 2), np.uint32)
    assert not run_text(text, image, a_registers, out, threads=128, checks=emulator.CHECKS, mode=mode).findings
    assert np.array_equal(wgmma_d(n, True).gather(out, np.float32), right)


@both_modes
@pytest.mark.parametrize(("type_name", "d"), NARROW)
@pytest.mark.parametrize("case", CASES[:2])
def test_tf32_fp8_and_f16_accumulators(case: str, type_name: str, d: str, mode: str) -> None:
    output, expected = run_narrow(case, type_name, d, backend="emulator", checks="all", mode=mode)
    np.testing.assert_array_equal(output, expected.astype(d.replace("f", "float")))


@both_modes
@pytest.mark.parametrize("case", CASES[:2])
@pytest.mark.parametrize(
    ("d", "planted", "kinds"),
    [
        ("f32", 0x7BFF, []),
        ("f16", 0x7BFF, ["overflow"]),  # 65504 times what is 8 in A
        ("f32", 0x7C00, ["nan"]),  # infinity times what is 0 in A
        ("f32", 0x7E00, []),  # a NaN that was there
    ],
)
def test_where_a_nan_arises(d: str, planted: int, kinds: list[str], case: str, mode: str) -> None:
    """A number planted in B's last row brings a finding where the product makes a NaN of it; D is 1 before."""
    text, image, a_registers, _ = problem(case, "f16", 64, d)
    image.view(np.uint16)[-1024 - 8 :][:8] = planted  # B's end, before 2,048 bytes that nobody reads
    text = text.replace(" -1, 1", " 1, 1")
    findings = run_text(
        text, image, a_registers, np.zeros((128, 32), np.uint32), threads=128, checks=["float"], mode=mode
    ).findings
    assert [(f.kind, f.line) for f in findings] == [(kind, line_of(text, "mma_async")) for kind in kinds]


def test_fp8_operands_may_differ() -> None:
    text, image, a_registers, right = problem("shared", "e4m3", 64)
    out = np.zeros((128, 32), np.uint32)
    run_text(text.replace("e4m3.e4m3", "e4m3.e5m2"), image, a_registers, out, threads=128)
    codes = np.arange(256, dtype=np.uint8)
    as_e5m2 = codes.view(ml_dtypes.float8_e5m2).astype(np.float32)
    (a, _), (_, b_bits) = (draw_operand(rng := np.random.default_rng(6), 64, "e4m3"), draw_operand(rng, 64, "e4m3"))
    assert np.array_equal(wgmma_d(64, True).gather(out, np.float32), 1 - a @ as_e5m2[b_bits].T)
    assert not np.array_equal(right, 1 - a @ as_e5m2[b_bits].T)


@pytest.mark.gpu
@pytest.mark.parametrize(("type_name", "d"), NARROW)
@pytest.mark.parametrize("case", CASES[:2])
def test_narrow_floats_on_hopper(case: str, type_name: str, d: str) -> None:
    output, expected = run_narrow(case, type_name, d, backend="gpu")
    assert np.array_equal(output, expected.astype(d.replace("f", "float")))


@pytest.mark.gpu
@pytest.mark.parametrize("type_name", ["f16", "bf16"])
@pytest.mark.parametrize("case", CASES)
def test_floats_on_hopper(case: str, type_name: str) -> None:
    text, image, a_registers, right = problem(case, type_name, 64)
    out = np.zeros((128, 32), np.uint32)
    ptxlab.load(text)(image, a_registers, out, grid=1, block=128, backend="gpu")
    assert np.array_equal(wgmma_d(64, True).gather(out, np.float32), right)


@pytest.mark.parametrize(
    ("form", "constants", "message"),
    [
        ("m64n8k16.f32.f16.f16", "1, 1, 0", "takes 4 constants"),
        ("m64n8k16.f32.f16.f16", "1, 2, 0, 0", "signs of A and B, 1 or -1"),
        ("m64n8k16.f32.f16.f16", "1, 1, 0, 3", "transposed, 1, or not, 0"),
        ("m64n8k32.f32.e4m3.e4m3", "1, 1, 0, 0", "takes 2 constants: signs of A and B, 1 or -1: "),
    ],
)
def test_constants_that_no_wgmma_takes(form: str, constants: str, message: str) -> None:
    text = kernel_text(("mov.b64 %da, 0;", "%da"), "0", 2048, 8, form, constants)
    with pytest.raises(SourceError, match=message):
        run_text(text, np.zeros(4096, np.uint8), np.zeros(512, np.uint32), np.zeros(512, np.uint32), threads=128)


def test_an_mn_major_operand_without_a_swizzle_is_refused() -> None:
    descriptor = MatrixDescriptor(1024, 256, 128).encode()
    text = kernel_text(
        (f"mov.b64 %da, {descriptor};", "%da"), str(descriptor), 2048, 8, "m64n8k16.f32.f16.f16", "1, 1, 0, 1"
    )
    with pytest.raises(EmulationError, match="an MN-major operand needs a swizzle"):
        run_text(text, np.zeros(4096, np.uint8), np.zeros(512, np.uint32), np.zeros(512, np.uint32), threads=128)
