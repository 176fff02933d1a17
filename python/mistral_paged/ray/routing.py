"""Which replica a request goes to: the one that was sent most of its prompt before.

Ray's own `PrefixCacheAffinityRouter` lies in `ray.serve.llm`, which cannot be imported without vLLM or SGLang. This one keeps
digests rather than texts, in bounded memory, and knows whose prompt it is: tenants share no cached blocks.
"""

from __future__ import annotations

import hashlib
import json
from collections import OrderedDict
from dataclasses import dataclass, field
from typing import Any

from ray.serve.request_router import PendingRequest, ReplicaID, RequestRouter, RunningReplica

FINE, COARSE, FINE_END, END = 32, 256, 1024, 1 << 17
"""Characters from one digest to the next, up to `FINE_END` and from there to `END`; what comes behind is not compared."""
MIN_SHARE = 0.1
"""Share of a prompt that must have been sent to a replica before, that it is preferred; below, load decides."""
MAX_DIGESTS = 1 << 18
"""Digests that a router keeps, the latest ones: up to 64 Mi characters of prompts."""
TEXTS = ("tools", "system", "instructions", "prompt", "messages", "input")
"""Where a request has its prompt, in the order in which chat templates write it."""
ROOTS = ("model", "adapter", "cache_salt")
"""What parts the cache besides the key of the client."""


@dataclass
class Forwarded:
    """A request on its way to a replica."""

    method: str
    target: str
    """Path and query."""
    headers: list[tuple[str, str]]
    body: bytes
    digests: list[bytes] = field(default_factory=list)
    """Of the beginnings of its prompt, the shortest first."""


def digests_of(body: bytes, key: str) -> list[bytes]:
    """Digests of the beginnings of a prompt; none where a body has no prompt that can be read.

    Only a guess of what is cached hangs on it: the replica reads the request itself, and refuses what is wrong with it.
    """
    try:
        request = json.loads(body)
    except (ValueError, RecursionError):
        return []
    if not isinstance(request, dict) or not any(request.get(name) for name in TEXTS):
        return []
    root = json.dumps([key, *(request.get(name) for name in ROOTS)])
    # Without their closing brackets, so that a conversation begins like its own next turn.
    text = "".join(json.dumps(request[name], ensure_ascii=False).rstrip('"]}') for name in TEXTS if request.get(name))
    hasher = hashlib.blake2b(root.encode(), digest_size=12)
    found = []
    start = 0
    while start < min(len(text), END):
        end = start + (FINE if start < FINE_END else COARSE)
        hasher.update(text[start:end].encode(errors="surrogatepass"))
        found.append(hasher.digest())
        start = end
    return found


class PrefixRouter(RequestRouter):  # type: ignore[misc]
    """Prefers the replica that was sent the longest beginning of a prompt, unless it has far more to do than another one."""

    # Ray's own 0.1 s are short for a replica whose engine has all cores, and the next replica knows nothing of the prompt.
    queue_len_response_deadline_s = 1.0
    max_queue_len_response_deadline_s = 5.0

    def initialize_state(self, max_imbalance: int = 16) -> None:
        """Begins with nothing known. `max_imbalance`: requests that a preferred replica may have more than the idlest one."""
        self._max_imbalance = max_imbalance
        self._homes: OrderedDict[bytes, set[ReplicaID]] = OrderedDict()
        self._given: dict[ReplicaID, int] = {}

    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        """Ranks of replicas, the best first; within a rank Ray takes the one with fewest requests."""
        if pending_request is None:
            return [candidate_replicas]
        # Without it Ray asks again and again while all replicas are full.
        pending_request.routing_context.should_backoff = True
        loads = {one.replica_id: self.replica_queue_len_cache.get(one.replica_id) or 0 for one in candidate_replicas}
        digests = self._digests(pending_request)
        idlest = min(loads.values(), default=0)
        can_take = {one for one, load in loads.items() if load <= idlest + self._max_imbalance}
        share, homes = self._longest(digests, can_take)
        if share >= MIN_SHARE:
            preferred = [one for one in candidate_replicas if one.replica_id in homes]
        else:
            # New prompts spread: of replicas with equally few requests one after the other. They are counted here, for several
            # that come at once are chosen for before the first is sent.
            preferred = sorted(candidate_replicas, key=lambda one: (loads[one.replica_id], self._given.get(one.replica_id, 0)))[
                :1
            ]
            for one in preferred:
                self._given[one.replica_id] = self._given.get(one.replica_id, 0) + 1
        return [preferred, [one for one in candidate_replicas if one not in preferred]]

    def _longest(self, digests: list[bytes], among: set[ReplicaID]) -> tuple[float, set[ReplicaID]]:
        """The share of a prompt that some of these replicas were sent before, and which."""
        for number in range(len(digests), 0, -1):
            if found := self._homes.get(digests[number - 1], set()) & among:
                return number / len(digests), found
        return 0.0, set()

    def on_request_routed(self, pending_request: PendingRequest, replica_id: ReplicaID, result: Any) -> None:
        """Remembers who was sent the prompt."""
        digests = self._digests(pending_request)
        for digest in digests:
            self._homes.setdefault(digest, set()).add(replica_id)
            self._homes.move_to_end(digest)
        while len(self._homes) > MAX_DIGESTS:
            self._homes.popitem(last=False)

    def on_replica_actor_died(self, replica_id: ReplicaID) -> None:
        """Forgets the replica."""
        super().on_replica_actor_died(replica_id)
        self._forget({replica_id})

    def update_replicas(self, replicas: list[RunningReplica]) -> None:
        """Forgets those that are gone."""
        super().update_replicas(replicas)
        self._forget(set(self._given) - {one.replica_id for one in replicas})

    def _forget(self, gone: set[ReplicaID]) -> None:
        if not gone:
            return
        for replica_id in gone:
            self._given.pop(replica_id, None)
        for digest in [digest for digest, homes in self._homes.items() if homes & gone]:
            self._homes[digest] -= gone
            if not self._homes[digest]:
                del self._homes[digest]

    @staticmethod
    def _digests(pending_request: PendingRequest) -> list[bytes]:
        # Ray sends the router by value, whose `Forwarded` is another class than that of the request.
        return getattr(pending_request.args[0], "digests", []) if pending_request.args else []
