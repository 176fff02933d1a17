"""Models that hear: decoder, encoder, feature extractor and sounds drawn anew, against Transformers."""

from __future__ import annotations

import copy
import shutil
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

import numpy
import torch
import transformers
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
from drawn_sounds import attention, edge, inverted
from goldens import GOLDEN
from images import draw_image
from PIL import Image
from text import draw_layers
from transformers import AutoImageProcessor, Gemma3nAudioFeatureExtractor, Gemma4AudioFeatureExtractor, WhisperFeatureExtractor

from mistral_paged import ChatCompletionRequest, Runner, Which

HEARING = GOLDEN / "hearing"
RATE = 16000
HEADS = [(4, 1), (6, 2), (4, 4), (3, 1), (8, 2)]
HEAD_WIDTHS = [16, 24, 32]
ENCODER_HEAD_WIDTHS = [8, 12, 16, 24, 64]
FRAMES_A_SECOND = 100


def families() -> list[str]:
    return sorted(path.parent.name for path in HEARING.glob("*/golden.json"))


def draw_config(case: Case) -> Config:
    """The configuration of a family's tiny model drawn anew, with the files of its processors to match in the folder."""
    rng, source = case.random, HEARING / case.family
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        shutil.copyfile(source / name, case.folder / name)
    config = read_json(source / "config.json")
    text = config["text_config"]
    heads, kv_heads = rng.choice(HEADS)
    text |= {"num_attention_heads": heads, "num_key_value_heads": kv_heads, "head_dim": rng.choice(HEAD_WIDTHS)}
    text |= {"hidden_size": rng.choice([32, 64, 96]), "intermediate_size": rng.choice([32, 96])}
    text |= {"num_hidden_layers": rng.randint(1, 3), "max_position_embeddings": 2048}
    DRAWS[case.family](case, config)
    return config


def draw_voxtral(case: Case, config: Config) -> None:
    """The encoder and the features of Whisper, whose chunks are short."""
    rng, audio = case.random, config["audio_config"]
    seconds, bins = rng.choice([1, 2]), rng.choice([8, 13, 40, 80])
    positions = seconds * FRAMES_A_SECOND // 2
    width = rng.choice([1, 2, 3, 4]) * rng.choice(ENCODER_HEAD_WIDTHS)
    run = rng.choice([run for run in (1, 2, 5, 10) if positions % run == 0])
    audio |= {"hidden_size": width, "num_attention_heads": next(heads for heads in (4, 3, 2, 1) if width % heads == 0)}
    audio |= {"intermediate_size": run * width, "num_hidden_layers": rng.randint(1, 3)}
    audio |= {"num_mel_bins": bins, "max_source_positions": positions}
    config["projector_hidden_act"] = rng.choice(["gelu", "gelu_pytorch_tanh", "silu"])
    if rng.random() < 0.3:
        audio["activation_function"] = rng.choice(["gelu_pytorch_tanh", "silu"])
    extractor = {"feature_extractor_type": "WhisperFeatureExtractor", "feature_size": bins, "chunk_length": seconds}
    write_json(case.folder / "preprocessor_config.json", extractor)


