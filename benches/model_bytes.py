"""Bytes that decoding one token reads of a model: its weights, and the keys and values of each token of context.

GGUF: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md. Safetensors: https://huggingface.co/docs/safetensors.
"""

from __future__ import annotations

import json
import struct
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

# Formats of the scalar metadata types, by number; 8 is a string, 9 an array.
SCALARS = {0: "<B", 1: "<b", 2: "<H", 3: "<h", 4: "<I", 5: "<i", 6: "<f", 7: "<?", 10: "<Q", 11: "<q", 12: "<d"}
EMBEDDING, HEAD = ("token_embd.weight", "model.embed_tokens.weight"), ("output.weight", "lm_head.weight")
KV_ELEMENT_BYTES = 2  # bf16 or f16, the default KV cache


@dataclass
class ModelBytes:
    """What a token costs to read."""

    file_bytes: int
    weight_bytes: int
    kv_bytes_per_token: int


def model_bytes(model: Path) -> ModelBytes:
    """Of a GGUF file, or of a folder of safetensors with its config.json."""
    tensors, (layers, kv_heads, head_dim) = read_folder(model) if model.is_dir() else read_gguf(model)
    weights = sum(tensors.values())
    # An embedding that is not the output head as well is read one row a token.
    if any(head in tensors for head in HEAD):
        weights -= sum(tensors.get(name, 0) for name in EMBEDDING)
    files = list(model.glob("*.safetensors")) if model.is_dir() else [model]
    return ModelBytes(sum(file.stat().st_size for file in files), weights, 2 * layers * kv_heads * head_dim * KV_ELEMENT_BYTES)


def read_folder(folder: Path) -> tuple[dict[str, int], tuple[int, int, int]]:
    """Bytes a tensor; layers, KV heads and head size."""
    tensors: dict[str, int] = {}
    for path in folder.glob("*.safetensors"):
        with path.open("rb") as file:
            header = json.loads(file.read(number(file, "<Q")))
        tensors |= {
            name: entry["data_offsets"][1] - entry["data_offsets"][0] for name, entry in header.items() if name != "__metadata__"
        }
    config = json.loads((folder / "config.json").read_text())
    heads = config["num_attention_heads"]
    head_dim = config.get("head_dim") or config["hidden_size"] // heads
    return tensors, (config["num_hidden_layers"], config.get("num_key_value_heads", heads), head_dim)


def read_gguf(path: Path) -> tuple[dict[str, int], tuple[int, int, int]]:
    """Bytes a tensor, up to its padding; layers, KV heads and head size."""
    with path.open("rb") as file:
        if file.read(4) != b"GGUF":
            raise ValueError(f"{path} is not a GGUF file")
        number(file, "<I")  # version
        num_tensors, num_pairs = number(file, "<Q"), number(file, "<Q")
        data = {text(file): value(file, number(file, "<I")) for _ in range(num_pairs)}
        starts = []
        for _ in range(num_tensors):
            name = text(file)
            for _ in range(number(file, "<I")):
                number(file, "<Q")
            number(file, "<I")  # type
            starts.append((number(file, "<Q"), name))
        alignment = data.get("general.alignment", 32)
        data_bytes = path.stat().st_size - -(-file.tell() // alignment) * alignment
    starts.sort()
    ends = [start for start, _ in starts[1:]] + [data_bytes]
    tensors = {name: end - start for (start, name), end in zip(starts, ends, strict=True)}
    arch = data["general.architecture"]
    heads = data[f"{arch}.attention.head_count"]
    head_dim = data.get(f"{arch}.attention.key_length") or data[f"{arch}.embedding_length"] // heads
    return tensors, (data[f"{arch}.block_count"], data.get(f"{arch}.attention.head_count_kv", heads), head_dim)


def number(file: BinaryIO, form: str) -> int:
    """One number of a `struct` format."""
    return struct.unpack(form, file.read(struct.calcsize(form)))[0]  # type: ignore[no-any-return]


def text(file: BinaryIO) -> str:
    """A string with its length before it."""
    return file.read(number(file, "<Q")).decode()


def value(file: BinaryIO, kind: int) -> Any:
    """A metadata value of a type."""
    if kind == 8:
        return text(file)
    if kind == 9:
        element, length = number(file, "<I"), number(file, "<Q")
        return [value(file, element) for _ in range(length)]
    if kind not in SCALARS:
        raise ValueError(f"metadata type {kind} is unknown; known are 0 to 12")
    return number(file, SCALARS[kind])


if __name__ == "__main__":
    if len(sys.argv) == 1:
        from mistral_paged.default_model import default_model
    print(model_bytes(Path(sys.argv[1]) if len(sys.argv) > 1 else default_model()).weight_bytes)
