"""One engine in its own interpreter, driven by lines of JSON: a request on standard input, an answer on the descriptor given.

Run by peers.py as `python engines.py ENGINE MODEL MAX_STREAMS ANSWERS_FD`. Only the engine's own packages are needed.
"""

from __future__ import annotations

import ctypes
import importlib
import json
import os
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Protocol

THREADS = len(os.sched_getaffinity(0))


class Engine(Protocol):
    """A loaded model."""

    def answer(self, texts: list[str], new: int) -> tuple[int, int]:
        """Answers all texts at once, greedily, `new` tokens each; returns prompt and generated tokens in all."""


class RunnerEngine:
    """mistral_paged, and mistralrs, whose interface it mirrors."""

    def __init__(self, module: str, model: str, max_streams: int) -> None:
        self.module = importlib.import_module(module)
        folder, name = os.path.split(model)
        gguf = self.module.Which.GGUF(quantized_model_id=folder, quantized_filename=name)
        selected = self.module.Which.Plain(model_id=model) if Path(model).is_dir() else gguf
        self.runner = self.module.Runner(which=selected, max_seqs=max_streams, prefix_cache_n=0)
        self.threads = ThreadPoolExecutor(max_streams)
        self.has_template = True
        try:
            self.one("Hello", 1)
        except ValueError:  # a base model
            self.has_template = False

    def one(self, text: str, new: int) -> tuple[int, int]:
        options = {"model": "default", "max_tokens": new, "temperature": 0.0, "ignore_eos": True}
        if self.has_template:
            messages = [{"role": "user", "content": text}]
            request = self.module.ChatCompletionRequest(messages=messages, **options)
            usage = self.runner.send_chat_completion_request(request).usage
        else:
            usage = self.runner.send_completion_request(self.module.CompletionRequest(prompt=text, **options)).usage
        return usage.prompt_tokens, usage.completion_tokens

    def answer(self, texts: list[str], new: int) -> tuple[int, int]:
        return totals(self.threads.map(lambda text: self.one(text, new), texts))


class XLlamaCpp:
    """The server of llama.cpp as the package xllamacpp has it: its portable build, which picks AVX2 here."""

    def __init__(self, model: str, max_streams: int) -> None:
        xllamacpp = importlib.import_module("xllamacpp")
        params = xllamacpp.CommonParams()
        params.model.path = model
        params.n_parallel = max_streams
        params.n_ctx = max(8192, 512 * max_streams)
        params.kv_unified = True
        params.cpuparams.n_threads = params.cpuparams_batch.n_threads = THREADS
        self.server = xllamacpp.Server(params)
        self.threads = ThreadPoolExecutor(max_streams)

    def one(self, text: str, new: int) -> tuple[int, int]:
        messages = [{"role": "user", "content": text}]
        request = {"messages": messages, "max_tokens": new, "temperature": 0.0, "ignore_eos": True, "cache_prompt": False}
        answer = self.server.handle_chat_completions(request)
        answer = json.loads(answer) if isinstance(answer, str) else answer
        if "usage" not in answer:
            raise RuntimeError(f"no usage in {answer}")
        return answer["usage"]["prompt_tokens"], answer["usage"]["completion_tokens"]

    def answer(self, texts: list[str], new: int) -> tuple[int, int]:
        return totals(self.threads.map(lambda text: self.one(text, new), texts))


class LlamaCppNative:
    """llama.cpp built for this machine (llama-cpp-python), through its C interface: the prompts, then all streams in step."""

    def __init__(self, model: str, max_streams: int) -> None:
        self.api = api = importlib.import_module("llama_cpp")
        self.silence = api.llama_log_callback(lambda *_: None)
        api.llama_log_set(self.silence, ctypes.c_void_p(0))
        api.llama_backend_init()
        self.model = api.llama_model_load_from_file(model.encode(), api.llama_model_default_params())
        if not self.model:
            raise RuntimeError(f"llama.cpp cannot load {model}")
        params = api.llama_context_default_params()
        params.n_ctx = max(8192, 512 * max_streams)
        params.n_batch = 2048
        params.n_seq_max = max_streams
        params.n_threads = params.n_threads_batch = THREADS
        if hasattr(params, "kv_unified"):
            params.kv_unified = True
        self.context = api.llama_init_from_model(self.model, params)
        self.vocab = api.llama_model_get_vocab(self.model)
        self.num_tokens = api.llama_vocab_n_tokens(self.vocab)
        self.template = api.llama_model_chat_template(self.model, None)

    def tokens(self, text: str) -> list[int]:
        message = (self.api.llama_chat_message * 1)(self.api.llama_chat_message(b"user", text.encode()))
        chat = ctypes.create_string_buffer(2 * len(text.encode()) + 1024)
        size = self.api.llama_chat_apply_template(self.template, message, 1, True, chat, len(chat))
        if size < 0:
            raise RuntimeError("llama.cpp does not know the chat template")
        ids = (self.api.llama_token * (size + 16))()
        return list(ids[: self.api.llama_tokenize(self.vocab, chat.raw[:size], size, ids, len(ids), True, True)])

    def step(self, rows: list[tuple[int, int, int, bool]]) -> None:
        """One batch of (token, position, stream, wants logits)."""
        batch = self.api.llama_batch_init(len(rows), 0, 1)
        batch.n_tokens = len(rows)
        for row, (token, position, stream, wanted) in enumerate(rows):
            batch.token[row], batch.pos[row], batch.logits[row] = token, position, wanted
            batch.n_seq_id[row], batch.seq_id[row][0] = 1, stream
        failed = self.api.llama_decode(self.context, batch)
        self.api.llama_batch_free(batch)
        if failed:
            raise RuntimeError(f"llama_decode returned {failed}")

    def best(self, row: int) -> int:
        """The likeliest token after a row of the last batch."""
        import numpy

        logits = self.api.llama_get_logits_ith(self.context, row)
        return int(numpy.ctypeslib.as_array(logits, shape=(self.num_tokens,)).argmax())

    def answer(self, texts: list[str], new: int) -> tuple[int, int]:
        self.api.llama_memory_clear(self.api.llama_get_memory(self.context), True)
        prompts = [self.tokens(text) for text in texts]
        last = []
        for stream, ids in enumerate(prompts):
            self.step([(token, position, stream, position + 1 == len(ids)) for position, token in enumerate(ids)])
            last.append(self.best(len(ids) - 1))
        for done in range(new - 1):
            self.step([(token, len(prompts[stream]) + done, stream, True) for stream, token in enumerate(last)])
            last = [self.best(stream) for stream in range(len(last))]
        return sum(map(len, prompts)), new * len(texts)


