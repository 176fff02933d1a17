"""What a machine with a GPU is asked once the bundle of `make gpu-bundle` lies on it: two calls of under ten minutes.

    python3 run.py tests       doctor, kernels, kernels under compute-sanitizer, goldens, exactness
    python3 run.py benches     kernels, then a model of Llama-3-8B's shape

Needs Python, and for the benches PyTorch; no compiler of Rust, no network. Each step has a time limit, and what it says is in the
results folder line by line, so whatever ends early leaves what it had. `--device cpu` tries the steps that need no GPU.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import shutil
import signal
import subprocess
import sys
import tarfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

HERE = Path(__file__).resolve().parent
# What the bundle has of what was built, packed and not.
BUILT, PACKAGES = HERE / "built.tar.xz", HERE / "packages"
CUBLAS = "libcublasLt.so.13"
# A test or two of each family: under the sanitizer a test takes a hundred times as long.
SANITIZED = (
    "attention::rows_without_a_key_are_zeros",
    "attention::several_rows_of_a_request_decode_together",
    "cache::blocks_are_copied_in_every_plane",
    "cache::keys_and_values_reach_their_slots_as_on_the_cpu",
    "dense::values_beyond_f16_become_its_largest",
    "sample::the_likeliest_token_is_the_lowest_of_equals",
    "sample::every_kept_token_is_drawn_and_no_other",
    "steps::rows_are_gathered",
    "weights::embeddings_are_rows_of_the_table",
)


@dataclass
class Step:
    """A command with its limit in seconds; `why_not`: it cannot run here."""

    name: str
    command: list[str]
    limit: float
    why_not: str = ""
    environment: dict[str, str] = field(default_factory=dict)


def library_folders() -> list[Path]:
    """Where NVIDIA's wheels, PyTorch's among them, and the toolkit have cuBLASLt."""
    spec = importlib.util.find_spec("nvidia")
    wheels = [Path(folder) for folder in (spec.submodule_search_locations or [])] if spec else []
    homes = [Path(os.environ.get("CUDA_HOME", "/usr/local/cuda"))]
    found = [path.parent for root in wheels + homes if root.is_dir() for path in sorted(root.rglob(CUBLAS))]
    return list(dict.fromkeys(found))


def sanitizer() -> str | None:
    """compute-sanitizer, which lies beside nvcc or in the toolkit's folder."""
    found = shutil.which("compute-sanitizer")
    home = Path(os.environ.get("CUDA_HOME", "/usr/local/cuda")) / "bin" / "compute-sanitizer"
    return found or (str(home) if home.is_file() else None)


