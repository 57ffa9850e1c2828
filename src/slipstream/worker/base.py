"""The interface of executors. No torch, so that one over other processes needs none."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Sequence
from typing import Protocol

from slipstream.config import EngineConfig
from slipstream.costs.memory import MemoryLedger
from slipstream.spec.description import ModelDescription
from slipstream.stats import AdapterStats, CanaryResult, ExpertBalance, ExpertTokens
from slipstream.types import LoRARequest, Plan, StepResult, StepTime, TokenMask
from slipstream.worker.block_store import BlockStore


class Launched(Protocol):
    """A step that was launched."""

    plan: Plan

    @property
    def is_done(self) -> bool:
        """Whether the launch itself computed it, so that `result` does not wait."""

    @property
    def awaits_mask(self) -> bool:
        """Whether it samples, and has a result, only after `Executor.constrain`."""

    def proposed(self) -> Sequence[int]:
        """The drafts that a draft model proposed in a step that awaits a mask, in the plan's order."""

    def result(self) -> StepResult:
        """Wait for it. To be called once."""


class Executor(ABC):
    description: ModelDescription
    config: EngineConfig
    """With the context that the cache has room for."""
    ledger: MemoryLedger
    tiles: str
    """The kernels' tiles, for a person; empty where there is no choice."""
    phases: dict[str, float]
    """Seconds of each phase of the start."""
    store: BlockStore | None = None
    """The tiers below the device's cache; None: there are none."""
    processes: tuple[int, ...] = ()
    """The ids of the ranks' processes on this host."""
    canary: CanaryResult | None
    """The result of the checkpoint's canary at the start."""

    @abstractmethod
    def launch(self, plan: Plan) -> Launched:
        """Queue one step behind those launched before."""

    @abstractmethod
    def constrain(self, step: Launched, mask: TokenMask) -> None:
        """Give the tokens that a step's requests with a grammar may draw. It must come before the next launch."""

    @abstractmethod
    def max_in_flight(self, plan: Plan) -> int:
        """How many steps may be in flight once `plan` is launched. 1: the launch computes it, so the results of the step before
        should be taken first."""

    @abstractmethod
    def forget(self) -> None:
        """Drop every sequence, after a step failed."""

    @abstractmethod
    def warm_up(self) -> Sequence[StepTime]:
        """Compile what requests will need, before there are any. Returns what steps with drafts take, where that is to be known
        beforehand."""

    @abstractmethod
    def capture_next(self) -> bool:
        """Prepare one more size of step, some tens of milliseconds; only while no step is in flight. False: none is left."""

    @abstractmethod
    def expert_load(self) -> ExpertTokens:
        """Tokens by expert since the start, of each layer with experts. It never waits for the device."""

    def expert_balance(self) -> ExpertBalance | None:
        """None: no experts are dealt out to ranks."""
        return None

    @abstractmethod
    def load_adapter(self, request: LoRARequest, keep: Callable[[], Collection[int]]) -> str:
        """Have an adapter in the host's memory, where those of the ids that `keep` gives must stay; the version of its files.
        AdapterError says what is wrong with it, EngineOverloadedError that there is no room now."""

    @abstractmethod
    def unload_adapter(self, adapter_id: int) -> None:
        """Forget an adapter that no request needs."""

    @abstractmethod
    def adapter_stats(self) -> AdapterStats | None:
        """None: adapters are not enabled."""

    @property
    @abstractmethod
    def release_unused(self) -> Callable[[], None] | None:
        """Gives back the device memory that this process holds and no longer uses. It outlives the executor. None: freed memory
        goes back at once, or other processes hold it."""

    @property
    @abstractmethod
    def keeps_no_weights(self) -> str | None:
        """Why `sleep(1)` is not possible; None if it is."""

    @abstractmethod
    def sleep(self, level: int) -> Callable[[], Executor] | None:
        """End what this executor started, and keep the weights at level 1, nothing at level 2. Returns what makes an executor
        of the weights that are kept. No other call comes after it."""

    @abstractmethod
    def shutdown(self) -> None:
        """End what this executor started. No other call comes after it."""
