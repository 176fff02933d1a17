"""Makes the golden of a tiny Phi-4-multimodal, whose weights are drawn from their names (rust/engine/tests/common/drawn.rs).

    python tests/drawn_phi4.py    packs tests/data/golden/phi4.tar.xz, by Transformers with PEFT

It has the shapes of its weights and of its adapters', and what the model answers to texts, images and sounds, each with the
adapter that goes with it. Needs torch, Transformers and PEFT.
"""

from __future__ import annotations

import contextlib
import json
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
from drawn import rounded, write_archive
from drawn_sounds import RATE, samples, write_weights
from goldens import GOLDEN, unpack

NUM_GREEDY = 6
CONFIG: dict[str, Any] = {
    "architectures": ["Phi4MultimodalForCausalLM"],
    "model_type": "phi4_multimodal",
    "vocab_size": 640,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "hidden_act": "silu",
    "max_position_embeddings": 4096,
    "original_max_position_embeddings": 512,
    "rms_norm_eps": 1e-5,
    "rope_parameters": {
        "rope_type": "longrope",
        "rope_theta": 10000.0,
        "partial_rotary_factor": 0.75,
        "short_factor": [1.0, 1.1, 1.3],
        "long_factor": [1.2, 2.5, 4.0],
    },
    "tie_word_embeddings": True,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
    "vision_config": {
        "model_type": "phi4_multimodal_vision",
        "hidden_size": 16,
        "intermediate_size": 24,
        "num_hidden_layers": 3,
        "num_attention_heads": 2,
    },
    "audio_config": {
        "model_type": "phi4_multimodal_audio",
        "hidden_size": 16,
        "intermediate_size": 24,
        "num_blocks": 2,
        "num_attention_heads": 2,
        "ext_pw_out_channel": 16,
        "depthwise_separable_out_channel": 16,
        "nemo_conv_channels": 8,
        "bias_max_distance": 20,
    },
}
RANKS = {"vision": (4, 8), "speech": (3, 7)}
"""Of the adapters, with their alphas."""
TARGETS = r"model\.layers\.\d+\.(self_attn\.(qkv|o)_proj|mlp\.(gate_up|down)_proj)"
DYNAMIC_HD = 4
TEMPLATE = """\
{% for m in messages %}{{ '<|' + m['role'] + '|>' + m['content'] + '<|end|>' }}{% endfor %}\
{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"""
"""As that of its files, which knows texts alone."""
CASES: list[tuple[list[tuple[int, int]], list[tuple[str, int]]]] = [
    ([], []),
    ([(300, 210)], []),
    ([(490, 300), (60, 448)], []),
    ([(300, 2000)], []),
    ([], [("short", 9000)]),
    ([], [("second", 16000), ("talk", 16000)]),
    ([], [("long", 656_000)]),
    ([(448, 448)], [("talk", 20000)]),
]
"""Widths and heights of images, names and samples of sounds; both lie before the text, images first."""


def image(seed: int, size: tuple[int, int]) -> Any:
    """As `image` of rust/engine/tests/phi4_multimodal.rs."""
    from PIL import Image

    y, x, channel = np.indices((size[1], size[0], 3))
    return Image.fromarray(((x * 7 + y * 13 + channel * 50 + seed * 31 + x * y) % 256).astype(np.uint8))


