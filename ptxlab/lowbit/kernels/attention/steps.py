"""The kernels behind `attention_kv4`, what each of them takes, and which one is taken."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from ptxlab.errors import ArgumentError, UnavailableError
from ptxlab.lowbit.kernels import spec_call
from ptxlab.lowbit.kernels.attention import ladder, sm80, sm90
from ptxlab.lowbit.kernels.attention.call import MOST_RATIO, MOST_TOKENS, NAME, AttentionCall
from ptxlab.lowbit.kernels.attention.common import ROTATED_CONSTANTS
from ptxlab.lowbit.kernels.attention.options import AttentionOptions
from ptxlab.lowbit.kernels.operation import Scratch
from ptxlab.spec import KernelSpec, Sizes
from ptxlab.validate import is_one_of

_RESIDENT = 2  # blocks per SM, at most, of the kernels that share work out over blocks


@dataclass(frozen=True)
class AttentionStep:
    """A kernel that `attention_kv4` launches.

    Attributes:
        spec: the kernel.
        blocks: sizes and how many SMs there are -> blocks that share the work out; None for a teaching step, which
            takes D 128, one new token, pages of 64 and float16 alone, and has neither window nor logarithms.
    """

    spec: KernelSpec
    blocks: Callable[[Sizes, int], int] | None = None

    def sizes(self, call: AttentionCall, sms: int) -> dict[str, Any]:
        """Return the spec's sizes; raise ArgumentError for a call that the step does not take."""
        if self.blocks is None:
            self._require_teaching(call)
        sizes = {name: size for name, size in call.sizes.items() if name in self.spec.symbols}
        if self.blocks is not None:
            sizes["blocks"] = self.blocks(sizes, sms)
        self.spec.check_sizes(sizes)
        return sizes

    def config(self, sizes: Sizes, dtype: str, *, rotated: bool = False) -> dict[str, int]:
        """Return the variant's constants, for queries of that dtype and caches that are `rotated` or not."""
        chosen_config = self.spec.config_for(sizes)
        if "BF16" in chosen_config:
            chosen_config["BF16"] = sm80.DTYPES.index(dtype)
        return {**chosen_config, **ROTATED_CONSTANTS} if rotated else chosen_config

    def memory(self, sizes: Sizes) -> tuple[Scratch, ...]:
        """List the memory that the step needs besides operands and results."""
        args = [arg for arg in self.spec.args if arg.name in ("partial", "stats", "segments")]
        return tuple(Scratch.of(arg, sizes) for arg in args)

    def max_memory(self, D: int, sms: int) -> tuple[Scratch, ...]:
        """List memory enough for any call on caches of this head dim."""
        return self.memory({"blocks": _RESIDENT * sms, "Hq": MOST_RATIO, "Hkv": 1, "T": MOST_TOKENS, "D": D})

    @property
    def zero_buffers(self) -> tuple[str, ...]:
        """The memory that every call finds and leaves at 0."""
        return tuple(arg.name for arg in self.spec.args if arg.role == "inout")

    def _require_teaching(self, call: AttentionCall) -> None:
        cache, name = call.cache, self.spec.name
        scheme = name.removeprefix("attention_").partition("_")[0]
        if cache.rotated:
            rule = f"rotated only for {_names(step for step in STEPS if step.blocks)}"
            raise ArgumentError(f"{NAME}: cache", rule, f"a rotated cache for {name}")
        for argument, rule, actual, required_setting in (
            ("cache", "scheme must be", cache.scheme, scheme),
            ("cache", "head_dim must be", cache.head_dim, ladder.DIM),
            ("cache", "page_size must be", cache.page_size, ladder.PAGE),
            ("q", "dtype", call.dtype, "float16"),
            ("q", "T must be", call.queries, 1),
            ("window", "must be", call.options.window, None),
            ("return_lse", "must be", call.options.return_lse, False),
        ):
            if actual != required_setting:
                raise ArgumentError(f"{NAME}: {argument}", f"{rule} {required_setting} for {name}", actual)


STEPS = (
    *(AttentionStep(spec) for spec in ladder.SPECS),
    AttentionStep(sm80.FUSED, lambda sizes, sms: _RESIDENT * sms),
    AttentionStep(sm90.SM90, sm90.blocks_for),
)
INVARIANT_STEPS = (AttentionStep(sm90.INVARIANT, sm90.invariant_blocks),)


def step_of(spec: KernelSpec) -> AttentionStep | None:
    """Return the step of a kernel, or None if the kernel is not a step."""
    return next((step for step in STEPS if step.spec.name == spec.name), None)


def choose(options: AttentionOptions) -> AttentionStep:
    """Choose the step asked for, or the highest that runs here.

    Args:
        options: kernel, backend, programmatic and batch_invariant: "emulator" runs every step; without a backend the
            step is one for the GPU where one runs there. With programmatic the step must wait for the kernel before
            it, with batch_invariant it must cut sequences by their own length.

    Raises:
        ArgumentError: an unknown kernel, or one that does not wait, or does not cut so.
        UnavailableError: it does not run on this GPU; names those that would.
    """
    kernel, backend = options.kernel, options.backend
    if not is_one_of(kernel, (*(step.spec.name for step in STEPS), None)):
        raise ArgumentError(f"{NAME}: kernel", f"must be one of {_names(STEPS)}", kernel)
    steps = INVARIANT_STEPS if options.batch_invariant else STEPS
    candidates = [step for step in steps if kernel in (None, step.spec.name)]
    if not candidates:
        rule = f"only for kernels that cut a sequence by its own length ({_names(steps)})"
        raise ArgumentError(f"{NAME}: batch_invariant", rule, kernel)
    gpu_steps = [step for step in candidates if backend != "emulator" and why_not(step) is None]
    emulated_steps = [step for step in candidates if backend != "gpu" and why_not(step, "emulator") is None]
    if not (usable_steps := gpu_steps or emulated_steps):
        assumed_backend = backend or "emulator"
        working = [step for step in STEPS if why_not(step, assumed_backend) is None]
        remedy = f"here run {_names(working)}" if working else 'pass backend="emulator" with NumPy arrays'
        raise UnavailableError(
            f"{NAME}: {_names(candidates[-1:])}: {why_not(candidates[-1], assumed_backend)}; {remedy}"
        )
    step = usable_steps[-1]
    if options.programmatic and not step.spec.after_wait:
        waiting_names = _names(step for step in STEPS if step.spec.after_wait)
        rule = f"only for kernels that wait for the one before them ({waiting_names})"
        raise ArgumentError(f"{NAME}: programmatic", rule, step.spec.name)
    return step


def why_not(step: AttentionStep, backend: str | None = "gpu") -> str | None:
    """Say why a step cannot run on the GPU here, or in the emulator as kernels are compiled for it; None if it can."""
    return spec_call.why_not(step.spec, backend)


def _names(steps: Iterable[AttentionStep]) -> str:
    return ", ".join(step.spec.name for step in steps)
