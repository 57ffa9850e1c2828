"""The engine: a scheduler and a model runner, stepped.

    add / abort ──> Scheduler ── StepPlan ──> ModelRunner ──> tokens ──> Scheduler ──> EngineOutput

An encoder has a `TextScheduler`, TextsPlans and vectors in their places.

On a GPU two steps are in flight: step N + 1 is scheduled and launched while step N runs, and its input tokens never leave
the device. The scheduler knows how many tokens step N will add, if not which; a sequence that turns out to have ended in
step N is dropped from N + 1's results. On a CPU the same holds of steps of a few greedy decodes; any other is done when it is
launched.

Not thread-safe: one thread owns a core.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Iterable

import torch

from slipstream.config import DTYPE_BYTES, EngineArgs, EngineConfig, resolve
from slipstream.core.pooled import Steps, TextScheduler, TextSequences
from slipstream.core.scheduler import Scheduler, SchedulerConfig
from slipstream.errors import ConfigError, EngineError, ModelError
from slipstream.hub import machine_folder, resolve_model, tiles_folder, weights_folder
from slipstream.plan.hardware import host_memory
from slipstream.plan.memory import MemoryLedger, block_bytes, kv_budget, plan_kv, scratch_blocks
from slipstream.spec.autotune_table import NO_TILES, TileTable, load_tiles
from slipstream.spec.description import ModelDescription, read_spec
from slipstream.types import CanaryResult, EngineOutput, EngineRequest, EngineStats, FinishReason, Plan, TextsRequest
from slipstream.worker.canary import CANARY_NAME, read_canary, run_canary
from slipstream.worker.device import detect
from slipstream.worker.model_runner import InFlightStep, ModelRunner

_logger = logging.getLogger("slipstream.engine")


class EngineCore:
    def __init__(
        self, config: EngineConfig, description: ModelDescription, runner: ModelRunner, tiles: TileTable = NO_TILES
    ) -> None:
        """Measure activations, size the cache, allocate it. `EngineCore.build` does what comes before."""
        self.description = description
        self.runner = runner
        self.tiles = tiles
        activation_bytes = runner.profile()
        self.config, self.ledger = _fit(config, description, runner, activation_bytes)
        scheduling = SchedulerConfig(
            max_num_seqs=self.config.scheduling.max_num_seqs,
            max_num_batched_tokens=self.config.scheduling.max_num_batched_tokens,
            max_num_mixed_tokens=self.config.scheduling.max_num_mixed_tokens,
            max_model_len=self.config.model.max_model_len,
            block_size=self.config.cache.block_size,
            num_blocks=self.ledger.num_blocks,
            enable_prefix_caching=self.config.cache.enable_prefix_caching,
            enable_chunked_prefill=self.config.scheduling.enable_chunked_prefill,
            policy=self.config.scheduling.policy,
            batch_window_s=self.config.scheduling.batch_window_s,
            max_queue=self.config.scheduling.max_queue,
            cache_salt=f"{description.path}:{self.config.model.dtype}",
        )
        self.scheduler: Steps = TextScheduler(scheduling) if description.spec.is_encoder else Scheduler(scheduling)
        self._texts = TextSequences()  # of a decoder
        self.depth = 2
        self._in_flight: deque[InFlightStep] = deque()
        self._planned: Plan | None = None  # and not launched yet
        self._stalled = False  # the last look found nothing to compute; only news or time will change that
        self._started = self._last_step = time.monotonic()
        self._num_steps = self._prompt_tokens = self._generated_tokens = 0
        self.canary: CanaryResult | None = None  # what the checkpoint's canary said at the start

    @classmethod
    def build(cls, args: EngineArgs, *, progress: Callable[[str], None] = lambda phase: None) -> EngineCore:
        """Find the model and the device, resolve the settings, load. `progress` is told each phase as it begins."""
        description, runner, tiles = load_runner(args, progress=progress)
        progress("cache")
        core = cls(runner.config, description, runner, tiles)
        core.canary = core._run_canary(args.canary)
        return core

    def _run_canary(self, wanted: str) -> CanaryResult | None:
        """Run the checkpoint's canary, where it has one. ModelError if it is to be refused. What is no decoder can't sing."""
        if wanted == "off" or self.config.model.load_format == "dummy":
            return None
        if (kind := self.description.spec.kind) != "a decoder":
            told = f"{self.description.path} is {kind}, for which no canary can tell anything"
            if wanted == "refuse":
                raise ConfigError(f"canary='refuse', but {told}; leave it at 'warn', or set 'off'", field="canary")
            if (self.description.path / CANARY_NAME).is_file():
                _logger.warning("%s; its %s is not looked at: delete it, or set canary='off'", told, CANARY_NAME)
            return None
        canary = read_canary(self.description.path, self.description.spec.vocab_size)
        if canary is None:
            if wanted == "refuse":
                raise ConfigError(
                    f"canary='refuse', but {self.description.path} has no {CANARY_NAME}; leave it at 'warn', or let "
                    "`slipstream compress` write one",
                    field="canary",
                )
            return None
        begin = time.perf_counter()
        model = self.runner.model.decoder
        result = run_canary(model, self.runner.kv, canary, context=self.config.model.max_model_len)
        self.runner.reset_expert_load()
        self.phases["canary"] = time.perf_counter() - begin
        if wanted == "refuse" and not result.ok:
            raise ModelError(f"{result.describe()}; take other kernels or another kv_cache_dtype, or canary='warn'")
        return result

    @property
    def phases(self) -> dict[str, float]:
        """Seconds of each phase of the start."""
        return self.runner.phases

    # --- Requests -----------------------------------------------------------------------------------------------------

    def add(self, requests: Iterable[EngineRequest]) -> None:
        """Queue requests. ContextLengthError or EngineOverloadedError name the first that can't be taken."""
        self._stalled = False
        requests = list(requests)
        assert isinstance(self.scheduler, Scheduler), "an encoder takes texts"
        for request in requests:
            self.scheduler.add(request)
        # A prompt that several choices share is one prompt.
        self._prompt_tokens += sum(len(r.encoder_token_ids or r.prompt_token_ids) for r in requests if r.fork_of is None)

    def add_texts(self, request: TextsRequest) -> None:
        """Queue texts whose vectors or scores are wanted. Errors as of `add`; the caller aborts the request then."""
        if not isinstance(self.scheduler, TextScheduler):
            self.add(self._texts.split(request))
            return
        self._stalled = False
        self.scheduler.add(request)
        self._prompt_tokens += len(request.token_ids) // 4

    def abort(self, request_ids: Iterable[str], reason: FinishReason = FinishReason.ABORT) -> list[EngineOutput]:
        self._stalled = False
        return self.scheduler.abort(self._texts.forget(request_ids), reason)

    @property
    def has_work(self) -> bool:
        return bool(self._in_flight) or self._planned is not None or self.scheduler.has_requests

    def step(self) -> list[EngineOutput]:
        """Launch the next step, if there is one, and finish the oldest when enough are in flight. Whatever interrupts it, a
        Ctrl-C included, ends all requests: a step that was planned and not carried out leaves blocks that hold less than
        they stand for."""
        try:
            return self._step()
        except BaseException as error:
            self._in_flight.clear()
            self._planned = None
            self.scheduler.fail_all(FinishReason.ERROR, f"{type(error).__name__}: {error}")
            self._texts.clear()
            self.runner.forget_rows()
            raise

    def _step(self) -> list[EngineOutput]:
        plan, self._planned = self._planned or self.scheduler.schedule(), None
        outputs = self.scheduler.drain_outputs()
        self._stalled = plan is None
        if plan is not None and self._in_flight and self.runner.is_long_in_launch(plan):
            plan, self._planned = None, plan  # the tokens of the step under way are not to wait for it
        if plan is not None:
            self._in_flight.append(self.runner.launch(plan))
        waits = plan is None or len(self._in_flight) >= self.depth
        while self._in_flight and (waits or self._in_flight[0].done is None):
            step, waits = self._in_flight.popleft(), False
            new = self.scheduler.update(step.plan, step.result())
            self._num_steps += 1
            self._last_step = time.monotonic()
            self._generated_tokens += sum(len(o.token_ids) for o in new)
            outputs += new
        return self._texts.joined(outputs)

    @property
    def can_step(self) -> bool:
        """`step()` may do something now."""
        return bool(self._in_flight or self._planned) or (self.scheduler.has_requests and not self._stalled)

    def next_wakeup(self) -> float | None:
        """When, in time.monotonic(), a step may become possible without a new request; None if never."""
        return self.scheduler.next_wakeup()

    def wait(self) -> None:
        """Sleep until `next_wakeup()` (a batching window or a deadline)."""
        wakeup = self.next_wakeup()
        if wakeup is not None:
            time.sleep(max(0.0, wakeup - time.monotonic()))

    def stats(self, *, experts: bool = False) -> EngineStats:
        s = self.scheduler.stats()
        now = time.monotonic()
        return EngineStats(
            num_running=s.num_running,
            num_waiting=s.num_waiting,
            num_blocks=s.num_blocks,
            num_free_blocks=s.num_free_blocks,
            kv_cache_usage=s.kv_usage,
            prefix_queries=s.prefix_queries,
            prefix_hits=s.prefix_hits,
            num_preemptions=s.num_preemptions_total,
            kv_allocated_tokens=s.kv_allocated_tokens,
            kv_wasted_tokens=s.kv_wasted_tokens,
            num_steps=self._num_steps,
            last_step_age_s=now - self._last_step,
            prompt_tokens_total=self._prompt_tokens,
            generation_tokens_total=self._generated_tokens,
            uptime_s=now - self._started,
            expert_load=self.runner.expert_load() if experts else (),
        )


