"""Random models of families that are not dense, as GGUF files in Q4_K: of the shapes that people use, with fewer layers."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from mistral_paged.default_model import default_model

BLOCK, BLOCK_BYTES = 256, 144
"""Values and bytes of a block of Q4_K."""
Tensors = dict[str, tuple[int, ...]]

QWEN3_MOE: dict[str, Any] = {
    "block_count": 8,
    "context_length": 32_768,
    "embedding_length": 1024,
    "feed_forward_length": 6144,
    "attention.head_count": 16,
    "attention.head_count_kv": 4,
    "attention.key_length": 64,
    "attention.value_length": 64,
    "attention.layer_norm_rms_epsilon": 1e-6,
    "rope.freq_base": 1e6,
    "expert_count": 128,
    "expert_used_count": 8,
    "expert_feed_forward_length": 768,
}
"""Qwen3-30B-A3B with a hidden state half as wide."""

DEEPSEEK2: dict[str, Any] = {
    "block_count": 6,
    "context_length": 32_768,
    "embedding_length": 2048,
    "feed_forward_length": 10_240,
    "attention.head_count": 16,
    "attention.head_count_kv": 1,
    "attention.key_length": 576,
    "attention.value_length": 512,
    "attention.key_length_mla": 192,
    "attention.value_length_mla": 128,
    "attention.kv_lora_rank": 512,
    "attention.layer_norm_rms_epsilon": 1e-6,
    "rope.dimension_count": 64,
    "rope.freq_base": 1e4,
    "leading_dense_block_count": 1,
    "expert_count": 64,
    "expert_used_count": 6,
    "expert_shared_count": 2,
    "expert_feed_forward_length": 1536,
    "expert_weights_scale": 1.0,
}
"""DeepSeek-V2-Lite, whose experts have 1,408 columns, which no block of Q4_K divides."""

LFM2: dict[str, Any] = {
    "block_count": 16,
    "context_length": 32_768,
    "embedding_length": 2048,
    "feed_forward_length": 8192,
    "attention.head_count": 32,
    "attention.head_count_kv": [8 if layer in (2, 5, 8, 10, 12, 14) else 0 for layer in range(16)],
    "attention.layer_norm_rms_epsilon": 1e-5,
    "rope.freq_base": 1e6,
    "shortconv.l_cache": 3,
}
"""LFM2-1.2B."""


def qwen3_moe(_layer: int) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Tensors of a layer."""
    hidden, experts, width = 1024, 128, 768
    yield from {"attn_norm": (hidden,), "ffn_norm": (hidden,), "attn_q_norm": (64,), "attn_k_norm": (64,)}.items()
    yield from {"attn_q": (1024, hidden), "attn_k": (256, hidden), "attn_v": (256, hidden), "attn_output": (hidden, 1024)}.items()
    yield from experts_of(hidden, experts, width)


def experts_of(hidden: int, experts: int, width: int) -> Iterator[tuple[str, tuple[int, ...]]]:
    """A router, and what it chooses from."""
    yield "ffn_gate_inp", (experts, hidden)
    yield from {"ffn_gate_exps": (experts, width, hidden), "ffn_up_exps": (experts, width, hidden)}.items()
    yield "ffn_down_exps", (experts, hidden, width)


def gated(hidden: int, width: int, suffix: str = "") -> Iterator[tuple[str, tuple[int, ...]]]:
    """A dense network."""
    yield from {
        f"ffn_gate{suffix}": (width, hidden),
        f"ffn_up{suffix}": (width, hidden),
        f"ffn_down{suffix}": (hidden, width),
    }.items()


