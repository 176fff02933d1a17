"""Describes the pictures of a folder, several at a time, with a progress bar.

    python examples/describe_images.py MODEL FOLDER

MODEL is a folder or a hub id of a model that sees, such as HuggingFaceTB/SmolVLM-256M-Instruct.
"""

import argparse
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from tqdm import tqdm

from mistral_paged import ChatCompletionRequest, Runner, Which

KINDS = {".png", ".jpg", ".jpeg", ".webp", ".gif", ".bmp"}

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("model")
parser.add_argument("folder", type=Path)
parser.add_argument("--ask", default="Describe the image in one sentence.")
parser.add_argument("--max-tokens", type=int, default=64)
parser.add_argument("--max-edge", type=int, help="larger images are made smaller first, in pixels")
parser.add_argument("--at-once", type=int, default=4)
options = parser.parse_args()

pictures = sorted(path for path in options.folder.iterdir() if path.suffix.lower() in KINDS)
if not pictures:
    parser.error(f"{options.folder} has no picture ({', '.join(sorted(KINDS))})")


def describe(path: Path) -> str:
    """What the model says of a picture, or why it says nothing."""
    content = [{"type": "image", "image": path}, {"type": "text", "text": options.ask}]
    try:
        messages = [{"role": "user", "content": content}]
        request = ChatCompletionRequest(messages, "default", max_tokens=options.max_tokens, temperature=0.0)
        return (runner.send_chat_completion_request(request).choices[0].message.content or "").strip()
    except ValueError as error:
        return f"error: {error}"


with (
    Runner(which=Which.MultimodalPlain(options.model, max_edge=options.max_edge), max_seqs=options.at_once) as runner,
    ThreadPoolExecutor(options.at_once) as threads,
):
    described = tqdm(threads.map(describe, pictures), total=len(pictures), unit="picture")
    for path, text in zip(pictures, described, strict=True):
        tqdm.write(f"{path.name}: {text}")
    print(f"{len(pictures)} pictures described")
