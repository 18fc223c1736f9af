"""Family `load`: one tile of weights from global through shared memory into the registers of an MMA.

Why 4-bit weights cannot take the road of 8-bit ones (QServe §5.2.1, LiquidGEMM §5.2, COMET §4.3). All kernels bring a
tile of 64 x 64 to 128 threads and store what each holds: `fragments` u8 [T, 128, 32], eight registers of four bytes per
thread, the operand A of two successive MMAs of k32. Two more keep a ring of stages in shared memory full.
"""

from collections.abc import Callable
from typing import Any

import numpy as np

from ptxlab.hardware import fragments
from ptxlab.lowbit import layout
from ptxlab.lowbit.layout.nibbles import pack_u4
from ptxlab.lowbit.quant import QoQChannelWeight
from ptxlab.spec import Arg, Arrays, KernelSpec, Launch, Sizes, WrongByDesign

THREADS = 128
TILE = 64  # rows and channels
STAGE_TILES, STAGES = 8, 4
FOLD = np.uint32(0x9E3779B1)


def operand_a(tiles: np.ndarray) -> np.ndarray:
    """Arrange bytes as operand A of two wgmma.m64nNk32: [T, 64, 64] -> [T, 128, 32], by the fragment map."""
    steps = [fragments.wgmma_a().scatter(np.ascontiguousarray(tiles[..., k : k + 32])) for k in (0, 32)]
    return np.concatenate(steps, axis=-1).view(tiles.dtype)


def operand_a_qserve(tiles: np.ndarray) -> np.ndarray:
    """Arrange bytes in QServe's tiles of 32 x 32 per warp: [T, 64, 64] -> [T, 128, 32].

    A tile is two mma.m16n8k32 below each other.
    """
    warps = []
    for row, column in ((0, 0), (0, 32), (32, 0), (32, 32)):
        tile = tiles[..., row : row + 32, column : column + 32]
        tile_halves = [
            fragments.mma_a(32).scatter(np.ascontiguousarray(tile[..., first_row : first_row + 16, :]))
            for first_row in (0, 16)
        ]
        warps.append(np.concatenate(tile_halves, axis=-1))
    return np.concatenate(warps, axis=-2).view(tiles.dtype)


