"""Perplexity of a model after in-situ quantization to each type, beside the same matrices by llama.cpp's quantizer.

    python benches/quantizers.py --model FILE.gguf --golden tests/data/golden/real/smollm2/golden.json --types 8 Q4_0
    python benches/quantizers.py --model FILE.gguf --conversations --types Q2K Q3K Q4K

The model is dequantized to bfloat16 first, so that both quantizers begin from the same floats. Both files have the same types
in the same places; llama.cpp's differs in the bytes of its matrices, which `ggml_quantize_chunk` of the package xllamacpp has
made. With `--conversations` the text is the last of the packaged conversations, and a third file is quantized by importance that
the first 16 of them have measured (`calibration_file`). Perplexity is computed in F32 by this engine for all. Speed is of one
thread, in MB of bfloat16 a second of processor time.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import math
import shutil
import tempfile
import time
from pathlib import Path
from typing import Any

import gguf
import ml_dtypes
import numpy as np

from mistral_paged import CompletionRequest, ModelDType, Runner, Which, quantize
from mistral_paged.memory import conversations


def float_file(source: Path, output: Path) -> None:
    """The model with matrices of bfloat16 and everything else as it was."""
    reader = gguf.GGUFReader(source)
    architecture = reader.fields["general.architecture"].contents()
    writer = gguf.GGUFWriter(output, architecture)
    for name, field in reader.fields.items():
        if not name.startswith("GGUF.") and name not in ("general.architecture", "general.file_type"):
            kind = field.types[0]
            writer.add_key_value(name, field.contents(), kind, field.types[-1] if kind == gguf.GGUFValueType.ARRAY else None)
    for tensor in reader.tensors:
        shape = tuple(int(n) for n in reversed(tensor.shape))
        values = gguf.dequantize(tensor.data, tensor.tensor_type).astype(np.float32).reshape(shape)
        if len(shape) == 1:
            writer.add_tensor(tensor.name, values)
        else:
            stored = values.astype(ml_dtypes.bfloat16).view(np.uint8)
            writer.add_tensor(tensor.name, stored, raw_dtype=gguf.GGMLQuantizationType.BF16)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


class Ggml:
    """llama.cpp's quantizers, out of the library of xllamacpp."""

    def __init__(self, library: Path) -> None:
        self.chunk = ctypes.CDLL(str(library)).ggml_quantize_chunk
        pointer, size = ctypes.c_void_p, ctypes.c_int64
        self.chunk.argtypes = [ctypes.c_int, pointer, pointer, size, size, size, pointer]
        self.chunk.restype = ctypes.c_size_t

    def quantize(self, values: np.ndarray[Any, Any], kind: int, num_bytes: int) -> bytes:
        """Rows of float32 in the type of that number."""
        rows, columns = values.shape
        out = np.zeros(num_bytes, np.uint8)
        made = self.chunk(kind, values.ctypes.data, out.ctypes.data, 0, rows, columns, None)
        if made != num_bytes:
            raise SystemExit(f"ggml_quantize_chunk made {made} bytes instead of {num_bytes}")
        return out.tobytes()


def by_llama_cpp(ggml: Ggml, floats: Path, own: Path, output: Path) -> float:
    """A copy of a quantized file, its matrices quantized anew by llama.cpp; seconds that took."""
    shutil.copy(own, output)
    sources = {tensor.name: tensor for tensor in gguf.GGUFReader(floats).tensors}
    seconds = 0.0
    with output.open("r+b") as file:
        for tensor in gguf.GGUFReader(own).tensors:
            if tensor.tensor_type in (gguf.GGMLQuantizationType.F32, gguf.GGMLQuantizationType.BF16):
                continue
            source = sources[tensor.name]
            values = np.ascontiguousarray(gguf.dequantize(source.data, source.tensor_type), dtype=np.float32)
            began = time.process_time()
            made = ggml.quantize(values.reshape(-1, int(tensor.shape[0])), int(tensor.tensor_type), int(tensor.n_bytes))
            seconds += time.process_time() - began
            file.seek(int(tensor.data_offset))
            file.write(made)
    return seconds


def perplexity(path: Path, ids: list[int], **options: Any) -> float:
    """Of a text of token ids, the first given."""
    with Runner(which=Which.GGUF(str(path), dtype=ModelDType.F32), pa_gpu_mem=512, **options) as runner:
        request = CompletionRequest(ids, "default", max_tokens=1, echo_prompt=True, logprobs=0)
        logprobs = runner.send_completion_request(request).choices[0].logprobs
    assert logprobs is not None
    scores = [token.logprob for token in logprobs.content[: len(ids)] if token.logprob is not None]
    return math.exp(-sum(scores) / len(scores))


def main() -> None:
    """Prints a JSON line a type."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, required=True)
    text = parser.add_mutually_exclusive_group(required=True)
    text.add_argument("--golden", type=Path)
    text.add_argument("--conversations", action="store_true")
    parser.add_argument("--library", type=Path, help="xllamacpp.abi3.so; without, llama.cpp is left out")
    parser.add_argument("--types", nargs="+", default=["8", "Q5_1", "Q5_0", "Q4_1", "Q4_0", "MXFP4"])
    parser.add_argument("--tokens", type=int, default=768)
    options = parser.parse_args()
    ggml = Ggml(options.library) if options.library is not None else None
    with tempfile.TemporaryDirectory() as folder:
        floats, own, theirs = (Path(folder) / f"{name}.gguf" for name in ("floats", "own", "theirs"))
        float_file(options.model, floats)
        size = floats.stat().st_size / 1e6
        calibration = Path(folder) / "calibration.txt"
        if options.conversations:
            texts = [f"{one.prompt}\n\n{one.reply}\n\n" for one in conversations(99)]
            calibration.write_text("".join(texts[:16]))
            with Runner(which=Which.GGUF(str(floats)), pa_gpu_mem=64) as runner:
                ids = runner.tokenize_text("".join(texts[-20:]), add_special_tokens=True)[: options.tokens]
        else:
            ids = json.loads(options.golden.read_text())["perplexity"]["ids"][: options.tokens]
        print(json.dumps({"type": "BF16", "tokens": len(ids), "ppl": perplexity(floats, ids)}), flush=True)
        for name in options.types:
            began = time.process_time()
            types = quantize(Which.GGUF(str(floats)), name, own, force=True, num_threads=1)
            own_seconds = time.process_time() - began
            row = {"type": name, "tensors": types, "own": perplexity(own, ids), "own_mb_s": size / own_seconds}
            if ggml is not None:
                seconds = by_llama_cpp(ggml, floats, own, theirs)
                row |= {"llama_cpp": perplexity(theirs, ids), "llama_cpp_mb_s": size / seconds}
            if options.conversations:
                quantize(Which.GGUF(str(floats), calibration_file=str(calibration)), name, own, force=True)
                row["measured"] = perplexity(own, ids)
            print(json.dumps(row), flush=True)


if __name__ == "__main__":
    main()
