"""Models that see: decoder, encoder, processor and images drawn anew, against Transformers with images over Pillow."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

import numpy
import torch
from common import (
    EXACT,
    Answer,
    Case,
    Comparison,
    Config,
    answer_of_continuation,
    compare_answers,
    draw_model,
    load_engine,
    load_reference,
    read_json,
    save_model,
    write_json,
)
from goldens import GOLDEN
from PIL import Image
from text import draw_experts, draw_layers, draw_states
from transformers import AutoImageProcessor, AutoModelForImageTextToText
from transformers.image_processing_backends import TorchvisionBackend
from transformers.modeling_outputs import MoeCausalLMOutputWithPast
from transformers.models.mllama.processing_mllama import (
    convert_sparse_cross_attention_mask_to_dense,
    get_cross_attention_token_mask,
)

from mistral_paged import ChatCompletionRequest, Runner, Which

VISION = GOLDEN / "vision"
NOT_OF_THE_FOLDER = {"golden.json", "inputs.json", "tensors.json"}
NOT_OF_TRANSFORMERS = {"phi3_v"}
TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json")

HEADS = [(4, 1), (6, 2), (4, 4), (3, 1), (5, 5), (8, 2), (2, 2)]
HEAD_WIDTHS = [16, 24, 32, 64]
TURNED_HEAD_WIDTHS = [16, 32, 64]
"""Where sections of a head follow height and width."""
ENCODER_HEAD_WIDTHS = [8, 12, 16, 24, 64]
TURNED_ENCODER_HEAD_WIDTHS = [8, 16, 32, 64]
"""Where an encoder turns its heads, in quarters."""
TURNED_ENCODERS = {
    "gemma4_vision",
    "glm46v",
    "glm4v",
    "glm4v_moe",
    "lighton_ocr",
    "glm_ocr",
    "exaone4_5",
    "llama4_vision",
    "mistral3",
    "pixtral",
    "qwen2_vl",
    "qwen2_5_vl",
    "qwen3_vl",
    "qwen3_vl_moe",
    "qwen3_5_vision",
    "qwen3_5_moe_vision",
}
ALWAYS_TIED = {"gemma3_vision", "gemma4_vision", "aya_vision", "cohere2_vision"}
NEVER_TIED = {"mllama"}
"""Whose token embedding has rows that are no logits."""

TOKEN_KINDS = {
    "gemma3_vision": "token_type_ids",
    "gemma4_vision": "mm_token_type_ids",
    "qwen2_vl": "mm_token_type_ids",
    "qwen2_5_vl": "mm_token_type_ids",
    "qwen3_vl": "mm_token_type_ids",
    "glm46v": "mm_token_type_ids",
    "glm4v": "mm_token_type_ids",
    "glm4v_moe": "mm_token_type_ids",
    "glm_ocr": "mm_token_type_ids",
    "qwen3_vl_moe": "mm_token_type_ids",
    "qwen3_5_vision": "mm_token_type_ids",
    "qwen3_5_moe_vision": "mm_token_type_ids",
}
"""What tells a reference which tokens are of images."""
NESTED_IMAGES = {"idefics2", "idefics3", "mllama"}
"""Whose processors want the images of each prompt in a list of its own."""
OVER_TORCHVISION = {"cohere2_vision", "lfm2_vl", "llama4_vision"}
"""Whose processors there are over torchvision alone."""
ALWAYS_CUT = {"aya_vision", "internvl"}
"""Whose processors ask those of images for tiles."""
NOT_OF_THE_MODEL = {"num_crops", "num_patches", "num_soft_tokens_per_image", "aspect_ratios"}
NOT_OF_LFM2_VL = {"image_rows", "image_cols", "image_sizes"}

SQUARES_OF_PATCHES = (28, 42, 56)
GRIDS = [(1, 2), (2, 1), (2, 2), (1, 3), (3, 1), (1, 1), (3, 2)]


def families() -> list[str]:
    """The tiny models of Transformers' families, whether their weights lie there or are drawn."""
    return sorted({path.parent.name for path in VISION.glob("*/golden.json") if has_model(path.parent)})


def has_model(folder: Path) -> bool:
    return (folder / "config.json").exists() and folder.name not in NOT_OF_TRANSFORMERS


def is_drawn(family: str) -> bool:
    return (VISION / family / "tensors.json").exists()


