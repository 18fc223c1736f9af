"""The instructions whose truth is recorded on a GPU: one small kernel for each, and its inputs.

A case is a line of PTX with its operands as `{name:domain}`. Names d, e, p, q are destinations, m is the address of a
word that an atomic changes, all others are sources; the domain says what is loaded, from which values, and how results
are compared. One thread runs one row. Inputs are the same wherever they are made (`RandomState` streams never change),
so only outputs are stored.
"""

from __future__ import annotations

import itertools
import re
import zlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import numpy as np

OUTPUTS = "depqm"
BLOCK_THREADS = 64  # of every case's kernel
_FIELD = re.compile(r"\{(\w):(\w+)\}")

_I16 = [0, 1, 2, 127, 128, 255, 256, 0x7FFF, 0x8000, 0x8001, 0xFFFE, 0xFFFF]
_I32 = [0, 1, 2, 127, 128, 255, 256, 0x7FFF, 0x8000, 0xFFFF, 0x10000, 0x7FFFFFFF, 0x80000000, 0x80000001, 0xFFFFFFFE,
        0xFFFFFFFF, 0x80808080, 0x7F7F7F7F, 0x01010101, 0xFF00FF00]  # fmt: skip
_I64 = [0, 1, 2, 255, 2**31 - 1, 2**31, 2**32 - 1, 2**32, 2**63 - 1, 2**63, 2**63 + 1, 2**64 - 2, 2**64 - 1]
_COUNTS = [0, 1, 7, 8, 15, 16, 17, 31, 32, 33, 63, 64, 65, 127, 128, 255, 256, 2**31, 2**32 - 1]
_F32 = [
    *(0.0, -0.0, 1.0, -1.0, 0.5, -0.5, 1.5, 2.5, -2.5, 1 + 2**-23),
    *(2.0**-149, -(2.0**-149), 2.0**-126 - 2.0**-149, 2.0**-126),  # subnormal, normal
    *(3.4028234663852886e38, -3.4028234663852886e38, np.inf, -np.inf, np.nan),
    *(127.5, 128.0, 255.5, 65504.0, 65520.0, 2.0**31, 2147483520.0, -(2.0**31)),  # limits of other types
    *(2.0**32, 4294967040.0, 2.0**63, -(2.0**63), 2.0**64, 2.0**-25, 2.0**-14, 2.0**-24),
]
_F64 = [*_F32, 1 + 2.0**-52, 5e-324, -5e-324, 2.0**-1022, 1.7976931348623157e308, 2.0**53, 2.0**-150, 1 + 2.0**-24,
        2147483647.5]  # fmt: skip
_H16 = [0, 0x8000, 0x3C00, 0xBC00, 0x3C01, 0x3800, 0x3E00, 0x4100, 0xC100, 1, 0x8001, 0x3FF, 0x400, 0x7BFF, 0xFBFF,
        0x7C00, 0xFC00, 0x7E00, 0x6400, 0x5BF8]  # fmt: skip
_B16 = [0, 0x8000, 0x3F80, 0xBF80, 0x3F81, 0x3F00, 0x3FC0, 0x4020, 1, 0x8001, 0x7F, 0x80, 0x7F7F, 0xFF7F, 0x7F80,
        0xFF80, 0x7FC0]  # fmt: skip


def _bits(values: list[float], dtype: str) -> list[int]:
    with np.errstate(over="ignore"):
        return [int(v) for v in np.array(values, dtype).view(f"u{np.dtype(dtype).itemsize}")]


@dataclass(frozen=True)
class Domain:
    """Bits of a register, the boundary values, and (for comparison) "int", or the float type of its elements."""

    bits: int
    boundary: list[int]
    kind: str = "int"


DOMAINS = {
    "u16": Domain(16, _I16), "s16": Domain(16, _I16), "u16nz": Domain(16, _I16[1:]),
    "u32": Domain(32, _I32), "s32": Domain(32, _I32), "u32nz": Domain(32, _I32[1:]),
    "u64": Domain(64, _I64), "s64": Domain(64, _I64), "u64nz": Domain(64, _I64[1:]),
    "count": Domain(32, _COUNTS), "bit": Domain(32, [0, 1]), "pred": Domain(1, [0, 1]),
    "f32": Domain(32, _bits(_F32, "f4"), "f32"), "f64": Domain(64, _bits(_F64, "f8"), "f64"),
    "angle": Domain(32, _bits([0.0, -0.0, 0.5, 1.0, -1.0, 3.0, -3.0, 1.5707964, 3.1415927], "f4"), "f32"),
    "f16": Domain(16, _H16, "f16"), "bf16": Domain(16, _B16, "bf16"),
    "f16x2": Domain(32, [a << 16 | b for a, b in zip(_H16, _H16[7:] + _H16[:7], strict=True)], "f16"),
    "bf16x2": Domain(32, [a << 16 | b for a, b in zip(_B16, _B16[5:] + _B16[:5], strict=True)], "bf16"),
}  # fmt: skip


