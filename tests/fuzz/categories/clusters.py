"""Clusters: shared memory of other blocks by loads, atomics, asynchronous stores and multicast copies."""

import numpy as np

from tests.fuzz.categories.straight import program_threads
from tests.fuzz.domains import DOMAINS
from tests.fuzz.program import How, Program

CROSSES = How(crosses=True)
SPECIALS = (
    "%cluster_ctarank", "%cluster_nctarank", "%clusterid.x", "%nclusterid.x", "%cluster_ctaid.x",
    "%cluster_nctaid.x", "%ctaid.x", "%nctaid.x", "%ntid.x",
)  # fmt: skip
MEET = ("barrier.cluster.arrive{aligned};", "barrier.cluster.wait{aligned};")


def generate(rng: np.random.Generator, category: str) -> Program:
    """Make a program of one to three clusters of two or four blocks."""
    cluster = int(rng.choice([2, 2, 4]))
    threads = program_threads(rng, (32, 64))
    program = Program(rng, category, threads, blocks=cluster * int(rng.integers(1, 4)), cluster=cluster)
    program.is_asynchronous = True
    program.shared += [
        f".shared .align 128 .b8 tile[{16 * threads}];",
        ".shared .align 8 .b64 barrier;",
        ".shared .align 16 .b64 sums[4];",
    ]
    read_special_registers(program)
    for step in (exchange_with_neighbour, add_remote_atomics, add_async_stores, add_multicast_copy):
        if program.chance(0.7):
            step(program)
    return program


def draw_barrier(program: Program) -> list[str]:
    """Draw a barrier of the cluster."""
    aligned = program.pick("", ".aligned")
    return [line.format(aligned=aligned) for line in MEET]


def read_special_registers(program: Program) -> None:
    """Read what tells a block where it is."""
    d = [program.register(32) for _ in SPECIALS]
    lines = [f"mov.u32 {register}, {name};" for register, name in zip(d, SPECIALS, strict=True)]
    program.sequence(lines, "special registers", [(register, "u32") for register in d])


def address_in_peer(program: Program, symbol: str, further: int) -> tuple[list[str], str]:
    """Compute the address of a variable in the block of the cluster that is so many further on."""
    rank, place, address = program.register(32), program.register(32), program.register(32)
    return [
        f"mov.u32 {rank}, %cluster_ctarank;",
        f"add.u32 {rank}, {rank}, {further};",
        f"rem.u32 {rank}, {rank}, {program.cluster};",
        f"mov.u32 {place}, {symbol};",
        f"mapa.shared::cluster.u32 {address}, {place}, {rank};",
    ], address


def exchange_with_neighbour(program: Program) -> None:
    """Store a word in each thread's block, and load that of a thread of another block."""
    word, place, d, neighbour = program.input("b64"), program.register(32), program.register(64), program.register(32)
    lines, address = address_in_peer(program, "tile", program.below(program.cluster))
    lines = [
        f"mov.u32 {place}, tile;",
        f"mad.lo.u32 {place}, %t, 8, {place};",
        *draw_barrier(program),
        f"st.shared.b64 [{place}], {word.text};",
        *draw_barrier(program),
        *lines,
        f"xor.b32 {neighbour}, %t, {program.below(program.threads)};",
        f"mad.lo.u32 {address}, {neighbour}, 8, {address};",
        f"ld.shared::cluster.b64 {d}, [{address}];",
        *draw_barrier(program),
    ]
    program.sequence(lines, "ld.shared::cluster", [(d, "b64")], (word,), CROSSES)


def add_remote_atomics(program: Program) -> None:
    """Let all threads of a block combine with words of another block."""
    name, t = program.pick("add.u32", "add.u64", "max.s32", "xor.b64", "min.u64", "or.b32").split(".")
    bits, is_first, place, index = DOMAINS[t].bits, program.register(1), program.register(32), program.register(32)
    word, start, d = program.input(t), program.register(bits), program.register(bits)
    further = program.below(program.cluster)
    if further and bits == 64 and name != "add":
        program.avoid("64-bit atomics of other blocks")
        further = 0
    lines, address = address_in_peer(program, "sums", further)
    first = int(DOMAINS[t].draw(program.rng, 1)[0])
    opcode = f"red{program.pick('', '.relaxed.cluster', '.release.cluster')}.shared::cluster.{name}.{t}"
    lines = [
        *draw_barrier(program),
        f"mov.u32 {place}, sums;",
        f"mov.b{bits} {start}, {first};",
        f"setp.lt.u32 {is_first}, %t, 4;",
        f"mad.lo.u32 {index}, %t, 8, {place};",
        f"@{is_first} st.shared.b{bits} [{index}], {start};",
        *draw_barrier(program),
        *lines,
        f"and.b32 {index}, %t, 3;",
        f"mad.lo.u32 {address}, {index}, 8, {address};",
        f"{opcode} [{address}], {word.text};",
        *draw_barrier(program),
        f"mad.lo.u32 {index}, {index}, 8, {place};",
        f"ld.shared.b{bits} {d}, [{index}];",
    ]
    program.sequence(lines, opcode, [(d, t)], (word,), CROSSES)


