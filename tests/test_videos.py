"""Videos from Python, over HTTP and from the command line, compared with the answers of transformers."""

from __future__ import annotations

import base64
import copy
import io
import json
import pickle
import shutil
import subprocess
from functools import cache
from pathlib import Path
from typing import Any

import numpy
import openai
import PIL.Image
import pytest
from conftest import GOLDEN, ids
from drawn import drawn
from test_server import serving

from mistral_paged import (
    ChatCompletionRequest,
    ChatCompletionResponse,
    ModelDType,
    RgbImage,
    Runner,
    Video,
    Which,
    cli,
)

MODEL = "qwen3_vl"


@cache
def golden() -> dict[str, Any]:
    return json.loads((GOLDEN / "videos" / MODEL / "golden.json").read_text())["cases"][0]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny model with what it needs for videos."""
    copied = tmp_path_factory.mktemp("model") / MODEL
    shutil.copytree(GOLDEN / "vision" / MODEL, copied)
    shutil.copy(GOLDEN / "videos" / "chat_template.jinja", copied)
    shutil.copy(GOLDEN / "videos" / MODEL / "video_preprocessor_config.json", copied)
    return copied


@pytest.fixture(scope="module")
def seeing(folder: Path) -> Runner:
    return Runner(which=Which.MultimodalPlain(str(folder), dtype=ModelDType.F32), pa_ctxt_len=2048, num_threads=2)


def frames() -> numpy.ndarray:
    """Those of the golden's video, as tests/drawn_videos.py draws them."""
    (video,) = golden()["videos"]
    shape = (video["frames"], *golden()["size"], 3)
    levels = numpy.floor((drawn(f"video {video['name']}", int(numpy.prod(shape))) + numpy.float32(0.5)) * 256)
    return levels.astype(numpy.uint8).reshape(shape)


def png(pixels: numpy.ndarray) -> bytes:
    file = io.BytesIO()
    PIL.Image.fromarray(pixels).save(file, "PNG")
    return file.getvalue()


def singly(given: numpy.ndarray) -> str:
    return "data:video/jpeg;base64," + ",".join(base64.b64encode(png(frame)).decode() for frame in given)


def gif(colors: list[int], size: tuple[int, int] = (96, 64), milliseconds: int = 200) -> bytes:
    file = io.BytesIO()
    images = [PIL.Image.new("RGB", size, (color, 255 - color, 9)) for color in colors]
    images[0].save(file, "GIF", save_all=True, append_images=images[1:], duration=milliseconds, loop=0)
    return file.getvalue()


def about(part: dict[str, Any], text: str = "what is shown?") -> list[dict[str, Any]]:
    return [{"role": "user", "content": [part, {"type": "text", "text": text}]}]


def ask(runner: Runner, messages: Any) -> ChatCompletionResponse:
    request = ChatCompletionRequest(messages, "default", max_tokens=8, temperature=0, ignore_eos=True, logprobs=True)
    return runner.send_chat_completion_request(request)


def test_frames_are_the_same_however_they_are_given(seeing: Runner) -> None:
    given, expected = frames(), golden()["greedy_ids"]
    video = Video(given)
    assert (video.num_frames, video.fps, video.height, video.width) == (len(given), 2.0, *golden()["size"])
    lists: list[Any] = [list(given), tuple(RgbImage(frame) for frame in given), [png(frame) for frame in given]]
    lists += [[PIL.Image.fromarray(frame) for frame in given], singly(given), video]
    for other in lists:
        assert Video(other) == video
    for part in [
        {"type": "video", "video": given},
        {"type": "video", "video": list(given), "fps": 2},
        {"type": "video_url", "video_url": {"url": singly(given), "fps": 2.0}},
        {"type": "video_url", "video_url": singly(given)},
    ]:
        assert ids(ask(seeing, about(part))) == expected
    assert seeing.tokenize_text(about({"type": "video", "video": video})) == golden()["input_ids"]


def test_a_conversation_about_a_video_encodes_it_once(seeing: Runner) -> None:
    messages = about({"type": "video", "video": gif([0, 80, 160, 240])}, "which colors?")
    encoded = []
    for _ in range(3):
        response = ask(seeing, messages)
        encoded.append(response.usage.encoded_videos)
        said = response.choices[0].message.content
        messages += [{"role": "assistant", "content": said}, {"role": "user", "content": "and now?"}]
        messages[-2]["content"] = [{"type": "text", "text": said}]
        messages[-1]["content"] = [{"type": "text", "text": "and now?"}]
    assert encoded == [2, 0, 0]