class OpenVino:
    """OpenVINO GenAI with continuous batching."""

    def __init__(self, model: str, max_streams: int) -> None:
        self.api = importlib.import_module("openvino_genai")
        scheduler = self.api.SchedulerConfig()
        scheduler.cache_size = 2
        scheduler.max_num_batched_tokens = 2048
        scheduler.max_num_seqs = max_streams
        scheduler.enable_prefix_caching = False
        self.pipeline = self.api.LLMPipeline(model, "CPU", scheduler_config=scheduler)

    def answer(self, texts: list[str], new: int) -> tuple[int, int]:
        config = self.api.GenerationConfig()
        config.max_new_tokens = config.min_new_tokens = new
        config.ignore_eos = True
        config.do_sample = False
        config.apply_chat_template = True
        metrics = self.pipeline.generate(texts, config).perf_metrics
        generated = metrics.get_num_generated_tokens()
        return metrics.get_num_input_tokens(), generated


class Vllm:
    """vLLM on the CPU, in this process; `model` is a folder of safetensors, in bf16 or compressed-tensors' W8A8."""

    def __init__(self, model: str, max_streams: int) -> None:
        if not Path(model).is_dir():
            raise RuntimeError(f"vLLM takes a folder of safetensors on a CPU, and {model} is none")
        self.api = importlib.import_module("vllm")
        options = {"dtype": "bfloat16", "max_model_len": 4096, "enable_prefix_caching": False}
        self.model = self.api.LLM(model, max_num_seqs=max(max_streams, 8), **options)

    def answer(self, texts: list[str], new: int) -> tuple[int, int]:
        params = self.api.SamplingParams(max_tokens=new, temperature=0.0, ignore_eos=True)
        chats = [[{"role": "user", "content": text}] for text in texts]
        answers = self.model.chat(chats, params, use_tqdm=False)
        return totals((len(answer.prompt_token_ids), len(answer.outputs[0].token_ids)) for answer in answers)


def totals(counts: Any) -> tuple[int, int]:
    """Sums of pairs."""
    prompt, generated = zip(*counts, strict=True)
    return sum(prompt), sum(generated)


LOADERS: dict[str, Callable[[str, int], Engine]] = {
    "mistral_paged": lambda model, streams: RunnerEngine("mistral_paged", model, streams),
    "mistralrs": lambda model, streams: RunnerEngine("mistralrs", model, streams),
    "llamacpp": XLlamaCpp,
    "llamacpp-native": LlamaCppNative,
    "openvino": OpenVino,
    "vllm": Vllm,
}


def main() -> None:
    """Load, then answer until the input ends."""
    name, model, max_streams, descriptor = sys.argv[1:]
    with os.fdopen(int(descriptor), "w", buffering=1) as answers:

        def reply(**fields: Any) -> None:
            print(json.dumps(fields), file=answers, flush=True)

        try:
            start = time.perf_counter()
            engine = LOADERS[name](model, int(max_streams))
            reply(seconds=time.perf_counter() - start)
            for line in sys.stdin:
                request = json.loads(line)
                start = time.perf_counter()
                prompt, generated = engine.answer(request["texts"], request["new"])
                reply(seconds=time.perf_counter() - start, prompt_tokens=prompt, generated_tokens=generated)
        except BaseException as error:
            reply(error=f"{type(error).__name__}: {error}")
        # Some engines hang or crash when the interpreter takes them down.
        os._exit(0)


if __name__ == "__main__":
    main()
