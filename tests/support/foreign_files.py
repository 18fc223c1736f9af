"""Quantised checkpoints as other projects write them, each weight put into its place by itself.

Written from their published layouts, apart from the readers under test: by addresses, not by axes.
"""

import json
import struct
import zipfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import load_file, save_file

from ptxlab.errors import FileError
from tests.support import small_models

Arrays = dict[str, np.ndarray]
_STORAGES = {"f2": "Half", "f4": "Float", "f8": "Double", "i1": "Char", "u1": "Byte", "i4": "Int", "i8": "Long"}
ORDERED_DICT = b"ccollections\nOrderedDict\n)R"
# QServe's constants of 32 rows lie in this order
_ROWS_OF_32 = [8 * j + i for i in range(8) for j in range(4)]


def qserve_nibbles(q4: np.ndarray) -> np.ndarray:
    """Pack q4 [N, K] as QServe's qweight s8 [N, K/2]."""
    N, K = q4.shape
    packed = bytearray(N * K // 2)
    for n in range(N):
        for k in range(K):
            tile = n // 32 * (K // 32) + k // 32
            lane = 4 * (n % 8) + k % 16 // 4
            at = 512 * tile + 16 * lane + 8 * (k % 32 // 16) + 4 * (n % 16 // 8) + k % 4
            packed[at] |= int(q4[n, k]) << (4 if n % 32 >= 16 else 0)
    return np.frombuffer(bytes(packed), np.int8).reshape(N, K // 2)


def qserve_constants(constants: np.ndarray) -> np.ndarray:
    """Reorder integers [N, G] as QServe's constants s8 [G, N]; they wrap."""
    N, G = constants.shape
    reordered = np.empty((G, N), np.int8)
    for n in range(N):
        for g in range(G):
            place = n - n % 32 + _ROWS_OF_32.index(n % 32)
            reordered[g, place] = (int(constants[n, g]) + 128) % 256 - 128
    return reordered


def qserve(q4: np.ndarray, s1: np.ndarray, s2: np.ndarray, zeros: np.ndarray) -> Arrays:
    """Write QServe's arrays of weights per group: w = (q4·s2 + zeros)·s1."""
    return {
        "qweight": qserve_nibbles(q4),
        "s1_scales": s1.astype(np.float16),
        "s2_scales": qserve_constants(s2),
        "s2_zeros": qserve_constants(zeros),
    }


def qserve_channel(q4: np.ndarray, scale: np.ndarray, zero: np.ndarray) -> Arrays:
    """Write QServe's arrays of weights per channel: w = (q4 - zero)·scale."""
    half = scale.astype(np.float16)
    return {"qweight": qserve_nibbles(q4), "s1_scales": half, "s1_szeros": (zero * half).astype(np.float16)}


def pack_words(nibbles: np.ndarray, order: list[int]) -> np.ndarray:
    """Pack nibbles [a, b] into s32 [a, b/8].

    The lowest nibble of a word is the one at `order[0]` of its eight.
    """
    a, b = nibbles.shape
    packed = np.zeros((a, b // 8), np.uint32)
    for i in range(a):
        for j in range(0, b, 8):
            packed[i, j // 8] = sum(int(nibbles[i, j + element]) << 4 * place for place, element in enumerate(order))
    return packed.view(np.int32)


STRAIGHT, OF_AWQ = [0, 1, 2, 3, 4, 5, 6, 7], [0, 2, 4, 6, 1, 3, 5, 7]


def gptq(
    q4: np.ndarray, scale: np.ndarray, zero: np.ndarray, order: np.ndarray | None = None, stored: int = -1
) -> Arrays:
    """Write GPTQ's arrays.

    `order` gives each k its group. `stored` is added to the zero point: -1, or 0 of the second version.
    """
    K, G = q4.shape[1], scale.shape[1]
    return {
        "qweight": np.ascontiguousarray(pack_words(q4, STRAIGHT).T),
        "qzeros": pack_words(((zero.astype(np.int64) + stored) & 15).T, STRAIGHT),
        "scales": np.ascontiguousarray(scale.T.astype(np.float16)),
        "g_idx": (np.arange(K) // (K // G) if order is None else order).astype(np.int32),
    }


def awq(q4: np.ndarray, scale: np.ndarray, zero: np.ndarray) -> Arrays:
    """Write the arrays of AutoAWQ's version gemm."""
    return {
        "qweight": pack_words(q4.T, OF_AWQ),
        "qzeros": pack_words(zero.astype(np.int64).T, OF_AWQ),
        "scales": np.ascontiguousarray(scale.T.astype(np.float16)),
    }


def compressed_tensors(q4: np.ndarray, scale: np.ndarray, zero: np.ndarray | None = None) -> Arrays:
    """Write the arrays of pack-quantized, symmetric without `zero`."""
    arrays = {
        "weight_packed": pack_words(q4, STRAIGHT),
        "weight_scale": scale.astype(np.float16),
        "weight_shape": np.array(q4.shape, np.int64),
    }
    if zero is not None:
        padded = np.pad(zero.astype(np.int64), ((0, -len(zero) % 8), (0, 0)))
        arrays["weight_zero_point"] = np.ascontiguousarray(pack_words(padded.T, STRAIGHT).T)
    return arrays


def compressed_integers(q4: np.ndarray, scale: np.ndarray) -> Arrays:
    """Write the arrays of int-quantized, as W4A8 is saved."""
    return {"weight": (q4.astype(np.int8) - 8).astype(np.int8), "weight_scale": scale.astype(np.float16)}


def quantize_affine(w: np.ndarray, group: int, *, symmetric: bool = False) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Quantise w [N, K] to q4 u8, scale f16 [N, G], zero u8 [N, G]."""
    groups = w.reshape(len(w), -1, group).astype(np.float32)
    if symmetric:
        scale = (np.abs(groups).max(axis=2) / 7).astype(np.float16)
        zero = np.full(scale.shape, 8, np.uint8)
    else:
        low, high = groups.min(axis=2).clip(max=0), groups.max(axis=2).clip(min=0)
        scale = ((high - low) / 15).astype(np.float16)
        zero = np.rint(-low / scale).clip(0, 15).astype(np.uint8)
    q4 = (np.rint(groups / scale[:, :, None]) + zero[:, :, None]).clip(0, 15).astype(np.uint8)
    return q4.reshape(w.shape), scale, zero


def quantize_two_levels(w: np.ndarray, group: int) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Quantise w [N, K] by QServe's two levels: q4 u8, s1 f16 [N], s2 and zeros [N, G].

    The zeros are any integer in -128..0 (PostScale).
    """
    s1 = (np.abs(w).max(axis=1) / 119).astype(np.float16)
    groups = np.rint(w / s1[:, None].astype(np.float32)).clip(-119, 119).reshape(len(w), -1, group)
    low, high = groups.min(axis=2).clip(max=0), groups.max(axis=2).clip(min=0)
    s2 = np.ceil((high - low) / 15).clip(min=1).astype(int)
    q4 = np.rint((groups - low[:, :, None]) / s2[:, :, None]).clip(0, 15).astype(np.uint8)
    return q4.reshape(w.shape), s1, s2, low.astype(int)


def quantize_as(name: str, w: np.ndarray, group: int = 64) -> Arrays:
    """Quantise a matrix to a format by its short name, and return the format's arrays."""
    channel = quantize_affine(w, w.shape[1])
    match name:
        case "qserve":
            return qserve(*quantize_two_levels(w, group))
        case "qserve_channel":
            return qserve_channel(channel[0], channel[1][:, 0], channel[2][:, 0])
        case "w4a8":
            return compressed_integers(*quantize_affine(w, w.shape[1], symmetric=True)[:2])
        case "w4a16":
            return compressed_tensors(*quantize_affine(w, group, symmetric=True)[:2])
        case "w4a16_asymmetric":
            return compressed_tensors(*quantize_affine(w, group))
        case "gptq":
            return gptq(*quantize_affine(w, group))
        case "auto_round":  # symmetric; half of the scales are negative
            q4, scale, zero = quantize_affine(w, group, symmetric=True)
            sign = np.where(np.arange(scale.size).reshape(scale.shape) % 2, -1, 1)
            mirrored = np.repeat(sign < 0, group, axis=1)
            return gptq(np.where(mirrored, 16 - q4.clip(1), q4), scale * sign, zero)
        case "awq":
            return awq(*quantize_affine(w, group))
    raise ValueError(name)


FORMATS = ("qserve", "qserve_channel", "w4a8", "w4a16", "w4a16_asymmetric", "gptq", "awq")
# Multiples of QServe's tiles, keys and values too, and heads of 64 dimensions, which kernels take
SMALL = {"hidden_size": 128, "intermediate_size": 256, "num_attention_heads": 2, "num_key_value_heads": 1}


def write_model(folder: Path, format: str, *, container: str = "safetensors", group: int = 64, **changes: Any) -> Path:
    """Write a small LLaMA in a format as a Hugging Face folder, and return the folder.

    `changes` are those of its config.json.
    """
    folder.mkdir()
    config = {**small_models.CONFIGS["llama3"], **SMALL, **changes}
    (folder / "config.json").write_text(json.dumps(config))
    small_models.tokenizer().save(str(folder / "tokenizer.json"))
    arrays: Arrays = {}
    for name, array in small_models.tensors(config).items():
        if name.endswith(("proj.weight", "w1.weight", "w2.weight", "w3.weight")):
            module = name.removesuffix("weight")
            arrays |= {f"{module}{part}": content for part, content in quantize_as(format, array, group).items()}
        else:
            arrays[name] = array.astype(np.float16)
    if container == "torch":
        write_torch(folder / "quant_model.pt", arrays)
    else:
        save_file(arrays, folder / "model.safetensors")
    return folder


def add_tensors(folder: Path, arrays: Mapping[str, np.ndarray]) -> None:
    """Add tensors to a model's file, or replace those of the same names."""
    path = folder / "model.safetensors"
    save_file({**load_file(path), **arrays}, path)


def write_torch(path: Path, arrays: Mapping[str, np.ndarray], compression: int = zipfile.ZIP_STORED) -> Path:
    """Write a file as `torch.save` writes an OrderedDict of tensors."""
    entries = b"".join(push_text(name) + push_tensor(array, key) for key, (name, array) in enumerate(arrays.items()))
    contents = {f"data/{key}": array.tobytes() for key, array in enumerate(arrays.values())}
    return write_archive(path, ORDERED_DICT + b"(" + entries + b"u", contents, compression)


def write_archive(
    path: Path, program: bytes, contents: Mapping[str, bytes], compression: int = zipfile.ZIP_STORED
) -> Path:
    """Write the zip of a pickle, whose opcodes between PROTO and STOP are given, with further members."""
    with zipfile.ZipFile(path, "w", compression) as archive:
        archive.writestr("archive/data.pkl", b"\x80\x02" + program + b".")
        archive.writestr("archive/byteorder", "little")
        for name, content in contents.items():
            archive.writestr(f"archive/{name}", content)
        archive.writestr("archive/version", "3\n")
    return path


def push_text(string: str) -> bytes:
    """Return the opcodes that push a string."""
    return b"X" + struct.pack("<I", len(string.encode())) + string.encode()


def push_number(integer: int) -> bytes:
    """Return the opcodes that push an integer."""
    return b"J" + struct.pack("<i", integer)


def push_tensor(
    array: np.ndarray, key: int, offset: int = 0, strides: tuple[int, ...] | None = None, kind: str = ""
) -> bytes:
    """Return the opcodes that push a tensor stored in the member `data/key`."""
    kind = kind or _STORAGES[array.dtype.str[1:]]
    steps = [int(np.prod(array.shape[i + 1 :])) for i in range(array.ndim)] if strides is None else strides
    storage = b"(" + push_text("storage") + f"ctorch\n{kind}Storage\n".encode()
    storage += push_text(str(key)) + push_text("cpu") + push_number(array.size) + b"tQ"
    sizes = b"".join(b"(" + b"".join(map(push_number, numbers)) + b"t" for numbers in (array.shape, steps))
    return (
        b"ctorch._utils\n_rebuild_tensor_v2\n(" + storage + push_number(offset) + sizes + b"\x89" + ORDERED_DICT + b"tR"
    )


def refused_mutants(path: Path, read: Callable[[], object], header: int = 0) -> int:
    """Count of 500 mutants of a file how many `read` refuses in one line.

    A mutant is cut off, or has bytes changed, most of them in the header.
    """
    whole, refused = path.read_bytes(), 0
    rng = np.random.default_rng(1)
    for _ in range(500):
        content = bytearray(whole[: rng.integers(1, len(whole))] if rng.random() < 0.1 else whole)
        for _ in range(rng.integers(1, 4)):
            reach = header if header and rng.random() < 0.7 else len(content)
            content[rng.integers(min(len(content), reach))] = rng.integers(256)
        path.write_bytes(content)
        try:
            read()
        except FileError as error:
            refused += 1
            assert "\n" not in str(error)
    return refused
