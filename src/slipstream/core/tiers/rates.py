"""Measured rates of loading from tiers and of computing, to decide whether loading pays."""

from __future__ import annotations

RATE_AGE_S = 60.0
"""Age in seconds at which a rate that rules out loading is forgotten."""

DECAY = 0.75
"""Factor by which each new measurement reduces the weight of the older ones."""


class Rate:
    """Seconds per unit, averaged over recent measurements."""

    def __init__(self) -> None:
        self._seconds = self._units = 0.0
        self.measured_at = 0.0

    def learn(self, units: float, seconds: float, now: float) -> None:
        self._seconds = self._seconds * DECAY + seconds
        self._units = self._units * DECAY + units
        self.measured_at = now

    def forget(self) -> None:
        self._seconds = self._units = 0.0

    @property
    def seconds(self) -> float | None:
        """Seconds per unit; None if not measured."""
        return self._seconds / self._units if self._units else None

    @property
    def per_second(self) -> float:
        """Units per second; 0 if not measured."""
        return self._units / self._seconds if self._seconds > 0 else 0.0


class TierRates:
    """Time to load a block from each tier, and time for a rank to compute a prompt token."""

    def __init__(self) -> None:
        self.host, self.disk, self.peer, self.prefill = Rate(), Rate(), Rate(), Rate()
        self._in_flight: dict[int, tuple[float, float]] = {}
        self.last_end = float("-inf")  # of a step

    def launched(
        self, step_id: int, now: float, num_prompt_tokens: int, num_tokens: int, share: float = 1.0
    ) -> None:
        """Note a step's launch. It measures prompts if at least half of its tokens are theirs.

        `share` of them are on the rank with the most, for which the others wait.
        """
        if 2 * num_prompt_tokens >= num_tokens:
            self._in_flight[step_id] = now, num_prompt_tokens * share

    def ended(self, step_id: int, now: float) -> None:
        """Record the time of a step that was launched.

        The time runs from the step's launch, or from the end of the previous step if that is later,
        to the end of the step.
        """
        if (launched := self._in_flight.pop(step_id, None)) is not None and now > (
            begin := max(launched[0], self.last_end)
        ):
            self.prefill.learn(launched[1], now - begin, now)
        self.last_end = now

    def forget_steps(self) -> None:
        self._in_flight.clear()

    def loading_s(self, num_host: int, num_disk: int) -> float | None:
        """Seconds to load the blocks; None if a rate it needs is not measured."""
        host, disk = self.host.seconds if num_host else 0.0, self.disk.seconds if num_disk else 0.0
        return None if host is None or disk is None else num_host * host + num_disk * disk

    def computing_s(self, num_tokens: int) -> float | None:
        return None if self.prefill.seconds is None else num_tokens * self.prefill.seconds

    def pays(self, num_host: int, num_disk: int, num_tokens: int, now: float) -> bool | None:
        """Decide whether to load the blocks rather than compute `num_tokens` tokens.

        None means that a few blocks should be loaded as a measurement.
        """
        loading, computing = self.loading_s(num_host, num_disk), self.computing_s(num_tokens)
        if computing is None:
            return True
        if loading is None:
            return None
        if loading <= computing:
            return True
        old = [
            r
            for r, n in ((self.host, num_host), (self.disk, num_disk))
            if n and now - r.measured_at > RATE_AGE_S
        ]
        for rate in old:
            rate.forget()
        return None if old else False