def deepseek2(layer: int) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Tensors of a layer."""
    hidden, heads, rank = 2048, 16, 512
    yield from {"attn_norm": (hidden,), "ffn_norm": (hidden,), "attn_kv_a_norm": (rank,)}.items()
    yield from {"attn_q": (heads * 192, hidden), "attn_kv_a_mqa": (rank + 64, hidden)}.items()
    # 128 columns are no whole block.
    yield from {"attn_k_b:f16": (heads, rank, 128), "attn_v_b": (heads, 128, rank), "attn_output": (hidden, heads * 128)}.items()
    if layer == 0:
        yield from gated(hidden, 10_240)
    else:
        yield from experts_of(hidden, 64, 1536)
        yield from gated(hidden, 2 * 1536, "_shexp")


def lfm2(layer: int) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Tensors of a layer."""
    hidden = 2048
    yield from {"attn_norm": (hidden,), "ffn_norm": (hidden,)}.items()
    if LFM2["attention.head_count_kv"][layer]:
        yield from {"attn_q_norm": (64,), "attn_k_norm": (64,), "attn_q": (2048, hidden), "attn_k": (512, hidden)}.items()
        yield from {"attn_v": (512, hidden), "attn_output": (hidden, 2048)}.items()
    else:
        yield from {"shortconv.conv:f32": (hidden, 3), "shortconv.in_proj": (3 * hidden, hidden)}.items()
        yield "shortconv.out_proj", (hidden, hidden)
    yield from gated(hidden, 8192)


MODELS: dict[str, tuple[dict[str, Any], Callable[[int], Iterator[tuple[str, tuple[int, ...]]]], str]] = {
    "qwen3moe": (QWEN3_MOE, qwen3_moe, "output_norm"),
    "deepseek2": (DEEPSEEK2, deepseek2, "output_norm"),
    "lfm2": (LFM2, lfm2, "token_embd_norm"),
}


def write(path: Path, architecture: str) -> None:
    """A file of one of MODELS, with the tokenizer of the default model."""
    gguf = importlib.import_module("gguf")
    values, layer_of, output_norm = MODELS[architecture]
    writer = gguf.GGUFWriter(path, architecture)
    for key, value in values.items():
        add = (
            writer.add_array if isinstance(value, list) else writer.add_float32 if isinstance(value, float) else writer.add_uint32
        )
        add(f"{architecture}.{key}", value)
    for name, field in gguf.GGUFReader(default_model()).fields.items():
        if name.startswith("tokenizer."):
            writer.add_key_value(name, field.contents(), field.types[0], field.types[-1] if len(field.types) > 1 else None)
            if name == "tokenizer.ggml.tokens":
                vocab_size = len(field.contents())
    hidden = values["embedding_length"]
    tensors: Tensors = {"token_embd": (vocab_size, hidden), output_norm: (hidden,)}
    for layer in range(values["block_count"]):
        tensors |= {f"blk.{layer}.{name}": shape for name, shape in layer_of(layer)}
    random = np.random.default_rng(0)
    for name, shape in tensors.items():
        name, _, kind = name.partition(":")
        name += ".weight"
        if len(shape) == 1:
            writer.add_tensor(name, np.ones(shape, np.float32))
        elif kind or name.endswith("ffn_gate_inp.weight"):
            matrix = random.standard_normal(shape, np.float32) * np.float32(shape[-1] ** -0.5)
            writer.add_tensor(name, matrix.astype(np.float16 if kind == "f16" else np.float32))
        else:
            writer.add_tensor(name, q4_k(random, shape), raw_dtype=gguf.GGMLQuantizationType.Q4_K)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def q4_k(random: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray[Any, Any]:
    """Random blocks whose values have a mean of about 0 and keep the size of what they multiply."""
    blocks = np.frombuffer(random.bytes(int(np.prod(shape)) // BLOCK * BLOCK_BYTES), np.uint8).reshape(-1, BLOCK_BYTES).copy()
    # A value is scale * step * code - least * step, codes of 4 bits and steps of 6: about 150 * scale wide.
    scale = np.float16(shape[-1] ** -0.5 / 150)
    blocks[:, :4] = np.array([scale, np.float16(7.5) * scale], np.float16).view(np.uint8)
    return blocks.reshape(*shape[:-1], -1)
