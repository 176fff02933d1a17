"""A folder that keeps KV blocks from one process to the next."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path

import pytest
from conftest import GOLDEN
from test_server import serving

from mistral_paged import Runner, Which

LLAMA = str(GOLDEN / "text" / "llama")
SCRIPT = """
import json, sys
from mistral_paged import CompletionRequest, ModelDType, Runner, Which
model, folder = sys.argv[1:]
runner = Runner(which=Which.Plain(model_id=model, dtype=ModelDType.F32), pa_ctxt_len=400, pa_blk_size=8, kv_tier=folder)
prompt = "The quick brown fox jumps over the lazy dog. " * 6
answer = runner.send_completion_request(CompletionRequest(model="m", prompt=prompt, max_tokens=8, temperature=0.0))
print(json.dumps([answer.choices[0].text, runner.kv_cache_stats()]))
"""


def run(folder: Path) -> tuple[str, dict[str, int], str]:
    """The answer of a process of its own, its figures, and what it said besides."""
    arguments = [sys.executable, "-c", SCRIPT, LLAMA, str(folder)]
    done = subprocess.run(arguments, capture_output=True, text=True, timeout=100, check=True)
    text, stats = json.loads(done.stdout)
    return text, stats, done.stderr


def test_a_second_process_skips_the_prefill_and_says_the_same(tmp_path: Path) -> None:
    text, first, _ = run(tmp_path / "tier")
    assert first["tier_hit_tokens"] == 0
    again, second, _ = run(tmp_path / "tier")
    assert again == text
    assert second["tier_hit_tokens"] > 0.8 * second["prefix_queried_tokens"]
    assert second["tier_swapped_in_blocks"] * 8 == second["tier_hit_tokens"]


def test_a_server_has_the_folder_by_its_flag(tmp_path: Path) -> None:
    prompt = "The quick brown fox jumps over the lazy dog. " * 6
    flags = ("--disable-access-log", "--pa-block-size", "8", "--kv-tier", str(tmp_path), "--kv-tier-size", "64")
    cached = []
    for _ in range(2):
        with serving(*flags) as server:
            usage = server.complete(prompt=prompt).json["usage"]
            cached.append(usage["prompt_tokens_details"]["cached_tokens"])
            assert usage["prompt_tokens"] > 64
            # Records are written behind the step.
            until = time.monotonic() + 30
            while not list(tmp_path.glob("*/*.kv")):
                assert time.monotonic() < until
                time.sleep(0.1)
    assert cached[0] == 0
    assert cached[1] > 0.8 * usage["prompt_tokens"]


def test_damaged_files_are_never_served(tmp_path: Path) -> None:
    text, _, _ = run(tmp_path)
    files = list(tmp_path.glob("*/*.kv"))
    for file in files:
        content = bytearray(file.read_bytes())
        content[-50] ^= 1
        file.write_bytes(content)
    again, stats, said = run(tmp_path)
    assert (again, stats["tier_hit_tokens"]) == (text, 0)
    assert stats["tier_failed_blocks"] > 0
    assert said.count("kv_tier: a record is not used, its tokens are computed") == stats["tier_failed_blocks"]
    assert sum(file.name in said for file in files) == stats["tier_failed_blocks"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"kv_tier": __file__}, "test_kv_tier.py is a file; name a folder"),
        ({"kv_tier": ""}, "`kv_tier` is empty"),
        ({"kv_tier": "\ud800"}, "`kv_tier`: .*surrogates not allowed"),
        ({"kv_tier": "TMP", "kv_tier_size": 0}, "kv_tier_size.*0"),
        ({"kv_tier_size": 5}, "`kv_tier_size` is the size of `kv_tier`, which is not given"),
        ({"kv_tier": "TMP", "prefix_cache_n": 0}, "kv_tier needs the prefix cache, which prefix_cache_n=0 turns off"),
        ({"kv_tier": "TMP", "no_kv_cache": True}, "which no_kv_cache=True turns off"),
    ],
)
def test_a_tier_that_cannot_be_is_refused(options: dict[str, object], message: str, tmp_path: Path) -> None:
    options = {name: str(tmp_path) if value == "TMP" else value for name, value in options.items()}
    with pytest.raises(ValueError, match=message):
        Runner(which=Which.Plain(model_id=LLAMA), pa_ctxt_len=400, **options)  # type: ignore[arg-type]


REPLICA = """
import json, sys
from mistral_paged import CompletionRequest, ModelDType, Runner, Which
model, folder = sys.argv[1:]
runner = Runner(which=Which.Plain(model_id=model, dtype=ModelDType.F32), pa_ctxt_len=400, pa_blk_size=8, kv_tier=folder)
for line in sys.stdin:
    request = CompletionRequest(model="m", prompt=line.strip() * 6, max_tokens=8, temperature=0.0)
    text = runner.send_completion_request(request).choices[0].text if line.strip() else ""
    print(json.dumps([text, runner.kv_cache_stats()]), flush=True)
"""


class Replica:
    """A process that answers prompts, and lives on."""

    def __init__(self, folder: Path) -> None:
        command = [sys.executable, "-c", REPLICA, LLAMA, str(folder)]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def ask(self, prompt: str) -> tuple[str, dict[str, int]]:
        """The answer, and the figures behind it; with an empty prompt the figures alone."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(prompt + "\n")
        self.process.stdin.flush()
        text, stats = json.loads(self.process.stdout.readline())
        return text, stats

    def __enter__(self) -> Replica:
        return self

    def __exit__(self, *exception: object) -> None:
        self.process.kill()
        self.process.communicate()


def test_what_one_replica_computes_another_that_runs_beside_it_hits(tmp_path: Path) -> None:
    prompt = "The quick brown fox jumps over the lazy dog. "
    with Replica(tmp_path) as one, Replica(tmp_path) as other:

        def tier_has(replica: Replica, blocks: int) -> None:
            until = time.monotonic() + 30
            while replica.ask("")[1]["tier_blocks"] < blocks:
                assert time.monotonic() < until, f"the replica never sees {blocks} blocks"
                time.sleep(0.1)

        assert [replica.ask("")[1]["tier_blocks"] for replica in (one, other)] == [0, 0]
        text, first = one.ask(prompt)
        blocks = first["prefix_queried_tokens"] // 8
        tier_has(other, blocks)
        again, second = other.ask(prompt)
        assert again == text
        assert second["tier_hit_tokens"] > 0.8 * second["prefix_queried_tokens"]
        # And back, of what only the other has computed.
        text, both = other.ask(prompt.upper())
        tier_has(one, blocks + (both["prefix_queried_tokens"] - second["prefix_queried_tokens"]) // 8)
        again, third = one.ask(prompt.upper())
        assert again == text
        assert third["tier_hit_tokens"] > 0
