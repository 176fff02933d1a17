"""What a model costs: bytes that decoding a token reads of weights, keys and values, and operations of a prompt.

GGUF: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md. Safetensors: https://huggingface.co/docs/safetensors.
"""

from __future__ import annotations

import json
import math
import struct
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

# Formats of the scalar metadata types, by number; 8 is a string, 9 an array.
SCALARS = {0: "<B", 1: "<b", 2: "<H", 3: "<h", 4: "<I", 5: "<i", 6: "<f", 7: "<?", 10: "<Q", 11: "<q", 12: "<d"}
EMBEDDING, HEAD = ("token_embd.weight", "model.embed_tokens.weight"), ("output.weight", "lm_head.weight")
LAYERS = ("blk.", "model.layers.")
EXPERTS = "_exps."
KV_ELEMENT_BYTES = 2  # bf16 or f16, the default KV cache


@dataclass
class Tensor:
    """Bytes in the file, and the shape."""

    num_bytes: int
    shape: list[int]


@dataclass
class Heads:
    """What attention and experts are made of."""

    kv_values: int
    """That a token leaves in all layers."""
    flop_per_pair: int
    experts_used: int = 1
    experts: int = 1


@dataclass
class ModelBytes:
    """What a token costs to read, and a prompt to compute."""

    file_bytes: int
    weight_bytes: int
    expert_bytes: int
    """Of `weight_bytes`, those of experts, of which a token reads a share."""
    expert_share: float
    kv_bytes_per_token: int
    layer_parameters: int
    """Of the matrices of all layers that a token is multiplied by."""
    attention_flop_per_pair: int
    """Of a query and a key that it sees, in all layers and heads."""


def model_bytes(model: Path) -> ModelBytes:
    """Of a GGUF file, or of a folder of safetensors with its config.json."""
    tensors, heads = read_folder(model) if model.is_dir() else read_gguf(model)
    weights = sum(tensor.num_bytes for tensor in tensors.values())
    # An embedding that is not the output head as well is read one row a token.
    if any(head in tensors for head in HEAD):
        weights -= sum(tensors[name].num_bytes for name in EMBEDDING if name in tensors)
    experts = {name: tensor for name, tensor in tensors.items() if EXPERTS in name}
    share = heads.experts_used / heads.experts
    matrices = [tensor for name, tensor in tensors.items() if name.startswith(LAYERS) and len(tensor.shape) == 2]
    parameters = sum(math.prod(tensor.shape) for tensor in matrices)
    parameters += int(sum(math.prod(tensor.shape) for tensor in experts.values() if len(tensor.shape) == 3) * share)
    files = list(model.glob("*.safetensors")) if model.is_dir() else [model]
    return ModelBytes(
        file_bytes=sum(file.stat().st_size for file in files),
        weight_bytes=weights,
        expert_bytes=sum(tensor.num_bytes for tensor in experts.values()),
        expert_share=share,
        kv_bytes_per_token=heads.kv_values * KV_ELEMENT_BYTES,
        layer_parameters=parameters,
        attention_flop_per_pair=heads.flop_per_pair,
    )


def read_folder(folder: Path) -> tuple[dict[str, Tensor], Heads]:
    """Tensors and attention heads."""
    tensors: dict[str, Tensor] = {}
    for path in folder.glob("*.safetensors"):
        with path.open("rb") as file:
            header = json.loads(file.read(number(file, "<Q")))
        tensors |= {
            name: Tensor(entry["data_offsets"][1] - entry["data_offsets"][0], entry["shape"])
            for name, entry in header.items()
            if name != "__metadata__"
        }
    config = json.loads((folder / "config.json").read_text())
    heads = config["num_attention_heads"]
    head_dim = config.get("head_dim") or config["hidden_size"] // heads
    layers, kv_heads = config["num_hidden_layers"], config.get("num_key_value_heads", heads)
    return tensors, Heads(2 * layers * kv_heads * head_dim, 4 * layers * heads * head_dim)


def read_gguf(path: Path) -> tuple[dict[str, Tensor], Heads]:
    """Tensors, with their padding, and attention heads."""
    with path.open("rb") as file:
        if file.read(4) != b"GGUF":
            raise ValueError(f"{path} is not a GGUF file")
        number(file, "<I")  # version
        num_tensors, num_pairs = number(file, "<Q"), number(file, "<Q")
        data = {text(file): value(file, number(file, "<I")) for _ in range(num_pairs)}
        starts = []
        for _ in range(num_tensors):
            name = text(file)
            shape = [number(file, "<Q") for _ in range(number(file, "<I"))]
            number(file, "<I")  # type
            starts.append((number(file, "<Q"), name, shape))
        alignment = data.get("general.alignment", 32)
        data_bytes = path.stat().st_size - -(-file.tell() // alignment) * alignment
    starts.sort()
    ends = [start for start, _, _ in starts[1:]] + [data_bytes]
    tensors = {name: Tensor(end - start, shape) for (start, name, shape), end in zip(starts, ends, strict=True)}
    return tensors, heads_of(data)


def heads_of(data: dict[str, Any]) -> Heads:
    """What the metadata of a GGUF file says."""
    arch = data["general.architecture"]

    def of(key: str, default: Any = None) -> Any:
        return data.get(f"{arch}.{key}", default)

    heads, layers = of("attention.head_count"), of("block_count")
    kv_heads = of("attention.head_count_kv", heads)
    # Layers without attention have none.
    kv_heads = kv_heads if isinstance(kv_heads, list) else [kv_heads] * layers
    key = of("attention.key_length") or of("embedding_length") // heads
    value = of("attention.value_length") or key
    # Latent attention takes values from the keys.
    kept = key if of("attention.kv_lora_rank") else key + value
    return Heads(
        kv_values=sum(kv_heads) * kept,
        flop_per_pair=2 * sum(count > 0 for count in kv_heads) * heads * (key + value),
        experts_used=of("expert_used_count", 1),
        experts=of("expert_count", 1),
    )


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
