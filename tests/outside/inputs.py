"""`python inputs.py` writes, for each kernel beside it, an .npz with its arguments by name; 0-d arrays are scalars."""

import numpy as np

rng, K = np.random.default_rng(0), 64
words = rng.integers(0, 2**32, 64 * K // 8, dtype=np.uint32)
x, y = rng.integers(-128, 128, (8, K), dtype=np.int8), np.zeros((64, 8), np.int32)

np.savez("missing_proxy_fence.npz", w=words, x=x, y=y, K=np.int32(K))
np.savez("reused_fragment.npz", w=words, x=x, y=y, K=np.int32(K))

scale, zero = rng.integers(1, 9, 4, dtype=np.uint8), rng.integers(0, 16, 4, dtype=np.uint8)
np.savez("carrying_multiply.npz", q=words[:64], scale=scale, zero=zero, out=np.zeros((64, 8), np.int8))
