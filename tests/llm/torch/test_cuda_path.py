"""What the operators do with CUDA tensors, on a GPU that isn't one: arguments, results, workspaces; in the emulator."""

from functools import cache
from typing import Any

import numpy as np
import pytest

from ptxlab import gpu
from ptxlab.errors import ArgumentError
from ptxlab.gpu.view import View
from ptxlab.lowbit.kernels import operation
from ptxlab.lowbit.layout.atom_operands import ATOM_LAYOUTS
from tests.support.fake_gpu import DeviceArray, FakeGpu
from tests.support.torch_calls import (
    OPERATORS,
    D,
    Hkv,
    K,
    M,
    caches,
    every_call,
    expert_calls,
    four_bit_calls,
    gaussian,
    products,
    weight,
)

torch = pytest.importorskip("torch", reason="PyTorch is not installed")
pytestmark = pytest.mark.torch
ATTENTION = ("attention_kv4", "attention_kv4_out")


class TensorGpu(FakeGpu):
    """Tensors of the CPU are its device arrays."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        from ptxlab.llm.torch import operators, repeats

        super().__init__(monkeypatch)
        for name in ("_prepared", "_ready", "_memory"):  # of earlier calls
            monkeypatch.setattr(operation, name, {})
        for operator in operators.ON_CUDA.values():
            monkeypatch.setattr(operator, "_recorded", {})
        tensors_of = repeats._tensors  # of arguments and of results, which a repeated call does not look at by views
        monkeypatch.setattr(
            repeats, "_tensors", lambda arguments: [self.register(tensor) for tensor in tensors_of(arguments)]
        )
        monkeypatch.setattr(operators, "_plan_workspace_for", operators._plan_workspace_for.__wrapped__)
        monkeypatch.setattr(gpu, "is_device_array", lambda array: isinstance(array, DeviceArray | torch.Tensor))
        monkeypatch.setattr(gpu, "new", lambda example, shape, dtype: torch.empty(shape, dtype=getattr(torch, dtype)))

    def register(self, tensor: Any) -> Any:
        self.view("", self.flat_rows("", tensor)[0])
        return tensor

    def view(self, name: str, array: Any) -> View:
        return super().view(name, DeviceArray(array.numpy()) if isinstance(array, torch.Tensor) else array)


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> TensorGpu:
    return TensorGpu(monkeypatch)


@pytest.mark.full
def test_every_operator_is_its_public_call(monkeypatch: pytest.MonkeyPatch) -> None:
    """The results are those of the CPU's operators, but for the exponentials of the gate and of attention."""
    from ptxlab.llm.torch import operators

    on_cpu, on_cuda = (every_call(np.random.default_rng(0)) for _ in range(2))
    expected = {name: getattr(torch.ops.ptxlab, name)(*args, **options) for name, (args, options) in on_cpu.items()}
    for name in ATTENTION:
        on_cuda[name][1]["workspace"] = None  # parts of a tensor are no arrays of this GPU
    fake = TensorGpu(monkeypatch)
    for name, (args, options) in on_cuda.items():
        got, right = (outputs if isinstance(outputs, tuple) else (outputs,) for outputs in (
            operators.ON_CUDA[name](*args, **options), expected[name]))  # fmt: skip
        loose = {"rtol": 2**-19 * (name == "silu_mul_quantize"), "atol": 2e-3 * (name in ATTENTION)}
        for ours, theirs in zip(got, right, strict=True):
            assert ours is theirs is None or torch.allclose(ours, theirs, **loose), name
    for name, (args, _) in on_cpu.items():
        cuda_arguments = on_cuda[name][0]
        tensors = [(a, b) for a, b in zip(args, cuda_arguments, strict=True) if isinstance(a, torch.Tensor)]
        near = 2e-3 * (name in ATTENTION)
        assert all(torch.allclose(a, b, rtol=0, atol=near, equal_nan=True) for a, b in tensors), name
    assert len(fake.launched) == len(on_cuda)


