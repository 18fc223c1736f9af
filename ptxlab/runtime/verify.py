"""Verification: every source of a kernel, on every backend, against its reference, on poisoned memory, checks on."""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass
from itertools import cycle, product
from time import perf_counter
from typing import Any

import numpy as np

from ptxlab import emulator, gpu, registry, toolchain
from ptxlab.errors import ArgumentError, FileError, PtxlabError, UnavailableError, VerificationError
from ptxlab.runtime import Kernel, run_spec
from ptxlab.runtime.backends import BACKENDS
from ptxlab.sources import Source
from ptxlab.spec import Arrays, KernelSpec
from ptxlab.spec.dtypes import convert_to_dtype, dtype_in, numbers, storage
from ptxlab.spec.tolerance import Allowed, describe_mismatch, misses
from ptxlab.validate import is_one_of

_POISONS = (0xA5, 0x5A)  # every output byte differs from one of them: an element that nobody wrote shows
_ROWS = 300, 64, 16, 5  # of a batch: as many as the kernel takes
_GUARD = 256  # bytes of poison before and behind every output


@dataclass(frozen=True)
class Verdict:
    """Outcome of verifying one kernel source on one backend at one size.

    Attributes:
        kernel: name with its source, `dequant_lqq.ptx`, and a form where it is one.
        backend: `"gpu"` or `"emulator"`.
        sizes: the sizes of the example, and the constants that decide dtypes.
        passed: whether everything held.
        detail: what was compared, or what went wrong, in one line.
        seconds: wall time.
    """

    kernel: str
    backend: str
    sizes: dict[str, int]
    passed: bool
    detail: str
    seconds: float

    def to_json(self) -> dict[str, Any]:
        """Return the verdict as JSON-ready values."""
        return asdict(self)


@dataclass(frozen=True)
class Job:
    """A verification to run: a source of a kernel, a backend, the sizes of the example.

    `config` are the constants of the variant; None: those of the variant that runs at these sizes.
    """

    spec: KernelSpec
    source: Source
    backend: str
    sizes: Mapping[str, int]
    config: Mapping[str, int] | None = None

    @property
    def label(self) -> str:
        """Name that selects it on a command line: `NAME.cu`, or `NAME.cu:FORM`."""
        return self.source.label + self.spec.suffix


def plan(names: Iterable[str], backend: str | None = None) -> tuple[list[Job], list[str]]:
    """Return the jobs to verify, and a line for each source that cannot be verified here.

    Args:
        names: kernels or families; a bare name means all its sources, `name.ptx` or `name.cu` one of them, `name:form`
            another form. Inside `gpu.compiling_for` a form that runs there takes the place of a kernel that does not.
        backend: `"gpu"` or `"emulator"`; by default every backend that can run the kernel here.

    Raises:
        ArgumentError: unknown kernel or backend.
        UnavailableError: the backend, or the compiler of a source asked for by name, is not here; or a kernel asked for
            by name cannot be compiled for the architecture.
    """
    if not is_one_of(backend, (*BACKENDS, None)):
        raise ArgumentError("backend", f"one of {', '.join(BACKENDS)}", backend)
    jobs, skipped_kernels = [], []
    for target, (spec, sources, _) in (
        (name, resolved_kernel) for name in names for resolved_kernel in registry.resolve_all(name)
    ):
        if spec is None:
            raise ArgumentError("kernel", "a kernel or a family: a file has no reference to verify against", target)
        if problem := gpu.why_not_compiled(spec.arch, exact=spec.exact_arch):
            problem = f"{spec.name}: {problem}"
            if (spec := _compiled_form(spec)) is None:
                if target not in registry.families():
                    raise UnavailableError(problem)
                skipped_kernels.append(problem)
                continue
        reason = gpu.why_not(spec.arch, exact=spec.exact_arch)
        if backend == "gpu" and reason is not None:
            raise UnavailableError(f'{spec.name}: no GPU backend here: {reason}; pass backend="emulator"')
        backends = [backend] if backend else ["emulator"] + ([] if reason else ["gpu"])
        for source in sources:
            if source.language == "cu" and "nvrtc" in toolchain.missing():
                problem = f"{source.label}: NVRTC is not installed; {toolchain.missing()['nvrtc']}"
                if target.partition(":")[0] == source.label:
                    raise UnavailableError(problem)
                skipped_kernels.append(problem)
                continue
            jobs += [
                Job(spec, source, job_backend, *variant) for job_backend in backends for variant in variants_of(spec)
            ]
    return jobs, skipped_kernels


