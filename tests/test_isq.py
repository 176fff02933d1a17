"""Float weights that are quantized while they are loaded."""

from __future__ import annotations

from pathlib import Path

import pytest
from conftest import golden, score, text_model
from test_server import serving

from mistral_paged import ModelDType, Runner, Which, cli


def log_probabilities(runner: Runner, ids: list[int]) -> list[float]:
    return [token.logprob for token in score(runner, ids)[1:]]


@pytest.mark.parametrize(
    ("name", "bound"), [("8", 0.07), ("Q6K", 0.07), ("Q5K", 0.3), ("Q4K", 0.3), ("q4_0", 0.6), ("mxfp4", 0.7)]
)
@pytest.mark.parametrize("dtype", [ModelDType.Auto, ModelDType.F32])
def test_quantized_weights_score_each_token_nearly_as_floats_do(name: str, bound: float, dtype: ModelDType) -> None:
    """Of 64 columns, which no block of 256 divides: Q6K is Q8_0 then, Q5K Q5_1 and Q4K Q5_0."""
    ids = golden("text/phi3")["completions"][2]["prompt_ids"]
    floats = log_probabilities(Runner(which=text_model("phi3"), pa_gpu_mem=16), ids)
    quantized = log_probabilities(Runner(which=text_model("phi3", dtype=dtype), pa_gpu_mem=16, in_situ_quant=name), ids)
    assert sum(abs(a - b) for a, b in zip(floats, quantized, strict=True)) / len(floats) < bound


def test_the_plan_counts_what_comes_out() -> None:
    def weights(name: str | None) -> int:
        planned = Runner.memory_plan(which=text_model("phi3"), pa_gpu_mem=16, in_situ_quant=name)
        with Runner(which=text_model("phi3"), pa_gpu_mem=16, in_situ_quant=name) as runner:
            assert runner.memory_ledger().weights_bytes == planned.weights_bytes
        return planned.weights_bytes

    assert weights("Q4_0") < weights("8") < weights(None)


def test_what_cannot_be_done_is_named(smollm2_path: Path) -> None:
    with pytest.raises(ValueError, match=r"in_situ_quant is \"AFQ4\".*Q4K"):
        Runner(which=text_model("phi3"), in_situ_quant="AFQ4")
    with pytest.raises(ValueError, match=r"in_situ_quant is Q8_0.*quantized already \(Q4_1\)"):
        Runner(which=Which.GGUF(str(smollm2_path)), in_situ_quant="8")
    with pytest.raises(TypeError, match="in_situ_quant"):
        Runner(which=text_model("phi3"), in_situ_quant=4)  # type: ignore[arg-type]


def test_the_older_command_line_quantizes(capsys: pytest.CaptureFixture[str]) -> None:
    model = text_model("phi3").model_id
    words = ["run", "--isq", "Q4K", "-m", model, "-a", "phi3", "--max-tokens", "4", "-i", "Hello"]
    assert cli.main(words) == 0
    assert capsys.readouterr().out


def test_a_runner_is_quantized_anew_while_it_serves() -> None:
    """Its prefix cache and its reloads are those of the new weights."""
    ids = golden("text/phi3")["completions"][2]["prompt_ids"]
    scores = {
        name: log_probabilities(Runner(which=text_model("phi3", dtype=ModelDType.F32), pa_gpu_mem=16, in_situ_quant=name), ids)
        for name in (None, "8", "Q4_0")
    }
    with Runner(which=text_model("phi3", dtype=ModelDType.F32), pa_gpu_mem=16) as runner:
        bytes_of_floats = runner.memory_ledger().weights_bytes
        assert log_probabilities(runner, ids) == scores[None]
        for name in ("8", "Q4_0"):
            steps: list[tuple[int, int]] = []
            runner.send_re_isq(name, load_progress=lambda done, of, steps=steps: steps.append((done, of)))
            assert steps
            assert steps[-1][0] == steps[-1][1]
            assert log_probabilities(runner, ids) == scores[name]
            assert runner.memory_ledger().weights_bytes < bytes_of_floats
        runner.unload_model()
        assert log_probabilities(runner, ids) == scores["Q4_0"]
        with pytest.raises(ValueError, match=r'dtype is "AFQ4".*Q4K'):
            runner.send_re_isq("AFQ4")
        with pytest.raises(ValueError, match="was not found"):
            runner.send_re_isq("8", "another")
        assert log_probabilities(runner, ids) == scores["Q4_0"]


def test_a_server_is_quantized_anew(smollm2_path: Path) -> None:
    chat = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 4}
    with serving("--isq", "8", "--disable-access-log") as server:
        before = server.get("/v1/system/info").json["weight_bytes"]
        reply = server.post("/re_isq", {"ggml_type": "q4_0"})
        assert (reply.status, reply.json["ggml_type"]) == (200, "Q4_0")
        assert reply.json["weight_bytes"] == server.get("/v1/system/info").json["weight_bytes"] < before
        assert server.post("/v1/chat/completions", chat).status == 200
        for body, says in (({"ggml_type": "nix"}, "ggml_type is"), ({"type": "Q4K"}, "unknown field"), ({}, "missing field")):
            reply = server.post("/re_isq", body)
            assert reply.status == 400, body
            assert says in reply.error["message"], body
    with serving("--disable-access-log", model=str(smollm2_path), memory="64") as server:
        reply = server.post("/re_isq", {"ggml_type": "8"})
        assert reply.status == 400
        assert "quantized already" in reply.error["message"]
