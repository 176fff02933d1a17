"""Keyword arguments that nobody would write: each is honoured, or refused by an exception that names one of them.

    python tests/fuzz_arguments.py --cases 100000 --seed 0

A case is a function of the seed and its number; `--case N` runs one alone. Requests that are made are sent to a tiny model. The
exit status is 1 if a case failed: by an exception of another kind or without a name, a request that ends with an error, or time.
"""

from __future__ import annotations

import argparse
import copy
import faulthandler
import math
import pickle
import random
import sys
import time
from collections import Counter
from collections.abc import Callable
from typing import Any

from conftest import GOLDEN, text_model

from mistral_paged import (
    Architecture,
    ChatCompletionRequest,
    CompletionRequest,
    MistralPagedError,
    ModelDType,
    PagedCacheType,
    Runner,
    ToolChoice,
    Which,
)

SECONDS = 30.0
"""Of a case at most, beside others on the machine."""

COMMON = [
    "model", "n_choices", "logit_bias", "max_tokens", "presence_penalty", "frequency_penalty", "repetition_penalty",
    "stop_seqs", "temperature", "top_p", "top_k", "grammar", "grammar_type", "min_p", "tool_schemas", "tool_choice",
    "dry_multiplier", "dry_base", "dry_allowed_length", "dry_sequence_breakers", "truncate_sequence", "ignore_eos", "adapter",
    "adapters", "seed", "priority", "deadline", "tenant", "cache_salt", "keep",
]  # fmt: skip
CHAT = [
    *COMMON, "messages", "logprobs", "top_logprobs", "stream", "web_search_options", "enable_thinking", "reasoning_effort",
    "max_tool_rounds", "session_id", "files", "public_messages",
]  # fmt: skip
COMPLETION = [*COMMON, "prompt", "best_of", "echo_prompt", "suffix", "fill_in_middle", "logprobs", "public_prefix_len"]
RUNNER = [
    "max_seqs", "no_kv_cache", "prefix_cache_n", "token_source", "chat_template", "jinja_explicit", "pa_gpu_mem",
    "pa_gpu_mem_usage", "pa_ctxt_len", "pa_blk_size", "pa_cache_type", "no_paged_attn", "paged_attn", "memory_goal", "seed",
    "max_num_batched_tokens", "device", "max_step_latency", "deterministic", "kv_tier_size", "cpu_tier", "num_threads",
    "kv_events_replay", "kv_events_topic",
    "admission", "victim", "fairness", "speculative", "speculative_gamma", "prompt_batchsize", "guaranteed", "cuda_graphs",
    "attention_backend", "mtp_n_predict",
    "num_device_layers", "in_situ_quant", "mtp_model", "lazy",
]  # fmt: skip
PLAN = [
    "max_seqs", "token_source", "pa_gpu_mem", "pa_gpu_mem_usage", "pa_ctxt_len", "pa_blk_size", "pa_cache_type",
    "no_paged_attn", "memory_goal", "max_num_batched_tokens", "device", "deterministic", "guaranteed", "devices", "cpu_tier",
    "num_threads", "prefix_cache_n",
]  # fmt: skip
PLAIN = ["model_id", "arch", "tokenizer_json", "topology", "dtype", "hf_cache_path", "auto_map_params"]
GGUF = ["quantized_model_id", "quantized_filename", "tok_model_id", "dtype", "tokenizer_json", "mmproj_filename", "max_edge"]

# What an error may call an argument beside its own name.
ALIASES = (
    "memory utilization",
    "KV capacity",
    "KV pool",
    "KV cache",
    "Invalid token source",
    "Which.",
    "Prompt",
    "stop",
    "MB of",
    "bytes",
    "prompt",
    "model",
    "chat template",
    "Number of choices",
    "Block size",
    "`messages",
)


def text(rng: random.Random) -> str:
    pieces = [
        "",
        "a",
        "user",
        "auto",
        "cpu",
        "\0",
        "\n",
        "é",
        "中",
        "😀",
        "\ud800",
        "\udfff",
        "{{",
        "<s>",
        "/nowhere",
        "~",
        "1",
        "x" * 500,
    ]
    return "".join(rng.choices(pieces, k=rng.randrange(4)))


def number(rng: random.Random) -> Any:
    integers = [0, 1, -1, 2, 8, 16, 32, 64, 2**31, -(2**31), 2**32, 2**63, 2**64 - 1, 2**64, 10**30, -(10**30), 10**400]
    floats = [0.0, -0.0, 0.5, 1.0, 1.5, 1e-9, 1e-320, 1e300, -1e300, math.inf, -math.inf, math.nan]
    return rng.choice(integers) if rng.random() < 0.6 else rng.choice(floats)