def _compiled_form(spec: KernelSpec) -> KernelSpec | None:
    """Find the form of a kernel that can be compiled for `gpu.target`.

    Return None if there is none, or if a form was asked for.
    """
    forms = () if spec.form else registry.forms_of(spec)
    return next((f for f in forms if gpu.why_not_compiled(f.arch, exact=f.exact_arch) is None), None)


def variants_of(spec: KernelSpec) -> Iterator[tuple[Mapping[str, int], Mapping[str, int]]]:
    """Yield every example size with the constants of the variant that runs there; then the other dtypes.

    The other dtypes take turns over the sizes.
    """
    yield from ((sizes, spec.config_for(sizes)) for sizes in spec.example_sizes)
    default_config = spec.config_for(spec.example_sizes[-1])
    other_dtypes = [
        (c, i) for c, dtypes in spec.by_variant.items() for i in range(len(dtypes)) if i != default_config[c]
    ]
    for (constant, dtype_index), sizes in zip(other_dtypes, cycle(reversed(spec.example_sizes)), strict=False):
        yield sizes, {**spec.config_for(sizes), constant: dtype_index}


def verify(job: Job, *, seed: int = 0) -> Verdict:
    """Verify one source on one backend at one size; a failure is a verdict, not an exception.

    FileError: the cache cannot be written to.
    """
    spec, sizes = job.spec, job.sizes
    config = job.config or spec.config_for(sizes)
    start = perf_counter()
    try:
        has_passed, detail = True, _check(job, spec.example(np.random.default_rng(seed), **sizes), config)
    except FileError:  # the cache cannot be written to: that says nothing of the kernel
        raise
    except PtxlabError as error:
        has_passed, detail = False, str(error)
    shown_sizes = {**sizes, **{constant: config[constant] for constant in spec.by_variant}}
    return Verdict(job.label, job.backend, shown_sizes, has_passed, detail, perf_counter() - start)


def _check(job: Job, logical: Arrays, config: Mapping[str, int]) -> str:
    """Run the job on two poisons; check outputs against reference and truth, and the guards. Returns what held.

    In the emulator, what a kernel asks for asynchronously happens early and late.
    """
    spec, source, backend, sizes = job.spec, job.source, job.backend, job.sizes
    dtypes = {arg.name: dtype_in(arg.dtype, config) for arg in spec.args}
    inputs = {name: convert_to_dtype(array, dtypes[name]) for name, array in spec.pack(logical).items()}
    outputs: dict[str, np.ndarray] = {}
    module = Kernel.of(spec, source, config).module if backend == "emulator" else None
    is_asynchronous = module is not None and module.entries[spec.name].is_asynchronous
    modes = emulator.MODES if is_asynchronous else emulator.MODES[:1]
    findings: list[emulator.Finding] = []
    for poison, mode in product(_POISONS, modes):
        buffers = {
            a.name: _allocate_guarded(a.resolve(sizes), storage(dtypes[a.name]), poison, backend) for a in spec.outputs
        }
        for arg in spec.outputs:
            if arg.role == "inout":  # what it is given stands where it is to write
                initial_contents = np.ascontiguousarray(inputs[arg.name])
                buffers[arg.name][1][...] = (
                    initial_contents if backend == "emulator" else gpu.to_device(initial_contents)
                )
        outcome = run_spec(
            spec,
            source,
            inputs,
            sizes=sizes,
            backend=backend,
            out={name: view for name, (_, view) in buffers.items()},
            checks=emulator.CHECKS if backend == "emulator" else (),
            mode=mode,
            config=config,
        )
        findings += outcome.findings
        for name, (buffer, view) in buffers.items():
            host_bytes = buffer if isinstance(buffer, np.ndarray) else buffer.get()
            guards = np.concatenate([host_bytes[:_GUARD], host_bytes[_GUARD + view.nbytes :]])
            if (guards != poison).any():
                raise VerificationError(f"{name}: {int((guards != poison).sum())} bytes written outside the array")
            outputs[name] = host_bytes[_GUARD : _GUARD + view.nbytes].view(view.dtype).reshape(view.shape)
        compare(spec, outputs, logical, config)
    return _judge_findings(spec, backend, findings, logical) + (", early and late" if is_asynchronous else "")


