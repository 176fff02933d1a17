"""A model with an encoder of images of the shape of SmolVLM-256M's, and how long Transformers takes for a tile.

    python benches/encoder.py FOLDER [--transformers] [--threads 2] [--rounds 5]

Writes the folder: random weights in bf16, the encoder with 12 layers of 768 and 1,024 patches, the language model that of the
tests' tiny Idefics3. `cargo run --release -p mistral-paged-engine --example time_encoder -- FOLDER` times this engine; with
`--transformers` (which needs torch, torchvision and transformers) Transformers is timed too, by the features of the image alone.
"""

from __future__ import annotations

import argparse
import importlib
import json
import shutil
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np

TESTS = Path(__file__).parent.parent / "tests"
GOLDEN = TESTS / "data" / "golden" / "vision" / "idefics3"
SIDE, PATCHES, LAYERS, WIDTHS, SCALE = 512, 1024, 12, {48: 768, 96: 3072}, 4
"""Pixels of a side, patches, layers, widths in the place of the tiny model's, and patches of a side that become one token."""
LAYER = "model.vision_model.encoder.layers.0."


def shape(name: str, tiny: list[int]) -> list[int]:
    """Of a tensor of the encoder, by the shape of the tiny one's."""
    if "position_embedding" in name:
        return [PATCHES, WIDTHS[48]]
    if "modality_projection" in name:
        return [tiny[0], WIDTHS[48] * SCALE**2]
    if "vision_model" not in name:
        return tiny
    return [WIDTHS.get(size, size) for size in tiny]


def write(folder: Path) -> None:
    """Configuration, tokenizer and weights."""
    folder.mkdir(parents=True, exist_ok=True)
    for name in ("chat_template.jinja", "tokenizer.json", "tokenizer_config.json", "generation_config.json"):
        shutil.copyfile(GOLDEN / name, folder / name)
    config = json.loads((GOLDEN / "config.json").read_text())
    config["scale_factor"] = SCALE
    config["vision_config"] |= {
        "hidden_size": WIDTHS[48],
        "intermediate_size": WIDTHS[96],
        "image_size": SIDE,
        "num_attention_heads": 12,
        "num_hidden_layers": LAYERS,
    }
    (folder / "config.json").write_text(json.dumps(config, indent=2))
    processor = json.loads((GOLDEN / "processor_config.json").read_text())
    processor["image_seq_len"] = PATCHES // SCALE**2
    processor["image_processor"] |= {
        "max_image_size": {"longest_edge": SIDE},
        "size": {"longest_edge": SIDE},
        "do_image_splitting": False,
    }
    (folder / "processor_config.json").write_text(json.dumps(processor, indent=2))
    with (GOLDEN / "model.safetensors").open("rb") as file:
        header = json.loads(file.read(int.from_bytes(file.read(8), "little")))
    bfloat16 = importlib.import_module("ml_dtypes").bfloat16
    numbers, weights = np.random.default_rng(0), {}
    for name, tensor in header.items():
        if name == "__metadata__" or ("encoder.layers." in name and not name.startswith(LAYER)):
            continue
        for layer in range(LAYERS if name.startswith(LAYER) else 1):
            values = numbers.standard_normal(shape(name, tensor["shape"]), dtype=np.float32) * 0.03
            if "norm" in name and name.endswith(".weight"):
                values += 1
            weights[name.replace("layers.0", f"layers.{layer}") if name.startswith(LAYER) else name] = values.astype(bfloat16)
    importlib.import_module("safetensors.numpy").save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})


def time_transformers(folder: Path, threads: int, rounds: int) -> None:
    """Prints medians of both types, by the attention that Transformers takes unless told otherwise, and by its plain one."""
    torch, transformers = map(importlib.import_module, ("torch", "transformers"))
    torch.set_num_threads(threads)
    for dtype in (torch.float32, torch.bfloat16):
        for attention in ("sdpa", "eager"):
            load: Any = transformers.Idefics3ForConditionalGeneration.from_pretrained
            model = load(folder, dtype=dtype, attn_implementation=attention).model
            pixels, seconds = torch.randn(1, 1, 3, SIDE, SIDE, dtype=dtype), []
            with torch.no_grad():
                for _ in range(rounds):
                    began = time.perf_counter()
                    model.get_image_features(pixels)
                    seconds.append(time.perf_counter() - began)
            print(f"{dtype}, {attention}: {statistics.median(seconds):.3f} s", flush=True)


def main() -> None:
    """Write, and time when asked to."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--transformers", action="store_true")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    sys.path.insert(0, str(TESTS))
    importlib.import_module("goldens").unpack()
    write(options.folder)
    if options.transformers:
        time_transformers(options.folder, options.threads, options.rounds)


if __name__ == "__main__":
    main()
