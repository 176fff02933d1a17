"""What benches/gpu.py measures, and the bytes and operations of each: lists of plain dicts, which `mistral_paged._core` takes."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

Work = dict[str, Any]

ELEMENT_BYTES = {"f32": 4, "f16": 2, "bf16": 2, "f8e4m3": 1, "int8": 1}
SCALE_BYTES = {"f8e4m3": 2, "int8": 2}
"""Of a token and KV head, of keys and of values each."""
WEIGHT_BYTES = {"F32": 4.0, "F16": 2.0, "BF16": 2.0, "Q4_0": 18 / 32, "Q8_0": 34 / 32, "Q4_K": 144 / 256, "Q6_K": 210 / 256}

BATCHES = [1, 2, 4, 8, 16, 32, 64, 128, 256]
CONTEXTS = [512, 2048, 4096, 8192, 32768]
BASE: Work = {
    "kind": "attention",
    "batch": 32,
    "context": 4096,
    "queries_per_kv": 8,
    "head_dim": 128,
    "cache": "bf16",
    "block_size": 16,
}
"""The goal's shape, of 8 KV heads."""
KV_HEADS = 8
SMALL: Work = {**BASE, "batch": 1, "context": 512}

MATRICES = {
    "k or v": (1024, 4096),
    "q, k, v": (6144, 4096),
    "gate and up": (28672, 4096),
    "down": (4096, 14336),
    "output": (128256, 4096),
}
"""Of Llama-3-8B, as (out_features, in_features)."""
FEW_ROWS = [1, 2, 4, 8]
MANY_ROWS = [16, 64, 256, 1024, 4096]


def attention_works(memory_bytes: float) -> list[Work]:
    """Decoding over batches and contexts, and the base shape with one property changed at a time, as far as memory goes."""
    grid = [{**BASE, "batch": batch, "context": context} for context in CONTEXTS for batch in BATCHES]
    changes: dict[str, list[Any]] = {
        "queries_per_kv": [1, 2, 4, 16],
        "head_dim": [64, 80, 96, 112, 192, 256],
        "cache": ["f16", "f8e4m3", "int8", "f32"],
        "block_size": [8, 32],
    }
    changed = [{**BASE, name: value} for name, values in changes.items() for value in values]
    small = [{**SMALL, "cache": cache} for cache in ("f8e4m3", "int8")]
    return [work for work in [*grid, *changed, *small] if kv_bytes(work) <= memory_bytes]


def linear_works() -> Iterator[Work]:
    """Products with few rows in several formats, with many in bf16."""
    for name, (out_features, in_features) in MATRICES.items():
        shape = {"kind": "linear", "name": name, "out_features": out_features, "in_features": in_features}
        for rows in [*FEW_ROWS, *MANY_ROWS]:
            yield {**shape, "rows": rows, "format": "BF16"}
    # Up to 32 rows of a quantized weight are for one reading of it, up to 256 for tiles, and for more it is taken apart.
    for name, forms in {"down": ("Q4_0", "Q8_0", "Q4_K", "Q6_K"), "k or v": ("Q4_K",)}.items():
        out_features, in_features = MATRICES[name]
        shape = {"kind": "linear", "name": name, "out_features": out_features, "in_features": in_features}
        for form in forms:
            for rows in (1, 8, 16, 32, 64, 128, 256, 1024):
                yield {**shape, "rows": rows, "format": form}


def kv_bytes(work: Work) -> float:
    """Keys and values that one run of attention reads."""
    vector = work["head_dim"] * ELEMENT_BYTES[work["cache"]] + SCALE_BYTES.get(work["cache"], 0)
    return float(2 * work["batch"] * work["context"] * KV_HEADS * vector)


def moved_bytes(work: Work) -> float:
    """Bytes that must be read or written: each key and value, query and output once; each weight, input and output once."""
    if work["kind"] == "copy":
        return float(2 * work["bytes"])
    if work["kind"] == "attention":
        return kv_bytes(work) + float(2 * work["batch"] * KV_HEADS * work["queries_per_kv"] * work["head_dim"] * 4)
    weight = work["out_features"] * work["in_features"] * WEIGHT_BYTES[work["format"]]
    return float(weight + 4.0 * work["rows"] * (work["in_features"] + work["out_features"]))


def operations(work: Work) -> float:
    """Multiplications and additions."""
    if work["kind"] == "attention":
        return float(4 * work["batch"] * work["context"] * KV_HEADS * work["queries_per_kv"] * work["head_dim"])
    return float(2 * work["rows"] * work["out_features"] * work["in_features"])


LLAMA_8B: dict[str, int] = {
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "vocab_size": 128256,
}


QWEN3_30B_QUARTER: dict[str, int] = {
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "num_hidden_layers": 12,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "vocab_size": 151936,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "moe_intermediate_size": 768,
}
MODELS = {"Llama-3-8B's shape": LLAMA_8B, "a quarter of Qwen3-30B-A3B's shape": QWEN3_30B_QUARTER}
"""What is measured of models; the second has 12 layers of 48."""


def head_dim(config: dict[str, int]) -> int:
    """Elements of a head."""
    return config.get("head_dim", config["hidden_size"] // config["num_attention_heads"])


def experts_of(config: dict[str, int], batch: int) -> float:
    """Experts of a layer that so many tokens pass, if each chooses any as likely as others."""
    count, chosen = config["num_experts"], config["num_experts_per_tok"]
    return float(count * (1 - (1 - chosen / count) ** batch))


def weight_bytes(config: dict[str, int], batch: int | None = None) -> float:
    """Bytes of bf16 of all matrices but the embedding; for a batch, of those that a step of so many tokens reads."""
    hidden = config["hidden_size"]
    attention = hidden * head_dim(config) * 2 * (config["num_attention_heads"] + config["num_key_value_heads"])
    if "num_experts" in config:
        experts = config["num_experts"] if batch is None else experts_of(config, batch)
        layer = attention + hidden * config["num_experts"] + experts * 3 * hidden * config["moe_intermediate_size"]
    else:
        layer = attention + 3 * hidden * config["intermediate_size"]
    return 2 * (config["num_hidden_layers"] * layer + hidden * config["vocab_size"])


EAGER_BATCHES = [1, 32]
"""Those that are measured without graphs too."""
MODEL_FORMATS = {"BF16": None, "Q4_K": "Q4K"}
"""Of the model's weights, and what Runner is told to make of bf16."""


def step_bytes(config: dict[str, int], batch: int, context: float, form: str = "BF16") -> float:
    """Bytes that a step of so many requests reads of weights in a format, keys and values of bf16 included."""
    kv = 2 * config["num_hidden_layers"] * config["num_key_value_heads"] * head_dim(config) * 2
    return weight_bytes(config, batch) * WEIGHT_BYTES[form] / WEIGHT_BYTES["BF16"] + batch * context * kv
