"""What this engine refuses though the reference takes it, as the documents or the messages themselves say."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Any


@dataclass
class Refusal:
    """A message of one kind of case, of a configuration that has these settings."""

    kind: str
    message: str
    settings: dict[str, Any] = field(default_factory=dict)

    def covers(self, kind: str, message: str, configuration: dict[str, Any]) -> bool:
        has_settings = all(configuration.get(key) == value for key, value in self.settings.items())
        return kind == self.kind and has_settings and re.search(self.message, message) is not None


DOCUMENTED = [
    # docs/adapters.md: the token embedding is adapted as LoRA, not as DoRA.
    Refusal("adapters", r"is the token embedding, and has tensors of a linear layer", {"use_dora": True}),
    # docs/adapters.md: it is absorbed into other weights, where nothing can be added to it alone.
    Refusal("adapters", r"it changes `[\w.]+\.kv_b_proj`"),
]


def is_documented(kind: str, message: str, configuration: dict[str, Any]) -> bool:
    return any(refusal.covers(kind, message, configuration) for refusal in DOCUMENTED)
