"""Models that hear: decoder, encoder, feature extractor and sounds drawn anew, against Transformers."""

from __future__ import annotations

import shutil
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
from transformers import AutoModelForMultimodalLM, WhisperFeatureExtractor

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
    """The configuration of a family's tiny model drawn anew, with the file of its feature extractor to match in the folder."""
    rng, source = case.random, HEARING / case.family
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        shutil.copyfile(source / name, case.folder / name)
    config = read_json(source / "config.json")
    text, audio = config["text_config"], config["audio_config"]
    heads, kv_heads = rng.choice(HEADS)
    text |= {"num_attention_heads": heads, "num_key_value_heads": kv_heads, "head_dim": rng.choice(HEAD_WIDTHS)}
    text |= {"hidden_size": rng.choice([32, 64, 96]), "intermediate_size": rng.choice([32, 96])}
    text |= {"num_hidden_layers": rng.randint(1, 3), "max_position_embeddings": 2048}
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
    return config


def draw_sound(rng: Random) -> numpy.ndarray:
    """Tones with noise, up to several chunks long."""
    time = numpy.arange(rng.randint(1000, 4 * RATE)) / RATE
    noise = numpy.random.RandomState(rng.randrange(1 << 30)).randn(len(time))
    tones = sum(numpy.sin(2 * numpy.pi * rng.randint(60, 3000) * time) for _ in range(3))
    return (rng.choice([0.02, 0.3]) * tones + rng.choice([0.001, 0.05]) * noise).astype(numpy.float32)


def draw_messages(rng: Random) -> tuple[list[Config], list[numpy.ndarray]]:
    """A message with one or two sounds, and those."""
    sounds = [draw_sound(rng) for _ in range(rng.choice([1, 1, 2]))]
    content: list[Config] = []
    for sound in sounds:
        content.append({"type": "audio", "audio": sound, "rate": RATE})
        if rng.random() < 0.5:
            content.append({"type": "text", "text": rng.choice(["and the other", "see", "then a"])})
    content.append({"type": "text", "text": "describe the image"})
    return [{"role": "user", "content": content}], sounds


def features_of(case: Case, sounds: list[numpy.ndarray]) -> torch.Tensor:
    """All chunks of all sounds, `[chunks, mel bins, frames]`."""
    extractor = WhisperFeatureExtractor.from_pretrained(case.folder)
    options: dict[str, Any] = {"padding": True, "truncation": False, "pad_to_multiple_of": extractor.n_samples}
    all_chunks = []
    for sound in sounds:
        values = extractor(sound, sampling_rate=RATE, return_tensors="pt", **options)["input_features"][0]
        all_chunks.append(values.reshape(extractor.feature_size, -1, extractor.nb_max_frames).transpose(0, 1))
    return torch.cat(all_chunks)


def engine_answer(case: Case, runner: Runner) -> Answer:
    """What the engine answers to a message, with what the reference is to be given of its sounds."""
    messages, sounds = draw_messages(case.random)
    request = ChatCompletionRequest(messages, "m", max_tokens=6, temperature=0, ignore_eos=True, logprobs=True, top_logprobs=20)
    entries = runner.send_chat_completion_request(request).choices[0].logprobs.content
    # From a token of a sound on, for which there is no sound, a reference refuses the sequence.
    token = case.configuration["audio_token_id"]
    known = next((place for place, entry in enumerate(entries) if entry.token_id == token), len(entries) - 1)
    answer = answer_of_continuation(runner.tokenize_text(messages), entries[: known + 1])
    answer.inputs = {"input_features": features_of(case, sounds)}
    return answer


MESSAGES = 3


def compare(case: Case) -> Comparison:
    """One model of the family, with some messages, against Transformers."""
    model = draw_model(case, lambda: draw_config(case), AutoModelForMultimodalLM)
    save_model(case, model, case.random.random() < 0.5)
    runner = load_engine(case, Which.MultimodalPlain(str(case.folder), dtype=EXACT))
    answers = [engine_answer(case, runner) for _ in range(MESSAGES)]
    return compare_answers(load_reference(case.folder, AutoModelForMultimodalLM), answers)
