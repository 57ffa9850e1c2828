"""Router and guard of the replicas of one version. The gateway and the simulated fleet place each
request through them in the same order."""

from __future__ import annotations

from collections.abc import Collection, Sequence, Set

from slipstream.fleet.config import Routing
from slipstream.fleet.gateway.guard import ReplicaGuard
from slipstream.fleet.gateway.router import Decision, Router


class Placing:
    """The choice of a replica for each request: the router's, among those that the guard allows."""

    def __init__(self, routing: Routing, *, seed: int = 0) -> None:
        self.router = Router(
            routing.policy,
            balance=routing.balance,
            thrift=routing.thrift,
            patience_s=routing.patience_s,
            seed=seed,
        )
        self.guard = ReplicaGuard(routing.slow_factor)

    def choose(
        self,
        chains: Sequence[Sequence[bytes]],
        num_tokens: int,
        *,
        now: float,
        session: str | None = None,
        exclude: Collection[str] = frozenset(),
        also: Set[str] = frozenset(),
    ) -> Decision | None:
        """`Router.choose` among replicas that the guard has not excluded, or that are in `also`."""
        out = self.guard.out(now) - also
        decision = self.router.choose(
            chains, num_tokens, now=now, session=session, exclude=out.union(exclude)
        )
        if decision is not None:
            self.guard.sent(decision.replica, now)
        return decision

    def began(self, decision: Decision, ttft_s: float, now: float) -> None:
        """Record the first token of a stream."""
        self.router.began(decision, now)
        self.guard.answered(decision.replica, ttft_s, decision.predicted_ttft_s, now)

    def ended(self, decision: Decision, now: float) -> None:
        """Record the end of a request, also of one that failed. A second call is ignored."""
        self.router.ended(decision, now)
        self.guard.let_go(decision.replica)
