"""What schemathesis loads for tests/test_openapi.py: requests that a schema cannot tell from those the server answers."""

from __future__ import annotations

import re
from typing import Any

import schemathesis
from schemathesis.specs.openapi.checks import negative_data_rejection, positive_data_acceptance

BEYOND_A_SCHEMA = {
    "context_length_exceeded": "the length is the tokenizer's",
    "invalid_grammar": "grammars and JSON Schemas have rules of their own",
    "invalid_schema": "likewise",
    "grammar_too_complex": "likewise",
    "images_not_supported": "whether a model sees is its own",
    "audio_not_supported": "likewise, whether it hears",
    "embeddings_not_supported": "likewise, whether it makes embeddings",
    "rerank_not_supported": "likewise, whether it scores pairs",
    "invalid_messages": "the chat template has rules of its own",
}
"""By the error's code: why a request of the document's form may be refused."""
OF_SEVERAL_KEYS = {
    "bad_words": "not blank",
    "best_of": "at least `n`, and not above it in a stream",
    "chat_template_kwargs": "not what the request's own fields set",
    "continue_final_message": "the chat template decides what can be gone on from",
    "dry_allowed_length": "needs `dry_multiplier`",
    "dry_base": "needs `dry_multiplier`",
    "dry_sequence_breakers": "needs `dry_multiplier`",
    "ggml_type": "one of the names that --isq takes",
    "grammar": "its value is of the form that its `type` says",
    "guided_choice": "one form of an answer alone",
    "guided_grammar": "one form of an answer alone",
    "guided_json": "one form of an answer alone",
    "guided_regex": "one form of an answer alone",
    "logit_bias": "a key is an id of the vocabulary",
    "max_completion_tokens": "the other name of `max_tokens`",
    "min_tokens": "at most `max_tokens`",
    "n": "prompts times `n` has a limit",
    "output_config": "a `json_schema` needs its `schema`",
    "prompt_logprobs": "not in a stream",
    "reasoning_effort": "none is at odds with `enable_thinking`",
    "response_format": "one of the forms of an answer",
    "spaces_between_special_tokens": "not with `skip_special_tokens`: false",
    "stream_options": "needs `stream`",
    "structured_outputs": "one of its keys",
    "tool_choice": "of the form that its API says",
    "tools": "of the types of tools only functions are served",
    "top_logprobs": "needs `logprobs`",
    "truncate_prompt_tokens": "-1 drops on the left",
    "truncation_side": "needs `truncate_prompt_tokens`",
    "/tokenize prompt": "one of `prompt`, `content` and `messages`",
}
"""By the error's param: what depends on other keys, or on the model."""


LEAST_FLOAT = 2.0**-149
"""What is nearer to 0 is 0 in 32 bits."""


def is_refused_for_no_schema_can_say(response: Any, case: Any) -> bool:
    if response.status_code != 400:
        return False
    error = response.json()["error"]
    param = (error.get("param") or "").split(".")[0].split("[")[0]
    # Anthropic's form has no param.
    names = {param, f"{case.path} {param}", error["message"].partition(" ")[0]}
    # Anthropic's form has no code either.
    if "takes text only" in error["message"]:
        return True
    names |= {quoted.split(".")[0] for quoted in re.findall(r"['`]([\w.]+)", error["message"])}
    named = error.get("code") in BEYOND_A_SCHEMA or not names.isdisjoint(OF_SEVERAL_KEYS)
    return named or "maximum context length" in error["message"] or has_a_vanishing_number(case)


def has_a_vanishing_number(case: Any) -> bool:
    values = case.body.values() if isinstance(case.body, dict) else ()
    return any(isinstance(value, float) and 0 < abs(value) < LEAST_FLOAT for value in values)


@schemathesis.check
def acceptance_of_the_documents_form(ctx: Any, response: Any, case: Any) -> bool | None:
    """`positive_data_acceptance`, but for what the tables name."""
    if is_refused_for_no_schema_can_say(response, case):
        return None
    return positive_data_acceptance(ctx, response, case)


@schemathesis.check
def refusal_of_other_forms(ctx: Any, response: Any, case: Any) -> bool | None:
    """`negative_data_rejection`, but for numbers that are 0 in 32 bits."""
    return None if has_a_vanishing_number(case) else negative_data_rejection(ctx, response, case)
