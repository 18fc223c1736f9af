"""The emulator with FP16 MMAs that cut off as tensor cores do, in place of sums that are rounded once."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from ptxlab.emulator.ops import mma
from ptxlab.lowbit.reference.tensor_cores import hopper_mma

Model = Callable[[np.ndarray, np.ndarray, np.ndarray], np.ndarray]  # a f16 [.., 16, 16], b f16 [.., 16, 8], c f32


def ampere_mma(a: np.ndarray, b: np.ndarray, c: np.ndarray) -> np.ndarray:
    """Compute an Ampere MMA: 8 products at a time, with one bit less below the largest exponent (Fasi et al. 2021)."""
    for k in (slice(0, 8), slice(8, 16)):
        c = hopper_mma(a[..., k], b[..., k, :], c, kept_bits=24)
    return c


def patch_emulator(model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    """Make the emulator compute every MMA of FP16 operands with FP32 sums by the model."""
    operands: list[np.ndarray] = []
    dots, accumulation = mma.dots, mma.accumulation

    def dots_and_remember(a: np.ndarray, b: np.ndarray) -> np.ndarray:
        operands[:] = a, b
        return dots(a, b)

    def truncating(form: mma.DecodedMma) -> Callable[..., None]:
        def accumulate(products: np.ndarray, work: list[mma.Work], lanes: Any) -> None:
            a, b = (x.astype(np.float16) for x in operands)  # rows of A; columns of B, 2 t + j at 4 j + t
            for of_a, of_b, readers, writers in work:
                c = np.empty((len(a), 16, 8), np.float32)
                parts = [c[:, 8 * i : 8 * i + 8, 4 * j : 4 * j + 4] for i, j in form.accumulators]
                for read, part in zip(readers, parts, strict=True):
                    part[:] = np.broadcast_to(read(lanes), part.size).reshape(part.shape)
                left, right = a[:, 16 * of_a :][:, :16], b[:, 8 * of_b :][:, :8]
                c[:] = model(left, right.swapaxes(1, 2), c)
                for write, part in zip(writers, parts, strict=True):
                    write(lanes, part.reshape(-1))

        return accumulate if form.d == "f32" else accumulation(form)

    monkeypatch.setattr(mma, "dots", dots_and_remember)
    monkeypatch.setattr(mma, "accumulation", truncating)
