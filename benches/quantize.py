"""A GGUF file with all matrices in one format: `python quantize.py FROM TO MOSTLY_Q4_0`. Needs llama-cpp-python."""

from __future__ import annotations

import importlib
import os
import sys
from pathlib import Path


def main() -> None:
    """Quantize as told by the command line."""
    source, target, kind = sys.argv[1:]
    api = importlib.import_module("llama_cpp")
    params = api.llama_model_quantize_default_params()
    params.ftype = getattr(api, f"LLAMA_FTYPE_{kind}")
    params.nthread = len(os.sched_getaffinity(0))
    params.pure = True
    partial = f"{target}.partial"
    if status := api.llama_model_quantize(source.encode(), partial.encode(), params):
        sys.exit(f"llama_model_quantize returned {status}")
    Path(partial).replace(target)


if __name__ == "__main__":
    main()
