"""The server through other people's clients. Skipped where one is not installed; `make test-clients` installs them."""

from __future__ import annotations

import asyncio
import json
import os
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

import pytest
from test_server import Server, serving

from mistral_paged import ChatCompletionRequest, CompletionRequest, Runner, Which
from mistral_paged.default_model import default_model

QUESTION = "What is 2+2?"
"""The default model ends its answer by itself."""
CHAT = [{"role": "user", "content": QUESTION}]
KEY = {"authorization": "Bearer secret"}
CITY = '```json\n{{"name": "{}", "country": "{}"}}\n```'

# Clients warn of what is to come in other packages.
pytestmark = pytest.mark.filterwarnings("default")

openai = pytest.importorskip("openai")
anthropic = pytest.importorskip("anthropic")


@pytest.fixture(autouse=True, scope="module")
def offline() -> Iterator[None]:
    """Clients that would fetch prices, tokenizers or data sets are told not to, and any that leave the machine are caught."""
    reached: list[Any] = []
    connect = socket.socket.connect

    def checked(self: socket.socket, address: Any) -> None:
        if self.family != socket.AF_UNIX and address[0] not in ("127.0.0.1", "::1"):
            reached.append(address)
            raise OSError(f"a client reaches out to {address}")
        connect(self, address)

    def resolve(host: Any, *arguments: Any, **options: Any) -> Any:
        if host not in ("127.0.0.1", "localhost", "::1", None, b"127.0.0.1", ""):
            reached.append(host)
            raise socket.gaierror(f"a client reaches out to {host!r}")
        return resolved(host, *arguments, **options)

    resolved = socket.getaddrinfo
    with pytest.MonkeyPatch.context() as patch:
        for name in ("HF_HUB_OFFLINE", "HF_DATASETS_OFFLINE", "LITELLM_LOCAL_MODEL_COST_MAP"):
            patch.setenv(name, "True")
        patch.setattr(socket.socket, "connect", checked)
        patch.setattr(socket, "getaddrinfo", resolve)
        yield
    assert not reached


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with serving("--disable-access-log", "--api-key", "secret", model=str(default_model()), memory="256") as server:
        yield server


@pytest.fixture
def client(server: Server) -> Iterator[Any]:
    with openai.OpenAI(base_url=f"http://127.0.0.1:{server.port}/v1", api_key="secret", max_retries=0) as client:
        yield client


@pytest.fixture
def claude(server: Server) -> Iterator[Any]:
    with anthropic.Anthropic(base_url=f"http://127.0.0.1:{server.port}", api_key="secret", max_retries=0) as client:
        yield client


def test_openai_chats_and_streams_the_same(client: Any) -> None:
    request = {"model": "default", "messages": CHAT, "max_completion_tokens": 8, "temperature": 0, "seed": 1}
    whole = client.chat.completions.create(**request, logprobs=True, top_logprobs=2)
    text = whole.choices[0].message.content
    assert whole.usage.total_tokens == whole.usage.prompt_tokens + whole.usage.completion_tokens
    assert len(whole.choices[0].logprobs.content) == whole.usage.completion_tokens
    parts = list(client.chat.completions.create(**request, stream=True, stream_options={"include_usage": True}))
    assert "".join(part.choices[0].delta.content or "" for part in parts if part.choices) == text
    assert parts[-1].usage.completion_tokens == whole.usage.completion_tokens


def test_openai_streams_with_its_own_helper(client: Any) -> None:
    with client.chat.completions.stream(model="default", messages=CHAT, max_tokens=60, temperature=0) as stream:
        for _event in stream:
            pass
        final = stream.get_final_completion()
    whole = client.chat.completions.create(model="default", messages=CHAT, max_tokens=60, temperature=0)
    assert final.choices[0].message.content == whole.choices[0].message.content


def test_openai_completes_lists_models_and_raises_its_own_errors(client: Any) -> None:
    answer = client.completions.create(model="default", prompt=["Hello", "World"], max_tokens=3, temperature=0, logprobs=1)
    assert [choice.index for choice in answer.choices] == [0, 1]
    assert len(answer.choices[0].logprobs.tokens) == 3
    assert "default" in [model.id for model in client.models.list()]
    assert client.models.retrieve("default").root
    with pytest.raises(openai.NotFoundError):
        client.chat.completions.create(model="gpt-4", messages=CHAT)
    with pytest.raises(openai.BadRequestError) as caught:
        client.chat.completions.create(model="default", messages=CHAT, temperature=-1)
    assert caught.value.param == "temperature"
    with pytest.raises(openai.AuthenticationError):
        client.with_options(api_key="wrong").models.list()


