"""Harnesses around the dequantisation of one word, made from the kernels' own sources: what is counted is what runs.

A kernel marks its word. In PTX, a region of plain instructions inside the entry:

    // @begin word in:%q0 out:%d0,%d1 with:%scale,%offset
    ...
    // @end word

and in CUDA C++, the device function of `dequant.cuh`, a word and further `u32` values in, `uint2` or `uint4` out:

    // @word dequant_lqq(q, scale, offset) -> uint2

The counting harness treats n words per thread and nothing else: n words and the `with` values are loaded per thread, so
that nothing is constant, and all results are stored, so that nothing is dead. Every address is one base plus immediate
offsets; between harnesses of 8 and 16 words only the word's own instructions, loads and stores differ.

The looping harness keeps 8 words in registers and feeds every result back into its word.

A kernel of the family `load` marks what brings a fragment from shared memory into registers,

    // @begin fragment out:%a0,%a1,%a2,%a3
    ...
    // @end fragment

and the repeating harness is the kernel itself with that region in a loop.
"""

import re
from dataclasses import dataclass

from ptxlab.errors import SourceError
from ptxlab.sources import Source

COUNTING = "count_words"
LOOPING = "loop_words"
LOOP_WORDS = 8
MAX_WORDS = 16

_BEGIN = re.compile(r"^[ \t]*// @begin word (.*)$", re.MULTILINE)
_END = re.compile(r"^[ \t]*// @end word[ \t]*$", re.MULTILINE)
_FRAGMENT = re.compile(r"^[ \t]*// @begin fragment out:(\S+)\n(.*?)^[ \t]*// @end fragment\n", re.MULTILINE | re.DOTALL)
_FIELD = re.compile(r"(in|out|with):(\S*)")
_CALL = re.compile(r"// @word (\w+)\(([\w, ]+)\) -> uint([24])\b")
_REG = re.compile(r"^[ \t]*\.reg\b[^;]*;", re.MULTILINE)
_REGISTER = re.compile(r"%[\w$]+$")


@dataclass(frozen=True)
class Word:
    """The dequantisation of one word as a kernel's PTX spells it.

    Attributes:
        header: `.version`, `.target` and `.address_size` of the source.
        registers: the entry's `.reg` declarations.
        body: the instructions.
        input_register: register of the word.
        result_registers: registers of the results, 32 bits each.
        shared: registers of the values that all words of a group share.
    """

    header: str
    registers: str
    body: str
    input_register: str
    result_registers: tuple[str, ...]
    shared: tuple[str, ...]


def word_of(source: Source) -> Word | None:
    """Return the marked word of a PTX source, `None` if none is marked.

    Raises `SourceError` for a marker that cannot be read.
    """
    begin = _BEGIN.search(source.text)
    if begin is None:
        return None
    line = source.text.count("\n", 0, begin.start(1)) + 1
    fields = {name: tuple(filter(None, registers_text.split(","))) for name, registers_text in _FIELD.findall(begin[1])}
    end = _END.search(source.text, begin.end())
    is_well_formed = len(fields.get("in", ())) == 1 and 1 <= len(fields.get("out", ())) <= 4
    if end is None or not is_well_formed or not all(_REGISTER.match(r) for names in fields.values() for r in names):
        rule = "the marker of a word is `// @begin word in:%r out:%r[,%r...] [with:%r...]` ... `// @end word`"
        raise SourceError(source.path, line, rule, begin[0].strip())
    header = "\n".join(re.findall(r"^[ \t]*\.(?:version|target|address_size)\b.*$", source.text, re.MULTILINE))
    entry = source.text[source.text.rfind(".entry", 0, begin.start()) : end.end()]
    registers = "\n".join(_REG.findall(entry))
    body = source.text[begin.end() : end.start()].strip("\n")
    return Word(header, registers, body, fields["in"][0], fields["out"], fields.get("with", ()))