def _arriving_channels() -> np.ndarray:
    """Return the channel of a k32 step that `load_ldmatrix_u4` delivers in place of each: eight per lane, in order."""
    place = np.arange(32)
    lane, byte = place % 16 // 4, place % 4
    return 8 * lane + 4 * (place // 16) + byte


def arriving_u4(q4: np.ndarray) -> np.ndarray:
    """Compute the registers that `load_ldmatrix_u4` leaves: every k32 step with its channels out of place."""
    channels = np.concatenate([_arriving_channels(), 32 + _arriving_channels()])
    return operand_a(q4[..., channels])


def misses_u4(q4: np.ndarray) -> np.ndarray:
    """Find the bytes of `arriving_u4` that the MMA needs otherwise, lane by lane.

    Channel 8 t + ... arrives in place of 4 t or 16 + 4 t + ...
    """
    is_wrong = np.zeros((len(q4), THREADS, 32), bool)
    for thread in range(THREADS):
        warp, g, t = thread // 32, thread % 32 // 4, thread % 4
        for register in range(8):
            step, a = divmod(register, 4)
            row, upper_half = 16 * warp + g + 8 * (a % 2), a // 2
            for byte in range(4):
                arriving_weights = q4[:, row, 32 * step + 8 * t + 4 * upper_half + byte]
                needed_weights = q4[:, row, 32 * step + 16 * upper_half + 4 * t + byte]
                is_wrong[:, thread, 4 * register + byte] = arriving_weights != needed_weights
    return is_wrong


def digest(words: np.ndarray, B: int) -> np.ndarray:
    """Deal stages u32 [P, 8, 128, 4] to B blocks in turn; each thread folds its words in order: u32 [B, 128]."""
    folded_words = np.zeros((B, THREADS), np.uint32)
    for first_block in range(0, len(words), B):
        stage = words[first_block : first_block + B]
        for tile in range(STAGE_TILES):
            for word in range(4):
                folded_words[: len(stage)] = folded_words[: len(stage)] * FOLD + stage[:, tile, :, word]
    return folded_words


def _nibbles(rng: np.random.Generator, *, T: int) -> Arrays:
    return {"q4": rng.integers(0, 16, size=(T, TILE, TILE), dtype=np.uint8)}


def _signed_nibbles(rng: np.random.Generator, *, T: int) -> Arrays:
    return {"q4": rng.integers(-8, 8, size=(T, TILE, TILE), dtype=np.int8)}


def _bytes(rng: np.random.Generator, *, T: int) -> Arrays:
    return {"q8": rng.integers(-128, 128, size=(T, TILE, TILE), dtype=np.int8)}


def _tile_launch(sizes: Sizes) -> Launch:
    return Launch(grid=(sizes["T"], 1, 1), block=(THREADS, 1, 1))


def _tile_kernel(name: str, summary: str, tiles: Arg, out: str, **fields: Any) -> KernelSpec:
    """Build the spec of a kernel that brings one tile per block."""
    return KernelSpec(
        name=name,
        summary=summary,
        args=(tiles, Arg("fragments", out, ("T", "128", "32"), "out")),
        launch=_tile_launch,
        rules=("1 <= T < 2**31",),
        example_sizes=({"T": 1}, {"T": 3}, {"T": 8}),
        **fields,
    )


def _packer(name: str) -> Callable[[Arrays], Arrays]:
    """Return a function that packs the tiles, stacked to a matrix of 64 columns, as u32 [T, 128, 4].

    The packing keeps the tiles apart.
    """

    def pack(logical: Arrays) -> Arrays:
        q4 = logical["q4"].reshape(-1, TILE).view(np.uint8) & np.uint8(15)
        weight = QoQChannelWeight(q4, np.ones(len(q4), np.float32), np.zeros(len(q4), np.uint8))
        buffers = layout.pack(weight, name).buffers  # without groups a packing holds words and nothing else
        return {"tiles": buffers["blocks" if name == "dual_mma" else "qweight"].view(np.uint32).reshape(-1, THREADS, 4)}

    return pack


def _ring_kernel(name: str, summary: str, **fields: Any) -> KernelSpec:
    """Build the spec of a kernel that streams stages through a ring in shared memory."""
    return KernelSpec(
        name=name,
        summary=summary,
        args=(
            Arg("tiles", "uint32", ("P", "8", "128", "4")),
            Arg("digest", "uint32", ("B", "128"), "out"),
            Arg("stages", "uint32", role="scalar", value="P"),
        ),
        launch=lambda sizes: Launch((sizes["B"], 1, 1), (THREADS, 1, 1), STAGES * STAGE_TILES * 2048),
        rules=("1 <= P < 2**31", "1 <= B < 2**29"),  # a stage four rounds on is a u32
        operations="2*P*8*128*4",
        example=_ring_example,
        pack=lambda logical: {"tiles": logical["words"]},
        reference=digest,
        example_sizes=({"P": 1, "B": 1}, {"P": 3, "B": 2}, {"P": 11, "B": 2}, {"P": 9, "B": 10}),
        **fields,
    )


def _ring_example(rng: np.random.Generator, *, P: int, B: int) -> Arrays:
    return {"words": rng.integers(0, 2**32, size=(P, STAGE_TILES, THREADS, 4), dtype=np.uint32), "B": B}


_ROW_MAJOR = Arg("tiles", "uint32", ("T", "64", "8"))
_THREAD_ORDER = Arg("tiles", "uint32", ("T", "128", "4"))

SPECS = (
    _tile_kernel(
        "load_ldmatrix_s8",
        "INT8: ldmatrix hands every thread the bytes that its MMA needs",
        Arg("tiles", "int8", ("T", "64", "64")),
        "int8",
        example=_bytes,
        pack=lambda logical: {"tiles": logical["q8"]},
        reference=lambda q8: operand_a(q8),
    ),
    _tile_kernel(
        "load_ldmatrix_u4",
        "4 bits by ldmatrix: equal bytes are the wrong channels (QServe §5.2.1)",
        _ROW_MAJOR,
        "uint8",
        example=_nibbles,
        pack=lambda logical: {"tiles": pack_u4(logical["q4"])},
        reference=arriving_u4,
        wrong=WrongByDesign(
            truth=lambda q4: operand_a(q4),
            misses=misses_u4,
            why="ldmatrix deals equal bytes: thread t gets channels 8 t ..., its MMA needs 4 t ... and 16 + 4 t ...",
            overflows=False,
        ),
    ),
    _tile_kernel(
        "load_lds32_u4",
        "4 bits by LDS.32: right, half of every load wasted, two wavefronts each (LiquidGEMM §5.2)",
        _ROW_MAJOR,
        "uint8",
        example=_nibbles,
        pack=lambda logical: {"tiles": pack_u4(logical["q4"])},
        reference=lambda q4: operand_a(q4),
    ),
    _tile_kernel(
        "load_qserve_reorder",
        "compute-aware reorder: a thread's 32 weights are one LDS.128 (QServe §5.2.1)",
        _THREAD_ORDER,
        "uint8",
        example=_nibbles,
        pack=_packer("qserve"),
        reference=lambda q4: operand_a_qserve(q4),
    ),
    _tile_kernel(
        "load_dual_mma",
        "dual-MMA layout: one LDS.128 is operand A of two wgmmas (LiquidGEMM §5.2)",
        _THREAD_ORDER,
        "uint8",
        example=_nibbles,
        pack=_packer("dual_mma"),
        reference=lambda q4: operand_a(q4),
    ),
    _tile_kernel(
        "load_comet_interleave",
        "weight interleave: one ldmatrix where INT8 needs two (COMET §4.3)",
        _THREAD_ORDER,
        "int8",
        example=_signed_nibbles,
        pack=_packer("comet"),
        reference=lambda q4: operand_a(q4 << np.int8(4)),
    ),
    _ring_kernel("load_cp_async", "a ring of four stages fed by cp.async", arch="sm_80"),
    _ring_kernel("load_bulk_sm90", "a ring of four stages fed by the bulk copy engine and mbarriers", arch="sm_90"),
)
