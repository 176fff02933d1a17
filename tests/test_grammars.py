"""What an answer must be: grammars from Python and over HTTP, against models whose every next token is as good as any other."""

from __future__ import annotations

import copy
import json
import os
import pickle
import re
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jsonschema
import pytest
from conftest import runner_of
from formats import CHECKER
from hostile import hostile
from schemas import FORMATS, schemas
from test_server import Server, serving

from mistral_paged import ChatCompletionRequest, CompletionRequest, InvalidArgumentError, Runner

# `make test-grammars` takes 2000.
NUM_SCHEMAS = int(os.environ.get("SCHEMAS", "100"))
COLOUR = {
    "type": "object",
    "properties": {"colour": {"enum": ["red", "blue"]}, "share": {"type": "integer", "minimum": 0, "maximum": 99}},
    "required": ["colour", "share"],
    "additionalProperties": False,
}


@pytest.fixture
def llama() -> Runner:
    return runner_of("text", "llama")


def ask(runner: Runner, grammar: Any, kind: str, **options: Any) -> tuple[str, str]:
    """The text, and why it ended."""
    options = {"max_tokens": 200, "temperature": 1.0, "seed": 1, **options}
    request = CompletionRequest("Hello", "m", grammar=grammar, grammar_type=kind, **options)
    choice = runner.send_completion_request(request).choices[0]
    return choice.text, choice.finish_reason


def valid(schema: dict[str, Any], text: str) -> bool:
    validator = jsonschema.Draft202012Validator
    validator(schema, format_checker=CHECKER).validate(json.loads(text))
    return True


def test_the_checker_of_formats_knows_them() -> None:
    for name, within, beyond in [
        ("time", "23:59:60Z", "12:00:60Z"),
        ("time", "08:30:06.283185+05:30", "08:30:06"),
        ("date", "2024-02-29", "2023-02-29"),
        ("date-time", "1985-04-12T23:20:50.52Z", "1985-04-12 23:20:50"),
        ("duration", "P3Y6M4DT12H30M5S", "P1YT"),
        ("hostname", "a-b.example", "-a.example"),
        ("email", "a@example.com", "a@"),
        ("email", "a@[127.0.0.1]", "a@-b"),
        ("uuid", "2eb8aa08-aa98-11ea-b4aa-73b441d16380", "2eb8aa08"),
        ("ipv4", "192.168.0.1", "192.168.0.256"),
    ]:
        assert CHECKER.conforms(within, name), (name, within)
        assert not CHECKER.conforms(beyond, name), (name, beyond)
    assert set(FORMATS) <= set(CHECKER.checkers)


@pytest.mark.timeout(900)
def test_whatever_ends_is_valid(llama: Runner) -> None:
    made = schemas(NUM_SCHEMAS)

    def answers(number: int) -> list[tuple[str, str]]:
        sampled = ask(llama, made[number], "json_schema", seed=number)
        greedy = ask(llama, made[number], "json_schema", temperature=0)
        truncated = ask(llama, json.dumps(made[number]), "json_schema", seed=number, top_k=40, top_p=0.9)
        request = ChatCompletionRequest(
            "Hello", "m", grammar=made[number], grammar_type="json_schema", stream=True, max_tokens=200, seed=number
        )
        chunks = [chunk.choices[0] for chunk in llama.send_chat_completion_request(request)]
        streamed = "".join(chunk.delta.content or "" for chunk in chunks)
        return [sampled, greedy, truncated, (streamed, str(chunks[-1].finish_reason))]

    with ThreadPoolExecutor(8) as pool:
        results = list(pool.map(answers, range(len(made))))
    num_ended = 0
    for schema, texts in zip(made, results, strict=True):
        for text, reason in texts:
            if reason == "stop":
                num_ended += 1
                assert valid(schema, text), (schema, text)
            else:
                assert reason == "length", (schema, text, reason)
    assert num_ended > 2 * len(made), f"{num_ended} of {4 * len(made)} ended"