def load_runner(
    args: EngineArgs, *, progress: Callable[[str], None] = lambda phase: None
) -> tuple[ModelDescription, ModelRunner, TileTable]:
    """The model that `args` describe, loaded on its device, without a cache; its config is `runner.config`."""
    begin = time.perf_counter()
    progress("model")
    path = resolve_model(args.model, download_dir=args.download_dir)
    description = read_spec(path)
    progress("device")
    config = resolve(args, description, detect(args.device, machine_folder(), num_threads=args.num_threads))
    found = time.perf_counter() - begin
    progress("weights")
    tiles = load_tiles(config.device.tile_table, config.device.info.name, tiles_folder())
    runner = ModelRunner(config, description, tiles, weights_folder=weights_folder(args.download_dir))
    runner.phases["resolve"] = found
    return description, runner, tiles


def _fit(
    config: EngineConfig, description: ModelDescription, runner: ModelRunner, activation_bytes: int
) -> tuple[EngineConfig, MemoryLedger]:
    """Size the KV cache by what is left, allocate it, and account for all of it."""
    spec, info = description.spec, config.device.info
    element, size = DTYPE_BYTES[config.cache.dtype], config.cache.block_size
    one_block = block_bytes(spec, size, element)
    weights, rows = runner.model.weights_bytes, runner.rows_bytes()
    graphs = 0 if config.device.enforce_eager else runner.graph_reserve_bytes(activation_bytes)
    if info.is_cuda:
        torch.cuda.empty_cache()
        free, total = torch.cuda.mem_get_info()
    else:
        total, free = info.memory_bytes, host_memory()[1]  # now, with the weights loaded
    taken = activation_bytes + graphs + rows
    allowed, budget = kv_budget(config, one_block, total_bytes=total, free_bytes=free, taken_bytes=taken)
    num_blocks = plan_kv(budget_bytes=budget, spec=spec, block_size=size, dtype_bytes=element)
    if spec.is_encoder:
        num_blocks = min(num_blocks, scratch_blocks(config))
    config = config.with_memory_limits(num_blocks - 1, one_block)  # block 0 is the null block
    measured_graphs = runner.allocate(config, num_blocks)
    ledger = MemoryLedger(
        device=info.name,
        total_bytes=total,
        allowed_bytes=allowed,
        weights_bytes=weights,
        activation_bytes=activation_bytes,
        graph_bytes=measured_graphs,
        kv_bytes=num_blocks * one_block,
        other_bytes=rows,
        block_bytes=one_block,
        num_blocks=num_blocks,
        block_size=size,
        max_model_len=config.model.max_model_len,
        tables_per_seq=config.cache.tables_per_seq,
        forms=runner.model.forms,
    )
    return config, ledger


def check_alive(core: EngineCore) -> None:
    """Raise if requests wait and nothing can run them: a scheduler's bug, better seen than hung on."""
    if core.scheduler.has_requests and core.next_wakeup() is None:
        raise EngineError(
            "requests are waiting but no step can be scheduled; please report this with the settings used"
        )