def test_openai_responses(client: Any) -> None:
    response = client.responses.create(model="default", input=QUESTION, max_output_tokens=60, temperature=0)
    assert response.output_text == response.output[0].content[0].text
    assert client.responses.retrieve(response.id).output_text == response.output_text
    events = list(client.responses.create(model="default", input=QUESTION, max_output_tokens=60, temperature=0, stream=True))
    assert "".join(event.delta for event in events if event.type == "response.output_text.delta") == response.output_text
    with client.responses.stream(model="default", input=QUESTION, max_output_tokens=60, temperature=0) as stream:
        for _event in stream:
            pass
        assert stream.get_final_response().output_text == response.output_text
    second = client.responses.create(model="default", input="More", previous_response_id=response.id, max_output_tokens=3)
    assert second.previous_response_id == response.id
    client.responses.delete(response.id)
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(response.id)


def test_anthropic_creates_streams_and_counts(claude: Any) -> None:
    request = {"model": "default", "max_tokens": 8, "messages": CHAT, "system": "Be short.", "extra_body": {"temperature": 0}}
    whole = claude.messages.create(**request)
    with claude.messages.stream(**request) as stream:
        text = "".join(stream.text_stream)
        final = stream.get_final_message()
    assert text == final.content[0].text == whole.content[0].text
    assert final.stop_reason == whole.stop_reason
    count = claude.messages.count_tokens(model="default", messages=CHAT, system="Be short.")
    assert count.input_tokens == whole.usage.input_tokens + whole.usage.cache_read_input_tokens
    with pytest.raises(anthropic.NotFoundError):
        claude.messages.create(**{**request, "model": "claude"})
    with pytest.raises(anthropic.BadRequestError):
        claude.messages.create(**{**request, "extra_body": {"temperature": -1}})


@pytest.fixture(scope="module")
def direct(server: Server) -> Iterator[Runner]:
    """The same model without a server, in the same number of threads."""
    with Runner(which=Which.GGUF(str(default_model())), pa_gpu_mem=256, num_threads=1) as runner:
        yield runner


def said(runner: Runner, messages: list[dict[str, str]] = CHAT, max_tokens: int = 60) -> str:
    """What the model says to this, greedily, through the Python API."""
    request = ChatCompletionRequest(messages=messages, model="default", max_tokens=max_tokens, temperature=0)
    text = runner.send_chat_completion_request(request).choices[0].message.content
    assert text
    return text


def base_url(server: Server) -> str:
    return f"http://127.0.0.1:{server.port}/v1"


def test_langchain(server: Server, direct: Runner) -> None:
    module = pytest.importorskip("langchain_openai")

    def ids(text: str) -> list[int]:
        return server.post("/tokenize", {"prompt": text}, KEY).json["tokens"]

    chat = module.ChatOpenAI(
        model="default",
        base_url=base_url(server),
        api_key="secret",
        max_completion_tokens=60,
        temperature=0,
        stream_usage=True,
        custom_get_token_ids=ids,
    )
    want = said(direct)
    answer = chat.invoke(QUESTION)
    assert answer.content == want
    assert answer.response_metadata["finish_reason"] == "stop"
    parts = list(chat.stream(QUESTION))
    assert "".join(part.content for part in parts) == want
    usage = [part.usage_metadata for part in parts if part.usage_metadata]
    assert usage[-1]["output_tokens"] == answer.usage_metadata["output_tokens"]
    assert [each.content for each in chat.batch([QUESTION, "Say hello."])] == [
        want,
        said(direct, [{"role": "user", "content": "Say hello."}]),
    ]
    assert chat.get_num_tokens(QUESTION) == len(direct.tokenize_text(QUESTION, add_special_tokens=True))
    with_logprobs = chat.bind(logprobs=True, top_logprobs=2).invoke(QUESTION)
    assert "".join(token["token"] for token in with_logprobs.response_metadata["logprobs"]["content"][:-1]) == want


def test_llama_index(server: Server, direct: Runner) -> None:
    module = pytest.importorskip("llama_index.llms.openai_like")
    llms = pytest.importorskip("llama_index.core.llms")
    settings = {"model": "default", "api_base": base_url(server), "api_key": "secret", "max_tokens": 60, "temperature": 0}
    chat = module.OpenAILike(is_chat_model=True, **settings)
    want = said(direct)
    assert str(chat.complete(QUESTION)) == want
    assert list(chat.stream_complete(QUESTION))[-1].text == want
    assert chat.chat([llms.ChatMessage(role="user", content=QUESTION)]).message.content == want
    continued = CompletionRequest(prompt="One, two,", model="default", max_tokens=60, temperature=0)
    text = direct.send_completion_request(continued).choices[0].text
    assert str(module.OpenAILike(is_chat_model=False, **settings).complete("One, two,")) == text


