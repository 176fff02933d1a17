"""What adapters cost: tokens a second of 32 streams over 8 adapters against the same without, interleaved in one run.

    python benches/adapters.py [--model FOLDER_OR_FILE] [--rank N] [--streams N] [--adapters N] [--rounds N] [--tokens N]

The adapters are random, of q and v, or of all linear layers. They are made for the model's shapes, which its GGUF file tells.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np

from mistral_paged import CompletionRequest, LoraAdapter, Runner, Which
from mistral_paged.default_model import default_model

ATTENTION = {"attn_q": "self_attn.q_proj", "attn_v": "self_attn.v_proj"}
OTHERS = {
    "attn_k": "self_attn.k_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


def shapes(model: Path) -> dict[str, tuple[int, int]]:
    """Rows and columns of every matrix of a GGUF file's layers, by its name."""
    from gguf import GGUFReader

    matrices = {}
    for tensor in GGUFReader(model).tensors:
        parts = tensor.name.split(".")
        if parts[0] == "blk" and len(tensor.shape) == 2:
            matrices[tensor.name] = (int(tensor.shape[1]), int(tensor.shape[0]))
    return matrices


def save(tensors: dict[str, np.ndarray], path: Path) -> None:
    """Writes matrices of F32 as safetensors."""
    header, at = {}, 0
    for name, values in tensors.items():
        header[name] = {"dtype": "F32", "shape": values.shape, "data_offsets": [at, at + values.nbytes]}
        at += values.nbytes
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + b"".join(values.tobytes() for values in tensors.values()))


def write(folder: Path, matrices: dict[str, tuple[int, int]], names: dict[str, str], rank: int, seed: int) -> None:
    """A random adapter."""
    random = np.random.default_rng(seed)
    tensors = {}
    for name, (rows, cols) in matrices.items():
        _, layer, kind, _ = name.split(".")
        if kind not in names:
            continue
        module = f"base_model.model.model.layers.{layer}.{names[kind]}"
        tensors[f"{module}.lora_A.weight"] = (random.standard_normal((rank, cols)) * 0.02).astype(np.float32)
        tensors[f"{module}.lora_B.weight"] = (random.standard_normal((rows, rank)) * 0.02).astype(np.float32)
    folder.mkdir()
    save(tensors, folder / "adapter_model.safetensors")
    (folder / "adapter_config.json").write_text(json.dumps({"peft_type": "LORA", "r": rank, "lora_alpha": rank}))


def tokens_a_second(runner: Runner, aliases: list[str | None], streams: int, tokens: int) -> float:
    """Of so many streams, which take the aliases in turn."""

    def stream(number: int) -> None:
        request = CompletionRequest(
            [1, 50 + number, 60 + number, 70],
            "default",
            max_tokens=tokens,
            temperature=0,
            ignore_eos=True,
            adapter=aliases[number % len(aliases)],
        )
        runner.send_completion_request(request)

    with ThreadPoolExecutor(streams) as threads:
        began = time.perf_counter()
        list(threads.map(stream, range(streams)))
    return streams * tokens / (time.perf_counter() - began)


def main() -> None:
    """Prints a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, default=default_model())
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--streams", type=int, default=32)
    parser.add_argument("--adapters", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--tokens", type=int, default=64)
    options = parser.parse_args()
    matrices = shapes(options.model)
    with tempfile.TemporaryDirectory() as place:
        adapters = []
        kinds = {"q and v": ATTENTION, "all linear layers": ATTENTION | OTHERS}
        for kind, names in kinds.items():
            for number in range(options.adapters):
                folder = Path(place) / f"{kind}-{number}"
                write(folder, matrices, names, options.rank, number)
                adapters.append(LoraAdapter(f"{kind[0]}{number}", str(folder)))
        which = Which.GGUF(str(options.model), adapters=adapters, max_adapters=len(adapters))
        with Runner(which=which, pa_gpu_mem=512, max_seqs=options.streams) as runner:
            wishes: dict[str, list[str | None]] = {"none": [None]}
            wishes |= {kind: [f"{kind[0]}{number}" for number in range(options.adapters)] for kind in kinds}
            rates: dict[str, list[float]] = {name: [] for name in wishes}
            for round_number in range(options.rounds + 1):
                for name, aliases in wishes.items():
                    rate = tokens_a_second(runner, aliases, options.streams, options.tokens)
                    if round_number > 0:
                        rates[name].append(rate)
    print(f"{options.streams} streams over {options.adapters} adapters of rank {options.rank}, {options.model.name}")
    print("| adapters of | tokens/s | of those without |")
    print("| --- | ---: | ---: |")
    for name, values in rates.items():
        share = statistics.median(value / base for value, base in zip(values, rates["none"], strict=True))
        print(f"| {name} | {statistics.median(values):,.0f} | {share:.1%} |")


if __name__ == "__main__":
    main()
