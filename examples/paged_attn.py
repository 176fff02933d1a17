"""A chat answer over a KV cache of 512 MB in blocks of 32 tokens. Give a folder, a GGUF file or a hub id, or nothing."""

import sys

from mistral_paged import ChatCompletionRequest, Runner, Which
from mistral_paged.default_model import default_model

model = sys.argv[1] if len(sys.argv) > 1 else str(default_model())
runner = Runner(
    which=Which.GGUF(model) if model.endswith(".gguf") else Which.Plain(model),
    pa_gpu_mem=512,
    pa_blk_size=32,
)

res = runner.send_chat_completion_request(
    ChatCompletionRequest(
        model="mistral",
        messages=[{"role": "user", "content": "Tell me a story about the Rust type system."}],
        max_tokens=256,
        presence_penalty=1.0,
        top_p=0.1,
        temperature=0.1,
    )
)
print(res.choices[0].message.content)
print(res.usage)
