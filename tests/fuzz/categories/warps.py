"""Shuffles, votes, matches and reductions, of whole warps and of parts of them."""

import numpy as np

from tests.fuzz.categories.straight import generate_straight
from tests.fuzz.forms import parse
from tests.fuzz.program import How, Program

THREADS = (32, 64, 96)
TABLE = parse("""
shfl.sync.(up/down/bfly/idx).b32 (d:b32/d:b32|p:pred), a:b32, b:count, c:count, -1;
shfl.sync.(up/down/bfly/idx).b32 (d:b32/d:b32|p:pred), a:b32, b:count, (0/31/6144/6175/4103/7683/7936/7), -1;
shfl.sync.(up/down/bfly/idx).b32 (d:b32/d:b32|p:pred), a:b32, b:lane, #0-8191, 0xffffffff;
vote.sync.(all/any/uni).pred p:pred, (/!)a:pred, -1;
vote.sync.ballot.b32 d:b32, (/!)a:pred, -1;
match.any.sync.b32 d:b32, (a:alike32/a:b32), -1;
match.any.sync.b64 d:b32, a:alike64, -1;
match.all.sync.b32 (d:b32/d:b32|p:pred), a:alike32, -1;
match.all.sync.b64 (d:b32/d:b32|p:pred), a:alike64, -1;
redux.sync.(add/min/max).(t=u32/s32) d:$t, a:$t, -1;
redux.sync.(and/or/xor).b32 d:b32, a:b32, -1;
elect.sync d:b32|p:pred, -1;
""")
HOW = How(crosses=True, guarded=False, constants=False)
# Lanes with these bits of their number equal to the second are a part
PARTS = ((1, 0), (1, 1), (2, 2), (16, 0), (16, 16), (4, 4), (24, 8))
OF_A_PART = """redux.sync.add.s32 {d}, {a}, {mask};
redux.sync.max.u32 {d}, {a}, {mask};
redux.sync.xor.b32 {d}, {a}, {mask};
vote.sync.ballot.b32 {d}, {p}, {mask};
match.any.sync.b32 {d}, {f}, {mask};
match.all.sync.b32 {d}, {f}, {mask};
shfl.sync.idx.b32 {d}, {a}, {member}, 31, {mask};
elect.sync {d}|{q}, {mask};""".splitlines()


def generate(rng: np.random.Generator, category: str) -> Program:
    """Make a program."""
    program = generate_straight(rng, category, [(TABLE, HOW)], (15, 40), THREADS)
    for _ in range(int(rng.integers(1, 6))):
        add_collective_of_some_lanes(program)
    return program


def add_collective_of_some_lanes(program: Program) -> None:
    """Add a collective of some lanes of each warp: behind a branch, or under a guard."""
    bits, equal = program.pick(*PARTS)
    members = [lane for lane in range(32) if lane & bits == equal]
    a, f, p = program.source("b32"), program.source("alike32"), program.source("pred")
    d, masked, is_member = program.register(32), program.register(32), program.register(1)
    text = program.pick(*OF_A_PART).format(
        d=d,
        q=program.register(1),
        a=a.text,
        p=p.text,
        f=f.text,
        member=program.pick(*members),
        mask=hex(sum(1 << lane for lane in members)),
    )
    lines = [f"mov.b32 {d}, 77;", f"and.b32 {masked}, %lane, {bits};", f"setp.eq.u32 {is_member}, {masked}, {equal};"]
    if program.chance(0.5):
        (end,) = program.labels(1)
        lines += [f"@!{is_member} bra {end};", text, f"{end}:", "bar.warp.sync -1;"]
    else:
        lines.append(f"@{is_member} {text}")
    program.sequence(lines, f"part of a warp: {text.split()[0]}", [(d, "b32")], (a, f, p), How(crosses=True))
