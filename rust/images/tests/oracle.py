"""Writes what others make of generated images, which the tests compare with.

tests/data/resized.txt is Pillow's, processors.json is Transformers', phi3.json is Pillow's and ONNX Runtime's. `--check` compares
instead of writing. `--files FOLDER` writes small files of every format, and FOLDER/digests.json with digests of the pixels that
Pillow finds in them: that is images/ in tests/data/golden/images.tar.xz.

Needs pillow==12.3.0, numpy, transformers==5.24.0, torch, torchvision, onnx and onnxruntime. Pillow 13 resizes columns first where the height shrinks
more than the width.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import math
import struct
import sys
import zlib
from pathlib import Path
from typing import Any

import numpy as np
from PIL import ExifTags, Image, ImageOps, PngImagePlugin

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
    {"image_processor_type": "Lfm2VlImageProcessor"},
    {"image_processor_type": "Lfm2VlImageProcessorFast", "tile_size": 64, "min_image_tokens": 2, "max_image_tokens": 8},
    {
        "image_processor_type": "Lfm2VlImageProcessor",
        "tile_size": 60,
        "encoder_patch_size": 10,
        "downsample_factor": 3,
        "min_image_tokens": 1,
        "max_image_tokens": 4,
        "min_tiles": 3,
        "max_tiles": 5,
        "max_pixels_tolerance": 1.0,
        "use_thumbnail": False,
        "resample": 3,
    },
    {"image_processor_type": "Lfm2VlImageProcessor", "max_image_tokens": 20, "min_image_tokens": 9, "do_image_splitting": False},
    {"image_processor_type": "Llama4ImageProcessorFast", "size": {"height": 56, "width": 56}},
    {
        "image_processor_type": "Llama4ImageProcessor",
        "size": {"height": 40, "width": 40},
        "max_patches": 5,
        "image_mean": [0.4, 0.5, 0.6],
        "image_std": [0.3, 0.2, 0.25],
    },
    {"image_processor_type": "Llama4ImageProcessor", "size": 64, "max_patches": 6, "resize_to_max_canvas": True},
    {"image_processor_type": "Llama4ImageProcessor", "size": 72, "max_patches": 1, "do_normalize": False},
    {"image_processor_type": "GotOcr2ImageProcessorFast", "size": {"height": 40, "width": 40}, "crop_to_patches": True},
    {
        "image_processor_type": "GotOcr2ImageProcessor",
        "size": {"height": 30, "width": 40},
        "crop_to_patches": True,
        "min_patches": 3,
        "max_patches": 5,
    },
    {"image_processor_type": "GotOcr2ImageProcessor", "size": {"height": 30, "width": 50}},
    {"image_processor_type": "Cohere2VisionImageProcessorFast", "size": {"height": 40, "width": 40}},
    {"image_processor_type": "Cohere2VisionImageProcessor", "size": {"height": 64, "width": 64}, "max_patches": 3},
    {"image_processor_type": "Cohere2VisionImageProcessor", "size": {"height": 30, "width": 30}, "crop_to_patches": False},
    {"image_processor_type": "Glm4vImageProcessorFast"},
    {"image_processor_type": "Glm4vImageProcessor", "size": {"shortest_edge": 4000, "longest_edge": 20000}, "patch_size": 10},
    {"image_processor_type": "MllamaImageProcessorFast", "size": {"height": 56, "width": 56}},
    {
        "image_processor_type": "MllamaImageProcessor",
        "size": {"height": 40, "width": 40},
        "max_image_tiles": 6,
        "image_mean": [0.4, 0.5, 0.6],
        "image_std": [0.3, 0.2, 0.25],
        "resample": 3,
    },
]


def processor_class(name: str) -> type:
    """The one over Pillow; of those that there are only over torchvision, that with Pillow's resizing."""
    import transformers

    name = name.removesuffix("Fast")
    over_torchvision = {
        "Cohere2VisionImageProcessor": with_arrays,
        "Lfm2VlImageProcessor": with_arrays,
        "Llama4ImageProcessor": lambda processor: processor,
    }
    made = over_torchvision.get(name)
    if made is None:
        return getattr(transformers, name + "Pil")
    transformers.image_processing_backends.TorchvisionBackend.resize = resize_by_pillow
    return made(getattr(transformers, name))


def resize_by_pillow(_self: object, image: Any, size: Any, resample: int, **_options: object) -> Any:
    import torch

    edges = int(size.width), int(size.height)
    levels = image.permute(0, 2, 3, 1).contiguous().numpy()
    resized = [np.asarray(Image.fromarray(pixels).resize(edges, int(resample))) for pixels in levels]
    return torch.from_numpy(np.stack(resized)).permute(0, 3, 1, 2)


