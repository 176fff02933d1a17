"""Every example runs."""

from __future__ import annotations

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
    "batch_threads.py": ["--requests", "8"],
    "memory.py": ["paged", "4"],
    "bench_throughput.py": ["--new", "16", "--sentences", "10"],
    "simulate.py": [],
}
PRINTS = {
    "paged_attn.py": "completion_tokens=",
    "memory_plan.py": "4 x 4096 tokens are guaranteed",
    "streaming.py": "Usage(",
    "batch_threads.py": "blocks",
    "memory.py": "Fragmented Memory",
    "bench_throughput.py": "8 streams",
    "simulate.py": "paged: ",
}


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda path: path.name)
def test_example(example: Path) -> None:
    arguments = [sys.executable, str(example), *ARGUMENTS[example.name]]
    done = subprocess.run(arguments, capture_output=True, text=True, timeout=110, check=False)
    assert done.returncode == 0, done.stderr
    assert PRINTS[example.name] in done.stdout