def test_litellm(server: Server, direct: Runner) -> None:
    litellm = pytest.importorskip("litellm")
    request = {"messages": CHAT, "api_base": base_url(server), "api_key": "secret", "max_tokens": 60, "temperature": 0}
    want = said(direct)
    assert litellm.completion(model="openai/default", **request).choices[0].message.content == want
    parts = litellm.completion(model="openai/default", stream=True, **request)
    assert "".join(part.choices[0].delta.content or "" for part in parts) == want
    # The same server under another of its provider names, and in Anthropic's form.
    assert litellm.completion(model="hosted_vllm/default", **request).choices[0].message.content == want
    request["api_base"] = f"http://127.0.0.1:{server.port}"
    assert litellm.completion(model="anthropic/default", **request).choices[0].message.content == want
    with pytest.raises(litellm.ContextWindowExceededError):
        litellm.completion(
            model="openai/default",
            messages=[{"role": "user", "content": "word " * 10_000}],
            api_base=base_url(server),
            api_key="secret",
        )


@contextmanager
def proxy(server: Server, folder: Path) -> Iterator[str]:
    """LiteLLM's proxy before the server."""
    config = {
        "model_list": [
            {
                "model_name": "small",
                "litellm_params": {"model": "openai/default", "api_base": base_url(server), "api_key": "secret"},
            }
        ],
        "general_settings": {"master_key": "sk-proxy"},
    }
    (folder / "config.yaml").write_text(json.dumps(config))
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [Path(sys.executable).with_name("litellm"), "--config", "config.yaml", "--host", "127.0.0.1", "--port", str(port)]
    # Whatever is to leave the machine ends at a port where nobody listens.
    nowhere = {"HTTP_PROXY": "http://127.0.0.1:9", "HTTPS_PROXY": "http://127.0.0.1:9", "NO_PROXY": "127.0.0.1"}
    with (folder / "log").open("wb") as log:
        process = subprocess.Popen(command, cwd=folder, stdout=log, stderr=log, env={**os.environ, **nowhere})
    try:
        for _ in range(600):
            try:
                urllib.request.urlopen(f"http://127.0.0.1:{port}/health/liveliness", timeout=5).close()
                break
            except OSError:
                assert process.poll() is None, (folder / "log").read_text()[-5000:]
                time.sleep(0.2)
        yield f"http://127.0.0.1:{port}"
    finally:
        process.terminate()
        process.wait(30)


def test_litellms_proxy(server: Server, direct: Runner, tmp_path: Path) -> None:
    pytest.importorskip("litellm.proxy.proxy_server")
    want = said(direct)
    request = {"model": "small", "messages": CHAT, "max_tokens": 60, "temperature": 0}
    with proxy(server, tmp_path) as url, openai.OpenAI(base_url=f"{url}/v1", api_key="sk-proxy", max_retries=0) as client:
        assert client.chat.completions.create(**request).choices[0].message.content == want
        parts = client.chat.completions.create(**request, stream=True)
        assert "".join(part.choices[0].delta.content or "" for part in parts if part.choices) == want
        with pytest.raises(openai.BadRequestError) as caught:
            client.chat.completions.create(**{**request, "temperature": -1})
        assert "temperature" in str(caught.value)
        with anthropic.Anthropic(base_url=url, api_key="sk-proxy", max_retries=0) as claude:
            message = claude.messages.create(model="small", max_tokens=60, messages=CHAT, extra_body={"temperature": 0})
            assert message.content[0].text == want


def test_instructor(server: Server, direct: Runner) -> None:
    """Asked for JSON in so many words the model may write it; by a tool or a schema it cannot but do so."""
    instructor = pytest.importorskip("instructor")
    pydantic = pytest.importorskip("pydantic")

    class City(pydantic.BaseModel):
        name: str
        country: str

    shown = [{"role": "user", "content": "Rome"}, {"role": "assistant", "content": CITY.format("Rome", "Italy")}]
    shown += [{"role": "user", "content": "Oslo"}, {"role": "assistant", "content": CITY.format("Oslo", "Norway")}]
    messages = [*shown, {"role": "user", "content": "Paris"}]
    sent: list[dict[str, Any]] = []
    with openai.OpenAI(base_url=base_url(server), api_key="secret", max_retries=0) as plain:
        client = instructor.from_openai(plain, mode=instructor.Mode.MD_JSON)
        client.on("completion:kwargs", lambda **kwargs: sent.append(kwargs))
        request = {"model": "default", "messages": messages, "max_tokens": 60, "temperature": 0, "max_retries": 0}
        city, completion = client.chat.completions.create_with_completion(response_model=City, **request)
        text = said(direct, sent[0]["messages"])
        assert completion.choices[0].message.content == text
        assert city.model_dump() == json.loads(text[text.index("{") : text.rindex("}") + 1])
        for mode in (instructor.Mode.TOOLS, instructor.Mode.JSON, instructor.Mode.JSON_SCHEMA, instructor.Mode.TOOLS_STRICT):
            held = instructor.from_openai(plain, mode=mode).chat.completions.create(
                response_model=City, **{**request, "max_tokens": 200}
            )
            assert isinstance(held, City), mode


