"""Makes goldens of encoders, whose weights are drawn from their names (tests/drawn.py), by sentence-transformers.

    python tests/drawn_encoders.py    makes tests/data/golden/encoders and packs it

It needs torch, Transformers and sentence-transformers.
"""

from __future__ import annotations

import json
import shutil
import tempfile
from pathlib import Path
from typing import Any

from drawn import drawn_weight, pack
from goldens import GOLDEN, unpack

ENCODERS = GOLDEN / "encoders"
DIGITS = 5
TEXTS = [
    "A crab.",
    "Where do crabs live, and what do they eat?",
    "It rained on the harbour all night, and the boats lay still. The keeper of the lighthouse wrote in his diary: a café, "
    "three letters, no ship; the wind went round to the north-east before dawn. " * 2,
    "Größe, naïveté, 東京 und 3.14!",
]
QUERY = "Where do crabs live?"
SIZES = {"hidden_size": 64, "num_attention_heads": 4, "intermediate_size": 96, "num_hidden_layers": 3}
BERT = {**SIZES, "model_type": "bert", "max_position_embeddings": 160, "type_vocab_size": 2, "hidden_act": "gelu"}
MODERN = {
    **SIZES,
    "model_type": "modernbert",
    "num_hidden_layers": 4,
    "max_position_embeddings": 256,
    "local_attention": 16,
    "global_attn_every_n_layers": 3,
    "reference_compile": False,
    "classifier_pooling": "mean",
}
GTE = {**SIZES, "model_type": "gte", "num_hidden_layers": 2, "max_position_embeddings": 256, "type_vocab_size": 1}
MODELS: dict[str, dict[str, Any]] = {
    "bert": BERT,
    "xlm-roberta": {**BERT, "model_type": "xlm-roberta", "max_position_embeddings": 162, "type_vocab_size": 1},
    "roberta": {**BERT, "model_type": "roberta", "max_position_embeddings": 161, "type_vocab_size": 1},
    "distilbert": {
        "model_type": "distilbert",
        "dim": 64,
        "n_heads": 4,
        "hidden_dim": 96,
        "n_layers": 2,
        "max_position_embeddings": 160,
    },
    "nomic": {**SIZES, "model_type": "nomic_bert", "max_position_embeddings": 256, "type_vocab_size": 2},
    "modernbert": MODERN,
    "eurobert": {**SIZES, "model_type": "eurobert", "num_key_value_heads": 2, "max_position_embeddings": 256},
    "gte": GTE,
    "jina3": {**GTE, "model_type": "jina_embeddings_v3"},
}
"""Of vectors."""
SCORERS: dict[str, dict[str, Any]] = {
    "bert-rerank": BERT,
    "xlm-roberta-rerank": MODELS["xlm-roberta"],
    "distilbert-rerank": MODELS["distilbert"],
    "modernbert-rerank": MODERN,
    "gte-rerank": GTE,
    "qwen3-rerank": {**SIZES, "model_type": "qwen3", "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 256},
}
"""Of pairs."""
TEMPLATE = (
    "[CLS]{% for message in messages %}{% if message.role == 'system' %}{{ message.content }} {% endif %}{% endfor %}"
    "{{ messages | selectattr('role', 'eq', 'query') | map(attribute='content') | first }}[SEP]"
    "{{ messages | selectattr('role', 'eq', 'document') | map(attribute='content') | first }}[SEP] {{ asked }}"
    "{% if add_generation_prompt %} crabs{% endif %}"
)
ANSWERERS: dict[str, dict[str, Any]] = {
    "qwen3-logit-rerank": {**SCORERS["qwen3-rerank"], "tie_word_embeddings": True},
    "gemma2-logit-rerank": {
        **SCORERS["qwen3-rerank"],
        "model_type": "gemma2",
        "query_pre_attn_scalar": 16,
        "sliding_window": 16,
        "final_logit_softcapping": 2.0,
        "tie_word_embeddings": False,
    },
}
"""Of pairs, by the logits of one token or two: the first with a chat template, as Qwen3-Reranker has it."""
POOLING = {
    "bert": "mean",
    "xlm-roberta": "cls",
    "roberta": "mean",
    "distilbert": "mean",
    "nomic": "mean",
    "modernbert": "cls",
    "eurobert": "mean",
    "gte": "cls",
    "jina3": "mean",
}


def tokenizer_of(model_type: str, folder: Path) -> None:
    """A small tokenizer as such models have, trained on the texts."""
    import transformers
    from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

    if model_type == "xlm-roberta":
        specials = ["<s>", "<pad>", "</s>", "<unk>", "<mask>"]
        tokenizer = Tokenizer(models.Unigram())
        tokenizer.normalizer = normalizers.NFKC()
        tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
        tokenizer.decoder = decoders.Metaspace()
        trainer = trainers.UnigramTrainer(vocab_size=200, special_tokens=specials, unk_token="<unk>", show_progress=False)
        first, last, between = "<s>", "</s>", "</s> </s>"
        names = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>", "pad_token": "<pad>", "mask_token": "<mask>"}
    else:
        specials = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
        tokenizer = Tokenizer(models.WordPiece(unk_token="[UNK]"))
        tokenizer.normalizer = normalizers.BertNormalizer(lowercase=True)
        tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
        tokenizer.decoder = decoders.WordPiece()
        trainer = trainers.WordPieceTrainer(vocab_size=200, special_tokens=specials, show_progress=False)
        first, last, between = "[CLS]", "[SEP]", "[SEP]"
        names = {"cls_token": "[CLS]", "sep_token": "[SEP]", "unk_token": "[UNK]", "pad_token": "[PAD]", "mask_token": "[MASK]"}
    tokenizer.train_from_iterator(TEXTS, trainer)
    second = 0 if model_type == "xlm-roberta" else 1
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{first} $A {last}",
        pair=f"{first} $A {between} $B:{second} {last}:{second}",
        special_tokens=[(token, tokenizer.token_to_id(token)) for token in {first, last}],
    )
    inputs = ["input_ids", "attention_mask"] + (["token_type_ids"] if second and model_type == "bert" else [])
    fast = transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, model_input_names=inputs, **names)
    fast.model_max_length = 150
    fast.save_pretrained(folder)


