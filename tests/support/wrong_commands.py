"""The files that wrong commands name: whole, empty, cut, of another kind, with other values."""

import json
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file

from tests.support.add4 import PTX_ADD4

SCALE = 'extern "C" __global__ void scale(float* x, int n) { if (threadIdx.x < n) x[threadIdx.x] *= 2; }\n'
SUM = """extern "C" __global__ void endless(const unsigned* x, unsigned* out, unsigned n) {
    unsigned s = 0;
    for (unsigned i = 0; i < n; i++) s += x[i];
    out[0] = s;
}
"""


def make_files(folder: Path) -> None:
    """Write all of them into a folder."""
    _kernels(folder)
    _arguments(folder)
    _weights(folder)
    _models(folder)
    (folder / "folder").mkdir()
    (folder / "folder" / "something.md").write_text("something\n")
    for name in ("note.txt", "note.py", "bad.json", "bad.jsonl", "bad.gguf", "bad.pt", "bad.safetensors"):
        (folder / name).write_text("What is written here is an ordinary note.\n" * 9)
    for name in ("empty.txt", "empty.ptx", "empty.cu", "empty.npz", "empty.safetensors"):
        (folder / name).write_bytes(b"")
    (folder / "keys.jsonl").write_text('{"prompt": "a", "token": 3}\n')
    (folder / "cut.gguf").write_bytes(b"GGUF\3\0\0\0\1\0")


def _kernels(folder: Path) -> None:
    (folder / "add4.ptx").write_text(PTX_ADD4)
    (folder / "scale.cu").write_text(SCALE)
    (folder / "two.cu").write_text(SCALE + SCALE.replace("scale", "scale_too"))
    (folder / "broken.cu").write_text(SCALE.replace("*= 2", "*= two"))
    (folder / "host.cu").write_text("#include <vector>\n" + SCALE + "int main() { std::vector<int> v; return 0; }\n")
    (folder / "endless.cu").write_text(SUM)
    (folder / "address.cu").write_text(SUM.replace("endless", "address").replace("out[0] = s", "out[0] = x[n]"))
    (folder / "latin.cu").write_bytes(("// gr\xf6\xdfer\n" + SCALE).encode("latin-1"))
    (folder / "binary.ptx").write_bytes(bytes(range(256)))


def _arguments(folder: Path) -> None:
    words = np.zeros(32, np.uint32)
    add4 = dict.fromkeys(("a", "b", "sum"), words)
    x = np.ones(32, np.float32)
    packed: dict[str, np.ndarray] = {
        "qweight": np.full((1, 8), 0x11111111, np.uint32),
        "scale": np.full((1, 1), 3, np.uint8),
        "offset": np.full((1, 1), 9, np.uint8),
    }
    arrays: dict[str, dict[str, Any]] = {
        "add4": add4,
        "extra": {**add4, "z": words},
        "short": {"a": words, "b": words},
        "text": {**add4, "a": np.array(["x"] * 32)},
        "scale": {"x": x, "n": np.array(32, np.int32)},
        "floats64": {"x": x.astype(np.float64), "n": np.array(32, np.int32)},
        "scalar_array": {"x": x, "n": np.full(3, 32, np.int32)},
        "huge": {"x": x, "n": np.array(2**40)},
        "lqq": packed,
        "lqq17": {**packed, "qweight": packed["qweight"] * 15, "scale": np.full((1, 1), 17, np.uint8)},
    }
    for name, fields in arrays.items():
        np.savez(folder / f"{name}.npz", **fields)
    (folder / "cut.npz").write_bytes((folder / "add4.npz").read_bytes()[:300])


def _weights(folder: Path) -> None:
    weight = np.random.default_rng(0).standard_normal((64, 128), np.float32)
    spoilt = {"nan": np.nan, "inf": np.inf}
    for name, number in spoilt.items():
        wrong = weight.copy()
        wrong[3, 5] = number
        save_file({"w": wrong}, folder / f"{name}.safetensors")
    save_file({"w": weight}, folder / "w.safetensors")
    save_file({"w": weight[:, :100].copy()}, folder / "odd.safetensors")
    save_file({"w": np.zeros((64, 128), np.int32)}, folder / "ints.safetensors")
    (folder / "cut.safetensors").write_bytes((folder / "w.safetensors").read_bytes()[:500])


def _models(folder: Path) -> None:
    texts = {
        "gpt2": json.dumps({"model_type": "gpt2", "n_embd": 768}),
        "badjson": "{model_type: llama",
        "cutlayer": json.dumps(
            {
                "model_type": "llama", "hidden_size": 96, "intermediate_size": 192, "num_attention_heads": 6,
                "num_key_value_heads": 2, "num_hidden_layers": 1, "vocab_size": 60, "rms_norm_eps": 1e-5,
            }
        ),
    }  # fmt: skip
    for name, text in texts.items():
        (folder / name).mkdir()
        (folder / name / "config.json").write_text(text)
    save_file({"model.embed_tokens.weight": np.zeros((60, 96), np.float32)}, folder / "cutlayer" / "model.safetensors")
    (folder / "jsonless").mkdir()
    save_file({"w": np.zeros((4, 4), np.float32)}, folder / "jsonless" / "model.safetensors")
