"""Makes goldens of language models whose weights lie nowhere: each is drawn from its name (rust/engine/tests/common/drawn.rs).

    python tests/drawn.py NAME CONFIG    makes tests/data/golden/drawn/NAME of a config.json, by Transformers
    python tests/drawn.py --pack         packs all of tests/data/golden/drawn into drawn.tar.xz

The first needs torch and Transformers.
"""

from __future__ import annotations

import argparse
import io
import json
import shutil
import sys
import tarfile
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from goldens import GOLDEN, unpack

DRAWN = GOLDEN / "drawn"
TOKENIZER = GOLDEN / "text" / "gemma3" / "tokenizer.json"
PROMPT_LENGTHS = (11, 60)
NUM_GREEDY = 8
DIGITS = 4
"""Behind the point: far below what is a disagreement."""
TOKEN_IDS = (10, 500)
"""Those that are no special tokens of the tiny models."""


def drawn(name: str, count: int) -> np.ndarray:
    """Numbers from -1/2 to 1/2 that a name decides: SplitMix64 from its FNV-1a hash on."""
    value = 0xCBF29CE484222325
    for byte in name.encode():
        value = (value ^ byte) * 0x100000001B3 % 2**64
    with np.errstate(over="ignore"):
        z = np.uint64(value) + np.arange(1, count + 1, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
        z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return ((z ^ (z >> np.uint64(31))) >> np.uint64(40)).astype(np.float32) / np.float32(2**24) - np.float32(0.5)


def drawn_weight(name: str, shape: list[int], part: str | None = None) -> np.ndarray:
    """A weight of a size that suits its part, cut off to bfloat16; `part` is what its name says, where it says it otherwise."""
    u = drawn(name, int(np.prod(shape, dtype=np.int64)))
    name = part or name
    if "scal" in name or ("norm" in name and name.endswith("weight")):
        values = np.float32(1) + np.float32(0.5) * u
    elif len(shape) < 2:
        values = np.float32(0.5) * u
    elif "embed" in name:
        values = np.float32(2) * u
    else:
        gain = 8 if "router" in name or name.endswith("gate.weight") else 4
        values = np.float32(gain) / np.sqrt(np.float32(shape[-1])) * u
    return (values.view(np.uint32) & np.uint32(0xFFFF0000)).view(np.float32).reshape(shape)


def write_weights(golden: Path, folder: Path, part: Callable[[str], str] = str) -> None:
    """The weights of a golden in float32; `part` makes of a name what it says of the weight."""
    header, parts, end = {}, [], 0
    for tensor, shape in json.loads((golden / "tensors.json").read_text()).items():
        begin, end = end, end + 4 * int(np.prod(shape, dtype=np.int64))
        header[tensor] = {"dtype": "F32", "shape": shape, "data_offsets": [begin, end]}
        parts.append(drawn_weight(tensor, shape, part(tensor)).tobytes())
    text = json.dumps(header).encode()
    (folder / "model.safetensors").write_bytes(len(text).to_bytes(8, "little") + text + b"".join(parts))


def write_model(name: str, folder: Path) -> None:
    """The files of a golden's model: its weights in float32, and the tokenizer of a tiny model with as many tokens."""
    golden = DRAWN / name
    write_weights(golden, folder)
    for file in (golden / "config.json", TOKENIZER):
        shutil.copy(file, folder)


def prompt(length: int) -> list[int]:
    low, high = TOKEN_IDS
    return [low + int((u + 0.5) * (high - low)) for u in drawn(f"prompt {length}", length).astype(float)]


def rounded(values: Any) -> list[float]:
    return [round(value, DIGITS) for value in values.tolist()]


def shapes_of(config: Any) -> dict[str, list[int]]:
    """The names and shapes of a checkpoint, as the hub has them."""
    from safetensors import safe_open
    from transformers import AutoModelForCausalLM

    with tempfile.TemporaryDirectory() as folder:
        AutoModelForCausalLM.from_config(config, attn_implementation="eager").save_pretrained(folder)
        with safe_open(f"{folder}/model.safetensors", "np") as tensors:
            return {name: list(tensors.get_slice(name).get_shape()) for name in sorted(tensors.keys())}


def case(model: Any, ids: list[int]) -> dict[str, Any]:
    """A prompt and its greedy continuation; the whole sequence is computed again at each step."""
    import torch

    def logits_of(ids: list[int]) -> Any:
        with torch.no_grad():
            return model(input_ids=torch.tensor([ids]), use_cache=False).logits[0].double()

    def margins(logits: Any) -> list[float]:
        best = logits.topk(2, -1).values
        return rounded(best[:, 0] - best[:, 1])

    sequence = list(ids)
    for _ in range(NUM_GREEDY):
        sequence.append(int(logits_of(sequence)[-1].argmax()))
    logits = logits_of(sequence)
    logprobs = logits.log_softmax(-1)
    told = torch.tensor([float(logprobs[place, token]) for place, token in enumerate(sequence[1:])])
    count = len(ids)
    return {
        "prompt_ids": ids,
        # Most of the archive is these, so only the longest prompt has them.
        "last_logits": rounded(logits[count - 1]) if count == max(PROMPT_LENGTHS) else [],
        "argmax": logits[:count].argmax(-1).tolist(),
        "argmax_margins": margins(logits[:count]),
        "prompt_logprobs": rounded(told[: count - 1]),
        "greedy_ids": sequence[count:],
        "greedy_logprobs": rounded(told[count - 1 :]),
        "greedy_margins": margins(logits[count - 1 : -1]),
    }


def loaded(model_class: Any, folder: Path) -> Any:
    """The model in a folder, in float32, whose weights are all read."""
    import torch

    model, info = model_class.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager", output_loading_info=True)
    if wrong := {key: found for key, found in info.items() if found}:
        sys.exit(f"not all weights are read: {wrong}")
    return model.eval()


def answer(logits_of: Callable[[list[int]], Any], ids: list[int], num_greedy: int = NUM_GREEDY) -> dict[str, Any]:
    """What a model says of a prompt, and its greedy continuation; the whole sequence is computed again at each step."""
    sequence = list(ids)
    for _ in range(num_greedy):
        sequence.append(int(logits_of(sequence)[-1].argmax()))
    logits = logits_of(ids)
    return {
        "input_ids": ids,
        "last_logits": rounded(logits[-1]),
        "argmax": logits.argmax(-1).tolist(),
        "greedy_ids": sequence[len(ids) :],
    }


def make(name: str, config_file: Path) -> None:
    """A golden folder, after the model with such weights has answered."""
    import torch
    from safetensors.numpy import save_file
    from transformers import AutoConfig, AutoModelForCausalLM, Mistral4Config, Mistral4ForCausalLM

    # Transformers has it for models that see alone.
    AutoModelForCausalLM.register(Mistral4Config, Mistral4ForCausalLM, exist_ok=True)
    torch.set_num_threads(1)
    config = json.loads(config_file.read_text())
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(config))
        shapes = shapes_of(AutoConfig.from_pretrained(folder))
        save_file(
            {name: drawn_weight(name, shape) for name, shape in shapes.items()}, f"{folder}/model.safetensors", {"format": "pt"}
        )
        model = loaded(AutoModelForCausalLM, Path(folder))
    answers = {"completions": [case(model, prompt(length)) for length in PROMPT_LENGTHS]}
    target = DRAWN / name
    target.mkdir(parents=True, exist_ok=True)
    for file, value in [("config.json", config), ("tensors.json", shapes), ("golden.json", answers)]:
        (target / file).write_text(json.dumps(value, separators=(",", ":")) + "\n")


