"""What grammars cost: tokens a second with a JSON Schema and without, and how long compiling, masks and checks take.

    python benches/grammars.py [--rounds 5] [--streams 1,32] [--times target/release/examples/grammar_times] [--gemma FILE]

Prints the tables of docs/structured-output.md.
"""

from __future__ import annotations

import argparse
import itertools
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
CITY: dict[str, Any] = {
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
# Its names are most of the text, and forced from their second letter on.
LONG: dict[str, Any] = {
    **CITY,
    "properties": {
        "name_of_the_city": CITY["properties"]["city"],
        "country_in_which_the_city_is": CITY["properties"]["country"],
        "number_of_inhabitants_in_millions": CITY["properties"]["millions"],
        "whether_it_is_the_capital_of_its_country": CITY["properties"]["capital"],
    },
    "required": [
        "name_of_the_city",
        "country_in_which_the_city_is",
        "number_of_inhabitants_in_millions",
        "whether_it_is_the_capital_of_its_country",
    ],
}
# Longer than any answer here, so that all have as many tokens.
SCHEMAS = {"short names": CITY, "long names": LONG}
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
    print("| streams | sampling | names | free text | JSON Schema | ratio |\n| --- | --- | --- | --- | --- | --- |")
    for streams in map(int, arguments.streams.split(",")):
        samplings: tuple[tuple[str, dict[str, float]], ...] = (
            ("greedy", {"temperature": 0.0}),
            ("temperature 1", {"temperature": 1.0}),
            ("top_p 0.95", {"temperature": 1.0, "top_p": 0.95}),
        )
        for (name, sampling), (names, items) in itertools.product(samplings, SCHEMAS.items()):
            schema = {"type": "array", "items": items, "minItems": 100}
            rates: dict[str, list[float]] = {"free": [], "schema": []}
            for _ in range(arguments.rounds):
                rates["free"].append(rate(runner, streams, ignore_eos=True, **sampling))
                rates["schema"].append(rate(runner, streams, grammar=schema, grammar_type="json_schema", **sampling))
            free, held = (statistics.median(values) for values in rates.values())
            ratios = [b / a for a, b in zip(rates["free"], rates["schema"], strict=True)]
            spread = f"{min(ratios):.3f} to {max(ratios):.3f}"
            print(
                f"| {streams} | {name} | {names} | {free:.1f} | {held:.1f} | {statistics.median(ratios):.3f} ({spread}) |",
                flush=True,
            )
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