WEATHER = {
    "name": "weather",
    "description": "The weather in a city.",
    "parameters": {
        "type": "object",
        "properties": {"city": {"type": "string", "enum": ["Oslo", "Rome"]}},
        "required": ["city"],
        "additionalProperties": False,
    },
}
ASKED = [{"role": "user", "content": "What is the weather in Oslo?"}]


def test_openai_parses_and_loops_through_tools(server: Server) -> None:
    pydantic = pytest.importorskip("pydantic")

    class City(pydantic.BaseModel):
        name: str
        country: str

    with openai.OpenAI(base_url=base_url(server), api_key="secret", max_retries=0) as client:
        request: dict[str, Any] = {"model": "default", "max_tokens": 100, "temperature": 0}
        parsed = client.chat.completions.parse(messages=ASKED, response_format=City, **request)
        assert isinstance(parsed.choices[0].message.parsed, City)
        tools = [{"type": "function", "function": {**WEATHER, "strict": True}}]
        with client.chat.completions.stream(
            messages=ASKED, tools=tools, tool_choice="required", parallel_tool_calls=False, **request
        ) as stream:
            names = [event.type for event in stream]
            final = stream.get_final_completion().choices[0].message
        assert "tool_calls.function.arguments.done" in names
        (call,) = final.tool_calls[:1]
        assert call.function.name == "weather"
        assert json.loads(call.function.arguments)["city"] in ("Oslo", "Rome")
        said = {"role": "assistant", "content": None, "tool_calls": [call.model_dump(exclude={"function": {"parsed_arguments"}})]}
        result = {"role": "tool", "tool_call_id": call.id, "content": "Snow."}
        answer = client.chat.completions.create(messages=[*ASKED, said, result], tools=tools, tool_choice="none", **request)
        assert answer.choices[0].message.content
        flat = [{"type": "function", **WEATHER, "strict": True}]
        response = client.responses.create(
            model="default", input="Oslo?", tools=flat, tool_choice="required", parallel_tool_calls=False, max_output_tokens=100
        )
        assert response.output[0].type == "function_call"
        assert response.output[0].name == "weather"
        structured = client.responses.parse(
            model="default", input="Oslo?", text_format=City, max_output_tokens=100, temperature=0
        )
        assert isinstance(structured.output_parsed, City)


def test_anthropic_uses_a_tool(server: Server) -> None:
    tools = [{"name": "weather", "description": "The weather in a city.", "input_schema": WEATHER["parameters"]}]
    with anthropic.Anthropic(base_url=f"http://127.0.0.1:{server.port}", api_key="secret", max_retries=0) as client:
        request: dict[str, Any] = {"model": "default", "max_tokens": 100, "tools": tools}
        message = client.messages.create(
            messages=ASKED, tool_choice={"type": "any", "disable_parallel_tool_use": True}, **request
        )
        block = next(block for block in message.content if block.type == "tool_use")
        assert message.stop_reason == "tool_use"
        assert block.input["city"] in ("Oslo", "Rome")
        with client.messages.stream(messages=ASKED, tool_choice={"type": "tool", "name": "weather"}, **request) as stream:
            final = stream.get_final_message()
        assert any(block.type == "tool_use" and block.input["city"] in ("Oslo", "Rome") for block in final.content)
        said = {"role": "assistant", "content": [block.model_dump() for block in message.content]}
        result = {"role": "user", "content": [{"type": "tool_result", "tool_use_id": block.id, "content": "Snow."}]}
        answer = client.messages.create(messages=[*ASKED, said, result], tool_choice={"type": "none"}, **request)
        assert answer.content[0].type == "text"
        assert answer.content[0].text


