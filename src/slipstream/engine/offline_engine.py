"""The engine core under `LLM`: start and end, adapters, sleep, weight updates, and exclusive use by one caller."""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

from slipstream.base.other_engines import METHODS
from slipstream.config import EngineArgs, EngineConfig
from slipstream.costs.memory import MemoryLedger
from slipstream.engine.asleep import Asleep, build_core, collect_and_release
from slipstream.engine.engine_core import EngineCore
from slipstream.engine.folder import settled
from slipstream.engine.live_weights import weights_of
from slipstream.engine.model_files import (
    default_sampling,
    load_gguf_tokenizer,
    load_tokenizer,
    log_canary,
)
from slipstream.engine.output import OutputProcessor
from slipstream.engine.requests.processor import InputProcessor
from slipstream.engine.text.chat_template import read_template
from slipstream.engine.text.tokenizer import Tokenizer
from slipstream.errors import EngineError, RequestError
from slipstream.messages.outputs import EngineOutput, tokens_of
from slipstream.messages.stats import CanaryResult, EngineStats
from slipstream.messages.weights import GivenPiece, WeightsInfo
from slipstream.outputs import RequestOutput
from slipstream.params.lora_request import LoRARequest
from slipstream.params.sampling import SamplingParams
from slipstream.worker.executor import ExecutorSource

if TYPE_CHECKING:
    from slipstream.messages.weight_ops import WeightsOp


@contextmanager
def no_collections() -> Iterator[Callable[[], object]]:
    """Context manager that disables Python's cyclic garbage collection. With torch's million
    objects a collection delays a step by 50 ms, many times a second, and steps create no cycles.

    Yields a function that collects the youngest generation now, instead of at the first allocation
    afterwards: 7 ms for 64 prompts of 8,000 tokens, which cost nothing while a device computes.
    """
    was = gc.isenabled()
    gc.disable()
    try:
        yield partial(gc.collect, 0) if was else lambda: None
    finally:
        if was:
            gc.enable()