def adapter_shapes(name: str) -> dict[str, list[int]]:
    """The names and shapes of an adapter's tensors, as PEFT saves them."""
    keys = ["hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads"]
    hidden, inner, heads, kv_heads = (CONFIG[key] for key in keys)
    sizes = {
        "self_attn.qkv_proj": (hidden, hidden // heads * (heads + 2 * kv_heads)),
        "self_attn.o_proj": (hidden, hidden),
        "mlp.gate_up_proj": (hidden, 2 * inner),
        "mlp.down_proj": (inner, hidden),
    }
    shapes = {}
    for layer in range(CONFIG["num_hidden_layers"]):
        for module, (columns, rows) in sizes.items():
            # Names of both must differ, for their values to do so: the archive's have that of the adapter.
            place = f"base_model.model.model.layers.{layer}.{module}"
            shapes[f"{place}.lora_A.{name}.weight"] = [RANKS[name][0], columns]
            shapes[f"{place}.lora_B.{name}.weight"] = [rows, RANKS[name][0]]
    return shapes


def write_adapter(name: str, folder: Path) -> None:
    """A folder of PEFT's, whose values are drawn from names with that of the adapter."""
    folder.mkdir()
    file = folder / "adapter_model.safetensors"
    write_weights(adapter_shapes(name), file)
    content = file.read_bytes()
    size = int.from_bytes(content[:8], "little")
    header = content[8 : 8 + size].decode().replace(f".{name}.weight", ".weight").encode()
    file.write_bytes(len(header).to_bytes(8, "little") + header + content[8 + size :])
    rank, alpha = RANKS[name]
    config = {"peft_type": "LORA", "r": rank, "lora_alpha": alpha, "target_modules": TARGETS, "task_type": "CAUSAL_LM"}
    (folder / "adapter_config.json").write_text(json.dumps(config))


def pillow_resize(tensor: Any, size: Any, **options: Any) -> Any:
    """Images of 8 bits as the code of the first files resizes them; PyTorch's way differs by one in some values."""
    import torch
    from PIL import Image
    from torchvision.transforms.v2 import functional

    if tensor.dtype != torch.uint8:
        return functional.resize_image(tensor, size, **options)
    resized = Image.fromarray(tensor.permute(1, 2, 0).numpy()).resize((size[1], size[0]), Image.Resampling.BILINEAR)
    return torch.from_numpy(np.array(resized)).permute(2, 0, 1)


def inputs_of(sizes: list[tuple[int, int]], sounds: list[tuple[str, int]]) -> tuple[str, dict[str, Any]]:
    """What stands for images and sounds in a prompt, and what the model is given."""
    from transformers import Phi4MultimodalFeatureExtractor
    from transformers.models.phi4_multimodal import image_processing_phi4_multimodal as images

    text, inputs = "", {}
    if sizes:
        images.tvF.resize = pillow_resize
        processor = images.Phi4MultimodalImageProcessor(dynamic_hd=DYNAMIC_HD)
        given = processor([image(seed, size) for seed, size in enumerate(sizes)], return_tensors="pt")
        text += "".join("<|image_pad|>" * count for count in given.pop("num_img_tokens"))
        inputs |= dict(given)
    if sounds:
        extractor = Phi4MultimodalFeatureExtractor()
        given = extractor([samples(name, count) for name, count in sounds], sampling_rate=RATE, return_tensors="pt")
        text += "".join("<|AUDIO|>" * int(count) for count in given["audio_embed_sizes"])
        inputs |= dict(given)
    return text, inputs


def case(model: Any, tokenizer: Any, sizes: list[tuple[int, int]], sounds: list[tuple[str, int]]) -> dict[str, Any]:
    """A prompt and its greedy continuation, with the adapter for what it holds."""
    import torch

    text, inputs = inputs_of(sizes, sounds)
    model.set_adapter("vision" if sizes else "speech")
    ids = tokenizer(f"<|user|>{text}describe the image<|end|><|assistant|>", add_special_tokens=False)["input_ids"]

    def logits_of(ids: list[int]) -> Any:
        without = contextlib.nullcontext() if sizes or sounds else model.disable_adapter()
        with torch.no_grad(), without:
            return model(input_ids=torch.tensor([ids]), **inputs, use_cache=False).logits[0]

    sequence = list(ids)
    for _ in range(NUM_GREEDY):
        sequence.append(int(logits_of(sequence)[-1].argmax()))
    logits = logits_of(ids)
    return {
        "images": sizes,
        "sounds": [{"name": name, "len": count} for name, count in sounds],
        "last_logits": rounded(logits[-1]),
        "argmax": logits.argmax(-1).tolist(),
        "greedy_ids": sequence[len(ids) :],
    }


def model_of(folder: Path) -> Path:
    """The folder, with all that a model has, as Transformers saves it."""
    golden = GOLDEN / "phi4"
    for file in ("config.json", "chat_template.jinja", "golden.json"):
        (folder / file).write_bytes((golden / file).read_bytes())
    for file in ("tokenizer.json", "tokenizer_config.json"):
        (folder / file).write_bytes((GOLDEN / "hearing" / "gemma4" / file).read_bytes())
    images = {"image_processor_type": "Phi4MultimodalImageProcessor", "dynamic_hd": DYNAMIC_HD}
    sounds = {"feature_extractor_type": "Phi4MultimodalFeatureExtractor"}
    (folder / "processor_config.json").write_text(json.dumps({"image_processor": images, "audio_processor": sounds}))
    write_weights(json.loads((golden / "tensors.json").read_text()), folder / "model.safetensors")
    for adapter in RANKS:
        write_adapter(adapter, folder / f"{adapter}-lora")
    return folder


def shapes_of(config: Any) -> dict[str, list[int]]:
    """The names and shapes of a checkpoint, without what nothing computes with."""
    from safetensors import safe_open
    from transformers import Phi4MultimodalForCausalLM

    with tempfile.TemporaryDirectory() as folder:
        Phi4MultimodalForCausalLM(config).save_pretrained(folder)
        with safe_open(f"{folder}/model.safetensors", "np") as tensors:
            return {name: list(tensors.get_slice(name).get_shape()) for name in sorted(tensors.keys())}


def make() -> dict[str, str]:
    """The files of the golden, after the model with such weights has answered."""
    import torch
    from peft import PeftModel
    from transformers import AutoTokenizer, Phi4MultimodalConfig, Phi4MultimodalForCausalLM

    torch.set_num_threads(1)
    tokenizer = AutoTokenizer.from_pretrained(GOLDEN / "hearing" / "gemma4")
    config = json.loads(json.dumps(CONFIG))
    config["vision_config"]["image_token_id"] = tokenizer.convert_tokens_to_ids("<|image_pad|>")
    config["audio_config"]["audio_token_id"] = tokenizer.convert_tokens_to_ids("<|AUDIO|>")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "config.json").write_text(json.dumps(config))
        shapes = shapes_of(Phi4MultimodalConfig.from_pretrained(folder))
        write_weights(shapes, folder / "model.safetensors")
        model, info = Phi4MultimodalForCausalLM.from_pretrained(
            folder, dtype=torch.float32, attn_implementation="eager", output_loading_info=True
        )
        assert not any(info.values()), info
        for adapter in RANKS:
            write_adapter(adapter, folder / f"{adapter}-lora")
        model = PeftModel.from_pretrained(model, str(folder / "vision-lora"), adapter_name="vision")
        model.load_adapter(str(folder / "speech-lora"), adapter_name="speech")
        cases = [case(model.eval(), tokenizer, *given) for given in CASES]
    used = {name: shape for name, shape in shapes.items() if ".head." not in name}
    adapters = {name: {"shapes": adapter_shapes(name), "r": rank, "lora_alpha": alpha} for name, (rank, alpha) in RANKS.items()}
    files = {"config.json": config, "tensors.json": used, "adapters.json": adapters, "golden.json": {"cases": cases}}
    return {"chat_template.jinja": TEMPLATE} | {name: json.dumps(value, separators=(",", ":")) for name, value in files.items()}


def main() -> None:
    unpack()
    write_archive("phi4", {f"phi4/{file}": text.encode() for file, text in make().items()})


if __name__ == "__main__":
    main()