def test_each_type_of_grammar_decides_the_text(llama: Runner) -> None:
    for seed in range(4):
        assert re.fullmatch(r"[a-f]{3}-[0-9]+", ask(llama, r"[a-f]{3}-[0-9]{1,3}", "regex", seed=seed)[0])
        assert ask(llama, ["yes", "no", "(?)"], "choice", seed=seed)[0] in ("yes", "no", "(?)")
        assert re.fullmatch("ab*c", ask(llama, 'start: "a" B "c"\nB: /b{0,9}/', "lark", seed=seed)[0])
        form = {"grammars": [{"lark_grammar": 'start: "<" %json {"type": "boolean"} ">"'}]}
        assert ask(llama, form, "llguidance", seed=seed)[0] in ("<true>", "<false>")
        assert ask(llama, json.dumps(form), "llguidance", seed=seed)[0] in ("<true>", "<false>")


def test_free_text_has_the_tags_that_its_triggers_begin(llama: Runner) -> None:
    tag = {"begin": "<n=", "schema": {"type": "integer", "minimum": 0, "maximum": 99}, "end": ">"}
    older = {"type": "structural_tag", "structures": [tag], "triggers": ["<n"]}
    content = {"type": "json_schema", "json_schema": tag["schema"]}
    tags = [{"type": "tag", "begin": tag["begin"], "content": content, "end": tag["end"]}]
    newer = {"format": {"type": "triggered_tags", "triggers": ["<n"], "tags": tags, "at_least_one": True}}
    whole = r"<n=\s*[0-9]{1,2}\s*>"
    for seed in range(4):
        for form in (older, json.dumps(older)):
            text, _ = ask(llama, form, "structural_tag", seed=seed)
            assert text.count("<n") == len(re.findall(whole, text)) + (re.search(r"<n(=\s*[0-9]{0,2}\s*)?$", text) is not None)
        text, _ = ask(llama, newer, "structural_tag", seed=seed)
        assert re.match(whole, text), text
    with pytest.raises(ValueError, match="`max_tokens` that is not honoured"):
        ask(llama, {"format": {"type": "any_text", "max_tokens": 3}}, "structural_tag")


def test_choices_and_log_probabilities_go_with_a_grammar(llama: Runner) -> None:
    request = CompletionRequest(
        "Hello", "m", grammar=COLOUR, grammar_type="json_schema", n_choices=3, best_of=5, logprobs=2, max_tokens=200, seed=3
    )
    response = llama.send_completion_request(request)
    assert len(response.choices) == 3
    for choice in response.choices:
        assert choice.logprobs is not None
        assert len(choice.logprobs.content) > 5
        if choice.finish_reason == "stop":
            assert valid(COLOUR, choice.text)
    stopped = ask(llama, COLOUR, "json_schema", stop_seqs='"share"')
    assert stopped[1] in ("stop", "length")
    assert '"share"' not in stopped[0]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"grammar": "a+"}, "needs `grammar_type`"),
        ({"grammar_type": "regex"}, "needs a `grammar`"),
        ({"grammar": "a", "grammar_type": "gbnf"}, "'gbnf'|\"gbnf\" is no type of grammar; give regex"),
        ({"grammar": 5, "grammar_type": "regex"}, "`grammar` must be a text"),
        ({"grammar": "{", "grammar_type": "json_schema"}, "is not JSON"),
        ({"grammar": [5], "grammar_type": "choice"}, "list of texts"),
    ],
)
def test_a_wrong_argument_is_named(options: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidArgumentError, match=message):
        ChatCompletionRequest("Hello", "m", **options)
    with pytest.raises(InvalidArgumentError, match=message):
        CompletionRequest("Hello", "m", **options)


