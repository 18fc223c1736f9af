"""mma of eight rows: the integer shapes of Turing, and Volta's, by which each quarter of a warp has its own product.

Which lane holds which element is written out here as the PTX manual has it.
"""

import numpy as np
import pytest

import ptxlab
from tests.support.axes import on_every_backend
from tests.support.small_kernels import HEADER

LANES = np.arange(32)


def multiply(form: str, a: np.ndarray, b: np.ndarray, c: np.ndarray, d_registers: int, backend: str) -> np.ndarray:
    """Run one mma on registers u32 [lanes, registers] of A, B and C; those of D."""
    counts = {"a": a.shape[1], "b": b.shape[1], "c": c.shape[1], "d": d_registers}
    lists = {x: "{" + ", ".join(f"%{x}{i}" for i in range(n)) + "}" for x, n in counts.items()}
    loads = "".join(f"ld.global.b32 %{x}{i}, [%{x}+{4 * i}];\n" for x in "abc" for i in range(counts[x]))
    stores = "".join(f"st.global.b32 [%d+{4 * i}], %d{i};\n" for i in range(d_registers))
    pointers = "".join(
        f".reg .b64 %{x}; ld.param.u64 %{x}, [p{x}]; mad.wide.u32 %{x}, %t, {4 * n}, %{x}; .reg .b32 %{x}<{n}>;\n"
        for x, n in counts.items()
    )
    text = f"""{HEADER}.visible .entry k({", ".join(f".param .u64 p{x}" for x in "abcd")}) {{
    .reg .b32 %t; mov.u32 %t, %tid.x;
    {pointers}{loads}mma.sync.aligned.{form} {", ".join(lists[x] for x in "dabc")};
    {stores}ret; }}"""
    d = np.zeros((32, d_registers), np.uint32)
    ptxlab.load(text)(*map(np.ascontiguousarray, (a, b, c)), d, grid=1, block=32, backend=backend)
    return d


def pack(elements: np.ndarray) -> np.ndarray:
    """Pack elements [lanes, count] into registers; of nibbles u4 in bytes, two in one."""
    return np.ascontiguousarray(elements).view(np.uint32)


@on_every_backend
@pytest.mark.parametrize("satfinite", ["", ".satfinite"])
@pytest.mark.parametrize(("a_type", "b_type"), [("s8", "u8"), ("u8", "s8"), ("s4", "u4"), ("u4", "u4")])
def test_integers(a_type: str, b_type: str, satfinite: str, backend: str) -> None:
    bits, rng = int(a_type[1:]), np.random.default_rng(3)
    per_lane = 32 // bits
    k = 4 * per_lane

    def draw(t: str, *shape: int) -> np.ndarray:
        return rng.integers(0, 1 << bits, shape) - (1 << bits - 1 if t[0] == "s" else 0)

    def lanes_of(rows: np.ndarray) -> np.ndarray:
        """Distribute rows [8, k]: lane 4g + t holds those of row g from t * per_lane on."""
        parts = (rows.reshape(32, per_lane) & (1 << bits) - 1).astype(np.uint8)
        return pack(parts if bits == 8 else parts[:, ::2] | parts[:, 1::2] << np.uint8(4))

    a, b = draw(a_type, 8, k), draw(b_type, k, 8)
    c = rng.integers(-(2**31), 2**31, (8, 8))
    form = f"m8n8k{k}.row.col{satfinite}.s32.{a_type}.{b_type}.s32"
    c_lanes = c.astype(np.int32).reshape(32, 2).view(np.uint32)  # lane 4g + t: row g, columns 2t and 2t + 1
    d = multiply(form, lanes_of(a), lanes_of(b.T), c_lanes, 2, backend)
    exact = a @ b + c
    expected = (exact.clip(-(2**31), 2**31 - 1) if satfinite else exact).astype(np.int32)
    assert np.array_equal(d.view(np.int32).reshape(8, 8), expected)


@on_every_backend
@pytest.mark.parametrize("layouts", ["row.col", "row.row", "col.col", "col.row"])
@pytest.mark.parametrize(("d_type", "c_type"), [("f16", "f16"), ("f32", "f16"), ("f32", "f32")])
def test_quarters_of_a_warp(d_type: str, c_type: str, layouts: str, backend: str) -> None:
    rng = np.random.default_rng(4)
    a, b, c = (rng.integers(-9, 10, (4, *shape)) / 4 for shape in ((8, 4), (4, 8), (8, 8)))
    quarter, t, high = LANES // 4 % 4, LANES % 4, LANES // 16 * 4
    by_row, by_column = layouts.split(".")[0] == "row", layouts.split(".")[1] == "col"

    def of_sum(t_name: str, i: int) -> tuple[np.ndarray, np.ndarray]:
        if t_name == "f16":
            return t + high, np.full(32, i)
        return (LANES & 1) + (i & 2) + high, (i & 4) + (LANES & 2) + (i & 1)

    def lanes_of(dtype: type, columns: list[np.ndarray]) -> np.ndarray:
        return pack(np.stack(columns, axis=1).astype(dtype))

    kinds = {"f16": np.float16, "f32": np.float32}
    of_a = [a[quarter, t + high, i] if by_row else a[quarter, i + high, t] for i in range(4)]
    of_b = [b[quarter, i, t + high] if by_column else b[quarter, t, i + high] for i in range(4)]
    of_c = [c[(quarter, *of_sum(c_type, i))] for i in range(8)]
    form = f"m8n8k4.{layouts}.{d_type}.f16.f16.{c_type}"
    operands = lanes_of(np.float16, of_a), lanes_of(np.float16, of_b), lanes_of(kinds[c_type], of_c)
    d = multiply(form, *operands, 8 if d_type == "f32" else 4, backend).view(kinds[d_type])
    expected = a @ b + c
    assert np.array_equal(d, np.stack([expected[(quarter, *of_sum(d_type, i))] for i in range(8)], axis=1))


# factors of A and B along k, an element of C, and D as f16 and as f32 on an H200: its order of additions shows
ORDERS = [
    ((-0.0, -0.0, -0.0, -0.0), (1, 1, 1, 1), -0.0, -0.0, 0.0),
    ((4096, 0, -4096, 0), (4096, 0, 4096, 0), 1.0, 0.0, 1.0),
    ((4096, 1, -4096, 0), (4096, 1, 4096, 0), 0.0, 0.0, 0.0),
    ((1, 2, 3, 4), (1, 1, 1, 1), -10.0, 0.0, 0.0),
]


@on_every_backend
@pytest.mark.parametrize("d_type", ["f16", "f32"])
@pytest.mark.parametrize(("a", "b", "c", "halves", "singles"), ORDERS)
def test_order_of_additions_in_quarters(
    a: tuple[float, ...], b: tuple[float, ...], c: float, halves: float, singles: float, d_type: str, backend: str
) -> None:
    every_lane = pack(np.full((32, 4), a, np.float16)), pack(np.full((32, 4), b, np.float16))
    kind = {"f16": np.float16, "f32": np.float32}[d_type]
    form, registers = f"m8n8k4.row.col.{d_type}.f16.f16.{d_type}", 8 if d_type == "f32" else 4
    d = multiply(form, *every_lane, pack(np.full((32, 8), c, kind)), registers, backend).view(kind)
    expected = kind(halves if d_type == "f16" else singles)
    assert (d == expected).all() and (np.signbit(d) == np.signbit(expected)).all()
