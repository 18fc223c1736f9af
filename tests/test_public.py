"""What `ptxlab` itself offers is enough to write a kernel down, to launch it and to catch what goes wrong."""

from typing import Any

import numpy as np
import pytest

import ptxlab
from ptxlab.arithmetic import ceil_div

TEXT = """
extern "C" __global__ void scaled(const float* x, float* y, unsigned n) {
    const unsigned i = blockIdx.x * 32 + threadIdx.x;
    if (i < n) y[i] = 3.0f * x[i];
}
"""
SPEC = ptxlab.KernelSpec(
    name="scaled",
    summary="three times as much",
    args=(
        ptxlab.Arg("x", "float32", ("n",)),
        ptxlab.Arg("y", "float32", ("n",), "out"),
        ptxlab.Arg("n", "uint32", role="scalar"),
    ),
    launch=lambda sizes: ptxlab.Launch(grid=(ceil_div(sizes["n"], 32), 1, 1), block=(32, 1, 1)),
    example=lambda rng, *, n: {"x": rng.standard_normal(n, dtype=np.float32)},
    pack=lambda logical: logical,
    reference=lambda x: 3 * x,
    rules=("n % 2 == 0",),
)


def test_run_takes_options_of_the_emulator(monkeypatch: pytest.MonkeyPatch) -> None:
    """Keywords stand in place of fields of `options`."""
    options: list[ptxlab.EmulatorOptions] = []
    run = ptxlab.emulator.run

    def spy(*args: Any, **keywords: Any) -> ptxlab.emulator.Result:
        options.append(keywords["options"])
        return run(*args, **keywords)

    monkeypatch.setattr(ptxlab.emulator, "run", spy)
    spec, _ = ptxlab.find("dequant_lqq")
    arrays = spec.pack(spec.example(np.random.default_rng(0), **spec.example_sizes[0]))
    late = ptxlab.EmulatorOptions(mode="late", checks=frozenset({"init"}), seed=3)
    outcome = ptxlab.run("dequant_lqq", **arrays, backend="emulator", options=late, checks="race", max_steps=10_000)
    assert outcome.backend == "emulator"
    assert options == [ptxlab.EmulatorOptions(mode="late", checks=frozenset({"race"}), seed=3, max_steps=10_000)]
    for name, bad, message in (
        ("seed", -1, r"seed: is an integer, 0 or more \(got -1\)"),
        ("max_steps", 0, r"max_steps: has to be a positive integer \(got 0\)"),
        ("checks", "speed", r"checks: some of all, async, .* \(got speed\)"),
        ("options", "late", r"options: an EmulatorOptions \(got str\)"),
    ):
        with pytest.raises(ptxlab.PtxlabError, match=f"^{message}$"):
            ptxlab.run("dequant_lqq", **arrays, backend="emulator", **{name: bad})


def test_every_name_is_there() -> None:
    assert all(hasattr(ptxlab, name) for name in ptxlab.__all__)


def test_a_kernel_of_ones_own_by_a_spec_and_without() -> None:
    source, x = ptxlab.Source.from_text(TEXT), np.arange(40, dtype=np.float32)
    outcome = ptxlab.run_spec(SPEC, source, {"x": x}, backend="emulator")
    assert isinstance(outcome, ptxlab.Outcome) and np.array_equal(outcome.outputs["y"], 3 * x)
    kernel, y = ptxlab.load(TEXT), np.zeros(40, np.float32)
    assert isinstance(kernel, ptxlab.Kernel)
    kernel[2, 32](x, y, 40, backend="emulator")
    assert np.array_equal(y, 3 * x)
    with pytest.raises(ptxlab.PtxlabError, match=r"scaled: n % 2 == 0 \(got n=41\)"):
        ptxlab.run_spec(SPEC, source, {"x": np.ones(41, np.float32)}, backend="emulator")
