"""Encoders and cross-encoders with sizes, pooling and labels drawn anew, against sentence-transformers."""

from __future__ import annotations

import shutil
from typing import Any

import torch
from common import EXACT, Case, Comparison, Config, draw_model, largest, load_engine, read_json, save_model, write_json
from goldens import GOLDEN
from sentence_transformers import CrossEncoder, SentenceTransformer
from transformers import AutoModel, AutoModelForCausalLM, AutoModelForSequenceClassification

from mistral_paged import EmbeddingRequest, RerankRequest, Which

ENCODERS = GOLDEN / "encoders"
BOUND = 2e-4

CHOICES: dict[str, tuple[Any, ...]] = {
    "hidden_size": (32, 64, 96),
    "dim": (32, 64, 96),
    "num_attention_heads": (1, 2, 4),
    "n_heads": (1, 2, 4),
    "intermediate_size": (32, 64, 100),
    "hidden_dim": (32, 64, 100),
    "num_hidden_layers": (1, 2, 3, 4, 5),
    "n_layers": (1, 2, 3),
    "hidden_act": ("gelu", "relu", "gelu_new"),
    "activation": ("gelu", "relu"),
    "type_vocab_size": (1, 2, 3),
    "layer_norm_eps": (1e-12, 1e-5, 1e-3),
    "norm_eps": (1e-5, 1e-3),
    "norm_bias": (False, True),
    "attention_bias": (False, True),
    "mlp_bias": (False, True),
    "classifier_bias": (False, True),
    "classifier_pooling": ("cls", "mean"),
    "local_attention": (2, 8, 16, 40, 400),
}
# What such a classifier has no use for, or another meaning.
DECODER = {"hidden_act", "mlp_bias"}
FIXED = {
    "nomic": {"hidden_act"},
    "eurobert": {"hidden_act", "classifier_pooling"},
    "qwen3-rerank": DECODER,
    "qwen3-logit-rerank": DECODER,
    "gemma2-logit-rerank": DECODER,
}


def families() -> list[str]:
    return sorted(path.name for path in ENCODERS.iterdir() if path.is_dir())


def draw_config(case: Case) -> Config:
    config = read_json(ENCODERS / case.family / "config.json")
    for key, choices in CHOICES.items():
        if config.get(key) is not None and key not in FIXED.get(case.family, ()):
            config[key] = case.random.choice(choices)
    if config["model_type"] == "xlm-roberta":
        config["type_vocab_size"] = 1
    if case.family == "bert-rerank":
        # Tokens of the second text have the second kind.
        config["type_vocab_size"] = max(config["type_vocab_size"], 2)
    heads = config.get("num_attention_heads", config.get("n_heads"))
    if config.get("num_key_value_heads") is not None:
        config["num_key_value_heads"] = case.random.choice([n for n in (1, 2, 4) if heads % n == 0])
    if config.get("head_dim") is not None:
        config["head_dim"] = config["hidden_size"] // heads
    if config.get("layer_types"):
        kinds = sorted(set(config["layer_types"]))
        config["layer_types"] = [case.random.choice(kinds) for _ in range(config["num_hidden_layers"])]
    return config


def draw_pooling(case: Case) -> None:
    for path in case.folder.glob("*_Pooling/config.json"):
        width = case.configuration.get("hidden_size", case.configuration.get("dim"))
        modes = ("mean", "cls", "lasttoken")
        write_json(path, read_json(path) | {"embedding_dimension": width, "pooling_mode": case.random.choice(modes)})


def draw_score(case: Case) -> None:
    """Other tokens, whose logits lie apart, as a score; what there is before it and behind."""
    random = case.random
    for path in case.folder.glob("*_LogitScore/config.json"):
        yes, no = random.sample(range(case.configuration["vocab_size"]), 2)
        write_json(path, read_json(path) | {"true_token_id": yes, "false_token_id": random.choice([no, None])})
        path = case.folder / "sentence_bert_config.json"
        config = read_json(path)
        if "processing_kwargs" in config:
            config["processing_kwargs"]["chat_template"]["add_generation_prompt"] = random.random() < 0.5
            write_json(path, config)
        path = case.folder / "config_sentence_transformers.json"
        named = {"default_prompt_name": random.choice(["query", None])}
        write_json(path, read_json(path) | named | {"activation_fn": "torch.nn.modules.linear.Identity"})


def vectors(case: Case, texts: list[str]) -> Comparison:
    reference = SentenceTransformer(str(case.folder), device="cpu", model_kwargs={"dtype": torch.float32})

    def encode() -> torch.Tensor:
        found: torch.Tensor = reference.encode(texts, convert_to_tensor=True)
        return found

    expected = encode()
    runner = load_engine(case, Which.Embedding(str(case.folder), dtype=EXACT))
    told = torch.tensor(runner.send_embedding_request(EmbeddingRequest(texts, truncate_sequence=True)))
    found = Comparison(largest([told - expected]), BOUND)
    if not found.agrees:
        reference.double()
        found.in_float64 = largest([encode() - expected])
    return found


def scores(case: Case, query: str, texts: list[str]) -> Comparison:
    reference = CrossEncoder(str(case.folder), device="cpu", model_kwargs={"dtype": torch.float32})

    def predict() -> torch.Tensor:
        found: torch.Tensor = reference.predict([(query, text) for text in texts], convert_to_tensor=True)
        return found

    expected = predict()
    runner = load_engine(case, Which.Embedding(str(case.folder), dtype=EXACT))
    told = torch.tensor(runner.send_rerank_request(RerankRequest(query, texts, truncate_sequence=True)))
    found = Comparison(largest([told - expected]), BOUND)
    if not found.agrees:
        reference.double()
        found.in_float64 = largest([predict() - expected])
    return found


def compare(case: Case) -> Comparison:
    """One model of the family against sentence-transformers."""
    ignored = shutil.ignore_patterns("golden.json", "tensors.json", "model.safetensors")
    shutil.copytree(ENCODERS / case.family, case.folder, ignore=ignored, dirs_exist_ok=True, copy_function=shutil.copyfile)
    golden = read_json(ENCODERS / case.family / "golden.json")
    scores_pairs = case.family.endswith("-rerank")
    classes = AutoModelForSequenceClassification if scores_pairs else AutoModel
    if "-logit-" in case.family:
        classes = AutoModelForCausalLM
    model = draw_model(case, lambda: draw_config(case), classes)
    save_model(case, model, case.random.random() < 0.5)
    draw_pooling(case)
    draw_score(case)
    if scores_pairs:
        return scores(case, golden["query"], golden["documents"])
    return vectors(case, [entry["input"] for entry in golden])
