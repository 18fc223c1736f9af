"""cp.async: groups of copies to shared memory, with sizes, zero fill and predicates."""

import numpy as np

from tests.fuzz.categories.straight import program_threads
from tests.fuzz.program import Program

WINDOW = 64  # bytes of a thread in shared memory
ROWS = 4  # of inputs that are copied


def generate(rng: np.random.Generator, category: str) -> Program:
    """Make a program: each thread copies to its own bytes, from those of any thread, and waits for all groups."""
    program = Program(rng, category, program_threads(rng, (32, 64, 128)))
    program.is_asynchronous = True
    program.shared.append(f".shared .align 128 .b8 window[{WINDOW * program.threads}];")
    window, from_, pattern = program.register(32), program.register(64), program.register(64)
    first = len(program.inputs)
    program.inputs += [rng.integers(0, 2**64, program.total, dtype=np.uint64) for _ in range(ROWS)]
    lines = [
        f"mov.u32 {window}, window;",
        f"mad.lo.u32 {window}, %t, {WINDOW}, {window};",
        f"mov.b64 {pattern}, 0x1234567890abcdef;",
        *(f"st.shared.b64 [{window}+{offset}], {pattern};" for offset in range(0, WINDOW, 8)),
        f"ld.param.u64 {from_}, [inputs];",
        f"cvta.to.global.u64 {from_}, {from_};",
    ]
    offset = 0
    for _ in range(1 + program.below(4)):
        for _ in range(1 + program.below(2)):
            size = program.pick(4, 8, 16)
            offset += -offset % size
            if offset + size <= WINDOW:
                lines += _copy(program, window, from_, first, offset, size)
                offset += size
        lines.append("cp.async.commit_group;")
    lines.append(program.pick("cp.async.wait_all;", "cp.async.wait_group 0;"))
    loaded = [program.register(64) for _ in range(0, WINDOW, 8)]
    lines += [f"ld.shared.b64 {register}, [{window}+{8 * i}];" for i, register in enumerate(loaded)]
    program.sequence(lines, "cp.async", [(register, "u64") for register in loaded])
    return program


def _copy(program: Program, window: str, from_: str, first: int, at: int, size: int) -> list[str]:
    """Draw a copy from a place of the inputs that is aligned to its size."""
    places = ROWS * 8 * program.total // size
    place, address, bytes_taken = program.register(32), program.register(64), program.register(32)
    turn = program.below(places)
    cache, hint = program.pick("ca", "cg") if size == 16 else "ca", program.pick("", "", ".L2::128B", ".L2::64B")
    lines = [
        f"add.u32 {place}, %t, {turn};",
        f"rem.u32 {place}, {place}, {places};",
        f"mad.wide.u32 {address}, {place}, {size}, {from_};",
    ]
    space = program.pick("shared", "shared::cta")
    copy = f"cp.async.{cache}.{space}.global{hint} [{window}+{at}], [{address}+{8 * program.total * first}]"
    kind = program.below(4)
    if kind == 0:  # fewer bytes, the rest zeros
        fewer = f"mov.u32 {bytes_taken}, {program.below(size + 1)};"
        return [*lines, program.pick(fewer, f"and.b32 {bytes_taken}, %t, {size};"), f"{copy}, {size}, {bytes_taken};"]
    if kind == 1:  # zeros where a predicate holds
        ignored = program.register(1)
        return [*lines, f"setp.lt.u32 {ignored}, %lane, {program.below(33)};", f"{copy}, {size}, {ignored};"]
    return [*lines, f"{copy}, {size};"]
