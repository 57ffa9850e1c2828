"""Executor that runs the model in this process. `start/loading.py` loads it, `start/sizing.py` sizes and allocates its cache.

Plain values go in; plain values and step handles come out."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Sequence
from functools import partial
from typing import TYPE_CHECKING

from slipstream.config import DeviceInfo, EngineArgs, EngineConfig
from slipstream.errors import AdapterError, EngineError, SlipstreamError
from slipstream.messages.stats import AdapterStats, CanaryResult, ExpertTokens
from slipstream.messages.steps import Plan, StepTime, TokenMask
from slipstream.params.lora_request import LoRARequest
from slipstream.spec.description import ModelDescription
from slipstream.spec.devices.autotune_table import NO_TILES, TileTable
from slipstream.worker.base import Executor, Launched
from slipstream.worker.loaded_runner import LoadedRunner
from slipstream.worker.model_runner import ModelRunner
from slipstream.worker.sampling.constrained import AwaitingMask
from slipstream.worker.start.canary import check_start
from slipstream.worker.start.loading import Ranks, load_runner
from slipstream.worker.start.sizing import fit_cache
from slipstream.worker.tiers.block_store import HostBlockStore
from slipstream.worker.tiers.opening import open_tiers

if TYPE_CHECKING:
    from slipstream.messages.media import AlignmentQuestion, Matrix
    from slipstream.messages.weight_ops import WeightsOp
    from slipstream.messages.weights import GivenPiece


class LocalExecutor(Executor):
    store: HostBlockStore | None
    takes_tensors = True

    def __init__(
        self,
        config: EngineConfig,
        description: ModelDescription,
        loaded: LoadedRunner,
        tiles: TileTable = NO_TILES,
    ) -> None:
        """Measure activations, then size and allocate the cache. `build` performs the earlier steps."""
        self.description, self.phases = description, loaded.phases
        self.tiles = tiles.describe() if config.device.info.is_cuda else ""
        self.config, self.ledger, self.runner = fit_cache(config, loaded, loaded.profile())
        store = open_tiers(self.config, description, self.runner, self.ledger.sizes)
        self.stores: Sequence[HostBlockStore] = () if store is None else (store,)
        self.canary, self.weight_state = None, loaded.weight_state

    @classmethod
    def build(
        cls,
        args: EngineArgs,
        *,
        progress: Callable[[str], None] = lambda phase: None,
        by_torch: bool = False,
        ranks: Ranks | None = None,
        device: DeviceInfo | None = None,
        known: ModelDescription | None = None,
    ) -> LocalExecutor:
        """Load the model. `progress` is called as each phase begins. A CPU runs it without torch where it can
        (`forward_paths.host_refusal`), unless `by_torch`. `ranks`, `device`, `known`: see `load_runner`."""
        description, loaded, tiles = load_runner(
            args, progress=progress, by_torch=by_torch, ranks=ranks, device=device, known=known
        )
        loaded.is_woken = known is not None
        progress("cache")
        executor = cls(loaded.config, description, loaded, tiles)
        executor.canary = check_start(executor, args.canary)
        return executor

    def launch(self, plan: Plan) -> Launched:
        return self.runner.launch(plan)

    def constrain(self, step: Launched, mask: TokenMask) -> None:
        assert isinstance(step, AwaitingMask)
        step.constrain(mask)

    def max_in_flight(self, plan: Plan) -> int:
        return self.runner.max_in_flight(plan)

    def forget(self) -> None:
        self.runner.forget_rows()

    def warm_up(self) -> Sequence[StepTime]:
        loaded, runner = self.runner.loaded, self.runner
        if not loaded.warms_up or not isinstance(runner, ModelRunner):
            return ()
        from slipstream.worker.draft.costs import measure_draft_costs
        from slipstream.worker.start.warm_up import warm_up

        with loaded.without_copies():
            warm_up(runner)
        begin = time.perf_counter()
        found = measure_draft_costs(runner, self.ledger.num_blocks)
        if found:
            self.phases["steps with drafts"] = time.perf_counter() - begin
        return found

    def capture_next(self) -> bool:
        return self.runner.capture_next()

    def expert_load(self) -> ExpertTokens:
        return self.runner.expert_load()

    def change_weights(self, op: WeightsOp | GivenPiece) -> dict[str, str] | None:
        from slipstream.messages.weight_ops import WriteWeights

        self.runner.settle()
        try:
            with self.runner.platform.values.inference():
                return self.runner.loaded.weight_updates.do(op)
        except Exception as error:
            if isinstance(error, SlipstreamError) or isinstance(op, WriteWeights):
                raise
            raise EngineError(
                f"{type(op).__name__} failed, and the weights have not changed: "
                f"{type(error).__name__}: {error}"
            ) from error

    def attention_of(self, asked: AlignmentQuestion) -> Matrix:
        from slipstream.worker.alignment import attention_of

        return attention_of(self.runner, asked)

    def load_adapter(self, request: LoRARequest, keep: Callable[[], Collection[int]]) -> str:
        if self.runner.adapters is None:
            raise AdapterError("adapters are off; start with enable_lora", field="enable_lora")
        return self.runner.adapters.load(request, keep)

    def replace_adapter(self, request: LoRARequest) -> str:
        runner = self.runner
        if runner.adapters is None:
            raise AdapterError("adapters are off; start with enable_lora", field="enable_lora")
        runner.settle()
        with runner.platform.values.inference():
            version = runner.adapters.replace(request)
            if isinstance(runner, ModelRunner) and runner.adapter_graphs is not None:
                runner.adapter_graphs.adapters_changed()
        return version

    def unload_adapter(self, adapter_id: int) -> None:
        if self.runner.adapters is not None:
            self.runner.adapters.unload(adapter_id)

    def adapter_stats(self) -> AdapterStats | None:
        return None if self.runner.adapters is None else self.runner.adapters.stats()

    @property
    def release_unused(self) -> Callable[[], None] | None:
        platform = self.runner.platform
        return platform.release_unused if platform.caches_memory else None

    @property
    def keeps_no_weights(self) -> str | None:
        if self.runner.platform.kind == "cpu":
            return None
        return "level 1 keeps weights in host memory, which is not supported on a GPU"

    def sleep(self, level: int) -> Callable[[], Executor] | None:
        self.shutdown()
        loaded = self.runner.release()
        return partial(_woken, loaded, self.canary) if level == 1 else None

    def shutdown(self) -> None:
        """Stop the tiers' threads. Memory is freed when the process ends."""
        for store in self.stores:
            store.close()
        self.stores = ()


def _woken(loaded: LoadedRunner, canary: CanaryResult | None) -> LocalExecutor:
    """Make an executor from a model that slept with its weights kept. Its cache is allocated again."""
    executor = LocalExecutor(loaded.config, loaded.model.description, loaded)
    executor.canary = canary
    return executor
