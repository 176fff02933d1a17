"""Makes goldens of models that hear, whose weights are drawn from their names (rust/engine/tests/common/drawn.rs).

    python tests/drawn_sounds.py    packs tests/data/golden/hearing.tar.xz, by Transformers

Their sounds are drawn as well, as samples of 16 bits. Needs torch, Transformers and timm.
"""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
from drawn import answer, drawn, loaded, write_archive
from goldens import GOLDEN, unpack

RATE = 16000
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
SPEECH = """\
{% for m in messages %}<|im_start|>{{ m['role'] }}
{% if m['content'] is string %}{{ m['content'] }}{% else %}{% for c in m['content'] %}{% if c['type'] == 'audio' %}<|AUDIO|>\
{% elif c['type'] == 'image' %}<|image_pad|>{% else %}{{ c['text'] }}{% endif %}{% endfor %}{% endif %}<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""


def edge(stride: int, channels: int, ratio: float) -> dict[str, Any]:
    """A block of timm's, as `model_args` of a configuration hands it over."""
    own = {"exp_kernel_size": 3, "pw_kernel_size": 1, "exp_ratio": ratio}
    return {"block_type": "er", "out_chs": channels, "stride": stride, "act_layer": None, **own}


def inverted(stride: int, channels: int, ratio: float, start: int, middle: int) -> dict[str, Any]:
    """The same of another type."""
    own = {"dw_kernel_size_start": start, "dw_kernel_size_mid": middle, "dw_kernel_size_end": 0, "exp_ratio": ratio}
    return {"block_type": "uir", "out_chs": channels, "stride": stride, "act_layer": None, **own}


def attention(channels: int, heads: int, width: int, stride: int) -> dict[str, Any]:
    """The same that looks at all places."""
    own = {"dw_kernel_size": 3, "num_heads": heads, "key_dim": width, "value_dim": width, "kv_stride": stride}
    return {"block_type": "mqa", "out_chs": channels, "stride": 1, "act_layer": None, **own}


