"""Engine cores: building them, putting them to sleep, and waking them."""

from __future__ import annotations

import gc
from collections.abc import Callable

from slipstream.config import EngineArgs
from slipstream.engine.decoder_core import DecoderCore
from slipstream.engine.engine_core import EngineCore
from slipstream.engine.model_files import load_tokenizer
from slipstream.engine.text_core import TextCore
from slipstream.errors import RequestError
from slipstream.worker.executor import Executor, ExecutorSource


def build_core(
    source: ExecutorSource, progress: Callable[[str], None] = lambda phase: None
) -> EngineCore:
    """Build an engine core: find the model and the device, resolve the settings, and load the model. `progress` is
    called with each phase as it begins."""
    return core_of(source.make(progress), source.args)


def core_of(executor: Executor, args: EngineArgs) -> EngineCore:
    """Makes the engine core that uses `executor`, which was created with `args`."""
    # a stuck compilation thread keeps the tokenizer's loader alive, but no weights
    description = executor.description
    if description.spec.is_encoder:
        return TextCore(executor)
    return DecoderCore(executor, lambda: load_tokenizer(args, description))


class Asleep:
    """A sleeping core. At level 1 it keeps the weights, at level 2 nothing. The core's owner creates this, drops its
    reference to the core, and calls `free`. `wake` creates a new core. RequestError if the level is not supported."""

    def __init__(self, core: EngineCore, source: ExecutorSource, level: int) -> None:
        self.check(core, level)
        core.flush()
        self._source, self.level, self._release = source, level, core.executor.release_unused
        self._versions = core.executor.weight_state.used
        self._executor = core.executor.sleep(level)

    @staticmethod
    def check(core: EngineCore, level: int) -> None:
        """Raise RequestError if the core can't sleep at this level."""
        if level not in (1, 2):
            raise RequestError(
                f"level must be 1 (the KV cache) or 2 (the weights, too), got {level!r}",
                field="level",
            )
        if level == 1 and (reason := core.executor.keeps_no_weights) is not None:
            raise RequestError(f"{reason}; level=2 reads them again", field="level")

    def free(self) -> None:
        collect_and_release(self._release)

    def wake(self) -> EngineCore:
        """Make a core like the one that fell asleep, without its requests and cached prefixes.
        After level 2, updates of the weights are lost."""
        if self._executor is None:
            executor = self._source.make()
            executor.weight_state.lose(self._versions)
            return core_of(executor, self._source.args)
        return core_of(self._executor(), self._source.args)


def collect_and_release(release: Callable[[], None] | None) -> None:
    """Free the memory of an engine that is no longer referenced. Its parts refer to each other, so this takes a
    garbage collection."""
    gc.collect()
    if release is not None:
        release()