def plan_rows(jobs: Iterable[Job]) -> tuple[list[Job], list[str]]:
    """Plan jobs for `check_rows`, one per source and backend.

    Return them and a line for each source that has no rows to check.
    """
    row_jobs, refused_jobs = [], {}
    for job in {(job.label, job.backend): job for job in jobs}.values():
        spec = job.spec.invariant or job.spec
        try:
            row_jobs.append(Job(spec, job.source, job.backend, _batch_sizes(spec)))
        except ArgumentError as error:
            refused_jobs[job.label] = f"{job.label}: {error}"
    return row_jobs, list(refused_jobs.values())


def _batch_sizes(spec: KernelSpec) -> Mapping[str, Any]:
    """Return sizes of a batch that the kernel takes, as well as one row of it.

    Raises ArgumentError if there are none.
    """
    if spec.batch not in spec.symbols:
        raise ArgumentError("batch", "the spec must have a size that counts rows", spec.batch or "none")
    candidates = [spec.batch_sizes] if spec.batch_sizes else reversed(spec.example_sizes)
    problem = ArgumentError("example_sizes", "there must be some", "none")
    for sizes, rows in product(candidates, [spec.batch_sizes[spec.batch]] if spec.batch_sizes else _ROWS):
        try:
            for count in (1, rows):
                spec.check_sizes({**sizes, spec.batch: count})
                spec.rows_of({**sizes, spec.batch: count})
            return {**sizes, spec.batch: rows}
        except ArgumentError as error:
            problem = error
    raise problem


def check_rows(job: Job, *, seed: int = 0) -> Verdict:
    """Check whether rows of a batch have the same bits when each is alone: its first, last and one between.

    What has no axis of rows, such as a cache's pool, is written into a copy of what the batch left, and must not
    change.
    """
    start, spec = perf_counter(), job.spec
    try:
        has_passed, detail = True, _check_rows(job, seed)
    except FileError:
        raise
    except PtxlabError as error:
        has_passed, detail = False, str(error)
    shown_sizes = {name: size for name, size in job.sizes.items() if name in spec.symbols}
    return Verdict(job.label, job.backend, shown_sizes, has_passed, detail, perf_counter() - start)