def draw_decoder(case: Case, text: Config) -> None:
    """Heads, widths and layers of the decoder."""
    rng = case.random
    heads, kv_heads = rng.choice(HEADS)
    positions = text.get("rope_parameters", {})
    width = rng.choice(TURNED_HEAD_WIDTHS if "mrope_section" in positions else HEAD_WIDTHS)
    if "mrope_section" in positions:
        turned = int(width * positions.get("partial_rotary_factor", 1))
        positions["mrope_section"] = sections(turned // 2, positions.get("mrope_interleaved", False))
    if "head_dim" in text:
        text |= {"head_dim": width, "hidden_size": rng.choice([32, 64, 96])}
    else:
        text["hidden_size"] = heads * width
    text |= {"num_attention_heads": heads, "num_key_value_heads": kv_heads}
    text |= {"intermediate_size": rng.choice([32, 64, 96]), "num_hidden_layers": rng.randint(1, 4)}
    if is_drawn(case.family):
        draw_layers(text, rng)
        draw_states(text, rng)
        draw_experts(text, rng)
    elif text.get("layer_types"):
        kinds = sorted(set(text["layer_types"]))
        text["layer_types"] = [rng.choice(kinds) for _ in range(text["num_hidden_layers"])]


def sections(half: int, interleaved: bool) -> list[int]:
    """Pairs of a head that follow time, height and width."""
    if interleaved:
        return [half - 2 * (half // 3), half // 3, half // 3]
    time = half // 4
    height = (half - time) // 2
    return [time, height, half - time - height]


def draw_encoder(case: Case, text: Config, vision: Config) -> None:
    """Heads, widths and layers of the encoder, under the names that its family has for them."""
    rng = case.random
    heads, depth = rng.choice([1, 2, 3, 4]), rng.randint(1, 4)
    width = rng.choice(TURNED_ENCODER_HEAD_WIDTHS if case.family in TURNED_ENCODERS else ENCODER_HEAD_WIDTHS)
    if "embed_dim" in vision:
        vision |= {"embed_dim": heads * width, "hidden_size": text["hidden_size"], "mlp_ratio": rng.choice([1, 2, 4])}
    elif "out_hidden_size" in vision:
        vision |= {"hidden_size": heads * width, "out_hidden_size": text["hidden_size"]}
        vision["intermediate_size"] = rng.choice([32, 48, 64])
    else:
        vision |= {"hidden_size": heads * width, "intermediate_size": rng.choice([32, 48, 96])}
    vision["num_heads" if "num_heads" in vision else "num_attention_heads"] = heads
    vision["depth" if "depth" in vision else "num_hidden_layers"] = depth
    if "head_dim" in vision:
        vision["head_dim"] = width
    if "fullatt_block_indexes" in vision:
        vision["fullatt_block_indexes"] = some_layers(rng, depth, depth)
        vision["window_size"] = rng.choice([28, 56, 84, 112])
    if vision.get("deepstack_visual_indexes"):
        vision["deepstack_visual_indexes"] = some_layers(rng, depth, min(depth, text["num_hidden_layers"]))
    if "num_position_embeddings" in vision:
        vision["num_position_embeddings"] = rng.choice([9, 16, 25, 49])


def some_layers(rng: Random, depth: int, at_most: int) -> list[int]:
    return sorted(rng.sample(range(depth), rng.randint(0, at_most)))


def draw_llava(case: Case, config: Config, processor: Config) -> None:
    """The layer whose rows are taken, the projector, the size of tiles and how many there may be; CLIP or SigLIP."""
    rng, vision = case.random, config["vision_config"]
    depth, side = vision["num_hidden_layers"], rng.choice(SQUARES_OF_PATCHES)
    config["vision_feature_layer"] = rng.randint(1, depth) if rng.random() < 0.2 else rng.choice([-1, -2] if depth > 1 else [-1])
    config["multimodal_projector_bias"] = rng.random() < 0.6
    config["projector_hidden_act"] = rng.choice(["gelu", "gelu", "gelu_pytorch_tanh"])
    vision["image_size"] = side
    images = processor["image_processor"]
    images |= {"crop_size": {"height": side, "width": side}, "size": {"shortest_edge": side}}
    if "image_grid_pinpoints" in config:
        grids = rng.sample(GRIDS, rng.randint(1, 5))
        config["image_grid_pinpoints"] = images["image_grid_pinpoints"] = [
            [rows * side, columns * side] for rows, columns in grids
        ]
    if rng.random() < 0.3:
        vision |= {"model_type": "siglip_vision_model", "hidden_act": "gelu_pytorch_tanh", "vision_use_head": False}
        vision.pop("projection_dim")
        config["vision_feature_select_strategy"] = processor["vision_feature_select_strategy"] = "full"
        processor["num_additional_image_tokens"] = 0
    elif rng.random() < 0.3:
        vision["hidden_act"] = rng.choice(["gelu", "quick_gelu", "gelu_pytorch_tanh"])


def draw_mistral3(case: Case, config: Config, _processor: Config) -> None:
    """The projector's bias and the encoder's activation."""
    config["multimodal_projector_bias"] = case.random.random() < 0.5
    if case.random.random() < 0.4:
        config["vision_config"]["hidden_act"] = case.random.choice(["silu", "gelu"])


def draw_gemma3(case: Case, config: Config, processor: Config) -> None:
    """How many tokens an image is."""
    side = case.random.choice([1, 2, 4])
    config["mm_tokens_per_image"] = processor["image_seq_length"] = processor["image_processor"]["image_seq_length"] = side * side


def draw_gemma4(case: Case, config: Config, images: Config) -> None:
    """How large patches and squares of them are, how many tokens an image is at most, and whether its rows see each other."""
    rng, vision = case.random, config["vision_config"]
    patch, square = rng.choice([4, 6]), rng.choice([2, 3])
    vision |= {"patch_size": patch, "pooling_kernel_size": square, "position_embedding_size": 140 * square}
    vision |= {"num_key_value_heads": vision["num_attention_heads"], "standardize": rng.random() < 0.5}
    vision["use_clipped_linears"] = rng.random() < 0.5
    config["text_config"]["use_bidirectional_attention"] = rng.choice([None, "vision"])
    images |= {"patch_size": patch, "pooling_kernel_size": square, "max_soft_tokens": rng.choice([70, 140])}


def draw_idefics2(case: Case, config: Config, _processor: Config) -> None:
    """The resampler between encoder and decoder."""
    rng, kv_heads = case.random, case.random.choice([1, 2])
    perceiver = config["perceiver_config"]
    perceiver |= {"hidden_size": config["text_config"]["hidden_size"], "num_key_value_heads": kv_heads}
    perceiver |= {"resampler_n_heads": kv_heads * rng.choice([1, 2, 3]), "resampler_head_dim": rng.choice([8, 12, 16])}
    perceiver["resampler_depth"] = rng.randint(1, 3)


def draw_lfm2_vl(case: Case, config: Config, images: Config) -> None:
    """How large patches, squares of them and tiles are, when an image is cut, and the projector."""
    rng = case.random
    patch, factor = rng.choice([4, 6, 8]), rng.choice([1, 2, 3])
    config |= {"downsample_factor": factor, "projector_hidden_size": rng.choice([24, 40])}
    config |= {"projector_use_layernorm": rng.random() < 0.6, "projector_bias": rng.random() < 0.6}
    config["vision_config"] |= {"patch_size": patch, "num_patches": rng.choice([4, 16, 25, 64])}
    # The reference fails where a narrow image has more patches than the most that may be.
    most = rng.choice([12, 30])
    images |= {"downsample_factor": factor, "encoder_patch_size": patch, "tile_size": patch * factor * rng.choice([1, 2, 3])}
    images |= {"min_image_tokens": rng.choice([1, 2]), "max_image_tokens": most, "max_pixels_tolerance": rng.choice([1.0, 2.5])}
    images |= {"min_tiles": 2, "max_tiles": rng.choice([3, 4, 10]), "use_thumbnail": rng.random() < 0.8}
    images["do_image_splitting"] = rng.random() < 0.8


def draw_glm4v(case: Case, config: Config, images: Config) -> None:
    """How large patches are, and the tile that positions were learned of; biases, and which layers have experts."""
    rng, text = case.random, config["text_config"]
    patch, side = rng.choice([5, 7]), rng.choice([1, 3, 4, 6])
    config["vision_config"] |= {"patch_size": patch, "image_size": patch * side}
    images["patch_size"] = patch
    if case.family == "glm4v":
        return
    config["vision_config"]["attention_bias"] = rng.random() < 0.5
    if case.family == "glm46v" and rng.random() < 0.4:
        experts = read_json(VISION / "glm4v_moe" / "config.json")["text_config"]
        text["head_dim"] = text["hidden_size"] // text["num_attention_heads"]
        text |= {key: value for key, value in experts.items() if key not in text or key == "model_type"}
    if "n_routed_experts" in text:
        text |= {"first_k_dense_replace": rng.randint(0, text["num_hidden_layers"]), "n_shared_experts": rng.choice([1, 2])}
        text |= {"norm_topk_prob": rng.random() < 0.7, "routed_scaling_factor": rng.choice([1.0, 1.5])}
        if text["model_type"] == "glm4v_moe_text":
            text["attention_bias"] = rng.random() < 0.7


def draw_exaone(case: Case, config: Config, images: Config) -> None:
    """How large patches are, and how many heads of keys and values there are."""
    vision, patch = config["vision_config"], case.random.choice([7, 14])
    heads = vision["num_heads"]
    kv_heads = case.random.choice([number for number in range(1, heads + 1) if heads % number == 0])
    vision |= {"patch_size": patch, "num_key_value_heads": kv_heads}
    images["patch_size"] = patch


def draw_lighton(case: Case, config: Config, images: Config) -> None:
    """How large patches and squares of them are, and whether an image has whole squares alone."""
    rng = case.random
    patch, square = rng.choice([5, 7]), rng.choice([1, 2, 3])
    config["spatial_merge_size"] = square
    config["vision_config"] |= {"patch_size": patch, "hidden_act": rng.choice(["silu", "gelu"])}
    edge = patch * rng.choice([1, square])
    images |= {"patch_size": {"height": edge, "width": edge}, "size": {"longest_edge": rng.choice([64, 100])}}


def draw_llama4(case: Case, config: Config, images: Config) -> None:
    """How large tiles and squares of patches are, and the adapter."""
    rng, vision = case.random, config["vision_config"]
    square, patch = rng.choice([1, 2, 3]), rng.choice([7, 14])
    side = patch * square * rng.choice([1, 2])
    vision |= {"patch_size": patch, "image_size": side, "pixel_shuffle_ratio": 1 / square}
    vision["intermediate_size"] = vision["hidden_size"] * square**2
    width = rng.choice([16, 24])
    vision |= {"projector_input_dim": width, "projector_output_dim": width, "vision_output_dim": width}
    config["text_config"]["intermediate_size_mlp"] = rng.choice([32, 64])
    images |= {"size": {"height": side, "width": side}, "max_patches": rng.choice([1, 3, 5])}
    images["resize_to_max_canvas"] = rng.random() < 0.3


def draw_squares(case: Case, config: Config, images: Config, sides: list[int]) -> int:
    """How large tiles, patches and squares of them are, and how many tiles there may be. Returns a side of a square."""
    rng, square, patch = case.random, case.random.choice(sides), case.random.choice([4, 7])
    side = patch * square * rng.choice([1, 2])
    config["vision_config"] |= {"patch_size": patch, "image_size": side}
    images |= {"size": {"height": side, "width": side}, "max_patches": rng.choice([1, 3, 6])}
    images["min_patches"] = min(images["max_patches"], rng.choice([1, 1, 2]))
    return square


def draw_internvl(case: Case, config: Config, images: Config) -> None:
    """The encoder's norms and biases, and tiles."""
    rng, vision = case.random, config["vision_config"]
    config["downsample_ratio"] = 1 / draw_squares(case, config, images, [1, 2])
    vision["attention_bias"] = rng.random() < 0.5
    vision["use_mean_pooling"] = rng.random() < 0.7
    vision["norm_type"] = rng.choice(["layer_norm", "rms_norm"]) if vision["use_mean_pooling"] else "layer_norm"


def draw_cohere(case: Case, config: Config, images: Config) -> None:
    """The projector, and tiles."""
    config["downsample_factor"] = draw_squares(case, config, images, [1, 2, 3])
    config["alignment_intermediate_size"] = case.random.choice([24, 40])


def draw_mllama(case: Case, config: Config, images: Config) -> None:
    """Which layers look at images, what comes out of the encoder, and how many tiles of which size there may be."""
    rng, text, vision = case.random, config["text_config"], config["vision_config"]
    num_layers = text["num_hidden_layers"] = max(2, text["num_hidden_layers"])
    text["cross_attention_layers"] = sorted(rng.sample(range(num_layers), rng.randint(1, num_layers - 1)))
    depth = vision["num_hidden_layers"]
    taken = sorted(rng.sample(range(depth), rng.randint(1, depth)))
    vision["attention_heads"] = vision.pop("num_attention_heads")
    vision |= {"num_global_layers": rng.randint(0, 2), "intermediate_layers_indices": taken}
    vision["vision_output_dim"] = vision["hidden_size"] * (1 + len(taken))
    vision["hidden_act"] = rng.choice(["gelu", "gelu", "gelu_pytorch_tanh", "quick_gelu"])
    patch = rng.choice([7, 14, 16])
    side, most = patch * rng.choice([1, 2, 3, 4]), rng.choice([1, 2, 3, 4, 4, 6])
    vision |= {"patch_size": patch, "image_size": side, "max_num_tiles": most}
    vision["supported_aspect_ratios"] = [[rows, columns] for rows in range(1, most + 1) for columns in range(1, most // rows + 1)]
    images |= {"size": {"height": side, "width": side}, "max_image_tiles": most}


DRAWS: dict[str, Callable[[Case, Config, Config], None]] = {
    "llava": draw_llava,
    "llava_next": draw_llava,
    "mistral3": draw_mistral3,
    "pixtral": draw_mistral3,
    "gemma3_vision": draw_gemma3,
    "gemma4_vision": draw_gemma4,
    "idefics2": draw_idefics2,
    "lfm2_vl": draw_lfm2_vl,
    "llama4_vision": draw_llama4,
    "glm46v": draw_glm4v,
    "glm4v": draw_glm4v,
    "glm4v_moe": draw_glm4v,
    "glm_ocr": draw_glm4v,
    "exaone4_5": draw_exaone,
    "lighton_ocr": draw_lighton,
    "mllama": draw_mllama,
    "internvl": draw_internvl,
    "aya_vision": draw_cohere,
    "cohere2_vision": draw_cohere,
}
"""What only some families have, in the configuration and in that of the processor."""


def draw_config(case: Case) -> Config:
    """The configuration of a family's tiny model drawn anew, with processor files to match in the folder."""
    source = VISION / case.family
    for path in [path for path in source.iterdir() if path.suffix in (".json", ".jinja") and path.name not in NOT_OF_THE_FOLDER]:
        shutil.copyfile(path, case.folder / path.name)
    for name in [name for name in TOKENIZER_FILES if not (source / name).exists()]:
        shutil.copyfile(VISION / "qwen3_vl" / name, case.folder / name)
    config = read_json(source / "config.json")
    text, vision = config["text_config"], config["vision_config"]
    draw_decoder(case, text)
    if case.family not in ALWAYS_TIED | NEVER_TIED:
        config["tie_word_embeddings"] = text["tie_word_embeddings"] = case.random.random() < 0.4
    draw_encoder(case, text, vision)
    if case.family in DRAWS:
        of_images = case.folder / "preprocessor_config.json"
        path = of_images if is_drawn(case.family) else case.folder / "processor_config.json"
        processor = read_json(path) if path.exists() else {}
        DRAWS[case.family](case, config, processor)
        if processor:
            write_json(path, processor)
    return config


def draw_image(rng: Random) -> Image.Image:
    """Waves of colour or noise, of any shape from narrow to wide."""
    sizes = [(20, 200, 20, 200), (30, 60, 100, 300), (100, 300, 30, 60), (64, 64, 64, 64)]
    narrowest, widest, lowest, highest = rng.choice(sizes)
    width, height = rng.randint(narrowest, widest), rng.randint(lowest, highest)
    noise = numpy.random.RandomState(rng.randrange(1 << 30))
    if rng.random() < 0.3:
        return Image.fromarray(noise.randint(0, 256, (height, width, 3)).astype(numpy.uint8))
    rows, columns = numpy.indices((height, width))[..., None] / numpy.array([9, 7]).reshape(2, 1, 1, 1)
    waves = 128 + 100 * numpy.sin(rows * noise.rand(3) + columns * noise.rand(3))
    return Image.fromarray(waves.astype(numpy.uint8))


def draw_messages(rng: Random) -> tuple[list[Config], list[Image.Image]]:
    """A message with one to three images, and those."""
    images = [draw_image(rng) for _ in range(rng.choice([1, 1, 2, 3]))]
    content: list[Config] = []
    for image in images:
        content.append({"type": "image", "image": image})
        if rng.random() < 0.5:
            content.append({"type": "text", "text": rng.choice(["and the other", "see", "then a"])})
    content.append({"type": "text", "text": "describe the image"})
    return [{"role": "user", "content": content}], images


def engine_answer(case: Case, runner: Runner, processor: Any) -> Answer:
    """What the engine answers to a message, with what the reference is to be given of its images."""
    messages, images = draw_messages(case.random)
    image_token = case.configuration.get("image_token_id", case.configuration.get("image_token_index"))
    request = ChatCompletionRequest(messages, "m", max_tokens=6, temperature=0, ignore_eos=True, logprobs=True, top_logprobs=20)
    entries = runner.send_chat_completion_request(request).choices[0].logprobs.content
    # From an image token on, for which there is no image, a reference refuses the sequence.
    known = next((place for place, entry in enumerate(entries) if entry.token_id == image_token), len(entries) - 1)
    answer = answer_of_continuation(runner.tokenize_text(messages), entries[: known + 1])
    options = {"crop_to_patches": True} if case.family in ALWAYS_CUT else {}
    given = processor(images=[images] if case.family in NESTED_IMAGES else images, return_tensors="pt", **options)
    others = NOT_OF_THE_MODEL | (NOT_OF_LFM2_VL if case.family == "lfm2_vl" else set())
    answer.inputs = {name: value for name, value in given.items() if name not in others}
    token_ids = torch.tensor([answer.token_ids])
    answer.inputs["attention_mask"] = torch.ones_like(token_ids)
    if case.family == "mllama":
        most, num_tiles = case.configuration["vision_config"]["max_num_tiles"], answer.inputs.pop("num_tiles")
        answer.inputs["cross_attention_mask"] = cross_attention_mask(answer.token_ids, image_token, num_tiles, most)
    if case.family in TOKEN_KINDS:
        answer.inputs[TOKEN_KINDS[case.family]] = (token_ids == image_token).long()
    return answer


def cross_attention_mask(token_ids: list[int], image_token: int, num_tiles: Any, most: int) -> torch.Tensor:
    """Which tiles each row looks at, as the processor of Llama 3.2 Vision has it."""
    seen = [get_cross_attention_token_mask(token_ids, image_token)]
    return torch.from_numpy(convert_sparse_cross_attention_mask_to_dense(seen, num_tiles, most, len(token_ids)))


def as_trained(model: Any) -> Any:
    """Llama 3.2 Vision, where a row that looks at no image takes nothing of attention to images, as in Meta's code.

    Transformers lets it look at all of them, and at what fills their tiles up.
    """

    def keep_rows(layer: Any, _arguments: Any, named: dict[str, Any]) -> None:
        layer.cross_attn.rows = named["full_text_row_masked_out_mask"][:, 0]

    for layer in model.model.language_model.layers:
        if hasattr(layer, "cross_attn"):
            layer.register_forward_pre_hook(keep_rows, with_kwargs=True)
            layer.cross_attn.register_forward_hook(lambda own, _arguments, output: (output[0] * own.rows, *output[1:]))
    return model


def resize_by_pillow(_self: Any, image: torch.Tensor, size: Any, resample: Any, **_options: Any) -> torch.Tensor:
    """As the other processors resize."""
    edges = int(size.width), int(size.height)
    levels = image.permute(0, 2, 3, 1).contiguous().numpy()
    resized = [numpy.asarray(Image.fromarray(pixels).resize(edges, int(resample))) for pixels in levels]
    return torch.from_numpy(numpy.stack(resized)).permute(0, 3, 1, 2)


def image_processor(case: Case) -> Any:
    if case.family not in OVER_TORCHVISION:
        return AutoImageProcessor.from_pretrained(case.folder, backend="pil")
    TorchvisionBackend.resize = resize_by_pillow
    # The reference reads it of an output that has none.
    MoeCausalLMOutputWithPast.image_outputs = None
    return AutoImageProcessor.from_pretrained(case.folder, backend="torchvision")


MESSAGES = 3


def compare(case: Case) -> Comparison:
    """One model of the family, with some messages, against Transformers."""
    model = draw_model(case, lambda: draw_config(case), AutoModelForImageTextToText)
    processor = image_processor(case)
    save_model(case, model, case.random.random() < 0.5)
    runner = load_engine(case, Which.MultimodalPlain(str(case.folder), dtype=EXACT))
    answers = [engine_answer(case, runner, processor) for _ in range(MESSAGES)]
    reference = load_reference(case.folder, AutoModelForImageTextToText)
    return compare_answers(as_trained(reference) if case.family == "mllama" else reference, answers)