def draw_pooled(case: Case, config: Config) -> None:
    """The same of an encoder whose states become vectors by twos."""
    rng, audio = case.random, config["audio_config"]
    seconds, bins, heads = rng.choice([1, 2]), rng.choice([8, 13, 40, 80]), rng.choice([1, 2, 3, 4])
    names = {"hidden_size": "d_model", "intermediate_size": "encoder_ffn_dim", "num_hidden_layers": "encoder_layers"}
    names["num_attention_heads"] = "encoder_attention_heads"
    sizes = {"hidden_size": heads * rng.choice(ENCODER_HEAD_WIDTHS), "intermediate_size": rng.choice([32, 48])}
    sizes |= {"num_attention_heads": heads, "num_hidden_layers": rng.randint(1, 3)}
    audio |= {names[key] if names[key] in audio else key: value for key, value in sizes.items()}
    audio |= {"num_mel_bins": bins, "max_source_positions": seconds * FRAMES_A_SECOND // 2}
    if "projector_hidden_act" in config:
        config["projector_hidden_act"] = rng.choice(["gelu", "gelu_pytorch_tanh", "silu"])
        config["projector_bias"] = rng.random() < 0.7
    extractor = {"feature_extractor_type": "WhisperFeatureExtractor", "feature_size": bins, "chunk_length": seconds}
    write_json(case.folder / "preprocessor_config.json", extractor)


def draw_glmasr(case: Case, config: Config) -> None:
    """The encoder, whose heads rotate in part."""
    rng, audio = case.random, config["audio_config"]
    seconds, bins, heads = rng.choice([2, 4]), rng.choice([8, 13, 40, 80]), rng.choice([1, 2, 3, 4])
    width = heads * rng.choice([8, 16, 24, 64])
    audio |= {"hidden_size": width, "intermediate_size": 4 * width, "num_attention_heads": heads}
    audio |= {"num_key_value_heads": heads, "num_hidden_layers": rng.randint(1, 3), "num_mel_bins": bins}
    audio["hidden_act"] = rng.choice(["gelu", "gelu", "silu"])
    audio["rope_parameters"] |= {"partial_rotary_factor": rng.choice([0.25, 0.5, 1.0]), "rope_theta": rng.choice([500.0, 1e4])}
    config["projector_hidden_act"] = rng.choice(["gelu", "gelu_pytorch_tanh", "silu"])
    extractor = {"feature_extractor_type": "WhisperFeatureExtractor", "feature_size": bins, "chunk_length": seconds}
    write_json(case.folder / "preprocessor_config.json", extractor)


def draw_gemma4(case: Case, config: Config) -> None:
    """The conformer, and features in all the ways in which they may be made."""
    rng, audio, text = case.random, config["audio_config"], config["text_config"]
    draw_layers(text, rng)
    text["use_bidirectional_attention"] = rng.choice([None, "vision"])
    bins, heads = rng.choice([8, 13, 16, 30]), rng.choice([1, 2, 3, 4])
    # As many as what is left of the bins behind two convolutions, four times.
    channels = 4 * ((bins + 3) // 4) + rng.randint(0, 3)
    audio |= {"hidden_size": heads * rng.choice([4, 6, 8, 16]), "num_attention_heads": heads}
    audio |= {"num_hidden_layers": rng.randint(1, 3), "subsampling_conv_channels": [channels, rng.choice([4, 8])]}
    audio |= {"conv_kernel_size": rng.choice([1, 3, 5]), "residual_weight": rng.choice([0.5, 0.8])}
    audio |= {"attention_chunk_size": rng.choice([2, 5, 12]), "attention_context_left": rng.choice([2, 5, 13])}
    audio |= {"attention_context_right": rng.choice([0, 0, 1, 3]), "attention_logit_cap": rng.choice([2.0, 50.0])}
    audio |= {"use_clipped_linears": rng.random() < 0.6, "gradient_clipping": rng.choice([1e10, 1e10, 2.0])}
    audio |= {"output_proj_dims": rng.choice([16, 40]), "hidden_act": rng.choice(["silu", "silu", "gelu_pytorch_tanh"])}
    processor = read_json(HEARING / case.family / "processor_config.json")
    extractor = processor["feature_extractor"] = {"feature_extractor_type": "Gemma4AudioFeatureExtractor", "feature_size": bins}
    extractor |= {"preemphasis": rng.choice([0.0, 0.0, 0.97]), "preemphasis_htk_flavor": rng.random() < 0.5}
    extractor |= {"fft_overdrive": rng.random() < 0.3, "frame_length_ms": rng.choice([20.0, 32.0])}
    extractor |= {"input_scale_factor": rng.choice([1.0, 2.0]), "mel_floor": rng.choice([1e-3, 1e-2])}
    extractor |= {"min_frequency": rng.choice([0.0, 60.0]), "max_frequency": rng.choice([7600.0, 8000.0])}
    if rng.random() < 0.4:
        extractor["per_bin_mean"] = [rng.uniform(-2, 2) for _ in range(bins)]
        extractor["per_bin_stddev"] = [rng.uniform(0.5, 2) for _ in range(bins)]
    write_json(case.folder / "processor_config.json", processor)


def draw_gemma3n(case: Case, config: Config) -> None:
    """The same conformer under its older names, and blocks of convolutions in any order that timm takes."""
    rng, audio, text, vision = case.random, config["audio_config"], config["text_config"], config["vision_config"]
    draw_layers(text, rng)
    bins, heads = rng.choice([8, 13, 16, 30]), rng.choice([1, 2, 3, 4])
    audio |= {"hidden_size": heads * rng.choice([4, 6, 8, 16]), "conf_num_attention_heads": heads, "input_feat_size": bins}
    audio |= {"conf_num_hidden_layers": rng.randint(1, 3), "sscp_conv_channel_size": [rng.choice([3, 8]), rng.choice([4, 8])]}
    audio |= {"conf_conv_kernel_size": rng.choice([1, 3, 5]), "conf_residual_weight": rng.choice([0.5, 0.8])}
    audio |= {"conf_attention_chunk_size": rng.choice([2, 5, 12]), "conf_attention_context_left": rng.choice([2, 5, 13])}
    audio |= {"conf_attention_context_right": rng.choice([0, 0, 1, 3]), "conf_attention_logit_cap": rng.choice([2.0, 50.0])}
    audio |= {"gradient_clipping": rng.choice([1e10, 1e10, 2.0]), "conf_reduction_factor": rng.choice([4, 4, 5])}
    # Tokens of images and sounds have no inputs of layers.
    text["vocab_size_per_layer_input"] = rng.choice([300, 379])
    side, count = rng.choice([2, 3, 4]), rng.choice([2, 3, 4])
    size = [side * rng.choice([1, 2]) * 2**count for _ in range(2)]
    config["vision_soft_tokens_per_image"] = side * side
    blocks = [draw_stage(rng) for _ in range(count)]
    vision["model_args"] = {"stem_size": rng.choice([8, 16]), "msfa_output_resolution": side, "block_args": blocks}
    both = read_json(HEARING / case.family / "preprocessor_config.json")
    both |= {"size": {"height": size[0], "width": size[1]}, "resample": rng.choice([2, 3]), "do_normalize": rng.random() < 0.5}
    both |= {"feature_size": bins, "preemphasis": rng.choice([0.0, 0.97]), "preemphasis_htk_flavor": rng.random() < 0.5}
    both |= {"fft_overdrive": rng.random() < 0.7, "frame_length_ms": rng.choice([20.0, 32.0])}
    both |= {"input_scale_factor": rng.choice([1.0, 2.0]), "mel_floor": rng.choice([1e-5, 1e-2])}
    write_json(case.folder / "preprocessor_config.json", both)


def draw_stage(rng: Random) -> list[Config]:
    """Blocks, of which the first takes every other place and the last is no attention."""
    channels = rng.choice([8, 16, 24])
    first = [edge(2, channels, rng.choice([1.0, 2.5])), inverted(2, channels, 2.0, rng.choice([0, 3]), rng.choice([3, 4, 5]))]
    between = [attention(channels, rng.choice([1, 3]), rng.choice([8, 16]), rng.choice([1, 2])) for _ in range(rng.randint(0, 2))]
    last = [edge(1, channels, 1.6), inverted(1, channels, rng.choice([1.0, 3.0]), rng.choice([0, 3, 5]), rng.choice([0, 0, 3]))]
    return [rng.choice(first), *between, rng.choice(last)]


DRAWS: dict[str, Callable[[Case, Config], None]] = {
    "voxtral": draw_voxtral,
    "gemma3n": draw_gemma3n,
    "gemma4": draw_gemma4,
    "qwen2_audio": draw_pooled,
    "audioflamingo3": draw_pooled,
    "glmasr": draw_glmasr,
}
"""What only some families have, in the configuration and in those of the processors."""
SEEING = {"gemma3n", "gemma4"}
"""Families whose models see as well."""
MASKS = {"qwen2_audio": "feature_attention_mask", "audioflamingo3": "input_features_mask", "glmasr": "input_features_mask"}
"""What tells a reference which frames are of sounds, where chunks become features each for itself."""
ONE_CHUNK = {"qwen2_audio"}
"""Families that hear no more."""


class Auto:
    """Loads a model by the class that its configuration names, for not all have a place among the automatic ones."""

    @staticmethod
    def from_config(config: Any, **options: Any) -> Any:
        # timm takes what it reads of its blocks out of them.
        kept = copy.deepcopy(config)
        model = getattr(transformers, config.architectures[0])._from_config(config, **options)
        model.config = kept
        return model

    @staticmethod
    def from_pretrained(folder: Path, **options: Any) -> Any:
        name = transformers.AutoConfig.from_pretrained(folder).architectures[0]
        return getattr(transformers, name).from_pretrained(folder, **options)


def draw_sound(rng: Random, most: int = 4 * RATE) -> numpy.ndarray:
    """Tones with noise, up to several chunks long."""
    time = numpy.arange(rng.randint(1500, most)) / RATE
    noise = numpy.random.RandomState(rng.randrange(1 << 30)).randn(len(time))
    tones = sum(numpy.sin(2 * numpy.pi * rng.randint(60, 3000) * time) for _ in range(3))
    return (rng.choice([0.02, 0.3]) * tones + rng.choice([0.001, 0.05]) * noise).astype(numpy.float32)


def draw_messages(case: Case) -> tuple[list[Config], list[numpy.ndarray], list[Image.Image]]:
    """A message with one or two sounds, and perhaps an image, and those."""
    rng = case.random
    # Of several, Gemma 3n's processor fills all but the longest up.
    count = 1 if case.family == "gemma3n" else rng.choice([1, 1, 2])
    kinds = ["audio"] * count + ["image"] * (case.family in SEEING and rng.random() < 0.5)
    rng.shuffle(kinds)
    most = 4 * RATE
    if case.family in ONE_CHUNK:
        most = read_json(case.folder / "preprocessor_config.json")["chunk_length"] * RATE
    content: list[Config] = []
    for kind in kinds:
        sound = {"type": "audio", "audio": draw_sound(rng, most), "rate": RATE}
        content.append(sound if kind == "audio" else {"type": "image", "image": draw_image(rng)})
        if rng.random() < 0.5:
            content.append({"type": "text", "text": rng.choice(["and the other", "see", "then a"])})
    content.append({"type": "text", "text": "describe the image"})
    sounds, images = ([part[kind] for part in content if part["type"] == kind] for kind in ("audio", "image"))
    return [{"role": "user", "content": content}], sounds, images


def whisper_inputs(case: Case, sounds: list[numpy.ndarray]) -> dict[str, torch.Tensor]:
    """All chunks of all sounds, `[chunks, mel bins, frames]`."""
    extractor = WhisperFeatureExtractor.from_pretrained(case.folder)
    options: dict[str, Any] = {"padding": True, "truncation": False, "pad_to_multiple_of": extractor.n_samples}
    all_chunks = []
    for sound in sounds:
        values = extractor(sound, sampling_rate=RATE, return_tensors="pt", **options)["input_features"][0]
        all_chunks.append(values.reshape(extractor.feature_size, -1, extractor.nb_max_frames).transpose(0, 1))
    return {"input_features": torch.cat(all_chunks)}


def masked_inputs(case: Case, sounds: list[numpy.ndarray]) -> dict[str, torch.Tensor]:
    """The same, each chunk for itself, and which frames are of sounds."""
    extractor = WhisperFeatureExtractor.from_pretrained(case.folder)
    length = extractor.n_samples
    chunks = [sound[at : at + length] for sound in sounds for at in range(0, len(sound), length)]
    given = extractor(chunks, sampling_rate=RATE, return_attention_mask=True, return_tensors="pt")
    return {"input_features": given["input_features"], MASKS[case.family]: given["attention_mask"]}


def gemma4_inputs(case: Case, sounds: list[numpy.ndarray]) -> dict[str, torch.Tensor]:
    """All sounds, as long as the longest, and which frames are theirs."""
    extractor = read_json(case.folder / "processor_config.json")["feature_extractor"]
    given = Gemma4AudioFeatureExtractor(**extractor)(sounds, return_tensors="pt")
    return {name: given[name] for name in ("input_features", "input_features_mask")}


def gemma3n_inputs(case: Case, sounds: list[numpy.ndarray]) -> dict[str, torch.Tensor]:
    """A sound."""
    given = Gemma3nAudioFeatureExtractor(**read_json(case.folder / "preprocessor_config.json"))(sounds, return_tensors="pt")
    return {name: given[name] for name in ("input_features", "input_features_mask")}


def inputs_of(
    case: Case, sounds: list[numpy.ndarray], images: list[Image.Image], token_ids: list[int]
) -> dict[str, torch.Tensor]:
    """What the reference is to be given beside the tokens."""
    if case.family in MASKS:
        return masked_inputs(case, sounds)
    if case.family not in SEEING:
        return whisper_inputs(case, sounds)
    inputs = gemma3n_inputs(case, sounds) if case.family == "gemma3n" else gemma4_inputs(case, sounds)
    if images:
        seen = AutoImageProcessor.from_pretrained(case.folder, backend="pil")(images=images, return_tensors="pt")
        inputs |= {name: value for name, value in seen.items() if name != "num_soft_tokens_per_image"}
    if case.family == "gemma3n":
        return inputs
    inputs["mm_token_type_ids"] = (torch.tensor([token_ids]) == case.configuration["image_token_id"]).long()
    return inputs


def engine_answer(case: Case, runner: Runner) -> Answer:
    """What the engine answers to a message, with what the reference is to be given of its sounds."""
    messages, sounds, images = draw_messages(case)
    request = ChatCompletionRequest(messages, "m", max_tokens=6, temperature=0, ignore_eos=True, logprobs=True, top_logprobs=20)
    entries = runner.send_chat_completion_request(request).choices[0].logprobs.content
    # From a token of a sound on, for which there is no sound, a reference refuses the sequence.
    keys = ("audio_token_id", "audio_token_index", "image_token_id", "video_token_id")
    tokens = {case.configuration[key] for key in keys if key in case.configuration}
    known = next((place for place, entry in enumerate(entries) if entry.token_id in tokens), len(entries) - 1)
    answer = answer_of_continuation(runner.tokenize_text(messages), entries[: known + 1])
    answer.inputs = inputs_of(case, sounds, images, answer.token_ids)
    return answer


MESSAGES = 3


def compare(case: Case) -> Comparison:
    """One model of the family, with some messages, against Transformers."""
    model = draw_model(case, lambda: draw_config(case), Auto)
    save_model(case, model, case.random.random() < 0.5)
    runner = load_engine(case, Which.MultimodalPlain(str(case.folder), dtype=EXACT))
    answers = [engine_answer(case, runner) for _ in range(MESSAGES)]
    return compare_answers(load_reference(case.folder, Auto), answers)
