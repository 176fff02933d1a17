"""The same work on mistral_paged and on its peers, engines taking turns in every round. Writes JSON lines.

Each peer lives in an environment of its own under build/peers, made when missing. While one engine works the others are stopped,
so that none that polls takes its processors. A peer that cannot be installed or cannot load the model drops out with its reason.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

from model_bytes import model_bytes
from work import SENTENCES, Log, load, long_prompt, machine, story

from mistral_paged.default_model import default_model

HERE = Path(__file__).parent
ENVIRONMENTS = HERE.parent / "build" / "peers"
AVX512 = ["AVX2", "FMA", "F16C", "BMI2", "AVX512", "AVX512_VBMI", "AVX512_VNNI", "AVX512_BF16"]
# What pip installs, and the variables it needs; llama-cpp-python is compiled.
PEERS: dict[str, tuple[str, dict[str, str]]] = {
    "llamacpp-native": (
        "llama-cpp-python",
        {"CMAKE_ARGS": " ".join(["-DGGML_NATIVE=OFF", *(f"-DGGML_{name}=ON" for name in AVX512)])},
    ),
    "llamacpp": ("xllamacpp", {}),
    "openvino": ("openvino-genai", {}),
    "mistralrs": ("mistralrs==0.9.5", {}),
}
OWN = "mistral_paged"


class PeerFailedError(Exception):
    """Why an engine drops out."""


class Worker:
    """An engine in its process; stopped while it has nothing to do."""

    def __init__(self, name: str, python: Path, model: Path, max_streams: int) -> None:
        self.name = name
        ours, theirs = os.pipe()
        self.log = (ENVIRONMENTS / f"{name}.log").open("w")
        command = [str(python), str(HERE / "engines.py"), name, str(model), str(max_streams), str(theirs)]
        self.process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=self.log, stderr=subprocess.STDOUT, text=True, pass_fds=[theirs]
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
    package, variables = PEERS[name]
    folder = ENVIRONMENTS / name
    if not (folder / "installed").exists():
        print(f"{name}: installing {package}", flush=True)
        for command in (
            [sys.executable, "-m", "venv", str(folder)],
            [str(folder / "bin" / "pip"), "install", "--quiet", package],
        ):
            done = subprocess.run(command, env=os.environ | variables, capture_output=True, text=True, check=False)
            if done.returncode != 0:
                raise PeerFailedError("\n".join(done.stderr.strip().splitlines()[-1:]) or f"{command[-1]} cannot be installed")
        (folder / "installed").touch()
    return folder / "bin" / "python"


def version(name: str, python: Path) -> str:
    """The installed version of an engine."""
    package = OWN if name == OWN else PEERS[name][0].split("==")[0]
    command = [str(python), "-c", f"from importlib.metadata import version; print(version({package!r}))"]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()


def start(names: list[str], model: Path, max_streams: int, log: Log) -> list[Worker]:
    """The engines that can be had, each loaded and warm."""
    workers = []
    for name in names:
        worker = None
        try:
            python = environment(name)
            worker = Worker(name, python, model, max_streams)
            worker.answer([story(0)], 8)
        except PeerFailedError as failure:
            if worker is not None:
                worker.close()
            print(f"{name} drops out: {failure}", flush=True)
            log.write(record="dropped", engine=name, reason=str(failure))
            continue
        log.write(record="engine", engine=name, version=version(name, python))
        log.sample(name, "load", 0, worker.load_seconds)
        workers.append(worker)
    return workers


def measure(worker: Worker, log: Log, number: int, options: argparse.Namespace) -> None:
    """One round of one engine."""
    done = worker.answer([story(number)], options.new)
    log.sample(worker.name, "answer", 1, done["generated_tokens"] / done["seconds"], load=load())
    done = worker.answer([long_prompt(number, options.sentences)], 1)
    log.sample(worker.name, "prefill", done["prompt_tokens"], done["prompt_tokens"] / done["seconds"], load=load())
    for count in options.streams:
        done = worker.answer([story(n) for n in range(count)], options.new)
        log.sample(worker.name, "streams", count, done["generated_tokens"] / done["seconds"], load=load())


def main() -> None:
    """Measure as told by the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("-m", "--model", type=Path, default=None, help="a GGUF file or a folder; left out, the default model")
    parser.add_argument("-o", "--output", type=Path, required=True, help="file that the JSON lines are appended to")
    parser.add_argument("--engines", default=",".join([OWN, *PEERS]), help=f"some of {', '.join([OWN, *PEERS])}")
    parser.add_argument("--rounds", type=int, default=3, help="turns of each engine; the report takes medians")
    parser.add_argument("--streams", default="1,8,32", help="numbers of streams")
    parser.add_argument("--new", type=int, default=128, help="generated tokens a stream")
    parser.add_argument("--sentences", type=int, default=SENTENCES, help="length of the long prompt")
    options = parser.parse_args()
    names = options.engines.split(",")
    if unknown := set(names) - {OWN, *PEERS}:
        parser.error(f"no engine {', '.join(sorted(unknown))}; there are {', '.join([OWN, *PEERS])}")
    options.streams = [int(count) for count in options.streams.split(",")]
    model = (options.model or default_model()).resolve()
    ENVIRONMENTS.mkdir(parents=True, exist_ok=True)
    # Told to end, end the engines too: a stopped process would not notice.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    with options.output.open("a") as out:
        log = Log(out)
        log.write(record="machine", **machine())
        log.write(record="model", name=model.name, **vars(model_bytes(model)))
        workers = start(names, model, max(options.streams), log)
        try:
            for number in range(options.rounds):
                for worker in list(workers):
                    try:
                        measure(worker, log, number, options)
                    except PeerFailedError as failure:
                        print(f"{worker.name} drops out: {failure}", flush=True)
                        log.write(record="dropped", engine=worker.name, reason=str(failure))
                        workers.remove(worker)
                        worker.close()
        finally:
            for worker in workers:
                worker.close()


if __name__ == "__main__":
    main()
