"""What a request holds in the KV pool, and beside it, by family: prints the table of docs/kv-cache.md.

    python benches/kv_bytes.py

The sizes are those that the models' config.json have; `Runner.memory_plan` reads no weights for it. What the configurations
have besides sizes comes from the tests' tiny models of the same architectures.
"""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))

from goldens import GOLDEN, unpack  # type: ignore[import-not-found]

from mistral_paged import PagedCacheType, Runner, Which

LENGTHS = (4096, 32768)
BLOCK_SIZE = 16
PERIOD_OF_GRANITE = ["mamba"] * 5 + ["attention"] + ["mamba"] * 4


def sizes(hidden: int, layers: int, heads: int, kv_heads: int, **others: Any) -> dict[str, Any]:
    """The keys that nearly all have."""
    return {
        "hidden_size": hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "max_position_embeddings": 131072,
        **others,
    }


MODELS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "SmolLM2-135M": ("llama", "3 heads of keys for 9", sizes(576, 30, 9, 3, head_dim=64)),
    "Llama 3.1 8B": ("llama", "8 heads of keys for 32", sizes(4096, 32, 32, 8, head_dim=128)),
    "Qwen3-30B-A3B": ("qwen3-moe", "4 heads of keys for 32", sizes(2048, 48, 32, 4, head_dim=128)),
    "gemma-3-4b": (
        "gemma3",
        "a window of 1,024 tokens in 29 of 34 layers",
        sizes(2560, 34, 8, 4, head_dim=256, sliding_window=1024),
    ),
    "gpt-oss-20b": (
        "gpt-oss",
        "a window of 128 tokens in 12 of 24 layers",
        sizes(
            2880, 24, 64, 8, head_dim=64, sliding_window=128, layer_types=["sliding_attention", "full_attention"] * 12
        ),
    ),
    "DeepSeek-V2-Lite": (
        "deepseek-v2-lite",
        "latent attention: 576 elements a layer",
        sizes(
            2048, 27, 16, 16, kv_lora_rank=512, qk_rope_head_dim=64, qk_nope_head_dim=128, v_head_dim=128, head_dim=64,
            qk_head_dim=192,
        ),
    ),
    "LFM2-1.2B": (
        "lfm2",
        "short convolutions in 10 of 16 layers",
        sizes(
            2048, 16, 32, 8,
            layer_types=["full_attention" if layer in (2, 5, 8, 10, 12, 14) else "conv" for layer in range(16)],
        ),
    ),
    "Granite 4.0 H Tiny": (
        "granitemoehybrid",
        "Mamba-2 in 36 of 40 layers",
        sizes(
            1536, 40, 12, 4, layer_types=PERIOD_OF_GRANITE * 4, mamba_n_heads=48, mamba_d_head=64, mamba_d_state=128
        ),
    ),
    "Qwen3-Next-80B-A3B": (
        "qwen3-next",
        "gated delta in 36 of 48 layers",
        sizes(
            2048, 48, 16, 2, head_dim=256, linear_key_head_dim=128, linear_value_head_dim=128, linear_num_key_heads=16,
            linear_num_value_heads=32,
        ),
    ),
}  # fmt: skip


def held_bytes(plan: Any, num_tokens: int) -> int:
    """Bytes of the blocks that a request of so many tokens holds: of a window those that the next token sees."""
    blocks = 0
    for group in plan.groups:
        seen = num_tokens if group["window"] is None else min(num_tokens, group["window"])
        # A window begins within a block.
        blocks += -(-seen // BLOCK_SIZE) + (group["window"] is not None and num_tokens > group["window"])
    return int(blocks * plan.bytes_per_block)


def main() -> None:
    unpack()
    print("| model | | bytes a token | " + " | ".join(f"MB at {n:,} tokens" for n in LENGTHS) + " | MB of states |")
    print("| --- | --- | --- | --- | --- | --- |")
    for name, (golden, what, own) in MODELS.items():
        config = json.loads((GOLDEN / "text" / golden / "config.json").read_text()) | own
        with tempfile.TemporaryDirectory() as folder:
            Path(folder, "config.json").write_text(json.dumps(config))
            plan = Runner.memory_plan(
                which=Which.Plain(folder), pa_ctxt_len=LENGTHS[-1], pa_blk_size=BLOCK_SIZE, pa_cache_type=PagedCacheType.BF16
            )
        # Where a request has grown long, only layers that see everything hold more.
        further = (held_bytes(plan, LENGTHS[1]) - held_bytes(plan, LENGTHS[0])) / (LENGTHS[1] - LENGTHS[0])
        megabytes = " | ".join(f"{held_bytes(plan, n) / 2**20:,.0f}" for n in LENGTHS)
        states = plan.states_bytes / plan.max_seqs / 2**20
        print(f"| {name} | {what} | {further:,.0f} | {megabytes} | {states:.1f} |")


if __name__ == "__main__":
    main()