@pytest.mark.parametrize(
    ("grammar", "kind", "message"),
    [
        ("[", "regex", "unclosed"),
        ("start: a", "lark", "a"),
        ({"type": "object", "uniqueItems": True}, "json_schema", "`uniqueItems`, which is not enforced"),
        ({"type": "string", "format": "phone"}, "json_schema", "phone"),
        ("(" * 999, "regex", "nested deeper than 128"),
    ],
)
def test_what_cannot_be_enforced_raises(llama: Runner, grammar: Any, kind: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ask(llama, grammar, kind)
    with pytest.raises(ValueError, match="ignore_eos"):
        ask(llama, "a", "regex", ignore_eos=True)


def test_a_request_gives_its_grammar_back() -> None:
    request = ChatCompletionRequest("Hello", "m", grammar=COLOUR, grammar_type="json_schema")
    assert (request.grammar, request.grammar_type) == (COLOUR, "json_schema")
    assert pickle.loads(pickle.dumps(request)) == copy.copy(request) == request
    assert "grammar_type='json_schema'" in repr(request)


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with serving() as running:
        yield running


TAG = {"type": "tag", "begin": "<n>", "content": {"type": "regex", "pattern": "[0-9]{2}"}, "end": "</n>"}
FORMS: list[tuple[dict[str, Any], str]] = [
    ({"response_format": {"type": "json_schema", "json_schema": {"name": "c", "schema": COLOUR, "strict": True}}}, ""),
    ({"structured_outputs": {"json": COLOUR}}, ""),
    ({"structured_outputs": {"json": json.dumps(COLOUR)}}, ""),
    ({"guided_json": COLOUR}, ""),
    ({"grammar": {"type": "json_schema", "value": COLOUR}}, ""),
    ({"structured_outputs": {"regex": "[ab]{4}"}}, "[ab]{4}"),
    ({"guided_regex": "[ab]{4}"}, "[ab]{4}"),
    ({"grammar": {"type": "regex", "value": "[ab]{4}"}}, "[ab]{4}"),
    ({"structured_outputs": {"choice": ["left", "right"]}}, "left|right"),
    ({"guided_choice": ["left", "right"]}, "left|right"),
    ({"structured_outputs": {"grammar": 'start: "x" "y"?'}}, "xy?"),
    ({"guided_grammar": 'start: "x" "y"?'}, "xy?"),
    ({"response_format": {"type": "structural_tag", "format": TAG}}, "<n>[0-9]{2}</n>"),
    ({"structured_outputs": {"structural_tag": {"type": "structural_tag", "format": TAG}}}, "<n>[0-9]{2}</n>"),
    ({"structured_outputs": {"structural_tag": json.dumps({"format": TAG})}}, "<n>[0-9]{2}</n>"),
    ({"grammar": {"type": "structural_tag", "value": {"format": TAG}}}, "<n>[0-9]{2}</n>"),
]


@pytest.mark.parametrize(("form", "pattern"), FORMS, ids=lambda form: str(form)[:60])
def test_every_key_for_a_form_decides_the_text(server: Server, form: dict[str, Any], pattern: str) -> None:
    options = {**form, "max_tokens": 200, "temperature": 1, "seed": 7}
    chat, text = server.chat(**options).json["choices"][0], server.complete(**options).json["choices"][0]
    body = {"messages": [{"role": "user", "content": "Hello"}], **options}
    events = [json.loads(event)["choices"][0] for event in server.events("/v1/chat/completions", body)[:-1]]
    streamed = "".join(event["delta"].get("content") or "" for event in events)
    ends = [(chat["message"]["content"], chat["finish_reason"]), (text["text"], text["finish_reason"])]
    for answer, reason in [*ends, (streamed, events[-1]["finish_reason"])]:
        if pattern:
            assert reason == "stop", (form, answer)
            assert re.fullmatch(pattern, answer), (form, answer)
        elif reason == "stop":
            assert valid(COLOUR, answer)


def test_the_other_routes_hold_their_text_to_a_schema(server: Server) -> None:
    text = {"format": {"type": "json_schema", "name": "c", "schema": COLOUR, "strict": True}}
    response = server.post("/v1/responses", {"input": "Hello", "max_output_tokens": 200, "text": text}).json
    assert response["text"]["format"]["schema"] == COLOUR
    if response["status"] == "completed":
        assert valid(COLOUR, response["output"][0]["content"][0]["text"])
    schema = {"type": "json_schema", "schema": COLOUR}
    for form in ({"output_config": {"format": schema}}, {"output_format": schema}):
        body = {"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 200, **form}
        message = server.post("/v1/messages", body).json
        if message["stop_reason"] == "end_turn":
            assert valid(COLOUR, message["content"][0]["text"])
    nothing = server.chat(response_format={"type": "json_object"}, max_tokens=60).json["choices"][0]
    assert nothing["message"]["content"].lstrip().startswith("{")


@pytest.mark.parametrize(
    ("options", "code", "param"),
    [
        ({"response_format": {"type": "xml"}}, "invalid_value", "response_format.type"),
        ({"response_format": {"type": "json_schema"}}, "missing_required_parameter", "response_format.json_schema"),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "x"}}},
            "missing_required_parameter",
            "response_format.json_schema.schema",
        ),
        (
            {
                "response_format": {
                    "type": "json_schema",
                    "json_schema": {"schema": {"type": "object", "properties": {"a": {}}}, "strict": True},
                }
            },
            "invalid_schema",
            "response_format.json_schema",
        ),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"schema": {"colour": 1}}}},
            "invalid_schema",
            "response_format",
        ),
        ({"structured_outputs": {"regex": "["}}, "invalid_grammar", "structured_outputs"),
        ({"structured_outputs": {"regex": "(" * 2000}}, "grammar_too_complex", "structured_outputs"),
        ({"structured_outputs": {}}, "missing_required_parameter", "structured_outputs.json"),
        ({"structured_outputs": {"regex": "a", "choice": ["a"]}}, "invalid_value", "structured_outputs"),
        ({"structured_outputs": {"regexp": "a"}}, "invalid_value", "structured_outputs.regexp"),
        ({"guided_regex": "a", "response_format": {"type": "json_object"}}, "invalid_value", "guided_regex"),
        ({"guided_regex": "a", "ignore_eos": True}, "invalid_value", "ignore_eos"),
        ({"grammar": {"type": "gbnf", "value": "root ::= x"}}, "invalid_value", "grammar"),
        ({"response_format": {"type": "structural_tag"}}, "missing_required_parameter", "response_format.format"),
        ({"response_format": {"type": "json_object", "format": {}}}, "invalid_value", "response_format.format"),
        ({"response_format": {"type": "structural_tag", "format": {"type": "token"}}}, "invalid_grammar", "response_format"),
        ({"response_format": {"type": "structural_tag", "triggers": ["a"]}}, "invalid_grammar", "response_format"),
        ({"structured_outputs": {"structural_tag": "{"}}, "invalid_schema", "structured_outputs.structural_tag"),
    ],
    ids=lambda value: str(value)[:70],
)
def test_a_form_that_cannot_be_honoured_is_a_400(server: Server, options: dict[str, Any], code: str, param: str) -> None:
    for reply in (server.chat(**options), server.complete(**options)):
        assert (reply.status, reply.error["code"], reply.error["param"]) == (400, code, param), reply.error
        assert len(reply.error["message"]) > 10


def test_hostile_grammars_end_as_they_should_and_leave_other_requests_alone(server: Server) -> None:
    expected = server.complete(max_tokens=200, ignore_eos=True).json["choices"][0]["text"]
    with ThreadPoolExecutor(4) as pool:
        other = [pool.submit(server.complete, max_tokens=200, ignore_eos=True) for _ in range(3)]
        for kind, form, code in hostile():
            reply = server.complete(**form, max_tokens=1)
            assert reply.status == (400 if code else 200), (kind, reply.body)
            if code:
                assert (reply.error["code"], reply.error["param"]) == (code, next(iter(form))), kind
        texts = [answer.result().json["choices"][0]["text"] for answer in other]
    assert texts == [expected] * 3
    assert server.get("/health").status == 200
