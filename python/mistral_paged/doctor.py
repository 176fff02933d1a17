"""What this machine and this build have, as text: processor, NVIDIA driver, GPUs, libraries and kernels; and what follows."""

from __future__ import annotations

import platform
import textwrap
from collections.abc import Iterator, Mapping
from typing import Any

from mistral_paged._core import __version__, survey

GIB = 1 << 30
WIDTH = 80
UNBROKEN: dict[str, Any] = {"break_on_hyphens": False, "break_long_words": False}


def text() -> str:
    """The report on this machine."""
    return "\n".join(lines(survey()))


def lines(facts: Mapping[str, Any]) -> Iterator[str]:
    """The report on what `survey` found."""
    yield f"mistral_paged {__version__}, Python {platform.python_version()}, {platform.system()} {platform.machine()}"
    yield ""
    yield "Processor"
    *lower, best = facts["cpu_tiers"]
    yield row("tier", best + (f" (and {', '.join(lower)})" if lower else ""))
    yield row("cores", str(facts["cores"]))
    yield row("memory", memory(facts["memory"]))
    yield ""
    yield "CUDA"
    yield row("driver", f"serves CUDA {facts['driver']}" if facts["driver"] else "none")
    for number, gpu in enumerate(facts["gpus"]):
        size = memory(gpu["memory"]) if gpu["memory"] else "memory unknown"
        kind = f"compute capability {gpu['capability']}, {gpu['multiprocessors']} multiprocessors"
        yield row(f"cuda:{number}", f"{gpu['name']}, {kind}, {size}")
    if not facts["gpus"]:
        yield row("GPUs", "none")
    for name, path, _ in facts["libraries"]:
        yield row(name, path or "none")
    size = f"{len(facts['kernels'])} fatbins, {facts['kernel_bytes'] / 1e6:.1f} MB, " if facts["kernels"] else ""
    yield row("kernels", size + facts["kernel_note"])
    if facts["kernel_targets"]:
        yield row("", f"for {', '.join(facts['kernel_targets'])}")
    yield ""
    yield "What follows"
    for advice in advise(facts):
        yield textwrap.fill(advice, WIDTH, initial_indent="  - ", subsequent_indent="    ", **UNBROKEN)


def advise(facts: Mapping[str, Any]) -> Iterator[str]:
    """What runs where, and what is missing."""
    usable = [f"cuda:{number}" for number, gpu in enumerate(facts["gpus"]) if not gpu["problem"]]
    if usable:
        yield f'Models run on {usable[0]} unless device says otherwise; "cpu" is the processor, with {facts["cores"]} threads.'
    else:
        yield f"Models run on the processor, with {facts['cores']} threads unless num_threads says otherwise."
    if facts["driver_error"]:
        yield f"Driver: {facts['driver_error']}."
    for number, gpu in enumerate(facts["gpus"]):
        if gpu["problem"]:
            yield f"cuda:{number}: {gpu['problem']}."
    for name, path, problem in facts["libraries"]:
        if path is None:
            yield f"{name}: {problem}. Without it a GPU computes prompts 8 rows at a time, which is slow."
    if not facts["kernels"]:
        yield f"Kernels: {facts['kernel_note']}; `pip install` from source compiles them on Linux x86-64 with g++."


def row(name: str, value: str) -> str:
    """An entry of the report; a path is not broken."""
    head = f"  {name:<10} "
    wrapped = textwrap.fill(value, WIDTH, initial_indent=head, subsequent_indent=" " * len(head), **UNBROKEN)
    return wrapped if value else head


def memory(sizes: tuple[int, int]) -> str:
    """Bytes in all and free, in words."""
    total, free = sizes
    return f"{total / GIB:.1f} GB, {free / GIB:.1f} GB free"
