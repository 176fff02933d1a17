"""Models of text: each family with other widths, layers, experts, windows and scaled positions, against Transformers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from random import Random
from typing import Any

from common import (
    EXACT,
    Answer,
    Case,
    Comparison,
    Config,
    answer_of_continuation,
    answer_of_prompt,
    compare_answers,
    copy_tokenizer,
    draw_model,
    draw_token_ids,
    drawn_families,
    folder_of,
    load_engine,
    load_reference,
    read_json,
    save_model,
    text_families,
)
from transformers import AutoModelForCausalLM, Mistral4Config, Mistral4ForCausalLM

from mistral_paged import CompletionRequest, Runner, Which

# Transformers has it for models that see alone.
AutoModelForCausalLM.register(Mistral4Config, Mistral4ForCausalLM, exist_ok=True)


def families() -> list[str]:
    return sorted(text_families() + drawn_families())


HEADS = [(4, 1), (6, 2), (8, 8), (3, 1), (5, 5), (8, 2), (12, 4), (2, 2), (7, 1)]
"""Heads of queries, and of keys and values."""
HEAD_WIDTHS = [8, 16, 24, 32, 40, 64, 80, 96, 128]
PARTLY_TURNED_HEAD_WIDTHS = [16, 32, 64, 80, 96, 128]
WIDEST = 512
EPSILONS = (1e-5, 1e-6, 1e-3)

CHOICES: dict[str, Sequence[Any]] = {
    "intermediate_size": (32, 64, 96, 128, 160),
    "kv_lora_rank": (16, 32, 64, 128),
    "q_lora_rank": (8, 24, 48, None),
    "v_head_dim": (8, 16, 24, 64, 128),
    "rms_norm_eps": EPSILONS,
    "layer_norm_eps": EPSILONS,
    "norm_epsilon": EPSILONS,
    "norm_eps": EPSILONS,
    "linear_key_head_dim": (8, 16, 32, 64),
    "linear_value_head_dim": (8, 16, 32, 64),
    "linear_conv_kernel_dim": (2, 3, 4),
    "conv_L_cache": (2, 3, 4),
    "mamba_d_state": (8, 16, 32, 64, 128),
    "mamba_d_conv": (2, 3, 4),
    "mamba_chunk_size": (8, 16, 64),
    "position_embedding_type": ("nope", "nope", "nope", "rope"),
    "moe_intermediate_size": (32, 64, 96),
    "shared_intermediate_size": (32, 48, 96),
    "shared_expert_intermediate_size": (32, 64, 80),
    "n_shared_experts": (1, 2, 3),
    "routed_scaling_factor": (1.0, 2.5, 0.7),
    "decoder_sparse_step": (1, 1, 2),
    "sliding_window_pattern": (2, 3, 4, 6),
    "query_pre_attn_scalar": (8, 24, 64, 256),
    "partial_rotary_factor": (0.25, 0.5, 0.5, 1.0),
    "attention_multiplier": (0.2, 0.25, 1.0, 1.7),
    "embedding_multiplier": (4.0, 0.25, 1.0, 1.7),
    "residual_multiplier": (0.5, 0.25, 1.0, 1.7),
    "logits_scaling": (2.0, 0.25, 1.0, 1.7),
    "logit_scale": (0.8, 0.25, 1.0, 1.7),
    "attn_logit_softcapping": (50.0, 20.0, None),
    "final_logit_softcapping": (30.0, 20.0, None),
    "attention_chunk_size": (8, 24, 50),
    "floor_scale": (4, 16, 40),
    "intermediate_size_mlp": (64, 96, 160),
    "moe_num_shared_experts": (0, 1, 2),
    "moe_layer_start_index": (0, 1, 2),
    "moe_layer_end_index": (-1, -1, 2),
    "moe_layer_interval": (1, 1, 2),
    "num_shared_experts": (1, 2, 3),
    "router_scaling_factor": (1.0, 2.5, 0.7),
    "route_scale": (1.0, 2.5, 0.7),
    "moe_routed_scaling_factor": (1.0, 2.5, 0.7),
    "gating": (True, "per-head", "per-element"),
    "prefix_dense_intermediate_size": (32, 64, 96),
    "expert_selection_fn": ("softmax", "sigmoid"),
    "shared_expert_combination_strategy": ("average", "sum"),
}
"""What is drawn for a key that a family's configuration has, other than as null."""