def with_arrays(processor: type) -> type:
    """Rescales and normalises as the processors over Pillow do."""
    import torch
    from transformers.image_transforms import normalize, rescale

    def steps(_self: object, images: Any, _rescale: bool, factor: float, _normalize: bool, mean: Any, std: Any) -> Any:
        scaled = [rescale(image, factor, dtype=np.float32) for image in images.numpy()]
        normal = [normalize(image, mean, std, input_data_format="channels_first") for image in scaled]
        return torch.from_numpy(np.stack(normal))

    return type(processor.__name__, (processor,), {"rescale_and_normalize": steps})


def tile_of_patches(values: np.ndarray, shape: np.ndarray) -> np.ndarray:
    """Of `[patches, side * side * 3]`, behind which is what fills a batch up."""
    (rows, columns), side = shape.tolist(), math.isqrt(values.shape[1] // 3)
    patches = values[: rows * columns].reshape(rows, columns, side, side, 3)
    return np.ascontiguousarray(patches.transpose(4, 0, 2, 1, 3).reshape(3, rows * side, columns * side))


def tiles(output: dict) -> list[np.ndarray]:
    """Without what fills a batch up. Qwen2-VL: one array of patches."""
    values = output["pixel_values"]
    if "spatial_shapes" in output:
        return [tile_of_patches(*each) for each in zip(values, output["spatial_shapes"], strict=True)]
    masks = output.get("pixel_attention_mask")
    if masks is not None:
        kept = [(mask[:, 0].sum(), mask[0].sum()) for mask in masks[0]]
        return [value[:, :height, :width] for value, (height, width) in zip(values[0], kept, strict=True)]
    if "num_tiles" in output:
        return list(values[0, 0, : output["num_tiles"][0][0]])
    return [values] if "image_grid_thw" in output else list(values[0] if values[0].ndim == 4 else values)


def processed(config: dict) -> list[str]:
    """A digest for each of SIZES, or "refused"."""
    arguments = {key: value for key, value in config.items() if key != "image_processor_type"}
    processor = processor_class(config["image_processor_type"])(**arguments)
    # bfloat16, in which Llama 4's are, is unknown to numpy.
    kind = "pt" if config["image_processor_type"].startswith("Llama4") else "np"
    results = []
    for seed, (width, height) in enumerate(SIZES):
        try:
            made = tiles(processor(images=[image(seed, width, height)], return_tensors=kind))
            results.append(digest(*(np.ascontiguousarray(tile.float() if kind == "pt" else tile, np.float32) for tile in made)))
        except (ValueError, ZeroDivisionError) as error:
            print(config["image_processor_type"], width, height, error, file=sys.stderr)
            results.append("refused")
    return results


def processors() -> str:
    cases = [{"config": config, "digests": processed(config)} for config in CONFIGS]
    lines = ",\n".join(json.dumps(case) for case in cases)
    return f"[\n{lines}\n]\n"


PHI3_CASES = [(96, 64, 16), (45, 80, 16), (333, 251, 4), (640, 90, 16)]
PHI3_POINTS = [(0, 0, 0), (1, 3, 335), (0, 100, 37), (1, 167, 168), (2, 200, 301), (1, 60, 9)]
CLIP_MEAN = np.array([0.48145466, 0.4578275, 0.40821073], np.float32)
CLIP_STD = np.array([0.26862954, 0.26130258, 0.27577711], np.float32)


def bicubic(values: np.ndarray) -> np.ndarray:
    """`[1, 3, height, width]` to 336 x 336, by ONNX Runtime with what makes its cubic PyTorch's."""
    import onnxruntime
    from onnx import TensorProto, helper

    options = {"mode": "cubic", "coordinate_transformation_mode": "half_pixel", "cubic_coeff_a": -0.75, "exclude_outside": 0}
    node = helper.make_node("Resize", ["x", "", "", "sizes"], ["y"], **options)
    inputs = [helper.make_tensor_value_info("x", TensorProto.FLOAT, values.shape)]
    outputs = [helper.make_tensor_value_info("y", TensorProto.FLOAT, [1, 3, 336, 336])]
    sizes = [helper.make_tensor("sizes", TensorProto.INT64, [4], [1, 3, 336, 336])]
    graph = helper.make_graph([node], "bicubic", inputs, outputs, sizes)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=9)
    return onnxruntime.InferenceSession(model.SerializeToString()).run(None, {"x": values})[0]


