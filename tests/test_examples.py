"""Every example runs with the default model and without a network."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from goldens import GOLDEN, unpack

unpack()
SEEING = str(GOLDEN / "vision" / "idefics3")
EXAMPLES = sorted((Path(__file__).parent.parent / "examples").glob("*.py"))
# A benchmark is made shorter, and a tiny model sees; everything else runs as it stands.
ARGUMENTS = {
    "bench_throughput.py": ["--new", "16", "--sentences", "10"],
    "describe_images.py": [SEEING, SEEING, "--max-tokens", "4"],
}
PRINTS = {
    "paged_attn.py": "completion_tokens=",
    "memory_plan.py": "4 x 4096 tokens are guaranteed",
    "streaming.py": "Usage(",
    "asyncio_streams.py": "0 blocks are in use",
    "batch_threads.py": "blocks",
    "memory.py": "Fragmented Memory",
    "bench_throughput.py": "8 streams",
    "tree_search.py": "saved by sharing",
    "simulate.py": "paged: ",
    "kv_tier.py": "second runner: ",
    "describe_images.py": "2 pictures described",
    "embeddings.py": "is most like 'A kitten is napping on the couch.'",
    "tools.py": 'weather({"city": "Oslo", "unit": "celsius"}) gives',
}


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda path: path.name)
def test_example(example: Path) -> None:
    arguments = [sys.executable, str(example), *ARGUMENTS.get(example.name, [])]
    environment = {**os.environ, "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(arguments, env=environment, capture_output=True, text=True, timeout=110, check=False)
    assert done.returncode == 0, done.stderr
    assert PRINTS[example.name] in done.stdout


def test_a_tree_search_holds_its_prompt_once() -> None:
    example = next(path for path in EXAMPLES if path.name == "tree_search.py")
    arguments = [sys.executable, str(example), "--rounds", "2", "--width", "4", "--beams", "2", "--tokens", "12"]
    done = subprocess.run(arguments, capture_output=True, text=True, timeout=110, check=True)
    figures = re.search(r"held at most: (\d+) of 16 tokens; without sharing: (\d+)", done.stdout)
    assert figures is not None, done.stdout
    held, without = (int(figure) for figure in figures.groups())
    prompt = int(re.search(r"prompt of (\d+) tokens", done.stdout)[1]) // 16
    # At the end of the second round the root, two sequences of the first and their eight forks hold the prompt's full blocks,
    # and each has one or two behind them, the last of which nobody shares.
    assert without - held >= 10 * prompt
    assert held <= prompt + 11 * 3
    assert prompt > 8
