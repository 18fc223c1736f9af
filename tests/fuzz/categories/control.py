"""Branches, loops, tables of targets, calls, early exits, and collectives between them."""

import numpy as np

from tests.fuzz.categories.straight import program_threads
from tests.fuzz.program import How, Program

VARIABLES = 6  # registers that all blocks compute with
COMPUTE = (
    "add.s32 {c}, {a}, {b};", "xor.b32 {c}, {a}, {b};", "mul.lo.u32 {c}, {a}, {b};", "sub.s32 {c}, {a}, {n};",
    "shf.l.wrap.b32 {c}, {a}, {b}, {n};", "mad.lo.s32 {c}, {a}, {b}, {c};", "min.s32 {c}, {a}, {b};",
    "prmt.b32 {c}, {a}, {b}, {word};", "add.s32 {c}, {c}, %lane;", "xor.b32 {c}, {c}, %t;", "popc.b32 {c}, {a};",
    "bfe.u32 {c}, {a}, {n}, 9;",
)  # fmt: skip
CONDITIONS = (
    ("setp.lt.s32 {p}, {a}, {b};",), ("setp.eq.s32 {p}, {a}, {b};",), ("setp.gt.u32 {p}, %lane, {n};",),
    ("and.b32 {x}, {a}, {bit};", "setp.eq.u32 {p}, {x}, 0;"), ("and.b32 {x}, %t, {bit};", "setp.ne.u32 {p}, {x}, 0;"),
    ("xor.b32 {x}, {a}, %lane;", "and.b32 {x}, {x}, 5;", "setp.gt.u32 {p}, {x}, 1;"),
)  # fmt: skip
MEETINGS = ("bar.warp.sync 0xffffffff;", "bar.sync 0;")
COLLECTIVES = ("shfl.sync.bfly.b32 {c}, {a}, {bit}, 31, -1;", "redux.sync.xor.b32 {c}, {a}, -1;",
               "match.any.sync.b32 {c}, {a}, -1;", "vote.sync.ballot.b32 {c}, {p}, -1;")  # fmt: skip


