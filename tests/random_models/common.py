"""What the subjects share: models drawn by chance, what the engine answers, and how far that is from a reference."""

from __future__ import annotations

import json
import logging
import math
import os
import shutil
import sys
import warnings
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Any, TypeVar

# Before these are imported; bars and warnings would bury the lines that matter.
os.environ.update(TQDM_DISABLE="1", TRANSFORMERS_VERBOSITY="error", HF_HUB_OFFLINE="1")

import torch
import transformers

sys.path.insert(0, str(Path(__file__).parent.parent))
from goldens import GOLDEN

from mistral_paged import CompletionRequest, ModelDType, Runner

TEXT = GOLDEN / "text"
DRAWN = GOLDEN / "drawn"
"""The same without weights and tokenizers."""
PACKED_FAMILIES = {"gpt-oss-mxfp4"}
"""Their weights are no plain numbers, and the same family is there as plain numbers."""

LOG_PROBABILITY_BOUND = 2e-3
SAME_SIZE = 4
"""A model is as sensitive as the difference if rounding moves the reference by a quarter of that, or more."""
ROUNDINGS = 4
"""How often weights are rounded anew in float64, for one difference between float32 and float64 may be small by luck."""
HALF_UNIT = 2.0**-24
"""Of float32, as a part of the value."""

ATTEMPTS = 20
"""Some of what is drawn is no model at all, or no adapter; then another is drawn."""
NOT_OF_A_MODEL = {"torch_dtype", "dtype", "transformers_version", "golden", "quantization_config"}
TOKEN_IDS = range(10, 500)
"""Those that are no special tokens of the tiny models."""

Config = dict[str, Any]
Drawn = TypeVar("Drawn")
Taken = TypeVar("Taken")


class NotTakenError(Exception):
    """The reference itself does not take what was drawn, so there is nothing to compare with."""


@dataclass
class Case:
    """One model of a family. A kind, a family and a seed make the same case again."""

    kind: str
    family: str
    seed: int
    folder: Path
    configuration: Config = field(default_factory=dict)
    """What was drawn, for who reads of a disagreement."""
    random: Random = field(init=False)
    generator: torch.Generator = field(init=False)

    def __post_init__(self) -> None:
        self.random = Random(f"{self.kind}-{self.family}-{self.seed}")
        self.generator = torch.Generator().manual_seed(self.seed)
        torch.manual_seed(self.seed)


@dataclass
class Comparison:
    """How far the engine is from the reference, and where that is too far, the reference in float64 from float32."""

    difference: float
    bound: float
    in_float64: float | None = None

    @property
    def agrees(self) -> bool:
        return self.difference <= self.bound

    @property
    def is_sensitive(self) -> bool:
        """Whether rounding alone moves the reference as far."""
        return self.in_float64 is not None and self.in_float64 * SAME_SIZE >= self.difference


@dataclass
class Answer:
    """Log probabilities that the engine told, by place in a sequence and token, and what else the reference is given."""

    token_ids: list[int]
    told: list[tuple[int, dict[int, float]]]
    inputs: dict[str, torch.Tensor] = field(default_factory=dict)


def quiet() -> None:
    """Lets the references and the engine say nothing, and the references take one thread, for the engine has its own."""
    logging.disable(logging.WARNING)
    warnings.simplefilter("ignore")
    transformers.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    torch.set_num_threads(1)


def read_json(path: Path) -> Any:
    return json.loads(path.read_text())


def write_json(path: Path, value: Any) -> None:
    path.write_text(json.dumps(value, indent=1))


def text_families() -> list[str]:
    """The tiny models of text that Transformers reads as plain numbers."""
    return sorted(path.name for path in TEXT.iterdir() if (path / "config.json").exists() and path.name not in PACKED_FAMILIES)


def drawn_families() -> list[str]:
    """Those of which only the configuration is kept."""
    return sorted(path.name for path in DRAWN.iterdir())


def folder_of(family: str) -> Path:
    """Where the tiny model of a family is."""
    return TEXT / family if (TEXT / family).exists() else DRAWN / family


def first_taken(draw: Callable[[], Drawn], take: Callable[[Drawn], Taken]) -> Taken:
    """Draws until the reference takes what was drawn, and returns what it makes of it."""
    for _ in range(ATTEMPTS):
        drawn = draw()
        try:
            return take(drawn)
        except Exception as error:  # each kind of model and layer has its own way to say that it is none
            refused = error
    raise NotTakenError(f"nothing that was drawn {ATTEMPTS} times is taken, at last by {type(refused).__name__}: {refused}")


