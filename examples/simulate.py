"""How well is KV memory used? The scheduler and the paper's baselines, in virtual time, on lengths of real conversations."""

from pathlib import Path

from mistral_paged import simulate
from mistral_paged.simulator import poisson_trace

trace = poisson_trace(Path(__file__).parent / "data" / "sharegpt.csv", rate=50, count=2000, seed=0)
for allocator in ("paged", "oracle", "pow2", "max"):
    result = simulate(trace, blocks=6250, device="llama-8b-h200", allocator=allocator, max_num_seqs=512, max_model_len=4096)
    assert result.saturated is not None
    tokens = result.saturated.memory["token_states"] / sum(result.saturated.memory.values())
    print(f"{allocator:>6}: {result.saturated.running:5.1f} requests at once, {tokens:5.1%} of the KV memory holds tokens")
