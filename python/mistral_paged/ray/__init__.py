"""Ray: the server as a Ray Serve deployment with replicas, and batches over a Ray Data dataset.

    serve run mistral_paged.ray:build_app model=MODEL max_replicas=4
    MISTRAL_PAGED_RAY_MODEL=MODEL serve run mistral_paged.ray:app

Needs `pip install mistral-paged[ray]`. docs/fleet.md has the arguments.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

try:
    import ray as _ray  # noqa: F401
except ModuleNotFoundError as error:
    raise ModuleNotFoundError("this needs Ray: pip install 'mistral-paged[ray]'", name=error.name) from None

from mistral_paged.ray.application import build_app
from mistral_paged.ray.batches import map_batches

if TYPE_CHECKING:
    app: Any

__all__ = ["app", "build_app", "map_batches"]

PREFIX = "MISTRAL_PAGED_RAY_"
"""What the environment variables begin with that `app` is made of: MISTRAL_PAGED_RAY_MODEL is `build_app`'s `model`."""


def __getattr__(name: str) -> Any:
    """`app`, made when it is asked for: importing the package starts nothing."""
    if name == "app":
        found = {key.removeprefix(PREFIX).lower(): value for key, value in os.environ.items() if key.startswith(PREFIX)}
        return build_app(found)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
