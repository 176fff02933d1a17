"""Makes goldens of models that hear, whose weights are drawn from their names (rust/engine/tests/common/drawn.rs).

    python tests/drawn_sounds.py    packs tests/data/golden/hearing.tar.xz, by Transformers

Their sounds are drawn as well, as samples of 16 bits. Needs torch and Transformers.
"""

from __future__ import annotations

import io
import json
import sys
import tarfile
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
from drawn import drawn, rounded
from goldens import GOLDEN, unpack

RATE = 16000
NUM_GREEDY = 8
SPECIAL = {
    24: "[AUDIO]",
    25: "[BEGIN_AUDIO]",
    26: "[INST]",
    27: "[/INST]",
    31: "[TRANSCRIBE]",
    28: "<|AUDIO|>",
    29: "<|audio_bos|>",
    30: "<|audio_eos|>",
}
"""What the tiny tokenizer has in place of tokens that have no use here."""
TEXT = {
    "model_type": "llama",
    "vocab_size": 640,
    "hidden_size": 48,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-5,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
}
INSTRUCTIONS = """\
<s>{% for m in messages %}{% if m['role'] == 'user' %}[INST]{% if m['content'] is string %}{{ m['content'] }}{% else %}\
{% for c in m['content'] %}{% if c['type'] == 'audio' %}[BEGIN_AUDIO][AUDIO]{% else %}{{ c['text'] }}{% endif %}{% endfor %}\
{% endif %}[/INST]{% else %}{{ m['content'] }}</s>{% endif %}{% endfor %}"""
MODELS: dict[str, dict[str, Any]] = {
    "voxtral": {
        "config": {
            "architectures": ["VoxtralForConditionalGeneration"],
            "model_type": "voxtral",
            "audio_token_id": 24,
            "projector_hidden_act": "gelu",
            "text_config": TEXT,
            "audio_config": {
                "model_type": "voxtral_encoder",
                "hidden_size": 32,
                "intermediate_size": 160,
                "num_hidden_layers": 2,
                "num_attention_heads": 4,
                "num_mel_bins": 16,
                "max_source_positions": 50,
                "activation_function": "gelu",
            },
        },
        "template": INSTRUCTIONS,
        "rows": 10,
    },
}
"""Encoders of chunks of one second."""
CASES: list[tuple[list[list[dict[str, Any]]], list[tuple[str, int]]]] = [
    ([[{"type": "audio"}, {"type": "text", "text": "describe the image"}]], [("short", 9000)]),
    (
        [[{"type": "text", "text": "first"}, {"type": "audio"}, {"type": "text", "text": "then a"}, {"type": "audio"}]],
        [("long", 38000), ("second", 16000)],
    ),
]
"""The users' messages, and the names and samples of their sounds."""

TRANSCRIPTION: Any = ([[{"type": "audio"}]], [("talk", 20000)])


def sound(name: str, count: int) -> np.ndarray:
    """Samples of 16 bits: a tone that a name decides, and noise."""
    noise = drawn(f"sound {name}", count)
    pitch = np.float32(0.02) + np.float32(0.1) * abs(noise[0])
    wave = np.sin(np.arange(count, dtype=np.float64) * float(pitch)) * 9000
    return np.floor(wave + noise.astype(np.float64) * 6000).astype(np.int16)


def drawn_value(name: str, shape: list[int]) -> np.ndarray:
    """As `vision_value` of rust/engine/tests/common/drawn.rs."""
    u = drawn(name, int(np.prod(shape, dtype=np.int64)))
    if "norm" in name and name.endswith("weight"):
        values = np.float32(1) + np.float32(0.5) * u
    else:
        values = (np.float32(0.25) if len(shape) == 1 else np.float32(0.5)) * u
    return values.reshape(shape)


def tokenizer_files() -> dict[str, str]:
    """Those of a tiny model that sees, with the tokens of sounds."""
    folder = GOLDEN / "vision" / "qwen3_vl"
    tokenizer = json.loads((folder / "tokenizer.json").read_text())
    for token in tokenizer["added_tokens"]:
        old = token["content"]
        token["content"] = SPECIAL.get(token["id"], old)
        if token["id"] in SPECIAL and old in tokenizer["model"]["vocab"]:
            tokenizer["model"]["vocab"][token["content"]] = tokenizer["model"]["vocab"].pop(old)
    return {
        "tokenizer.json": json.dumps(tokenizer, separators=(",", ":"), ensure_ascii=False),
        "tokenizer_config.json": (folder / "tokenizer_config.json").read_text(),
    }


def write_weights(shapes: dict[str, list[int]], file: Path) -> None:
    """Weights of these names and shapes, as safetensors."""
    header, values = {}, []
    end = 0
    for name, shape in shapes.items():
        data = drawn_value(name, shape).tobytes()
        header[name] = {"dtype": "F32", "shape": shape, "data_offsets": [end, end + len(data)]}
        end += len(data)
        values.append(data)
    text = json.dumps({"__metadata__": {"format": "pt"}, **header}).encode()
    file.write_bytes(len(text).to_bytes(8, "little") + text + b"".join(values))


