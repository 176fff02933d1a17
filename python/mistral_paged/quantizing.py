"""The command `quantize`: a quantised GGUF file of a model's float weights."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from mistral_paged import quantize
from mistral_paged.hub import local_path
from mistral_paged.loading import ProgressBar, select


def run(options: argparse.Namespace) -> None:
    """Writes the file and prints what is in it."""
    # What `select` asks for, and what a file that is written has nothing to do with.
    for name in ("lora", "lora_modules", "enable_lora", "lora_max_adapters", "lora_max_rank", "lora_max_bytes"):
        setattr(options, name, None)
    options.legacy_lora = options.legacy_lora_order = options.pooling = options.gqa = None
    options.max_edge = options.encoder_cache_mb = options.max_num_images = options.mmproj = None
    options.dtype = "auto"
    if options.model_id is None:
        raise ValueError("the default model is quantised already; name a float model with -m")
    output = Path(local_path(options.output))
    with ProgressBar("quantising") as bar:
        types = quantize(
            select(options),
            options.type,
            output,
            force=options.force,
            token_source=options.token_source,
            num_threads=options.num_threads,
            progress=bar.update,
        )
    size = output.stat().st_size
    if options.json:
        print(json.dumps({"file": str(output), "bytes": size, "tensors": types}))
    else:
        print(f"{output}: {size / 10**6:.1f} MB; tensors: " + ", ".join(f"{count} {name}" for name, count in types.items()))
