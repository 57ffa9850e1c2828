"""Tokens that a request's grammar forces, which are computed with the token before them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from slipstream.core.participants.base import Participant
from slipstream.core.request import Request


class ForcedTokens(Participant):
    """Guides requests with a grammar or a budget of reasoning. `find` is the engine's part: it knows the grammars."""

    guides = adds = True

    def __init__(self, find: Callable[[str, int], tuple[int, ...]]) -> None:
        """`find` maps (request id, number of pending tokens) to the tokens that its grammar forces."""
        self.find = find

    def concerns(self, request: Request) -> bool:
        return request.spec.sampling.is_masked

    def unmask(self, request_id: str) -> None:
        """Sample without masks from the next step on, for a request whose reasoning budget is
        spent. It is no longer guided, unless it has recurrent states, whose slots were chosen for a
        guided request."""
        request = self.requests.by_id.get(request_id)
        if request is None:
            return
        sampling = replace(request.spec.sampling, thinking_token_budget=None)
        request.spec = replace(request.spec, sampling=sampling)
        if not request.kv.kinds:
            request.guide = None
        if request.in_worker:
            self.requests.unmasked.append(request_id)

    def certain(self, request: Request) -> tuple[int, ...]:
        """Tokens that the grammar forces now.

        There are none with log-probabilities and the sampler chain, which need logits, and none
        with `allowed_token_ids`, which the grammar does not know.
        """
        sampling = request.spec.sampling
        if (
            sampling.logprobs is not None
            or sampling.allowed_token_ids is not None
            or sampling.by_chain
        ):
            return ()
        return self.find(request.request_id, request.num_pending)
