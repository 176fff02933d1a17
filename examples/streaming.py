"""Prints an answer of the default model while it is generated."""

from mistral_paged import ChatCompletionRequest, Runner, Which
from mistral_paged.default_model import default_model

runner = Runner(which=Which.GGUF(str(default_model())), pa_gpu_mem=256)
request = ChatCompletionRequest(
    model="default",
    messages=[{"role": "user", "content": "What is the capital of France?"}],
    max_tokens=64,
    temperature=0.0,
    stream=True,
)
for chunk in runner.send_chat_completion_request(request):
    print(chunk.choices[0].delta.content, end="", flush=True)
    if chunk.usage is not None:
        print()
        print(chunk.usage)
