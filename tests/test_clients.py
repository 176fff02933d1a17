"""The server through other people's clients. Skipped where one is not installed; `make test-clients` installs them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from test_server import Server, serving

from mistral_paged.default_model import default_model

QUESTION = "What is 2+2?"
"""The default model ends its answer by itself."""
CHAT = [{"role": "user", "content": QUESTION}]

openai = pytest.importorskip("openai")
anthropic = pytest.importorskip("anthropic")


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


@pytest.mark.parametrize("name", ["langchain_openai", "llama_index.llms.openai_like", "litellm", "instructor"])
def test_other_clients_get_an_answer(server: Server, name: str) -> None:
    module = pytest.importorskip(name)
    base = f"http://127.0.0.1:{server.port}/v1"
    if name == "langchain_openai":
        chat = module.ChatOpenAI(model="default", base_url=base, api_key="secret", max_completion_tokens=6, temperature=0)
        text = chat.invoke(QUESTION).content
        assert "".join(part.content for part in chat.stream(QUESTION)) == text
    elif name == "litellm":
        request = {
            "model": "openai/default",
            "messages": CHAT,
            "api_base": base,
            "api_key": "secret",
            "max_tokens": 6,
            "temperature": 0,
        }
        text = module.completion(**request).choices[0].message.content
        assert "".join(part.choices[0].delta.content or "" for part in module.completion(**request, stream=True)) == text
    elif name == "instructor":
        pytest.skip("needs structured output")
    else:
        llm = module.OpenAILike(
            model="default", api_base=base, api_key="secret", is_chat_model=True, max_tokens=60, temperature=0
        )
        text = str(llm.complete(QUESTION))
        assert str(list(llm.stream_complete(QUESTION))[-1].text) == text
    assert text