class OfflineEngine:
    """An engine core in this process, with the model's tokenizer. While one call runs, calls from other threads are
    refused."""

    @classmethod
    def from_engine_args(
        cls, args: EngineArgs, *, progress: Callable[[str], None] = lambda phase: None
    ) -> Self:
        """Starts from a complete set of settings. `progress` is called with each phase of the start as it begins."""
        made = cls.__new__(cls)
        made._start(args, progress)
        return made

    def _start(self, args: EngineArgs, progress: Callable[[str], None]) -> None:
        args = settled(args)
        if args.chat_template is not None:
            # an invalid one must raise before the model is loaded
            read_template(args.chat_template)
        self._asleep: Asleep | None = None
        progress("model")
        with no_collections():  # nearly all objects of a start stay alive
            early = load_gguf_tokenizer(args)
            self._source = ExecutorSource(args, early[0] if early else None)
            self._core: EngineCore | None = build_core(self._source, progress)
            log_canary(self._core.executor.canary)
            progress("tokenizer")
            self.tokenizer = early[1] if early else load_tokenizer(args, self._core.description)
        self._core.use_tokenizer(lambda: self.tokenizer)
        self._input = InputProcessor.for_model(
            self._core.description, self._core.config, self.tokenizer
        )
        self._output = OutputProcessor(self.tokenizer)
        self._turn = threading.Lock()  # the thread that holds it may step the engine

    if not TYPE_CHECKING:  # type checkers would accept any name

        def __getattr__(self, name: str) -> Any:
            if name not in METHODS:
                # raises AttributeError, or a property's own error
                return object.__getattribute__(self, name)
            what = f"{type(self).__name__!r} object has no attribute {name!r}"
            raise AttributeError(f"{what}; {METHODS[name]}")

    @property
    def core(self) -> EngineCore:
        if self._core is None:
            why = "sleeps; call wake_up()" if self.is_sleeping else "was shut down; make a new one"
            raise RequestError(f"this LLM {why}")
        return self._core

    @property
    def config(self) -> EngineConfig:
        return self.core.config

    @property
    def ledger(self) -> MemoryLedger:
        return self.core.ledger

    @property
    def phases(self) -> dict[str, float]:
        """Seconds of each phase of the start."""
        return self.core.executor.phases

    @property
    def canary(self) -> CanaryResult | None:
        """The result of the checkpoint's canary at the start; None if there is none or it did not run."""
        return self.core.executor.canary

    def stats(self) -> EngineStats:
        return self.core.stats(experts=True)

    def get_tokenizer(self) -> Tokenizer:
        if self.tokenizer is None:
            raise RequestError(
                "there is no tokenizer: skip_tokenizer_init is set", field="skip_tokenizer_init"
            )
        return self.tokenizer

    def get_default_sampling_params(self) -> SamplingParams:
        """Default parameters of a request: those of the model's generation_config.json, otherwise general defaults."""
        return default_sampling(self.core.description)

    def load_adapter(self, lora_request: LoRARequest, *, load_inplace: bool = False) -> None:
        """Read an adapter before a request needs it. AdapterError if it is invalid. `load_inplace`:
        it replaces the adapter with the same id, from the same files or others."""
        if load_inplace:
            self.core.replace_adapter(lora_request)
        else:
            self.core.load_adapter(lora_request)

    def unload_adapter(self, lora_request: LoRARequest) -> None:
        """Free an adapter's memory."""
        self.core.unload_adapter(lora_request.id)

    def reset_prefix_cache(self) -> None:
        """Forget all cached prefixes, and the earlier answers that drafts are looked up in (for benchmarks)."""
        self.core.scheduler.reset_prefix_cache()

    # --- Weights that change ------------------------------------------------------------------------------------------

    def init_weight_transfer_engine(self, request: Any = None) -> WeightsInfo:
        """Join a trainer's group, as in `AsyncLLM`. Neither this nor the next four methods may be called while a stream is
        open."""
        from slipstream.engine.weight_calls import joining

        group = joining(request)
        return self._change_weights(group) if group else self.weights()

    def start_weight_update(self, request: Any = None) -> WeightsInfo:
        from slipstream.engine.weight_calls import declared
        from slipstream.messages.weight_ops import BeginWeights

        return self._change_weights(BeginWeights(declared(request)))

    def update_weights(self, request: Any) -> WeightsInfo:
        from slipstream.engine.weight_calls import as_message, piece_of

        piece = piece_of(request)
        if weights_of(self.core).takes_tensors:
            return self._change_weights(piece)
        with as_message(piece) as sent:
            return self._change_weights(sent)

    def finish_weight_update(self, weight_version: str | None = None) -> WeightsInfo:
        with self._exclusive():
            weights_of(self.core).finish(self.core, weight_version)
            self._output.use_version(weights_of(self.core).version)
        return self.weights()

    def abort_weight_update(self) -> WeightsInfo:
        from slipstream.messages.weight_ops import DropWeights

        return self._change_weights(DropWeights())

    def weights(self, *, checksums: bool = False) -> WeightsInfo:
        """State of the current weights. With `checksums`, checksums of all parameters are
        computed."""
        return weights_of(self.core).info(checksums=checksums)

    def _change_weights(self, op: WeightsOp | GivenPiece) -> WeightsInfo:
        with self._exclusive():
            weights_of(self.core).change(op)
        return self.weights()

    def sleep(self, level: int = 1) -> None:
        """Free memory until `wake_up`: at level 1 the KV cache; at level 2 also the weights, which are then read again
        from the checkpoint. Cached prefixes are lost.

        Level 1 keeps the weights in host memory. A GPU's weights are not moved there, so a GPU only supports level 2.
        """
        with self._exclusive():
            self._asleep = Asleep(self.core, self._source, level)
            self._core = None
        self._asleep.free()

    def wake_up(self, tags: Sequence[str] | None = None) -> None:
        """Undo `sleep`: restore weights and cache. `tags` are vLLM's: None, or both "weights" and "kv_cache"."""
        if tags is not None and set(tags) != {"weights", "kv_cache"}:
            raise RequestError(
                f"all is taken back at once; leave tags out, got {list(tags)!r}", field="tags"
            )
        if self._asleep is None:
            return
        self._core, self._asleep = self._asleep.wake(), None
        self._output.use_version(self._core.executor.weight_state.version)
        self._input = InputProcessor.for_model(
            self._core.description, self._core.config, self.tokenizer
        )

    @property
    def is_sleeping(self) -> bool:
        return self._asleep is not None

    def shutdown(self) -> None:
        """Free the model's memory."""
        core, self._core, self._asleep = self._core, None, None
        if core is None:
            return
        core.shutdown()
        release = core.executor.release_unused
        del core  # must be dropped before its memory can be freed
        if release is not None:
            collect_and_release(release)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.shutdown()

    @contextmanager
    def _exclusive(self) -> Iterator[None]:
        """Context manager that holds the engine for one caller. Only one may step it, because that
        caller receives all outputs."""
        if not self._turn.acquire(blocking=False):
            raise RequestError(
                "this LLM is in the middle of a stream or of another thread's call: finish or close that first, or use AsyncLLM"
            )
        try:
            yield
        finally:
            self._turn.release()

    def _step(self, *, until_done: bool = False) -> list[RequestOutput]:
        deltas, aborts = self._output.process(tokens_of(self._core_step()), until_done=until_done)
        if aborts:
            self.core.abort(aborts)
        return deltas

    def _core_step(self) -> list[EngineOutput]:
        core = self.core
        outputs = core.step()
        if not outputs and not core.can_step:
            check_alive(core)
            core.wait()
        return outputs


def check_alive(core: EngineCore) -> None:
    """Raise EngineError if requests wait and nothing can ever run them: that would be a scheduler
    bug, and an error is better than a hang."""
    if core.scheduler.has_requests and core.next_wakeup() is None:
        raise EngineError(
            "requests are waiting but no step can be scheduled; please report this with the settings used"
        )
