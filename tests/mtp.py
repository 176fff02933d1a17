"""A checkpoint with a head that predicts further tokens: a golden whose last layer stands behind itself once more."""

from __future__ import annotations

import json
import math
import shutil
from pathlib import Path

from conftest import GOLDEN


def checkpoint(name: str, folder: Path) -> str:
    """Writes it to a folder, which must not be there, and gives its path. The tensors are bf16 and f32, as in the golden."""
    golden = GOLDEN / "text" / name
    shutil.copytree(golden, folder)
    config = json.loads((golden / "config.json").read_text())
    layers, hidden = config["num_hidden_layers"], config["hidden_size"]
    (folder / "config.json").write_text(json.dumps({**config, "num_nextn_predict_layers": 1}))
    parts = read(golden / "model.safetensors")
    last, head = f"model.layers.{layers - 1}.", f"model.layers.{layers}."
    parts |= {name.replace(last, head): part for name, part in parts.items() if name.startswith(last)}
    one = b"\x80\x3f"
    parts |= {f"{head}{norm}.weight": ("BF16", [hidden], one * hidden) for norm in ("enorm", "hnorm", "shared_head.norm")}
    # The embedding passes, and the hidden state does not.
    rows = [b"\0\0" * row + one + b"\0\0" * (2 * hidden - row - 1) for row in range(hidden)]
    parts[f"{head}eh_proj.weight"] = ("BF16", [hidden, 2 * hidden], b"".join(rows))
    save(parts, folder / "model.safetensors")
    return str(folder)


def read(path: Path) -> dict[str, tuple[str, list[int], bytes]]:
    """Type, shape and bytes of each tensor of a file of safetensors."""
    data = path.read_bytes()
    start = 8 + int.from_bytes(data[:8], "little")
    header = json.loads(data[8:start])
    header.pop("__metadata__", None)
    return {name: (of["dtype"], of["shape"], data[start:][slice(*of["data_offsets"])]) for name, of in header.items()}


def save(parts: dict[str, tuple[str, list[int], bytes]], path: Path) -> None:
    """Writes the same."""
    header, at = {}, 0
    for name, (dtype, shape, values) in parts.items():
        assert len(values) == math.prod(shape) * {"BF16": 2, "F32": 4}[dtype]
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [at, at + len(values)]}
        at += len(values)
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + b"".join(values for _, _, values in parts.values()))