class Odd:
    """Answers every question with an error."""

    def __index__(self) -> int:
        raise KeyError("index")

    def __float__(self) -> float:
        raise KeyError("float")


def value(rng: random.Random, depth: int = 2) -> Any:
    kind = rng.randrange(14)
    if kind < 4:
        return number(rng)
    if kind < 7:
        return text(rng)
    if kind == 7:
        return rng.choice([True, False, None, b"a", bytearray(b"b"), range(3), object(), 1j])
    if kind == 8:
        return rng.choice(
            [ToolChoice.NoTools, ToolChoice.Auto, PagedCacheType.Int8, ModelDType.F16, Architecture.Llama, int, len]
        )
    if depth == 0:
        return rng.choice([[], {}, (), set(), frozenset()])
    if kind < 11:
        made: Any = [value(rng, depth - 1) for _ in range(rng.randrange(4))]
        return rng.choice([list, tuple, iter])(made)
    if kind < 13:
        keys = [rng.choice([1, 300, 10**20, "role", "content", "1", None, 1.5]) for _ in range(rng.randrange(4))]
        return {key: value(rng, depth - 1) for key in keys}
    return {"role": rng.choice(["user", "assistant", text(rng)]), "content": value(rng, depth - 1)}


def likely(rng: random.Random, name: str) -> Any:
    """Mostly what the argument takes."""
    if rng.random() < 0.15:
        return value(rng)
    if name == "messages":
        return [{"role": rng.choice(["user", "assistant", "system"]), "content": text(rng)} for _ in range(rng.randrange(1, 3))]
    if name == "prompt":
        return [rng.randrange(520) for _ in range(rng.randrange(1, 6))] if rng.random() < 0.6 else text(rng)
    if name in ("max_tokens", "n_choices", "best_of", "top_logprobs", "public_messages"):
        return rng.randrange(5)
    if name == "logit_bias":
        return {rng.randrange(600): rng.uniform(-120, 120) for _ in range(3)}
    if name in ("stop_seqs", "dry_sequence_breakers"):
        return [text(rng), text(rng)]
    if name in ("temperature", "top_p", "min_p", "repetition_penalty", "dry_multiplier", "deadline"):
        return rng.uniform(-0.1, 1.5)
    if name in ("model", "model_id", "suffix", "tenant", "cache_salt"):
        return text(rng)
    if name in (
        "stream",
        "keep",
        "ignore_eos",
        "logprobs",
        "echo_prompt",
        "truncate_sequence",
        "fill_in_middle",
        "deterministic",
        "lazy",
    ):
        return rng.random() < 0.5
    return number(rng) if rng.random() < 0.5 else value(rng)


