"""Texts a second that are embedded, by mistral_paged and by a peer: the same texts, the same files, the same pooling.

    python benches/embed_peers.py                        the default model, beside llama.cpp
    python benches/embed_peers.py -m FILE.gguf           another GGUF file, beside llama.cpp
    python benches/embed_peers.py -m FOLDER              an embedding model as sentence-transformers writes it, beside that

The texts are prompts and replies of the packaged conversations, each up to so many characters. Engines take turns in every round,
each in a process of its own; a round is one request with all texts, after a shorter one that does not count. The figures are
medians: texts a second, and seconds of processor time, which tell more on a machine that others use as well. Take `--threads 1`
then, for threads that wait for each other may spin. The cosine is that between the engines' vectors of a text. llama.cpp is
the portable build of the package xllamacpp; it embeds a file that says no pooling by the mean. sentence-transformers sorts
texts by length and embeds 32 at once, as it does unless told otherwise.
"""

from __future__ import annotations

import argparse
import importlib
import json
import math
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
OWN = "mistral_paged"
LLAMA = "llamacpp"
SENTENCE = "sentence-transformers"
WARM_UP = 8


def texts(count: int, longest: int) -> list[str]:
    """Prompts and replies of the packaged conversations."""
    from mistral_paged.memory import conversations

    found = [text[:longest].strip() for talk in conversations(99) for text in (talk.prompt, talk.reply)]
    return [text for text in found if text][:count]


class Own:
    """mistral_paged."""

    def __init__(self, model: str, dtype: str, threads: int) -> None:
        module = importlib.import_module("mistral_paged")
        pooling = "mean" if Path(model).is_file() else None
        which = module.Which.Embedding(model, pooling=pooling, dtype=getattr(module.ModelDType, dtype))
        self.runner = module.Runner(which=which, pa_ctxt_len=65536, max_seqs=256, device="cpu", num_threads=threads)
        self.request = module.EmbeddingRequest

    def embed(self, given: list[str]) -> list[list[float]]:
        vectors: list[list[float]] = self.runner.send_embedding_request(self.request(given))
        return vectors


class LlamaCpp:
    """The server of llama.cpp as the package xllamacpp has it."""

    def __init__(self, model: str, _: str, threads: int) -> None:
        xllamacpp = importlib.import_module("xllamacpp")
        params = xllamacpp.CommonParams()
        params.model.path = model
        params.embedding = True
        params.pooling_type = xllamacpp.llama_pooling_type.LLAMA_POOLING_TYPE_MEAN
        params.n_batch = params.n_ubatch = 4096
        params.n_parallel = 64
        params.n_ctx = 65536
        params.kv_unified = True
        params.cpuparams.n_threads = params.cpuparams_batch.n_threads = threads
        self.server = xllamacpp.Server(params)

    def embed(self, given: list[str]) -> list[list[float]]:
        answer = self.server.handle_embeddings({"input": given})
        answer = json.loads(answer) if isinstance(answer, str) else answer
        return [item["embedding"] for item in sorted(answer["data"], key=lambda item: item["index"])]


class SentenceTransformers:
    """sentence-transformers over torch."""

    def __init__(self, model: str, dtype: str, threads: int) -> None:
        torch = importlib.import_module("torch")
        torch.set_num_threads(threads)
        kind = importlib.import_module("sentence_transformers").SentenceTransformer
        self.model = kind(model, device="cpu", model_kwargs={"dtype": getattr(torch, dtype)})

    def embed(self, given: list[str]) -> list[list[float]]:
        vectors: list[list[float]] = self.model.encode(given, normalize_embeddings=True).tolist()
        return vectors


ENGINES: dict[str, Any] = {OWN: Own, LLAMA: LlamaCpp, SENTENCE: SentenceTransformers}


def work(engine: str, model: str, dtype: str, threads: int, given: list[str]) -> dict[str, Any]:
    """Loads an engine and embeds all texts."""
    loaded = ENGINES[engine](model, dtype, threads)
    loaded.embed(given[:WARM_UP])
    began, used = time.perf_counter(), time.process_time()
    vectors = loaded.embed(given)
    return {"seconds": time.perf_counter() - began, "processor": time.process_time() - used, "vectors": vectors}


def measure(engine: str, python: Path, model: Path, options: argparse.Namespace, given: list[str]) -> dict[str, Any]:
    """The same in a process of its own."""
    dtype = options.dtype if engine == OWN else options.peer_dtype
    command = [str(python), str(HERE / "embed_peers.py"), "--work", engine, "-m", str(model), "--dtype", dtype]
    command += ["--threads", str(options.threads)]
    done = subprocess.run(command, input=json.dumps(given), capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise RuntimeError(f"{engine} failed: {done.stderr.strip().splitlines()[-1:]}")
    answer: dict[str, Any] = json.loads(done.stdout.strip().splitlines()[-1])
    return answer


def cosine(a: list[float], b: list[float]) -> float:
    """Of two vectors of any length."""
    return sum(x * y for x, y in zip(a, b, strict=True)) / math.sqrt(sum(x * x for x in a) * sum(y * y for y in b))


def main() -> None:
    """Measure as told by the command line, and print a line an engine."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("-m", "--model", type=Path, default=None, help="a GGUF file, or a folder; left out, the default model")
    parser.add_argument("--count", type=int, default=200, help="texts; there are 198")
    parser.add_argument("--longest", type=int, default=400, help="characters of a text at most")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--dtype", default="Auto", help="of mistral_paged")
    parser.add_argument("--peer-dtype", default="float32", help="of sentence-transformers; a GGUF file has its own")
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--work", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.work is not None:
        print(json.dumps(work(options.work, str(options.model), options.dtype, options.threads, json.load(sys.stdin))))
        return
    from peers import environment
    from work import load

    from mistral_paged.default_model import default_model

    model = (options.model or default_model()).resolve()
    given = texts(options.count, options.longest)
    pythons = {name: environment(name) for name in (OWN, LLAMA if model.is_file() else SENTENCE)}
    seconds: dict[str, list[float]] = {name: [] for name in pythons}
    processor: dict[str, list[float]] = {name: [] for name in pythons}
    vectors: dict[str, list[list[float]]] = {}
    for number in range(options.rounds):
        for name, python in pythons.items():
            done = measure(name, python, model, options, given)
            seconds[name].append(done["seconds"])
            processor[name].append(done["processor"])
            vectors[name] = done["vectors"]
            shown = f"{len(given) / done['seconds']:.1f} texts/s, {done['processor']:.1f} s of processor time, load {load()}"
            print(f"round {number + 1}: {name} {shown}", flush=True)
    for name, all_seconds in seconds.items():
        rate, used = len(given) / statistics.median(all_seconds), statistics.median(processor[name])
        print(f"{name}: {rate:.1f} texts/s of {len(given)}, {used:.1f} s of processor time; medians of {options.rounds}")
    cosines = [cosine(a, b) for a, b in zip(*vectors.values(), strict=True)]
    print(f"cosine between them: {min(cosines):.6f} at least, {statistics.fmean(cosines):.6f} on average")


if __name__ == "__main__":
    main()
