"""Where the time of a step goes that decodes on a GPU: each kernel's share of it, and what the host leaves idle.

    python3 benches/gpu_steps.py --layers 8 --formats BF16 Q4_K --batches 1 32 256

A model of Llama-3-8B's shape and random weights, as benches/gpu.py measures it. PyTorch's profiler records when kernels begin
and end, in CUDA graphs too. A kernel begins while the one before it ends, so each is charged from the end of that one to its own.
Needs the wheel, numpy and PyTorch.
"""

from __future__ import annotations

import argparse
import shutil
from collections import Counter, defaultdict
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import gpu
import gpu_model
import gpu_plan

from mistral_paged import ModelDType, Runner, Which

NEW = 24
"""Tokens of an answer while kernels are recorded."""
SHOWN = 16
"""Kernels of a table."""


@dataclass
class Launch:
    """A kernel that ran, in microseconds of the GPU's clock."""

    kernel: str
    begin: float
    end: float


def recorded(work: Any) -> list[Launch]:
    """The kernels that ran while `work` was done, in the order in which they began."""
    from torch.profiler import ProfilerActivity, profile  # type: ignore[import-not-found, unused-ignore]

    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        work()
    events = [event for event in profiler.profiler.kineto_results.events() if str(event.device_type()).endswith("CUDA")]
    times = [(event.name().split("(")[0], event.start_ns() / 1e3, event.duration_ns() / 1e3) for event in events]
    return sorted((Launch(name, begin, begin + long) for name, begin, long in times if long > 0), key=lambda one: one.begin)


def steps_of(launches: list[Launch]) -> list[list[Launch]]:
    """Steps of as many launches as most have: those that only decode. The last one is left out, which nothing follows."""
    starts = [i for i, launch in enumerate(launches) if "embed" in launch.kernel]
    steps = [launches[first:last] for first, last in pairwise(starts)]
    sizes = Counter(map(len, steps))
    return [step for step in steps if sizes and len(step) == sizes.most_common(1)[0][0]]


def table(steps: list[list[Launch]], nexts: list[float]) -> list[str]:
    """Lines of a table; `nexts`: when what follows each step begins."""
    shares: defaultdict[str, float] = defaultdict(float)
    counts: Counter[str] = Counter()
    idle = wall = 0.0
    for step, following in zip(steps, nexts, strict=True):
        before = step[0].begin
        for launch in sorted(step, key=lambda one: one.end):
            shares[launch.kernel] += max(launch.end - before, 0.0)
            counts[launch.kernel] += 1
            before = max(before, launch.end)
        idle += max(following - before, 0.0)
        wall += following - step[0].begin
    number = len(steps)
    if not number:
        return ["no whole step was recorded"]
    lines = [f"{number} steps of {len(steps[0])} launches: {wall / number:.0f} us each, {idle / number:.0f} us of them idle"]
    for kernel, share in sorted(shares.items(), key=lambda one: -one[1])[:SHOWN]:
        times = counts[kernel] / number
        lines.append(f"    {kernel:<40}{times:8.1f} x {share / counts[kernel]:8.2f} us = {share / number:8.1f} us")
    return lines


def main() -> None:
    """Record steps of each format and batch."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda:0", help="the GPU (%(default)s)")
    parser.add_argument("--layers", type=int, default=8, help="of the model, which has 32 (%(default)s)")
    parser.add_argument("--formats", nargs="+", default=["BF16", "Q4_K"], choices=list(gpu_plan.MODEL_FORMATS), help="of weights")
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 32, 256], help="requests at once")
    options = parser.parse_args()
    config = {**gpu_plan.LLAMA_8B, "num_hidden_layers": options.layers}
    folder = gpu_model.roomy_folder(int(gpu_plan.weight_bytes(config)))
    most = max(options.batches)
    try:
        gpu_model.write(folder, config)
        for form in options.formats:
            which = Which.Plain(str(folder), dtype=ModelDType.BF16)
            tokens = most * (gpu.PROMPT + 2 * NEW + 64)
            memory: dict[str, Any] = {"max_seqs": most, "pa_ctxt_len": tokens, "prefix_cache_n": 0}
            runner = Runner(which=which, device=options.device, in_situ_quant=gpu_plan.MODEL_FORMATS[form], **memory)
            for batch in options.batches:
                gpu.decode(runner, batch, 8)
                speed = max(gpu.decode(runner, batch, 2 * NEW) for _ in range(2))
                launches = recorded(lambda runner=runner, batch=batch: gpu.decode(runner, batch, NEW))
                steps = steps_of(launches)
                begins = [launch.begin for launch in launches]
                nexts = [min((at for at in begins if at > step[-1].begin), default=step[-1].end) for step in steps]
                print(f"{form}, {batch} requests, {speed:,.0f} tokens/s;", *table(steps, nexts), sep="\n", flush=True)
            del runner
    finally:
        shutil.rmtree(folder)


if __name__ == "__main__":
    main()
