"""Adapters: LoRA with any layers, ranks and kinds on the tiny models, made and applied by PEFT."""

from __future__ import annotations

from pathlib import Path
from random import Random
from typing import Any

import torch
from common import (
    EXACT,
    TEXT,
    Case,
    Comparison,
    answer_of_prompt,
    compare_answers,
    draw_token_ids,
    first_taken,
    load_engine,
    load_reference,
    text_families,
)
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM

from mistral_paged import LoraAdapter, Which

families = text_families

NOT_CHOSEN = ("router", "gate.", "lm_head", "kv_b_proj")
"""Parts of the names of linear layers that are not chosen among others."""
PROMPT_LENGTHS = (5, 40, 70)
TOKEN = 10
"""Any, to see that the model runs."""


def chosen_layers(model: Any) -> list[str]:
    """The names of the linear layers that adapters are drawn for."""
    linear = [name for name, module in model.named_modules() if isinstance(module, torch.nn.Linear)]
    return [name for name in linear if not name.endswith("gate") and not any(part in name for part in NOT_CHOSEN)]


def draw_targets(model: Any, layers: list[str], rng: Random) -> list[str] | str:
    """Layers by their last name, some by the whole, or every linear layer."""
    last_names = sorted({name.split(".")[-1] for name in layers})
    targets = rng.sample(last_names, rng.randint(1, len(last_names)))
    if rng.random() < 0.25:
        targets = rng.sample(layers, rng.randint(1, len(layers)))
    elif rng.random() < 0.2:
        return "all-linear"
    if rng.random() < 0.25:
        targets.append("embed_tokens")
    if rng.random() < 0.25 and not model.config.tie_word_embeddings:
        targets.append("lm_head")
    return targets


def draw_some_layers(model: Any, targets: list[str] | str, rng: Random) -> dict[str, Any]:
    """Only layers of some numbers, where PEFT can do so: what is in no layer or named in full has none to choose by."""
    layers = range(model.config.num_hidden_layers)
    chosen = sorted(rng.sample(layers, rng.randint(1, len(layers))))
    named_by_last = targets != "all-linear" and not any(name in ("lm_head", "embed_tokens") or "." in name for name in targets)
    return {"layers_to_transform": chosen} if named_by_last and rng.random() < 0.2 else {}


def draw_adapter(model: Any, rng: Random) -> dict[str, Any]:
    """The arguments of a LoraConfig."""
    layers = chosen_layers(model)
    last_names = sorted({name.split(".")[-1] for name in layers})
    targets = draw_targets(model, layers, rng)
    adapter: dict[str, Any] = {
        "target_modules": targets,
        "r": rng.choice([1, 2, 5, 8, 16, 33]),
        "lora_alpha": rng.choice([1, 5, 8, 16]),
        "use_rslora": rng.random() < 0.3,
        "use_dora": rng.random() < 0.25,
        "init_lora_weights": "gaussian" if rng.random() < 0.2 else True,
    }
    if rng.random() < 0.25:
        adapter["rank_pattern"] = {rng.choice(last_names): rng.choice([1, 3, 24])}
    if rng.random() < 0.25:
        adapter["alpha_pattern"] = {rng.choice(last_names): rng.choice([1, 7, 40])}
    if rng.random() < 0.2 and isinstance(targets, list) and "lm_head" not in targets and not model.config.tie_word_embeddings:
        adapter["modules_to_save"] = ["lm_head"]
    return adapter | draw_some_layers(model, targets, rng)


def fill_adapter(model: Any) -> None:
    """Draws the adapter's values, none of which may be without effect."""
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if "lora_magnitude" in name:
                weight.mul_(1 + 0.2 * torch.rand_like(weight))
            elif "lora_" in name:
                weight.copy_(0.25 * torch.randn_like(weight))
            elif "modules_to_save" in name:
                weight.add_(0.05 * torch.randn_like(weight))


def adapted_model(case: Case, base: Path) -> Any:
    """The model with an adapter that PEFT can make and run."""

    def draw() -> Any:
        model = load_reference(base, AutoModelForCausalLM)
        case.configuration = draw_adapter(model, case.random)
        return model

    def take(model: Any) -> Any:
        adapted = get_peft_model(model, LoraConfig(**case.configuration, task_type="CAUSAL_LM")).eval()
        adapted(input_ids=torch.tensor([[TOKEN]]))
        return adapted

    adapted = first_taken(draw, take)
    fill_adapter(adapted)
    return adapted


def compare(case: Case) -> Comparison:
    """One adapter on the family's tiny model against PEFT."""
    base = TEXT / case.family
    adapted = adapted_model(case, base)
    adapted.save_pretrained(case.folder)
    which = Which.Lora(model_id=str(base), adapters=[LoraAdapter("a", str(case.folder))], dtype=EXACT)
    runner = load_engine(case, which)
    prompts = [draw_token_ids(case.random, length) for length in PROMPT_LENGTHS]
    return compare_answers(adapted, [answer_of_prompt(runner, prompt, adapter="a") for prompt in prompts])
