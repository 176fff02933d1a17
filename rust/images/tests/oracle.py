"""Writes what Pillow and Transformers make of generated images: tests/data/resized.txt and tests/data/processors.json.

Needs pillow==12.3.0, numpy and transformers==5.23.0. Pillow 13 resizes columns first where the height shrinks more than the width. `--check` compares instead of writing.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import sys
from pathlib import Path

import numpy as np
from PIL import Image

DATA = Path(__file__).parent / "data"
CASES = 500


def noise(at: np.ndarray | int, seed: int) -> np.ndarray:
    """32 bits for each counter. tests/common has the same."""
    value = (np.asarray(at, np.uint64) * 2654435761 + seed * 40503 + 12345) & 0xFFFFFFFF
    value ^= value >> 15
    value = (value * 2246822519) & 0xFFFFFFFF
    value ^= value >> 13
    value = (value * 3266489917) & 0xFFFFFFFF
    return value ^ (value >> 16)


def image(seed: int, width: int, height: int) -> Image.Image:
    """By the seed: noise, a gradient, both, or black and white."""
    values = (noise(np.arange(height * width * 3), seed) >> 24).reshape(height, width, 3)
    y, x, channel = np.indices(values.shape).astype(np.uint64)
    gradient = x * 7 + y * 5 + channel * 60
    kinds = [values, gradient, gradient + (values >> 4), (values >> 7) * 255]
    return Image.fromarray((kinds[seed % 4] & 255).astype(np.uint8))


def edge(first: int, second: int) -> int:
    return [1, 1 + second % 8, 1 + second % 300, 1 + second % 100, 1 + second % 40][first % 5]


def resize_cases() -> list[tuple[int, int, int, int, int]]:
    """Width and height, new width and height, and Pillow's number of the filter."""
    cases = []
    for case in range(CASES):
        draws = [int(noise(at, case)) for at in range(8)]
        cases.append((*(edge(*draws[at : at + 2]) for at in (0, 2, 4, 6)), case % 6))
    return cases


def digest(*arrays: np.ndarray) -> str:
    return hashlib.sha256(b"".join(array.tobytes() for array in arrays)).hexdigest()[:16]


def resized() -> str:
    """One digest of the pixels a line."""
    lines = []
    for case, (width, height, new_width, new_height, filter_) in enumerate(resize_cases()):
        result = image(case, width, height).resize((new_width, new_height), filter_)
        lines.append(digest(np.asarray(result)))
    return "\n".join(lines) + "\n"


SIZES = [(96, 64), (45, 80), (1, 1), (7, 150), (333, 251), (200, 200), (640, 90), (57, 58)]

CONFIGS = [
    {"image_processor_type": "CLIPImageProcessor", "size": {"shortest_edge": 56}, "crop_size": {"height": 50, "width": 71}},
    {"image_processor_type": "CLIPImageProcessor", "size": {"shortest_edge": 33}, "crop_size": 56, "resample": 1},
    {"image_processor_type": "CLIPImageProcessor", "size": 40, "do_center_crop": False, "do_normalize": False},
    {"image_processor_type": "LlavaImageProcessor", "size": {"shortest_edge": 48}, "crop_size": 48, "do_pad": True},
    {"image_processor_type": "SiglipImageProcessor", "size": {"height": 40, "width": 60}, "do_rescale": False},
    {
        "image_processor_type": "LlavaNextImageProcessor",
        "size": {"shortest_edge": 32},
        "crop_size": {"height": 32, "width": 32},
        "image_grid_pinpoints": [[32, 64], [64, 32], [64, 64], [96, 32], [32, 96]],
    },
    {"image_processor_type": "Idefics2ImageProcessor", "size": {"shortest_edge": 40, "longest_edge": 90}},
    {
        "image_processor_type": "Idefics2ImageProcessor",
        "size": {"shortest_edge": 40, "longest_edge": 90},
        "do_image_splitting": True,
    },
    {"image_processor_type": "Idefics3ImageProcessor", "size": {"longest_edge": 100}, "max_image_size": {"longest_edge": 40}},
    {
        "image_processor_type": "SmolVLMImageProcessor",
        "size": {"longest_edge": 100},
        "max_image_size": {"longest_edge": 40},
        "do_image_splitting": False,
    },
    {"image_processor_type": "Qwen2VLImageProcessor", "min_pixels": 3136, "max_pixels": 12544},
    {
        "image_processor_type": "Qwen2VLImageProcessorFast",
        "size": {"shortest_edge": 4096, "longest_edge": 65536},
        "patch_size": 16,
        "image_mean": [0.5, 0.5, 0.5],
        "image_std": [0.5, 0.5, 0.5],
    },
    {"image_processor_type": "Gemma3ImageProcessor", "size": {"height": 56, "width": 56}},
    {
        "image_processor_type": "Gemma3ImageProcessor",
        "size": {"height": 40, "width": 40},
        "do_pan_and_scan": True,
        "pan_and_scan_min_crop_size": 16,
        "pan_and_scan_max_num_crops": 4,
        "pan_and_scan_min_ratio_to_activate": 1.2,
    },
    {"image_processor_type": "PixtralImageProcessor", "size": {"longest_edge": 112}, "patch_size": 14},
    {"image_processor_type": "PixtralImageProcessor", "size": {"longest_edge": 300}, "patch_size": {"height": 32, "width": 32}},
]


def processor_class(name: str) -> type:
    """The one over Pillow."""
    import transformers

    return getattr(transformers, name.removesuffix("Fast") + "Pil")


def tiles(output: dict) -> list[np.ndarray]:
    """Without what fills a batch up. Qwen2-VL: one array of patches."""
    values = output["pixel_values"]
    masks = output.get("pixel_attention_mask")
    if masks is not None:
        kept = [(mask[:, 0].sum(), mask[0].sum()) for mask in masks[0]]
        return [value[:, :height, :width] for value, (height, width) in zip(values[0], kept, strict=True)]
    return [values] if "image_grid_thw" in output else list(values[0] if values[0].ndim == 4 else values)


def processed(config: dict) -> list[str]:
    """A digest for each of SIZES, or "refused"."""
    arguments = {key: value for key, value in config.items() if key != "image_processor_type"}
    processor = processor_class(config["image_processor_type"])(**arguments)
    results = []
    for seed, (width, height) in enumerate(SIZES):
        try:
            made = tiles(processor(images=[image(seed, width, height)], return_tensors="np"))
            results.append(digest(*(np.ascontiguousarray(tile, np.float32) for tile in made)))
        except (ValueError, ZeroDivisionError) as error:
            print(config["image_processor_type"], width, height, error, file=sys.stderr)
            results.append("refused")
    return results


def processors() -> str:
    cases = [{"config": config, "digests": processed(config)} for config in CONFIGS]
    lines = ",\n".join(json.dumps(case) for case in cases)
    return f"[\n{lines}\n]\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true")
    arguments = parser.parse_args()
    differing = []
    for name, text in {"resized.txt": resized(), "processors.json": processors()}.items():
        if not arguments.check:
            (DATA / name).write_text(text)
        elif (DATA / name).read_text() != text:
            differing.append(name)
    if differing:
        sys.exit(f"{', '.join(differing)} would change")


if __name__ == "__main__":
    main()
