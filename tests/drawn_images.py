"""Makes goldens of models that see, whose weights are drawn from their names (rust/engine/tests/common/drawn.rs).

    python tests/drawn_images.py    packs tests/data/golden/vision-composed.tar.xz, by Transformers

Tokenizer and images are those of tests/data/golden/vision/qwen3_vl. Needs torch and Transformers.
"""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Any

from drawn import answer, loaded, write_archive
from drawn_sounds import model_class, shapes_of, write_weights
from goldens import GOLDEN, unpack
from PIL import Image

LENT = GOLDEN / "vision" / "qwen3_vl"
CLIP = {"image_mean": [0.48145466, 0.4578275, 0.40821073], "image_std": [0.26862954, 0.26130258, 0.27577711]}
TEMPLATE = """\
{% for m in messages %}<|im_start|>{{ m['role'] }}
{% if m['content'] is string %}{{ m['content'] }}{% else %}{% for c in m['content'] %}{% if c['type']=='image' %}\
<|vision_start|><|image_pad|><|vision_end|>{% else %}{{ c['text'] }}{% endif %}{% endfor %}{% endif %}<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""
TEXT = {
    "vocab_size": 640,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-05,
    "eos_token_id": 2,
    "pad_token_id": 5,
    "hidden_act": "silu",
}
AXES = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 1, 1], "partial_rotary_factor": 0.5}
GLM_TOKENS = {
    "image_token_id": 48,
    "video_token_id": 49,
    "image_start_token_id": 46,
    "image_end_token_id": 47,
    "video_start_token_id": 50,
    "video_end_token_id": 51,
    "tie_word_embeddings": False,
}
GLM_VISION = {
    "model_type": "glm4v_vision",
    "depth": 2,
    "hidden_size": 16,
    "hidden_act": "silu",
    "attention_bias": False,
    "num_heads": 2,
    "in_channels": 3,
    "image_size": 28,
    "patch_size": 7,
    "rms_norm_eps": 1e-05,
    "spatial_merge_size": 2,
    "temporal_patch_size": 2,
    "out_hidden_size": 32,
    "intermediate_size": 24,
}
GLM_IMAGES = {
    "image_processor_type": "Glm4vImageProcessor",
    "size": {"shortest_edge": 784, "longest_edge": 8000},
    "patch_size": 7,
    "merge_size": 2,
    "temporal_patch_size": 2,
    **CLIP,
}

MODELS: dict[str, dict[str, Any]] = {
    "glm46v": {
        "config": {
            "model_type": "glm46v",
            "architectures": ["Glm46VForConditionalGeneration"],
            **GLM_TOKENS,
            "text_config": {**TEXT, "model_type": "glm4v_text", "attention_bias": True, "rope_parameters": AXES},
            "vision_config": {**GLM_VISION, "attention_bias": True},
        },
        "images": {**GLM_IMAGES, "image_processor_type": "Glm46VImageProcessor"},
    },
    "glm4v_moe": {
        "config": {
            "model_type": "glm4v_moe",
            "architectures": ["Glm4vMoeForConditionalGeneration"],
            **GLM_TOKENS,
            "text_config": {
                **TEXT,
                "model_type": "glm4v_moe_text",
                "head_dim": 16,
                "attention_bias": True,
                "use_qk_norm": False,
                "moe_intermediate_size": 24,
                "num_experts_per_tok": 2,
                "n_shared_experts": 1,
                "n_routed_experts": 4,
                "routed_scaling_factor": 1.5,
                "n_group": 1,
                "topk_group": 1,
                "first_k_dense_replace": 1,
                "norm_topk_prob": True,
                "rope_parameters": AXES,
            },
            "vision_config": {**GLM_VISION, "model_type": "glm4v_moe_vision"},
        },
        "images": GLM_IMAGES,
    },
    "lighton_ocr": {
        "config": {
            "model_type": "lighton_ocr",
            "architectures": ["LightOnOcrForConditionalGeneration"],
            "image_token_id": 48,
            "spatial_merge_size": 2,
            "tie_word_embeddings": True,
            "text_config": {
                **TEXT,
                "model_type": "qwen3",
                "head_dim": 24,
                "rope_parameters": {"rope_type": "default", "rope_theta": 1000000.0},
            },
            "vision_config": {
                "model_type": "pixtral",
                "hidden_size": 32,
                "intermediate_size": 48,
                "num_hidden_layers": 2,
                "num_attention_heads": 2,
                "num_channels": 3,
                "head_dim": 16,
                "hidden_act": "silu",
                "image_size": 112,
                "patch_size": 7,
                "rope_parameters": {"rope_type": "axial", "rope_theta": 10000.0},
            },
        },
        # Of squares of patches the last may be cut.
        "images": {
            "image_processor_type": "PixtralImageProcessor",
            "size": {"longest_edge": 63},
            "patch_size": {"height": 7, "width": 7},
            **CLIP,
        },
        "processor": {"processor_class": "LightOnOcrProcessor", "patch_size": 7, "spatial_merge_size": 2},
    },
    "glm_ocr": {
        "config": {
            "model_type": "glm_ocr",
            "architectures": ["GlmOcrForConditionalGeneration"],
            **GLM_TOKENS,
            "text_config": {
                **TEXT,
                "model_type": "glm_ocr_text",
                "head_dim": 24,
                "attention_bias": False,
                "num_nextn_predict_layers": 1,
                "rope_parameters": {**AXES, "mrope_section": [4, 4, 4], "partial_rotary_factor": 1.0},
            },
            "vision_config": {**GLM_VISION, "model_type": "glm_ocr_vision", "attention_bias": True},
        },
        "images": {**GLM_IMAGES, "image_processor_type": "Glm46VImageProcessor"},
    },
    "exaone4_5": {
        "config": {
            "model_type": "exaone4_5",
            "architectures": ["Exaone4_5_ForConditionalGeneration"],
            "image_token_id": 48,
            "video_token_id": 49,
            "tie_word_embeddings": False,
            "text_config": {
                **TEXT,
                "model_type": "exaone4",
                "num_hidden_layers": 2,
                "sliding_window": 24,
                "layer_types": ["sliding_attention", "full_attention"],
                "rope_parameters": {"rope_type": "default", "rope_theta": 1000000.0},
            },
            "vision_config": {
                "model_type": "exaone4_5_vision",
                "depth": 2,
                "fullatt_block_indexes": [1],
                "hidden_size": 32,
                "hidden_act": "silu",
                "in_channels": 3,
                "intermediate_size": 24,
                "num_heads": 4,
                "num_key_value_heads": 2,
                "out_hidden_size": 32,
                "patch_size": 7,
                "spatial_merge_size": 2,
                "temporal_patch_size": 2,
                "window_size": 28,
            },
        },
        "images": {
            **GLM_IMAGES,
            "image_processor_type": "Qwen2VLImageProcessor",
            "size": {"shortest_edge": 784, "longest_edge": 4000},
        },
    },
}
CASES = [
    (["image0.png"], [{"type": "image"}, {"type": "text", "text": "describe the image"}]),
    (
        ["image0.png", "image1.png"],
        [
            {"type": "image"},
            {"type": "text", "text": "and"},
            {"type": "image"},
            {"type": "text", "text": "what do the two show?"},
        ],
    ),
]
"""The images, and the content of a user's message."""


