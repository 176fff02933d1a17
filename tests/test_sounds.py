"""Sounds from Python, over HTTP and from the command line, compared with the answers of transformers."""

from __future__ import annotations

import asyncio
import base64
import copy
import io
import json
import pickle
import wave
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import drawn_phi4
import mmproj
import numpy
import openai
import pytest
from conftest import GOLDEN, ids, runner_of
from drawn_sounds import IMAGE, RATE, model_of, sound
from test_server import Server, serving

from mistral_paged import (
    ArchitectureError,
    ChatCompletionRequest,
    ChatCompletionResponse,
    ModelDType,
    MultimodalArchitecture,
    RgbImage,
    Runner,
    Sound,
    Which,
    cli,
)

SHORT = ("short", 9000)


@cache
def folder() -> Path:
    return model_of("voxtral", Path(mkdtemp(prefix="mistral_paged-")))


@cache
def both(name: str = "gemma4") -> Path:
    """A model that sees and hears."""
    return model_of(name, Path(mkdtemp(prefix="mistral_paged-")))


@cache
def golden() -> list[dict[str, Any]]:
    return json.loads((folder() / "golden.json").read_text())["cases"]


def load(**options: Any) -> Runner:
    fields = {name: options.pop(name) for name in ("arch", "encoder_cache_memory_bytes") if name in options}
    which = Which.MultimodalPlain(str(folder()), dtype=ModelDType.F32, **fields)
    return Runner(which=which, pa_ctxt_len=2048, num_threads=2, **options)


@cache
def hearing() -> Runner:
    return load()


def wav(name: str, count: int) -> bytes:
    """A drawn sound as a file."""
    content = io.BytesIO()
    with wave.open(content, "wb") as file:
        file.setnchannels(1)
        file.setsampwidth(2)
        file.setframerate(RATE)
        file.writeframes(sound(name, count).astype("<i2").tobytes())
    return content.getvalue()


def samples(name: str, count: int) -> numpy.ndarray:
    return sound(name, count).astype(numpy.float32) / numpy.float32(32768)


def with_sounds(case: dict[str, Any]) -> list[dict[str, Any]]:
    """The case's messages with its sounds in place."""
    rest = iter(case["sounds"])

    def filled(part: dict[str, Any]) -> dict[str, Any]:
        if part["type"] == "image":
            return {"type": "image", "image": GOLDEN / IMAGE}
        if part["type"] != "audio":
            return part
        drawn = next(rest)
        return {"type": "audio", "audio": wav(drawn["name"], drawn["len"])}

    return [{**message, "content": [filled(part) for part in message["content"]]} for message in case["messages"]]


def about(part: dict[str, Any], text: str = "describe the image") -> list[dict[str, Any]]:
    return [{"role": "user", "content": [part, {"type": "text", "text": text}]}]


def ask(messages: Any, runner: Runner | None = None, **options: Any) -> ChatCompletionResponse:
    options = {"max_tokens": 8, "temperature": 0, "ignore_eos": True, "logprobs": True, **options}
    return (runner or hearing()).send_chat_completion_request(ChatCompletionRequest(messages, "default", **options))


def data_url(content: bytes) -> str:
    return "data:audio/wav;base64," + base64.b64encode(content).decode()


def test_answers_are_those_of_transformers() -> None:
    runner = load(arch=MultimodalArchitecture.Voxtral)
    for case in golden():
        response = ask(with_sounds(case), runner, max_tokens=len(case["greedy_ids"]))
        assert ids(response) == case["greedy_ids"]
        assert response.usage.prompt_tokens == len(case["input_ids"])
        assert runner.tokenize_text(with_sounds(case)) == case["input_ids"]
    runner.close()


