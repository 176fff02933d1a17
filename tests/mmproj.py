"""The tiny Qwen3-VL and Voxtral as two GGUF files each, as llama.cpp's converter writes them: language model and encoder."""

from __future__ import annotations

import json
import struct
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
SOUNDS = {
    "audio_tower.embed_positions": "a.position_embd",
    "audio_tower.layer_norm": "a.post_ln",
    "audio_tower.conv": "a.conv1d.",
    "audio_tower.layers.": "a.blk.",
    "self_attn_layer_norm": "ln1",
    "final_layer_norm": "ln2",
    "self_attn.out_proj": "attn_out",
    "self_attn.": "attn_",
    "_proj.": ".",
    "fc1": "ffn_up",
    "fc2": "ffn_down",
    "multi_modal_projector.linear_": "mm.a.mlp.",
}


def read(folder: Path, file: str = "model.safetensors") -> Tensors:
    """The tensors of a folder, bfloat16 or float32, by name."""
    data = (folder / file).read_bytes()
    end = 8 + struct.unpack("<Q", data[:8])[0]
    tensors = {}
    for name, info in json.loads(data[8:end]).items():
        if name != "__metadata__":
            first, last = (end + offset for offset in info["data_offsets"])
            if info["dtype"] == "F32":
                values = np.frombuffer(data[first:last], np.float32)
            else:
                values = (np.frombuffer(data[first:last], np.uint16).astype(np.uint32) << 16).view(np.float32)
            tensors[name] = values.reshape(info["shape"])
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


def paired(values: np.ndarray, heads: int) -> np.ndarray:
    """As the converter orders the rows of heads of a Llama: those that rotate together beside each other."""
    return values.reshape(heads, 2, -1, values.shape[1]).swapaxes(1, 2).reshape(values.shape)


def language(folder: Path, path: Path) -> None:
    """Writes the language model's file."""
    config, tokenizer = (json.loads((folder / name).read_text()) for name in ("config.json", "tokenizer.json"))
    config = config["text_config"]
    arch = {"llama": "llama", "qwen3_vl_text": "qwen3vl"}[config["model_type"]]
    sections = config["rope_parameters"].get("mrope_section")
    tokens, types = [f"[PAD{i}]" for i in range(640)], [5] * 640
    for token, i in tokenizer["model"]["vocab"].items():
        tokens[i], types[i] = token, 1
    for added in tokenizer["added_tokens"]:
        tokens[added["id"]], types[added["id"]] = added["content"], 3
    entries = {
        "general.architecture": arch,
        f"{arch}.block_count": config["num_hidden_layers"],
        f"{arch}.context_length": 2048,
        f"{arch}.embedding_length": config["hidden_size"],
        f"{arch}.feed_forward_length": config["intermediate_size"],
        f"{arch}.attention.head_count": config["num_attention_heads"],
        f"{arch}.attention.head_count_kv": config["num_key_value_heads"],
        f"{arch}.attention.key_length": config["head_dim"],
        f"{arch}.attention.value_length": config["head_dim"],
        f"{arch}.attention.layer_norm_rms_epsilon": config["rms_norm_eps"],
        f"{arch}.rope.freq_base": config["rope_parameters"]["rope_theta"],
        **({f"{arch}.rope.dimension_sections": [*sections, 0]} if sections else {}),
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "gpt-2",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": types,
        "tokenizer.ggml.merges": [" ".join(pair) for pair in tokenizer["model"]["merges"]],
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.chat_template": (folder / "chat_template.jinja").read_text(),
    }
    tensors = {}
    for old, values in read(folder).items():
        if "language_model." not in old:
            continue
        rest = old.split("language_model.")[1].removeprefix("model.")
        name = {"norm.weight": "output_norm.weight", "lm_head.weight": "output.weight"}.get(rest) or renamed(rest, LANGUAGE)
        heads = {"attn_q.weight": "num_attention_heads", "attn_k.weight": "num_key_value_heads"}.get(name.split(".", 2)[-1])
        tensors[name] = paired(values, config[heads]) if arch == "llama" and heads else values
    write(path, entries, tensors)


def sounds(folder: Path, path: Path) -> None:
    """Writes the file of Voxtral's encoder of sounds."""
    config = json.loads((folder / "config.json").read_text())
    audio = config["audio_config"]
    entries = {
        "general.architecture": "clip",
        "clip.has_audio_encoder": True,
        "clip.projector_type": "voxtral",
        "clip.audio.projection_dim": config["text_config"]["hidden_size"],
        "clip.audio.embedding_length": audio["hidden_size"],
        "clip.audio.feed_forward_length": audio["intermediate_size"],
        "clip.audio.block_count": audio["num_hidden_layers"],
        "clip.audio.attention.head_count": audio["num_attention_heads"],
        "clip.audio.attention.layer_norm_epsilon": 1e-5,
        "clip.audio.num_mel_bins": audio["num_mel_bins"],
        "clip.audio.projector.stack_factor": audio["intermediate_size"] // audio["hidden_size"],
    }
    tensors = {}
    for old, values in read(folder).items():
        if "language_model." not in old:
            name = renamed(old, SOUNDS)
            tensors[name] = values[:, None] if name.startswith("a.conv1d") and name.endswith("bias") else values
    write(path, entries, tensors)


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
