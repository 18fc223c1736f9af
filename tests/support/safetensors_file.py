"""Safetensors files as nobody should write them."""

import json
import struct


def write(path, tensors, header_length=None):
    """Write a safetensors file from {name: (dtype, shape, bytes)}, for cases that `save_file` refuses to write."""
    header, payload = {}, b""
    for name, (dtype, shape, content) in tensors.items():
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [len(payload), len(payload) + len(content)]}
        payload += content
    text = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text) if header_length is None else header_length) + text + payload)
    return path
