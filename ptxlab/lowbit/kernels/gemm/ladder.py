"""The ladder, and which of its steps a weight and activations are for."""

from collections.abc import Iterable
from typing import Any

from ptxlab import gpu
from ptxlab.errors import ArgumentError, UnavailableError
from ptxlab.lowbit.kernels import spec_call
from ptxlab.lowbit.kernels.gemm import epilogues, sm80, sm90, strips
from ptxlab.lowbit.kernels.gemm.common import GemmStep
from ptxlab.lowbit.kernels.gemm.options import GemmOptions
from ptxlab.lowbit.kernels.gemm.w4a4_api import FOUR_BIT_KERNELS
from ptxlab.lowbit.layout import PackedWeight
from ptxlab.spec import KernelSpec, Sizes
from ptxlab.validate import is_one_of

LADDER: tuple[GemmStep, ...] = (*sm80.STEPS, *sm90.STEPS, *strips.STEPS)
_FEW_TOKENS = 16


def step_of(spec: KernelSpec) -> GemmStep | None:
    """Return the first step with this very spec, or None if there is none.

    A kernel has one step per order of the activations.
    """
    return next((step for step in LADDER if step.spec is spec), None)


def fit_tokens(spec: KernelSpec, sizes: Sizes) -> dict[str, Any]:
    """Return sizes of a GEMM with their M, or with few tokens if the kernel takes no more."""
    try:
        spec.check_sizes(sizes)
    except ArgumentError:
        return {**sizes, "M": _FEW_TOKENS}
    return dict(sizes)


def choose(weight: PackedWeight, order: str, M: int, options: GemmOptions) -> GemmStep:
    """Choose the step asked for, or the highest that takes this weight, suits the sizes and runs here.

    Args:
        weight: decides scheme, packing, N, K and group.
        order: of the activations.
        M: tokens.
        options: epilogue, kernel, backend and programmatic: "emulator" runs every step; without a backend the step is
            one for the GPU where one runs there. With programmatic the step must wait for the kernel before it.

    Raises:
        ArgumentError: an unknown kernel, or one that takes another weight or order; or no kernel takes them; or the one
            to take does not wait.
        UnavailableError: those that take them do not run on this GPU; names those that would.
    """
    steps = epilogues.STEPS[options.epilogue] if options.epilogue else LADDER
    if not is_one_of(options.kernel, (*(step.spec.name for step in steps), None)):
        raise ArgumentError("gemm_w4a8: kernel", f"must be one of {_kernel_names(steps)}", options.kernel)
    accepting = _accepting_steps([step for step in steps if options.kernel in (None, step.spec.name)], weight, order)
    gpu_steps = [step for step in accepting if options.backend != "emulator" and why_not(step) is None]
    emulated_steps = [step for step in accepting if options.backend != "gpu" and why_not(step, "emulator") is None]
    if not (usable_steps := gpu_steps or emulated_steps):
        raise _unavailable(accepting, weight, options.backend)
    sizes = M, weight.N, weight.K, weight.group, 1
    step = next((step for step in reversed(usable_steps) if step.suits(step.sizes(*sizes))), usable_steps[-1])
    if options.programmatic and not step.spec.after_wait:
        waiting_names = _kernel_names(step for step in LADDER if step.spec.after_wait)
        rule = f"only for kernels that wait for the one before them ({waiting_names})"
        raise ArgumentError("gemm_w4a8: programmatic", rule, step.spec.name)
    return step


def why_not(step: GemmStep, backend: str | None = "gpu") -> str | None:
    """Say why a step cannot run on the GPU here, or in the emulator as kernels are compiled for it; None if it can."""
    return spec_call.why_not(step.spec, backend)


def layout_here(scheme: str, backend: str | None = None, *, now: str = "strips") -> str:
    """Choose the layout to pack weights of a scheme in: `now`, or if no kernel for it runs here, that of one that does.

    The schemes are those of `PackedWeight` and of `ReorderedWeight`. Without a GPU, and where none of the kernels runs,
    it is `now`. Backend as `gemm_w4a8` takes it.
    """
    if backend is None and gpu.why_not(None) is not None:
        backend = "emulator"
    candidates = [(step.packing, step.spec) for step in LADDER if step.scheme == scheme]
    candidates += FOUR_BIT_KERNELS.get(scheme, {}).items()
    running_layouts = [layout for layout, spec in candidates if spec_call.why_not(spec, backend) is None]
    return now if now in running_layouts or not running_layouts else running_layouts[-1]


def _accepting_steps(steps: list[GemmStep], weight: PackedWeight, order: str) -> list[GemmStep]:
    matching = [step for step in steps if (step.scheme, step.packing) == (weight.scheme, weight.layout)]
    if not matching:
        raise ArgumentError(
            "gemm_w4a8: weight", f"must be {_format_weights(steps)}", f"{weight.scheme} in {weight.layout}"
        )
    if not any(step.order == order for step in matching):
        orders = " or ".join(dict.fromkeys(step.order for step in matching))
        raise ArgumentError("gemm_w4a8: x_q", f"must be {orders} for {_kernel_names(matching)}", order)
    return [step for step in matching if step.order == order]


def _unavailable(accepting: list[GemmStep], weight: PackedWeight, backend: str | None) -> UnavailableError:
    reason = why_not(accepting[-1], backend or "emulator")
    problem = f"gemm_w4a8: {weight.scheme} in {weight.layout} takes {_kernel_names(accepting)}: {reason}"
    working = [step for step in LADDER if why_not(step, backend or "emulator") is None]
    if not working:
        return UnavailableError(f'{problem}; pass backend="emulator"')
    same_scheme = [step for step in working if step.scheme == weight.scheme]
    return UnavailableError(f"{problem}; here a weight can be {_format_weights(same_scheme or working)}")


def _format_weights(steps: Iterable[GemmStep]) -> str:
    """Format the weights that steps take, each with the steps that do."""
    steps_by_weight: dict[str, list[GemmStep]] = {}
    for step in steps:
        steps_by_weight.setdefault(f"{step.scheme} in {step.packing}", []).append(step)
    return " or ".join(f"{weight} ({_kernel_names(accepting)})" for weight, accepting in steps_by_weight.items())


def _kernel_names(steps: Iterable[GemmStep]) -> str:
    """Format the names of the steps' kernels, each once: a kernel may be a step for several orders."""
    return ", ".join(dict.fromkeys(step.spec.name for step in steps))
