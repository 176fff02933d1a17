"""The tiny Qwen3-VL as two GGUF files, as llama.cpp's converter writes them: its language model, and its image encoder."""

from __future__ import annotations

import json
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

Tensors = dict[str, np.ndarray]

LANGUAGE = {
    "layers.": "blk.",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.o_proj": "attn_output",
    "self_attn.": "attn_",
    "mlp.": "ffn_",
    "_proj": "",
    "embed_tokens": "token_embd",
}
ENCODER = {
    "patch_embed.proj": "patch_embd",
    "pos_embed": "position_embd",
    "blocks.": "blk.",
    "norm1": "ln1",
    "norm2": "ln2",
    "attn.proj": "attn_out",
    "attn.qkv": "attn_qkv",
    "mlp.linear_fc1": "ffn_up",
    "mlp.linear_fc2": "ffn_down",
    "deepstack_merger_list.": "deepstack.",
    "merger.norm": "post_ln",
    "v.merger.linear_fc1": "mm.0",
    "v.merger.linear_fc2": "mm.2",
    "linear_fc": "fc",
}


def read(folder: Path, file: str = "model.safetensors") -> Tensors:
    """The tensors of a folder, which are bfloat16, by name."""
    data = (folder / file).read_bytes()
    end = 8 + struct.unpack("<Q", data[:8])[0]
    tensors = {}
    for name, info in json.loads(data[8:end]).items():
        if name != "__metadata__":
            first, last = (end + offset for offset in info["data_offsets"])
            values = np.frombuffer(data[first:last], np.uint16).astype(np.uint32) << 16
            tensors[name] = values.view(np.float32).reshape(info["shape"])
    return tensors


def text(value: str) -> bytes:
    return struct.pack("<Q", len(value.encode())) + value.encode()


def typed(value: Any) -> tuple[int, bytes]:
    """The number of a value's type, and its bytes."""
    match value:
        case bool():
            return 7, struct.pack("<B", value)
        case int():
            return 5, struct.pack("<i", value)
        case float():
            return 6, struct.pack("<f", value)
        case str():
            return 8, text(value)
    parts = [typed(part) for part in value]
    return 9, struct.pack("<IQ", parts[0][0], len(parts)) + b"".join(data for _, data in parts)


def write(path: Path, entries: dict[str, Any], tensors: Tensors) -> None:
    """A GGUF file of 32-bit floats."""
    out = b"GGUF" + struct.pack("<IQQ", 3, len(tensors), len(entries))
    for key, value in entries.items():
        kind, data = typed(value)
        out += text(key) + struct.pack("<I", kind) + data
    body = b""
    for name, values in tensors.items():
        out += text(name) + struct.pack(f"<I{values.ndim}Q", values.ndim, *reversed(values.shape))
        out += struct.pack("<IQ", 0, len(body))
        body += values.astype("<f4").tobytes()
        body += bytes(-len(body) % 32)
    path.write_bytes(out + bytes(-len(out) % 32) + body)


def renamed(name: str, rules: dict[str, str]) -> str:
    for old, new in rules.items():
        name = name.replace(old, new)
    return name


def language(folder: Path, path: Path) -> None:
    """Writes the language model's file."""
    config, tokenizer = (json.loads((folder / name).read_text()) for name in ("config.json", "tokenizer.json"))
    config = config["text_config"]
    tokens, types = [f"[PAD{i}]" for i in range(640)], [5] * 640
    for token, i in tokenizer["model"]["vocab"].items():
        tokens[i], types[i] = token, 1
    for added in tokenizer["added_tokens"]:
        tokens[added["id"]], types[added["id"]] = added["content"], 3
    entries = {
        "general.architecture": "qwen3vl",
        "qwen3vl.block_count": config["num_hidden_layers"],
        "qwen3vl.context_length": 2048,
        "qwen3vl.embedding_length": config["hidden_size"],
        "qwen3vl.feed_forward_length": config["intermediate_size"],
        "qwen3vl.attention.head_count": config["num_attention_heads"],
        "qwen3vl.attention.head_count_kv": config["num_key_value_heads"],
        "qwen3vl.attention.key_length": config["head_dim"],
        "qwen3vl.attention.layer_norm_rms_epsilon": config["rms_norm_eps"],
        "qwen3vl.rope.freq_base": config["rope_parameters"]["rope_theta"],
        "qwen3vl.rope.dimension_sections": [*config["rope_parameters"]["mrope_section"], 0],
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "gpt-2",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": types,
        "tokenizer.ggml.merges": [" ".join(pair) for pair in tokenizer["model"]["merges"]],
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.chat_template": (folder / "chat_template.jinja").read_text(),
    }
    prefix = "model.language_model."
    tensors = {name.removeprefix(prefix): values for name, values in read(folder).items() if name.startswith(prefix)}
    name: Callable[[str], str] = lambda name: "output_norm.weight" if name == "norm.weight" else renamed(name, LANGUAGE)  # noqa: E731
    write(path, entries, {name(old): values for old, values in tensors.items()})


def encoder(folder: Path, path: Path) -> None:
    """Writes the image encoder's file."""
    config, processor = (json.loads((folder / name).read_text()) for name in ("config.json", "preprocessor_config.json"))
    vision = config["vision_config"]
    deep = vision["deepstack_visual_indexes"]
    entries = {
        "general.architecture": "clip",
        "clip.has_vision_encoder": True,
        "clip.projector_type": "qwen3vl_merger",
        "clip.use_gelu": True,
        "clip.vision.image_size": round(vision["num_position_embeddings"] ** 0.5) * vision["patch_size"],
        "clip.vision.patch_size": vision["patch_size"],
        "clip.vision.embedding_length": vision["hidden_size"],
        "clip.vision.feed_forward_length": vision["intermediate_size"],
        "clip.vision.projection_dim": vision["out_hidden_size"],
        "clip.vision.block_count": vision["depth"],
        "clip.vision.attention.head_count": vision["num_heads"],
        "clip.vision.attention.layer_norm_epsilon": 1e-6,
        "clip.vision.spatial_merge_size": vision["spatial_merge_size"],
        "clip.vision.is_deepstack_layers": [layer in deep for layer in range(vision["depth"])],
        "clip.vision.image_mean": processor["image_mean"],
        "clip.vision.image_std": processor["image_std"],
        "clip.vision.image_min_pixels": processor["size"]["shortest_edge"],
        "clip.vision.image_max_pixels": processor["size"]["longest_edge"],
    }
    tensors = {}
    for old, values in read(folder).items():
        if "visual." in old:
            name = renamed("v." + old.split("visual.")[1], ENCODER)
            if name == "v.patch_embd.weight":
                tensors |= {name: values[:, :, 0], name + ".1": values[:, :, 1]}
            else:
                tensors[name] = values
    # Layers count from the beginning of the encoder there.
    numbered = {f"v.deepstack.{number}.": f"v.deepstack.{layer}." for number, layer in enumerate(deep)}
    write(path, entries, {renamed(name, numbered): values for name, values in tensors.items()})
