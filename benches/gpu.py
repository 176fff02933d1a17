"""What the kernels and a model do on a GPU, as a share of what its memory can move. `make bench-gpu`.

Writes JSON lines as it goes, then docs/gpu.md and docs/gpu.png from them, which `--report FILE` does alone. Needs the wheel and
numpy, and matplotlib for the picture; PyTorch and FlashInfer are measured where they can be imported.
"""

from __future__ import annotations

import argparse
import shutil
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import gpu_model
import gpu_peers
import gpu_plan
from gpu_report import read, write_report
from work import Log, machine

from mistral_paged import CompletionRequest, MistralPagedError, ModelDType, Runner, Which, _core

RUNS = 20
"""Times that a kernel is timed; the report takes medians."""
COPY = {"kind": "copy", "bytes": 4 << 30}
NEW = 96
PROMPT = 32


class Timer:
    """Our kernels on one GPU."""

    name = "mistral_paged"

    def __init__(self, ordinal: int) -> None:
        self.timer = _core.GpuTimer(ordinal)

    def seconds(self, work: gpu_plan.Work, runs: int) -> list[float]:
        """Of each of several runs on the GPU."""
        found: list[float] = self.timer.seconds({"num_kv_heads": gpu_plan.KV_HEADS, **work}, runs)
        return found

    def release(self) -> None:
        """Each work's buffers end with it."""


def measure_kernels(log: Log, engines: list[gpu_peers.Peer], works: list[gpu_plan.Work]) -> None:
    """Each work by every engine. What does not work ends with its reason, and the next one begins."""
    for work in works:
        for engine in engines:
            try:
                found = engine.seconds(work, RUNS)
            except MistralPagedError as error:
                fail(log, error, engine=engine.name, work=work)
                continue
            if found:
                log.write(record="work", engine=engine.name, work=work, seconds=found)


def fail(log: Log, error: Exception, **what: Any) -> None:
    """A record of what was not measured, and why."""
    print(f"{what}: {error}", flush=True)
    log.write(record="failed", error=str(error), **what)


def decode(runner: Runner, batch: int, new: int) -> float:
    """Tokens a second of so many requests at once, their short prompts included."""

    def complete(number: int) -> int:
        prompt = [3 + (number * 7919 + position * 31) % 1000 for position in range(PROMPT)]
        request = CompletionRequest(prompt, "default", max_tokens=new, temperature=0.0, ignore_eos=True)
        return runner.send_completion_request(request).usage.completion_tokens

    with ThreadPoolExecutor(batch) as threads:
        start = time.perf_counter()
        made = sum(threads.map(complete, range(batch)))
        return made / (time.perf_counter() - start)


def measure_model(log: Log, device: str, config: dict[str, int], batches: list[int], new: int = NEW) -> None:
    """A model of random weights of each format, with CUDA graphs, and for some batches without."""
    folder = gpu_model.roomy_folder(int(gpu_plan.weight_bytes(config)))
    try:
        gpu_model.write(folder, config)
        for form in gpu_plan.MODEL_FORMATS:
            # What graphs save is the same whatever the weights.
            for graphs in (True, False) if form == "BF16" else (True,):
                chosen = batches if graphs else [batch for batch in batches if batch in gpu_plan.EAGER_BATCHES]
                try:
                    measure_runner(log, (device, folder, form, graphs), config, chosen, new)
                except MistralPagedError as error:
                    fail(log, error, format=form, graphs=graphs)
    finally:
        shutil.rmtree(folder)


def measure_runner(log: Log, where: tuple[str, Path, str, bool], config: dict[str, int], batches: list[int], new: int) -> None:
    """Each number of requests at once."""
    device, folder, form, graphs = where
    tokens = max(batches) * (PROMPT + new + 64)
    options: dict[str, Any] = {"device": device, "cuda_graphs": graphs, "prefix_cache_n": 0}
    options["in_situ_quant"] = gpu_plan.MODEL_FORMATS[form]
    which = Which.Plain(str(folder), dtype=ModelDType.BF16)
    runner = Runner(which=which, max_seqs=max(batches), pa_ctxt_len=tokens, **options)
    for batch in batches:
        decode(runner, batch, 8)
        speeds = [decode(runner, batch, new) for _ in range(2)]
        context = PROMPT + new / 2
        entry = {"format": form, "graphs": graphs, "batch": batch, "context": context}
        log.write(record="model", **entry, tokens_per_second=speeds, config=config)
        print(f"{entry}: {max(speeds):,.0f} tokens/s", flush=True)


def main() -> None:
    """Measure, then write the report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("-d", "--device", type=int, default=0, help="number of the GPU")
    parser.add_argument("-o", "--output", type=Path, default=Path("build/bench/gpu.jsonl"), help="file of the JSON lines")
    parser.add_argument("--docs", type=Path, default=Path("docs"), help="folder of gpu.md and gpu.png")
    parser.add_argument("--parts", default="kernels,model", help="kernels, model or both")
    parser.add_argument("--report", type=Path, help="write the report of these records, and measure nothing")
    parser.add_argument("--no-report", action="store_true", help="leave the records as they are: --report writes one later")
    options = parser.parse_args()
    if options.report:
        write_report(read(options.report), options.docs)
        return
    facts = _core.survey()
    there = options.device < len(facts["gpus"])
    problem = facts["gpus"][options.device]["problem"] if there else facts["driver_error"] or "there is no such GPU"
    if problem:
        parser.exit(1, f"cuda:{options.device}: {problem}\n")
    gpu = facts["gpus"][options.device]
    options.output.parent.mkdir(parents=True, exist_ok=True)
    with options.output.open("w") as out:
        log, begun = Log(out), time.perf_counter()
        log.write(record="machine", gpu=gpu["name"], multiprocessors=gpu["multiprocessors"], **machine())
        timer = Timer(options.device)
        measure_kernels(log, [timer], [COPY])
        if "kernels" in options.parts.split(","):
            works = [*gpu_plan.attention_works(0.4 * gpu["memory"][1]), *gpu_plan.linear_works()]
            measure_kernels(log, [timer, *gpu_peers.available(options.device)], works)
        del timer
        if "model" in options.parts.split(","):
            for config in gpu_plan.MODELS.values():
                measure_model(log, f"cuda:{options.device}", config, gpu_plan.BATCHES)
        log.write(record="end", seconds=time.perf_counter() - begun)
    if not options.no_report:
        write_report(read(options.output), options.docs)


if __name__ == "__main__":
    main()
