"""The core of an encoder."""

from __future__ import annotations

from slipstream.core.pooled import TextScheduler
from slipstream.engine.engine_core import EngineCore
from slipstream.messages.texts import TextsRequest
from slipstream.worker.executor import Executor


class TextCore(EngineCore):
    """The core of an encoder, which reads whole texts."""

    scheduler: TextScheduler

    def __init__(self, executor: Executor) -> None:
        config = executor.config
        scheduler = TextScheduler(
            config.scheduling,
            config.cache,
            max_model_len=config.model.max_model_len,
            num_blocks=executor.ledger.num_blocks,
        )
        super().__init__(executor, scheduler)

    def add_texts(self, request: TextsRequest) -> None:
        self._stalled = False
        self.scheduler.add(request)
        self._prompt_tokens += len(request.token_ids) // 4
