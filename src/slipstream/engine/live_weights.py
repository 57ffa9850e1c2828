"""Weight updates of a running core, and weight versions.

1. A version is a string that names one set of weights. It is used only once, so a token's version
   says which weights produced it. "0": the checkpoint as read at the start.
2. An error before the write changes nothing: the old weights stay in use. If the write itself
   fails, the weights are a mix: all requests end with an error, and new ones are refused until a
   complete update is written.
3. Cached prefixes of other weights are never matched: keys begin with the version and the checksum.
   The checksum distinguishes runs that share a folder of cached blocks.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TYPE_CHECKING, NoReturn

from slipstream.core.new_weights import retract_all, use_weights
from slipstream.core.scheduler import Scheduler
from slipstream.errors import EngineError, RequestError
from slipstream.messages.outputs import EngineOutput
from slipstream.messages.weights import GivenPiece, WeightsInfo, total_checksum
from slipstream.worker.executor import Executor

if TYPE_CHECKING:
    from slipstream.engine.engine_core import EngineCore

    # msgspec, which these operations need, is imported for the first of them
    from slipstream.messages.weight_ops import WeightsOp


class LiveWeights:
    """Updates and versions of the weights."""

    def __init__(self, executor: Executor, scheduler: Scheduler) -> None:
        self._executor, self._scheduler = executor, scheduler
        self.state = executor.weight_state
        self.is_updating = False
        self._seconds = 0.0
        if self.state.checksum:  # a core that slept keeps the weights it had
            use_weights(scheduler, self._identity)

    @property
    def version(self) -> str:
        return self.state.version

    @property
    def _identity(self) -> str:
        return f"{self.state.version}:{self.state.checksum}"

    @property
    def takes_tensors(self) -> bool:
        return self._executor.takes_tensors

    def refuse(self) -> NoReturn:
        """Raise EngineError because the weights are `broken`, so that no request may run."""
        raise EngineError(f"{self.state.broken}; update them again")

    def change(self, op: WeightsOp | GivenPiece) -> None:
        """Perform one part of an update, or of its transport. If it raises, nothing has changed."""
        from slipstream.messages.weight_ops import BeginWeights, DropWeights

        self._executor.change_weights(op)
        if isinstance(op, BeginWeights):
            self.is_updating = True
        elif isinstance(op, DropWeights):
            self.is_updating = False

    def _prepare(self, version: str | None) -> str:
        """Check that the update can be written. Returns its version: the given one, or the next
        number. RequestError or CheckpointError if it can't; the update stays under way."""
        used = self.state.used
        if version is None:
            version = next(
                str(i) for i in range(len(used), 2 * len(used) + 1) if str(i) not in used
            )
        if not 0 < len(version) <= 200 or not version.isprintable():
            message = "weight_version must be a text of 1 to 200 printable characters"
            raise RequestError(message, field="weight_version")
        if version in used:
            message = f"weight_version {version!r} was used before; take a new one"
            raise RequestError(message, field="weight_version")
        from slipstream.messages.weight_ops import CheckWeights

        self._executor.change_weights(CheckWeights())
        return version

    def finish(
        self,
        core: EngineCore,
        version: str | None,
        deliver: Callable[[list[EngineOutput]], None] = lambda outputs: None,
    ) -> None:
        """Finish the update between two steps of the core. `deliver` gets the last outputs of the old weights.

        RequestError or CheckpointError: it can't be written, and the old weights stay in use. EngineError: the write
        failed halfway, and all requests have ended with that error."""
        begin, was_paused = time.monotonic(), core.is_paused
        version = self._prepare(version)
        deliver(core.pause())
        try:
            self._write(version)
            self._seconds = time.monotonic() - begin
        except BaseException:
            deliver(core.fail(self.state.broken))
            raise
        finally:
            if not was_paused:
                core.resume()

    def _write(self, version: str) -> None:
        """Write the prepared update. No step may be in flight. EngineError: it failed halfway."""
        from slipstream.messages.weight_ops import DropWeights, WriteWeights

        state, failed = self.state, "an update of the weights failed while it was written"
        self.is_updating = False
        state.broken = f"{failed} (interrupted)"  # until the write is complete, also after Ctrl-C
        try:
            sums = self._executor.change_weights(WriteWeights())
        except BaseException as error:
            state.broken = f"{failed} ({type(error).__name__}: {error})"
            self._executor.change_weights(DropWeights())
            if not isinstance(error, Exception):
                raise
            self.refuse()
        assert sums is not None
        state.used.add(version)
        state.version, state.checksum = version, total_checksum(sums)
        use_weights(self._scheduler, self._identity)
        state.broken = ""

    def abort_all(self, core: EngineCore) -> list[EngineOutput]:
        """End all requests of a paused core now, with the reason "abort"."""
        return core.pass_on([*self._scheduler.abort([*self._scheduler.requests.by_id])])

    def retract_all(self) -> None:
        """Preempt all requests of a paused core, so that their tokens are computed again."""
        retract_all(self._scheduler)

    def info(self, *, checksums: bool = False, is_paused: bool = False) -> WeightsInfo:
        state, sums = self.state, None
        if checksums:
            from slipstream.messages.weight_ops import SumWeights

            sums = self._executor.change_weights(SumWeights())
            assert sums is not None
        return WeightsInfo(
            weight_version=state.version,
            checksum=total_checksum(sums) if sums else state.checksum,
            is_paused=is_paused,
            is_updating=self.is_updating,
            broken=state.broken,
            seconds=self._seconds,
            checksums=sums,
        )


def weights_of(core: EngineCore) -> LiveWeights:
    """Updates of a core's weights. RequestError if it has none."""
    if core.weights is None:
        raise RequestError("weights change in place in models that generate text alone")
    return core.weights