def draw(folder: Path) -> dict[str, list[int]]:
    """Gives a checkpoint drawn weights in the place of its own; the names and shapes."""
    from safetensors import safe_open
    from safetensors.numpy import save_file

    path = folder / "model.safetensors"
    with safe_open(path, "np") as tensors:
        shapes = {name: list(tensors.get_slice(name).get_shape()) for name in sorted(tensors.keys())}
    save_file({name: drawn_weight(name, shape, name.lower()) for name, shape in shapes.items()}, path, {"format": "pt"})
    return shapes


def checkpoint(config: dict[str, Any], classes: Any, folder: Path) -> dict[str, list[int]]:
    import transformers

    tokenizer_of(config["model_type"], folder)
    size = len(json.loads((folder / "tokenizer.json").read_text())["model"]["vocab"])
    kind = transformers.AutoConfig.for_model(**config, vocab_size=size, pad_token_id=int(config["model_type"] == "xlm-roberta"))
    classes.from_config(kind, attn_implementation="eager").save_pretrained(folder)
    return draw(folder)


def keep(folder: Path, name: str, shapes: dict[str, list[int]], golden: Any) -> None:
    """All but the weights."""
    target = ENCODERS / name
    shutil.rmtree(target, ignore_errors=True)
    shutil.copytree(folder, target, ignore=shutil.ignore_patterns("*.safetensors", "README.md", "*.bin"))
    for file, value in [("tensors.json", shapes), ("golden.json", golden)]:
        (target / file).write_text(json.dumps(value, separators=(",", ":"), ensure_ascii=False) + "\n")
    for file in target.rglob("*.json"):
        file.write_text(json.dumps(json.loads(file.read_text()), separators=(",", ":"), ensure_ascii=False) + "\n")


