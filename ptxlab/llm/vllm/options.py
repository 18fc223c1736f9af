"""`ServingOptions`: how `--quantization ptxlab` quantises a float checkpoint."""

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Self

from vllm.config import VllmConfig

from ptxlab.errors import ArgumentError
from ptxlab.llm.vllm import NAME
from ptxlab.lowbit.layout.packed_weight import SCHEMES
from ptxlab.lowbit.quant import GROUPS
from ptxlab.validate import is_one_of

_ARGUMENT = f"--additional-config: {NAME}"
CHANNEL = "qoq_channel"
HEADS = ("float", "int8")


@dataclass(frozen=True)
class ServingOptions:
    """Options of `--additional-config '{"ptxlab": {"scheme": "qoq", "group": 64}}'`.

    Attributes:
        scheme: `lqq` or `qoq`, in groups, or `qoq_channel`.
        group: 32, 64 or 128 weights; None for 128 where it divides a matrix' K, else 64.
        head: what `lm_head` multiplies in: `float`, as in the checkpoint, or `int8`.

    Raises ArgumentError for another scheme, group or head.
    """

    scheme: str = "lqq"
    group: int | None = None
    head: str = HEADS[0]

    def __post_init__(self) -> None:
        if not is_one_of(self.scheme, SCHEMES):
            raise ArgumentError(f"{_ARGUMENT}: scheme", f"must be one of {', '.join(SCHEMES)}", self.scheme)
        if self.group is not None and (self.scheme == CHANNEL or not is_one_of(self.group, GROUPS)):
            rule = f"must be one of {', '.join(map(str, GROUPS))}, and none for {CHANNEL}"
            raise ArgumentError(f"{_ARGUMENT}: group", rule, self.group)

        if not is_one_of(self.head, HEADS):
            raise ArgumentError(f"{_ARGUMENT}: head", f"must be one of {', '.join(HEADS)}", self.head)

    @classmethod
    def from_vllm(cls, vllm_config: VllmConfig) -> Self:
        """Return the options in a configuration of vLLM, defaults for those that it lacks."""
        additional = vllm_config.additional_config
        chosen_options = additional.get(NAME, {}) if isinstance(additional, Mapping) else None
        if not isinstance(chosen_options, Mapping):
            raise ArgumentError(_ARGUMENT, "must be a mapping of options", type(additional).__name__)
        names = [field.name for field in fields(cls)]
        unknown_options = [name for name in chosen_options if name not in (*names, "version")]
        if unknown_options:
            raise ArgumentError(
                _ARGUMENT, f"must be options of {', '.join(names)}", ", ".join(map(str, unknown_options))
            )
        return cls(**{name: chosen_options[name] for name in names if name in chosen_options})

    def group_of(self, K: int) -> int:
        """Return the weights of a group of a matrix with K columns: K itself for `qoq_channel`.

        Raises ArgumentError where no group divides K.
        """
        if self.scheme == CHANNEL:
            return K
        allowed_groups = (128, 64) if self.group is None else (self.group,)
        for group in allowed_groups:
            if K % group == 0:
                return group
        raise ArgumentError(
            "weight", f"K must be a multiple of the group, {' or '.join(map(str, allowed_groups))}", f"K={K}"
        )

    @property
    def quantises_otherwise(self) -> bool:
        """Tell whether scheme or group are not the defaults; a checkpoint that is quantised already takes no others."""
        return (self.scheme, self.group) != (ServingOptions.scheme, ServingOptions.group)

    def __str__(self) -> str:
        if self.scheme == CHANNEL:
            return f"weights W4A8 ({self.scheme}, a scale per channel)"
        groups = "128, or 64 where 128 does not divide" if self.group is None else str(self.group)
        return f"weights W4A8 ({self.scheme}, groups of {groups})"
