"""Images from Python, over HTTP and from the command line, compared with the answers of transformers."""

from __future__ import annotations

import asyncio
import base64
import copy
import http.server
import json
import pickle
import threading
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import anthropic
import mmproj
import numpy
import openai
import PIL.Image
import pytest
from conftest import GOLDEN, ids, runner_of, wait_until_idle
from test_server import Server, serving

from mistral_paged import (
    ArchitectureError,
    ChatCompletionRequest,
    ChatCompletionResponse,
    ModelDType,
    MultimodalArchitecture,
    RgbImage,
    Runner,
    Which,
    aio,
    cli,
    loading,
    quantize,
)

MODEL = "idefics3"
ARCHITECTURES = {
    "llava": MultimodalArchitecture.LLaVA,
    "llava_next": MultimodalArchitecture.LLaVANext,
    "idefics2": MultimodalArchitecture.Idefics2,
    "idefics3": MultimodalArchitecture.Idefics3,
    "qwen2_vl": MultimodalArchitecture.Qwen2VL,
    "qwen2_5_vl": MultimodalArchitecture.Qwen2_5VL,
    "qwen3_vl": MultimodalArchitecture.Qwen3VL,
    "gemma3_vision": MultimodalArchitecture.Gemma3,
    "mistral3": MultimodalArchitecture.Mistral3,
}


def folder(model: str = MODEL) -> Path:
    return GOLDEN / "vision" / model


@cache
def golden(model: str = MODEL) -> list[dict[str, Any]]:
    return json.loads((folder(model) / "golden.json").read_text())["cases"]


def load(model: str = MODEL, **options: Any) -> Runner:
    fields = {name: options.pop(name) for name in ("arch", "max_edge", "encoder_cache_memory_bytes") if name in options}
    which = Which.MultimodalPlain(str(folder(model)), dtype=ModelDType.F32, **fields)
    return Runner(which=which, pa_ctxt_len=2048, num_threads=2, **options)


@cache
def seeing(model: str = MODEL) -> Runner:
    return load(model)


def with_images(case: dict[str, Any], images: list[Any]) -> list[dict[str, Any]]:
    """The case's messages with these images in place."""
    rest = iter(images)
    fill = lambda part: {"type": "image", "image": next(rest)} if part["type"] == "image" else part  # noqa: E731
    return [{**message, "content": [fill(part) for part in message["content"]]} for message in case["messages"]]


def ask(messages: Any, runner: Runner | None = None, **options: Any) -> ChatCompletionResponse:
    options = {"max_tokens": 8, "temperature": 0, "ignore_eos": True, "logprobs": True, **options}
    return (runner or seeing()).send_chat_completion_request(ChatCompletionRequest(messages, "default", **options))


def about(image: Any, text: str = "describe the image") -> list[dict[str, Any]]:
    return [{"role": "user", "content": [{"type": "image", "image": image}, {"type": "text", "text": text}]}]


def file(number: int = 0, model: str = MODEL) -> Path:
    return folder(model) / f"image{number}.png"


def data_url(path: Path) -> str:
    return "data:image/png;base64," + base64.b64encode(path.read_bytes()).decode()


@pytest.mark.parametrize("model", ARCHITECTURES)
def test_answers_are_those_of_transformers(model: str) -> None:
    runner = load(model, arch=ARCHITECTURES[model])
    for case in golden(model):
        images = [folder(model) / name for name in case["images"]]
        expected = case["greedy_ids"]
        response = ask(with_images(case, images), runner, max_tokens=len(expected))
        assert ids(response) == expected
        assert response.usage.prompt_tokens == len(case["input_ids"])
        assert runner.tokenize_text(with_images(case, images)) == case["input_ids"]
    runner.close()


