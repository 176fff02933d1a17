"""Answers the same question in two runners, one after the other; the second fetches what the first has computed.

The same holds for two processes: run it again with a folder of your own as its argument.
"""

import sys
import tempfile

from mistral_paged import ChatCompletionRequest, Runner, Which
from mistral_paged.default_model import default_model

RULES = "Answer in one sentence, and name your source. " * 40

request = ChatCompletionRequest(
    model="default",
    messages=[{"role": "user", "content": RULES + "What is the capital of France?"}],
    max_tokens=16,
    temperature=0.0,
)
with tempfile.TemporaryDirectory() as scratch:
    folder = sys.argv[1] if len(sys.argv) > 1 else scratch
    for name in ("first", "second"):
        runner = Runner(which=Which.GGUF(str(default_model())), pa_gpu_mem=256, kv_tier=folder, kv_tier_size=1024)
        usage = runner.send_chat_completion_request(request).usage
        details = usage.prompt_tokens_details
        cached = details.cached_tokens if details else 0
        print(f"{name} runner: {cached} of {usage.prompt_tokens} prompt tokens were not computed")
        del runner  # Waits until its blocks are in the folder.
