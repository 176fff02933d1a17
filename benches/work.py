"""What every engine is asked to do, and how a measurement is written down: one JSON object a line."""

from __future__ import annotations

import json
import os
import platform
import subprocess
import time
from pathlib import Path
from typing import Any, TextIO

SENTENCES = 82  # about 1,400 tokens


def story(number: int) -> str:
    """A short prompt, another one for each number."""
    return f"Tell me story number {number}: how a crab invented a type system and then set out to sail around the world."


def long_prompt(number: int, sentences: int = SENTENCES) -> str:
    """A prompt of about 17 tokens a sentence; it differs from its first word on, so that no cached beginning helps."""
    return f"{number}. Say this again. " + " ".join(
        f"Quick brown fox {n} jumps over the lazy dog, as it always did." for n in range(sentences)
    )


class Log:
    """Writes records as they come, so that a run that is cut short leaves what it measured."""

    def __init__(self, out: TextIO) -> None:
        self.out = out

    def write(self, **record: Any) -> None:
        """Write one record."""
        print(json.dumps(record), file=self.out, flush=True)

    def sample(self, engine: str, measure: str, at: int, value: float, **more: Any) -> None:
        """One measurement: `value` of `measure`, such as tokens a second, at a number of streams or tokens."""
        self.write(record="sample", engine=engine, measure=measure, at=at, value=round(value, 6), **more)


def machine() -> dict[str, Any]:
    """Where and when: processor, memory, load, commit."""
    cpu = next(
        (line.split(":", 1)[1].strip() for line in lines("/proc/cpuinfo") if line.startswith("model name")), platform.processor()
    )
    flags = set(next((line.split(":", 1)[1].split() for line in lines("/proc/cpuinfo") if line.startswith("flags")), []))
    memory = next((int(line.split()[1]) * 1024 for line in lines("/proc/meminfo") if line.startswith("MemTotal")), 0)
    caches = [
        line[:-1] for path in sorted(Path("/sys/devices/system/cpu/cpu0/cache").glob("index*/size")) for line in lines(path)
    ]
    return {
        "cpu": cpu,
        "cpus": len(os.sched_getaffinity(0)),
        "extensions": [flag for flag in ("avx2", "avx512f", "avx512_vnni", "amx_bf16", "amx_int8", "amx_fp16") if flag in flags],
        "cache_kib": max((int(size) for size in caches if size.isdigit()), default=0),
        "memory_bytes": memory,
        "system": f"{platform.system()} {platform.release()}",
        "python": platform.python_version(),
        "date": time.strftime("%Y-%m-%d", time.gmtime()),
        "commit": commit(),
        "load": load(),
    }


def load() -> float:
    """Processes that wanted to run over the last minute."""
    return round(os.getloadavg()[0], 2)


def busy() -> tuple[float, float]:
    """Seconds that all processors together have been busy since the start of the machine, and that a hypervisor took away."""
    fields = next((line.split()[1:] for line in lines("/proc/stat") if line.startswith("cpu ")), [])
    ticks = [int(field) / os.sysconf("SC_CLK_TCK") for field in fields] + [0.0] * 8
    return sum(ticks[:3]) + sum(ticks[5:7]), ticks[7]


def lines(path: str | Path) -> list[str]:
    """Lines of a file, none when there is no such file."""
    try:
        return Path(path).read_text().splitlines()
    except OSError:
        return []


def commit() -> str:
    """The commit that is measured, with a plus when files differ from it."""
    here = Path(__file__).parent
    try:
        head = subprocess.run(
            ["git", "rev-parse", "--short=10", "HEAD"], cwd=here, capture_output=True, text=True, check=True
        ).stdout.strip()
        changed = subprocess.run(
            ["git", "status", "--porcelain", "--untracked-files=no", "--", ":!../docs"],
            cwd=here,
            capture_output=True,
            text=True,
            check=True,
        ).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
    return head + ("+" if changed else "")
