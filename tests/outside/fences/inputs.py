"""`python inputs.py` writes, for each kernel beside it, an .npz with its arguments by name; 0-d arrays are scalars."""

import numpy as np

rng = np.random.default_rng(0)
rows, floats = rng.integers(-99, 100, (5, 512), dtype=np.int32), rng.standard_normal(2048, dtype=np.float32)
a, b, c = (rng.integers(-3, 4, (rows_, 16)).astype(np.float16) for rows_ in (64, 16, 8))
bytes_of = {name: x.view(np.uint8) for name, x in {"a": a, "b": b, "c": c}.items()}
bf16 = (rng.standard_normal(1024, dtype=np.float32).view(np.uint32) >> 16).astype(np.uint16)

np.savez("flashkda_24.npz", state=bf16, out=np.zeros(1024, np.float32))
np.savez("tileops_1574.npz", x=floats, out=np.zeros(2048, np.float32))
np.savez("humming_45.npz", x=floats, out=np.zeros(2048, np.float32))
np.savez("tilelang_2634.npz", a=bytes_of["a"], b=bytes_of["c"], d=np.zeros((64, 8), np.float32))
np.savez("sglang_39124.npz", **bytes_of, d=np.zeros((64, 8), np.float32))
np.savez("deepep_642.npz", x=rows[:, :128].copy(), out=np.zeros(32, np.int32), rounds=np.int32(5))
np.savez("transformer_engine_2695.npz", x=rows, out=np.zeros(1, np.int32), rounds=np.int32(5))
