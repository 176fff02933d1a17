"""lm-eval over the Python API, for tests/test_clients.py to compare the server with."""

from __future__ import annotations

import json
from typing import Any

from lm_eval import utils
from lm_eval.api.model import TemplateLM

from mistral_paged import ChatCompletionRequest, CompletionRequest, Runner


class Direct(TemplateLM):
    """A model that is asked through a `Runner`, by `eos` and `bos` as the server's tokenizer has them."""

    def __init__(self, runner: Runner, bos: int, eos: int, eos_token: str, max_length: int = 2047) -> None:
        super().__init__()
        self.runner = runner
        self.bos = bos
        self.eos = eos
        self.eos_token = eos_token
        self.max_length = max_length

    @property
    def eot_token_id(self) -> int:
        return self.eos

    @property
    def prefix_token_id(self) -> int:
        return self.bos

    @property
    def tokenizer_name(self) -> str:
        return "direct"

    def apply_chat_template(self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True) -> str:
        assert add_generation_prompt
        return json.dumps(chat_history)

    def chat_template(self, chat_template: bool | str = False) -> str:
        return ""

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **_kwargs: Any) -> list[int]:
        return self.runner.tokenize_text(string, add_special_tokens=False)

    def _loglikelihood_tokens(self, requests: Any, **_kwargs: Any) -> list[tuple[float, bool]]:
        found = []
        for _, context, continuation in requests:
            request = CompletionRequest(
                prompt=context + continuation, model="default", max_tokens=1, echo_prompt=True, logprobs=1, temperature=0
            )
            logprobs = self.runner.send_completion_request(request).choices[0].logprobs
            assert logprobs is not None
            tokens = logprobs.content[len(context) : -1]
            is_greedy = all(token.logprob == max(top.logprob for top in token.top_logprobs) for token in tokens)
            found.append((sum(token.logprob or 0.0 for token in tokens), is_greedy))
        return found

    def loglikelihood_rolling(self, requests: Any, disable_tqdm: bool = False) -> list[float]:
        found = []
        for (string,) in [request.args for request in requests]:
            windows = utils.get_rolling_token_windows(self.tok_encode(string), self.bos, self.max_length - 1, 1)
            pairs = [(None, *utils.make_disjoint_window(window)) for window in windows]
            found.append(sum(logprob for logprob, _ in self._loglikelihood_tokens(pairs)))
        return found

    def generate_until(self, requests: Any, disable_tqdm: bool = False) -> list[str]:
        texts = []
        for context, settings in [request.args for request in requests]:
            fields = {"model": "default", "max_tokens": settings["max_gen_toks"], "temperature": 0}
            stops = [*settings["until"], self.eos_token]
            if context.startswith("["):
                chat = ChatCompletionRequest(messages=json.loads(context), stop_seqs=stops, **fields)
                texts.append(self.runner.send_chat_completion_request(chat).choices[0].message.content or "")
            else:
                request = CompletionRequest(prompt=self.tok_encode(context), stop_seqs=stops, **fields)
                texts.append(self.runner.send_completion_request(request).choices[0].text)
        return texts
