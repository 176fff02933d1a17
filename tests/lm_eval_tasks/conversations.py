"""What the tasks beside this file evaluate: the packaged conversations, cut short."""

from __future__ import annotations

from typing import Any

import datasets

from mistral_paged.memory import conversations

NUM_CONVERSATIONS = 12
NUM_REPLIES = 3
"""To choose from: the one that was given, and those of the next conversations."""


def load(**_metadata: Any) -> dict[str, datasets.Dataset]:
    """Questions, each with replies to choose from, of which `answer` is the one that was given."""
    pool = [(each.prompt[:160].strip(), each.reply[:120].strip()) for each in conversations(60) if len(each.reply) > 120]
    pool = pool[:NUM_CONVERSATIONS]
    rows = []
    for i, (question, reply) in enumerate(pool):
        replies = [pool[(i + other) % len(pool)][1] for other in range(NUM_REPLIES)]
        # The right one has each place in turn.
        place = i % NUM_REPLIES
        replies[0], replies[place] = replies[place], replies[0]
        rows.append({"question": question, "reply": reply, "replies": replies, "answer": place})
    return {"test": datasets.Dataset.from_list(rows)}


def overlap(doc: dict[str, Any], results: list[str]) -> dict[str, float]:
    """The share of the answer's words that the reply has, and the answer's length in characters."""
    words = results[0].lower().split()
    known = set(doc["reply"].lower().split())
    return {"overlap": sum(word in known for word in words) / max(len(words), 1), "length": len(results[0])}
