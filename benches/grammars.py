"""What grammars cost: tokens a second with a JSON Schema and without, and how long compiling, masks and checks take.

    python benches/grammars.py [--rounds 5] [--streams 1,32] [--times target/release/examples/grammar_times] [--gemma FILE]

Prints the tables of docs/structured-output.md.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))

from schemas import schemas  # type: ignore[import-not-found]

from mistral_paged import CompletionRequest, Runner, Which
from mistral_paged.default_model import default_model

PROMPT = "A list of cities as JSON, each with its country, population in millions, and whether it is a capital:\n"
CITY = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "maxLength": 24},
        "country": {"type": "string", "maxLength": 24},
        "millions": {"type": "number", "minimum": 0, "maximum": 40},
        "capital": {"type": "boolean"},
    },
    "required": ["city", "country", "millions", "capital"],
    "additionalProperties": False,
}
# Longer than any answer here, so that both kinds have as many tokens.
SCHEMA = {"type": "array", "items": CITY, "minItems": 100}
NEW_TOKENS = 192


def rate(runner: Runner, streams: int, **options: Any) -> float:
    """Tokens a second, of so many requests at once."""

    def ask(seed: int) -> int:
        request = CompletionRequest(f"{seed}. {PROMPT}", "m", max_tokens=NEW_TOKENS, seed=seed, **options)
        return runner.send_completion_request(request).usage.completion_tokens

    with ThreadPoolExecutor(streams) as pool:
        began = time.perf_counter()
        tokens = sum(pool.map(ask, range(streams)))
        return tokens / (time.perf_counter() - began)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--streams", default="1,32")
    parser.add_argument("--times", default="target/release/examples/grammar_times")
    parser.add_argument("--schemas", type=int, default=2000)
    parser.add_argument("--gemma", help="a GGUF file of gemma-3, whose vocabulary has 262,144 tokens")
    arguments = parser.parse_args()
    runner = Runner(which=Which.GGUF(str(default_model())), pa_ctxt_len=16384, max_seqs=32)
    print("| streams | sampling | free text | JSON Schema | ratio |\n| --- | --- | --- | --- | --- |")
    for streams in map(int, arguments.streams.split(",")):
        for name, sampling in (
            ("greedy", {"temperature": 0.0}),
            ("temperature 1", {"temperature": 1.0}),
            ("top_p 0.95", {"temperature": 1.0, "top_p": 0.95}),
        ):
            rates: dict[str, list[float]] = {"free": [], "schema": []}
            for _ in range(arguments.rounds):
                rates["free"].append(rate(runner, streams, ignore_eos=True, **sampling))
                rates["schema"].append(rate(runner, streams, grammar=SCHEMA, grammar_type="json_schema", **sampling))
            free, schema = (statistics.median(values) for values in rates.values())
            ratios = [b / a for a, b in zip(rates["free"], rates["schema"], strict=True)]
            spread = f"{min(ratios):.3f} to {max(ratios):.3f}"
            print(f"| {streams} | {name} | {free:.1f} | {schema:.1f} | {statistics.median(ratios):.3f} ({spread}) |", flush=True)
    if not Path(arguments.times).exists():
        return
    with tempfile.NamedTemporaryFile("w", suffix=".json") as file:
        json.dump(schemas(arguments.schemas), file)
        file.flush()
        for model in filter(None, (str(default_model()), arguments.gemma)):
            print(f"\n{Path(model).name}")
            print(subprocess.run([arguments.times, model, file.name], capture_output=True, text=True, check=True).stdout)


if __name__ == "__main__":
    main()
