"""Tool calls and reasoning, from Python and over every route."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
from conftest import GOLDEN, F32
from test_server import Server, serving

from mistral_paged import CalledFunction, ChatCompletionRequest, InvalidArgumentError, Runner, ToolCallResponse, ToolChoice, Which

WEATHER = {
    "name": "weather",
    "description": "The weather at a place.",
    "parameters": {
        "type": "object",
        "properties": {"place": {"type": "string", "enum": ["Oslo", "Rome"]}, "days": {"type": "integer", "minimum": 1, "maximum": 9}},
        "required": ["place", "days"],
        "additionalProperties": False,
    },
}
NOW = {"name": "now", "parameters": {"type": "object", "properties": {}, "additionalProperties": False}}
TOOLS = [{"type": "function", "function": WEATHER}, {"type": "function", "function": NOW}]
ANTHROPIC = [{"name": tool["name"], "description": "It does.", "input_schema": tool["parameters"]} for tool in (WEATHER, NOW)]
RESPONSES = [{"type": "function", **tool} for tool in (WEATHER, NOW)]
HELLO = [{"role": "user", "content": "Hello"}]
# A template that says of a tool what its text needs, as the tiny model's context is short.
HERMES = "{{ tools[0].function.name if tools }}{% for m in messages %}<{{ m.role }}>{{ m.content }}{% for c in m.tool_calls %}<tool_call>{{ c.function.arguments | tojson }}{% endfor %}{% endfor %}"
THINKING = HERMES + "{# </think> #}{% if add_generation_prompt %}<think>\n{% endif %}"


def fits(name: str, arguments: str) -> bool:
    values = json.loads(arguments)
    if name == "now":
        return values == {}
    return name == "weather" and values["place"] in ("Oslo", "Rome") and 1 <= values["days"] <= 9 and len(values) == 2


@pytest.fixture(scope="module")
def runner() -> Runner:
    path = str(GOLDEN / "text" / "llama")
    return Runner(which=Which.Plain(path, dtype=F32), pa_ctxt_len=16384, num_threads=2, chat_template=template(HERMES))


def template(text: str) -> str:
    """A file of a template."""
    import tempfile

    with tempfile.NamedTemporaryFile("w", suffix=".jinja", delete=False) as file:
        file.write(text)
    return file.name


def ask(**options: Any) -> ChatCompletionRequest[Any]:
    return ChatCompletionRequest(HELLO, "m", **{"max_tokens": 200, "seed": 3, **options})


def test_a_call_comes_as_objects_whole_and_in_parts(runner: Runner) -> None:
    for seed in range(5):
        options: dict[str, Any] = {"tool_schemas": [json.dumps(TOOLS[0]), NOW], "tool_choice": "required", "seed": seed}
        choice = runner.send_chat_completion_request(ask(**options)).choices[0]
        if choice.finish_reason == "length":
            continue
        assert (choice.finish_reason, choice.message.content) == ("tool_calls", None)
        assert choice.message.tool_calls
        for index, call in enumerate(choice.message.tool_calls):
            assert isinstance(call, ToolCallResponse) and isinstance(call.function, CalledFunction)
            assert (call.index, call.type) == (index, "function") and call.id and call.id.startswith("call_")
            assert fits(str(call.function.name), call.function.arguments)
        parts: dict[int, list[ToolCallResponse]] = {}
        for chunk in runner.send_chat_completion_request(ask(**options, stream=True)):
            for part in chunk.choices[0].delta.tool_calls or []:
                parts.setdefault(part.index, []).append(part)
        streamed = [(own[0].function.name, "".join(part.function.arguments for part in own)) for own in parts.values()]
        assert streamed == [(call.function.name, call.function.arguments) for call in choice.message.tool_calls]
        assert all(part.id is None and part.function.name is None for own in parts.values() for part in own[1:])


def test_what_a_request_says_of_tools_is_honoured(runner: Runner) -> None:
    named = {"type": "function", "function": {"name": "now"}}
    choice = runner.send_chat_completion_request(ask(tool_schemas=TOOLS, tool_choice=named, parallel_tool_calls=False)).choices[0]
    assert [call.function.name for call in choice.message.tool_calls or []] == ["now"]
    none = runner.send_chat_completion_request(ask(tool_schemas=TOOLS, tool_choice=ToolChoice.NoTools, max_tokens=20)).choices[0]
    assert none.message.tool_calls is None
    auto = ask(tool_schemas=TOOLS, tool_choice=ToolChoice.Auto, max_tokens=20)
    assert runner.send_chat_completion_request(auto).choices[0].finish_reason in ("stop", "length", "tool_calls")
    assert (auto.tool_choice, auto.parallel_tool_calls, auto.tool_schemas) == (ToolChoice.Auto, True, TOOLS)


def test_calls_and_results_go_back_to_the_model(runner: Runner) -> None:
    call = {"id": "call_1", "type": "function", "function": {"name": "now", "arguments": "{}"}}
    messages = [
        *HELLO,
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "call_1", "content": "12:00"},
    ]
    request = ChatCompletionRequest(messages, "m", tool_schemas=TOOLS, max_tokens=8)
    assert runner.send_chat_completion_request(request).usage.prompt_tokens > 10
    assert request.messages[2] == messages[2]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"tool_schemas": ["{"]}, "`tool_schemas\\[0\\]` is not JSON"),
        ({"tool_schemas": [{"type": "function"}]}, "function"),
        ({"tool_schemas": [NOW, NOW]}, "second one that is called \"now\""),
        ({"tool_schemas": [{"name": "a b"}]}, "letters, digits"),
        ({"tool_choice": "required"}, "asks for a call"),
        ({"tool_schemas": TOOLS, "tool_choice": "sometimes"}, "must be \"none\""),
        ({"tool_schemas": TOOLS, "tool_choice": {"type": "function", "function": {"name": "walk"}}}, "\"walk\""),
    ],
)
def test_a_wrong_tool_is_named(options: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidArgumentError, match=message):
        ask(**options)


def test_objects_show_themselves() -> None:
    call = ToolCallResponse(0, "call_1", "function", CalledFunction("now", "{}"))
    assert repr(call) == "ToolCallResponse(index=0, id='call_1', type='function', function=CalledFunction(name='now', arguments='{}'))"
    assert call == ToolCallResponse(0, "call_1", "function", CalledFunction("now", "{}"))


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with serving("--chat-template", template(HERMES)) as running:
        yield running


@pytest.fixture(scope="module")
def thinker() -> Iterator[Server]:
    with serving("--chat-template", template(THINKING)) as running:
        yield running


def chat(server: Server, **options: Any) -> dict[str, Any]:
    return server.chat(**{"tools": TOOLS, "max_tokens": 200, "temperature": 1, "seed": 2, **options}).json["choices"][0]


def test_the_format_is_shown(server: Server) -> None:
    assert server.get("/v1/models").json["data"][0]["tool_format"] == "hermes"
    with serving() as generic:
        assert generic.get("/v1/models").json["data"][0]["tool_format"] == "generic"
        text = generic.post("/apply-template", {"messages": HELLO, "tools": TOOLS}).json["prompt"]
        assert '"name":"weather"' in text and "<tool_call>" in text
        assert "weather" not in generic.post("/apply-template", {"messages": HELLO, "tools": TOOLS, "tool_choice": "none"}).json["prompt"]


def test_a_chat_calls(server: Server) -> None:
    choice = chat(server, tool_choice={"type": "function", "function": {"name": "weather"}}, parallel_tool_calls=False)
    assert choice["finish_reason"] == "tool_calls" and choice["message"]["content"] is None
    (call,) = choice["message"]["tool_calls"]
    assert call["type"] == "function" and fits("weather", call["function"]["arguments"])
    allowed = {"type": "allowed_tools", "allowed_tools": {"mode": "required", "tools": [TOOLS[1]]}}
    choice = chat(server, tool_choice=allowed, parallel_tool_calls=False)
    (call,) = choice["message"]["tool_calls"]
    assert call["function"]["name"] == "now" and fits("now", call["function"]["arguments"])
    assert "tool_calls" not in chat(server, tool_choice="none", max_tokens=30)["message"]


def test_a_streamed_chat_calls(server: Server) -> None:
    body = {"messages": HELLO, "tools": TOOLS, "tool_choice": "required", "max_tokens": 200, "temperature": 1, "seed": 4}
    chunks = [json.loads(event)["choices"][0] for event in server.events("/v1/chat/completions", body)[:-1]]
    parts = [part for chunk in chunks for part in chunk["delta"].get("tool_calls", [])]
    openers = [part for part in parts if "id" in part]
    assert [part["index"] for part in openers] == list(range(len(openers))) and openers
    assert all(part["type"] == "function" and part["function"]["name"] for part in openers)
    if chunks[-1]["finish_reason"] == "tool_calls":
        for opener in openers:
            own = "".join(part["function"]["arguments"] for part in parts if part["index"] == opener["index"])
            assert fits(opener["function"]["name"], own)


def test_a_message_of_anthropics_form_calls(server: Server) -> None:
    choice = {"type": "tool", "name": "weather", "disable_parallel_tool_use": True}
    body = {"messages": HELLO, "tools": ANTHROPIC, "tool_choice": choice, "max_tokens": 200}
    message = server.post("/v1/messages", body).json
    assert message["stop_reason"] == "tool_use", message
    (block,) = message["content"]
    assert block["type"] == "tool_use" and fits("weather", json.dumps(block["input"]))
    events = [json.loads(event) for event in server.events("/v1/messages", body)]
    start = next(event for event in events if event["type"] == "content_block_start")
    assert start["index"] == 0 and start["content_block"]["name"] == "weather" and start["content_block"]["input"] == {}
    partial = "".join(event["delta"]["partial_json"] for event in events if event["type"] == "content_block_delta")
    assert fits("weather", partial)
    assert events[-2]["delta"]["stop_reason"] == "tool_use"
    back = [
        *HELLO,
        {"role": "assistant", "content": [{"type": "text", "text": "I look."}, block]},
        {"role": "user", "content": [{"type": "tool_result", "tool_use_id": block["id"], "content": [{"type": "text", "text": "rain"}]}, {"type": "text", "text": "And?"}]},
    ]
    reply = server.post("/v1/messages", {"messages": back, "tools": ANTHROPIC, "max_tokens": 5})
    assert reply.status == 200, reply.body


def test_a_response_calls(server: Server) -> None:
    body = {"input": "Hello", "tools": RESPONSES, "tool_choice": {"type": "function", "name": "weather"}, "parallel_tool_calls": False}
    body["max_output_tokens"] = 200
    response = server.post("/v1/responses", body).json
    (item,) = response["output"]
    assert item["type"] == "function_call" and fits(item["name"], item["arguments"]) and response["status"] == "completed"
    events = [json.loads(event) for event in server.events("/v1/responses", body)]
    names = [event["type"] for event in events]
    assert names[:3] == ["response.created", "response.in_progress", "response.output_item.added"]
    assert names[-3:] == ["response.function_call_arguments.done", "response.output_item.done", "response.completed"]
    deltas = "".join(event["delta"] for event in events if event["type"] == "response.function_call_arguments.delta")
    assert deltas == events[-3]["arguments"] == events[-1]["response"]["output"][0]["arguments"]
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    output = {"type": "function_call_output", "call_id": item["call_id"], "output": "rain"}
    following = {"input": [output], "previous_response_id": response["id"], "max_output_tokens": 4, "tools": RESPONSES}
    assert server.post("/v1/responses", following).status == 200
    alone = {"input": [HELLO[0], {"type": "function_call", **{key: item[key] for key in ("call_id", "name", "arguments")}}, output], "max_output_tokens": 4}
    assert server.post("/v1/responses", alone).status == 200


def test_reasoning_stands_apart(thinker: Server) -> None:
    body = {"messages": HELLO, "max_tokens": 30, "temperature": 1, "seed": 1}
    reply = thinker.post("/v1/chat/completions", body).json
    message = reply["choices"][0]["message"]
    # A random model does not end its thoughts.
    assert message["content"] == "" and message["reasoning_content"] == message["reasoning"] != ""
    assert reply["usage"]["completion_tokens_details"]["reasoning_tokens"] == 30
    chunks = [json.loads(event)["choices"][0]["delta"] for event in thinker.events("/v1/chat/completions", body)[:-1]]
    assert "".join(chunk.get("reasoning_content") or "" for chunk in chunks) == message["reasoning_content"]
    assert all(not chunk.get("content") for chunk in chunks)
    events = [json.loads(event) for event in thinker.events("/v1/messages", {"messages": HELLO, "max_tokens": 10})]
    assert next(event for event in events if event["type"] == "content_block_start")["content_block"]["type"] == "thinking"
    response = thinker.post("/v1/responses", {"input": "Hello", "max_output_tokens": 10}).json
    assert [item["type"] for item in response["output"]] == ["reasoning", "message"]


@pytest.mark.parametrize(
    ("options", "param"),
    [
        ({"tools": [{"type": "web_search"}]}, "tools[0].type"),
        ({"tools": [{"type": "function", "function": {"name": ""}}]}, "tools[0].function.name"),
        ({"tools": [{"type": "function", "function": {"name": "a", "parameters": []}}]}, "tools[0].function.parameters"),
        ({"tools": TOOLS * 70}, "tools"),
        ({"tools": TOOLS, "tool_choice": "maybe"}, "tool_choice"),
        ({"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "walk"}}}, "tool_choice"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"messages": [{"role": "user", "content": "x", "tool_calls": [{}]}]}, "messages[0].tool_calls"),
        ({"messages": [{"role": "assistant", "tool_calls": [{"id": "1"}]}]}, "messages[0].tool_calls[0].function.name"),
        ({"functions": [WEATHER]}, "functions"),
    ],
    ids=lambda value: str(value)[:60],
)
def test_what_cannot_be_honoured_is_named(server: Server, options: dict[str, Any], param: str) -> None:
    reply = server.chat(**options)
    assert (reply.status, reply.error["param"]) == (400, param), reply.error
