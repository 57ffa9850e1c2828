"""Interface of executors. No torch, so that an executor over other processes needs none."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Sequence
from typing import TYPE_CHECKING, Protocol

from slipstream.config import EngineConfig
from slipstream.costs.memory import MemoryLedger
from slipstream.errors import AdapterError
from slipstream.messages.media import AlignmentQuestion, Matrix
from slipstream.messages.stats import AdapterStats, CanaryResult, ExpertBalance, ExpertTokens
from slipstream.messages.steps import Plan, StepResult, StepTime, TokenMask
from slipstream.params.lora_request import LoRARequest
from slipstream.spec.description import ModelDescription
from slipstream.worker.tiers.block_store import HostBlockStore

if TYPE_CHECKING:
    from slipstream.messages.weight_ops import WeightsOp
    from slipstream.messages.weights import GivenPiece, WeightState
    from slipstream.worker.ranks.block_store import RankBlockStore


class Launched(Protocol):
    """Handle of a launched step. Its result may not be computed yet."""

    plan: Plan

    @property
    def is_done(self) -> bool:
        """Whether the launch itself computed the step, so that `result` does not wait."""

    @property
    def awaits_mask(self) -> bool:
        """True if the step samples only after `Executor.constrain`."""

    def proposed(self) -> Sequence[int]:
        """Drafts that a draft model proposed in a step that awaits a mask, in the plan's order."""

    def result(self) -> StepResult:
        """Wait for the result. May be called once."""


class Executor(ABC):
    description: ModelDescription
    config: EngineConfig
    """Configuration, with the context length that the cache has room for."""
    ledger: MemoryLedger
    tiles: str
    """Description, for users, of where the kernels' tile sizes come from; empty if there are none
    to choose."""
    phases: dict[str, float]
    """Seconds of each phase of the start."""
    stores: Sequence[HostBlockStore | RankBlockStore] = ()
    """Tiers below the device's cache, if there are any: one store, or one of each rank with requests of
    its own."""
    processes: tuple[int, ...] = ()
    """Process ids of the ranks on this host."""
    canary: CanaryResult | None
    """Result of the checkpoint's canary at the start."""
    weight_state: WeightState
    """Version of the current weights. The engine core keeps it up to date."""
    takes_tensors = False
    """True if `change_weights` accepts a GivenPiece, because the model is in this process."""

    @abstractmethod
    def launch(self, plan: Plan) -> Launched:
        """Queue one step after those launched before."""

    @abstractmethod
    def constrain(self, step: Launched, mask: TokenMask) -> None:
        """Set the tokens that requests with a grammar may sample in a launched step. Call it before
        the next launch.
        """

    @abstractmethod
    def max_in_flight(self, plan: Plan) -> int:
        """Number of steps that may be in flight once `plan` is launched.

        1 means that the launch computes the step, so the results of the previous step should be
        taken first.
        """

    @abstractmethod
    def forget(self) -> None:
        """Drop every sequence after a step failed."""

    @abstractmethod
    def warm_up(self) -> Sequence[StepTime]:
        """Compile what requests will need, before there are any.

        Returns the times of steps with drafts, where they must be known beforehand.
        """

    @abstractmethod
    def capture_next(self) -> bool:
        """Capture graphs for one more step size, which takes some tens of milliseconds.

        Allowed only while no step is in flight. False if no size is left.
        """

    @abstractmethod
    def expert_load(self) -> ExpertTokens:
        """Tokens per expert since the start, for each layer with experts.

        Never waits for the device.
        """

    def expert_balance(self) -> ExpertBalance | None:
        """Balance of the experts; None if no experts are distributed over ranks."""
        return None

    @abstractmethod
    def change_weights(self, op: WeightsOp | GivenPiece) -> dict[str, str] | None:
        """Perform an operation on the weights, on all ranks. No step may be in flight.

        Returns checksums by parameter if the operation computes them. After an error nothing has
        changed, except with WriteWeights.
        """

    def attention_of(self, asked: AlignmentQuestion) -> Matrix:
        """Compute a text's attention to its audio, between two steps (`worker.alignment`). Only executors of
        one device support it: models that read audio don't start on several ranks (`config.parallel`)."""
        raise NotImplementedError

    @abstractmethod
    def load_adapter(self, request: LoRARequest, keep: Callable[[], Collection[int]]) -> str:
        """Load an adapter into host memory. Returns the version of its files.

        Adapters whose ids `keep` returns must stay loaded. AdapterError if the adapter is invalid;
        EngineOverloadedError if there is no room now.
        """

    def replace_adapter(self, request: LoRARequest) -> str:
        """Replace a loaded adapter's weights by those of other files, also for running requests.
        Returns the files' version. AdapterError, without any change, if they can't be read."""
        raise AdapterError(
            "adapters on several ranks can't be replaced in place; unload it, and load it again",
            field="load_inplace",
        )

    @abstractmethod
    def unload_adapter(self, adapter_id: int) -> None:
        """Forget an adapter that no request needs."""

    @abstractmethod
    def adapter_stats(self) -> AdapterStats | None:
        """Adapter statistics; None if adapters are not enabled."""

    @property
    @abstractmethod
    def release_unused(self) -> Callable[[], None] | None:
        """Function that frees device memory which this process has reserved but no longer uses. It
        may be called after the executor has shut down. None if freed memory is returned at once, or
        other processes hold it.
        """

    @property
    @abstractmethod
    def keeps_no_weights(self) -> str | None:
        """Reason why `sleep(1)` is not possible; None if it is."""

    @abstractmethod
    def sleep(self, level: int) -> Callable[[], Executor] | None:
        """Shut down. Level 1 keeps the weights in host memory, level 2 keeps nothing. Returns a function that
        makes a new executor from the kept weights. The executor can't be used afterwards.
        """

    @abstractmethod
    def shutdown(self) -> None:
        """Stop everything that this executor started. It can't be used afterwards."""