def model_of(name: str, folder: Path) -> Path:
    """The folder, with all that the golden of this name has, and its weights."""
    for file in (GOLDEN / "hearing" / name).iterdir():
        if file.suffix != ".safetensors":
            (folder / file.name).write_bytes(file.read_bytes())
    write_weights(json.loads((folder / "tensors.json").read_text()), folder / "model.safetensors")
    return folder


def shapes_of(folder: Path) -> dict[str, list[int]]:
    """The names and shapes of a checkpoint, as the hub has them."""
    from safetensors import safe_open
    from transformers import AutoConfig, AutoModelForMultimodalLM

    model = AutoModelForMultimodalLM.from_config(AutoConfig.from_pretrained(folder))
    with tempfile.TemporaryDirectory() as saved:
        model.save_pretrained(saved)
        with safe_open(f"{saved}/model.safetensors", "np") as tensors:
            return {name: list(tensors.get_slice(name).get_shape()) for name in sorted(tensors.keys())}


def case(model: Any, tokenizer: Any, made: dict[str, Any], given: Any, extractor: Any, behind: str = "") -> dict[str, Any]:
    """A prompt with its sounds, and its greedy continuation."""
    import torch

    contents, sounds = given
    messages = [{"role": "user", "content": content} for content in contents]
    text = tokenizer.apply_chat_template(messages, chat_template=made["template"], tokenize=False, add_generation_prompt=True)
    text += behind
    features = []
    for name, count in sounds:
        values = extractor(
            sound(name, count).astype(np.float32) / np.float32(32768),
            sampling_rate=RATE,
            truncation=False,
            padding=True,
            pad_to_multiple_of=RATE,
            return_tensors="pt",
        )["input_features"][0]
        chunks = values.reshape(extractor.feature_size, -1, 100).transpose(0, 1)
        features.append(chunks)
        text = text.replace("[AUDIO]", "[audio]" * made["rows"] * len(chunks), 1)
    ids = tokenizer(text.replace("[audio]", "[AUDIO]"), add_special_tokens=False)["input_ids"]

    def logits_of(ids: list[int]) -> Any:
        with torch.no_grad():
            return model(input_ids=torch.tensor([ids]), input_features=torch.cat(features), use_cache=False).logits[0]

    sequence = list(ids)
    for _ in range(NUM_GREEDY):
        sequence.append(int(logits_of(sequence)[-1].argmax()))
    logits = logits_of(ids)
    return {
        "sounds": [{"name": name, "len": count} for name, count in sounds],
        "messages": messages,
        "input_ids": ids,
        "last_logits": rounded(logits[-1]),
        "argmax": logits.argmax(-1).tolist(),
        "greedy_ids": sequence[len(ids) :],
    }


def make(made: dict[str, Any]) -> dict[str, str]:
    """The files of a golden, after the model with such weights has answered."""
    import torch
    from transformers import AutoModelForMultimodalLM, AutoTokenizer, WhisperFeatureExtractor

    torch.set_num_threads(1)
    config = made["config"]
    bins = config["audio_config"]["num_mel_bins"]
    extractor = WhisperFeatureExtractor(feature_size=bins, chunk_length=1)
    files = tokenizer_files()
    files["config.json"] = json.dumps(config, separators=(",", ":"))
    files["preprocessor_config.json"] = json.dumps(
        {"feature_extractor_type": "WhisperFeatureExtractor", "feature_size": bins, "chunk_length": 1, "hop_length": 160}
    )
    files["chat_template.jinja"] = made["template"]
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for file, text in files.items():
            (folder / file).write_text(text)
        shapes = shapes_of(folder)
        write_weights(shapes, folder / "model.safetensors")
        model, info = AutoModelForMultimodalLM.from_pretrained(
            folder, dtype=torch.float32, attn_implementation="eager", output_loading_info=True
        )
        if wrong := {key: found for key, found in info.items() if found}:
            sys.exit(f"not all weights are read: {wrong}")
        tokenizer = AutoTokenizer.from_pretrained(folder)
        cases = [case(model.eval(), tokenizer, made, given, extractor) for given in CASES]
        transcription = case(model, tokenizer, made, TRANSCRIPTION, extractor, "lang:en[TRANSCRIBE]")
    files["tensors.json"] = json.dumps(shapes, separators=(",", ":"))
    files["golden.json"] = json.dumps({"cases": cases, "transcription": transcription}, separators=(",", ":"))
    return files


def main() -> None:
    unpack()
    with tarfile.open(GOLDEN / "hearing.tar.xz", "w:xz", preset=9, format=tarfile.USTAR_FORMAT) as archive:
        all_files = {f"hearing/{name}/{file}": text for name, made in MODELS.items() for file, text in make(made).items()}
        for path, text in sorted(all_files.items(), key=lambda item: item[0].rsplit("/", 1)[::-1]):
            data = text.encode()
            entry = tarfile.TarInfo(path)
            entry.size, entry.mode = len(data), 0o644
            archive.addfile(entry, io.BytesIO(data))


if __name__ == "__main__":
    main()