def test_a_model_has_the_adapter_for_what_a_request_holds(tmp_path: Path) -> None:
    which = Which.MultimodalPlain(str(drawn_phi4.model_of(tmp_path)), MultimodalArchitecture.Phi4MM, dtype=ModelDType.F32)
    runner = Runner(which=which, pa_ctxt_len=2048, num_threads=2)
    for case in json.loads((tmp_path / "golden.json").read_text())["cases"]:
        images = [{"type": "image", "image": drawn_phi4.image(seed, size)} for seed, size in enumerate(case["images"])]
        sounds = [{"type": "audio", "audio": wav(drawn["name"], drawn["len"])} for drawn in case["sounds"]]
        content = [*images, *sounds, {"type": "text", "text": "describe the image"}]
        response = ask([{"role": "user", "content": content}], runner, max_tokens=len(case["greedy_ids"]))
        assert ids(response) == case["greedy_ids"], (case["images"], case["sounds"])
        assert response.usage.prompt_tokens == len(case["argmax"])
    with pytest.raises(ValueError, match="loaded without adapters"):
        ask(about({"type": "audio", "audio": wav(*SHORT)}), runner, adapter="speech")
    runner.close()


def test_a_sound_is_the_same_however_it_is_given(tmp_path: Path) -> None:
    content, values = wav(*SHORT), samples(*SHORT)
    path = tmp_path / "short.wav"
    path.write_bytes(content)
    expected = Sound(path)
    assert (expected.rate, expected.seconds) == (RATE, len(values) / RATE)
    assert expected.tobytes() == values.tobytes()
    answer = golden()[0]["greedy_ids"]
    url = data_url(content)
    for given in [path, str(path), content, bytearray(content), memoryview(content), path.as_uri(), url, expected]:
        assert Sound(given) == expected, type(given)
        assert ids(ask(about({"type": "audio", "audio": given}))) == answer, type(given)
    for array in [values, values.astype(numpy.float64), numpy.repeat(values, 2)[::2]]:
        assert Sound(array, rate=RATE) == expected
        assert ids(ask(about({"type": "audio", "audio": array, "rate": RATE}))) == answer
    for part in [
        {"type": "audio_url", "audio_url": {"url": url}},
        {"type": "audio_url", "audio_url": str(path)},
        {"type": "input_audio", "input_audio": {"data": base64.b64encode(content).decode(), "format": "wav"}},
    ]:
        assert ids(ask(about(part))) == answer
    assert Sound(values, rate=8000) != expected
    assert Sound(numpy.zeros(3, numpy.float32), rate=8000).seconds == 3 / 8000