class Flow:
    """Blocks of code on a program's variables."""

    def __init__(self, program: Program) -> None:
        self.program = program
        self.variables = [program.register(32) for _ in range(VARIABLES)]
        self.count = 0  # of labels
        program.lines(*(f"mov.b32 {v}, {program.input('b32').text};" for v in self.variables))

    def names(self, **fixed: str) -> dict[str, str]:
        """Draw what a line may name."""
        pick = self.program.pick
        return {
            **{letter: pick(*self.variables) for letter in "abc"},
            "n": str(1 + self.program.below(30)),
            "bit": str(pick(1, 2, 4, 8, 16)),
            "word": hex(self.program.below(1 << 16)),
            **fixed,
        }

    def label(self) -> str:
        """Name a place."""
        self.count += 1
        return f"F{self.count}"

    def compute(self) -> str:
        """Draw a line that changes a variable."""
        return self.program.pick(*COMPUTE).format(**self.names())

    def condition(self) -> tuple[list[str], str]:
        """Draw lines that set a predicate, and the predicate."""
        p, x = self.program.register(1), self.program.register(32)
        return [line.format(**names) for names in [self.names(p=p, x=x)] for line in self.program.pick(*CONDITIONS)], p

    def block(self, depth: int) -> list[str]:
        """Draw some statements, nested so deep at most."""
        lines: list[str] = []
        kinds = (self.guard, self.branch, self.branch, self.skip, self.loop, self.loop, self.table)
        for _ in range(1 + self.program.below(4)):
            if depth <= 0 or self.program.chance(0.35):
                lines.append(self.compute())
            else:
                lines += self.program.pick(*kinds)(depth - 1)
        return lines

    def guard(self, depth: int) -> list[str]:
        """Draw two guarded lines."""
        lines, p = self.condition()
        return [*lines, f"@{p} {self.compute()}", f"@!{p} {self.compute()}"]

    def branch(self, depth: int) -> list[str]:
        """Draw a choice of two blocks."""
        lines, p = self.condition()
        otherwise, end = self.label(), self.label()
        sign = self.program.pick("", "!")
        return [
            *lines,
            f"@{sign}{p} bra {otherwise};",
            *self.block(depth),
            f"bra {end};",
            f"{otherwise}:",
            *self.block(depth),
            f"{end}:",
        ]

    def skip(self, depth: int) -> list[str]:
        """Draw a block that some threads skip."""
        lines, p = self.condition()
        end = self.label()
        return [*lines, f"@{p} bra {end};", *self.block(depth), f"{end}:"]

    def loop(self, depth: int) -> list[str]:
        """Draw a loop of a few rounds, each thread its own, that it may leave early or begin anew."""
        rounds, p = self.program.register(32), self.program.register(1)
        top, end = self.label(), self.label()
        mask = self.program.pick(3, 7, 12)
        lines = [
            f"and.b32 {rounds}, {self.names()['a']}, {mask};",
            f"{top}:",
            f"setp.eq.u32 {p}, {rounds}, 0;",
            f"@{p} bra {end};",
            f"sub.u32 {rounds}, {rounds}, 1;",
            *self.block(depth),
        ]
        if self.program.chance(0.3):
            condition, q = self.condition()
            lines += [*condition, f"@{q} bra {self.program.pick(top, end)};", self.compute()]
        return [*lines, f"bra {top};", f"{end}:"]

    def table(self, depth: int) -> list[str]:
        """Draw a jump to one of four blocks."""
        index, name, end = self.program.register(32), self.label(), self.label()
        targets = [self.label() for _ in range(4)]
        blocks = [line for target in targets for line in (f"{target}:", *self.block(depth - 1), f"bra {end};")]
        return [
            f"and.b32 {index}, {self.names()['a']}, 3;",
            f"{name}: .branchtargets {', '.join(targets)};",
            f"brx.idx {index}, {name};",
            *blocks,
            f"{end}:",
        ]

    def call(self, number: int) -> list[str]:
        """Draw a call of a function with a loop, of two variables and for two."""
        pick, pair = self.program.pick, self.program.register(64)
        text = FUNCTION.format(number=number, mask=pick(1, 3, 7, 15), turn=1 + self.program.below(31))
        self.program.declarations.append(text)
        first, second = self.program.rng.choice(self.variables, 2, replace=False)
        return [
            f"mov.b64 {pair}, {{{pick(*self.variables)}, {pick(*self.variables)}}};",
            "{",
            ".param .b64 argument;",
            ".param .b64 answer;",
            f"st.param.b64 [argument], {pair};",
            f"call{pick('.uni', '')} (answer), mix{number}, (argument);",
            f"ld.param.b64 {pair}, [answer];",
            "}",
            f"mov.b64 {{{first}, {second}}}, {pair};",
        ]

    def meet(self) -> list[str]:
        """Draw a barrier and a collective behind it."""
        lines, p = self.condition()
        return [*lines, self.program.pick(*MEETINGS), self.program.pick(*COLLECTIVES).format(**self.names(p=p))]


# Rounds differ by thread
FUNCTION = """.func (.param .b64 to) mix{number}(.param .b64 from)
{{
.reg .b32 %x, %y, %n;
.reg .b64 %pair;
.reg .pred %again;
ld.param.b64 %pair, [from];
mov.b64 {{%x, %y}}, %pair;
and.b32 %n, %y, {mask};
ROUND:
xor.b32 %x, %x, %y;
shf.l.wrap.b32 %x, %x, %x, {turn};
add.u32 %y, %y, %x;
setp.ne.u32 %again, %n, 0;
sub.u32 %n, %n, 1;
@%again bra ROUND;
mov.b64 %pair, {{%x, %y}};
st.param.b64 [to], %pair;
ret;
}}"""


def generate(rng: np.random.Generator, category: str) -> Program:
    """Make a program: blocks behind each other, in which threads go their own ways, and all variables after each."""
    program = Program(rng, category, program_threads(rng, (32, 64, 96)))
    flow = Flow(program)
    for number in range(1 + program.below(3)):
        lines = flow.block(2 + program.below(2))
        lines += flow.call(number) if program.chance(0.3) else []
        lines += flow.meet() if program.chance(0.5) else []
        program.sequence(lines, "control flow", [(v, "b32") for v in flow.variables], how=How(crosses=True))
    if program.chance(0.3):
        lines, p = flow.condition()
        lines += [f"@{p} {program.pick('ret', 'exit')};", *flow.block(2)]
        program.sequence(lines, "behind an early exit", [(v, "b32") for v in flow.variables], how=How(crosses=True))
    return program
