"""What `help()` says: every parameter by its name, every number with its range, and what is not supported in a line."""

from __future__ import annotations

import inspect
import pydoc
import re
from typing import Any

import pytest
from conftest import runner_of

from mistral_paged import ChatCompletionRequest, CompletionRequest, EmbeddingRequest, Runner, Which

REQUIRED: dict[Any, dict[str, Any]] = {
    Runner: {"which": Which.Plain("/none")},
    ChatCompletionRequest: {"messages": "Hi", "model": "m"},
    CompletionRequest: {"prompt": "Hi", "model": "m"},
    EmbeddingRequest: {"input": "Hi"},
}
RANGES = {
    Runner: {
        "max_seqs": "1 to 2^20 (32 unless given)",
        "max_num_batched_tokens": "1 or more (4096 unless given)",
        "max_step_latency": "about how many seconds, above 0 (0.25 unless given)",
        "pa_gpu_mem": "in MB (2^20 bytes), 1 or more",
        "pa_gpu_mem_usage": "a fraction in (0, 1]",
        "pa_ctxt_len": "tokens, 1 or more",
        "pa_blk_size": "8, 16 or 32 (32 unless given)",
        "prefix_cache_n": "16 unless given",
        "seed": "0 to 2^64 - 1",
        "num_threads": "1 or more",
        "kv_tier_size": "in MB (2^20 bytes), 1 or more (4096 unless given)",
    },
    ChatCompletionRequest: {
        "temperature": "0 or more",
        "top_k": "0 or more",
        "top_p": "above 0 and at most 1",
        "min_p": "0 to 1",
        "presence_penalty": "-2 to 2",
        "frequency_penalty": "-2 to 2",
        "repetition_penalty": "above 0",
        "dry_multiplier": "0 or more",
        "dry_base": "1 or more (1.75 unless given)",
        "dry_allowed_length": "0 to 2^27 (2 unless given)",
        "logit_bias": "-100 to 100",
        "top_logprobs": "0 or more",
        "max_tokens": "1 or more",
        "n_choices": "1 to 1024",
        "seed": "0 to 2^64 - 1",
        "priority": "-2^31 to 2^31 - 1",
        "deadline": "seconds from submission, above 0",
        "public_messages": "0 or more",
    },
    CompletionRequest: {"logprobs": "0 or more", "best_of": "at most 1024", "public_prefix_len": "0 or more"},
    EmbeddingRequest: {
        "dimensions": "1 or more",
        "priority": "-2^31 to 2^31 - 1",
        "deadline": "seconds from submission, above 0",
    },
}


def documentation(cls: Any) -> str:
    return " ".join(inspect.getdoc(cls).split())


def is_supported(cls: Any, name: str) -> bool:
    try:
        cls(**{**REQUIRED[cls], name: True})
    except NotImplementedError:
        return False
    except (ValueError, TypeError):
        pass
    return True


@pytest.mark.parametrize("cls", REQUIRED, ids=lambda cls: cls.__name__)
def test_help_names_every_parameter_that_is_supported(cls: Any) -> None:
    names = [name for name in inspect.signature(cls).parameters if name not in ("which", "model")]
    text = documentation(cls)
    if cls is CompletionRequest:
        text += documentation(ChatCompletionRequest)
    named = {name for name in names if f"`{name}`" in text or f"`{name}=" in text}
    if cls is CompletionRequest:
        # Of chats alone.
        named.discard("tool_schemas")
    assert named == {name for name in names if name in REQUIRED[cls] or is_supported(cls, name)}


@pytest.mark.parametrize(
    ("cls", "name", "range_"), [(cls, name, range_) for cls, ranges in RANGES.items() for name, range_ in ranges.items()]
)
def test_help_tells_the_range_of_every_number(cls: Any, name: str, range_: str) -> None:
    assert re.search(rf"`{name}`.{{,160}}?{re.escape(range_)}", documentation(cls))


def test_help_of_a_runner_has_no_wall_of_what_is_not_supported() -> None:
    text = pydoc.plain(pydoc.render_doc(Runner))
    assert "Not supported yet" not in text
    assert "generate_image" not in text
    runner = runner_of("text", "llama")
    assert "generate_image" not in dir(runner)
    assert callable(runner.generate_image)
    with pytest.raises(AttributeError, match="'Runner' object has no attribute 'generate_text'"):
        _ = runner.generate_text
    assert not hasattr(runner, "generate_text")