class Fuzzer:
    """Runs cases."""

    def __init__(self) -> None:
        self.runner = Runner(text_model("llama"), memory_goal="64tokens", pa_blk_size=8, num_threads=1)
        self.counts: Counter[str] = Counter()
        self.failures: list[str] = []

    def run(self, seed: int, case: int) -> None:
        rng = random.Random(f"{seed}/{case}")
        kind = rng.choices(["chat", "completion", "plain", "gguf", "plan", "load", "text"], [30, 30, 6, 6, 6, 2, 6])[0]
        arguments: dict[str, Any] = {}
        began = time.monotonic()
        try:
            outcome = getattr(self, kind)(rng, arguments)
        except NotImplementedError as error:
            outcome = self.refused(error, arguments)
        except (MistralPagedError, TypeError) as error:
            outcome = self.refused(error, arguments)
        except KeyError as error:
            # What an argument raises itself.
            outcome = "raised by the argument" if error.args in (("index",), ("float",)) else f"FAILED with {error!r}"
        except BaseException as error:
            if isinstance(error, KeyboardInterrupt):
                raise
            outcome = f"FAILED with {type(error).__name__}: {error}"
        seconds = time.monotonic() - began
        if seconds > SECONDS:
            outcome = f"FAILED: took {seconds:.1f} s"
        self.counts[f"{kind}: {outcome.split(':')[0] if outcome.startswith('FAILED') else outcome}"] += 1
        if outcome.startswith("FAILED"):
            self.failures.append(f"case {case} ({kind}): {outcome}: {repr(arguments)[:800]}")

    def refused(self, error: Exception, arguments: dict[str, Any]) -> str:
        said, name = str(error), type(error).__name__
        names = (
            [*arguments, *ALIASES]
            if not isinstance(error, TypeError)
            else [*arguments, "argument", "must be", "cannot be", "`messages`"]
        )
        if not said or len(said) > 4096 or not any(each in said for each in names):
            return f"FAILED with a {name} that names nothing: {said[:500]}"
        return f"refused ({name})"

    def given(self, rng: random.Random, arguments: dict[str, Any], names: list[str], most: int, *needed: str) -> None:
        for each in [*needed, *rng.sample(names, rng.randrange(most + 1))]:
            arguments[each] = likely(rng, each)

    def answer(self, request: Any, send: Callable[[Any], Any], rng: random.Random) -> str:
        again = pickle.loads(pickle.dumps(copy.copy(request)))
        # NaN is not equal to itself.
        if again != request and repr(again) != repr(request):
            return f"FAILED: a copy differs: {again!r}"
        response = send(request)
        if isinstance(request, ChatCompletionRequest) and request.stream:
            for chunk in response:
                if chunk.choices[0].finish_reason == "error":
                    return "FAILED: a stream ended with an error"
        return "answered"

    def chat(self, rng: random.Random, arguments: dict[str, Any]) -> str:
        self.given(rng, arguments, CHAT, 4, "messages")
        arguments.setdefault("model", "m")
        request: Any = ChatCompletionRequest(**arguments)
        return self.answer(request, self.runner.send_chat_completion_request, rng)

    def completion(self, rng: random.Random, arguments: dict[str, Any]) -> str:
        self.given(rng, arguments, COMPLETION, 4, "prompt")
        arguments.setdefault("model", "m")
        return self.answer(CompletionRequest(**arguments), self.runner.send_completion_request, rng)

    def plain(self, rng: random.Random, arguments: dict[str, Any]) -> str:
        self.given(rng, arguments, PLAIN, 2, "model_id")
        return self.made(Which.Plain(**arguments))

    def gguf(self, rng: random.Random, arguments: dict[str, Any]) -> str:
        self.given(rng, arguments, GGUF, 2, "quantized_model_id")
        return self.made(Which.GGUF(**arguments))

    def made(self, which: Which) -> str:
        repr(which)
        copy.copy(which)
        return "made"

    def plan(self, rng: random.Random, arguments: dict[str, Any]) -> str:
        self.given(rng, arguments, PLAN, 3)
        plan = Runner.memory_plan(text_model("llama"), **arguments)
        assert str(plan)
        return "planned"

    def text(self, rng: random.Random, arguments: dict[str, Any]) -> str:
        arguments["text"] = likely(rng, rng.choice(["model", "messages"]))
        tokens = self.runner.tokenize_text(**arguments)
        arguments["tokens"] = [*tokens, *(rng.choice([0, 511, 512, 2**31]) for _ in range(2))]
        self.runner.detokenize_text(arguments["tokens"], rng.random() < 0.5)
        return "answered"

    def load(self, rng: random.Random, arguments: dict[str, Any]) -> str:
        self.given(rng, arguments, RUNNER, 3)
        arguments.setdefault("num_threads", 1)
        with Runner(Which.Plain(str(GOLDEN / "text" / "llama")), **arguments) as runner:
            runner.send_completion_request(CompletionRequest([5], "m", max_tokens=1))
        return "loaded"


def fuzz(cases: range, seed: int) -> Fuzzer:
    """What these cases came to."""
    fuzzer = Fuzzer()
    for case in cases:
        faulthandler.dump_traceback_later(2 * SECONDS, exit=True)
        fuzzer.run(seed, case)
    faulthandler.cancel_dump_traceback_later()
    return fuzzer


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", type=int, default=100_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--case", type=int, help="this case alone")
    arguments = parser.parse_args()
    cases = range(arguments.cases) if arguments.case is None else range(arguments.case, arguments.case + 1)
    began = time.monotonic()
    fuzzer = fuzz(cases, arguments.seed)
    for outcome, count in sorted(fuzzer.counts.items()):
        print(f"{count:>9}  {outcome}")
    for failure in fuzzer.failures[:50]:
        print(failure.encode("utf-8", "backslashreplace").decode())
    print(f"{len(cases)} cases, seed {arguments.seed}, {len(fuzzer.failures)} failed, {time.monotonic() - began:.0f} s")
    return 1 if fuzzer.failures else 0


if __name__ == "__main__":
    sys.exit(main())
