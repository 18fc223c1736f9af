"""Bulk copies to shared memory and back, and bulk reductions into global memory, with an mbarrier and bulk groups."""

import numpy as np

from tests.fuzz.categories.straight import program_threads
from tests.fuzz.domains import DOMAINS, Values
from tests.fuzz.program import How, Program

CROSSES = How(crosses=True)
COMBINED = (  # names, and types of each
    (("add", "min", "max"), ("u32", "s32", "u64")),
    (("min", "max"), ("s64", "f16", "bf16")),
    (("and", "or", "xor"), ("b32", "b64")),
    (("inc", "dec"), ("u32",)),
    (("add.noftz",), ("f16", "bf16")),
    (("add",), ("f32", "f64")),
)
REDUCTIONS = [f"{name}.{t}" for names, types in COMBINED for name in names for t in types]


def draw_words(program: Program, t: str) -> Values:
    """Draw 64 bits for each thread, of elements of a type."""
    domain = {"f16": "f16x2", "bf16": "bf16x2", "f32": "f32"}.get(t)
    if domain:
        low, high = (DOMAINS[domain].draw(program.rng, program.total) for _ in range(2))
        return low | high << np.uint64(32)
    return DOMAINS["f64" if t == "f64" else "b64"].draw(program.rng, program.total)


def generate(rng: np.random.Generator, category: str) -> Program:
    """Make a program: one thread copies rows of inputs to shared memory; then it copies or reduces them into memory."""
    program = Program(rng, category, program_threads(rng, (32, 64, 128)))
    program.is_asynchronous = True
    reduction = program.pick(*REDUCTIONS) if program.chance(0.6) else ""
    t, rows, first = reduction.split(".")[-1], 2 + program.below(4), len(program.inputs)
    program.inputs += [draw_words(program, t) for _ in range(rows)]
    size = rows * 8 * program.threads
    count = 16 * (1 + program.below(size // 16)) if program.chance(0.6) else size
    program.shared += [f".shared .align 128 .b8 tile[{size}];", ".shared .align 8 .b64 barrier;"]
    program.declarations.append(f".global .align 128 .b8 memory[{size}];")
    tile, barrier, place, from_, memory, array, pattern, one = (
        program.register(bits) for bits in (32, 32, 32, 64, 64, 64, 64, 1)
    )
    offsets = [8 * program.threads * row for row in range(rows)]
    program.lines(
        f"mov.u32 {tile}, tile;",
        f"mov.u32 {barrier}, barrier;",
        f"mov.u64 {memory}, memory;",
        f"ld.param.u64 {from_}, [inputs];",
        f"cvta.to.global.u64 {from_}, {from_};",
        f"add.u64 {from_}, {from_}, {8 * program.total * first};",
        f"mad.lo.u32 {place}, %t, 8, {tile};",
        f"mad.wide.u32 {array}, %t, 8, {memory};",
        f"mov.b64 {pattern}, 0x0123456789abcdef;",
        f"setp.eq.u32 {one}, %t, 0;",
        *(f"st.shared.b64 [{place}+{a}], {pattern};" for a in offsets),
    )
    copy_to_shared(program, (tile, barrier, from_, one), place, offsets, count)
    target = [program.input("b64", draw_words(program, t)).text if reduction else pattern for _ in offsets]
    again = []
    for row, a in enumerate(offsets if reduction else ()):
        again.append(f"ld.global.b64 {pattern}, [%in+{8 * program.total * (first + row)}];")
        again.append(f"st.shared.b64 [{place}+{a}], {pattern};")
    name = "cp.reduce.async" if reduction else "cp.async"
    opcode = f"{name}.bulk.global.shared::cta.bulk_group" + f".{reduction}" * bool(reduction)
    (end,) = program.labels(1)
    lines = [
        *(f"st.global.b64 [{array}+{a}], {register};" for a, register in zip(offsets, target, strict=True)),
        *again,
        "fence.proxy.async;",
        "bar.sync 0;",
        f"@!{one} bra {end};",
        f"{opcode} [{memory}], [{tile}], {count};",
        "cp.async.bulk.commit_group;",
        "cp.async.bulk.wait_group 0;",
        program.pick("fence.proxy.async;", "fence.proxy.async.global;"),
        f"{end}:",
        "bar.sync 0;",
    ]
    registers_of_results = []
    for a in offsets:
        domain = {"f16": "f16x2", "bf16": "bf16x2", "f32": "f32"}.get(t)
        if domain:
            pair = [program.register(32), program.register(32)]
            lines.append(f"ld.global.v2.b32 {{{pair[0]}, {pair[1]}}}, [{array}+{a}];")
            registers_of_results += [(register, domain) for register in pair]
        else:
            registers_of_results.append((program.register(64), "f64" if t == "f64" else "b64"))
            lines.append(f"ld.global.b64 {registers_of_results[-1][0]}, [{array}+{a}];")
    program.sequence(lines, opcode, registers_of_results, how=CROSSES)
    return program


def copy_to_shared(
    program: Program, registers: tuple[str, str, str, str], place: str, at: list[int], count: int
) -> None:
    """Copy bytes to shared memory by one thread, and wait for them by all."""
    tile, barrier, from_, one = registers
    (wait,) = program.labels(1)
    state, space = program.register(64), program.pick("cluster", "cta")
    copy = f"cp.async.bulk.shared::{space}.global.mbarrier::complete_tx::bytes"
    lines = [
        f"@{one} mbarrier.init.shared.b64 [{barrier}], 1;",
        f"@{one} fence.mbarrier_init.release.cluster;",
        "fence.proxy.async.shared::cta;",
        "bar.sync 0;",
        f"@!{one} bra {wait};",
        f"mbarrier.arrive.expect_tx.shared.b64 {state}, [{barrier}], {count};",
        f"{copy} [{tile}], [{from_}], {count}, [{barrier}];",
        f"{wait}:",
        f"mbarrier.try_wait.parity.shared.b64 %is, [{barrier}], 0;",
        f"@!%is bra {wait};",
    ]
    loaded = [program.register(64) for _ in at]
    lines += [f"ld.shared.b64 {register}, [{place}+{a}];" for register, a in zip(loaded, at, strict=True)]
    program.sequence([*lines, "bar.sync 0;"], copy, [(register, "b64") for register in loaded], how=CROSSES)
