"""Packed weights in files: what comes back, and every file that is refused in one line."""

import json
import struct
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from ptxlab.errors import ArgumentError, FileError
from ptxlab.lowbit.layout import LAYOUTS, load, pack, packed_names, save, unpack
from ptxlab.lowbit.layout.packed_weight import VERSION
from tests.support.random_weights import KINDS, assert_equal, random_weight

WEIGHT = random_weight(KINDS[0], 24, 192, 64, 0)


@pytest.fixture
def saved_file(tmp_path: Path) -> Path:
    """Save a packed weight, and return its file."""
    save(pack(WEIGHT, "dual_mma"), tmp_path / "w.safetensors")
    return tmp_path / "w.safetensors"


def rewrite(path: Path, change) -> Path:
    """Rewrite a file's header, a dict that `change` edits in place."""
    content = path.read_bytes()
    (length,) = struct.unpack("<Q", content[:8])
    header = json.loads(content[8 : 8 + length])
    change(header)
    text = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + content[8 + length :])
    return path


def rewrite_description(path: Path, change) -> Path:
    """Rewrite the description of a file's packed weights, a dict that `change` edits in place."""

    def change_metadata(header: dict) -> None:
        description = json.loads(header["__metadata__"]["ptxlab"])
        change(description)
        header["__metadata__"]["ptxlab"] = json.dumps(description)

    return rewrite(path, change_metadata)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("kind", KINDS)
def test_round_trip(tmp_path: Path, layout: str, kind: type) -> None:
    weight = random_weight(kind, 40, 224, 32, 0)
    packed, path = pack(weight, layout), tmp_path / "w.safetensors"
    save(packed, str(path), "layers.0.up")
    loaded = load(path)
    assert packed_names(path) == ["layers.0.up"]
    for name, field in vars(packed).items():
        if name != "buffers":
            assert getattr(loaded, name) == field
    assert_equal(unpack(loaded), weight)
    assert_equal(unpack(load(path, "layers.0.up")), weight)


def test_a_protective_range_of_numpy_is_saved(tmp_path: Path) -> None:
    weight = replace(WEIGHT, protective_range=np.int64(120))
    save(pack(weight), tmp_path / "w")
    assert load(tmp_path / "w").protective_range == 120


def test_the_file_is_plain_safetensors(saved_file: Path) -> None:
    arrays = load_file(saved_file)
    packed = pack(WEIGHT, "dual_mma")
    assert set(arrays) == {"weight.blocks", "weight.channel_scale"}
    np.testing.assert_array_equal(arrays["weight.blocks"], packed.buffers["blocks"], strict=True)


def test_an_unknown_name_lists_those_known(saved_file: Path) -> None:
    with pytest.raises(ArgumentError, match=r"name: must be one of the 1 packed weights of .*: weight \(got up\)"):
        load(saved_file, "up")


def test_a_missing_file_and_a_missing_folder(tmp_path: Path) -> None:
    with pytest.raises(FileError, match=r"gone: no such file"):
        load(tmp_path / "gone")
    with pytest.raises(FileError, match=r"cannot be written: No such file or directory"):
        save(pack(WEIGHT), tmp_path / "no" / "folder")


def test_only_packed_weights_are_saved(tmp_path: Path) -> None:
    rule = r"packed: must be one of PackedWeight, AtomWeight, BlockWeight, ReorderedWeight \(got ndarray\)"
    with pytest.raises(ArgumentError, match=rule):
        save(np.zeros(3), tmp_path / "w")  # type: ignore[arg-type]
    assert not [*tmp_path.iterdir()]


def test_a_foreign_file(tmp_path: Path) -> None:
    save_file({"w": np.zeros(3, np.float32)}, tmp_path / "a")
    save_file({"w": np.zeros(3, np.float32)}, tmp_path / "b", {"ptxlab": "{"})
    save_file({"w": np.zeros(3, np.float32)}, tmp_path / "c", {"ptxlab": '{"format": "other"}'})
    save_file({"w": np.zeros(3, np.float32)}, tmp_path / "nested", {"ptxlab": "[" * 100_000})
    save_file({"w": np.zeros(3, np.float32)}, tmp_path / "digits", {"ptxlab": "1" * 5000})
    for name in ("a", "b", "c", "nested", "digits"):
        with pytest.raises(FileError, match=rf"{name}: holds no packed weights"):
            load(tmp_path / name)
    (tmp_path / "d").write_bytes(b"PK\x03\x04" + bytes(100))
    with pytest.raises(FileError, match="d: not a readable safetensors file"):
        load(tmp_path / "d")