def test_every_format_is_read() -> None:
    expected = json.loads((GOLDEN / "sounds" / "expected.json").read_text())
    for name, file in expected.items():
        read = Sound(GOLDEN / "sounds" / name)
        assert (read.rate, len(read.tobytes()) // 4) == (file["rate"], file["len"])


def test_turns_about_a_sound_encode_it_once() -> None:
    runner = load()
    messages = about({"type": "audio", "audio": samples("long", 38000), "rate": RATE})
    encoded, cached = [], []
    for turn in range(4):
        response = ask(messages, runner, max_tokens=4)
        encoded.append(response.usage.encoded_sounds)
        details = response.usage.prompt_tokens_details
        cached.append(details.cached_tokens if details is not None else 0)
        messages += [
            {"role": "assistant", "content": response.choices[0].message.content},
            {"role": "user", "content": f"and {turn}?"},
        ]
    assert encoded == [3, 0, 0, 0]
    assert all(count > 0 for count in cached[1:])
    runner.close()


def test_streams_and_asyncio_hear_as_well() -> None:
    messages = about({"type": "audio", "audio": wav(*SHORT)})
    expected = ask(messages).choices[0].message.content
    options = {"max_tokens": 8, "temperature": 0, "ignore_eos": True}
    request = ChatCompletionRequest(messages, "default", **options)
    streamed = ChatCompletionRequest(messages, "default", stream=True, **options)
    chunks = list(hearing().send_chat_completion_request(streamed))
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == expected

    async def both() -> list[ChatCompletionResponse]:
        return await asyncio.gather(hearing().achat(request), hearing().achat(request))

    assert [answer.choices[0].message.content for answer in asyncio.run(both())] == [expected] * 2


def test_a_request_gives_its_sounds_back() -> None:
    request = ChatCompletionRequest(about({"type": "audio", "audio": wav(*SHORT)}), "default", max_tokens=3)
    heard = Sound(wav(*SHORT))
    assert request.messages[0]["content"][0] == {"type": "audio", "audio": heard}
    assert "Sound(rate=16000, seconds=0.562)" in repr(request)
    for other in (pickle.loads(pickle.dumps(request)), copy.copy(request), copy.deepcopy(request)):
        assert other == request
    assert pickle.loads(pickle.dumps(heard)) == heard == copy.copy(heard) == copy.deepcopy(heard)
    assert Sound.frombytes(heard.rate, heard.tobytes()) == heard
    with pytest.raises(ValueError, match="more than 2400000 samples"):
        Sound.frombytes(1000, bytes(4 * 2_400_001))


@pytest.mark.parametrize(
    ("given", "error", "message"),
    [
        ({"audio": "missing.wav"}, ValueError, r"messages\[0\]\['content'\]\[0\]\['audio'\]`: missing.wav"),
        ({"audio": b"RIFF but no sound"}, ValueError, "no WAV, FLAC, MP3"),
        ({"audio": b""}, ValueError, "no WAV, FLAC, MP3"),
        ({"audio": 3}, TypeError, "got int"),
        ({"audio": None}, ValueError, "is missing; give the sound"),
        ({}, ValueError, "is missing"),
        ({"audio": numpy.zeros(4, numpy.float32)}, ValueError, "give its 'rate'"),
        ({"audio": numpy.zeros(4, numpy.float32), "rate": 1}, ValueError, "rate"),
        ({"audio": numpy.zeros(4, numpy.int16), "rate": RATE}, ValueError, "array of int16; it must be float32"),
        ({"audio": numpy.zeros((4, 2), numpy.float32), "rate": RATE}, ValueError, r"shape \[4, 2\]"),
        ({"audio": numpy.zeros(0, numpy.float32), "rate": RATE}, ValueError, "no samples"),
        ({"audio": numpy.full(4, numpy.nan, numpy.float32), "rate": RATE}, ValueError, "sample 0 of the sound is NaN"),
        ({"audio": numpy.zeros(2401 * 1000, numpy.float32), "rate": 1000}, ValueError, "more than 2400000 samples"),
        ({"audio": b"RIFF", "rate": RATE}, ValueError, "leave it out"),
        ({"audio": b"RIFF", "detail": "auto"}, ValueError, "unknown key 'detail'"),
        ({"audio": "https://example.com/a.wav"}, ValueError, "allowed_media_domains"),
        ({"audio": "data:image/png;base64,aaaa"}, ValueError, "not a sound"),
        ({"audio": "data:audio/wav;base64,x*y"}, ValueError, "no base64"),
    ],
)
def test_what_is_no_sound_is_refused_by_name(given: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        ChatCompletionRequest(about({"type": "audio", **given}), "default")


def test_parts_that_cannot_be_honoured_are_refused_by_name() -> None:
    for part, message in [
        ({"type": "audio_url", "audio_url": {}}, "has no 'url'"),
        ({"type": "audio_url", "audio_url": {"url": "x"}, "rate": 3}, "unknown key 'rate'"),
        ({"type": "input_audio", "input_audio": {"data": "", "format": "aiff"}}, "must be {'data': base64, 'format': one of wav"),
        ({"type": "input_audio", "input_audio": {"data": "", "format": "wav", "x": 1}}, "unknown key 'x'"),
    ]:
        with pytest.raises(ValueError, match=message):
            ChatCompletionRequest(about(part), "default")
    audio = about({"type": "audio", "audio": wav(*SHORT)})
    with pytest.raises(ValueError, match="loaded for text"):
        ask(audio, runner_of("text", "llama"))
    image = RgbImage(numpy.zeros((4, 4), numpy.uint8))
    with pytest.raises(ValueError, match="this model takes sounds, and the messages have images"):
        ask(about({"type": "image", "image": image}))
    with pytest.raises(ArchitectureError, match=r'Voxtral is voxtral, and .* has model_type "llama"'):
        Runner(which=Which.MultimodalPlain(str(GOLDEN / "text" / "llama"), MultimodalArchitecture.Voxtral))
    with pytest.raises(ValueError, match="max_edge"):
        Runner(which=Which.MultimodalPlain(str(folder()), max_edge=100))


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder that a server allows, beside one that it does not."""
    top = tmp_path_factory.mktemp("media")
    for place in ("allowed", "secret"):
        (top / place).mkdir()
        (top / place / "a.wav").write_bytes(wav(*SHORT))
    return top / "allowed"


@pytest.fixture(scope="module")
def server(root: Path) -> Iterator[Server]:
    options = ["--max-num-images", "2", "--disable-access-log", "--allowed-local-media-path", str(root)]
    with serving("multimodal", "--dtype", "f32", *options, model=str(folder())) as server:
        yield server


def body(*parts: dict[str, Any]) -> dict[str, Any]:
    content = [*parts, {"type": "text", "text": "describe the image"}]
    return {"messages": [{"role": "user", "content": content}], "max_tokens": 8, "temperature": 0, "ignore_eos": True}


def by_url(url: str) -> dict[str, Any]:
    return {"type": "audio_url", "audio_url": {"url": url}}


def test_the_routes_hear_as_python_does(server: Server, root: Path) -> None:
    expected = ask(about({"type": "audio", "audio": wav(*SHORT)})).choices[0].message.content
    part = {"type": "input_audio", "input_audio": {"data": base64.b64encode(wav(*SHORT)).decode(), "format": "wav"}}
    with openai.OpenAI(base_url=f"http://127.0.0.1:{server.port}/v1", api_key="none") as client:
        messages: Any = body(part)["messages"]
        chat = client.chat.completions.create(
            model="default", messages=messages, max_tokens=8, temperature=0, extra_body={"ignore_eos": True}
        )
    assert chat.choices[0].message.content == expected
    assert chat.usage is not None
    assert chat.usage.model_extra == {"encoded_images": 0, "encoded_sounds": 1}
    for url in [data_url(wav(*SHORT)), (root / "a.wav").as_uri()]:
        local = server.post("/v1/chat/completions", body(by_url(url))).json
        assert local["choices"][0]["message"]["content"] == expected
        assert "encoded_sounds" not in local["usage"]
    assert server.post("/tokenize", {"messages": messages}).json["count"] == chat.usage.prompt_tokens
    assert server.get("/v1/models").json["data"][0]["input_modalities"] == ["text", "audio"]


def test_a_sound_is_written_down(server: Server) -> None:
    expected = json.loads((folder() / "golden.json").read_text())["transcription"]
    content = wav("talk", 20000)
    wanted = hearing().detokenize_text(expected["greedy_ids"], True).strip()
    with openai.OpenAI(base_url=f"http://127.0.0.1:{server.port}/v1", api_key="none") as client:
        limit: Any = {"max_completion_tokens": len(expected["greedy_ids"])}
        create = client.audio.transcriptions.create
        heard = create(file=("talk.wav", content), model="default", language="en", extra_body=limit)
        text = create(file=("talk.wav", content), model="default", language="en", response_format="text", extra_body=limit)
        assert heard.text == wanted
        assert str(text).strip() == wanted
        usage = {"type": "tokens", "input_tokens": len(expected["input_ids"]), "output_tokens": 8}
        assert heard.usage is not None
        assert heard.usage.model_dump(exclude_none=True) == {**usage, "total_tokens": usage["input_tokens"] + 8}
        for field, value in [("response_format", "srt"), ("language", "english"), ("prompt", "cats"), ("temperature", 3)]:
            with pytest.raises(openai.BadRequestError) as error:
                create(**{"file": ("talk.wav", content), "model": "default", field: value})
            assert error.value.param == field
        with pytest.raises(openai.BadRequestError, match="no WAV, FLAC"):
            create(file=("talk.wav", b"nothing"), model="default")
        with pytest.raises(openai.NotFoundError):
            create(file=("talk.wav", content), model="another")
    reply = server.post("/v1/audio/transcriptions", {"file": "x"})
    assert (reply.status, "multipart/form-data" in reply.error["message"]) == (415, True)


def test_addresses_that_are_not_allowed_are_refused(server: Server, root: Path) -> None:
    place = "messages[0].content[0].audio_url"
    for url, message in [
        ((root.parent / "secret" / "a.wav").as_uri(), "below the folder"),
        ("https://example.com/a.wav", "--allowed-media-domains"),
        ("data:audio/wav;base64,aaaa", "no WAV"),
        ("data:image/png;base64,aaaa", "not a sound"),
        ("a.wav", "no address of a sound"),
    ]:
        reply = server.post("/v1/chat/completions", body(by_url(url)))
        assert (reply.status, reply.error["param"], message in reply.error["message"]) == (400, place, True), reply.body
    url = data_url(wav(*SHORT))
    many = server.post("/v1/chat/completions", body(by_url(url), by_url(url), by_url(url)))
    assert (many.status, many.error["param"]) == (400, "messages[0].content[2].audio_url")
    image = server.post("/v1/chat/completions", body({"type": "image_url", "image_url": {"url": "x"}}))
    assert (image.status, image.error["code"]) == (400, "images_not_supported")
    assert "takes text and sounds" in image.error["message"]
    assert server.chat().status == 200


def test_the_command_hears(capsys: pytest.CaptureFixture[str], root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    common = ["-m", str(folder()), "--dtype", "f32", "--temperature", "0", "--max-tokens", "4", "--pa-context-len", "2048"]
    common += ["--top-k", "0", "--top-p", "1", "--min-p", "0", "--repetition-penalty", "1"]
    expected = ask(about({"type": "audio", "audio": root / "a.wav"}), max_tokens=4, ignore_eos=False).choices[0].message.content
    assert cli.main(["run", "multimodal", *common, "-i", "describe the image", "--audio", str(root / "a.wav")]) == 0
    printed = capsys.readouterr()
    assert printed.out == f"{expected}\n"
    sound = root / "a.wav"
    monkeypatch.setattr(
        "sys.stdin",
        io.StringIO(f"/audio\n/audio {root / 'b.wav'}\n/audio {sound}\n/clear\n/audio {sound}\ndescribe the image\n"),
    )
    assert cli.main(["run", "multimodal", *common]) == 0
    printed = capsys.readouterr()
    assert expected is not None
    assert expected in printed.out
    assert "/audio takes a file" in printed.err
    assert "b.wav" in printed.err
    for arguments, message in [([], "--audio goes with -i TEXT"), (["-i", "x"], "hears sounds")]:
        with pytest.raises(SystemExit):
            cli.main(["run", *(["text"] if arguments else []), *common, *arguments, "--audio", str(root / "a.wav")])
        assert message in capsys.readouterr().err


def test_a_gguf_file_hears_with_its_encoder_s(tmp_path: Path, capsys: pytest.CaptureFixture[str], root: Path) -> None:
    mmproj.language(folder(), tmp_path / "model.gguf")
    mmproj.sounds(folder(), tmp_path / "mmproj.gguf")
    which = Which.GGUF(str(tmp_path), "model.gguf", dtype=ModelDType.F32, mmproj_filename="mmproj.gguf")
    runner = Runner(which=which, pa_ctxt_len=2048, num_threads=2)
    for case in golden():
        response = ask(with_sounds(case), runner, max_tokens=len(case["greedy_ids"]))
        assert ids(response) == case["greedy_ids"]
    part = {"type": "audio", "audio": root / "a.wav"}
    expected = ask(about(part), max_tokens=4, ignore_eos=False).choices[0].message.content
    runner.close()
    command = ["run", "multimodal", "-m", str(tmp_path), "-f", "model.gguf", "--mmproj", str(tmp_path / "mmproj.gguf")]
    command += ["--dtype", "f32", "--temperature", "0", "--max-tokens", "4", "--pa-context-len", "2048", "--top-k", "0"]
    command += ["--top-p", "1", "--min-p", "0", "--repetition-penalty", "1", "-i", "describe the image"]
    assert cli.main([*command, "--audio", str(root / "a.wav")]) == 0
    assert capsys.readouterr().out == f"{expected}\n"
    assert cli.main([*command, "--audio", str(root / "a.wav"), "--max-edge", "64"]) == 1
    assert "max_edge (--max-edge) is about images" in capsys.readouterr().err


def test_gemma3n_sees_and_hears() -> None:
    cases = json.loads((both("gemma3n") / "golden.json").read_text())["cases"]
    which = Which.MultimodalPlain(str(both("gemma3n")), MultimodalArchitecture.Gemma3n, dtype=ModelDType.F32)
    runner = Runner(which=which, pa_ctxt_len=2048, num_threads=2)
    encoded = []
    for case in cases:
        response = ask(with_sounds(case), runner, max_tokens=len(case["greedy_ids"]))
        assert ids(response) == case["greedy_ids"]
        assert runner.tokenize_text(with_sounds(case)) == case["input_ids"]
        encoded.append((response.usage.encoded_images, response.usage.encoded_sounds))
    # The last case is about the image of the second.
    assert encoded == [(0, 1), (1, 1), (0, 0)]
    runner.close()


def test_one_request_has_an_image_and_sounds(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    case = json.loads((both() / "golden.json").read_text())["cases"][1]
    messages, count = with_sounds(case), len(case["greedy_ids"])
    which = Which.MultimodalPlain(str(both()), MultimodalArchitecture.Gemma4, dtype=ModelDType.F32)
    runner = Runner(which=which, pa_ctxt_len=2048, num_threads=2)
    response = ask(messages, runner, max_tokens=count)
    assert ids(response) == case["greedy_ids"]
    assert (response.usage.encoded_images, response.usage.encoded_sounds) == (1, 2)
    assert runner.tokenize_text(messages) == case["input_ids"]
    content = messages[0]["content"]
    files = [tmp_path / "a.png", tmp_path / "a.wav"]
    files[0].write_bytes((GOLDEN / IMAGE).read_bytes())
    files[1].write_bytes(wav(*SHORT))
    asked = [{"type": "image", "image": files[0]}, {"type": "audio", "audio": files[1]}, {"type": "text", "text": "describe"}]
    expected = ask([{"role": "user", "content": asked}], runner, max_tokens=4, ignore_eos=False).choices[0].message.content
    runner.close()

    def part(given: dict[str, Any]) -> dict[str, Any]:
        if given["type"] == "text":
            return given
        kind = {"image": "image/png", "audio": "audio/wav"}[given["type"]]
        data = given["audio"] if given["type"] == "audio" else given["image"].read_bytes()
        url = {"url": f"data:{kind};base64,{base64.b64encode(data).decode()}"}
        return {"type": f"{given['type']}_url", f"{given['type']}_url": url}

    with serving("multimodal", "--dtype", "f32", "--disable-access-log", model=str(both())) as server:
        body = {"messages": [{"role": "user", "content": [part(given) for given in content]}], "max_tokens": count}
        reply = server.post("/v1/chat/completions", {**body, "temperature": 0, "ignore_eos": True}).json
        assert reply["choices"][0]["message"]["content"] == response.choices[0].message.content
        assert (reply["usage"]["encoded_images"], reply["usage"]["encoded_sounds"]) == (1, 2)
        assert server.get("/v1/models").json["data"][0]["input_modalities"] == ["text", "image", "audio"]
    common = ["-m", str(both()), "--dtype", "f32", "--temperature", "0", "--max-tokens", "4", "--pa-context-len", "2048"]
    common += ["--top-k", "0", "--top-p", "1", "--min-p", "0", "--repetition-penalty", "1"]
    media = ["--image", str(files[0]), "--audio", str(files[1])]
    assert cli.main(["run", "multimodal", *common, "-i", "describe", *media]) == 0
    assert capsys.readouterr().out == f"{expected}\n"