MODELS: dict[str, dict[str, Any]] = {
    "voxtral": {
        "features": "Whisper",
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
    "qwen2_audio": {
        "features": "Qwen2Audio",
        "config": {
            "architectures": ["Qwen2AudioForConditionalGeneration"],
            "model_type": "qwen2_audio",
            "audio_token_index": 28,
            "text_config": {**TEXT, "model_type": "qwen2"},
            "audio_config": {
                "model_type": "qwen2_audio_encoder",
                "d_model": 32,
                "encoder_ffn_dim": 48,
                "encoder_layers": 2,
                "encoder_attention_heads": 4,
                "num_mel_bins": 16,
                "max_source_positions": 50,
                "activation_function": "gelu",
            },
        },
        "template": SPEECH.replace("<|AUDIO|>", "<|audio_bos|><|AUDIO|><|audio_eos|>"),
    },
    "audioflamingo3": {
        "features": "Flamingo",
        "config": {
            "architectures": ["AudioFlamingo3ForConditionalGeneration"],
            "model_type": "audioflamingo3",
            "audio_token_id": 28,
            "projector_hidden_act": "gelu",
            "text_config": {**TEXT, "model_type": "qwen2"},
            "audio_config": {
                "model_type": "audioflamingo3_encoder",
                "hidden_size": 32,
                "intermediate_size": 48,
                "num_hidden_layers": 2,
                "num_attention_heads": 4,
                "num_mel_bins": 16,
                "max_source_positions": 50,
                "activation_function": "gelu",
            },
        },
        "template": SPEECH,
    },
    "glmasr": {
        "features": "GlmAsr",
        "config": {
            "architectures": ["GlmAsrForConditionalGeneration"],
            "model_type": "glmasr",
            "audio_token_id": 28,
            "projector_hidden_act": "gelu",
            "tie_word_embeddings": False,
            "text_config": TEXT,
            "audio_config": {
                "model_type": "glmasr_encoder",
                "hidden_size": 32,
                "intermediate_size": 128,
                "num_hidden_layers": 2,
                "num_attention_heads": 4,
                "num_mel_bins": 16,
                "hidden_act": "gelu",
                "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5},
            },
        },
        "template": SPEECH,
    },
    "gemma4": {
        "features": "Gemma4",
        "config": {
            "architectures": ["Gemma4ForConditionalGeneration"],
            "model_type": "gemma4",
            "boi_token_id": 46,
            "eoi_token_id": 47,
            "image_token_id": 48,
            "audio_token_id": 28,
            "boa_token_id": 29,
            "eoa_token_index": 30,
            "video_token_id": 601,
            "tie_word_embeddings": True,
            "audio_config": {
                "model_type": "gemma4_audio",
                "hidden_size": 24,
                "num_hidden_layers": 2,
                "num_attention_heads": 3,
                "subsampling_conv_channels": [16, 4],
                "conv_kernel_size": 3,
                "attention_chunk_size": 4,
                "attention_context_left": 5,
                "attention_context_right": 0,
                "attention_logit_cap": 3.0,
                "use_clipped_linears": True,
                "output_proj_dims": 40,
            },
        },
        "template": SPEECH,
        "bins": 16,
    },
    "gemma3n": {
        "features": "Gemma3n",
        "config": {
            "architectures": ["Gemma3nForConditionalGeneration"],
            "model_type": "gemma3n",
            "boi_token_id": 46,
            "eoi_token_id": 379,
            "image_token_id": 380,
            "boa_token_id": 29,
            "eoa_token_id": 381,
            "audio_token_id": 382,
            "vision_soft_tokens_per_image": 16,
            "audio_soft_tokens_per_image": 188,
            "text_config": {
                "model_type": "gemma3n_text",
                "vocab_size": 400,
                "vocab_size_per_layer_input": 379,
                "hidden_size": 32,
                "intermediate_size": [64, 64, 96, 64],
                "num_hidden_layers": 4,
                "num_attention_heads": 4,
                "num_key_value_heads": 2,
                "head_dim": 16,
                "max_position_embeddings": 2048,
                "sliding_window": 24,
                "layer_types": ["sliding_attention", "full_attention", "sliding_attention", "full_attention"],
                "num_kv_shared_layers": 1,
                "hidden_size_per_layer_input": 8,
                "altup_num_inputs": 3,
                "altup_active_idx": 1,
                "laurel_rank": 8,
                "activation_sparsity_pattern": [0.9, 0.0, 0.0, 0.0],
                "rope_parameters": {
                    "full_attention": {"rope_type": "default", "rope_theta": 1000000.0},
                    "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
                },
            },
            "vision_config": {
                "model_type": "gemma3n_vision",
                "architecture": "mobilenetv5_300m_enc",
                "num_classes": 2,
                "label_names": ["a", "b"],
                "vocab_offset": 379,
                "vocab_size": 3,
                "model_args": {
                    "stem_size": 8,
                    "msfa_output_resolution": 4,
                    "block_args": [
                        [edge(2, 16, 2.0), edge(1, 16, 1.6)],
                        [inverted(2, 24, 3.0, 3, 5), attention(24, 3, 8, 2), inverted(1, 24, 2.0, 5, 0)],
                        [inverted(2, 32, 2.0, 5, 0), attention(32, 2, 16, 1), inverted(1, 32, 2.0, 0, 0)],
                    ],
                },
            },
            "audio_config": {
                "model_type": "gemma3n_audio",
                "hidden_size": 24,
                "input_feat_size": 16,
                "conf_num_hidden_layers": 2,
                "conf_num_attention_heads": 3,
                "sscp_conv_channel_size": [8, 4],
                "conf_conv_kernel_size": 3,
                "conf_attention_chunk_size": 4,
                "conf_attention_context_left": 5,
                "conf_attention_context_right": 1,
                "conf_attention_logit_cap": 3.0,
                "vocab_offset": 381,
                "vocab_size": 20,
            },
        },
        "template": SPEECH.replace("<|AUDIO|>", "<|sound|>").replace("<|image_pad|>", "<|picture|>"),
        "bins": 16,
        "tokens": ["<|end of picture|>", "<|picture|>", "<|end of sound|>", "<|sound|>"],
    },
}
"""Encoders of chunks of a second or two, and one of whole sounds whose language model is that of `vision/gemma4_vision`."""
CASES: list[tuple[list[list[dict[str, Any]]], list[tuple[str, int]]]] = [
    ([[{"type": "audio"}, {"type": "text", "text": "describe the image"}]], [("short", 9000)]),
    (
        [[{"type": "text", "text": "first"}, {"type": "audio"}, {"type": "text", "text": "then a"}, {"type": "audio"}]],
        [("long", 38000), ("second", 16000)],
    ),
]
"""The users' messages, and the names and samples of their sounds."""
WITH_AN_IMAGE: Any = (
    [
        [
            {"type": "text", "text": "first"},
            {"type": "audio"},
            {"type": "image"},
            {"type": "text", "text": "then a"},
            {"type": "audio"},
        ]
    ],
    [("talk", 20000), ("second", 7000)],
)
IMAGE = "vision/qwen3_vl/image0.png"
SEEN_ALONE: Any = ([[{"type": "image"}, {"type": "text", "text": "describe the image"}]], [])

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
    if name.endswith(("_max", "_min")):
        # Bounds that some values are beyond.
        values = (np.float32(1.5) + u) * np.float32(1 if name.endswith("max") else -1)
    elif "scal" in name or ("norm" in name and name.endswith("weight")):
        values = np.float32(1) + np.float32(0.5) * u
    else:
        values = (np.float32(0.25) if len(shape) == 1 else np.float32(0.5)) * u
    return values.reshape(shape)


def tokenizer_files(further: list[str]) -> dict[str, str]:
    """Those of a tiny model that sees, with the tokens of sounds, and further ones behind all."""
    folder = GOLDEN / "vision" / "qwen3_vl"
    tokenizer = json.loads((folder / "tokenizer.json").read_text())
    for token in tokenizer["added_tokens"]:
        old = token["content"]
        token["content"] = SPECIAL.get(token["id"], old)
        if token["id"] in SPECIAL and old in tokenizer["model"]["vocab"]:
            tokenizer["model"]["vocab"][token["content"]] = tokenizer["model"]["vocab"].pop(old)
    first = len(tokenizer["model"]["vocab"])
    last = tokenizer["added_tokens"][-1]
    tokenizer["added_tokens"] += [{**last, "id": first + at, "content": token} for at, token in enumerate(further)]
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


def model_class(name: str) -> Any:
    """Not all of these have a place among the automatic ones."""
    import transformers

    return getattr(transformers, name)


def shapes_of(folder: Path) -> dict[str, list[int]]:
    """The names and shapes of a checkpoint, as the hub has them."""
    from safetensors import safe_open
    from transformers import AutoConfig

    config = AutoConfig.from_pretrained(folder)
    model = model_class(config.architectures[0])(config)
    # timm takes what it reads of these out of them.
    model.config = AutoConfig.from_pretrained(folder)
    with tempfile.TemporaryDirectory() as saved:
        model.save_pretrained(saved)
        with safe_open(f"{saved}/model.safetensors", "np") as tensors:
            return {name: list(tensors.get_slice(name).get_shape()) for name in sorted(tensors.keys())}


def samples(name: str, count: int) -> np.ndarray:
    """The same, from -1 to 1."""
    return sound(name, count).astype(np.float32) / np.float32(32768)


class Whisper:
    """Features in chunks of one second, each of which becomes as many vectors."""

    def __init__(self, made: dict[str, Any], _folder: Path) -> None:
        from transformers import WhisperFeatureExtractor

        self.rows = made["rows"]
        self.extractor = WhisperFeatureExtractor(feature_size=made["config"]["audio_config"]["num_mel_bins"], chunk_length=1)

    @staticmethod
    def files(made: dict[str, Any]) -> dict[str, Any]:
        bins = made["config"]["audio_config"]["num_mel_bins"]
        extractor = {"feature_extractor_type": "WhisperFeatureExtractor", "feature_size": bins, "chunk_length": 1}
        return {"config.json": made["config"], "preprocessor_config.json": {**extractor, "hop_length": 160}}

    def inputs(self, text: str, sounds: list[tuple[str, int]]) -> tuple[str, dict[str, Any]]:
        """The text with as many tokens as there are vectors, and what the model is given."""
        import torch

        features = []
        for name, count in sounds:
            options: dict[str, Any] = {"truncation": False, "padding": True, "pad_to_multiple_of": RATE, "return_tensors": "pt"}
            values = self.extractor(samples(name, count), sampling_rate=RATE, **options)["input_features"][0]
            chunks = values.reshape(self.extractor.feature_size, -1, 100).transpose(0, 1)
            features.append(chunks)
            text = text.replace("[AUDIO]", "[audio]" * self.rows * len(chunks), 1)
        return text.replace("[audio]", "[AUDIO]"), {"input_features": torch.cat(features)}

    def cases(self) -> list[Any]:
        return CASES


class Flamingo:
    """Features of each chunk for itself, of which what is behind the sound becomes no vectors."""

    SECONDS = 1
    MASK = "input_features_mask"

    def __init__(self, made: dict[str, Any], folder: Path) -> None:
        from transformers import WhisperFeatureExtractor

        self.extractor = WhisperFeatureExtractor.from_pretrained(folder)

    @classmethod
    def files(cls, made: dict[str, Any]) -> dict[str, Any]:
        bins = made["config"]["audio_config"]["num_mel_bins"]
        extractor = {"feature_extractor_type": "WhisperFeatureExtractor", "feature_size": bins, "chunk_length": cls.SECONDS}
        return {"config.json": made["config"], "preprocessor_config.json": extractor}

    @staticmethod
    def rows(frames: int) -> int:
        """Vectors of a chunk with so many frames."""
        return ((frames + 1) // 2) // 2

    def inputs(self, text: str, sounds: list[tuple[str, int]]) -> tuple[str, dict[str, Any]]:
        """The text with as many tokens as there are vectors, and what the model is given."""
        chunks, counts = [], []
        for name, count in sounds:
            values = samples(name, count)
            own = [values[at : at + self.SECONDS * RATE] for at in range(0, count, self.SECONDS * RATE)]
            chunks += own
            counts.append(len(own))
        given = self.extractor(chunks, sampling_rate=RATE, return_attention_mask=True, return_tensors="pt")
        of_chunks = [self.rows(int(mask.sum())) for mask in given["attention_mask"]]
        for count in counts:
            text = text.replace("<|AUDIO|>", "<|audio|>" * sum(of_chunks[:count]), 1)
            of_chunks = of_chunks[count:]
        inputs = {"input_features": given["input_features"], self.MASK: given["attention_mask"]}
        return text.replace("<|audio|>", "<|AUDIO|>"), inputs

    def cases(self) -> list[Any]:
        return CASES


class Qwen2Audio(Flamingo):
    """The same of sounds that have one chunk."""

    MASK = "feature_attention_mask"

    def cases(self) -> list[Any]:
        return [CASES[0], (CASES[1][0], [("talk", 15000), ("second", 16000)])]


class GlmAsr(Flamingo):
    """The same with four states to a vector."""

    SECONDS = 2

    @staticmethod
    def rows(frames: int) -> int:
        return ((frames + 1) // 2) // 4


class Gemma4:
    """Features as long as a sound is; images as well."""

    def __init__(self, made: dict[str, Any], folder: Path) -> None:
        from transformers import AutoImageProcessor, Gemma4AudioFeatureExtractor

        self.extractor = Gemma4AudioFeatureExtractor(feature_size=made["bins"])
        self.images = AutoImageProcessor.from_pretrained(folder, backend="pil")

    @staticmethod
    def files(made: dict[str, Any]) -> dict[str, Any]:
        seeing = GOLDEN / "vision" / "gemma4_vision"
        whole = json.loads((seeing / "config.json").read_text())
        config = {**made["config"], **{key: whole[key] for key in ("text_config", "vision_config")}}
        images = json.loads((seeing / "preprocessor_config.json").read_text())
        extractor = {"feature_extractor_type": "Gemma4AudioFeatureExtractor", "feature_size": made["bins"]}
        return {"config.json": config, "processor_config.json": {"image_processor": images, "feature_extractor": extractor}}

    def features(self, name: str, count: int) -> Any:
        """`[frames, mel bins]` of all frames that end within the sound."""
        given = self.extractor([samples(name, count)], return_tensors="np")
        return given["input_features"][0][given["input_features_mask"][0]]

    def inputs(self, text: str, sounds: list[tuple[str, int]]) -> tuple[str, dict[str, Any]]:
        """The text with as many tokens as there are vectors, and what the model is given."""
        from PIL import Image

        given = self.extractor([samples(name, count) for name, count in sounds], return_tensors="pt")
        inputs = {"input_features": given["input_features"], "input_features_mask": given["input_features_mask"]}
        for name, count in sounds:
            num_places = (len(self.features(name, count)) + 3) // 4
            text = text.replace("<|AUDIO|>", f"<|audio_bos|>{'<|audio|>' * num_places}<|audio_eos|>", 1)
        if "<|image_pad|>" in text:
            seen = self.images(images=[Image.open(GOLDEN / IMAGE)], return_tensors="pt")
            num_rows = int(seen.pop("num_soft_tokens_per_image")[0])
            tokens = "<|vision_start|>" + "<|image_pad|>" * num_rows + "<|vision_end|>"
            text = text.replace("<|image_pad|>", tokens, 1)
            inputs |= dict(seen)
        return text.replace("<|audio|>", "<|AUDIO|>"), inputs

    def cases(self) -> list[Any]:
        return [CASES[0], WITH_AN_IMAGE]


class Gemma3n(Gemma4):
    """The same features otherwise made, and as many vectors of each sound and of each image."""

    def __init__(self, made: dict[str, Any], folder: Path) -> None:
        from transformers import AutoImageProcessor, Gemma3nAudioFeatureExtractor

        self.extractor = Gemma3nAudioFeatureExtractor(feature_size=made["bins"])
        self.images = AutoImageProcessor.from_pretrained(folder, backend="pil")
        config = made["config"]
        self.rows = (config["vision_soft_tokens_per_image"], config["audio_soft_tokens_per_image"])

    @staticmethod
    def files(made: dict[str, Any]) -> dict[str, Any]:
        # One file for both, as on the hub.
        both = {"image_processor_type": "SiglipImageProcessorFast", "size": {"height": 64, "width": 96}, "do_normalize": False}
        both |= {"do_resize": True, "do_rescale": True, "resample": 2, "feature_size": made["bins"], "fft_overdrive": True}
        both |= {"feature_extractor_type": "Gemma3nAudioFeatureExtractor", "preemphasis_htk_flavor": True}
        return {"config.json": made["config"], "preprocessor_config.json": both}

    def inputs(self, text: str, sounds: list[tuple[str, int]]) -> tuple[str, dict[str, Any]]:
        """The text with as many tokens as there are vectors, and what the model is given."""
        from PIL import Image

        inputs: dict[str, Any] = {}
        if sounds:
            given = self.extractor([samples(name, count) for name, count in sounds], return_tensors="pt")
            inputs = {"input_features": given["input_features"], "input_features_mask": given["input_features_mask"]}
        if "<|picture|>" in text:
            inputs |= dict(self.images(images=[Image.open(GOLDEN / IMAGE)], return_tensors="pt"))
        of_image, of_sound = self.rows
        for token, end, begin, rows in [
            ("<|picture|>", "<|end of picture|>", "<|vision_start|>", of_image),
            ("<|sound|>", "<|end of sound|>", "<|audio_bos|>", of_sound),
        ]:
            text = text.replace(token, f"\n\n{begin}{token * rows}{end}\n\n")
        return text, inputs

    def cases(self) -> list[Any]:
        # Of several sounds all but the longest would be filled up, and would end otherwise.
        with_an_image = ([WITH_AN_IMAGE[0][0][:-1]], WITH_AN_IMAGE[1][:1])
        return [CASES[0], with_an_image, SEEN_ALONE]


def case(model: Any, tokenizer: Any, template: str, given: Any, kind: Any, behind: str = "") -> dict[str, Any]:
    """A prompt with its sounds, and its greedy continuation."""
    import torch

    contents, sounds = given
    messages = [{"role": "user", "content": content} for content in contents]
    text = tokenizer.apply_chat_template(messages, chat_template=template, tokenize=False, add_generation_prompt=True)
    text, inputs = kind.inputs(text + behind, sounds)
    ids = tokenizer(text, add_special_tokens=False)["input_ids"]

    def logits_of(ids: list[int]) -> Any:
        token_ids = torch.tensor([ids])
        # Which tokens are of images, where their rows see each other.
        is_told = "pixel_values" in inputs and model.config.model_type != "gemma3n"
        kinds = {"mm_token_type_ids": (token_ids == model.config.image_token_id).long()} if is_told else {}
        with torch.no_grad():
            return model(input_ids=token_ids, **inputs, **kinds, use_cache=False).logits[0]

    return {
        "sounds": [{"name": name, "len": count} for name, count in sounds],
        "messages": messages,
        **answer(logits_of, ids),
    }


def make(made: dict[str, Any]) -> dict[str, str]:
    """The files of a golden, after the model with such weights has answered."""
    import torch
    from transformers import AutoTokenizer

    torch.set_num_threads(1)
    kinds: list[Any] = [Whisper, Gemma3n, Gemma4, Flamingo, Qwen2Audio, GlmAsr]
    kind_of = next(kind for kind in kinds if kind.__name__ == made["features"])
    files = tokenizer_files(made.get("tokens", []))
    files |= {name: json.dumps(value) for name, value in kind_of.files(made).items()}
    files["config.json"] = files["config.json"].replace(", ", ",").replace(": ", ":")
    files["chat_template.jinja"] = made["template"]
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for file, text in files.items():
            (folder / file).write_text(text)
        shapes = shapes_of(folder)
        write_weights(shapes, folder / "model.safetensors")
        model = loaded(model_class(made["config"]["architectures"][0]), folder)
        tokenizer, kind = AutoTokenizer.from_pretrained(folder), kind_of(made, folder)
        golden: dict[str, Any] = {"cases": [case(model, tokenizer, made["template"], given, kind) for given in kind.cases()]}
        if made["features"] == "Whisper":
            golden["transcription"] = case(model, tokenizer, made["template"], TRANSCRIPTION, kind, "lang:en[TRANSCRIBE]")
        elif made["features"] in ("Gemma3n", "Gemma4"):
            name, count = CASES[0][1][0]
            values = kind.features(name, count)
            golden["features"] = [[at, [round(float(value), 5) for value in values[at]]] for at in (0, 1, len(values) - 1)]
    files["tensors.json"] = json.dumps(shapes, separators=(",", ":"))
    files["golden.json"] = json.dumps(golden, separators=(",", ":"))
    return files


def main() -> None:
    unpack()
    all_files = {f"hearing/{name}/{file}": text.encode() for name, made in MODELS.items() for file, text in make(made).items()}
    write_archive("hearing", all_files)


if __name__ == "__main__":
    main()
