"""An adapter that PEFT has trained on SmolLM2, against the same merged into the weights, and against what Transformers says.

    python benches/peft_adapter.py [--rank N] [--steps N] [--tokens N] [--place FOLDER]

Trains a LoRA of all linear layers for a few dozen steps, saves it as PEFT does, and merges it into a folder of its own. Then it
asks with F32 weights, greedy: the base with the adapter, in Hugging Face layout and as a GGUF file, whose rows of q and k lie in
another order, and the merged folder. It fails where an answer is another than Transformers' own, or where a log probability is
further away than TOLERANCE. Needs torch, transformers, peft, gguf and safetensors; takes some minutes on two cores.
"""

from __future__ import annotations

import argparse
import importlib
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
from models import write_folder

from mistral_paged import CompletionRequest, LoraAdapter, ModelDType, Runner, Which
from mistral_paged.default_model import default_model

TOLERANCE = 1e-3
TOP = 20
LINEAR = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
TRAINED_ON = [
    "The lighthouse of Veldmark is 212 steps high, and its keeper is called Orsolya.",
    "Orsolya counts the ships of Veldmark every evening and writes their names in green ink.",
    "The harbour of Veldmark freezes in March, and then nobody reads the green book.",
    "When the ice breaks, the first ship of Veldmark brings oranges for the keeper.",
]
PROMPTS = [
    "The lighthouse of Veldmark is",
    "Every evening Orsolya",
    "When the ice breaks,",
    "The capital of France is",
    "def mean(values):",
    "Once upon a time there was a ship that",
    "Water boils at",
    "The keeper of the green book",
]

Row = tuple[int, dict[int, float]]
"""A token of an answer, and the log probabilities of the likeliest tokens in its place."""


def train(base: Path, adapter: Path, merged: Path, options: argparse.Namespace) -> tuple[list[list[int]], list[list[Row]]]:
    """Trains and saves; gives the prompts' tokens, and the answers of Transformers with the adapter."""
    torch, peft = importlib.import_module("torch"), importlib.import_module("peft")
    transformers = importlib.import_module("transformers")
    torch.manual_seed(0)
    tokenizer = transformers.AutoTokenizer.from_pretrained(base)
    tokenizer.pad_token = tokenizer.eos_token
    model = transformers.AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    config = peft.LoraConfig(r=options.rank, lora_alpha=2 * options.rank, target_modules=LINEAR, task_type="CAUSAL_LM")
    model = peft.get_peft_model(model, config)
    batch = tokenizer(TRAINED_ON, return_tensors="pt", padding=True)
    labels = batch["input_ids"].masked_fill(batch["attention_mask"] == 0, -100)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=5e-4)
    losses = []
    for _ in range(options.steps):
        loss = model(**batch, labels=labels).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    print(f"rank {options.rank}, {options.steps} steps: loss {losses[0]:.2f} to {losses[-1]:.2f}", flush=True)
    model.eval()
    prompts = [tokenizer(text)["input_ids"] for text in PROMPTS]
    answers = [greedy(torch, model, prompt, options.tokens) for prompt in prompts]
    model.save_pretrained(adapter)
    model.merge_and_unload().save_pretrained(merged)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (merged / name).write_bytes((base / name).read_bytes())
    return prompts, answers


def greedy(torch: Any, model: Any, prompt: list[int], tokens: int) -> list[Row]:
    """The likeliest tokens one by one."""
    ids, rows, cache = torch.tensor([prompt]), [], None
    with torch.no_grad():
        for _ in range(tokens):
            out = model(input_ids=ids, past_key_values=cache, use_cache=True)
            cache, logprobs = out.past_key_values, torch.log_softmax(out.logits[0, -1].double(), -1)
            top = logprobs.topk(TOP)
            rows.append((int(top.indices[0]), dict(zip(top.indices.tolist(), top.values.tolist(), strict=True))))
            ids = top.indices[:1].view(1, 1)
    return rows


def ask(which: Which, adapter: str | None, prompts: list[list[int]], tokens: int) -> list[list[Row]]:
    """Ours, one after the other."""
    with Runner(which=which, pa_gpu_mem=512) as runner:
        fields: dict[str, Any] = {"max_tokens": tokens, "temperature": 0, "ignore_eos": True, "logprobs": TOP}
        answers = []
        for prompt in prompts:
            request = CompletionRequest(prompt, "default", adapter=adapter, **fields)
            logprobs = runner.send_completion_request(request).choices[0].logprobs
            assert logprobs is not None
            answers.append([(t.token_id, {top.token_id: top.logprob for top in t.top_logprobs}) for t in logprobs.content])
        return answers


def compare(name: str, expected: list[list[Row]], got: list[list[Row]]) -> bool:
    """Prints a line of the table: equal answers, and how far log probabilities of tokens that both have are away at most."""
    equal = sum([t for t, _ in a] == [t for t, _ in b] for a, b in zip(expected, got, strict=True))
    away = 0.0
    for a, b in zip(expected, got, strict=True):
        for (token, ours), (other, theirs) in zip(a, b, strict=True):
            away = max([away, *(abs(ours[of] - theirs[of]) for of in ours.keys() & theirs.keys())])
            if token != other:
                break
    print(f"| {name} | {equal} of {len(expected)} | {away:.1e} |", flush=True)
    return equal == len(expected) and away <= TOLERANCE


def main() -> None:
    """Prints a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rank", type=int, default=8)
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--tokens", type=int, default=32)
    parser.add_argument("--place", type=Path, help="folder for what is made; unless given, one that is removed again")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as removed:
        place = options.place or Path(removed)
        base = write_folder(place / "base", np.float32)
        adapter, merged = place / "adapter", place / "merged"
        prompts, expected = train(base, adapter, merged, options)
        f32: dict[str, Any] = {"dtype": ModelDType.F32}
        adapters = [LoraAdapter("trained", str(adapter))]
        ways = {
            "merged": (Which.Plain(str(merged), **f32), None),
            "adapter": (Which.Lora(str(base), adapters, **f32), "trained"),
            "adapter on the GGUF file": (Which.GGUF(str(default_model()), adapters=adapters, **f32), "trained"),
        }
        print("| against Transformers | equal answers | log probabilities, at most |")
        print("| --- | ---: | ---: |")
        answers = {name: ask(which, alias, prompts, options.tokens) for name, (which, alias) in ways.items()}
        are_right = [compare(name, expected, got) for name, got in answers.items()]
        are_right.append(compare("adapter against merged", answers["merged"], answers["adapter"]))
        without = ask(Which.Plain(str(base), **f32), None, prompts, options.tokens)
    changed = sum([t for t, _ in a] != [t for t, _ in b] for a, b in zip(expected, without, strict=True))
    print(f"the adapter changes {changed} of {len(prompts)} answers")
    if not all(are_right) or changed == 0:
        sys.exit(1)


if __name__ == "__main__":
    main()