def draw_model(case: Case, draw: Callable[[], Config], auto: Any) -> Any:
    """A model, in bfloat16, of the first configuration of `draw` that Transformers takes, which config.json in the folder is."""

    def draw_and_write() -> Config:
        case.configuration = {key: value for key, value in draw().items() if key not in NOT_OF_A_MODEL}
        write_json(case.folder / "config.json", case.configuration)
        return case.configuration

    def take(_config: Config) -> Any:
        config = transformers.AutoConfig.from_pretrained(case.folder)
        # A decoder within a model that sees is compared by itself.
        config = config.get_text_config() if auto is transformers.AutoModelForCausalLM else config
        return auto.from_config(config, attn_implementation="eager")

    model = first_taken(draw_and_write, take)
    with torch.no_grad():
        fill(model, case)
    return model.to(torch.bfloat16)


def save_model(case: Case, model: Any, keep_layout: bool) -> None:
    """Writes the weights, and a configuration either as the hub has it (what was drawn) or as Transformers writes it today."""
    drawn = (case.folder / "config.json").read_text()
    model.save_pretrained(case.folder)
    if keep_layout:
        (case.folder / "config.json").write_text(drawn)
    case.configuration = read_json(case.folder / "config.json")


def copy_tokenizer(source: Path, folder: Path) -> None:
    for name in ("tokenizer.json", "tokenizer_config.json"):
        from_ = source if (source / name).exists() else TEXT / "llama"
        shutil.copy(from_ / name, folder)


def load_reference(folder: Path, auto: Any) -> Any:
    return auto.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()


EMBEDDED = (
    "embed_tokens",
    "position_embedding",
    "pos_embed",
    "latents",
    "gated_positional_embedding",
    "tile_positional_embedding",
)
INPUTS_FIRST = {"gpt_oss", "llama4_text"}
"""Families whose experts lie with their inputs before their outputs."""


LOADED_BUFFERS = ("bias", "layer_scalar", "std_scale", "put_min", "put_max")
"""Those that checkpoints have."""


def fill(model: Any, case: Case) -> None:
    """Draws every weight, and biases and factors that are buffers, so that no part of the model is without effect."""
    gain = case.random.choice([0.8, 1.2, 1.6])
    inputs_first = model.config.get_text_config().model_type in INPUTS_FIRST
    buffers = [(name, buffer) for name, buffer in model.named_buffers() if any(part in name for part in LOADED_BUFFERS)]
    for name, weight in [*model.named_parameters(), *buffers]:
        noise = torch.randn(weight.shape, generator=case.generator)
        weight.data.copy_(drawn_weight(name, weight.data, noise, gain, inputs_first))


def drawn_weight(name: str, weight: torch.Tensor, noise: torch.Tensor, gain: float, inputs_first: bool) -> torch.Tensor:
    """The values of one weight, of a size that suits its part in the model."""
    if name.endswith(("A_log", "dt_bias")):
        return weight + 0.3 * noise
    if name.endswith(("put_min", "put_max")):
        # Bounds that some values are beyond.
        return (1.5 + 0.5 * noise.abs()) * (1 if name.endswith("max") else -1)
    if name.endswith((".D", "layer_scalar", "std_scale", "router.scale", "per_expert_scale")):
        return 1 + 0.3 * noise
    if ("norm" in name or "ln" in name) and name.endswith("weight") and weight.dim() <= 2:
        return weight + 0.2 * noise
    if "conv" in name and weight.dim() == 3:
        return 0.5 * noise
    if name.endswith(("gate", "gate_attn", "gate_ffn")) and weight.numel() == 1:
        return noise
    if weight.dim() == 1 or name.endswith("bias"):
        return 0.2 * noise
    if any(part in name for part in EMBEDDED):
        return 0.7 * noise
    router = 2 if "router" in name or name.endswith("gate.weight") else 1
    return router * gain * noise / math.sqrt(number_of_inputs(name, weight, inputs_first))


def number_of_inputs(name: str, weight: torch.Tensor, inputs_first: bool) -> int:
    """How many values one output is a sum over."""
    if "mm_input_projection" in name:
        return weight.shape[0]
    if weight.dim() == 3:
        is_expert = "gate_up_proj" in name or "down_proj" in name
        return weight.shape[1 if inputs_first and is_expert else 2]
    return weight[0].numel()


