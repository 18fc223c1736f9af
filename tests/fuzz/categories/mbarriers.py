"""mbarriers: states, counts and phases as one thread sees them, and blocks that meet at one."""

import numpy as np

from tests.fuzz.categories.straight import program_threads
from tests.fuzz.program import How, Program


def generate(rng: np.random.Generator, category: str) -> Program:
    """Make a program."""
    program = Program(rng, category, program_threads(rng, (32, 64, 128)))
    program.shared += [".shared .align 8 .b64 barriers[4];", f".shared .align 4 .b32 box[{program.threads}];"]
    barriers, one, expected = program.register(32), program.register(1), 2 + program.below(18)
    program.lines(
        f"mov.u32 {barriers}, barriers;",
        f"setp.eq.u32 {one}, %t, 0;",
        f"@{one} mbarrier.init.shared.b64 [{barriers}], {expected};",
        f"@{one} mbarrier.init.shared::cta.b64 [{barriers}+8], {program.threads};",
        "bar.sync 0;",
    )
    use_alone(program, barriers, one, expected)
    for phase in range(1 + program.below(3)):
        use_together(program, barriers, phase)
    return program


def use_alone(program: Program, barriers: str, one: str, expected: int) -> None:
    """Let one thread arrive, drop out, test states and parities; `missing` never falls below what a phase has left."""
    (end,) = program.labels(1)
    clearing, lines, result_registers, missing = [], [f"@!{one} bra {end};"], [], expected
    for _ in range(3 + program.below(8)):
        state, pending, done, is_done = (program.register(bits) for bits in (64, 32, 32, 1))
        clearing += [f"mov.b64 {state}, 0;", f"mov.b32 {pending}, 0;", f"mov.b32 {done}, 0;"]
        count = f"mbarrier.pending_count.b64 {pending}, {state};"
        kind = program.below(4)
        if kind < 2:
            arriving = 1 + program.below(missing) if program.chance(0.4) else 1
            keeps = ".noComplete" if arriving < missing and program.chance(0.3) else ""
            amount = f", {arriving}" if arriving > 1 or keeps else ""
            lines += [
                f"mbarrier.arrive{keeps}.shared.b64 {state}, [{barriers}]{amount};",
                count,
                f"mbarrier.test_wait.shared.b64 {is_done}, [{barriers}], {state};",
                f"selp.u32 {done}, 1, 0, {is_done};",
            ]
            missing = missing - arriving or expected
        elif kind == 2:
            lines += [
                f"mbarrier.test_wait.parity.shared.b64 {is_done}, [{barriers}], {program.below(2)};",
                f"selp.u32 {done}, 1, 0, {is_done};",
            ]
        elif expected > 1 and missing > 1:
            lines += [f"mbarrier.arrive_drop.shared.b64 {state}, [{barriers}];", count]
            missing, expected = missing - 1, expected - 1
        result_registers += [(pending, "u32"), (done, "u32")]
    program.sequence([*clearing, *lines, f"{end}:", "bar.sync 0;"], "mbarrier of one thread", result_registers)


def use_together(program: Program, barriers: str, phase: int) -> None:
    """Let all threads arrive and wait, by state or by parity, and then read each other's words."""
    word, (wait,) = program.input("b32"), program.labels(1)
    state, box, place, d = (program.register(bits) for bits in (64, 32, 32, 32))
    kind = program.pick("test_wait", "try_wait")
    test = program.pick(
        f"{kind}.shared.b64 %is, [{barriers}+8], {state};",
        f"{kind}.parity.shared.b64 %is, [{barriers}+8], {phase & 1};",
    )
    lines = [
        f"mov.u32 {box}, box;",
        f"mad.lo.u32 {place}, %t, 4, {box};",
        "bar.sync 0;",
        f"st.shared.u32 [{place}], {word.text};",
        f"mbarrier.arrive{program.pick('', '.release.cta')}.shared::cta.b64 {state}, [{barriers}+8];",
        f"{wait}:",
        f"mbarrier.{test}",
        f"@!%is bra {wait};",
        f"xor.b32 {place}, %t, {program.below(program.threads)};",
        f"mad.lo.u32 {place}, {place}, 4, {box};",
        f"ld.shared.u32 {d}, [{place}];",
    ]
    program.sequence(lines, "mbarrier of a block", [(d, "b32")], (word,), How(crosses=True))