@dataclass(frozen=True)
class Case:
    """Test case of a single instruction. `relative` and `absolute` bound the error of an approximate result.

    Both 0: equal to the bit, but that all NaNs are alike.
    """

    name: str
    template: str
    relative: float = 0.0
    absolute: float = 0.0

    @property
    def fields(self) -> dict[str, str]:
        """Operand -> domain, each once, destinations first."""
        domains = dict(_FIELD.findall(self.template))
        return dict(sorted(domains.items(), key=lambda field: (field[0] not in OUTPUTS, field[0])))

    @property
    def outputs(self) -> list[str]:
        """Names of the destinations."""
        return [name for name in self.fields if name in OUTPUTS]

    def ptx(self, version: str = "8.1", target: str = "sm_90") -> str:
        """Write a module with one entry: pointers to one array per operand, in the order of `fields`."""
        declare, loads, stores = [], [], []
        for i, (name, domain) in enumerate(self.fields.items()):
            bits = DOMAINS[domain].bits
            width = 32 if bits == 1 else bits
            declare.append(
                f".reg .b64 %p{name}; .reg .b{width} %w{name};" + (f" .reg .pred %{name};" if bits == 1 else "")
            )
            loads.append(
                f"ld.param.u64 %p{name}, [arg{i}]; mul.wide.u32 %o, %i, {width // 8}; add.s64 %p{name}, %p{name}, %o;"
            )
            if name not in OUTPUTS:
                loads.append(f"ld.global.b{width} %w{name}, [%p{name}];")
                loads.append(f"setp.ne.u32 %{name}, %w{name}, 0;" if bits == 1 else "")
            elif name != "m":
                stores.append(f"selp.u32 %w{name}, 1, 0, %{name};" if bits == 1 else "")
                stores.append(f"st.global.b{width} [%p{name}], %w{name};")

        def operand(match: re.Match) -> str:
            name, domain = match.groups()
            return f"%{'p' if name == 'm' else '' if DOMAINS[domain].bits == 1 else 'w'}{name}"

        params = ", ".join(f".param .u64 arg{i}" for i in range(len(self.fields)))
        index = "mov.u32 %i, %ctaid.x; mov.u32 %n, %ntid.x; mov.u32 %t, %tid.x; mad.lo.u32 %i, %i, %n, %t;"
        body = [
            ".reg .b32 %i, %n, %t; .reg .b64 %o;",
            *declare,
            index,
            *loads,
            _FIELD.sub(operand, self.template),
            *stores,
        ]
        code = "\n    ".join(line for line in body if line)
        header = f".version {version}\n.target {target}\n.address_size 64\n"
        return f"{header}.visible .entry {self.name}({params})\n{{\n    {code}\n    ret;\n}}\n"

    def inputs(self) -> dict[str, np.ndarray]:
        """Make arrays for all operands, with zeros for those that are only written.

        The number of rows is a multiple of the block.
        """
        stream = np.random.RandomState(zlib.crc32(self.template.encode()))
        sources = {n: DOMAINS[d] for n, d in self.fields.items() if n not in OUTPUTS or n == "m"}
        limit = {1: 40, 2: 20, 3: 8, 4: 5}[min(len(sources), 4)]
        chosen = [_thin_out(domain.boundary, limit, stream) for domain in sources.values()]
        rows = [list(column) for column in zip(*itertools.product(*chosen), strict=True)]
        extra = 256 + (-len(rows[0]) - 256) % BLOCK_THREADS
        arrays = {}
        for (name, domain), column in zip(sources.items(), rows, strict=True):
            width = max(domain.bits // 8, 4 if domain.bits == 1 else 1)
            random = np.frombuffer(stream.bytes(extra * width), f"u{width}").copy()
            arrays[name] = np.concatenate(
                (np.array(column, f"u{width}"), _fit_to_domain(random, self.fields[name], stream))
            )
        count = len(next(iter(arrays.values())))
        for name in self.outputs:
            bits = DOMAINS[self.fields[name]].bits
            arrays.setdefault(name, np.zeros(count, f"u{4 if bits == 1 else bits // 8}"))
        return {name: arrays[name] for name in self.fields}

    def checksum(self, arrays: dict[str, np.ndarray]) -> int:
        """Compute a checksum of the inputs, to tell recordings of other inputs."""
        return zlib.crc32(b"".join(arrays[name].tobytes() for name in self.fields))


def _thin_out(values: list[int], limit: int, stream: np.random.RandomState) -> list[int]:
    """Draw at most `limit` of the values."""
    return values if len(values) <= limit else [values[i] for i in sorted(stream.permutation(len(values))[:limit])]


def _fit_to_domain(random: np.ndarray, domain: str, stream: np.random.RandomState) -> np.ndarray:
    """Make random bits fit the domain; half of the random floats are of ordinary size."""
    half = len(random) // 2
    if domain == "pred":
        return random & 1
    if domain == "bit":  # alike in most warps
        return (random & 0x1F == 0).astype(random.dtype)
    if domain == "count":
        return random % 41
    if domain.endswith("nz"):
        return np.maximum(random, 1)
    if domain == "angle":
        return stream.uniform(-3.1, 3.1, len(random)).astype("f4").view("u4")
    if domain in ("f32", "f64"):
        ordinary = stream.standard_normal(half) * 10.0 ** stream.randint(-3, 4, half)
        random[:half] = ordinary.astype(f"f{random.itemsize}").view(random.dtype)
    elif domain in ("f16", "f16x2"):
        words = random.view("u2")
        words[: len(words) // 2] = stream.standard_normal(len(words) // 2).astype("f2").view("u2")
    elif domain in ("bf16", "bf16x2"):
        words = random.view("u2")
        words[: len(words) // 2] = stream.standard_normal(len(words) // 2).astype("f4").view("u4") >> 16
    return random


def rows_that_agree(case: Case, name: str, expected: np.ndarray, got: np.ndarray) -> np.ndarray:
    """Tell which rows of two results of a destination agree, [rows]."""
    kind = DOMAINS[case.fields[name]].kind
    if kind == "int":
        return expected == got
    if expected.dtype.itemsize == 4 and kind != "f32":
        halves = same_floats(case, kind, expected.view("u2"), got.view("u2"))
        return halves.reshape(-1, 2).all(axis=1)
    return same_floats(case, kind, expected, got)


def same_floats(case: Case, kind: str, expected: np.ndarray, got: np.ndarray) -> np.ndarray:
    """Tell where two arrays of raw floats agree."""
    with np.errstate(invalid="ignore"):
        return _close(case, kind, expected, got)


def _close(case: Case, kind: str, expected: np.ndarray, got: np.ndarray) -> np.ndarray:
    if kind == "bf16":
        x, y = ((raw.astype("u4") << 16).view("f4").astype("f8") for raw in (expected, got))
    else:
        x, y = (raw.view(f"f{raw.itemsize}").astype("f8") for raw in (expected, got))
    equal = (expected == got) | (np.isnan(x) & np.isnan(y))
    if not case.relative and not case.absolute:
        return equal
    return equal | (np.abs(x - y) <= np.maximum(case.relative * np.abs(x), case.absolute))


def _cases():
    def each(template: str, **choices: str):
        """Yield the template with every combination of the words for its @placeholders."""
        for words in itertools.product(*(c.split(" ") for c in choices.values())):
            line = template
            for key, word in zip(choices, words, strict=True):
                line = line.replace(f"@{key}", word)
            yield line

    ints, bits = "u16 s16 u32 s32 u64 s64", {"16": "u16", "32": "u32", "64": "u64"}
    d, ab, abc = "{d:@t}", "{a:@t}, {b:@t}", "{a:@t}, {b:@t}, {c:@t}"

    # integer arithmetic
    yield from each(f"@o.@t {d}, {ab};", o="add sub mul.lo mul.hi min max", t=ints)
    yield from each("@o.sat.s32 {d:s32}, {a:s32}, {b:s32};", o="add sub")
    yield from each(f"mad.@p.@t {d}, {abc};", p="lo hi", t=ints)
    for t, w in (("u16", "u32"), ("s16", "s32"), ("u32", "u64"), ("s32", "s64")):
        yield f"mul.wide.{t} {{d:{w}}}, {{a:{t}}}, {{b:{t}}};"
        yield f"mad.wide.{t} {{d:{w}}}, {{a:{t}}}, {{b:{t}}}, {{c:{w}}};"
    yield "mad.hi.sat.s32 {d:s32}, {a:s32}, {b:s32}, {c:s32};"
    yield from each(f"mul24.@p.@t {d}, {ab};", p="lo hi", t="u32 s32")
    yield from each(f"mad24.@p.@t {d}, {abc};", p="lo hi", t="u32 s32")
    yield from each(f"sad.@t {d}, {abc};", t=ints)
    for t in ints.split():
        yield f"div.{t} {{d:{t}}}, {{a:{t}}}, {{b:u{t[1:]}nz}};"
        yield f"rem.{t} {{d:{t}}}, {{a:{t}}}, {{b:u{t[1:]}nz}};"
    yield from each("@o.@t {d:@t}, {a:@t};", o="abs neg", t="s16 s32 s64")
    for o in ("add", "sub"):
        yield f"{o}.cc.u32 {{d:u32}}, {{a:u32}}, {{b:u32}}; {o}c.u32 {{e:u32}}, {{c:u32}}, {{g:u32}};"
        yield f"{o}.cc.u64 {{d:u64}}, {{a:u64}}, {{b:u64}}; {o}c.u64 {{e:u64}}, {{c:u64}}, {{g:u64}};"
        first = f"{o}.cc.u32 %t, {{a:u32}}, {{b:u32}};"
        yield f"{first} {o}c.cc.u32 {{d:u32}}, {{c:u32}}, {{g:u32}}; {o}c.u32 {{e:u32}}, 0, 0;"
    yield "mad.lo.cc.u32 {d:u32}, {a:u32}, {b:u32}, {c:u32}; madc.hi.u32 {e:u32}, {a:u32}, {b:u32}, {g:u32};"
    first = "mad.lo.cc.u32 {d:u32}, {a:u32}, {b:u32}, {c:u32};"
    yield f"{first} madc.hi.cc.u32 %t, {{a:u32}}, {{b:u32}}, {{g:u32}}; addc.u32 {{e:u32}}, 0, 0;"
    yield from each("dp4a.@s.@t {d:s32}, {a:u32}, {b:u32}, {c:s32};", s="u32 s32", t="u32 s32")
    yield from each("dp2a.@h.@s.@t {d:s32}, {a:u32}, {b:u32}, {c:s32};", h="lo hi", s="u32 s32", t="u32 s32")

    # bits
    for width, t in bits.items():
        yield from each(f"@o.b{width} {{d:{t}}}, {{a:{t}}}, {{b:{t}}};", o="and or xor")
        yield from each(f"@o.b{width} {{d:{t}}}, {{a:{t}}};", o="not cnot")
        yield f"shl.b{width} {{d:{t}}}, {{a:{t}}}, {{b:count}};"
        yield from each(f"shr.@t {{d:{t}}}, {{a:{t}}}, {{b:count}};", t=f"u{width} s{width} b{width}")
    yield from each(
        "lop3.b32 {d:u32}, {a:u32}, {b:u32}, {c:u32}, @l;",
        l="0x00 0x1b 0x6a 0x80 0x96 0xca 0xd8 0xe8 0xf8 0xfe 0xff 0x3c",
    )
    yield from each("shf.@d.@m.b32 {d:u32}, {a:u32}, {b:u32}, {c:count};", d="l r", m="wrap clamp")
    for width in ("32", "64"):
        t = f"u{width}"
        yield from each(f"@o.b{width} {{d:u32}}, {{a:{t}}};", o="popc clz")
        yield f"brev.b{width} {{d:{t}}}, {{a:{t}}};"
        for s in ("", ".shiftamt"):
            yield from each(f"bfind{s}.@t {{d:u32}}, {{a:@t}};", t=f"u{width} s{width}")
        yield from each("bfe.@t {d:@t}, {a:@t}, {b:count}, {c:count};", t=f"u{width} s{width}")
        yield f"bfi.b{width} {{d:{t}}}, {{a:{t}}}, {{b:{t}}}, {{c:count}}, {{g:count}};"
    yield from each("bmsk.@m.b32 {d:u32}, {a:count}, {b:count};", m="clamp wrap")
    yield from each("szext.@m.@t {d:u32}, {a:u32}, {b:count};", m="clamp wrap", t="u32 s32")
    yield "prmt.b32 {d:u32}, {a:u32}, {b:u32}, {c:u32};"
    yield from each("prmt.b32 {d:u32}, {a:u32}, {b:u32}, @s;", s="0x3210 0x5410 0x7632 0xba98 0x4440 0x0123")
    yield from each("prmt.b32.@m {d:u32}, {a:u32}, {b:u32}, {c:u32};", m="f4e b4e rc8 ecl ecr rc16")

    # comparison and selection
    for t in ints.split():
        signs = "eq ne lt le gt ge" + ("" if t[0] == "s" else " lo ls hi hs")
        yield from each(f"setp.@c.{t} {{p:pred}}, {{a:{t}}}, {{b:{t}}};", c=signs)
    yield from each("setp.lt.@b.s32 {p:pred}|{q:pred}, {a:s32}, {b:s32}, {c:pred};", b="and or xor")
    yield from each("setp.ge.@b.u32 {p:pred}|{q:pred}, {a:u32}, {b:u32}, !{c:pred};", b="and or xor")
    for t in ("f32", "f64", "f16", "bf16"):
        signs = "eq ne lt le gt ge equ neu ltu leu gtu geu num nan"
        yield from each(f"setp.@c.{t} {{p:pred}}, {{a:{t}}}, {{b:{t}}};", c=signs)
    yield "setp.lt.ftz.f32 {p:pred}, {a:f32}, {b:f32};"
    yield from each("setp.@c.f16x2 {p:pred}|{q:pred}, {a:f16x2}, {b:f16x2};", c="lt geu nan")
    yield from each("set.@c.@r.s32 {d:u32}, {a:s32}, {b:s32};", c="lt ne", r="u32 s32")
    yield "set.gt.f32.f32 {d:f32}, {a:f32}, {b:f32};"
    yield "set.le.and.u32.f32 {d:u32}, {a:f32}, {b:f32}, {c:pred};"
    yield "set.lt.f16x2.f16x2 {d:f16x2}, {a:f16x2}, {b:f16x2};"
    yield from each("selp.b@w {d:u@w}, {a:u@w}, {b:u@w}, {c:pred};", w="16 32 64")
    yield "slct.u32.s32 {d:u32}, {a:u32}, {b:u32}, {c:s32};"
    yield "slct.f32.f32 {d:u32}, {a:u32}, {b:u32}, {c:f32};"

    # conversion
    whole = ("u8", "u16", "u32", "u64", "s8", "s16", "s32", "s64")
    fits = {"u8": "u32", "s8": "u32"}
    for to, of in itertools.product(whole, whole):
        yield f"cvt.{to}.{of} {{d:{fits.get(to, to)}}}, {{a:{fits.get(of, of)}}};"
        if (
            int(to[1:]) < int(of[1:])
            or (of[0] == "s" != to[0])
            or (int(to[1:]), of[0], to[0]) == (int(of[1:]), "u", "s")
        ):
            yield f"cvt.sat.{to}.{of} {{d:{fits.get(to, to)}}}, {{a:{fits.get(of, of)}}};"
    for to, of in itertools.product(whole, ("f16", "f32", "f64")):
        yield from each(f"cvt.@m.{to}.{of} {{d:{fits.get(to, to)}}}, {{a:{of}}};", m="rni rzi rmi rpi")
    yield "cvt.rzi.ftz.s32.f32 {d:s32}, {a:f32};"
    yield "cvt.rpi.ftz.s32.f32 {d:s32}, {a:f32};"
    for to, of in itertools.product(("f16", "f32", "f64"), whole):
        yield from each(f"cvt.@m.{to}.{of} {{d:{to}}}, {{a:{fits.get(of, of)}}};", m="rn rz rm rp")
    for to, of in (("f16", "f32"), ("f16", "f64"), ("f32", "f64")):
        yield from each(f"cvt.@m.{to}.{of} {{d:{to}}}, {{a:{of}}};", m="rn rz rm rp")
    yield from each("cvt.@m.bf16.f32 {d:bf16}, {a:f32};", m="rn rz rn.relu")
    yield from each("cvt.@m.@t.f32 {d:@t}, {a:f32}, {b:f32};", m="rn rz rn.relu", t="f16x2 bf16x2")
    for to, of in (("f32", "f16"), ("f64", "f16"), ("f64", "f32"), ("f32", "bf16")):
        yield f"cvt.{to}.{of} {{d:{to}}}, {{a:{of}}};"
    yield from each("cvt.@m.@t.@t {d:@t}, {a:@t};", m="rni rzi rmi rpi", t="f16 f32 f64")
    yield "cvt.sat.f32.f32 {d:f32}, {a:f32};"
    yield "cvt.ftz.f32.f16 {d:f32}, {a:f16};"
    yield "cvt.rn.sat.f16.f32 {d:f16}, {a:f32};"
    yield "cvt.rn.sat.f32.s32 {d:f32}, {a:s32};"
    yield from each("cvt.pack.sat.@t.s32 {d:u32}, {a:s32}, {b:s32};", t="u16 s16")
    yield from each("cvt.pack.sat.@t.s32.b32 {d:u32}, {a:s32}, {b:s32}, {c:u32};", t="u8 s8 u4 s4 u2 s2")

    # floating point
    for o in ("add", "sub", "mul"):
        yield from each(f"{o}.@m.@t {{d:@t}}, {{a:@t}}, {{b:@t}};", m="rn rz rm rp", t="f32 f64")
        yield from each(f"{o}.@m.f32 {{d:f32}}, {{a:f32}}, {{b:f32}};", m="rn.ftz rn.sat rz.ftz rn.ftz.sat")
        yield from each(f"{o}.rn.@t {{d:@t}}, {{a:@t}}, {{b:@t}};", t="f16 f16x2 bf16 bf16x2")
        yield from each(f"{o}.rn.@m.@t {{d:@t}}, {{a:@t}}, {{b:@t}};", m="ftz sat ftz.sat", t="f16 f16x2")
    yield from each("fma.@m.@t {d:@t}, {a:@t}, {b:@t}, {c:@t};", m="rn rz rm rp", t="f32 f64")
    yield from each("fma.@m.f32 {d:f32}, {a:f32}, {b:f32}, {c:f32};", m="rn.ftz rn.sat rz.ftz.sat")
    yield from each("fma.rn.@t {d:@t}, {a:@t}, {b:@t}, {c:@t};", t="f16 f16x2 bf16 bf16x2")
    yield from each("fma.rn.@m.@t {d:@t}, {a:@t}, {b:@t}, {c:@t};", m="ftz sat relu", t="f16 f16x2")
    yield from each("div.@m.@t {d:@t}, {a:@t}, {b:@t};", m="rn rz rm rp", t="f32 f64")
    yield from each("@o.@m.@t {d:@t}, {a:@t};", o="rcp sqrt", m="rn rz rm rp", t="f32 f64")
    yield from each("@o.rn.ftz.f32 {d:f32}, {a:f32};", o="rcp sqrt")
    yield "div.rn.ftz.f32 {d:f32}, {a:f32}, {b:f32};"
    yield from each("@o.@t {d:@t}, {a:@t};", o="abs neg", t="f32 f64 f16 f16x2 bf16 bf16x2")
    yield from each("@o.ftz.f32 {d:f32}, {a:f32};", o="abs neg")
    yield from each("@o.@t {d:@t}, {a:@t}, {b:@t};", o="min max min.NaN max.NaN", t="f32 f16 f16x2 bf16 bf16x2")
    yield from each("@o.f64 {d:f64}, {a:f64}, {b:f64};", o="min max copysign")
    yield from each("@o.f32 {d:f32}, {a:f32}, {b:f32};", o="min.ftz max.ftz min.xorsign.abs max.xorsign.abs copysign")
    yield from each(
        "testp.@k.@t {p:pred}, {a:@t};", k="finite infinite number notanumber normal subnormal", t="f32 f64"
    )
    # Bounds from the PTX manual where it gives one, doubled for the float32 rounding of the reference
    yield "ex2.approx.f32 {d:f32}, {a:f32};", 2.0**-21, 0.0
    yield "ex2.approx.ftz.f32 {d:f32}, {a:f32};", 2.0**-21, 0.0
    yield "lg2.approx.f32 {d:f32}, {a:f32};", 2.0**-21, 2.0**-21
    yield "rcp.approx.f32 {d:f32}, {a:f32};", 2.0**-22, 2.0**-149
    yield "rcp.approx.ftz.f32 {d:f32}, {a:f32};", 2.0**-22, 0.0
    yield "sqrt.approx.f32 {d:f32}, {a:f32};", 2.0**-21, 0.0
    yield "rsqrt.approx.f32 {d:f32}, {a:f32};", 2.0**-21, 0.0
    yield "rsqrt.approx.f64 {d:f64}, {a:f64};", 2.0**-50, 0.0
    yield "div.approx.f32 {d:f32}, {a:f32}, {b:angle};", 2.0**-21, 0.0
    yield "div.full.f32 {d:f32}, {a:f32}, {b:angle};", 2.0**-21, 0.0
    yield "sin.approx.f32 {d:f32}, {a:angle};", 0.0, 2.0**-20
    yield "cos.approx.f32 {d:f32}, {a:angle};", 0.0, 2.0**-20
    yield "tanh.approx.f32 {d:f32}, {a:f32};", 2.0**-10, 0.0
    yield "ex2.approx.f16 {d:f16}, {a:f16};", 2.0**-9, 2.0**-24
    yield "ex2.approx.f16x2 {d:f16x2}, {a:f16x2};", 2.0**-9, 2.0**-24
    yield "tanh.approx.f16x2 {d:f16x2}, {a:f16x2};", 2.0**-9, 2.0**-24

    # video
    a3 = "{d:u32}, {a:u32}, {b:u32}, {c:u32};"
    for n in ("2", "4"):
        ops = f"vadd{n} vsub{n} vavrg{n} vabsdiff{n} vmin{n} vmax{n}"
        for m in ("", ".sat", ".add"):
            yield from each(f"@o.@d.@s.@s{m} {a3}", o=ops, d="u32 s32", s="u32 s32")
        yield from each(f"@o.s32.u32.s32 {a3}", o=ops)
        yield from each(f"vset{n}.@s.@s.@c {a3}", s="u32 s32", c="eq lt ge")
        yield f"vset{n}.s32.s32.gt.add {a3}"
    yield "vadd4.u32.u32.u32 {d:u32}.b31, {a:u32}.b0246, {b:u32}.b7531, {c:u32};"
    yield "vsub4.s32.s32.s32.sat {d:u32}.b210, {a:u32}.b3210, {b:u32}.b4567, {c:u32};"
    yield "vadd4.u32.u32.u32.add {d:u32}.b20, {a:u32}, {b:u32}, {c:u32};"
    yield "vadd2.u32.s32.s32 {d:u32}.h1, {a:u32}.h03, {b:u32}.h21, {c:u32};"
    scalar = "vadd vsub vabsdiff vmin vmax"
    for m in ("", ".sat"):
        yield from each(f"@o.@d.@s.@s{m} {{d:u32}}, {{a:u32}}, {{b:u32}};", o=scalar, d="u32 s32", s="u32 s32")
        yield from each(f"@o.s32.u32.s32{m} {{d:u32}}, {{a:u32}}.b1, {{b:u32}}.h1;", o=scalar)
        yield from each(f"@o.u32.s32.s32{m} {{d:u32}}.b2, {{a:u32}}.h0, {{b:u32}}.b3, {{c:u32}};", o=scalar)
    yield from each(f"@o.s32.u32.s32.@p {a3}", o=scalar, p="add min max")
    yield from each("@o.u32.@s.u32.@m {d:u32}, {a:u32}, {b:count};", o="vshl vshr", s="u32 s32", m="clamp wrap")
    yield from each("vset.@s.@s.@c {d:u32}, {a:u32}, {b:u32};", s="u32 s32", c="lt ge")

    # warps
    for m in ("up", "down", "bfly", "idx"):
        clamps = ("0", "0x1800") if m == "up" else ("31", "0x181f", "0x1007")
        for c in clamps:
            yield f"shfl.sync.{m}.b32 {{d:u32}}|{{p:pred}}, {{a:u32}}, {{b:count}}, {c}, -1;"
    yield from each("vote.sync.@m.pred {p:pred}, {a:pred}, -1;", m="all any uni")
    yield "vote.sync.ballot.b32 {d:u32}, {a:pred}, -1;"
    yield "match.any.sync.b32 {d:u32}, {a:count}, -1;"
    yield "activemask.b32 {d:u32}; mov.b32 %t, {a:u32};"
    yield from each("redux.sync.@o.@t {d:u32}, {a:u32}, -1;", o="add min max", t="u32 s32")
    yield from each("redux.sync.@o.b32 {d:u32}, {a:u32}, -1;", o="and or xor")

    # atomics, each row its own word
    for t in ("u32", "s32", "u64"):
        yield f"atom.global.add.{t} {{d:{t}}}, [{{m:{t}}}], {{a:{t}}};"
    yield from each("atom.global.@o.@t {d:@t}, [{m:@t}], {a:@t};", o="min max", t="u32 s32 u64 s64")
    yield from each("atom.global.@o.b@w {d:u@w}, [{m:u@w}], {a:u@w};", o="and or xor exch", w="32 64")
    yield from each("atom.global.@o.u32 {d:u32}, [{m:u32}], {a:u32};", o="inc dec")
    yield from each("atom.global.cas.b@w {d:u@w}, [{m:u@w}], {a:u@w}, {b:u@w};", w="32 64")
    yield "atom.global.add.f32 {d:f32}, [{m:f32}], {a:f32};"
    yield "red.global.add.f32 [{m:f32}], {a:f32};"
    yield "atom.global.add.f64 {d:f64}, [{m:f64}], {a:f64};"
    yield from each("atom.global.add.noftz.@t {d:@t}, [{m:@t}], {a:@t};", t="f16x2 bf16x2 f16 bf16")


def _narrow() -> Iterator[str | tuple[str, float, float]]:
    """Yield conversions from and to fp8 and tf32."""
    for t, relu in itertools.product(("e4m3", "e5m2"), ("", ".relu")):
        yield f"cvt.rn.satfinite{relu}.{t}x2.f32 {{d:u16}}, {{a:f32}}, {{b:f32}};"
        yield f"cvt.rn.satfinite{relu}.{t}x2.f16x2 {{d:u16}}, {{a:f16x2}};"
        yield f"cvt.rn{relu}.f16x2.{t}x2 {{d:f16x2}}, {{a:u16}};"
    for mode in ("rna", "rn", "rz", "rn.relu", "rz.relu"):
        yield f"cvt.{mode}.tf32.f32 {{d:f32}}, {{a:f32}};"


def _modifiers() -> Iterator[str | tuple[str, float, float]]:
    """Yield modifiers of halves and bf16, packed 16-bit integers, and warps with inactive lanes."""

    def each(template: str, types: str, *modifiers: str) -> Iterator[str]:
        for t, words in itertools.product(types.split(), modifiers or ("",)):
            yield template.replace("@t", t).replace("@m", words)

    dab, halves, brains = "{d:@t}, {a:@t}, {b:@t};", "f16 f16x2", "bf16 bf16x2"
    yield "cvt.rna.satfinite.tf32.f32 {d:f32}, {a:f32};"
    yield from each("fma.rn.relu.@t {d:@t}, {a:@t}, {b:@t}, {c:@t};", brains)
    yield from each("fma.rn.ftz.@m.@t {d:@t}, {a:@t}, {b:@t}, {c:@t};", halves, "relu", "sat")
    for o in ("min", "max"):
        yield from each(f"{o}.@m.@t {dab}", halves, "ftz", "ftz.NaN", "xorsign.abs", "ftz.NaN.xorsign.abs")
        yield from each(f"{o}.@m.@t {dab}", brains, "xorsign.abs", "NaN.xorsign.abs")
        yield from each(f"{o}.@m.f32 {dab}".replace("@t", "f32"), "f32", "ftz.NaN", "NaN.xorsign.abs")
        yield f"{o}.relu.s32 {{d:s32}}, {{a:s32}}, {{b:s32}};"
        for t, relu in (("u16x2", ""), ("s16x2", ""), ("s16x2", ".relu")):
            yield f"{o}{relu}.{t} {{d:u32}}, {{a:u32}}, {{b:u32}};"
    yield from each("@m.ftz.@t {d:@t}, {a:@t};", halves, "abs", "neg")
    yield from each("add.@t {d:u32}, {a:u32}, {b:u32};", "u16x2 s16x2")
    yield "setp.lt.ftz.f16 {p:pred}, {a:f16}, {b:f16};"
    yield "set.gt.ftz.f16x2.f16x2 {d:f16x2}, {a:f16x2}, {b:f16x2};"
    yield "set.ge.bf16x2.bf16x2 {d:bf16x2}, {a:bf16x2}, {b:bf16x2};"
    yield from each("cvt.rn.bf16.@t {d:bf16}, {a:@t};", "f16 f64 u16 s32 u64")
    yield from each("cvt.rzi.@t.bf16 {d:@t}, {a:bf16};", "u16 s32 u64")
    yield "cvt.rn.f16.bf16 {d:f16}, {a:bf16};"
    yield "cvt.f64.bf16 {d:f64}, {a:bf16};"
    yield "tanh.approx.f16 {d:f16}, {a:f16};", 2.0**-9, 2.0**-24
    for t in brains.split():
        yield f"tanh.approx.{t} {{d:{t}}}, {{a:{t}}};", 2.0**-7, 0.0
        yield f"ex2.approx.ftz.{t} {{d:{t}}}, {{a:{t}}};", 2.0**-7, 2.0**-126
    yield "rcp.approx.ftz.f64 {d:f64}, {a:f64};", 2.0**-18, 0.0
    yield "rsqrt.approx.ftz.f64 {d:f64}, {a:f64};", 2.0**-18, 0.0
    yield "match.all.sync.b32 {d:u32}|{p:pred}, {a:bit}, -1;"
    yield "match.any.sync.b64 {d:u32}, {a:u64}, -1;"
    yield "match.all.sync.b64 {d:u32}|{p:pred}, {a:u64}, -1;"
    part_of_warp = "vote.sync.ballot.b32 %t, {c:pred}, -1; mov.b32 {d:u32}, 0; @{c:pred}"
    yield f"{part_of_warp} match.any.sync.b32 {{d:u32}}, {{a:count}}, %t;"
    yield f"{part_of_warp} redux.sync.add.u32 {{d:u32}}, {{a:u32}}, %t;"
    yield f"{part_of_warp} redux.sync.max.s32 {{d:u32}}, {{a:u32}}, %t;"
    yield f"{part_of_warp} vote.sync.ballot.b32 {{d:u32}}, {{g:pred}}, %t;"
    lowest = part_of_warp.replace(
        "mov", "brev.b32 %n, %t; clz.b32 %n, %n; mov", 1
    )  # what a lane outside gives is undefined
    yield f"{lowest} shfl.sync.idx.b32 {{d:u32}}, {{a:u32}}, %n, 31, %t;"
    yield f"setp.ne.u32 {{p:pred}}, 0, 0; {part_of_warp} elect.sync {{d:u32}}|{{p:pred}}, %t;"


def cases() -> list[Case]:
    """List all cases; names are unique and fit for entry symbols."""
    return _name_cases([*_cases(), *_narrow(), *_modifiers()])


def _name_cases(templates: Iterable[str | tuple[str, float, float]]) -> list[Case]:
    cases: dict[str, Case] = {}
    for template_or_bounds in templates:
        template, relative, absolute = (
            (template_or_bounds, 0.0, 0.0) if isinstance(template_or_bounds, str) else template_or_bounds
        )
        opcode = template.split(" ")[0]
        stem = re.sub(r"\W+", "_", opcode)
        name, copy = stem, 1
        while name in cases:
            copy += 1
            name = f"{stem}_{copy}"
        cases[name] = Case(name, template, relative, absolute)
    return list(cases.values())