def load_engine(case: Case, which: Any, **settings: Any) -> Runner:
    """A runner with few threads and blocks of any size."""
    blocks = case.random.choice([8, 16, 32])
    return Runner(which=which, pa_ctxt_len=4096, num_threads=case.random.choice([1, 2]), pa_blk_size=blocks, **settings)


EXACT = ModelDType.F32


def draw_token_ids(rng: Random, count: int) -> list[int]:
    return [rng.choice(TOKEN_IDS) for _ in range(count)]


def probabilities(entry: Any) -> dict[int, float]:
    """The log probabilities of one place, by token."""
    return {top.token_id: top.logprob for top in entry.top_logprobs or []} | {entry.token_id: entry.logprob}


def answer_of_prompt(runner: Runner, token_ids: list[int], **settings: Any) -> Answer:
    """What the engine says of each place of a prompt."""
    request = CompletionRequest(
        token_ids, "m", max_tokens=1, temperature=0, ignore_eos=True, echo_prompt=True, logprobs=20, **settings
    )
    entries = runner.send_completion_request(request).choices[0].logprobs.content
    told = [(place - 1, probabilities(entry)) for place, entry in enumerate(entries) if entry.logprob is not None]
    return Answer(token_ids, told)


def answer_of_continuation(token_ids: list[int], entries: list[Any]) -> Answer:
    """What the engine said as it went on from a prompt."""
    told = [(len(token_ids) - 1 + place, probabilities(entry)) for place, entry in enumerate(entries)]
    return Answer(token_ids + [entry.token_id for entry in entries[:-1]], told)


def log_probabilities(model: Any, answer: Answer) -> torch.Tensor:
    """The reference's, of shape [num_tokens, vocabulary]."""
    dtype = next(model.parameters()).dtype
    inputs = {name: value.to(dtype) if value.is_floating_point() else value for name, value in answer.inputs.items()}
    with torch.no_grad():
        return model(input_ids=torch.tensor([answer.token_ids]), **inputs).logits[0].log_softmax(-1)


def largest(values: Iterable[torch.Tensor]) -> float:
    """The largest size of any value; not a number if one is none, which `max` would lose."""
    return torch.cat([value.abs().double().flatten() for value in values]).max().item()


def differences(answer: Answer, expected: torch.Tensor) -> torch.Tensor:
    return torch.tensor([expected[place, token].item() - value for place, told in answer.told for token, value in told.items()])


def compare_answers(model: Any, answers: list[Answer]) -> Comparison:
    """The engine's answers against the model in float32."""
    expected = [log_probabilities(model, answer) for answer in answers]
    if not all(rows.isfinite().all() for rows in expected):
        raise NotTakenError("the reference's values are no numbers")
    found = Comparison(largest(map(differences, answers, expected)), LOG_PROBABILITY_BOUND)
    if not found.agrees:
        found.in_float64 = sensitivity(in_float64(model), answers, expected)
    return found


def sensitivity(exact: Any, answers: list[Answer], expected: list[torch.Tensor]) -> float:
    """How far the model in float64, as it is and with its weights rounded anew, is from what it was in float32."""
    generator = torch.Generator().manual_seed(0)
    moved = [moved_by(exact, answers, expected)]
    for _ in range(ROUNDINGS):
        round_anew(exact, generator)
        moved.append(moved_by(exact, answers, expected))
    return max(moved)


def moved_by(exact: Any, answers: list[Answer], expected: list[torch.Tensor]) -> float:
    return largest(log_probabilities(exact, answer) - rows for answer, rows in zip(answers, expected, strict=True))


def round_anew(model: Any, generator: torch.Generator) -> None:
    """Moves every weight by what a rounding to float32 may move it."""
    with torch.no_grad():
        for weight in model.parameters():
            weight.mul_(1 + HALF_UNIT * torch.randn(weight.shape, generator=generator, dtype=weight.dtype))


def in_float64(model: Any) -> Any:
    """The model itself, turned into float64. What multiplies all experts at once takes no float64, so they go one by one."""
    for module in model.modules():
        if hasattr(module, "set_experts_implementation") and module._can_set_experts_implementation():
            module.set_experts_implementation("eager")
    return model.double()
