"""Barriers of parts of a block, arrivals without waiting, and reductions at barriers."""

import numpy as np

from tests.fuzz.categories.straight import program_threads
from tests.fuzz.program import How, Program

CROSSES = How(crosses=True)


def generate(rng: np.random.Generator, category: str) -> Program:
    """Make a program of an even number of warps."""
    program = Program(rng, category, program_threads(rng, (64, 128, 192)))
    program.shared.append(f".shared .align 16 .b8 tile[{4 * program.threads}];")
    base = program.register(32)
    program.lines(f"mov.u32 {base}, tile;")
    for _ in range(3 + program.below(6)):
        program.pick(meet_in_pairs, arrive_and_wait, add_votes, add_count, add_count_of_pairs)(program, base)
    return program


def meet_in_pairs(program: Program, base: str) -> None:
    """Let two warps at a time meet at a barrier of their own, and read each other's words."""
    number, place, d = (program.register(32) for _ in range(3))
    word = program.input("b32")
    barrier = program.pick("bar.sync", "barrier.sync", "barrier.cta.sync.aligned")
    lines = [
        f"shr.u32 {number}, %warp, 1;",
        f"add.u32 {number}, {number}, 1;",
        f"mad.lo.u32 {place}, %t, 4, {base};",
        "bar.sync 0;",
        f"st.shared.u32 [{place}], {word.text};",
        f"{barrier} {number}, 64;",
        f"xor.b32 {place}, %t, {program.below(64)};",
        f"mad.lo.u32 {place}, {place}, 4, {base};",
        f"ld.shared.u32 {d}, [{place}];",
    ]
    program.sequence(lines, f"{barrier} of two warps", [(d, "b32")], (word,), CROSSES)


def arrive_and_wait(program: Program, base: str) -> None:
    """Let the first warp arrive at a barrier where the second waits for its words."""
    place, d, is_of_others, is_first = (program.register(bits) for bits in (32, 32, 1, 1))
    word, barrier, (end, waits) = program.input("b32"), 1 + program.below(15), program.labels(2)
    lines = [
        "bar.sync 0;",
        f"mad.lo.u32 {place}, %t, 4, {base};",
        f"mov.b32 {d}, 5;",
        f"setp.ge.u32 {is_of_others}, %t, 64;",
        f"@{is_of_others} bra {end};",
        f"setp.lt.u32 {is_first}, %t, 32;",
        f"@!{is_first} bra {waits};",
        f"st.shared.u32 [{place}], {word.text};",
        f"bar.arrive {barrier}, 64;",
        f"bra {end};",
        f"{waits}:",
        f"bar.sync {barrier}, 64;",
        f"sub.u32 {place}, {place}, 128;",
        f"ld.shared.u32 {d}, [{place}];",
        f"{end}:",
        "bar.sync 0;",
    ]
    program.sequence(lines, "bar.arrive and bar.sync", [(d, "b32")], (word,), CROSSES)


def add_votes(program: Program, base: str) -> None:
    """Ask whether all threads have a predicate, or some."""
    alike = np.full(program.total, program.below(2)) if program.chance(0.5) else None
    vote, d = program.input("pred", alike), program.register(1)
    name = program.pick("and", "or")
    line = f"bar.red.{name}.pred {d}, 0, {program.pick('', '!')}{vote.text};"
    program.sequence([line], f"bar.red.{name}", [(d, "pred")], (vote,), CROSSES)


def add_count(program: Program, base: str) -> None:
    """Count the threads of the block that have a predicate."""
    vote, d = program.input("pred"), program.register(32)
    opcode = program.pick("bar.red.popc.u32", "barrier.cta.red.popc.aligned.u32")
    line = f"{opcode} {d}, 0, {program.pick('', '!')}{vote.text};"
    program.sequence([line], opcode, [(d, "u32")], (vote,), CROSSES)


def add_count_of_pairs(program: Program, base: str) -> None:
    """Count the threads of two warps that have a predicate, at barriers that `meet_in_pairs` has not."""
    vote, d, number = program.input("pred"), program.register(32), program.register(32)
    lines = [
        f"shr.u32 {number}, %warp, 1;",
        f"add.u32 {number}, {number}, 4;",
        f"bar.red.popc.u32 {d}, {number}, 64, {vote.text};",
    ]
    program.sequence(lines, "bar.red.popc of two warps", [(d, "u32")], (vote,), CROSSES)