def test_an_image_is_the_same_however_it_is_given() -> None:
    path = file()
    pillow = PIL.Image.open(path)
    pixels = numpy.asarray(pillow.convert("RGB"))
    with_alpha = numpy.dstack([pixels, numpy.full(pixels.shape[:2], 7, numpy.uint8)])
    expected = RgbImage(path)
    assert (expected.height, expected.width) == pixels.shape[:2]
    assert expected.tobytes() == pixels.tobytes()
    content = path.read_bytes()
    given: list[Any] = [pillow, pixels, with_alpha, pixels.copy(order="F"), str(path), content, bytearray(content)]
    given += [memoryview(content), path.as_uri(), data_url(path), expected]
    answer = ids(ask(about(path)))
    for image in given:
        assert RgbImage(image) == expected, type(image)
        assert ids(ask(about(image))) == answer, type(image)
    for part in [
        {"type": "image_url", "image_url": {"url": data_url(path), "detail": "auto"}},
        {"type": "image_url", "image_url": str(path)},
    ]:
        messages = [{"role": "user", "content": [part, {"type": "text", "text": "describe the image"}]}]
        assert ids(ask(messages)) == answer
    grey = pixels[:, :, 0]
    assert RgbImage(grey) == RgbImage(numpy.dstack([grey, grey, grey]))
    assert RgbImage(grey) != expected


def test_ten_turns_about_an_image_encode_it_once() -> None:
    runner = load()
    messages = about(file())
    encoded, cached = [], []
    for turn in range(10):
        response = ask(messages, runner, max_tokens=4)
        encoded.append(response.usage.encoded_images)
        details = response.usage.prompt_tokens_details
        cached.append(details.cached_tokens if details is not None else 0)
        messages += [
            {"role": "assistant", "content": response.choices[0].message.content},
            {"role": "user", "content": f"and {turn}?"},
        ]
    assert encoded == [1] + [0] * 9
    assert all(count > 0 for count in cached[1:])
    assert ask(about(file(1)), runner).usage.encoded_images == 1
    runner.close()


def test_max_edge_makes_images_smaller() -> None:
    large = PIL.Image.open(file(0, "qwen2_vl")).resize((448, 336))
    tokens = {edge: ask(about(large), load("qwen2_vl", max_edge=edge)).usage.prompt_tokens for edge in (None, 448, 56)}
    assert tokens[None] == tokens[448] > tokens[56]


def test_streams_and_asyncio_see_as_well() -> None:
    expected = ask(about(file())).choices[0].message.content
    request = ChatCompletionRequest(about(file()), "default", max_tokens=8, temperature=0, ignore_eos=True)
    streamed = ChatCompletionRequest(about(file()), "default", max_tokens=8, temperature=0, ignore_eos=True, stream=True)
    chunks = list(seeing().send_chat_completion_request(streamed))
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == expected
    assert chunks[-1].usage is not None

    async def both() -> list[ChatCompletionResponse]:
        return await asyncio.gather(seeing().achat(request), seeing().achat(request))

    assert [answer.choices[0].message.content for answer in asyncio.run(both())] == [expected] * 2


def test_tiles_are_made_beside_the_event_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    threads = []

    def submit(*arguments: Any) -> Any:
        threads.append(threading.get_ident())
        return aio_submit(*arguments)

    aio_submit = aio.submit
    monkeypatch.setattr(aio, "submit", submit)
    options = {"max_tokens": 8, "temperature": 0, "ignore_eos": True}
    image, text = (ChatCompletionRequest(messages, "default", **options) for messages in (about(file()), "describe the image"))

    async def work() -> int:
        await seeing().achat(text)
        assert (await seeing().achat(image)).choices[0].message.content == ask(about(file())).choices[0].message.content
        # A task that is cancelled while the other thread works leaves nothing behind.
        task = asyncio.ensure_future(seeing().achat(image))
        await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        return threading.get_ident()

    loop = asyncio.run(work())
    assert threads[0] == loop
    assert loop not in threads[1:]
    wait_until_idle(seeing())


def test_a_request_gives_its_images_back() -> None:
    request = ChatCompletionRequest(about(file()), "default", max_tokens=3, allowed_media_domains=["example.com"])
    assert request.messages[0]["content"][0] == {"type": "image", "image": RgbImage(file())}
    assert request.allowed_media_domains == ["example.com"]
    assert "RgbImage(width=" in repr(request)
    for other in (pickle.loads(pickle.dumps(request)), copy.copy(request), copy.deepcopy(request)):
        assert other == request
    assert request != ChatCompletionRequest(about(file(1)), "default", max_tokens=3, allowed_media_domains=["example.com"])
    image = RgbImage(file())
    assert pickle.loads(pickle.dumps(image)) == image == copy.copy(image) == copy.deepcopy(image)
    assert RgbImage.frombytes(image.width, image.height, image.tobytes()) == image
    response = ask(about(file()), keep=True)
    sequence = response.choices[0].sequence
    assert sequence is not None
    again = sequence.generate([{"role": "user", "content": "and now?"}], max_tokens=2, temperature=0)
    assert again.usage.encoded_images == 0


