"""Every example runs."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import GOLDEN

EXAMPLES = sorted((Path(__file__).parent.parent / "examples").glob("*.py"))
ARGUMENTS = {
    "paged_attn.py": [str(GOLDEN / "text" / "mistral")],
    "memory_plan.py": [],
    "streaming.py": [],
    "asyncio_streams.py": ["--requests", "4"],
    "batch_threads.py": ["--requests", "8"],
    "memory.py": ["paged", "4"],
    "bench_throughput.py": ["--new", "16", "--sentences", "10"],
    "tree_search.py": [],
    "simulate.py": [],
    "kv_tier.py": [],
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
}


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda path: path.name)
def test_example(example: Path) -> None:
    arguments = [sys.executable, str(example), *ARGUMENTS[example.name]]
    done = subprocess.run(arguments, capture_output=True, text=True, timeout=110, check=False)
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
