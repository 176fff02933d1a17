"""Model files that are missing, cut short or corrupted raise ValueErrors; nothing panics."""

from __future__ import annotations

import json
import logging
import random
import shutil
from pathlib import Path

import pytest
from conftest import GOLDEN, generate, text_model

from mistral_paged import MistralPagedError, ModelDType, Runner, Which


def copy_of(name: str, tmp_path: Path) -> Path:
    return Path(shutil.copytree(GOLDEN / "text" / name, tmp_path / name))


def load(folder: Path) -> Runner:
    return Runner(which=Which.Plain(str(folder), dtype=ModelDType.F32), pa_ctxt_len=256)


@pytest.mark.parametrize("missing", ["config.json", "model.safetensors", "tokenizer.json"])
def test_a_missing_file_is_named(missing: str, tmp_path: Path) -> None:
    folder = copy_of("llama", tmp_path)
    (folder / missing).unlink()
    with pytest.raises(MistralPagedError, match=missing.partition(".")[2] if "safetensors" in missing else missing):
        load(folder)


@pytest.mark.parametrize("name", ["config.json", "model.safetensors", "tokenizer.json"])
@pytest.mark.parametrize("size", [0, 1, 7, 100])
def test_a_truncated_file(name: str, size: int, tmp_path: Path) -> None:
    folder = copy_of("llama", tmp_path)
    whole = (folder / name).read_bytes()
    (folder / name).write_bytes(whole[:size])
    with pytest.raises(MistralPagedError, match=r"\S"):
        load(folder)


@pytest.mark.parametrize("share", [0.0, 0.01, 0.5, 0.999])
def test_a_truncated_gguf(share: float, tmp_path: Path) -> None:
    whole = (GOLDEN / "gguf" / "llama.gguf").read_bytes()
    file = tmp_path / "cut.gguf"
    file.write_bytes(whole[: int(len(whole) * share)])
    with pytest.raises(MistralPagedError, match=r"\S"):
        Runner(which=Which.GGUF(str(file)))


def test_a_tensor_is_missing(tmp_path: Path) -> None:
    folder = copy_of("llama", tmp_path)
    config = json.loads((folder / "config.json").read_text())
    config["num_hidden_layers"] += 1
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(MistralPagedError, match=r"model\.layers"):
        load(folder)


@pytest.mark.parametrize("value", [0, -1, 2**63, "many", [], 1e300])
@pytest.mark.parametrize("key", ["hidden_size", "num_attention_heads", "num_key_value_heads", "vocab_size", "num_hidden_layers"])
def test_a_nonsense_configuration(key: str, value: object, tmp_path: Path) -> None:
    folder = copy_of("llama", tmp_path)
    config = json.loads((folder / "config.json").read_text())
    config[key] = value
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(MistralPagedError, match=r"\S"):
        load(folder)


@pytest.mark.timeout(300)
@pytest.mark.parametrize("kind", ["gguf", "safetensors"])
def test_200_random_corruptions(kind: str, tmp_path: Path) -> None:
    generator = random.Random(2)
    if kind == "gguf":
        file = tmp_path / "model.gguf"
        shutil.copy(GOLDEN / "gguf" / "qwen2.gguf", file)
        which = Which.GGUF(str(file))
    else:
        folder = copy_of("qwen2", tmp_path)
        file = folder / "model.safetensors"
        which = Which.Plain(str(folder))
    whole = file.read_bytes()
    refused = 0
    for _ in range(100):
        data = bytearray(whole)
        # Most of what can go wrong is in the header.
        reach = generator.choice([64, 4096, 16384, len(data)])
        for _ in range(generator.choice([1, 4, 32])):
            data[generator.randrange(min(reach, len(data)))] = generator.randrange(256)
        if generator.random() < 0.2:
            del data[generator.randrange(len(data)) :]
        file.write_bytes(data)
        try:
            runner = Runner(which=which, pa_ctxt_len=64, num_threads=1)
            generate(runner, [5, 6], 1)
        except (MistralPagedError, NotImplementedError) as error:
            assert "panic" not in str(error)
            refused += 1
    assert refused > 30


def test_a_folder_of_several_ggufs_asks_which(tmp_path: Path) -> None:
    for name in ("a", "b"):
        shutil.copy(GOLDEN / "gguf" / "llama.gguf", tmp_path / f"{name}.gguf")
    with pytest.raises(ValueError, match=r"a\.gguf.*b\.gguf"):
        Runner(which=Which.GGUF(str(tmp_path)))
    with pytest.raises(ValueError, match=r"'c\.gguf'.*a\.gguf"):
        Runner(which=Which.GGUF(str(tmp_path), "c.gguf"))
    Runner(which=Which.GGUF(str(tmp_path), "b.gguf"), pa_ctxt_len=64)


def test_gguf_with_the_tokenizer_of_a_folder() -> None:
    gguf = str(GOLDEN / "gguf" / "llama.gguf")
    folder = GOLDEN / "text" / "llama"
    for which in (
        Which.GGUF(gguf, tok_model_id=str(folder)),
        Which.GGUF(gguf, tokenizer_json=str(folder / "tokenizer.json")),
    ):
        runner = Runner(which=which, pa_ctxt_len=64)
        assert runner.detokenize_text(runner.tokenize_text("The scheduler", False)) == "The scheduler"


def test_loading_reports_progress_and_logs(caplog: pytest.LogCaptureFixture) -> None:
    steps: list[tuple[int, int]] = []
    with caplog.at_level(logging.INFO, "mistral_paged"):
        Runner(which=text_model("llama"), pa_ctxt_len=256, load_progress=lambda done, total: steps.append((done, total)))
    assert steps
    assert steps == sorted(steps)
    assert steps[-1][0] == steps[-1][1] > 0
    assert any("block" in message for message in caplog.messages)


def test_an_exception_of_the_progress_callback_is_raised() -> None:
    def fail(done: int, total: int) -> None:
        raise LookupError(f"{done} of {total}")

    with pytest.raises(LookupError, match="of"):
        Runner(which=text_model("llama"), load_progress=fail)


def test_a_home_folder_is_expanded_everywhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    folder = copy_of("llama", tmp_path)
    (folder / "tokenizer.json").rename(tmp_path / "tokenizer.json")
    (tmp_path / "own.jinja").write_text("<{{ messages[0]['content'] }}>")
    which = Which.Plain("~/llama", tokenizer_json="~/tokenizer.json")
    runner = Runner(which=which, chat_template="~/own.jinja", pa_ctxt_len=256)
    assert runner.detokenize_text(runner.tokenize_text([{"role": "user", "content": "abc"}])) == "<abc>"
