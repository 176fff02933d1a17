"""Many answers on one event loop, without threads: streams, a timeout, and what the KV pool holds afterwards."""

import argparse
import asyncio

from mistral_paged import ChatCompletionRequest, Runner, Which
from mistral_paged.default_model import default_model

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--requests", type=int, default=16)
options = parser.parse_args()

runner = Runner(which=Which.GGUF(str(default_model())), pa_gpu_mem=512)


def question(number: int, max_tokens: int = 24, stream: bool = True) -> ChatCompletionRequest:
    """A request about a number."""
    messages = [{"role": "user", "content": f"What is {number} plus {number}?"}]
    return ChatCompletionRequest(messages, "default", max_tokens=max_tokens, temperature=0.0, stream=stream)


async def ask(number: int) -> str:
    """The answer, put together from its chunks."""
    return "".join([chunk.choices[0].delta.content async for chunk in await runner.achat(question(number))])


async def main() -> None:
    """Asks everything at once."""
    for number, answer in enumerate((await asyncio.gather(*map(ask, range(options.requests))))[:4]):
        print(f"{number}: {answer}")
    try:
        await asyncio.wait_for(runner.achat(question(5, max_tokens=4096, stream=False)), timeout=0.2)
    except asyncio.TimeoutError:
        print("An answer that takes too long is cancelled, and its blocks are free again:")
    print(runner.kv_cache_stats()["blocks_used"], "blocks are in use")


asyncio.run(main())
