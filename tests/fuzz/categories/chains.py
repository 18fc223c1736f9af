"""Programmatic launches: a kernel begins before the one in front of it has ended, and waits for what that writes."""

import numpy as np

from tests.fuzz.categories import integers
from tests.fuzz.categories.straight import program_threads
from tests.fuzz.program import How, Program

WORDS = 4  # of 64 bits, that each thread hands on


def generate(rng: np.random.Generator, category: str) -> Program:
    """Make a program of two or three kernels that hand words to each other through global memory."""
    program = Program(rng, category, program_threads(rng, (32, 64, 128)), blocks=1 + int(rng.integers(4)))
    program.is_asynchronous = True
    program.arrays = [np.zeros(3 * WORDS * program.total, np.uint64)]
    program.parameters.append(".param .u64 memory")
    last = program.pick(1, 1, 2)
    for number in range(last + 1):
        if number:
            program.next_kernel()
        tells_early = program.chance(0.6)
        if number < last and tells_early:
            program.lines("griddepcontrol.launch_dependents;")
        compute_before_wait(program, waits=number > 0)
        if number:
            load_from_previous_kernel(program, number - 1)
        compute(program)
        if number < last:
            store_for_next_kernel(program, number)
            if not tells_early and program.chance(0.5):
                program.lines("griddepcontrol.launch_dependents;")
    return program


def compute(program: Program) -> None:
    """Compute with what is there."""
    for _ in range(2 + program.below(6)):
        program.form(integers.ARITHMETIC)


def compute_before_wait(program: Program, waits: bool) -> None:
    """Compute, and store only behind the wait: the kernel before may still use its memory."""
    start = len(program.units)
    compute(program)
    if waits:
        early = program.units[start:]
        program.units[start:] = [unit for unit in early if not unit.stores]
        program.lines("griddepcontrol.wait;")
        program.units += [unit for unit in early if unit.stores]


def locate_words(program: Program, number: int, thread: str) -> tuple[list[str], str]:
    """Compute where a thread of all has its words of a kernel; `thread` is a register with its number."""
    address = program.register(64)
    offset = 8 * WORDS * program.total * number
    return [
        f"ld.param.u64 {address}, [memory];",
        f"cvta.to.global.u64 {address}, {address};",
        f"mad.wide.u32 {address}, {thread}, {8 * WORDS}, {address};",
        f"add.u64 {address}, {address}, {offset};",
    ], address


def store_for_next_kernel(program: Program, number: int) -> None:
    """Store words for the next kernel."""
    lines, at = locate_words(program, number, "%scratch")
    first = [f"mad.lo.u32 %scratch, %block, {program.threads}, %t;"]
    stores = [f"st.global.b64 [{at}+{8 * i}], {program.source('b64').text};" for i in range(WORDS)]
    program.lines(*first, *lines, *stores)


def load_from_previous_kernel(program: Program, number: int) -> None:
    """Load the words that another thread, of any block, left in the kernel before."""
    thread = program.register(32)
    lines, at = locate_words(program, number, thread)
    turn = [
        f"mad.lo.u32 {thread}, %block, {program.threads}, %t;",
        f"add.u32 {thread}, {thread}, {program.below(program.total)};",
        f"rem.u32 {thread}, {thread}, {program.total};",
    ]
    d = [program.register(64) for _ in range(WORDS)]
    loads = [f"ld.global.b64 {register}, [{at}+{8 * i}];" for i, register in enumerate(d)]
    program.sequence([*turn, *lines, *loads], "ld.global of a chain", [(r, "b64") for r in d], how=How(crosses=True))