def phi3_case(seed: int, width: int, height: int, num_crops: int) -> dict:
    """The HD transform of Phi-3-vision, which Transformers does not have: InternLM-XComposer2-4KHD, arXiv 2404.06512."""
    source = image(seed, width, height)
    if width < height:
        source = source.transpose(Image.Transpose.TRANSPOSE)
    ratio = source.width / source.height
    columns = max(scale for scale in range(1, num_crops + 1) if scale * math.ceil(scale / ratio) <= num_crops)
    fitted = source.resize((columns * 336, int(columns * 336 / ratio)), Image.Resampling.BILINEAR)
    rows = math.ceil(fitted.height / 336)
    padded = Image.new("RGB", (fitted.width, rows * 336), (255, 255, 255))
    padded.paste(fitted, (0, (rows * 336 - fitted.height) // 2))
    if width < height:
        padded = padded.transpose(Image.Transpose.TRANSPOSE)
        rows, columns = columns, rows
    scaled = np.asarray(padded).astype(np.float32) / np.float32(255)
    values = np.ascontiguousarray(((scaled - CLIP_MEAN) / CLIP_STD).transpose(2, 0, 1)[None])
    whole = bicubic(values)[0]
    cut = values.reshape(3, rows, 336, columns, 336).transpose(1, 3, 0, 2, 4)
    return {
        "image": [seed, width, height],
        "num_crops": num_crops,
        "grid": [rows, columns],
        "tiles": digest(np.ascontiguousarray(cut)),
        "whole": [[*point, round(float(whole[point]), 6)] for point in PHI3_POINTS],
    }


def phi3() -> str:
    lines = ",\n".join(json.dumps(phi3_case(seed, *case)) for seed, case in enumerate(PHI3_CASES))
    return f"[\n{lines}\n]\n"


def photo() -> Image.Image:
    """Smooth, with a little noise."""
    smooth = image(0, 4, 3).resize((37, 29), Image.Resampling.BICUBIC)
    grain = np.asarray(image(4, 37, 29)).astype(int) // 16
    return Image.fromarray((np.asarray(smooth) + grain - 8).clip(0, 255).astype(np.uint8))


def chunk(kind: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))


def png(pixels: np.ndarray, depth: int, color: int, extra: bytes = b"") -> bytes:
    """Of kinds that Pillow does not write. `pixels`: bytes, a row of the file each; `extra`: a chunk."""
    header = struct.pack(">IIBBBBB", 37, 29, depth, color, 0, 0, 0)
    rows = b"".join(b"\0" + row.tobytes() for row in pixels)
    parts = [chunk(b"IHDR", header), extra, chunk(b"IDAT", zlib.compress(rows)), chunk(b"IEND", b"")]
    return b"\x89PNG\r\n\x1a\n" + b"".join(parts)


def bombs(folder: Path) -> None:
    """Small files of 37 x 29 pixels with 64 MiB packed inside."""
    packed = zlib.compress(bytes(64 << 20), 9)
    pixels = np.zeros((29, 37), np.uint8)
    xmp = b"XML:com.adobe.xmp"
    extras = {
        "ztxt": chunk(b"zTXt", b"Comment\0\0" + packed),
        "itxt": chunk(b"iTXt", xmp + b"\0\1\0\0\0" + packed),
        "iccp": chunk(b"iCCP", b"icc\0\0" + packed),
        "idat": chunk(b"IDAT", packed),
    }
    for name, extra in extras.items():
        (folder / f"bomb-{name}.png").write_bytes(png(pixels, 8, 0, extra))


def save(folder: Path, name: str, source: Image.Image, **options: object) -> None:
    source.save(folder / name, **options)


def still_files(folder: Path) -> None:
    source = photo()
    alpha = source.convert("RGBA")
    alpha.putalpha(image(2, 37, 29).convert("L"))
    for mode in ("1", "L", "P", "RGB"):
        save(folder, f"{mode.lower()}.png", source.convert(mode))
        save(folder, f"{mode.lower()}.bmp", source.convert(mode))
    save(folder, "rgba.png", alpha)
    save(folder, "rgba.bmp", alpha)
    save(folder, "la.png", alpha.convert("LA"))
    save(folder, "p-transparent.png", source.convert("P"), transparency=3)
    save(folder, "p4.png", source.quantize(14), bits=4)
    for name, color, channels in (("grey", 0, 1), ("rgb", 2, 3), ("grey-alpha", 4, 2), ("rgba", 6, 4)):
        values = (noise(np.arange(29 * 37 * channels), color) >> 16).astype(">u2").reshape(29, -1)
        values[::2] //= 200
        (folder / f"{name}16.png").write_bytes(png(values, 16, color))
        if name == "grey":
            (folder / "grey16-transparent.png").write_bytes(png(values, 16, color, chunk(b"tRNS", values[0, :1].tobytes())))
    for name, subsampling in (("444", 0), ("422", 1), ("420", 2)):
        save(folder, f"{name}.jpg", source, quality=85, subsampling=subsampling)
        save(folder, f"{name}-progressive.jpg", source, quality=85, subsampling=subsampling, progressive=True)
    save(folder, "grey.jpg", source.convert("L"), quality=85)
    save(folder, "cmyk.jpg", source.convert("CMYK"), quality=85)
    content = (folder / "cmyk.jpg").read_bytes()
    adobe = content.index(b"Adobe")
    (folder / "cmyk-plain.jpg").write_bytes(content[: adobe - 4] + content[adobe + 12 :])
    (folder / "ycck.jpg").write_bytes(content[: adobe + 11] + b"\2" + content[adobe + 12 :])
    for name, kind in (("lossy", source), ("lossy-alpha", alpha)):
        save(folder, f"{name}.webp", kind, quality=80)
        save(folder, f"{name.replace('lossy', 'lossless')}.webp", kind, lossless=True)


def animated_files(folder: Path) -> None:
    """Of which the first frame counts, on its canvas."""
    source = photo()
    moving = {"save_all": True, "append_images": [image(0, 37, 29)]}
    save(folder, "animated.gif", source.quantize(20), **moving)
    save(folder, "animated.webp", source, lossless=True, **moving)
    save(folder, "interlaced.gif", source.quantize(20), interlace=1)
    for name, transparency in (("small-frame", {}), ("small-frame-transparent", {"transparency": 3})):
        save(folder, f"{name}.gif", source.crop((0, 0, 20, 11)).quantize(20), **transparency)
        content = bytearray((folder / f"{name}.gif").read_bytes())
        content[6:10] = struct.pack("<HH", 37, 29)
        frame = content.index(b"\x2c\0\0\0\0" + struct.pack("<HH", 20, 11))
        content[frame + 1 : frame + 5] = struct.pack("<HH", 5, 7)
        (folder / f"{name}.gif").write_bytes(content)


def turned_files(folder: Path) -> None:
    source = photo().quantize(8).convert("RGB")
    for orientation in range(1, 9):
        exif = Image.Exif()
        exif[ExifTags.Base.Orientation] = orientation
        save(folder, f"exif{orientation}.jpg", source, exif=exif)
    packet = '<x:xmpmeta xmlns:x="adobe:ns:meta/"><rdf:Description tiff:Orientation="6"/></x:xmpmeta>'
    info = PngImagePlugin.PngInfo()
    info.add_itxt("XML:com.adobe.xmp", packet)
    exif[ExifTags.Base.Orientation] = 6
    save(folder, "exif6.png", source, exif=exif)
    save(folder, "exif6.webp", source, exif=exif, lossless=True)
    save(folder, "xmp6.png", source, pnginfo=info)
    save(folder, "xmp6.jpg", source, xmp=packet.encode())
    save(folder, "xmp6.webp", source, xmp=packet.encode(), lossless=True)


def write_files(folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    still_files(folder)
    animated_files(folder)
    turned_files(folder)
    bombs(folder)
    digests = {}
    for path in sorted(folder.glob("*.*")):
        if path.suffix != ".json" and not path.name.startswith("bomb"):
            pixels = np.asarray(ImageOps.exif_transpose(Image.open(path)).convert("RGB"))
            digests[path.name] = f"{pixels.shape[1]}x{pixels.shape[0]} {digest(pixels)}"
    (folder / "digests.json").write_text(json.dumps(digests, indent=1) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true")
    parser.add_argument("--files", type=Path, metavar="FOLDER")
    arguments = parser.parse_args()
    if arguments.files:
        write_files(arguments.files)
        return
    differing = []
    for name, text in {"resized.txt": resized(), "processors.json": processors(), "phi3.json": phi3()}.items():
        if not arguments.check:
            (DATA / name).write_text(text)
        elif (DATA / name).read_text() != text:
            differing.append(name)
    if differing:
        sys.exit(f"{', '.join(differing)} would change")


if __name__ == "__main__":
    main()
