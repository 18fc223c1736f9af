"""`W4A8Linear`: `nn.Linear` with a packed weight, on the operators; `W4A8Grouped` with those of experts."""

import json
from collections.abc import Callable
from typing import Any, Self

import torch
from torch import Tensor, nn

from ptxlab.errors import ArgumentError
from ptxlab.llm.model.weights import quantiser
from ptxlab.llm.torch.operators import Quantized
from ptxlab.lowbit.kernels.gemm import layout_here
from ptxlab.lowbit.layout import ExpertWeights, PackedWeight, buffer_shapes, pack
from ptxlab.lowbit.layout.packed_weight import VERSION
from ptxlab.lowbit.quant import Rounding
from ptxlab.spec.dtypes import name_of

_DTYPES = (torch.float16, torch.bfloat16, torch.float32)


class Uncast(nn.Module):
    """A module whose buffers keep their dtypes when a model is cast."""

    def _apply(self, function: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        """Move, but do not cast."""

        def move(tensor: Tensor) -> Tensor:
            applied = function(tensor)
            return applied if applied.dtype == tensor.dtype else tensor.to(applied.device)

        super()._apply(move, recurse)
        return self


class PackedModule(Uncast):
    """Packed weights as buffers, with the format's name as extra state, which must be the same to load them.

    Attributes:
        in_features, out_features: K and N.
        experts: how many weights, 0 for a single one.
        layout, scheme, group: of the packed weights.
        dtype: of x and y.
        names: of the buffers.
    """

    def __init__(self, weight: PackedWeight | ExpertWeights, dtype: torch.dtype) -> None:
        super().__init__()
        if dtype not in _DTYPES:
            rule = f"must be one of {', '.join(map(name_of, _DTYPES))}"
            raise ArgumentError(f"{type(self).__name__}: dtype", rule, dtype)
        self.in_features, self.out_features, self.dtype = weight.K, weight.N, dtype
        self.layout, self.scheme, self.group = weight.layout, weight.scheme, weight.group
        self.experts = weight.E if isinstance(weight, ExpertWeights) else 0
        self.names = tuple(buffer_shapes(weight.layout, weight.scheme, weight.N, weight.K, weight.group))
        for name in self.names:
            self.register_buffer(name, torch.as_tensor(weight.buffers[name]))

    @property
    def device(self) -> torch.device:
        """Device of the buffers."""
        return self.get_buffer(self.names[0]).device

    @property
    def _format(self) -> dict[str, Any]:
        """Fields that describe the format of the buffers."""
        sizes = {"N": self.out_features, "K": self.in_features, **({"E": self.experts} if self.experts else {})}
        return {"version": VERSION, "layout": self.layout, "scheme": self.scheme, "group": self.group, **sizes}

    def get_extra_state(self) -> Tensor:
        """Return the format as JSON in a u8 tensor, because files hold nothing but tensors."""
        return torch.frombuffer(bytearray(json.dumps(self._format).encode()), dtype=torch.uint8)

    def set_extra_state(self, state: Any) -> None:
        """Do nothing, because `_load_from_state_dict` has checked the state."""

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        """Raise ArgumentError for a weight of another format, before anything is overwritten."""
        state = state_dict.get(f"{prefix}_extra_state")
        try:
            loaded_format = None if state is None else json.loads(bytes(state.tolist()))
        except (AttributeError, TypeError, ValueError):
            loaded_format = "no format"
        if loaded_format not in (None, self._format):  # a missing one is reported as missing
            name = f"{type(self).__name__}: {prefix}_extra_state"
            raise ArgumentError(name, f"must be {self._format}", loaded_format)
        super()._load_from_state_dict(state_dict, prefix, *args)


class W4A8Linear(PackedModule):
    """Linear layer y = x Wᵀ + b with 4-bit weights and INT8 activations, which are quantised per token.

    Its state are the packed weight's buffers, which keep their dtypes when a model is cast, and the format's name,
    which must be the same to load them.

    Attributes:
        in_features, out_features: K and N.
        layout, scheme, group: of the packed weight.
        dtype: of x and y.
        bias: f32 [N], or None.
    """

    def __init__(self, weight: PackedWeight, bias: Tensor | None = None, *, dtype: torch.dtype = torch.float16) -> None:
        """Take a packed weight: NumPy arrays stay on the CPU, CuPy's on their GPU."""
        if not isinstance(weight, PackedWeight):
            raise ArgumentError("W4A8Linear: weight", "must be a PackedWeight (layout.pack)", type(weight).__name__)
        super().__init__(weight, dtype)
        if bias is not None and tuple(bias.shape) != (weight.N,):
            raise ArgumentError("W4A8Linear: bias", f"must be [{weight.N}]", list(bias.shape))
        self.register_buffer("bias", None if bias is None else bias.detach().to(self.device, torch.float32))

    @classmethod
    def from_linear(
        cls,
        linear: nn.Linear,
        scheme: str = "lqq",
        group: int = 64,
        *,
        rounding: Rounding = "nearest",
        layout: str | None = None,
    ) -> Self:
        """Round a linear layer's weight to nearest, on its device.

        Args:
            linear: of float16, bfloat16 or float32, which become the dtypes of x and y.
            scheme: `lqq` or `qoq`, in groups of `group`, or `qoq_channel`.
            group: 32, 64 or 128; `qoq_channel` ignores it.
            rounding: of LQQ's group scales (`quant.quantize_lqq`).
            layout: of the packing; by default `strips`, or what a kernel that runs on this GPU takes.

        Raises ArgumentError for an unknown scheme, group or layout, and for a weight that cannot be quantised.
        """
        if not isinstance(linear, nn.Linear):
            raise ArgumentError("from_linear: linear", "must be an nn.Linear", type(linear).__name__)
        w = linear.weight.detach().float().cpu().numpy()
        packed_weight = pack(quantiser(scheme, rounding)(w, group), layout or layout_here(scheme))
        layer: Self = cls(packed_weight, linear.bias, dtype=linear.weight.dtype).to(linear.weight.device)
        return layer

    def forward(self, x: Tensor | Quantized) -> Tensor:
        """Compute y [.., N] from x [.., K] of `dtype`, or from quantised activations [.., K].

        Quantised activations are (x_q, scale, token_sum).
        """
        activations = x if isinstance(x, Tensor) else x[0]
        if activations.device != self.device:
            raise ArgumentError("W4A8Linear: x", f"must be on {self.device} as the weight", activations.device)
        if activations.shape[-1] != self.in_features:
            raise ArgumentError("W4A8Linear: x", f"must be [.., {self.in_features}]", list(activations.shape))
        if isinstance(x, Tensor):
            if x.dtype != self.dtype:
                raise ArgumentError("W4A8Linear: x", f"dtype {name_of(self.dtype)} as the layer", name_of(x.dtype))
            x_q, scale, token_sum = torch.ops.ptxlab.quantize_activations(x.reshape(-1, self.in_features).contiguous())
        else:
            x_q, scale, token_sum = (tensor.reshape(-1, *tensor.shape[activations.ndim - 1 :]) for tensor in x)
        y: Tensor = torch.ops.ptxlab.gemm_w4a8(
            x_q,
            scale,
            token_sum,
            [getattr(self, name) for name in self.names],
            self.bias,
            layout=self.layout,
            scheme=self.scheme,
            group=self.group,
            out_dtype=self.dtype,
        )
        return y.view(*activations.shape[:-1], self.out_features)

    def extra_repr(self) -> str:
        """Describe the layer's sizes and format for `print`."""
        group = "" if self.scheme == "qoq_channel" else f", group={self.group}"
        options = f"bias={self.bias is not None}, dtype={name_of(self.dtype)}"
        return f"{self.in_features}, {self.out_features}, {self.scheme}{group}, {self.layout}, {options}"


class W4A8Grouped(PackedModule):
    """Rows of quantised activations times the weight of their expert, of all experts in one product."""

    def __init__(self, weights: ExpertWeights, *, dtype: torch.dtype = torch.float16) -> None:
        """Take NumPy arrays to the CPU, CuPy's where they are. Raises ArgumentError unless in strips."""
        if not isinstance(weights, ExpertWeights) or weights.layout != "strips":
            got = weights.layout if isinstance(weights, ExpertWeights) else type(weights).__name__
            raise ArgumentError("W4A8Grouped: weights", "must be ExpertWeights in strips (stack_experts)", got)
        super().__init__(weights, dtype)

    def forward(self, x: Quantized, offsets: Tensor) -> Tensor:
        """Multiply quantised rows [R, K], (x_q, scale, token_sum), rows offsets[e] to offsets[e + 1] by expert e.

        Returns y [R, N] of `dtype`; offsets are s32 [E + 1].
        """
        buffers, options = [getattr(self, name) for name in self.names], {"scheme": self.scheme, "group": self.group}
        y: Tensor = torch.ops.ptxlab.gemm_w4a8_grouped(*x, buffers, offsets, **options, out_dtype=self.dtype)
        return y

    def extra_repr(self) -> str:
        """Describe the module for `print`."""
        group = "" if self.scheme == "qoq_channel" else f", group={self.group}"
        return f"{self.experts} x {self.in_features}, {self.out_features}, {self.scheme}{group}, {name_of(self.dtype)}"