def embedder(name: str) -> None:
    import transformers
    from sentence_transformers import SentenceTransformer
    from sentence_transformers.models import Normalize, Pooling, Transformer

    with tempfile.TemporaryDirectory() as plain, tempfile.TemporaryDirectory() as saved:
        shapes = checkpoint(MODELS[name], transformers.AutoModel, Path(plain))
        transformer = Transformer(plain)
        pooling = Pooling(transformer.get_word_embedding_dimension(), POOLING[name])
        model = SentenceTransformer(modules=[transformer, pooling, Normalize()], device="cpu")
        model.max_seq_length = 150
        model.save(saved)
        vectors = model.encode(TEXTS, convert_to_numpy=True)
        ids = [[int(id) for id in model.tokenizer(text, truncation=True, max_length=150)["input_ids"]] for text in TEXTS]
        golden = [
            {"input": text, "ids": own, "vector": [round(float(value), DIGITS) for value in vector]}
            for text, own, vector in zip(TEXTS, ids, vectors, strict=True)
        ]
        keep(Path(saved), name, shapes, golden)


def scores(model: Any, ids: list[list[int]], types: list[list[int]]) -> dict[str, Any]:
    from torch.nn import Identity

    pairs = [(QUERY, text) for text in TEXTS]
    golden: dict[str, Any] = {"query": QUERY, "documents": TEXTS}
    golden["scores"] = [round(float(score), DIGITS) for score in model.predict(pairs)]
    golden["logits"] = [round(float(score), DIGITS) for score in model.predict(pairs, activation_fn=Identity())]
    return {**golden, "ids": ids, "types": types}


def scorer(name: str) -> None:
    import transformers
    from sentence_transformers import CrossEncoder
    from torch.nn import Identity

    with tempfile.TemporaryDirectory() as plain, tempfile.TemporaryDirectory() as saved:
        config = {**SCORERS[name], "num_labels": 1}
        shapes = checkpoint(config, transformers.AutoModelForSequenceClassification, Path(plain))
        model = CrossEncoder(plain, device="cpu")
        encoded = [model.tokenizer(QUERY, text, truncation=True, max_length=150) for text in TEXTS]
        ids = [[int(id) for id in one["input_ids"]] for one in encoded]
        types = [[int(id) for id in one.get("token_type_ids", [0] * len(one["input_ids"]))] for one in encoded]
        golden = scores(model, ids, types)
        if name == "bert-rerank":
            # As those of MS MARCO are.
            model.activation_fn = Identity()
        model.save(saved)
        keep(Path(saved), name, shapes, golden)


def answerer(name: str) -> None:
    import transformers
    from sentence_transformers import CrossEncoder
    from sentence_transformers.base.modules import Transformer
    from sentence_transformers.cross_encoder.modules import LogitScore
    from torch.nn import Identity

    with tempfile.TemporaryDirectory() as plain, tempfile.TemporaryDirectory() as saved:
        shapes = checkpoint(ANSWERERS[name], transformers.AutoModelForCausalLM, Path(plain))
        is_chat = name.startswith("qwen3")
        options: dict[str, Any] = {}
        if is_chat:
            tokenizer = transformers.AutoTokenizer.from_pretrained(plain)
            tokenizer.chat_template = TEMPLATE
            tokenizer.save_pretrained(plain)
            variables = {"add_generation_prompt": True, "asked": "What do they eat?"}
            options["processing_kwargs"] = {"chat_template": variables}
        transformer = Transformer(plain, transformer_task="text-generation", **options)
        yes, no = (transformer.tokenizer.convert_tokens_to_ids(token) for token in ("the", "crab"))
        score = LogitScore(yes, no if is_chat else None)
        model = CrossEncoder(
            modules=[transformer, score], prompts={"query": "The crab: "}, default_prompt_name="query", device="cpu"
        )
        encoded = [model.preprocess([(QUERY, text)], prompt="The crab: ")["input_ids"][0].tolist() for text in TEXTS]
        golden = scores(model, encoded, [[0] * len(ids) for ids in encoded])
        if is_chat:
            model.activation_fn = Identity()
        model.save(saved)
        keep(Path(saved), name, shapes, golden)


def main() -> None:
    unpack()
    for name in MODELS:
        embedder(name)
    for name in SCORERS:
        scorer(name)
    for name in ANSWERERS:
        answerer(name)
    pack(ENCODERS)


if __name__ == "__main__":
    main()
