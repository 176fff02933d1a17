"""Models of embeddings: the decoder, pooling and dense layers behind it drawn anew, against sentence-transformers."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import torch
from common import EXACT, Case, Comparison, Config, draw_model, largest, load_engine, read_json, save_model, write_json
from goldens import GOLDEN
from safetensors.torch import save_file
from sentence_transformers import SentenceTransformer
from transformers import AutoModel

from mistral_paged import EmbeddingRequest, Which

EMBED = GOLDEN / "embed"
BOUND = 5e-4

CHOICES = {
    "head_dim": (16, 24, 32, 64),
    "hidden_size": (32, 64, 96),
    "intermediate_size": (32, 64, 96),
    "num_hidden_layers": (1, 2, 3, 4, 5),
    "sliding_window": (4, 9, 24, 33, 64),
    "sliding_window_pattern": (2, 3, 6),
    "query_pre_attn_scalar": (16, 32, 50),
}
HEADS = [(4, 1), (6, 2), (3, 3), (2, 1)]
POOLINGS = ("pooling_mode_mean_tokens", "pooling_mode_lasttoken", "pooling_mode_cls_token")
ACTIVATIONS = ("torch.nn.modules.linear.Identity", "torch.nn.modules.activation.Tanh")
DENSE_WIDTHS = (16, 48, 80)


def families() -> list[str]:
    return sorted(path.name for path in EMBED.iterdir() if path.is_dir())


def draw_config(case: Case) -> Config:
    """The configuration of the decoder."""
    config = read_json(EMBED / case.family / "config.json")
    for key, choices in CHOICES.items():
        if config.get(key) is not None:
            config[key] = case.random.choice(choices)
    config["num_attention_heads"], config["num_key_value_heads"] = case.random.choice(HEADS)
    if config.get("layer_types"):
        kinds = sorted(set(config["layer_types"]))
        config["layer_types"] = [case.random.choice(kinds) for _ in range(config["num_hidden_layers"])]
    return config


def draw_pooling(case: Case, folder: Path, width: int) -> int:
    """One way of pooling; the width stays."""
    config = read_json(folder / "config.json")
    config |= dict.fromkeys([key for key in config if key.startswith("pooling_mode_")], False)
    config |= {"word_embedding_dimension": width, case.random.choice(POOLINGS): True}
    write_json(folder / "config.json", config)
    return width


def draw_dense(case: Case, folder: Path, width: int) -> int:
    """A layer to another width, with or without a bias and an activation."""
    config = read_json(folder / "config.json")
    config |= {"in_features": width, "out_features": case.random.choice(DENSE_WIDTHS)}
    config |= {"bias": case.random.random() < 0.5, "activation_function": case.random.choice(ACTIVATIONS)}
    write_json(folder / "config.json", config)
    outputs = config["out_features"]
    weights = {"linear.weight": 0.3 * torch.randn(outputs, width, generator=case.generator)}
    if config["bias"]:
        weights["linear.bias"] = 0.2 * torch.randn(outputs, generator=case.generator)
    save_file(weights, folder / "model.safetensors")
    return outputs


DRAWS = {"Pooling": draw_pooling, "Dense": draw_dense}


def draw_folder(case: Case) -> None:
    """A folder as sentence-transformers keeps it, of a model drawn anew."""
    ignored = shutil.ignore_patterns("golden.json", "model.safetensors")
    shutil.copytree(EMBED / case.family, case.folder, ignore=ignored, dirs_exist_ok=True, copy_function=shutil.copyfile)
    model = draw_model(case, lambda: draw_config(case), AutoModel)
    save_model(case, model, case.random.random() < 0.5)
    width = case.configuration["hidden_size"]
    for module in read_json(case.folder / "modules.json"):
        draw = DRAWS.get(module["type"].rsplit(".", 1)[-1])
        if draw is not None:
            width = draw(case, case.folder / module["path"], width)
    modules = {path.parent.name: read_json(path) for path in sorted(case.folder.glob("*_*/config.json"))}
    case.configuration = {"model": case.configuration, **modules}


def encode(model: Any, texts: list[str]) -> torch.Tensor:
    return model.encode(texts, normalize_embeddings=False, convert_to_tensor=True)


def compare(case: Case) -> Comparison:
    """One model of the family against sentence-transformers."""
    draw_folder(case)
    texts = [entry["input"] for entry in read_json(EMBED / case.family / "golden.json")["embeddings"]]
    settings = {"dtype": torch.float32, "attn_implementation": "eager"}
    reference = SentenceTransformer(str(case.folder), device="cpu", model_kwargs=settings)
    expected = encode(reference, texts)
    runner = load_engine(case, Which.Embedding(str(case.folder), dtype=EXACT))
    told = torch.tensor(runner.send_embedding_request(EmbeddingRequest(texts)))
    found = Comparison(largest([told - expected]), BOUND)
    if not found.agrees:
        found.in_float64 = largest([encode(reference.double(), texts) - expected])
    return found