def test_steps(device: str) -> Iterator[Step]:
    """The first call."""
    on_cpu = "" if device != "cpu" else "needs a GPU"
    libraries = os.pathsep.join([*map(str, library_folders()), os.environ.get("LD_LIBRARY_PATH", "")]).strip(os.pathsep)
    environment = {"LD_LIBRARY_PATH": libraries} if libraries else {}
    kernels = [str(HERE / "gpu-tests"), "--test-threads", "1"]
    # Plugins that the machine has, such as pytest-benchmark, may warn, and our tests take warnings for errors.
    alone = {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    options = ["-v", "-p", "pytest_timeout", "-p", "no:cacheprovider"]
    pytest = [sys.executable, "-m", "pytest", *options, str(HERE / "tests" / "gpu"), "--device", device]
    yield Step("doctor", [sys.executable, "-m", "mistral_paged", "doctor"], 30)
    yield Step("kernels", kernels, 150, on_cpu, environment)
    for tool in ("memcheck", "racecheck"):
        found = sanitizer()
        why_not = on_cpu or ("" if found else "compute-sanitizer is not installed")
        yield Step(tool, [found or "", "--tool", tool, "--error-exitcode", "1", *kernels, *SANITIZED], 75, why_not, environment)
    yield Step("goldens", [*pytest, "-k", "goldens"], 90, environment=alone)
    yield Step("exactness", [*pytest, "-k", "not goldens and not real_models"], 120, environment=alone)


def bench_steps(device: str, results: Path) -> Iterator[Step]:
    """The second call."""
    why_not = "needs a GPU" if device == "cpu" else ""
    ordinal = device.removeprefix("cuda:")
    bench = [sys.executable, str(HERE / "benches" / "gpu.py"), "--no-report", "--device", ordinal if not why_not else "0"]
    for part, limit in (("kernels", 280), ("model", 260)):
        yield Step(part, [*bench, "--parts", part, "--output", str(results / f"{part}.jsonl")], limit, why_not)


def run(step: Step, results: Path, deadline: float) -> dict[str, object]:
    """Runs a step until it ends, or its time or all time is over; what it says goes to a file of its own."""
    begun = time.monotonic()
    limit = min(step.limit, deadline - begun)
    if step.why_not or limit <= 0:
        return {"step": step.name, "outcome": f"left out: {step.why_not or 'no time was left'}", "seconds": 0.0}
    with (results / f"{step.name}.log").open("w") as log:
        log.write(f"$ {' '.join(step.command)}\n")
        log.flush()
        environment = {**os.environ, **step.environment, "PYTHONUNBUFFERED": "1"}
        try:
            # A group of its own, so that what it has started ends with it.
            child = subprocess.Popen(step.command, stdout=log, stderr=subprocess.STDOUT, env=environment, start_new_session=True)
        except OSError as error:
            return {"step": step.name, "outcome": f"does not start: {error}", "seconds": 0.0}
        try:
            status = child.wait(limit)
            outcome = "passed" if status == 0 else f"failed with status {status}"
        except subprocess.TimeoutExpired:
            os.killpg(child.pid, signal.SIGKILL)
            child.wait()
            outcome = f"ended after {limit:.0f} seconds"
    return {"step": step.name, "outcome": outcome, "seconds": round(time.monotonic() - begun, 1)}


def last_lines(path: Path, count: int) -> list[str]:
    """The end of what a step said."""
    return path.read_text(errors="replace").splitlines()[-count:] if path.is_file() else []


def unpack() -> None:
    """The packages of the bundle, without pip: they are pure Python, or of one file of machine code. And the tests of kernels."""
    if BUILT.is_file() and not PACKAGES.is_dir():
        with tarfile.open(BUILT) as files:
            files.extractall(HERE, filter="data")


def main() -> int:
    """Returns the exit status: 0 when every step that could run has passed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("call", choices=["tests", "benches"], help="which of the two calls")
    parser.add_argument("-d", "--device", default="cuda:0", help="a GPU such as cuda:0, or cpu for the steps that need none")
    parser.add_argument("-o", "--output", type=Path, default=Path("results"), help="folder of what the steps say")
    parser.add_argument("--seconds", type=float, default=570.0, help="what is not done by then ends")
    options = parser.parse_args()
    if options.device != "cpu" and not options.device.removeprefix("cuda:").isdigit():
        parser.error(f'--device must be "cpu" or a GPU such as "cuda:0", got {options.device!r}')
    deadline = time.monotonic() + options.seconds
    results = options.output.resolve()
    results.mkdir(parents=True, exist_ok=True)
    unpack()
    # Before what this Python has, PyTorch among it.
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [str(PACKAGES), os.environ.get("PYTHONPATH")]))
    made = test_steps(options.device) if options.call == "tests" else bench_steps(options.device, results)
    outcomes = []
    with (results / "summary.jsonl").open("a") as summary:
        for step in made:
            print(f"{step.name} ...", flush=True)
            outcomes.append(outcome := run(step, results, deadline))
            print(json.dumps(outcome), file=summary, flush=True)
    failures = 0
    for outcome in outcomes:
        print(f"{outcome['step']:<12}{outcome['seconds']:>8} s  {outcome['outcome']}")
        if outcome["outcome"] != "passed" and not str(outcome["outcome"]).startswith("left out"):
            failures += 1
            print(*(f"    {line}" for line in last_lines(results / f"{outcome['step']}.log", 20)), sep="\n")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
