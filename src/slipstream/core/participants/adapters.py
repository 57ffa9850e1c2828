"""Memory for LoRA adapters, which like blocks is a condition of a request's admission.

An adapter needs a place in the host's memory, where it is loaded, and one of `max_running` slots on
the device while a request with it runs.

1. A new request's adapter is loaded at once if a place in host memory is free or unneeded.
2. Otherwise it is loaded when the request is the next to be admitted. It may then replace an
   adapter that only later requests need. So a place becomes free when running requests end, however
   many wait.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Callable, Collection
from typing import TypeAlias

from slipstream.core.participants.base import Participant
from slipstream.core.request import Request
from slipstream.errors import EngineOverloadedError
from slipstream.params.lora_request import LoRARequest

LoadAdapter: TypeAlias = Callable[[LoRARequest, Callable[[], Collection[int]]], str]
"""Loads an adapter while those with the given ids must stay loaded; returns the version of its files.

EngineOverloadedError if there is no place, AdapterError if the adapter can't be read.
"""


class AdapterAdmission(Participant):
    def __init__(self, load: LoadAdapter, max_running: int) -> None:
        self._load = load
        self._max_running = max_running
        self._running = Counter[int]()  # number of running requests by adapter
        self.roots: dict[str, bytes] = {}
        """Root keys of prefixes of requests without a salt, by adapter name."""

    def concerns(self, request: Request) -> bool:
        return request.spec.lora is not None

    def in_use(self) -> set[int]:
        """Ids of the adapters of all requests."""
        found = (r.spec.lora for r in self.requests.by_id.values())
        return {lora.id for lora in found if lora is not None}

    def waiting(self) -> tuple[str, ...]:
        """Names of adapters used only by waiting requests."""
        found = (r.spec.lora for r in self.requests.by_id.values())
        return tuple({o.name: None for o in found if o is not None and o.id not in self._running})

    def load(self, lora: LoRARequest) -> str:
        """Load the adapter without evicting one that a request needs. Returns its identity."""
        return f"{lora.path}:{self._load(lora, self.in_use)}"

    def entered(self, request: Request) -> None:
        assert request.spec.lora is not None
        with contextlib.suppress(EngineOverloadedError):  # then `admits` loads it
            self._loaded(request, self.load(request.spec.lora))

    def admits(self, request: Request) -> bool:
        lora, running = request.spec.lora, self._running
        assert lora is not None
        if lora.id not in running and len(running) >= self._max_running:
            return False
        try:
            self._loaded(request, f"{lora.path}:{self._load(lora, running.keys)}")
        except EngineOverloadedError:
            return False
        return True

    def _loaded(self, request: Request, identity: str) -> None:
        """Take the adapter's files into the keys of the request's prefix blocks, now that their
        `identity` is known."""
        lora, key = request.spec.lora, request.kv.root_key(request.spec.prefix_salt, identity)
        assert lora is not None
        self.roots[lora.name] = request.kv.root_key("", identity)
        if key != request.root_key:
            request.root_key, request.block_keys = key, []

    def use_weights(self) -> None:
        self.roots.clear()

    def started(self, request: Request) -> None:
        assert request.spec.lora is not None
        self._running[request.spec.lora.id] += 1

    def stopped(self, request: Request) -> None:
        assert request.spec.lora is not None
        adapter = request.spec.lora.id
        self._running[adapter] -= 1
        if not self._running[adapter]:
            del self._running[adapter]