def test_langchain_binds_tools(server: Server) -> None:
    langchain = pytest.importorskip("langchain_openai")
    pydantic = pytest.importorskip("pydantic")

    class City(pydantic.BaseModel):
        """A city."""

        name: str
        country: str

    model = langchain.ChatOpenAI(model="default", base_url=base_url(server), api_key="secret", temperature=0, max_tokens=100)
    bound = model.bind_tools([{"type": "function", "function": WEATHER}], tool_choice="required")
    (call,) = bound.invoke(ASKED).tool_calls[:1]
    assert call["name"] == "weather"
    assert call["args"]["city"] in ("Oslo", "Rome")
    parts = list(bound.stream(ASKED))
    whole = parts[0]
    for part in parts[1:]:
        whole += part
    assert whole.tool_calls[0]["args"] == call["args"]
    for method in ("json_schema", "function_calling"):
        assert isinstance(model.with_structured_output(City, method=method).invoke("Oslo"), City)


@pytest.mark.parametrize("api", ["OpenAIChatCompletionsModel", "OpenAIResponsesModel"])
def test_openai_agents_loops_through_a_tool(server: Server, api: str) -> None:
    agents = pytest.importorskip("agents")
    agents.set_tracing_disabled(True)
    asked: list[str] = []

    def weather(city: Literal["Oslo", "Rome"]) -> str:
        """The weather in a city."""
        asked.append(city)
        return "Snow."

    async def loops() -> list[Any]:
        async with openai.AsyncOpenAI(base_url=base_url(server), api_key="secret", max_retries=0) as client:
            # Behind its first call an agent asks for none.
            settings = agents.ModelSettings(tool_choice="required", parallel_tool_calls=False, temperature=0, max_tokens=100)
            agent = agents.Agent(
                name="Weather",
                instructions="You know the weather.",
                model=getattr(agents, api)(model="default", openai_client=client),
                model_settings=settings,
                tools=[agents.function_tool(weather)],
            )
            whole = await agents.Runner.run(agent, ASKED[0]["content"], max_turns=3)
            streamed = agents.Runner.run_streamed(agent, ASKED[0]["content"], max_turns=3)
            kinds = [event.type async for event in streamed.stream_events()]
            assert "raw_response_event" in kinds
            return [whole, streamed]

    for result in asyncio.run(loops()):
        kinds = [item.type for item in result.new_items]
        assert kinds == ["tool_call_item", "tool_call_output_item", "message_output_item"], kinds
        assert result.new_items[1].output == "Snow."
        assert isinstance(result.final_output, str)
        assert result.final_output
    assert len(asked) == 2
    assert set(asked) <= {"Oslo", "Rome"}


TASKS = Path(__file__).parent / "lm_eval_tasks"


def scores(task: str, model: Any, is_chat: bool) -> tuple[dict[str, Any], list[Any]]:
    """What lm-eval makes of a task: the scores, and the model's answers."""
    from lm_eval.evaluator import simple_evaluate
    from lm_eval.tasks import TaskManager

    manager = TaskManager(include_path=str(TASKS), include_defaults=False)
    done = simple_evaluate(
        model=model, tasks=[task], task_manager=manager, apply_chat_template=is_chat, bootstrap_iters=0, log_samples=True
    )
    numbers = {name: value for name, value in done["results"][task].items() if isinstance(value, float)}
    answers = [sample["filtered_resps"] for sample in sorted(done["samples"][task], key=lambda sample: sample["doc_id"])]
    return numbers, answers


@pytest.mark.parametrize(
    ("task", "is_chat"),
    [
        ("conversations_choice", False),
        ("conversations_perplexity", False),
        ("conversations_reply", False),
        ("conversations_reply", True),
    ],
)
def test_lm_evals_scores_are_those_of_the_python_api(
    server: Server, direct: Runner, monkeypatch: pytest.MonkeyPatch, task: str, is_chat: bool
) -> None:
    pytest.importorskip("lm_eval")
    from lm_eval.models import openai_completions
    from lm_eval_direct import Direct

    monkeypatch.setenv("OPENAI_API_KEY", "secret")
    if is_chat:
        remote = openai_completions.LocalChatCompletion(
            model="default", base_url=f"{base_url(server)}/chat/completions", eos_string="<|im_end|>"
        )
    else:
        remote = openai_completions.LocalCompletionsAPI(
            model="default", base_url=f"{base_url(server)}/completions", tokenizer_backend="remote", auth_token="secret"
        )
    info = server.send("GET", "/tokenizer_info", headers=KEY).json
    bos, eos = (direct.tokenize_text(info[name], add_special_tokens=False)[0] for name in ("bos_token", "eos_token"))
    numbers, answers = scores(task, remote, is_chat)
    assert len(answers) == 12
    assert numbers
    assert (numbers, answers) == scores(task, Direct(direct, bos, eos, info["eos_token"]), is_chat)
