"""`python -m tests.machine_code`: hash the machine code of every kernel, to show that a change leaves it as it was.

    python -m tests.machine_code > before.json       # at the commit before the change
    python -m tests.machine_code --against before.json

Every source of every spec is compiled as `verify` compiles it: without constants (as a plain file), in each of its
`configs`, in those chosen for the example sizes and for the other dtypes; and in those chosen for sizes of models. A
case is named after its sizes, not after the constants, so that a constant may be added. A hash covers what runs: code,
parameters, registers and shared memory of every entry, but not the lines that it came from, nor the constants of a
namespace, which the compiler stores though nothing reads them.
"""

import argparse
import hashlib
import json
import struct
import sys
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

from ptxlab import registry, sources, toolchain
from ptxlab.errors import ArgumentError, CompileError
from ptxlab.lowbit.kernels import attention, gemm, quantize
from ptxlab.runtime.verify import variants_of
from ptxlab.sources import Source
from ptxlab.spec import KernelSpec
from ptxlab.toolchain import Image

Hashes = dict[str, dict[str, str]]

PLAIN = "plain file"
_RUNS = (".text.", ".nv.constant0.", ".nv.constant2.", ".nv.constant3", ".nv.shared.")  # sections of a cubin
_NOT_STORED = 8  # type of a section that has a size alone
_MODEL_SIZES: tuple[Mapping[str, int], ...] = (
    *({"M": tokens, "N": 4096, "K": 4096} for tokens in (1, 16, 64, 256, 4096)),
    *({"M": tokens, "N": 4096, "K4": 3328, "K8": 768} for tokens in (16, 128, 4096)),
    *({"M": tokens, "K": 4096} for tokens in (1, 4096)),
    {"B": 64, "T": 1, "Hq": 32, "Hkv": 32, "P": 16, "pages": 1024},
    {"B": 64, "T": 1, "Hq": 32, "Hkv": 8, "P": 64, "pages": 4096},
    {"B": 1, "T": 1, "Hq": 32, "Hkv": 8, "P": 512, "pages": 512},
)


class Case(NamedTuple):
    """Compilation of one source for one architecture; `sizes` names what chose its constants."""

    label: str
    sizes: str
    source: Source
    arch: str
    defines: dict[str, int]


def cases(pattern: str = "") -> Iterator[Case]:
    """Yield the compilations of kernels with `pattern` in their label: for the lowest architecture and for Hopper."""
    for spec in (*registry.specs().values(), *gemm.FORMS, *attention.FORMS, *quantize.FORMS):
        for source in sources.sources_of_kernel(spec.name):
            by_sizes = {PLAIN: {}} if source.language == "ptx" else dict(_constants(spec))
            for arch in dict.fromkeys((spec.arch, "sm_90a")):
                label = f"{source.label}{spec.suffix} {arch}"
                if pattern in label:
                    yield from (Case(label, sizes, source, arch, config) for sizes, config in by_sizes.items())


def _constants(spec: KernelSpec) -> Iterator[tuple[str, dict[str, int]]]:
    if not spec.form:
        yield PLAIN, {}
    yield from ((_text(config), dict(config)) for config in spec.configs if config)
    for sizes, config in variants_of(spec):
        dtypes = {constant: config[constant] for constant in spec.by_variant}
        yield _text({**sizes, **dtypes}), dict(config)
    for model in _MODEL_SIZES:
        sizes = {**spec.example_sizes[0], **model}
        if set(model) <= spec.symbols and _fits(spec, sizes):
            yield _text(sizes), dict(spec.config_for(sizes))


def _fits(spec: KernelSpec, sizes: Mapping[str, int]) -> bool:
    try:
        spec.check_sizes(sizes)
    except ArgumentError:
        return False
    return True


def _text(sizes: Mapping[str, int]) -> str:
    return " ".join(f"{symbol}={size}" for symbol, size in sizes.items())


def hash_code(image: Image) -> str:
    """Return the digest of what runs of a cubin."""
    digest = hashlib.sha256()
    digest.update(repr(sorted(image.resources.items())).encode())
    for name, content in sorted(_sections(image.data)):
        if name.startswith(_RUNS):
            digest.update(f"{name} {len(content)}\n".encode() + content)
    return digest.hexdigest()[:16]


def _sections(cubin: bytes) -> Iterator[tuple[str, bytes]]:
    """Yield name and content of the sections of a 64-bit ELF file; of what is not stored, its size."""
    (table,), (entry, count, names) = struct.unpack_from("<Q", cubin, 0x28), struct.unpack_from("<HHH", cubin, 0x3A)
    headers = [struct.unpack_from("<IIQQQQIIQQ", cubin, table + i * entry) for i in range(count)]
    for name, kind, _, _, offset, size, *_ in headers:
        start = headers[names][4] + name
        text = cubin[start : cubin.index(b"\0", start)].decode()
        yield text, str(size).encode() if kind == _NOT_STORED else cubin[offset : offset + size]


def hash_case(case: Case) -> str:
    """Return the digest of one compilation, or the first line of the error that it ends with."""
    try:
        return hash_code(toolchain.build(case.source, case.arch, defines=case.defines))
    except CompileError as error:
        return str(error).splitlines()[0].rpartition("/")[2]


def compare(recorded: Hashes, current: Hashes) -> list[str]:
    """Return a line for each case that differs, or is in one of the two alone."""
    lines, absent = [], "no such case"
    for label in sorted({*recorded, *current}):
        old, new = recorded.get(label, {}), current.get(label, {})
        for sizes in sorted({*old, *new}):
            hashes = old.get(sizes, absent), new.get(sizes, absent)
            if hashes[0] != hashes[1]:
                lines.append(f"{label} ({sizes}): {hashes[0]} -> {hashes[1]}")
    return lines


def main(arguments: Sequence[str] | None = None) -> int:
    """Return the exit status: 1 if machine code differs from that of `--against`."""
    parser = argparse.ArgumentParser("python -m tests.machine_code", description=__doc__.partition("\n")[0])
    parser.add_argument("pattern", nargs="?", default="", help="only kernels with this in their label")
    parser.add_argument("--against", type=Path, metavar="FILE", help="compare with hashes that this command printed")
    parser.add_argument("-j", type=int, default=1, metavar="N", help="how many compilations at a time")
    options = parser.parse_args(arguments)
    chosen = list(cases(options.pattern))
    if not chosen:
        parser.error(f"no kernel has {options.pattern!r} in its label")
    hashes: Hashes = {}
    with ThreadPoolExecutor(max(1, options.j)) as pool:
        for case, digest in zip(chosen, pool.map(hash_case, chosen), strict=True):
            hashes.setdefault(case.label, {})[case.sizes] = digest
    if options.against is None:
        print(json.dumps(hashes, indent=1))
        return 0
    recorded: Hashes = json.loads(options.against.read_text())
    different = compare({label: by_sizes for label, by_sizes in recorded.items() if options.pattern in label}, hashes)
    print("\n".join([*different, f"{len(different)} of {len(chosen)} cases differ"]))
    return 1 if different else 0


if __name__ == "__main__":
    sys.exit(main())