SWITCHES = {
    "tie_word_embeddings": 0.5,
    "attention_bias": 0.5,
    "attention_out_bias": 0.5,
    "mlp_bias": 0.4,
    "norm_topk_prob": 0.5,
    "use_expert_bias": 0.5,
    "use_qk_norm": 0.6,
    "use_bias": 0.7,
    "mup_enabled": 0.5,
    "use_post_norm": 0.7,
    "qkv_bias": 0.6,
    "lm_head_bias": 0.5,
    "qk_layernorm": 0.5,
    "use_parallel_residual": 0.5,
    "use_qkv_bias": 0.5,
    "mamba_conv_bias": 0.7,
    "attn_temperature_tuning": 0.7,
    "use_sandwich_norm": 0.7,
    "use_attention_gate": 0.7,
    "linear_allow_neg_eigval": 0.6,
}
"""How often such a key is true."""

FIXED = {
    # Its gate would have none.
    "afmoe": {"attention_bias"},
    "apertus": {"mlp_bias"},
    "deepseek_v2": {"norm_topk_prob", "mlp_bias"},
    "gemma": {"tie_word_embeddings", "attention_bias"},
    "gemma2": {"tie_word_embeddings"},
    "gemma3_text": {"tie_word_embeddings"},
    # A list of them is drawn by layer.
    "gemma3n_text": {"tie_word_embeddings", "intermediate_size"},
    "gemma4_text": {"tie_word_embeddings", "attention_bias"},
    "glm4_moe_lite": {"q_lora_rank"},
    # Its logits would have a bias too.
    "ernie4_5_moe": {"use_bias"},
    "gpt_oss": {"attention_bias"},
    "granitemoehybrid": {"attention_bias"},
    "hunyuan_v1_dense": {"use_qk_norm"},
    "kimi_linear": {"tie_word_embeddings"},
    # Widths of experts are those of `intermediate_size`, whatever the list says.
    "hunyuan_v1_moe": {"use_qk_norm", "attention_bias", "moe_intermediate_size"},
    "llama4_text": {"attention_bias"},
    "minimax_m2": {"use_qk_norm"},
    "phi": {"tie_word_embeddings"},
    # Its long and short factors are as many as half of the rotated width.
    "phi3": {"partial_rotary_factor"},
    "phimoe": {"tie_word_embeddings"},
    "qwen3_5_text": {"tie_word_embeddings", "attention_bias"},
    "qwen3_5_moe_text": {"attention_bias"},
    "qwen3_next": {"norm_topk_prob"},
}
"""Keys that Transformers does not look at in a family, or that no checkpoint of it has otherwise."""

ACTIVATIONS: dict[str, Sequence[str]] = dict.fromkeys(
    ("llama", "mistral", "qwen2", "starcoder2", "phi", "stablelm", "nemotron", "arcee", "jais2"),
    ("gelu", "gelu_new", "gelu_pytorch_tanh", "silu", "relu", "relu2"),
) | {
    # Transformers takes its `gelu` for the one by tanh, whatever `hidden_activation` says.
    "gemma": ("gelu_new", "gelu_pytorch_tanh", "silu", "relu")
}
OWN_HEADS = {"falcon", "gpt_neox", "gptj", "persimmon"}
"""Families of which heads of keys and values have no number of their own, or other keys: theirs stay."""

OFTEN_WINDOWED = {"mistral", "phi3", "starcoder2", "mixtral", "phimoe"}
"""Families whose window is null or too long for these prompts, where some checkpoints have a short one."""
LONG_WINDOW = 500