def num_vectors(config: dict[str, Any], given: Any) -> list[int]:
    """Of each image."""
    if "image_grid_thw" in given:
        return [int(grid.prod()) // config["vision_config"]["spatial_merge_size"] ** 2 for grid in given["image_grid_thw"]]
    edge = config["vision_config"]["patch_size"] * config["spatial_merge_size"]
    return [int(height) // edge * (int(width) // edge) for height, width in given["image_sizes"]]


def case(model: Any, tokenizer: Any, processor: Any, config: dict[str, Any], asked: Any) -> dict[str, Any]:
    """A prompt with its images, and its greedy continuation."""
    import torch

    files, content = asked
    messages = [{"role": "user", "content": content}]
    given = processor(images=[Image.open(LENT / file) for file in files], return_tensors="pt")
    text = tokenizer.apply_chat_template(messages, chat_template=TEMPLATE, tokenize=False, add_generation_prompt=True)
    parts = text.split("<|image_pad|>")
    counts = [*num_vectors(config, given), 0]
    text = "".join(part + "<|image_pad|>" * count for part, count in zip(parts, counts, strict=True))
    ids = tokenizer(text, add_special_tokens=False)["input_ids"]

    def logits_of(ids: list[int]) -> Any:
        token_ids = torch.tensor([ids])
        # Which tokens are of images, where these have coordinates.
        has_axes = "mrope_section" in config["text_config"]["rope_parameters"]
        kinds = {"mm_token_type_ids": (token_ids == config["image_token_id"]).long()} if has_axes else {}
        with torch.no_grad():
            return model(input_ids=token_ids, **given, **kinds, use_cache=False).logits[0]

    return {
        "images": files,
        "messages": messages,
        **answer(logits_of, ids),
    }


def make(made: dict[str, Any]) -> dict[str, str]:
    """The files of a golden, after the model with such weights has answered."""
    import torch
    from transformers import AutoImageProcessor, AutoTokenizer

    torch.set_num_threads(1)
    config = made["config"]
    files = {
        "config.json": json.dumps(config, separators=(",", ":")),
        "preprocessor_config.json": json.dumps(made["images"], separators=(",", ":")),
        "chat_template.jinja": TEMPLATE,
    }
    if "processor" in made:
        files["processor_config.json"] = json.dumps(made["processor"], separators=(",", ":"))
    lent = {name: (LENT / name).read_text() for name in ("tokenizer.json", "tokenizer_config.json")}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for file, text in {**files, **lent}.items():
            (folder / file).write_text(text)
        shapes = shapes_of(folder)
        write_weights(shapes, folder / "model.safetensors")
        model = loaded(model_class(config["architectures"][0]), folder)
        tokenizer, processor = AutoTokenizer.from_pretrained(folder), AutoImageProcessor.from_pretrained(folder, backend="pil")
        cases = [case(model, tokenizer, processor, config, asked) for asked in CASES]
    files["tensors.json"] = json.dumps(shapes, separators=(",", ":"))
    files["golden.json"] = json.dumps({"cases": cases}, separators=(",", ":"))
    return files


def main() -> None:
    unpack()
    all_files = {f"vision/{name}/{file}": text.encode() for name, made in MODELS.items() for file, text in make(made).items()}
    write_archive("vision-composed", all_files)


if __name__ == "__main__":
    main()