def test_operators_of_experts_are_their_public_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    """Compare with the CPU's operators, but for the exponential of shares; again, which only launches; in a capture."""
    from ptxlab.llm.torch import operators

    calls = expert_calls(np.random.default_rng(0))
    expected = {name: getattr(torch.ops.ptxlab, name)(*args) for name, (args, _) in calls.items()}
    fake = TensorGpu(monkeypatch)
    for name, (args, options) in calls.items():
        on_the_gpu(args, options, fake)
        for _ in range(2):
            got, right = (outputs if isinstance(outputs, tuple) else (outputs,) for outputs in (
                operators.ON_CUDA[name](*args), expected[name]))  # fmt: skip
            for i, (ours, theirs) in enumerate(zip(got, right, strict=True)):
                assert torch.allclose(ours, theirs, rtol=2**-19 * (i == 5), atol=0), (name, i)
    kernels = ["choose_experts", "gather_tokens"] * 2 + ["combine_experts"] * 2
    assert [kernel for kernel, _ in fake.launched] == kernels
    fake.runs, fake.capturing, allocations = False, True, fake.allocations
    for name, (args, _) in calls.items():
        operators.ON_CUDA[name](*args)
    assert (fake.allocations, len(fake.launched)) == (allocations, 9)


@pytest.mark.default_cases("strips")
@pytest.mark.parametrize("to", ATOM_LAYOUTS)
def test_operators_of_w4a4_are_their_public_calls(to: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Compare with the CPU's operators, but for a step of the gate here and there; also in a capture."""
    from ptxlab.llm.torch import operators

    on_cpu, on_cuda = (four_bit_calls(np.random.default_rng(0), to, torch.float16) for _ in range(2))
    expected = {name: getattr(torch.ops.ptxlab, name)(*args, **options) for name, (args, options) in on_cpu.items()}
    fake = TensorGpu(monkeypatch)
    for name, (args, options) in on_cuda.items():
        got, right = (outputs if isinstance(outputs, tuple) else (outputs,) for outputs in (
            operators.ON_CUDA[name](*args, **options), expected[name]))  # fmt: skip
        for ours, theirs in zip(got, right, strict=True):
            unequal_share = (ours != theirs).float().mean() if ours.numel() else 0
            assert ours.shape == theirs.shape and unequal_share <= 0.01 * (name == "silu_mul_reorder_quantize"), name
    for (args, _), (cuda_args, _) in zip(on_cpu.values(), on_cuda.values(), strict=True):
        pairs = [(a, b) for a, b in zip(args, cuda_args, strict=True) if isinstance(a, torch.Tensor)]
        assert all(torch.equal(a, b) for a, b in pairs)
    fake.runs, fake.capturing = False, True
    allocations, launched = fake.allocations, len(fake.launched)
    for name, (args, options) in on_cuda.items():
        operators.ON_CUDA[name](*args, **options)
    assert (fake.allocations, len(fake.launched)) == (allocations, 2 * launched) and launched == len(on_cuda)


@pytest.mark.full
def test_a_capture_takes_all_operators(fake: TensorGpu) -> None:
    """The capture follows a first call of each; attention has the tensor as its workspace."""
    from ptxlab.llm.torch import operators

    fake.runs, calls = False, every_call(np.random.default_rng(0))
    needed_bytes = operators._plan_workspace(64, 0).nbytes
    for name in ATTENTION:
        calls[name][1]["workspace"] = torch.zeros(needed_bytes, dtype=torch.uint8)
    for fake.capturing in (False, True):
        allocations = fake.allocations
        for name, (args, options) in calls.items():
            operators.ON_CUDA[name](*args, **options)
    assert fake.allocations == allocations and len(fake.launched) == 2 * len(calls)
    args, options = calls["attention_kv4"]
    with pytest.raises(ArgumentError, match="workspace: must be given in a capture"):
        operators.ON_CUDA["attention_kv4"](*args, window=8)
    with pytest.raises(
        ArgumentError, match=rf"attention_kv4: workspace: must be attention_workspace\(64\).*{needed_bytes}"
    ):
        operators.ON_CUDA["attention_kv4"](*args, workspace=options["workspace"][:-1])


def test_chunks_take_the_kernel_for_prompts(fake: TensorGpu) -> None:
    """They take it without a workspace; a later call with as many queries only launches."""
    from ptxlab.llm.torch import operators

    fake.runs, ((q, pool, table, lengths), _) = False, every_call(np.random.default_rng(0))["attention_kv4"]
    starts, out = torch.tensor([0, 1, 3, 3], dtype=torch.int32), torch.empty_like(q)
    for _ in range(2):
        operators.ON_CUDA["attention_kv4_out"](q, pool, table, lengths, out, query_start_loc=starts)
    assert [kernel for kernel, _ in fake.launched] == ["attention_kv4_prefill_sm90"] * 2 and fake.loads == 1


@pytest.mark.full
def test_a_capture_takes_chunks_behind_long_contexts(fake: TensorGpu) -> None:
    """Contexts are then cut into parts, for which one workspace has room beside that of decoding."""
    from ptxlab.llm.torch import operators

    fake.runs, fake.sms = False, 32
    (q, pool, _, lengths), _ = every_call(np.random.default_rng(0))["attention_kv4"]
    table, starts = torch.zeros(3, 200, dtype=torch.int32), torch.tensor([0, 1, 3, 3], dtype=torch.int32)
    call, out = operators.ON_CUDA["attention_kv4_out"], torch.empty_like(q)
    workspace = torch.zeros(operators._plan_workspace(64, 0).nbytes, dtype=torch.uint8)
    fake.capturing = True
    with pytest.raises(ArgumentError, match=r"workspace: must be given in a capture: .*prefill_sm90"):
        call(q, pool, table, lengths, out, query_start_loc=starts)
    fake.capturing = False
    for fake.capturing in (False, True):
        allocations = fake.allocations
        call(q, pool, table, lengths, out, query_start_loc=starts, workspace=workspace)
        call(q, pool, table, lengths, out, query_start_loc=starts, batch_invariant=True)
    assert fake.allocations == allocations and len(fake.launched) == 4


def test_on_ampere_a_workspace_is_that_of_decoding(fake: TensorGpu) -> None:
    from ptxlab.llm.torch import operators

    of_hopper = operators._plan_workspace(64, 0)
    assert of_hopper.chunks is not None and of_hopper.nbytes > 0
    fake.arch = 80
    plan = operators._plan_workspace(64, 0)
    assert plan.chunks is None
    workspace = torch.zeros(plan.nbytes, dtype=torch.uint8)
    assert operators._carve_workspace(workspace, 64, is_chunked=True) is None
    assert operators._carve_workspace(workspace, 64, is_chunked=False).kernel == "attention_kv4_mma_sm80"


def test_another_target_has_its_own_workspace_and_launches(fake: TensorGpu, monkeypatch: pytest.MonkeyPatch) -> None:
    """Attention takes neither the plan nor the recorded launches of another architecture."""
    from ptxlab.llm.torch import operators

    monkeypatch.setattr(operators, "_plan_workspace_for", cache(operators._plan_workspace_for))
    fake.runs = False
    args, options = every_call(np.random.default_rng(0))["attention_kv4"]
    options["workspace"] = torch.zeros(operators._plan_workspace(64, 0).nbytes, dtype=torch.uint8)
    for arch, target in ((90, None), (80, "sm_80"), (90, None)):
        fake.arch = arch
        with gpu.compiling_for(target):
            operators.ON_CUDA["attention_kv4"](*args, **options)
    kernels = ["attention_kv4_sm90", "attention_kv4_mma_sm80", "attention_kv4_sm90"]
    assert [kernel for kernel, _ in fake.launched] == kernels


def on_the_gpu(args: tuple[Any, ...], how: dict[str, Any], fake: TensorGpu) -> None:
    """Let the GPU know memory that a repeated call, which looks at no views, may have."""
    for argument in (*args, *how.values()):
        for tensor in argument if isinstance(argument, list) else [argument]:
            if isinstance(tensor, torch.Tensor):
                fake.register(tensor)


@pytest.mark.default_cases("attention_kv4_out", "attention_kv4", "quantize_activations", "silu_mul_quantize")
@pytest.mark.parametrize("name", OPERATORS)
def test_a_repeated_call_only_launches(fake: TensorGpu, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """The tensors are others, and the results those of the public call, which is not made again."""
    from ptxlab.llm.torch import operators

    def make_call() -> tuple[tuple[Any, ...], dict[str, Any]]:
        args, options = every_call(np.random.default_rng(1))[name]
        return args, {**options, **({"workspace": None} if name in ATTENTION else {})}

    operator, (first, options) = operators.ON_CUDA[name], every_call(np.random.default_rng(0))[name]
    if name in ATTENTION:  # parts of a tensor are no arrays of this GPU: nothing runs
        fake.runs = False
        options["workspace"] = torch.zeros(operators._plan_workspace(64, 0).nbytes, dtype=torch.uint8)
    operator(*first, **options)
    (args, _), (again, _) = make_call(), make_call()
    if fake.runs:
        expected = operator.call(*args, **make_call()[1])
    on_the_gpu(again, options, fake)
    loads, allocations = fake.loads, fake.allocations
    monkeypatch.setattr(operator, "call", None)
    got = operator(*again, **options)
    assert (fake.loads, fake.allocations, len(fake.launched)) == (loads, allocations, 2 + fake.runs)
    for ours, theirs in zip((got, *again), (expected, *args), strict=True) if fake.runs else ():
        ours, theirs = (outputs if isinstance(outputs, tuple | list) else (outputs,) for outputs in (ours, theirs))
        for a, b in zip(ours, theirs, strict=True):
            assert torch.equal(a, b) if isinstance(a, torch.Tensor) else a == b


@pytest.mark.full
def test_what_the_public_call_has_to_look_at_is_not_repeated(fake: TensorGpu) -> None:
    from ptxlab.llm.torch import operators

    normed, rng = operators.ON_CUDA["rmsnorm_quantize"], np.random.default_rng(0)
    x, residual, gamma = gaussian(rng, M, K), gaussian(rng, M, K), gaussian(rng, K)
    normed(x, gamma, residual)
    assert len(normed._recorded) == 1
    both = gaussian(rng, 2 * M, K)
    with pytest.raises(ArgumentError, match="rmsnorm_quantize: residual: must not share memory with x"):
        normed(both[:M], gamma, both[1 : M + 1])
    with pytest.raises(ArgumentError, match="rmsnorm_quantize: x: aligned to 16 bytes"):
        normed(gaussian(rng, M * K + 1)[1:].view(M, K), gamma, residual)
    with pytest.raises(ArgumentError, match="rmsnorm_quantize: gamma: dtype float16"):
        normed(x, gamma.float(), residual)
    normed(x[:1].clone(), gamma, residual[:1].clone())
    normed(x, gamma, residual, 1e-6)
    assert len(normed._recorded) == 3, "batches and options are told apart"
    append, k = operators.ON_CUDA["append_kv4"], gaussian(rng, M, Hkv, D)
    pool, slots = caches(rng)["pool"], torch.tensor([0, 1, -1])
    append(k, k, pool, slots)
    assert not append._recorded, "which of two equal addresses is the keys'?"
    product, of = operators.ON_CUDA["gemm_w4a8"], products(rng)
    for _ in range(2):  # token sums that nobody gives are made in memory of the stream
        product(of["x_q"], of["x_scale"], None, weight(rng, "qoq_channel", "qserve")[1], layout="qserve",
                scheme="qoq_channel", out_dtype=torch.float16)  # fmt: skip
    assert not product._recorded


def test_shapes_are_checked_before_a_kernel_sees_them(fake: TensorGpu) -> None:
    from ptxlab.llm.torch import operators

    calls = every_call(np.random.default_rng(0))
    (x_q, scale, sums, buffers, bias), options = calls["gemm_w4a8"]
    with pytest.raises(ArgumentError, match=r"gemm_w4a8: weight: strips: must be uint8 \[4, 1, 1088\]"):
        operators.ON_CUDA["gemm_w4a8"](x_q, scale, sums, [buffers[0][:2].clone(), buffers[1]], bias, **options)
    (q, pool, *tail), _ = calls["attention_kv4"]
    with pytest.raises(ArgumentError, match=r"attention_kv4: pool: must be uint8 \[pages, 2, Hkv, 4352\]"):
        operators.ON_CUDA["attention_kv4"](q[..., :32].repeat(1, 1, 4).contiguous(), pool, *tail)
    assert fake.launched == []
