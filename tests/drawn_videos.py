"""Makes goldens of videos, for the tiny models of tests/data/golden/vision that take them.

    python tests/drawn_videos.py    packs tests/data/golden/videos.tar.xz, by Transformers

Frames are drawn from their names, as weights are (rust/engine/tests/common/drawn.rs). Needs torch, torchvision and Transformers.
"""

from __future__ import annotations

import json
import shutil
import tempfile
from itertools import groupby
from pathlib import Path
from typing import Any

import numpy as np
from drawn import answer, drawn, write_archive
from drawn_sounds import write_weights
from goldens import GOLDEN, unpack

MODELS = ("qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_5_vision")
LENT = ("tokenizer.json", "tokenizer_config.json", "image0.png")
"""What a golden without weights has from `qwen3_vl`."""
TEMPLATE = """\
{% for m in messages %}<|im_start|>{{ m['role'] }}
{% for c in m['content'] %}{% if c['type'] == 'image' %}<|vision_start|><|image_pad|><|vision_end|>\
{% elif c['type'] == 'video' %}<|vision_start|><|video_pad|><|vision_end|>\
{% else %}{{ c['text'] }}{% endif %}{% endfor %}<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""


def say(text: str) -> dict[str, str]:
    return {"type": "text", "text": text}


CASES: list[tuple[list[list[dict[str, str]]], list[tuple[str, int, float]]]] = [
    # Names, frames, and how many of these there are a second.
    ([[{"type": "video"}, say("what is shown?")]], [("first", 5, 2.0)]),
    (
        [
            [say("look at "), {"type": "video"}, say(" and the image "), {"type": "image"}],
            [{"type": "video"}, say("what is the difference?")],
        ],
        [("second", 4, 3.0), ("third", 8, 24.0)],
    ),
]


def frames(name: str, count: int, size: tuple[int, int]) -> np.ndarray:
    """`[count, height, width, 3]` of a video."""
    shape = (count, *size, 3)
    return np.floor((drawn(f"video {name}", int(np.prod(shape))) + np.float32(0.5)) * 256).astype(np.uint8).reshape(shape)


def positions(kinds: list[int], grids: dict[int, list[list[int]]], intervals: list[float], merge: int) -> Any:
    """`[3, 1, tokens]` as the models were trained (Transformers up to 4.57, vLLM).

    What comes behind a video goes on behind its largest coordinate, time among them, which Transformers 5.24 leaves out.
    """
    import torch

    grids, intervals, found, at = {kind: list(of) for kind, of in grids.items()}, list(intervals), [], 0
    for kind, group in groupby(kinds):
        count = len(list(group))
        if kind == 0:
            found += [[at + i] * 3 for i in range(count)]
            at += count
            continue
        time, height, width = grids[kind].pop(0)
        interval = np.float32(intervals.pop(0) if kind == 2 else 1)
        rows, columns = height // merge, width // merge
        own = [
            [at + int(np.float32(t) * interval), at + y, at + x] for t in range(time) for y in range(rows) for x in range(columns)
        ]
        assert len(own) == count
        found += own
        at = 1 + max(max(place) for place in own)
    return torch.tensor(found).T[:, None]


class Videos:
    """A model, and what becomes of its videos."""

    def __init__(self, name: str, folder: Path) -> None:
        import torch
        import transformers

        self.config = json.loads((folder / "config.json").read_text())
        self.is_written = name.startswith("qwen3")
        kind = transformers.Qwen3VLVideoProcessor if self.is_written else transformers.Qwen2VLVideoProcessor
        images = json.loads((folder / "preprocessor_config.json").read_text())
        self.merge, self.patch = images["merge_size"], images["patch_size"]
        # A size that is not resized: torchvision's levels may differ from Pillow's by one.
        self.size = (2 * self.merge * self.patch, 3 * self.merge * self.patch)
        bounds = {"shortest_edge": 1024, "longest_edge": 16 * self.size[0] * self.size[1]}
        keys = ("image_mean", "image_std", "merge_size", "patch_size", "resample", "rescale_factor", "temporal_patch_size")
        self.file = {"video_processor_type": kind.__name__, "size": bounds, **{key: images[key] for key in keys if key in images}}
        self.processor = kind(**self.file, do_sample_frames=False)
        self.images = transformers.AutoImageProcessor.from_pretrained(folder, backend="pil")
        self.image_file = folder / "image0.png"
        self.tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
        self.model = transformers.AutoModelForImageTextToText.from_pretrained(
            folder, dtype=torch.float32, attn_implementation="eager"
        ).eval()

    def replaced(self, grid: list[int], count: int, fps: float) -> str:
        """What stands for a video in a prompt, between the two tokens about it."""
        rows = "<|video_pad|>" * (grid[1] * grid[2] // self.merge**2)
        if not self.is_written:
            return rows * grid[0]
        at = [min(frame, count - 1) / fps for frame in range(2 * grid[0])]
        middle = [(at[2 * group] + at[2 * group + 1]) / 2 for group in range(grid[0])]
        return "".join(f"<{seconds:.1f} seconds><|vision_start|>{rows}<|vision_end|>" for seconds in middle)

    def case(self, contents: list[list[dict[str, str]]], videos: list[tuple[str, int, float]]) -> dict[str, Any]:
        """A prompt with its videos, and its greedy continuation."""
        import torch
        from PIL import Image

        messages = [{"role": "user", "content": content} for content in contents]
        text = self.tokenizer.apply_chat_template(messages, chat_template=TEMPLATE, tokenize=False, add_generation_prompt=True)
        given = [frames(name, count, self.size) for name, count, _ in videos]
        seen = [self.processor(videos=[video], return_tensors="pt") for video in given]
        inputs: dict[str, Any] = {key: torch.cat([one[key] for one in seen]) for key in ("pixel_values_videos", "video_grid_thw")}
        grids = {1: [], 2: inputs["video_grid_thw"].tolist()}
        for grid, (_, count, fps) in zip(grids[2], videos, strict=True):
            # As Transformers up to 4.57 and vLLM; 5.24 leaves the two tokens about the whole where they are.
            written = "<|vision_start|><|video_pad|><|vision_end|>" if self.is_written else "<|video_pad|>"
            text = text.replace(written, self.replaced(grid, count, fps).replace("pad", "pad "), 1)
        text = text.replace("pad |>", "pad|>")
        if "<|image_pad|>" in text:
            image = self.images(images=[Image.open(self.image_file)], return_tensors="pt")
            grids[1] = image["image_grid_thw"].tolist()
            text = text.replace("<|image_pad|>", "<|image_pad|>" * (grids[1][0][1] * grids[1][0][2] // self.merge**2))
            inputs |= dict(image)
        ids = self.tokenizer(text, add_special_tokens=False)["input_ids"]
        rate = self.config["vision_config"].get("tokens_per_second")
        intervals = [1.0 if rate is None else rate * (2 / fps) for _, _, fps in videos]
        kinds = {self.config["image_token_id"]: 1, self.config["video_token_id"]: 2}

        def logits_of(ids: list[int]) -> Any:
            of_tokens = [kinds.get(token, 0) for token in ids]
            told: dict[str, Any] = {"mm_token_type_ids": torch.tensor([of_tokens])}
            if not self.is_written:
                told["position_ids"] = positions(of_tokens, grids, intervals, self.merge)
            with torch.no_grad():
                return self.model(input_ids=torch.tensor([ids]), **inputs, **told, use_cache=False).logits[0]

        return {
            "videos": [{"name": name, "frames": count, "fps": fps} for name, count, fps in videos],
            "size": self.size,
            "messages": messages,
            **answer(logits_of, ids),
        }


def make(name: str) -> dict[str, str]:
    """The files of a golden, after the model has answered."""
    golden = GOLDEN / "vision" / name
    with tempfile.TemporaryDirectory() as folder:
        for file in golden.iterdir():
            shutil.copy(file, folder)
        for file in LENT:
            if not (golden / file).exists():
                shutil.copy(GOLDEN / "vision" / "qwen3_vl" / file, folder)
        if (golden / "tensors.json").exists():
            write_weights(json.loads((golden / "tensors.json").read_text()), Path(folder) / "model.safetensors")
        videos = Videos(name, Path(folder))
        answers = {"cases": [videos.case(*case) for case in CASES]}
    files = {"video_preprocessor_config.json": videos.file, "golden.json": answers}
    texts = {file: json.dumps(value, separators=(",", ":")) for file, value in files.items()}
    return {f"videos/{name}/{file}": text for file, text in texts.items()} | {"videos/chat_template.jinja": TEMPLATE}


def main() -> None:
    unpack()
    write_archive("videos", {path: text.encode() for name in MODELS for path, text in make(name).items()})


if __name__ == "__main__":
    main()