SCALED = {
    *("cohere", "gemma", "glm4", "glm4_moe", "granite", "llama", "mistral", "mixtral", "olmo2", "phi"),
    *("qwen2", "qwen2_moe", "qwen3", "qwen3_moe", "smollm3", "stablelm", "starcoder2", "seed_oss", "exaone4"),
}
"""Families of which there are checkpoints with scaled positions of several kinds."""
SCALINGS: Sequence[Config] = [
    {"rope_type": "linear", "factor": 2.0},
    {"rope_type": "linear", "factor": 3.5},
    {
        "rope_type": "llama3",
        "factor": 8.0,
        "high_freq_factor": 4.0,
        "low_freq_factor": 1.0,
        "original_max_position_embeddings": 64,
    },
    {
        "rope_type": "llama3",
        "factor": 8.0,
        "high_freq_factor": 4.0,
        "low_freq_factor": 1.0,
        "original_max_position_embeddings": 256,
    },
    {"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 128},
    {"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 64},
    {"rope_type": "yarn", "factor": 32.0, "original_max_position_embeddings": 32},
    {
        "rope_type": "yarn",
        "factor": 4.0,
        "original_max_position_embeddings": 128,
        "beta_fast": 16.0,
        "beta_slow": 2.0,
        "attention_factor": 1.3,
    },
    {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128, "mscale": 0.8, "mscale_all_dim": 0.5},
]


def draw_config(family: str, rng: Random) -> Config:
    """The configuration of a family's tiny model with nearly every number in it drawn anew."""
    whole = read_json(folder_of(family) / "config.json")
    config = whole.get("text_config", whole)
    for step in (draw_values, draw_heads, draw_layers, draw_states, draw_experts, draw_windows, draw_activation, draw_positions):
        step(config, rng)
    return whole


def draw_values(config: Config, rng: Random) -> None:
    """Every key that stands alone."""
    kind = config["model_type"]
    for key in [key for key, value in config.items() if value is not None and key not in FIXED.get(kind, ())]:
        if key in CHOICES:
            config[key] = rng.choice(CHOICES[key])
        elif key in SWITCHES:
            config[key] = rng.random() < SWITCHES[key]


def rotated_part(config: Config) -> float:
    """The part of a head's width that is turned by position."""
    return config.get("partial_rotary_factor") or (config.get("rope_parameters") or {}).get("partial_rotary_factor") or 1.0


def head_width(config: Config) -> int:
    return config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]


def draw_heads(config: Config, rng: Random) -> None:
    """Heads, their width, and that of the model."""
    if config["model_type"] in OWN_HEADS:
        return
    heads, kv_heads = rng.choice(HEADS)
    config["num_attention_heads"], config["num_key_value_heads"] = heads, kv_heads
    widths = HEAD_WIDTHS if rotated_part(config) == 1.0 else PARTLY_TURNED_HEAD_WIDTHS
    if "kv_lora_rank" in config:
        draw_latent_heads(config, rng)
    elif config.get("head_dim"):
        config["head_dim"] = rng.choice(widths)
        config["hidden_size"] = rng.choice([32, 64, 96, 128, 160, 192])
    else:
        config["hidden_size"] = heads * rng.choice([width for width in widths if width * heads <= WIDEST])
    if config["model_type"] == "helium":
        # Its output projection is square.
        config["hidden_size"] = heads * config["head_dim"]
    if config["model_type"] == "phi" and heads != kv_heads:
        config["qk_layernorm"] = False
    if "mrope_section" in (config.get("rope_parameters") or {}):
        half = int(head_width(config) * rotated_part(config)) // 2
        config["rope_parameters"]["mrope_section"] = [half - 2 * (half // 3), half // 3, half // 3]


def draw_latent_heads(config: Config, rng: Random) -> None:
    """Heads of latent attention, which has as many of keys and values as of queries."""
    rope, nope = rng.choice([8, 16, 32, 64]), rng.choice([8, 16, 32, 64, 128])
    config |= {"num_key_value_heads": config["num_attention_heads"], "hidden_size": rng.choice([32, 64, 96, 128])}
    config |= {"qk_rope_head_dim": rope, "qk_nope_head_dim": nope}
    config |= {key: width for key, width in (("qk_head_dim", rope + nope), ("head_dim", rope)) if key in config}


def draw_layers(config: Config, rng: Random) -> None:
    """How many layers, and of which kinds."""
    count = rng.randint(1, 6)
    config[next((key for key in ("num_layers", "n_layer") if key in config), "num_hidden_layers")] = count
    LAYERS.get(config["model_type"], any_layers)(config, rng, count)
    for key in ("first_k_dense_replace", "num_dense_layers"):
        if key in config:
            config[key] = rng.randint(0, count)
    if config["model_type"] == "glm4_moe_lite":
        dense = config["first_k_dense_replace"]
        # The only key of the two that Transformers looks at.
        config["mlp_layer_types"] = ["dense"] * dense + ["sparse"] * (count - dense)
    elif "mlp_layer_types" in config:
        config["mlp_layer_types"] = [rng.choice(["dense", "sparse"]) for _ in range(count)]
    if config.get("mlp_only_layers") is not None and rng.random() < 0.3:
        config["mlp_only_layers"] = [rng.randrange(count)]


def any_layers(config: Config, rng: Random, count: int) -> None:
    """The kinds that the family has in any order; at least one layer attends, for Transformers asks it for the length."""
    if not config.get("layer_types"):
        return
    kinds = sorted(set(config["layer_types"]))
    attending = [kind for kind in kinds if "attention" in kind and kind != "linear_attention"]
    config["layer_types"] = layers = [rng.choice(kinds) for _ in range(count)]
    if not set(layers) & set(attending):
        layers[-1] = attending[0]


def last_layers_windowed(config: Config, rng: Random, count: int) -> None:
    """Qwen 2 and 3: windows from some layer on."""
    first = count
    if rng.random() < 0.4:
        first = rng.randint(0, count)
        config |= {"use_sliding_window": True, "sliding_window": rng.choice([3, 16, 40]), "max_window_layers": first}
    config["layer_types"] = ["full_attention"] * first + ["sliding_attention"] * (count - first)


def some_layers_unturned(config: Config, rng: Random, count: int) -> None:
    """SmolLM 3: any layers without positions, and any with a window."""
    config["no_rope_layers"] = [rng.randint(0, 1) for _ in range(count)]
    config["layer_types"] = ["full_attention"] * count
    if rng.random() < 0.4:
        config |= {"use_sliding_window": True, "sliding_window": rng.choice([3, 17, 40])}
        config["layer_types"] = [rng.choice(["full_attention", "sliding_attention"]) for _ in range(count)]


def chunked_layers(config: Config, rng: Random, count: int) -> None:
    """Llama 4: layers that attend within chunks and turn, others that do neither, and experts in each second or third."""
    step = rng.choice([1, 2, 3])
    config |= {"interleave_moe_layer_step": step, "moe_layers": list(range(step - 1, count, step))}
    regular = rng.random() < 0.7
    config["no_rope_layers"] = [int((layer + 1) % 4 != 0) if regular else rng.randint(0, 1) for layer in range(count)]
    config.pop("layer_types", None)


def interleaved_layers(config: Config, rng: Random, count: int) -> None:
    """Qwen 3 Next: each layer, each second or each fourth attends."""
    config["full_attention_interval"] = interval = rng.choice([step for step in (1, 2, 4) if step <= count])
    config["layer_types"] = ["linear_attention" if (layer + 1) % interval else "full_attention" for layer in range(count)]


def layers_that_share(config: Config, rng: Random, count: int) -> None:
    """Gemma 4: the last layer sees everything, some at the end may read what others have written, full ones have other heads."""
    kinds = ["sliding_attention", "full_attention"]
    config["layer_types"] = layers = [rng.choice(kinds) for _ in range(count)]
    # Transformers fails without inputs of layers where layers share.
    shared = rng.choice([0, 1, 2]) if count > 3 else 0
    width = rng.choice([8, 16, 24] if shared else [0, 8, 32])
    if shared:
        layers[:2] = kinds
    layers[-1] = "full_attention"
    config |= {"num_kv_shared_layers": shared, "hidden_size_per_layer_input": width}
    config |= {"attention_k_eq_v": rng.random() < 0.5, "use_double_wide_mlp": rng.random() < 0.5}
    config["global_head_dim"] = rng.choice([16, 32, 64])
    config["num_global_key_value_heads"] = rng.choice([None, 1, config["num_key_value_heads"]])


def layers_of_streams(config: Config, rng: Random, count: int) -> None:
    """Gemma 3n: several residual streams, thin branches, gates of which few pass, widths by layer, and layers that share."""
    kinds = ["sliding_attention", "full_attention"]
    config["layer_types"] = layers = [rng.choice(kinds) for _ in range(count)]
    shared = rng.choice([0, 1, 2]) if count > 3 else 0
    if shared:
        layers[:2] = kinds
    streams = rng.choice([2, 3, 4])
    config |= {"altup_num_inputs": streams, "altup_active_idx": rng.randrange(streams), "altup_correct_scale": rng.random() < 0.7}
    config |= {"num_kv_shared_layers": shared, "hidden_size_per_layer_input": rng.choice([8, 24, 80])}
    config |= {"laurel_rank": rng.choice([4, 8, 48]), "vocab_size_per_layer_input": rng.choice([300, 512])}
    config["intermediate_size"] = [rng.choice([32, 64, 96]) for _ in range(count)]
    config["activation_sparsity_pattern"] = [rng.choice([0.0, 0.3, 0.5, 0.9, 0.95]) for _ in range(count)]


def layers_of_own_bases(config: Config, rng: Random, count: int) -> None:
    """Granite with windows: each layer has a base of its rotation, or none."""
    any_layers(config, rng, count)
    config["layer_rope_theta"] = [rng.choice([0, 500.0, 10000.0]) for _ in range(count)]


def layers_of_own_heads(config: Config, rng: Random, count: int) -> None:
    """Laguna: each layer has a number of heads."""
    any_layers(config, rng, count)
    kv_heads = config["num_key_value_heads"]
    config["num_attention_heads_per_layer"] = [kv_heads * rng.choice([1, 2, 4]) for _ in range(count)]


def layers_of_both_kinds(config: Config, rng: Random, count: int) -> None:
    """OLMo Hybrid: Transformers asks for one of each."""
    config["num_hidden_layers"] = count = max(count, 2)
    any_layers(config, rng, count)
    if len(set(config["layer_types"])) == 1:
        config["layer_types"][:2] = ["linear_attention", "full_attention"]


def listed_layers(config: Config, rng: Random, count: int) -> None:
    """Kimi Linear: lists of layers that count from 1, of which one attends."""
    full = sorted(set(rng.choices(range(1, count + 1), k=rng.randint(1, 3))))
    states = config["linear_attn_config"]
    states |= {"kda_layers": [layer for layer in range(1, count + 1) if layer not in full], "full_attn_layers": full}
    states |= {"num_heads": rng.choice([1, 2, 3, 5]), "head_dim": rng.choice([8, 16, 24, 64])}
    states["short_conv_kernel_size"] = rng.choice([2, 3, 4])


LAYERS: dict[str, Callable[[Config, Random, int], None]] = {
    "qwen2": last_layers_windowed,
    "qwen3": last_layers_windowed,
    "smollm3": some_layers_unturned,
    "gemma3n_text": layers_of_streams,
    "gemma4_text": layers_that_share,
    "llama4_text": chunked_layers,
    "qwen3_next": interleaved_layers,
    "granite_swa": layers_of_own_bases,
    "granitemoe_swa": layers_of_own_bases,
    "laguna": layers_of_own_heads,
    "olmo_hybrid": layers_of_both_kinds,
    "kimi_linear": listed_layers,
}


def draw_states(config: Config, rng: Random) -> None:
    """The heads of recurrent layers."""
    if "linear_num_key_heads" in config:
        heads = rng.choice([1, 2, 3])
        config |= {"linear_num_key_heads": heads, "linear_num_value_heads": heads * rng.choice([1, 2, 4])}
    if config["model_type"] == "olmo_hybrid":
        # Transformers has a key head for each value head, and saves convolutions right where all have as many channels.
        config["linear_value_head_dim"] = config["linear_key_head_dim"]
        if "linear_num_key_heads" in config:
            config["linear_num_value_heads"] = config["linear_num_key_heads"]
    if "mamba_d_state" in config:
        inner = config["mamba_expand"] * config["hidden_size"]
        groups = rng.choice([1, 2, 4])
        heads = rng.choice([count for count in (1, 2, 4, 8, 16) if inner % count == 0 and count % groups == 0])
        config |= {"mamba_n_groups": groups, "mamba_n_heads": heads, "mamba_d_head": inner // heads}
        if not config["num_local_experts"]:
            # Without experts this is the width of the only feed-forward part.
            config["shared_intermediate_size"] = config["intermediate_size"]


def draw_experts(config: Config, rng: Random) -> None:
    """How many experts there are, in how many groups, and how many of them a token goes to."""
    keys = ("num_experts", "n_routed_experts", "num_local_experts", "moe_num_experts")
    key = next((key for key in keys if config.get(key)), None)
    if key is None:
        return
    if config.get("n_group", 1) > 1 or config.get("topk_method") == "group_limited_greedy":
        groups, size = rng.choice([1, 2, 4]), rng.choice([2, 3, 4])
        kept = rng.randint(1, groups)
        config |= {"n_group": groups, "topk_group": kept}
        experts, taken = groups * size, rng.randint(1, kept * size)
    else:
        experts = rng.choice([2, 3, 5, 8, 16, 20])
        taken = rng.randint(1, min(experts, 8))
    config[key] = experts
    if config["model_type"] == "hunyuan_v1_moe":
        layers = config["num_hidden_layers"]
        # Transformers has one shared expert, whatever `num_shared_expert` says.
        config |= {"moe_topk": [taken] * layers, "num_shared_expert": [1] * layers}
        config["moe_intermediate_size"] = [config["intermediate_size"]] * layers
    elif config["model_type"] == "ernie4_5_moe":
        config["moe_k"] = taken
    elif config["model_type"] == "kimi_linear":
        config["num_experts_per_token"] = taken
    elif config["model_type"] == "phimoe":
        config["num_experts_per_tok"] = 2
    elif config["model_type"] == "gemma4_text":
        config["top_k_experts"] = taken
    elif config["model_type"] == "llama4_text":
        config["num_experts_per_tok"] = rng.choice([1, 1, 2, min(experts, 3)])
    else:
        config["num_experts_per_tok"] = taken


def draw_windows(config: Config, rng: Random) -> None:
    """Windows that prompts go beyond."""
    if config["model_type"] in OFTEN_WINDOWED and rng.random() < 0.3:
        config["sliding_window"] = rng.choice([2, 16, 33])
    elif 0 < (config.get("sliding_window") or 0) < LONG_WINDOW:
        config["sliding_window"] = rng.choice([2, 7, 16, 24, 33, 64])


def draw_activation(config: Config, rng: Random) -> None:
    """Another activation, under both names where a family has two."""
    activations = ACTIVATIONS.get(config["model_type"], ())
    if activations and rng.random() < 0.25:
        chosen = rng.choice(activations)
        config |= {key: chosen for key in ("hidden_act", "hidden_activation") if key in config}


def draw_positions(config: Config, rng: Random) -> None:
    """Scaled positions where there were none, and other factors where there were."""
    if "rope_scaling" not in config:
        return
    scaling = config["rope_scaling"]
    if scaling is None:
        if config["model_type"] in SCALED and rng.random() < 0.5:
            config["rope_scaling"] = dict(rng.choice(SCALINGS))
    elif scaling.get("type") == "longrope":
        half = int(head_width(config) * config["partial_rotary_factor"]) // 2
        scaling["short_factor"] = [1 + 0.05 * place for place in range(half)]
        scaling["long_factor"] = [1.5 + 0.3 * place for place in range(half)]
    elif scaling.get("type") != "dynamic" and rng.random() < 0.5:
        scaling["factor"] = rng.choice([2.0, 4.0, 16.0])


def longest_of_first_factors(config: Config) -> int | None:
    """Where Transformers changes the factors of all places at once, which no cache can follow; None if it never does."""
    is_long = (config.get("rope_scaling") or {}).get("type") == "longrope"
    return config["original_max_position_embeddings"] if is_long else None


ADDED_TOKENS = 12


def engine_answers(runner: Runner, rng: Random, limit: int | None) -> list[Answer]:
    """A short prompt, a middling one that is gone on from, and one beyond windows and original lengths."""
    short, middle, long = rng.choice([1, 2, 5, 9]), rng.randint(30, 60), rng.randint(100, 180)
    if limit is not None:
        middle = min(middle, limit - ADDED_TOKENS)
    prompts = [draw_token_ids(rng, count) for count in (short, middle, long)]
    answers = [answer_of_prompt(runner, prompt) for prompt in prompts]
    request = CompletionRequest(prompts[1], "m", max_tokens=ADDED_TOKENS, temperature=0, ignore_eos=True, logprobs=5)
    entries = runner.send_completion_request(request).choices[0].logprobs.content
    return [*answers, answer_of_continuation(prompts[1], entries)]


def compare(case: Case) -> Comparison:
    """One model of the family against Transformers."""
    model = draw_model(case, lambda: draw_config(case.family, case.random), AutoModelForCausalLM)
    limit = longest_of_first_factors(case.configuration)
    # The decoder of a model that sees is saved by itself, and its configuration as well.
    save_model(case, model, "text_config" not in case.configuration and case.random.random() < 0.5)
    copy_tokenizer(folder_of(case.family), case.folder)
    runner = load_engine(case, Which.Plain(str(case.folder), dtype=EXACT))
    return compare_answers(load_reference(case.folder, AutoModelForCausalLM), engine_answers(runner, case.random, limit))
