"""Many answers on one event loop, without threads: streams, a timeout, and what the KV pool holds afterwards."""

import argparse
import asyncio

from mistral_paged import ChatCompletionRequest, Runner, Which
from mistral_paged.default_model import default_model

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--requests", type=int, default=16)
options = parser.parse_args()

runner = Runner(which=Which.GGUF(str(default_model())), pa_gpu_mem=512)


def question(number: int) -> list[dict[str, str]]:
    """A conversation about a number."""
    return [{"role": "user", "content": f"What is {number} plus {number}?"}]


async def ask(number: int) -> str:
    """The answer, put together from its chunks."""
    request = ChatCompletionRequest(question(number), "default", max_tokens=24, temperature=0.0, stream=True)
    return "".join([chunk.choices[0].delta.content or "" async for chunk in await runner.achat(request)])


async def main() -> None:
    """Asks everything at once."""
    for number, answer in enumerate((await asyncio.gather(*map(ask, range(options.requests))))[:4]):
        print(f"{number}: {answer}")
    try:
        request = ChatCompletionRequest(question(5), "default", max_tokens=4096, temperature=0.0)
        await asyncio.wait_for(runner.achat(request), timeout=0.2)
    except asyncio.TimeoutError:
        print("An answer that takes too long is cancelled, and its blocks are free again:")
    print(runner.kv_cache_stats()["blocks_used"], "blocks are in use")


asyncio.run(main())
