"""A kernel's variants on one problem: every combination of the constants asked for, timed and checked."""

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace

from ptxlab import gpu, toolchain
from ptxlab.errors import ArgumentError, CompileError, PtxlabError, UnavailableError
from ptxlab.lowbit.kernels.attention.steps import step_of as attention_step
from ptxlab.lowbit.kernels.gemm.ladder import step_of as gemm_step
from ptxlab.runtime.problems import SizedProblem, problems_of
from ptxlab.runtime.timing import Measured, measure
from ptxlab.sources import sources_of_kernel
from ptxlab.spec import KernelSpec

_REPLAYS = 5


@dataclass(frozen=True)
class VariantFigures:
    """Result of one variant.

    Attributes:
        constants: the `-D` constants that were asked for.
        chosen: whether they are what the spec chooses at these sizes.
        measured: its times, or None where it cannot run.
        registers, local_bytes: of a thread.
        why_not: why it cannot run: what the compiler, the spec or the driver says, in a line.
    """

    constants: dict[str, int]
    chosen: bool
    measured: Measured | None = None
    registers: int = 0
    local_bytes: int = 0
    why_not: str = ""


def sweep(
    spec: KernelSpec,
    sizes: Mapping[str, int],
    constants: Mapping[str, Sequence[int]],
    progress: Callable[[str], None] = lambda _: None,
) -> list[VariantFigures]:
    """Time every combination of `constants` of a GEMM's or an attention's kernel, and the spec's choice.

    Variants come quickest first. The results of the timed launches are checked as in a bench.

    Args:
        spec: the kernel.
        sizes: `M`, `N`, `K`, `g` of a GEMM; `B`, `L`, `Hq`, `Hkv` of an attention (`profile.launch_target.sizes_of`).
        constants: values by name of a `-D` constant of the kernel; the others are as chosen.
        progress: called with each variant.

    Raises:
        ArgumentError: a kernel of another family, or a constant that the kernel does not have.
        UnavailableError: no GPU that runs the kernel.
        BenchmarkError: a variant gave wrong results.
    """
    if gemm_step(spec) is None and attention_step(spec) is None:
        raise ArgumentError("target", "a kernel of a W4A8 GEMM or of attention", spec.name)
    gpu.device_info()  # or why there is none
    if reason := gpu.why_not(spec.arch, exact=spec.exact_arch):
        raise UnavailableError(f"{spec.name}: {reason}")
    problem = problems_of(spec).sized(spec, sizes, None)
    assert problem is not None
    chosen_variant = problem.chosen
    if unknown_constants := sorted(set(constants) - set(chosen_variant)):
        raise ArgumentError("-D", f"a constant of {spec.name}: {', '.join(chosen_variant)}", unknown_constants[0])
    combinations = [dict(zip(constants, values, strict=True)) for values in itertools.product(*constants.values())]
    variants = [{**chosen_variant, **named_constants} for named_constants in combinations]
    if chosen_variant not in variants:
        variants.insert(0, chosen_variant)
    progress("compiling")
    timed_variants = []
    for variant, why_not in zip(variants, _compile_all(spec, variants), strict=True):
        named_constants = {name: variant[name] for name in constants}
        progress(", ".join(f"{name}={number}" for name, number in named_constants.items()))
        variant_figures = VariantFigures(named_constants, variant == chosen_variant, why_not=why_not)
        timed_variants.append(variant_figures if why_not else _time_variant(variant_figures, variant, problem))
    return sorted(
        timed_variants,
        key=lambda variant_figures: variant_figures.measured.us if variant_figures.measured else float("inf"),
    )


def _time_variant(variant_figures: VariantFigures, variant: dict[str, int], problem: SizedProblem) -> VariantFigures:
    try:
        ready = problem.launches(variant)
    except PtxlabError as error:
        return replace(variant_figures, why_not=_line(error))
    measured = measure(ready.calls, replays=_REPLAYS)
    problem.check(ready)
    return replace(
        variant_figures, measured=measured, registers=ready.kernel.registers, local_bytes=ready.kernel.local_bytes
    )


def _compile_all(spec: KernelSpec, variants: Sequence[dict[str, int]]) -> list[str]:
    """Compile all variants in parallel, so that loading finds them in the cache.

    Returns the compile error of each, or an empty text.
    """
    arch, source = gpu.device_info().arch, sources_of_kernel(spec.name)[0]

    def compile_variant(variant: dict[str, int]) -> str:
        try:
            toolchain.compile_cuda(source, arch, defines=variant)
        except CompileError as error:
            return _line(error)
        return ""

    with ThreadPoolExecutor() as pool:
        return list(pool.map(compile_variant, variants))


def _line(error: Exception) -> str:
    return str(error).splitlines()[0]


def lines(variants: Sequence[VariantFigures]) -> Iterator[list[str]]:
    """Format variants for the terminal: constants, microseconds, ratio to the spec's choice, and so on.

    The other columns are registers, local bytes and a remark.
    """
    chosen_time = next(row.measured for row in variants if row.chosen)
    for row in variants:
        time = "-" if row.measured is None else f"{row.measured.us:.2f}"
        speed = "-" if row.measured is None or chosen_time is None else f"{chosen_time.us / row.measured.us:.3f}x"
        row_remark = "chosen" if row.chosen else row.why_not
        yield [
            *(str(v) for v in row.constants.values()),
            time,
            speed,
            f"{row.registers}",
            f"{row.local_bytes}",
            row_remark,
        ]