def test_a_group_that_overflows_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "w.safetensors"
    wrong = replace(WEIGHT, group_scale=np.full_like(WEIGHT.group_scale, 17), minimum=np.zeros_like(WEIGHT.minimum))
    save(pack(wrong, "strips", unchecked=True), path, "up")
    with pytest.raises(FileError, match=r"up: must restore to -128..127, .* in row 0, group 0, scale 17"):
        load(path)
    assert_equal(unpack(load(path, unchecked=True)), wrong)


@pytest.mark.parametrize("length", [0, 7, 100, -1])
def test_a_truncated_file(saved_file: Path, length: int) -> None:
    saved_file.write_bytes(saved_file.read_bytes()[:length])
    with pytest.raises(FileError, match="not a readable safetensors file") as error:
        load(saved_file)
    assert "\n" not in str(error.value)


def test_another_version(saved_file: Path) -> None:
    rewrite_description(saved_file, lambda d: d.update(version=VERSION + 1))
    with pytest.raises(FileError, match=rf"format version must be {VERSION} \(got {VERSION + 1}\)"):
        load(saved_file)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"layout": "zigzag"}, r"weight: layout: must be one of row_major, .* \(got zigzag\)"),
        ({"scheme": "awq"}, r"weight: scheme: must be one of lqq, qoq, qoq_channel \(got awq\)"),
        ({"arch": "sm_100a"}, r"weight: dual_mma is for sm_90a \(got sm_100a\)"),
        ({"N": 32.0}, r"damaged header: each weight needs layout, arch, scheme, N, K, group, protective_range"),
        ({"N": True}, "damaged header"),
        ({"K": None}, "damaged header"),
        ({"protective_range": -7}, r"weight: protective_range: must be an integer in 1..127 \(got -7\)"),
        ({"N": -8}, r"weight: N must be a positive multiple of 8"),
        ({"group": 48}, r"group: must be one of 32, 64, 128"),
        ({"N": 2**62}, r"weight.blocks must be U8 \[\d+, 3, 2176\] \(got U8 \[1, 3, 2176\]\)"),
        ({"K": 256}, r"weight.blocks must be U8 \[1, 4, 2176\] \(got U8 \[1, 3, 2176\]\)"),
        ({"scheme": "qoq_channel", "group": 192}, r"weight.blocks must be U8 \[1, 3, 2048\]"),
        ({"layout": "row_major", "arch": "sm_80"}, r"weight.qweight must be U32 \[24, 24\] \(got no such tensor\)"),
    ],
)
def test_a_header_that_does_not_fit(saved_file: Path, changes: dict, message: str) -> None:
    rewrite_description(saved_file, lambda d: d["weights"]["weight"].update(changes))
    with pytest.raises(FileError, match=message) as error:
        load(saved_file)
    assert str(error.value).startswith(f"{saved_file}: ") and "\n" not in str(error.value)


def test_a_header_that_says_more(saved_file: Path) -> None:
    rewrite_description(saved_file, lambda d: d["weights"]["weight"].update(comment="added by a later ptxlab"))
    assert_equal(unpack(load(saved_file)), WEIGHT)


@pytest.mark.parametrize("weights", [None, [], {"weight": 3}])
def test_a_header_without_weights(saved_file: Path, weights: object) -> None:
    rewrite_description(saved_file, lambda d: d.update(weights=weights))
    with pytest.raises(FileError, match="damaged header"):
        load(saved_file)


def test_a_buffer_of_another_dtype_or_name(saved_file: Path) -> None:
    original_bytes = saved_file.read_bytes()
    rewrite(saved_file, lambda header: header["weight.blocks"].update(dtype="I8"))
    with pytest.raises(FileError, match=r"weight.blocks must be U8 .* \(got I8 "):
        load(saved_file)
    saved_file.write_bytes(original_bytes)
    rewrite(saved_file, lambda header: header.update(other=header.pop("weight.channel_scale")))
    with pytest.raises(FileError, match=r"weight.channel_scale must be F32 \[24\] \(got no such tensor\)"):
        load(saved_file)


def test_nothing_is_left_behind_when_writing_fails(saved_file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    original_bytes = saved_file.read_bytes()
    monkeypatch.setattr("ptxlab.lowbit.layout.storage.contents", lambda name, packed: iter([]))
    with pytest.raises(ValueError, match="announced and not given"):
        save(pack(WEIGHT, "comet"), saved_file)
    assert saved_file.read_bytes() == original_bytes and list(saved_file.parent.iterdir()) == [saved_file]