def counting_harness(source: Source, words: int) -> Source | None:
    """Build the harness that treats `words` (4, 8, 12 or 16) words per thread; `None` for a source without a marker.

    It is in the source's language; its entry is `COUNTING(words, shared, results)`. Threads are `MAX_WORDS` words
    apart whatever `words` is, so that addresses are the same in harnesses of 8 and 16.
    """
    if source.language == "ptx":
        word = word_of(source)
        text = word and _counting_ptx(word, words)
    else:
        call = _CALL.search(source.text)
        text = call and _counting_cuda(call[1], len(call[2].split(",")) - 1, int(call[3]), words)
    return Source.from_text(text, f"<{words} words of {source.name}>") if text else None


def looping_harness(source: Source) -> Source | None:
    """Build the harness for throughput, from a PTX source; `None` without a marker.

    Its entry is `LOOPING(words, shared, results, iterations)`: every thread loads `LOOP_WORDS` words (thread-major) and
    the shared values, and stores `LOOP_WORDS` words. In between, `iterations` times, word = d0 * d1 + c, and + d2 * d3
    where there are four results: one or two IMAD per word on top of the dequantisation. A product, because ptxas
    would factor a scale out of a sum.
    """
    word = word_of(source)
    return Source.from_text(_looping_ptx(word), f"<loop over {source.name}>") if word else None


def repeating_harness(source: Source) -> Source | None:
    """Build a PTX source whose marked fragment is loaded `repeats` times; `None` without a marker.

    `repeats` is a last parameter u32. What arrives is folded by exclusive or: after an odd number of repeats the
    kernel's results are what they were. The warp barrier keeps ptxas from loading only once.
    """
    match = _FRAGMENT.search(source.text)
    if match is None:
        return None
    registers = match[1].split(",")
    folded_registers = [f"%_r{i}" for i in range(len(registers))]
    lines = [
        f"    .reg .b32 %_r<{len(registers)}>, %_left;",
        "    .reg .pred %_more;",
        *(f"    mov.b32 {r}, 0;" for r in folded_registers),
        "    ld.param.u32 %_left, [repeats];",
        "REPEAT:",
        match[2].rstrip("\n"),
        *(f"    xor.b32 {r}, {r}, {a};" for r, a in zip(folded_registers, registers, strict=True)),
        "    bar.warp.sync 0xffffffff;",
        "    sub.u32 %_left, %_left, 1;",
        "    setp.ne.u32 %_more, %_left, 0;",
        "    @%_more bra REPEAT;",
        *(f"    mov.b32 {a}, {r};" for r, a in zip(folded_registers, registers, strict=True)),
        "",
    ]
    text = source.text[: match.start()] + "\n".join(lines) + source.text[match.end() :]
    signature = re.compile(r"(\.entry \w+\(.*?)\)([^\n]*\n\{)", re.DOTALL)
    text = signature.sub(r"\1, .param .u32 repeats)\2", text, count=1)
    return Source(source.name, f"<{source.name}, repeated>", "ptx", text)


_FEEDBACK = 0x9E3779B1  # c: keeps the words from settling at zero


def _counting_ptx(word: Word, words: int) -> str:
    loads = [f"ld.global.v4.u32 {_vector('%_w', i)}, [%_from+{4 * i}];" for i in range(0, words, 4)]
    per_word = len(word.result_registers)
    registers = [f"%_r{i}" for i in range(words * per_word)]
    code: list[str] = []
    for i in range(words):
        code.append(f"mov.b32 {word.input_register}, %_w{i};")
        code.append(word.body)
        code += [
            f"mov.b32 {registers[i * per_word + j]}, {word_register};"
            for j, word_register in enumerate(word.result_registers)
        ]
    stores = [f"st.global.v4.u32 [%_to+{4 * i}], {_vector('%_r', i)};" for i in range(0, len(registers), 4)]
    return _entry(word, COUNTING, (words, len(registers)), (MAX_WORDS, MAX_WORDS * per_word), loads, [*code, *stores])


