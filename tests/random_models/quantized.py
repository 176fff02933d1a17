"""Quantized checkpoints of every layout, against Transformers with the same values as floats."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy
import torch
from common import (
    EXACT,
    TEXT,
    Case,
    Comparison,
    Config,
    answer_of_prompt,
    compare_answers,
    copy_tokenizer,
    draw_model,
    draw_token_ids,
    load_engine,
    load_reference,
    read_json,
    write_json,
)
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM

from mistral_paged import Which

Tensors = dict[str, torch.Tensor]

BASES = {"llama", "mistral", "phi3", "qwen2", "qwen3"}
WITH_HEAD_WIDTH = {"llama", "mistral", "qwen3"}
HEADS = [(4, 2), (4, 4), (2, 1), (8, 2)]
GROUP_SIZES = (32, 64, 128)
PROMPT_LENGTH = 40
LEAST_SCALE = 1e-4

FLOAT8 = torch.float8_e4m3fn
LARGEST_FLOAT8 = 448
BLOCK = 128
"""Rows and columns that have one scale."""


def draw_config(case: Case) -> Config:
    """A small model of one of the families that such checkpoints are made of."""
    rng = case.random
    base = rng.choice(sorted(BASES))
    config = read_json(TEXT / base / "config.json")
    heads, kv_heads = rng.choice(HEADS)
    config |= {"hidden_size": rng.choice([64, 128, 192, 256]), "intermediate_size": rng.choice([128, 192, 256, 320, 384])}
    config |= {"num_attention_heads": heads, "num_key_value_heads": kv_heads, "num_hidden_layers": rng.randint(1, 2)}
    config.pop("head_dim", None)
    if base in WITH_HEAD_WIDTH:
        config["head_dim"] = rng.choice([16, 32, 64])
    if config.get("layer_types"):
        config["layer_types"] = ["full_attention"] * config["num_hidden_layers"]
    return config


def packed(values: torch.Tensor, bits: int) -> torch.Tensor:
    """Rows of small numbers as rows of int32, the lowest bits first, some of them over the border of two words."""
    numbers = values.numpy().astype(numpy.uint64)
    digits = (numbers[:, :, None] >> numpy.arange(bits, dtype=numpy.uint64)) & 1
    octets = numpy.packbits(digits.astype(numpy.uint8).reshape(len(numbers), -1), axis=1, bitorder="little")
    return torch.from_numpy(octets.view(numpy.int32).copy())


class Groups:
    """A weight as small numbers with a scale and a zero for each group of its columns."""

    def __init__(self, weight: torch.Tensor, size: int | None, bits: int, symmetric: bool, order: torch.Tensor | None = None):
        columns = weight.shape[1]
        self.group_of = torch.arange(columns) // (size or columns)
        if order is not None:
            self.group_of = self.group_of[order]
        self.most = 2**bits - 1
        scales, zeros = zip(
            *(self.range_of(weight[:, self.group_of == group], symmetric) for group in self.all_groups()), strict=True
        )
        self.scales, self.zeros = torch.stack(scales, 1).half().float(), torch.stack(zeros, 1)
        self.numbers = (weight / self.scales[:, self.group_of] + self.zeros[:, self.group_of]).round().clamp(0, self.most).long()

    def all_groups(self) -> list[int]:
        return self.group_of.unique().tolist()

    def range_of(self, part: torch.Tensor, symmetric: bool) -> tuple[torch.Tensor, torch.Tensor]:
        """The scale and the zero of the rows of one group."""
        if symmetric:
            half = (self.most + 1) // 2
            scale = (part.abs().amax(1) / max(half - 1, 1)).clamp_min(LEAST_SCALE)
            return scale, torch.full(scale.shape, half, dtype=torch.int64)
        low, high = part.amin(1).clamp_max(0), part.amax(1).clamp_min(0)
        scale = ((high - low) / self.most).clamp_min(LEAST_SCALE)
        return scale, (-low / scale).round().clamp(0, self.most).long()

    def values(self) -> torch.Tensor:
        """What the numbers stand for."""
        return (self.numbers - self.zeros[:, self.group_of]).float() * self.scales[:, self.group_of]


class Layout:
    """How one checkpoint is quantized; `quantize` gives the tensors of a weight by the ends of their names, and its values."""

    def __init__(self, case: Case, group_sizes: list[int]):
        self.case, self.rng = case, case.random
        self.group_size: int | None = self.rng.choice(group_sizes)
        self.symmetric = self.rng.random() < 0.5

    def describe(self) -> Config:
        """The keys of config.json that say so."""
        raise NotImplementedError

    def quantize(self, weight: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
        raise NotImplementedError

    def order(self, weight: torch.Tensor, wanted: bool) -> torch.Tensor | None:
        """Columns in another order, if that is wanted."""
        return torch.randperm(weight.shape[1], generator=self.case.generator) if wanted else None


class Gptq(Layout):
    """GPTQ of both versions, with columns in order or not."""

    def __init__(self, case: Case, group_sizes: list[int]):
        super().__init__(case, group_sizes)
        self.bits = self.rng.choice([2, 4, 4, 8])
        self.ordered = self.rng.random() < 0.4
        self.group_size = self.rng.choice([self.group_size, self.group_size, None])
        self.version = self.rng.choice(["gptq_v2", "gptq", None])

    def describe(self) -> Config:
        config = {"quant_method": "gptq", "bits": self.bits, "group_size": self.group_size or -1}
        config |= {"sym": self.symmetric, "desc_act": self.ordered}
        return {"quantization_config": config | ({"checkpoint_format": self.version} if self.version else {})}

    def quantize(self, weight: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
        groups = Groups(weight, self.group_size, self.bits, self.symmetric, self.order(weight, self.ordered))
        stored = groups.zeros
        if self.version != "gptq_v2":
            # The first version keeps one less than the zero, which has no room for a zero of 0.
            groups.zeros = groups.zeros.clamp_min(1)
            stored = groups.zeros - 1
        tensors = {
            "qweight": packed(groups.numbers, self.bits).T.contiguous(),
            "qzeros": packed(stored.T.contiguous(), self.bits),
            "scales": groups.scales.T.half().contiguous(),
        }
        if self.ordered or self.rng.random() < 0.7:
            tensors["g_idx"] = groups.group_of.int()
        return tensors, groups.values()


class Awq(Layout):
    """AWQ as its "gemm" kernels read it: eight outputs in a word, interleaved."""

    PLACES = (0, 2, 4, 6, 1, 3, 5, 7)

    def describe(self) -> Config:
        config = {"quant_method": "awq", "bits": 4, "group_size": self.group_size, "zero_point": True, "version": "gemm"}
        return {"quantization_config": config}

    def quantize(self, weight: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
        groups = Groups(weight, self.group_size, 4, symmetric=False)
        tensors = {"qweight": self.interleaved(groups.numbers), "qzeros": self.interleaved(groups.zeros)}
        return tensors | {"scales": groups.scales.T.half().contiguous()}, groups.values()

    def interleaved(self, numbers: torch.Tensor) -> torch.Tensor:
        rows = numbers.T.reshape(numbers.shape[1], -1, 8)[:, :, self.PLACES]
        return packed(rows.reshape(len(rows), -1), 4)


def compressed_tensors(form: str, weights: Config, inputs: Config | None = None) -> Config:
    """What compressed-tensors says of all linear layers but the head."""
    group = {
        "targets": ["Linear"],
        "weights": weights | {"dynamic": False},
        "input_activations": inputs,
        "output_activations": None,
    }
    config = {"quant_method": "compressed-tensors", "format": form, "quantization_status": "compressed"}
    return {"quantization_config": config | {"ignore": ["lm_head"], "config_groups": {"group_0": group}}}


def inputs_of(kind: str) -> Config:
    return {"num_bits": 8, "type": kind, "symmetric": True, "strategy": "token", "dynamic": True}


class PackQuantized(Layout):
    """compressed-tensors with 4 or 8 bits in int32, by groups or whole rows."""

    def __init__(self, case: Case, group_sizes: list[int]):
        super().__init__(case, group_sizes)
        self.bits = self.rng.choice([4, 4, 8])
        self.group_size = self.rng.choice([self.group_size, self.group_size, None])
        self.ordered = self.group_size is not None and self.rng.random() < 0.33
        self.scale_type = self.rng.choice([torch.bfloat16, torch.float16])

    def describe(self) -> Config:
        weights = {"num_bits": self.bits, "type": "int", "symmetric": self.symmetric, "observer": "minmax"}
        weights |= {"strategy": "group" if self.group_size else "channel", "group_size": self.group_size}
        return compressed_tensors("pack-quantized", weights | {"actorder": "group" if self.ordered else None})

    def quantize(self, weight: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
        groups = Groups(weight, self.group_size, self.bits, self.symmetric, self.order(weight, self.ordered))
        scales = groups.scales.to(self.scale_type)
        groups.scales = scales.float()
        tensors = {"weight_packed": packed(groups.numbers, self.bits), "weight_scale": scales}
        tensors["weight_shape"] = torch.tensor(weight.shape)
        if self.ordered:
            tensors["weight_g_idx"] = groups.group_of.int()
        if not self.symmetric:
            tensors["weight_zero_point"] = packed(groups.zeros.T.contiguous(), self.bits).T.contiguous()
        return tensors, groups.values()


class IntQuantized(Layout):
    """compressed-tensors with int8 and a scale for each row."""

    def describe(self) -> Config:
        weights = {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "channel", "group_size": None}
        return compressed_tensors("int-quantized", weights, inputs_of("int"))

    def quantize(self, weight: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
        groups = Groups(weight, None, 8, symmetric=True)
        return {"weight": (groups.numbers - groups.zeros).to(torch.int8), "weight_scale": groups.scales}, groups.values()


class Float8(Layout):
    """Weights in float8 with a scale for each row or for all, as compressed-tensors has them."""

    strategy = "channel"

    def describe(self) -> Config:
        weights = {"num_bits": 8, "type": "float", "symmetric": True, "strategy": self.strategy}
        return compressed_tensors("float-quantized", weights, inputs_of("float"))

    def scales(self, weight: torch.Tensor) -> torch.Tensor:
        return weight.abs().amax(1, keepdim=True) / LARGEST_FLOAT8

    def quantize(self, weight: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
        scales = self.scales(weight)
        numbers = (weight / scales).to(FLOAT8)
        return {"weight": numbers, "weight_scale": scales}, numbers.float() * scales


class Float8Tensor(Float8):
    """One scale for all."""

    strategy = "tensor"

    def scales(self, weight: torch.Tensor) -> torch.Tensor:
        return (weight.abs().max() / LARGEST_FLOAT8).reshape(1)


class Float8Block(Layout):
    """Weights in float8 with a scale for each square block, as DeepSeek has them."""

    def describe(self) -> Config:
        config = {"quant_method": "fp8", "activation_scheme": "dynamic", "fmt": "e4m3"}
        return {"quantization_config": config | {"weight_block_size": [BLOCK, BLOCK]}}

    def quantize(self, weight: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
        blocks = [[block.abs().max() / LARGEST_FLOAT8 for block in rows.split(BLOCK, 1)] for rows in weight.split(BLOCK, 0)]
        scales = torch.tensor(blocks)
        spread = scales.repeat_interleave(BLOCK, 0).repeat_interleave(BLOCK, 1)[: weight.shape[0], : weight.shape[1]]
        numbers = (weight / spread).to(FLOAT8)
        return {"weight": numbers, "weight_scale_inv": scales}, numbers.float() * spread


class Mlx(Layout):
    """MLX's: a scale and a bias for each group, of any number of bits."""

    def __init__(self, case: Case, group_sizes: list[int]):
        super().__init__(case, group_sizes)
        self.bits = self.rng.choice([2, 3, 4, 4, 5, 6, 8])

    def describe(self) -> Config:
        config: Config = {"group_size": self.group_size, "bits": self.bits}
        if self.rng.random() < 0.5:
            config["mode"] = "affine"
        return {"quantization": config} | ({"quantization_config": config} if self.rng.random() < 0.5 else {})

    def quantize(self, weight: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
        groups = weight.reshape(len(weight), -1, self.group_size)
        low, high = groups.amin(2), groups.amax(2)
        most = 2**self.bits - 1
        scales, biases = ((high - low) / most).clamp_min(LEAST_SCALE).half(), low.half()
        scale, bias = scales.float()[..., None], biases.float()[..., None]
        numbers = ((groups - bias) / scale).round().clamp(0, most).long()
        words = packed(numbers.reshape(weight.shape), self.bits).view(torch.uint32)
        return {"weight": words, "scales": scales, "biases": biases}, (numbers.float() * scale + bias).reshape(weight.shape)


LAYOUTS: dict[str, Callable[[Case, list[int]], Layout]] = {
    "awq": Awq,
    "fp8-block": Float8Block,
    "fp8-channel": Float8,
    "fp8-tensor": Float8Tensor,
    "gptq": Gptq,
    "int-quantized": IntQuantized,
    "mlx": Mlx,
    "pack-quantized": PackQuantized,
}


def families() -> list[str]:
    return sorted(LAYOUTS)


def is_quantized(name: str) -> bool:
    return name.endswith("_proj.weight")


def save_quantized(case: Case, model: Any, floats: Path) -> None:
    """Writes the model quantized, and what its numbers stand for as floats."""
    weights = model.state_dict()
    if model.config.tie_word_embeddings:
        weights.pop("lm_head.weight")
    widths = [weight.shape[1] for name, weight in weights.items() if is_quantized(name)]
    sizes = [size for size in GROUP_SIZES if all(width % size == 0 for width in widths)]
    layout = LAYOUTS[case.family](case, sizes)
    stored: Tensors = {}
    for name, weight in weights.items():
        if is_quantized(name):
            tensors, values = layout.quantize(weight)
            stored |= {name.removesuffix("weight") + end: tensor for end, tensor in tensors.items()}
            weight.copy_(values)
        else:
            stored[name] = weight.to(torch.bfloat16)
    save_file(stored, case.folder / "model.safetensors", metadata={"format": "mlx" if case.family == "mlx" else "pt"})
    model.save_pretrained(floats)
    case.configuration |= layout.describe()
    write_json(case.folder / "config.json", case.configuration)


def compare(case: Case) -> Comparison:
    """One quantized checkpoint against the same values as floats."""
    model = draw_model(case, lambda: draw_config(case), AutoModelForCausalLM)
    floats = case.folder / "floats"
    save_quantized(case, model.float(), floats)
    copy_tokenizer(TEXT / case.configuration["model_type"], case.folder)
    runner = load_engine(case, Which.Plain(str(case.folder), dtype=EXACT))
    prompt = draw_token_ids(case.random, PROMPT_LENGTH)
    return compare_answers(load_reference(floats, AutoModelForCausalLM), [answer_of_prompt(runner, prompt)])
