"""How long a float model takes to load while it is quantized (`in_situ_quant`), and what memory that takes at most.

    python benches/load.py                                   SmolLM2 in bf16, and the random llama of hidden size 2048 in f16
    python benches/load.py --model FOLDER --types Q4K Q8_0   another model

Each load is a process of its own, and the file has been read before. Seconds are those of the constructor of `Runner`. Memory is
what the process holds of its own (`RssAnon`), at its highest while it loads, less what it held before: the mapped file is not in
it, whose pages the system takes back. It is compared with the weights that come out.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import threading
import time
from pathlib import Path

from models import MODELS, folder, write_random_llama
from tables import table

from mistral_paged import Runner, Which


def which(path: Path) -> Which.Plain | Which.GGUF:
    """A file is GGUF, a folder in Hugging Face layout."""
    return Which.GGUF(str(path)) if path.is_file() else Which.Plain(str(path))


def own_bytes() -> int:
    """What this process holds beside mapped files."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("RssAnon:"))


def load(path: Path, kind: str | None, kv_mb: int) -> dict[str, float]:
    """One load in this process: seconds, bytes at most, bytes of the weights that come out."""
    before = own_bytes()
    highest, done = before, threading.Event()

    def watch() -> None:
        nonlocal highest
        while not done.wait(0.002):
            highest = max(highest, own_bytes())

    watcher = threading.Thread(target=watch)
    watcher.start()
    began = time.perf_counter()
    runner = Runner(which=which(path), in_situ_quant=kind, pa_gpu_mem=kv_mb)
    seconds = time.perf_counter() - began
    done.set()
    watcher.join()
    weights = runner.memory_ledger().weights_bytes
    runner.close()
    return {"seconds": seconds, "highest": highest - before, "weights": weights}


def measure(path: Path, kind: str | None, rounds: int) -> list[str]:
    """Medians over processes, a row of the table."""
    command = [sys.executable, __file__, "--one", str(path), kind or ""]
    rows = [json.loads(subprocess.run(command, capture_output=True, text=True, check=True).stdout) for _ in range(rounds)]
    seconds = statistics.median(row["seconds"] for row in rows)
    files = path.rglob("*.safetensors") if path.is_dir() else [path]
    size = sum(file.stat().st_size for file in files)
    return [
        path.name,
        kind or "as it is",
        f"{seconds:.2f}",
        f"{size / 1e6 / seconds:.0f}",
        f"{rows[0]['weights'] / 1e6:.0f}",
        f"{statistics.median(row['highest'] / row['weights'] for row in rows):.2f}",
    ]


def main() -> None:
    """Prints a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, action="append")
    parser.add_argument("--types", nargs="+", default=["Q8_0", "Q4_0", "Q2K", "Q3K", "Q4K", "Q5K", "Q6K", "MXFP4"])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--one", nargs=2, metavar=("MODEL", "TYPE"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one is not None:
        path, kind = options.one
        print(json.dumps(load(Path(path), kind or None, 64)))
        return
    models = options.model
    if models is None:
        llama = MODELS / "random-llama-2048.F16.gguf"
        if not llama.exists():
            write_random_llama(llama)
        models = [*folder(MODELS), llama]
    rows = [measure(path, kind, options.rounds) for path in models for kind in options.types]
    header = ["model", "type", "seconds", "MB/s of the file", "weights, MB", "highest / weights"]
    print("\n".join(table(header, rows)))


if __name__ == "__main__":
    main()