def write_archive(name: str, files: dict[str, bytes]) -> None:
    """An archive of goldens by path; like files lie beside each other, so that they share what they have in common."""
    with tarfile.open(GOLDEN / f"{name}.tar.xz", "w:xz", preset=9, format=tarfile.USTAR_FORMAT) as archive:
        for path, data in sorted(files.items(), key=lambda item: item[0].rsplit("/", 1)[::-1]):
            entry = tarfile.TarInfo(path)
            entry.size, entry.mode = len(data), 0o644
            archive.addfile(entry, io.BytesIO(data))


def pack(folder: Path) -> None:
    """The archive of a folder, without weights."""
    files = [path for path in folder.rglob("*") if path.suffix in {".json", ".jinja"}]
    write_archive(folder.name, {str(path.relative_to(GOLDEN)): path.read_bytes() for path in files})


def main() -> None:
    parser = argparse.ArgumentParser(prog="drawn", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("name", nargs="?", help="of the golden")
    parser.add_argument("config", nargs="?", type=Path, help="a config.json with few layers and a vocabulary of 512")
    parser.add_argument("--pack", action="store_true", help="pack what was made")
    arguments = parser.parse_args()
    if (arguments.name is None) != (arguments.config is None) or (arguments.name is None and not arguments.pack):
        parser.error("NAME and CONFIG, or --pack")
    if arguments.name is not None:
        unpack()
        make(arguments.name, arguments.config)
    if arguments.pack:
        pack(DRAWN)


if __name__ == "__main__":
    main()