def add_async_stores(program: Program) -> None:
    """Send a word from each thread to another block by st.async; its mbarrier counts the bytes."""
    word, d, state, one = program.input("b64"), program.register(64), program.register(64), program.register(1)
    lines, address = address_in_peer(program, "tile", program.below(program.cluster))
    # the same block's mbarrier: by the same steps
    at, mapped, place, (wait,) = program.register(32), program.register(32), program.register(32), program.labels(1)
    rank = lines[0].split()[1].rstrip(",")
    lines = [
        f"setp.eq.u32 {one}, %t, 0;",
        f"mov.u32 {at}, barrier;",
        *draw_barrier(program),
        f"@{one} mbarrier.init.shared.b64 [{at}], 1;",
        f"@{one} fence.mbarrier_init.release.cluster;",
        *draw_barrier(program),
        f"@{one} mbarrier.arrive.expect_tx.shared.b64 {state}, [{at}], {8 * program.threads};",
        *lines,
        f"mapa.shared::cluster.u32 {mapped}, {at}, {rank};",
        f"mad.lo.u32 {address}, %t, 8, {address};",
        f"st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.b64 [{address}], {word.text}, [{mapped}];",
        f"{wait}:",
        f"mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 %is, [{at}], 0;",
        f"@!%is bra {wait};",
        f"mov.u32 {place}, tile;",
        f"mad.lo.u32 {place}, %t, 8, {place};",
        f"ld.shared.b64 {d}, [{place}];",
        *draw_barrier(program),
        f"@{one} mbarrier.inval.shared.b64 [{at}];",
        *draw_barrier(program),
    ]
    program.sequence(lines, "st.async", [(d, "b64")], (word,), CROSSES)


def add_multicast_copy(program: Program) -> None:
    """Copy inputs from the first block of each cluster to the same place in some of its blocks."""
    row = len(program.inputs)
    program.inputs.append(program.rng.integers(0, 2**64, program.total, dtype=np.uint64))
    size = 8 * program.threads
    mask = 1 + program.below((1 << program.cluster) - 1)
    one, is_sender, is_told, at, from_, place, d, state, rank, bit, halves = (
        program.register(bits) for bits in (1, 1, 1, 32, 64, 32, 64, 64, 32, 32, 16)
    )
    end, wait = program.labels(2)
    copy = "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster"
    lines = [
        f"setp.eq.u32 {one}, %t, 0;",
        f"mov.u32 {at}, barrier;",
        f"mov.u32 {place}, tile;",
        f"mov.u32 {rank}, %cluster_ctarank;",
        f"mad.lo.u32 {bit}, %t, 8, {place};",
        f"mov.b64 {d}, 77;",
        *draw_barrier(program),
        f"st.shared.b64 [{bit}], {d};",
        f"@{one} mbarrier.init.shared.b64 [{at}], 1;",
        f"@{one} fence.mbarrier_init.release.cluster;",
        "fence.proxy.async;",
        *draw_barrier(program),
        f"shr.u32 {bit}, {mask}, {rank};",
        f"and.b32 {bit}, {bit}, 1;",
        f"setp.eq.u32 {is_told}, {bit}, 1;",
        f"and.pred {is_sender}, {one}, {is_told};",
        f"@{is_sender} mbarrier.arrive.expect_tx.shared.b64 {state}, [{at}], {size};",
        *draw_barrier(program),
        f"setp.eq.u32 {is_sender}, {rank}, 0;",
        f"and.pred {is_sender}, {is_sender}, {one};",
        f"ld.param.u64 {from_}, [inputs];",
        f"cvta.to.global.u64 {from_}, {from_};",
        f"add.u64 {from_}, {from_}, {8 * program.total * row};",
        f"mov.u16 {halves}, {mask};",
        f"@{is_sender} {copy} [{place}], [{from_}], {size}, [{at}], {halves};",
        f"@!{is_told} bra {end};",
        f"{wait}:",
        f"mbarrier.try_wait.parity.shared::cta.b64 %is, [{at}], 0;",
        f"@!%is bra {wait};",
        f"{end}:",
        f"mad.lo.u32 {bit}, %t, 8, {place};",
        f"ld.shared.b64 {d}, [{bit}];",
        *draw_barrier(program),
        f"@{one} mbarrier.inval.shared.b64 [{at}];",
        *draw_barrier(program),
    ]
    program.sequence(lines, copy, [(d, "b64")], how=CROSSES)
