"""The core of a text-generating model, and the features that take part in its loop."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Sequence
from functools import cached_property

from slipstream.core.make import make_scheduler
from slipstream.core.participants.adapters import AdapterAdmission
from slipstream.core.participants.speculation import Speculation
from slipstream.core.pooled import TextSequences
from slipstream.core.scheduler import Scheduler
from slipstream.costs.graph_sizes import padding
from slipstream.engine.beams import BeamSearches
from slipstream.engine.cache_news import CacheNews
from slipstream.engine.engine_core import EngineCore
from slipstream.engine.grammars.grammar import Grammars
from slipstream.engine.kv_events import PublishingCacheEvents
from slipstream.engine.listeners import JoiningTexts, MaskingGrammars, Searching
from slipstream.engine.live_weights import LiveWeights
from slipstream.engine.model_files import end_tokens
from slipstream.engine.text.tokenizer import Tokenizer
from slipstream.errors import ConfigError
from slipstream.messages.beams import BeamsRequest
from slipstream.messages.requests import EngineRequest
from slipstream.messages.steps import StepTime
from slipstream.messages.texts import TextsRequest
from slipstream.params.lora_request import LoRARequest
from slipstream.worker.executor import Executor


class DecoderCore(EngineCore):
    """The core of a text-generating model."""

    scheduler: Scheduler
    weights: LiveWeights

    def __init__(
        self, executor: Executor, load_tokenizer: Callable[[], Tokenizer | None] = lambda: None
    ) -> None:
        """`load_tokenizer` is called once, for the first grammar."""
        config, description = executor.config, executor.description
        spec = description.spec
        scheduler = make_scheduler(
            config.scheduling,
            config.cache,
            max_model_len=config.model.max_model_len,
            num_blocks=executor.ledger.num_blocks,
            salt=f"{description.path}:{config.model.dtype}",
            speculation=config.speculation,
            drafts_ahead=config.drafts_ahead,
            max_adapters=0 if config.lora is None else config.lora.max_loras,
            load_adapter=None if config.lora is None else executor.load_adapter,
            whole_media=spec.media is not None and spec.media.bidirectional is not None,
            routed_experts=config.model.routed_experts,
            stores=executor.stores,
            padded=padding(config, spec) if config.device.has_graphs else None,
        )
        self.grammars = Grammars(
            load_tokenizer, spec.vocab_size, lambda tokenizer: end_tokens(description, tokenizer)
        )
        self._adapters = None if config.lora is None else scheduler.part(AdapterAdmission)
        self._texts, self._searches = TextSequences(), BeamSearches()
        listeners = (
            MaskingGrammars(self.grammars, scheduler, executor),
            Searching(self._searches, scheduler, self.add),
            JoiningTexts(self._texts),
        )
        events = config.cache.events
        if events is not None and executor.stores:
            message = "kv_events_config: blocks that come back from lower tiers are not told; leave one of them out"
            raise ConfigError(message, field="kv_events_config")
        published = () if events is None else (PublishingCacheEvents(events, scheduler),)
        super().__init__(executor, scheduler, (*listeners, *published))
        if published:
            self._join(PublishingCacheEvents)
        self.weights = LiveWeights(executor, scheduler)

    def add(self, requests: Iterable[EngineRequest]) -> None:
        if self.weights.state.broken:
            self.weights.refuse()
        self._stalled = False
        requests = list(requests)
        for request in requests:
            # a fork gets it from its parent, without the pixels
            if request.media and request.fork_of is not None:
                parent = next(r for r in requests if r.request_id == request.fork_of)
                request = dataclasses.replace(request, media=parent.media)
            if is_masked := request.sampling.is_masked:
                self._join(MaskingGrammars)
            # must come first: a refused request must leave no grammar
            self.scheduler.add(request, held=is_masked)
            if is_masked and self.grammars.begin(request):
                self.scheduler.requests.release(request.request_id)
        # A prompt shared by several choices or beams is counted once.
        whole = (r for r in requests if r.parent is None)
        self._prompt_tokens += sum(len(r.encoder_token_ids) or r.num_prompt_tokens for r in whole)

    def add_texts(self, request: TextsRequest) -> None:
        self._join(JoiningTexts)
        self.add(self._texts.split(request))

    def shutdown(self) -> None:
        super().shutdown()
        self.scheduler.close()

    def add_beams(self, request: BeamsRequest) -> None:
        self._join(Searching)
        self.add([self._searches.begin(request)])

    def use_tokenizer(self, load: Callable[[], Tokenizer | None]) -> None:
        self.grammars.compiler.load = load

    def load_adapter(self, lora: LoRARequest) -> None:
        if self._adapters is None:
            return super().load_adapter(lora)  # refuses it
        self._adapters.load(lora)

    def unload_adapter(self, adapter_id: int) -> None:
        if self._adapters is None or adapter_id not in self._adapters.in_use():
            self.executor.unload_adapter(adapter_id)

    def _waiting_adapters(self) -> tuple[str, ...]:
        return () if self._adapters is None else self._adapters.waiting()

    @cached_property
    def cache_news(self) -> CacheNews:
        adapters = {} if self._adapters is None else self._adapters.roots
        return CacheNews(self.config.cache.block_size, self.scheduler, adapters)

    def _expect(self, times: Sequence[StepTime]) -> None:
        if self.config.speculation.limit:
            padded = padding(self.config, self.description.spec)
            self.scheduler.part(Speculation).costs.expect(
                times, lambda rows: sum(padded(0, rows, 1, by_rows=True) or (rows,))
            )

    def tend(self, at_once: int | None = None) -> bool:
        if self._in_flight or self._planned:
            return False
        self.scheduler.tend(at_once)
        return any(tiers.is_busy for tiers in self.scheduler.tiers)
