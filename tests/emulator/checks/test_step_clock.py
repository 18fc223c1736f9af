"""The step clock: a time for every warp, joined where warps wait; copies and wgmma take theirs."""

import numpy as np

from ptxlab.emulator.checks.step_clock import BYTES_PER_STEP, LATENCY
from tests.support.small_kernels import STORE, kernel_text, run_body, run_text

ROUNDS = 50
# Warp 1 goes round a loop of three instructions; warp 0 does not.
LOOP = f"""
    mov.u32 %r0, %tid.x; setp.lt.u32 %p, %r0, 32; mov.u32 %r1, {ROUNDS}; @%p bra AFTER;
AGAIN:
    sub.u32 %r1, %r1, 1; setp.ne.u32 %q, %r1, 0; @%q bra AGAIN;
AFTER:
"""
BARRIER = "bar.sync 0;"
CLOCK = "mov.u32 %s, %clock;"


def test_every_warp_has_a_time_of_its_own() -> None:
    times = run_body(LOOP + CLOCK, threads=64, step_clock=True)
    assert set(times[:32]) == {5} and set(times[32:]) == {5 + 3 * ROUNDS}


def test_without_the_step_clock_all_instructions_are_counted_together() -> None:
    assert run_body(LOOP + CLOCK, threads=64).min() >= 3 * ROUNDS


def test_who_waits_at_a_barrier_goes_on_with_the_last() -> None:
    times = run_body(LOOP + BARRIER + CLOCK, threads=64, step_clock=True)
    assert times[0] == times[32] == 5 + 3 * ROUNDS + 1


def test_the_halves_of_a_clock_and_the_time() -> None:
    for register in ("clock64", "globaltimer"):
        body = f"mov.u64 %x0, %{register}; cvt.u32.u64 %s, %x0;"
        assert set(run_body(LOOP + body, threads=64, step_clock=True)) == {5, 5 + 3 * ROUNDS}
    assert set(run_body("mov.u32 %s, %clock_hi;", step_clock=True)) == {0}


COPY = """
    .shared .align 16 .b8 tile[2048]; .shared .align 8 .b64 full;
    mov.u32 %r0, %tid.x; setp.ne.u32 %p, %r0, 0; mov.u32 %r1, full; mov.u32 %r2, tile; ld.param.u64 %x0, [data];
    @%p bra READY;
    mbarrier.init.shared.b64 [%r1], 1;
    mbarrier.arrive.expect_tx.shared.b64 _, [%r1], 2048;
    cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%r2], [%x0], 2048, [%r1];
READY:
    bar.sync 0; mov.u32 %r5, %clock;
WAIT:
    mbarrier.try_wait.parity.shared.b64 %q, [%r1], 0; @!%q bra WAIT;
    mov.u32 %s, %clock; sub.u32 %s, %s, %r5;
"""


def test_a_copy_takes_its_time() -> None:
    text = kernel_text(COPY + STORE, params=".param .u64 out, .param .u64 data")
    out, copied = np.zeros(32, np.uint32), np.zeros(2048, np.uint8)
    for mode in ("early", "late"):
        run_text(text, out, copied, step_clock=True, mode=mode)
        assert out[0] + 8 > LATENCY and out[0] < LATENCY + 2048 // BYTES_PER_STEP + 8


def test_a_relaxed_wait_takes_the_time_of_the_copy() -> None:
    text = kernel_text(COPY.replace("parity", "parity.relaxed.cta") + STORE, params=".param .u64 out, .param .u64 data")
    out = np.zeros(32, np.uint32)
    run_text(text, out, np.zeros(2048, np.uint8), step_clock=True)
    assert out[0] + 8 > LATENCY


def test_later_waves_begin_where_earlier_ones_ended() -> None:
    blocks = 2 * 132 + 1  # of 1,024 threads: three waves
    clocks = run_body(CLOCK, threads=1024, blocks=blocks, step_clock=True).reshape(blocks, 1024)[:, 0]
    assert len(set(clocks.tolist())) == 3 and (np.diff(clocks.astype(int)) >= 0).all()


def test_global_variables_are_handed_back() -> None:
    body = "mov.u64 %x0, counts; mov.u32 %r0, %tid.x; atom.global.add.u32 %r1, [%x0+4], 1; ret;"
    launch = run_text(
        kernel_text(body, outside=".visible .global .align 4 .u32 counts[2] = {7, 8};"), np.zeros(1, np.uint32)
    )
    assert np.frombuffer(launch.variables["counts"], np.uint32).tolist() == [7, 40]