def _looping_ptx(word: Word) -> str:
    loads = [f"ld.global.v4.u32 {_vector('%_w', i)}, [%_from+{4 * i}];" for i in range(0, LOOP_WORDS, 4)]
    code = ["ld.param.u32 %_left, [iterations];", "LOOP:"]
    pairs = [
        (word.result_registers[i], word.result_registers[min(i + 1, len(word.result_registers) - 1)])
        for i in range(0, len(word.result_registers), 2)
    ]
    for i in range(LOOP_WORDS):
        code += [f"mov.b32 {word.input_register}, %_w{i};", word.body, f"mov.b32 %_w{i}, {_FEEDBACK:#x};"]
        code += [f"mad.lo.u32 %_w{i}, {a}, {b}, %_w{i};" for a, b in pairs]
    code += ["sub.u32 %_left, %_left, 1;", "setp.ne.u32 %_more, %_left, 0;", "@%_more bra LOOP;"]
    stores = [f"st.global.v4.u32 [%_to+{4 * i}], {_vector('%_w', i)};" for i in range(0, LOOP_WORDS, 4)]
    sizes = (LOOP_WORDS, LOOP_WORDS)
    return _entry(word, LOOPING, sizes, sizes, loads, [*code, *stores], ", .param .u32 iterations")


def _entry(
    word: Word,
    name: str,
    registers: tuple[int, int],
    strides: tuple[int, int],
    loads: list[str],
    code: list[str],
    extra_parameters: str = "",
) -> str:
    """Build an entry around `code`.

    `registers` and `strides` (per thread, in words) are of the words and of the results.
    """
    shared_loads = [f"ld.global.u32 {r}, [%_with+{4 * i}];" for i, r in enumerate(word.shared)]
    lines = [
        word.header,
        f".visible .entry {name}(.param .u64 words, .param .u64 shared, .param .u64 results{extra_parameters})",
        "{",
        word.registers,
        f".reg .b32 %_w<{registers[0]}>, %_r<{registers[1]}>, %_lane, %_left, %_start;",
        ".reg .b64 %_from, %_with, %_to;",
        ".reg .pred %_more;",
        # One thread's place in each array: thread-major, so that the rest is immediate offsets. `%_x` is ours.
        "mov.u32 %_lane, %ctaid.x;",
        "mov.u32 %_left, %ntid.x;",
        "mov.u32 %_start, %tid.x;",
        "mad.lo.u32 %_lane, %_lane, %_left, %_start;",
        f"ld.param.u64 %_from, [words];\nmad.wide.u32 %_from, %_lane, {4 * strides[0]}, %_from;",
        f"ld.param.u64 %_with, [shared];\nmad.wide.u32 %_with, %_lane, {4 * max(1, len(word.shared))}, %_with;",
        f"ld.param.u64 %_to, [results];\nmad.wide.u32 %_to, %_lane, {4 * strides[1]}, %_to;",
        *loads,
        *shared_loads,
        *code,
        "ret;",
        "}",
    ]
    return "\n".join(lines) + "\n"


def _counting_cuda(function: str, shared: int, lanes: int, words: int) -> str:
    values = "".join(f", s{i}" for i in range(shared))
    loads = "".join(f"    const unsigned s{i} = shared[index * {shared} + {i}];\n" for i in range(shared))
    quads = "".join(f"    const uint4 q{i} = words[index * {MAX_WORDS // 4} + {i}];\n" for i in range(words // 4))
    calls = "".join(
        f"    results[index * {MAX_WORDS} + {4 * i + j}] = ptxlab::{function}(q{i}.{axis}{values});\n"
        for i in range(words // 4)
        for j, axis in enumerate("xyzw")
    )
    return (
        '#include "dequant.cuh"\n'
        f'extern "C" __global__ void {COUNTING}(const uint4* __restrict__ words, const unsigned* __restrict__ shared,\n'
        f"                                      uint{lanes}* __restrict__ results) {{\n"
        "    const unsigned index = blockIdx.x * blockDim.x + threadIdx.x;\n"
        f"{loads}{quads}{calls}}}\n"
    )


def _vector(prefix: str, start: int) -> str:
    return "{" + ", ".join(f"{prefix}{i}" for i in range(start, start + 4)) + "}"