@pytest.mark.parametrize(
    ("image", "error", "message"),
    [
        ("missing.png", ValueError, r"messages\[0\]\['content'\]\[0\]\['image'\]`: missing.png"),
        (b"GIF but no image", ValueError, "no PNG, JPEG"),
        (b"", ValueError, "no PNG, JPEG"),
        (3, TypeError, "got int"),
        (None, ValueError, "is missing"),
        (numpy.zeros((4, 4), numpy.float32), ValueError, "array of float32; it must be uint8"),
        (numpy.zeros((4, 4, 2), numpy.uint8), ValueError, r"shape \[4, 4, 2\]"),
        (numpy.zeros((0, 4, 3), numpy.uint8), ValueError, "4 x 0 pixels"),
        ("https://example.com/a.png", ValueError, "allowed_media_domains"),
        ("data:image/png;base64,x*y", ValueError, "no base64"),
        ("file://host/x.png", ValueError, "no local path"),
    ],
)
def test_what_is_no_image_is_refused_by_name(image: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        ChatCompletionRequest(about(image), "default")


def test_parts_that_cannot_be_honoured_are_refused_by_name() -> None:
    url = data_url(file())
    for part, message in [
        ({"type": "image"}, "is missing"),
        ({"type": "image", "image": url, "size": 3}, "unknown key 'size'"),
        ({"type": "image_url", "image_url": {"url": url, "detail": "high"}}, "'detail' is 'high'"),
        ({"type": "image_url", "image_url": {}}, "has no 'url'"),
    ]:
        with pytest.raises(ValueError, match=message):
            ChatCompletionRequest([{"role": "user", "content": [part]}], "default")
    with pytest.raises(ValueError, match="loaded for text"):
        ask(about(file()), runner_of("text", "llama"))


class Redirecting(http.server.BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        self.send_response(302)
        self.send_header("location", "http://example.com/")
        self.end_headers()

    def log_message(self, *arguments: object) -> None:
        pass


def test_private_addresses_are_not_fetched() -> None:
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Redirecting) as local:
        threading.Thread(target=local.serve_forever, daemon=True).start()
        for host in ("127.0.0.1", "localhost"):
            with pytest.raises(ValueError, match="not one of the public internet"):
                RgbImage(f"http://{host}:{local.server_port}/a.png", allowed_media_domains=[host])
        local.shutdown()
    with pytest.raises(ValueError, match="is no host"):
        RgbImage("https://example.com/a.png", allowed_media_domains=["https://example.com"])


def test_the_selector_says_what_it_is() -> None:
    model = str(folder())
    which = Which.MultimodalPlain(model, MultimodalArchitecture.Idefics3, max_edge=64, encoder_cache_memory_bytes=1 << 20)
    assert Which.VisionPlain is Which.MultimodalPlain
    assert (which.max_edge, which.encoder_cache_memory_bytes) == (64, 1 << 20)
    assert repr(which).startswith("Which.MultimodalPlain(model_id=")
    assert pickle.loads(pickle.dumps(which)) == copy.copy(which) == which != Which.MultimodalPlain(model)
    for options, message in [({"max_edge": 0}, "max_edge"), ({"encoder_cache_memory_bytes": 0}, "encoder_cache_memory_bytes")]:
        with pytest.raises(ValueError, match=message):
            Which.MultimodalPlain(model, **options)
    with pytest.raises(NotImplementedError, match="topology"):
        Runner(which=Which.MultimodalPlain(model, topology="x"))
    with pytest.raises(ArchitectureError, match="MiniCpmO is not implemented yet; LLaVA, LLaVANext, Idefics2, Idefics3"):
        Runner(which=Which.MultimodalPlain(model, MultimodalArchitecture.MiniCpmO))
    with pytest.raises(ArchitectureError, match=r'Gemma3 is gemma3, and .* has model_type "idefics3"'):
        Runner(which=Which.MultimodalPlain(model, MultimodalArchitecture.Gemma3))
    others = [
        ("Qwen3VLMoE", "qwen3_vl_moe"),
        ("Qwen3_5", "qwen3_5"),
        ("Lfm2Vl", "lfm2_vl"),
        ("Llama4", "llama4"),
        ("VLlama", "mllama"),
    ]
    for arch, name in others:
        with pytest.raises(ArchitectureError, match=rf"{arch} is {name}, and"):
            Runner(which=Which.MultimodalPlain(model, getattr(MultimodalArchitecture, arch)))
    with pytest.raises(ValueError, match=r"preprocessor_config\.json"):
        Runner(which=Which.MultimodalPlain(str(GOLDEN / "text" / "llama")))
    with pytest.raises(ValueError, match="sees images"):
        quantize(Which.MultimodalPlain(model), "Q8_0", Path("never.gguf"))


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder that a server allows, beside one that it does not."""
    top = tmp_path_factory.mktemp("media")
    (top / "allowed").mkdir()
    (top / "secret").mkdir()
    for place in ("allowed/a.png", "secret/b.png"):
        (top / place).write_bytes(file().read_bytes())
    (top / "allowed" / "link.png").symlink_to(top / "secret" / "b.png")
    return top / "allowed"


@pytest.fixture(scope="module")
def server(root: Path) -> Iterator[Server]:
    limits = ["--max-num-images", "2", "--max-body-mb", "1", "--disable-access-log"]
    media = ["--allowed-local-media-path", str(root), "--allowed-media-domains", "127.0.0.1", "images.example.com"]
    with serving("multimodal", "--dtype", "f32", *limits, *media, model=str(folder())) as server:
        yield server


def parts(*urls: str) -> list[dict[str, Any]]:
    images: list[dict[str, Any]] = [{"type": "image_url", "image_url": {"url": url}} for url in urls]
    return [*images, {"type": "text", "text": "describe the image"}]


def body(*urls: str) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": parts(*urls)}], "max_tokens": 8, "temperature": 0, "ignore_eos": True}


def test_the_routes_see_as_python_does(server: Server, root: Path) -> None:
    expected = ask(about(file())).choices[0].message.content
    url = data_url(file())
    with openai.OpenAI(base_url=f"http://127.0.0.1:{server.port}/v1", api_key="none") as client:
        chat = client.chat.completions.create(
            model="default", messages=body(url)["messages"], max_tokens=8, temperature=0, extra_body={"ignore_eos": True}
        )
        item = [{"role": "user", "content": [{"type": "input_image", "image_url": url, "detail": "auto"}, *parts()]}]
        first = client.responses.create(model="default", input=item, max_output_tokens=8, temperature=0)  # type: ignore[call-overload]
        second = client.responses.create(model="default", input="and now?", previous_response_id=first.id, max_output_tokens=4)
    assert chat.choices[0].message.content == expected
    assert chat.usage is not None
    assert chat.usage.model_extra == {"encoded_images": 1}
    assert first.output_text
    assert first.usage.encoded_images == 0
    assert second.usage is not None
    assert second.usage.input_tokens > first.usage.input_tokens
    with anthropic.Anthropic(base_url=f"http://127.0.0.1:{server.port}", api_key="none") as claude:
        source = {"type": "base64", "media_type": "image/png", "data": url.partition(",")[2]}
        block: Any = [{"type": "image", "source": source}, {"type": "text", "text": "describe the image"}]
        message = claude.messages.create(
            model="default", max_tokens=8, messages=[{"role": "user", "content": block}], extra_body={"temperature": 0}
        )
        counted = claude.messages.count_tokens(model="default", messages=[{"role": "user", "content": block}])
    assert message.content[0].type == "text"
    assert counted.input_tokens == chat.usage.prompt_tokens
    local = server.post("/v1/chat/completions", body((root / "a.png").as_uri())).json
    assert (local["choices"][0]["message"]["content"], local["usage"]["encoded_images"]) == (expected, 0)
    assert server.post("/tokenize", {"messages": body(url)["messages"]}).json["count"] == chat.usage.prompt_tokens
    assert server.get("/v1/models").json["data"][0]["input_modalities"] == ["text", "image"]


def test_addresses_that_are_not_allowed_are_refused(server: Server, root: Path) -> None:
    place = "messages[0].content[0].image_url"
    secret = root.parent / "secret" / "b.png"
    for url, message in [
        (secret.as_uri(), "below the folder"),
        (f"file://{root}/../secret/b.png", "below the folder"),
        (f"file://{root}/%2e%2e/secret/b.png", "below the folder"),
        ((root / "link.png").as_uri(), "below the folder"),
        ("file:///etc/passwd", "below the folder"),
        ("https://example.com/a.png", "--allowed-media-domains"),
        (f"http://127.0.0.1:{server.port}/health", "public internet"),
        ("http://images.example.com@127.0.0.1/a.png", "a user or a password"),
        ("data:image/png;base64,aaaa", "no PNG"),
        (str(root / "a.png"), "no address of an image"),
    ]:
        reply = server.post("/v1/chat/completions", body(url))
        assert (reply.status, reply.error["param"], message in reply.error["message"]) == (400, place, True), reply.body
    url = data_url(file())
    many = server.post("/v1/chat/completions", body(url, url, url))
    assert (many.status, many.error["param"]) == (400, "messages[0].content[2].image_url")
    assert "--max-num-images" in many.error["message"]
    high = body(url)
    high["messages"][0]["content"][0]["image_url"]["detail"] = "high"
    reply = server.post("/v1/chat/completions", high)
    assert (reply.status, reply.error["param"]) == (400, f"{place}.detail")
    large = server.post("/v1/chat/completions", body("data:image/png;base64," + "A" * (1 << 20)))
    assert (large.status, "--max-body-mb" in large.error["message"]) == (413, True)
    item = {"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "file:///etc/passwd"}]}]}
    assert server.post("/v1/responses", item).error["param"] == "input[0].content[0].image_url"
    assert server.chat().status == 200


def test_a_server_of_text_says_how_images_are_served() -> None:
    with serving(model=str(GOLDEN / "text" / "llama")) as server:
        reply = server.post("/v1/chat/completions", body(data_url(file())))
        assert (reply.status, reply.error["param"]) == (400, "messages[0].content[0].type")
        assert "the model `llama` takes text only" in reply.error["message"]
        assert "serve multimodal" in reply.error["message"]
        assert server.get("/v1/models").json["data"][0]["input_modalities"] == ["text"]


def test_the_command_sees(capsys: pytest.CaptureFixture[str]) -> None:
    common = ["-m", str(folder()), "--dtype", "f32", "--temperature", "0", "--max-tokens", "4", "--pa-context-len", "2048"]
    common += ["--top-k", "0", "--top-p", "1", "--min-p", "0", "--repetition-penalty", "1"]
    assert cli.main(["run", "multimodal", *common, "-i", "describe the image", "--image", str(file())]) == 0
    printed = capsys.readouterr()
    expected = ask(about(file()), max_tokens=4, ignore_eos=False).choices[0].message.content or ""
    assert printed.out == expected + "\n"
    assert cli.main(["run", *common, "-i", "describe", "--image", "missing.png"]) == 1
    assert "missing.png" in capsys.readouterr().err


def test_a_gguf_file_sees_with_its_encoder_s(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = folder("qwen3_vl")
    mmproj.language(source, tmp_path / "model.gguf")
    mmproj.encoder(source, tmp_path / "mmproj.gguf")
    which = Which.GGUF(str(tmp_path), "model.gguf", dtype=ModelDType.F32, mmproj_filename="mmproj.gguf", max_edge=448)
    assert pickle.loads(pickle.dumps(which)) == which
    assert (which.mmproj_filename, which.max_edge) == ("mmproj.gguf", 448)
    runner = Runner(which=which, pa_ctxt_len=2048, num_threads=2)
    messages = about(file(model="qwen3_vl"))
    assert ids(ask(messages, runner)) == ids(ask(messages, seeing("qwen3_vl")))
    common = ["--dtype", "f32", "--temperature", "0", "--max-tokens", "4", "--pa-context-len", "2048"]
    model = ["-m", str(tmp_path), "-f", "model.gguf", "--mmproj", str(tmp_path / "mmproj.gguf")]
    image = str(file(model="qwen3_vl"))
    assert cli.main(["run", "multimodal", *model, *common, "-i", "describe the image", "--image", image]) == 0
    seen = capsys.readouterr().out
    assert cli.main(["run", "multimodal", "-m", str(source), *common, "-i", "describe the image", "--image", image]) == 0
    assert seen == capsys.readouterr().out


def test_an_encoder_s_file_is_named_where_it_is_wanted(tmp_path: Path) -> None:
    text_model = str(GOLDEN / "gguf" / "llama.gguf")
    with pytest.raises(ValueError, match="`max_edge` is about images, which a GGUF file sees with mmproj_filename"):
        Runner(which=Which.GGUF(text_model, max_edge=64))
    with pytest.raises(ValueError, match="adapters with images"):
        Runner(which=Which.GGUF(text_model, mmproj_filename="x.gguf", adapters=[]))
    with pytest.raises(ValueError, match=r"mmproj_filename='x\.gguf' is no file beside"):
        Runner(which=Which.GGUF(text_model, mmproj_filename="x.gguf"))
    with pytest.raises(ValueError, match=r"`general\.architecture` is `llama`; it must be `clip`"):
        Runner(which=Which.GGUF(text_model, mmproj_filename="llama.gguf"))
    with pytest.raises(TypeError, match="mmproj_filename"):
        Which.GGUF(text_model, mmproj_filename=5)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["serve", "multimodal", "--lora", "a=b"], "adapters with images"),
        (["serve", "multimodal", "-m", "M", "-f", "x.gguf"], "name it with --mmproj"),
        (["serve", "multimodal", "-m", "M", "--gqa", "8"], "--gqa goes with a GGML file"),
        (["serve", "multimodal", "-m", "M", "--tok-model-id", "T"], "--tok-model-id goes with a GGUF file"),
        (["serve", "multimodal", "-m", "M", "-f", "x", "--mmproj", "y", "--arch", "gemma3"], "--arch goes with a model"),
        (["serve", "--mmproj", "x.gguf"], "--mmproj is about images"),
        (["serve", "multimodal", "--arch", "llama"], "--arch llama"),
        (["serve", "multimodal", "--pooling", "mean"], "--pooling is about embeddings"),
        (["serve", "--max-edge", "64"], "--max-edge is about images"),
        (["run", "--encoder-cache-mb", "64"], "--encoder-cache-mb is about images"),
        (["serve", "--arch", "idefics3"], "serve multimodal"),
    ],
)
def test_flags_that_do_not_go_together_say_so(arguments: list[str], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        loading.select(cli.build_parser().parse_args(arguments))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["run", "embedding"], "invalid choice: 'embedding'"),
        (["run", "--image", "a.png"], "--image goes with -i"),
        (["run", "text", "-i", "x", "--image", "a.png"], "cannot be used with a model of the kind 'text'"),
        (["serve", "--allowed-media-domains", "example.com"], "serve multimodal"),
        (["--vi", "plain", "-m", "M"], "'--vi' cannot be used with the selector 'plain'"),
    ],
)
def test_what_has_no_use_is_wrong_usage(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        cli.main(arguments)
    assert message in capsys.readouterr().err


def test_the_older_selector_takes_every_flag_of_paged_attention() -> None:
    from mistral_paged import older

    words = ["--port", "0", "--pa-gpu-mem", "64", "--pa-blk-size", "16", "--pa-cache-type", "int8", "--max-seqs", "4"]
    options = cli.build_parser().parse_args(older.translate([*words, "vision-plain", "-m", str(folder()), "-a", "idefics3"]))
    assert (options.command, options.kind) == ("serve", "multimodal")
    assert (options.pa_memory_mb, options.pa_block_size, options.pa_cache_type, options.max_seqs) == (64, 16, "int8", 4)
    assert loading.select(options) == Which.MultimodalPlain(str(folder()), MultimodalArchitecture.Idefics3)
    for word in ("--vi", "-i"):
        assert older.translate([word, "vision-plain", "-m", "M"])[:2] == ["run", "multimodal"]
