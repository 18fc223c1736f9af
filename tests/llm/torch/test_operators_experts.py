"""Operators around grouped products: `opcheck`, `torch.compile`, the kernels' numbers, what is refused."""

from typing import Any

import numpy as np
import pytest

import ptxlab
from ptxlab import gpu
from ptxlab.errors import PtxlabError
from ptxlab.lowbit.layout import PackedActivations
from tests.support.torch_calls import EXPERT_OPERATORS, K, expert_calls

torch = pytest.importorskip("torch", reason="PyTorch is not installed")
pytestmark = pytest.mark.torch
DTYPES = ["float16", "bfloat16"]


@pytest.fixture(scope="module")
def ops() -> Any:
    import ptxlab.llm.torch  # noqa: F401  (defines them)

    return torch.ops.ptxlab


def numpy_of(tensor: Any) -> np.ndarray:
    """Return it as NumPy's, bfloat16 as its bits."""
    return tensor.view(torch.uint16).numpy() if tensor.dtype == torch.bfloat16 else tensor.numpy()


@pytest.mark.default_cases("route_tokens")
@pytest.mark.parametrize("name", EXPERT_OPERATORS)
def test_opcheck(name: str, ops: Any) -> None:
    args, options = expert_calls(np.random.default_rng(0))[name]
    torch.library.opcheck(getattr(ops, name).default, args, options)


@pytest.mark.full
def test_compiled_without_a_break(ops: Any) -> None:
    def layer(calls: dict[str, Any]) -> list[Any]:
        routed = ops.route_tokens(*calls["route_tokens"][0])
        return [*routed, ops.combine_experts(*calls["combine_experts"][0])]

    eager, compiled = (expert_calls(np.random.default_rng(1)) for _ in range(2))
    expected, got = layer(eager), torch.compile(layer, fullgraph=True, backend="aot_eager")(compiled)
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(expected, got, strict=True))


@pytest.mark.default_cases("float16")
@pytest.mark.parametrize("dtype", DTYPES)
def test_numbers_are_those_of_the_kernels(dtype: str, ops: Any) -> None:
    """Compare with the emulator, shares but for the exponential."""
    calls = expert_calls(np.random.default_rng(2), getattr(torch, dtype))
    (x, scale, sums, normed, router, k), _ = calls["route_tokens"]
    arrays = [numpy_of(tensor).copy() for tensor in (x, scale, sums)]
    tokens = PackedActivations(layout="row_major", M=len(x), K=K, x_q=arrays[0], scale=arrays[1], token_sum=arrays[2])
    right = ptxlab.route_tokens(tokens, numpy_of(normed), numpy_of(router), k, backend="emulator")
    *rows, offsets, place, share, chosen = map(numpy_of, ops.route_tokens(x, scale, sums, normed, router, k))
    for ours, name in zip(rows, ("x_q", "scale", "token_sum"), strict=True):
        assert np.array_equal(ours, getattr(right.rows, name)), name
    for ours, name in ((offsets, "offsets"), (place, "place"), (chosen, "chosen")):
        assert np.array_equal(ours, getattr(right, name)), name
    np.testing.assert_allclose(share, right.share, rtol=2**-19)
    outputs = calls["combine_experts"][0][0]
    ours = ops.combine_experts(outputs, torch.from_numpy(place), torch.from_numpy(right.share.copy()))
    assert np.array_equal(numpy_of(ours), ptxlab.combine_experts(numpy_of(outputs), right, backend="emulator"))


BAD: dict[str, tuple[str, dict[int, Any]]] = {
    "route_tokens: x_q: must be int8 [M, H]": ("route_tokens", {0: torch.zeros(7, K)}),
    "route_tokens: x_scale: must be float32 [7]": ("route_tokens", {1: torch.ones(6)}),
    "route_tokens: normed: must be float16 or bfloat16 [7, 128]": ("route_tokens", {3: torch.zeros(7, K)}),
    "route_tokens: router: must be float16 [E, 128]": ("route_tokens", {4: torch.zeros(5, K).bfloat16()}),
    "route_tokens: router: must have 1 to 64 experts (got 65)": ("route_tokens", {4: torch.zeros(65, K).half()}),
    "route_tokens: k: must be an integer in 1..4 (got 5)": ("route_tokens", {5: 5}),
    "route_tokens: normed: must be finite": ("route_tokens", {3: torch.full((7, K), torch.inf).half()}),
    "combine_experts: results: must be float16 [14, H] (got float16 [9, 128])": (
        "combine_experts", {0: torch.zeros(9, K).half()},
    ),
    "combine_experts: share: must be float32 [7, 2]": ("combine_experts", {2: torch.zeros(7, 3)}),
    "combine_experts: place: must be rows in 0..13 (got 14..14)": (
        "combine_experts", {1: torch.full((7, 2), 14, dtype=torch.int32)},
    ),
}  # fmt: skip


@pytest.mark.parametrize("message", BAD)
def test_bad_input_is_one_line(message: str, ops: Any) -> None:
    name, changes = BAD[message]
    args, _ = expert_calls(np.random.default_rng(0))[name]
    with pytest.raises(PtxlabError) as error:
        getattr(ops, name)(*(changes.get(i, argument) for i, argument in enumerate(args)))
    assert message in str(error.value) and "\n" not in str(error.value)


@pytest.mark.gpu
@pytest.mark.skipif(gpu.why_not("sm_80") is not None, reason="the kernels need sm_80")
@pytest.mark.parametrize("name", EXPERT_OPERATORS)
def test_on_a_gpu_numbers_are_those_of_the_cpu(name: str, ops: Any) -> None:
    """Shares agree but for the exponential; a second call, which only launches, agrees too."""
    args, _ = expert_calls(np.random.default_rng(3))[name]
    on_gpu = [tensor.cuda() if isinstance(tensor, torch.Tensor) else tensor for tensor in args]
    torch.library.opcheck(getattr(ops, name).default, tuple(on_gpu))
    for _ in range(2):
        outputs = (getattr(ops, name)(*arguments) for arguments in (on_gpu, args))
        ours_and_theirs = (output if isinstance(output, tuple) else (output,) for output in outputs)
        for i, (ours, theirs) in enumerate(zip(*ours_and_theirs, strict=True)):
            assert torch.allclose(ours.cpu(), theirs, rtol=2**-19 * (i == 5), atol=0), (name, i)
