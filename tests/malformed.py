"""Malformed PTX: `python -m tests.malformed [--count 2000] [--seed 0]` changes .ptx files at random and runs them.

Whatever comes out is a result or a `PtxlabError`, in bounded time and memory; anything else is printed with the seed
that makes it again. pytest tries some (`tests/emulator/test_malformed.py`).
"""

import argparse
import random
import re
import resource
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from ptxlab import emulator
from ptxlab.errors import Deadlock, PtxlabError

ROOT = Path(__file__).parents[1]
SECONDS = 5.0  # that one file may take
GROWTH = 1 << 30  # bytes that all of them together may
STEPS = 3000
_TOKEN = re.compile(r"[%.$\w:]+|\S")
_NUMBERS = ("0", "-1", "1", "7", "4294967295", "2147483648", "18446744073709551616", "1000000000", "0x7fffffffffffffff",
            "0f7FC00000", "0d0000000000000000", "99999999999999999999999999", "1.5", "08")  # fmt: skip
_PIECES = ("{", "}", "(", ")", "[", "]", ";", ",", "@", "!", "|", ":", "\0", "é", "//", "/*", '"', "_", "%tid.x",
           ".reg", ".b32", "ret", "bar.sync 0;", "@%p1", ".shared .b8 big[1000000000];", "bra L0;", ".loc 1 2 3",
           ".local .b8 deep[100000000];", ".reg .b32 %many<200000>;", "{{{{{{{{", "-" * 300 + "1", "(" * 2000,
           "call")  # fmt: skip


def sources(small: bool) -> list[str]:
    """Read the files that are changed."""
    files = [*ROOT.glob("ptx/*/*.ptx"), *ROOT.glob("tests/outside/triton/*.ptx")]
    texts = [path.read_text(encoding="utf-8") for path in sorted(files)]
    return [text for text in texts if len(text) < 10_000] if small else texts


def make_mistakes(text: str, rng: random.Random) -> str:
    """Make one to four mistakes in a text."""
    for _ in range(rng.choice((1, 1, 2, 4))):
        tokens = [(match.start(), match.end()) for match in _TOKEN.finditer(text)]
        if not tokens:
            return text
        (start, end), (a, b) = sorted((rng.choice(tokens), rng.choice(tokens)))
        mistake = rng.choice((0, 1, 2, 2, 2, 3, 4, 5, 6, 7, 7, 7, 8))
        if mistake == 0:  # a token is lost
            text = text[:start] + text[end:]
        elif mistake == 1:  # a token becomes another one of the file
            text = text[:start] + text[a:b] + text[end:]
        elif mistake == 2:  # a number, or what stands there, becomes extreme
            numbers = [t for t in tokens if text[t[0]].isdigit()] or tokens
            start, end = rng.choice(numbers)
            text = text[:start] + rng.choice(_NUMBERS) + text[end:]
        elif mistake == 3:
            text = text[:start] + rng.choice(_PIECES) + text[start:]
        elif mistake == 4:  # a stretch is lost
            text = text[:start] + text[min(b, start + rng.choice((20, 200))) :]
        elif mistake == 5:  # a stretch comes twice
            text = text[:b] + text[max(start, b - 300) : b] + text[b:]
        elif mistake == 6:  # the file ends early
            text = text[: rng.randrange(len(text))]
        elif mistake == 7:  # a modifier is lost, or another's
            dots = [match.span() for match in re.finditer(r"\.[a-z]\w*", text)]
            (start, end), (a, b) = rng.choice(dots or tokens), rng.choice(dots or tokens)
            text = text[:start] + rng.choice(("", text[a:b])) + text[end:]
        else:  # a character
            at = rng.randrange(len(text))
            text = text[:at] + chr(rng.choice((rng.randrange(32, 127), rng.randrange(256)))) + text[at + 1 :]
    return text


def attempt(text: str, rng: random.Random) -> None:
    """Parse a module, and run its first kernel on buffers and numbers."""
    module = emulator.parse(text)
    if not module.entries:
        return
    entry = next(iter(module.entries.values()))
    args = [
        np.zeros(1024, np.uint32) if p.size == 8 else bytes(rng.choice((0, 1, 40)) for _ in range(p.size))
        for p in entry.params
    ]
    required = entry.directives.get("reqntid")
    block = required if required and np.prod(required) <= 256 else (32,)
    checks = emulator.CHECKS if rng.random() < 0.5 else ()
    emulator.run(module, entry.name, args, grid=2, block=block, shared_bytes=8192, checks=checks,
                 mode=rng.choice(emulator.MODES), max_steps=STEPS)  # fmt: skip


def failures(count: int, seed: int, small: bool = False) -> Iterator[str]:
    """Yield each failure of a changed file, file by file."""
    texts = sources(small)
    for i in range(count):
        rng = random.Random(f"{seed}.{i}")
        text, started = make_mistakes(rng.choice(texts), rng), time.perf_counter()
        try:
            attempt(text, rng)
        except PtxlabError as error:
            if "\n" in str(error) and not isinstance(error, Deadlock) and "found before that" not in str(error):
                yield f"{seed}.{i}: more than a line: {str(error)[:300]!r}"
        except Exception as error:
            place = error.__traceback__
            while place is not None and place.tb_next is not None:
                place = place.tb_next
            place_of_error = f"{Path(place.tb_frame.f_code.co_filename).name}:{place.tb_lineno}" if place else ""
            yield f"{seed}.{i}: {type(error).__name__}: {str(error)[:200]} ({place_of_error})"
        if (seconds := time.perf_counter() - started) > SECONDS:
            yield f"{seed}.{i}: took {seconds:.1f} s"


def peak() -> int:
    """Return the most memory of this process so far, in bytes."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def main() -> int:
    """Try them, print what is wrong; exit code 1 if anything is."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--count", type=int, default=2000)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    peak_before, wrong = peak(), 0
    for line in failures(arguments.count, arguments.seed):
        wrong += 1
        print(line, flush=True)
    grown = peak() - peak_before
    print(f"{arguments.count} files, {wrong} failures, {grown >> 20} MiB more memory")
    return int(wrong > 0 or grown > GROWTH)


if __name__ == "__main__":
    sys.exit(main())