def _check_rows(job: Job, seed: int) -> str:
    spec, sizes = job.spec, job.sizes
    row_arguments, rows, config = spec.rows_of(sizes), sizes[spec.batch], spec.config_for(sizes)
    logical = spec.example(np.random.default_rng(seed), **sizes)
    inputs = {
        name: convert_to_dtype(x, dtype_in(spec.arg(name).dtype, config)) for name, x in spec.pack(logical).items()
    }
    fresh_inputs = {name: x.copy() for name, x in inputs.items()}  # some are updated in place
    batch_outputs = run_spec(spec, job.source, fresh_inputs, sizes=sizes, backend=job.backend).outputs
    picked_rows = sorted({0, rows // 3, rows - 1})
    for row in picked_rows:
        row_inputs = {name: x[row : row + 1].copy() if name in row_arguments else x for name, x in inputs.items()}
        row_inputs |= spec.one_row(inputs, row) if spec.one_row else {}
        shared_outputs = {
            arg.name: batch_outputs[arg.name].copy() for arg in spec.outputs if arg.name not in row_arguments
        }
        row_sizes = {**sizes, spec.batch: 1}
        row_outputs = run_spec(
            spec, job.source, row_inputs, sizes=row_sizes, out=shared_outputs, backend=job.backend
        ).outputs
        for name, x in row_outputs.items():
            expected = batch_outputs[name][row : row + 1] if name in row_arguments else batch_outputs[name]
            got_bytes, right_bytes = (np.ascontiguousarray(array).view(np.uint8) for array in (x, expected))
            if differing_bytes := int((got_bytes != right_bytes).sum()):
                raise VerificationError(
                    f"{name}: row {row} alone differs from itself among {rows} in {differing_bytes} bytes"
                )
    return f"same bits alone: rows {', '.join(map(str, picked_rows))} of {rows}"


def compare(
    spec: KernelSpec, outputs: Mapping[str, np.ndarray], logical: Arrays, config: Mapping[str, int] | None = None
) -> None:
    """Raise VerificationError with the first place where an output is off the reference (in the variant `config`)."""
    expected = spec.expected(logical, config)
    if spec.bound is not None:
        constants = {**dict.fromkeys(spec.by_variant, 0), **(config or {})}
        got = {name: numbers(outputs[name], dtype_in(spec.arg(name).dtype, constants)) for name in expected}
        if problem := describe_mismatch(got, expected, spec.allowed(logical, config)):
            raise VerificationError(problem)
    else:
        for name, exact_values in expected.items():
            _compare(spec, "" if len(outputs) == 1 else f"{name}: ", outputs[name], exact_values)
    if spec.wrong is not None:
        is_missed = outputs[spec.outputs[0].name].astype(np.int32) != spec.wrong.truth(**logical)
        if (is_missed != spec.wrong.misses(**logical)).any():
            raise VerificationError("misses the truth in other places than its model says")


def _compare(spec: KernelSpec, label: str, got: np.ndarray, expected: np.ndarray) -> None:
    if spec.tolerance:
        size = np.abs(expected.astype(np.float64))
        is_wrong, _ = misses(got, expected, Allowed(spec.tolerance * np.maximum(size, size.max())))
    else:
        is_wrong = got.view(f"u{got.itemsize}") != expected.view(f"u{expected.itemsize}")
    if is_wrong.any():
        place = tuple(int(i) for i in np.argwhere(is_wrong)[0])
        raise VerificationError(
            f"{label}{int(is_wrong.sum())} of {is_wrong.size} elements differ from the reference, "
            f"first at {list(place)}: {got[place]} instead of {expected[place]}"
        )


def _judge_findings(spec: KernelSpec, backend: str, findings: list[emulator.Finding], logical: Arrays) -> str:
    if findings and not (spec.wrong and spec.wrong.overflows):
        raise VerificationError(f"{len(findings)} findings, first: {findings[0]}")
    if spec.wrong is None:
        return "equal to the reference" + (", checks clean" if backend == "emulator" else "")
    miss_count = int(spec.wrong.misses(**logical).sum())
    if backend == "emulator" and miss_count and spec.wrong.overflows and not findings:
        raise VerificationError(f"{miss_count} elements are wrong by design, yet the checks found nothing")
    return f"wrong in exactly the {miss_count} places that its model predicts"


def _allocate_guarded(shape: tuple[int, ...], dtype: np.dtype, poison: int, backend: str) -> tuple[Any, Any]:
    """Allocate a poisoned buffer where the backend works.

    Return it and, inside its guards, the array that the kernel is to write.
    """
    nbytes = int(np.prod(shape, dtype=np.int64)) * dtype.itemsize
    buffer = (gpu.empty if backend == "gpu" else np.empty)((nbytes + 2 * _GUARD,), np.uint8)
    buffer.fill(poison)
    return buffer, buffer[_GUARD : _GUARD + nbytes].view(dtype).reshape(shape)
