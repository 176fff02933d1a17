"""A llama, or a mixture of experts, of random weights as a folder of Hugging Face's files, written with numpy alone."""

from __future__ import annotations

import json
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

CHUNK = 1 << 24
"""Random values that the matrices are made of, again and again; their bits do not matter, only that they are not zeros."""


def network(name: str, hidden: int, wide: int) -> dict[str, tuple[int, ...]]:
    """A gated feed-forward network."""
    return {f"{name}.gate_proj": (wide, hidden), f"{name}.up_proj": (wide, hidden), f"{name}.down_proj": (hidden, wide)}


def shapes(config: dict[str, int]) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Names and shapes of the tensors: of a Qwen3-MoE where there are experts, else of a llama."""
    hidden, num_experts = config["hidden_size"], config.get("num_experts", 0)
    head_dim = config.get("head_dim", hidden // config["num_attention_heads"])
    q, kv = (head_dim * config[f"num_{name}_heads"] for name in ("attention", "key_value"))
    yield "model.embed_tokens.weight", (config["vocab_size"], hidden)
    for layer in range(config["num_hidden_layers"]):
        tensors: dict[str, tuple[int, ...]] = {
            "input_layernorm": (hidden,),
            "self_attn.q_proj": (q, hidden),
            "self_attn.k_proj": (kv, hidden),
            "self_attn.v_proj": (kv, hidden),
            "self_attn.o_proj": (hidden, q),
            "post_attention_layernorm": (hidden,),
        }
        if num_experts:
            tensors |= {"self_attn.q_norm": (head_dim,), "self_attn.k_norm": (head_dim,), "mlp.gate": (num_experts, hidden)}
            for expert in range(num_experts):
                tensors |= network(f"mlp.experts.{expert}", hidden, config["moe_intermediate_size"])
        else:
            tensors |= network("mlp", hidden, config["intermediate_size"])
        for name, shape in tensors.items():
            yield f"model.layers.{layer}.{name}.weight", shape
    yield "model.norm.weight", (hidden,)
    yield "lm_head.weight", (config["vocab_size"], hidden)


def bfloat16(values: np.ndarray[Any, np.dtype[np.float32]]) -> bytes:
    """The upper halves, which is rounding towards zero."""
    return (values.view(np.uint32) >> 16).astype(np.uint16).tobytes()


def roomy_folder(needed_bytes: int) -> Path:
    """A new folder in memory if it has room for as many bytes and as many again, else where temporary files go."""
    shared = Path("/dev/shm")
    fits = shared.is_dir() and shutil.disk_usage(shared).free > 2 * needed_bytes
    return Path(tempfile.mkdtemp(prefix="mistral-paged-", dir=shared if fits else None))


def write(folder: Path, config: dict[str, int]) -> None:
    """config.json, tokenizer.json and model.safetensors of bf16."""
    fields: dict[str, Any] = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_act": "silu",
        "torch_dtype": "bfloat16",
    }
    if "num_experts" in config:
        fields |= {"architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "norm_topk_prob": True}
    fields |= {"max_position_embeddings": 32768, "rms_norm_eps": 1e-5, "rope_theta": 500000.0, "tie_word_embeddings": False}
    (folder / "config.json").write_text(json.dumps({**fields, **config}))
    vocabulary = {f"<{index}>": index for index in range(config["vocab_size"])}
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
    model = {"type": "BPE", "vocab": vocabulary, "merges": []}
    tokenizer = {"version": "1.0", "pre_tokenizer": byte_level, "decoder": byte_level, "model": model}
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))

    header: dict[str, Any] = {}
    end = 0
    for name, shape in shapes(config):
        start, end = end, end + 2 * int(np.prod(shape))
        header[name] = {"dtype": "BF16", "shape": shape, "data_offsets": [start, end]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    # Matrices that keep the size of what they multiply, and norms of ones.
    random = np.random.default_rng(0).standard_normal(CHUNK, np.float32) * np.float32(config["hidden_size"] ** -0.5)
    matrix, ones = memoryview(bfloat16(random)), bfloat16(np.ones(max(config.values()), np.float32))
    with (folder / "model.safetensors").open("wb", buffering=0) as out:
        out.write(len(text).to_bytes(8, "little") + text)
        for _, shape in shapes(config):
            left = 2 * int(np.prod(shape))
            if len(shape) == 1:
                out.write(ones[:left])
            else:
                while left > 0:
                    left -= out.write(matrix[: min(left, len(matrix))])
