"""How fast tiers load and the device computes, as measured; whether a load pays."""

from __future__ import annotations

from collections.abc import Mapping

from slipstream.messages.tiers import Place

RATE_AGE_S = 60.0
"""Age in seconds at which a rate that rules out loading is forgotten."""

DECAY = 0.75
"""Factor by which each new measurement reduces the weight of the older ones."""


class Rate:
    """Seconds per unit, averaged over recent measurements."""

    def __init__(self) -> None:
        self._seconds = self._units = 0.0
        self.measured_at = 0.0

    def learn(self, units: int, seconds: float, now: float) -> None:
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


class Rates:
    """Time to load a block from each tier, and time to compute a prompt token."""

    def __init__(self) -> None:
        self.host, self.disk, self.peer, self.prefill = Rate(), Rate(), Rate(), Rate()
        self._in_flight: dict[int, tuple[float, int]] = {}
        self._last_end = float("-inf")

    def launched(self, step_id: int, now: float, num_prompt_tokens: int, num_tokens: int) -> None:
        """Note a step's launch. It measures prompts if at least half of its tokens are theirs."""
        if 2 * num_prompt_tokens >= num_tokens:
            self._in_flight[step_id] = now, num_prompt_tokens

    def ended(self, step_id: int, now: float) -> None:
        """Record the time of a step that was launched.

        The time runs from the step's launch, or from the end of the previous step if that is later,
        to the end of the step.
        """
        if (launched := self._in_flight.pop(step_id, None)) is not None and now > (
            begin := max(launched[0], self._last_end)
        ):
            self.prefill.learn(launched[1], now - begin, now)
        self._last_end = now

    def forget_steps(self) -> None:
        self._in_flight.clear()

    def loading_s(self, sizes: Mapping[Place, int]) -> float | None:
        """Seconds to load so many units from each place; None if a rate it needs is not measured."""
        known = [(self.of(place).seconds, size) for place, size in sizes.items() if size]
        found = [seconds * size for seconds, size in known if seconds is not None]
        return sum(found) if len(found) == len(known) else None

    def of(self, place: Place) -> Rate:
        """The rate of loading from there."""
        return {"host": self.host, "disk": self.disk, "peer": self.peer}[place]

    def computing_s(self, num_tokens: int) -> float | None:
        return None if self.prefill.seconds is None else num_tokens * self.prefill.seconds

    def pays(self, sizes: Mapping[Place, int], num_tokens: int, now: float) -> bool | None:
        """Decide whether to load so many units from each place rather than compute `num_tokens` tokens.

        None means that a few blocks should be loaded as a measurement. Those of a peer, which has
        computed them for this, are all loaded.
        """
        loading, computing = self.loading_s(sizes), self.computing_s(num_tokens)
        if computing is None or (loading is None and sizes.get("peer")):
            return True
        if loading is None:
            return None
        if loading <= computing:
            return True
        old = [
            rate
            for place, size in sizes.items()
            if size and now - (rate := self.of(place)).measured_at > RATE_AGE_S
        ]
        for rate in old:
            rate.forget()
        return None if old else False