def test_videos_can_be_copied_and_pickled(tmp_path: Path) -> None:
    path = tmp_path / "a.gif"
    path.write_bytes(gif([0, 80, 160, 240]))
    for video in [Video(path), Video(path, fps=1.5), Video(frames(), fps=3)]:
        for other in [copy.copy(video), copy.deepcopy(video), pickle.loads(pickle.dumps(video))]:
            assert other == video
    assert Video(path) != Video(path, fps=1.5)
    assert Video(path.as_uri()) == Video(path.read_bytes())
    request = ChatCompletionRequest(about({"type": "video", "video": path}), "default")
    assert request.messages[0]["content"][0]["video"] == Video(path)
    assert pickle.loads(pickle.dumps(request)) == request
    assert repr(Video(path)) == "Video(num_frames=4, fps=5.000, width=96, height=64)"


@pytest.mark.parametrize(
    ("part", "message"),
    [
        ({"video": []}, "no frames"),
        ({"video": b"no video at all"}, "the video is no MP4"),
        ({"video": "/no/such/file.mp4"}, "No such file"),
        ({"video": numpy.zeros((3, 8, 8), numpy.uint8)}, r"\[frames, height, width, 3\]"),
        ({"video": [numpy.zeros((8, 8, 3), numpy.uint8), numpy.zeros((8, 9, 3), numpy.uint8)]}, "frame 1 of the video"),
        ({"video": numpy.zeros((3, 8, 8, 3), numpy.uint8), "fps": 0}, "`fps` is 0"),
        ({"video": numpy.zeros((3, 8, 8, 3), numpy.uint8), "rate": 3}, "unknown key 'rate'"),
        ({"video": "data:audio/wav;base64,AAAA"}, "which is not a video"),
    ],
)
def test_what_is_no_video_is_refused(part: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ChatCompletionRequest(about({"type": "video", **part}), "default")


def test_files_need_ffmpeg(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "a.mkv"
    if shutil.which("ffmpeg"):
        source = "testsrc=size=64x48:rate=10:duration=1"
        subprocess.run(["ffmpeg", "-v", "error", "-f", "lavfi", "-i", source, "-c:v", "ffv1", path], check=True)
        video = Video(path)
        assert (video.num_frames, video.fps, video.width, video.height) == (10, 10.0, 64, 48)
    else:
        path.write_bytes(b"\x1a\x45\xdf\xa3" + bytes(100))
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(ValueError, match="ffprobe is not on PATH: install ffmpeg, or give an animated GIF, or frames singly"):
        Video(path)


def test_over_http(folder: Path) -> None:
    with serving("multimodal", "--dtype", "f32", "--max-num-images", "1", model=str(folder)) as server:
        client = openai.OpenAI(base_url=f"http://127.0.0.1:{server.port}/v1", api_key="none", max_retries=0)
        assert client.models.list().data[0].model_extra["input_modalities"] == ["text", "image", "video"]

        def chat(*parts: Any) -> Any:
            messages: Any = [{"role": "user", "content": [*parts, {"type": "text", "text": "what is shown?"}]}]
            options: Any = {"temperature": 0, "max_tokens": 8, "extra_body": {"ignore_eos": True, "return_token_ids": True}}
            return client.chat.completions.create(model="default", messages=messages, **options)

        part = {"type": "video_url", "video_url": {"url": singly(frames()), "fps": 2}}
        usage = chat(part).usage
        assert (usage.prompt_tokens, usage.model_extra["encoded_videos"]) == (len(golden()["input_ids"]), 3)
        animated = "data:image/gif;base64," + base64.b64encode(gif([0, 80, 160, 240])).decode()
        assert chat({"type": "video_url", "video_url": animated}).usage.model_extra["encoded_videos"] == 2
        for url, message in [
            ("data:video/mp4;base64,AAAA", "the video is no MP4"),
            ("data:video/jpeg;base64,AAAA,!", "frame 1 of the video is no base64"),
            ("file:///etc/passwd", "file: URLs are not allowed"),
            ("https://example.com/a.mp4", "--allowed-media-domains"),
        ]:
            with pytest.raises(openai.BadRequestError, match=message) as error:
                chat({"type": "video_url", "video_url": {"url": url}})
            assert error.value.param == "messages[0].content[0].video_url"
        with pytest.raises(openai.BadRequestError, match="1 images, sounds and videos"):
            chat(part, part)


def test_from_the_command_line(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "a.gif"
    path.write_bytes(gif([0, 80, 160, 240]))
    common = ["-m", str(folder), "--pa-context-len", "512", "--max-tokens", "4"]
    assert cli.main(["run", *common, "-i", "what is shown?", "--video", str(path)]) == 0
    assert "prompt tokens" in capsys.readouterr().err
    assert cli.main(["run", *common, "-i", "what is shown?", "--video", "missing.mp4"]) == 1
    assert "missing.mp4" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        cli.main(["run", "multimodal", *common, "--video", str(path)])
    assert "--video goes with -i TEXT" in capsys.readouterr().err
